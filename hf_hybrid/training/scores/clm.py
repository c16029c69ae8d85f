"""Scores of a language model: exact means over the tokens, without label smoothing."""

import math
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from torch.nn import functional as F
from transformers import EvalPrediction

from hf_hybrid.data.preprocessing import IGNORED_LABEL

METRICS = ("loss", "accuracy", "perplexity", "tokens")
"""What an evaluation reports."""
_LARGEST = math.log(np.finfo(np.float64).max)


def scores_by_example(logits: Any, labels: torch.Tensor) -> torch.Tensor:
    """Return the sums of `sums_by_row` over the tokens that are predicted from those before them: `(B, 3)`.

    Of a part of a sequence, `labels` may hold the one after the last logit too.
    """
    targets = labels[:, 1:]
    return sums_by_row((logits[0] if isinstance(logits, tuple) else logits)[:, : targets.shape[1]], targets)


def sums_by_row(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return summed loss in nats, right tokens and scored tokens: `(B, 3)`, computed row by row to save memory."""
    scores = []
    for row, targets in zip(logits, labels, strict=True):
        scored = targets != IGNORED_LABEL
        picked, wanted = row[scored].float(), targets[scored]
        right = (picked.argmax(-1) == wanted).sum()
        scores.append(torch.stack([F.cross_entropy(picked, wanted, reduction="sum"), right, scored.sum()]))
    return torch.stack(scores)


def compute_metrics(prediction: EvalPrediction) -> dict[str, float]:
    """Add up the scores of examples, for Trainer."""
    loss, right, count = np.asarray(prediction.predictions, dtype=np.float64).sum(axis=0)
    mean = loss / count
    # "loss" replaces Trainer's own, a mean of means over batches
    return {"loss": mean, "accuracy": right / count, "perplexity": perplexity(mean), "tokens": int(count)}


def perplexity(loss: float) -> float:
    """Return the perplexity of a loss in nats per token."""
    return math.exp(loss) if loss < _LARGEST else math.inf


def bits_per_byte(loss: float, texts: Any) -> float:
    """Convert a loss in nats per token to bits per byte by the mean number of bytes per token of the texts."""
    return loss / math.log(2) * len(joined_tokens(texts)) / sum(texts["num_bytes"])


def joined_tokens(rows: Dataset) -> np.ndarray[Any, Any]:
    """Return the tokens of all texts, four bytes each."""
    chunks = rows.data.column("input_ids").chunks
    return np.concatenate([chunk.flatten().to_numpy() for chunk in chunks])
