"""Score a demo without the test documents that the starter has read in part.

Run it from the repository root after ``make demo`` and ``make demo-long``::

    python -m benchmarks.demo_copies --out benchmarks/results/demo_copies.csv     # the kept record
    python -m benchmarks.demo_copies --report benchmarks/results/demo_copies.csv  # its table
    python -m benchmarks.demo_copies --demos runs/demo --out runs/bench/demo_copies.csv

A document has been read in part if the documentation that the starter is pre-trained on, all pages together, has at
least half of its different runs of four words, or as many of its summary's (`benchmarks.starter.read_of`). The scores
are those of the demo's own predictions.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.record import Row, command_line, markdown_table, measured_on, stamp, write_csv
from benchmarks.starter import documentation, held_out, read_of
from hf_hybrid.data.preprocessing import plain_baselines
from hf_hybrid.training.demo import FOLDERS, LEAD, SCORES, SCRATCH, SHORT, TRAINED, read_predictions, tested_with
from hf_hybrid.training.scores.summarization import rouge_scores

DEFAULT_OUT = Path("runs/bench/demo_copies.csv")
DEMOS = (Path("runs/demo"), Path("runs/demo-long"))
ALL, WITHOUT, WITH = "all", "not read", "read in part"


def read_in_part() -> set[str]:
    """Return the held-out documents and summaries of which the starter's documentation has half."""
    texts = held_out()
    together, _ = read_of(texts, documentation()[0].values())
    return {texts[number] for number in together}


def run(arguments: argparse.Namespace) -> list[Row]:
    """Score the demos and return the rows.

    Raises:
        ValueError: A demo is not there, or not finished.
    """
    written = {demo: _predictions(demo) for demo in arguments.demos}
    read, rows = read_in_part(), list[Row]()
    for demo, texts in written.items():
        documents, references, pool = tested_with(SHORT, demo)  # both demos have the same documents
        is_read = [not read.isdisjoint(pair) for pair in zip(documents, references, strict=True)]
        texts[LEAD] = plain_baselines(documents, pool)[LEAD]
        for kind, chosen in (
            (ALL, list(range(len(is_read)))),
            (WITHOUT, [at for at, found in enumerate(is_read) if not found]),
            (WITH, [at for at, found in enumerate(is_read) if found]),
        ):
            wanted = [references[at] for at in chosen]
            for model, predictions in texts.items():
                summaries = [predictions[at] for at in chosen]
                row = stamp() | {"demo": demo.name, "documents": kind, "number": str(len(chosen)), "model": model}
                row["distinct"] = str(len(set(summaries)))
                scores = rouge_scores(summaries, wanted) if chosen else {}
                rows.append(row | {name: f"{scores[name]:.5g}" for name in SCORES if name in scores})
    write_csv(arguments.out, list(rows[0]), rows)
    return rows


def _predictions(demo: Path) -> dict[str, list[str]]:
    if not (demo / "demo_results.json").is_file():
        raise ValueError(f"--demos {demo} must be the folder of a finished demo; it has no demo_results.json")
    return {name: read_predictions(demo / FOLDERS[name]) for name in (SCRATCH, TRAINED)}


def report(rows: list[Row]) -> str:
    """Return a table of the scores, in percent."""
    lines = [
        [
            *(row[name] for name in ("demo", "documents", "number", "model", "distinct")),
            *(f"{float(row[name]):.2f}" if row.get(name) else "-" for name in SCORES),
        ]
        for row in rows
    ]
    header = ["demo", "documents", "number", "model", "distinct summaries", *SCORES.values()]
    return f"{measured_on(rows)}.\n\n{markdown_table(header, lines)}"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this benchmark's arguments."""
    parser.add_argument("--demos", nargs="+", type=Path, default=DEMOS, metavar="FOLDER")


def main(argv: Sequence[str] | None = None) -> int:
    """Score demos, or print the table of an earlier run."""
    return command_line(__doc__, DEFAULT_OUT, add_arguments, run, report, argv)


if __name__ == "__main__":
    sys.exit(main())
