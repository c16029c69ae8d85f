"""Local attention on a GPU: one kernel forward, two backward, none of which visits a tile outside of the band.

One program has a block of queries of one head. It walks over the blocks of keys that any of them may see, with the
softmax taken along (Flash attention), and leaves per query the output and log2 of the sum of its weights, as torch's
path does. A token sees a run of tokens, [low, high), whether window or chunk, and so does the reverse: a key is seen
by a run of queries. That is all that the kernels know of the two.

    d_query:      dO . o = sum_j p dp first, with dp = dO V^T, then dS = p (dp - dO . o) and dQ = scale dS K
    d_key_value:  one program per block of keys; P^T = exp2(K Q^T ...) from the start, dV = P^T dO, dK = scale dS^T Q

Scores turned round are computed turned round, from operands in memory: no accumulator is ever transposed, which
compilers have got wrong. The output is not saved, so that the backward walks over the keys of a block twice.

The bias is one number per offset key - query; its gradient sums dS along diagonals. Blocks of keys lie on a grid that
starts with the block of queries, so that a tile's diagonals end at fixed columns: rolling row i left by i puts the
diagonals c >= 0 and c - BS into column c. Each program writes such sums to a place of its own, which torch adds up.

Products are of the inputs' own precision for bfloat16 and float16, and of three tf32 parts for float32. Sums and the
softmax are float32, in units of log2.

B batch · T length · H heads · K key dim · V value dim
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..launching import Configuration, blocks, capability_of, launch
from ..packed import spans
from ..triton_kernels import tokens_of_span

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)

_LOG2E = tl.constexpr(1.4426950408889634)
_NOTHING = tl.constexpr(-1e30)
"""The largest score so far where there was none: finite, so that differences are numbers."""

CONFIGURATIONS = {
    configuration.name: configuration
    for configuration in (
        Configuration("forward k64", "16 bits, K and V <= 64", {"BT": 64, "BS": 64, "D": 64}, 4, 3),
        Configuration("forward k128", "16 bits, from sm_90 on", {"BT": 64, "BS": 64, "D": 128}, 8, 2),
        Configuration("forward k128 before sm_90", "16 bits", {"BT": 64, "BS": 16, "D": 128}, 8, 2),
        Configuration("forward float32", "float32", {"BT": 64, "BS": 16, "D": 64}, 4, 2),
        Configuration("d_query k64", "16 bits, K and V <= 64", {"BT": 64, "BS": 16, "D": 64}, 4, 2),
        Configuration("d_query k128", "16 bits, K and V <= 128", {"BT": 64, "BS": 16, "D": 128}, 8, 2),
        Configuration("d_query k256", "16 bits, from sm_90 on", {"BT": 64, "BS": 16, "D": 64}, 4, 1),
        Configuration("d_query k256 before sm_90", "16 bits", {"BT": 16, "BS": 16, "D": 64}, 4, 1),
        Configuration("d_query float32", "float32", {"BT": 16, "BS": 16, "D": 64}, 4, 1),
        Configuration("d_key_value k64", "16 bits, K and V <= 64", {"BT": 64, "BS": 16, "D": 64}, 4, 2),
        Configuration("d_key_value k128", "16 bits, K and V <= 128", {"BT": 64, "BS": 16, "D": 128}, 8, 2),
        Configuration("d_key_value k256", "16 bits, from sm_90 on", {"BT": 64, "BS": 16, "D": 64}, 4, 1),
        Configuration("d_key_value k256 before sm_90", "16 bits", {"BT": 16, "BS": 16, "D": 64}, 4, 1),
        Configuration("d_key_value float32", "float32", {"BT": 16, "BS": 16, "D": 64}, 8, 1),
    )
}
"""BT tokens that a program has, BS that it walks over at a time, D columns of a head: of wider
heads each program computes that many, from scores that are summed D at a time. Tiles of 32 are avoided: compilers have
got products with several of them wrong on sm_90, so that narrower heads are padded to 64."""


def _choose(kernel: str, width: int, dtype: torch.dtype, capability: int) -> Configuration:
    if dtype == torch.float32:
        return CONFIGURATIONS[f"{kernel} float32"]
    tile = 64 if width <= 64 else 128 if width <= 128 or kernel == "forward" else 256
    name = f"{kernel} k{tile}"
    return CONFIGURATIONS.get(f"{name} before sm_90" if capability < 90 else name, CONFIGURATIONS[name])


def why_not(query: Tensor, value: Tensor, dropout: float) -> str | None:
    """The op's objection to running here, or None."""
    if query.dtype not in _DTYPES:
        return f"query must be float32, bfloat16 or float16; got {query.dtype}"
    widest = 64 if query.dtype == torch.float32 else 256  # wider ones spill registers
    if max(query.shape[3], value.shape[3]) > widest:
        return f"K and V must be at most {widest} for {query.dtype}; got {query.shape[3]} and {value.shape[3]}"
    if dropout > 0:
        return f"dropout must be 0, because its mask is drawn for torch's blocks of scores; got {dropout}"
    return None


