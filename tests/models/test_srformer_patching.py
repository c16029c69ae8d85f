"""A T5 or BART in memory becomes an SRformer."""

import copy

import pytest
import torch
import transformers
from transformers import (
    BartForConditionalGeneration,
    BartModel,
    MBartConfig,
    T5EncoderModel,
    T5ForConditionalGeneration,
    T5Model,
)

import hf_hybrid

from ..tolerances import assert_close
from .srformer import (
    NEW_FIELDS,
    PARENTS,
    attentions,
    parent,
)
from .tiny import TINY_CONFIGS, tiny_inputs, tiny_labels

# patching


@pytest.mark.parametrize("model_class", [T5Model, T5ForConditionalGeneration, BartModel, BartForConditionalGeneration])
def test_patching_keeps_every_parameter_object(model_class):
    model_type = "srformer_t5" if model_class.__name__.startswith("T5") else "srformer_bart"
    base = parent(model_type)
    if model_class.__name__.endswith("Model"):
        base = base.get_decoder() and model_class(base.config).eval()
    twin = copy.deepcopy(base)
    old_class, old_config, forwards = (
        type(base),
        base.config,
        [c.forward for c in (model_class, type(base.get_decoder()))],
    )
    parameters = dict(base.named_parameters(remove_duplicate=False))
    next(iter(parameters.values())).requires_grad_(False)
    optimizer = torch.optim.SGD([p for p in base.parameters() if p.requires_grad], lr=0.1)
    patched = hf_hybrid.patch_cross_attention(base, segment_size=50)
    assert patched is base
    assert type(base).__name__ == f"SRformer{model_class.__name__}"
    new = {name for name, _ in base.named_parameters() if name not in parameters}
    assert len(new) == 8
    assert all(".raf." in name or ".recurrent_gate." in name for name in new)
    for name, parameter in parameters.items():
        assert base.get_parameter(name) is parameter
        assert not hasattr(parameter, "_is_hf_initialized")
    inputs = tiny_inputs(twin, length=50)
    expected = twin(**inputs)
    output = base(**inputs)
    assert_close(output[0], expected[0], "float32 model")
    output[0].square().mean().backward()
    optimizer.step()
    assert (base(**inputs)[0] - output[0]).abs().max() > 0
    # nothing else is touched
    assert type(old_config) is PARENTS[model_type][0]
    assert type(twin) is old_class is model_class
    assert forwards == [c.forward for c in (model_class, type(twin.get_decoder()))]
    assert not attentions(twin)
    assert_close(twin(**inputs)[0], expected[0], "exact")


def test_a_patched_model_is_an_ordinary_one(tmp_path):
    base = parent("srformer_t5", feed_forward_proj="gated-gelu", tie_word_embeddings=False)
    base.lm_head.weight = torch.nn.Parameter(base.lm_head.weight + 0.3)
    base.save_pretrained(tmp_path / "base")
    base = T5ForConditionalGeneration.from_pretrained(tmp_path / "base", attn_implementation="eager").train()
    base.generation_config.max_new_tokens = 6
    base.activation_checkpointing_enable()
    model = hf_hybrid.patch_cross_attention(base, 4, cross_attention_mode="no_norm", leak_init=1.0)
    assert model.training
    assert model.is_gradient_checkpointing
    assert model.config._attn_implementation == "eager"
    assert (model.config.segment_size, model.config.leak_init, model.config.scale_decoder_outputs) == (4, 1.0, False)
    inputs = tiny_inputs(model, length=21)
    model(input_ids=inputs["input_ids"], labels=tiny_labels(model)).loss.backward()
    assert (attentions(model)[0].recurrent_gate.weight.grad.abs() > 0).all()
    model.eval().save_pretrained(tmp_path / "patched")
    loaded, info = transformers.AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "patched", output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert not torch.equal(loaded.lm_head.weight, loaded.shared.weight)
    assert_close(loaded.eval()(**inputs).logits, model(**inputs).logits, "float32 model")
    generated = model.generate(inputs["input_ids"], num_beams=2)
    assert generated.shape[1] <= 7
    assert torch.equal(loaded.generate(inputs["input_ids"], num_beams=2), generated)


