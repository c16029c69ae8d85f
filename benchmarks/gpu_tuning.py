"""Try tiles, warps and stages of each Triton kernel, check each against float64, and write the table of the best.

`benchmarks.gpu` runs it as its part ``tune``. Each candidate differs from the default in one number; a last one takes
the best of every number. It is timed in turns with the default, through the whole op with its backward, at the first
timed shape that launches it. A candidate is better if it takes at most `BETTER` of the default's time. Before an op's
best ones enter the table, they are checked together at shapes that are no multiples of a tile, in every dtype.
"""

import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.aot_launches import configurations
from benchmarks.gpu_cases import Case, cases, checked_cases
from benchmarks.gpu_kernels import DTYPES, Clock, _first, _inputs, _said, check
from benchmarks.record import Row, short_hash
from hf_hybrid.kernels.launching import Configuration
from hf_hybrid.kernels.tuned import TUNED

Key = tuple[str, str, int]  # op, configuration, compute capability times 10
Cell = tuple[Row, Callable[[], Iterable[Row]]]

BETTER = 0.97
WARPS, STAGES = (1, 2, 4, 8), (1, 2, 3, 4)
# op -> its tiles that may change, and to what; no tiles of 32 where products are (see the kernels)
FREE: dict[str, dict[str, tuple[int, ...]]] = {
    "local_attention": {"BT": (16, 64, 128), "BS": (16, 64, 128)},
    "linear_attention": {
        "BT": (16, 64, 128), "BV": (16, 64, 128), "BLOCK": (256, 512, 1024, 2048), "BR": (4, 8, 16, 32),
    },
    "long_conv": {"BT": (16, 32, 64, 128), "BD": (16, 32, 64, 128), "BF": (256, 512, 1024, 2048)},
    "diagonal_scan": {"BP": (16, 32, 64, 128), "STEP": (4, 8, 16, 32)},
    "short_conv": {"BT": (16, 32, 64, 128), "BD": (16, 32, 64, 128), "STEP": (4, 8, 16)},
    "ssm_kernel": {"BK": (128, 256, 512, 1024)},
    "segment_recurrence": {"BT": (16, 64, 128), "BV": (16, 64), "BLOCK": (64, 128, 256, 512), "STEP": (2, 4, 8, 16)},
    "local_attention_step": {"BS": (16, 32, 64, 128, 256)},
    "segment_step": {"BS": (16, 64)},
    "ssm_step": {"BH": (1, 2, 4, 8, 16)},
}  # fmt: skip
_OP_OF_CASE = {"s4_kernel": "ssm_kernel"}
RAGGED = "all, at ragged shapes"
COLUMNS = (
    "op", "configuration", "capability", "dtype", "shape", "tiles", "num_warps", "num_stages", "ms", "default_ms",
    "error", "allowed", "outcome",
)  # fmt: skip
KEYS = ("op", "configuration", "capability", "tiles", "num_warps", "num_stages")


def op_of(case: Case) -> str:
    """Return the op of a case as the table names it."""
    return _OP_OF_CASE.get(case.op, case.op)


def variants(op: str, default: Configuration) -> list[Configuration]:
    """Return configurations that differ from a default in one number."""
    found = [default._replace(num_warps=warps) for warps in WARPS]
    found += [default._replace(num_stages=stages) for stages in STAGES]
    for tile in default.tiles:
        found += [default._replace(tiles=default.tiles | {tile: size}) for size in FREE[op].get(tile, ())]
    return [configuration for configuration in found if configuration != default]


@contextmanager
def table(entries: dict[Key, Configuration]) -> Iterator[None]:
    """Let the kernels read other entries inside the ``with`` block, in all threads: autograd has its own."""
    before = dict(TUNED)
    TUNED.update({key: (x.tiles, x.num_warps, x.num_stages) for key, x in entries.items()})
    try:
        yield
    finally:
        TUNED.clear()
        TUNED.update(before)


class _Asked(dict):  # type: ignore[type-arg]
    """A table without entries that notes what is looked up."""

    def __init__(self) -> None:
        super().__init__()
        self.keys_asked: dict[Key, None] = {}

    def get(self, key: Any, default: Any = None) -> Any:
        self.keys_asked[key] = None
        return default


