import json
import random
import types

import datasets
import numpy as np
import pytest
import torch
from torch.nn import functional as F
from transformers import (
    AutoConfig,
    AutoModelForSeq2SeqLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    EvalPrediction,
)

import hf_hybrid
from hf_hybrid.data.classification import Labels
from hf_hybrid.data.preprocessing import guess_labels
from hf_hybrid.metrics import load_metric
from hf_hybrid.training import glue, splits
from hf_hybrid.training.flags.data import GlueArguments
from hf_hybrid.training.report import glue as report
from hf_hybrid.training.scores.glue import compute_metrics
from tests.matrix import some
from tests.training.conftest import MODELS
from tests.training.pages import read_page

_WIDTHS = "hidden_size=32,num_hidden_layers=1,num_attention_heads=4,intermediate_size=32"
CLASSIFIERS = {"bert": f"{_WIDTHS},max_position_embeddings=64", "spade": MODELS["spade"]}
NO_DROPOUT = {"bert": "hidden_dropout_prob=0,attention_probs_dropout_prob=0", "spade": "dropout=0,attention_dropout=0"}
WORDS = ["river", "stone", "forest", "cloud", "winter", "summer", "bridge", "market", "teacher", "music", "garden"]


def _read(path):
    return json.loads(path.read_text(encoding="utf-8"))


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def pairs(count, label, seed=0, columns=("sentence1", "sentence2")):
    """Sentence pairs, with the label that a function gives them."""
    rng = random.Random(seed)
    rows = []
    for number in range(count):
        sentences = [" ".join(rng.choices(WORDS, k=rng.randint(3, 12))) for _ in columns]
        rows.append({"idx": number, **dict(zip(columns, sentences, strict=True)), "label": label(number, sentences)})
    return rows


def _shares_words(number, sentences):
    return "match" if len(set(sentences[0].split()) & set(sentences[1].split())) > 2 else "mismatch"


def _alternating(number, sentences):
    return number % 2


@pytest.fixture
def command(tmp_path, data):
    """A function: model type and rows by split to a small command line, to which more flags are added."""

    def build(model_type, splits, *more, overrides="", output="out"):
        config = ",".join(filter(None, [CLASSIFIERS.get(model_type), overrides]))
        files = []
        for split, rows in splits.items():
            files += [f"--{split}_file", rows if isinstance(rows, str) else write(tmp_path / f"{split}.jsonl", rows)]
        return [
            *files, "--model_type", model_type, "--config_overrides", config, "--tokenizer_vocab_size", "300",
            "--cache_dir", str(data["cache"]), "--max_seq_length", "48", "--per_device_train_batch_size", "4",
            "--logging_steps", "1", "--use_cpu", "--disable_tqdm", "true", "--report", "false", "--output_dir",
            str(tmp_path / output), *more,
        ]  # fmt: skip

    return build


ALL = ("--do_train", "--do_eval", "--do_predict", "--max_steps", "2")


