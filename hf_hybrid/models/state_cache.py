"""Cache layers that keep a state of any form."""

from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only
from transformers.cache_utils import (
    STATIC_LAYER_TYPE_MAPPING,
    Cache,
    CacheLayerMixin,
    EncoderDecoderCache,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionAndSlidingWindowAttentionLayer,
)


def _grown(state: Any, tokens: float) -> Any:
    """Give what grows in a nested state its size for so many more tokens."""

    def grows(x: Any) -> bool:
        return hasattr(x, "grown")  # not by its class, see `state_layer`

    return tree_map(lambda x: x.grown(tokens) if grows(x) else x, state, is_leaf=grows)


def without_first(x: torch.Tensor, count: int, dim: int) -> torch.Tensor:
    """Drop the first `count` entries of a dimension; copy the rest if it is the smaller part, to free memory."""
    kept = x.narrow(dim, count, x.shape[dim] - count)
    return kept.clone() if count > kept.shape[dim] else kept


class _RowsMixin:
    """Mixin of cache layers of rows; `_map` applies a function to all of its tensors."""

    def reorder_cache(self, beam_idx: torch.LongTensor):
        """Give every beam the state of the one it continues."""
        self._map(lambda x: x.index_select(0, beam_idx.to(x.device)))

    def batch_repeat_interleave(self, repeats: int):
        """Repeat every row."""
        self._map(lambda x: x.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices: torch.Tensor):
        """Keep some rows."""
        self._map(lambda x: x[indices])

    def _map(self, function):
        if self.keys is not None:
            self.keys, self.values = function(self.keys), function(self.values)


class StateCacheLayer(_RowsMixin, CacheLayerMixin):
    """Cache of one layer that hands a state from one span of tokens to the next.

    A state is a tensor, or a nested tuple of tensors and plain numbers; the first dimension of each tensor is the
    batch. It is stored without a copy, and the next step may reuse its memory: copy the cache to read it twice. It
    serves dynamic and static caches: what grows with the tokens begins in static ones at the size for all of their
    tokens, so that their shapes stay. A config asks for it with `LAYER_TYPE` in its ``layer_types``.
    """

    _layer_type = "state"
    is_sliding = False
    supports_early_init = False

    def __init__(self, max_cache_len: float | None = None, **kwargs):
        super().__init__()
        self.max_cache_len = max_cache_len
        self.is_compileable = max_cache_len is not None  # transformers compiles steps only with static caches
        self.state: Any = None
        self.length = 0

    def store(self, state: Any, tokens: int):
        """Replace the state by the one after this many more tokens."""
        if self.state is None:
            self.device = next(x.device for x in tree_leaves(state) if isinstance(x, torch.Tensor))
            if self.max_cache_len is not None:
                state = _grown(state, max(0, self.max_cache_len - tokens))
        self.state, self.length, self.is_initialized = state, self.length + tokens, True

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor):
        """Do nothing: there are neither keys nor values."""

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args, **kwargs):
        """Refuse keys and values."""
        raise ValueError("a layer of states keeps no keys and values; use store()")

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return length and offset of the keys that a mask covers."""
        return self.length + query_length, 0

    def get_seq_length(self) -> int:
        """Return the number of tokens read so far."""
        return self.length

    def get_max_length(self) -> int:
        """Return -1: there is no limit."""
        return -1

    def reset(self):
        """Forget everything."""
        self.state, self.length, self.is_initialized = None, 0, False

    def crop(self, tokens_to_remove: int):
        """Refuse to remove tokens: earlier states are not kept."""
        if tokens_to_remove and self.is_initialized:
            raise ValueError(f"a state cannot be rolled back by tokens; got {tokens_to_remove} to remove")

    def offload(self):
        """Do nothing: as in transformers' caches, states stay on their device."""

    def prefetch(self):
        """Do nothing."""

    def _map(self, function):
        super()._map(function)
        self.state = tree_map_only(torch.Tensor, function, self.state)


