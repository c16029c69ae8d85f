"""The settings of a call of local attention, and of its decoding step."""

from typing import NamedTuple

from ..checks import check_integer, check_positive


class Settings(NamedTuple):
    """The arguments of `local_attention` that are not tensors."""

    radius: int | None
    chunk_size: int | None
    causal: bool
    scale: float
    dropout: float


class StepSettings(NamedTuple):
    """The arguments of `local_attention_step` that are not tensors; a position given as a tensor has number 0."""

    query_start: int
    key_start: int
    radius: int | None
    chunk_size: int | None
    include_self: bool
    scale: float


def check_neighbourhood(radius: int | None, chunk_size: int | None) -> None:
    """Raise ValueError unless exactly one of radius and chunk_size is given, and valid."""
    if (radius is None) == (chunk_size is None):
        raise ValueError(
            f"exactly one of radius and chunk_size must be given; got radius={radius}, chunk_size={chunk_size}"
        )
    check_integer("radius", radius)
    check_integer("chunk_size", chunk_size)
    if radius is not None and radius < 0:
        raise ValueError(f"radius must be at least 0; got {radius}")
    check_positive(chunk_size=chunk_size)
