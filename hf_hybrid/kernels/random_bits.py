"""How fine the probability of dropout is, and what it keeps on a CPU: words of random bits, not one number each."""

import torch
from torch import Tensor

LEVELS = 2**16
"""Of the random numbers: each element has 16 bits."""


def dropped_levels(dropout: float) -> int:
    """Return how many of the `LEVELS` drop an element, never all: a probability below 1 in steps of 2**-16."""
    return min(round(dropout * LEVELS), LEVELS - 1)


def draw_kept(words: Tensor, count: int, dropped: int, generator: torch.Generator) -> Tensor:
    """Fill words with random bits and return what they say of some elements: 1 with probability 1 - dropped / LEVELS.

    Args:
        words: int64, one for four elements; overwritten.
        count: Number of elements.
        dropped: How many of the `LEVELS` drop an element.
        generator: A generator of the CPU.

    Returns:
        `(count,)`, 1 = keep; as numbers of 16 bits, a view of the words, for casting from bool is slow.
    """
    words.random_(-(2**63), None, generator=generator)
    return words.view(torch.int16)[:count].ge_(dropped - LEVELS // 2)
