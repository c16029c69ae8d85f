"""Causal linear attention and its gradient by blocks of tokens in torch, and the forms that need no blocks.

Blocks pass on one matrix S per head. The forward takes four products per block: the masked scores, the scores times
the values, the queries times S, and the update of S. The backward goes through the blocks forward, to recompute S,
and then in reverse, passing on the gradient of S. A product is that of a group of blocks, whose matrices S are sums
of their updates. Nothing of size T C or T K V / C is stored.

Products of bfloat16 have such operands where that is fast, as on a GPU: scores and S are rounded before they are
multiplied, and so are a block's part of S and both parts of an output before they are added. S itself, whose sums are
as long as the sequence, and outputs are added up in float32. float16 has fewer exponents than S needs, and is computed
in float32.

Shapes: `B` batch · `T` length · `H` heads · `K` key dim · `V` value dim · `R` = B H rows · `C` block · `n` blocks.
"""

from collections.abc import Iterator
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn import functional as F

from ..packed import bounds, run_each
from ..precision import compute_dtype, full_precision, operand_dtype

_BLOCK = 64
"""Tokens per block. Larger blocks waste masked scores, smaller products run slower; the fastest on a CPU for heads of
64 to 256 numbers."""

_GROUP = {"cpu": 2**18, "cuda": 2**25}
"""Numbers of the largest matrices of a group of blocks."""

_NORMED = 1 << 16
"""Numbers that are normed at a time on a CPU."""


def _cached(x: Tensor) -> Iterator[slice]:
    """Cut tokens `(B, T, H, V)` into parts that stay in a CPU's cache while they are normed."""
    length = x.shape[1]
    step = max(1, _NORMED * length // max(1, x.numel())) if x.device.type == "cpu" else max(1, length)
    return (slice(start, min(start + step, length)) for start in range(0, length, step))


def _product_dtype(x: Tensor) -> torch.dtype:
    """Return the dtype of products of such a tensor."""
    return operand_dtype(x) if x.dtype == torch.bfloat16 else compute_dtype(x)


def _blocks(*tensors: Tensor) -> Iterator[Tensor]:
    """Yield tensors as contiguous blocks, `(n, R, C, ·)`, in the dtype of the products; zeros fill the last."""
    dtype = _product_dtype(tensors[0])
    for x in tensors:
        batch, length, heads, width = x.shape
        size = min(_BLOCK, max(1, length))
        number, ragged = -(-length // size), -length % size
        tokens = F.pad(x, (0, 0, 0, 0, 0, ragged)) if ragged else x
        blocks = x.new_empty(number, batch, heads, size, width, dtype=dtype)
        blocks.copy_(tokens.unflatten(1, (number, size)).permute(1, 0, 3, 2, 4))
        yield blocks.flatten(1, 2)


def _unblocked(blocks: Tensor, like: Tensor, dtype: torch.dtype) -> Tensor:
    """Return to contiguous `(B, T, H, ·)`."""
    batch, length, heads, _ = like.shape
    number, _, size, width = blocks.shape
    x = blocks.new_empty(batch, number, size, heads, width, dtype=dtype)
    x.copy_(blocks.unflatten(1, (batch, heads)).permute(1, 0, 3, 2, 4))
    return x.flatten(1, 2)[:, :length].contiguous()


def _groups(q: Tensor, v: Tensor) -> list[slice]:
    """Cut blocks into groups: products of many are faster, but are to stay in a CPU's cache."""
    number, rows, size, width = q.shape
    largest = max(size, width) * max(size, v.shape[3])
    step = max(1, _GROUP.get(q.device.type, _GROUP["cuda"]) // max(1, rows * largest))
    return [slice(start, min(start + step, number)) for start in range(0, number, step)]


def _start(state: Tensor | None, q: Tensor, v: Tensor) -> Tensor:
    """Return the first S as `(R, K, V)`."""
    if state is None:
        return q.new_zeros(q.shape[1], q.shape[3], v.shape[3], dtype=compute_dtype(q))
    return state.flatten(0, 1).to(compute_dtype(q))


def _passed(first: Tensor, a: Tensor, b: Tensor, *, back: bool = False) -> Tensor:
    """Pass on a matrix through the blocks of a group, adding ``a^T b`` of each: `(n + 1, R, K, V)` with the first.

    Args:
        first: `(R, K, V)`.
        a: `(n, R, C, K)`.
        b: `(n, R, C, V)`.
        back: From the last block to the first one.
    """
    states = first.new_empty(len(a) + 1, *first.shape)
    states[-1 if back else 0] = first
    added = states[:-1] if back else states[1:]
    factors = a.flatten(0, 1).mT, b.flatten(0, 1)
    if a.dtype == first.dtype:
        torch.bmm(*factors, out=added.flatten(0, 1))
    else:
        added.flatten(0, 1).copy_(torch.bmm(*factors))
    ordered = states.unbind()[:: -1 if back else 1]
    for last, state in pairwise(ordered):
        state += last
    return states


def _forward_alone(query: Tensor, key: Tensor, value: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor]:
    q, k, v = _blocks(query, key, value)
    S = _start(state, q, v)
    output = torch.empty_like(v, dtype=S.dtype)
    with full_precision(q.device):
        for at in _groups(q, v):
            states = _passed(S, k[at], v[at])
            before = states[:-1].to(q.dtype)
            queries, keys, values, before = (x.flatten(0, 1) for x in (q[at], k[at], v[at], before))
            scores = torch.bmm(queries, keys.mT).tril_()
            here = output[at].flatten(0, 1)
            if here.dtype == q.dtype:
                torch.baddbmm(torch.bmm(queries, before), scores, values, out=here)
            else:
                here.copy_(torch.bmm(queries, before)).add_(torch.bmm(scores, values))
            S = states[-1]
    last = S.unflatten(0, (query.shape[0], query.shape[2])).clone()
    return _unblocked(output, query, output.dtype), last


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
    q, k, v, g = _blocks(query, key, value, grad)
    S, dS = _start(state, q, v), _start(grad_state, q, v)
    d_q, d_k, d_v = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    groups = _groups(q, v)
    with full_precision(q.device):
        for at in groups:
            states = _passed(S, k[at], v[at])
            before = states[:-1].to(q.dtype)
            torch.bmm(g[at].flatten(0, 1), before.flatten(0, 1).mT, out=d_q[at].flatten(0, 1))
            S = states[-1]
        for at in reversed(groups):
            states = _passed(dS, q[at], g[at], back=True)
            after = states[1:].to(q.dtype)
            queries, keys, values, grads, after = (x.flatten(0, 1) for x in (q[at], k[at], v[at], g[at], after))
            D = torch.bmm(grads, values.mT).tril_()
            A = torch.bmm(queries, keys.mT).tril_()
            d_q[at].flatten(0, 1).baddbmm_(D, keys)
            torch.baddbmm(torch.bmm(values, after.mT), D.mT, queries, out=d_k[at].flatten(0, 1))
            torch.baddbmm(torch.bmm(keys, after), A.mT, grads, out=d_v[at].flatten(0, 1))
            dS = states[0]
    d_q, d_k, d_v = (_unblocked(x, query, query.dtype) for x in (d_q, d_k, d_v))
    return d_q, d_k, d_v, dS.unflatten(0, (query.shape[0], query.shape[2])).clone()


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
    dtype = _product_dtype(query)
    q, k, v = (x.to(dtype).transpose(1, 2) for x in (query, key, value))
    with full_precision(query.device):
        return (q @ (k.mT @ v)).transpose(1, 2).to(compute_dtype(query))
