import gzip
import itertools
import json
import math
import random
import shutil
import types
from collections import Counter

import datasets
import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput

from hf_hybrid import SpadeConfig, SpadeForConditionalGeneration
from hf_hybrid.training import clm, splits
from hf_hybrid.training.flags.data import ClmArguments
from hf_hybrid.training.flags.overrides import parse_config_overrides
from hf_hybrid.training.model.learning_rates import recorded_rate
from hf_hybrid.training.report.page import clean
from tests.matrix import some
from tests.training.conftest import MODELS
from tests.training.pages import read_page

MODEL_TYPES = {
    "gpt2": "n_embd=32,n_layer=1,n_head=4",
    "spade": MODELS["spade"],
    "bst": "hidden_size=32,num_hidden_layers=2,num_attention_heads=4,intermediate_size=32,window=8,bst_layers=[1]",
}
NO_DROPOUT = {"gpt2": "resid_pdrop=0,embd_pdrop=0,attn_pdrop=0", "spade": "dropout=0,attention_dropout=0"}
WORDS = ["river", "stone", "forest", "cloud", "winter", "summer", "bridge", "market", "teacher", "music", "garden"]


def _read(path):
    return json.loads(path.read_text(encoding="utf-8"))


def _texts(count, seed=0):
    rng = random.Random(seed)
    return [" ".join(rng.choices(WORDS, k=rng.randint(5, 30))) + "." for _ in range(count)]


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Text files by split: a text on each line of json, and the same texts as lines of txt."""
    folder = tmp_path_factory.mktemp("texts")
    paths = {}
    for seed, (split, count) in enumerate({"train": 60, "validation": 20, "test": 12}.items()):
        texts = _texts(count, seed)
        paths[split] = folder / f"{split}.jsonl"
        paths[split].write_text("".join(json.dumps({"id": "x", "text": text}) + "\n" for text in texts))
        paths[f"{split}.txt"] = folder / f"{split}.txt"
        paths[f"{split}.txt"].write_text("".join(f"{text}\n" for text in texts), encoding="utf-8")
    return paths


@pytest.fixture
def command(tmp_path, data, files):
    """A function: model type, splits to use and more flags to a small command line."""

    def build(model_type, splits, *more, overrides="", output="out", suffix="", tokenizer="bytes"):
        config = ",".join(filter(None, [MODEL_TYPES.get(model_type), overrides]))
        named = [word for split in splits for word in (f"--{split}_file", str(files[split + suffix]))]
        return [
            *named, "--model_type", model_type, "--config_overrides", config or "{}", "--tokenizer_type", tokenizer,
            "--tokenizer_vocab_size", "300", "--cache_dir", str(data["cache"]), "--block_size", "32",
            "--per_device_train_batch_size", "4", "--per_device_eval_batch_size", "3", "--logging_steps", "1",
            "--use_cpu", "--disable_tqdm", "true", "--report", "false", "--output_dir", str(tmp_path / output), *more,
        ]  # fmt: skip

    return build


def _from_checkpoint(argv, folder, flag="--model_name_or_path"):
    """The same command line for a checkpoint and its tokenizer."""
    position = argv.index("--model_type")
    return [*argv[:position], flag, str(folder), *argv[position + 6 :]]


ALL = ("--do_train", "--do_eval", "--do_predict", "--max_steps", "2")


def _lines(path):
    return [json.loads(line)["text"] for line in path.read_text(encoding="utf-8").splitlines()]


def _nll(model, tokens):
    """Loss in nats of every token but the first, and whether it was guessed."""
    with torch.no_grad():
        logits = model(input_ids=torch.as_tensor(tokens)[None]).logits[0, :-1].float()
    targets = torch.as_tensor(tokens)[1:]
    return F.cross_entropy(logits, targets, reduction="none"), logits.argmax(-1) == targets


@pytest.mark.parametrize(
    ("model_type", "tokenizer_type"),
    some(itertools.product(MODEL_TYPES, ("bytes", "bpe")), ("spade", "bytes"), ("bst", "bytes"), ("gpt2", "bpe")),
)
def test_scores_are_those_of_the_saved_model(command, files, tmp_path, model_type, tokenizer_type):
    """Computed again by hand: blocks of the joined texts, each with its first token as context alone."""
    argv = command(model_type, ["train", "validation", "test"], *ALL, "--report", "true", tokenizer=tokenizer_type)
    metrics = clm.main(argv)
    folder = tmp_path / "out"
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    page = read_page(folder / "report.html")
    assert page.problems == []
    assert {name: float(value) for name, (value,) in page.tables["Metrics of this run"].items()} == metrics
    end = [tokenizer.eos_token_id]
    trained = [token for text in _lines(files["train"]) for token in tokenizer(text)["input_ids"] + end]
    counts = Counter(trained[: len(trained) // 32 * 32])
    vocab_size = model.config.vocab_size
    for split, prefix in (("validation", "eval"), ("test", "predict")):
        texts = _lines(files[split])
        tokens = [token for text in texts for token in tokenizer(text)["input_ids"] + end]
        assert tokens.count(tokenizer.eos_token_id) == len(texts)
        blocks = [tokens[start : start + 32] for start in range(0, len(tokens) - 31, 32)]
        losses, hits = (torch.cat(part) for part in zip(*(_nll(model, block) for block in blocks), strict=True))
        loss = losses.double().mean().item()
        num_bytes = sum(len(text.encode()) for text in texts)
        expected = {
            "loss": loss,
            "perplexity": math.exp(loss),
            "accuracy": hits.double().mean().item(),
            "bits_per_byte": loss / math.log(2) * len(tokens) / num_bytes,
            "tokens": 31 * len(blocks),
            "samples": len(blocks),
        }
        for name, value in expected.items():
            assert metrics[f"{prefix}_{name}"] == pytest.approx(value, rel=1e-5), name
        targets = [token for block in blocks for token in block[1:]]
        shares = [(counts[token] + 1) / (counts.total() + vocab_size) for token in targets]
        likeliest = max(range(vocab_size), key=lambda token: counts[token])
        unigram = {"loss": -np.mean(np.log(shares)), "accuracy": np.mean(np.array(targets) == likeliest)}
        uniform = {"loss": math.log(vocab_size), "accuracy": 1 / vocab_size}
        table = page.tables[f"Scores on the {split} split, {len(targets):,} tokens"]
        for row, plain in (
            ("this model", expected),
            ("unigram frequencies", unigram),
            ("uniform over the vocabulary", uniform),
        ):
            bits = plain["loss"] / math.log(2) * len(tokens) / num_bytes
            values = [plain["loss"], math.exp(plain["loss"]), bits, plain["accuracy"]]
            assert [float(value) for value in table[row]] == pytest.approx(values, rel=1e-5), row
    for sample in page.samples:  # of the test split, the last one
        block = next(block for block in blocks if tokenizer.decode(block[:16]) == sample["context"])
        ids = torch.tensor([block[:16]])
        generated = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=16, do_sample=False)
        assert sample["true continuation"] == tokenizer.decode(block[16:])
        written = clean(tokenizer.decode(generated[0, 16:]))
        assert sample["generated"] == (written if written.strip() else "(blank)")
    assert len(page.samples) == 3
    assert metrics["perplexity"] == metrics["eval_perplexity"]
    written = _read(folder / "all_results.json")
    assert written == {name: metrics[name] for name in written}
    for part in ("train", "eval", "predict"):
        assert _read(folder / f"{part}_results.json").items() <= written.items()
    assert "text-generation" in (folder / "README.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def trained(files, data, tmp_path_factory):
    """A small GPT-2 of bytes that has learnt a little."""
    folder = tmp_path_factory.mktemp("trained") / "out"
    clm.main(
        [
            "--train_file", str(files["train.txt"]), "--model_type", "gpt2", "--config_overrides", MODEL_TYPES["gpt2"],
            "--tokenizer_type", "bytes", "--cache_dir", str(data["cache"]), "--block_size", "32", "--do_train",
            "--learning_rate", "0.01", "--max_steps", "20", "--use_cpu", "--disable_tqdm", "true", "--report", "false",
            "--output_dir", str(folder),
        ]
    )  # fmt: skip
    return folder


@pytest.mark.parametrize(("length", "context"), [(24, 7), (24, 23), (50, None), (300, 100), (301, 1)])
def test_windows_score_every_token_once_with_its_context(command, trained, tmp_path, length, context):
    """Against every token by itself, after the tokens that the rule puts before it."""
    text = " ".join(_texts(20, seed=5))[:300]
    (tmp_path / "text.txt").write_text(text, encoding="utf-8")
    argv = command("gpt2", [], "--do_predict", "--test_file", str(tmp_path / "text.txt"))
    argv += ["--eval_sequence_length", str(length)]
    argv += [] if context is None else ["--eval_context_window", str(context)]
    metrics = clm.main(_from_checkpoint(argv, trained))

    model, tokenizer = AutoModelForCausalLM.from_pretrained(trained).eval(), AutoTokenizer.from_pretrained(trained)
    tokens = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert len(tokens) == 300
    context = context or 1
    losses, hits = [], []
    for target in range(1, len(tokens)):
        window = max(0, (target - context) // (length - context))
        start = window * (length - context)
        assert target - start < length
        assert start == 0 or target - start >= context
        loss, right = _nll(model, tokens[start : target + 1])
        losses.append(loss[-1].item())
        hits.append(right[-1].item())
    assert metrics["predict_tokens"] == len(losses) == 299
    assert metrics["predict_loss"] == pytest.approx(np.mean(losses), rel=1e-5)
    assert metrics["predict_perplexity"] == pytest.approx(math.exp(np.mean(losses)), rel=1e-4)
    assert metrics["predict_accuracy"] == pytest.approx(np.mean(hits))
    assert metrics["predict_bits_per_byte"] == pytest.approx(np.mean(losses) / math.log(2), rel=1e-5)


def test_more_context_scores_better(command, trained):
    """What the windows are for; a check that windows and blocks differ in context alone."""
    argv = _from_checkpoint(command("gpt2", ["validation"], "--do_eval", suffix=".txt"), trained)
    blocks = clm.main([*argv, "--block_size", "4", "--overwrite_output_dir"])
    windows = clm.main(
        [*argv, "--eval_sequence_length", "32", "--eval_context_window", "16", "--overwrite_output_dir"]
    )
    assert windows["eval_loss"] < blocks["eval_loss"]
    assert windows["eval_tokens"] > blocks["eval_tokens"]


def test_limits_count_blocks_and_windows(command, trained):
    argv = _from_checkpoint(command("gpt2", ["validation"], "--do_eval", suffix=".txt"), trained)
    argv += ["--max_eval_samples", "3", "--overwrite_output_dir"]
    assert clm.main(argv)["eval_tokens"] == 3 * 31
    argv += ["--eval_sequence_length", "20", "--eval_context_window", "5"]
    assert clm.main(argv)["eval_tokens"] == 19 + 2 * 15


# ---- losses ----


class OtherConfig(PreTrainedConfig):
    model_type = "other_lm"
    hidden_size: int = 16
    vocab_size: int = 300
    num_hidden_layers: int = 1


class OtherModel(PreTrainedModel):
    """A language model of a class that transformers does not know, whose loss does not ask for a number of items."""

    config_class = OtherConfig

    def __init__(self, config):
        super().__init__(config)
        self.embedding = nn.Embedding(config.vocab_size, config.hidden_size)
        self.mixer = nn.GRU(config.hidden_size, config.hidden_size, batch_first=True)
        self.head = nn.Linear(config.hidden_size, config.vocab_size)
        self.post_init()

    def get_input_embeddings(self):
        return self.embedding

    def forward(self, input_ids=None, attention_mask=None, labels=None, **kwargs):
        logits = self.head(self.mixer(self.embedding(input_ids))[0])
        loss = None
        if labels is not None:
            loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return CausalLMOutput(loss=loss, logits=logits)


AutoConfig.register("other_lm", OtherConfig, exist_ok=True)
AutoModelForCausalLM.register(OtherConfig, OtherModel, exist_ok=True)


@pytest.mark.parametrize("smoothing", some([0.0, 0.2], 0.2))
@pytest.mark.parametrize("model_type", some(["gpt2", "spade", "other_lm"], "spade", "other_lm"))
def test_losses_are_shifted_and_accumulated_whatever_the_class(
    command, files, tmp_path, monkeypatch, model_type, smoothing
):
    first = {}
    train = clm.train

    def spy(trainer, resume_from, argv):
        model = trainer.model.eval()
        batch = trainer.data_collator([trainer.train_dataset[i] for i in range(8)])
        with torch.no_grad():
            logits = model(input_ids=batch["input_ids"]).logits[:, :-1].flatten(0, 1)
        targets = batch["labels"][:, 1:].flatten()
        first["loss"] = F.cross_entropy(logits, targets, label_smoothing=smoothing).item()
        first["plain"] = F.cross_entropy(logits, targets).item()
        return train(trainer, resume_from, argv)

    monkeypatch.setattr(clm, "train", spy)
    logs = {}
    for size, steps in ((8, 1), (2, 4)):
        argv = command(
            model_type, ["train"], "--do_train", "--do_eval", "--max_steps", "1", "--save_strategy", "no",
            "--label_smoothing_factor", str(smoothing), "--per_device_train_batch_size", str(size),
            "--gradient_accumulation_steps", str(steps), "--learning_rate", "0", "--max_train_samples", "8",
            "--validation_file", str(files["train"]), "--max_eval_samples", "8",
            overrides=NO_DROPOUT.get(model_type, ""), output=f"{steps}",
        )  # fmt: skip
        metrics = clm.main(argv)
        logs[steps] = _read(tmp_path / f"{steps}" / "trainer_state.json")["log_history"][0]
        assert metrics["eval_loss"] == pytest.approx(first["plain"], rel=1e-5)  # never smoothed
    assert logs[1]["loss"] == pytest.approx(first["loss"], rel=1e-5)
    assert logs[4]["loss"] == pytest.approx(logs[1]["loss"], rel=1e-5)
    assert logs[4]["grad_norm"] == pytest.approx(logs[1]["grad_norm"], rel=1e-4)


@pytest.mark.parametrize("model_type", some(["gpt2", "spade", "other_lm"], "spade"))
def test_a_first_batch_without_labels_does_not_tell_how_losses_are_averaged(command, monkeypatch, model_type):
    found = {}
    train = clm.train

    def spy(trainer, resume_from, argv):
        batch = trainer.data_collator([trainer.train_dataset[i] for i in range(2)])
        labels = batch.pop("labels")
        count = 3 * labels[:, 1:].ne(-100).sum()
        trainer.compute_loss(trainer.model, {**batch, "labels": torch.full_like(labels, -100)}, False, count)
        found["loss"] = trainer.compute_loss(trainer.model, {**batch, "labels": labels}, False, count).item()
        with torch.no_grad():
            logits = trainer.model(**batch).logits[:, :-1].flatten(0, 1)
        found["expected"] = F.cross_entropy(logits, labels[:, 1:].flatten()).item() / 3
        return train(trainer, resume_from, argv)

    monkeypatch.setattr(clm, "train", spy)
    flags = ["--do_train", "--max_steps", "1", "--save_strategy", "no", "--max_train_samples", "8"]
    clm.main(command(model_type, ["train"], *flags, overrides=NO_DROPOUT.get(model_type, "")))
    assert found["loss"] == pytest.approx(found["expected"], rel=1e-5)


# ---- data ----


def test_lines_of_a_file_are_one_text_unless_their_breaks_are_left_out(command, files, tmp_path, trained):
    packed = tmp_path / "packed.txt.gz"
    packed.write_bytes(gzip.compress(b"one\n\ntwo\r\nthree"))
    seen = {}

    def spy(rows, *args):
        seen["rows"] = rows.to_list()
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(clm, "_examples", spy)
        argv = _from_checkpoint(command("gpt2", [], "--do_eval", "--validation_file", str(packed)), trained)
        for more, expected in (
            ([], ["one\n", "\n", "two\n", "three"]),
            (["--no_keep_linebreaks"], ["one</s>", "</s>", "two</s>", "three</s>"]),
        ):
            with pytest.raises(KeyboardInterrupt):
                clm.main([*argv, *more])
            tokenizer = AutoTokenizer.from_pretrained(trained)
            assert [tokenizer.decode(row["input_ids"]) for row in seen["rows"]] == expected
            bare = [text.replace("</s>", "") for text in expected]
            assert [row["num_bytes"] for row in seen["rows"]] == [len(text) for text in bare]


def test_words_are_tokens_by_frequency(command, files, tmp_path):
    metrics = clm.main(command("gpt2", ["train", "validation"], *ALL[:2], "--max_steps", "1", tokenizer="words"))
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert _read(tmp_path / "out" / "config.json")["vocab_size"] == len(tokenizer)
    words = [word for text in _lines(files["train"]) for word in text.split()]
    counts = [words.count(token) for token in tokenizer.convert_ids_to_tokens(range(3, len(tokenizer)))]
    assert counts == sorted(counts, reverse=True)
    assert counts[0] > counts[-1] > 0
    assert math.isfinite(metrics["eval_bits_per_byte"])


def test_a_validation_split_is_cut_from_the_training_split(command, files):
    argv = command(
        "gpt2", ["train"], "--do_train", "--do_eval", "--max_steps", "1", "--validation_split_percentage", "25"
    )
    metrics = clm.main(argv)
    sizes = [len(text.encode()) + 1 for text in _lines(files["train"])]  # with the end
    assert metrics["eval_samples"] == sum(sizes[:15]) // 32
    assert metrics["train_samples"] == sum(sizes[15:]) // 32


@pytest.mark.parametrize("suffix", ["", ".txt"])
def test_streams_score_what_files_do(command, files, trained, suffix):
    argv = _from_checkpoint(
        command("gpt2", ["validation"], "--do_eval", "--overwrite_output_dir", suffix=suffix), trained
    )
    for more in ([], ["--max_eval_samples", "5"], ["--eval_sequence_length", "20"]):
        read, streamed = clm.main([*argv, *more]), clm.main([*argv, *more, "--streaming"])
        for name in ("loss", "tokens", "samples", "accuracy"):
            assert streamed[f"eval_{name}"] == pytest.approx(read[f"eval_{name}"], rel=1e-6), (more, name)
    assert streamed["eval_bits_per_byte"] == pytest.approx(read["eval_bits_per_byte"], rel=1e-6)


def test_a_stream_is_trained_on_and_validated_on_its_first_rows_of_every_hundred(command, tmp_path):
    rows = [{"text": f"row {number} of a long stream of rows"} for number in range(250)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    argv = command("spade", [], "--train_file", str(tmp_path / "rows.jsonl"), "--streaming", "--do_train", "--do_eval")
    argv += ["--max_steps", "3", "--validation_split_percentage", "2", "--report", "true"]
    metrics = clm.main(argv)
    page = read_page(tmp_path / "out" / "report.html")
    assert page.problems == []
    assert page.facts["train split"] == "streamed"
    assert "uniform over the vocabulary" in page.text
    assert "The training split was streamed: its frequencies are no baseline here." in page.text
    assert float(page.facts["training tokens per second"]) > 0
    held_out = [row["text"] for number, row in enumerate(rows) if number % 100 < 2]
    assert metrics["eval_samples"] == sum(len(text) + 1 for text in held_out) // 32
    assert math.isfinite(metrics["train_loss"])
    assert "train_samples" not in metrics


def test_without_data_a_small_run_on_documentation(command, tmp_path, monkeypatch, caplog):
    asked = []
    rows = datasets.Dataset.from_dict({"text": _texts(40), "source": ["a"] * 40})

    def load(*, dataset_name, **kwargs):
        asked.append(dataset_name)
        return datasets.DatasetDict(dict.fromkeys(("train", "validation", "test"), rows))

    monkeypatch.setattr(splits, "load_raw_datasets", load)
    monkeypatch.setattr(ClmArguments, "small_run", {"block_size": 16, "max_train_samples": 8, "max_eval_samples": 4})
    argv = command("spade", [], "--do_train", "--do_eval", "--max_steps", "1", "--lr_scheduler_type", "constant")
    position = argv.index("--block_size")
    argv = argv[:position] + argv[position + 2 :]
    with caplog.at_level("INFO"):
        metrics = clm.main(argv)
    assert asked == ["embedded:text"]
    assert "embedded:text" in caplog.text
    assert (metrics["train_samples"], metrics["eval_samples"], metrics["eval_tokens"]) == (8, 4, 60)
    rate = recorded_rate(AutoConfig.from_pretrained(tmp_path / "out"))
    assert [record.message for record in caplog.records if "learning_rate" in record.message] == [
        f"--learning_rate is {rate.value:g}, recorded for a new spade model of about this size "
        f"({rate.size}: {rate.source})."
    ]
    clm.main([*argv, "--max_steps", "2", "--resume_from_checkpoint", "auto"])
    history = _read(tmp_path / "out" / "trainer_state.json")["log_history"]
    assert [entry["learning_rate"] for entry in history if "loss" in entry] == [rate.value, rate.value]


def test_a_new_model_at_the_rate_of_fine_tuning_is_warned_of_once(command, tmp_path, caplog):
    clm.main(command("spade", ["train"], "--do_train", "--max_steps", "1"))
    assert caplog.text.count("transformers' rate for fine-tuning: for a new spade model") == 1
    caplog.clear()
    argv = command("spade", ["train"], "--do_train", "--max_steps", "1", "--overwrite_output_dir")
    shutil.copytree(tmp_path / "out", tmp_path / "model")
    clm.main(_from_checkpoint(argv, tmp_path / "model"))
    assert "fine-tuning" not in caplog.text


# ---- the model ----


def test_an_architecture_of_several_roles_becomes_a_decoder(command, tmp_path, caplog):
    widths = "hidden_size=32,num_hidden_layers=1,num_attention_heads=4,intermediate_size=32"
    clm.main(command("bert", ["train"], "--do_train", "--max_steps", "1", overrides=widths))
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    assert model.config.is_decoder
    tokens = torch.arange(3, 13)[None]
    changed = tokens.clone()
    changed[0, 5:] = 100
    with torch.no_grad():
        one, two = (model(input_ids=ids).logits[0, :5] for ids in (tokens, changed))
    torch.testing.assert_close(one, two)
    model.config.is_decoder = False
    model.save_pretrained(tmp_path / "encoder")
    AutoTokenizer.from_pretrained(tmp_path / "out").save_pretrained(tmp_path / "encoder")
    clm.main(_from_checkpoint(command("bert", ["train"], "--do_eval", output="again"), tmp_path / "encoder"))
    assert "is_decoder is set to True" in caplog.text


def test_the_block_size_follows_the_model(command, files, tmp_path, no_data):
    def without_block(argv):
        position = argv.index("--block_size")
        return argv[:position] + argv[position + 2 :]

    argv = command("gpt2", ["train"], "--do_train", "--max_steps", "1", overrides="n_positions=48")
    metrics = clm.main(without_block(argv))
    sizes = [len(text.encode()) + 1 for text in _lines(files["train"])]
    assert metrics["train_samples"] == sum(sizes) // 48
    argv = command("gpt2", ["train"], "--do_train", "--max_steps", "1", overrides="n_positions=16", output="raised")
    clm.main(argv)
    assert _read(tmp_path / "raised" / "config.json")["n_positions"] == 32
    no_data()
    argv = _from_checkpoint(command("gpt2", ["train"], "--do_train", output="more"), tmp_path / "out")
    with pytest.raises(ValueError, match=r"--block_size must be at most the model's 48 .*; got 49"):
        clm.main([*argv, "--block_size", "49"])
    with pytest.raises(ValueError, match=r"--eval_sequence_length must be at most the model's 48 .*; got 60"):
        clm.main([*argv, "--eval_sequence_length", "60"])


# ---- bad input ----

# added to a command line that works -> what the message must say, before any data are loaded
REFUSED = {
    "block": (["--block_size", "0"], ["--block_size must be a positive integer; got 0"]),
    "block of one": (["--block_size", "1"], ["--block_size must be at least 2", "got 1"]),
    "percentage": (["--validation_split_percentage", "100"], ["--validation_split_percentage", "got 100"]),
    "context alone": (["--eval_context_window", "4"], ["--eval_context_window needs --eval_sequence_length"]),
    "context as long as the window": (
        ["--eval_context_window", "8", "--eval_sequence_length", "8"],
        ["--eval_context_window must be smaller than --eval_sequence_length 8; got 8"],
    ),
    "no context": (
        ["--eval_context_window", "0", "--eval_sequence_length", "8"],
        ["--eval_context_window must be a positive integer; got 0"],
    ),
    "window": (["--eval_sequence_length", "-1"], ["--eval_sequence_length must be a positive integer; got -1"]),
    "stream without end": (["--streaming"], ["--streaming needs --max_steps"]),
    "stream without tokenizer": (
        ["--streaming", "--max_steps", "1", "--tokenizer_type", "bpe"],
        ["--streaming needs a tokenizer", "--tokenizer_type bytes"],
    ),
    "tokenizer type": (["--tokenizer_type", "byte"], ["--tokenizer_type", "'byte'", "Did you mean 'bytes'?"]),
    "two tokenizers": (["--tokenizer_name", "x"], ["--tokenizer_type bytes makes a tokenizer", "x"]),
    "corpus of another script": (
        ["--dataset_name", "embedded:docstrings"],
        ["dataset_name must be one of embedded:text", "got 'embedded:docstrings'"],
    ),
    "no test split": (["--do_predict"], ["--do_predict needs a test split", "--test_file"]),
    "no such file": (["--validation_file", "/no/such.txt"], ["validation_file must be an existing file"]),
    "unknown format": (
        ["--validation_file", "x.pdf"],
        ["validation_file must end in .csv, .tsv, .json, .jsonl, .parquet, .txt"],
    ),
    "model without a class": (["--model_type", "t5"], ["--model_type t5", "AutoModelForCausalLM"]),
}


@pytest.mark.parametrize("case", REFUSED)
def test_bad_arguments_are_refused_before_any_work(command, tmp_path, no_data, case):
    no_data()
    more, expected = REFUSED[case]
    with pytest.raises(ValueError) as raised:  # noqa: PT011 - the message is looked at below
        clm.main(command("gpt2", [] if "--dataset_name" in more else ["train"], "--do_train", *more))
    for words in expected:
        assert words in str(raised.value)
    assert not (tmp_path / "out").exists()


# the rows of the training file, more flags -> what the message must say, before a model is built
BAD_DATA = {
    "too short": (
        [{"text": "few words"}] * 2,
        [],
        ["split 'train' must hold at least --block_size 32 tokens; got 20"],
    ),
    "row without text": (
        [{"text": "some words"}] * 9 + [{"text": None}],
        [],
        ["split 'train' must hold text in every row", "'text' of row 10", "drop_empty_rows"],
    ),
    "numbers": (
        [{"text": 7}],
        [],
        ["column 'text' of split 'train' must hold text; row 1 (the first row is 1) holds int: 7"],
    ),
    "several columns": ([{"a": "x", "b": "y"}], [], ["text_column must be one of the columns of every split: a, b"]),
    "no such column": (
        [{"title": "x", "body": "y"}],
        ["--text_column", "boddy"],
        ["text_column must be one of", "got 'boddy'. Did you mean 'body'?"],
    ),
    "nothing to cut": (
        [{"text": "x" * 99}],
        ["--do_eval"],
        ["'train' must hold at least two rows", "--validation_file"],
    ),
    "row without text in a stream": (
        [{"text": "some words"}, {"text": None}],
        ["--streaming", "--max_steps", "1"],
        ["train.jsonl, row 2 (the first row is 1): column 'text' must hold text in every row; got NoneType"],
    ),
    "nothing but blank rows": ([{"text": " "}] * 99, [], ["'train'", "more than spaces; got 99 blank ones"]),
    "processes that tokenize a stream": (
        [{"text": "some words"}],
        ["--streaming", "--max_steps", "1", "--preprocessing_num_workers", "2"],
        ["--preprocessing_num_workers must be 1 or left out with --streaming", "got 2"],
    ),
    "short stream": (
        [{"text": "few words"}],
        ["--streaming", "--max_steps", "1"],
        ["split 'train' must hold at least --block_size 32 tokens; got fewer"],
    ),
    "one token": (
        [{"text": "x" * 99}],
        ["--do_predict", "--eval_sequence_length", "9", "--test_file", "ONE"],
        ["split 'test' must hold at least two tokens; got 1"],
    ),
}


@pytest.mark.parametrize("case", BAD_DATA)
def test_bad_data_are_refused_before_a_model_is_built(command, tmp_path, monkeypatch, case):
    def work(*args, **kwargs):
        raise AssertionError("a model was built before the data were checked")

    monkeypatch.setattr(clm, "load_model", work)
    rows, more, expected = BAD_DATA[case]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    (tmp_path / "one.txt").write_text("x", encoding="utf-8")
    more = [str(tmp_path / "one.txt") if word == "ONE" else word for word in more]
    argv = command("gpt2", [], "--do_train", "--train_file", str(tmp_path / "train.jsonl"), *more)
    with pytest.raises(ValueError) as raised:  # noqa: PT011 - the message is looked at below
        clm.main(argv)
    for words in expected:
        assert words in str(raised.value)
    assert not (tmp_path / "out").exists()


def test_rows_without_text_can_be_left_out(command, tmp_path):
    rows = [{"text": "x" * 40}, {"text": None}, {"text": "y" * 40}]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    argv = command("gpt2", [], "--do_train", "--train_file", str(tmp_path / "train.jsonl"), "--drop_empty_rows")
    assert clm.main([*argv, "--max_steps", "1"])["train_samples"] == 82 // 32
    assert "train_loss" in clm.main([*argv, "--max_steps", "1", "--streaming", "--overwrite_output_dir"])


def test_a_memory_shorter_than_the_blocks_is_warned_of(caplog):
    for lengths, flag in (((64, None), "block_size"), ((8, 64), "eval_sequence_length")):
        for memory, warned in ((64, False), (63, True)):
            caplog.clear()
            config = SpadeConfig(is_decoder=True, is_encoder_decoder=False, ssm_type="hyena", ssm_l_max=memory)
            clm._fit_lengths(config, types.SimpleNamespace(block_size=lengths[0], eval_sequence_length=lengths[1]))
            assert (f"ssm_l_max {memory} is shorter than --{flag} 64" in caplog.text) == warned


def test_a_checkpoint_of_another_role_is_refused_before_data_are_read(command, tmp_path, no_data):
    config = SpadeConfig(**parse_config_overrides(MODELS["spade"], SpadeConfig))
    SpadeForConditionalGeneration(config).save_pretrained(tmp_path / "seq2seq")
    argv = command("spade", ["train"], "--do_train")
    no_data()
    for flag in ("--model_name_or_path", "--config_name"):
        with pytest.raises(ValueError, match=f"{flag} .*seq2seq: is_encoder_decoder must be False"):
            clm.main(_from_checkpoint(argv, tmp_path / "seq2seq", flag))
