"""The diagonal recurrence as a work-efficient parallel scan (Blelloch 1990), as an opaque op with its own backward.

Blocks of 2, 4, 8, ... tokens are reduced to their last state by one multiplication with a, a^2, a^4, ... (up), then
every block hands its last state to the half block behind it (down): local results and carry as in a scan by chunks,
on every scale at once. It happens in place, with at most 2 T multiplications and additions per state, and roundings
grow with log2(T) where a loop's grow with the memory of the recurrence. Because a is constant over time, no products
of it are scanned; its powers are squared in float64.

Shapes: `B` batch · `T` length · `P` states.
"""

from typing import Any

import torch
from torch import Tensor

from ..dispatch import choose_backend


def _why_not_triton() -> str | None:
    return "diagonal_scan has no Triton kernel yet"


def _rows(length: int, first: int, stride: int, reverse: bool) -> tuple[slice, slice]:
    """Every other block's row, counted in the scan's direction from `first` on, and the row `stride` before each."""
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


@torch.library.custom_op("hf_hybrid::diagonal_scan", mutates_args=())
def _forward(a: Tensor, b: Tensor, initial_state: Tensor | None, reverse: bool, backend: str) -> Tensor:
    # Chosen in here, where no tracer looks, because the choice reads the environment and logs.
    choose_backend("diagonal_scan", backend, [a, b], _why_not_triton)
    x = b.clone(memory_format=torch.contiguous_format)
    if initial_state is not None:
        x[:, -1 if reverse else 0].addcmul_(a, initial_state)
    _scan_in_place(a, x, reverse)
    return x


@_forward.register_fake
def _(a: Tensor, b: Tensor, initial_state: Tensor | None, reverse: bool, backend: str) -> Tensor:
    return torch.empty_like(b, memory_format=torch.contiguous_format)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    a, _, initial_state, ctx.reverse, ctx.backend = inputs
    keeps_states = ctx.needs_input_grad[0]
    ctx.save_for_backward(a, output if keeps_states else None, initial_state if keeps_states else None)


def _differentiate(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    """The adjoint runs the other way: d[t] = grad[t] + conj(a) d[t+1],  da = sum over t of conj(x[t-1]) d[t]."""
    a, states, initial_state = ctx.saved_tensors
    adjoint = a.conj_physical()
    d = _forward(adjoint, grad, None, not ctx.reverse, ctx.backend)
    first = -1 if ctx.reverse else 0
    d_a = d_initial = None
    if ctx.needs_input_grad[0]:
        before, after = (states[:, 1:], d[:, :-1]) if ctx.reverse else (states[:, :-1], d[:, 1:])
        d_a = (before.conj_physical() * after).sum((0, 1))
        if initial_state is not None:
            d_a = d_a + (initial_state.conj_physical() * d[:, first]).sum(0)
    if ctx.needs_input_grad[2]:
        d_initial = adjoint * d[:, first]
    return d_a, d, d_initial, None, None


_forward.register_autograd(_differentiate, setup_context=_save)


def diagonal_scan(
    a: Tensor, b: Tensor, *, initial_state: Tensor | None = None, reverse: bool = False, backend: str = "auto"
) -> tuple[Tensor, Tensor]:
    """Compute `hf_hybrid.kernels.diagonal_scan`; arguments as there, not checked again."""
    states = _forward(a, b, initial_state, reverse, backend)
    # a copy, so that whoever keeps the last state does not keep all of them
    return states, states[:, 0 if reverse else -1].clone()
