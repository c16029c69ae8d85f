"""Profile training steps on the CPU: where the time goes, by groups of operators.

Run it from the repository root::

    python -m benchmarks.bench_profile --out benchmarks/results/profile_cpu.csv     # the kept record
    python -m benchmarks.bench_profile --report benchmarks/results/profile_cpu.csv  # its tables
    python -m benchmarks.bench_profile --models chela --lengths 4096 --precisions bf16 --out runs/bench/chela.csv

The models are those of `benchmarks.builders`, with random weights and the dropout of their defaults; a step is forward
and backward of one sequence, without an optimizer, "bf16" under autocast. Each row is written when it is measured, in
a process of its own, and the same command goes on where it was stopped. It has the milliseconds of a step without a
profiler, and of steps under torch.profiler the milliseconds of each group: the time that its operators spend in
themselves and not in others that they call, which get theirs. An operator belongs to a group by the first of these:

1. the operator of this package (or SDPA) that it is part of, so products within local attention are local attention;
2. its own name, or the name of the nearest operator around it: matrix products, norms, copies and casts, ...;
3. the module that called it, also in the backward: norms, state space models;
4. otherwise it is "rest".

"Host" is the time outside of operators, mostly Python, and what the profiler itself takes.
"""

import argparse
import itertools
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile, record_function

from benchmarks.bench_models import PRECISIONS, in_process, limit_memory, what_went_wrong
from benchmarks.builders import MODES, OURS, build
from benchmarks.record import Row, command_line, conditions, fill, markdown_table
from benchmarks.workloads import training_step

DEFAULT_OUT = Path("runs/bench/profile_cpu.csv")
MODELS = ("spade-seq2seq", "spade", "chela", "bst-sh-s4")
LENGTHS = (1024, 4096, 16384)
STEPS = 2
KEYS = ("model", "precision", "length")
GROUPS = {
    "products_ms": "matrix products",
    "local_attention_ms": "local attention",
    "linear_attention_ms": "linear attention",
    "full_attention_ms": "full attention",
    "segments_ms": "recurrence of segments",
    "convolutions_ms": "FFT and long convolutions",
    "short_conv_ms": "short convolutions",
    "state_space_ms": "state space models and filters",
    "norms_ms": "norms",
    "dropout_ms": "dropout",
    "elementwise_ms": "activations, gates, sums",
    "copies_ms": "copies and casts",
    "loss_ms": "loss",
    "rest_ms": "rest",
    "host_ms": "host",
}
MEASURES = ("step_ms", *GROUPS)
_SCOPE = "group of a module: "
# beginning of the name of an operator of the package, without its namespace -> group; the first that fits
_PACKAGE = {
    "local_attention": "local_attention_ms",
    "linear_attention": "linear_attention_ms",
    "full_attention": "full_attention_ms",
    "segment_": "segments_ms",
    "short_conv": "short_conv_ms",
    "long_conv": "convolutions_ms",
    "spectral_conv": "convolutions_ms",
    "filter_bank_conv": "convolutions_ms",
    "online_conv": "convolutions_ms",
    "s4_": "state_space_ms",
    "ssm_": "state_space_ms",
    "frozen_s4_": "state_space_ms",
    "diagonal_scan": "state_space_ms",
    "dropout": "dropout_ms",
    "relu_dropout": "dropout_ms",
}
_ATEN = {
    "products_ms": "mm bmm addmm baddbmm addbmm mv addmv dot matmul linear mkldnn_linear",
    "convolutions_ms": "fft_rfft fft_irfft _fft_r2c _fft_c2r _fft_c2c",
    "norms_ms": "layer_norm native_layer_norm native_layer_norm_backward rms_norm _fused_rms_norm "
    "_fused_rms_norm_backward",
    "dropout_ms": "dropout native_dropout native_dropout_backward bernoulli_ random_",
    "elementwise_ms": "add add_ sub sub_ rsub mul mul_ div div_ neg exp log pow pow_ sqrt rsqrt rsqrt_ reciprocal sum "
    "mean abs sigmoid sigmoid_backward silu silu_backward relu relu_ gelu gelu_backward threshold_backward tanh "
    "tanh_backward clamp clamp_min clamp_min_ where masked_fill masked_fill_ addcmul addcmul_ lerp",
    "copies_ms": "copy_ clone contiguous to _to_copy cat stack repeat fill_ zero_ zeros zeros_like ones ones_like "
    "new_zeros constant_pad_nd pad index index_select slice_backward select_backward flip",
    "loss_ms": "cross_entropy_loss log_softmax _log_softmax _log_softmax_backward_data nll_loss nll_loss_forward "
    "nll_loss_backward nll_loss_nd",
}
_OWN = {f"aten::{name}": group for group, names in _ATEN.items() for name in names.split()}
_ATTENTION = "aten::scaled_dot_product_attention"


def group_of_operator(name: str) -> str | None:
    """Return the group of one of the package's operators, by its name without the namespace."""
    return next((group for beginning, group in _PACKAGE.items() if name.startswith(beginning)), None)


def name_modules(model: nn.Module) -> None:
    """Let a profile show which operators norms and state space models call."""
    from hf_hybrid.layers.state_space import StateSpaceLayer

    for module in model.modules():
        if isinstance(module, StateSpaceLayer):
            _enclose(module, "state_space_ms")
        elif type(module).__name__.endswith("Norm"):
            _enclose(module, "norms_ms")


