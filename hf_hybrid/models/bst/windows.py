"""A sequence cut into windows, which are counted from each row's first kept token.

Shapes: B batch · T length · P tokens already read · W window · n windows.
"""

from typing import NamedTuple

import torch
from torch.nn import functional as F


class Place(NamedTuple):
    """Where a stretch of tokens lies: windows are counted from each row's first kept token.

    Attributes:
        mask: `(B, P + T)`, 1 for tokens to keep; all when None.
        past: P.
        first: Index of each row's first kept token, `(B,)`; None where that is the first one everywhere, or where no
            layer asks.
        rows: For each row, where in it the first of these tokens lies, negative before the first kept one; known if a
            layer asks and there are tokens before these.
    """

    mask: torch.Tensor | None
    past: int
    first: torch.Tensor | None
    rows: list[int] | None


def to_windows(x: torch.Tensor, first: torch.Tensor | None, count: int, window: int) -> torch.Tensor:
    """Cut a sequence into windows, the first of which begins at each row's first kept token.

    Args:
        x: `(B, T, ...)`.
        first: Index of each row's first kept token, `(B,)`; 0 when None.
        count: n, enough for all.
        window: W.

    Returns:
        `(B, n, W, ...)`, zeros behind the last token.
    """
    length, size = x.shape[1], count * window
    if first is None:
        padded = F.pad(x, (0, 0) * (x.dim() - 2) + (0, size - length))
    else:
        index = _spread(torch.arange(size, device=x.device) + first[:, None], x)
        padded = x.take_along_dim(index.clamp_max(length - 1), 1).masked_fill(index >= length, 0)
    return padded.unflatten(1, (count, window))


def from_windows(x: torch.Tensor, first: torch.Tensor | None, length: int) -> torch.Tensor:
    """Put windows `(B, n, W, ...)` back into a sequence `(B, T, ...)`, arbitrary before the first kept token."""
    x = x.flatten(1, 2)
    if first is None:
        return x[:, :length]
    index = _spread(torch.arange(length, device=x.device) - first[:, None], x)
    return x.take_along_dim(index.clamp_min(0), 1)


def window_of(x: torch.Tensor, index: int | torch.Tensor) -> torch.Tensor:
    """One window's part for each row, `(B, S, H, K)`, of `(B, n, S, H, K)`."""
    if isinstance(index, int):
        return x[:, index].clone()  # a cache that kept a view would keep all windows
    return x.take_along_dim(index.expand(-1, -1, *x.shape[2:]), 1)[:, 0]


def _spread(index: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Make `(B, T)` broadcast over the dimensions that follow in another tensor."""
    return index.view(*index.shape, *[1] * (like.dim() - 2))
