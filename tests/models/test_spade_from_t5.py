"""Starting SPADE from T5: at first it computes what its source does, then it trains; what does not fit is refused."""

import copy

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import nn

from hf_hybrid import SpadeConfig, SpadeEncoderModel, SpadeForConditionalGeneration, SpadeModel
from hf_hybrid.models.auto import ARCHITECTURES

from ..tolerances import assert_close

SHAPE = {
    "vocab_size": 64,
    "d_model": 32,
    "d_kv": 10,
    "d_ff": 48,
    "num_layers": 3,
    "num_decoder_layers": 2,
    "num_heads": 2,
    "decoder_start_token_id": 0,
}
V1_1 = {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}
FAMILY = {
    "t5": ("T5", {}),
    "t5 v1.1": ("T5", V1_1),
    "mt5": ("MT5", {}),
    "umt5": ("UMT5", {}),
    "longt5": ("LongT5", {"local_radius": 5}),
    "longt5 v1.1": ("LongT5", {"local_radius": 5, **V1_1}),
}
ENCODERS = [
    model
    for name, model in ARCHITECTURES["spade"][1].items()
    if name not in ("AutoModel", "AutoModelForSeq2SeqLM", "AutoModelForCausalLM")
]


def tiny_source(kind: str = "t5", ending: str = "ForConditionalGeneration", *, own_head: bool = False, **fields):
    """A tiny model of the T5 family with random weights everywhere."""
    prefix, own_fields = FAMILY[kind]
    torch.manual_seed(0)
    config = getattr(transformers, f"{prefix}Config")(**{**SHAPE, **own_fields, **fields})
    model = getattr(transformers, prefix + ending)(config).eval()
    for name, weight in model.named_parameters():
        if "layer_norm" in name:
            nn.init.uniform_(weight, 0.5, 1.5)
    if own_head:  # transformers ties it until weights that differ are loaded
        model.lm_head.weight = nn.Parameter(torch.randn(64, 32))
    return model


def tiny_batch(length: int = 23) -> dict[str, torch.Tensor]:
    """Documents padded on the left and on the right, and decoder inputs."""
    generator = torch.Generator().manual_seed(1)
    mask = torch.ones(3, length, dtype=torch.long)
    mask[0, -7:] = 0
    mask[1, :3] = 0
    return {
        "input_ids": torch.randint(2, 64, (3, length), generator=generator),
        "attention_mask": mask,
        "decoder_input_ids": torch.randint(2, 64, (3, 9), generator=generator),
    }


def assert_same_function(spade, source, batch):
    """Logits and the encoder's outputs are equal."""
    assert_close(spade(**batch).logits, source(**batch).logits, "float32 model")
    documents = {name: batch[name] for name in ("input_ids", "attention_mask")}
    kept = batch["attention_mask"].bool()
    actual, expected = (model.get_encoder()(**documents).last_hidden_state[kept] for model in (spade, source))
    assert_close(actual, expected, "float32 model")


# the start -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("own_head", [False, True], ids=["tied", "own head"])
@pytest.mark.parametrize("kind", FAMILY)
def test_it_starts_as_its_source(kind, own_head, tmp_path):
    """Within reach; LongT5's attention is as local as ours, so there the document is longer than its reach."""
    source, batch = tiny_source(kind, own_head=own_head), tiny_batch()
    source.save_pretrained(tmp_path)
    spade = SpadeForConditionalGeneration.from_t5(tmp_path)
    assert spade.config.attention_type == "window"
    assert spade.config.local_radius == (5 if "longt5" in kind else 128)
    assert spade.config.tie_word_embeddings is not own_head
    assert (spade.lm_head.weight is spade.get_input_embeddings().weight) is not own_head
    assert [layer.mixer.ssm is not None for layer in spade.get_encoder().layers] == [True, False, False]
    assert_same_function(spade, source, batch)
    documents = {name: batch[name] for name in ("input_ids", "attention_mask")}
    for beams in (1, 3):
        written, expected = (
            model.generate(**documents, max_new_tokens=12, do_sample=False, num_beams=beams)
            for model in (spade, source)
        )
        assert torch.equal(written, expected)


