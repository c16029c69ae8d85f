"""The decoding step on a GPU, which reads a segment and its state in place.

One program has one row and one head. Products of a matrix and a vector are bound by memory, so they are summed in
float32 without tensor cores.

B batch · H heads · S segment size · K key dim · V value dim · N visited segments · D documents
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...launching import Configuration, capability_of, launch, tuned
from ...triton_kernels import LOG2E, NOTHING, why_not_heads
from ..triton_kernels import load_tile

CONFIGURATIONS = {
    configuration.name: configuration
    for configuration in (
        Configuration("token k64", "K and V <= 64", {"BS": 64, "D": 64}, 8, 1),
        Configuration("token k256", "K or V > 64", {"BS": 16, "D": 256}, 4, 1),
    )
}


def why_not(query: Tensor, value_width: int) -> str | None:
    """Return the op's objection to Triton, or None."""
    return why_not_heads("query", query.dtype, query.shape[2], value_width)


@triton.jit(do_not_specialize=["SLOTS", "DOCUMENTS", "S"])
def token_kernel(
    q, k, v, states, index, visible, norm, documents, sigma, output,
    SLOTS, DOCUMENTS, S, H, VISIBLE, SCALE,
    K: tl.constexpr, V: tl.constexpr, NORM: tl.constexpr, BS: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """What one token of one row and head reads of its segment, `(V,)`."""
    strip = tl.program_id(0)
    slot = tl.load(index + strip).to(tl.int64)
    slot = tl.minimum(tl.maximum(slot, 0), SLOTS - 1)
    cols = tl.arange(0, D)
    inside = cols < V
    source = q + strip.to(tl.int64) * K
    result = tl.zeros((D,), tl.float32)
    recurrent = tl.zeros((D,), tl.float32)
    if states is not None:
        for start in range(0, K, BS):
            rows = start + tl.arange(0, BS)
            query = tl.load(source + rows, mask=rows < K, other=0.0).to(tl.float32) * SCALE
            recurrent += tl.sum(query[:, None] * load_tile(states, slot * K, rows, K, V, 0, D, True), 0)
        if norm is not None:
            document = strip // H
            if documents is not None:
                document = tl.load(documents + document)
                document = tl.minimum(tl.maximum(document, 0), DOCUMENTS - 1).to(tl.int32)
            place = norm + (document * H + strip % H) * NORM
            if NORM == 1:
                recurrent = recurrent / tl.load(place).to(tl.float32)
            else:
                recurrent = recurrent / tl.load(place + cols, mask=inside, other=1.0).to(tl.float32)
        result = recurrent
    if k is not None:
        query = tl.load(source + cols, mask=cols < K, other=0.0).to(tl.float32) * (SCALE * LOG2E)
        most = tl.full((1,), NOTHING, tl.float32)
        weights = tl.zeros((1,), tl.float32)
        segmented = tl.zeros((D,), tl.float32)
        for start in range(0, S, BS):
            rows = start + tl.arange(0, BS)
            keys = load_tile(k, slot * S, rows, S, K, 0, D, True)
            values = load_tile(v, slot * S, rows, S, V, 0, D, True)
            seen = rows < S
            if visible is not None:
                seen &= tl.load(visible + strip // H * VISIBLE + rows, mask=seen, other=0) != 0
            scores = tl.where(seen, tl.sum(keys * query[None, :], 1), -float("inf"))
            more = tl.maximum(most, tl.max(scores, 0))
            faded = tl.exp2(most - more)
            own = tl.exp2(scores - more)
            weights = weights * faded + tl.sum(own, 0)
            segmented = segmented * faded + tl.sum(own[:, None] * values, 0)
            most = more
        segmented = segmented / tl.where(weights > 0, weights, 1.0)  # a segment may have no key at all
        if sigma is not None:
            share = tl.load(sigma).to(tl.float32)
            result = share * segmented + (1 - share) * recurrent
        else:
            result = segmented + recurrent
    tl.store(output + strip.to(tl.int64) * V + cols, result.to(output.dtype.element_ty), mask=inside)


def forward(
    query: Tensor,
    key: Tensor | None,
    value: Tensor | None,
    state: Tensor | None,
    index: Tensor,
    visible: Tensor | None,
    norm: Tensor | None,
    documents: Tensor | None,
    sigma: Tensor | None,
    scale: float,
) -> Tensor:
    """Return the attention of one token per row, `(B, H, V)` in query's dtype."""
    batch, heads, width = query.shape
    value_width = next(x.shape[4] for x in (value, state) if x is not None)
    output = torch.empty(batch, heads, value_width, dtype=query.dtype, device=query.device)
    size = 64 if max(width, value_width) <= 64 else 256
    configuration = tuned("segment_step", CONFIGURATIONS[f"token k{size}"], capability_of(query))
    launch(
        token_kernel,
        batch * heads,
        configuration,
        q=query.contiguous(),
        k=None if key is None else key.contiguous(),
        v=None if value is None else value.contiguous(),
        states=None if state is None else state.contiguous(),
        index=index.contiguous(),
        visible=None if visible is None else visible.contiguous().view(torch.uint8),
        norm=None if norm is None else norm.contiguous(),
        documents=None if documents is None else documents.contiguous(),
        sigma=sigma,
        output=output,
        SLOTS=next(math.prod(x.shape[:3]) for x in (key, state) if x is not None),
        DOCUMENTS=0 if norm is None else norm.shape[0],
        S=0 if key is None else key.shape[3],
        H=heads,
        VISIBLE=0 if visible is None or visible.shape[0] == 1 else visible.shape[1],
        SCALE=scale,
        K=width,
        V=value_width,
        NORM=0 if norm is None else norm.shape[3],
    )
    return output
