"""Causal linear attention on a GPU: one kernel family, called once for the outputs and three times for the gradients.

The sequence is cut into spans of a few hundred tokens. Independent programs sum what each span adds to S
(`sums_kernel`), a short loop over spans turns the sums into each span's initial S (`carry_kernel`), and one program
per span and tile of value columns walks over its blocks of tokens with S in registers (`walk_kernel`):

    A = tril(Q K^T),  O = A V + Q S,  S <- S + K^T V

Only one S per span is stored. If a batch has enough heads to fill a GPU, the sequence is one span, and the first two
kernels are skipped.

The gradients have the same form, since o[t] = sum_{s<=t} (q[t].k[s]) v[s]:

    dq[t] = sum_{s<=t} (do[t].v[s]) k[s]      the op of (dO, V, K), whose state is S^T
    dk[s] = sum_{t>=s} (v[s].do[t]) q[t]      the op of (V, dO, Q) in reverse, whose state is dS^T
    dv[s] = sum_{t>=s} (k[s].q[t]) do[t]      the op of (K, Q, dO) in reverse, whose state is dS

so the same kernel computes them, and no accumulator is transposed, which compilers have got wrong.

A norm of each head and a gate, n = o / rms(o) and y = n silu(g), are applied to a block of outputs before it is
stored, if one program has complete heads, and otherwise by `norm_kernel`. `norm_gradient_kernel` computes the gradient
from n and 1 / rms(o), which the forward stores: in bfloat16, writing and reading n moves 4 bytes per number, and
recomputing it from q, k and v at least 6, plus all products.

Products use the inputs' precision for bfloat16, tf32 for float16, which has as many digits but would overflow in S,
and three tf32 parts for float32. Sums are float32. A key dim beyond one tile takes several launches, one per slice,
each adding to the outputs of the one before.

B batch · T length · H heads · K key dim · V value dim
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..launching import Configuration, blocks, capability_of, launch, like_hopper, tuned
from ..packed import span_arguments
from ..triton_kernels import interpreted, spans_of_sequence, tokens_of_span, why_not_dtype

_PROGRAMS = 264
"""Programs that fill a GPU: two for each of 132 multiprocessors."""

_SHORTEST_SPAN = 256
"""Fewest tokens per span: writing more sums would cost more than it saves."""

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
        Configuration("norm", "a norm behind heads of several tiles", {"BR": 16, "BV": 128}, 4, 1),
        Configuration("norm gradient", "every norm", {"BR": 8, "BV": 128}, 4, 1),
    )
}
"""No tiles of 32: compilers have got products with several of them wrong on sm_90."""


def _choose(kernel: str, width: int, dtype: torch.dtype, capability: int) -> Configuration:
    """Return the widest tile that a key dim fills and that fits the registers."""
    recent, narrow = like_hopper(capability), dtype == torch.bfloat16
    tile = 128 if width > 64 and narrow and recent else 64
    name = f"sums k{tile}"
    if kernel == "walk":
        name = f"walk k{tile}{' bfloat16' if narrow else ''}{'' if recent else ' before sm_90'}"
    return tuned("linear_attention", CONFIGURATIONS[name], capability)


def why_not(query: Tensor) -> str | None:
    """Return the op's objection to Triton, or None."""
    return why_not_dtype("query", query.dtype)


@triton.jit
def _tile(x, at, stop, first, head, H, WIDTH: tl.constexpr, column, COLUMNS: tl.constexpr, FLOAT32: tl.constexpr):
    """Rows of one head of `(tokens, H, WIDTH)`, zeros outside of the span and of the head."""
    cols = column + tl.arange(0, COLUMNS)[None, :]
    rows = at[:, None]
    place = x + (rows.to(tl.int64) * H + head) * WIDTH + cols
    tile = tl.load(place, mask=(rows >= first) & (rows < stop) & (cols < WIDTH), other=0.0)
    return tile.to(tl.float32) if FLOAT32 else tile


@triton.jit
def _gated(n, gate, normed, place, mask):
    """Store n into `normed` and multiply it with silu(gate), each if not None."""
    if normed is not None:
        tl.store(normed + place, n.to(normed.dtype.element_ty), mask=mask)
    if gate is not None:
        g = tl.load(gate + place, mask=mask, other=0.0).to(tl.float32)
        n *= g * tl.sigmoid(g)
    return n


