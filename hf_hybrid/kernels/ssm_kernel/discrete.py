"""The discretised S4 system, for its kernel, its decode step and passing on its state.

The bilinear transform of a diagonal plus rank-one matrix is diagonal plus rank-one, so one channel's step needs four
vectors of N/2 complex numbers instead of an N x N matrix.

B batch · T length · H channels · S copies of (A, B) · M = N/2 modes · C output filters · R block length
"""

from collections.abc import Callable
from operator import index
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from ..precision import full_precision

BLOCK = 64
"""Tokens per block in `s4_final_state` and `s4_state_response`."""


class S4Step(NamedTuple):
    """One channel's step ``x <- decay x + column 2Re(row . x) + input u``; every field is `(H, M)`, complex."""

    decay: Tensor
    column: Tensor
    row: Tensor
    input: Tensor


class S4Blocks(NamedTuple):
    """Constants that advance a state by a block, over its N = 2M real coordinates.

    Attributes:
        transition: ``Abar^R``, `(H, N, N)`.
        inputs: ``Abar^(R-1) Bbar, ..., Bbar``, `(H, N, R)`.
        outputs: ``C Abar, ..., C Abar^R``, `(C, H, R, N)`.
    """

    transition: Tensor
    inputs: Tensor
    outputs: Tensor


def check_system(C: Tensor, B: Tensor, P: Tensor, w: Tensor, dt: Tensor) -> None:
    """Raise ValueError if the shapes of a system do not fit."""
    if dt.dim() != 1 or dt.is_complex():
        raise ValueError(f"dt must be real (H,); got {tuple(dt.shape)} of {dt.dtype}")
    channels, modes = dt.shape[0], w.shape[-1]
    for name, tensor in (("B", B), ("P", P), ("w", w)):
        if tensor.shape != w.shape or tensor.dim() != 2 or not tensor.is_complex():
            raise ValueError(f"{name} must be complex (S, N/2) like w; got {tuple(tensor.shape)} of {tensor.dtype}")
    if channels % w.shape[0]:
        raise ValueError(f"the number of channels must be a multiple of the {w.shape[0]} copies; got {channels}")
    if C.dim() != 3 or C.shape[1:] != (channels, modes) or not C.is_complex():
        raise ValueError(f"C must be complex (C, {channels}, {modes}); got {tuple(C.shape)} of {C.dtype}")


def s4_step_constants(B: Tensor, P: Tensor, w: Tensor, dt: Tensor) -> S4Step:
    """Discretise every channel by the bilinear transform (SPADE, eq. 3), without forming a matrix.

    With G = 1 / (1 - dt/2 w) and s = (dt/2) / (1 + dt/2 P^H G P) (Woodbury),
    (I - dt/2 A)^-1 = G - s G P P^H G,  Abar = 2 (I - dt/2 A)^-1 - I,  Bbar = dt (I - dt/2 A)^-1 B.
    Inner products run over both conjugate halves, hence 2Re.

    Args:
        B: `(S, M)`, complex.
        P: `(S, M)`, complex.
        w: `(S, M)`, complex, negative real parts.
        dt: Step per channel, `(H,)`; channel c reads copy ``c % S``.

    Returns:
        The step in complex128. Differentiable.
    """
    copies = dt.shape[0] // B.shape[0]
    B, P, w = (x.to(torch.complex128).repeat(copies, 1) for x in (B, P, w))
    dt = dt.to(torch.float64)[:, None]
    G = (1 - 0.5 * dt * w).reciprocal()
    row = P.conj_physical() * G
    scale = 0.5 * dt / (1 + dt * (row * P).real.sum(-1, keepdim=True))
    column = -2 * scale * G * P
    applied = G * B + 0.5 * column * two_re(row * B)
    return S4Step(decay=2 * G - 1, column=column, row=row, input=dt * applied)


def two_re(product: Tensor) -> Tensor:
    """Return 2Re of the sum over modes, `(..., 1)`: an inner product over both conjugate halves."""
    return 2 * product.sum(-1, keepdim=True).real


def s4_step(state: Tensor, u: Tensor, C: Tensor, step: S4Step) -> tuple[Tensor, Tensor]:
    """Advance every channel by one token in O(N).

    Args:
        state: `(B, H, M)`, complex.
        u: One token, `(B, H)`.
        C: `(C, H, M)`, complex.
        step: From `s4_step_constants`, in the state's dtype.

    Returns:
        y `(B, C, H)`, real, including the token itself (lag 0), and the next state `(B, H, M)`.
    """
    state = step.decay * state + step.column * two_re(step.row * state) + step.input * u[..., None]
    return 2 * (C * state[:, None]).sum(-1).real, state


def s4_step_states(u: Tensor, step: S4Step) -> Tensor:
    """Return the state after the last token of `u`, token by token: O(T N) multiplications per channel, no powers.

    Args:
        u: `(B, T, H)`, T > 0.
        step: From `s4_step_constants`, in the state's dtype.

    Returns:
        `(B, H, M)`, complex.
    """
    inputs = u.to(step.input.real.dtype)[..., None]
    state = step.input * inputs[:, 0]
    for token in inputs.unbind(1)[1:]:
        state = step.decay * state + step.column * two_re(step.row * state) + step.input * token
    return state


def s4_output(state: Tensor, C: Tensor) -> Tensor:
    """Read states by all output filters, ``2 Re C_c x``, in one product over real coordinates.

    Args:
        state: `(..., H, M)`, complex.
        C: `(C, H, M)`, in the state's dtype.

    Returns:
        `(..., C, H)`, real.
    """
    with full_precision(state.device):
        return torch.einsum("...hn,chn->...ch", to_real(state), to_real_row(C))


