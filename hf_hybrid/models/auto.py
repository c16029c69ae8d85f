"""The table of architectures, and their registration with transformers' Auto classes and with PEFT."""

import transformers
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from .bst import BstConfig, BstForCausalLM, BstForSequenceClassification, BstModel
from .chela import (
    ChelaConfig,
    ChelaForCausalLM,
    ChelaForMaskedLM,
    ChelaForQuestionAnswering,
    ChelaForSequenceClassification,
    ChelaForTokenClassification,
    ChelaModel,
)
from .peft_targets import register_adapters
from .spade import (
    SpadeConfig,
    SpadeEncoderModel,
    SpadeForCausalLM,
    SpadeForConditionalGeneration,
    SpadeForMaskedLM,
    SpadeForQuestionAnswering,
    SpadeForSequenceClassification,
    SpadeForTokenClassification,
    SpadeModel,
)
from .srformer import (
    SRformerBartConfig,
    SRformerBartForConditionalGeneration,
    SRformerBartModel,
    SRformerT5Config,
    SRformerT5ForConditionalGeneration,
    SRformerT5Model,
)

ARCHITECTURES: dict[str, tuple[type[PreTrainedConfig], dict[str, type[PreTrainedModel]]]] = {
    "bst": (
        BstConfig,
        {
            "AutoModel": BstModel,
            "AutoModelForCausalLM": BstForCausalLM,
            "AutoModelForSequenceClassification": BstForSequenceClassification,
        },
    ),
    "chela": (
        ChelaConfig,
        {
            "AutoModel": ChelaModel,
            "AutoModelForCausalLM": ChelaForCausalLM,
            "AutoModelForMaskedLM": ChelaForMaskedLM,
            "AutoModelForQuestionAnswering": ChelaForQuestionAnswering,
            "AutoModelForSequenceClassification": ChelaForSequenceClassification,
            "AutoModelForTokenClassification": ChelaForTokenClassification,
        },
    ),
    "spade": (
        SpadeConfig,
        {
            "AutoModel": SpadeModel,
            "AutoModelForCausalLM": SpadeForCausalLM,
            "AutoModelForMaskedLM": SpadeForMaskedLM,
            "AutoModelForQuestionAnswering": SpadeForQuestionAnswering,
            "AutoModelForSeq2SeqLM": SpadeForConditionalGeneration,
            "AutoModelForSequenceClassification": SpadeForSequenceClassification,
            "AutoModelForTextEncoding": SpadeEncoderModel,
            "AutoModelForTokenClassification": SpadeForTokenClassification,
        },
    ),
    "srformer_bart": (
        SRformerBartConfig,
        {"AutoModel": SRformerBartModel, "AutoModelForSeq2SeqLM": SRformerBartForConditionalGeneration},
    ),
    "srformer_t5": (
        SRformerT5Config,
        {"AutoModel": SRformerT5Model, "AutoModelForSeq2SeqLM": SRformerT5ForConditionalGeneration},
    ),
}
"""Model type → config class, and model class of each Auto class."""


def register() -> None:
    """Register every architecture with transformers' Auto classes and PEFT; repeated calls have no effect."""
    register_adapters()
    for model_type, (config_class, models) in ARCHITECTURES.items():
        transformers.AutoConfig.register(model_type, config_class, exist_ok=True)
        for auto_class, model_class in models.items():
            getattr(transformers, auto_class).register(config_class, model_class, exist_ok=True)
            if auto_class == "AutoModelForCausalLM":
                # Trainer's label smoothing shifts the labels of models in this table
                MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type] = model_class.__name__
