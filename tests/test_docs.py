"""The documentation builds without a warning, and its reference leaves nothing out."""

import io
import re
import shutil
from pathlib import Path

import pytest
from sphinx.application import Sphinx
from sphinx.util.docutils import docutils_namespace, patch_docutils
from sphinx.util.inventory import InventoryFile

import hf_hybrid
from hf_hybrid import kernels

# Sphinx's own parts call what a later Sphinx will not have
pytestmark = pytest.mark.filterwarnings("ignore::PendingDeprecationWarning")

ROOT = Path(__file__).parents[1]


def build(pages: Path, out: Path) -> tuple[str, Path]:
    """Build pages as HTML; return the warnings and the folder."""
    warnings = io.StringIO()
    with patch_docutils(), docutils_namespace():
        Sphinx(pages, pages, out, out / ".doctrees", "html", status=None, warning=warnings).build(force_all=True)
    return re.sub(r"\x1b\[[\d;]*m", "", warnings.getvalue()), out


def test_the_documentation_builds_without_a_warning_and_names_everything_public(tmp_path):
    warnings, out = build(ROOT / "docs", tmp_path)
    assert warnings == ""
    inventory = InventoryFile.loads((out / "objects.inv").read_bytes(), uri="")
    documented = {
        name.rpartition(".")[2] for kind, entries in inventory.data.items() if "py:" in kind for name in entries
    }
    assert {*hf_hybrid.__all__, *kernels.__all__} - {"__version__"} <= documented
    front = (out / "index.html").read_text(encoding="utf-8")
    assert {"models/spade.html", "contributing.html", "reference.html"} <= set(re.findall(r'href="([^"#]+)', front))
    literal = re.findall(r"<pre>(.*?)</pre>", (out / "reference.html").read_text(encoding="utf-8"), re.DOTALL)
    equations = [re.sub(r"<[^>]*>", "", block) for block in literal]
    assert any(block.startswith("causal      o[t] = q[t] S[t],") for block in equations)  # linear attention's


def test_the_build_sees_what_is_wrong(tmp_path):
    shutil.copytree(ROOT / "docs" / "_static", tmp_path / "docs" / "_static")
    (tmp_path / "docs" / "conf.py").write_text((ROOT / "docs" / "conf.py").read_text(encoding="utf-8"), "utf-8")
    (tmp_path / "LICENSE").write_text("")
    (tmp_path / "docs" / "index.md").write_text("# A\n\n[b](none.md) [c](../LICENSE) [d](../none)\n\n### E\n")
    warnings, _ = build(tmp_path / "docs", tmp_path / "out")
    assert warnings.count("WARNING") == 3, warnings  # a page that is not there, a file that is not, a skipped heading
