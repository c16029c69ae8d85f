"""Long convolution by FFT in blocks of channels, as an opaque op with its own backward.

Two decisions shape this file. Channels are transformed a few at a time, so that a block's spectrum stays in the CPU's
cache instead of travelling to memory three times (2.5 times faster than one transform over the whole `(B, T, D)`
tensor). And nothing but the inputs is kept for the backward, which makes the spectra that it needs anew: the gradient
of u is the same convolution with the conjugate spectrum of the taps, and the input's spectrum is only made where the
taps are trained. A spectrum that serves many calls is an input itself, of `spectral_conv`.

Two real rows packed into one complex transform are no faster than a real transform of each, on a CPU.

Conjugates are computed, never lazy: a tracer that runs the op may not resolve the lazy form, silently.

B batch · T length · D width · G groups · Z directions · F = n_fft / 2 + 1 frequencies
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch

from ..dispatch import choose_backend

_CPU_BLOCK = 1 << 19
"""Real numbers transformed at once on a CPU: 2 MiB of float32, near the fastest for every length measured."""

_GPU_BLOCK = 1 << 27
"""The same elsewhere, where only memory limits the block."""


def _why_not_triton() -> str | None:
    return "no Triton kernel in this version"


def fast_size(smallest: int) -> int:
    """Smallest of 2, 4, 6, 8, 12, 16, 24, ... that is at least `smallest`."""
    power = 2
    while power < smallest:
        power *= 2
    return power // 4 * 3 if power > 4 and power // 4 * 3 >= smallest else power


def compute_dtype(u: torch.Tensor) -> torch.dtype:
    """Precision in which a convolution of `u` is transformed: its own, but float32 at least."""
    return torch.promote_types(u.dtype, torch.float32)


def complex_dtype(dtype: torch.dtype) -> torch.dtype:
    """Complex dtype of the same precision; torch.compile cannot trace `torch.dtype.to_complex`."""
    return torch.complex128 if dtype == torch.float64 else torch.complex64


def _blocks(u: torch.Tensor, n_fft: int) -> tuple[int, int]:
    """Batch rows and channels of one block."""
    budget = _CPU_BLOCK if u.device.type == "cpu" else _GPU_BLOCK
    channels = min(u.shape[2], max(1, budget // n_fft))
    return max(1, budget // (n_fft * max(1, u.shape[2]))), channels


def _ranges(size: int, step: int) -> Iterator[slice]:
    return (slice(start, min(start + step, size)) for start in range(0, size, step))


def _rows(x: torch.Tensor, rows: slice, channels: slice, dtype: torch.dtype) -> torch.Tensor:
    """A block with time innermost, `(b, d, T)`."""
    return x[rows, :, channels].transpose(1, 2).to(dtype, memory_format=torch.contiguous_format)


def convolve(
    u: torch.Tensor,
    spectrum: Callable[[slice], torch.Tensor],
    n_fft: int,
    skip: torch.Tensor | None,
    adjoint: bool,
) -> torch.Tensor:
    """Multiply u's spectrum by another, or by its conjugate for the adjoint; not differentiable.

    Args:
        u: `(B, T, D)`.
        spectrum: Gives that of some channels, `(d, F)`, complex.
        n_fft: Length of the transform.
        skip: `(D,)` or None.
        adjoint: Whether to apply the transposed operator, which a backward needs.

    Returns:
        `(B, T, D)` in u's dtype.
    """
    dtype = compute_dtype(u)
    out = torch.empty(u.shape, dtype=u.dtype, device=u.device)
    length = u.shape[1]
    row_step, channel_step = _blocks(u, n_fft)
    for channels in _ranges(u.shape[2], channel_step):
        factor = spectrum(channels).to(complex_dtype(dtype))
        factor = torch.conj_physical(factor) if adjoint else factor
        for rows in _ranges(u.shape[0], row_step):
            x = _rows(u, rows, channels, dtype)
            y = torch.fft.irfft(torch.fft.rfft(x, n=n_fft).mul_(factor), n=n_fft)[..., :length]
            if skip is not None:
                y.addcmul_(x, skip[channels, None].to(dtype))
            out[rows, :, channels] = y.transpose(1, 2)
    return out


@torch.library.custom_op("hf_hybrid::spectral_conv", mutates_args=())
def spectral_conv(
    u: torch.Tensor, spectrum: torch.Tensor, n_fft: int, skip: torch.Tensor | None, adjoint: bool, backend: str
) -> torch.Tensor:
    """`convolve` as an op that autograd and torch.compile know.

    The backend is chosen in here, where no tracer looks, because the choice reads the environment and logs.
    """
    choose_backend("long_conv", backend, [u, spectrum], _why_not_triton)
    return convolve(u, spectrum.__getitem__, n_fft, skip, adjoint)


@spectral_conv.register_fake
def _(
    u: torch.Tensor, spectrum: torch.Tensor, n_fft: int, skip: torch.Tensor | None, adjoint: bool, backend: str
) -> torch.Tensor:
    return torch.empty_like(u, memory_format=torch.contiguous_format)


@torch.library.custom_op("hf_hybrid::spectral_conv_spectrum_grad", mutates_args=())
def spectrum_grad(u: torch.Tensor, grad: torch.Tensor, n_fft: int, adjoint: bool, dtype: torch.dtype) -> torch.Tensor:
    """Gradient of a sum over batch and time with respect to the spectrum.

    dS = conj(U) rfft(G) c / n,  c = 1 at frequencies 0 and n/2 and 2 between (each stands for its mirror image too).
    The batch is summed in frequency space, so that one inverse transform per channel is left for the kernel.

    Args:
        u: Input, `(B, T, D)`.
        grad: Gradient of the output, `(B, T, D)`.
        n_fft: Length of the transform.
        adjoint: Whether the forward used the conjugate spectrum.
        dtype: Complex dtype of the spectrum.

    Returns:
        `(D, F)`, complex.
    """
    real = compute_dtype(u)
    out = torch.zeros(u.shape[2], n_fft // 2 + 1, dtype=complex_dtype(real), device=u.device)
    row_step, channel_step = _blocks(u, n_fft)
    for channels in _ranges(u.shape[2], channel_step):
        for rows in _ranges(u.shape[0], row_step):
            inputs = torch.fft.rfft(_rows(u, rows, channels, real), n=n_fft)
            product = torch.fft.rfft(_rows(grad, rows, channels, real), n=n_fft).mul_(inputs.conj_physical_())
            out[channels] += product.sum(0)
    weight = torch.full((n_fft // 2 + 1,), 2.0 / n_fft, dtype=real, device=u.device)
    weight[0] = 1.0 / n_fft
    weight[-1] = 1.0 / n_fft
    out *= weight
    return (out.conj_physical_() if adjoint else out).to(dtype)


@spectrum_grad.register_fake
def _(u: torch.Tensor, grad: torch.Tensor, n_fft: int, adjoint: bool, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(u.shape[2], n_fft // 2 + 1, dtype=dtype, device=u.device)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    u, spectrum, n_fft, skip, adjoint, backend = inputs
    # a frozen spectrum's backward reads no input at all
    keeps_input = ctx.needs_input_grad[1] or ctx.needs_input_grad[3]
    ctx.save_for_backward(u if keeps_input else None, spectrum, skip)
    ctx.n_fft, ctx.adjoint, ctx.backend = n_fft, adjoint, backend


def _backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    u, spectrum, skip = ctx.saved_tensors
    grad_u = grad_spectrum = grad_skip = None
    if ctx.needs_input_grad[0]:
        grad_u = spectral_conv(grad, spectrum, ctx.n_fft, skip, not ctx.adjoint, ctx.backend)
    if ctx.needs_input_grad[1]:
        grad_spectrum = spectrum_grad(u, grad, ctx.n_fft, ctx.adjoint, spectrum.dtype)
    if ctx.needs_input_grad[3]:
        wide = compute_dtype(u)
        grad_skip = (u.to(wide) * grad.to(wide)).sum((0, 1)).to(skip.dtype)
    return grad_u, grad_spectrum, None, grad_skip, None, None


spectral_conv.register_autograd(_backward, setup_context=_setup_context)


def spectrum_of_taps(kernel: torch.Tensor, n_fft: int, reverse_kernel: torch.Tensor | None) -> torch.Tensor:
    """Spectrum `(D, F)` of taps at lag 0, 1, ... and at lag -1, -2, ..., which sit at the end of the ring."""
    if reverse_kernel is not None:
        gap = kernel.new_zeros(kernel.shape[0], n_fft - kernel.shape[1] - reverse_kernel.shape[1])
        kernel = torch.cat([kernel, gap, reverse_kernel.to(kernel.dtype).flip(1)], dim=1)
    return torch.fft.rfft(kernel, n=n_fft)


def _spectra(
    kernel: torch.Tensor, reverse_kernel: torch.Tensor | None, width: int, n_fft: int
) -> Callable[[slice], torch.Tensor]:
    """What gives the spectra of some channels, made when they are asked for; those of shared taps are made once."""
    groups = kernel.shape[0]
    if groups == width:
        return lambda channels: spectrum_of_taps(
            kernel[channels], n_fft, None if reverse_kernel is None else reverse_kernel[channels]
        )
    spectrum = spectrum_of_taps(kernel, n_fft, reverse_kernel)
    return lambda channels: spectrum[torch.arange(channels.start, channels.stop, device=kernel.device) % groups]


@torch.library.custom_op("hf_hybrid::long_conv", mutates_args=())
def long_conv(
    u: torch.Tensor,
    kernel: torch.Tensor,
    reverse_kernel: torch.Tensor | None,
    n_fft: int,
    skip: torch.Tensor | None,
    backend: str,
) -> torch.Tensor:
    """The convolution with taps `(G, ·)`, of which channel c has those of row ``c % G``; as `spectral_conv`."""
    choose_backend("long_conv", backend, [u, kernel], _why_not_triton)
    return convolve(u, _spectra(kernel, reverse_kernel, u.shape[2], n_fft), n_fft, skip, False)


@long_conv.register_fake
def _(
    u: torch.Tensor,
    kernel: torch.Tensor,
    reverse_kernel: torch.Tensor | None,
    n_fft: int,
    skip: torch.Tensor | None,
    backend: str,
) -> torch.Tensor:
    return torch.empty_like(u, memory_format=torch.contiguous_format)


@torch.library.custom_op("hf_hybrid::long_conv_adjoint", mutates_args=())
def long_conv_adjoint(
    grad: torch.Tensor,
    kernel: torch.Tensor,
    reverse_kernel: torch.Tensor | None,
    n_fft: int,
    skip: torch.Tensor | None,
) -> torch.Tensor:
    """Gradient of u."""
    return convolve(grad, _spectra(kernel, reverse_kernel, grad.shape[2], n_fft), n_fft, skip, True)


@long_conv_adjoint.register_fake
def _(
    grad: torch.Tensor,
    kernel: torch.Tensor,
    reverse_kernel: torch.Tensor | None,
    n_fft: int,
    skip: torch.Tensor | None,
) -> torch.Tensor:
    return torch.empty_like(grad, memory_format=torch.contiguous_format)


@torch.library.custom_op("hf_hybrid::long_conv_taps_grad", mutates_args=())
def taps_grad(u: torch.Tensor, grad: torch.Tensor, n_fft: int, groups: int) -> torch.Tensor:
    """Gradient of a ring of taps: dk[j] = sum_b sum_t u[t-j] dy[t], and the sum of that over each group's channels.

    Args:
        u: Input, `(B, T, D)`.
        grad: Gradient of the output, `(B, T, D)`.
        n_fft: Length of the ring.
        groups: G.

    Returns:
        `(G, n_fft)`, by one inverse transform per group.
    """
    dtype = compute_dtype(u)
    products = torch.zeros(groups, n_fft // 2 + 1, dtype=complex_dtype(dtype), device=u.device)
    row_step, channel_step = _blocks(u, n_fft)
    for channels in _ranges(u.shape[2], channel_step):
        group = torch.arange(channels.start, channels.stop, device=u.device) % groups
        for rows in _ranges(u.shape[0], row_step):
            inputs = torch.fft.rfft(_rows(u, rows, channels, dtype), n=n_fft)
            product = torch.fft.rfft(_rows(grad, rows, channels, dtype), n=n_fft).mul_(inputs.conj_physical_())
            if groups == u.shape[2]:
                products[channels] += product.sum(0)
            else:
                products += _grouped(product.sum(0), group, groups)
    return torch.fft.irfft(products, n=n_fft)


@taps_grad.register_fake
def _(u: torch.Tensor, grad: torch.Tensor, n_fft: int, groups: int) -> torch.Tensor:
    return torch.empty(groups, n_fft, dtype=compute_dtype(u), device=u.device)


def _grouped(x: torch.Tensor, group: torch.Tensor, groups: int) -> torch.Tensor:
    """Sums over the channels of each group, `(G, ·)`: a product, since indexed sums on a GPU have no fixed order."""
    member = torch.arange(groups, device=x.device)[:, None] == group
    return member.to(x.dtype) @ x


def _save(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    u, kernel, reverse_kernel, ctx.n_fft, skip, _ = inputs
    # the backward of frozen taps reads no input at all
    keeps_input = any(ctx.needs_input_grad[i] for i in (1, 2, 4))
    ctx.save_for_backward(u if keeps_input else None, kernel, reverse_kernel, skip)


def _differentiate(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    u, kernel, reverse_kernel, skip = ctx.saved_tensors
    grad_u = grad_kernel = grad_reverse = grad_skip = None
    if ctx.needs_input_grad[0]:
        grad_u = long_conv_adjoint(grad, kernel, reverse_kernel, ctx.n_fft, skip)
    if ctx.needs_input_grad[1] or ctx.needs_input_grad[2]:
        ring = taps_grad(u, grad, ctx.n_fft, kernel.shape[0])
        grad_kernel = ring[:, : kernel.shape[1]].to(kernel.dtype)
        if reverse_kernel is not None:
            grad_reverse = ring[:, ctx.n_fft - reverse_kernel.shape[1] :].flip(1).to(reverse_kernel.dtype)
    if ctx.needs_input_grad[4]:
        wide = compute_dtype(u)
        grad_skip = (u.to(wide) * grad.to(wide)).sum((0, 1)).to(skip.dtype)
    return grad_u, grad_kernel, grad_reverse, None, grad_skip, None


long_conv.register_autograd(_differentiate, setup_context=_save)
