"""The first and last steps of every script, in the order in which it calls them."""

import json
import logging
import sys
from collections.abc import Callable, Mapping, Sequence, Sized
from pathlib import Path
from typing import Any

import datasets
from transformers import PreTrainedConfig, set_seed
from transformers.utils import logging as transformers_logging

from hf_hybrid.models.auto import ARCHITECTURES
from hf_hybrid.models.divided import check_divisible_model
from hf_hybrid.suggestions import did_you_mean
from hf_hybrid.training.flags.command_line import given_flags, read_arguments, show_command
from hf_hybrid.training.flags.data import RowArguments
from hf_hybrid.training.flags.model import ModelArguments
from hf_hybrid.training.flags.run import ScriptTrainingArguments
from hf_hybrid.training.model.adapters import check_adapter_flags, save_base_model, save_merged_model
from hf_hybrid.training.model.config import load_config
from hf_hybrid.training.model.learning_rates import fit_learning_rate
from hf_hybrid.training.processes import on_first_process, replica_log_level
from hf_hybrid.training.report.model_card import SCRIPTS, write_model_card
from hf_hybrid.training.report.run_page import Contents, write_report
from hf_hybrid.training.run_folder.files import explain_full_disk, replacing
from hf_hybrid.training.run_folder.hub import check_hub_access, push
from hf_hybrid.training.run_folder.output_folder import check_output_folder
from hf_hybrid.training.run_folder.resume import find_resume_checkpoint, finish_resumed
from hf_hybrid.training.trainer.interruption import how_to_continue, stop_gently
from hf_hybrid.training.trainer.logging_steps import fit_logging_steps
from hf_hybrid.training.trainer.script_trainer import ScriptTrainer

logger = logging.getLogger(__name__)


def begin(
    argv: Sequence[str] | None,
    model_args: ModelArguments,
    data_args: RowArguments,
    training_args: ScriptTrainingArguments,
    auto_class: Any,
    *,
    metrics: Sequence[str],
    outputs: Sequence[str],
    role: Mapping[str, Any] | None = None,
    reads: str = "input_ids",
) -> tuple[PreTrainedConfig, str | None]:
    """Check everything possible before data and weights are loaded; set up logging, seed and learning rate.

    `metrics` are those that the script's evaluation reports, without the prefix ``eval_``, and `outputs` the files
    that `result_files` names. `role` and `reads` are those of `load_config`.

    Returns:
        The model's configuration, and the checkpoint to resume from, or None to start anew.

    Raises:
        ValueError: A flag cannot be used, the output folder holds another run and may not be overwritten, there is
            nothing to resume from, or the Hub would refuse the upload.
    """
    data_args.check_sources(training_args)
    wanted = training_args.metric_for_best_model  # Trainer would look it up only after the first evaluation
    if wanted is not None and wanted.removeprefix("eval_") not in metrics:
        raise ValueError(
            f"--metric_for_best_model must be one of {', '.join(metrics)}; got {wanted}."
            f"{did_you_mean(wanted, metrics)}"
        )
    config = load_config(model_args, auto_class, preset=data_args.default_preset, role=role, reads=reads)
    own = auto_class._model_mapping.get(type(config), None) if config.model_type in ARCHITECTURES else None
    check_divisible_model(config, own, training_args.context_parallel_size)
    if own is None and "save" in (training_args.activation_checkpointing_kwargs or {}):
        rule = f"must be left out with {config.model_type}: only models of hf_hybrid know it"
        raise ValueError(f"save in --activation_checkpointing_kwargs {rule}")
    _show_log(training_args)

    def check() -> str | None:
        check_hub_access(training_args, model_args.token)
        checkpoint = find_resume_checkpoint(training_args)
        check_adapter_flags(model_args, training_args, checkpoint)
        sources = {name: getattr(model_args, name) for name in ("model_name_or_path", "config_name", "tokenizer_name")}
        check_output_folder(training_args, checkpoint, outputs, sources | {"resume_from_checkpoint": checkpoint})
        return checkpoint

    resume_from = on_first_process(training_args, check)  # the others may see another state of the folder
    if resume_from is not None:
        logger.info("Resuming from %s.", resume_from)
    set_seed(training_args.seed)
    fit_learning_rate(training_args, model_args, data_args, config, given_flags(argv))
    return config, resume_from


