"""Several causal filters of the same sequence by FFT, as a custom op with its own backward.

It transforms the sequence once for all filters, a few channels at a time, as in `transforms`. The backward stores
only the sequence and the taps and recomputes the spectra.

B batch · T length · T_k taps · D width · C filters
"""

from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from ..dispatch import NAMESPACE, wished_backend
from ..precision import compute_dtype
from .blocks import Around, Block, Spectrum, block_steps, fast_size, ranges, transformed_together
from .transforms import implementation

_PLAIN = Around(None, None, None, silu=False)


def _factors(impl: ModuleType, kernel: Tensor, channels: slice, n_fft: int, dtype: torch.dtype, adjoint: bool) -> Any:
    """Return the factors of each filter for a few channels."""
    spectra = torch.fft.rfft(kernel[:, channels].to(dtype), n=n_fft)
    return [impl.factor(Spectrum(spectrum, 0), spectrum.shape[0], adjoint) for spectrum in spectra]


@torch.library.custom_op(f"{NAMESPACE}::filter_bank_conv", mutates_args=())
def _forward(u: Tensor, kernel: Tensor, backend: str) -> Tensor:
    impl = implementation("filter_bank_conv", backend, u, kernel)
    dtype = compute_dtype(u)
    out = torch.empty((kernel.shape[0], *u.shape), dtype=u.dtype, device=u.device)
    (sequences,) = transformed_together(u, None, lambda length: fast_size(length + kernel.shape[2] - 1))
    n_fft, x = sequences.n_fft, impl.arranged(u)
    row_step, channel_step = block_steps(u, n_fft)
    for channels in ranges(u.shape[2], channel_step):
        factors = _factors(impl, kernel, channels, n_fft, dtype, adjoint=False)
        for rows in ranges(u.shape[0], row_step):
            block = Block(sequences, rows, channels)
            signal = torch.fft.rfft(impl.prologue(x, None, block, dtype), n=n_fft)
            product = torch.empty_like(signal)
            for filtered, factor in zip(out, factors, strict=True):
                y = impl.inverse(impl.multiply(signal, factor, product), n_fft)
                impl.epilogue(y, None, _PLAIN, block, filtered)
    return out


@_forward.register_fake
def _(u: Tensor, kernel: Tensor, *_others: Any) -> Tensor:
    return u.new_empty(kernel.shape[0], *u.shape)


@torch.library.custom_op(f"{NAMESPACE}::filter_bank_conv_backward", mutates_args=())
def _adjoint(grad: Tensor, u: Tensor, kernel: Tensor, backend: str) -> tuple[Tensor, Tensor]:
    """Return du[s] = sum_c sum_t k_c[t-s] dy_c[t] and dk_c[j] = sum_b sum_t u[t-j] dy_c[t]."""
    impl = implementation("filter_bank_conv", backend, u, kernel)
    dtype, taps = compute_dtype(u), kernel.shape[2]
    grad_u = torch.empty_like(u, memory_format=torch.contiguous_format)
    grad_kernel = torch.empty_like(kernel, memory_format=torch.contiguous_format)
    (sequences,) = transformed_together(u, None, lambda length: fast_size(length + taps - 1))
    n_fft, x, grads = sequences.n_fft, impl.arranged(u), [impl.arranged(part) for part in grad]
    row_step, channel_step = block_steps(u, n_fft)
    for channels in ranges(u.shape[2], channel_step):
        factors = _factors(impl, kernel, channels, n_fft, dtype, adjoint=True)
        products: list[Tensor | None] = [None] * len(factors)
        for rows in ranges(u.shape[0], row_step):
            block = Block(sequences, rows, channels)
            signal = torch.fft.rfft(impl.prologue(x, None, block, dtype), n=n_fft)
            total = torch.empty_like(signal)
            for c, (part, factor) in enumerate(zip(grads, factors, strict=True)):
                gradients = torch.fft.rfft(impl.prologue(part, None, block, dtype), n=n_fft)
                impl.multiply(gradients, factor, total, add=c > 0)
                product = impl.correlate(signal, gradients, None, 0)
                before = products[c]
                products[c] = product if before is None else before + product
            impl.epilogue(impl.inverse(total, n_fft), None, _PLAIN, block, grad_u)
        for own, product in zip(grad_kernel, products, strict=True):
            own[channels] = torch.fft.irfft(product, n=n_fft)[..., :taps]
    return grad_u, grad_kernel


@_adjoint.register_fake
def _(_grad: Tensor, u: Tensor, kernel: Tensor, *_others: Any) -> tuple[Tensor, Tensor]:
    return u.new_empty(u.shape), kernel.new_empty(kernel.shape)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    u, kernel, backend = inputs
    ctx.save_for_backward(u, kernel)
    ctx.backend = wished_backend(backend)


def _differentiate(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    return *_adjoint(grad, *ctx.saved_tensors, ctx.backend), None


_forward.register_autograd(_differentiate, setup_context=_save)


def filter_bank_conv(u: Tensor, kernel: Tensor, skip: Tensor | None = None, backend: str = "auto") -> Tensor:
    """Compute `hf_hybrid.kernels.long_conv.filter_bank_conv`, without checks."""
    kernel = kernel[..., : u.shape[1]]
    if skip is not None:  # adding it to the tap at lag 0 saves a product
        kernel = torch.cat([(kernel[..., 0] + skip)[..., None], kernel[..., 1:]], dim=-1)
    return _forward(u, kernel, backend)