class SlidingStateCacheLayer(StateCacheLayer):
    """Cache of one layer that keeps a state and the keys and values of a sliding window.

    `update` counts the tokens, so `store` gets 0. The model sets `sliding_window` before the first use: transformers
    sets it only for its own layer types.
    """

    _layer_type = "sliding_state"
    sliding_window: int

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args, **kwargs
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append keys and values `(B, H, T, K)`; return all, keep the window less one."""
        self.length = self.length + key_states.shape[2]  # not in place: a `DecodingStep` makes it a tensor
        if self.keys is not None:
            key_states = torch.cat([self.keys, key_states], dim=2)
            value_states = torch.cat([self.values, value_states], dim=2)
        dropped = max(0, key_states.shape[2] - self.sliding_window + 1)
        self.keys, self.values = without_first(key_states, dropped, 2), without_first(value_states, dropped, 2)
        self.is_initialized, self.device = True, key_states.device
        return key_states, value_states

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return number and first position of the keys that the next queries see."""
        held = 0 if self.keys is None else self.keys.shape[2]
        return held + query_length, self.length - held

    def offload(self):
        """Move keys and values to the CPU; the state stays on its device."""
        CacheLayerMixin.offload(self)

    def prefetch(self):
        """Move keys and values back to their device."""
        CacheLayerMixin.prefetch(self)

    def reset(self):
        """Forget everything."""
        super().reset()
        self.keys = self.values = None


class _HybridRowsMixin(_RowsMixin):
    def _map(self, function):
        super()._map(function)
        for states in (self.conv_states, self.recurrent_states):
            states |= {index: function(x) for index, x in states.items() if x is not None}


# two methods of transformers' layers of a state and keys move the keys alone; these take their place, in caches of
# other models too, since transformers gives a sliding window to layers of its own names only
class HybridCacheLayer(_HybridRowsMixin, LinearAttentionAndFullAttentionLayer):
    """transformers' dynamic layer of a state and all keys and values."""

    _layer_type = "hybrid"


class SlidingHybridCacheLayer(_HybridRowsMixin, LinearAttentionAndSlidingWindowAttentionLayer):
    """transformers' dynamic layer of a state and the keys and values of a window."""

    _layer_type = "hybrid_sliding"


LAYER_TYPE = StateCacheLayer._layer_type
SLIDING_LAYER_TYPE = SlidingStateCacheLayer._layer_type
for _layer in (StateCacheLayer, SlidingStateCacheLayer):
    STATIC_LAYER_TYPE_MAPPING[_layer._layer_type] = _layer  # the base class registers it for dynamic caches only


def state_layer(past_key_values: Cache, layer_idx: int, kind: type[StateCacheLayer] = StateCacheLayer):
    """Return a layer of a cache; raise ValueError unless it is of this kind."""
    layers = getattr(past_key_values, "layers", [])
    layer = layers[layer_idx] if layer_idx < len(layers) else None
    # not by its class: a checkpoint with its code has a copy of this file, and transformers knows one class per name
    if getattr(layer, "_layer_type", None) != kind._layer_type:
        raise ValueError(
            "past_key_values must be able to keep a state, as DynamicCache(config=model.config) is; got a "
            f"{type(past_key_values).__name__} whose layer {layer_idx} is {type(layer).__name__}"
        )
    return layer


def decoder_cache(past_key_values: Cache | None) -> Cache | None:
    """Return the cache of self-attention and states, which an encoder-decoder has beside that of cross-attention."""
    if isinstance(past_key_values, EncoderDecoderCache):
        return past_key_values.self_attention_cache
    return past_key_values


def cached_length(past_key_values: Cache | None, layer_idx: int = 0) -> int | torch.Tensor:
    """Return the number of cached tokens. A static cache counts in a tensor, in place: copy it."""
    past = 0 if past_key_values is None else past_key_values.get_seq_length(layer_idx)
    return past.clone() if isinstance(past, torch.Tensor) else past
