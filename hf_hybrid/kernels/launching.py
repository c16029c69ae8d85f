"""Launch Triton kernels in fixed configurations, or record the launches.

Each op has a table of configurations and the shapes and dtypes that select them; ``tuned.py`` replaces some of them on
devices where others were measured to be faster. The choice depends on these and on the kind of device, never on
timings of the run or on lengths, so results do not change between runs and a new sequence length compiles nothing.
Recorded launches are used to compile ahead of time for a GPU that is not present.

This module does not import triton.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch

from .tuned import TUNED


class Configuration(NamedTuple):
    """One configuration of a kernel.

    Attributes:
        name: Unique within the op.
        chosen: The shapes, dtypes and devices that select it, in words.
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
    """A recorded launch: the kernel, its configuration and all arguments by name."""

    kernel: Any
    configuration: Configuration
    arguments: dict[str, Any]


_DEFAULT_CAPABILITY = 90

_recorded: ContextVar[tuple[list[Launch], int] | None] = ContextVar("hf_hybrid_recorded_launches", default=None)


@contextmanager
def record_launches(capability: int) -> Iterator[list[Launch]]:
    """Record the launches inside the ``with`` block instead of running them; tensors may be on any device.

    Args:
        capability: Compute capability of the target device, times 10.
    """
    launches: list[Launch] = []
    token = _recorded.set((launches, capability))
    try:
        yield launches
    finally:
        _recorded.reset(token)


def records_launches() -> bool:
    """Return whether launches are recorded."""
    return _recorded.get() is not None


def launch(kernel: Any, programs: int, configuration: Configuration, **arguments: Any) -> None:
    """Run programs of a kernel in a configuration, whose tiles become arguments."""
    arguments |= configuration.tiles
    recorded = _recorded.get()
    if recorded is not None:
        recorded[0].append(Launch(kernel, configuration, arguments))
        return
    tensor = next(x for x in arguments.values() if isinstance(x, torch.Tensor))
    with torch.cuda.device_of(tensor):
        kernel[(programs,)](**arguments, num_warps=configuration.num_warps, num_stages=configuration.num_stages)


def capability_of(tensor: torch.Tensor) -> int:
    """Return the compute capability, times 10, of the device that runs a tensor's launches or is recorded for."""
    recorded = _recorded.get()
    if recorded is not None:
        return recorded[1]
    if not tensor.is_cuda:  # interpreted
        return _DEFAULT_CAPABILITY
    major, minor = torch.cuda.get_device_capability(tensor.device)
    return 10 * major + minor


def tuned(op: str, configuration: Configuration, capability: int) -> Configuration:
    """Return what an op runs instead of a configuration on devices of a capability: itself if `TUNED` has nothing."""
    found = TUNED.get((op, configuration.name, capability))
    if found is None:
        return configuration
    tiles, num_warps, num_stages = found
    return configuration._replace(tiles=tiles, num_warps=num_warps, num_stages=num_stages)


def like_hopper(capability: int) -> bool:
    """Return whether a device has warp-group products and the shared memory for them.

    Consumer GPUs from sm_120 on do not and use the configurations "before sm_90".
    """
    return 90 <= capability < 120


def blocks(length: int, size: int) -> int:
    """Return the number of blocks of a size that cover a length."""
    return (length + size - 1) // size
