"""Load, divide and tokenize the texts of a run, stored or as a stream, for the scripts that read texts alone."""

from typing import Any

from datasets import Dataset, DatasetDict, Features, IterableDataset, List, Value
from transformers import PreTrainedTokenizerBase

from hf_hybrid.data.columns import check_texts, is_text, text_column
from hf_hybrid.data.files import TEXT_EXTENSIONS, check_file
from hf_hybrid.data.preprocessing import tokenize_texts
from hf_hybrid.training.flags.data import TextArguments
from hf_hybrid.training.flags.model import ModelArguments
from hf_hybrid.training.flags.run import ScriptTrainingArguments
from hf_hybrid.training.splits import load_datasets, map_rows, used_splits

TOKENS = Features({"input_ids": List(Value("int32")), "num_bytes": Value("int64")})
"""The columns of tokenized texts."""


def check_streaming(tokenizer: PreTrainedTokenizerBase | None, training_args: ScriptTrainingArguments) -> None:
    """Raise a ValueError if a stream lacks what it needs: a number of steps, and a tokenizer that is not trained."""
    if training_args.do_train and training_args.max_steps < 1:
        raise ValueError("--streaming needs --max_steps, because the length of a stream is not known; got none")
    if tokenizer is None:
        raise ValueError("--streaming needs a tokenizer: give --tokenizer_name or --tokenizer_type bytes")


def load_splits(
    data_args: TextArguments, training_args: ScriptTrainingArguments, model_args: ModelArguments
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
    advice = ""
    if training_args.do_eval and "validation" not in raw and "train" in raw:
        advice = " (a validation split is cut from it: give --validation_file)"
        raw["validation"], raw["train"] = _cut(raw["train"], data_args.validation_split_percentage)
    used = used_splits(raw, training_args, model_args)
    column = text_column({name: _columns(raw[name], name, advice) for name in used}, data_args.text_column)
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


def _columns(rows: Dataset | IterableDataset, name: str, advice: str) -> dict[str, bool]:
    """Return the columns of a split, and whether they hold text; a stream's first row tells."""
    if isinstance(rows, Dataset):
        return {column: is_text(feature) for column, feature in rows.features.items()}
    if (first := next(iter(rows), None)) is None:
        raise ValueError(f"split {name!r} must hold at least one row; got none{advice}")
    return {column: isinstance(value, str) for column, value in first.items()}


def comes_from_text_file(name: str, data_args: TextArguments) -> bool:
    """Whether the rows of a split are the lines of a txt file."""
    path = data_args.files.get(name) or data_args.files.get("train")
    return path is not None and check_file("train_file", path, TEXT_EXTENSIONS) == ".txt"


def tokenize_split(
    split: Dataset | IterableDataset,
    name: str,
    tokenizer: PreTrainedTokenizerBase,
    column: str,
    data_args: TextArguments,
    training_args: ScriptTrainingArguments,
    *,
    are_lines: bool,
    as_text: bool = False,
) -> Dataset | IterableDataset:
    """Tokenize each text of a split, as `tokenize_texts` does; the rows have the columns `TOKENS`."""
    arguments = {"tokenizer": tokenizer, "column": column, "are_lines": are_lines, "as_text": as_text}
    if isinstance(split, Dataset):
        return map_rows(
            split, tokenize_texts, arguments, data_args, training_args, desc=f"Tokenizing {name}", features=TOKENS
        )
    return split.map(tokenize_texts, batched=True, fn_kwargs=arguments, remove_columns=[column])
