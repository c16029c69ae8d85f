"""Dropout that draws its mask from a seed: on a CPU several times as fast as torch's, and without a mask in memory."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hf_hybrid.kernels.dispatch import NAMESPACE
from hf_hybrid.kernels.random_bits import LEVELS, Masks

_ELEMENTS = 2**17
"""Elements that are masked at a time, so that their random numbers stay in a CPU's cache."""


class Dropout(nn.Dropout):
    """`dropout` as a module."""

    def forward(self, input: Tensor) -> Tensor:
        """Return the input, `(...)`, with elements dropped."""
        return dropout(input, self.p, True) if self.training else input

    def after_relu(self, input: Tensor) -> Tensor:
        """Return relu of the input, `(...)`, with elements dropped; only the result is kept for the backward."""
        return _drop(_relu_dropout, F.relu, input, self.p, True) if self.training else F.relu(input)


def dropout(input: Tensor, p: float, training: bool) -> Tensor:
    """Set elements to zero with probability p and divide the others by 1 - p, in training.

    On a CPU torch draws the elements of a mask one by one, which takes longer than a norm, and keeps the mask for the
    backward. Here torch's generator gives a seed, and a table of random words is drawn from it, forward and again
    backward; p is rounded to a multiple of 2**-16, and so is what the others are divided by. On other devices and in
    compiled graphs, which have fast generators, it is torch's.

    Args:
        input: `(...)`.
        p: The probability.
        training: Whether anything is dropped.

    Returns:
        `(...)`. Differentiable any number of times.
    """
    return _drop(_dropout, lambda x: x, input, p, training)


def _drop(
    op: Callable[..., Any], activation: Callable[[Tensor], Tensor], input: Tensor, p: float, training: bool
) -> Tensor:
    """Run an op that drops behind an activation; torch's where that is faster, or where nothing is drawn."""
    dropped = round(p * LEVELS)
    if training and 0 < dropped < LEVELS and input.device.type == "cpu" and not torch.compiler.is_compiling():
        result: Tensor = op(input, torch.randint(2**63 - 1, ()), dropped)
        return result
    return F.dropout(activation(input), p, training)


def _scale(dropped: int) -> float:
    return LEVELS / (LEVELS - dropped)


@torch.library.custom_op(f"{NAMESPACE}::dropout", mutates_args=())
def _dropout(x: Tensor, seed: Tensor, dropped: int) -> Tensor:
    """Multiply elements by the scale, or by 0 where the number that the seed gives them is below `dropped`."""
    result = torch.empty_like(x, memory_format=torch.contiguous_format)
    masks = Masks(seed, dropped, min(x.numel(), _ELEMENTS))
    for part, out in zip(x.reshape(-1).split(_ELEMENTS), result.view(-1).split(_ELEMENTS), strict=True):
        torch.mul(out.copy_(masks.draw(len(part))), part, out=out).mul_(_scale(dropped))
    return result


def _keep_seed(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, seed, ctx.dropped = inputs
    ctx.save_for_backward(seed)


def _drop_gradients(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
    return _dropout(grad, *ctx.saved_tensors, ctx.dropped), None, None


_dropout.register_autograd(_drop_gradients, setup_context=_keep_seed)


@torch.library.custom_op(f"{NAMESPACE}::relu_dropout", mutates_args=())
def _relu_dropout(x: Tensor, seed: Tensor, dropped: int) -> Tensor:
    """Return `_dropout` of relu."""
    return _dropout(x, seed, dropped).clamp_min_(0)


@_dropout.register_fake
@_relu_dropout.register_fake
def _(x: Tensor, seed: Tensor, dropped: int) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _keep_result(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *_, ctx.dropped = inputs
    ctx.save_for_backward(output)


def _pass_gradients(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
    (result,) = ctx.saved_tensors  # above zero where the input was, and was kept
    return torch.ops.aten.threshold_backward(grad, result, 0).mul_(_scale(ctx.dropped)), None, None


_relu_dropout.register_autograd(_pass_gradients, setup_context=_keep_result)
