"""Train, evaluate and apply a sentence classifier on GLUE or on other labelled sentences: ``run_glue.py``.

Any `AutoModelForSequenceClassification` can be trained, from a checkpoint or from scratch; flags, output files and
behaviour follow transformers' example script of the same name. Where they differ: the data of a task may come from
files, all scores work without a network, labels of the test split are scored where there are any, an output folder
with another run in it is refused instead of being resumed or written over, and what could silently be wrong is an
error: a label that is not in the training split, columns that cannot be told apart, a checkpoint with other labels.
"""

import logging
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
from datasets import ClassLabel, Dataset, DatasetDict
from transformers import (
    AutoModelForSequenceClassification,
    DataCollatorWithPadding,
    EvalPrediction,
    PreTrainedConfig,
    PreTrainedTokenizerBase,
)

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
from hf_hybrid.data.preprocessing import guess_labels, majority_label, tokenize_sentences
from hf_hybrid.metrics import load_metric
from hf_hybrid.metrics.glue import GLUE_SCORES
from hf_hybrid.training.adapters import attach_adapter, uses_adapter
from hf_hybrid.training.arguments import ModelArguments, ScriptTrainingArguments
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
from hf_hybrid.training.data_arguments import PREFIXES, GlueArguments, check_split_sources
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
from hf_hybrid.training.report import Cell, Sample, Section, Table, excerpt, format_value
from hf_hybrid.training.run_report import choose_rows, guarded, write_report
from hf_hybrid.training.trainer import ScriptTrainer

__all__ = ["load_splits", "main"]

logger = logging.getLogger(__name__)

_SECOND = "_mismatched"
"""Ends the name of a second validation or test split, as in MNLI, whose scores end in ``_mm``."""

_SCORE_NAMES = {
    "accuracy": "accuracy",
    "f1": "F1",
    "matthews_correlation": "Matthews correlation",
    "pearson": "Pearson correlation",
    "spearmanr": "Spearman correlation",
    "mse": "mean squared error",
    "combined_score": "their mean",
}
_GUESSES = 10
"""A stratified guess is repeated so many times."""
_MOST_LABELS = 12
"""Of more labels, the confusions are listed instead of shown as a square."""


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
    model_args, data_args, training_args = parse_arguments(
        (ModelArguments, GlueArguments, ScriptTrainingArguments), argv
    )
    check_split_sources(data_args, training_args)
    task = data_args.task_name
    scores = ("accuracy", "mse") if task is None else (*GLUE_SCORES[task], "combined_score")
    check_best_metric(training_args, ("loss", *scores))
    new = model_args.model_name_or_path is None
    config = load_config(model_args, AutoModelForSequenceClassification, preset=data_args.default_preset)
    outputs = _outputs_without_training(data_args, training_args)
    resume_from = prepare_run(training_args, model_args, outputs=outputs)
    given = given_flags(argv)
    fit_learning_rate(training_args, model_args, data_args, config, given)
    resized_positions = fit_positions(
        config,
        AutoModelForSequenceClassification,
        {"max_position_embeddings": {"max_seq_length": data_args.max_seq_length}},
        new=new,
        permitted=not uses_adapter(model_args),
    )
    tokenizer = load_tokenizer(model_args, config, resume_from)  # None: it is trained once there are data
    if tokenizer is None:
        check_tokenizer_source(data_args)

    splits, columns, values, found = load_splits(data_args, training_args, model_args)
    labels = _settle_labels(config, found, new=new, training=training_args.do_train)
    if labels.are_numbers and training_args.label_smoothing_factor:
        raise ValueError("--label_smoothing_factor needs labels that are names; those of these data are numbers")
    ids = {name: labels.encode(members, name=name) for name, members in values.items()}
    if model_args.init_from is None:
        check_resumed_model(config, resume_from, new=new)
    if tokenizer is None:
        tokenizer = train_new_tokenizer(model_args, config, splits.get("train"), columns)
    model = load_model(
        model_args,
        AutoModelForSequenceClassification,
        config,
        tokenizer,
        seed=training_args.seed,
        may_add_weights=training_args.do_train,
        ignore_mismatched_sizes=data_args.ignore_mismatched_sizes,
    )
    if model_args.init_from is not None:
        check_resumed_model(model.config, resume_from, new=False)  # whether its head is tied, its weights have said
    if resized_positions is not None:
        model.resize_position_embeddings(resized_positions)
    if model.config.pad_token_id is None:  # decoders find a sequence's last token by it
        model.config.pad_token_id = tokenizer.pad_token_id

    datasets = {
        name: _tokenize(rows, name, tokenizer, columns, ids.get(name), data_args, training_args)
        for name, rows in splits.items()
        if name.removesuffix(_SECOND) in asked_splits(training_args)
    }
    trainer = ScriptTrainer(
        model=attach_adapter(model, model_args, training_args, resume_from, task_type="SEQ_CLS"),
        args=training_args,
        train_dataset=datasets.get("train"),
        eval_dataset=datasets.get("validation"),
        processing_class=tokenizer,
        data_collator=DataCollatorWithPadding(tokenizer, pad_to_multiple_of=8 if training_args.fp16 else None),
        compute_metrics=partial(_compute_metrics, data_args.task_name, labels),
    )

    clear_output_folder(training_args, resume_from, outputs, model_args.model_name_or_path)
    metrics: dict[str, float] = {}
    evaluated: dict[str, Any] = {}
    if training_args.do_train:
        fit_logging_steps(trainer, resume_from, given)
        metrics |= train(trainer, resume_from)
    if training_args.do_eval:
        results: dict[str, float] = {}
        for name in _both(datasets, "validation"):
            results |= _marked({**trainer.evaluate(datasets[name]), "eval_samples": len(datasets[name])}, name)
            evaluated[name] = trainer.take_outputs()
        save_and_log(trainer, "eval", results)
        metrics |= results
    if training_args.do_predict:
        tests = {name: datasets[name] for name in _both(datasets, "test")}
        metrics |= _predict(trainer, tests, labels, data_args, evaluated)
    guarded(
        REPORT_FILE,
        lambda: _report(trainer, model_args, data_args, argv, splits, columns, datasets, labels, evaluated, metrics),
    )
    publish(trainer, model_args, data_args, task="text-classification", metrics=metrics, argv=argv)
    return metrics


