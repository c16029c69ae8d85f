"""Blocked local attention: fast on a CPU, the fallback elsewhere; linear in T in time and memory.

Shapes: `B` batch · `T` length · `H` heads · `K` key dim · `V` value dim.

The work has three levels. A *strip* is one (batch row, head); as many strips as fit the budget are copied into
zero-padded contiguous buffers. A *block* is a run of queries in a strip and the span of keys that they may see; blocks
of one kind have a fixed stride, so that overlapping spans are views of one buffer. As many blocks as keep their scores
within `_BLOCK_ELEMENTS` form a *batch*, and every step below is one tensor operation on a batch. Sliding windows and
chunks differ only in the position of blocks (`_layout`): visibility inside a span depends on the offset key - query
alone, so that one vector per head holds it together with the bias.

Scores are in units of log2, because exp2 is far cheaper than exp in torch on a CPU. The backward pass recomputes them
batch by batch from query, key and the saved log-sum-exp.
"""

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import groupby
from typing import NamedTuple

import torch
from torch import Tensor

from ..packed import run_each
from ..precision import compute_dtype, full_precision, operand_dtype
from ..random_bits import LEVELS, Masks, dropped_levels
from .settings import Settings

_LOG2E = 1.4426950408889634
# Stands for minus infinity, so that rows without visible keys stay finite; twice it must be a finite float32.
_HIDDEN = -1e30
# Scores of a batch: small enough for a CPU's cache, large enough to outweigh the cost of calling an operator.
_BLOCK_ELEMENTS = {"cpu": 2**19, "cuda": 2**25}


class _Blocks(NamedTuple):
    """Equally spaced blocks: block i has queries from `query + i * step` and keys from `key + i * step`."""

    query: int
    rows: int
    key: int
    span: int
    number: int


class _Batch(NamedTuple):
    blocks: _Blocks
    first: int
    number: int


class _Strips(NamedTuple):
    batch: slice
    heads: slice

    @property
    def shape(self) -> tuple[int, int]:
        return self.batch.stop - self.batch.start, self.heads.stop - self.heads.start


