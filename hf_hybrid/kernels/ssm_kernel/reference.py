"""S4 and S4D as linear recurrences: the specification of `hf_hybrid.kernels.ssm_kernel`.

S4 uses dense N x N matrices over both halves of the conjugate pairs, S4D one mode after the other, in complex128.

B batch · T length · H channels · S copies of (A, B) · M = N/2 modes · C output filters per channel
"""

import torch
from torch import Tensor


def dense_system(B: Tensor, P: Tensor, w: Tensor, dt: Tensor) -> tuple[Tensor, Tensor]:
    """Discretise every channel's system.

    A = diag(w) - P P^H,  Abar = (I - dt/2 A)^-1 (I + dt/2 A),  Bbar = (I - dt/2 A)^-1 dt B      (SPADE, eq. 3)

    Args:
        B: `(S, M)`, complex.
        P: `(S, M)`, complex.
        w: `(S, M)`, complex.
        dt: `(H,)`; channel c reads copy ``c % S``.

    Returns:
        Abar `(H, N, N)` and Bbar `(H, N)`; the second half of the N modes is the conjugate of the first.
    """
    copies = dt.shape[0] // B.shape[0]
    B, P, w = (torch.cat([x, x.conj()], dim=-1).to(torch.complex128).repeat(copies, 1) for x in (B, P, w))
    A = torch.diag_embed(w) - P[:, :, None] * P[:, None, :].conj()
    half = (dt.to(torch.complex128) / 2)[:, None, None]
    eye = torch.eye(w.shape[-1], dtype=A.dtype, device=A.device)
    Abar = torch.linalg.solve(eye - half * A, eye + half * A)
    Bbar = torch.linalg.solve(eye - half * A, 2 * half * B[..., None])[..., 0]
    return Abar, Bbar


def s4_scan(
    u: Tensor, C: Tensor, B: Tensor, P: Tensor, w: Tensor, dt: Tensor, state: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Run the recurrence token by token.

    x[t] = Abar x[t-1] + Bbar u[t],  y[t] = C x[t] = 2 Re sum over half of the modes

    Args:
        u: `(B, T, H)`.
        C: `(C, H, M)`, complex.
        B: See `dense_system`.
        P: See `dense_system`.
        w: See `dense_system`.
        dt: Step per channel, `(H,)`.
        state: x before the first token, `(B, H, M)` complex; zeros when None.

    Returns:
        y `(B, C, T, H)`, float64, and the state after the last token, `(B, H, M)` complex128.
    """
    Abar, Bbar = dense_system(B, P, w, dt)
    modes = w.shape[-1]
    x = torch.zeros(u.shape[0], *Bbar.shape, dtype=Bbar.dtype, device=u.device)
    if state is not None:
        x = torch.cat([state, state.conj()], dim=-1).to(Bbar.dtype)
    outputs = []
    for t in range(u.shape[1]):
        x = torch.einsum("hmn,bhn->bhm", Abar, x) + Bbar * u[:, t, :, None]
        outputs.append(2 * torch.einsum("chm,bhm->bch", C.to(x.dtype), x[..., :modes]).real)
    return torch.stack(outputs, dim=2), x[..., :modes]


def s4_kernel(C: Tensor, B: Tensor, P: Tensor, w: Tensor, dt: Tensor, length: int) -> Tensor:
    """Return the first `length` taps ``K[l] = C Abar^l Bbar``: the recurrence's impulse response.

    Returns:
        `(C, H, length)`, float64.
    """
    impulse = torch.zeros(1, length, dt.shape[0], dtype=torch.float64, device=dt.device)
    impulse[:, 0] = 1
    return s4_scan(impulse, C, B, P, w, dt)[0][0].transpose(1, 2)


def s4d_system(B: Tensor, w: Tensor, dt: Tensor, discretization: str) -> tuple[Tensor, Tensor]:
    """Discretise every channel's modes.

    zoh: Abar = exp(dt w),  Bbar = (Abar - 1) / w B;  bilinear: S4's transform of a 1 x 1 matrix.

    Args:
        B: `(S, M)`, complex.
        w: `(S, M)`, complex, not zero.
        dt: `(H,)`; channel c reads copy ``c % S``.
        discretization: ``"zoh"`` or ``"bilinear"``.

    Returns:
        Abar and Bbar, `(H, M)`.
    """
    copies = dt.shape[0] // B.shape[0]
    B, w = (x.to(torch.complex128).repeat(copies, 1) for x in (B, w))
    dt = dt.to(torch.float64)[:, None]
    if discretization == "zoh":
        Abar = torch.exp(dt * w)
        return Abar, (Abar - 1) / w * B
    return (1 + dt / 2 * w) / (1 - dt / 2 * w), dt / (1 - dt / 2 * w) * B


def s4d_scan(
    u: Tensor, C: Tensor, B: Tensor, w: Tensor, dt: Tensor, discretization: str = "zoh", state: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Run S4D's recurrence token by token; see `s4_scan` and `s4d_system` for arguments and results."""
    Abar, Bbar = s4d_system(B, w, dt, discretization)
    x = torch.zeros(u.shape[0], *Bbar.shape, dtype=Bbar.dtype, device=u.device) if state is None else state.to(Bbar)
    outputs = []
    for t in range(u.shape[1]):
        x = Abar * x + Bbar * u[:, t, :, None]
        outputs.append(2 * torch.einsum("chm,bhm->bch", C.to(x.dtype), x).real)
    return torch.stack(outputs, dim=2), x


def s4d_kernel(C: Tensor, B: Tensor, w: Tensor, dt: Tensor, length: int, *, discretization: str = "zoh") -> Tensor:
    """Return the first `length` taps ``K[l] = 2 Re sum_n C_n Bbar_n Abar_n^l``: the recurrence's impulse response.

    Returns:
        `(C, H, length)`, float64.
    """
    impulse = torch.zeros(1, length, dt.shape[0], dtype=torch.float64, device=dt.device)
    impulse[:, 0] = 1
    return s4d_scan(impulse, C, B, w, dt, discretization)[0][0].transpose(1, 2)
