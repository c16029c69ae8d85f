"""From a command line to dataclasses, and from an error to one line and an exit code."""

import dataclasses
import json
import logging
import os
import re
import shlex
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

import yaml
from huggingface_hub.errors import StrictDataclassError
from torch.distributed.elastic.multiprocessing.errors import ErrorHandler
from transformers import HfArgumentParser

from hf_hybrid.suggestions import did_you_mean
from hf_hybrid.training.full_disk import no_room
from hf_hybrid.training.processes import is_first_process

__all__ = [
    "CONFIG_ERRORS",
    "HungUp",
    "RunFailed",
    "Terminated",
    "explain_config_error",
    "given_flags",
    "one_line",
    "parse_arguments",
    "run_command_line",
    "show_command",
    "translate_removed_flags",
    "without_secrets",
]

logger = logging.getLogger(__name__)

INTERRUPTED, TERMINATED, HUNG_UP = 130, 143, 129
"""Exit codes after Ctrl-C, SIGTERM and SIGHUP, as shells use them: 128 + the number of the signal."""
CONFIG_ERRORS = (
    *(OSError, ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError),
    StrictDataclassError,
)
"""What reading a config.json raises that is no configuration: no JSON, nested too deeply, or of wrong values."""


_SECRET_FLAGS = {"token", "hub_token", "push_to_hub_token", "use_auth_token"}
_SECRET = re.compile(r"hf_[A-Za-z0-9]{8,}|(?<=://)[^/\s@]+(?=@)")
_HIDDEN = "..."


class RunFailed(RuntimeError):
    """A run cannot go on, for a reason outside the program; the message says all there is to say, and is one line."""


class Terminated(KeyboardInterrupt):
    """Training was stopped by SIGTERM, as it is by Ctrl-C."""


class HungUp(KeyboardInterrupt):
    """Training was stopped by SIGHUP: its terminal was closed."""


def parse_arguments(dataclass_types: Sequence[type], argv: Sequence[str] | None = None) -> tuple[Any, ...]:
    """Parse a command line into dataclasses.

    Args:
        dataclass_types: One dataclass per group of flags.
        argv: The arguments without the program's name; `sys.argv` when None. A single argument that ends in
            ``.json``, ``.yaml`` or ``.yml`` is read as a file of flags.

    Returns:
        One instance per dataclass, in their order.

    Raises:
        ValueError: A flag is unknown (with the closest known one) or its value cannot be used.
    """
    arguments = read_arguments(argv)
    parser = _Parser(list(dataclass_types), allow_abbrev=False)  # type: ignore[arg-type]
    arguments = translate_removed_flags(arguments, known=parser.flags)
    namespace, unknown = parser.parse_known_args(arguments)
    if unknown:
        parser.refuse(unknown[0])
    parsed = []
    for dataclass_type in dataclass_types:
        names = {field.name for field in dataclasses.fields(dataclass_type) if field.init}
        values = {name: value for name, value in vars(namespace).items() if name in names}
        try:
            parsed.append(dataclass_type(**values))
        except (TypeError, OSError, ImportError) as error:
            raise ValueError(f"the arguments cannot be used: {error}") from error
        except ValueError as error:  # told apart from failures inside libraries by where it is raised
            raise ValueError(str(error)) from error
    return tuple(parsed)


