"""The benchmark of recall: how it goes on, what it refuses, its tables, figures and plan."""

import re
from collections import Counter
from concurrent.futures import Future
from dataclasses import replace
from functools import wraps

import pytest
from torch import nn

from benchmarks import bench_recall, compare_on_data, figures, recall_figure, recall_run, results_page
from benchmarks.bench_recall import check_rows, main, report
from benchmarks.comparison import COLUMNS, append_rows, read_rows
from benchmarks.recall_models import (
    LAYERS,
    MODELS,
    ablation_reach,
    fitted,
    state_numbers,
)
from benchmarks.recall_order import SLOWER
from benchmarks.recall_run import (
    RECIPES,
    STATE_TASKS,
    drawn_hash,
    is_done_by,
    recipe_hash,
    shape_of,
    texts,
)
from benchmarks.record import only_process
from hf_hybrid.data.recall import RECALL
from hf_hybrid.version import __version__
from tests.recall_rows import row

ABLATIONS = [name for name, kind in MODELS.items() if kind.ablation_of is not None]


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


def test_a_recipe_is_of_the_code_that_trains_and_of_the_encoder(monkeypatch):
    right = recipe_hash("facts", "T5", RECIPES["facts"])
    with monkeypatch.context() as changed:
        changed.setattr(recall_run, "_update", recall_run._logits)
        assert recipe_hash("facts", "T5", RECIPES["facts"]) != right
    assert recipe_hash("facts", "T5", RECIPES["facts"]) == right
    config = fitted("T5", shape_of("facts", RECIPES["facts"]))
    monkeypatch.setattr(recall_run, "fitted", lambda *_: config)
    monkeypatch.setitem(MODELS, "T5", replace(MODELS["T5"], encodes=True))
    assert recipe_hash("facts", "T5", RECIPES["facts"]) != right


def test_a_recipe_is_of_what_is_drawn(monkeypatch):
    """Defaults of the function that draws, the numbers that it draws, and the text that it reads."""
    recipe = RECIPES["latch"]

    def found(task="latch"):
        drawn_hash.cache_clear()
        return recipe_hash(task, "Llama", RECIPES[task])

    right, known = found(), RECALL["latch"].function
    assert recipe_hash("latch", "Llama", replace(recipe, sizes={"gap": 33})) != right
    for change in ({"gap": 33}, {"classes": 15}):
        monkeypatch.setitem(RECALL, "latch", replace(RECALL["latch"], function=wrapped(known, change)))
        assert found() != right
    monkeypatch.setitem(RECALL, "latch", replace(RECALL["latch"], function=wrapped(known, {})))
    assert found() == right
    of_text, parts = found("needle"), texts()
    monkeypatch.setattr(recall_run, "texts", lambda: {**parts, "test": parts["test"] + b"!"})
    assert found("needle") != of_text
    of_network = found("compression")
    monkeypatch.setattr(recall_run, "Compressor", nn.Identity)
    assert found("compression") != of_network
    drawn_hash.cache_clear()


def wrapped(function, change):
    """Return a function with the same defaults that draws with other sizes."""

    @wraps(function)
    def drawn(*arguments, **sizes):
        return function(*arguments, **{**sizes, **change})

    return drawn


