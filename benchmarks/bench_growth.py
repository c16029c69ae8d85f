"""Measure how time and memory grow with the length, for every architecture and task, in one table.

Run it from the repository root::

    python -m benchmarks.bench_growth --out benchmarks/results/growth_cpu.csv     # the kept record; hours
    python -m benchmarks.bench_growth --report benchmarks/results/growth_cpu.csv  # its table
    python -m benchmarks.bench_growth --models chela --tasks decode --lengths 1024 2048 --out runs/bench/few.csv

Each row is written when it is measured. Stopped? The same command goes on after the last row; it refuses a file that
another machine or other versions began, and does not repeat what ran out of memory or time. The models are those of
`benchmarks.builders`: four layers (an encoder-decoder four and four) of width 256, batch 1, fp32, random weights. The
tasks, each with its memory:

- step: forward and backward; peak over the process that holds the model (see `benchmarks.bench_models`);
- forward: without gradients, with the logits of all tokens; the same peak;
- decode: one token after a prompt, or a source, of that length; the cache.

A cell has its own process and is the median of its calls after one that warms up. An exponent is the least-squares
slope of the logarithm over that of the length, over all lengths that were measured: 1 is linear growth, 0 none.
"""

import argparse
import itertools
import sys
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from benchmarks.bench_models import forget_peak, in_process, limit_memory, memory, what_went_wrong
from benchmarks.builders import OURS, build
from benchmarks.record import Row, command_line, conditions, fill, markdown_table, slope
from benchmarks.workloads import decoding, forward, held_mib, training_step

DEFAULT_OUT = Path("runs/bench/growth_cpu.csv")
TASKS = ("step", "forward", "decode")
LENGTHS = (1024, 2048, 4096, 8192, 16384, 32768, 65536)
CALLS = {"step": 2, "forward": 3, "decode": 64}
KEYS = ("model", "task", "length")
MEASURES = {"seconds": "time", "held_mib": "memory"}
LINEAR = 1.1
"""Exponents above it are explained."""

# (model, task, "time" or "memory") -> why it grows faster than the length
REASONS = {
    ("srformer", task, "time"): "T5's encoder: every token attends to every other" for task in ("step", "forward")
} | {
    ("srformer", task, "memory"): "T5's encoder: its position bias, and the scores where they are kept, are square"
    for task in ("step", "forward")
}


def measure(pipe: Connection, model: str, task: str, length: int, threads: int, deadline_s: float) -> None:
    """Send the seconds of calls of one cell, and the MiB that it holds."""
    started = time.perf_counter()
    with what_went_wrong(pipe):
        limit_memory(threads)
        built = build(model)
        if task == "decode":
            call, cache = decoding(built, length)
        else:
            make = forward if task == "forward" else lambda model, tokens: training_step(model, tokens, "fp32")
            make(built, 16)()
            built.zero_grad(set_to_none=True)
            call, idle = make(built, length), forget_peak()
        call()
        pipe.send(("held_mib", held_mib(cache) if task == "decode" else memory("VmHWM") - idle))
        for _ in range(CALLS[task]):
            start = time.perf_counter()
            call()
            pipe.send(("seconds", (took := time.perf_counter() - start)))
            if time.perf_counter() - started + took > deadline_s:
                break


def run(arguments: argparse.Namespace) -> list[Row]:
    """Measure every cell that the file does not have, and return all rows."""
    limit = arguments.time_limit

    def sent(model: str, task: str, length: int) -> list[tuple[str, Any]]:
        return in_process(measure, (model, task, length, arguments.threads, limit * 0.9), limit)

    cells = itertools.product(arguments.models, arguments.tasks, arguments.lengths)
    return fill(arguments, KEYS, list(MEASURES), sorted(cells, key=lambda cell: cell[-1]), sent)


def report(rows: list[Row]) -> str:
    """Return the table of exponents, with the reason for each that is above `LINEAR`."""
    first = rows[0]
    caption = (
        f"{conditions(first)}. Exponents over the lengths that "
        f"were measured; a note where one is above {LINEAR}, and where the lengths end early."
    )
    header = ["model", "task", "lengths", "exponent of time", "exponent of memory", "note"]
    lines = []
    for model, task in dict.fromkeys((row["model"], row["task"]) for row in rows):
        own = sorted(
            (row for row in rows if (row["model"], row["task"]) == (model, task)), key=lambda row: int(row["length"])
        )
        measured = [row for row in own if row["outcome"] == "ok"]
        notes = []
        exponents = []
        for column, name in MEASURES.items():
            points = [(int(row["length"]), float(row[column])) for row in measured if float(row[column]) > 0]
            exponents.append("-" if len(points) < 2 else f"{slope(points):.2f}")
            if len(points) > 1 and float(exponents[-1]) > LINEAR:
                notes.append(f"{name}: {REASONS.get((model, task, name), 'not explained yet')}")
        notes += [f"{row['length']}: {row['outcome']}" for row in own if row["outcome"] != "ok"]
        lengths = " to ".join(dict.fromkeys([measured[0]["length"], measured[-1]["length"]])) if measured else "-"
        lines.append([model, task, lengths, *exponents, "; ".join(notes)])
    return f"{caption}\n\n{markdown_table(header, lines)}"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this benchmark's arguments."""
    parser.add_argument("--models", nargs="+", choices=OURS, default=OURS)
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=TASKS)
    parser.add_argument("--lengths", nargs="+", type=int, default=LENGTHS, metavar="TOKENS")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--time-limit", type=float, default=600.0, metavar="SECONDS", help="for one cell")


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, or print the table of an earlier run."""
    return command_line(__doc__, DEFAULT_OUT, add_arguments, run, report, argv)


if __name__ == "__main__":
    sys.exit(main())
