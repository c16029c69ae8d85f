"""What happens if a process ends or hangs: the others stop waiting, and all of them say which one it was.

A collective that fails, or that takes longer than the timeout of its group, is followed by a roll call in the store
through which the processes found each other: whoever is there signs, and who has not signed in time is named. A
`Watch` also notices a process that has stopped while the others wait for something without a short timeout.
"""

import atexit
import contextlib
import datetime
import pickle
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

ROLL_CALL = 10.0
"""Seconds that processes wait for each other's signatures."""
_KEY = "hf_hybrid/context_parallel"
_LEFT = -(2**40)
"""What a process that ends in order adds to its count."""
_calls_roll = threading.Event()
"""Set once a collective of this process has failed."""


class ProcessLost(RuntimeError):
    """Processes that share sequences cannot go on, for one of them has ended or hangs; the message names it."""


@contextlib.contextmanager
def named_faults(group: dist.ProcessGroup | None) -> Iterator[None]:
    """Run collectives of a group, and name the processes that are missing if one fails.

    Raises:
        ProcessLost: A collective failed or timed out.
    """
    try:
        yield
    except RuntimeError as error:
        raise ProcessLost(_explain(group, error)) from error


def from_all(x: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Return a small tensor of each process, `(R, ...)` on the CPU; the same shape on all.

    It is an all-to-all, in which every process notices when another one is missing. An all-gather goes around a ring
    with gloo: some would wait for neighbours that have noticed it, not answer the roll call, and be named themselves.

    Raises:
        ProcessLost: A process has ended, or did not come within the timeout of the group.
    """
    copies = x.expand(dist.get_world_size(group), *x.shape).contiguous()
    received = torch.empty_like(copies)
    with named_faults(group):
        dist.all_to_all_single(received, copies, group=group)
        return received.cpu()


def meet(group: dist.ProcessGroup | None, entry: Any) -> dict[int, Any]:
    """Wait for all processes of a group on the CPU, and return what each brings, by rank.

    Args:
        group: A group that can communicate on the CPU.
        entry: Anything small that pickle can store.

    Raises:
        ProcessLost: A process has ended, or did not come within the timeout of the group.
    """
    own = torch.frombuffer(bytearray(pickle.dumps(entry)), dtype=torch.uint8)
    sizes = from_all(torch.tensor(len(own)), group).tolist()
    rows = from_all(F.pad(own, (0, max(sizes) - len(own))), group)
    ranks = dist.get_process_group_ranks(group)
    return {rank: pickle.loads(bytes(row[:size].tolist())) for rank, row, size in zip(ranks, rows, sizes, strict=True)}


def known_fault(error: BaseException) -> str | None:
    """Return what is known of lost processes, in this one or another, after an error of a collective; or None."""
    if isinstance(error, ProcessLost):
        return str(error)
    if not isinstance(error, RuntimeError) or not dist.is_initialized():
        return None
    try:
        store = _store()
        return store.get(f"{_KEY}/fault").decode() if store.check([f"{_KEY}/fault"]) else None
    except RuntimeError:  # the store has gone too
        return None


def _store() -> Any:
    return dist.distributed_c10d._get_default_store()  # type: ignore[no-untyped-call]  # torch has no public name


def _explain(group: dist.ProcessGroup | None, error: RuntimeError) -> str:
    _calls_roll.set()
    ranks = dist.get_process_group_ranks(group)
    together = f"ranks {', '.join(map(str, ranks))} share a sequence"
    try:
        store = _store()
        missing = _roll_call(store, ranks)
    except RuntimeError:
        return f"{together}; one of them has ended, and the store of rank 0 with it"
    if missing:
        message = (
            f"{_named(missing)} ended, or did not answer in time: {together}, and none can go on without the others"
        )
    else:
        message = f"{together}, and all answer, but they cannot send: {str(error).splitlines()[0]}"
    store.set(f"{_KEY}/fault", message)
    return message


def _named(ranks: list[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"


def _roll_call(store: Any, ranks: list[int]) -> list[int]:
    """Sign, and return those who have not within `ROLL_CALL`."""
    store.set(f"{_KEY}/{dist.get_rank()}", "here")
    until = time.monotonic() + ROLL_CALL
    missing = ranks
    while missing and time.monotonic() < until:
        time.sleep(0.05)
        missing = [rank for rank in missing if not store.check([f"{_KEY}/{rank}"])]
    return missing


class Watch:
    """Notices in time that another process has stopped: by a signal, with its machine, or inside of a library.

    A thread of each process counts in the store through which all met, and reads the counts of the others. It also
    notices what no collective does: that a process stands still while the others wait for a sum of gradients, or for
    files to be saved, which may take long. A process whose own thread still counts is never named, however long it
    takes; one that ends in order, with an error or without, says so first.

    Args:
        limit: Seconds without a count after which a process is lost.
        on_loss: Gets a message that names the lost ranks, the same in all processes; called in a thread, at most once,
            and not if a collective of this process has failed already.
    """

    def __init__(self, limit: float, on_loss: Callable[[str], Any]) -> None:
        self._limit, self._on_loss = limit, on_loss
        self._rank, self._pause = dist.get_rank(), limit / 10
        self._store = _store().clone()  # the other client may be waiting for something
        self._store.set_timeout(datetime.timedelta(seconds=limit))
        self._counts = dict.fromkeys(range(dist.get_world_size()), 0)
        self._heard = dict.fromkeys(self._counts, time.monotonic())
        self._ends = threading.Event()
        self._threads = [threading.Thread(target=work, daemon=True) for work in (self._count, self._judge)]
        for thread in self._threads:
            thread.start()
        atexit.register(self._leave)

    def _leave(self) -> None:
        """Say that this process ends, and that nobody should miss it."""
        self._ends.set()
        for thread in self._threads:  # one that came back from the store to an interpreter that has ended would abort
            thread.join(self._limit)
        with contextlib.suppress(RuntimeError):  # the store may have ended before
            self._store.add(self._key(self._rank), _LEFT)

    def _key(self, rank: int) -> str:
        return f"{_KEY}/count/{rank}"

    def _count(self) -> None:
        """Count, and note whose count has changed; ends with the store, whose end all collectives notice."""
        while not self._ends.wait(self._pause):
            for rank, before in self._counts.items():
                try:
                    count = self._store.add(self._key(rank), rank == self._rank)
                except RuntimeError:
                    self._ends.set()
                    return
                if count != before or count < 0:
                    self._counts[rank], self._heard[rank] = count, time.monotonic()

    def _judge(self) -> None:
        """Look who has not been heard of; in a thread of its own, since the store may answer no more."""
        looked = time.monotonic()
        while not self._ends.wait(self._pause):
            now = time.monotonic()
            if now - looked > self._limit / 2:  # this process stood still itself, and perhaps all of them
                self._heard = dict.fromkeys(self._heard, now)
            looked = now
            if lost := [rank for rank, heard in self._heard.items() if now - heard > self._limit]:
                self._report(lost)
                return

    def _report(self, lost: list[int]) -> None:
        """Tell what all tell, unless this process is finding it out by a roll call."""
        if _calls_roll.is_set():
            return
        within = f"did not answer for {self._limit:g} seconds, and the others cannot go on"
        if self._rank in lost:  # not even the own count comes through
            self._on_loss(f"rank 0, or what started it, {within}: it has the store through which all met")
            return
        message = f"{_named(lost)} {within}"
        with contextlib.suppress(RuntimeError):
            message = self._store.compare_set(f"{_KEY}/fault", "", message).decode()  # the first one's
        self._on_loss(message)
