"""Local attention on a GPU: one kernel forward, two backward, none of which visits a tile outside the band.

A program has a block of queries of one head. It walks over the blocks of keys that they may see, with an online
softmax (Flash attention), and stores per query the output and log2 of the sum of its weights, like torch's path. In a
window or a chunk a token sees a run of tokens, [low, high), and a run of queries sees a key; the kernels use only
these runs.

    d_query:      dO . o first, which the other kernel reads too, then dS = p (dO V^T - dO . o) and dQ = scale dS K
    d_key_value:  one program per block of keys; P^T = exp2(K Q^T ...) from the start, dV = P^T dO, dK = scale dS^T Q

Transposed scores are computed from operands in memory: no accumulator is transposed, which compilers have got wrong.

The bias is one number per offset key - query; its gradient sums dS along diagonals. The grid of key blocks starts with
the block of queries, so that a tile's diagonals end at fixed columns: rolling row i of BS left by i puts the diagonals
c >= 0 and c - BS into column c. Each program holds such sums until they are complete and writes them to separate
memory, one per offset; torch adds them.

Dropout needs a random number per score. Philox, counting tokens and heads, gives every token two words as a query and
two as a key, and a scramble combines those of a query and a key: ten instructions per score instead of Philox's
hundred, and the same number for a tile and its transpose. The walks multiply by 0 or 1; the factor that keeps the mean
is applied at the end.

Products use the inputs' precision for bfloat16 and float16, and three tf32 parts for float32. Sums and the softmax are
float32, in units of log2.

B batch · T length · H heads · K key dim · V value dim
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..launching import Configuration, blocks, capability_of, launch, like_hopper, tuned
from ..packed import span_arguments
from ..random_bits import LEVELS, dropped_levels
from ..triton_kernels import LOG2E, NOTHING, interpreted, tokens_of_span, why_not_heads
from .settings import Settings

CONFIGURATIONS = {
    configuration.name: configuration
    for configuration in (
        Configuration("forward k64", "16 bits, K and V <= 64", {"BT": 64, "BS": 64, "D": 64, "S": 64}, 8, 3),
        Configuration(
            "forward k64 before sm_90", "16 bits, K and V <= 64", {"BT": 64, "BS": 64, "D": 64, "S": 64}, 8, 2
        ),
        Configuration("forward k128", "16 bits, K and V <= 128", {"BT": 64, "BS": 16, "D": 128, "S": 128}, 8, 2),
        Configuration("forward k256", "16 bits", {"BT": 64, "BS": 64, "D": 128, "S": 64}, 8, 2),
        Configuration("forward float32", "float32", {"BT": 64, "BS": 16, "D": 64, "S": 16}, 4, 2),
        Configuration("d_query k64", "16 bits, K and V <= 64", {"BT": 64, "BS": 16, "D": 64, "S": 64}, 4, 2),
        Configuration("d_query k128", "16 bits, K and V <= 128", {"BT": 64, "BS": 16, "D": 128, "S": 128}, 8, 2),
        Configuration("d_query k256", "16 bits", {"BT": 64, "BS": 16, "D": 64, "S": 64}, 8, 1),
        Configuration(
            "d_query float32 k64 before sm_90", "K and V <= 64", {"BT": 16, "BS": 16, "D": 64, "S": 64}, 4, 1
        ),
        Configuration("d_query float32", "float32", {"BT": 64, "BS": 16, "D": 64, "S": 16}, 4, 1),
        Configuration("d_key_value k64", "16 bits, K and V <= 64", {"BT": 64, "BS": 16, "D": 64, "S": 64}, 4, 2),
        Configuration("d_key_value k128", "16 bits, K and V <= 128", {"BT": 64, "BS": 16, "D": 128, "S": 128}, 8, 2),
        Configuration("d_key_value k256", "16 bits, from sm_90 on", {"BT": 64, "BS": 16, "D": 64, "S": 64}, 8, 1),
        Configuration("d_key_value k256 before sm_90", "16 bits", {"BT": 16, "BS": 16, "D": 64, "S": 64}, 8, 1),
        Configuration(
            "d_key_value float32 k64", "float32, K and V <= 64", {"BT": 16, "BS": 16, "D": 64, "S": 64}, 8, 1
        ),
        Configuration("d_key_value float32", "float32", {"BT": 64, "BS": 16, "D": 64, "S": 16}, 8, 1),
    )
}
"""BT tokens of a program, BS tokens per step, D columns of a head per program. Scores of heads wider than S columns
are summed S at a time, read again for every tile. Narrower heads are padded to 64, because compilers have got products
with several tiles of 32 wrong on sm_90."""


def _choose(kernel: str, width: int, dtype: torch.dtype, capability: int) -> Configuration:
    kind = f"{kernel} float32" if dtype == torch.float32 else kernel
    size = f"{kind} k{64 if width <= 64 else 128 if width <= 128 else 256}"
    names = (f"{size} before sm_90" if not like_hopper(capability) else size, size, kind)
    configuration = next(CONFIGURATIONS[name] for name in names if name in CONFIGURATIONS)
    return tuned("local_attention", configuration, capability)


def why_not(query: Tensor, value: Tensor) -> str | None:
    """Return the op's objection to Triton, or None."""
    width, value_width = query.shape[3], value.shape[3]
    objection = why_not_heads("query", query.dtype, width, value_width)
    if (
        objection is None
        and query.dtype == torch.float32
        and min(width, value_width) <= 16
        and max(width, value_width) > 64
    ):  # one product would fit into a tile, which compilers get wrong with the warps that the others need
        objection = f"K and V must both be above 16 or at most 64 in float32; got {width} and {value_width}"
    return objection


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
    WIDTH: tl.constexpr, X_ROWS: tl.constexpr, Y_ROWS: tl.constexpr, S: tl.constexpr,
    FLOAT32: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """X Y^T over a head's whole width, of tiles of S columns that are there, or S columns at a time."""
    result = tl.zeros((X_ROWS, Y_ROWS), tl.float32)
    if WIDTH <= S:
        result = tl.dot(x_tile, tl.trans(y_tile), result, input_precision=PRECISION)
    else:
        for column in range(0, WIDTH, S):  # not unrolled, which would take more registers
            x_part = _tile(x, x_start, x_first, x_stop, head, H, WIDTH, column, X_ROWS, S, FLOAT32)
            y_part = _tile(y, y_start, y_first, y_stop, head, H, WIDTH, column, Y_ROWS, S, FLOAT32)
            result = tl.dot(x_part, tl.trans(y_part), result, input_precision=PRECISION)
    return result


