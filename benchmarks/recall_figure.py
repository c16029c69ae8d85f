"""What each architecture remembers, with and without its global part: the panels of ``docs/figures/recall.svg``."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from matplotlib.axes import Axes

from benchmarks.bench_recall import kept, mean_of
from benchmarks.recall_models import MODELS
from benchmarks.recall_run import BINS, RECIPES
from benchmarks.record import read_csv
from hf_hybrid.data.recall import RECALL

RESULTS = Path("benchmarks/results")
# a task's colour, of Okabe and Ito's colours for the colour-blind
TASKS = {
    "aggregate": "#0072b2",
    "latch": "#009e73",
    "key_value": "#d55e00",
    "mqar": "#cc79a7",
    "facts": "#0072b2",
}


@dataclass(frozen=True)
class Recall:
    """A panel: for each task and model the distances and accuracies, beside what guessing gives.

    Attributes:
        title: The architecture.
        unit: What distances count.
        tasks: Task → model → least distance of each bin, and accuracy there.
        chances: Task → accuracy of a guess.
        trained: Length of the longest training sequence, or number of segments.
    """

    title: str
    unit: str
    tasks: Mapping[str, Mapping[str, Sequence[tuple[int, float]]]]
    chances: Mapping[str, float]
    trained: int


def recall(results: Path = RESULTS) -> list[Recall]:
    """Return a panel for each architecture that was measured with its ablation; none without measurements."""
    path = results / "recall.csv"
    rows = read_csv(path) if path.exists() else []
    panels = []
    for ablation, kind in MODELS.items():
        tasks, chances, trained = {}, {}, 1
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
                trained = max(trained, RECALL[task].length // segment)
        if tasks:
            unit = "segments" if kind.is_encoder_decoder else "tokens"
            kept_chances = {task: chances[task] for task in tasks}
            panels.append(Recall(str(kind.ablation_of), unit, tasks, kept_chances, trained))
    return panels


def draw_recall(axes: Axes, panel: Recall) -> None:
    """Draw a panel: solid lines with the global part, dashed ones without it, dots for guessing."""
    for task, models in panel.tasks.items():
        for (model, points), line in zip(models.items(), ("-", "--"), strict=True):
            distances, accuracies = zip(*points, strict=True)
            name = f"{task}" if model == panel.title else f"{task}, {model.partition(', ')[2]}"
            axes.plot(distances, accuracies, line, color=TASKS[task], marker="o", markersize=3, label=name)
        axes.axhline(panel.chances[task], color=TASKS[task], linestyle=":", linewidth=0.8)
    axes.axvline(panel.trained, color="#8c959f", linewidth=0.8)
    axes.set_xscale("log", base=2)
    axes.set_ylim(-0.03, 1.03)
    axes.set_xlabel(f"distance of the answer, {panel.unit} (line: as long as in training)")
    axes.set_ylabel("share of right answers")
    axes.legend(fontsize="small", frameon=False, loc="upper left", bbox_to_anchor=(-0.02, -0.18), borderaxespad=0)
