"""Attention over a divided sequence: windows and chunks with their neighbours' keys, linear attention with its sums.

B batch · T_r tokens of this process · H heads · K key dim · V value dim · N packed sequences · C chunk
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ..kernels import laplace_attention as laplace_kernel
from ..kernels import linear_attention as linear_kernel
from ..kernels import local_attention as local_kernel
from ..kernels.checks import check_positive
from ..kernels.dispatch import choose_backend
from ..kernels.linear_attention.torch_impl import normed
from ..kernels.local_attention.settings import check_neighbourhood
from ..kernels.packed import run_each, to_rows
from ..kernels.precision import compute_dtype, full_precision
from ..kernels.ssm_kernel.discrete import recomputed
from .collectives import fetch, gather, nothing, relay
from .shards import Shards, Span


def local_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    shards: Shards,
    *,
    bias: Tensor | None = None,
    radius: int | None = None,
    chunk_size: int | None = None,
    causal: bool = False,
    attention_mask: Tensor | None = None,
    scale: float | None = None,
    dropout: float = 0.0,
    backend: str = "auto",
) -> Tensor:
    """Attend from own tokens to their neighbourhoods: `kernels.local_attention` after a halo exchange.

    Each process gets the keys and values within reach of its own tokens, from as many neighbours as hold them and
    never from another sequence, and runs the kernel on both; queries of the halo are zeros and their outputs dropped.
    Biases go by offset, so they do not notice where shards end.

    It sends (H (K + V) numbers and, with a mask, one) per token of a halo; for a window and shards longer than the
    radius that is `radius` tokens to each side that reads them. The backward sends the gradients of the same keys and
    values. Chunks with a mask also send B int64 to each other process, where the grid of each row starts.

    Args:
        query: `(B, T_r, H, K)`.
        key: `(B, T_r, H, K)`.
        value: `(B, T_r, H, V)`.
        shards: The layout, with the bounds of packed sequences.
        bias: See `kernels.local_attention`; the gradient is this process's part of a sum.
        radius: See `kernels.local_attention`.
        chunk_size: See `kernels.local_attention`; the grid starts at each row's first kept token on any process.
        causal: Whether to hide later keys.
        attention_mask: `(B, T_r)`, nonzero = keep; with `chunk_size` only if no sequences are packed.
        scale: See `kernels.local_attention`.
        dropout: See `kernels.local_attention`; each process draws its own.
        backend: See `hf_hybrid.kernels.dispatch`.

    Returns:
        `(B, T_r, H, V)` in query's dtype. Differentiable once.

    Raises:
        ValueError: A shape, dtype or number does not fit.
    """
    _check_own(shards, query=query, key=key, value=value, attention_mask=attention_mask)
    check_neighbourhood(radius, chunk_size)
    options = {"radius": radius, "chunk_size": chunk_size, "causal": causal, "scale": scale, "dropout": dropout}
    mask = None if attention_mask is None else attention_mask != 0
    return _attend_locally(query, key, value, mask, bias, shards, {**options, "backend": backend})


def _check_own(shards: Shards, **tensors: Tensor | None) -> None:
    for name, x in tensors.items():
        if x is not None:
            shards.check(x, name)


def _attend_locally(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    bias: Tensor | None,
    shards: Shards,
    options: dict[str, Any],
) -> Tensor:
    radius, chunk_size, causal = options["radius"], options["chunk_size"], options["causal"]
    first = None
    if chunk_size is None:
        spans = shards.reach(radius, 0 if causal else radius)
    else:
        first = _start_of_grid(shards, mask)
        spans = _chunk_spans(shards, chunk_size, causal, first)
    key, value, *masks = fetch(shards, spans, key, value, *(() if mask is None else (mask,)))
    mask = masks[0] if masks else None
    own, span = shards.own, spans[shards.rank]
    if not own.length:
        return nothing(value.shape, query, query, key, value, bias)
    before, after = own.start - span.start, span.stop - own.stop
    query = F.pad(query, (0, 0, 0, 0, before, after))
    if first is not None and mask is not None:
        query, key, value, mask = _with_grid(chunk_size, (span.start - first) % chunk_size, query, key, value, mask)
        before = query.shape[1] - after - own.length
    cu_seqlens = shards.bounds_within(span, query.device)
    output = local_kernel(query, key, value, bias=bias, attention_mask=mask, cu_seqlens=cu_seqlens, **options)
    return output[:, before : before + own.length]


def _start_of_grid(shards: Shards, mask: Tensor | None) -> Tensor | None:
    """Return where each row's chunks are counted from, see `first_kept`; None without a mask."""
    if mask is None:
        return None
    if shards.ends is not None:
        raise ValueError("attention_mask must be None with chunks in packed sequences, which have no padding")
    return first_kept(shards, mask)