def _predictions_file(data_args: GlueArguments, split: str = "test") -> str:
    """``predict_results_TASK.txt``; without a task, under the embedded corpus's name or under none."""
    corpus = None if data_args.dataset_name is None else embedded_name(data_args.dataset_name)
    parts = ["predict_results", data_args.task_name or corpus]
    return "_".join(filter(None, parts)) + ("-mm" if split.endswith(_SECOND) else "") + ".txt"


def _outputs_without_training(data_args: GlueArguments, training_args: ScriptTrainingArguments) -> list[str]:
    outputs = ["eval_results.json"] if training_args.do_eval else []
    if training_args.do_predict:
        files = (_predictions_file(data_args, split) for split in ("test", f"test{_SECOND}"))
        outputs += ["predict_results.json", *files]
    return outputs


def _both(splits: dict[str, Dataset], name: str) -> list[str]:
    return [split for split in (name, name + _SECOND) if split in splits]


def _marked(metrics: dict[str, float], split: str) -> dict[str, float]:
    """Tell the metrics of a second split from those of the first."""
    return {f"{name}_mm": value for name, value in metrics.items()} if split.endswith(_SECOND) else metrics


# ---- data ----


def load_splits(
    data_args: GlueArguments, training_args: ScriptTrainingArguments, model_args: ModelArguments
) -> tuple[DatasetDict, tuple[str, ...], dict[str, list[Label]], Labels | None]:
    """Load the splits that a run needs. Of MNLI's, the matched ones are called ``validation`` and ``test``.

    Returns:
        The splits, the one or two columns of sentences, the labels of the rows of every split that has any, and those
        that there are in the first such split, which is the training split where it is used.

    Raises:
        ValueError: A split is missing that the run needs, or a column, or a row has no text, or labels are mixed.
    """
    task = data_args.task_name
    header = None if task is None else GLUE_TASKS[task].tsv_header
    raw = load_datasets(data_args, training_args, model_args, tsv_header=header)
    raw = DatasetDict({name.removesuffix("_matched"): rows for name, rows in raw.items()})
    require_splits(raw, training_args)
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
    split: Dataset,
    name: str,
    tokenizer: PreTrainedTokenizerBase,
    columns: tuple[str, ...],
    labels: Sequence[float] | None,
    data_args: GlueArguments,
    training_args: ScriptTrainingArguments,
) -> Dataset:
    inputs = map_rows(
        first_examples(split, data_args.limits[name.removesuffix(_SECOND)]),
        tokenize_sentences,
        {
            "tokenizer": tokenizer,
            "columns": columns,
            "max_length": data_args.max_seq_length,
            "pad_to_max_length": data_args.pad_to_max_length,
        },
        data_args,
        training_args,
        desc=f"Tokenizing {name}",
    )
    return inputs if labels is None else inputs.add_column("labels", list(labels[: len(inputs)]))


