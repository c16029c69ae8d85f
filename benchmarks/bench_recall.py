"""Measure what the architectures remember, beside their ablations and peers of equal size, on small tests of recall.

Run it from the repository root::

    python -m benchmarks.bench_recall --out benchmarks/results/recall.csv     # the kept record: hours on two cores
    python -m benchmarks.bench_recall --quick                                 # own tasks, one seed: minutes
    python -m benchmarks.bench_recall --plan                                  # how many runs, and how long they take
    python -m benchmarks.bench_recall --report benchmarks/results/recall.csv  # its tables

The tasks are those of `hf_hybrid.data.recall`, with their published sizes; steps and batches are of this benchmark.
Models have two layers (Mamba-2, whose layers are half as large, three), windows, chunks and local kernels of 8 tokens,
and the same number of parameters. LongT5 has one layer on each side; SRformer and T5 have one in the decoder, which
reads the documents' embeddings, since an encoder's full attention would carry facts from each segment to the others.
An ablation is the model without its global part. The report says how many tokens back each one reaches; the own tasks
(`copying` aside) ask near and far, and beyond 32 tokens, which is called far, it can only guess. SRformer's ablation
reads one segment of the document, and counts as far what lies in another. BST and SPADE have copies with states of
other sizes, which do two tasks alone, the published one with one seed.

Each model is trained at three learning rates with the first seed, and with the other seeds at the best of them: the
lowest that solves the task (99 % of the far answers in validation are right, and of those in the segment that is read)
in at most 1.5 times the fewest steps, or else that with the most right answers there, or with the least loss if all
only guess. Once a rate has solved it, the others end after 1.5 times as many steps. A run that has solved the task
ends too, after a tenth of all steps in which the learning rate falls to zero. Then a test measures the accuracy of all
answers, of far ones and by distance, and, where more than half of the far ones are right, on sequences 2, 4 and 16
times as long as in training.

Of a published task each model has the first seed. If one has more than half of the far answers right, the other seeds
follow; the report says which tasks no run learnt.

Each run has one thread, and `--jobs` of them run in parallel. A finished run adds a row to the CSV file. Stop at any
moment; the same command goes on. A row holds a hash of its recipe, and rows of another recipe, or of another version
of this package, are refused.
"""

import argparse
import os
import signal
import statistics
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.comparison import (
    COLUMNS,
    adding_rows,
    append_rows,
    check_recipe,
    check_version,
    mean_and_error,
    read_rows,
)
from benchmarks.recall_models import MODELS, ablation_reach
from benchmarks.recall_order import (
    AT_CHANCE,
    SLOWER,
    has_diverged,
    is_unlearnt,
    kept,
    mean_of,
    rows_of,
    seeds_of,
    share,
    todo,
)
from benchmarks.recall_run import (
    BINS,
    FACTORS,
    LEARNT,
    LONGER_TOKENS,
    RECIPES,
    Recipe,
    Run,
    estimated_minutes,
    is_done_by,
    recipe_hash,
    train,
)
from benchmarks.record import (
    Row,
    command_line,
    markdown_table,
    measured_on,
    positive,
    positive_int,
    say,
    seed_number,
    stamp,
)
from hf_hybrid.data.workers import worker_pool

DEFAULT_OUT = Path("runs/bench/recall.csv")
RATES = (0.003, 0.01, 0.001)
"""Searched, the likeliest first."""
SEEDS = (0, 1, 2)
QUICK_TASKS = ("aggregate", "latch", "copying", "few_facts", "facts")
QUICK_RATE, QUICK_STEPS = RATES[0], 800
DONE = 0.95
"""Share of right answers with which a task is done."""
AT_EDGE = "†"
"""Marks a best learning rate that solved nothing and is the lowest or highest that was searched."""
_FAR = [f"at_{least}" for least in BINS]
_LONGER = [f"x{factor}" for factor in FACTORS]
_COUNTS = ("solved_step", "trained_steps")
_TESTED = ("accuracy", "far", "chance", "without_keys", *_LONGER, *_FAR)
SCORES = ("validation_loss", "validation_accuracy", *_COUNTS, *_TESTED)


