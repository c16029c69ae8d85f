"""Short convolution on a GPU: each tensor is read once from memory and written once, forward and backward.

Forward, a program owns a tile of tokens and channels and reads it once per tap, shifted; all reads but the first hit
the cache. Backward, the activation's derivative needs the convolution again, at every token whose gradient reaches the
tile. A program therefore walks over its tokens with the last J inputs and the last J gradients of the convolution in
registers: one multiplication per tap for each of the convolution, the inputs' gradient and the taps'. It writes its
sums for taps and bias to separate memory, and torch adds them: no atomics, the same bits in every run.

B batch · T length · J taps · D width · S spans of tokens
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..launching import Configuration, blocks, capability_of, launch, tuned
from ..packed import span_arguments
from ..triton_kernels import tokens_of_span, why_not_dtype

MOST_TAPS = 9

CONFIGURATIONS = {
    "forward": Configuration("forward", "all shapes and dtypes", {"BT": 32, "BD": 32}, num_warps=4, num_stages=1),
    "backward": Configuration("backward", "all shapes and dtypes", {"BD": 64, "STEP": 8}, num_warps=1, num_stages=1),
}

_BACKWARD_SPAN = 128
"""Tokens per program: it visits J - 1 of them twice, and writes sums for taps and bias once."""


def why_not(u: Tensor, kernel: Tensor) -> str | None:
    """Return the op's objection to Triton, or None."""
    if kernel.shape[1] > MOST_TAPS:
        return f"the kernel holds at most {MOST_TAPS} taps in registers; got {kernel.shape[1]}"
    return why_not_dtype("u", u.dtype)


@triton.jit
def _inputs(u, state, sequence, begin, end, at, cols, kept, D, PAST: tl.constexpr):
    """Inputs at tokens `at`, in float32: zeros outside of the sequence, but for what the state holds before it."""
    inside = (at >= begin) & (at < end)
    x = tl.load(u + at.to(tl.int64) * D + cols, mask=inside & kept, other=0.0).to(tl.float32)
    if state is not None:
        slot = at - begin + PAST
        before = (slot >= 0) & (slot < PAST)
        row = sequence.to(tl.int64) * PAST + slot
        x += tl.load(state + row * D + cols, mask=before & kept, other=0.0).to(tl.float32)
    return x