def _show_log(training_args: ScriptTrainingArguments) -> None:
    """Print this package's messages, unless the calling program has set up logging; no progress bars into files."""
    if training_args.disable_tqdm:
        datasets.disable_progress_bars()
        transformers_logging.disable_progress_bar()
    package = logging.getLogger("hf_hybrid")
    package.setLevel(training_args.get_process_log_level() if training_args.log_level != "passive" else logging.INFO)
    if not training_args.should_log:
        package.setLevel(replica_log_level(training_args))
    if not package.hasHandlers():
        handler = logging.StreamHandler(sys.stdout)
        handler.setFormatter(logging.Formatter("%(levelname)s %(message)s"))
        package.addHandler(handler)
        package.propagate = False  # otherwise a library that sets up the root logger later prints everything twice


def train(trainer: ScriptTrainer, resume_from: str | None, argv: Sequence[str] | None) -> dict[str, float]:
    """Train, save the model, the tokenizer and the trainer's state, and return the metrics.

    A resumed run with no steps left keeps the metrics of its training.

    Raises:
        KeyboardInterrupt: Ctrl-C or a signal stopped training; the last step is saved in a checkpoint.
        RunFailed: The loss is not finite, or the disk is full.
    """
    fit_logging_steps(trainer, resume_from, given_flags(argv))
    if finish_resumed(trainer, resume_from):
        trainer.save_model()
        trainer.save_state()
        path = Path(str(trainer.args.output_dir), "train_results.json")
        return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    save_base_model(trainer, new=resume_from is None)
    with stop_gently(trainer):
        result = trainer.train(resume_from_checkpoint=resume_from)
    trainer.save_model()
    metrics: dict[str, float] = dict(result.metrics)
    if isinstance(trainer.train_dataset, Sized):  # not a stream
        metrics["train_samples"] = len(trainer.train_dataset)
    save_and_log(trainer, "train", metrics)
    trainer.save_state()
    return metrics


def save_and_log(trainer: ScriptTrainer, split: str, metrics: dict[str, float]) -> None:
    """Print metrics, and write them to ``SPLIT_results.json`` and ``all_results.json`` in place of older ones."""
    trainer.log_metrics(split, metrics)
    if not trainer.is_world_process_zero():
        return
    path = Path(str(trainer.args.output_dir), "all_results.json")
    older = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    kept = {name: value for name, value in older.items() if not name.startswith(f"{split}_")}
    for name, results in ((f"{split}_results.json", metrics), (path.name, kept | metrics)):
        save_text(trainer, name, json.dumps(results, indent=4, sort_keys=True))


def save_text(trainer: ScriptTrainer, name: str, text: str) -> None:
    """Write or replace a file of results in the output folder, on the main process only.

    Raises:
        CannotSave: The disk is full.
    """
    if not trainer.is_world_process_zero():
        return
    folder = Path(str(trainer.args.output_dir))
    advice = f"The model is saved. {how_to_continue(trainer)}" if trainer.args.do_train else "Make room and try again."
    with explain_full_disk(folder, "the results", lambda: advice), replacing(folder / name) as path:
        folder.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")


def finish(
    trainer: ScriptTrainer,
    model_args: ModelArguments,
    data_args: RowArguments,
    argv: Sequence[str] | None,
    *,
    task: str,
    metrics: Mapping[str, float],
    report: Callable[[], Contents],
    script: str | None = None,
) -> None:
    """Write the report and, for a trained model, its card; merge an adapter and push to the Hub if requested.

    A run that only evaluates writes no card, since another run trained the model. `task` is the Hub's name of the
    task, `report` makes the task's part of the report, and `script` is the script's name, if the task has several.

    Raises:
        ValueError: Pushing failed.
    """
    command = show_command(script or SCRIPTS[task], read_arguments(argv))
    if trainer.is_world_process_zero() and trainer.args.report:  # needs no other process: they may have continued
        write_report(trainer, model_args, data_args, report, command=command, metrics=metrics)
    if model_args.merge_adapter:
        save_merged_model(trainer)
    if trainer.args.do_train:
        write_model_card(trainer, model_args, data_args, task=task, metrics=metrics, command=command)
    if trainer.args.push_to_hub:
        push(trainer)
