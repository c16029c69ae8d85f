"""Two ways to S4's kernel, both in float64 and in tiles of channels.

``two_level`` splits the tap's index, l = i R + j with R near sqrt(L), and multiplies ``C Abar^(iR)`` with
``Abar^j Bbar``: O(N^2 sqrt(L) + N L) multiplications per channel, see `two_level`. ``cauchy`` is S4's own
algorithm, the truncated generating function on the unit circle, O(N L) divisions, whose tiles a backward computes
again. They agree to rounding; the first is several times faster.

H channels · S copies of (A, B) · M = N/2 modes · C output filters · L taps · R taps of a block
"""

from collections.abc import Callable
from math import ceil, isqrt, log2
from operator import index
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from .discrete import dense_transition, s4_step_constants, to_complex, to_real_row
from .two_level import two_level_kernel

_CPU_TILE = 1 << 22
"""Float64 numbers that one tile may hold: 32 MiB."""

_GPU_TILE = 1 << 25
"""The same elsewhere, where each tile costs hundreds of launches."""


def tile_numbers(device: torch.device) -> int:
    """Float64 numbers that one tile may hold."""
    return _CPU_TILE if device.type == "cpu" else _GPU_TILE


def cauchy_kernel(
    C: torch.Tensor, B: torch.Tensor, P: torch.Tensor, w: torch.Tensor, dt: torch.Tensor, length: int
) -> torch.Tensor:
    """The taps of a few channels by the truncated generating function; arguments as for `s4_kernel`, copies spread.

    With Ct = C (I - Abar^L), om = exp(-2 pi i k / L) and q_ab = sum_n a_n b_n / (2 (1 - om) - dt w_n (1 + om)),
    Khat = 2 dt (q_CB - q_CP dt (1 + om) q_PB / (1 + dt (1 + om) q_PP)),  K = irfft(Khat)
    (Gu et al. 2022, "Efficiently Modeling Long Sequences with Structured State Spaces", appendix C.3).

    Note:
        The paper's sums run over z - dt w with z = 2 (1 - om) / (1 + om), which is infinite at om = -1. The factor
        1 + om is multiplied in here, so that the Nyquist frequency is no special case.
    """
    C = C.to(torch.complex128)
    power = torch.linalg.matrix_power(dense_transition(s4_step_constants(B, P, w, dt)), length)
    row = to_real_row(C).transpose(0, 1)
    truncated = to_complex((row - row @ power) / 2).conj_physical()
    filters = C.shape[0]
    numerators = torch.cat([truncated * B[:, None], truncated * P[:, None], (P.conj_physical() * B)[:, None]], dim=1)
    numerators = torch.cat([numerators, (P.conj_physical() * P)[:, None]], dim=1).transpose(1, 2)
    frequencies = length // 2 + 1
    tile = max(1, tile_numbers(w.device) // (16 * w.numel()))
    sections = [
        recomputed(_cauchy_section, numerators, w, dt, filters, length, start, min(start + tile, frequencies))
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


def recomputed(function: Callable[..., Any], *args: torch.Tensor | int) -> Any:
    """Call a function; where a gradient is needed, keep its arguments only and call it again in the backward."""
    if torch.is_grad_enabled() and any(isinstance(arg, torch.Tensor) and arg.requires_grad for arg in args):
        return checkpoint(function, *args, use_reentrant=False, preserve_rng_state=False)
    return function(*args)


ALGORITHMS = ("two_level", "cauchy")


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
    dt = dt.to(torch.float64)
    B, P, w = (x.to(torch.complex128).repeat(copies, 1) for x in (B, P, w))
    filters, channels, modes = C.shape
    size = 8 * modes * modes + 16 * modes * isqrt(length) * (2 + filters) + 3 * filters * length
    if algorithm == "cauchy":
        size += 4 * modes * modes * ceil(log2(length))
    tile = max(1, tile_numbers(w.device) // size)
    parts = []
    for start in range(0, channels, tile):
        part = slice(start, start + tile)
        system = B[part], P[part], w[part], dt[part]
        if algorithm == "cauchy":
            taps = recomputed(cauchy_kernel, C[:, part], *system, length)
        else:
            taps = two_level_kernel(C[:, part], recomputed(s4_step_constants, *system), length)
        parts.append(taps.to(out_dtype))
    return torch.cat(parts, dim=1)
