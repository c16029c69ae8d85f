"""One layer of SPADE: token mixer, cross-attention and feed-forward network (Zuo et al. 2022).

Shapes: B batch · T length of the stack's input · S source length · D width · H heads · K head width.
"""

from typing import Any

import torch
from torch import nn
from transformers.cache_utils import Cache, EncoderDecoderCache
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.processing_utils import Unpack
from transformers.utils import TransformersKwargs

from ...context_parallel import Shards, cross_attention
from ...kernels.precision import autocast_once
from ...layers.dropout import Dropout
from ...layers.hyena import Hyena
from ...layers.lstm import LSTM
from ...layers.norms import apply_norm, make_norm
from ...layers.relative_position import RelativePositionBias
from ...layers.s4 import S4
from ...layers.s4d import S4D
from ...layers.s5 import S5
from ...layers.state_space import StateSpaceLayer
from ..dense_attention import choose_attention
from ..local_attention import LocalSelfAttention, make_feed_forward
from ..state_cache import decoder_cache
from .configuration_spade import SpadeConfig


def make_state_space(config: SpadeConfig) -> StateSpaceLayer:
    """Build the state space model of a global layer."""
    shared = {"bidirectional": not config.is_decoder, "postact": config.ssm_postact, "freeze": config.ssm_freeze}
    steps = {"dt_min": config.ssm_dt_min, "dt_max": config.ssm_dt_max, "use_D": config.ssm_use_D}
    sizes = (config.hidden_size, config.ssm_state_size)
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
        return S5(*sizes, blocks=config.ssm_blocks, discretization=config.ssm_discretization, **steps, **shared)
    copies = {"num_copies": config.ssm_num_copies, "max_length": config.ssm_l_max}
    if config.ssm_type == "s4d":
        forms = {"init": config.ssm_init, "discretization": config.ssm_discretization}
        return S4D(*sizes, **forms, **copies, **steps, **shared)
    return S4(*sizes, **copies, **steps, **shared)


