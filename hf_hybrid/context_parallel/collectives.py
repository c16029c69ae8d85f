"""What processes send each other: one differentiable exchange, and three patterns of it.

Every collective is an all-to-all of bytes in which each process sends to each other one exactly what this one needs,
as both know from the layout. Its gradient is the same exchange in the other direction, and sums are taken in the order
of the ranks, so results do not vary between runs.

No process may wait for a collective that another one never starts. Hence the rule that all operations here follow: the
result of an exchange depends on what was put in, and the operation's output on that result, on every process, also one
that sends or receives nothing. Then all processes record the same exchanges, and autograd, which visits nodes in the
reverse order of their creation, runs them backward in the same order. Gradient checkpointing recomputes a forward when
something that it stored is first asked for: an exchange stores an empty tensor and asks for it before it sends
anything, so processes also agree on when.
"""

import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from .faults import named_faults
from .shards import Shards, Span


@dataclass
class Sent:
    """What this process has sent to others: bytes, and the number of collectives."""

    bytes: int = 0
    collectives: int = 0


_counts: list[Sent] = []


@contextmanager
def count_sent() -> Iterator[Sent]:
    """Count what this process sends inside the ``with`` block, layouts aside; a backward counts where it runs."""
    sent = Sent()
    _counts.append(sent)
    try:
        yield sent
    finally:
        _counts.remove(sent)


class Form(NamedTuple):
    """Shape and dtype of a tensor that is to come."""

    shape: tuple[int, ...]
    dtype: torch.dtype


def _as_bytes(x: Tensor) -> Tensor:
    x = torch.view_as_real(x.resolve_conj()) if x.is_complex() else x.resolve_neg()
    return x.contiguous().view(-1).view(torch.uint8)


def _from_bytes(x: Tensor, form: Form) -> Tensor:
    real = form.dtype.to_real() if form.dtype.is_complex else form.dtype
    x = x if x.storage_offset() % real.itemsize == 0 else x.clone()
    if real != form.dtype:
        return torch.view_as_complex(x.view(real).view(*form.shape, 2))
    return x.view(real).view(form.shape)


def _size(form: Form) -> int:
    return torch.Size(form.shape).numel() * form.dtype.itemsize


def _swap(
    shards: Shards, outgoing: list[list[Tensor]], incoming: list[list[Form]], device: torch.device
) -> list[list[Tensor]]:
    """Send the tensors for each process, and return those from each, whose forms are known."""
    sent = [sum(x.numel() * x.dtype.itemsize for x in tensors) for tensors in outgoing]
    sizes = [[_size(form) for form in forms] for forms in incoming]
    for count in _counts:
        count.bytes += sum(sent)
        count.collectives += 1
    messages = [_as_bytes(x) for tensors in outgoing for x in tensors]
    buffer = torch.cat([torch.empty(0, dtype=torch.uint8, device=device), *messages])
    received = buffer.new_empty(sum(map(sum, sizes)))
    with named_faults(shards.group):
        dist.all_to_all_single(received, buffer, [sum(of_rank) for of_rank in sizes], sent, group=shards.group)
    parts = iter(received.split([size for of_rank in sizes for size in of_rank]))
    return [[_from_bytes(next(parts), form) for form in forms] for forms in incoming]


