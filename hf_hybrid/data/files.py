"""Read the rows of CSV, TSV and JSON files, with errors that name the file, the line and the rule.

The readers of the standard library are used because the message is the point: they know the line.
"""

import bz2
import csv
import gzip
import json
import lzma
import math
import os
import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from hf_hybrid.suggestions import did_you_mean

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ["EXTENSIONS", "TEXT_EXTENSIONS", "Row", "check_file", "iterate_rows", "read_table"]

EXTENSIONS = (".csv", ".tsv", ".json", ".jsonl")
TEXT_EXTENSIONS = (*EXTENSIONS, ".txt")
"""The same and running text, which only language models read."""
_OPENERS: dict[str, Callable[..., IO[bytes]]] = {".gz": gzip.open, ".xz": lzma.open, ".bz2": bz2.open}  # type: ignore[dict-item]
_COMPRESSION_ERRORS = (EOFError, lzma.LZMAError, zlib.error)
_BATCH_ROWS = 1000
_SHOWN = 200  # characters of what a file holds that are shown in an error
_SCALARS = {str: "text", bool: "true or false", int: "a number", float: "a number", list: "a list", dict: "an object"}

_NUMBER = re.compile(r"[-+.0-9e]+|[-+]?(nan|inf|infinity)", re.IGNORECASE)
_JSON = json.JSONDecoder()
_JSON_SPACE = re.compile(r"[ \t\n\r]*")

Row = tuple[int, dict[str, Any]]
"""The line on which a row starts, counted from 1, and what the row holds."""
_Record = tuple[int, list[str]]
"""The line on which a line of a table starts, and its fields."""


def check_file(flag: str, path: str, extensions: Sequence[str] = EXTENSIONS) -> str:
    """Check that a path can be a data file, and return its format's extension.

    Args:
        flag: The argument that the path came from, for messages.
        path: A ``.csv``, ``.tsv``, ``.json`` or ``.jsonl`` file, plain or with ``.gz``, ``.xz`` or ``.bz2`` behind it.
        extensions: The extensions that are accepted.

    Raises:
        ValueError: The extension is unknown, or there is no such file, or it is empty.
    """
    file = Path(path)
    suffix = Path(file.stem).suffix if file.suffix.lower() in _OPENERS else file.suffix
    if suffix.lower() not in extensions:
        raise ValueError(
            f"{flag} must end in {', '.join(extensions)}, or one of these and {', '.join(_OPENERS)}; "
            f"got {path!r}.{did_you_mean(suffix, extensions) if suffix else ''}"
        )
    if not file.is_file():
        siblings = os.listdir(file.parent) if file.parent.is_dir() else []
        what = "a folder" if file.is_dir() else "no such file"
        raise ValueError(f"{flag} must be an existing file; got {path!r} ({what}).{did_you_mean(file.name, siblings)}")
    if file.stat().st_size == 0:
        raise ValueError(f"{flag} must hold at least one row; got {path!r}, which is empty")
    return suffix.lower()


def read_table(
    flag: str, path: str, *, tsv_header: Sequence[str] | None = None, keep_linebreaks: bool | None = None
) -> "pa.Table":
    """Read a data file.

    JSON is one object on each line, or one array of objects. CSV has a header line; a column that holds nothing but
    numbers becomes numeric. TSV is the same with tabs for commas, and a quotation mark in it is a character like any
    other, as in the files that GLUE is distributed in. A key that a JSON row lacks is null there. Running text gives
    its lines, in a column ``text``.

    Args:
        flag: The argument that the path came from, for messages.
        path: See `check_file`.
        tsv_header: Names for the columns of a TSV file without a header line: one whose first line has as many fields
            as there are names here, none of them one of these.
        keep_linebreaks: Whether the lines of a ``.txt`` file keep their line breaks; such a file is refused when None.

    Raises:
        ValueError: The file cannot be read as what its extension says; the message names the line.
    """
    rows = iterate_rows(flag, path, tsv_header=tsv_header, keep_linebreaks=keep_linebreaks)
    table = _table(f"{flag} {path!r}", rows)
    return _numbers_parsed(table) if check_file(flag, path, TEXT_EXTENSIONS) in (".csv", ".tsv") else table