@pytest.mark.parametrize("model_type", CLASSIFIERS)
def test_everything_runs_and_the_checkpoint_predicts_what_was_written(command, tmp_path, model_type):
    splits = {"train": pairs(32, _shares_words), "validation": pairs(6, _shares_words, seed=1)}
    splits["test"] = pairs(5, _shares_words, seed=2)
    argv = command(model_type, splits, *ALL, "--max_train_samples", "20", "--max_predict_samples", "4")
    argv += ["--report", "true", "--token", "SECRET"]
    metrics = glue.main(argv)
    folder = tmp_path / "out"
    assert (metrics["train_samples"], metrics["eval_samples"], metrics["predict_samples"]) == (20, 6, 4)
    assert {"train_loss", "eval_loss", "eval_accuracy", "predict_loss", "predict_accuracy"} <= set(metrics)
    assert "eval_combined_score" not in metrics
    written = _read(folder / "all_results.json")
    for split in ("train", "eval", "predict"):
        assert _read(folder / f"{split}_results.json").items() <= written.items()
    assert written == {name: metrics[name] for name in written}
    assert "text-classification" in (folder / "README.md").read_text(encoding="utf-8")

    model = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    assert model.config.id2label == {0: "match", 1: "mismatch"}
    assert model.config.label2id == {"match": 0, "mismatch": 1}
    tokenizer = AutoTokenizer.from_pretrained(folder)
    rows = splits["test"][:4]
    texts = [[row[column] for row in rows] for column in ("sentence1", "sentence2")]
    with torch.no_grad():
        logits = model(**tokenizer(*texts, padding=True, truncation=True, max_length=48, return_tensors="pt")).logits
    names = [model.config.id2label[position] for position in logits.argmax(1).tolist()]
    lines = (folder / "predict_results.txt").read_text(encoding="utf-8").splitlines()
    assert lines == ["index\tprediction", *(f"{index}\t{name}" for index, name in enumerate(names))]
    right = [name == row["label"] for name, row in zip(names, rows, strict=True)]
    assert metrics["predict_accuracy"] == pytest.approx(np.mean(right))
    targets = torch.tensor([model.config.label2id[row["label"]] for row in rows])
    assert metrics["predict_loss"] == pytest.approx(F.cross_entropy(logits, targets).item(), rel=1e-4)

    page = read_page(folder / "report.html")
    assert page.problems == []
    assert "SECRET" not in page.html
    assert {name: float(value) for name, (value,) in page.tables["Metrics of this run"].items()} == metrics
    truth = {"validation": splits["validation"], "test": rows}
    trained = [row["label"] for row in splits["train"][:20]]
    majority = max(sorted(set(trained)), key=trained.count)
    ids = [model.config.label2id[label] for label in trained]
    for split, prefix in (("validation", "eval"), ("test", "predict")):
        table = page.tables[f"Scores on the {split} split, {len(truth[split])} examples"]
        assert list(table) == ["this model", f"majority class ({majority})", "stratified guess"]
        assert float(table["this model"][0]) == metrics[f"{prefix}_accuracy"]
        labels = np.array([model.config.label2id[row["label"]] for row in truth[split]])
        share = np.mean(labels == model.config.label2id[majority])
        assert float(table[f"majority class ({majority})"][0]) == pytest.approx(share)
        guesses = [np.mean(guess_labels(ids, len(labels), seed) == labels) for seed in range(10)]
        assert float(table["stratified guess"][0]) == pytest.approx(np.mean(guesses))
    confusions = page.tables["Labels and predictions on the test split"]
    for label, counts in confusions.items():
        expected = [sum(row["label"] == label and name == other for row, name in zip(rows, names, strict=True))
                    for other in confusions]  # fmt: skip
        assert [int(count) for count in counts] == expected
    shown = {sample["sentence1"]: sample for sample in page.samples}
    assert len(shown) == len(rows)
    for row, name, chances in zip(rows, names, logits.softmax(1), strict=True):
        sample = shown[row["sentence1"]]
        assert (sample["sentence2"], sample["label"]) == (row["sentence2"], row["label"])
        assert sample["prediction"] == f"{name}, {chances.max().item():.0%} sure"
    assert (folder / "curves.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("model_type", some(CLASSIFIERS, "spade"))
@pytest.mark.parametrize("label", [_alternating, lambda number, sentences: number / 7], ids=["classes", "numbers"])
def test_gradient_accumulation_equals_one_large_batch(command, tmp_path, model_type, label):
    logs = {}
    for size, steps in ((8, 1), (2, 4)):
        argv = command(
            model_type, {"train": pairs(8, label)}, "--do_train", "--max_steps", "1", "--save_strategy", "no",
            "--per_device_train_batch_size", str(size), "--gradient_accumulation_steps", str(steps),
            overrides=NO_DROPOUT[model_type], output=f"{steps}",
        )  # fmt: skip
        glue.main(argv)
        logs[steps] = _read(tmp_path / f"{steps}" / "trainer_state.json")["log_history"][0]
    assert logs[4]["loss"] == pytest.approx(logs[1]["loss"], rel=1e-5)
    assert logs[4]["grad_norm"] == pytest.approx(logs[1]["grad_norm"], rel=1e-4)


def test_accumulated_batches_of_different_sizes_are_weighted_by_their_examples(command, tmp_path):
    """Six examples in batches of four and two: a mean over the batches would count the last two twice."""
    losses = []
    for size, steps in ((6, 1), (4, 2)):
        argv = command(
            "bert", {"train": pairs(6, _alternating)}, "--do_train", "--max_steps", "1", "--save_strategy", "no",
            "--per_device_train_batch_size", str(size), "--gradient_accumulation_steps", str(steps),
            overrides=NO_DROPOUT["bert"], output=f"{steps}",
        )  # fmt: skip
        losses.append(glue.main(argv)["train_loss"])
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)


