"""The Long Range Arena's script: it trains, resumes and reloads; bad input is refused before any work."""

import json

import numpy as np
import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

import hf_hybrid
from hf_hybrid.commands import program
from hf_hybrid.data.lra import load_lra
from hf_hybrid.training import long_range
from hf_hybrid.training.collating import long_range_collator
from hf_hybrid.training.trainer.measuring import Measurements
from tests.training.pages import read_page

TINY = {
    "chela": "hidden_size=16,num_hidden_layers=1,intermediate_size=16,training_length=64,long_kernel_size=64",
    "spade": "hidden_size=16,num_hidden_layers=2,intermediate_size=16,num_attention_heads=2,local_radius=4,"
    "ssm_state_size=4",
    "bert": "hidden_size=16,num_hidden_layers=1,intermediate_size=16,num_attention_heads=2",
}
COUNTS = ["--max_train_samples", "16", "--max_eval_samples", "8", "--max_predict_samples", "6"]
ALL = ["--do_train", "--do_eval", "--do_predict"]


@pytest.fixture
def command(tmp_path, data):
    """A function: task, model type and more flags to a small command line."""

    def build(task, model_type, *more, output="out"):
        model = [] if model_type is None else ["--model_type", model_type, "--config_overrides", TINY[model_type]]
        return [
            "--task_name", task, *model, *COUNTS, "--per_device_train_batch_size", "8", "--learning_rate", "1e-3",
            "--use_cpu", "--report", "false", "--cache_dir", str(data["cache"]), "--output_dir",
            str(tmp_path / output), *more,
        ]  # fmt: skip

    return build


@pytest.fixture
def files(tmp_path):
    """A folder with pairs of texts, whose label says whether they are equal, of films, and of small images."""
    folder = tmp_path / "files"
    folder.mkdir()
    generator = np.random.default_rng(0)
    for split, count in (("train", 16), ("validation", 8), ("test", 6)):
        rows = []
        for number in range(count):
            words = ["good" if number % 2 else "bad", "film"]
            rows.append({"text": " ".join(words), "text1": words[0], "text2": "good", "label": number % 2})
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        labels = generator.integers(10, size=count)
        images = (generator.random((count, 32, 32)) * 20 + 20 * labels[:, None, None]).astype(np.uint8)
        np.savez(folder / f"{split}.npz", images=images, labels=labels)
    return folder


def test_everything_runs_and_the_checkpoint_reads_plain_expressions(command, tmp_path):
    argv = command("lra_listops_200", "spade", *ALL, "--num_train_epochs", "2", "--report", "true")
    metrics = long_range.main(argv)
    folder = tmp_path / "out"
    assert (metrics["train_samples"], metrics["eval_samples"], metrics["predict_samples"]) == (16, 8, 6)
    written = json.loads((folder / "all_results.json").read_text())
    assert written == {name: metrics[name] for name in written}
    state = json.loads((folder / "trainer_state.json").read_text())
    validated = [log["eval_accuracy"] for log in state["log_history"] if "eval_accuracy" in log]
    assert len(validated) == 2  # each epoch
    assert metrics["eval_accuracy"] == state["best_metric"] == max(validated)

    model = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    assert type(model) is hf_hybrid.SpadeForSequenceClassification
    tokenizer = AutoTokenizer.from_pretrained(folder)
    rows = load_lra("lra_listops_200", "test", count=6)
    names = [tokenizer.convert_ids_to_tokens(row.tolist()) for row in rows.inputs]
    texts = tokenizer([" ".join(["( (", *words, ") )"]) for words in names], padding=True, return_tensors="pt")
    with torch.no_grad():
        found = model(texts["input_ids"], attention_mask=texts["attention_mask"]).logits.argmax(1)
    lines = (folder / "predict_results_lra_listops_200.txt").read_text().splitlines()
    assert lines == ["index\tprediction", *(f"{index}\t{label}" for index, label in enumerate(found.tolist()))]
    assert metrics["predict_accuracy"] == pytest.approx(np.mean(found.numpy() == rows.labels))

    expression = " ".join(names[0])
    assert program.main(["classify", str(folder), expression, "--output", str(tmp_path / "labels.jsonl")]) == 0
    assert json.loads((tmp_path / "labels.jsonl").read_text())["label"] == str(found[0].item())

    page = read_page(folder / "report.html")
    assert page.problems == []
    table = page.tables["Scores on the test split, 6 examples"]
    assert [name.partition(" (")[0] for name in table] == ["this model", "majority class", "stratified guess"]
    card = (folder / "README.md").read_text()
    assert "drawn:lra_listops_200" in card
    assert "python -m hf_hybrid.training long_range --task_name lra_listops_200" in card.replace(" \\\n    ", " ")


