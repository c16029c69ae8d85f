"""Pre-train an encoder-decoder or an encoder on texts: ``python -m hf_hybrid.training pretrain``.

Parts of each text are hidden, and the model learns to restore them, as T5 does (span corruption), BART (text
infilling) or BERT (masked words). It trains any `AutoModelForSeq2SeqLM` or `AutoModelForMaskedLM`, from scratch or
from a checkpoint. Flags are named as in transformers' example scripts.
"""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from datasets import Dataset
from transformers import (
    AutoModelForMaskedLM,
    AutoModelForSeq2SeqLM,
    PreTrainedConfig,
    PreTrainedTokenizerBase,
)

from hf_hybrid.data.denoising import Denoiser, cut_into_pieces, most_spans
from hf_hybrid.data.tokenizer import add_mask_token, add_sentinels
from hf_hybrid.models.auto import ARCHITECTURES
from hf_hybrid.training.collating import packing_collator, sequence_collator
from hf_hybrid.training.flags.command_line import given_flags, parse_arguments
from hf_hybrid.training.flags.data import PREFIXES, PretrainArguments
from hf_hybrid.training.flags.model import ModelArguments
from hf_hybrid.training.flags.run import ScriptTrainingArguments
from hf_hybrid.training.model.adapters import attach_adapter
from hf_hybrid.training.model.config import fit_positions
from hf_hybrid.training.model.tokenizer import check_tokenizer_source, load_tokenizer, train_new_tokenizer
from hf_hybrid.training.model.weights import load_model
from hf_hybrid.training.report.pretrain import report
from hf_hybrid.training.run_folder.output_folder import clear_output_folder, result_files
from hf_hybrid.training.run_folder.resume import ExamplesRecord, check_resumed_examples, check_resumed_model
from hf_hybrid.training.scores.pretrain import METRICS, compute_metrics, scores_by_example
from hf_hybrid.training.splits import asked_splits
from hf_hybrid.training.steps import begin, finish, save_and_log, train
from hf_hybrid.training.texts import check_streaming, comes_from_text_file, load_splits, tokenize_split
from hf_hybrid.training.trainer.noisy_data import (
    DIGESTED,
    NoiseOfEpoch,
    NoisyRows,
    NoisyStream,
    Row,
    StoredRows,
    make_rows,
)
from hf_hybrid.training.trainer.script_trainer import ScriptTrainer

logger = logging.getLogger(__name__)

_ENCODER = {"is_decoder": False, "is_encoder_decoder": False}
_POSITIONS = ("max_position_embeddings", "max_encoder_position_embeddings", "max_decoder_position_embeddings")
_DEFAULT_LENGTH = 512
_SENTINELS = 100
"""The fewest sentinels that a tokenizer gets: T5's number."""
_PACKING_PAIRS = ("spade",)
_PACKING_ENCODERS = tuple(name for name, (_, classes) in ARCHITECTURES.items() if "AutoModelForMaskedLM" in classes)
"""Architectures that keep packed pieces apart: encoder-decoders and encoders."""
_NEW_FRAME = 1
"""Special tokens that a tokenizer puts around a text if it is trained on the data: the end token."""


