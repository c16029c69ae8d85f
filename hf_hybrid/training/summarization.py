"""Train, evaluate and apply a sequence-to-sequence model on summarization: ``run_summarization.py``.

Any `AutoModelForSeq2SeqLM` can be trained, from a checkpoint or from scratch; flags, output files and behaviour follow
transformers' example script of the same name. Where they differ: an output folder with another run in it is refused
instead of being resumed or written over, weights are loaded in float32, a tokenizer is trained when none is named, the
generated length defaults to ``--max_target_length``, and ROUGE is the plain mean over the examples instead of a
bootstrap estimate of it.
"""

import inspect
import logging
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

import numpy as np
import torch
from datasets import Dataset, DatasetDict
from tqdm.auto import tqdm
from transformers import (
    AutoModelForSeq2SeqLM,
    DataCollatorForSeq2Seq,
    EvalPrediction,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from hf_hybrid.data.columns import check_texts, summarization_columns
from hf_hybrid.data.preprocessing import IGNORED_LABEL, plain_baselines, split_sentences, tokenize_summarization
from hf_hybrid.metrics import load_metric
from hf_hybrid.training.adapters import attach_adapter, uses_adapter
from hf_hybrid.training.arguments import ModelArguments, SummarizationTrainingArguments
from hf_hybrid.training.command_line import given_flags, parse_arguments
from hf_hybrid.training.common import (
    asked_splits,
    check_best_metric,
    first_examples,
    load_datasets,
    map_rows,
    prepare_run,
    publish,
    require_splits,
    save_and_log,
    save_text,
    train,
    used_splits,
)
from hf_hybrid.training.data_arguments import PREFIXES, SummarizationArguments, check_split_sources
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
from hf_hybrid.training.output_folder import PREDICTIONS_FILE, REPORT_FILE, check_resumed_model, clear_output_folder
from hf_hybrid.training.report import Sample, Section, Table, excerpt
from hf_hybrid.training.run_report import choose_rows, guarded, write_report
from hf_hybrid.training.trainer import SummarizationTrainer

__all__ = ["CURVES", "load_splits", "main", "rouge_scores"]

logger = logging.getLogger(__name__)

_POSITIONS = {
    "max_position_embeddings": ("max_source_length", "max_target_length", "val_max_target_length"),
    "max_encoder_position_embeddings": ("max_source_length",),
    "max_decoder_position_embeddings": ("max_target_length", "val_max_target_length"),
}
"""Configuration fields that limit a length, and the flags that ask for one."""
_GENERATED_METRICS = ("rouge1", "rouge2", "rougeL", "rougeLsum", "gen_len")
_ROUGE_CHUNK = 200
_ROUGE = {"rouge1": "ROUGE-1", "rouge2": "ROUGE-2", "rougeL": "ROUGE-L", "rougeLsum": "ROUGE-Lsum"}
CURVES = {
    "Loss (nats per token)": {"loss": "training", "eval_loss": "validation"},
    "ROUGE on the validation split (%)": {f"eval_{key}": name for key, name in _ROUGE.items() if key != "rougeLsum"},
}
"""What is drawn over the steps: for each diagram, the logged metrics in it and what they are called."""


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
    model_args, data_args, training_args = parse_arguments(
        (ModelArguments, SummarizationArguments, SummarizationTrainingArguments), argv
    )
    check_split_sources(data_args, training_args)
    _check_evaluation(data_args, training_args)
    config = load_config(model_args, AutoModelForSeq2SeqLM, preset=data_args.default_preset)
    outputs = _outputs_without_training(training_args)
    resume_from = prepare_run(training_args, model_args, outputs=outputs)
    given = given_flags(argv)
    fit_learning_rate(training_args, model_args, data_args, config, given)
    resized_positions = fit_positions(
        config,
        AutoModelForSeq2SeqLM,
        {name: {flag: getattr(data_args, flag) for flag in flags} for name, flags in _POSITIONS.items()},
        new=model_args.model_name_or_path is None,
        permitted=data_args.resize_position_embeddings is not False and not uses_adapter(model_args),
    )
    tokenizer = load_tokenizer(model_args, config, resume_from)  # None: it is trained once there are data
    _check_tokens(tokenizer, data_args)
    if tokenizer is None:
        check_tokenizer_source(data_args)
    if model_args.init_from is None:
        check_resumed_model(config, resume_from, new=model_args.model_name_or_path is None)

    splits, *columns = load_splits(data_args, training_args, model_args)
    if tokenizer is None:
        tokenizer = train_new_tokenizer(model_args, config, splits.get("train"), columns)
    _check_room(tokenizer, data_args)
    model = load_model(
        model_args,
        AutoModelForSeq2SeqLM,
        config,
        tokenizer,
        seed=training_args.seed,
        may_add_weights=training_args.do_train,
    )
    if model_args.init_from is not None:
        check_resumed_model(model.config, resume_from, new=False)  # whether its head is tied, its weights have said
    if resized_positions is not None:
        model.resize_position_embeddings(resized_positions)
    _prepare_generation(model, tokenizer, data_args, training_args)

    datasets = {
        split: _tokenize(splits[split], split, tokenizer, columns, data_args, training_args)
        for split in asked_splits(training_args)
    }
    trainer = SummarizationTrainer(
        model=attach_adapter(model, model_args, training_args, resume_from, task_type="SEQ_2_SEQ_LM"),
        args=training_args,
        train_dataset=datasets.get("train"),
        eval_dataset=datasets.get("validation"),
        processing_class=tokenizer,
        data_collator=_collator(model, tokenizer, data_args, training_args),
        compute_metrics=partial(_compute_metrics, tokenizer) if training_args.predict_with_generate else None,
    )

    clear_output_folder(training_args, resume_from, outputs, model_args.model_name_or_path)
    metrics: dict[str, float] = {}
    evaluated: dict[str, Any] = {}
    if training_args.do_train:
        fit_logging_steps(trainer, resume_from, given)
        metrics |= train(trainer, resume_from)
    if training_args.do_eval:
        results = {**trainer.evaluate(metric_key_prefix="eval"), "eval_samples": len(datasets["validation"])}
        evaluated["validation"] = trainer.take_outputs()
        metrics |= results
        save_and_log(trainer, "eval", results)
    if training_args.do_predict:
        metrics |= _predict(trainer, datasets["test"], tokenizer)
        evaluated["test"] = trainer.take_outputs()
    guarded(
        REPORT_FILE,
        lambda: _report(trainer, model_args, data_args, argv, splits, columns, datasets, evaluated, metrics),
    )
    publish(trainer, model_args, data_args, task="summarization", metrics=metrics, argv=argv)
    return metrics


def _check_evaluation(data_args: SummarizationArguments, training_args: SummarizationTrainingArguments) -> None:
    """Check before training what Trainer looks at when it evaluates.

    Raises:
        ValueError: The metric that chooses a checkpoint does not exist, or there is no room to generate anything.
    """
    generated = training_args.predict_with_generate
    check_best_metric(training_args, ("loss", *(_GENERATED_METRICS if generated else ())))
    lengths = {
        "val_max_target_length": data_args.val_max_target_length,
        "generation_max_length": training_args.generation_max_length,
    }
    for flag, length in lengths.items():
        if generated and length == 1:
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


def _outputs_without_training(training_args: SummarizationTrainingArguments) -> list[str]:
    outputs = ["eval_results.json"] if training_args.do_eval else []
    if training_args.do_predict:
        outputs += ["predict_results.json", PREDICTIONS_FILE]
    return outputs


# ---- data ----


def load_splits(
    data_args: SummarizationArguments, training_args: SummarizationTrainingArguments, model_args: ModelArguments
) -> tuple[DatasetDict, str, str]:
    """Load the splits that a run needs, with a text and a summary in every row, and the names of the two columns.

    If a tokenizer is to be trained, the training split is there even when only evaluating, as far as there is one.

    Raises:
        ValueError: A split is missing that the run needs, or a column, or a row has no text or no summary.
    """
    raw = load_datasets(data_args, training_args, model_args)
    require_splits(raw, training_args)
    text_column, summary_column = summarization_columns(
        raw,
        dataset_name=data_args.dataset_name,
        text_column=data_args.text_column,
        summary_column=data_args.summary_column,
    )
    checked = {
        split: check_texts(raw[split], (text_column, summary_column), name=split, drop_empty=data_args.drop_empty_rows)
        for split in used_splits(raw, training_args, model_args)
    }
    return DatasetDict(checked), text_column, summary_column


def _tokenize(
    split: Dataset,
    name: str,
    tokenizer: PreTrainedTokenizerBase,
    columns: Sequence[str],
    data_args: SummarizationArguments,
    training_args: SummarizationTrainingArguments,
) -> Dataset:
    target_length = data_args.max_target_length if name == "train" else data_args.val_max_target_length
    return map_rows(
        first_examples(split, data_args.limits[name]),
        tokenize_summarization,
        {
            "tokenizer": tokenizer,
            "text_column": columns[0],
            "summary_column": columns[1],
            "max_source_length": data_args.max_source_length,
            "max_target_length": target_length,
            "source_prefix": data_args.source_prefix or "",
            "pad_to_max_length": data_args.pad_to_max_length,
            "ignore_pad_token_for_loss": data_args.ignore_pad_token_for_loss,
        },
        data_args,
        training_args,
        desc=f"Tokenizing {name}",
    )


def _collator(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    data_args: SummarizationArguments,
    training_args: SummarizationTrainingArguments,
) -> Callable[[list[dict[str, Any]]], Any]:
    collate = DataCollatorForSeq2Seq(
        tokenizer,
        model=model,
        label_pad_token_id=IGNORED_LABEL if data_args.ignore_pad_token_for_loss else tokenizer.pad_token_id,
        pad_to_multiple_of=8 if training_args.fp16 else None,
    )
    if "global_attention_mask" in inspect.signature(model.forward).parameters:
        return partial(_attend_globally_to_first_token, collate)
    return collate


def _attend_globally_to_first_token(collate: DataCollatorForSeq2Seq, examples: list[dict[str, Any]]) -> Any:
    """LED learns to summarize only if some token sees everything; by its authors' convention, the first one does."""
    batch = collate(examples)
    batch["global_attention_mask"] = torch.zeros_like(batch["input_ids"])
    batch["global_attention_mask"][:, 0] = 1
    return batch


# ---- the model's limits and its generation ----


def _check_tokens(tokenizer: PreTrainedTokenizerBase | None, data_args: SummarizationArguments) -> None:
    """Tell a multilingual tokenizer its language, and check the tokens that flags name.

    Args:
        tokenizer: The tokenizer; None where one is to be trained, which will know no such tokens.
        data_args: The data arguments.

    Raises:
        ValueError: A token is unknown, or a language is missing.
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
        tokenizer.src_lang = tokenizer.tgt_lang = lang  # type: ignore[attr-defined]
    if forced is not None and _token_id(tokenizer, forced) is None:
        raise ValueError(f"--forced_bos_token {forced!r} is not in the tokenizer's vocabulary")


def _token_id(tokenizer: PreTrainedTokenizerBase, token: str) -> int | None:
    """The id of a token; None if the tokenizer does not know it."""
    token_id: Any = tokenizer.convert_tokens_to_ids(token)
    return None if token_id == tokenizer.unk_token_id else token_id


def _prepare_generation(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    data_args: SummarizationArguments,
    training_args: SummarizationTrainingArguments,
) -> None:
    """Set the first token, the length and the beams of generation."""
    if model.config.model_type == "mbart" and hasattr(tokenizer, "src_lang") and data_args.lang is not None:
        model.config.decoder_start_token_id = _token_id(tokenizer, data_args.lang)
        model.generation_config.decoder_start_token_id = model.config.decoder_start_token_id
    if data_args.forced_bos_token is not None:
        model.generation_config.forced_bos_token_id = _token_id(tokenizer, data_args.forced_bos_token)
    if model.generation_config.max_length is None and model.generation_config.max_new_tokens is None:
        model.generation_config.max_length = data_args.val_max_target_length
        model.generation_config._from_model_config = False  # from now on it says more than the configuration
    if training_args.generation_max_length is None:
        training_args.generation_max_length = data_args.val_max_target_length
    if training_args.generation_num_beams is None:
        training_args.generation_num_beams = data_args.num_beams


# ---- scores and predictions ----


def rouge_scores(predictions: Sequence[str], references: Sequence[str]) -> dict[str, float]:
    """ROUGE-1, -2, -L and -Lsum in percent: the mean over the pairs, with stemming, rounded to four digits."""
    metric = load_metric("rouge")
    scores: dict[str, list[float]] = {}
    chunks = range(0, len(predictions), _ROUGE_CHUNK)
    for start in tqdm(chunks, desc="ROUGE", disable=len(chunks) < 3, leave=False):
        chunk = slice(start, start + _ROUGE_CHUNK)
        values = metric.compute(
            predictions=["\n".join(split_sentences(text.strip())) for text in predictions[chunk]],
            references=["\n".join(split_sentences(text.strip())) for text in references[chunk]],
            use_stemmer=True,
            use_aggregator=False,
        )
        for name, per_pair in values.items():
            scores.setdefault(name, []).extend(per_pair)
    return {name: round(100 * float(np.mean(per_pair)), 4) for name, per_pair in scores.items()}


def _decode(tokenizer: PreTrainedTokenizerBase, ids: Any) -> list[str]:
    ids = np.where(ids < 0, tokenizer.pad_token_id, ids)  # Trainer pads with -100 across batches
    return [text.strip() for text in tokenizer.batch_decode(ids, skip_special_tokens=True)]


def _ids(predictions: Any) -> Any:
    return predictions[0] if isinstance(predictions, tuple) else predictions


def _compute_metrics(tokenizer: PreTrainedTokenizerBase, prediction: EvalPrediction) -> dict[str, float]:
    ids = _ids(prediction.predictions)
    scores = rouge_scores(_decode(tokenizer, ids), _decode(tokenizer, prediction.label_ids))
    lengths = np.sum((ids != tokenizer.pad_token_id) & (ids >= 0), axis=1)
    return {**scores, "gen_len": round(float(np.mean(lengths)), 4)}


def _predict(trainer: SummarizationTrainer, dataset: Dataset, tokenizer: PreTrainedTokenizerBase) -> dict[str, float]:
    output = trainer.predict(dataset, metric_key_prefix="predict")
    metrics: dict[str, float] = {**(output.metrics or {}), "predict_samples": len(dataset)}
    save_and_log(trainer, "predict", metrics)
    if trainer.is_world_process_zero() and getattr(trainer.args, "predict_with_generate", False):
        # splitlines() knows more line ends than "\n": each prediction must stay on the line of its document
        lines = ["\\n".join(text.splitlines()) for text in _decode(tokenizer, output.predictions)]
        save_text(trainer, PREDICTIONS_FILE, "".join(line + "\n" for line in lines))
    return metrics


# ---- the report ----


def _report(
    trainer: SummarizationTrainer,
    model_args: ModelArguments,
    data_args: SummarizationArguments,
    argv: Sequence[str] | None,
    splits: DatasetDict,
    columns: Sequence[str],
    datasets: dict[str, Dataset],
    evaluated: dict[str, Any],
    metrics: dict[str, float],
) -> None:
    tokenizer: Any = trainer.processing_class

    @cache
    def texts() -> dict[str, dict[str, list[str]]]:
        """Documents, references and summaries of each split for which summaries were generated."""
        return {
            name: {
                "document": list(first_examples(splits[name], data_args.limits[name])[columns[0]]),
                "reference": _decode(tokenizer, outputs.label_ids),
                "generated": _decode(tokenizer, _ids(outputs.predictions)),
            }
            for name, outputs in evaluated.items()
            if outputs is not None
        }

    last = "predict" if trainer.args.do_predict else "eval"
    write_report(
        trainer,
        model_args,
        data_args,
        script="run_summarization.py",
        argv=argv,
        title="Summarization",
        sizes={name: f"{len(rows):,} documents" for name, rows in datasets.items()},
        metrics=metrics,
        tiles={f"{last}_{key}": f"{name} (%)" for key, name in _ROUGE.items()},
        curves=CURVES,
        parts={
            "scores": lambda: _score_tables(texts(), splits.get("train"), columns[1], metrics),
            "samples": lambda: _samples(texts()),
        },
    )


def _score_tables(
    texts: dict[str, dict[str, list[str]]], train: Dataset | None, summary_column: str, metrics: dict[str, float]
) -> Section:
    """The model's scores beside those of summaries that need no model, on the same references."""
    tables, notes = [], []
    pool = [] if train is None else list(train[summary_column])
    for split, of in texts.items():
        first = [(split_sentences(document) or [""])[0] for document in of["document"]]
        plain = {"first sentence of the document": first}
        plain |= plain_baselines(of["document"], pool) if pool else {}
        rows = [("this model", [metrics.get(f"{PREFIXES[split]}_{key}") for key in _ROUGE])]
        for name, summaries in plain.items():
            scores = rouge_scores(summaries, of["reference"])
            rows.append((name, [scores[key] for key in _ROUGE]))
        caption = f"ROUGE on the {split} split, {len(first):,} documents, in percent"
        tables.append(Table(caption, ("", *_ROUGE.values()), rows, strong=0))
    if not texts:
        notes.append("No summaries were generated (--predict_with_generate), so there are no scores of them.")
    else:
        notes.append(
            "References are cut off where those of the model are. The lead baseline is as long as the median training "
            "summary."
            if pool
            else "References are cut off where those of the model are. The training split was not read: no baselines "
            "come from it."
        )
    losses = {split: metrics[f"{prefix}_loss"] for split, prefix in PREFIXES.items() if f"{prefix}_loss" in metrics}
    if losses:
        rows = [(f"{split} split", [loss]) for split, loss in losses.items()]
        tables.append(Table("Loss, in nats per token of the references", ("", "this model"), rows))
    return Section("Scores", tables, notes=notes)


def _samples(texts: dict[str, dict[str, list[str]]]) -> Section:
    if not texts:
        return Section("Samples")
    split, of = list(texts.items())[-1]
    samples = [
        Sample([(name, excerpt(values[row])) for name, values in of.items()])
        for row in choose_rows(len(of["document"]))
    ]
    return Section(f"Samples of the {split} split", samples=samples, notes=["Drawn at random."])
