"""Powers of Abar without squarings, for the taps of S4's kernel and for advancing a state by a block of tokens.

Abar is diagonal plus ``g f``, a column times a row, so an orbit ``Abar^j x`` takes O(N) per step, and a power
``Abar^R = D^R + sum_j (Abar^j g) (f D^(R-1-j))`` is a product of N x R and R x N, whose left factor is an orbit too.
Abar is a contraction in these coordinates (its generator's Hermitian part is negative), so powers lose accuracy no
faster than the recurrence.

The forward computes in float64 and rounds once. The backward runs the orbits in reverse,
``la_j = dx_j + Abar' la_(j+1)``, in the caller's precision, and stores only rounded orbits and rows, O(N (R + C n))
per channel.

H channels · M = N/2 modes · C output filters · L taps · R tokens of a block · n blocks
"""

from itertools import pairwise
from math import ceil, isqrt, log2
from typing import Any

import torch
from torch import Tensor

from ..dispatch import NAMESPACE
from ..precision import full_precision
from .discrete import S4Step, to_complex, to_real, to_real_row, two_re


def two_level_kernel(C: Tensor, step: S4Step, length: int) -> Tensor:
    """Return the taps of a few channels, as ``C Abar^(iR)`` times ``Abar^j Bbar`` for l = i R + j.

    Args:
        C: `(C, H, M)`, complex, in the precision of the taps and of the backward.
        step: In complex128.
        length: L.

    Returns:
        `(C, H, L)`, computed in float64. Differentiable once.
    """
    block = 1 << ceil(log2(max(1, isqrt(length - 1) + 1)))
    kernel = _two_level(*step, C, block, -(-length // block))[0]
    return kernel.permute(2, 0, 1, 3).reshape(*C.shape[:2], -1)[..., :length]


def s4_block(step: S4Step, block: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return the constants that advance the states of a few channels by a block of tokens.

    Args:
        step: In complex128.
        block: R.
        dtype: Complex precision of the results and of the backward.

    Returns:
        ``Abar^j Bbar`` for j < R, `(R, H, M)`, and Abar^R over real coordinates, `(H, N, N)`. Differentiable once.
    """
    states, power = _block(*step, block, dtype)
    return states[:, :, 0], power


def _advance(x: Tensor, decay: Tensor, column: Tensor, row: Tensor, out: Tensor | None = None) -> Tensor:
    """Advance by one step without input; ``(conj D, conj f, conj g)`` for ``(D, g, f)`` gives the adjoint."""
    return torch.addcmul(column * two_re(row * x), decay, x, out=out)


def _total(x: Tensor) -> Tensor:
    """Sum `(R, H, n, M)` over R and n, one after the other: torch is fifty times slower at both at once."""
    return x.sum(0).sum(1)


def _orbits(decay: Tensor, column: Tensor, row: Tensor, input: Tensor, block: int) -> Tensor:
    """Return ``Abar^j Bbar`` and ``Abar^j g``, `(R, H, 2, M)`."""
    states = input.new_empty(block, input.shape[0], 2, input.shape[1])
    torch.stack([input, column], dim=1, out=states[0])
    decay, column, row = (x[:, None] for x in (decay, column, row))
    for last, place in pairwise(states.unbind()):
        _advance(last, decay, column, row, out=place)
    return states


def _power(states: Tensor, decay: Tensor, row: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return Abar^R `(H, N, N)`, its factors, each `(H, R, N)`, and ``D^(R-1), ..., 1``, `(H, R, M)`.

    The precision is that of `states`, but powers of D are computed in complex128: a rounded D would multiply the
    error by R.
    """
    block, square, powers = len(states), decay[:, None], torch.ones_like(decay)[:, None]
    while powers.shape[1] < block:
        powers = torch.cat([powers * square, powers], dim=1)
        square = square * square
    powers = powers[:, -block:]
    left, right = (
        x.to(states.real.dtype) for x in (to_real(states[:, :, 1].transpose(0, 1)), to_real_row(row[:, None] * powers))
    )
    power = left.mT @ right
    last = powers[:, 0] * decay
    for diagonal, part in zip(_diagonals(power), (last.real, last.real, last.imag, -last.imag), strict=True):
        diagonal += part
    return power, left, right, powers.to(states.dtype)


def _orbits_grad(
    orbit_grad: Tensor,
    power_grad: Tensor,
    decay: Tensor,
    column: Tensor,
    row: Tensor,
    states: Tensor,
    left: Tensor,
    right: Tensor,
    powers: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return gradients of decay, column, row and input, in complex128, from those of the orbits and of Abar^R.

    It overwrites `orbit_grad`; `states` are from `_orbits`, and what follows them from `_power`.
    """
    block = len(states)
    powers, decay, column, row = (x.to(states.dtype).conj_physical() for x in (powers, decay, column, row))
    # Abar^R: its right factor, its diagonal and its left factor, which is an orbit
    factor_grad = 2 * to_complex(left @ power_grad).conj_physical()
    exponents = torch.arange(block - 1, 0, -1, device=decay.device)[:, None]
    decay_grad = row * (exponents * powers[:, 1:] * factor_grad[:, :-1]).sum(1)
    decay_grad += block * powers[:, 0] * _dense_diagonal_grad(power_grad)
    row_grad = (powers * factor_grad).sum(1)
    orbit_grad[:, :, 1] += to_complex(right @ power_grad.mT).transpose(0, 1)
    # the orbits
    adjoint = [x[:, None] for x in (decay, row, column)]
    for j in reversed(range(block - 1)):
        orbit_grad[j] += _advance(orbit_grad[j + 1], *adjoint)
    before, after = states[:-1].conj_physical(), orbit_grad[1:]
    decay_grad += _total(before * after)
    row_grad += _total(before * two_re(adjoint[2] * after))
    column_grad = orbit_grad[0, :, 1] + _total(two_re(before * adjoint[1]) * after)
    grads = [x.to(torch.complex128) for x in (decay_grad, column_grad, row_grad)]
    return grads[0], grads[1], grads[2], orbit_grad[0, :, 0].to(torch.complex128, copy=True)


def _diagonals(x: Tensor) -> list[Tensor]:
    """View the four diagonals of `(H, N, N)` that a complex diagonal has over real coordinates, `(H, M)` each.

    They hold its real part twice, its imaginary part, and that with a minus.
    """
    upper, lower = (rows.chunk(2, dim=-1) for rows in x.chunk(2, dim=-2))
    return [part.diagonal(dim1=-2, dim2=-1) for part in (upper[0], lower[1], lower[0], upper[1])]


def _dense_diagonal_grad(grad: Tensor) -> Tensor:
    """Adjoint of adding a complex diagonal."""
    first, second, imag, negative = _diagonals(grad)
    return torch.complex(first + second, imag - negative)


@torch.library.custom_op(f"{NAMESPACE}::s4_block", mutates_args=())
def _block(
    decay: Tensor, column: Tensor, row: Tensor, input: Tensor, block: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Return both orbits, `(R, H, 2, M)`, and Abar^R; the arguments are the fields of an `S4Step`."""
    states = _orbits(decay, column, row, input, block)
    power = _power(states, decay, row)[0]
    rounded = states.to(dtype)
    return rounded, power.to(rounded.real.dtype)


@_block.register_fake
def _(decay: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    *_, block, dtype = rest
    channels, modes = decay.shape
    states = decay.new_empty(block, channels, 2, modes, dtype=dtype)
    return states, states.real.new_empty(channels, 2 * modes, 2 * modes)


@torch.library.custom_op(f"{NAMESPACE}::s4_block_grad", mutates_args=())
def _block_grad(
    orbit_grad: Tensor, power_grad: Tensor, decay: Tensor, column: Tensor, row: Tensor, states: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return gradients of `_block`'s tensors."""
    with full_precision(decay.device):
        _, *factors = _power(states, decay, row)
        orbit_grad = orbit_grad.clone(memory_format=torch.contiguous_format)
        return _orbits_grad(orbit_grad, power_grad, decay, column, row, states, *factors)


@_block_grad.register_fake
def _(_orbit_grad: Tensor, _power_grad: Tensor, decay: Tensor, *_others: Tensor) -> tuple[Tensor, ...]:
    return tuple(torch.empty_like(decay) for _ in range(4))


def _block_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.save_for_backward(*inputs[:3], output[0])


def _block_backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
    return *_block_grad(*grads, *ctx.saved_tensors), None, None


_block.register_autograd(_block_backward, setup_context=_block_context)


def _run(states: Tensor, power: Tensor, first: Tensor, group: int, offset: int) -> Tensor:
    """Scan in place; see `s4_block_scan`, whose `added` the states hold at first."""
    for i, (last, place) in enumerate(pairwise(states.unbind()), start=1):
        place.baddbmm_(last, power if (i + offset) % group else first)
    return states


def _by_channel(x: Tensor) -> Tensor:
    """Order `(n, H, B, N)` as `(H, n B, N)`."""
    return x.transpose(0, 1).flatten(1, 2)


@torch.library.custom_op(f"{NAMESPACE}::s4_block_scan", mutates_args=())
def s4_block_scan(added: Tensor, power: Tensor, first: Tensor, group: int, offset: int) -> Tensor:
    """Scan ``x_i = x_(i-1) P_i + added_i``, where P_i is `first` if the group divides i + offset, or `power`.

    Args:
        added: `(n, H, B, N)`.
        power: `(H, N, N)`, acts on rows.
        first: The same, for the first block of a group.
        group: Blocks of a group; the first may have another length.
        offset: Position of the first block in its group.

    Returns:
        Like `added`. Differentiable.
    """
    with full_precision(added.device):
        return _run(added.clone(memory_format=torch.contiguous_format), power, first, group, offset)


@s4_block_scan.register_fake
def _(added: Tensor, *_others: Any) -> Tensor:
    return torch.empty_like(added, memory_format=torch.contiguous_format)


def _scan_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, power, first, ctx.group, ctx.offset = inputs
    ctx.save_for_backward(output, power, first)


def _scan_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    states, power, first = ctx.saved_tensors
    count = len(states)
    # in reverse, block k is multiplied by the matrix that led to the block before it
    added_grad = s4_block_scan(grad.flip(0), power.mT, first.mT, ctx.group, -count - ctx.offset).flip(0)
    leads = [i for i in range(1, count) if (i + ctx.offset) % ctx.group == 0]
    others = [i for i in range(1, count) if (i + ctx.offset) % ctx.group]
    with full_precision(grad.device):
        power_grad, first_grad = (
            _by_channel(states[[i - 1 for i in which]]).mT @ _by_channel(added_grad[which])
            for which in (others, leads)
        )
    return added_grad, power_grad, first_grad, None, None


s4_block_scan.register_autograd(_scan_backward, setup_context=_scan_context)


@torch.library.custom_op(f"{NAMESPACE}::s4_two_level", mutates_args=())
def _two_level(
    decay: Tensor, column: Tensor, row: Tensor, input: Tensor, C: Tensor, block: int, count: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return ``C Abar^(iR)`` times ``Abar^j Bbar``, `(H, n, C, R)`, both orbits of a block, and rows `(n, H, C, N)`.

    All are computed in float64 and rounded to C's precision; the last two are for the backward.
    """
    states = _orbits(decay, column, row, input, block)
    rows = to_real_row(C.to(states.dtype)).transpose(0, 1)
    power = _power(states, decay, row)[0]
    rows = _run(torch.cat([rows[None], rows.new_zeros(count - 1, *rows.shape)]), power, power, 1, 0)
    kernel = _by_channel(rows) @ _by_channel(to_real(states[:, :, :1])).mT
    kernel = kernel.to(C.real.dtype).unflatten(1, (count, -1))
    return kernel, states.to(C.dtype), rows.to(C.real.dtype)


@_two_level.register_fake
def _(decay: Tensor, *given: Any) -> tuple[Tensor, Tensor, Tensor]:
    *_, C, block, count = given
    filters, channels, modes = C.shape
    return (
        C.real.new_empty(channels, count, filters, block),
        C.new_empty(block, channels, 2, modes),
        C.real.new_empty(count, channels, filters, 2 * modes),
    )


@torch.library.custom_op(f"{NAMESPACE}::s4_two_level_grad", mutates_args=())
def _two_level_grad(
    grad: Tensor, decay: Tensor, column: Tensor, row: Tensor, states: Tensor, rows: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return gradients of `_two_level`'s tensors."""
    grad = grad.flatten(1, 2)
    with full_precision(grad.device):
        power, *factors = _power(states, decay, row)
        row_grad = grad @ _by_channel(to_real(states[:, :, :1]))
        # contiguous, or torch would multiply one channel after the other
        row_grad = row_grad.unflatten(1, (len(rows), -1)).transpose(0, 1).flip(0).contiguous()
        row_grad = _run(row_grad, power.mT, power.mT, 1, 0).flip(0)
        power_grad = _by_channel(rows[:-1]).mT @ _by_channel(row_grad[1:])
        orbit_grad = to_complex(grad.mT @ _by_channel(rows)).transpose(0, 1)
        orbit_grad = torch.stack([orbit_grad, torch.zeros_like(orbit_grad)], dim=2)
        grads = _orbits_grad(orbit_grad, power_grad, decay, column, row, states, *factors)
    return *grads, 2 * to_complex(row_grad[0]).conj_physical().transpose(0, 1).contiguous()


@_two_level_grad.register_fake
def _(_grad: Tensor, decay: Tensor, *given: Tensor) -> tuple[Tensor, ...]:
    *_, states, rows = given
    return *(torch.empty_like(decay) for _ in range(4)), states.new_empty(rows.shape[2], *decay.shape)


def _two_level_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.save_for_backward(*inputs[:3], *output[1:])


def _two_level_backward(ctx: Any, grad: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
    return *_two_level_grad(grad, *ctx.saved_tensors), None, None


_two_level.register_autograd(_two_level_backward, setup_context=_two_level_context)
