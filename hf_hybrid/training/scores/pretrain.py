"""Scores of pre-training: exact means over the labels, and bits per byte of the text that they hold."""

import math
import re
from typing import Any

import numpy as np
import torch
from transformers import EvalPrediction, PreTrainedTokenizerBase

from hf_hybrid.data.preprocessing import IGNORED_LABEL
from hf_hybrid.data.tokenizer import is_marked, marked_bytes
from hf_hybrid.training.scores import clm

METRICS = (*clm.METRICS, "bits_per_byte")
"""What an evaluation reports."""


def scores_by_example(tokenizer: PreTrainedTokenizerBase, logits: Any, labels: torch.Tensor) -> torch.Tensor:
    """Return summed loss in nats, right labels, labels, and the bytes of their text: `(B, 4)`."""
    sums = clm.sums_by_row(logits[0] if isinstance(logits, tuple) else logits, labels)
    sizes = [hidden_bytes(tokenizer, row) for row in labels.cpu().numpy()]
    return torch.cat([sums, sums.new_tensor(sizes)[:, None]], dim=1)


def hidden_bytes(tokenizer: PreTrainedTokenizerBase, labels: np.ndarray[Any, Any]) -> int:
    """Return the length in UTF-8 of the text that labels hold, without special tokens: see `token_bytes`."""
    return sum(token_bytes(tokenizer, int(number)) for number in labels[labels != IGNORED_LABEL])


def token_bytes(tokenizer: PreTrainedTokenizerBase, number: int) -> int:
    """Return how many bytes of UTF-8 a token adds to a text behind another word, a space before it included.

    Of a character that several tokens make up, each counts its own bytes. Special tokens add none, also the one in
    place of what a tokenizer does not know. Where a token does not say whether the text has a space before it, it
    counts the one that decoding writes: BERT's pieces of ``isn't`` have the bytes of "isn ' t", two too many.
    """
    known: dict[int, int] = tokenizer.__dict__.setdefault("_token_bytes", {})
    if number not in known:
        known[number] = _token_bytes(tokenizer, number)
    return known[number]


def _token_bytes(tokenizer: PreTrainedTokenizerBase, number: int) -> int:
    if number in tokenizer.all_special_ids:
        return 0
    token: Any = tokenizer.convert_ids_to_tokens(number)
    if re.fullmatch("<0x[0-9A-F]{2}>", token):  # a byte that SentencePiece has no character for
        return 1
    if is_marked(tokenizer):
        return marked_bytes(token)
    decoder = getattr(getattr(tokenizer, "backend_tokenizer", None), "decoder", None)
    if type(decoder).__name__ == "ByteLevel":  # which shows each byte as a character
        return len(token)
    before = tokenizer("a", add_special_tokens=False)["input_ids"]
    alone, together = (
        str(tokenizer.decode(ids, clean_up_tokenization_spaces=False)) for ids in (before, [*before, number])
    )
    return len(together.encode()) - len(alone.encode())


def compute_metrics(prediction: EvalPrediction) -> dict[str, float]:
    """Add up the scores of examples, for Trainer."""
    sums = np.asarray(prediction.predictions, dtype=np.float64)
    nats, num_bytes = sums[:, 0].sum(), sums[:, 3].sum()
    means = clm.compute_metrics(EvalPrediction(predictions=sums[:, :3], label_ids=prediction.label_ids))
    return {**means, "bits_per_byte": nats / math.log(2) / num_bytes if num_bytes else math.nan}
