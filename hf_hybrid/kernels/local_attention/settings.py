"""The settings of a call of local attention."""

from typing import NamedTuple


class Settings(NamedTuple):
    """The arguments of `local_attention` that are not tensors."""

    radius: int | None
    chunk_size: int | None
    causal: bool
    scale: float
    dropout: float