@triton.jit
def _run(t, begin, end, origin, BACK, FORTH, CHUNK):
    """Tokens [low, high) around t, at most so many back and forth, in the sequence and in t's chunk, if any.

    Before the first chunk there is nothing that is kept.
    """
    low = tl.maximum(t - BACK, begin)
    high = tl.minimum(t + FORTH + 1, end)
    if CHUNK is not None:
        start = origin + (tl.maximum(t, origin) - origin) // CHUNK * CHUNK
        low = tl.maximum(low, start)
        high = tl.minimum(high, start + CHUNK)
    return low, high


@triton.jit
def _origin(origins, sequence, SEQUENCES, begin):
    """The token that a sequence's grid of chunks starts with."""
    origin = begin
    if origins is not None:
        origin = tl.load(origins + tl.minimum(sequence, SEQUENCES - 1))
    return origin


@triton.jit
def _inside(kept, at, first, stop):
    """Which tokens are there and kept."""
    inside = (at >= first) & (at < stop)
    if kept is not None:
        inside &= tl.load(kept + at, mask=inside, other=0) != 0
    return inside


@triton.jit
def _tile(x, start, first, stop, head, H, WIDTH: tl.constexpr, column, ROWS: tl.constexpr, D: tl.constexpr,
          FLOAT32: tl.constexpr):  # fmt: skip
    """D columns of one head of `(tokens, H, WIDTH)` from token start on, zeros outside of [first, stop) and the head.

    Only the start is a large number, so that the places of a tile's numbers in it need no more than 32 bits.
    """
    rows, cols = tl.arange(0, ROWS)[:, None], column + tl.arange(0, D)[None, :]
    place = x + (start.to(tl.int64) * H + head) * WIDTH + (rows * (H * WIDTH) + cols)
    tile = tl.load(place, mask=(rows >= first - start) & (rows < stop - start) & (cols < WIDTH), other=0.0)
    return tile.to(tl.float32) if FLOAT32 else tile


