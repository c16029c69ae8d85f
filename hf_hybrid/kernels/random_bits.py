"""Which elements dropout keeps, from words of random bits: on a CPU much faster than numbers drawn one by one."""

import torch
from torch import Tensor

LEVELS = 2**16
"""Of the random numbers: each element has 16 bits."""


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
