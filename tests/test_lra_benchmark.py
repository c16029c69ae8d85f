"""The Long Range Arena in slices: what was stopped ends as if it had not been, and recipes are the papers'."""

import json
import os
import signal
import subprocess
import sys
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from benchmarks import lra
from benchmarks.lra import main
from benchmarks.lra_recipes import MODELS, PAPERS, classifier_of, recipe_of
from benchmarks.record import only_process
from hf_hybrid.data.lra import LRA, LraRows
from hf_hybrid.training.collating import LongRangeRows


def has_recipe(model, task):
    try:
        recipe_of(model, task)
    except ValueError:
        return False
    return True


@pytest.mark.parametrize(
    ("model", "task"), [(model, task) for model in MODELS for task in LRA if has_recipe(model, task)]
)
def test_every_model_reads_every_task(model, task):
    known = LRA[task]
    torch.manual_seed(0)
    classifier = classifier_of(recipe_of(model, task, small=True), task).eval()
    kept = torch.ones(2, 24, dtype=torch.long)
    kept[1, 16:] = 0
    reads = "input_values" if known.vocab_size is None else "input_ids"
    inputs = torch.randn(2, 24) if known.vocab_size is None else torch.randint(1, known.vocab_size, (2, 24))
    batch = {reads: inputs, "attention_mask": kept}
    if known.is_pair:
        batch |= {f"pair_{name}": value for name, value in batch.items()}
    logits = classifier(**batch).logits
    assert logits.shape == (2, known.labels)
    changed = inputs.clone()
    changed[1, 16:] = 1
    again = classifier(**batch | {name: changed for name in batch if name.endswith(reads)}).logits
    torch.testing.assert_close(again, logits)  # padding does not count


@pytest.fixture
def small(tmp_path, monkeypatch):
    torch.set_num_threads(1)
    monkeypatch.setattr(lra, "_SMALL_ROWS", {"train": 20, "validation": 8, "test": 8})
    monkeypatch.setitem(lra.LRA, "lra_listops_200", replace(lra.LRA["lra_listops_200"], counts=(20, 8, 8)))

    def run(name, *more):
        out = str(tmp_path / name)
        return main(["--task", "lra_listops_200", "--small", "--device", "cpu", "--output_dir", out, *more])

    return run


def folder_of(tmp_path, name):
    return tmp_path / name / "lra_listops_200" / "CHELA-0-small"


def test_a_run_in_slices_ends_like_one_that_never_stopped(small, tmp_path, capsys):
    assert small("whole") == 0
    assert "| **CHELA**, here |" in capsys.readouterr().out
    slices = 0
    while not (folder_of(tmp_path, "cut") / lra.RESULT).exists():
        assert small("cut", "--minutes", "1e-9") == 0  # an update each, or a batch of the last validation or test
        slices += 1
    assert slices == 8  # two epochs of three batches
    assert "step 1 of 6 after" in capsys.readouterr().out
    whole, cut = (torch.load(folder_of(tmp_path, name) / lra.CHECKPOINT) for name in ("whole", "cut"))
    assert whole["step"] == cut["step"] == 6
    torch.testing.assert_close(whole["model"], cut["model"], rtol=0, atol=0)
    results = [json.loads((folder_of(tmp_path, name) / lra.RESULT).read_text()) for name in ("whole", "cut")]
    assert [{**result, "minutes": 0} for result in results] == [{**results[0], "minutes": 0}] * 2


def test_drawing_the_data_is_part_of_a_slice(small, tmp_path, monkeypatch, capsys):
    clock, load = [0.0], lra.load_lra_once

    def slow(*arguments, **more):
        clock[0] += 300
        return load(*arguments, **more)

    monkeypatch.setattr(lra, "load_lra_once", slow)
    monkeypatch.setattr(lra, "time", type("Clock", (), {"monotonic": lambda: clock[0]}))
    assert small("slow", "--minutes", "9") == 0  # three splits took 15
    assert "step 1 of 6 after 0.0 minutes" in capsys.readouterr().out


def test_a_slice_that_drawing_fills_ends(small, monkeypatch, capsys):
    def stopped(name, split, **more):
        assert more["processes"] >= 1
        assert more["until"] > 0
        raise lra.DrawingStopped("lra_listops_200, train: 2 of 3 parts are drawn")

    monkeypatch.setattr(lra, "load_lra_once", stopped)
    assert small("one") == 0
    assert capsys.readouterr().out == "lra_listops_200, train: 2 of 3 parts are drawn; the same command goes on\n"