def iterate_rows(
    flag: str, path: str, *, tsv_header: Sequence[str] | None = None, keep_linebreaks: bool | None = None
) -> Iterator[Row]:
    """Yield the rows of a data file one at a time, each with the line it starts on, while the file is read.

    Args:
        flag: See `read_table`.
        path: See `check_file`.
        tsv_header: See `read_table`.
        keep_linebreaks: See `read_table`.

    Raises:
        ValueError: See `read_table`.
    """
    extension = check_file(flag, path, EXTENSIONS if keep_linebreaks is None else TEXT_EXTENSIONS)
    place = f"{flag} {path!r}"
    open_bytes = _OPENERS.get(Path(path).suffix.lower(), open)
    try:
        with open_bytes(path, "rb") as stream:
            if extension == ".csv":
                yield from _rows_under_header(place, _csv_records(place, stream))
            elif extension == ".tsv":
                yield from _rows_under_header(place, _tsv_records(place, stream), tsv_header)
            elif extension == ".txt":
                for number, line in _lines(place, stream):
                    yield number, {"text": line if keep_linebreaks else line.rstrip("\r\n")}
            else:
                yield from _json_rows(place, stream)
    except _COMPRESSION_ERRORS as error:
        raise ValueError(f"{place} must be a whole {Path(path).suffix} file; it cannot be read ({error})") from error
    except OSError as error:  # also what gzip and bz2 raise for a file that is not theirs
        raise ValueError(f"{place} cannot be read: {error}") from error


def _lines(place: str, stream: IO[bytes]) -> Iterator[tuple[int, str]]:
    """Decode a file line by line."""
    for number, line in enumerate(stream, start=1):
        try:
            text = line.decode("utf-8-sig" if number == 1 else "utf-8")
        except UnicodeDecodeError as error:
            raise ValueError(f"{place}, line {number}: must be UTF-8 text; {error.reason}") from error
        if "\0" in text:
            raise ValueError(f"{place}, line {number}: must be text; got binary data (a zero byte)")
        yield number, text


def _json_rows(place: str, stream: IO[bytes]) -> Iterator[Row]:
    lines = _lines(place, stream)
    for number, line in lines:
        if not line.strip():
            continue
        if line.lstrip().startswith("["):
            yield from _json_array(place, number, "".join([line, *(text for _, text in lines)]))
            return
        yield number, _json_object(place, number, line)


def _json_array(place: str, first_line: int, text: str) -> Iterator[Row]:
    number, counted = first_line, 0
    try:
        for count, (start, row) in enumerate(_array_items(text), start=1):
            number += text.count("\n", counted, start)
            counted = start
            if not isinstance(row, dict):
                raise ValueError(
                    f"{place}, line {number}, row {count}: must be a JSON object such as {{...}}; got {_kind(row)}"
                )
            yield number, row
    except json.JSONDecodeError as error:
        number = first_line + error.lineno - 1
        raise ValueError(f"{place}, line {number}: must be valid JSON; {error.msg} (column {error.colno})") from error
    except _JsonLimit as error:
        number = first_line + text.count("\n", 0, error.position)
        raise ValueError(f"{place}, line {number}: {error}") from error


def _array_items(text: str) -> Iterator[tuple[int, Any]]:
    """Decode the items of a JSON array one at a time, each with its position in the text.

    Raises:
        json.JSONDecodeError: The text is not one JSON array.
        _JsonLimit: It is beyond what can be decoded.
    """
    start = end = _after_space(text, text.index("[") + 1)
    closed = text.startswith("]", end)
    while not closed:
        item, end = _decode(text, start)
        yield start, item
        end = _after_space(text, end)
        closed = text.startswith("]", end)
        if not closed and not text.startswith(",", end):
            raise json.JSONDecodeError("Expecting ',' delimiter", text, end)
        start = _after_space(text, end + 1)
    rest = _after_space(text, end + 1)
    if rest < len(text):
        raise json.JSONDecodeError("Extra data", text, rest)


def _after_space(text: str, position: int) -> int:
    space = _JSON_SPACE.match(text, position)
    return space.end() if space else position


class _JsonLimit(Exception):
    """JSON that is valid, or may be, but that Python does not decode."""

    def __init__(self, rule: str, position: int):
        super().__init__(rule)
        self.position = position


def _decode(text: str, position: int) -> tuple[Any, int]:
    """Decode the JSON value that starts here, and say where it ends.

    Raises:
        json.JSONDecodeError: There is none.
        _JsonLimit: It is nested too deeply, or holds an integer of too many digits.
    """
    try:
        return _JSON.raw_decode(text, position)
    except json.JSONDecodeError:
        raise
    except RecursionError as error:
        raise _JsonLimit("values must not be nested this deeply", position) from error
    except ValueError as error:  # the interpreter's limit on the digits of an integer, which it names
        raise _JsonLimit(f"numbers must be shorter; {error}", position) from error


def _json_object(place: str, number: int, line: str) -> dict[str, Any]:
    try:
        row, end = _decode(line, _after_space(line, 0))
        if (rest := _after_space(line, end)) < len(line):
            raise json.JSONDecodeError("Extra data", line, rest)
    except json.JSONDecodeError as error:
        raise ValueError(
            f"{place}, line {number}: must be one JSON object on each line, or the file one array of objects; "
            f"{error.msg} (column {error.colno})"
        ) from error
    except _JsonLimit as error:
        raise ValueError(f"{place}, line {number}: {error}") from error
    if not isinstance(row, dict):
        raise ValueError(f"{place}, line {number}: must be a JSON object such as {{...}}; got {_kind(row)}")
    return row


