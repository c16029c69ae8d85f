"""What the arguments of a command name: texts, files, folders, rows of tables, standard input."""

import os
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from hf_hybrid.commands.flags import DocumentArguments
from hf_hybrid.commands.readers import EXTENSIONS as FILES
from hf_hybrid.commands.readers import Unreadable, check_packages, checked_text, decode_text, read_document
from hf_hybrid.data.columns import text_column
from hf_hybrid.data.files import EXTENSIONS as TABLES
from hf_hybrid.data.files import iterate_rows, iterate_rows_and_errors
from hf_hybrid.suggestions import did_you_mean

_COMPRESSED = (".gz", ".xz", ".bz2")
_TABLE = "document"  # what errors call a table
STDIN = "-"
_STANDARD_INPUT = "standard input"


class Document(NamedTuple):
    """A document: its name, and its text or why there is none."""

    name: str
    text: str = ""
    problem: str | None = None
    identity: str | None = None
    """What a document of a file is recognised by, however the file is named; of others it is the name."""
    note: str | None = None
    """What of it is not read."""


class Source(NamedTuple):
    """Something that holds documents: a file, or a text of the command line or of standard input."""

    name: str
    path: Path | None
    documents: int
    column: str | None = None
    text: bytes = b""
    problem: str | None = None


def find_sources(
    arguments: Sequence[str], flags: DocumentArguments, *, leave_out: Sequence[Path] = ()
) -> list[Source]:
    """Return what the arguments name, tables checked to their last row.

    Args:
        arguments: A file, a folder (all files in it that can be read), ``-`` for standard input, or a text. Without
            any, standard input unless it is a terminal.
        flags: The flags of documents.
        leave_out: The output and the file of its progress, which are no documents.

    Raises:
        ValueError: A file does not exist or is of no known kind, a folder has none that can be read, or a package is
            missing that reads one.
    """
    if not arguments:
        if sys.stdin is None or sys.stdin.isatty():
            raise ValueError("no document is given: name texts, files or folders, or pipe a text into the command")
        arguments = [STDIN]
    excluded = {path.resolve() for path in leave_out}
    sources, texts = [], 0
    for argument in arguments:
        path = Path(argument)
        if argument == STDIN:
            sources.append(Source(_STANDARD_INPUT, None, 1, text=sys.stdin.buffer.read()))
        elif argument and _exists(path) and path.is_dir():
            sources += [_checked_source(file, flags) for file in _files_of(path, excluded)]
        elif argument and _exists(path):
            if path.resolve() in excluded:  # a pattern such as *.txt names it from the second time on
                if not all(file.is_file() for file in leave_out):
                    raise ValueError(f"{argument} is a document and the --output: name another --output")
                continue
            sources.append(_checked_source(path, flags))
        else:
            _check_text(argument)
            texts += 1
            sources.append(Source(f"text {texts}", None, 1, text=argument.encode("utf-8", errors="surrogateescape")))
    if sources and all(source.problem is not None for source in sources):
        raise ValueError(f"{sources[0].name}: {sources[0].problem}")
    check_packages({source.path.suffix.lower() for source in sources if source.path is not None})
    named: dict[Path | str, Source] = {}  # what is named twice is read once
    for source in sources:
        named.setdefault(source.name if source.path is None else source.path.resolve(), source)
    return list(named.values())


def read_sources(sources: Sequence[Source], flags: DocumentArguments) -> Iterator[Document]:
    """Yield the documents of sources in their order; those that cannot be read say why."""
    for source in sources:
        if source.problem is not None:
            yield Document(source.name, problem=source.problem)
        elif source.path is not None and source.column is not None:
            yield from _read_table(source, source.path, source.column, flags)
        elif source.path is not None:
            notes: list[str] = []
            place = str(source.path.resolve())
            document = _document(source.name, place, read_document, source.path, flags, notes.append)
            yield document._replace(note="; ".join(notes) or None)
        else:  # arguments are UTF-8, whatever files are
            own = flags if source.name == _STANDARD_INPUT else replace(flags, encoding=None)
            yield _document(source.name, None, decode_text, source.text, own)


def _read_table(source: Source, path: Path, column: str, flags: DocumentArguments) -> Iterator[Document]:
    number, place = 0, path.resolve()
    try:
        for number, row in enumerate(iterate_rows_and_errors(_TABLE, str(path), column=column), start=1):
            name = f"{source.name}:{number}"
            if isinstance(row, ValueError):
                yield Document(name, problem=_of_row(row, path))
            elif isinstance(value := row.get(column), str):
                yield _document(name, f"{place}:{number}", checked_text, value, flags)
            else:
                got = "nothing" if value is None else f"{type(value).__name__} {value!r:.80}"
                yield Document(name, problem=f"column {column!r} must hold text; got {got}")
    except ValueError as error:  # it has changed since it was found
        for left in range(number + 1, source.documents + 1):
            yield Document(f"{source.name}:{left}", problem=_of_row(error, path))


