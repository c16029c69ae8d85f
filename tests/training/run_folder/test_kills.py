"""Runs that are killed, terminated, or find no room, in processes of their own."""

import json
import os
import random
import signal
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from hf_hybrid.training.run_folder.checkpoints import complete_checkpoints
from tests.matrix import some
from tests.tolerances import assert_close
from tests.training.children import PAUSE, SAVING, Child, pair

CHELA = "hidden_size=32,num_hidden_layers=2,dropout=0.1"
MOMENTS = ("step", *SAVING, "weights", "optimizer", "marked", "deleting")


@pytest.fixture
def commands(arguments, data, tmp_path):
    """A function: script and output folder to a command line that saves after every step."""
    words = ["river", "stone", "forest", "cloud", "winter", "summer", "bridge"]
    rng = random.Random(0)
    texts = tmp_path / "texts.txt"
    texts.write_text("".join(" ".join(rng.choices(words, k=20)) + "\n" for _ in range(30)), encoding="utf-8")

    def build(script, folder, *more):
        steps = ["--do_train", "--save_strategy", "steps", "--save_steps", "1", "--save_total_limit", "1", *more]
        if script == "summarization":
            return arguments("spade", tmp_path / folder, *steps)
        return [
            "--model_type", "chela", "--config_overrides", CHELA, "--tokenizer_type", "bytes", "--train_file",
            str(texts), "--cache_dir", str(data["cache"]), "--block_size", "32", "--per_device_train_batch_size", "4",
            "--logging_steps", "1", "--use_cpu", "--disable_tqdm", "true", "--output_dir", str(tmp_path / folder),
            *steps,
        ]  # fmt: skip

    return build


def _steps_on_disk(folder):
    return [int(path.rsplit("-", 1)[1]) for path in complete_checkpoints(folder)]


def _history(folder):
    state = json.loads((folder / "trainer_state.json").read_text(encoding="utf-8"))
    return {entry["step"]: entry["loss"] for entry in state["log_history"] if "loss" in entry}


def _assert_same_run(folder, expected):
    assert _history(folder).keys() == _history(expected).keys()
    losses, wanted = (torch.tensor(list(_history(path).values())) for path in (folder, expected))
    assert_close(losses, wanted, "float32 model")
    weights, wanted = (load_file(path / "model.safetensors") for path in (folder, expected))
    assert weights.keys() == wanted.keys()
    for name, tensor in weights.items():
        assert_close(tensor, wanted[name], "float32 model")


KILLED = [("summarization", 16, 7, 3), ("summarization", 24, 11, 5), ("clm", 24, 11, 5)]


@pytest.mark.parametrize(("script", "steps", "kills", "least_inside"), some(KILLED, KILLED[0]))
def test_a_run_that_is_killed_again_and_again_ends_where_it_would_have(
    commands, tmp_path, script, steps, kills, least_inside
):
    """With dropout. The only checkpoint is replaced after every step, and most kills hit while it is."""
    inside = 0
    argv = [*commands(script, "straight"), "--max_steps", str(steps)]
    assert Child(script, argv, tmp_path / "log").wait()[0] == 0
    argv = [*commands(script, "killed"), "--max_steps", str(steps), "--resume_from_checkpoint", "auto"]
    out, rng, newest = tmp_path / "killed", random.Random(script), 0
    for kill in range(kills):
        moment, count, delay = rng.choice(MOMENTS), rng.randint(1, 2), rng.uniform(0, 0.8 * PAUSE)
        child, seen = Child(script, argv, tmp_path / "log", slow=True), []
        for _ in range(count):
            seen += child.read(lambda event, moment=moment: event[0] == moment)
        assert seen[-1][0] == moment, f"kill {kill}: {(tmp_path / 'log').read_text()}"
        time.sleep(delay)
        os.kill(child.process.pid, signal.SIGKILL)
        seen += child.read()
        child.process.join()
        assert child.process.exitcode == -signal.SIGKILL
        assert ("resumed", newest) in seen, (kill, seen)
        inside += seen[-1][0] in SAVING
        marked = [step for name, step in seen if name == "marked"]
        possible = {max([newest, *marked]), max([0, *(step for name, step in seen if name == "marker")])}
        newest = max([0, *_steps_on_disk(out)])
        assert newest in possible, (kill, seen)
    assert inside >= least_inside
    assert newest < steps
    code, log = Child(script, argv, tmp_path / "log").wait()
    assert code == 0, log
    assert _steps_on_disk(out) == [steps]
    _assert_same_run(out, tmp_path / "straight")


