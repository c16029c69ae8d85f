"""The output folder: what in it can be resumed from, and what must not be written over."""

import json
import logging
import os
import re
import shutil
import zipfile
from collections.abc import Mapping, Sequence, Set
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from transformers import PreTrainedConfig, TrainingArguments
from transformers.utils.peft_utils import ADAPTER_CONFIG_NAME

from hf_hybrid.training.checkpoints import MARKER, UNFINISHED, faults_on_disk, was_cut_off
from hf_hybrid.training.command_line import CONFIG_ERRORS, explain_config_error

__all__ = [
    "CURVES_FILE",
    "PREDICTIONS_FILE",
    "REPORT_FILE",
    "RESULT_FILES",
    "WEIGHTS_FILES",
    "check_output_folder",
    "check_resumed_model",
    "clear_output_folder",
    "complete_checkpoints",
    "faults",
    "find_resume_checkpoint",
]

logger = logging.getLogger(__name__)

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
"""Patterns of what scripts write beside the model. Not each run writes all of it, so old files could pass for its."""
_NOT_COMPARED = {"architectures", "dtype", "transformers_version", "use_cache"}  # set by saving and by Trainer
# read where weights are drawn, and never again
_STARTING_VALUES = {
    *("alpha_init", "embedding_initializer_range", "init_std", "initializer_factor", "initializer_range"),
    *("leak_init", "relative_attention_init", "score_scale_init", "threshold_init"),
}
_RESIZED = {"max_position_embeddings", "vocab_size"}
_SHARDED = ("pytorch_model_fsdp*", "global_step*")  # folders of weights and optimizer states: FSDP, DeepSpeed


def complete_checkpoints(folder: str | os.PathLike[str]) -> list[str]:
    """The checkpoints in a run's folder that can be resumed from, by step; half-written and damaged ones are left out.

    All of their files are read.
    """
    return [str(path) for path in _checkpoints(Path(folder)) if not faults(path)]


def faults(checkpoint: Path, *, named: bool = False) -> list[str]:
    """Why a checkpoint cannot be resumed from; nothing if it can.

    A checkpoint without a marker of its completeness was saved by plain transformers, and is taken if it has the files
    that it needs, none of them cut off, unless its neighbours have markers: then it was being saved, or deleted, when
    the run was cut off.

    Args:
        checkpoint: The folder.
        named: Whether the user named it: then the neighbours do not count.
    """
    if found := faults_on_disk(checkpoint):
        return found
    if not named and not (checkpoint / MARKER).exists():
        neighbours = _checkpoints(checkpoint.absolute().parent)
        if any((path / name).exists() for path in neighbours for name in (MARKER, UNFINISHED)):
            return [f"{MARKER} missing"]
    missing = []
    if not (state := checkpoint / "trainer_state.json").is_file():
        missing.append(f"{state.name} missing")
    sharded = any(path.is_dir() for pattern in _SHARDED for path in checkpoint.glob(pattern))
    if not sharded and not any((checkpoint / name).is_file() for name in WEIGHTS_FILES):
        missing.append("model.safetensors missing")
    if not sharded and not any((checkpoint / name).is_file() for name in ("optimizer.pt", "optimizer.bin")):
        missing.append("optimizer.pt missing")
    if not sharded and not (checkpoint / "scheduler.pt").is_file():  # Trainer would leave out the optimizer too
        missing.append("scheduler.pt missing")
    return [*missing, *(f"{path.name} damaged" for path in sorted(checkpoint.iterdir()) if _is_cut_off(path))]


def _is_cut_off(path: Path) -> bool:
    """Whether a file of a checkpoint ends too early or is something else, as far as that shows without a marker."""
    if path.is_dir():
        return False
    if path.suffix in (".pt", ".pth"):
        return not zipfile.is_zipfile(path)  # the table of contents stands at the end
    try:
        if path.name == "trainer_state.json":
            return not isinstance(json.loads(path.read_text(encoding="utf-8")), dict)
        if path.suffix == ".safetensors":
            with safe_open(path, "pt"):  # compares the size of the file with that of its tensors
                return False
    except (OSError, ValueError, SafetensorError):
        return True
    return False


def _checkpoints(folder: Path) -> list[Path]:
    """The folders named like checkpoints, by step."""
    found = [path for path in folder.iterdir() if path.is_dir() and _step(path.name) >= 0] if folder.is_dir() else []
    return sorted(found, key=lambda path: _step(path.name))


