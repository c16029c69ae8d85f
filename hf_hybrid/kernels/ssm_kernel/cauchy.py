"""S4's kernel by its truncated generating function on the unit circle, O(N L) operations per channel.

With Ct = C (I - Abar^L), om = exp(-2 pi i k / L) and q_ab = sum_n a_n b_n / (2 (1 - om) - dt w_n (1 + om)),
Khat = 2 dt (q_CB - q_CP dt (1 + om) q_PB / (1 + dt (1 + om) q_PP)),  K = irfft(Khat)
(Gu et al. 2022, "Efficiently Modeling Long Sequences with Structured State Spaces", appendix C.3).

The code computes it with phi = pi k / L, c = cos phi, sigma = 2 sin(phi) / dt and sums over both halves of the
conjugate pairs:

r_ab = sum_n a_n b_n / (i sigma - c w_n),  T = c r_PB / (1 + c r_PP),  Khat = e^(i phi) (r_CB - r_CP T)

The backward uses the state x = (i sigma - c A)^-1 B, x_n = (B_n - T P_n) / (i sigma - c w_n), and likewise z for Ct on
the other side: the gradient of a matrix element is a product of one element of each.

Note:
    The paper sums over z - dt w with z = 2 (1 - om) / (1 + om), which is infinite at om = -1. Multiplying by 1 + om
    removes this special case, and factoring out e^(-i phi) avoids cancellation at low frequencies. Only sigma then
    contains dt.

    Near a resonance each sum is about N times as large as their difference in Khat, so all four must use the same
    denominator. Gradients through the sums would cancel twice, by N^2; states cancel once.

H channels · M = N/2 modes · C output filters · L taps · F = L // 2 + 1 frequencies
"""

import torch
from torch import Tensor

from .discrete import dense_transition, s4_step_constants, to_complex, to_real_row


def truncated(C: Tensor, B: Tensor, P: Tensor, w: Tensor, dt: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """Return Ct = C (I - Abar^L), `(C, H, M)`, and 2 / dt, both wide; see `s4_kernel`, with copies expanded."""
    power = torch.linalg.matrix_power(dense_transition(s4_step_constants(B, P, w, dt)), length)
    row = to_real_row(C.to(torch.complex128)).transpose(0, 1)
    return to_complex((row - row @ power) / 2).conj_physical().transpose(0, 1), 2 / dt


def nodes(length: int, start: int, stop: int, device: torch.device) -> Tensor:
    """Return sin phi and cos phi at frequencies `start` to `stop`, `(2, stop - start)`, float64."""
    angle = torch.arange(start, stop, dtype=torch.float64, device=device) * (torch.pi / length)
    return torch.stack([angle.sin(), angle.cos()])


def spectrum_gradient(grad: Tensor) -> Tensor:
    """Return the gradient of Khat, `(C, H, F)`, from that of the taps: the adjoint of irfft."""
    length = grad.shape[-1]
    spectrum = torch.fft.rfft(grad).mul_(2 / length)
    # the other frequencies also stand for their conjugates
    spectrum[..., 0] /= 2
    if length % 2 == 0:
        spectrum[..., -1] /= 2
    return spectrum
