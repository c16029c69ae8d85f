"""The segments' states as a custom op whose backward stores only the inputs."""

from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from ..dispatch import NAMESPACE, triton_if_chosen, wished_backend
from ..precision import full_precision
from . import torch_impl


def _triton(backend: str, key: Tensor, value: Tensor, *others: Tensor | None) -> ModuleType | None:
    tensors = key, value, *others
    return triton_if_chosen("segment_recurrence", __package__, backend, tensors, lambda k: k.why_not(key, value))


def _check_values(number: int, visited: Tensor | None, threshold: Tensor | None) -> None:
    """Raise ValueError for bad values on a CPU, where reading them is free; a GPU asserts, or gives NaN."""
    if visited is not None and visited.device.type == "cpu" and visited.numel():
        first, last = (x.item() for x in visited.aminmax())
        if first < 0 or last >= number:
            raise ValueError(f"visited must lie between 0 and M - 1 = {number - 1}; got {first} to {last}")
    if threshold is not None and threshold.device.type == "cpu" and (threshold <= 0).any():
        raise ValueError(f"threshold must be positive; got {threshold.item()}")


@torch.library.custom_op(f"{NAMESPACE}::segment_recurrence", mutates_args=())
def segment_recurrence(
    key: Tensor, value: Tensor, weight: Tensor | None, leak: Tensor | None, threshold: Tensor | None,
    visited: Tensor | None, complement: bool, clamp: float | None, surrogate: bool, backend: str,
) -> Tensor:  # fmt: skip
    """Return the states; `complement` selects the neurons' input, and only the backward uses `surrogate`."""
    run = _triton(backend, key, value, weight, leak, threshold, visited) or torch_impl
    _check_values(key.shape[2], visited, threshold)
    with full_precision(key.device):
        return run.forward(key, value, weight, leak, threshold, visited, complement, clamp)


@segment_recurrence.register_fake
def _(key: Tensor, value: Tensor, *given: Any) -> Tensor:
    visited = given[3]
    number = key.shape[2] if visited is None else visited.shape[1]
    return key.new_empty(*key.shape[:2], number, key.shape[4], value.shape[4])


@torch.library.custom_op(f"{NAMESPACE}::segment_recurrence_backward", mutates_args=())
def segment_recurrence_backward(
    grad: Tensor, key: Tensor, value: Tensor, weight: Tensor | None, leak: Tensor | None, threshold: Tensor | None,
    visited: Tensor | None, complement: bool, clamp: float | None, surrogate: bool, backend: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Return gradients of key, value, weight, leak and threshold; empty ones for omitted arguments."""
    neuron = weight, leak, threshold
    run = _triton(backend, key, value, *neuron, visited) or torch_impl
    with full_precision(key.device):
        d_key, d_value, *found = run.backward(grad, key, value, *neuron, visited, complement, clamp, surrogate)
        d_weight, d_leak, d_threshold = (
            key.new_zeros(0) if d is None or x is None else d.to(x.dtype, copy=True).view(x.shape)
            for d, x in zip(found, neuron, strict=True)
        )
        return d_key, d_value, d_weight, d_leak, d_threshold


@segment_recurrence_backward.register_fake
def _(grad: Tensor, key: Tensor, value: Tensor, *given: Any) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    neuron = [key.new_empty(0) if x is None else x.new_empty(x.shape) for x in given[:3]]
    return key.new_empty(key.shape), value.new_empty(value.shape), neuron[0], neuron[1], neuron[2]


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:6])
    *ctx.options, backend = inputs[6:]
    ctx.backend = wished_backend(backend)


def _differentiate(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    tensors = ctx.saved_tensors
    gradients = segment_recurrence_backward(grad, *tensors, *ctx.options, ctx.backend)
    given = [gradient if x is not None else None for gradient, x in zip(gradients, tensors[:5], strict=True)]
    return *given, *[None] * 5


segment_recurrence.register_autograd(_differentiate, setup_context=_save)