def test_mnli_is_scored_on_both_splits(command, tmp_path):
    names = ["entailment", "neutral", "contradiction"]
    columns = ("premise", "hypothesis")
    make = lambda count, seed: pairs(count, lambda number, _: names[number % 3], seed, columns)  # noqa: E731
    splits = {"train": make(12, 0), "validation": make(6, 1), "validation_mismatched": make(9, 2)}
    splits |= {"test": make(3, 3), "test_mismatched": [row | {"label": -1} for row in make(4, 4)]}
    metrics = glue.main(command("bert", splits, *ALL, "--task_name", "mnli", "--report", "true"))
    folder = tmp_path / "out"
    page = read_page(folder / "report.html")
    assert page.problems == []
    for split, name in (("validation", "eval_accuracy"), ("validation, mismatched", "eval_accuracy_mm")):
        table = page.tables[f"Scores on the {split} split, {6 if split == 'validation' else 9} examples"]
        assert float(table["this model"][0]) == metrics[name]
        assert float(table["majority class (entailment)"][0]) == pytest.approx(1 / 3)
    assert not any("test, mismatched" in caption for caption in page.tables)  # that split has no labels
    results = _read(folder / "eval_results.json")
    assert (results["eval_samples"], results["eval_samples_mm"]) == (6, 9)
    assert {"eval_accuracy", "eval_loss", "eval_accuracy_mm", "eval_loss_mm"} <= set(results)
    assert results.items() <= metrics.items()
    assert "predict_accuracy" in metrics
    assert "predict_accuracy_mm" not in metrics  # that split has no labels
    for name, rows in (("mnli", 3), ("mnli-mm", 4)):
        lines = (folder / f"predict_results_{name}.txt").read_text(encoding="utf-8").splitlines()
        assert len(lines) == rows + 1
        assert {line.split("\t")[1] for line in lines[1:]} <= set(names)
    assert _read(folder / "config.json")["id2label"] == {"0": names[0], "1": names[1], "2": names[2]}