@triton.jit(do_not_specialize=["T", "SPANS", "SEQUENCES"])
def forward_kernel(
    u, taps, bias, state, y, table, bounds,
    T, SPANS, SIZE, SEQUENCES, D,
    J: tl.constexpr, AHEAD: tl.constexpr, SILU: tl.constexpr, PACKED: tl.constexpr,
    BT: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """Compute y = f(sum_j taps[j] u[t - j + AHEAD] + bias) for BT tokens and BD channels."""
    columns = tl.cdiv(D, BD)
    span = tl.program_id(0) // columns
    cols = (tl.program_id(0) - span * columns) * BD + tl.arange(0, BD)
    sequence, first, stop, begin, end = tokens_of_span(span, table, bounds, T, SPANS, SIZE, SEQUENCES, PACKED)
    cols, kept = cols[None, :], (cols < D)[None, :]
    rows = (first + tl.arange(0, BT))[:, None]
    total = tl.zeros((BT, BD), tl.float32)
    for j in tl.static_range(J):
        weight = tl.load(taps + j * D + cols, mask=kept, other=0.0)
        total += weight * _inputs(u, state, sequence, begin, end, rows - j + AHEAD, cols, kept, D, J - 1)
    if bias is not None:
        total += tl.load(bias + cols, mask=kept, other=0.0)
    if SILU:
        total *= tl.sigmoid(total)
    tl.store(y + rows.to(tl.int64) * D + cols, total.to(y.dtype.element_ty), mask=(rows < stop) & kept)


@triton.jit(do_not_specialize=["T", "SPANS", "SEQUENCES"])
def backward_kernel(
    grad, u, taps, bias, state, d_u, d_state, sums, table, bounds,
    T, SPANS, SIZE, SEQUENCES, D,
    J: tl.constexpr, AHEAD: tl.constexpr, SILU: tl.constexpr, PACKED: tl.constexpr,
    BD: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """Walk over the tokens t of a span and the J - 1 that its inputs reach beyond it.

    g[t] = grad[t] f'(y[t]),  d_u[s] = sum_j taps[j] g[s + j - AHEAD],  d_taps[j] = sum_t g[t] u[t - j + AHEAD]
    """
    columns = tl.cdiv(D, BD)
    span = tl.program_id(0) // columns
    cols = (tl.program_id(0) - span * columns) * BD + tl.arange(0, BD)
    kept = cols < D
    sequence, first, stop, begin, end = tokens_of_span(span, table, bounds, T, SPANS, SIZE, SEQUENCES, PACKED)
    zero = tl.zeros((BD,), tl.float32)
    weights, d_taps, d_bias = (), (), zero
    for j in tl.static_range(J):
        weights = weights + (tl.load(taps + j * D + cols, mask=kept, other=0.0),)
        d_taps = d_taps + (zero,)
    offset = zero
    if bias is not None:
        offset = tl.load(bias + cols, mask=kept, other=0.0)
    # the first token whose gradient reaches the span; the newest come first in both windows
    start = first - AHEAD
    inputs, gradients = (), ()
    for j in tl.static_range(J - 1):
        inputs = inputs + (_inputs(u, state, sequence, begin, end, start + AHEAD - 1 - j, cols, kept, D, J - 1),)
        gradients = gradients + (zero,)
    behind = tl.where(stop > first, stop + J - 1 - AHEAD, start)
    for block in range(start, behind, STEP):
        # every load of a block before its first store, past which the compiler cannot move one
        arriving, upstream = (), ()
        for i in tl.static_range(STEP):
            t = block + i
            inside = (t >= begin) & (t < end) & (t < behind)
            arriving = arriving + (_inputs(u, state, sequence, begin, end, t + AHEAD, cols, kept, D, J - 1),)
            g = tl.load(grad + t.to(tl.int64) * D + cols, mask=inside & kept, other=0.0).to(tl.float32)
            upstream = upstream + (g,)
        for i in tl.static_range(STEP):
            t = block + i
            window, g = (arriving[i],), upstream[i]
            for j in tl.static_range(J - 1):
                window = window + (inputs[j],)
            if SILU:
                y = offset
                for j in tl.static_range(J):
                    y += weights[j] * window[j]
                gate = tl.sigmoid(y)
                g *= gate * (1 + y * (1 - gate))
            own = tl.where((t >= first) & (t < stop), g, 0.0)
            d_bias += own
            sums_of_taps, d_x, recent = (), zero, (g,)
            for j in tl.static_range(J):
                sums_of_taps = sums_of_taps + (d_taps[j] + own * window[j],)
            for j in tl.static_range(J - 1):
                recent = recent + (gradients[j],)
            for j in tl.static_range(J):
                d_x += weights[j] * recent[J - 1 - j]
            s = t - (J - 1) + AHEAD
            place = d_u + s.to(tl.int64) * D + cols
            tl.store(place, d_x.to(d_u.dtype.element_ty), mask=(s >= first) & (s < stop) & kept)
            if d_state is not None:
                row = sequence.to(tl.int64) * (J - 1) + s - begin + J - 1
                before = (first == begin) & (s < begin) & (s >= begin - (J - 1)) & (t < behind)
                tl.store(d_state + row * D + cols, d_x.to(d_state.dtype.element_ty), mask=before & kept)
            d_taps, inputs, gradients = sums_of_taps, (), ()
            for j in tl.static_range(J - 1):
                inputs = inputs + (window[j],)
                gradients = gradients + (recent[j],)
    place = sums + span.to(tl.int64) * (J + 1) * D + cols
    for j in tl.static_range(J):
        tl.store(place + j * D, d_taps[j], mask=kept)
    tl.store(place + J * D, d_bias, mask=kept)


def _arguments(
    u: Tensor, kernel: Tensor, bias: Tensor | None, state: Tensor | None, ahead: int, silu: bool
) -> dict[str, object]:
    return {
        "u": u.contiguous(),
        "taps": kernel.mT.float().contiguous(),
        "bias": None if bias is None else bias.float().contiguous(),
        "state": None if state is None else state.contiguous(),
        "T": u.shape[1],
        "D": u.shape[2],
        "J": kernel.shape[1],
        "AHEAD": ahead,
        "SILU": silu,
    }


def forward(
    u: Tensor,
    kernel: Tensor,
    bias: Tensor | None,
    state: Tensor | None,
    cu_seqlens: Tensor | None,
    ahead: int,
    silu: bool,
) -> Tensor:
    """Convolve and activate; returns `(B, T, D)` in u's dtype."""
    y = torch.empty_like(u, memory_format=torch.contiguous_format)
    configuration = tuned("short_conv", CONFIGURATIONS["forward"], capability_of(u))
    number, plan = span_arguments(cu_seqlens, u.shape[0], u.shape[1], configuration.tiles["BT"])
    launch(
        forward_kernel,
        number * blocks(u.shape[2], configuration.tiles["BD"]),
        configuration,
        **_arguments(u, kernel, bias, state, ahead, silu),
        **plan,
        y=y,
        SIZE=configuration.tiles["BT"],
        PACKED=cu_seqlens is not None,
    )
    return y


def backward(
    grad: Tensor,
    u: Tensor,
    kernel: Tensor,
    bias: Tensor | None,
    state: Tensor | None,
    cu_seqlens: Tensor | None,
    ahead: int,
    silu: bool,
    trained: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Return gradients of u, the taps, the bias in float32, and the state, in one pass, even if not `trained`."""
    d_u = torch.empty_like(u, memory_format=torch.contiguous_format)
    # a state of a sequence without tokens is reached by no program
    d_state = None if state is None else torch.zeros_like(state, memory_format=torch.contiguous_format)
    taps = kernel.shape[1]
    configuration = tuned("short_conv", CONFIGURATIONS["backward"], capability_of(u))
    number, plan = span_arguments(cu_seqlens, u.shape[0], u.shape[1], _BACKWARD_SPAN)
    sums = torch.empty(number, taps + 1, u.shape[2], dtype=torch.float32, device=u.device)
    launch(
        backward_kernel,
        number * blocks(u.shape[2], configuration.tiles["BD"]),
        configuration,
        **_arguments(u, kernel, bias, state, ahead, silu),
        **plan,
        grad=grad.contiguous(),
        d_u=d_u,
        d_state=d_state,
        sums=sums,
        SIZE=_BACKWARD_SPAN,
        PACKED=cu_seqlens is not None,
    )
    total = sums.sum(0)
    # with one tap both are contiguous parts of the same memory, which an op must not return
    return d_u, total[:taps].mT.to(kernel.dtype).contiguous(), total[taps].clone(), d_state
