"""A causal convolution continued token by token.

B batch · T length · T_k taps · D width · R ring, a power of two · P whole ring, at least T_k - 1
"""

import math
from typing import NamedTuple

import torch
from torch.nn import functional as F

from . import op, torch_impl

__all__ = ["ConvState", "online_conv", "start_online_conv"]


class ConvState(NamedTuple):
    """State of a causal convolution: two rings that grow up to P, to at most four times the tokens so far, or 32.

    Attributes:
        pending: Contribution of earlier inputs to the outputs of the ring, `(B, R, D)`, float32 or float64.
        inputs: The last R inputs, `(B, R, D)`, same dtype: those before `position`, which follow those from it on.
        position: Where the next input goes, below R.
        whole: P, to which the rings grow.
        has_room: Whether the rings have their last size for the tokens to come, as compiled steps need.
    """

    pending: torch.Tensor
    inputs: torch.Tensor
    position: int
    whole: int
    has_room: bool = False

    def grown(self, tokens: float = math.inf) -> "ConvState":
        """Return the same state with rings that need not grow for as many more tokens."""
        size, ring = self.whole, self.pending.shape[1]
        while size > ring and size // 2 > self.position + tokens:
            size //= 2
        pending, inputs = (F.pad(x, (0, 0, 0, size - ring)) for x in (self.pending, self.inputs))
        return ConvState(pending, inputs, self.position, self.whole, has_room=True)


def start_online_conv(u: torch.Tensor, kernel: torch.Tensor) -> ConvState:
    """Return the state after a prompt.

    Args:
        u: The prompt, `(B, T, D)`, any floating dtype; T may be 0.
        kernel: Taps at lag 0, 1, 2, ..., `(D, T_k)`, or `(G, T_k)` where G divides D, see `long_conv`.
    """
    return ConvState(*torch_impl.start(u, kernel), torch_impl.ring_size(kernel.shape[1]))


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
    whole = torch_impl.ring_size(kernel.shape[1])
    sizes = (*state.pending.shape[::2], state.whole)
    if sizes != (u.shape[0], u.shape[2], whole):
        raise ValueError(
            f"state must have {u.shape[0]} sequences, {u.shape[2]} channels and rings of up to {whole} places for "
            f"{kernel.shape[1]} taps; got {sizes[0]}, {sizes[1]} and {sizes[2]}"
        )
    if torch.compiler.is_compiling() and u.shape[1] == 1 and not state.has_room:
        state = state.grown()
    pending, inputs, position = state[:3]
    if _is_compiled_step(u):
        y = op.online_conv_token(u, kernel, pending, inputs, position)
        position = (position + 1) % whole
    else:
        y, pending, inputs, position = torch_impl.advance(u, kernel, pending, inputs, position)
    if skip is not None:
        y = y + skip.to(y.dtype) * u.to(y.dtype)
    return y.to(u.dtype), state._replace(pending=pending, inputs=inputs, position=position)


def _is_compiled_step(u: torch.Tensor) -> bool:
    """Whether a graph takes one more token: what is done for it depends on its position, which an op hides."""
    traced = torch.compiler.is_compiling() and not torch.compiler.is_exporting()
    return traced and u.shape[1] == 1 and not torch.is_grad_enabled()
