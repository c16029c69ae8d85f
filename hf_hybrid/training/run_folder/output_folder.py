"""The output folder: refuse to overwrite another run, and delete what an earlier one left."""

import logging
import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

from transformers.utils.peft_utils import ADAPTER_CONFIG_NAME

from hf_hybrid.starters import STARTERS
from hf_hybrid.training.flags.run import ScriptTrainingArguments
from hf_hybrid.training.run_folder.checkpoints import (
    complete_checkpoints,
    faults,
    list_checkpoints,
    step_of,
    was_cut_off,
)
from hf_hybrid.training.run_folder.files import (
    BASE_CONFIG,
    BASE_MODEL,
    CARD_FILE,
    MERGED_MODEL,
    RESULT_FILES,
    WEIGHTS_FILES,
)

logger = logging.getLogger(__name__)


def result_files(training_args: ScriptTrainingArguments, *predictions: str) -> list[str]:
    """Return the names of the result files of a run without training; `predictions` are those of a test split."""
    scored = {"eval": training_args.do_eval, "predict": training_args.do_predict}
    files = [f"{prefix}_results.json" for prefix, is_asked in scored.items() if is_asked]
    return [*files, *predictions] if training_args.do_predict else files


def check_output_folder(
    training_args: ScriptTrainingArguments,
    resume_from: str | None,
    outputs: Sequence[str],
    sources: Mapping[str, str | None],
) -> None:
    """Refuse to overwrite another run without permission, or what this run reads; change nothing.

    `sources` are the folders that the run reads, by flag.

    Raises:
        ValueError: The folder holds another run and there is no permission, a source lies in a checkpoint that would
            be deleted, or the folder is a file or cannot be written to.
    """
    folder = Path(str(training_args.output_dir))
    _check_place(folder)
    permitted = training_args.overwrite_output_dir
    content = sorted(path.name for path in folder.iterdir() if path.name[0] != ".") if folder.is_dir() else []
    if not training_args.do_train:
        if (clashing := [name for name in outputs if name in content]) and not permitted:
            raise ValueError(
                f"--output_dir {folder} already holds {', '.join(clashing)}; give another folder, or "
                "--overwrite_output_dir to replace them"
            )
        return
    stale, resumed = _stale_checkpoints(folder, resume_from), _is_resumed(folder, resume_from)
    if resumed and not permitted and (whole := [path.name for path in stale if not faults(path)]):
        raise ValueError(
            f"--resume_from_checkpoint {resume_from}: --output_dir also holds {', '.join(whole)}, which the run would "
            "overwrite; resume from the last one, or give --overwrite_output_dir"
        )
    if training_args.resume_from_checkpoint == "auto":  # the last run may have ended before its first save
        first = [name for name in content if step_of(name) >= 0 and was_cut_off(folder / name)]
        content = [name for name in content if name not in (BASE_MODEL, *first)]
    if content and not permitted and not resumed:
        complete = not resume_from and complete_checkpoints(folder)
        resume = "--resume_from_checkpoint auto to continue, " if complete else ""
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


def _check_place(folder: Path) -> None:
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"--output_dir {folder} is a file; it must be a folder")
    if str(folder) in STARTERS and not folder.exists():
        raise ValueError(
            f"--output_dir {folder} must not be a starter's name, which would mean that folder from then on"
        )
    place = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    if not place.is_dir() or not os.access(place, os.W_OK | os.X_OK):
        raise ValueError(f"--output_dir {folder} must be a folder that can be written to; {place} cannot")
    if folder.is_dir() and (
        odd := [path for path in folder.iterdir() if step_of(path.name) >= 0 and not path.is_dir()]
    ):
        raise ValueError(f"--output_dir {folder} must hold no file named like a checkpoint; {odd[0].name} is one")


def clear_output_folder(
    training_args: ScriptTrainingArguments,
    resume_from: str | None,
    outputs: Sequence[str],
    model_name_or_path: str | None,
) -> None:
    """Delete what an earlier run left and this one might not replace.

    With ``--overwrite_output_dir`` these are its checkpoints, results and weights, so that nobody takes them for the
    new run's; in a resumed run, checkpoints that are damaged or cut off. Call it after all checks: a typing error
    must not delete an earlier run. The main process deletes while the others wait.

    What the run reads stays: its start, and the checkpoint that it continues from with those before it.
    """
    folder = Path(str(training_args.output_dir))
    permitted = training_args.overwrite_output_dir
    if not permitted and training_args.resume_from_checkpoint != "auto" and not _is_resumed(folder, resume_from):
        return
    with training_args.main_process_first(local=False, desc="clear the output folder"):
        if training_args.process_index != 0:
            return
        doomed = _earlier_results(folder, training_args, outputs, model_name_or_path) if permitted else []
        if training_args.do_train:
            doomed += [path for path in _stale_checkpoints(folder, resume_from) if permitted or faults(path)]
        if doomed:
            names = ", ".join(path.name for path in doomed)
            reason = "--overwrite_output_dir" if permitted else "not complete"
            logger.warning("%s: deleting %s in %s.", reason, names, folder)
        for path in doomed:
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink()


def _earlier_results(
    folder: Path, training_args: ScriptTrainingArguments, outputs: Sequence[str], model_name_or_path: str | None
) -> list[Path]:
    """List what an earlier run left next to its checkpoints, except the weights that this one reads."""
    if not training_args.do_train:
        return [path for name in outputs if (path := folder / name).is_file()]
    source = None if model_name_or_path is None else Path(model_name_or_path).resolve()
    files = [*RESULT_FILES]
    if source != folder.resolve():
        files += [*WEIGHTS_FILES, "config.json", ADAPTER_CONFIG_NAME, BASE_CONFIG]
        if (folder / ADAPTER_CONFIG_NAME).is_file():  # Trainer reads the adapter's base from the card
            files.append(CARD_FILE)
    found = [path for name in files for path in folder.glob(name) if path.is_file()]
    models = [path for name in (BASE_MODEL, MERGED_MODEL) if (path := folder / name).is_dir()]
    return found + [path for path in models if not _reads_from(source, path)]


def _reads_from(source: Path | None, folder: Path) -> bool:
    """Whether a run starts from a model in a folder, or from the adapter of one."""
    return source is not None and (source.is_relative_to(folder.resolve()) or source == folder.parent.resolve())


def _is_resumed(folder: Path, resume_from: str | None) -> bool:
    """Whether the checkpoint is one of the folder's own."""
    return resume_from is not None and Path(os.path.abspath(resume_from)).parent.resolve() == folder.resolve()


def _stale_checkpoints(folder: Path, resume_from: str | None) -> list[Path]:
    """List the checkpoints that the run overwrites; if it is resumed, those after the one that it continues from."""
    kept = step_of(Path(os.path.abspath(resume_from)).name) if resume_from and _is_resumed(folder, resume_from) else -1
    return [path for path in list_checkpoints(folder) if step_of(path.name) > kept]
