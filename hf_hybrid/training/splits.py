"""Load and choose the splits of a run's data, and turn them into model inputs."""

import logging
from collections.abc import Callable, Mapping
from typing import Any

from datasets import Dataset, DatasetDict, Features
from transformers import TrainingArguments

from hf_hybrid.data.loading import embedded_name, load_raw_datasets
from hf_hybrid.training.flags.data import SPLITS, DataArguments
from hf_hybrid.training.flags.model import ModelArguments

logger = logging.getLogger(__name__)


def load_datasets(
    data_args: DataArguments, training_args: TrainingArguments, model_args: ModelArguments, **options: Any
) -> DatasetDict:
    """Load the named data, or the script's own corpus.

    `options` are further arguments of `load_raw_datasets`.

    Returns:
        All splits. Those of an embedded corpus are shuffled, since they come module by module; a small run gets only
        as many rows as it takes examples.

    Raises:
        ValueError: The data cannot be loaded.
    """
    if data_args.is_small_run:
        logger.info(
            "No data are named: a small run on the first examples of %s, which is built from the documentation of the "
            "installed packages. --dataset_name %s uses all of it.",
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
    if data_args.is_small_run:  # also for what reads all rows, such as training a tokenizer
        raw = DatasetDict({split: first_examples(rows, data_args.limits.get(split)) for split, rows in raw.items()})
    return raw


def asked_splits(training_args: TrainingArguments) -> list[str]:
    """Return the splits that the run works on."""
    return [split for flag, split in SPLITS.items() if getattr(training_args, flag)]


def used_splits(
    datasets: Mapping[str, Any], training_args: TrainingArguments, model_args: ModelArguments
) -> list[str]:
    """Return the splits that the run works on, and the training split, if any, to train a tokenizer on.

    Raises:
        ValueError: A split that the run works on is missing.
    """
    for flag, split in SPLITS.items():
        if getattr(training_args, flag) and split not in datasets:
            raise ValueError(f"--{flag} needs a {split} split; the dataset has {', '.join(datasets)}")
    wanted = {*asked_splits(training_args), *(["train"] if model_args.trains_tokenizer else [])}
    return [split for split in SPLITS.values() if split in wanted and split in datasets]


def first_examples(split: Dataset, count: int | None) -> Dataset:
    """Return the first examples of a split; all if the count is None or larger."""
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
    """Turn a split's rows into other rows, such as model inputs, in the cache.

    `function` makes columns of new rows from a batch of rows and `arguments`; `features` are their types, if the first
    rows may not tell.
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
