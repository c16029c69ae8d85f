"""Turn a loaded T5 or BART into an SRformer."""

import re
from collections.abc import Iterable

import torch
from torch import nn
from transformers import BartForConditionalGeneration, BartModel, PreTrainedModel, T5ForConditionalGeneration, T5Model

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
    """Give a loaded T5 or BART SRformer's cross-attention, in place.

    The object becomes an SRformer with its own config; the old config, other models and classes do not change. Hooks
    and attributes added to the object's modules are lost. Parameters stay the same objects, on their device and in
    their dtype, so an optimizer keeps them. New parameters are drawn from the current seed; add them to the optimizer.

    Args:
        model: A `T5Model`, `T5ForConditionalGeneration`, `BartModel` or `BartForConditionalGeneration`.
        segment_size: Keys per segment, in tokens.
        **fields: Other fields that `SRformerT5Config` and `SRformerBartConfig` add, such as `cross_attention_mode`.

    Returns:
        The model itself.

    Raises:
        ValueError: The model is of another class, patched already, or modified: by an adapter, quantization,
            offloading, other layers or a distribution over devices. The model does not change.
        huggingface_hub.errors.StrictDataclassError: A field breaks its rule.
    """
    if isinstance(model, SegmentedPreTrainedModel):
        raise ValueError(f"model must not be patched twice; got {type(model).__name__}")
    if type(model) not in PATCHED:
        raise ValueError(
            f"model must be one of {', '.join(source.__name__ for source in PATCHED)}; got {type(model).__name__}"
        )
    if len(set((getattr(model, "hf_device_map", None) or {"": None}).values())) > 1:
        raise ValueError(f"model must be on one device; got hf_device_map {model.hf_device_map}")
    patched_class = PATCHED[type(model)]
    config = patched_class.config_class.from_parent(model.config, segment_size=segment_size, **fields)
    with torch.device("meta"):
        patched = patched_class(config)
    old, new = _tensors(model), _tensors(patched)
    change = _find_change(model, old, new)
    if change is not None:
        raise ValueError(f"model must be a plain {type(model).__name__}, patched before other changes; got {change}")
    reference = model.get_input_embeddings().weight
    for name, tensor in new.items():
        if name not in old:
            tensor = nn.Parameter(torch.empty_like(tensor, device=reference.device, dtype=reference.dtype))
        parent, _, leaf = name.rpartition(".")
        setattr(patched.get_submodule(parent), leaf, old.get(name, tensor))
    _initialize_new(patched, old.values())
    patched.all_tied_weights_keys = dict(model.all_tied_weights_keys)  # loading decided by the weights
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


def _find_change(model: PreTrainedModel, old: dict[str, torch.Tensor], new: dict[str, torch.Tensor]) -> str | None:
    """Return what was added to a model or removed from it, or None."""
    if getattr(model, "is_quantized", False):
        return "quantization"
    for name in sorted(set(old) - set(new)):
        return f"{name}, which a plain one does not have"
    for name, tensor in new.items():
        if name not in old and not NEW_TENSORS.search(name):
            return f"no {name}, which its config requires"
        if name in old and old[name].shape != tensor.shape:
            return f"{name} of shape {tuple(old[name].shape)} instead of {tuple(tensor.shape)}"
    for name, module in model.named_modules():
        if hasattr(module, "_hf_hook") or "forward" in vars(module):
            return f"a changed forward of {name or 'the model'} (such as accelerate's for offloading)"
    return None


def _tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    return dict([*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)])


def _initialize_new(model: PreTrainedModel, loaded: Iterable[torch.Tensor]) -> None:
    """Initialise all other tensors, as transformers does with those missing from a checkpoint."""
    loaded = list(loaded)
    for tensor in loaded:
        tensor._is_hf_initialized = True
    model.initialize_weights()
    for tensor in loaded:
        vars(tensor).pop("_is_hf_initialized", None)
