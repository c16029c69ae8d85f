"""Memory around tensors that tells on kernels which read or write beyond them.

An interpreter, and often a GPU too, lets a kernel read a little past the end of a tensor without complaint. Here NaN
lies on both sides of inputs, which spoils whatever is computed from it, and on both sides of what is allocated
meanwhile, where it must still lie afterwards.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

GUARD = 4096
"""Numbers on each side; more than any tile reaches beyond its tensor in these tests."""


def guarded(x: torch.Tensor) -> torch.Tensor:
    """A contiguous copy of a tensor with NaN, or a huge integer, on both sides."""
    if x.is_complex():
        return torch.view_as_complex(guarded(torch.view_as_real(x)))
    fill: Any = math.nan if x.is_floating_point() else torch.iinfo(x.dtype).max // 2
    memory = torch.full((x.numel() + 2 * GUARD,), fill, dtype=x.dtype)
    copy = memory[GUARD : GUARD + x.numel()].view(x.shape)
    return copy.copy_(x.detach())


@contextmanager
def guarded_allocations() -> Iterator[None]:
    """Surround what `torch.empty` and `torch.empty_like` return, full of NaN itself, and look after it at the end."""
    empty, empty_like = torch.empty, torch.empty_like
    memories: list[torch.Tensor] = []

    def guarded_empty(*shape: Any, dtype: torch.dtype | None = None, **options: Any) -> torch.Tensor:
        size = torch.Size(shape[0] if len(shape) == 1 and not isinstance(shape[0], int) else shape)
        dtype = dtype or torch.get_default_dtype()
        if dtype.is_complex:
            return torch.view_as_complex(guarded_empty(*size, 2, dtype=dtype.to_real(), **options))
        if not dtype.is_floating_point or torch.device(options.get("device") or "cpu").type != "cpu":
            return empty(size, dtype=dtype, **options)
        memories.append(torch.full((size.numel() + 2 * GUARD,), math.nan, dtype=dtype))
        return memories[-1][GUARD : GUARD + size.numel()].view(size)

    def guarded_empty_like(x: torch.Tensor, dtype: torch.dtype | None = None, **options: Any) -> torch.Tensor:
        return guarded_empty(x.shape, dtype=dtype or x.dtype, device=x.device)

    torch.empty, torch.empty_like = guarded_empty, guarded_empty_like
    try:
        yield
    finally:
        torch.empty, torch.empty_like = empty, empty_like
    assert memories, "nothing was allocated: the kernel did not run"
    for memory in memories:
        assert memory[:GUARD].isnan().all(), "a kernel wrote before its tensor"
        assert memory[-GUARD:].isnan().all(), "a kernel wrote behind its tensor"