@triton.jit
def _scores(product, bias, head, start, TURNED: tl.constexpr, seen, SCALE, CENTER, COLUMNS):
    """Scores in units of log2 with the bias of their offsets, minus infinity where nothing is seen.

    The offset is start in the corner, and grows along the rows, or, of scores turned round, shrinks along them.
    """
    scores = product * (SCALE * LOG2E)
    if bias is not None:
        offset = tl.arange(0, product.shape[1])[None, :] - tl.arange(0, product.shape[0])[:, None]
        if TURNED:
            offset = -offset
        place = bias + (head.to(tl.int64) * COLUMNS + start + CENTER) + offset
        scores += tl.load(place, mask=seen, other=0.0) * LOG2E
    return tl.where(seen, scores, -float("inf"))


@triton.jit
def _add_diagonals(held, x, n, BT: tl.constexpr, BS: tl.constexpr):
    """Sum x[i, j], the n-th tile of a walk, along the offsets key - query, and add that to runs of BS offsets.

    Rows i come in groups of BS. Rolled left by its place in its group, a row of group g adds to run n - g, and with
    what came round to the run before. Run m is held in row m mod RUNS, of twice as many as there are groups.
    """
    GROUPS: tl.constexpr = BT // BS
    RUNS: tl.constexpr = 2 * GROUPS
    column = tl.arange(0, BT)[:, None] % BS + tl.arange(0, BS)[None, :]
    rolled = tl.gather(x, column % BS, 1)
    ahead = tl.sum(tl.reshape(tl.where(column < BS, rolled, 0.0), (GROUPS, BS, BS)), 1)
    behind = tl.sum(tl.reshape(tl.where(column < BS, 0.0, rolled), (GROUPS, BS, BS)), 1)
    place = (n - tl.arange(0, GROUPS)[None, :] - tl.arange(0, RUNS)[:, None]) & (RUNS - 1)
    held += tl.sum(tl.where((place == 0)[:, :, None], ahead[None, :, :], 0.0), 1)
    return held + tl.sum(tl.where((place == 1)[:, :, None], behind[None, :, :], 0.0), 1)


@triton.jit
def _query_words(seed, at, head):
    """Two random words for each token of a head as a query."""
    zeros = tl.zeros_like(at)
    add, times, _, _ = tl.philox(tl.load(seed), at, zeros + head, zeros, zeros)
    return add, times


