"""S4's own way to its kernel: the truncated generating function on the unit circle, O(N L) operations per channel.

With Ct = C (I - Abar^L), om = exp(-2 pi i k / L) and q_ab = sum_n a_n b_n / (2 (1 - om) - dt w_n (1 + om)),
Khat = 2 dt (q_CB - q_CP dt (1 + om) q_PB / (1 + dt (1 + om) q_PP)),  K = irfft(Khat)
(Gu et al. 2022, "Efficiently Modeling Long Sequences with Structured State Spaces", appendix C.3).

What is computed is the same, with phi = pi k / L, c = cos phi, sigma = 2 sin(phi) / dt and sums over both halves of
the conjugate pairs:

r_ab = sum_n a_n b_n / (i sigma - c w_n),  T = c r_PB / (1 + c r_PP),  Khat = e^(i phi) (r_CB - r_CP T)

The backward goes through the state x = (i sigma - c A)^-1 B, x_n = (B_n - T P_n) / (i sigma - c w_n), and the same of
Ct on the other side, z: the gradient of a matrix element is a product of two of their elements.

Note:
    The paper's sums run over z - dt w with z = 2 (1 - om) / (1 + om), which is infinite at om = -1. The factor 1 + om
    is multiplied in, so that the Nyquist frequency is no special case, and e^(-i phi) is taken out, so that nothing
    cancels at low frequencies. dt then stands in sigma alone.

    At a resonance of one mode each sum is some N times as large as what remains of them in Khat, which all four must
    have from one and the same denominator. Gradients by way of the sums would cancel twice, to N^2 times less; states
    cancel once.

H channels · M = N/2 modes · C output filters · L taps · F = L // 2 + 1 frequencies
"""

from typing import Any

import torch
from torch import Tensor

from ..dispatch import NAMESPACE, choose_backend, wished_backend
from .discrete import dense_transition, s4_step_constants, to_complex, to_real_row


