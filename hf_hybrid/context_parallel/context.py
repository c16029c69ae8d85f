"""The block of code in which models divide their sequences, and what they need around the operations.

B batch · T length · T_r tokens of this process · R processes
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from .collectives import Form, exchange, fetch, gather
from .shards import Shards, Span, group_of

_groups: list[dist.ProcessGroup] = []


@contextmanager
def context_parallel(mesh: DeviceMesh | dist.ProcessGroup) -> Iterator[None]:
    """Divide the sequences of all models called inside the ``with`` block among the processes of a mesh.

    Each process passes its own tokens, `own_part` of a batch or any contiguous shards in the order of the ranks, and
    gets the outputs of its own tokens. The loss is that of the complete batch on every process. Its gradients are this
    process's parts: summed over the mesh, they are those of one process. A backward may run after the block.

    Args:
        mesh: A mesh of one dimension, such as ``mesh["cp"]``, or a group. With one process nothing is divided.

    Raises:
        ValueError: The mesh has several dimensions, or the block is inside another one.
    """
    if _groups:
        raise ValueError("context_parallel must not be inside another context_parallel")
    group = group_of(mesh)
    assert group is not None
    _groups.append(group)
    try:
        yield
    finally:
        _groups.pop()


def active_group() -> dist.ProcessGroup | None:
    """Return the group of the surrounding `context_parallel` block; None outside, or if it has one process."""
    return _groups[-1] if _groups and dist.get_world_size(_groups[-1]) > 1 else None


def own_part(x: Tensor, mesh: DeviceMesh | dist.ProcessGroup, dim: int = 1) -> Tensor:
    """Return this process's shard of a tensor that all processes hold, as even as its length allows.

    The first processes have ceil(T / R) tokens each, the last ones what is left, maybe none.

    Args:
        x: `(B, T, ...)`.
        mesh: A mesh of one dimension, or a group.
        dim: The dimension of tokens.
    """
    own = own_span(x.shape[dim], mesh)
    return x.narrow(dim, own.start, own.length).contiguous()


def own_span(length: int, mesh: DeviceMesh | dist.ProcessGroup) -> Span:
    """Return which of `length` tokens `own_part` gives to this process."""
    group = group_of(mesh)
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    part = -(-length // size)
    return Span(min(rank * part, length), min((rank + 1) * part, length))


def next_tokens(labels: Tensor, shards: Shards, ignore_index: int) -> Tensor:
    """Return each own token's successor, the first of the next process for the last: 8 B bytes sent.

    Args:
        labels: `(B, T_r)`.
        shards: The layout.
        ignore_index: What follows the last token of the sequence.

    Returns:
        `(B, T_r)`.
    """
    shards.check(labels, "labels")
    spans = [Span(own.start, min(own.stop + 1, shards.length)) if own.length else own for own in shards.spans]
    (longer,) = fetch(shards, spans, labels)
    if spans[shards.rank].stop == shards.own.stop:
        longer = torch.cat([longer, longer.new_full((len(labels), 1), ignore_index)], dim=1)
    return longer[:, 1:].contiguous() if shards.own.length else labels


def previous_tokens(labels: Tensor, shards: Shards, first: int) -> Tensor:
    """Return the token before each own one, the last of the process before for the first: 8 B bytes sent.

    Args:
        labels: `(B, T_r)`.
        shards: The layout.
        first: What precedes the first token of the sequence.

    Returns:
        `(B, T_r)`.
    """
    shards.check(labels, "labels")
    spans = [Span(max(0, own.start - 1), own.stop) if own.length else own for own in shards.spans]
    (longer,) = fetch(shards, spans, labels)
    if not shards.own.length:
        return labels
    if shards.own.start == 0:
        longer = torch.cat([longer.new_full((len(labels), 1), first), longer], dim=1)
    return longer[:, :-1].contiguous()


class _Total(torch.autograd.Function):
    """Sum over processes; each one's gradient is that of its own addend."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, shards: Shards) -> Tensor:  # type: ignore[override]
        return gather(shards, x).sum(0)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return grad, None


def add_up(x: Tensor, shards: Shards) -> Tensor:
    """Add a small tensor up over the processes; unlike in `total`, what all do with the sum adds to the gradient."""
    others = [rank for rank in range(shards.size) if rank != shards.rank]
    outgoing = [[x] if rank in others else [] for rank in range(shards.size)]
    incoming = [[Form(tuple(x.shape), x.dtype)] if rank in others else [] for rank in range(shards.size)]
    kept, received = exchange(shards, [x], outgoing, incoming)
    received[shards.rank] = kept
    return torch.stack([y for ys in received for y in ys]).sum(0)


def total(x: Tensor, shards: Shards) -> Tensor:
    """Add a small tensor up over the processes, the same bits on all; the gradient is that of the own addend."""
    return _Total.apply(x, shards)
