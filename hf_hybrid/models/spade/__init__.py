"""SPADE (Zuo et al. 2022)."""

from .configuration_spade import SpadeConfig
from .modeling_spade import (
    SpadeEncoderModel,
    SpadeForCausalLM,
    SpadeForConditionalGeneration,
    SpadeForMaskedLM,
    SpadeForQuestionAnswering,
    SpadeForSequenceClassification,
    SpadeForSequencePairClassification,
    SpadeForTokenClassification,
    SpadeModel,
    SpadePreTrainedModel,
    SpadeStack,
)

__all__ = [
    "SpadeConfig",
    "SpadeEncoderModel",
    "SpadeForCausalLM",
    "SpadeForConditionalGeneration",
    "SpadeForMaskedLM",
    "SpadeForQuestionAnswering",
    "SpadeForSequenceClassification",
    "SpadeForSequencePairClassification",
    "SpadeForTokenClassification",
    "SpadeModel",
    "SpadePreTrainedModel",
    "SpadeStack",
]
