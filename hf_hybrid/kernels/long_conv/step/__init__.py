"""A causal convolution carried on token by token.

B batch · T length · T_k taps · D width · P ring, a power of two and at least T_k - 1
"""

from typing import NamedTuple

import torch

from . import torch_impl

__all__ = ["ConvState", "online_conv", "start_online_conv"]


class ConvState(NamedTuple):
    """What a causal convolution remembers of its past: numbers of two rings, whatever was read so far.

    Attributes:
        pending: What earlier inputs contribute to the outputs of the ring, `(B, P, D)`, float32 or float64.
        inputs: The inputs of the ring so far, `(B, P, D)`, alike; those from `position` on mean nothing.
        position: Number of inputs in the ring, below P.
    """

    pending: torch.Tensor
    inputs: torch.Tensor
    position: int


def start_online_conv(u: torch.Tensor, kernel: torch.Tensor) -> ConvState:
    """The state after a prompt with nothing before it.

    Args:
        u: The prompt, `(B, T, D)`, any floating dtype; T may be 0.
        kernel: Taps at lag 0, 1, 2, ..., `(D, T_k)`, or `(G, T_k)` where G divides D, as for `long_conv`.
    """
    return ConvState(*torch_impl.start(u, kernel), 0)


def online_conv(
    u: torch.Tensor, kernel: torch.Tensor, state: ConvState, *, skip: torch.Tensor | None = None
) -> tuple[torch.Tensor, ConvState]:
    """Convolve the next tokens of a sequence, of which a state remembers what came before.

    Outputs are those of `long_conv` over the whole sequence, up to rounding.

    Args:
        u: `(B, T, D)`, any floating dtype.
        kernel: The taps that the state was made with.
        state: The state before the first of these tokens. It is used up: unless a gradient is recorded, its memory
            becomes that of the new one, since a copy would cost more than a token does.
        skip: Weight of the input itself, `(D,)`; none when None.

    Returns:
        `(B, T, D)` in u's dtype, and the state after the last token.

    Raises:
        ValueError: A shape does not fit the state.
    """
    ring = torch_impl.ring_size(kernel.shape[1])
    if state.pending.shape != (u.shape[0], ring, u.shape[2]):
        raise ValueError(
            f"state must be of {u.shape[0]} sequences, {u.shape[2]} channels and {kernel.shape[1]} taps, with a "
            f"pending {(u.shape[0], ring, u.shape[2])}; got {tuple(state.pending.shape)}"
        )
    y, pending, inputs, position = torch_impl.advance(u, kernel, *state)
    if skip is not None:
        y = y + skip.to(y.dtype) * u.to(y.dtype)
    return y.to(u.dtype), ConvState(pending, inputs, position)
