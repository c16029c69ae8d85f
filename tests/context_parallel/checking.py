"""Runs cases in several processes: ``python -m tests.context_parallel.checking FULL FOLDER``, FULL 0 or 1.

One pool of four processes, for the rest of the matrix of eight, forked from one that has imported everything, runs all
cases; those of fewer processes run in a group of the first ones. A table goes to the folder: case → what went wrong,
empty if nothing did.
"""

import datetime
import json
import random
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.device_mesh import DeviceMesh

from hf_hybrid.context_parallel import Shards, count_sent, make_shards

from ..tolerances import assert_close
from .behaviours import BEHAVIOURS
from .layouts import LENGTH, drawn, operation_layouts
from .models import check_model, model_cases
from .operations import OPERATIONS, Operation
from .training import TRAINING

SIZES = (2, 3, 4, 8)
"""Numbers of processes; the ordinary cases have at most four."""
LAYOUTS = {
    2: [(1, 23), (24, 0), (13, 11)],
    3: [(9, 7, 8), (2, 1, 21), (20, 0, 4), (12, 12, 0)],
    4: [(6, 6, 6, 6), (1, 2, 1, 20)],
    8: [(3, 3, 3, 3, 3, 3, 3, 3), (5, 1, 0, 8, 1, 7, 2, 0)],
}
PACKED = [(0, 5, 5, 17, 24), (0, 10, 11, 12, 24)]
# one of each kind: these always run with 2 and 4 processes too, and in a second layout of three
KINDS = ("window 4 causal", "chunks both", "laplace chunks causal", "linear gated causal", "short 5 both", "long both",
         "scan complex", "s4 both", "segments neurons")  # fmt: skip


DRAWS = 2
"""How many layouts are drawn for each operation and number of processes."""


class Case(NamedTuple):
    """An operation, the tokens of each process, the bounds of packed sequences or None, and the seed of numbers."""

    name: str
    operation: str
    lengths: tuple[int, ...]
    ends: tuple[int, ...] | None
    seed: int


def _case(operation: str, lengths: tuple[int, ...], ends: tuple[int, ...] | None) -> Case:
    packed = "" if ends is None else f", packed {'-'.join(map(str, ends))}"
    name = f"{operation}, {'+'.join(map(str, lengths))}{packed}"
    return Case(name, operation, lengths, ends, sum(map(ord, name)))


def cases(full: bool) -> Iterator[Case]:
    """The ordinary cases, or the rest of the matrix."""
    for name, operation in OPERATIONS.items():
        for size in SIZES:
            for lengths in LAYOUTS[size]:
                for ends in (None, *(PACKED if operation.packed else ())):
                    few = LAYOUTS[size][1:2] if size == 3 else LAYOUTS[size][-1:]
                    first = size == 3 and lengths == LAYOUTS[size][0]
                    ordinary = first or (name in KINDS and lengths in few and size <= processes(False))
                    ordinary = ordinary and ends != PACKED[1]
                    if ordinary != full:
                        yield _case(name, lengths, ends)


def drawn_names() -> list[str]:
    """Names of the layouts that `drawn_case` draws, in the rest of the matrix: of each operation, for each size."""
    return [f"{name}, drawn {number} of {size}" for name in OPERATIONS for size in SIZES for number in range(DRAWS)]


def drawn_case(name: str) -> Case:
    """Draw a case; not when tests are collected, which would take seconds."""
    operation, _, number, _, size = name.rsplit(maxsplit=4)
    operation = operation.removesuffix(",")
    strategy = operation_layouts(int(size), OPERATIONS[operation].packed)
    return Case(name, operation, *drawn(strategy, name, 1 + int(number)))


def narrow_cases() -> Iterator[Case]:
    """Each operation once, for float32."""
    for name, operation in OPERATIONS.items():
        yield _case(name, LAYOUTS[3][0], PACKED[0] if operation.packed else None)


def padding(batch: int, seed: int) -> torch.Tensor:
    """A mask `(batch, LENGTH)` with padding on the left, the right, or holes; some rows have no token."""
    numbers = random.Random(seed)
    mask = torch.ones(batch, LENGTH, dtype=torch.bool)
    mask[0, : numbers.randint(1, 12)] = False
    mask[1, numbers.randint(12, 23) :] = False
    if batch > 2:
        mask[2, [numbers.randint(0, 23) for _ in range(6)]] = False
        mask[2, :3] = False
    return mask


