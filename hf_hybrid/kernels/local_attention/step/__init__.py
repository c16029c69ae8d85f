"""Local attention of one decoded token to cached keys and values, a single kernel on a GPU.

With gradients it runs in plain torch.

B batch · S cached keys · P positions of a mask · H heads · K key dim · V value dim
"""

import math

import torch
from torch import Tensor

from ...checks import check_devices, check_dtypes
from ...dispatch import may_run_triton, needs_gradient
from ..settings import StepSettings, check_neighbourhood
from . import op, torch_impl

__all__ = ["local_attention_step"]


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
    backend: str = "auto",
) -> Tensor:
    """Attend causally from the token at one position to its neighbourhood among cached keys.

    o = sum_{j in N(t)} softmax_j(scale * q.k[j] + b[j - t]) v[j],  t = query_start

    with the N(t) of `hf_hybrid.kernels.local_attention`, restricted to kept keys j <= t, or j < t. Triton reads only
    the visible keys, with any strides and without copies. So does torch without a mask, if both positions are ints;
    otherwise it reads all S keys.

    Args:
        query: `(B, 1, H, K)`, float64, float32, bfloat16 or float16.
        key: `(B, S, H, K)` in query's dtype; entry i has the position key_start + i. Later positions than t are not
            used.
        value: `(B, S, H, V)` in query's dtype.
        query_start: t, for all rows: an int, or a tensor of one integer on query's device, which the host never reads.
        key_start: Position of the first key, given like t; 0 or more.
        bias: `(H, reach + 1)` with reach = radius or chunk_size - 1; column i holds key - query = i - reach.
        radius: Tokens visible before t; may exceed S. Excludes `chunk_size`.
        chunk_size: Tokens per chunk. The grid starts at each row's first kept token. Excludes `radius`.
        include_self: Whether t sees itself.
        attention_mask: `(B, P)`, bool, integer or float, nonzero = keep, for keys by position from 0 on; positions
            past its end are like its last one.
        scale: Factor on the dot products; `K ** -0.5` when None.
        backend: `"auto"`, `"torch"` or `"triton"`, see `hf_hybrid.kernels.dispatch`; `"triton"` has no gradient.

    Returns:
        `(B, 1, H, V)` in query's dtype; zeros if no key is visible.

    Raises:
        ValueError: A shape, dtype or number does not fit; the message names the argument, its value and the rule.
    """
    _check(query, key, value, bias, radius, chunk_size, attention_mask, query_start, key_start, scale)
    scale = query.shape[3] ** -0.5 if scale is None else float(scale)
    query_base, query_number = _base_and_number(query_start)
    key_base, key_number = _base_and_number(key_start)
    tensors = query, key, value, bias, attention_mask, query_base, key_base
    settings = StepSettings(query_number, key_number, radius, chunk_size, include_self, scale)
    differentiated = needs_gradient("local_attention_step", backend, query, key, value, bias)
    if not differentiated and may_run_triton(backend, query):
        return op.local_attention_step(*tensors, *settings, backend)
    return torch_impl.forward(*tensors, settings)  # on a CPU calling a custom op costs as much as a short window


def _base_and_number(start: int | Tensor) -> tuple[Tensor | None, int]:
    """Split a position into a tensor or None and a number, whose sum it is."""
    return (start, 0) if isinstance(start, Tensor) else (None, start)


def _check(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, radius: int | None, chunk_size: int | None,
    attention_mask: Tensor | None, query_start: int | Tensor, key_start: int | Tensor, scale: float | None,
) -> None:  # fmt: skip
    if query.dim() != 4 or query.shape[1] != 1 or not query.is_floating_point():
        raise ValueError(f"query must be a floating-point (B, 1, H, K); got {tuple(query.shape)} of {query.dtype}")
    if key.dim() != 4 or key.shape[1] == 0 or (*key.shape[:1], 1, *key.shape[2:]) != query.shape:
        raise ValueError(
            f"key must be (B, S, H, K) with S > 0 for a query of {tuple(query.shape)}; got {tuple(key.shape)}"
        )
    if value.dim() != 4 or value.shape[:3] != key.shape[:3]:
        raise ValueError(
            f"value must be (B, S, H, V) with key's (B, S, H) = {tuple(key.shape[:3])}; got {tuple(value.shape)}"
        )
    check_dtypes(query, key=key, value=value)
    check_neighbourhood(radius, chunk_size)
    columns = radius + 1 if radius is not None else chunk_size
    if bias is not None and (bias.dim() != 2 or bias.shape[0] != query.shape[2] or bias.shape[1] != columns):
        raise ValueError(f"bias must be (H, reach + 1) = {(query.shape[2], columns)}; got {tuple(bias.shape)}")
    if scale is not None and not math.isfinite(scale):
        raise ValueError(f"scale must be finite; got {scale}")
    if attention_mask is not None and (
        attention_mask.dim() != 2 or attention_mask.shape[0] != query.shape[0] or attention_mask.shape[1] == 0
    ):
        raise ValueError(
            f"attention_mask must be (B, P) with B = {query.shape[0]} and P > 0; got {tuple(attention_mask.shape)}"
        )
    for name, start in (("query_start", query_start), ("key_start", key_start)):
        if isinstance(start, Tensor) and (start.numel() != 1 or start.dtype not in (torch.int32, torch.int64)):
            raise ValueError(
                f"{name} must be an int or one of int32 or int64; got {tuple(start.shape)} of {start.dtype}"
            )
        if isinstance(start, int) and start < 0:
            raise ValueError(f"{name} must not be negative; got {start}")
    check_devices(query, key=key, value=value, bias=bias, attention_mask=attention_mask)
