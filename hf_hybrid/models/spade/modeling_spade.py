"""SPADE: a state space model in the bottom layer, local attention in all layers (Zuo et al. 2022).

Shapes: B batch · T length of the stack's input · S source length · P tokens already cached · D width · H heads ·
K head width · N state size · R local radius.
"""

import copy
import os
from collections.abc import Iterator
from typing import Self

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.activations import ACT2FN
from transformers.cache_utils import Cache, DynamicCache, EncoderDecoderCache, StaticCache
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import (
    BaseModelOutput,
    BaseModelOutputWithPastAndCrossAttentions,
    Seq2SeqLMOutput,
    Seq2SeqModelOutput,
)
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.processing_utils import Unpack
from transformers.utils import TransformersKwargs, logging
from transformers.utils.generic import can_return_tuple, merge_with_config_defaults
from transformers.utils.output_capturing import OutputRecorder, capture_outputs

from ...layers.feed_forward import FeedForward
from ...layers.hyena import Hyena
from ...layers.lstm import LSTM
from ...layers.norms import make_norm
from ...layers.relative_position import RelativePositionBias
from ...layers.s4 import S4
from ...layers.s4d import S4D
from ...layers.s5 import S5
from ...layers.state_space import StateSpaceLayer, ssm_parameters
from ..checks import check_not_empty
from ..description import ModelCardMixin
from ..heads import (
    CausalLMForward,
    MaskedLMForward,
    QuestionAnsweringForward,
    SequenceClassificationForward,
    TokenClassificationForward,
    make_embedding,
    make_lm_head,
)
from ..local_attention import (
    LocalSelfAttention,
    additive_mask,
    eager_attention_forward,
    init_shared,
    kept_pairs,
    make_bias_table,
)
from ..state_cache import StatefulGenerationMixin
from .configuration_spade import SpadeConfig
from .conversion_spade import start_from_t5

logger = logging.get_logger(__name__)


