"""Build corpora from the documentation of installed Python packages, without a network.

The sources of the standard library and of this package's dependencies are parsed, not run. Their docstrings become
pairs of document and summary, sentence pairs to classify, and running text. The same installed packages always give
the same corpora.
"""

import hashlib
import json
import logging
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_hybrid.data.cache import cache_root, cached_folder, save_quietly
from hf_hybrid.data.docstrings import (
    DocumentationError,
    Pair,
    docstring_pair,
    docstring_text,
    module_pair,
    read_docstrings,
    words_of,
)
from hf_hybrid.data.near_copies import NearCopyFilter
from hf_hybrid.data.sources import Package, find_packages, source_files
from hf_hybrid.suggestions import did_you_mean

if TYPE_CHECKING:
    from datasets import DatasetDict

__all__ = ["EMBEDDED", "corpus_report", "embedded_corpus"]

logger = logging.getLogger(__name__)

EMBEDDED: dict[str, str] = {
    "docstrings": "one class or function: its signature and docstring without the first sentence -> that sentence",
    "modules": "one module: all of its documentation -> the first paragraph of the module docstring",
    "docpairs": "a document of embedded:docstrings, with its own summary or another document's -> match or mismatch",
    "text": "one module: all of its documentation, as running text",
}
"""The corpora's names (without ``embedded:``) and a description of their rows."""

SPLITS = {"train": 0.9, "validation": 0.05, "test": 0.05}  # shares of the modules
DOCPAIR_LABELS = ("mismatch", "match")
_FORMAT = 2  # part of the cache key: raise it when the same sources give other rows
_Rows = list[dict[str, Any]]


def embedded_corpus(
    name: str, *, cache_dir: str | None = None, packages: Sequence[str] | None = None
) -> "DatasetDict":
    """Build a corpus, or read it from the cache.

    Each module belongs to one split. A document or summary that repeats more than about half of the runs of four words
    of an earlier one is dropped. The first build reads some hundred megabytes of source and makes all corpora in about
    a minute; later calls, and processes that wait for the first, map the result.

    In ``docpairs`` every document and summary of ``docstrings`` occurs in one match and one mismatch, so neither
    alone predicts the label. The wrong summary comes from another module of the same split and has about the length
    of the right one.

    Args:
        name: A key of `EMBEDDED`.
        cache_dir: Where to keep the corpus; the cache of `datasets` when None.
        packages: Import names of packages, or folders, to read in place of `hf_hybrid.data.sources.DEFAULT_PACKAGES`.

    Returns:
        Splits train, validation and test. Their columns are ``document`` and ``summary`` (``docstrings``,
        ``modules``), ``sentence1``, ``sentence2`` and ``label`` (``docpairs``), or ``text``, and always ``source``:
        the module, such as ``torch.nn.functional``.

    Raises:
        ValueError: The name is unknown, a package is not installed, or the packages hold too few documents.
    """
    from datasets import load_from_disk

    if name not in EMBEDDED:
        raise ValueError(
            f"embedded corpus must be one of: {', '.join(EMBEDDED)}; got {name!r}.{did_you_mean(name, EMBEDDED)}"
        )
    found = find_packages(packages)
    fingerprint = _fingerprint(found)
    folder = cache_root(cache_dir) / "embedded" / fingerprint
    cached_folder(folder, lambda unfinished: _build(found, fingerprint, unfinished))
    rows = json.loads((folder / f"{name}.json").read_text(encoding="utf-8"))["rows"]
    if not all(rows.values()):
        raise ValueError(
            f"packages must hold enough documented modules for every split of embedded:{name}; got {rows} rows from "
            f"{', '.join(package.label for package in found)}"
        )
    corpus = load_from_disk(str(folder / name))
    logger.info("embedded:%s: %s", name, corpus["train"].info.description)
    return corpus


def corpus_report(corpus: "DatasetDict") -> dict[str, Any]:
    """Return the sources of an embedded corpus.

    Returns:
        ``fingerprint`` (equal for equal sources), ``packages`` (name -> version), ``rows`` (split -> count),
        ``files`` (number read), ``unreadable_files`` (number skipped) and ``near_copies`` (documents dropped).
    """
    return json.loads(corpus["train"].info.description)


def _fingerprint(packages: Sequence[Package]) -> str:
    state = [_FORMAT, *((package.name, package.label, package.version) for package in packages)]
    return hashlib.sha256(json.dumps(state).encode()).hexdigest()[:16]


