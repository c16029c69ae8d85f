"""The diagonal recurrence on a GPU: sequential over tokens if short, parallel over spans if long.

The sequence is cut into spans of 128 tokens. Independent programs compute each span's last state, starting from zero
(`walk_kernel`, storing nothing else); a loop over spans with the power a^128 turns these into the initial state of
each span (`carry_kernel`); a second walk from there stores every state. So b is read twice and x written once, which
fills a GPU even for a single sequence. Sequences of one span need one walk.

One lane owns one state. The states of a token are adjacent, so lanes read neighbours and exchange nothing. A lane owns
both parts of a complex number; x_ is the imaginary part of x.

The gradient is the transposed recurrence in the other direction:

    d[t] = grad[t] + c,  then  c <- conj(a) d[t]         from c = the gradient of the final state
    da = sum_t conj(x[t-1]) d[t]                         with x[-1] the initial state, whose gradient is the last c

It is the same walk with the multiplication after the sum (TRANSPOSED). Each span sums its part of da in separate
memory, and torch adds the parts: no atomics, the same bits in every run.

B batch · T length · P states · S spans of tokens
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..launching import Configuration, blocks, capability_of, launch, tuned
from ..packed import span_arguments
from ..triton_kernels import spans_of_sequence, tokens_of_span

CONFIGURATIONS = {
    "ends": Configuration("ends", "sequences longer than a span", {"BP": 32, "STEP": 16}, num_warps=1, num_stages=1),
    "carry": Configuration("carry", "sequences longer than a span", {"BP": 32}, num_warps=1, num_stages=1),
    "walk": Configuration("walk", "everything", {"BP": 32, "STEP": 8}, num_warps=1, num_stages=1),
}
"""STEP tokens per load. With one warp per program, even few states give enough programs."""

_SPAN = 128
"""Tokens, a power of two: rounding errors grow with it and with the number of spans; the best for 16384 tokens."""


def why_not(b: Tensor) -> str | None:
    """Return the op's objection to Triton, or None."""
    if b.dtype not in (torch.complex64, torch.float32, torch.bfloat16, torch.float16):
        return f"b must be complex64, float32, bfloat16 or float16; got {b.dtype}"
    return None


@triton.jit
def _load(x, row, P, cols, kept, COMPLEX: tl.constexpr):
    """One row of `(rows, P)` in float32, real parts and imaginary ones, which are zeros where there are none."""
    place = x + row.to(tl.int64) * P * (2 if COMPLEX else 1)
    if COMPLEX:
        pairs = place + cols[:, None] * 2 + tl.arange(0, 2)[None, :]
        real, imaginary = tl.split(tl.load(pairs, mask=kept[:, None], other=0.0))
    else:
        real = tl.load(place + cols, mask=kept, other=0.0).to(tl.float32)
        imaginary = tl.zeros_like(real)
    return real, imaginary


@triton.jit
def _store(x, row, P, cols, kept, real, imaginary, COMPLEX: tl.constexpr):
    place = x + row.to(tl.int64) * P * (2 if COMPLEX else 1)
    if COMPLEX:
        pairs = place + cols[:, None] * 2 + tl.arange(0, 2)[None, :]
        tl.store(pairs, tl.join(real, imaginary), mask=kept[:, None])
    else:
        tl.store(place + cols, real.to(x.dtype.element_ty), mask=kept)


@triton.jit
def _times_plus(a, a_, x, x_, b, b_, COMPLEX: tl.constexpr):
    """The number a x + b."""
    if COMPLEX:
        real, imaginary = b + a * x - a_ * x_, b_ + a * x_ + a_ * x
    else:
        real, imaginary = b + a * x, b_
    return real, imaginary