class Immediate:
    """Runs what it is given at once, as a pool of processes would."""

    def __init__(self, jobs, initializer):
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
        done.append((run.seed, run.rate, run.overtaken))
        if run.rate == "0.01" and len(done) < 4:
            raise RuntimeError("no memory")
        values = {"parameters": 99, "steps": 7, "cpu_minutes": 0.5, "chance": 0.1}
        values |= {"validation": 0.5, "validation_loss": 0.5}
        if run.rate == "0.001":
            return values
        values |= {"validation": 0.99, "solved_step": 5} if run.rate == "0.01" else {}
        return {**values, "accuracy": 0.75, "far": 0.75, "x2": 0.3}

    monkeypatch.setattr(bench_recall, "worker_pool", Immediate)
    monkeypatch.setattr(bench_recall, "train", faked)
    out = tmp_path / "recall.csv"
    command = ["--tasks", "latch", "--models", "BST", "--out", str(out), "--jobs", "1"]
    with pytest.raises(SystemExit, match=r"FAILED latch: BST, seed 0, rate 0\.01: no memory"):
        main(command)
    assert done == [(0, rate, None) for rate in ("0.003", "0.01", "0.001")]
    assert main(command) == 0
    assert done[3:] == [(0, "0.01", None), *((seed, "0.01", None) for seed in (1, 2))]
    assert main(command) == 0
    assert len(done) == 6
    rows = read_rows(out, (*COLUMNS, *bench_recall.SCORES))
    assert [(found["seed"], found["outcome"], found["accuracy"]) for found in rows] == [
        ("0", "ok", "0.75"),
        ("0", SLOWER, ""),
        *((seed, "ok", "0.75") for seed in "012"),
    ]
    assert {found["steps"] for found in rows} == {"1600"}
    capsys.readouterr()
    assert main(["--report", str(out)]) == 0
    table = capsys.readouterr().out
    assert "| BST | 99 | 3 | 0.01 | 5 | 0.750 ± 0.000 | 0.750 ± 0.000 | 0.300 ± 0.000 |" in table
    assert "**latch**: guessing gives 0.100" in table
    for name in ABLATIONS[:3]:
        assert f"{ablation_reach(name)} tokens ({name})" in table


def test_what_each_architecture_remembers_and_what_not():
    shares = {
        ("latch", "BST"): ("0.96", ""),
        ("latch", "BST, windows alone"): ("0.08", ""),  # chance and two points
        ("mqar", "BST"): ("0.97", "0.95"),
        ("mqar", "BST, windows alone"): ("0.5", "0.09"),
        ("key_value", "BST"): ("0.9", "0.94"),
        ("key_value", "BST, windows alone"): ("0.06", ""),
        ("facts", "BST"): ("0.94", "0.99"),  # not its near answers
        ("facts", "BST, windows alone"): ("0.4", "0.06"),
        ("aggregate", "SPADE"): ("1", ""),  # whose ablation is not measured yet
    }
    rows = [
        row(task, model, seed=seed, accuracy=accuracy, far=far, chance="0.0625", rate="0.003")
        for (task, model), (accuracy, far) in shares.items()
        for seed in "01"
    ]
    lines = bench_recall.remembered(rows).splitlines()
    wanted = "| BST | latch (0.960; 0.080; 0.062) | mqar (0.950; 0.090; 0.062) | "
    assert lines[-1] == wanted + "key_value (0.940; 0.060; 0.062), facts (0.990; 0.060; 0.062) |"
    assert len(lines) == 5


def test_what_diverges_is_not_done():
    gone = {"outcome": "diverged", "accuracy": "", "chance": "", "rate": "0.003"}
    rows = [row("latch", "BST", seed=seed, accuracy="1", rate="0.003") for seed in "01"]
    rows += [row("latch", "BST", seed="2", **gone), row("latch", "BST, windows alone", rate="0.003", accuracy="0.1")]
    rows += [row("key_value", "BST", **gone), row("mqar", "SPADE", **gone)]
    rows += [row("mqar", "SPADE, windows alone", accuracy="0.1")]
    lines = bench_recall.remembered(rows).splitlines()
    assert lines[-2] == "| SPADE |  | mqar (; 0.100; 0.100; 1 of 1 diverged) |"
    assert lines[-1] == (
        "| BST |  | latch (1.000; 0.100; 0.100; 1 of 3 diverged), key_value (; ; ; 1 of 1 diverged) |"
    )


