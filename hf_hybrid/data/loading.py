"""Load raw datasets by name, from a folder or from files: `load_raw_datasets`."""

import hashlib
import json
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_hybrid.data.cache import cache_root, cached_folder, save_quietly
from hf_hybrid.data.corpora import EMBEDDED, embedded_corpus
from hf_hybrid.data.files import EXTENSIONS, TEXT_EXTENSIONS, check_file, iterate_rows, read_table
from hf_hybrid.suggestions import did_you_mean

if TYPE_CHECKING:
    from datasets import DatasetDict, IterableDatasetDict

__all__ = ["embedded_name", "load_raw_datasets"]

_EMBEDDED_PREFIX = "embedded:"
_WHOLE_FILES = {"sample_by": "document", "encoding": "utf-8-sig"}
"""What makes `datasets` read a ``.txt`` file as one row, without a byte order mark."""
_FORMAT = 5  # part of the cache key: raise it when the same files give other rows


def load_raw_datasets(
    *,
    dataset_name: str | None = None,
    dataset_config_name: str | None = None,
    train_file: str | None = None,
    validation_file: str | None = None,
    test_file: str | None = None,
    files: Mapping[str, str | None] | None = None,
    tsv_header: Sequence[str] | None = None,
    keep_linebreaks: bool | None = None,
    whole_text_files: bool = False,
    streaming: bool = False,
    cache_dir: str | None = None,
    token: str | bool | None = None,
) -> "DatasetDict | IterableDatasetDict":
    """Load the splits that a script trains and evaluates on.

    Args:
        dataset_name: ``embedded:NAME`` (see `hf_hybrid.data.corpora.EMBEDDED`), a local folder (of data files, or
            written by ``save_to_disk``), or a dataset of the Hugging Face Hub.
        dataset_config_name: Configuration of a Hub dataset or folder.
        train_file: A ``.csv``, ``.tsv``, ``.json``, ``.jsonl`` or ``.parquet`` file, plain or compressed (``.gz``,
            ``.xz``, ``.bz2``): CSV or TSV with a header, one JSON object per line, or one JSON array of objects.
        validation_file: The same.
        test_file: The same.
        files: The same for other splits, by flag: ``{"validation_mismatched_file": path}``.
        tsv_header: Column names for TSV files without a header, see `read_table`.
        keep_linebreaks: Also accept ``.txt`` files, one row per line, with or without its line break; None refuses
            them.
        whole_text_files: Make a row of each ``.txt`` file of a folder or Hub dataset, and not of each of its lines.
        streaming: Read the data while they are used instead of storing them first.
        cache_dir: Where to keep built and downloaded datasets; the Hugging Face cache when None.
        token: Token for the Hub.

    Returns:
        The splits given (``train``, ``validation``, ``test``) or those of the dataset; iterable if streaming. Splits
        from files have the columns of their files, which may differ.

    Raises:
        ValueError: A name and a file are both given or both missing, or the data cannot be read; the message names
            the flag, the file and line, the value and the rule.
    """
    flags = {"train_file": train_file, "validation_file": validation_file, "test_file": test_file, **(files or {})}
    given = _given_files(dataset_name, flags)
    if dataset_name is None:
        return _load_files(
            given, cache_dir, {"tsv_header": tsv_header, "keep_linebreaks": keep_linebreaks}, streaming=streaming
        )
    if (corpus := embedded_name(dataset_name)) is not None:
        if dataset_config_name is not None:
            raise ValueError(
                f"dataset_config_name must be None for {dataset_name!r}, which has no configurations; "
                f"got {dataset_config_name!r}"
            )
        return _streamed(embedded_corpus(corpus, cache_dir=cache_dir), streaming)
    if not dataset_name.strip():
        raise ValueError(f"dataset_name must not be empty; got {dataset_name!r}")
    options = {"cache_dir": cache_dir, "token": token}
    return _load_named(dataset_name, dataset_config_name, options, whole_text_files, streaming=streaming)


def _given_files(dataset_name: str | None, flags: Mapping[str, str | None]) -> dict[str, str]:
    """Return the given files, after checking that there is either a name or a file."""
    given = {flag: path for flag, path in flags.items() if path is not None}
    if dataset_name is not None and given:
        raise ValueError(
            f"dataset_name and {', '.join(given)} must not be given together; got dataset_name={dataset_name!r} and "
            + ", ".join(f"{flag}={path!r}" for flag, path in given.items())
        )
    if dataset_name is None and not given:
        raise ValueError(
            "a dataset must be named: dataset_name (a Hub dataset, a folder, or "
            f"{' or '.join(_EMBEDDED_PREFIX + name for name in EMBEDDED)}), or {', '.join(flags)}"
        )
    return given


def _streamed(dataset: "DatasetDict", streaming: bool) -> "DatasetDict | IterableDatasetDict":
    from datasets import IterableDatasetDict

    if not streaming:
        return dataset
    return IterableDatasetDict({split: rows.to_iterable_dataset() for split, rows in dataset.items()})