class SpadeCrossAttention(nn.Module):
    """Full attention of the decoder to the encoder's output.

    Args:
        config: The decoder's config.
        layer_idx: Index of the layer, for the cache.
    """

    def __init__(self, config: SpadeConfig, layer_idx: int):
        super().__init__()
        self.config = config
        self.layer_idx = layer_idx
        self.is_causal = False
        self.scaling = config.head_dim**-0.5 if config.scale_attention else 1.0
        inner_size = config.num_attention_heads * config.head_dim
        self.q_proj = nn.Linear(config.hidden_size, inner_size, bias=config.attention_bias)
        self.k_proj = nn.Linear(config.hidden_size, inner_size, bias=config.attention_bias)
        self.v_proj = nn.Linear(config.hidden_size, inner_size, bias=config.attention_bias)
        self.o_proj = nn.Linear(inner_size, config.hidden_size, bias=config.attention_bias)
        if not config.scale_attention:
            # scores start at the size scaled ones would have
            self.q_proj.init_std = config.initializer_range * config.head_dim**-0.5

    def forward(
        self,
        hidden_states: torch.Tensor,
        encoder_hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        past_key_values: EncoderDecoderCache | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Attend.

        Args:
            hidden_states: `(B, T, D)`.
            encoder_hidden_states: `(B, S, D)`.
            attention_mask: Added to the scores, broadcastable to `(B, H, T, S)`.
            past_key_values: Cache; keys and values of the encoder's output are computed once and kept there.
            **kwargs: Passed on to the attention function.

        Returns:
            Output `(B, T, D)`, and probabilities `(B, H, T, S)` where the attention function gives them.
        """
        batch, length, _ = hidden_states.shape
        heads = (batch, -1, self.config.num_attention_heads, self.config.head_dim)
        query = self.q_proj(hidden_states).view(heads).transpose(1, 2)
        if past_key_values is not None and past_key_values.is_updated.get(self.layer_idx):
            layer = past_key_values.cross_attention_cache.layers[self.layer_idx]
            key, value = layer.keys, layer.values
        else:
            key = self.k_proj(encoder_hidden_states).view(heads).transpose(1, 2)
            value = self.v_proj(encoder_hidden_states).view(heads).transpose(1, 2)
            if past_key_values is not None:
                key, value = past_key_values.cross_attention_cache.update(key, value, self.layer_idx)
                past_key_values.is_updated[self.layer_idx] = True
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager_attention_forward)
        output, probabilities = attend(
            self,
            query,
            key,
            value,
            attention_mask,
            dropout=self.config.attention_dropout if self.training else 0.0,
            scaling=self.scaling,
            is_causal=False,
            **kwargs,
        )
        return self.o_proj(output.reshape(batch, length, -1)), probabilities


class SpadeTokenMixer(nn.Module):
    """What mixes tokens within a stack's layer: local attention, a state space model, or in a global layer both.

    In a global layer, with local attention ``l`` and state space model ``g`` of the same input x (SPADE, section 3.2):
    concat ``W [LN(l(x)), LN(g(x))] + b``, add ``(1 - α) LN(l(x)) + α LN(g(x))``, stack ``l(g(x))``,
    residual ``l(x) + W LN(g(x))`` with W zero at first.

    Args:
        config: The stack's config.
        layer_idx: Index of the layer.
        has_bias_table: Whether the layer has its own table of relative position biases.
    """

    def __init__(self, config: SpadeConfig, layer_idx: int, *, has_bias_table: bool):
        super().__init__()
        self.config = config
        self.layer_idx = layer_idx
        self.attention = None
        if config.attention_type != "none":
            self.attention = LocalSelfAttention(config, layer_idx, has_bias_table=has_bias_table)
        self.ssm = None
        if layer_idx not in config.global_layers:
            return
        self.ssm = make_state_space(config)
        if self.attention is None:
            return
        if config.combine_mode in ("concat", "add"):
            self.local_norm = make_norm(config.norm_type, config.hidden_size, config.layer_norm_eps)
        if config.combine_mode != "stack":
            self.global_norm = make_norm(config.norm_type, config.hidden_size, config.layer_norm_eps)
        if config.combine_mode == "concat":
            self.aggregate = nn.Linear(2 * config.hidden_size, config.hidden_size)
            # that of torch's own draw, which the published code leaves: both branches are normalised, and what they
            # add begins smaller than what it is added to
            self.aggregate.init_std = (6 * config.hidden_size) ** -0.5
        if config.combine_mode == "residual":
            self.global_proj = nn.Linear(config.hidden_size, config.hidden_size, bias=False)
            self.global_proj.init_std = 0  # the layer starts as its local attention

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None,
        past_key_values: Cache | None,
        *,
        bias_table: RelativePositionBias | None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> torch.Tensor:
        """Mix the tokens of `(B, T, D)`; the arguments are those of `LocalSelfAttention`."""
        attend = {
            "bias_table": bias_table,
            "attention_mask": attention_mask,
            "past_key_values": past_key_values,
            **kwargs,
        }
        if self.ssm is None:
            return self.attention(hidden_states, **attend)[0]
        global_states = self._state_space(hidden_states, attention_mask, past_key_values)
        if self.attention is None:
            return global_states
        if self.config.combine_mode == "stack":
            return self.attention(global_states, **attend)[0]
        local_states = self.attention(hidden_states, **attend)[0]
        global_states = self.global_norm(global_states)
        if self.config.combine_mode == "residual":
            return local_states + self.global_proj(global_states)
        local_states = self.local_norm(local_states)
        if self.config.combine_mode == "add":
            # not torch.lerp, which refuses the mixed precisions of autocast
            return local_states + self.config.combine_alpha * (global_states - local_states)
        branches = (local_states, global_states)
        if self.config.concat_order == "global_local":
            branches = branches[::-1]
        return self.aggregate(torch.cat(branches, dim=-1))

    def _state_space(
        self, hidden_states: torch.Tensor, attention_mask: torch.Tensor | None, past_key_values: Cache | None
    ) -> torch.Tensor:
        """Run the state space model, from and to the state in the cache when there is one."""
        if self.config.ssm_stop_gradient:
            hidden_states = hidden_states.detach()
        if attention_mask is not None:
            if attention_mask.dim() != 2:
                raise ValueError(
                    f"attention_mask must be of shape (batch, length) for a layer with a state space model; "
                    f"got {tuple(attention_mask.shape)}"
                )
            attention_mask = attention_mask[:, -hidden_states.shape[1] :]
        if past_key_values is None:
            return self.ssm(hidden_states, attention_mask)
        layer = past_key_values.layers[self.layer_idx] if self.layer_idx < len(past_key_values.layers) else None
        if not hasattr(layer, "recurrent_states"):
            raise ValueError(
                "past_key_values must be able to keep a state, as DynamicCache(config=model.config) is; got one whose "
                f"layer {self.layer_idx} is {type(layer).__name__}"
            )
        state = layer.recurrent_states[0] if layer.has_previous_state[0] else None
        output, state = self.ssm(hidden_states, attention_mask, state=state, return_state=True)
        layer.update_recurrent_state(state)
        layer.has_previous_state[0] = True
        if self.attention is None:
            # keys without width, by which the cache still counts its tokens
            nothing = output.new_empty(output.shape[0], 1, output.shape[1], 0)
            layer.update(nothing, nothing)
        return output


class SpadeLayer(GradientCheckpointingLayer):
    """One layer: token mixing, in a decoder cross-attention, and a feed-forward network, each with a residual.

    Post-norm ``x <- LN(x + sublayer(x))``, pre-norm ``x <- x + sublayer(LN(x))``.

    Args:
        config: The stack's config.
        layer_idx: Index of the layer.
        has_bias_table: Whether the layer has its own table of relative position biases.
        has_cross_attention: Whether the layer attends to an encoder's output.
    """

    def __init__(self, config: SpadeConfig, layer_idx: int, *, has_bias_table: bool, has_cross_attention: bool):
        super().__init__()
        self.pre_norm = config.norm_position == "pre"
        self.mixer = SpadeTokenMixer(config, layer_idx, has_bias_table=has_bias_table)
        self.mixer_norm = make_norm(config.norm_type, config.hidden_size, config.layer_norm_eps)
        self.cross_attention = None
        if has_cross_attention:
            self.cross_attention = SpadeCrossAttention(config, layer_idx)
            self.cross_attention_norm = make_norm(config.norm_type, config.hidden_size, config.layer_norm_eps)
        self.feed_forward = FeedForward(
            config.hidden_size,
            config.intermediate_size,
            ACT2FN[config.hidden_act],
            gated=config.gated_feed_forward,
            bias=config.feed_forward_bias,
            dropout=config.activation_dropout,
        )
        self.feed_forward_norm = make_norm(config.norm_type, config.hidden_size, config.layer_norm_eps)
        self.dropout = nn.Dropout(config.dropout)

    def forward(
        self,
        hidden_states: torch.Tensor,
        encoder_hidden_states: torch.Tensor | None = None,
        bias_table: RelativePositionBias | None = None,
        attention_mask: torch.Tensor | None = None,
        encoder_attention_mask: torch.Tensor | None = None,
        past_key_values: Cache | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> torch.Tensor:
        """Map `(B, T, D)` to `(B, T, D)`; `encoder_hidden_states` is `(B, S, D)`."""
        self_cache = past_key_values
        if isinstance(past_key_values, EncoderDecoderCache):
            self_cache = past_key_values.self_attention_cache
        mixed = self.mixer(
            self.mixer_norm(hidden_states) if self.pre_norm else hidden_states,
            attention_mask,
            self_cache,
            bias_table=bias_table,
            **kwargs,
        )
        hidden_states = self._add(hidden_states, mixed, self.mixer_norm)
        if self.cross_attention is not None and encoder_hidden_states is not None:
            attended, _ = self.cross_attention(
                self.cross_attention_norm(hidden_states) if self.pre_norm else hidden_states,
                encoder_hidden_states,
                attention_mask=encoder_attention_mask,
                past_key_values=past_key_values,
                **kwargs,
            )
            hidden_states = self._add(hidden_states, attended, self.cross_attention_norm)
        transformed = self.feed_forward(self.feed_forward_norm(hidden_states) if self.pre_norm else hidden_states)
        return self._add(hidden_states, transformed, self.feed_forward_norm)

    def _add(self, residual: torch.Tensor, update: torch.Tensor, norm: nn.Module) -> torch.Tensor:
        total = residual + self.dropout(update)
        return total if self.pre_norm else norm(total)


class SpadePreTrainedModel(ModelCardMixin, PreTrainedModel):
    """Base of all SPADE models: initialisation and what transformers wants to know about them."""

    config: SpadeConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["SpadeLayer"]
    _skip_keys_device_placement = ["past_key_values", "bias_table"]  # a table that layers share stays where it is
    _keep_in_fp32_modules_strict = ["ssm"]
    _supports_sdpa = True
    _can_record_outputs = {
        "hidden_states": SpadeLayer,
        "attentions": OutputRecorder(LocalSelfAttention, index=1),
        "cross_attentions": OutputRecorder(SpadeCrossAttention, index=1),
    }

    @torch.no_grad()
    def _init_weights(self, module: nn.Module):
        super()._init_weights(module)
        init_shared(module, self.config)

    @staticmethod
    def create_masks_for_generate(attention_mask: torch.Tensor | None = None, **kwargs) -> torch.Tensor | None:
        """Leave the padding mask as it is: each layer makes its own."""
        return attention_mask

    @classmethod
    def from_t5(cls, name_or_model: str | os.PathLike | PreTrainedModel, **options) -> Self:
        """Start from T5, mT5, UMT5, or LongT5 with local attention: its weights, with SPADE's attention and S4 added.

        The encoder's attention becomes local, the state space model of the global layers enters through a projection
        that is zero at first (`combine_mode="residual"`), and the decoder stays as it is. Where no input is longer
        than ``local_radius + 1``, the model therefore computes at first what its source does. With LongT5, whose
        reach `local_radius` takes over, it does so at any length. New weights are drawn from the current seed.

        Args:
            name_or_model: Name on the Hub, folder, or loaded model of transformers. A loaded model is left alone and
                shares no memory with the new one. An encoder takes the encoder of an encoder-decoder.
            **options: Of `from_pretrained`: `dtype` (that of the source by default), `attn_implementation`,
                `device_map`, and for a name `revision`, `token`, `subfolder`, `variant`, `use_safetensors`,
                `cache_dir`, `force_download`, `local_files_only`. All others are fields of `SpadeConfig`, except
                those that the source fixes, such as `hidden_size`. Another `combine_mode` gives up the start at the
                source's outputs.

        Returns:
            The model, in evaluation mode, with the source's token ids and, where it has one, generation config.

        Raises:
            ValueError: The source is of another kind, SPADE has no place for one of its weights or it lacks one that
                SPADE needs, or an option is unknown or contradicts it.
            huggingface_hub.errors.StrictDataclassError: A field of the config breaks its rule.
        """
        return start_from_t5(cls, name_or_model, **options)

    def ssm_parameters(self, *, dynamics: bool | None = None) -> Iterator[nn.Parameter]:
        """Yield the state space models' trained tensors, which want no weight decay; see `layers.state_space`."""
        return ssm_parameters(self, dynamics=dynamics)


class SpadeStack(SpadePreTrainedModel):
    """Embedding, layers and final norm: an encoder, a language model, or a decoder, which is given embeddings.

    Args:
        config: The stack's view of the config (`SpadeConfig.get_text_config`).
    """

    # embedding and head, which may share tables, stay in the model's own group
    _fsdp_plan = {"layers.*": "free_full_weight"}

    def __init__(self, config: SpadeConfig):
        super().__init__(config)
        reads_embeddings = config.is_decoder and config.is_encoder_decoder  # of the encoder's table
        self.embed_tokens = None
        if not reads_embeddings:
            self.embed_tokens = make_embedding(config)
        absolute = config.is_decoder and config.decoder_position == "learned_absolute"
        self.embed_positions = None
        if absolute:
            self.embed_positions = nn.Embedding(config.max_decoder_position_embeddings, config.hidden_size)
            # as large as the embeddings that they are added to
            scale = config.hidden_size**0.5 if config.scale_embeddings else 1.0
            self.embed_positions.init_std = scale * config.initializer_range
        self.embedding_norm = None
        if config.embedding_norm:
            self.embedding_norm = make_norm(config.norm_type, config.hidden_size, config.layer_norm_eps)
        biased = config.attention_type != "none" and not absolute
        shared = biased and config.share_relative_bias
        self.relative_attention_bias = make_bias_table(config) if shared else None
        self.layers = nn.ModuleList(
            SpadeLayer(
                config,
                layer_idx,
                has_bias_table=biased and not shared,
                has_cross_attention=reads_embeddings,
            )
            for layer_idx in range(config.num_hidden_layers)
        )
        self.final_norm = None
        if config.final_norm:
            self.final_norm = make_norm(config.norm_type, config.hidden_size, config.layer_norm_eps)
        self.dropout = nn.Dropout(config.dropout)
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
        **kwargs: Unpack[TransformersKwargs],
    ) -> BaseModelOutput | BaseModelOutputWithPastAndCrossAttentions:
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("exactly one of input_ids and inputs_embeds must be given")
        if inputs_embeds is None:
            inputs_embeds = self.embed_tokens(input_ids)
        check_not_empty("input_ids", inputs_embeds)
        if not self.config.is_decoder:
            past_key_values = None
        elif use_cache and past_key_values is None:
            past_key_values = DynamicCache(config=self.config)
        has_cross_attention = self.config.is_decoder and self.config.is_encoder_decoder
        if (
            has_cross_attention
            and past_key_values is not None
            and not isinstance(past_key_values, EncoderDecoderCache)
        ):
            past_key_values = EncoderDecoderCache(past_key_values, DynamicCache())

        hidden_states = inputs_embeds
        if self.embed_positions is not None:
            past = past_key_values.get_seq_length() if past_key_values is not None else 0
            hidden_states = hidden_states + self._positions(inputs_embeds.shape[1], past, attention_mask)
        if self.embedding_norm is not None:
            hidden_states = self.embedding_norm(hidden_states)
        hidden_states = self.dropout(hidden_states)

        if encoder_attention_mask is not None:
            kept = kept_pairs(encoder_attention_mask)
            if kept.shape[2] not in (1, hidden_states.shape[1]):
                raise ValueError(
                    f"attention_mask must be of shape (batch, length) or (batch, 1, 1, length) for a model with a "
                    f"decoder, which uses it in cross-attention too; got {tuple(encoder_attention_mask.shape)}"
                )
            encoder_attention_mask = additive_mask(kept, None, hidden_states.dtype, hidden_states.device)
        for layer in self.layers[: self.config.num_hidden_layers]:  # fewer where generation asks for an early exit
            hidden_states = layer(
                hidden_states,
                encoder_hidden_states,
                bias_table=self.relative_attention_bias,
                attention_mask=attention_mask,
                encoder_attention_mask=encoder_attention_mask,
                past_key_values=past_key_values,
                **kwargs,
            )
        if self.final_norm is not None:
            hidden_states = self.dropout(self.final_norm(hidden_states))
        if not self.config.is_decoder:
            return BaseModelOutput(last_hidden_state=hidden_states)
        return BaseModelOutputWithPastAndCrossAttentions(
            last_hidden_state=hidden_states, past_key_values=past_key_values
        )

    def _positions(self, length: int, past: int, attention_mask: torch.Tensor | None) -> torch.Tensor:
        """Absolute position embeddings `(B or 1, T, D)`, counted from each row's first kept token."""
        if past + length > self.config.max_decoder_position_embeddings:
            raise ValueError(
                f"the decoder reads {past + length} tokens, more than max_decoder_position_embeddings "
                f"{self.config.max_decoder_position_embeddings}; use decoder_position='relative' for longer outputs"
            )
        if attention_mask is not None and attention_mask.dim() == 2:
            positions = (attention_mask.long().cumsum(-1) - 1).clamp_min(0)[:, -length:]
        else:
            positions = torch.arange(past, past + length, device=self.embed_positions.weight.device)[None]
        return self.embed_positions(positions)


