"""Train and evaluate a causal language model: ``run_clm.py``.

It trains any `AutoModelForCausalLM`, from a checkpoint or from scratch; flags, output files and behaviour follow
transformers' example script of the same name. The differences: it trains a tokenizer if none is named, refuses an
output folder with another run instead of resuming or overwriting it, and scores a test split with ``--do_predict``.
Scores are exact means over the tokens without label smoothing, include bits per byte, and can use overlapping windows.
"""

import logging
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from datasets import Dataset, IterableDataset
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedTokenizerBase

from hf_hybrid.data.preprocessing import IGNORED_LABEL, group_into_blocks, sliding_windows
from hf_hybrid.training.flags.command_line import parse_arguments
from hf_hybrid.training.flags.data import PREFIXES, ClmArguments
from hf_hybrid.training.flags.model import ModelArguments
from hf_hybrid.training.flags.run import ScriptTrainingArguments
from hf_hybrid.training.model.adapters import attach_adapter
from hf_hybrid.training.model.config import fit_positions
from hf_hybrid.training.model.tokenizer import check_tokenizer_source, load_tokenizer, train_new_tokenizer
from hf_hybrid.training.model.weights import load_model
from hf_hybrid.training.report.clm import report
from hf_hybrid.training.run_folder.output_folder import clear_output_folder, result_files
from hf_hybrid.training.run_folder.resume import check_resumed_model
from hf_hybrid.training.scores.clm import METRICS, bits_per_byte, compute_metrics, joined_tokens, scores_by_example
from hf_hybrid.training.splits import asked_splits
from hf_hybrid.training.steps import begin, finish, save_and_log, train
from hf_hybrid.training.texts import TOKENS, check_streaming, comes_from_text_file, load_splits, tokenize_split
from hf_hybrid.training.trainer.script_trainer import CausalTrainer

logger = logging.getLogger(__name__)

_ROLE = {"is_decoder": True, "is_encoder_decoder": False}
_POSITIONS = ("max_position_embeddings", "max_decoder_position_embeddings")
_DEFAULT_BLOCK = 1024


def main(argv: Sequence[str] | None = None) -> dict[str, float]:
    """Run the script.

    Args:
        argv: The command line without the program's name; `sys.argv` when None. ``--help`` lists the flags.

    Returns:
        The metrics of everything that was done, as in ``all_results.json``: ``train_loss``, ``eval_perplexity``, ...

    Raises:
        ValueError: A flag, a file or a folder cannot be used. All flags are checked before any work starts.
        KeyboardInterrupt: Training was stopped with Ctrl-C, after saving a checkpoint.
    """
    groups = (ModelArguments, ClmArguments, ScriptTrainingArguments)
    model_args, data_args, training_args = parse_arguments(groups, argv)
    outputs = result_files(training_args)
    config, resume_from = begin(
        argv, model_args, data_args, training_args, AutoModelForCausalLM, metrics=METRICS, outputs=outputs, role=_ROLE
    )
    positions = fit_positions(model_args, config, AutoModelForCausalLM, _fit_lengths(config, data_args))
    # None: train it once data are loaded
    tokenizer = load_tokenizer(model_args, config, resume_from, ends_texts=False)
    check_tokenizer_source(tokenizer, data_args)
    if data_args.streaming:
        check_streaming(tokenizer, data_args, training_args)
    check_resumed_model(config, resume_from, new=model_args.is_new)

    splits, column, _ = load_splits(data_args, training_args, model_args)
    if tokenizer is None:
        tokenizer = train_new_tokenizer(model_args, config, splits.get("train"), [column], ends_texts=False)
    asked = asked_splits(training_args)
    texts = {name: _tokenize(splits[name], name, tokenizer, column, data_args, training_args) for name in asked}
    examples = {name: _examples(rows, name, data_args) for name, rows in texts.items()}
    model = load_model(model_args, training_args, AutoModelForCausalLM, config, tokenizer, resume_from, positions)
    trainer = CausalTrainer(
        model=attach_adapter(model, model_args, training_args, resume_from, task_type="CAUSAL_LM"),
        args=training_args,
        train_dataset=examples.get("train"),
        eval_dataset=examples.get("validation"),
        processing_class=tokenizer,
        data_collator=_collate,
        compute_metrics=compute_metrics,
        preprocess_logits_for_metrics=scores_by_example,
    )

    clear_output_folder(training_args, resume_from, outputs, model_args.model_name_or_path)
    metrics = train(trainer, resume_from, argv) if training_args.do_train else {}
    metrics |= _evaluate(trainer, examples, texts)
    shown = partial(report, trainer, examples, texts, metrics)
    finish(trainer, model_args, data_args, argv, task="text-generation", metrics=metrics, report=shown)
    return metrics


