"""Folders that are built once, whole or not at all, however many processes ask for them at the same time."""

import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from datasets import DatasetDict

__all__ = ["cache_root", "cached_folder", "save_quietly"]


def cache_root(cache_dir: str | None = None) -> Path:
    """Return the folder under which this package keeps what it builds.

    Args:
        cache_dir: The user's choice; the cache of `datasets` (which follows ``HF_HOME`` and ``HF_DATASETS_CACHE``)
            when None.
    """
    if cache_dir is None:
        from datasets import config

        cache_dir = str(config.HF_DATASETS_CACHE)
    return Path(cache_dir).expanduser() / "hf_hybrid"


def cached_folder(folder: Path, build: Callable[[Path], None]) -> Path:
    """Build a folder unless it is there.

    One process builds while the others wait. The build happens beside the folder and is renamed into place at its end,
    so a folder that exists is complete, and a build that fails leaves nothing behind.

    Args:
        folder: Where the result belongs; its name holds everything that the result depends on.
        build: Writes the result into the empty folder that it is given.

    Returns:
        ``folder``.

    Raises:
        ValueError: The place cannot be written to.
    """
    from filelock import FileLock

    if folder.is_dir():
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        lock = FileLock(str(folder) + ".lock")
        lock.acquire()
    except OSError as error:
        raise ValueError(
            f"cache_dir must be a folder that can be written to; got {str(folder.parent)!r} "
            f"({error.strerror or error})"
        ) from error
    try:
        if not folder.is_dir():
            unfinished = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
            try:
                build(unfinished)
                unfinished.chmod(0o777 & ~_umask())
                unfinished.replace(folder)
            finally:
                shutil.rmtree(unfinished, ignore_errors=True)
    finally:
        lock.release()
    return folder


def save_quietly(dataset: "DatasetDict", folder: Path) -> None:
    """Write a dataset without the progress bars of `datasets`, one for each split."""
    from datasets.utils import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

    were_disabled = are_progress_bars_disabled()
    disable_progress_bars()
    try:
        dataset.save_to_disk(str(folder))
    finally:
        if not were_disabled:
            enable_progress_bars()


def _umask() -> int:
    """Return the process's file mode mask (`tempfile` makes folders that only their owner can read)."""
    mask = os.umask(0o022)
    os.umask(mask)
    return mask
