"""What each architecture remembers: the panels of ``docs/figures/recall.svg`` and ``docs/figures/recall_states.svg``.

The first has a panel for each architecture, with and without its global part; the second one for each task that is
done with states of several sizes.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from matplotlib.axes import Axes

from benchmarks.recall_models import MODELS, ablation_reach, state_numbers
from benchmarks.recall_order import kept, mean_of, share
from benchmarks.recall_run import BINS, RECIPES, STATE_TASKS, shape_of
from benchmarks.record import read_csv
from hf_hybrid.data.recall import RECALL

RESULTS = Path("benchmarks/results")
# a task's colour, of Okabe and Ito's colours for the colour-blind
TASKS = {
    "aggregate": "#0072b2",
    "majority": "#56b4e9",
    "latch": "#009e73",
    "key_value": "#d55e00",
    "mqar": "#cc79a7",
    "few_facts": "#009e73",
    "facts": "#0072b2",
    "sparse_facts": "#d55e00",
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
    """

    title: str
    unit: str
    tasks: Mapping[str, Mapping[str, Sequence[tuple[int, float]]]]
    chances: Mapping[str, float]
    trained: Mapping[str, int]
    reach: int | None


def recall(results: Path = RESULTS) -> list[Recall]:
    """Return a panel for each architecture that was measured with its ablation; none without measurements."""
    path = results / "recall.csv"
    rows = read_csv(path) if path.exists() else []
    panels = []
    for ablation, kind in MODELS.items():
        tasks, chances, trained = {}, {}, {}
        for task in TASKS:
            models = {}
            for model in filter(None, (kind.ablation_of, ablation)):
                own = kept(rows, task, model)
                points = [(least, mean_of(own, f"at_{least}")) for least in BINS]
                models[model] = [(least, value) for least, value in points if value is not None]
                chances[task] = mean_of(own, "chance") or 0.0
            if kind.ablation_of and all(models.values()):
                tasks[task] = models
                segment = RECIPES[task].sizes.get("segment_size", 1)
                trained[task] = RECALL[task].length // segment
        if tasks:
            unit = "segments" if kind.is_encoder_decoder else "tokens"
            kept_chances = {task: chances[task] for task in tasks}
            known = (tasks, kept_chances, trained, ablation_reach(ablation))
            panels.append(Recall(str(kind.ablation_of), unit, *known))
    return panels


def draw_recall(axes: Axes, panel: Recall) -> None:
    """Draw a panel: solid lines with the global part, dashed ones without it, dots for guessing.

    Distances that training has are filled, those of longer tests hollow; a vertical line is the ablation's reach.
    """
    for task, models in panel.tasks.items():
        style = {"color": TASKS[task], "marker": "o", "markersize": 4}
        for (model, points), line in zip(models.items(), ("-", "--"), strict=True):
            distances, accuracies = zip(*points, strict=True)
            name = f"{task}" if model == panel.title else f"{task}, {model.partition(', ')[2]}"
            filled = [place for place, distance in enumerate(distances) if distance < panel.trained[task]]
            axes.plot(distances, accuracies, line, **style, markerfacecolor="white", label=name)
            axes.plot(distances, accuracies, "", **style, markevery=filled)
        axes.axhline(panel.chances[task], color=TASKS[task], linestyle=":", linewidth=0.8)
    if panel.reach is not None:
        axes.axvline(panel.reach, color="#8c959f", linewidth=0.8)
    axes.set_xscale("log", base=2)
    axes.set_ylim(-0.03, 1.03)
    line = "" if panel.reach is None else "; line: reach of the dashed models"
    axes.set_xlabel(f"distance of the answer, {panel.unit} (hollow: beyond training{line})")
    axes.set_ylabel("share of right answers")
    axes.legend(fontsize="small", frameon=False, loc="upper left", bbox_to_anchor=(-0.02, -0.18), borderaxespad=0)


@dataclass(frozen=True)
class States:
    """A panel of accuracies over the size of what a model keeps of a sequence.

    Attributes:
        title: The task.
        models: Architecture → numbers that it keeps of a sequence, and share of right far answers, sorted; several
            points if it was measured with several sizes of its state.
        chance: Accuracy of a guess.
    """

    title: str
    models: Mapping[str, Sequence[tuple[int, float]]]
    chance: float


def states(results: Path = RESULTS) -> list[States]:
    """Return a panel for each task that was done with several sizes of a state; none without measurements."""
    path = results / "recall.csv"
    rows = read_csv(path) if path.exists() else []
    panels = []
    for task in STATE_TASKS:
        models: dict[str, list[tuple[int, float]]] = {}
        chance = 0.0
        for name, kind in MODELS.items():
            own = kept(rows, task, name)
            accuracy = share(own)
            if accuracy is not None and kind.ablation_of is None:
                size = state_numbers(name, shape_of(task, RECIPES[task]))
                models.setdefault(kind.state_of or name, []).append((size, accuracy))
                chance = mean_of(own, "chance") or 0.0
        if any(len(points) > 1 for points in models.values()):
            panels.append(States(task, {name: sorted(points) for name, points in models.items()}, chance))
    return panels


def draw_states(axes: Axes, panel: States) -> None:
    """Draw a panel: a line for each architecture with several sizes, a point for each other one, dots for guessing."""
    colours = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#000000")
    for (name, points), colour in zip(panel.models.items(), colours, strict=False):
        sizes, accuracies = zip(*points, strict=True)
        axes.plot(
            sizes, accuracies, "-" if len(points) > 1 else "", color=colour, marker="o", markersize=4, label=name
        )
    axes.axhline(panel.chance, color="#8c959f", linestyle=":", linewidth=0.8)
    axes.set_xscale("log", base=2)
    axes.set_ylim(-0.03, 1.03)
    axes.set_xlabel("numbers kept of a sequence: states, and keys and values")
    axes.set_ylabel("share of right far answers")
    axes.legend(fontsize="small", frameon=False, loc="upper left", bbox_to_anchor=(-0.02, -0.18), borderaxespad=0)
