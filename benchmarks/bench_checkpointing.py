"""Measure what activation checkpointing saves of a training step's memory, and what it costs in time.

Run it from the repository root::

    python -m benchmarks.bench_checkpointing --out benchmarks/results/checkpointing_cpu.csv     # the kept record
    python -m benchmarks.bench_checkpointing --report benchmarks/results/checkpointing_cpu.csv  # its table
    python -m benchmarks.bench_checkpointing --models chela --lengths 1024 --out runs/bench/few.csv

Each row is written when it is measured, and the same command goes on after the last one. The models are those of
`benchmarks.builders`: four layers (an encoder-decoder four and four) of width 256, batch 1, random weights. Kept are

- everything: no checkpointing;
- operations, products: see `hf_hybrid.models.checkpointing.SAVED`;
- inputs: the layers' inputs, transformers' default.

A cell has its own process. Memory is that over the process that holds the model, in MiB: what lies between forward and
backward, and the peak of a step with its gradients. Time is the CPU's, of all threads, and the least of several steps;
so other programs disturb it less.
"""

import argparse
import itertools
import sys
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from benchmarks.bench_models import PRECISIONS, forget_peak, in_process, limit_memory, memory, what_went_wrong
from benchmarks.builders import OURS, build
from benchmarks.record import Row, command_line, conditions, fill, markdown_table
from benchmarks.workloads import TARGET, random_tokens, training_step

DEFAULT_OUT = Path("runs/bench/checkpointing_cpu.csv")
MODELS = ("spade-seq2seq", "chela", "bst-sh-s4", "srformer")
KEPT: dict[str, dict[str, Any] | None] = {
    "everything": None,
    "products": {"save": "products"},
    "operations": {"save": "operations"},
    "inputs": {"use_reentrant": False},
}
KEYS = ("model", "precision", "length", "kept")
MEASURES = ("held_mib", "peak_mib", "cpu_seconds")
STEPS = 3


def measure(
    pipe: Connection, model: str, precision: str, length: int, kept: str, threads: int, deadline_s: float
) -> None:
    """Send the measures of one cell."""
    started = time.perf_counter()
    with what_went_wrong(pipe):
        limit_memory(threads)
        built = build(model).train()
        if (options := KEPT[kept]) is not None:
            built.activation_checkpointing_enable(options)
        training_step(built, 16, precision)()
        built.zero_grad(set_to_none=True)
        tokens = random_tokens(built, 1, length)
        labels = random_tokens(built, 1, TARGET) if built.config.is_encoder_decoder else tokens
        idle = forget_peak()
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
            loss = built(input_ids=tokens, labels=labels, use_cache=False).loss
        pipe.send(("held_mib", forget_peak() - idle))
        loss.backward()
        del loss
        built.zero_grad(set_to_none=True)
        step, idle = training_step(built, length, precision), forget_peak()
        seconds = []
        for _ in range(STEPS):
            start = time.process_time()
            step()
            seconds.append(time.process_time() - start)
            if time.perf_counter() - started > deadline_s * len(seconds) / (len(seconds) + 1):
                break
        pipe.send(("peak_mib", memory("VmHWM") - idle))
        pipe.send(("cpu_seconds", min(seconds)))


def run(arguments: argparse.Namespace) -> list[Row]:
    """Measure every cell that the file does not have, and return all rows."""
    limit = arguments.time_limit

    def sent(*cell: Any) -> list[tuple[str, Any]]:
        return in_process(measure, (*cell, arguments.threads, limit * 0.9), limit)

    cells = itertools.product(arguments.models, arguments.precisions, arguments.lengths, KEPT)
    return fill(arguments, KEYS, MEASURES, list(cells), sent)


def report(rows: list[Row]) -> str:
    """Return a table for each precision and length."""
    first = rows[0]
    parts = [f"{conditions(first)}. Held between forward and backward / peak of a step, in MiB, and the step's time."]
    for case in dict.fromkeys((row["precision"], row["length"]) for row in rows):
        cells = {(row["model"], row["kept"]): row for row in rows if (row["precision"], row["length"]) == case}
        lines = [
            [model, *(_cell(cells.get((model, kept), {}), cells.get((model, "everything"), {})) for kept in KEPT)]
            for model in dict.fromkeys(model for model, _ in cells)
        ]
        parts += [f"**{case[0]}, {case[1]} tokens**", markdown_table(["model", *KEPT], lines)]
    return "\n\n".join(parts)


def _cell(row: Row, plain: Row) -> str:
    """Return a cell's measures, the time relative to that without checkpointing."""
    if row.get("outcome") != "ok":
        return row.get("outcome", "-").split(":")[0]
    held, peak = (f"{float(row[name]):.0f}" for name in MEASURES[:2])
    times = f", × {float(row['cpu_seconds']) / float(plain['cpu_seconds']):.2f}" if plain.get("cpu_seconds") else ""
    return f"{held} / {peak}{times}"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this benchmark's arguments."""
    parser.add_argument("--models", nargs="+", choices=OURS, default=MODELS)
    parser.add_argument("--precisions", nargs="+", choices=PRECISIONS, default=("bf16",))
    parser.add_argument("--lengths", nargs="+", type=int, default=(4096,), metavar="TOKENS")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--time-limit", type=float, default=600.0, metavar="SECONDS", help="for one cell")


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, or print the table of an earlier run."""
    return command_line(__doc__, DEFAULT_OUT, add_arguments, run, report, argv)


if __name__ == "__main__":
    sys.exit(main())
