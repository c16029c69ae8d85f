"""Windows of a sequence, counted from each row's first kept token.

Shapes: B batch · T length · P tokens already read · W window · n windows.
"""

from typing import NamedTuple

import torch
from torch.nn import functional as F

from ...context_parallel import Shards


class Span(NamedTuple):
    """Position of consecutive tokens in a batch of sequences.

    Attributes:
        attention_mask: `(B, P + T)`, 1 = keep; None keeps all.
        past: P.
        first: Index of each row's first kept token, `(B,)`; None if it is 0 in all rows or no layer needs it.
        starts: Position of the first of these tokens in each row, counted from the row's first kept token, so negative
            before it; None at the start of a sequence or if no layer needs it.
        cu_seqlens: Bounds of the sequences in a packed batch, see `packing`; else None.
        shards: The layout of a divided sequence, of which these are own tokens, see `packing`; else None.
    """

    attention_mask: torch.Tensor | None
    past: int
    first: torch.Tensor | None
    starts: list[int] | None
    cu_seqlens: torch.Tensor | None = None
    shards: Shards | None = None


def to_windows(x: torch.Tensor, first: torch.Tensor | None, count: int, window: int) -> torch.Tensor:
    """Cut a sequence into windows that start at each row's first kept token.

    Args:
        x: `(B, T, ...)`.
        first: Index of each row's first kept token, `(B,)`; 0 when None.
        count: n, at least the number of windows.
        window: W.

    Returns:
        `(B, n, W, ...)`, zeros after the last token.
    """
    length, size = x.shape[1], count * window
    if first is None:
        padded = F.pad(x, (0, 0) * (x.dim() - 2) + (0, size - length))
    else:
        index = _spread(torch.arange(size, device=x.device) + first[:, None], x)
        padded = x.take_along_dim(index.clamp_max(length - 1), 1).masked_fill(index >= length, 0)
    return padded.unflatten(1, (count, window))


def from_windows(x: torch.Tensor, first: torch.Tensor | None, length: int) -> torch.Tensor:
    """Join windows `(B, n, W, ...)` to a sequence `(B, T, ...)`, arbitrary before the first kept token."""
    x = x.flatten(1, 2)
    if first is None:
        return x[:, :length]
    index = _spread(torch.arange(length, device=x.device) - first[:, None], x)
    return x.take_along_dim(index.clamp_min(0), 1)


def window_of(x: torch.Tensor, index: int | torch.Tensor) -> torch.Tensor:
    """Select one window per row of `(B, n, S, H, K)`, `(B, S, H, K)`."""
    if isinstance(index, int):
        return x[:, index].clone()  # a view would keep all windows in memory
    return x.take_along_dim(index.expand(-1, -1, *x.shape[2:]), 1)[:, 0]


def _spread(index: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Append dimensions of size 1 to `(B, T)` until it broadcasts with another tensor."""
    return index.view(*index.shape, *[1] * (like.dim() - 2))
