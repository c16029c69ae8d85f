"""A causal convolution carried on in torch: n tokens cost O(n log(n)^2) per channel, however long the filter.

Of what earlier inputs contribute to later outputs, each part is computed as soon as its inputs are known, in squares
of doubling size ("relaxed" or online convolution, van der Hoeven 2002; Oncescu et al. 2024 for language models). After
n tokens, what the last U of them contribute to the next U outputs is added to what those have `pending`, where U is
the largest power of two that divides n: every pair of an input and a later output lies in exactly one such square.
The smallest squares are left out in favour of a sum within a block of inputs. The largest are of size P, the power of
two from the filter's length on, since nothing reaches further back than that. A prompt's contribution to all later
outputs is pending from the start, by one transform.

B batch · T length · T_k taps · D width · P ring, a power of two and at least T_k - 1 · U block
"""

import torch
from torch.nn import functional as F

from ...precision import compute_dtype, full_precision
from ..blocks import fast_size

_DIRECT = 16
"""Within blocks of this size every output is a sum over the inputs so far: cheaper than smaller squares."""

_CPU_BLOCK = 1 << 17
"""Numbers transformed at once on a CPU: memory of that size is used again instead of being asked for anew."""


def ring_size(taps: int) -> int:
    """P, the smallest power of two that no lag of a filter exceeds."""
    size = 1
    while size < taps - 1:
        size *= 2
    return size


def start(u: torch.Tensor, kernel: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """What is pending behind a prompt, and a ring of inputs that holds none."""
    ring = ring_size(kernel.shape[1])
    dtype = torch.promote_types(compute_dtype(u), kernel.dtype)
    x = u[:, max(0, u.shape[1] - kernel.shape[1] + 1) :].to(dtype)
    nothing = x.shape[1] == 0
    pending = x.new_zeros(u.shape[0], ring, u.shape[2]) if nothing else _contribution(x, kernel, ring)
    return pending, torch.zeros_like(pending)


def advance(
    u: torch.Tensor, kernel: torch.Tensor, pending: torch.Tensor, inputs: torch.Tensor, position: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, int]:
    """Outputs in the precision of the state, and the state after them."""
    recorded = torch.is_grad_enabled() and any(x.requires_grad for x in (u, kernel, pending, inputs))
    if not torch.compiler.is_compiling() and pending.is_inference() and not torch.is_inference_mode_enabled():
        pending, inputs = pending.clone(), inputs.clone()
    ring = ring_size(kernel.shape[1])
    x, base = u.to(pending.dtype), min(_DIRECT, ring)
    outputs = []
    start = 0
    while start < u.shape[1]:
        offset, left = position % base, u.shape[1] - start
        if offset or left < base:
            size = min(left, base - offset)
        else:
            size = min(_lowest_bit(position, ring), 1 << (left.bit_length() - 1))
        at = slice(position, position + size)
        if recorded:  # what the graph holds must not be written to again
            pending, inputs = pending.clone(), inputs.clone()
        inputs[:, at] = x[:, start : start + size]
        outputs.append(pending[:, at] + _within(inputs[:, position - offset : position + size], kernel, size))
        start, position = start + size, position + size
        if position % base:
            continue
        size = _lowest_bit(position, ring)
        square = _contribution(inputs[:, position - size : position], kernel, size)
        if position == ring:
            pending, position = square, 0
        else:
            pending[:, position : position + size] += square
    y = outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=1)
    return y, pending, inputs, position


def _lowest_bit(position: int, ring: int) -> int:
    """The largest power of two that divides a position, the ring's size at 0."""
    return position & -position or ring


def _taps(kernel: torch.Tensor, start: int, stop: int, like: torch.Tensor) -> torch.Tensor:
    """Taps `start` to `stop - 1` of every channel, zeros beyond the last, `(D, stop - start)`."""
    taps = kernel[:, start:stop].to(like.dtype)
    if taps.shape[1] < stop - start:
        taps = F.pad(taps, (0, stop - start - taps.shape[1]))
    return taps if taps.shape[0] == like.shape[2] else taps.repeat(like.shape[2] // taps.shape[0], 1)


def _within(x: torch.Tensor, kernel: torch.Tensor, count: int) -> torch.Tensor:
    """What a block contributes to its own last `count` outputs, `(B, count, D)`."""
    size = x.shape[1]
    if count == 1:
        return (x * _taps(kernel, 0, size, x).flip(1).mT).sum(1, keepdim=True)
    return _transformed(x, kernel[:, :size], 2 * size, slice(size - count, size))


def _contribution(x: torch.Tensor, kernel: torch.Tensor, count: int) -> torch.Tensor:
    """What a block of inputs contributes to the `count` outputs behind it, `(B, count, D)`."""
    size = x.shape[1]
    if size == count <= _DIRECT:
        # entry (f, r) is the tap at lag 1 + f + r, from input U - 1 - r to output f
        matrix = _taps(kernel, 1, 2 * size, x).unfold(1, size, 1)
        with full_precision(x.device):
            return (matrix @ x.flip(1).permute(2, 1, 0)).permute(2, 1, 0)
    # lags that wrap around the transform end up in the block's own outputs, which are not wanted
    return _transformed(x, kernel, fast_size(size + count), slice(size, size + count))


def _transformed(x: torch.Tensor, kernel: torch.Tensor, n_fft: int, wanted: slice) -> torch.Tensor:
    """Some outputs of the circular convolution on a ring of n_fft; a few channels at once, as for a whole sequence."""
    budget = _CPU_BLOCK if x.device.type == "cpu" else x.numel()
    parts, step = [], max(1, budget // n_fft)
    taps = _taps(kernel, 0, min(n_fft, kernel.shape[1]), x)
    for rows, channels in zip(taps.split(step), x.split(step, dim=2), strict=True):
        spectrum = torch.fft.rfft(rows, n=n_fft)
        signal = torch.fft.rfft(channels.transpose(1, 2).contiguous(), n=n_fft)
        parts.append(torch.fft.irfft(signal * spectrum, n=n_fft)[..., wanted].transpose(1, 2))
    return torch.cat(parts, dim=2)
