"""Depthwise convolution of a sequence with a few taps per channel and an optional SiLU, in one pass.

`merge_kernels` adds parallel filters into one (structural reparameterisation), cheaply enough for every training
step.

B batch · T length · J taps · D width · N packed sequences
"""

from collections.abc import Sequence

import torch
from torch.nn import functional as F

from ..checks import check_choice, check_devices
from ..dispatch import exports_to_onnx, forces_triton
from ..packed import check_cu_seqlens
from . import op, reference, torch_impl

__all__ = ["merge_kernels", "short_conv"]

ACTIVATIONS = (None, "silu")


def merge_kernels(kernels: Sequence[torch.Tensor], *, causal: bool) -> torch.Tensor:
    """Add filters of different lengths, lag by lag, into one that replaces them all.

    Args:
        kernels: Taps `(D, J_i)` of each, see `short_conv`.
        causal: Whether tap 0 is at lag 0; otherwise the middle tap is.

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
    cu_seqlens: torch.Tensor | None = None,
    backend: str = "auto",
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Convolve each channel with a few taps.

    y[t] = f(sum_j kernel[:, j] u[t - j + c] + bias),  c = 0 when causal and (J - 1) / 2 otherwise (CHELA, eq. 8, K_s)

    O(T J) multiplications per channel. The backward pass stores only the inputs.

    Args:
        u: Input, `(B, T, D)`, any floating dtype; zeros surround it.
        kernel: Taps by lag, `(D, J)`: tap 0 multiplies the current token, or in a centred filter the token
            (J - 1) / 2 ahead.
        bias: `(D,)`; none when None.
        causal: Whether to read only the past. A centred filter has an odd number of taps.
        activation: f, None or ``"silu"``.
        state: The J - 1 inputs before the first, `(B, J - 1, D)`; zeros when None. Causal only.
        cu_seqlens: Bounds of N sequences packed into one row, `(N + 1,)` of int32 or int64, see `kernels.packed`. B is
            1, states have N rows, and the result is that of each sequence alone.
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
    check_choice("activation", activation, ACTIVATIONS)
    past = kernel.shape[1] - 1
    shape = (check_cu_seqlens(cu_seqlens, u, "u"), past, u.shape[2])
    if state is not None and not causal:
        raise ValueError("state must be None unless causal")
    if state is not None and state.shape != shape:
        rows = "B" if cu_seqlens is None else "N"
        raise ValueError(f"state must be ({rows}, J - 1, D) = {shape}; got {tuple(state.shape)}")
    check_devices(u, kernel=kernel, bias=bias, state=state)
    state = None if state is None else state.to(u.dtype)
    if exports_to_onnx():
        return reference.short_conv(u, kernel, bias, causal=causal, activation=activation, state=state)
    if u.shape[1] == 1 and state is not None and cu_seqlens is None and not forces_triton(backend):
        inputs = torch.cat([state, u], dim=1)
        after = inputs[:, 1:].clone(memory_format=torch.contiguous_format)
        return torch_impl.one_token(inputs, kernel, bias, activation == "silu"), after
    ahead = 0 if causal else past // 2
    y = op.short_conv(u, kernel, bias, state if past else None, cu_seqlens, ahead, activation == "silu", backend)
    return y, _last_inputs(u, past, state, cu_seqlens) if causal else None


def _last_inputs(
    u: torch.Tensor, past: int, state: torch.Tensor | None, cu_seqlens: torch.Tensor | None
) -> torch.Tensor:
    """Return the state after the last token, `(B or N, J - 1, D)`: a copy, so that it does not keep u alive."""
    if cu_seqlens is None:
        last = u[:, max(0, u.shape[1] - past) :] if past else u[:, :0]
        missing = past - last.shape[1]
        if state is None or missing == 0:
            return F.pad(last, (0, 0, missing, 0)).clone()
        return torch.cat([state[:, past - missing :], last], dim=1)
    ends, lengths = cu_seqlens[1:, None], cu_seqlens.diff()[:, None]
    position = lengths - past + torch.arange(past, device=u.device)  # negative ones are in the state
    last = u[0, (ends - lengths + position).clamp(0, u.shape[1] - 1)]
    if state is None:
        return last.masked_fill((position < 0)[..., None], 0)
    slot = (position + past).clamp(0, past - 1).long()
    before = state.gather(1, slot[..., None].expand_as(state)) if past else state
    return torch.where((position < 0)[..., None], before, last)


def _check_kernel(kernel: torch.Tensor, width: int, causal: bool) -> None:
    if kernel.dim() != 2 or kernel.shape[0] != width or kernel.shape[1] < 1:
        raise ValueError(f"kernel must be (D, taps) with D = {width} and at least one tap; got {tuple(kernel.shape)}")
    if not causal and kernel.shape[1] % 2 == 0:
        raise ValueError(f"kernel must have an odd number of taps unless causal; got {kernel.shape[1]}")
