"""BST: sliding-window attention, in some layers also attention to a state space model's states (Fathi et al. 2023).

Shapes: B batch · T length · D width.
"""

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers import initialization as init
from transformers.cache_utils import Cache, DynamicCache
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutputWithPast
from transformers.processing_utils import Unpack
from transformers.utils import TransformersKwargs, logging
from transformers.utils.generic import merge_with_config_defaults
from transformers.utils.output_capturing import OutputRecorder, capture_outputs

from ...context_parallel import Shards
from ...kernels.packed import longest
from ...layers.dropout import Dropout
from ...layers.norms import make_norm
from ...layers.relative_position import RelativePositionBias
from ..checkpointing import CheckpointingMixin
from ..description import ModelCardMixin
from ..generation import HybridGenerationMixin
from ..heads import (
    CausalLMForward,
    SequenceClassificationForward,
    StateSpaceModelMixin,
    scale_outputs,
)
from ..inputs import embed_inputs, make_embedding
from ..local_attention import LocalSelfAttention, init_shared, make_feed_forward
from ..masks import check_covers, first_kept, mask_so_far
from ..packing import take_bounds, take_shards
from ..state_cache import SlidingStateCacheLayer, state_layer
from .configuration_bst import BstConfig
from .context import BstContext, HeadwiseLinear, make_context
from .windows import Span

logger = logging.get_logger(__name__)

STATES_STD = 0.1  # of the trained states that the first window reads, as in block-recurrent transformers