def find_resume_checkpoint(training_args: TrainingArguments) -> str | None:
    """Resolve ``--resume_from_checkpoint`` to a folder that can be resumed from.

    Raises:
        ValueError: The named folder is no complete checkpoint, or ``true`` found none, or there is nothing to train.
    """
    wanted = training_args.resume_from_checkpoint
    if wanted is None:
        return None
    if not training_args.do_train:
        raise ValueError(f"--resume_from_checkpoint {wanted} needs --do_train")
    if wanted in ("auto", "true"):
        for checkpoint in reversed(_checkpoints(Path(str(training_args.output_dir)))):
            if not (wrong := faults(checkpoint)):
                return str(checkpoint)
            if training_args.process_index == 0:
                logger.warning("%s is passed over: %s.", checkpoint, " and ".join(wrong))
        if wanted == "true":
            raise ValueError(
                f"--resume_from_checkpoint true: there is no complete checkpoint in --output_dir "
                f"{training_args.output_dir}"
            )
        return None
    folder = Path(wanted)
    if not folder.is_dir():
        raise ValueError(f"--resume_from_checkpoint {wanted}: there is no such folder")
    if wrong := faults(folder, named=True):
        inside = complete_checkpoints(folder) or complete_checkpoints(folder.parent)
        hint = f" Did you mean {inside[-1]}?" if inside else ""
        own = f" If you changed it yourself, delete its {MARKER}." if (folder / MARKER).exists() else ""
        raise ValueError(
            f"--resume_from_checkpoint {wanted} is not a complete checkpoint: {' and '.join(wrong)}.{hint}{own}"
        )
    return wanted


def check_resumed_model(config: PreTrainedConfig, resume_from: str | None, *, new: bool) -> None:
    """Refuse to go on training a model that is configured otherwise than the one in the checkpoint.

    Trainer loads the tensors whose names fit: without this, a run ends in a traceback or, worse, does not.

    Args:
        config: The configuration of this run's model.
        resume_from: The checkpoint, if any.
        new: Whether the model began from scratch; then the configuration is already fitted to tokenizer and lengths,
            while a loaded model may yet be resized.

    Raises:
        ValueError: A field differs, or the checkpoint's configuration cannot be read.
    """
    if resume_from is None or not (path := Path(resume_from, "config.json")).is_file():
        return  # sharded checkpoints may hold the states alone
    try:
        saved = json.loads(path.read_text(encoding="utf-8"))
        if saved["model_type"] == config.model_type:
            saved = type(config).from_dict(saved).to_dict()
    except CONFIG_ERRORS as error:
        message = (
            f"--resume_from_checkpoint {resume_from}: its config.json cannot be read. {explain_config_error(error)}"
        )
        raise ValueError(message) from error
    skipped = _NOT_COMPARED | _STARTING_VALUES | (set() if new else _RESIZED)
    before, now = (_settings(values, skipped) for values in (saved, config.to_dict()))
    for name in ["model_type", *(name for name in now if name in before)]:
        asked = now[name]
        if isinstance(before[name], list) and not isinstance(asked, list):
            asked = [asked] * len(before[name])  # LED writes a value for all layers out
        if asked != before[name]:
            override = f" (--config_overrides {name}={before[name]})" if name != "model_type" else ""
            raise ValueError(
                f"--resume_from_checkpoint {resume_from}: {name} is {before[name]!r} there and {now[name]!r} in this "
                f"run; go on with the model that was begun{override}, or start anew in another --output_dir"
            )


def _settings(config: dict[str, Any], skipped: Set[str]) -> dict[str, Any]:
    """A configuration as it is read from JSON, without the fields that are no user's choice, at any depth."""

    def choose(fields: dict[str, Any]) -> dict[str, Any]:
        names = (name for name in fields if not (name in skipped or name[:1] == "_" or name.endswith("_token_id")))
        return {name: fields[name] for name in names}

    return json.loads(json.dumps(config, default=str), object_hook=choose)


