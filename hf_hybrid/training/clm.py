"""Train and evaluate a causal language model: ``run_clm.py``.

Any `AutoModelForCausalLM` can be trained, from a checkpoint or from scratch; flags, output files and behaviour follow
transformers' example script of the same name. Where they differ: a tokenizer is trained when none is named, an output
folder with another run in it is refused instead of being resumed or written over, ``--do_predict`` scores a test
split, and scores are exact means over the tokens, of labels that are never smoothed, with bits per byte among them,
and can be computed in overlapping windows.
"""

import logging
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from datasets import Dataset, DatasetDict, Features, IterableDataset, List, Value
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM, EvalPrediction, PreTrainedConfig, PreTrainedTokenizerBase

from hf_hybrid.data.columns import check_texts, is_text, text_column
from hf_hybrid.data.files import TEXT_EXTENSIONS, check_file
from hf_hybrid.data.preprocessing import (
    IGNORED_LABEL,
    group_into_blocks,
    sliding_windows,
    tokenize_texts,
    unigram_losses,
)
from hf_hybrid.training.adapters import attach_adapter, uses_adapter
from hf_hybrid.training.arguments import ModelArguments, ScriptTrainingArguments
from hf_hybrid.training.command_line import given_flags, parse_arguments
from hf_hybrid.training.common import (
    asked_splits,
    check_best_metric,
    load_datasets,
    map_rows,
    prepare_run,
    publish,
    require_splits,
    save_and_log,
    train,
    used_splits,
)
from hf_hybrid.training.data_arguments import PREFIXES, ClmArguments, check_split_sources
from hf_hybrid.training.learning_rates import fit_learning_rate
from hf_hybrid.training.logging_steps import fit_logging_steps
from hf_hybrid.training.model_loading import (
    check_tokenizer_source,
    fit_positions,
    load_config,
    load_model,
    load_tokenizer,
    train_new_tokenizer,
)
from hf_hybrid.training.output_folder import REPORT_FILE, check_resumed_model, clear_output_folder
from hf_hybrid.training.report import Cell, Sample, Section, Table, excerpt
from hf_hybrid.training.run_report import choose_rows, guarded, write_report
from hf_hybrid.training.trainer import CausalTrainer

__all__ = ["load_splits", "main"]

logger = logging.getLogger(__name__)

