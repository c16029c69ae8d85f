"""What transformers' caches and generation lack: a layer that keeps a state of any form, and decoding from it."""

from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map_only
from transformers.cache_utils import STATIC_LAYER_TYPE_MAPPING, Cache, CacheLayerMixin
from transformers.generation import GenerationMixin


def without_first(x: torch.Tensor, count: int, dim: int) -> torch.Tensor:
    """What a cache keeps of a tensor behind its first tokens: no view of what is mostly dropped."""
    kept = x.narrow(dim, count, x.shape[dim] - count)
    return kept.clone() if count > kept.shape[dim] else kept


class StateCacheLayer(CacheLayerMixin):
    """One layer's part of a cache: whatever the layer hands from one stretch of tokens to the next.

    A state is a tensor or a nested tuple of tensors, whose first dimension is the batch, and of plain numbers. It is
    stored as it comes, without a copy, and serves dynamic and static caches alike, since its size does not change
    with the number of tokens, or in a way of its own.

    A config asks for it by naming `LAYER_TYPE` among its ``layer_types``.
    """

    _layer_type = "state"
    is_sliding = False
    supports_early_init = False

    def __init__(self, **kwargs):
        super().__init__()
        self.state: Any = None
        self.length = 0

    def store(self, state: Any, tokens: int):
        """Replace the state by the one after so many more tokens."""
        self.state, self.length, self.is_initialized = state, self.length + tokens, True
        self.device = next(x.device for x in tree_leaves(state) if isinstance(x, torch.Tensor))

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor):
        """Do nothing: there are neither keys nor values."""

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args, **kwargs):
        """Refuse keys and values."""
        raise ValueError("a layer of states keeps no keys and values; use store()")

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Length and offset of what a mask would cover."""
        return self.length + query_length, 0

    def get_seq_length(self) -> int:
        """Tokens read so far."""
        return self.length

    def get_max_length(self) -> int:
        """No limit."""
        return -1

    def reset(self):
        """Forget everything."""
        self.state, self.length, self.is_initialized = None, 0, False

    def crop(self, tokens_to_remove: int):
        """Refuse to go back: a state knows nothing of the one before."""
        if tokens_to_remove and self.is_initialized:
            raise ValueError(f"a state cannot be rolled back by tokens; got {tokens_to_remove} to remove")

    def reorder_cache(self, beam_idx: torch.LongTensor):
        """Give every beam the state of the one it continues."""
        self._map(lambda x: x.index_select(0, beam_idx.to(x.device)))

    def batch_repeat_interleave(self, repeats: int):
        """Repeat every row."""
        self._map(lambda x: x.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices: torch.Tensor):
        """Keep some rows."""
        self._map(lambda x: x[indices])

    def offload(self):
        """Move the state to the CPU."""
        self._map(lambda x: x.to("cpu", non_blocking=True))

    def prefetch(self):
        """Move the state back to where it was stored from."""
        if self.is_initialized:
            self._map(lambda x: x.to(self.device, non_blocking=True))

    def _map(self, function):
        self.state = tree_map_only(torch.Tensor, function, self.state)


class SlidingStateCacheLayer(StateCacheLayer):
    """A state, and beside it the keys and values of a sliding window.

    `update` counts the tokens, `store` is told of none. `sliding_window` is set by the model before the first use:
    transformers tells it to layers of its own types alone.
    """

    _layer_type = "sliding_state"
    sliding_window: int

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args, **kwargs
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append keys and values `(B, H, T, K)`, return all, and keep one less than the window."""
        if self.keys is not None:
            key_states = torch.cat([self.keys, key_states], dim=2)
            value_states = torch.cat([self.values, value_states], dim=2)
            self.length -= self.keys.shape[2]
        self.length += key_states.shape[2]
        dropped = max(0, key_states.shape[2] - self.sliding_window + 1)
        self.keys, self.values = without_first(key_states, dropped, 2), without_first(value_states, dropped, 2)
        self.is_initialized, self.device = True, key_states.device
        return key_states, value_states

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Number and first position of the keys that the next queries get to see."""
        held = 0 if self.keys is None else self.keys.shape[2]
        return held + query_length, self.length - held

    def reset(self):
        """Forget everything."""
        super().reset()
        self.keys = self.values = None

    def _map(self, function):
        super()._map(function)
        if self.keys is not None:
            self.keys, self.values = function(self.keys), function(self.values)


LAYER_TYPE = StateCacheLayer._layer_type
SLIDING_LAYER_TYPE = SlidingStateCacheLayer._layer_type
for _layer in (StateCacheLayer, SlidingStateCacheLayer):
    STATIC_LAYER_TYPE_MAPPING[_layer._layer_type] = _layer  # the base class has entered it for dynamic caches


def state_layer(past_key_values: Cache, layer_idx: int, kind: type[StateCacheLayer] = StateCacheLayer):
    """The layer of a cache that keeps states.

    Args:
        past_key_values: The cache.
        layer_idx: Index of the layer.
        kind: What it must be.

    Raises:
        ValueError: The cache keeps something else.
    """
    layers = getattr(past_key_values, "layers", [])
    layer = layers[layer_idx] if layer_idx < len(layers) else None
    # not by its class: checkpoints that bring their code along bring this file too, and transformers knows one class
    # by each name
    if getattr(layer, "_layer_type", None) != kind._layer_type:
        raise ValueError(
            "past_key_values must be able to keep a state, as DynamicCache(config=model.config) is; got a "
            f"{type(past_key_values).__name__} whose layer {layer_idx} is {type(layer).__name__}"
        )
    return layer


class StatefulGenerationMixin(GenerationMixin):
    """transformers' decoding, except what would need a state to be rolled back; before `PreTrainedModel`."""

    @property
    def _is_stateful(self) -> bool:
        """Whether the cache keeps a state; by this transformers refuses assisted decoding of the model."""
        return True

    def generate(self, *args, **kwargs):
        """As everywhere in transformers, but refused where the model is the assistant."""
        if self._is_stateful and getattr(kwargs.get("generation_config"), "is_assistant", False):
            raise ValueError(
                f"assistant_model must not be stateful, since its rejected tokens are taken back; got a "
                f"{type(self).__name__}, which keeps a state"
            )
        return super().generate(*args, **kwargs)
