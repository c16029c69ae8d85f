"""Functions that the Triton kernels of several ops share."""

import torch
import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
NOTHING = tl.constexpr(-3e38)
"""The initial largest score of a softmax: finite, so that differences are numbers, and below any score that a bias can
produce."""

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
WIDEST = 256
"""Largest head width that kernels hold in registers."""


def why_not_dtype(name: str, dtype: torch.dtype) -> str | None:
    """Return an op's objection to a tensor's dtype, or None; `name` is the tensor."""
    return None if dtype in DTYPES else f"{name} must be float32, bfloat16 or float16; got {dtype}"


def why_not_heads(name: str, dtype: torch.dtype, width: int, value_width: int) -> str | None:
    """Return an op's objection to the dtype or the head widths, or None; `name` is the tensor."""
    objection = why_not_dtype(name, dtype)
    if objection is None and max(width, value_width) > WIDEST:
        objection = f"K and V must be at most {WIDEST}; got {width} and {value_width}"
    return objection


def interpreted() -> bool:
    """Return whether kernels run in Triton's interpreter, which has no bfloat16 arithmetic."""
    return not isinstance(tokens_of_span, triton.runtime.JITFunction)


@triton.jit
def tokens_of_span(span, table, bounds, T, SPANS, SIZE, SEQUENCES, PACKED: tl.constexpr):
    """Where one span of `packed.spans` lies, or of a batch whose rows of T tokens are cut into SPANS spans each.

    Returns its sequence, its first token, the one behind its last token, and the same two of the whole sequence, all
    counted from the first row's first token. A span that is not needed has no tokens.
    """
    if PACKED:
        sequence = tl.load(table + span * 3)
        first = tl.load(table + span * 3 + 1)
        stop = tl.load(table + span * 3 + 2)
        own = tl.minimum(sequence, SEQUENCES - 1)
        begin = tl.load(bounds + own)
        end = tl.load(bounds + own + 1)
    else:
        sequence = span // SPANS
        begin = sequence * T
        end = begin + T
        first = begin + (span - sequence * SPANS) * SIZE
        stop = tl.minimum(first + SIZE, end)
    return sequence, first, stop, begin, end


@triton.jit
def spans_of_sequence(sequence, bounds, SPANS, SEQUENCES, PACKED: tl.constexpr):
    """The first span of a sequence, and how many it has."""
    if PACKED:
        first = tl.load(bounds + SEQUENCES + 1 + sequence)
        count = tl.load(bounds + SEQUENCES + 2 + sequence) - first
    else:
        first = sequence * SPANS
        count = SPANS
    return first, count
