import contextlib
import copy
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForSeq2SeqLM
from transformers import trainer as trainer_module

import hf_hybrid
from hf_hybrid.training import summarization
from hf_hybrid.training.flags.overrides import parse_config_overrides
from hf_hybrid.training.run_folder.checkpoints import complete_checkpoints
from hf_hybrid.training.run_folder.output_folder import clear_output_folder
from hf_hybrid.training.run_folder.resume import check_resumed_model, find_resume_checkpoint
from hf_hybrid.training.trainer import script_trainer
from hf_hybrid.training.trainer.script_trainer import ScriptTrainer, SummarizationTrainer
from tests.matrix import some
from tests.tolerances import assert_close
from tests.training.conftest import MODELS, T5
from tests.training.pages import read_page

ROOT = Path(hf_hybrid.__file__).parent.parent
STEPS = ("--do_train", "--do_eval", "--max_steps", "6", "--save_steps", "2")


def _read(path):
    return json.loads(path.read_text(encoding="utf-8"))


def _losses(folder):
    history = _read(folder / "trainer_state.json")["log_history"]
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


@pytest.mark.parametrize("model_type", some(["t5", "spade"], "spade"))
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


def test_ctrl_c_counts_in_the_last_evaluation_too(arguments, tmp_path, monkeypatch):
    evaluate = SummarizationTrainer.evaluate

    def interrupted(self, *args, **kwargs):
        if self.state.global_step == 6:
            signal.raise_signal(signal.SIGINT)
        return evaluate(self, *args, **kwargs)

    monkeypatch.setattr(SummarizationTrainer, "evaluate", interrupted)
    argv = arguments("t5", tmp_path / "out", *STEPS, "--eval_strategy", "steps", "--eval_steps", "3")
    with pytest.raises(KeyboardInterrupt, match=r"after step 6 of 6.*--resume_from_checkpoint auto"):
        summarization.main(argv)
    assert not (tmp_path / "out" / "eval_results.json").exists()
    assert complete_checkpoints(tmp_path / "out")[-1].endswith("checkpoint-6")


def test_the_second_ctrl_c_stops_at_once(arguments, tmp_path, monkeypatch):
    _press_ctrl_c(monkeypatch, in_step=4, times=2)
    with pytest.raises(KeyboardInterrupt, match=r"at once.*--resume_from_checkpoint auto"):
        summarization.main(arguments("t5", tmp_path / "out", *STEPS))
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert [Path(path).name for path in complete_checkpoints(tmp_path / "out")] == ["checkpoint-2"]


def test_the_second_ctrl_c_before_the_first_checkpoint(arguments, tmp_path, monkeypatch):
    _press_ctrl_c(monkeypatch, in_step=1, times=2)
    with pytest.raises(KeyboardInterrupt, match=r"at once. There is no checkpoint in .*out to continue from"):
        summarization.main(arguments("t5", tmp_path / "out", *STEPS))


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
            r"is not a complete checkpoint: optimizer.pt missing and scheduler.pt missing. Did you .*checkpoint-6",
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
    with pytest.raises(ValueError, match=r"notes.txt/out must be a folder that can be written to; .*notes.txt cannot"):
        summarization.main(arguments("t5", tmp_path / "notes.txt" / "out", *STEPS))
    with pytest.raises(ValueError, match="already holds a run"):
        summarization.main(arguments("t5", tmp_path, *STEPS, "--resume_from_checkpoint", "auto"))


def test_a_file_in_a_checkpoints_place(arguments, used):
    (used / "checkpoint-8").write_text("mine", encoding="utf-8")
    with pytest.raises(ValueError, match="must hold no file named like a checkpoint; checkpoint-8 is one"):
        summarization.main(arguments("t5", used, *STEPS, "--resume_from_checkpoint", "auto"))


def test_a_folder_that_cannot_be_written_to_is_refused_at_once(arguments, tmp_path, monkeypatch, no_data):
    no_data()
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != tmp_path)  # to root, all folders can be
    with pytest.raises(ValueError, match=rf"out must be a folder that can be written to; {tmp_path} cannot"):
        summarization.main(arguments("t5", tmp_path / "out", *STEPS))


