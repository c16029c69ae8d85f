"""A decoded token's attention to one segment and its state in plain torch, differentiable.

Shapes: `B` rows of the target · `D` documents · `H` heads · `N` slots · `S` keys of a slot · `K` key dim · `V` value
dim.
"""

import torch
from torch import Tensor
from torch.nn import functional as F


def forward(
    query: Tensor,
    key: Tensor | None,
    value: Tensor | None,
    state: Tensor | None,
    index: Tensor,
    visible: Tensor | None,
    norm: Tensor | None,
    documents: Tensor | None,
    sigma: Tensor | None,
    scale: float,
) -> Tensor:
    """Compute `segment_step`, without checks."""
    flat = index.flatten()
    q = (query if scale == 1 else query * scale)[:, :, None]

    def read(x: Tensor) -> Tensor:
        """Return the slots of all rows and heads, `(B H, ...)`."""
        return x.flatten(0, 2).index_select(0, flat)

    segmented = recurrent = None
    if key is not None and value is not None:
        keys, values = (read(x).unflatten(0, index.shape) for x in (key, value))
        if visible is None:
            segmented = F.scaled_dot_product_attention(q, keys, values, scale=1.0)
        else:
            lowest = torch.finfo(q.dtype).min
            mask = torch.zeros_like(visible, dtype=q.dtype).masked_fill_(~visible, lowest)[:, None, None]
            segmented = F.scaled_dot_product_attention(q, keys, values, mask, scale=1.0)
            # a segment may have no visible key, and then a mean instead of NaN
            segmented = segmented.masked_fill(~visible.any(1)[:, None, None, None], 0)
    if state is not None:
        recurrent = torch.bmm(q.flatten(0, 1), read(state)).unflatten(0, index.shape)
        if norm is not None:
            recurrent = recurrent / (norm if documents is None else norm.index_select(0, documents))
    if segmented is None or recurrent is None:
        only = recurrent if segmented is None else segmented
        assert only is not None
        return only[:, :, 0]
    if sigma is not None:
        share = sigma.to(segmented.dtype)
        return (share * segmented + (1 - share) * recurrent)[:, :, 0]
    return (segmented + recurrent)[:, :, 0]
