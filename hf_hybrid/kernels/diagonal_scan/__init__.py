"""Scan of a diagonal linear recurrence that stays the same over time, as in S5: linear work, logarithmic depth."""

import torch
from torch import Tensor

from . import torch_impl

__all__ = ["diagonal_scan"]

_DTYPES = (torch.float32, torch.float64, torch.complex64, torch.complex128)


def diagonal_scan(
    a: Tensor,
    b: Tensor,
    *,
    initial_state: Tensor | None = None,
    reverse: bool = False,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """Run a recurrence of decoupled states over a sequence, all tokens in parallel.

    Shapes: `B` batch · `T` length · `P` states.

        x[t] = a x[t-1] + b[t]      (S5, section 3, with a = diag(Abar) and b[t] = Bbar u[t])

    O(T P) multiplications, forward and backward, in 2 log2(T) steps over memory of the input's size. Saved for the
    backward pass is x alone, and that only where a is trained.

    Args:
        a: `(P,)`, float32, float64, complex64 or complex128; magnitudes up to 1 for a recurrence that stays bounded.
        b: `(B, T, P)` in a's dtype.
        initial_state: x before the first token, `(B, P)` in a's dtype; zeros when None.
        reverse: Whether to run from the last token to the first, x[t] = a x[t+1] + b[t]; the initial state then lies
            behind the last token.
        backend: `"auto"`, `"torch"` or `"triton"`, see `hf_hybrid.kernels.dispatch`.

    Returns:
        x `(B, T, P)` and the final state `(B, P)`, the x of the token that comes last in the scan's direction.
        Differentiable in a, b and the initial state.

    Raises:
        ValueError: A shape or dtype does not fit; the message names the argument, its value and the rule.
    """
    _check(a, b, initial_state)
    return torch_impl.diagonal_scan(a, b, initial_state=initial_state, reverse=reverse, backend=backend)


def _check(a: Tensor, b: Tensor, initial_state: Tensor | None) -> None:
    if a.dim() != 1 or a.dtype not in _DTYPES:
        raise ValueError(f"a must be (P,), real or complex of 32 or 64 bits; got {tuple(a.shape)} of {a.dtype}")
    if b.dim() != 3 or b.shape[1] == 0 or b.shape[2] != a.shape[0]:
        raise ValueError(f"b must be (B, T, {a.shape[0]}) with T > 0; got {tuple(b.shape)}")
    if initial_state is not None and initial_state.shape != (b.shape[0], b.shape[2]):
        raise ValueError(
            f"initial_state must be (B, P) = {(b.shape[0], b.shape[2])}; got {tuple(initial_state.shape)}"
        )
    for name, tensor in (("b", b), ("initial_state", initial_state)):
        if tensor is not None and tensor.dtype != a.dtype:
            raise ValueError(f"{name} must have a's dtype {a.dtype}; got {tensor.dtype}")
