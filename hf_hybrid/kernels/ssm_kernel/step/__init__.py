"""One decoded token of an S4 or S4D system, a single kernel on a GPU.

With gradients it runs in plain torch.

B batch · H channels · M = N/2 modes · C output filters
"""

from typing import Any

import torch
from torch import Tensor

from ...dispatch import NAMESPACE, may_run_triton, needs_gradient, triton_if_chosen
from ..discrete import S4Step, s4_step
from ..s4d import S4DStep, s4d_step

__all__ = ["ssm_step"]


def ssm_step(
    state: Tensor | None,
    u: Tensor,
    C: Tensor,
    step: S4Step | S4DStep,
    skip: Tensor | None = None,
    *,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """Advance every channel by one token and read it by all output filters, in O(C N).

    x <- decay x + column 2Re(row . x) + input u,  y_c = 2 Re C_c x + skip_c u      (SPADE, eq. 3; S4D without column)

    Args:
        state: x as real and imaginary parts, `(B, H, M, 2)`; zeros when None.
        u: One token, `(B, H)`, any floating dtype and strides.
        C: `(C, H, M)`, complex.
        step: From `s4_step_constants` or `s4d_step_constants`, in C's dtype.
        skip: `(C, H)` or None.
        backend: `"auto"`, `"torch"` or `"triton"`, see `hf_hybrid.kernels.dispatch`; `"triton"` has no gradient.

    Returns:
        y `(B, C, H)` in u's dtype, and the next state `(B, H, M, 2)` in the real dtype of C, that of the computation.

    Raises:
        ValueError: A shape does not fit; the message names the argument, its value and the rule.
    """
    shape = (u.shape[0], *C.shape[1:], 2)
    if u.dim() != 2 or C.dim() != 3 or C.shape[1] != u.shape[1] or not C.is_complex():
        raise ValueError(
            f"C must be complex (C, H, M) for u of (B, H); got {tuple(C.shape)} of {C.dtype} for {tuple(u.shape)}"
        )
    if state is not None and state.shape != shape:
        raise ValueError(f"state must be (B, H, M, 2) = {shape}; got {tuple(state.shape)}")
    if skip is not None and skip.shape != C.shape[:2]:
        raise ValueError(f"skip must be (C, H) = {tuple(C.shape[:2])}; got {tuple(skip.shape)}")
    if not needs_gradient("ssm_step", backend, state, u, C, *step, skip) and may_run_triton(backend, u):
        column, row = (step.column, step.row) if isinstance(step, S4Step) else (None, None)
        return _ssm_step(state, u, C, step.decay, column, row, step.input, skip, backend)
    return _advance(state, u, C, step, skip)  # on a CPU calling a custom op costs as much as the step


def _real_dtype(C: Tensor) -> torch.dtype:
    return torch.float64 if C.dtype == torch.complex128 else torch.float32


def _advance(
    state: Tensor | None, u: Tensor, C: Tensor, step: S4Step | S4DStep, skip: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Compute `ssm_step` in plain torch."""
    wide = _real_dtype(C)
    token = u.to(wide)
    x = None if state is None else torch.view_as_complex(state.to(wide).contiguous())
    x = C.new_zeros(u.shape[0], *C.shape[1:]) if x is None else x
    y, x = s4_step(x, token, C, step) if isinstance(step, S4Step) else s4d_step(x, token, C, step)
    y = y if skip is None else y + skip.to(wide) * token[:, None]
    return y.to(u.dtype), torch.view_as_real(x)


@torch.library.custom_op(f"{NAMESPACE}::ssm_step", mutates_args=())
def _ssm_step(
    state: Tensor | None,
    u: Tensor,
    C: Tensor,
    decay: Tensor,
    column: Tensor | None,
    row: Tensor | None,
    gain: Tensor,
    skip: Tensor | None,
    backend: str,
) -> tuple[Tensor, Tensor]:
    """Advance by one token, not differentiable; only S4 has `column` and `row`; `gain` is the step's input vector."""
    tensors = u, C, decay, column, row, gain, state, skip
    kernels = triton_if_chosen("ssm_step", __package__, backend, tensors, lambda k: k.why_not(u, C))
    if kernels is not None:
        return kernels.forward(state, u, C, decay, column, row, gain, skip)
    if column is None or row is None:
        return _advance(state, u, C, S4DStep(decay, gain), skip)
    return _advance(state, u, C, S4Step(decay, column, row, gain), skip)


@_ssm_step.register_fake
def _(_state: Tensor | None, u: Tensor, C: Tensor, *_others: Any) -> tuple[Tensor, Tensor]:
    return u.new_empty(u.shape[0], *C.shape[:2]), u.new_empty(u.shape[0], *C.shape[1:], 2, dtype=_real_dtype(C))
