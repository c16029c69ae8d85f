"""Segments of documents, the map from tokens of the target to segments, and the cache of documents.

All of these are integer tensors, so that nothing waits for a device, although documents differ in length and a token's
position comes from the cache.

Shapes: B batch · L source length · T tokens of this call · M segments of the longest document · S segment size ·
N slots: the segments that a target visits, in order · n tiles of g tokens that read one segment each · H heads.
"""

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import nn
from transformers import PreTrainedConfig
from transformers.cache_utils import DynamicCache, DynamicLayer
from transformers.utils import logging

from ...kernels.dispatch import exports_to_onnx

logger = logging.get_logger(__name__)


@dataclass(frozen=True)
class Segments:
    """Segments of a batch of documents, and which of them a target visits."""

    size: int
    """S."""
    number: int
    """M."""
    horizon: int
    """Target length q over which the segments are spread: token t reads segment ``min(t m // q, m - 1)``."""
    counts: torch.Tensor | None = None
    """Number m of segments of each document, `(B,)`; M when None."""
    kept: torch.Tensor | None = None
    """Keys that are part of sums, `(B or 1, M S)`; all when None."""
    visible: torch.Tensor | None = None
    """Keys that the softmax of each slot sees, `(B or 1, N, keys of a slot)`; all when None."""
    device: torch.device | None = None
    """Device of the documents."""

    @property
    def slots(self) -> int:
        """N: a target with fewer tokens than segments visits one segment per token, and the last at its end."""
        return min(self.number, self.horizon + 1)

    def visited(self) -> torch.Tensor | None:
        """Return the segment of each slot, `(B or 1, N)`; None if slots are segments."""
        if self.slots == self.number:
            return None
        slots = torch.arange(self.slots, device=self.device)
        if self.counts is None:
            return (slots * self.number // self.horizon).clamp_max(self.number - 1)[None]
        counts = self.counts[:, None]
        spread = torch.where(counts <= self.horizon, slots, slots * counts // self.horizon)
        return torch.minimum(spread, counts - 1)

    def slots_at(self, positions: torch.Tensor) -> torch.Tensor:
        """Return the slots of tokens at these positions of the target, `(T,)` to `(B or 1, T)`, ascending."""
        if self.counts is None:
            if self.number > self.horizon:
                return positions.clamp_max(self.slots - 1)[None]
            return (positions * self.number // self.horizon).clamp_max(self.number - 1)[None]
        counts = self.counts[:, None]
        segments = torch.minimum(positions * counts // self.horizon, counts - 1)
        return torch.where(counts <= self.horizon, segments, positions.clamp_max(self.horizon))

    def numbers_at(self, position: int) -> tuple[int, ...] | None:
        """Return `slots_at` a position as numbers, of each document or of all; None if the host would have to wait."""
        if self.counts is not None and self.counts.device.type != "cpu":
            return None
        counts = [self.number] if self.counts is None else self.counts.tolist()
        last = min(position, self.horizon)
        return tuple(min(position * m // self.horizon, m - 1) if m <= self.horizon else last for m in counts)


def cut(
    config: PreTrainedConfig, states: torch.Tensor, attention_mask: torch.Tensor | None, horizon: int
) -> tuple[Segments, torch.Tensor]:
    """Cut the documents of a batch into segments.

    Args:
        config: An SRformer's config.
        states: The encoder's output, `(B, L, D)`.
        attention_mask: `(B, L)` or `(B, 1, 1, L)`, boolean or 1 = keep; or `(B, 1, 1, L)`, added to scores.
        horizon: Length of the target.

    Returns:
        The segments, and the encoder's output padded to M segments. With segments per document, each document is moved
        to the start of its row.
    """
    batch, length, _ = states.shape
    size, number = config.segment_size, -(-length // config.segment_size)
    pad = number * size - length
    is_partial = isinstance(pad, torch.SymInt) or pad > 0  # a symbolic length may have a last segment of any size
    visible = None if attention_mask is None else _kept_tokens(attention_mask, batch, length)
    counts = None
    if visible is not None and config.per_example_segments:
        lengths = visible.sum(1)
        counts = (lengths + size - 1).div(size, rounding_mode="floor").clamp_min(1)
        # kept tokens first, so that segments start at the document's first token
        position = torch.arange(length, device=states.device)
        order = torch.where(visible, position, position + length).argsort(dim=1)  # ONNX has no stable sort
        states = states.gather(1, order[..., None].expand(states.shape))  # take_along_dim has no symbolic sizes
        visible = position < lengths[:, None]
    if number > horizon:
        _warn_of_skipped_segments(number, counts, horizon)
    kept = visible
    if config.mask_mode == "official":
        # sums include padding; T5's softmax hides it, except in the tail of the last segment; BART's sees all
        kept = None
        if visible is not None:
            visible = None if config.parent_model_type == "bart" else nn.functional.pad(visible, (0, pad), value=True)
    elif is_partial:
        visible = states.new_ones(1, length, dtype=torch.bool) if visible is None else visible
        visible = nn.functional.pad(visible, (0, pad))
    if is_partial:
        kept = states.new_ones(1, length, dtype=torch.bool) if kept is None else kept
        kept = nn.functional.pad(kept, (0, pad))
        states = nn.functional.pad(states, (0, 0, 0, pad))
    segments = Segments(size=size, number=number, horizon=horizon, counts=counts, kept=kept, device=states.device)
    if visible is not None:
        segments = replace(segments, visible=_visible(config.cross_attention_mode, segments, visible))
    return segments, states


def _visible(mode: str, segments: Segments, visible: torch.Tensor) -> torch.Tensor:
    """Return which keys the softmax of each slot sees, from the visible tokens `(B or 1, M S)`."""
    of_segments = visible.unflatten(1, (segments.number, segments.size))
    visited = segments.visited()
    visible = of_segments
    if visited is not None:
        rows = max(visited.shape[0], of_segments.shape[0])
        index = visited[..., None].expand(rows, -1, segments.size)
        visible = of_segments.expand(rows, -1, -1).gather(1, index)
    if mode == "transformer_xl":
        return torch.cat([previous_slot(visible, 1), visible], dim=2)
    if mode == "longt5":
        means = of_segments.any(2)[:, None].expand(-1, segments.slots, -1)
        rows = max(means.shape[0], visible.shape[0])
        return torch.cat([visible.expand(rows, -1, -1), means.expand(rows, -1, -1)], dim=2)
    return visible


def previous_slot(x: torch.Tensor, dim: int) -> torch.Tensor:
    """Shift by one slot; the first slot precedes itself (Transformer-XL)."""
    slots = x.shape[dim]
    return torch.cat([x.narrow(dim, 0, 1), x.narrow(dim, 0, slots - 1)], dim=dim)


def _kept_tokens(attention_mask: torch.Tensor, batch: int, length: int) -> torch.Tensor:
    """Return the boolean form of an attention mask, `(B, L)`."""
    kept = attention_mask
    if kept.dim() == 4 and kept.shape[1] == kept.shape[2] == 1:
        kept = (kept if kept.dtype == torch.bool else kept == 0)[:, 0, 0]
    if kept.shape != (batch, length):
        raise ValueError(
            f"attention_mask must be of shape (batch, length) = {(batch, length)}, or (batch, 1, 1, length); "
            f"got {tuple(kept.shape)}"
        )
    return kept.to(torch.bool)


_told: set[str] = set()


def _warn_of_skipped_segments(number: int, counts: torch.Tensor | None, horizon: int) -> None:
    if torch.compiler.is_compiling() or "skipped" in _told:
        return
    most = number if counts is None else int(counts.max())  # segments of padding are not read anyway
    if most <= horizon:
        return
    _told.add("skipped")
    logger.warning(
        f"A document has {most} segments, but its target only {horizon} tokens, each of which attends to one segment: "
        f"{most - horizon} segments are skipped. A longer target or decoder_horizon, or a larger segment_size, reads "
        f"all of them. This warning appears once."
    )


class Reading:
    """Map from the tokens of one decoder call to slots of their documents.

    Consecutive tokens mostly read the same segment. They are arranged in tiles of g tokens that read one segment each,
    so that keys and states are fetched once per tile, not once per token. A decoding step is one tile of one token.

    Args:
        segments: How the documents are cut.
        length: T.
        past: Number of earlier tokens of the target.
        batch: Rows B of the target.
        heads: H.
        documents: Document of each row, `(B,)`; row b reads document b when None.
        device: Device of the indices.
    """

    def __init__(
        self,
        segments: Segments,
        length: int,
        *,
        past: int | torch.Tensor,
        batch: int,
        heads: int,
        documents: torch.Tensor | None,
        device: torch.device,
    ):
        self.segments = segments
        self.documents = documents
        slots = segments.slots_at(torch.arange(length, device=device) + past)
        if documents is not None and slots.shape[0] > 1:
            slots = slots[documents]
        # a complete target without padding reads all slots in order: no index is needed
        in_turn = documents is None and segments.counts is None and isinstance(past, int) and past == 0
        if in_turn and length == segments.horizon:
            self.tiles = min(length, segments.number)
            self.rows = -(-length // self.tiles)
        elif length <= segments.slots:
            in_turn, self.tiles, self.rows = False, length, 1
        else:
            # enough for documents of any length; at most one tile in three is empty
            in_turn, self.rows = False, 2 * -(-length // segments.slots)
            self.tiles = segments.slots + length // self.rows
        self.index = self.position = None
        if self.rows > 1:
            self.index, self.position, slots = self._tiled(slots)
        self.shape = (batch, heads, self.tiles)
        self.picked = None if in_turn else self._picked(slots, device)
        self.visible = self._visible(slots, in_turn)

    @property
    def is_step(self) -> bool:
        """Whether this is a decoding step, for which `picked` holds the index of each row's slot."""
        return self.tiles == self.rows == 1 and self.picked is not None

    def _tiled(self, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Arrange tokens in tiles; return token at each tile position, position of each token, slot of each tile."""
        count, length = slots.shape
        tokens = torch.arange(length, device=slots.device).expand(count, -1)
        if exports_to_onnx():  # it has no cumulative maximum
            first = (slots[:, None] < slots[..., None]).sum(-1)
        else:
            starts = torch.ones_like(slots, dtype=torch.bool)
            starts[:, 1:] = slots[:, 1:] != slots[:, :-1]
            first = torch.where(starts, tokens, 0).cummax(1).values
        row = (tokens - first) % self.rows
        tile = (row == 0).cumsum(1) - 1
        position = tile * self.rows + row
        index = slots.new_zeros(count, self.tiles * self.rows).scatter_(1, position, tokens)
        return index, position, slots.new_zeros(count, self.tiles).scatter_(1, tile, slots)

    def _picked(self, slots: torch.Tensor, device: torch.device) -> torch.Tensor:
        """Return the index of each tile's slot in the flattened first three dimensions of `(documents, H, N, ...)`."""
        batch, heads, _ = self.shape
        documents = torch.arange(batch, device=device) if self.documents is None else self.documents
        strips = documents[:, None] * heads + torch.arange(heads, device=device)
        return (strips[:, :, None] * self.segments.slots + slots[:, None]).flatten()

    def _visible(self, slots: torch.Tensor, in_turn: bool) -> torch.Tensor | None:
        visible = self.segments.visible
        if visible is None:
            return None
        if in_turn:
            visible = visible[:, : self.tiles]
        else:
            if self.documents is not None and visible.shape[0] > 1:
                visible = visible[self.documents]
            rows = max(visible.shape[0], slots.shape[0])
            index = slots.expand(rows, -1)[..., None].expand(-1, -1, visible.shape[2])
            visible = visible.expand(rows, -1, -1).gather(1, index)
        return visible[:, None, :, None]

    def lay_out(self, query: torch.Tensor) -> torch.Tensor:
        """Arrange `(B, T, H, K)` in tiles, `(B, H, n, g, K)`."""
        return _taken(query, self.index).unflatten(1, (self.tiles, self.rows)).permute(0, 3, 1, 2, 4)

    def collect(self, output: torch.Tensor) -> torch.Tensor:
        """Return tiles `(B, H, n, g, V)` to the order of tokens, `(B, T, H, V)`."""
        return _taken(output.permute(0, 2, 3, 1, 4).flatten(1, 2), self.position)

    def pick(self, x: torch.Tensor) -> torch.Tensor:
        """Select from `(documents, H, N, ...)` each tile's slot, `(B, H, n, ...)`."""
        if self.picked is None:
            return x[:, :, : self.tiles]
        return x.flatten(0, 2).index_select(0, self.picked).unflatten(0, self.shape)

    def of_rows(self, x: torch.Tensor) -> torch.Tensor:
        """Select from `(documents, ...)` each row's document, `(B, ...)`."""
        return x if self.documents is None else x.index_select(0, self.documents)


def _taken(x: torch.Tensor, index: torch.Tensor | None) -> torch.Tensor:
    """Select entries of dimension 1 by an index `(1 or B, entries)`."""
    if index is None:
        return x
    if index.shape[0] == 1:
        return x.index_select(1, index[0])
    return x.gather(1, index[..., None, None].expand(-1, -1, *x.shape[2:]))


class SegmentMemory(NamedTuple):
    """Keys, values and states of D documents in one layer, computed once."""

    keys: torch.Tensor | None
    """For each slot's softmax, `(D, H, N, keys, K)`; None without segmented attention."""
    values: torch.Tensor | None
    mean_keys: torch.Tensor | None = None
    """Mean key of each segment, seen by all slots, `(D, H, M, K)` (LongT5)."""
    mean_values: torch.Tensor | None = None
    states: torch.Tensor | None = None
    """R, `(D, H, N, K, V)`; None without recurrent attention."""
    norm: torch.Tensor | None = None
    """norm(K), `(D, H, 1, V or 1)`."""

    @property
    def of_slots(self) -> torch.Tensor:
        """The keys, or the states if there are none, `(D, H, N, ...)`."""
        return self.states if self.keys is None else self.keys


class SegmentLayer(DynamicLayer):
    """One layer's entry in a `SegmentCache`."""

    def __init__(self):
        super().__init__()
        self.memory: SegmentMemory | None = None

    def get_seq_length(self) -> int:
        """Return the number of cached slots."""
        return 0 if self.memory is None else self.memory.of_slots.shape[2]


class SegmentCache(DynamicCache):
    """Cross-attention cache of an SRformer decoder: documents, and the document of each row of the target.

    Beams share the entry of their document; reordering them moves one integer per row.

    Args:
        segments: How the documents are cut.
        documents: Document of each row, `(B,)`; row b reads document b when None.
    """

    def __init__(self, segments: Segments, documents: torch.Tensor | None = None):
        super().__init__()
        self.segments: Segments | None = segments
        self.documents = documents
        self._last: tuple[tuple, Reading] | None = None

    def __getstate__(self) -> dict:
        return {**vars(self), "_last": None}

    def reading(
        self, length: int, *, past: int | torch.Tensor, batch: int, heads: int, device: torch.device
    ) -> Reading:
        """Return the reading of tokens after the documents are cached; its arguments are those of `Reading`.

        Steps that read the slots of the step before share its reading.
        """

        def make() -> Reading:
            return Reading(
                self.segments, length, past=past, batch=batch, heads=heads, documents=self.documents, device=device
            )

        if length > 1 or not isinstance(past, int) or past == 0 or torch.compiler.is_compiling():
            return make()
        slots = self.segments.numbers_at(past)
        if slots is None:
            return make()
        key = (slots, batch, heads, device)
        if self._last is None or self._last[0] != key or self._last[1].documents is not self.documents:
            with torch.inference_mode(False):  # a step that records a gradient may use it later
                self._last = key, make()
        return self._last[1]

    def keep(self, layer_idx: int, memory: SegmentMemory) -> None:
        """Store the memory of one layer."""
        while len(self.layers) <= layer_idx:
            self.layers.append(SegmentLayer())
        self.layers[layer_idx].memory = memory

    def _memory(self) -> SegmentMemory | None:
        return next((layer.memory for layer in self.layers if layer.memory is not None), None)

    @property
    def rows(self) -> int | None:
        """Number B of rows of the target; None if the cache is empty."""
        if self.documents is not None:
            return self.documents.shape[0]
        memory = self._memory()
        return None if memory is None else memory.of_slots.shape[0]

    def _rows(self) -> torch.Tensor | None:
        memory = self._memory()
        if memory is None or self.documents is not None:
            return self.documents
        return torch.arange(memory.of_slots.shape[0], device=memory.of_slots.device)

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        """Give each row the document of the row with this index."""
        rows = self._rows()
        self.documents = None if rows is None else rows.index_select(0, beam_idx.to(rows.device))

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each row `repeats` times."""
        rows = self._rows()
        self.documents = None if rows is None else rows.repeat_interleave(repeats)

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep only these rows."""
        rows = self._rows()
        self.documents = None if rows is None else rows[indices]

    def reset(self) -> None:
        """Forget the documents."""
        self.layers.clear()
        self.segments = self.documents = self._last = None
