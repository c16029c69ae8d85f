"""Measure how long it takes until a model works: imports, a first training step and a first token, beside Llama's.

Run it from the repository root::

    python -m benchmarks.bench_loading --out benchmarks/results/loading_cpu.csv     # the kept record
    python -m benchmarks.bench_loading --report benchmarks/results/loading_cpu.csv  # its table

Each measurement is a fresh interpreter: seconds from its first statement until the last one is done. All take turns,
round after round, after a first round that is not counted and fills the caches of files; a row is the median, written
anew after each round. The ratio is to the peer's row of the same measure:

- import: of ``hf_hybrid``, beside transformers' Llama;
- script: import of each training script's module, beside transformers' Trainer;
- first step, first token: import, building a model of `benchmarks.builders` and a step or a token at the length.
"""

import argparse
import os
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.builders import OURS
from benchmarks.record import Row, command_line, conditions, markdown_table, stamp, write_csv

ROOT = Path(__file__).resolve().parents[1]
DEFAULT_OUT = Path("runs/bench/loading_cpu.csv")
LENGTH = 1024
LLAMA = "llama-sdpa"
_BUILT = "from benchmarks.builders import build; from benchmarks.workloads import"
_SCRIPTS = ("summarization", "glue", "clm", "pretrain", "long_range")
COLUMNS = (
    *("date", "cpu", "threads", "python", "torch", "transformers", "hf_hybrid"),
    *("measure", "subject", "seconds", "lowest", "highest", "repeats", "outcome"),
)
Subject = tuple[str, str]  # measure, subject


def subjects(length: int) -> dict[Subject, str]:
    """Return the code of every measurement; the first of each measure is the peer."""
    found = {
        ("import", "transformers' Llama"): "from transformers import LlamaForCausalLM",
        ("import", "hf_hybrid"): "import hf_hybrid",
        ("script", "transformers' Trainer"): "from transformers import LlamaForCausalLM, Trainer",
    }
    found |= {("script", name): f"import hf_hybrid.training.{name}" for name in _SCRIPTS}
    for name in (LLAMA, *OURS):
        found["first step", name] = f"{_BUILT} training_step; training_step(build({name!r}), {length}, 'fp32')()"
    for name in (LLAMA, *OURS):
        found["first token", name] = f"{_BUILT} decoding; decoding(build({name!r}), {length})[0]()"
    return found


def seconds(code: str, threads: int) -> float:
    """Run code in a fresh interpreter and return its seconds; raise RuntimeError if it fails."""
    timed = f"import time; start = time.perf_counter(); {code}; print(time.perf_counter() - start)"
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": str(threads)}
    ran = subprocess.run([sys.executable, "-P", "-c", timed], capture_output=True, text=True, env=environment)
    if ran.returncode:
        raise RuntimeError(ran.stderr.strip().splitlines()[-1])
    return float(ran.stdout.split()[-1])


def run(arguments: argparse.Namespace) -> list[Row]:
    """Measure everything, rewriting the CSV after each round, and return its rows."""
    common = stamp() | {"threads": str(arguments.threads)}
    wanted = {key: code for key, code in subjects(arguments.length).items() if key[0] in arguments.measures}
    found: dict[Subject, list[float]] = {key: [] for key in wanted}
    wrong: dict[Subject, str] = {}
    rows: list[Row] = []
    for number in range(arguments.rounds + 1):
        for key, code in wanted.items():
            if key in wrong:
                continue
            try:
                spent = seconds(code, arguments.threads)
            except RuntimeError as error:
                wrong[key] = f"failed: {error}"[:160]
                continue
            print(number, *key, f"{spent:.2f}", flush=True)
            if number:
                found[key].append(spent)
        rows = [common | describe(key, found[key], wrong.get(key, "ok")) for key in wanted]
        if number:
            write_csv(arguments.out, COLUMNS, rows)
    return rows


def describe(key: Subject, spent: Sequence[float], outcome: str) -> Row:
    """Turn what was measured of a subject into its columns."""
    row = {"measure": key[0], "subject": key[1], "repeats": str(len(spent)), "outcome": outcome}
    if spent:
        numbers = {"seconds": statistics.median(spent), "lowest": min(spent), "highest": max(spent)}
        row |= {name: f"{value:.3f}" for name, value in numbers.items()}
    return row


def report(rows: list[Row]) -> str:
    """Return the table of a CSV's rows as Markdown, with each one's ratio to the peer."""
    first = rows[0]
    peers: dict[str, Row] = {}
    lines = []
    for row in rows:
        peer = peers.setdefault(row["measure"], row)
        if not row.get("seconds"):
            lines.append([row["measure"], row["subject"], "-", "-", row["outcome"]])
            continue
        ratio = f"{float(row['seconds']) / float(peer['seconds']):.2f}" if peer.get("seconds") else "-"
        lines.append([row["measure"], row["subject"], row["seconds"], f"{row['lowest']} to {row['highest']}", ratio])
    header = ["measure", "of", "seconds, median", "lowest to highest", "over the first of its measure"]
    caption = f"{conditions(first)}."
    return f"{caption}\n\n{markdown_table(header, lines)}"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this benchmark's arguments."""
    measures = tuple(dict.fromkeys(measure for measure, _ in subjects(LENGTH)))
    parser.add_argument("--measures", nargs="+", choices=measures, default=measures)
    parser.add_argument("--length", type=int, default=LENGTH, metavar="TOKENS")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, or print the table of an earlier run."""
    return command_line(__doc__, DEFAULT_OUT, add_arguments, run, report, argv)


if __name__ == "__main__":
    sys.exit(main())
