"""One decoded token's local attention, row by row over its visible keys: the specification of the op.

B batch · S cached keys · H heads · K key dim · V value dim
"""

import torch
from torch import Tensor

from ...precision import compute_dtype


def local_attention_step(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    query_start: int | Tensor,
    key_start: int | Tensor = 0,
    bias: Tensor | None = None,
    radius: int | None = None,
    chunk_size: int | None = None,
    include_self: bool = True,
    attention_mask: Tensor | None = None,
    scale: float | None = None,
) -> Tensor:
    """Compute `hf_hybrid.kernels.local_attention_step`, without checks."""
    wide = compute_dtype(query)
    t, first = int(query_start), int(key_start)
    reach = chunk_size - 1 if chunk_size is not None else radius or 0
    output = torch.zeros(*query.shape[:3], value.shape[3], dtype=wide, device=query.device)
    for row in range(query.shape[0]):
        kept = [True] * (t + 1)
        if attention_mask is not None:
            given = (attention_mask[row] != 0).tolist()
            kept = [given[min(j, len(given) - 1)] for j in range(t + 1)]
        low = t - reach
        if chunk_size is not None and True in kept:
            origin = kept.index(True)
            low = origin + (t - origin) // chunk_size * chunk_size
        last = min(t if include_self else t - 1, first + key.shape[1] - 1)
        seen = [j for j in range(max(low, first, 0), last + 1) if kept[j]]
        if not seen:
            continue
        own = [j - first for j in seen]
        q, k, v = query[row, 0].to(wide), key[row, own].to(wide), value[row, own].to(wide)
        scores = torch.einsum("hk,jhk->hj", q, k) * (query.shape[3] ** -0.5 if scale is None else scale)
        if bias is not None:
            scores = scores + bias[:, [j - t + reach for j in seen]].to(wide)
        output[row, 0] = torch.einsum("hj,jhv->hv", scores.softmax(-1), v)
    return output.to(query.dtype)
