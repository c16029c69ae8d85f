"""Processes on one machine's CPU, as torchrun starts them: once in a test run, for it takes long. Forks take less."""

import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import torch.multiprocessing as mp
from filelock import FileLock

LIMIT = 240
"""Seconds after which processes that wait for each other count as hanging."""


def torchrun(*command: str, log_dir: Path) -> subprocess.CompletedProcess:
    """Run a command in two processes; what each prints goes to ``log_dir`` too."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", "--tee", "3"]
    environment = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
    return subprocess.run(
        [sys.executable, *launcher, "--log-dir", str(log_dir), *command],
        cwd=Path(__file__).parents[1],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=LIMIT,
    )


def in_forks(module: str, *arguments: str) -> subprocess.CompletedProcess:
    """Run a module that calls `fork`; a process that is aborted says where."""
    return subprocess.run(
        [sys.executable, "-m", module, *arguments],
        cwd=Path(__file__).parents[1],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONFAULTHANDLER": "1"},
        capture_output=True,
        text=True,
        timeout=LIMIT,
    )


def fork(processes: int, work: Callable[..., None], *arguments: Any) -> None:
    """Run a function in processes with the environment that torchrun gives them; what is imported is imported once."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    mp.start_processes(_forked, (processes, port, work, arguments), nprocs=processes, start_method="fork")


def _forked(rank: int, processes: int, port: int, work: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    world = {"WORLD_SIZE": processes, "LOCAL_WORLD_SIZE": processes, "RANK": rank, "LOCAL_RANK": rank}
    world |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in world.items()})
    work(*arguments)


def leave() -> NoReturn:
    """End one of the processes that has written its results, at once.

    After FSDP torch's caches keep the process group, destroyed or not; its threads live on and, on a busy machine,
    now and then abort an interpreter that ends in the usual way.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def once(tmp_path_factory, name: str, fill: Callable[[Path], None]) -> Path:
    """A folder that the first of the test run's processes fills and the others find."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / name
    with FileLock(f"{folder}.lock"):
        if not (folder / "filled").exists():
            folder.mkdir(exist_ok=True)
            fill(folder)
            (folder / "filled").touch()
    return folder


def printed(log_dir: Path, rank: int, stream: str = "stdout") -> str:
    """What one process printed."""
    (path,) = log_dir.rglob(f"{rank}/{stream}.log")
    return path.read_text()
