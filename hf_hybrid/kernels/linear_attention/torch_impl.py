"""Causal linear attention by blocks of tokens, as an opaque op with its own backward; the other forms in plain torch.

Between blocks goes one matrix S per head. Each block costs four products in the forward: the scores, masked; the
scores times the values; the queries times S; and what the block adds to S. The backward walks the blocks once forward,
for S again, and once in reverse, where the gradient of S is handed on in the same manner. Nothing of size T C or
T K V / C is ever stored.

Rows of 16 bits are computed in float32: their sums are as long as the sequence.

Shapes: `B` batch · `T` length · `H` heads · `K` key dim · `V` value dim · `R` = B H rows · `C` block.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ..dispatch import NAMESPACE, choose_backend, wished_backend
from ..packed import bounds, run_each
from ..precision import compute_dtype, full_precision

_BLOCK = 64
"""Tokens per block. Masked scores, half of them wasted, grow with it; smaller products run slower. For heads of 64 to
256 numbers on a CPU, nothing is faster."""


def _runs_on_triton(backend: str, query: Tensor, *others: Tensor | None) -> bool:
    """Choose the backend, in the op, where no tracer looks, because the choice reads the environment and logs."""

    def why_not() -> str | None:
        from .triton_kernels import why_not

        return why_not(query)

    return choose_backend("linear_attention", backend, [query, *others], why_not) == "triton"


def _blocks(length: int) -> list[slice]:
    return [slice(start, min(start + _BLOCK, length)) for start in range(0, length, _BLOCK)]


def _rows(*tensors: Tensor) -> Iterator[Tensor]:
    """Heads beside the batch, `(R, T, ·)`, contiguous, in the precision computed in."""
    for x in tensors:
        batch, length, heads, width = x.shape
        yield x.transpose(1, 2).to(compute_dtype(x)).reshape(batch * heads, length, width)


def _unrows(x: Tensor, like: Tensor) -> Tensor:
    """Back to `(B, T, H, ·)`, contiguous."""
    return x.unflatten(0, (like.shape[0], like.shape[2])).transpose(1, 2).contiguous()


def _start(state: Tensor | None, query: Tensor, value: Tensor) -> Tensor:
    """A copy of the first S as rows, `(R, K, V)`."""
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


@torch.library.custom_op(f"{NAMESPACE}::linear_attention", mutates_args=())
def _forward(
    query: Tensor, key: Tensor, value: Tensor, state: Tensor | None, cu_seqlens: Tensor | None, backend: str
) -> tuple[Tensor, Tensor]:
    if _runs_on_triton(backend, query, key, value, state, cu_seqlens):
        from . import triton_kernels

        return triton_kernels.forward(query, key, value, state, cu_seqlens)
    if cu_seqlens is None:
        return _forward_alone(query, key, value, state)
    output, last = run_each(_forward_alone, cu_seqlens, (query, key, value), state, states_out=1)
    return output, last


def _sequences(x: Tensor, cu_seqlens: Tensor | None) -> int:
    return x.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1


@_forward.register_fake
def _(
    query: Tensor, key: Tensor, value: Tensor, state: Tensor | None, cu_seqlens: Tensor | None, backend: str
) -> tuple[Tensor, Tensor]:
    wide = torch.promote_types(query.dtype, torch.float32)
    S = query.new_empty((_sequences(query, cu_seqlens), *query.shape[2:], value.shape[3]), dtype=wide)
    return torch.empty_like(value, dtype=wide, memory_format=torch.contiguous_format), S


def _differentiate_alone(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, grad_state: Tensor, state: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of query, key, value and the first state, with D = tril(dO V^T), A = tril(Q K^T) in each block:

    dQ = D K + dO S^T,  dK = D^T Q + V dS^T,  dV = A^T dO + K dS,  and backwards dS <- dS + Q^T dO.
    """  # noqa: D415
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


