"""Causal linear attention on a GPU: one kernel family, called once for the outputs and three times for the gradients.

The sequence is cut into spans of a few hundred tokens. What each span adds to S is summed by programs that know
nothing of each other (`sums_kernel`), a short loop over spans turns the sums into the S that each span begins with
(`carry_kernel`), and one program per span and tile of value columns then walks over its blocks of tokens with S in
registers (`walk_kernel`):

    A = tril(Q K^T),  O = A V + Q S,  S <- S + K^T V

No S of a block is ever stored, and nothing but one S per span. Where a batch has heads enough to fill a GPU, one span
is the whole sequence, and the first two kernels are left out.

The gradients have the same form, since o[t] = sum_{s<=t} (q[t].k[s]) v[s]:

    dq[t] = sum_{s<=t} (do[t].v[s]) k[s]      the op of (dO, V, K), whose state is S^T
    dk[s] = sum_{t>=s} (v[s].do[t]) q[t]      the op of (V, dO, Q) backwards, whose state is dS^T
    dv[s] = sum_{t>=s} (k[s].q[t]) do[t]      the op of (K, Q, dO) backwards, whose state is dS

so the same kernel computes them, and no accumulator is ever transposed: compilers have got that wrong.

Products are of the inputs' own precision for bfloat16, of tf32 for float16, which has as many digits but would
overflow in S, and of three tf32 parts for float32. Sums are float32. A key dim beyond one tile is walked over in
slices, one launch each, that add to the outputs of the one before.

B batch · T length · H heads · K key dim · V value dim
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..launching import Configuration, blocks, capability_of, launch
from ..packed import spans
from ..triton_kernels import spans_of_sequence, tokens_of_span

_PROGRAMS = 264
"""Programs that fill a GPU: two for each of the 132 multiprocessors of the one in mind."""

_SHORTEST_SPAN = 256
"""Tokens; a sum over fewer would be written more often than it saves time."""

_BLOCK = 64

CONFIGURATIONS = {
    configuration.name: configuration
    for configuration in (
        Configuration("sums k64", "K <= 64, or not bfloat16, or before sm_90", {"BT": 64, "BK": 64, "BV": 64}, 4, 2),
        Configuration("sums k128", "bfloat16, K > 64, from sm_90 on", {"BT": 64, "BK": 128, "BV": 64}, 4, 3),
        Configuration("carry", "everything", {"BLOCK": 1024}, 4, 1),
        Configuration("walk k64 bfloat16", "bfloat16, K <= 64, from sm_90 on", {"BT": 64, "BK": 64, "BV": 64}, 4, 2),
        Configuration("walk k64 bfloat16 before sm_90", "bfloat16", {"BT": 16, "BK": 64, "BV": 64}, 4, 3),
        Configuration("walk k128 bfloat16", "bfloat16, K > 64, from sm_90 on", {"BT": 64, "BK": 128, "BV": 64}, 8, 2),
        Configuration("walk k64", "float32 and float16, from sm_90 on", {"BT": 16, "BK": 64, "BV": 64}, 8, 1),
        Configuration(
            "walk k64 before sm_90", "float32 and float16, before sm_90", {"BT": 16, "BK": 64, "BV": 16}, 4, 1
        ),
    )
}
"""Tiles of 32 are avoided: compilers have got products with several of them wrong on sm_90."""


def _choose(kernel: str, width: int, dtype: torch.dtype, capability: int) -> Configuration:
    """The widest tile that a key dim fills and that fits into registers without spilling one."""
    recent, narrow = capability >= 90, dtype == torch.bfloat16
    tile = 128 if width > 64 and narrow and recent else 64
    if kernel == "sums":
        return CONFIGURATIONS[f"sums k{tile}"]
    name = f"walk k{tile}{' bfloat16' if narrow else ''}"
    return CONFIGURATIONS[name if recent else f"{name} before sm_90"]


def why_not(query: Tensor) -> str | None:
    """The op's objection to running here, or None."""
    if query.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return f"query must be float32, bfloat16 or float16; got {query.dtype}"
    return None