def test_what_there_is_can_be_tested_when_the_minutes_are_over(small, tmp_path, capsys):
    assert small("whole") == 0
    assert small("cut", "--minutes", "1e-9", "--finish") == 0
    title = "16.7 % of the recipe's updates, stopped after 16.7 % of its schedule"
    assert title in capsys.readouterr().out
    result = json.loads((folder_of(tmp_path, "cut") / lra.RESULT).read_text())
    assert (result["steps"], result["of_recipe"], [point["step"] for point in result["history"]]) == (1, 1 / 6, [1])
    assert small("cut") == 0  # goes on as if it had not been tested
    results = [json.loads((folder_of(tmp_path, name) / lra.RESULT).read_text()) for name in ("whole", "cut")]
    assert [{**result, "minutes": 0} for result in results] == [{**results[0], "minutes": 0}] * 2


def test_a_part_of_the_recipe_has_a_schedule_of_its_own(small, tmp_path, capsys):
    small("half", "--fraction", "0.6")
    assert "66.7 % of the recipe's updates, in a schedule of so many, " in capsys.readouterr().out
    own = tmp_path / "half" / "lra_listops_200" / "CHELA-0-fraction0.6-small"
    checkpoint = torch.load(own / lra.CHECKPOINT)
    assert checkpoint["schedule"]["_last_lr"] == [0.0] * len(checkpoint["schedule"]["_last_lr"])
    assert [point["step"] for point in checkpoint["history"]] == [3, 4]
    with pytest.raises(SystemExit):
        small("half", "--fraction", "1.5")
    assert "--fraction must be at most 1; got 1.5" in capsys.readouterr().err
    assert small("half") == 0  # the whole recipe has a folder of its own


def test_a_run_in_bfloat16_says_so(small, tmp_path, capsys):
    assert small("one", "--bf16") == 0
    assert "updates, in bfloat16, " in capsys.readouterr().out
    folder = tmp_path / "one" / "lra_listops_200" / "CHELA-0-bf16-small"
    assert json.loads((folder / lra.RESULT).read_text())["bf16"] is True


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--device", "nowhere"], "--device nowhere cannot be used: Expected one of cpu, cuda"),
        (["--rows", "0"], "--rows: must be positive; got 0"),
        (["--small", "--rows", "9"], "--rows is not for --small; got 9"),
        (["--minutes", "0"], "--minutes: must be positive and finite; got 0"),
        (["--learning_rate", "inf"], "--learning_rate: must be positive and finite; got inf"),
        (["--seed", "-1"], "--seed: must be from 0 to 2 ** 32 - 1; got -1"),
        (["--fraction", "0"], "--fraction: must be positive and finite; got 0"),
    ],
)
def test_flags_are_checked_before_data_are_drawn(tmp_path, capsys, monkeypatch, flags, message):
    monkeypatch.setattr(lra, "load_lra_once", None)
    with pytest.raises(SystemExit):
        main(["--task", "lra_listops_200", "--output_dir", str(tmp_path), *flags])
    assert message in capsys.readouterr().err


def test_norms_and_biases_are_not_decayed():
    """As Trainer does it, which trains by the same recipes."""
    recipe = recipe_of("CHELA", "lra_listops", small=True)
    model = classifier_of(recipe, "lra_listops")
    groups = lra.optimizer_of(model, recipe).param_groups
    decayed = {id(value) for group in groups if group["weight_decay"] for value in group["params"]}
    spared = {name for name, value in model.named_parameters() if id(value) not in decayed}
    assert {name for name, _ in model.named_parameters() if "bias" in name or "norm" in name} <= spared
    assert not {name for name in spared if name.endswith("proj.weight")}
    assert sum(len(group["params"]) for group in groups) == len([*model.parameters()])


def test_checkpoints_of_other_recipes_and_broken_ones_are_refused(small, tmp_path, monkeypatch, capsys):
    small("one", "--minutes", "1e-9")
    path = folder_of(tmp_path, "one") / lra.CHECKPOINT
    monkeypatch.setattr(lra, "_SMALL_ROWS", {"train": 12, "validation": 8, "test": 8})
    with pytest.raises(SystemExit):
        small("one")
    assert "checkpoint.pt must have the present recipe and rows (hash " in capsys.readouterr().err
    torch.save({"model": {}, "hash": "0"}, path)
    with pytest.raises(SystemExit):
        small("one")
    assert "checkpoint.pt must be a checkpoint of this command; it lacks best, history" in capsys.readouterr().err
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(SystemExit):
        small("one")
    assert "checkpoint.pt must be a checkpoint; it cannot be read" in capsys.readouterr().err


