"""Local self-attention, its masks and biases, and a feed-forward network, for several architectures.

They read of a config: `hidden_size num_attention_heads head_dim attention_type local_radius chunk_size is_decoder
attention_bias scale_attention attention_dropout initializer_range relative_attention_num_buckets
relative_attention_max_distance relative_attention_init`, with `qk_norm` `score_scale_init`; the feed-forward network
`intermediate_size hidden_act gated_feed_forward feed_forward_bias activation_dropout`.

Shapes: B batch · T length · S keys · P tokens already cached · D width · H heads · K head width.
"""

import functools

import torch
from torch import nn
from transformers import PreTrainedConfig
from transformers import initialization as init
from transformers.activations import ACT2FN
from transformers.cache_utils import Cache
from transformers.processing_utils import Unpack
from transformers.utils import TransformersKwargs, logging

from ..context_parallel import Shards, check_divisible, sees_others
from ..context_parallel import local_attention as divided_attention
from ..kernels import local_attention, local_attention_step
from ..kernels.dispatch import exports_any
from ..kernels.packed import sequence_starts
from ..kernels.precision import autocast_once, compute_dtype
from ..layers.adaptive_softmax import AdaptiveEmbedding, AdaptiveSoftmax
from ..layers.feed_forward import FeedForward
from ..layers.relative_position import RelativePositionBias
from ..layers.state_space import StateSpaceLayer
from .dense_attention import choose_attention
from .masks import additive_mask, first_kept, kept_pairs
from .packing import row_starts
from .state_cache import cached_length

logger = logging.get_logger(__name__)

HIDDEN = -1e30  # a bias that hides a key and stays finite in sums


def init_shared(module: nn.Module, config: PreTrainedConfig):
    """Initialise the shared modules that transformers does not know."""
    if isinstance(module, StateSpaceLayer | AdaptiveEmbedding | AdaptiveSoftmax):
        module.reset_parameters()
    elif isinstance(module, RelativePositionBias):
        if config.relative_attention_init == "recency":
            init.copy_(module.weight, module.recency_biases() * module.init_scale)
        else:
            init.normal_(module.weight, std=config.initializer_range * module.init_scale)
    elif isinstance(module, nn.Linear | nn.Embedding) and hasattr(module, "init_std"):
        # an attribute of the module, since transformers does not initialise modules without own tensors
        init.normal_(module.weight, std=module.init_std)
    elif hasattr(module, "init_gain"):
        init.constant_(module.weight, module.init_gain)
    elif isinstance(module, LocalAttention) and module.score_scale is not None:
        init.constant_(module.score_scale, float(config.score_scale_init))


def make_bias_table(config: PreTrainedConfig) -> RelativePositionBias:
    """Build a table of relative position biases."""
    return RelativePositionBias(
        config.num_attention_heads,
        num_buckets=config.relative_attention_num_buckets,
        max_distance=config.relative_attention_max_distance,
        bidirectional=not config.is_decoder,
    )


def make_feed_forward(config: PreTrainedConfig) -> FeedForward:
    """Build the feed-forward network of one layer."""
    return FeedForward(
        config.hidden_size,
        config.intermediate_size,
        ACT2FN[config.hidden_act],
        gated=config.gated_feed_forward,
        bias=config.feed_forward_bias,
        dropout=config.activation_dropout,
    )


