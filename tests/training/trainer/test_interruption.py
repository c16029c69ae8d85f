import errno
import json
import shutil
import signal

import pytest
import torch
from safetensors.torch import load_file
from transformers import TrainerCallback

from hf_hybrid.training import steps, summarization
from hf_hybrid.training.errors import HungUp, RunFailed, Terminated, run_command_line
from hf_hybrid.training.run_folder import files
from hf_hybrid.training.run_folder.checkpoints import complete_checkpoints
from hf_hybrid.training.run_folder.files import CannotSave
from hf_hybrid.training.trainer.script_trainer import SummarizationTrainer
from tests.matrix import some
from tests.tolerances import assert_close

STEPS = ("--do_train", "--max_steps", "6", "--save_steps", "5", "--gradient_accumulation_steps", "2")
EVALUATE = ("--do_eval", "--eval_strategy", "steps", "--eval_steps", "2")


def _losses(folder):
    history = json.loads((folder / "trainer_state.json").read_text(encoding="utf-8"))["log_history"]
    return torch.tensor([entry["loss"] for entry in history if "loss" in entry])


def _steps(folder):
    return [int(path.rsplit("-", 1)[1]) for path in complete_checkpoints(folder)]


@pytest.fixture(scope="module")
def straight(arguments, tmp_path_factory):
    """A run that nothing interrupts: 32 examples make 4 steps an epoch."""
    folder = tmp_path_factory.mktemp("straight") / "out"
    summarization.main(arguments("t5", folder, *STEPS, *EVALUATE))
    return folder


def _fail_in_batch(monkeypatch, number):
    step, calls = SummarizationTrainer.training_step, []

    def failing(self, *args, **kwargs):
        calls.append(1)
        if len(calls) == number:
            torch.rand(3)  # what the unfinished step draws is not to count
            raise torch.OutOfMemoryError("CUDA out of memory")
        return step(self, *args, **kwargs)

    monkeypatch.setattr(SummarizationTrainer, "training_step", failing)


class _Failing(TrainerCallback):
    def __init__(self, event, step):
        def fail(args, state, control, **kwargs):
            if state.global_step == step:
                raise RuntimeError("a callback failed")

        setattr(self, event, fail)


def _fail_in_callback(monkeypatch, event, step):
    def train(trainer, resume_from, argv):
        trainer.add_callback(_Failing(event, step))
        return steps.train(trainer, resume_from, argv)

    monkeypatch.setattr(summarization, "train", train)


def _resume(arguments, folder):
    return summarization.main(arguments("t5", folder, *STEPS, *EVALUATE, "--resume_from_checkpoint", "auto"))


def _assert_same_run(out, straight, without=()):
    kept = [index for index in range(6) if index + 1 not in without]
    assert_close(_losses(out), _losses(straight)[kept], "exact")
    wanted = load_file(straight / "model.safetensors")
    for name, tensor in load_file(out / "model.safetensors").items():
        assert_close(tensor, wanted[name], "exact")


@pytest.mark.parametrize(("batch", "done"), some([(6, 2), (9, 4)], (9, 4)))
def test_an_error_saves_the_last_finished_step(arguments, tmp_path, monkeypatch, straight, batch, done):
    """In the second half of a step, and in the first step of an epoch; with dropout, so that random numbers count."""
    out = tmp_path / "out"
    with monkeypatch.context() as patch:
        _fail_in_batch(patch, batch)
        with pytest.raises(torch.OutOfMemoryError) as caught:
            summarization.main(arguments("t5", out, *STEPS, *EVALUATE))
    assert f"Step {done} was saved after the error." in caught.value.__notes__[0]
    assert "--resume_from_checkpoint auto" in caught.value.__notes__[0]
    assert _steps(out) == [done]
    _resume(arguments, out)
    _assert_same_run(out, straight)


