"""Several causal filters of the same sequence by FFT, as an opaque op with its own backward.

The sequence is transformed once for all filters, and nothing but it and the taps is kept for the backward, which makes
the spectra anew. Channels are transformed a few at a time, as in `torch_impl`.

B batch · T length · T_k taps · D width · C filters
"""

from typing import Any

import torch

from ..dispatch import choose_backend
from .torch_impl import _blocks, _ranges, _rows, _why_not_triton, compute_dtype, fast_size


def _spectra(kernel: torch.Tensor, channels: slice, n_fft: int, dtype: torch.dtype) -> torch.Tensor:
    """Spectra of all filters of a few channels, `(C, d, F)`."""
    return torch.fft.rfft(kernel[:, channels].to(dtype), n=n_fft)


@torch.library.custom_op("hf_hybrid::filter_bank_conv", mutates_args=())
def _forward(u: torch.Tensor, kernel: torch.Tensor, backend: str) -> torch.Tensor:
    # chosen in here, where no tracer looks, because the choice reads the environment and logs
    choose_backend("filter_bank_conv", backend, [u, kernel], _why_not_triton)
    dtype, length = compute_dtype(u), u.shape[1]
    out = torch.empty(kernel.shape[0], *u.shape, dtype=u.dtype, device=u.device)
    n_fft = fast_size(length + kernel.shape[2] - 1)
    row_step, channel_step = _blocks(u, n_fft)
    for channels in _ranges(u.shape[2], channel_step):
        spectra = _spectra(kernel, channels, n_fft, dtype)
        for rows in _ranges(u.shape[0], row_step):
            signal = torch.fft.rfft(_rows(u, rows, channels, dtype), n=n_fft)
            for filtered, spectrum in zip(out, spectra, strict=True):
                y = torch.fft.irfft(signal * spectrum, n=n_fft)[..., :length]
                filtered[rows, :, channels] = y.transpose(1, 2)
    return out


@_forward.register_fake
def _(u: torch.Tensor, kernel: torch.Tensor, backend: str) -> torch.Tensor:
    return u.new_empty(kernel.shape[0], *u.shape)


@torch.library.custom_op("hf_hybrid::filter_bank_conv_backward", mutates_args=())
def _adjoint(grad: torch.Tensor, u: torch.Tensor, kernel: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Correlations, du[s] = sum_c sum_t k_c[t-s] dy_c[t] and dk_c[j] = sum_b sum_t u[t-j] dy_c[t]."""
    dtype, length, taps = compute_dtype(u), u.shape[1], kernel.shape[2]
    grad_u = torch.empty_like(u, memory_format=torch.contiguous_format)
    grad_kernel = torch.empty_like(kernel, memory_format=torch.contiguous_format)
    n_fft = fast_size(length + taps - 1)
    row_step, channel_step = _blocks(u, n_fft)
    for channels in _ranges(u.shape[2], channel_step):
        spectra = _spectra(kernel, channels, n_fft, dtype).conj_physical_()
        products = torch.zeros_like(spectra)
        for rows in _ranges(u.shape[0], row_step):
            signal = torch.fft.rfft(_rows(u, rows, channels, dtype), n=n_fft).conj_physical_()
            total = torch.zeros_like(signal)
            for part, spectrum, product in zip(grad, spectra, products, strict=True):
                transformed = torch.fft.rfft(_rows(part, rows, channels, dtype), n=n_fft)
                total.addcmul_(transformed, spectrum)
                product += transformed.mul_(signal).sum(0)
            grad_u[rows, :, channels] = torch.fft.irfft(total, n=n_fft)[..., :length].transpose(1, 2)
        grad_kernel[:, channels] = torch.fft.irfft(products, n=n_fft)[..., :taps]
    return grad_u, grad_kernel


@_adjoint.register_fake
def _(grad: torch.Tensor, u: torch.Tensor, kernel: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return u.new_empty(u.shape), kernel.new_empty(kernel.shape)


def _save(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    ctx.save_for_backward(*inputs[:2])


def _differentiate(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    return *_adjoint(grad, *ctx.saved_tensors), None


_forward.register_autograd(_differentiate, setup_context=_save)


def filter_bank_conv(
    u: torch.Tensor, kernel: torch.Tensor, skip: torch.Tensor | None = None, backend: str = "auto"
) -> torch.Tensor:
    """Compute `hf_hybrid.kernels.long_conv.filter_bank_conv`; arguments as there, not checked again."""
    kernel = kernel[..., : u.shape[1]]
    if skip is not None:  # the tap at lag 0, for the price of no product
        kernel = torch.cat([(kernel[..., 0] + skip)[..., None], kernel[..., 1:]], dim=-1)
    return _forward(u, kernel, backend)
