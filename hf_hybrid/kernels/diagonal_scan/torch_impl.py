"""The diagonal recurrence as a work-efficient parallel scan (Blelloch 1990).

The up sweep reduces blocks of 2, 4, 8, ... tokens to their last state by one multiplication with a, a^2, a^4, ...;
the down sweep passes each block's last state to the half block after it. The scan works in place with at most 2 T
multiplications and additions per state. Rounding errors grow with log2(T), those of a loop with the memory of the
recurrence. Because a is constant, only its powers are needed, squared in float64.

Shapes: `B` batch · `T` length · `P` states.
"""

import torch
from torch import Tensor

from ..packed import run_each


def _rows(length: int, first: int, stride: int, reverse: bool) -> tuple[slice, slice]:
    """Return every other block's row from `first` on in the scan's direction, and the row `stride` before each."""
    if reverse:
        start, stop = (length - 1 - first) % (2 * stride), length - first
        return slice(start, stop, 2 * stride), slice(start + stride, stop + stride, 2 * stride)
    return slice(first, length, 2 * stride), slice(first - stride, length - stride, 2 * stride)


def _scan_in_place(a: Tensor, x: Tensor, reverse: bool) -> None:
    """Turn x from b into the states."""
    length = x.shape[1]
    factors, power = [], a.to(torch.complex128 if a.is_complex() else torch.float64)
    strides = [1 << level for level in range(length.bit_length() - 1)]
    for stride in strides:
        factors.append(power.to(a.dtype))
        target, source = _rows(length, 2 * stride - 1, stride, reverse)
        x[:, target].addcmul_(factors[-1], x[:, source])
        power = power * power
    for stride in reversed(strides):
        if 3 * stride <= length:
            target, source = _rows(length, 3 * stride - 1, stride, reverse)
            x[:, target].addcmul_(factors.pop(), x[:, source])
        else:
            factors.pop()


def _scan_alone(
    b: Tensor, initial_state: Tensor | None, a: Tensor, reverse: bool, transposed: bool
) -> tuple[Tensor, Tensor]:
    """Run `forward` on a batch or one sequence, which may be empty."""
    x = b.to(a.dtype, copy=True, memory_format=torch.contiguous_format)
    if b.shape[1] == 0:
        return x.to(b.dtype), x.sum(1) if initial_state is None else initial_state.clone()
    first, last = (-1, 0) if reverse else (0, -1)
    if initial_state is not None and transposed:
        x[:, first] += initial_state
    elif initial_state is not None:
        x[:, first].addcmul_(a, initial_state)
    _scan_in_place(a, x, reverse)
    return x.to(b.dtype), a * x[:, last] if transposed else x[:, last].clone()


def forward(
    a: Tensor,
    b: Tensor,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    reverse: bool,
    transposed: bool,
) -> tuple[Tensor, Tensor]:
    """Return states in b's dtype and the final one in a's; not differentiable."""
    if cu_seqlens is None:
        return _scan_alone(b, initial_state, a, reverse, transposed)

    def alone(b: Tensor, initial_state: Tensor | None) -> tuple[Tensor, Tensor]:
        return _scan_alone(b, initial_state, a, reverse, transposed)

    x, final = run_each(alone, cu_seqlens, (b,), initial_state, states_out=1)
    return x, final


def backward(
    grad: Tensor,
    grad_final: Tensor,
    a: Tensor,
    states: Tensor,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    reverse: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return gradients of b, the initial state and a."""
    d, d_initial = forward(a.conj_physical(), grad, grad_final, cu_seqlens, not reverse, True)
    return d, d_initial, pair(states, d, initial_state, cu_seqlens, reverse, a.dtype)


def _before(x: Tensor, initial_state: Tensor | None, cu_seqlens: Tensor, reverse: bool) -> Tensor:
    """Return the state before each token of packed sequences, `(1, T, P)`."""
    token = torch.arange(x.shape[1], device=x.device)
    sequence = torch.searchsorted(cu_seqlens[1:].contiguous(), token, right=True)
    first = token == (cu_seqlens[1:][sequence] - 1 if reverse else cu_seqlens[sequence])
    edge = x.new_zeros(()) if initial_state is None else initial_state[sequence].to(x.dtype)
    return torch.where(first[:, None], edge, x.roll(-1 if reverse else 1, dims=1))


def pair(
    x: Tensor, d: Tensor, initial_state: Tensor | None, cu_seqlens: Tensor | None, reverse: bool, dtype: torch.dtype
) -> Tensor:
    """Return the sum over tokens of conj(x[t-1]) d[t], `(P,)`; x[-1] is the initial state."""
    if cu_seqlens is not None:
        return _product(_before(x, initial_state, cu_seqlens, reverse), d, dtype)
    before, after, first = (x[:, 1:], d[:, :-1], -1) if reverse else (x[:, :-1], d[:, 1:], 0)
    total = _product(before, after, dtype)
    return total if initial_state is None else total + _product(initial_state[:, None], d[:, first, None], dtype)


def _product(x: Tensor, d: Tensor, dtype: torch.dtype) -> Tensor:
    return (x.to(dtype).conj_physical() * d.to(dtype)).sum((0, 1))
