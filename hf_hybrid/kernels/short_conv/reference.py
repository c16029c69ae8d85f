"""Short convolution as a sum over lags: the specification of `hf_hybrid.kernels.short_conv`.

B batch · T length · J taps · D width
"""

import torch
from torch.nn import functional as F

from ..packed import bounds
from ..precision import compute_dtype


def short_conv(
    u: torch.Tensor,
    kernel: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    causal: bool = True,
    activation: str | None = None,
    state: torch.Tensor | None = None,
    cu_seqlens: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Compute `hf_hybrid.kernels.short_conv` one lag at a time, without checks."""
    if cu_seqlens is not None:
        parts = []
        for n, at in enumerate(bounds(cu_seqlens, u.shape[1])):
            own = None if state is None else state[n : n + 1]
            parts.append(short_conv(u[:, at], kernel, bias, causal=causal, activation=activation, state=own))
        last = torch.cat([after for _, after in parts if after is not None]) if causal else None
        return torch.cat([y for y, _ in parts], dim=1), last
    wide = compute_dtype(u)
    length, taps = u.shape[1], kernel.shape[1]
    ahead = 0 if causal else (taps - 1) // 2
    past = u.new_zeros(u.shape[0], taps - 1 - ahead, u.shape[2]) if state is None else state
    x = F.pad(torch.cat([past, u], dim=1), (0, 0, 0, ahead)).to(wide)
    y = torch.zeros(u.shape, dtype=wide, device=u.device)
    for lag in range(taps):
        start = taps - 1 - lag
        y = y + kernel[:, lag].to(wide) * x[:, start : start + length]
    if bias is not None:
        y = y + bias.to(wide)
    if activation == "silu":
        y = y * torch.sigmoid(y)
    return y.to(u.dtype), x[:, length:].to(u.dtype) if causal else None
