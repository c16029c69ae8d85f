"""Train a classifier on a task of the Long Range Arena: ``python -m hf_hybrid.training long_range``.

It trains any `AutoModelForSequenceClassification` on the tasks of tokens, CHELA and SPADE also on pixels, sound and
pairs of documents, from scratch or from a checkpoint. ``--recipe`` takes a paper's settings. The rows are read from
``--data_dir`` or drawn. Flags are named as in transformers' example scripts.
"""

import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from transformers import AutoModelForSequenceClassification, PreTrainedConfig, PreTrainedTokenizerBase

from hf_hybrid.data.classification import Labels
from hf_hybrid.data.lra import check_tokenizer, load_lra_once, lra_tokenizer
from hf_hybrid.models.auto import AutoModelForSequencePairClassification
from hf_hybrid.training.collating import LongRangeRows, long_range_collator
from hf_hybrid.training.flags.command_line import FlagParser, given_flags, parse_arguments, read_arguments
from hf_hybrid.training.flags.data import PREFIXES, LongRangeArguments
from hf_hybrid.training.flags.model import ModelArguments
from hf_hybrid.training.flags.recipes import LongRangeRecipe, find_recipe, fit_fields
from hf_hybrid.training.flags.run import ScriptTrainingArguments
from hf_hybrid.training.model.adapters import attach_adapter
from hf_hybrid.training.model.config import fit_positions
from hf_hybrid.training.model.labels import settle_labels
from hf_hybrid.training.model.tokenizer import fit_config_to_tokenizer, load_tokenizer
from hf_hybrid.training.model.weights import load_model
from hf_hybrid.training.report.long_range import report
from hf_hybrid.training.run_folder.output_folder import clear_output_folder, result_files
from hf_hybrid.training.run_folder.resume import ExamplesRecord, check_resumed_examples, check_resumed_model
from hf_hybrid.training.scores.glue import compute_metrics, outputs_of, score_names
from hf_hybrid.training.splits import asked_splits
from hf_hybrid.training.steps import begin, finish, save_and_log, save_text, train
from hf_hybrid.training.trainer.script_trainer import ScriptTrainer

logger = logging.getLogger(__name__)

_BEST = {
    "save_total_limit": 2,
    "load_best_model_at_end": True,
    "metric_for_best_model": "accuracy",
}
"""Flags of a run that trains and evaluates, unless it has a strategy of its own: keep the best checkpoint."""


