"""One token of a state space model on a GPU: one launch, which reads the state once and writes it once.

A program has a few channels of one sequence with all their modes. The launch dominates its time. Programs of one block
of channels are adjacent, so that the constants come from memory once and then from the cache. Complex numbers are
pairs of float32, loaded together and split in registers. The host reads nothing, so a CUDA graph can capture it.

B batch · H channels · M = N/2 modes · C output filters
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...launching import Configuration, blocks, capability_of, launch, tuned
from ...triton_kernels import why_not_dtype

MOST_MODES = 256

CONFIGURATIONS = {
    configuration.name: configuration
    for configuration in (
        Configuration("token m16", "M <= 16", {"BH": 8, "BM": 16}, num_warps=4, num_stages=1),
        Configuration("token m32", "M <= 32", {"BH": 4, "BM": 32}, num_warps=4, num_stages=1),
        Configuration("token m256", "M <= 256", {"BH": 1, "BM": 256}, num_warps=4, num_stages=1),
    )
}
"""BH channels of a program, BM modes in registers."""


def why_not(u: Tensor, C: Tensor) -> str | None:
    """Return the op's objection to Triton, or None."""
    objection = why_not_dtype("u", u.dtype)
    if objection is not None:
        return objection
    if C.dtype != torch.complex64:
        return f"C must be complex64; got {C.dtype}"
    if C.shape[2] > MOST_MODES:
        return f"the kernel holds at most {MOST_MODES} modes in registers; got {C.shape[2]}"
    return None


@triton.jit
def _complex(x, place, mask):
    """Real and imaginary parts of numbers that lie side by side."""
    return tl.split(tl.load(x + place, mask=mask, other=0.0).to(tl.float32))


@triton.jit(do_not_specialize=["B"])
def step_kernel(
    state, u, C, decay, column, row, gain, skip, y, after,
    B, H, FILTERS, U_B, U_H,
    M: tl.constexpr, BH: tl.constexpr, BM: tl.constexpr,
):  # fmt: skip
    """Compute x <- decay x + column 2Re(row . x) + gain u and y_c = 2Re(C_c . x) + skip_c u for BH channels."""
    block = tl.program_id(0) // B
    batch = (tl.program_id(0) - block * B).to(tl.int64)
    channels = block * BH + tl.arange(0, BH)
    there = channels < H
    modes = tl.arange(0, BM)[None, :, None]
    place = (channels[:, None, None] * M + modes) * 2 + tl.arange(0, 2)[None, None, :]
    kept = there[:, None, None] & (modes < M)
    token = tl.load(u + batch * U_B + channels.to(tl.int64) * U_H, mask=there, other=0.0).to(tl.float32)
    gain_real, gain_imag = _complex(gain, place, kept)
    x_real, x_imag = gain_real * token[:, None], gain_imag * token[:, None]
    own = batch * H * M * 2
    if state is not None:
        old_real, old_imag = _complex(state + own, place, kept)
        decay_real, decay_imag = _complex(decay, place, kept)
        x_real += decay_real * old_real - decay_imag * old_imag
        x_imag += decay_real * old_imag + decay_imag * old_real
        if column is not None:
            row_real, row_imag = _complex(row, place, kept)
            column_real, column_imag = _complex(column, place, kept)
            product = 2 * tl.sum(row_real * old_real - row_imag * old_imag, 1)[:, None]
            x_real += column_real * product
            x_imag += column_imag * product
    tl.store(after + own + place, tl.join(x_real, x_imag), mask=kept)
    for c in range(FILTERS):
        C_real, C_imag = _complex(C + c * (H * M * 2), place, kept)
        output = 2 * tl.sum(C_real * x_real - C_imag * x_imag, 1)
        if skip is not None:
            output += tl.load(skip + c * H + channels, mask=there, other=0.0).to(tl.float32) * token
        tl.store(y + (batch * FILTERS + c) * H + channels, output.to(y.dtype.element_ty), mask=there)


def forward(
    state: Tensor | None, u: Tensor, C: Tensor, decay: Tensor, column: Tensor | None, row: Tensor | None,
    gain: Tensor, skip: Tensor | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return outputs `(B, C, H)` in u's dtype, and the next state `(B, H, M, 2)` in float32."""
    (batch, channels), (filters, _, modes) = u.shape, C.shape
    y = torch.empty(batch, filters, channels, dtype=u.dtype, device=u.device)
    after = torch.empty(batch, channels, modes, 2, dtype=torch.float32, device=u.device)
    size = 16 if modes <= 16 else 32 if modes <= 32 else MOST_MODES
    configuration = tuned("ssm_step", CONFIGURATIONS[f"token m{size}"], capability_of(u))
    launch(
        step_kernel,
        batch * blocks(channels, configuration.tiles["BH"]),
        configuration,
        state=None if state is None else state.contiguous(),
        u=u,
        C=_pairs(C),
        decay=_pairs(decay),
        column=None if column is None else _pairs(column),
        row=None if row is None else _pairs(row),
        gain=_pairs(gain),
        skip=None if skip is None else skip.contiguous(),
        y=y,
        after=after,
        B=batch,
        H=channels,
        FILTERS=filters,
        U_B=u.stride(0),
        U_H=u.stride(1),
        M=modes,
    )
    return y, after


def _pairs(x: Tensor) -> Tensor:
    return torch.view_as_real(x.resolve_conj()).contiguous()
