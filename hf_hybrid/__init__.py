"""Long-sequence hybrids of state spaces, long convolutions, recurrence and local attention for Transformers.

Importing the package registers every architecture with transformers' Auto classes.
"""

from .models.auto import ARCHITECTURES, register
from .models.spade import (
    SpadeConfig,
    SpadeEncoderModel,
    SpadeForCausalLM,
    SpadeForConditionalGeneration,
    SpadeForMaskedLM,
    SpadeForQuestionAnswering,
    SpadeForSequenceClassification,
    SpadeForTokenClassification,
    SpadeModel,
    SpadePreTrainedModel,
)
from .version import __version__

register()

__all__ = [
    "ARCHITECTURES",
    "SpadeConfig",
    "SpadeEncoderModel",
    "SpadeForCausalLM",
    "SpadeForConditionalGeneration",
    "SpadeForMaskedLM",
    "SpadeForQuestionAnswering",
    "SpadeForSequenceClassification",
    "SpadeForTokenClassification",
    "SpadeModel",
    "SpadePreTrainedModel",
    "__version__",
    "register",
]
