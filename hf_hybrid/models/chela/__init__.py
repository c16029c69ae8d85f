"""CHELA (Liu et al. 2024)."""

from .configuration_chela import ChelaConfig
from .modeling_chela import (
    ChelaForCausalLM,
    ChelaForMaskedLM,
    ChelaForQuestionAnswering,
    ChelaForSequenceClassification,
    ChelaForSequencePairClassification,
    ChelaForTokenClassification,
    ChelaModel,
    ChelaPreTrainedModel,
)

__all__ = [
    "ChelaConfig",
    "ChelaForCausalLM",
    "ChelaForMaskedLM",
    "ChelaForQuestionAnswering",
    "ChelaForSequenceClassification",
    "ChelaForSequencePairClassification",
    "ChelaForTokenClassification",
    "ChelaModel",
    "ChelaPreTrainedModel",
]
