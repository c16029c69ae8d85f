"""Which segment of its document every token of the target reads, and the cache that keeps what was made of a document.

All of it is said in tensors of integers, so that nothing waits for a device: the documents of a batch may differ in
length, and the position of a token comes from the cache.

Shapes: B batch · L source length · T tokens of this call · M segments of the longest document · S segment size ·
N slots: the segments that a target visits, in order · n tiles of g tokens, each of one segment · H heads.
"""

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import nn
from transformers import PreTrainedConfig
from transformers.cache_utils import DynamicCache, DynamicLayer
from transformers.utils import logging

logger = logging.get_logger(__name__)


@dataclass(frozen=True)
class Segments:
    """How the documents of a batch are cut, and which of their segments a target visits."""

    size: int
    """S."""
    number: int
    """M."""
    horizon: int
    """Length q of the target over which the segments are spread: token t reads segment ``min(t m // q, m - 1)``."""
    counts: torch.Tensor | None = None
    """Segments m of each document, `(B,)`; M each when None."""
    kept: torch.Tensor | None = None
    """Keys that enter sums, `(B or 1, M S)`; all when None."""
    visible: torch.Tensor | None = None
    """Keys that the softmax over a slot's segment sees, `(B or 1, N, keys of a slot)`; all when None."""
    device: torch.device | None = None
    """Where the documents are."""

    @property
    def slots(self) -> int:
        """N: a target that is shorter than the segments are many visits only so many, and at its end the last."""
        return min(self.number, self.horizon + 1)

    def visited(self) -> torch.Tensor | None:
        """Segment of each slot, `(B or 1, N)`; None where slot and segment are the same for all documents."""
        if self.slots == self.number:
            return None
        slots = torch.arange(self.slots, device=self.device)
        if self.counts is None:
            return (slots * self.number // self.horizon).clamp_max(self.number - 1)[None]
        counts = self.counts[:, None]
        spread = torch.where(counts <= self.horizon, slots, slots * counts // self.horizon)
        return torch.minimum(spread, counts - 1)

    def slots_at(self, positions: torch.Tensor) -> torch.Tensor:
        """Slot of the tokens at these positions of the target, `(T,)` to `(B or 1, T)`; it never decreases."""
        if self.counts is None:
            if self.number > self.horizon:
                return positions.clamp_max(self.slots - 1)[None]
            return (positions * self.number // self.horizon).clamp_max(self.number - 1)[None]
        counts = self.counts[:, None]
        segments = torch.minimum(positions * counts // self.horizon, counts - 1)
        return torch.where(counts <= self.horizon, segments, positions.clamp_max(self.horizon))


def cut(
    config: PreTrainedConfig, states: torch.Tensor, attention_mask: torch.Tensor | None, horizon: int
) -> tuple[Segments, torch.Tensor]:
    """Cut the documents of a batch into segments.

    Args:
        config: An SRformer's config.
        states: The encoder's output, `(B, L, D)`.
        attention_mask: `(B, L)` or `(B, 1, 1, L)`, boolean or 1 for tokens to keep, or `(B, 1, 1, L)` added to scores.
        horizon: Length of the target.

    Returns:
        The segments, and the encoder's output as long as M segments; where each document has segments of its own, it
        stands at the beginning of its row, whatever side it was padded on.
    """
    batch, length, _ = states.shape
    size, number = config.segment_size, -(-length // config.segment_size)
    pad = number * size - length
    mask = None if attention_mask is None else _padding_mask(attention_mask, batch, length)
    counts = None
    if mask is not None and config.per_example_segments:
        lengths = mask.sum(1)
        counts = (lengths + size - 1).div(size, rounding_mode="floor").clamp_min(1)
        # kept tokens first, in their order: a grid that starts at the document's first token
        order = mask.logical_not().to(torch.uint8).argsort(dim=1, stable=True)
        states = states.take_along_dim(order[..., None], dim=1)
        mask = torch.arange(length, device=states.device) < lengths[:, None]
    if number > horizon:
        _warn_of_skipped_segments(number, counts, horizon)
    kept = mask
    if config.mask_mode == "official":
        # padding is in the sums; T5 hides it from the softmax, but not what fills the last segment up; BART nothing
        kept = None
        mask = (
            None
            if mask is None or config.parent_model_type == "bart"
            else nn.functional.pad(mask, (0, pad), value=True)
        )
    elif pad:
        mask = states.new_ones(1, length, dtype=torch.bool) if mask is None else mask
        mask = nn.functional.pad(mask, (0, pad))
    if pad:
        kept = states.new_ones(1, length, dtype=torch.bool) if kept is None else kept
        kept = nn.functional.pad(kept, (0, pad))
        states = nn.functional.pad(states, (0, 0, 0, pad))
    segments = Segments(size=size, number=number, horizon=horizon, counts=counts, kept=kept, device=states.device)
    if mask is not None:
        segments = replace(segments, visible=_visible(config.cross_attention_mode, segments, mask))
    return segments, states


def _visible(mode: str, segments: Segments, mask: torch.Tensor) -> torch.Tensor:
    """Spell out which keys the softmax of each slot sees."""
    of_segments = mask.unflatten(1, (segments.number, segments.size))
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
    """Shift by one slot; the first slot is its own predecessor (Transformer-XL)."""
    slots = x.shape[dim]
    return torch.cat([x.narrow(dim, 0, 1), x.narrow(dim, 0, slots - 1)], dim=dim)


def _padding_mask(mask: torch.Tensor, batch: int, length: int) -> torch.Tensor:
    """Read a mask as `(B, L)`, True where it keeps."""
    if mask.dim() == 4 and mask.shape[1] == mask.shape[2] == 1:
        mask = (mask if mask.dtype == torch.bool else mask == 0)[:, 0, 0]
    if mask.shape != (batch, length):
        raise ValueError(
            f"attention_mask must be of shape (batch, length) = {(batch, length)}, or (batch, 1, 1, length); "
            f"got {tuple(mask.shape)}"
        )
    return mask.to(torch.bool)


_told: set[str] = set()


def _warn_of_skipped_segments(number: int, counts: torch.Tensor | None, horizon: int) -> None:
    if torch.compiler.is_compiling() or "skipped" in _told:
        return
    most = number if counts is None else int(counts.max())  # of padding there is nothing to skip
    if most <= horizon:
        return
    _told.add("skipped")
    logger.warning(
        f"A document has {most} segments and its target only {horizon} tokens, each of which attends to one segment: "
        f"{most - horizon} segments are skipped. A longer target or decoder_horizon, or a larger segment_size, reads "
        f"all of them. This is said once."
    )


class Reading:
    """What one call of the decoder reads: for each of its tokens, a slot of its row's document.

    Consecutive tokens mostly read the same segment. They are laid into tiles of g tokens that read one segment each,
    so that keys and states are fetched once per tile, not once per token. A decoding step is one tile of one token.

    Args:
        segments: How the documents are cut.
        length: T.
        past: Tokens of the target before this call's.
        batch: Rows B of the target.
        heads: H.
        documents: Document of each row, `(B,)`; row b reads document b when None.
        device: Where the result lives.
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
        # a whole target and a batch without padding: every slot in turn, where it lies
        in_turn = documents is None and segments.counts is None and isinstance(past, int) and past == 0
        if in_turn and length == segments.horizon:
            self.tiles = min(length, segments.number)
            self.rows = -(-length // self.tiles)
        elif length <= segments.slots:
            in_turn, self.tiles, self.rows = False, length, 1
        else:
            # enough for any lengths of documents; at most one tile in three stays empty
            in_turn, self.rows = False, 2 * -(-length // segments.slots)
            self.tiles = segments.slots + length // self.rows
        self.index = self.place = None
        if self.rows > 1:
            self.index, self.place, slots = self._lay(slots)
        self.shape = (batch, heads, self.tiles)
        self.picked = None if in_turn else self._picked(slots, device)
        self.visible = self._visible(slots, in_turn)

    @property
    def is_step(self) -> bool:
        """Whether it is of one token, for which `picked` says where each row's slot lies."""
        return self.tiles == self.rows == 1 and self.picked is not None

    def _lay(self, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Lay tokens into tiles: token of each place, place of each token, slot of each tile."""
        count, length = slots.shape
        tokens = torch.arange(length, device=slots.device).expand(count, -1)
        starts = torch.ones_like(slots, dtype=torch.bool)
        starts[:, 1:] = slots[:, 1:] != slots[:, :-1]
        row = (tokens - torch.where(starts, tokens, 0).cummax(1).values) % self.rows
        tile = (row == 0).cumsum(1) - 1
        place = tile * self.rows + row
        index = slots.new_zeros(count, self.tiles * self.rows).scatter_(1, place, tokens)
        return index, place, slots.new_zeros(count, self.tiles).scatter_(1, tile, slots)

    def _picked(self, slots: torch.Tensor, device: torch.device) -> torch.Tensor:
        """Where each tile's slot lies in a tensor `(documents, H, N, ...)` without its first three dimensions."""
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
        """Lay `(B, T, H, K)` into tiles, `(B, H, n, g, K)`."""
        return _taken(query, self.index).unflatten(1, (self.tiles, self.rows)).permute(0, 3, 1, 2, 4)

    def collect(self, output: torch.Tensor) -> torch.Tensor:
        """Take `(B, H, n, g, V)` back to the tokens, `(B, T, H, V)`."""
        return _taken(output.permute(0, 2, 3, 1, 4).flatten(1, 2), self.place)

    def pick(self, x: torch.Tensor) -> torch.Tensor:
        """Fetch what `(documents, H, N, ...)` holds for each tile's slot, `(B, H, n, ...)`."""
        if self.picked is None:
            return x[:, :, : self.tiles]
        return x.flatten(0, 2).index_select(0, self.picked).unflatten(0, self.shape)

    def of_rows(self, x: torch.Tensor) -> torch.Tensor:
        """Fetch what `(documents, ...)` holds for each row, `(B, ...)`."""
        return x if self.documents is None else x.index_select(0, self.documents)


def _taken(x: torch.Tensor, index: torch.Tensor | None) -> torch.Tensor:
    """Take entries of dimension 1, the same or others for each row."""
    if index is None:
        return x
    if index.shape[0] == 1:
        return x.index_select(1, index[0])
    return x.gather(1, index[..., None, None].expand(-1, -1, *x.shape[2:]))


class SegmentMemory(NamedTuple):
    """What one layer makes of the documents, once; D documents."""

    keys: torch.Tensor | None
    """Of each slot's softmax, `(D, H, N, keys, K)`; None without segmented attention."""
    values: torch.Tensor | None
    mean_keys: torch.Tensor | None = None
    """Of each segment, seen by all slots, `(D, H, M, K)` (LongT5)."""
    mean_values: torch.Tensor | None = None
    states: torch.Tensor | None = None
    """R, `(D, H, N, K, V)`; None without recurrent attention."""
    norm: torch.Tensor | None = None
    """norm(K), `(D, H, 1, V or 1)`."""

    @property
    def documents(self) -> int:
        """D."""
        return (self.states if self.keys is None else self.keys).shape[0]


class SegmentLayer(DynamicLayer):
    """One layer's entry in a `SegmentCache`."""

    def __init__(self):
        super().__init__()
        self.memory: SegmentMemory | None = None

    def get_seq_length(self) -> int:
        """Slots that are kept, of whatever size; 0 before there are any."""
        if self.memory is None:
            return 0
        return (self.memory.states if self.memory.keys is None else self.memory.keys).shape[2]


class SegmentCache(DynamicCache):
    """Cross-attention cache of an SRformer decoder: documents, and which of them each row of the target reads.

    Beams of a document share its entry. What moves when they are reordered is one integer per row.

    Args:
        segments: How the documents are cut.
        documents: Document of each row, `(B,)`; row b reads document b when None.
    """

    def __init__(self, segments: Segments, documents: torch.Tensor | None = None):
        super().__init__()
        self.segments: Segments | None = segments
        self.documents = documents

    def keep(self, layer_idx: int, memory: SegmentMemory) -> None:
        """Keep what a layer has made of the documents."""
        while len(self.layers) <= layer_idx:
            self.layers.append(SegmentLayer())
        self.layers[layer_idx].memory = memory

    def _memory(self) -> SegmentMemory | None:
        return next((layer.memory for layer in self.layers if layer.memory is not None), None)

    @property
    def rows(self) -> int | None:
        """Rows B of the target that it is for; None before anything is kept."""
        if self.documents is not None:
            return self.documents.shape[0]
        memory = self._memory()
        return None if memory is None else memory.documents

    def _rows(self) -> torch.Tensor | None:
        memory = self._memory()
        if memory is None or self.documents is not None:
            return self.documents
        tensor = memory.states if memory.keys is None else memory.keys
        return torch.arange(memory.documents, device=tensor.device)

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        """Let each row read what the row of this index has read."""
        rows = self._rows()
        self.documents = None if rows is None else rows.index_select(0, beam_idx.to(rows.device))

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Let `repeats` rows in succession read what each row has read."""
        rows = self._rows()
        self.documents = None if rows is None else rows.repeat_interleave(repeats)

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Leave only these rows."""
        rows = self._rows()
        self.documents = None if rows is None else rows[indices]

    def reset(self) -> None:
        """Forget the documents."""
        self.layers.clear()
        self.segments = self.documents = None
