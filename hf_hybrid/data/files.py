"""Read CSV, TSV, JSON, Parquet and text files; errors name the file, the line or row, and the rule.

PyArrow reads Parquet, stores the rows of all formats, and parses columns of numbers. The standard library reads the
other formats: PyArrow's own readers do not know lines, accept CSV in which a quotation mark is missing, and turn text
such as ``2020-01-01`` in JSON into timestamps.
"""

import bz2
import csv
import gzip
import json
import lzma
import os
import zlib
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import chain, islice, repeat
from pathlib import Path
from types import NoneType
from typing import IO, TYPE_CHECKING, Any

from hf_hybrid.suggestions import did_you_mean

if TYPE_CHECKING:
    import pyarrow as pa
    import pyarrow.parquet as pq

__all__ = ["EXTENSIONS", "TEXT_EXTENSIONS", "check_file", "iterate_rows", "iterate_rows_and_errors", "read_table"]

EXTENSIONS = (".csv", ".tsv", ".json", ".jsonl", ".parquet")
TEXT_EXTENSIONS = (*EXTENSIONS, ".txt")
"""The formats that language models read: `EXTENSIONS` and running text."""
_OPENERS: dict[str, Callable[..., IO[bytes]]] = {".gz": gzip.open, ".xz": lzma.open, ".bz2": bz2.open}  # type: ignore[dict-item]
_BATCH_ROWS = 1000
_LONGEST_FIELD = 2**31 - 1  # characters; csv reads 128 KiB without this
_KINDS = {str: "text", bool: "true or false", int: "a number", float: "a number", list: "a list", dict: "an object"}

_JSON_RULE = "must be one JSON object on each line, or the file one array of objects"

Row = tuple[str, dict[str, Any]]
"""Where a row is, such as ``line 3``, and the row."""
_Read = tuple[str, dict[str, Any] | ValueError]
"""The same of a row that is being read, or why it cannot be."""
_Kinds = dict[tuple[Any, ...], str]
"""What kind of value stands where: a column's name, then `list` for the items of a list and the names of fields."""