@pytest.mark.parametrize(
    "options",
    [
        {"global_layers": "all"},
        {"global_layers": "none"},
        {"decoder_global_layers": "all", "ssm_freeze": "none"},
        {"attention_type": "chunk", "chunk_size": 23},
        {"attention_type": "full"},
        {"local_radius": 22, "decoder_attention_type": "window"},
        {"ssm_state_size": 8, "ssm_postact": "gelu_glu"},
    ],
    ids=str,
)
def test_options_do_not_change_the_start(options, tmp_path):
    source, batch = tiny_source("umt5"), tiny_batch()
    spade = SpadeForConditionalGeneration.from_t5(source, **options)
    assert_same_function(spade, source, batch)
    spade.save_pretrained(tmp_path)
    again = SpadeForConditionalGeneration.from_pretrained(tmp_path)
    assert again.config.decoder_share_relative_bias is False
    assert_close(again(**batch).logits, spade(**batch).logits, "exact")
    documents = {name: batch[name] for name in ("input_ids", "attention_mask")}
    written, expected = (model.generate(**documents, max_new_tokens=8, do_sample=False) for model in (again, source))
    assert torch.equal(written, expected)


def test_the_reach_is_where_equality_ends():
    source = tiny_source()
    spade = SpadeForConditionalGeneration.from_t5(source, local_radius=9)
    at_reach, beyond = tiny_batch(10), tiny_batch(11)
    assert_same_function(spade, source, at_reach)
    difference = (spade(**beyond).logits - source(**beyond).logits)[2].abs().max()
    assert difference > 1e-4


def test_another_way_to_combine_is_another_start():
    source, batch = tiny_source(), tiny_batch()
    spade = SpadeForConditionalGeneration.from_t5(source, combine_mode="concat")
    assert (spade(**batch).logits - source(**batch).logits).abs().max() > 1e-2


