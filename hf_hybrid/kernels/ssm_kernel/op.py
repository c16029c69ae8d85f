"""The sums of S4's generating function as a custom op whose backward stores only the inputs."""

from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from ..dispatch import NAMESPACE, triton_if_chosen, wished_backend
from . import torch_impl


def triton(backend: str, x: Tensor, dtype: torch.dtype, algorithm: str | None) -> ModuleType | None:
    """Return the Triton kernels if they run for taps of a dtype on a tensor's device."""
    return triton_if_chosen("s4_kernel", __package__, backend, [x], lambda k: k.why_not(dtype, algorithm))


@torch.library.custom_op(f"{NAMESPACE}::s4_cauchy", mutates_args=())
def s4_cauchy(
    C: Tensor, B: Tensor, P: Tensor, w: Tensor, rate: Tensor, length: int, tile: int, dtype: torch.dtype, backend: str
) -> Tensor:
    """Return the taps of a few channels, `(C, H, L)`, from Ct and 2 / dt of `cauchy.truncated`; all tensors are wide.

    Torch computes in float64, in tiles, and rounds once; Triton computes in float32.
    """
    run = triton(backend, C, dtype, "cauchy") or torch_impl
    return run.forward(C, B, P, w, rate, length, tile, dtype)


@s4_cauchy.register_fake
def _(C: Tensor, *rest: Any) -> Tensor:
    *_, length, _tile, dtype, _backend = rest
    return C.new_empty(*C.shape[:2], length, dtype=dtype)


@torch.library.custom_op(f"{NAMESPACE}::s4_cauchy_backward", mutates_args=())
def s4_cauchy_backward(
    grad: Tensor, C: Tensor, B: Tensor, P: Tensor, w: Tensor, rate: Tensor, tile: int, backend: str
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return gradients of `s4_cauchy`'s tensors."""
    run = triton(backend, C, grad.dtype, "cauchy") or torch_impl
    return run.backward(grad, C, B, P, w, rate, tile)


@s4_cauchy_backward.register_fake
def _(_grad: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    return tuple(torch.empty_like(x, memory_format=torch.contiguous_format) for x in rest[:5])


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *tensors, _, ctx.tile, _, backend = inputs
    ctx.backend = wished_backend(backend)
    ctx.save_for_backward(*tensors)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    return *s4_cauchy_backward(grad, *ctx.saved_tensors, ctx.tile, ctx.backend), None, None, None, None


s4_cauchy.register_autograd(_backward, setup_context=_setup_context)
