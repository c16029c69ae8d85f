"""Long convolution as custom ops whose backward stores only the inputs and recomputes spectra.

`spectral_conv` takes a spectrum as input, to share it between calls. Conjugates are computed, never lazy, because a
tracer that runs the op may silently ignore the lazy form.

B batch · T length · D width · G groups · F = n_fft / 2 + 1 frequencies
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..dispatch import NAMESPACE, wished_backend
from ..precision import complex_dtype, compute_dtype
from .blocks import Around, Spectrum, fast_size, transformed_together
from .transforms import Gradients, Spectra, convolve, differentiate, implementation


def _gradients(
    grad: Tensor, skip: Tensor | None, input_gate: Tensor | None, gate: Tensor | None, wants: Sequence[bool]
) -> Gradients:
    """Allocate the required gradients of u, skip, input gate and gate."""
    like = (grad, input_gate, gate)
    u, d_input_gate, d_gate = (
        torch.empty_like(x, memory_format=torch.contiguous_format) if wanted and x is not None else None
        for x, wanted in zip(like, (wants[0], *wants[2:]), strict=True)
    )
    total = torch.zeros(grad.shape[2], dtype=compute_dtype(grad), device=grad.device) if wants[1] else None
    return Gradients(u, d_input_gate, d_gate, total)


def _returned(into: Gradients, skip: Tensor | None, grad: Tensor) -> list[Tensor]:
    """Return gradients of u, skip, input gate and gate; empty tensors for those not required."""
    d_skip = None if into.skip is None or skip is None else into.skip.to(skip.dtype)
    return [grad.new_empty(0) if x is None else x for x in (into.u, d_skip, into.input_gate, into.gate)]


def _returned_fakes(grad: Tensor, like: Sequence[Tensor | None], wants: Sequence[bool]) -> list[Tensor]:
    return [
        torch.empty_like(x, memory_format=torch.contiguous_format) if wanted and x is not None else grad.new_empty(0)
        for x, wanted in zip(like, wants, strict=True)
    ]


def _size_for(n_fft: int) -> Callable[[int], int]:
    """Return a function that gives n_fft for every length that fits it."""

    def size(length: int) -> int:
        if length > n_fft:
            raise ValueError(f"n_fft must be at least the length {length}; got {n_fft}")
        return n_fft

    return size


@torch.library.custom_op(f"{NAMESPACE}::spectral_conv", mutates_args=())
def spectral_conv(
    u: Tensor,
    spectrum: Tensor,
    n_fft: int,
    skip: Tensor | None,
    input_gate: Tensor | None,
    gate: Tensor | None,
    cu_seqlens: Tensor | None,
    silu: bool,
    adjoint: bool,
    backend: str,
) -> Tensor:
    """Call `convolve` as a custom op."""
    impl = implementation("long_conv", backend, u, spectrum, skip, input_gate, gate)
    out = torch.empty_like(u, memory_format=torch.contiguous_format)
    x, around = impl.arranged(u), Around(skip, impl.arranged(input_gate), impl.arranged(gate), silu)
    for sequences in transformed_together(u, cu_seqlens, _size_for(n_fft)):
        convolve(impl, x, lambda at: Spectrum(spectrum[at], 0), sequences, around, adjoint, out)
    return out


@spectral_conv.register_fake
def _(u: Tensor, *rest: Any) -> Tensor:
    return torch.empty_like(u, memory_format=torch.contiguous_format)


@torch.library.custom_op(f"{NAMESPACE}::spectral_conv_backward", mutates_args=())
def spectral_conv_backward(
    grad: Tensor,
    u: Tensor | None,
    spectrum: Tensor,
    n_fft: int,
    skip: Tensor | None,
    input_gate: Tensor | None,
    gate: Tensor | None,
    cu_seqlens: Tensor | None,
    silu: bool,
    adjoint: bool,
    wants: Sequence[bool],
    backend: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return gradients of u, spectrum, skip, input gate and gate, where `wants` is true; see `differentiate`.

    dS = conj(X) dY c / n for the spectrum, with c = 1 at frequencies 0 and n/2 and 2 at the others, which stand for
    their mirror images too; the batch is summed in frequency space.
    """
    impl = implementation("long_conv", backend, grad, u, spectrum, skip, input_gate, gate)
    real = compute_dtype(grad)
    into = _gradients(grad, skip, input_gate, gate, (wants[0], *wants[2:]))
    products = torch.zeros(spectrum.shape, dtype=complex_dtype(real), device=grad.device) if wants[1] else None
    g = impl.arranged(grad)
    x, around = impl.arranged(u), Around(skip, impl.arranged(input_gate), impl.arranged(gate), silu)
    for sequences in transformed_together(grad, cu_seqlens, _size_for(n_fft)):
        differentiate(impl, g, x, lambda at: Spectrum(spectrum[at], 0), sequences, around, adjoint, into, products)
    if products is not None:
        weight = torch.full((n_fft // 2 + 1,), 2.0 / n_fft, dtype=real, device=grad.device)
        weight[0] = 1.0 / n_fft
        weight[-1] = 1.0 / n_fft
        products *= weight
        products = (products.conj_physical_() if adjoint else products).to(spectrum.dtype)
    d_u, *others = _returned(into, skip, grad)
    return d_u, spectrum.new_empty(0) if products is None else products, others[0], others[1], others[2]


@spectral_conv_backward.register_fake
def _(grad: Tensor, u: Tensor | None, spectrum: Tensor, n_fft: int, *given: Any) -> tuple[Tensor, ...]:
    wants = given[-2]
    d_u, *others = _returned_fakes(grad, (grad, *given[:3]), (wants[0], *wants[2:]))
    d_spectrum = torch.empty_like(spectrum, memory_format=torch.contiguous_format)
    return d_u, d_spectrum if wants[1] else spectrum.new_empty(0), *others


def _setup_spectral(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    u, spectrum, n_fft, skip, input_gate, gate, cu_seqlens, silu, adjoint, backend = inputs
    # without activation or gate, a frozen spectrum's backward reads no input
    keeps_input = any(ctx.needs_input_grad[i] for i in (1, 3, 4)) or gate is not None or silu
    ctx.save_for_backward(u if keeps_input else None, spectrum, skip, input_gate, gate, cu_seqlens)
    ctx.rest = n_fft, silu, adjoint, wished_backend(backend)


def _backward_spectral(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    u, spectrum, skip, input_gate, gate, cu_seqlens = ctx.saved_tensors
    n_fft, silu, adjoint, backend = ctx.rest
    wants = [ctx.needs_input_grad[i] for i in (0, 1, 3, 4, 5)]
    found = spectral_conv_backward(
        grad, u, spectrum, n_fft, skip, input_gate, gate, cu_seqlens, silu, adjoint, wants, backend
    )
    d_u, d_spectrum, *others = (x if wanted else None for x, wanted in zip(found, wants, strict=True))
    return d_u, d_spectrum, None, *others, *(None,) * 4


spectral_conv.register_autograd(_backward_spectral, setup_context=_setup_spectral)


def spectrum_of_taps(kernel: Tensor, n_fft: int, reverse_kernel: Tensor | None) -> Tensor:
    """Return the spectrum `(D, F)` of taps at lag 0, 1, ... and at lag -1, -2, ... (at the end of the ring)."""
    if reverse_kernel is not None:
        gap = kernel.new_zeros(kernel.shape[0], n_fft - kernel.shape[1] - reverse_kernel.shape[1])
        kernel = torch.cat([kernel, gap, reverse_kernel.to(kernel.dtype).flip(1)], dim=1)
    return torch.fft.rfft(kernel, n=n_fft)


def _reached(kernel: Tensor, reverse_kernel: Tensor | None, length: int) -> tuple[Tensor, Tensor | None]:
    """Return the taps with lags below a sequence's length."""
    return kernel[:, :length], None if reverse_kernel is None else reverse_kernel[:, : length - 1]


def _size_of_taps(kernel: Tensor, reverse_kernel: Tensor | None) -> Callable[[int], int]:
    """Return a function from a length to a transform length in which no lag wraps onto a tap."""
    longest = max(kernel.shape[1] - 1, 0 if reverse_kernel is None else reverse_kernel.shape[1])
    return lambda length: fast_size(length + min(longest, length - 1))


def _spectra(kernel: Tensor, reverse_kernel: Tensor | None, width: int, n_fft: int) -> Spectra:
    """Return a function that computes the spectra of some channels; those of shared taps are computed once."""
    groups = kernel.shape[0]
    if groups == width:
        return lambda channels: Spectrum(
            spectrum_of_taps(kernel[channels], n_fft, None if reverse_kernel is None else reverse_kernel[channels]),
            0,
        )
    spectrum = spectrum_of_taps(kernel, n_fft, reverse_kernel)
    return lambda channels: Spectrum(spectrum, channels.start % groups)


@torch.library.custom_op(f"{NAMESPACE}::long_conv", mutates_args=())
def long_conv(
    u: Tensor,
    kernel: Tensor,
    reverse_kernel: Tensor | None,
    skip: Tensor | None,
    input_gate: Tensor | None,
    gate: Tensor | None,
    cu_seqlens: Tensor | None,
    silu: bool,
    backend: str,
) -> Tensor:
    """Convolve with taps `(G, ·)`, where channel c has row ``c % G``; otherwise like `spectral_conv`."""
    impl = implementation("long_conv", backend, u, kernel, reverse_kernel, skip, input_gate, gate)
    out = torch.empty_like(u, memory_format=torch.contiguous_format)
    x, around = impl.arranged(u), Around(skip, impl.arranged(input_gate), impl.arranged(gate), silu)
    for sequences in transformed_together(u, cu_seqlens, _size_of_taps(kernel, reverse_kernel)):
        taps = _reached(kernel, reverse_kernel, sequences.length)
        convolve(impl, x, _spectra(*taps, u.shape[2], sequences.n_fft), sequences, around, False, out)
    return out


@long_conv.register_fake
def _(u: Tensor, *rest: Any) -> Tensor:
    return torch.empty_like(u, memory_format=torch.contiguous_format)


@torch.library.custom_op(f"{NAMESPACE}::long_conv_backward", mutates_args=())
def long_conv_backward(
    grad: Tensor,
    u: Tensor | None,
    kernel: Tensor,
    reverse_kernel: Tensor | None,
    skip: Tensor | None,
    input_gate: Tensor | None,
    gate: Tensor | None,
    cu_seqlens: Tensor | None,
    silu: bool,
    wants: Sequence[bool],
    backend: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return gradients of u, taps, reverse taps, skip, input gate and gate where `wants` is true; see `differentiate`.

    For a ring of taps dk[j] = sum_b sum_t x[t-j] dy[t], summed over each group's channels: one inverse transform per
    group.
    """
    impl = implementation("long_conv", backend, grad, u, kernel, reverse_kernel, skip, input_gate, gate)
    real, groups = compute_dtype(grad), kernel.shape[0]
    into = _gradients(grad, skip, input_gate, gate, (wants[0], *wants[3:]))
    d_kernel = torch.zeros_like(kernel, memory_format=torch.contiguous_format) if wants[1] or wants[2] else None
    d_reverse = None
    if wants[2] and reverse_kernel is not None:
        d_reverse = torch.zeros_like(reverse_kernel, memory_format=torch.contiguous_format)
    g = impl.arranged(grad)
    x, around = impl.arranged(u), Around(skip, impl.arranged(input_gate), impl.arranged(gate), silu)
    for sequences in transformed_together(grad, cu_seqlens, _size_of_taps(kernel, reverse_kernel)):
        n_fft = sequences.n_fft
        taps, reverse_taps = _reached(kernel, reverse_kernel, sequences.length)
        products = None
        if d_kernel is not None:
            products = torch.zeros(groups, n_fft // 2 + 1, dtype=complex_dtype(real), device=grad.device)
        spectra = _spectra(taps, reverse_taps, grad.shape[2], n_fft)
        differentiate(impl, g, x, spectra, sequences, around, False, into, products)
        if d_kernel is not None:
            ring = torch.fft.irfft(products, n=n_fft)
            d_kernel[:, : taps.shape[1]] += ring[:, : taps.shape[1]]
            if d_reverse is not None and reverse_taps is not None:
                count = reverse_taps.shape[1]
                d_reverse[:, :count] += ring[:, n_fft - count :].flip(1)
    d_u, *others = _returned(into, skip, grad)
    d_kernel, d_reverse = (grad.new_empty(0) if x is None else x for x in (d_kernel, d_reverse))
    return d_u, d_kernel, d_reverse, others[0], others[1], others[2]


@long_conv_backward.register_fake
def _(grad: Tensor, u: Tensor | None, *given: Any) -> tuple[Tensor, ...]:
    wants = given[-2]
    return tuple(_returned_fakes(grad, (grad, *given[:5]), [wants[0], wants[1] or wants[2], *wants[2:]]))


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    u, kernel, reverse_kernel, skip, input_gate, gate, cu_seqlens, silu, backend = inputs
    # without activation or gate, the backward of frozen taps reads no input
    keeps_input = any(ctx.needs_input_grad[i] for i in (1, 2, 3, 4)) or gate is not None or silu
    ctx.save_for_backward(u if keeps_input else None, kernel, reverse_kernel, skip, input_gate, gate, cu_seqlens)
    ctx.silu, ctx.backend = silu, wished_backend(backend)


def _differentiate(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    *tensors, cu_seqlens = ctx.saved_tensors
    wants = list(ctx.needs_input_grad[:6])
    found = long_conv_backward(grad, *tensors, cu_seqlens, ctx.silu, wants, ctx.backend)
    return *(x if wanted else None for x, wanted in zip(found, wants, strict=True)), *(None,) * 3


long_conv.register_autograd(_differentiate, setup_context=_save)