class BstLayer(GradientCheckpointingLayer):
    """One layer: attention and a feed-forward network, each after a norm and with a residual.

    With self-attention a: ``x <- x + W_o a``; with attention c to context states: ``x <- x + W_o a + W_c c``; with a
    gate: ``x <- g x + (1 - g) (W_o a + W_c c)``, g = sigmoid(b).
    """

    def __init__(self, config: BstConfig, layer_idx: int):
        super().__init__()
        self.config = config
        self.layer_idx = layer_idx
        has_context = layer_idx in config.bst_layers
        self.attention = LocalSelfAttention(
            config,
            layer_idx,
            has_bias_table=True,
            attention_type="chunk" if has_context and not config.sliding_context_layers else "window",
            include_self=config.include_self,
            qk_norm=config.qk_norm,
        )
        self.attention_norm = make_norm(config.norm_type, config.hidden_size, config.layer_norm_eps)
        self.context = make_context(config) if has_context else None
        gated = has_context and config.context_mixing == "gate"
        self.gate_bias = nn.Parameter(torch.zeros(config.hidden_size)) if gated else None
        self.feed_forward = make_feed_forward(config)
        self.feed_forward_norm = make_norm(config.norm_type, config.hidden_size, config.layer_norm_eps)
        self.dropout = Dropout(config.dropout)

    def forward(
        self,
        hidden_states: torch.Tensor,
        span: Span,
        past_key_values: Cache | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> torch.Tensor:
        """Map `(B, T, D)` to `(B, T, D)`."""
        cached = None
        if self.context is not None and past_key_values is not None:
            cached = state_layer(past_key_values, self.layer_idx, SlidingStateCacheLayer)
            if not cached.is_initialized:
                cached.sliding_window = self.config.sliding_window
        normed = self.attention_norm(hidden_states)
        mixed, _ = self.attention(
            normed,
            attention_mask=span.attention_mask,
            past_key_values=past_key_values,
            cu_seqlens=span.cu_seqlens,
            shards=span.shards,
            **kwargs,
        )
        if self.context is not None:
            inputs = normed if self.config.context_input == "normed" else hidden_states
            state = None if cached is None else cached.state
            attended, state = self.context(normed, inputs, span, state, cached is not None, **kwargs)
            mixed = mixed + attended
            if cached is not None:
                cached.store(state, tokens=0)  # self-attention counts them
        mixed = self.dropout(mixed)
        if self.gate_bias is None:
            hidden_states = hidden_states + mixed
        else:
            hidden_states = mixed + torch.sigmoid(self.gate_bias) * (hidden_states - mixed)
        return hidden_states + self.dropout(self.feed_forward(self.feed_forward_norm(hidden_states)))


class BstPreTrainedModel(ModelCardMixin, CheckpointingMixin, StateSpaceModelMixin, PreTrainedModel):
    """Base class of all Block-State Transformers."""

    config: BstConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _supports_context_parallel = False
    _no_split_modules = ["BstLayer"]
    _skip_keys_device_placement = ["past_key_values"]
    _keep_in_fp32_modules_strict = ["filter"]
    _supports_sdpa = True
    _can_record_outputs = {"hidden_states": BstLayer, "attentions": OutputRecorder(LocalSelfAttention, index=1)}

    @torch.no_grad()
    def _init_weights(self, module: nn.Module):
        super()._init_weights(module)
        init_shared(module, self.config)
        if isinstance(module, HeadwiseLinear):
            init.normal_(module.weight, std=self.config.initializer_range)
        elif isinstance(module, nn.Embedding) and not isinstance(module, RelativePositionBias):
            init.normal_(module.weight, std=self.config.embedding_initializer_range)
        elif isinstance(module, BstLayer) and module.gate_bias is not None:
            init.zeros_(module.gate_bias)
        if isinstance(module, BstContext):
            for states in (module.initial_states, module.state_embedding):
                if states is not None:
                    init.normal_(states, std=STATES_STD)
            if module.lift_weight is not None:
                init.normal_(module.lift_weight)
                init.zeros_(module.lift_bias)


class BstModel(BstPreTrainedModel):
    """Block-State Transformer without a head: embedding, layers and final norm."""

    def __init__(self, config: BstConfig):
        super().__init__(config)
        config.validate()  # from_pretrained may set fields without checking them
        self.embed_tokens = make_embedding(config)
        self.layers = nn.ModuleList(BstLayer(config, layer_idx) for layer_idx in range(config.num_hidden_layers))
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
        past_key_values: Cache | None = None,
        inputs_embeds: torch.Tensor | None = None,
        use_cache: bool | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> BaseModelOutputWithPast:
        inputs_embeds = embed_inputs(self.embed_tokens, input_ids, inputs_embeds)
        shards = take_shards(kwargs, inputs_embeds, attention_mask, past_key_values)
        cu_seqlens = None if shards else take_bounds(kwargs, inputs_embeds, attention_mask, past_key_values)
        if use_cache and past_key_values is None and cu_seqlens is None and shards is None:
            past_key_values = DynamicCache(config=self.config)
        hidden_states = self.dropout(inputs_embeds)
        span = self._span(attention_mask, past_key_values, hidden_states, cu_seqlens, shards)
        for layer in self.layers[: self.config.num_hidden_layers]:  # fewer for an early exit in generation
            hidden_states = layer(hidden_states, span, past_key_values=past_key_values, **kwargs)
        hidden_states = self.final_norm(hidden_states)
        if self.output_scale != 1:
            hidden_states = hidden_states * self.output_scale
        return BaseModelOutputWithPast(last_hidden_state=hidden_states, past_key_values=past_key_values)

    def _span(
        self,
        attention_mask: torch.Tensor | None,
        cache: Cache | None,
        inputs: torch.Tensor,
        cu_seqlens: torch.Tensor | None,
        shards: Shards | None,
    ) -> Span:
        """Return the span of the next tokens; with a shift and an attention mask, this waits for the device."""
        past = 0 if cache is None or not self.config.bst_layers else cache.get_seq_length(self.config.bst_layers[0])
        if attention_mask is not None and self.config.bst_layers:
            check_covers(attention_mask, inputs, past)
        attention_mask = mask_so_far(attention_mask, inputs, cache)
        limit = self.config.filter_length
        tokens = longest(inputs, cu_seqlens) if shards is None else shards.longest
        unstructured = self.config.bst_layers and self.config.context_filter == "unstructured"
        counted = not isinstance(past, torch.Tensor)  # as it is in a `DecodingStep`
        if unstructured and counted and past + tokens > limit:
            logger.warning_once(
                f"A sequence is longer than filter_length {limit}, beyond which unstructured filters see nothing. "
                f"Train with a larger filter_length, or use context_filter='s4'."
            )
        first = starts = None
        if self.config.bst_layers and self.config.context_shift == "window" and shards is None:
            if attention_mask is not None:
                first = first_kept(attention_mask)
            if not counted:
                raise ValueError(
                    f"context_shift must be 'none' in a DecodingStep, which takes the same branch at each position; "
                    f"got {self.config.context_shift!r}"
                )
            if past:
                starts = [past] * inputs.shape[0] if first is None else [past - index for index in first.tolist()]
            elif first is not None and not (first.is_meta or torch.compiler.is_compiling()) and not first.any():
                first = None  # the common case needs no index
        return Span(attention_mask, past, first, starts, cu_seqlens, shards)


class BstForCausalLM(CausalLMForward, HybridGenerationMixin, BstPreTrainedModel):
    """Block-State Transformer as a language model.

    With `adaptive_cutoffs` the logits are log-probabilities, and None in training with labels.
    """

    @property
    def _can_compile_fullgraph(self) -> bool:
        """Whether one graph serves all decoding steps; with a shift, some of them renew the states of a window."""
        return not self.config.bst_layers or self.config.context_shift == "none"

    def __init__(self, config: BstConfig):
        super().__init__(config)
        self.model = BstModel(config)
        scale_outputs(self.model, config)
        self.add_lm_head()
        if config.adaptive_cutoffs is None and config.scale_decoder_outputs:  # as large as a tied table
            self.lm_head.init_std = config.embedding_initializer_range
        self.post_init()


class BstForSequenceClassification(SequenceClassificationForward, BstPreTrainedModel):
    """Block-State Transformer that classifies sequences, by the tokens that `config.pooling` selects."""

    def __init__(self, config: BstConfig):
        super().__init__(config)
        self.model = BstModel(config)
        self.dropout = nn.Dropout(config.classifier_dropout)
        self.classifier = nn.Linear(config.hidden_size, config.num_labels)
        self.post_init()
