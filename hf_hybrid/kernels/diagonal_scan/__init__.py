"""Scan of a time-invariant diagonal linear recurrence, as in S5: linear work, logarithmic depth.

B batch · T length · P states · N packed sequences
"""

import torch
from torch import Tensor

from ..checks import check_devices
from ..dispatch import may_run_triton
from ..packed import check_cu_seqlens
from . import op
from .exported import complex_product, scan_pairs

__all__ = ["complex_product", "diagonal_scan", "scan_pairs"]

_DTYPES = (torch.float32, torch.float64, torch.complex64, torch.complex128)


def diagonal_scan(
    a: Tensor,
    b: Tensor,
    *,
    initial_state: Tensor | None = None,
    reverse: bool = False,
    cu_seqlens: Tensor | None = None,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """Run a diagonal recurrence over a sequence, all tokens in parallel.

        x[t] = a x[t-1] + b[t]      (S5, section 3, with a = diag(Abar) and b[t] = Bbar u[t])

    O(T P) multiplications, forward and backward; the torch backend takes 2 log2(T) steps and memory of the input's
    size. The backward pass stores x, and only if a is trained.

    Args:
        a: `(P,)`, float32, float64, complex64 or complex128; magnitudes up to 1 keep the recurrence bounded.
        b: `(B, T, P)` in a's dtype; also bfloat16 or float16 for float32 a.
        initial_state: x before the first token, `(B, P)` in a's dtype; zeros when None.
        reverse: Whether to run from the last token to the first, x[t] = a x[t+1] + b[t], with the initial state after
            the last token.
        cu_seqlens: Bounds of N sequences packed into one row, `(N + 1,)` of int32 or int64, see `kernels.packed`. B is
            1, states have N rows, and the result is that of each sequence alone. The torch
            backend reads the bounds on the host.
        backend: `"auto"`, `"torch"` or `"triton"`, see `hf_hybrid.kernels.dispatch`.

    Returns:
        x `(B, T, P)` in b's dtype, and the final state `(B, P)` in a's: x of the last token in the scan's direction.
        Twice differentiable in a, b and the initial state.

    Raises:
        ValueError: A shape or dtype does not fit; the message names the argument, its value and the rule.
    """
    if a.dim() != 1 or a.dtype not in _DTYPES:
        raise ValueError(f"a must be (P,), real or complex of 32 or 64 bits; got {tuple(a.shape)} of {a.dtype}")
    if b.dim() != 3 or b.shape[1] == 0 or b.shape[2] != a.shape[0]:
        raise ValueError(f"b must be (B, T, {a.shape[0]}) with T > 0; got {tuple(b.shape)}")
    shape = (check_cu_seqlens(cu_seqlens, b, "b"), b.shape[2])
    if initial_state is not None and initial_state.shape != shape:
        rows = "B" if cu_seqlens is None else "N"
        raise ValueError(f"initial_state must be ({rows}, P) = {shape}; got {tuple(initial_state.shape)}")
    check_devices(a, b=b, initial_state=initial_state)
    narrow = a.dtype == torch.float32 and b.dtype in (torch.bfloat16, torch.float16)
    for name, tensor in (("b", None if narrow else b), ("initial_state", initial_state)):
        if tensor is not None and tensor.dtype != a.dtype:
            raise ValueError(f"{name} must have a's dtype {a.dtype}; got {tensor.dtype}")
    one_token = b.shape[1] == 1 and cu_seqlens is None and not may_run_triton(backend, b)
    if one_token and initial_state is not None:  # on a CPU calling a custom op costs more than a token
        x = torch.addcmul(b[:, 0].to(a.dtype), a, initial_state)
        return x[:, None].to(b.dtype, copy=True), x
    states, final = op.diagonal_scan(a, b, initial_state, cu_seqlens, reverse, False, backend)
    return states, final