def to_real(x: Tensor) -> Tensor:
    """Return real coordinates of a state or input vector: `(..., M)` complex to `(..., N)`, real parts first."""
    return torch.cat([x.real, x.imag], dim=-1)


def to_complex(x: Tensor) -> Tensor:
    """Invert `to_real`."""
    modes = x.shape[-1] // 2
    return torch.complex(x[..., :modes].contiguous(), x[..., modes:].contiguous())


def to_real_row(x: Tensor) -> Tensor:
    """Return the real row vector that acts on `to_real` as ``2Re(x . state)``."""
    return 2 * torch.cat([x.real, -x.imag], dim=-1)


def dense_diagonal(decay: Tensor) -> Tensor:
    """Return a complex diagonal `(H, M)` over real coordinates, `(H, N, N)`."""
    real, imag = torch.diag_embed(decay.real), torch.diag_embed(decay.imag)
    return torch.cat([torch.cat([real, -imag], dim=-1), torch.cat([imag, real], dim=-1)], dim=-2)


def dense_transition(step: S4Step) -> Tensor:
    """Return Abar over real coordinates, `(H, N, N)`: a contraction, whose powers stay accurate."""
    return dense_diagonal(step.decay) + to_real(step.column)[..., None] * to_real_row(step.row)[..., None, :]


def s4_block_constants(C: Tensor, step: S4Step, dtype: torch.dtype = torch.float32) -> S4Blocks:
    """Compute the constants that advance a state by `BLOCK` tokens.

    Args:
        C: `(C, H, M)`, complex.
        step: From `s4_step_constants`, complex128.
        dtype: Real dtype of the result; powers are computed in float64.
    """
    power = dense_transition(step)
    columns = to_real(step.input)[..., None]
    rows = to_real_row(C.to(torch.complex128))[:, :, None] @ power
    while columns.shape[-1] < BLOCK:
        columns = torch.cat([power @ columns, columns], dim=-1)
        rows = torch.cat([rows, rows @ power], dim=-2)
        power = power @ power
    return S4Blocks(power.to(dtype), columns.to(dtype), rows.to(dtype))


def s4_final_state(u: Tensor, step: S4Step, blocks: S4Blocks, state: Tensor | None = None) -> Tensor:
    """Return the state after the last token of `u`: O(T N) multiplications per channel, T / BLOCK sequential steps.

    x[T] = Abar^T x[0] + sum_t Abar^(T-1-t) Bbar u[t]

    Args:
        u: `(B, T, H)`.
        step: From `s4_step_constants`, in the state's dtype.
        blocks: From `s4_block_constants`.
        state: `(B, H, M)` complex; zeros when None.

    Returns:
        `(B, H, M)`, complex.
    """
    dtype = blocks.inputs.dtype
    # a loop over blocks cannot be traced for a symbolic length
    batch, length = u.shape[0], index(u.shape[1])
    channels, head = u.shape[2], length % BLOCK
    u = u.permute(2, 1, 0).to(dtype)
    transition = blocks.transition.transpose(1, 2)
    with full_precision(u.device):
        # the incomplete block comes first
        x = (blocks.inputs[..., BLOCK - head :] @ u[:, :head]).transpose(1, 2)
        if state is not None:
            for _ in range(head):
                state = step.decay * state + step.column * two_re(step.row * state)
            x = x + to_real(state).transpose(0, 1).to(dtype)
        # one product per channel for what every block adds
        whole = u[:, head:].reshape(channels, -1, BLOCK, batch).transpose(1, 2)
        added = blocks.inputs @ whole.reshape(channels, BLOCK, -1)
        for block in added.view(channels, added.shape[1], -1, batch).unbind(2):
            x = torch.baddbmm(block.transpose(1, 2), x, transition)
    return to_complex(x.transpose(0, 1))


def s4_state_response(state: Tensor, length: int, blocks: S4Blocks) -> Tensor:
    """Return the state's contribution to the next `length` outputs, ``C Abar^(t+1) x``.

    Args:
        state: `(B, H, M)`, complex.
        length: Number of outputs T.
        blocks: From `s4_block_constants`.

    Returns:
        `(B, C, T, H)`, real.
    """
    length = index(length)
    x = to_real(state).transpose(0, 1).to(blocks.transition.dtype)
    transition = blocks.transition.transpose(1, 2)
    starts = [x]
    filters, channels = blocks.outputs.shape[:2]
    with full_precision(x.device):
        for _ in range(BLOCK, length, BLOCK):
            starts.append(starts[-1] @ transition)
        # (C, H, R, N) @ (H, N, blocks * B): one product per channel for every block of every sequence
        y = blocks.outputs @ torch.cat(starts, dim=1).transpose(1, 2)
    y = y.view(filters, channels, BLOCK, len(starts), state.shape[0])
    return y.permute(4, 0, 3, 2, 1).reshape(state.shape[0], filters, -1, channels)[:, :, :length]


_CPU_TILE = 1 << 24
"""Largest number of float64 numbers per tile on a CPU: 128 MiB, enough work for two threads."""

_GPU_TILE = 1 << 25
"""The same on other devices, where each tile costs hundreds of launches."""


def tile_numbers(device: torch.device) -> int:
    """Return the largest number of float64 numbers per tile."""
    return _CPU_TILE if device.type == "cpu" else _GPU_TILE


def recomputed(function: Callable[..., Any], *args: Tensor | int | str) -> Any:
    """Call a function; if a gradient is needed, store only its arguments and call it again in the backward."""
    if torch.is_grad_enabled() and any(isinstance(arg, Tensor) and arg.requires_grad for arg in args):
        return checkpoint(function, *args, use_reentrant=False, preserve_rng_state=False)
    return function(*args)