def main(argv: Sequence[str] | None = None) -> dict[str, float]:
    """Run the script.

    Args:
        argv: The command line without the program's name; `sys.argv` when None. ``--help`` lists the flags.

    Returns:
        The metrics of everything that was done, as in ``all_results.json``: ``train_loss``, ``eval_loss``, ...

    Raises:
        ValueError: A flag, a file or a folder cannot be used. All flags are checked before any work starts.
        KeyboardInterrupt: Training was stopped with Ctrl-C, after saving a checkpoint.
    """
    groups = (ModelArguments, PretrainArguments, ScriptTrainingArguments)
    model_args, data_args, training_args = parse_arguments(groups, argv)
    is_pair = data_args.is_pair
    auto_class = AutoModelForSeq2SeqLM if is_pair else AutoModelForMaskedLM
    _fit_arguments(data_args, training_args, argv)
    outputs, role = result_files(training_args), None if is_pair else _ENCODER
    config, resume_from = begin(
        argv, model_args, data_args, training_args, auto_class, metrics=METRICS, outputs=outputs, role=role
    )
    _check_model(config, data_args)
    positions = fit_positions(model_args, config, auto_class, _fit_lengths(config, data_args))
    facts = _facts(data_args, training_args)
    check_resumed_examples(facts, resume_from)
    add_tokens = partial(_add_tokens, data_args)
    tokenizer = load_tokenizer(model_args, config, resume_from, complete=add_tokens)  # None: train it on the data
    check_tokenizer_source(tokenizer, data_args)
    if data_args.streaming:
        check_streaming(tokenizer, data_args, training_args)
        _check_validation_of_stream(data_args, training_args)
    _size(_NEW_FRAME if tokenizer is None else _denoiser(tokenizer, data_args).frame, data_args)
    if model_args.init_from is None:
        check_resumed_model(config, resume_from, new=model_args.is_new)

    splits, column, held_out = load_splits(data_args, training_args, model_args)
    if tokenizer is None:
        tokenizer = train_new_tokenizer(model_args, config, splits.get("train"), [column], complete=add_tokens)
    denoise = _denoiser(tokenizer, data_args)
    asked = asked_splits(training_args)
    examples = {name: _examples(splits, name, tokenizer, column, denoise, data_args, training_args) for name in asked}
    if (rows := examples.get("train")) is not None:
        facts |= _facts_of_rows(rows, held_out)
        check_resumed_examples(facts, resume_from)
    model = load_model(model_args, training_args, auto_class, config, tokenizer, resume_from, positions)
    collate = _collator(model, tokenizer, data_args, training_args)
    peft_task = "SEQ_2_SEQ_LM" if is_pair else None
    adapted = attach_adapter(model, model_args, training_args, resume_from, task_type=peft_task)
    trainer = _trainer(adapted, training_args, examples, tokenizer, collate, facts)

    clear_output_folder(training_args, resume_from, outputs, model_args.model_name_or_path)
    metrics = train(trainer, resume_from, argv) if training_args.do_train else {}
    metrics |= _evaluate(trainer, examples)
    shown = partial(report, trainer, examples, metrics)
    task = "text2text-generation" if is_pair else "fill-mask"
    finish(trainer, model_args, data_args, argv, task=task, metrics=metrics, report=shown)
    return metrics


# ---- flags ----


def _fit_arguments(
    data_args: PretrainArguments, training_args: ScriptTrainingArguments, argv: Sequence[str] | None
) -> None:
    """Put pieces of similar length together and compute in bfloat16 by default; let each process read a stream."""
    if "train_sampling_strategy" not in given_flags(argv) and not data_args.streaming:
        training_args.train_sampling_strategy = "random" if data_args.packing else "group_by_length"
    if not given_flags(argv) & {"bf16", "fp16"}:
        training_args.use_bfloat16_where_it_is_fast()
    if data_args.packing:
        training_args.remove_unused_columns = False  # the collator reads one that is not the model's
        if training_args.context_parallel_size > 1 and data_args.is_pair:
            raise ValueError(
                "--packing with --context_parallel_size needs --objective masked_words: packed pairs are not divided; "
                f"got {data_args.objective}"
            )
        rows = max(training_args.per_device_train_batch_size, training_args.per_device_eval_batch_size)
        if training_args.context_parallel_size > 1 and rows > 1:
            raise ValueError(
                "--packing with --context_parallel_size needs --per_device_train_batch_size 1 and "
                f"--per_device_eval_batch_size 1: one row of packed pieces is divided; got {rows}"
            )
    if data_args.streaming:
        order = training_args.train_sampling_strategy
        if "train_sampling_strategy" in given_flags(argv) and order != "sequential":
            raise ValueError(
                "--train_sampling_strategy must be sequential or left out with --streaming, which keeps the order of "
                f"its files; got {order}"
            )
        if training_args.dataloader_num_workers > 1:
            raise ValueError(
                "--dataloader_num_workers must be 0 or 1 with --streaming: one reader numbers the pieces; got "
                f"{training_args.dataloader_num_workers}"
            )
        # accelerate would join batches of several processes, which differ in length, to divide them
        accelerator_config: Any = training_args.accelerator_config
        accelerator_config.dispatch_batches = False


def _check_model(config: PreTrainedConfig, data_args: PretrainArguments) -> None:
    """Raise a ValueError if the model cannot take the objective, or packed rows."""
    able = _PACKING_PAIRS if data_args.is_pair else _PACKING_ENCODERS
    if data_args.packing and config.model_type not in able:
        raise ValueError(
            f"--packing with --objective {data_args.objective} needs a model that keeps packed pieces apart "
            f"({' or '.join(able)}); got {config.model_type}"
        )
    if data_args.is_pair:
        return
    mapping, pairs = AutoModelForMaskedLM._model_mapping, AutoModelForSeq2SeqLM._model_mapping
    known: Any = type(config) if type(config) in mapping and type(config) in pairs else None
    if config.is_encoder_decoder or (known and mapping[known] is pairs[known]):
        raise ValueError(
            f"--objective masked_words needs an encoder; {config.model_type} is an encoder-decoder: give "
            "--objective span_corruption or text_infilling"
        )