def truncated(C: Tensor, B: Tensor, P: Tensor, w: Tensor, dt: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """Ct = C (I - Abar^L), `(C, H, M)`, and 2 / dt, both wide; arguments as for `s4_kernel`, copies spread."""
    power = torch.linalg.matrix_power(dense_transition(s4_step_constants(B, P, w, dt)), length)
    row = to_real_row(C.to(torch.complex128)).transpose(0, 1)
    return to_complex((row - row @ power) / 2).conj_physical().transpose(0, 1), 2 / dt


def nodes(length: int, start: int, stop: int, device: torch.device) -> Tensor:
    """Sin phi and cos phi at frequencies `start` to `stop`, `(2, stop - start)`, float64."""
    angle = torch.arange(start, stop, dtype=torch.float64, device=device) * (torch.pi / length)
    return torch.stack([angle.sin(), angle.cos()])


def _tiles(w: Tensor, length: int, numbers: int) -> list[tuple[slice, Tensor]]:
    """Frequencies in tiles of so many float64 numbers, and `nodes` of each."""
    size = max(1, numbers // (32 * w.numel()))
    stop = length // 2 + 1
    tiles = [slice(start, min(start + size, stop)) for start in range(0, stop, size)]
    return [(tile, nodes(length, tile.start, tile.stop, w.device)) for tile in tiles]


class _Section:
    """The generating function at a few frequencies; arguments as for `s4_cauchy` and from `nodes`.

    Conjugates are made at once: where a compiled graph calls an op, lazy ones are taken for what they conjugate.
    """

    def __init__(self, C: Tensor, B: Tensor, P: Tensor, w: Tensor, rate: Tensor, at: Tensor):
        self.sine, self.cosine = at[:, :, None]
        self.phase = torch.complex(self.cosine, self.sine)
        self.C, self.B, self.P = C.transpose(0, 1), B[:, None], P[:, None]
        left = torch.cat([self.C, self.P.conj_physical()], dim=1)[:, :, None]
        products = (left * torch.stack([B, P], dim=1)[:, None]).flatten(1, 2)
        imag = 1j * rate[:, None, None] * self.sine
        self.inverses = tuple((imag - self.cosine * x[:, None]).reciprocal() for x in (w, w.conj_physical()))
        sums = self.inverses[0] @ products.mT + self.inverses[1] @ products.conj_physical().mT
        by_b, self.by_p = sums[..., ::2], sums[..., 1::2]
        self.weight = self.cosine / (1 + self.cosine * self.by_p[..., -1:])
        self.low_rank = self.weight * by_b[..., -1:]
        self.values = self.phase * (by_b - self.by_p * self.low_rank)[..., :-1]
        """Khat, `(H, frequencies, C)`."""

    def gradients(self, grad: Tensor) -> tuple[Tensor, ...]:
        """Those of C, B, P, w and rate from that of Khat."""
        grad = grad.conj_physical() * self.phase
        own = (grad * self.by_p[..., :-1]).sum(-1, keepdim=True) * self.weight
        # of one half of the modes, and of the other, whose constants are conjugate
        constants = self.C, self.B, self.P
        twins = [x.conj_physical() for x in constants]
        x, z = self._states(grad, own, self.inverses[0], *constants)
        x2, z2 = self._states(grad, own, self.inverses[1], *twins)
        d_c = (grad.mT @ x).conj_physical() + grad.mT @ x2
        d_b = (z.conj_physical() + z2).sum(1)
        d_p = -((self.low_rank * z + own * x2).conj_physical() + self.low_rank * z2 + own * x).sum(1)
        d_w = (self.cosine * ((z * x).conj_physical() + z2 * x2)).sum(1)
        d_sigma = (z * x + z2 * x2).imag
        return d_c.transpose(0, 1), d_b, d_p, d_w, (self.sine * d_sigma).sum((1, 2))

    def _states(
        self, grad: Tensor, own: Tensor, inverse: Tensor, C: Tensor, B: Tensor, P: Tensor
    ) -> tuple[Tensor, Tensor]:
        """x, and z of all filters by their conjugate gradients, `(H, frequencies, M)`."""
        return (B - self.low_rank * P) * inverse, (grad @ C - own * P.conj_physical()) * inverse


def spectrum_gradient(grad: Tensor) -> Tensor:
    """Adjoint of irfft: the gradient of Khat, `(C, H, F)`, from that of the taps."""
    length = grad.shape[-1]
    spectrum = torch.fft.rfft(grad).mul_(2 / length)
    # these stand for themselves alone, the others for their conjugates too
    spectrum[..., 0] /= 2
    if length % 2 == 0:
        spectrum[..., -1] /= 2
    return spectrum


def _runs_on_triton(backend: str, C: Tensor, dtype: torch.dtype) -> bool:
    """Choose the backend, in here, where no tracer looks, because the choice reads the environment and logs."""

    def why_not() -> str | None:
        from .triton_kernels import why_not

        return why_not(dtype, "cauchy")

    return choose_backend("s4_kernel", backend, [C], why_not) == "triton"


@torch.library.custom_op(f"{NAMESPACE}::s4_cauchy", mutates_args=())
def s4_cauchy(
    C: Tensor,
    B: Tensor,
    P: Tensor,
    w: Tensor,
    rate: Tensor,
    length: int,
    tile: int,
    dtype: torch.dtype,
    backend: str,
) -> Tensor:
    """The taps of a few channels, `(C, H, L)`, from Ct and 2 / dt of `truncated`; all tensors are wide.

    Torch computes in float64 and rounds once, in tiles of so many numbers; Triton computes in float32.
    """
    if _runs_on_triton(backend, C, dtype):
        from . import triton_kernels

        return triton_kernels.forward(C, B, P, w, rate, length)
    sections = [_Section(C, B, P, w, rate, at).values for _, at in _tiles(w, length, tile)]
    taps = torch.fft.irfft(torch.cat(sections, dim=1), n=length, dim=1)
    return taps.permute(2, 0, 1).to(dtype).contiguous()


@s4_cauchy.register_fake
def _(
    C: Tensor,
    B: Tensor,
    P: Tensor,
    w: Tensor,
    rate: Tensor,
    length: int,
    tile: int,
    dtype: torch.dtype,
    backend: str,
) -> Tensor:
    return rate.new_empty(*C.shape[:2], length, dtype=dtype)


@torch.library.custom_op(f"{NAMESPACE}::s4_cauchy_backward", mutates_args=())
def s4_cauchy_backward(
    grad: Tensor, C: Tensor, B: Tensor, P: Tensor, w: Tensor, rate: Tensor, tile: int, backend: str
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of `s4_cauchy`'s tensors."""
    if _runs_on_triton(backend, C, grad.dtype):
        from . import triton_kernels

        return triton_kernels.backward(grad, C, B, P, w, rate)
    spectrum = spectrum_gradient(grad.double()).permute(1, 2, 0)
    like = torch.contiguous_format
    d_c, d_b, d_p, d_w, d_rate = totals = [torch.zeros_like(x, memory_format=like) for x in (C, B, P, w, rate)]
    for tile_of, at in _tiles(w, grad.shape[-1], tile):
        parts = _Section(C, B, P, w, rate, at).gradients(spectrum[:, tile_of])
        for total, part in zip(totals, parts, strict=True):
            total += part
    return d_c, d_b, d_p, d_w, d_rate


@s4_cauchy_backward.register_fake
def _(
    grad: Tensor, C: Tensor, B: Tensor, P: Tensor, w: Tensor, rate: Tensor, tile: int, backend: str
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    like = torch.contiguous_format
    d_c, d_b, d_p, d_w, d_rate = (torch.empty_like(x, memory_format=like) for x in (C, B, P, w, rate))
    return d_c, d_b, d_p, d_w, d_rate


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *tensors, _, ctx.tile, _, backend = inputs
    ctx.backend = wished_backend(backend)
    ctx.save_for_backward(*tensors)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    return *s4_cauchy_backward(grad, *ctx.saved_tensors, ctx.tile, ctx.backend), None, None, None, None


s4_cauchy.register_autograd(_backward, setup_context=_setup_context)
