"""Two ways to S4's kernel, both from float64 and in tiles of channels.

``two_level`` splits the tap's index, l = i R + j with R near sqrt(L), and multiplies ``C Abar^(iR)`` with
``Abar^j Bbar``: O(N^2 sqrt(L) + N L) multiplications per channel, see `two_level`. ``cauchy`` is S4's own
algorithm, the truncated generating function on the unit circle, O(N L) divisions, see `cauchy`. They agree to
rounding. On a CPU the first is several times faster; on a GPU it is hundreds of small launches in a chain, and the
second one launch.

H channels · S copies of (A, B) · M = N/2 modes · C output filters · L taps · R taps of a block
"""

from collections.abc import Callable
from math import ceil, isqrt, log2
from operator import index
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from ..dispatch import choose_backend
from .cauchy import s4_cauchy, truncated
from .discrete import s4_step_constants
from .two_level import two_level_kernel

_CPU_TILE = 1 << 22
"""Float64 numbers that one tile may hold: 32 MiB."""

_GPU_TILE = 1 << 25
"""The same elsewhere, where each tile costs hundreds of launches."""


def tile_numbers(device: torch.device) -> int:
    """Float64 numbers that one tile may hold."""
    return _CPU_TILE if device.type == "cpu" else _GPU_TILE


def recomputed(function: Callable[..., Any], *args: torch.Tensor | int) -> Any:
    """Call a function; where a gradient is needed, keep its arguments only and call it again in the backward."""
    if torch.is_grad_enabled() and any(isinstance(arg, torch.Tensor) and arg.requires_grad for arg in args):
        return checkpoint(function, *args, use_reentrant=False, preserve_rng_state=False)
    return function(*args)


ALGORITHMS = ("two_level", "cauchy")


@torch.compiler.assume_constant_result
def _runs_on_triton(backend: str, device: torch.device, dtype: torch.dtype, algorithm: str | None) -> bool:
    """Choose the backend before the op does, because the algorithm depends on it; a tracer keeps the answer."""

    def why_not() -> str | None:
        from .triton_kernels import why_not

        return why_not(dtype, algorithm)

    return choose_backend("s4_kernel", backend, [torch.empty(0, device=device)], why_not) == "triton"


def s4_kernel(
    C: torch.Tensor,
    B: torch.Tensor,
    P: torch.Tensor,
    w: torch.Tensor,
    dt: torch.Tensor,
    length: int,
    algorithm: str | None,
    backend: str,
) -> torch.Tensor:
    """Choose an algorithm and run it; see `hf_hybrid.kernels.ssm_kernel.s4_kernel`."""
    on_triton = _runs_on_triton(backend, C.device, C.real.dtype, algorithm)
    return taps(C, B, P, w, dt, length, algorithm or ("cauchy" if on_triton else "two_level"), backend)


def taps(
    C: torch.Tensor,
    B: torch.Tensor,
    P: torch.Tensor,
    w: torch.Tensor,
    dt: torch.Tensor,
    length: int,
    algorithm: str,
    backend: str = "torch",
) -> torch.Tensor:
    """Run an algorithm over tiles of channels, ``"two_level"`` on torch whatever the backend."""
    # the number of matrix products depends on the length: a trace for a symbolic one does not exist
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
            parts.append(s4_cauchy(Ct, *system[:3], rate, length, numbers, out_dtype, backend))
        else:
            wide = two_level_kernel(C[:, part], recomputed(s4_step_constants, *system), length)
            parts.append(wide.to(out_dtype))
    return torch.cat(parts, dim=1)