# training ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("freeze", ["all", "none"])
def test_it_trains_beyond_the_reach(freeze):
    """The zero projection's gradient is there at once; that of what stands behind it follows."""
    spade = SpadeForConditionalGeneration.from_t5(tiny_source(), local_radius=3, ssm_freeze=freeze, dropout=0.0)
    mixer = spade.get_encoder().layers[0].mixer
    behind = [mixer.global_norm.weight, *([mixer.ssm.C] if freeze == "none" else [])]
    batch = tiny_batch(60)
    batch["labels"] = batch.pop("decoder_input_ids")
    optimizer = torch.optim.AdamW(spade.parameters(), lr=1e-3)
    losses = []
    for step in range(5):
        loss = spade(**batch).loss
        loss.backward()
        assert mixer.global_proj.weight.grad.abs().max() > 0
        for weight in behind:
            assert (weight.grad.abs().max() > 0) == (step > 0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert torch.isfinite(torch.tensor(losses)).all()
    assert losses[-1] < losses[0]
    assert mixer.global_proj.weight.abs().max() > 0
    far = batch["input_ids"].clone()
    far[2, 0] = (far[2, 0] + 1) % 60 + 2
    encoder = spade.eval().get_encoder()
    changed = (encoder(far).last_hidden_state - encoder(batch["input_ids"]).last_hidden_state)[2].abs().amax(-1)
    assert changed[3 * 3 + 1 :].max() > 1e-6  # what three layers of reach 3 do not see, the state space model does


def test_cached_decoding_keeps_the_state_once_the_projection_is_trained():
    spade = SpadeForConditionalGeneration.from_t5(tiny_source(), decoder_global_layers="all")
    for stack in (spade.get_encoder(), spade.get_decoder()):
        for layer in stack.layers:
            if layer.mixer.ssm is not None:
                nn.init.normal_(layer.mixer.global_proj.weight, std=0.3)
    batch = tiny_batch()
    expected, cache, steps = spade(**batch).logits, None, []
    tokens = batch.pop("decoder_input_ids")
    for position in range(tokens.shape[1]):
        step = tokens[:, position : position + 1]
        outputs = spade(**batch, decoder_input_ids=step, past_key_values=cache, use_cache=True)
        cache = outputs.past_key_values
        steps.append(outputs.logits)
    assert_close(torch.cat(steps, 1), expected, "float32 decode")


# the source ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["t5", "umt5"])
def test_a_loaded_model_is_left_alone(kind):
    source = tiny_source(kind, own_head=True)
    source.train()
    before, config = copy.deepcopy(source.state_dict()), source.config.to_dict()
    spade = SpadeForConditionalGeneration.from_t5(source, local_radius=7)
    assert source.training
    assert not spade.training
    memory = {weight.untyped_storage().data_ptr() for weight in source.parameters()}
    assert not memory & {weight.untyped_storage().data_ptr() for weight in spade.parameters()}
    with torch.no_grad():
        for weight in spade.parameters():
            weight.add_(1)
    assert source.config.to_dict() == config
    assert all(torch.equal(source.state_dict()[name], tensor) for name, tensor in before.items())


def test_a_folder_and_a_loaded_model_are_one(tmp_path):
    source = tiny_source()
    source.save_pretrained(tmp_path)
    models = []
    for origin in (source, tmp_path, str(tmp_path)):
        torch.manual_seed(7)
        models.append(SpadeForConditionalGeneration.from_t5(origin, ssm_state_size=8))
    for other in models[1:]:
        assert other.config.to_diff_dict() == models[0].config.to_diff_dict()
        for name, tensor in models[0].state_dict().items():
            assert torch.equal(tensor, other.state_dict()[name]), name
    torch.manual_seed(8)
    other = SpadeForConditionalGeneration.from_t5(source, ssm_state_size=8)
    ssm = "model.encoder.layers.0.mixer.ssm.C"
    assert not torch.equal(other.state_dict()[ssm], models[0].state_dict()[ssm])


def test_precision(tmp_path):
    tiny_source().to(torch.bfloat16).save_pretrained(tmp_path)
    spade = SpadeForConditionalGeneration.from_t5(tmp_path)
    assert spade.dtype == spade.config.dtype == torch.bfloat16
    assert {t.dtype for t in spade.get_encoder().layers[0].mixer.ssm.state_dict().values()} == {torch.float32}
    assert SpadeForConditionalGeneration.from_t5(tmp_path, dtype="float32").dtype == torch.float32
    for name in ("dtype", "torch_dtype"):
        assert SpadeForConditionalGeneration.from_t5(tiny_source(), **{name: torch.bfloat16}).dtype == torch.bfloat16


def test_options_of_from_pretrained(tmp_path):
    tiny_source().save_pretrained(tmp_path / "inner", variant="small")
    options = {"subfolder": "inner", "variant": "small", "local_files_only": True, "revision": "main"}
    spade = SpadeForConditionalGeneration.from_t5(tmp_path, **options, attn_implementation="eager", device_map="cpu")
    assert spade.config._attn_implementation == "eager"
    assert_same_function(spade, tiny_source(), tiny_batch())


def test_token_ids_and_generation_config_come_along(tmp_path):
    ids = {"pad_token_id": 3, "eos_token_id": [5, 6], "decoder_start_token_id": 4}
    source = tiny_source(**ids)
    source.generation_config.update(num_beams=2, max_new_tokens=7, no_repeat_ngram_size=3)
    source.save_pretrained(tmp_path)
    for origin in (source, tmp_path):
        spade = SpadeForConditionalGeneration.from_t5(origin)
        assert {field: getattr(spade.config, field) for field in ids} == ids
        settings = spade.generation_config
        assert (settings.num_beams, settings.max_new_tokens, settings.no_repeat_ngram_size) == (2, 7, 3)
        assert (settings.eos_token_id, settings.decoder_start_token_id) == ([5, 6], 4)
        assert settings is not source.generation_config
    spade = SpadeForConditionalGeneration.from_t5(source, decoder_start_token_id=9)
    assert spade.config.decoder_start_token_id == spade.generation_config.decoder_start_token_id == 9
    assert source.generation_config.decoder_start_token_id == 4
    assert spade.generate(torch.tensor([[2, 7, 8]]))[0, 0] == 9


def test_dropout_is_the_sources_unless_given():
    config = SpadeForConditionalGeneration.from_t5(tiny_source(dropout_rate=0.25), activation_dropout=0).config
    assert (config.dropout, config.attention_dropout, config.activation_dropout) == (0.25, 0.25, 0)


# other classes -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["t5 v1.1", "umt5", "longt5"])
@pytest.mark.parametrize("loaded", [True, False])
def test_the_model_without_head(kind, loaded, tmp_path):
    source, batch = tiny_source(kind, own_head=True), tiny_batch()
    if not loaded:
        source.save_pretrained(tmp_path)
    spade = SpadeModel.from_t5(source if loaded else tmp_path)
    expected = source(**batch, output_hidden_states=True).decoder_hidden_states[-1]
    assert_close(spade(**batch).last_hidden_state, expected, "float32 model")


@pytest.mark.parametrize("ending", ["EncoderModel", "Model", "ForConditionalGeneration"])
@pytest.mark.parametrize("kind", ["t5", "longt5 v1.1"])
def test_an_encoder_starts_from_all_that_have_one(kind, ending, tmp_path):
    source, batch = tiny_source(kind, ending), tiny_batch()
    source.save_pretrained(tmp_path)
    documents = {name: batch[name] for name in ("input_ids", "attention_mask")}
    kept = batch["attention_mask"].bool()
    expected = source.encoder(**documents).last_hidden_state[kept]
    for origin in (source, tmp_path):
        spade = SpadeEncoderModel.from_t5(origin)
        assert_close(spade(**documents).last_hidden_state[kept], expected, "float32 model")


@pytest.mark.parametrize("model_class", ENCODERS, ids=lambda model: model.__name__)
def test_every_encoder_head_starts_from_t5(model_class, tmp_path):
    source, batch = tiny_source("t5 v1.1", own_head=True), tiny_batch()
    source.save_pretrained(tmp_path)
    documents = {name: batch[name] for name in ("input_ids", "attention_mask")}
    kept = batch["attention_mask"].bool()
    expected = source.encoder(**documents).last_hidden_state[kept]
    for origin in (source, tmp_path):
        model = model_class.from_t5(origin, num_labels=5, global_layers="all")
        assert model.config.num_labels == 5
        hidden = model.base_model(**documents).last_hidden_state[kept]
        assert_close(hidden, expected, "float32 model")
        assert all(torch.isfinite(weight).all() for weight in model.parameters())


# what does not fit ---------------------------------------------------------------------------------------------------


def refused(model_class, origin, **options) -> str:
    with pytest.raises(ValueError) as error:  # noqa: PT011 - the message is what is returned
        model_class.from_t5(origin, **options)
    return str(error.value)


@pytest.mark.parametrize("loaded", [True, False])
def test_other_models_are_refused(loaded, tmp_path):
    config = transformers.BartConfig(
        vocab_size=64, d_model=16, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2,
        decoder_attention_heads=2, encoder_ffn_dim=16, decoder_ffn_dim=16,
    )  # fmt: skip
    config.save_pretrained(tmp_path)  # without weights: they are not asked for
    origin = transformers.BartForConditionalGeneration(config) if loaded else tmp_path
    assert refused(SpadeForConditionalGeneration, origin) == (
        "from_t5 supports the model types t5, mt5, umt5, longt5 (longt5 with local attention); got model type 'bart'"
    )


def test_transient_global_attention_is_refused():
    source = tiny_source("longt5", encoder_attention_type="transient-global")
    assert refused(SpadeEncoderModel, source) == (
        "from_t5 supports longt5 with encoder_attention_type 'local'; got 'transient-global', whose global tokens "
        "SPADE does not have"
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"hidden_size": 64}, "hidden_size must be 32, as in the source; got 64"),
        ({"num_decoder_layers": 3}, "num_decoder_layers must be 2, as in the source; got 3"),
        ({"norm_position": "post"}, "norm_position must be 'pre', as in the source; got 'post'"),
        ({"share_relative_bias": False}, "share_relative_bias must be True, as in the source; got False"),
        (
            {"tie_word_embeddings": False},
            "tie_word_embeddings must be left out: the source's weights determine it; got False",
        ),
        (
            {"locl_radius": 3},
            "from_t5 has no option or config field 'locl_radius'. Did you mean 'local_radius'?",
        ),
        ({"revision": "main"}, "revision must not be given for a loaded model"),
        (
            {"attention_type": "none", "global_layers": "all"},
            "SPADE with this config does not have the source's "
            "encoder.layers.0.mixer.attention.k_proj.weight (20, 32), "
            "encoder.layers.0.mixer.attention.o_proj.weight (32, 20), "
            "encoder.layers.0.mixer.attention.q_proj.weight (20, 32) and",
        ),
    ],
)
def test_options_that_cannot_be(options, message):
    assert refused(SpadeForConditionalGeneration, tiny_source(), **options).startswith(message)


