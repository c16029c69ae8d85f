"""Depthwise convolution of a sequence with a few taps per channel, and the SiLU behind it, in one pass.

`merge_kernels` makes one filter of several parallel ones, which is what structural reparameterisation is: it costs a
few numbers, so that training can afford it in every step.

B batch · T length · J taps · D width
"""

from collections.abc import Sequence

import torch
from torch.nn import functional as F

from . import torch_impl

__all__ = ["merge_kernels", "short_conv"]

ACTIVATIONS = (None, "silu")


def merge_kernels(kernels: Sequence[torch.Tensor], *, causal: bool) -> torch.Tensor:
    """Add filters of different lengths, lag by lag: their sum convolves as all of them side by side do.

    Args:
        kernels: Taps `(D, J_i)` of each, as for `short_conv`.
        causal: Whether tap 0 lies at lag 0 rather than the middle tap.

    Returns:
        `(D, max J_i)`. Differentiable.

    Raises:
        ValueError: There is no kernel, or a shape does not fit.
    """
    if not kernels:
        raise ValueError("kernels must hold at least one kernel; got none")
    for kernel in kernels:
        _check_kernel(kernel, kernels[0].shape[0], causal)
    taps = max(kernel.shape[1] for kernel in kernels)
    total = None
    for kernel in kernels:
        missing = taps - kernel.shape[1]
        before = 0 if causal else missing // 2
        padded = F.pad(kernel, (before, missing - before))
        total = padded if total is None else total + padded
    assert total is not None
    return total


def short_conv(
    u: torch.Tensor,
    kernel: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    causal: bool = True,
    activation: str | None = None,
    state: torch.Tensor | None = None,
    backend: str = "auto",
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Convolve each channel with a few taps.

    y[t] = f(sum_j kernel[:, j] u[t - j + c] + bias),  c = 0 when causal and (J - 1) / 2 otherwise
    (CHELA, eq. 8, K_s with its activation)

    O(T J) multiplications per channel. Saved for the backward are the inputs alone.

    Args:
        u: Input, `(B, T, D)`, any floating dtype; zeros lie around it.
        kernel: Taps by lag, `(D, J)`: tap 0 meets the current token, or the one J - 1 tokens after the last of the
            past where the filter is centred.
        bias: `(D,)`; none when None.
        causal: Whether only the past is read. A centred filter has an odd number of taps.
        activation: f, None or ``"silu"``.
        state: The J - 1 inputs before the first, `(B, J - 1, D)`; zeros when None. Causal only.
        backend: See `hf_hybrid.kernels.dispatch`.

    Returns:
        `(B, T, D)` in u's dtype, accumulated in float32, or float64 for float64 input; and the next state, the last
        J - 1 inputs in u's dtype, or None when not causal.

    Raises:
        ValueError: A shape or dtype does not fit; the message names the argument, its value and the rule.
    """
    if u.dim() != 3 or u.shape[1] == 0 or not u.is_floating_point():
        raise ValueError(f"u must be a floating-point (B, T, D) with T > 0; got {tuple(u.shape)} of {u.dtype}")
    _check_kernel(kernel, u.shape[2], causal)
    if bias is not None and bias.shape != u.shape[2:]:
        raise ValueError(f"bias must be (D,) with D = {u.shape[2]}; got {tuple(bias.shape)}")
    if activation not in ACTIVATIONS:
        names = ", ".join(str(name) for name in ACTIVATIONS)
        raise ValueError(f"activation must be one of {names}; got {activation!r}")
    past = kernel.shape[1] - 1
    if state is not None and not causal:
        raise ValueError("state must be None for a convolution that is not causal")
    if state is not None and state.shape != (u.shape[0], past, u.shape[2]):
        raise ValueError(f"state must be (B, J - 1, D) = {(u.shape[0], past, u.shape[2])}; got {tuple(state.shape)}")
    ahead = 0 if causal else past // 2
    x = u if state is None else torch.cat([state.to(u.dtype), u], dim=1)
    if u.shape[1] == 1 and state is not None:
        y = torch_impl.one_token(x, kernel, bias, activation == "silu")
    else:
        y = torch_impl.short_conv(x, kernel, bias, ahead, activation == "silu", backend)
        y = y[:, x.shape[1] - u.shape[1] :]
    if not causal:
        return y, None
    last = x[:, max(0, x.shape[1] - past) :] if past else x[:, :0]
    # a copy, so that whoever keeps the last inputs does not keep all of them
    return y, F.pad(last, (0, 0, past - last.shape[1], 0)).clone()


def _check_kernel(kernel: torch.Tensor, width: int, causal: bool) -> None:
    if kernel.dim() != 2 or kernel.shape[0] != width or kernel.shape[1] < 1:
        raise ValueError(f"kernel must be (D, taps) with D = {width} and at least one tap; got {tuple(kernel.shape)}")
    if not causal and kernel.shape[1] % 2 == 0:
        raise ValueError(f"kernel must have an odd number of taps unless causal; got {kernel.shape[1]}")
