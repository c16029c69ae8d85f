"""Long inputs in every precision, and batches: what a row gives depends neither on 16 bits nor on its neighbours."""

import functools

import pytest
import torch
from transformers.modeling_outputs import BaseModelOutput

from ..matrix import some
from ..tolerances import assert_close, assert_close_on_average
from .tiny import MODEL_CLASSES, PADDED_SIDES, main_output, tiny_inputs, tiny_model

LENGTH = 16_384
MODELS = {
    "bst": ("bst", "AutoModelForCausalLM", {"window": 64}),
    "chela": ("chela", "AutoModelForMaskedLM", {"long_kernel_size": 4096}),
    "causal chela": ("chela", "AutoModelForCausalLM", {"long_kernel_size": 4096, "is_decoder": True}),
    "spade": ("spade", "AutoModelForSeq2SeqLM", {"local_radius": 64}),
    "causal spade": ("spade", "AutoModelForCausalLM", {"local_radius": 64}),
    "srformer_bart": ("srformer_bart", "AutoModelForSeq2SeqLM", {"segment_size": 64}),
    "srformer_t5": ("srformer_t5", "AutoModelForSeq2SeqLM", {"segment_size": 64}),
}
PRECISIONS = {
    "autocast": (torch.float32, "bfloat16 model"),
    "bfloat16": (torch.bfloat16, "bfloat16 model"),
    "float16": (torch.float16, "float16 model"),
}


def long_inputs(name: str, repeated: bool) -> dict:
    """A document of 16,384 tokens; for SRformer, whose encoder is quadratic, what its encoder would make of one."""
    model = build(name, torch.float32)
    inputs = tiny_inputs(model, batch=1, length=LENGTH, target_length=200)
    if repeated:
        inputs["input_ids"] = torch.full_like(inputs["input_ids"], 7)
    if name.startswith("srformer"):
        generator = torch.Generator().manual_seed(3)
        states = torch.randn(1, 1 if repeated else LENGTH, 32, generator=generator).expand(1, LENGTH, 32)
        inputs = {"encoder_outputs": states, "decoder_input_ids": inputs["decoder_input_ids"]}
    return {**inputs, "labels": inputs.get("decoder_input_ids", inputs.get("input_ids"))}


def build(name: str, dtype: torch.dtype):
    model_type, auto_class, overrides = MODELS[name]
    return tiny_model(model_type, auto_class, **overrides).to(dtype)


