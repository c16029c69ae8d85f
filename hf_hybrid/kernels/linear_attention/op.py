"""Causal linear attention as custom ops: alone, or followed by the norm and the gate."""

from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from ..dispatch import NAMESPACE, choose_backend, triton_if_chosen, wished_backend
from ..precision import compute_dtype
from . import torch_impl


def _triton(backend: str, query: Tensor, *others: Tensor | None) -> ModuleType | None:
    return triton_if_chosen("linear_attention", __package__, backend, (query, *others), lambda k: k.why_not(query))


@torch.library.custom_op(f"{NAMESPACE}::linear_attention", mutates_args=())
def linear_attention(
    query: Tensor, key: Tensor, value: Tensor, state: Tensor | None, cu_seqlens: Tensor | None, backend: str
) -> tuple[Tensor, Tensor]:
    """Return outputs and last state in the precision of the sums."""
    run = _triton(backend, query, key, value, state, cu_seqlens) or torch_impl
    return run.forward(query, key, value, state, cu_seqlens)


def _last_state(query: Tensor, value: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    sequences = query.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    return query.new_empty((sequences, *query.shape[2:], value.shape[3]), dtype=compute_dtype(query))


@linear_attention.register_fake
def _(query: Tensor, _key: Tensor, value: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    _state, cu_seqlens, _backend = rest
    output = torch.empty_like(value, dtype=compute_dtype(query), memory_format=torch.contiguous_format)
    return output, _last_state(query, value, cu_seqlens)


@torch.library.custom_op(f"{NAMESPACE}::linear_attention_backward", mutates_args=())
def linear_attention_backward(
    grad: Tensor,
    grad_state: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    state: Tensor | None,
    cu_seqlens: Tensor | None,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return gradients of query, key, value and the first state."""
    run = _triton(backend, query, key, value, state, cu_seqlens) or torch_impl
    return run.backward(grad, grad_state, query, key, value, state, cu_seqlens)


@linear_attention_backward.register_fake
def _(_grad: Tensor, grad_state: Tensor, *given: Any) -> tuple[Tensor, ...]:
    return tuple(torch.empty_like(x, memory_format=torch.contiguous_format) for x in (*given[:3], grad_state))


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    query, key, value, state, cu_seqlens, backend = inputs
    ctx.backend = wished_backend(backend)
    ctx.save_for_backward(query, key, value, state, cu_seqlens)


def _backward(ctx: Any, grad: Tensor, grad_state: Tensor) -> tuple[Tensor | None, ...]:
    query, key, value, state, cu_seqlens = ctx.saved_tensors
    d_q, d_k, d_v, d_state = linear_attention_backward(
        grad, grad_state, query, key, value, state, cu_seqlens, ctx.backend
    )
    return d_q, d_k, d_v, d_state.to(state.dtype) if ctx.needs_input_grad[3] else None, None, None


linear_attention.register_autograd(_backward, setup_context=_save)


@torch.library.custom_op(f"{NAMESPACE}::linear_attention_normed", mutates_args=())
def linear_attention_normed(
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
    """Return outputs, last state and, for the backward, n (if there is a gate) and 1 / rms(o); else empty tensors."""
    run = _triton(backend, query, key, value, gate, state, cu_seqlens) or torch_impl
    y, last, n, scale = run.forward_normed(query, key, value, gate, state, cu_seqlens, eps, trained)
    none = query.new_empty(0), query.new_empty(0, dtype=compute_dtype(query))
    return y, last, none[0] if n is None else n, none[1] if scale is None else scale


@linear_attention_normed.register_fake
def _(query: Tensor, _key: Tensor, value: Tensor, *given: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    gate, _, cu_seqlens, _, trained, _ = given
    y, n = (torch.empty_like(value, memory_format=torch.contiguous_format) for _ in range(2))
    scale = query.new_empty(value.shape[:3] if trained else (0,), dtype=compute_dtype(query))
    kept = n if trained and gate is not None else query.new_empty(0)
    return y, _last_state(query, value, cu_seqlens), kept, scale


@torch.library.custom_op(f"{NAMESPACE}::linear_attention_normed_backward", mutates_args=())
def linear_attention_normed_backward(
    grad: Tensor, n: Tensor, scale: Tensor, gate: Tensor | None, backend: str
) -> tuple[Tensor, Tensor]:
    """Return gradients of the outputs before norm and gate, and of the gate (empty without one)."""
    run = _triton(backend, n, scale, grad, gate) or torch_impl
    d_o, d_gate = run.backward_norm(grad, n, scale, gate)
    return d_o, n.new_empty(0) if d_gate is None else d_gate


@linear_attention_normed_backward.register_fake
def _(grad: Tensor, n: Tensor, scale: Tensor, gate: Tensor | None, backend: str) -> tuple[Tensor, Tensor]:
    d_o = torch.empty_like(n, dtype=torch_impl.gradient_dtype(n), memory_format=torch.contiguous_format)
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
    d_o, d_gate = linear_attention_normed_backward(grad, n, scale, gate, ctx.backend)
    d_q, d_k, d_v, d_state = linear_attention_backward(
        d_o, grad_state, query, key, value, state, cu_seqlens, ctx.backend
    )
    gradients = (d_q, d_k, d_v, None if gate is None else d_gate)
    return *gradients, d_state.to(state.dtype) if ctx.needs_input_grad[4] else None, *(None,) * 4


linear_attention_normed.register_autograd(_backward_normed, setup_context=_save_normed)


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
    """Compute the causal form by blocks, normed and gated, without checks."""
    given = [x for x in (query, key, value, gate, state) if x is not None]
    trained = torch.is_grad_enabled() and any(x.requires_grad for x in given)
    y, last, _, _ = linear_attention_normed(query, key, value, gate, state, cu_seqlens, eps, trained, backend)
    return y, last


def bidirectional(query: Tensor, key: Tensor, value: Tensor, cu_seqlens: Tensor | None, backend: str) -> Tensor:
    """Compute the form that is not causal, always in torch."""
    if not torch.compiler.is_compiling():
        why_not = "the form that is not causal is two matrix products, which always run in torch"
        choose_backend("linear_attention", backend, [query, key, value], lambda: why_not)
    return torch_impl.bidirectional(query, key, value, cu_seqlens)
