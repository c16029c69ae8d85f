"""Linear attention as a matrix of weights and as a recurrence: the specification of the op.

B batch · T length · H heads · K key dim · V value dim
"""

import torch
from torch import Tensor

from ..packed import bounds
from ..precision import compute_dtype


def linear_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    causal: bool = True,
    norm_eps: float | None = None,
    gate: Tensor | None = None,
    state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Compute `hf_hybrid.kernels.linear_attention` with all T^2 weights, without checks."""
    if norm_eps is not None:
        output, last = linear_attention(query, key, value, causal=causal, state=state, cu_seqlens=cu_seqlens)
        output = output / torch.sqrt(output.square().mean(-1, keepdim=True) + norm_eps)
        gated = output if gate is None else output * torch.nn.functional.silu(gate.to(output.dtype))
        return gated.to(query.dtype), last
    if cu_seqlens is not None:
        parts = []
        for n, at in enumerate(bounds(cu_seqlens, query.shape[1])):
            own = None if state is None else state[n : n + 1]
            parts.append(linear_attention(query[:, at], key[:, at], value[:, at], causal=causal, state=own))
        last = torch.cat([after for _, after in parts if after is not None]) if causal else None
        return torch.cat([output for output, _ in parts], dim=1), last
    wide = compute_dtype(query)
    query, key, value = query.to(wide), key.to(wide), value.to(wide)
    weights = torch.einsum("bthk,bshk->bhts", query, key)
    if not causal:
        return torch.einsum("bhts,bshv->bthv", weights, value), None
    output = torch.einsum("bhts,bshv->bthv", weights.tril(), value)
    last = torch.einsum("bthk,bthv->bhkv", key, value)
    if state is None:
        return output, last
    state = state.to(wide)
    return output + torch.einsum("bthk,bhkv->bthv", query, state), last + state


def recurrent(query: Tensor, key: Tensor, value: Tensor, *, state: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Compute the causal form token by token: S <- S + k^T v, then o = q S."""
    wide = compute_dtype(query)
    query, key, value = query.to(wide), key.to(wide), value.to(wide)
    batch, _, heads, width = query.shape
    S = query.new_zeros(batch, heads, width, value.shape[3]) if state is None else state.to(wide)
    outputs = []
    for q, k, v in zip(query.unbind(1), key.unbind(1), value.unbind(1), strict=True):
        S = S + k[..., :, None] * v[..., None, :]
        outputs.append((q[..., None, :] @ S).squeeze(-2))
    return torch.stack(outputs, dim=1), S
