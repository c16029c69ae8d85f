"""Scores of GLUE and of other labelled data as `evaluate.Metric` classes that work offline.

GLUE: Wang et al., "GLUE: A Multi-Task Benchmark and Analysis Platform for Natural Language Understanding" (2019).
"""

from collections.abc import Callable, Sequence
from typing import Any

import datasets
import evaluate
import numpy as np

__all__ = ["GLUE_SCORES", "SCORES", "Glue", "LabelScores"]

Numbers = np.ndarray[Any, Any]


def accuracy(predictions: Numbers, references: Numbers) -> float:
    """Share of correct predictions."""
    return float(np.mean(predictions == references))


def f1(predictions: Numbers, references: Numbers) -> float:
    """Harmonic mean of precision and recall of label 1; zero if undefined."""
    hits = np.sum((predictions == 1) & (references == 1))
    total = np.sum(predictions == 1) + np.sum(references == 1)
    return float(2 * hits / total) if total else 0.0


def matthews_correlation(predictions: Numbers, references: Numbers) -> float:
    """Correlation of predicted and true labels; zero if one of them is constant.

    (n s - p·t) / sqrt((n² - p·p) (n² - t·t)), with n pairs, s of them correct, and the counts p and t of each label
    among predictions and references (Gorodkin 2004; for two labels, Matthews 1975).
    """
    labels = np.union1d(predictions, references)
    predicted, true = (np.array([np.sum(x == y) for y in labels], dtype=float) for x in (predictions, references))
    count, right = float(len(references)), float(np.sum(predictions == references))
    spread = (count**2 - predicted @ predicted) * (count**2 - true @ true)
    return float((count * right - predicted @ true) / np.sqrt(spread)) if spread > 0 else 0.0


def pearson(predictions: Numbers, references: Numbers) -> float:
    """Linear correlation; NaN if one side is constant."""
    x, y = (values - np.mean(values) for values in (predictions, references))
    spread = np.sqrt((x @ x) * (y @ y))
    return float(np.clip((x @ y) / spread, -1.0, 1.0)) if spread > 0 else float("nan")


def spearmanr(predictions: Numbers, references: Numbers) -> float:
    """Linear correlation of the ranks; equal values share their mean rank."""
    return pearson(_ranks(predictions), _ranks(references))


def mse(predictions: Numbers, references: Numbers) -> float:
    """Mean squared error."""
    return float(np.mean((predictions - references) ** 2))


def _ranks(values: Numbers) -> Numbers:
    _, place, counts = np.unique(values, return_inverse=True, return_counts=True)
    return (np.cumsum(counts) - (counts - 1) / 2)[place]


SCORES: dict[str, Callable[[Numbers, Numbers], float]] = {
    "accuracy": accuracy,
    "f1": f1,
    "matthews_correlation": matthews_correlation,
    "mse": mse,
    "pearson": pearson,
    "spearmanr": spearmanr,
}
_OF_NUMBERS = {"mse", "pearson", "spearmanr"}

GLUE_SCORES: dict[str, tuple[str, ...]] = {
    "cola": ("matthews_correlation",),
    "mnli": ("accuracy",),
    "mrpc": ("accuracy", "f1"),
    "qnli": ("accuracy",),
    "qqp": ("accuracy", "f1"),
    "rte": ("accuracy",),
    "sst2": ("accuracy",),
    "stsb": ("pearson", "spearmanr"),
    "wnli": ("accuracy",),
}
"""The scores of each task."""


class LabelScores(evaluate.Metric):
    """Scores of predicted labels or numbers.

    Args:
        scores: Keys of `SCORES`, all for labels or all for numbers.
        **kwargs: Arguments of `evaluate.Metric`.
    """

    def __init__(self, *scores: str, **kwargs: Any) -> None:
        self._scores = scores
        super().__init__(**kwargs)

    def _info(self) -> evaluate.MetricInfo:
        kind = datasets.Value("float64" if _OF_NUMBERS.issuperset(self._scores) else "int64")
        return evaluate.MetricInfo(
            description=" ".join(str(SCORES[score].__doc__).split("\n")[0] for score in self._scores),
            citation="Wang et al. GLUE: A Multi-Task Benchmark and Analysis Platform for Natural Language "
            "Understanding. 2019.",
            inputs_description="predictions and references: a label id, or a number, for each example",
            features=datasets.Features({"predictions": kind, "references": kind}),
        )

    def _compute(self, predictions: Sequence[float], references: Sequence[float]) -> dict[str, float]:
        pairs = np.asarray(predictions), np.asarray(references)
        return {score: SCORES[score](*pairs) for score in self._scores}


class Glue(LabelScores):
    """The scores of one GLUE task, named as in the Hub's metric.

    Args:
        task: A key of `GLUE_SCORES`.
        **kwargs: Arguments of `evaluate.Metric`.
    """

    def __init__(self, task: str, **kwargs: Any) -> None:
        super().__init__(*GLUE_SCORES[task], config_name=task, **kwargs)
