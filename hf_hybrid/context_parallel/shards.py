"""How a sequence is divided among processes: contiguous shards, rank after rank, of any length.

A layout is made once per forward, by one collective of 24 bytes per pair of processes. Whatever an operation sends
afterwards, every process knows from the layout what the others send and want, so that no operation communicates
lengths.

T length of the sequence · R processes
"""

import bisect
import itertools
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from ..kernels.packed import bounds
from .faults import from_all


class Span(NamedTuple):
    """Tokens `start` to `stop` - 1 of the sequence."""

    start: int
    stop: int

    @property
    def length(self) -> int:
        """Number of tokens."""
        return self.stop - self.start

    def common(self, other: "Span") -> "Span":
        """Return the tokens of both, an empty span if there are none."""
        start = max(self.start, other.start)
        return Span(start, max(start, min(self.stop, other.stop)))


@dataclass(frozen=True, eq=False)
class Shards:
    """Which tokens each process holds, and where packed sequences begin.

    Attributes:
        lengths: Tokens of each process, in the order of their ranks in the group; some may be 0.
        rank: This process's rank in the group.
        group: The processes; None for the default group.
        ends: `cu_seqlens` of packed sequences, counted over all processes, as a tuple; None if every row is one
            sequence.
    """

    lengths: tuple[int, ...]
    rank: int
    group: dist.ProcessGroup | None = None
    ends: tuple[int, ...] | None = None

    @property
    def size(self) -> int:
        """R."""
        return len(self.lengths)

    @cached_property
    def spans(self) -> tuple[Span, ...]:
        """The tokens of each process."""
        stops = itertools.accumulate(self.lengths)
        return tuple(Span(stop - length, stop) for stop, length in zip(stops, self.lengths, strict=True))

    @property
    def own(self) -> Span:
        """The tokens of this process."""
        return self.spans[self.rank]

    @property
    def length(self) -> int:
        """T."""
        return self.spans[-1].stop

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence."""
        return self.length if self.ends is None else max(b - a for a, b in itertools.pairwise(self.ends))

    def of_windows(self, window: int) -> "Shards":
        """Return which process has the end of each complete window of so many tokens."""
        counts = tuple(own.stop // window - own.start // window for own in self.spans)
        return Shards(counts, self.rank, self.group)

    def check(self, x: Tensor, name: str, dim: int = 1) -> None:
        """Raise ValueError unless a tensor holds the tokens of this process.

        Raises:
            ValueError: Its length is another, or sequences are packed and its batch is not 1.
        """
        if x.dim() <= dim or x.shape[dim] != self.own.length:
            raise ValueError(
                f"{name} must hold the {self.own.length} tokens of rank {self.rank} in dimension {dim}; "
                f"got {tuple(x.shape)}"
            )
        if self.ends is not None and x.shape[0] != 1:
            raise ValueError(f"{name} must have a batch of 1 with packed sequences; got {x.shape[0]}")

    def sequence(self, token: int) -> Span:
        """Return the sequence that holds a token."""
        if self.ends is None:
            return Span(0, self.length)
        after = bisect.bisect_right(self.ends, token)
        return Span(self.ends[after - 1], self.ends[after])

    def head(self, rank: int) -> Span:
        """Return the tokens of a process that belong to the sequence of its first token."""
        own = self.spans[rank]
        return own.common(self.sequence(own.start)) if own.length else own

    def tail(self, rank: int) -> Span:
        """Return the tokens of a process that belong to the sequence of its last token."""
        own = self.spans[rank]
        return own.common(self.sequence(own.stop - 1)) if own.length else own

    def joined(self, rank: int, other: int) -> bool:
        """Return whether two processes hold tokens of one sequence."""
        first, second = self.spans[min(rank, other)], self.spans[max(rank, other)]
        return min(first.length, second.length) > 0 and self.sequence(second.start).start < first.stop

    def reach(self, before: int, after: int) -> list[Span]:
        """Return for each process the tokens within a reach of its own, in the same sequences.

        Args:
            before: Tokens seen before a token.
            after: Tokens seen after it.
        """
        reached = []
        for own in self.spans:
            if own.length:
                start = max(self.sequence(own.start).start, own.start - before)
                own = Span(start, min(self.sequence(own.stop - 1).stop, own.stop + after))
            reached.append(own)
        return reached

    def bounds_within(self, span: Span, device: torch.device) -> Tensor | None:
        """Return `cu_seqlens` of the packed sequences' parts in a span that is not empty; None if none are packed."""
        if self.ends is None:
            return None
        inside = [end - span.start for end in self.ends if span.start < end < span.stop]
        return torch.tensor([*dict.fromkeys([0, *inside, span.length])], dtype=torch.int32, device=device)

    def shares(self, width: int) -> list[int]:
        """Divide `width` channels or heads among the processes: how many each has, the first ones one more."""
        return [width // self.size + (rank < width % self.size) for rank in range(self.size)]

    def share(self, width: int) -> slice:
        """Return this process's part of `width` channels or heads."""
        shares = self.shares(width)
        start = sum(shares[: self.rank])
        return slice(start, start + shares[self.rank])


def group_of(mesh: DeviceMesh | dist.ProcessGroup | None) -> dist.ProcessGroup | None:
    """Return the group of a mesh with one dimension, or the group itself.

    Raises:
        ValueError: The mesh has several dimensions.
    """
    if not isinstance(mesh, DeviceMesh):
        return mesh
    if mesh.ndim != 1:
        raise ValueError(
            f"mesh must have one dimension, such as mesh['cp']; got {mesh.ndim} dimensions {mesh.mesh_dim_names}"
        )
    return mesh.get_group()


def make_shards(
    length: int,
    mesh: DeviceMesh | dist.ProcessGroup | None = None,
    *,
    cu_seqlens: Tensor | None = None,
    rows: int = 1,
    device: torch.device | str = "cpu",
) -> Shards:
    """Make the layout of a sequence from the length that each process holds; all processes of the group call it.

    Each process sends 24 bytes to each other one. The host waits for them, and reads the bounds of packed sequences.

    Args:
        length: Tokens of this process; 0 or more.
        mesh: A mesh of one dimension, or a group; None for the default group.
        cu_seqlens: Bounds of N sequences packed into one row, `(N + 1,)`, see `kernels.packed`; they count the tokens
            of all processes, and are the same on all.
        rows: Sequences of the batch, the same on all processes.
        device: Where the backend of the group communicates.

    Raises:
        ValueError: A length is negative, no process has a token, the bounds do not rise from 0 to T, or they or the
            rows differ between processes; every process raises it.
        ProcessLost: A process has ended, or did not answer within the timeout of the group.
    """
    group = group_of(mesh)
    ends = None if cu_seqlens is None else tuple(cu_seqlens.tolist())
    own = torch.tensor([length, hash(ends) if ends is not None else 0, rows], dtype=torch.int64, device=device)
    lengths, fingerprints, counts = from_all(own, group).T.tolist()
    for other, count in enumerate(counts):
        if count != counts[0]:
            raise ValueError(
                f"a batch must have the same rows on all ranks; rank {other} has {count} and rank 0 has {counts[0]}"
            )
    if min(lengths) < 0 or sum(lengths) == 0:
        raise ValueError(f"length must be 0 or more on every rank, and positive on one; got {lengths}")
    for other, fingerprint in enumerate(fingerprints):
        if fingerprint != fingerprints[0]:
            raise ValueError(
                f"cu_seqlens must be the same on all ranks; that of rank {other} differs from that of rank 0"
            )
    if cu_seqlens is not None:
        bounds(cu_seqlens, sum(lengths))
    return Shards(tuple(lengths), dist.get_rank(group), group, ends)