class _Exchange(torch.autograd.Function):
    """Pass `kept` tensors on, send the others and return what comes; the backward sends gradients back."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, shards: Shards, kept: int, destinations: list[int], incoming: list[list[Form]], *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        outgoing: list[list[Tensor]] = [[] for _ in shards.lengths]
        for destination, x in zip(destinations, tensors[kept:], strict=True):
            outgoing[destination].append(x)
        ctx.shards, ctx.kept, ctx.destinations = shards, kept, destinations
        ctx.forms = [Form(tuple(x.shape), x.dtype) for x in tensors[kept:]]
        ctx.origins = [(rank, form) for rank, forms in enumerate(incoming) for form in forms]
        received = [x for xs in _swap(shards, outgoing, incoming, tensors[0].device) for x in xs]
        passed = [x.view_as(x) for x in tensors[:kept]]
        # so that every process recomputes a checkpointed forward up to here, and before the backward's exchange
        ctx.save_for_backward(tensors[0].new_empty(0))
        ctx.mark_non_differentiable(*(x for x in (*passed, *received) if not _differentiable(x.dtype)))
        return *passed, *received

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        _ = ctx.saved_tensors
        outgoing: list[list[Tensor]] = [[] for _ in ctx.shards.lengths]
        for (rank, form), grad in zip(ctx.origins, grads[ctx.kept :], strict=True):
            if _differentiable(form.dtype):
                outgoing[rank].append(grad)
        incoming: list[list[Form]] = [[] for _ in ctx.shards.lengths]
        for destination, form in zip(ctx.destinations, ctx.forms, strict=True):
            if _differentiable(form.dtype):
                incoming[destination].append(form)
        returned = [iter(xs) for xs in _swap(ctx.shards, outgoing, incoming, grads[0].device)]
        back = [
            next(returned[destination]) if _differentiable(form.dtype) else None
            for destination, form in zip(ctx.destinations, ctx.forms, strict=True)
        ]
        return None, None, None, None, *grads[: ctx.kept], *back


def _differentiable(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point or dtype.is_complex


def exchange(
    shards: Shards, kept: Sequence[Tensor], outgoing: list[list[Tensor]], incoming: list[list[Form]]
) -> tuple[list[Tensor], list[list[Tensor]]]:
    """Send tensors to each process and return what each sends; one collective, and one in the backward.

    Args:
        shards: The layout.
        kept: At least one tensor, passed on. Every tensor whose gradient may cross processes must be made of these, or
            be one of them, and the caller's output must depend on what comes back of them.
        outgoing: Tensors for each process, by rank; none for the own.
        incoming: Forms of the tensors from each process, by rank.

    Returns:
        The kept tensors, and the tensors from each process. Differentiable once.
    """
    destinations = [rank for rank, tensors in enumerate(outgoing) for _ in tensors]
    flat = [x for tensors in outgoing for x in tensors]
    results = iter(_Exchange.apply(shards, len(kept), destinations, incoming, *kept, *flat))
    passed = list(itertools.islice(results, len(kept)))
    return passed, [list(itertools.islice(results, len(forms))) for forms in incoming]


def fetch(shards: Shards, spans: Sequence[Span], *tensors: Tensor, dim: int = 1) -> list[Tensor]:
    """Give every process the tokens of a span: the halo exchange, with as many neighbours as a span asks for.

    A process sends each token to each process whose span holds it, but for itself.

    Args:
        shards: The layout.
        spans: The tokens that each process wants, by rank, the same list on all processes.
        *tensors: Own tokens in dimension `dim`.
        dim: The dimension of tokens.

    Returns:
        For each tensor the tokens of the own span. Differentiable once.
    """
    wanted = spans[shards.rank]
    outgoing: list[list[Tensor]] = [[] for _ in spans]
    incoming: list[list[Form]] = [[] for _ in spans]
    for rank, span in enumerate(spans):
        sends, comes = shards.own.common(span), shards.spans[rank].common(wanted)
        if rank == shards.rank:
            continue
        if sends.length:
            outgoing[rank] = [x.narrow(dim, sends.start - shards.own.start, sends.length) for x in tensors]
        if comes.length:
            incoming[rank] = [Form((*x.shape[:dim], comes.length, *x.shape[dim + 1 :]), x.dtype) for x in tensors]
    kept, received = exchange(shards, tensors, outgoing, incoming)
    own = shards.own.common(wanted)
    start = own.start - shards.own.start if own.length else 0
    received[shards.rank] = [x.narrow(dim, start, own.length) for x in kept]
    return [torch.cat(parts, dim=dim) for parts in zip(*(xs for xs in received if xs), strict=True)]


def regroup(shards: Shards, parts: list[tuple[Tensor, ...]], dim: int, sizes: Sequence[int]) -> list[Tensor]:
    """Send part r of each tensor to rank r, and join what comes, of these sizes in dimension `dim`."""
    own = [of_tensor[shards.rank] for of_tensor in parts]
    outgoing = [[] if rank == shards.rank else [of_tensor[rank] for of_tensor in parts] for rank in range(shards.size)]
    incoming: list[list[Form]] = []
    for rank, size in enumerate(sizes):
        forms = [Form((*x.shape[:dim], size, *x.shape[dim + 1 :]), x.dtype) for x in own]
        incoming.append([] if rank == shards.rank else forms)
    kept, received = exchange(shards, own, outgoing, incoming)
    received[shards.rank] = kept
    return [torch.cat(pieces, dim=dim) for pieces in zip(*received, strict=True)]


def divide(shards: Shards, *tensors: Tensor, tokens: int, width: int) -> list[Tensor]:
    """Turn own tokens of all channels into all tokens of own channels.

    Args:
        shards: The layout.
        *tensors: Own tokens of all channels.
        tokens: The dimension of tokens.
        width: The dimension of channels, or of heads.

    Returns:
        All tokens of the channels `shards.share(...)`. Differentiable once.
    """
    parts = [x.split(shards.shares(x.shape[width]), dim=width) for x in tensors]
    return regroup(shards, parts, tokens, shards.lengths)


def undivide(shards: Shards, x: Tensor, total: int, *, tokens: int, width: int) -> Tensor:
    """Invert `divide`, for results with `total` channels."""
    return regroup(shards, [x.split(shards.lengths, dim=tokens)], width, shards.shares(total))[0]


def relay(shards: Shards, forward: Tensor | None, backward: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Send a state to the later processes that hold tokens of the same sequence, and another one to the earlier ones.

    Args:
        shards: The layout.
        forward: For later processes; the same shape on all. None sends nothing.
        backward: For earlier processes; the same shape on all. None sends nothing.

    Returns:
        The states from earlier and from later processes, both in the order of ranks, `(count, ...)`; without
        `forward` or `backward` these are empty. Differentiable once.
    """
    given = [x for x in (forward, backward) if x is not None]
    outgoing: list[list[Tensor]] = [[] for _ in shards.lengths]
    incoming: list[list[Form]] = [[] for _ in shards.lengths]
    for rank in range(shards.size):
        if rank == shards.rank or not shards.joined(rank, shards.rank):
            continue
        sends, comes = (forward, backward) if rank > shards.rank else (backward, forward)
        outgoing[rank] = [] if sends is None else [sends]
        incoming[rank] = [] if comes is None else [Form(tuple(comes.shape), comes.dtype)]
    kept, received = exchange(shards, given, outgoing, incoming)
    # empty, but it makes what follows depend on the exchange
    nothing = [x[None][:0] for x in kept]
    earlier = [x[None] for xs in received[: shards.rank] for x in xs]
    later = [x[None] for xs in received[shards.rank + 1 :] for x in xs]
    return torch.cat([*earlier, nothing[0]]), torch.cat([*later, nothing[-1]])


def gather(shards: Shards, x: Tensor) -> Tensor:
    """Return a small tensor of all processes, `(R, ...)`, without a gradient; the same shape on all."""
    others = [rank for rank in range(shards.size) if rank != shards.rank]
    outgoing = [[x] if rank in others else [] for rank in range(shards.size)]
    incoming = [[Form(tuple(x.shape), x.dtype)] if rank in others else [] for rank in range(shards.size)]
    received = _swap(shards, outgoing, incoming, x.device)
    received[shards.rank] = [x]
    return torch.stack([y for ys in received for y in ys])


def nothing(shape: Sequence[int], like: Tensor, *inputs: Tensor | None) -> Tensor:
    """Return an empty tensor of this shape and of `like`'s dtype that depends on all inputs, so that a backward runs.

    It is what an operation returns for a shard without tokens: their gradients are zeros.
    """
    total = like.new_zeros(shape)
    for x in inputs:
        if x is not None and _differentiable(x.dtype):
            x = torch.view_as_real(x) if x.is_complex() else x
            total = total + x.flatten()[:0].sum().to(like.dtype)
    return total
