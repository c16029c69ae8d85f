"""Choose the columns that a task reads, and check that every row holds text."""

import logging
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from hf_hybrid.suggestions import did_you_mean

if TYPE_CHECKING:
    from datasets import Dataset

__all__ = ["IDENTIFIER", "check_texts", "is_blank", "is_text", "summarization_columns", "text_column"]

logger = logging.getLogger(__name__)

# Text and summary columns of known datasets, by the last part of their names.
_KNOWN_DATASETS: dict[str, tuple[str, str]] = {
    "aeslc": ("email_body", "subject_line"),
    "arxiv-summarization": ("article", "abstract"),
    "big_patent": ("description", "abstract"),
    "billsum": ("text", "summary"),
    "booksum": ("chapter", "summary_text"),
    "cnn_dailymail": ("article", "highlights"),
    "dialogsum": ("dialogue", "summary"),
    "gigaword": ("document", "summary"),
    "gov_report": ("report", "summary"),
    "govreport-summarization": ("report", "summary"),
    "multi_news": ("document", "summary"),
    "newsroom": ("text", "summary"),
    "orange_sum": ("text", "summary"),
    "pubmed-summarization": ("article", "abstract"),
    "reddit_tifu": ("documents", "tldr"),
    "samsum": ("dialogue", "summary"),
    "scientific_papers": ("article", "abstract"),
    "scitldr": ("source", "target"),
    "sumpubmed": ("text", "abstract"),
    "thaisum": ("body", "summary"),
    "xlsum": ("text", "summary"),
    "xsum": ("document", "summary"),
}

# Usual column names, the most specific first.
_TEXT_NAMES = (
    "document", "article", "dialogue", "text", "report", "body", "description", "source", "input", "content",
)  # fmt: skip
_SUMMARY_NAMES = ("summary", "summaries", "highlights", "abstract", "tldr", "target", "output", "headline", "title")
_NAMED_ROWS = 5  # rows listed in a message
IDENTIFIER = re.compile(r"(.*[_-])?(id|idx|index|guid|uuid|url|link|date|label)", re.IGNORECASE)
"""Names of columns that hold no text to read."""


def summarization_columns(
    dataset: "Mapping[str, Dataset]",
    *,
    dataset_name: str | None,
    text_column: str | None = None,
    summary_column: str | None = None,
    unscored: str | None = None,
) -> tuple[str, str | None]:
    """Return the names of the text column and the summary column.

    The user's choice comes first, then the columns of a known dataset, then usual names (``document`` and
    ``summary``, ``article`` and ``highlights``, ...) in the first split, then the first columns of every split that
    are not identifiers. The splits may differ in their other columns.

    Args:
        dataset: The splits.
        dataset_name: Name of the dataset; selects the columns of known ones.
        text_column: The user's choice.
        summary_column: The user's choice.
        unscored: A split that may lack summaries. If it is the only split, only a usual name makes a summary column.

    Returns:
        The text column, and the summary column or None.

    Raises:
        ValueError: A split lacks a chosen column, both names are equal, or there are fewer than two columns to choose
            from.
    """
    if unscored is not None and unscored in dataset and len(dataset) > 1:
        scored = {split: rows for split, rows in dataset.items() if split != unscored}
        named = {"text_column": text_column, "summary_column": summary_column}
        chosen = summarization_columns(scored, dataset_name=dataset_name, **named)
        _check_column("text_column", chosen[0], unscored, dataset[unscored])
        return chosen
    columns = list(next(iter(dataset.values())).column_names)
    anywhere = list(dict.fromkeys(column for rows in dataset.values() for column in rows.column_names))
    everywhere = [column for column in anywhere if all(column in rows.column_names for rows in dataset.values())]
    for flag, name in (("text_column", text_column), ("summary_column", summary_column)):
        if name is not None and name not in anywhere:
            raise ValueError(
                f"{flag} must be one of the dataset's columns: {', '.join(everywhere)}; got {name!r}."
                f"{did_you_mean(name, everywhere)}"
            )
    choices = (text_column, summary_column)
    text, summary = _choose(columns, everywhere, dataset_name, *choices, needs_summary=unscored not in dataset)
    if text is not None and summary is None and unscored in dataset:
        return text, None
    if text is None or summary is None:
        raise ValueError(
            "the dataset must have a column of texts and one of summaries in every split; "
            + "; ".join(f"{split!r} has: {', '.join(rows.column_names)}" for split, rows in dataset.items())
        )
    if text == summary:
        raise ValueError(f"text_column and summary_column must differ; got {text!r} for both")
    for split, rows in dataset.items():
        for flag, name in (("text_column", text), ("summary_column", summary)):
            _check_column(flag, name, split, rows)
    if left_out := [column for column in anywhere if column not in everywhere]:
        logger.info("ignoring columns that some splits lack: %s", ", ".join(left_out))
    return text, summary


