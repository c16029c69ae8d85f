"""The text of one document: plain text, PDF, Word and HTML files."""

import codecs
import logging
import re
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from hf_hybrid.commands.flags import DocumentArguments

TEXT_FILES = (".txt", ".text", ".md", ".markdown", ".rst")
_BYTE_ORDER_MARKS = {codecs.BOM_UTF8: "utf-8-sig", codecs.BOM_UTF16_LE: "utf-16", codecs.BOM_UTF16_BE: "utf-16"}
_MARKUP = 10  # a page with more markup than this for its text is not parsed, which takes seconds for each megabyte
_NOT_READ = ("script", "style", "noscript", "template", "svg")  # elements of HTML
_BLOCKS = (
    r"address|article|aside|blockquote|br|d[dlt]|div|fig\w+|footer|h[1-6]|header|hr|li|main|nav|ol|p|pre|section|table|"
    r"t[dhr]|title|ul"
)


class Unreadable(Exception):
    """A document has no text to read; the message says why, without the document's name."""


def check_packages(extensions: set[str]) -> None:
    """Raise a ValueError if a package is missing that reads files with these extensions."""
    for extension in sorted(extensions & PACKAGES.keys()):
        module, name = PACKAGES[extension]
        if find_spec(module) is None:
            raise ValueError(f"{extension} files need the package {name}: pip install 'hf-hybrid[documents]'")


def read_document(path: Path, flags: DocumentArguments) -> str:
    """Return the text of a file.

    Raises:
        Unreadable: It has none, or is larger than ``--max_document_mb``.
    """
    try:
        size = path.stat().st_size
        if size == 0:
            raise Unreadable("it is empty")
        return _READERS.get(path.suffix.lower(), _read_text)(path, flags)
    except Unreadable:
        raise
    except OSError as error:
        raise Unreadable(f"it cannot be read: {error.strerror or error}") from error
    except Exception as error:  # broken files make the libraries raise all kinds
        message = " ".join(str(error).split()) or type(error).__name__
        raise Unreadable(f"it cannot be read as {path.suffix.lower()}: {message}") from error


def checked_text(text: str, flags: DocumentArguments) -> str:
    """Return a document's text if there is some, but not more than ``--max_document_mb``.

    Raises:
        Unreadable: There is none, or more.
    """
    if not text.strip():
        raise Unreadable("it has no text")
    size = len(text.encode("utf-8", errors="replace")) / 1e6
    if size > flags.max_document_mb:
        raise Unreadable(_too_large(size, flags))
    return text


def _too_large(size: float, flags: DocumentArguments) -> str:
    return (
        f"it has {size:.1f} MB of text, more than --max_document_mb {flags.max_document_mb:g}: divide it, or raise "
        "the limit if there is memory and time"
    )


def decode_text(content: bytes, flags: DocumentArguments) -> str:
    """Decode plain text: UTF-8, what a byte order mark says, or ``--encoding``; check it as `checked_text` does.

    Raises:
        Unreadable: It is binary, in another encoding, empty or too large.
    """
    marked = next((name for mark, name in _BYTE_ORDER_MARKS.items() if content.startswith(mark)), None)
    if marked is None and flags.encoding is None and b"\0" in content:
        raise Unreadable("it is no text but binary data (it has zero bytes)")
    encoding = flags.encoding or marked or "utf-8"
    try:
        return checked_text(content.decode(encoding), flags)
    except UnicodeDecodeError as error:
        raise Unreadable(
            f"byte {error.start} is no {encoding} text; name the --encoding of the file, such as cp1252 or latin-1"
        ) from error


def _read_text(path: Path, flags: DocumentArguments) -> str:
    size = path.stat().st_size / 1e6
    if size > 4 * flags.max_document_mb:  # a character takes at most four bytes
        raise Unreadable(_too_large(size, flags))
    return decode_text(path.read_bytes(), flags)


def _read_pdf(path: Path, flags: DocumentArguments) -> str:
    from pypdf import PdfReader

    logging.getLogger("pypdf").setLevel(logging.CRITICAL)  # what it cannot read, it also raises
    pdf = PdfReader(path)
    if pdf.is_encrypted and not pdf.decrypt(""):
        raise Unreadable("it is protected by a password; save a copy without one")
    pages, size = [], 0
    for page in pdf.pages:  # a page takes a while, so that one that is too much ends it
        pages.append(page.extract_text())
        size += len(pages[-1])
        if size > flags.max_document_mb * 1e6:
            break
    text = "\n\n".join(pages)
    if pdf.pages and not text.strip():
        all_pages = f"{len(pdf.pages)} pages have" if len(pdf.pages) > 1 else "page has"
        raise Unreadable(
            f"its {all_pages} no text, only pictures of it: run a text recognition first, such as ocrmypdf"
        )
    return checked_text(text, flags)


def _read_docx(path: Path, flags: DocumentArguments) -> str:
    import docx
    from docx.table import Table

    parts: list[str] = []
    for part in docx.Document(str(path)).iter_inner_content():
        if isinstance(part, Table):
            parts += _table_lines(part)
        else:
            parts.append(part.text)
    return checked_text("\n".join(parts), flags)


def _table_lines(table: Any) -> Iterator[str]:
    """Yield a table's rows; a cell that spans several columns or rows is listed in each, and given once."""
    seen: set[Any] = set()
    for row in table.rows:
        cells = {cell._tc: cell for cell in row.cells if cell._tc not in seen}
        seen |= cells.keys()
        yield "\t".join(cell.text for cell in cells.values())


def _read_html(path: Path, flags: DocumentArguments) -> str:
    from bs4 import BeautifulSoup

    if (size := path.stat().st_size / 1e6) > _MARKUP * flags.max_document_mb:
        raise Unreadable(
            f"it has {size:.1f} MB, more than {_MARKUP} times --max_document_mb {flags.max_document_mb:g}"
        )
    content = path.read_bytes()
    if flags.encoding is None and b"\0" in content and not content.startswith(tuple(_BYTE_ORDER_MARKS)):
        raise Unreadable("it is no text but binary data (it has zero bytes)")
    page = BeautifulSoup(content, "html.parser", from_encoding=flags.encoding)
    for element in page(_NOT_READ):
        element.decompose()
    for element in page(re.compile(rf"^({_BLOCKS})$")):
        element.insert_before("\n")
        element.insert_after("\n")
    lines = (" ".join(line.split()) for line in page.get_text().splitlines())
    return checked_text(re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).strip(), flags)


_READERS: dict[str, Callable[[Path, DocumentArguments], str]] = {
    ".pdf": _read_pdf,
    ".docx": _read_docx,
    ".html": _read_html,
    ".htm": _read_html,
}
PACKAGES = {
    ".pdf": ("pypdf", "pypdf"),
    ".docx": ("docx", "python-docx"),
    ".html": ("bs4", "beautifulsoup4"),
    ".htm": ("bs4", "beautifulsoup4"),
}
"""The module that reads an extension, and the package that has it."""
EXTENSIONS = (*TEXT_FILES, *_READERS)
