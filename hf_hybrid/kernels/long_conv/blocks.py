"""Blocks of sequences and channels that a long convolution transforms together.

B batch · T length · D width · N packed sequences
"""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from ..packed import bounds

_CPU_BLOCK = 1 << 19
"""Real numbers per block on a CPU: 2 MiB of float32, near the fastest for every length measured."""

_GPU_BLOCK = 1 << 27
"""Real numbers per block elsewhere, where only memory limits it."""

_FINE = 4096
"""Size up to which more sizes of transforms would save little, and sequences of similar length share one."""


class Sequences(NamedTuple):
    """Sequences with the same transform length.

    Attributes:
        bounds: Tokens of each sequence of a packed batch; None if each is a row of the batch.
        table: First token and length of all sequences, `(N, 2)` of int32 on the inputs' device; None like `bounds`.
        first: The table's row of the first sequence.
        number: Number of sequences.
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
    """Sequences and channels that are transformed together."""

    sequences: Sequences
    rows: slice
    channels: slice

    @property
    def width(self) -> int:
        """Number of channels."""
        return int(self.channels.stop - self.channels.start)


class Around(NamedTuple):
    """The operations around a convolution, y = gate f(conv(input_gate u) + skip input_gate u).

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
    """Spectra `(G, F)`; channel c of a block has row ``(first + c) % G``."""

    rows: Tensor
    first: int


def fast_size(smallest: int, *, few: bool = False) -> int:
    """Return a length of fast transforms that is at least `smallest`.

    It is the smallest of 2, 4, 6, 8, 12, 16, 24, ...; beyond 4096, unless `few` sizes are wanted, 9, 10 and 15 eighths
    of each power of two are among them.
    """
    power = 2
    while power < smallest:
        power *= 2
    for sixteenths in (12,) if few or power <= _FINE else (9, 10, 12, 15):
        if power > 4 and power * sixteenths // 16 >= smallest:
            return power * sixteenths // 16
    return power


def block_steps(u: Tensor, n_fft: int) -> tuple[int, int]:
    """Return the numbers of sequences and channels of a block."""
    budget = _CPU_BLOCK if u.device.type == "cpu" else _GPU_BLOCK
    channels = max(1, budget // n_fft)
    if u.device.type != "cpu" and channels > 16:
        channels -= channels % 16  # align each block's first channel for wide reads
    return max(1, budget // (n_fft * max(1, u.shape[2]))), max(1, min(u.shape[2], channels))


def ranges(size: int, step: int) -> Iterator[slice]:
    """Cut a range into slices."""
    return (slice(start, min(start + step, size)) for start in range(0, size, step))


def transformed_together(u: Tensor, cu_seqlens: Tensor | None, n_fft: Callable[[int], int]) -> list[Sequences]:
    """Group the batch's sequences by transform length; the host reads `cu_seqlens`."""
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
