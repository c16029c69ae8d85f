"""What a case of `benchmarks.gpu` is."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

Tensors = dict[str, Tensor]
Function = Callable[[Tensors], Tensor]


class Case(NamedTuple):
    """One operation at one shape.

    Attributes:
        op: The operation.
        shape: The shape, in words.
        make: Draws its inputs on a device, in float32.
        run: The op on a named backend; returns one result if it is timed.
        peers: Other implementations by name, built on demand, since a peer may be missing.
        floor: Numbers read and written once, in a forward and in a backward, and operations of a forward.
        wide: Inputs that stay float32 in every dtype.
        decodes: Whether it is one decoded token, without a backward and also timed in CUDA graphs.
        backward: Operations of a backward per operation of a forward.
        arithmetic: The dtype of its operations, if tensor cores do not support that of its inputs.
    """

    op: str
    shape: str
    make: Callable[[torch.device], Tensors]
    run: Callable[[Tensors, str], Any]
    peers: dict[str, Callable[[], Function]]
    floor: tuple[float, float, float]
    wide: tuple[str, ...] = ()
    decodes: bool = False
    backward: float = 2.0
    arithmetic: str | None = None


def normal(device: torch.device, *shape: int, scale: float = 1.0) -> Tensor:
    """Draw normal numbers."""
    return scale * torch.randn(shape, device=device)
