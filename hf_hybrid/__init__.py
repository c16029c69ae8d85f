"""Long-sequence hybrids of state spaces, long convolutions, recurrence and local attention for Transformers.

Importing the package registers every architecture with transformers' Auto classes, and with PEFT once PEFT is loaded.
"""

from .models.auto import ARCHITECTURES, register
from .models.bst import BstConfig, BstForCausalLM, BstForSequenceClassification, BstModel, BstPreTrainedModel
from .models.chela import (
    ChelaConfig,
    ChelaForCausalLM,
    ChelaForMaskedLM,
    ChelaForQuestionAnswering,
    ChelaForSequenceClassification,
    ChelaForSequencePairClassification,
    ChelaForTokenClassification,
    ChelaModel,
    ChelaPreTrainedModel,
)
from .models.peft_targets import peft_config
from .models.remote_code import export_remote_code
from .models.spade import (
    SpadeConfig,
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
from .models.srformer import (
    SRformerBartConfig,
    SRformerBartForConditionalGeneration,
    SRformerBartModel,
    SRformerT5Config,
    SRformerT5ForConditionalGeneration,
    SRformerT5Model,
    patch_cross_attention,
)
from .starters import starter
from .version import __version__

register()

__all__ = [
    "ARCHITECTURES",
    "BstConfig",
    "BstForCausalLM",
    "BstForSequenceClassification",
    "BstModel",
    "BstPreTrainedModel",
    "ChelaConfig",
    "ChelaForCausalLM",
    "ChelaForMaskedLM",
    "ChelaForQuestionAnswering",
    "ChelaForSequenceClassification",
    "ChelaForSequencePairClassification",
    "ChelaForTokenClassification",
    "ChelaModel",
    "ChelaPreTrainedModel",
    "SRformerBartConfig",
    "SRformerBartForConditionalGeneration",
    "SRformerBartModel",
    "SRformerT5Config",
    "SRformerT5ForConditionalGeneration",
    "SRformerT5Model",
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
    "__version__",
    "export_remote_code",
    "patch_cross_attention",
    "peft_config",
    "register",
    "starter",
]
