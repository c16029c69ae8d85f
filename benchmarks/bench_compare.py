"""Compare the speed and memory of the working tree with those of another commit, in one run on the CPU.

Run it from the repository root::

    make bench-compare BASE=main                       # or: python -m benchmarks.bench_compare --base main
    python -m benchmarks.bench_compare --models spade --tasks step --lengths 4096
    python -m benchmarks.bench_compare --report runs/bench/compare_cpu.csv      # the table of an earlier run

The base's package is unpacked beside the working tree's, and both are measured by the working tree's benchmarks. The
cases, whose models are those of `benchmarks.builders` (four layers of width 256, batch 1, random weights):

- step: forward and backward of every architecture, in fp32 and under bf16 autocast, of the loss alone as in the
  training scripts, where the checkout has that (`skip_logits`);
- decode: one more token of every architecture after a prompt, or a source, of the shortest length;
- generate: `GENERATED` tokens by transformers' generate after a prompt, or from a source, of `PROMPT`, where most of
  the time is Python's: every architecture in the sizes of `benchmarks.builders.SIZES`, and peers, whose ratio says how
  far the machine can be trusted;
- import: ``import hf_hybrid`` in a fresh interpreter, with all that it loads.

Two processes, one for each checkout, take turns: one call here, one there, and which goes first alternates. Such two
calls are a pair. Each round starts fresh processes and warms up before it counts: where a process lies in memory, and
on which core, moves all of its calls, so that a round has one ratio, the median of its pairs. The ratio of a case is
the median over the rounds of the working tree's seconds over the base's; the interval beside it is that of the median
by order statistics, which covers at least 95 % whatever the distribution. Below six rounds there is none. Memory is
the peak of one call over the process that holds the model, with its ratio and interval over the rounds likewise.

The exit status is 1 if a case fails, or if a whole interval of time or memory lies above `--allowed`.
"""

import argparse
import importlib
import inspect
import itertools
import math
import multiprocessing
import os
import statistics
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.bench_models import PRECISIONS, PRELOADED, forget_peak, limit_memory, memory, most_memory
from benchmarks.builders import BIDIRECTIONAL, FURTHER, MODES, OURS, SIZED, SIZES, build, build_sized
from benchmarks.record import Row, command_line, conditions, markdown_table, measured_stamp, say, write_csv
from benchmarks.workloads import decoding, generation, seconds, training_step

ROOT = Path(__file__).resolve().parents[1]
DEFAULT_OUT = Path("runs/bench/compare_cpu.csv")
TASKS = ("step", "decode", "generate", "import")
GENERATED, PROMPT = 64, 64  # tokens
LENGTHS = (1024, 4096)
PACKAGE = "hf_hybrid"
SIDES = ("tree", "base")
TIME_LIMIT = 600.0
"""Seconds after which a worker that does not answer is ended."""
UNITS = {"s": ("ratio", "low", "high"), "mib": ("mib_ratio", "mib_low", "mib_high")}
"""Seconds and memory, and the columns of their ratio and its interval."""
Sides = dict[str, Path]
Round = list[tuple[str, str, float]]
"""What a round measured of a case: side, unit and value."""
# fmt: off
COLUMNS = (
    "date", "cpu", "threads", "python", "torch", "transformers", "hf_hybrid", "base",
    "task", "model", "length", "precision", "rounds", "pairs", "base_s", "tree_s", "ratio", "low", "high",
    "base_mib", "tree_mib", "mib_ratio", "mib_low", "mib_high", "outcome",
)
# fmt: on


class Case(NamedTuple):
    """What is measured: a task, and where it has one a model, a length and a precision."""

    task: str
    model: str = ""
    length: int = 0
    precision: str = ""

    def __str__(self) -> str:
        return " ".join(str(part) for part in self if part)