def check_output_folder(
    training_args: TrainingArguments,
    resume_from: str | None,
    outputs: Sequence[str],
    sources: Mapping[str, str | None],
) -> None:
    """Refuse to write over another run without permission, or over what this run is made from; change nothing.

    Args:
        training_args: The training arguments.
        resume_from: The checkpoint that the run continues from, if any.
        outputs: Names of the files that a run without training writes.
        sources: The folders that the run reads, by flag.

    Raises:
        ValueError: The folder holds another run and there is no permission, a source lies in a checkpoint that would
            be deleted, or the folder is a file or cannot be written to.
    """
    folder = Path(str(training_args.output_dir))
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"--output_dir {folder} is a file; it must be a folder")
    place = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    if not place.is_dir() or not os.access(place, os.W_OK | os.X_OK):
        raise ValueError(f"--output_dir {folder} must be a folder that can be written to; {place} cannot")
    if folder.is_dir() and (odd := [path for path in folder.iterdir() if _step(path.name) >= 0 and not path.is_dir()]):
        raise ValueError(f"--output_dir {folder} must hold no file named like a checkpoint; {odd[0].name} is one")
    permitted = getattr(training_args, "overwrite_output_dir", False)
    content = sorted(path.name for path in folder.iterdir() if path.name[0] != ".") if folder.is_dir() else []
    if not training_args.do_train:
        if (clashing := [name for name in outputs if name in content]) and not permitted:
            raise ValueError(
                f"--output_dir {folder} already holds {', '.join(clashing)}; give another folder, or "
                "--overwrite_output_dir to replace them"
            )
        return
    stale = _stale_checkpoints(folder, resume_from)
    resumed = not permitted and _is_resumed(folder, resume_from)
    if resumed and (whole := [path.name for path in stale if not faults(path)]):
        raise ValueError(
            f"--resume_from_checkpoint {resume_from}: --output_dir also holds {', '.join(whole)}, which the run would "
            "overwrite; resume from the last one, or give --overwrite_output_dir"
        )
    if getattr(training_args, "resume_from_checkpoint", None) == "auto":  # a run may be cut off before its first save
        first = [name for name in content if _step(name) >= 0 and was_cut_off(folder / name)]
        content = [name for name in content if name not in (BASE_MODEL, *first)]
    if not permitted and not _is_resumed(folder, resume_from) and content:
        resume = "" if resume_from or not complete_checkpoints(folder) else "--resume_from_checkpoint auto to go on, "
        raise ValueError(
            f"--output_dir {folder} already holds a run ({', '.join(content[:3])}{', ...' if content[3:] else ''}); "
            f"give another folder, {resume}or --overwrite_output_dir to write over it"
        )
    for flag, source in sources.items():
        if source and any(Path(source).resolve().is_relative_to(path.resolve()) for path in stale):
            raise ValueError(
                f"--{flag} {source} lies in --output_dir {folder}, whose old checkpoints --overwrite_output_dir "
                "deletes; give another --output_dir"
            )


def clear_output_folder(
    training_args: TrainingArguments, resume_from: str | None, outputs: Sequence[str], model_name_or_path: str | None
) -> None:
    """Delete what an earlier run left and this one may not replace.

    With ``--overwrite_output_dir`` these are its checkpoints, results and weights, so that nobody takes them for the
    new run's; in a run that is resumed, checkpoints that are damaged or whose saving was cut off. Call it when
    nothing but the work itself is left to do: what was saved before must not be lost to a typing error. The main
    process deletes while the others wait.

    Args:
        training_args: The training arguments.
        resume_from: The checkpoint that the run continues from, if any; it stays, and so do the ones before it.
        outputs: Names of the files that a run without training writes. A run with training replaces all results.
        model_name_or_path: The checkpoint that the run starts from, if any; weights that it reads stay.
    """
    folder = Path(str(training_args.output_dir))
    permitted = getattr(training_args, "overwrite_output_dir", False)
    automatic = getattr(training_args, "resume_from_checkpoint", None) == "auto"
    if not permitted and not automatic and not _is_resumed(folder, resume_from):
        return
    with training_args.main_process_first(local=False, desc="clear the output folder"):
        if training_args.process_index != 0:
            return
        doomed = []
        if permitted:
            source = None if model_name_or_path is None else Path(model_name_or_path).resolve()
            starts_here = source == folder.resolve()
            card = ("README.md",) if (folder / ADAPTER_CONFIG_NAME).is_file() else ()  # Trainer reads what it is of
            model = () if starts_here else (*WEIGHTS_FILES, "config.json", ADAPTER_CONFIG_NAME, BASE_CONFIG, *card)
            files = (*RESULT_FILES, *model) if training_args.do_train else outputs
            doomed = [path for name in files for path in folder.glob(name) if path.is_file()]
            models = (BASE_MODEL, MERGED_MODEL) if training_args.do_train else ()
            doomed += [path for name in models if (path := folder / name).is_dir() and not _reads_from(source, path)]
        if training_args.do_train:
            stale = _stale_checkpoints(folder, resume_from)
            doomed += stale if permitted else [path for path in stale if faults(path)]
        if doomed:
            names = ", ".join(path.name for path in doomed)
            reason = "--overwrite_output_dir" if permitted else "not whole"
            logger.warning("%s: deleting %s in %s.", reason, names, folder)
        for path in doomed:
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink()


def _reads_from(source: Path | None, folder: Path) -> bool:
    """Whether a run starts from a model, or from the adapter of a model, that lies in a folder."""
    return source is not None and (source.is_relative_to(folder.resolve()) or source == folder.parent.resolve())


def _is_resumed(folder: Path, resume_from: str | None) -> bool:
    """Whether the checkpoint is one of the folder's own."""
    return resume_from is not None and Path(os.path.abspath(resume_from)).parent.resolve() == folder.resolve()


def _stale_checkpoints(folder: Path, resume_from: str | None) -> list[Path]:
    """The checkpoints of the run that is written over; of one that is resumed, those after the one it goes on from."""
    kept = _step(Path(os.path.abspath(resume_from)).name) if resume_from and _is_resumed(folder, resume_from) else -1
    return [path for path in _checkpoints(folder) if _step(path.name) > kept]


def _step(name: str) -> int:
    match = re.fullmatch(r"checkpoint-(\d+)", name)
    return int(match.group(1)) if match else -1
