"""Draw the results of the benchmarks: ``docs/figures/learning.svg``, ``defaults``, ``costs``, ``cost``, ``recall...``.

Run it from the repository root after a new measurement::

    python -m benchmarks.figures

- ``defaults``: from ``benchmarks/results/defaults*.csv``, whose models are called "ARCHITECTURE, KIND: CELL". A panel
  for each architecture and kind; a bar for each cell extends from the panel's first cell, the baseline, to the cell's
  first score.
- ``learning``: a panel for each file in ``benchmarks/results/curves`` but those of ``defaults``, with the validation
  loss over the steps of each model at its best learning rate: the mean of its seeds, and a band from the least to the
  greatest. A model that others start from, which is trained longer, is left out.
- ``costs``: from the measurements on a CPU, see `costs`; ``cost`` has its first two rows, for the README.
- ``recall``: from ``benchmarks/results/recall.csv``, a panel for each architecture: the accuracy over the distance of
  the answer, with and without its global part; ``recall_states``: a panel for each task that was done with several
  sizes of a state, the accuracy over how much a model keeps of a sequence.

A drawing contains a hash of its data, by which a test checks that it is current. With the same matplotlib, the same
files give the same bytes.
"""

import hashlib
import io
import math
import re
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, dataclass
from itertools import cycle
from pathlib import Path
from typing import Any

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from benchmarks.comparison import (
    CURVE_COLUMNS,
    mean_and_standard_error,
    read_rows,
    runs_at_best_rate,
    score_names,
    title,
)
from benchmarks.costs import Costs, costs, draw_costs, overview
from benchmarks.recall_figure import Recall, States, draw_recall, draw_states, recall, states
from benchmarks.record import Row, read_csv
from hf_hybrid.training.report.curves import STYLE

RESULTS = Path("benchmarks/results")
FIGURES = Path("docs/figures")
# Okabe and Ito's colours for the colour-blind, without yellow, which is hard to see on white
_COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#000000")
_LINES = ("-", "--", ":")
_MOVED, _BASE = "#0072b2", "#7f7f7f"
_STYLE = STYLE | {"font.size": 10, "svg.hashsalt": "figures"}


@dataclass(frozen=True)
class Curves:
    """A panel: for each model the steps, with the mean, least and greatest loss of its seeds."""

    title: str
    models: Mapping[str, Sequence[tuple[int, float, float, float]]]


@dataclass(frozen=True)
class Bars:
    """A panel: for each cell the mean over the seeds and its standard error."""

    title: str
    score: str
    cells: Mapping[str, tuple[float, float]]


# ---- data ----


def learning(results: Path = RESULTS) -> list[Curves]:
    """Return the validation losses over the steps, by experiment."""
    panels = []
    for path in sorted((results / "curves").glob("*.csv")):
        if path.stem.startswith("defaults"):
            continue
        rows, models = read_csv(results / path.name), {}
        losses: dict[tuple[str, ...], dict[int, float]] = {}
        for point in read_rows(path, CURVE_COLUMNS):
            if point["eval_loss"]:
                losses.setdefault(_run(point), {})[int(point["step"])] = float(point["eval_loss"])
        steps = statistics.mode(row["steps"] for row in rows if row["steps"])
        for model in dict.fromkeys(row["model"] for row in rows if row["steps"] == steps):
            runs = [losses[_run(row)] for row in runs_at_best_rate(rows, model)]
            shared = sorted(set.intersection(*map(set, runs))) if runs else []
            points = [(step, [run[step] for run in runs]) for step in shared]
            if points:
                models[model] = [(step, statistics.fmean(seen), min(seen), max(seen)) for step, seen in points]
        names = dict.fromkeys((path.stem, rows[0]["dataset"]))
        panels.append(Curves(" on ".join(names).replace("_", " "), models))
    return panels


def _run(row: Row) -> tuple[str, ...]:
    return tuple(row[name] for name in ("model", "seed", "learning_rate", "recipe"))


def defaults(results: Path = RESULTS) -> list[Bars]:
    """Return the first score of each architecture and kind, by cell.

    Raises:
        ValueError: A model's name has another form.
    """
    panels: dict[tuple[str, str], dict[str, tuple[float, float]]] = {}
    for path in sorted(results.glob("defaults*.csv")):
        rows = read_csv(path)
        score = score_names(rows)[0]
        for model in dict.fromkeys(row["model"] for row in rows if row["seed"]):
            match = re.fullmatch(r"(?P<panel>[^:]+, [^:]+): (?P<cell>.+)", model)
            if match is None:
                raise ValueError(f"{path}: a model must be called 'ARCHITECTURE, KIND: CELL'; got {model!r}")
            values = [float(row[score]) for row in runs_at_best_rate(rows, model)]
            if values:
                mean, error = mean_and_standard_error(values)
                cells = panels.setdefault((match["panel"], title(score)), {})
                cells[match["cell"]] = (mean, error if len(values) > 1 else 0.0)
    return [Bars(name, score, cells) for (name, score), cells in panels.items()]