def first_kept(shards: Shards, mask: Tensor) -> Tensor:
    """Return each row's first kept token on any process, `(B,)`, T if none is kept: 8 B bytes sent to each other one.

    Args:
        shards: The layout.
        mask: `(B, T_r)`, boolean, True = keep.
    """
    position = torch.arange(shards.own.start, shards.own.stop, device=mask.device)
    own = torch.where(mask, position, shards.length)
    own = torch.cat([own, own.new_full((len(mask), 1), shards.length)], dim=1).amin(1)
    return gather(shards, own).amin(0)


def _chunk_spans(shards: Shards, chunk_size: int, causal: bool, first: Tensor | None) -> list[Span]:
    """Return the chunks of each process's tokens, whose grid starts at `first` in each row: the host reads it."""
    starts = {0}
    if first is not None:
        starts = {start % chunk_size for start in first.tolist() if start < shards.length} or starts
    spans = []
    for own in shards.spans:
        if own.length:
            begin, end = shards.sequence(own.start), shards.sequence(own.stop - 1)
            before = max((own.start - begin.start - start) % chunk_size for start in starts)
            after = max((end.start + start - own.stop) % chunk_size for start in starts)
            own = Span(max(begin.start, own.start - before), own.stop if causal else min(end.stop, own.stop + after))
        spans.append(own)
    return spans


