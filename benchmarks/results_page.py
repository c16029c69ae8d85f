"""Write the results in ``benchmarks/results`` into the pages of ``docs``.

Run it from the repository root after a new measurement::

    python -m benchmarks.results_page

It replaces the text between ``<!-- table: FILE -->`` and ``<!-- end -->`` by a table, and within a line the text
between ``<!-- compare: FILE | MODEL | OTHER MODEL | SCORE -->`` and ``<!-- end -->`` by a comparison of two models;
``ahead`` instead of ``compare`` gives the lead of the first in numbers, and ``verdict`` says whether it is shown.
``<!-- hours: FILE | FILE -->`` gives the CPU hours of the training steps of all their runs, and
``<!-- value: FILE | NAME -->`` a number of a ``.json`` file.
Inside a table of the page, write ``;`` for ``|``. Planned models without results are "not measured yet". A ``.csv``
file belongs to a module in `REPORTS`, or in ``gpu/`` to a part of `benchmarks.gpu`; a ``.json`` file is a copy of a
demo's ``demo_results.json``, or of a run's ``all_results.json``.
"""

import json
import re
import sys
from pathlib import Path
from typing import Any

from benchmarks import (
    bench_checkpointing,
    bench_chela,
    bench_compare,
    bench_compile,
    bench_cross_attention,
    bench_generation,
    bench_growth,
    bench_language_models,
    bench_loading,
    bench_loss,
    bench_models,
    bench_profile,
    bench_recall,
    bench_state_memory,
    bench_tokens,
    comparison,
    demo_copies,
    gpu_tables,
)
from benchmarks.record import read_csv
from hf_hybrid.training.demo import scores_and_checks, training_time

DOCS = Path("docs")
RESULTS = Path("benchmarks/results")
EXPERIMENTS = Path("benchmarks/experiments")
# a column that no earlier module's files have -> the module
REPORTS = {
    "trained_steps": bench_recall,
    "recipe": comparison,
    "distinct": demo_copies,
    "base_s": bench_compare,
    "kept": bench_checkpointing,
    "compiled": bench_compile,
    "held_mib": bench_growth,
    "host_share": bench_tokens,
    "operators": bench_generation,
    "measure": bench_loading,
    "cache_mib": bench_language_models,
    "mode": bench_cross_attention,
    "way": bench_chela,
    "start": bench_state_memory,
    "vocabulary": bench_loss,
    "products_ms": bench_profile,
    "precision": bench_models,
}
GPU = RESULTS / "gpu"
_TABLE = re.compile(r"(?P<begin><!-- table: (?P<file>\S+) -->\n).*?(?P<end><!-- end -->)", re.DOTALL)
_STATEMENT = re.compile(
    r"(?P<begin><!-- (?P<kind>compare|ahead|verdict|hours|value): (?P<asked>.*?) -->).*?(?P<end><!-- end -->)",
    re.DOTALL,
)


def tables(path: Path) -> str:
    """Return the tables of one file of results as Markdown."""
    if path.suffix == ".json":
        return _demo_table(json.loads(path.read_text(encoding="utf-8")))
    rows = read_csv(path)
    if path.parent == GPU:
        return gpu_tables.report(path.stem, rows)
    return next(module.report for column, module in REPORTS.items() if column in rows[0])(rows)


def statement(kind: str, asked: str) -> str:
    """Return a statement about files of results from the word before the colon and the text after it."""
    file, *names = re.split(r"\s*[|;]\s*", asked)
    if kind == "hours":
        rows = [row for name in (file, *names) for row in read_csv(RESULTS / name)]
        return f"{sum(float(row['cpu_minutes'] or 0) for row in rows) / 60:.0f}"
    if kind == "value":
        return f"{json.loads((RESULTS / file).read_text(encoding='utf-8'))[names[0]]:.3f}"
    say = {"compare": comparison.compare, "ahead": comparison.ahead_by, "verdict": comparison.verdict}[kind]
    rows = read_csv(RESULTS / file) if (RESULTS / file).exists() else []
    unmeasured = {model for model in names[:2] if len({row["seed"] for row in rows if row["model"] == model}) < 2}
    if unmeasured and unmeasured <= _planned(file):
        return "not measured yet"
    return say(rows, *names)


def _planned(file: str) -> set[str]:
    """Return the models of the experiment of a results file."""
    path = (EXPERIMENTS / file).with_suffix(".json")
    return {*json.loads(path.read_text(encoding="utf-8"))["models"]} if path.exists() else set()


def _demo_table(results: dict[str, Any]) -> str:
    if not (time := training_time(results)):
        raise ValueError("training_seconds must be known; this demo was interrupted: run it again")
    return f"{scores_and_checks(results)}\n\n{time}"


def renewed(page: str) -> str:
    """Return a page with updated tables and statements."""
    page = _TABLE.sub(lambda match: f"{match['begin']}{tables(RESULTS / match['file'])}\n{match['end']}", page)
    return _STATEMENT.sub(lambda match: match["begin"] + statement(match["kind"], match["asked"]) + match["end"], page)


def main() -> int:
    """Rewrite the pages."""
    for path in DOCS.rglob("*.md"):
        page = path.read_text(encoding="utf-8")
        if (new := renewed(page)) != page:
            path.write_text(new, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