def test_what_cannot_be_patched():
    base = parent("srformer_t5")
    patched = hf_hybrid.patch_cross_attention(copy.deepcopy(base))
    with pytest.raises(ValueError, match="model must not be patched twice; got SRformerT5ForConditionalGeneration"):
        hf_hybrid.patch_cross_attention(patched)
    with pytest.raises(ValueError, match=r"model must be one of T5Model, .*; got T5EncoderModel"):
        hf_hybrid.patch_cross_attention(T5EncoderModel(base.config))
    mbart = {name: value for name, value in TINY_CONFIGS["srformer_bart"].items() if name not in NEW_FIELDS}
    with pytest.raises(ValueError, match=r"model must be one of .*; got MBartForConditionalGeneration"):
        hf_hybrid.patch_cross_attention(transformers.MBartForConditionalGeneration(MBartConfig(**mbart)))
    with pytest.raises(ValueError, match=r"model must be one of .*; got Linear"):
        hf_hybrid.patch_cross_attention(torch.nn.Linear(2, 2))
    with pytest.raises(ValueError, match=r"adds no field 'segment_length'. Did you mean 'segment_size'"):
        hf_hybrid.patch_cross_attention(base, segment_length=4)
    with pytest.raises(Exception, match="segment_size must be a positive integer; got 0"):
        hf_hybrid.patch_cross_attention(base, segment_size=0)
    base.extra = torch.nn.Linear(2, 2)
    with pytest.raises(
        ValueError, match=r"must be a plain T5ForConditionalGeneration, .* got extra.bias, which a plain"
    ):
        hf_hybrid.patch_cross_attention(base)
    assert type(base) is T5ForConditionalGeneration
    assert not attentions(base)
    base.hf_device_map = {"encoder": 0, "decoder": 1}
    with pytest.raises(ValueError, match="model must be on one device; got hf_device_map"):
        hf_hybrid.patch_cross_attention(base)


@pytest.mark.parametrize("model_type", PARENTS)
def test_patching_refuses_what_it_would_lose(model_type):
    base = parent(model_type)
    layers = base.get_decoder().block if model_type == "srformer_t5" else base.get_decoder().layers
    last = layers[-1]
    del layers[-1]
    with pytest.raises(ValueError, match=r"plain .* before other changes; got no .*, which its config requires"):
        hf_hybrid.patch_cross_attention(base)
    layers.append(last)
    base.lm_head.weight = torch.nn.Parameter(torch.zeros(3, 32))
    with pytest.raises(ValueError, match=r"got lm_head.weight of shape \(3, 32\) instead of \(64, 32\)"):
        hf_hybrid.patch_cross_attention(base)
    base = parent(model_type)
    base.get_encoder().forward = base.get_encoder().forward
    with pytest.raises(ValueError, match=r"a changed forward of .*encoder"):
        hf_hybrid.patch_cross_attention(base)


@pytest.mark.parametrize("model_type", PARENTS)
def test_patching_leaves_modes_as_they_are(model_type):
    base = parent(model_type).train()
    base.get_encoder().eval()
    patched = hf_hybrid.patch_cross_attention(base)
    assert patched.training
    assert patched.get_decoder().training
    assert not any(module.training for module in patched.get_encoder().modules())


@pytest.mark.parametrize("model_type", PARENTS)
def test_a_plain_config_is_refused(model_type):
    base = parent(model_type)
    with pytest.raises(ValueError, match=f"config must be a SRformer.*Config, .* got {type(base.config).__name__}"):
        type(hf_hybrid.patch_cross_attention(parent(model_type)))(base.config)
