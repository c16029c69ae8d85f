"""A causal convolution continued in torch: n tokens cost O(n log(n)^2) per channel, for filters of any length.

Contributions of inputs to later outputs are computed as soon as the inputs are known, in squares of doubling size
("relaxed" or online convolution, van der Hoeven 2002; Oncescu et al. 2024 for language models). After n tokens, the
contribution of the last U of them to the next U outputs is added to `pending`, where U is the largest power of two
that divides n: every pair of an input and a later output is in exactly one such square. A sum within a block of
inputs replaces the smallest squares. The largest have size P, the power of two from the filter's length on. A prompt
counts as the end of a block whose size is a power of two, so that one transform serves for all of its squares. The
rings of outputs and inputs double while tokens come, until they have P places.

B batch · T length · T_k taps · D width · P whole ring, a power of two and at least T_k - 1 · R ring so far · U block
"""

import torch
from torch.nn import functional as F

from ...precision import compute_dtype, full_precision
from ..blocks import fast_size

_DIRECT = 16
"""Block size within which each output is a plain sum over the inputs, which is cheaper than smaller squares."""

_CPU_BLOCK = 1 << 17
"""Numbers transformed at once on a CPU, a size for which the allocator reuses memory."""


def ring_size(taps: int) -> int:
    """Return P, the smallest power of two that no lag of a filter exceeds."""
    size = 1
    while size < taps - 1:
        size *= 2
    return size


def start(u: torch.Tensor, kernel: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Return the state after a prompt."""
    whole = ring_size(kernel.shape[1])
    size = min(_DIRECT, whole)
    while size < min(u.shape[1], whole):
        size *= 2
    x = u[:, max(0, u.shape[1] - whole) :].to(torch.promote_types(compute_dtype(u), kernel.dtype))
    inputs = F.pad(x, (0, 0, size - x.shape[1], 0))
    if x.shape[1] == 0:
        return torch.zeros_like(inputs), inputs, 0
    return _next_ring(torch.zeros_like(inputs), inputs, _contribution(x, kernel, size), whole)


def _next_ring(
    pending: torch.Tensor, inputs: torch.Tensor, square: torch.Tensor, whole: int
) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Go on where a ring is full: begin again in a whole one, and double any other."""
    ring = pending.shape[1]
    if ring == whole:
        return square, inputs, 0
    return torch.cat([pending, square], dim=1), F.pad(inputs, (0, 0, 0, ring)), ring


def advance(
    u: torch.Tensor, kernel: torch.Tensor, pending: torch.Tensor, inputs: torch.Tensor, position: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, int]:
    """Return outputs in the precision of the state, and the next state."""
    recorded = torch.is_grad_enabled() and any(x.requires_grad for x in (u, kernel, pending, inputs))
    if not torch.compiler.is_compiling() and pending.is_inference() and not torch.is_inference_mode_enabled():
        pending, inputs = pending.clone(), inputs.clone()
    whole = ring_size(kernel.shape[1])
    x, base = u.to(pending.dtype), min(_DIRECT, whole)
    if torch.compiler.is_exporting() and u.shape[1] == 1:
        y, inputs = _shifted(x, kernel, inputs, position)
        return y, pending, inputs, position
    outputs = []
    start = 0
    while start < u.shape[1]:
        offset, left = position % base, u.shape[1] - start
        if offset or left < base:
            size = min(left, base - offset)
        else:
            size = min(_lowest_bit(position, pending.shape[1]), 1 << (left.bit_length() - 1))
        at = slice(position, position + size)
        if recorded:  # autograd holds the tensor, so do not overwrite it
            pending, inputs = pending.clone(), inputs.clone()
        inputs[:, at] = x[:, start : start + size]
        outputs.append(pending[:, at] + _within(inputs[:, position - offset : position + size], kernel, size))
        start, position = start + size, position + size
        if position % base:
            continue
        size = _lowest_bit(position, whole)
        square = _contribution(inputs[:, position - size : position], kernel, size)
        if position == pending.shape[1]:
            pending, inputs, position = _next_ring(pending, inputs, square, whole)
        else:
            pending[:, position : position + size] += square
    y = outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=1)
    return y, pending, inputs, position


def _shifted(
    x: torch.Tensor, kernel: torch.Tensor, inputs: torch.Tensor, position: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return an output and the whole ring after it, whose position stays as an exported program knows it: O(P)."""
    last = torch.cat([inputs[:, position:], inputs[:, :position], x], dim=1)  # the oldest first
    y = (last * _taps(kernel, 0, last.shape[1], x).flip(1).mT).sum(1, keepdim=True)
    return y, last[:, 1:].roll(position, 1)


def _lowest_bit(position: int, ring: int) -> int:
    """Return the largest power of two that divides a position; that of the ring at 0."""
    return position & -position or ring


def _taps(kernel: torch.Tensor, start: int, stop: int, like: torch.Tensor) -> torch.Tensor:
    """Return taps `start` to `stop - 1` of every channel, `(D, stop - start)`, zeros after the last."""
    taps = kernel[:, start:stop].to(like.dtype)
    if taps.shape[1] < stop - start:
        taps = F.pad(taps, (0, stop - start - taps.shape[1]))
    return taps if taps.shape[0] == like.shape[2] else taps.repeat(like.shape[2] // taps.shape[0], 1)


def _within(x: torch.Tensor, kernel: torch.Tensor, count: int) -> torch.Tensor:
    """Return a block's contribution to its own last `count` outputs, `(B, count, D)`."""
    size = x.shape[1]
    if count == 1:
        return (x * _taps(kernel, 0, size, x).flip(1).mT).sum(1, keepdim=True)
    return _transformed(x, kernel[:, :size], 2 * size, slice(size - count, size))


def _contribution(x: torch.Tensor, kernel: torch.Tensor, count: int) -> torch.Tensor:
    """Return a block's contribution to the `count` outputs after it, `(B, count, D)`."""
    size = x.shape[1]
    if size == count <= _DIRECT:
        # entry (f, r) is the tap at lag 1 + f + r, from input U - 1 - r to output f
        matrix = _taps(kernel, 1, 2 * size, x).unfold(1, size, 1)
        with full_precision(x.device):
            return (matrix @ x.flip(1).permute(2, 1, 0)).permute(2, 1, 0)
    # lags that wrap around the transform only affect the block's own outputs, which are not used
    return _transformed(x, kernel, fast_size(size + count), slice(size, size + count))


def _transformed(x: torch.Tensor, kernel: torch.Tensor, n_fft: int, wanted: slice) -> torch.Tensor:
    """Return some outputs of the circular convolution on a ring of n_fft, computed a few channels at a time."""
    budget = _CPU_BLOCK if x.device.type == "cpu" else x.numel()
    parts, step, width, groups = [], max(1, budget // n_fft), x.shape[2], kernel.shape[0]
    taps = kernel[:, :n_fft].to(x.dtype)
    shared = None
    if groups < width:  # one transform of the taps for all channels, in parts of whole groups
        shared, step = torch.fft.rfft(taps, n=n_fft), step + -step % groups
    for start in range(0, width, step):
        at = slice(start, start + step)
        spectrum = torch.fft.rfft(taps[at], n=n_fft) if shared is None else shared
        signal = torch.fft.rfft(x[:, :, at].transpose(1, 2).contiguous(), n=n_fft)
        product = signal.unflatten(1, (-1, spectrum.shape[0])) * spectrum
        parts.append(torch.fft.irfft(product.flatten(1, 2), n=n_fft)[..., wanted].transpose(1, 2))
    return torch.cat(parts, dim=2)
