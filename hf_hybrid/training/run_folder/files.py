"""The files of a run's folder: what they are called, and how each is written whole or not at all."""

import contextlib
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

from safetensors import SafetensorError

from hf_hybrid.training.errors import RunFailed, no_room

MARKER = "complete.json"
"""Size and checksum of each file of a checkpoint. It is written when all of them are on the disk."""
UNFINISHED = "_incomplete"
"""Lies in a folder while a model or a checkpoint is saved into it. The Hub's uploads leave out such names."""
ADAPTER_FILES = ("adapter_model.safetensors", "adapter_model.bin")
WEIGHTS_FILES = (
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
    *ADAPTER_FILES,
)
"""Any one of these makes a folder hold weights."""
BASE_CONFIG = "base_config.json"
"""Beside an adapter: the configuration of the model that it was trained on."""
BASE_MODEL = "base_model"
"""In an adapter's folder: the model that it was trained on, where that is no checkpoint of its own."""
MERGED_MODEL = "merged_model"
"""In an adapter's folder: the model with the adapter in its weights."""
PREDICTIONS_FILE = "generated_predictions.txt"
REPORT_FILE, CURVES_FILE = "report.html", "curves.png"
RESULT_FILES = (
    "all_results.json",
    "train_results.json",
    "eval_results.json",
    "predict_results.json",
    "trainer_state.json",
    PREDICTIONS_FILE,
    "predict_results*.txt",
    REPORT_FILE,
    REPORT_FILE.replace(".", "-*."),
    CURVES_FILE,
)
"""Patterns of what scripts write next to the model. No run writes all of it, and old files could pass for new."""
CARD_FILE = "README.md"


class CannotSave(RunFailed):
    """There is no room for what was to be saved."""


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Write a file that is there as a whole or, as before, not at all.

    Yields:
        Where to write; it takes the file's place at the end.
    """
    temporary = path.with_name(f"_{path.name}.{os.getpid()}")
    try:
        yield temporary
        sync(temporary)
        temporary.replace(path)
    except OSError as error:
        error.filename = str(path)  # writing and closing leave it out, and nobody knows the other name
        raise
    finally:
        temporary.unlink(missing_ok=True)


def sync(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on the disk and would survive a power cut."""
    if path.is_dir() and os.name == "nt":  # Windows cannot open folders
        return
    descriptor = os.open(path, os.O_RDWR if os.name == "nt" else os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def explain_full_disk(folder: Path, what: str, advise: Callable[[], str]) -> Iterator[None]:
    """Turn the many errors by which libraries report a full disk into one.

    `advise` says what there is now, and how to go on.

    Raises:
        CannotSave: There was no room.
    """
    try:
        yield
    except Exception as error:
        if (found := no_room(error)) is None:
            raise
        reason, source = found
        parent = next(path for path in (folder, *folder.absolute().parents) if path.is_dir())
        free = shutil.disk_usage(parent).free / 2**20
        raise CannotSave(
            f"{what} could not be saved in {folder}: {reason} while {_being_written(source, parent)} was written; "
            f"{free:,.1f} MiB are free there. {advise()}"
        ) from error


def _being_written(error: BaseException, folder: Path) -> str:
    """The file at which saving failed, as far as it can be known."""
    if isinstance(error, OSError) and error.filename is not None:
        return Path(error.filename).name
    if isinstance(error, SafetensorError):  # it leaves no file
        return "model.safetensors"
    files = [path for path in folder.iterdir() if path.is_file() and path.name != UNFINISHED]
    return max(files, key=lambda path: path.stat().st_mtime_ns).name if files else "the first file"
