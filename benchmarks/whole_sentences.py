"""Hold out every third whole sentence that SST-2 is trained on, with all its phrases.

``python -m benchmarks.whole_sentences path/to/data/glue/sst2 path/to/data/sst2_sentences`` reads SST-2's training
split and writes ``train.jsonl`` and ``validation.jsonl``. The training split of SST-2 (GLUE) has sentences, and nearly
all labelled phrases of each. A whole sentence is what is part of no other; every third is for validation, and what is
part of one of these is in neither file. So there are five times as many sentences to compare models on as in the
validation split that GLUE has, and no model has seen a part of one.
"""

import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from benchmarks.experiment import data_file
from benchmarks.record import source_and_folder, write_split
from hf_hybrid.data.files import iterate_rows

_ONE_OF = 3


def parts_of(text: str) -> Iterator[str]:
    """Yield each run of a text's words, itself at last."""
    words = text.split()
    for size in range(1, len(words) + 1):
        for start in range(len(words) - size + 1):
            yield " ".join(words[start : start + size])


def divided(rows: Iterable[dict[str, Any]]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Divide rows with a ``sentence`` into those to train and those to validate with.

    The latter are every third of the different whole sentences, in the order of the rows.
    """
    texts = {" ".join(row["sentence"].split()): row for row in rows}
    smaller = {part for text in texts for part in parts_of(text) if part != text}
    whole = [text for text in texts if text not in smaller]
    chosen = whole[::_ONE_OF]
    seen = {part for text in chosen for part in parts_of(text)}
    return [row for text, row in texts.items() if text not in seen], [texts[text] for text in chosen]


def main(argv: Sequence[str] | None = None) -> int:
    """Write the dataset."""
    source, folder = source_and_folder(__doc__, argv)
    rows = iterate_rows("source", str(data_file(source, "train")))
    for split, part in zip(("train", "validation"), divided(rows), strict=True):
        write_split(folder, split, part)
    return 0


if __name__ == "__main__":
    sys.exit(main())
