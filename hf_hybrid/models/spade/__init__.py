"""SPADE (Zuo et al. 2022)."""

from .configuration_spade import SpadeConfig
from .modeling_spade import SpadeEncoderModel, SpadeForConditionalGeneration, SpadeModel, SpadePreTrainedModel

__all__ = [
    "SpadeConfig",
    "SpadeEncoderModel",
    "SpadeForConditionalGeneration",
    "SpadeModel",
    "SpadePreTrainedModel",
]
