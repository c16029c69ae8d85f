"""The runs of `bench_recall` that are missing, in their order, and which of the finished ones count."""

import statistics
from collections.abc import Iterator, Sequence
from itertools import zip_longest

from benchmarks.recall_models import MODELS
from benchmarks.recall_run import LEARNT, RECIPES, STABLE, Run, is_done_by
from benchmarks.record import Row

AT_CHANCE = 0.02
"""Share of right answers above the task's chance that still counts as guessed."""
SLOWER = "slower"
"""Outcome of a run that ended, untested, because another rate had solved the task in far fewer steps."""

# ---- rows ----


def rows_of(rows: Sequence[Row], task: str, model: str) -> list[Row]:
    """Return a model's rows of a task."""
    return [row for row in rows if (row["dataset"], row["model"]) == (task, model)]


def best_row(rows: Sequence[Row]) -> Row | None:
    """Return the best of rows with one seed: that of the lowest rate which solves the task in about the fewest steps.

    About are `STABLE` times as many, since the fastest rate is often the highest that does not diverge, which it may
    do with another seed. If none solves it, that with the most right answers in validation, or with the least loss
    there if all only guess; None if the loss of all was not finite.
    """
    tested = [row for row in rows if row["outcome"] == "ok"]
    if solved := [row for row in tested if row["solved_step"]]:
        most = STABLE * fewest_steps(solved)
        return min((row for row in solved if int(row["solved_step"]) <= most), key=_rate)
    return min(tested, key=lambda row: (-_right(row), float(row["validation_loss"])), default=None)


def _rate(row: Row) -> float:
    return float(row["learning_rate"])


def _right(row: Row) -> float:
    """Return the share of right answers in validation, or what counts as guessed if that is more."""
    return max(float(row["validation_accuracy"]), _guessed(row))


def _guessed(row: Row) -> float:
    """Return the share of right answers up to which a model only guesses."""
    return float(row["chance"]) + AT_CHANCE


def fewest_steps(rows: Sequence[Row]) -> int:
    """Return the fewest steps in which one of some rows has solved its task."""
    return min(int(row["solved_step"]) for row in rows if row["solved_step"])


def kept(rows: Sequence[Row], task: str, model: str) -> list[Row]:
    """Return a model's rows of a task at its best learning rate, one for each seed, also of seeds that diverged.

    The rates are those of its first row's seed.
    """
    if not (own := rows_of(rows, task, model)):
        return []
    best = best_row([row for row in own if row["seed"] == own[0]["seed"]]) or own[0]
    return list({row["seed"]: row for row in own if row["learning_rate"] == best["learning_rate"]}.values())


def has_diverged(row: Row) -> bool:
    """Return whether a run's loss was not finite, so that it has no scores."""
    return row["outcome"] == "diverged"


def mean_of(rows: Sequence[Row], name: str) -> float | None:
    """Return the mean of a score over the rows that have not diverged; None if there is none, or one lacks the score.

    A seed that has learnt nothing has no tests of longer sequences; the mean of the others would hide it.
    """
    values = [row[name] for row in rows if not has_diverged(row)]
    return statistics.fmean(map(float, values)) if values and all(values) else None


def share(rows: Sequence[Row]) -> float | None:
    """Return the share of right answers among far ones, or among all where none is far; None if all rows diverged."""
    far = mean_of(rows, "far")
    return mean_of(rows, "accuracy") if far is None else far


def is_unlearnt(rows: Sequence[Row], task: str) -> bool:
    """Return whether no run of a published task has learnt it, with whichever rate and seed."""
    shares = [share([row]) for model in MODELS for row in rows_of(rows, task, model)]
    return not RECIPES[task].is_own and all(found is None or found <= LEARNT for found in shares)


# ---- the order of work ----


def seeds_of(task: str, model: str, seeds: Sequence[int]) -> Sequence[int]:
    """Return the seeds of a model on a task: the first alone where several are not worth their time.

    Copies with another size of the state have several on own tasks.
    """
    kind, recipe = MODELS[model], RECIPES[task]
    are_worth = kind.has_seeds and recipe.has_seeds and (kind.state_of is None or recipe.is_own)
    return seeds if are_worth else seeds[:1]


def todo(
    rows: Sequence[Row], tasks: Sequence[str], models: Sequence[str], rates: Sequence[str], seeds: Sequence[int]
) -> Iterator[Run]:
    """Yield the runs that are missing and can start.

    The first seed searches the learning rate, and the others take the best. A published task has the first seed alone
    until a model has learnt it, and no copies with another size of the state.
    """
    done = {_key(row) for row in rows}
    for task in tasks:
        doing, asked = [model for model in models if is_done_by(task, model)], (rates, seeds)
        if is_unlearnt(rows, task):
            doing = [model for model in doing if MODELS[model].state_of is None]
            asked = (rates, seeds[:1])
        missing = [[run for run in _runs(rows, task, model, *asked) if run.key not in done] for model in doing]
        # every model's first rate before any second one, which ends early once the first has solved the task
        turns = (run for runs in zip_longest(*missing) for run in runs if run is not None)
        yield from dict.fromkeys(turns)


def _runs(rows: Sequence[Row], task: str, model: str, rates: Sequence[str], seeds: Sequence[int]) -> list[Run]:
    """Return the runs of a model that can start or are done; those of the model that it waits for if none can.

    Of a published task a copy with another size of the state waits until its model does more than guess.
    """
    leader = MODELS[model].state_of
    if leader is None or RECIPES[task].is_own:
        return _own_runs(rows, task, model, rates, seeds)
    best = _best(rows, task, leader, rates, seeds[0])
    if best is None:
        return _own_runs(rows, task, leader, rates, seeds)
    return [] if is_guessed(best) else _own_runs(rows, task, model, rates, seeds)


def _own_runs(rows: Sequence[Row], task: str, model: str, rates: Sequence[str], seeds: Sequence[int]) -> list[Run]:
    """Return the first seed's search of the rate, and the other seeds once it has ended."""
    first, *others = seeds_of(task, model, seeds)
    own = [row for row in rows_of(rows, task, model) if row["seed"] == str(first)]
    overtaken = int(STABLE * fewest_steps(own)) if any(row["solved_step"] for row in own) else None
    search = [Run(task, model, first, rate, overtaken=overtaken) for rate in rates]
    best = _best(rows, task, model, rates, first)
    return search if best is None else [*search, *(Run(task, model, seed, best["learning_rate"]) for seed in others)]


def _best(rows: Sequence[Row], task: str, model: str, rates: Sequence[str], seed: int) -> Row | None:
    """Return the best row of a model's search; None until all rates are done, and if all have diverged."""
    own = [row for row in rows_of(rows, task, model) if row["seed"] == str(seed)]
    return best_row(own) if {row["learning_rate"] for row in own}.issuperset(rates) else None


def is_guessed(row: Row) -> bool:
    """Return whether a row's far answers are hardly better than guesses."""
    return (share([row]) or 0.0) <= _guessed(row)


def _key(row: Row) -> tuple[str, ...]:
    return row["dataset"], row["model"], row["seed"], row["learning_rate"]
