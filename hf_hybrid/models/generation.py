"""Generation with models whose caches keep states: their own masks, and assisted decoding."""

import inspect
from functools import wraps
from typing import Any

import torch
from torch.utils._pytree import tree_map_only
from transformers.cache_utils import Cache, DynamicCache, EncoderDecoderCache
from transformers.generation import GenerationConfig, GenerationMixin
from transformers.utils import logging

from .state_cache import LAYER_TYPE, SLIDING_LAYER_TYPE, decoder_cache

logger = logging.get_logger(__name__)

REREAD = 32
"""Accepted tokens after a checkpoint up to which a model reads them again together with the next candidates."""
MORE_OUTPUTS = ("output_attentions", "output_hidden_states")


class RollbackCache(DynamicCache):
    """View of a cache that goes back to a checkpoint, since a state cannot be rolled back token by token.

    It shares the layers of the cache. After a rollback, the model has to read the accepted tokens after the
    checkpoint again.

    Args:
        cache: The cache.
    """

    def __init__(self, cache: DynamicCache):
        vars(self).update(vars(cache))
        self.cache = cache
        self.checkpoint()

    def checkpoint(self):
        """Remember all layers."""
        self._remembered = [_copied(vars(layer)) for layer in self.layers]

    def activate_past_recording(self):
        """Do nothing: layers forget as always, since the checkpoint remembers."""

    def crop(self, tokens_to_remove: int):
        """Go back to the checkpoint if tokens are to be removed; otherwise make a new one."""
        if tokens_to_remove == 0:
            self.checkpoint()
            return
        for layer, remembered in zip(self.layers, self._remembered, strict=True):
            vars(layer).clear()
            vars(layer).update(_copied(remembered))


def _copied(fields: dict[str, Any]) -> dict[str, Any]:
    """Copy a layer's fields except keys and values, which are replaced and never changed in place as states are."""
    return {
        name: value if name in ("keys", "values") else tree_map_only(torch.Tensor, torch.clone, value)
        for name, value in fields.items()
    }


def _with_rollback(cache: Cache) -> Cache:
    """Return a view of a cache that can be rolled back."""
    if isinstance(decoder_cache(cache), RollbackCache):
        return cache
    if not isinstance(cache, EncoderDecoderCache):
        return RollbackCache(cache)
    view = EncoderDecoderCache(RollbackCache(cache.self_attention_cache), cache.cross_attention_cache)
    view.is_updated = cache.is_updated
    return view


class NoContinuousBatching:
    """Mixin that refuses `generate_batch` and what else transformers builds on a cache of pages."""

    def init_continuous_batching(self, *args, **kwargs):
        """Refuse."""
        raise ValueError(
            f"continuous batching (generate_batch) keeps pages of keys and values, read by full attention, which a "
            f"{type(self).__name__} does not have; pass a padded batch to generate"
        )


