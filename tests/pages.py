"""The documentation as a test reads it: its pages, their blocks, and the commands in them."""

import ast
import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from hf_hybrid.training import clm, glue, long_range, pretrain, summarization
from hf_hybrid.training.flags.data import (
    ClmArguments,
    GlueArguments,
    LongRangeArguments,
    PretrainArguments,
    SummarizationArguments,
)
from hf_hybrid.training.flags.model import ModelArguments
from hf_hybrid.training.flags.run import ScriptTrainingArguments, SummarizationTrainingArguments

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
SCRIPTS = {
    "run_summarization.py": (ModelArguments, SummarizationArguments, SummarizationTrainingArguments),
    "run_glue.py": (ModelArguments, GlueArguments, ScriptTrainingArguments),
    "run_clm.py": (ModelArguments, ClmArguments, ScriptTrainingArguments),
    "pretrain": (ModelArguments, PretrainArguments, ScriptTrainingArguments),
    "long_range": (ModelArguments, LongRangeArguments, ScriptTrainingArguments),
}
"""Each script, and the tasks that have none, with its groups of flags."""
MAINS = {
    "run_summarization.py": summarization.main,
    "run_glue.py": glue.main,
    "run_clm.py": clm.main,
    "pretrain": pretrain.main,
    "long_range": long_range.main,
}
ANSWERS = ("summarize", "generate", "classify", "embed")
TASKS = {
    "summarization": "run_summarization.py",
    "glue": "run_glue.py",
    "clm": "run_clm.py",
    "pretrain": "pretrain",
    "long_range": "long_range",
}
FENCE = re.compile(r"^```(\S*)[^\n]*\n(.*?)^```$", re.DOTALL | re.MULTILINE)
# what begins a command that no test runs -> why; the scripts, modules and targets in it are looked up, flags included
NOT_RUN = {
    "make": "makes an environment, or is what runs this test",
    "python -m pip": "needs an index of packages",
    "python -m benchmarks": "measures for minutes, in part on data that are not of the project",
    "python -m hf_hybrid.training": "is one of the scripts, which run; tests/training/test_main.py says so",
    "python -m hf_hybrid.run": "runs other programs; tests/clients does so where they are installed",
    "python -m hf_hybrid": "is hf-hybrid",
    "hf-hybrid app": "shows a page until Ctrl-C; tests/clients does so in a browser",
    "hf-hybrid train": "is one of the scripts",
    "hf-hybrid demo": "trains for minutes",
    "hf-hybrid doctor": "takes no arguments; tests/commands runs it",
    "cat": "is the shell's",
    "head": "is the shell's",
    "lm_eval": "is such a program",
    "curl": "asks that server",
    "hf": "uploads to the Hub",
    "torchrun": "wants several GPUs or machines; tests/training has runs of two processes",
    "accelerate": "as torchrun",
    ".": "enters an environment",
}
# flags that a script is not run with -> why
NOT_RUN_WITH = {
    "--push_to_hub": "uploads to the Hub",
    "--deepspeed": "wants DeepSpeed",
    "--fsdp": "wants several GPUs",
}
# sizes that a run of a test is cut down to; a flag that is given twice counts as it is given last
FEWER = "--max_steps 2 --per_device_train_batch_size 2 --max_train_samples 4 --max_eval_samples 2"
SMALLER = {
    "run_summarization.py": f"{FEWER} --max_predict_samples 2 --max_target_length 8",
    "run_glue.py": f"{FEWER} --max_predict_samples 2 --max_seq_length 32",
    "run_clm.py": FEWER,
    "pretrain": f"{FEWER} --max_seq_length 32",
    "long_range": f"{FEWER} --max_predict_samples 2 --config_overrides num_hidden_layers=1",
}


