"""What a model looked at: attention lies where a model made by hand looks, and is that of one plain forward."""

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM, T5Config, T5ForConditionalGeneration

from hf_hybrid import patch_cross_attention
from hf_hybrid.commands import attended as attended_module
from hf_hybrid.commands.answers import Generate, Prompt, Summarize
from hf_hybrid.commands.attended import NotShown, Weights, attended, attention_weights, on_words
from hf_hybrid.commands.checkpoint import Checkpoint, load_checkpoint
from hf_hybrid.commands.flags import CheckpointArguments, DocumentArguments, GenerationArguments, SummarizeArguments
from hf_hybrid.data.tokenizer import byte_tokenizer
from hf_hybrid.models.srformer.segments import Segments
from tests.tolerances import assert_close

TEXT = "A document of some words, and a few more of them than that."
NEW = 9


def answerer_of(checkpoint, *, limit=None, prefix="", new=NEW):
    documents, generation = DocumentArguments(max_source_length=limit), GenerationArguments(max_new_tokens=new)
    if checkpoint.config.is_encoder_decoder:
        return Summarize(checkpoint, documents, generation, SummarizeArguments(source_prefix=prefix))
    return Generate(checkpoint, documents, generation)


def loaded(folder):
    return load_checkpoint(folder, "generate", CheckpointArguments(device="cpu"))


def written(answerer, text=TEXT):
    prompt = answerer.prompt(text)
    return prompt, answerer.outputs(answerer.pad([prompt]))


# ---- a model made by hand ----


def looking_at(letter):
    """Return a T5 whose decoder looks at one letter alone, wherever that stands.

    Embeddings pass the encoder unchanged; one feature is on in all tokens, and makes the queries; another is on in the
    letter alone, and makes the keys.
    """
    tokenizer = byte_tokenizer()
    sizes = {"vocab_size": len(tokenizer), "d_model": 8, "d_kv": 4, "d_ff": 4, "num_layers": 2, "num_heads": 2}
    ids = {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id}
    model = T5ForConditionalGeneration(T5Config(**sizes, **ids, decoder_start_token_id=tokenizer.pad_token_id))
    (key,) = tokenizer(letter, add_special_tokens=False)["input_ids"]
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "layer_norm" not in name:
                parameter.zero_()
        model.shared.weight[:, 0] = 1
        model.shared.weight[key, 1] = 1
        for block in model.decoder.block:
            attention = block.layer[1].EncDecAttention
            attention.q.weight[:, 0] = 3
            attention.k.weight[:, 1] = 3
    return model.eval(), tokenizer


@pytest.mark.parametrize("prefix", ["", "x: "])
def test_attention_lies_where_a_model_looks(prefix):
    model, tokenizer = looking_at("x")
    answerer = answerer_of(Checkpoint(model, tokenizer, None), prefix=prefix)
    text = "no, a fox,\nand a box"
    prompt, outputs = written(answerer, text)
    found = attended(answerer, text, prompt, outputs)
    assert "".join(found.pieces) == text
    assert sum(found.shares) == pytest.approx(1)
    shares = dict(zip((piece.strip() for piece in found.pieces), found.shares, strict=True))
    assert shares["fox,"] == pytest.approx(0.5, abs=1e-3)
    assert shares["box"] == pytest.approx(0.5, abs=1e-3)
    assert found.document == pytest.approx(2 / 3 if prefix else 1, abs=1e-3)
    assert (found.weights.layers, found.weights.heads, found.weights.outputs) == (2, 2, NEW)


def test_a_segment_is_read_alone():
    model, tokenizer = looking_at("x")
    model = patch_cross_attention(model, segment_size=6).eval()
    answerer = answerer_of(Checkpoint(model, tokenizer, None))
    text = "aaaaax bbbbb ccccc"  # with its end 19 tokens, in segments of 6, 6, 6 and 1
    prompt, outputs = written(answerer, text)
    assert len(prompt.ids) == 19
    found = attended(answerer, text, prompt, outputs)
    # of nine tokens 3, 2, 2 and 2 read a segment each; only the first has an x, the others are seen evenly
    weights = torch.tensor([0.0] * 5 + [3.0] + [2 / 6] * 12 + [2.0]) / 9
    assert_close(found.weights.of_tokens, weights, "float32 decode")
    wanted = torch.tensor([weights[:6].sum(), weights[6:12].sum(), weights[12:18].sum()])
    assert_close(torch.tensor(found.shares), wanted / wanted.sum(), "float32 decode")


