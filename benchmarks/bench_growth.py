"""Measure how time and memory grow with the length, for every architecture and mode, in one table.

Run it from the repository root::

    python -m benchmarks.bench_growth --out benchmarks/results/growth_cpu.csv     # the kept record; about two hours
    python -m benchmarks.bench_growth --report benchmarks/results/growth_cpu.csv  # its table
    python -m benchmarks.bench_growth --models chela --tasks decode --lengths 1024 2048 --out runs/bench/few.csv

Each row is written when it is measured. Stopped? The same command goes on after the last row; it refuses a file that
another machine or other versions began, and does not repeat what ran out of memory or time. The models are those of
`benchmarks.builders`, `FURTHER` forms in the first precision only: four layers (an encoder-decoder four and four) of
width 256, batch 1, random weights, with the dropout of the defaults. The tasks, each with its memory:

- step: forward and backward, "bf16" under autocast; peak over the process that holds the model (see
  `benchmarks.bench_models`). The loss is computed alone (`skip_logits`), as the scripts do: how the logits of all
  tokens grow is not what is asked;
- forward: without gradients, with the logits of all tokens; the same peak; for "bf16" the model is cast;
- decode: one token after a prompt, or a source, of that length; the cache; for "bf16" the model is cast. The mean of a
  window's tokens, since some do more than others.

A cell has its own process; a step or forward is the median of the calls that begin within ten seconds, after one that
warms up. The lengths of a model's task follow each other, so that they are timed under the same load. The process may
hold two thirds of the machine's memory, which the column `limit_mib` records. Steps and forwards are timed a second
time in the same process, after glibc's allocator has been told to keep what is freed, in huge pages (`kept_seconds`):
by default large blocks go back to the system, the next ones cost page faults, and small pages outgrow the processor's
table of them. If only the time by default grows faster than `LINEAR`, that is why. What holds more than half of the
limit is not timed again.

An exponent is the least-squares slope of the logarithm over that of the length, over all lengths that were measured,
and between the last two: 1 is linear growth, 0 none. The exit status is 1, once everything is written, if one is above
`LINEAR` and neither that nor `REASONS` says why.
"""

import argparse
import itertools
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from benchmarks.bench_language_models import WINDOW
from benchmarks.bench_models import (
    PRECISIONS,
    forget_peak,
    in_process,
    keep_freed_memory,
    limit_memory,
    memory,
    most_memory,
    what_went_wrong,
)
from benchmarks.builders import BIDIRECTIONAL, FURTHER, LONGEST_BART, MODES, OURS, build
from benchmarks.record import Row, command_line, conditions, fill, markdown_table, slope
from benchmarks.workloads import decoding, forward, held_mib, seconds, training_step

DEFAULT_OUT = Path("runs/bench/growth_cpu.csv")
TASKS = ("step", "forward", "decode")
LENGTHS = (1024, 4096, 16384, 65536)
LONGEST = dict.fromkeys(("srformer", "srformer-segmented", "srformer-recurrent"), 16384) | {
    "srformer-bart": LONGEST_BART
}
"""The longest inputs of models whose encoder is quadratic."""
MODELS = (*OURS, *MODES, *FURTHER)
CALLS = {"step": 2, "forward": 3}
DECODED = WINDOW
ENOUGH_S = 10.0
"""No further call begins after so much time."""
KEYS = ("model", "task", "precision", "length")
MEASURES = {"seconds": "time", "held_mib": "memory"}
KEPT = "kept_seconds"
"""As "seconds", with an allocator that keeps memory in huge pages."""
LIMIT = "limit_mib"
LINEAR = 1.1
"""Exponents above it are explained."""
UNEXPLAINED = "not explained yet"
FREED = "small pages, fetched anew; see the exponent beside it"

# (model, task, "time" or "memory") -> why it grows faster than the length
REASONS = {
    (model, task, "time"): f"{parent}'s encoder: every token attends to every other"
    for model, parent in (
        *((model, "T5") for model in ("srformer", "srformer-segmented", "srformer-recurrent")),
        ("srformer-bart", "BART"),
    )
    for task in ("step", "forward")
} | {
    (model, task, "memory"): "T5's encoder: its position bias, and the scores where they are kept, are square"
    for model in ("srformer", "srformer-segmented", "srformer-recurrent")
    for task in ("step", "forward")
}


def measure(
    pipe: Connection, model: str, task: str, precision: str, length: int, threads: int, deadline_s: float
) -> None:
    """Send the seconds of calls of one cell, and the MiB that it holds."""
    started = time.perf_counter()
    with what_went_wrong(pipe):
        limit_memory(threads, limit := most_memory())
        pipe.send((LIMIT, limit / 2**20))
        built = build(model)
        if task != "step":
            built = built.to(PRECISIONS[precision])
        if task == "decode":
            call, cache = decoding(built, length)
        else:
            make = forward if task == "forward" else partial(training_step, precision=precision, skip_logits=True)
            make(built, 16)()
            built.zero_grad(set_to_none=True)
            call, idle = make(built, length), forget_peak()
        call()
        if task == "decode":
            pipe.send(("held_mib", held_mib(cache)))
            pipe.send(("seconds", seconds(call, DECODED)))
            return
        held = memory("VmHWM") - idle
        pipe.send(("held_mib", held))
        deadline = started + deadline_s
        took = _time(pipe, "seconds", call, CALLS[task], deadline)
        heap = held * 2**20  # beside what the process has already; NaN where memory is not known
        fits = time.perf_counter() + 2 * took <= deadline and 2 * heap <= limit  # one more call warms up
        if fits and keep_freed_memory(round(heap)):
            call()
            _time(pipe, KEPT, call, CALLS[task], deadline)


