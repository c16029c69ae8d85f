"""Write ``report.html``, a page in one file, from plain values and texts."""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from hf_hybrid.training.report.curves import Panel, describe, draw_svg

Cell = str | int | float | None
"""The content of a cell; None for an empty one."""

_LONGEST, _MOST_LINES = 700, 12
# what HTML forbids, and halves of characters that UTF-8 cannot write
_UNPRINTABLE = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff\ufffe\uffff]")
_LINE_END = re.compile(r"\r\n?|[\x85\u2028\u2029]")


@dataclass(frozen=True)
class Table:
    """Rows of named values.

    Attributes:
        caption: What it shows.
        columns: Headings, the first over the names of the rows.
        rows: Name and values of each row.
        strong: Number of the row to stress; None for none.
        shaded: Whether cells are shaded by their share in the sum of their row.
    """

    caption: str
    columns: Sequence[str]
    rows: Sequence[tuple[str, Sequence[Cell]]]
    strong: int | None = None
    shaded: bool = False

    def share(self, row: Sequence[Cell], value: Cell) -> float:
        """The share of a value in the sum of its row, in percent."""
        total = sum(other for other in row if isinstance(other, int | float))
        return 100 * value / total if isinstance(value, int | float) and total > 0 else 0.0


@dataclass(frozen=True)
class Sample:
    """Texts to be read side by side.

    Attributes:
        texts: Each with its name.
        verdict: A word on it.
        right: Whether the model was right, where that can be said.
        read: How many of the texts the model read; the others are compared.
    """

    texts: Sequence[tuple[str, str]]
    verdict: str = ""
    right: bool | None = None
    read: int = 1


@dataclass(frozen=True)
class Section:
    """A part of the page. Without content it is left out.

    Attributes:
        title: Its heading.
        tables: Tables.
        samples: Samples.
        notes: Remarks, such as what was not done.
    """

    title: str
    tables: Sequence[Table] = ()
    samples: Sequence[Sample] = ()
    notes: Sequence[str] = ()


@dataclass(frozen=True)
class Page:
    """All that a page shows, from top to bottom.

    Attributes:
        title: Heading.
        summary: What was done, in a sentence.
        tiles: A few numbers to begin with, by name.
        facts: What was run.
        command: The command line, in pieces that are better not broken.
        sections: Scores and samples.
        curves: Diagrams over the steps.
        measured: Time and memory.
        environment: Versions and devices.
        numbers: All metrics, by name.
        notes: What was not done.
        code: How to go on with what was made, as lines of Python.
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
    """Write a page, whole or not at all."""
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
    unfinished = path.with_name(f".{path.name}.part")
    unfinished.write_text(html, encoding="utf-8")
    unfinished.replace(path)


def clean(value: object) -> object:
    """Replace what a page cannot hold in texts; other values pass."""
    return _UNPRINTABLE.sub("�", _LINE_END.sub("\n", value)) if isinstance(value, str) else value


def excerpt(text: str, longest: int = _LONGEST) -> str:
    """Return the beginning of a text, with its length if that is not all of it."""
    text = _LINE_END.sub("\n", text)
    shown = "\n".join(text[:longest].split("\n")[:_MOST_LINES])
    return text if shown == text else f"{shown.rstrip()} … ({len(text):,} characters in all)"


def format_value(value: Cell) -> str:
    """Write a value for people: four digits of a fraction, groups of three of a large number."""
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
