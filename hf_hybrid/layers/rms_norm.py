"""The root mean square norm; where it trains on a CPU, a few rows at a time, which stay in the cache.

y = w x r,  r = 1 / sqrt(mean(x^2) + eps),  dx = r (h - n mean(h n)) with h = w dy and n = x r,  dw = sum dy n.

torch's own is a chain of operations on a CPU, each of which writes a tensor of all tokens and keeps some for the
backward. Here x is kept, and r, one number per token.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.nn import functional as F

_BLOCK = 1 << 16
"""Elements per block of rows."""


def rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """Divide `(..., D)` by its root mean square over D, and multiply it by the weight `(D,)`, if there is one."""
    is_traced = torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active()
    if is_traced or not torch.is_grad_enabled() or x.device.type != "cpu":
        return F.rms_norm(x, x.shape[-1:], weight, eps)
    wide = x.dtype in (torch.float32, torch.float64) and (weight is None or weight.dtype == x.dtype)
    if not wide or type(x) is not Tensor or type(weight) not in (type(None), Parameter):  # other kinds of tensors
        return F.rms_norm(x, x.shape[-1:], weight, eps)
    y: Tensor = _RMSNorm.apply(x, weight, eps)
    return y


def _blocks(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Yield the same rows of tensors `(..., D)`, of which later ones may be `(..., 1)`."""
    step = max(1, _BLOCK // tensors[0].shape[-1])
    return zip(*(x.reshape(-1, x.shape[-1]).split(step) for x in tensors), strict=True)


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
        y = torch.empty_like(x, memory_format=torch.contiguous_format)
        scale = y.new_empty(*x.shape[:-1], 1)
        for inputs, outputs, r in _blocks(x, y, scale):
            r.copy_(inputs.square().mean(-1, keepdim=True).add_(eps).rsqrt_())
            torch.mul(inputs, r, out=outputs)
            if weight is not None:
                outputs.mul_(weight)
        ctx.save_for_backward(x, weight, scale)
        ctx.eps = eps
        return y

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, scale = ctx.saved_tensors
        (grad,) = gradients
        if torch.is_grad_enabled():  # for derivatives of the gradient
            y, wants = F.rms_norm(x, x.shape[-1:], weight, ctx.eps), ctx.needs_input_grad
            leaves = [tensor for tensor, wanted in zip((x, weight), wants[:2], strict=True) if wanted]
            found = iter(torch.autograd.grad(y, leaves, grad, create_graph=True))
            return *(next(found) if wanted else None for wanted in wants[:2]), None
        d_x = torch.empty_like(x, memory_format=torch.contiguous_format)
        d_weight = None if weight is None else torch.zeros_like(weight)
        for inputs, g, r, out in _blocks(x, grad, scale, d_x):
            n = inputs * r
            if weight is not None and d_weight is not None:
                d_weight += (g * n).sum(0)
                g = g * weight
            torch.mul(g - n * (g * n).mean(-1, keepdim=True), r, out=out)
        return d_x, d_weight, None
