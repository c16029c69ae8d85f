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
from datasets import Dataset, DatasetDict, Features, IterableDataset, List, Value
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedTokenizerBase

from hf_hybrid.data.columns import check_texts, is_text, text_column
from hf_hybrid.data.files import TEXT_EXTENSIONS, check_file
from hf_hybrid.data.preprocessing import IGNORED_LABEL, group_into_blocks, sliding_windows, tokenize_texts
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
from hf_hybrid.training.splits import asked_splits, load_datasets, map_rows, used_splits
from hf_hybrid.training.steps import begin, finish, save_and_log, train
from hf_hybrid.training.trainer.script_trainer import CausalTrainer

logger = logging.getLogger(__name__)

_ROLE = {"is_decoder": True, "is_encoder_decoder": False}
_POSITIONS = ("max_position_embeddings", "max_decoder_position_embeddings")
_DEFAULT_BLOCK = 1024
_TOKENS = Features({"input_ids": List(Value("int32")), "num_bytes": Value("int64")})


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
        _check_streaming(tokenizer, training_args)
    check_resumed_model(config, resume_from, new=model_args.is_new)

    splits, column = load_splits(data_args, training_args, model_args)
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


def _check_streaming(tokenizer: PreTrainedTokenizerBase | None, training_args: ScriptTrainingArguments) -> None:
    if training_args.do_train and training_args.max_steps < 1:
        raise ValueError("--streaming needs --max_steps, because the length of a stream is not known; got none")
    if tokenizer is None:
        raise ValueError("--streaming needs a tokenizer: give --tokenizer_name or --tokenizer_type bytes")


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


def load_splits(
    data_args: ClmArguments, training_args: ScriptTrainingArguments, model_args: ModelArguments
) -> tuple[DatasetDict, str]:
    """Load the splits that a run needs, with a text in every row, and the name of the column of texts.

    A missing validation split is cut from the training split: the first rows, or in a stream the first of every
    hundred.

    Raises:
        ValueError: A split or a column that the run needs is missing, or a row has no text.
    """
    raw = load_datasets(
        data_args,
        training_args,
        model_args,
        keep_linebreaks=data_args.keep_linebreaks,
        streaming=data_args.streaming,
    )
    if training_args.do_eval and "validation" not in raw and "train" in raw:
        raw["validation"], raw["train"] = _cut(raw["train"], data_args.validation_split_percentage)
    used = used_splits(raw, training_args, model_args)
    column = text_column({name: _columns(raw[name], name) for name in used}, data_args.text_column)
    for name in used:
        rows = raw[name].select_columns([column])
        if not data_args.streaming:
            rows = check_texts(rows, [column], name=name, drop_empty=data_args.drop_empty_rows, may_be_blank=True)
        elif data_args.drop_empty_rows:
            rows = rows.filter(_has_text, fn_kwargs={"column": column})
        raw[name] = rows
    return raw, column


def _cut(rows: Dataset | IterableDataset, percentage: int) -> tuple[Any, Any]:
    """Divide a training split into a validation part and a training part."""
    if isinstance(rows, IterableDataset):
        return tuple(
            rows.filter(_is_among_first, with_indices=True, fn_kwargs={"percentage": percentage, "wanted": wanted})
            for wanted in (True, False)
        )
    count = max(1, len(rows) * percentage // 100)
    if count == len(rows):
        raise ValueError(
            "split 'train' must hold at least two rows for a validation split to be cut from it; got one: give "
            "--validation_file"
        )
    return rows.select(range(count)), rows.select(range(count, len(rows)))


def _is_among_first(row: dict[str, Any], index: int, *, percentage: int, wanted: bool) -> bool:
    return (index % 100 < percentage) == wanted


def _has_text(row: dict[str, Any], *, column: str) -> bool:
    return row[column] is not None


def _columns(rows: Dataset | IterableDataset, name: str) -> dict[str, bool]:
    """Return the columns of a split, and whether they hold text; a stream's first row tells."""
    if isinstance(rows, Dataset):
        return {column: is_text(feature) for column, feature in rows.features.items()}
    if (first := next(iter(rows), None)) is None:
        raise ValueError(f"split {name!r} must hold at least one row; got none")
    return {column: isinstance(value, str) for column, value in first.items()}


def _tokenize(
    split: Dataset | IterableDataset,
    name: str,
    tokenizer: PreTrainedTokenizerBase,
    column: str,
    data_args: ClmArguments,
    training_args: ScriptTrainingArguments,
) -> Dataset | IterableDataset:
    """Tokenize each text; of a stream to score, read only what is needed, into memory."""
    path = data_args.files.get(name) or data_args.files.get("train")
    is_text_file = path is not None and check_file("train_file", path, TEXT_EXTENSIONS) == ".txt"
    arguments = {"tokenizer": tokenizer, "column": column, "are_lines": is_text_file and data_args.keep_linebreaks}
    if isinstance(split, Dataset):
        return map_rows(
            split, tokenize_texts, arguments, data_args, training_args, desc=f"Tokenizing {name}", features=_TOKENS
        )
    stream = split.map(tokenize_texts, batched=True, fn_kwargs=arguments, remove_columns=[column])
    if name == "train":
        return stream
    limit, length = data_args.limits[name], data_args.eval_sequence_length or data_args.block_size or 0
    rows, count = [], 0
    for row in stream:
        rows.append(row)
        count += len(row["input_ids"])
        if limit is not None and count >= limit * length:
            break
    return Dataset.from_list(rows, features=_TOKENS)


def _examples(
    rows: Dataset | IterableDataset, name: str, data_args: ClmArguments
) -> Sequence[dict[str, Any]] | IterableDataset:
    """Return blocks to train on or to score, or windows that score every token."""
    limit, block_size = data_args.limits[name], data_args.block_size
    if isinstance(rows, IterableDataset):
        arguments = {"block_size": block_size}
        blocks = rows.map(group_into_blocks, batched=True, fn_kwargs=arguments, remove_columns=list(_TOKENS))
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