class HybridGenerationMixin(NoContinuousBatching, GenerationMixin):
    """Generation by layers that make their own masks and may keep states; goes before `PreTrainedModel`.

    Assisted decoding, prompt lookup included, takes back rejected tokens of a state by going back to a checkpoint and
    reading the accepted tokens after it again.
    """

    _is_stateful = False  # transformers would refuse assisted decoding

    @property
    def _keeps_state(self) -> bool:
        """Whether the cache keeps a state, not only keys and values."""
        layer_types = self.config.get_text_config(decoder=True).layer_types
        return not {"full_attention", "sliding_attention"}.issuperset(layer_types)

    def _valid_auto_compile_criteria(self, model_kwargs: dict, generation_config: GenerationConfig) -> bool:
        """Whether transformers compiles the decoding step: if the steps are alike and, with our states, on request.

        Its default records CUDA graphs, which overwrite what an earlier step returned, as new states are.
        """
        if not super()._valid_auto_compile_criteria(model_kwargs, generation_config):
            return False
        layers = decoder_cache(model_kwargs["past_key_values"]).layers
        asked = generation_config.compile_config is not None
        ours = any(getattr(layer, "_layer_type", None) in (LAYER_TYPE, SLIDING_LAYER_TYPE) for layer in layers)
        if asked and not self._can_compile_fullgraph:
            logger.warning_once(
                "compile_config is ignored: this model's decoding steps differ, so no graph serves them."
            )
        return self._can_compile_fullgraph and (asked or not ours)

    @staticmethod
    def create_masks_for_generate(attention_mask: torch.Tensor | None = None, **kwargs) -> torch.Tensor | None:
        """Return the attention mask as it is: the layers derive theirs from it."""
        return attention_mask

    @wraps(GenerationMixin.prepare_inputs_for_generation)
    def prepare_inputs_for_generation(
        self,
        input_ids: torch.Tensor,
        next_sequence_length: int | None = None,
        past_key_values: Cache | None = None,
        **kwargs,
    ) -> dict[str, Any]:
        """Prepare the inputs as every model; after a rollback they begin with the first token not in the cache."""
        cache = decoder_cache(past_key_values)
        if isinstance(cache, RollbackCache):
            accepted = 0 if next_sequence_length is None else input_ids.shape[1] - next_sequence_length
            apart = any(kwargs.get(name) for name in MORE_OUTPUTS)  # of the candidates alone
            if accepted - cache.get_seq_length() > (0 if apart else REREAD):
                self._read(input_ids[:, :accepted], past_key_values, kwargs)
            next_sequence_length = input_ids.shape[1] - cache.get_seq_length()
        return super().prepare_inputs_for_generation(
            input_ids, next_sequence_length=next_sequence_length, past_key_values=past_key_values, **kwargs
        )

    def _read(self, input_ids: torch.Tensor, past_key_values: Cache, model_kwargs: dict[str, Any]):
        """Read those of the tokens `(1, T)` that the cache does not have, and make this its checkpoint."""
        cache = decoder_cache(past_key_values)
        length = input_ids.shape[1]
        missing = length - cache.get_seq_length()
        if missing > 0:
            kwargs = {name: value for name, value in model_kwargs.items() if name not in MORE_OUTPUTS}
            name = "decoder_attention_mask" if self.config.is_encoder_decoder else "attention_mask"
            mask = kwargs.get(name)
            if mask is not None:
                kwargs[name] = torch.nn.functional.pad(mask, (0, max(0, length - mask.shape[1])), value=1)[:, :length]
            kwargs["past_key_values"] = past_key_values
            inputs = super().prepare_inputs_for_generation(input_ids, next_sequence_length=missing, **kwargs)
            self(**inputs, return_dict=True)
        cache.checkpoint()

    def _prepare_cache_for_generation(self, generation_config: GenerationConfig, model_kwargs: dict, *args):
        """Prepare the cache as every model; an assistant's is rolled back between its drafts."""
        super()._prepare_cache_for_generation(generation_config, model_kwargs, *args)
        if generation_config.is_assistant and self._keeps_state:
            model_kwargs["past_key_values"] = _with_rollback(model_kwargs["past_key_values"])

    def _prefill(self, input_ids: torch.Tensor, generation_config: GenerationConfig, model_kwargs: dict, **kwargs):
        """Read the prompt as every model; an assistant's is the accepted text."""
        past_key_values = model_kwargs.get("past_key_values")
        if isinstance(decoder_cache(past_key_values), RollbackCache):
            self._read(input_ids[:, :-1], past_key_values, model_kwargs)
        return super()._prefill(input_ids, generation_config, model_kwargs, **kwargs)

    @wraps(GenerationMixin._assisted_decoding)
    def _assisted_decoding(self, input_ids: torch.Tensor, **kwargs):
        """Decode as every model; a cache that keeps states is rolled back to checkpoints meanwhile."""
        original = kwargs.get("past_key_values")
        if original is None or not self._keeps_state:
            return super()._assisted_decoding(input_ids, **kwargs)
        if not input_ids.shape[1]:
            raise ValueError("input_ids must be given: assisted decoding reads tokens again; got inputs_embeds alone")
        if original.get_seq_length() >= input_ids.shape[1]:
            raise ValueError(
                f"input_ids must be the whole sequence, longer than the {original.get_seq_length()} tokens in "
                f"past_key_values; got {input_ids.shape[1]} tokens"
            )
        cache = kwargs["past_key_values"] = _with_rollback(original)
        parameters = inspect.signature(GenerationMixin._assisted_decoding).parameters
        model_kwargs = {name: value for name, value in kwargs.items() if name not in parameters}
        if not any(kwargs.get(name) for name in MORE_OUTPUTS):
            self._read(input_ids[:, :-1], cache, model_kwargs)
        result = super()._assisted_decoding(input_ids, **kwargs)
        is_returned = not isinstance(result, torch.Tensor)
        if is_returned or getattr(original, "_is_user_defined", False):  # it ends as after every other way of decoding
            sequences = result.sequences if is_returned else result
            self._read(sequences[:, :-1], cache, model_kwargs)
        if is_returned:
            result.past_key_values = original
        return result
