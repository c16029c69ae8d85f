"""A causal convolution continued token by token.

B batch · T length · T_k taps · D width · P ring, a power of two and at least T_k - 1
"""

from typing import NamedTuple

import torch

from . import op, torch_impl

__all__ = ["ConvState", "online_conv", "start_online_conv"]


class ConvState(NamedTuple):
    """State of a causal convolution: two rings, whatever the number of tokens so far.

    Attributes:
        pending: Contribution of earlier inputs to the outputs of the ring, `(B, P, D)`, float32 or float64.
        inputs: The inputs of the ring, `(B, P, D)`, same dtype; entries from `position` on are undefined.
        position: Number of inputs in the ring, below P.
    """

    pending: torch.Tensor
    inputs: torch.Tensor
    position: int


def start_online_conv(u: torch.Tensor, kernel: torch.Tensor) -> ConvState:
    """Return the state after a prompt.

    Args:
        u: The prompt, `(B, T, D)`, any floating dtype; T may be 0.
        kernel: Taps at lag 0, 1, 2, ..., `(D, T_k)`, or `(G, T_k)` where G divides D, see `long_conv`.
    """
    return ConvState(*torch_impl.start(u, kernel), 0)


def online_conv(
    u: torch.Tensor, kernel: torch.Tensor, state: ConvState, *, skip: torch.Tensor | None = None
) -> tuple[torch.Tensor, ConvState]:
    """Convolve the next tokens of a sequence, given the state before them.

    Outputs are those of `long_conv` over the complete sequence, up to rounding.

    Args:
        u: `(B, T, D)`, any floating dtype.
        kernel: The taps of the state.
        state: The state before these tokens. Do not use it again: unless a gradient is recorded, the new state reuses
            its memory, since a copy would cost more than a token.
        skip: Weight of the input itself, `(D,)`; none when None.

    Returns:
        `(B, T, D)` in u's dtype, and the state after the last token.

    Raises:
        ValueError: A shape does not fit the state.
    """
    ring = torch_impl.ring_size(kernel.shape[1])
    if state.pending.shape != (u.shape[0], ring, u.shape[2]):
        raise ValueError(
            f"state must have {u.shape[0]} sequences, {u.shape[2]} channels and {kernel.shape[1]} taps, with pending "
            f"of {(u.shape[0], ring, u.shape[2])}; got {tuple(state.pending.shape)}"
        )
    if _is_compiled_step(u):
        y, (pending, inputs, position) = op.online_conv_token(u, kernel, *state), state
        position = (position + 1) % ring
    else:
        y, pending, inputs, position = torch_impl.advance(u, kernel, *state)
    if skip is not None:
        y = y + skip.to(y.dtype) * u.to(y.dtype)
    return y.to(u.dtype), ConvState(pending, inputs, position)


def _is_compiled_step(u: torch.Tensor) -> bool:
    """Whether a graph takes one more token: what is done for it depends on its position, which an op hides."""
    traced = torch.compiler.is_compiling() and not torch.compiler.is_exporting()
    return traced and u.shape[1] == 1 and not torch.is_grad_enabled()
