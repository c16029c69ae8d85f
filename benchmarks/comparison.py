"""Results of `compare_on_data`: rows, each model's best learning rate, tables, and comparisons of two models.

A row is one trained model. The first score of a file chooses the learning rate, with the seed of the model's first
row; the other seeds train at the best rate.
"""

import csv
import io
import math
import re
import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from scipy.stats import ttest_ind

from benchmarks.record import OutputError, Row, markdown_table, measured_on, only_process
from hf_hybrid.version import __version__

# fmt: off
COLUMNS = (
    "date", "cpu", "python", "torch", "transformers", "hf_hybrid", "dataset", "model", "seed", "learning_rate",
    "recipe", "outcome", "parameters", "steps", "cpu_minutes",
)
# fmt: on
CURVE_COLUMNS = ("model", "seed", "learning_rate", "recipe", "step", "train_loss", "eval_loss")
_HIGHER_IS_BETTER = re.compile(r"accuracy|rouge|f1|matthews|pearson|spearman|combined_score")
_LOWER_IS_BETTER = re.compile(r"loss|perplexity|bits_per_byte|mse")
_CHANCE = 0.05
"""Significance level: two models differ if equal models would differ as much with a lower probability than this."""
TITLES = {
    "eval_loss": "validation loss",
    "eval_rouge1": "ROUGE-1",
    "eval_rouge2": "ROUGE-2",
    "eval_rougeL": "ROUGE-L",
    "eval_gen_len": "length (tokens)",
    "predict_accuracy": "test accuracy",
    "peak_mib": "peak memory (MiB)",
}
_DIGITS = {"loss": 4, "bits": 4, "accuracy": 3, "matthews": 3, "f1": 3}


# ---- files ----


def read_rows(path: Path, columns: Sequence[str]) -> list[Row]:
    """Read a file without its last line if that is incomplete.

    Raises:
        ValueError: The file has other columns.
    """
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    lines = io.StringIO(text[: text.rfind("\n") + 1])
    reader = csv.DictReader(lines)
    if reader.fieldnames is not None and tuple(reader.fieldnames) != tuple(columns):
        raise ValueError(f"{path} must have the columns {', '.join(columns)}; it has {', '.join(reader.fieldnames)}")
    return list(reader)


def append_rows(path: Path, columns: Sequence[str], rows: Sequence[dict[str, Any]]) -> None:
    """Append rows in one write, replacing an incomplete last line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = io.StringIO()
    writer = csv.DictWriter(lines, columns, lineterminator="\n")
    with open(path, "a+b") as file:
        file.seek(0)
        whole = file.read().rfind(b"\n") + 1
        file.truncate(whole)
        if not whole:
            writer.writeheader()
        writer.writerows(rows)
        file.write(lines.getvalue().encode())


@contextmanager
def adding_rows(path: Path, columns: Sequence[str]) -> Iterator[None]:
    """Hold a file's lock, since two processes would add the same rows, and write its columns before the work begins.

    Raises:
        ValueError: The file has other columns.
        OutputError: It cannot be written, or another process holds its lock.
    """
    with only_process(path.with_name(path.name + ".lock"), str(path)):
        try:
            read_rows(path, columns)
            append_rows(path, columns, [])
        except OSError as error:
            raise OutputError(f"{path} must be a file that can be written ({error.strerror})") from error
        yield


def check_recipe(path: Path, rows: Sequence[Row], model: str, recipe: str, *, where: str) -> None:
    """Refuse a model's rows of another recipe.

    Args:
        path: Their file.
        rows: Rows, also of other models.
        model: The model.
        recipe: Its present recipe.
        where: The experiment or task.

    Raises:
        ValueError: There are some.
    """
    others = [row for row in rows if row["model"] == model and row["recipe"] != recipe]
    if others:
        listed = "; ".join(f"seed {row['seed']} at {row['learning_rate']} (recipe {row['recipe']})" for row in others)
        raise ValueError(
            f"{path}: rows of {model!r} have another recipe than {recipe}, the present one of {where}: {listed}. "
            "Delete these rows, or write another file"
        )


def check_version(path: Path, rows: Sequence[Row], model: str) -> None:
    """Refuse a model's rows of another version of this package, because a recipe does not contain defaults.

    Raises:
        ValueError: There are some.
    """
    others = {row["hf_hybrid"] for row in rows if row["model"] == model} - {__version__}
    if others:
        raise ValueError(
            f"{path}: rows of {model!r} come from version {', '.join(sorted(others))}, and this is {__version__}. "
            "Delete these rows, or continue with that version"
        )


# ---- the best learning rate ----


def is_better(score: str) -> Callable[[float, float], bool]:
    """Return the comparison of two values of a score.

    Raises:
        ValueError: It is unknown whether higher or lower is better.
    """
    if _HIGHER_IS_BETTER.search(score):
        return lambda value, other: value > other
    if _LOWER_IS_BETTER.search(score):
        return lambda value, other: value < other
    raise ValueError(f"score {score!r} must be one that is known to be better when higher or lower")


def score_names(rows: Sequence[Row]) -> list[str]:
    """Return the scores of a file, first the one that chooses the learning rate."""
    return [name for name in rows[0] if name not in COLUMNS]


def searched(rows: Sequence[Row], model: str) -> list[Row]:
    """Return a model's rows with the seed of its first row, sorted by learning rate."""
    own = [row for row in rows if row["model"] == model]
    return sorted((row for row in own if row["seed"] == own[0]["seed"]), key=lambda row: float(row["learning_rate"]))