def test_report_of_models_that_diverged_and_of_tasks_that_none_learnt():
    gone = {"outcome": "diverged", "validation_loss": "", "accuracy": ""}
    assert "| BST |  |  |  |  | diverged |" in report([row(**gone)])
    rows = [row(seed="0", solved_step="7"), row(seed="1", **gone), row(seed="2")]
    assert "| BST | 9 | 2 of 3 | 0.001 | 7 (1 of 3) | 0.500 ± 0.000 |" in report(rows)
    unlearnt = "Not learnt in this budget: at no learning rate has a model more than 50% of the far answers right"
    assert f"**mqar**: guessing gives 0.100. {unlearnt}\n" in report([row("mqar", far="0.4")])
    learnt = report([row("mqar", far="0.6", without_keys="0.25")])
    assert "**mqar**: guessing gives 0.100, the likeliest of the values told 0.250\n" in learnt
    assert unlearnt not in learnt


def test_a_best_rate_at_the_edge_of_those_searched_is_marked():
    rows = [row(rate=rate, validation_accuracy=right) for rate, right in (("0.001", "0.4"), ("0.003", "0.6"))]
    assert "| BST | 9 | 1 | 0.003† |" in report(rows)
    assert "| BST | 9 | 1 | 0.003 |" in report([*rows, row(rate="0.01", validation_accuracy="0.5")])
    assert "| BST | 9 | 1 | 0.003 |" in report([rows[0], {**rows[1], "solved_step": "7"}])
    assert "| BST | 9 | 1 | 0.003 |" in report(rows[1:])  # none was searched


def test_longer_tests_of_some_seeds_are_not_the_mean_of_all():
    """Only seeds that have learnt the task are tested on longer sequences; alone they would hide the others."""
    learnt = row(seed="0", far="1.0", at_32="1.0", x16="0.98", at_512="0.98")
    others = [row(seed=seed, far="0.07", at_32="0.07") for seed in "12"]
    table = report([learnt, *others])
    assert "| 16× as long, far | 32+ | 512+ |" in table
    assert "| 0.380 ± 0.310 | 0.980 (1 of 3) | 0.380 |  |" in table
    assert dict(recall_figure._points([learnt, *others])) == {32: pytest.approx(0.38)}


def test_an_ablation_that_diverged_has_not_guessed():
    rows = [row("latch", seed=seed, accuracy="1.0", far="1.0", chance="0.0625") for seed in "012"]
    gone = {"outcome": "diverged", "validation_loss": "", "accuracy": "", "far": "", "chance": ""}
    without = [row("latch", "BST, windows alone", seed=seed, far="0.06", chance="0.0625") for seed in "012"]
    assert bench_recall.remembered([*rows, *without]).endswith("\n| BST | latch (1.000; 0.060; 0.062) |  |")
    all_gone = [row("latch", "BST, windows alone", seed=seed, **gone) for seed in "012"]
    assert "| BST |  | latch (1.000; ; 0.062; 3 of 3 without it diverged) |  |" in bench_recall.remembered(
        [*rows, *all_gone]
    )
    assert "1 of 3 without it diverged" in bench_recall.remembered([*rows, *without[:2], all_gone[2]])
    assert "0.062; one seed)" in bench_recall.remembered([*rows[:1], *without[:1]])


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
    assert [(panel.title, panel.unit, panel.trained, panel.reach) for panel in panels] == [
        ("SPADE", "tokens", {"latch": 128}, ablation_reach("SPADE, windows alone")),
        ("BST", "tokens", {"latch": 128}, ablation_reach("BST, windows alone")),
        ("SRformer", "segments", {"facts": 8}, None),
    ]
    assert panels[0].tasks == {"latch": {"SPADE": [(32, 0.8), (64, 0.5)]}}  # its ablation is still to come
    assert panels[1].tasks == {"latch": {"BST": [(32, 0.9), (64, 0.5)], "BST, windows alone": [(32, 0.1), (64, 0.5)]}}
    assert panels[1].chances == {"latch": 0.0625}
    assert panels[2].missing == {
        "not learnt": ["facts"],
        "not done": [
            f"{task}{part}" for task in ("few_facts", "sparse_facts", "votes") for part in ("", ", segments alone")
        ],
    }
    drawn = figures.draw(panels)
    assert drawn == figures.draw(panels)
    assert drawn.endswith(f"<!-- shows {figures.digest(panels)} -->\n")
    assert results_page.tables(tmp_path / "recall.csv") == report(rows)


