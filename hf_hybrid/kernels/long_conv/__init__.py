"""Convolution of a sequence with a filter as long as the sequence.

`long_conv` takes taps. For taps that many calls share, `kernel_spectrum` and `spectral_conv` split it in two: a
spectrum of ``n_fft / 2`` taps in each direction serves every length up to ``n_fft / 2`` exactly. `start_online_conv`
and `online_conv` continue a causal convolution token by token. `filter_bank_conv` applies several filters to a
sequence.

B batch · T length · T_k taps · D width · C filters · N packed sequences · F = n_fft / 2 + 1 frequencies
"""

import torch

from ..checks import check_choice, check_devices, check_positive
from ..dispatch import exports_any, exports_to_onnx
from ..packed import check_cu_seqlens
from ..precision import compute_dtype
from . import exported, filter_bank, op
from .blocks import fast_size
from .exported import window_ends_conv
from .step import ConvState, online_conv, start_online_conv

__all__ = [
    "ConvState",
    "fft_length",
    "filter_bank_conv",
    "kernel_spectrum",
    "long_conv",
    "online_conv",
    "spectral_conv",
    "start_online_conv",
    "window_ends_conv",
]

ACTIVATIONS = (None, "silu")


def fft_length(length: int) -> int:
    """Return the transform length for sequences of `length`: at least twice that, from the grid {2^a, 3 2^(a-1)}.

    The sizes are fast, and few, so that batches of varying length share cached spectra.

    Args:
        length: Sequence length T in tokens, positive.

    Raises:
        ValueError: The length is not positive.
    """
    check_positive(length=length)
    return fast_size(2 * length, few=True)


def _check_taps(name: str, taps: torch.Tensor, width: int | None) -> None:
    if taps.dim() != 2 or taps.shape[0] == 0 or (width is not None and width % taps.shape[0]):
        rule = "" if width is None else f" = {width}, or a divisor of it,"
        raise ValueError(f"{name} must be (D, taps) with D{rule} rows; got {tuple(taps.shape)}")
    if taps.is_complex():
        raise ValueError(f"{name} must be real; got {taps.dtype}")


def _check_reverse(reverse_kernel: torch.Tensor, kernel: torch.Tensor, width: int) -> None:
    _check_taps("reverse_kernel", reverse_kernel, width)
    if reverse_kernel.shape[0] != kernel.shape[0]:
        raise ValueError(
            f"reverse_kernel must have as many rows as kernel, {kernel.shape[0]}; got {reverse_kernel.shape[0]}"
        )


def _check_input(u: torch.Tensor, skip: torch.Tensor | None) -> None:
    if u.dim() != 3 or u.shape[1] == 0 or not u.is_floating_point():
        raise ValueError(f"u must be a floating-point (B, T, D) with T > 0; got {tuple(u.shape)} of {u.dtype}")
    if skip is not None and skip.shape != u.shape[2:]:
        raise ValueError(f"skip must be (D,) with D = {u.shape[2]}; got {tuple(skip.shape)}")


def _check_around(
    u: torch.Tensor,
    input_gate: torch.Tensor | None,
    gate: torch.Tensor | None,
    activation: str | None,
    cu_seqlens: torch.Tensor | None,
) -> None:
    for name, x in (("input_gate", input_gate), ("gate", gate)):
        if x is not None and (x.shape != u.shape or not x.is_floating_point()):
            raise ValueError(
                f"{name} must be floating-point {tuple(u.shape)} like u; got {tuple(x.shape)} of {x.dtype}"
            )
    check_choice("activation", activation, ACTIVATIONS)
    check_cu_seqlens(cu_seqlens, u, "u")