@triton.jit(do_not_specialize=["ROWS"])
def norm_kernel(o, gate, y, normed, scale, ROWS, EPS, V: tl.constexpr, BR: tl.constexpr, BV: tl.constexpr):
    """Compute n = o r with r = 1 / sqrt(mean(o^2) + EPS), and y = n silu(gate), for BR rows of `(ROWS, V)`.

    Columns are read tile by tile, for r and once more, out of a cache. r goes into `scale`, n into `normed`.
    """
    rows = tl.program_id(0) * BR + tl.arange(0, BR)
    place, cols = (rows.to(tl.int64) * V)[:, None], tl.arange(0, BV)[None, :]
    kept = (rows < ROWS)[:, None]
    squares = tl.zeros((BR,), tl.float32)
    for column in range(0, V, BV):
        tile = tl.load(o + place + column + cols, mask=kept & (column + cols < V), other=0.0)
        squares += tl.sum(tile * tile, 1)
    inverse = 1 / tl.sqrt(squares / V + EPS)
    if scale is not None:
        tl.store(scale + rows, inverse, mask=rows < ROWS)
    for column in range(0, V, BV):
        at, mask = place + column + cols, kept & (column + cols < V)
        n = tl.load(o + at, mask=mask, other=0.0) * inverse[:, None]
        tl.store(y + at, _gated(n, gate, normed, at, mask).to(y.dtype.element_ty), mask=mask)


@triton.jit
def _norm_tile(grad, normed, gate, at, mask):
    """Gradients of n, and of the gate if not None, with n, for one tile."""
    d_n = tl.load(grad + at, mask=mask, other=0.0).to(tl.float32)
    n = tl.load(normed + at, mask=mask, other=0.0).to(tl.float32)
    d_gate = d_n
    if gate is not None:
        g = tl.load(gate + at, mask=mask, other=0.0).to(tl.float32)
        opened = tl.sigmoid(g)
        # (g s)' = s (1 + g (1 - s))
        d_gate = d_n * n * opened * (1 + g * (1 - opened))
        d_n *= g * opened
    return n, d_n, d_gate


@triton.jit(do_not_specialize=["ROWS"])
def norm_gradient_kernel(
    grad, normed, scale, gate, d_o, d_gate, ROWS, V: tl.constexpr, BR: tl.constexpr, BV: tl.constexpr
):
    """Compute dn = grad silu(gate), do = r (dn - n mean(n dn)) and the gate's gradient, for BR rows of `(ROWS, V)`."""
    rows = tl.program_id(0) * BR + tl.arange(0, BR)
    place, cols = (rows.to(tl.int64) * V)[:, None], tl.arange(0, BV)[None, :]
    kept = (rows < ROWS)[:, None]
    products = tl.zeros((BR,), tl.float32)
    for column in range(0, V, BV):
        n, d_n, _ = _norm_tile(grad, normed, gate, place + column + cols, kept & (column + cols < V))
        products += tl.sum(n * d_n, 1)
    inverse = tl.load(scale + rows, mask=rows < ROWS, other=0.0)
    mean = products / V
    for column in range(0, V, BV):
        at, mask = place + column + cols, kept & (column + cols < V)
        n, d_n, own = _norm_tile(grad, normed, gate, at, mask)
        tl.store(d_o + at, (inverse[:, None] * (d_n - n * mean[:, None])).to(d_o.dtype.element_ty), mask=mask)
        if d_gate is not None:
            tl.store(d_gate + at, own.to(d_gate.dtype.element_ty), mask=mask)


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
    q, k, v, output, before, state, final, gate, normed, scale, table, bounds,
    T, SPANS, SIZE, SEQUENCES, H, FIRST_K, EPS,
    K: tl.constexpr, V: tl.constexpr, REVERSE: tl.constexpr, TURNED: tl.constexpr, ADD: tl.constexpr,
    PACKED: tl.constexpr, FLOAT32: tl.constexpr, PRECISION: tl.constexpr,
    BT: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """Outputs of a span for BV value columns, from the BK key columns behind FIRST_K on.

    S begins as `before`, one per span, else as `state`, one per sequence, else as zeros, and ends in `final`. TURNED
    means that they hold S^T. ADD adds to the outputs that are there. EPS, if not None, asks for the norm, as in
    `norm_kernel`, and that one tile holds all of K and V.
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
        if EPS is not None:
            row_of_token = at.to(tl.int64) * H + head
            inverse = 1 / tl.sqrt(tl.sum(result * result, 1) / V + EPS)
            if scale is not None:
                tl.store(scale + row_of_token, inverse, mask=at < stop)
            result = _gated(result * inverse[:, None], gate, normed, row_of_token[:, None] * V + cols, written)
        tl.store(place, result.to(output.dtype.element_ty), mask=written)
    if final is not None:
        if REVERSE:
            last = first == begin
        else:
            last = stop == end
        tl.store(final + own + cell, S, mask=inside & last)


_NO_EPILOGUE: dict[str, Any] = {"gate": None, "normed": None, "scale": None, "EPS": None}


class _Call:
    """State shared by all launches for one set of inputs `(B, T, H, ·)`."""

    def __init__(self, query: Tensor, value: Tensor, cu_seqlens: Tensor | None) -> None:
        """Choose the longest spans that give enough programs."""
        batch, length, self.heads = query.shape[:3]
        self.dtype, self.capability = query.dtype, capability_of(query)
        self.sequences = batch if cu_seqlens is None else len(cu_seqlens) - 1
        # interpreted, bfloat16 has no arithmetic
        narrow = query.dtype == torch.bfloat16 and not interpreted()
        precision = "tf32" if query.dtype != torch.float32 else "tf32x3"
        self.precision = {"FLOAT32": not narrow, "PRECISION": precision}
        # each packed sequence is a span at least
        programs = max(1, self.sequences * self.heads * blocks(min(query.shape[3], value.shape[3]), 64))
        most = max(1, length // _SHORTEST_SPAN)
        size = blocks(blocks(length, min(blocks(_PROGRAMS, programs), most)), _BLOCK) * _BLOCK
        self.one_span = size >= length
        self.spans, self.place = span_arguments(cu_seqlens, batch, length, size)
        self.place |= {"H": self.heads, "PACKED": cu_seqlens is not None}
        self.tokens = {"T": length, "SIZE": size}

    def carry(self, key: Tensor, value: Tensor, state: Tensor | None, reverse: bool) -> Tensor | None:
        """Return each span's initial S, `(spans, H, K, V)`; None if each sequence is one span."""
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
        configuration = tuned("linear_attention", CONFIGURATIONS["carry"], self.capability)
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
        epilogue: dict[str, Any] = _NO_EPILOGUE,
    ) -> Tensor:
        """Return outputs `(B, T, H, V)` in a dtype; `final` receives S after the last token."""
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
                **epilogue,
                **self.place,
                **self.tokens,
                **self.precision,
            )
        return output.to(dtype)


