"""SRformer's recurrent attention as loops: the specification of `hf_hybrid.kernels.segment_recurrence`.

`segment_recurrence` loops over visited segments. `cross_attention` is Algorithm 1 of the paper: complete
cross-attention, token by token; its recurrent part is ``q R / norm(K)`` with the op's R, which the tests compare.

Shapes: `B` batch · `H` heads · `T` target length · `L` source length · `M` segments · `S` segment size · `K` key dim ·
`V` value dim · `N` visited segments.
"""

import torch
from torch import Tensor

from ..precision import compute_dtype

SURROGATE_SLOPE = 0.3


def segment_recurrence(
    key: Tensor,
    value: Tensor,
    *,
    weight: Tensor | None = None,
    leak: Tensor | None = None,
    threshold: Tensor | None = None,
    visited: Tensor | None = None,
    source: str = "complement",
    clamp: float | None = None,
    surrogate: bool = False,
) -> Tensor:
    """Compute `hf_hybrid.kernels.segment_recurrence` segment by segment, without checks."""
    wide = compute_dtype(key)
    k, v = key.to(wide), value.to(wide)
    batch, _, number = k.shape[:3]
    if visited is None:
        visited = torch.arange(number, device=k.device)[None]
    whole = _clamped(torch.einsum("bhmsk,bhmsv->bhkv", k, v), clamp)
    memory = torch.zeros_like(whole)
    states = []
    for index in visited.expand(batch, -1).unbind(1):
        rows = torch.arange(batch, device=k.device)
        own = _clamped(torch.einsum("bhsk,bhsv->bhkv", k[rows, :, index], v[rows, :, index]), clamp)
        state = own if source == "segment" else whole - own
        if weight is not None and leak is not None and threshold is not None:
            state, memory = raf(state, memory, weight.to(wide), leak.to(wide), threshold.to(wide), surrogate)
        states.append(state)
    return torch.stack(states, dim=2).to(key.dtype)


def raf(
    state: Tensor, memory: Tensor, weight: Tensor, leak: Tensor, threshold: Tensor, surrogate: bool = False
) -> tuple[Tensor, Tensor]:
    """Advance the RAF neurons by one step (appendix A.2); return output and memory."""
    memory = leak * memory + state @ weight.T
    y = memory / threshold - 1
    fired = (y > 0).to(y.dtype)
    if surrogate:
        slope = SURROGATE_SLOPE * (1 - y.abs()).clamp_min(0)
        fired = fired + slope.detach() * (y - y.detach())
    return y.relu(), memory - threshold * fired


def cross_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    segment_size: int,
    horizon: int,
    weight: Tensor,
    leak: Tensor,
    threshold: Tensor,
    clamp: float | None = None,
) -> Tensor:
    """Compute Algorithm 1: segmented recurrent attention of a target's tokens to a batch of unpadded sources.

    Token t reads segment ``min(floor(t M / horizon), M - 1)``. Scores are not scaled (T5); scale the query for others.

    Args:
        query: `(B, T, H, K)`.
        key: `(B, L, H, K)`.
        value: `(B, L, H, V)`.
        segment_size: S.
        horizon: q of the algorithm, the length of the target.
        weight: `(V, V)` of the RAF neurons.
        leak: One number.
        threshold: One number.
        clamp: Bound on the products' entries, see `segment_recurrence`.

    Returns:
        `(B, T, H, V)`.
    """
    segments = list(zip(key.split(segment_size, dim=1), value.split(segment_size, dim=1), strict=True))
    norm = key.square().sum(1).sqrt()  # norm(K), per feature
    whole = _clamped(torch.einsum("blhk,blhv->bhkv", key, value), clamp)
    memory, state, previous = torch.zeros_like(whole), torch.zeros_like(whole), -1
    outputs = []
    for t, q in enumerate(query.unbind(1)):
        index = min(t * len(segments) // horizon, len(segments) - 1)
        k, v = segments[index]
        weights = torch.einsum("bhk,bshk->bhs", q, k).softmax(-1)
        segmented = torch.einsum("bhs,bshv->bhv", weights, v)
        if index != previous:
            own = _clamped(torch.einsum("bshk,bshv->bhkv", k, v), clamp)
            state, memory = raf(whole - own, memory, weight, leak, threshold)
            previous = index
        outputs.append(segmented + torch.einsum("bhk,bhkv->bhv", q, state) / norm)
    return torch.stack(outputs, dim=1)


def _clamped(product: Tensor, clamp: float | None) -> Tensor:
    return product if clamp is None else product.clamp(-clamp, clamp)
