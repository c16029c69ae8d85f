"""torch.export of every model, and what models compute in an export to ONNX; tests/clients makes and runs files."""

import pytest
import torch
from transformers.cache_utils import DynamicCache
from transformers.modeling_outputs import BaseModelOutput

from hf_hybrid.models.decoding_step import DecodingStep, step_cache
from tests.exporting import as_for_onnx
from tests.matrix import some
from tests.models.tiny import (
    DECODER_CASES,
    DECODERS,
    GENERATIVE,
    MODEL_CLASSES,
    PADDED_SIDES,
    main_output,
    tiny_inputs,
    tiny_model,
)
from tests.tolerances import assert_close

DYNAMIC = torch.export.Dim.DYNAMIC
LSTM = ("spade", "AutoModelForCausalLM", "lstm")
# what exports one step -> part of what the others are told
REFUSED_STEPS = {
    ("chela", "AutoModelForCausalLM", "laplace"): "past_key_values must keep its shapes",
    **{
        ("bst", "AutoModelForCausalLM", case): "context_shift must be 'none'"
        for case, fields in DECODERS["bst", "AutoModelForCausalLM"].items()
        if fields.get("context_type") == "multi_filter" or "context_shift" in fields
    },
}


def padded_inputs(model, model_type, **sizes):
    """Random inputs, the first row padded."""
    inputs = tiny_inputs(model, **sizes)
    mask = torch.ones_like(inputs["input_ids"])
    if "left" in PADDED_SIDES.get(model_type, ("left",)):
        mask[0, :3] = 0
    else:
        mask[0, -3:] = 0
    return {**inputs, "attention_mask": mask}


def without_cache(model_type, auto_class, **overrides):
    model = tiny_model(model_type, auto_class, **overrides)
    model.config.use_cache = False
    return model


def kept(output, inputs):
    """An output without padding, where it is arbitrary."""
    mask = inputs.get("attention_mask")
    return output if mask is None or output.shape[:2] != mask.shape else output[mask.bool()]


# torch.export


# one of each kind, which shows that they export with fixed shapes too
WITH_DYNAMIC_SHAPES = [
    ("bst", "AutoModelForCausalLM"),
    ("chela", "AutoModelForCausalLM"),
    ("spade", "AutoModelForSeq2SeqLM"),
]


@pytest.mark.parametrize(
    ("model_type", "auto_class"),
    some(MODEL_CLASSES, *(key for key in GENERATIVE if key not in WITH_DYNAMIC_SHAPES)),
)
def test_every_class_exports(model_type, auto_class):
    model = without_cache(model_type, auto_class)
    inputs = padded_inputs(model, model_type)
    with torch.no_grad():
        program = torch.export.export(model, (), inputs)
        actual, expected = main_output(program.module()(**inputs)), main_output(model(**inputs))
    assert_close(kept(actual, inputs), kept(expected, inputs), "float32 model")


@pytest.mark.parametrize("model_type", ["bst", "chela", "spade"])
def test_positions_are_refused(model_type):
    model = without_cache(model_type, "AutoModelForCausalLM")
    ids = torch.randint(2, 60, (1, 12))
    with torch.no_grad(), pytest.raises(Exception, match="position_ids must be None in an export"):
        torch.export.export(model, (), {"input_ids": ids, "position_ids": torch.arange(12)[None]})


@pytest.mark.parametrize(("model_type", "auto_class"), some(GENERATIVE, *WITH_DYNAMIC_SHAPES))
def test_batch_and_length_may_be_dynamic(model_type, auto_class):
    model = without_cache(model_type, auto_class)
    inputs = padded_inputs(model, model_type)
    sizes = {name: {0: DYNAMIC, 1: DYNAMIC} for name in inputs}
    with torch.no_grad():
        program = torch.export.export(model, (), inputs, dynamic_shapes=sizes)
        for batch, length in ((2, 11), (3, 17), (1, 6)):
            inputs = padded_inputs(model, model_type, batch=batch, length=length, target_length=length)
            actual, expected = main_output(program.module()(**inputs)), main_output(model(**inputs))
            assert_close(kept(actual, inputs), kept(expected, inputs), "float32 model")


