"""SPADE's base class and its stack: embedding, layers and final norm (Zuo et al. 2022).

Shapes: B batch · T length of the stack's input · S source length · P tokens already cached · D width.
"""

import os
from typing import Self

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, DynamicCache, EncoderDecoderCache
from transformers.modeling_outputs import BaseModelOutput, BaseModelOutputWithPastAndCrossAttentions
from transformers.processing_utils import Unpack
from transformers.utils import TransformersKwargs
from transformers.utils.generic import merge_with_config_defaults
from transformers.utils.output_capturing import OutputRecorder, capture_outputs

from ...context_parallel import Shards, own_positions
from ...kernels.packed import longest
from ...layers.dropout import Dropout
from ...layers.norms import apply_norm, make_norm
from ..checkpointing import CheckpointingMixin
from ..checks import check_fixed_length
from ..description import ModelCardMixin
from ..heads import StateSpaceModelMixin
from ..inputs import RealValuesMixin
from ..local_attention import LocalSelfAttention, init_shared, make_bias_table
from ..masks import additive_mask, kept_pairs, mask_so_far, without_padding
from ..packing import row_starts, take_bounds, take_shards
from .configuration_spade import SpadeConfig
from .conversion_spade import start_from_t5
from .layer import SpadeCrossAttention, SpadeLayer


class SpadePreTrainedModel(ModelCardMixin, CheckpointingMixin, StateSpaceModelMixin, RealValuesMixin, PreTrainedModel):
    """Base class of all SPADE models."""

    config: SpadeConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _supports_context_parallel = False
    _no_split_modules = ["SpadeLayer"]
    _skip_keys_device_placement = ["past_key_values", "bias_table"]  # a shared table stays on its device
    _keep_in_fp32_modules_strict = ["ssm"]
    _supports_sdpa = True
    _can_record_outputs = {
        "hidden_states": SpadeLayer,
        "attentions": OutputRecorder(LocalSelfAttention, index=1),
        "cross_attentions": OutputRecorder(SpadeCrossAttention, index=1),
    }

    @property
    def _can_compile_fullgraph(self) -> bool:
        """Whether one graph serves a forward, and a decoding step with a static cache; dynamo knows no LSTM."""
        return self.config.ssm_type != "lstm"

    @torch.no_grad()
    def _init_weights(self, module: nn.Module):
        super()._init_weights(module)
        init_shared(module, self.config)

    @classmethod
    def from_t5(cls, name_or_model: str | os.PathLike | PreTrainedModel, **options) -> Self:
        """Start from T5, mT5, UMT5, or LongT5 with local attention: take its weights, add a state space model.

        The encoder's attention becomes local and the decoder stays as it is. The state space model of the global
        layers enters through a projection that is zero at first (`combine_mode="residual"`). So the new model computes
        the outputs of its source at first, for inputs of at most ``local_radius + 1`` tokens; with LongT5, whose
        `local_radius` is used, for any length. New weights are drawn from the current seed.

        Args:
            name_or_model: Name on the Hub, folder, or loaded model of transformers. A loaded model is not changed and
                shares no memory with the new one. An encoder takes the encoder of an encoder-decoder.
            **options: Options of `from_pretrained`: `dtype` (default: the source's), `attn_implementation`,
                `device_map`, and for a name `revision`, `token`, `subfolder`, `variant`, `use_safetensors`,
                `cache_dir`, `force_download`, `local_files_only`. All others are fields of `SpadeConfig`, except
                those that the source fixes, such as `hidden_size`. With another `combine_mode` the outputs differ from
                the source's.

        Returns:
            The model in evaluation mode, with the token ids and the generation config, if any, of the source.

        Raises:
            ValueError: The source is of another kind, has a weight that SPADE lacks or lacks one that SPADE needs; or
                an option is unknown or contradicts the source.
            huggingface_hub.errors.StrictDataclassError: A field of the config breaks its rule.
        """
        return start_from_t5(cls, name_or_model, **options)


