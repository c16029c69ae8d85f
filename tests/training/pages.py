"""What a report's HTML says, read back: and whether it is whole, and stands by itself."""

import re
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path

_VOID = {"meta", "br", "hr", "img", "link", "input"}


@dataclass
class PageContent:
    """Headings, samples (a text by its label each) and tables (values by row and caption) of a page."""

    html: str
    headings: list[str] = field(default_factory=list)
    samples: list[dict[str, str]] = field(default_factory=list)
    tables: dict[str, dict[str, list[str]]] = field(default_factory=dict)
    facts: dict[str, str] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    elements: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        """The page's text without its style."""
        return re.sub(r"<style.*?</style>|<[^>]*>", "", self.html, flags=re.DOTALL)


class _Reader(HTMLParser):
    def __init__(self, content):
        super().__init__(convert_charrefs=True)
        self.content, self.open, self.ids, self.text, self.cells = content, [], set(), "", []
        self.caption = self.label = self.term = ""
        self.references = []

    def handle_starttag(self, tag, attrs):
        content, attributes = self.content, dict(attrs)
        content.elements.append(tag)
        if tag not in _VOID:
            self.open.append(tag)
        if len(attributes) != len(attrs):
            content.problems.append(f"<{tag}> has an attribute twice")
        for name, value in attrs:
            if name == "id":
                if value in self.ids:
                    content.problems.append(f"id {value} twice")
                self.ids.add(value)
            local = re.fullmatch(r"#[\w-]+", value or "")
            if name in ("src", "href", "srcset", "data", "action", "poster", "xlink:href") and not local:
                content.problems.append(f"<{tag} {name}={value}> is another file")
            self.references += re.findall(r"url\(#([\w-]+)\)", value or "")
            if name == "aria-labelledby" or (name == "href" and local):
                self.references.append(value.lstrip("#"))
            if name.startswith("on"):
                content.problems.append(f"<{tag}> has {name}")
        if tag in ("script", "iframe", "object", "embed", "link", "base"):
            content.problems.append(f"<{tag}>")
        if tag == "svg" and not attributes.get("aria-labelledby"):
            content.problems.append("a drawing without words")
        if tag == "html" and attributes.get("lang") != "en":
            content.problems.append("no language")
        if tag == "article":
            content.samples.append({})
        if tag in ("tr", "article"):
            self.cells = []
        self.value = attributes.get("value") if tag == "data" else getattr(self, "value", None)
        if tag in ("h1", "h2", "caption", "th", "td", "dt", "dd", "p", "span"):
            self.text, self.value = "", None

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)
        self.handle_endtag(tag)

    def handle_data(self, data):
        self.text += data

    def handle_endtag(self, tag):
        content = self.content
        if not self.open or self.open.pop() != tag:
            content.problems.append(f"</{tag}> closes nothing")
            return
        text = self.text.strip()
        if tag in ("h1", "h2"):
            content.headings.append(text)
        elif tag == "caption":
            self.caption = text
            content.tables[text] = {}
        elif tag in ("th", "td"):
            self.cells.append(text if self.value is None else self.value)
        elif tag == "tr" and "tbody" in self.open:
            content.tables[self.caption][self.cells[0]] = self.cells[1:]
        elif tag == "dt":
            self.term = text
        elif tag == "dd":
            content.facts[self.term] = text if self.value is None else self.value
        elif tag == "span":
            self.label = text
        elif tag == "p" and "article" in self.open:
            content.samples[-1][self.label] = self.text

    def close(self):
        super().close()
        self.content.problems += [f"<{tag}> is never closed" for tag in self.open]
        self.content.problems += [f"#{name} is not there" for name in self.references if name not in self.ids]


def read_page(path: Path) -> PageContent:
    """Read a page; ``problems`` says what is wrong with it."""
    html = path.read_text(encoding="utf-8")
    content = PageContent(html)
    reader = _Reader(content)
    reader.feed(html)
    reader.close()
    if re.search(r"""url\(\s*["']?(?!#)|@import""", html):
        content.problems.append("the style loads something")
    if "<!DOCTYPE html>" not in html[:20]:
        content.problems.append("no doctype")
    return content
