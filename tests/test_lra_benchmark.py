"""The Long Range Arena in slices: what was stopped ends as if it had not been, and recipes are the papers'."""

import json

import numpy as np
import pytest
import torch
from torch import nn

from benchmarks import lra
from benchmarks.lra import main
from benchmarks.lra_recipes import MODELS, PAPERS, LongRangeClassifier, config_of, recipe_of
from hf_hybrid.data.lra import LRA

ALL = ["lra_listops", "lra_text", "lra_retrieval", "lra_image", "lra_pathfinder", "lra_speech"]


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("task", LRA)
def test_every_model_reads_every_task(model, task):
    known, recipe = LRA[task], recipe_of(model, task, small=True)
    classifier = LongRangeClassifier(config_of(model, task, recipe, small=True), known).eval()
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(2, 24, generator=generator)
    if known.vocab_size is not None:
        inputs = torch.randint(1, known.vocab_size, (2, 24), generator=generator)
    kept = torch.ones(2, 24, dtype=torch.long)
    kept[1, 16:] = 0
    sequences = [(inputs, kept)] * (2 if known.is_pair else 1)
    logits = classifier(*sequences)
    assert logits.shape == (2, known.labels)
    changed = inputs.clone()
    changed[1, 16:] = 1
    again = classifier(*[(changed, kept)] * len(sequences))
    torch.testing.assert_close(again, logits)  # padding does not count


def sizes(model, task):
    recipe = recipe_of(model, task)
    config = config_of(model, task, recipe)
    shape = (config.num_hidden_layers, config.hidden_size, config.intermediate_size)
    return *shape, recipe.batch, recipe.learning_rate, recipe.dropout, recipe.weight_decay, recipe.epochs


def test_recipes_are_those_of_the_papers():
    """CHELA's table 7 and SPADE's table 10, row by row."""
    assert [sizes("CHELA", task) for task in ALL] == [
        (6, 80, 160, 64, 0.001, 0.1, 0.01, 60),
        (4, 128, 256, 50, 0.004, 0.1, 0.01, 50),
        (6, 128, 256, 64, 0.003, 0.1, 0.04, 40),
        (8, 160, 320, 50, 0.01, 0.0, 0.02, 200),
        (6, 128, 256, 128, 0.01, 0.0, 0.01, 200),
        (6, 60, 120, 20, 0.01, 0.0, 0.01, 200),
    ]
    assert [sizes("SPADE (S4 + chunk)", task)[3:7] for task in ALL[:5]] == [
        (64, 0.0015, 0.2, 0.0), (100, 0.01, 0.2, 0.01), (128, 0.004, 0.1, 0.03), (100, 0.01, 0.0, 0.02),
        (128, 0.01, 0.0, 0.01),
    ]  # fmt: skip
    assert config_of("SPADE (S4 + chunk)", "lra_text", recipe_of("SPADE (S4 + chunk)", "lra_text")).chunk_size == 128
    assert config_of("SPADE, windows alone", "lra_text", recipe_of("SPADE", "lra_text")).global_layers == []
    assert PAPERS["CHELA, its paper"]["lra_text"] == 91.10


@pytest.fixture
def small(tmp_path, monkeypatch):
    torch.set_num_threads(1)
    monkeypatch.setattr(lra, "_SMALL_ROWS", {"train": 20, "validation": 8, "test": 8})

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


def test_checkpoints_of_other_recipes_and_broken_ones_are_refused(small, tmp_path, monkeypatch, capsys):
    small("one", "--minutes", "1e-9")
    path = folder_of(tmp_path, "one") / lra.CHECKPOINT
    monkeypatch.setattr(lra, "_SMALL_ROWS", {"train": 12, "validation": 8, "test": 8})
    with pytest.raises(SystemExit):
        small("one")
    assert "checkpoint.pt must have the recipe" in capsys.readouterr().err
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(SystemExit):
        small("one")
    assert "checkpoint.pt must be a checkpoint; it cannot be read" in capsys.readouterr().err


def test_missing_files_are_named_before_training(tmp_path, capsys):
    command = ["--task", "lra_image", "--data_dir", str(tmp_path), "--output_dir", str(tmp_path / "out")]
    with pytest.raises(SystemExit):
        main(command)
    assert "data_dir must hold cifar-10-batches-bin (official, from https://www.cs" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(command[:2])
    assert "lra_image must have data_dir, the folder of cifar-10-batches-bin" in capsys.readouterr().err


def test_a_folder_without_a_test_split_is_scored_by_its_validation_split(tmp_path, capsys):
    for split, count in (("train", 20), ("validation", 8)):
        lines = (
            f'{{"text": "{"good" if number % 2 else "bad"}", "label": {number % 2}}}\n' for number in range(count)
        )
        (tmp_path / f"{split}.jsonl").write_text("".join(lines))
    command = ["--task", "lra_text", "--data_dir", str(tmp_path), "--small", "--device", "cpu"]
    command += ["--output_dir", str(tmp_path / "out")]
    with pytest.raises(SystemExit):
        main(command)
    assert "or test with the ending .jsonl" in capsys.readouterr().err
    assert main([*command, "--tested", "validation"]) == 0
    assert "20 examples, 2 epochs" in (table := capsys.readouterr().out)
    assert "minutes, on the validation split (a rehearsal)" in table


def test_batches_pad_and_count():
    rows = lra.LraRows([np.array([1, 2, 3]), np.array([4]), np.zeros(0, np.int64)], np.array([0, 1, 1]))
    (((first, kept),), labels), (((second, mask),), _) = lra.batches(rows, [1, 0, 2], 2, torch.device("cpu"))
    assert first.tolist() == [[4, 0, 0], [1, 2, 3]]
    assert kept.tolist() == [[1, 0, 0], [1, 1, 1]]
    assert labels.tolist() == [1, 0]
    assert (second.tolist(), mask.tolist()) == ([[0]], [[1]])


def test_a_loss_that_is_not_finite_stops_the_run(small, monkeypatch):
    monkeypatch.setattr(nn.functional, "cross_entropy", lambda *_: torch.tensor(float("nan")))
    with pytest.raises(RuntimeError, match="the loss of step 0 is not finite"):
        small("bad")
