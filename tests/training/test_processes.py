"""Two processes do what one does with the same global batch, and stop together."""

import importlib
import json
import random
import re
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from hf_hybrid.training.errors import run_command_line
from hf_hybrid.training.flags.command_line import parse_arguments

from ..matrix import some
from ..tolerances import assert_close
from ..torchrun import once, printed, torchrun
from .children import pair
from .conftest import MODELS, NO_DROPOUT

SUMMARIZATION, GLUE, CLM, PRETRAIN = (
    f"hf_hybrid.training.{name}" for name in ("summarization", "glue", "clm", "pretrain")
)
TIMED = re.compile(r"runtime|per_second|^epoch")
_WORDS = ["river", "stone", "forest", "cloud", "winter", "summer", "bridge"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return once(tmp_path_factory, "processes", _write_rows)


def _write_rows(folder):
    """Seven of them to evaluate, so that two processes with two rows each have an uneven last batch."""
    rng = random.Random(0)

    def words(least, most):
        return " ".join(rng.choices(_WORDS, k=rng.randint(least, most)))

    for split, rows in (("train", 16), ("validation", 7), ("test", 7), ("validation_mm", 5), ("test_mm", 3)):
        lines = [
            json.dumps({"document": words(6, 20), "summary": words(1, 5), "label": rng.randint(0, 2)})
            for _ in range(rows)
        ]
        (folder / f"{split}.jsonl").write_text("\n".join(lines) + "\n")
        (folder / f"{split}.txt").write_text("\n".join(words(3, 12) for _ in range(60)))


def _files(folder, ending, *splits):
    return [part for split in splits for part in (f"--{split}_file", str(folder / f"{split}.{ending}"))]


def _jobs(folder, *batch, cache):
    """Jobs by name, with the flags that say how a global batch of eight is made."""
    spade = f"{MODELS['spade']},{NO_DROPOUT['spade']}"
    common = [
        "--cache_dir", str(folder / cache), "--max_steps", "3", "--learning_rate", "0.05", "--optim", "sgd",
        "--logging_steps", "1", "--save_strategy", "no", "--use_cpu", "--disable_tqdm", "true", "--do_train",
        "--do_eval", "--per_device_eval_batch_size", "2", *batch,
    ]  # fmt: skip
    summaries = [
        *_files(folder, "jsonl", "train", "validation", "test"), "--max_source_length", "32", "--max_target_length",
        "8", "--text_column", "document", "--summary_column", "summary", "--tokenizer_type", "words", *common,
    ]  # fmt: skip
    jobs = {
        # drawn so that the model ends its summaries at places of all kinds
        "spade": (SUMMARIZATION, [*summaries, "--model_type", "spade", "--config_overrides",
            f"{spade},initializer_range=0.4", "--do_predict", "--predict_with_generate", "--learning_rate", "0.001",
            "--seed", "5"]),
        "t5": (SUMMARIZATION, [*summaries, "--model_type", "t5", "--config_overrides",
            f"{MODELS['t5']},{NO_DROPOUT['t5']}"]),
        "mnli": (GLUE, [*_files(folder, "jsonl", "train", "validation", "test"), "--validation_mismatched_file",
            str(folder / "validation_mm.jsonl"), "--test_mismatched_file", str(folder / "test_mm.jsonl"), *common,
            "--text_column_names", "document,summary", "--task_name", "mnli", "--model_type", "spade",
            "--config_overrides", spade, "--tokenizer_type", "bytes", "--max_seq_length", "48", "--do_predict"]),
        "clm": (CLM, [*_files(folder, "txt", "train", "validation"), *common, "--block_size", "32", "--model_type",
            "spade", "--config_overrides", spade.replace("num_decoder_layers=1,", ""), "--tokenizer_type", "bytes",
            "--eval_sequence_length", "80", "--eval_context_window", "20", "--max_eval_samples", "7"]),
    }  # fmt: skip
    pretrain = [
        *_files(folder, "jsonl", "train", "validation"), "--text_column", "document", *common, "--model_type", "t5",
        "--config_overrides", f"{MODELS['t5']},{NO_DROPOUT['t5']}", "--tokenizer_type", "bytes", "--max_seq_length",
        "48", "--max_train_samples", "16", "--bf16", "false",
    ]  # fmt: skip
    # into a second epoch, whose noise is another
    pretrain += ["--save_strategy", "steps", "--save_steps", "1"]
    jobs |= {"pretrain": (PRETRAIN, pretrain), "pretrain stream": (PRETRAIN, [*pretrain, "--streaming"])}
    for name, (module, argv) in list(jobs.items())[-2:]:
        checkpoint = str(folder / f"{cache}-{name}" / "checkpoint-1")
        jobs[f"{name}, resumed"] = (module, [*argv, "--resume_from_checkpoint", checkpoint])
    return {
        name: (module, [*argv, "--output_dir", str(folder / f"{cache}-{name}")])
        for name, (module, argv) in jobs.items()
    }


REST = ("t5", "pretrain stream", "pretrain stream, resumed")
"""The jobs that run in the full run only."""


@pytest.fixture(scope="module")
def outcomes(folder, tmp_path_factory):
    """A function: a job's name to what each process of a torchrun had of it.

    The processes start together, with nothing in the cache.
    """

    def read(name):
        rest = name in REST
        part = "rest" if rest else "ordinary"
        ran = once(tmp_path_factory, f"processes/{part}", lambda ran: _run_jobs(folder, ran, rest))
        return [json.loads((ran / f"outcomes-{rank}.json").read_text())[name] for rank in (0, 1)]

    return read


def _run_jobs(folder, ran, rest):
    batch = ("--per_device_train_batch_size", "2", "--gradient_accumulation_steps", "2", "--ddp_backend", "gloo")
    all_jobs = _jobs(folder, *batch, cache="two")
    jobs = {name: job for name, job in all_jobs.items() if (name in REST) == rest}
    if not rest:
        jobs["used folder"] = jobs["clm"]
        module, argv = all_jobs["t5"]
        bad = ran / "bad.jsonl"
        bad.write_text('{"document": "a", "summary": "b"}\n{"document": null, "summary": "b"}\n')
        files = ["--train_file", str(bad), "--validation_file", str(bad), "--output_dir", str(ran / "bad")]
        jobs["bad rows"] = (module, [*argv, *files])
    path = ran / "jobs.json"
    path.write_text(json.dumps(list(jobs.values())))
    done = torchrun("-m", "tests.training.jobs", str(path), log_dir=ran / "log")
    assert done.returncode == 0, done.stdout + done.stderr
    for rank in (0, 1):
        path = ran / f"outcomes-{rank}.json"
        path.write_text(json.dumps(dict(zip(jobs, json.loads(path.read_text()), strict=True))))


def _scores(metrics):
    # padding counts as work, and each process pads batches of its own
    return {name: value for name, value in metrics.items() if not TIMED.search(name) and name != "total_flos"}


@pytest.mark.parametrize(
    "name", some(["spade", "t5", "mnli", "clm", "pretrain", "pretrain stream"], "spade", "mnli", "clm", "pretrain")
)
def test_two_processes_give_what_one_gives(name, folder, outcomes):
    """Losses at each step, weights, scores and predictions, from the same global batch."""
    module, argv = _jobs(folder, "--per_device_train_batch_size", "8", cache="one")[name]
    expected = _scores(importlib.import_module(module).main(argv))
    actual = [_scores(outcome["metrics"]) for outcome in outcomes(name)]
    assert actual[0].keys() == expected.keys()
    for metric, value in expected.items():
        for process in actual:
            assert_close(torch.tensor(process[metric]), torch.tensor(value), "float32 model")
    one, two = (folder / f"{cache}-{name}" for cache in ("one", "two"))
    losses = [
        torch.tensor([row["loss"] for row in json.loads((run / "trainer_state.json").read_text())["log_history"][:3]])
        for run in (one, two)
    ]
    assert_close(losses[1], losses[0], "float32 model")
    weights = [load_file(run / "model.safetensors") for run in (one, two)]
    assert weights[0].keys() == weights[1].keys()
    for key, tensor in weights[0].items():
        assert_close(weights[1][key], tensor, "float32 model")
    predictions = sorted(path.name for path in one.glob("*predict*.txt"))
    assert len(predictions) == {"spade": 1, "mnli": 2}.get(name, 0)
    for file in predictions:
        lines = [(run / file).read_text().splitlines() for run in (one, two)]
        assert lines[0] == lines[1]
    if name == "spade":
        assert len({len(line.split()) for line in lines[0]}) > 2, "the summaries are all of one length"
        assert len(lines[0]) == 7


@pytest.mark.parametrize("name", some(["pretrain", "pretrain stream"], "pretrain"))
def test_two_resumed_processes_end_with_the_same_weights(name, folder, outcomes):
    """From the middle of the first epoch into the second."""
    assert all(outcome["metrics"] for outcome in outcomes(f"{name}, resumed"))
    weights = [load_file(folder / f"two-{run}" / "model.safetensors") for run in (name, f"{name}, resumed")]
    assert all(torch.equal(weights[0][key], weights[1][key]) for key in weights[0])


def test_the_first_process_alone_writes_and_speaks(folder, outcomes):
    for name in ("spade", "mnli", "clm"):
        first, second = outcomes(name)
        assert "train_results.json" in {re.sub(r"^_|\.\d+$", "", file) for file in first["written"]}
        assert not second["written"]
    log = folder / "ordinary" / "log"
    assert "train metrics" in printed(log, 0)
    assert not printed(log, 1)
    assert "Traceback" not in printed(log, 1, "stderr")
    card = (folder / "two-pretrain" / "README.md").read_text()
    assert "```sh\ntorchrun --nproc_per_node 2 -m hf_hybrid.training pretrain" in card
    assert "- distributed_type: multi-CPU" in card


def test_an_error_that_one_process_sees_ends_both(outcomes):
    """The run before it has filled the output folder, which only the first process looks into."""
    assert all("already holds a run" in outcome["error"] for outcome in outcomes("used folder"))
    first, second = outcomes("bad rows")
    assert re.search(r"bad\.jsonl|row|document", first["error"])
    assert first["error"] == second["error"]


@pytest.fixture
def refused(folder, tmp_path):
    """The flags of a run whose output folder already holds one."""
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "all_results.json").write_text("{}")
    flags = [*_files(folder, "txt", "train"), "--model_type", "chela", "--tokenizer_type", "bytes", "--do_train"]
    return [*flags, "--output_dir", str(tmp_path / "out"), "--use_cpu", "--ddp_backend", "gloo"]


