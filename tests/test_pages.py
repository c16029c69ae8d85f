"""The pages' commands of hf-hybrid run, and so does, in small and as a whole, a page that shows what it prints."""

import io
import re
import runpy
import subprocess
from contextlib import redirect_stdout
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest

from hf_hybrid.commands.program import main

from .clients.folders import save
from .commands.files import write_docx, write_pdf
from .pages import COMMANDS, MAINS, ROOT, TEXTS, commands

RUN_PAGES = SimpleNamespace(**runpy.run_path(str(ROOT / "docs" / "run_pages.py")))
EXECUTED = RUN_PAGES.PAGES
MODELS = {
    "summarize": ("spade", "AutoModelForSeq2SeqLM"),
    "generate": ("spade", "AutoModelForCausalLM"),
    "classify": ("chela", "AutoModelForSequenceClassification"),
    "embed": ("chela", "AutoModel"),
}
FEWER = {command: ["--max_source_length", "16"] for command in MODELS}
FEWER["summarize"] = FEWER["generate"] = ["--max_source_length", "16", "--max_new_tokens", "4"]
FEWER_STEPS = (
    "--max_steps 2 --per_device_train_batch_size 2 --max_train_samples 100 --max_eval_samples 4 --eval_steps 1"
)
SMALLER = (
    f"{FEWER_STEPS} --max_seq_length 16 --tokenizer_vocab_size 300 --logging_steps 1 --use_cpu --disable_tqdm true"
)
TEXT = "The river rose in the night, and the bridge was closed."


def write_document(argument: str, column: str | None) -> list[str]:
    """Write what an argument of a command names, unless it is a text; return it as a shell would pass it."""
    path = Path(argument)
    if " " in argument or argument == "-":
        return [argument]
    (path if argument.endswith("/") else path.parent).mkdir(parents=True, exist_ok=True)
    if argument.endswith("/"):
        write_document(f"{argument}a.txt", None)
        write_document(f"{argument}b.pdf", None)
    elif path.stem == "*":
        for name in ("a", "b"):
            write_document(str(path.with_stem(name)), None)
        return sorted(map(str, path.parent.glob(path.name)))
    elif path.suffix == ".pdf":
        write_pdf(path, TEXT)
    elif path.suffix == ".docx":
        write_docx(path)
    elif path.suffix == ".parquet":
        import pandas

        pandas.DataFrame({column: [TEXT, TEXT * 2]}).to_parquet(path)
    elif path.suffix == ".csv":
        path.write_text(f"{column}\n" + f'"{TEXT}"\n' * 2, encoding="utf-8")
    else:
        path.write_text(TEXT, encoding="utf-8")
    return [argument]


@pytest.mark.parametrize("page", sorted({page for page, command in COMMANDS if command.answers} - {*EXECUTED}))
def test_commands_answer(page, tmp_path, monkeypatch, capsys):
    """With tiny models; the documents that they name are written first."""
    monkeypatch.chdir(tmp_path)
    for arguments in (command.arguments for where, command in COMMANDS if where == page and command.answers):
        command, model, *rest = arguments
        if not Path(model).exists():
            save(Path(model), *MODELS[command])
        documents = [word for before, word in pairwise(["", *rest]) if not word.startswith("-") and before[:2] != "--"]
        column = rest[rest.index("--text_column") + 1] if "--text_column" in rest else None
        given = [word for document in documents for word in write_document(document, column)]
        flags = [word for word in rest if word not in documents]
        if not documents:  # they come through a pipe
            monkeypatch.setattr("sys.stdin", SimpleNamespace(buffer=io.BytesIO(TEXT.encode()), isatty=lambda: False))
        assert main([command, model, *given, *flags, *FEWER[command]]) == 0, arguments
        output = Path(rest[rest.index("--output") + 1]).read_text() if "--output" in rest else capsys.readouterr().out
        assert output.strip(), arguments


@pytest.mark.parametrize("page", EXECUTED)
def test_a_page_that_shows_outputs_runs_as_it_stands(page, tmp_path, monkeypatch, capsys):
    """In small: its scripts take two steps, and its commands read the beginnings of documents."""
    monkeypatch.chdir(tmp_path)

    def run(language: str, source: str) -> str:
        printed = io.StringIO()
        with redirect_stdout(printed):
            if language == "python":
                exec(compile(source, page, "exec"), {})
                return printed.getvalue()
            for before, name, arguments in commands(f"```sh\n{source}```\n"):
                if name in MAINS:
                    MAINS[name]([*arguments, *SMALLER.split()])
                elif name == "hf-hybrid":
                    assert main([*arguments, *FEWER[arguments[0]]]) == 0
                else:
                    words = [*before, name, *arguments]
                    printed.write(subprocess.run(words, check=True, stdout=subprocess.PIPE, text=True).stdout)
        return printed.getvalue()

    shown = [step["output"] for step in RUN_PAGES.STEP.finditer(TEXTS[page]) if step["shown"]]
    made = [step["output"] for step in RUN_PAGES.STEP.finditer(RUN_PAGES.renewed(TEXTS[page], run)) if step["shown"]]
    assert len(shown) == TEXTS[page].count("<!-- output -->") > 0
    assert [shape(output) for output in made] == [shape(output) for output in shown]
    assert all((ROOT / picture).is_file() and f"]({Path(picture).relative_to('docs')})" in TEXTS[page]
               for picture in RUN_PAGES.PICTURES.values())  # fmt: skip
    assert all(Path(picture).is_file() for picture in RUN_PAGES.PICTURES)


def shape(output: str) -> list[str]:
    """What two runs of different length have in common: the lines, without numbers and labels."""
    return [re.sub(r"\d[\d.,e-]*", "0", re.sub(r"\b(pandas|scipy|sympy|torch)\b", "label", line))
            for line in output.splitlines()]  # fmt: skip


def test_outputs_are_renewed():
    run = RUN_PAGES.renewed
    page = "a\n```sh\nx\n```\n\n<!-- output -->\n```\nold\n```\n<!-- end -->\nb\n```python\ny\n```\n"
    seen = []

    def answer(language, source):
        seen.append((language, source))
        return f"new {language}\n"

    assert run(page, answer) == page.replace("old", "new sh")
    assert seen == [("sh", "x\n"), ("python", "y\n")]
    empty = page.replace("```\nold\n```\n", "")
    assert run(empty, answer) == page.replace("old", "new sh")
