"""Loses one of four processes: ``python -m tests.context_parallel.losing FOLDER``.

In each case all meet once, then the last one ends, hangs, stops or leaves in order, and the others go on. What each of
these says goes to ``table.json``: case → messages by rank.
"""

import atexit
import datetime
import json
import os
import signal
import sys
import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from hf_hybrid.context_parallel import ProcessLost, Shards, Watch, faults, gather, make_shards, meet

SIZE, LAST = 4, 3
MEETINGS = {
    "make_shards": lambda group, rank: make_shards(3, group),
    "meet": lambda group, rank: meet(group, {"rows": [rank] * 9}),
    "gather": lambda group, rank: gather(Shards((1,) * SIZE, rank, group), torch.ones(2)),
}
COLLECTIVES = [*(f"{name} ends" for name in MEETINGS), "make_shards hangs"]
WATCHES = ["watch stops", "watch leaves"]
HANGS = 9.0
"""Seconds for which a process that hangs is there: longer than the others wait."""
WATCHED = 1.0
"""Seconds within which a watch notices."""


def _work(rank: int, case: str, folder: Path) -> None:
    torch.set_num_threads(1)
    faults.ROLL_CALL = 2.0
    name, how = case.split()
    store = f"file://{folder / case.replace(' ', '_')}"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=SIZE)
    said = _watch(rank, how) if name == "watch" else _meet(rank, name, how)
    (folder / f"{case} {rank}").write_text(said)
    time.sleep(faults.ROLL_CALL)  # until all have called the roll
    os._exit(0)


def _watch(rank: int, how: str) -> str:
    said, told = "nothing", threading.Event()

    def tell(message: str) -> None:
        nonlocal said
        said = message
        told.set()

    Watch(WATCHED, tell)
    dist.barrier()
    if rank == LAST:
        time.sleep(WATCHED / 2)  # it has counted
        if how == "stops":
            os.kill(os.getpid(), signal.SIGSTOP)
        atexit._run_exitfuncs()
        os._exit(0)
    told.wait(4 * WATCHED)
    return said


def _meet(rank: int, name: str, how: str) -> str:
    # a process that waited for a neighbour in a ring would wait longer than the roll call takes
    limit = datetime.timedelta(seconds=3 if how == "hangs" else 30)
    group = dist.new_group(list(range(SIZE)), timeout=limit)
    MEETINGS[name](group, rank)
    if rank == LAST:
        if how == "ends":
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(HANGS)
        os._exit(0)
    try:
        MEETINGS[name](group, rank)
    except ProcessLost as lost:
        return str(lost)
    return "nothing"


def main(folder: Path) -> None:
    """Fill the folder."""
    every = [*COLLECTIVES, *WATCHES]
    cases = [mp.start_processes(_work, (case, folder), SIZE, join=False, start_method="fork") for case in every]
    for context in cases:
        for process in context.processes[:LAST]:
            process.join()
        context.processes[LAST].kill()
        context.processes[LAST].join()
    table = {case: [(folder / f"{case} {rank}").read_text() for rank in range(LAST)] for case in every}
    (folder / "table.json").write_text(json.dumps(table))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
