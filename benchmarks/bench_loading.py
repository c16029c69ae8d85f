"""Measure how long it takes until a model works: imports, a first training step and a first token, beside peers.

Run it from the repository root::

    python -m benchmarks.bench_loading --out benchmarks/results/loading_cpu.csv     # the kept record
    python -m benchmarks.bench_loading --report benchmarks/results/loading_cpu.csv  # its table

Each measurement is a fresh interpreter: seconds from its first statement until the last one is done. All take turns,
round after round, after a first round that is not counted and fills the caches of files; a row has medians, is written
anew after each round, and has ratios to the medians of its peer:

- import: of ``hf_hybrid``, beside transformers' Llama;
- script: import of each training script's module, beside transformers' Trainer, Llama and datasets;
- first step, first token: imports, building a model of `benchmarks.builders`, and a training step or a prompt and one
  token, at the length, together and each by itself; causal models beside Llama and encoder-decoders beside T5, as
  large as ours.

The exit status is 1 if a ratio is above `LIMIT`, of the whole or of a part.
"""

import argparse
import os
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from itertools import pairwise
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
PARTS = ("imports", "building", "work")
"""What a first step and a first token consist of."""
_IMPORTS = {"llama-sdpa": "from transformers import LlamaForCausalLM"} | {
    "t5-sdpa": "from transformers import T5ForConditionalGeneration"
}
_OURS = "import hf_hybrid"
_SCRIPTS = ("summarization", "glue", "clm", "pretrain", "long_range")
COLUMNS = (
    *("date", "cpu", "threads", "python", "torch", "transformers", "hf_hybrid"),
    *("measure", "subject", "peer", "seconds", "lowest", "highest", "repeats", "ratio"),
    *PARTS,
    *(f"{part}_ratio" for part in PARTS),
    "outcome",
)
Key = tuple[str, str]  # measure, subject


class Subject(NamedTuple):
    """What is measured: the code of its parts, and the subject that it is compared with; none for a peer."""

    parts: tuple[str, ...]
    peer: str = ""


def subjects(length: int) -> dict[Key, Subject]:
    """Return everything that is measured."""
    llama, trainer = "transformers' Llama", "transformers' Trainer"
    found = {
        ("import", llama): Subject(("from transformers import LlamaForCausalLM",)),
        ("import", "hf_hybrid"): Subject(("import hf_hybrid",), llama),
        ("script", trainer): Subject(("from transformers import LlamaForCausalLM, Seq2SeqTrainer; import datasets",)),
    }
    found |= {("script", name): Subject((f"import hf_hybrid.training.{name}",), trainer) for name in _SCRIPTS}
    for measure in ("first step", "first token"):
        for peer, ours in MODELS.items():
            found[measure, peer] = Subject(_parts(measure, peer, length))
            found |= {(measure, name): Subject(_parts(measure, name, length), peer) for name in ours}
    return found


def _parts(measure: str, model: str, length: int) -> tuple[str, ...]:
    """Return the code of `PARTS`."""
    work, calls, dropout = "decoding", f"decoding(model, {length})[0]()", ""
    if measure == "first step":
        work, calls, dropout = "training_step", f"training_step(model, {length}, 'fp32')()", ", dropout=False"
    imports = f"from benchmarks.builders import build; from benchmarks.workloads import {work}"
    return f"{imports}; {_IMPORTS.get(model, _OURS)}", f"model = build({model!r}{dropout})", calls


def seconds(parts: Sequence[str], threads: int) -> list[float]:
    """Run code in a fresh interpreter and return the seconds of its parts; raise RuntimeError if it fails."""
    timed = "import time; marks = [time.perf_counter()]\n"
    timed += "".join(f"{part}; marks.append(time.perf_counter())\n" for part in parts)
    timed += "print(*marks)"
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": str(threads)}
    ran = subprocess.run([sys.executable, "-P", "-c", timed], capture_output=True, text=True, env=environment)
    if ran.returncode:
        raise RuntimeError(ran.stderr.strip().splitlines()[-1])
    return [after - before for before, after in pairwise(map(float, ran.stdout.splitlines()[-1].split()))]