@pytest.mark.parametrize(
    ("task", "expected"),
    [(["--task_name", "stsb"], {"eval_pearson", "eval_spearmanr", "eval_combined_score"}), ([], {"eval_mse"})],
)
def test_numbers_are_regressed(command, tmp_path, task, expected):
    make = lambda count, seed: pairs(count, lambda number, _: number % 11 / 2, seed)  # noqa: E731
    splits = {"train": make(24, 0), "validation": make(12, 1), "test": make(3, 2)}
    metrics = glue.main(command("spade", splits, *ALL, *task, "--report", "true"))
    page = read_page(tmp_path / "out" / "report.html")
    assert page.problems == []
    baseline = page.tables["Scores on the validation split, 12 examples"]["mean"]
    labels = [row["label"] for row in splits["validation"]]
    mean = np.mean([row["label"] for row in splits["train"]])
    assert baseline == ["nan"] * 3 if task else float(baseline[0]) == pytest.approx(np.mean((labels - mean) ** 2))
    errors = [sample["prediction"] for sample in page.samples]
    assert len(errors) == 3
    assert expected <= set(metrics)
    assert "eval_accuracy" not in metrics
    config = _read(tmp_path / "out" / "config.json")
    assert config["problem_type"] == "regression"
    assert AutoModelForSequenceClassification.from_pretrained(tmp_path / "out").config.num_labels == 1
    name = "predict_results_stsb.txt" if task else "predict_results.txt"
    lines = (tmp_path / "out" / name).read_text(encoding="utf-8").splitlines()
    for line in lines[1:]:
        assert line.split("\t")[1] == f"{float(line.split()[1]):.3f}"
    if not task:  # the loss of a regression is the score
        assert metrics["eval_mse"] == pytest.approx(metrics["eval_loss"], rel=1e-4)
    if task:
        assert metrics["eval_combined_score"] == pytest.approx(
            (metrics["eval_pearson"] + metrics["eval_spearmanr"]) / 2
        )


def test_a_checkpoint_keeps_its_own_ids(command, tmp_path):
    """Scores depend neither on the order of a checkpoint's labels nor on whether the data have names or integers."""
    names = ["not_equivalent", "equivalent"]
    rows = pairs(12, lambda number, sentences: names[len(sentences[0]) % 2], seed=1)
    splits = {"train": pairs(16, _alternating), "validation": rows}
    glue.main(command("bert", splits, "--task_name", "mrpc", "--do_train", "--max_steps", "3"))
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "out")
    assert model.config.id2label == dict(enumerate(names))
    model.classifier.weight.data = model.classifier.weight.data.flip(0)
    model.classifier.bias.data = model.classifier.bias.data.flip(0)
    model.config.label2id = {"Equivalent": 0, "Not_Equivalent": 1}
    model.config.id2label = {0: "Equivalent", 1: "Not_Equivalent"}
    model.save_pretrained(tmp_path / "flipped")
    AutoTokenizer.from_pretrained(tmp_path / "out").save_pretrained(tmp_path / "flipped")

    scores = {}
    for name in ("out", "flipped"):
        argv = command("bert", splits, "--task_name", "mrpc", "--do_eval", output=f"eval-{name}")
        position = argv.index("--model_type")
        argv[position : position + 4] = ["--model_name_or_path", str(tmp_path / name)]
        scores[name] = glue.main(argv)
    for score in ("eval_loss", "eval_accuracy", "eval_f1", "eval_combined_score"):
        assert scores["flipped"][score] == pytest.approx(scores["out"][score], rel=1e-5), score
    split = {"validation": [row | {"label": names.index(row["label"])} for row in rows]}
    argv = command("bert", split, "--task_name", "mrpc", "--do_eval", output="eval-integers")
    position = argv.index("--model_type")
    argv[position : position + 4] = ["--model_name_or_path", str(tmp_path / "flipped")]
    assert glue.main(argv)["eval_f1"] == scores["out"]["eval_f1"]


def test_f1_is_of_the_tasks_own_label_one():
    references, predictions = np.array([0, 0, 0, 1]), np.array([0, 0, 1, 1])
    labels = glue.Labels(("equivalent", "not_equivalent"), {})
    prediction = EvalPrediction(predictions=np.eye(2)[predictions], label_ids=references)
    expected = load_metric("glue", "mrpc").compute(predictions=1 - predictions, references=1 - references)
    scores = compute_metrics("mrpc", labels, prediction)
    assert scores["f1"] == pytest.approx(expected["f1"]) == 0.8
    assert scores["combined_score"] == pytest.approx((0.8 + 0.75) / 2)


