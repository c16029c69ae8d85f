"""The output folder: what in it can be resumed from, and what must not be written over."""

import json
import logging
import os
import re
import shutil
from collections.abc import Sequence
from pathlib import Path

from transformers import TrainingArguments

__all__ = ["WEIGHTS_FILES", "complete_checkpoints", "find_resume_checkpoint", "guard_output_folder"]

logger = logging.getLogger(__name__)

WEIGHTS_FILES = (
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
    "adapter_model.safetensors",
    "adapter_model.bin",
)
"""Any one of these makes a folder hold weights."""
_SHARDED = ("pytorch_model_fsdp*", "global_step*")  # folders of weights and optimizer states: FSDP, DeepSpeed


def complete_checkpoints(folder: str | os.PathLike[str]) -> list[str]:
    """The checkpoints in a run's folder that can be resumed from, by step; half-written ones are left out."""
    found = [
        (int(match.group(1)), str(path))
        for path in (Path(folder).iterdir() if Path(folder).is_dir() else ())
        if (match := re.fullmatch(r"checkpoint-(\d+)", path.name)) and not missing_for_resume(path)
    ]
    return [path for _, path in sorted(found)]


def missing_for_resume(checkpoint: Path) -> list[str]:
    missing = []
    try:  # written last: where it is whole, so is everything else
        json.loads((checkpoint / "trainer_state.json").read_text(encoding="utf-8"))
    except (OSError, json.JSONDecodeError):
        missing.append("trainer_state.json")
    sharded = any(path.is_dir() for pattern in _SHARDED for path in checkpoint.glob(pattern))
    if not sharded and not any((checkpoint / name).is_file() for name in WEIGHTS_FILES):
        missing.append("model.safetensors")
    if not sharded and not any((checkpoint / name).is_file() for name in ("optimizer.pt", "optimizer.bin")):
        missing.append("optimizer.pt")
    return missing


def find_resume_checkpoint(training_args: TrainingArguments) -> str | None:
    """Resolve ``--resume_from_checkpoint`` to a folder that can be resumed from.

    Raises:
        ValueError: The named folder is no complete checkpoint, or ``true`` found none.
    """
    wanted = training_args.resume_from_checkpoint
    if wanted is None or not training_args.do_train:
        return None
    if wanted in ("auto", "true"):
        checkpoints = complete_checkpoints(str(training_args.output_dir))
        if not checkpoints and wanted == "true":
            raise ValueError(
                f"--resume_from_checkpoint true: there is no complete checkpoint in --output_dir "
                f"{training_args.output_dir}"
            )
        return checkpoints[-1] if checkpoints else None
    folder = Path(wanted)
    if not folder.is_dir():
        raise ValueError(f"--resume_from_checkpoint {wanted}: there is no such folder")
    if missing := missing_for_resume(folder):
        inside = complete_checkpoints(folder)
        hint = f" Did you mean {inside[-1]}?" if inside else ""
        raise ValueError(
            f"--resume_from_checkpoint {wanted} is not a complete checkpoint: {' and '.join(missing)} missing.{hint}"
        )
    return wanted


def guard_output_folder(
    training_args: TrainingArguments, resume_from: str | None, outputs: Sequence[str], model_name_or_path: str | None
) -> None:
    """Refuse to write over another run; with permission, clear away its checkpoints.

    Args:
        training_args: The training arguments.
        resume_from: The checkpoint that the run continues from, if any.
        outputs: Names of the files that a run without training writes.
        model_name_or_path: The checkpoint that the run starts from, if any.

    Raises:
        ValueError: The folder holds another run and there is no permission, or it is a file.
    """
    folder = Path(str(training_args.output_dir))
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"--output_dir {folder} is a file; it must be a folder")
    permitted = getattr(training_args, "overwrite_output_dir", False)
    content = sorted(path.name for path in folder.iterdir() if path.name[0] != ".") if folder.is_dir() else []
    if not training_args.do_train:
        if (clashing := [name for name in outputs if name in content]) and not permitted:
            raise ValueError(
                f"--output_dir {folder} already holds {', '.join(clashing)}; give another folder, or "
                "--overwrite_output_dir to replace them"
            )
        return
    if not content:
        return
    if resume_from is not None and Path(resume_from).resolve().parent == folder.resolve():
        step = _step(Path(resume_from).name)
        later = [name for name in content if _step(name) > step]
        if later and not permitted:
            raise ValueError(
                f"--resume_from_checkpoint {resume_from}: --output_dir also holds {', '.join(later)}, which the run "
                "would overwrite; resume from the last one, or give --overwrite_output_dir"
            )
        return
    if not permitted:
        resume = (
            "--resume_from_checkpoint auto to continue it, "
            if complete_checkpoints(folder) and not resume_from
            else ""
        )
        raise ValueError(
            f"--output_dir {folder} already holds a run ({', '.join(content[:3])}{', ...' if content[3:] else ''}); "
            f"give another folder, {resume}or --overwrite_output_dir to write over it"
        )
    source = model_name_or_path and Path(model_name_or_path)
    stale = [folder / name for name in content if _step(name) >= 0 and (folder / name).is_dir()]
    if source and source.is_dir() and any(source.resolve().is_relative_to(path.resolve()) for path in stale):
        raise ValueError(
            f"--model_name_or_path {model_name_or_path} lies in --output_dir {folder}, whose old checkpoints "
            "--overwrite_output_dir deletes; give another --output_dir"
        )
    logger.warning("--overwrite_output_dir: writing over the run in %s.", folder)
    for path in stale:
        if resume_from is None or path.resolve() != Path(resume_from).resolve():
            logger.warning("--overwrite_output_dir: deleting %s.", path)
            shutil.rmtree(path)


def _step(name: str) -> int:
    match = re.fullmatch(r"checkpoint-(\d+)", name)
    return int(match.group(1)) if match else -1
