"""SRformer (Long et al. 2023), based on T5 or BART."""

from .configuration_srformer import SRformerBartConfig, SRformerT5Config
from .modeling_srformer_bart import SRformerBartForConditionalGeneration, SRformerBartModel
from .modeling_srformer_t5 import SRformerT5ForConditionalGeneration, SRformerT5Model
from .patching import patch_cross_attention

__all__ = [
    "SRformerBartConfig",
    "SRformerBartForConditionalGeneration",
    "SRformerBartModel",
    "SRformerT5Config",
    "SRformerT5ForConditionalGeneration",
    "SRformerT5Model",
    "patch_cross_attention",
]