def kernel_spectrum(kernel: torch.Tensor, n_fft: int, reverse_kernel: torch.Tensor | None = None) -> torch.Tensor:
    """Transform the taps of a filter once, for any number of calls of `spectral_conv`.

    Taps at lag j are at index j of a ring of n_fft, taps at lag -(1 + j) at index n_fft - 1 - j.

    Args:
        kernel: Taps at lag 0, 1, 2, ..., `(D, T_k)`.
        n_fft: Length of the transform, even and at least ``T_k + T_r``.
        reverse_kernel: Taps at lag -1, -2, ..., `(D, T_r)`; none when None.

    Returns:
        `(D, F)`, complex64, or complex128 for float64 taps. Differentiable.

    Raises:
        ValueError: A shape does not fit, or the ring is too small for the taps.
    """
    _check_taps("kernel", kernel, None)
    taps = kernel.shape[1] + (0 if reverse_kernel is None else reverse_kernel.shape[1])
    if n_fft % 2 or n_fft < taps:
        raise ValueError(f"n_fft must be even and hold all {taps} taps; got {n_fft}")
    kernel = kernel.to(compute_dtype(kernel))
    if reverse_kernel is not None:
        _check_taps("reverse_kernel", reverse_kernel, kernel.shape[0])
    return op.spectrum_of_taps(kernel, n_fft, reverse_kernel)


