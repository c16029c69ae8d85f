"""Train, evaluate and apply a sequence-to-sequence model on summarization: ``run_summarization.py``.

It trains any `AutoModelForSeq2SeqLM`, from a checkpoint or from scratch; flags, output files and behaviour follow
transformers' example script of the same name. The differences: it refuses an output folder with another run instead of
resuming or overwriting it, loads weights in float32, trains a tokenizer if none is named, generates up to
``--max_target_length`` by default, and computes ROUGE as the mean over the examples instead of a bootstrap estimate.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

from datasets import Dataset, DatasetDict
from transformers import AutoModelForSeq2SeqLM, PreTrainedModel, PreTrainedTokenizerBase

from hf_hybrid.data.columns import check_texts, is_blank, summarization_columns
from hf_hybrid.data.preprocessing import tokenize_summarization
from hf_hybrid.training.collating import sequence_collator
from hf_hybrid.training.flags.command_line import parse_arguments
from hf_hybrid.training.flags.data import SPLITS, SummarizationArguments
from hf_hybrid.training.flags.model import ModelArguments
from hf_hybrid.training.flags.run import SummarizationTrainingArguments
from hf_hybrid.training.model.adapters import attach_adapter
from hf_hybrid.training.model.config import fit_positions
from hf_hybrid.training.model.tokenizer import check_tokenizer_source, load_tokenizer, train_new_tokenizer
from hf_hybrid.training.model.weights import load_model
from hf_hybrid.training.report.summarization import report
from hf_hybrid.training.run_folder.files import PREDICTIONS_FILE
from hf_hybrid.training.run_folder.output_folder import clear_output_folder, result_files
from hf_hybrid.training.run_folder.resume import check_resumed_model
from hf_hybrid.training.scores.summarization import GENERATED_METRICS, METRICS, compute_metrics, decode
from hf_hybrid.training.splits import asked_splits, first_examples, load_datasets, map_rows, used_splits
from hf_hybrid.training.steps import begin, finish, save_and_log, save_text, train
from hf_hybrid.training.trainer.script_trainer import SummarizationTrainer

_POSITIONS = {
    "max_position_embeddings": ("max_source_length", "max_target_length", "val_max_target_length"),
    "max_encoder_position_embeddings": ("max_source_length",),
    "max_decoder_position_embeddings": ("max_target_length", "val_max_target_length"),
}
"""Configuration fields that limit a length, and the flags that set one."""


def main(argv: Sequence[str] | None = None) -> dict[str, float]:
    """Run the script.

    Args:
        argv: The command line without the program's name; `sys.argv` when None. ``--help`` lists the flags.

    Returns:
        The metrics of everything that was done, as in ``all_results.json``: ``train_loss``, ``eval_rouge1``, ...

    Raises:
        ValueError: A flag, a file or a folder cannot be used. All flags are checked before any work starts.
        KeyboardInterrupt: Training was stopped with Ctrl-C, after saving a checkpoint.
    """
    groups = (ModelArguments, SummarizationArguments, SummarizationTrainingArguments)
    model_args, data_args, training_args = parse_arguments(groups, argv)
    _check_generated_length(data_args, training_args)
    reported = (*METRICS, *GENERATED_METRICS) if training_args.predict_with_generate else METRICS
    outputs = result_files(training_args, PREDICTIONS_FILE)
    config, resume_from = begin(
        argv, model_args, data_args, training_args, AutoModelForSeq2SeqLM, metrics=reported, outputs=outputs
    )
    lengths = {name: {flag: getattr(data_args, flag) for flag in flags} for name, flags in _POSITIONS.items()}
    may_resize = data_args.resize_position_embeddings is not False
    positions = fit_positions(model_args, config, AutoModelForSeq2SeqLM, lengths, permitted=may_resize)
    tokenizer = load_tokenizer(model_args, config, resume_from)  # None: train it once data are loaded
    _check_tokens(tokenizer, data_args)
    check_tokenizer_source(tokenizer, data_args)
    if model_args.init_from is None:
        check_resumed_model(config, resume_from, new=model_args.is_new)

    splits, *columns = load_splits(data_args, training_args, model_args)
    if tokenizer is None:
        tokenizer = train_new_tokenizer(model_args, config, splits.get("train"), [name for name in columns if name])
    _check_room(tokenizer, data_args)
    model = load_model(model_args, training_args, AutoModelForSeq2SeqLM, config, tokenizer, resume_from, positions)
    _prepare_generation(model, tokenizer, data_args, training_args)
    asked = asked_splits(training_args)
    datasets = {name: _tokenize(splits[name], name, tokenizer, columns, data_args, training_args) for name in asked}
    trainer = SummarizationTrainer(
        model=attach_adapter(model, model_args, training_args, resume_from, task_type="SEQ_2_SEQ_LM"),
        args=training_args,
        train_dataset=datasets.get("train"),
        eval_dataset=datasets.get("validation"),
        processing_class=tokenizer,
        data_collator=sequence_collator(
            model, tokenizer, training_args, ignores_padding=data_args.ignore_pad_token_for_loss
        ),
        compute_metrics=partial(compute_metrics, tokenizer) if training_args.predict_with_generate else None,
    )

    clear_output_folder(training_args, resume_from, outputs, model_args.model_name_or_path)
    metrics = train(trainer, resume_from, argv) if training_args.do_train else {}
    evaluated: dict[str, Any] = {}
    if training_args.do_eval:
        metrics |= _evaluate(trainer, evaluated, len(datasets["validation"]))
    if training_args.do_predict:
        metrics |= _predict(trainer, evaluated, datasets["test"], tokenizer)
    shown = partial(report, trainer, data_args, splits, columns, datasets, evaluated, metrics)
    finish(trainer, model_args, data_args, argv, task="summarization", metrics=metrics, report=shown)
    return metrics


def _check_generated_length(data_args: SummarizationArguments, training_args: SummarizationTrainingArguments) -> None:
    """Raise a ValueError if there is no room to generate anything."""
    for arguments, flag in ((data_args, "val_max_target_length"), (training_args, "generation_max_length")):
        if training_args.predict_with_generate and getattr(arguments, flag) == 1:
            raise ValueError(
                f"--{flag} must be at least 2 with --predict_with_generate: a start token and one more; got 1"
            )


def _check_room(tokenizer: PreTrainedTokenizerBase, data_args: SummarizationArguments) -> None:
    """Raise a ValueError if ``--max_source_length`` leaves nothing of any document."""
    taken = len(tokenizer(data_args.source_prefix or "")["input_ids"])
    if data_args.max_source_length <= taken:
        raise ValueError(
            f"--max_source_length must exceed the {taken} tokens that --source_prefix and special tokens take; "
            f"got {data_args.max_source_length}"
        )


# ---- data ----


def load_splits(
    data_args: SummarizationArguments, training_args: SummarizationTrainingArguments, model_args: ModelArguments
) -> tuple[DatasetDict, str, str | None]:
    """Load the splits that a run needs, with a text and a summary in every row, and the names of the two columns.

    To train a tokenizer, load the training split if there is one, even if the run only evaluates. The test split may
    have no summaries; it then has no such column, which is None if no split has it.

    Raises:
        ValueError: A split or a column that the run needs is missing, or a row has no text or no summary.
    """
    raw = load_datasets(data_args, training_args, model_args)
    used = used_splits(raw, training_args, model_args)
    test = SPLITS["do_predict"]
    text_column, summary_column = summarization_columns(
        raw,
        dataset_name=data_args.dataset_name,
        text_column=data_args.text_column,
        summary_column=data_args.summary_column,
        unscored=test,
    )
    checked = DatasetDict()
    for split in used:
        rows, columns = raw[split], [text_column]
        if summary_column is not None and summary_column in rows.column_names:
            if split == test and all(is_blank(value) for value in rows[summary_column]):
                rows = rows.remove_columns(summary_column)
            else:
                columns.append(summary_column)
        checked[split] = check_texts(rows, columns, name=split, drop_empty=data_args.drop_empty_rows)
    if test in used and summary_column not in checked[test].column_names and not training_args.predict_with_generate:
        raise ValueError("--do_predict needs --predict_with_generate: the test split has no summaries to give a loss")
    return checked, text_column, summary_column


def _tokenize(
    split: Dataset,
    name: str,
    tokenizer: PreTrainedTokenizerBase,
    columns: Sequence[str | None],
    data_args: SummarizationArguments,
    training_args: SummarizationTrainingArguments,
) -> Dataset:
    return map_rows(
        first_examples(split, data_args.limits[name]),
        tokenize_summarization,
        {
            "tokenizer": tokenizer,
            "text_column": columns[0],
            "summary_column": columns[1] if columns[1] in split.column_names else None,
            "max_source_length": data_args.max_source_length,
            "max_target_length": data_args.max_target_length if name == "train" else data_args.val_max_target_length,
            "source_prefix": data_args.source_prefix or "",
            "pad_to_max_length": data_args.pad_to_max_length,
            "ignore_pad_token_for_loss": data_args.ignore_pad_token_for_loss,
        },
        data_args,
        training_args,
        desc=f"Tokenizing {name}",
    )


# ---- tokens and generation ----


def _check_tokens(tokenizer: Any, data_args: SummarizationArguments) -> None:
    """Set the language of a multilingual tokenizer, and check the tokens that flags name.

    A tokenizer that must still be trained, here None, will not know such tokens.
    """
    lang, forced = data_args.lang, data_args.forced_bos_token
    if tokenizer is None:
        for flag, token in (("lang", lang), ("forced_bos_token", forced)):
            if token is not None:
                raise ValueError(f"--{flag} {token} needs a tokenizer that knows this token: give --tokenizer_name")
        return
    if hasattr(tokenizer, "src_lang"):
        if lang is None:
            raise ValueError(f"--lang is required with {type(tokenizer).__name__}, which serves many languages")
        if _token_id(tokenizer, lang) is None:
            raise ValueError(f"--lang {lang} is no language of {type(tokenizer).__name__}")
        tokenizer.src_lang = tokenizer.tgt_lang = lang
    if forced is not None and _token_id(tokenizer, forced) is None:
        raise ValueError(f"--forced_bos_token {forced!r} is not in the tokenizer's vocabulary")


def _token_id(tokenizer: PreTrainedTokenizerBase, token: str) -> int | None:
    """Return the id of a token; None if the tokenizer does not know it."""
    token_id: Any = tokenizer.convert_tokens_to_ids(token)
    return None if token_id == tokenizer.unk_token_id else token_id


def _prepare_generation(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    data_args: SummarizationArguments,
    training_args: SummarizationTrainingArguments,
) -> None:
    """Set the first token, the length, the beams and the repetitions of generation, and write down the prefix."""
    tasks = dict(getattr(model.config, "task_specific_params", None) or {})
    task = tasks.get("summarization") or {}
    if data_args.source_prefix is not None or "prefix" in task:  # where T5 has it, and `hf-hybrid summarize` looks
        tasks["summarization"] = {**task, "prefix": data_args.source_prefix or ""}
        model.config.task_specific_params = tasks
    if model.config.model_type == "mbart" and hasattr(tokenizer, "src_lang") and data_args.lang is not None:
        model.config.decoder_start_token_id = _token_id(tokenizer, data_args.lang)
        model.generation_config.decoder_start_token_id = model.config.decoder_start_token_id
    if data_args.forced_bos_token is not None:
        model.generation_config.forced_bos_token_id = _token_id(tokenizer, data_args.forced_bos_token)
    if model.generation_config.max_length is None and model.generation_config.max_new_tokens is None:
        model.generation_config.max_length = data_args.val_max_target_length
    if data_args.no_repeat_ngram_size is not None:
        model.generation_config.no_repeat_ngram_size = data_args.no_repeat_ngram_size
    model.generation_config._from_model_config = False  # it may now hold more than the configuration
    if training_args.generation_max_length is None:
        training_args.generation_max_length = data_args.val_max_target_length
    if training_args.generation_num_beams is None:
        training_args.generation_num_beams = data_args.num_beams


# ---- evaluation and predictions ----


def _evaluate(trainer: SummarizationTrainer, evaluated: dict[str, Any], count: int) -> dict[str, float]:
    metrics: dict[str, float] = {**trainer.evaluate(metric_key_prefix="eval"), "eval_samples": count}
    evaluated["validation"] = trainer.take_outputs()
    save_and_log(trainer, "eval", metrics)
    return metrics


def _predict(
    trainer: SummarizationTrainer, evaluated: dict[str, Any], dataset: Dataset, tokenizer: PreTrainedTokenizerBase
) -> dict[str, float]:
    output = trainer.predict(dataset, metric_key_prefix="predict")
    metrics: dict[str, float] = {**(output.metrics or {}), "predict_samples": len(dataset)}
    evaluated["test"] = trainer.take_outputs()
    save_and_log(trainer, "predict", metrics)
    if trainer.is_world_process_zero() and trainer.args.predict_with_generate:
        # splitlines() also splits at other line ends than "\n": each prediction must stay on one line
        lines = ["\\n".join(text.splitlines()) for text in decode(tokenizer, output.predictions)]
        save_text(trainer, PREDICTIONS_FILE, "".join(line + "\n" for line in lines))
    return metrics
