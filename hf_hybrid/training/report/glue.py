"""The classification script's part of the report."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from datasets import Dataset, DatasetDict

from hf_hybrid.data.classification import Labels
from hf_hybrid.data.preprocessing import guess_labels, majority_label
from hf_hybrid.training.flags.data import PREFIXES, GlueArguments
from hf_hybrid.training.report.page import Cell, Sample, Section, Table, excerpt, format_value
from hf_hybrid.training.report.run_page import Contents, choose_rows
from hf_hybrid.training.scores.glue import SECOND, logits_of, mark_second, outputs_of, score
from hf_hybrid.training.splits import first_examples

SCORE_NAMES = {
    "accuracy": "accuracy",
    "f1": "F1",
    "matthews_correlation": "Matthews correlation",
    "pearson": "Pearson correlation",
    "spearmanr": "Spearman correlation",
    "mse": "mean squared error",
    "combined_score": "their mean",
}
_GUESSES = 10
"""Number of stratified guesses."""
_MOST_LABELS = 12
"""With more labels, list the most frequent confusions instead of a square of all."""


def report(
    data_args: GlueArguments,
    splits: DatasetDict,
    columns: tuple[str, ...],
    datasets: Mapping[str, Dataset],
    labels: Labels,
    evaluated: Mapping[str, Any],
    metrics: Mapping[str, float],
) -> Contents:
    """Make the sections: scores, compared with baselines that read no sentence, confused labels, and samples."""
    task, trained = data_args.task_name, datasets.get("train")
    evaluated = {name: outputs for name, outputs in evaluated.items() if outputs is not None}
    scored = {name: outputs for name, outputs in evaluated.items() if outputs.label_ids is not None}
    known = None if trained is None else np.asarray(trained["labels"])
    scores = [name for name in SCORE_NAMES if any(f"{prefix}_{name}" in metrics for prefix in PREFIXES.values())]
    last = next(
        (prefix for prefix in ("predict", "eval") if any(f"{prefix}_{name}" in metrics for name in scores)), ""
    )
    loss = "Loss (squared error)" if labels.are_numbers else "Loss (nats per example)"
    curves = {loss: {"loss": "training", "eval_loss": "validation"}}
    if scores:
        curves["Scores on the validation split"] = {f"eval_{name}": SCORE_NAMES[name] for name in scores}

    def samples() -> Section:
        if not evaluated:
            return Section("Samples")
        name = next(reversed(scored or evaluated))
        sentences = first_examples(splits[name], data_args.limits[name.removesuffix(SECOND)])
        return _samples(name, sentences, columns, labels, evaluated[name])

    return Contents(
        title="Sentence classification" if task is None else f"GLUE {task}",
        sizes={name: f"{len(rows):,} examples" for name, rows in datasets.items()},
        tiles={f"{last}_{name}": SCORE_NAMES[name] for name in scores},
        curves=curves,
        parts={
            "scores": lambda: score_tables(task, labels, known, scored, scores, metrics),
            "confusions": lambda: confusions(labels, scored),
            "samples": samples,
        },
    )


def score_tables(
    task: str | None,
    labels: Labels,
    known: np.ndarray[Any, Any] | None,
    scored: Mapping[str, Any],
    scores: Sequence[str],
    metrics: Mapping[str, float],
) -> Section:
    """Compare the model's scores with those of baselines that know only the training labels."""
    tables = []
    for split, outputs in scored.items():
        prefix = PREFIXES[split.removesuffix(SECOND)]
        own = mark_second({f"{prefix}_{name}": metrics.get(f"{prefix}_{name}", np.nan) for name in scores}, split)
        rows: list[tuple[str, list[Cell]]] = [("this model", [metrics.get(name) for name in own])]
        for name, draws in _label_baselines(labels, known, len(outputs.label_ids)).items():
            results = [score(task, labels, draw, outputs.label_ids) for draw in draws]
            rows.append((name, [float(np.mean([result[score] for result in results])) for score in scores]))
        caption = f"Scores on the {split.replace('_', ', ')} split, {len(outputs.label_ids):,} examples"
        tables.append(Table(caption, ("", *(SCORE_NAMES[name] for name in scores)), rows, strong=0))
    if not scored:
        return Section("Scores", notes=["No split with labels was scored."])
    if known is None:
        note = "The training split was not read: no baselines come from it."
    elif labels.are_numbers:
        note = "The mean is that of the training labels; a correlation with a constant is not defined."
    else:
        note = (
            f"The majority class is that of the training labels; the stratified guess is the mean of {_GUESSES} draws."
        )
    return Section("Scores", tables, notes=[note])