def _choose(
    columns: Sequence[str],
    everywhere: Sequence[str],
    dataset_name: str | None,
    text: str | None,
    summary: str | None,
    *,
    needs_summary: bool,
) -> tuple[str | None, str | None]:
    known = _KNOWN_DATASETS.get((dataset_name or "").rsplit("/", 1)[-1].casefold(), ())
    others = [column for column in everywhere if not IDENTIFIER.fullmatch(column)]
    text = text or _first_of((*known[:1], *_TEXT_NAMES), columns, taken=summary)
    summary = summary or _first_of((*known[1:], *_SUMMARY_NAMES), columns, taken=text)
    text = text or _first_of(others, everywhere, taken=summary)
    if needs_summary:
        summary = summary or _first_of(others, everywhere, taken=text)
    return text, summary


def _check_column(flag: str, name: str, split: str, rows: "Dataset") -> None:
    if name not in rows.column_names:
        raise ValueError(f"{flag} {name!r} must be in every split; {split!r} has only: {', '.join(rows.column_names)}")


def _first_of(names: Sequence[str], columns: Sequence[str], *, taken: str | None) -> str | None:
    """Return the first of some names that is a column and not taken."""
    return next((name for name in names if name in columns and name != taken), None)


def text_column(columns: Mapping[str, Mapping[str, bool]], named: str | None = None) -> str:
    """Return the text column for a language model.

    This is the user's choice, or ``text``, or the only text column that is no identifier.

    Args:
        columns: The columns of each split, and whether they hold text.
        named: The user's choice.

    Raises:
        ValueError: A split lacks the column, or the choice is not clear.
    """
    first = next(iter(columns.values()))
    everywhere = [name for name in first if all(name in split for split in columns.values())]
    texts = [name for name in everywhere if first[name] and not IDENTIFIER.fullmatch(name)]
    column = named or ("text" if "text" in everywhere else texts[0] if len(texts) == 1 else None)
    if column is None or column not in everywhere:
        got = f"; got {named!r}.{did_you_mean(named, everywhere)}" if named else ""
        raise ValueError(f"text_column must be one of the columns of every split: {', '.join(everywhere)}{got}")
    return column


def is_text(feature: Any) -> bool:
    """Return whether the values of a column are strings."""
    return getattr(feature, "dtype", None) in ("string", "large_string")


def is_blank(value: Any) -> bool:
    """Return whether a value is missing or text of spaces only."""
    return value is None or (isinstance(value, str) and not value.strip())


def check_texts(
    split: "Dataset", columns: Sequence[str], *, name: str, drop_empty: bool = False, may_be_blank: bool = False
) -> "Dataset":
    """Check that every row of a split has text in the given columns.

    Rows are dropped only on request, because predictions follow the rows of the user's file.

    Args:
        split: Rows of one split.
        columns: Text columns.
        name: The split's name, for messages.
        may_be_blank: Accept blank text, such as the blank lines of a file.
        drop_empty: Drop rows with missing or blank text, and log how many and which.

    Returns:
        ``split`` itself if nothing was dropped.

    Raises:
        ValueError: A value is neither a string nor missing, a row lacks text and ``drop_empty`` is not set, or no row
            is left. The message names the rows, counted from 1.
    """
    from tqdm.auto import tqdm

    number = 0
    empty: dict[int, str] = {}  # row -> the first of its columns that is missing or blank
    batches = split.select_columns(list(columns)).iter(batch_size=1000)
    rows = (row for batch in batches for row in zip(*(batch[column] for column in columns), strict=True))
    bar = tqdm(rows, desc=f"Checking {name}", total=len(split), unit="row", delay=1.0, disable=None)
    for number, row in enumerate(bar, start=1):
        for column, value in zip(columns, row, strict=True):
            if value is not None and not isinstance(value, str):
                raise ValueError(
                    f"column {column!r} of split {name!r} must hold text; row {number} (the first row is 1) holds "
                    f"{type(value).__name__}: {str(value)[:80]}"
                )
            if value is None or (not may_be_blank and is_blank(value)):
                empty.setdefault(number, column)
    named = ", ".join(f"{column!r} of row {row}" for row, column in list(empty.items())[:_NAMED_ROWS])
    named += f"{', ...' if len(empty) > _NAMED_ROWS else ''} (the first row is 1)"
    if empty and not drop_empty:
        raise ValueError(
            f"split {name!r} must hold text in every row; {len(empty)} of {number} rows do not: {named}. "
            "drop_empty_rows drops such rows and their predictions"
        )
    if len(empty) == number:
        raise ValueError(
            f"split {name!r} must hold at least one row with text in {' and '.join(map(repr, columns))}; "
            f"got {number} rows, none of them complete"
        )
    if not empty:
        return split
    logger.warning("%s: dropped %d of %d rows: %s", name, len(empty), number, named)
    return split.select([row for row in range(number) if row + 1 not in empty])