def test_a_checkpoint_with_other_labels(command, tmp_path, caplog):
    splits = {"train": pairs(8, _shares_words), "validation": pairs(8, _shares_words, seed=1)}
    glue.main(command("bert", splits, "--do_train", "--max_steps", "1"))
    names = ["one", "two", "three"]
    other = {split: pairs(9, lambda number, _: names[number % 3]) for split in ("train", "validation")}

    def argv(rows, *more, output):
        line = command("bert", rows, *more, output=output)
        position = line.index("--model_type")
        line[position : position + 4] = ["--model_name_or_path", str(tmp_path / "out")]
        return line

    with pytest.raises(
        ValueError, match=r"labels of the data \(one, three, two\) must be those .* \(match, mismatch\)"
    ):
        glue.main(argv(other, "--do_eval", output="eval"))
    with pytest.raises(ValueError, match="--ignore_mismatched_sizes"):
        glue.main(argv(other, "--do_train", "--max_steps", "1", output="train"))
    metrics = glue.main(argv(other, "--do_train", "--max_steps", "1", "--ignore_mismatched_sizes", output="train"))
    assert "train_loss" in metrics
    assert AutoModelForSequenceClassification.from_pretrained(tmp_path / "train").config.num_labels == 3
    assert "labels (match, mismatch) are replaced by those of the data" in caplog.text
    one_label = {"validation": [row for row in splits["validation"] if row["label"] == "mismatch"]}
    assert one_label["validation"]
    assert "eval_accuracy" in glue.main(argv(one_label, "--do_eval", output="one"))
    unlabelled = {"test": [{"sentence1": "a b", "sentence2": "c"}]}
    glue.main(argv(unlabelled, "--do_predict", output="predict"))
    lines = (tmp_path / "predict" / "predict_results.txt").read_text(encoding="utf-8").splitlines()
    assert lines[1].split("\t")[1] in ("match", "mismatch")
    numbers = {"validation": pairs(4, lambda number, _: number / 3)}
    with pytest.raises(ValueError, match=r"labels of the data \(a number\) must be those of the checkpoint"):
        glue.main(argv(numbers, "--do_eval", output="numbers"))


def test_a_run_is_resumed_with_its_labels(command, tmp_path):
    splits = {"train": pairs(16, _shares_words)}
    flags = ("--do_train", "--max_steps", "4", "--save_steps", "2")
    glue.main(command("bert", splits, *flags, output="straight"))
    glue.main(command("bert", splits, *flags, "--resume_from_checkpoint", str(tmp_path / "straight" / "checkpoint-2")))
    one, two = (
        AutoModelForSequenceClassification.from_pretrained(tmp_path / name).state_dict()
        for name in ("straight", "out")
    )
    torch.testing.assert_close(one, two)


@pytest.mark.parametrize("flag", ["--model_name_or_path", "--config_name"])
def test_a_run_that_trains_the_encoder_of_an_encoder_decoder_is_resumed(command, tmp_path, flag):
    """A classifier of SPADE, such as the starter, has the encoder alone, and its checkpoints say so."""
    saved, starter = str(tmp_path / "pairs"), hf_hybrid.starter("spade-en-tiny")
    fields = {"hidden_size": 32, "num_attention_heads": 2, "intermediate_size": 32, "ssm_state_size": 8}
    AutoModelForSeq2SeqLM.from_config(AutoConfig.from_pretrained(starter, **fields)).save_pretrained(saved)
    splits = {"train": pairs(16, _shares_words)}

    def argv(name, *more):
        flags = command("spade", splits, "--do_train", "--max_steps", "4", "--save_steps", "2", *more, output=name)
        at = flags.index("--model_type")
        return [*flags[:at], flag, saved, "--tokenizer_name", str(starter), *flags[at + 6 :]]

    glue.main(argv("straight"))
    resumed = ("--resume_from_checkpoint", str(tmp_path / "straight" / "checkpoint-2"))
    glue.main(argv("out", *resumed))
    one, two = (
        AutoModelForSequenceClassification.from_pretrained(tmp_path / name).state_dict()
        for name in ("straight", "out")
    )
    torch.testing.assert_close(one, two)
    config = AutoConfig.from_pretrained(saved, local_radius=2)
    config.save_pretrained(saved)
    with pytest.raises(ValueError, match="local_radius is 128 there and 2 in this run"):
        glue.main(argv("other", *resumed))