@pytest.mark.parametrize(
    ("task", "model_type", "name"),
    [
        ("lra_retrieval", "spade", "SpadeForSequencePairClassification"),
        ("lra_retrieval", "chela", "ChelaForSequencePairClassification"),
        ("lra_image", "spade", "SpadeForSequenceClassification"),
        ("lra_text", "bert", "BertForSequenceClassification"),
    ],
)
def test_files_of_every_kind_are_read_and_the_saved_model_scores_the_same(
    command, files, task, model_type, name, tmp_path
):
    argv = command(task, model_type, "--data_dir", str(files), "--max_seq_length", "64", *ALL, "--max_steps", "2")
    metrics = long_range.main(argv)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["architectures"] == [name]
    again = command(task, None, "--data_dir", str(files), "--max_seq_length", "64", "--do_predict", output="again")
    scored = long_range.main([*again, "--model_name_or_path", str(tmp_path / "out")])
    assert scored["predict_loss"] == pytest.approx(metrics["predict_loss"], rel=1e-5)
    assert ("AutoTokenizer" in (tmp_path / "out" / "README.md").read_text()) == (task != "lra_image")


def test_pairs_that_are_equal_are_learnt(command, files):
    argv = command("lra_retrieval", "spade", "--data_dir", str(files), "--do_train", "--do_eval", "--max_steps", "40")
    assert long_range.main([*argv, "--learning_rate", "1e-2"])["eval_accuracy"] == 1


def test_a_stopped_run_ends_like_one_that_never_stopped(command, tmp_path):
    whole, first = command("lra_listops_200", "chela"), command("lra_listops_200", "chela", output="cut")
    steps = ["--do_train", "--max_steps", "4", "--save_strategy", "steps", "--save_steps", "2"]
    long_range.main([*whole, *steps])
    long_range.main([*first, *steps])
    checkpoints = tmp_path / "cut"
    for path in checkpoints.glob("checkpoint-4/*"):
        path.unlink()
    (checkpoints / "checkpoint-4").rmdir()
    metrics = long_range.main([*first, *steps, "--resume_from_checkpoint", "auto"])
    assert metrics["train_samples"] == 16
    weights = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("out", "cut")]
    assert weights[0] == weights[1]


def test_other_rows_are_not_resumed_on(command, files):
    steps = ["--do_train", "--max_steps", "2", "--save_strategy", "steps", "--save_steps", "1"]
    argv = [*command("lra_listops_200", "spade"), *steps]
    long_range.main(argv)
    argv += ["--resume_from_checkpoint", "auto", "--max_steps", "3"]
    with pytest.raises(
        ValueError, match=r"--drawing_seed is 0 there and 1 in this run, whose examples would be others"
    ):
        long_range.main([*argv, "--drawing_seed", "1"])
    with pytest.raises(ValueError, match=r"the training rows is '.*' there and '.*' in this run"):
        long_range.main([*argv, "--max_train_samples", "12"])
    own = [*command("lra_image", "chela", "--data_dir", str(files), output="image"), *steps]
    long_range.main(own)
    with np.load(files / "train.npz") as saved:
        np.savez(files / "train.npz", images=saved["images"][::-1], labels=saved["labels"][::-1])
    with pytest.raises(ValueError, match="the training rows is"):
        long_range.main([*own, "--resume_from_checkpoint", "auto", "--max_steps", "3"])
    assert long_range.main(argv)["train_samples"] == 16


