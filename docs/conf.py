"""Sphinx: the pages of this folder, and the reference that is made from docstrings. `make docs` builds both."""

import re
from pathlib import Path
from textwrap import indent
from typing import Any

from docutils import nodes
from sphinx.addnodes import download_reference, pending_xref
from sphinx.application import Sphinx

from hf_hybrid import __version__

project = "hf_hybrid"
author = project
copyright = "the contributors, Apache-2.0"
version = release = __version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["_build"]
myst_heading_anchors = 3  # links such as data.md#small-runs, which a forge resolves by itself

default_role = "code"  # docstrings are written as Markdown: single backticks hold code
maximum_signature_line_length = 100
autodoc_inherit_docstrings = False
toc_object_entries = False
autodoc_member_order = "bysource"
autodoc_typehints = "none"  # arguments have their types, and tensors their shapes, in the text
autodoc_default_options = {
    "members": True,
    # what only transformers calls
    "exclude-members": "config_class, get_input_embeddings, get_text_config, post_init, resize_token_embeddings, "
    "set_input_embeddings, validate, validate_architecture, validate_layer_type",
}
napoleon_numpy_docstring = False
napoleon_use_ivar = True
napoleon_custom_sections = [  # what divides the fields of a config
    (name, "params_style")
    for name in (
        "Attention",
        "State space model",
        "Convolutions",
        "Context states",
        "Feed forward and norms",
        "Embeddings and heads",
        "Ablations and variants",
    )
]
napoleon_use_rtype = False  # "`(B, T)`: what it holds" is a sentence

html_theme = "alabaster"
html_theme_options = {"description": "Long-sequence models for Transformers", "page_width": "1150px"}
html_show_sourcelink = False
html_static_path = ["_static"]  # the theme takes custom.css

_ROOT = Path(__file__).parents[1]
_PAGES = {"README.md": "index", "CONTRIBUTING.md": "contributing"}  # outside this folder -> the page that includes it
_SECTION = re.compile(r"[A-Z]\w*( \w+){0,3}:$")
_EQUATION = re.compile(r"\n*(    |[^`\n]{1,30} = |[^\n]*\S {3,}\S)")


def setup(app: Sphinx) -> None:
    """Connect the two functions below."""
    app.connect("autodoc-process-docstring", _set_equations_apart, priority=400)  # before napoleon's 500
    app.connect("doctree-read", _leave_this_folder)


def _set_equations_apart(_app: Sphinx, _what: str, _name: str, _object: Any, _options: Any, lines: list[str]) -> None:
    """Make literal blocks of equations, and of what is indented, in the text before the first section."""
    end = next((number for number, line in enumerate(lines) if _SECTION.match(line)), len(lines))
    paragraphs = "\n".join(lines[:end]).split("\n\n")
    for number, paragraph in enumerate(paragraphs):
        if number and not paragraphs[number - 1].endswith("::") and _EQUATION.match(paragraph):
            paragraphs[number] = "::\n\n" + indent(paragraph, "    ")
    lines[:end] = "\n\n".join(paragraphs).split("\n")


def _leave_this_folder(app: Sphinx, document: nodes.document) -> None:
    """Lead links to a file outside this folder to the page that includes it; show those to others as text."""
    page = app.env.docname
    folders = (_ROOT, (_ROOT / "docs" / page).parent)  # what is included keeps links that begin at the root
    for link in [*document.findall(pending_xref), *document.findall(download_reference)]:
        if link["reftype"] != "myst" or link["refdomain"] == "doc":
            continue
        paths = [(folder / link["reftarget"].partition("#")[0]).resolve() for folder in folders]
        outside = [path.relative_to(_ROOT).as_posix() for path in paths if path.exists() and path != _ROOT]
        if not outside:
            continue  # leads nowhere, which Sphinx is to say
        if outside[0] in _PAGES:
            options = {"refdomain": "doc", "reftarget": _PAGES[outside[0]], "reftargetid": None, "refexplicit": True}
            link.replace_self(pending_xref("", *link.children, reftype="myst", refdoc=page, **options))
        else:
            link.replace_self(link.children)
