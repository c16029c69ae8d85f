"""Measure the tokens that `generate` makes in a second at sizes where Python takes most of the time, on the CPU.

Run it from the repository root::

    python -m benchmarks.bench_generation --out benchmarks/results/generation_cpu.csv     # the kept record
    python -m benchmarks.bench_generation --report benchmarks/results/generation_cpu.csv  # its table

The models are those of `benchmarks.builders.SIZED`, each of ours beside a peer of equal width and depth; fp32, random
weights, greedy, with an attention mask and without padding. Each measurement has its own process; models take turns,
and all of them come again in each round, since speed drifts. The table has medians over the rounds, and the
same command goes on where it was stopped. `benchmarks.bench_compare --tasks generate` compares two commits. Columns:

- decoding: "eager", or "compiled" with a static cache, where the model's class says that its decoding step compiles;
- start: milliseconds of a call for one token: the prompt's or source's forward, and what `generate` prepares;
- token: milliseconds of each further token, from the difference to a call for `TOKENS` more, the median of `REPEATS`,
  and from the lowest to the highest;
- operators: torch's operators that a token calls, where it is not compiled;
- compile: seconds that the first call takes longer than a later one, where it is compiled; no other column has them.
  No code of an earlier process is there to be loaded.
"""

import argparse
import itertools
import statistics
import sys
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode
from transformers import CompileConfig

from benchmarks.bench_models import in_process, limit_memory, what_went_wrong, without_compiled_code
from benchmarks.builders import SIZED, SIZES, build_sized
from benchmarks.record import (
    ROUND,
    Row,
    command_line,
    conditions,
    fill_rounds,
    growing_columns,
    markdown_table,
    medians,
    of_rounds,
    positive_int,
)
from benchmarks.workloads import generation, seconds

DEFAULT_OUT = Path("runs/bench/generation_cpu.csv")
PROMPT, TOKENS, REPEATS = 64, 64, 3
BATCHES = (1, 32)
EAGER, COMPILED = "eager", "compiled"
KEYS = ("size", "model", "batch", "decoding")
MEASURES = ("start_ms", "token_ms", "min_ms", "max_ms", "operators", "compile_s")
COLUMNS = growing_columns((*KEYS, ROUND), MEASURES)
BACKEND = "inductor"


class _Operators(TorchDispatchMode):
    """Counts operators."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **kwargs or {})


def operators(call: Callable[[], object]) -> int:
    """Return the number of operators that a call runs."""
    with _Operators() as counted:
        call()
    return counted.count


def compiling() -> dict[str, Any]:
    """Return the arguments of `generate` that compile the decoding step, also on a CPU."""
    compiled = CompileConfig(fullgraph=True, mode=None, backend=BACKEND)
    compiled._compile_all_devices = True
    return {"cache_implementation": "static", "compile_config": compiled}


def measure(pipe: Connection, size: str, name: str, batch: int, decoding: str, threads: int) -> None:
    """Send the columns of one cell."""
    with what_went_wrong(pipe), without_compiled_code():
        limit_memory(threads)
        model = build_sized(name, size)
        settings = compiling() if decoding == COMPILED else {}
        short, long = (generation(model, PROMPT, tokens, batch, **settings) for tokens in (1, 1 + TOKENS))
        first = seconds(long)  # allocates, and compiles; a second call may compile for lengths that vary
        if decoding == COMPILED:
            again, later = seconds(long), seconds(long)
            pipe.send(("compile_s", max(0.0, first + again - 2 * later)))
        else:
            few = generation(model, PROMPT, 5, batch)
            pipe.send(("operators", (operators(few) - operators(short)) / 4))
        short()
        spent: dict[str, list[float]] = {"start": [], "token": []}
        for _ in range(REPEATS):
            times = [1e3 * seconds(call) for call in (short, long)]
            spent["start"].append(times[0])
            spent["token"].append((times[1] - times[0]) / TOKENS)
        for what, values in spent.items():
            pipe.send((f"{what}_ms", statistics.median(values)))
        pipe.send(("min_ms", min(spent["token"])))
        pipe.send(("max_ms", max(spent["token"])))


def run(arguments: argparse.Namespace) -> list[Row]:
    """Measure every cell in each round, as far as the file does not have it, and return all rows."""

    def measured(cell: Row, number: int) -> Row:
        asked = (cell["size"], cell["model"], int(cell["batch"]), cell["decoding"], arguments.threads)
        return medians(in_process(measure, asked, arguments.time_limit), MEASURES)

    compile_too = {name for name in arguments.models if build_sized(name, "tiny")._can_compile_fullgraph}
    values = itertools.product(arguments.sizes, arguments.batches, arguments.decoding, arguments.models)
    cells = [
        {"size": size, "model": model, "batch": str(batch), "decoding": decoding}
        for size, batch, decoding, model in values
        if decoding == EAGER or model in compile_too
    ]
    return fill_rounds(arguments, COLUMNS, (*KEYS, *MEASURES, "outcome"), cells, measured)


def report(rows: list[Row]) -> str:
    """Return the table of a CSV's rows as Markdown."""
    rows = of_rounds(rows)
    header = [*KEYS, "start, ms", "token, ms", "lowest to highest", "tokens/s", "of the peer's time", "operators"]
    header += ["compile, s"]
    lines = []
    measured = {tuple(row[name] for name in KEYS): float(row["token_ms"]) for row in rows if row["outcome"] == "ok"}
    for row in rows:
        keys = [row[name] for name in KEYS]
        if row["outcome"] != "ok":
            lines.append([*keys, *["-"] * 6, row["outcome"]])
            continue
        token = float(row["token_ms"])
        peer = measured.get((row["size"], SIZED[row["model"]], row["batch"], row["decoding"]))
        rate = f"{1e3 * int(row['batch']) / token:.0f}"
        share = f"{token / peer:.2f}" if peer else "-"
        last = (row["operators"] or "-", row["compile_s"] or "-")
        spread = f"{row['min_ms']} to {row['max_ms']}"
        lines.append([*keys, row["start_ms"], row["token_ms"], spread, rate, share, *last])
    return f"{conditions(rows[0])}.\n\n{markdown_table(header, lines)}"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this benchmark's arguments."""
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=tuple(SIZES))
    parser.add_argument("--models", nargs="+", choices=SIZED, default=tuple(SIZED))
    parser.add_argument("--batches", nargs="+", type=int, default=BATCHES)
    parser.add_argument("--decoding", nargs="+", choices=(EAGER, COMPILED), default=(EAGER, COMPILED))
    parser.add_argument("--rounds", type=positive_int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--time-limit", type=float, default=300.0, metavar="SECONDS", help="for one cell")


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, or print the table of an earlier run."""
    return command_line(__doc__, DEFAULT_OUT, add_arguments, run, report, argv)


if __name__ == "__main__":
    sys.exit(main())
