"""Show errors to the user: one line, and the exit code of a script."""

import errno
import os
import re
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from huggingface_hub.errors import StrictDataclassError
from torch.distributed.elastic.multiprocessing.errors import ErrorHandler

from hf_hybrid.context_parallel import ProcessLost, known_fault
from hf_hybrid.training.processes import is_first_process

INTERRUPTED, TERMINATED, HUNG_UP = 130, 143, 129
"""Exit codes after Ctrl-C, SIGTERM and SIGHUP, as shells use them: 128 + the number of the signal."""
CONFIG_ERRORS = (
    *(OSError, ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError),
    StrictDataclassError,
)
"""Raised when a config.json is not a configuration: not JSON, nested too deeply, or with wrong values."""
_NO_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_TORCH = re.compile(r"PytorchStreamWriter failed writing|inline_container\.cc.*unexpected pos")


class RunFailed(RuntimeError):
    """A run cannot continue, for a reason outside the program; the message is one line."""


class Terminated(KeyboardInterrupt):
    """SIGTERM stopped training, like Ctrl-C."""


class HungUp(KeyboardInterrupt):
    """SIGHUP stopped training: its terminal was closed."""


def run_command_line(main: Callable[[], Any]) -> NoReturn:
    """Run a script's main function and exit with its code.

    A `ValueError` that this package raises is for the user to fix: it prints one line, ``error: ...``, and exits with
    2. One raised inside a library keeps its traceback. `RunFailed`, a full disk and a lost process print one line and
    exit with 1. Ctrl-C exits with 130, SIGTERM with 143 and SIGHUP with 129. An integer that main returns is the exit
    code.
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
        if isinstance(error.__context__, KeyboardInterrupt):  # a library failed while it was interrupted
            _leave(error.__context__)
        if (fault := known_fault(error)) is not None:
            _report(error, fault)
            sys.exit(1)
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
    """Print a message on the first process only: torchrun shows those of the others in its summary."""
    if is_first_process() or "TORCHELASTIC_ERROR_FILE" not in os.environ:
        message, notes = message or one_line(error), getattr(error, "__notes__", ())
        end = "." if notes and message[-1:] not in ".!?" else ""
        print(f"error: {' '.join([message + end, *notes])}", file=sys.stderr, flush=True)
    else:
        ErrorHandler().record_exception(error)


def end_without(message: str, speaks: bool) -> NoReturn:
    """Say in one line that another process is lost, and end this one, whose main thread may be waiting for it.

    The first process may be the lost one, and torchrun shows what others say only when all have ended.
    """
    if speaks:
        print(f"error: {message}", file=sys.stderr, flush=True)
    else:
        _report(ProcessLost(message))
    os._exit(1)


def _raised_in_package(error: BaseException) -> bool:
    frames = traceback.extract_tb(error.__traceback__)
    package = Path(__file__).resolve().parent.parent
    return bool(frames) and Path(frames[-1].filename).resolve().is_relative_to(package)


def one_line(error: BaseException) -> str:
    """Return an error's message as one line, without what huggingface_hub's strict dataclasses wrap around it."""
    while isinstance(error, StrictDataclassError) and error.__cause__ is not None:
        error = error.__cause__
    return " ".join(line.strip() for line in str(error).splitlines())


def explain_config_error(error: BaseException) -> str:
    """Say what is wrong with a config.json in one line, also if the error itself is about Python."""
    if isinstance(error, RecursionError):
        return "config.json is nested too deeply."
    if isinstance(error, (TypeError, KeyError, AttributeError)) and not isinstance(error, StrictDataclassError):
        return f"config.json must be an object of configuration fields, each of its type: {one_line(error)}"
    return one_line(error)


def no_room(error: BaseException | None) -> tuple[str, BaseException] | None:
    """Find a full disk among an error and its causes; return the system's message and the error."""
    while error is not None:
        number = error.errno if isinstance(error, OSError) else None
        if match := re.search(r"os error (\d+)", str(error)):  # libraries in Rust: safetensors, tokenizers
            number = int(match[1])
        if number in _NO_ROOM:
            return os.strerror(number), error
        if isinstance(error, RuntimeError) and _TORCH.search(str(error)):  # torch gives no reason
            return "the disk is full, or a limit is reached", error
        error = error.__cause__ or error.__context__
    return None