class SpadeModel(SpadePreTrainedModel):
    """SPADE encoder-decoder without a head (SPADE, section 5.1).

    Args:
        config: The config; `get_text_config` gives each stack its view of it.
    """

    def __init__(self, config: SpadeConfig):
        super().__init__(config)
        config.validate()  # from_pretrained may have set fields without checking them
        if not config.is_encoder_decoder:
            other = "SpadeForCausalLM" if config.is_decoder else "SpadeEncoderModel"
            raise ValueError(
                f"is_encoder_decoder must be True for SpadeModel; got {config.is_encoder_decoder}: use {other}"
            )
        self.encoder = SpadeStack(config.get_text_config(encoder=True))
        self.decoder = SpadeStack(config.get_text_config(decoder=True))
        self.post_init()

    def get_input_embeddings(self) -> nn.Embedding:
        return self.encoder.embed_tokens

    def set_input_embeddings(self, value: nn.Embedding):
        self.encoder.embed_tokens = value

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        decoder_input_ids: torch.LongTensor | None = None,
        decoder_attention_mask: torch.Tensor | None = None,
        encoder_outputs: BaseModelOutput | tuple[torch.Tensor] | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: torch.Tensor | None = None,
        decoder_inputs_embeds: torch.Tensor | None = None,
        use_cache: bool | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> Seq2SeqModelOutput:
        if encoder_outputs is None:
            encoder_outputs = self.encoder(
                input_ids=input_ids,
                attention_mask=attention_mask,
                inputs_embeds=inputs_embeds,
                return_dict=True,
                **kwargs,
            )
        elif isinstance(encoder_outputs, tuple | list):
            names = ("last_hidden_state", "hidden_states", "attentions")
            encoder_outputs = BaseModelOutput(**dict(zip(names, encoder_outputs, strict=False)))
        if (decoder_input_ids is None) == (decoder_inputs_embeds is None):
            raise ValueError("exactly one of decoder_input_ids and decoder_inputs_embeds must be given")
        if decoder_inputs_embeds is None:
            decoder_inputs_embeds = self.encoder.embed_tokens(decoder_input_ids)
        decoder_outputs = self.decoder(
            attention_mask=decoder_attention_mask,
            inputs_embeds=decoder_inputs_embeds,
            encoder_hidden_states=encoder_outputs.last_hidden_state,
            encoder_attention_mask=attention_mask,
            past_key_values=past_key_values,
            use_cache=use_cache,
            return_dict=True,
            **kwargs,
        )
        return Seq2SeqModelOutput(
            last_hidden_state=decoder_outputs.last_hidden_state,
            past_key_values=decoder_outputs.past_key_values,
            decoder_hidden_states=decoder_outputs.hidden_states,
            decoder_attentions=decoder_outputs.attentions,
            cross_attentions=decoder_outputs.cross_attentions,
            encoder_last_hidden_state=encoder_outputs.last_hidden_state,
            encoder_hidden_states=encoder_outputs.hidden_states,
            encoder_attentions=encoder_outputs.attentions,
        )


