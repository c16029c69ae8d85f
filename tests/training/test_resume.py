import json
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForSeq2SeqLM

import hf_hybrid
from hf_hybrid.training import summarization
from hf_hybrid.training.output_folder import complete_checkpoints
from hf_hybrid.training.trainer import SummarizationTrainer
from tests.tolerances import assert_close

ROOT = Path(hf_hybrid.__file__).parent.parent
STEPS = ("--do_train", "--do_eval", "--max_steps", "6", "--save_steps", "2")


def _losses(folder):
    history = json.loads((folder / "trainer_state.json").read_text(encoding="utf-8"))["log_history"]
    return torch.tensor([entry["loss"] for entry in history if "loss" in entry])


@pytest.fixture(autouse=True)
def plain_ctrl_c():
    """Start from Python's own handler: a shell lets jobs in the background ignore Ctrl-C, and they inherit that."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def _press_ctrl_c(monkeypatch, *, in_step, times=1):
    """Send SIGINT to this process while the given step (from 1) is computed."""
    step = SummarizationTrainer.training_step
    calls = []

    def interrupted(self, *args, **kwargs):
        calls.append(1)
        if len(calls) == in_step:
            for _ in range(times):
                signal.raise_signal(signal.SIGINT)
        return step(self, *args, **kwargs)

    monkeypatch.setattr(SummarizationTrainer, "training_step", interrupted)


@pytest.mark.parametrize("model_type", ["t5", "spade"])
def test_a_resumed_run_ends_where_an_uninterrupted_one_does(arguments, tmp_path, monkeypatch, model_type):
    """With dropout, so that the state of the random numbers counts too."""
    straight = summarization.main(arguments(model_type, tmp_path / "straight", *STEPS))
    argv = arguments(model_type, tmp_path / "resumed", *STEPS)
    with monkeypatch.context() as patch:
        _press_ctrl_c(patch, in_step=3)
        with pytest.raises(KeyboardInterrupt, match=r"after step 3 of 6.*--resume_from_checkpoint auto"):
            summarization.main(argv)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert [Path(path).name for path in complete_checkpoints(tmp_path / "resumed")] == ["checkpoint-2", "checkpoint-3"]
    AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "resumed" / "checkpoint-3")
    resumed = summarization.main([*argv, "--resume_from_checkpoint", "auto"])
    assert_close(_losses(tmp_path / "resumed"), _losses(tmp_path / "straight"), "float32 model")
    assert resumed["eval_loss"] == pytest.approx(straight["eval_loss"], rel=1e-5)
    expected = load_file(tmp_path / "straight" / "model.safetensors")
    for name, tensor in load_file(tmp_path / "resumed" / "model.safetensors").items():
        assert_close(tensor, expected[name], "float32 model")


def test_the_second_ctrl_c_stops_at_once(arguments, tmp_path, monkeypatch):
    _press_ctrl_c(monkeypatch, in_step=4, times=2)
    with pytest.raises(KeyboardInterrupt, match=r"at once.*--resume_from_checkpoint auto"):
        summarization.main(arguments("t5", tmp_path / "out", *STEPS))
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert [Path(path).name for path in complete_checkpoints(tmp_path / "out")] == ["checkpoint-2"]


def test_ctrl_c_without_checkpoints_says_so(arguments, tmp_path, monkeypatch):
    _press_ctrl_c(monkeypatch, in_step=2)
    with pytest.raises(KeyboardInterrupt, match="no checkpoint to continue from"):
        summarization.main(arguments("t5", tmp_path / "out", *STEPS, "--save_strategy", "no"))


def test_ctrl_c_on_the_command_line(arguments, tmp_path):
    argv = arguments("spade", tmp_path / "out", "--do_train", "--max_steps", "100000", "--save_steps", "2")
    argv += ["--save_total_limit", "2"]
    command = [sys.executable, str(ROOT / "run_summarization.py"), *argv]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT)
    try:
        deadline = time.monotonic() + 200
        while not complete_checkpoints(tmp_path / "out"):
            assert process.poll() is None, process.communicate()[1]
            assert time.monotonic() < deadline, "no checkpoint was written"
            time.sleep(0.1)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 130
    assert "Traceback" not in errors
    assert "--resume_from_checkpoint auto" in errors.strip().splitlines()[-1]
    last = complete_checkpoints(tmp_path / "out")[-1]
    assert f"stopped after step {last.rsplit('-', 1)[1]} of" in errors
    AutoModelForSeq2SeqLM.from_pretrained(last)


@pytest.fixture(scope="module")
def finished_run(arguments, tmp_path_factory):
    folder = tmp_path_factory.mktemp("finished") / "out"
    summarization.main(arguments("t5", folder, *STEPS, "--do_predict", "--predict_with_generate"))
    return folder


@pytest.fixture
def used(finished_run, tmp_path):
    """A copy of a finished run with checkpoints of steps 2, 4 and 6."""
    return shutil.copytree(finished_run, tmp_path / "used")


def _content(folder):
    return {path.relative_to(folder): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ([], r"already holds a run.*--resume_from_checkpoint auto.*--overwrite_output_dir"),
        (
            ["--resume_from_checkpoint", "checkpoint-2"],
            r"also holds checkpoint-4, checkpoint-6.*--overwrite_output_dir",
        ),
        (["--resume_from_checkpoint", "checkpoint-9"], "no such folder"),
        (
            ["--resume_from_checkpoint", "."],
            r"is not a complete checkpoint: optimizer.pt missing. Did you mean .*checkpoint-6",
        ),
    ],
)
def test_a_used_folder_is_never_written_over_silently(arguments, used, more, message):
    before = _content(used)
    more = [argument if argument.startswith("--") else str(used / argument) for argument in more]
    with pytest.raises(ValueError, match=message):
        summarization.main([*arguments("t5", used, *STEPS), *more])
    assert _content(used) == before


def test_any_file_makes_a_folder_used(arguments, tmp_path):
    (tmp_path / "notes.txt").write_text("mine", encoding="utf-8")
    with pytest.raises(ValueError, match=r"already holds a run \(notes.txt\)"):
        summarization.main(arguments("t5", tmp_path, *STEPS))
    with pytest.raises(ValueError, match="is a file"):
        summarization.main(arguments("t5", tmp_path / "notes.txt", *STEPS))
    with pytest.raises(ValueError, match="already holds a run"):
        summarization.main(arguments("t5", tmp_path, *STEPS, "--resume_from_checkpoint", "auto"))


def test_permission_starts_anew_and_clears_old_checkpoints(arguments, used, caplog):
    argv = arguments("t5", used, "--do_train", "--max_steps", "3", "--save_steps", "3", "--overwrite_output_dir")
    summarization.main(argv)
    assert [Path(path).name for path in complete_checkpoints(used)] == ["checkpoint-3"]
    assert "deleting" in caplog.text
    assert "checkpoint-6" in caplog.text


def test_permission_does_not_delete_the_model_it_starts_from(arguments, used):
    before = _content(used)
    argv = arguments("t5", used, *STEPS, "--overwrite_output_dir")[4:]
    with pytest.raises(ValueError, match=r"--model_name_or_path .* lies in --output_dir"):
        summarization.main([*argv, "--model_name_or_path", str(used / "checkpoint-4")])
    assert _content(used) == before


def test_evaluation_into_a_used_folder_needs_permission_only_for_files_it_replaces(arguments, used):
    model = ["--model_name_or_path", str(used)]
    predict = [*arguments("t5", used, "--do_predict", "--predict_with_generate")[4:], *model]
    with pytest.raises(ValueError, match=r"already holds predict_results.json, generated_predictions.txt"):
        summarization.main(predict)
    (used / "predict_results.json").unlink()
    (used / "generated_predictions.txt").unlink()
    summarization.main(predict)
    assert (used / "generated_predictions.txt").is_file()
    assert len(complete_checkpoints(used)) == 3
    summarization.main([*predict, "--overwrite_output_dir"])
    assert len(complete_checkpoints(used)) == 3


def test_half_written_checkpoints_are_passed_over(arguments, used):
    (used / "checkpoint-6" / "trainer_state.json").write_text("{", encoding="utf-8")
    (used / "checkpoint-4" / "model.safetensors").unlink()
    assert [Path(path).name for path in complete_checkpoints(used)] == ["checkpoint-2"]
    argv = arguments("t5", used, *STEPS, "--resume_from_checkpoint")
    with pytest.raises(ValueError, match=r"checkpoint-6 is not a complete checkpoint: trainer_state.json missing"):
        summarization.main([*argv, str(used / "checkpoint-6")])


def test_resume_auto_and_true_in_an_empty_folder(arguments, tmp_path):
    argv = arguments("t5", tmp_path / "out", "--do_train", "--max_steps", "1", "--resume_from_checkpoint")
    with pytest.raises(ValueError, match="--resume_from_checkpoint true: there is no complete checkpoint"):
        summarization.main([*argv, "true"])
    summarization.main([*argv, "auto"])
    assert [Path(path).name for path in complete_checkpoints(tmp_path / "out")] == ["checkpoint-1"]
