r"""Make the texts that the starter is pre-trained on, without what the demo and the starter's evaluation hold out.

``python -m benchmarks.starter path/to/data path/to/corpus`` writes ``train.jsonl`` and ``validation.jsonl`` with a
document in each row, and ``sources.json`` with their number, size, hash, licence and origin. `path/to/data` holds
novels and Wikipedia's articles, and the tasks of `EVALUATED`; the documentation is that of the installed packages.

The starter is a SPADE encoder-decoder of 7.3 million parameters, under 16 MB in bfloat16. It learns by text infilling,
which makes it copy: in a pilot, 400 steps on the demo's task reached a validation loss of 4.01 after 800 steps of it,
4.47 after 1,000 steps of span corruption, and 4.79 without pre-training. Two processes, a core each::

    SIZE=preset=tiny,num_hidden_layers=4,num_decoder_layers=4,intermediate_size=640
    OMP_NUM_THREADS=1 python -m torch.distributed.run --nproc_per_node 2 -m hf_hybrid.training pretrain \
        --objective text_infilling --model_type spade --config_overrides $SIZE,dropout=0,attention_dropout=0 \
        --tokenizer_type marked --tokenizer_vocab_size 5600 --learning_rate 2e-3 --lr_scheduler_type cosine \
        --warmup_steps 0.05 --adam_beta2 0.98 --weight_decay 0.01 --train_file corpus/train.jsonl \
        --validation_file corpus/validation.jsonl --max_seq_length 256 --per_device_train_batch_size 8 \
        --max_steps 4800 --do_train --do_eval --use_cpu --preprocessing_num_workers 2 \
        --save_total_limit 1 --resume_from_checkpoint auto --output_dir starter
    python -m benchmarks.ship_starter starter corpus path/to/spade-en-tiny

Left out is what repeats half of a document or a summary of the demo's validation or test split, or of a longer
validation text of the tasks in `EVALUATED`: see `Contained`.
"""

import argparse
import hashlib
import json
import lzma
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from benchmarks.experiment import data_file
from hf_hybrid.data.corpora import corpus_report, embedded_corpus
from hf_hybrid.data.docstrings import words_of
from hf_hybrid.data.files import iterate_rows
from hf_hybrid.data.near_copies import hashed_runs

SOURCES = {
    "novels": ("English novels of the 1840s to 1920s", "public domain"),
    "wikipedia": ("articles of the English Wikipedia, from WikiText-2", "CC BY-SA, by Wikipedia's authors"),
    "documentation": ("docstrings of Python packages", "the packages' own: PSF, BSD, Apache-2.0, MIT"),
}
HELD_OUT = ("docstrings", "modules")
"""The embedded corpora whose validation and test splits are held out."""
EVALUATED = ("dialogsum", "scitldr", "glue/sst2")
"""The data sets with which the starter is evaluated, whose validation splits are held out too."""
_LONG = 8  # different runs of a text that is looked for in all sources; shorter ones are phrases
_SHARE = 0.5  # of a text's runs, which makes another contain it
_TITLE = re.compile(r"^ = [^=].* = $", re.MULTILINE)
# WikiText's marks around punctuation, and spaces that written text does not have
_MARKS = (
    (re.compile(r" @([-,.])@ "), r"\1"),
    (re.compile(r" ?<unk>"), ""),
    (re.compile(r" ([,.;:!?)\]%]|'s\b|'t\b|n't\b)"), r"\1"),
    (re.compile(r"([(\[$]) "), r"\1"),
    (re.compile(r'" ([^"\n]*) "'), r'"\1"'),
    (re.compile(r"^ ?(= )+(.*?)( =)+ ?$", re.MULTILINE), r"\2"),
    (re.compile(r"^ +| +$", re.MULTILINE), ""),
)


class Contained:
    """Recognises texts that contain one of others, as a whole or for the most part.

    A text contains another if it has at least half of the other's different runs of four words. A page's parts contain
    it together: then all of them that have any of these runs do.

    Args:
        texts: The other texts.
    """

    def __init__(self, texts: Iterable[str]) -> None:
        self._of_run: defaultdict[int, list[int]] = defaultdict(list)
        self._sizes: list[int] = []
        for number, text in enumerate(texts):
            runs = hashed_runs(words_of(text))
            self._sizes.append(len(runs))
            for run in runs:
                self._of_run[run].append(number)

    def __call__(self, text: str) -> bool:
        """Return whether a text contains one of the others."""
        return bool(self.parts([text]))

    def parts(self, parts: Sequence[str]) -> set[int]:
        """Return which parts of a page contain one of the others, by themselves or together."""
        held = [{run for run in hashed_runs(words_of(part)) if run in self._of_run} for part in parts]
        shared = Counter(number for run in set().union(*held) for number in self._of_run[run])
        found = {number for number, count in shared.items() if count >= _SHARE * self._sizes[number]}
        return {at for at, runs in enumerate(held) if any(found.intersection(self._of_run[run]) for run in runs)}

    def without(self, parts: Sequence[str]) -> list[str]:
        """Return the parts of a page that contain none of the others."""
        left_out = self.parts(parts)
        return [part for at, part in enumerate(parts) if at not in left_out]