def _fit_lengths(config: PreTrainedConfig, data_args: PretrainArguments) -> dict[str, dict[str, int]]:
    """Choose the length of pieces if it is not given, and return the lengths that the model's positions must have."""
    if data_args.max_seq_length is None:
        limits = [limit for name in _POSITIONS if isinstance(limit := getattr(config, name, None), int)]
        data_args.max_seq_length = min([_DEFAULT_LENGTH, *limits])
    return {name: {"max_seq_length": data_args.max_seq_length} for name in _POSITIONS}


def _noise_seed(training_args: ScriptTrainingArguments) -> int:
    return training_args.seed if training_args.data_seed is None else training_args.data_seed


def _facts(data_args: PretrainArguments, training_args: ScriptTrainingArguments) -> dict[str, Any]:
    """Return what decides the examples of each step, defaults filled in: a resumed run must have the same."""
    facts = {
        "--objective": data_args.objective,
        "--noise_density": data_args.density,
        "--mean_noise_span_length": data_args.mean_length,
        "--max_seq_length": data_args.max_seq_length,
        "--packing": data_args.packing,
        "--streaming": data_args.streaming,
        "--data_seed": _noise_seed(training_args),
        "the number of examples in a step (--per_device_train_batch_size times --gradient_accumulation_steps times "
        "processes)": training_args.train_batch_size
        * training_args.gradient_accumulation_steps
        * training_args.replicas,
    }
    if not data_args.streaming:  # what is stored is compared itself
        return facts | {"--train_sampling_strategy": training_args.train_sampling_strategy}
    facts["--max_train_samples"] = data_args.limits["train"]
    name = data_args.dataset_name
    facts["--dataset_name"] = Path(name).name if name is not None and Path(name).is_dir() else name
    facts["--dataset_config_name"] = data_args.dataset_config_name
    if (path := data_args.files.get("train")) is not None:
        facts["the name and size of --train_file"] = [Path(path).name, Path(path).stat().st_size]
    return facts


def _facts_of_rows(rows: NoisyRows | NoisyStream, held_out: int) -> dict[str, Any]:
    """Return what tells the training rows from others: of a stream the first ones, and what is left out of all."""
    if isinstance(rows, NoisyRows):
        return {"the number of training rows": len(rows), "the digest of the training rows": rows.digest()}
    return {
        "the percentage of training rows that is cut off for validation (--validation_split_percentage, and 0 without "
        "--do_eval or with a validation split)": held_out,
        f"the digest of the first {DIGESTED} rows": rows.digest(),
    }


def _add_tokens(data_args: PretrainArguments, tokenizer: PreTrainedTokenizerBase) -> None:
    """Add the special tokens of the objective that a tokenizer lacks."""
    if data_args.objective == "span_corruption":
        longest = max(2, data_args.max_seq_length or 0)
        most = most_spans(longest, density=data_args.density, mean_length=data_args.mean_length)
        added = add_sentinels(tokenizer, max(_SENTINELS, most))
    else:
        added = add_mask_token(tokenizer)
    if added:
        named = added[0] if len(added) == 1 else f"{added[0]} to {added[-1]}"
        logger.info("--objective %s: the tokenizer gets %s.", data_args.objective, named)


def _check_validation_of_stream(data_args: PretrainArguments, training_args: ScriptTrainingArguments) -> None:
    """Raise a ValueError if a validation split would be cut from all of a stream, or out of the midst of a text."""
    if not training_args.do_eval or "validation" in data_args.files:
        return
    if comes_from_text_file("train", data_args):
        raise ValueError("--streaming of a txt file needs --validation_file for --do_eval: it is one text; got none")
    if data_args.max_eval_samples is None:
        raise ValueError(
            "--streaming needs --validation_file or --max_eval_samples for --do_eval, or all of the stream is read to "
            "divide it; got neither"
        )


# ---- data ----


def _size(frame: int, data_args: PretrainArguments) -> int:
    """Return the tokens of a text in a piece beside special ones, or raise a ValueError if there is room for none."""
    size = (data_args.max_seq_length or 0) - frame
    if size < 2:
        raise ValueError(
            f"--max_seq_length must exceed the {frame} special tokens of the tokenizer by at least 2; got "
            f"{data_args.max_seq_length}"
        )
    return size


def _denoiser(tokenizer: PreTrainedTokenizerBase, data_args: PretrainArguments) -> Denoiser:
    return Denoiser.of(tokenizer, data_args.objective, data_args.density, data_args.mean_length)