def main(argv: Sequence[str] | None = None) -> dict[str, float]:
    """Run the script.

    Args:
        argv: The command line without the program's name; `sys.argv` when None. ``--help`` lists the flags.

    Returns:
        The metrics of everything that was done, as in ``all_results.json``: ``train_loss``, ``eval_accuracy``, ...

    Raises:
        ValueError: A flag, a file or a folder cannot be used. All flags are checked before any work starts, and all
            rows before training.
        KeyboardInterrupt: Training was stopped with Ctrl-C, after saving a checkpoint.
    """
    groups = (ModelArguments, LongRangeArguments, ScriptTrainingArguments)
    full = complete_flags(read_arguments(argv))
    model_args, data_args, training_args = parse_arguments(groups, full)
    task, name = data_args.task, str(data_args.task_name)
    auto_class: Any = AutoModelForSequencePairClassification if task.is_pair else AutoModelForSequenceClassification
    reads = "input_values" if task.vocab_size is None else "input_ids"
    outputs = result_files(training_args, f"predict_results_{name}.txt")
    checks: dict[str, Any] = {"metrics": score_names(None)[:2], "outputs": outputs, "reads": reads}
    role = _new_fields(model_args, data_args)
    config, resume_from = begin(full, model_args, data_args, training_args, auto_class, role=role, **checks)
    if data_args.recipe is not None:
        recipe = _find_recipe(data_args, config.model_type, "the model is a")
        logger.info("--recipe %s: %s.", data_args.recipe, recipe.source)
    lengths = {"max_position_embeddings": {"max_seq_length": data_args.length}}
    positions = fit_positions(model_args, config, auto_class, lengths)
    tokenizer = None if task.vocab_size is None else _tokenizer(model_args, data_args, config, resume_from)
    found = Labels(tuple(map(str, range(task.labels))), {label: label for label in range(task.labels)})
    labels = settle_labels(config, found, model_args, training_args)
    check_resumed_model(config, resume_from, new=model_args.is_new)

    rows = {split: _load(data_args, model_args.cache_dir, split, reads) for split in asked_splits(training_args)}
    facts = _facts(data_args, rows)
    check_resumed_examples(facts, resume_from)
    settled = (model_args, training_args, auto_class, config, tokenizer, resume_from, positions)
    model = load_model(*settled, ignore_mismatched_sizes=data_args.ignore_mismatched_sizes)
    training_args.remove_unused_columns = False  # an adapter's forward does not name those of pairs
    trainer = ScriptTrainer(
        model=attach_adapter(model, model_args, training_args, resume_from, task_type="SEQ_CLS"),
        args=training_args,
        train_dataset=rows.get("train"),
        eval_dataset=rows.get("validation"),
        processing_class=tokenizer,
        data_collator=long_range_collator,
        compute_metrics=partial(compute_metrics, None, labels),
        callbacks=[ExamplesRecord(facts)],
    )

    clear_output_folder(training_args, resume_from, outputs, model_args.model_name_or_path)
    metrics = train(trainer, resume_from, full) if training_args.do_train else {}
    evaluated: dict[str, Any] = {}
    metrics |= _evaluate(trainer, rows, labels, name, evaluated)
    shown = partial(report, data_args, rows, labels, evaluated, metrics)
    finished: dict[str, Any] = {"metrics": metrics, "report": shown, "script": "long_range"}
    finish(trainer, model_args, data_args, argv, task=data_args.hub_task, **finished)
    return metrics


# ---- flags ----


@dataclass
class _Work:
    """The flags of the run that decide which others it needs."""

    do_train: bool = False
    do_eval: bool = False
    eval_steps: float | None = None
    save_steps: float | None = None
    context_parallel_size: int = 1


def complete_flags(argv: Sequence[str]) -> list[str]:
    """Put a recipe's flags, and those that keep the best checkpoint, before the given ones, which count more.

    Checkpoints are of epochs, or come after ``--save_steps`` or ``--eval_steps`` updates.
    """
    flags: Any = (LongRangeArguments, _Work)
    known, _ = FlagParser(flags, allow_abbrev=False, add_help=False).parse_known_args(list(argv))
    given = given_flags(argv)
    before: dict[str, Any] = {}
    if known.do_train and known.do_eval and not given & {"eval_strategy", "save_strategy", "load_best_model_at_end"}:
        steps = {
            "eval_steps": known.eval_steps or known.save_steps,
            "save_steps": known.save_steps or known.eval_steps,
        }
        strategy = "epoch" if steps["save_steps"] is None else "steps"
        before |= {"eval_strategy": strategy, "save_strategy": strategy} | _BEST
        before |= steps if strategy == "steps" else {}
    if known.recipe is not None and known.task_name is not None:
        recipe = find_recipe(known.recipe, known.task_name)
        replicas = int(os.environ.get("WORLD_SIZE", "1")) // max(1, known.context_parallel_size)
        before |= recipe.flags(1 if "per_device_train_batch_size" in given else max(1, replicas))
        if not given & {"model_type", "model_name_or_path", "config_name"}:
            before["model_type"] = recipe.model_type
    return [word for name, value in before.items() for word in (f"--{name}", str(value))] + list(argv)


def _new_fields(model_args: ModelArguments, data_args: LongRangeArguments) -> dict[str, Any]:
    """Return the fields of a new model, which ``--config_overrides`` may change: the task's, and the recipe's.

    Raises:
        ValueError: The recipe is another architecture's.
    """
    if not model_args.is_new or model_args.model_type is None:
        return {}
    fields: dict[str, Any] = {}
    if data_args.recipe is not None:
        fields = dict(_find_recipe(data_args, model_args.model_type, "got --model_type").fields)
    elif model_args.model_type == "chela":
        fields = dict.fromkeys(("training_length", "long_kernel_size"), data_args.length)
    return fit_fields({"is_encoder_decoder": False, **fields}, str(data_args.task_name), data_args.length)


