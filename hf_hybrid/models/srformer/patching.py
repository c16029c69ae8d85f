"""Turn a T5 or BART that is in memory into an SRformer."""

import re
from collections.abc import Iterable

import torch
from torch import nn
from transformers import (
    BartForConditionalGeneration,
    BartModel,
    PreTrainedModel,
    T5ForConditionalGeneration,
    T5Model,
)

from .modeling_srformer import SegmentedPreTrainedModel
from .modeling_srformer_bart import SRformerBartForConditionalGeneration, SRformerBartModel
from .modeling_srformer_t5 import SRformerT5ForConditionalGeneration, SRformerT5Model

NEW_TENSORS = re.compile(r"\.(raf|recurrent_gate|rnn_k|rnn_v)\.|\.sigma$")
PATCHED = {
    T5Model: SRformerT5Model,
    T5ForConditionalGeneration: SRformerT5ForConditionalGeneration,
    BartModel: SRformerBartModel,
    BartForConditionalGeneration: SRformerBartForConditionalGeneration,
}


def patch_cross_attention(model: PreTrainedModel, segment_size: int = 64, **fields) -> PreTrainedModel:
    """Give a T5 or BART that is in memory SRformer's cross-attention.

    The object becomes an SRformer, with a config of its own; classes, other models and the model's old config stay as
    they are, but hooks and attributes that were put on the object's modules do not stay. All parameters stay the same
    objects, on their device and in their dtype, so that an optimizer that holds them keeps doing so; what is new is
    drawn from the current seed, and an optimizer must be told about it.

    Args:
        model: A `T5Model`, `T5ForConditionalGeneration`, `BartModel` or `BartForConditionalGeneration`.
        segment_size: Keys per segment, in tokens.
        **fields: Other fields that `SRformerT5Config` and `SRformerBartConfig` add, such as `cross_attention_mode`.

    Returns:
        The model itself.

    Raises:
        ValueError: It is of another class, or patched already, or something was added to it or taken from it: an
            adapter, quantization, offloading, layers, a distribution over devices. The model is left as it was.
        huggingface_hub.errors.StrictDataclassError: A field breaks its rule.
    """
    if isinstance(model, SegmentedPreTrainedModel):
        raise ValueError(f"model must not be patched twice; got {type(model).__name__}")
    if type(model) not in PATCHED:
        raise ValueError(
            f"model must be one of {', '.join(source.__name__ for source in PATCHED)}; got {type(model).__name__}"
        )
    if len(set((getattr(model, "hf_device_map", None) or {"": None}).values())) > 1:
        raise ValueError(f"model must lie on one device; got hf_device_map {model.hf_device_map}")
    patched_class = PATCHED[type(model)]
    config = patched_class.config_class.from_parent(model.config, segment_size=segment_size, **fields)
    with torch.device("meta"):
        patched = patched_class(config)
    old, new = _tensors(model), _tensors(patched)
    what = _what_is_not_plain(model, old, new)
    if what is not None:
        raise ValueError(
            f"model must be a plain {type(model).__name__}, patched before anything is changed; got {what}"
        )
    reference = model.get_input_embeddings().weight
    for name, tensor in new.items():
        if name not in old:
            tensor = nn.Parameter(torch.empty_like(tensor, device=reference.device, dtype=reference.dtype))
        parent, _, leaf = name.rpartition(".")
        setattr(patched.get_submodule(parent), leaf, old.get(name, tensor))
    _draw_what_is_new(patched, old.values())
    patched.all_tied_weights_keys = dict(model.all_tied_weights_keys)  # whether a head is tied, weights have said
    modules = dict(model.named_modules())
    for name, module in patched.named_modules():
        module.training = modules[name].training if name in modules else model.training
    patched.name_or_path = model.name_or_path
    if model.can_generate():
        patched.generation_config = model.generation_config
    for module in model.modules():
        if getattr(module, "gradient_checkpointing", False) and hasattr(module, "_gradient_checkpointing_func"):
            patched._set_gradient_checkpointing(True, module._gradient_checkpointing_func)
            break
    model.__class__ = patched_class
    vars(model).clear()
    vars(model).update(vars(patched))
    return model


def _what_is_not_plain(
    model: PreTrainedModel, old: dict[str, torch.Tensor], new: dict[str, torch.Tensor]
) -> str | None:
    """Say what was added to a model, or taken from it, that the patched one would not have."""
    if getattr(model, "is_quantized", False):
        return "quantization"
    for name in sorted(set(old) - set(new)):
        return f"{name}, which a plain one has not"
    for name, tensor in new.items():
        if name not in old and not NEW_TENSORS.search(name):
            return f"no {name}, which its config asks for"
        if name in old and old[name].shape != tensor.shape:
            return f"{name} of shape {tuple(old[name].shape)} instead of {tuple(tensor.shape)}"
    for name, module in model.named_modules():
        if hasattr(module, "_hf_hook") or "forward" in vars(module):
            return f"a forward of its own on {name or 'the model'} (accelerate's, when it offloads)"
    return None


def _tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    return dict([*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)])


def _draw_what_is_new(model: PreTrainedModel, loaded: Iterable[torch.Tensor]) -> None:
    """Initialise all tensors but these, as transformers does with those that a checkpoint lacks."""
    loaded = list(loaded)
    for tensor in loaded:
        tensor._is_hf_initialized = True
    model.initialize_weights()
    for tensor in loaded:
        vars(tensor).pop("_is_hf_initialized", None)