class SpadeGenerationMixin(StatefulGenerationMixin):
    """Decoding of a model whose global layers, if it has any, keep a state."""

    @property
    def _is_stateful(self) -> bool:
        return bool(self.config.get_text_config(decoder=True).global_layers)


class SpadeForConditionalGeneration(SpadeGenerationMixin, SpadePreTrainedModel):
    """SPADE encoder-decoder with a language modelling head, for summarization and other text-to-text tasks.

    Args:
        config: The config.
    """

    _tied_weights_keys = {"lm_head.weight": "model.encoder.embed_tokens.weight"}

    def __init__(self, config: SpadeConfig):
        super().__init__(config)
        self.model = SpadeModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        decoder_input_ids: torch.LongTensor | None = None,
        decoder_attention_mask: torch.Tensor | None = None,
        encoder_outputs: BaseModelOutput | tuple[torch.Tensor] | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: torch.Tensor | None = None,
        decoder_inputs_embeds: torch.Tensor | None = None,
        labels: torch.LongTensor | None = None,
        use_cache: bool | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> Seq2SeqLMOutput:
        num_items_in_batch = kwargs.pop("num_items_in_batch", None)
        if labels is not None:
            if decoder_input_ids is None and decoder_inputs_embeds is None:
                decoder_input_ids = self.prepare_decoder_input_ids_from_labels(labels)
            use_cache = False if use_cache is None else use_cache
        outputs = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            decoder_input_ids=decoder_input_ids,
            decoder_attention_mask=decoder_attention_mask,
            encoder_outputs=encoder_outputs,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            decoder_inputs_embeds=decoder_inputs_embeds,
            use_cache=use_cache,
            return_dict=True,
            **kwargs,
        )
        logits = self.lm_head(scale_head_inputs(self.config, outputs.last_hidden_state))
        loss = None
        if labels is not None:
            loss = self.loss_function(
                logits=logits,
                labels=labels,
                vocab_size=self.config.vocab_size,
                shift_labels=labels,  # the decoder's inputs are shifted already
                num_items_in_batch=num_items_in_batch,
            )
        return Seq2SeqLMOutput(
            loss=loss,
            logits=logits,
            past_key_values=outputs.past_key_values,
            decoder_hidden_states=outputs.decoder_hidden_states,
            decoder_attentions=outputs.decoder_attentions,
            cross_attentions=outputs.cross_attentions,
            encoder_last_hidden_state=outputs.encoder_last_hidden_state,
            encoder_hidden_states=outputs.encoder_hidden_states,
            encoder_attentions=outputs.encoder_attentions,
        )

    def prepare_decoder_input_ids_from_labels(self, labels: torch.LongTensor) -> torch.LongTensor:
        """Shift labels `(B, T)` right behind the start token; ignored positions (-100) become padding."""
        for field in ("decoder_start_token_id", "pad_token_id"):
            if getattr(self.config, field) is None:
                raise ValueError(f"{field} must be set in the config to make decoder inputs from labels; got None")
        start = torch.full_like(labels[:, :1], self.config.decoder_start_token_id)
        shifted = torch.cat([start, labels[:, :-1]], dim=1)
        return shifted.masked_fill(shifted == -100, self.config.pad_token_id)

    def _prepare_cache_for_generation(self, generation_config, model_kwargs, *args, **kwargs):
        given = model_kwargs.get("past_key_values")
        super()._prepare_cache_for_generation(generation_config, model_kwargs, *args, **kwargs)
        cache = model_kwargs.get("past_key_values")
        if isinstance(cache, EncoderDecoderCache) and cache is not given:
            # transformers builds the cross-attention's cache with the decoder's layer types; this one is always full
            config = copy.deepcopy(self.config)
            config.decoder_attention_type, config.decoder_global_layers = "full", []
            if isinstance(cache.cross_attention_cache, StaticCache):
                length = model_kwargs["encoder_outputs"][0].shape[1]
                cache.cross_attention_cache = StaticCache(config=config, max_cache_len=length)
            else:
                cache.cross_attention_cache = DynamicCache(config=config)