def test_what_the_source_fixes_may_be_repeated():
    assert SpadeModel.from_t5(tiny_source(), hidden_size=32, norm_type="rms_norm").config.hidden_size == 32


@pytest.mark.parametrize(
    ("field", "value", "rule"),
    [
        ("local_radius", -1, "local_radius must not be negative; got -1"),
        ("global_layers", "bottom-4", "global_layers must select at most 3 layers"),
        ("combine_mode", "residul", "combine_mode must be one of concat, add, stack, residual; got 'residul'"),
        ("eos_token_id", 64, "eos_token_id must lie in the vocabulary"),
    ],
)
def test_the_configs_rules_hold(field, value, rule):
    with pytest.raises(Exception, match=rule):
        SpadeModel.from_t5(tiny_source(), **{field: value})


@pytest.mark.parametrize("origin", [None, 3, SpadeConfig()], ids=["None", "int", "config"])
def test_a_source_is_a_name_or_a_model(origin):
    assert refused(SpadeModel, origin) == (
        "name_or_model must be a name on the Hub, a folder, or a loaded model of transformers; "
        f"got {type(origin).__name__}"
    )


def test_a_language_model_cannot_start_from_t5():
    message = refused(ARCHITECTURES["spade"][1]["AutoModelForCausalLM"], tiny_source())
    assert message.startswith("SpadeForCausalLM cannot start from T5, whose decoder reads an encoder")


