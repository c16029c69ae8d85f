"""The benchmark of recall: equal sizes, how far ablations reach, what it counts, and how it goes on."""

import math
from concurrent.futures import Future
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from benchmarks import bench_recall, figures, recall_figure, recall_run, results_page
from benchmarks.bench_recall import SELECT, check_rows, kept, main, report, todo
from benchmarks.comparison import COLUMNS, SEARCH, append_rows, read_rows
from benchmarks.recall_models import LAYERS, MODELS, Compressor, Shape, build, fitted, reach, state_numbers
from benchmarks.recall_run import (
    FAR,
    RECIPES,
    STATE_TASKS,
    Recipe,
    Run,
    accuracies,
    estimated_minutes,
    examples,
    is_done_by,
    shape_of,
    texts,
    train,
)
from hf_hybrid.data.preprocessing import IGNORED_LABEL
from hf_hybrid.data.recall import RECALL, Examples
from hf_hybrid.version import __version__

OWN = ("aggregate", "latch", "key_value")
ABLATIONS = [name for name, kind in MODELS.items() if kind.ablation_of is not None]
SMALL = Shape(vocab_size=20, length=64, width=32)


# ---- models ----


@pytest.mark.parametrize("task", RECIPES)
def test_models_have_as_many_parameters_as_one_whole_size_allows(task):
    shape = shape_of(task, RECIPES[task])
    for name in MODELS:
        if is_done_by(task, name):
            with torch.device("meta"):
                count = nn.Module.parameters(build(name, shape, seed=0))
                total = sum(parameter.numel() for parameter in count)
            assert abs(total - shape.budget) < 0.015 * shape.budget, name


def test_a_width_too_small_for_the_budget_is_refused():
    with pytest.raises(ValueError, match="CHELA: width 8 leaves no parameters for its last size; budget"):
        fitted("CHELA", Shape(vocab_size=20, length=4096, width=8))


def test_every_ablation_belongs_to_a_model_of_its_kind():
    assert {MODELS[name].ablation_of for name in ABLATIONS} == {"SPADE", "BST", "CHELA", "SRformer"}
    for name in ABLATIONS:
        assert MODELS[MODELS[name].ablation_of].is_encoder_decoder == MODELS[name].is_encoder_decoder


@pytest.mark.parametrize("name", [name for name, kind in MODELS.items() if not kind.is_encoder_decoder])
def test_no_ablation_reaches_what_the_own_tasks_ask_for_and_every_other_model_does(name):
    model = build(name, SMALL, seed=0)
    with torch.no_grad():
        for parameter in model.parameters():  # some parts start at zero
            parameter.add_(0.02 * torch.randn_like(parameter))
    found = reach(model, length=64)
    assert found <= FAR if name in ABLATIONS else found == 63


@pytest.mark.parametrize("task", OWN)
def test_own_tasks_ask_beyond_the_reach_of_ablations(task):
    asked = examples(task, "test", 200, RECIPES[task])
    assert asked.distances[asked.labels != IGNORED_LABEL].min() > FAR


def test_the_compressor_reads_the_last_output_alone():
    model = Compressor(build("Llama", SMALL, seed=0), SMALL.vocab_size)
    seen = []
    model.model.base_model.register_forward_hook(lambda module, inputs, output: seen.append(output.last_hidden_state))
    logits = model(torch.randint(20, (2, 8)))
    (gradient,) = torch.autograd.grad(logits.sum(), seen)
    assert logits.shape == (2, 8, 20)
    assert (gradient[:, :-1] == 0).all() and (gradient[:, -1] != 0).any()  # noqa: PT018
    assert (logits[:, 0] - logits[:, 1]).abs().max() > 1e-3


# ---- what is counted ----


class Even(nn.Module):
    """Answers 1 at every even place, and 0 elsewhere."""

    def forward(self, input_ids, use_cache):
        logits = torch.zeros(*input_ids.shape, 3)
        logits[:, ::2, 1] = 1
        return type("Output", (), {"logits": logits})


