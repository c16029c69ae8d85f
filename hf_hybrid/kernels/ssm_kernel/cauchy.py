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

import torch
from torch import Tensor

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


def spectrum_gradient(grad: Tensor) -> Tensor:
    """Adjoint of irfft: the gradient of Khat, `(C, H, F)`, from that of the taps."""
    length = grad.shape[-1]
    spectrum = torch.fft.rfft(grad).mul_(2 / length)
    # these stand for themselves alone, the others for their conjugates too
    spectrum[..., 0] /= 2
    if length % 2 == 0:
        spectrum[..., -1] /= 2
    return spectrum
