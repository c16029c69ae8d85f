"""Attention of a short divided sequence to a long one, both divided: a decoder's to the encoder's output.

B batch · T length of the queries, T_r of this process · S_r keys of this process · H heads · K key dim · V value dim ·
R processes
"""

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from ..kernels.precision import compute_dtype, full_precision
from .collectives import fetch, nothing, regroup
from .shards import Shards, Span

BLOCK = 1024
"""Keys whose weights are computed at a time; the backward computes them again."""


def cross_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    shards: Shards,
    source: Shards,
    *,
    attention_mask: Tensor | None = None,
    scale: float | None = None,
    dropout: float = 0.0,
) -> Tensor:
    """Attend from own queries to the keys of all processes, which stay where they are.

    Every process gets all queries, weighs its own values for them, and sends each query's sums to the process that has
    it: numerator and denominator of the softmax, and the largest score, by which sums of several processes are brought
    to one scale. O(T S_r) operations on each process; weights take O(T) numbers, for `BLOCK` keys at a time.

    Each process sends B T_r H K numbers to each other one, then B (T - T_r) H (V + 2) in float32 or float64; the
    backward as many. To divide keys and values by heads would take B S_r H (K + V) (R - 1) / R: more, unless the
    queries are about as many as the keys.

    Args:
        query: `(B, T_r, H, K)`.
        key: `(B, S_r, H, K)`.
        value: `(B, S_r, H, V)`.
        shards: The layout of the queries.
        source: The layout of the keys.
        attention_mask: `(B, S_r)`, nonzero = keep.
        scale: Factor on the scores; K^-1/2 when None.
        dropout: Probability of dropping a weight; each process draws those of its own keys.

    Returns:
        `(B, T_r, H, V)` in query's dtype. Differentiable once.

    Raises:
        ValueError: A shape does not fit, or sequences are packed.
    """
    shards.check(query, "query")
    for name, x in (("key", key), ("value", value), ("attention_mask", attention_mask)):
        if x is not None:
            source.check(x, name)
    if shards.ends is not None or source.ends is not None:
        raise ValueError("sequences must not be packed in cross-attention, which reads pairs")
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    (queries,) = fetch(shards, [Span(0, shards.length)] * shards.size, query)
    sums, top = _weigh(queries * scale, key, value, attention_mask, dropout)
    parts = [x[None].split(shards.lengths, dim=2) for x in (sums, top)]
    sums, top = regroup(shards, parts, 0, [1] * shards.size)
    top = top.detach()
    sums = (sums * (top - top.amax(0)).exp()).sum(0)
    return (sums[..., :-1] / sums[..., -1:]).to(query.dtype)


def _weigh(
    queries: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, dropout: float
) -> tuple[Tensor, Tensor]:
    """Return sums over own keys of weighted values, and of weights last, `(B, T, H, V + 1)`, and the largest score."""
    wide = compute_dtype(queries)
    shape = queries.shape[:3]
    sums = nothing((*shape, value.shape[-1] + 1), queries.new_empty(0, dtype=wide), queries, key, value)
    top = sums.new_full((*shape, 1), torch.finfo(wide).min)
    kept = None if attention_mask is None else attention_mask.to(torch.bool)
    for start in range(0, key.shape[1], BLOCK):
        block = slice(start, start + BLOCK)
        mask = None if kept is None else kept[:, block]
        given = (queries, key[:, block], value[:, block], mask, dropout, wide)
        part, high = checkpoint(_weigh_block, *given, use_reentrant=False, preserve_rng_state=dropout > 0)
        higher = torch.maximum(top, high)
        sums = sums * (top - higher).exp() + part * (high - higher).exp()
        top = higher
    return sums, top


def _weigh_block(
    queries: Tensor, key: Tensor, value: Tensor, kept: Tensor | None, dropout: float, wide: torch.dtype
) -> tuple[Tensor, Tensor]:
    with full_precision(queries.device):
        scores = torch.einsum("bthk,bshk->bths", queries.to(wide), key.to(wide))
        if kept is not None:
            scores = scores.masked_fill(~kept[:, None, None], torch.finfo(wide).min)
        top = scores.detach().amax(-1, keepdim=True)
        weights = (scores - top).exp()
        weighed = torch.einsum("bths,bshv->bthv", F.dropout(weights, dropout), value.to(wide))
        return torch.cat([weighed, weights.sum(-1, keepdim=True)], dim=-1), top
