"""How Triton kernels are launched: from tables of what is shipped, and through one door.

A kernel is shipped in a few configurations, named in its op's table with the shapes and dtypes for which each is
taken. The choice depends on those and on the kind of device, never on a timing nor on a length, so that a result does
not change from run to run and no sequence length compiles anything anew. Because every launch passes here, the same
launches can be recorded instead of run, which is how they are compiled ahead of time for a GPU that is not there.

This module needs no triton.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch


class Configuration(NamedTuple):
    """One form in which a kernel is shipped.

    Attributes:
        name: Unique within the op.
        chosen: For which shapes, dtypes and devices it is taken, in words.
        tiles: Compile-time sizes of its tiles.
        num_warps: Warps of 32 threads per program.
        num_stages: Loads in flight per loop.
    """

    name: str
    chosen: str
    tiles: dict[str, int]
    num_warps: int
    num_stages: int


class Launch(NamedTuple):
    """What was to be launched: the kernel, its configuration and all its arguments by name."""

    kernel: Any
    configuration: Configuration
    arguments: dict[str, Any]


_DEFAULT_CAPABILITY = 90

_recorded: ContextVar[tuple[list[Launch], int] | None] = ContextVar("hf_hybrid_recorded_launches", default=None)


@contextmanager
def record_launches(capability: int) -> Iterator[list[Launch]]:
    """Keep the launches inside the ``with`` block, on tensors of any device, instead of running them.

    Args:
        capability: Compute capability times 10 of the device that they are meant for.
    """
    launches: list[Launch] = []
    token = _recorded.set((launches, capability))
    try:
        yield launches
    finally:
        _recorded.reset(token)


def records_launches() -> bool:
    """Whether launches are recorded, in which case their tensors may lie anywhere."""
    return _recorded.get() is not None


def launch(kernel: Any, programs: int, configuration: Configuration, **arguments: Any) -> None:
    """Run so many programs of a kernel in one configuration, whose tiles are added to the arguments."""
    arguments |= configuration.tiles
    recorded = _recorded.get()
    if recorded is not None:
        recorded[0].append(Launch(kernel, configuration, arguments))
        return
    tensor = next(x for x in arguments.values() if isinstance(x, torch.Tensor))
    with torch.cuda.device_of(tensor):
        kernel[(programs,)](**arguments, num_warps=configuration.num_warps, num_stages=configuration.num_stages)


def capability_of(tensor: torch.Tensor) -> int:
    """Compute capability, times 10, of the device that a tensor's launches run on or are recorded for."""
    recorded = _recorded.get()
    if recorded is not None:
        return recorded[1]
    if not tensor.is_cuda:  # interpreted
        return _DEFAULT_CAPABILITY
    major, minor = torch.cuda.get_device_capability(tensor.device)
    return 10 * major + minor


def like_hopper(capability: int) -> bool:
    """Whether a device has products of whole warp groups and the shared memory that goes with them.

    The GPUs for desks that came later, from sm_120 on, do not: configurations "before sm_90" are theirs too.
    """
    return 90 <= capability < 120


def blocks(length: int, size: int) -> int:
    """How many blocks of a size cover a length."""
    return (length + size - 1) // size
