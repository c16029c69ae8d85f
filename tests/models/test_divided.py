"""Which models are refused before they are built because their sequences cannot be divided among processes."""

import re

import pytest
import transformers

from hf_hybrid import ARCHITECTURES
from hf_hybrid.models.divided import check_divisible_model

CAUSAL, PAIRS = "AutoModelForCausalLM", "AutoModelForSeq2SeqLM"


@pytest.mark.parametrize(
    ("model_type", "auto_class", "fields", "message"),
    [
        ("spade", CAUSAL, {"ssm_type": "lstm"}, "must be 1 with LSTM: its gates"),
        ("spade", CAUSAL, {"attention_type": "full"}, "must be 1 with full attention: every token"),
        ("srformer_t5", PAIRS, {}, "must be 1 with SRformerT5ForConditionalGeneration: its encoder, T5"),
        ("bst", "AutoModel", {}, "must be 1 with BstModel: it cannot"),
    ],
)
def test_models_that_cannot_be_divided_are_refused(model_type, auto_class, fields, message):
    if auto_class == CAUSAL:
        fields = {"is_decoder": True, "is_encoder_decoder": False, **fields}
    config = transformers.AutoConfig.for_model(model_type, **fields)
    model_class = ARCHITECTURES[model_type][1][auto_class]
    check_divisible_model(config, model_class, 1)
    with pytest.raises(ValueError, match=re.escape("context_parallel_size ") + message):
        check_divisible_model(config, model_class, 2)


def test_models_of_others_are_refused():
    with pytest.raises(ValueError, match="context_parallel_size must be 1 with llama"):
        check_divisible_model(transformers.LlamaConfig(), None, 4)


@pytest.mark.parametrize("model_type", ["spade", "chela", "bst"])
def test_language_models_pass(model_type):
    config = transformers.AutoConfig.for_model(model_type, is_decoder=True)
    check_divisible_model(config, ARCHITECTURES[model_type][1][CAUSAL], 4)