@torch.library.custom_op(f"{NAMESPACE}::linear_attention_backward", mutates_args=())
def _differentiate(
    grad: Tensor,
    grad_state: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    state: Tensor | None,
    cu_seqlens: Tensor | None,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    if _runs_on_triton(backend, query, key, value, state, cu_seqlens):
        from . import triton_kernels

        return triton_kernels.backward(grad, grad_state, query, key, value, state, cu_seqlens)
    if cu_seqlens is None:
        return _differentiate_alone(grad, query, key, value, grad_state, state)
    d_q, d_k, d_v, d_state = run_each(
        _differentiate_alone, cu_seqlens, (grad, query, key, value), grad_state, state, states_out=1
    )
    return d_q, d_k, d_v, d_state


@_differentiate.register_fake
def _(
    grad: Tensor,
    grad_state: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    state: Tensor | None,
    cu_seqlens: Tensor | None,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    like = [torch.empty_like(x, memory_format=torch.contiguous_format) for x in (query, key, value)]
    return like[0], like[1], like[2], torch.empty_like(grad_state, memory_format=torch.contiguous_format)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    query, key, value, state, cu_seqlens, backend = inputs
    ctx.backend = wished_backend(backend)
    ctx.save_for_backward(query, key, value, state, cu_seqlens)


def _backward(ctx: Any, grad: Tensor, grad_state: Tensor) -> tuple[Tensor | None, ...]:
    query, key, value, state, cu_seqlens = ctx.saved_tensors
    d_q, d_k, d_v, d_state = _differentiate(grad, grad_state, query, key, value, state, cu_seqlens, ctx.backend)
    return d_q, d_k, d_v, d_state.to(state.dtype) if ctx.needs_input_grad[3] else None, None, None


_forward.register_autograd(_backward, setup_context=_save)


def normed(output: Tensor, eps: float, gate: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Divide each head by its root mean square, in the precision of the sums, then gate it in `dtype`."""
    n = F.rms_norm(output, output.shape[-1:], eps=eps).to(dtype)
    return n if gate is None else n * F.silu(gate)


@torch.library.custom_op(f"{NAMESPACE}::linear_attention_normed", mutates_args=())
def _forward_normed(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    gate: Tensor | None,
    state: Tensor | None,
    cu_seqlens: Tensor | None,
    eps: float,
    trained: bool,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Outputs and the last state; for the backward, n if there is a gate behind it, and 1 / rms(o), else empty."""
    none = query.new_empty(0), query.new_empty(0, dtype=compute_dtype(query))
    if _runs_on_triton(backend, query, key, value, gate, state, cu_seqlens):
        from . import triton_kernels

        y, last, n, scale = triton_kernels.forward_normed(query, key, value, gate, state, cu_seqlens, eps, trained)
        return y, last, none[0] if n is None else n, none[1] if scale is None else scale
    output, last = _forward(query, key, value, state, cu_seqlens, "torch")
    # as `normed` does it, but with what its backward needs
    scale = output.pow(2).mean(-1, keepdim=True).add(eps).rsqrt()
    n = (output * scale).to(query.dtype)
    y, kept = (n, none[0]) if gate is None else (n * F.silu(gate), n)
    return y, last, *((kept, scale[..., 0]) if trained else none)


@_forward_normed.register_fake
def _(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    gate: Tensor | None,
    state: Tensor | None,
    cu_seqlens: Tensor | None,
    eps: float,
    trained: bool,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    wide = torch.promote_types(query.dtype, torch.float32)
    last = query.new_empty((_sequences(query, cu_seqlens), *query.shape[2:], value.shape[3]), dtype=wide)
    y, n = (torch.empty_like(value, memory_format=torch.contiguous_format) for _ in range(2))
    scale = query.new_empty(value.shape[:3] if trained else (0,), dtype=wide)
    return y, last, n if trained and gate is not None else query.new_empty(0), scale


@torch.library.custom_op(f"{NAMESPACE}::linear_attention_normed_backward", mutates_args=())
def _differentiate_norm(
    grad: Tensor, n: Tensor, scale: Tensor, gate: Tensor | None, backend: str
) -> tuple[Tensor, Tensor]:
    """Gradients of the outputs before norm and gate, and of the gate, empty if there is none.

    dn = grad silu(g),  do = (dn - n mean(n dn)) / rms(o),  dg = grad n silu'(g)
    """
    if _runs_on_triton(backend, n, scale, grad, gate):
        from . import triton_kernels

        d_o, d_gate = triton_kernels.backward_norm(grad, n, scale, gate)
        return d_o, n.new_empty(0) if d_gate is None else d_gate
    d_n, wide_n = grad.to(scale.dtype), n.to(scale.dtype)
    d_gate = n.new_empty(0)
    if gate is not None:
        g = gate.to(scale.dtype)
        opened = torch.sigmoid(g)
        d_gate = (d_n * wide_n * opened * (1 + g * (1 - opened))).to(gate.dtype)
        d_n = d_n * g * opened
    d_o = scale[..., None] * (d_n - wide_n * (wide_n * d_n).mean(-1, keepdim=True))
    # the dtype in which the attention's own backward takes it
    return d_o.to(_gradient_dtype(n)), d_gate


def _gradient_dtype(n: Tensor) -> torch.dtype:
    return n.dtype if n.dtype == torch.bfloat16 else compute_dtype(n)


@_differentiate_norm.register_fake
def _(grad: Tensor, n: Tensor, scale: Tensor, gate: Tensor | None, backend: str) -> tuple[Tensor, Tensor]:
    d_o = torch.empty_like(n, dtype=_gradient_dtype(n), memory_format=torch.contiguous_format)
    like = n.new_empty(0) if gate is None else torch.empty_like(gate, memory_format=torch.contiguous_format)
    return d_o, like


def _save_normed(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    query, key, value, gate, state, cu_seqlens, _, _, backend = inputs
    y, _, n, scale = output
    ctx.mark_non_differentiable(n, scale)
    ctx.backend = wished_backend(backend)
    ctx.save_for_backward(query, key, value, gate, state, cu_seqlens, y if gate is None else n, scale)


def _backward_normed(ctx: Any, grad: Tensor, grad_state: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
    query, key, value, gate, state, cu_seqlens, n, scale = ctx.saved_tensors
    d_o, d_gate = _differentiate_norm(grad, n, scale, gate, ctx.backend)
    d_q, d_k, d_v, d_state = _differentiate(d_o, grad_state, query, key, value, state, cu_seqlens, ctx.backend)
    gradients = (d_q, d_k, d_v, None if gate is None else d_gate)
    return *gradients, d_state.to(state.dtype) if ctx.needs_input_grad[4] else None, *(None,) * 4


_forward_normed.register_autograd(_backward_normed, setup_context=_save_normed)


def causal_normed(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    gate: Tensor | None,
    state: Tensor | None,
    cu_seqlens: Tensor | None,
    eps: float,
    backend: str,
) -> tuple[Tensor, Tensor]:
    """The causal form by blocks, normed and gated; arguments as for the op, not checked again."""
    given = [x for x in (query, key, value, gate, state) if x is not None]
    trained = torch.is_grad_enabled() and any(x.requires_grad for x in given)
    y, last, _, _ = _forward_normed(query, key, value, gate, state, cu_seqlens, eps, trained, backend)
    return y, last


def causal(
    query: Tensor, key: Tensor, value: Tensor, state: Tensor | None, cu_seqlens: Tensor | None, backend: str
) -> tuple[Tensor, Tensor]:
    """The causal form by blocks; arguments as for the op, not checked again."""
    output, last = _forward(query, key, value, state, cu_seqlens, backend)
    return output, last


def step(query: Tensor, key: Tensor, value: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor]:
    """One token of the recurrence: `(B, 1, H, K)` and the state before, to `(B, 1, H, V)` and the state after."""
    wide = compute_dtype(query)
    q, k, v = (x[:, 0].to(wide) for x in (query, key, value))
    S = k[..., :, None] * v[..., None, :]
    if state is not None:
        S = torch.add(state.to(wide), S)
    with full_precision(query.device):
        return (q[..., None, :] @ S).movedim(2, 1), S


def _why_not_bidirectional() -> str | None:
    return "the form that is not causal is two matrix products, which torch runs on every device"


def bidirectional(query: Tensor, key: Tensor, value: Tensor, cu_seqlens: Tensor | None, backend: str) -> Tensor:
    """Q (K^T V): two products, `(B, T, H, V)`, for each packed sequence."""
    if not torch.compiler.is_compiling():
        choose_backend("linear_attention", backend, [query, key, value], _why_not_bidirectional)
    if cu_seqlens is not None:
        parts = bounds(cu_seqlens, query.shape[1])
        alone = [bidirectional(query[:, at], key[:, at], value[:, at], None, backend) for at in parts]
        return torch.cat(alone, dim=1)
    wide = compute_dtype(query)
    q, k, v = (x.to(wide).transpose(1, 2) for x in (query, key, value))
    with full_precision(query.device):
        return (q @ (k.mT @ v)).transpose(1, 2)
