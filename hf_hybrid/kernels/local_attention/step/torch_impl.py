"""One decoded token's local attention in plain torch: the visible keys, or all cached ones under a mask.

B batch · S cached keys · H heads · K key dim · V value dim
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from ..settings import StepSettings


def forward(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, mask: Tensor | None, query_base: Tensor | None,
    key_base: Tensor | None, settings: StepSettings,
) -> Tensor:  # fmt: skip
    """Compute `local_attention_step`, `(B, 1, H, V)`; a position is the sum of its number and its tensor, if any."""
    if mask is None and query_base is None and key_base is None and not torch.compiler.is_compiling():
        return _over_visible(query, key, value, bias, settings)
    query_start, key_start, radius, chunk_size, include_self, scale = settings
    at: int | Tensor = query_start if query_base is None else query_base.reshape(()) + query_start
    first: int | Tensor = key_start if key_base is None else key_base.reshape(()) + key_start
    position = torch.arange(key.shape[1], device=query.device) + first
    offset = position - at
    visible = (offset <= 0 if include_self else offset < 0)[None]
    kept = None if mask is None else mask[:, position.clamp_max(mask.shape[1] - 1)] != 0
    if chunk_size is not None:
        origin: int | Tensor = 0 if mask is None else (mask != 0).int().argmax(1, keepdim=True)
        since: Tensor | int = at - origin
        start = since // chunk_size * chunk_size + origin
        visible = visible & (position >= start)
        reach = chunk_size - 1
    else:
        assert radius is not None
        visible = visible & (offset >= -radius)
        reach = radius
    if kept is not None:
        visible = visible & kept
    own = query.new_zeros(1, 1) if bias is None else bias[:, (offset + reach).clamp(0, reach)].to(query.dtype)
    # if no key is visible, a mean instead of NaN
    added = torch.where(visible[:, None], own, torch.finfo(query.dtype).min)
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    output = F.scaled_dot_product_attention(q, k, v, added[:, :, None], scale=scale).transpose(1, 2)
    return output.masked_fill(~visible.any(1)[:, None, None, None], 0.0)


def _over_visible(query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, settings: StepSettings) -> Tensor:
    """`forward` without a mask, for positions that the host knows: it reads no other keys."""
    query_start, key_start, radius, chunk_size, include_self, scale = settings
    at = query_start - key_start
    reach = query_start % chunk_size if chunk_size is not None else radius
    assert reach is not None
    start, stop = max(0, at - reach), min(key.shape[1], at + include_self)
    if start >= stop:
        return query.new_zeros(*query.shape[:3], value.shape[3])
    added = None
    if bias is not None:
        own = bias.shape[1] - 1 - at  # column of the first key
        added = bias[:, None, start + own : stop + own].to(query.dtype)[None]
    q, k, v = query.transpose(1, 2), key[:, start:stop].transpose(1, 2), value[:, start:stop].transpose(1, 2)
    return F.scaled_dot_product_attention(q, k, v, added, scale=scale).transpose(1, 2)
