"""Make the dataset ``facts``, whose summaries need single tokens from anywhere in the document.

``python -m benchmarks.facts path/to/data/facts`` writes ``train.jsonl`` and ``validation.jsonl``. A document lists a
fact for each key in random order, one word each, such as ``k07v3``. Its summary asks for random keys and answers:
``k21 v5 k07 v3 ...``. Only the decoder sees the questions, so the encoder cannot know which fact will be needed in
which part of the document: a model that reads only one part at a time (segmented attention) must guess facts of the
others, but for what an encoder with full attention can carry of all facts to every part. ``run_summarization.py
--tokenizer_type words`` makes every fact, key and value a token.

The next key is unpredictable, so the loss has a floor, that of a model that answers everything and guesses the keys,
and a ceiling, that of one that guesses the answers too; see `bounds`. The end of a summary, always at the same place,
is one more token.
"""

import argparse
import json
import math
import random
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path


def rows(count: int, keys: int, values: int, asked: int, seed: str) -> Iterator[dict[str, str]]:
    """Yield rows of the dataset."""
    rng, width = random.Random(seed), len(str(keys - 1))
    for _ in range(count):
        facts = [rng.randrange(values) for _ in range(keys)]
        order = rng.sample(range(keys), keys)
        questions = [rng.randrange(keys) for _ in range(asked)]
        yield {
            "document": " ".join(f"k{key:0{width}}v{facts[key]}" for key in order),
            "summary": " ".join(f"k{key:0{width}} v{facts[key]}" for key in questions),
        }


def bounds(keys: int = 32, values: int = 8, asked: int = 32) -> tuple[float, float]:
    """Return the loss, in nats per token, of a model that answers everything and of one that guesses."""
    tokens = 2 * asked + 1
    return asked * math.log(keys) / tokens, asked * math.log(keys * values) / tokens


def main(argv: Sequence[str] | None = None) -> int:
    """Write the dataset."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--keys", type=int, default=32, help="facts of a document (%(default)s)")
    parser.add_argument("--values", type=int, default=8, help="different values of a fact (%(default)s)")
    parser.add_argument("--asked", type=int, default=32, help="keys that a summary asks for (%(default)s)")
    parser.add_argument("--train", type=int, default=30000, help="rows to train on (%(default)s)")
    parser.add_argument("--validation", type=int, default=500, help="rows to score (%(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args(argv)
    arguments.folder.mkdir(parents=True, exist_ok=True)
    for split in ("train", "validation"):
        sizes = (getattr(arguments, split), arguments.keys, arguments.values, arguments.asked)
        made = rows(*sizes, seed=f"{arguments.seed} {split}")
        lines = "".join(json.dumps(row) + "\n" for row in made)
        (arguments.folder / f"{split}.jsonl").write_text(lines, encoding="utf-8")
    floor, ceiling = bounds(arguments.keys, arguments.values, arguments.asked)
    print(f"loss: {floor:.4f} with all answers right, {ceiling:.4f} with all of them guessed")
    return 0


if __name__ == "__main__":
    sys.exit(main())
