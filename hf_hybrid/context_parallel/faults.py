"""What happens if a process ends or hangs: the others stop waiting, and all of them say which one it was.

A collective that fails, or that takes longer than the timeout of its group, is followed by a roll call in the store
through which the processes found each other: whoever is there signs, and who has not signed in time is named.
"""

import pickle
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

ROLL_CALL = 10.0
"""Seconds that processes wait for each other's signatures."""
_KEY = "hf_hybrid/context_parallel"


class ProcessLost(RuntimeError):
    """Processes that share sequences cannot go on, for one of them has ended or hangs; the message names it."""


@contextmanager
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
    ranks = dist.get_process_group_ranks(group)
    together = f"ranks {', '.join(map(str, ranks))} share a sequence"
    try:
        store = _store()
        missing = _roll_call(store, ranks)
    except RuntimeError:
        return f"{together}; one of them has ended, and the store of rank 0 with it"
    if missing:
        named = f"rank {missing[0]}" if len(missing) == 1 else f"ranks {', '.join(map(str, missing))}"
        message = f"{named} ended, or did not answer in time: {together}, and none can go on without the others"
    else:
        message = f"{together}, and all answer, but they cannot send: {str(error).splitlines()[0]}"
    store.set(f"{_KEY}/fault", message)
    return message


def _roll_call(store: Any, ranks: list[int]) -> list[int]:
    """Sign, and return those who have not within `ROLL_CALL`."""
    store.set(f"{_KEY}/{dist.get_rank()}", "here")
    until = time.monotonic() + ROLL_CALL
    missing = ranks
    while missing and time.monotonic() < until:
        time.sleep(0.05)
        missing = [rank for rank in missing if not store.check([f"{_KEY}/{rank}"])]
    return missing
