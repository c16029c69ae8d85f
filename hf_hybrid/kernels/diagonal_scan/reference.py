"""The diagonal recurrence as a loop: the specification of `hf_hybrid.kernels.diagonal_scan`.

Shapes: `B` batch · `T` length · `P` states.
"""

import torch
from torch import Tensor

from ..packed import bounds


def diagonal_scan(
    a: Tensor,
    b: Tensor,
    *,
    initial_state: Tensor | None = None,
    reverse: bool = False,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute `hf_hybrid.kernels.diagonal_scan` token by token, without checks."""
    if cu_seqlens is not None:
        parts = []
        for n, at in enumerate(bounds(cu_seqlens, b.shape[1])):
            own = None if initial_state is None else initial_state[n : n + 1]
            parts.append(diagonal_scan(a, b[:, at], initial_state=own, reverse=reverse))
        return torch.cat([states for states, _ in parts], dim=1), torch.cat([last for _, last in parts])
    x = a.new_zeros(b.shape[0], b.shape[2]) if initial_state is None else initial_state
    states = []
    for drive in reversed(b.unbind(1)) if reverse else b.unbind(1):
        x = a * x + drive
        states.append(x)
    return torch.stack(states[::-1] if reverse else states, dim=1).to(b.dtype) if states else b, x
