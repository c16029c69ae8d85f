"""S4D: S4 without its low-rank term, so that every mode is an independent recurrence.

x[t] = Abar x[t-1] + Bbar u[t],  y[t] = 2 Re C x[t],  hence y = K * u with K[l] = 2 Re sum_n C_n Bbar_n Abar_n^l
(Gu et al. 2022, "On the Parameterization and Initialization of Diagonal State Space Models", section 3)

The functions mirror those of S4: `s4d_kernel` for training and prompts, `s4d_step` for one token in O(N),
`s4d_final_state` and `s4d_state_response` to pass a state between parts of a sequence. Powers of Abar are computed in
complex128 by repeated squaring, then rounded; matrix products act on real and imaginary parts side by side.

B batch · T length · H channels · S copies of (A, B) · N state size · M = N/2 modes · C output filters · R block length
"""

from math import isqrt
from operator import index
from typing import NamedTuple

import torch
from torch import Tensor

from ..checks import check_choice, check_positive
from ..precision import complex_dtype, full_precision
from .discrete import BLOCK, check_system, recomputed, tile_numbers

DISCRETIZATIONS = ("zoh", "bilinear")


class S4DStep(NamedTuple):
    """One channel's step ``x <- decay x + input u``; both fields are `(H, M)`, complex."""

    decay: Tensor
    input: Tensor


def discretize(w: Tensor, dt: Tensor, discretization: str) -> tuple[Tensor, Tensor]:
    """Discretise decoupled modes ``x' = w x + v``: ``x[t] = decay x[t-1] + gain v[t]``.

    zoh       decay = exp(dt w),                    gain = (exp(dt w) - 1) / w
    bilinear  decay = (1 + dt w/2) / (1 - dt w/2),  gain = dt / (1 - dt w/2)      (S4D, section 3)

    Args:
        w: Complex.
        dt: Step, positive; broadcasts with w.
        discretization: ``"zoh"`` (constant input during a step) or ``"bilinear"`` (trapezoidal rule).

    Returns:
        decay and gain, complex. Differentiable, also at w = 0.

    Raises:
        ValueError: The discretisation is unknown.
    """
    check_choice("discretization", discretization, DISCRETIZATIONS)
    z = dt * w
    if discretization == "bilinear":
        G = (1 - 0.5 * z).reciprocal()
        return (1 + 0.5 * z) * G, dt * G
    # (exp(z) - 1) / z = exp(z/2) sinh(z/2) / (z/2), which neither cancels nor divides by zero
    return z.exp(), dt * (0.5 * z).exp() * torch.sinc(z * (-0.5j / torch.pi))


def s4d_step_constants(B: Tensor, w: Tensor, dt: Tensor, discretization: str) -> S4DStep:
    """Discretise every channel as `discretize` says; see `s4_step_constants` for arguments and result."""
    copies = dt.shape[0] // w.shape[0]
    B, w = (x.to(torch.complex128).repeat(copies, 1) for x in (B, w))
    decay, gain = discretize(w, dt.to(torch.float64)[:, None], discretization)
    return S4DStep(decay, gain * B)


def s4d_step(state: Tensor, u: Tensor, C: Tensor, step: S4DStep) -> tuple[Tensor, Tensor]:
    """Advance every channel by one token in O(N); see `s4_step`, here with a step from `s4d_step_constants`."""
    state = step.decay * state + step.input * u[..., None]
    return 2 * (C * state[:, None]).sum(-1).real, state


def _powers(base: Tensor, count: int) -> Tensor:
    """Return powers 0 to count - 1 of `(..., M)` as `(..., count, M)`, by squaring, with log2(count) roundings."""
    table = torch.ones_like(base)[..., None, :]
    while table.shape[-2] < count:
        rest = table[..., : count - table.shape[-2], :]
        table = torch.cat([table, rest * base[..., None, :]], dim=-2)
        base = base * base
    return table


def _real(x: Tensor) -> Tensor:
    """Put real and imaginary parts side by side: `(..., M)` complex to `(..., N)`."""
    return torch.view_as_real(x).flatten(-2)


def _complex(x: Tensor) -> Tensor:
    """Invert `_real`."""
    return torch.view_as_complex(x.unflatten(-1, (-1, 2)))


def s4d_block_powers(step: S4DStep, dtype: torch.dtype = torch.float32) -> Tensor:
    """Compute the powers that advance a state by up to `BLOCK` tokens: ``1, Abar, ..., Abar^R``.

    Args:
        step: From `s4d_step_constants`, complex128.
        dtype: Real dtype of the result's parts.

    Returns:
        `(H, R + 1, M)`, complex.
    """
    return _powers(step.decay, BLOCK + 1).to(complex_dtype(dtype))