def test_a_script_that_cannot_run_ends_with_one_message(refused, tmp_path):
    (code, said), (other_code, silent) = (child.wait() for child in pair("clm", refused, tmp_path))
    assert code == other_code == 2
    assert len(re.findall("^error: --output_dir .* already holds a run", said, re.MULTILINE)) == 1
    assert "Traceback" not in said
    assert not silent
    assert "already holds a run" in (tmp_path / "error1").read_text()  # which torchrun's summary shows


@pytest.mark.full
def test_torchrun_ends_at_once_if_a_script_cannot_run(refused, tmp_path):
    begin = time.monotonic()
    done = torchrun("run_clm.py", *refused, log_dir=tmp_path / "log")
    assert done.returncode != 0
    assert time.monotonic() - begin < 120
    said = printed(tmp_path / "log", 0, "stderr") + printed(tmp_path / "log", 1, "stderr")
    assert len(re.findall("^error: --output_dir .* already holds a run", said, re.MULTILINE)) <= 1
    assert "already holds a run" in done.stderr  # from the first process, or in torchrun's summary
    assert "Traceback" not in said


@pytest.mark.parametrize("rank", ["0", "1"])
def test_torchrun_is_told_of_an_error_on_another_process(rank, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("RANK", rank)
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))

    def fail():
        parse_arguments((), ["--nothing"])

    with pytest.raises(SystemExit) as left:
        run_command_line(fail)
    assert left.value.code == 2
    said = capsys.readouterr().err
    assert said.startswith("error: unknown flag --nothing") if rank == "0" else not said
    assert (tmp_path / "error.json").is_file() == (rank == "1")
    if rank == "1":
        assert "unknown flag --nothing" in Path(tmp_path, "error.json").read_text()