def check_file(flag: str, path: str, extensions: Sequence[str] = EXTENSIONS) -> str:
    """Check that a path can be a data file, and return its extension without the compression's.

    Args:
        flag: The argument that the path came from, for messages.
        path: A data file, plain or compressed: ``.csv``, ``.csv.gz``, ``.csv.xz``, ``.csv.bz2``.
        extensions: The accepted extensions.

    Raises:
        ValueError: The extension is unknown, or the file is missing or empty.
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
    r"""Read a data file.

    - JSON: one object on each line, or one array of objects. A key that a row lacks is null.
    - CSV: starts with a header line. A column of numbers becomes numeric, its empty fields null. The index that pandas
      writes, a first column without a name, is left out.
    - TSV: CSV with tabs for commas; a quotation mark is an ordinary character, as in GLUE's own files.
    - Parquet: its columns as they are, the format of datasets on the Hub.
    - Text: each line is a row with the column ``text``; a line break is ``\n`` also where the file has ``\r\n``.

    Args:
        flag: The argument that the path came from, for messages.
        path: See `check_file`.
        tsv_header: Column names for TSV files without a header line. They apply if the first line has as many fields
            and contains none of these names.
        keep_linebreaks: Whether the lines of a ``.txt`` file keep their line breaks; None refuses ``.txt`` files.

    Raises:
        ValueError: The file does not hold what its extension says; the message names the line or row.
    """
    place = f"{flag} {path!r}"
    extension = check_file(flag, path, EXTENSIONS if keep_linebreaks is None else TEXT_EXTENSIONS)
    with _opened(place, path) as stream:
        if extension == ".parquet":
            table = _parquet(place, stream).read()
        elif extension in (".csv", ".tsv"):
            table = _numbers_parsed(_table(place, _checked(_table_rows(place, extension, stream, tsv_header))))
        else:
            table = _table(place, _checked(_rows(place, extension, stream, keep_linebreaks), stream))
            if extension == ".json" and table.num_rows == 1 and (advice := _around(table.to_pylist()[0])):
                raise ValueError(f"{place}: {_JSON_RULE}{advice}")
    if not table.num_rows or not table.num_columns:
        raise ValueError(f"{place} must hold at least one row; got none")
    return table


def iterate_rows(
    flag: str, path: str, *, tsv_header: Sequence[str] | None = None, keep_linebreaks: bool | None = None
) -> Iterator[dict[str, Any]]:
    """Yield the rows of a data file while reading it; the fields of CSV and TSV stay text.

    Arguments and errors are those of `read_table`.
    """
    with _reading(flag, path, tsv_header, keep_linebreaks) as (stream, rows):
        for _, row in _checked(rows, stream):
            yield row


def iterate_rows_and_errors(
    flag: str, path: str, *, column: str | None = None
) -> Iterator[dict[str, Any] | ValueError]:
    """Yield the rows of a data file like `iterate_rows`; a row that cannot be read is its error, if others can.

    Of Parquet only `column` is read, if it is given. The other formats are read whole anyway.
    """
    with _reading(flag, path, column=column) as (_, rows):
        for _, row in rows:
            yield row


@contextmanager
def _reading(
    flag: str,
    path: str,
    tsv_header: Sequence[str] | None = None,
    keep_linebreaks: bool | None = None,
    column: str | None = None,
) -> Iterator[tuple[IO[bytes], Iterator[_Read]]]:
    """Open a file that is read row by row."""
    place = f"{flag} {path!r}"
    extension = check_file(flag, path, EXTENSIONS if keep_linebreaks is None else TEXT_EXTENSIONS)
    with _opened(place, path) as stream:
        if extension == ".parquet":
            yield stream, _parquet_rows(place, _parquet(place, stream), column)
        elif extension in (".csv", ".tsv"):
            yield stream, _table_rows(place, extension, stream, tsv_header)
        else:
            yield stream, _rows(place, extension, stream, keep_linebreaks)


@contextmanager
def _opened(place: str, path: str) -> Iterator[IO[bytes]]:
    """Open and decompress a file; turn errors of reading into ValueErrors that name it."""
    suffix = Path(path).suffix.lower()
    try:
        with _OPENERS.get(suffix, open)(path, "rb") as stream:
            yield stream
    except (EOFError, lzma.LZMAError, zlib.error) as error:
        raise ValueError(f"{place} must be a complete {suffix} file; it cannot be read ({error})") from error
    except OSError as error:  # gzip and bz2 raise it for files in another format
        raise ValueError(f"{place} cannot be read: {error}") from error


def _parquet(place: str, stream: IO[bytes]) -> "pq.ParquetFile":
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        file = pq.ParquetFile(stream)
    except pa.ArrowException as error:
        raise ValueError(f"{place} must be a Parquet file; it cannot be read ({_brief(error)})") from error
    names = file.schema_arrow.names
    if len(set(names)) != len(names):
        raise ValueError(f"{place}: must name each column once; got {_brief(names)}")
    return file


def _parquet_rows(place: str, file: "pq.ParquetFile", column: str | None) -> Iterator[_Read]:
    """Yield the rows of a Parquet file, of one column if it is named, and the errors of what Python cannot hold."""
    import pyarrow as pa

    read = 0
    try:
        for batch in file.iter_batches(_BATCH_ROWS, columns=None if column is None else [column]):
            try:
                yield from (("", row) for row in batch.to_pylist())
            except (ValueError, OverflowError):
                yield from _one_by_one(place, batch, read)
            read += batch.num_rows
    except (pa.ArrowException, OSError) as error:
        raise ValueError(f"{place} must be a Parquet file; it cannot be read ({_brief(error)})") from error


def _one_by_one(place: str, batch: "pa.RecordBatch", before: int) -> Iterator[_Read]:
    for index in range(batch.num_rows):
        try:
            yield "", {name: batch.column(name)[index].as_py() for name in batch.schema.names}
        except (ValueError, OverflowError) as error:
            yield "", ValueError(f"{place}, row {before + index + 1}: {_brief(error)}")


def _text(place: str, number: int, line: bytes) -> str:
    """Decode a line."""
    try:
        text = line.decode("utf-8-sig" if number == 1 else "utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{place}, line {number}: must be UTF-8 text; {error.reason}") from error
    if "\0" in text:
        raise ValueError(f"{place}, line {number}: must be text; got binary data (a zero byte)")
    return text


def _checked(rows: Iterator[_Read], stream: IO[bytes] | None = None) -> Iterator[Row]:
    """Yield rows up to the first that cannot be read, and raise its error; of JSON, `stream` is the file."""
    for where, row in rows:
        if isinstance(row, ValueError):
            advice = ""
            if where == "line 1" and stream is not None:
                stream.seek(0)
                with suppress(ValueError, RecursionError):
                    advice = _around(json.loads(stream.read()))
            raise ValueError(f"{row}{advice}") from row
        yield where, row


def _rows(place: str, extension: str, stream: IO[bytes], keep_linebreaks: bool | None) -> Iterator[_Read]:
    """Yield the rows of a text or JSON file, and the errors of its lines."""
    begins = True
    for number, content in enumerate(stream, start=1):
        here = f"line {number}"
        try:
            line = _text(place, number, content)
            is_array, begins = begins and line.lstrip().startswith("["), begins and not line.strip()
            if extension == ".txt":
                yield here, {"text": line.replace("\r\n", "\n") if keep_linebreaks else line.rstrip("\r\n")}
            elif is_array:
                yield from _array_rows(place, extension, number, line, stream)
            elif line.strip():
                yield here, _checked_object(f"{place}, {here}", _parsed(place, number, line.rstrip(), _JSON_RULE))
        except ValueError as error:
            yield here, error


def _array_rows(place: str, extension: str, number: int, line: str, stream: IO[bytes]) -> Iterator[_Read]:
    """Yield the rows of an array that begins in a line, and the errors of its items; it takes the lines it needs."""
    array = None
    if extension == ".jsonl":  # a first line that is no object may have lines of objects behind it
        with suppress(ValueError, RecursionError):
            array = json.loads(line)
    if array is None:
        rest = (_text(place, later, content) for later, content in enumerate(stream, start=number + 1))
        array = _parsed(place, number, "".join([line, *rest]), "must be valid JSON")
    for count, row in enumerate(array, start=1):
        where = f"row {count}"
        try:
            yield where, _checked_object(f"{place}, {where}", row)
        except ValueError as error:
            yield where, error


def _around(row: Any) -> str:
    """Say how to get at the rows if an object only stands around them, as in ``{"version": 1, "data": [...]}``."""
    lists = {name: x for name, x in row.items() if isinstance(x, list) and x} if isinstance(row, dict) else {}
    fields = [name for name, items in lists.items() if all(isinstance(item, dict) for item in items)]
    if len(fields) != 1:
        return ""
    (name,) = fields
    return f". The file is one object whose field {name!r} holds {len(lists[name])} rows: save that list as a file"


def _parsed(place: str, number: int, text: str, rule: str) -> Any:
    """Decode JSON that starts on a given line."""
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        here = f"line {number + error.lineno - 1}"
        raise ValueError(f"{place}, {here}: {rule}; {error.msg} (column {error.colno})") from error
    except RecursionError as error:
        raise ValueError(f"{place}, from line {number}: values must not be nested this deeply") from error
    except ValueError as error:  # the interpreter's limit on the digits of an integer
        raise ValueError(f"{place}, from line {number}: numbers must be shorter; {error}") from error


def _checked_object(where: str, row: Any) -> dict[str, Any]:
    if not isinstance(row, dict):
        raise ValueError(f"{where}: must be a JSON object such as {{...}}; got {type(row).__name__}")
    return row


def _table_rows(
    place: str, extension: str, stream: IO[bytes], default_header: Sequence[str] | None
) -> Iterator[_Read]:
    """Yield the rows of a CSV or TSV file, whose fields are all text, and the errors of rows of another length."""
    records = _records(place, extension, stream)
    number, header = next(records, (0, []))
    _check_fields(place, number, header)
    names = default_header if extension == ".tsv" and len(header) == len(default_header or "") else None
    if names and set(header).isdisjoint(names):
        records, header = chain([(number, header)], records), list(names)
    header = [name.strip() for name in header]
    indexed = extension == ".csv" and len(header) > 1 and not header[0]  # as pandas writes it
    columns = header[1:] if indexed else header
    if number and (not all(columns) or len(set(columns)) != len(columns)):
        raise ValueError(f"{place}, line {number}: the header must name each column once; got {_brief(header)}")
    for number, fields in records:
        here = f"line {number}"
        try:
            _check_fields(place, number, fields)
            if len(fields) != len(header):
                raise ValueError(
                    f"{place}, {here}: must have the header's {len(header)} columns ({_brief(', '.join(header))}); "
                    f"got {len(fields)} (in CSV, put double quotes around text that holds commas or line breaks)"
                )
            yield here, dict(zip(columns, fields[1:] if indexed else fields, strict=True))
        except ValueError as error:
            yield here, error


def _check_fields(place: str, number: int, fields: Sequence[str]) -> None:
    for field in fields:
        _text(place, number, field.encode("utf-8", "surrogateescape"))


def _records(place: str, extension: str, stream: IO[bytes]) -> Iterator[tuple[int, list[str]]]:
    """Yield the lines of a CSV or TSV file as fields, each with the number of its first line; skip empty ones.

    What is no text is in the fields, for `_check_fields`.
    """
    encodings = chain(["utf-8-sig"], repeat("utf-8"))
    lines = (line.decode(encoding, "surrogateescape") for line, encoding in zip(stream, encodings, strict=False))
    if extension == ".tsv":
        fields = (line.rstrip("\r\n").split("\t") for line in lines)
        yield from ((number, texts) for number, texts in enumerate(fields, start=1) if texts != [""])
        return
    reader = csv.reader(lines, strict=True)
    while True:
        number = reader.line_num + 1
        limit = csv.field_size_limit(_LONGEST_FIELD)  # not for longer: the limit is the whole process's
        try:
            record = next(reader, None)
        except csv.Error as error:
            raise ValueError(f"{place}, line {number}: must be valid CSV; {error}") from error
        finally:
            csv.field_size_limit(limit)
        if record is None:
            return
        if record:
            yield number, record


def _brief(what: object) -> str:
    """Show names or an error on one line of at most 200 characters."""
    shown = " ".join(str(what).split())
    return shown if len(shown) <= 200 else f"{shown[:200]}..."


def _table(place: str, rows: Iterator[Row]) -> "pa.Table":
    """Collect rows in Arrow memory, batch by batch."""
    import pyarrow as pa
    from tqdm.auto import tqdm

    tables: list[pa.Table] = []
    spans: list[str] = []
    names: dict[str, None] = {}
    kinds: _Kinds = {}
    bar = iter(tqdm(rows, desc=f"Reading {place}", unit="row", delay=1.0, disable=None))
    while batch := list(islice(bar, _BATCH_ROWS)):
        names |= dict.fromkeys(name for _, row in batch for name in row)
        columns = {name: _column(place, name, batch, kinds) for name in names}
        spans.append(f"{batch[0][0]} to {batch[-1][0]}")
        try:
            tables.append(pa.table(columns))
        except UnicodeEncodeError as error:
            raise ValueError(f"{place}, {spans[-1]}: names of columns must be valid text; {_brief(error)}") from error

    def joined(count: int) -> pa.Table:
        return pa.concat_tables(tables[:count], promote_options="permissive")

    try:
        return joined(len(tables)) if tables else pa.table({})
    except pa.ArrowException as error:
        span = spans[_fewest_failing(joined, len(tables)) - 1]
        raise ValueError(
            f"{place}, {span}: a column must hold values that Arrow can store as one type; {_brief(error)}"
        ) from error


def _column(place: str, name: str, batch: list[Row], kinds: _Kinds) -> "pa.Array":
    """Store a column of some rows, and record the kinds of its values."""
    import pyarrow as pa

    values = [row.get(name) for _, row in batch]
    before = dict(kinds)
    if _clash(name, values, kinds):
        for (where, _), value in zip(batch, values, strict=True):
            if clash := _clash(name, [value], before):
                column = _brief(repr(name))
                raise ValueError(f"{place}, {where}: column {column} must hold values of one kind; got {clash}")
    try:
        return pa.array(values)
    except (pa.ArrowException, UnicodeEncodeError, OverflowError) as error:
        where, _ = batch[_fewest_failing(lambda count: pa.array(values[:count]), len(values)) - 1]
        raise ValueError(
            f"{place}, {where}: column {_brief(repr(name))} must hold values that Arrow can store as one type; "
            f"{_brief(error)}"
        ) from error


def _clash(name: str, values: list[Any], kinds: _Kinds) -> str | None:
    """Compare values with the kinds of earlier ones, also inside lists and objects; Arrow would store true as 1.0."""
    pending: list[tuple[tuple[Any, ...], list[Any]]] = [((name,), values)]
    while pending:
        path, values = pending.pop()
        types = dict.fromkeys(map(type, values))
        for kind in (_KINDS[value_type] for value_type in types if value_type is not NoneType):
            if kinds.setdefault(path, kind) != kind:
                return f"{kind} after {kinds[path]}{' inside it' if len(path) > 1 else ''}"
        if list in types:
            pending.append(((*path, list), [item for value in values if type(value) is list for item in value]))
        if dict in types:
            fields: dict[str, list[Any]] = {}
            for value in values:
                for field, item in value.items() if type(value) is dict else ():
                    fields.setdefault(field, []).append(item)
            pending += [((*path, field), items) for field, items in fields.items()]
    return None


def _fewest_failing(convert: Callable[[int], object], count: int) -> int:
    """Return how many of the first items cannot be converted together, where fewer can."""

    def fails(items: int) -> bool:
        try:
            convert(items)
        except Exception:
            return True
        return False

    return bisect_left(range(count), True, key=fails)


def _numbers_parsed(table: "pa.Table") -> "pa.Table":
    """Parse the columns of a CSV table that hold only numbers; their empty fields become null."""
    import pyarrow as pa
    from pyarrow import compute

    for index, name in enumerate(table.column_names):
        texts = compute.utf8_trim_whitespace(table.column(index))
        texts = compute.if_else(compute.equal(texts, ""), None, texts)
        texts = compute.replace_substring_regex(texts, r"^\+([^+-])", r"\1")  # PyArrow takes no + before a number
        try:
            numbers = texts.cast(pa.float64())
        except pa.ArrowInvalid:
            continue
        infinite = compute.filter(texts, compute.is_inf(numbers)).to_pylist()
        if numbers.null_count == len(numbers) or any("inf" not in text.lower() for text in infinite if text):
            continue  # PyArrow reads 1e999 as infinite
        with suppress(pa.ArrowInvalid):
            numbers = texts.cast(pa.int64())
        table = table.set_column(index, name, numbers)
    return table