# ---- labels ----


def _settle_labels(config: PreTrainedConfig, found: Labels | None, *, new: bool, training: bool) -> Labels:
    """Decide on the labels and their ids, and write them into the configuration.

    A checkpoint keeps its own ids where it knows the same names, or where the data have integers in place of names; it
    is given the data's labels if it is going to be trained on them.

    Args:
        config: What `load_config` returned; changed in place.
        found: The labels of the data, if they have any.
        new: Whether the model begins from scratch.
        training: Whether the model is going to be trained.

    Raises:
        ValueError: The checkpoint has other labels, or there are none to learn, or only one.
    """
    own: tuple[str, ...] = () if new else tuple(name for _, name in sorted((config.id2label or {}).items()))
    if found is None and not own:
        raise ValueError("a new model needs data with labels to know what it predicts; got none")
    settled = _as_in_checkpoint(found, own, training=training) if own else found
    if settled is None:
        if not training:
            asked = "a number" if found is None or found.are_numbers else ", ".join(found.names)
            raise ValueError(
                f"the labels of the data ({asked}) must be those of the checkpoint ({', '.join(own)}), unless it is "
                "trained on them (--do_train)"
            )
        settled = found
        if not _are_default(own):
            logger.warning("The checkpoint's labels (%s) are replaced by those of the data.", ", ".join(own))
    assert settled is not None
    if len(settled.names) == 1:
        raise ValueError(f"the training split must hold at least two different labels; got {settled.names[0]!r} alone")
    names = settled.names or ("LABEL_0",)
    config.id2label = dict(enumerate(names))
    config.label2id = {name: position for position, name in enumerate(names)}
    config.problem_type = "regression" if settled.are_numbers else "single_label_classification"
    return settled


def _as_in_checkpoint(found: Labels | None, own: tuple[str, ...], *, training: bool) -> Labels | None:
    """The data's labels with the checkpoint's names and ids; None where they do not fit each other."""
    if found is None or found.are_numbers:
        fits = found is None or len(own) == 1
        return Labels(() if len(own) == 1 else own) if fits else None
    if len(own) < len(found.names) or (training and len(own) > len(found.names)):
        return None
    positions = {name.casefold(): position for position, name in enumerate(own)}
    if positions.keys() >= {name.casefold() for name in found.names}:
        return Labels(own, {key: positions[found.names[place].casefold()] for key, place in found.ids.items()})
    if all(isinstance(key, int) and key in range(len(own)) for key in found.ids):
        return Labels(own, {key: int(key) for key in found.ids})
    return found if _are_default(own) and len(own) == len(found.names) else None


def _are_default(names: tuple[str, ...]) -> bool:
    return names == tuple(f"LABEL_{position}" for position in range(len(names)))


# ---- scores and predictions ----


def _compute_metrics(task: str | None, labels: Labels, prediction: EvalPrediction) -> dict[str, float]:
    return _scores(task, labels, _outputs(prediction.predictions, labels), prediction.label_ids)


def _scores(task: str | None, labels: Labels, outputs: Any, references: Any) -> dict[str, float]:
    if task is not None and not labels.are_numbers:
        to_task = _ids_of_task(task, labels)
        outputs, references = to_task[outputs], to_task[references]
    metric = (
        load_metric("glue", task) if task is not None else load_metric("mse" if labels.are_numbers else "accuracy")
    )
    scores = metric.compute(predictions=outputs, references=references)
    if len(scores) > 1:
        scores["combined_score"] = float(np.mean(list(scores.values())))
    return scores


def _logits(predictions: Any) -> np.ndarray[Any, Any]:
    return np.asarray(predictions[0] if isinstance(predictions, tuple) else predictions)


def _outputs(predictions: Any, labels: Labels) -> np.ndarray[Any, Any]:
    """Predicted numbers, or ids of predicted labels."""
    logits = _logits(predictions)
    return logits[:, 0] if labels.are_numbers else np.argmax(logits, axis=1)


