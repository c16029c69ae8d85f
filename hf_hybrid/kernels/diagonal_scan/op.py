"""The diagonal recurrence as a custom op with a differentiable backward."""

from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from ..dispatch import NAMESPACE, triton_if_chosen, wished_backend
from . import torch_impl


def _triton(backend: str, b: Tensor, *others: Tensor | None) -> ModuleType | None:
    return triton_if_chosen("diagonal_scan", __package__, backend, (b, *others), lambda k: k.why_not(b))


@torch.library.custom_op(f"{NAMESPACE}::diagonal_scan", mutates_args=())
def diagonal_scan(
    a: Tensor,
    b: Tensor,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    reverse: bool,
    transposed: bool,
    backend: str,
) -> tuple[Tensor, Tensor]:
    """Return all states and the last: x = a c + b, c <- x; if `transposed`, x = c + b, c <- a x; c = initial_state."""
    run = _triton(backend, b, a, initial_state, cu_seqlens) or torch_impl
    return run.forward(a, b, initial_state, cu_seqlens, reverse, transposed)


@diagonal_scan.register_fake
def _(
    a: Tensor, b: Tensor, initial_state: Tensor | None, cu_seqlens: Tensor | None, *_others: Any
) -> tuple[Tensor, Tensor]:
    sequences = b.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    return torch.empty_like(b, memory_format=torch.contiguous_format), a.new_empty(sequences, b.shape[2])


@torch.library.custom_op(f"{NAMESPACE}::diagonal_scan_backward", mutates_args=())
def diagonal_scan_backward(
    grad: Tensor,
    grad_final: Tensor,
    a: Tensor,
    states: Tensor,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    reverse: bool,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return gradients of b, the initial state and a; Triton needs one pass."""
    run = _triton(backend, grad, a, initial_state, cu_seqlens) or torch_impl
    return run.backward(grad, grad_final, a, states, initial_state, cu_seqlens, reverse)


@diagonal_scan_backward.register_fake
def _(grad: Tensor, grad_final: Tensor, a: Tensor, *_others: Any) -> tuple[Tensor, ...]:
    return tuple(torch.empty_like(x, memory_format=torch.contiguous_format) for x in (grad, grad_final, a))


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    a, _, initial_state, cu_seqlens, ctx.reverse, ctx.transposed, backend = inputs
    ctx.backend = wished_backend(backend)
    keeps_states = ctx.needs_input_grad[0]
    ctx.save_for_backward(a, output[0] if keeps_states else None, initial_state if keeps_states else None, cu_seqlens)


def _backward(ctx: Any, grad: Tensor, grad_final: Tensor) -> tuple[Tensor | None, ...]:
    """Run the transposed recurrence, or the recurrence if `transposed`, and compute the gradient of a.

    d[t] = grad[t] + c, c <- conj(a) d[t];  da = sum over t of conj(x[t-1]) d[t], or of conj(x[t]) d[t-1] transposed.
    """
    a, states, initial_state, cu_seqlens = ctx.saved_tensors
    d_a = None
    # second derivatives need ops that are differentiable
    if ctx.needs_input_grad[0] and not ctx.transposed and not torch.is_grad_enabled():
        options = (cu_seqlens, ctx.reverse, ctx.backend)
        d, d_initial, d_a = diagonal_scan_backward(grad, grad_final, a, states, initial_state, *options)
    else:
        settings = (cu_seqlens, not ctx.reverse, not ctx.transposed, ctx.backend)
        d, d_initial = diagonal_scan(a.conj_physical(), grad, grad_final, *settings)
        if ctx.needs_input_grad[0] and ctx.transposed:
            d_a = torch_impl.pair(d, states, grad_final, cu_seqlens, not ctx.reverse, a.dtype).conj_physical()
        elif ctx.needs_input_grad[0]:
            d_a = torch_impl.pair(states, d, initial_state, cu_seqlens, ctx.reverse, a.dtype)
    return d_a, d, d_initial if ctx.needs_input_grad[2] else None, *(None,) * 4


diagonal_scan.register_autograd(_backward, setup_context=_save)