def run(name: str, precision: str, repeated: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits and loss, after a backward whose gradients are found finite."""
    dtype, _ = PRECISIONS.get(precision, (torch.float32, ""))
    model, inputs = build(name, dtype), long_inputs(name, repeated)
    if "encoder_outputs" in inputs:
        inputs["encoder_outputs"] = BaseModelOutput(last_hidden_state=inputs["encoder_outputs"].to(dtype))
    with torch.autocast("cpu", torch.bfloat16, enabled=precision == "autocast"):
        outputs = model(**inputs)
    outputs.loss.backward()
    for field, parameter in model.named_parameters():
        assert parameter.grad is None or torch.isfinite(parameter.grad).all(), field
    return outputs.logits.detach(), outputs.loss.detach()


@functools.cache
def in_float32(name: str, repeated: bool) -> tuple[torch.Tensor, torch.Tensor]:
    return run(name, "float32", repeated)


@pytest.mark.parametrize("precision", some(PRECISIONS, "bfloat16", "autocast"))
@pytest.mark.parametrize("name", MODELS)
def test_a_long_document_in_16_bits(name, precision):
    (logits, loss), (expected, expected_loss) = run(name, precision, False), in_float32(name, False)
    row = PRECISIONS[precision][1]
    assert_close_on_average(logits.float(), expected, row)
    assert_close_on_average(loss.float(), expected_loss, row)


@pytest.mark.parametrize("precision", some(PRECISIONS, "bfloat16", "autocast"))
@pytest.mark.parametrize("name", MODELS)
def test_one_token_again_and_again(name, precision):
    """Sums do not cancel then, and are as large as they ever are."""
    (logits, loss), (expected, _) = run(name, precision, True), in_float32(name, True)
    assert torch.isfinite(loss)
    if (name, precision) == ("srformer_t5", "float16"):
        assert torch.isfinite(logits).all()  # its states leave float16's range here, and are clamped, as T5 clamps
    else:
        assert_close_on_average(logits.float(), expected, PRECISIONS[precision][1])


# windows, segments and chunks are crossed many times; at 300 tokens BST's last window is not whole
BATCHED = [
    ("bst", "AutoModelForCausalLM", {"window": 32, "context_type": "multi_filter", "num_context_states": 6}),
    ("bst", "AutoModelForCausalLM", {"window": 32}),
    ("chela", "AutoModelForMaskedLM", {"long_kernel_size": 64}),
    ("chela", "AutoModelForCausalLM", {"attention_fn": "laplace", "chunk_size": 32, "is_decoder": True}),
    ("spade", "AutoModelForSeq2SeqLM", {"attention_type": "chunk", "chunk_size": 32, "decoder_global_layers": [0]}),
    ("spade", "AutoModelForCausalLM", {"local_radius": 32, "ssm_type": "s5"}),
    ("srformer_bart", "AutoModelForSeq2SeqLM", {"segment_size": 32}),
    ("srformer_t5", "AutoModelForSeq2SeqLM", {"segment_size": 32}),
]


@pytest.mark.parametrize(
    ("model_type", "auto_class", "overrides", "side"),
    [(*case, side) for case in BATCHED for side in PADDED_SIDES.get(case[0], ("left", "right"))],
)
def test_a_row_alone_gives_what_it_gives_among_others(model_type, auto_class, overrides, side):
    model = tiny_model(model_type, auto_class, **overrides)
    lengths = (300, 257, 33, 1)
    inputs = tiny_inputs(model, batch=len(lengths), length=max(lengths), target_length=9)
    mask = torch.zeros_like(inputs["input_ids"])
    for row, length in enumerate(lengths):
        mask[row, slice(300 - length, None) if side == "left" else slice(length)] = 1
    with torch.no_grad():
        together = main_output(model(**{**inputs, "attention_mask": mask}))
        for row, length in enumerate(lengths):
            own = {field: tensor[row : row + 1] for field, tensor in inputs.items()}
            own["input_ids"] = own["input_ids"][mask[row : row + 1] == 1].view(1, length)
            got = together[row : row + 1]
            if "decoder_input_ids" not in inputs:
                got = got[mask[row : row + 1] == 1].view(1, length, -1)
            assert_close(got, main_output(model(**own)), "float32 model")


@pytest.mark.parametrize(("model_type", "auto_class", "overrides"), BATCHED)
def test_nan_in_a_row_stays_in_it_and_shows(model_type, auto_class, overrides):
    model = tiny_model(model_type, auto_class, **overrides)
    inputs = tiny_inputs(model, batch=3, length=100, target_length=9)
    embeddings = model.get_input_embeddings()(inputs.pop("input_ids"))
    with torch.no_grad():
        clean = main_output(model(inputs_embeds=embeddings, **inputs))
        embeddings[1, 40] = torch.nan
        output = main_output(model(inputs_embeds=embeddings, **inputs))
    assert torch.isnan(output[1]).any()
    assert_close(output[[0, 2]], clean[[0, 2]], "float32 model")


@pytest.mark.parametrize(("model_type", "auto_class"), MODEL_CLASSES)
def test_no_token_is_an_error_in_words(model_type, auto_class):
    model = tiny_model(model_type, auto_class)
    inputs = tiny_inputs(model)
    for field, ids in inputs.items():
        with pytest.raises(ValueError, match=r"input_ids must hold at least one token; got \(2, 0\)"):
            model(**{**inputs, field: ids[:, :0]})


@pytest.mark.parametrize(("model_type", "auto_class"), MODEL_CLASSES)
def test_a_row_that_is_all_padding_gives_no_nan_and_changes_no_other(model_type, auto_class):
    model = tiny_model(model_type, auto_class)
    inputs = tiny_inputs(model)
    mask = torch.ones_like(inputs["input_ids"])
    with torch.no_grad():
        plain = main_output(model(**inputs, attention_mask=mask))
        mask[1] = 0
        output = main_output(model(**inputs, attention_mask=mask))
        nothing = main_output(model(**inputs, attention_mask=torch.zeros_like(mask)))
    assert_close(output[0], plain[0], "float32 model")
    assert torch.isfinite(output).all()
    assert torch.isfinite(nothing).all()


def test_more_tokens_than_positions_are_an_error_in_words():
    model = tiny_model("srformer_bart", "AutoModelForSeq2SeqLM", max_position_embeddings=8)
    inputs = tiny_inputs(model, length=8, target_length=8)
    assert main_output(model(**inputs)).shape[1] == 8
    for field in inputs:
        longer = torch.cat([inputs[field], inputs[field][:, :1]], dim=1)
        with pytest.raises(
            ValueError, match="at most max_position_embeddings = 8 tokens, cached ones included; got 9"
        ):
            model(**{**inputs, field: longer})
    with pytest.raises(ValueError, match="at most max_position_embeddings = 8 tokens, cached ones included; got 9"):
        model.generate(inputs["input_ids"], min_new_tokens=12, max_new_tokens=12)
