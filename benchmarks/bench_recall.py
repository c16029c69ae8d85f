"""Measure what the architectures remember, beside their ablations and peers of equal size, on small tests of recall.

Run it from the repository root::

    python -m benchmarks.bench_recall --out benchmarks/results/recall.csv     # the kept record: a night on two cores
    python -m benchmarks.bench_recall --quick                                 # own tasks, one seed: minutes
    python -m benchmarks.bench_recall --plan                                  # how many runs, and how long they take
    python -m benchmarks.bench_recall --report benchmarks/results/recall.csv  # its tables

The tasks are those of `hf_hybrid.data.recall`, with their published sizes. Models have two layers (Mamba-2, whose
layers are half as large, three; encoder-decoders one on each side), windows, chunks and local kernels of 8 tokens, and
the same number of parameters. An ablation is the model without its global part. Its layers together reach 16 tokens at
most, and the own tasks ask beyond 32: there an ablation can only guess. SRformer's ablation reads one segment of the
document, and counts as far what lies in another. BST and SPADE have copies with states of other sizes, which do two
tasks alone.

Each model is trained at the best of three learning rates: that with the least validation loss in runs of a quarter of
the steps with the first seed. Copies with another size of the state take the rate of their model. Training ends when
99 % of the validation is right. Then a test measures the accuracy of all answers, of far ones and by distance, and on
sequences 2, 4 and 16 times as long as in training.

Each run has one thread, and `--jobs` of them run in parallel. A finished run adds a row to the CSV file. Stop at any
moment; the same command goes on. A row holds a hash of its recipe, and rows of another recipe, or of another version
of this package, are refused.
"""

import argparse
import os
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path

from benchmarks.comparison import (
    COLUMNS,
    SEARCH,
    append_rows,
    best_rate,
    check_recipe,
    check_version,
    mean_and_error,
    read_rows,
)
from benchmarks.recall_models import MODELS
from benchmarks.recall_run import (
    BINS,
    FACTORS,
    RECIPES,
    Recipe,
    Run,
    estimated_minutes,
    is_done_by,
    recipe_hash,
    train,
)
from benchmarks.record import Row, command_line, markdown_table, measured_on, say, stamp

DEFAULT_OUT = Path("runs/bench/recall.csv")
SELECT = "validation_loss"
RATES = ("0.001", "0.003", "0.01")
QUICK_TASKS, QUICK_RATE, QUICK_STEPS = ("aggregate", "latch", "key_value", "facts"), "0.003", 500
DONE, AT_CHANCE = 0.95, 0.02
"""A task is done with this share of right answers, and guessed with at most so much more than chance."""
_FAR = [f"at_{least}" for least in BINS]
_LONGER = [f"x{factor}" for factor in FACTORS]
SCORES = (SELECT, "validation_accuracy", "accuracy", "far", "chance", "trained_steps", *_LONGER, *_FAR)


# ---- the order of work ----


def todo(
    rows: Sequence[Row], tasks: Sequence[str], models: Sequence[str], rates: Sequence[str], seeds: Sequence[int]
) -> Iterator[Run]:
    """Yield the runs that are missing and can start: shortened ones at every rate, then all seeds at the best.

    A single rate is not searched. A copy of a model with another size of the state takes the rate of that model.
    """
    for task in tasks:
        own = [row for row in rows if row["dataset"] == task]
        for model in models:
            if not is_done_by(task, model):
                continue
            asked = MODELS[model].state_of or model
            searches = [Run(task, asked, seeds[0], rate, is_search=True) for rate in rates if len(rates) > 1]
            if missing := [run for run in searches if not _is_done(run, own)]:
                yield from missing
                continue
            searched = [row for row in own if row["seed"] == SEARCH and row["learning_rate"] in rates]
            best = best_rate(searched, asked, SELECT) if searches else rates[0]
            if best is not None:  # every rate diverged
                runs = [Run(task, model, seed, best) for seed in seeds]
                yield from (run for run in runs if not _is_done(run, own))


def _is_done(run: Run, rows: Sequence[Row]) -> bool:
    return any((row["model"], row["seed"], row["learning_rate"]) == (run.model, *run.key) for row in rows)


def check_rows(rows: Sequence[Row], recipes: Mapping[str, Recipe], path: Path) -> None:
    """Refuse rows of another recipe or version.

    Raises:
        ValueError: There are some.
    """
    for task, recipe in recipes.items():
        own = [row for row in rows if row["dataset"] == task]
        for model in dict.fromkeys(row["model"] for row in own if row["model"] in MODELS):
            check_version(path, own, model)
            check_recipe(path, own, model, recipe_hash(task, model, recipe), where=task)


