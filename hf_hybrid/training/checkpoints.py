"""What is whole on the disk: markers of finished saving, files that appear at once, and what a full disk leaves."""

import contextlib
import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import xxhash
from safetensors import SafetensorError

from hf_hybrid.training.command_line import RunFailed
from hf_hybrid.training.full_disk import no_room

__all__ = [
    "MARKER",
    "UNFINISHED",
    "CannotSave",
    "begin_saving",
    "explain_full_disk",
    "faults_on_disk",
    "finish_saving",
    "mark_complete",
    "replacing",
    "saving_into",
    "was_cut_off",
]

MARKER = "complete.json"
"""Size and checksum of each file of a checkpoint. It is written when all of them are on the disk."""
UNFINISHED = "_incomplete"
"""Lies in a folder while a model or a checkpoint is saved into it. The Hub's uploads leave out such names."""
_CHUNK = 1 << 22


class CannotSave(RunFailed):
    """There is no room for what was to be saved."""


# ---- the marker ----


def begin_saving(folder: Path) -> None:
    """Say that what is in the folder is not to be trusted from now on."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / UNFINISHED).touch()
    _sync(folder / UNFINISHED)
    (folder / MARKER).unlink(missing_ok=True)
    _sync(folder)


def finish_saving(folder: Path) -> None:
    """Say that what was saved into the folder is whole."""
    (folder / UNFINISHED).unlink(missing_ok=True)
    _sync(folder)


@contextlib.contextmanager
def saving_into(folder: Path) -> Iterator[None]:
    """Save a model into a folder that is not to be trusted until all of it is there."""
    begin_saving(folder)
    yield
    finish_saving(folder)


def mark_complete(checkpoint: Path) -> None:
    """Write a checkpoint's marker, once all of its files are on the disk."""
    files = {}
    for path in sorted(path for path in checkpoint.rglob("*") if path.is_file()):
        name = path.relative_to(checkpoint).as_posix()
        if name not in (MARKER, UNFINISHED):
            _sync(path)
            files[name] = {"bytes": path.stat().st_size, "xxh3_64": _checksum(path)}
    with replacing(checkpoint / MARKER) as path:
        path.write_text(json.dumps({"files": files}, indent=1), encoding="utf-8")
    finish_saving(checkpoint)
    _sync(checkpoint.parent)


def was_cut_off(folder: Path) -> bool:
    """Whether a model or a checkpoint was being saved into the folder when the process ended."""
    return (folder / UNFINISHED).exists()


def faults_on_disk(checkpoint: Path) -> list[str]:
    """What is wrong with a checkpoint's files, as far as its marker tells; nothing if it has none.

    All files are read. Files that the marker does not know were put there later, and do not count.
    """
    if was_cut_off(checkpoint):
        return ["its saving was cut off"]
    marker = checkpoint / MARKER
    if not marker.exists():
        return []
    try:
        files = json.loads(marker.read_text(encoding="utf-8"))["files"]
        expected = {name: (int(entry["bytes"]), str(entry["xxh3_64"])) for name, entry in files.items()}
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return [f"{MARKER} is damaged"]
    faults = []
    for name, (size, checksum) in expected.items():
        path = checkpoint / name
        if not path.is_file():
            faults.append(f"{name} missing")
        elif path.stat().st_size != size:
            faults.append(f"{name} damaged ({path.stat().st_size} of {size} bytes)")
        elif _checksum(path) != checksum:
            faults.append(f"{name} damaged (it is not what was saved)")
    return faults


def _checksum(path: Path) -> str:
    digest = xxhash.xxh3_64()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


def _sync(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on the disk and would survive a power cut."""
    if path.is_dir() and os.name == "nt":  # Windows cannot open folders
        return
    descriptor = os.open(path, os.O_RDWR if os.name == "nt" else os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Write a file that is there as a whole or, as before, not at all.

    Args:
        path: The file.

    Yields:
        Where to write; it takes the file's place at the end.
    """
    temporary = path.with_name(f"_{path.name}.{os.getpid()}")
    try:
        yield temporary
        _sync(temporary)
        temporary.replace(path)
    except OSError as error:
        error.filename = str(path)  # writing and closing leave it out, and nobody knows the other name
        raise
    finally:
        temporary.unlink(missing_ok=True)


# ---- full disks ----


@contextlib.contextmanager
def explain_full_disk(folder: Path, what: str, advise: Callable[[], str]) -> Iterator[None]:
    """Turn the many errors by which libraries report a full disk into one.

    Args:
        folder: Where something is saved.
        what: What is saved.
        advise: Says what there is now, and how to go on.

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
    if isinstance(error, SafetensorError):  # it leaves no file behind
        return "model.safetensors"
    files = [path for path in folder.iterdir() if path.is_file() and path.name != UNFINISHED]
    return max(files, key=lambda path: path.stat().st_mtime_ns).name if files else "the first file"
