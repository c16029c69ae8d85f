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
_BYTE_ORDER_MARKS = {  # that of UTF-32 begins like that of UTF-16
    codecs.BOM_UTF8: "utf-8-sig",
    codecs.BOM_UTF32_LE: "utf-32",
    codecs.BOM_UTF32_BE: "utf-32",
    codecs.BOM_UTF16_LE: "utf-16",
    codecs.BOM_UTF16_BE: "utf-16",
}
_MARKUP = 10  # a page with more markup than this for its text is not parsed
_NOT_READ = ("script", "style", "noscript", "template", "svg")  # elements of HTML
_BLOCKS = {
    *("address", "article", "aside", "blockquote", "br", "dd", "dl", "dt", "div", "fieldset", "figcaption", "figure"),
    *("footer", "form", "h1", "h2", "h3", "h4", "h5", "h6", "header", "hr", "li", "main", "nav", "ol", "p", "pre"),
    *("section", "table", "td", "th", "title", "tr", "ul"),
}
_BREAKS = {"tab": "\t", "br": "\n", "cr": "\n", "noBreakHyphen": "-"}  # of Word


class Unreadable(Exception):
    """A document has no text to read; the message says why, without the document's name."""


def check_packages(extensions: set[str]) -> None:
    """Raise a ValueError if a package is missing that reads files with these extensions."""
    for extension in sorted(extensions & PACKAGES.keys()):
        module, name = PACKAGES[extension]
        if find_spec(module) is None:
            raise ValueError(f"{extension} files need the package {name}: pip install 'hf-hybrid[documents]'")


def read_document(path: Path, flags: DocumentArguments, note: Callable[[str], None]) -> str:
    """Return the text of a file; `note` is told what of it is not read.

    Raises:
        Unreadable: It has none, or is larger than ``--max_document_mb``.
    """
    try:
        size = path.stat().st_size
        if size == 0:
            raise Unreadable("it is empty")
        return _READERS.get(path.suffix.lower(), _read_text)(path, flags, note)
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
    try:
        size = len(text.encode()) / 1e6
    except UnicodeEncodeError as error:
        letter = f"U+{ord(text[error.start]):04X}"
        raise Unreadable(f"character {error.start + 1} is half of one ({letter}), which is no text") from error
    if size > flags.max_document_mb:
        raise Unreadable(_too_large(size, flags))
    return text


def _too_large(size: float, flags: DocumentArguments) -> str:
    return (
        f"it has {size:.1f} MB of text, more than --max_document_mb {flags.max_document_mb:g}: divide it, or raise "
        "the limit if there is memory and time"
    )


def decode_text(content: bytes, flags: DocumentArguments) -> str:
    """Decode plain text: ``--encoding``, what a byte order mark says, or UTF-8; check it as `checked_text` does.

    Raises:
        Unreadable: It is binary, in another encoding, empty or too large.
    """
    return checked_text(_decoded(content, flags), flags)


def _decoded(content: bytes, flags: DocumentArguments, declared: str | None = None) -> str:
    marked = next((name for mark, name in _BYTE_ORDER_MARKS.items() if content.startswith(mark)), None)
    encoding = flags.encoding or marked or declared or "utf-8"
    try:
        text = content.decode(encoding)
    except LookupError as error:
        raise Unreadable(
            f"it says that its encoding is {encoding!r}, which is unknown; name the --encoding"
        ) from error
    except UnicodeDecodeError as error:
        if b"\0" in content and flags.encoding is None:
            raise Unreadable("it is no text but binary data (it has zero bytes)") from error
        raise Unreadable(
            f"byte {error.start} is no {encoding} text; name the --encoding of the file, such as cp1252 or latin-1"
        ) from error
    if "\0" in text:
        raise Unreadable("it is no text but binary data (it has zero bytes)")
    return text


def _read_text(path: Path, flags: DocumentArguments, note: Callable[[str], None]) -> str:
    size = path.stat().st_size / 1e6
    if size > 4 * flags.max_document_mb:  # a character takes at most four bytes
        raise Unreadable(_too_large(size, flags))
    return decode_text(path.read_bytes(), flags)


def _read_pdf(path: Path, flags: DocumentArguments, note: Callable[[str], None]) -> str:
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
    if empty := sum(not page.strip() for page in pages):
        note(f"{empty} of its {len(pages)} pages {'has' if empty == 1 else 'have'} no text")
    return checked_text(text, flags)


def _read_docx(path: Path, flags: DocumentArguments, note: Callable[[str], None]) -> str:
    import docx

    return checked_text("\n".join(_blocks(docx.Document(str(path)).element.body)), flags)


def _blocks(element: Any) -> Iterator[str]:
    """Yield the paragraphs and the rows of tables below an element of a Word file, however deep they stand in it."""
    for child in element:
        tag = _local(child)
        if tag == "p":
            yield _paragraph(child)
        elif tag == "tbl":
            for row in child.iterchildren("{*}tr"):
                yield "\t".join("\n".join(_blocks(cell)) for cell in row.iterchildren("{*}tc"))
        elif tag != "Fallback":  # a content control or the like
            yield from _blocks(child)


def _paragraph(element: Any) -> str:
    """Return the text of a paragraph: of its runs, also inserted ones, of links and of text boxes."""
    texts = []
    for node in element.iter():
        tag = _local(node)
        if tag == "t" and not any(_local(above) == "Fallback" for above in node.iterancestors()):
            texts.append(node.text or "")
        elif tag in _BREAKS and _local(node.getparent()) == "r":
            texts.append(_BREAKS[tag])
    return "".join(texts)


def _local(node: Any) -> str:
    """Return an element's name without its namespace; "" of a comment."""
    return node.tag.rpartition("}")[2] if isinstance(node.tag, str) else ""


def _read_html(path: Path, flags: DocumentArguments, note: Callable[[str], None]) -> str:
    from bs4 import BeautifulSoup
    from bs4.dammit import EncodingDetector

    if (size := path.stat().st_size / 1e6) > _MARKUP * flags.max_document_mb:
        raise Unreadable(
            f"it has {size:.1f} MB, more than {_MARKUP} times --max_document_mb {flags.max_document_mb:g}"
        )
    content = path.read_bytes()
    declared = EncodingDetector.find_declared_encoding(content, is_html=True)
    page = BeautifulSoup(_decoded(content, flags, declared), "html.parser")
    lines = (" ".join(line.split()) for line in "".join(_strings(page)).splitlines())
    return checked_text(re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).strip(), flags)


def _strings(page: Any) -> Iterator[str]:
    """Yield what a page shows, with a line break before and behind each block."""
    from bs4.element import CData, NavigableString

    left: list[Any] = [page]
    while left:
        node = left.pop()
        if isinstance(node, str) and not isinstance(node, NavigableString):
            yield node
        elif type(node) in (NavigableString, CData):
            yield str(node)
        elif hasattr(node, "contents") and node.name not in _NOT_READ:
            around = ["\n"] if node.name in _BLOCKS else []
            left += [*around, *reversed(node.contents), *around]


_READERS: dict[str, Callable[[Path, DocumentArguments, Callable[[str], None]], str]] = {
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
