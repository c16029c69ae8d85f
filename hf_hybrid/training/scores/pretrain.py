"""Scores of pre-training: exact means over the labels, and bits per byte of the text that they hold."""

import math
from typing import Any

import numpy as np
import torch
from transformers import EvalPrediction, PreTrainedTokenizerBase

from hf_hybrid.data.preprocessing import IGNORED_LABEL
from hf_hybrid.training.scores import clm

METRICS = (*clm.METRICS, "bits_per_byte")
"""What an evaluation reports."""


def scores_by_example(tokenizer: PreTrainedTokenizerBase, logits: Any, labels: torch.Tensor) -> torch.Tensor:
    """Return summed loss in nats, right labels, labels, and the bytes of their text: `(B, 4)`."""
    sums = clm.sums_by_row(logits[0] if isinstance(logits, tuple) else logits, labels)
    sizes = [hidden_bytes(tokenizer, row) for row in labels.cpu().numpy()]
    return torch.cat([sums, sums.new_tensor(sizes)[:, None]], dim=1)


def hidden_bytes(tokenizer: PreTrainedTokenizerBase, labels: np.ndarray[Any, Any]) -> int:
    """Return the length in UTF-8 of the text that labels hold, without special tokens.

    A character of which only a part is hidden counts as one byte.
    """
    text: Any = tokenizer.decode(labels[labels != IGNORED_LABEL], skip_special_tokens=True)
    return len(text.encode()) - 2 * text.count("\ufffd")


def compute_metrics(prediction: EvalPrediction) -> dict[str, float]:
    """Add up the scores of examples, for Trainer."""
    sums = np.asarray(prediction.predictions, dtype=np.float64)
    nats, num_bytes = sums[:, 0].sum(), sums[:, 3].sum()
    means = clm.compute_metrics(EvalPrediction(predictions=sums[:, :3], label_ids=prediction.label_ids))
    return {**means, "bits_per_byte": nats / math.log(2) / num_bytes if num_bytes else math.nan}
