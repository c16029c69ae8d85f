"""A decoded token's attention to one segment and its state in plain torch, differentiable.

Shapes: `B` rows of the target · `D` documents · `H` heads · `N` slots · `S` keys of a slot · `K` key dim · `V` value
dim.
"""

import torch
from torch import Tensor

from ...precision import compute_dtype


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
        return x.flatten(0, 2).index_select(0, flat).unflatten(0, index.shape)

    segmented = recurrent = None
    if key is not None and value is not None:
        scores = torch.matmul(q, read(key).mT)
        hidden = None if visible is None else visible.logical_not()[:, None, None]
        if hidden is not None:
            scores = scores.masked_fill(hidden, torch.finfo(scores.dtype).min)
        weights = scores.softmax(-1, dtype=compute_dtype(scores)).to(value.dtype)
        if hidden is not None:
            weights = weights.masked_fill(hidden, 0)  # a segment may have no visible key
        segmented = torch.matmul(weights, read(value))
    if state is not None:
        recurrent = torch.matmul(q, read(state))
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