class Command(NamedTuple):
    """One command of a page: the words before its script or module, that, and the words behind it."""

    before: list[str]
    name: str
    arguments: list[str]

    @property
    def is_run(self) -> bool:
        """Whether a test runs it: a script in one process, on data and models that can be had without a network."""
        program = ["python"] if self.name.endswith(".py") else ["python", "-m", "hf_hybrid.training"]
        return self.before == program and self.name in SCRIPTS and not NOT_RUN_WITH.keys() & set(self.arguments)

    @property
    def answers(self) -> bool:
        """Whether it is a command of hf-hybrid that answers, which tests/test_pages.py runs."""
        return self.name == "hf-hybrid" and self.arguments[0] in ANSWERS

    @property
    def is_known(self) -> bool:
        """Whether the lists of what no test runs have it."""
        words = " ".join([*self.before, self.name, *self.arguments])
        return bool(NOT_RUN_WITH.keys() & set(self.arguments)) or any(
            re.match(re.escape(start) + r"(?![\w-])", words) for start in NOT_RUN
        )


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


def commands(text: str) -> Iterator[Command]:
    """Each command of the sh blocks of a page, and of its running text where that names a module or a target."""
    lines = [line for block in blocks(text, "sh") for line in block.replace("\\\n", " ").splitlines()]
    prose = FENCE.sub("", text)
    lines += [found.replace("\n", " ") for found in re.findall(r"`((?:python -m [a-z]|make [a-z])[^`]*)`", prose)]
    for line in lines:
        words = shlex.split(line, comments=True)
        for step in (list(part) for part in split_at(words, ("&&", "|"))):
            while step and re.fullmatch(r"[A-Z_]+=.*", step[0]):
                step = step[1:]  # variables of the environment
            if not step:
                continue
            script = next((word for word in step if re.fullmatch(r"run_\w+\.py", word)), None)
            if script:
                yield Command(step[: step.index(script)], script, step[step.index(script) + 1 :])
            elif "-m" in step:
                place = step.index("-m") + 1
                module, arguments = step[place], step[place + 1 :]
                if module == "hf_hybrid.training" and arguments and arguments[0] in TASKS:
                    yield Command([*step[:place], module], TASKS[arguments[0]], arguments[1:])
                else:
                    yield Command(step[:place], module, arguments)
            else:
                yield Command([], step[0], step[1:])


def split_at(words: list[str], separators: tuple[str, ...]) -> Iterator[list[str]]:
    """The pieces of a line between separators."""
    piece: list[str] = []
    for word in [*words, separators[0]]:
        if word in separators:
            yield piece
            piece = []
        else:
            piece.append(word)


def script_docstrings() -> dict[str, str]:
    """The commands that each script's docstring names, as a page."""
    files = [ROOT / name for name in SCRIPTS if name.endswith(".py")]
    sources = {file.name: ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) for file in files}
    return {name: "```sh\n" + "\n".join(source.split("\n\n")[1:]) + "\n```\n" for name, source in sources.items()}


TEXTS = {page.relative_to(ROOT).as_posix(): page.read_text(encoding="utf-8") for page in pages(ROOT)}
COMMANDS = [(page, command) for page, text in (TEXTS | script_docstrings()).items() for command in commands(text)]
PAGES_WITH_RUNS = sorted({page for page, command in COMMANDS if command.is_run and page in TEXTS})


def write_data(script: str, path: Path) -> None:
    """Write a file such as a command reads."""
    path.parent.mkdir(parents=True, exist_ok=True)
    words = [
        f"the {colour} {thing}" for colour in ("red", "grey", "new") for thing in ("river", "road", "house", "tree")
    ]
    if script == "run_summarization.py":
        rows = [{"document": f"{word} " * 9, "summary": word} for word in words]
        text = "".join(json.dumps(row) + "\n" for row in rows)
    elif script == "long_range":
        text = "".join(
            json.dumps({"text": f"{word} " * 9, "label": place % 2}) + "\n" for place, word in enumerate(words)
        )
    elif script == "pretrain":
        text = "".join(json.dumps({"text": f"{word} " * 9}) + "\n" for word in words)
    elif script == "run_clm.py":
        text = " ".join(words * 60)
    else:  # as GLUE is distributed
        rows = [f"{number % 2}\t{number}\t{number}\t{word} is there\t{word}" for number, word in enumerate(words)]
        text = "\n".join(["Quality\t#1 ID\t#2 ID\t#1 String\t#2 String", *rows])
    path.write_text(text, encoding="utf-8")
