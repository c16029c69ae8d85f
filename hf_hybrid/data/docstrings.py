"""Read docstrings from Python source and turn them into documents and summaries.

A document is a title line such as ``torch.nn.functional.softmax(input, dim=None)`` above the docstring without its
first sentence. That sentence is the summary.
"""

import ast
import re
import warnings
from collections.abc import Iterator
from dataclasses import dataclass

from hf_hybrid.data.preprocessing import split_sentences

__all__ = [
    "Docstring",
    "DocumentationError",
    "Pair",
    "docstring_pair",
    "docstring_text",
    "module_pair",
    "read_docstrings",
    "words_of",
]

_Definition = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef

_ROLE = re.compile(r":(?:[a-z]+:)?[a-z]+:`[~!]?([^`<]*?)(?:\s*<[^`>]*>)?`")  # :func:`~torch.abs` -> torch.abs
_LINK = re.compile(r"\[`?([^\]`]+)`?\]\([^)]*\)")  # [`text`](target) -> text
_AUTOLINK = re.compile(r"\[`[~!]?([^\]`]+)`\]")  # [`~Trainer.train`] -> Trainer.train
_UNDERLINE = re.compile(r"^[=\-~^*#+.]{3,}$")
_WORD = re.compile(r"[^\W\d_]+")
_LETTERS = re.compile(r"[A-Za-z]")
_BOILERPLATE = re.compile(
    r"(see|deprecated|alias|obsolete|todo|fixme|internal|placeholder|stub|dummy|overrid\w+|inherit\w*|same as|like"
    r"|tests?|auto-?generated|copied|adapted|unused|undocumented|not implemented|legacy|constructor|initializes? self"
    r"|helper|this (method|class|function) is deprecated|base class for all|the bare|this is the configuration class"
    r"|constructs? (a|an|the) [\w .-]*(tokenizer|processor))\b",
    re.IGNORECASE,
)
_NOT_A_SENTENCE = re.compile(
    r">>>|:param|\{\{|::|[|\\]|\(`|: -| - .* - | : |^\w+:|^(parameters|attributes|returns) \w+ :"
    r"|\b(args?|arguments|parameters|returns|inputs?|examples?|features):\s",
    re.IGNORECASE,
)
_LEGAL = re.compile(r"copyright|licen[sc]e|all rights reserved|\(c\)|@|author", re.IGNORECASE)
_COMMON_WORDS = frozenset(
    _WORD.findall(
        "a an and are as at be been before between by can each for from has have if in into is it its not of on one "
        "or out that the their then this to two used using was when where which while will with without"
    )
)

_CODE_HEADINGS = {"", "example", "examples", "usage"}  # empty once the doctests are removed

SUMMARY_WORDS = range(4, 41)
DOCUMENT_WORDS = range(25, 601)
MODULE_SUMMARY_WORDS = range(5, 121)
MODULE_DOCUMENT_WORDS = range(300, 20_001)
MIN_TEXT_WORDS = 12
_MAX_SIGNATURE_CHARACTERS = 200


class DocumentationError(ValueError):
    """A file is not valid Python for this interpreter."""


@dataclass(frozen=True)
class Docstring:
    """One docstring of a source file.

    Attributes:
        title: Dotted name and signature; the bare name for a module.
        text: The docstring without the source's indentation.
        is_module: Whether it is the module docstring.
    """

    title: str
    text: str
    is_module: bool


@dataclass(frozen=True)
class Pair:
    """A document, its summary, and their module."""

    document: str
    summary: str
    source: str


def read_docstrings(source: bytes, module: str) -> list[Docstring]:
    """List a file's docstrings in source order: the module's, then those of classes, methods and functions.

    The source is parsed, not run.

    Raises:
        DocumentationError: The source is not valid Python.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # some docstrings hold invalid escapes
        try:
            tree = ast.parse(source)
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            raise DocumentationError(f"{module}: {error}") from error
    found = []
    if text := ast.get_docstring(tree):
        found.append(Docstring(module, text, is_module=True))
    for name, definition in _definitions(tree, module):
        if text := ast.get_docstring(definition):
            found.append(Docstring(name + _signature(definition), text, is_module=False))
    return found


def _definitions(node: ast.AST, prefix: str) -> Iterator[tuple[str, _Definition]]:
    """Walk classes and functions in source order, into classes and conditions but not into function bodies."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, _Definition):
            name = f"{prefix}.{child.name}"
            yield name, child
            if isinstance(child, ast.ClassDef):
                yield from _definitions(child, name)
        elif isinstance(child, ast.If | ast.Try | ast.With | ast.ExceptHandler):
            yield from _definitions(child, prefix)


def _signature(definition: _Definition) -> str:
    """Return the arguments as documentation shows them: names and defaults, no ``self``, no types."""
    function: ast.AST | None = definition
    if isinstance(definition, ast.ClassDef):
        function = next(
            (item for item in definition.body if isinstance(item, ast.FunctionDef) and item.name == "__init__"), None
        )
    if not isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
        return ""
    arguments = function.args
    for argument in ast.walk(arguments):
        if isinstance(argument, ast.arg):
            argument.annotation = None
    for own in (arguments.posonlyargs, arguments.args):
        if own and own[0].arg in ("self", "cls"):
            del own[0]
            break
    # ast.unparse refuses more defaults than arguments, which remain if `self` itself has a default.
    defaults = len(arguments.posonlyargs) + len(arguments.args)
    arguments.defaults = arguments.defaults[max(0, len(arguments.defaults) - defaults) :]
    text = ast.unparse(arguments)
    if len(text) > _MAX_SIGNATURE_CHARACTERS:
        text = text[:_MAX_SIGNATURE_CHARACTERS].rsplit(",", 1)[0] + ", ..."
    return f"({text})"