def _with_grid(
    chunk_size: int, start: Tensor, query: Tensor, key: Tensor, value: Tensor, mask: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Put a chunk of zeros before the tokens whose only kept token makes the kernel's grid start where it should.

    Args:
        chunk_size: C.
        start: Position of the first token in its chunk, `(B,)`.
        query: `(B, T, H, K)`.
        key: `(B, T, H, K)`.
        value: `(B, T, H, V)`.
        mask: `(B, T)`, boolean.

    Returns:
        The tensors with 2 C - 1 more tokens: in each row the kept one begins a chunk that ends before the first token.
    """
    more = 2 * chunk_size - 1
    query, key, value = (F.pad(x, (0, 0, 0, 0, more, 0)) for x in (query, key, value))
    position = torch.arange(more, device=mask.device)
    grid = (more - chunk_size - start[:, None]) % chunk_size
    return query, key, value, torch.cat([position == grid, mask], dim=1)


def own_positions(shards: Shards, mask: Tensor | None, device: torch.device) -> Tensor:
    """Return the positions of own tokens in their sequences, `(B or 1, T_r)`.

    Args:
        shards: The layout.
        mask: `(B, T_r)`, 1 = keep; then kept tokens are counted, for which each process sends 8 B bytes to each other.
        device: Of the result.
    """
    if mask is not None:
        kept = mask.to(torch.bool)
        earlier = gather(shards, kept.sum(1))[: shards.rank].sum(0)
        return (kept.cumsum(1) + earlier[:, None] - 1).clamp_min(0)
    positions = torch.arange(shards.own.start, shards.own.stop, device=device)
    if shards.ends is not None:
        ends = torch.tensor(shards.ends, device=device)
        positions = positions - ends[torch.searchsorted(ends, positions, right=True) - 1]
    return positions[None]


def sees_others(
    shards: Shards, radius: int, mask: Tensor | None, chunk_size: int | None, device: torch.device
) -> Tensor:
    """Return whether causal own queries see an earlier kept token, `(B or 1, T_r)`.

    Args:
        shards: The layout.
        radius: Tokens that a query sees before its own, at least 1 unless there are chunks.
        mask: `(B, T_r)`, 1 = keep; None keeps all. With a mask one byte per token of the halo is sent.
        chunk_size: Tokens per chunk; None for a window.
        device: Of the result.

    Raises:
        ValueError: There are a mask and chunks, whose grid a mask may move.
    """
    if mask is None:
        position = own_positions(shards, None, device)
        return (position if chunk_size is None else position % chunk_size) > 0
    if chunk_size is not None:
        raise ValueError("include_self must be True with chunks and attention_mask for a divided sequence")
    spans = shards.reach(radius, 0)
    (kept,) = fetch(shards, spans, mask.to(torch.bool))
    own = shards.own
    if not own.length:
        return mask.to(torch.bool)
    before = own.start - spans[shards.rank].start
    counts = F.pad(kept.long().cumsum(1), (1, 0))
    token = torch.arange(before, before + own.length, device=kept.device)
    return counts[:, token] > counts[:, (token - radius).clamp_min(0)]


def laplace_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    shards: Shards,
    *,
    causal: bool = False,
    attention_mask: Tensor | None = None,
    chunk_size: int | None = None,
    dropout: float = 0.0,
    backend: str = "auto",
) -> Tensor:
    """Weight values with the Laplace function of their scores: `kernels.laplace_attention` after a halo exchange.

    Without chunks a token reads its complete sequence, or what precedes it: each process then holds these keys and
    values, O(T) numbers, and computes O(T_r T) scores. With chunks it gets the rest of its first and last chunk.

    It sends H (K + V) numbers and a byte per token that another process reads, and with a mask B int64 to each other
    process.

    Args:
        query: `(B, T_r, H, K)`.
        key: `(B, T_r, H, K)` in query's dtype.
        value: `(B, T_r, H, V)` in query's dtype.
        shards: The layout, with the bounds of packed sequences.
        causal: Whether to hide later keys.
        attention_mask: `(B, T_r)`, nonzero = keep; None if sequences are packed.
        chunk_size: C; no chunks when None. The grid starts at each row's first kept token on any process.
        dropout: Probability of dropping a weight; each process draws its own.
        backend: See `hf_hybrid.kernels.dispatch`.

    Returns:
        `(B, T_r, H, V)` in query's dtype; 0 for queries without keys. Differentiable once.

    Raises:
        ValueError: A shape, dtype or number does not fit.
    """
    _check_own(shards, query=query, key=key, value=value, attention_mask=attention_mask)
    check_positive(chunk_size=chunk_size)
    if attention_mask is not None and shards.ends is not None:
        raise ValueError("attention_mask must be None with packed sequences, which have no padding")
    options = {"causal": causal, "chunk_size": chunk_size, "dropout": dropout, "backend": backend}
    mask = None if attention_mask is None else attention_mask != 0
    return _attend_by_laplace(query, key, value, mask, shards, options)


def _attend_by_laplace(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, shards: Shards, options: dict[str, Any]
) -> Tensor:
    first, causal = None, options["causal"]
    if options["chunk_size"] is None:
        spans = shards.reach(shards.length, 0 if causal else shards.length)
    else:
        first = _start_of_grid(shards, mask)
        spans = _chunk_spans(shards, options["chunk_size"], causal, first)
    key, value, *masks = fetch(shards, spans, key, value, *(() if mask is None else (mask,)))
    own, span = shards.own, spans[shards.rank]
    if not own.length:
        return nothing(value.shape, query, query, key, value)
    # the kernel takes the queries to be the last of the keys' tokens
    before = own.start - span.start
    query = F.pad(query, (0, 0, 0, 0, 0, span.stop - own.stop))
    cu_seqlens = shards.bounds_within(span, query.device)
    starts = torch.zeros(len(key) if cu_seqlens is None else len(cu_seqlens) - 1, dtype=torch.int64, device=key.device)
    if cu_seqlens is None:
        starts = (starts if first is None else first) - span.start
        mask = masks[0] if masks else None
        return laplace_kernel(query, key, value, attention_mask=mask, first=starts, **options)[:, : own.length]
    query = F.pad(query, (0, 0, 0, 0, before, 0))
    (query, kept), (key, _), (value, _) = (to_rows(x, cu_seqlens) for x in (query, key, value))
    output = laplace_kernel(query, key, value, attention_mask=kept, first=starts, **options)
    return output[kept][None, before : before + own.length]


def linear_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    shards: Shards,
    *,
    causal: bool = True,
    norm_eps: float | None = None,
    gate: Tensor | None = None,
    backend: str = "auto",
) -> Tensor:
    """Sum values weighted with products of keys and queries: `kernels.linear_attention`, its sums from all processes.

    Causal: the sum S of k^T v over own tokens goes to the later processes, and the kernel begins with the sum of those
    that came. Otherwise S goes to all, and each query reads the total. The sum before the kernel costs O(T_r K V); a
    kernel pass from zeros and a correction would cost as much, but could not be normed in the kernel.

    Each process sends B H K V numbers, in float32 or float64, to each (later) process that holds tokens of the same
    sequence, whatever T is; the backward sends as many to the earlier ones.

    Args:
        query: `(B, T_r, H, K)`.
        key: `(B, T_r, H, K)`; zeros hide a token.
        value: `(B, T_r, H, V)`.
        shards: The layout, with the bounds of packed sequences.
        causal: Whether to hide later tokens.
        norm_eps: See `kernels.linear_attention`.
        gate: `(B, T_r, H, V)`; none when None. Only with the norm.
        backend: See `hf_hybrid.kernels.dispatch`.

    Returns:
        `(B, T_r, H, V)` in the dtype of `kernels.linear_attention`. Differentiable once.

    Raises:
        ValueError: A shape or dtype does not fit.
    """
    _check_own(shards, query=query, key=key, value=value, gate=gate)
    if gate is not None and (norm_eps is None or gate.shape != value.shape):
        raise ValueError(f"gate must be {tuple(value.shape)} like value, and None when norm_eps is None")
    before, after, own = _sums_of_others(key, value, shards, causal)
    if not shards.own.length:
        like = query if norm_eps is not None else query.to(compute_dtype(query))
        return nothing(value.shape, like, query, key, value, gate, before, after)
    cu_seqlens = shards.bounds_within(shards.own, query.device)
    state = before.new_zeros(len(before) if cu_seqlens is None else len(cu_seqlens) - 1, *before.shape[1:])
    state = _add_to_row(state, 0, before)
    if after is None:
        options: dict[str, Any] = {"norm_eps": norm_eps, "gate": gate, "cu_seqlens": cu_seqlens, "backend": backend}
        return linear_kernel(query, key, value, state=state, **options)[0]
    state = _add_to_row(state, -1, after)
    why_not = "the form that is not causal is matrix products, which always run in torch"
    choose_backend("linear_attention", backend, [query, key, value], lambda: why_not)
    if cu_seqlens is None:
        output = _read_sums(query, own + state)
    else:
        (output,) = run_each(_read_own_sums, cu_seqlens, (query, key, value), state, states_out=0)
    return output if norm_eps is None else normed(output, norm_eps, gate, query.dtype)


def _sums_of_others(key: Tensor, value: Tensor, shards: Shards, causal: bool) -> tuple[Tensor, Tensor | None, Tensor]:
    """Return the sums that earlier and, unless causal, later processes add to the own ones, `(B, H, K, V)`, and these.

    With packed sequences they belong to the first, the last and the last sequence of own tokens.
    """
    head, tail = (_within(shards, span) for span in (shards.head(shards.rank), shards.tail(shards.rank)))
    own = recomputed(_sum_products, key[:, tail], value[:, tail])
    if causal:
        return relay(shards, own)[0].sum(0), None, own
    before, after = relay(shards, own, recomputed(_sum_products, key[:, head], value[:, head]))
    return before.sum(0), after.sum(0), own


def _within(shards: Shards, span: Span) -> slice:
    return slice(span.start - shards.own.start, span.stop - shards.own.start)


def _add_to_row(state: Tensor, row: int, x: Tensor) -> Tensor:
    """Add the states of a batch, or that of one packed sequence to its row."""
    if len(x) == len(state):
        return state + x
    row %= len(state)
    return state + F.pad(x, (0, 0) * (x.dim() - 1) + (row, len(state) - 1 - row))


def _sum_products(key: Tensor, value: Tensor) -> Tensor:
    """Sum k^T v over tokens, `(B, H, K, V)` in the precision of sums."""
    wide = compute_dtype(key)
    with full_precision(key.device):
        return torch.einsum("bthk,bthv->bhkv", key.to(wide), value.to(wide))


def _read_sums(query: Tensor, sums: Tensor) -> Tensor:
    """Return q S, `(B, T, H, V)`."""
    with full_precision(query.device):
        return torch.einsum("bthk,bhkv->bthv", query.to(sums.dtype), sums)


def _read_own_sums(query: Tensor, key: Tensor, value: Tensor, others: Tensor) -> tuple[Tensor]:
    """Return q (S + S of other processes) of one packed sequence."""
    return (_read_sums(query, recomputed(_sum_products, key, value) + others),)
