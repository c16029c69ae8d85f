"""S4's state at the ends of windows, without an output in between.

B batch · T length · W window · n = T // W windows · H channels · S copies of (A, B) · M = N/2 modes
"""

from math import ceil, log2

import torch

from ..dispatch import full_precision
from .discrete import dense_transition, s4_step_constants, to_complex, to_real
from .torch_impl import _TILE, _recomputed


def s4_window_states(
    u: torch.Tensor,
    B: torch.Tensor,
    P: torch.Tensor,
    w: torch.Tensor,
    dt: torch.Tensor,
    window: int,
    dtype: torch.dtype,
) -> torch.Tensor:
    """State after the last token of every whole window, from a state of zeros before the first token.

    x_i = Abar^W x_(i-1) + sum_{j<W} Abar^(W-1-j) Bbar u[iW + j],  in O(T N) multiplications per channel and T / W
    sequential steps. A filter's output there is 2Re C x_i, so that many filters cost no more than one.

    Args:
        u: `(B, T, H)`.
        B: `(S, M)`, complex.
        P: `(S, M)`, complex.
        w: `(S, M)`, complex, negative real parts.
        dt: Step per channel, `(H,)`; channel c reads copy ``c % S``.
        window: W in tokens, positive.
        dtype: Real dtype of the computation; powers of Abar are taken in float64.

    Returns:
        `(B, n, H, M)`, complex. Differentiable; tiles of channels are computed again in the backward.
    """
    count = u.shape[1] // window
    channels, modes = dt.shape[0], w.shape[1]
    if count == 0:
        return u.new_zeros(u.shape[0], 0, channels, modes, dtype=torch.promote_types(dtype, torch.complex64))
    copies = channels // w.shape[0]
    B, P, w = (x.repeat(copies, 1) for x in (B, P, w))
    u = u[:, : count * window].to(dtype).permute(2, 1, 0)
    tile = max(1, _TILE // (2 * modes * (3 * window + 2 * modes * (ceil(log2(window)) + 2))))
    parts = []
    for start in range(0, channels, tile):
        part = slice(start, start + tile)
        parts.append(_recomputed(_window_states, u[part], B[part], P[part], w[part], dt[part], window))
    return torch.cat(parts, dim=2)


def _window_states(
    u: torch.Tensor, B: torch.Tensor, P: torch.Tensor, w: torch.Tensor, dt: torch.Tensor, window: int
) -> torch.Tensor:
    """The states of a few channels; u is `(H, n W, B)`."""
    step = s4_step_constants(B, P, w, dt)
    power = dense_transition(step)
    transition, rest = torch.eye(power.shape[-1], dtype=power.dtype, device=power.device), window
    columns = to_real(step.input)[..., None]
    while True:
        if rest % 2:
            transition = transition @ power
        if columns.shape[-1] < window:
            columns = torch.cat([power @ columns, columns], dim=-1)
        rest //= 2
        if not rest:
            break
        power = power @ power
    batch = u.shape[2]
    inputs = columns[..., columns.shape[-1] - window :].to(u.dtype)
    transition = transition.mT.to(u.dtype)
    with full_precision(u.device):
        windows = u.unflatten(1, (-1, window)).transpose(1, 2)
        added = (inputs @ windows.flatten(2)).unflatten(2, (-1, batch)).permute(2, 0, 3, 1)
        x = added[0]
        states = [x]
        for more in added[1:]:
            x = torch.baddbmm(more, x, transition)
            states.append(x)
    return to_complex(torch.stack(states).permute(2, 0, 1, 3))