def test_one_process_trains_in_a_folder_that_can_be_written(small, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(lra, "load_lra_once", None)
    with only_process(folder_of(tmp_path, "one") / "lock", ""), pytest.raises(SystemExit):
        small("one")
    assert "another process writes --output_dir " in capsys.readouterr().err
    (tmp_path / "file").write_text("")
    with pytest.raises(SystemExit):
        small("file")
    assert "must be where files can be written" in capsys.readouterr().err


def write_reviews(folder, **words):
    """Write 20 and 8 reviews of one word, for labels 0 and 1."""
    folder.mkdir()
    for split, count in (("train", 20), ("validation", 8)):
        texts = [words.get(split, ("bad", "good"))[number % 2] for number in range(count)]
        rows = [json.dumps({"text": text, "label": number % 2}) + "\n" for number, text in enumerate(texts)]
        (folder / f"{split}.jsonl").write_text("".join(rows))
    return str(folder)


def test_other_rows_are_refused_and_the_same_ones_go_on_from_anywhere(tmp_path, capsys):
    command = ["--task", "lra_text", "--small", "--device", "cpu", "--tested", "validation", "--minutes", "1e-9"]
    command += ["--output_dir", str(tmp_path / "out"), "--data_dir"]
    assert main([*command, write_reviews(tmp_path / "first")]) == 0
    assert main([*command, write_reviews(tmp_path / "moved")]) == 0
    assert "step 2 of 6" in capsys.readouterr().out
    for split in ("train", "validation"):  # as many rows, of the same sizes
        with pytest.raises(SystemExit):
            main([*command, write_reviews(tmp_path / f"other_{split}", **{split: ("bed", "good")})])
        assert "must have the present recipe and rows (hash " in capsys.readouterr().err


def test_training_needs_neither_datasets_nor_evaluate(tmp_path):
    """A machine with a GPU may have only torch and transformers."""
    flags = ["--task", "lra_listops_200", "--small", "--device", "cpu", "--output_dir", str(tmp_path)]
    missing = "for name in ('datasets', 'evaluate', 'rouge_score', 'pyarrow'): sys.modules[name] = None"
    program = f"import sys\n{missing}\nfrom benchmarks.lra import main\nmain({flags!r})"
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    assert "| **CHELA**, here |" in ran.stdout


def test_models_without_a_recipe_are_refused(tmp_path, capsys):
    with pytest.raises(SystemExit):
        main(["--task", "lra_speech", "--model", "S4", "--output_dir", str(tmp_path)])
    assert "--recipe s4 has no settings for --task_name lra_speech; it has some for" in capsys.readouterr().err
    assert PAPERS["CHELA, its paper"]["lra_text"] == 91.10
    assert PAPERS["S4, first version (Gu et al. 2022a)"]["lra_pathfinder"] == 86.05
    assert PAPERS["CHELA, its paper"]["lra_pathx"] == 98.15
    assert "lra_pathx" not in PAPERS["Transformer (Tay et al. 2021)"]  # as good as guessing
    assert "lra_listops" not in PAPERS["CHELA, S4D, its paper"]  # table 6 has few tasks


def test_missing_files_are_named_before_training(tmp_path, capsys):
    command = ["--task", "lra_image", "--data_dir", str(tmp_path), "--output_dir", str(tmp_path / "out")]
    with pytest.raises(SystemExit):
        main(command)
    assert "data_dir must hold cifar-10-batches-bin (official, from https://www.cs" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(command[:2])
    assert "lra_image must have data_dir, the folder of cifar-10-batches-bin" in capsys.readouterr().err


def test_a_folder_without_a_test_split_is_scored_by_its_validation_split(tmp_path, capsys):
    folder = write_reviews(tmp_path / "reviews")
    command = ["--task", "lra_text", "--data_dir", folder, "--small", "--device", "cpu"]
    command += ["--output_dir", str(tmp_path / "out")]
    with pytest.raises(SystemExit):
        main(command)
    assert "or test with the ending .jsonl" in capsys.readouterr().err
    assert main([*command, "--tested", "validation"]) == 0
    # six updates, of two epochs of the 23,750 reviews that there should be
    assert "20 examples (of train.jsonl), 0.101 % of the recipe's updates" in (table := capsys.readouterr().out)
    assert "minutes, on the validation split, which also chose the epoch (a rehearsal)" in table


def test_batches_pad_and_count():
    drawn = LraRows([np.array(row, np.int16) for row in ([1, 2, 3], [4], [])], np.array([0, 1, 1]))
    rows = LongRangeRows(drawn, "input_ids", length=2)
    first, second = lra.batches(rows, [1, 0, 2], 2, torch.device("cpu"))
    assert first["input_ids"].tolist() == [[4, 0], [1, 2]]  # cut to the length
    assert first["input_ids"].dtype == torch.long
    assert first["attention_mask"].tolist() == [[1, 0], [1, 1]]
    assert first["labels"].tolist() == [1, 0]
    assert (second["input_ids"].tolist(), second["attention_mask"].tolist()) == ([[0]], [[1]])


# ---- what is lost when a run is killed, and what a bad step leaves ----


class Killed(Exception):
    """Stands for SIGKILL: nothing is saved any more."""


@contextmanager
def after_update(step, happens):
    """Let something happen to a run as soon as it has made an update."""
    update = lra.LongRangeRun._update

    def counted(run, batch):
        update(run, batch)
        if run.step == step:
            happens(run)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lra.LongRangeRun, "_update", counted)
        yield


