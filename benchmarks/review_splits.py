"""Hold out every second review of a validation split, for a test that chooses nothing.

``python -m benchmarks.review_splits path/to/data/imdb path/to/data/imdb_test`` reads the files ``train`` and
``validation`` and writes ``train.jsonl`` as it is, ``validation.jsonl`` with the rows 0, 2, 4 ... of the validation
file, and ``test.jsonl`` with the others.
"""

import sys
from collections.abc import Sequence

from benchmarks.experiment import data_file
from benchmarks.record import source_and_folder, write_split
from hf_hybrid.data.files import iterate_rows


def main(argv: Sequence[str] | None = None) -> int:
    """Write the dataset."""
    source, folder = source_and_folder(__doc__, argv)
    train, kept = (list(iterate_rows("source", str(data_file(source, split)))) for split in ("train", "validation"))
    for split, rows in (("train", train), ("validation", kept[::2]), ("test", kept[1::2])):
        write_split(folder, split, rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
