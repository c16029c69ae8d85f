"""Loses one of four processes; `main` wants an interpreter that has started no threads.

In each case all meet once, then one ends, hangs, stops or leaves in order, and the others go on. What each of these
says goes to ``table.json``: case → messages of those that are left.
"""

import datetime
import json
import os
import signal
import socket
import threading
import time
from multiprocessing import util
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from hf_hybrid.context_parallel import ProcessLost, Shards, Watch, faults, gather, known_fault, make_shards, meet

SIZE, LAST = 4, 3
MEETINGS = {
    "make_shards": lambda group, rank: make_shards(3, group),
    "meet": lambda group, rank: meet(group, {"rows": [rank] * 9}),
    "gather": lambda group, rank: gather(Shards((1,) * SIZE, rank, group), torch.ones(2)),
    "sum": lambda group, rank: dist.all_reduce(torch.ones(2)),
    "barrier": lambda group, rank: dist.barrier(),
}
# with collectives of ours alone; and beside a watch
ALONE = ["make_shards ends", "meet ends", "gather ends", "make_shards hangs"]
WATCHED = ["meet stops", "sum ends", "barrier stops", "barrier leaves", "barrier stops with the store"]
SHORT, LONG = 3.0, 60.0
"""Seconds for which processes wait, where a process only hangs, and where somebody must notice sooner."""


def victim(case: str) -> int:
    """The process that is lost."""
    return 0 if case.endswith("store") else LAST


def _work(rank: int, case: str, folder: Path, port: int) -> None:
    torch.set_num_threads(1)
    faults.ROLL_CALL = 2.0
    name, how, *with_store = case.split()
    store = f"tcp://127.0.0.1:{port}" if with_store else f"file://{folder / case.replace(' ', '_')}"
    wait = datetime.timedelta(seconds=LONG)
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=SIZE, timeout=wait)
    # a process that waited for a neighbour in a ring would wait longer than the roll call takes
    limit = SHORT if how in ("hangs", "stops") else LONG
    group = dist.new_group(list(range(SIZE)), timeout=datetime.timedelta(seconds=limit))
    said: list[str] = []
    told = threading.Event()

    def tell(message: str, speaks: bool) -> None:
        said.append(f"{'aloud: ' if speaks else ''}{message}")
        told.set()

    if case in WATCHED:
        Watch(SHORT, tell)
    MEETINGS[name](group, rank)
    if rank == victim(case):
        (folder / f"{case} met").touch()
        _go(how)
    threading.Thread(target=_meet_again, args=(name, group, rank, tell), daemon=True).start()
    told.wait(4 * SHORT + 4 * faults.ROLL_CALL)
    (folder / f"{case} {rank}").write_text(said[0] if said else "nothing")
    time.sleep(faults.ROLL_CALL)  # until all have called the roll
    os._exit(0)


def _go(how: str) -> None:
    time.sleep(1.0)  # a watch has counted
    if how == "ends":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "stops":
        os.kill(os.getpid(), signal.SIGSTOP)
    if how == "leaves":
        util._exit_function()
    time.sleep(LONG if how == "leaves" else 3 * SHORT)
    os._exit(0)


def _meet_again(name: str, group: dist.ProcessGroup, rank: int, tell) -> None:
    try:
        MEETINGS[name](group, rank)
    except ProcessLost as lost:
        tell(str(lost), False)
    except RuntimeError as error:
        if (fault := known_fault(error)) is not None:
            tell(fault, False)


def _await(file: Path) -> None:
    for _ in range(600):
        if file.exists():
            return
        time.sleep(0.1)
    raise TimeoutError(f"{file} was not written: the processes of this case have not met")


def main(folder: Path) -> None:
    """Fill the folder."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    every, cases = [*ALONE, *WATCHED], []
    for case in every:
        cases.append(mp.start_processes(_work, (case, folder, port), SIZE, join=False, start_method="fork"))
        _await(folder / f"{case} met")  # on a busy machine those of all cases would not connect in time
    for case, context in zip(every, cases, strict=True):
        for rank, process in enumerate(context.processes):
            if rank != victim(case):
                process.join()
    table = {}
    for case, context in zip(every, cases, strict=True):
        context.processes[victim(case)].kill()
        context.processes[victim(case)].join()
        left = [rank for rank in range(SIZE) if rank != victim(case)]
        table[case] = [(folder / f"{case} {rank}").read_text() for rank in left]
    (folder / "table.json").write_text(json.dumps(table))
