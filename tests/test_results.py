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
    assert sorted(shown) == sorted(os.listdir(results_page.RESULTS))
    assert results_page.renewed(page) == page
