"""What a long convolution transforms together: some sequences, some channels, at one length.

B batch · T length · D width · N packed sequences
"""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from ..packed import bounds

_CPU_BLOCK = 1 << 19
"""Real numbers transformed at once on a CPU: 2 MiB of float32, near the fastest for every length measured."""

_GPU_BLOCK = 1 << 27
"""The same elsewhere, where only memory limits the block."""


class Sequences(NamedTuple):
    """Sequences that are transformed at one length.

    Attributes:
        bounds: Tokens of each in the one row of a packed batch; None where each is a row of the batch.
        table: First token and number of tokens of each, and of others, `(N, 2)` of int32 beside the inputs; None
            likewise.
        first: The table's row of the first of them.
        number: How many there are.
        length: Tokens of the longest.
        n_fft: Length of the transforms.
    """

    bounds: list[slice] | None
    table: Tensor | None
    first: int
    number: int
    length: int
    n_fft: int


class Block(NamedTuple):
    """Some sequences and channels, transformed together."""

    sequences: Sequences
    rows: slice
    channels: slice

    @property
    def width(self) -> int:
        """How many channels."""
        return int(self.channels.stop - self.channels.start)


class Around(NamedTuple):
    """What a convolution does to its input and output, y = gate f(conv(input_gate u) + skip input_gate u).

    Attributes:
        skip: `(D,)` or None.
        input_gate: `(B, T, D)` or None.
        gate: `(B, T, D)` or None.
        silu: Whether f is SiLU.
    """

    skip: Tensor | None
    input_gate: Tensor | None
    gate: Tensor | None
    silu: bool


class Spectrum(NamedTuple):
    """Spectra `(G, F)` of which channel c of a block has that of row ``(first + c) % G``."""

    rows: Tensor
    first: int


def fast_size(smallest: int) -> int:
    """Smallest of 2, 4, 6, 8, 12, 16, 24, ... that is at least `smallest`."""
    power = 2
    while power < smallest:
        power *= 2
    return power // 4 * 3 if power > 4 and power // 4 * 3 >= smallest else power


def block_steps(u: Tensor, n_fft: int) -> tuple[int, int]:
    """Sequences and channels of one block."""
    budget = _CPU_BLOCK if u.device.type == "cpu" else _GPU_BLOCK
    channels = max(1, budget // n_fft)
    if u.device.type != "cpu" and channels > 16:
        channels -= channels % 16  # every block's first channel lies where many can be read at once
    return max(1, budget // (n_fft * max(1, u.shape[2]))), max(1, min(u.shape[2], channels))


def ranges(size: int, step: int) -> Iterator[slice]:
    """Parts of a range."""
    return (slice(start, min(start + step, size)) for start in range(0, size, step))


def transformed_together(u: Tensor, cu_seqlens: Tensor | None, n_fft: Callable[[int], int]) -> list[Sequences]:
    """The batch's sequences, those of one transform length together; the host reads `cu_seqlens`."""
    if cu_seqlens is None:
        return [Sequences(None, None, 0, u.shape[0], u.shape[1], n_fft(u.shape[1]))]
    together: dict[int, list[slice]] = {}
    for tokens in bounds(cu_seqlens, u.shape[1]):
        if tokens.stop > tokens.start:
            together.setdefault(n_fft(tokens.stop - tokens.start), []).append(tokens)
    pairs = [(tokens.start, tokens.stop - tokens.start) for found in together.values() for tokens in found]
    table = torch.tensor(pairs, dtype=torch.int32, device=u.device)
    groups: list[Sequences] = []
    first = 0
    for size, found in together.items():
        longest = max(tokens.stop - tokens.start for tokens in found)
        groups.append(Sequences(found, table, first, len(found), longest, size))
        first += len(found)
    return groups
