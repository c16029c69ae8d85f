"""The diagonal recurrence as the loop it is: the specification of `hf_hybrid.kernels.diagonal_scan`.

Shapes: `B` batch · `T` length · `P` states.
"""

import torch
from torch import Tensor


def diagonal_scan(
    a: Tensor, b: Tensor, *, initial_state: Tensor | None = None, reverse: bool = False
) -> tuple[Tensor, Tensor]:
    """Compute `hf_hybrid.kernels.diagonal_scan` token by token; arguments as there, not checked again."""
    x = torch.zeros_like(b[:, 0]) if initial_state is None else initial_state
    states = []
    for drive in reversed(b.unbind(1)) if reverse else b.unbind(1):
        x = a * x + drive
        states.append(x)
    return torch.stack(states[::-1] if reverse else states, dim=1), x