def test_glues_own_files(command, tmp_path):
    """CoLA has no header line and one column that is always empty; quotation marks are characters."""
    train = "".join(
        f'gj04\t{number % 2}\t{"*" if number % 2 else ""}\tThe "cat {number} sat.\n' for number in range(8)
    )
    (tmp_path / "train.tsv").write_text(train, encoding="utf-8")
    (tmp_path / "test.tsv").write_text('index\tsentence\n0\tA "dog\n', encoding="utf-8")
    splits = {"train": str(tmp_path / "train.tsv"), "test": str(tmp_path / "test.tsv")}
    argv = command("bert", splits, "--task_name", "cola", "--do_train", "--do_predict", "--max_steps", "1")
    assert glue.main(argv)["train_samples"] == 8
    lines = (tmp_path / "out" / "predict_results_cola.txt").read_text(encoding="utf-8").splitlines()
    assert lines[1].split("\t")[1] in ("unacceptable", "acceptable")


def test_a_task_without_data_is_the_hubs(monkeypatch):
    arguments = GlueArguments(task_name="rte")
    assert (arguments.dataset_name, arguments.dataset_config_name) == ("nyu-mll/glue", "rte")
    assert not arguments.is_small_run
    assert GlueArguments(task_name="rte", train_file="a.tsv").dataset_name is None


def test_without_data_a_small_run_on_pairs_of_documents(command, tmp_path, monkeypatch, caplog):
    asked = []
    label = datasets.ClassLabel(names=["mismatch", "match"])
    rows = datasets.Dataset.from_list(pairs(12, _alternating)).cast_column("label", label)

    def load(*, dataset_name, **kwargs):
        asked.append(dataset_name)
        return datasets.DatasetDict(dict.fromkeys(("train", "validation", "test"), rows))

    monkeypatch.setattr(splits, "load_raw_datasets", load)
    monkeypatch.setattr(GlueArguments, "small_run", {"max_train_samples": 8, "max_eval_samples": 4})
    with caplog.at_level("INFO"):
        metrics = glue.main(command("bert", {}, *ALL))
    assert asked == ["embedded:docpairs"]
    assert "embedded:docpairs" in caplog.text
    assert (metrics["train_samples"], metrics["eval_samples"], metrics["predict_samples"]) == (8, 4, 12)
    assert (tmp_path / "out" / "predict_results_docpairs.txt").is_file()
    assert _read(tmp_path / "out" / "config.json")["id2label"] == {"0": "mismatch", "1": "match"}


def test_padding_to_full_length(command, monkeypatch):
    seen = {}

    def spy(trainer, resume_from, argv):
        seen["row"] = trainer.train_dataset[0]
        return {}

    monkeypatch.setattr(glue, "train", spy)
    glue.main(command("bert", {"train": pairs(4, _alternating)}, "--do_train", "--pad_to_max_length"))
    assert len(seen["row"]["input_ids"]) == 48
    assert seen["row"]["labels"] in (0, 1)


# added to a command line that works -> what the message must say, before any data are loaded
REFUSED = {
    "task": (["--task_name", "mrcp"], ["--task_name must be one of cola, mnli", "'mrcp'", "Did you mean 'mrpc'?"]),
    "length": (["--max_seq_length", "0"], ["--max_seq_length must be a positive integer; got 0"]),
    "samples": (["--max_eval_samples", "0"], ["--max_eval_samples must be a positive integer; got 0"]),
    "smoothing": (["--label_smoothing_factor", "1"], ["--label_smoothing_factor must lie in [0, 1); got 1.0"]),
    "second split alone": (["--test_mismatched_file", "x.csv"], ["--test_mismatched_file", "it needs --test_file"]),
    "no split": (["--do_predict"], ["--do_predict needs a test split", "--test_file"]),
    "corpus of another script": (
        ["--dataset_name", "embedded:docstrings"],
        ["dataset_name must be one of embedded:docpairs", "got 'embedded:docstrings'"],
    ),
    "pixels": (
        ["--model_type", "chela", "--config_overrides", "preset=image,num_hidden_layers=1"],
        ["--config_overrides", "must read tokens here", "input_values"],
    ),
    "model without a class": (["--model_type", "vits"], ["--model_type vits", "AutoModelForSequenceClassification"]),
}


