"""Loses one of four processes: ``python -m tests.context_parallel.losing FOLDER``.

In each case all meet once, then the last one ends or hangs, and the others go on. What each of these says goes to
``table.json``: case → messages by rank.
"""

import datetime
import json
import os
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from hf_hybrid.context_parallel import ProcessLost, Shards, faults, gather, make_shards, meet

SIZE, LAST = 4, 3
MEETINGS = {
    "make_shards": lambda group, rank: make_shards(3, group),
    "meet": lambda group, rank: meet(group, {"rows": [rank] * 9}),
    "gather": lambda group, rank: gather(Shards((1,) * SIZE, rank, group), torch.ones(2)),
}
CASES = [*(f"{name} ends" for name in MEETINGS), "make_shards hangs"]
HANGS = 9.0
"""Seconds for which a process that hangs is there: longer than the others wait."""


def _work(rank: int, case: str, folder: Path) -> None:
    torch.set_num_threads(1)
    faults.ROLL_CALL = 2.0
    name, how = case.split()
    # a process that waited for a neighbour in a ring would wait longer than the roll call takes
    limit = datetime.timedelta(seconds=3 if how == "hangs" else 30)
    store = f"file://{folder / case.replace(' ', '_')}"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=SIZE)
    group = dist.new_group(list(range(SIZE)), timeout=limit)
    MEETINGS[name](group, rank)
    if rank == LAST:
        if how == "ends":
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(HANGS)
        os._exit(0)
    try:
        MEETINGS[name](group, rank)
        said = "nothing"
    except ProcessLost as lost:
        said = str(lost)
    (folder / f"{case} {rank}").write_text(said)
    time.sleep(faults.ROLL_CALL)  # until all have called the roll
    os._exit(0)


def main(folder: Path) -> None:
    """Fill the folder."""
    cases = [mp.start_processes(_work, (case, folder), SIZE, join=False, start_method="fork") for case in CASES]
    for context in cases:
        for process in context.processes:
            process.join()
    table = {case: [(folder / f"{case} {rank}").read_text() for rank in range(LAST)] for case in CASES}
    (folder / "table.json").write_text(json.dumps(table))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
