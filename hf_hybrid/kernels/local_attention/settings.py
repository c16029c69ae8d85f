"""What a call of local attention is told beside its tensors."""

from typing import NamedTuple


class Settings(NamedTuple):
    """The numbers of a call of `local_attention`, under the names of its arguments."""

    radius: int | None
    chunk_size: int | None
    causal: bool
    scale: float
    dropout: float
