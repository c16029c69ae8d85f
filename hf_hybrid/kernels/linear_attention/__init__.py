"""Attention without a softmax: linear in T, with one matrix per head as the state of decoding.

B batch · T length · H heads · K key dim · V value dim · N packed sequences
"""

from torch import Tensor

from ..checks import check_devices, check_dtypes
from ..dispatch import exports_to_onnx, forces_triton
from ..packed import check_cu_seqlens
from . import op, reference, torch_impl

__all__ = ["linear_attention"]


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
    backend: str = "auto",
) -> tuple[Tensor, Tensor | None]:
    """Sum the values weighted with the product of key and query, without softmax or denominator.

    causal      o[t] = q[t] S[t],  S[t] = S[t-1] + k[t]^T v[t]      (CHELA, eq. 9; TransNormerLLM, section 3)
    otherwise   o[t] = q[t] (sum_j k[j]^T v[j])
    normed      o / sqrt(mean(o^2) + eps), over each head           (TransNormerLLM's SimpleRMSNorm)
    and gated   that times SiLU(g)                                  (CHELA, eqs. 9 to 15, M)

    The causal form runs over blocks of C tokens: a masked product inside a block, and S passed exactly between blocks
    (CHELA, section 4.1). It takes O(T C (K + V) + T K V) multiplications per head and memory of the input's size. The
    backward pass stores the inputs and the norm's output. One token is one step of the recurrence, O(K V).

    A key of zeros hides a token, such as padding. bfloat16 may round factors and parts of sums; S is in float32.

    Args:
        query: `(B, T, H, K)`, float64, float32, bfloat16 or float16.
        key: `(B, T, H, K)` in query's dtype.
        value: `(B, T, H, V)` in query's dtype.
        causal: Whether to hide later tokens.
        norm_eps: Epsilon of the norm; none when None.
        gate: g, `(B, T, H, V)` in query's dtype; none when None. Only with the norm.
        state: S before the first token, `(B, H, K, V)`, float32 or float64; zeros when None. Causal only.
        cu_seqlens: Bounds of N sequences packed into one row, `(N + 1,)` of int32 or int64, see `kernels.packed`. B is
            1, states have N rows, and the result is that of each sequence alone. The torch
            backend and the form that is not causal read the bounds on the host.
        backend: `"auto"`, `"torch"` or `"triton"`, see `hf_hybrid.kernels.dispatch`.

    Returns:
        `(B, T, H, V)` in float32, or float64 for float64 input, since sums over a long sequence overflow float16; with
        the norm, in query's dtype. And S after the last token, `(B, H, K, V)` in float32 or float64; None when not
        causal.

    Raises:
        ValueError: A shape or dtype does not fit; the message names the argument, its value and the rule.
    """
    _check(query, key, value, causal, state, cu_seqlens)
    _check_epilogue(query, value, norm_eps, gate)
    check_devices(query, key=key, value=value, gate=gate, state=state)
    if exports_to_onnx():
        return reference.linear_attention(query, key, value, causal=causal, norm_eps=norm_eps, gate=gate, state=state)
    if not causal:
        output, last = op.bidirectional(query, key, value, cu_seqlens, backend), None
    elif query.shape[1] == 1 and cu_seqlens is None and not forces_triton(backend):
        output, last = torch_impl.step(query, key, value, state)
    elif norm_eps is not None:
        return op.causal_normed(query, key, value, gate, state, cu_seqlens, norm_eps, backend)
    else:
        return op.linear_attention(query, key, value, state, cu_seqlens, backend)
    return output if norm_eps is None else torch_impl.normed(output, norm_eps, gate, query.dtype), last


def _check_epilogue(query: Tensor, value: Tensor, norm_eps: float | None, gate: Tensor | None) -> None:
    if norm_eps is not None and not norm_eps > 0:
        raise ValueError(f"norm_eps must be positive; got {norm_eps}")
    if gate is None:
        return
    if norm_eps is None:
        raise ValueError("gate must be None when norm_eps is None")
    if gate.shape != value.shape or gate.dtype != query.dtype:
        raise ValueError(
            f"gate must be (B, T, H, V) = {tuple(value.shape)} of {query.dtype}; got {tuple(gate.shape)} "
            f"of {gate.dtype}"
        )


def _check(
    query: Tensor, key: Tensor, value: Tensor, causal: bool, state: Tensor | None, cu_seqlens: Tensor | None
) -> None:
    if query.dim() != 4 or query.shape[1] == 0 or not query.is_floating_point():
        raise ValueError(
            f"query must be a floating-point (B, T, H, K) with T > 0; got {tuple(query.shape)} of {query.dtype}"
        )
    if key.shape != query.shape:
        raise ValueError(f"key must have query's shape {tuple(query.shape)}; got {tuple(key.shape)}")
    if value.dim() != 4 or value.shape[:3] != query.shape[:3]:
        raise ValueError(
            f"value must be (B, T, H, V) with query's (B, T, H) = {tuple(query.shape[:3])}; got {tuple(value.shape)}"
        )
    check_dtypes(query, key=key, value=value)
    sequences = check_cu_seqlens(cu_seqlens, query, "query")
    if state is None:
        return
    if not causal:
        raise ValueError("state must be None unless causal")
    shape = (sequences, *query.shape[2:], value.shape[3])
    if state.shape != shape:
        rows = "B" if cu_seqlens is None else "N"
        raise ValueError(f"state must be ({rows}, H, K, V) = {shape}; got {tuple(state.shape)}")
