"""Laplace attention by blocks of queries; the backward recomputes their scores.

Shapes: `B` batch · `T` queries · `S` keys · `H` heads · `K` key dim · `V` value dim · `C` chunk
"""

import math
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from ..precision import compute_dtype, full_precision

_SCORES = 1 << 22
"""Largest number of scores per block of queries."""

_MU = math.sqrt(0.5)
_SIGMA = math.sqrt(0.25 / math.pi)


def laplace(x: Tensor) -> Tensor:
    """Mega's substitute for a softmax: f(x) = (1 + erf((x - mu) / (sigma sqrt(2)))) / 2.

    With mu = sqrt(1/2) and sigma = sqrt(1 / (4 pi)) it has value and slope of relu(x)^2 at mu, and stays between 0
    and 1 (Ma et al. 2022, eq. 17).

    Args:
        x: Any shape, floating.
    """
    return 0.5 * (1 + torch.erf((x - _MU) / (_SIGMA * math.sqrt(2))))


def _chunks(position: Tensor, kept: Tensor | None, chunk_size: int, first: Tensor | None) -> Tensor:
    """Return the number of the chunk of every key, `(B, S)`; chunks begin with a row's first token."""
    if first is None:
        first = position.new_zeros(1) if kept is None else kept.int().argmax(1)
    return torch.div(position - first[:, None], chunk_size, rounding_mode="floor")


def forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    causal: bool,
    attention_mask: Tensor | None,
    chunk_size: int | None,
    first: Tensor | None,
    dropout: float,
) -> Tensor:
    """Compute the op, differentiably."""
    batch, length, heads, _ = query.shape
    keys = key.shape[1]
    past = keys - length
    position = torch.arange(keys, device=query.device)
    kept = None if attention_mask is None else attention_mask.to(torch.bool)
    chunks = None if chunk_size is None else _chunks(position, kept, chunk_size, first)
    reach = keys if chunk_size is None else chunk_size - 1
    rows = max(1, _SCORES // max(1, batch * heads * min(keys, 2 * reach + 1)))
    rows = rows if chunk_size is None else min(rows, chunk_size)

    def attend(q: Tensor, ks: tuple[Tensor, ...], vs: tuple[Tensor, ...], start: int, low: int) -> Tensor:
        k, v = (x[0] if len(x) == 1 else torch.cat(x, dim=1) for x in (ks, vs))
        own = position[past + start : past + start + q.shape[1]]
        others = slice(low, low + k.shape[1])
        seen = torch.ones(1, q.shape[1], k.shape[1], dtype=torch.bool, device=q.device)
        if causal:
            seen = seen & (position[others] <= own[:, None])
        if kept is not None:
            seen = seen & kept[:, None, others]
        if chunks is not None:
            seen = seen & (chunks[:, None, others] == chunks[:, past + start : past + start + q.shape[1], None])
        wide = compute_dtype(q)
        with full_precision(q.device):
            count = seen.sum(-1, keepdim=True).clamp_min(1).to(wide)[:, None]
            scores = q.to(wide).transpose(1, 2) @ k.to(wide).permute(0, 2, 3, 1)
            weights = F.dropout(laplace(scores / count) * seen[:, None], dropout)
            return (weights @ v.to(wide).transpose(1, 2)).transpose(1, 2).to(q.dtype)

    differentiated = torch.is_grad_enabled() and any(x.requires_grad for x in (query, key, value))
    run = partial(checkpoint, attend, use_reentrant=False) if differentiated else attend
    if split := differentiated and chunk_size is not None:
        # the gradient of a slice is as long as all keys; parts of a split share one
        edge = past % rows or rows  # of the first part; the others have as many keys as a block has queries
        sizes = [min(edge, keys), *(min(rows, keys - at) for at in range(edge, keys, rows))]
        parts = [x.split(sizes, dim=1) for x in (key, value)]
    outputs = []
    for start, q in zip(range(0, length, rows), query.split(rows, dim=1), strict=True):
        low, high = max(0, past + start - reach), past + start + q.shape[1] + (0 if causal else reach)
        if split:
            first_part, last_part = ((at - edge) // rows + 1 for at in (low, min(high, keys) - 1))
            low = max(0, edge + (first_part - 1) * rows)
            k, v = (x[first_part : last_part + 1] for x in parts)
        else:
            k, v = ((x[:, low:high],) for x in (key, value))
        outputs.append(run(q, k, v, start, low))
    return torch.cat(outputs, dim=1)
