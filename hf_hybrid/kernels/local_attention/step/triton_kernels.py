"""One decoded token's local attention on a GPU: one launch, which reads the visible keys and values once.

A program has one row and head. It walks over the keys of the neighbourhood BS at a time, and each of the BS lanes has
its own softmax: its largest score, sum of weights and sum of weighted values. Threads exchange only parts of the dot
products until the lanes are combined at the end, always in the same order. Matrix products are not used, since their
tiles would be mostly padding.

The positions of the token and the first key are numbers, or integers that the kernel reads on the device. The host
reads nothing, so a CUDA graph can capture the launch, and a cache with any strides is read in place.

B batch · S cached keys · P positions of a mask · H heads · K key dim · V value dim
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...launching import Configuration, capability_of, launch, tuned
from ...triton_kernels import LOG2E, NOTHING, why_not_heads
from ..settings import StepSettings

CONFIGURATIONS = {
    configuration.name: configuration
    for configuration in (
        Configuration("token k64", "K and V <= 64", {"BS": 128, "D": 64}, num_warps=8, num_stages=1),
        Configuration("token k128", "K and V <= 128", {"BS": 64, "D": 128}, num_warps=8, num_stages=1),
        Configuration("token k256", "16 bits, K and V <= 256", {"BS": 32, "D": 256}, num_warps=8, num_stages=1),
        Configuration("token k256 float32", "K and V <= 256", {"BS": 16, "D": 256}, num_warps=8, num_stages=1),
    )
}
"""BS keys per step, D columns of each in registers."""


def why_not(query: Tensor, value: Tensor) -> str | None:
    """Return the op's objection to Triton, or None."""
    return why_not_heads("query", query.dtype, query.shape[3], value.shape[3])


@triton.jit
def _first_kept(kept, P, STRIDE, BLOCK: tl.constexpr):
    """The first kept position of a row, P where there is none."""
    first = P
    start = 0
    while (start < P) & (first == P):
        at = start + tl.arange(0, BLOCK)
        here = tl.load(kept + at.to(tl.int64) * STRIDE, mask=at < P, other=0) != 0
        first = tl.min(tl.where(here, at, P), 0)
        start += BLOCK
    return first


