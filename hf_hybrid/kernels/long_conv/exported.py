"""Long convolution as torch's own depthwise convolution, for ONNX: O(T T_k) per channel, and no complex numbers.

B batch · T length · T_k taps · D width · C filters
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from ..precision import compute_dtype


def long_conv(
    u: Tensor,
    kernel: Tensor,
    reverse_kernel: Tensor | None,
    skip: Tensor | None,
    input_gate: Tensor | None,
    gate: Tensor | None,
    silu: bool,
) -> Tensor:
    """Compute `hf_hybrid.kernels.long_conv.long_conv`, without checks and packed sequences."""
    wide = compute_dtype(u)
    x = u.to(wide) if input_gate is None else u.to(wide) * input_gate.to(wide)
    taps, ahead = kernel.flip(1), 0  # torch's convolution does not reverse them
    if reverse_kernel is not None:
        taps, ahead = torch.cat([taps, reverse_kernel], dim=1), reverse_kernel.shape[1]
    taps = taps.to(wide).repeat(u.shape[2] // kernel.shape[0], 1)
    padded = F.pad(x.mT, (kernel.shape[1] - 1, ahead))
    y = F.conv1d(padded, taps[:, None], groups=u.shape[2]).mT
    if skip is not None:
        y = y + skip.to(wide) * x
    if silu:
        y = F.silu(y)
    if gate is not None:
        y = y * gate.to(wide)
    return y.to(u.dtype)


def window_ends_conv(u: Tensor, kernel: Tensor, skip: Tensor | None, window: int) -> Tensor:
    """Compute `filter_bank_conv` at the last token of each full window, without checks.

    Args:
        u: `(B, T, D)`, at least one window.
        kernel: `(C, D, T_k)`.
        skip: `(C, D)` or None.
        window: Tokens from one output to the next; 1 computes all.

    Returns:
        `(C, B, T // window, D)` in u's dtype.
    """
    wide, (filters, width, _) = compute_dtype(u), kernel.shape
    x, taps = u.to(wide), kernel[..., : u.shape[1]].to(wide)
    padded = F.pad(x.mT, (taps.shape[2] - 1, 0))[..., window - 1 :]
    weight = taps.flip(2).transpose(0, 1).flatten(0, 1)[:, None]  # a channel's filters follow each other
    y = F.conv1d(padded, weight, stride=window, groups=width).unflatten(1, (width, filters)).permute(2, 0, 3, 1)
    if skip is not None:
        y = y + skip.to(wide)[:, None, None] * x[:, window - 1 :: window]
    return y.to(u.dtype)
