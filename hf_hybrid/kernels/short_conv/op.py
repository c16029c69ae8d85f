"""The short convolution as a custom op whose backward stores only the inputs."""

from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from ..dispatch import NAMESPACE, triton_if_chosen, wished_backend
from ..precision import compute_dtype
from . import torch_impl


def _triton(backend: str, u: Tensor, kernel: Tensor, *others: Tensor | None) -> ModuleType | None:
    return triton_if_chosen("short_conv", __package__, backend, (u, kernel, *others), lambda k: k.why_not(u, kernel))


@torch.library.custom_op(f"{NAMESPACE}::short_conv", mutates_args=())
def short_conv(
    u: Tensor,
    kernel: Tensor,
    bias: Tensor | None,
    state: Tensor | None,
    cu_seqlens: Tensor | None,
    ahead: int,
    silu: bool,
    backend: str,
) -> Tensor:
    """Convolve and activate; `ahead` is the number of taps on later tokens."""
    run = _triton(backend, u, kernel, bias, state, cu_seqlens) or torch_impl
    return run.forward(u, kernel, bias, state, cu_seqlens, ahead, silu)


@short_conv.register_fake
def _(u: Tensor, *_others: Any) -> Tensor:
    return torch.empty_like(u, memory_format=torch.contiguous_format)


@torch.library.custom_op(f"{NAMESPACE}::short_conv_backward", mutates_args=())
def short_conv_backward(
    grad: Tensor,
    u: Tensor,
    kernel: Tensor,
    bias: Tensor | None,
    state: Tensor | None,
    cu_seqlens: Tensor | None,
    ahead: int,
    silu: bool,
    trained: bool,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return gradients of u, the taps, the bias and the state (empty without a state).

    Unless `trained`, those of taps and bias may be zeros.
    """
    run = _triton(backend, u, kernel, bias, state, cu_seqlens) or torch_impl
    d_u, d_kernel, d_bias, d_state = run.backward(grad, u, kernel, bias, state, cu_seqlens, ahead, silu, trained)
    return d_u, d_kernel, d_bias, u.new_empty(0) if d_state is None else d_state


@short_conv_backward.register_fake
def _(
    grad: Tensor, u: Tensor, kernel: Tensor, bias: Tensor | None, state: Tensor | None, *_others: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    like = torch.empty_like(u, memory_format=torch.contiguous_format)
    taps = torch.empty_like(kernel, memory_format=torch.contiguous_format)
    d_bias = kernel.new_empty(kernel.shape[0], dtype=compute_dtype(u))
    d_state = u.new_empty(0) if state is None else torch.empty_like(state, memory_format=torch.contiguous_format)
    return like, taps, d_bias, d_state


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    u, kernel, bias, state, cu_seqlens, ctx.ahead, ctx.silu, backend = inputs
    ctx.backend = wished_backend(backend)
    ctx.save_for_backward(u, kernel, bias, state, cu_seqlens)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    u, kernel, bias, state, cu_seqlens = ctx.saved_tensors
    _, wants_kernel, wants_bias, wants_state = ctx.needs_input_grad[:4]
    trained = wants_kernel or wants_bias
    d_u, d_kernel, d_bias, d_state = short_conv_backward(
        grad, u, kernel, bias, state, cu_seqlens, ctx.ahead, ctx.silu, trained, ctx.backend
    )
    grad_bias = d_bias.to(bias.dtype) if bias is not None and wants_bias else None
    return d_u, d_kernel if wants_kernel else None, grad_bias, d_state if wants_state else None, *(None,) * 4


short_conv.register_autograd(_backward, setup_context=_setup_context)
