"""Causal linear attention and its gradient by blocks of tokens in torch, and the forms that need no blocks.

Blocks pass on one matrix S per head. The forward takes four products per block: the masked scores, the scores times
the values, the queries times S, and the update of S. The backward goes through the blocks forward, to recompute S,
and then in reverse, passing on the gradient of S. It stores nothing of size T C or T K V / C.

Inputs of 16 bits are computed in float32, since sums are as long as the sequence.

Shapes: `B` batch · `T` length · `H` heads · `K` key dim · `V` value dim · `R` = B H rows · `C` block.
"""

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional as F

from ..packed import bounds, run_each
from ..precision import compute_dtype, full_precision

_BLOCK = 64
"""Tokens per block. Larger blocks waste masked scores, smaller products run slower; the fastest on a CPU for heads of
64 to 256 numbers."""

_NORMED = 1 << 16
"""Numbers that are normed at a time on a CPU."""


def _blocks(length: int) -> list[slice]:
    return [slice(start, min(start + _BLOCK, length)) for start in range(0, length, _BLOCK)]


def _cached(x: Tensor) -> Iterator[slice]:
    """Cut tokens `(B, T, H, V)` into parts that stay in a CPU's cache while they are normed."""
    length = x.shape[1]
    step = max(1, _NORMED * length // max(1, x.numel())) if x.device.type == "cpu" else max(1, length)
    return (slice(start, min(start + step, length)) for start in range(0, length, step))


def _rows(*tensors: Tensor) -> Iterator[Tensor]:
    """Yield tensors as contiguous `(R, T, ·)` in the precision of the computation."""
    for x in tensors:
        batch, length, heads, width = x.shape
        yield x.transpose(1, 2).to(compute_dtype(x)).reshape(batch * heads, length, width)


def _unrows(x: Tensor, like: Tensor) -> Tensor:
    """Return to contiguous `(B, T, H, ·)`."""
    return x.unflatten(0, (like.shape[0], like.shape[2])).transpose(1, 2).contiguous()


def _start(state: Tensor | None, query: Tensor, value: Tensor) -> Tensor:
    """Return a copy of the first S as `(R, K, V)`."""
    if state is None:
        return query.new_zeros(query.shape[0], query.shape[2], value.shape[2])
    return state.flatten(0, 1).to(query.dtype, copy=True)


def _forward_alone(query: Tensor, key: Tensor, value: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor]:
    batch = query.shape[0]
    q, k, v = _rows(query, key, value)
    S = _start(state, q, v)
    output = torch.empty(v.shape, dtype=v.dtype, device=v.device)
    with full_precision(q.device):
        for at in _blocks(q.shape[1]):
            scores = torch.bmm(q[:, at], k[:, at].mT).tril_()
            torch.baddbmm(torch.bmm(q[:, at], S), scores, v[:, at], out=output[:, at])
            S.baddbmm_(k[:, at].mT, v[:, at])
    return _unrows(output, query), S.unflatten(0, (batch, query.shape[2]))


def forward(
    query: Tensor, key: Tensor, value: Tensor, state: Tensor | None, cu_seqlens: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return outputs and last state in the precision of the sums; not differentiable."""
    if cu_seqlens is None:
        return _forward_alone(query, key, value, state)
    output, last = run_each(_forward_alone, cu_seqlens, (query, key, value), state, states_out=1)
    return output, last


def _differentiate_alone(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, grad_state: Tensor, state: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return gradients of query, key, value and the first state.

    In each block, with D = tril(dO V^T) and A = tril(Q K^T):
    dQ = D K + dO S^T,  dK = D^T Q + V dS^T,  dV = A^T dO + K dS,  and in reverse dS <- dS + Q^T dO.
    """
    batch = query.shape[0]
    q, k, v, g = _rows(query, key, value, grad)
    S, dS = _start(state, q, v), _start(grad_state, q, v)
    d_q, d_k, d_v = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    blocks = _blocks(q.shape[1])
    with full_precision(q.device):
        for at in blocks:
            torch.bmm(g[:, at], S.mT, out=d_q[:, at])
            S.baddbmm_(k[:, at].mT, v[:, at])
        for at in reversed(blocks):
            D = torch.bmm(g[:, at], v[:, at].mT).tril_()
            A = torch.bmm(q[:, at], k[:, at].mT).tril_()
            d_q[:, at].baddbmm_(D, k[:, at])
            torch.baddbmm(torch.bmm(v[:, at], dS.mT), D.mT, q[:, at], out=d_k[:, at])
            torch.baddbmm(torch.bmm(k[:, at], dS), A.mT, g[:, at], out=d_v[:, at])
            dS.baddbmm_(q[:, at].mT, g[:, at])
    d_q, d_k, d_v = (_unrows(x, query).to(query.dtype) for x in (d_q, d_k, d_v))
    return d_q, d_k, d_v, dS.unflatten(0, (batch, query.shape[2]))


def backward(
    grad: Tensor,
    grad_state: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    state: Tensor | None,
    cu_seqlens: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return gradients of query, key, value and the first state."""
    if cu_seqlens is None:
        return _differentiate_alone(grad, query, key, value, grad_state, state)
    d_q, d_k, d_v, d_state = run_each(
        _differentiate_alone, cu_seqlens, (grad, query, key, value), grad_state, state, states_out=1
    )
    return d_q, d_k, d_v, d_state


def normed(output: Tensor, eps: float, gate: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Divide each head by its root mean square, in the precision of the sums, then gate it in `dtype`."""
    n = F.rms_norm(output, output.shape[-1:], eps=eps).to(dtype)
    return n if gate is None else n * F.silu(gate)


def forward_normed(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    gate: Tensor | None,
    state: Tensor | None,
    cu_seqlens: Tensor | None,
    eps: float,
    trained: bool,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Return outputs, last state and, if `trained`, n (with a gate) and 1 / rms(o)."""
    output, last = forward(query, key, value, state, cu_seqlens)
    # as in `normed`, but keeping what the backward needs
    y, scale = torch.empty_like(output, dtype=query.dtype), output.new_empty(output.shape[:3])
    kept = torch.empty_like(y) if trained and gate is not None else None
    for at in _cached(output):
        o = output[:, at]
        r = o.square().mean(-1).add_(eps).rsqrt_()
        n = (o * r[..., None]).to(y.dtype)
        scale[:, at] = r
        if kept is not None:
            kept[:, at] = n
        y[:, at] = n if gate is None else n * F.silu(gate[:, at])
    return y, last, kept, scale if trained else None


def backward_norm(grad: Tensor, n: Tensor, scale: Tensor, gate: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Return gradients of the outputs before norm and gate, and of the gate.

    dn = grad silu(g),  do = (dn - n mean(n dn)) / rms(o),  dg = grad n silu'(g)
    """
    d_o = torch.empty_like(n, dtype=gradient_dtype(n), memory_format=torch.contiguous_format)
    d_gate = None if gate is None else torch.empty_like(gate, memory_format=torch.contiguous_format)
    for at in _cached(n):
        d_n, wide_n = grad[:, at].to(scale.dtype), n[:, at].to(scale.dtype)
        if gate is not None and d_gate is not None:
            g = gate[:, at].to(scale.dtype)
            d_gate[:, at] = torch.ops.aten.silu_backward(d_n * wide_n, g)
            d_n = d_n * F.silu(g)
        d_o[:, at] = scale[:, at, :, None] * (d_n - wide_n * (wide_n * d_n).mean(-1, keepdim=True))
    return d_o, d_gate


def gradient_dtype(n: Tensor) -> torch.dtype:
    """Return the dtype of the gradient that the attention's backward reads."""
    return n.dtype if n.dtype == torch.bfloat16 else compute_dtype(n)


def step(query: Tensor, key: Tensor, value: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor]:
    """Advance by one token: `(B, 1, H, K)` and the state before to `(B, 1, H, V)` and the state after."""
    batch, _, heads, width = query.shape
    rows, columns, wide = batch * heads, value.shape[3], compute_dtype(query)
    q, k = query.to(wide).reshape(rows, 1, width), key.to(wide).reshape(rows, width, 1)
    v = value.to(wide).reshape(rows, 1, columns)
    with full_precision(query.device):
        S = torch.bmm(k, v) if state is None else torch.baddbmm(state.to(wide).reshape(rows, width, columns), k, v)
        output = torch.bmm(q, S)
    return output.view(batch, 1, heads, columns), S.view(batch, heads, width, columns)


def bidirectional(query: Tensor, key: Tensor, value: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    """Return Q (K^T V) of each sequence, `(B, T, H, V)`."""
    if cu_seqlens is not None:
        parts = bounds(cu_seqlens, query.shape[1])
        return torch.cat([bidirectional(query[:, at], key[:, at], value[:, at], None) for at in parts], dim=1)
    wide = compute_dtype(query)
    q, k, v = (x.to(wide).transpose(1, 2) for x in (query, key, value))
    with full_precision(query.device):
        return (q @ (k.mT @ v)).transpose(1, 2)
