"""The public ops: pure functions on tensors."""

from .diagonal_scan import diagonal_scan
from .dispatch import use_backend
from .laplace_attention import laplace_attention
from .linear_attention import linear_attention
from .local_attention import local_attention, local_attention_step
from .long_conv import long_conv
from .segment_recurrence import segment_recurrence, segment_step
from .short_conv import short_conv

__all__ = [
    "diagonal_scan",
    "laplace_attention",
    "linear_attention",
    "local_attention",
    "local_attention_step",
    "long_conv",
    "segment_recurrence",
    "segment_step",
    "short_conv",
    "use_backend",
]
