"""The pages show what the committed measurements say."""

import os
import re
from pathlib import Path

from benchmarks import figures, results_page

ROOT = Path(__file__).parent.parent


def test_the_tables_are_those_of_the_committed_files(monkeypatch):
    monkeypatch.chdir(ROOT)
    pages = {path: path.read_text(encoding="utf-8") for path in results_page.DOCS.rglob("*.md")}
    shown = re.findall(r"<!-- table: (\S+) -->", "\n".join(pages.values()))
    # curves/ is drawn, and aot/ has pages of its own
    there = {entry.name for entry in os.scandir(results_page.RESULTS) if entry.is_file()}
    there |= {f"gpu/{name}" for name in os.listdir(results_page.RESULTS / "gpu")}
    there -= {*re.findall(r"<!-- value: (\S+) ", "\n".join(pages.values()))}
    assert sorted(shown) == sorted(there)
    for path, page in pages.items():
        assert results_page.renewed(page) == page, path


def test_the_figures_are_those_of_the_committed_files(monkeypatch):
    monkeypatch.chdir(ROOT)
    for name, shown in figures.SHOWN.items():
        path = figures.FIGURES / f"{name}.svg"
        if panels := shown():
            assert path.read_text(encoding="utf-8").endswith(f"<!-- shows {figures.digest(panels)} -->\n"), path
        else:
            assert not path.exists()