@pytest.mark.parametrize(
    ("ending", "model_class", "lacking"),
    [
        ("EncoderModel", SpadeForConditionalGeneration, "decoder.final_norm.weight"),
        ("EncoderModel", SpadeModel, "decoder.final_norm.weight"),
        ("Model", SpadeForConditionalGeneration, "lm_head.weight"),
    ],
)
def test_a_source_that_lacks_a_part(ending, model_class, lacking, tmp_path):
    source = tiny_source(ending=ending)
    message = refused(model_class, source)
    assert message.startswith(f"the source, a T5{ending}, has no weights for {lacking}")
    if lacking != "lm_head.weight":  # transformers takes a missing head for a tied one
        source.save_pretrained(tmp_path)
        assert refused(model_class, tmp_path).startswith(f"{tmp_path} lacks tensors of a T5")


def test_no_tensor_of_the_source_is_dropped():
    classifier = tiny_source(ending="ForTokenClassification")
    message = refused(SpadeEncoderModel, classifier)
    assert message == "SPADE does not have these tensors of the source: classifier.bias, classifier.weight"
    source = tiny_source()
    source.decoder.embed_tokens.weight = nn.Parameter(torch.randn(64, 32))
    assert refused(SpadeModel, source).endswith("of the source: decoder.embed_tokens.weight")
    source = tiny_source()
    source.encoder.block[1].adapter = nn.Linear(32, 32)
    message = refused(SpadeModel, source)
    assert message.endswith("of the source: encoder.block.1.adapter.bias, encoder.block.1.adapter.weight")
    source = tiny_source()
    source.decoder.block[1].layer[2].DenseReluDense.wo = nn.Linear(40, 32, bias=False)
    message = refused(SpadeModel, source)
    assert message.endswith("does not have the source's decoder.layers.1.feed_forward.down_proj.weight (32, 40)")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"encoder.block.1.layer.1.DenseReluDense.wo.weight": None}, "lacks tensors of a T5ForConditionalGeneration"),
        ({"encoder.block.1.adapter.weight": torch.zeros(2)}, "does not have these tensors of"),
    ],
    ids=["gone", "extra"],
)
def test_no_tensor_of_a_checkpoint_is_dropped(change, message, tmp_path):
    tiny_source().save_pretrained(tmp_path)
    weights = {**load_file(tmp_path / "model.safetensors"), **change}
    weights = {name: tensor for name, tensor in weights.items() if tensor is not None}
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    text = refused(SpadeForConditionalGeneration, tmp_path)
    assert message in text
    assert text.endswith(next(iter(change)))
