"""Make a dataset of the first summary of each document, from one with several.

``python -m benchmarks.first_summaries path/to/data/scitldr path/to/data/scitldr_first`` reads the files ``train`` and
``validation``, whose column ``summaries`` holds lists, and writes ``train.jsonl`` and ``validation.jsonl`` with the
columns ``document`` and ``summary``.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.experiment import data_file
from hf_hybrid.data.files import iterate_rows


def main(argv: Sequence[str] | None = None) -> int:
    """Write the dataset."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path)
    parser.add_argument("folder", type=Path)
    arguments = parser.parse_args(argv)
    arguments.folder.mkdir(parents=True, exist_ok=True)
    for split in ("train", "validation"):
        rows = list(iterate_rows("source", str(data_file(arguments.source, split))))
        lines = [json.dumps({"document": row["document"], "summary": row["summaries"][0]}) + "\n" for row in rows]
        (arguments.folder / f"{split}.jsonl").write_text("".join(lines), encoding="utf-8")
        print(f"{split}: {len(lines):,} rows")
    return 0


if __name__ == "__main__":
    sys.exit(main())