@pytest.mark.parametrize("case", REFUSED)
def test_bad_arguments_are_refused_before_any_work(command, tmp_path, no_data, case):
    no_data()
    more, expected = REFUSED[case]
    splits = {} if "--dataset_name" in more else {"train": pairs(4, _alternating)}
    with pytest.raises(ValueError) as raised:  # noqa: PT011 - the message is looked at below
        glue.main(command("bert", splits, "--do_train", *more))
    for words in expected:
        assert words in str(raised.value)
    assert not (tmp_path / "out").exists()


def _with(rows, number, **change):
    return [row | change if position == number else row for position, row in enumerate(rows)]


GOOD = pairs(6, _shares_words)
# the splits, more flags -> what the message must say, before a model is built
BAD_DATA = {
    "label unseen in training": (
        {"train": GOOD, "validation": _with(GOOD, 4, label="perhaps")},
        [],
        ["the labels of split 'validation'", "(match, mismatch)", "'perhaps' is not, in row 5"],
    ),
    "no labels in one split": (
        {"train": GOOD, "validation": [{"sentence1": "a", "sentence2": "b"}]},
        [],
        ["split 'validation' must hold labels in a column 'label'", "sentence1, sentence2"],
    ),
    "one row without label": (
        {"train": _with(GOOD, 2, label=None), "validation": GOOD},
        [],
        ["split 'train' must hold a label in every row; 1 of 6 rows have none: row 3"],
    ),
    "one label only": (
        {"train": [row | {"label": "match"} for row in GOOD], "validation": GOOD},
        [],
        ["training split must hold at least two different labels; got 'match'"],
    ),
    "text for numbers": (
        {"train": pairs(6, lambda number, _: number / 2), "validation": GOOD},
        [],
        ["split 'validation' must hold a number as the label of every row; row 1", "match"],
    ),
    "fraction for classes": (
        {"train": pairs(6, _alternating), "validation": pairs(6, lambda number, _: 0.5)},
        [],
        ["the labels of split 'validation'", "0.5 is not, in row 1, 2, 3, 4, 5, ..."],
    ),
    "labels of another task": (
        {"train": GOOD, "validation": GOOD},
        ["--task_name", "rte"],
        ["labels of split 'train' must be entailment, not_entailment or 0 to 1, those of rte; got"],
    ),
    "lists as labels": (
        {"train": _with(pairs(1, lambda number, _: [1]), 0), "validation": GOOD},
        [],
        ["column 'label' of split 'train' must hold labels, which are text or numbers; row 1", "list"],
    ),
    "columns of another task": (
        {"train": GOOD, "validation": GOOD},
        ["--task_name", "cola"],
        ["task_name cola must have the columns sentence", "sentence1, sentence2"],
    ),
    "column that is not there": (
        {"train": GOOD, "validation": GOOD},
        ["--text_column_names", "sentence1,sentnce2"],
        ["text_column_names", "'sentnce2'", "Did you mean 'sentence2'?"],
    ),
    "three columns": (
        {"train": GOOD, "validation": GOOD},
        ["--text_column_names", "sentence1,sentence2,idx"],
        ["text_column_names must be one or two columns", "sentence1, sentence2, idx"],
    ),
    "label column that is not there": (
        {"train": GOOD, "validation": GOOD},
        ["--label_column_name", "lable"],
        ["split 'train' must hold labels in a column 'lable'", "Did you mean 'label'?"],
    ),
    "no columns to choose": (
        {split: [{"a": "x", "b": "y", "c": "z", "label": 0}] for split in ("train", "validation")},
        [],
        ["text_column_names must say which one or two columns of text", "a, b, c"],
    ),
    "row without text": (
        {"train": _with(GOOD, 1, sentence2=" "), "validation": GOOD},
        [],
        ["split 'train' must hold text in every row", "'sentence2' of row 2", "drop_empty_rows"],
    ),
    "smoothed numbers": (
        {split: pairs(6, lambda number, _: number / 2) for split in ("train", "validation")},
        ["--label_smoothing_factor", "0.1"],
        ["--label_smoothing_factor needs labels that are names"],
    ),
}


