r"""Make the texts that the starter is pre-trained on, without what the demo and the starter's evaluation hold out.

``python -m benchmarks.starter path/to/data path/to/corpus`` writes ``train.jsonl`` and ``validation.jsonl`` with a
document in each row, and ``sources.json`` with their number, size, hash, licence and origin, and a hash of each page
of documentation. `path/to/data` holds novels and Wikipedia's articles, and the tasks of `EVALUATED`; the documentation
is that of the installed packages.

The starter is a SPADE encoder-decoder of 7.3 million parameters, under 16 MB in bfloat16. It learns by text infilling,
which makes it copy: its target holds the seen text as well, that of span corruption the hidden spans only. The
starter's card has the command of its run, which `python -m benchmarks.ship_starter RUN CORPUS FOLDER` made the folder
of.

A novel is read if its copyright has ended where it lasts 95 years from its publication, and where it lasts 70 years
from its author's death. WikiText has marks for rare words, and sentences with one are left out.

Left out is what repeats half of a document or a summary of the demo's validation or test split, or of a longer
validation text of the tasks in `EVALUATED`: see `Contained`. Runs of words across paragraphs were not looked for, nor
what several pages repeat together; what has been read so is counted: see `read_of`.
"""

import hashlib
import json
import lzma
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from benchmarks.experiment import data_file
from benchmarks.record import source_and_folder
from hf_hybrid.data.corpora import corpus_report, embedded_corpus
from hf_hybrid.data.docstrings import words_of
from hf_hybrid.data.files import iterate_rows
from hf_hybrid.data.near_copies import hashed_runs