class SpadeStack(SpadePreTrainedModel):
    """Embedding, layers and final norm of an encoder, a language model or a decoder.

    Args:
        config: Config of the stack, from `SpadeConfig.get_text_config`.
    """

    # embedding and head may share tables, so they stay in the model's own group
    _fsdp_plan = {"layers.*": "free_full_weight"}
    # every GPU computes all heads, since tables of biases are not split, and all state space models
    _tp_plan = {
        "layers.*.mixer.attention.q_proj": "colwise_gather_output",
        "layers.*.mixer.attention.k_proj": "colwise_gather_output",
        "layers.*.mixer.attention.v_proj": "colwise_gather_output",
        "layers.*.mixer.attention.o_proj": "rowwise_split_input",
        "layers.*.feed_forward.up_proj": "colwise",
        "layers.*.feed_forward.down_proj": "rowwise",
    }

    def __init__(self, config: SpadeConfig):
        super().__init__(config)
        reads_embeddings = config.is_decoder and config.is_encoder_decoder  # from the encoder's table
        self.embed_tokens = self.input_proj = None
        if not reads_embeddings:
            self.add_input_embedding()
        absolute = config.is_decoder and config.decoder_position == "learned_absolute"
        self.embed_positions = None
        if absolute:
            self.embed_positions = nn.Embedding(config.max_decoder_position_embeddings, config.hidden_size)
            # as large as the token embeddings
            scale = config.hidden_size**0.5 if config.scale_embeddings else 1.0
            self.embed_positions.init_std = scale * config.initializer_range
        self.embedding_norm = None
        if config.embedding_norm:
            self.embedding_norm = make_norm(config.norm_type, config.hidden_size, config.layer_norm_eps)
        biased = config.attention_type != "none" and not absolute
        shared = biased and config.share_relative_bias
        self.relative_attention_bias = make_bias_table(config) if shared else None
        self.layers = nn.ModuleList(
            SpadeLayer(config, layer_idx, has_bias_table=biased and not shared, has_cross_attention=reads_embeddings)
            for layer_idx in range(config.num_hidden_layers)
        )
        self.final_norm = None
        if config.final_norm:
            self.final_norm = make_norm(config.norm_type, config.hidden_size, config.layer_norm_eps)
        self.dropout = Dropout(config.dropout)
        self.output_scale = 1.0
        self.gradient_checkpointing = False
        self.post_init()

    @merge_with_config_defaults
    @capture_outputs
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        encoder_hidden_states: torch.Tensor | None = None,
        encoder_attention_mask: torch.Tensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        past_key_values: Cache | None = None,
        use_cache: bool | None = None,
        input_values: torch.Tensor | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> BaseModelOutput | BaseModelOutputWithPastAndCrossAttentions:
        """Run the stack on tokens, embeddings or, with `config.input_size`, real values.

        `input_values` is `(B, T)` or `(B, T, config.input_size)`, and `encoder_hidden_states` is `(B, S, D)`; of a
        divided document it is own tokens, and `source_shards` the layout.
        """
        inputs_embeds = self.embed_tokens_or_values(input_ids, inputs_embeds, input_values)
        check_fixed_length("input_ids", inputs_embeds)
        if not self.config.is_decoder:
            past_key_values = None
        shards = take_shards(kwargs, inputs_embeds, attention_mask, past_key_values)
        cu_seqlens = None if shards else take_bounds(kwargs, inputs_embeds, attention_mask, past_key_values)
        if self.config.is_decoder and use_cache and past_key_values is None and cu_seqlens is None and shards is None:
            past_key_values = DynamicCache(config=self.config)
        attention_mask = mask_so_far(attention_mask, inputs_embeds, past_key_values)
        if self.config.is_encoder_decoder and not isinstance(past_key_values, EncoderDecoderCache | None):
            past_key_values = EncoderDecoderCache(past_key_values, DynamicCache())

        hidden_states = inputs_embeds
        if self.embed_positions is not None:
            hidden_states = self._add_positions(hidden_states, past_key_values, attention_mask, cu_seqlens, shards)
        if self.embedding_norm is not None:
            hidden_states = apply_norm(self.embedding_norm, hidden_states, attention_mask, shards)
        hidden_states = self.dropout(hidden_states)

        if encoder_attention_mask is not None and kwargs.get("source_shards") is None:
            masked = (encoder_attention_mask, hidden_states, encoder_hidden_states)
            encoder_attention_mask = self._cross_attention_mask(*masked)
        for layer in self.layers[: self.config.num_hidden_layers]:  # fewer for an early exit in generation
            hidden_states = layer(
                hidden_states,
                encoder_hidden_states,
                bias_table=self.relative_attention_bias,
                attention_mask=attention_mask,
                encoder_attention_mask=encoder_attention_mask,
                past_key_values=past_key_values,
                cu_seqlens=cu_seqlens,
                shards=shards,
                **kwargs,
            )
        if self.final_norm is not None:
            hidden_states = self.dropout(apply_norm(self.final_norm, hidden_states, attention_mask, shards))
        if self.output_scale != 1:
            hidden_states = hidden_states * self.output_scale
        if not self.config.is_decoder:
            return BaseModelOutput(last_hidden_state=hidden_states)
        return BaseModelOutputWithPastAndCrossAttentions(
            last_hidden_state=hidden_states, past_key_values=past_key_values
        )

    @staticmethod
    def _cross_attention_mask(
        attention_mask: torch.Tensor, hidden_states: torch.Tensor, source: torch.Tensor | None
    ) -> torch.Tensor | None:
        """Return the additive mask of cross-attention, `(B, 1, 1 or T, S)`; None for a token that sees all."""
        shape = None if source is None else tuple(source.shape[:2])
        if shape is not None and attention_mask.dim() == 2 and attention_mask.shape != shape:
            raise ValueError(
                f"attention_mask must be of shape (batch, length) = {shape}, like the encoder's output; "
                f"got {tuple(attention_mask.shape)}"
            )
        if hidden_states.shape[1] == 1 and without_padding(attention_mask) is None:
            return None
        kept = kept_pairs(attention_mask)
        if kept.shape[2] not in (1, hidden_states.shape[1]):
            raise ValueError(
                f"attention_mask must be of shape (batch, length) or (batch, 1, 1, length) for a model with a "
                f"decoder, which uses it in cross-attention too; got {tuple(attention_mask.shape)}"
            )
        return additive_mask(kept, None, hidden_states.dtype, hidden_states.device)

    def _add_positions(
        self,
        hidden_states: torch.Tensor,
        past_key_values: Cache | None,
        attention_mask: torch.Tensor | None,
        cu_seqlens: torch.Tensor | None,
        shards: Shards | None,
    ) -> torch.Tensor:
        """Add absolute position embeddings to `(B, T, D)`, counted from each sequence's first kept token."""
        past = 0 if past_key_values is None else past_key_values.get_seq_length()
        length = longest(hidden_states, cu_seqlens) if shards is None else shards.longest
        traced = torch.compiler.is_exporting() and isinstance(past, torch.Tensor)  # then nobody knows its value
        if not traced and past + length > self.config.max_decoder_position_embeddings:
            raise ValueError(
                f"decoder inputs must hold at most max_decoder_position_embeddings "
                f"{self.config.max_decoder_position_embeddings} tokens, cached ones included; got {past + length}: "
                f"use decoder_position='relative' for longer outputs"
            )
        if shards is not None:
            positions = own_positions(shards, attention_mask, self.embed_positions.weight.device)
        elif attention_mask is not None and attention_mask.dim() == 2:
            positions = (attention_mask.long().cumsum(-1) - 1).clamp_min(0)[:, -length:]
        else:
            positions = torch.arange(hidden_states.shape[1], device=self.embed_positions.weight.device)[None] + past
            if cu_seqlens is not None:
                positions = positions - row_starts(cu_seqlens, hidden_states.shape[:2])
        return hidden_states + self.embed_positions(positions)