_ROLE = {"is_decoder": True, "is_encoder_decoder": False}
_POSITIONS = ("max_position_embeddings", "max_decoder_position_embeddings")
_METRICS = ("loss", "accuracy", "perplexity", "tokens")
_DEFAULT_BLOCK = 1024
_LARGEST = math.log(np.finfo(np.float64).max)
_TOKENS = Features({"input_ids": List(Value("int32")), "num_bytes": Value("int64")})
_SCORES = {
    "loss": "loss (nats per token)",
    "perplexity": "perplexity",
    "bits_per_byte": "bits per byte",
    "accuracy": "accuracy",
}
_CURVES = {
    "Loss (nats per token)": {"loss": "training", "eval_loss": "validation"},
    "Accuracy on the validation split": {"eval_accuracy": "share of tokens guessed"},
}
_READ, _WRITTEN = 128, 64
"""At most so many tokens of a sample are read, and so many written."""


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
    model_args, data_args, training_args = parse_arguments(
        (ModelArguments, ClmArguments, ScriptTrainingArguments), argv
    )
    check_split_sources(data_args, training_args, cut_from_train=("validation",))
    if data_args.streaming and training_args.do_train and training_args.max_steps < 1:
        raise ValueError("--streaming needs --max_steps, for a stream has no length; got none")
    check_best_metric(training_args, _METRICS)
    new = model_args.model_name_or_path is None
    config = load_config(model_args, AutoModelForCausalLM, preset=data_args.default_preset, role=_ROLE)
    asked = asked_splits(training_args)
    outputs = [f"{prefix}_results.json" for split, prefix in PREFIXES.items() if split in asked]
    resume_from = prepare_run(training_args, model_args, outputs=outputs)
    given = given_flags(argv)
    fit_learning_rate(training_args, model_args, data_args, config, given)
    resized_positions = _fit_lengths(config, data_args, new=new, permitted=not uses_adapter(model_args))
    tokenizer = load_tokenizer(model_args, config, resume_from)  # None: it is trained once there are data
    if tokenizer is None:
        check_tokenizer_source(data_args)
        if data_args.streaming:
            raise ValueError("--streaming needs a tokenizer: give --tokenizer_name or --tokenizer_type bytes")
    check_resumed_model(config, resume_from, new=new)

    splits, column = load_splits(data_args, training_args, model_args)
    if tokenizer is None:
        tokenizer = train_new_tokenizer(model_args, config, splits.get("train"), [column])
    texts = {name: _tokenize(splits[name], name, tokenizer, column, data_args, training_args) for name in asked}
    examples = {name: _examples(rows, name, data_args) for name, rows in texts.items()}
    model = load_model(
        model_args,
        AutoModelForCausalLM,
        config,
        tokenizer,
        seed=training_args.seed,
        may_add_weights=training_args.do_train,
    )
    if resized_positions is not None:
        model.resize_position_embeddings(resized_positions)
    trainer = CausalTrainer(
        model=attach_adapter(model, model_args, training_args, resume_from, task_type="CAUSAL_LM"),
        args=training_args,
        train_dataset=examples.get("train"),
        eval_dataset=examples.get("validation"),
        processing_class=tokenizer,
        data_collator=_collate,
        compute_metrics=_compute_metrics,
        preprocess_logits_for_metrics=_scores_by_example,
    )

    clear_output_folder(training_args, resume_from, outputs, model_args.model_name_or_path)
    metrics: dict[str, float] = {}
    if training_args.do_train:
        fit_logging_steps(trainer, resume_from, given)
        metrics |= train(trainer, resume_from)
    for split, prefix in PREFIXES.items():
        if split in asked:
            results = _evaluate(trainer, examples[split], texts[split], prefix)
            save_and_log(trainer, prefix, results)
            metrics |= results
    guarded(REPORT_FILE, lambda: _report(trainer, model_args, data_args, argv, examples, texts, metrics))
    publish(trainer, model_args, data_args, task="text-generation", metrics=metrics, argv=argv)
    return metrics


def _fit_lengths(config: PreTrainedConfig, data_args: ClmArguments, *, new: bool, permitted: bool) -> int | None:
    """Choose the block size where it is left out, and fit the model's positions to the lengths, or refuse them."""
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
    asked = dict.fromkeys(_POSITIONS, lengths)
    return fit_positions(config, AutoModelForCausalLM, asked, new=new, permitted=permitted)


# ---- data ----


