"""Hold out every fifth recording that speech is trained on, for a test that chooses nothing.

``python -m benchmarks.speech_splits path/to/data/fsdd path/to/data/fsdd_test`` reads the files ``train.npz`` and
``validation.npz`` and writes them with ``test.npz``, which has the rows 0, 5, 10 ... of the training file; the others
are left to train on, and the validation file stays as it is. Of FSDD (the Free Spoken Digit Dataset), these two files
hold recordings 5 to 49 of each digit and speaker, 2,500 and 200 of them at random: recordings 0 to 4 are the test of
its authors, and none is read here.
"""

import sys
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from benchmarks.record import source_and_folder
from hf_hybrid.data.drawing import Array
from hf_hybrid.data.lra.readers import read_arrays

_ONE_OF = 5


def taken(arrays: Mapping[str, Array], rows: Array) -> dict[str, Array]:
    """Return some rows of an archive of recordings: ``audio`` cut at ``offsets``, and one entry each of the others."""
    ends = list(pairwise(arrays["offsets"].tolist()))
    pieces = [arrays["audio"][slice(*ends[row])] for row in rows.tolist()]
    chosen = {name: column[rows] for name, column in arrays.items() if name not in ("audio", "offsets")}
    offsets = np.cumsum([0, *(len(piece) for piece in pieces)])
    return {"audio": np.concatenate(pieces), "offsets": offsets, **chosen}


def main(argv: Sequence[str] | None = None) -> int:
    """Write the dataset."""
    source, folder = source_and_folder(__doc__, argv)
    for split in ("train", "validation"):
        path = source / f"{split}.npz"
        read_arrays(path, "audio")  # refuses what is broken
        with np.load(path) as archive:
            arrays: dict[str, Any] = {name: archive[name] for name in archive.files}
        numbers = np.arange(len(arrays["labels"]))
        is_tested = (numbers % _ONE_OF == 0) & (split == "train")
        parts = {split: taken(arrays, numbers[~is_tested])}
        if is_tested.any():
            parts["test"] = taken(arrays, numbers[is_tested])
        for name, part in parts.items():
            np.savez_compressed(folder / f"{name}.npz", **part)
            print(f"{name}: {len(part['labels']):,} recordings")
    return 0


if __name__ == "__main__":
    sys.exit(main())