def _time(pipe: Connection, name: str, call: Callable[[], object], calls: int, deadline: float) -> float:
    """Send the seconds of calls, at least of one, until there is no time for another; return those of the last one."""
    enough = time.perf_counter() + ENOUGH_S
    for _ in range(calls):
        pipe.send((name, (took := seconds(call))))
        if (now := time.perf_counter()) > enough or now + took > deadline:
            break
    return took


def run(arguments: argparse.Namespace) -> list[Row]:
    """Measure every cell that the file does not have, and return all rows."""
    limit = arguments.time_limit

    def sent(model: str, task: str, precision: str, length: int) -> list[tuple[str, Any]]:
        return in_process(measure, (model, task, precision, length, arguments.threads, limit * 0.9), limit)

    asked = (arguments.models, arguments.tasks, arguments.precisions, arguments.lengths)
    cells = [
        (model, task, precision, length)
        for model, task, precision, length in itertools.product(*asked)
        if length <= LONGEST.get(model, length)
        and not (task == "decode" and model in BIDIRECTIONAL)
        and (model not in FURTHER or precision == arguments.precisions[0])
    ]
    return fill(arguments, KEYS, [*MEASURES, KEPT, LIMIT], cells, sent)


def _growth(rows: Sequence[Row]) -> Iterator[tuple[list[str], list[str]]]:
    """Yield model, task, precision, lengths and exponents of each group of rows, and its notes."""
    groups: dict[tuple[str, str, str], list[Row]] = {}
    for row in sorted(rows, key=lambda row: int(row["length"])):
        groups.setdefault((row["model"], row["task"], row["precision"]), []).append(row)
    for key in dict.fromkeys((row["model"], row["task"], row["precision"]) for row in rows):
        measured = [row for row in groups[key] if row["outcome"] == "ok"]
        kept = _exponents(measured, KEPT) if all(row.get(KEPT) for row in measured) else []
        notes, exponents = [], []
        for column, name in MEASURES.items():
            found = _exponents(measured, column)
            exponents.append(_shown(found))
            if max(found, default=0) > LINEAR:
                freed = name == "time" and kept and max(kept) <= LINEAR
                notes.append(f"{name}: {FREED if freed else REASONS.get((*key[:2], name), UNEXPLAINED)}")
        notes += [f"{row['length']}: {row['outcome']}" for row in groups[key] if row["outcome"] != "ok"]
        if key[0] in LONGEST:
            notes.append(f"not measured beyond {LONGEST[key[0]]}")
        lengths = " to ".join(dict.fromkeys([measured[0]["length"], measured[-1]["length"]])) if measured else "-"
        yield [*key, lengths, exponents[0], _shown(kept), exponents[1]], notes


def _exponents(measured: Sequence[Row], column: str) -> list[float]:
    """Return a column's exponents over all lengths and between the last two."""
    points = [(int(row["length"]), float(row[column])) for row in measured if float(row.get(column) or 0) > 0]
    return [round(slope(some), 2) for some in (points, points[-2:]) if len(some) > 1]


def _shown(exponents: Sequence[float]) -> str:
    return ", ".join(f"{exponent:.2f}" for exponent in exponents) or "-"


def report(rows: list[Row]) -> str:
    """Return the table of exponents, with the reason for each that is above `LINEAR`."""
    limits = [float(row[LIMIT]) for row in rows if row.get(LIMIT)]
    limit = f" A process may hold {min(limits) / 1024:.1f} GiB." if limits else ""
    caption = (
        f"{conditions(rows[0])}. Exponents over the lengths that were measured, and between the last two; a note "
        f"where one is above {LINEAR}, and where the lengths end early.{limit}"
    )
    exponents = ["exponent of time", "with kept huge pages", "exponent of memory"]
    header = ["model", "task", "precision", "lengths", *exponents, "note"]
    lines = [[*cells, "; ".join(notes)] for cells, notes in _growth(rows)]
    return f"{caption}\n\n{markdown_table(header, lines)}"


def unexplained(rows: list[Row]) -> list[str]:
    """Return a line for each exponent above `LINEAR` without a reason."""
    return [
        f"{' '.join(cells[:3])}: {note}"
        for cells, notes in _growth(rows)
        for note in notes
        if note.endswith(UNEXPLAINED)
    ]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this benchmark's arguments."""
    parser.add_argument("--models", nargs="+", choices=MODELS, default=MODELS)
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=TASKS)
    parser.add_argument("--precisions", nargs="+", choices=PRECISIONS, default=tuple(PRECISIONS))
    parser.add_argument("--lengths", nargs="+", type=int, default=LENGTHS, metavar="TOKENS")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--time-limit", type=float, default=600.0, metavar="SECONDS", help="for one cell")


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, or print the table of an earlier run."""
    return command_line(__doc__, DEFAULT_OUT, add_arguments, run, report, argv, unexplained)


if __name__ == "__main__":
    sys.exit(main())
