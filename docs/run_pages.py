"""Run the commands of the pages that show outputs, and write what they print into these pages.

From the repository root, in its environment::

    python docs/run_pages.py

A page runs from top to bottom in an empty folder that holds the repository's scripts. Behind a block of Python or of
shell commands, ``<!-- output -->`` and ``<!-- end -->`` enclose what it writes to its standard output. Pictures that a
page shows and a run makes are copied to ``docs/figures``.
"""

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGES = ("docs/walkthrough.md",)
PICTURES = {"runs/libraries/curves.png": "docs/figures/walkthrough.png"}
STEP = re.compile(
    r"^```(?P<language>python|sh)\n(?P<source>.*?)^```\n"
    r"(?P<shown>\n<!-- output -->\n(?:```\n(?P<output>.*?)^```\n)?<!-- end -->\n)?",
    re.DOTALL | re.MULTILINE,
)
"""A block of a page, with the output behind it if the page shows one."""


def renewed(text: str, run: Callable[[str, str], str]) -> str:
    """Run the blocks of a page and return the page with their outputs.

    Args:
        text: The page.
        run: What runs a block, given its language and source, and returns what it prints.
    """

    def step(match: re.Match[str]) -> str:
        output = run(match["language"], match["source"])
        block = f"```{match['language']}\n{match['source']}```\n"
        return block if match["shown"] is None else f"{block}\n<!-- output -->\n```\n{output}```\n<!-- end -->\n"

    return STEP.sub(step, text)


def main() -> None:
    """Renew every page."""
    environment = os.environ | {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    with tempfile.TemporaryDirectory() as folder:

        def run(language: str, source: str) -> str:
            command = [sys.executable, "-c", source] if language == "python" else ["bash", "-ec", source]
            return subprocess.run(
                command, cwd=folder, env=environment, check=True, stdout=subprocess.PIPE, text=True
            ).stdout

        for script in ROOT.glob("run_*.py"):
            shutil.copy(script, folder)
        for page in PAGES:
            path = ROOT / page
            path.write_text(renewed(path.read_text(encoding="utf-8"), run), encoding="utf-8")
        for made, shown in PICTURES.items():
            shutil.copy(Path(folder) / made, ROOT / shown)


if __name__ == "__main__":
    main()
