"""Models, modules and the paper's algorithm for the tests of SRformer."""

import pytest
import torch
from transformers import BartConfig, BartForConditionalGeneration, T5Config, T5ForConditionalGeneration

import hf_hybrid
from hf_hybrid.kernels.segment_recurrence import reference
from hf_hybrid.models.srformer.segments import Reading, cut

from .tiny import TINY_CONFIGS, tiny_model

MODEL_TYPES = ("srformer_t5", "srformer_bart")
PARENTS = {
    "srformer_t5": (T5Config, T5ForConditionalGeneration, hf_hybrid.SRformerT5ForConditionalGeneration),
    "srformer_bart": (BartConfig, BartForConditionalGeneration, hf_hybrid.SRformerBartForConditionalGeneration),
}
NEW_FIELDS = ("segment_size", "decoder_horizon", "horizon_mode")
MODES = ("sr", "segmented", "recurrent", "no_norm", "no_raf", "own_segment", "transformer_xl", "longt5")
ONE_PART = ("segmented", "recurrent", "transformer_xl", "longt5")  # the modes with nothing to weigh
every_type = pytest.mark.parametrize("model_type", MODEL_TYPES)


def seq2seq(model_type, *, seed=0, **overrides):
    """A tiny model whose neurons fire and are heard: linear maps and gates of ordinary size."""
    model = tiny_model(model_type, "AutoModelForSeq2SeqLM", seed=seed, **overrides)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("raf.linear.weight", "recurrent_gate.weight")):
                parameter.copy_(torch.randn(parameter.shape, generator=generator) / 2)
    return model


def parent(model_type, *, seed=0, **overrides):
    config_class, model_class, _ = PARENTS[model_type]
    fields = {name: value for name, value in TINY_CONFIGS[model_type].items() if name not in NEW_FIELDS}
    torch.manual_seed(seed)
    return model_class(config_class(**{**fields, **overrides})).eval()


def attentions(model):
    """The cross-attention modules of a model."""
    return [module for module in model.modules() if hasattr(module, "segment_shape")]


def attend(module, hidden, source, *, mask=None, horizon=None, past=0):
    """Run one cross-attention module as a decoder does."""
    segments, states = cut(module.config, source, mask, horizon or hidden.shape[1])
    reading = Reading(
        segments,
        hidden.shape[1],
        past=past,
        batch=hidden.shape[0],
        heads=module.segment_shape[0],
        documents=None,
        device=hidden.device,
    )
    return module(hidden, key_value_states=states, reading=reading)[0]


def projected(module, hidden, source):
    """Queries, keys and values of a module, `(B, T or L, H, K)`."""
    names = ("q", "k", "v") if hasattr(module, "q") else ("q_proj", "k_proj", "v_proj")
    inputs = zip(names, (hidden, source, source), strict=True)
    return tuple(getattr(module, name)(x).unflatten(2, module.segment_shape) for name, x in inputs)


def algorithm_1(module, hidden, source, horizon):
    """The same by the paper's loop over tokens, for a batch without padding."""
    query, key, value = projected(module, hidden, source)
    output = reference.cross_attention(
        query * module.scaling,
        key,
        value,
        segment_size=module.config.segment_size,
        horizon=horizon,
        weight=module.raf.linear.weight,
        leak=module.raf.leak,
        threshold=module.raf.threshold,
        clamp=module.config.kv_clamp,
    )
    return (module.o if hasattr(module, "o") else module.out_proj)(output.flatten(2))


def random(*shape, seed=0, dtype=torch.float64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def memories(outputs):
    return [layer.memory for layer in outputs.past_key_values.cross_attention_cache.layers]
