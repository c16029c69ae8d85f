"""The Long Range Arena in slices: what was stopped ends as if it had not been, and recipes are the papers'."""

import json
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from benchmarks import lra
from benchmarks.lra import main
from benchmarks.lra_recipes import MODELS, PAPERS, classifier_of, recipe_of
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
        assert small("cut", "--minutes", "1e-9") == 0  # an update each
        slices += 1
    assert slices == 6  # two epochs of three batches
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
    checkpoint = torch.load(folder_of(tmp_path, "half") / lra.CHECKPOINT)
    assert checkpoint["schedule"]["_last_lr"] == [0.0] * len(checkpoint["schedule"]["_last_lr"])
    assert [point["step"] for point in checkpoint["history"]] == [3, 4]
    for fraction, message in (("1", "must have the recipe and the rows of"), ("0", "--fraction must be above 0 and")):
        with pytest.raises(SystemExit):
            small("half", "--fraction", fraction)
        assert message in capsys.readouterr().err


def test_checkpoints_of_other_recipes_and_broken_ones_are_refused(small, tmp_path, monkeypatch, capsys):
    small("one", "--minutes", "1e-9")
    path = folder_of(tmp_path, "one") / lra.CHECKPOINT
    monkeypatch.setattr(lra, "_SMALL_ROWS", {"train": 12, "validation": 8, "test": 8})
    with pytest.raises(SystemExit):
        small("one")
    assert "checkpoint.pt must have the recipe and the rows of" in capsys.readouterr().err
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(SystemExit):
        small("one")
    assert "checkpoint.pt must be a checkpoint; it cannot be read" in capsys.readouterr().err


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
        assert "must have the recipe and the rows of" in capsys.readouterr().err


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


def test_a_loss_that_is_not_finite_stops_the_run(small, monkeypatch):
    monkeypatch.setattr(nn.functional, "cross_entropy", lambda *_, **__: torch.tensor(float("nan")))
    with pytest.raises(RuntimeError, match="the loss of step 0 is not finite"):
        small("bad")
