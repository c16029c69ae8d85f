"""The program ``hf-hybrid``: a command for each thing that is done with a model."""

import importlib
import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

from hf_hybrid.suggestions import did_you_mean
from hf_hybrid.training.errors import run_command_line
from hf_hybrid.version import __version__


class Command(NamedTuple):
    """A command: the module whose `main` runs it, and what it does."""

    module: str
    description: str


COMMANDS = {
    "summarize": Command("hf_hybrid.commands.answer", "Summarize documents with an encoder-decoder."),
    "generate": Command("hf_hybrid.commands.answer", "Continue texts with a language model."),
    "classify": Command("hf_hybrid.commands.answer", "Give documents the labels of a classifier."),
    "embed": Command("hf_hybrid.commands.answer", "Give documents vectors: a model's last hidden states, pooled."),
    "app": Command(
        "hf_hybrid.commands.app", "Open a page in the browser: drop a document, read what a model makes of it."
    ),
    "train": Command(
        "hf_hybrid.training.__main__", "Train a model: train summarization, glue, clm, pretrain or long_range."
    ),
    "demo": Command(
        "hf_hybrid.training.demo", "Fine-tune the starter to summarize, beside the same model from scratch."
    ),
    "run": Command("hf_hybrid.run", "Run another program with our models registered, such as lm_eval."),
    "doctor": Command("hf_hybrid.commands.doctor", "Print versions, devices and which kernels run, for a bug report."),
}
_ANSWER = "hf_hybrid.commands.answer"
_TASKS = {
    "summarization": "Train an encoder-decoder on documents and summaries, and apply it.",
    "glue": "Train a classifier of texts or pairs of texts, and apply it.",
    "clm": "Train a language model on texts.",
    "pretrain": "Train an encoder-decoder or an encoder on texts, to restore what is hidden in them.",
    "long_range": "Train a classifier on a task of the Long Range Arena.",
}


def main(argv: Sequence[str] | None = None) -> Any:
    """Run a command.

    Args:
        argv: The command and its arguments; those of this process when None.

    Returns:
        What the command returns: an integer is an exit code.

    Raises:
        ValueError: There is no such command, or its arguments cannot be used.
    """
    name, *arguments = list(sys.argv[1:] if argv is None else argv) or ["--help"]
    if name in ("-h", "--help", "help"):
        print(_usage("COMMAND", {name: command.description for name, command in COMMANDS.items()}))
        return 0
    if name in ("--version", "version"):
        print(__version__)
        return 0
    if name not in COMMANDS:
        raise ValueError(f"unknown command {name!r}.{did_you_mean(name, COMMANDS)} hf-hybrid --help lists them")
    if name == "train" and (not arguments or arguments[0] in ("-h", "--help")):
        print(_usage("train TASK", _TASKS))
        return 0
    command = importlib.import_module(COMMANDS[name].module)
    if COMMANDS[name].module == _ANSWER:
        return command.main(name, COMMANDS[name].description, arguments)
    if argv is None:
        sys.argv[:] = [f"hf-hybrid {' '.join([name, *arguments[:1]]) if name == 'train' else name}", *arguments]
    return command.main(arguments)


def run() -> NoReturn:
    """Run the command of this process, and exit."""
    try:
        run_command_line(main)
    except BrokenPipeError:  # the reader of the output, such as head, has enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(141)


def _usage(name: str, descriptions: Mapping[str, str]) -> str:
    width = max(map(len, descriptions))
    lines = [f"  {word:<{width}}  {description}" for word, description in descriptions.items()]
    return "\n".join([f"usage: hf-hybrid {name} ...", "", *lines, "", f"hf-hybrid {name} --help lists its flags."])
