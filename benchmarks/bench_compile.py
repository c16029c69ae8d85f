"""Measure what `torch.compile` makes of a training step on the CPU: of the whole model, and of its layers one by one.

Run it from the repository root::

    python -m benchmarks.bench_compile --out benchmarks/results/compile_cpu.csv     # the kept record
    python -m benchmarks.bench_compile --report benchmarks/results/compile_cpu.csv  # its table
    python -m benchmarks.bench_compile --models chela --lengths 1024 --out runs/bench/few.csv

Each row is written when it is measured, and the same command goes on after the last one. The models are those of
`benchmarks.builders`: four layers (an encoder-decoder four and four) of width 256, batch 1, random weights. What is
compiled:

- nothing;
- layers: each layer by itself, so that the code of the first one serves the others of its kind;
- model: the whole model, as with ``--torch_compile``.

A cell has its own process without compiled code of earlier ones. Columns: `step_s`, seconds of a training step, the
median of several; `compile_s`, by how much the first step takes longer; `peak_mib`, memory at the peak of a later
step, over what the process held before. A step computes the logits of all tokens.
"""

import argparse
import itertools
import sys
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from benchmarks.bench_models import (
    PRECISIONS,
    forget_peak,
    in_process,
    limit_memory,
    memory,
    what_went_wrong,
    without_compiled_code,
)
from benchmarks.builders import build
from benchmarks.record import Row, command_line, conditions, fill, markdown_table
from benchmarks.workloads import seconds, training_step

DEFAULT_OUT = Path("runs/bench/compile_cpu.csv")
MODELS = ("spade", "spade-seq2seq", "chela", "bst-sh-s4", "llama-sdpa")
COMPILED = NOTHING, LAYERS, MODEL = ("nothing", "layers", "model")
KEYS = ("model", "precision", "length", "compiled")
MEASURES = ("step_s", "compile_s", "peak_mib")
STEPS = 5


def compile_layers(model: Any) -> int:
    """Compile each layer of a model by itself, those that its class does not divide; return how many."""
    layers = [module for module in model.modules() if type(module).__name__ in model._no_split_modules]
    for layer in layers:
        layer.compile()
    return len(layers)


def measure(
    pipe: Connection, model: str, precision: str, length: int, compiled: str, threads: int, deadline_s: float
) -> None:
    """Send the measures of one cell."""
    end = time.perf_counter() + deadline_s
    with what_went_wrong(pipe), without_compiled_code():
        limit_memory(threads)
        built = build(model).train()
        if compiled == LAYERS and not compile_layers(built):
            raise ValueError(f"{model} has no layers to compile")
        if compiled == MODEL:
            built.compile()
        step = training_step(built, length, precision)
        first = seconds(step)
        built.zero_grad(set_to_none=True)
        idle = forget_peak()
        later = [seconds(step)]
        pipe.send(("peak_mib", memory("VmHWM") - idle))
        while len(later) < STEPS and time.perf_counter() + max(later) < end:
            later.append(seconds(step))
        for spent in later:
            pipe.send(("step_s", spent))
        if compiled != NOTHING:
            pipe.send(("compile_s", max(0.0, first - min(later))))


def run(arguments: argparse.Namespace) -> list[Row]:
    """Measure every cell that the file does not have, and return all rows."""
    limit = arguments.time_limit

    def sent(*cell: Any) -> list[tuple[str, Any]]:
        return in_process(measure, (*cell, arguments.threads, limit * 0.9), limit)

    cells = itertools.product(arguments.models, arguments.precisions, arguments.lengths, COMPILED)
    return fill(arguments, KEYS, MEASURES, list(cells), sent)


def report(rows: list[Row]) -> str:
    """Return the table of a CSV's rows as Markdown."""
    plain = {tuple(row[name] for name in KEYS[:-1]): row for row in rows if row["compiled"] == NOTHING}
    lines = []
    for row in rows:
        keys = [row[name] for name in KEYS]
        if row["outcome"] != "ok":
            lines.append([*keys, *["-"] * 4, row["outcome"]])
            continue
        beside = plain.get(tuple(keys[:-1]), {})
        ratios = [f"{float(row[x]) / float(beside[x]):.2f}" if beside.get(x) else "-" for x in ("step_s", "peak_mib")]
        lines.append([*keys, row["step_s"], ratios[0], ratios[1], row["compile_s"] or "-", "ok"])
    header = [*KEYS, "step, s", "of the eager time", "of the eager memory", "compile, s", "outcome"]
    return f"{conditions(rows[0])}.\n\n{markdown_table(header, lines)}"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this benchmark's arguments."""
    parser.add_argument("--models", nargs="+", choices=MODELS, default=MODELS)
    parser.add_argument("--precisions", nargs="+", choices=PRECISIONS, default=PRECISIONS)
    parser.add_argument("--lengths", nargs="+", type=int, default=(4096,), metavar="TOKENS")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--time-limit", type=float, default=600.0, metavar="SECONDS", help="for one cell")


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, or print the table of an earlier run."""
    return command_line(__doc__, DEFAULT_OUT, add_arguments, run, report, argv)


if __name__ == "__main__":
    sys.exit(main())
