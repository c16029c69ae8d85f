"""A long convolution's steps around the transforms on a GPU: each reads and writes each tensor once.

The transforms are torch's, in float32. The steps convert between `(B, T, D)` in any precision and blocks
`(b, d, n_fft)` in tiles of tokens and channels, read along one and written along the other:

    prologue     x = input_gate u, zeros after it
    multiply     in place, with the conjugate for the adjoint; channels that share taps read the same spectrum
    epilogue     gate f(y + skip x)
    upstream     from the output's gradient to the convolution's, in y's memory
    correlate    sums of conj(X) dY over sequences and channels that share taps
    downstream   from the convolution's input to the op's, and sums of x dy for the skip weights

`multiply` also divides by n_fft for the inverse transform, which saves a pass over the result. Programs write their
sums to separate memory, and torch adds them: no atomics, the same bits in every run.

b sequences and d channels of a block · B batch · T length · D width · G groups · F = n_fft / 2 + 1 frequencies
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..launching import Configuration, blocks, capability_of, launch, tuned
from ..triton_kernels import why_not_dtype
from .blocks import Around, Block, Spectrum

CONFIGURATIONS = {
    name: Configuration(name, "all shapes and dtypes", tiles, num_warps=4, num_stages=1)
    for name, tiles in (
        ("prologue", {"BT": 64, "BD": 64}),
        ("epilogue", {"BT": 32, "BD": 64}),
        ("upstream", {"BT": 32, "BD": 64}),
        ("downstream", {"BT": 32, "BD": 64}),
        ("multiply", {"BF": 512}),
        ("correlate", {"BF": 512}),
    )
}

_PROGRAMS = 528
"""Programs of `correlate` that fill a GPU of 132 multiprocessors; with few groups, several share one."""


def why_not(u: Tensor) -> str | None:
    """Return the op's objection to Triton, or None."""
    return why_not_dtype("u", u.dtype)


@triton.jit
def _tile(table, T, FIRST, STEPS, N, WIDTH, PACKED: tl.constexpr, BT: tl.constexpr, BD: tl.constexpr):
    """A program's tile of a block.

    Returns its row, where the row's sequence begins, times and channels, and which of the tile lies inside of the
    sequence and which inside of the block. What is read from a block is masked by the latter, since the compiler reads
    several numbers at once only where it knows that a mask does not change between them.
    """
    columns = tl.cdiv(WIDTH, BD)
    column = tl.program_id(0) % columns
    step = tl.program_id(0) // columns % STEPS
    row = tl.program_id(0) // columns // STEPS
    if PACKED:
        begin = tl.load(table + (FIRST + row) * 2)
        length = tl.load(table + (FIRST + row) * 2 + 1)
    else:
        begin = (FIRST + row) * T
        length = T
    at = step * BT + tl.arange(0, BT)[:, None]
    cols = column * BD + tl.arange(0, BD)[None, :]
    return row, begin, at, cols, (at < length) & (cols < WIDTH), (at < N) & (cols < WIDTH)