def best_rate(rows: Sequence[Row], model: str, score: str) -> str | None:
    """Return the learning rate of the best searched row; None if no score is finite."""
    better, best = is_better(score), None
    for row in searched(rows, model):
        value = _number(row[score])
        if math.isfinite(value) and (best is None or better(value, _number(best[score]))):
            best = row
    return None if best is None else best["learning_rate"]


def runs_at_best_rate(rows: Sequence[Row], model: str) -> list[Row]:
    """Return a model's finished rows at its best learning rate, one per seed.

    Raises:
        ValueError: The rows were not made in the same way.
    """
    rate = best_rate(rows, model, score_names(rows)[0])
    own = [row for row in rows if row["model"] == model and row["outcome"] == "ok"]
    for column in ("recipe", "parameters", "steps"):
        if len(found := sorted({row[column] for row in own})) > 1:
            raise ValueError(f"model {model!r}: its rows must have one value of {column}; got {', '.join(found)}")
    return list({row["seed"]: row for row in own if row["learning_rate"] == rate}.values())


def _number(text: str) -> float:
    return float(text) if text else math.nan


# ---- tables ----


def report(rows: Sequence[Row]) -> str:
    """Return a file's tables as Markdown: each model at its best learning rate, and the searched rates."""
    scores = score_names(rows)
    trained = [row for row in rows if row["seed"]]
    models = list(dict.fromkeys(row["model"] for row in trained))
    runs = {model: runs_at_best_rate(rows, model) for model in models}
    most = max(map(len, runs.values()), default=0)
    steps = sorted({row["steps"] for row in trained if row["steps"]}, key=int)
    own_steps = ["steps"] if len(steps) > 1 else []
    seeds = "one seed" if most == 1 else f"{most} seeds: mean ± standard error"
    caption = (
        f"{measured_on(rows)}. {rows[0]['dataset']}, {'' if own_steps or not steps else f'{steps[0]} steps, '}{seeds}."
        " CPU minutes are those of a run's training steps."
    )
    header = ["model", "parameters", *own_steps, "learning rate", "CPU minutes", *map(title, scores)]
    plain = [row for row in rows if not row["seed"]]
    lines = [
        [row["model"], "", *("" for _ in own_steps), "", "", *(shown(row[name], name) for name in scores)]
        for row in plain
    ]
    for model in models:
        lines.append(_line(model, runs[model], scores, most, own_steps))
    table = markdown_table(header, lines)
    return "\n\n".join([caption, table, *_searched_rates(rows, models, scores[0])])


def _line(model: str, runs: Sequence[Row], scores: Sequence[str], most: int, own_steps: list[str]) -> list[str]:
    if not runs:
        return [model, "", *("" for _ in own_steps), "", "", *("diverged" for _ in scores)]
    first = runs[0]
    minutes = statistics.fmean(_number(row["cpu_minutes"]) for row in runs)
    return [
        model + (f" (n={len(runs)})" if len(runs) < most else ""),
        f"{int(first['parameters']):,}",
        *(first[name] for name in own_steps),
        first["learning_rate"],
        "" if math.isnan(minutes) else f"{minutes:.1f}",
        *(mean_and_error([_number(row[name]) for row in runs], name) for name in scores),
    ]


def _searched_rates(rows: Sequence[Row], models: Sequence[str], score: str) -> list[str]:
    found = {model: {row["learning_rate"]: row for row in searched(rows, model)} for model in models}
    found = {model: of for model, of in found.items() if len(of) > 1}
    if not found:
        return []
    rates = sorted({rate for of in found.values() for rate in of}, key=float)
    lines = []
    for model, of in found.items():
        best = best_rate(rows, model, score)
        cells = []
        for rate in rates:
            row = of.get(rate)
            text = "" if row is None else shown(row[score], score) if row["outcome"] == "ok" else row["outcome"]
            cells.append(f"**{text}**" if rate == best else text)
        lines.append([model, *cells])
    seed = next(iter(next(iter(found.values())).values()))["seed"]
    caption = f"The searched learning rates: {title(score)} with seed {seed}, the best in bold."
    return [caption, markdown_table(["model", *rates], lines)]