def _build(packages: Sequence[Package], fingerprint: str, folder: Path) -> None:
    """Read the packages once and write all corpora: parsing takes most of the time."""
    pairs, texts, files, unreadable = _read(packages)
    kept = {name: _without_copies(found) for name, found in pairs.items()}
    pages, copied_texts = _pages(texts)
    corpora = {name: _in_splits([vars(pair) for pair in members]) for name, members in kept.items()}
    corpora["docpairs"] = {split: _matches_and_mismatches(rows) for split, rows in corpora["docstrings"].items()}
    corpora["text"] = _in_splits(pages)
    copies = {name: len(pairs[name]) - len(kept[name]) for name in kept}
    copies |= {"docpairs": copies["docstrings"], "text": copied_texts}
    for name, splits in corpora.items():
        report = {
            "fingerprint": fingerprint,
            "packages": {package.label: package.version for package in packages},
            "rows": {split: len(rows) for split, rows in splits.items()},
            "files": files,
            "unreadable_files": unreadable,
            "near_copies": copies[name],
        }
        (folder / f"{name}.json").write_text(json.dumps(report), encoding="utf-8")
        if all(splits.values()):
            save_quietly(_to_dataset(splits, json.dumps(report)), folder / name)


def _to_dataset(splits: Mapping[str, _Rows], description: str) -> "DatasetDict":
    from datasets import ClassLabel, Dataset, DatasetDict, DatasetInfo, Features, Value

    text, label = Value("string"), ClassLabel(names=list(DOCPAIR_LABELS))
    features = Features({name: label if name == "label" else text for name in splits["train"][0]})
    info = DatasetInfo(description=description, features=features)
    return DatasetDict({split: Dataset.from_list(rows, features, info) for split, rows in splits.items()})


def _read(packages: Sequence[Package]) -> tuple[dict[str, list[Pair]], list[tuple[str, str]], int, int]:
    """Return the pairs of each corpus, (module, text) of each docstring, and the counts of files read and skipped."""
    from tqdm.auto import tqdm

    files = [file for package in packages for file in source_files(package)]
    pairs: dict[str, list[Pair]] = {"docstrings": [], "modules": []}
    texts: list[tuple[str, str]] = []
    unreadable = 0
    for file in tqdm(files, desc="Reading docstrings", unit="file", disable=None):
        try:
            docstrings = read_docstrings(file.path.read_bytes(), file.module)
        except (DocumentationError, OSError) as error:
            logger.debug("skipped %s: %s", file.path, error)
            unreadable += 1
            continue
        found = [docstring_pair(docstring, file.module) for docstring in docstrings]
        pairs["docstrings"].extend(pair for pair in found if pair is not None)
        page = module_pair(docstrings, file.module)
        if page is not None:
            pairs["modules"].append(page)
        texts += [(file.module, text) for text in map(docstring_text, docstrings) if text is not None]
    return pairs, texts, len(files) - unreadable, unreadable


def _without_copies(pairs: Sequence[Pair]) -> list[Pair]:
    """Drop pairs whose document or summary repeats an earlier one."""
    from tqdm.auto import tqdm

    copies = NearCopyFilter()
    kept = []
    for pair in tqdm(pairs, desc="Leaving out near copies", unit="pair", delay=1.0, disable=None):
        body = words_of(pair.document.partition("\n")[2])
        if not copies.is_copy(body, f"summary: {words_of(pair.summary)}"):
            kept.append(pair)
    return kept


def _pages(texts: Sequence[tuple[str, str]]) -> tuple[_Rows, int]:
    """Join the texts of each module without repeated ones; return the rows and the number dropped."""
    from tqdm.auto import tqdm

    copies = NearCopyFilter()
    pages: defaultdict[str, list[str]] = defaultdict(list)
    for module, text in tqdm(texts, desc="Leaving out near copies", unit="text", delay=1.0, disable=None):
        if not copies.is_copy(words_of(text.partition("\n")[2])):
            pages[module].append(text)
    rows = [{"text": "\n\n".join(page), "source": module} for module, page in pages.items()]
    return rows, len(texts) - sum(map(len, pages.values()))


def _matches_and_mismatches(rows: _Rows) -> _Rows:
    """Pair each document of a split with its own summary and with another one of about the same length."""
    if len(rows) < 2:
        return []
    order = sorted(rows, key=lambda row: (len(row["summary"]), hashlib.sha256(row["summary"].encode()).digest()))
    others = [*order[1:], order[0]]
    for here, row in enumerate(order):
        if others[here]["source"] != row["source"]:
            continue
        for there in (*range(here + 1, len(order)), *range(here - 1, -1, -1)):  # the closest valid exchange
            if row["source"] != others[there]["source"] and order[there]["source"] != others[here]["source"]:
                others[here], others[there] = others[there], others[here]
                break
    return [
        {
            "sentence1": row["document"],
            "sentence2": summary,
            "label": DOCPAIR_LABELS.index(label),
            "source": row["source"],
        }
        for row, other in zip(order, others, strict=True)
        for summary, label in ((row["summary"], "match"), (other["summary"], "mismatch"))
    ]


def _in_splits(rows: _Rows) -> dict[str, _Rows]:
    splits: dict[str, _Rows] = {split: [] for split in SPLITS}
    for row in rows:
        splits[_split_of(row["source"])].append(row)
    return splits


def _split_of(module: str) -> str:
    """Choose a module's split by its name alone."""
    point = int.from_bytes(hashlib.sha256(module.encode()).digest()[:8]) / 2**64
    for split, share in SPLITS.items():
        if point < share:
            return split
        point -= share
    return "train"  # rounding