def check(case: Case, group: dist.ProcessGroup, dtype: torch.dtype = torch.float64) -> str:
    """Compare own outputs and gradients with one process's; return what is wrong."""
    operation = OPERATIONS[case.operation]
    seed = case.seed
    batch = 1 if case.ends is not None else 3 if operation.masked else 2
    inputs, parameters = operation.draw(LENGTH, batch, torch.Generator().manual_seed(seed))
    mask = padding(batch, seed) if operation.masked and batch > 1 else None
    inputs, parameters = ({name: _in(x, dtype) for name, x in xs.items()} for xs in (inputs, parameters))
    given = inputs | parameters
    for x in given.values():
        x.requires_grad_()
    cu_seqlens = None if case.ends is None else torch.tensor(case.ends, dtype=torch.int32)
    expected = operation.one(inputs, parameters, operation.options, mask, cu_seqlens)
    weight = torch.randn(expected.shape, dtype=expected.dtype, generator=torch.Generator().manual_seed(seed + 1))
    loss = _loss(expected, weight)
    gradients = dict(zip(given, torch.autograd.grad(loss, list(given.values()), materialize_grads=True), strict=True))

    shards = make_shards(case.lengths[dist.get_rank(group)], group, cu_seqlens=cu_seqlens)
    at = (slice(None),) * operation.dim + (slice(*shards.own),)
    own = {name: x.detach()[at].clone().requires_grad_() for name, x in inputs.items()}
    copies = {name: x.detach().clone().requires_grad_() for name, x in parameters.items()}
    with count_sent() as sent:
        output = operation.many(own, copies, operation.options, None if mask is None else mask[at], shards)
    out_at = at if operation.out_dim is None else (slice(None),) * operation.out_dim + (slice(*shards.own),)
    with count_sent() as returned:
        _loss(output, weight[out_at]).backward()
    totals = torch.tensor([sent.bytes, returned.bytes])
    dist.all_reduce(totals, group=shards.group)
    rows = ("float32", "float32 gradient") if dtype == torch.float32 else ("float64 gradient",) * 2
    try:
        _compare(operation, shards, output, expected.detach()[out_at], own, copies, gradients, rows)
        if dtype != torch.float64:
            return ""
        count = operation.sends(shards, operation.options, batch, mask)
        assert sent.bytes == count, f"sends {sent.bytes} bytes instead of {count}"
        assert returned.collectives == sent.collectives - (mask is not None and "chunk_size" in operation.options)
        if mask is None:  # which has no gradient
            assert totals[0] == totals[1], f"a backward sends {totals[1]} bytes in place of {totals[0]}"
    except AssertionError as error:
        return f"rank {shards.rank} of {case.lengths}, {case.ends}, seed {case.seed}: {error}"
    return ""


def _in(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return numbers in another precision."""
    return x.to(dtype.to_complex() if x.is_complex() else dtype)


def _loss(output: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    product = output * weight
    return product.real.sum() if product.is_complex() else product.sum()


def _compare(
    operation: Operation,
    shards: Shards,
    output: torch.Tensor,
    expected: torch.Tensor,
    own: dict[str, torch.Tensor],
    copies: dict[str, torch.Tensor],
    gradients: dict[str, torch.Tensor],
    rows: tuple[str, str],
) -> None:
    at = (slice(None),) * operation.dim + (slice(*shards.own),)
    errors = []
    for name, x in copies.items():  # every process takes part, whatever the comparisons say
        total = torch.zeros_like(x) if x.grad is None else x.grad.clone()
        dist.all_reduce(total, group=shards.group)
        errors.append((name, total, gradients[name]))
    assert all(x.grad is not None for x in own.values()), "an input has no gradient"
    assert all(x.grad is not None for name, x in copies.items() if gradients[name].any()), "a parameter has none"
    assert output.dtype == expected.dtype
    assert_close(output, expected, rows[0])
    errors += [(name, x.grad, gradients[name][at]) for name, x in own.items()]
    for name, actual, wanted in errors:
        try:
            assert_close(actual, wanted, rows[1])
        except AssertionError as error:
            raise AssertionError(f"gradient of {name}: {error}") from None


def _problem(function: Callable[..., None], group: dist.ProcessGroup, *rest: DeviceMesh) -> str:
    try:
        function(group, *rest)
    except AssertionError as error:
        return f"rank {dist.get_rank(group)}: {error or function.__name__}"
    return ""


def processes(full: bool) -> int:
    """How many processes a part of the matrix needs."""
    return SIZES[-1] if full else SIZES[-2]


def work(rank: int, folder: Path, full: bool) -> None:
    """Run all cases as one of the processes."""
    torch.set_num_threads(1)
    limit, long = datetime.timedelta(seconds=60), datetime.timedelta(minutes=30)  # some processes have less to do
    store = f"file://{folder / 'store'}"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=processes(full), timeout=long)
    groups = {size: dist.new_group(list(range(size)), timeout=limit) for size in SIZES if size <= processes(full)}
    found: dict[str, str] = {}
    for case in (*cases(full), *(map(drawn_case, drawn_names()) if full else ())):
        if rank < len(case.lengths):
            found[case.name] = check(case, groups[len(case.lengths)])
    if not full and rank < 3:
        found["float32"] = "".join(check(case, groups[3], torch.float32) for case in narrow_cases())
    for name, variant, batch, size in model_cases(full):
        if rank < size:
            found[name] = check_model(variant, batch, groups[size])
    if not full and rank < 3:
        found |= {name: _problem(function, groups[3]) for name, function in BEHAVIOURS.items()}
    grid = DeviceMesh("cpu", [[0, 1], [2, 3]], mesh_dim_names=("dp", "cp"))  # all processes make its groups
    if rank < 4:
        found |= {name: _problem(function, groups[4], grid) for name, function in TRAINING[full].items()}
    (folder / f"{rank}.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def main(folder: Path, full: bool) -> None:
    """Fill the folder with ``table.json``."""
    mp.start_processes(work, (folder, full), nprocs=processes(full), start_method="fork")
    table: dict[str, str] = {}
    for rank in range(processes(full)):
        for name, problem in json.loads((folder / f"{rank}.json").read_text()).items():
            table[name] = table.get(name) or problem
    (folder / "table.json").write_text(json.dumps(table))


if __name__ == "__main__":
    main(Path(sys.argv[2]), sys.argv[1] == "1")
