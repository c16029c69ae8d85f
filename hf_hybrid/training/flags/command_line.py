"""Parse a command line or a file of flags into dataclasses, and show a command line without its secrets."""

import json
import os
import re
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

import yaml
from transformers import HfArgumentParser

from hf_hybrid.suggestions import did_you_mean
from hf_hybrid.training.flags.removed import translate_removed_flags

_SECRET_FLAGS = {"token", "hub_token", "push_to_hub_token", "use_auth_token"}
_SECRET = re.compile(r"hf_[A-Za-z0-9]{8,}|(?<=://)[^/\s@]+(?=@)")
_HIDDEN = "..."


def parse_arguments(dataclass_types: Sequence[Any], argv: Sequence[str] | None = None) -> tuple[Any, ...]:
    """Parse a command line into dataclasses.

    Args:
        dataclass_types: One dataclass per group of flags.
        argv: See `read_arguments`.

    Returns:
        One instance per dataclass, in their order.

    Raises:
        ValueError: A flag is unknown (with the closest known one) or its value cannot be used.
    """
    parser = FlagParser(dataclass_types, allow_abbrev=False)
    arguments = translate_removed_flags(read_arguments(argv), known=parser.flags)
    _, unknown = parser.parse_known_args(arguments)
    if unknown:
        parser.refuse(unknown[0])
    try:
        return parser.parse_args_into_dataclasses(arguments, look_for_args_file=False)
    except (TypeError, OSError, ImportError) as error:
        raise ValueError(f"the arguments cannot be used: {error}") from error
    except ValueError as error:  # raised here, it counts as the user's error and not as a library's
        raise ValueError(str(error)) from error


def read_arguments(argv: Sequence[str] | None = None) -> list[str]:
    """Return the arguments of a command line, or of the file of flags that it names.

    Args:
        argv: The arguments without the program's name; `sys.argv` when None. A single argument that ends in
            ``.json``, ``.yaml`` or ``.yml`` names a file of flags.

    Raises:
        ValueError: The file cannot be read.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    if len(arguments) == 1 and arguments[0].endswith((".json", ".yaml", ".yml")):
        return _read_arguments_file(Path(arguments[0]))
    return arguments


def given_flags(argv: Sequence[str] | None = None) -> set[str]:
    """Return the flags that a command line gives, as field names."""
    flags = (argument.partition("=")[0] for argument in read_arguments(argv) if argument.startswith("--"))
    return {flag[2:].replace("-", "_") for flag in flags}


def without_secrets(arguments: Sequence[str]) -> list[str]:
    """Replace tokens and passwords in the arguments of a command line by dots."""
    shown: list[str] = []
    hides_next = False
    for argument in arguments:
        flag, equals, _ = argument.partition("=")
        is_secret = flag.startswith("--") and flag[2:].replace("-", "_") in _SECRET_FLAGS
        if is_secret:
            shown.append(f"{flag}={_HIDDEN}" if equals else argument)
        else:
            shown.append(_HIDDEN if hides_next and not argument.startswith("--") else _SECRET.sub(_HIDDEN, argument))
        hides_next = is_secret and not equals
    return shown


def show_command(script: str, arguments: Sequence[str]) -> list[str]:
    """Return the command line of a run for a shell, without secrets: the program, then each flag with its values.

    The program is the script, or ``python -m hf_hybrid.training TASK`` or ``hf-hybrid train TASK`` if the user ran
    that, or if `script` is the name of a task that has no script. Several processes have their launcher.
    """
    task = script.removeprefix("run_").removesuffix(".py")
    others = (f"python -m hf_hybrid.training {task}", f"hf-hybrid train {task}")
    usual = f"python {script}" if script.endswith(".py") else others[0]
    shown = [_launched(sys.argv[0] if sys.argv[0] in others else usual)]
    for argument in map(shlex.quote, without_secrets(arguments)):
        if argument.lstrip("'").startswith("--"):
            shown.append(argument)
        else:
            shown[-1] += f" {argument}"
    return shown


def _launched(program: str) -> str:
    """Return what starts as many processes of a program as this run has."""
    processes = int(os.environ.get("WORLD_SIZE", "1"))
    if processes == 1 or not program.startswith("python "):
        return program
    here = int(os.environ.get("LOCAL_WORLD_SIZE", processes))
    machines = f" --nnodes {processes // here}" if here < processes else ""
    is_accelerate = "ACCELERATE_MIXED_PRECISION" in os.environ
    launcher = (
        f"accelerate launch --num_processes {processes}"
        if is_accelerate
        else f"torchrun{machines} --nproc_per_node {here}"
    )
    return f"{launcher}{program.removeprefix('python')}"


class FlagParser(HfArgumentParser):
    """HfArgumentParser that raises a ValueError instead of exiting."""

    def error(self, message: str) -> NoReturn:
        """Raise what argparse would print."""
        choice = re.search(r"invalid choice: '(.*)' \(choose from (.*)\)", message)
        hint = did_you_mean(choice[1], re.findall(r"[\w-]+", choice[2])) if choice else ""
        raise ValueError(message + hint)

    @property
    def flags(self) -> set[str]:
        """The names of all flags."""
        return {option[2:] for action in self._actions for option in action.option_strings if option[:2] == "--"}

    def refuse(self, argument: str) -> NoReturn:
        """Raise a ValueError for an argument that is no flag."""
        if not argument.startswith("-"):
            raise ValueError(f"unexpected argument {argument!r}; every value needs a --flag before it")
        name = argument.lstrip("-").split("=")[0]
        options = sorted(flag for flag in self.flags if "-" not in flag)
        raise ValueError(f"unknown flag --{name}.{did_you_mean(name, options)} --help lists all flags.")


def _read_arguments_file(path: Path) -> list[str]:
    if not path.is_file():
        raise ValueError(f"the arguments file {path} does not exist")
    try:
        text = path.read_text(encoding="utf-8")
        values = json.loads(text) if path.suffix == ".json" else yaml.safe_load(text)
    except (json.JSONDecodeError, yaml.YAMLError) as error:
        raise ValueError(f"the arguments file {path} cannot be read: {error}") from error
    if not isinstance(values, dict):
        raise ValueError(f"the arguments file {path} must hold one object of flags; got {type(values).__name__}")
    arguments: list[str] = []
    for name, value in values.items():
        if isinstance(value, list):
            arguments += [f"--{name}", *map(str, value)]
        elif isinstance(value, dict):
            arguments.append(f"--{name}={json.dumps(value)}")
        elif value is not None:
            arguments.append(f"--{name}={value}")
    return arguments
