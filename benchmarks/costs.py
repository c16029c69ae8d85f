"""Time and memory over the length, ours beside named peers: the panels of ``docs/figures/costs.svg``."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.ticker import LogLocator

from benchmarks.record import Row, in_fp32

RESULTS = Path("benchmarks/results")
# model of the files -> its name and colour, of Okabe and Ito's colours for the colour-blind; peers are grey
OURS = {"spade": ("SPADE", "#0072b2"), "chela": ("CHELA", "#009e73"), "bst-sh-s4": ("BST", "#d55e00")}
PEERS = {
    "t5-sdpa": "T5",
    "longt5-tglobal": "LongT5 global",
    "longt5-local": "LongT5 local",
    "led": "LED",
    "pegasus-x": "PEGASUS-X",
    "bigbird": "BigBird",
    "llama-sdpa": "Llama",
    "modernbert-local": "ModernBERT",
    "mamba2": "Mamba-2",
    "qwen3-next": "Qwen3-Next",
}
NAMES = PEERS | {model: name for model, (name, _) in OURS.items()}
COLORS = dict(OURS.values())
_GREY, _LABEL, _LEADER = "#8c959f", "#57606a", "#c9cfd6"
OUT_OF_MEMORY = "out of memory"
_LINE_HEIGHT = 0.108  # of a label, as a share of the axes' height


@dataclass(frozen=True)
class Costs:
    """A panel over the length: for each model the lengths and values, and those that end because memory does."""

    title: str
    models: Mapping[str, Sequence[tuple[int, float]]]
    out_of_memory: Sequence[str]


def costs(results: Path = RESULTS) -> list[Costs]:
    """Return time and memory of training and decoding, from the measurements on a CPU in `results`."""
    pairs = _rows(results / "models_cpu.csv")
    language = _rows(results / "language_models_cpu.csv")

    def number(column: str, factor: float = 1.0) -> Callable[[Row], float | None]:
        return lambda row: factor * float(row[column]) if row[column] else None

    def per_token(column: str) -> Callable[[Row], float | None]:
        return lambda row: 1e6 * float(row[column]) / int(row["length"]) if row[column] else None

    panels = (
        ("Training an encoder-decoder", "time per token, µs", pairs, per_token("median_s")),
        ("", "peak memory, MiB", pairs, number("peak_mib")),
        ("Training a language model, with all logits", "time per token, µs", language, per_token("step_s")),
        ("", "peak memory, MiB", language, number("peak_mib")),
        ("Decoding with a language model", "time per token, ms", language, number("token_s", 1e3)),
        ("", "cache, MiB", language, number("cache_mib")),
    )
    return [_panel(f"{task}\n{unit}", rows, value) for task, unit, rows, value in panels if rows]


def overview(results: Path = RESULTS) -> list[Costs]:
    """Return the first two rows of `costs`: time and memory of training."""
    return costs(results)[:4]


def _rows(path: Path) -> list[Row]:
    rows = in_fp32(path) if path.exists() else []
    return [row for row in rows if row["model"] in NAMES and row["outcome"] in ("ok", OUT_OF_MEMORY)]


def _panel(title: str, rows: Sequence[Row], value: Callable[[Row], float | None]) -> Costs:
    models: dict[str, list[tuple[int, float]]] = {}
    ended: dict[str, None] = {}
    for row in rows:
        name, found = NAMES[row["model"]], value(row)
        if found is not None:  # a model whose training ends at a length may still decode there
            models.setdefault(name, []).append((int(row["length"]), found))
        else:
            ended[name] = None
    return Costs(title, {name: sorted(points) for name, points in models.items()}, [*ended])


def draw_costs(axes: Axes, panel: Costs) -> None:
    """Draw a panel: lines on logarithmic scales, with their names at the right."""
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    for name, points in panel.models.items():
        ours = name in COLORS
        look = {"color": COLORS.get(name, _GREY), "linewidth": 2.6 if ours else 1.4, "zorder": 3 if ours else 2}
        axes.plot(*zip(*points, strict=True), marker="o", markersize=4.5 if ours else 0, **look)
        if name in panel.out_of_memory:
            axes.plot(*points[-1], marker="x", markersize=9, markeredgewidth=2.4, color=_LABEL, zorder=4)
    lengths = sorted({length for points in panel.models.values() for length, _ in points})
    axes.set_xticks(lengths, [f"{length // 1024}k" for length in lengths])
    axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 3.0)))
    axes.minorticks_off()
    axes.set_xlim(lengths[0] / 1.15, lengths[-1] * 1.15)
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.10g}")
    axes.grid(axis="y", linewidth=0.6)
    axes.set_xlabel("length, tokens" + ("   (×: then out of memory)" if panel.out_of_memory else ""))
    _name_lines(axes, panel)


def _name_lines(axes: Axes, panel: Costs) -> None:
    """Write each line's name at the right, at the height of its end or as near to it as the other names let it."""
    axes.set_ylim(axes.get_ylim())  # stay as they are
    to_share = axes.transScale + axes.transLimits
    ends = {name: to_share.transform(points[-1]) for name, points in panel.models.items()}
    for name, height in spread({name: y for name, (_, y) in ends.items()}, _LINE_HEIGHT).items():
        x, y = ends[name]
        leader = ([x + 0.02, 1.0, 1.06], [y, y, height])
        axes.plot(*leader, transform=axes.transAxes, clip_on=False, color=_LEADER, linewidth=0.8, zorder=1)
        color, weight = (COLORS[name], "bold") if name in COLORS else (_LABEL, "normal")
        axes.text(1.08, height, name, transform=axes.transAxes, va="center", color=color, fontweight=weight)


def spread(wanted: Mapping[str, float], distance: float) -> dict[str, float]:
    """Move heights between 0 and 1 until each two are `distance` apart, in their order and as little as possible."""
    groups: list[list[str]] = []
    for name in sorted(wanted, key=wanted.__getitem__):
        groups.append([name])
        while len(groups) > 1 and _bottom(groups[-1], wanted, distance) < (
            _bottom(groups[-2], wanted, distance) + distance * len(groups[-2])
        ):
            groups[-2:] = [groups[-2] + groups[-1]]
    return {
        name: _bottom(group, wanted, distance) + distance * place
        for group in groups
        for place, name in enumerate(group)
    }


def _bottom(group: Sequence[str], wanted: Mapping[str, float], distance: float) -> float:
    """Return the height of the lowest of names that stand one above the other around the heights they want."""
    extent = distance * (len(group) - 1)
    middle = sum(wanted[name] for name in group) / len(group)
    return max(0.0, min(middle - extent / 2, 1.0 - extent))
