"""The steps that every training script shares, as plain functions in the order in which a script calls them."""

import json
import logging
import sys
from collections.abc import Callable, Mapping, Sequence, Sized
from pathlib import Path
from typing import Any

from datasets import Dataset, DatasetDict, Features
from transformers import Trainer, TrainerState, TrainingArguments, set_seed

from hf_hybrid.data.loading import embedded_name, load_raw_datasets
from hf_hybrid.suggestions import did_you_mean
from hf_hybrid.training.adapters import check_resumed_adapter, save_base_model, save_merged_model
from hf_hybrid.training.arguments import ModelArguments
from hf_hybrid.training.checkpoints import explain_full_disk, replacing
from hf_hybrid.training.command_line import read_arguments
from hf_hybrid.training.data_arguments import SPLITS, DataArguments
from hf_hybrid.training.hub import check_hub_access, push
from hf_hybrid.training.interruption import how_to_continue, stop_gently
from hf_hybrid.training.model_card import write_model_card
from hf_hybrid.training.output_folder import check_output_folder, find_resume_checkpoint
from hf_hybrid.training.processes import on_first_process, replica_log_level

__all__ = [
    "asked_splits",
    "check_best_metric",
    "first_examples",
    "load_datasets",
    "map_rows",
    "prepare_run",
    "publish",
    "require_splits",
    "save_and_log",
    "save_text",
    "train",
    "used_splits",
]

logger = logging.getLogger(__name__)


# ---- the run ----


def prepare_run(
    training_args: TrainingArguments, model_args: ModelArguments, *, outputs: Sequence[str] = ()
) -> str | None:
    """Set up logging and the seed, and check the output folder.

    Args:
        training_args: The training arguments.
        model_args: The model arguments.
        outputs: Names of the files that a run without training writes.

    Returns:
        The checkpoint to resume from, or None to start anew.

    Raises:
        ValueError: The output folder holds another run and there is no permission to write into it, or what this
            run is made from, or there is nothing to resume from, or the Hub would not take what is to be pushed.
    """
    _show_log(training_args)

    def check() -> str | None:
        check_hub_access(training_args, model_args.token)
        checkpoint = find_resume_checkpoint(training_args)
        check_resumed_adapter(model_args, training_args, checkpoint)
        sources = {name: getattr(model_args, name) for name in ("model_name_or_path", "config_name", "tokenizer_name")}
        check_output_folder(training_args, checkpoint, outputs, sources | {"resume_from_checkpoint": checkpoint})
        return checkpoint

    resume_from = on_first_process(training_args, check)  # the others may see the folder change, or no folder
    if resume_from is not None:
        logger.info("Resuming from %s.", resume_from)
    set_seed(training_args.seed)
    return resume_from


def _show_log(training_args: TrainingArguments) -> None:
    """Print this package's messages, unless the program around us has set up logging."""
    package = logging.getLogger("hf_hybrid")
    package.setLevel(training_args.get_process_log_level() if training_args.log_level != "passive" else logging.INFO)
    if not training_args.should_log:
        package.setLevel(replica_log_level(training_args))
    if not package.hasHandlers():
        handler = logging.StreamHandler(sys.stdout)
        handler.setFormatter(logging.Formatter("%(levelname)s %(message)s"))
        package.addHandler(handler)
        package.propagate = False  # a library that sets up the root logger later would print everything twice


def check_best_metric(training_args: TrainingArguments, metrics: Sequence[str]) -> None:
    """Check the name by which the best checkpoint is chosen, which Trainer looks up after the first evaluation only.

    Args:
        training_args: The training arguments.
        metrics: What the script's evaluation reports, without the prefix ``eval_``.

    Raises:
        ValueError: ``--metric_for_best_model`` is none of them.
    """
    wanted = training_args.metric_for_best_model
    if wanted is not None and wanted.removeprefix("eval_") not in metrics:
        raise ValueError(
            f"--metric_for_best_model must be one of {', '.join(metrics)}; got {wanted}."
            f"{did_you_mean(wanted, metrics)}"
        )


# ---- data ----


def load_datasets(
    data_args: DataArguments, training_args: TrainingArguments, model_args: ModelArguments, **options: Any
) -> DatasetDict:
    """Load the data that are named, or the script's own corpus.

    Args:
        data_args: The data arguments.
        training_args: The training arguments.
        model_args: The model arguments.
        **options: Further arguments of `load_raw_datasets`.

    Returns:
        All splits there are; those of an embedded corpus, which come module by module, in random order, and in a small
        run as many rows of them as it takes examples.

    Raises:
        ValueError: The data cannot be loaded.
    """
    if data_args.is_small_run:
        logger.info(
            "No data are named: a small run on the first examples of %s, which is built from the documentation of the "
            "installed packages. --dataset_name %s takes all of it.",
            data_args.dataset_name,
            data_args.dataset_name,
        )
    with training_args.main_process_first(desc="load the dataset"):
        raw: Any = load_raw_datasets(
            dataset_name=data_args.dataset_name,
            dataset_config_name=data_args.dataset_config_name,
            files={f"{split}_file": path for split, path in data_args.files.items()},
            cache_dir=model_args.cache_dir,
            token=model_args.token,
            **options,
        )
    if data_args.dataset_name is not None and embedded_name(data_args.dataset_name) is not None:
        raw = raw.shuffle(seed=0)
    if data_args.is_small_run:  # whatever it does with them, to train a tokenizer say, it does with few
        raw = DatasetDict({split: first_examples(rows, data_args.limits.get(split)) for split, rows in raw.items()})
    return raw


def asked_splits(training_args: TrainingArguments) -> list[str]:
    """The splits that the run works on."""
    return [split for flag, split in SPLITS.items() if getattr(training_args, flag)]


