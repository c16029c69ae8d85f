"""Two ways to S4's kernel, both in float64 and in tiles whose intermediate results a backward recomputes.

``two_level`` splits the tap's index, l = i R + j, and multiplies ``C Abar^(iR)`` with ``Abar^j Bbar``: batched real
matrix products of O(N^2 sqrt(L) + N^3 log L + N L) per channel. ``cauchy`` is S4's own algorithm, the truncated
generating function on the unit circle, O(N L) divisions. They agree to rounding; the first is several times faster.

H channels · S copies of (A, B) · M = N/2 modes · C output filters · L taps
"""

from collections.abc import Callable
from math import ceil, isqrt, log2
from operator import index

import torch
from torch.utils.checkpoint import checkpoint

from .discrete import dense_transition, s4_step_constants, to_complex, to_real, to_real_row

_TILE = 1 << 22
"""Float64 numbers that one tile may hold: 32 MiB."""


def two_level_kernel(
    C: torch.Tensor, B: torch.Tensor, P: torch.Tensor, w: torch.Tensor, dt: torch.Tensor, length: int
) -> torch.Tensor:
    """The taps of a few channels by powers of Abar; arguments as for `s4_kernel`, copies already spread.

    Abar is a contraction in these coordinates (its generator's Hermitian part is negative), so doubling the power
    costs accuracy only as fast as the recurrence itself does.
    """
    step = s4_step_constants(B, P, w, dt)
    power = dense_transition(step)
    columns = to_real(step.input)[..., None]
    block = 1 << ceil(log2(max(1, isqrt(length - 1) + 1)))
    while columns.shape[-1] < block:
        columns = torch.cat([columns, power @ columns], dim=-1)
        power = power @ power
    count = -(-length // block)
    filters, channels = C.shape[:2]
    # rows of one channel are ordered by block, then by output filter
    rows = to_real_row(C).transpose(0, 1)
    while rows.shape[1] < count * filters:
        rows = torch.cat([rows, rows[:, : count * filters - rows.shape[1]] @ power], dim=1)
        if rows.shape[1] < count * filters:
            power = power @ power
    kernel = (rows @ columns).view(channels, count, filters, block)
    return kernel.permute(2, 0, 1, 3).reshape(filters, channels, -1)[..., :length]


def cauchy_kernel(
    C: torch.Tensor, B: torch.Tensor, P: torch.Tensor, w: torch.Tensor, dt: torch.Tensor, length: int
) -> torch.Tensor:
    """The taps of a few channels by the truncated generating function; arguments as for `two_level_kernel`.

    With Ct = C (I - Abar^L), om = exp(-2 pi i k / L) and q_ab = sum_n a_n b_n / (2 (1 - om) - dt w_n (1 + om)),
    Khat = 2 dt (q_CB - q_CP dt (1 + om) q_PB / (1 + dt (1 + om) q_PP)),  K = irfft(Khat)
    (Gu et al. 2022, "Efficiently Modeling Long Sequences with Structured State Spaces", appendix C.3).

    Note:
        The paper's sums run over z - dt w with z = 2 (1 - om) / (1 + om), which is infinite at om = -1. The factor
        1 + om is multiplied in here, so that the Nyquist frequency is no special case.
    """
    power = torch.linalg.matrix_power(dense_transition(s4_step_constants(B, P, w, dt)), length)
    row = to_real_row(C).transpose(0, 1)
    truncated = to_complex((row - row @ power) / 2).conj_physical()
    filters = C.shape[0]
    numerators = torch.cat([truncated * B[:, None], truncated * P[:, None], (P.conj_physical() * B)[:, None]], dim=1)
    numerators = torch.cat([numerators, (P.conj_physical() * P)[:, None]], dim=1).transpose(1, 2)
    frequencies = length // 2 + 1
    tile = max(1, _TILE // (16 * w.numel()))
    sections = [
        _recomputed(_cauchy_section, numerators, w, dt, filters, length, start, min(start + tile, frequencies))
        for start in range(0, frequencies, tile)
    ]
    return torch.fft.irfft(torch.cat(sections, dim=1), n=length, dim=1).permute(2, 0, 1)


def _cauchy_section(
    numerators: torch.Tensor, w: torch.Tensor, dt: torch.Tensor, filters: int, length: int, start: int, stop: int
) -> torch.Tensor:
    """The transfer function at frequencies `start` to `stop`, `(H, stop - start, C)`."""
    angle = torch.arange(start, stop, dtype=torch.float64, device=w.device) * (-2 * torch.pi / length)
    om = torch.polar(torch.ones_like(angle), angle)[:, None]
    dt = dt[:, None, None]
    pole = dt * w[:, None]
    sums = (2 * (1 - om) - pole * (1 + om)).reciprocal() @ numerators
    sums = sums + (2 * (1 - om) - pole.conj_physical() * (1 + om)).reciprocal() @ numerators.conj_physical()
    q_cb, q_cp, q_pb, q_pp = sums.split([filters, filters, 1, 1], dim=-1)
    weight = dt * (1 + om)
    return 2 * dt * (q_cb - q_cp * (weight * q_pb / (1 + weight * q_pp)))


def _recomputed(function: Callable[..., torch.Tensor], *args: torch.Tensor | int) -> torch.Tensor:
    """Call a function; where a gradient is needed, keep its arguments only and call it again in the backward."""
    if torch.is_grad_enabled() and any(isinstance(arg, torch.Tensor) and arg.requires_grad for arg in args):
        return checkpoint(function, *args, use_reentrant=False, preserve_rng_state=False)
    return function(*args)


ALGORITHMS = {"two_level": two_level_kernel, "cauchy": cauchy_kernel}


def s4_kernel(
    C: torch.Tensor,
    B: torch.Tensor,
    P: torch.Tensor,
    w: torch.Tensor,
    dt: torch.Tensor,
    length: int,
    algorithm: str,
) -> torch.Tensor:
    """Run an algorithm over tiles of channels; see `hf_hybrid.kernels.ssm_kernel.s4_kernel`."""
    # the number of matrix products depends on the length: a trace for a symbolic one does not exist
    length = index(length)
    out_dtype = C.real.dtype
    copies = dt.shape[0] // w.shape[0]
    C, dt = C.to(torch.complex128), dt.to(torch.float64)
    B, P, w = (x.to(torch.complex128).repeat(copies, 1) for x in (B, P, w))
    filters, channels, modes = C.shape
    size = 4 * modes * modes * (ceil(log2(length)) + 2) + 8 * modes * isqrt(length) * (1 + filters)
    tile = max(1, _TILE // (size + 3 * filters * length))
    parts = []
    for start in range(0, channels, tile):
        part = slice(start, start + tile)
        parts.append(
            _recomputed(ALGORITHMS[algorithm], C[:, part], B[part], P[part], w[part], dt[part], length).to(out_dtype)
        )
    return torch.cat(parts, dim=1)
