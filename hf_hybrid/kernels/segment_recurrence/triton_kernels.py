"""The segments' states on a GPU, and their gradients.

Forward, all sums over tokens come first, so that the recurrence is elementwise:

    sums      K^T V of a document, by independent runs of segments, which torch adds
    drive     P[i] W^T of all visited segments at once: K[i]^T V[i] again, in registers, subtracted from K^T V
    neurons   m, y and R, one lane per entry of a state, segment after segment

Backward, the first two run again, and

    unwind    goes forward for the membranes and back for their gradients, in place; each program writes its sums for
              leak and threshold to separate memory, and torch adds them
    collect   the gradient of K[i]^T V[i] for every segment of the document: over its visits in order, times W, where
              the clamp did not act

Torch computes the gradients of key and value from that, as products per segment. The `sums` kernel also computes W's
gradient, a sum over rows. No atomics: the same bits in every run.

A difference of large products decides whether a neuron fires, so P is float32 and P W^T uses three tf32 parts for keys
of any dtype, like K^T V of float32 keys. K^T V of 16 bits is exact up to the order of its sums.

B batch · H heads · M segments · S segment size · K key dim · V value dim · N visited segments
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..launching import Configuration, blocks, capability_of, launch, like_hopper, tuned
from ..triton_kernels import interpreted, why_not_heads
from .reference import SURROGATE_SLOPE

_PROGRAMS = 528
"""Programs that fill a GPU: four for each of 132 multiprocessors."""

_SHORTEST_SPAN = 256
"""Fewest tokens per span: writing more sums would cost more than it saves."""

_SLOPE = tl.constexpr(SURROGATE_SLOPE)

_WIDE, _NARROW = {"BT": 64, "BK": 64, "BV": 64}, {"BT": 64, "BK": 16, "BV": 64}

CONFIGURATIONS = {
    configuration.name: configuration
    for configuration in (
        Configuration("sums", "all shapes and dtypes", _WIDE, 4, 2),
        Configuration("drive", "from sm_90 on, unless float32 and V > 64", _WIDE, 8, 2),
        Configuration("drive narrow", "before sm_90, or float32 and V > 64", _NARROW, 4, 2),
        Configuration("neurons", "all shapes and dtypes", {"BLOCK": 128, "STEP": 8}, 1, 1),
        Configuration("unwind", "all shapes and dtypes", {"BLOCK": 128, "STEP": 4}, 1, 1),
        Configuration("collect", "from sm_90 on, unless float32 and V > 64", _WIDE, 8, 2),
        Configuration("collect narrow", "before sm_90, or float32 and V > 64", _NARROW, 4, 2),
        Configuration("visits", "instead of collect, without neurons and clamp", _NARROW, 4, 1),
    )
}
"""Wide tiles if they fit the registers. No tiles of 32 in products: compilers have got several of them wrong on
sm_90."""


def why_not(key: Tensor, value: Tensor) -> str | None:
    """Return the op's objection to Triton, or None."""
    return why_not_heads("key", key.dtype, key.shape[4], value.shape[4])


@triton.jit
def load_tile(x, row, rows, count, WIDTH: tl.constexpr, column, COLUMNS: tl.constexpr, FLOAT32: tl.constexpr):
    """Rows of the matrix whose first row of WIDTH numbers is x's `row`; zeros from `count` rows on and behind WIDTH.

    Only `row` is a large number, so that the places of a tile's numbers behind it need no more than 32 bits.
    """
    cols = column + tl.arange(0, COLUMNS)[None, :]
    place = x + row * WIDTH + (rows[:, None] * WIDTH + cols)
    tile = tl.load(place, mask=(rows[:, None] < count) & (cols < WIDTH), other=0.0)
    return tile.to(tl.float32) if FLOAT32 else tile


