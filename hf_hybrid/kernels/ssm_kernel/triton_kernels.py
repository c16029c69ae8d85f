"""S4's generating function on a GPU: every denominator is inverted once for all sums.

A program owns a tile of frequencies of one channel and a group of its filters. It walks over the modes with the sums
in registers, all from one inverse per pair of modes and frequency, combines them (Woodbury) and writes the spectrum,
its only result. Backward, a program sums again and walks over the modes a second time, now with each mode's state on
both sides. Each tile writes its part of a mode's gradients to separate memory, and torch adds the parts in float64. No
atomics, the same bits in every run.

H channels · M modes · C output filters · F frequencies · G groups of filters
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional as F

from ..launching import Configuration, blocks, capability_of, launch, tuned
from .cauchy import nodes, spectrum_gradient

CONFIGURATIONS = {
    ("forward", False): Configuration(
        "forward one filter", "a system with one output filter", {"BK": 512, "FILTERS": 1}, num_warps=4, num_stages=1
    ),
    ("forward", True): Configuration(
        "forward filters", "several output filters", {"BK": 256, "FILTERS": 2}, num_warps=4, num_stages=1
    ),
    ("backward", False): Configuration(
        "backward one filter", "a system with one output filter", {"BK": 128, "FILTERS": 1}, num_warps=1, num_stages=1
    ),
    ("backward", True): Configuration(
        "backward filters", "several output filters", {"BK": 128, "FILTERS": 2}, num_warps=1, num_stages=1
    ),
}


def why_not(dtype: torch.dtype, algorithm: str | None) -> str | None:
    """Return the op's objection to Triton, or None."""
    if algorithm == "two_level":
        return "two_level is an algorithm of torch alone"
    if dtype != torch.float32:
        return f"C must be complex64, which has taps of float32; got taps of {dtype}"
    return None


@triton.jit
def _product(a_re, a_im, b_re, b_im):
    """A complex product."""
    return a_re * b_re - a_im * b_im, a_re * b_im + a_im * b_re


@triton.jit
def _inverse(mode, cosine, sigma):
    """One over the denominators of both modes of a pair, c^2 |w|^2 - sigma^2 - 2 i sigma c Re w; see `_tables`."""
    real = cosine * cosine * tl.load(mode + 1) - sigma * sigma
    imag = -2 * sigma * cosine * tl.load(mode)
    scale = 1 / (real * real + imag * imag)
    return real * scale, -imag * scale


@triton.jit
def _sums(table, M, cosine, sigma, ROWS: tl.constexpr, ENTRY: tl.constexpr):
    """The first ROWS sums of a table at every frequency: real parts, and imaginary ones.

    a b / (i sigma - c w) and its twin of the conjugates together are (i sigma alpha + c beta) times `_inverse`.
    """
    re, im = (), ()
    for _ in tl.static_range(ROWS):
        re = re + (tl.zeros_like(cosine),)
        im = im + (tl.zeros_like(cosine),)
    for n in range(M):
        mode = table + n * ENTRY
        x, y = _inverse(mode, cosine, sigma)
        next_re, next_im = (), ()
        for j in tl.static_range(ROWS):
            alpha = tl.load(mode + 2 + 2 * j)
            beta = tl.load(mode + 3 + 2 * j)
            next_re = next_re + (re[j] + beta * (cosine * x) - alpha * (sigma * y),)
            next_im = next_im + (im[j] + beta * (cosine * y) + alpha * (sigma * x),)
        re, im = next_re, next_im
    return re, im


@triton.jit
def _low_rank(re, im, cosine, FILTERS: tl.constexpr):
    """C / (1 + c r_PP), and T, which is r_PB times it."""
    real = 1 + cosine * re[FILTERS + 1]
    imag = cosine * im[FILTERS + 1]
    scale = cosine / (real * real + imag * imag)
    t_re, t_im = _product(re[FILTERS], im[FILTERS], real * scale, -imag * scale)
    return real * scale, -imag * scale, t_re, t_im


