"""Checkpoints: mark complete ones, recognise those whose saving was cut off, and say what is wrong with one."""

import contextlib
import hashlib
import json
import os
import re
import zipfile
from collections.abc import Iterator
from pathlib import Path

import xxhash
from safetensors import SafetensorError, safe_open

from hf_hybrid.training.run_folder.files import MARKER, UNFINISHED, WEIGHTS_FILES, replacing, sync

_SHARDED = ("pytorch_model_fsdp*", "global_step*")  # folders of weights and optimizer states of FSDP, DeepSpeed


def begin_saving(folder: Path) -> None:
    """Mark a folder as incomplete."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / UNFINISHED).touch()
    sync(folder / UNFINISHED)
    (folder / MARKER).unlink(missing_ok=True)
    sync(folder)


def finish_saving(folder: Path) -> None:
    """Remove the mark of an incomplete folder."""
    (folder / UNFINISHED).unlink(missing_ok=True)
    sync(folder)


@contextlib.contextmanager
def saving_into(folder: Path) -> Iterator[None]:
    """Mark a folder as incomplete while a model is saved into it."""
    begin_saving(folder)
    yield
    finish_saving(folder)


def mark_complete(checkpoint: Path) -> None:
    """Write a checkpoint's marker once all of its files are on the disk."""
    files = {}
    for path in sorted(path for path in checkpoint.rglob("*") if path.is_file()):
        name = path.relative_to(checkpoint).as_posix()
        if name not in (MARKER, UNFINISHED):
            sync(path)
            files[name] = {"bytes": path.stat().st_size, "xxh3_64": _checksum(path)}
    with replacing(checkpoint / MARKER) as path:
        path.write_text(json.dumps({"files": files}, indent=1), encoding="utf-8")
    finish_saving(checkpoint)
    sync(checkpoint.parent)


def was_cut_off(folder: Path) -> bool:
    """Whether the process ended while it saved a model or a checkpoint into the folder."""
    return (folder / UNFINISHED).exists()


def faults_on_disk(checkpoint: Path) -> list[str]:
    """List what is wrong with a checkpoint's files according to its marker; nothing if it has none.

    Reads all files. Files that the marker does not list were added later and do not count.
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
    with path.open("rb") as file:
        return hashlib.file_digest(file, xxhash.xxh3_64).hexdigest()


def complete_checkpoints(folder: str | os.PathLike[str]) -> list[str]:
    """List the checkpoints in a run's folder that can be resumed from, by step. Reads all of their files."""
    return [str(path) for path in list_checkpoints(Path(folder)) if not faults(path)]


def faults(checkpoint: Path, *, named: bool = False) -> list[str]:
    """List why a checkpoint cannot be resumed from; nothing if it can.

    A checkpoint without a marker comes from plain transformers: it counts as complete if it has the files that it
    needs and none is cut off. But if its neighbours have markers, it was being saved or deleted when the run ended.
    The neighbours do not count if the user `named` the checkpoint.
    """
    if found := faults_on_disk(checkpoint):
        return found
    if not named and not (checkpoint / MARKER).exists():
        neighbours = list_checkpoints(checkpoint.absolute().parent)
        if any((path / name).exists() for path in neighbours for name in (MARKER, UNFINISHED)):
            return [f"{MARKER} missing"]
    needed: dict[str, tuple[str, ...]] = {"trainer_state.json": ("trainer_state.json",)}
    if not any(path.is_dir() for pattern in _SHARDED for path in checkpoint.glob(pattern)):
        needed |= {"model.safetensors": WEIGHTS_FILES, "optimizer.pt": ("optimizer.pt", "optimizer.bin")}
        needed["scheduler.pt"] = ("scheduler.pt",)  # without it, Trainer would leave out the optimizer too
    found = [
        f"{name} missing" for name, files in needed.items() if not any((checkpoint / file).is_file() for file in files)
    ]
    return found + [f"{path.name} damaged" for path in sorted(checkpoint.iterdir()) if _is_cut_off(path)]


def _is_cut_off(path: Path) -> bool:
    """Whether a file of a checkpoint is visibly cut off or of another format."""
    if path.is_dir():
        return False
    if path.suffix in (".pt", ".pth"):
        return not zipfile.is_zipfile(path)  # the table of contents is at the end
    try:
        if path.name == "trainer_state.json":
            return not isinstance(json.loads(path.read_text(encoding="utf-8")), dict)
        if path.suffix == ".safetensors":
            with safe_open(path, "pt"):  # compares the size of the file with that of its tensors
                return False
    except (OSError, ValueError, SafetensorError):
        return True
    return False


def list_checkpoints(folder: Path) -> list[Path]:
    """List the folders named like checkpoints, by step."""
    found = [path for path in folder.iterdir() if path.is_dir() and step_of(path.name) >= 0] if folder.is_dir() else []
    return sorted(found, key=lambda path: step_of(path.name))


def step_of(name: str) -> int:
    """Return the step in the name of a checkpoint; -1 for other names."""
    match = re.fullmatch(r"checkpoint-(\d+)", name)
    return int(match.group(1)) if match else -1