def _layout(
    length: int, radius: int | None, chunk_size: int | None, causal: bool
) -> tuple[int, int, int, list[_Blocks]]:
    """Place the blocks; return (reach, step, keys needed on each side of the sequence, kinds of blocks)."""
    reach = min(chunk_size - 1 if chunk_size is not None else radius or 0, length - 1)
    # Few rows waste few pairs outside a window, many rows multiply faster; chunks waste none.
    rows = 128 if chunk_size is not None or reach > 512 else 64 if reach > 32 else 32
    ahead = 0 if causal else reach
    if chunk_size is None and reach + rows + ahead < length:
        blocks = [_Blocks(0, rows, -reach, reach + rows + ahead, -(-length // rows))]
        return reach, rows, reach, blocks
    # A window that spans the sequence is one chunk with hidden corners.
    step = min(chunk_size, length) if chunk_size is not None else length
    blocks = []
    for query in range(0, step, rows):
        size = min(rows, step - query)
        low, high = max(0, query - reach), min(step, query + size + ahead)
        blocks.append(_Blocks(query, size, low, high - low, -(-(length - query) // step)))
    return reach, step, 0, blocks


def _informative(mask: Tensor | None) -> Tensor | None:
    """Return None for a mask that hides nothing."""
    return None if mask is None or bool(mask.all()) else mask


def _spans(buffer: Tensor, start: int, step: int, count: int, width: int) -> Tensor:
    """View `(S, L, ...)` as `(S, count, width, ...)`, spans of width positions that start every step positions."""
    strips, length, *rest = buffer.shape
    along = buffer.stride(1)
    shape, strides = (strips, count, width, *rest), (length * along, step * along, along, *buffer.stride()[2:])
    return buffer.as_strided(shape, strides, buffer.storage_offset() + start * along)


def _matrices(view: Tensor) -> Tensor:
    """Flatten `(strips, number, ...)` for a matrix product, which is slow on overlapping views below float32."""
    flat = view.flatten(0, 1)
    return flat if view.dtype in (torch.float32, torch.float64) else flat.contiguous()


def _diagonals(buffer: Tensor, span: int) -> Tensor:
    """View `(H, rows, rows + span - 1)` so that the view's [h, i, j] is the buffer's [h, i, j - i + rows - 1]."""
    heads, rows, width = buffer.shape
    return buffer.as_strided((heads, rows, span), (rows * width, width - 1, 1), buffer.storage_offset() + rows - 1)


class _Walk:
    """One call's buffers and its order of blocks, the same forward and backward."""

    def __init__(
        self, query: Tensor, bias: Tensor | None, mask: Tensor | None, seed: Tensor | None, settings: Settings
    ) -> None:
        radius, chunk_size, causal, scale, dropout = settings
        self.batch, self.length, self.heads, _ = query.shape
        self.wide = compute_dtype(query)
        self.low = operand_dtype(query)
        self.device, self.scale, self.keep_rate = query.device, scale, 1.0
        self.reach, self.step, self.pad, self.blocks = _layout(self.length, radius, chunk_size, causal)
        self.padded = -(-self.length // self.step) * self.step
        self.budget = _BLOCK_ELEMENTS.get(self.device.type, _BLOCK_ELEMENTS["cuda"])
        self.pool: dict[tuple[str, torch.dtype], Tensor] = {}

        # A chunk grid starts at a row's first kept token: copying a row into its strip moves it there.
        self.first = [0] * self.batch
        if mask is not None and chunk_size is not None:
            self.first = mask.int().argmax(1).tolist()
        visible = torch.ones(self.batch, self.length, dtype=torch.bool, device=self.device) if mask is None else mask
        everything = _Strips(slice(0, self.batch), slice(0, 1))
        shown = self.load("shown", visible[:, :, None, None], everything, torch.bool, self.pad)
        self.hidden = torch.zeros(shown.shape[:2], dtype=self.wide, device=self.device)
        self.hidden.masked_fill_(~shown[..., 0], _HIDDEN)

        # Added to the scores by offset key - query, in units of log2; column `extent` is offset 0.
        ahead = 0 if causal else self.reach
        self.extent = max(blocks.rows + blocks.span for blocks in self.blocks)
        self.offsets = torch.full((self.heads, 2 * self.extent + 1), _HIDDEN, dtype=self.wide, device=self.device)
        self.seen = slice(self.extent - self.reach, self.extent + ahead + 1)
        if bias is None:
            self.offsets[:, self.seen] = 0.0
        else:
            centre = (bias.shape[1] - 1) // (1 if causal else 2)
            self.bias_columns = slice(centre - self.reach, centre + ahead + 1)
            # A bias may hide all of a token's keys, but invisible keys must stay lower.
            self.offsets[:, self.seen].copy_(bias[:, self.bias_columns]).mul_(_LOG2E).clamp_min_(_HIDDEN / 2)

        largest = max(blocks.number * blocks.rows * blocks.span for blocks in self.blocks)
        self.strips_at_once = max(1, self.budget // largest)
        if seed is not None:
            # Probabilities in steps of 2**-16; dividing by the rounded one keeps the expectation exact.
            dropped = dropped_levels(dropout)
            self.keep_rate = 1 - dropped / LEVELS
            one = max(blocks.rows * blocks.span for blocks in self.blocks)
            most = max(one, min(self.budget, self.batch * self.heads * largest))
            self.masks = Masks(seed, dropped, most, self.device)

    def strips(self) -> Iterator[_Strips]:
        """Yield groups of strips: some heads of one batch row, or all heads of some batch rows."""
        heads = min(self.heads, self.strips_at_once)
        rows = self.strips_at_once // self.heads if heads == self.heads else 1
        for batch in range(0, self.batch, rows):
            for head in range(0, self.heads, heads):
                yield _Strips(slice(batch, min(batch + rows, self.batch)), slice(head, min(head + heads, self.heads)))

    def alike(self, strips: _Strips) -> Iterator[tuple[slice, int]]:
        """Yield runs of batch rows that start at the same token, and that token."""
        for first, run in groupby(range(self.batch)[strips.batch], self.first.__getitem__):
            rows = list(run)
            yield slice(rows[0], rows[-1] + 1), first

    def batches(self, strips: _Strips) -> Iterator[_Batch]:
        """Yield the batches of blocks of these strips."""
        batch, heads = strips.shape
        for blocks in self.blocks:
            most = max(1, self.budget // (batch * heads * blocks.rows * blocks.span))
            for first in range(0, blocks.number, most):
                yield _Batch(blocks, first, min(most, blocks.number - first))

    def scratch(self, name: str, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return uninitialised memory that later calls with the same name and dtype reuse."""
        count = torch.Size(shape).numel()
        memory = self.pool.get((name, dtype))
        if memory is None or memory.numel() < count:
            memory = self.pool[name, dtype] = torch.empty(count, dtype=dtype, device=self.device)
        return memory[:count].view(shape)

    def load(
        self, name: str, x: Tensor, strips: _Strips, dtype: torch.dtype, pad: int = 0, fill: float = 0.0
    ) -> Tensor:
        """Copy strips of `(B, T, H, K)` into a padded buffer `(strips, pad + padded length + pad, K)`."""
        buffer = self.scratch(name, (*strips.shape, self.padded + 2 * pad, x.shape[3]), dtype)
        buffer[:, :, :pad] = fill
        for rows, first in self.alike(strips):
            target = buffer[rows.start - strips.batch.start : rows.stop - strips.batch.start]
            end = pad + self.length - first
            target[:, :, pad:end] = x[rows, first:, strips.heads].transpose(1, 2)
            target[:, :, end:] = fill
        return buffer.flatten(0, 1)

    def store(self, buffer: Tensor, x: Tensor, strips: _Strips, pad: int = 0) -> None:
        """Copy strips back to where `load` found them."""
        strips_of_rows = buffer.unflatten(0, strips.shape)
        for rows, first in self.alike(strips):
            source = strips_of_rows[rows.start - strips.batch.start : rows.stop - strips.batch.start]
            x[rows, first:, strips.heads] = source[:, :, pad : pad + self.length - first].transpose(1, 2)

    def queries(self, buffer: Tensor, at: _Batch) -> Tensor:
        """View a buffer by the queries of a batch of blocks: `(strips, number, rows, ...)`."""
        start = at.blocks.query + at.first * self.step
        return _spans(buffer, start, self.step, at.number, at.blocks.rows)

    def keys(self, buffer: Tensor, at: _Batch) -> Tensor:
        """View a buffer by the keys of a batch of blocks: `(strips, number, span, ...)`."""
        start = self.pad + at.blocks.key + at.first * self.step
        return _spans(buffer, start, self.step, at.number, at.blocks.span)

    def add_keys(self, total: Tensor, part: Tensor, at: _Batch) -> None:
        """Add `(strips * number, span, K)` to the keys of a batch of blocks, whose spans may overlap."""
        part = self.widen("part of keys", part).unflatten(0, (total.shape[0], at.number))
        start = self.pad + at.blocks.key + at.first * self.step
        for offset in range(0, at.blocks.span, self.step):
            width = min(self.step, at.blocks.span - offset)
            _spans(total, start + offset, self.step, at.number, width).add_(part[:, :, offset : offset + width])

    def add_offsets(self, total: Tensor, part: Tensor, at: _Batch, strips: _Strips) -> None:
        """Add `(strips * number, rows, span)` to the offsets key - query of their entries, per head."""
        part = part.view(*strips.shape, at.number, *part.shape[1:]).sum((0, 2))
        columns = self._columns(at.blocks)
        skewed = torch.zeros(*part.shape[:2], columns.stop - columns.start, dtype=part.dtype, device=part.device)
        _diagonals(skewed, at.blocks.span).copy_(part)
        total[strips.heads, columns] += skewed.sum(1)

    def _columns(self, blocks: _Blocks) -> slice:
        low = self.extent + blocks.key - blocks.query - (blocks.rows - 1)
        return slice(low, low + blocks.rows + blocks.span - 1)

    def scores(self, query: Tensor, key: Tensor, at: _Batch, strips: _Strips) -> Tensor:
        """Compute the scores of a batch of blocks, in units of log2: `(strips * number, rows, span)`."""
        offsets = self.offsets[strips.heads, None, self._columns(at.blocks)].expand(-1, at.blocks.rows, -1)
        bias = _diagonals(offsets.contiguous(), at.blocks.span)
        hidden = self.keys(self.hidden[strips.batch], at)
        scores = self.scratch("scores", (*strips.shape, at.number, *bias.shape[1:]), self.wide)
        torch.add(bias[None, :, None], hidden[:, None, :, None], out=scores)
        queries, keys = _matrices(self.queries(query, at)), _matrices(self.keys(key, at))
        return scores.flatten(0, 2).baddbmm_(queries, keys.mT, alpha=self.scale * _LOG2E)

    def lower(self, name: str, x: Tensor) -> Tensor:
        """Return x in the dtype of the fast matrix products."""
        return x if x.dtype == self.low else self.scratch(name, x.shape, self.low).copy_(x)

    def widen(self, name: str, x: Tensor) -> Tensor:
        """Return x in the dtype of the sums: torch copies and adds faster than it adds two dtypes."""
        return x if x.dtype == self.wide else self.scratch(name, x.shape, self.wide).copy_(x)

    def matmul(self, name: str, a: Tensor, b: Tensor) -> Tensor:
        """Multiply batches of matrices into scratch memory."""
        return torch.bmm(a, b, out=self.scratch(name, (a.shape[0], a.shape[1], b.shape[2]), self.low))

    def keep(self, like: Tensor) -> Tensor:
        """Draw the dropout mask of the next batch of blocks, for `_drop`: kept with probability keep_rate."""
        keep = self.masks.draw(like.numel()).view_as(like)
        if like.dtype.itemsize == 2:
            return keep.neg_()  # all bits of a number, or none
        return self.scratch("keep", like.shape, like.dtype).copy_(keep)


def _drop(x: Tensor, keep: Tensor) -> Tensor:
    """Set to zero in place what a mask drops."""
    return x.mul_(keep) if keep.dtype == x.dtype else x.view(keep.dtype).bitwise_and_(keep).view(x.dtype)


def _each_alone(
    mask: Tensor | None, seed: Tensor | None, cu_seqlens: Tensor, query: Tensor
) -> tuple[Tensor, Tensor | None]:
    """Return a mask to cut into sequences and a seed for each, so that their dropout masks differ."""
    mask = torch.ones(query.shape[:2], dtype=torch.bool, device=query.device) if mask is None else mask
    return mask, None if seed is None else seed + torch.arange(len(cu_seqlens) - 1)


def _forward_alone(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    seed: Tensor | None,
    bias: Tensor | None,
    settings: Settings,
) -> tuple[Tensor, Tensor]:
    wide = compute_dtype(query)
    output = torch.empty(*query.shape[:3], value.shape[3], dtype=query.dtype, device=query.device)
    log_sum = torch.zeros(query.shape[:3], dtype=wide, device=query.device)
    if query.shape[1] == 0:  # an empty sequence among packed ones
        return output, log_sum
    with full_precision(query.device):
        mask = _informative(mask)
        walk = _Walk(query, bias, mask, seed, settings)
        for strips in walk.strips():
            q = walk.load("query", query, strips, walk.wide)
            k = walk.load("key", key, strips, walk.wide, walk.pad)
            v = walk.load("value", value, strips, walk.low, walk.pad)
            out = walk.scratch("output", (*q.shape[:2], v.shape[2]), walk.wide)
            norm = walk.scratch("norm", (*q.shape[:2], 1), walk.wide)
            for at in walk.batches(strips):
                scores = walk.scores(q, k, at, strips)
                largest = scores.amax(-1, keepdim=True)
                weights = scores.sub_(largest).exp2_()
                total = weights.sum(-1, keepdim=True)
                weights = walk.lower("weights", weights)
                if seed is not None:
                    _drop(weights, walk.keep(weights))
                found = walk.matmul("found", weights, _matrices(walk.keys(v, at)))
                place = walk.queries(out, at)
                torch.div(found.view_as(place), (total * walk.keep_rate).view(*place.shape[:3], 1), out=place)
                place = walk.queries(norm, at)
                place.copy_(total.log2_().add_(largest).view_as(place))
            walk.store(out, output, strips)
            walk.store(norm, log_sum[..., None], strips)
        if mask is not None:
            output.masked_fill_(~mask[:, :, None, None], 0.0)
        return output, log_sum


def forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None,
    mask: Tensor | None,
    seed: Tensor | None,
    cu_seqlens: Tensor | None,
    settings: Settings,
) -> tuple[Tensor, Tensor]:
    """Return outputs in query's dtype and log2 of the sums of weights, `(B, T, H)`; not differentiable."""
    alone = partial(_forward_alone, bias=bias, settings=settings)
    if cu_seqlens is None:
        return alone(query, key, value, mask, seed)
    mask, seeds = _each_alone(mask, seed, cu_seqlens, query)
    output, log_sum = run_each(alone, cu_seqlens, (query, key, value, mask), seeds, states_out=0)
    return output, log_sum


def _differentiate_alone(
    grad: Tensor,
    log_sum: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    seed: Tensor | None,
    bias: Tensor | None,
    settings: Settings,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return gradients of query, key, value and, in the precision of sums, of bias: `(1, H, offsets)`."""
    d_query, d_key, d_value = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (query, key, value))
    d_bias = torch.zeros((1, *bias.shape) if bias is not None else (1, 0), dtype=log_sum.dtype, device=query.device)
    if query.shape[1] == 0:  # an empty sequence among packed ones
        return d_query, d_key, d_value, d_bias
    with full_precision(query.device):
        mask = _informative(mask)
        if mask is not None:
            grad = grad.masked_fill(~mask[:, :, None, None], 0.0)
        walk = _Walk(query, bias, mask, seed, settings)
        d_offsets = torch.zeros_like(walk.offsets)
        for strips in walk.strips():
            q = q_low = walk.load("query", query, strips, walk.wide)
            k = k_low = walk.load("key", key, strips, walk.wide, walk.pad)
            if walk.low != walk.wide:
                q_low = walk.load("query", query, strips, walk.low)
                k_low = walk.load("key", key, strips, walk.low, walk.pad)
            v = walk.load("value", value, strips, walk.low, walk.pad)
            g = walk.load("grad", grad, strips, walk.low)
            # Padded queries must get weight 0: a weight that overflows would turn their zero gradient into NaN.
            norm = walk.load("norm", log_sum[..., None], strips, walk.wide, fill=-_HIDDEN)
            dq = walk.scratch("d_query", q.shape, walk.wide)
            dk = walk.scratch("d_key", k.shape, walk.wide).zero_()
            dv = walk.scratch("d_value", v.shape, walk.wide).zero_()
            for at in walk.batches(strips):
                queries, keys = _matrices(walk.queries(q_low, at)), _matrices(walk.keys(k_low, at))
                grads, values = _matrices(walk.queries(g, at)), _matrices(walk.keys(v, at))
                weights = walk.scores(q, k, at, strips)
                weights.sub_(walk.queries(norm, at).flatten(0, 1)).exp2_()
                d_scores, weights = _differentiate_softmax(walk, weights, grads, values, dropped=seed is not None)
                walk.add_keys(dv, walk.matmul("d_keys", weights.mT, grads), at)
                if bias is not None:
                    walk.add_offsets(d_offsets, d_scores, at, strips)
                scores_low = walk.lower("d_scores", d_scores)
                place = walk.queries(dq, at)
                place.copy_(walk.matmul("d_queries", scores_low, keys).view_as(place))
                walk.add_keys(dk, walk.matmul("d_keys", scores_low.mT, queries), at)
            walk.store(dq.mul_(walk.scale / walk.keep_rate), d_query, strips)
            walk.store(dk.mul_(walk.scale / walk.keep_rate), d_key, strips, walk.pad)
            walk.store(dv.div_(walk.keep_rate), d_value, strips, walk.pad)
        if mask is not None:
            for gradient in (d_query, d_key, d_value):
                gradient.masked_fill_(~mask[:, :, None, None], 0.0)
        if bias is not None:
            d_bias[0, :, walk.bias_columns] = d_offsets[:, walk.seen] / walk.keep_rate
        return d_query, d_key, d_value, d_bias


def _differentiate_softmax(
    walk: _Walk, weights: Tensor, grads: Tensor, values: Tensor, *, dropped: bool
) -> tuple[Tensor, Tensor]:
    """Return the gradient of a batch's scores, and its weights after dropout for products."""
    d_weights = walk.matmul("d_weights", grads, values.mT)
    keep = walk.keep(d_weights) if dropped else None
    if keep is not None:
        _drop(d_weights, keep)
    d_scores = walk.scratch("d_scores", d_weights.shape, walk.wide)
    wide = walk.widen("d_scores", d_weights)
    torch._softmax_backward_data(wide, weights, -1, walk.wide, grad_input=d_scores)
    weights = walk.lower("weights", weights)
    return d_scores, weights if keep is None else _drop(weights, keep)


def backward(
    grad: Tensor,
    output: Tensor,
    log_sum: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None,
    mask: Tensor | None,
    seed: Tensor | None,
    cu_seqlens: Tensor | None,
    settings: Settings,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Return gradients of query, key, value and bias; `output` is not used."""
    alone = partial(_differentiate_alone, bias=bias, settings=settings)
    if cu_seqlens is None:
        d_query, d_key, d_value, d_bias = alone(grad, log_sum, query, key, value, mask, seed)
    else:
        mask, seeds = _each_alone(mask, seed, cu_seqlens, query)
        tensors = (grad, log_sum, query, key, value, mask)
        d_query, d_key, d_value, d_bias = run_each(alone, cu_seqlens, tensors, seeds, states_out=1)
    return d_query, d_key, d_value, None if bias is None else d_bias.sum(0).to(bias.dtype)