@triton.jit
def _key_words(seed, at, head):
    """Two random words for each token of a head as a key."""
    zeros = tl.zeros_like(at)
    _, _, add, times = tl.philox(tl.load(seed), at, zeros + head, zeros, zeros)
    return add, times


@triton.jit
def _survives(query_add, query_times, key_add, key_times, DROPPED):
    """Which weights dropout leaves: all but DROPPED in 2**16."""
    word = (query_add + key_add) * (query_times | 1)
    word ^= word >> 16
    word *= key_times | 1
    return (word >> 16).to(tl.int32) >= DROPPED


_LENGTHS = ["T", "SPANS", "SEQUENCES", "BACK", "FORTH", "CHUNK", "CENTER", "COLUMNS", "GRID", "SLOTS", "DROPPED"]


@triton.jit(do_not_specialize=_LENGTHS)
def forward_kernel(
    q, k, v, bias, kept, origins, seed, output, log_sum, table, bounds,
    T, SPANS, SEQUENCES, H, BACK, FORTH, CHUNK, CENTER, COLUMNS, DROPPED, GRID, SCALE, KEEP_RATE,
    K: tl.constexpr, V: tl.constexpr, PACKED: tl.constexpr, FLOAT32: tl.constexpr, PRECISION: tl.constexpr,
    BT: tl.constexpr, BS: tl.constexpr, D: tl.constexpr, S: tl.constexpr,
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
    queries = _tile(q, first, first, stop, head, H, K, 0, BT, S, FLOAT32)
    largest = tl.full((BT,), NOTHING, tl.float32)
    total = tl.zeros((BT,), tl.float32)
    result = tl.zeros((BT, D), tl.float32)
    if seed is not None:
        query_add, query_times = _query_words(seed, at, head)
    corner = first - GRID
    for n in range((lowest - corner) // BS, tl.cdiv(highest - corner, BS)):
        start = corner + n * BS
        other = start + tl.arange(0, BS)
        keys = _tile(k, start, begin, end, head, H, K, 0, BS, S, FLOAT32)
        values = _tile(v, start, begin, end, head, H, V, column, BS, D, FLOAT32)
        seen = (other[None, :] >= low[:, None]) & (other[None, :] < high[:, None])
        seen &= _inside(kept, other, begin, end)[None, :]
        product = _product(
            q, queries, first, first, stop, k, keys, start, begin, end, head, H, K, BT, BS, S, FLOAT32, PRECISION
        )
        scores = _scores(product, bias, head, start - first, False, seen, SCALE, CENTER, COLUMNS)
        larger = tl.maximum(largest, tl.max(scores, 1))
        shrink = tl.exp2(largest - larger)
        weights = tl.exp2(scores - larger[:, None])
        total = total * shrink + tl.sum(weights, 1)
        if seed is not None:
            key_add, key_times = _key_words(seed, other, head)
            survives = _survives(
                query_add[:, None], query_times[:, None], key_add[None, :], key_times[None, :], DROPPED
            )
            weights = tl.where(survives, weights, 0.0)
        result = result * shrink[:, None]
        result = tl.dot(weights.to(values.dtype), values, result, input_precision=PRECISION)
        largest = larger
    here &= total != 0  # a bias may hide every key
    result = tl.where(here[:, None], result / (tl.where(here, total, 1.0) * KEEP_RATE)[:, None], 0.0)
    written = (at < stop)[:, None] & (cols < V)
    tl.store(output + row[:, None] * V + cols, result.to(output.dtype.element_ty), mask=written)
    tl.store(log_sum + row, tl.where(here, largest + tl.log2(total), 0.0), mask=(at < stop) & (column == 0))


@triton.jit(do_not_specialize=_LENGTHS)
def d_query_kernel(
    q, k, v, grad, output, log_sum, bias, kept, origins, seed, d_query, delta, d_bias, table, bounds,
    T, SPANS, SEQUENCES, H, BACK, FORTH, CHUNK, CENTER, COLUMNS, DROPPED, GRID, SLOTS, SCALE, KEEP_RATE,
    K: tl.constexpr, V: tl.constexpr, PACKED: tl.constexpr, FLOAT32: tl.constexpr, PRECISION: tl.constexpr,
    BT: tl.constexpr, BS: tl.constexpr, D: tl.constexpr, S: tl.constexpr,
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
    product_sum = tl.zeros((BT,), tl.float32)
    for part in range(0, V, D):
        outputs = _tile(output, first, first, stop, head, H, V, part, BT, D, True)
        product_sum += tl.sum(outputs * _tile(grad, first, first, stop, head, H, V, part, BT, D, True), 1)
    product_sum *= KEEP_RATE
    tl.store(delta + row, product_sum, mask=(at < stop) & (column == 0))
    queries = _tile(q, first, first, stop, head, H, K, 0, BT, S, FLOAT32)
    grads = _tile(grad, first, first, stop, head, H, V, 0, BT, S, FLOAT32)
    norm = tl.load(log_sum + row, mask=here, other=0.0)
    if seed is not None:
        query_add, query_times = _query_words(seed, at, head)
    result = tl.zeros((BT, D), tl.float32)
    GROUPS: tl.constexpr = BT // BS
    held = tl.zeros((2 * GROUPS, BS), tl.float32)
    ring, slot = tl.arange(0, 2 * GROUPS)[:, None], tl.arange(0, BS)[None, :]
    sums = d_bias
    if d_bias is not None:
        sums += (span.to(tl.int64) * H + head) * SLOTS
    corner = first - GRID
    number, until = (lowest - corner) // BS, tl.cdiv(highest - corner, BS)
    for n in range(number, until):
        start = corner + n * BS
        other = start + tl.arange(0, BS)
        keys = _tile(k, start, begin, end, head, H, K, 0, BS, S, FLOAT32)
        values = _tile(v, start, begin, end, head, H, V, 0, BS, S, FLOAT32)
        seen = (other[None, :] >= low[:, None]) & (other[None, :] < high[:, None])
        seen &= _inside(kept, other, begin, end)[None, :] & here[:, None]
        product = _product(
            q, queries, first, first, stop, k, keys, start, begin, end, head, H, K, BT, BS, S, FLOAT32, PRECISION
        )
        scores = _scores(product, bias, head, start - first, False, seen, SCALE, CENTER, COLUMNS)
        weights = tl.exp2(scores - norm[:, None])
        d_weights = _product(
            grad, grads, first, first, stop, v, values, start, begin, end, head, H, V, BT, BS, S, FLOAT32, PRECISION
        )
        if seed is not None:
            key_add, key_times = _key_words(seed, other, head)
            survives = _survives(
                query_add[:, None], query_times[:, None], key_add[None, :], key_times[None, :], DROPPED
            )
            d_weights = tl.where(survives, d_weights, 0.0)
        d_scores = weights * (d_weights - product_sum[:, None])
        if max(K, D) > S:
            keys = _tile(k, start, begin, end, head, H, K, column, BS, D, FLOAT32)
        result = tl.dot(d_scores.to(keys.dtype), keys, result, input_precision=PRECISION)
        if d_bias is not None:
            held = _add_diagonals(held, d_scores, n, BT, BS)
            full = ((ring - n + GROUPS) & (2 * GROUPS - 1)) == 0  # no later tile adds to it
            tl.store(sums + (n - GROUPS) * BS + slot + ring * 0, held, mask=full & (n >= GROUPS) & (column == 0))
            held = tl.where(full, 0.0, held)
    if d_bias is not None:
        age = (until - 1 - ring) & (2 * GROUPS - 1)
        run = until - 1 - age
        tl.store(sums + run * BS + slot, held, mask=(age < GROUPS) & (run >= 0) & (column == 0))
    written = (at < stop)[:, None] & (cols < K)
    result *= SCALE / KEEP_RATE
    tl.store(d_query + row[:, None] * K + cols, result.to(d_query.dtype.element_ty), mask=written)


@triton.jit(do_not_specialize=_LENGTHS)
def d_key_value_kernel(
    q, k, v, grad, log_sum, delta, bias, kept, origins, seed, d_key, d_value, table, bounds,
    T, SPANS, SEQUENCES, H, BACK, FORTH, CHUNK, CENTER, COLUMNS, DROPPED, SCALE, KEEP_RATE,
    K: tl.constexpr, V: tl.constexpr, PACKED: tl.constexpr, FLOAT32: tl.constexpr, PRECISION: tl.constexpr,
    BT: tl.constexpr, BS: tl.constexpr, D: tl.constexpr, S: tl.constexpr,
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
    keys = _tile(k, first, first, stop, head, H, K, 0, BT, S, FLOAT32)
    values = _tile(v, first, first, stop, head, H, V, 0, BT, S, FLOAT32)
    key_sum = tl.zeros((BT, D), tl.float32)
    value_sum = tl.zeros((BT, D), tl.float32)
    if seed is not None:
        key_add, key_times = _key_words(seed, at, head)
    for n in range(tl.cdiv(highest - lowest, BS)):
        start = lowest + n * BS
        other = start + tl.arange(0, BS)
        queries = _tile(q, start, begin, end, head, H, K, 0, BS, S, FLOAT32)
        grads = _tile(grad, start, begin, end, head, H, V, 0, BS, S, FLOAT32)
        there = _inside(kept, other, begin, end)
        place = other.to(tl.int64) * H + head
        norm = tl.load(log_sum + place, mask=there, other=0.0)
        product_sum = tl.load(delta + place, mask=there, other=0.0)
        seen = (other[None, :] >= low[:, None]) & (other[None, :] < high[:, None]) & there[None, :] & here[:, None]
        product = _product(
            k, keys, first, first, stop, q, queries, start, begin, end, head, H, K, BT, BS, S, FLOAT32, PRECISION
        )
        scores = _scores(product, bias, head, first - start, True, seen, SCALE, CENTER, COLUMNS)
        weights = tl.exp2(scores - norm[None, :])
        d_weights = _product(
            v, values, first, first, stop, grad, grads, start, begin, end, head, H, V, BT, BS, S, FLOAT32, PRECISION
        )
        survivors = weights
        if seed is not None:
            query_add, query_times = _query_words(seed, other, head)
            survives = _survives(
                query_add[None, :], query_times[None, :], key_add[:, None], key_times[:, None], DROPPED
            )
            survivors = tl.where(survives, weights, 0.0)
            d_weights = tl.where(survives, d_weights, 0.0)
        d_scores = weights * (d_weights - product_sum[None, :])
        if max(V, D) > S:
            grads = _tile(grad, start, begin, end, head, H, V, column, BS, D, FLOAT32)
        if max(K, D) > S:
            queries = _tile(q, start, begin, end, head, H, K, column, BS, D, FLOAT32)
        value_sum = tl.dot(survivors.to(grads.dtype), grads, value_sum, input_precision=PRECISION)
        key_sum = tl.dot(d_scores.to(queries.dtype), queries, key_sum, input_precision=PRECISION)
    place, written = row[:, None], (at < stop)[:, None]
    key_sum *= SCALE / KEEP_RATE
    value_sum /= KEEP_RATE
    tl.store(d_key + place * K + cols, key_sum.to(d_key.dtype.element_ty), mask=written & (cols < K))
    tl.store(d_value + place * V + cols, value_sum.to(d_value.dtype.element_ty), mask=written & (cols < V))


def _origins(mask: Tensor, bounds: Tensor | None) -> Tensor:
    """Return each sequence's first kept token, or any if none is kept, counted from the first row's first token."""
    batch, length = mask.shape
    token = torch.arange(length, device=mask.device)
    if bounds is None:
        return (mask.int().argmax(1) + torch.arange(batch, device=mask.device) * length).int()
    next_kept = torch.where(mask[0], token, length).flip(0).cummin(0).values.flip(0)
    return torch.nn.functional.pad(next_kept, (0, 1), value=length)[bounds[0, :-1].long()].int()


class _Call:
    """State shared by all launches for one set of inputs `(B, T, H, ·)`."""

    def __init__(
        self, query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, mask: Tensor | None,
        seed: Tensor | None, cu_seqlens: Tensor | None, settings: Settings,
    ) -> None:  # fmt: skip
        radius, chunk_size, causal, scale, dropout = settings
        self.batch, self.length, self.heads, self.width = query.shape
        self.dtype, self.cu_seqlens, self.value_width = query.dtype, cu_seqlens, value.shape[3]
        self.capability = capability_of(query)
        whole = chunk_size - 1 if chunk_size is not None else radius or 0
        self.reach = min(whole, self.length - 1)
        self.ahead = 0 if causal else self.reach
        self.first_column = whole - self.reach
        self.tables: dict[int, tuple[int, dict[str, Any]]] = {}
        self.mask = mask
        dropped = dropped_levels(dropout)
        narrow = query.dtype == torch.float16 or (query.dtype == torch.bfloat16 and not interpreted())
        self.arguments: dict[str, Any] = {
            "q": query.contiguous(),
            "k": key.contiguous(),
            "v": value.contiguous(),
            "bias": None if bias is None else bias.float().contiguous(),
            "kept": None if mask is None else mask.contiguous().view(torch.uint8),
            "origins": None,
            # read by the kernels, so that the host does not wait
            "seed": None if seed is None else seed.to(query.device, non_blocking=True),
            "T": self.length,
            "H": self.heads,
            "BACK": self.reach,
            "FORTH": self.ahead,
            "CHUNK": None if chunk_size is None else min(chunk_size, self.length),
            "CENTER": 0 if bias is None else whole,
            "COLUMNS": 0 if bias is None else bias.shape[1],
            "DROPPED": dropped,
            "SCALE": float(scale),
            "KEEP_RATE": 1 - dropped / LEVELS,
            "K": self.width,
            "V": self.value_width,
            "FLOAT32": not narrow,
            "PRECISION": "tf32x3" if query.dtype == torch.float32 else "tf32",
            "PACKED": cu_seqlens is not None,
        }

    def configuration(self, kernel: str) -> Configuration:
        return _choose(kernel, max(self.width, self.value_width), self.dtype, self.capability)

    def grid(self, configuration: Configuration) -> int:
        """Return how many tokens before a block of queries its grid of keys starts: a multiple of the block."""
        return blocks(self.reach, configuration.tiles["BS"]) * configuration.tiles["BS"]

    def spans(self, configuration: Configuration) -> tuple[int, dict[str, Any]]:
        """Return the number of blocks, and the arguments that locate them."""
        size = configuration.tiles["BT"]
        if size not in self.tables:
            self.tables[size] = span_arguments(self.cu_seqlens, self.batch, self.length, size)
        return self.tables[size]

    def launch(self, kernel: Any, configuration: Configuration, width: int, **arguments: Any) -> None:
        """Run a kernel whose results have `width` columns per head."""
        number, place = self.spans(configuration)
        if self.mask is not None and self.arguments["CHUNK"] is not None and self.arguments["origins"] is None:
            self.arguments["origins"] = _origins(self.mask, place["bounds"])
        programs = number * self.heads * blocks(width, configuration.tiles["D"])
        launch(kernel, programs, configuration, **self.arguments, **place, **arguments)

    def sums_of_bias(self, configuration: Configuration) -> Tensor:
        """Allocate zeros for each block's part of the bias gradient, `(blocks, H, offsets)`."""
        rows, size = configuration.tiles["BT"], configuration.tiles["BS"]
        width = blocks(self.grid(configuration) + rows + self.ahead, size) * size
        shape = (self.spans(configuration)[0], self.heads, width)
        return torch.empty(shape, dtype=torch.float32, device=self.arguments["q"].device).zero_()

    def bias_gradient(self, sums: Tensor, bias: Tensor, configuration: Configuration) -> Tensor:
        """Add the parts of the blocks."""
        first, number = self.grid(configuration) - self.reach, self.reach + 1 + self.ahead
        d_bias = torch.zeros_like(bias, memory_format=torch.contiguous_format)
        summed = sums[..., first : first + number].sum(0) / self.arguments["KEEP_RATE"]
        d_bias[:, self.first_column : self.first_column + number] = summed
        return d_bias


def forward(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, mask: Tensor | None, seed: Tensor | None,
    cu_seqlens: Tensor | None, settings: Settings,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return outputs in query's dtype, and log2 of the sum of weights, `(B, T, H)`."""
    call = _Call(query, key, value, bias, mask, seed, cu_seqlens, settings)
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
    grad: Tensor, output: Tensor, log_sum: Tensor, query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None,
    mask: Tensor | None, seed: Tensor | None, cu_seqlens: Tensor | None, settings: Settings,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:  # fmt: skip
    """Return gradients of query, key, value and bias."""
    call = _Call(query, key, value, bias, mask, seed, cu_seqlens, settings)
    d_query, d_key, d_value = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (query, key, value))
    if mask is not None:  # infinite there, it would make NaN of weights of 0
        grad = grad.masked_fill(~mask[:, :, None, None], 0.0)
    shared = {"grad": grad.contiguous(), "log_sum": log_sum, "delta": torch.empty_like(log_sum)}
    configuration = call.configuration("d_query")
    sums = None if bias is None else call.sums_of_bias(configuration)
    call.launch(
        d_query_kernel,
        configuration,
        call.width,
        **shared,
        output=output.contiguous(),
        d_query=d_query,
        d_bias=sums,
        GRID=call.grid(configuration),
        SLOTS=0 if sums is None else sums.shape[2],
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
        return d_query, d_key, d_value, None
    return d_query, d_key, d_value, call.bias_gradient(sums, bias, configuration)
