"""Two ways to S4's kernel, both in float64 and in tiles of channels.

``two_level`` splits the tap's index, l = i R + j with R near sqrt(L), and multiplies ``C Abar^(iR)`` with
``Abar^j Bbar``: O(N^2 sqrt(L) + N L) multiplications per channel, with a backward of its own. ``cauchy`` is S4's own
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

from ..dispatch import full_precision
from .discrete import _two_re, dense_diagonal, dense_transition, s4_step_constants, to_complex, to_real, to_real_row

_TILE = 1 << 22
"""Float64 numbers that one tile may hold: 32 MiB."""


def two_level_kernel(
    C: torch.Tensor, B: torch.Tensor, P: torch.Tensor, w: torch.Tensor, dt: torch.Tensor, length: int
) -> torch.Tensor:
    """The taps of a few channels by powers of Abar; arguments as for `s4_kernel`, copies already spread.

    Abar is a contraction in these coordinates (its generator's Hermitian part is negative), so its powers cost
    accuracy only as fast as the recurrence itself does.
    """
    step = _recomputed(s4_step_constants, B, P, w, dt)
    block = 1 << ceil(log2(max(1, isqrt(length - 1) + 1)))
    kernel = s4_two_level(*step, C, block, -(-length // block))[0]
    return kernel.permute(2, 0, 1, 3).reshape(*C.shape[:2], -1)[..., :length]


@torch.library.custom_op("hf_hybrid::s4_two_level", mutates_args=())
def s4_two_level(
    decay: torch.Tensor,
    column: torch.Tensor,
    row: torch.Tensor,
    input: torch.Tensor,
    C: torch.Tensor,
    block: int,
    count: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """``C Abar^(iR + j) Bbar`` as rows ``r_i = r_(i-1) Abar^R`` times columns ``c_j = Abar c_(j-1)``.

    Abar is diagonal plus ``g f``, a column times a row, and so its power needs no squarings:
    ``Abar^R = D^R + sum_j (Abar^j g) (f D^(R-1-j))``, a product of N x R and R x N, where the factors on the left are
    an orbit as the columns are.

    Args:
        decay: D, `(H, M)`, complex128.
        column: g, alike.
        row: f, alike.
        input: Bbar, alike.
        C: `(C, H, M)`, complex, in the precision of the backward.
        block: R, a power of two.
        count: Blocks n.

    Returns:
        `(H, n, C, R)`, float64, and what the backward needs: ``Abar^j Bbar`` and ``Abar^j g``, `(R, H, 2, M)`, and the
        rows, `(n, H, C, N)`, both in C's precision.
    """
    orbit = [torch.stack([input, column], dim=1)]
    constants = [x[:, None] for x in (decay, column, row)]
    while len(orbit) < block:
        orbit.append(_advance(orbit[-1], *constants))
    states = torch.stack(orbit)
    powers, last = _powers(decay, block)
    left, right = _factors(states[:, :, 1], powers, row)
    transition = torch.baddbmm(dense_diagonal(last), left.mT, right)
    orbit = [to_real_row(C.to(torch.complex128)).transpose(0, 1)]
    while len(orbit) < count:
        orbit.append(orbit[-1] @ transition)
    rows = torch.stack(orbit)
    kernel = _by_channel(rows) @ _by_channel(to_real(states[:, :, :1])).mT
    return kernel.unflatten(1, (count, -1)), states.to(C.dtype), rows.to(C.real.dtype)


@s4_two_level.register_fake
def _(
    decay: torch.Tensor,
    column: torch.Tensor,
    row: torch.Tensor,
    input: torch.Tensor,
    C: torch.Tensor,
    block: int,
    count: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    filters, channels, modes = C.shape
    return (
        decay.new_empty(channels, count, filters, block, dtype=torch.float64),
        C.new_empty(block, channels, 2, modes),
        C.new_empty(count, channels, filters, 2 * modes, dtype=C.real.dtype),
    )


@torch.library.custom_op("hf_hybrid::s4_two_level_grad", mutates_args=())
def s4_two_level_grad(
    grad: torch.Tensor,
    decay: torch.Tensor,
    column: torch.Tensor,
    row: torch.Tensor,
    states: torch.Tensor,
    rows: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of `s4_two_level`, in the precision of what it kept.

    Both orbits are run back, ``mu_i = dr_i + mu_(i+1) Abar^R'`` and ``la_j = dc_j + Abar' la_(j+1)``.

    Args:
        grad: Gradient of the taps, `(H, n, C, R)`.
        decay: As in the forward.
        column: Alike.
        row: Alike.
        states: Its second result.
        rows: Its third result.

    Returns:
        Gradients of decay, column, row, input and C.
    """
    with full_precision(grad.device):
        return _two_level_grad(grad, decay, column, row, states, rows)


@s4_two_level_grad.register_fake
def _(
    grad: torch.Tensor,
    decay: torch.Tensor,
    column: torch.Tensor,
    row: torch.Tensor,
    states: torch.Tensor,
    rows: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    decay_grad, g_grad, f_grad, input_grad = (torch.empty_like(decay) for _ in range(4))
    return decay_grad, g_grad, f_grad, input_grad, states.new_empty(rows.shape[2], *decay.shape)


def _two_level_grad(
    grad: torch.Tensor,
    decay: torch.Tensor,
    column: torch.Tensor,
    row: torch.Tensor,
    states: torch.Tensor,
    rows: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    block = len(states)
    # powers of a rounded number would be wrong by R times as much
    powers, last, decay, column, row = (x.to(states.dtype) for x in (*_powers(decay, block), decay, column, row))

    # rows and columns
    grad = grad.to(rows.dtype).flatten(1, 2)
    left, right = _factors(states[:, :, 1], powers, row)
    transition = torch.baddbmm(dense_diagonal(last), left.mT, right)
    row_grad = grad @ _by_channel(to_real(states[:, :, :1]))
    row_grad = row_grad.unflatten(1, (len(rows), -1)).transpose(0, 1).contiguous()
    for i in reversed(range(len(rows) - 1)):
        row_grad[i].baddbmm_(row_grad[i + 1], transition.mT)
    C_grad = 2 * to_complex(row_grad[0]).conj_physical().transpose(0, 1)
    column_grad = to_complex(grad.mT @ _by_channel(rows))

    # Abar^R: its diagonal, its right factor and its left one, which is an orbit as the columns are
    power_grad = _by_channel(rows[:-1]).mT @ _by_channel(row_grad[1:])
    powers, decay, column, row = (x.conj_physical() for x in (powers, decay, column, row))
    factor_grad = 2 * to_complex(left @ power_grad).conj_physical().transpose(0, 1)
    exponents = torch.arange(block - 1, 0, -1, device=grad.device)[:, None, None]
    decay_grad = row * (exponents * powers[1:] * factor_grad[:-1]).sum(0)
    decay_grad += block * powers[0] * _diagonal_grad(power_grad)
    f_grad = (powers * factor_grad).sum(0)
    state_grad = torch.stack([column_grad, to_complex(right @ power_grad.mT)], dim=2).transpose(0, 1).contiguous()

    # the orbits
    adjoint = [x[:, None] for x in (decay, row, column)]
    for j in reversed(range(block - 1)):
        state_grad[j] += _advance(state_grad[j + 1], *adjoint)
    before, after = states[:-1].conj_physical(), state_grad[1:]
    decay_grad += (before * after).sum((0, 2))
    f_grad += (before * _two_re(adjoint[2] * after)).sum((0, 2))
    g_grad = state_grad[0, :, 1] + (_two_re(before * adjoint[1]) * after).sum((0, 2))
    decay_grad, g_grad, f_grad, input_grad = (
        x.to(torch.complex128) for x in (decay_grad, g_grad, f_grad, state_grad[0, :, 0])
    )
    return decay_grad, g_grad, f_grad, input_grad, C_grad.contiguous()


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    decay, column, row, *_ = inputs
    _, states, rows = output
    ctx.save_for_backward(decay, column, row, states, rows)


def _backward(ctx: Any, grad: torch.Tensor, *_: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    return *s4_two_level_grad(grad, *ctx.saved_tensors), None, None


s4_two_level.register_autograd(_backward, setup_context=_setup_context)


def _advance(x: torch.Tensor, decay: torch.Tensor, column: torch.Tensor, row: torch.Tensor) -> torch.Tensor:
    """One step without an input; with ``(conj D, conj f, conj g)`` for ``(D, g, f)``, its adjoint."""
    return torch.addcmul(column * _two_re(row * x), decay, x)


def _powers(decay: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """``D^(R-1), ..., D, 1``, `(R, H, M)`, and ``D^R``."""
    powers = torch.ones_like(decay)[None]
    while len(powers) < count:
        powers = torch.cat([powers * decay, powers])
        decay = decay * decay
    return powers, decay


def _factors(orbit: torch.Tensor, powers: torch.Tensor, row: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Both factors of ``Abar^R - D^R``, rows ``Abar^j g`` and ``f D^(R-1-j)``, `(H, R, N)`, from `(R, H, M)`."""
    return to_real(orbit).transpose(0, 1).contiguous(), to_real_row(row * powers).transpose(0, 1).contiguous()


def _diagonal_grad(grad: torch.Tensor) -> torch.Tensor:
    """Adjoint of `dense_diagonal`."""
    real, imag = (x.chunk(2, dim=-1) for x in grad.chunk(2, dim=-2))
    diagonals = [x.diagonal(dim1=-2, dim2=-1) for x in (*real, *imag)]
    return torch.complex(diagonals[0] + diagonals[3], diagonals[2] - diagonals[1])


def _by_channel(x: torch.Tensor) -> torch.Tensor:
    """Order `(n, H, C, N)` as `(H, n C, N)`."""
    return x.transpose(0, 1).flatten(1, 2)


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
    C = C.to(torch.complex128)
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


def _recomputed(function: Callable[..., Any], *args: torch.Tensor | int) -> Any:
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
    tile = max(1, _TILE // size)
    parts = []
    for start in range(0, channels, tile):
        part = slice(start, start + tile)
        arguments = C[:, part], B[part], P[part], w[part], dt[part], length
        taps = two_level_kernel(*arguments) if algorithm == "two_level" else _recomputed(cauchy_kernel, *arguments)
        parts.append(taps.to(out_dtype))
    return torch.cat(parts, dim=1)
