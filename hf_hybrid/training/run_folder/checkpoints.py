"""Checkpoints: the markers that tell a whole one from one whose saving was cut off, and what is wrong with one."""

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

_SHARDED = ("pytorch_model_fsdp*", "global_step*")  # folders of weights and optimizer states: FSDP, DeepSpeed


def begin_saving(folder: Path) -> None:
    """Say that what is in the folder is not to be trusted from now on."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / UNFINISHED).touch()
    sync(folder / UNFINISHED)
    (folder / MARKER).unlink(missing_ok=True)
    sync(folder)


def finish_saving(folder: Path) -> None:
    """Say that what was saved into the folder is whole."""
    (folder / UNFINISHED).unlink(missing_ok=True)
    sync(folder)


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
            sync(path)
            files[name] = {"bytes": path.stat().st_size, "xxh3_64": _checksum(path)}
    with replacing(checkpoint / MARKER) as path:
        path.write_text(json.dumps({"files": files}, indent=1), encoding="utf-8")
    finish_saving(checkpoint)
    sync(checkpoint.parent)


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
    with path.open("rb") as file:
        return hashlib.file_digest(file, xxhash.xxh3_64).hexdigest()


def complete_checkpoints(folder: str | os.PathLike[str]) -> list[str]:
    """The checkpoints in a run's folder that can be resumed from, by step; half-written and damaged ones are left out.

    All of their files are read.
    """
    return [str(path) for path in list_checkpoints(Path(folder)) if not faults(path)]


def faults(checkpoint: Path, *, named: bool = False) -> list[str]:
    """Why a checkpoint cannot be resumed from; nothing if it can.

    A checkpoint without a marker of its completeness was saved by plain transformers, and is taken if it has the files
    that it needs, none of them cut off, unless its neighbours have markers: then it was being saved, or deleted, when
    the run was cut off. Where the user `named` it, the neighbours do not count.
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
    missing = [
        f"{name} missing" for name, files in needed.items() if not any((checkpoint / file).is_file() for file in files)
    ]
    return [*missing, *(f"{path.name} damaged" for path in sorted(checkpoint.iterdir()) if _is_cut_off(path))]


def _is_cut_off(path: Path) -> bool:
    """Whether a file of a checkpoint ends too early or is something else, as far as that shows without a marker."""
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
    """The folders named like checkpoints, by step."""
    found = [path for path in folder.iterdir() if path.is_dir() and step_of(path.name) >= 0] if folder.is_dir() else []
    return sorted(found, key=lambda path: step_of(path.name))


def step_of(name: str) -> int:
    """The step in the name of a checkpoint; -1 for other names."""
    match = re.fullmatch(r"checkpoint-(\d+)", name)
    return int(match.group(1)) if match else -1
