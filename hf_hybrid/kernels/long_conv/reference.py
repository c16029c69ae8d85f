"""Long convolution as a double sum: the specification of `hf_hybrid.kernels.long_conv`.

B batch · T length · T_k taps · D width · C filters
"""

import torch
from torch.nn import functional as F

from ..packed import bounds
from ..precision import compute_dtype


def long_conv(
    u: torch.Tensor,
    kernel: torch.Tensor,
    *,
    reverse_kernel: torch.Tensor | None = None,
    skip: torch.Tensor | None = None,
    input_gate: torch.Tensor | None = None,
    gate: torch.Tensor | None = None,
    activation: str | None = None,
    cu_seqlens: torch.Tensor | None = None,
) -> torch.Tensor:
    """Sum the input's shifted copies, one lag at a time.

    z[t] = sum_{j>=0} kernel[:, j] x[t-j]  +  sum_{j>=0} reverse_kernel[:, j] x[t+1+j]  +  skip x[t],
    x = input_gate u,  y = gate f(z)

    See `hf_hybrid.kernels.long_conv` for the arguments.

    Returns:
        `(B, T, D)` in u's dtype; float64 and float32 inputs accumulate in their own precision, others in float32.
    """
    if cu_seqlens is not None:
        parts = [
            long_conv(
                u[:, at],
                kernel,
                reverse_kernel=reverse_kernel,
                skip=skip,
                input_gate=None if input_gate is None else input_gate[:, at],
                gate=None if gate is None else gate[:, at],
                activation=activation,
            )
            for at in bounds(cu_seqlens, u.shape[1])
        ]
        return torch.cat(parts, dim=1)
    wide = compute_dtype(u)
    x, length = u.to(wide), u.shape[1]
    if input_gate is not None:
        x = x * input_gate.to(wide)
    kernel = kernel.repeat(u.shape[2] // kernel.shape[0], 1)
    if reverse_kernel is not None:
        reverse_kernel = reverse_kernel.repeat(u.shape[2] // reverse_kernel.shape[0], 1)
    y = torch.zeros_like(x) if skip is None else skip.to(wide) * x
    for lag in range(min(kernel.shape[1], length)):
        y = y + F.pad(kernel[:, lag].to(wide) * x[:, : length - lag], (0, 0, lag, 0))
    if reverse_kernel is not None:
        for lag in range(1, min(reverse_kernel.shape[1] + 1, length)):
            y = y + F.pad(reverse_kernel[:, lag - 1].to(wide) * x[:, lag:], (0, 0, 0, lag))
    if activation == "silu":
        y = y * torch.sigmoid(y)
    if gate is not None:
        y = y * gate.to(wide)
    return y.to(u.dtype)


def filter_bank_conv(u: torch.Tensor, kernel: torch.Tensor, *, skip: torch.Tensor | None = None) -> torch.Tensor:
    """Apply `long_conv` with the taps `(D, T_k)` of each filter; returns `(C, B, T, D)`."""
    skips = [None] * len(kernel) if skip is None else skip
    return torch.stack([long_conv(u, taps, skip=weight) for taps, weight in zip(kernel, skips, strict=True)])