def _examples(
    splits: Mapping[str, Any],
    name: str,
    tokenizer: PreTrainedTokenizerBase,
    column: str,
    denoise: Denoiser,
    data_args: PretrainArguments,
    training_args: ScriptTrainingArguments,
) -> NoisyRows | NoisyStream:
    """Return rows of pieces with their noise; what is scored has the same noise in every run.

    The tokenizer's special tokens are put around each piece, not around a document.
    """
    size = _size(denoise.frame, data_args)
    tokens = tokenize_split(
        splits[name], name, tokenizer, column, data_args, training_args, are_lines=True, as_text=True
    )
    joined = comes_from_text_file(name, data_args)
    packed = data_args.max_seq_length if data_args.packing else None
    limit, seed = data_args.limits[name], _noise_seed(training_args) if name == "train" else 0

    def read() -> Iterator[Row]:
        documents = (np.asarray(row["input_ids"], dtype=np.int32) for row in tokens)
        pieces = filter(denoise.takes, cut_into_pieces(documents, size, joined=joined))
        return islice(make_rows(pieces, packed, denoise.frame), limit)

    examples: NoisyRows | NoisyStream
    if isinstance(tokens, Dataset):
        examples = NoisyRows(_stored_rows(tokens, size, packed, denoise, limit, joined=joined), denoise, seed)
    elif name == "train":
        examples = NoisyStream(read, denoise, seed)
    else:
        examples = NoisyRows(list(read()), denoise, seed)
    if not (examples.first if isinstance(examples, NoisyStream) else examples.rows):
        raise ValueError(f"split {name!r} must hold a text of at least two tokens; got none")
    return examples


def _stored_rows(
    tokens: Dataset, size: int, packed: int | None, denoise: Denoiser, limit: int | None, *, joined: bool
) -> StoredRows:
    """Return the rows that a stream of the same texts has; their tokens stay in the file, unless they are joined."""
    chunks = tokens.data.column("input_ids").chunks
    sources = [chunk.flatten().to_numpy() for chunk in chunks]
    lengths = [chunk.value_lengths().to_numpy() for chunk in chunks]
    if joined:
        sources = [np.concatenate(sources)]
        lengths = [np.array([len(sources[0])])]

    def places() -> Iterator[range]:
        before = 0
        for source, own in zip(sources, lengths, strict=True):
            ends = np.cumsum(own, dtype=np.int64)
            documents = map(range, (ends - own).tolist(), ends.tolist())
            for place in cut_into_pieces(documents, size):
                if denoise.takes(source[place.start : place.stop]):
                    yield range(before + place.start, before + place.stop)
            before += len(source)

    return StoredRows(sources, islice(make_rows(places(), packed, denoise.frame), limit))


def _collator(
    model: Any,
    tokenizer: PreTrainedTokenizerBase,
    data_args: PretrainArguments,
    training_args: ScriptTrainingArguments,
) -> Callable[[list[dict[str, Any]]], Any]:
    if data_args.packing:
        size = None if data_args.is_pair else data_args.max_seq_length  # noise changes the lengths of a pair
        return packing_collator(tokenizer.pad_token_id, size, is_pair=data_args.is_pair)
    return sequence_collator(model, tokenizer, training_args)


def _trainer(
    model: Any,
    training_args: ScriptTrainingArguments,
    examples: Mapping[str, NoisyRows | NoisyStream],
    tokenizer: PreTrainedTokenizerBase,
    collate: Callable[[list[dict[str, Any]]], Any],
    facts: Mapping[str, Any],
) -> ScriptTrainer:
    rows = examples.get("train")
    noise = [NoiseOfEpoch(rows)] if isinstance(rows, NoisyRows) else []
    return ScriptTrainer(
        model=model,
        args=training_args,
        train_dataset=rows,
        eval_dataset=examples.get("validation"),
        processing_class=tokenizer,
        data_collator=collate,
        compute_metrics=compute_metrics,
        preprocess_logits_for_metrics=partial(scores_by_example, tokenizer),
        callbacks=[*noise, ExamplesRecord(facts)],
    )


def _evaluate(trainer: ScriptTrainer, examples: dict[str, Any]) -> dict[str, float]:
    metrics: dict[str, float] = {}
    for split, prefix in PREFIXES.items():
        if split in examples:
            results: dict[str, float] = trainer.evaluate(examples[split], metric_key_prefix=prefix)
            results[f"{prefix}_samples"] = len(examples[split])
            save_and_log(trainer, prefix, results)
            metrics |= results
    return metrics