def kill(run):
    raise Killed


def ask_to_end(number, times=1):
    return lambda *_: [os.kill(os.getpid(), number) for _ in range(times)]


def checkpoint_of(tmp_path, name):
    return torch.load(folder_of(tmp_path, name) / lra.CHECKPOINT)


def goes_on_as_if_nothing_had_happened(small, tmp_path, name):
    assert small("whole") == small(name) == 0
    whole, cut = (checkpoint_of(tmp_path, of) for of in ("whole", name))
    torch.testing.assert_close(whole["model"], cut["model"], rtol=0, atol=0)
    return whole["history"] == cut["history"]


@pytest.mark.parametrize(("seconds", "step"), [(1e9, 3), (0.0, 4)])  # the first epoch has three steps
def test_a_killed_run_has_its_last_validation_and_its_last_minutes(small, tmp_path, monkeypatch, seconds, step):
    assert lra._SAVE_EVERY <= 120
    monkeypatch.setattr(lra, "_SAVE_EVERY", seconds)
    with after_update(5, kill), pytest.raises(Killed):
        small("cut")
    assert checkpoint_of(tmp_path, "cut")["step"] == step
    assert goes_on_as_if_nothing_had_happened(small, tmp_path, "cut")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_a_run_with_a_checkpoint(small, tmp_path, capsys, number):
    handlers = [signal.getsignal(kind) for kind in (signal.SIGTERM, signal.SIGINT)]
    with after_update(2, ask_to_end(number)):
        assert small("cut") == 130
    assert "interrupted at step 2 of 6, which is saved; the same command goes on" in capsys.readouterr().out
    assert [signal.getsignal(kind) for kind in (signal.SIGTERM, signal.SIGINT)] == handlers
    assert checkpoint_of(tmp_path, "cut")["step"] == 2
    assert goes_on_as_if_nothing_had_happened(small, tmp_path, "cut")


def test_a_signal_ends_a_validation_which_comes_again(small, tmp_path, monkeypatch):
    read = lra.batches

    def interrupted(rows, order, size, device):
        for batch in read(rows, order, size, device):
            if isinstance(order, range):
                ask_to_end(signal.SIGTERM)()
            yield batch

    with monkeypatch.context() as patch:
        patch.setattr(lra, "batches", interrupted)
        assert small("cut") == 130
    kept = checkpoint_of(tmp_path, "cut")
    assert (kept["step"], kept["history"]) == (3, [])
    assert goes_on_as_if_nothing_had_happened(small, tmp_path, "cut")


def test_a_signal_ends_a_last_test_at_once_and_one_that_goes_on_with_a_checkpoint(
    small, tmp_path, monkeypatch, capsys
):
    """The last test of ``--finish`` is of a run that may not have ended, and is not saved."""
    evaluate = lra.LongRangeRun.accuracy

    def interrupted(run, split, tends):
        if split == "test":
            ask_to_end(signal.SIGTERM)()
        return evaluate(run, split, tends)

    monkeypatch.setattr(lra.LongRangeRun, "accuracy", interrupted)
    assert small("cut", "--minutes", "1e-9", "--finish") == 130
    assert "interrupted; the same command goes on from what is saved" in capsys.readouterr().out
    assert checkpoint_of(tmp_path, "cut")["step"] == 1
    assert small("whole") == 130
    assert "interrupted at step 6 of 6, which is saved" in capsys.readouterr().out
    assert checkpoint_of(tmp_path, "whole")["partial"]["split"] == "test"


