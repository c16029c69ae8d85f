"""What happens if a process ends or hangs: the others stop waiting, and all of them say which one it was.

A collective that fails, or that takes longer than the timeout of its group, is followed by a roll call in the store
through which the processes found each other: whoever is there signs, and who has not signed in time is named. A
`Watch` also notices a process that has stopped while the others wait for something without a short timeout. What is
found first is written into the store, and all processes say that. The store may have stopped too, so nobody waits for
it for long.
"""

import contextlib
import datetime
import functools
import os
import pickle
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing import util
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

ROLL_CALL = 10.0
"""Seconds that processes wait for each other's signatures."""
_KEY = f"hf_hybrid/context_parallel/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
_LEFT = -(2**40)
"""What a process that ends in order adds to its count."""
_FROM_BACKEND = ("gloo", "Connection", "connection", "NCCL", "Socket", "socket")
"""Words of errors of collectives, which are plain runtime errors."""
_calls_roll_until = 0.0
"""When the roll call of this process is over."""
_watch: "Watch | None" = None
Result = TypeVar("Result")


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
    """Return what is known of lost processes after an error, in this process or another; or None.

    After an error of a collective that is none of ours, such as a sum of gradients, it waits until a `Watch` misses
    somebody.
    """
    if isinstance(error, ProcessLost):
        return str(error)
    if not isinstance(error, RuntimeError) or not dist.is_initialized():
        return None
    if _watch is not None and any(word in str(error) for word in _FROM_BACKEND) and (lost := _watch.missed()):
        return _told(_sentence(lost))
    with contextlib.suppress(RuntimeError, TimeoutError):  # the store may have gone too
        return _within(ROLL_CALL / 4, _first_told, _store())
    return None


# ---- the store ----


def _store() -> Any:
    return dist.distributed_c10d._get_default_store()  # type: ignore[no-untyped-call]  # torch has no public name


def _within(seconds: float, function: Callable[..., Result], *arguments: Any) -> Result:
    """Call a function in a thread, since one that waits for a store that has stopped never returns.

    Raises:
        TimeoutError: It does not return in time.
        RuntimeError: What it raises.
    """
    found: list[Result] = []
    failed: list[RuntimeError] = []

    def call() -> None:
        try:
            found.append(function(*arguments))
        except RuntimeError as error:
            failed.append(error)

    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    thread.join(seconds)
    if failed:
        raise failed[0]
    if not found:
        raise TimeoutError
    return found[0]


def _first_told(store: Any) -> str | None:
    return store.get(f"{_KEY}/fault").decode() if store.check([f"{_KEY}/fault"]) else None


def _told(message: str) -> str:
    """Write a message into the store, and return what was written first."""
    with contextlib.suppress(RuntimeError, TimeoutError):
        write = functools.partial(_store().compare_set, f"{_KEY}/fault", "", message)
        return _within(ROLL_CALL / 4, write).decode()
    return message


def _sentence(ranks: list[int]) -> str:
    named = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"
    return f"{named} ended, or did not answer in time, and none can go on without the others"


# ---- the roll call ----


def _explain(group: dist.ProcessGroup | None, error: RuntimeError) -> str:
    global _calls_roll_until
    _calls_roll_until = time.monotonic() + 2 * ROLL_CALL
    ranks = dist.get_process_group_ranks(group)
    together = f"ranks {', '.join(map(str, ranks))} share a sequence"
    try:
        missing = _within(1.5 * ROLL_CALL, _roll_call, _store(), dist.get_rank(), ranks)
    except (RuntimeError, TimeoutError):
        return f"{together}; one of them has ended, and the store of rank 0 with it"
    if missing:
        return _told(_sentence(missing))
    return _told(f"{together}, and all answer, but they cannot send: {str(error).splitlines()[0]}")


def _roll_call(store: Any, own: int, ranks: list[int]) -> list[int]:
    """Sign, and return those who have not within `ROLL_CALL`."""
    store.set(f"{_KEY}/{own}", "here")
    until = time.monotonic() + ROLL_CALL
    missing = ranks
    while missing and time.monotonic() < until:
        time.sleep(0.05)
        missing = [rank for rank in missing if not store.check([f"{_KEY}/{rank}"])]
    return missing


# ---- the watch ----