def asked(case: Case, dtype: str, device: torch.device) -> list[Key]:
    """Run a case, with its backward, and return the configurations that it launches."""
    from hf_hybrid.kernels import launching

    seen = _Asked()
    before, launching.TUNED = launching.TUNED, seen
    try:
        _call(case, _inputs(case, device, DTYPES[dtype], seed=2))()
    finally:
        launching.TUNED = before
    return list(seen.keys_asked)


def _call(case: Case, inputs: dict[str, torch.Tensor]) -> Callable[[], object]:
    """Return a function that runs the op, and its backward if it has one."""

    def call() -> object:
        output = _first(case.run(inputs, "triton"))
        return output if case.decodes else torch.autograd.grad(output.sum(), list(inputs.values()), allow_unused=True)

    return call


def measure(key: Key, case: Case, dtype: str, candidate: Configuration, clock: Clock, rounds: int) -> Iterator[Row]:
    """Check one candidate, and if it is right time it in turns with the default; yields its row."""
    op, name, capability = key
    row = {"op": op, "configuration": name, "capability": str(capability), "dtype": dtype, "shape": case.shape}
    row |= _numbers(candidate)
    with table({key: candidate}):
        found = list(check(case, dtype, clock.device, ("torch", "triton")))[-1]
    row |= {column: found.get(column, "") for column in ("error", "allowed", "outcome")}
    if row["outcome"] == "ok":
        default = configurations(op)[name]
        call = _call(case, _inputs(case, clock.device, DTYPES[dtype], seed=2))

        def with_table(configuration: Configuration) -> object:
            TUNED[key] = (configuration.tiles, configuration.num_warps, configuration.num_stages)
            return call()

        with table({}):
            times = clock.interleaved(
                {"ms": partial(with_table, candidate), "default_ms": partial(with_table, default)}, rounds
            )
        row |= {column: f"{value:.4g}" for column, value in times.items()}
    yield row


def _numbers(configuration: Configuration) -> Row:
    tiles = json.dumps(configuration.tiles)
    return {"tiles": tiles, "num_warps": str(configuration.num_warps), "num_stages": str(configuration.num_stages)}


def _configuration(row: Row) -> Configuration:
    default = configurations(row["op"])[row["configuration"]]
    numbers = {name: int(row[name]) for name in ("num_warps", "num_stages")}
    return default._replace(tiles=json.loads(row["tiles"]), **numbers)


def _measured(rows: Iterable[Row], key: Key) -> list[tuple[float, Configuration]]:
    """Return the time over the default's of each right candidate for a key, fastest first."""
    found = [
        (float(row["ms"]) / float(row["default_ms"]), _configuration(row))
        for row in rows
        if (row["op"], row["configuration"], row["capability"]) == (*key[:2], str(key[2])) and row["ms"]
    ]
    return sorted(found, key=lambda pair: pair[0])


def together(key: Key, rows: Iterable[Row]) -> Configuration | None:
    """Return the default with the best value of every number that is better, or None if fewer than two are."""
    default = combined = configurations(key[0])[key[1]]
    changed: set[str] = set()
    for ratio, found in _measured(rows, key):
        tiles = {name: size for name, size in found.tiles.items() if size != default.tiles[name]}
        numbers = {name: getattr(found, name) for name in ("num_warps", "num_stages")}
        numbers = {name: value for name, value in numbers.items() if value != getattr(default, name)}
        names = {*tiles, *numbers}
        if ratio <= BETTER and len(names) == 1 and not names & changed:
            combined = combined._replace(tiles=combined.tiles | tiles, **numbers)
            changed |= names
    return combined if len(changed) > 1 else None


def best(rows: Sequence[Row]) -> dict[Key, Configuration]:
    """Return the fastest right candidate for each key that has one better than the default."""
    keys = dict.fromkeys((r["op"], r["configuration"], int(r["capability"])) for r in rows if r["ms"])
    firsts = {key: _measured(rows, key)[0] for key in keys}
    return {key: configuration for key, (ratio, configuration) in firsts.items() if ratio <= BETTER}