def _ids_of_task(task: str, labels: Labels) -> np.ndarray[Any, Any]:
    """The task's own id of each label of the model: scores such as F1 depend on which label is 1."""
    known, names = GLUE_TASKS[task].labels, [name.casefold() for name in labels.names]
    if not set(known) <= set(names):
        return np.arange(len(names))
    return np.array([known.index(name) if name in known else -1 for name in names])


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
        metrics |= _marked({**(output.metrics or {}), "predict_samples": len(rows)}, name)
        if trainer.is_world_process_zero():
            values = _outputs(output.predictions, labels)
            words = [f"{value:3.3f}" if labels.are_numbers else labels.names[value] for value in values]
            lines = ["index\tprediction", *(f"{index}\t{word}" for index, word in enumerate(words))]
            save_text(trainer, _predictions_file(data_args, name), "\n".join(lines) + "\n")
    save_and_log(trainer, "predict", metrics)
    return metrics


# ---- the report ----


def _report(
    trainer: ScriptTrainer,
    model_args: ModelArguments,
    data_args: GlueArguments,
    argv: Sequence[str] | None,
    splits: DatasetDict,
    columns: tuple[str, ...],
    datasets: dict[str, Dataset],
    labels: Labels,
    evaluated: dict[str, Any],
    metrics: dict[str, float],
) -> None:
    task, trained = data_args.task_name, datasets.get("train")
    evaluated = {name: outputs for name, outputs in evaluated.items() if outputs is not None}
    scored = {name: outputs for name, outputs in evaluated.items() if outputs.label_ids is not None}
    known = None if trained is None else np.asarray(trained["labels"])
    scores = [name for name in _SCORE_NAMES if any(f"{prefix}_{name}" in metrics for prefix in PREFIXES.values())]
    last = next(
        (prefix for prefix in ("predict", "eval") if any(f"{prefix}_{name}" in metrics for name in scores)), ""
    )
    loss = "Loss (squared error)" if labels.are_numbers else "Loss (nats per example)"
    curves = {loss: {"loss": "training", "eval_loss": "validation"}}
    if scores:
        curves["Scores on the validation split"] = {f"eval_{name}": _SCORE_NAMES[name] for name in scores}

    def samples() -> Section:
        if not evaluated:
            return Section("Samples")
        name = next(reversed(scored or evaluated))
        sentences = first_examples(splits[name], data_args.limits[name.removesuffix(_SECOND)])
        return _samples(name, sentences, columns, labels, evaluated[name])

    write_report(
        trainer,
        model_args,
        data_args,
        script="run_glue.py",
        argv=argv,
        title="Sentence classification" if task is None else f"GLUE {task}",
        sizes={name: f"{len(rows):,} examples" for name, rows in datasets.items()},
        metrics=metrics,
        tiles={f"{last}_{name}": _SCORE_NAMES[name] for name in scores},
        curves=curves,
        parts={
            "scores": lambda: _score_tables(task, labels, known, scored, scores, metrics),
            "confusions": lambda: _confusions(labels, scored),
            "samples": samples,
        },
    )


def _score_tables(
    task: str | None,
    labels: Labels,
    known: np.ndarray[Any, Any] | None,
    scored: dict[str, Any],
    scores: Sequence[str],
    metrics: dict[str, float],
) -> Section:
    """The model's scores beside those of what knows the training labels and reads no sentence."""
    tables = []
    for split, outputs in scored.items():
        prefix = PREFIXES[split.removesuffix(_SECOND)]
        own = _marked({f"{prefix}_{name}": metrics.get(f"{prefix}_{name}", np.nan) for name in scores}, split)
        rows: list[tuple[str, list[Cell]]] = [("this model", [metrics.get(name) for name in own])]
        for name, draws in _label_baselines(labels, known, len(outputs.label_ids)).items():
            results = [_scores(task, labels, draw, outputs.label_ids) for draw in draws]
            rows.append((name, [float(np.mean([result[score] for result in results])) for score in scores]))
        caption = f"Scores on the {split.replace('_', ', ')} split, {len(outputs.label_ids):,} examples"
        tables.append(Table(caption, ("", *(_SCORE_NAMES[name] for name in scores)), rows, strong=0))
    if not scored:
        return Section("Scores", notes=["No split with labels was scored."])
    if known is None:
        note = "The training split was not read: no baselines come from it."
    elif labels.are_numbers:
        note = "The mean is that of the training labels; a correlation with what never changes is not defined."
    else:
        note = (
            "The majority class is that of the training labels; the stratified guess draws from them, here the mean "
            f"of {_GUESSES} draws."
        )
    return Section("Scores", tables, notes=[note])


