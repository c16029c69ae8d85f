"""What each architecture remembers: the panels of ``docs/figures/recall.svg`` and ``docs/figures/recall_states.svg``.

The first has a panel for each architecture, with and without its global part; the second one for each task that is
done with states of several sizes.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from textwrap import wrap

from matplotlib.axes import Axes
from matplotlib.ticker import StrMethodFormatter

from benchmarks.recall_models import MODELS, ablation_reach, state_numbers
from benchmarks.recall_order import has_diverged, kept, mean_of, share
from benchmarks.recall_run import BINS, LEARNT, RECIPES, STATE_TASKS, is_done_by, shape_of
from benchmarks.record import Row, read_csv
from hf_hybrid.data.recall import RECALL

RESULTS = Path("benchmarks/results")
UNLEARNT = "not learnt"
_LINE = 60
_GREY = "#8c959f"
# a task's colour, of Okabe and Ito's colours for the colour-blind, and three of Tol's
TASKS = {
    "aggregate": "#0072b2",
    "majority": "#56b4e9",
    "latch": "#009e73",
    "copying": "#332288",
    "key_value": "#d55e00",
    "mqar": "#cc79a7",
    "needle": "#e69f00",
    "in_context_recall": "#000000",
    "noisy_recall": "#882255",
    "selective_copying": "#999933",
    "few_facts": "#009e73",
    "facts": "#0072b2",
    "sparse_facts": "#d55e00",
    "votes": "#cc79a7",
}


@dataclass(frozen=True)
class Recall:
    """A panel: for each task and model the distances and accuracies, beside what guessing gives.

    Attributes:
        title: The architecture.
        unit: What distances count.
        tasks: Task → model → least distance of each bin, and accuracy there.
        chances: Task → accuracy of a guess.
        trained: Task → length of its training sequences, or number of segments.
        reach: How far the model without its global part reaches; None where that is nearer than all distances.
        missing: Why a curve is missing or says little → tasks, or tasks with the name of the model without its global
            part: "not learnt", "diverged", "1 of 3 seeds diverged" or "not done".
    """

    title: str
    unit: str
    tasks: Mapping[str, Mapping[str, Sequence[tuple[int, float]]]]
    chances: Mapping[str, float]
    trained: Mapping[str, int]
    reach: int | None
    missing: Mapping[str, Sequence[str]]

    @property
    def notes(self) -> list[str]:
        """The lines that say what is missing."""
        return [line for why, names in self.missing.items() for line in wrap(f"{why}: {'; '.join(names)}", _LINE)]


def recall(results: Path = RESULTS) -> list[Recall]:
    """Return a panel for each architecture that was measured, also without its ablation; none without measurements.

    Own tasks are drawn whether they are learnt or not, published ones if the model or its ablation has learnt them.
    """
    path = results / "recall.csv"
    rows = read_csv(path) if path.exists() else []
    panels = []
    for ablation, kind in MODELS.items():
        if kind.ablation_of and any(row["model"] in (kind.ablation_of, ablation) for row in rows):
            panels.append(_panel(rows, kind.ablation_of, ablation))
    return panels


def _panel(rows: Sequence[Row], title: str, ablation: str) -> Recall:
    tasks, chances, trained = {}, {}, {}
    missing: dict[str, list[str]] = {}
    for task in (task for task in TASKS if is_done_by(task, title)):
        runs = {model: kept(rows, task, model) for model in (title, ablation)}
        found = {model: _missing(own) for model, own in runs.items()}
        for model, why in found.items():
            if why is not None and (model == title or why != UNLEARNT):
                missing.setdefault(why, []).append(_label(task, model, title))
            diverged = sum(map(has_diverged, runs[model]))
            if 0 < diverged < len(runs[model]):
                why = f"{diverged} of {len(runs[model])} seeds diverged"
                missing.setdefault(why, []).append(_label(task, model, title))
        curves = {model: points for model, own in runs.items() if (points := _points(own))}
        if curves and (RECIPES[task].is_own or None in found.values()):
            tasks[task] = curves
            chances[task] = mean_of([row for own in runs.values() for row in own], "chance") or 0.0
            trained[task] = RECALL[task].length // RECIPES[task].sizes.get("segment_size", 1)
    unit = "segments" if MODELS[title].is_encoder_decoder else "tokens"
    return Recall(title, unit, tasks, chances, trained, ablation_reach(ablation), missing)


def _points(rows: Sequence[Row]) -> list[tuple[int, float]]:
    found = [(least, mean_of(rows, f"at_{least}")) for least in BINS]
    return [(least, value) for least, value in found if value is not None]


def _missing(rows: Sequence[Row]) -> str | None:
    """Return why a model's curve is missing or says little; None if it has learnt the task."""
    if not rows:
        return "not done"
    if all(map(has_diverged, rows)):
        return "diverged"
    return UNLEARNT if (share(rows) or 0.0) <= LEARNT else None


def _label(task: str, model: str, title: str) -> str:
    return task if model == title else f"{task}, {model.partition(', ')[2]}"


