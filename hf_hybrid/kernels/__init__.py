"""The public ops: pure functions on tensors."""

from .diagonal_scan import diagonal_scan
from .dispatch import use_backend
from .local_attention import local_attention
from .long_conv import long_conv
from .segment_recurrence import segment_recurrence

__all__ = ["diagonal_scan", "local_attention", "long_conv", "segment_recurrence", "use_backend"]
