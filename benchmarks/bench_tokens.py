"""Measure the time of one decoded token against the bytes of weights that it must read, on the CPU.

Run it from the repository root::

    python -m benchmarks.bench_tokens --out benchmarks/results/tokens_cpu.csv     # the kept record
    python -m benchmarks.bench_tokens --report benchmarks/results/tokens_cpu.csv  # its table

The models are those of `benchmarks.builders`, and two peers; fp32, random weights. Each row is written when it is
measured, in a process of its own, and the same command goes on where it was stopped. A cell is a model, a batch and a
length of the prompt, or of an encoder-decoder's source. The columns:

- weights: MiB of the parameters that the operators of a decoded token read; of an embedding table that is not the
  head, too, only the rows of the batch;
- cache: MiB that the cache holds, most of which a token reads, too;
- token: milliseconds of a forward of one token for every row, the median of `TOKENS`;
- floor: the time to read the weights once, at the rate at which this process sums `MEASURED_MIB` of numbers;
- host: the share of the token's time that is outside of torch's operators, mostly Python, in a profile of `PROFILED`
  tokens; the profiler's own work adds to it.
"""

import argparse
import itertools
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from benchmarks.bench_models import in_process, limit_memory, what_went_wrong
from benchmarks.builders import OURS, build
from benchmarks.record import Row, command_line, conditions, fill, markdown_table
from benchmarks.workloads import decoding, held_mib

DEFAULT_OUT = Path("runs/bench/tokens_cpu.csv")
MODELS = (*OURS, "llama-sdpa", "mamba2")
BATCHES, LENGTHS = (1, 32), (1024,)
TOKENS = 64
PROFILED = 8
MEASURED_MIB = 256
KEYS = ("model", "batch", "length")
MEASURES = ("weights_mib", "cache_mib", "token_ms", "floor_ms", "host_share")


class _Reads(TorchDispatchMode):
    """Notes the bytes that operators read of some parameters: all, or of a table of embeddings the rows looked up."""

    def __init__(self, parameters: Iterable[torch.Tensor]) -> None:
        super().__init__()
        self.sizes = {x.untyped_storage().data_ptr(): x.numel() * x.element_size() for x in parameters}
        self.read: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for x in tree_leaves((args, kwargs)):
            place = x.untyped_storage().data_ptr() if isinstance(x, torch.Tensor) else 0
            if place in self.sizes:
                size = self.sizes[place]
                if func is torch.ops.aten.embedding.default:
                    size = min(size, args[1].numel() * args[0].shape[1] * args[0].element_size())
                self.read[place] = max(size, self.read.get(place, 0))
        return func(*args, **kwargs or {})


def weights_read(model: torch.nn.Module, call: Callable[[], object]) -> int:
    """Return the bytes of parameters that the operators of a call read."""
    with _Reads(model.parameters()) as reads:
        call()
    return sum(reads.read.values())


def reading_rate(mib: int = MEASURED_MIB) -> float:
    """Return the bytes per second at which this process sums numbers, the best of five."""
    numbers = torch.ones(mib * 2**18)
    best = 0.0
    for _ in range(5):
        start = time.perf_counter()
        numbers.sum()
        best = max(best, numbers.nbytes / (time.perf_counter() - start))
    return best


def host_share(call: Callable[[], object]) -> float:
    """Return the share of the time of calls that is outside of torch's operators, with the profiler's own time."""
    for calls in (1, PROFILED):  # the first profile of a process also starts the profiler
        with profile(activities=[ProfilerActivity.CPU]) as found:
            start = time.perf_counter()
            for _ in range(calls):
                call()
            spent = time.perf_counter() - start
    return max(0.0, 1 - sum(event.self_cpu_time_total for event in found.key_averages()) / 1e6 / spent)


def measure(pipe: Connection, name: str, batch: int, length: int, threads: int) -> None:
    """Send the columns of one cell."""
    with what_went_wrong(pipe):
        limit_memory(threads)
        model = build(name).eval()
        call, cache = decoding(model, length, batch)
        call()  # the first one allocates
        read = weights_read(model, call)
        pipe.send(("weights_mib", read / 2**20))
        pipe.send(("cache_mib", held_mib(cache)))
        pipe.send(("floor_ms", 1e3 * read / reading_rate()))
        spent = []
        for _ in range(TOKENS):
            start = time.perf_counter()
            call()
            spent.append(time.perf_counter() - start)
        pipe.send(("token_ms", 1e3 * statistics.median(spent)))
        pipe.send(("host_share", host_share(call)))


def run(arguments: argparse.Namespace) -> list[Row]:
    """Measure every cell that the file does not have, and return all rows."""

    def sent(model: str, batch: int, length: int) -> list[tuple[str, Any]]:
        return in_process(measure, (model, batch, length, arguments.threads), arguments.time_limit)

    cells = itertools.product(arguments.models, arguments.batches, arguments.lengths)
    return fill(arguments, KEYS, MEASURES, cells, sent)


def report(rows: list[Row]) -> str:
    """Return the table of a CSV's rows as Markdown."""
    first = rows[0]
    header = ["model", "batch", "length", "weights, MiB", "cache, MiB", "token, ms", "over the floor", "host"]
    lines = []
    for row in rows:
        if row["outcome"] != "ok":
            lines.append([*(row[name] for name in KEYS), *["-"] * 4, row["outcome"]])
            continue
        over = f"{float(row['token_ms']) / float(row['floor_ms']):.1f}"
        numbers = [row[name] for name in (*KEYS, "weights_mib", "cache_mib", "token_ms")]
        lines.append([*numbers, over, f"{100 * float(row['host_share']):.0f} %"])
    caption = f"{conditions(first)}."
    return f"{caption}\n\n{markdown_table(header, lines)}"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this benchmark's arguments."""
    parser.add_argument("--models", nargs="+", choices=MODELS, default=MODELS)
    parser.add_argument("--batches", nargs="+", type=int, default=BATCHES)
    parser.add_argument("--lengths", nargs="+", type=int, default=LENGTHS, metavar="TOKENS")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--time-limit", type=float, default=300.0, metavar="SECONDS", help="for one cell")


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, or print the table of an earlier run."""
    return command_line(__doc__, DEFAULT_OUT, add_arguments, run, report, argv)


if __name__ == "__main__":
    sys.exit(main())