def read_arguments(argv: Sequence[str] | None = None) -> list[str]:
    """The arguments of a command line; those in the file where one that ends in .json, .yaml or .yml is all there is.

    Raises:
        ValueError: The file cannot be read.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    if len(arguments) == 1 and arguments[0].endswith((".json", ".yaml", ".yml")):
        return _read_arguments_file(Path(arguments[0]))
    return arguments


def given_flags(argv: Sequence[str] | None = None) -> set[str]:
    """The flags that a command line gives, under the names of their fields; what is left out has its default.

    Args:
        argv: As for `parse_arguments`, which has accepted it.
    """
    flags = (argument.partition("=")[0] for argument in read_arguments(argv) if argument.startswith("--"))
    return {flag[2:].replace("-", "_") for flag in flags}


def without_secrets(arguments: Sequence[str]) -> list[str]:
    """The arguments of a command line, with dots in place of tokens and passwords, so that they can be shown."""
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
    """The command line of a run as a shell takes it, without its secrets: the script, then each flag with its values.

    Args:
        script: Name of the script's file. Where ``python -m hf_hybrid.training`` stood in for it, that is shown.
        arguments: The command line behind it.
    """
    module = f"python -m hf_hybrid.training {script.removeprefix('run_').removesuffix('.py')}"
    shown = [module if sys.argv[0] == module else f"python {script}"]
    for argument in map(shlex.quote, without_secrets(arguments)):
        if argument.lstrip("'").startswith("--"):
            shown.append(argument)
        else:
            shown[-1] += f" {argument}"
    return shown


class _Parser(HfArgumentParser):
    """HfArgumentParser that raises ValueError instead of leaving the process."""

    def error(self, message: str) -> NoReturn:
        choice = re.search(r"invalid choice: '(.*)' \(choose from (.*)\)", message)
        hint = did_you_mean(choice[1], re.findall(r"[\w-]+", choice[2])) if choice else ""
        raise ValueError(message + hint)

    @property
    def flags(self) -> set[str]:
        return {option[2:] for action in self._actions for option in action.option_strings if option[:2] == "--"}

    def refuse(self, argument: str) -> NoReturn:
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


def _is_true(values: list[str]) -> bool:
    return not values or values[0].lower() in ("true", "t", "yes", "y", "1")


def _renamed(new: str) -> Callable[[list[str]], list[str]]:
    return lambda values: [f"--{new}", *values]


def _if_true(*arguments: str) -> Callable[[list[str]], list[str]]:
    return lambda values: list(arguments) if _is_true(values) else []


def _warmup_ratio(values: list[str]) -> list[str]:
    try:
        ratio = float(values[0])
    except (IndexError, ValueError):
        raise ValueError(f"--warmup_ratio takes a number in [0, 1); got {' '.join(values)!r}") from None
    if not 0 <= ratio < 1:
        raise ValueError(f"--warmup_ratio must lie in [0, 1); got {ratio}")
    return ["--warmup_steps", str(ratio)] if ratio else []


def _ignored(values: list[str]) -> list[str]:
    return []


_REMOVED: dict[str, tuple[Callable[[list[str]], list[str]], str]] = {
    "warmup_ratio": (_warmup_ratio, "--warmup_steps takes a ratio below one"),
    "group_by_length": (
        _if_true("--train_sampling_strategy", "group_by_length"),
        "use --train_sampling_strategy group_by_length",
    ),
    "no_cuda": (_if_true("--use_cpu"), "use --use_cpu"),
    "evaluation_strategy": (_renamed("eval_strategy"), "use --eval_strategy"),
    "evaluate_during_training": (_if_true("--eval_strategy", "steps"), "use --eval_strategy steps"),
    "adafactor": (_if_true("--optim", "adafactor"), "use --optim adafactor"),
    "per_gpu_train_batch_size": (_renamed("per_device_train_batch_size"), "use --per_device_train_batch_size"),
    "per_gpu_eval_batch_size": (_renamed("per_device_eval_batch_size"), "use --per_device_eval_batch_size"),
    "push_to_hub_token": (_renamed("hub_token"), "use --hub_token"),
    "push_to_hub_model_id": (_renamed("hub_model_id"), "use --hub_model_id"),
    "use_auth_token": (_renamed("token"), "use --token"),
    "torch_dtype": (_renamed("dtype"), "use --dtype"),
    "logging_dir": (_ignored, "it is ignored; set TENSORBOARD_LOGGING_DIR in the environment"),
    "save_safetensors": (_ignored, "it is ignored; checkpoints are always safetensors"),
    "half_precision_backend": (_ignored, "it is ignored; torch's autocast is always used"),
    "fp16_backend": (_ignored, "it is ignored; torch's autocast is always used"),
    "fp16_opt_level": (_ignored, "it is ignored; torch's autocast is always used"),
    "jit_mode_eval": (_ignored, "it is ignored"),
    "use_ipex": (_ignored, "it is ignored"),
    "past_index": (_ignored, "it is ignored"),
    "use_mps_device": (_ignored, "it is ignored; the device is found by itself"),
    "ray_scope": (_ignored, "it is ignored"),
    "tpu_num_cores": (_ignored, "it is ignored"),
    "tpu_metrics_debug": (_ignored, "it is ignored"),
    "from_tf": (_ignored, "it is ignored; TensorFlow weights cannot be loaded"),
}


def translate_removed_flags(arguments: Sequence[str], known: set[str] | None = None) -> list[str]:
    """Replace flags that transformers has removed by their successors, with one warning each.

    Args:
        arguments: A command line.
        known: Flags that exist and are left alone, whatever they were called before.

    Raises:
        ValueError: The value of a removed flag cannot be translated.
    """
    translated: list[str] = []
    position = 0
    while position < len(arguments):
        name, equals, value = arguments[position].removeprefix("--").partition("=")
        name = name.replace("-", "_")
        position += 1
        if not arguments[position - 1].startswith("--") or name not in _REMOVED or name in (known or ()):
            translated.append(arguments[position - 1])
            continue
        values = [value] if equals else []
        while not equals and position < len(arguments) and not arguments[position].startswith("--"):
            values.append(arguments[position])
            position += 1
        translate, note = _REMOVED[name]
        translated += translate(values)
        if is_first_process():
            logger.warning("--%s was removed from transformers: %s.", name, note)
    return translated


def run_command_line(main: Callable[[], Any]) -> NoReturn:
    """Run a script's main function and leave the process with its exit code.

    A `ValueError` raised by this package is the user's to mend: its message becomes one line, ``error: ...``, and the
    exit code 2. One raised inside a library keeps its traceback. `RunFailed`, and a disk that is full whoever met it,
    give one line and the exit code 1, Ctrl-C the exit code 130, SIGTERM 143 and SIGHUP 129. An integer that main
    returns is the exit code.
    """
    try:
        result = main()
    except RunFailed as error:
        _report(error)
        sys.exit(1)
    except Exception as error:
        if isinstance(error, ValueError) and _raised_in_package(error):
            _report(error)
            sys.exit(2)
        if isinstance(error.__context__, KeyboardInterrupt):  # a library failed while it made way for it
            _leave(error.__context__)
        if (found := no_room(error)) is None:
            raise
        _report(error, f"there is no room on a disk: {one_line(found[1])}. Make some and run the same command again.")
        sys.exit(1)
    except KeyboardInterrupt as interrupt:
        _leave(interrupt)
    sys.exit(result if isinstance(result, int) else 0)


def _leave(interrupt: KeyboardInterrupt) -> NoReturn:
    print(f"interrupted: {interrupt}" if str(interrupt) else "interrupted", file=sys.stderr)
    sys.exit({Terminated: TERMINATED, HungUp: HUNG_UP}.get(type(interrupt), INTERRUPTED))


def _report(error: Exception, message: str | None = None) -> None:
    """Print a message, once for all processes: torchrun shows those of the others in its summary."""
    if is_first_process() or "TORCHELASTIC_ERROR_FILE" not in os.environ:
        message, notes = message or one_line(error), getattr(error, "__notes__", ())
        end = "." if notes and message[-1:] not in ".!?" else ""
        print(f"error: {' '.join([message + end, *notes])}", file=sys.stderr, flush=True)
    else:
        ErrorHandler().record_exception(error)


def one_line(error: BaseException) -> str:
    """Say what is wrong on one line: the broken rule itself, where huggingface_hub's strict dataclasses wrap it."""
    while isinstance(error, StrictDataclassError) and error.__cause__ is not None:
        error = error.__cause__
    return " ".join(line.strip() for line in str(error).splitlines())


def explain_config_error(error: BaseException) -> str:
    """Say what is wrong with a config.json on one line, where the error itself speaks of Python."""
    if isinstance(error, RecursionError):
        return "config.json is nested too deeply."
    if isinstance(error, (TypeError, KeyError, AttributeError)) and not isinstance(error, StrictDataclassError):
        return f"config.json must be an object of configuration fields, each of its type: {one_line(error)}"
    return one_line(error)


def _raised_in_package(error: BaseException) -> bool:
    frames = traceback.extract_tb(error.__traceback__)
    package = Path(__file__).resolve().parent.parent
    return bool(frames) and Path(frames[-1].filename).resolve().is_relative_to(package)