@triton.jit(do_not_specialize=["H", "F"])
def forward_kernel(
    table, rates, angles, spectrum,
    H, C, M, F,
    BK: tl.constexpr, FILTERS: tl.constexpr,
):  # fmt: skip
    """Write Khat of one channel and FILTERS filters at BK frequencies."""
    tiles = tl.cdiv(F, BK)
    groups = tl.cdiv(C, FILTERS)
    system = tl.program_id(0) // tiles
    channel = system // groups
    k = (tl.program_id(0) - system * tiles) * BK + tl.arange(0, BK)
    inside = k < F
    sine = tl.load(angles + k, mask=inside, other=0.0)
    cosine = tl.load(angles + F + k, mask=inside, other=1.0)
    ENTRY: tl.constexpr = 4 * FILTERS + 6
    own = table + system.to(tl.int64) * M * ENTRY
    re, im = _sums(own, M, cosine, tl.load(rates + channel) * sine, 2 * FILTERS + 2, ENTRY)
    _, _, t_re, t_im = _low_rank(re, im, cosine, FILTERS)
    for i in tl.static_range(FILTERS):
        part_re, part_im = _product(re[i], im[i], t_re, t_im)
        real, imag = re[FILTERS + 2 + i] - part_re, im[FILTERS + 2 + i] - part_im
        real, imag = _product(real, imag, cosine, sine)
        c = (system - channel * groups) * FILTERS + i
        place = spectrum + ((c * H + channel).to(tl.int64) * F + k) * 2
        tl.store(place, real, mask=inside & (c < C))
        tl.store(place + 1, imag, mask=inside & (c < C))


