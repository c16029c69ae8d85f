"""What transformers' caches lack: a layer that keeps a state of any form, and counts tokens without keys."""

from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map_only
from transformers.cache_utils import STATIC_LAYER_TYPE_MAPPING, Cache, CacheLayerMixin


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


LAYER_TYPE = StateCacheLayer._layer_type
STATIC_LAYER_TYPE_MAPPING[LAYER_TYPE] = StateCacheLayer  # the base class has entered it for dynamic caches


def state_layer(past_key_values: Cache, layer_idx: int) -> StateCacheLayer:
    """The layer of a cache that keeps states.

    Raises:
        ValueError: The cache keeps something else.
    """
    layers = getattr(past_key_values, "layers", [])
    layer = layers[layer_idx] if layer_idx < len(layers) else None
    if not isinstance(layer, StateCacheLayer):
        raise ValueError(
            "past_key_values must be able to keep a state, as DynamicCache(config=model.config) is; got a "
            f"{type(past_key_values).__name__} whose layer {layer_idx} is {type(layer).__name__}"
        )
    return layer