@triton.jit
def _product(
    k, v, row, count, column_k, column_v,
    K: tl.constexpr, V: tl.constexpr, FLOAT32: tl.constexpr, PRECISION: tl.constexpr,
    BT: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """One tile of K^T V over `count` rows from `row` on."""
    total = tl.zeros((BK, BV), tl.float32)
    for start in range(0, count, BT):
        rows = start + tl.arange(0, BT)
        keys = load_tile(k, row, rows, count, K, column_k, BK, FLOAT32)
        values = load_tile(v, row, rows, count, V, column_v, BV, FLOAT32)
        total = tl.dot(tl.trans(keys), values, total, input_precision=PRECISION)
    return total


@triton.jit
def _clamped(product, CLAMP):
    if CLAMP is not None:
        product = tl.minimum(tl.maximum(product, -CLAMP), CLAMP)
    return product


@triton.jit(do_not_specialize=["T", "SIZE", "SPANS"])
def sums_kernel(
    k, v, sums,
    T, SIZE, SPANS,
    K: tl.constexpr, V: tl.constexpr, FLOAT32: tl.constexpr, PRECISION: tl.constexpr,
    BT: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """One tile of K^T V over a span of SIZE of the T rows of a group, `(groups, SPANS, K, V)`."""
    pid = tl.program_id(0)
    tiles_v = tl.cdiv(V, BV)
    tiles = tiles_v * tl.cdiv(K, BK)
    tile, part = pid % tiles, pid // tiles
    column_v, column_k = tile % tiles_v * BV, tile // tiles_v * BK
    group, span = part // SPANS, part % SPANS
    row = group.to(tl.int64) * T + span * SIZE
    count = tl.minimum(SIZE, T - span * SIZE)
    total = _product(k, v, row, count, column_k, column_v, K, V, FLOAT32, PRECISION, BT, BK, BV)
    rows, cols = column_k + tl.arange(0, BK)[:, None], column_v + tl.arange(0, BV)[None, :]
    place = sums + part.to(tl.int64) * (K * V) + (rows * V + cols)
    tl.store(place, total, mask=(rows < K) & (cols < V))


@triton.jit(do_not_specialize=["M", "N"])
def drive_kernel(
    k, v, whole, weight, visited, drive, inputs,
    M, N, S, H, CLAMP,
    K: tl.constexpr, V: tl.constexpr, FLOAT32: tl.constexpr, PRECISION: tl.constexpr,
    BT: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """One tile of P W^T of a visited segment, or of P itself without W; `inputs`, if wanted, receives P beside it.

    Without `whole`, K^T V of the document, P is K[i]^T V[i].
    """
    pid = tl.program_id(0)
    tiles_v = tl.cdiv(V, BV)
    tiles = tiles_v * tl.cdiv(K, BK)
    tile, slot = pid % tiles, pid // tiles
    column, column_k = tile % tiles_v * BV, tile // tiles_v * BK
    strip, n = slot // N, slot % N
    segment = n
    if visited is not None:
        segment = tl.load(visited + strip // H * N + n).to(tl.int32)
        segment = tl.minimum(tl.maximum(segment, 0), M - 1)
    row = (strip.to(tl.int64) * M + segment) * S
    rows = column_k + tl.arange(0, BK)
    result = tl.zeros((BK, BV), tl.float32)
    # without W, each column of the result is its own only input
    first, behind = 0, V
    if weight is None:
        first, behind = column, column + 1
    for column_v in range(first, behind, BV):
        own = _product(k, v, row, S, column_k, column_v, K, V, FLOAT32, PRECISION, BT, BK, BV)
        own = _clamped(own, CLAMP)
        if whole is not None:
            own = load_tile(whole, strip.to(tl.int64) * K, rows, K, V, column_v, BV, True) - own
        if weight is None:
            result = own
        else:
            outputs = column + tl.arange(0, BV)
            factor = load_tile(weight, 0, outputs, V, V, column_v, BV, True)
            result = tl.dot(own, tl.trans(factor), result, input_precision="tf32x3")
            if inputs is not None:
                cols = column_v + tl.arange(0, BV)[None, :]
                place = inputs + slot.to(tl.int64) * (K * V) + (rows[:, None] * V + cols)
                tl.store(place, own, mask=(rows[:, None] < K) & (cols < V) & (column_v == column))
    cols = column + tl.arange(0, BV)[None, :]
    place = drive + slot.to(tl.int64) * (K * V) + (rows[:, None] * V + cols)
    tl.store(place, result.to(drive.dtype.element_ty), mask=(rows[:, None] < K) & (cols < V))


@triton.jit
def _reset(membrane, limit):
    """What is left of a membrane that fires above a limit."""
    return tl.where(membrane > limit, membrane - limit, membrane)


@triton.jit(do_not_specialize=["N"])
def neurons_kernel(
    drive, leak, threshold, states,
    N, SIZE: tl.constexpr, BLOCK: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """R of BLOCK of the SIZE numbers of one head's states, from what drives them."""
    tiles = tl.cdiv(SIZE, BLOCK)
    pid = tl.program_id(0)
    strip = pid // tiles
    cols = (pid - strip * tiles) * BLOCK + tl.arange(0, BLOCK)
    kept = cols < SIZE
    decay, limit = tl.load(leak).to(tl.float32), tl.load(threshold).to(tl.float32)
    source = drive + strip.to(tl.int64) * N * SIZE + cols
    target = states + strip.to(tl.int64) * N * SIZE + cols
    after = tl.zeros((BLOCK,), tl.float32)
    for block in range(0, N, STEP):
        # every load of a block before its first store, past which the compiler cannot move one
        arriving = ()
        for i in tl.static_range(STEP):
            arriving = arriving + (tl.load(source + i * SIZE, mask=kept & (block + i < N), other=0.0),)
        for i in tl.static_range(STEP):
            membrane = arriving[i] + decay * after
            after = _reset(membrane, limit)
            state = tl.where(membrane > limit, membrane / limit - 1, 0.0)
            tl.store(target + i * SIZE, state.to(states.dtype.element_ty), mask=kept & (block + i < N))
        source += STEP * SIZE
        target += STEP * SIZE


@triton.jit(do_not_specialize=["N"])
def unwind_kernel(
    drive, grad, leak, threshold, total, sums,
    N, SIZE: tl.constexpr, SURROGATE: tl.constexpr, BLOCK: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """Turn what drives the neurons into its gradient, in place, and sum that over segments.

    With g = dR and f = 1[y > 0]:  dm = f g / threshold + da (1 - s),  s = 0.3 max(0, 1 - |y|) or 0,
    da[n-1] = leak dm[n],  dleak = sum a[n-1] dm[n],  dthreshold = sum -f g m / threshold^2 - da (f - s m / threshold).
    """
    tiles = tl.cdiv(SIZE, BLOCK)
    pid = tl.program_id(0)
    strip = pid // tiles
    cols = (pid - strip * tiles) * BLOCK + tl.arange(0, BLOCK)
    kept = cols < SIZE
    decay, limit = tl.load(leak).to(tl.float32), tl.load(threshold).to(tl.float32)
    start = strip.to(tl.int64) * N * SIZE + cols
    zero = tl.zeros((BLOCK,), tl.float32)
    membranes, after = drive + start, zero
    for block in range(0, N, STEP):
        arriving = ()
        for i in tl.static_range(STEP):
            arriving = arriving + (tl.load(membranes + i * SIZE, mask=kept & (block + i < N), other=0.0),)
        for i in tl.static_range(STEP):
            membrane = arriving[i] + decay * after
            after = _reset(membrane, limit)
            tl.store(membranes + i * SIZE, membrane, mask=kept & (block + i < N))
        membranes += STEP * SIZE
    tl.debug_barrier()  # the next loop reads these numbers, perhaps with other threads than those that wrote them
    upstream = grad + start + tl.cdiv(N, STEP).to(tl.int64) * (STEP * SIZE)
    d_after, d_leak, d_threshold, d_total = zero, zero, zero, zero
    for block in range(0, N, STEP):
        membranes -= STEP * SIZE
        upstream -= STEP * SIZE
        # segments of the block, the last ones first; in front of the first segment there is nothing
        low = (tl.cdiv(N, STEP) - 1) * STEP - block
        held, gradients = (), ()
        for i in tl.static_range(STEP + 1):
            n = low + i - 1
            held = held + (tl.load(membranes + (i - 1) * SIZE, mask=kept & (n >= 0) & (n < N), other=0.0),)
        for i in tl.static_range(STEP):
            g = tl.load(upstream + i * SIZE, mask=kept & (low + i < N), other=0.0)
            gradients = gradients + (g.to(tl.float32),)
        for j in tl.static_range(STEP):
            membrane = held[STEP - j]
            ratio = membrane / limit
            fired = membrane > limit
            passed = tl.where(fired, gradients[STEP - 1 - j] / limit, 0.0)
            reset = tl.where(fired, 1.0, 0.0)
            d_membrane = passed + d_after
            if SURROGATE:
                slope = _SLOPE * tl.maximum(1 - tl.abs(ratio - 1), 0.0)
                reset -= slope * ratio
                d_membrane -= slope * d_after
            d_threshold -= passed * ratio + reset * d_after
            d_leak += _reset(held[STEP - 1 - j], limit) * d_membrane
            d_total += d_membrane
            d_after = decay * d_membrane
            tl.store(membranes + (STEP - 1 - j) * SIZE, d_membrane, mask=kept & (low + STEP - 1 - j < N))
    tl.store(total + strip.to(tl.int64) * SIZE + cols, d_total, mask=kept)
    tl.store(sums + pid * 2, tl.sum(tl.where(kept, d_leak, 0.0)))
    tl.store(sums + pid * 2 + 1, tl.sum(tl.where(kept, d_threshold, 0.0)))


@triton.jit(do_not_specialize=["M", "N"])
def collect_kernel(
    k, v, grad, weight, d_whole, order, starts, d_own,
    M, N, S, H, CLAMP,
    K: tl.constexpr, V: tl.constexpr, FLOAT32: tl.constexpr, PRECISION: tl.constexpr,
    BT: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """One tile of the gradient of K[i]^T V[i], from those of the slots that visit segment i, and of K^T V.

    Those slots are `order` from starts[i] up to starts[i + 1]; slot i alone without.
    """
    pid = tl.program_id(0)
    tiles_v = tl.cdiv(V, BV)
    tiles = tiles_v * tl.cdiv(K, BK)
    tile, place = pid % tiles, pid // tiles
    column, column_k = tile % tiles_v * BV, tile // tiles_v * BK
    strip, segment = place // M, place % M
    low, high = segment, segment + 1
    if order is not None:
        low = tl.load(starts + strip // H * (M + 1) + segment)
        high = tl.load(starts + strip // H * (M + 1) + segment + 1)
    rows, cols = column_k + tl.arange(0, BK), column + tl.arange(0, BV)[None, :]
    result = tl.zeros((BK, BV), tl.float32)
    first, behind = 0, V
    if weight is None:
        first, behind = column, column + 1
    for column_v in range(first, behind, BV):
        visits = tl.zeros((BK, BV), tl.float32)
        for j in range(low, high):
            slot = j
            if order is not None:
                slot = tl.load(order + strip // H * N + j).to(tl.int32)
            visits += load_tile(grad, (strip.to(tl.int64) * N + slot) * K, rows, K, V, column_v, BV, True)
        if weight is None:
            result = visits
        else:
            outputs = column_v + tl.arange(0, BV)
            factor = load_tile(weight, 0, outputs, V, V, column, BV, True)
            result = tl.dot(visits, factor, result, input_precision=PRECISION)
    if CLAMP is not None:
        row = (strip.to(tl.int64) * M + segment) * S
        own = _product(k, v, row, S, column_k, column, K, V, FLOAT32, PRECISION, BT, BK, BV)
        result = tl.where(tl.abs(own) <= CLAMP, result, 0.0)
    if d_whole is not None:
        result = load_tile(d_whole, strip.to(tl.int64) * K, rows, K, V, column, BV, True) - result
    target = d_own + place.to(tl.int64) * (K * V) + (rows[:, None] * V + cols)
    tl.store(target, result.to(d_own.dtype.element_ty), mask=(rows[:, None] < K) & (cols < V))


def _arithmetic(dtype: torch.dtype) -> dict[str, Any]:
    """Return the arguments that choose the arithmetic of products of a dtype."""
    wide = dtype == torch.float32
    widened = wide or (dtype == torch.bfloat16 and interpreted())
    return {"FLOAT32": widened, "PRECISION": "tf32x3" if wide else "tf32"}


def _summed(x: Tensor, y: Tensor, run: int, precise: torch.dtype) -> Tensor:
    """Return X^T Y over the rows of `(groups, T, X)` and `(groups, T, Y)`, in spans of complete runs, in float32.

    Float32 factors are multiplied like those of the dtype `precise`.
    """
    groups, length, width = x.shape
    configuration = tuned("segment_recurrence", CONFIGURATIONS["sums"], capability_of(x))
    tiles = blocks(width, configuration.tiles["BK"]) * blocks(y.shape[2], configuration.tiles["BV"])
    wanted = min(blocks(_PROGRAMS, max(1, groups * tiles)), blocks(length, _SHORTEST_SPAN))
    size = blocks(blocks(length, wanted), run) * run
    spans = blocks(length, size)
    sums = torch.empty(groups, spans, width, y.shape[2], dtype=torch.float32, device=x.device)
    launch(
        sums_kernel,
        groups * spans * tiles,
        configuration,
        k=x,
        v=y,
        sums=sums,
        T=length,
        SIZE=size,
        SPANS=spans,
        K=width,
        V=y.shape[2],
        FLOAT32=_arithmetic(x.dtype)["FLOAT32"],
        PRECISION=_arithmetic(precise)["PRECISION"],
    )
    return sums[:, 0] if spans == 1 else sums.sum(1)


class _Call:
    """State shared by all launches for one set of inputs."""

    def __init__(self, key: Tensor, value: Tensor, visited: Tensor | None, complement: bool, clamp: float | None):
        """Sum K^T V of the documents if complements are needed."""
        self.key, self.value = key.contiguous(), value.contiguous()
        self.visited = None if visited is None else visited.contiguous()
        self.batch, self.heads, self.segments, self.size, self.width = key.shape
        self.value_width = value.shape[4]
        self.slots = self.segments if visited is None else visited.shape[1]
        self.strips = self.batch * self.heads
        self.clamp = clamp
        self.whole = self.within = None
        if complement:
            # the segments of a span are summed as drive_kernel sums each: of one segment alone nothing is left
            rows = (self.strips, self.segments * self.size)
            whole = _summed(
                self.key.view(*rows, self.width), self.value.view(*rows, self.value_width), self.size, key.dtype
            )
            if clamp is not None:
                self.within = whole.abs() <= clamp
                whole = whole.clamp(-clamp, clamp)
            self.whole = whole.contiguous()

    def _launch(self, name: str, kernel: Any, each: int, **arguments: Any) -> None:
        """Launch one program per tile of `(K, V)` of each segment or slot."""
        capability = capability_of(self.key)
        spills = not like_hopper(capability) or (self.key.dtype == torch.float32 and self.value_width > 64)
        chosen = CONFIGURATIONS[f"{name} narrow" if spills and name != "visits" else name]
        configuration = tuned("segment_recurrence", chosen, capability)
        tiles = blocks(self.width, configuration.tiles["BK"]) * blocks(self.value_width, configuration.tiles["BV"])
        launch(
            kernel,
            self.strips * each * tiles,
            configuration,
            k=self.key,
            v=self.value,
            **arguments,
            M=self.segments,
            N=self.slots,
            S=self.size,
            H=self.heads,
            CLAMP=self.clamp,
            K=self.width,
            V=self.value_width,
            **_arithmetic(self.key.dtype),
        )

    def empty(self, slots: int, dtype: torch.dtype) -> Tensor:
        shape = (self.batch, self.heads, slots, self.width, self.value_width)
        return torch.empty(shape, dtype=dtype, device=self.key.device)

    def drive(self, weight: Tensor | None, drive: Tensor, inputs: Tensor | None = None) -> Tensor:
        self._launch(
            "drive",
            drive_kernel,
            self.slots,
            whole=self.whole,
            weight=weight,
            visited=self.visited,
            drive=drive,
            inputs=inputs,
        )
        return drive

    def collect(self, grad: Tensor, weight: Tensor | None, d_whole: Tensor | None) -> Tensor:
        """Return the gradient of K[i]^T V[i], `(B, H, M, K, V)`; bfloat16 products would round it anyway."""
        order = starts = None
        if self.visited is not None:
            visited, order = self.visited.clamp(0, self.segments - 1).sort(dim=1, stable=True)
            bounds = torch.arange(self.segments + 1, device=visited.device).expand(self.batch, -1).contiguous()
            starts = torch.searchsorted(visited, bounds).int()
            order = order.int()
        narrow = self.key.dtype == torch.bfloat16
        d_own = self.empty(self.segments, torch.bfloat16 if narrow else torch.float32)
        self._launch(
            "visits" if weight is None and self.clamp is None else "collect",  # without a product
            collect_kernel,
            self.segments,
            grad=grad,
            weight=weight,
            d_whole=d_whole,
            order=order,
            starts=starts,
            d_own=d_own,
        )
        return d_own


def _lanes(name: str, states: Tensor) -> tuple[int, Configuration, dict[str, int]]:
    """Return programs, configuration and sizes of a kernel with a lane per entry of `(B, H, N, K, V)`."""
    configuration = tuned("segment_recurrence", CONFIGURATIONS[name], capability_of(states))
    batch, heads, slots, width, value_width = states.shape
    programs = batch * heads * blocks(width * value_width, configuration.tiles["BLOCK"])
    return programs, configuration, {"N": slots, "SIZE": width * value_width}


def forward(
    key: Tensor,
    value: Tensor,
    weight: Tensor | None,
    leak: Tensor | None,
    threshold: Tensor | None,
    visited: Tensor | None,
    complement: bool,
    clamp: float | None,
) -> Tensor:
    """Return states, `(B, H, N, K, V)` in key's dtype."""
    call = _Call(key, value, visited, complement, clamp)
    states = call.empty(call.slots, key.dtype)
    if weight is None:
        return call.drive(None, states)
    drive = call.drive(weight.contiguous(), call.empty(call.slots, torch.float32))
    programs, configuration, sizes = _lanes("neurons", states)
    launch(
        neurons_kernel,
        programs,
        configuration,
        states=states,
        drive=drive,
        leak=leak,
        threshold=threshold,
        **sizes,
    )
    return states


def backward(
    grad: Tensor,
    key: Tensor,
    value: Tensor,
    weight: Tensor | None,
    leak: Tensor | None,
    threshold: Tensor | None,
    visited: Tensor | None,
    complement: bool,
    clamp: float | None,
    surrogate: bool,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """Return gradients of key and value in their dtype; of weight, leak, threshold in float32 or None."""
    call = _Call(key, value, visited, complement, clamp)
    grad = grad.contiguous()
    d_weight = d_leak = d_threshold = None
    if weight is not None:
        weight = weight.contiguous()
        inputs = call.empty(call.slots, torch.float32)
        drive = call.drive(weight, call.empty(call.slots, torch.float32), inputs)
        programs, configuration, sizes = _lanes("unwind", drive)
        total = torch.empty(*key.shape[:2], *drive.shape[3:], dtype=torch.float32, device=key.device)
        sums = torch.empty(programs, 2, dtype=torch.float32, device=key.device)
        launch(
            unwind_kernel,
            programs,
            configuration,
            grad=grad,
            drive=drive,
            leak=leak,
            threshold=threshold,
            total=total,
            sums=sums,
            SURROGATE=surrogate,
            **sizes,
        )
        grad = drive
        width = weight.shape[0]
        d_weight = _summed(drive.view(1, -1, width), inputs.view(1, -1, width), 1, key.dtype)[0]
        d_leak, d_threshold = sums.sum(0).unbind()
        total = torch.matmul(total, weight.float())
    else:
        total = grad.sum(2, dtype=torch.float32)
    d_whole = total if complement else None
    if call.within is not None:
        d_whole = total * call.within.view_as(total)
    d_own = call.collect(grad, weight, d_whole)
    d_key = torch.matmul(call.value.to(d_own.dtype), d_own.mT).to(key.dtype)
    d_value = torch.matmul(call.key.to(d_own.dtype), d_own).to(key.dtype)
    return d_key, d_value, d_weight, d_leak, d_threshold