@triton.jit(do_not_specialize=["H", "F"])
def backward_kernel(
    table, constants, rates, angles, grad, sums, d_rates,
    H, C, M, F,
    BK: tl.constexpr, FILTERS: tl.constexpr,
):  # fmt: skip
    """Sum what BK frequencies add to the gradients of a channel's constants and rate.

    With G = conj(gradient of Khat) e^(i phi), V = sum_C G r_CP c / (1 + c r_PP) and a 2 for a mode's conjugate twin:
    x = (B - T P) D,  z = (sum_C G C - V conj P) D,  D = 1 / (i sigma - c w),
    d_C = conj(G x) + G x2,  d_B = conj(z) + z2,  d_w = c (conj(z x) + z2 x2),
    d_P = -conj(T z + V x2) - (T z2 + V x),  d_sigma = Im(z x + z2 x2)
    """
    tiles = tl.cdiv(F, BK)
    groups = tl.cdiv(C, FILTERS)
    system = tl.program_id(0) // tiles
    channel = system // groups
    k = (tl.program_id(0) - system * tiles) * BK + tl.arange(0, BK)
    inside = k < F
    sine = tl.load(angles + k, mask=inside, other=0.0)
    cosine = tl.load(angles + F + k, mask=inside, other=1.0)
    sigma = tl.load(rates + channel) * sine
    ENTRY: tl.constexpr = 4 * FILTERS + 6
    own = table + system.to(tl.int64) * M * ENTRY
    re, im = _sums(own, M, cosine, sigma, FILTERS + 2, ENTRY)
    weight_re, weight_im, t_re, t_im = _low_rank(re, im, cosine, FILTERS)
    g_re, g_im = (), ()
    v_re, v_im = tl.zeros_like(cosine), tl.zeros_like(cosine)
    for i in tl.static_range(FILTERS):
        c = (system - channel * groups) * FILTERS + i
        place = grad + ((c * H + channel).to(tl.int64) * F + k) * 2
        real = tl.load(place, mask=inside & (c < C), other=0.0)
        imag = tl.load(place + 1, mask=inside & (c < C), other=0.0)
        real, imag = _product(real, -imag, cosine, sine)
        g_re, g_im = g_re + (real,), g_im + (imag,)
        real, imag = _product(real, imag, re[i], im[i])
        v_re += real
        v_im += imag
    v_re, v_im = _product(v_re, v_im, weight_re, weight_im)

    WIDTH: tl.constexpr = 2 * FILTERS + 6
    d_sigma = tl.zeros_like(cosine)
    for n in range(M):
        values = constants + system.to(tl.int64) * M * WIDTH + n * WIDTH
        into = sums + tl.program_id(0).to(tl.int64) * M * WIDTH + n * WIDTH
        damping = cosine * tl.load(values)
        turn = cosine * tl.load(values + 1)
        b_re, b_im = tl.load(values + 2), tl.load(values + 3)
        p_re, p_im = tl.load(values + 4), tl.load(values + 5)
        # D of the mode, which is both inverses times the twin's denominator, and of its twin
        real, imag = _inverse(own + n * ENTRY, cosine, sigma)
        one_re, one_im = _product(real, imag, -damping, sigma + turn)
        two_re, two_im = _product(real, imag, -damping, sigma - turn)
        real, imag = _product(t_re, t_im, p_re, p_im)
        x_re, x_im = _product(b_re - real, b_im - imag, one_re, one_im)
        real, imag = _product(t_re, t_im, p_re, -p_im)
        x2_re, x2_im = _product(b_re - real, -b_im - imag, two_re, two_im)
        z_re, z_im = _product(v_re, v_im, -p_re, p_im)
        z2_re, z2_im = _product(v_re, v_im, -p_re, -p_im)
        for i in tl.static_range(FILTERS):
            c_re, c_im = tl.load(values + 6 + 2 * i), tl.load(values + 7 + 2 * i)
            z_re += g_re[i] * c_re - g_im[i] * c_im
            z_im += g_re[i] * c_im + g_im[i] * c_re
            z2_re += g_re[i] * c_re + g_im[i] * c_im
            z2_im += g_im[i] * c_re - g_re[i] * c_im
            tl.store(into + 6 + 2 * i, tl.sum(g_re[i] * (x_re + x2_re) - g_im[i] * (x_im + x2_im)))
            tl.store(into + 7 + 2 * i, tl.sum(g_re[i] * (x2_im - x_im) + g_im[i] * (x2_re - x_re)))
        z_re, z_im = _product(z_re, z_im, one_re, one_im)
        z2_re, z2_im = _product(z2_re, z2_im, two_re, two_im)
        tl.store(into + 2, tl.sum(z_re + z2_re))
        tl.store(into + 3, tl.sum(z2_im - z_im))
        real = t_re * (z_re + z2_re) - t_im * (z_im + z2_im) + v_re * (x_re + x2_re) - v_im * (x_im + x2_im)
        imag = t_re * (z_im - z2_im) + t_im * (z_re - z2_re) + v_re * (x2_im - x_im) + v_im * (x2_re - x_re)
        tl.store(into + 4, -tl.sum(real))
        tl.store(into + 5, tl.sum(imag))
        real, imag = _product(z_re, z_im, x_re, x_im)
        real2, imag2 = _product(z2_re, z2_im, x2_re, x2_im)
        tl.store(into, tl.sum(cosine * (real + real2)))
        tl.store(into + 1, tl.sum(cosine * (imag2 - imag)))
        d_sigma += imag + imag2
    tl.store(d_rates + tl.program_id(0), tl.sum(sine * d_sigma))


