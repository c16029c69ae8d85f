"""Convolutions over a divided sequence: short ones with their neighbours' inputs, long ones with channels divided.

B batch · T length · T_r tokens of this process · D width · D_r channels of this process · J taps
"""

from collections.abc import Callable

import torch
from torch import Tensor

from ..kernels import long_conv as long_kernel
from ..kernels import short_conv as short_kernel
from ..kernels.checks import check_choice
from ..kernels.long_conv import ACTIVATIONS
from ..kernels.long_conv import filter_bank_conv as bank_kernel
from .collectives import divide, fetch, nothing, undivide
from .shards import Shards


def short_conv(
    u: Tensor,
    kernel: Tensor,
    shards: Shards,
    bias: Tensor | None = None,
    *,
    causal: bool = True,
    activation: str | None = None,
    backend: str = "auto",
) -> Tensor:
    """Convolve own tokens with a few taps: `kernels.short_conv` after a halo exchange.

    Each process sends D numbers for each of the J - 1 tokens before another shard, or (J - 1) / 2 on each side if the
    filter is centred; fewer at the borders of packed sequences. The backward sends as many.

    Args:
        u: `(B, T_r, D)`.
        kernel: Taps `(D, J)`; its gradient, like that of the bias, is this process's part of a sum.
        shards: The layout, with the bounds of packed sequences.
        bias: `(D,)`; none when None.
        causal: Whether to read only the past.
        activation: None or ``"silu"``.
        backend: See `hf_hybrid.kernels.dispatch`.

    Returns:
        `(B, T_r, D)` in u's dtype. Differentiable once.

    Raises:
        ValueError: A shape or dtype does not fit.
    """
    shards.check(u, "u")
    past = kernel.shape[-1] - 1
    spans = shards.reach(past, 0) if causal else shards.reach(past // 2, past // 2)
    (x,) = fetch(shards, spans, u)
    own, span = shards.own, spans[shards.rank]
    if not own.length:
        return nothing(u.shape, u, x, kernel, bias)
    cu_seqlens = shards.bounds_within(span, u.device)
    y, _ = short_kernel(x, kernel, bias, causal=causal, activation=activation, cu_seqlens=cu_seqlens, backend=backend)
    start = own.start - span.start
    return y[:, start : start + own.length]


def by_channels(
    shards: Shards,
    function: Callable[[Tensor, slice, Tensor | None], Tensor],
    u: Tensor,
    *tensors: Tensor | None,
    num_filters: int | None = None,
) -> Tensor:
    """Run a function of complete sequences that treats every channel alone, on a part of the channels per process.

    Each process sends B T_r (D - D_r) numbers to turn tokens into channels and B (T - T_r) D_r to turn them back, the
    latter for each filter, and the backward as many. It holds T D_r numbers in between, as many as T_r D if shards are
    even.

    Args:
        shards: The layout, with the bounds of packed sequences.
        function: Takes `(B, T, D_r)`, the channels that these are, and `cu_seqlens` of packed sequences or None;
            returns `(B, T, D_r)`, or `(C, B, T, D_r)`. A process without channels does not call it.
        u: `(B, T_r, D)`.
        *tensors: Tensors that the function reads, so that their gradients exist on every process.
        num_filters: C; None if the function returns one output.

    Returns:
        `(B, T_r, D)`, or `(C, B, T_r, D)`. Differentiable once.
    """
    shards.check(u, "u")
    width = u.shape[2]
    channels = shards.share(width)
    (x,) = divide(shards, u, tokens=1, width=2)
    if channels.start == channels.stop:
        shape = x.shape if num_filters is None else (num_filters, *x.shape)
        y = nothing(shape, x, x, *tensors)
    else:
        ends = None if shards.ends is None else torch.tensor(shards.ends, dtype=torch.int32, device=u.device)
        y = function(x, channels, ends)
    return undivide(shards, y, width, tokens=y.dim() - 2, width=y.dim() - 1)


def long_conv(
    u: Tensor,
    kernel: Tensor,
    shards: Shards,
    *,
    reverse_kernel: Tensor | None = None,
    skip: Tensor | None = None,
    input_gate: Tensor | None = None,
    gate: Tensor | None = None,
    activation: str | None = None,
    backend: str = "auto",
) -> Tensor:
    """Convolve with filters as long as the sequence: `kernels.long_conv` on own channels of all tokens.

    Gates are applied to own tokens, so only the input and the output are sent, see `by_channels`; in 16 bits the
    output is rounded once more before the gate.

    Args:
        u: `(B, T_r, D)`.
        kernel: Taps `(D, T_k)`, or `(G, T_k)` where channel c has those of row ``c % G``. Only the rows of own
            channels are read, and get a gradient: this process's part of a sum.
        shards: The layout, with the bounds of packed sequences.
        reverse_kernel: Taps at lag -1, -2, ..., with as many rows; the convolution is causal when None.
        skip: Weight of the input itself, `(D,)`; none when None.
        input_gate: Multiplies the input, `(B, T_r, D)`; none when None.
        gate: Multiplies the output, `(B, T_r, D)`; none when None.
        activation: None or ``"silu"``.
        backend: See `hf_hybrid.kernels.dispatch`.

    Returns:
        `(B, T_r, D)` in u's dtype. Differentiable once.

    Raises:
        ValueError: A shape or dtype does not fit.
    """
    check_choice("activation", activation, ACTIVATIONS)
    for name, x in (("input_gate", input_gate), ("gate", gate)):
        if x is not None and x.shape != u.shape:
            raise ValueError(f"{name} must be {tuple(u.shape)} like u; got {tuple(x.shape)}")
    if kernel.dim() != 2 or kernel.shape[0] == 0 or u.shape[-1] % kernel.shape[0]:
        rule = f"D = {u.shape[-1]}, or a divisor of it"
        raise ValueError(f"kernel must be (D, taps) with {rule}; got {tuple(kernel.shape)}")

    def convolve(x: Tensor, channels: slice, cu_seqlens: Tensor | None) -> Tensor:
        return long_kernel(
            x,
            _rows(kernel, channels),
            reverse_kernel=None if reverse_kernel is None else _rows(reverse_kernel, channels),
            skip=None if skip is None else skip[channels],
            activation=activation,
            cu_seqlens=cu_seqlens,
            backend=backend,
        )

    x = u if input_gate is None else (u * input_gate).to(u.dtype)
    y = by_channels(shards, convolve, x, kernel, reverse_kernel, skip)
    return y if gate is None else (y * gate).to(u.dtype)


def filter_bank_conv(
    u: Tensor, kernel: Tensor, shards: Shards, *, skip: Tensor | None = None, backend: str = "auto"
) -> Tensor:
    """Convolve with several causal filters: `kernels.filter_bank_conv` on own channels of all tokens.

    Args:
        u: `(B, T_r, D)`.
        kernel: Taps `(C, D, T_k)`; as in `long_conv`, those of own channels get this process's part of the gradient.
        shards: The layout, without packed sequences, for which the kernel has no form.
        skip: Weights of the input itself, `(C, D)`; none when None.
        backend: See `hf_hybrid.kernels.dispatch`.

    Returns:
        `(C, B, T_r, D)` in u's dtype. Differentiable once.

    Raises:
        ValueError: A shape or dtype does not fit, or sequences are packed.
    """
    if shards.ends is not None:
        raise ValueError("cu_seqlens must be None: a bank of filters has no form for packed sequences")
    if kernel.dim() != 3 or kernel.shape[1] != u.shape[-1]:
        raise ValueError(f"kernel must be (C, {u.shape[-1]}, taps); got {tuple(kernel.shape)}")

    def convolve(x: Tensor, channels: slice, cu_seqlens: Tensor | None) -> Tensor:
        weights = None if skip is None else skip[:, channels]
        return bank_kernel(x, kernel[:, channels], skip=weights, backend=backend)

    return by_channels(shards, convolve, u, kernel, skip, num_filters=len(kernel))


def _rows(kernel: Tensor, channels: slice) -> Tensor:
    """Return the taps of some channels, where channel c has row ``c % G``."""
    groups = kernel.shape[0]
    if channels.stop <= groups:
        return kernel[channels]
    return kernel[torch.arange(channels.start, channels.stop, device=kernel.device) % groups]
