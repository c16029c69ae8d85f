"""Sequences of different lengths packed into one row of tokens, without padding.

`cu_seqlens` holds the start of each sequence and the end of the last: sequence n has tokens cu_seqlens[n] to
cu_seqlens[n + 1] - 1, and may be empty. An op on packed sequences gives the results of each sequence alone.

B batch · T length of the row · N sequences
"""

import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .dispatch import exports_to_onnx
from .launching import blocks


def check_cu_seqlens(cu_seqlens: Tensor | None, x: Tensor, name: str) -> int:
    """Return the number of sequences in a batch `(B, T, ...)`: N if packed, B otherwise.

    `bounds` checks the values, where the host reads them anyway.

    Raises:
        ValueError: A shape or dtype does not fit, or torch exports the call to ONNX.
    """
    if cu_seqlens is None:
        return x.shape[0]
    if exports_to_onnx():
        raise ValueError(f"cu_seqlens must be None in an export to ONNX; got {cu_seqlens.shape[0] - 1} sequences")
    if cu_seqlens.dim() != 1 or cu_seqlens.shape[0] < 2 or cu_seqlens.dtype not in (torch.int32, torch.int64):
        raise ValueError(
            f"cu_seqlens must be (N + 1,) of int32 or int64 with N > 0; got {tuple(cu_seqlens.shape)} "
            f"of {cu_seqlens.dtype}"
        )
    if x.shape[0] != 1:
        raise ValueError(f"{name} must have a batch of 1 with cu_seqlens; got {x.shape[0]}")
    return cu_seqlens.shape[0] - 1


def bounds(cu_seqlens: Tensor, length: int) -> list[slice]:
    """Return the tokens of each sequence; the host reads the bounds.

    Raises:
        ValueError: The bounds do not rise from 0 to T.
    """
    ends = cu_seqlens.tolist()
    if ends[0] != 0 or ends[-1] != length or any(b < a for a, b in itertools.pairwise(ends)):
        raise ValueError(f"cu_seqlens must rise from 0 to T = {length}; got {ends}")
    return [slice(a, b) for a, b in itertools.pairwise(ends)]


def run_each(
    function: Callable[..., tuple[Tensor, ...]],
    cu_seqlens: Tensor,
    tensors: tuple[Tensor, ...],
    *states: Tensor | None,
    states_out: int,
) -> tuple[Tensor, ...]:
    """Run a function on each sequence alone and concatenate the results.

    Args:
        function: Takes `tensors` of one sequence, `(1, T_n, ...)`, then `states` of one row, and returns results of
            the same two kinds, states last. It must accept empty sequences.
        cu_seqlens: `(N + 1,)`.
        tensors: `(1, T, ...)` each.
        *states: `(N, ...)` each; None is passed on.
        states_out: Number of states among the results.

    Returns:
        The results for the complete row.
    """
    results = []
    for n, at in enumerate(bounds(cu_seqlens, tensors[0].shape[1])):
        own = [None if state is None else state[n : n + 1] for state in states]
        results.append(function(*(x[:, at] for x in tensors), *own))
    columns = list(zip(*results, strict=True))
    first_state = len(columns) - states_out
    return tuple(torch.cat(column, dim=int(i < first_state)) for i, column in enumerate(columns))


def longest(x: Tensor, cu_seqlens: Tensor | None) -> int:
    """Return an upper bound of the lengths of the sequences in `(B, T, ...)`, exact unless a compiler traces the call.

    The host reads the bounds of packed sequences.
    """
    if cu_seqlens is None or torch.compiler.is_compiling():
        return x.shape[1]
    return int(cu_seqlens.diff().max())


def sequence_starts(cu_seqlens: Tensor, length: int) -> Tensor:
    """Return the first token of the sequence of each token, `(T,)`."""
    token = torch.arange(length, device=cu_seqlens.device)
    return cu_seqlens[torch.searchsorted(cu_seqlens, token, right=True, out_int32=True) - 1].long()


def to_rows(x: Tensor, cu_seqlens: Tensor) -> tuple[Tensor, Tensor]:
    """Give each packed sequence a row of its own, for computations that have no packed form.

    Args:
        x: `(1, T, ...)`.
        cu_seqlens: `(N + 1,)`; the host reads the longest length.

    Returns:
        `(N, longest, ...)`, zeros after shorter sequences, and a boolean `(N, longest)`, True where there is a token.
        With it, ``rows[kept][None]`` packs the rows again.
    """
    lengths = cu_seqlens.diff()
    slot = torch.arange(int(lengths.max()), device=x.device)
    kept = slot < lengths[:, None]
    rows = x[0, torch.where(kept, cu_seqlens[:-1, None] + slot, 0)]
    return rows.masked_fill(~kept.view(*kept.shape, *[1] * (x.dim() - 2)), 0), kept


def spans(cu_seqlens: Tensor, length: int, size: int) -> tuple[Tensor, Tensor]:
    """Cut every sequence into spans of `size` tokens, the last one shorter, on the device.

    Args:
        cu_seqlens: `(N + 1,)`. Bounds that do not rise from 0 to T fail a device assertion; they are clamped to
            [0, T], so that a kernel never leaves its tensors.
        length: T.
        size: Tokens per span.

    Returns:
        `(S, 3)` of int32: sequence, first token and end (exclusive) of each span, with S = floor(T / size) + N, enough
        for any bounds; unused spans are empty and have the sequence N. And `(2, N + 1)` of int32: the bounds, and the
        first span of each sequence.
    """
    ends = cu_seqlens.long().clamp(0, length).cummax(0).values
    rises = (ends == cu_seqlens).all() & (ends[0] == 0) & (ends[-1] == length)
    torch._assert_async(rises, f"cu_seqlens must rise from 0 to T = {length}")
    counts = (ends.diff() + size - 1) // size
    starts = torch.nn.functional.pad(counts.cumsum(0), (1, 0))
    sequences = cu_seqlens.shape[0] - 1
    slot = torch.arange(length // size + sequences, device=cu_seqlens.device)
    sequence = torch.searchsorted(starts[1:].contiguous(), slot, right=True)
    own = sequence.clamp(max=sequences - 1)
    first = torch.where(sequence < sequences, ends[own] + (slot - starts[own]) * size, 0)
    stop = torch.where(sequence < sequences, torch.minimum(first + size, ends[own + 1]), 0)
    return torch.stack([sequence, first, stop], dim=1).int(), torch.stack([ends, starts]).int()


def span_arguments(cu_seqlens: Tensor | None, batch: int, length: int, size: int) -> tuple[int, dict[str, Any]]:
    """Cut packed sequences, or the rows of a batch `(B, T, ...)`, into spans for a kernel's `tokens_of_span`.

    Args:
        cu_seqlens: `(N + 1,)`; None for a batch.
        batch: B.
        length: T.
        size: Tokens per span.

    Returns:
        The number of spans, and the kernel's arguments that describe them.
    """
    if cu_seqlens is None:
        each = blocks(length, size)
        return each * batch, {"table": None, "bounds": None, "SPANS": each, "SEQUENCES": batch}
    table, ends = spans(cu_seqlens, length, size)
    return len(table), {"table": table, "bounds": ends, "SPANS": 0, "SEQUENCES": len(cu_seqlens) - 1}