@triton.jit
def _tile(x, at, stop, first, head, H, WIDTH: tl.constexpr, column, COLUMNS: tl.constexpr, FLOAT32: tl.constexpr):
    """Rows of one head of `(tokens, H, WIDTH)`, zeros outside of the span and of the head."""
    cols = column + tl.arange(0, COLUMNS)[None, :]
    rows = at[:, None]
    place = x + (rows.to(tl.int64) * H + head) * WIDTH + cols
    tile = tl.load(place, mask=(rows >= first) & (rows < stop) & (cols < WIDTH), other=0.0)
    return tile.to(tl.float32) if FLOAT32 else tile


@triton.jit(do_not_specialize=["T", "SPANS", "SEQUENCES"])
def sums_kernel(
    k, v, sums, table, bounds,
    T, SPANS, SIZE, SEQUENCES, H,
    K: tl.constexpr, V: tl.constexpr, REVERSE: tl.constexpr, PACKED: tl.constexpr,
    FLOAT32: tl.constexpr, PRECISION: tl.constexpr,
    BT: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """K^T V over a span for one tile of `(K, V)`; not for the span behind which there is none."""
    pid = tl.program_id(0)
    tiles_v = tl.cdiv(V, BV)
    tiles = tiles_v * tl.cdiv(K, BK)
    tile, row = pid % tiles, pid // tiles
    column_v, column_k = tile % tiles_v * BV, tile // tiles_v * BK
    head, span = row % H, row // H
    _, first, stop, begin, end = tokens_of_span(span, table, bounds, T, SPANS, SIZE, SEQUENCES, PACKED)
    if REVERSE:
        last = first == begin
    else:
        last = stop == end
    if last | (stop <= first):
        return
    total = tl.zeros((BK, BV), tl.float32)
    for start in range(first, stop, BT):
        at = start + tl.arange(0, BT)
        keys = _tile(k, at, stop, first, head, H, K, column_k, BK, FLOAT32)
        values = _tile(v, at, stop, first, head, H, V, column_v, BV, FLOAT32)
        total = tl.dot(tl.trans(keys), values, total, input_precision=PRECISION)
    rows, cols = column_k + tl.arange(0, BK)[:, None], column_v + tl.arange(0, BV)[None, :]
    place = sums + (span.to(tl.int64) * H + head) * (K * V) + rows * V + cols
    tl.store(place, total, mask=(rows < K) & (cols < V))


@triton.jit(do_not_specialize=["SPANS", "SEQUENCES"])
def carry_kernel(
    sums, state, bounds,
    SPANS, SEQUENCES, H,
    SIZE: tl.constexpr, REVERSE: tl.constexpr, PACKED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Replace the sums of each span by the state before it, for BLOCK of the SIZE numbers of one head's state."""
    tiles = tl.cdiv(SIZE, BLOCK)
    pid = tl.program_id(0)
    row = pid // tiles
    cols = (pid - row * tiles) * BLOCK + tl.arange(0, BLOCK)
    head, sequence = row % H, row // H
    first, count = spans_of_sequence(sequence, bounds, SPANS, SEQUENCES, PACKED)
    total = tl.zeros((BLOCK,), tl.float32)
    if state is not None:
        total = tl.load(state + (sequence.to(tl.int64) * H + head) * SIZE + cols, mask=cols < SIZE, other=0.0)
    for n in range(count):
        span = first + n
        if REVERSE:
            span = first + count - 1 - n
        place = sums + (span.to(tl.int64) * H + head) * SIZE + cols
        own = tl.load(place, mask=(cols < SIZE) & (n < count - 1), other=0.0)
        tl.store(place, total, mask=cols < SIZE)
        total += own


@triton.jit(do_not_specialize=["T", "SPANS", "SEQUENCES"])
def walk_kernel(
    q, k, v, output, before, state, final, table, bounds,
    T, SPANS, SIZE, SEQUENCES, H, FIRST_K,
    K: tl.constexpr, V: tl.constexpr, REVERSE: tl.constexpr, TURNED: tl.constexpr, ADD: tl.constexpr,
    PACKED: tl.constexpr, FLOAT32: tl.constexpr, PRECISION: tl.constexpr,
    BT: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """Outputs of a span for BV value columns, from the BK key columns behind FIRST_K on.

    S begins as `before`, one per span, else as `state`, one per sequence, else as zeros, and ends in `final`. TURNED
    means that they hold S^T. ADD adds to the outputs that are there.
    """
    pid = tl.program_id(0)
    tiles = tl.cdiv(V, BV)
    row = pid // tiles
    column = (pid - row * tiles) * BV
    head, span = row % H, row // H
    sequence, first, stop, begin, end = tokens_of_span(span, table, bounds, T, SPANS, SIZE, SEQUENCES, PACKED)
    if stop <= first:
        return
    rows, cols = FIRST_K + tl.arange(0, BK)[:, None], column + tl.arange(0, BV)[None, :]
    cell = rows * V + cols
    if TURNED:
        cell = cols * K + rows
    inside = (rows < K) & (cols < V)
    own = (sequence.to(tl.int64) * H + head) * (K * V)
    S = tl.zeros((BK, BV), tl.float32)
    if before is not None:
        S = tl.load(before + (span.to(tl.int64) * H + head) * (K * V) + cell, mask=inside, other=0.0)
    elif state is not None:
        S = tl.load(state + own + cell, mask=inside, other=0.0)
    row_in_block, col_in_block = tl.arange(0, BT)[:, None], tl.arange(0, BT)[None, :]
    number = tl.cdiv(stop - first, BT)
    for n in range(number):
        block = n
        if REVERSE:
            block = number - 1 - n
        at = first + block * BT + tl.arange(0, BT)
        queries = _tile(q, at, stop, first, head, H, K, FIRST_K, BK, FLOAT32)
        keys = _tile(k, at, stop, first, head, H, K, FIRST_K, BK, FLOAT32)
        values = _tile(v, at, stop, first, head, H, V, column, BV, FLOAT32)
        scores = tl.dot(queries, tl.trans(keys), input_precision=PRECISION)
        if REVERSE:
            scores = tl.where(row_in_block <= col_in_block, scores, 0.0)
        else:
            scores = tl.where(row_in_block >= col_in_block, scores, 0.0)
        result = tl.dot(queries, S.to(queries.dtype), input_precision=PRECISION)
        result = tl.dot(scores.to(values.dtype), values, result, input_precision=PRECISION)
        S = tl.dot(tl.trans(keys), values, S, input_precision=PRECISION)
        place = output + (at[:, None].to(tl.int64) * H + head) * V + cols
        written = (at[:, None] < stop) & (cols < V)
        if ADD:
            result += tl.load(place, mask=written, other=0.0).to(tl.float32)
        tl.store(place, result.to(output.dtype.element_ty), mask=written)
    if final is not None:
        if REVERSE:
            last = first == begin
        else:
            last = stop == end
        tl.store(final + own + cell, S, mask=inside & last)


class _Call:
    """What all launches for one set of inputs `(B, T, H, ·)` share."""

    def __init__(self, query: Tensor, value: Tensor, cu_seqlens: Tensor | None) -> None:
        """Decide how long spans are: as long as they can be while there are programs enough."""
        batch, length, self.heads = query.shape[:3]
        self.dtype, self.capability = query.dtype, capability_of(query)
        self.sequences = batch if cu_seqlens is None else len(cu_seqlens) - 1
        self.place: dict[str, Any]
        # interpreted, bfloat16 has no arithmetic
        narrow = query.dtype == torch.bfloat16 and not _interpreted()
        precision = "tf32" if query.dtype != torch.float32 else "tf32x3"
        self.precision = {"FLOAT32": not narrow, "PRECISION": precision}
        programs = batch * self.heads * blocks(min(query.shape[3], value.shape[3]), 64)
        most = max(1, length // _SHORTEST_SPAN)
        size = blocks(blocks(length, min(blocks(_PROGRAMS, programs), most)), _BLOCK) * _BLOCK
        self.one_span = size >= length
        if cu_seqlens is None:
            each = blocks(length, size)
            self.spans = each * batch
            self.place = {"table": None, "bounds": None, "SPANS": each, "SEQUENCES": batch}
        else:
            table, ends = spans(cu_seqlens, length, size)
            self.spans = len(table)
            self.place = {"table": table, "bounds": ends, "SPANS": 0, "SEQUENCES": self.sequences}
        self.place |= {"H": self.heads, "PACKED": cu_seqlens is not None}
        self.tokens = {"T": length, "SIZE": size}

    def carry(self, key: Tensor, value: Tensor, state: Tensor | None, reverse: bool) -> Tensor | None:
        """The S that each span begins with, `(spans, H, K, V)`; None where each sequence is one span."""
        if self.one_span:
            return None
        width, value_width = key.shape[3], value.shape[3]
        sums = torch.empty(self.spans, self.heads, width, value_width, dtype=torch.float32, device=key.device)
        configuration = _choose("sums", width, self.dtype, self.capability)
        tiles = blocks(width, configuration.tiles["BK"]) * blocks(value_width, configuration.tiles["BV"])
        launch(
            sums_kernel,
            self.spans * self.heads * tiles,
            configuration,
            k=key,
            v=value,
            sums=sums,
            K=width,
            V=value_width,
            REVERSE=reverse,
            **self.place,
            **self.tokens,
            **self.precision,
        )
        configuration = CONFIGURATIONS["carry"]
        size = width * value_width
        place = {name: x for name, x in self.place.items() if name != "table"}
        launch(
            carry_kernel,
            self.sequences * self.heads * blocks(size, configuration.tiles["BLOCK"]),
            configuration,
            sums=sums,
            state=state,
            SIZE=size,
            REVERSE=reverse,
            **place,
        )
        return sums

    def walk(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        dtype: torch.dtype,
        before: Tensor | None,
        state: Tensor | None,
        final: Tensor | None = None,
        reverse: bool = False,
        turned: bool = False,
    ) -> Tensor:
        """Outputs `(B, T, H, V)` in a dtype; S after the last token goes into `final`."""
        width, value_width = key.shape[3], value.shape[3]
        configuration = _choose("walk", width, self.dtype, self.capability)
        slices = range(0, width, configuration.tiles["BK"])
        output = torch.empty(value.shape, dtype=dtype if len(slices) == 1 else torch.float32, device=value.device)
        for first in slices:
            launch(
                walk_kernel,
                self.spans * self.heads * blocks(value_width, configuration.tiles["BV"]),
                configuration,
                q=query,
                k=key,
                v=value,
                output=output,
                before=before,
                state=state,
                final=final,
                FIRST_K=first,
                K=width,
                V=value_width,
                REVERSE=reverse,
                TURNED=turned,
                ADD=first > 0,
                **self.place,
                **self.tokens,
                **self.precision,
            )
        return output.to(dtype)


def _interpreted() -> bool:
    return not isinstance(walk_kernel, triton.runtime.JITFunction)


def _wide(state: Tensor | None) -> Tensor | None:
    return None if state is None else state.float().contiguous()


def _end(state: Tensor | None, query: Tensor, value: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    """Where S after the last token goes; an empty sequence, which no program sees, ends with the S it began with."""
    if cu_seqlens is not None and state is not None:
        return state.clone()
    sequences = query.shape[0] if cu_seqlens is None else len(cu_seqlens) - 1
    shape = (sequences, *query.shape[2:], value.shape[3])
    make: Any = torch.empty if cu_seqlens is None else torch.zeros
    end: Tensor = make(shape, dtype=torch.float32, device=query.device)
    return end


def forward(
    query: Tensor, key: Tensor, value: Tensor, state: Tensor | None, cu_seqlens: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Outputs and last state in float32."""
    query, key, value, state = query.contiguous(), key.contiguous(), value.contiguous(), _wide(state)
    call = _Call(query, value, cu_seqlens)
    final = _end(state, query, value, cu_seqlens)
    before = call.carry(key, value, state, reverse=False)
    return call.walk(query, key, value, torch.float32, before, state, final), final


def backward(
    grad: Tensor,
    grad_state: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    state: Tensor | None,
    cu_seqlens: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of query, key and value in their dtype, and of the first state in float32."""
    query, key, value, state = query.contiguous(), key.contiguous(), value.contiguous(), _wide(state)
    grad_state = grad_state.float().contiguous()
    # as a factor it is rounded to bfloat16 anyway, and read four times; float16 would overflow
    grad = grad.to(query.dtype if query.dtype == torch.bfloat16 else torch.float32).contiguous()
    call = _Call(query, value, cu_seqlens)
    before = call.carry(key, value, state, reverse=False)
    d_query = call.walk(grad, value, key, query.dtype, before, state, turned=True)
    behind = call.carry(query, grad, grad_state, reverse=True)
    d_key = call.walk(value, grad, query, query.dtype, behind, grad_state, reverse=True, turned=True)
    d_state = _end(grad_state, query, value, cu_seqlens)
    d_value = call.walk(key, query, grad, query.dtype, behind, grad_state, d_state, reverse=True)
    return d_query, d_key, d_value, d_state