class SpadeCrossAttention(nn.Module):
    """Full attention of the decoder to the encoder's output."""

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
            # scores start as large as scaled ones
            self.q_proj.init_std = config.initializer_range * config.head_dim**-0.5

    def forward(
        self,
        hidden_states: torch.Tensor,
        encoder_hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        past_key_values: EncoderDecoderCache | None = None,
        shards: Shards | None = None,
        source_shards: Shards | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Attend.

        Args:
            hidden_states: `(B, T, D)`.
            encoder_hidden_states: `(B, S, D)`.
            attention_mask: Added to the scores, broadcastable to `(B, H, T, S)`; of a divided document `(B, S_r)`,
                1 = keep.
            past_key_values: Cache, which keeps the keys and values of the encoder's output.
            shards: The layout of divided targets, or None.
            source_shards: The layout of the document, if it is divided.
            **kwargs: Passed on to the attention function.

        Returns:
            Output `(B, T, D)`, and probabilities `(B, H, T, S)` if the attention function returns them.
        """
        batch, length, _ = hidden_states.shape
        heads = (batch, -1, self.config.num_attention_heads, self.config.head_dim)
        dropout = self.config.attention_dropout if self.training else 0.0
        if source_shards is not None:
            layouts = (shards, source_shards)
            return self._attend_divided(hidden_states, encoder_hidden_states, *layouts, attention_mask, dropout), None
        query = self.q_proj(hidden_states).view(heads).transpose(1, 2)
        if past_key_values is not None and past_key_values.is_updated.get(self.layer_idx):
            layer = past_key_values.cross_attention_cache.layers[self.layer_idx]
            key, value = layer.keys, layer.values
        else:
            source = autocast_once(encoder_hidden_states)
            key = self.k_proj(source).view(heads).transpose(1, 2)
            value = self.v_proj(source).view(heads).transpose(1, 2)
            if past_key_values is not None:
                key, value = past_key_values.cross_attention_cache.update(key, value, self.layer_idx)
                past_key_values.is_updated[self.layer_idx] = True
        attend = choose_attention(self.config, query, attention_mask, dropout)
        output, probabilities = attend(
            self,
            query,
            key,
            value,
            attention_mask,
            dropout=dropout,
            scaling=self.scaling,
            is_causal=False,
            **kwargs,
        )
        return self.o_proj(output.reshape(batch, length, -1)), probabilities

    def _attend_divided(
        self,
        hidden_states: torch.Tensor,
        encoder_hidden_states: torch.Tensor,
        shards: Shards,
        source_shards: Shards,
        attention_mask: torch.Tensor | None,
        dropout: float,
    ) -> torch.Tensor:
        """`forward` of own targets `(B, T_r, D)` and own tokens of the document, `(B, S_r, D)`."""
        heads = (self.config.num_attention_heads, self.config.head_dim)
        query = self.q_proj(hidden_states).unflatten(-1, heads)
        source = autocast_once(encoder_hidden_states)
        key, value = (project(source).unflatten(-1, heads) for project in (self.k_proj, self.v_proj))
        options = {"attention_mask": attention_mask, "scale": self.scaling, "dropout": dropout}
        return self.o_proj(cross_attention(query, key, value, shards, source_shards, **options).flatten(2))


class SpadeTokenMixer(nn.Module):
    """Local attention l, in a global layer joined with a state space model g of the same input x.

    `config.combine_mode` joins them (SPADE, section 3.2): concat ``W [LN(l(x)), LN(g(x))] + b``,
    add ``(1 - α) LN(l(x)) + α LN(g(x))``, stack ``l(g(x))``, residual ``l(x) + W LN(g(x))`` with W zero at first
    and LN's gain small.

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
            # as torch initialises it, like the published code: the update starts smaller than the residual
            self.aggregate.init_std = (6 * config.hidden_size) ** -0.5
        if config.combine_mode == "residual":
            self.global_proj = nn.Linear(config.hidden_size, config.hidden_size, bias=False)
            self.global_proj.init_std = 0  # the layer starts as local attention
            # Adam moves W by its rate whatever the gradients; behind a norm of gain 1 that is noise at high rates
            self.global_norm.init_gain = 0.1

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None,
        past_key_values: Cache | None,
        *,
        bias_table: RelativePositionBias | None,
        cu_seqlens: torch.Tensor | None = None,
        shards: Shards | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> torch.Tensor:
        """Map `(B, T, D)` to `(B, T, D)`; the arguments are those of `LocalSelfAttention`."""
        attend = {
            "bias_table": bias_table,
            "attention_mask": attention_mask,
            "past_key_values": past_key_values,
            "cu_seqlens": cu_seqlens,
            "shards": shards,
            **kwargs,
        }
        if self.ssm is None:
            return self.attention(hidden_states, **attend)[0]
        global_states = self._state_space(hidden_states, attention_mask, past_key_values, cu_seqlens, shards)
        if self.attention is None:
            return global_states
        if self.config.combine_mode == "stack":
            return self.attention(global_states, **attend)[0]
        local_states = self.attention(hidden_states, **attend)[0]
        global_states = apply_norm(self.global_norm, global_states, attention_mask, shards)
        if self.config.combine_mode == "residual":
            return local_states + self.global_proj(global_states)
        local_states = apply_norm(self.local_norm, local_states, attention_mask, shards)
        if self.config.combine_mode == "add":
            # not torch.lerp, which refuses the mixed dtypes of autocast
            return local_states + self.config.combine_alpha * (global_states - local_states)
        branches = (local_states, global_states)
        if self.config.concat_order == "global_local":
            branches = branches[::-1]
        return self.aggregate(torch.cat(branches, dim=-1))

    def _state_space(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None,
        past_key_values: Cache | None,
        cu_seqlens: torch.Tensor | None,
        shards: Shards | None,
    ) -> torch.Tensor:
        """Run the state space model, with the state in the cache if there is one."""
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
            return self.ssm(hidden_states, attention_mask, cu_seqlens=cu_seqlens, shards=shards)
        layer = past_key_values.layers[self.layer_idx] if self.layer_idx < len(past_key_values.layers) else None
        if not hasattr(layer, "recurrent_states"):
            raise ValueError(
                "past_key_values must be able to keep a state, as DynamicCache(config=model.config) is; got one whose "
                f"layer {self.layer_idx} is {type(layer).__name__}"
            )
        if past_key_values.offloading:  # layers wait for their prefetched states only when they update their keys
            torch.cuda.default_stream(hidden_states.device).wait_stream(past_key_values.prefetch_stream)
        state = layer.recurrent_states[0] if layer.has_previous_state[0] else None
        output, state = self.ssm(hidden_states, attention_mask, state=state, return_state=True)
        layer.update_recurrent_state(state)
        layer.has_previous_state[0] = True
        if self.attention is None:
            # the cache counts tokens by its keys: append keys of width 0
            nothing = output.new_empty(output.shape[0], 1, output.shape[1], 0)
            layer.update(nothing, nothing)
        return output


class SpadeLayer(GradientCheckpointingLayer):
    """One layer: token mixer, cross-attention in a decoder, and feed-forward network, each with a residual.

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
        self.feed_forward = make_feed_forward(config)
        self.feed_forward_norm = make_norm(config.norm_type, config.hidden_size, config.layer_norm_eps)
        self.dropout = Dropout(config.dropout)

    def forward(
        self,
        hidden_states: torch.Tensor,
        encoder_hidden_states: torch.Tensor | None = None,
        bias_table: RelativePositionBias | None = None,
        attention_mask: torch.Tensor | None = None,
        encoder_attention_mask: torch.Tensor | None = None,
        past_key_values: Cache | None = None,
        cu_seqlens: torch.Tensor | None = None,
        shards: Shards | None = None,
        source_shards: Shards | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> torch.Tensor:
        """Map `(B, T, D)` to `(B, T, D)`; `encoder_hidden_states` is `(B, S, D)`."""
        kept = (attention_mask, shards)
        mixed = self.mixer(
            self._before(self.mixer_norm, hidden_states, *kept),
            attention_mask,
            decoder_cache(past_key_values),
            bias_table=bias_table,
            cu_seqlens=cu_seqlens,
            shards=shards,
            **kwargs,
        )
        hidden_states = self._after(self.mixer_norm, hidden_states + self.dropout(mixed), *kept)
        if self.cross_attention is not None and encoder_hidden_states is not None:
            attended, _ = self.cross_attention(
                self._before(self.cross_attention_norm, hidden_states, *kept),
                encoder_hidden_states,
                attention_mask=encoder_attention_mask,
                past_key_values=past_key_values,
                shards=shards,
                source_shards=source_shards,
                **kwargs,
            )
            total = hidden_states + self.dropout(attended)
            hidden_states = self._after(self.cross_attention_norm, total, *kept)
        transformed = self.feed_forward(self._before(self.feed_forward_norm, hidden_states, *kept))
        return self._after(self.feed_forward_norm, hidden_states + self.dropout(transformed), *kept)

    def _before(self, norm: nn.Module, inputs: torch.Tensor, *kept: Any) -> torch.Tensor:
        return apply_norm(norm, inputs, *kept) if self.pre_norm else inputs

    def _after(self, norm: nn.Module, total: torch.Tensor, *kept: Any) -> torch.Tensor:
        return total if self.pre_norm else apply_norm(norm, total, *kept)