def shipped(rows: Sequence[Row]) -> dict[Key, Configuration]:
    """Return what enters the table: the best of ops whose best ones were right at ragged shapes."""
    found = best(rows)
    right = {(r["op"], r["tiles"]) for r in rows if r["configuration"] == RAGGED and r["outcome"] == "ok"}
    return {key: x for key, x in found.items() if (key[0], _name(key[0], found)) in right}


def _name(op: str, found: dict[Key, Configuration]) -> str:
    return short_hash([[key, x] for key, x in sorted(found.items()) if key[0] == op])


def check_ragged(op: str, entries: dict[Key, Configuration], device: torch.device, small: bool) -> Iterator[Row]:
    """Check an op's best configurations together at the shapes of `checked_cases`; yields one row."""
    capability = next(iter(entries))[2]
    row = {"op": op, "configuration": RAGGED, "capability": str(capability), "tiles": _name(op, entries)}
    row |= {"num_warps": "", "num_stages": ""}
    bad = []
    with table(entries):
        for case in checked_cases(small):
            for dtype in DTYPES if op_of(case) == op else ():
                last = list(check(case, dtype, device, ("torch", "triton")))[-1]
                bad += [f"{case.shape} {dtype}: {last['outcome']}"] if last["outcome"] != "ok" else []
    yield row | {"outcome": bad[0] if bad else "ok"}


def cells(device: torch.device, small: bool, ops: Sequence[str] | None, rows: list[Row]) -> Iterator[Cell]:
    """Yield the key of each row and what measures it; reads `rows` as they grow."""
    if device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        print("tune: the kernels need a GPU, or TRITON_INTERPRET=1", flush=True)
        return
    clock, done = Clock(device), set()
    timed = sorted(cases(small), key=lambda case: list(FREE).index(op_of(case)))
    for op in dict.fromkeys(op_of(case) for case in timed if ops is None or case.op in ops):
        for dtype in ("bf16", "fp32") if device.type == "cuda" else ("fp32",):
            for case in (case for case in timed if op_of(case) == op):
                try:
                    keys = asked(case, dtype, device)
                except Exception as error:
                    print(f"tune {op} {case.shape} {dtype}: passed over, {_said(error)}", flush=True)
                    continue
                for key in keys:
                    if key in done or key[0] != op:
                        continue
                    done.add(key)
                    default = configurations(op)[key[1]]
                    rounds = 2 if small else 20
                    for candidate in variants(op, default):
                        yield _key(key, candidate), partial(measure, key, case, dtype, candidate, clock, rounds)
                    if (candidate := together(key, rows)) is not None:
                        yield _key(key, candidate), partial(measure, key, case, dtype, candidate, clock, rounds)
        entries = {key: x for key, x in best(rows).items() if key[0] == op}
        if entries:
            row = dict(zip(KEYS, (op, RAGGED, str(next(iter(entries))[2]), _name(op, entries), "", ""), strict=True))
            yield row, partial(check_ragged, op, entries, device, small)


def _key(key: Key, candidate: Configuration) -> Row:
    return {"op": key[0], "configuration": key[1], "capability": str(key[2]), **_numbers(candidate)}


def write_table(rows: Sequence[Row], path: Path) -> None:
    """Write ``hf_hybrid/kernels/tuned.py`` anew, with what was measured; entries of other capabilities stay."""
    found = {key: (x.tiles, x.num_warps, x.num_stages) for key, x in shipped(rows).items()}
    measured = {int(row["capability"]) for row in rows}
    entries = {key: x for key, x in TUNED.items() if key[2] not in measured} | found
    source = (Path(__file__).parents[1] / "hf_hybrid" / "kernels" / "tuned.py").read_text(encoding="utf-8")
    head, opening, _ = source.partition("]] = {")
    lines = "".join(
        f'    ("{op}", "{name}", {capability}): ({json.dumps(tiles)}, {warps}, {stages}),\n'
        for (op, name, capability), (tiles, warps, stages) in sorted(entries.items())
    )
    path.write_text(f"{head}{opening}\n{lines}}}\n" if lines else f"{head}{opening}}}\n", encoding="utf-8")