def test_accuracies_by_distance():
    labels = np.full((1, 8), IGNORED_LABEL)
    distances = np.full((1, 8), -1)
    labels[0, 2:7] = 1
    distances[0, 2:7] = [1, 2, 40, 3, 40]
    tested = Examples(np.zeros((1, 8), dtype=np.int64), labels, distances, vocab_size=3, chance=0.5)
    wanted = {"accuracy": 3 / 5, "far": 1.0, "at_1": 1.0, "at_2": 0.0, "at_32": 1.0}
    found = accuracies(Even(), tested)
    # three right answers with a logit of 1 beside two of 0, two wrong ones with equal logits
    assert found.pop("loss") == pytest.approx((3 * math.log(1 + 2 / math.e) + 2 * math.log(3)) / 5)
    assert found == wanted
    documents = replace(tested, document_ids=np.zeros((1, 4), dtype=np.int64))
    with pytest.raises(TypeError):
        accuracies(Even(), documents)  # which reads documents


@pytest.mark.parametrize(("task", "model"), [("latch", "BST"), ("compression", "Llama"), ("facts", "SRformer")])
def test_a_short_run_trains_and_tests(task, model, monkeypatch):
    monkeypatch.setattr(recall_run, "VALIDATION", 16)
    monkeypatch.setattr(recall_run, "_TOKENS", 2**11)
    monkeypatch.setitem(RECALL, task, replace(RECALL[task], train=RECALL[task].train and 20, test=16))
    recipe = replace(RECIPES[task], steps=3, batch=8, width=32)
    values = train(Run(task, model, 0, "0.003"), recipe)
    assert values["steps"] == 3
    assert {"accuracy", "validation", "chance", "x2", "x4", "x16", "parameters", "cpu_minutes"} <= values.keys()
    assert ("far" in values) == (task != "compression")  # whose tokens are all near
    assert values["chance"] == examples(task, "test", 1, recipe).chance
    again = train(Run(task, model, 0, "0.003"), recipe)
    assert {**again, "cpu_minutes": 0} == {**values, "cpu_minutes": 0}


def test_a_search_is_short_and_not_tested(monkeypatch):
    monkeypatch.setattr(recall_run, "VALIDATION", 16)
    recipe = Recipe(steps=10, batch=4, width=32)
    values = train(Run("latch", "Llama", 0, "0.003", is_search=True), recipe)
    assert values["steps"] == 3  # a quarter
    assert values.keys() == {"parameters", "steps", "cpu_minutes", "chance", "validation", "validation_loss"}


def test_training_ends_when_nearly_all_is_right(monkeypatch):
    monkeypatch.setattr(recall_run, "VALIDATION", 16)
    monkeypatch.setattr(recall_run, "ENOUGH", 0.0)
    values = train(Run("latch", "Llama", 0, "0.003", is_search=True), Recipe(steps=96, batch=2, width=32))
    assert values["steps"] == 2  # the first of 12 checks


def test_a_run_that_diverges_has_no_accuracy():
    values = train(Run("latch", "Llama", 0, "1e30"), Recipe(steps=9, batch=2, width=32))
    assert values.keys() == {"parameters"}


def test_texts_of_the_splits_do_not_overlap():
    parts = texts()
    assert all(len(part) > 16 * RECALL["needle"].length + 1 for part in parts.values())
    paragraphs = {split: set(part.split(b"\n\n")) for split, part in parts.items()}
    assert len(paragraphs["test"]) > 100
    for first, second in (("train", "validation"), ("train", "test"), ("validation", "test")):
        assert not paragraphs[first] & paragraphs[second]


# ---- the order of work ----


def row(task="latch", model="BST", seed="0", rate="0.001", **more):
    values = {**dict.fromkeys((*COLUMNS, *bench_recall.SCORES), ""), "outcome": "ok", "parameters": "9", "steps": "2"}
    own = {
        "dataset": task,
        "model": model,
        "seed": seed,
        "learning_rate": rate,
        "trained_steps": "2",
        "date": "2026-11-23",
    }
    shown = {SELECT: "0.5", "accuracy": "0.5", "hf_hybrid": __version__}
    return {**values, **own, **shown, **more}