@pytest.mark.parametrize(("task", "length"), [("lra_listops_200", 200), ("lra_pathfinder_16", 256)])
def test_a_chela_without_a_recipe_has_kernels_as_long_as_the_task(command, tmp_path, task, length):
    sizes = ["--config_overrides", "hidden_size=16,num_hidden_layers=1,intermediate_size=16"]
    long_range.main(command(task, None, "--model_type", "chela", *sizes, "--do_train", "--max_steps", "1"))
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (config["training_length"], config["long_kernel_size"]) == (length, length)


def test_a_recipe_sets_what_is_not_given(command, tmp_path):
    argv = command("lra_pathfinder_16", None, "--recipe", "mega", "--do_train", "--max_steps", "1")
    long_range.main([*argv, "--config_overrides", "num_hidden_layers=1,hidden_size=8,mixer=long"])
    arguments = torch.load(tmp_path / "out" / "training_args.bin", weights_only=False)
    assert (arguments.learning_rate, arguments.per_device_train_batch_size) == (1e-3, 8)  # given
    assert (arguments.weight_decay, arguments.adam_beta2, arguments.warmup_steps) == (0.01, 0.98, 0.2)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (config["norm_type"], config["attention_fn"], config["mixer"]) == ("batch_norm", "laplace", "long")
    assert (config["hidden_size"], config["input_size"], config["training_length"]) == (8, 1, 256)
    assert long_range.complete_flags(["--do_train", "--do_eval"])[:4] == [
        "--eval_strategy", "epoch", "--save_strategy", "epoch",
    ]  # fmt: skip
    kept = long_range.complete_flags(["--do_train", "--do_eval", "--save_total_limit", "3"])
    assert kept[:2] == ["--eval_strategy", "epoch"]
    assert kept[-1] == "3"  # the last one counts
    for own in (["--do_train", "--do_eval", "--eval_strategy", "steps"], ["--do_train", "--do_eval", "false"]):
        assert long_range.complete_flags(own) == own


@pytest.mark.parametrize(("given", "steps"), [("--save_steps 2", "2 2"), ("--eval_steps 3 --save_steps 6", "3 6")])
def test_steps_between_checkpoints_replace_the_epochs(given, steps):
    found = long_range.complete_flags(["--do_train", "--do_eval", *given.split()])
    assert found[:4] == ["--eval_strategy", "steps", "--save_strategy", "steps"]
    places = [found.index(flag) + 1 for flag in ("--eval_steps", "--save_steps")]
    assert " ".join(found[place].removesuffix(".0") for place in places) == steps


