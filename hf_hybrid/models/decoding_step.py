"""One decoding step as a function of tensors, for `torch.export`.

Shapes: B batch · V vocabulary.
"""

import copy
import io
import math
import pickle
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.cache_utils import STATIC_LAYER_TYPE_MAPPING, Cache, DynamicCache, EncoderDecoderCache, StaticCache

from .state_cache import LAYER_TYPE, SLIDING_LAYER_TYPE, decoder_cache

States = tuple[torch.Tensor, ...]
FULL = {"sliding_attention": "full_attention", "hybrid_sliding": "hybrid"}


def step_cache(model: PreTrainedModel, max_cache_len: int) -> Cache:
    """Return an empty cache for a prompt and the steps after it.

    It is a `StaticCache` that also keeps all keys of windows: transformers' own layers for windows count in Python
    numbers, and each step takes another branch until the window is full.

    Args:
        model: A causal language model or an encoder-decoder.
        max_cache_len: Number of tokens that it holds at most.
    """
    config = model.config.get_text_config(decoder=True)
    cache = StaticCache(config=config, max_cache_len=max_cache_len)
    for index, kind in enumerate(getattr(config, "layer_types", None) or []):
        if kind in FULL:
            cache.layers[index] = STATIC_LAYER_TYPE_MAPPING[FULL[kind]](max_cache_len=max_cache_len)
        elif kind in (LAYER_TYPE, SLIDING_LAYER_TYPE):
            cache.layers[index].max_cache_len = math.inf  # a step could not tell when a smaller state is full
    return EncoderDecoderCache(cache, DynamicCache()) if model.config.is_encoder_decoder else cache


class DecodingStep(nn.Module):
    """A step of a model that generates, with all that its cache holds as a flat tuple of tensors.

    An exported program keeps Python numbers as constants. So the step takes a cache that counts in tensors, and
    refuses one of which it would change another number or a shape.

    Args:
        model: A causal language model or an encoder-decoder, in evaluation mode.
        past_key_values: From `step_cache`, after the model has read a prompt without padding. It is copied.
        **inputs: Other arguments of every step, such as `encoder_outputs` and the documents' `attention_mask`; their
            tensors are part of the states.
    """

    def __init__(self, model: PreTrainedModel, past_key_values: Cache, **inputs: Any):
        super().__init__()
        self.model = model
        past_key_values = copy.deepcopy(past_key_values)
        for layer in decoder_cache(past_key_values).layers:
            if isinstance(getattr(layer, "length", None), int):  # layers of states count in numbers
                layer.length = torch.tensor(layer.length, device=layer.device)
        self._structure, self._first_states = _flattened({"past_key_values": past_key_values, **inputs})

    def first_states(self) -> States:
        """Return the states before the first step: a copy, since a step may overwrite those that it gets."""
        return tuple(x.clone() for x in self._first_states)

    def forward(self, input_ids: torch.Tensor, states: States) -> tuple[torch.Tensor, States]:
        """Read a token.

        Args:
            input_ids: `(B, 1)`; in an encoder-decoder the decoder's.
            states: From `first_states` or the step before. Do not use them again.

        Returns:
            Logits of the next token, `(B, V)`, and the next states, of the same shapes.

        Raises:
            ValueError: The step changes a shape, or a number that is no tensor.
        """
        inputs = _rebuilt(self._structure, states)
        name = "decoder_input_ids" if self.model.config.is_encoder_decoder else "input_ids"
        logits = self.model(**{name: input_ids}, **inputs, use_cache=True, return_dict=True).logits
        structure, after = _flattened(inputs)
        shapes = [[tuple(x.shape) for x in part] for part in (states, after)]
        if structure != self._structure or shapes[0] != shapes[1]:
            raise ValueError(
                "past_key_values must keep its shapes and numbers in a step, as one from step_cache does whose prompt "
                f"fills the windows; got a {type(inputs['past_key_values']).__name__} that does not"
            )
        return logits[:, -1], after


def _flattened(inputs: dict[str, Any]) -> tuple[bytes, States]:
    """Split nested objects into their structure and their tensors."""
    tensors: list[torch.Tensor] = []

    class Pickler(pickle.Pickler):
        def persistent_id(self, obj: Any) -> int | None:
            if not isinstance(obj, torch.Tensor):
                return None
            tensors.append(obj)
            return len(tensors) - 1

    file = io.BytesIO()
    Pickler(file).dump(inputs)
    return file.getvalue(), tuple(tensors)


def _rebuilt(structure: bytes, tensors: States) -> dict[str, Any]:
    """Invert `_flattened`."""

    class Unpickler(pickle.Unpickler):
        def persistent_load(self, pid: int) -> torch.Tensor:
            return tensors[pid]

    return Unpickler(io.BytesIO(structure)).load()