def test_a_finished_run_keeps_its_results_when_it_is_resumed(arguments, used, caplog):
    before = _read(used / "train_results.json")
    resumed = [*arguments("t5", used, *STEPS), "--resume_from_checkpoint", "auto", "--report", "true"]
    metrics = summarization.main(resumed)
    page = read_page(used / "report.html")
    assert page.problems == []
    assert page.facts["training"] == "finished before this run, which took no step"
    assert "A run that evaluated, finished on" in page.text
    assert "Curves" in page.headings
    assert "has had 6 of 6 steps: nothing is left to train" in caplog.text
    assert _read(used / "train_results.json") == before
    assert before.items() <= _read(used / "all_results.json").items()
    assert before.items() <= metrics.items()
    assert before["train_loss"] > 0
    weights, last = (load_file(folder / "model.safetensors") for folder in (used, used / "checkpoint-6"))
    for name, tensor in last.items():
        assert_close(weights[name], tensor, "exact")
    further = summarization.main([*resumed, "--max_steps", "8"])
    assert further["train_runtime"] != before["train_runtime"]
    page = read_page(used / "report.html")
    assert (page.facts["resumed at step"], page.facts["steps taken"], page.facts["steps"]) == ("6", "2", "8")


def test_permission_starts_anew_and_clears_old_checkpoints(arguments, used, caplog):
    argv = arguments("t5", used, "--do_train", "--max_steps", "3", "--save_steps", "3", "--overwrite_output_dir")
    summarization.main(argv)
    assert [Path(path).name for path in complete_checkpoints(used)] == ["checkpoint-3"]
    assert "deleting" in caplog.text
    assert "checkpoint-6" in caplog.text


@pytest.mark.parametrize(
    "more",
    [
        ["--text_column", "documnt"],
        ["--validation_file", "no-such.jsonl"],
        ["--tokenizer_name", "/no/such"],
        ["--config_overrides", "d_model=32,num_heads=4,vocab_size=9"],
    ],
)
def test_nothing_is_lost_to_a_run_that_does_not_start(arguments, used, more):
    before = _content(used)
    with pytest.raises(ValueError, match=rf"{more[0]}|{more[1]}"):
        summarization.main([*arguments("t5", used, *STEPS, "--overwrite_output_dir"), *more])
    assert _content(used) == before


@pytest.mark.parametrize(
    "flag", ["--model_name_or_path", "--tokenizer_name", "--config_name", "--resume_from_checkpoint"]
)
def test_permission_does_not_delete_what_the_run_is_made_from(arguments, used, flag):
    source = used / "checkpoint-4"
    if flag == "--resume_from_checkpoint":
        source = shutil.copytree(used / "checkpoint-2", used / "checkpoint-4" / "checkpoint-2")
    before = _content(used)
    argv = arguments("t5", used, *STEPS, "--overwrite_output_dir", flag, str(source))
    if flag in ("--model_name_or_path", "--config_name"):
        argv = argv[4:]
    with pytest.raises(ValueError, match=rf"{flag} .* lies in --output_dir .*--overwrite_output_dir deletes"):
        summarization.main(argv)
    assert _content(used) == before


def test_tied_weights_are_not_said_to_be_missing(arguments, used, monkeypatch):
    """A checkpoint has one copy of them; what is missing besides is said."""
    said = []
    monkeypatch.setattr(trainer_module.logger, "warning", lambda text, *_: said.append(text))
    argv = [*arguments("t5", used, *STEPS), "--overwrite_output_dir", "--resume_from_checkpoint"]
    summarization.main([*argv, str(used / "checkpoint-4")])
    assert [text for text in said if "missing keys" in text] == []
    result = SimpleNamespace(missing_keys=["lm_head.weight", "shared.bias"], unexpected_keys=[])
    model = SimpleNamespace(all_tied_weights_keys={"lm_head.weight": "shared.weight"}, _keys_to_ignore_on_save=None)
    trainer = ScriptTrainer.__new__(ScriptTrainer)
    trainer.model = model
    trainer._issue_warnings_after_load(result)
    assert said[-1].endswith("['shared.bias'].")