def run(arguments: argparse.Namespace) -> list[Row]:
    """Measure everything, rewriting the CSV after each round, and return its rows."""
    common = measured_stamp(arguments.threads)
    wanted = {key: subject for key, subject in subjects(arguments.length).items() if key[0] in arguments.measures}
    found: dict[Key, list[list[float]]] = {key: [] for key in wanted}
    wrong: dict[Key, str] = {}
    rows: list[Row] = []
    for number in range(arguments.rounds + 1):
        for key, subject in wanted.items():
            if key in wrong:
                continue
            try:
                spent = seconds(subject.parts, arguments.threads)
            except RuntimeError as error:
                wrong[key] = f"failed: {error}"[:160]
                continue
            print(number, *key, *(f"{part:.2f}" for part in spent), flush=True)
            if number:
                found[key].append(spent)
        rows = [common | describe(key, subject.peer, found, wrong.get(key, "ok")) for key, subject in wanted.items()]
        if number:
            write_csv(arguments.out, COLUMNS, rows)
    return rows


def describe(key: Key, peer: str, found: Mapping[Key, Sequence[Sequence[float]]], outcome: str) -> Row:
    """Turn what was measured of a subject into its columns."""
    row = dict.fromkeys(COLUMNS[COLUMNS.index("measure") :], "")
    row |= {"measure": key[0], "subject": key[1], "peer": peer, "repeats": str(len(found[key])), "outcome": outcome}
    if not found[key]:
        return row
    whole = [sum(parts) for parts in found[key]]
    row |= {"lowest": f"{min(whole):.3f}", "highest": f"{max(whole):.3f}"}
    medians, beside = (_medians(found.get(one, [])) for one in (key, (key[0], peer)))
    row |= {name: f"{value:.3f}" for name, value in medians.items()}
    ratios = {name: f"{medians[name] / value:.2f}" for name, value in beside.items()}
    return row | {"ratio" if name == "seconds" else f"{name}_ratio": ratio for name, ratio in ratios.items()}


def _medians(spent: Sequence[Sequence[float]]) -> dict[str, float]:
    """Return the median of the whole, and of `PARTS` where there are some."""
    if not spent:
        return {}
    medians = {"seconds": statistics.median(map(sum, spent))}
    if len(spent[0]) > 1:
        medians |= dict(zip(PARTS, map(statistics.median, zip(*spent, strict=True)), strict=True))
    return medians


def report(rows: list[Row]) -> str:
    """Return the table of a CSV's rows as Markdown."""
    lines = []
    for row in rows:
        if not row.get("seconds"):
            lines.append([row["measure"], row["subject"], *"-" * 5, "", row["outcome"]])
            continue
        spent = [row["seconds"], f"{row['lowest']} to {row['highest']}"]
        ratio_of_whole = f"{row['ratio']} ({row['peer']})" if row.get("ratio") else ""
        spent += [f"{row[name]} ({ratio})" if (ratio := row[f"{name}_ratio"]) else row[name] for name in PARTS]
        lines.append([row["measure"], row["subject"], *spent, ratio_of_whole, ", ".join(_slow(row))])
    header = ["measure", "of", "seconds, median", "lowest to highest", *PARTS, "over its peer", "note"]
    return f"{conditions(rows[0])}.\n\n{markdown_table(header, lines)}"


def _slow(row: Row) -> list[str]:
    """Return what of a row is above `LIMIT`."""
    ratios = {"": "ratio"} | {part: f"{part}_ratio" for part in PARTS}
    return [f"{part} above {LIMIT}".strip() for part, name in ratios.items() if float(row.get(name) or 0) > LIMIT]


def too_slow(rows: list[Row]) -> list[str]:
    """Return a line for each ratio above `LIMIT`."""
    return [f"{row['measure']} {row['subject']}: {slow} times {row['peer']}" for row in rows for slow in _slow(row)]


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
