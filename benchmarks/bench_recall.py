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

The first seed trains each model at three learning rates, the others at the best of them by validation. Training ends
when 99.5 % of the validation is right. Then a test measures the accuracy of all answers, of far ones and by distance,
and on sequences 2, 4 and 16 times as long as in training.

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
from typing import Any

from benchmarks.comparison import (
    COLUMNS,
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
SELECT = "validation_accuracy"
RATES = ("0.001", "0.003", "0.01")
QUICK_TASKS, QUICK_RATE, QUICK_STEPS = ("aggregate", "latch", "key_value", "facts"), "0.003", 500
_FAR = [f"at_{least}" for least in BINS]
SCORES = (SELECT, "accuracy", "far", "chance", "trained_steps", *(f"x{factor}" for factor in FACTORS), *_FAR)


# ---- the order of work ----


def todo(
    rows: Sequence[Row], tasks: Sequence[str], models: Sequence[str], rates: Sequence[str], seeds: Sequence[int]
) -> Iterator[Run]:
    """Yield the runs that are missing and can start: every rate with the first seed, then the best with the others."""
    for task in tasks:
        own = [row for row in rows if row["dataset"] == task]
        for model in models:
            if not is_done_by(task, model):
                continue
            done = {(row["seed"], row["learning_rate"]) for row in own if row["model"] == model}
            searches = [Run(task, model, seeds[0], rate) for rate in rates]
            if missing := [run for run in searches if (str(run.seed), run.rate) not in done]:
                yield from missing
                continue
            best = best_rate([row for row in own if row["learning_rate"] in rates], model, SELECT)
            if best is not None:  # every rate diverged
                others = (Run(task, model, seed, best) for seed in seeds[1:])
                yield from (run for run in others if (str(run.seed), run.rate) not in done)


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
    shown |= {SELECT: f"{values['validation']:.4g}" if "validation" in values else ""}
    outcome = "ok" if "accuracy" in values else "diverged"
    if outcome == "ok":
        shown["trained_steps"] = f"{values['steps']:d}"
    return {
        **stamp(),
        "dataset": run.task,
        "model": run.model,
        "seed": str(run.seed),
        "learning_rate": run.rate,
        "recipe": recipe_hash(run.task, run.model, recipe),
        "outcome": outcome,
        "parameters": str(values["parameters"]),
        "steps": str(recipe.steps),
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
                say(f"{run}: {row['outcome']}, accuracy {row.get('accuracy', '')}, far {row.get('far', '')}")


def _one_thread() -> None:
    import torch
    from transformers.utils import logging

    torch.set_num_threads(1)
    logging.set_verbosity_error()


# ---- tables ----


def kept(rows: Sequence[Row], task: str, model: str) -> list[Row]:
    """Return a model's finished rows of a task at its best learning rate."""
    own = [row for row in rows if (row["dataset"], row["model"]) == (task, model)]
    rate = best_rate(own, model, SELECT) if own else None
    return [row for row in own if row["learning_rate"] == rate and row["outcome"] == "ok"]


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
        "*far*: beyond the reach of every ablation."
    ]
    for task in dict.fromkeys(row["dataset"] for row in rows):
        own = [row for row in rows if row["dataset"] == task]
        models = list(dict.fromkeys(row["model"] for row in own))
        of = {model: kept(own, task, model) for model in models}
        found = [row for runs in of.values() for row in runs]
        bins = [name for name in _FAR if any(row[name] for row in found)]
        header = ["model", "parameters", "seeds", "learning rate", "steps", "all", "far"]
        header += [f"{factor}× as long" for factor in FACTORS] + [name.removeprefix("at_") + "+" for name in bins]
        lines = [_line(model, runs, bins) for model, runs in of.items()]
        chance = mean_of(found, "chance")
        title = f"**{task}**" + ("" if chance is None else f": guessing gives {chance:.3f}")
        parts += [title, markdown_table(header, lines)]
    return "\n\n".join(parts)


def _line(model: str, runs: Sequence[Row], bins: Sequence[str]) -> list[str]:
    names = ["accuracy", "far", *(f"x{factor}" for factor in FACTORS)]
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
    parser.add_argument("--rates", nargs="+", default=RATES, metavar="RATE", help="learning rates (0.001 0.003 0.01)")
    parser.add_argument("--seeds", nargs="+", type=int, default=(0, 1, 2), help="the first one searches (0 1 2)")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="parallel runs (one per core)")
    quick = f"the tasks {', '.join(QUICK_TASKS)}, one seed and rate, {QUICK_STEPS} steps"
    parser.add_argument("--quick", action="store_true", help=quick)
    parser.add_argument("--plan", action="store_true", help="only count the runs, and estimate their time")
    parser.add_argument("--steps", type=int, help="most updates (the task's own)")


def plan(recipes: Mapping[str, Recipe], models: Sequence[str], rates: int, seeds: int, jobs: int) -> str:
    """Return a table of the runs of each task, and how many CPU minutes they take at most: all steps of all runs."""
    lines, count, minutes = [], 0, 0.0
    for task, recipe in recipes.items():
        doing = [model for model in models if is_done_by(task, model)]
        runs = len(doing) * (rates + seeds - 1)
        taken = sum(estimated_minutes(task, model, recipe) for model in doing) * (rates + seeds - 1)
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
        arguments.steps = arguments.steps or QUICK_STEPS
        if arguments.out == DEFAULT_OUT:
            arguments.out = DEFAULT_OUT.with_stem("recall_quick")
    more: dict[str, Any] = {} if arguments.steps is None else {"steps": arguments.steps}
    recipes = {task: replace(RECIPES[task], **more) for task in arguments.tasks}
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