@triton.jit
def _product(
    x, x_tile, x_start, x_first, x_stop, y, y_tile, y_start, y_first, y_stop, head, H,
    WIDTH: tl.constexpr, X_ROWS: tl.constexpr, Y_ROWS: tl.constexpr, D: tl.constexpr,
    FLOAT32: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """X Y^T over a head's whole width, of whose first D columns there are tiles already."""
    result = tl.dot(x_tile, tl.trans(y_tile), input_precision=PRECISION)
    for column in range(D, WIDTH, D):  # not unrolled, which would take more registers
        x_more = _tile(x, x_start, x_first, x_stop, head, H, WIDTH, column, X_ROWS, D, FLOAT32)
        y_more = _tile(y, y_start, y_first, y_stop, head, H, WIDTH, column, Y_ROWS, D, FLOAT32)
        result = tl.dot(x_more, tl.trans(y_more), result, input_precision=PRECISION)
    return result


@triton.jit
def _scores(product, bias, head, start, TURNED: tl.constexpr, seen, SCALE, CENTER, COLUMNS):
    """Scores in units of log2 with the bias of their offsets, minus infinity where nothing is seen.

    The offset is start in the corner, and grows along the rows, or, of scores turned round, shrinks along them.
    """
    scores = product * (SCALE * _LOG2E)
    if bias is not None:
        offset = tl.arange(0, product.shape[1])[None, :] - tl.arange(0, product.shape[0])[:, None]
        if TURNED:
            offset = -offset
        place = bias + (head.to(tl.int64) * COLUMNS + start + CENTER) + offset
        scores += tl.load(place, mask=seen, other=0.0) * _LOG2E
    return tl.where(seen, scores, -float("inf"))


@triton.jit
def _diagonals(x, BT: tl.constexpr, BS: tl.constexpr, GROUPS: tl.constexpr):
    """Sums of x[i, j] along j - i = c, and along j - i = c - BS, for c from 0 to BS - 1.

    For each group of BS rows or fewer, whose i begins at 0, by itself: `(GROUPS, BS)`.
    """
    column = tl.arange(0, BT)[:, None] % BS + tl.arange(0, BS)[None, :]
    rolled = tl.gather(x, column % BS, 1)
    ahead = tl.reshape(tl.where(column < BS, rolled, 0.0), (GROUPS, BT // GROUPS, BS))
    behind = tl.reshape(tl.where(column < BS, 0.0, rolled), (GROUPS, BT // GROUPS, BS))
    return tl.sum(ahead, 1), tl.sum(behind, 1)


_LENGTHS = ["T", "SPANS", "SEQUENCES", "BACK", "FORTH", "CHUNK", "CENTER", "COLUMNS", "GRID", "SLOTS"]


@triton.jit(do_not_specialize=_LENGTHS)
def forward_kernel(
    q, k, v, bias, kept, origins, output, log_sum, table, bounds,
    T, SPANS, SEQUENCES, H, BACK, FORTH, CHUNK, CENTER, COLUMNS, GRID, SCALE,
    K: tl.constexpr, V: tl.constexpr, PACKED: tl.constexpr, FLOAT32: tl.constexpr, PRECISION: tl.constexpr,
    BT: tl.constexpr, BS: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """Outputs, D columns of them, and log2 of the sum of weights for BT queries of a head."""
    pid = tl.program_id(0)
    slices = tl.cdiv(V, D)
    row = pid // slices
    column = (pid - row * slices) * D
    span = row // H
    head = row - span * H
    sequence, first, stop, begin, end = tokens_of_span(span, table, bounds, T, SPANS, BT, SEQUENCES, PACKED)
    if stop <= first:
        return
    origin = _origin(origins, sequence, SEQUENCES, begin)
    at = first + tl.arange(0, BT)
    low, high = _run(at, begin, end, origin, BACK, FORTH, CHUNK)
    lowest, _ = _run(first, begin, end, origin, BACK, FORTH, CHUNK)
    _, highest = _run(stop - 1, begin, end, origin, BACK, FORTH, CHUNK)
    here = _inside(kept, at, first, stop)
    row = at.to(tl.int64) * H + head
    cols = column + tl.arange(0, D)[None, :]
    queries = _tile(q, first, first, stop, head, H, K, 0, BT, D, FLOAT32)
    largest = tl.full((BT,), _NOTHING, tl.float32)
    total = tl.zeros((BT,), tl.float32)
    result = tl.zeros((BT, D), tl.float32)
    corner = first - GRID
    for n in range((lowest - corner) // BS, tl.cdiv(highest - corner, BS)):
        start = corner + n * BS
        other = start + tl.arange(0, BS)
        keys = _tile(k, start, begin, end, head, H, K, 0, BS, D, FLOAT32)
        values = _tile(v, start, begin, end, head, H, V, column, BS, D, FLOAT32)
        seen = (other[None, :] >= low[:, None]) & (other[None, :] < high[:, None])
        seen &= _inside(kept, other, begin, end)[None, :]
        product = _product(
            q, queries, first, first, stop, k, keys, start, begin, end, head, H, K, BT, BS, D, FLOAT32, PRECISION
        )
        scores = _scores(product, bias, head, start - first, False, seen, SCALE, CENTER, COLUMNS)
        larger = tl.maximum(largest, tl.max(scores, 1))
        shrink = tl.exp2(largest - larger)
        weights = tl.exp2(scores - larger[:, None])
        total = total * shrink + tl.sum(weights, 1)
        result = result * shrink[:, None]
        result = tl.dot(weights.to(values.dtype), values, result, input_precision=PRECISION)
        largest = larger
    result = tl.where(here[:, None], result / tl.where(here, total, 1.0)[:, None], 0.0)
    written = (at < stop)[:, None] & (cols < V)
    tl.store(output + row[:, None] * V + cols, result.to(output.dtype.element_ty), mask=written)
    tl.store(log_sum + row, tl.where(here, largest + tl.log2(total), 0.0), mask=(at < stop) & (column == 0))


@triton.jit(do_not_specialize=_LENGTHS)
def d_query_kernel(
    q, k, v, grad, log_sum, bias, kept, origins, d_query, delta, d_bias, table, bounds,
    T, SPANS, SEQUENCES, H, BACK, FORTH, CHUNK, CENTER, COLUMNS, GRID, SLOTS, SCALE,
    K: tl.constexpr, V: tl.constexpr, PACKED: tl.constexpr, FLOAT32: tl.constexpr, PRECISION: tl.constexpr,
    BT: tl.constexpr, BS: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """D columns of the gradients of BT queries of a head.

    And, from the first columns' program, their dO . o for the other kernel, and what they add to the bias's gradient.
    """
    pid = tl.program_id(0)
    slices = tl.cdiv(K, D)
    row = pid // slices
    column = (pid - row * slices) * D
    span = row // H
    head = row - span * H
    sequence, first, stop, begin, end = tokens_of_span(span, table, bounds, T, SPANS, BT, SEQUENCES, PACKED)
    if stop <= first:
        return
    origin = _origin(origins, sequence, SEQUENCES, begin)
    at = first + tl.arange(0, BT)
    low, high = _run(at, begin, end, origin, BACK, FORTH, CHUNK)
    lowest, _ = _run(first, begin, end, origin, BACK, FORTH, CHUNK)
    _, highest = _run(stop - 1, begin, end, origin, BACK, FORTH, CHUNK)
    here = _inside(kept, at, first, stop)
    row = at.to(tl.int64) * H + head
    cols = column + tl.arange(0, D)[None, :]
    queries = _tile(q, first, first, stop, head, H, K, 0, BT, D, FLOAT32)
    grads = _tile(grad, first, first, stop, head, H, V, 0, BT, D, FLOAT32)
    norm = tl.load(log_sum + row, mask=here, other=0.0)
    corner = first - GRID
    number, until = (lowest - corner) // BS, tl.cdiv(highest - corner, BS)
    product_sum = tl.zeros((BT,), tl.float32)
    for n in range(number, until):
        start = corner + n * BS
        other = start + tl.arange(0, BS)
        keys = _tile(k, start, begin, end, head, H, K, 0, BS, D, FLOAT32)
        values = _tile(v, start, begin, end, head, H, V, 0, BS, D, FLOAT32)
        seen = (other[None, :] >= low[:, None]) & (other[None, :] < high[:, None])
        seen &= _inside(kept, other, begin, end)[None, :] & here[:, None]
        product = _product(
            q, queries, first, first, stop, k, keys, start, begin, end, head, H, K, BT, BS, D, FLOAT32, PRECISION
        )
        scores = _scores(product, bias, head, start - first, False, seen, SCALE, CENTER, COLUMNS)
        weights = tl.exp2(scores - norm[:, None])
        d_weights = _product(
            grad, grads, first, first, stop, v, values, start, begin, end, head, H, V, BT, BS, D, FLOAT32, PRECISION
        )
        product_sum += tl.sum(weights * d_weights, 1)
    tl.store(delta + row, product_sum, mask=(at < stop) & (column == 0))
    result = tl.zeros((BT, D), tl.float32)
    GROUPS: tl.constexpr = tl.cdiv(BT, BS)
    group = tl.arange(0, GROUPS)[:, None]
    ahead = tl.zeros((GROUPS, BS), tl.float32)
    sums = d_bias
    if d_bias is not None:
        sums += ((span.to(tl.int64) * H + head) * GROUPS + group) * SLOTS
    for n in range(number, until):
        start = corner + n * BS
        other = start + tl.arange(0, BS)
        keys = _tile(k, start, begin, end, head, H, K, 0, BS, D, FLOAT32)
        values = _tile(v, start, begin, end, head, H, V, 0, BS, D, FLOAT32)
        seen = (other[None, :] >= low[:, None]) & (other[None, :] < high[:, None])
        seen &= _inside(kept, other, begin, end)[None, :] & here[:, None]
        product = _product(
            q, queries, first, first, stop, k, keys, start, begin, end, head, H, K, BT, BS, D, FLOAT32, PRECISION
        )
        scores = _scores(product, bias, head, start - first, False, seen, SCALE, CENTER, COLUMNS)
        weights = tl.exp2(scores - norm[:, None])
        d_weights = _product(
            grad, grads, first, first, stop, v, values, start, begin, end, head, H, V, BT, BS, D, FLOAT32, PRECISION
        )
        d_scores = weights * (d_weights - product_sum[:, None])
        if K > D:
            keys = _tile(k, start, begin, end, head, H, K, column, BS, D, FLOAT32)
        result = tl.dot(d_scores.to(keys.dtype), keys, result, input_precision=PRECISION)
        if d_bias is not None:
            upper, lower = _diagonals(d_scores, BT, BS, GROUPS)
            slot = (n - 1 - group) * BS + tl.arange(0, BS)[None, :]
            tl.store(sums + slot, ahead + lower, mask=(slot >= 0) & (column == 0))
            ahead = upper
    if d_bias is not None:
        slot = (until - 1 - group) * BS + tl.arange(0, BS)[None, :]
        tl.store(sums + slot, ahead, mask=(slot >= 0) & (column == 0) & (until > number))
    written = (at < stop)[:, None] & (cols < K)
    tl.store(d_query + row[:, None] * K + cols, (result * SCALE).to(d_query.dtype.element_ty), mask=written)


@triton.jit(do_not_specialize=_LENGTHS)
def d_key_value_kernel(
    q, k, v, grad, log_sum, delta, bias, kept, origins, d_key, d_value, table, bounds,
    T, SPANS, SEQUENCES, H, BACK, FORTH, CHUNK, CENTER, COLUMNS, SCALE,
    K: tl.constexpr, V: tl.constexpr, PACKED: tl.constexpr, FLOAT32: tl.constexpr, PRECISION: tl.constexpr,
    BT: tl.constexpr, BS: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """D columns of the gradients of BT keys and values of a head."""
    pid = tl.program_id(0)
    slices = tl.cdiv(max(K, V), D)
    row = pid // slices
    column = (pid - row * slices) * D
    span = row // H
    head = row - span * H
    sequence, first, stop, begin, end = tokens_of_span(span, table, bounds, T, SPANS, BT, SEQUENCES, PACKED)
    if stop <= first:
        return
    origin = _origin(origins, sequence, SEQUENCES, begin)
    at = first + tl.arange(0, BT)
    # a key is seen from as far behind it as a query sees ahead
    low, high = _run(at, begin, end, origin, FORTH, BACK, CHUNK)
    lowest, _ = _run(first, begin, end, origin, FORTH, BACK, CHUNK)
    _, highest = _run(stop - 1, begin, end, origin, FORTH, BACK, CHUNK)
    here = _inside(kept, at, first, stop)
    row = at.to(tl.int64) * H + head
    cols = column + tl.arange(0, D)[None, :]
    keys = _tile(k, first, first, stop, head, H, K, 0, BT, D, FLOAT32)
    values = _tile(v, first, first, stop, head, H, V, 0, BT, D, FLOAT32)
    key_sum = tl.zeros((BT, D), tl.float32)
    value_sum = tl.zeros((BT, D), tl.float32)
    for n in range(tl.cdiv(highest - lowest, BS)):
        start = lowest + n * BS
        other = start + tl.arange(0, BS)
        queries = _tile(q, start, begin, end, head, H, K, 0, BS, D, FLOAT32)
        grads = _tile(grad, start, begin, end, head, H, V, 0, BS, D, FLOAT32)
        there = _inside(kept, other, begin, end)
        place = other.to(tl.int64) * H + head
        norm = tl.load(log_sum + place, mask=there, other=0.0)
        product_sum = tl.load(delta + place, mask=there, other=0.0)
        seen = (other[None, :] >= low[:, None]) & (other[None, :] < high[:, None]) & there[None, :] & here[:, None]
        product = _product(
            k, keys, first, first, stop, q, queries, start, begin, end, head, H, K, BT, BS, D, FLOAT32, PRECISION
        )
        scores = _scores(product, bias, head, first - start, True, seen, SCALE, CENTER, COLUMNS)
        weights = tl.exp2(scores - norm[None, :])
        d_weights = _product(
            v, values, first, first, stop, grad, grads, start, begin, end, head, H, V, BT, BS, D, FLOAT32, PRECISION
        )
        d_scores = weights * (d_weights - product_sum[None, :])
        if V > D:
            grads = _tile(grad, start, begin, end, head, H, V, column, BS, D, FLOAT32)
        if K > D:
            queries = _tile(q, start, begin, end, head, H, K, column, BS, D, FLOAT32)
        value_sum = tl.dot(weights.to(grads.dtype), grads, value_sum, input_precision=PRECISION)
        key_sum = tl.dot(d_scores.to(queries.dtype), queries, key_sum, input_precision=PRECISION)
    place, written = row[:, None], (at < stop)[:, None]
    tl.store(d_key + place * K + cols, (key_sum * SCALE).to(d_key.dtype.element_ty), mask=written & (cols < K))
    tl.store(d_value + place * V + cols, value_sum.to(d_value.dtype.element_ty), mask=written & (cols < V))


def _origins(mask: Tensor, ends: Tensor | None) -> Tensor:
    """The first kept token of each sequence, counted from the first row's first token, or one that is not kept."""
    batch, length = mask.shape
    token = torch.arange(length, device=mask.device)
    if ends is None:
        return (mask.int().argmax(1) + torch.arange(batch, device=mask.device) * length).int()
    next_kept = torch.where(mask[0], token, length).flip(0).cummin(0).values.flip(0)
    return torch.nn.functional.pad(next_kept, (0, 1), value=length)[ends[:-1].long()].int()


class _Call:
    """What all launches for one set of inputs `(B, T, H, ·)` share."""

    def __init__(
        self, query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, mask: Tensor | None,
        cu_seqlens: Tensor | None, radius: int | None, chunk_size: int | None, causal: bool, scale: float,
    ) -> None:  # fmt: skip
        self.batch, self.length, self.heads, self.width = query.shape
        self.dtype, self.cu_seqlens, self.value_width = query.dtype, cu_seqlens, value.shape[3]
        self.capability = capability_of(query)
        whole = chunk_size - 1 if chunk_size is not None else radius or 0
        self.reach = min(whole, self.length - 1)
        self.ahead = 0 if causal else self.reach
        self.first_column = whole - self.reach
        origins = None
        if mask is not None and chunk_size is not None:
            origins = _origins(mask, None if cu_seqlens is None else spans(cu_seqlens, self.length, 64)[1][0])
        # interpreted, bfloat16 has no arithmetic
        narrow = query.dtype == torch.float16 or (query.dtype == torch.bfloat16 and not _interpreted())
        self.arguments: dict[str, Any] = {
            "q": query.contiguous(),
            "k": key.contiguous(),
            "v": value.contiguous(),
            "bias": None if bias is None else bias.float().contiguous(),
            "kept": None if mask is None else mask.contiguous().view(torch.uint8),
            "origins": origins,
            "T": self.length,
            "H": self.heads,
            "BACK": self.reach,
            "FORTH": self.ahead,
            "CHUNK": None if chunk_size is None else min(chunk_size, self.length),
            "CENTER": 0 if bias is None else whole,
            "COLUMNS": 0 if bias is None else bias.shape[1],
            "SCALE": float(scale),
            "K": self.width,
            "V": self.value_width,
            "FLOAT32": not narrow,
            "PRECISION": "tf32x3" if query.dtype == torch.float32 else "tf32",
            "PACKED": cu_seqlens is not None,
        }

    def configuration(self, kernel: str) -> Configuration:
        return _choose(kernel, max(self.width, self.value_width), self.dtype, self.capability)

    def grid(self, configuration: Configuration) -> int:
        """How many tokens before a block of queries the grid of its keys starts: whole blocks, to meet them."""
        return blocks(self.reach, configuration.tiles["BS"]) * configuration.tiles["BS"]

    def spans(self, configuration: Configuration) -> tuple[int, dict[str, Any]]:
        """How many blocks there are, and where."""
        size = configuration.tiles["BT"]
        if self.cu_seqlens is None:
            each = blocks(self.length, size)
            return each * self.batch, {"table": None, "bounds": None, "SPANS": each, "SEQUENCES": self.batch}
        table, ends = spans(self.cu_seqlens, self.length, size)
        return len(table), {"table": table, "bounds": ends, "SPANS": 0, "SEQUENCES": len(self.cu_seqlens) - 1}

    def launch(self, kernel: Any, configuration: Configuration, width: int, **arguments: Any) -> None:
        """Run a kernel whose results have so many columns per head."""
        number, place = self.spans(configuration)
        programs = number * self.heads * blocks(width, configuration.tiles["D"])
        launch(kernel, programs, configuration, **self.arguments, **place, **arguments)

    def sums_of_bias(self, configuration: Configuration) -> Tensor:
        """Zeros for what every block adds to the bias's gradient, `(blocks, H, groups of rows, offsets)`."""
        size, rows = configuration.tiles["BS"], configuration.tiles["BT"]
        width = blocks(self.grid(configuration) + rows + self.ahead, size) * size
        shape = (self.spans(configuration)[0], self.heads, blocks(rows, size), width)
        return torch.empty(shape, dtype=torch.float32, device=self.arguments["q"].device).zero_()

    def bias_gradient(self, sums: Tensor, bias: Tensor, configuration: Configuration) -> Tensor:
        """Add up what the blocks have left."""
        first, number = self.grid(configuration) - self.reach, self.reach + 1 + self.ahead
        d_bias = torch.zeros_like(bias, memory_format=torch.contiguous_format)
        d_bias[:, self.first_column : self.first_column + number] = sums[..., first : first + number].sum((0, 2))
        return d_bias


def _interpreted() -> bool:
    return not isinstance(forward_kernel, triton.runtime.JITFunction)


def forward(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, mask: Tensor | None, cu_seqlens: Tensor | None,
    radius: int | None, chunk_size: int | None, causal: bool, scale: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Outputs in query's dtype, and log2 of the sum of weights, `(B, T, H)`."""
    call = _Call(query, key, value, bias, mask, cu_seqlens, radius, chunk_size, causal, scale)
    output = torch.empty(value.shape, dtype=value.dtype, device=value.device)
    log_sum = torch.empty(query.shape[:3], dtype=torch.float32, device=query.device)
    configuration = call.configuration("forward")
    call.launch(
        forward_kernel,
        configuration,
        call.value_width,
        output=output,
        log_sum=log_sum,
        GRID=call.grid(configuration),
    )
    return output, log_sum


def backward(
    grad: Tensor, log_sum: Tensor, query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None,
    mask: Tensor | None, cu_seqlens: Tensor | None, radius: int | None, chunk_size: int | None, causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of query, key, value and bias, the last one empty where there is none."""
    call = _Call(query, key, value, bias, mask, cu_seqlens, radius, chunk_size, causal, scale)
    d_query, d_key, d_value = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (query, key, value))
    shared = {"grad": grad.contiguous(), "log_sum": log_sum, "delta": torch.empty_like(log_sum)}
    configuration = call.configuration("d_query")
    sums = None if bias is None else call.sums_of_bias(configuration)
    call.launch(
        d_query_kernel,
        configuration,
        call.width,
        **shared,
        d_query=d_query,
        d_bias=sums,
        GRID=call.grid(configuration),
        SLOTS=0 if sums is None else sums.shape[3],
    )
    call.launch(
        d_key_value_kernel,
        call.configuration("d_key_value"),
        max(call.width, call.value_width),
        **shared,
        d_key=d_key,
        d_value=d_value,
    )
    if bias is None or sums is None:
        return d_query, d_key, d_value, query.new_empty(0)
    return d_query, d_key, d_value, call.bias_gradient(sums, bias, configuration)