def _fit_lengths(config: PreTrainedConfig, data_args: ClmArguments) -> dict[str, dict[str, int]]:
    """Choose the block size if it is not given, and return the lengths that the model's positions must have."""
    limits = [limit for name in _POSITIONS if isinstance(limit := getattr(config, name, None), int)]
    if data_args.block_size is None:
        data_args.block_size = min([_DEFAULT_BLOCK, *limits])
    lengths = {"block_size": data_args.block_size, "eval_sequence_length": data_args.eval_sequence_length or 0}
    memory = getattr(config, "ssm_l_max", None)
    for flag, length in lengths.items():
        if memory is not None and memory < length:
            logger.warning(
                "ssm_l_max %d is shorter than --%s %d: its layers see no further back.", memory, flag, length
            )
    return dict.fromkeys(_POSITIONS, lengths)


# ---- data ----


def _tokenize(
    split: Dataset | IterableDataset,
    name: str,
    tokenizer: PreTrainedTokenizerBase,
    column: str,
    data_args: ClmArguments,
    training_args: ScriptTrainingArguments,
) -> Dataset | IterableDataset:
    """Tokenize each text; of a stream to score, read only what is needed, into memory."""
    are_lines = data_args.keep_linebreaks and comes_from_text_file(name, data_args)
    tokens = tokenize_split(split, name, tokenizer, column, data_args, training_args, are_lines=are_lines)
    if isinstance(tokens, Dataset) or name == "train":
        return tokens
    limit, length = data_args.limits[name], data_args.eval_sequence_length or data_args.block_size or 0
    rows, count = [], 0
    for row in tokens:
        rows.append(row)
        count += len(row["input_ids"])
        if limit is not None and count >= limit * length:
            break
    return Dataset.from_list(rows, features=TOKENS)


def _examples(
    rows: Dataset | IterableDataset, name: str, data_args: ClmArguments
) -> Sequence[dict[str, Any]] | IterableDataset:
    """Return blocks to train on or to score, or windows that score every token."""
    limit, block_size = data_args.limits[name], data_args.block_size
    if isinstance(rows, IterableDataset):
        arguments = {"block_size": block_size}
        blocks = rows.map(group_into_blocks, batched=True, fn_kwargs=arguments, remove_columns=list(TOKENS))
        if next(iter(blocks), None) is None:
            raise ValueError(_too_short(name, f"--block_size {block_size}", "fewer in every thousand texts"))
        return blocks if limit is None else blocks.take(limit)
    tokens = joined_tokens(rows)
    if name != "train" and data_args.eval_sequence_length is not None:
        if len(tokens) < 2:
            raise ValueError(_too_short(name, "two", str(len(tokens))))
        return sliding_windows(tokens, data_args.eval_sequence_length, data_args.eval_context_window or 1)[:limit]
    joined = group_into_blocks({"input_ids": [tokens]}, block_size=block_size or 0)["input_ids"]
    if not joined:
        raise ValueError(_too_short(name, f"--block_size {block_size}", str(len(tokens))))
    return [{"input_ids": block} for block in joined[:limit]]


def _too_short(name: str, wanted: str, got: str) -> str:
    return f"split {name!r} must hold at least {wanted} tokens; got {got}"


def _collate(examples: Sequence[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """Stack blocks or windows. The last window may be shorter: no token sees its padding, and no score counts it."""
    ids = [torch.as_tensor(example["input_ids"], dtype=torch.long) for example in examples]
    labels = [torch.as_tensor(example.get("labels", example["input_ids"]), dtype=torch.long) for example in examples]
    return {
        "input_ids": pad_sequence(ids, batch_first=True),
        "labels": pad_sequence(labels, batch_first=True, padding_value=IGNORED_LABEL),
    }


def _evaluate(trainer: CausalTrainer, examples: dict[str, Any], texts: dict[str, Any]) -> dict[str, float]:
    """Score the splits; bits per byte use the mean number of bytes per token."""
    metrics: dict[str, float] = {}
    for split, prefix in PREFIXES.items():
        if split in examples:
            results: dict[str, float] = trainer.evaluate(examples[split], metric_key_prefix=prefix)
            results[f"{prefix}_bits_per_byte"] = bits_per_byte(results[f"{prefix}_loss"], texts[split])
            results[f"{prefix}_samples"] = len(examples[split])
            if prefix == "eval":
                results["perplexity"] = results["eval_perplexity"]  # the example script's name for it
            save_and_log(trainer, prefix, results)
            metrics |= results
    return metrics
