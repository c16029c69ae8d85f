"""Rows of `compare_on_data` that need no training: scores of plain summaries and of the most frequent label."""

import statistics
from collections.abc import Callable, Mapping
from pathlib import Path


def _summaries_without_training(files: Mapping[str, Path], limit: int | None) -> dict[str, dict[str, float]]:
    from hf_hybrid.data.columns import summarization_columns
    from hf_hybrid.data.loading import load_raw_datasets
    from hf_hybrid.data.preprocessing import plain_baselines
    from hf_hybrid.training.scores.summarization import rouge_scores

    splits = load_raw_datasets(**{f"{split}_file": str(path) for split, path in files.items()})
    text, summary = summarization_columns(splits, dataset_name=None)
    pool, references = list(splits["train"][summary]), list(splits["validation"][summary])[:limit]
    texts = plain_baselines(list(splits["validation"][text])[:limit], pool)
    return {
        name: {f"eval_{score}": value for score, value in rouge_scores(predictions, references).items()}
        for name, predictions in texts.items()
    }


def _most_frequent_label(files: Mapping[str, Path], limit: int | None) -> dict[str, dict[str, float]]:
    from hf_hybrid.data.loading import load_raw_datasets

    splits = load_raw_datasets(**{f"{split}_file": str(path) for split, path in files.items()})
    most, found = statistics.mode(splits["train"]["label"]), list(splits["validation"]["label"])[:limit]
    return {"most frequent label": {"eval_accuracy": statistics.fmean(label == most for label in found)}}


# script -> a score of its rows, and the function that makes them
BASELINES: dict[str, tuple[str, Callable[[Mapping[str, Path], int | None], dict[str, dict[str, float]]]]] = {
    "summarization": ("eval_rouge1", _summaries_without_training),
    "glue": ("eval_accuracy", _most_frequent_label),
}