@pytest.mark.parametrize(
    ("processes", "more", "batch"),
    [
        ("2", [], "25"),
        ("2", ["--context_parallel_size", "2"], "50"),  # which reads the same rows in both
        ("3", ["--per_device_train_batch_size", "16"], "16"),
    ],
)
def test_the_batches_of_a_recipe_are_of_all_processes(processes, more, batch, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", processes)
    flags = long_range.complete_flags(["--task_name", "lra_text", "--recipe", "chela", *more])
    places = [place for place, flag in enumerate(flags) if flag == "--per_device_train_batch_size"]
    assert flags[places[-1] + 1] == batch


def test_a_batch_that_cannot_be_divided_is_refused(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "3")
    with pytest.raises(
        ValueError, match=r"batches of 50 cannot be divided among 3 processes.*give --per_device_train_b"
    ):
        long_range.complete_flags(["--task_name", "lra_text", "--recipe", "chela"])


def test_help_shows_all_flags(capsys):
    with pytest.raises(SystemExit) as left:
        long_range.main(["--help"])
    assert left.value.code == 0
    printed = capsys.readouterr().out
    assert all(flag in printed for flag in ("--recipe", "--model_type", "--learning_rate"))


def test_pixels_and_both_documents_of_a_pair_are_counted():
    measured = Measurements(torch.nn.Linear(1, 1))
    measured.count({"input_values": torch.zeros(2, 5)})
    assert (measured.examples, measured.tokens) == (2, 10)
    rows = [
        {"input_ids": [1, 2], "pair_input_ids": [3], "labels": 0},
        {"input_ids": [1], "pair_input_ids": [], "labels": 1},
    ]
    measured.count(long_range_collator(rows))
    assert (measured.examples, measured.tokens) == (4, 15)


# ---- bad input ----


@pytest.fixture
def no_work(monkeypatch):
    """Fail the test if a model is built or loaded."""

    def work(*args, **kwargs):
        raise AssertionError("a model was loaded before the input was checked")

    monkeypatch.setattr(long_range, "load_model", work)


@pytest.mark.parametrize(
    ("task", "model_type", "more", "message"),
    [
        ("lra_listop", "chela", [], r"--task_name must be one of .*got 'lra_listop'. Did you mean 'lra_listops'\?"),
        ("lra_text", "chela", ["--max_seq_length", "5000"], "at most 4096, the longest sequence of lra_text; got"),
        ("lra_text", "chela", [], r"lra_text must have data_dir, the folder of aclImdb/train \(official, from https://ai.st"),
        ("lra_image", "chela", ["--data_dir", "{empty}"], r"must hold cifar-10-batches-bin \(official, from https://www.cs"),
        ("lra_pathx", "chela", [], "lra_pathx must have data_dir, the folder of .*pathfinder128/curv_cont"),
        ("lra_image", "chela", ["--data_dir", "{empty}/none"], "--data_dir must be a folder; .*none is none"),
        ("lra_pathfinder_16", "chela", ["--data_dir", "{empty}"], "data_dir must be left out for lra_pathfinder_16"),
        ("lra_pathfinder_16", "bert", [], r"must read real values \(input_values\) here, as CHELA and SPADE can"),
        ("lra_listops_200", "chela", ["--config_overrides", "input_size=1"], "must read tokens here"),
        ("lra_listops_200", "chela", ["--config_overrides", "vocab_size=9"], "must be at least the tokenizer's 16"),
        ("lra_listops_200", "chela", ["--tokenizer_type", "bytes"], "--tokenizer_type bytes has another vocab"),
        ("lra_listops_200", "spade", ["--recipe", "chela"], "--recipe chela is for chela; got --model_type spade"),
        ("lra_speech", None, ["--recipe", "s4"], "--recipe s4 has no settings for --task_name lra_speech"),
        ("lra_retrieval", "bert", ["--data_dir", "{files}"], "no class for AutoModelForSequencePairClass"),
        ("lra_listops_200", "chela", ["--metric_for_best_model", "f1"], "must be one of loss, accuracy"),
    ],
)  # fmt: skip
def test_bad_flags_are_refused(command, files, tmp_path, no_work, task, model_type, more, message):
    (tmp_path / "empty").mkdir()
    more = [word.format(empty=tmp_path / "empty", files=files) for word in more]
    with pytest.raises(ValueError, match=message):
        long_range.main(command(task, model_type, "--do_train", *more))
    assert not (tmp_path / "out").exists()


def test_what_is_refused_is_named_by_the_flag_that_was_given(tmp_path, no_work):
    with pytest.raises(ValueError, match=r"^--model_type bert: BertForSequenceClassification must read real values"):
        long_range.main(
            ["--task_name", "lra_pathfinder_16", "--model_type", "bert", "--do_train", "--output_dir", str(tmp_path)]
        )


def test_a_task_must_be_named(tmp_path):
    with pytest.raises(ValueError, match=r"--task_name must be one of lra_listops, .*; got none"):
        long_range.main(["--model_type", "chela", "--do_train", "--output_dir", str(tmp_path)])


def test_a_checkpoint_of_another_vocabulary_or_kind_is_refused(command, files, tmp_path, request):
    trained = command("lra_text", "spade", "--data_dir", str(files), "--do_train", "--max_steps", "1", output="bytes")
    long_range.main(trained)
    request.getfixturevalue("no_work")
    checkpoint = ["--model_name_or_path", str(tmp_path / "bytes"), "--do_eval"]
    wanted = "bytes has another vocabulary than lra_listops_200, whose 16 tokens are the words of ListOps: it reads"
    with pytest.raises(ValueError, match=wanted):
        long_range.main(command("lra_listops_200", None, *checkpoint))
    with pytest.raises(ValueError, match=r"must read real values \(input_values\) here"):
        long_range.main(command("lra_pathfinder_16", None, *checkpoint))


def test_expressions_are_all_that_a_model_of_listops_reads(command, files, tmp_path, capsys):
    """Its vocabulary has no unknown word, so that none is read as something else."""
    long_range.main(command("lra_listops_200", "chela", "--do_train", "--max_steps", "1", output="listops"))
    checkpoint = str(tmp_path / "listops")
    with pytest.raises(ValueError, match=r"listops has another vocabulary than lra_text, .*: it cannot read 'Aé 0z!'"):
        long_range.main(
            command("lra_text", None, "--data_dir", str(files), "--model_name_or_path", checkpoint, "--do_eval")
        )
    capsys.readouterr()
    assert program.main(["classify", checkpoint, "a great film", "[MIN 3 4 ]", "--output_format", "csv"]) == 1
    captured = capsys.readouterr()
    assert "text 1 is skipped: the tokenizer cannot read it: WordLevel error" in captured.err
    assert len(captured.out.splitlines()) == 2  # a header, and the label of the other


def test_a_corrupt_image_is_named_before_training(command, tmp_path, no_work):
    folder = tmp_path / "lra_release" / "lra_release" / "pathfinder32" / "curv_contour_length_14"
    for name in ("metadata", "imgs"):
        (folder / name).mkdir(parents=True)
    (folder / "imgs" / "one.png").write_bytes(b"\x89PNG\r\n\x1a\n and then nothing")
    (folder / "metadata" / "0.npy").write_text("imgs one.png 0 1\n")
    with pytest.raises(ValueError, match=r"one\.png must be an image; it cannot be read"):
        long_range.main(command("lra_pathfinder", "chela", "--data_dir", str(tmp_path), "--do_train"))


def test_an_expression_is_not_cut(command, tmp_path, no_work):
    long = "( [MAX " + "1 " * 250 + "] )"
    for split in ("train", "validation", "test"):
        (tmp_path / f"{split}.tsv").write_text(f"Source\tTarget\n( [MIN 3 4 ] )\t3\n{long}\t1\n")
    with pytest.raises(
        ValueError, match=r"train.tsv, row 2 .* lra_listops_200 must have at most 200 tokens, .*; got 25"
    ):
        long_range.main(command("lra_listops_200", "chela", "--data_dir", str(tmp_path), "--do_train"))
    with pytest.raises(ValueError, match=r"--max_seq_length must be at least the \d+ tokens .* of train, .*; got 50"):
        long_range.main(command("lra_listops_200", "chela", "--max_seq_length", "50", "--do_train"))


def test_a_recipe_is_for_the_model_of_a_checkpoint_too(command, tmp_path):
    long_range.main(command("lra_listops_200", "chela", "--do_train", "--max_steps", "1"))
    argv = command("lra_listops_200", None, "--recipe", "spade_window", "--do_train", output="other")
    with pytest.raises(ValueError, match="--recipe spade_window is for spade; the model is a chela"):
        long_range.main([*argv, "--model_name_or_path", str(tmp_path / "out")])


def test_labels_of_another_task_need_a_new_head(command, files, tmp_path):
    long_range.main(command("lra_image", "spade", "--data_dir", str(files), "--do_train", "--max_steps", "1"))
    other = command("lra_pathfinder_16", None, "--do_train", "--max_steps", "1", output="other")
    other += ["--model_name_or_path", str(tmp_path / "out")]
    with pytest.raises(ValueError, match="--ignore_mismatched_sizes draws them anew"):
        long_range.main(other)
    assert long_range.main([*other, "--ignore_mismatched_sizes"])["train_samples"] == 16