def searched(rate, loss="0.5", **more):
    return row(seed=SEARCH, rate=rate, accuracy="", **{SELECT: loss}, **more)


def missing(rows, **more):
    given = {"tasks": ["latch"], "models": ["BST", "T5"], "rates": ["0.001", "0.003"], "seeds": [4, 5], **more}
    return [(run.model, run.is_search, run.seed, run.rate) for run in todo(rows, *given.values())]


def test_short_runs_search_and_all_seeds_use_the_best_rate():
    search = [("BST", True, 4, "0.001"), ("BST", True, 4, "0.003")]
    assert missing([]) == search  # T5 reads documents
    first = [searched("0.001")]
    assert missing(first) == search[1:]
    both = [*first, searched("0.003", "0.3")]
    assert missing(both) == [("BST", False, 4, "0.003"), ("BST", False, 5, "0.003")]
    done = [row(seed=seed, rate="0.003") for seed in "45"]
    assert missing([*both, done[0]]) == [("BST", False, 5, "0.003")]
    assert missing([*both, *done]) == []
    diverged = [searched(rate, "", outcome="diverged") for rate in ("0.001", "0.003")]
    assert missing(diverged) == []
    assert missing([diverged[0], both[1]]) == missing(both)
    assert missing([], tasks=["facts"]) == [("T5", True, 4, "0.001"), ("T5", True, 4, "0.003")]
    assert [run["seed"] for run in kept([*both, *done], "latch", "BST")] == ["4", "5"]
    assert missing([], rates=["0.003"]) == [("BST", False, 4, "0.003"), ("BST", False, 5, "0.003")]
    with pytest.raises(ValueError, match=r"latch: the rows of 'BST' must have one learning rate; got 0\.001, 0\.003"):
        kept([*done, row(rate="0.001")], "latch", "BST")


def test_another_size_of_the_state_takes_the_rate_of_its_model():
    asked = {"tasks": ["key_value"], "models": ["BST, N 8"], "seeds": [4]}
    assert missing([], **asked) == [("BST", True, 4, "0.001"), ("BST", True, 4, "0.003")]
    both = [searched("0.001", "0.2", task="key_value"), searched("0.003", task="key_value")]
    assert missing(both, **asked) == [("BST, N 8", False, 4, "0.001")]


def test_rows_of_other_recipes_and_versions_are_refused(tmp_path):
    recipes = {"latch": RECIPES["latch"]}
    right = bench_recall.recipe_hash("latch", "BST", RECIPES["latch"])
    check_rows([row(recipe=right), row(task="mqar"), row(model="an old one")], recipes, tmp_path)
    with pytest.raises(
        ValueError, match=f"rows of 'BST' have another recipe than {right}, the present one of latch: seed 0 at 0.001"
    ):
        check_rows([row(recipe="0")], recipes, tmp_path)
    with pytest.raises(ValueError, match=f"rows of 'BST' come from version 0.0, and this is {__version__}. Delete"):
        check_rows([row(recipe=right, hf_hybrid="0.0")], recipes, tmp_path)
    assert right != bench_recall.recipe_hash("latch", "BST", replace(RECIPES["latch"], batch=7))
    assert right != bench_recall.recipe_hash("latch", "Llama", RECIPES["latch"])


class Immediate:
    """Runs what it is given at once, as a pool of processes would."""

    def __init__(self, jobs, mp_context, initializer):
        pass

    def __enter__(self):
        return self

    def __exit__(self, *error):
        pass

    def submit(self, function, *arguments):
        future = Future()
        try:
            future.set_result(function(*arguments))
        except Exception as error:
            future.set_exception(error)
        return future