def test_permission_to_resume_earlier_deletes_only_what_comes_after(arguments, used):
    argv = arguments("t5", used, "--do_train", "--max_steps", "3", "--save_steps", "3", "--overwrite_output_dir")
    summarization.main([*argv, "--resume_from_checkpoint", str(used / "checkpoint-2")])
    assert [Path(path).name for path in complete_checkpoints(used)] == ["checkpoint-2", "checkpoint-3"]


def test_permission_leaves_no_result_of_the_old_run(arguments, used):
    (used / "notes.txt").write_text("mine", encoding="utf-8")
    argv = arguments("t5", used, "--do_train", "--max_steps", "1", "--overwrite_output_dir")
    metrics = summarization.main(argv)
    for name in ("eval_results.json", "predict_results.json", "generated_predictions.txt"):
        assert not (used / name).exists(), name
    assert _read(used / "all_results.json") == metrics == _read(used / "train_results.json")
    assert _read(used / "trainer_state.json")["global_step"] == 1
    assert (used / "notes.txt").is_file()


def test_permission_without_training_replaces_what_the_run_writes(arguments, used):
    train = _read(used / "train_results.json")
    argv = arguments("t5", used, "--do_predict", "--overwrite_output_dir", "--model_name_or_path", str(used))[4:]
    predicted = summarization.main(argv)  # without --predict_with_generate
    assert not (used / "generated_predictions.txt").exists()
    written = _read(used / "all_results.json")
    assert {name for name in written if name.startswith("predict_")} == set(predicted)
    assert train.items() <= written.items()
    assert "eval_loss" in written
    assert len(complete_checkpoints(used)) == 3


@pytest.mark.parametrize("process_index", [0, 1])
def test_the_main_process_deletes_while_the_others_wait(used, process_index):
    order = []

    @contextlib.contextmanager
    def main_process_first(**kwargs):
        order.append(len(complete_checkpoints(used)))
        yield
        order.append(len(complete_checkpoints(used)))

    args = SimpleNamespace(
        output_dir=str(used), overwrite_output_dir=True, do_train=True, process_index=process_index,
        main_process_first=main_process_first, resume_from_checkpoint=None,
    )  # fmt: skip
    clear_output_folder(args, None, [], None)
    assert order == [3, 0 if process_index == 0 else 3]


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (
            ["--config_overrides", T5.replace("num_layers=1", "num_layers=2")],
            "num_layers is 1 there and 2 in this run",
        ),
        (["--config_overrides", f"{T5},dropout_rate=0.5"], "dropout_rate is 0.1 there and 0.5 in this run"),
        (["--config_overrides", f"{T5},vocab_size=999"], "vocab_size is 300 there and 999 in this run"),
        (["--model_type", "longt5"], "model_type is 't5' there and 'longt5' in this run"),
    ],
)
def test_a_run_of_another_model_is_not_resumed(arguments, used, no_data, more, message):
    no_data()
    before = _content(used)
    argv = [*arguments("t5", used, *STEPS), *more, "--resume_from_checkpoint", "auto", "--overwrite_output_dir"]
    with pytest.raises(ValueError, match=rf"--resume_from_checkpoint .*checkpoint-6: {message}"):
        summarization.main(argv)
    assert _content(used) == before


def test_a_run_that_0_1_0_began_goes_on_where_only_starting_values_are_others():
    folder = str(Path(__file__).parents[2] / "models" / "saved_by_0_1_0" / "spade_causal_lm")
    config = AutoConfig.from_pretrained(folder)
    check_resumed_model(config, folder, new=True)
    config.initializer_range, config.relative_attention_init = 0.5, "recency"
    check_resumed_model(config, folder, new=True)
    config.scale_embeddings = True
    remedy = r"continue with that model \(--config_overrides scale_embeddings=False\)"
    with pytest.raises(ValueError, match=f"scale_embeddings is False there and True in this run; {remedy}"):
        check_resumed_model(config, folder, new=True)


def test_a_run_from_another_checkpoint_is_not_resumed(arguments, used, tmp_path):
    config = AutoConfig.from_pretrained(used)
    config.d_ff = 48
    AutoModelForSeq2SeqLM.from_config(config).save_pretrained(tmp_path / "other")
    argv = arguments("t5", used, *STEPS, "--resume_from_checkpoint", "auto", "--tokenizer_name", str(used))[4:]
    with pytest.raises(ValueError, match="d_ff is 32 there and 48 in this run"):
        summarization.main([*argv, "--model_name_or_path", str(tmp_path / "other")])


