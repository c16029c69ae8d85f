"""SRformer's states of segments, when a document's segments are divided among processes.

B batch · H heads · H_r heads of this process · M segments · M_r segments of this process · S segment size · K key
dim · V value dim · N visited segments
"""

from typing import Any

from torch import Tensor

from ..kernels import segment_recurrence as segment_kernel
from .collectives import divide, nothing, undivide
from .shards import Shards


def segment_recurrence(
    key: Tensor,
    value: Tensor,
    shards: Shards,
    *,
    weight: Tensor | None = None,
    leak: Tensor | None = None,
    threshold: Tensor | None = None,
    visited: Tensor | None = None,
    slots: Shards | None = None,
    source: str = "complement",
    clamp: float | None = None,
    surrogate: bool = False,
    backend: str = "auto",
) -> Tensor:
    """Accumulate and fire over divided segments: `kernels.segment_recurrence` on own heads of all segments.

    The neurons are no linear recurrence, so states of shards cannot be folded: passed from shard to shard, they would
    make every process wait for all before it. Heads are independent, so they are divided instead, and the kernel runs
    as it is.

    Each process sends B M_r S (K + V) numbers per head of another process, and B K V per own head and slot of another
    one; the backward as many. Processes beyond H have no work in between.

    Args:
        key: `(B, H, M_r, S, K)`, zero at masked keys.
        value: `(B, H, M_r, S, V)`, zero at masked keys.
        shards: The layout of the segments.
        weight: `(V, V)`; gradients of the neurons' parameters are this process's parts of sums.
        leak: One number.
        threshold: One positive number.
        visited: The segment of each slot, `(B or 1, N)`, the same on all processes; all segments in order when None.
        slots: The layout of the N slots; that of the segments when None, which needs as many slots.
        source: See `kernels.segment_recurrence`.
        clamp: See `kernels.segment_recurrence`.
        surrogate: See `kernels.segment_recurrence`.
        backend: See `hf_hybrid.kernels.dispatch`.

    Returns:
        R of own slots, `(B, H, N_r, K, V)` in key's dtype. Differentiable once.

    Raises:
        ValueError: A shape, dtype or number does not fit.
    """
    for name, x in (("key", key), ("value", value)):
        shards.check(x, name, dim=2)
    number = shards.length if visited is None else visited.shape[1]
    slots = shards if slots is None else slots
    if slots.length != number or slots.rank != shards.rank or slots.size != shards.size:
        raise ValueError(f"slots must divide the {number} slots among the same processes; got {slots.lengths}")
    heads = key.shape[1]
    k, v = divide(shards, key, value, tokens=2, width=1)
    if k.shape[1] == 0:
        shape = (key.shape[0], 0, number, key.shape[4], value.shape[4])
        states = nothing(shape, k, k, v, weight, leak, threshold)
    else:
        options: dict[str, Any] = {"source": source, "clamp": clamp, "surrogate": surrogate, "backend": backend}
        states = segment_kernel(k, v, weight=weight, leak=leak, threshold=threshold, visited=visited, **options)
    return undivide(slots, states, heads, tokens=2, width=1)
