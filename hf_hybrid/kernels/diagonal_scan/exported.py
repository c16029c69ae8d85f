"""The diagonal recurrence over pairs of reals, for ONNX, which has no complex numbers.

B batch · T length · P states
"""

import torch
from torch import Tensor
from torch.nn import functional as F


def complex_product(a: Tensor, b: Tensor) -> Tensor:
    """Multiply complex numbers, whose real and imaginary parts are the last dimension."""
    (a_real, a_imag), (b_real, b_imag) = a.unbind(-1), b.unbind(-1)
    return torch.stack([a_real * b_real - a_imag * b_imag, a_real * b_imag + a_imag * b_real], dim=-1)


def scan_pairs(a: Tensor, b: Tensor, *, reverse: bool = False) -> Tensor:
    """Run `diagonal_scan` from a state of zeros, in log2(T) steps: after a step, x[t] adds up twice as many inputs.

    Args:
        a: `(P, 2)`, real and imaginary parts last.
        b: `(B, T, P, 2)`, likewise.
        reverse: Whether to run from the last token to the first.

    Returns:
        x, `(B, T, P, 2)`.
    """
    length, reach = b.shape[1], 1
    while reach < length:
        earlier = b[:, reach:] if reverse else b[:, :-reach]
        b = b + F.pad(complex_product(a, earlier), (0, 0, 0, 0, 0, reach) if reverse else (0, 0, 0, 0, reach, 0))
        a, reach = complex_product(a, a), 2 * reach
    return b