def test_a_stopped_benchmark_goes_on_and_repeats_what_failed(tmp_path, monkeypatch, capsys):
    done = []

    def faked(run, recipe):
        done.append((*run.key, run.steps(recipe)))
        if run.rate == "0.01" and len(done) < 4:
            raise RuntimeError("no memory")
        accuracy = {"0.001": 0.25, "0.003": 0.75, "0.01": 0.5}[run.rate]
        values = {"parameters": 99, "steps": 7, "cpu_minutes": 0.5, "chance": 0.1}
        values |= {"validation": accuracy, "validation_loss": 1 - accuracy}
        return values if run.is_search else {**values, "accuracy": accuracy, "far": accuracy, "x2": 0.3}

    monkeypatch.setattr(bench_recall, "ProcessPoolExecutor", Immediate)
    monkeypatch.setattr(bench_recall, "train", faked)
    out = tmp_path / "recall.csv"
    command = ["--tasks", "latch", "--models", "BST", "--out", str(out), "--jobs", "1"]
    with pytest.raises(SystemExit, match=r"FAILED latch: BST, search, rate 0\.01: no memory"):
        main(command)
    assert done == [(SEARCH, rate, 100) for rate in ("0.001", "0.003", "0.01")]
    capsys.readouterr()
    assert main(["--report", str(out)]) == 0
    assert "BST" not in capsys.readouterr().out  # its search is not finished
    assert main(command) == 0
    assert done[3:] == [(SEARCH, "0.01", 100), *((seed, "0.003", 400) for seed in "012")]
    assert main(command) == 0
    assert len(done) == 7
    rows = read_rows(out, (*COLUMNS, *bench_recall.SCORES))
    assert [(found["seed"], found["steps"], found["accuracy"]) for found in rows] == [
        *[(SEARCH, "100", "")] * 3,
        *((seed, "400", "0.75") for seed in "012"),
    ]
    capsys.readouterr()
    assert main(["--report", str(out)]) == 0
    table = capsys.readouterr().out
    assert "| BST | 99 | 3 | 0.003 | 7 | 0.750 ± 0.000 | 0.750 ± 0.000 | 0.300 ± 0.000 |" in table
    assert "**latch**: guessing gives 0.100" in table


def test_what_each_architecture_remembers_and_what_not():
    shares = {
        ("latch", "BST"): ("0.96", ""),
        ("latch", "BST, windows alone"): ("0.08", ""),  # chance and two points
        ("mqar", "BST"): ("0.97", "0.95"),
        ("mqar", "BST, windows alone"): ("0.5", "0.09"),
        ("key_value", "BST"): ("0.9", "0.94"),
        ("key_value", "BST, windows alone"): ("0.06", ""),
        ("aggregate", "SPADE"): ("1", ""),  # whose ablation is not measured yet
    }
    rows = [
        row(task, model, accuracy=accuracy, far=far, chance="0.0625", rate="0.003")
        for (task, model), (accuracy, far) in shares.items()
    ]
    lines = bench_recall.remembered(rows).splitlines()
    wanted = "| BST | latch (0.960; 0.080; 0.062) | mqar (0.950; 0.090; 0.062) | key_value (0.940; 0.060; 0.062) |"
    assert lines[-1] == wanted
    assert len(lines) == 5


def test_report_of_models_that_diverged():
    gone = {"outcome": "diverged", SELECT: "", "accuracy": ""}
    assert "| BST |  |  |  |  | diverged |" in report([row(**gone)])
    assert "| BST |  |  |  |  | diverged |" in report([row(seed=SEARCH, **gone)])


def test_the_figure_has_a_panel_for_each_architecture_that_has_both(tmp_path):
    assert recall_figure.recall(tmp_path) == []
    pairs = [("latch", "BST", "0.9"), ("latch", "BST, windows alone", "0.1"), ("latch", "SPADE", "0.8")]
    pairs += [("facts", "SRformer", "0.7"), ("facts", "SRformer, segments alone", "0.2")]
    rows = [
        row(task, model, seed=seed, chance="0.0625", at_32=accuracy, at_64="0.5")
        for task, model, accuracy in pairs
        for seed in ("0", "1")
    ]
    append_rows(tmp_path / "recall.csv", (*COLUMNS, *bench_recall.SCORES), rows)
    panels = recall_figure.recall(tmp_path)
    assert [(panel.title, panel.unit, panel.trained) for panel in panels] == [
        ("BST", "tokens", 128),
        ("SRformer", "segments", 8),
    ]
    assert panels[0].tasks == {"latch": {"BST": [(32, 0.9), (64, 0.5)], "BST, windows alone": [(32, 0.1), (64, 0.5)]}}
    assert panels[0].chances == {"latch": 0.0625}
    drawn = figures.draw(panels)
    assert drawn == figures.draw(panels)
    assert drawn.endswith(f"<!-- shows {figures.digest(panels)} -->\n")
    assert results_page.tables(tmp_path / "recall.csv") == report(rows)


