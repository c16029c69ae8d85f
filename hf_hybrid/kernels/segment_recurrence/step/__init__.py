"""Attention of a decoded token to its document: to one segment's keys and values, and to that segment's state.

Shapes: `B` rows of the target · `D` documents · `H` heads · `N` slots (visited segments) · `S` keys of a slot · `K`
key dim · `V` value dim.
"""

import torch
from torch import Tensor

from ...checks import check_devices, check_dtypes
from ...dispatch import may_run_triton, needs_gradient
from . import op, torch_impl

__all__ = ["segment_step"]


def segment_step(
    query: Tensor,
    key: Tensor | None,
    value: Tensor | None,
    state: Tensor | None,
    index: Tensor,
    *,
    visible: Tensor | None = None,
    norm: Tensor | None = None,
    documents: Tensor | None = None,
    sigma: Tensor | None = None,
    scale: float = 1.0,
    backend: str = "auto",
) -> Tensor:
    """Attend to one segment per row, and to its state: a decoding step of SRformer's cross-attention.

        o_S = softmax(scale q K_i^T) V_i,  o_R = scale q R_i / norm       (SRformer, section 3.2, eq. 4 and 13)
        o = o_S + o_R,  or sigma o_S + (1 - sigma) o_R                    (eq. 11, eq. 10)

    O(S (K + V) + K V) multiplications and reads per row and head, for documents of any length. On a GPU one kernel
    reads everything in place, without synchronisation, so that a CUDA graph can capture it.

    With gradients it runs in plain torch; the Triton kernel has no backward.

    Args:
        query: `(B, H, K)`, float64, float32, bfloat16 or float16.
        key: `(D, H, N, S, K)` in query's dtype; None, with `value`, without segmented attention.
        value: `(D, H, N, S, V)` in query's dtype.
        state: R, `(D, H, N, K, V)` in query's dtype; None without recurrent attention.
        index: Slot i of each row and head, ``(document H + head) N + slot``, `(B, H)`, int64, on the device.
        visible: The keys that a row sees, `(B or 1, S)`, boolean; all when None. A row without any has o_S = 0.
        norm: `(D, H, 1, V or 1)` in query's dtype; 1 when None.
        documents: The document whose norm each row reads, `(B,)`, int64; row b reads that of document b when None.
        sigma: One number in any dtype; see above.
        scale: See above.
        backend: `"auto"`, `"torch"` or `"triton"`, see `hf_hybrid.kernels.dispatch`.

    Returns:
        `(B, H, V)` in query's dtype.

    Raises:
        ValueError: A shape or dtype does not fit; the message names the argument, its value and the rule.
    """
    _check(query, key, value, state, index, visible, norm, documents, sigma)
    differentiated = needs_gradient("segment_step", backend, query, key, value, state, norm, sigma)
    if not differentiated and may_run_triton(backend, query):
        return op.segment_step(query, key, value, state, index, visible, norm, documents, sigma, float(scale), backend)
    arguments = query, key, value, state, index, visible, norm, documents, sigma, scale
    if query.device.type != "cpu" or torch.compiler.is_compiling():
        return torch_impl.forward(*arguments)
    try:
        return torch_impl.forward(*arguments)
    except IndexError:  # on a CPU torch looks; a GPU asserts
        kept = next(x for x in (key, state) if x is not None)
        _check_within("index", index, kept.shape[:3].numel())
        if norm is not None:
            _check_within("documents", documents, norm.shape[0])
        raise


def _check_within(name: str, index: Tensor | None, size: int) -> None:
    """Raise ValueError for an index out of range."""
    if index is None or index.numel() == 0:
        return
    first, last = (x.item() for x in index.aminmax())
    if first < 0 or last >= size:
        raise ValueError(f"{name} must be at least 0 and below {size}; got {first} to {last}")


def _check(
    query: Tensor,
    key: Tensor | None,
    value: Tensor | None,
    state: Tensor | None,
    index: Tensor,
    visible: Tensor | None,
    norm: Tensor | None,
    documents: Tensor | None,
    sigma: Tensor | None,
) -> None:
    if query.dim() != 3 or not query.is_floating_point():
        raise ValueError(f"query must be a floating-point (B, H, K); got {tuple(query.shape)} of {query.dtype}")
    if index.shape != query.shape[:2] or index.dtype != torch.int64:
        raise ValueError(
            f"index must be (B, H) = {tuple(query.shape[:2])} of int64; got {tuple(index.shape)} of {index.dtype}"
        )
    if (key is None) != (value is None) or (key is None and state is None):
        raise ValueError("key and value must be given together, or state without them; got neither or one of them")
    heads, width = query.shape[1:]
    if key is not None and (key.dim() != 5 or key.shape[1] != heads or key.shape[4] != width):
        raise ValueError(f"key must be (D, H, N, S, K) with H = {heads} and K = {width}; got {tuple(key.shape)}")
    if key is not None and value is not None and (value.dim() != 5 or value.shape[:4] != key.shape[:4]):
        raise ValueError(f"value must be (D, H, N, S, V) = {(*key.shape[:4], 'V')}; got {tuple(value.shape)}")
    if state is not None:
        fits = state.dim() == 5 and state.shape[1] == heads and state.shape[3] == width
        if not fits or (key is not None and state.shape[:3] != key.shape[:3]):
            raise ValueError(
                f"state must be (D, H, N, K, V) with H = {heads}, K = {width} and key's D and N; "
                f"got {tuple(state.shape)}"
            )
        if value is not None and state.shape[4] != value.shape[4]:
            raise ValueError(f"state must have value's V = {value.shape[4]}; got {state.shape[4]}")
        if norm is not None and norm.shape not in ((*state.shape[:2], 1, state.shape[4]), (*state.shape[:2], 1, 1)):
            raise ValueError(f"norm must be (D, H, 1, V or 1) with state's D, H and V; got {tuple(norm.shape)}")
    check_dtypes(query, key=key, value=value, state=state, norm=norm)
    if norm is not None and state is None:
        raise ValueError("norm must be None without state")
    if documents is not None and (documents.shape != query.shape[:1] or documents.dtype != torch.int64):
        raise ValueError(
            f"documents must be (B,) = {tuple(query.shape[:1])} of int64; got {tuple(documents.shape)} "
            f"of {documents.dtype}"
        )
    if norm is not None and documents is None and norm.shape[0] != query.shape[0]:
        raise ValueError(f"documents must be given if norm does not have query's B = {query.shape[0]}; got None")
    if visible is not None:
        fits = key is not None and visible.dim() == 2 and visible.shape[1] == key.shape[3]
        if not fits or visible.shape[0] not in (1, query.shape[0]) or visible.dtype != torch.bool:
            raise ValueError(
                f"visible must be (B or 1, S) of bool for a key; got {tuple(visible.shape)} of {visible.dtype}"
            )
    check_devices(
        query, key=key, value=value, state=state, index=index, visible=visible, norm=norm, documents=documents
    )
    if sigma is not None and (sigma.numel() != 1 or key is None or state is None):
        raise ValueError(f"sigma must hold one number, and needs key and state; got {tuple(sigma.shape)}")