def _document(name: str, identity: str | None, read: Callable[..., str], *arguments: Any) -> Document:
    try:
        return Document(name, read(*arguments), identity=identity)
    except Unreadable as error:
        return Document(name, problem=str(error))


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except (OSError, ValueError):  # a text that is too long for a name, or has a zero byte
        return False


def _kind(path: Path) -> str | None:
    """Return "file" or "table", or None for a file of another kind."""
    suffix = path.suffix.lower()
    if suffix in FILES:
        return "file"
    inner = Path(path.stem).suffix.lower() if suffix in _COMPRESSED else suffix
    return "table" if inner in TABLES else None


def _check_text(argument: str) -> None:
    """Refuse a text that was probably meant as a file, and say so of a single word.

    Raises:
        ValueError: It has the ending of a document, begins like a path, or the folder of the path exists.
    """
    path = Path(argument)
    is_word = not any(letter.isspace() for letter in argument)
    inside = "/" in argument and is_word and _exists(path.parent) and path.parent.is_dir()
    if "\n" not in argument and (
        _kind(path) is not None
        or inside
        or argument.startswith(("./", "../", "~/"))
        or (is_word and argument.endswith("/"))
    ):
        siblings = os.listdir(path.parent) if _exists(path.parent) and path.parent.is_dir() else []
        raise ValueError(
            f"{argument}: there is no such file or folder.{did_you_mean(path.name, siblings)} A text that looks like "
            f"one is read from standard input ({STDIN})"
        )
    if (is_word and argument) or re.fullmatch(r".*\w\.\w{1,4}", argument):
        print(f"{argument!r} is no file or folder here: it is read as a text", file=sys.stderr)


def _files_of(folder: Path, excluded: set[Path]) -> list[Path]:
    """Return the files of a folder and of its folders that can be read, hidden ones left out; and what is no file."""
    paths = sorted(_walk(folder, set()))
    is_other = {path: path.is_file() and _kind(path) is None for path in paths}
    found = [path for path, other in is_other.items() if not other and path.resolve() not in excluded]
    others = Counter(path.suffix.lower() or "no ending" for path, other in is_other.items() if other)
    if not found:
        has = ", ".join(f"{count} {suffix}" for suffix, count in others.most_common()) or "none at all"
        raise ValueError(f"{folder}: no file in this folder can be read as a document; it has {has}")
    if others:
        listed = ", ".join(f"{count} {suffix}" for suffix, count in others.most_common())
        print(f"{folder}: files of other kinds are left out: {listed}", file=sys.stderr)
    return found


def _walk(folder: Path, seen: set[Path]) -> Iterator[Path]:
    """Yield the files of a folder and of its folders, links followed; folders that cannot be opened, and dead links.

    A folder that is reached twice counts once.
    """
    if (place := folder.resolve()) in seen:
        return
    seen.add(place)
    try:
        paths = [path for path in folder.iterdir() if not path.name.startswith(".")]
    except OSError:
        yield folder
        return
    for path in paths:
        if path.is_dir():
            yield from _walk(path, seen)
        elif path.is_file() or (path.is_symlink() and _kind(path) is not None):
            yield path


def _checked_source(path: Path, flags: DocumentArguments) -> Source:
    """Return the source of a file; one that cannot be read does not stop the others."""
    try:
        return _source(path, flags)
    except ValueError as error:
        return Source(str(path), path, 1, problem=_of_row(error, path))


def _source(path: Path, flags: DocumentArguments) -> Source:
    kind = _kind(path)
    if not path.exists():
        raise ValueError("it is a link to a file that does not exist")
    if path.is_dir():
        raise ValueError("this folder cannot be opened")
    if kind is None:
        raise ValueError(f"the documents' files must end in one of {', '.join((*FILES, *TABLES))}")
    if kind == "file":
        return Source(str(path), path, 1)
    columns: dict[str, bool] = {}
    count = 0
    for row in iterate_rows_and_errors(_TABLE, str(path)):
        count += 1
        for name, value in () if isinstance(row, ValueError) else row.items():
            columns[name] = columns.get(name, False) or (isinstance(value, str) and not _is_number(value))
    if not columns:  # then the first error is the whole file's
        for _ in iterate_rows(_TABLE, str(path)):
            break
        raise ValueError("it must hold at least one row; got none")
    return Source(str(path), path, count, column=text_column({"": columns}, flags.text_column))


def _is_number(text: str) -> bool:
    """Whether a field, which in CSV is always text, is blank or a number."""
    try:
        float(text)
    except ValueError:
        return not text.strip()
    return True


def _of_row(error: ValueError, path: Path) -> str:
    """Return a table's error without its name, which stands before it."""
    place = f"{_TABLE} {str(path)!r}"
    return str(error).removeprefix(place).lstrip(",: ")
