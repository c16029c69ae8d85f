"""State space models as recurrences over a divided sequence: the states of earlier shards, folded.

B batch · T_r tokens of this process · P states · H channels · M = N/2 modes · Z = 1 or 2 directions
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from ..kernels import diagonal_scan as scan_kernel
from ..kernels import long_conv as long_kernel
from ..kernels.checks import check_positive
from ..kernels.ssm_kernel import (
    S4DStep,
    S4Step,
    s4_block_constants,
    s4_final_state,
    s4_output,
    s4_state_response,
    s4_step_constants,
    s4d_block_powers,
    s4d_final_state,
    s4d_state_response,
)
from ..kernels.ssm_kernel import s4_window_states as window_states_kernel
from ..kernels.ssm_kernel.discrete import dense_transition, recomputed, tile_numbers, to_complex, to_real
from .collectives import nothing, relay
from .shards import Shards, Span


def _senders(shards: Shards, *, reverse: bool) -> list[int]:
    """Return the processes whose states reach this one, in the direction of the recurrence."""
    others = range(shards.size - 1, shards.rank, -1) if reverse else range(shards.rank)
    return [rank for rank in others if shards.joined(rank, shards.rank)]


def _slice(shards: Shards, span: Span) -> slice:
    return slice(span.start - shards.own.start, span.stop - shards.own.start)


def _power(a: Tensor, exponent: int) -> Tensor:
    """Return a^exponent by squaring, exact to a few roundings, also for zeros and negative numbers."""
    result = torch.ones_like(a)
    while exponent:
        if exponent & 1:
            result = result * a
        exponent >>= 1
        a = a * a if exponent else a
    return result


def _last_state(a: Tensor, b: Tensor) -> Tensor:
    """Return the state after all tokens of ``x <- a x + b`` from zeros, `(B, P)`: O(T P), without other states."""
    b = b.to(a.dtype)
    if b.shape[1] == 0:
        return b.sum(1)
    while b.shape[1] > 1:
        b = F.pad(b, (0, 0, b.shape[1] % 2, 0))
        b = a * b[:, 0::2] + b[:, 1::2]
        a = a * a
    return b[:, 0]


def diagonal_scan(a: Tensor, b: Tensor, shards: Shards, *, reverse: bool = False, backend: str = "auto") -> Tensor:
    """Run a diagonal recurrence over a divided sequence: `kernels.diagonal_scan` from the states of other shards.

        x <- a^(T_s) x + f_s  for the shards s before this one, in their order, with f_s the state after s from zeros

    f_s is a sum by halves over own tokens, O(T_r P) and half the cost of a scan, whose states it does not store; then
    one kernel pass starts from x. All processes know a and the lengths, so only f is sent.

    Each process sends B P numbers to each later process (earlier, if `reverse`) that holds tokens of the same
    sequence; the backward sends as many the other way.

    Args:
        a: `(P,)`; its gradient is this process's part of a sum.
        b: `(B, T_r, P)`.
        shards: The layout, with the bounds of packed sequences.
        reverse: Whether to run from the last token to the first.
        backend: See `hf_hybrid.kernels.dispatch`.

    Returns:
        x `(B, T_r, P)` in b's dtype. Differentiable once.

    Raises:
        ValueError: A shape or dtype does not fit.
    """
    shards.check(b, "b")
    own = shards.own
    mine = b[:, _slice(shards, (shards.head if reverse else shards.tail)(shards.rank))]
    last = recomputed(_last_state, a, mine.flip(1) if reverse else mine)
    last = last + nothing((), last, a, b)  # one token's state does not depend on a
    incoming = relay(shards, None, last)[1].flip(0) if reverse else relay(shards, last)[0]
    state = incoming[:0].sum(0)
    for rank, x in zip(_senders(shards, reverse=reverse), incoming, strict=True):
        passed = (shards.head if reverse else shards.tail)(rank).length
        state = _power(a, passed) * state + x
    if not own.length:
        return nothing(b.shape, b, a, b, state)
    cu_seqlens = shards.bounds_within(own, b.device)
    if cu_seqlens is not None:
        others = len(cu_seqlens) - 2
        state = F.pad(state, (0, 0, others, 0) if reverse else (0, 0, 0, others))
    return scan_kernel(a, b, initial_state=state, reverse=reverse, cu_seqlens=cu_seqlens, backend=backend)[0]


def ssm_conv(
    u: Tensor,
    kernel: Tensor,
    C: Tensor,
    step: S4Step | S4DStep,
    shards: Shards,
    *,
    skip: Tensor | None = None,
    backend: str = "auto",
) -> Tensor:
    """Run S4 or S4D over a divided sequence: a convolution of own tokens, and what the state of earlier shards adds.

    y[t] = sum_{j>=0} k_0[j] u[t-j] + sum_{j>=0} k_1[j] u[t+1+j] + D u[t],  k_z[l] = 2 Re C_z Abar^l Bbar
    (SPADE, eqs. 3 and 4), where the parts of the sums that lie in other shards are 2 Re C_z Abar^i x with a state x,
    folded as in `diagonal_scan` by powers of Abar in float64.

    Each process sends B H M complex numbers to each later process, and if bidirectional to each earlier one, that
    holds tokens of the same sequence: less than `by_channels` sends when (R - 1) N < 2 T_r. It costs O(T_r N) more per
    channel, and for S4 O(N^3 log T) once.

    Args:
        u: `(B, T_r, H)`.
        kernel: Taps `(Z, H, T_k)`, at least as many as own tokens; Z is 2 if bidirectional. All parameters' gradients
            are this process's parts of sums.
        C: Output filters `(Z, H, M)`, complex, of which the kernel was made.
        step: From `s4_step_constants` or `s4d_step_constants`, complex128.
        shards: The layout, with the bounds of packed sequences.
        skip: D, `(H,)`; none when None.
        backend: See `hf_hybrid.kernels.dispatch`.

    Returns:
        `(B, T_r, H)` in u's dtype. Differentiable once.

    Raises:
        ValueError: A shape does not fit, or there are fewer taps than tokens.
    """
    shards.check(u, "u")
    own, both = shards.own, len(C) == 2
    if kernel.dim() != 3 or kernel.shape[:2] != C.shape[:2] or kernel.shape[2] < own.length:
        raise ValueError(
            f"kernel must be (Z, H, taps) = {(*C.shape[:2], own.length)} or have more taps; got {tuple(kernel.shape)}"
        )
    dtype = torch.promote_types(u.dtype, C.real.dtype)
    x = u.to(dtype)
    system = _System(C, step, dtype)
    before, after = _states_of_others(x, system, shards, both)
    if not own.length:
        return nothing(u.shape, u, u, kernel, C, *step, skip, before, after)
    cu_seqlens, reverse_kernel = shards.bounds_within(own, u.device), kernel[1] if both else None
    y = long_kernel(x, kernel[0], reverse_kernel=reverse_kernel, skip=skip, cu_seqlens=cu_seqlens, backend=backend)
    head, tail = (span(shards.rank).length for span in (shards.head, shards.tail))
    y = y + F.pad(system.response(before, head), (0, 0, 0, own.length - head))
    if both:
        y = y + F.pad(system.reverse_response(after, tail), (0, 0, own.length - tail, 0))
    return y.to(u.dtype)


def _states_of_others(x: Tensor, system: "_System", shards: Shards, both: bool) -> tuple[Tensor, Tensor]:
    """Return the states before own tokens and, in the reverse direction, after them."""
    head, tail = (_slice(shards, span) for span in (shards.head(shards.rank), shards.tail(shards.rank)))
    forward = system.final_state(x[:, tail])
    earlier, later = relay(shards, forward, system.final_state(x[:, head].flip(1)) if both else None)
    before = system.fold(earlier, [shards.tail(rank).length for rank in _senders(shards, reverse=False)])
    if not both:
        return before, later.sum(0)
    return before, system.fold(later.flip(0), [shards.head(rank).length for rank in _senders(shards, reverse=True)])


def s4_window_states(
    u: Tensor, B: Tensor, P: Tensor, w: Tensor, dt: Tensor, window: int, dtype: torch.dtype, shards: Shards
) -> Tensor:
    """Return S4's states after the windows that end in own tokens: `kernels.ssm_kernel.s4_window_states`.

    The state of earlier shards, folded as in `ssm_conv`, advances to the first window's end and from window to window,
    O(B N^2) per window and channel; the kernel adds what own tokens do. Each process sends B H M complex numbers to
    each later one; the backward as many to earlier ones.

    Args:
        u: `(B, T_r, H)`.
        B: `(S, M)`, complex. All parameters' gradients are this process's parts of sums.
        P: `(S, M)`, complex.
        w: `(S, M)`, complex, negative real parts.
        dt: Step per channel, `(H,)`.
        window: W in tokens, positive, counted from the sequence's first token.
        dtype: Real dtype of the computation.
        shards: The layout, without packed sequences, for which the kernel has no form.

    Returns:
        `(B, n_r, H, M)`, complex. Differentiable once.

    Raises:
        ValueError: Sequences are packed, or W is not positive.
    """
    shards.check(u, "u")
    check_positive(window=window)
    if shards.ends is not None:
        raise ValueError("cu_seqlens must be None: states of windows have no form for packed sequences")
    own = shards.own
    step = s4_step_constants(B, P, w, dt)
    system = _System(B.new_zeros(1, len(dt), w.shape[1]), step, dtype)
    x = u.to(dtype)
    earlier, _ = relay(shards, system.final_state(x))
    before = system.fold(earlier, [shards.lengths[rank] for rank in _senders(shards, reverse=False)])
    head = min(-own.start % window, own.length)
    windows = window_states_kernel(x[:, head:], B, P, w, dt, window, dtype)
    if own.stop // window == own.start // window:
        return windows + nothing(windows.shape, windows, before)
    # windows that began in an earlier shard end before the first that begins here
    state, parts = before, []
    if head:
        state = system.final_state(x[:, :head]) + system.advance(before, head, 1)[:, 0]
        parts.append(state[:, None])
    if windows.shape[1]:
        parts.append(windows + system.advance(state, window, windows.shape[1]))
    return torch.cat(parts, dim=1)


class _System:
    """The recurrence of S4 or S4D, with what advances its states `(B, H, M)`.

    What advances them by blocks of tokens does not become less with the tokens of a shard, so it is not kept for the
    backward, but computed again.
    """

    def __init__(self, C: Tensor, step: S4Step | S4DStep, dtype: torch.dtype):
        self.exact, self.C = step, C.to(dtype.to_complex())

    def final_state(self, u: Tensor) -> Tensor:
        """Return the state after all tokens of `(B, T, H)`, from zeros."""
        if u.shape[1] == 0:
            return nothing((u.shape[0], *self.C.shape[1:]), self.C, u, *self.exact)
        last = _last_of_s4 if isinstance(self.exact, S4Step) else _last_of_s4d
        state: Tensor = recomputed(last, u, self.C, *self.exact)
        return state

    def fold(self, states: Tensor, lengths: list[int]) -> Tensor:
        """Return the state after shards of these lengths, whose own states are `(R, B, H, M)`."""
        if len(states) == 0:
            return states.sum(0)
        if isinstance(self.exact, S4DStep):
            x = states[0]
            for state, length in zip(states[1:], lengths[1:], strict=True):
                x = _power(self.exact.decay, length).to(x.dtype) * x + state
            return x
        return self._fold_dense(states, lengths)[-1]

    def _fold_dense(self, states: Tensor, lengths: list[int]) -> Tensor:
        """Return S4's state after each shard, `(R, B, H, M)`."""
        modes, parts = states.shape[3], []
        tile = max(1, tile_numbers(states.device) // (4 * modes * modes * (max(lengths).bit_length() + 1)))
        for start in range(0, states.shape[2], tile):
            part = slice(start, start + tile)
            step = (x[part] for x in self.exact)
            parts.append(recomputed(_fold_dense, states[:, :, part], tuple(lengths[1:]), *step))  # type: ignore[arg-type]
        return torch.cat(parts, dim=2)

    def advance(self, state: Tensor, window: int, count: int) -> Tensor:
        """Return S4's state after each of so many windows of zeros, `(B, count, H, M)`."""
        zeros = state.new_zeros(count, *state.shape)
        return self._fold_dense(torch.cat([state[None], zeros]), [0, *[window] * count])[1:].transpose(0, 1)

    def response(self, state: Tensor, length: int, direction: int = 0) -> Tensor:
        """Return ``2 Re C Abar^(i+1) x`` for i < length, `(B, length, H)`."""
        answer = _response_of_s4 if isinstance(self.exact, S4Step) else _response_of_s4d
        output: Tensor = recomputed(answer, state, length, self.C[direction, None], *self.exact)
        return output

    def reverse_response(self, state: Tensor, length: int) -> Tensor:
        """Return ``2 Re C_1 Abar^i x`` for i < length, from the last token to the first."""
        y = s4_output(state, self.C[1:])
        if length > 1:
            y = torch.cat([y, self.response(state, length - 1, 1)], dim=1)
        return y.flip(1)


def _last_of_s4(u: Tensor, C: Tensor, *exact: Tensor) -> Tensor:
    step = S4Step(*exact)
    blocks = s4_block_constants(C, step, C.real.dtype)
    return s4_final_state(u, S4Step(*(x.to(C.dtype) for x in step)), blocks)


def _last_of_s4d(u: Tensor, C: Tensor, *exact: Tensor) -> Tensor:
    step = S4DStep(*exact)
    return s4d_final_state(u, S4DStep(*(x.to(C.dtype) for x in step)), s4d_block_powers(step, C.real.dtype))


def _response_of_s4(state: Tensor, length: int, C: Tensor, *exact: Tensor) -> Tensor:
    return s4_state_response(state, length, s4_block_constants(C, S4Step(*exact), C.real.dtype))[:, 0]


def _response_of_s4d(state: Tensor, length: int, C: Tensor, *exact: Tensor) -> Tensor:
    return s4d_state_response(state, length, C, s4d_block_powers(S4DStep(*exact), C.real.dtype))[:, 0]


def _fold_dense(states: Tensor, lengths: tuple[int, ...], *step: Tensor) -> Tensor:
    """Fold states of S4 `(R, B, H, M)` by powers of Abar over real coordinates, in float64; return every sum."""
    powers = [dense_transition(S4Step(*step))]
    x, *others = (to_real(state).double().transpose(0, 1) for state in states)
    found = [x]
    for state, length in zip(others, lengths, strict=True):
        for bit in range(length.bit_length()):
            if bit == len(powers):
                powers.append(powers[-1] @ powers[-1])
            if length >> bit & 1:
                x = x @ powers[bit].mT
        x = x + state
        found.append(x)
    return to_complex(torch.stack(found).transpose(1, 2)).to(states.dtype)
