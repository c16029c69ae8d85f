"""The short convolution and its gradient in torch.

On a CPU in float32 it uses torch's two-dimensional convolution with channels last, the layout of the tokens: three
times as fast as one multiplication per tap, and twenty times as fast as `conv1d`, which needs a transpose. Elsewhere
it is one multiplication per tap over the full tensor. The taps' gradient is a sum over shifted products, block by
block, since torch's own costs more than everything else together.

B batch · T length · J taps · D width
"""

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional as F

from ..packed import run_each
from ..precision import compute_dtype

_BLOCK = 1 << 18
"""Elements per block in the taps' gradient."""


def _shifts(length: int, taps: int, ahead: int) -> Iterator[tuple[int, slice, slice]]:
    """Yield each tap with the outputs that it reaches and the inputs that it reads there."""
    for tap in range(taps):
        lag = tap - ahead
        start, stop = max(0, lag), min(length, length + lag)
        if start < stop:
            yield tap, slice(start, stop), slice(start - lag, stop - lag)


def _convolve(x: Tensor, kernel: Tensor, bias: Tensor | None, ahead: int) -> Tensor:
    """Convolve in x's dtype, `(B, T, D)`; not differentiable."""
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
    """Return the output at the last of J inputs: `(B, J, D)` to `(B, 1, D)`."""
    wide = compute_dtype(x)
    y = (x.to(wide) * kernel.to(wide).flip(1).mT).sum(1, keepdim=True)
    y = y if bias is None else y + bias.to(wide)
    return (F.silu(y) if silu else y).to(x.dtype)


def _forward(x: Tensor, kernel: Tensor, bias: Tensor | None, ahead: int, silu: bool) -> Tensor:
    wide = compute_dtype(x)
    y = _convolve(x.to(wide), kernel.to(wide), None if bias is None else bias.to(wide), ahead)
    return (F.silu(y, inplace=True) if silu else y).to(x.dtype)


def _continued(u: Tensor, state: Tensor | None) -> Tensor:
    return u if state is None else torch.cat([state.to(u.dtype), u], dim=1)


def forward(
    u: Tensor,
    kernel: Tensor,
    bias: Tensor | None,
    state: Tensor | None,
    cu_seqlens: Tensor | None,
    ahead: int,
    silu: bool,
) -> Tensor:
    """Convolve and activate; not differentiable."""

    def alone(u: Tensor, state: Tensor | None) -> tuple[Tensor]:
        if u.shape[1] == 0:
            return (u.clone(),)
        y = _forward(_continued(u, state), kernel, bias, ahead, silu)
        return (y[:, y.shape[1] - u.shape[1] :].contiguous(),)

    return alone(u, state)[0] if cu_seqlens is None else run_each(alone, cu_seqlens, (u,), state, states_out=0)[0]


def _differentiate(
    grad: Tensor, u: Tensor, kernel: Tensor, bias: Tensor | None, ahead: int, silu: bool, trained: bool
) -> tuple[Tensor, Tensor, Tensor]:
    wide = compute_dtype(u)
    x, taps = u.to(wide), kernel.to(wide)
    g = grad.to(wide)
    if silu:
        y = _convolve(x, taps, None if bias is None else bias.to(wide), ahead)
        g = torch.ops.aten.silu_backward(g, y)
    # the adjoint's tap at lag -j is the tap at lag j
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
    return grad_u.to(u.dtype), grad_taps.mT, grad_bias


def backward(
    grad: Tensor,
    u: Tensor,
    kernel: Tensor,
    bias: Tensor | None,
    state: Tensor | None,
    cu_seqlens: Tensor | None,
    ahead: int,
    silu: bool,
    trained: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Return gradients of u, the taps, the bias and the state; zeros for taps and bias unless `trained`."""
    wide = compute_dtype(u)
    d_kernel, d_bias = kernel.new_zeros(kernel.shape, dtype=wide), kernel.new_zeros(kernel.shape[0], dtype=wide)

    def alone(u: Tensor, grad: Tensor, state: Tensor | None) -> tuple[Tensor, ...]:
        past = 0 if state is None else state.shape[1]
        if u.shape[1] == 0:
            return u.clone(), u.new_empty(0) if state is None else torch.zeros_like(state)
        x = _continued(u, state)
        d_x, own_taps, own_bias = _differentiate(F.pad(grad, (0, 0, past, 0)), x, kernel, bias, ahead, silu, trained)
        d_kernel.add_(own_taps)
        d_bias.add_(own_bias)
        d_state = u.new_empty(0) if state is None else d_x[:, :past].to(state.dtype, copy=True)
        return d_x[:, past:].contiguous(), d_state

    if cu_seqlens is None:
        d_u, d_state = alone(u, grad, state)
    else:
        d_u, d_state = run_each(alone, cu_seqlens, (u, grad), state, states_out=1)
    return d_u, d_kernel.to(kernel.dtype), d_bias, None if state is None else d_state
