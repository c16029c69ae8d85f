"""A causal convolution continued in torch: n tokens cost O(n log(n)^2) per channel, for filters of any length.

Contributions of inputs to later outputs are computed as soon as the inputs are known, in squares of doubling size
("relaxed" or online convolution, van der Hoeven 2002; Oncescu et al. 2024 for language models). After n tokens, the
contribution of the last U of them to the next U outputs is added to `pending`, where U is the largest power of two
that divides n: every pair of an input and a later output is in exactly one such square. A sum within a block of
inputs replaces the smallest squares. The largest have size P, the power of two from the filter's length on. One
transform adds a prompt's contribution to all later outputs.

B batch · T length · T_k taps · D width · P ring, a power of two and at least T_k - 1 · U block
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


def start(u: torch.Tensor, kernel: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the contributions pending after a prompt, and an empty ring of inputs."""
    ring = ring_size(kernel.shape[1])
    dtype = torch.promote_types(compute_dtype(u), kernel.dtype)
    x = u[:, max(0, u.shape[1] - kernel.shape[1] + 1) :].to(dtype)
    nothing = x.shape[1] == 0
    pending = x.new_zeros(u.shape[0], ring, u.shape[2]) if nothing else _contribution(x, kernel, ring)
    return pending, torch.zeros_like(pending)


def advance(
    u: torch.Tensor, kernel: torch.Tensor, pending: torch.Tensor, inputs: torch.Tensor, position: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, int]:
    """Return outputs in the precision of the state, and the next state."""
    recorded = torch.is_grad_enabled() and any(x.requires_grad for x in (u, kernel, pending, inputs))
    if not torch.compiler.is_compiling() and pending.is_inference() and not torch.is_inference_mode_enabled():
        pending, inputs = pending.clone(), inputs.clone()
    ring = ring_size(kernel.shape[1])
    x, base = u.to(pending.dtype), min(_DIRECT, ring)
    if torch.compiler.is_exporting() and position == 0 and u.shape[1] == 1:
        return *_shifted(x, kernel, pending), inputs, 0
    outputs = []
    start = 0
    while start < u.shape[1]:
        offset, left = position % base, u.shape[1] - start
        if offset or left < base:
            size = min(left, base - offset)
        else:
            size = min(_lowest_bit(position, ring), 1 << (left.bit_length() - 1))
        at = slice(position, position + size)
        if recorded:  # autograd holds the tensor, so do not overwrite it
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


def _shifted(x: torch.Tensor, kernel: torch.Tensor, pending: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Advance by a token and keep the position 0, which an exported program holds as a constant: O(P) per channel."""
    ring = pending.shape[1]
    y = pending[:, :1] + _taps(kernel, 0, 1, x).mT * x
    return y, F.pad(pending[:, 1:], (0, 0, 0, 1)) + _taps(kernel, 1, ring + 1, x).mT * x


def _lowest_bit(position: int, ring: int) -> int:
    """Return the largest power of two that divides a position; the ring's size at 0."""
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