@triton.jit(do_not_specialize=["T", "FIRST", "STEPS"])
def prologue_kernel(
    u, gate, x, table,
    T, FIRST, STEPS, N, D, START, WIDTH,
    PACKED: tl.constexpr, BT: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """x[row, c, t] = u gate for the tokens of a sequence, and zero from there to N."""
    row, begin, at, cols, inside, kept = _tile(table, T, FIRST, STEPS, N, WIDTH, PACKED, BT, BD)
    place = (begin + at).to(tl.int64) * D + START + cols
    value = tl.load(u + place, mask=inside, other=0.0).to(tl.float32)
    if gate is not None:
        value *= tl.load(gate + place, mask=inside, other=0.0).to(tl.float32)
    tl.store(x + (row * WIDTH + cols).to(tl.int64) * N + at, value, mask=kept)


@triton.jit(do_not_specialize=["T", "FIRST", "STEPS"])
def epilogue_kernel(
    y, x, skip, gate, out, table,
    T, FIRST, STEPS, N, D, START, WIDTH,
    SILU: tl.constexpr, PACKED: tl.constexpr, BT: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """Out = gate f(y + skip x) for the tokens of a sequence."""
    row, begin, at, cols, inside, kept = _tile(table, T, FIRST, STEPS, N, WIDTH, PACKED, BT, BD)
    own = (row * WIDTH + cols).to(tl.int64) * N + at
    value = tl.load(y + own, mask=kept, other=0.0)
    if skip is not None:
        weight = tl.load(skip + START + cols, mask=cols < WIDTH, other=0.0)
        value += weight * tl.load(x + own, mask=kept, other=0.0)
    if SILU:
        value *= tl.sigmoid(value)
    place = (begin + at).to(tl.int64) * D + START + cols
    if gate is not None:
        value *= tl.load(gate + place, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + place, value.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["T", "FIRST", "STEPS"])
def upstream_kernel(
    y, x, skip, grad, gate, d_gate, table,
    T, FIRST, STEPS, N, D, START, WIDTH,
    SILU: tl.constexpr, PACKED: tl.constexpr, BT: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """Put grad gate f'(y + skip x) in the place of y, zeros behind it, and d_gate = grad f(y + skip x) beside u."""
    row, begin, at, cols, inside, kept = _tile(table, T, FIRST, STEPS, N, WIDTH, PACKED, BT, BD)
    own = (row * WIDTH + cols).to(tl.int64) * N + at
    value = tl.load(y + own, mask=kept, other=0.0)
    if skip is not None:
        weight = tl.load(skip + START + cols, mask=cols < WIDTH, other=0.0)
        value += weight * tl.load(x + own, mask=kept, other=0.0)
    place = (begin + at).to(tl.int64) * D + START + cols
    g = tl.load(grad + place, mask=inside, other=0.0).to(tl.float32)
    slope = tl.full((BT, BD), 1.0, tl.float32)
    if SILU:
        sigmoid = tl.sigmoid(value)
        slope = sigmoid * (1 + value * (1 - sigmoid))
        value *= sigmoid
    if d_gate is not None:
        tl.store(d_gate + place, (g * value).to(d_gate.dtype.element_ty), mask=inside)
    if gate is not None:
        g *= tl.load(gate + place, mask=inside, other=0.0).to(tl.float32)
    tl.store(y + own, tl.where(inside, g * slope, 0.0), mask=kept)


@triton.jit(do_not_specialize=["T", "FIRST", "STEPS"])
def downstream_kernel(
    d_x, d_y, skip, u, gate, d_u, d_gate, sums, table,
    T, FIRST, STEPS, N, D, START, WIDTH,
    PACKED: tl.constexpr, BT: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """With d = d_x + skip d_y: d_u = gate d, d_gate = u d, and sums over BT tokens of u gate d_y for each channel."""
    row, begin, at, cols, inside, kept = _tile(table, T, FIRST, STEPS, N, WIDTH, PACKED, BT, BD)
    own = (row * WIDTH + cols).to(tl.int64) * N + at
    place = (begin + at).to(tl.int64) * D + START + cols
    value = tl.zeros((BT, BD), tl.float32)
    if d_x is not None:
        value = tl.load(d_x + own, mask=kept, other=0.0)
    direct = value
    if skip is not None or sums is not None:
        direct = tl.load(d_y + own, mask=kept, other=0.0)
    if skip is not None:
        value += tl.load(skip + START + cols, mask=cols < WIDTH, other=0.0) * direct
    if d_gate is not None or sums is not None:
        token = tl.load(u + place, mask=inside, other=0.0).to(tl.float32)
        if d_gate is not None:
            tl.store(d_gate + place, (token * value).to(d_gate.dtype.element_ty), mask=inside)
        direct *= token
    if gate is not None:
        factor = tl.load(gate + place, mask=inside, other=0.0).to(tl.float32)
        value *= factor
        direct *= factor
    if d_u is not None:
        tl.store(d_u + place, value.to(d_u.dtype.element_ty), mask=inside)
    if sums is not None:
        total = tl.sum(direct, axis=0)[None, :]
        part = tl.program_id(0) // tl.cdiv(WIDTH, BD)
        tl.store(sums + part.to(tl.int64) * WIDTH + cols, total, mask=cols < WIDTH)


@triton.jit
def _complex(x, at, kept, BF: tl.constexpr):
    """Real and imaginary parts of BF numbers that lie one after the other."""
    return tl.split(tl.reshape(tl.load(x + at, mask=kept, other=0.0), (BF, 2)))


@triton.jit(do_not_specialize=["FIRST", "ROWS"])
def multiply_kernel(
    x, factor, out,
    FIRST, ROWS, N, WIDTH, G, scale,
    CONJUGATE: tl.constexpr, ADD: tl.constexpr, BF: tl.constexpr,
):  # fmt: skip
    """Out = scale x factor, or in addition to it, for BF frequencies; the sequences of a channel side by side."""
    row = tl.program_id(0) % ROWS
    channel = tl.program_id(0) // ROWS % WIDTH
    start = tl.program_id(0) // ROWS // WIDTH * (2 * BF)
    at = start + tl.arange(0, 2 * BF)
    numbers = N + 2
    kept = at < numbers
    factor_re, factor_im = _complex(factor + ((FIRST + channel) % G).to(tl.int64) * numbers, at, kept, BF)
    factor_re *= scale
    factor_im *= scale
    if CONJUGATE:
        factor_im = -factor_im
    own = (row * WIDTH + channel).to(tl.int64) * numbers
    re, im = _complex(x + own, at, kept, BF)
    product = tl.join(re * factor_re - im * factor_im, re * factor_im + im * factor_re)
    product = tl.reshape(product, (2 * BF,))
    if ADD:
        product += tl.load(out + own + at, mask=kept, other=0.0)
    tl.store(out + own + at, product, mask=kept)


@triton.jit(do_not_specialize=["FIRST", "ROWS", "SLICES"])
def correlate_kernel(x, y, sums, FIRST, ROWS, N, WIDTH, G, SLICES, BF: tl.constexpr):
    """Sum conj(x) y over sequences and over a slice of a group's channels, for BF frequencies."""
    tiles = tl.cdiv(N + 2, 2 * BF)
    at = tl.program_id(0) % tiles * (2 * BF) + tl.arange(0, 2 * BF)
    group = tl.program_id(0) // tiles % G
    part = tl.program_id(0) // tiles // G
    numbers = N + 2
    kept = at < numbers
    total_re, total_im = tl.zeros((BF,), tl.float32), tl.zeros((BF,), tl.float32)
    for channel in range((group + G - FIRST) % G + part * G, WIDTH, SLICES * G):
        for row in range(ROWS):
            own = (row * WIDTH + channel).to(tl.int64) * numbers
            x_re, x_im = _complex(x + own, at, kept, BF)
            y_re, y_im = _complex(y + own, at, kept, BF)
            total_re += x_re * y_re + x_im * y_im
            total_im += x_re * y_im - x_im * y_re
    total = tl.reshape(tl.join(total_re, total_im), (2 * BF,))
    tl.store(sums + (part * G + group).to(tl.int64) * numbers + at, total, mask=kept)


class Factor(NamedTuple):
    """Factor of `multiply`: spectra `(G, F, 2)`, the first channel's row, and whether to conjugate."""

    rows: Tensor
    first: int
    adjoint: bool


def arranged(x: Tensor | None) -> Tensor | None:
    """Return a tensor `(B, T, D)` in the kernels' memory layout: channels innermost."""
    return None if x is None else x.contiguous()


def factor(spectrum: Spectrum, width: int, adjoint: bool) -> Factor:
    """Return the factor for `multiply`, without copies for channels that share a row."""
    return Factor(torch.view_as_real(spectrum.rows.contiguous()), spectrum.first, adjoint)


def _plan(name: str, tensor: Tensor, block: Block, times: int) -> tuple[int, Configuration, dict[str, object]]:
    """Return the number of programs, the configuration, and the arguments that locate a block's tiles.

    The compiler specialises on N, unlike other lengths: transform lengths are few, and divisible by 16 or not.
    """
    sequences, rows, _ = block
    configuration = tuned("long_conv", CONFIGURATIONS[name], capability_of(tensor))
    steps = blocks(times, configuration.tiles["BT"])
    programs = (rows.stop - rows.start) * steps * blocks(block.width, configuration.tiles["BD"])
    return programs, configuration, {
        "table": sequences.table,
        "T": sequences.length,
        "FIRST": sequences.first + rows.start,
        "STEPS": steps,
        "N": sequences.n_fft,
        "D": tensor.shape[2],
        "START": block.channels.start,
        "WIDTH": block.width,
        "PACKED": sequences.table is not None,
    }  # fmt: skip


def _memory(block: Block, device: torch.device) -> Tensor:
    shape = block.rows.stop - block.rows.start, block.width, block.sequences.n_fft
    return torch.empty(shape, dtype=torch.float32, device=device)


def _float(skip: Tensor | None) -> Tensor | None:
    return None if skip is None else skip.float().contiguous()


def prologue(u: Tensor, gate: Tensor | None, block: Block, dtype: torch.dtype) -> Tensor:
    """Return a block of the inputs times their gate, `(b, d, n_fft)`, zeros after each sequence."""
    x = _memory(block, u.device)
    programs, configuration, plan = _plan("prologue", u, block, block.sequences.n_fft)
    launch(prologue_kernel, programs, configuration, **plan, u=u, gate=gate, x=x)
    return x


def _pairs(x: Tensor) -> Tensor:
    """Return a block's spectra as real and imaginary parts; torch's transforms of contiguous blocks are contiguous."""
    assert x.is_contiguous()
    return torch.view_as_real(x)


def multiply(x: Tensor, factor: Factor, out: Tensor, add: bool = False) -> Tensor:
    """Multiply spectra `(b, d, F)` by a `factor` into `out`, which may be x, or add to it."""
    rows, width, frequencies = x.shape
    n_fft = 2 * (frequencies - 1)
    configuration = tuned("long_conv", CONFIGURATIONS["multiply"], capability_of(x))
    launch(
        multiply_kernel,
        rows * width * blocks(frequencies, configuration.tiles["BF"]),
        configuration,
        x=_pairs(x),
        factor=factor.rows,
        out=_pairs(out),
        FIRST=factor.first,
        ROWS=rows,
        N=n_fft,
        WIDTH=width,
        G=factor.rows.shape[0],
        scale=1.0 / n_fft,
        CONJUGATE=factor.adjoint,
        ADD=add,
    )
    return out


def inverse(x: Tensor, n_fft: int) -> Tensor:
    """Transform the result of `multiply`, already divided, back to `(b, d, n_fft)`."""
    y = torch.fft.irfft(x, n=n_fft, norm="forward")
    assert y.is_contiguous()
    return y


def correlate(inputs: Tensor, gradients: Tensor, groups: int | None, first: int) -> Tensor:
    """Sum conj(inputs) gradients over sequences and over the channels of each group.

    Args:
        inputs: `(b, d, F)`.
        gradients: `(b, d, F)`.
        groups: G; None if each channel is its own.
        first: The block's first channel.

    Returns:
        `(G, F)`, or `(d, F)`.
    """
    rows, width, frequencies = inputs.shape
    configuration = tuned("long_conv", CONFIGURATIONS["correlate"], capability_of(inputs))
    tiles = blocks(frequencies, configuration.tiles["BF"])
    count, first = (width, 0) if groups is None else (groups, first % groups)
    slices = max(1, min(blocks(width, count), _PROGRAMS // (count * tiles)))
    sums = torch.empty(slices, count, frequencies, 2, dtype=torch.float32, device=inputs.device)
    launch(
        correlate_kernel,
        tiles * count * slices,
        configuration,
        x=_pairs(inputs),
        y=_pairs(gradients),
        sums=sums,
        FIRST=first,
        ROWS=rows,
        N=2 * (frequencies - 1),
        WIDTH=width,
        G=count,
        SLICES=slices,
    )
    return torch.view_as_complex(sums[0] if slices == 1 else sums.sum(0))


def epilogue(y: Tensor, x: Tensor | None, around: Around, block: Block, out: Tensor) -> None:
    """Write the op's output from blocks of the convolution and of its input."""
    programs, configuration, plan = _plan("epilogue", out, block, block.sequences.length)
    skip = _float(around.skip)
    launch(
        epilogue_kernel, programs, configuration, **plan, y=y, x=x, skip=skip, gate=around.gate, out=out,
        SILU=around.silu,
    )  # fmt: skip


def upstream(y: Tensor, x: Tensor | None, around: Around, grad: Tensor, block: Block, d_gate: Tensor | None) -> Tensor:
    """Return the gradient of a block of the convolution, before activation and gate.

    Args:
        y: The convolution, overwritten by the result.
        x: Its input.
        around: Gates, skip and activation.
        grad: Gradient of the output, `(B, T, D)`.
        block: The block.
        d_gate: Receives the gate's gradient, `(B, T, D)`, if not None.
    """
    programs, configuration, plan = _plan("upstream", grad, block, block.sequences.n_fft)
    skip = _float(around.skip)
    launch(
        upstream_kernel, programs, configuration, **plan, y=y, x=x, skip=skip, grad=grad, gate=around.gate,
        d_gate=d_gate, SILU=around.silu,
    )  # fmt: skip
    return y


def downstream(
    d_x: Tensor | None,
    d_y: Tensor,
    x: Tensor | None,
    u: Tensor | None,
    around: Around,
    block: Block,
    d_u: Tensor | None,
    d_gate: Tensor | None,
    trains_skip: bool,
) -> Tensor | None:
    """Write gradients of the op's input and gate, and return a block's part of the skip weights', `(d,)`.

    Args:
        d_x: The transposed convolution of `d_y`; None if neither input nor gate needs a gradient.
        d_y: Gradient of the convolution.
        x: Input of the convolution, not read: the op's input takes half the bytes in 16 bits.
        u: Input of the op, `(B, T, D)`.
        around: Gates, skip and activation.
        block: The block.
        d_u: Receives the input's gradient, `(B, T, D)`.
        d_gate: Receives the input gate's gradient, `(B, T, D)`.
        trains_skip: Whether to return the skip weights' gradient.
    """
    like = d_u if u is None else u
    if like is None or (d_x is None and not trains_skip):
        return None
    programs, configuration, plan = _plan("downstream", like, block, block.sequences.length)
    sums = None
    if trains_skip:
        parts = programs // blocks(block.width, configuration.tiles["BD"])
        sums = torch.empty(parts, block.width, dtype=torch.float32, device=d_y.device)
    skip = None if d_x is None else _float(around.skip)
    launch(
        downstream_kernel, programs, configuration, **plan, d_x=d_x, d_y=d_y, skip=skip, u=u, gate=around.input_gate,
        d_u=d_u, d_gate=d_gate, sums=sums,
    )  # fmt: skip
    return None if sums is None else sums.sum(0)
