"""Measure how long it takes until a model works: imports, a first training step and a first token, beside peers.

Run it from the repository root::

    python -m benchmarks.bench_loading --out benchmarks/results/loading_cpu.csv     # the kept record
    python -m benchmarks.bench_loading --report benchmarks/results/loading_cpu.csv  # its table

Each measurement is a fresh interpreter: seconds from its first statement until the last one is done. All take turns,
round after round, after a first round that is not counted and fills the caches of files; a row is the median, written
anew after each round, and its ratio that to the median of its peer:

- import: of ``hf_hybrid``, beside transformers' Llama;
- script: import of each training script's module, beside transformers' Trainer, Llama and datasets;
- first step, first token: import, building a model of `benchmarks.builders` and a step or a token at the length;
  causal models beside Llama and encoder-decoders beside T5, of equal sizes.

The exit status is 1 if a ratio is above `LIMIT`.
"""

import argparse
import os
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from benchmarks.builders import CAUSAL, ENCODER_DECODERS
from benchmarks.record import Row, command_line, conditions, markdown_table, measured_stamp, write_csv

ROOT = Path(__file__).resolve().parents[1]
DEFAULT_OUT = Path("runs/bench/loading_cpu.csv")
LENGTH = 1024
LIMIT = 1.3
"""Ratios above it are too slow."""
MODELS = {"llama-sdpa": CAUSAL, "t5-sdpa": ENCODER_DECODERS}
"""Peer -> the models that it is compared with."""
_BUILT = "from benchmarks.builders import build; from benchmarks.workloads import"
_SCRIPTS = ("summarization", "glue", "clm", "pretrain", "long_range")
COLUMNS = (
    *("date", "cpu", "threads", "python", "torch", "transformers", "hf_hybrid"),
    *("measure", "subject", "peer", "seconds", "lowest", "highest", "repeats", "ratio", "outcome"),
)
Key = tuple[str, str]  # measure, subject


class Subject(NamedTuple):
    """What is measured: the code, and the subject of the same measure that it is compared with; none for a peer."""

    code: str
    peer: str = ""


def subjects(length: int) -> dict[Key, Subject]:
    """Return everything that is measured."""
    llama, trainer = "transformers' Llama", "transformers' Trainer"
    found = {
        ("import", llama): Subject("from transformers import LlamaForCausalLM"),
        ("import", "hf_hybrid"): Subject("import hf_hybrid", llama),
        ("script", trainer): Subject("from transformers import LlamaForCausalLM, Seq2SeqTrainer; import datasets"),
    }
    found |= {("script", name): Subject(f"import hf_hybrid.training.{name}", trainer) for name in _SCRIPTS}
    codes = {
        "first step": f"{_BUILT} training_step; training_step(build({{name!r}}, dropout=False), {length}, 'fp32')()",
        "first token": f"{_BUILT} decoding; decoding(build({{name!r}}), {length})[0]()",
    }
    for measure, code in codes.items():
        for peer, ours in MODELS.items():
            found[measure, peer] = Subject(code.format(name=peer))
            found |= {(measure, name): Subject(code.format(name=name), peer) for name in ours}
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
    common = measured_stamp(arguments.threads)
    wanted = {key: subject for key, subject in subjects(arguments.length).items() if key[0] in arguments.measures}
    found: dict[Key, list[float]] = {key: [] for key in wanted}
    wrong: dict[Key, str] = {}
    rows: list[Row] = []
    for number in range(arguments.rounds + 1):
        for key, subject in wanted.items():
            if key in wrong:
                continue
            try:
                spent = seconds(subject.code, arguments.threads)
            except RuntimeError as error:
                wrong[key] = f"failed: {error}"[:160]
                continue
            print(number, *key, f"{spent:.2f}", flush=True)
            if number:
                found[key].append(spent)
        rows = [common | describe(key, subject.peer, found, wrong.get(key, "ok")) for key, subject in wanted.items()]
        if number:
            write_csv(arguments.out, COLUMNS, rows)
    return rows


def describe(key: Key, peer: str, found: Mapping[Key, Sequence[float]], outcome: str) -> Row:
    """Turn what was measured of a subject into its columns."""
    spent = found[key]
    row = {"measure": key[0], "subject": key[1], "peer": peer, "repeats": str(len(spent)), "outcome": outcome}
    if not spent:
        return row
    numbers = {"seconds": statistics.median(spent), "lowest": min(spent), "highest": max(spent)}
    row |= {name: f"{value:.3f}" for name, value in numbers.items()}
    if beside := found.get((key[0], peer)):
        row["ratio"] = f"{numbers['seconds'] / statistics.median(beside):.2f}"
    return row


def report(rows: list[Row]) -> str:
    """Return the table of a CSV's rows as Markdown."""
    lines = []
    for row in rows:
        if not row.get("seconds"):
            lines.append([row["measure"], row["subject"], "-", "-", "", row["outcome"]])
            continue
        spent = [row["seconds"], f"{row['lowest']} to {row['highest']}"]
        ratio = f"{row['ratio']} ({row['peer']})" if row.get("ratio") else ""
        lines.append([row["measure"], row["subject"], *spent, ratio, f"above {LIMIT}" if _is_slow(row) else ""])
    header = ["measure", "of", "seconds, median", "lowest to highest", "over its peer", "note"]
    return f"{conditions(rows[0])}.\n\n{markdown_table(header, lines)}"


def _is_slow(row: Row) -> bool:
    return bool(row.get("ratio")) and float(row["ratio"]) > LIMIT


def too_slow(rows: list[Row]) -> list[str]:
    """Return a line for each ratio above `LIMIT`."""
    slow = [row for row in rows if _is_slow(row)]
    return [f"{row['measure']} {row['subject']}: {row['ratio']} times {row['peer']}, above {LIMIT}" for row in slow]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this benchmark's arguments."""
    measures = tuple(dict.fromkeys(measure for measure, _ in subjects(LENGTH)))
    parser.add_argument("--measures", nargs="+", choices=measures, default=measures)
    parser.add_argument("--length", type=int, default=LENGTH, metavar="TOKENS")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, or print the table of an earlier run."""
    return command_line(__doc__, DEFAULT_OUT, add_arguments, run, report, argv, too_slow)


if __name__ == "__main__":
    sys.exit(main())
