"""The table of architectures, and their registration with transformers' Auto classes and with PEFT."""

import sys
from collections import OrderedDict

import transformers
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.models.auto.auto_factory import _BaseAutoModelClass, _LazyAutoMapping
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from . import bst, chela, spade, srformer
from .peft_targets import register_adapters

ARCHITECTURES: dict[str, tuple[type[PreTrainedConfig], dict[str, type[PreTrainedModel]]]] = {
    "bst": (
        bst.BstConfig,
        {
            "AutoModel": bst.BstModel,
            "AutoModelForCausalLM": bst.BstForCausalLM,
            "AutoModelForSequenceClassification": bst.BstForSequenceClassification,
        },
    ),
    "chela": (
        chela.ChelaConfig,
        {
            "AutoModel": chela.ChelaModel,
            "AutoModelForCausalLM": chela.ChelaForCausalLM,
            "AutoModelForMaskedLM": chela.ChelaForMaskedLM,
            "AutoModelForQuestionAnswering": chela.ChelaForQuestionAnswering,
            "AutoModelForSequenceClassification": chela.ChelaForSequenceClassification,
            "AutoModelForTokenClassification": chela.ChelaForTokenClassification,
        },
    ),
    "spade": (
        spade.SpadeConfig,
        {
            "AutoModel": spade.SpadeModel,
            "AutoModelForCausalLM": spade.SpadeForCausalLM,
            "AutoModelForMaskedLM": spade.SpadeForMaskedLM,
            "AutoModelForQuestionAnswering": spade.SpadeForQuestionAnswering,
            "AutoModelForSeq2SeqLM": spade.SpadeForConditionalGeneration,
            "AutoModelForSequenceClassification": spade.SpadeForSequenceClassification,
            "AutoModelForTextEncoding": spade.SpadeEncoderModel,
            "AutoModelForTokenClassification": spade.SpadeForTokenClassification,
        },
    ),
    "srformer_bart": (
        srformer.SRformerBartConfig,
        {
            "AutoModel": srformer.SRformerBartModel,
            "AutoModelForSeq2SeqLM": srformer.SRformerBartForConditionalGeneration,
        },
    ),
    "srformer_t5": (
        srformer.SRformerT5Config,
        {
            "AutoModel": srformer.SRformerT5Model,
            "AutoModelForSeq2SeqLM": srformer.SRformerT5ForConditionalGeneration,
        },
    ),
}
"""Model type → config class, and model class of each Auto class."""


class AutoModelForSequencePairClassification(_BaseAutoModelClass):
    """Builds or loads the class that classifies pairs of sequences; transformers has no Auto class for it."""

    _model_mapping = _LazyAutoMapping(CONFIG_MAPPING_NAMES, OrderedDict())


def register() -> None:
    """Register every architecture with transformers' Auto classes and PEFT; repeated calls have no effect."""
    register_adapters()
    for pair_class in (chela.ChelaForSequencePairClassification, spade.SpadeForSequencePairClassification):
        AutoModelForSequencePairClassification.register(pair_class.config_class, pair_class, exist_ok=True)
    for model_type, (config_class, models) in ARCHITECTURES.items():
        transformers.AutoConfig.register(model_type, config_class, exist_ok=True)
        for auto_class, model_class in models.items():
            getattr(transformers, auto_class).register(config_class, model_class, exist_ok=True)
            names = [model_class] if model_class is not spade.SpadeModel else [model_class, spade.SpadeStack]
            # `transformers serve`, TRL and others look up names of config.architectures in the module itself, which
            # transformers makes a second time when it imports its processors
            for module in (transformers, sys.modules["transformers"]):
                for named in names:
                    if not hasattr(module, named.__name__):
                        setattr(module, named.__name__, named)
            if auto_class == "AutoModelForCausalLM":
                # Trainer's label smoothing shifts the labels of models in this table
                MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type] = model_class.__name__
