"""The sums of S4's generating function in torch, in float64, by tiles of frequencies; see `cauchy`.

H channels · M = N/2 modes · C output filters · L taps · F = L // 2 + 1 frequencies
"""

import torch
from torch import Tensor

from .cauchy import nodes, spectrum_gradient


def forward(
    C: Tensor, B: Tensor, P: Tensor, w: Tensor, rate: Tensor, length: int, tile: int, dtype: torch.dtype
) -> Tensor:
    """Return the taps, `(C, H, L)`, rounded once; see `op.s4_cauchy` for the arguments."""
    sections = [_Section(C, B, P, w, rate, at).values for _, at in _tiles(w, length, tile)]
    taps = torch.fft.irfft(torch.cat(sections, dim=1), n=length, dim=1)
    return taps.permute(2, 0, 1).to(dtype).contiguous()


def backward(
    grad: Tensor, C: Tensor, B: Tensor, P: Tensor, w: Tensor, rate: Tensor, tile: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return gradients of C, B, P, w and the rate from that of the taps."""
    spectrum = spectrum_gradient(grad.double()).permute(1, 2, 0)
    like = torch.contiguous_format
    d_c, d_b, d_p, d_w, d_rate = totals = [torch.zeros_like(x, memory_format=like) for x in (C, B, P, w, rate)]
    for tile_of, at in _tiles(w, grad.shape[-1], tile):
        parts = _Section(C, B, P, w, rate, at).gradients(spectrum[:, tile_of])
        for total, part in zip(totals, parts, strict=True):
            total += part
    return d_c, d_b, d_p, d_w, d_rate


def _tiles(w: Tensor, length: int, numbers: int) -> list[tuple[slice, Tensor]]:
    """Return tiles of frequencies of at most `numbers` float64 numbers, with their `nodes`."""
    size = max(1, numbers // (32 * w.numel()))
    stop = length // 2 + 1
    tiles = [slice(start, min(start + size, stop)) for start in range(0, stop, size)]
    return [(tile, nodes(length, tile.start, tile.stop, w.device)) for tile in tiles]


class _Section:
    """The generating function at a few frequencies; see `forward` and `nodes` for the arguments.

    Conjugates are computed, because compiled graphs ignore lazy ones when they call an op.
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
        """Return Khat, `(H, frequencies, C)`."""

    def gradients(self, grad: Tensor) -> tuple[Tensor, ...]:
        """Return gradients of C, B, P, w and rate from that of Khat."""
        grad = grad.conj_physical() * self.phase
        own = (grad * self.by_p[..., :-1]).sum(-1, keepdim=True) * self.weight
        # of both halves of the modes, whose constants are conjugate
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
        """Return x, and z of all filters times their conjugate gradients, `(H, frequencies, M)`."""
        return (B - self.low_rank * P) * inverse, (grad @ C - own * P.conj_physical()) * inverse