def evaluated(folder: Path) -> list[str]:
    """Return the longer texts of the validation splits of `EVALUATED`."""
    texts = []
    for name in EVALUATED:
        for row in iterate_rows("data", str(data_file(folder / name, "validation"))):
            for value in row.values():
                texts += [text for text in (value if isinstance(value, list) else [value]) if isinstance(text, str)]
    return [text for text in texts if len(hashed_runs(words_of(text))) >= _LONG]


def held_out(**corpora: Any) -> list[str]:
    """Return the documents and summaries that the demo validates and tests with, and those of its sister corpus."""
    found = (embedded_corpus(name, **corpora)[split] for name in HELD_OUT for split in ("validation", "test"))
    return [row[column] for rows in found for row in rows for column in ("document", "summary")]


def documentation(**corpora: Any) -> tuple[list[str], int]:
    """Return the documentation of each module of the training split, and how many parts are left out of it.

    Args:
        **corpora: Arguments of `embedded_corpus`.
    """
    contained, pages, left_out = Contained(held_out(**corpora)), [], 0
    for page in embedded_corpus("text", **corpora)["train"]["text"]:
        parts = page.split("\n\n")
        kept = contained.without(parts)
        left_out += len(parts) - len(kept)
        if kept:
            pages.append("\n\n".join(kept))
    return pages, left_out


def divided(pages: Sequence[str]) -> dict[str, list[str]]:
    """Divide the documentation of modules for pre-training: every fiftieth is for validation."""
    return {"train": [page for number, page in enumerate(pages) if number % 50], "validation": list(pages[::50])}


def digest(texts: Iterable[str]) -> str:
    """Return the SHA-256 of texts, with a zero byte behind each."""
    found = hashlib.sha256()
    for text in texts:
        found.update(text.encode() + b"\0")
    return found.hexdigest()


def novels(folder: Path, split: str) -> Iterator[str]:
    """Yield every third novel of a split, which is about as much text as the documentation; lines are joined."""
    for row in islice(iterate_rows("data", str(folder / "english_novels" / f"{split}.jsonl.xz")), 0, None, 3):
        paragraphs = re.split(r"\n{2,}", row["text"])
        yield "\n".join(" ".join(paragraph.split()) for paragraph in paragraphs if paragraph.strip())


def articles(folder: Path, split: str) -> Iterator[str]:
    """Yield Wikipedia's articles of a split, as they were before WikiText took them apart."""
    name = {"train": "train", "validation": "valid"}[split]
    with lzma.open(folder / "wikitext2" / f"{name}.txt.xz", "rt", encoding="utf-8") as stream:
        text = stream.read()
    starts = [match.start() for match in _TITLE.finditer(text)]
    for start, end in zip(starts, [*starts[1:], len(text)], strict=True):
        article = text[start:end]
        for pattern, written in _MARKS:
            article = pattern.sub(written, article)
        yield re.sub(r"\n{2,}", "\n", article).strip()


def paragraphs_without(contained: Contained, texts: Iterable[str]) -> tuple[list[str], int]:
    """Return texts without the lines that contain one of others, and how many lines these are."""
    kept, left_out = [], 0
    for text in texts:
        lines = text.split("\n")
        own = [line for line in lines if not contained(line)]
        left_out += len(lines) - len(own)
        kept.append("\n".join(own))
    return kept, left_out


def main(argv: Sequence[str] | None = None) -> int:
    """Write the corpus."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("folder", type=Path)
    arguments = parser.parse_args(argv)
    arguments.folder.mkdir(parents=True, exist_ok=True)
    pages, left_out = documentation()
    of_split = divided(pages)
    report: dict[str, Any] = {name: {"what": what, "licence": licence} for name, (what, licence) in SOURCES.items()}
    contained = Contained(evaluated(arguments.data))
    for split in ("train", "validation"):
        with (arguments.folder / f"{split}.jsonl").open("w", encoding="utf-8") as stream:
            for name, texts in (
                ("novels", novels(arguments.data, split)),
                ("wikipedia", articles(arguments.data, split)),
                ("documentation", of_split[split]),
            ):
                written, copies = paragraphs_without(contained, texts)
                stream.writelines(json.dumps({"text": text, "source": name}) + "\n" for text in written)
                report[name][split] = {
                    "documents": len(written),
                    "characters": sum(map(len, written)),
                    "sha256": digest(written),
                    "lines_of_evaluated_tasks": copies,
                }
    report["documentation"] |= {
        "left_out": left_out,
        "packages": corpus_report(embedded_corpus("text"))["packages"],
    }
    (arguments.folder / "sources.json").write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    print(json.dumps(report, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
