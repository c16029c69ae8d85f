"""States of SRformer's recurrent attention: one matrix per segment of a document, from its keys and values."""

import torch
from torch import Tensor

from ..checks import check_choice, check_devices
from ..dispatch import exports_to_onnx
from . import op, reference
from .step import segment_step

__all__ = ["SOURCES", "segment_recurrence", "segment_step"]

SOURCES = ("complement", "segment")


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
    backend: str = "auto",
) -> Tensor:
    """Accumulate and fire over the segments that a target visits, in the order of its visits.

    Shapes: `B` batch · `H` heads · `M` segments · `S` segment size · `K` key dim · `V` value dim · `N` visited
    segments.

        P[i] = K^T V - K[i]^T V[i]                        (SRformer, section 3.2, eq. 16)
        m[n] = leak a[n-1] + P[i(n)] W^T                  (section 3.3 and appendix A.2: RAF neurons)
        y[n] = m[n] / threshold - 1
        a[n] = m[n] - threshold 1[y[n] > 0]
        R[n] = max(y[n], 0)

    with a[-1] = 0 and i(n) the n-th visited segment. A query that reads segment i(n) adds ``q R[n]`` to its attention.
    States do not depend on queries: one call per document serves all tokens and beams. It takes
    O(M S K V + N K V^2) multiplications and N K V numbers per head; the backward pass stores only the inputs.

    Args:
        key: `(B, H, M, S, K)`, float64, float32, bfloat16 or float16; zero at masked keys. Heads come before segments,
            as in the states.
        value: `(B, H, M, S, V)` in key's dtype, zero at masked keys.
        weight: W, `(V, V)`, shared by all heads. None with `leak` and `threshold`: no neurons, R[n] = P[i(n)].
        leak: One number, the share of a membrane that remains after a segment.
        threshold: One positive number.
        visited: i(n), `(B or 1, N)`, int64, in [0, M); all segments in order when None.
        source: Input of the neurons: `"complement"`, P[i], or `"segment"`, K[i]^T V[i] (ablation IV).
        clamp: Bound on the magnitude of every entry of K^T V and of K[i]^T V[i] before subtraction; none when None.
        surrogate: Whether the step 1[y > 0] has the derivative ``0.3 max(0, 1 - |y|)`` in the backward, instead of 0.
        backend: `"auto"`, `"torch"` or `"triton"`, see `hf_hybrid.kernels.dispatch`.

    Returns:
        R, `(B, H, N, K, V)` in key's dtype, computed in float32, or float64 for float64 input. Differentiable once in
        key, value, weight, leak and threshold.

    Raises:
        ValueError: A shape, dtype or number does not fit; the message names the argument, its value and the rule.
    """
    _check(key, value, weight, leak, threshold, visited, source, clamp)
    if exports_to_onnx():
        return reference.segment_recurrence(
            key, value, weight=weight, leak=leak, threshold=threshold, visited=visited, source=source, clamp=clamp
        )
    if visited is not None:
        visited = visited.to(torch.int64).expand(key.shape[0], -1)
    limit = None if clamp is None else float(clamp)
    complement = source == "complement"
    return op.segment_recurrence(key, value, weight, leak, threshold, visited, complement, limit, surrogate, backend)


def _check(
    key: Tensor,
    value: Tensor,
    weight: Tensor | None,
    leak: Tensor | None,
    threshold: Tensor | None,
    visited: Tensor | None,
    source: str,
    clamp: float | None,
) -> None:
    if key.dim() != 5 or 0 in key.shape[2:4] or not key.is_floating_point():
        raise ValueError(
            f"key must be a floating-point (B, H, M, S, K) with M > 0 and S > 0; got {tuple(key.shape)} of {key.dtype}"
        )
    if value.dim() != 5 or value.shape[:4] != key.shape[:4]:
        raise ValueError(f"value must be (B, H, M, S, V) = {(*key.shape[:4], 'V')}; got {tuple(value.shape)}")
    if value.dtype != key.dtype:
        raise ValueError(f"value must have key's dtype {key.dtype}; got {value.dtype}")
    neuron = {"weight": weight, "leak": leak, "threshold": threshold}
    given = [name for name, tensor in neuron.items() if tensor is not None]
    if given and len(given) < len(neuron):
        raise ValueError(f"weight, leak and threshold must be given together or not at all; got {', '.join(given)}")
    width = value.shape[4]
    if weight is not None and weight.shape != (width, width):
        raise ValueError(f"weight must be (V, V) = {(width, width)}; got {tuple(weight.shape)}")
    for name in ("leak", "threshold"):
        tensor = neuron[name]
        if tensor is not None and tensor.numel() != 1:
            raise ValueError(f"{name} must hold one number; got {tuple(tensor.shape)}")
    if visited is not None:
        fits = visited.dim() == 2 and visited.shape[0] in (1, key.shape[0]) and visited.shape[1] > 0
        if not fits or visited.dtype not in (torch.int32, torch.int64):
            raise ValueError(
                f"visited must be integers (B or 1, N) with B = {key.shape[0]} and N > 0; got "
                f"{tuple(visited.shape)} of {visited.dtype}"
            )
    check_devices(key, value=value, weight=weight, visited=visited)
    check_choice("source", source, SOURCES)
    if clamp is not None and not clamp > 0:
        raise ValueError(f"clamp must be positive or None; got {clamp}")
