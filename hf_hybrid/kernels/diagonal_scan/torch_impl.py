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

from ..dispatch import NAMESPACE, choose_backend, wished_backend
from ..packed import run_each


def _runs_on_triton(backend: str, b: Tensor, *others: Tensor | None) -> bool:
    """Choose the backend, in the op, where no tracer looks, because the choice reads the environment and logs."""

    def why_not() -> str | None:
        from .triton_kernels import why_not

        return why_not(b)

    return choose_backend("diagonal_scan", backend, [b, *others], why_not) == "triton"


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


def _scan_alone(
    b: Tensor, initial_state: Tensor | None, a: Tensor, reverse: bool, transposed: bool
) -> tuple[Tensor, Tensor]:
    """One sequence or a batch of them, also without tokens, as for `_scan`."""
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


@torch.library.custom_op(f"{NAMESPACE}::diagonal_scan", mutates_args=())
def _scan(
    a: Tensor,
    b: Tensor,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    reverse: bool,
    transposed: bool,
    backend: str,
) -> tuple[Tensor, Tensor]:
    """States and the final one: x = a c + b, c <- x; or, `transposed`, x = c + b, c <- a x, from c = initial_state."""
    if _runs_on_triton(backend, b, a, initial_state, cu_seqlens):
        from . import triton_kernels

        x, final, _ = triton_kernels.run(a, b, initial_state, cu_seqlens, reverse, transposed)
        return x, final
    if cu_seqlens is None:
        return _scan_alone(b, initial_state, a, reverse, transposed)

    def alone(b: Tensor, initial_state: Tensor | None) -> tuple[Tensor, Tensor]:
        return _scan_alone(b, initial_state, a, reverse, transposed)

    x, final = run_each(alone, cu_seqlens, (b,), initial_state, states_out=1)
    return x, final


@_scan.register_fake
def _(
    a: Tensor,
    b: Tensor,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    reverse: bool,
    transposed: bool,
    backend: str,
) -> tuple[Tensor, Tensor]:
    sequences = b.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    return torch.empty_like(b, memory_format=torch.contiguous_format), a.new_empty(sequences, b.shape[2])


def _before(x: Tensor, initial_state: Tensor | None, cu_seqlens: Tensor, reverse: bool) -> Tensor:
    """The state before each token of packed sequences, `(1, T, P)`."""
    token = torch.arange(x.shape[1], device=x.device)
    sequence = torch.searchsorted(cu_seqlens[1:].contiguous(), token, right=True)
    first = token == (cu_seqlens[1:][sequence] - 1 if reverse else cu_seqlens[sequence])
    edge = x.new_zeros(()) if initial_state is None else initial_state[sequence].to(x.dtype)
    return torch.where(first[:, None], edge, x.roll(-1 if reverse else 1, dims=1))


def _pair(
    x: Tensor, d: Tensor, initial_state: Tensor | None, cu_seqlens: Tensor | None, reverse: bool, dtype: torch.dtype
) -> Tensor:
    """The sum over tokens of conj(x[t-1]) d[t], `(P,)`, where the initial state is before the first."""
    if cu_seqlens is not None:
        return _product(_before(x, initial_state, cu_seqlens, reverse), d, dtype)
    before, after, first = (x[:, 1:], d[:, :-1], -1) if reverse else (x[:, :-1], d[:, 1:], 0)
    total = _product(before, after, dtype)
    return total if initial_state is None else total + _product(initial_state[:, None], d[:, first, None], dtype)


def _product(x: Tensor, d: Tensor, dtype: torch.dtype) -> Tensor:
    return (x.to(dtype).conj_physical() * d.to(dtype)).sum((0, 1))


@torch.library.custom_op(f"{NAMESPACE}::diagonal_scan_backward", mutates_args=())
def _differentiate(
    grad: Tensor,
    grad_final: Tensor,
    a: Tensor,
    states: Tensor,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    reverse: bool,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of b, the initial state and a, in one pass where Triton runs."""
    adjoint = a.conj_physical()
    if _runs_on_triton(backend, grad, a, initial_state, cu_seqlens):
        from . import triton_kernels

        d, d_initial, d_a = triton_kernels.run(
            adjoint, grad, grad_final, cu_seqlens, not reverse, True, states, initial_state
        )
        assert d_a is not None
        return d, d_initial, d_a
    d, d_initial = _scan(adjoint, grad, grad_final, cu_seqlens, not reverse, True, "torch")
    return d, d_initial, _pair(states, d, initial_state, cu_seqlens, reverse, a.dtype)


@_differentiate.register_fake
def _(
    grad: Tensor,
    grad_final: Tensor,
    a: Tensor,
    states: Tensor,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    reverse: bool,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor]:
    like = [torch.empty_like(x, memory_format=torch.contiguous_format) for x in (grad, grad_final, a)]
    return like[0], like[1], like[2]


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    a, _, initial_state, cu_seqlens, ctx.reverse, ctx.transposed, backend = inputs
    ctx.backend = wished_backend(backend)
    keeps_states = ctx.needs_input_grad[0]
    ctx.save_for_backward(a, output[0] if keeps_states else None, initial_state if keeps_states else None, cu_seqlens)


def _backward(ctx: Any, grad: Tensor, grad_final: Tensor) -> tuple[Tensor | None, ...]:
    """The transpose of the recurrence, and that of the transpose, with the gradient of a:

    d[t] = grad[t] + c, c <- conj(a) d[t];  da = sum over t of conj(x[t-1]) d[t], or of conj(x[t]) d[t-1] transposed.
    """  # noqa: D415
    a, states, initial_state, cu_seqlens = ctx.saved_tensors
    d_a = None
    # what a gradient is taken of again is made of ops that have one
    if ctx.needs_input_grad[0] and not ctx.transposed and not torch.is_grad_enabled():
        d, d_initial, d_a = _differentiate(
            grad, grad_final, a, states, initial_state, cu_seqlens, ctx.reverse, ctx.backend
        )
    else:
        settings = (cu_seqlens, not ctx.reverse, not ctx.transposed, ctx.backend)
        d, d_initial = _scan(a.conj_physical(), grad, grad_final, *settings)
        if ctx.needs_input_grad[0] and ctx.transposed:
            d_a = _pair(d, states, grad_final, cu_seqlens, not ctx.reverse, a.dtype).conj_physical()
        elif ctx.needs_input_grad[0]:
            d_a = _pair(states, d, initial_state, cu_seqlens, ctx.reverse, a.dtype)
    return d_a, d, d_initial if ctx.needs_input_grad[2] else None, *(None,) * 4


_scan.register_autograd(_backward, setup_context=_save)


def diagonal_scan(
    a: Tensor,
    b: Tensor,
    *,
    initial_state: Tensor | None = None,
    reverse: bool = False,
    cu_seqlens: Tensor | None = None,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """Compute `hf_hybrid.kernels.diagonal_scan`; arguments as there, not checked again."""
    states, final = _scan(a, b, initial_state, cu_seqlens, reverse, False, backend)
    return states, final
