"""Summarization corpora built on the user's machine from the documentation of installed Python packages.

Nothing is downloaded, imported or executed: the sources of the standard library and of this package's dependencies are
parsed, and their docstrings become pairs of document and summary. The same installed packages always give the same
corpus.
"""

import hashlib
import json
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_hybrid.data.cache import cache_root, cached_folder, save_quietly
from hf_hybrid.data.docstrings import DocumentationError, Pair, docstring_pair, module_pair, read_docstrings, words_of
from hf_hybrid.data.near_copies import NearCopyFilter
from hf_hybrid.data.sources import Package, find_packages, source_files
from hf_hybrid.suggestions import did_you_mean

if TYPE_CHECKING:
    from datasets import DatasetDict

__all__ = ["EMBEDDED", "corpus_report", "embedded_corpus"]

logger = logging.getLogger(__name__)

EMBEDDED: dict[str, str] = {
    "docstrings": "one class or function: its signature and docstring without the first sentence -> that sentence",
    "modules": "one module: the documentation of everything in it -> the first paragraph of the module's own",
}
"""The corpora's names (without ``embedded:``), with what their documents and summaries are."""

SPLITS = {"train": 0.9, "validation": 0.05, "test": 0.05}  # shares of the modules
_FORMAT = 1  # part of the cache key: raise it whenever the same sources would give other pairs


def embedded_corpus(
    name: str, *, cache_dir: str | None = None, packages: Sequence[str] | None = None
) -> "DatasetDict":
    """Build a corpus, or read it from the cache.

    Every module belongs to one split as a whole, and a document that repeats an earlier one (more than about half of
    its runs of four words), or its summary, is left out of all of them. The first build reads some hundred megabytes
    of source, takes about half a minute and makes all corpora; later calls, and processes that wait for the first,
    map its result.

    Args:
        name: A key of `EMBEDDED`.
        cache_dir: Where the corpus is kept; the cache of `datasets` when None.
        packages: Import names of packages or paths of folders to read instead of the default list
            (`hf_hybrid.data.sources.DEFAULT_PACKAGES`, as far as installed).

    Returns:
        Splits train, validation and test with the columns ``document``, ``summary`` and ``source`` (the module, such
        as ``torch.nn.functional``). `corpus_report` tells what it was built from.

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
    pairs = json.loads((folder / f"{name}.json").read_text(encoding="utf-8"))["pairs"]
    if not all(pairs.values()):
        raise ValueError(
            f"packages must hold enough documented modules for every split of embedded:{name}; got {pairs} pairs from "
            f"{', '.join(package.label for package in found)}"
        )
    corpus = load_from_disk(str(folder / name))
    logger.info("embedded:%s: %s", name, corpus["train"].info.description)
    return corpus


def corpus_report(corpus: "DatasetDict") -> dict[str, Any]:
    """Return what an embedded corpus was built from.

    Returns:
        ``fingerprint`` (equal for equal sources), ``packages`` (name -> version), ``pairs`` (split -> count),
        ``files`` (count read), ``unreadable_files`` (count skipped) and ``near_copies`` (count left out).
    """
    return json.loads(corpus["train"].info.description)


def _fingerprint(packages: Sequence[Package]) -> str:
    """Return a digest of everything that the pairs depend on."""
    state = [_FORMAT, *((package.name, package.label, package.version) for package in packages)]
    return hashlib.sha256(json.dumps(state).encode()).hexdigest()[:16]


def _build(packages: Sequence[Package], fingerprint: str, folder: Path) -> None:
    """Read the packages and write every corpus, for parsing is what takes the time."""
    pairs, files, unreadable = _read_pairs(packages)
    for name in EMBEDDED:
        kept = _without_copies(pairs[name])
        splits: dict[str, list[Pair]] = {split: [] for split in SPLITS}
        for pair in kept:
            splits[_split_of(pair.source)].append(pair)
        report = {
            "fingerprint": fingerprint,
            "packages": {package.label: package.version for package in packages},
            "pairs": {split: len(members) for split, members in splits.items()},
            "files": files,
            "unreadable_files": unreadable,
            "near_copies": len(pairs[name]) - len(kept),
        }
        (folder / f"{name}.json").write_text(json.dumps(report), encoding="utf-8")
        if all(splits.values()):
            save_quietly(_to_dataset(splits, json.dumps(report)), folder / name)


def _to_dataset(splits: dict[str, list[Pair]], description: str) -> "DatasetDict":
    from datasets import Dataset, DatasetDict, DatasetInfo, Features, Value

    columns = ("document", "summary", "source")
    features = Features({column: Value("string") for column in columns})
    return DatasetDict(
        {
            split: Dataset.from_dict(
                {column: [getattr(pair, column) for pair in members] for column in columns},
                features=features,
                info=DatasetInfo(description=description, features=features),
            )
            for split, members in splits.items()
        }
    )


def _read_pairs(packages: Sequence[Package]) -> tuple[dict[str, list[Pair]], int, int]:
    """Return the pairs of each corpus, the number of files read, and the number that could not be read."""
    from tqdm.auto import tqdm

    files = [file for package in packages for file in source_files(package)]
    pairs: dict[str, list[Pair]] = {name: [] for name in EMBEDDED}
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
    return pairs, len(files) - unreadable, unreadable


def _without_copies(pairs: Sequence[Pair]) -> list[Pair]:
    """Leave out every pair whose document or summary repeats an earlier one."""
    from tqdm.auto import tqdm

    copies = NearCopyFilter()
    kept = []
    for pair in tqdm(pairs, desc="Leaving out near copies", unit="pair", delay=1.0, disable=None):
        body = words_of(pair.document.partition("\n")[2])
        if not copies.is_copy(body, f"summary: {words_of(pair.summary)}"):
            kept.append(pair)
    return kept


def _split_of(module: str) -> str:
    """Return the split that a module belongs to: a fixed function of its name."""
    point = int.from_bytes(hashlib.sha256(module.encode()).digest()[:8]) / 2**64
    for split, share in SPLITS.items():
        if point < share:
            return split
        point -= share
    return "train"  # rounding