def test_the_figure_names_what_has_no_curve(tmp_path):
    gone = {"outcome": "diverged", "accuracy": "", "chance": ""}
    rows = [
        row("latch", "BST", at_32="0.2", far="0.2"),  # an own task is drawn, though it is not learnt
        row("latch", "BST, windows alone", at_32="0.1", far="0.1"),
        row("majority", "BST", **gone),
        row("needle", "BST", at_32="0.9", far="0.9"),
        row("needle", "BST, windows alone", at_32="0.1", far="0.1"),
        row("mqar", "BST", at_32="0.1", far="0.1"),  # a published one is not
        row("mqar", "BST, windows alone", **gone),
    ]
    append_rows(tmp_path / "recall.csv", (*COLUMNS, *bench_recall.SCORES), rows)
    (panel,) = recall_figure.recall(tmp_path)
    assert list(panel.tasks) == ["latch", "needle"]
    assert panel.missing["not learnt"] == ["latch", "mqar"]
    assert panel.missing["diverged"] == ["majority", "mqar, windows alone"]
    assert "majority, windows alone" in panel.missing["not done"]
    assert "in_context_recall" in panel.missing["not done"]
    assert {name for names in panel.missing.values() for name in names}.isdisjoint({"needle", "few_facts"})
    assert "diverged: majority; mqar, windows alone" in figures.draw([panel])


def test_states_of_other_sizes_do_two_tasks_and_make_a_figure(tmp_path):
    sized = {name: kind for name, kind in MODELS.items() if kind.state_of is not None}
    for name in sized:
        assert [task for task in RECIPES if is_done_by(task, name)] == [
            task for task in RECIPES if task in STATE_TASKS
        ]
    shape = shape_of("mqar", RECIPES["mqar"])
    sizes = {name: state_numbers(name, shape) for name in ("BST, N 8", "BST", "BST, N 32", "BST, N 64", "Llama")}
    assert sizes["BST, N 8"] < sizes["BST"] < sizes["BST, N 32"] < sizes["BST, N 64"]
    assert sizes["Llama"] == 2 * shape.length * shape.width * LAYERS
    longer = replace(shape, length=2 * shape.length)
    grows = {"Llama": 2, "Mamba-2": 1, "BST": 1, "SPADE": 1}  # keys of all tokens; states alone, and of a window
    assert {name: state_numbers(name, longer) / state_numbers(name, shape) for name in grows} == grows
    assert state_numbers("Mamba-2", shape) > 3 * 2 * shape.width * fitted("Mamba-2", shape).state_size

    assert recall_figure.states(tmp_path) == []
    far = {"BST": "0.5", "BST, N 64": "0.75", "BST, windows alone": "0.1", "Llama": "1"}
    given = {"accuracy": "0.9", "chance": "0.125", "without_keys": "0.453"}
    rows = [row("mqar", name, far=share, **given) for name, share in far.items()]
    rows[1:2] = [{**rows[1], "far": "0.5"}, {**rows[1], "far": "1", "seed": "1"}]
    append_rows(tmp_path / "recall.csv", (*COLUMNS, *bench_recall.SCORES), rows)
    (panel,) = recall_figure.states(tmp_path)
    assert (panel.title, panel.chance, panel.without_keys) == ("mqar", 0.125, pytest.approx(0.453))
    points = {"BST": [(sizes["BST"], 0.5), (sizes["BST, N 64"], 0.75)], "Llama": [(sizes["Llama"], 1.0)]}
    assert panel.models == points
    large = sizes["BST, N 64"]
    assert panel.seeds == {**points, "BST": [(sizes["BST"], 0.5), (large, 0.5), (large, 1.0)]}
    drawn = figures.draw([panel])
    assert "BST" in drawn
    assert drawn.endswith(f"<!-- shows {figures.digest([panel])} -->\n")


