"""SRformer's cross-attention, a mixin for the attention of T5 and BART (SRformer, section 3, figure 2).

Training and decoding share one path: keys, values and the states of recurrent attention are computed once per
document, and `Reading` maps each token of the target to a segment.

Shapes: B batch · D documents · L source length · T tokens of this call · H heads · K head width · M segments ·
S segment size · N slots · n tiles of g tokens.
"""

from collections.abc import Callable

import torch
from torch import nn
from transformers import PreTrainedConfig
from transformers import initialization as init
from transformers.cache_utils import EncoderDecoderCache

from ...kernels import segment_recurrence, segment_step
from ...kernels.precision import compute_dtype, full_precision
from ...layers.dropout import dropout
from .segments import Reading, SegmentCache, SegmentMemory, previous_slot

NORM_FLOOR = 1e-6
THRESHOLD_FLOOR = 1e-3
FLOAT16_LIMIT = torch.finfo(torch.float16).max - 1000


def _in_range(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Cast; for float16 clamp first, as T5 does, since infinities become NaN in the next product."""
    return x.clamp(-FLOAT16_LIMIT, FLOAT16_LIMIT).to(dtype) if dtype == torch.float16 else x.to(dtype)


class RAF(nn.Module):
    """Parameters of recurrent accumulate-and-fire neurons (SRformer, section 3.3 and appendix A.2).

    Args:
        width: Width of a head.
        leak: Initial leak.
        threshold: Initial threshold.
    """

    weight = None  # peft's IA3 reads it when it merges a saved module

    def __init__(self, width: int, *, leak: float, threshold: float):
        super().__init__()
        self.initial = (float(leak), float(threshold))
        self.linear = nn.Linear(width, width, bias=False)
        self.leak = nn.Parameter(torch.full((1,), float(leak)))
        self.threshold = nn.Parameter(torch.full((1,), float(threshold)))

    def reset_parameters(self) -> None:
        """Initialise leak and threshold; the model initialises the linear map."""
        init.constant_(self.leak, self.initial[0])
        init.constant_(self.threshold, self.initial[1])

    def forward(self, key: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the parameters as arguments of `segment_recurrence`, on the device of `key`.

        Mapping the identity gives the transposed weight exactly; offloaded weights are only there during a call.
        """
        with full_precision(key.device):
            identity = torch.eye(key.shape[-1], dtype=self.leak.dtype, device=key.device)
            weight = self.linear(identity).T.contiguous()
        return {"weight": weight, "leak": self.leak, "threshold": self.threshold.clamp_min(THRESHOLD_FLOOR)}


class RecurrentGate(nn.Module):
    """A trained weight of O_R per head, zero at first, since O_R is noise to a decoder trained without it.

    It is a module, since offloaded weights are only there during a call.

    Args:
        heads: H.
    """

    def __init__(self, heads: int):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(heads))

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        """Scale the states `(D, H, N, K, V)` and thereby O_R."""
        return states * self.weight[:, None, None, None].to(states.dtype)