def test_sigterm_stops_two_processes_after_the_same_step(commands, tmp_path):
    """Only one of them gets the signal."""
    argv = [*commands("clm", "two"), "--save_steps", "500", "--ddp_backend", "gloo", "--max_steps"]
    children = pair("clm", [*argv, "100000"], tmp_path)
    children[1].read(lambda event: event == ("step", 3))
    os.kill(children[1].process.pid, signal.SIGTERM)
    for child in children:
        code, log = child.wait()
        assert code == 143, log
        assert "--resume_from_checkpoint auto" in log
    (stopped,) = _steps_on_disk(tmp_path / "two")
    assert stopped >= 3
    assert {path.name for path in (tmp_path / "two" / f"checkpoint-{stopped}").glob("rng*")} == {
        "rng_state_0.pth", "rng_state_1.pth"
    }  # fmt: skip
    for child in pair("clm", [*argv, str(stopped + 1), "--resume_from_checkpoint", "auto"], tmp_path):
        code, log = child.wait()
        assert code == 0, log


def test_sigterm_saves_and_gives_its_exit_code(commands, tmp_path):
    argv = [*commands("summarization", "out"), "--save_steps", "500", "--max_steps", "100000"]
    child = Child("summarization", argv, tmp_path / "log")
    child.read(lambda event: event == ("step", 2))
    os.kill(child.process.pid, signal.SIGTERM)
    code, log = child.wait()
    assert code == 143
    assert "SIGTERM: stopping after this step" in log
    assert "Traceback" not in log
    (step,) = _steps_on_disk(tmp_path / "out")
    assert f"interrupted: training stopped after step {step} of 100000" in log


def test_a_closed_terminal_saves_too(commands, tmp_path):
    """It sends SIGHUP, and each line that is printed then is an error."""
    terminal, end = os.openpty()
    argv = [*commands("summarization", "out"), "--save_steps", "500", "--max_steps", "100000"]
    child = Child("summarization", [*argv, "--logging_strategy", "no"], os.ttyname(end))
    child.read(lambda event: event == ("step", 2))
    os.close(end)
    os.close(terminal)
    os.kill(child.process.pid, signal.SIGHUP)
    child.read()
    child.process.join(120)
    assert child.process.exitcode == 129
    (step,) = _steps_on_disk(tmp_path / "out")
    assert step >= 3


def _sizes(folder):
    return {path.name: path.stat().st_size for path in folder.iterdir() if path.is_file()}


@pytest.mark.parametrize("file", ["model.safetensors", "optimizer.pt"])
def test_a_disk_that_is_full_leaves_the_checkpoint_before(commands, tmp_path, file):
    """A limit on the size of files stands for the disk: the operating system refuses to write just the same."""
    argv = commands("summarization", "out")
    child = Child("summarization", [*argv, "--max_steps", "1"], tmp_path / "log")
    assert child.wait()[0] == 0
    whole = tmp_path / "out" / "checkpoint-1"
    sizes = _sizes(whole)
    smaller = [size for size in sizes.values() if size < sizes[file]]
    child = Child(
        "summarization", [*argv, "--max_steps", "3", "--resume_from_checkpoint", "auto"], tmp_path / "log",
        file_limit=(max(smaller) + sizes[file]) // 2,
    )  # fmt: skip
    code, log = child.wait()
    assert code == 1, log
    line = log.strip().splitlines()[-1]
    assert line.startswith(f"error: checkpoint-2 could not be saved in {tmp_path / 'out' / 'checkpoint-2'}: ")
    assert "Traceback" not in log
    assert f"while {file} was written" in line
    assert "MiB are free there" in line
    assert f"{whole} is complete" in line
    assert "--resume_from_checkpoint auto" in line
    assert not Path(tmp_path / "out" / "checkpoint-2").exists()
    assert complete_checkpoints(tmp_path / "out") == [str(whole)]