def cases(arguments: argparse.Namespace) -> list[Case]:
    """Return the cases that a command line asks for."""
    found = []
    if "step" in arguments.tasks:
        found = [
            Case("step", model, length, precision)
            for model in arguments.models
            for length in arguments.lengths
            for precision in arguments.precisions
        ]
    if "decode" in arguments.tasks:
        decoders = [model for model in arguments.models if model not in BIDIRECTIONAL]
        found += [Case("decode", model, min(arguments.lengths), "fp32") for model in decoders]
    if "generate" in arguments.tasks:
        found += [
            Case("generate", f"{name} {size}", PROMPT, "fp32")
            for size in arguments.sizes
            for name in arguments.generators
        ]
    return found + [Case("import")] * ("import" in arguments.tasks)


# --- a checkout


def commit(name: str) -> str:
    """Return the hash of a commit of this repository, for argparse."""
    found = _git("rev-parse", "--verify", "--quiet", f"{name}^{{commit}}")
    if found.returncode:
        raise argparse.ArgumentTypeError(
            f"must name a commit of this repository, such as a branch, a tag or a hash; got {name!r}"
        )
    sha = found.stdout.decode().strip()
    if _git("cat-file", "-e", f"{sha}:{PACKAGE}/__init__.py").returncode:
        raise argparse.ArgumentTypeError(f"must name a commit that has the package {PACKAGE}; got {name!r}")
    return sha


def _git(*words: str) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(["git", *words], cwd=ROOT, capture_output=True)


def unpack(sha: str, folder: Path) -> Path:
    """Write a commit's package, and nothing else, into a folder."""
    archive = folder / "base.tar"
    subprocess.run(["git", "archive", "--output", str(archive), sha, PACKAGE], cwd=ROOT, check=True)
    with tarfile.open(archive) as file:
        file.extractall(folder, filter="data")
    archive.unlink()
    return folder


class Worker:
    """A process that imports the package of one checkout and measures calls when asked.

    Args:
        checkout: Folder that has the package; everything else comes from the working tree.
        threads: Threads of torch.
    """

    def __init__(self, checkout: Path, threads: int):
        self.checkout, self.threads = checkout, threads
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOADED)  # torch and transformers, but not the package
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=serve, args=(theirs, checkout, threads), daemon=True)
        self.process.start()
        theirs.close()
        try:
            there = self.ask("where")
        except RuntimeError as error:
            raise RuntimeError(f"{PACKAGE} of {checkout} cannot be imported: {error}") from None
        if there != checkout:
            raise RuntimeError(f"{PACKAGE} must come from {checkout}; got {there}")

    def ask(self, word: str, *details: Any) -> Any:
        """Send a word and its details, and return the answer; raise RuntimeError if there is an error or none."""
        try:
            self.pipe.send((word, details))
            if not self.pipe.poll(TIME_LIMIT):
                self.process.kill()
                self.process.join()
                raise RuntimeError(f"no answer in {TIME_LIMIT:g} s")
            answer, error = self.pipe.recv()
        except (EOFError, OSError):
            self.process.join()
            raise RuntimeError(f"the process ended with {self.process.exitcode}") from None
        if error:
            raise RuntimeError(error)
        return answer

    def or_another(self) -> "Worker":
        """Return this worker, or another one if its process has ended."""
        return self if self.process.is_alive() else Worker(self.checkout, self.threads)

    def close(self) -> None:
        """End the process."""
        self.pipe.close()
        self.process.join()


def serve(pipe: Connection, checkout: Path, threads: int) -> None:
    """Answer a `Worker` until its end of the pipe closes."""
    sys.path.insert(0, str(checkout))
    limit_memory(threads, most_memory() // 2)  # of two workers
    call: Callable[[], object] | None = None
    with suppress(EOFError):
        while True:
            word, details = pipe.recv()
            value: object = None
            error = ""
            try:
                if word == "where":
                    value = Path(importlib.import_module(PACKAGE).__file__ or "").parents[1]
                elif word == "prepare":
                    call = None  # frees the last one
                    call = prepared(*details)
                    value = _peak_of(call)
                else:
                    assert call is not None
                    value = seconds(call)
            except Exception as problem:
                error = f"{type(problem).__name__}: {problem}".splitlines()[0]
            pipe.send((value, error))


def import_seconds(checkout: Path) -> float:
    """Time the import of a checkout's package in a fresh interpreter."""
    code = f"import time; t = time.perf_counter(); import {PACKAGE}; print(time.perf_counter() - t)"
    environment = os.environ | {"PYTHONPATH": str(checkout)}
    ran = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, env=environment)
    if ran.returncode:
        raise RuntimeError(ran.stderr.strip().splitlines()[-1])
    return float(ran.stdout)


