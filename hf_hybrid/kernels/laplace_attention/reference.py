"""Laplace attention with all weights at once: the specification of `hf_hybrid.kernels.laplace_attention`.

Shapes: `B` batch · `T` queries · `S` keys · `H` heads · `K` key dim · `V` value dim
"""

import math

import torch
from torch import Tensor

from ..precision import compute_dtype


def laplace_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    causal: bool = False,
    attention_mask: Tensor | None = None,
    chunk_size: int | None = None,
    first: Tensor | None = None,
    dropout: float = 0.0,
) -> Tensor:
    """Compute `hf_hybrid.kernels.laplace_attention` without checks."""
    wide = compute_dtype(query)
    batch, length, keys = query.shape[0], query.shape[1], key.shape[1]
    position = torch.arange(keys, device=query.device)
    own = position[keys - length :]
    seen = torch.ones(batch, length, keys, dtype=torch.bool, device=query.device)
    if causal:
        seen &= position <= own[:, None]
    if attention_mask is not None:
        seen &= attention_mask.bool()[:, None]
    if chunk_size is not None:
        if first is None:
            first = torch.zeros_like(position[:1]) if attention_mask is None else attention_mask.bool().int().argmax(1)
        chunk = torch.div(position - first[:, None], chunk_size, rounding_mode="floor")
        seen &= chunk[:, None, :] == chunk[:, keys - length :, None]
    scores = torch.einsum("bthk,bshk->bths", query.to(wide), key.to(wide)) / seen.sum(-1).clamp_min(1)[..., None, None]
    weights = 0.5 * (1 + torch.erf((scores - math.sqrt(0.5)) / math.sqrt(0.5 / math.pi)))
    weights = torch.nn.functional.dropout(weights * seen[:, :, None], dropout)
    return torch.einsum("bths,bshv->bthv", weights, value.to(wide)).to(query.dtype)