@pytest.mark.parametrize(("event", "step"), [("on_step_end", 3), ("on_evaluate", 4)])
def test_an_error_at_the_end_of_a_step_saves_it(arguments, tmp_path, monkeypatch, straight, event, step):
    out = tmp_path / "out"
    with monkeypatch.context() as patch:
        _fail_in_callback(patch, event, step)
        with pytest.raises(RuntimeError, match="a callback failed") as caught:
            summarization.main(arguments("t5", out, *STEPS, *EVALUATE))
    assert f"Step {step} was saved after the error." in caught.value.__notes__[0]
    assert _steps(out) == [step]
    _resume(arguments, out)
    _assert_same_run(out, straight, without=[3] if event == "on_step_end" else [])  # it was not logged yet


@pytest.mark.parametrize(
    ("event", "step", "more", "note", "saved"),
    [
        ("on_optimizer_step", 3, (), "Step 4 failed while the weights were changed, so nothing was saved", []),
        ("on_step_begin", 0, (), "No step was finished", []),
        ("on_step_begin", 5, (), "To continue from the last checkpoint", [5]),
        ("on_step_begin", 3, ("--save_strategy", "no"), "no checkpoint to continue from: --save_strategy is no", []),
    ],
)
def test_an_error_that_leaves_nothing_to_save_says_so(
    arguments, tmp_path, monkeypatch, event, step, more, note, saved
):
    _fail_in_callback(monkeypatch, event, step)
    with pytest.raises(RuntimeError, match="a callback failed") as caught:
        summarization.main(arguments("t5", tmp_path / "out", *STEPS, *more))
    assert note in caught.value.__notes__[0]
    assert _steps(tmp_path / "out") == saved


def test_a_disk_that_is_full_is_not_written_to_again(arguments, tmp_path, monkeypatch):
    def fail(self, *args, **kwargs):
        if self.state.global_step:
            raise RuntimeError("a log could not be written") from OSError(errno.ENOSPC, "No space left on device")
        return step(self, *args, **kwargs)

    step = SummarizationTrainer.training_step
    monkeypatch.setattr(SummarizationTrainer, "training_step", fail)
    with pytest.raises(RuntimeError, match="a log could not be written"):
        summarization.main(arguments("t5", tmp_path / "out", *STEPS))
    assert not list(tmp_path.glob("out/checkpoint-*"))


def test_weights_that_are_spoiled_are_not_saved(arguments, tmp_path, monkeypatch):
    def spoil(self, *args, **kwargs):
        if self.state.global_step == 2:
            with torch.no_grad():
                next(self.model.parameters()).fill_(torch.inf)
            raise RuntimeError("spoiled")
        return step(self, *args, **kwargs)

    step = SummarizationTrainer.training_step
    monkeypatch.setattr(SummarizationTrainer, "training_step", spoil)
    with pytest.raises(RuntimeError, match="spoiled") as caught:
        summarization.main(arguments("t5", tmp_path / "out", *STEPS))
    assert "The weights of step 2 are not finite either" in caught.value.__notes__[0]
    assert _steps(tmp_path / "out") == []


def test_sigterm_stops_like_ctrl_c(arguments, tmp_path, monkeypatch, straight):
    out, step = tmp_path / "out", SummarizationTrainer.training_step

    def terminated(self, *args, **kwargs):
        if self.state.global_step == 2:
            signal.raise_signal(signal.SIGTERM)
        return step(self, *args, **kwargs)

    before = signal.getsignal(signal.SIGTERM)
    with monkeypatch.context() as patch:
        patch.setattr(SummarizationTrainer, "training_step", terminated)  # twice, once in each half of a step
        with pytest.raises(Terminated, match=r"after step 3 of 6.*--resume_from_checkpoint auto"):
            summarization.main(arguments("t5", out, *STEPS, *EVALUATE))
    assert signal.getsignal(signal.SIGTERM) is before
    assert _steps(out) == [3]
    _resume(arguments, out)
    _assert_same_run(out, straight)


