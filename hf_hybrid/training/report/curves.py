"""Draw curves over the steps from a trainer's log: as a picture, and as SVG inside a page."""

import io
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from matplotlib.axes import Axes  # the functions import matplotlib: it takes half a second

_MOST = 400
"""With more points, draw means of neighbours in a band from their minimum to their maximum."""
_FEW = 30
"""With fewer points, mark each."""
_COLORS = ("#1f6fb4", "#c4520c", "#2e7d32", "#8e44ad")
_INK, _GRID = "#24292f", "#c9cfd6"
STYLE: Any = {
    "font.size": 11,
    "axes.edgecolor": _INK,
    "axes.labelcolor": _INK,
    "text.color": _INK,
    "xtick.color": _INK,
    "ytick.color": _INK,
    "grid.color": _GRID,
    "legend.framealpha": 0.0,
    "svg.fonttype": "none",
    "svg.hashsalt": "curves",  # the same curves give the same drawing
}
"""Matplotlib's settings for all drawings of this project."""
_PAGE_COLORS = {_INK: "currentColor", _GRID: "var(--line)"} | {
    color: f"var(--series-{number})" for number, color in enumerate(_COLORS, start=1)
}


@dataclass(frozen=True)
class Panel:
    """One diagram over the steps.

    Attributes:
        title: What it shows, with the unit.
        series: Step and value of each point, by the name of the curve.
        left_out: The number of values that are not finite, which cannot be drawn.
    """

    title: str
    series: Mapping[str, Sequence[tuple[int, float]]]
    left_out: int = 0


def find_panels(history: Sequence[Mapping[str, Any]], wanted: Mapping[str, Mapping[str, str]]) -> list[Panel]:
    """Find curves in a trainer's log.

    `wanted` maps each diagram's title to its logged keys, and these to the names of their curves.

    Returns:
        The diagrams with at least one curve.
    """
    panels = []
    for title, curves in wanted.items():
        series, left_out = {}, 0
        for key, name in curves.items():
            points: dict[int, float] = {}
            for entry in history:
                if isinstance(entry.get(key), int | float):
                    # a second split is logged later, under the same name
                    points.setdefault(entry["step"], float(entry[key]))
            finite = [(step, value) for step, value in sorted(points.items()) if math.isfinite(value)]
            left_out += len(points) - len(finite)
            if finite:
                series[name] = finite
        if series:
            panels.append(Panel(title, series, left_out))
    return panels


def describe(panel: Panel) -> str:
    """Describe in words where each curve begins and ends, for readers who cannot see it."""
    parts = []
    for name, points in panel.series.items():
        (first, begin), (last, end) = points[0], points[-1]
        words = f"{begin:.4g} at step {first}" + (f", {end:.4g} at step {last}" if last != first else "")
        parts.append(words if len(panel.series) == 1 else f"{name} {words}")
    return f"{panel.title}: {'; '.join(parts)}."


def draw_picture(panels: Sequence[Panel], path: Path) -> None:
    """Draw the diagrams into a PNG, two in a row."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    columns = min(2, len(panels))
    rows = math.ceil(len(panels) / columns)
    with rc_context(STYLE):
        figure = Figure(figsize=(5 * columns, 3.4 * rows), layout="constrained", facecolor="white")
        for axes, panel in zip(figure.subplots(rows, columns, squeeze=False).flat, panels, strict=False):
            _draw(axes, panel)
        for axes in figure.axes[len(panels) :]:
            axes.remove()
        figure.savefig(path, dpi=120, format="png")


def draw_svg(panel: Panel, prefix: str) -> str:
    """Draw a diagram as an ``svg`` element that takes its colours and its font from the page.

    `prefix` makes the names of its parts unique in the page.
    """
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    buffer = io.StringIO()
    with rc_context(STYLE):
        figure = Figure(figsize=(4.4, 2.8), layout="constrained")
        figure.patch.set_alpha(0.0)
        axes = figure.subplots()
        axes.patch.set_alpha(0.0)
        _draw(axes, panel)
        figure.savefig(buffer, format="svg", metadata=dict.fromkeys(("Creator", "Date", "Format", "Type")))
    svg = re.sub(r"<!--.*?-->|<style.*?</style>", "", buffer.getvalue().partition("<svg")[2], flags=re.DOTALL)
    svg = re.sub(r'\b(id="|xlink:href="#|url\(#)', rf"\g<1>{prefix}-", svg)
    svg = re.sub(r'\s(?:width|height)="[\d.]+pt"|\sxmlns(?::\w+)?="[^"]*"', "", svg).replace("xlink:href", "href")
    svg = re.sub("|".join(_PAGE_COLORS), lambda match: _PAGE_COLORS[match[0]], svg)
    return f'<svg role="img" aria-labelledby="{prefix}-alt"{svg}'


def _draw(axes: "Axes", panel: Panel) -> None:
    from matplotlib.ticker import MaxNLocator

    for (name, points), color in zip(panel.series.items(), _COLORS * len(panel.series), strict=False):
        steps, values = np.array(points, dtype=float).T
        if len(points) > _MOST:
            groups = np.array_split(values, _MOST)
            steps = np.array([group.mean() for group in np.array_split(steps, _MOST)])
            lows, highs = ([bound(group) for group in groups] for bound in (np.min, np.max))
            axes.fill_between(steps, lows, highs, color=color, alpha=0.2, linewidth=0)
            values = np.array([group.mean() for group in groups])
        axes.plot(steps, values, color=color, marker="." if len(points) < _FEW else None, label=name, linewidth=1.4)
    axes.set_title(panel.title, fontsize="medium", loc="left", parse_math=False)
    axes.set_xlabel("step")
    axes.set_xlim(left=0)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True))
    axes.grid(linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    if len(panel.series) > 1:
        axes.legend(fontsize="small")
