"""Scores of a language model: exact means over the tokens, of labels that are never smoothed."""

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
    """Summed loss in nats, number of right tokens, number of scored tokens: `(B, 3)`, a row at a time for memory."""
    scores = []
    for row, targets in zip(logits[0] if isinstance(logits, tuple) else logits, labels[:, 1:], strict=True):
        scored = targets != IGNORED_LABEL
        picked, wanted = row[:-1][scored].float(), targets[scored]
        right = (picked.argmax(-1) == wanted).sum()
        scores.append(torch.stack([F.cross_entropy(picked, wanted, reduction="sum"), right, scored.sum()]))
    return torch.stack(scores)


def compute_metrics(prediction: EvalPrediction) -> dict[str, float]:
    """Add up the scores of examples, as Trainer asks for it."""
    loss, right, count = np.asarray(prediction.predictions, dtype=np.float64).sum(axis=0)
    mean = loss / count
    # "loss" takes the place of Trainer's own, a mean over batches of means
    return {"loss": mean, "accuracy": right / count, "perplexity": perplexity(mean), "tokens": int(count)}


def perplexity(loss: float) -> float:
    """The perplexity of a loss in nats per token."""
    return math.exp(loss) if loss < _LARGEST else math.inf


def bits_per_byte(loss: float, texts: Any) -> float:
    """A loss in nats per token as bits per byte, at the length that the tokens of the texts have in the mean."""
    return loss / math.log(2) * len(joined_tokens(texts)) / sum(texts["num_bytes"])


def joined_tokens(rows: Dataset) -> np.ndarray[Any, Any]:
    """The tokens of all texts, four bytes each."""
    chunks = rows.data.column("input_ids").chunks
    return np.concatenate([chunk.flatten().to_numpy() for chunk in chunks])