@pytest.mark.parametrize("model_type", [*MODELS, "led with one window for all layers"])
def test_a_saved_configuration_equals_itself(tmp_path, model_type):
    model_type, *one_window = model_type.split(" with ")
    config_class = CONFIG_MAPPING[model_type]
    overrides = MODELS[model_type].replace("[8]", "8" if one_window else "[8]")
    config = config_class(**parse_config_overrides(overrides, config_class))
    AutoModelForSeq2SeqLM.from_config(copy.deepcopy(config)).save_pretrained(tmp_path)
    check_resumed_model(config, str(tmp_path), new=True)
    config.vocab_size += 1
    check_resumed_model(config, str(tmp_path), new=False)
    with pytest.raises(ValueError, match="vocab_size"):
        check_resumed_model(config, str(tmp_path), new=True)


def test_a_checkpoint_whose_configuration_cannot_be_read(arguments, used):
    (used / "checkpoint-6" / "config.json").write_text("[]", encoding="utf-8")
    for marker in used.glob("checkpoint-*/complete.json"):  # as plain transformers leaves its checkpoints
        marker.unlink()
    argv = arguments("t5", used, *STEPS, "--resume_from_checkpoint", "auto", "--tokenizer_name", str(used))
    with pytest.raises(ValueError, match=r"checkpoint-6: its config.json cannot be read"):
        summarization.main(argv)


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
    with pytest.raises(ValueError, match=r"checkpoint-6 is not a complete checkpoint: trainer_state.json damaged"):
        summarization.main([*argv, str(used / "checkpoint-6")])