# ---- one plain forward ----


@pytest.mark.parametrize("model_type", ["spade", "t5"])
def test_cross_attention_is_that_of_one_forward(model_type, folders):
    folder = folders(model_type, "AutoModelForSeq2SeqLM")
    answerer = answerer_of(loaded(folder))
    before = answerer.checkpoint.config._attn_implementation
    prompt, outputs = written(answerer)
    found = attention_weights(answerer, prompt, outputs)
    model = AutoModelForSeq2SeqLM.from_pretrained(folder, attn_implementation="eager").eval()
    ids = torch.tensor([prompt.ids])
    with torch.no_grad():
        layers = model(input_ids=ids, decoder_input_ids=outputs[:, :-1], output_attentions=True).cross_attentions
    assert_close(found.of_tokens, torch.stack(layers).mean((0, 1, 2, 3)), "float32 decode")
    assert found.of_tokens.sum().item() == pytest.approx(1, abs=1e-5)
    assert answerer.checkpoint.config._attn_implementation == before


@pytest.mark.parametrize("mode", ["sr", "segmented", "transformer_xl", "longt5"])
@pytest.mark.parametrize("horizon", [4, 30])
@pytest.mark.parametrize("model_type", ["srformer_bart", "srformer_t5"])
def test_segments_lie_where_the_model_has_them(model_type, horizon, mode, folders):
    folder = folders(model_type, "AutoModelForSeq2SeqLM", cross_attention_mode=mode, decoder_horizon=horizon)
    answerer = answerer_of(loaded(folder))
    prompt, outputs = written(answerer)
    found = attention_weights(answerer, prompt, outputs)
    assert found.of_tokens.sum().item() == pytest.approx(1, abs=1e-5)
    model = AutoModelForSeq2SeqLM.from_pretrained(folder, attn_implementation="eager").eval()
    length, tokens = len(prompt.ids), outputs.shape[1] - 1
    with torch.no_grad():
        layers = model(
            input_ids=torch.tensor([prompt.ids]),
            decoder_input_ids=outputs[:, :-1],
            decoder_horizon=horizon,
            output_attentions=True,
        ).cross_attentions
    weights = torch.stack(layers)[:, 0].mean((0, 1))  # tokens, keys
    segments = Segments(size=3, number=-(-length // 3), horizon=horizon)
    visited = torch.arange(segments.slots)[None] if segments.visited() is None else segments.visited()
    wanted = torch.zeros(3 * segments.number)
    for token, slot in enumerate(segments.slots_at(torch.arange(tokens))[0].tolist()):
        slots = [max(slot - 1, 0), slot] if mode == "transformer_xl" else [slot]
        for index, read in enumerate(slots):
            begin = 3 * visited[0, read].item()
            wanted[begin : begin + 3] += weights[token, 3 * index : 3 * index + 3]
        if mode == "longt5":
            for segment, weight in enumerate(weights[token, 3:]):
                members = range(3 * segment, min(3 * segment + 3, length))
                wanted[list(members)] += weight / len(members)
    assert_close(found.of_tokens, wanted[:length] / tokens, "float32 decode")


@pytest.mark.parametrize(
    ("model_type", "fields"),
    [
        ("bst", {}),
        ("bst", {"context_type": "multi_filter"}),
        ("spade", {}),
        ("spade", {"attention_type": "chunk"}),
        ("gpt2", {}),
    ],
    ids=lambda value: value if isinstance(value, str) else " ".join(map(str, value.values())),
)
def test_self_attention_is_that_of_one_forward(model_type, fields, folders):
    folder = folders(model_type, "AutoModelForCausalLM", **fields)
    answerer = answerer_of(loaded(folder), new=3)
    text = TEXT[:40]
    prompt, outputs = written(answerer, text)
    found = attended(answerer, text, prompt, outputs)
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
    ids = torch.cat([torch.tensor([prompt.ids]), outputs[:, :-1]], dim=1)
    with torch.no_grad():
        layers = model(ids, output_attentions=True).attentions
    weights = torch.stack(layers)[:, 0, :, len(prompt.ids) - 1 :].mean((0, 1, 2))
    assert_close(found.weights.of_tokens, weights[: len(prompt.ids)], "float32 decode")
    assert weights.sum().item() == pytest.approx(1, abs=1e-5)
    assert found.document == pytest.approx(weights[: len(prompt.ids)].sum().item(), abs=1e-5)
    assert sum(found.shares) == pytest.approx(1)


def test_a_prompt_of_one_token(folders):
    answerer = answerer_of(loaded(folders("spade", "AutoModelForCausalLM")))
    prompt, outputs = written(answerer, "a")
    assert len(prompt.ids) == 1
    assert attended(answerer, "a", prompt, outputs).shares == [1]


def test_of_a_long_output_the_beginning_is_used(folders, monkeypatch):
    answerer = answerer_of(loaded(folders("spade", "AutoModelForSeq2SeqLM")))
    prompt, outputs = written(answerer)
    monkeypatch.setattr(attended_module, "MOST_WEIGHTS", 4 * 2 * 2 * len(prompt.ids) + 1)
    found = attention_weights(answerer, prompt, outputs)
    assert found.outputs == 4
    monkeypatch.undo()
    assert_close(found.of_tokens, attention_weights(answerer, prompt, outputs[:, :5]).of_tokens, "float32 decode")


# ---- what is not shown ----


def test_models_without_attention_show_nothing(folders):
    answerer = answerer_of(loaded(folders("chela", "AutoModelForCausalLM")))
    with pytest.raises(NotShown, match="no attention weights"):
        attended(answerer, TEXT, *written(answerer))
    recurrent = folders("srformer_t5", "AutoModelForSeq2SeqLM", cross_attention_mode="recurrent")
    answerer = answerer_of(loaded(recurrent))
    with pytest.raises(NotShown, match="no attention weights"):
        attended(answerer, TEXT, *written(answerer))


def test_long_documents_show_nothing(folders):
    answerer = answerer_of(loaded(folders("spade", "AutoModelForSeq2SeqLM")))
    with pytest.raises(NotShown, match="at most 4,096 tokens"):
        attended(answerer, TEXT, Prompt([5] * 4097, 4097), torch.zeros(1, 2, dtype=torch.long))


# ---- words ----


def weights_of(*values):
    return Weights(torch.tensor(values), layers=1, heads=1, outputs=1)


def test_tokens_belong_to_the_word_that_they_stand_in():
    source = "do: one  two é"
    offsets = [(0, 3), (3, 5), (5, 7), (7, 9), (9, 12), (12, 14), (13, 14), (0, 0)]
    # "do:" and " o" begin in the prefix or at its end; "  " stands before "two"
    found = on_words(source, 4, offsets, weights_of(0.1, 0.05, 0.1, 0.2, 0.05, 0.1, 0.1, 0.3))
    assert found.pieces == ["ne", "  two", " é"]
    assert found.document == pytest.approx(0.55)
    assert [share * found.document for share in found.shares] == pytest.approx([0.1, 0.25, 0.2])


@pytest.mark.parametrize(("side", "read"), [("right", "One two"), ("left", "four five.")])
def test_of_a_cut_document_the_part_that_is_read_is_shown(side, read, folders):
    name = "AutoModelForSeq2SeqLM" if side == "right" else "AutoModelForCausalLM"
    answerer = answerer_of(loaded(folders("spade", name)), limit=8 if side == "right" else 10)
    text = "One two three four five."
    prompt, outputs = written(answerer, text)
    found = attended(answerer, text, prompt, outputs)
    assert "".join(found.pieces) == read
    assert sum(found.shares) == pytest.approx(1)


def test_many_words_are_gathered(monkeypatch):
    monkeypatch.setattr(attended_module, "MOST_PIECES", 3)
    source = "a b c d e f g"
    offsets = [(index, index + 1) for index in range(0, 13, 2)]
    found = on_words(source, 0, offsets, weights_of(*[0.1] * 6, 0.4))
    assert (found.pieces, found.words) == (["a b c", " d e f", " g"], 3)
    assert found.shares == pytest.approx([0.3, 0.3, 0.4])
    assert on_words("字" * 50, 0, [(0, 1), (49, 50)], weights_of(0.5, 0.5)).shares == [0.5, 0, 0.5]


def test_a_document_without_attention_shows_nothing():
    with pytest.raises(NotShown, match="no attention was on the document"):
        on_words("a", 0, [(0, 1), (0, 0)], weights_of(0.0, 1.0))
    with pytest.raises(NotShown, match="nothing of the document"):
        on_words("do: a", 4, [(0, 3)], weights_of(1.0))
