"""The precision of an op's computations."""

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

_WIDE = (torch.float32, torch.float64)
_NOTHING = nullcontext()


def compute_dtype(x: Tensor) -> torch.dtype:
    """Return the dtype of sums over `x`: its own, at least float32."""
    dtype = x.dtype
    return dtype if dtype in _WIDE else torch.promote_types(dtype, torch.float32)  # which is an op


def complex_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the complex dtype of the same precision; torch.compile cannot trace `torch.dtype.to_complex`."""
    return torch.complex128 if dtype == torch.float64 else torch.complex64


def operand_dtype(x: Tensor) -> torch.dtype:
    """Return the dtype in which products of `x` and weights run fastest, where rounding both to 16 bits is no loss."""
    if x.dtype in (torch.float32, torch.float64):
        return x.dtype
    fast = x.is_cuda or (x.dtype == torch.bfloat16 and torch.cpu._is_avx512_bf16_supported())
    return x.dtype if fast else torch.float32


def autocast_once(x: Tensor) -> Tensor:
    """Return x in autocast's dtype, where it is on: each of several linear maps that read it would cast its own."""
    device = x.device.type
    if device == "meta" or x.dtype == torch.float64 or not torch.is_autocast_enabled(device):
        return x
    return x.to(torch.get_autocast_dtype(device))


def full_precision(device: torch.device) -> AbstractContextManager[object]:
    """Switch autocast off on a device; do nothing on the meta device, which has none.

    Where it is off already, nothing is done either, except in traced code, which may run where it is on.
    """
    if device.type == "meta":
        return _NOTHING
    if torch.compiler.is_compiling() or torch.is_autocast_enabled(device.type):
        return torch.autocast(device.type, enabled=False)
    return _NOTHING
