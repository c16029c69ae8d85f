"""Context states, a summary of earlier tokens, and attention to them (Fathi et al. 2023, section 3.2).

Shapes: B batch · T length · P tokens already read · D width · H heads · K head width · W window · n windows ·
C filters · S states that a window attends to.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional as F
from transformers.processing_utils import Unpack
from transformers.utils import TransformersKwargs

from ...context_parallel import Shards, nothing
from ...kernels.packed import to_rows
from ...layers.implicit_filter import ImplicitConv
from ...layers.s4 import S4
from ..local_attention import LocalAttention
from ..state_cache import without_first
from .configuration_bst import BstConfig
from .divided import check_windows, fetch_tokens, fetch_windows, own_tokens, own_windows
from .windows import Span, from_windows, to_windows, window_of

Pair = tuple[torch.Tensor, torch.Tensor]
"""Keys and values."""
PairAt = Callable[[int, torch.Tensor], Pair]
"""Keys and values of the windows of some rows, from the index of a stop and the rows."""


class ContextState(NamedTuple):
    """Cached state of attention to context states.

    Attributes:
        filter: State of the filters.
        key: Keys of the last tokens' states, `(B, ≤W-1, H, K)`; with a shift, keys of the states that the next token's
            window attends to, `(B, S, H, K)`.
        value: Values, shaped like `key`.
        next_key: With a shift and a state per token: keys of the last tokens' states, `(B, W, H, K)`.
        next_value: Values, shaped like `next_key`.
    """

    filter: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    next_key: torch.Tensor | None = None
    next_value: torch.Tensor | None = None


class HeadwiseLinear(nn.Module):
    """A linear map per head, of an input per head.

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
    """Attention to context states, the outputs of filters (BST, section 3.2, pseudocodes 1 to 5).

    Y_c = h_c * u + D_c u,  for the filters h_c of a state space model or of a network, per channel;
    single head: keys and values of every head from Y_1;  multi head: those of head c from Y_c.

    Subclasses choose in `attend_to_states` which states a query attends to.

    Args:
        config: The config.
        filters: C.
        headwise: Whether each head projects its own input to keys and values.
    """

    def __init__(self, config: BstConfig, *, filters: int, headwise: bool):
        super().__init__(config, attention_type="chunk", qk_norm=config.qk_norm)
        heads, width = config.num_attention_heads, config.hidden_size
        inner = heads * config.head_dim
        self.headwise = headwise
        self.filter = make_filter(config, filters)
        self.q_proj = nn.Linear(width, inner, bias=False)
        if headwise:
            self.k_heads = HeadwiseLinear(heads, width, config.head_dim)
            self.v_heads = HeadwiseLinear(heads, width, config.head_dim)
        else:
            self.k_proj = nn.Linear(width, inner, bias=False)
            self.v_proj = nn.Linear(width, inner, bias=False)
        self.o_proj = nn.Linear(inner, width, bias=False)
        self.lift_weight = self.lift_bias = self.initial_states = self.state_embedding = None

    def forward(
        self,
        hidden_states: torch.Tensor,
        filter_inputs: torch.Tensor,
        span: Span,
        state: ContextState | None,
        return_state: bool,
        **kwargs: Unpack[TransformersKwargs],
    ) -> tuple[torch.Tensor, ContextState | None]:
        """Attend.

        Args:
            hidden_states: Input of the queries, `(B, T, D)`.
            filter_inputs: u, `(B, T, D)`.
            span: Position of these tokens.
            state: State before these tokens.
            return_state: Whether to return the state after them.
            **kwargs: Passed on to the attention function.

        Returns:
            `(B, T, D)`, and the state or None.
        """
        query = self.as_query(self.q_proj(hidden_states))
        if span.attention_mask is not None:
            kept = span.attention_mask[:, -query.shape[1] :].to(torch.bool)
            filter_inputs = filter_inputs.masked_fill(~kept[..., None], 0)
        kwargs.pop("output_attentions", None)  # only self-attention's are recorded
        output, state = self.attend_to_states(query, filter_inputs, span, state, return_state, **kwargs)
        return self.o_proj(output.flatten(2)), state

    def attend_to_states(
        self,
        query: torch.Tensor,
        u: torch.Tensor,
        span: Span,
        state: ContextState | None,
        return_state: bool,
        **kwargs: Unpack[TransformersKwargs],
    ) -> tuple[torch.Tensor, ContextState | None]:
        """Attend from queries `(B, T, H, K)` to states of the inputs u, `(B, T, D)`.

        Returns:
            `(B, T, H K)` or `(B, T, H, K)`, and the state after these tokens or None.
        """
        raise NotImplementedError

    def _project(self, states: torch.Tensor) -> Pair:
        """Project the filters' outputs `(C, B, T, D)` to keys and values, each `(B, T, H, K)`."""
        if self.headwise:
            key, value = self.k_heads(states), self.v_heads(states)
        else:
            key, value = self._lifted(self.k_proj, states[0]), self._lifted(self.v_proj, states[0])
        return self.as_key(key), self.as_value(value)

    def _lifted(self, projection: nn.Module, states: torch.Tensor) -> torch.Tensor:
        """Project states lifted to y w_h + b_h for each head h, without computing the lift: all maps are linear."""
        projected = projection(states)
        if self.lift_weight is None:
            return projected
        ones = projection(torch.ones_like(states[0, :1]))
        heads = (self.config.num_attention_heads, self.config.head_dim)
        lifted = projected.unflatten(-1, heads) * self.lift_weight[:, None]
        return (lifted + ones.view(heads) * self.lift_bias[:, None]).flatten(-2)