def require_splits(datasets: DatasetDict, training_args: TrainingArguments) -> None:
    """Check that every split is there that the run works on.

    Raises:
        ValueError: There is no such split.
    """
    for flag, split in SPLITS.items():
        if getattr(training_args, flag) and split not in datasets:
            raise ValueError(f"--{flag} needs a {split} split; the dataset has {', '.join(datasets)}")


def used_splits(datasets: DatasetDict, training_args: TrainingArguments, model_args: ModelArguments) -> list[str]:
    """The splits that the run works on, and the training split if a tokenizer is to be trained and there is one."""
    asked = asked_splits(training_args)
    wanted = {*asked, "train"} if model_args.trains_tokenizer else set(asked)
    return [split for split in SPLITS.values() if split in wanted and split in datasets]


def first_examples(split: Dataset, count: int | None) -> Dataset:
    """The first examples of a split; all when the count is None or larger."""
    return split if count is None else split.select(range(min(count, len(split))))


def map_rows(
    split: Dataset,
    function: Callable[..., dict[str, Any]],
    arguments: Mapping[str, Any],
    data_args: DataArguments,
    training_args: TrainingArguments,
    *,
    desc: str,
    features: Features | None = None,
) -> Dataset:
    """Make other rows of a split's rows, such as model inputs, in the cache.

    Args:
        split: The rows.
        function: From a batch of rows to columns of new ones.
        arguments: Its further arguments.
        data_args: The data arguments.
        training_args: The training arguments.
        desc: What is done, for progress.
        features: Types of the new columns, where the values of the first rows might not tell.
    """
    with training_args.main_process_first(desc=desc):
        return split.map(
            function,
            batched=True,
            fn_kwargs=dict(arguments),
            num_proc=data_args.preprocessing_num_workers,
            remove_columns=split.column_names,
            load_from_cache_file=not data_args.overwrite_cache,
            features=features,
            desc=desc,
        )


# ---- the work and its results ----


def train(trainer: Trainer, resume_from: str | None) -> dict[str, float]:
    """Train, save the model, the tokenizer and the trainer's state, and return the metrics.

    A run that is resumed when nothing is left to train keeps the metrics that it wrote when it trained.

    Raises:
        KeyboardInterrupt: Ctrl-C was pressed, or SIGTERM came; a checkpoint of the last step is there to resume from.
        RunFailed: The loss is not finite, or the disk is full.
    """
    if resume_from is not None and _is_finished(trainer, resume_from):
        trainer.save_model()
        trainer.save_state()
        path = Path(str(trainer.args.output_dir), "train_results.json")
        return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    save_base_model(trainer, new=resume_from is None)
    with stop_gently(trainer):
        result = trainer.train(resume_from_checkpoint=resume_from)
    trainer.save_model()
    metrics: dict[str, float] = dict(result.metrics)
    if isinstance(trainer.train_dataset, Sized):  # and not a stream
        metrics["train_samples"] = len(trainer.train_dataset)
    save_and_log(trainer, "train", metrics)
    trainer.save_state()
    return metrics


def _is_finished(trainer: Trainer, checkpoint: str) -> bool:
    """Whether a checkpoint has had all the steps asked for; then load it, for Trainer would take one more."""
    state = TrainerState.load_from_json(str(Path(checkpoint, "trainer_state.json")))
    planned = trainer.args.max_steps if trainer.args.max_steps > 0 else state.max_steps
    more_epochs = trainer.args.max_steps < 1 and trainer.args.num_train_epochs > state.num_train_epochs
    if more_epochs or state.global_step < planned:
        return False
    logger.warning("%s has had %d of %d steps: nothing is left to train.", checkpoint, state.global_step, planned)
    best = state.best_model_checkpoint
    wanted = best if trainer.args.load_best_model_at_end and best is not None and Path(best).is_dir() else checkpoint
    trainer._load_from_checkpoint(wanted)
    trainer.state = state
    return True


def save_and_log(trainer: Trainer, split: str, metrics: dict[str, float]) -> None:
    """Print metrics and write them to ``SPLIT_results.json`` and ``all_results.json``, in place of older ones."""
    trainer.log_metrics(split, metrics)
    if not trainer.is_world_process_zero():
        return
    path = Path(str(trainer.args.output_dir), "all_results.json")
    older = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    kept = {name: value for name, value in older.items() if not name.startswith(f"{split}_")}
    for name, results in ((f"{split}_results.json", metrics), (path.name, kept | metrics)):
        save_text(trainer, name, json.dumps(results, indent=4, sort_keys=True))


def save_text(trainer: Trainer, name: str, text: str) -> None:
    """Write a file of results into the output folder, whole or, as before, not at all; on the main process alone.

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


def publish(
    trainer: Trainer,
    model_args: ModelArguments,
    data_args: DataArguments,
    *,
    task: str,
    metrics: Mapping[str, float],
    argv: Sequence[str] | None,
) -> None:
    """Write the model card beside a trained model, and push all of it to the Hub if asked to. Merge an adapter before.

    A run that only evaluates writes no card: the model is another run's, and so is what is to be said of it.

    Args:
        trainer: The trainer, after its work.
        model_args: The model arguments.
        data_args: The data arguments.
        task: The Hub's name of the task.
        metrics: Everything that was measured.
        argv: The command line as the script was given it.

    Raises:
        ValueError: It could not be pushed.
    """
    if model_args.merge_adapter:
        save_merged_model(trainer)
    if trainer.args.do_train:
        write_model_card(trainer, model_args, data_args, task=task, metrics=metrics, arguments=read_arguments(argv))
    if trainer.args.push_to_hub:
        push(trainer)