def draw_recall(axes: Axes, panel: Recall) -> None:
    """Draw a panel: solid lines with the global part, dashed ones without it, dots for guessing.

    Distances that training has are filled, those of longer tests hollow; a vertical line is the ablation's reach. The
    legend also names what was not learnt, diverged or was not done.
    """
    for task, models in panel.tasks.items():
        style = {"color": TASKS[task], "marker": "o", "markersize": 4}
        for model, points in models.items():
            distances, accuracies = zip(*points, strict=True)
            line, name = ("-", task) if model == panel.title else ("--", None)
            filled = [place for place, distance in enumerate(distances) if distance < panel.trained[task]]
            axes.plot(distances, accuracies, line, **style, markerfacecolor="white", label=name)
            axes.plot(distances, accuracies, " ", **style, markevery=filled)
        axes.axhline(panel.chances[task], color=TASKS[task], linestyle=":", linewidth=0.8)
    axes.plot([], [], "--", color=_GREY, label="the same without the global part")
    axes.plot([], [], " ", color=_GREY, marker="o", markersize=4, markerfacecolor="white", label="beyond training")
    axes.plot([], [], ":", color=_GREY, label="guessing")
    if panel.reach is not None:
        axes.axvline(panel.reach, color=_GREY, linewidth=0.8, label="how far it reaches without the global part")
    for line in panel.notes:
        axes.plot([], [], " ", label=line)
    has_zero = panel.unit == "segments"  # the one that is read
    _scale(axes, f"distance of the answer, {panel.unit}", "share of right answers", has_zero)


def _scale(axes: Axes, distance: str, share: str, has_zero: bool = False) -> None:
    """Scale and name the axes of shares over something that grows in powers of two, if it has a zero from one on."""
    if has_zero:
        axes.set_xscale("symlog", base=2, linthresh=1)
    else:
        axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:,g}"))
    axes.set_ylim(-0.03, 1.03)
    axes.set_xlabel(distance)
    axes.set_ylabel(share)
    axes.legend(fontsize="small", frameon=False, loc="upper left", bbox_to_anchor=(-0.02, -0.18), borderaxespad=0)


@dataclass(frozen=True)
class States:
    """A panel of accuracies over the size of what a model keeps of a sequence.

    Attributes:
        title: The task.
        models: Architecture → numbers that it keeps of a sequence, and share of right far answers, sorted; several
            points if it was measured with several sizes of its state.
        seeds: The same of every single seed.
        chance: Accuracy of a guess.
        without_keys: That of a model that says the likeliest of the values told; None if the task has no keys.
    """

    title: str
    models: Mapping[str, Sequence[tuple[int, float]]]
    seeds: Mapping[str, Sequence[tuple[int, float]]]
    chance: float
    without_keys: float | None


def states(results: Path = RESULTS) -> list[States]:
    """Return a panel for each task that was done with several sizes of a state; none without measurements."""
    path = results / "recall.csv"
    rows = read_csv(path) if path.exists() else []
    panels = []
    for task in STATE_TASKS:
        models: dict[str, list[tuple[int, float]]] = {}
        seeds: dict[str, list[tuple[int, float]]] = {}
        measured: list[Row] = []
        for name, kind in MODELS.items():
            own = kept(rows, task, name)
            accuracy = share(own)
            if accuracy is not None and kind.ablation_of is None:
                size = state_numbers(name, shape_of(task, RECIPES[task]))
                models.setdefault(kind.state_of or name, []).append((size, accuracy))
                single = [(size, value) for row in own if (value := share([row])) is not None]
                seeds.setdefault(kind.state_of or name, []).extend(single)
                measured += own
        if any(len(points) > 1 for points in models.values()):
            both = ({name: sorted(points) for name, points in found.items()} for found in (models, seeds))
            guesses = mean_of(measured, "chance") or 0.0, mean_of(measured, "without_keys")
            panels.append(States(task, *both, *guesses))
    return panels


def draw_states(axes: Axes, panel: States) -> None:
    """Draw a panel: a line for each architecture with several sizes, and a point for each other one.

    They are means; every seed is a small point of its own.
    """
    colours = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#000000")
    for (name, points), colour in zip(panel.models.items(), colours, strict=False):
        sizes, accuracies = zip(*points, strict=True)
        axes.plot(
            sizes, accuracies, "-" if len(points) > 1 else " ", color=colour, marker="o", markersize=4, label=name
        )
        axes.plot(*zip(*panel.seeds[name], strict=True), " ", color=colour, marker=".", markersize=3, alpha=0.6)
    axes.axhline(panel.chance, color=_GREY, linestyle=":", linewidth=0.8, label="guessing")
    if panel.without_keys is not None:
        axes.axhline(panel.without_keys, color=_GREY, linestyle="-.", linewidth=0.8, label="the likeliest value told")
    _scale(axes, "numbers kept of a sequence: states, and keys and values", "share of right far answers")