class LocalAttention(nn.Module):
    """Softmax attention to nearby keys, for subclasses that project queries, keys and values.

    With `qk_norm`, queries and keys are divided by their lengths and the scores multiplied by a number per head:
    (q/|q| · k/|k| + bias) |g|, where |x| is sqrt(x·x + 1e-6) and g starts as `config.score_scale_init`.

    Args:
        config: The stack's config.
        attention_type: `"window"`, `"chunk"` or `"full"`; the config's when None.
        include_self: Whether a query sees its own position; if not, a query that sees nothing gives zeros.
        qk_norm: Whether queries and keys are normalised.
    """

    def __init__(
        self,
        config: PreTrainedConfig,
        *,
        attention_type: str | None = None,
        include_self: bool = True,
        qk_norm: bool = False,
    ):
        super().__init__()
        self.config = config
        self.attention_type = config.attention_type if attention_type is None else attention_type
        self.include_self = include_self
        self.is_causal = config.is_decoder
        self.heads = (config.num_attention_heads, config.head_dim)
        self.scaling = config.head_dim**-0.5 if config.scale_attention and not qk_norm else 1.0
        self.score_scale = None
        if qk_norm:
            self.score_scale = nn.Parameter(torch.full((config.num_attention_heads,), float(config.score_scale_init)))

    @property
    def dropout(self) -> float:
        """Probability of dropping an attention weight."""
        return self.config.attention_dropout if self.training else 0.0

    def as_query(self, states: torch.Tensor) -> torch.Tensor:
        """Split projected queries `(B, T, H K)` into heads; normalised and scaled with `qk_norm`."""
        query = self.as_key(states)
        return query if self.score_scale is None else query * self.score_scale.abs()[:, None].to(query.dtype)

    def as_key(self, states: torch.Tensor) -> torch.Tensor:
        """Split projected keys `(B, T, H K)` into heads; normalised with `qk_norm`."""
        key = self.as_value(states)
        return key if self.score_scale is None else unit_length(key)

    def as_value(self, states: torch.Tensor) -> torch.Tensor:
        """Split projected values `(B, T, H K)` into heads, `(B, T, H, K)`."""
        return states.view(*states.shape[:-1], *self.heads)

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        complete: bool,
        bias_table: RelativePositionBias | None = None,
        attention_mask: torch.Tensor | None = None,
        query_start: int | torch.Tensor = 0,
        key_start: int | torch.Tensor = 0,
        cu_seqlens: torch.Tensor | None = None,
        shards: Shards | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Attend from every query to the keys it sees.

        Args:
            query: `(B, T, H, K)`.
            key: `(B, S, H, K)`.
            value: `(B, S, H, K)`.
            complete: Whether queries and keys are those of a complete sequence.
            bias_table: Relative position biases, or None.
            attention_mask: `(B, query_start + T)`, 1 = keep.
            query_start: Position of the first query in the sequence.
            key_start: Position of the first key.
            cu_seqlens: Bounds of the sequences in a packed batch; see `packing`. Without mask and earlier tokens.
            shards: The layout of a divided sequence, of which these are own tokens; see `packing`.
            **kwargs: Passed on to the attention function.

        Returns:
            Output `(B, T, H K)`, zero at masked tokens unless attention is full; and probabilities `(B, H, T, S)` if
            the attention function returns them.
        """
        local = self._is_local(attention_mask, shards, kwargs)
        if local and complete:
            if kwargs.get("output_attentions"):
                logger.warning_once("output_attentions needs attn_implementation='eager': local attention has none.")
            return self._attend_blocked(query, key, value, bias_table, attention_mask, cu_seqlens, shards), None
        trained = self.dropout > 0 or (torch.is_grad_enabled() and query.requires_grad)
        if local and query.shape[1] == 1 and self.is_causal and not trained and not kwargs.get("output_attentions"):
            output = self._attend_step(query, key, value, bias_table, attention_mask, query_start, key_start)
            return self._only_kept(output, attention_mask), None
        if self._sees_all(query, key, attention_mask, query_start, key_start):
            return self._attend_last(query, key, value, bias_table, **kwargs)
        queries = torch.arange(query.shape[1], device=query.device)[:, None] + query_start
        keys = torch.arange(key.shape[1], device=query.device)[None, :] + key_start
        visible = self._visible(queries, keys, attention_mask, cu_seqlens, query.shape[:2])
        sees = None
        if not self.include_self:  # some queries see no key
            sees = visible.any(-1, keepdim=True)
            visible = visible | ~sees  # a softmax needs at least one key
        bias = None
        if bias_table is not None:
            bias = self._scaled(bias_table(keys - queries), query.device)[None]
        mask = additive_mask(visible, bias, query.dtype, query.device)
        output, probabilities = self._attend_all(query, key, value, mask, **kwargs)
        if sees is not None:
            output = output.masked_fill(~sees.transpose(1, 2), 0)
        return self._only_kept(output.flatten(2), attention_mask), probabilities

    def _sees_all(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        attention_mask: torch.Tensor | None,
        query_start: int | torch.Tensor,
        key_start: int | torch.Tensor,
    ) -> bool:
        """Whether the host knows that the query is one token of full attention that sees every key, its own last."""
        full = self.attention_type == "full" and self.is_causal and self.include_self and attention_mask is None
        if not full or query.shape[1] > 1 or torch.compiler.is_compiling():
            return False
        known = isinstance(query_start, int) and isinstance(key_start, int)
        return known and query_start - key_start == key.shape[1] - 1

    def _attend_last(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        bias_table: RelativePositionBias | None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """`attend` of one token that sees every key, its own last."""
        bias = None if bias_table is None else bias_table(reach=key.shape[1] - 1, scale=self.score_scale)
        mask = None if bias is None else bias.to(query.device, query.dtype)[None, :, None]
        output, probabilities = self._attend_all(query, key, value, mask, **kwargs)
        return output.flatten(2), probabilities

    def _only_kept(self, output: torch.Tensor, attention_mask: torch.Tensor | None) -> torch.Tensor:
        """Set outputs `(B, T, H K)` of local attention to zero at masked tokens, as the blocked kernel does."""
        if self.attention_type == "full" or attention_mask is None or attention_mask.dim() != 2:
            return output
        return output.masked_fill(~attention_mask[:, -output.shape[1] :, None].to(torch.bool), 0)

    def _visible(
        self,
        queries: torch.Tensor,
        keys: torch.Tensor,
        attention_mask: torch.Tensor | None,
        cu_seqlens: torch.Tensor | None,
        shape: tuple[int, int],
    ) -> torch.Tensor | None:
        """Compute which keys each query sees.

        Args:
            queries: Positions of the queries in the sequence, `(T, 1)`.
            keys: Positions of the keys, `(1, S)`.
            attention_mask: `(B, query_start + T)`, 1 = keep; or `(B, 1, T, S)`, True = keep, or added to scores.
            cu_seqlens: See `attend`.
            shape: `(B, T)`.

        Returns:
            Boolean `(B or 1, 1, T, S)`, or None if every query sees every key.
        """
        rules = []
        if self.is_causal:
            rules.append(keys <= queries)
        if self.attention_type == "window":
            rules.append((queries - keys).abs() <= self.config.local_radius)
        if not self.include_self:
            rules.append(keys != queries)
        if attention_mask is not None and attention_mask.dim() == 4:
            rules.append(kept_pairs(attention_mask)[..., -queries.shape[0] :, : keys.shape[1]])
            attention_mask = None
        if attention_mask is not None:
            # a static cache has empty keys beyond the mask; causality hides them
            positions = keys[0].clamp_max(attention_mask.shape[-1] - 1)
            rules.append(attention_mask.to(torch.bool)[:, positions][:, None, None, :])
        first_query = first_key = 0  # chunks are counted from there
        if attention_mask is not None and self.attention_type == "chunk":
            first_query = first_key = first_kept(attention_mask)[:, None, None, None]
        if cu_seqlens is not None:
            first = row_starts(cu_seqlens, shape)[:, None]
            first_query, first_key = first[..., None], first[..., None, :]
            rules.append(first_query == first_key)
        if self.attention_type == "chunk":
            chunk_size = self.config.chunk_size
            chunk, own = queries - first_query, keys - first_key
            rules.append(chunk.div(chunk_size, rounding_mode="floor") == own.div(chunk_size, rounding_mode="floor"))
        if not rules:
            return None
        visible = functools.reduce(torch.logical_and, rules)
        return visible if visible.dim() == 4 else visible[None, None]

    def _attend_all(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Attend to all keys, by an attention function of transformers.

        Arguments and results are those of `attend`, but for the output, `(B, T, H, K)`, and the mask, which is added
        to the scores and broadcastable to `(B, H, T, S)`.
        """
        attend = choose_attention(self.config, query, mask, self.dropout)
        query, key, value = (x.transpose(1, 2) for x in (query, key, value))
        # never causal: the mask says which keys a query sees
        return attend(
            self, query, key, value, mask, dropout=self.dropout, scaling=self.scaling, is_causal=False, **kwargs
        )

    def _scaled(self, bias: torch.Tensor, device: torch.device) -> torch.Tensor:
        """Scale biases `(H, ...)` like the scores they are added to."""
        bias = bias.to(device)  # a shared table may be on another device than the layer
        if self.score_scale is None:
            return bias
        return bias * self.score_scale.abs().view(-1, *[1] * (bias.dim() - 1)).to(bias.dtype)

    def _attend_step(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        bias_table: RelativePositionBias | None,
        attention_mask: torch.Tensor | None,
        query_start: int | torch.Tensor,
        key_start: int | torch.Tensor,
    ) -> torch.Tensor:
        """`attend` from one token to cached keys, by the step kernel."""
        radius = chunk_size = None
        if self.attention_type == "window":
            reach = radius = min(self.config.local_radius, key.shape[1] - 1)
        else:
            chunk_size = self.config.chunk_size
            reach = chunk_size - 1
        bias = None if bias_table is None else bias_table(reach=reach, scale=self.score_scale)
        output = local_attention_step(
            query,
            key,
            value,
            query_start=query_start,
            key_start=key_start,
            bias=None if bias is None else bias.to(query.device),  # a shared table may be on another one
            radius=radius,
            chunk_size=chunk_size,
            include_self=self.include_self,
            attention_mask=attention_mask,
            scale=self.scaling,
        )
        return output.flatten(2)

    def _attend_blocked(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        bias_table: RelativePositionBias | None,
        attention_mask: torch.Tensor | None,
        cu_seqlens: torch.Tensor | None,
        shards: Shards | None,
    ) -> torch.Tensor:
        """`attend` over a complete sequence, by the blocked kernel."""
        shape = query.shape[:2]
        if cu_seqlens is not None:
            query, key, value = (x.flatten(0, 1)[None] for x in (query, key, value))
        length = query.shape[1] if shards is None else shards.longest
        window = self.attention_type != "chunk"
        reach = self.config.local_radius if window else self.config.chunk_size - 1
        if self.attention_type == "full":  # of a divided target: a window that holds all of it
            reach = length
        if not exports_any(length):
            reach = min(reach, max(length - 1, 0))
        offsets = torch.arange(-reach, 1 if self.is_causal else reach + 1, device=query.device)
        bias = None if bias_table is None else self._scaled(bias_table(offsets), query.device)
        if not self.include_self:
            wide = compute_dtype(query)
            bias = query.new_zeros(query.shape[2], len(offsets), dtype=wide) if bias is None else bias.to(wide)
            bias = bias.masked_fill(offsets == 0, HIDDEN)
        attend = local_attention if shards is None else divided_attention
        output = attend(
            query,
            key,
            value,
            **({"cu_seqlens": cu_seqlens} if shards is None else {"shards": shards}),
            bias=bias,
            radius=reach if window else None,
            chunk_size=None if window else reach + 1,
            causal=self.is_causal,
            attention_mask=attention_mask,
            scale=self.scaling,
            dropout=self.dropout,
        )
        if not self.include_self:
            if shards is None:
                sees = self._sees_others(query, attention_mask, cu_seqlens)
            else:
                sees = sees_others(shards, reach, attention_mask, None if window else reach + 1, query.device)
            output = output.masked_fill(~sees[..., None, None], 0)
        return output.reshape(*shape, query.shape[2] * value.shape[3])  # -1 is ambiguous without tokens

    def _is_local(self, attention_mask: torch.Tensor | None, shards: Shards | None, options: dict) -> bool:
        """Return whether the kernels can run, which handle complete sequences and single tokens.

        Raises:
            ValueError: They cannot, and the sequence is divided.
        """
        local = self.attention_type != "full" and (attention_mask is None or attention_mask.dim() == 2)
        local = local and self.config._attn_implementation != "eager"  # which asks for dense attention
        if shards is None:
            return local
        if self.attention_type == "full":
            if not (self.is_causal and self.config.is_encoder_decoder):  # targets are short
                check_divisible("full attention", shards.size)
            local = attention_mask is None or attention_mask.dim() == 2
            local = local and self.config._attn_implementation != "eager"
        if not local or options.get("output_attentions"):
            raise ValueError(
                "a divided sequence needs attention_mask of shape (batch, length), attn_implementation other than "
                "'eager', and no output_attentions"
            )
        return local

    def _sees_others(
        self, query: torch.Tensor, attention_mask: torch.Tensor | None, cu_seqlens: torch.Tensor | None
    ) -> torch.Tensor:
        """Whether a causal query sees an earlier kept token, `(B or 1, T)`."""
        position = torch.arange(query.shape[1], device=query.device)
        kept = torch.ones_like(position)[None] if attention_mask is None else attention_mask.to(torch.bool).long()
        first = first_kept(kept)[:, None] if cu_seqlens is None else sequence_starts(cu_seqlens, len(position))[None]
        if self.attention_type == "window":
            start = torch.maximum(position - self.config.local_radius, first).clamp_max(len(position) - 1)
        else:
            start = position - (position - first) % self.config.chunk_size
        before = kept.cumsum(-1) - kept
        return before > before.gather(1, start.clamp_min(0).expand_as(before))


