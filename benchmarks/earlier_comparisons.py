"""The tables of comparisons that were made at one learning rate for each model, without searching for it."""

import statistics

from benchmarks.comparison import TITLES
from benchmarks.record import Row, markdown_table

# fmt: off
COLUMNS = (
    "date", "cpu", "python", "torch", "transformers", "hf_hybrid", "dataset", "model", "seed",
    "parameters", "steps", "cpu_minutes",
)
# fmt: on


def report(rows: list[Row]) -> str:
    """Return the table of a run as Markdown: the mean over the seeds, and behind it each seed's value."""
    first = rows[-1]
    scores = [name for name in first if name not in COLUMNS]
    versions = ", ".join(f"{name} {first[name]}" for name in ("torch", "transformers", "hf_hybrid"))
    counts = sorted({row["steps"] for row in rows if row["steps"]})
    own = ["steps"] if len(counts) > 1 else []
    lines = []
    for model in dict.fromkeys(row["model"] for row in rows):
        runs = [row for row in rows if row["model"] == model]
        parameters = f"{int(runs[0]['parameters']):,}" if runs[0]["parameters"] else ""
        columns = (_mean(runs, name) for name in ("cpu_minutes", *scores))
        lines.append([model, parameters, *(runs[0][name] for name in own), *columns])
    names = [TITLES.get(name, name.removeprefix("eval_").replace("_", " ")) for name in scores]
    steps = "" if own else f"{counts[0]} steps, "
    seeds = ", ".join(dict.fromkeys(row["seed"] for row in rows if row["seed"]))
    return (
        f"{first['date']}, {first['cpu']}, one thread; {versions}. {first['dataset']}, {steps}seeds {seeds}"
        f"{': the mean, and each value' if ',' in seeds else ''}.\n\n"
        + markdown_table(["model", "parameters", *own, "CPU minutes", *names], lines)
    )


def _mean(runs: list[Row], name: str) -> str:
    values = [row[name] for row in runs if row[name]]
    if len(values) < 2:
        return "".join(values)
    digits = len(values[0].partition(".")[2])
    return f"{statistics.fmean(map(float, values)):.{digits}f} ({', '.join(values)})"