@pytest.mark.parametrize("case", BAD_DATA)
def test_bad_data_are_refused_before_a_model_is_built(command, tmp_path, monkeypatch, case):
    def work(*args, **kwargs):
        raise AssertionError("a model was built before the data were checked")

    monkeypatch.setattr(glue, "load_model", work)
    monkeypatch.setattr(glue, "train_new_tokenizer", work)
    splits, more, expected = BAD_DATA[case]
    with pytest.raises(ValueError) as raised:  # noqa: PT011 - the message is looked at below
        glue.main(command("bert", splits, "--do_train", "--do_eval", *more))
    for words in expected:
        assert words in str(raised.value)
    assert not (tmp_path / "out").exists()


def test_an_empty_file(command, tmp_path):
    (tmp_path / "empty.tsv").write_text("", encoding="utf-8")
    with pytest.raises(ValueError, match=r"train_file must hold at least one row; got .*empty\.tsv"):
        glue.main(command("bert", {"train": str(tmp_path / "empty.tsv")}, "--do_train"))


def test_a_checkpoints_positions_are_checked_before_the_data(command, tmp_path, no_data):
    splits = {"train": pairs(8, _alternating)}
    glue.main(command("bert", splits, "--do_train", "--max_steps", "1"))
    no_data()
    argv = command("bert", splits, "--do_train", "--max_seq_length", "80", output="more")
    position = argv.index("--model_type")
    argv[position : position + 4] = ["--model_name_or_path", str(tmp_path / "out")]
    with pytest.raises(ValueError, match=r"--max_seq_length must be at most the model's 64 .*; got 80"):
        glue.main(argv)


# ---- the report ----


def test_confusions_are_counted_by_label_and_prediction():
    outputs = types.SimpleNamespace(label_ids=np.array([0, 0, 0, 1, 2]), predictions=np.eye(3)[[0, 1, 1, 1, 0]])
    (table,) = report.confusions(Labels(("a", "b", "c")), {"test": outputs}).tables
    assert table.rows == [("a", [1, 2, 0]), ("b", [0, 1, 0]), ("c", [1, 0, 0])]


def test_of_many_labels_the_most_frequent_confusions_are_listed():
    labels = Labels(tuple(f"label {number}" for number in range(20)))
    wrong = types.SimpleNamespace(
        label_ids=np.array([3, 3, 5, 7]), predictions=(np.eye(20)[[4, 4, 6, 7]], "hidden states")
    )
    (table,) = report.confusions(labels, {"validation": wrong}).tables
    assert table.rows == [("label 3", ["label 4", 2]), ("label 5", ["label 6", 1])]


def test_a_split_without_labels_is_shown_without_verdicts(command, tmp_path):
    splits = {"train": pairs(8, _alternating), "test": [row | {"label": -1} for row in pairs(6, _alternating, seed=1)]}
    argv = command("bert", splits, "--do_train", "--do_predict", "--max_steps", "1", "--report", "true")
    glue.main(argv)
    page = read_page(tmp_path / "out" / "report.html")
    assert page.problems == []
    assert "No split with labels was scored." in page.text
    assert [set(sample) for sample in page.samples] == [{"sentence1", "sentence2", "prediction"}] * 5