class LocalSelfAttention(LocalAttention):
    """Windowed, chunked or full self-attention with T5's relative position bias (SPADE, section 3.2 and figure 1).

    Args:
        config: The stack's config.
        layer_idx: Index of the layer, for the cache.
        has_bias_table: Whether this layer has its own table of relative position biases.
        **options: Passed on to `LocalAttention`.
    """

    def __init__(self, config: PreTrainedConfig, layer_idx: int, *, has_bias_table: bool, **options):
        super().__init__(config, **options)
        self.layer_idx = layer_idx
        inner_size = config.num_attention_heads * config.head_dim
        self.q_proj = nn.Linear(config.hidden_size, inner_size, bias=config.attention_bias)
        self.k_proj = nn.Linear(config.hidden_size, inner_size, bias=config.attention_bias)
        self.v_proj = nn.Linear(config.hidden_size, inner_size, bias=config.attention_bias)
        self.o_proj = nn.Linear(inner_size, config.hidden_size, bias=config.attention_bias)
        if self.score_scale is None:
            # scores start with a standard deviation of K^-1/2 if weights have D^-1/2, so that the bias decides first
            self.q_proj.init_std = config.initializer_range / (self.scaling * config.head_dim)
        self.relative_attention_bias = make_bias_table(config) if has_bias_table else None
        if has_bias_table and self.score_scale is not None:
            self.relative_attention_bias.init_scale = 1 / config.score_scale_init  # the scores are multiplied by it

    def forward(
        self,
        hidden_states: torch.Tensor,
        bias_table: RelativePositionBias | None = None,
        attention_mask: torch.Tensor | None = None,
        past_key_values: Cache | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Attend.

        Args:
            hidden_states: `(B, T, D)`.
            bias_table: The stack's shared table; a layer's own table replaces it.
            attention_mask: `(B, P + T)`, 1 = keep.
            past_key_values: Cache of this stack; keys and values are appended.
            **kwargs: Passed on to the attention function.

        Returns:
            Output `(B, T, D)`, and probabilities `(B, H, T, P + T)` if the attention function returns them.
        """
        hidden_states = autocast_once(hidden_states)
        query = self.as_query(self.q_proj(hidden_states))
        key = self.as_key(self.k_proj(hidden_states))
        value = self.as_value(self.v_proj(hidden_states))
        past = cached_length(past_key_values, self.layer_idx)
        key_start, complete = 0, True
        if past_key_values is not None:
            total, key_start = past_key_values.get_mask_sizes(hidden_states.shape[1], self.layer_idx)
            # the cache adds no earlier keys, and a static one no empty ones
            complete = total == hidden_states.shape[1]
            key, value = past_key_values.update(key.transpose(1, 2), value.transpose(1, 2), self.layer_idx)
            key, value = key.transpose(1, 2), value.transpose(1, 2)
        output, probabilities = self.attend(
            query,
            key,
            value,
            complete=complete,
            bias_table=self.relative_attention_bias or bias_table,
            attention_mask=attention_mask,
            query_start=past,
            key_start=key_start,
            **kwargs,
        )
        return self.o_proj(output), probabilities


def unit_length(x: torch.Tensor) -> torch.Tensor:
    """Divide vectors by their length: x / sqrt(x·x + 1e-6), in float32 or wider."""
    wide = x.to(compute_dtype(x))
    return (wide * (wide.square().sum(-1, keepdim=True) + 1e-6).rsqrt()).to(x.dtype)
