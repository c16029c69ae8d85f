"""Softmax attention within a window or a chunk, with a relative bias: linear in T in time and memory.

B batch · T length · H heads · K key dim · V value dim
"""

import math

import torch
from torch import Tensor

from ..checks import check_devices, check_dtypes
from ..dispatch import exports_to_onnx
from ..packed import check_cu_seqlens
from . import op, reference
from .settings import check_neighbourhood
from .step import local_attention_step

__all__ = ["local_attention", "local_attention_step"]


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
    backend: str = "auto",
) -> Tensor:
    """Attend from every token to its neighbourhood, a sliding window or the token's chunk.

        o[t] = sum_{j in N(t)} softmax_j(scale * q[t].k[j] + b[j - t]) v[j]
        N(t) = {j : |j - t| <= radius}                              (SPADE, section 3.2, window attention)
        N(t) = {j : floor(j / chunk_size) = floor(t / chunk_size)}  (SPADE, section 3.2, chunk attention)

    restricted to kept keys, and to j <= t when causal; b is T5's relative position bias (section 2.1), one number per
    offset and head. Time and memory are O(T * neighbourhood), forward and backward. The backward pass stores the
    inputs, the output, which a following projection stores anyway, and one number per query.

    Args:
        query: `(B, T, H, K)`, float64, float32, bfloat16 or float16.
        key: `(B, T, H, K)` in query's dtype.
        value: `(B, T, H, V)` in query's dtype.
        bias: Added to the scores by offset, `(H, 2 * reach + 1)`, or `(H, reach + 1)` when causal, with reach = radius
            or chunk_size - 1; column i holds key - query = i - reach. Prefer float32; its gradient is accumulated in
            float32 and bit-identical between runs.
        radius: Tokens that a query sees on each side; 0 or more, may exceed T. Excludes `chunk_size`.
        chunk_size: Tokens per chunk; 1 or more, may exceed T. The grid starts at each row's first kept token, so that
            left padding does not move it. Excludes `radius`.
        causal: Whether to hide later keys.
        attention_mask: `(B, T)`, bool, integer or float, nonzero = keep. Output and gradients are exactly 0 at masked
            tokens.
        cu_seqlens: Bounds of N sequences packed into one row, `(N + 1,)` of int32 or int64, see `kernels.packed`. B is
            1, and the result is that of each sequence alone, with its own dropout mask. The torch backend reads the
            bounds on the host.
        scale: Factor on the dot products; `K ** -0.5` when None. T5 uses 1.
        dropout: Probability of dropping an attention weight, at least 0 and below 1, in steps of 2**-16; the others
            are scaled up. One draw of torch's global CPU generator determines the mask, differently on torch and on
            Triton.
        backend: `"auto"`, `"torch"` or `"triton"`, see `hf_hybrid.kernels.dispatch`.

    Returns:
        `(B, T, H, V)` in query's dtype; scores, softmax and sums in float32 (float64 for float64). Differentiable
        once.

    Raises:
        ValueError: A shape, dtype or number does not fit; the message names the argument, its value and the rule.
    """
    _check(query, key, value, bias, radius, chunk_size, causal, attention_mask, cu_seqlens, scale, dropout)
    settings = (radius, chunk_size, causal, query.shape[-1] ** -0.5 if scale is None else float(scale), float(dropout))
    mask = None if attention_mask is None else attention_mask != 0
    return _run(query, key, value, bias, mask, cu_seqlens, settings, backend)


def _run(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None,
    mask: Tensor | None,
    cu_seqlens: Tensor | None,
    settings: tuple[int | None, int | None, bool, float, float],
    backend: str,
) -> Tensor:
    radius, chunk_size, causal, scale, dropout = settings
    if exports_to_onnx():
        return reference.local_attention(
            query,
            key,
            value,
            bias=bias,
            radius=radius,
            chunk_size=chunk_size,
            causal=causal,
            attention_mask=mask,
            scale=scale,
            dropout=dropout,
        )
    # the only draw from the global generator, so that checkpointing, which restores it, restores the mask
    seed = torch.randint(2**63 - 1, (), dtype=torch.int64, device="cpu") if dropout > 0 else None
    return op.local_attention(query, key, value, bias, mask, seed, cu_seqlens, *settings, backend)[0]


def _check(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None,
    radius: int | None,
    chunk_size: int | None,
    causal: bool,
    attention_mask: Tensor | None,
    cu_seqlens: Tensor | None,
    scale: float | None,
    dropout: float,
) -> None:
    # Messages are formatted only when raised: torch.compile cannot format a symbolic number.
    if query.dim() != 4:
        raise ValueError(f"query must have shape (B, T, H, K); got {tuple(query.shape)}")
    if query.shape[1] == 0:
        raise ValueError(f"query must hold at least one token (T >= 1); got shape {tuple(query.shape)}")
    if not query.is_floating_point():
        raise ValueError(f"query must be of a floating dtype; got {query.dtype}")
    if key.shape != query.shape:
        raise ValueError(f"key must have query's shape {tuple(query.shape)}; got {tuple(key.shape)}")
    if value.dim() != 4 or value.shape[:3] != query.shape[:3]:
        raise ValueError(
            f"value must have shape (B, T, H, V) with query's (B, T, H) = {tuple(query.shape[:3])}; "
            f"got {tuple(value.shape)}"
        )
    check_dtypes(query, key=key, value=value)
    check_neighbourhood(radius, chunk_size)
    if not 0 <= dropout < 1:
        raise ValueError(f"dropout must be at least 0 and below 1; got {dropout}")
    if bias is not None:
        reach = radius if radius is not None else chunk_size - 1 if chunk_size is not None else 0
        columns, rule = (reach + 1, "reach + 1") if causal else (2 * reach + 1, "2 * reach + 1")
        if bias.dim() != 2 or bias.shape[0] != query.shape[2] or bias.shape[1] != columns:
            raise ValueError(
                f"bias must have shape (H, {rule}) = {(query.shape[2], columns)} for reach {reach}; "
                f"got {tuple(bias.shape)}"
            )
        if not bias.is_floating_point():
            raise ValueError(f"bias must be of a floating dtype; got {bias.dtype}")
    if scale is not None and not math.isfinite(scale):
        raise ValueError(f"scale must be finite; got {scale}")
    if attention_mask is not None and attention_mask.shape != query.shape[:2]:
        raise ValueError(
            f"attention_mask must have shape (B, T) = {tuple(query.shape[:2])}; got {tuple(attention_mask.shape)}"
        )
    check_devices(query, key=key, value=value, bias=bias, attention_mask=attention_mask)
    check_cu_seqlens(cu_seqlens, query, "query")
