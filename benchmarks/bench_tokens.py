"""Measure the time of one decoded token against the bytes that it must read, on the CPU.

Run it from the repository root::

    python -m benchmarks.bench_tokens --out benchmarks/results/tokens_cpu.csv     # the kept record
    python -m benchmarks.bench_tokens --report benchmarks/results/tokens_cpu.csv  # its table

The models are those of `benchmarks.builders`, and three peers; fp32, random weights. Each row is written when it is
measured, in a process of its own, and the same command goes on where it was stopped. A cell is a model, a batch and a
length of the prompt, or of an encoder-decoder's source. The columns, which are means over `TOKENS` tokens, since some
tokens read more than others:

- weights: MiB of the weights, and of constants made of them, that the operators of a decoded token read: of an
  embedding table the rows of the batch, of a long convolution the taps that this token needs;
- state: MiB of the cache that they read or write in place, with what belongs to all rows of the batch;
- token: milliseconds of a forward of one token for every row; the median of `ROUNDS` means;
- floor: the time to read weights and state once, at the best rate at which the cell's process sums as many bytes again
  and again, before, between and after the rounds. Small models stay in the processor's caches between tokens, and so
  do those bytes. The table takes the best rate of all cells that read at least as much;
- host: the share of the token's time that is outside of torch's operators, mostly Python, in a profile of `PROFILED`
  tokens; the profiler's own work adds to it.
"""

import argparse
import itertools
import sys
import time
from collections.abc import Callable, Iterator, Sequence
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
from benchmarks.workloads import decoding, held_mib, seconds, tensors_of

DEFAULT_OUT = Path("runs/bench/tokens_cpu.csv")
MODELS = (*OURS, "t5-sdpa", "llama-sdpa", "mamba2")
BATCHES, LENGTHS = (1, 32), (1024,)
TOKENS, ROUNDS = 64, 3
PROFILED = 8
KEYS = ("model", "batch", "length")
MEASURES = ("weights_mib", "state_mib", "cache_mib", "token_ms", "floor_ms", "host_share")


class _Accesses(TorchDispatchMode):
    """Marks the numbers that operators read, or write in place, of tensors that were there before."""

    def __init__(self) -> None:
        super().__init__()
        self.made: set[int] = set()
        self.marks: dict[int, tuple[torch.Tensor, int]] = {}  # storage -> which of its numbers, bytes of each

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.namespace not in ("aten", "prims"):
            raise RuntimeError(f"{func} must be one of torch's operators: what another one reads is not known")
        given = list(_tensors((args, kwargs)))
        if not func.is_view:
            for x in given:
                self._mark(x, _looked_up(func, args) if x is args[0] else ())
        result = func(*args, **kwargs)
        self.made |= {_place(x) for x in _tensors(result)} - {_place(x) for x in given}
        return result

    def _mark(self, x: torch.Tensor, at: tuple[Any, ...]) -> None:
        place = _place(x)
        if place in self.made or not x.numel() or not (x.is_floating_point() or x.is_complex()):
            return
        # a complex number is two, and one that an expanded tensor repeats is one
        parts = 2 if x.is_complex() else 1
        size, strides = x.element_size() // parts, [parts * stride for stride in x.stride()]
        shape = [count if stride or at else 1 for count, stride in zip(x.shape, strides, strict=True)]
        if place not in self.marks:
            self.marks[place] = torch.zeros(x.untyped_storage().nbytes() // size, dtype=torch.bool), size
        mark = self.marks[place][0].as_strided((*shape, parts), (*strides, 1), parts * x.storage_offset())
        mark[at or slice(None)] = True


def _looked_up(func: Any, args: Any) -> tuple[Any, ...]:
    """Return the index of the part of its first argument that an operator reads; empty for all of it."""
    if func is torch.ops.aten.embedding.default:
        return (args[1].flatten(),)
    if func is torch.ops.aten.index_select.default:
        return (*[slice(None)] * (args[1] % args[0].dim()), args[2])
    if func is torch.ops.aten.index.Tensor:
        return tuple(slice(None) if index is None else index for index in args[1])
    return ()


def _tensors(tree: Any) -> Iterator[torch.Tensor]:
    return (x for x in tree_leaves(tree) if isinstance(x, torch.Tensor))


def _place(x: torch.Tensor) -> int:
    return x.untyped_storage().data_ptr()


def accessed(call: Callable[[], object], cache: Any = None) -> tuple[int, int]:
    """Return the bytes of weights, and of a cache, that the operators of a call read or write in place.

    What several operators read counts once; what the call itself makes does not count.
    """
    state = {_place(x) for x in tensors_of(cache)}
    with _Accesses() as accesses:
        call()
    sums = [0, 0]
    for place, (mark, size) in accesses.marks.items():
        sums[place in state] += int(mark.sum()) * size
    return sums[0], sums[1]


def reading_rate(size: int) -> float:
    """Return the bytes per second at which this process sums `size` bytes of numbers again, the best of many times."""
    numbers = torch.ones(max(1, size // 4))
    best, until = 0.0, time.perf_counter() + 0.5
    while not best or time.perf_counter() < until:
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
        found = [accessed(call, cache) for _ in range(TOKENS)]
        weights, state = (sum(sizes) / TOKENS for sizes in zip(*found, strict=True))
        pipe.send(("weights_mib", weights / 2**20))
        pipe.send(("state_mib", state / 2**20))
        pipe.send(("cache_mib", held_mib(cache)))
        read = weights + state
        rates = [reading_rate(int(read))]
        for _ in range(ROUNDS):  # after the same prompt, so that they read what was counted
            call, _ = decoding(model, length, batch)
            call()
            pipe.send(("token_ms", 1e3 * seconds(call, TOKENS)))
            rates.append(reading_rate(int(read)))
        pipe.send(("floor_ms", 1e3 * read / max(rates)))
        pipe.send(("host_share", host_share(call)))


def run(arguments: argparse.Namespace) -> list[Row]:
    """Measure every cell that the file does not have, and return all rows."""

    def sent(model: str, batch: int, length: int) -> list[tuple[str, Any]]:
        return in_process(measure, (model, batch, length, arguments.threads), arguments.time_limit)

    cells = itertools.product(arguments.models, arguments.batches, arguments.lengths)
    return fill(arguments, KEYS, MEASURES, cells, sent)


def report(rows: list[Row]) -> str:
    """Return the table of a CSV's rows as Markdown."""
    sizes = {"weights_mib": "weights, MiB", "state_mib": "state, MiB", "cache_mib": "cache, MiB"}
    header = ["model", "batch", "length", *sizes.values(), "token, ms", "over the floor", "host"]
    rates = {_read(row): _read(row) / float(row["floor_ms"]) for row in rows if row["outcome"] == "ok"}
    lines = []
    for row in rows:
        if row["outcome"] != "ok":
            lines.append([*(row[name] for name in KEYS), *["-"] * 5, row["outcome"]])
            continue
        read = _read(row)
        over = f"{float(row['token_ms']) * max(rate for size, rate in rates.items() if size >= read) / read:.1f}"
        numbers = [row[name] for name in (*KEYS, *sizes, "token_ms")]
        lines.append([*numbers, over, f"{100 * float(row['host_share']):.0f} %"])
    return f"{conditions(rows[0])}.\n\n{markdown_table(header, lines)}"


def _read(row: Row) -> float:
    """Return the MiB that a token reads."""
    return float(row["weights_mib"]) + float(row["state_mib"])


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
