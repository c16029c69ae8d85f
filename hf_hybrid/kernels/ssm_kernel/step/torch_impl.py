"""One token of a state space model in plain torch, differentiable.

B batch · H channels · M = N/2 modes · C output filters
"""

import torch
from torch import Tensor

from ...precision import compute_dtype
from ..discrete import S4Step, s4_step
from ..s4d import S4DStep, s4d_step


def forward(
    state: Tensor | None, u: Tensor, C: Tensor, decay: Tensor, column: Tensor | None, row: Tensor | None, gain: Tensor,
    skip: Tensor | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return outputs `(B, C, H)` in u's dtype, and the next state `(B, H, M, 2)` in the real dtype of C."""
    wide = compute_dtype(C.real)
    token = u.to(wide)
    x = C.new_zeros(u.shape[0], *C.shape[1:]) if state is None else torch.view_as_complex(state.to(wide).contiguous())
    if column is None or row is None:
        y, x = s4d_step(x, token, C, S4DStep(decay, gain))
    else:
        y, x = s4_step(x, token, C, S4Step(decay, column, row, gain))
    y = y if skip is None else y + skip.to(wide) * token[:, None]
    return y.to(u.dtype), torch.view_as_real(x)