def prepared(case: Case) -> Callable[[], object]:
    """Return the call that a case times, after one that warms up."""
    if case.task == "generate":
        call: Callable[[], object] = generation(build_sized(*case.model.split()), case.length, GENERATED)
        call()
        return call
    model = build(case.model)
    if case.task == "step":
        skip_logits = "skip_logits" in inspect.signature(model.forward).parameters
        call = training_step(model, case.length, case.precision, skip_logits=skip_logits)
    else:
        call, _ = decoding(model, case.length)
    call()
    return call


def _peak_of(call: Callable[[], object]) -> float | None:
    """Return the peak memory of a call in MiB, or None where the system does not say."""
    idle = forget_peak()
    call()
    peak = memory("VmHWM") - idle
    return None if math.isnan(peak) else peak


# --- a run


def measure(case: Case, checkouts: Sides, workers: dict[str, Worker], pairs: int) -> Iterator[tuple[str, str, float]]:
    """Yield (side, "s" or "mib", value) of one round of a case."""
    calls: dict[str, Callable[[], float]] = {}
    for side in SIDES:
        if case.task == "import":
            calls[side] = partial(import_seconds, checkouts[side])
            calls[side]()  # compiles, and fills the caches of files
            continue
        calls[side] = partial(workers[side].ask, "time")
        peak = workers[side].ask("prepare", case)
        if peak is not None and case.task == "step":
            yield side, "mib", peak
    for number in range(pairs):
        for side in SIDES if number % 2 else SIDES[::-1]:
            yield side, "s", calls[side]()


def run(arguments: argparse.Namespace) -> list[Row]:
    """Measure every case, rewriting the CSV after each, and return its rows."""
    common = measured_stamp(arguments.threads) | {"base": arguments.base[:12]}
    wanted = cases(arguments)
    found: dict[Case, list[Round]] = {case: [] for case in wanted}
    wrong: dict[Case, str] = {}
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as folder:
        checkouts = {"tree": ROOT, "base": unpack(arguments.base, Path(folder).resolve())}
        for number in range(arguments.rounds):
            tested = any(case.task != "import" for case in wanted)
            try:
                workers = {side: Worker(checkouts[side], arguments.threads) for side in SIDES if tested}
            except RuntimeError as error:
                sys.exit(f"both packages must be there to compare: {error}")
            for case in wanted:
                if case in wrong:
                    continue
                try:
                    found[case].append(list(measure(case, checkouts, workers, arguments.pairs)))
                except RuntimeError as error:
                    wrong[case] = f"failed: {error}"
                    workers = {side: worker.or_another() for side, worker in workers.items()}
                row = describe(case, found[case], wrong.get(case, ""), arguments.allowed)
                say(f"{number + 1}  {case}: {row.get('ratio', '-')} {row['outcome']}")
                rows = [common | describe(c, found[c], wrong.get(c, ""), arguments.allowed) for c in wanted]
                write_csv(arguments.out, COLUMNS, rows)
            for worker in workers.values():
                worker.close()
    return rows


def interval(values: Sequence[float]) -> tuple[float, float] | None:
    """Return an interval that covers the median of what values are drawn from with at least 95 %, or None if too few.

    Its ends are the k-th smallest and the k-th largest value; it misses the median if fewer than k of n values lie on
    one side, whose probability is twice that of fewer than k heads in n tosses.
    """
    n, k, missed = len(values), 0, 0.0
    while missed + 2 * math.comb(n, k) / 2**n <= 0.05:
        missed += 2 * math.comb(n, k) / 2**n
        k += 1
    return (sorted(values)[k - 1], sorted(values)[-k]) if k else None