def _label_baselines(
    labels: Labels, known: np.ndarray[Any, Any] | None, count: int
) -> dict[str, list[np.ndarray[Any, Any]]]:
    """What can be said without reading: for each way its name and its answers, one or several times."""
    if known is None:
        return {}
    if labels.are_numbers:
        return {"mean": [np.full(count, known.mean())]}
    majority = majority_label(known)
    return {
        f"majority class ({labels.names[majority]})": [np.full(count, majority)],
        "stratified guess": [guess_labels(known, count, seed) for seed in range(_GUESSES)],
    }


def _confusions(labels: Labels, scored: dict[str, Any]) -> Section:
    """How often each label was taken for each other one."""
    if labels.are_numbers:
        return Section("Confusions")
    tables, size = [], len(labels.names)
    for split, outputs in scored.items():
        pairs = np.asarray(outputs.label_ids) * size + _outputs(outputs.predictions, labels)
        counts = np.bincount(pairs, minlength=size**2).reshape(size, size)
        where = f"the {split.replace('_', ', ')} split"
        if size <= _MOST_LABELS:
            rows: list[tuple[str, list[Cell]]] = [
                (name, [int(count) for count in row]) for name, row in zip(labels.names, counts, strict=True)
            ]
            columns = ("label", *(f"predicted {name}" for name in labels.names))
            tables.append(Table(f"Labels and predictions on {where}", columns, rows, shaded=True))
            continue
        wrong = counts - np.diag(np.diag(counts))
        worst = [divmod(int(pair), size) for pair in np.argsort(-wrong, axis=None, kind="stable")[:_MOST_LABELS]]
        rows = [
            (labels.names[one], [labels.names[two], int(wrong[one, two])]) for one, two in worst if wrong[one, two]
        ]
        tables.append(Table(f"The most frequent confusions on {where}", ("label", "predicted", "examples"), rows))
    return Section("Confusions", tables)


def _samples(split: str, rows: Dataset, columns: tuple[str, ...], labels: Labels, outputs: Any) -> Section:
    """Some that the model gets right and some that it gets wrong, or the first ones where nobody can tell."""
    predicted = _outputs(outputs.predictions, labels)
    logits = _logits(outputs.predictions).astype(np.float64)
    chances = np.exp(logits - np.logaddexp.reduce(logits, axis=1, keepdims=True)).max(axis=1)
    truth = outputs.label_ids
    if truth is None:
        chosen = choose_rows(len(predicted))
    elif labels.are_numbers:
        order = np.argsort(np.abs(predicted - truth), kind="stable")
        chosen = [*order[:3], *order[3:][-3:][::-1]]
    else:
        right, wrong = np.flatnonzero(predicted == truth), np.flatnonzero(predicted != truth)
        chosen = [group[place] for group in (right, wrong) for place in choose_rows(len(group), 4)]

    def word(value: Any) -> str:
        return format_value(float(value)) if labels.are_numbers else labels.names[int(value)]

    samples = []
    for row in map(int, chosen):
        texts = [(column, excerpt(rows[row][column])) for column in columns]
        if truth is not None:
            texts.append(("label", word(truth[row])))
        confidence = "" if labels.are_numbers else f", {chances[row]:.0%} sure"
        texts.append(("prediction", word(predicted[row]) + confidence))
        if truth is None or labels.are_numbers:
            verdict, is_right = "", None
            if truth is not None:
                verdict = f"off by {format_value(float(abs(predicted[row] - truth[row])))}"
        else:
            is_right = bool(predicted[row] == truth[row])
            verdict = "right" if is_right else "wrong"
        samples.append(Sample(texts, verdict, is_right, read=len(columns)))
    if truth is None:
        note = "Drawn at random; this split has no labels."
    elif labels.are_numbers:
        note = "The three best and the three worst."
    else:
        note = f"Drawn at random: {len(right):,} are right and {len(wrong):,} are wrong."
    return Section(f"Samples of the {split.replace('_', ', ')} split", samples=samples, notes=[note])
