"""Train, evaluate and apply a sentence classifier on GLUE or on other labelled sentences: ``run_glue.py``.

It trains any `AutoModelForSequenceClassification`, from a checkpoint or from scratch; flags, output files and
behaviour follow transformers' example script of the same name. The differences: it reads the data of a task from files
too, scores without a network, scores a test split that has labels, refuses an output folder with another run instead
of resuming or overwriting it, and stops with an error at what could silently be wrong: a label that is not in the
training split, ambiguous columns, a checkpoint with other labels.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

from datasets import ClassLabel, Dataset, DatasetDict
from transformers import AutoModelForSequenceClassification, DataCollatorWithPadding, PreTrainedTokenizerBase

from hf_hybrid.data.classification import (
    GLUE_TASKS,
    Label,
    Labels,
    find_labels,
    is_unlabelled,
    label_column,
    read_labels,
    sentence_columns,
)
from hf_hybrid.data.columns import check_texts
from hf_hybrid.data.loading import embedded_name
from hf_hybrid.data.preprocessing import tokenize_sentences
from hf_hybrid.training.flags.command_line import parse_arguments
from hf_hybrid.training.flags.data import GlueArguments
from hf_hybrid.training.flags.model import ModelArguments
from hf_hybrid.training.flags.run import ScriptTrainingArguments
from hf_hybrid.training.model.adapters import attach_adapter
from hf_hybrid.training.model.config import fit_positions
from hf_hybrid.training.model.labels import settle_labels
from hf_hybrid.training.model.tokenizer import check_tokenizer_source, load_tokenizer, train_new_tokenizer
from hf_hybrid.training.model.weights import load_model
from hf_hybrid.training.report.glue import report
from hf_hybrid.training.run_folder.output_folder import clear_output_folder, result_files
from hf_hybrid.training.run_folder.resume import check_resumed_model
from hf_hybrid.training.scores.glue import SECOND, compute_metrics, mark_second, outputs_of, score_names
from hf_hybrid.training.splits import asked_splits, first_examples, load_datasets, map_rows, used_splits
from hf_hybrid.training.steps import begin, finish, save_and_log, save_text, train
from hf_hybrid.training.trainer.script_trainer import ScriptTrainer


def main(argv: Sequence[str] | None = None) -> dict[str, float]:
    """Run the script.

    Args:
        argv: The command line without the program's name; `sys.argv` when None. ``--help`` lists the flags.

    Returns:
        The metrics of everything that was done, as in ``all_results.json``: ``train_loss``, ``eval_accuracy``, ...

    Raises:
        ValueError: A flag, a file or a folder cannot be used. All flags are checked before any work starts.
        KeyboardInterrupt: Training was stopped with Ctrl-C, after saving a checkpoint.
    """
    groups = (ModelArguments, GlueArguments, ScriptTrainingArguments)
    model_args, data_args, training_args = parse_arguments(groups, argv)
    auto_class, reported = AutoModelForSequenceClassification, score_names(data_args.task_name)
    predictions = [_predictions_file(data_args, split) for split in ("test", f"test{SECOND}")]
    outputs = result_files(training_args, *predictions)
    config, resume_from = begin(
        argv, model_args, data_args, training_args, auto_class, metrics=reported, outputs=outputs
    )
    lengths = {"max_position_embeddings": {"max_seq_length": data_args.max_seq_length}}
    positions = fit_positions(model_args, config, auto_class, lengths)
    tokenizer = load_tokenizer(model_args, config, resume_from)  # None: train it once data are loaded
    check_tokenizer_source(tokenizer, data_args)

    splits, columns, values, found = load_splits(data_args, training_args, model_args)
    labels = settle_labels(config, found, model_args, training_args)
    ids = {name: labels.encode(members, name=name) for name, members in values.items()}
    if model_args.init_from is None:
        check_resumed_model(config, resume_from, new=model_args.is_new, encoder_alone=True)
    if tokenizer is None:
        tokenizer = train_new_tokenizer(model_args, config, splits.get("train"), columns)
    settled = (model_args, training_args, auto_class, config, tokenizer, resume_from, positions)
    model = load_model(*settled, ignore_mismatched_sizes=data_args.ignore_mismatched_sizes)
    if model.config.pad_token_id is None:  # decoders need it to find a sequence's last token
        model.config.pad_token_id = tokenizer.pad_token_id
    datasets = _tokenize(splits, columns, ids, tokenizer, data_args, training_args)
    trainer = ScriptTrainer(
        model=attach_adapter(model, model_args, training_args, resume_from, task_type="SEQ_CLS"),
        args=training_args,
        train_dataset=datasets.get("train"),
        eval_dataset=datasets.get("validation"),
        processing_class=tokenizer,
        data_collator=DataCollatorWithPadding(tokenizer, pad_to_multiple_of=8 if training_args.fp16 else None),
        compute_metrics=partial(compute_metrics, data_args.task_name, labels),
    )

    clear_output_folder(training_args, resume_from, outputs, model_args.model_name_or_path)
    metrics = train(trainer, resume_from, argv) if training_args.do_train else {}
    evaluated: dict[str, Any] = {}
    if training_args.do_eval:
        metrics |= _evaluate(trainer, _both(datasets, "validation"), evaluated)
    if training_args.do_predict:
        metrics |= _predict(trainer, _both(datasets, "test"), labels, data_args, evaluated)
    shown = partial(report, data_args, splits, columns, datasets, labels, evaluated, metrics)
    finish(trainer, model_args, data_args, argv, task="text-classification", metrics=metrics, report=shown)
    return metrics


def _predictions_file(data_args: GlueArguments, split: str = "test") -> str:
    """Return ``predict_results_TASK.txt``, with the name of the embedded corpus, or none, in place of a task."""
    corpus = None if data_args.dataset_name is None else embedded_name(data_args.dataset_name)
    name = data_args.task_name or corpus
    return "predict_results" + (f"_{name}" if name else "") + ("-mm" if split.endswith(SECOND) else "") + ".txt"


def _both(splits: dict[str, Dataset], name: str) -> dict[str, Dataset]:
    return {split: splits[split] for split in (name, name + SECOND) if split in splits}


# ---- data ----


def load_splits(
    data_args: GlueArguments, training_args: ScriptTrainingArguments, model_args: ModelArguments
) -> tuple[DatasetDict, tuple[str, ...], dict[str, list[Label]], Labels | None]:
    """Load the splits that a run needs. MNLI's matched ones are called ``validation`` and ``test``.

    Returns:
        The splits, the one or two columns of sentences, each row's label in every split with labels, and the set of
        labels of the first such split: the training split, if it is used.

    Raises:
        ValueError: A split or a column that the run needs is missing, a row has no text, or labels are mixed.
    """
    task = data_args.task_name
    header = None if task is None else GLUE_TASKS[task].tsv_header
    raw = load_datasets(data_args, training_args, model_args, tsv_header=header)
    raw = DatasetDict({name.removesuffix("_matched"): rows for name, rows in raw.items()})
    used = [split for name in used_splits(raw, training_args, model_args) for split in _both(raw, name)]
    raw = DatasetDict({name: raw[name] for name in used})
    scored = [name for name in used if not name.startswith("test")]
    label = label_column(raw, needed=scored, named=data_args.label_column_name)
    named = None if data_args.text_column_names is None else data_args.text_column_names.split(",")
    columns = sentence_columns(raw, task=task, label=label, named=named)
    splits, values = DatasetDict(), {}
    for name, rows in raw.items():
        splits[name] = check_texts(rows, columns, name=name, drop_empty=data_args.drop_empty_rows)
        if label is not None and label in rows.column_names:
            values[name] = read_labels(splits[name], label, name=name)
        if name in values and name not in scored and is_unlabelled(values[name]):
            del values[name]
    if not values:
        return splits, columns, values, None
    first = next(iter(values))
    feature = splits[first].features[label]
    names = feature.names if isinstance(feature, ClassLabel) else None
    return splits, columns, values, find_labels(values[first], name=first, names=names, task=task)


def _tokenize(
    splits: DatasetDict,
    columns: tuple[str, ...],
    labels: dict[str, Any],
    tokenizer: PreTrainedTokenizerBase,
    data_args: GlueArguments,
    training_args: ScriptTrainingArguments,
) -> dict[str, Dataset]:
    """Return the inputs of the splits that the run works on, with the ids of their labels if they have any."""
    arguments = {
        "tokenizer": tokenizer,
        "columns": columns,
        "max_length": data_args.max_seq_length,
        "pad_to_max_length": data_args.pad_to_max_length,
    }
    datasets = {}
    for name, rows in splits.items():
        if (split := name.removesuffix(SECOND)) in asked_splits(training_args):
            chosen = first_examples(rows, data_args.limits[split])
            inputs = map_rows(
                chosen, tokenize_sentences, arguments, data_args, training_args, desc=f"Tokenizing {name}"
            )
            ids = labels.get(name)
            datasets[name] = inputs if ids is None else inputs.add_column("labels", list(ids[: len(inputs)]))
    return datasets


# ---- evaluation and predictions ----


def _evaluate(trainer: ScriptTrainer, datasets: dict[str, Dataset], evaluated: dict[str, Any]) -> dict[str, float]:
    metrics: dict[str, float] = {}
    for name, rows in datasets.items():
        metrics |= mark_second({**trainer.evaluate(rows), "eval_samples": len(rows)}, name)
        evaluated[name] = trainer.take_outputs()
    save_and_log(trainer, "eval", metrics)
    return metrics


def _predict(
    trainer: ScriptTrainer,
    datasets: dict[str, Dataset],
    labels: Labels,
    data_args: GlueArguments,
    evaluated: dict[str, Any],
) -> dict[str, float]:
    metrics: dict[str, float] = {}
    for name, rows in datasets.items():
        output = trainer.predict(rows, metric_key_prefix="predict")
        evaluated[name] = output
        metrics |= mark_second({**(output.metrics or {}), "predict_samples": len(rows)}, name)
        if trainer.is_world_process_zero():
            values = outputs_of(output.predictions, labels)
            words = [f"{value:3.3f}" if labels.are_numbers else labels.names[value] for value in values]
            lines = ["index\tprediction", *(f"{index}\t{word}" for index, word in enumerate(words))]
            save_text(trainer, _predictions_file(data_args, name), "\n".join(lines) + "\n")
    save_and_log(trainer, "predict", metrics)
    return metrics
