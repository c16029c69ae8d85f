"""In which precision an op computes, whatever dtype its tensors have."""

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor


def compute_dtype(x: Tensor) -> torch.dtype:
    """The precision of sums over `x`: its own, but float32 at least."""
    return torch.promote_types(x.dtype, torch.float32)


def complex_dtype(dtype: torch.dtype) -> torch.dtype:
    """Complex dtype of the same precision; torch.compile cannot trace `torch.dtype.to_complex`."""
    return torch.complex128 if dtype == torch.float64 else torch.complex64


def full_precision(device: torch.device) -> AbstractContextManager[object]:
    """Switch autocast off on a device; on the meta device, which knows no autocast, do nothing."""
    return nullcontext() if device.type == "meta" else torch.autocast(device.type, enabled=False)
