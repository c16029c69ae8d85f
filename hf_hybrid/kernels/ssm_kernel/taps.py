"""Two algorithms for S4's kernel, both from float64 and in tiles of channels.

``two_level`` splits the tap's index, l = i R + j with R near sqrt(L), and multiplies ``C Abar^(iR)`` with
``Abar^j Bbar``: O(N^2 sqrt(L) + N L) multiplications per channel, see `two_level`. ``cauchy`` is S4's own
algorithm, the truncated generating function on the unit circle, O(N L) divisions, see `cauchy`. They agree to
rounding. The first is several times faster on a CPU; on a GPU it is a chain of hundreds of small launches, and the
second is one launch.

H channels · S copies of (A, B) · M = N/2 modes · C output filters · L taps · R taps of a block
"""

from math import ceil, isqrt, log2
from operator import index

import torch
from torch import Tensor

from . import op
from .cauchy import truncated
from .discrete import recomputed, s4_step_constants, tile_numbers
from .two_level import two_level_kernel

ALGORITHMS = ("two_level", "cauchy")


@torch.compiler.assume_constant_result
def choose_algorithm(wish: str | None, backend: str, device: torch.device, dtype: torch.dtype) -> str:
    """Choose the algorithm, which depends on the backend; a tracer keeps the answer.

    Raises:
        ValueError: The backend cannot run the requested algorithm.
    """
    on_triton = op.triton(backend, torch.empty(0, device=device), dtype, wish)
    return wish or ("cauchy" if on_triton else "two_level")


def taps(C: Tensor, B: Tensor, P: Tensor, w: Tensor, dt: Tensor, length: int, algorithm: str, backend: str) -> Tensor:
    """Run an algorithm over tiles of channels; ``"two_level"`` always runs on torch."""
    # the number of matrix products depends on the length, so a symbolic one cannot be traced
    length = index(length)
    out_dtype = C.real.dtype
    copies = dt.shape[0] // w.shape[0]
    dt = dt.to(torch.float64)
    B, P, w = (x.to(torch.complex128).repeat(copies, 1) for x in (B, P, w))
    filters, channels, modes = C.shape
    size = 8 * modes * modes + 3 * filters * length
    if algorithm == "cauchy":
        size += 4 * modes * modes * ceil(log2(length))
    else:
        size += 16 * modes * isqrt(length) * (2 + filters)
    numbers = tile_numbers(w.device)
    tile = max(1, numbers // size)
    parts = []
    for start in range(0, channels, tile):
        part = slice(start, start + tile)
        system = B[part], P[part], w[part], dt[part]
        if algorithm == "cauchy":
            Ct, rate = recomputed(truncated, C[:, part], *system, length)
            parts.append(op.s4_cauchy(Ct, *system[:3], rate, length, numbers, out_dtype, backend))
        else:
            parts.append(two_level_kernel(C[:, part], recomputed(s4_step_constants, *system), length))
    return torch.cat(parts, dim=1)