def _enclose(module: nn.Module, group: str) -> None:
    opened: list[Any] = []

    def enter(*_: object) -> None:
        opened.append(record_function(_SCOPE + group))
        opened[-1].__enter__()

    def leave(*_: object) -> None:
        opened.pop().__exit__(None, None, None)

    module.register_forward_pre_hook(enter)
    module.register_forward_hook(leave)


def sum_groups(events: Iterable[Any], namespace: str) -> dict[str, float]:
    """Add up the milliseconds that operators spend in themselves, by group.

    Args:
        events: Those of a profile, in any order.
        namespace: Of the package's operators.
    """
    events = list(events)
    # an operator of the forward and its gradient have the same number
    forward = {}
    for event in events:
        if event.sequence_nr >= 0 and not _is_backward(event) and (scope := _scope_around(event, {})):
            forward.setdefault(event.sequence_nr, scope)
    sums: dict[str, float] = defaultdict(float)
    for event in events:
        if not event.name.startswith(_SCOPE):
            sums[_group_of(event, namespace, forward)] += event.self_cpu_time_total / 1000
    return sums


def _is_backward(event: Any) -> bool:
    return bool(event.name.startswith("autograd::engine::evaluate_function"))


def _scope_around(event: Any, forward: Mapping[int, str]) -> str | None:
    """Return the group of the module that called an operator, or whose gradient it computes."""
    while event is not None:
        if event.name.startswith(_SCOPE):
            return str(event.name.removeprefix(_SCOPE))
        if _is_backward(event) and event.sequence_nr in forward:
            return forward[event.sequence_nr]
        event = event.cpu_parent
    return None


def _group_of(event: Any, namespace: str, forward: Mapping[int, str]) -> str:
    own, around = None, event
    while around is not None:
        if around.name == _ATTENTION:
            return "full_attention_ms"
        if around.name.startswith(f"{namespace}::"):
            name = around.name.removeprefix(f"{namespace}::")
            return group_of_operator(name) or "rest_ms"
        own = own or _OWN.get(around.name)
        around = around.cpu_parent
    return own or _scope_around(event, forward) or "rest_ms"


def profiled(call: Callable[[], object], namespace: str) -> dict[str, float]:
    """Return the milliseconds of a call by group, the mean of `STEPS` calls."""
    with profile(activities=[ProfilerActivity.CPU]):  # the first profile of a process also starts the profiler
        torch.zeros(1)
    with profile(activities=[ProfilerActivity.CPU]) as found:
        start = time.perf_counter()
        for _ in range(STEPS):
            call()
        spent = 1000 * (time.perf_counter() - start)
    sums = sum_groups(found.events(), namespace)
    sums["host_ms"] = max(0.0, spent - sum(sums.values()))
    return {group: sums.get(group, 0.0) / STEPS for group in GROUPS}


def measure(pipe: Connection, name: str, precision: str, length: int, threads: int) -> None:
    """Send the columns of one cell."""
    from hf_hybrid.kernels.dispatch import NAMESPACE

    with what_went_wrong(pipe):
        limit_memory(threads)
        model = build(name)
        step = training_step(model, length, precision)
        step()  # the first one allocates
        spent = []
        for _ in range(STEPS):
            start = time.perf_counter()
            step()
            spent.append(time.perf_counter() - start)
        pipe.send(("step_ms", 1000 * statistics.median(spent)))
        name_modules(model)
        for group, value in profiled(step, NAMESPACE).items():
            pipe.send((group, value))


def run(arguments: argparse.Namespace) -> list[Row]:
    """Measure every cell that the file does not have, and return all rows."""

    def sent(model: str, precision: str, length: int) -> list[tuple[str, Any]]:
        return in_process(measure, (model, precision, length, arguments.threads), arguments.time_limit)

    cells = itertools.product(arguments.models, arguments.precisions, arguments.lengths)
    return fill(arguments, KEYS, MEASURES, cells, sent)


def report(rows: list[Row]) -> str:
    """Return a table for each model: groups down, precisions and lengths across."""
    parts = [
        f"{conditions(rows[0])}. Shares of a step's time under the profiler, and their milliseconds; the last line is "
        "a step without the profiler."
    ]
    for model in dict.fromkeys(row["model"] for row in rows):
        cells = [row for row in rows if row["model"] == model]
        header = [model, *(f"{row['precision']}, {row['length']}" for row in cells)]
        lines = [
            [title, *(_share(row, group) for row in cells)]
            for group, title in GROUPS.items()
            if any(float(row.get(group) or 0) for row in cells)
        ]
        steps = [f"{float(row['step_ms']):.0f} ms" if row.get("step_ms") else row["outcome"] for row in cells]
        parts.append(markdown_table(header, [*lines, ["step", *steps]]))
    return "\n\n".join(parts)


def _share(row: Row, group: str) -> str:
    if not row.get(group):
        return "-"
    total = sum(float(row[name]) for name in GROUPS)
    return f"{100 * float(row[group]) / total:.0f} % ({float(row[group]):.0f})"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this benchmark's arguments."""
    parser.add_argument("--models", nargs="+", choices=dict.fromkeys((*MODELS, *OURS, *MODES)), default=MODELS)
    parser.add_argument("--precisions", nargs="+", choices=PRECISIONS, default=tuple(PRECISIONS))
    parser.add_argument("--lengths", nargs="+", type=int, default=LENGTHS, metavar="TOKENS")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--time-limit", type=float, default=300.0, metavar="SECONDS", help="for one cell")


def main(argv: Sequence[str] | None = None) -> int:
    """Profile, or print the tables of an earlier run."""
    return command_line(__doc__, DEFAULT_OUT, add_arguments, run, report, argv)


if __name__ == "__main__":
    sys.exit(main())