def load_splits(
    data_args: ClmArguments, training_args: ScriptTrainingArguments, model_args: ModelArguments
) -> tuple[DatasetDict, str]:
    """Load the splits that a run needs, with a text in every row, and the name of the column of texts.

    Where there is no validation split, it is cut from the training split: the first rows, or in a stream the first of
    every hundred.

    Raises:
        ValueError: A split is missing that the run needs, or a column, or a row has no text.
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
    require_splits(raw, training_args)
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
    """The validation part and the training part of a training split."""
    if isinstance(rows, IterableDataset):
        first, rest = (
            rows.filter(_is_among_first, with_indices=True, fn_kwargs={"percentage": percentage, "wanted": wanted})
            for wanted in (True, False)
        )
        return first, rest
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
    """The columns of a split, and whether they hold text; of a stream, its first row is looked at."""
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
    """The tokens of each text; of a stream that is to be scored, of as many as are needed, in memory."""
    path = data_args.files.get(name) or data_args.files.get("train")
    is_text_file = path is not None and check_file("train_file", path, TEXT_EXTENSIONS) == ".txt"
    arguments = {
        "tokenizer": tokenizer,
        "column": column,
        "are_lines": is_text_file and data_args.keep_linebreaks,
    }
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
    """Blocks to train on or to score, or the windows in which every token is scored."""
    limit, block_size = data_args.limits[name], data_args.block_size
    if isinstance(rows, IterableDataset):
        columns = ["input_ids", "num_bytes"]
        arguments = {"block_size": block_size}
        blocks = rows.map(group_into_blocks, batched=True, fn_kwargs=arguments, remove_columns=columns)
        if next(iter(blocks), None) is None:
            raise ValueError(_too_short(name, f"--block_size {block_size}", "fewer in every thousand texts"))
        return blocks if limit is None else blocks.take(limit)
    tokens = _joined(rows)
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


def _joined(rows: Dataset) -> np.ndarray[Any, Any]:
    """The tokens of all texts, four bytes each."""
    chunks = rows.data.column("input_ids").chunks
    return np.concatenate([chunk.flatten().to_numpy() for chunk in chunks])


def _collate(examples: Sequence[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """Stack blocks or windows. The last window may be shorter: what is put behind it is neither scored nor seen."""
    ids = [torch.as_tensor(example["input_ids"], dtype=torch.long) for example in examples]
    labels = [torch.as_tensor(example.get("labels", example["input_ids"]), dtype=torch.long) for example in examples]
    return {
        "input_ids": pad_sequence(ids, batch_first=True),
        "labels": pad_sequence(labels, batch_first=True, padding_value=IGNORED_LABEL),
    }


# ---- scores ----


def _scores_by_example(logits: Any, labels: torch.Tensor) -> torch.Tensor:
    """Summed loss in nats, number of right tokens, number of scored tokens: `(B, 3)`, a row at a time for memory."""
    scores = []
    for row, targets in zip(logits[0] if isinstance(logits, tuple) else logits, labels[:, 1:], strict=True):
        scored = targets != IGNORED_LABEL
        picked, wanted = row[:-1][scored].float(), targets[scored]
        right = (picked.argmax(-1) == wanted).sum()
        scores.append(torch.stack([F.cross_entropy(picked, wanted, reduction="sum"), right, scored.sum()]))
    return torch.stack(scores)


def _compute_metrics(prediction: EvalPrediction) -> dict[str, float]:
    loss, right, count = np.asarray(prediction.predictions, dtype=np.float64).sum(axis=0)
    mean = loss / count
    # "loss" takes the place of Trainer's own, a mean over batches of means
    return {
        "loss": mean,
        "accuracy": right / count,
        "perplexity": _perplexity(mean),
        "tokens": int(count),
    }


def _perplexity(loss: float) -> float:
    return math.exp(loss) if loss < _LARGEST else math.inf


def _bits_per_byte(loss: float, texts: Any) -> float:
    return loss / math.log(2) * len(_joined(texts)) / sum(texts["num_bytes"])


def _evaluate(trainer: CausalTrainer, examples: Any, texts: Any, prefix: str) -> dict[str, float]:
    """Score a split; bits per byte are those of its scored tokens at the length that its tokens have in the mean."""
    results: dict[str, float] = trainer.evaluate(examples, metric_key_prefix=prefix)
    results[f"{prefix}_bits_per_byte"] = _bits_per_byte(results[f"{prefix}_loss"], texts)
    results[f"{prefix}_samples"] = len(examples)
    if prefix == "eval":
        results["perplexity"] = results["eval_perplexity"]  # the example script's name for it
    return results


# ---- the report ----


def _report(
    trainer: CausalTrainer,
    model_args: ModelArguments,
    data_args: ClmArguments,
    argv: Sequence[str] | None,
    examples: dict[str, Any],
    texts: dict[str, Any],
    metrics: dict[str, float],
) -> None:
    last = "predict" if trainer.args.do_predict else "eval"
    write_report(
        trainer,
        model_args,
        data_args,
        script="run_clm.py",
        argv=argv,
        title="Language model",
        sizes={name: _size(rows) for name, rows in examples.items()},
        metrics=metrics,
        tiles={f"{last}_{key}": name for key, name in _SCORES.items()},
        curves=_CURVES,
        parts={
            "scores": lambda: _score_tables(trainer, examples, texts, metrics),
            "samples": lambda: _samples(trainer, examples),
        },
    )


def _size(rows: Any) -> str:
    if isinstance(rows, IterableDataset):
        return "streamed"
    longest = max(len(row["input_ids"]) for row in rows)
    return f"{len(rows):,} × {longest:,} tokens"


def _score_tables(
    trainer: CausalTrainer, examples: dict[str, Any], texts: dict[str, Any], metrics: dict[str, float]
) -> Section:
    """The model's scores beside those of what knows no token before the one to predict."""
    tables, notes = [], []
    model: Any = trainer.model
    vocab_size: int = model.config.vocab_size
    losses = {"uniform over the vocabulary": np.full(vocab_size, math.log(vocab_size))}
    trained = examples.get("train")
    if trained is None:
        notes.append("The training split was not read: its frequencies are no baseline here.")
    elif isinstance(trained, IterableDataset):
        notes.append("The training split was streamed: its frequencies are no baseline here.")
    else:
        tokens = np.concatenate([np.asarray(row["input_ids"]) for row in trained])
        losses["unigram frequencies"] = unigram_losses(tokens, vocab_size)
        notes.append("Unigram frequencies are counted in the training blocks, each token once more than it occurs.")
    for split, prefix in PREFIXES.items():
        if split not in examples:
            continue
        targets = _targets(examples[split])
        rows: list[tuple[str, list[Cell]]] = [("this model", [metrics.get(f"{prefix}_{key}") for key in _SCORES])]
        for name, of_token in losses.items():
            loss = float(of_token[targets].mean())
            # one of the equals: any guess of the uniform baseline is as good as any other
            is_uniform = bool(np.ptp(of_token) == 0)
            guessed = 1 / vocab_size if is_uniform else float(np.mean(targets == np.argmin(of_token)))
            rows.append((name, [loss, _perplexity(loss), _bits_per_byte(loss, texts[split]), guessed]))
        caption = f"Scores on the {split} split, {len(targets):,} tokens"
        tables.append(Table(caption, ("", *_SCORES.values()), rows, strong=0))
    return Section("Scores", tables, notes=notes if tables else ["No split was scored."])