def _damage(checkpoint, how):
    """Do something to a checkpoint; what should be said about it."""
    weights, marker = checkpoint / "model.safetensors", checkpoint / "complete.json"
    content = weights.read_bytes()
    if how == "cut":
        weights.write_bytes(content[:-1])
        return f"model.safetensors damaged ({len(content) - 1} of {len(content)} bytes)"
    if how == "flipped":  # one bit, in the middle of a weight
        middle = len(content) // 2
        weights.write_bytes(content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :])
        return "model.safetensors damaged (it is not what was saved)"
    if how == "lost":
        (checkpoint / "rng_state.pth").unlink()
        return "rng_state.pth missing"
    if how == "unfinished":
        (checkpoint / "_incomplete").touch()
        return "its saving was cut off"
    if how == "no marker":
        marker.unlink()
        return "complete.json missing"
    text = marker.read_text(encoding="utf-8")
    marker.write_text({"marker cut": text[: len(text) // 2], "marker empty": "", "marker odd": "[1]"}[how])
    return "complete.json is damaged"


DAMAGE = ("cut", "flipped", "lost", "unfinished", "marker cut", "marker empty", "marker odd", "no marker")


@pytest.mark.parametrize("how", DAMAGE)
def test_a_damaged_checkpoint_is_named_and_passed_over(used, caplog, how):
    said = _damage(used / "checkpoint-6", how)
    args = SimpleNamespace(resume_from_checkpoint="auto", do_train=True, output_dir=str(used), process_index=0)
    assert find_resume_checkpoint(args) == str(used / "checkpoint-4")
    assert f"{used / 'checkpoint-6'} is skipped: {said}." in caplog.text
    assert [Path(path).name for path in complete_checkpoints(used)] == ["checkpoint-2", "checkpoint-4"]
    args.resume_from_checkpoint = str(used / "checkpoint-6")
    if how == "no marker":  # whoever names it may have it
        assert find_resume_checkpoint(args) == str(used / "checkpoint-6")
        return
    message = (
        f"{args.resume_from_checkpoint} is not a complete checkpoint: {said}. Did you mean {used / 'checkpoint-4'}?"
    )
    with pytest.raises(ValueError, match=re.escape(message)):
        find_resume_checkpoint(args)


def test_checkpoints_of_plain_transformers_have_no_marker(used):
    for marker in used.glob("checkpoint-*/complete.json"):
        marker.unlink()
    (used / "checkpoint-6" / "optimizer.pt").unlink()
    assert [Path(path).name for path in complete_checkpoints(used)] == ["checkpoint-2", "checkpoint-4"]


@pytest.mark.parametrize(
    "name", ["model.safetensors", "optimizer.pt", "scheduler.pt", "rng_state.pth", "trainer_state.json"]
)
def test_files_that_end_too_early_show_without_a_marker_too(used, caplog, name):
    for marker in used.glob("checkpoint-*/complete.json"):
        marker.unlink()
    path = used / "checkpoint-6" / name
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    (used / "checkpoint-4" / "scheduler.pt").unlink()
    args = SimpleNamespace(resume_from_checkpoint="auto", do_train=True, output_dir=str(used), process_index=0)
    assert find_resume_checkpoint(args) == str(used / "checkpoint-2")
    assert f"{used / 'checkpoint-6'} is skipped: {name} damaged." in caplog.text
    assert f"{used / 'checkpoint-4'} is skipped: scheduler.pt missing." in caplog.text


def test_the_newest_checkpoint_is_the_one_of_the_last_step(arguments, tmp_path, monkeypatch):
    """Whatever the clock says, or a copy by hand has made of it."""

    def saving(self, *args, **kwargs):
        for path in tmp_path.glob("out/checkpoint-*"):
            os.utime(path, (4e9, 4e9))
        save_checkpoint(self, *args, **kwargs)

    save_checkpoint = SummarizationTrainer._save_checkpoint
    monkeypatch.setattr(SummarizationTrainer, "_save_checkpoint", saving)
    summarization.main(arguments("t5", tmp_path / "out", *STEPS, "--save_total_limit", "1"))
    assert [path.name for path in tmp_path.glob("out/checkpoint-*")] == ["checkpoint-6"]


def test_a_run_that_was_cut_off_in_its_first_save_begins_anew(arguments, tmp_path):
    out = tmp_path / "out"
    (out / "checkpoint-4").mkdir(parents=True)
    (out / "checkpoint-4" / "_incomplete").touch()
    argv = arguments("t5", out, "--do_train", "--max_steps", "1")
    with pytest.raises(ValueError, match="already holds a run"):
        summarization.main(argv)
    summarization.main([*argv, "--resume_from_checkpoint", "auto"])
    assert [path.name for path in out.glob("checkpoint-*")] == ["checkpoint-1"]


def test_an_old_checkpoint_goes_only_when_the_new_one_is_whole(arguments, tmp_path, monkeypatch):
    def fail(folder):
        if folder.name == "checkpoint-4":
            assert (tmp_path / "out" / "checkpoint-2").is_dir()
            raise ZeroDivisionError
        mark(folder)

    mark = script_trainer.mark_complete
    monkeypatch.setattr(script_trainer, "mark_complete", fail)
    with pytest.raises(ZeroDivisionError) as caught:
        summarization.main(arguments("t5", tmp_path / "out", *STEPS, "--save_total_limit", "1"))
    assert [Path(path).name for path in complete_checkpoints(tmp_path / "out")] == ["checkpoint-2"]
    assert not any("saved after" in note for note in caught.value.__notes__)
    limit = torch.load(tmp_path / "out" / "checkpoint-4" / "training_args.bin", weights_only=False).save_total_limit
    assert limit == 1


def test_the_best_checkpoint_is_not_loaded_when_it_is_damaged(arguments, tmp_path, monkeypatch, caplog):
    out, save_checkpoint = tmp_path / "out", SummarizationTrainer._save_checkpoint

    def damaging(self, *args, **kwargs):
        save_checkpoint(self, *args, **kwargs)
        if self.state.global_step == 4:
            _damage(out / "checkpoint-2", "flipped")

    def best_at_two(self, metrics, trial):
        self.state.best_global_step = 2
        return False

    monkeypatch.setattr(SummarizationTrainer, "_save_checkpoint", damaging)
    monkeypatch.setattr(SummarizationTrainer, "_determine_best_metric", best_at_two)
    more = ("--load_best_model_at_end", "--eval_strategy", "steps", "--eval_steps", "2")
    summarization.main(arguments("t5", out, *STEPS, *more))
    assert "checkpoint-2 is not loaded: model.safetensors damaged (it is not what was saved)" in caplog.text
    weights, last = (load_file(folder / "model.safetensors") for folder in (out, out / "checkpoint-6"))
    for name, tensor in last.items():
        assert_close(weights[name], tensor, "exact")


def test_a_model_whose_saving_was_cut_off_is_not_loaded(arguments, used, tmp_path, monkeypatch):
    def killed(self, folder, state_dict=None):
        raise KeyboardInterrupt

    monkeypatch.setattr(SummarizationTrainer, "_save", killed)
    with pytest.raises(KeyboardInterrupt):
        summarization.main([*arguments("t5", used, *STEPS), "--resume_from_checkpoint", "auto"])
    monkeypatch.undo()
    argv = arguments("t5", tmp_path / "out", "--do_eval", "--model_name_or_path", str(used))[4:]
    with pytest.raises(
        ValueError, match=r"does not hold a complete model: its saving was cut off.*_from_checkpoint auto"
    ):
        summarization.main(argv)
    summarization.main([*arguments("t5", used, *STEPS), "--resume_from_checkpoint", "auto"])
    assert not (used / "_incomplete").exists()
    summarization.main(argv)


def test_auto_goes_on_from_before_a_save_that_was_cut_off(arguments, used, caplog):
    (used / "checkpoint-6" / "trainer_state.json").unlink()
    summarization.main([*arguments("t5", used, *STEPS), "--resume_from_checkpoint", "auto"])
    assert "not complete: deleting checkpoint-6" in caplog.text
    assert [Path(path).name for path in complete_checkpoints(used)][-1] == "checkpoint-6"


def test_permission_leaves_no_weights_that_could_pass_for_the_new_runs(arguments, used, monkeypatch):
    _press_ctrl_c(monkeypatch, in_step=1)
    with pytest.raises(KeyboardInterrupt):
        summarization.main(arguments("t5", used, *STEPS, "--overwrite_output_dir"))
    assert not (used / "model.safetensors").exists()


def test_permission_keeps_the_weights_that_a_run_starts_from(arguments, used, monkeypatch):
    before = (used / "model.safetensors").read_bytes()
    argv = arguments("t5", used, *STEPS, "--overwrite_output_dir", "--model_name_or_path", str(used))[4:]
    _press_ctrl_c(monkeypatch, in_step=1)
    with pytest.raises(KeyboardInterrupt):
        summarization.main(argv)
    assert (used / "model.safetensors").read_bytes() == before


@pytest.mark.parametrize("content", [b"", b"not a tensor in sight", "cut"])
def test_damaged_weights_are_refused(arguments, used, tmp_path, content):
    path = used / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100] if content == "cut" else content)
    argv = arguments("t5", tmp_path / "out", "--do_eval", "--model_name_or_path", str(used))[4:]
    with pytest.raises(ValueError, match=rf"^--model_name_or_path {used}: .+"):
        summarization.main(argv)


def test_weights_that_are_missing_are_not_made_up(arguments, used, tmp_path):
    path = used / "model.safetensors"
    tensors = load_file(path)
    lost = "decoder.final_layer_norm.weight"
    save_file({name: tensor for name, tensor in tensors.items() if name != lost}, path, metadata={"format": "pt"})
    argv = arguments("t5", tmp_path / "out", "--model_name_or_path", str(used))[4:]
    with pytest.raises(ValueError, match=rf"lacks 1 of the weights of T5ForCond.*such as {lost}; it must be trained"):
        summarization.main([*argv, "--do_eval"])
    summarization.main([*argv, "--do_train", "--max_steps", "1"])


def test_resume_auto_and_true_in_an_empty_folder(arguments, tmp_path):
    argv = arguments("t5", tmp_path / "out", "--do_train", "--max_steps", "1", "--resume_from_checkpoint")
    with pytest.raises(ValueError, match="--resume_from_checkpoint true: there is no complete checkpoint"):
        summarization.main([*argv, "true"])
    summarization.main([*argv, "auto"])
    assert [Path(path).name for path in complete_checkpoints(tmp_path / "out")] == ["checkpoint-1"]