def test_the_plan_counts_the_runs_and_their_minutes(capsys, monkeypatch):
    monkeypatch.setattr(bench_recall, "estimated_minutes", lambda task, model, recipe: recipe.steps / 1000)
    monkeypatch.setattr(bench_recall, "_one_thread", lambda: None)  # it is for a process of its own
    models = ["BST", "BST, windows alone", "BST, N 8", "CHELA", "T5"]
    with pytest.raises(SystemExit) as left:
        main(["--plan", "--tasks", "copying", "mqar", "memorization", "--jobs", "2", "--models", *models])
    assert left.value.code == 0
    printed = capsys.readouterr().out
    # three rates and two more seeds each
    assert "| copying | 4 | 20 | 32 | 20 | 32 |" in printed
    # one seed each, none of the copy; or as above, the copy with one seed
    assert "| mqar | 4 | 9 | 9 | 18 | 18 |" in printed
    assert "| memorization | 3 | 9 | 7 | 9 | 7 |" in printed
    assert "If no published task is learnt: 38 runs, at most 48 CPU minutes. If all are: 47 runs, at most" in printed
    assert "at most 57 CPU minutes, 29 minutes on 2 free cores" in printed
    with pytest.raises(SystemExit):
        main(["--plan", "--quick", "--models", "BST", "BST, N 8", "--jobs", "2"])
    printed = capsys.readouterr().out
    assert "If no published task is learnt: 4 runs, at most 3 CPU minutes" in printed  # BST reads no documents


def test_the_quick_form_leaves_what_is_named(capsys, monkeypatch):
    monkeypatch.setattr(bench_recall, "estimated_minutes", lambda task, model, recipe: recipe.steps / 1000)
    monkeypatch.setattr(bench_recall, "_one_thread", lambda: None)  # it is for a process of its own
    more = ["--tasks", "majority", "--models", "BST, N 8", "BST", "--rates", "0.1", "0.2", "--steps", "500"]
    with pytest.raises(SystemExit):
        main(["--plan", "--quick", "--jobs", "1", *more])
    assert "| majority | 1 | 2 | 1 | 2 | 1 |" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--rates", "0"], "argument --rates: must be positive and finite; got 0"),
        (["--rates", "foo"], "argument --rates: invalid positive value: 'foo'"),
        (["--steps", "0"], "argument --steps: must be positive; got 0"),
        (["--jobs", "0"], "argument --jobs: must be positive; got 0"),
        (["--seeds", "-1"], "argument --seeds: must be from 0 to 2 ** 32 - 1; got -1"),
        (["--report", "missing.csv"], "--report must be a file; there is no missing.csv"),
        (["--tasks", "facts", "--models", "BST"], "--models must name a model that does facts; got BST"),
    ],
)
def test_flags_are_checked_before_work(tmp_path, capsys, flags, message):
    with pytest.raises(SystemExit) as left:
        main(["--out", str(tmp_path / "recall.csv"), *flags])
    assert message in f"{left.value} {capsys.readouterr().err}"
    assert not (tmp_path / "recall.csv").exists()