def s4d_final_state(u: Tensor, step: S4DStep, powers: Tensor, state: Tensor | None = None) -> Tensor:
    """Return the state after the last token of `u`: O(T N) multiplications per channel, T / BLOCK sequential steps.

    x[T] = Abar^T x[0] + sum_t Abar^(T-1-t) Bbar u[t]; memory grows with T N / BLOCK.

    Args:
        u: `(B, T, H)`.
        step: From `s4d_step_constants`, in the state's dtype.
        powers: From `s4d_block_powers`.
        state: `(B, H, M)` complex; zeros when None.

    Returns:
        `(B, H, M)`, complex.
    """
    # a loop over blocks cannot be traced for a symbolic length
    batch, length, channels = u.shape[0], index(u.shape[1]), u.shape[2]
    head = length % BLOCK
    u = u.permute(2, 0, 1).to(powers.real.dtype)
    gain, transition = step.input[:, None], powers[:, BLOCK:]
    with full_precision(u.device):
        # the incomplete block comes first
        x = gain * _complex(u[..., :head] @ _real(powers[:, :head].flip(1)))
        if state is not None:
            x = x + powers[:, head : head + 1] * state.transpose(0, 1)
        # one product per channel for what every block adds
        whole = u[..., head:].reshape(channels, -1, BLOCK) @ _real(powers[:, :BLOCK].flip(1))
        added = gain * _complex(whole)
        for block in added.unflatten(1, (batch, length // BLOCK)).unbind(2):
            x = transition * x + block
    return x.transpose(0, 1).contiguous()


def s4d_state_response(state: Tensor, length: int, C: Tensor, powers: Tensor) -> Tensor:
    """Return the state's contribution to the next `length` outputs, ``2 Re C Abar^(t+1) x``.

    Args:
        state: `(B, H, M)`, complex.
        length: Number of outputs T.
        C: `(C, H, M)`, complex.
        powers: From `s4d_block_powers`.

    Returns:
        `(B, C, T, H)`, real.
    """
    length = index(length)
    starts = [state.transpose(0, 1)]
    transition = powers[:, BLOCK:]
    for _ in range(BLOCK, length, BLOCK):
        starts.append(transition * starts[-1])
    # the sum over modes of Re(c x p) is the real product of conj(c x) and p
    rows = (C[:, :, None, None] * torch.stack(starts, dim=2)).conj_physical()
    with full_precision(state.device):
        y = 2 * (_real(rows).flatten(2, 3) @ _real(powers[:, 1:]).mT)
    return y.unflatten(2, rows.shape[2:4]).flatten(3).permute(2, 0, 3, 1)[:, :, :length]


def _two_level_kernel(C: Tensor, B: Tensor, w: Tensor, dt: Tensor, length: int, discretization: str) -> Tensor:
    """Return the taps of a few channels: with l = i R + j, a product of ``C Bbar Abar^(iR)`` and ``Abar^j``."""
    step = s4d_step_constants(B, w, dt, discretization)
    block = isqrt(length - 1) + 1
    fine = _powers(step.decay, block + 1)
    coarse = _powers(fine[:, block], -(-length // block))
    rows = ((C * step.input)[:, :, None] * coarse).conj_physical()
    return 2 * (_real(rows) @ _real(fine[:, :block]).mT).flatten(2)[..., :length]


def s4d_kernel(C: Tensor, B: Tensor, w: Tensor, dt: Tensor, length: int, *, discretization: str = "zoh") -> Tensor:
    """Return the first taps of S4D's convolution kernel.

    K[l] = 2 Re sum_n C_n Bbar_n Abar_n^l      (S4D, section 3: a vector times a Vandermonde matrix)

    It takes O(N sqrt(L)) powers and one matrix product of O(N L) per channel, without forming the matrix. It always
    computes in float64, which no GPU setting rounds to TF32, and rounds the result once. Memory stays below a few
    hundred MiB, also in the backward, which recomputes tiles of channels.

    Args:
        C: Output filters, `(C, H, M)`, complex.
        B: `(S, M)`, complex; channel c reads copy ``c % S``.
        w: `(S, M)`, complex, negative real parts.
        dt: Step per channel, `(H,)`, positive.
        length: Number of taps L in tokens, positive.
        discretization: ``"zoh"`` or ``"bilinear"``, see `discretize`.

    Returns:
        `(C, H, L)`, real, in C's precision. Differentiable in every tensor.

    Raises:
        ValueError: A shape does not fit, the length is not positive or the discretisation unknown.
    """
    check_system(C, B, B, w, dt)
    check_positive(length=length)
    # the size of the tables depends on the length, so a symbolic one cannot be traced
    length = index(length)
    out_dtype, copies = C.real.dtype, dt.shape[0] // w.shape[0]
    C, dt = C.to(torch.complex128), dt.to(torch.float64)
    B, w = (x.to(torch.complex128).repeat(copies, 1) for x in (B, w))
    filters, channels, modes = C.shape
    tile = max(1, tile_numbers(w.device) // (8 * modes * (isqrt(length) + 2) * (1 + filters) + 3 * filters * length))
    parts = []
    for start in range(0, channels, tile):
        part = slice(start, start + tile)
        system = C[:, part], B[part], w[part], dt[part]
        parts.append(recomputed(_two_level_kernel, *system, length, discretization).to(out_dtype))
    return torch.cat(parts, dim=1)