def after_prompt(model, length=9):
    """A cache that has read a prompt, and the other inputs of each step."""
    with torch.no_grad():
        outputs = model(
            **tiny_inputs(model, length=length, target_length=length), past_key_values=step_cache(model, 20)
        )
    if not model.config.is_encoder_decoder:
        return outputs.past_key_values, {}
    encoded = BaseModelOutput(last_hidden_state=outputs.encoder_last_hidden_state)
    return outputs.past_key_values, {"encoder_outputs": encoded}


@pytest.mark.parametrize(
    ("model_type", "auto_class", "case"),
    some(
        DECODER_CASES,
        *[(*key, next(iter(cases))) for key, cases in DECODERS.items()],
        ("chela", "AutoModelForCausalLM", "laplace"),
        ("bst", "AutoModelForCausalLM", "multi filter"),
        ("bst", "AutoModelForCausalLM", "states of the window before"),
        ("chela", "AutoModelForCausalLM", "laplace in chunks"),
        ("spade", "AutoModelForCausalLM", "absolute positions"),
        ("spade", "AutoModelForCausalLM", "chunk"),
    ),
)
def test_a_decoding_step_exports(model_type, auto_class, case):
    """The program of one step decodes token after token what the model decodes."""
    model = tiny_model(model_type, auto_class, **DECODERS[model_type, auto_class][case])
    cache, others = after_prompt(model)
    step = DecodingStep(model, cache, **others).eval()
    tokens = torch.randint(2, 64, (2, 5), generator=torch.Generator().manual_seed(5))
    with torch.no_grad():
        if (model_type, auto_class, case) in REFUSED_STEPS:
            with pytest.raises(ValueError, match=REFUSED_STEPS[model_type, auto_class, case]):
                torch.export.export(step, (tokens[:, :1], step.first_states()))
            return
        program = torch.export.export(step, (tokens[:, :1], step.first_states())).module()
        states = step.first_states()
        name = "decoder_input_ids" if others else "input_ids"
        for token in tokens.split(1, dim=1):
            logits, states = program(token, states)
            outputs = model(**{name: token}, **others, past_key_values=cache, use_cache=True)
            assert_close(logits, outputs.logits[:, -1], "float32 decode")


def test_a_cache_that_grows_is_refused():
    model = tiny_model("spade", "AutoModelForCausalLM", attention_type="full")
    with torch.no_grad():
        cache = model(**tiny_inputs(model), past_key_values=DynamicCache(config=model.config)).past_key_values
        step = DecodingStep(model, cache)
        with pytest.raises(ValueError, match="must keep its shapes and numbers in a step, as one from step_cache"):
            step(torch.ones(2, 1, dtype=torch.long), step.first_states())


# ONNX


def check_for_onnx(model, inputs):
    model = model.double()  # the transforms of the ordinary path round more in float32 than what ONNX computes
    with torch.no_grad():
        expected = main_output(model(**inputs))
        with as_for_onnx():
            actual = main_output(model(**inputs))
    assert_close(kept(actual, inputs), kept(expected, inputs), "float64 decode")


@pytest.mark.parametrize(("model_type", "auto_class"), MODEL_CLASSES)
def test_for_onnx_every_class_computes_the_same_of_what_onnx_has(model_type, auto_class):
    model = without_cache(model_type, auto_class)
    check_for_onnx(model, tiny_inputs(model))


@pytest.mark.parametrize(("model_type", "auto_class", "case"), DECODER_CASES)
def test_for_onnx_every_variant_computes_the_same_of_what_onnx_has(model_type, auto_class, case):
    model = without_cache(model_type, auto_class, **DECODERS[model_type, auto_class][case])
    inputs = padded_inputs(model, model_type)
    if (model_type, auto_class, case) == LSTM:
        with as_for_onnx(), pytest.raises(ValueError, match="attention_mask must be None in an export of an LSTM"):
            model(**inputs)
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


@pytest.mark.parametrize("model_type", ["bst", "chela", "spade"])
def test_a_state_is_refused_for_onnx(model_type):
    model = tiny_model(model_type, "AutoModelForCausalLM")
    with as_for_onnx(), pytest.raises(ValueError, match="use_cache must be False in an export to ONNX"):
        model(**tiny_inputs(model), use_cache=True)