PUBLISHED_UNTIL = 1928
_DIED_UNTIL = 1954
SOURCES = {
    "novels": (
        f"English novels up to {PUBLISHED_UNTIL}, from https://github.com/computationalstylistics/100_english_novels",
        "public domain",
    ),
    "wikipedia": (
        "articles of the English Wikipedia, from WikiText-2 (Merity et al., 2016), without the sentences that have an "
        "unknown word",
        "[CC BY-SA 3.0](https://creativecommons.org/licenses/by-sa/3.0/), by the authors of Wikipedia's articles",
    ),
    "documentation": (
        "docstrings of Python packages",
        "the packages' own: PSF (Python) and like it (matplotlib), BSD (fsspec, joblib, networkx, numpy, pandas, "
        "scipy, sklearn, sympy, torch), Apache-2.0 (the others)",
    ),
}
DEATHS = {
    "Barclay": 1921,
    "Bennet": 1931,
    "Blackmore": 1900,
    "Braddon": 1915,
    "Burnett": 1924,
    "Cbronte": 1855,
    "Chesterton": 1936,
    "Conrad": 1924,
    "Corelli": 1924,
    "Dickens": 1870,
    "Doyle": 1930,
    "Eliot": 1880,
    "Ford": 1939,
    "Forster": 1970,
    "Galsworthy": 1933,
    "Gaskell": 1865,
    "Gissing": 1903,
    "Haggard": 1925,
    "Hardy": 1928,
    "James": 1916,
    "Kipling": 1936,
    "Lawrence": 1930,
    "Lee": 1935,
    "Lytton": 1873,
    "Meredith": 1909,
    "Morris": 1896,
    "Schreiner": 1920,
    "Stevenson": 1894,
    "Thackeray": 1863,
    "Trollope": 1882,
    "Ward": 1920,
    "Wcollins": 1889,
    "Woolf": 1941,
}
"""The years in which the novels' authors died, whom the collection calls so."""
HELD_OUT = ("docstrings", "modules")
"""The embedded corpora whose validation and test splits are held out."""
EVALUATED = ("dialogsum", "scitldr", "sumpubmed", "glue/sst2", "glue/cola", "glue/mrpc", "glue/stsb")
"""The data sets whose validation splits are held out too: those that the starter is evaluated with, and two more."""
_STANDARD_LIBRARY = "Python"
_LONG = 8  # different runs of a text that is looked for in all sources; shorter ones are phrases
_SHARE = 0.5  # of a text's runs, which makes another contain it
_TITLE = re.compile(r"^ = [^=\n]+ = $", re.MULTILINE)
_SENTENCE = re.compile(r"(?<= [.!?]) ")
_SHORTEST = 200  # characters of an article
# WikiText's marks around punctuation, and spaces that written text does not have
_MARKS = (
    (re.compile(r" @([-,.])@ "), r"\1"),
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
        held = [self.held(part) for part in parts]
        found = self.covered(set().union(*held))
        return {at for at, runs in enumerate(held) if any(found.intersection(self._of_run[run]) for run in runs)}

    def held(self, text: str) -> set[int]:
        """Return a text's runs that one of the others has too."""
        return {run for run in hashed_runs(words_of(text)) if run in self._of_run}

    def covered(self, runs: set[int]) -> set[int]:
        """Return the numbers of the others that have at least half of their runs among these."""
        shared = Counter(number for run in runs for number in self._of_run[run])
        return {number for number, count in shared.items() if count >= _SHARE * self._sizes[number]}

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
    """Return the documents and summaries, in turn, that the demo validates and tests with, and its sister corpus's."""
    found = (embedded_corpus(name, **corpora)[split] for name in HELD_OUT for split in ("validation", "test"))
    return [row[column] for rows in found for row in rows for column in ("document", "summary")]


def documentation(**corpora: Any) -> tuple[dict[str, str], dict[str, Any]]:
    """Return the page of each module of the training split by its name, and numbers.

    These are of the parts that are ``left_out`` of all pages, of the documents and summaries that are ``held_out``,
    and of those of them that the pages have read all the same: ``contained_together`` and ``contained_in_one_page``.

    Args:
        **corpora: Arguments of `embedded_corpus`.
    """
    texts = held_out(**corpora)
    contained, pages, left_out = Contained(texts), {}, 0
    for row in embedded_corpus("text", **corpora)["train"]:
        parts = row["text"].split("\n\n")
        kept = contained.without(parts)
        left_out += len(parts) - len(kept)
        if kept:
            pages[row["source"]] = "\n\n".join(kept)
    together, in_one = read_of(texts, pages.values())
    return pages, {
        "left_out": left_out,
        "held_out": len(texts),
        "contained_together": _by_kind(together),
        "contained_in_one_page": _by_kind(in_one),
    }


def read_of(texts: Sequence[str], pages: Iterable[str]) -> tuple[set[int], set[int]]:
    """Return the numbers of the texts that pages contain together, and of those that one page contains."""
    contained = Contained(texts)
    read: set[int] = set()
    in_one: set[int] = set()
    for page in pages:
        held = contained.held(page)
        in_one |= contained.covered(held)
        read |= held
    return contained.covered(read), in_one


def _by_kind(numbers: Iterable[int]) -> dict[str, int]:
    """Count documents and summaries among the numbers of `held_out`."""
    summaries = [number % 2 for number in numbers]
    return {"documents": summaries.count(0), "summaries": summaries.count(1)}


def divided(pages: Mapping[str, str]) -> dict[str, dict[str, str]]:
    """Divide the documentation of modules for pre-training: every fiftieth is for validation."""
    found: dict[str, dict[str, str]] = {"train": {}, "validation": {}}
    for number, (module, page) in enumerate(pages.items()):
        found["train" if number % 50 else "validation"][module] = page
    return found


def hashes_of_pages(pages: Mapping[str, str], packages: Iterable[str]) -> dict[str, set[str]]:
    """Return the first 12 hexadecimal digits of each page's SHA-256, by package.

    Args:
        pages: Pages by their modules.
        packages: The packages' names; a module of no other is the standard library's.
    """
    found: dict[str, set[str]] = {package: set() for package in packages}
    for module, page in pages.items():
        package = module.partition(".")[0]
        found[package if package in found else _STANDARD_LIBRARY].add(hash_of_page(page))
    return found


def hash_of_page(page: str) -> str:
    """Return the first 12 hexadecimal digits of a page's SHA-256."""
    return hashlib.sha256(page.encode()).hexdigest()[:12]


def digest(texts: Iterable[str]) -> str:
    """Return the SHA-256 of texts, with a zero byte behind each."""
    found = hashlib.sha256()
    for text in texts:
        found.update(text.encode() + b"\0")
    return found.hexdigest()


def is_free(novel: str) -> bool:
    """Return whether a novel, called like ``"Hardy_Tess_1891"``, is in the public domain.

    Raises:
        KeyError: The year of the author's death is not known.
    """
    author, _, year = novel.split("_")
    return int(year) <= PUBLISHED_UNTIL and DEATHS[author] <= _DIED_UNTIL


def novels(folder: Path, split: str) -> dict[str, str]:
    """Return every second free novel of a split by its name; lines are joined, in some novels to one.

    The documentation is about two thirds of their text.
    """
    path = str(folder / "english_novels" / f"{split}.jsonl.xz")
    free = (row for row in iterate_rows("data", path) if is_free(row["id"]))
    texts = {}
    for row in islice(free, 0, None, 2):
        paragraphs = re.split(r"\n{2,}", row["text"])
        texts[row["id"]] = "\n".join(" ".join(part.split()) for part in paragraphs if part.strip())
    return texts


def articles(folder: Path, split: str) -> Iterator[str]:
    """Yield Wikipedia's articles of a split, as they were before WikiText took them apart."""
    name = {"train": "train", "validation": "valid"}[split]
    with lzma.open(folder / "wikitext2" / f"{name}.txt.xz", "rt", encoding="utf-8") as stream:
        text = stream.read()
    starts = [match.start() for match in _TITLE.finditer(text)]
    for start, end in zip(starts, [*starts[1:], len(text)], strict=True):
        lines = (_SENTENCE.split(line) for line in text[start:end].split("\n"))
        article = "\n".join(" ".join(part for part in line if "<unk>" not in part) for line in lines)
        for pattern, written in _MARKS:
            article = pattern.sub(written, article)
        article = re.sub(r"\n{2,}", "\n", article).strip()
        if len(article) >= _SHORTEST:
            yield article


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
    data, folder = source_and_folder(__doc__, argv)
    pages, numbers = documentation()
    of_split = divided(pages)
    report: dict[str, Any] = {name: {"what": what, "licence": licence} for name, (what, licence) in SOURCES.items()}
    contained = Contained(evaluated(data))
    read_pages: dict[str, str] = {}
    for split in ("train", "validation"):
        read = novels(data, split)
        with (folder / f"{split}.jsonl").open("w", encoding="utf-8") as stream:
            for name, texts in (
                ("novels", read.values()),
                ("wikipedia", articles(data, split)),
                ("documentation", of_split[split].values()),
            ):
                kept, copies = paragraphs_without(contained, texts)
                written = [text for text in kept if text]
                stream.writelines(json.dumps({"text": text, "source": name}) + "\n" for text in written)
                report[name][split] = {
                    "documents": len(written),
                    "characters": sum(map(len, written)),
                    "sha256": digest(written),
                    "lines_of_evaluated_tasks": copies,
                }
                if name == "novels":
                    report[name][split]["names"] = [title for title, text in zip(read, kept, strict=True) if text]
        read_pages |= zip(of_split[split], kept, strict=True)  # the documentation, the last of the three
    packages = corpus_report(embedded_corpus("text"))["packages"]
    report["documentation"] |= numbers | {
        "packages": packages,
        "pages": {name: " ".join(sorted(found)) for name, found in hashes_of_pages(read_pages, packages).items()},
    }
    (folder / "sources.json").write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    print(json.dumps(report, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
