"""The loops of a long convolution over blocks of channels, forward and backward: an FFT, a product, an FFT.

They transform a few channels at a time, so that a block's spectrum stays in the CPU's cache (2.5 times faster than
one transform of the full `(B, T, D)` tensor). The gradient of u is the same convolution with the conjugate spectrum.
The backward computes the input's spectrum only for trained taps, or for an activation or gate that needs the output
again.

Torch and Triton share these loops and torch's FFT; the steps around the transforms differ: `torch_impl` or
`triton_kernels`. On a CPU, packing two real rows into one complex transform is no faster.

B batch · T length · D width · G groups · N packed sequences · F = n_fft / 2 + 1 frequencies
"""

from collections.abc import Callable
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..dispatch import triton_if_chosen
from ..precision import complex_dtype, compute_dtype
from . import torch_impl
from .blocks import Around, Block, Sequences, Spectrum, block_steps, ranges

Spectra = Callable[[slice], Spectrum]
"""Returns the spectra of some channels."""


def implementation(op: str, backend: str, u: Tensor, *others: Tensor | None) -> ModuleType:
    """Return the module of the steps around the transforms: `triton_kernels` or `torch_impl`."""
    return triton_if_chosen(op, __package__, backend, (u, *others), lambda kernels: kernels.why_not(u)) or torch_impl


def convolve(
    impl: ModuleType, u: Tensor, spectra: Spectra, sequences: Sequences, around: Around, adjoint: bool, out: Tensor
) -> None:
    """Multiply u's spectrum by another, or by its conjugate for the adjoint; not differentiable.

    Args:
        impl: `torch_impl` or `triton_kernels`.
        u: `(B, T, D)`.
        spectra: Returns the spectra to multiply by.
        sequences: The sequences of u to convolve.
        around: Gates, skip and activation.
        adjoint: Whether to apply the transposed operator, for a backward.
        out: Receives their outputs, `(B, T, D)`.
    """
    dtype, n_fft = compute_dtype(u), sequences.n_fft
    row_step, channel_step = block_steps(u, n_fft)
    for channels in ranges(u.shape[2], channel_step):
        factor = impl.factor(_narrow(spectra(channels), dtype), channels.stop - channels.start, adjoint)
        for rows in ranges(sequences.number, row_step):
            block = Block(sequences, rows, channels)
            x = impl.prologue(u, around.input_gate, block, dtype)
            product = torch.fft.rfft(x, n=n_fft)
            if around.skip is None:
                x = None
            y = impl.inverse(impl.multiply(product, factor, product), n_fft)
            del product  # blocks are large on a GPU
            impl.epilogue(y, x, around, block, out)


def _narrow(spectrum: Spectrum, dtype: torch.dtype) -> Spectrum:
    return spectrum._replace(rows=spectrum.rows.to(complex_dtype(dtype)))


class Gradients(NamedTuple):
    """Memory for gradients, `(B, T, D)` each, and the skip weights' sum, `(D,)`; None for those not needed."""

    u: Tensor | None
    input_gate: Tensor | None
    gate: Tensor | None
    skip: Tensor | None


def differentiate(
    impl: ModuleType,
    grad: Tensor,
    u: Tensor | None,
    spectra: Spectra,
    sequences: Sequences,
    around: Around,
    adjoint: bool,
    into: Gradients,
    products: Tensor | None,
) -> None:
    """Compute the gradients of `convolve`, which describes the other arguments.

    With x = input_gate u, y = conv(x) + skip x, recomputed if needed, and dy = grad gate f'(y):

    d_gate = grad f(y),  dx = conv^T(dy) + skip dy,  d_u = input_gate dx,  d_input_gate = u dx,  d_skip = sum x dy.

    `u` may be None if only its gradient is needed and there is neither activation nor gate. `adjoint` says whether the
    forward used conjugate spectra. `into` receives the gradients, and `products` the sums of conj(rfft(x)) rfft(dy)
    over sequences, `(D, F)`, or over groups of channels too, `(G, F)`.
    """
    dtype, n_fft, width = compute_dtype(grad), sequences.n_fft, grad.shape[2]
    again = around.gate is not None or around.silu
    wants_input = into.u is not None or into.input_gate is not None
    groups = None if products is None or products.shape[0] == width else products.shape[0]
    row_step, channel_step = block_steps(grad, n_fft)
    for channels in ranges(width, channel_step):
        count = channels.stop - channels.start
        spectrum = _narrow(spectra(channels), dtype) if again or wants_input else None
        there = impl.factor(spectrum, count, adjoint) if again else None
        back = impl.factor(spectrum, count, not adjoint) if wants_input else None
        for rows in ranges(sequences.number, row_step):
            block = Block(sequences, rows, channels)
            reads = again or products is not None
            x = impl.prologue(u, around.input_gate, block, dtype) if reads or into.skip is not None else None
            inputs: Any = torch.fft.rfft(x, n=n_fft) if reads else None
            d_x = None
            if again:
                product = inputs if products is None else torch.empty_like(inputs)
                y = impl.inverse(impl.multiply(inputs, there, product), n_fft)
                del product
                d_y = impl.upstream(y, x, around, grad, block, into.gate)
            else:
                d_y = impl.prologue(grad, None, block, dtype)
            if wants_input or products is not None:
                gradients = torch.fft.rfft(d_y, n=n_fft)
                if products is not None:
                    at = channels if groups is None else slice(None)
                    products[at] += impl.correlate(inputs, gradients, groups, channels.start)
                inputs = None  # blocks are large on a GPU
                if wants_input:
                    d_x = impl.inverse(impl.multiply(gradients, back, gradients), n_fft)
                del gradients
            trained = into.skip is not None
            d_skip = impl.downstream(d_x, d_y, x, u, around, block, into.u, into.input_gate, trains_skip=trained)
            if into.skip is not None:
                into.skip[channels] += d_skip