def test_states_of_other_sizes_do_two_tasks_and_make_a_figure(tmp_path):
    sized = {name: kind for name, kind in MODELS.items() if kind.state_of is not None}
    for name in sized:
        assert [task for task in RECIPES if is_done_by(task, name)] == [
            task for task in RECIPES if task in STATE_TASKS
        ]
    shape = shape_of("key_value", RECIPES["key_value"])
    sizes = {name: state_numbers(name, shape) for name in ("BST, N 8", "BST", "BST, N 32", "BST, N 64", "Llama")}
    assert sizes["BST, N 8"] < sizes["BST"] < sizes["BST, N 32"] < sizes["BST, N 64"]
    assert sizes["Llama"] == 2 * shape.length * shape.width * LAYERS
    longer = replace(shape, length=2 * shape.length)
    grows = {"Llama": 2, "Mamba-2": 1, "BST": 1, "SPADE": 1}  # keys of all tokens; states alone, and of a window
    assert {name: state_numbers(name, longer) / state_numbers(name, shape) for name in grows} == grows
    assert state_numbers("Mamba-2", shape) > 3 * 2 * shape.width * fitted("Mamba-2", shape).state_size

    assert recall_figure.states(tmp_path) == []
    accuracies = {"BST": "0.5", "BST, N 64": "0.75", "BST, windows alone": "0.1", "Llama": "1"}
    rows = [row("key_value", name, accuracy=accuracy, chance="0.125") for name, accuracy in accuracies.items()]
    append_rows(tmp_path / "recall.csv", (*COLUMNS, *bench_recall.SCORES), rows)
    (panel,) = recall_figure.states(tmp_path)
    assert (panel.title, panel.chance) == ("key_value", 0.125)
    points = {"BST": [(sizes["BST"], 0.5), (sizes["BST, N 64"], 0.75)], "Llama": [(sizes["Llama"], 1.0)]}
    assert panel.models == points
    drawn = figures.draw([panel])
    assert "BST" in drawn
    assert drawn.endswith(f"<!-- shows {figures.digest([panel])} -->\n")


def test_the_plan_counts_the_runs_and_their_minutes(capsys, monkeypatch):
    monkeypatch.setattr(
        bench_recall, "estimated_minutes", lambda task, model, recipe: (recipe.steps / 10_000, recipe.steps / 1000)
    )
    monkeypatch.setattr(bench_recall, "_one_thread", lambda: None)  # it is for a process of its own
    with pytest.raises(SystemExit) as left:
        main(["--plan", "--tasks", "latch", "key_value", "--models", "BST", "BST, N 8", "T5", "--jobs", "2"])
    assert left.value.code == 0
    printed = capsys.readouterr().out
    assert "| latch | 1 | 6 | 1 |" in printed  # a search of three rates, and three seeds
    assert "| key_value | 2 | 9 | 5 |" in printed  # the copy is not searched
    assert "15 runs, at most 6 CPU minutes: 3 minutes on 2 free cores" in printed
    with pytest.raises(SystemExit):
        main(["--plan", "--quick", "--models", "BST", "BST, N 8", "--jobs", "2"])
    printed = capsys.readouterr().out
    assert "3 runs, at most 1 CPU minutes" in printed  # 400 and 400 steps, and 500 of key_value


def test_the_estimate_is_of_all_steps(monkeypatch):
    recipe = Recipe(steps=10**6, batch=4, width=32)
    search, whole = estimated_minutes("latch", "Llama", recipe)
    assert whole / search == pytest.approx(4, rel=0.01)
    few_search, few = estimated_minutes("latch", "Llama", replace(recipe, steps=10**4))
    assert 0 < few_search < few < whole / 20