def row_of(run: Run, recipe: Recipe, values: Mapping[str, float]) -> Row:
    """Return the row of a finished run."""
    shown = {name: f"{values[name]:.4g}" for name in SCORES if name in values}
    outcome = "ok" if "validation" in values else "diverged"
    if outcome == "ok":
        shown |= {"validation_accuracy": f"{values['validation']:.4g}", "trained_steps": f"{values['steps']:d}"}
    return {
        **stamp(),
        "dataset": run.task,
        "model": run.model,
        "seed": run.key[0],
        "learning_rate": run.rate,
        "recipe": recipe_hash(run.task, run.model, recipe),
        "outcome": outcome,
        "parameters": str(values["parameters"]),
        "steps": str(run.steps(recipe)),
        "cpu_minutes": f"{values['cpu_minutes']:.2f}" if "cpu_minutes" in values else "",
        **(shown if outcome == "ok" else {}),
    }


def work(
    path: Path,
    recipes: Mapping[str, Recipe],
    models: Sequence[str],
    rates: Sequence[str],
    seeds: Sequence[int],
    jobs: int,
) -> list[str]:
    """Do all missing runs, several in parallel, and append their rows.

    Returns:
        What failed; the next start repeats it.
    """
    columns, failures = (*COLUMNS, *SCORES), []
    check_rows(read_rows(path, columns), recipes, path)
    running: dict[Future[dict[str, float]], Run] = {}
    tried: set[Run] = set()
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn"), initializer=_one_thread) as pool:
        while True:
            for run in todo(read_rows(path, columns), [*recipes], models, rates, seeds):
                if len(running) < jobs and run not in tried:
                    tried.add(run)
                    running[pool.submit(train, run, recipes[run.task])] = run
            if not running:
                return failures
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                run = running.pop(future)
                if (error := future.exception()) is not None:
                    failures.append(f"{run}: {error}")
                    say(f"FAILED {failures[-1]}")
                    continue
                row = row_of(run, recipes[run.task], future.result())
                append_rows(path, columns, [row])
                say(f"{run}: {row['outcome']}, " + ", ".join(f"{n} {row[n]}" for n in SCORES[:4] if n in row))


def _one_thread() -> None:
    import torch
    from transformers.utils import logging

    torch.set_num_threads(1)
    logging.set_verbosity_error()


# ---- tables ----


def kept(rows: Sequence[Row], task: str, model: str) -> list[Row]:
    """Return a model's finished rows of a task, those of the search left out.

    Raises:
        ValueError: They have several learning rates.
    """
    own = [row for row in rows if (row["dataset"], row["model"]) == (task, model) and row["seed"] != SEARCH]
    if len(rates := sorted({row["learning_rate"] for row in own}, key=float)) > 1:
        raise ValueError(f"{task}: the rows of {model!r} must have one learning rate; got {', '.join(rates)}")
    return [row for row in own if row["outcome"] == "ok"]


def mean_of(rows: Sequence[Row], name: str) -> float | None:
    """Return the mean of a score over rows; None if none has it."""
    values = [float(row[name]) for row in rows if row[name]]
    return statistics.fmean(values) if values else None


def report(rows: list[Row]) -> str:
    """Return a table for each task: accuracy of all answers and of far ones, of longer sequences, and by distance."""
    if not rows:
        return "no rows yet"
    parts = [
        f"{measured_on(rows)}. Shares of right answers, mean ± standard error over the seeds; "
        "*far*: beyond the reach of every ablation.",
        remembered(rows),
    ]
    for task in dict.fromkeys(row["dataset"] for row in rows):
        own = [row for row in rows if row["dataset"] == task]
        # a model whose search is not finished has no line yet; one that always diverged has
        searching = {row["model"] for row in own if row["seed"] == SEARCH and row["outcome"] == "ok"}
        ended = {row["model"]: row for row in own if row["seed"] != SEARCH or row["model"] not in searching}
        of = {model: kept(own, task, model) for model in ended}
        found = [row for runs in of.values() for row in runs]
        bins = [name for name in _FAR if any(row[name] for row in found)]
        header = ["model", "parameters", "seeds", "learning rate", "steps", "all", "far"]
        header += [f"{factor}× as long" for factor in FACTORS] + [name.removeprefix("at_") + "+" for name in bins]
        lines = [_line(model, runs, bins) for model, runs in of.items()]
        chance = mean_of(found, "chance")
        title = f"**{task}**" + ("" if chance is None else f": guessing gives {chance:.3f}")
        parts += [title, markdown_table(header, lines)]
    return "\n\n".join(parts)


def remembered(rows: Sequence[Row]) -> str:
    """Return a table of the tasks that each architecture does, with and without its global part, and of the others."""
    lines = []
    for ablation, kind in MODELS.items():
        cells: list[list[str]] = [[], [], []]
        for task in dict.fromkeys(row["dataset"] for row in rows) if kind.ablation_of else ():
            runs, others = kept(rows, task, str(kind.ablation_of)), kept(rows, task, ablation)
            if not runs or not others:
                continue
            (share, without), chance = (_share(found) for found in (runs, others)), float(runs[0]["chance"])
            is_done, is_guessed = share >= DONE, without <= chance + AT_CHANCE
            place = 2 if not is_done else 0 if is_guessed else 1
            cells[place].append(f"{task} ({share:.3f}; {without:.3f}; {chance:.3f})")
        if any(cells):
            lines.append([str(kind.ablation_of), *(", ".join(cell) for cell in cells)])
    title = (
        f"Far answers (all answers where none is far): right with the global part; without it; by guessing. *Does*: "
        f"{DONE:.0%} or more."
    )
    header = ["architecture", "does, and its ablation can only guess", "does, and its ablation not only guesses"]
    return f"{title}\n\n{markdown_table([*header, 'does not'], lines)}"