def test_a_second_signal_ends_a_run_at_once(small, tmp_path, capsys):
    with after_update(5, ask_to_end(signal.SIGINT, times=2)):
        assert small("cut") == 130
    assert "interrupted; the same command goes on from what is saved" in capsys.readouterr().out
    assert checkpoint_of(tmp_path, "cut")["step"] == 3


def test_a_kill_during_a_save_loses_nothing_that_was_saved(small, tmp_path, monkeypatch):
    small("cut", "--minutes", "1e-9")
    path = folder_of(tmp_path, "cut") / lra.CHECKPOINT
    before = path.read_bytes()

    def half(state, to):
        to.write_bytes(before[:1000])
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(lra.torch, "save", half)
        with pytest.raises(Killed):
            small("cut", "--minutes", "1e-9")
    assert path.read_bytes() == before
    left = path.with_name(f"_{path.name}.123")  # SIGKILL leaves it
    left.write_bytes(before[:1000])
    assert small("cut", "--minutes", "1e-9") == 0
    assert checkpoint_of(tmp_path, "cut")["step"] == 2
    assert not left.exists()


def test_a_loss_that_is_not_finite_stops_the_run_and_leaves_its_checkpoint(small, tmp_path, monkeypatch, capsys):
    infinite = lambda *_, **__: torch.tensor(float("nan"))  # noqa: E731
    small("bad", "--minutes", "1e-9")
    before = (folder_of(tmp_path, "bad") / lra.CHECKPOINT).read_bytes()
    monkeypatch.setattr(nn.functional, "cross_entropy", infinite)
    message = "the loss of step 1 is not finite, at a learning rate of 0.001. The checkpoint of step 1 stays. "
    for name, told in (("bad", message), ("bad", message), ("new", "There is no checkpoint. Begin again with --lea")):
        assert small(name) == 1
        assert told in capsys.readouterr().err
    assert (folder_of(tmp_path, "bad") / lra.CHECKPOINT).read_bytes() == before
    assert not (folder_of(tmp_path, "new") / lra.CHECKPOINT).exists()


# before a save by the clock, and before a validation
@pytest.mark.parametrize(("seconds", "step", "last"), [(0.0, 5, 4), (1e9, 6, 3)])
def test_weights_that_are_not_finite_are_not_saved(small, tmp_path, monkeypatch, capsys, seconds, step, last):
    def spoil(run):
        next(run.model.parameters()).data[0] = float("inf")

    small("bad", "--minutes", "1e-9")
    monkeypatch.setattr(lra, "_SAVE_EVERY", seconds)
    with after_update(step, spoil):
        assert small("bad") == 1
    assert f" is not finite after step {step}, at a" in (told := capsys.readouterr().err)
    assert f"The checkpoint of step {last} stays" in told
    kept = checkpoint_of(tmp_path, "bad")
    assert kept["step"] == last
    assert all(value.isfinite().all() for value in kept["model"].values())


def test_a_learning_rate_of_ones_own_is_a_run_of_its_own(small, tmp_path, capsys):
    small("one")
    assert "at a learning rate of" not in capsys.readouterr().out
    assert small("one", "--learning_rate", "5e-4") == 0
    assert "at a learning rate of 0.0005 for the recipe's 0.001, " in capsys.readouterr().out
    own = tmp_path / "one" / "lra_listops_200" / "CHELA-0-lr0.0005-small"
    results = [json.loads((folder / lra.RESULT).read_text()) for folder in (folder_of(tmp_path, "one"), own)]
    assert [result["learning_rate"] for result in results] == [1e-3, 5e-4]
    assert torch.load(own / lra.CHECKPOINT)["schedule"]["base_lrs"][0] == 5e-4
    (own / lra.CHECKPOINT).replace(folder_of(tmp_path, "one") / lra.CHECKPOINT)
    for flags, message in (
        ([], "must have the present recipe and rows (hash "),
        (["--learning_rate", "0"], "be positive"),
    ):
        with pytest.raises(SystemExit):
            small("one", *flags)
        assert message in capsys.readouterr().err