def _label_baselines(
    labels: Labels, known: np.ndarray[Any, Any] | None, count: int
) -> dict[str, list[np.ndarray[Any, Any]]]:
    """Return one or several lists of answers for each baseline, by its name."""
    if known is None:
        return {}
    if labels.are_numbers:
        return {"mean": [np.full(count, known.mean())]}
    majority = majority_label(known)
    return {
        f"majority class ({labels.names[majority]})": [np.full(count, majority)],
        "stratified guess": [guess_labels(known, count, seed) for seed in range(_GUESSES)],
    }


def confusions(labels: Labels, scored: Mapping[str, Any]) -> Section:
    """Count how often each label was predicted as each other one."""
    if labels.are_numbers:
        return Section("Confusions")
    tables, size = [], len(labels.names)
    for split, outputs in scored.items():
        pairs = np.asarray(outputs.label_ids) * size + outputs_of(outputs.predictions, labels)
        counts = np.bincount(pairs, minlength=size**2).reshape(size, size)
        where = f"the {split.replace('_', ', ')} split"
        if size <= _MOST_LABELS:
            rows: list[tuple[str, list[Cell]]] = [
                (name, [int(count) for count in row]) for name, row in zip(labels.names, counts, strict=True)
            ]
            columns = ("label", *(f"predicted {name}" for name in labels.names))
            tables.append(Table(f"Labels and predictions on {where}", columns, rows, shaded=True))
            continue
        wrong = counts - np.diag(np.diag(counts))
        worst = [divmod(int(pair), size) for pair in np.argsort(-wrong, axis=None, kind="stable")[:_MOST_LABELS]]
        rows = [
            (labels.names[one], [labels.names[two], int(wrong[one, two])]) for one, two in worst if wrong[one, two]
        ]
        tables.append(Table(f"The most frequent confusions on {where}", ("label", "predicted", "examples"), rows))
    return Section("Confusions", tables)


def _samples(split: str, rows: Dataset, columns: tuple[str, ...], labels: Labels, outputs: Any) -> Section:
    """Show right and wrong predictions; without labels, any."""
    predicted = outputs_of(outputs.predictions, labels)
    logits = logits_of(outputs.predictions).astype(np.float64)
    chances = np.exp(logits - np.logaddexp.reduce(logits, axis=1, keepdims=True)).max(axis=1)
    truth = outputs.label_ids
    if truth is None:
        chosen = choose_rows(len(predicted))
    elif labels.are_numbers:
        order = np.argsort(np.abs(predicted - truth), kind="stable")
        chosen = [*order[:3], *order[3:][-3:][::-1]]
    else:
        right, wrong = np.flatnonzero(predicted == truth), np.flatnonzero(predicted != truth)
        chosen = [group[place] for group in (right, wrong) for place in choose_rows(len(group), 4)]

    def word(value: Any) -> str:
        return format_value(float(value)) if labels.are_numbers else labels.names[int(value)]

    samples = []
    for row in map(int, chosen):
        texts = [(column, excerpt(rows[row][column])) for column in columns]
        if truth is not None:
            texts.append(("label", word(truth[row])))
        confidence = "" if labels.are_numbers else f", {chances[row]:.0%} sure"
        texts.append(("prediction", word(predicted[row]) + confidence))
        verdict, is_right = "", None
        if truth is not None and labels.are_numbers:
            verdict = f"off by {format_value(float(abs(predicted[row] - truth[row])))}"
        elif truth is not None:
            is_right = bool(predicted[row] == truth[row])
            verdict = "right" if is_right else "wrong"
        samples.append(Sample(texts, verdict, is_right, read=len(columns)))
    if truth is None:
        note = "Drawn at random; this split has no labels."
    elif labels.are_numbers:
        note = "The three best and the three worst."
    else:
        note = f"Drawn at random: {len(right):,} are right and {len(wrong):,} are wrong."
    return Section(f"Samples of the {split.replace('_', ', ')} split", samples=samples, notes=[note])
