"""The loops of a long convolution over blocks of channels, forward and backward: an FFT, a product, an FFT.

Channels are transformed a few at a time, so that a block's spectrum stays in the CPU's cache instead of travelling to
memory three times (2.5 times faster than one transform over the whole `(B, T, D)` tensor). The gradient of u is the
same convolution with the conjugate spectrum of the taps, and the input's spectrum is only made where the taps are
trained, or where an activation or a gate behind the convolution needs its output again.

The loops are the same on torch and on Triton, whose FFT is torch's too: what differs are the steps around the
transforms, `torch_impl` or `triton_kernels`.

Two real rows packed into one complex transform are no faster than a real transform of each, on a CPU.

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
"""Gives the spectra of some channels."""


def implementation(op: str, backend: str, u: Tensor, *others: Tensor | None) -> ModuleType:
    """What stands around the transforms in one call of an op: `triton_kernels`, or else `torch_impl`."""
    return triton_if_chosen(op, __package__, backend, (u, *others), lambda kernels: kernels.why_not(u)) or torch_impl


def convolve(
    impl: ModuleType, u: Tensor, spectra: Spectra, sequences: Sequences, around: Around, adjoint: bool, out: Tensor
) -> None:
    """Multiply u's spectrum by another, or by its conjugate for the adjoint; not differentiable.

    Args:
        impl: That of torch or of Triton.
        u: `(B, T, D)`.
        spectra: Those to multiply by.
        sequences: Which of u's.
        around: What happens to input and output.
        adjoint: Whether to apply the transposed operator, which a backward needs.
        out: Where their outputs go, `(B, T, D)`.
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
            del product  # a block is large on a GPU
            impl.epilogue(y, x, around, block, out)


def _narrow(spectrum: Spectrum, dtype: torch.dtype) -> Spectrum:
    return spectrum._replace(rows=spectrum.rows.to(complex_dtype(dtype)))


class Gradients(NamedTuple):
    """Where gradients go, None where one is not wanted: `(B, T, D)` each, and the skip weights' sum, `(D,)`."""

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
    """Go back through `convolve`.

    With x = input_gate u, y = conv(x) + skip x and dy = grad gate f'(y), where y is computed again if it is needed,

    d_gate = grad f(y),  dx = conv^T(dy) + skip dy,  d_u = input_gate dx,  d_input_gate = u dx,  d_skip = sum x dy.

    Args:
        impl: That of torch or of Triton.
        grad: Gradient of the output, `(B, T, D)`.
        u: Input, `(B, T, D)`; may be None where only its own gradient is wanted and there is neither activation nor
            gate behind the convolution.
        spectra: Those that it was multiplied by.
        sequences: Which of u's.
        around: What happened to input and output.
        adjoint: Whether the forward used conjugate spectra.
        into: Where the gradients go.
        products: Where sums of conj(rfft(x)) rfft(dy) over the sequences are added, `(D, F)`, or over each group of
            channels too, `(G, F)`; None if they are not wanted.
    """
    dtype, n_fft, width = compute_dtype(grad), sequences.n_fft, grad.shape[2]
    again = around.gate is not None or around.silu
    wants_input = into.u is not None or into.input_gate is not None
    groups = None if products is None or products.shape[0] == width else products.shape[0]
    row_step, channel_step = block_steps(grad, n_fft)
    for channels in ranges(width, channel_step):
        there = back = None
        if again or wants_input:
            spectrum, count = _narrow(spectra(channels), dtype), channels.stop - channels.start
            there = impl.factor(spectrum, count, adjoint) if again else None
            back = impl.factor(spectrum, count, not adjoint) if wants_input else None
        for rows in ranges(sequences.number, row_step):
            block = Block(sequences, rows, channels)
            x: Any = None
            inputs: Any = None
            d_x = None
            if again or products is not None or into.skip is not None:
                x = impl.prologue(u, around.input_gate, block, dtype)
            if again or products is not None:
                inputs = torch.fft.rfft(x, n=n_fft)
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
                inputs = None  # a block is large on a GPU
                if wants_input:
                    d_x = impl.inverse(impl.multiply(gradients, back, gradients), n_fft)
                del gradients
            d_skip = impl.downstream(
                d_x, d_y, x, u, around, block, into.u, into.input_gate, trains_skip=into.skip is not None
            )
            if into.skip is not None:
                into.skip[channels] += d_skip
