"""Runs jobs in every process of a torchrun: ``torchrun -m tests.training.torchrun JOBS.json``.

A job is the name of a module with a function `main`, and its command line. Beside the file of jobs, each process
leaves what its jobs returned or raised, and which files it wrote in their output folders.
"""

import importlib
import json
import os
import subprocess
import sys
import warnings
from pathlib import Path

LIMIT = 240
"""Seconds after which processes that wait for each other count as hanging."""


def torchrun(*command: str, log_dir: Path) -> subprocess.CompletedProcess:
    """Run a command in two processes; what each prints goes to ``log_dir`` too."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", "--tee", "3"]
    environment = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
    return subprocess.run(
        [sys.executable, *launcher, "--log-dir", str(log_dir), *command],
        cwd=Path(__file__).parents[2],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=LIMIT,
    )


def printed(log_dir: Path, rank: int, stream: str = "stdout") -> str:
    """What one process printed."""
    (path,) = log_dir.rglob(f"{rank}/{stream}.log")
    return path.read_text()


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