# a mask grows by one position per token, and its rows' stride with it
@triton.jit(do_not_specialize=["query_start", "key_start", "S", "P", "BACK", "CHUNK", "KEPT_B", "KEPT_P"])
def step_kernel(
    q, k, v, bias, kept, query_base, key_base, output,
    query_start, key_start, S, H, P, BACK, CHUNK, SCALE,
    Q_B, Q_H, Q_K, K_B, K_S, K_H, K_K, V_B, V_S, V_H, V_V, BIAS_H, BIAS_R, KEPT_B, KEPT_P,
    K: tl.constexpr, V: tl.constexpr, SELF: tl.constexpr, BS: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """The output of one row and head."""
    row = (tl.program_id(0) // H).to(tl.int64)
    head = (tl.program_id(0) % H).to(tl.int64)
    if query_base is not None:
        query_start += tl.load(query_base).to(tl.int32)
    if key_base is not None:
        key_start += tl.load(key_base).to(tl.int32)
    if kept is not None:
        kept += row * KEPT_B
    # the query's slot among the cached keys, and the run of slots that it sees
    slot = query_start - key_start
    low = tl.maximum(slot - BACK, 0)
    if CHUNK is not None:
        origin = 0
        if kept is not None:
            origin = _first_kept(kept, P, KEPT_P, 1024)
        chunk = origin + (tl.maximum(query_start, origin) - origin) // CHUNK * CHUNK
        low = tl.maximum(low, chunk - key_start)
    high = tl.minimum(slot + 1 if SELF else slot, S)
    cols = tl.arange(0, D)
    query = tl.load(q + row * Q_B + head * Q_H + cols * Q_K, mask=cols < K, other=0.0).to(tl.float32)
    query = query * (SCALE * LOG2E)
    k += row * K_B + head * K_H
    v += row * V_B + head * V_H
    largest = tl.full((BS,), NOTHING, tl.float32)
    total = tl.zeros((BS,), tl.float32)
    result = tl.zeros((BS, D), tl.float32)
    for start in range(low, high, BS):
        at = start + tl.arange(0, BS)
        there = at < high
        token = at.to(tl.int64)[:, None]
        keys = tl.load(k + token * K_S + cols[None, :] * K_K, mask=there[:, None] & (cols < K)[None, :], other=0.0)
        values = tl.load(v + token * V_S + cols[None, :] * V_V, mask=there[:, None] & (cols < V)[None, :], other=0.0)
        seen = there
        if kept is not None:
            position = tl.minimum(key_start + at, P - 1).to(tl.int64)
            seen &= tl.load(kept + position * KEPT_P, mask=there, other=0) != 0
        scores = tl.sum(keys.to(tl.float32) * query[None, :], 1)
        if bias is not None:
            column = (at - slot + BACK).to(tl.int64)
            scores += tl.load(bias + head * BIAS_H + column * BIAS_R, mask=there, other=0.0).to(tl.float32) * LOG2E
        scores = tl.where(seen, scores, -float("inf"))
        larger = tl.maximum(largest, scores)
        shrink = tl.exp2(largest - larger)
        weights = tl.exp2(scores - larger)
        total = total * shrink + weights
        # what is not kept may hold anything, and counts for nothing
        values = tl.where(seen[:, None], values.to(tl.float32), 0.0)
        result = result * shrink[:, None] + weights[:, None] * values
        largest = larger
    factor = tl.exp2(largest - tl.max(largest, 0))
    norm = tl.sum(total * factor, 0)
    result = tl.sum(result * factor[:, None], 0) / tl.where(norm > 0, norm, 1.0)
    tl.store(output + (row * H + head) * V + cols, result.to(output.dtype.element_ty), mask=cols < V)


def forward(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, mask: Tensor | None, query_base: Tensor | None,
    key_base: Tensor | None, settings: StepSettings,
) -> Tensor:  # fmt: skip
    """Return the output `(B, 1, H, V)`; a position is the sum of its number and its tensor, if any."""
    query_start, key_start, radius, chunk_size, include_self, scale = settings
    (batch, _, heads, width), value_width = query.shape, value.shape[3]
    output = torch.empty(batch, 1, heads, value_width, dtype=query.dtype, device=query.device)
    widest = max(width, value_width)
    size = "64" if widest <= 64 else "128" if widest <= 128 else "256"
    if size == "256" and query.dtype == torch.float32:
        size += " float32"
    if mask is not None and mask.dtype == torch.bool:
        mask = mask.view(torch.uint8)
    strides = {
        **dict(zip(("Q_B", "Q_H", "Q_K"), (query.stride(i) for i in (0, 2, 3)), strict=True)),
        **dict(zip(("K_B", "K_S", "K_H", "K_K"), key.stride(), strict=True)),
        **dict(zip(("V_B", "V_S", "V_H", "V_V"), value.stride(), strict=True)),
        **dict(zip(("BIAS_H", "BIAS_R"), (0, 0) if bias is None else bias.stride(), strict=True)),
        **dict(zip(("KEPT_B", "KEPT_P"), (0, 0) if mask is None else mask.stride(), strict=True)),
    }
    launch(
        step_kernel,
        batch * heads,
        tuned("local_attention_step", CONFIGURATIONS[f"token k{size}"], capability_of(query)),
        q=query,
        k=key,
        v=value,
        bias=bias,
        kept=mask,
        query_base=query_base,
        key_base=key_base,
        output=output,
        query_start=query_start,
        key_start=key_start,
        S=key.shape[1],
        H=heads,
        P=0 if mask is None else mask.shape[1],
        BACK=chunk_size - 1 if chunk_size is not None else radius,
        CHUNK=chunk_size,
        SCALE=scale,
        **strides,
        K=width,
        V=value_width,
        SELF=include_self,
    )
    return output