def title(score: str) -> str:
    """Return a score's name in tables."""
    return TITLES.get(score, score.removeprefix("eval_").replace("_", " "))


def shown(value: str, score: str) -> str:
    """Format a value of a score."""
    return f"{_number(value):.{_digits(score)}f}" if value else ""


def mean_and_error(values: Sequence[float], score: str) -> str:
    """Format the mean of runs, with its standard error if there are several."""
    mean, error = mean_and_standard_error(values)
    digits = _digits(score)
    return f"{mean:.{digits}f}" + (f" ± {error:.{digits}f}" if len(values) > 1 else "")


def _digits(score: str) -> int:
    return next((digits for part, digits in _DIGITS.items() if part in score), 2)


def mean_and_standard_error(values: Sequence[float]) -> tuple[float, float]:
    """Return mean and standard error; NaN for the error of a single value."""
    mean, count = statistics.fmean(values), len(values)
    # `statistics.stdev` does not handle NaN
    error = math.sqrt(sum((x - mean) ** 2 for x in values) / (count - 1) / count) if count > 1 else math.nan
    return mean, error


# ---- comparisons ----


class Lead(NamedTuple):
    """The lead of one model over another by a score; negative if it is worse.

    Attributes:
        by: Difference of the means over the seeds.
        error: Its standard error; NaN if a model has one seed.
        chance: Probability that equal models differ as much, by Welch's t-test; NaN if unknown.
    """

    by: float
    error: float
    chance: float


def lead(rows: Sequence[Row], first: str, second: str, score: str) -> Lead | None:
    """Return the lead of one model over another, each at its best rate; None if a seed lacks a score.

    Raises:
        ValueError: The model or score does not exist.
    """
    known = {"model": {row["model"] for row in rows}, "score": set(score_names(rows))}
    for kind, name in (("model", first), ("model", second), ("score", score)):
        if name not in known[kind]:
            raise ValueError(f"{kind} {name!r} must be one of {', '.join(sorted(known[kind]))}")
    values = []
    for model in (first, second):
        rate = best_rate(rows, model, score_names(rows)[0])
        ended = {row["seed"] for row in rows if row["model"] == model and row["learning_rate"] == rate}
        values.append([_number(row[score]) for row in runs_at_best_rate(rows, model)])
        if not ended or len(values[-1]) < len(ended) or not all(map(math.isfinite, values[-1])):
            return None
    (mean, error), (other, other_error) = map(mean_and_standard_error, values)
    by, error = abs(mean - other), math.hypot(error, other_error)
    chance = math.nan
    if error > 0:  # equal numbers for all seeds say nothing about other seeds
        chance = float(ttest_ind(*values, equal_var=False).pvalue)
    return Lead(by if is_better(score)(mean, other) else -by, error, chance)


def compare(rows: Sequence[Row], first: str, second: str, score: str) -> str:
    """Say which of two models is better, by how much, and whether that exceeds the differences of their seeds.

    Raises:
        ValueError: The model or score does not exist.
    """
    if (found := lead(rows, first, second, score)) is None:
        return f"{first} and {second} cannot be compared: one of them diverged"
    ahead, behind = (first, second) if found.by > 0 else (second, first)
    digits, difference = _digits(score), abs(found.by)
    if math.isnan(found.chance):
        means = (f"{model} has {_shown_mean(rows, model, score)}" for model in (first, second))
        return f"{', '.join(means)}: the seeds do not tell which is ahead"
    count = difference / found.error
    text = f"{difference:.{digits}f} ± {found.error:.{digits}f} ({count:.1f} standard errors)"
    if found.chance > _CHANCE:
        return f"{first} and {second} are not told apart: {ahead} is ahead by {text}"
    return f"{ahead} is ahead of {behind} by {text}"


def _shown_mean(rows: Sequence[Row], model: str, score: str) -> str:
    return mean_and_error([_number(row[score]) for row in runs_at_best_rate(rows, model)], score)


def ahead_by(rows: Sequence[Row], first: str, second: str, score: str) -> str:
    """Say in numbers by how much the first of two models is better; with a minus it is worse.

    Raises:
        ValueError: The model or score does not exist.
    """
    if (found := lead(rows, first, second, score)) is None:
        return "diverged"
    digits = _digits(score)
    return f"{found.by:+.{digits}f}".replace("-", "−") + f" ± {found.error:.{digits}f}"


def verdict(rows: Sequence[Row], first: str, second: str, score: str) -> str:
    """Judge the claim that the first of two models is better: shown, contradicted, or neither.

    Raises:
        ValueError: The model or score does not exist.
    """
    found = lead(rows, first, second, score)
    if found is None or not found.chance <= _CHANCE:
        return "not shown at this size"
    return "shown" if found.by > 0 else "contradicted at this size"