def _csv_records(place: str, stream: IO[bytes]) -> Iterator[_Record]:
    limit = csv.field_size_limit(2**31 - 1)  # the default refuses fields over 128 KiB; documents are longer
    try:
        reader = csv.reader((line for _, line in _lines(place, stream)), strict=True)
        while True:
            start = reader.line_num + 1
            try:
                fields = next(reader, None)
            except csv.Error as error:
                raise ValueError(f"{place}, line {start}: must be valid CSV; {error}") from error
            if fields is None:
                return
            yield start, fields
    finally:
        csv.field_size_limit(limit)


def _tsv_records(place: str, stream: IO[bytes]) -> Iterator[_Record]:
    for number, line in _lines(place, stream):
        text = line.rstrip("\r\n")
        yield number, text.split("\t") if text else []


def _rows_under_header(
    place: str, records: Iterable[_Record], default_header: Sequence[str] | None = None
) -> Iterator[Row]:
    header: list[str] | None = None
    for number, fields in records:
        if not fields:
            continue
        if header is None and default_header and len(fields) == len(default_header):
            header = list(default_header) if set(fields).isdisjoint(default_header) else None
        if header is None:
            header = _checked_header(place, number, fields)
        elif len(fields) != len(header):
            raise ValueError(
                f"{place}, line {number}: must have the header's {len(header)} columns ({_listed(header)}); "
                f"got {len(fields)} (in CSV, text that holds commas or line breaks belongs in double quotes)"
            )
        else:
            yield number, dict(zip(header, fields, strict=True))


def _checked_header(place: str, number: int, fields: list[str]) -> list[str]:
    names = [field.strip() for field in fields]
    if not all(names) or len(set(names)) != len(names):
        raise ValueError(f"{place}, line {number}: the header must name each column once; got {names!s:.{_SHOWN}}")
    return names


def _listed(names: list[str]) -> str:
    """Column names on one line that can be read, whatever was taken for a header."""
    shown = " ".join(", ".join(names).split())
    return shown if len(shown) <= _SHOWN else f"{shown[:_SHOWN]}..."


def _table(place: str, rows: Iterable[Row]) -> "pa.Table":
    """Collect rows in Arrow memory, a batch at a time."""
    import pyarrow as pa
    from tqdm.auto import tqdm

    tables: list[pa.Table] = []
    kinds: dict[str, str] = {}
    batch: list[Row] = []

    def flush() -> None:
        try:
            columns = {name: [row.get(name) for _, row in batch] for name in kinds}
            tables.append(pa.table(columns))
        except (pa.ArrowException, UnicodeEncodeError, OverflowError) as error:
            lines = f"lines {batch[0][0]} to {batch[-1][0]}"
            raise ValueError(f"{place}, {lines}: values cannot be stored as columns; {error}") from error
        batch.clear()

    bar = tqdm(rows, desc=f"Reading {place}", unit="row", delay=1.0, disable=None)
    for count, (number, row) in enumerate(bar, start=1):
        for name, value in row.items():
            kind = kinds.setdefault(name, "null" if value is None else _kind(value))
            if kind == "null" and value is not None:
                kinds[name] = _kind(value)
            elif value is not None and _kind(value) != kind:
                raise ValueError(
                    f"{place}, line {number}, row {count}: column {_listed([repr(name)])} must hold the same kind of "
                    f"value in every row; got {_kind(value)} after {kind}"
                )
        batch.append((number, row))
        if len(batch) == _BATCH_ROWS:
            flush()
    if batch:
        flush()
    if not tables or not kinds:
        raise ValueError(f"{place} must hold at least one row; got none")
    try:
        return pa.concat_tables(tables, promote_options="permissive")
    except pa.ArrowException as error:
        raise ValueError(f"{place}: rows cannot be stored as columns of one type; {error}") from error


def _kind(value: object) -> str:
    return "null" if value is None else _SCALARS[type(value)]


def _number(field: str, parse: type[int] | type[float]) -> float:
    """Parse a number as tables write it: Python also reads 1_2 as 12, and 1e999 as infinite.

    Raises:
        ValueError: The field is none.
    """
    number = parse(field)
    if not _NUMBER.fullmatch(field.strip()) or (math.isinf(number) and "inf" not in field.lower()):
        raise ValueError
    return number


def _numbers_parsed(table: "pa.Table") -> "pa.Table":
    """Turn the columns of a CSV table that hold only numbers into numbers; an empty field is null there."""
    import pyarrow as pa

    for index, name in enumerate(table.column_names):
        fields = table.column(index).to_pylist()
        for parse, kind in ((int, pa.int64()), (float, pa.float64())):
            try:
                numbers = [_number(field, parse) if field.strip() else None for field in fields]
                column = pa.array(numbers, kind)
            except (ValueError, OverflowError, pa.ArrowException):
                continue
            if column.null_count < len(column):
                table = table.set_column(index, name, column)
            break
    return table
