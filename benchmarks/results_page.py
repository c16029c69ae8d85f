"""Write the measured tables into ``docs/results.md`` from the files in ``benchmarks/results``.

Run it from the repository root, after a measurement was made anew::

    python -m benchmarks.results_page

A table stands between ``<!-- table: FILE -->`` and ``<!-- end -->``; what is between them is replaced. A ``.csv`` file
is one of the modules in `REPORTS`, a ``.json`` file a copy of a demo's ``demo_results.json``.
"""

import json
import re
import sys
from pathlib import Path
from typing import Any

from benchmarks import bench_chela, bench_cross_attention, bench_language_models, bench_models, compare_on_data
from benchmarks.record import read_csv
from hf_hybrid.training.demo import scores_and_checks

PAGE = Path("docs/results.md")
RESULTS = Path("benchmarks/results")
# a column that only this module's files have -> the module
REPORTS = {
    "seed": compare_on_data,
    "cache_mib": bench_language_models,
    "mode": bench_cross_attention,
    "way": bench_chela,
    "precision": bench_models,
}
_TABLE = re.compile(r"(?P<begin><!-- table: (?P<file>\S+) -->\n).*?(?P<end><!-- end -->)", re.DOTALL)


def tables(path: Path) -> str:
    """Return the tables of one file of results as Markdown."""
    if path.suffix == ".json":
        return _demo_table(json.loads(path.read_text(encoding="utf-8")))
    rows = read_csv(path)
    (report,) = (module.report for column, module in REPORTS.items() if column in rows[0])
    return report(rows)


def _demo_table(results: dict[str, Any]) -> str:
    if results["training_seconds"] is None:
        raise ValueError("training_seconds must be known; this demo was interrupted: run it anew")
    minutes = results["training_seconds"] / 60
    return f"{scores_and_checks(results)}\n\nTraining took {minutes:.1f} minutes, its validation included."


def renewed(page: str) -> str:
    """Return the page with every table made anew."""
    return _TABLE.sub(lambda match: f"{match['begin']}{tables(RESULTS / match['file'])}\n{match['end']}", page)


def main() -> int:
    """Rewrite the page."""
    PAGE.write_text(renewed(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
