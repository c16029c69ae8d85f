"""Operations on one sequence that is divided among processes: context parallelism, on torch.distributed alone.

Each process holds a contiguous shard of the tokens, of any length, also none; `make_shards` makes the layout. The
operations are those of `hf_hybrid.kernels`, take own tokens and the layout, and return own tokens. A process gets from
the others what its tokens need, in one or two collectives, and runs the kernel as it is. Together the processes
compute what one would.

Sequences start from zeros; states before the first token are for decoding, which one process does. Parameters are the
same on all processes. The gradient that a process computes for one is its part of a sum: added up over the processes,
it is that of the complete sequence.

Refused: an LSTM, see `check_divisible`.
"""

from .attention import first_kept, laplace_attention, linear_attention, local_attention, own_positions, sees_others
from .collectives import Sent, count_sent, divide, fetch, gather, nothing, undivide
from .context import active_group, add_up, context_parallel, next_tokens, own_part, own_span, previous_tokens, total
from .convolutions import by_channels, filter_bank_conv, long_conv, short_conv
from .cross_attention import cross_attention
from .faults import ProcessLost, Watch, known_fault, meet
from .refusals import check_divisible
from .scans import diagonal_scan, s4_window_states, ssm_conv
from .segments import segment_recurrence
from .shards import Shards, Span, group_of, make_shards

__all__ = [
    "ProcessLost",
    "Sent",
    "Shards",
    "Span",
    "Watch",
    "active_group",
    "add_up",
    "by_channels",
    "check_divisible",
    "context_parallel",
    "count_sent",
    "cross_attention",
    "diagonal_scan",
    "divide",
    "fetch",
    "filter_bank_conv",
    "first_kept",
    "gather",
    "group_of",
    "known_fault",
    "laplace_attention",
    "linear_attention",
    "local_attention",
    "long_conv",
    "make_shards",
    "meet",
    "next_tokens",
    "nothing",
    "own_part",
    "own_positions",
    "own_span",
    "previous_tokens",
    "s4_window_states",
    "sees_others",
    "segment_recurrence",
    "short_conv",
    "ssm_conv",
    "total",
    "undivide",
]
