"""How fine the probability of dropout is, and what it keeps on a CPU: words of random bits, not one number each."""

import torch
from torch import Tensor

LEVELS = 2**16
"""Of the random numbers: each element has 16 bits."""


def dropped_levels(dropout: float) -> int:
    """Return how many of the `LEVELS` drop an element, never all: a probability below 1 in steps of 2**-16."""
    return min(round(dropout * LEVELS), LEVELS - 1)


class Masks:
    """Masks of dropout, one after the other, from one seed.

    Filling memory from torch's generator is serial and costs as much as a matrix product. So one table is filled with
    random words, and each mask multiplies it by a random odd number of its own.

    Args:
        seed: Gives the same masks again.
        dropped: How many of the `LEVELS` drop an element.
        most: Most elements of a mask.
        device: Where the masks are.
    """

    def __init__(self, seed: Tensor, dropped: int, most: int, device: torch.device | str = "cpu") -> None:
        self._generator = torch.Generator().manual_seed(int(seed))
        self._first_kept = dropped - LEVELS // 2
        words = torch.empty(-(-most // 4), dtype=torch.int64).random_(-(2**63), None, generator=self._generator)
        self._table = words.view(torch.int32).to(device)
        self._words, self._high = torch.empty_like(self._table), torch.empty_like(self._table)

    def draw(self, count: int) -> Tensor:
        """Draw the next mask: 1 with probability 1 - dropped / LEVELS.

        A word gives two 16-bit numbers; the weaker low one of the product gets the high one added.

        Returns:
            `(count,)`, 1 = keep; as numbers of 16 bits, for casting from bool is slow. The next call overwrites it.
        """
        used = -(-count // 2)
        factor = int(torch.randint(-(2**31), 2**31, (), generator=self._generator)) | 1
        words = torch.mul(self._table[:used], factor, out=self._words[:used])
        words.add_(torch.bitwise_right_shift(words, 16, out=self._high[:used]))
        return words.view(torch.int16)[:count].ge_(self._first_kept)
