"""torch.export of every model, and what models compute in an export to ONNX; tests/clients has the export itself."""

import inspect

import pytest
import torch

from tests.exporting import as_for_onnx
from tests.models.tiny import (
    DECODER_CASES,
    DECODERS,
    MODEL_CLASSES,
    PADDED_SIDES,
    main_output,
    tiny_inputs,
    tiny_model,
)
from tests.tolerances import assert_close

# the LSTM skips padding by packing its rows
NEEDS_NO_PADDING = [("spade", "AutoModelForCausalLM", "lstm")]


def padded_inputs(model, model_type, *, length=11, **sizes):
    """Random inputs, the first row padded; a pair's second sequence is the first one again."""
    inputs = tiny_inputs(model, length=length, **sizes)
    mask = torch.ones_like(inputs["input_ids"])
    mask[0, slice(0, 3) if "left" in PADDED_SIDES.get(model_type, ("left",)) else slice(-3, None)] = 0
    inputs["attention_mask"] = mask
    if "pair_input_ids" in inspect.signature(model.forward).parameters and not hasattr(model, "lm_head"):
        inputs["pair_input_ids"] = inputs["input_ids"].flip(1)
    return inputs


def without_cache(model_type, auto_class, **overrides):
    model = tiny_model(model_type, auto_class, **overrides)
    model.config.use_cache = False
    return model


def check_for_onnx(model, inputs):
    with torch.no_grad():
        expected = main_output(model(**inputs))
        with as_for_onnx():
            actual = main_output(model(**inputs))
    if "attention_mask" in inputs and actual.shape[:2] == inputs["input_ids"].shape:  # padding is arbitrary
        actual, expected = (x[inputs["attention_mask"].bool()] for x in (actual, expected))
    assert_close(actual, expected, "float32 model")


@pytest.mark.parametrize(("model_type", "auto_class"), MODEL_CLASSES)
@pytest.mark.parametrize("padded", [False, True])
def test_for_onnx_every_class_computes_the_same_of_what_onnx_has(model_type, auto_class, padded):
    model = without_cache(model_type, auto_class)
    inputs = padded_inputs(model, model_type)
    if not padded:
        del inputs["attention_mask"]
    check_for_onnx(model, inputs)


@pytest.mark.parametrize(("model_type", "auto_class", "case"), DECODER_CASES)
def test_for_onnx_every_variant_computes_the_same_of_what_onnx_has(model_type, auto_class, case):
    model = without_cache(model_type, auto_class, **DECODERS[model_type, auto_class][case])
    inputs = padded_inputs(model, model_type)
    if (model_type, auto_class, case) in NEEDS_NO_PADDING:
        del inputs["attention_mask"]
    check_for_onnx(model, inputs)


@pytest.mark.parametrize(
    "fields", [{"ssm_type": "s4d", "ssm_freeze": "none"}, {"ssm_type": "s5"}, {"ssm_type": "hyena"}, {"ssm_l_max": 5}]
)
def test_for_onnx_bidirectional_state_spaces_compute_the_same(fields):
    model = without_cache("spade", "AutoModelForMaskedLM", **fields)
    check_for_onnx(model, padded_inputs(model, "spade"))


@pytest.mark.parametrize("mixer", ["s4d", "ema", "long"])
def test_for_onnx_bidirectional_mixers_compute_the_same(mixer):
    model = without_cache("chela", "AutoModel", mixer=mixer)
    check_for_onnx(model, padded_inputs(model, "chela"))