SHOWN = {
    "learning": learning,
    "defaults": defaults,
    "costs": costs,
    "cost": overview,
    "recall": recall,
    "recall_states": states,
}


def digest(panels: Sequence[Curves | Bars | Costs | Recall | States]) -> str:
    """Return a hash of the data."""
    return hashlib.sha256(repr([astuple(panel) for panel in panels]).encode()).hexdigest()[:16]


# ---- drawing ----


def draw(
    panels: Sequence[Curves] | Sequence[Bars] | Sequence[Costs] | Sequence[Recall] | Sequence[States],
) -> str:
    """Draw panels, two in a row, as an SVG on white."""
    columns = min(2, len(panels))
    rows = math.ceil(len(panels) / columns)
    draw_panel, width, height, style = _form(panels)
    buffer = io.StringIO()
    with rc_context(_STYLE | style):
        figure = Figure(figsize=(width * columns, height * rows), layout="constrained", facecolor="white")
        figure.get_layout_engine().set(w_pad=0.15, h_pad=0.1)
        places = figure.subplots(rows, columns, squeeze=False).flat
        for axes, panel in zip(places, panels, strict=False):
            draw_panel(axes, panel)
            axes.set_title(panel.title, loc="left", parse_math=False)
            axes.spines[["top", "right"]].set_visible(False)
        for axes in figure.axes[len(panels) :]:
            axes.remove()
        figure.savefig(buffer, format="svg", metadata=dict.fromkeys(("Creator", "Date", "Format", "Type")))
    svg = re.sub(r"[ \t]+$", "", buffer.getvalue(), flags=re.MULTILINE)
    return f"{svg.rstrip()}\n<!-- shows {digest(panels)} -->\n"


def _form(panels: Sequence[Any]) -> tuple[Callable[[Axes, Any], None], float, float, dict[str, float]]:
    """Return what draws such panels, their width and height in inches, and settings of matplotlib."""
    if isinstance(panels[0], Curves):
        return _draw_curves, 5.2, 3.2 + 0.19 * max(len(panel.models) for panel in panels), {}
    if isinstance(panels[0], Bars):
        return _draw_bars, 6.8, 1.1 + 0.34 * max(len(panel.cells) for panel in panels), {}
    if isinstance(panels[0], Recall):
        lines = 4 + max(len(panel.tasks) + len(panel.notes) for panel in panels)
        return draw_recall, 5.2, 3.2 + 0.19 * lines, {}
    if isinstance(panels[0], States):
        return draw_states, 5.2, 3.2 + 0.19 * (2 + max(len(panel.models) for panel in panels)), {}
    return draw_costs, 4.2, 2.75, {"font.size": 12, "axes.titlesize": 12}


def _draw_curves(axes: Axes, panel: Curves) -> None:
    styles = cycle([(color, line) for line in _LINES for color in _COLORS])
    ends = []
    for (model, points), (color, line) in zip(panel.models.items(), styles, strict=False):
        steps, means, lows, highs = zip(*points, strict=True)
        axes.fill_between(steps, lows, highs, color=color, alpha=0.15, linewidth=0)
        axes.plot(steps, means, color=color, linestyle=line, linewidth=1.5, label=f"{model}: {means[-1]:.3f}")
        ends += [means[-1], means[min(1, len(means) - 1)]]
    if ends:  # the first steps, equal for all, would compress the differences
        margin = 0.05 * (max(ends) - min(ends) or 1.0)
        axes.set_ylim(min(ends) - margin, max(ends) + margin)
    axes.set_xlabel("step")
    axes.set_ylabel("validation loss (nats)")
    axes.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True))
    axes.grid(linewidth=0.6)
    axes.legend(fontsize="small", frameon=False, loc="upper left", bbox_to_anchor=(-0.02, -0.16), borderaxespad=0)


def _draw_bars(axes: Axes, panel: Bars) -> None:
    names, places = list(panel.cells), range(len(panel.cells))
    means, errors = zip(*panel.cells.values(), strict=True)
    base = means[0]
    axes.barh(places, [mean - base for mean in means], left=base, height=0.55, color=_MOVED, alpha=0.35)
    colors = [_BASE, *[_MOVED] * (len(names) - 1)]
    for place, mean, error, color in zip(places, means, errors, colors, strict=True):
        axes.errorbar(mean, place, xerr=error, fmt="o", markersize=4, color=color, capsize=3, linewidth=1.3)
        text = f"{mean:.3f}" + (f" ± {error:.3f}" if error else "")
        axes.annotate(text, (1.02, place), xycoords=("axes fraction", "data"), va="center", fontsize="small")
    axes.axvline(base, color=_BASE, linewidth=1)
    axes.set_yticks(places, names)
    axes.invert_yaxis()
    axes.margins(x=0.1)
    axes.set_xlabel(panel.score)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=5))
    axes.grid(axis="x", linewidth=0.6)


def main() -> int:
    """Write the drawings that have data."""
    for name, panels in ((name, shown()) for name, shown in SHOWN.items()):
        if panels:
            FIGURES.mkdir(parents=True, exist_ok=True)
            (FIGURES / f"{name}.svg").write_text(draw(panels), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