class Watch:
    """Notices in time that another process has stopped: by a signal, with its machine, or inside of a library.

    A thread of each process counts in the store through which all met, and reads the counts of the others. It also
    notices what no collective does: that a process stands still while the others wait for a sum of gradients, or for
    files to be saved, which may take long. A process whose own thread still counts is never named, however long it
    takes; one that ends in order, with an error or without, says so first.

    Args:
        timeout: Seconds that processes wait in a collective. One is lost after so long without a count and another
            one and a half roll calls, which know more where there is a collective.
        on_loss: Gets a message that names the lost ranks, the same in all processes, and whether this process is the
            first of those that are left; called in a thread, at most once, and not while this process calls a roll.
    """

    def __init__(self, timeout: float, on_loss: Callable[[str, bool], Any]) -> None:
        global _watch
        if _watch is not None:  # of an earlier run in this process
            _watch.stop()
        self._limit, self._on_loss = timeout + 1.5 * ROLL_CALL, on_loss
        self._rank, self._pause = dist.get_rank(), min(1.0, timeout / 10)
        self._store = self._client()
        self._counts = dict.fromkeys(range(dist.get_world_size()), 0)
        self._heard = dict.fromkeys(self._counts, time.monotonic())
        self._ends = threading.Event()
        self._threads = [threading.Thread(target=work, daemon=True) for work in (self._count, self._judge)]
        for thread in self._threads:
            thread.start()
        # atexit would not do: processes that multiprocessing starts end without it
        self._finalizer = util.Finalize(None, self._leave, exitpriority=1)
        _watch = self

    def stop(self) -> None:
        """End, as if it had never been; the process counts no more, so another watch must follow."""
        self._finalizer.cancel()
        self._ends.set()

    def missed(self) -> list[int]:
        """Return who has stopped or left, after waiting for as long as a roll call."""
        wait = max(ROLL_CALL, 6 * self._pause)
        time.sleep(wait)
        silent = time.monotonic() - wait + 2 * self._pause
        return [rank for rank, heard in self._heard.items() if heard < silent or self._counts[rank] < 0]

    def _client(self) -> Any:
        store = _store().clone()  # the other client may be waiting for something
        store.set_timeout(datetime.timedelta(seconds=self._limit))
        return store

    def _leave(self) -> None:
        """Say that this process ends, and that nobody should miss it."""
        self._ends.set()
        for thread in self._threads:  # one that came back from the store to an interpreter that has ended would abort
            thread.join(2 * self._pause)
        if not any(thread.is_alive() for thread in self._threads):
            with contextlib.suppress(RuntimeError):  # the store may have ended before
                self._store.add(self._key(self._rank), _LEFT)

    def _key(self, rank: int) -> str:
        return f"{_KEY}/count/{rank}"

    def _count(self) -> None:
        """Count, and note whose count has changed; ends with the store, whose end all collectives notice."""
        failed = False
        while not self._ends.wait(self._pause):
            try:
                for rank, before in self._counts.items():
                    count = self._store.add(self._key(rank), rank == self._rank)
                    if count != before or count < 0:
                        self._counts[rank], self._heard[rank] = count, time.monotonic()
                failed = False
            except RuntimeError:  # once more, for it may be the connection alone
                if failed:
                    self._ends.set()
                    return
                failed = True
                with contextlib.suppress(RuntimeError):
                    self._store = self._client()

    def _judge(self) -> None:
        """Look who has not been heard of; in a thread of its own, since the store may answer no more."""
        looked = time.monotonic()
        while not self._ends.wait(self._pause):
            now = time.monotonic()
            if now - looked > self._limit / 2:  # this process stood still itself, and perhaps all of them
                self._heard = dict.fromkeys(self._heard, now)
            looked = now
            lost = [rank for rank, heard in self._heard.items() if now - heard > self._limit]
            if lost and now > _calls_roll_until:
                self._report(lost, now)
                return

    def _report(self, lost: list[int], now: float) -> None:
        """Tell what all tell."""
        if now - self._heard[self._rank] > self._limit / 2:  # not even the own count comes through
            message = (
                f"rank 0, or what started it, did not answer for {self._limit:g} seconds: it has the store through "
                "which all met, and none can go on without"
            )
            lost = [0]
        else:
            message = _told(_sentence(lost))
        self._on_loss(message, self._rank == min(set(self._counts) - set(lost)))