def _tables(C: Tensor, B: Tensor, P: Tensor, w: Tensor, filters: int) -> tuple[Tensor, Tensor]:
    """Return what the kernels read per mode, for groups of `filters` filters, the last padded with zeros.

    Returns:
        `(H, G, M, 2 + 2 (2 filters + 2))`: Re w and |w|^2, then alpha = 2 Re(a b) and beta = -2 Re(a b conj w) of the
        sums, first those of filters with P, conj P with B and conj P with P, then filters with B. And the constants,
        `(H, G, M, 2 (3 + filters))`: w, B, P and the filters. Computed in float64, rounded to float32.
    """
    groups = blocks(len(C), filters)
    C = F.pad(C.permute(1, 0, 2), (0, 0, 0, groups * filters - len(C))).unflatten(1, (groups, filters))
    B, P, w = (x[:, None, None].expand(-1, groups, -1, -1) for x in (B, P, w))
    products = torch.cat([C * P, P.conj_physical() * B, P.conj_physical() * P, C * B], dim=2)
    rows = torch.stack([2 * products.real, -2 * (products * w.conj_physical()).real], dim=3).flatten(2, 3)
    square = w.real.square() + w.imag.square()
    table = torch.cat([w.real, square, rows], dim=2).mT.float().contiguous()
    constants = torch.cat([w, B, P, C], dim=2).mT.to(torch.complex64).contiguous()
    return table, torch.view_as_real(constants).flatten(-2)


def _plan(
    direction: str, C: Tensor, B: Tensor, P: Tensor, w: Tensor, rate: Tensor, length: int
) -> tuple[int, int, Configuration, dict[str, object], Tensor]:
    """Return groups of filters, tiles of frequencies, the configuration, arguments of both kernels, and constants."""
    configuration = tuned("ssm_kernel", CONFIGURATIONS[direction, len(C) > 1], capability_of(rate))
    each = configuration.tiles["FILTERS"]
    table, constants = _tables(C, B, P, w, each)
    frequencies = length // 2 + 1
    arguments = {
        "table": table,
        "rates": rate.float(),
        "angles": nodes(length, 0, frequencies, rate.device).float(),
        "H": len(rate),
        "C": len(C),
        "M": w.shape[1],
        "F": frequencies,
    }
    return blocks(len(C), each), blocks(frequencies, configuration.tiles["BK"]), configuration, arguments, constants


def forward(
    C: Tensor, B: Tensor, P: Tensor, w: Tensor, rate: Tensor, length: int, _tile: int, _dtype: torch.dtype
) -> Tensor:
    """Return the taps, `(C, H, L)`, float32; see `op.s4_cauchy` for the arguments."""
    groups, tiles, configuration, arguments, _ = _plan("forward", C, B, P, w, rate, length)
    spectrum = torch.empty(*C.shape[:2], length // 2 + 1, 2, dtype=torch.float32, device=rate.device)
    launch(forward_kernel, len(rate) * groups * tiles, configuration, **arguments, spectrum=spectrum)
    return torch.fft.irfft(torch.view_as_complex(spectrum), n=length)


def backward(
    grad: Tensor, C: Tensor, B: Tensor, P: Tensor, w: Tensor, rate: Tensor, _tile: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return gradients of C, B, P, w and the rate, in their precision, from that of the taps."""
    filters, channels, modes = C.shape
    groups, tiles, configuration, arguments, constants = _plan("backward", C, B, P, w, rate, grad.shape[-1])
    shape = channels, groups, tiles, modes, constants.shape[-1]
    sums = torch.empty(shape, dtype=torch.float32, device=rate.device)
    d_rates = torch.empty(channels, groups * tiles, dtype=torch.float32, device=rate.device)
    launch(
        backward_kernel,
        channels * groups * tiles,
        configuration,
        **arguments,
        constants=constants,
        grad=torch.view_as_real(spectrum_gradient(grad)).contiguous(),
        sums=sums,
        d_rates=d_rates,
    )
    total = torch.view_as_complex(sums.sum(2, dtype=torch.float64).unflatten(-1, (-1, 2)))
    # copies, because an op must not return parts of the same memory
    d_w, d_b, d_p = (x.clone() for x in total[..., :3].sum(1).movedim(-1, 0))
    d_c = total[..., 3:].permute(1, 3, 0, 2).reshape(-1, channels, modes)[:filters].clone()
    return d_c, d_b, d_p, d_w, d_rates.sum(1, dtype=torch.float64)