def _find_recipe(data_args: LongRangeArguments, model_type: str, said: str) -> LongRangeRecipe:
    """Return the recipe of ``--recipe``, whose flags a checkpoint gets too; raise ValueError if it is for others."""
    recipe = find_recipe(str(data_args.recipe), str(data_args.task_name))
    if recipe.model_type != model_type:
        raise ValueError(f"--recipe {data_args.recipe} is for {recipe.model_type}; {said} {model_type}")
    return recipe


def _tokenizer(
    model_args: ModelArguments, data_args: LongRangeArguments, config: PreTrainedConfig, resume_from: str | None
) -> PreTrainedTokenizerBase:
    """Return the task's tokenizer, or that of the checkpoint, which must read the task's texts as the same ids."""
    name = str(data_args.task_name)
    tokenizer = load_tokenizer(model_args, config, resume_from, needs_end=False)
    if tokenizer is None:
        tokenizer = lra_tokenizer(name)
        given = model_args.overrides(type(config))
        fit_config_to_tokenizer(config, tokenizer, vocab_size_is_given="vocab_size" in given)
    flags = ("tokenizer_name", "tokenizer_type", "model_name_or_path")
    sources = [model_args.shown(flag) for flag in flags if getattr(model_args, flag) is not None]
    sources += [] if resume_from is None else [f"--resume_from_checkpoint {resume_from}"]
    source = next(iter(sources), "the tokenizer")
    check_tokenizer(tokenizer, name, source)
    ids = data_args.task.vocab_size or 0
    if config.vocab_size < ids:
        raise ValueError(f"{source}: vocab_size must be at least the {ids} of {name}; got {config.vocab_size}")
    return tokenizer


# ---- data ----


def _load(data_args: LongRangeArguments, cache_dir: str | None, split: str, reads: str) -> LongRangeRows:
    rows = load_lra_once(
        str(data_args.task_name),
        split,
        data_dir=data_args.data_dir,
        count=data_args.limits[split],
        seed=data_args.drawing_seed,
        cache_dir=cache_dir,
        processes=data_args.preprocessing_num_workers or 1,
    )
    longest = max(map(len, rows.inputs))
    if data_args.task.is_whole and longest > data_args.length:
        raise ValueError(
            f"--max_seq_length must be at least the {longest} tokens of the longest row of {split}, since a part of a "
            f"row of {data_args.task_name} has another label; got {data_args.length}"
        )
    return LongRangeRows(rows, reads, data_args.length)


def _facts(data_args: LongRangeArguments, rows: dict[str, LongRangeRows]) -> dict[str, Any]:
    """Return what decides the rows that train, and those that choose the best weights: a resumed run has the same."""
    facts: dict[str, Any] = {"--task_name": data_args.task_name, "--max_seq_length": data_args.length}
    if data_args.data_dir is None:
        facts["--drawing_seed"] = data_args.drawing_seed
    named = {"train": "the training rows", "validation": "the validation rows"}
    return facts | {name: rows[split].digest() for split, name in named.items() if split in rows}


# ---- evaluation and predictions ----


def _evaluate(
    trainer: ScriptTrainer, rows: dict[str, LongRangeRows], labels: Labels, name: str, evaluated: dict[str, Any]
) -> dict[str, float]:
    metrics: dict[str, float] = {}
    for split, prefix in PREFIXES.items():
        if split not in rows:
            continue
        output = trainer.predict(rows[split], metric_key_prefix=prefix)
        found = {**(output.metrics or {}), f"{prefix}_samples": len(rows[split])}
        save_and_log(trainer, prefix, found)
        metrics |= found
        evaluated[split] = output
        if split == "test" and trainer.is_world_process_zero():
            words = outputs_of(output.predictions, labels).tolist()
            lines = ["index\tprediction", *(f"{index}\t{word}" for index, word in enumerate(words))]
            save_text(trainer, f"predict_results_{name}.txt", "\n".join(lines) + "\n")
    return metrics
