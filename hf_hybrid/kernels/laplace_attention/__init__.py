"""Attention with Mega's Laplace function of each score as weights instead of a softmax; quadratic in T.

Shapes: `B` batch · `T` queries · `S` keys · `H` heads · `K` key dim · `V` value dim · `C` chunk
"""

import torch
from torch import Tensor

from ..checks import check_devices, check_dtypes, check_integer, check_positive
from ..dispatch import choose_backend, exports_any, exports_to_onnx
from . import reference, torch_impl
from .torch_impl import laplace

__all__ = ["laplace", "laplace_attention"]


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
    backend: str = "auto",
) -> Tensor:
    """Weight every value with the Laplace function of its key's score, divided by the number of keys seen.

    o[t] = sum_{j in N(t)} f(q[t].k[j] / |N(t)|) v[j]      (Mega, section 3.2; CHELA's attention "laplace", table 7)

    N(t) contains the kept keys, up to t when causal, of t's chunk if there are chunks. Time is O(T S), or O(T C) with
    chunks; memory is O(T), since the backward recomputes scores block by block.

    Args:
        query: `(B, T, H, K)`, any floating dtype.
        key: `(B, S, H, K)` in query's dtype, S >= T; the last T belong to the tokens of the queries.
        value: `(B, S, H, V)` in query's dtype.
        causal: Whether to hide later keys.
        attention_mask: `(B, S)`, nonzero = keep; None keeps all.
        chunk_size: C; no chunks when None.
        first: `(B,)`, the key position, possibly negative, where the grid of chunks starts. When None, each row's
            first kept key, so that left padding does not move the grid.
        dropout: Probability of dropping a weight.
        backend: `"auto"`, `"torch"` or `"triton"`, see `hf_hybrid.kernels.dispatch`.

    Returns:
        `(B, T, H, V)` in query's dtype, computed in float32, or float64 for float64 input; 0 for queries without keys.

    Raises:
        ValueError: A shape, dtype or number does not fit; the message names the argument, its value and the rule.
    """
    _check(query, key, value, attention_mask, first)
    check_integer("chunk_size", chunk_size)
    check_positive(chunk_size=chunk_size)
    if not 0 <= dropout < 1:
        raise ValueError(f"dropout must be at least 0 and below 1; got {dropout}")
    # the number of blocks depends on the length
    if exports_to_onnx() or exports_any(key.shape[1]):
        return reference.laplace_attention(
            query,
            key,
            value,
            causal=causal,
            attention_mask=attention_mask,
            chunk_size=chunk_size,
            first=first,
            dropout=dropout,
        )
    if not torch.compiler.is_compiling():
        choose_backend("laplace_attention", backend, [query, key, value], lambda: "it has no Triton kernel yet")
    return torch_impl.forward(query, key, value, causal, attention_mask, chunk_size, first, dropout)


def _check(query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, first: Tensor | None) -> None:
    """Raise ValueError unless shapes, dtypes and devices fit."""
    if query.dim() != 4 or query.shape[1] == 0 or not query.is_floating_point():
        raise ValueError(
            f"query must be a floating-point (B, T, H, K) with T > 0; got {tuple(query.shape)} of {query.dtype}"
        )
    rows, width = (query.shape[0], query.shape[2]), query.shape[3]
    for name, tensor, expected in (("key", key, f"{width}"), ("value", value, "V")):
        fits = tensor.dim() == 4 and (tensor.shape[0], tensor.shape[2]) == rows and tensor.shape[1] >= query.shape[1]
        if not fits or (name == "key" and tensor.shape[3] != width):
            raise ValueError(
                f"{name} must be (B, S, H, {expected}) with query's B and H, and S >= {query.shape[1]}; "
                f"got {tuple(tensor.shape)}"
            )
    check_dtypes(query, key=key, value=value)
    if value.shape[1] != key.shape[1]:
        raise ValueError(f"value must have as many tokens as key, {key.shape[1]}; got {value.shape[1]}")
    if attention_mask is not None and attention_mask.shape != key.shape[:2]:
        raise ValueError(f"attention_mask must be (B, S) = {tuple(key.shape[:2])}; got {tuple(attention_mask.shape)}")
    if first is not None and first.shape != key.shape[:1]:
        raise ValueError(f"first must be (B,) = {tuple(key.shape[:1])}; got {tuple(first.shape)}")
    check_devices(query, key=key, value=value, attention_mask=attention_mask, first=first)
