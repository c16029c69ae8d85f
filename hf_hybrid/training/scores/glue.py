"""Scores of predicted labels: those of GLUE's tasks, or accuracy, or the squared error of numbers."""

from typing import Any

import numpy as np
from transformers import EvalPrediction

from hf_hybrid.data.classification import GLUE_TASKS, Labels
from hf_hybrid.metrics import load_metric
from hf_hybrid.metrics.glue import GLUE_SCORES

SECOND = "_mismatched"
"""Suffix of a second validation or test split, as in MNLI; its scores end in ``_mm``."""


def mark_second(metrics: dict[str, float], split: str) -> dict[str, float]:
    """Append ``_mm`` to the metrics of a second split."""
    return {f"{name}_mm": value for name, value in metrics.items()} if split.endswith(SECOND) else metrics


def score_names(task: str | None) -> tuple[str, ...]:
    """Return the names of the metrics that an evaluation reports."""
    return ("loss", "accuracy", "mse") if task is None else ("loss", *GLUE_SCORES[task], "combined_score")


def compute_metrics(task: str | None, labels: Labels, prediction: EvalPrediction) -> dict[str, float]:
    """Score predictions, for Trainer."""
    return score(task, labels, outputs_of(prediction.predictions, labels), prediction.label_ids)


def score(task: str | None, labels: Labels, outputs: Any, references: Any) -> dict[str, float]:
    """Score predicted numbers, or ids of labels."""
    if task is not None and not labels.are_numbers:
        to_task = _ids_of_task(task, labels)
        outputs, references = to_task[outputs], to_task[references]
    name, of = ("glue", task) if task is not None else ("mse" if labels.are_numbers else "accuracy", None)
    scores = load_metric(name, of).compute(predictions=outputs, references=references)
    if len(scores) > 1:
        scores["combined_score"] = float(np.mean(list(scores.values())))
    return scores


def logits_of(predictions: Any) -> np.ndarray[Any, Any]:
    """Return a model's logits, the first of its outputs."""
    return np.asarray(predictions[0] if isinstance(predictions, tuple) else predictions)


def outputs_of(predictions: Any, labels: Labels) -> np.ndarray[Any, Any]:
    """Return predicted numbers, or ids of predicted labels."""
    logits = logits_of(predictions)
    return logits[:, 0] if labels.are_numbers else np.argmax(logits, axis=1)


def _ids_of_task(task: str, labels: Labels) -> np.ndarray[Any, Any]:
    """Return the task's id of each label of the model: scores such as F1 depend on which label is 1."""
    known, names = GLUE_TASKS[task].labels, [name.casefold() for name in labels.names]
    if not set(known) <= set(names):
        return np.arange(len(names))
    return np.array([known.index(name) if name in known else -1 for name in names])