# ---- the work ----


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
    shown = {name: f"{values[name]:.4g}" for name in ("validation_loss", *_TESTED) if name in values}
    outcome = "diverged" if "validation" not in values else "ok" if "accuracy" in values else SLOWER
    if outcome != "diverged":
        shown |= {"validation_accuracy": f"{values['validation']:.4g}", "trained_steps": f"{values['steps']:d}"}
        shown |= {"solved_step": f"{values['solved_step']:d}"} if "solved_step" in values else {}
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
        **(shown if outcome != "diverged" else {}),
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

    Raises:
        ValueError: The file has rows of another recipe or version, cannot be written, or another process adds to it.
    """
    columns, failures = (*COLUMNS, *SCORES), []
    running: dict[Future[dict[str, float]], Run] = {}
    tried: set[Run] = set()
    with adding_rows(path, columns), worker_pool(jobs, _one_thread) as pool:
        check_rows(read_rows(path, columns), recipes, path)
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
                try:
                    append_rows(path, columns, [row])
                except OSError as error:
                    failures.append(f"{run}: {error}; its row was {','.join(row.get(name, '') for name in columns)}")
                    say(f"FAILED {failures[-1]}")
                    continue
                say(f"{run}: {row['outcome']}, " + ", ".join(f"{n} {row[n]}" for n in SCORES[:6] if n in row))


def _one_thread() -> None:
    import torch
    from transformers.utils import logging

    torch.set_num_threads(1)
    logging.set_verbosity_error()


# ---- tables ----


def report(rows: list[Row]) -> str:
    """Return a table for each task: accuracy of all answers and of far ones, of longer sequences, and by distance."""
    reaches = {name: ablation_reach(name) for name, kind in MODELS.items() if kind.ablation_of}
    parts = [
        f"{measured_on(rows)}. Shares of right answers, mean ± standard error over the seeds; "
        "*far*: beyond the reach of every ablation, which is "
        + ", ".join(f"{reach} tokens ({name})" for name, reach in reaches.items() if reach is not None)
        + ". *Seeds*: those whose loss was finite. Tests of longer sequences are of seeds that have learnt the task, "
        "and distances, of documents in segments, are those of which all seeds have tests. *Steps to 99 %*: until so "
        f"many far answers of the validation were right, and of those in the segment that is read. {AT_EDGE}: the "
        "lowest or highest rate that was searched; another might be better. Sequences F "
        f"times as long hold {LONGER_TOKENS:,} tokens of each seed.",
        remembered(rows),
    ]
    for task in dict.fromkeys(row["dataset"] for row in rows):
        of = {model: kept(rows, task, model) for model in MODELS}
        found = [row for runs in of.values() for row in runs]
        bins = [name for name in _FAR if any(row[name] for row in found)]
        longer = [name for name in _LONGER if any(row[name] for row in found)]
        header = ["model", "parameters", "seeds", "learning rate", "steps to 99 %", "all", "far"]
        header += [f"{name.removeprefix('x')}× as long, far" for name in longer]
        header += [name.removeprefix("at_") + "+" for name in bins]
        lines = [_line(rows_of(rows, task, model), runs, longer, bins) for model, runs in of.items() if runs]
        chance = mean_of(found, "chance")
        title = f"**{task}**" + ("" if chance is None else f": guessing gives {chance:.3f}")
        if without_keys := mean_of(found, "without_keys"):
            title += f", the likeliest of the values told {without_keys:.3f}"
        if is_unlearnt(rows, task):
            title += (
                f". Not learnt in this budget: at no learning rate has a model more than {LEARNT:.0%} of the far "
                "answers right"
            )
        parts += [title, markdown_table(header, lines)]
    return "\n\n".join(parts)


def remembered(rows: Sequence[Row]) -> str:
    """Return a table of the tasks that each architecture does, with and without its global part, and of the others."""
    lines = []
    for ablation, kind in MODELS.items():
        cells: list[list[str]] = [[], [], []]
        for task in dict.fromkeys(row["dataset"] for row in rows) if kind.ablation_of else ():
            found = kept(rows, task, str(kind.ablation_of)), kept(rows, task, ablation)
            if found[0] and (found[1] or any(map(has_diverged, found[0]))):
                place, text = _remembered(*found)
                cells[place].append(f"{task} ({text})")
        if any(cells):
            lines.append([str(kind.ablation_of), *(", ".join(cell) for cell in cells)])
    title = (
        f"Far answers (all answers where none is far): right with the global part; without it; by guessing. *Does*: "
        f"{DONE:.0%} or more, also of all answers. *Only guess*: at most {100 * AT_CHANCE:.0f} points above guessing, "
        "all seeds finite."
    )
    header = ["architecture", "does, and its ablation can only guess", "does, and its ablation not only guesses"]
    header += ["does not"]
    if not any(line[2] for line in lines):
        header, *lines = ([line[0], line[1], line[3]] for line in (header, *lines))
    return f"{title}\n\n{markdown_table(header, lines)}"


def _remembered(runs: Sequence[Row], others: Sequence[Row]) -> tuple[int, str]:
    """Return the column of a task in the table of what is remembered, and the shares."""
    right, without = share(runs), share(others)
    chance = mean_of([*runs, *others], "chance")
    diverged, ablations = (sum(map(has_diverged, rows)) for rows in (runs, others))
    are_right = [right, mean_of(runs, "accuracy")]
    is_done = all(value is not None and value >= DONE for value in are_right) and not diverged
    is_guessed = without is not None and chance is not None and without <= chance + AT_CHANCE and not ablations
    notes = [
        f"{count} of {len(rows)}{whose} diverged"
        for count, rows, whose in ((diverged, runs, ""), (ablations, others, " without it"))
        if count
    ]
    notes += ["one seed"] if len(runs) == 1 and not diverged else []
    shown = ["" if value is None else f"{value:.3f}" for value in (right, without, chance)]
    return 2 if not is_done else 0 if is_guessed else 1, "; ".join([*shown, *notes])


def _line(searched: Sequence[Row], runs: Sequence[Row], longer: Sequence[str], bins: Sequence[str]) -> list[str]:
    """Return the line of a model from its rows of a task, and from those at its best learning rate."""
    model, names = runs[0]["model"], ["accuracy", "far", *longer]
    if not (finite := [row for row in runs if not has_diverged(row)]):
        return [model, *[""] * 4, *["diverged"] * (len(names) + len(bins))]
    seeds = f"{len(finite)} of {len(runs)}" if len(finite) < len(runs) else str(len(runs))
    solved = [int(row["solved_step"]) for row in runs if row["solved_step"]]
    steps = f"{statistics.fmean(solved):.0f}" if solved else ""
    steps += f" ({len(solved)} of {len(runs)})" if 0 < len(solved) < len(runs) else ""
    rates = sorted({row["learning_rate"] for row in searched}, key=float)
    is_at_edge = not solved and len(rates) > 1 and runs[0]["learning_rate"] in (rates[0], rates[-1])
    rate = runs[0]["learning_rate"] + AT_EDGE * is_at_edge
    cells = [model, f"{int(runs[0]['parameters']):,}", seeds, rate, steps]
    for name in names:
        values = [float(row[name]) for row in finite if row[name]]
        some = f" ({len(values)} of {len(finite)})" if len(values) < len(finite) else ""
        cells.append(mean_and_error(values, "accuracy") + some if values else "")
    return [*cells, *("" if (mean := mean_of(runs, name)) is None else f"{mean:.3f}" for name in bins)]


# ---- the command line ----


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this benchmark's arguments."""
    parser.add_argument("--tasks", nargs="+", choices=RECIPES, metavar="TASK", help=", ".join(RECIPES))
    parser.add_argument("--models", nargs="+", choices=MODELS, metavar="MODEL", help="; ".join(MODELS))
    parser.add_argument("--rates", nargs="+", type=positive, help=f"searched, the likeliest first ({_words(RATES)})")
    parser.add_argument("--seeds", nargs="+", type=seed_number, help=f"the first one searches ({_words(SEEDS)})")
    parser.add_argument("--jobs", type=positive_int, default=os.cpu_count(), help="parallel runs (one per core)")
    quick = f"if not given: the tasks {', '.join(QUICK_TASKS)}, one seed and rate, at most {QUICK_STEPS} steps"
    parser.add_argument("--quick", action="store_true", help=quick)
    parser.add_argument("--plan", action="store_true", help="only count the runs, and estimate their time")
    parser.add_argument("--steps", type=positive_int, help="most updates (the task's own)")