@triton.jit(do_not_specialize=["T", "SPANS", "SEQUENCES"])
def walk_kernel(
    b, a, before, initial, x, final, saved, saved_initial, sums, table, bounds,
    T, SPANS, SIZE, SEQUENCES, P,
    COMPLEX: tl.constexpr, REVERSE: tl.constexpr, TRANSPOSED: tl.constexpr, PACKED: tl.constexpr,
    BP: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """Walk over the tokens of a span for BP states.

    It begins with `before`, one per span, but where its sequence begins with `initial`, one per sequence, each zeros
    if None. With x, what a sequence ends with goes into `final`; without x, what a span ends with, whose sequence goes
    on behind it. Into `sums` goes the gradient of a from the states `saved` of the recurrence that is transposed here.
    """
    pid = tl.program_id(0)
    columns = tl.cdiv(P, BP)
    span = pid // columns
    cols = (pid - span * columns) * BP + tl.arange(0, BP)
    kept = cols < P
    sequence, first, stop, begin, end = tokens_of_span(span, table, bounds, T, SPANS, SIZE, SEQUENCES, PACKED)
    needed = stop > first
    if REVERSE:
        begins, ends = needed & (stop == end), needed & (first == begin)
        start, direction, edge = stop - 1, -1, begin
    else:
        begins, ends = needed & (first == begin), needed & (stop == end)
        start, direction, edge = first, 1, end - 1
    if x is None:  # noqa: SIM102  known when it is compiled
        if ends | (stop <= first):
            return
    a, a_ = _load(a, span * 0, P, cols, kept, COMPLEX)
    c, c_ = tl.zeros((BP,), tl.float32), tl.zeros((BP,), tl.float32)
    if before is not None:
        c, c_ = _load(before, span, P, cols, kept & needed & ~begins, COMPLEX)
    if initial is not None:
        own, own_ = _load(initial, sequence, P, cols, kept & begins, COMPLEX)
        c, c_ = c + own, c_ + own_
    y, y_, total, total_ = c, c_, tl.zeros_like(c), tl.zeros_like(c)
    for block in range(0, stop - first, STEP):
        # every load of a block before its first store, past which the compiler cannot move one
        arriving, past = (), ()
        for i in tl.static_range(STEP):
            t = start + (block + i) * direction
            inside = kept & (block + i < stop - first)
            arriving = arriving + (_load(b, t, P, cols, inside, COMPLEX),)
            if sums is not None:
                # the state that came before this token's lies ahead
                past = past + (_load(saved, t + direction, P, cols, inside & (t != edge), COMPLEX),)
        for i in tl.static_range(STEP):
            t = start + (block + i) * direction
            inside = block + i < stop - first
            token, token_ = arriving[i]  # type: ignore[var-annotated]
            if TRANSPOSED:
                new, new_ = c + token, c_ + token_
                onward, onward_ = _times_plus(a, a_, new, new_, tl.zeros_like(c), tl.zeros_like(c), COMPLEX)
            else:
                new, new_ = _times_plus(a, a_, c, c_, token, token_, COMPLEX)
                onward, onward_ = new, new_
            if x is not None:
                _store(x, t, P, cols, kept & inside, new, new_, COMPLEX)
            if sums is not None:
                # behind the span, states were read as zeros
                s, s_ = past[i]  # type: ignore[var-annotated]
                total, total_ = _times_plus(s, -s_, new, new_, total, total_, COMPLEX)
            y, y_ = tl.where(inside, new, y), tl.where(inside, new_, y_)
            c, c_ = tl.where(inside, onward, c), tl.where(inside, onward_, c_)
    if x is None:
        _store(final, span, P, cols, kept, c, c_, COMPLEX)
    else:
        _store(final, sequence, P, cols, kept & ends, c, c_, COMPLEX)
    if sums is not None:
        if saved_initial is not None:
            s, s_ = _load(saved_initial, sequence, P, cols, kept & ends, COMPLEX)
            total, total_ = _times_plus(s, -s_, y, y_, total, total_, COMPLEX)
        _store(sums, span, P, cols, kept, total, total_, COMPLEX)


@triton.jit(do_not_specialize=["SPANS", "SEQUENCES"])
def carry_kernel(
    ends, a, bounds,
    SPANS, SEQUENCES, P,
    DOUBLINGS: tl.constexpr, COMPLEX: tl.constexpr, REVERSE: tl.constexpr, PACKED: tl.constexpr, BP: tl.constexpr,
):  # fmt: skip
    """Replace what each span ends with by what it begins with, in order; the first, which knows that, by zeros.

    Behind it all spans that others follow have SIZE = 2^DOUBLINGS tokens: a^SIZE, squared in float64, carries over.
    """
    pid = tl.program_id(0)
    columns = tl.cdiv(P, BP)
    sequence = pid // columns
    cols = (pid - sequence * columns) * BP + tl.arange(0, BP)
    kept = cols < P
    first, count = spans_of_sequence(sequence, bounds, SPANS, SEQUENCES, PACKED)
    power, power_ = _load(a, sequence * 0, P, cols, kept, COMPLEX)
    power, power_ = power.to(tl.float64), power_.to(tl.float64)
    for _ in tl.static_range(DOUBLINGS):
        power, power_ = power * power - power_ * power_, 2 * power * power_
    power, power_ = power.to(tl.float32), power_.to(tl.float32)
    total, total_ = tl.zeros((BP,), tl.float32), tl.zeros((BP,), tl.float32)
    for n in range(count):
        span = first + n
        if REVERSE:
            span = first + count - 1 - n
        own, own_ = _load(ends, span, P, cols, kept & (n < count - 1), COMPLEX)
        _store(ends, span, P, cols, kept, total, total_, COMPLEX)
        total, total_ = _times_plus(power, power_, total, total_, own, own_, COMPLEX)


def _pairs(x: Tensor | None) -> Tensor | None:
    """Make contiguous, with complex numbers as pairs of real ones."""
    if x is None or not x.is_complex():
        return None if x is None else x.contiguous()
    return torch.view_as_real(x.resolve_conj().contiguous())


def forward(
    a: Tensor,
    b: Tensor,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    reverse: bool,
    transposed: bool,
) -> tuple[Tensor, Tensor]:
    """Return the states in b's dtype, and the final one in a's."""
    x, final, _ = _run(a, b, initial_state, cu_seqlens, reverse, transposed)
    return x, final


def backward(
    grad: Tensor,
    grad_final: Tensor,
    a: Tensor,
    states: Tensor,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    reverse: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return gradients of b, the initial state and a, in one pass."""
    saved = states, initial_state
    d, d_initial, d_a = _run(a.conj_physical(), grad, grad_final, cu_seqlens, not reverse, True, *saved)
    assert d_a is not None
    return d, d_initial, d_a


def _run(
    a: Tensor,
    b: Tensor,
    initial: Tensor | None,
    cu_seqlens: Tensor | None,
    reverse: bool,
    transposed: bool,
    saved: Tensor | None = None,
    saved_initial: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return the states in b's dtype, the final one in a's, and with `saved` states the gradient of their a."""
    batch, length, states = b.shape
    number, place = span_arguments(cu_seqlens, batch, length, _SPAN)
    sequences = place["SEQUENCES"]
    place |= {"P": states, "COMPLEX": a.is_complex(), "REVERSE": reverse, "PACKED": cu_seqlens is not None}
    walked = place | {"b": _pairs(b), "a": _pairs(a), "initial": _pairs(initial), "T": length, "SIZE": _SPAN}
    walked |= {"TRANSPOSED": transposed, "saved": None, "saved_initial": None, "sums": None, "before": None}

    def walk(name: str, **arguments: Any) -> None:
        configuration = tuned("diagonal_scan", CONFIGURATIONS[name], capability_of(b))
        columns = blocks(states, configuration.tiles["BP"])
        launch(walk_kernel, number * columns, configuration, **walked | arguments)

    def per_span() -> Tensor:
        return torch.empty(number, states, dtype=a.dtype, device=b.device)

    if length > _SPAN:
        ends = _pairs(per_span())
        walk("ends", x=None, final=ends)
        carried = {name: x for name, x in place.items() if name != "table"}
        configuration = tuned("diagonal_scan", CONFIGURATIONS["carry"], capability_of(b))
        launch(
            carry_kernel,
            sequences * blocks(states, configuration.tiles["BP"]),
            configuration,
            ends=ends,
            a=walked["a"],
            DOUBLINGS=_SPAN.bit_length() - 1,
            **carried,
        )
        walked["before"] = ends
    x = torch.empty_like(b, memory_format=torch.contiguous_format)
    if cu_seqlens is None:
        final = torch.empty(sequences, states, dtype=a.dtype, device=b.device)
    elif initial is None:
        final = torch.zeros(sequences, states, dtype=a.dtype, device=b.device)
    else:  # no program visits a sequence without tokens, which keeps its initial state
        final = initial.clone(memory_format=torch.contiguous_format)
    if saved is None:
        walk("walk", x=_pairs(x), final=_pairs(final))
        return x, final, None
    sums = per_span()
    kept = {"saved": _pairs(saved), "saved_initial": _pairs(saved_initial), "sums": _pairs(sums)}
    walk("walk", x=_pairs(x), final=_pairs(final), **kept)
    return x, final, sums.sum(0)
