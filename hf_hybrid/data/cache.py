"""Cache folders that several processes can request at once; each is built once."""

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from datasets import DatasetDict

__all__ = ["cache_root", "cached_folder", "locked", "save_quietly"]


def cache_root(cache_dir: str | None = None) -> Path:
    """Return this package's folder inside a cache.

    Args:
        cache_dir: The cache; when None, that of `datasets`, which follows ``HF_HOME`` and ``HF_DATASETS_CACHE``.
    """
    if cache_dir is None:
        from datasets import config

        cache_dir = str(config.HF_DATASETS_CACHE)
    return Path(cache_dir).expanduser() / "hf_hybrid"


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold the lock of a folder of the cache, which need not exist; other processes wait.

    Raises:
        ValueError: The parent folder is not writable.
    """
    from filelock import FileLock

    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        lock = FileLock(str(folder) + ".lock").acquire()
    except OSError as error:
        raise ValueError(
            f"cache_dir must be a writable folder; got {str(folder.parent)!r} ({error.strerror or error})"
        ) from error
    with lock:
        yield


def cached_folder(folder: Path, build: Callable[[Path], None]) -> Path:
    """Build a folder unless it exists.

    One process builds while the others wait. It builds under a temporary name and renames the folder at the end, so
    an existing folder is complete and a failed build leaves nothing.

    Args:
        folder: The folder; its name must depend on everything that the result depends on.
        build: Writes the result into an empty folder.

    Returns:
        ``folder``.

    Raises:
        ValueError: The parent folder is not writable.
    """
    if folder.is_dir():
        return folder
    with locked(folder):
        if not folder.is_dir():
            unfinished = folder.with_name(f".{folder.name}-unfinished")
            shutil.rmtree(unfinished, ignore_errors=True)  # a killed process may have left one
            unfinished.mkdir()
            try:
                build(unfinished)
                unfinished.replace(folder)
            finally:
                shutil.rmtree(unfinished, ignore_errors=True)
    return folder


def save_quietly(dataset: "DatasetDict", folder: Path) -> None:
    """Write a dataset without a progress bar for each split."""
    from datasets.utils import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

    were_disabled = are_progress_bars_disabled()
    disable_progress_bars()
    try:
        dataset.save_to_disk(str(folder))
    finally:
        if not were_disabled:
            enable_progress_bars()