def spectral_conv(
    u: torch.Tensor,
    spectrum: torch.Tensor,
    n_fft: int,
    skip: torch.Tensor | None = None,
    *,
    input_gate: torch.Tensor | None = None,
    gate: torch.Tensor | None = None,
    activation: str | None = None,
    cu_seqlens: torch.Tensor | None = None,
    adjoint: bool = False,
    backend: str = "auto",
) -> torch.Tensor:
    """Convolve a sequence with a filter given by its spectrum.

    y = gate f(irfft(rfft(x, n_fft) * spectrum)[:T] + skip x),  x = input_gate u, in O(T log T) per channel. Exact
    unless a lag between two positions wraps onto another tap: with ``n_fft / 2`` taps in each direction, exact for
    every T <= n_fft / 2.

    Args:
        u: Input, `(B, T, D)`, any floating dtype.
        spectrum: From `kernel_spectrum`, `(D, F)`.
        n_fft: The spectrum's transform length.
        skip: Weight of the input itself, `(D,)`; none when None.
        input_gate: See `long_conv`.
        gate: See `long_conv`.
        activation: See `long_conv`.
        cu_seqlens: See `long_conv`; each sequence costs transforms of n_fft, even a short one.
        adjoint: Whether to apply the transposed convolution, which maps an output's gradient to the input's.
        backend: See `hf_hybrid.kernels.dispatch`.

    Returns:
        `(B, T, D)` in u's dtype, computed in float32, or float64 for float64 input. Differentiable once. The backward
        pass stores only the arguments, and for a frozen spectrum without gate and activation not even the input.

    Raises:
        ValueError: A shape or dtype does not fit.
    """
    _check_input(u, skip)
    _check_around(u, input_gate, gate, activation, cu_seqlens)
    if spectrum.shape != (u.shape[2], n_fft // 2 + 1) or not spectrum.is_complex():
        raise ValueError(
            f"spectrum must be complex ({u.shape[2]}, {n_fft // 2 + 1}) for n_fft {n_fft}; "
            f"got {tuple(spectrum.shape)} of {spectrum.dtype}"
        )
    if n_fft % 2:
        raise ValueError(f"n_fft must be even; got {n_fft}")
    if cu_seqlens is None and u.shape[1] > n_fft:
        raise ValueError(f"n_fft must be at least the length {u.shape[1]}; got {n_fft}")
    check_devices(u, spectrum=spectrum, skip=skip, input_gate=input_gate, gate=gate)
    return op.spectral_conv(
        u, spectrum, n_fft, skip, input_gate, gate, cu_seqlens, activation == "silu", adjoint, backend
    )


def long_conv(
    u: torch.Tensor,
    kernel: torch.Tensor,
    *,
    reverse_kernel: torch.Tensor | None = None,
    skip: torch.Tensor | None = None,
    input_gate: torch.Tensor | None = None,
    gate: torch.Tensor | None = None,
    activation: str | None = None,
    cu_seqlens: torch.Tensor | None = None,
    backend: str = "auto",
) -> torch.Tensor:
    """Convolve a sequence with a filter as long as the sequence, by FFT in O(T log T).

    z[t] = sum_{j>=0} kernel[:, j] x[t-j]  +  sum_{j>=0} reverse_kernel[:, j] x[t+1+j]  +  skip x[t],
    x = input_gate u,  y = gate f(z)
    (CHELA, section 2.2, eq. 7; with the reverse filter, SPADE's bidirectional S4; with gates, Hyena)

    Args:
        u: Input, `(B, T, D)`, any floating dtype.
        kernel: Taps at lag 0, 1, 2, ..., `(D, T_k)`; taps beyond T are ignored. With `(G, T_k)`, where G divides D,
            channel c has the taps of row ``c % G``.
        reverse_kernel: Taps at lag -1, -2, ..., with as many rows; the convolution is causal when None.
        skip: Weight of the input itself, `(D,)`; none when None.
        input_gate: Multiplies the input, `(B, T, D)`; none when None.
        gate: Multiplies the output, `(B, T, D)`; none when None.
        activation: f, None or ``"silu"``.
        cu_seqlens: Bounds of N sequences packed into one row, `(N + 1,)` of int32 or int64, see `kernels.packed`. B is
            1, and the result is that of each sequence alone. The host reads the bounds to size the transforms;
            sequences of similar length share one.
        backend: See `hf_hybrid.kernels.dispatch`.

    Returns:
        `(B, T, D)` in u's dtype, computed in float32, or float64 for float64 input. Differentiable once. The backward
        pass stores only the arguments; with a gate or an activation it convolves once more.

    Raises:
        ValueError: A shape or dtype does not fit.

    Note:
        FFTs spread rounding noise: an output may change by an ulp of the largest one when a later input changes.
    """
    _check_input(u, skip)
    _check_around(u, input_gate, gate, activation, cu_seqlens)
    length, width = u.shape[1:]
    _check_taps("kernel", kernel, width)
    if reverse_kernel is not None:
        _check_reverse(reverse_kernel, kernel, width)
    check_devices(u, kernel=kernel, reverse_kernel=reverse_kernel, skip=skip, input_gate=input_gate, gate=gate)
    if exports_to_onnx():
        return exported.long_conv(u, kernel, reverse_kernel, skip, input_gate, gate, activation == "silu")
    if not exports_any(length):
        kernel = kernel[:, :length]
        reverse_kernel = None if reverse_kernel is None else reverse_kernel[:, : length - 1]
    # float64 input means float64 throughout, whatever the taps' dtype
    dtype = torch.promote_types(kernel.dtype, compute_dtype(u))
    kernel = kernel.to(dtype)
    reverse_kernel = None if reverse_kernel is None else reverse_kernel.to(dtype)
    return op.long_conv(u, kernel, reverse_kernel, skip, input_gate, gate, cu_seqlens, activation == "silu", backend)


def filter_bank_conv(
    u: torch.Tensor, kernel: torch.Tensor, *, skip: torch.Tensor | None = None, backend: str = "auto"
) -> torch.Tensor:
    """Convolve a sequence with several causal filters, with C + 1 transforms per channel and C for its taps.

    y_c[t] = sum_{j>=0} kernel[c, :, j] u[t-j] + skip[c] u[t]      (BST, appendix E, pseudocode 1)

    Args:
        u: Input, `(B, T, D)`, any floating dtype.
        kernel: Taps at lag 0, 1, 2, ..., `(C, D, T_k)`; taps beyond T are ignored.
        skip: Weights of the input itself, `(C, D)`; none when None.
        backend: See `hf_hybrid.kernels.dispatch`.

    Returns:
        `(C, B, T, D)` in u's dtype, computed in float32, or float64 for float64 input. Differentiable once.

    Raises:
        ValueError: A shape or dtype does not fit.
    """
    _check_input(u, None)
    if kernel.dim() != 3 or kernel.shape[1] != u.shape[2] or 0 in kernel.shape:
        raise ValueError(f"kernel must be (C, {u.shape[2]}, taps); got {tuple(kernel.shape)}")
    if skip is not None and skip.shape != kernel.shape[:2]:
        raise ValueError(f"skip must be {tuple(kernel.shape[:2])} like kernel; got {tuple(skip.shape)}")
    check_devices(u, kernel=kernel, skip=skip)
    if exports_to_onnx():
        return window_ends_conv(u, kernel, skip, 1)
    return filter_bank.filter_bank_conv(u, kernel, skip, backend)
