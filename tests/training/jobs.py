"""Runs jobs in every process of a torchrun: ``torchrun -m tests.training.jobs JOBS.json``.

A job is the name of a module with a function `main`, and its command line. Beside the file of jobs, each process
leaves what its jobs returned or raised, and which files it wrote in their output folders.
"""

import importlib
import json
import os
import sys
import warnings
from pathlib import Path


def run_jobs(path: Path) -> None:
    """Run the jobs of a file in this process."""
    jobs, rank = json.loads(path.read_text()), os.environ["RANK"]
    written: list[str] = []

    def watch(event: str, arguments: tuple) -> None:
        if event == "open" and isinstance(arguments[1], str) and set(arguments[1]) & set("wax+"):
            written.append(str(arguments[0]))

    sys.addaudithook(watch)
    outcomes = []
    for name, argv in jobs:
        folder = argv[argv.index("--output_dir") + 1]
        written.clear()
        try:
            outcome = {"metrics": importlib.import_module(name).main(argv)}
        except ValueError as error:
            outcome = {"error": str(error)}
        inside = sorted({Path(file).name for file in written if Path(file).is_relative_to(folder)})
        outcomes.append({**outcome, "written": inside})
    path.with_name(f"outcomes-{rank}.json").write_text(json.dumps(outcomes))


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    run_jobs(Path(sys.argv[1]))