class SegmentedCrossAttention:
    """Mixin for a parent's attention module: attends to segments instead of the whole document.

    `add_segments` adds the modules of the config's mode; the parent keeps its projections.
    """

    def add_segments(self, config: PreTrainedConfig, heads: int, width: int) -> None:
        """Add the parameters of the mode.

        Args:
            config: An SRformer's config.
            heads: H.
            width: K.
        """
        self.segment_shape = (heads, width)
        if config.has_neurons:
            self.raf = RAF(width, leak=config.leak_init, threshold=config.threshold_init)
        if config.has_gate:
            self.recurrent_gate = RecurrentGate(heads)
        if config.mix == "sigma":
            self.sigma = nn.Parameter(torch.full((1,), 0.5))
        if config.cross_attention_mode == "transformer_xl":
            self.rnn_k = nn.RNN(heads * width, heads * width, batch_first=True)
            self.rnn_v = nn.RNN(heads * width, heads * width, batch_first=True)

    def read(
        self,
        query: torch.Tensor,
        source: torch.Tensor,
        project_key: Callable[[torch.Tensor], torch.Tensor],
        project_value: Callable[[torch.Tensor], torch.Tensor],
        past_key_values: EncoderDecoderCache | None,
        reading: Reading,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Attend.

        Args:
            query: Projected, `(B, T, H K)`.
            source: The encoder's output from `cut`, `(D, M S, width)`; ignored if the cache has the documents.
            project_key: The parent's projection.
            project_value: The parent's projection.
            past_key_values: Cache, which keeps the `SegmentMemory`.
            reading: Maps tokens to segments.

        Returns:
            Output before its projection, `(B, T, H K)`; and with eager attention the probabilities of the keys that
            each token sees, `(B, H, T, keys)`.
        """
        memory = None
        if past_key_values is not None:
            cache = past_key_values.cross_attention_cache
            if not isinstance(cache, SegmentCache):
                cache = SegmentCache(reading.segments, reading.documents)
                past_key_values.cross_attention_cache = cache
            if past_key_values.is_updated.get(self.layer_idx):
                memory = cache.layers[self.layer_idx].memory
        if memory is None:
            memory = self.memorize(project_key(source), project_value(source), reading)
            if past_key_values is not None:
                cache.keep(self.layer_idx, memory)
                past_key_values.is_updated[self.layer_idx] = True
        query = query.unflatten(2, self.segment_shape)
        if self._is_step(query, memory, reading):
            return _in_range(self._step(query[:, 0], memory, reading), query.dtype).flatten(1)[:, None], None
        query = reading.lay_out(query) * self.scaling
        segmented = probabilities = recurrent = None
        if memory.keys is not None:
            segmented, probabilities = self._segmented(query, memory, reading)
        if memory.states is not None:
            recurrent = torch.matmul(query, reading.pick(memory.states))
            if memory.norm is not None:
                recurrent = recurrent / reading.of_rows(memory.norm)[:, :, None]
        mixed = self._mixed(segmented, recurrent)
        return reading.collect(_in_range(mixed, mixed.dtype)).flatten(2), probabilities

    def _is_step(self, query: torch.Tensor, memory: SegmentMemory, reading: Reading) -> bool:
        """Whether `segment_step` can decode this token."""
        return (
            reading.is_step
            and not torch.is_grad_enabled()
            and memory.mean_keys is None
            and not (self.training and self.dropout > 0)
            and self.config._attn_implementation != "eager"  # eager returns probabilities
            and memory.of_slots.dtype == query.dtype
        )

    def _step(self, query: torch.Tensor, memory: SegmentMemory, reading: Reading) -> torch.Tensor:
        """Attend from one token `(B, H, K)`, to `(B, H, K)`."""
        return segment_step(
            query,
            memory.keys,
            memory.values,
            memory.states,
            reading.picked.view(query.shape[:2]),
            visible=None if memory.keys is None or reading.visible is None else reading.visible.flatten(0, 3),
            norm=memory.norm,
            documents=reading.documents,
            sigma=self.sigma if self.config.mix == "sigma" else None,
            scale=self.scaling,
        )

    def memorize(self, key: torch.Tensor, value: torch.Tensor, reading: Reading) -> SegmentMemory:
        """Compute what a target reads from keys and values `(D, M S, H K)`; skip segments that no token visits."""
        segments, mode = reading.segments, self.config.cross_attention_mode
        if segments.kept is not None:
            key, value = (x.masked_fill(~segments.kept[..., None], 0) for x in (key, value))
        key, value = (
            x.unflatten(1, (segments.number, segments.size))
            .unflatten(3, self.segment_shape)
            .permute(0, 3, 1, 2, 4)
            .contiguous()
            for x in (key, value)
        )
        visited = segments.visited()
        states = norm = mean_keys = mean_values = None
        if self.config.has_states:
            states, norm = self._states_and_norm(key, value, visited)
        if mode == "recurrent":
            return SegmentMemory(None, None, states=states, norm=norm)
        if mode == "longt5":
            mean_keys, mean_values = (self._means(x, segments.kept) for x in (key, value))
        if visited is not None:
            index = visited.expand(key.shape[0], -1)[:, None, :, None, None]
            key, value = (x.gather(2, index.expand(-1, x.shape[1], -1, *x.shape[3:])) for x in (key, value))
        if mode == "transformer_xl":
            key, value = self._with_previous(key, self.rnn_k), self._with_previous(value, self.rnn_v)
        return SegmentMemory(key, value, mean_keys, mean_values, states, norm)

    def _states_and_norm(
        self, key: torch.Tensor, value: torch.Tensor, visited: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return states R, and norm(K) if R is not yet divided by it."""
        if key.dtype != torch.float16:
            return self._states(key, value, visited), self._norm(key)
        # sums over a long document, divided by a threshold of 0.1, overflow float16; divided by the norm, rarely
        states, norm = self._states(key.float(), value.float(), visited), self._norm(key.float())
        return _in_range(states if norm is None else states / norm[:, :, None], key.dtype), None

    def _states(self, key: torch.Tensor, value: torch.Tensor, visited: torch.Tensor | None) -> torch.Tensor:
        neurons = self.raf(key) if self.config.has_neurons else {}
        states = segment_recurrence(
            key,
            value,
            visited=visited,
            source="segment" if self.config.cross_attention_mode == "own_segment" else "complement",
            clamp=self.config.kv_clamp,
            surrogate=self.config.raf_surrogate,
            **neurons,
        )
        return self.recurrent_gate(states) if self.config.has_gate else states

    def _norm(self, key: torch.Tensor) -> torch.Tensor | None:
        """Return norm(K) of keys `(D, H, M, S, K)`, `(D, H, 1, K or 1)`."""
        if self.config.norm_type == "none" or self.config.cross_attention_mode == "no_norm":
            return None
        axes = (2,) if self.config.norm_type == "feature_l2" else (2, 3)
        wide = compute_dtype(key)
        norm = torch.linalg.vector_norm(key.flatten(2, 3), dim=axes, keepdim=True, dtype=wide)
        return norm.clamp_min(NORM_FLOOR).to(key.dtype)

    @staticmethod
    def _means(x: torch.Tensor, kept: torch.Tensor | None) -> torch.Tensor:
        """Average the kept rows of each segment, `(D, H, M, S, K)` to `(D, H, M, K)`."""
        if kept is None:
            return x.mean(3)
        counts = kept.unflatten(1, x.shape[2:4]).sum(2).clamp_min(1)
        return x.sum(3) / counts[:, None, :, None].to(x.dtype)

    @staticmethod
    def _with_previous(x: torch.Tensor, rnn: nn.RNN) -> torch.Tensor:
        """Prepend to each slot of `(D, H, N, S, K)` the output of an RNN at the previous slot."""
        tokens = x.permute(0, 2, 3, 1, 4)
        passed = rnn(tokens.flatten(3).flatten(1, 2))[0].view(tokens.shape).permute(0, 3, 1, 2, 4)
        return torch.cat([previous_slot(passed, 2), x], dim=3)

    def _segmented(
        self, query: torch.Tensor, memory: SegmentMemory, reading: Reading
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Attend from tiles `(B, H, n, g, K)` to their segments; return output, and with eager attention `read`'s."""
        keys, values = reading.pick(memory.keys), reading.pick(memory.values)
        scores = torch.matmul(query, keys.mT)
        if memory.mean_keys is not None:
            means = reading.of_rows(memory.mean_keys)[:, :, None]
            scores = torch.cat([scores, torch.matmul(query, means.mT)], dim=-1)
        if reading.visible is not None:
            scores = scores.masked_fill(~reading.visible, torch.finfo(scores.dtype).min)
        probabilities = scores.softmax(-1, dtype=compute_dtype(scores)).to(values.dtype)
        if reading.visible is not None:
            probabilities = probabilities.masked_fill(~reading.visible, 0)  # a segment may have no key at all
        probabilities = dropout(probabilities, self.dropout, self.training)
        returned = None
        if self.config._attn_implementation == "eager":
            returned = reading.collect(probabilities).transpose(1, 2)
            probabilities = reading.lay_out(returned.transpose(1, 2))  # the output's gradient passes what is returned
        if memory.mean_values is None:
            return torch.matmul(probabilities, values), returned
        own, shared = probabilities.split([values.shape[3], probabilities.shape[-1] - values.shape[3]], dim=-1)
        means = reading.of_rows(memory.mean_values)[:, :, None]
        return torch.matmul(own, values) + torch.matmul(shared, means), returned

    def _mixed(self, segmented: torch.Tensor | None, recurrent: torch.Tensor | None) -> torch.Tensor:
        if segmented is None or recurrent is None:
            return recurrent if segmented is None else segmented
        if self.config.mix == "sigma":
            sigma = self.sigma.to(segmented.dtype)
            return sigma * segmented + (1 - sigma) * recurrent
        return segmented + recurrent