class SpadeEncoderModel(SpadePreTrainedModel):
    """SPADE's encoder alone; loads from an encoder-decoder's checkpoint.

    Args:
        config: The config.
    """

    _keys_to_ignore_on_load_unexpected = [r"^(model\.)?decoder\.", r"^lm_head\."]

    def __init__(self, config: SpadeConfig):
        super().__init__(config)
        config.validate()  # from_pretrained may have set fields without checking them
        if config.is_decoder and not config.is_encoder_decoder:
            raise ValueError(
                f"is_decoder must be False for SpadeEncoderModel; got {config.is_decoder}: use SpadeForCausalLM"
            )
        self.encoder = SpadeStack(config.get_text_config(encoder=True))
        self.post_init()

    def get_input_embeddings(self) -> nn.Embedding:
        return self.encoder.embed_tokens

    def set_input_embeddings(self, value: nn.Embedding):
        self.encoder.embed_tokens = value

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> BaseModelOutput:
        return self.encoder(
            input_ids=input_ids,
            attention_mask=attention_mask,
            inputs_embeds=inputs_embeds,
            return_dict=True,
            **kwargs,
        )


class SpadeForCausalLM(CausalLMForward, SpadeGenerationMixin, SpadePreTrainedModel):
    """SPADE causal language model (SPADE, section 4.2): a decoder without cross-attention, and a head.

    With `adaptive_cutoffs` the logits are log-probabilities. In training with labels they are not computed then, since
    the loss needs only those of each label's cluster.

    Args:
        config: The config, with `is_encoder_decoder` False. Its `is_decoder` should be True when it is made, since the
            defaults of a language model depend on it; whatever it says, this model is causal.
    """

    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}

    def __init__(self, config: SpadeConfig):
        if config.is_encoder_decoder:
            raise ValueError(
                f"is_encoder_decoder must be False for SpadeForCausalLM; got {config.is_encoder_decoder}: give "
                "SpadeConfig is_decoder=True, is_encoder_decoder=False"
            )
        if not config.is_decoder:
            logger.warning_once(
                "SpadeForCausalLM sets is_decoder=True. The config was made without it and has an encoder's defaults "
                f"(norm_position {config.norm_position!r}, local_radius {config.local_radius}): give SpadeConfig "
                "is_decoder=True for a language model's."
            )
            config = copy.deepcopy(config)
            config.is_decoder = True
        super().__init__(config)
        config.validate()  # from_pretrained may have set fields without checking them
        self.model = SpadeStack(config)
        self.lm_head = make_lm_head(config, self.model.embed_tokens)
        if config.adaptive_cutoffs is not None:
            self._tied_weights_keys = None  # a tied softmax has no tables of its own
        self.post_init()

    def _head_inputs(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return scale_head_inputs(self.config, hidden_states)


class SpadeForMaskedLM(MaskedLMForward, SpadePreTrainedModel):
    """SPADE encoder with a language modelling head, for masked language modelling.

    Args:
        config: The config.
    """

    _keys_to_ignore_on_load_unexpected = [r"^model\.decoder\."]
    _tied_weights_keys = {"lm_head.weight": "model.encoder.embed_tokens.weight"}

    def __init__(self, config: SpadeConfig):
        super().__init__(config)
        self.model = SpadeEncoderModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def _head_inputs(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return scale_head_inputs(self.config, hidden_states)


class SpadeForSequenceClassification(SequenceClassificationForward, SpadePreTrainedModel):
    """SPADE encoder that classifies whole sequences (SPADE, section 5.2).

    A pooled vector passes through a dense layer and tanh before the classifier, as in BERT. `config.pooling` says what
    is pooled; `config.num_labels` and `config.problem_type` as everywhere in transformers.

    Args:
        config: The config.
    """

    _keys_to_ignore_on_load_unexpected = [r"^model\.decoder\.", r"^lm_head\."]

    def __init__(self, config: SpadeConfig):
        super().__init__(config)
        self.model = SpadeEncoderModel(config)
        self.dropout = nn.Dropout(config.classifier_dropout)
        self.dense = nn.Linear(config.hidden_size, config.hidden_size)
        self.classifier = nn.Linear(config.hidden_size, config.num_labels)
        self.post_init()

    def _classify(self, pooled: torch.Tensor) -> torch.Tensor:
        return super()._classify(torch.tanh(self.dense(self.dropout(pooled))))


class SpadeForTokenClassification(TokenClassificationForward, SpadePreTrainedModel):
    """SPADE encoder that classifies every token.

    Args:
        config: The config.
    """

    _keys_to_ignore_on_load_unexpected = [r"^model\.decoder\.", r"^lm_head\."]

    def __init__(self, config: SpadeConfig):
        super().__init__(config)
        self.model = SpadeEncoderModel(config)
        self.dropout = nn.Dropout(config.classifier_dropout)
        self.classifier = nn.Linear(config.hidden_size, config.num_labels)
        self.post_init()


class SpadeForQuestionAnswering(QuestionAnsweringForward, SpadePreTrainedModel):
    """SPADE encoder that marks an answer's first and last token.

    Args:
        config: The config.
    """

    _keys_to_ignore_on_load_unexpected = [r"^model\.decoder\.", r"^lm_head\."]
    accepts_loss_kwargs = False  # the loss is a mean over the batch

    def __init__(self, config: SpadeConfig):
        super().__init__(config)
        self.model = SpadeEncoderModel(config)
        self.qa_outputs = nn.Linear(config.hidden_size, 2)
        self.post_init()


def scale_head_inputs(config: SpadeConfig, hidden_states: torch.Tensor) -> torch.Tensor:
    """Scale what a language modelling head reads, where the config asks for it."""
    return hidden_states * config.hidden_size**-0.5 if config.scale_decoder_outputs else hidden_states


def make_state_space(config: SpadeConfig) -> StateSpaceLayer:
    """Build the state space model of one global layer."""
    shared = {"bidirectional": not config.is_decoder, "postact": config.ssm_postact, "freeze": config.ssm_freeze}
    steps = {"dt_min": config.ssm_dt_min, "dt_max": config.ssm_dt_max, "use_D": config.ssm_use_D}
    if config.ssm_type == "lstm":
        return LSTM(config.hidden_size, **shared)
    if config.ssm_type == "hyena":
        return Hyena(
            config.hidden_size,
            order=config.hyena_order,
            max_length=config.ssm_l_max,
            filter_size=config.hyena_filter_size,
            embedding_size=config.hyena_embedding_size,
            sine_frequency=config.hyena_sine_frequency,
            short_kernel_size=config.hyena_short_kernel_size,
            dropout=config.dropout,
            **shared,
        )
    if config.ssm_type == "s5":
        return S5(
            config.hidden_size,
            config.ssm_state_size,
            blocks=config.ssm_blocks,
            discretization=config.ssm_discretization,
            **steps,
            **shared,
        )
    copies = {"num_copies": config.ssm_num_copies, "max_length": config.ssm_l_max}
    if config.ssm_type == "s4d":
        return S4D(
            config.hidden_size,
            config.ssm_state_size,
            init=config.ssm_init,
            discretization=config.ssm_discretization,
            **copies,
            **steps,
            **shared,
        )
    return S4(config.hidden_size, config.ssm_state_size, **copies, **steps, **shared)


__all__ = [
    "SpadeEncoderModel",
    "SpadeForCausalLM",
    "SpadeForConditionalGeneration",
    "SpadeForMaskedLM",
    "SpadeForQuestionAnswering",
    "SpadeForSequenceClassification",
    "SpadeForTokenClassification",
    "SpadeModel",
    "SpadePreTrainedModel",
]
