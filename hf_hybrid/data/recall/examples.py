"""What every task of recall returns, and how its arrays begin."""

from dataclasses import dataclass
from math import factorial

import numpy as np

from hf_hybrid.data.drawing import Array
from hf_hybrid.data.preprocessing import IGNORED_LABEL

__all__ = ["NO_DISTANCE", "Examples", "distinct", "empty", "share_of_likeliest"]

NO_DISTANCE = -1
"""The distance where nothing is asked, or where no token of the sequence holds the answer."""


@dataclass(frozen=True)
class Examples:
    """Sequences, what is asked in them, and how far the answers lie. N examples, L tokens, S of a document.

    Attributes:
        input_ids: `(N, L)`; for an encoder-decoder what the decoder reads.
        labels: `(N, L)`: what a model must say once it has read a token and all before it; `IGNORED_LABEL` where
            nothing is asked. To train a causal language model of Transformers, which compares a label with the
            prediction of the token before, pass them as ``shift_labels``. Of `compression`: the tokens themselves,
            which a model must say after the last token.
        distances: `(N, L)`: how many tokens (of `facts`, segments) before the question the answer lies; `NO_DISTANCE`
            where nothing is asked or the sequence does not hold the answer.
        vocab_size: Every id is less.
        chance: Share of correct answers of a model that has not read what they depend on.
        without_keys: Share of correct answers of a model that has read a sequence's values and says the likeliest of
            them, since it does not know which key each belongs to; None where nothing is asked by a key.
        document_ids: `(N, S)`, what an encoder reads; None for a language model.
    """

    input_ids: Array
    labels: Array
    distances: Array
    vocab_size: int
    chance: float
    document_ids: Array | None = None
    without_keys: float | None = None


def empty(count: int, length: int, filler: int = 0) -> tuple[Array, Array, Array]:
    """Return tokens, labels and distances before anything is asked, each `(count, length)`."""
    shape = (count, length)
    return (
        np.full(shape, filler, dtype=np.int64),
        np.full(shape, IGNORED_LABEL, dtype=np.int64),
        np.full(shape, NO_DISTANCE, dtype=np.int64),
    )


def distinct(generator: np.random.Generator, count: int, most: int, size: int) -> Array:
    """Draw `(count, size)` numbers below `most`, those of a row distinct and in random order."""
    if 4 * size >= most:
        return generator.permuted(np.tile(np.arange(most), (count, 1)), axis=1)[:, :size]
    drawn = [generator.choice(most, size, replace=False) for _ in range(count)]
    return np.array(drawn, dtype=np.int64).reshape(count, size)


def share_of_likeliest(pairs: int, values: int) -> float:
    """Return the expected share of the most frequent one of `values` values, of which each of `pairs` pairs draws one.

    ``sum_m P(max > m) / pairs``; that no value comes more than m times has the probability
    ``pairs! [x^pairs] (sum_{j <= m} x^j / j!)^values / values^pairs``.
    """
    total = 0.0
    for most in range(pairs):
        terms = np.array([1 / factorial(times) for times in range(most + 1)])
        power = np.ones(1)
        for _ in range(values):
            power = np.convolve(power, terms)[: pairs + 1]
        total += 1 - (factorial(pairs) / float(values) ** pairs * power[pairs] if len(power) > pairs else 0.0)
    return total / pairs