class TokenContext(BstContext):
    """Attention to one state per token of the query's window, up to the query (single and multi head)."""

    def __init__(self, config: BstConfig):
        multi_head = config.context_type == "multi_head"
        super().__init__(config, filters=config.num_attention_heads if multi_head else 1, headwise=multi_head)
        if config.context_lift:
            self.lift_weight = nn.Parameter(torch.empty(config.num_attention_heads))
            self.lift_bias = nn.Parameter(torch.empty(config.num_attention_heads))

    def attend_to_states(
        self,
        query: torch.Tensor,
        u: torch.Tensor,
        span: Span,
        state: ContextState | None,
        return_state: bool,
        **kwargs: Unpack[TransformersKwargs],
    ) -> tuple[torch.Tensor, ContextState | None]:
        """Attend in chunks of W, causally; see `BstContext`."""
        before = None if state is None else state.filter
        key, value, after = self._filtered_pair(u, before, return_state, span.cu_seqlens, span.shards)
        if state is not None:
            key, value = torch.cat([state.key, key], dim=1), torch.cat([state.value, value], dim=1)
        held = key.shape[1] - query.shape[1]
        output, _ = self.attend(
            query,
            key,
            value,
            complete=state is None,
            attention_mask=span.attention_mask,
            query_start=span.past,
            key_start=span.past - held,
            cu_seqlens=span.cu_seqlens,
            shards=span.shards,
            **kwargs,
        )
        if not return_state:
            return output, None
        dropped = max(0, key.shape[1] - self.config.window + 1)
        return output, ContextState(after, without_first(key, dropped, 1), without_first(value, dropped, 1))

    def _filtered_pair(
        self,
        u: torch.Tensor,
        state: torch.Tensor | None,
        return_state: bool,
        cu_seqlens: torch.Tensor | None = None,
        shards: Shards | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Return keys and values `(B, T, H, K)` of the filters' outputs at all tokens, and the filters' next state."""
        if return_state:
            outputs, state = self.filter(u, state=state, return_state=True)
        else:
            outputs, state = self.filter(u, cu_seqlens=cu_seqlens, shards=shards), None
        return *self._project(outputs if outputs.dim() == 4 else outputs[None]), state


class WindowBeforeContext(BstContext):
    """Attention to all states of the window before the query's; in the first window to trained states.

    Subclasses define the states of a window in `_first_pair`, `_window_pairs`, `_remember` and `_read`.
    """

    def attend_to_states(
        self,
        query: torch.Tensor,
        u: torch.Tensor,
        span: Span,
        state: ContextState | None,
        return_state: bool,
        **kwargs: Unpack[TransformersKwargs],
    ) -> tuple[torch.Tensor, ContextState | None]:
        """Attend to the window before; see `BstContext`."""
        shape = query.shape
        if span.shards is not None:
            check_windows(span.shards, span.attention_mask)
            return self._attend_divided(query, u, span.shards, **kwargs), None
        if span.cu_seqlens is not None:  # windows start with each sequence
            (query, kept), (u, _) = (to_rows(x.flatten(0, 1)[None], span.cu_seqlens) for x in (query, u))
            output, _ = self._attend_sequence(query, u, None, False, **kwargs)
            return output[kept].view(shape), None
        if state is None:
            return self._attend_sequence(query, u, span.first, return_state, **kwargs)
        return self._attend_from_state(query, u, span.starts, state, **kwargs)

    def _attend_divided(
        self, query: torch.Tensor, u: torch.Tensor, shards: Shards, **kwargs: Unpack[TransformersKwargs]
    ) -> torch.Tensor:
        """Attend from own queries of a divided sequence."""
        key, value = self._divided_pairs(u, shards)
        first = self._first_pair(query.shape[0])
        if not shards.own.length:
            return nothing(query.shape, query, query, key, value, *first)
        if shards.own.start >= self.config.window:
            first = [x[:, :0] for x in first]  # the first window's states get a gradient on every process
        key, value = (torch.cat(pair, dim=1) for pair in zip(first, (key, value), strict=True))
        windows = own_windows(shards, self.config.window, query)
        output, _ = self._attend_all(*(x.flatten(0, 1) for x in (windows, key, value)), **kwargs)
        return own_tokens(shards, self.config.window, output.unflatten(0, windows.shape[:2]))

    def _divided_pairs(self, u: torch.Tensor, shards: Shards) -> Pair:
        """Return keys and values `(B, n, S, H, K)` of the windows before those that hold own tokens."""
        raise NotImplementedError

    def _first_pair(self, batch: int) -> Pair:
        """Return keys and values `(B, 1, S, H, K)` for the first window."""
        raise NotImplementedError

    def _window_pairs(self, u: torch.Tensor) -> Pair:
        """Return keys and values `(B, n, S, H, K)` of the states of complete windows, from inputs `(B, n W, D)`."""
        raise NotImplementedError

    def _remember(
        self, state: ContextState, key: torch.Tensor, value: torch.Tensor, first: torch.Tensor | None, length: int
    ) -> ContextState:
        """Add to the state after a sequence what is needed of its windows' keys and values `(B, n, S, H, K)`."""
        return state

    def _read(self, u: torch.Tensor, state: ContextState, stops: list[int]) -> tuple[ContextState, PairAt]:
        """Read inputs after a state.

        Args:
            u: `(B, T, D)`.
            state: State before these tokens.
            stops: Numbers of tokens after which a window may end, the last of them T.

        Returns:
            The next state, with the old `key` and `value`; and a function of the index of a stop and of the rows whose
            window ends there, `(r,)`, that returns keys and values of this window, each `(r, S, H, K)`.
        """
        raise NotImplementedError

    def _attend_sequence(
        self,
        query: torch.Tensor,
        u: torch.Tensor,
        first: torch.Tensor | None,
        return_state: bool,
        **kwargs: Unpack[TransformersKwargs],
    ) -> tuple[torch.Tensor, ContextState | None]:
        """Attend over a complete sequence, cut into windows."""
        (batch, length), window = query.shape[:2], self.config.window
        count = -(-length // window)
        key, value = self._first_pair(batch)
        # only later tokens read the last window's states
        if wanted := count if return_state else count - 1:
            grid = to_windows(u, first, count, window).flatten(1, 2)
            later = self._window_pairs(grid[:, : wanted * window])
            key, value = (torch.cat(pair, dim=1) for pair in zip((key, value), later, strict=True))
        windows = to_windows(query, first, count, window)
        output, _ = self._attend_all(*(x[:, :count].flatten(0, 1) for x in (windows, key, value)), **kwargs)
        output = from_windows(output.unflatten(0, (batch, count)), first, length)
        if not return_state:
            return output, None
        end = length if first is None else (length - first)[:, None, None, None, None]
        read = (window_of(x, end // window) for x in (key, value))
        state = ContextState(self.filter.follow(u, None, [length])[0], *read)
        return output, self._remember(state, *later, first, length)

    def _attend_from_state(
        self,
        query: torch.Tensor,
        u: torch.Tensor,
        starts: list[int],
        state: ContextState,
        **kwargs: Unpack[TransformersKwargs],
    ) -> tuple[torch.Tensor, ContextState]:
        """Attend after a state, in parts that each lie within one window."""
        length, window = query.shape[1], self.config.window
        turns = {
            start: range(window - (start % window if start > 0 else start), length + 1, window) for start in starts
        }
        stops = sorted({length}.union(*turns.values()))
        state, pair_at = self._read(u, state, stops)
        attended, done = [], 0
        for index, stop in enumerate(stops):
            output, _ = self._attend_all(query[:, done:stop], state.key, state.value, **kwargs)
            attended.append(output)
            done = stop
            turning = [row for row, start in enumerate(starts) if stop in turns[start]]
            if not turning:
                continue
            turning = torch.tensor(turning, device=u.device)
            key, value = pair_at(index, turning)
            state = state._replace(
                key=state.key.index_copy(0, turning, key), value=state.value.index_copy(0, turning, value)
            )
        return torch.cat(attended, dim=1), state


class ShiftedTokenContext(WindowBeforeContext, TokenContext):
    """Attention to the states of all tokens of the window before (single and multi head)."""

    def __init__(self, config: BstConfig):
        super().__init__(config)
        filters = config.num_attention_heads if self.headwise else 1
        self.initial_states = nn.Parameter(torch.empty(filters, config.window, config.hidden_size))

    def _first_pair(self, batch: int) -> Pair:
        key, value = (x[:, None] for x in self._project(self.initial_states[:, None]))
        return key.expand(batch, -1, -1, -1, -1), value.expand(batch, -1, -1, -1, -1)

    def _window_pairs(self, u: torch.Tensor) -> Pair:
        key, value, _ = self._filtered_pair(u, None, False)
        return key.unflatten(1, (-1, self.config.window)), value.unflatten(1, (-1, self.config.window))

    def _divided_pairs(self, u: torch.Tensor, shards: Shards) -> Pair:
        key, value, _ = self._filtered_pair(u, None, False, shards=shards)
        return fetch_tokens(shards, self.config.window, key, value)

    def _remember(
        self, state: ContextState, key: torch.Tensor, value: torch.Tensor, first: torch.Tensor | None, length: int
    ) -> ContextState:
        own = (self._last_of(from_windows(x, first, length)) for x in (key, value))
        return ContextState(*state[:3], *own)

    def _read(self, u: torch.Tensor, state: ContextState, stops: list[int]) -> tuple[ContextState, PairAt]:
        *new, after = self._filtered_pair(u, state.filter, True)
        own = [torch.cat(pair, dim=1) for pair in zip(state[3:], new, strict=True)]
        state = state._replace(filter=after, next_key=self._last_of(own[0]), next_value=self._last_of(own[1]))
        return state, lambda index, rows: tuple(x[rows, stops[index] : stops[index] + self.config.window] for x in own)

    def _last_of(self, x: torch.Tensor) -> torch.Tensor:
        """Return the last W tokens of `(B, T, H, K)`, with zeros before the first."""
        x = without_first(x, max(0, x.shape[1] - self.config.window), 1)
        return F.pad(x, (0, 0, 0, 0, self.config.window - x.shape[1], 0))


class MultiFilterContext(WindowBeforeContext):
    """Attention to the outputs of S filters at the end of the window before.

    Keys and values of every head come from [Y_c at the window's end + e_c] for all c, with trained e_c.
    """

    def __init__(self, config: BstConfig):
        super().__init__(config, filters=config.num_context_states, headwise=config.context_lift)
        heads, states, width = config.num_attention_heads, config.num_context_states, config.hidden_size
        self.lift = nn.Linear(width, heads * width) if config.context_lift else None
        self.state_embedding = nn.Parameter(torch.empty(states, width))
        self.initial_states = nn.Parameter(torch.empty(states, width))

    def _first_pair(self, batch: int) -> Pair:
        key, value = self._pair(self.initial_states[None, None])
        return key.expand(batch, -1, -1, -1, -1), value.expand(batch, -1, -1, -1, -1)

    def _window_pairs(self, u: torch.Tensor) -> Pair:
        return self._pair(self.filter.sample(u, self.config.window))

    def _divided_pairs(self, u: torch.Tensor, shards: Shards) -> Pair:
        sampled = self.filter.sample_divided(u, self.config.window, shards)
        return fetch_windows(shards, self.config.window, *self._pair(sampled))

    def _read(self, u: torch.Tensor, state: ContextState, stops: list[int]) -> tuple[ContextState, PairAt]:
        states = self.filter.follow(u, state.filter, stops)

        def pair_at(index: int, rows: torch.Tensor) -> Pair:
            sampled = self.filter.read(states[index][rows], u[rows, stops[index] - 1])
            key, value = self._pair(sampled[:, None])
            return key[:, 0], value[:, 0]

        return state._replace(filter=states[-1]), pair_at

    def _pair(self, states: torch.Tensor) -> Pair:
        """Project outputs at the ends of windows, `(B, n, S, D)`, to keys and values `(B, n, S, H, K)`."""
        count = states.shape[1]
        states = (states.to(self.state_embedding.dtype) + self.state_embedding).flatten(1, 2)
        if self.lift is None:
            states = states[None]
        else:
            lifted = self.lift(states.to(self.lift.weight.dtype))
            states = lifted.unflatten(-1, (self.config.num_attention_heads, -1)).movedim(-2, 0)
        key, value = self._project(states)
        shape = (count, self.config.num_context_states)
        return key.unflatten(1, shape), value.unflatten(1, shape)


def make_context(config: BstConfig) -> BstContext:
    """Build one layer's attention to context states."""
    if config.context_type == "multi_filter":
        return MultiFilterContext(config)
    return TokenContext(config) if config.context_shift == "none" else ShiftedTokenContext(config)


def make_filter(config: BstConfig, filters: int) -> Any:
    """Build the filters of one layer."""
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
