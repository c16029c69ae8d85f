"""Long convolution as the double sum it is: the specification of `hf_hybrid.kernels.long_conv`.

B batch · T length · T_k taps · D width
"""

import torch


def long_conv(
    u: torch.Tensor,
    kernel: torch.Tensor,
    *,
    reverse_kernel: torch.Tensor | None = None,
    skip: torch.Tensor | None = None,
) -> torch.Tensor:
    """Sum every input that reaches every output, one pair of positions at a time.

    y[t] = sum_{j>=0} kernel[:, j] u[t-j]  +  sum_{j>=0} reverse_kernel[:, j] u[t+1+j]  +  skip u[t]

    Args:
        u: Input, `(B, T, D)`.
        kernel: Taps at lag 0, 1, 2, ..., `(D, T_k)`.
        reverse_kernel: Taps at lag -1, -2, ..., `(D, T_r)`; none when None.
        skip: Weight of the input itself, `(D,)`; none when None.

    Returns:
        `(B, T, D)` in u's dtype; float64 and float32 inputs accumulate in their own precision, others in float32.
    """
    wide = torch.promote_types(u.dtype, torch.float32)
    x, length = u.to(wide), u.shape[1]
    rows = []
    for t in range(length):
        row = torch.zeros_like(x[:, 0])
        for s in range(length):
            if 0 <= t - s < kernel.shape[1]:
                row = row + kernel[:, t - s].to(wide) * x[:, s]
            if reverse_kernel is not None and 0 <= s - t - 1 < reverse_kernel.shape[1]:
                row = row + reverse_kernel[:, s - t - 1].to(wide) * x[:, s]
        rows.append(row if skip is None else row + skip.to(wide) * x[:, t])
    return torch.stack(rows, dim=1).to(u.dtype)
