"""BST: sliding-window attention, and in some layers attention to a state space model's states (Fathi et al. 2023).

Shapes: B batch · T length · P tokens already read · D width · H heads · K head width · W window · n windows ·
C filters · S states that a window attends to.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional as F
from transformers import PreTrainedModel
from transformers import initialization as init
from transformers.activations import ACT2FN
from transformers.cache_utils import Cache, DynamicCache
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutputWithPast
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.processing_utils import Unpack
from transformers.utils import TransformersKwargs, logging
from transformers.utils.generic import merge_with_config_defaults
from transformers.utils.output_capturing import OutputRecorder, capture_outputs

from ...layers.feed_forward import FeedForward
from ...layers.implicit_filter import ImplicitConv
from ...layers.norms import make_norm
from ...layers.relative_position import RelativePositionBias
from ...layers.s4 import S4
from ...layers.state_space import ssm_parameters
from ..checks import check_not_empty
from ..description import ModelCardMixin
from ..heads import CausalLMForward, SequenceClassificationForward, make_embedding, make_lm_head
from ..local_attention import (
    LocalAttention,
    LocalSelfAttention,
    eager_attention_forward,
    first_kept,
    init_shared,
)
from ..state_cache import SlidingStateCacheLayer, StatefulGenerationMixin, state_layer, without_first
from .configuration_bst import BstConfig

logger = logging.get_logger(__name__)

STATES_STD = 0.1  # of what is trained in place of states: the first window's, as in block-recurrent transformers


class Place(NamedTuple):
    """Where a stretch of tokens lies: windows are counted from each row's first kept token.

    Attributes:
        mask: `(B, P + T)`, 1 for tokens to keep; all when None.
        past: P.
        first: Index of each row's first kept token, `(B,)`; None where that is the first one everywhere, or where no
            layer asks.
        rows: For each row, where in it the first of these tokens lies, negative before the first kept one; known if a
            layer asks and there are tokens before these.
    """

    mask: torch.Tensor | None
    past: int
    first: torch.Tensor | None
    rows: list[int] | None


class ContextState(NamedTuple):
    """What attention to context states remembers.

    Attributes:
        filter: The filters' state, which all of them share.
        key: `(B, ≤W-1, H, K)`, of the last tokens' own states; with a shift `(B, S, H, K)`, of those that the next
            token's window attends to.
        value: Alike.
        next_key: With a shift and a state per token, `(B, W, H, K)`: the last tokens' own.
        next_value: Alike.
    """

    filter: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    next_key: torch.Tensor | None = None
    next_value: torch.Tensor | None = None


class HeadwiseLinear(nn.Module):
    """A linear map for each head, from an input for each head.

    Args:
        num_heads: H.
        in_features: D.
        out_features: K.
    """

    def __init__(self, num_heads: int, in_features: int, out_features: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_heads, in_features, out_features))

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        """Map `(H, ..., D)` to `(..., H K)`."""
        mapped = states.to(self.weight.dtype).flatten(1, -2) @ self.weight
        return mapped.transpose(0, 1).flatten(1).unflatten(0, states.shape[1:-1])


class BstContext(LocalAttention):
    """Context states of all that came before, and attention of tokens to them (BST, section 3.2, pseudocodes 1 to 5).

    Y_c = h_c * u + D_c u,  for the filters h_c of a state space model or of a network, per channel;
    single head: keys and values of every head from Y_1;  multi head: those of head c from Y_c.  The query at p attends
    to the positions of its own window up to p;
    multi filter: keys and values of every head from [Y_c at the window's end + e_c] for all c, with trained e_c.  The
    query attends to those of the window before, in the first window to trained states.

    Args:
        config: The config.
    """

    def __init__(self, config: BstConfig):
        super().__init__(config, attention_type="chunk", qk_norm=config.qk_norm)
        heads, width, inner = (
            config.num_attention_heads,
            config.hidden_size,
            config.num_attention_heads * config.head_dim,
        )
        self.per_head = config.context_type == "multi_head"
        self.sampled = config.context_type == "multi_filter"
        self.shifted = config.context_shift == "window"
        self.filter = make_filter(config)
        self.q_proj = nn.Linear(width, inner, bias=False)
        lifted = config.context_lift and self.sampled
        if self.per_head or lifted:
            self.k_heads = HeadwiseLinear(heads, width, config.head_dim)
            self.v_heads = HeadwiseLinear(heads, width, config.head_dim)
        else:
            self.k_proj = nn.Linear(width, inner, bias=False)
            self.v_proj = nn.Linear(width, inner, bias=False)
        self.o_proj = nn.Linear(inner, width, bias=False)
        self.lift = nn.Linear(width, heads * width) if lifted else None
        scalar = config.context_lift and not self.sampled
        self.lift_weight = nn.Parameter(torch.empty(heads)) if scalar else None
        self.lift_bias = nn.Parameter(torch.empty(heads)) if scalar else None
        self.initial_states = self.state_embedding = None
        if self.sampled:
            self.state_embedding = nn.Parameter(torch.empty(config.num_context_states, width))
            self.initial_states = nn.Parameter(torch.empty(config.num_context_states, width))
        elif self.shifted:
            self.initial_states = nn.Parameter(torch.empty(heads if self.per_head else 1, config.window, width))

    def forward(
        self,
        hidden_states: torch.Tensor,
        filter_inputs: torch.Tensor,
        place: Place,
        state: ContextState | None,
        return_state: bool,
        **kwargs: Unpack[TransformersKwargs],
    ) -> tuple[torch.Tensor, ContextState | None]:
        """Attend.

        Args:
            hidden_states: What queries are made of, `(B, T, D)`.
            filter_inputs: u, `(B, T, D)`.
            place: Where these tokens lie.
            state: What the tokens before left behind.
            return_state: Whether to return the state after these.
            **kwargs: Passed on to the attention function.

        Returns:
            `(B, T, D)`, and the state or None.
        """
        query = self.as_query(self.q_proj(hidden_states))
        if place.mask is not None:
            kept = place.mask[:, -query.shape[1] :].to(torch.bool)
            filter_inputs = filter_inputs.masked_fill(~kept[..., None], 0)
        kwargs.pop("output_attentions", None)  # those that are recorded are self-attention's
        if not self.shifted:
            output, state = self._attend_to_own_window(query, filter_inputs, place, state, return_state, **kwargs)
        elif state is None:
            output, state = self._attend_to_window_before(query, filter_inputs, place, return_state, **kwargs)
        else:
            output, state = self._continue_windows(query, filter_inputs, place, state, **kwargs)
        return self.o_proj(output.flatten(2)), state

    # states, keys and values

    def _filtered(
        self, u: torch.Tensor, state: torch.Tensor | None, return_state: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Outputs of the filters at all tokens, `(C, B, T, D)`, and the filters' next state."""
        outputs, state = self.filter(u, state=state, return_state=True) if return_state else (self.filter(u), None)
        return outputs if outputs.dim() == 4 else outputs[None], state

    def _project(self, states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values, each `(B, T, H, K)`, of states `(C, B, T, D)`, or sampled ones `(B, T, D)`."""
        if self.per_head:
            key, value = self.k_heads(states), self.v_heads(states)
        elif self.lift is not None:
            states = self.lift(states.to(self.lift.weight.dtype))
            states = states.unflatten(-1, (self.config.num_attention_heads, -1)).movedim(-2, 0)
            key, value = self.k_heads(states), self.v_heads(states)
        else:
            states = states if self.sampled else states[0]
            key, value = self._lifted(self.k_proj, states), self._lifted(self.v_proj, states)
        return self.as_key(key), self.as_value(value)

    def _lifted(self, projection: nn.Module, states: torch.Tensor) -> torch.Tensor:
        """Project states after a lift y w_h + b_h to each head h; linear as it all is, that need not be made."""
        projected = projection(states)
        if self.lift_weight is None:
            return projected
        ones = projection(torch.ones_like(states[0, :1]))
        heads = (self.config.num_attention_heads, self.config.head_dim)
        lifted = projected.unflatten(-1, heads) * self.lift_weight[:, None]
        return (lifted + ones.view(heads) * self.lift_bias[:, None]).flatten(-2)

    def _window_pair(self, states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values `(B, n, S, H, K)` of sampled states `(B, n, S, D)`."""
        states = states.to(self.state_embedding.dtype) + self.state_embedding
        key, value = self._project(states.flatten(1, 2))
        return key.unflatten(1, states.shape[1:3]), value.unflatten(1, states.shape[1:3])

    def _first_pair(self, batch: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values `(B, 1, S, H, K)` that the first window attends to."""
        if self.sampled:
            key, value = self._window_pair(self.initial_states[None, None])
        else:
            key, value = (x[:, None] for x in self._project(self.initial_states[:, None]))
        return key.expand(batch, -1, -1, -1, -1), value.expand(batch, -1, -1, -1, -1)

    # attention

    def _attend_to_own_window(
        self,
        query: torch.Tensor,
        u: torch.Tensor,
        place: Place,
        state: ContextState | None,
        return_state: bool,
        **kwargs: Unpack[TransformersKwargs],
    ) -> tuple[torch.Tensor, ContextState | None]:
        """Attention to states of the query's own window, up to the query's position: chunks of W, causal."""
        before = None if state is None else state.filter
        outputs, after = self._filtered(u, before, return_state)
        key, value = self._project(outputs)
        if state is not None:
            key, value = torch.cat([state.key, key], dim=1), torch.cat([state.value, value], dim=1)
        held = key.shape[1] - query.shape[1]
        output, _ = self.attend(
            query,
            key,
            value,
            whole=state is None,
            attention_mask=place.mask,
            query_start=place.past,
            key_start=place.past - held,
            **kwargs,
        )
        if not return_state:
            return output, None
        dropped = max(0, key.shape[1] - self.config.window + 1)
        return output, ContextState(after, without_first(key, dropped, 1), without_first(value, dropped, 1))

    def _attend_to_window_before(
        self,
        query: torch.Tensor,
        u: torch.Tensor,
        place: Place,
        return_state: bool,
        **kwargs: Unpack[TransformersKwargs],
    ) -> tuple[torch.Tensor, ContextState | None]:
        """Attention to all states of the window before, over a whole sequence cut into windows."""
        (batch, length), window, first = query.shape[:2], self.config.window, place.first
        count = -(-length // window)
        grid = to_windows(u, first, count, window).flatten(1, 2)
        # the last window's states are for tokens to come
        wanted = count if return_state else count - 1
        own = None
        key, value = self._first_pair(batch)
        if self.sampled and wanted:
            later_key, later_value = self._window_pair(self.filter.sample(grid[:, : wanted * window], window))
            key, value = torch.cat([key, later_key], dim=1), torch.cat([value, later_value], dim=1)
        elif wanted:
            own = self._project(self._filtered(grid[:, : wanted * window], None, False)[0])
            key, value = (
                torch.cat([pair, part.unflatten(1, (-1, window))], dim=1)
                for pair, part in zip((key, value), own, strict=True)
            )
        windows = to_windows(query, first, count, window)
        output = self._attend_all(*(x[:, :count].flatten(0, 1) for x in (windows, key, value)), **kwargs)
        output = from_windows(output.unflatten(0, (batch, count)), first, length)
        if not return_state:
            return output, None
        places = length if first is None else (length - first)[:, None, None, None, None]
        key, value = (self._window_of(x, places // window) for x in (key, value))
        following = ()
        if own is not None:
            following = (self._last_of(from_windows(x.unflatten(1, (count, window)), first, length)) for x in own)
        return output, ContextState(self.filter.follow(u, None, [length])[0], key, value, *following)

    def _window_of(self, x: torch.Tensor, index: int | torch.Tensor) -> torch.Tensor:
        """One window's part for each row, `(B, S, H, K)`, of `(B, n, S, H, K)`."""
        if isinstance(index, int):
            return x[:, index].clone()  # a cache that kept a view would keep all windows
        return x.take_along_dim(index.expand(-1, -1, *x.shape[2:]), 1)[:, 0]

    def _last_of(self, x: torch.Tensor) -> torch.Tensor:
        """The last W of `(B, T, H, K)`, zeros before the first."""
        x = without_first(x, max(0, x.shape[1] - self.config.window), 1)
        return F.pad(x, (0, 0, 0, 0, self.config.window - x.shape[1], 0))

    def _continue_windows(
        self,
        query: torch.Tensor,
        u: torch.Tensor,
        place: Place,
        state: ContextState,
        **kwargs: Unpack[TransformersKwargs],
    ) -> tuple[torch.Tensor, ContextState]:
        """Attention to all states of the window before, from a state: stretch by stretch, each within a window."""
        length, window = query.shape[1], self.config.window
        turns = {row: range(window - (row % window if row > 0 else row), length + 1, window) for row in place.rows}
        stops = sorted({length}.union(*turns.values()))
        if self.sampled:
            states = self.filter.follow(u, state.filter, stops)
            state = state._replace(filter=states[-1])
        else:
            outputs, after = self._filtered(u, state.filter, True)
            own = [torch.cat(pair, dim=1) for pair in zip(state[3:], self._project(outputs), strict=True)]
            state = state._replace(filter=after, next_key=self._last_of(own[0]), next_value=self._last_of(own[1]))
        attended, start = [], 0
        for index, stop in enumerate(stops):
            attended.append(self._attend_all(query[:, start:stop], state.key, state.value, **kwargs))
            start = stop
            rows = [i for i, row in enumerate(place.rows) if stop in turns[row]]
            if not rows:
                continue
            rows = torch.tensor(rows, device=u.device)
            if self.sampled:
                sampled = self.filter.read(states[index][rows], u[rows, stop - 1])
                key, value = (x[:, 0] for x in self._window_pair(sampled[:, None]))
            else:
                key, value = (x[rows, stop : stop + window] for x in own)
            state = state._replace(
                key=state.key.index_copy(0, rows, key), value=state.value.index_copy(0, rows, value)
            )
        return torch.cat(attended, dim=1), state

    def _attend_all(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        **kwargs: Unpack[TransformersKwargs],
    ) -> torch.Tensor:
        """Attention of all queries `(B, T, H, K)` to all keys `(B, S, H, K)`, `(B, T, H, K)`."""
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager_attention_forward)
        output, _ = attend(
            self,
            *(x.transpose(1, 2) for x in (query, key, value)),
            None,
            dropout=self.dropout,
            scaling=self.scaling,
            is_causal=False,
            **kwargs,
        )
        return output


class BstLayer(GradientCheckpointingLayer):
    """One layer: attention and a feed-forward network, each behind a norm and with a residual.

    Block layer ``x <- x + W_o a``; with context states ``x <- x + W_o a + W_c c`` for attention to them c, that is,
    one projection of both side by side; with a gate ``x <- g x + (1 - g) (W_o a + W_c c)``, g = sigmoid(b).

    Args:
        config: The config.
        layer_idx: Index of the layer.
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
        self.context = BstContext(config) if has_context else None
        gated = has_context and config.context_mixing == "gate"
        self.gate_bias = nn.Parameter(torch.zeros(config.hidden_size)) if gated else None
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
        place: Place,
        past_key_values: Cache | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> torch.Tensor:
        """Map `(B, T, D)` to `(B, T, D)`."""
        cached = None
        if self.context is not None and past_key_values is not None:
            cached = state_layer(past_key_values, self.layer_idx, SlidingStateCacheLayer)
            cached.sliding_window = self.config.sliding_window
        normed = self.attention_norm(hidden_states)
        mixed, _ = self.attention(normed, attention_mask=place.mask, past_key_values=past_key_values, **kwargs)
        if self.context is not None:
            inputs = normed if self.config.context_input == "normed" else hidden_states
            state = None if cached is None else cached.state
            attended, state = self.context(normed, inputs, place, state, cached is not None, **kwargs)
            mixed = mixed + attended
            if cached is not None:
                cached.store(state, tokens=0)  # self-attention's keys have counted them
        mixed = self.dropout(mixed)
        if self.gate_bias is None:
            hidden_states = hidden_states + mixed
        else:
            hidden_states = mixed + torch.sigmoid(self.gate_bias) * (hidden_states - mixed)
        return hidden_states + self.dropout(self.feed_forward(self.feed_forward_norm(hidden_states)))


class BstPreTrainedModel(ModelCardMixin, PreTrainedModel):
    """Base of all Block-State Transformers: initialisation, and what transformers wants to know about them."""

    config: BstConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["BstLayer"]
    _skip_keys_device_placement = ["past_key_values"]
    _keep_in_fp32_modules_strict = ["filter"]
    _supports_sdpa = True
    _can_record_outputs = {
        "hidden_states": BstLayer,
        "attentions": OutputRecorder(LocalSelfAttention, index=1),
    }

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

    @staticmethod
    def create_masks_for_generate(attention_mask: torch.Tensor | None = None, **kwargs) -> torch.Tensor | None:
        """Leave the padding mask as it is: each layer makes its own."""
        return attention_mask

    def ssm_parameters(self, *, dynamics: bool | None = None) -> Iterator[nn.Parameter]:
        """Yield the filters' trained tensors, which want no weight decay; see `layers.state_space`."""
        return ssm_parameters(self, dynamics=dynamics)


class BstModel(BstPreTrainedModel):
    """Block-State Transformer without a head: embedding, layers and final norm.

    Args:
        config: The config.
    """

    def __init__(self, config: BstConfig):
        super().__init__(config)
        config.validate()  # from_pretrained may have set fields without checking them
        self.embed_tokens = make_embedding(config)
        self.layers = nn.ModuleList(BstLayer(config, layer_idx) for layer_idx in range(config.num_hidden_layers))
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
        past_key_values: Cache | None = None,
        inputs_embeds: torch.Tensor | None = None,
        use_cache: bool | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> BaseModelOutputWithPast:
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("exactly one of input_ids and inputs_embeds must be given")
        if inputs_embeds is None:
            inputs_embeds = self.embed_tokens(input_ids)
        check_not_empty("input_ids", inputs_embeds)
        if use_cache and past_key_values is None:
            past_key_values = DynamicCache(config=self.config)
        hidden_states = self.dropout(inputs_embeds)
        place = self._place(attention_mask, past_key_values, *hidden_states.shape[:2])
        for layer in self.layers[: self.config.num_hidden_layers]:  # fewer where generation asks for an early exit
            hidden_states = layer(hidden_states, place, past_key_values=past_key_values, **kwargs)
        return BaseModelOutputWithPast(
            last_hidden_state=self.final_norm(hidden_states), past_key_values=past_key_values
        )

    def _place(self, attention_mask: torch.Tensor | None, cache: Cache | None, batch: int, length: int) -> Place:
        """Say where the next tokens lie; with a shift and a mask, that is one question to the device."""
        past = 0 if cache is None or not self.config.bst_layers else cache.get_seq_length(self.config.bst_layers[0])
        if attention_mask is not None and self.config.bst_layers and attention_mask.shape != (batch, past + length):
            raise ValueError(
                f"attention_mask must be of shape (batch, length) = {(batch, past + length)}, for all tokens so far; "
                f"got {tuple(attention_mask.shape)}"
            )
        limit = self.config.filter_length
        if self.config.bst_layers and self.config.context_filter == "unstructured" and past + length > limit:
            logger.warning_once(
                f"a sequence is longer than filter_length {limit}: unstructured filters see that many tokens back, "
                f"nothing further; train with a larger filter_length, or use context_filter='s4'."
            )
        first = rows = None
        if self.config.bst_layers and self.config.context_shift == "window":
            if attention_mask is not None:
                first = first_kept(attention_mask)
            if past:
                rows = [past] * batch if first is None else [past - index for index in first.tolist()]
            elif first is not None and not (first.is_meta or torch.compiler.is_compiling()) and not first.any():
                first = None  # the common case, which needs no rearranging
        return Place(attention_mask, past, first, rows)


class BstForCausalLM(CausalLMForward, StatefulGenerationMixin, BstPreTrainedModel):
    """Block-State Transformer as a language model.

    With `adaptive_cutoffs` the logits are log-probabilities. In training with labels they are not computed then, since
    the loss needs only those of each label's cluster.

    Args:
        config: The config.
    """

    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}

    def __init__(self, config: BstConfig):
        super().__init__(config)
        self.model = BstModel(config)
        self.lm_head = make_lm_head(config, self.model.embed_tokens)
        if config.adaptive_cutoffs is not None:
            self._tied_weights_keys = None  # a tied softmax has no tables of its own
        elif config.scale_decoder_outputs:  # as large as the table it would be tied to
            self.lm_head.init_std = config.embedding_initializer_range
        self.post_init()

    @property
    def _is_stateful(self) -> bool:
        return bool(self.config.bst_layers)

    def _head_inputs(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return hidden_states * self.config.hidden_size**-0.5 if self.config.scale_decoder_outputs else hidden_states


class BstForSequenceClassification(SequenceClassificationForward, BstPreTrainedModel):
    """Block-State Transformer that classifies whole sequences, by what `config.pooling` makes of all tokens.

    `config.num_labels` and `config.problem_type` are as everywhere in transformers.

    Args:
        config: The config.
    """

    def __init__(self, config: BstConfig):
        super().__init__(config)
        self.model = BstModel(config)
        self.dropout = nn.Dropout(config.classifier_dropout)
        self.classifier = nn.Linear(config.hidden_size, config.num_labels)
        self.post_init()


def to_windows(x: torch.Tensor, first: torch.Tensor | None, count: int, window: int) -> torch.Tensor:
    """Cut a sequence into windows, the first of which begins at each row's first kept token.

    Args:
        x: `(B, T, ...)`.
        first: Index of each row's first kept token, `(B,)`; 0 when None.
        count: n, enough for all.
        window: W.

    Returns:
        `(B, n, W, ...)`, zeros behind the last token.
    """
    length, size = x.shape[1], count * window
    if first is None:
        padded = F.pad(x, (0, 0) * (x.dim() - 2) + (0, size - length))
    else:
        index = _spread(torch.arange(size, device=x.device) + first[:, None], x)
        padded = x.take_along_dim(index.clamp_max(length - 1), 1).masked_fill(index >= length, 0)
    return padded.unflatten(1, (count, window))


def from_windows(x: torch.Tensor, first: torch.Tensor | None, length: int) -> torch.Tensor:
    """Put windows `(B, n, W, ...)` back into a sequence `(B, T, ...)`, arbitrary before the first kept token."""
    x = x.flatten(1, 2)
    if first is None:
        return x[:, :length]
    index = _spread(torch.arange(length, device=x.device) - first[:, None], x)
    return x.take_along_dim(index.clamp_min(0), 1)


def _spread(index: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Make `(B, T)` broadcast over the dimensions that follow in another tensor."""
    return index.view(*index.shape, *[1] * (like.dim() - 2))


def make_filter(config: BstConfig) -> Any:
    """Build the filters of one layer."""
    count = {"single_head": 1, "multi_head": config.num_attention_heads, "multi_filter": config.num_context_states}
    filters = count[config.context_type]
    if config.context_filter == "unstructured":
        return ImplicitConv(
            config.hidden_size,
            num_filters=filters,
            max_length=config.filter_length,
            filter_size=config.filter_size,
            embedding_size=config.filter_embedding_size,
            sine_frequency=config.filter_sine_frequency,
        )
    return S4(
        config.hidden_size,
        config.state_size,
        num_filters=filters,
        dt_min=config.dt_min,
        dt_max=config.dt_max,
        freeze="none",
    )


__all__ = ["BstForCausalLM", "BstForSequenceClassification", "BstModel", "BstPreTrainedModel"]
