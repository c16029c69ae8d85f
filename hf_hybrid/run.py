"""Run another program with our models registered: ``python -m hf_hybrid.run lm_eval --model hf ...``.

Programs such as lm_eval, transformers and accelerate cannot be told to import a package that registers models. This
imports `hf_hybrid` and then runs the program's own main, with its arguments untouched. Processes that the program
starts itself do not import it: use a checkpoint with its code there (`export_remote_code`).
"""

import runpy
import sys
from collections.abc import Sequence
from importlib.metadata import entry_points
from importlib.util import find_spec

import hf_hybrid  # noqa: F401

USAGE = "usage: hf-hybrid run PROGRAM [ARGUMENT ...], or python -m hf_hybrid.run PROGRAM [ARGUMENT ...]"


def main(argv: Sequence[str] | None = None) -> object:
    """Run the command or module that the first argument names.

    Args:
        argv: The program and its arguments; those of this process when None.

    Raises:
        SystemExit: There is no such program; otherwise what the program raises.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments:
        sys.exit(USAGE)
    name = arguments[0]
    if name in ("-h", "--help"):
        print(f"{USAGE}\n\n{__doc__}")
        return None
    commands = [entry for entry in entry_points(group="console_scripts") if entry.name == name]
    sys.argv = arguments
    if commands:
        return commands[0].load()()
    if not _is_module(name):
        sys.exit(f"{USAGE}\nPROGRAM must be an installed command or module; got {name!r}")
    runpy.run_module(name, run_name="__main__", alter_sys=True)
    return None


def _is_module(name: str) -> bool:
    try:
        return all(part.isidentifier() for part in name.split(".")) and find_spec(name) is not None
    except ModuleNotFoundError:  # of the package that it would be in
        return False


if __name__ == "__main__":
    sys.exit(main())  # type: ignore[arg-type]
