"""Short convolution as an opaque op with its own backward, which keeps nothing but the inputs.

On a CPU in float32 the convolution runs as torch's two-dimensional one with channels last, the layout the tokens
already have: three times as fast as one multiplication per tap, and twenty times as fast as `conv1d`, which wants them
transposed. Elsewhere it is one multiplication per tap over the whole tensor. The taps' gradient is a sum over shifted
products, block by block, since torch's own costs more than everything else together.

B batch · T length · J taps · D width
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ..dispatch import choose_backend
from ..long_conv.torch_impl import compute_dtype

_BLOCK = 1 << 18
"""Numbers multiplied at once in the taps' gradient."""


def _why_not_triton() -> str | None:
    return "no Triton kernel in this version"


def _shifts(length: int, taps: int, ahead: int) -> Iterator[tuple[int, slice, slice]]:
    """For every tap, the outputs that it reaches and the inputs that it takes there."""
    for tap in range(taps):
        lag = tap - ahead
        start, stop = max(0, lag), min(length, length + lag)
        if start < stop:
            yield tap, slice(start, stop), slice(start - lag, stop - lag)


def _convolve(x: Tensor, kernel: Tensor, bias: Tensor | None, ahead: int) -> Tensor:
    """The convolution in x's own dtype, `(B, T, D)`; not differentiable."""
    taps = kernel.shape[1]
    if x.device.type == "cpu" and x.dtype == torch.float32 and torch.backends.mkldnn.is_available():
        padded = F.pad(x, (0, 0, taps - 1 - ahead, ahead))
        image = padded.unsqueeze(1).permute(0, 3, 1, 2)  # (B, D, 1, T), channels innermost in memory
        with torch.autocast("cpu", enabled=False):
            y = F.conv2d(image, kernel.flip(1)[:, None, None], bias, groups=x.shape[2])
        return y[:, :, 0].mT.contiguous()
    y = torch.zeros_like(x) if bias is None else bias.expand_as(x).clone(memory_format=torch.contiguous_format)
    rows = kernel.mT.contiguous()
    for tap, outputs, inputs in _shifts(x.shape[1], taps, ahead):
        y[:, outputs].addcmul_(x[:, inputs], rows[tap])
    return y


def one_token(x: Tensor, kernel: Tensor, bias: Tensor | None, silu: bool) -> Tensor:
    """The output at the last of as many inputs as there are taps: `(B, J, D)` to `(B, 1, D)`."""
    wide = compute_dtype(x)
    y = (x.to(wide) * kernel.to(wide).flip(1).mT).sum(1, keepdim=True)
    y = y if bias is None else y + bias.to(wide)
    return (F.silu(y) if silu else y).to(x.dtype)


@torch.library.custom_op("hf_hybrid::short_conv", mutates_args=())
def short_conv(u: Tensor, kernel: Tensor, bias: Tensor | None, ahead: int, silu: bool, backend: str) -> Tensor:
    """The convolution with its activation; `ahead` is the number of taps on later tokens.

    The backend is chosen in here, where no tracer looks, because the choice reads the environment and logs.
    """
    choose_backend("short_conv", backend, [u, kernel], _why_not_triton)
    wide = compute_dtype(u)
    y = _convolve(u.to(wide), kernel.to(wide), None if bias is None else bias.to(wide), ahead)
    return (F.silu(y, inplace=True) if silu else y).to(u.dtype)


@short_conv.register_fake
def _(u: Tensor, kernel: Tensor, bias: Tensor | None, ahead: int, silu: bool, backend: str) -> Tensor:
    return torch.empty_like(u, memory_format=torch.contiguous_format)


@torch.library.custom_op("hf_hybrid::short_conv_backward", mutates_args=())
def short_conv_backward(
    grad: Tensor, u: Tensor, kernel: Tensor, bias: Tensor | None, ahead: int, silu: bool, trained: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of u, the taps and the bias; of the last two only if `trained`, zeros otherwise."""
    wide = compute_dtype(u)
    x, taps = u.to(wide), kernel.to(wide)
    g = grad.to(wide)
    if silu:
        y = _convolve(x, taps, None if bias is None else bias.to(wide), ahead)
        gate = torch.sigmoid(y)
        # (y s)' = s (1 + y (1 - s))
        g = g * gate * (1 + y * (1 - gate))
    # the adjoint reads the other way: its tap at lag -j is the tap at lag j
    grad_u = _convolve(g.contiguous(), taps.flip(1), None, kernel.shape[1] - 1 - ahead)
    grad_taps, grad_bias = torch.zeros_like(taps.mT), torch.zeros_like(taps[:, 0])
    if trained:
        grad_bias = g.sum((0, 1))
        step = max(kernel.shape[1], _BLOCK // max(1, x.shape[0] * x.shape[2]))
        for tap, outputs, inputs in _shifts(x.shape[1], kernel.shape[1], ahead):
            for start in range(0, outputs.stop - outputs.start, step):
                at = slice(outputs.start + start, min(outputs.stop, outputs.start + start + step))
                lag = outputs.start - inputs.start
                grad_taps[tap] += (g[:, at] * x[:, at.start - lag : at.stop - lag]).sum((0, 1))
    return grad_u.to(u.dtype), grad_taps.mT.contiguous().to(kernel.dtype), grad_bias


@short_conv_backward.register_fake
def _(
    grad: Tensor, u: Tensor, kernel: Tensor, bias: Tensor | None, ahead: int, silu: bool, trained: bool
) -> tuple[Tensor, Tensor, Tensor]:
    like = torch.empty_like(u, memory_format=torch.contiguous_format)
    taps = torch.empty_like(kernel, memory_format=torch.contiguous_format)
    return like, taps, kernel.new_empty(kernel.shape[0], dtype=torch.promote_types(u.dtype, torch.float32))


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    u, kernel, bias, ctx.ahead, ctx.silu, _ = inputs
    ctx.save_for_backward(u, kernel, bias)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    u, kernel, bias = ctx.saved_tensors
    _, wants_kernel, wants_bias = ctx.needs_input_grad[:3]
    trained = wants_kernel or wants_bias
    grads = short_conv_backward(grad, u, kernel, bias, ctx.ahead, ctx.silu, trained)
    grad_bias = grads[2].to(bias.dtype) if bias is not None and wants_bias else None
    return grads[0], grads[1] if wants_kernel else None, grad_bias, None, None, None


short_conv.register_autograd(_backward, setup_context=_setup_context)
