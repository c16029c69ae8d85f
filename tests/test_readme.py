"""What the documentation offers can be typed: its Python runs, its flags are known, its links lead somewhere."""

import ast
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import HfArgumentParser

from hf_hybrid.training.arguments import ModelArguments, ScriptTrainingArguments, SummarizationTrainingArguments
from hf_hybrid.training.command_line import parse_arguments
from hf_hybrid.training.data_arguments import ClmArguments, GlueArguments, SummarizationArguments

from .tolerances import assert_close

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
SCRIPTS = {
    "run_summarization.py": (ModelArguments, SummarizationArguments, SummarizationTrainingArguments),
    "run_glue.py": (ModelArguments, GlueArguments, ScriptTrainingArguments),
    "run_clm.py": (ModelArguments, ClmArguments, ScriptTrainingArguments),
}
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)


def pages(root: Path) -> list[Path]:
    return [root / "README.md", root / "CONTRIBUTING.md", *sorted((root / "docs").rglob("*.md"))]


def blocks(text: str, language: str) -> list[str]:
    """The fenced blocks of a page in one language."""
    return [body for name, body in FENCE.findall(text) if name == language]


def broken_links(root: Path) -> list[str]:
    """Links from a page to a file that does not exist."""
    broken = []
    for page in pages(root):
        prose = re.sub(r"`[^`]*`", "", FENCE.sub("", page.read_text(encoding="utf-8")))
        for target in re.findall(r"\]\(([^)\s]+)\)", prose):
            path = target.partition("#")[0]
            if "://" not in target and not (page.parent / path).exists():
                broken.append(f"{page.relative_to(root).as_posix()}: {target}")
    return broken


def commands(text: str) -> Iterator[tuple[str, list[str]]]:
    """Each run_*.py that the sh blocks of a page call, with its arguments."""
    for block in blocks(text, "sh"):
        for line in block.replace("\\\n", " ").splitlines():
            words = shlex.split(line, comments=True)
            for position, word in enumerate(words):
                if re.fullmatch(r"run_\w+\.py", word):
                    yield word, words[position + 1 :]


def unknown_flags(text: str) -> list[str]:
    """Flags in the commands of a page that their script does not have, those it only translates included."""
    unknown = []
    for script, arguments in commands(text):
        known = {name for action in HfArgumentParser(SCRIPTS[script])._actions for name in action.option_strings}
        flags = [argument.partition("=")[0] for argument in arguments if argument.startswith("-")]
        unknown += [f"{script} {flag}" for flag in flags if flag not in known]
    return unknown


def test_links_lead_somewhere():
    assert broken_links(ROOT) == []


def test_commands_are_understood(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    found = [command for page in pages(ROOT) for command in commands(page.read_text(encoding="utf-8"))]
    assert found
    for script, arguments in found:
        assert (ROOT / script).is_file()
        parse_arguments(SCRIPTS[script], arguments)
    for page in pages(ROOT):
        assert unknown_flags(page.read_text(encoding="utf-8")) == [], page


def test_the_checks_see_what_is_wrong(tmp_path):
    (tmp_path / "docs").mkdir()
    (tmp_path / "README.md").write_text(
        "[a](docs/page.md#top) [`b`](docs/none.md) `[c](none)` [d](https://x.org/y)\n```sh\n[e](gone)\n```\n"
    )
    (tmp_path / "CONTRIBUTING.md").write_text("[f](none.md)")
    (tmp_path / "docs" / "page.md").write_text("[g](../README.md)")
    assert broken_links(tmp_path) == ["README.md: docs/none.md", "CONTRIBUTING.md: none.md"]
    text = "```sh\npython run_summarization.py --do_train \\\n    --learn_rate=1 --no_cuda  # --comment\n```\n"
    assert unknown_flags(text) == ["run_summarization.py --learn_rate", "run_summarization.py --no_cuda"]


def test_the_readmes_python_does_what_it_says(tmp_path, monkeypatch):
    """Statement by statement, so that both models it makes are seen: the saved one and the loaded one."""
    monkeypatch.chdir(tmp_path)
    source, patching = blocks(README, "python")
    torch.manual_seed(0)
    names, models = {}, []
    for statement in ast.parse(source).body:
        exec(compile(ast.Module([statement], type_ignores=[]), "README.md", "exec"), names)
        if "model" in names and names["model"] not in models:
            models.append(names["model"])
    built, loaded = models
    document, summary = names["document"], names["summary"]
    assert document.shape == (1, 5000)
    assert summary.shape[0] == 1
    assert 2 <= summary.shape[1] <= 21  # the start token, and up to 20 new ones
    with torch.no_grad():
        expected, actual = (m(input_ids=document, decoder_input_ids=summary).logits for m in (built, loaded))
    assert_close(actual, expected, "exact")
    exec(compile(patching, "README.md", "exec"), names)
    assert names["srformer"] is names["t5"]
    assert names["srformer"].config.model_type == "srformer_t5"


PAGES_WITH_PYTHON = [page for page in pages(ROOT)[1:] if blocks(page.read_text(encoding="utf-8"), "python")]


@pytest.mark.parametrize("page", PAGES_WITH_PYTHON, ids=lambda page: page.name)
def test_python_on_other_pages_runs(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for source in blocks(page.read_text(encoding="utf-8"), "python"):
        exec(compile(source, page.name, "exec"), {})
