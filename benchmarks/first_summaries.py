"""Make a dataset of the first summary of each document, from one with several.

``python -m benchmarks.first_summaries path/to/data/scitldr path/to/data/scitldr_first`` reads the files ``train`` and
``validation``, whose column ``summaries`` holds lists, and writes ``train.jsonl`` and ``validation.jsonl`` with the
columns ``document`` and ``summary``.
"""

import sys
from collections.abc import Sequence

from benchmarks.experiment import data_file
from benchmarks.record import source_and_folder, write_split
from hf_hybrid.data.files import iterate_rows


def main(argv: Sequence[str] | None = None) -> int:
    """Write the dataset."""
    source, folder = source_and_folder(__doc__, argv)
    for split in ("train", "validation"):
        rows = iterate_rows("source", str(data_file(source, split)))
        write_split(folder, split, [{"document": row["document"], "summary": row["summaries"][0]} for row in rows])
    return 0


if __name__ == "__main__":
    sys.exit(main())
