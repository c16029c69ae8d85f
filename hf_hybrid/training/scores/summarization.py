"""Scores of generated summaries: ROUGE and length."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from tqdm.auto import tqdm
from transformers import EvalPrediction, PreTrainedTokenizerBase

from hf_hybrid.data.preprocessing import split_sentences
from hf_hybrid.metrics import load_metric

METRICS = ("loss",)
"""What an evaluation reports."""
GENERATED_METRICS = ("rouge1", "rouge2", "rougeL", "rougeLsum", "gen_len")
"""What an evaluation with generated summaries also reports."""
_CHUNK = 200


def rouge_scores(predictions: Sequence[str], references: Sequence[str]) -> dict[str, float]:
    """Return ROUGE-1, -2, -L and -Lsum in percent: means over the pairs, with stemming, rounded to four digits."""
    metric = load_metric("rouge")
    scores: dict[str, list[float]] = {}
    chunks = range(0, len(predictions), _CHUNK)
    for start in tqdm(chunks, desc="ROUGE", disable=len(chunks) < 3 or None, leave=False):
        chunk = slice(start, start + _CHUNK)
        values = metric.compute(
            predictions=["\n".join(split_sentences(text.strip())) for text in predictions[chunk]],
            references=["\n".join(split_sentences(text.strip())) for text in references[chunk]],
            use_stemmer=True,
            use_aggregator=False,
        )
        for name, per_pair in values.items():
            scores.setdefault(name, []).extend(per_pair)
    return {name: round(100 * float(np.mean(per_pair)), 4) for name, per_pair in scores.items()}


def decode(tokenizer: PreTrainedTokenizerBase, outputs: Any) -> list[str]:
    """Return the texts of generated ids or of labels."""
    ids = _ids(outputs)
    ids = np.where(ids < 0, tokenizer.pad_token_id, ids)  # Trainer pads with -100 across batches
    return [text.strip() for text in tokenizer.batch_decode(ids, skip_special_tokens=True)]


def _ids(predictions: Any) -> Any:
    return predictions[0] if isinstance(predictions, tuple) else predictions


def compute_metrics(tokenizer: PreTrainedTokenizerBase, prediction: EvalPrediction) -> dict[str, float]:
    """Score generated summaries, for Trainer."""
    ids = _ids(prediction.predictions)
    scores = rouge_scores(decode(tokenizer, ids), decode(tokenizer, prediction.label_ids))
    lengths = np.sum((ids != tokenizer.pad_token_id) & (ids >= 0), axis=1)
    return {**scores, "gen_len": round(float(np.mean(lengths)), 4)}