def _words(values: Sequence[Any]) -> str:
    return " ".join(map(str, values))


def _settings(arguments: argparse.Namespace) -> tuple[dict[str, Recipe], list[str], list[str], Sequence[int]]:
    """Return the recipes of the tasks, the models, the rates and the seeds that are asked for.

    Raises:
        SystemExit: No model does a task.
    """
    quick = arguments.quick
    tasks = arguments.tasks or (QUICK_TASKS if quick else [*RECIPES])
    models = arguments.models or [name for name, kind in MODELS.items() if not quick or kind.state_of is None]
    if not any(is_done_by(task, model) for task in tasks for model in models):
        raise SystemExit(f"--models must name a model that does {_words(tasks)}; got {', '.join(models)}")
    most = QUICK_STEPS if quick else sys.maxsize
    recipes = {task: replace(RECIPES[task], steps=arguments.steps or min(RECIPES[task].steps, most)) for task in tasks}
    rates = [f"{rate:g}" for rate in arguments.rates or ([QUICK_RATE] if quick else RATES)]
    return recipes, models, rates, arguments.seeds or (SEEDS[:1] if quick else SEEDS)


def plan(
    recipes: Mapping[str, Recipe], models: Sequence[str], rates: Sequence[str], seeds: Sequence[int], jobs: int
) -> str:
    """Return a table of the runs of each task, and how many CPU minutes they take if all runs take all their steps.

    Those of a published task are given twice: if no model learns it, and if one does.
    """
    lines, sums = [], [0, 0.0, 0, 0.0]
    for task, recipe in recipes.items():
        counts = {model: _counts(task, model, len(rates), len(seeds)) for model in models if is_done_by(task, model)}
        minutes = {model: estimated_minutes(task, model, recipe) for model in counts}
        cells = []
        for which in (0, 1):
            cells += [sum(few[which] for few in counts.values())]
            cells += [sum(few[which] * minutes[model] for model, few in counts.items())]
        lines.append([task, str(len(counts)), *(f"{cell:.0f}" for cell in cells)])
        sums = [total + cell for total, cell in zip(sums, cells, strict=True)]
    header = ["task", "models", "runs, not learnt", "CPU minutes at most", "runs, learnt", "CPU minutes at most"]
    spans = [f"{runs:.0f} runs, at most {taken:.0f} CPU minutes" for runs, taken in (sums[:2], sums[2:])]
    return (
        f"{markdown_table(header, lines)}\n\nIf no published task is learnt: {spans[0]}. If all are: {spans[1]}, "
        f"{sums[3] / jobs:.0f} minutes on {jobs} free cores. Runs that solve their task end early; so do other rates."
    )