def describe(case: Case, found: Sequence[Round], wrong: str, allowed: float) -> Row:
    """Turn what was measured of a case in each round into its columns."""
    row = {"task": case.task, "model": case.model, "length": str(case.length or ""), "precision": case.precision}
    row |= {"rounds": str(len(found)), "outcome": wrong or "ok"}
    for unit, (ratio, low, high) in UNITS.items():
        rounds = [[[x for s, u, x in one if (s, u) == (side, unit)] for side in SIDES] for one in found]
        rounds = [sides for sides in rounds if all(sides)]
        if not rounds:
            continue
        for side, measured in zip(SIDES, zip(*rounds, strict=True), strict=True):
            row[f"{side}_{unit}"] = f"{statistics.median(itertools.chain(*measured)):.4g}"
        pairs = [[tree / base for tree, base in zip(*sides, strict=False) if base > 0] for sides in rounds]
        ratios = [statistics.median(one) for one in pairs if one]
        if unit == "s":
            row["pairs"] = str(sum(map(len, pairs)))
        if ratios:
            row[ratio] = f"{statistics.median(ratios):.3f}"
        if ends := interval(ratios):
            row |= {low: f"{ends[0]:.3f}", high: f"{ends[1]:.3f}"}
            if ends[0] > allowed and row["outcome"] == "ok":
                what = "slower than" if unit == "s" else "more memory than"
                row["outcome"] = f"failed: {what} {allowed:g} times the base"
    return row


def report(rows: list[Row]) -> str:
    """Return the table of a CSV's rows as Markdown."""
    first = rows[0]
    caption = (
        f"{conditions(first)}. The working tree over {first['base']}, in seconds and in peak memory: the median of "
        "the ratios of rounds, and its interval of 95 %. Of twenty intervals one misses by chance."
    )
    lines = []
    for row in rows:
        case = " ".join(row[name] for name in ("task", "model", "length", "precision") if row.get(name))
        times = [f"{1e3 * float(row[name]):.4g}" if row.get(name) else "-" for name in ("base_s", "tree_s")]
        cells = [cell for names in UNITS.values() for cell in _ratio_of(row, *names)]
        lines.append([case, *times, *cells, row["rounds"], row.get("pairs") or "-", row["outcome"]])
    header = ["case", "base, ms", "tree, ms", "ratio", "95 %", "memory", "95 %", "rounds", "pairs", "outcome"]
    return f"{caption}\n\n{markdown_table(header, lines)}"


def _ratio_of(row: Row, ratio: str, low: str, high: str) -> list[str]:
    return [row.get(ratio) or "-", f"{row[low]} to {row[high]}" if row.get(low) else "-"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this benchmark's arguments."""
    parser.add_argument("--base", type=commit, default="HEAD", metavar="COMMIT", help="HEAD if not given")
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=TASKS)
    parser.add_argument(
        "--models", nargs="+", choices=(*OURS, *MODES, *FURTHER), default=OURS, help="of steps and of decoding"
    )
    parser.add_argument("--generators", nargs="+", choices=SIZED, default=tuple(SIZED), help="models that generate")
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=tuple(SIZES), help="of these")
    parser.add_argument("--lengths", nargs="+", type=int, default=LENGTHS, metavar="TOKENS")
    parser.add_argument("--precisions", nargs="+", choices=PRECISIONS, default=tuple(PRECISIONS))
    parser.add_argument("--rounds", type=int, default=6, help="times that fresh processes are started")
    parser.add_argument("--pairs", type=int, default=2, help="pairs of calls of each case in a round")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--allowed", type=float, default=1.1, metavar="RATIO", help="more time or memory fails")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the comparison, or print the table of an earlier run."""
    return command_line(__doc__, DEFAULT_OUT, add_arguments, run, report, argv)


if __name__ == "__main__":
    sys.exit(main())
