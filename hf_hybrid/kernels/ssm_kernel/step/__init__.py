"""One decoded token of an S4 or S4D system, a single kernel on a GPU.

With gradients it runs in plain torch.

B batch · H channels · M = N/2 modes · C output filters
"""

from torch import Tensor

from ...dispatch import may_run_triton, needs_gradient
from ..discrete import S4Step
from ..s4d import S4DStep
from . import op, torch_impl

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
    column, row = (step.column, step.row) if isinstance(step, S4Step) else (None, None)
    tensors = state, u, C, step.decay, column, row, step.input, skip
    if not needs_gradient("ssm_step", backend, *tensors) and may_run_triton(backend, u):
        return op.ssm_step(*tensors, backend)
    return torch_impl.forward(*tensors)  # on a CPU calling a custom op costs as much as the step