def _counts(task: str, model: str, rates: int, seeds: int) -> tuple[int, int]:
    """Return the runs of a model if no model learns a task, and if one does; an own task counts as learnt."""
    recipe = RECIPES[task]
    seeds = len(seeds_of(task, model, range(seeds)))
    whole = seeds + rates - 1
    return whole if recipe.is_own else rates * (MODELS[model].state_of is None), whole


def run(arguments: argparse.Namespace) -> list[Row]:
    """Do what is missing, and return all rows."""
    settings = _settings(arguments)
    if arguments.quick and arguments.out == DEFAULT_OUT:
        arguments.out = DEFAULT_OUT.with_stem("recall_quick")
    if arguments.plan:
        _one_thread()
        print(plan(*settings, arguments.jobs))
        raise SystemExit(0)
    try:
        failures = work(arguments.out, *settings, arguments.jobs)
    except ValueError as error:
        raise SystemExit(f"--out: {error}") from error
    if failures:
        raise SystemExit("\n".join(f"FAILED {failure}" for failure in failures))
    return read_rows(arguments.out, (*COLUMNS, *SCORES))


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark, or print the tables of an earlier run."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        return command_line(__doc__, DEFAULT_OUT, add_arguments, run, report, argv)
    except KeyboardInterrupt:
        say("interrupted; the same command goes on")
        return 130


if __name__ == "__main__":
    sys.exit(main())