def embedded_name(dataset_name: str, allowed: Iterable[str] = EMBEDDED) -> str | None:
    """Return the NAME of ``embedded:NAME``; None for other datasets.

    Args:
        dataset_name: The name of a dataset.
        allowed: The corpora that fit the task.

    Raises:
        ValueError: The name is not one of these corpora.
    """
    if not dataset_name.startswith(_EMBEDDED_PREFIX):
        return None
    name = dataset_name.removeprefix(_EMBEDDED_PREFIX)
    if name not in allowed:
        known = [_EMBEDDED_PREFIX + option for option in allowed]
        raise ValueError(
            f"dataset_name must be one of {', '.join(known)}, a folder or a Hub dataset; got {dataset_name!r}."
            f"{did_you_mean(dataset_name, known)}"
        )
    return name


def _load_files(
    files: dict[str, str], cache_dir: str | None, reading: dict[str, Any], *, streaming: bool
) -> "DatasetDict | IterableDatasetDict":
    """Convert data files to Arrow in the cache and map them; read unchanged files only once."""
    from datasets import IterableDataset, IterableDatasetDict, load_from_disk

    for flag, path in files.items():
        check_file(flag, path, EXTENSIONS if reading["keep_linebreaks"] is None else TEXT_EXTENSIONS)
    if streaming:
        return IterableDatasetDict(
            {
                flag.removesuffix("_file"): IterableDataset.from_generator(
                    iterate_rows, gen_kwargs={"flag": flag, "path": path, **reading}
                )
                for flag, path in files.items()
            }
        )
    states = [(flag, str(Path(path).resolve()), Path(path).stat()) for flag, path in files.items()]
    facts = [(flag, path, state.st_size, state.st_mtime_ns) for flag, path, state in states]
    key = json.dumps([_FORMAT, reading, facts])
    folder = cache_root(cache_dir) / "files" / hashlib.sha256(key.encode()).hexdigest()[:16]
    cached_folder(folder, lambda unfinished: _convert_files(files, unfinished, reading))
    return load_from_disk(str(folder))


def _convert_files(files: dict[str, str], folder: Path, reading: dict[str, Any]) -> None:
    from datasets import Dataset, DatasetDict

    tables = {flag: read_table(flag, path, **reading) for flag, path in files.items()}
    if not set.intersection(*(set(table.column_names) for table in tables.values())):
        raise ValueError(
            "all files must have a column in common; "
            + "; ".join(f"{flag} {files[flag]!r} has: {', '.join(tables[flag].column_names)}" for flag in files)
        )
    splits = {flag.removesuffix("_file"): Dataset(table) for flag, table in tables.items()}
    save_quietly(DatasetDict(splits), folder)


def _load_named(
    name: str, config: str | None, options: Mapping[str, Any], whole_text_files: bool, *, streaming: bool
) -> "DatasetDict | IterableDatasetDict":
    """Load a folder or a Hub dataset with `datasets`."""
    import datasets

    folder = Path(name).expanduser()
    try:
        if (folder / "dataset_dict.json").is_file():
            return _streamed(datasets.DatasetDict.load_from_disk(str(folder)), streaming)
        if (folder / "state.json").is_file():
            rows = datasets.Dataset.load_from_disk(str(folder))
            return _streamed(datasets.DatasetDict({"train": rows}), streaming)
        path = str(folder) if folder.is_dir() else name
        more = _WHOLE_FILES if whole_text_files and _holds_lines(path, config, options) else {}
        loaded = datasets.load_dataset(path, config, **options, **more, streaming=streaming)
    except (OSError, ValueError, RuntimeError, datasets.exceptions.DatasetGenerationError) as error:
        # OSError: not found or not reachable; ValueError: wrong configuration; RuntimeError: the dataset is a script
        raise ValueError(_cannot_load(name, folder, error)) from error
    if not isinstance(loaded, datasets.DatasetDict | datasets.IterableDatasetDict):
        raise ValueError(f"dataset_name must be a dataset with splits; got {name!r}, a {type(loaded).__name__}")
    return loaded


def _holds_lines(path: str, config: str | None, options: Mapping[str, Any]) -> bool:
    """Whether a folder or Hub dataset is of ``.txt`` files whose lines `datasets` takes for rows."""
    import datasets

    return getattr(datasets.load_dataset_builder(path, config, **options).config, "sample_by", None) == "line"


def _cannot_load(name: str, folder: Path, error: Exception) -> str:
    """Return a message about a dataset name, with a suggestion."""
    reason = textwrap.shorten(str(error.__cause__ or error), 300)
    if folder.is_dir():
        return f"dataset_name must be a folder that datasets can read; got {name!r} ({reason})"
    if folder.is_file():
        return f"dataset_name must be a folder or the name of a dataset; got the file {name!r}: give it as train_file"
    corpora = [_EMBEDDED_PREFIX + option for option in EMBEDDED]
    hint = did_you_mean(_EMBEDDED_PREFIX + name if name in EMBEDDED else name, corpora)
    return (
        f"dataset_name must be a Hub dataset that can be reached or is in the cache, an existing folder, or one of "
        f"{', '.join(corpora)}, which need no network; got {name!r} ({reason}).{hint}"
    )