def test_signals_that_are_ignored_stay_ignored(arguments, tmp_path, monkeypatch):
    def signalled(self, *args, **kwargs):
        signal.raise_signal(signal.SIGHUP)
        return step(self, *args, **kwargs)

    step = SummarizationTrainer.training_step
    monkeypatch.setattr(SummarizationTrainer, "training_step", signalled)
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does
    try:
        summarization.main(arguments("t5", tmp_path / "out", "--do_train", "--max_steps", "2"))
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize("name", ["trainer_state.json", "train_results.json", "generated_predictions.txt"])
def test_results_for_which_there_is_no_room(arguments, tmp_path, monkeypatch, name):
    def full(path):
        if name in path.name and path.parent == tmp_path / "out":
            raise OSError(errno.ENOSPC, "No space left on device")  # without a name, as writing raises it
        sync(path)

    sync = files.sync
    monkeypatch.setattr(files, "sync", full)
    argv = arguments("t5", tmp_path / "out", *STEPS, "--do_predict", "--predict_with_generate")
    with pytest.raises(CannotSave, match=rf"while {name} was written; .*--resume_from_checkpoint auto") as caught:
        summarization.main(argv)
    assert "could not be saved" in str(caught.value)
    assert not [path.name for path in tmp_path.glob(f"out/*{name}*")]
    monkeypatch.undo()
    summarization.main([*argv, "--resume_from_checkpoint", "auto"])
    assert (tmp_path / "out" / name).is_file() or name == "train_results.json"  # the run that trained has lost it


def test_an_output_folder_that_is_deleted_meanwhile(arguments, tmp_path, monkeypatch):
    def deleting(self):
        shutil.rmtree(tmp_path / "out")
        save_state(self)

    save_state = SummarizationTrainer.save_state
    monkeypatch.setattr(SummarizationTrainer, "save_state", deleting)
    summarization.main(arguments("t5", tmp_path / "out", "--do_train", "--max_steps", "1"))
    assert (tmp_path / "out" / "trainer_state.json").is_file()


def test_a_signal_that_ends_a_helper_too_still_counts(arguments, tmp_path, monkeypatch):
    """A supervisor may signal all processes at once; then those that load the data are gone."""

    def terminated(self, *args, **kwargs):
        if self.state.global_step == 2:
            signal.raise_signal(signal.SIGTERM)
            raise RuntimeError("DataLoader worker (pid 7) is killed by signal: Terminated.")
        return step(self, *args, **kwargs)

    step = SummarizationTrainer.training_step
    monkeypatch.setattr(SummarizationTrainer, "training_step", terminated)
    with pytest.raises(Terminated, match=r"after step 2 of 6. Step 2 was saved.*auto.*DataLoader worker"):
        summarization.main(arguments("t5", tmp_path / "out", *STEPS))
    assert _steps(tmp_path / "out") == [2]


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (Terminated("stopped"), 143, "interrupted: stopped"),
        (HungUp("stopped"), 129, "interrupted: stopped"),
        (KeyboardInterrupt("stopped"), 130, "interrupted: stopped"),
        (
            OSError(errno.ENOSPC, "No space left on device", "/cache/rows.arrow"),
            1,
            "error: there is no room on a disk: [Errno 28] No space left on device: '/cache/rows.arrow'. Make some "
            "and run the same command again.",
        ),
        (RunFailed("no room"), 1, "error: no room. Do that."),
    ],
)
def test_exit_codes(capsys, error, code, line):
    def main():
        if isinstance(error, RunFailed):
            error.add_note("Do that.")
        raise error

    with pytest.raises(SystemExit) as left:
        run_command_line(main)
    assert left.value.code == code
    assert capsys.readouterr().err.strip() == line


def test_ctrl_c_counts_where_a_library_stumbles_over_it(capsys):
    """So does `datasets`, whose processes do not answer any more."""

    def main():
        try:
            raise KeyboardInterrupt
        finally:
            raise TimeoutError

    with pytest.raises(SystemExit) as left:
        run_command_line(main)
    assert left.value.code == 130
    assert capsys.readouterr().err.strip() == "interrupted"
