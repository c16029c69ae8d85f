"""The results page shows what the committed measurements say."""

import os
import re
from pathlib import Path

from benchmarks import results_page

ROOT = Path(__file__).parent.parent


def test_the_tables_are_those_of_the_committed_files(monkeypatch):
    monkeypatch.chdir(ROOT)
    page = results_page.PAGE.read_text(encoding="utf-8")
    shown = re.findall(r"<!-- table: (\S+) -->", page)
    # aot/ has pages of its own
    assert sorted(shown) == sorted(entry.name for entry in os.scandir(results_page.RESULTS) if entry.is_file())
    assert results_page.renewed(page) == page
