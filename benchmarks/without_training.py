"""Rows of `compare_on_data` that need no training: scores of plain summaries, and of labels by a plain rule."""

import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

Flags = Mapping[str, Any]
Scores = dict[str, dict[str, float]]


def _splits(flags: Flags) -> Any:
    from hf_hybrid.data.loading import load_raw_datasets

    return load_raw_datasets(**{name: flags[name] for name in ("train_file", "validation_file")})


def _summaries_without_training(flags: Flags) -> Scores:
    from hf_hybrid.data.columns import summarization_columns
    from hf_hybrid.data.preprocessing import plain_baselines
    from hf_hybrid.training.scores.summarization import rouge_scores

    splits, limit = _splits(flags), flags.get("max_eval_samples")
    text, summary = summarization_columns(splits, dataset_name=None)
    pool, references = list(splits["train"][summary]), list(splits["validation"][summary])[:limit]
    texts = plain_baselines(list(splits["validation"][text])[:limit], pool)
    return {
        name: {f"eval_{score}": value for score, value in rouge_scores(predictions, references).items()}
        for name, predictions in texts.items()
    }


def _most_frequent_label(flags: Flags) -> Scores:
    splits = _splits(flags)
    return _of_label(splits["train"]["label"], list(splits["validation"]["label"]), flags)


def _lra_without_training(flags: Flags) -> Scores:
    from hf_hybrid.data.lra import load_lra_once

    folder, seed = flags.get("data_dir"), flags.get("drawing_seed", 0)
    where: dict[str, Any] = {"data_dir": None if folder is None else Path(folder), "seed": seed}
    train = load_lra_once(flags["task_name"], "train", count=flags.get("max_train_samples"), **where)
    most = statistics.mode(train.labels.tolist())
    scores: Scores = {}
    for kind, split in (("eval", "validation"), ("predict", "test")):
        if kind == "predict" and not flags.get("do_predict"):
            continue
        rows = load_lra_once(flags["task_name"], split, count=flags.get(f"max_{kind}_samples"), **where)
        found = {"most frequent label": statistics.fmean(label == most for label in rows.labels.tolist())}
        if flags["task_name"].startswith("lra_listops"):  # it bounds the value: a maximum is rarely small
            found["outermost operator"] = _share_by_first_token(train, rows)
        for name, share in found.items():
            scores.setdefault(name, {})[f"{kind}_accuracy"] = share
    return scores


def _share_by_first_token(trained: Any, found: Any) -> float:
    """Return how many labels are the most frequent one of the trained rows with the same first token."""
    labels: dict[int, list[int]] = {}
    for row, label in zip(trained.inputs, trained.labels.tolist(), strict=True):
        labels.setdefault(int(row[0]), []).append(label)
    most = {first: statistics.mode(own) for first, own in labels.items()}
    pairs = zip(found.inputs, found.labels.tolist(), strict=True)
    return statistics.fmean(most.get(int(row[0])) == label for row, label in pairs)


def _of_label(trained: Sequence[Any], found: Sequence[Any], flags: Flags) -> Scores:
    most, found = statistics.mode(trained), found[: flags.get("max_eval_samples")]
    return {"most frequent label": {"eval_accuracy": statistics.fmean(label == most for label in found)}}


# script -> a score of its rows, and the function that makes them
BASELINES: dict[str, tuple[str, Callable[[Flags], Scores]]] = {
    "summarization": ("eval_rouge1", _summaries_without_training),
    "glue": ("eval_accuracy", _most_frequent_label),
    "long_range": ("eval_accuracy", _lra_without_training),
}