def _share(rows: Sequence[Row]) -> float:
    far = mean_of(rows, "far")
    return float(mean_of(rows, "accuracy") or 0.0) if far is None else far


def _line(model: str, runs: Sequence[Row], bins: Sequence[str]) -> list[str]:
    names = ["accuracy", "far", *_LONGER]
    if not runs:
        return [model, *[""] * 4, *["diverged"] * (len(names) + len(bins))]
    steps = statistics.fmean(int(row["trained_steps"]) for row in runs)
    cells = [model, f"{int(runs[0]['parameters']):,}", str(len(runs)), runs[0]["learning_rate"], f"{steps:.0f}"]
    for name in names:
        values = [float(row[name]) for row in runs if row[name]]
        cells.append(mean_and_error(values, "accuracy") if values else "")
    return [*cells, *("" if (mean := mean_of(runs, name)) is None else f"{mean:.3f}" for name in bins)]


# ---- the command line ----


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this benchmark's arguments."""
    parser.add_argument(
        "--tasks", nargs="+", choices=RECIPES, default=[*RECIPES], metavar="TASK", help=", ".join(RECIPES)
    )
    parser.add_argument(
        "--models", nargs="+", choices=MODELS, default=[*MODELS], metavar="MODEL", help="; ".join(MODELS)
    )
    parser.add_argument("--rates", nargs="+", default=RATES, metavar="RATE", help="searched (0.001 0.003 0.01)")
    parser.add_argument("--seeds", nargs="+", type=int, default=(0, 1, 2), help="the first one searches (0 1 2)")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="parallel runs (one per core)")
    quick = f"the tasks {', '.join(QUICK_TASKS)}, one seed and rate, at most {QUICK_STEPS} steps"
    parser.add_argument("--quick", action="store_true", help=quick)
    parser.add_argument("--plan", action="store_true", help="only count the runs, and estimate their time")
    parser.add_argument("--steps", type=int, help="most updates (the task's own)")


def plan(recipes: Mapping[str, Recipe], models: Sequence[str], rates: int, seeds: int, jobs: int) -> str:
    """Return a table of the runs of each task, and how many CPU minutes they take at most: all steps of all runs."""
    lines, count, minutes = [], 0, 0.0
    for task, recipe in recipes.items():
        doing = [model for model in models if is_done_by(task, model)]
        runs, taken = 0, 0.0
        for model in doing:
            searches = 0 if rates < 2 or MODELS[model].state_of else rates
            search, whole = estimated_minutes(task, model, recipe)
            runs, taken = runs + searches + seeds, taken + searches * search + seeds * whole
        lines.append([task, str(len(doing)), str(runs), f"{taken:.0f}"])
        count, minutes = count + runs, minutes + taken
    table = markdown_table(["task", "models", "runs", "CPU minutes at most"], lines)
    time = f"{minutes:.0f} CPU minutes: {minutes / jobs:.0f} minutes on {jobs} free cores"
    return f"{table}\n\n{count} runs, at most {time}"


def run(arguments: argparse.Namespace) -> list[Row]:
    """Do what is missing, and return all rows."""
    if arguments.quick:
        arguments.tasks, arguments.rates, arguments.seeds = QUICK_TASKS, (QUICK_RATE,), arguments.seeds[:1]
        arguments.models = [model for model in arguments.models if MODELS[model].state_of is None]
        if arguments.out == DEFAULT_OUT:
            arguments.out = DEFAULT_OUT.with_stem("recall_quick")
    most = QUICK_STEPS if arguments.quick else sys.maxsize
    steps = {task: arguments.steps or min(RECIPES[task].steps, most) for task in arguments.tasks}
    recipes = {task: replace(RECIPES[task], steps=steps[task]) for task in arguments.tasks}
    if arguments.plan:
        _one_thread()
        print(plan(recipes, arguments.models, len(arguments.rates), len(arguments.seeds), arguments.jobs))
        raise SystemExit(0)
    settings = (recipes, arguments.models, [f"{float(rate):g}" for rate in arguments.rates], arguments.seeds)
    failures = work(arguments.out, *settings, arguments.jobs)
    if failures:
        raise SystemExit("\n".join(f"FAILED {failure}" for failure in failures))
    return read_rows(arguments.out, (*COLUMNS, *SCORES))


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark, or print the tables of an earlier run."""
    return command_line(__doc__, DEFAULT_OUT, add_arguments, run, report, argv)


if __name__ == "__main__":
    sys.exit(main())