def docstring_pair(docstring: Docstring, module: str) -> Pair | None:
    """Make a pair from the docstring of a class or function; None if it is unsuitable."""
    paragraphs = _paragraphs(docstring.text)
    if docstring.is_module or not paragraphs:
        return None
    if len(paragraphs) > 1 and re.match(r"[\w.]+\(.*\)", paragraphs[0]):  # C extensions write a signature first
        del paragraphs[0]
    summary = next(iter(split_sentences(_joined(paragraphs[0]))), "")
    body = "\n\n".join(filter(None, [paragraphs[0][len(summary) :].strip(), *paragraphs[1:]]))
    pair = Pair(f"{docstring.title}\n{body}", summary, module)
    return pair if _is_suitable(pair, body, SUMMARY_WORDS, DOCUMENT_WORDS) else None


def module_pair(docstrings: list[Docstring], module: str) -> Pair | None:
    """Make a pair from all documentation of a module; None if it is unsuitable."""
    if not docstrings or not docstrings[0].is_module:
        return None
    paragraphs = _paragraphs(docstrings[0].text)
    start = next((i for i, text in enumerate(paragraphs) if len(_joined(text).split()) >= MODULE_SUMMARY_WORDS[0]), -1)
    if start < 0:
        return None
    pages = [module, *paragraphs[:start], *paragraphs[start + 1 :]]
    for docstring in docstrings[1:]:
        pages += [docstring.title, *_paragraphs(docstring.text)]
    pair = Pair("\n\n".join(pages), _joined(paragraphs[start]), module)
    return pair if _is_suitable(pair, pair.document, MODULE_SUMMARY_WORDS, MODULE_DOCUMENT_WORDS) else None


def _is_suitable(pair: Pair, body: str, summary_words: range, document_words: range) -> bool:
    """Return whether a pair has good lengths and prose, and a summary that the body supports and does not repeat."""
    return (
        _is_summary(pair.summary, summary_words)
        and len(pair.document.split()) in document_words
        and _is_prose(body)
        and words_of(pair.summary) not in words_of(body)
        and _supports(pair.document, pair.summary)
    )


def docstring_text(docstring: Docstring) -> str | None:
    """Return a docstring below its title as running text; None if it is too short or not prose."""
    body = "\n\n".join(_paragraphs(docstring.text))
    return f"{docstring.title}\n\n{body}" if len(body.split()) >= MIN_TEXT_WORDS and _is_prose(body) else None


def words_of(text: str) -> str:
    """Return a text's words in lower case: copies share them whatever their layout."""
    return " ".join(_WORD.findall(text.lower()))


def _paragraphs(text: str) -> list[str]:
    """Split a docstring at blank lines; drop markup, indentation, doctests and underlines."""
    text = "\n".join(line for line in text.splitlines() if not line.lstrip().startswith("```"))
    text = _AUTOLINK.sub(r"\1", _LINK.sub(r"\1", _ROLE.sub(r"\1", text))).replace("``", "`").replace("`~", "`")
    paragraphs: list[list[str]] = [[]]
    in_doctest = False
    for raw in text.splitlines():
        line = " ".join(raw.split())
        in_doctest = line.startswith(">>>") or (in_doctest and bool(line))
        if not line:
            paragraphs.append([])
        elif not in_doctest and not _UNDERLINE.match(line) and not line.startswith(".. "):
            paragraphs[-1].append(line)
    found = ["\n".join(lines) for lines in paragraphs if lines]
    return [text for text in found if text.rstrip(":").casefold() not in _CODE_HEADINGS]


def _joined(paragraph: str) -> str:
    return paragraph.replace("\n", " ")


def _is_summary(summary: str, allowed: range) -> bool:
    """Return whether a text is prose of the right length and not boilerplate."""
    return (
        len(summary.split()) in allowed
        and summary[0].isalpha()
        and not summary.endswith((":", ",", "..."))
        and not _BOILERPLATE.match(summary)
        and not _NOT_A_SENTENCE.search(summary)
        and not _LEGAL.search(summary)
        and len(_LETTERS.findall(summary)) >= 0.7 * len(summary)
    )


def _is_prose(text: str) -> bool:
    """Return whether a text reads like English: mostly letters, with enough function words."""
    words = words_of(text).split()
    common = sum(word in _COMMON_WORDS for word in words)
    return len(words) >= 12 and common >= 0.1 * len(words) and len(_LETTERS.findall(text)) >= 0.55 * len(text)


def _supports(document: str, summary: str) -> bool:
    """Return whether the document contains half of the summary's content words, up to their endings."""
    stems = {word[:5] for word in words_of(re.sub(r"(?<=[a-z])(?=[A-Z])", " ", document)).split()}
    content = {word[:5] for word in words_of(summary).split() if len(word) > 3 and word not in _COMMON_WORDS}
    return len(content & stems) >= 0.5 * len(content)
