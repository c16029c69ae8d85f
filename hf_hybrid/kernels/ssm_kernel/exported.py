"""The kernels of S4 and S4D over real coordinates, for ONNX, which has no complex numbers.

Complex numbers have a last dimension of 2. A state has N real coordinates, the real parts of its M modes first.

H channels · S copies of (A, B) · M = N/2 modes · C output filters · L taps
"""

import torch
from torch import Tensor

from ..diagonal_scan.exported import complex_product


def discretize_pairs(w: Tensor, dt: Tensor, discretization: str) -> tuple[Tensor, Tensor]:
    """Compute `discretize`: w is `(..., 2)`, dt broadcasts with it; so are decay and gain."""
    one = torch.stack([torch.ones_like(w[..., 0]), torch.zeros_like(w[..., 0])], dim=-1)
    z = dt * w
    if discretization == "bilinear":
        G = _reciprocal(one - 0.5 * z)
        return 2 * G - one, dt * G
    size, (cos, sin) = z[..., :1].exp(), (z[..., 1:].cos(), z[..., 1:].sin())
    # exp(z) - 1 without cancellation at small z
    real = torch.expm1(z[..., :1]) * cos - 2 * (0.5 * z[..., 1:]).sin().square()
    gain = complex_product(torch.cat([real, size * sin], dim=-1), _reciprocal(w))
    return size * torch.cat([cos, sin], dim=-1), torch.where((w == 0).all(-1, keepdim=True), dt * one, gain)


def ssm_taps(
    C: Tensor, B: Tensor, P: Tensor | None, w: Tensor, dt: Tensor, length: int, discretization: str = "bilinear"
) -> Tensor:
    """Return the first taps of S4's kernel, or of S4D's if there is no P: ``K[l] = C Abar^l Bbar``.

    With l = i R + j, it multiplies ``C Abar^(iR)`` with ``Abar^j Bbar``, both made by doubling, with products of
    N x N matrices: O(N^2 sqrt(L) + N L) multiplications per channel besides O(N^3 log L).

    Args:
        C: Output filters, `(C, H, M, 2)`.
        B: `(S, M, 2)`; channel c reads copy ``c % S``.
        P: `(S, M, 2)`, or None; with it, A = diag(w) - P P^H and the transform is bilinear.
        w: `(S, M, 2)`.
        dt: Step per channel, `(H,)`.
        length: Number of taps L, positive.
        discretization: See `discretize`.

    Returns:
        `(C, H, L)`, float64.
    """
    copies = dt.shape[0] // w.shape[0]
    C, dt = C.double(), dt.double()[:, None, None]
    B, w = (x.double().repeat(copies, 1, 1) for x in (B, w))
    decay, gain = discretize_pairs(w, dt, discretization)
    real, imag = (x[..., None] * torch.eye(w.shape[1], dtype=x.dtype, device=x.device) for x in decay.unbind(-1))
    power = torch.cat([torch.cat([real, -imag], dim=-1), torch.cat([imag, real], dim=-1)], dim=-2)
    columns = complex_product(gain, B)
    if P is not None:  # Woodbury, as in `s4_step_constants`
        P = P.double().repeat(copies, 1, 1)
        G = gain / dt
        row = complex_product(torch.stack([P[..., 0], -P[..., 1]], dim=-1), G)
        scale = 0.5 * dt / (1 + dt * complex_product(row, P)[..., :1].sum(-2, keepdim=True))
        column = -2 * scale * complex_product(G, P)
        columns = columns + dt * column * complex_product(row, B)[..., :1].sum(-2, keepdim=True)
        power = power + _coordinates(column)[..., None] * _row(row)[..., None, :]
    columns, rows = _coordinates(columns)[..., None], _row(C)[..., None, :]
    while columns.shape[-1] ** 2 < length:
        columns = torch.cat([columns, power @ columns], dim=-1)
        power = power @ power
    while rows.shape[-2] * columns.shape[-1] < length:
        rows = torch.cat([rows, rows @ power], dim=-2)
        power = power @ power
    return (rows @ columns).flatten(-2)[..., :length]


def _reciprocal(x: Tensor) -> Tensor:
    return torch.stack([x[..., 0], -x[..., 1]], dim=-1) / x.square().sum(-1, keepdim=True)


def _coordinates(x: Tensor) -> Tensor:
    """Return real coordinates of `(..., M, 2)`, `(..., N)`."""
    return torch.cat([x[..., 0], x[..., 1]], dim=-1)


def _row(x: Tensor) -> Tensor:
    """Return the row that acts on real coordinates as ``2 Re(x . state)``."""
    return 2 * torch.cat([x[..., 0], -x[..., 1]], dim=-1)