def test_what_cannot_be_written_is_found_before_the_work(tmp_path, monkeypatch):
    monkeypatch.setattr(bench_recall, "worker_pool", None)
    command = ["--tasks", "latch", "--models", "BST", "--jobs", "1", "--out"]
    with only_process(tmp_path / "recall.csv.lock", ""), pytest.raises(SystemExit, match="another process writes "):
        main([*command, str(tmp_path / "recall.csv")])
    (tmp_path / "file").write_text("")
    (tmp_path / "folder.csv").mkdir()
    for out in ("file/recall.csv", "folder.csv"):
        with pytest.raises(SystemExit, match=r"--out: .* must be .* be written"):
            main([*command, str(tmp_path / out)])
    (tmp_path / "other.csv").write_text("a,b\n1,2\n")
    with pytest.raises(SystemExit, match=r"--out: .*other\.csv must have the columns date, .*; it has a, b"):
        main([*command, str(tmp_path / "other.csv")])


def test_a_row_that_cannot_be_written_is_told_and_the_work_goes_on(tmp_path, monkeypatch):
    values = {"parameters": 99, "steps": 7, "cpu_minutes": 0.5, "chance": 0.1, "validation": 0.5}
    values |= {"validation_loss": 0.5, "accuracy": 0.75, "far": 0.75}
    written = []

    def full_once(path, columns, rows):
        written.append(rows)
        if len(written) == 1:
            raise OSError("no space left")
        append_rows(path, columns, rows)

    monkeypatch.setattr(bench_recall, "worker_pool", Immediate)
    monkeypatch.setattr(bench_recall, "train", lambda run, recipe: values)
    monkeypatch.setattr(bench_recall, "append_rows", full_once)
    out = tmp_path / "recall.csv"
    command = ["--tasks", "latch", "--models", "BST", "--seeds", "0", "--jobs", "1", "--out", str(out)]
    with pytest.raises(SystemExit, match=r"rate 0\.003: no space left; its row was .*,latch,BST,0,0\.003,.*,0\.75,"):
        main(command)
    assert [found["learning_rate"] for found in read_rows(out, (*COLUMNS, *bench_recall.SCORES))] == ["0.01", "0.001"]
    assert main(command) == 0
    assert len(read_rows(out, (*COLUMNS, *bench_recall.SCORES))) == 3


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a,b\n1,2\n", "--report must be a record of this benchmark; .* does not have '"),
        ("a,b\n1,2\n1\n", "--report must be a record of this benchmark: .* must have 2 values in row 2; it has 1"),
    ],
)
@pytest.mark.parametrize("command", [main, compare_on_data.main])
def test_a_report_of_what_is_no_record_says_so(tmp_path, capsys, command, text, message):
    path = tmp_path / "rows.csv"
    path.write_text(text)
    with pytest.raises(SystemExit):
        command(["--report", str(path)])
    assert re.search(message, capsys.readouterr().err)
    path.write_text("")
    command(["--report", str(path)])
    assert capsys.readouterr().out == "no rows yet\n"


def test_the_plan_counts_what_is_done(tmp_path, monkeypatch):
    """Where no task is learnt, and where all are."""
    monkeypatch.setattr(bench_recall, "worker_pool", Immediate)
    monkeypatch.setattr(bench_recall, "recipe_hash", lambda *_: "0")
    recipes = {task: RECIPES[task] for task in ("key_value", "mqar", "memorization", "facts")}
    for which, right in enumerate((0.3, 0.9)):
        values = {"parameters": 99, "steps": 7, "cpu_minutes": 0.5, "chance": 0.1, "validation": right}
        values |= {"validation_loss": 0.5, "accuracy": right, "far": right}
        monkeypatch.setattr(bench_recall, "train", lambda run, recipe, values=values: values)
        out = tmp_path / f"{which}.csv"
        assert bench_recall.work(out, recipes, [*MODELS], [*map(str, bench_recall.RATES)], (0, 1, 2), 1) == []
        done = Counter(found["dataset"] for found in read_rows(out, (*COLUMNS, *bench_recall.SCORES)))
        assert done == {
            task: sum(bench_recall._counts(task, name, 3, 3)[which] for name in MODELS if is_done_by(task, name))
            for task in recipes
        }
