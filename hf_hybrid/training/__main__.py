"""Run the scripts without a clone: ``python -m hf_hybrid.training TASK FLAGS``, or after torchrun's own ``-m``.

TASK is summarization, glue, clm, pretrain, long_range or demo: ``python -m hf_hybrid.training clm FLAGS`` does what
``python run_clm.py FLAGS`` does.
"""

import importlib
import sys
from collections.abc import Sequence
from typing import Any

from hf_hybrid.suggestions import did_you_mean
from hf_hybrid.training.errors import run_command_line

TASKS = ("summarization", "glue", "clm", "pretrain", "long_range", "demo")


def main(argv: Sequence[str] | None = None) -> Any:
    """Run a task's main function.

    Args:
        argv: The task and its flags; `sys.argv` when None.

    Returns:
        What the task's main returns; None after ``--help``.

    Raises:
        ValueError: There is no such task, or a flag cannot be used.
    """
    task, *flags = list(sys.argv[1:] if argv is None else argv) or [""]
    if task in ("-h", "--help"):
        print(__doc__)
        return None
    if task not in TASKS:
        raise ValueError(f"the task must be one of {', '.join(TASKS)}; got {task!r}.{did_you_mean(task, TASKS)}")
    if argv is None:
        sys.argv[:] = [f"python -m hf_hybrid.training {task}", *flags]  # the name that --help shows
    return importlib.import_module(f"hf_hybrid.training.{task}").main(flags)


if __name__ == "__main__":
    run_command_line(main)
