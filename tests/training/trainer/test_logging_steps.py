import json

import pytest
import torch

from hf_hybrid.training import summarization
from hf_hybrid.training.trainer import logging_steps
from hf_hybrid.training.trainer.logging_steps import steps_between_logs


@pytest.mark.parametrize(
    ("max_steps", "expected"), [(1, 1), (50, 1), (51, 2), (60, 2), (3000, 60), (24_900, 498), (125_000, 500)]
)
def test_fifty_logs_in_a_run_and_one_every_five_hundred_steps(max_steps, expected):
    assert steps_between_logs(max_steps) == expected


@pytest.fixture
def command(arguments, tmp_path):
    """A function: more flags to a small command line that trains and does not say when to log."""

    def build(*more):
        argv = arguments("spade", tmp_path / "out", "--do_train", *more)
        position = argv.index("--logging_steps")
        return argv[:position] + argv[position + 2 :]

    return build


@pytest.fixture
def state(tmp_path):
    """A function: what ``trainer_state.json`` says, and the steps at which a metric was logged."""

    def read(name="loss"):
        content = json.loads((tmp_path / "out" / "trainer_state.json").read_text(encoding="utf-8"))
        return content, [entry["step"] for entry in content["log_history"] if name in entry]

    return read


@pytest.mark.parametrize(
    ("flags", "logged"),
    [
        ([], [1, 3, 6]),
        (["--logging_first_step", "false"], [3, 6]),
        (["--logging_steps", "4"], [4]),
        (["--logging_strategy", "epoch"], [6]),
        (["--logging_strategy", "no"], []),
    ],
)
def test_the_loss_is_logged_as_often_as_the_run_is_long_unless_the_user_says_when(
    command, state, monkeypatch, flags, logged
):
    monkeypatch.setattr(logging_steps, "_LOGS", 2)
    summarization.main(command("--max_steps", "6", *flags))
    assert state()[1] == logged


def test_the_steps_are_counted_as_trainer_counts_them(command, state, monkeypatch):
    monkeypatch.setattr(logging_steps, "_LOGS", 4)
    summarization.main(command("--num_train_epochs", "3", "--gradient_accumulation_steps", "2"))
    assert (state()[0]["max_steps"], state()[0]["logging_steps"]) == (12, 3)  # 32 rows, 4 in a batch
    assert state()[1] == [1, 3, 6, 9, 12]


def test_evaluation_and_saving_do_not_follow(command, state, tmp_path):
    summarization.main(command("--max_steps", "3", "--do_eval", "--eval_strategy", "steps"))
    content, evaluated = state("eval_loss")
    assert (content["logging_steps"], content["eval_steps"], content["save_steps"]) == (1, 500, 500)
    assert set(evaluated) == {3}  # at the end
    assert sorted(path.name for path in tmp_path.glob("out/checkpoint-*")) == ["checkpoint-3"]


def test_a_resumed_run_logs_at_the_same_steps(command, state, tmp_path, monkeypatch):
    argv = command("--max_steps", "9", "--save_steps", "3")
    monkeypatch.setattr(logging_steps, "_LOGS", 3)
    summarization.main(argv)
    history = state()[0]["log_history"]
    monkeypatch.setattr(logging_steps, "_LOGS", 9)  # as if another version chose other steps
    checkpoint = str(tmp_path / "out" / "checkpoint-3")
    summarization.main([*argv, "--resume_from_checkpoint", checkpoint, "--overwrite_output_dir"])
    content, logged = state()
    assert logged == [1, 3, 6, 9]
    assert [entry["loss"] for entry in content["log_history"] if "loss" in entry] == pytest.approx(
        [entry["loss"] for entry in history if "loss" in entry], rel=1e-5
    )
    arguments = torch.load(tmp_path / "out" / "training_args.bin", weights_only=False)
    assert arguments.logging_steps == content["logging_steps"] == 3  # else Trainer warns