def _targets(rows: Sequence[dict[str, Any]]) -> np.ndarray[Any, Any]:
    """The tokens that are scored."""
    labels = np.concatenate([np.asarray(row.get("labels", row["input_ids"]))[1:] for row in rows])
    return labels[labels != IGNORED_LABEL]


def _samples(trainer: CausalTrainer, examples: dict[str, Any]) -> Section:
    """The model goes on with the beginnings of blocks, taking the likeliest token each time."""
    split = next((name for name in reversed(PREFIXES) if name in examples), None)
    if split is None:
        return Section("Samples")
    title = f"Samples of the {split} split"
    if trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled:
        return Section(title, notes=["The model is spread over processes: one of them cannot generate alone."])
    model: Any = trainer.accelerator.unwrap_model(trainer.model).eval()
    tokenizer: Any = trainer.processing_class
    rows, samples = examples[split], []
    for row in choose_rows(len(rows), 3):
        ids = torch.as_tensor(np.asarray(rows[row]["input_ids"]), dtype=torch.long)
        read = max(1, min(_READ, len(ids) // 2))
        context, truth = ids[:read], ids[read : read + _WRITTEN]
        with torch.no_grad():
            written = model.generate(
                context[None].to(model.device),
                attention_mask=torch.ones_like(context[None]).to(model.device),
                max_new_tokens=len(truth),
                do_sample=False,
                pad_token_id=tokenizer.pad_token_id,
            )[0, read:]
        parts = {"context": context, "true continuation": truth, "generated": written}
        decoded = [(name, excerpt(tokenizer.decode(part))) for name, part in parts.items()]
        samples.append(Sample(decoded))
    note = f"Drawn at random; the likeliest token is taken each time, at most {_WRITTEN} of them."
    return Section(title, samples=samples, notes=[note])
