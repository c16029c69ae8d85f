"""The files of a run's folder: their names, and how to write each one completely or leave the old one."""

import contextlib
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

from safetensors import SafetensorError

from hf_hybrid.training.errors import RunFailed, no_room

MARKER = "complete.json"
"""Size and checksum of each file of a checkpoint, written when all of them are on the disk."""
UNFINISHED = "_incomplete"
"""Exists in a folder while a model or a checkpoint is saved into it. Uploads to the Hub skip such names."""
ADAPTER_FILES = ("adapter_model.safetensors", "adapter_model.bin")
WEIGHTS_FILES = (
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
    *ADAPTER_FILES,
)
"""A folder with any of these holds weights."""
BASE_CONFIG = "base_config.json"
"""In an adapter's folder: the configuration of the model that it was trained on."""
BASE_MODEL = "base_model"
"""In an adapter's folder: the model that it was trained on, if that is not a checkpoint elsewhere."""
MERGED_MODEL = "merged_model"
"""In an adapter's folder: the model with the adapter merged into its weights."""
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
"""Patterns of the files that scripts write next to the model. No run writes all, and old ones could pass for new."""
CARD_FILE = "README.md"


class CannotSave(RunFailed):
    """There is no room to save something."""


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Replace a file only once its new content is complete.

    Yields:
        The path to write to; it is renamed to `path` at the end.
    """
    temporary = path.with_name(f"_{path.name}.{os.getpid()}")
    try:
        yield temporary
        sync(temporary)
        temporary.replace(path)
    except OSError as error:
        error.filename = str(path)  # errors of writing have no name, or the temporary one
        raise
    finally:
        temporary.unlink(missing_ok=True)


def sync(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on the disk and survive a power cut."""
    if path.is_dir() and os.name == "nt":  # Windows cannot open folders
        return
    descriptor = os.open(path, os.O_RDWR if os.name == "nt" else os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def explain_full_disk(folder: Path, what: str, advise: Callable[[], str]) -> Iterator[None]:
    """Turn the different errors by which libraries report a full disk into one.

    `advise` says what is saved and how to continue.

    Raises:
        CannotSave: The disk is full.
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
    """Return the name of the file that could not be saved, as far as it is known."""
    if isinstance(error, OSError) and error.filename is not None:
        return Path(error.filename).name
    if isinstance(error, SafetensorError):  # safetensors leaves no file
        return "model.safetensors"
    files = [path for path in folder.iterdir() if path.is_file() and path.name != UNFINISHED]
    return max(files, key=lambda path: path.stat().st_mtime_ns).name if files else "the first file"
