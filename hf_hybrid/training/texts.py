"""Load, divide and tokenize the texts of a run, stored or as a stream, for the scripts that read texts alone."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from datasets import Dataset, Features, IterableDataset, List, Value
from transformers import PreTrainedTokenizerBase

from hf_hybrid.data.columns import check_texts, is_blank, is_text, text_column
from hf_hybrid.data.files import TEXT_EXTENSIONS, check_file
from hf_hybrid.data.preprocessing import tokenize_texts
from hf_hybrid.training.flags.data import TextArguments
from hf_hybrid.training.flags.model import ModelArguments
from hf_hybrid.training.flags.run import ScriptTrainingArguments
from hf_hybrid.training.splits import load_datasets, map_rows, used_splits

TOKENS = Features({"input_ids": List(Value("int32")), "num_bytes": Value("int64")})
"""The columns of tokenized texts."""
_STREAMED_ROWS = 100
"""Rows of a stream that are tokenized at a time: each may be a book."""


class Texts(NamedTuple):
    """The splits of a run.

    Attributes:
        splits: The rows of each split.
        column: The column of texts, the only one.
        held_out: Percentage of the training split that was cut off for validation; 0 if none was.
    """

    splits: Mapping[str, Any]
    column: str
    held_out: int


def check_streaming(
    tokenizer: PreTrainedTokenizerBase | None, data_args: TextArguments, training_args: ScriptTrainingArguments
) -> None:
    """Raise a ValueError if a stream lacks a number of steps or a tokenizer, or is given processes to tokenize it."""
    if training_args.do_train and training_args.max_steps < 1:
        raise ValueError("--streaming needs --max_steps, because the length of a stream is not known; got none")
    if tokenizer is None:
        raise ValueError("--streaming needs a tokenizer: give --tokenizer_name or --tokenizer_type bytes")
    if (workers := data_args.preprocessing_num_workers or 1) > 1:
        raise ValueError(
            "--preprocessing_num_workers must be 1 or left out with --streaming, which tokenizes while training "
            f"(--dataloader_num_workers 1 does so in another process); got {workers}"
        )


def load_splits(data_args: TextArguments, training_args: ScriptTrainingArguments, model_args: ModelArguments) -> Texts:
    """Load the splits that a run needs, with a text in every row.

    A missing validation split is cut from the training split: the first rows, or in a stream the first of every
    hundred.

    Raises:
        ValueError: A split or a column that the run needs is missing, a row has no text, or all rows of a split are
            blank. A stream raises it when it comes to a row without text.
    """
    raw = load_datasets(
        data_args,
        training_args,
        model_args,
        keep_linebreaks=data_args.keep_linebreaks,
        whole_text_files=data_args.whole_text_files,
        streaming=data_args.streaming,
    )
    is_cut = training_args.do_eval and "validation" not in raw and "train" in raw
    held_out = data_args.validation_split_percentage if is_cut else 0
    advice = " (a validation split is cut from it: give --validation_file)" if is_cut else ""
    whole = {**raw, "validation": raw["train"]} if is_cut else dict(raw)
    used = used_splits(whole, training_args, model_args)
    column = text_column({name: _columns(whole[name], name, advice) for name in used}, data_args.text_column)
    splits = {name: whole[name].select_columns([column]) for name in (["train", "validation"] if is_cut else used)}
    if data_args.streaming:
        splits = {name: _with_texts(rows, name, column, data_args) for name, rows in splits.items()}
    if is_cut:
        splits["validation"], splits["train"] = _cut(splits["train"], held_out)
    for name in used:
        rows = splits[name]
        if not data_args.streaming:
            rows = check_texts(rows, [column], name=name, drop_empty=data_args.drop_empty_rows, may_be_blank=True)
        elif data_args.drop_empty_rows:
            rows = rows.filter(_has_text, fn_kwargs={"column": column})
        _check_words(rows, name, column, advice)
        splits[name] = rows
    return Texts(splits, column, held_out)


def _with_texts(rows: IterableDataset, name: str, column: str, data_args: TextArguments) -> IterableDataset:
    """Let a stream stop with an error at the first row without text, unless such rows are dropped."""
    path = data_args.files.get(name) or data_args.files.get("train")
    place = f"split {name!r} of {data_args.dataset_name}" if path is None else path
    arguments = {"column": column, "place": place, "may_lack": data_args.drop_empty_rows}
    return rows.map(_check_row, with_indices=True, fn_kwargs=arguments)


def _check_row(row: dict[str, Any], index: int, *, column: str, place: str, may_lack: bool) -> dict[str, Any]:
    text = row[column]
    if isinstance(text, str) or (text is None and may_lack):
        return row
    raise ValueError(
        f"{place}, row {index + 1} (the first row is 1): column {column!r} must hold text in every row; got "
        f"{type(text).__name__}: {text!r:.80}{'. drop_empty_rows drops rows without text' if text is None else ''}"
    )


def _check_words(rows: Dataset | IterableDataset, name: str, column: str, advice: str) -> None:
    """Raise a ValueError if no row of a split holds more than spaces; look no further than the first that does."""
    blank = 0
    for row in rows:
        if not is_blank(row[column]):
            return
        blank += 1
    if not blank:
        raise ValueError(f"split {name!r} must hold at least one row; got none{advice}")
    raise ValueError(f"split {name!r} must hold at least one row with more than spaces; got {blank} blank ones")


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
            "--train_file and --validation_file"
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
    return split.map(
        tokenize_texts, batched=True, batch_size=_STREAMED_ROWS, fn_kwargs=arguments, remove_columns=[column]
    )
