"""Write ``report.html``, one self-contained page, from plain values and texts."""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from hf_hybrid.training.report.curves import Panel, describe, draw_svg
from hf_hybrid.training.run_folder.files import replacing

Cell = str | int | float | None
"""The content of a cell; None for an empty one."""

_LONGEST, _MOST_LINES = 700, 12
# characters that HTML forbids, and surrogates that UTF-8 cannot encode
_UNPRINTABLE = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff\ufffe\uffff]")
_LINE_END = re.compile(r"\r\n?|[\x85\u2028\u2029]")


@dataclass(frozen=True)
class Table:
    """Rows of named values.

    Attributes:
        caption: What it shows.
        columns: Headings, the first over the names of the rows.
        rows: Name and values of each row.
        strong: Index of the row to highlight; None for none.
        shaded: Whether to shade cells by their share of the row's sum.
    """

    caption: str
    columns: Sequence[str]
    rows: Sequence[tuple[str, Sequence[Cell]]]
    strong: int | None = None
    shaded: bool = False

    def share(self, row: Sequence[Cell], value: Cell) -> float:
        """Return the share of a value in the sum of its row, in percent."""
        total = sum(other for other in row if isinstance(other, int | float))
        return 100 * value / total if isinstance(value, int | float) and total > 0 else 0.0


@dataclass(frozen=True)
class Sample:
    """Texts to read side by side.

    Attributes:
        texts: Name and text of each.
        verdict: A short judgement.
        right: Whether the model was right, if that is known.
        read: The number of texts that the model read; the page compares the others.
    """

    texts: Sequence[tuple[str, str]]
    verdict: str = ""
    right: bool | None = None
    read: int = 1


@dataclass(frozen=True)
class Section:
    """A part of the page, left out if it is empty; `notes` say what was not done, for example."""

    title: str
    tables: Sequence[Table] = ()
    samples: Sequence[Sample] = ()
    notes: Sequence[str] = ()


@dataclass(frozen=True)
class Page:
    """The content of a page, from top to bottom.

    Attributes:
        title: Heading.
        summary: What was done, in a sentence.
        tiles: A few important numbers, by name.
        facts: What was run.
        command: The command line, in pieces that should not be broken.
        sections: Scores and samples.
        curves: Diagrams over the steps.
        measured: Time and memory.
        environment: Versions and devices.
        numbers: All metrics, by name.
        notes: What was not done.
        code: Lines of Python that use the result.
    """

    title: str
    summary: str
    tiles: Mapping[str, Cell] = field(default_factory=dict)
    facts: Mapping[str, Cell] = field(default_factory=dict)
    command: Sequence[str] = ()
    sections: Sequence[Section] = ()
    curves: Sequence[Panel] = ()
    measured: Mapping[str, Cell] = field(default_factory=dict)
    environment: Mapping[str, Cell] = field(default_factory=dict)
    numbers: Mapping[str, Cell] = field(default_factory=dict)
    notes: Sequence[str] = ()
    code: Sequence[str] = ()

    @property
    def number_rows(self) -> list[tuple[str, list[Cell]]]:
        """All metrics as rows of a table."""
        return [(name, [value]) for name, value in self.numbers.items()]


def write_page(page: Page, path: Path) -> None:
    """Write a page; on an error, leave the old one."""
    environment = Environment(
        loader=PackageLoader("hf_hybrid.training.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=lambda value: value if isinstance(value, Markup) else clean(value),
    )
    environment.filters["value"] = format_value
    drawings = [(describe(panel), Markup(draw_svg(panel, f"curve-{n}")), panel) for n, panel in enumerate(page.curves)]
    html = environment.get_template("report.html").render(page=page, drawings=drawings)
    with replacing(path) as unfinished:
        unfinished.write_text(html, encoding="utf-8")


def clean(value: object) -> object:
    """Replace characters that a page cannot hold; values other than texts pass."""
    return _UNPRINTABLE.sub("�", _LINE_END.sub("\n", value)) if isinstance(value, str) else value


def excerpt(text: str, longest: int = _LONGEST) -> str:
    """Return the beginning of a text, with its full length if it is cut off."""
    text = _LINE_END.sub("\n", text)
    shown = "\n".join(text[:longest].split("\n")[:_MOST_LINES])
    return text if shown == text else f"{shown.rstrip()} … ({len(text):,} characters in all)"


def format_value(value: Cell) -> str:
    """Format a value for reading: four digits of a fraction, groups of three digits of a large number."""
    if value is None:
        return "–"
    if isinstance(value, str):
        return value
    if isinstance(value, bool):
        return "yes" if value else "no"
    if not math.isfinite(value):
        return "undefined" if math.isnan(value) else f"{value}"
    if isinstance(value, int) or value == 0:
        return f"{value:,}" if isinstance(value, int) else "0"
    magnitude = math.floor(math.log10(abs(value)))
    return f"{value:.3g}" if not -4 < magnitude < 15 else f"{value:,.{max(0, min(4, 3 - magnitude))}f}"
