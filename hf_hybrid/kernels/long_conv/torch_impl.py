"""The steps around the transforms of a long convolution in torch; `triton_kernels` has functions of the same names.

A block of some sequences and channels has time innermost, so that transforms run along memory: `(b, d, ·)`, in the
precision of the computation. A prologue and an epilogue convert between tensors `(B, T, D)` and blocks.

b sequences and d channels of a block · B batch · T length · D width · G groups · F = n_fft / 2 + 1 frequencies
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from .blocks import Around, Block, Spectrum


def arranged(x: Tensor | None) -> Tensor | None:
    """Return a tensor `(B, T, D)` in the memory layout of the steps; here any will do."""
    return x


def factor(spectrum: Spectrum, width: int, adjoint: bool) -> Tensor:
    """Return the factor for `multiply`: one spectrum for each channel of a block, or its conjugate."""
    rows = spectrum.rows.conj_physical() if adjoint else spectrum.rows
    if spectrum.first or rows.shape[0] != width:
        rows = rows[(spectrum.first + torch.arange(width, device=rows.device)) % rows.shape[0]]
    return rows


def _padded(x: Tensor, block: Block, length: int, dtype: torch.dtype) -> Tensor:
    """Return a block of `(B, T, D)` in memory of its own, `(b, d, length)`, zeros after each sequence."""
    sequences, rows, channels = block
    padded = torch.zeros(rows.stop - rows.start, block.width, length, dtype=dtype, device=x.device)
    if sequences.bounds is None:
        padded[..., : sequences.length] = x[rows, :, channels].transpose(1, 2)
        return padded
    for row, tokens in zip(padded, sequences.bounds[rows], strict=True):
        row[:, : tokens.stop - tokens.start] = x[0, tokens, channels].mT
    return padded


def _gather(x: Tensor, block: Block, dtype: torch.dtype) -> Tensor:
    """Return a block of `(B, T, D)`, zeros after shorter sequences; it may share the tensor's memory."""
    sequences, rows, channels = block
    if sequences.bounds is None:
        return x[rows, :, channels].transpose(1, 2).to(dtype, memory_format=torch.contiguous_format)
    return _padded(x, block, sequences.length, dtype)


def _scatter(y: Tensor, block: Block, out: Tensor) -> None:
    """Write a block into `(B, T, D)`."""
    sequences, rows, channels = block
    if sequences.bounds is None:
        out[rows, :, channels] = y.transpose(1, 2)
        return
    for row, tokens in zip(y, sequences.bounds[rows], strict=True):
        out[0, tokens, channels] = row[:, : tokens.stop - tokens.start].mT


def prologue(u: Tensor, gate: Tensor | None, block: Block, dtype: torch.dtype) -> Tensor:
    """Return a block of the inputs times their gate, `(b, d, n_fft)`, zeros after each sequence."""
    x = _padded(u, block, block.sequences.n_fft, dtype)  # which a transform would copy again to pad it
    if gate is not None:
        x[..., : block.sequences.length].mul_(_gather(gate, block, dtype))
    return x


def multiply(x: Tensor, factor: Tensor, out: Tensor, add: bool = False) -> Tensor:
    """Multiply spectra `(b, d, F)` by a `factor` into `out`, which may be x, or add to it."""
    if add:
        return out.addcmul_(x, factor)
    return x.mul_(factor) if out is x else torch.mul(x, factor, out=out)


def inverse(x: Tensor, n_fft: int) -> Tensor:
    """Transform the result of `multiply` back to `(b, d, n_fft)`."""
    return torch.fft.irfft(x, n=n_fft)


def correlate(inputs: Tensor, gradients: Tensor, groups: int | None, first: int) -> Tensor:
    """Sum conj(inputs) gradients over sequences and over the channels of each group.

    Args:
        inputs: `(b, d, F)`.
        gradients: `(b, d, F)`.
        groups: G; None if each channel is its own.
        first: The block's first channel.

    Returns:
        `(G, F)`, or `(d, F)`.
    """
    product = inputs.conj_physical().mul_(gradients).sum(0)
    if groups is None:
        return product
    # a product, because indexed sums on a GPU have no fixed order
    group = (first + torch.arange(product.shape[0], device=product.device)) % groups
    member = torch.arange(groups, device=product.device)[:, None] == group
    return member.to(product.dtype) @ product


def _with_skip(y: Tensor, x: Tensor | None, skip: Tensor | None, block: Block) -> Tensor:
    """Return a convolution's tokens, with the skip connection added in place."""
    length = block.sequences.length
    y = y[..., :length]
    if skip is None:
        return y
    assert x is not None
    return y.addcmul_(x[..., :length], skip[block.channels, None].to(y.dtype))


def epilogue(y: Tensor, x: Tensor | None, around: Around, block: Block, out: Tensor) -> None:
    """Write the op's output from blocks of the convolution, which it overwrites, and of its input."""
    y = _with_skip(y, x, around.skip, block)
    if around.silu:
        F.silu(y, inplace=True)
    if around.gate is not None:
        y.mul_(_gather(around.gate, block, y.dtype))
    _scatter(y, block, out)


def upstream(y: Tensor, x: Tensor | None, around: Around, grad: Tensor, block: Block, d_gate: Tensor | None) -> Tensor:
    """Return the gradient of a block of the convolution, before activation and gate.

    Args:
        y: The convolution, overwritten.
        x: Its input.
        around: Gates, skip and activation.
        grad: Gradient of the output, `(B, T, D)`.
        block: The block.
        d_gate: Receives the gate's gradient, `(B, T, D)`, if not None.
    """
    y = _with_skip(y, x, around.skip, block)
    g = _gather(grad, block, y.dtype)
    if d_gate is not None:
        _scatter(g * (F.silu(y) if around.silu else y), block, d_gate)
    if around.gate is not None:
        g = g * _gather(around.gate, block, y.dtype)
    return torch.ops.aten.silu_backward(g, y) if around.silu else g


def downstream(
    d_x: Tensor | None,
    d_y: Tensor,
    x: Tensor | None,
    u: Tensor | None,
    around: Around,
    block: Block,
    d_u: Tensor | None,
    d_gate: Tensor | None,
    trains_skip: bool,
) -> Tensor | None:
    """Write gradients of the op's input and gate, and return a block's part of the skip weights', `(d,)`.

    Args:
        d_x: The transposed convolution of `d_y`, overwritten; None if neither input nor gate needs a gradient.
        d_y: Gradient of the convolution.
        x: Input of the convolution.
        u: Input of the op, `(B, T, D)`.
        around: Gates, skip and activation.
        block: The block.
        d_u: Receives the input's gradient, `(B, T, D)`.
        d_gate: Receives the input gate's gradient, `(B, T, D)`.
        trains_skip: Whether to return the skip weights' gradient.
    """
    if d_x is not None:
        d_x = _with_skip(d_x, d_y, around.skip, block)
        if d_gate is not None:
            assert u is not None
            _scatter(d_x * _gather(u, block, d_x.dtype), block, d_gate)
        if d_u is not None:
            gate = around.input_gate
            _scatter(d_x if gate is None else d_x.mul_(_gather(gate, block, d_x.dtype)), block, d_u)
    if not trains_skip:
        return None
    assert x is not None
    length = block.sequences.length
    return (x[..., :length] * d_y[..., :length]).sum((0, 2))
