"""S4's state at the ends of windows, without outputs in between.

B batch · T length · W window · n = T // W windows · H channels · S copies of (A, B) · M = N/2 modes
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from ..precision import full_precision
from .discrete import BLOCK, recomputed, s4_step_constants, tile_numbers, to_complex, to_real
from .two_level import s4_block, s4_block_scan


def s4_window_states(
    u: Tensor, B: Tensor, P: Tensor, w: Tensor, dt: Tensor, window: int, dtype: torch.dtype
) -> Tensor:
    """Return the state after the last token of each full window, starting from zeros.

    x_i = Abar^R x_(i-1) + sum_{j<R} Abar^(R-1-j) Bbar u[iR + j]  for blocks of R = `BLOCK` tokens, where the first
    block of a window may be shorter: O(T N + N^2 (R + T / R)) multiplications per channel and T / R sequential steps.
    A filter's output at that token is 2Re C x_i, so many filters cost no more than one.

    Args:
        u: `(B, T, H)`.
        B: `(S, M)`, complex.
        P: `(S, M)`, complex.
        w: `(S, M)`, complex, negative real parts.
        dt: Step per channel, `(H,)`; channel c reads copy ``c % S``.
        window: W in tokens, positive.
        dtype: Real dtype of the computation; powers of Abar are computed in float64.

    Returns:
        `(B, n, H, M)`, complex. Differentiable once.
    """
    count = u.shape[1] // window
    channels, modes = dt.shape[0], w.shape[1]
    precision = torch.promote_types(dtype, torch.complex64)
    if count == 0:
        return u.new_zeros(u.shape[0], 0, channels, modes, dtype=precision)
    block = min(BLOCK, window)
    head = window % block or block
    copies = channels // w.shape[0]
    B, P, w = (x.repeat(copies, 1) for x in (B, P, w))
    u = u[:, : count * window].to(dtype).permute(2, 1, 0).unflatten(1, (count, window))
    u = F.pad(u, (0, 0, block - head, 0)).flatten(1, 2)
    tile = max(1, tile_numbers(u.device) // (8 * modes * (modes + 4 * block)))
    parts = []
    for start in range(0, channels, tile):
        part = slice(start, start + tile)
        step = recomputed(s4_step_constants, B[part], P[part], w[part], dt[part])
        states, power = s4_block(step, block, precision)
        first = power if head == block else s4_block(step, head, precision)[1]
        parts.append(_window_states(u[part], states, power, first, -(-window // block)))
    return to_complex(torch.cat(parts, dim=1).permute(2, 0, 1, 3))


def _window_states(u: Tensor, states: Tensor, power: Tensor, first: Tensor, group: int) -> Tensor:
    """Return the states of a few channels after each group of blocks, `(n, H, B, N)`, of u `(H, n group R, B)`."""
    inputs = to_real(states.flip(0)).permute(1, 2, 0)
    with full_precision(u.device):
        blocks = u.unflatten(1, (-1, len(states))).transpose(1, 2).flatten(2)
        added = (inputs @ blocks).unflatten(2, (blocks.shape[2] // u.shape[2], u.shape[2])).permute(2, 0, 3, 1)
    return s4_block_scan(added, power.mT, first.mT, group, 0)[group - 1 :: group]
