"""Runs jobs in every process of a torchrun: ``torchrun -m tests.training.jobs JOBS.json``.

A job is the name of a module with a function `main`, and its command line. Beside the file of jobs, each process
leaves what its jobs returned or raised, which files it wrote in their output folders, and the seed of its random
numbers.

``python -m tests.training.jobs JOBS.json 4`` forks four processes, which takes less time.
"""

import gc
import importlib
import json
import os
import sys
import warnings
from pathlib import Path

import torch

from ..torchrun import fork


def run_jobs(path: Path) -> None:
    """Run the jobs of a file in this process."""
    jobs, rank = json.loads(path.read_text()), os.environ["RANK"]
    written: list[str] = []

    def watch(event: str, arguments: tuple) -> None:
        if event == "open" and isinstance(arguments[1], str) and set(arguments[1]) & set("wax+"):
            written.append(str(arguments[0]))

    sys.addaudithook(watch)
    gc.freeze()  # what is imported: each run collects garbage
    outcomes = []
    for name, argv in jobs:
        folder = argv[argv.index("--output_dir") + 1]
        written.clear()
        try:
            outcome = {"metrics": importlib.import_module(name).main(argv)}
        except ValueError as error:
            outcome = {"error": str(error)}
        inside = sorted({Path(file).name for file in written if Path(file).is_relative_to(folder)})
        outcomes.append({**outcome, "written": inside, "seed": torch.initial_seed()})
    path.with_name(f"outcomes-{rank}.json").write_text(json.dumps(outcomes))


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    path = Path(sys.argv[1])
    if len(sys.argv) < 3:
        run_jobs(path)
    else:
        for name, _ in json.loads(path.read_text()):
            importlib.import_module(name)
        fork(int(sys.argv[2]), run_jobs, path)
