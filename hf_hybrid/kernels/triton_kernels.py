"""What the Triton kernels of several ops share."""

import triton
import triton.language as tl


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
