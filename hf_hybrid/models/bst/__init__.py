"""Block-State Transformer (Fathi et al. 2023)."""

from .configuration_bst import BstConfig
from .modeling_bst import BstForCausalLM, BstForSequenceClassification, BstModel, BstPreTrainedModel

__all__ = ["BstConfig", "BstForCausalLM", "BstForSequenceClassification", "BstModel", "BstPreTrainedModel"]