def _wide(state: Tensor | None) -> Tensor | None:
    return None if state is None else state.float().contiguous()


def _end(state: Tensor | None, query: Tensor, value: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    """Allocate S after the last token; no program visits an empty sequence, which keeps its initial S."""
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
    """Return outputs and last state in float32."""
    query, key, value, state = query.contiguous(), key.contiguous(), value.contiguous(), _wide(state)
    call = _Call(query, value, cu_seqlens)
    final = _end(state, query, value, cu_seqlens)
    before = call.carry(key, value, state, reverse=False)
    return call.walk(query, key, value, torch.float32, before, state, final), final


def forward_normed(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    gate: Tensor | None,
    state: Tensor | None,
    cu_seqlens: Tensor | None,
    eps: float,
    trained: bool,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Return normed and gated outputs in query's dtype, and the last state in float32.

    If `trained`, also n (the output itself without a gate) and 1 / rms(o) for the backward.
    """
    query, key, value, state = query.contiguous(), key.contiguous(), value.contiguous(), _wide(state)
    call = _Call(query, value, cu_seqlens)
    final = _end(state, query, value, cu_seqlens)
    before = call.carry(key, value, state, reverse=False)
    scale = torch.empty(value.shape[:3], dtype=torch.float32, device=query.device) if trained else None
    normed = torch.empty_like(value) if trained and gate is not None else None
    gate = None if gate is None else gate.contiguous()
    epilogue: dict[str, Any] = {"gate": gate, "normed": normed, "scale": scale, "EPS": eps}
    tiles = _choose("walk", query.shape[3], query.dtype, call.capability).tiles
    if query.shape[3] <= tiles["BK"] and value.shape[3] <= tiles["BV"]:
        y = call.walk(query, key, value, query.dtype, before, state, final, epilogue=epilogue)
        return y, final, normed, scale
    o = call.walk(query, key, value, torch.float32, before, state, final)
    y = torch.empty_like(value)
    _launch_rows(norm_kernel, "norm", value, o=o, y=y, **epilogue)
    return y, final, normed, scale


def backward_norm(grad: Tensor, normed: Tensor, scale: Tensor, gate: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Return gradients of the outputs before the norm, as `backward` needs them, and of the gate."""
    grad, normed = grad.contiguous(), normed.contiguous()
    d_o = torch.empty_like(normed, dtype=torch.bfloat16 if normed.dtype == torch.bfloat16 else torch.float32)
    d_gate = None if gate is None else torch.empty_like(gate, memory_format=torch.contiguous_format)
    gate = None if gate is None else gate.contiguous()
    tensors = {"grad": grad, "normed": normed, "scale": scale, "gate": gate, "d_o": d_o, "d_gate": d_gate}
    _launch_rows(norm_gradient_kernel, "norm gradient", normed, **tensors)
    return d_o, d_gate


def _launch_rows(kernel: Any, name: str, x: Tensor, **arguments: Any) -> None:
    configuration = tuned("linear_attention", CONFIGURATIONS[name], capability_of(x))
    rows = x.shape[0] * x.shape[1] * x.shape[2]
    launch(kernel, blocks(rows, configuration.tiles["BR"]), configuration, ROWS=rows, V=x.shape[3], **arguments)


def backward(
    grad: Tensor,
    grad_state: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    state: Tensor | None,
    cu_seqlens: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return gradients of query, key and value in their dtype, and of the first state in float32."""
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
