"""Local attention as dense masked attention: the specification of the op, quadratic in T.

Shapes: `B` batch · `T` length · `H` heads · `K` key dim · `V` value dim.
"""

import torch
from torch import Tensor

from ..packed import bounds
from ..precision import compute_dtype


def local_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    bias: Tensor | None = None,
    radius: int | None = None,
    chunk_size: int | None = None,
    causal: bool = False,
    attention_mask: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    scale: float | None = None,
    dropout: float = 0.0,
) -> Tensor:
    """Compute `hf_hybrid.kernels.local_attention` with all `T * T` scores, without checks."""
    if cu_seqlens is not None:
        outputs = []
        for at in bounds(cu_seqlens, query.shape[1]):
            own = None if attention_mask is None else attention_mask[:, at]
            outputs.append(
                local_attention(
                    query[:, at], key[:, at], value[:, at], bias=bias, radius=radius, chunk_size=chunk_size,
                    causal=causal, attention_mask=own, scale=scale, dropout=dropout,
                ) if at.start < at.stop else value[:, at]
            )  # fmt: skip
        return torch.cat(outputs, dim=1)
    batch, length, _, width = query.shape
    wide = compute_dtype(query)
    q, k, v = query.to(wide), key.to(wide), value.to(wide)
    position = torch.arange(length, device=query.device)
    offset = position[None, :] - position[:, None]  # key - query, (T, T)
    kept = torch.ones(batch, length, dtype=torch.bool, device=query.device)
    if attention_mask is not None:
        kept = attention_mask != 0

    if chunk_size is not None:
        first = kept.int().argmax(1, keepdim=True)
        chunk = torch.div(position - first, chunk_size, rounding_mode="floor")
        visible = chunk[:, :, None] == chunk[:, None, :]
        reach = chunk_size - 1
    else:
        assert radius is not None
        visible = (offset.abs() <= radius).expand(batch, -1, -1)
        reach = radius
    if causal:
        visible = visible & (offset <= 0)
    visible = visible & kept[:, None, :] & kept[:, :, None]

    scores = torch.einsum("bthk,bshk->bhts", q, k) * (width**-0.5 if scale is None else scale)
    if bias is not None:
        column = (offset + reach).clamp(0, bias.shape[1] - 1)  # clamped entries are hidden
        scores = scores + bias.to(wide)[:, column]
    hidden = ~visible[:, None]
    weights = scores.masked_fill(hidden, torch.finfo(wide).min).softmax(-1).masked_fill(hidden, 0.0)
    weights = torch.nn.functional.dropout(weights, dropout)
    return torch.einsum("bhts,bshv->bthv", weights, v).to(query.dtype)
