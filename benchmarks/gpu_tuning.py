"""Try tiles, warps and stages of each Triton kernel, check each against float64, and write the table of the best.

`benchmarks.gpu` runs it as its part ``tune``. Each candidate differs from the default in one number; a last one takes
the best of every number. It is timed in turns with the default, through the whole op with its backward, at the first
timed shape and dtype that launch it; the `FINALISTS` then at all others. The best one has the smallest geometric mean
of its times over the default's, at most `BETTER`, and is nowhere slower than `SLOWER`. Before an op's best ones enter
the table, they are checked together at shapes that are no multiples of a tile, in every dtype.
"""

import json
import math
import os
import runpy
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from multiprocessing import TimeoutError, get_context
from pathlib import Path

import torch

from benchmarks.aot_launches import configurations
from benchmarks.gpu_cases import Case, cases, checked_cases
from benchmarks.gpu_kernels import (
    DTYPES,
    Clock,
    Expected,
    compare,
    error_line,
    expect,
    fingerprint,
    first_output,
    kernels_are_due,
    make_inputs,
    op_of,
    own_outcome,
)
from benchmarks.gpu_paths import Key, launched
from benchmarks.record import Row, short_hash
from hf_hybrid.kernels.launching import Configuration
from hf_hybrid.kernels.tuned import TUNED

Cell = tuple[Row, Callable[[], Iterable[Row]]]
Place = tuple[Case, str]  # a case and a dtype

BETTER, SLOWER = 0.97, 1.02
"""Time over the default's: of all shapes together, at most; of each, at most, since timings scatter."""
FINALISTS = 2
AHEAD = 150.0
"""Seconds for compiling candidates in several processes, of the part's share."""
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
RAGGED = "all, at ragged shapes"
NONE = "none, the op did not run"
KEYS = ("op", "configuration", "capability", "dtype", "shape", "tiles", "num_warps", "num_stages")
COLUMNS = (*KEYS, "shapes", "ms", "default_ms", "error", "allowed", "outcome")
"""Of these, ``shapes`` counts the shapes in a dtype that launch the configuration, where the best must be timed."""


def variants(op: str, default: Configuration) -> list[Configuration]:
    """Return configurations that differ from a default in one number, without those that a compiler gets wrong.

    These are, in float32, more warps than a tile of 64 rows or more has rows for (`benchmarks.aot.broken_reads`): they
    may read memory that is not theirs, and so end the process.
    """
    found = [default._replace(num_warps=warps) for warps in WARPS]
    found += [default._replace(num_stages=stages) for stages in STAGES]
    for tile in default.tiles:
        found += [default._replace(tiles=default.tiles | {tile: size}) for size in FREE[op].get(tile, ())]
    wrong = [x for x in found if "float32" in x.name and 64 <= x.tiles.get("BT", 0) < 16 * x.num_warps]
    return [configuration for configuration in found if configuration != default and configuration not in wrong]


def use(path: Path) -> None:
    """Let the kernels of this process read a table that the tuner has written, as if it were the shipped one."""
    found = runpy.run_path(str(path))["TUNED"]
    TUNED.clear()
    TUNED.update(found)
    fingerprint.cache_clear()


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


def asked(case: Case, dtype: str, device: torch.device) -> list[Key]:
    """Run a case, with its backward, and return the configurations that it launches."""
    with launched() as keys:
        _call(case, make_inputs(case, device, DTYPES[dtype], seed=2))()
    return list(keys)


def _call(case: Case, inputs: dict[str, torch.Tensor]) -> Callable[[], object]:
    """Return a function that runs the op, and its backward if it has one."""

    def call() -> object:
        output = first_output(case.run(inputs, "triton"))
        return output if case.decodes else torch.autograd.grad(output.sum(), list(inputs.values()), allow_unused=True)

    return call


class Bench:
    """A clock, and what the latest case must compute: many candidates are compared with it, one after the other.

    Args:
        clock: The clock.
        rounds: In how many rounds a candidate and the default are timed.
    """

    def __init__(self, clock: Clock, rounds: int):
        self.clock, self.rounds = clock, rounds
        self._latest: tuple[tuple[str, str, str], Expected] | None = None

    def expected(self, case: Case, dtype: str) -> Expected:
        """Return what a case must compute, and how much a kernel may miss it."""
        key = (case.op, case.shape, dtype)
        if self._latest is None or self._latest[0] != key:
            self._latest = None  # its memory first
            expected = expect(case, dtype, self.clock.device)
            compare(expected, "torch")
            self._latest = key, expected
        return self._latest[1]


def cannot_launch(error: Exception) -> bool:
    """Return whether a configuration does not fit the device, or its tiles the kernel, as tuning expects of some."""
    try:
        from triton.compiler.errors import CompileTimeAssertionFailure
        from triton.runtime.errors import OutOfResources, PTXASError
    except ImportError:
        return False
    return isinstance(error, CompileTimeAssertionFailure | OutOfResources | PTXASError)


def _outcome(error: Exception, device: torch.device) -> str:
    return f"cannot be launched: {error_line(error)}" if cannot_launch(error) else own_outcome(error, device)


def measure(
    key: Key, case: Case, dtype: str, candidate: Configuration, bench: Bench, *, checked: bool = True
) -> Iterator[Row]:
    """Check one candidate, and if it is right time it in turns with the default; yields its row.

    Args:
        key: What it replaces.
        case: The op at a shape.
        dtype: Name of a dtype.
        candidate: The candidate.
        bench: Times it, and knows what is right.
        checked: Whether it is checked, or only timed.
    """
    op, name, _ = key
    default, row = configurations(op)[name], {"outcome": "ok"}

    def with_table(call: Callable[[], object], configuration: Configuration) -> object:
        TUNED[key] = (configuration.tiles, configuration.num_warps, configuration.num_stages)
        return call()

    try:
        with table({key: candidate}):
            if checked:
                found = compare(bench.expected(case, dtype), "triton")
                row |= {column: found[column] for column in ("error", "allowed", "outcome")}
            if row["outcome"] == "ok":
                call = _call(case, make_inputs(case, bench.clock.device, DTYPES[dtype], seed=2))
                turns = {
                    "ms": partial(with_table, call, candidate),
                    "default_ms": partial(with_table, call, default),
                }
                times = bench.clock.interleaved(turns, bench.rounds, alone=True)
                row |= {column: f"{value:.4g}" for column, value in times.items()}
    except Exception as error:
        row["outcome"] = _outcome(error, bench.clock.device)
    yield row


def _numbers(configuration: Configuration) -> Row:
    tiles = json.dumps(configuration.tiles)
    return {"tiles": tiles, "num_warps": str(configuration.num_warps), "num_stages": str(configuration.num_stages)}


def _configuration(row: Row) -> Configuration:
    default = configurations(row["op"])[row["configuration"]]
    numbers = {name: int(row[name]) for name in ("num_warps", "num_stages")}
    return default._replace(tiles=json.loads(row["tiles"]), **numbers)


def timed_candidates(rows: Iterable[Row], key: Key) -> list[tuple[Configuration, dict[tuple[str, str], float], int]]:
    """Return each right candidate for a key with its times over the default's, and of how many places it needs them.

    The times are by shape and dtype; the first is at the place where all candidates are timed.
    """
    found: dict[str, tuple[Configuration, dict[tuple[str, str], float], int]] = {}
    for row in rows:
        if (row["op"], row["configuration"], row["capability"]) == (*key[:2], str(key[2])) and row["ms"]:
            name = short_hash([row["tiles"], row["num_warps"], row["num_stages"]])
            _, ratios, _ = found.setdefault(name, (_configuration(row), {}, int(row["shapes"])))
            ratios[row["shape"], row["dtype"]] = float(row["ms"]) / float(row["default_ms"])
    return list(found.values())


def _at_first(rows: Iterable[Row], key: Key) -> list[tuple[float, Configuration]]:
    """Return the candidates that are better at the first shape with their times over the default's, fastest first."""
    found = [(next(iter(ratios.values())), candidate) for candidate, ratios, _ in timed_candidates(rows, key)]
    return sorted((pair for pair in found if pair[0] <= BETTER), key=lambda pair: pair[0])


def together(key: Key, rows: Iterable[Row]) -> Configuration | None:
    """Return the default with the best value of every number that is better, or None if fewer than two are."""
    default = combined = configurations(key[0])[key[1]]
    changed: set[str] = set()
    for _, found in _at_first(rows, key):
        tiles = {name: size for name, size in found.tiles.items() if size != default.tiles[name]}
        numbers = {name: getattr(found, name) for name in ("num_warps", "num_stages")}
        numbers = {name: value for name, value in numbers.items() if value != getattr(default, name)}
        names = {*tiles, *numbers}
        if len(names) == 1 and not names & changed:
            combined = combined._replace(tiles=combined.tiles | tiles, **numbers)
            changed |= names
    return combined if len(changed) > 1 else None


def finalists(key: Key, rows: Iterable[Row]) -> list[Configuration]:
    """Return the candidates that are worth timing at the other shapes, the fastest at the first one first."""
    return [candidate for _, candidate in _at_first(rows, key)][:FINALISTS]


def is_slower(key: Key, candidate: Configuration, rows: Iterable[Row]) -> bool:
    """Return whether a candidate has been slower than the default at a shape."""
    return any(
        found == candidate and max(ratios.values()) > SLOWER for found, ratios, _ in timed_candidates(rows, key)
    )


def best(rows: Sequence[Row]) -> dict[Key, Configuration]:
    """Return the best candidate for each key that has one: timed everywhere, and nowhere slower than the default."""
    keys = dict.fromkeys((r["op"], r["configuration"], int(r["capability"])) for r in rows if r["ms"])
    found: dict[Key, Configuration] = {}
    for key in keys:
        means = [
            (math.prod(ratios.values()) ** (1 / len(ratios)), candidate)
            for candidate, ratios, needed in timed_candidates(rows, key)
            if len(ratios) == needed and max(ratios.values()) <= SLOWER
        ]
        mean, candidate = min(means, key=lambda pair: pair[0], default=(math.inf, None))
        if candidate is not None and mean <= BETTER:
            found[key] = candidate
    return found


def shipped(rows: Sequence[Row]) -> dict[Key, Configuration]:
    """Return what enters the table: the best of ops whose best ones were right at ragged shapes."""
    found = best(rows)
    right = {(r["op"], r["tiles"]) for r in rows if r["configuration"] == RAGGED and r["outcome"] == "ok"}
    return {key: x for key, x in found.items() if (key[0], _name(key[0], found)) in right}


def _name(op: str, found: dict[Key, Configuration]) -> str:
    return short_hash([[key, x] for key, x in sorted(found.items()) if key[0] == op])


def check_ragged(op: str, entries: dict[Key, Configuration], device: torch.device, small: bool) -> Iterator[Row]:
    """Check an op's best configurations together at the shapes of `checked_cases`; yields one row."""
    bad = []
    with table(entries):
        for case in checked_cases(small):
            for dtype in DTYPES if op_of(case) == op else ():
                try:
                    expected = expect(case, dtype, device)
                    compare(expected, "torch")
                    outcome = compare(expected, "triton")["outcome"]
                except Exception as error:
                    outcome = _outcome(error, device)
                bad += [f"{outcome} ({case.shape} {dtype})"] if outcome != "ok" else []
    yield {"outcome": bad[0] if bad else "ok"}


def cells(device: torch.device, small: bool, ops: Sequence[str] | None, rows: list[Row]) -> Iterator[Cell]:
    """Yield the key of each row and what measures it; reads `rows` as they grow."""
    if not kernels_are_due(device):
        print("tune: the kernels need a GPU, or TRITON_INTERPRET=1", flush=True)
        return
    bench = Bench(Clock(device), 2 if small else 20)
    found: dict[str, dict[Key, list[Place]]] = {}
    failed: list[Cell] = []
    for case in _timed(small, ops):
        for dtype in ("bf16", "fp32") if device.type == "cuda" else ("fp32",):
            op = op_of(case)
            places = found.setdefault(op, {})
            try:
                keys = asked(case, dtype, device)
            except Exception as error:
                names = (op, NONE, "", dtype, case.shape, "", "", "")
                outcome = own_outcome(error, device)
                failed.append((dict(zip(KEYS, names, strict=True)), partial(list, [{"outcome": outcome}])))
                continue
            for key in keys:
                if key[0] == op:
                    places.setdefault(key, []).append((case, dtype))
    yield from failed
    if device.type == "cuda":
        first = [(key, own[0]) for places in found.values() for key, own in places.items()]
        compile_ahead(first, rows, device, small)
    for op, places in found.items():
        for key, own in places.items():
            yield from _candidates(key, own, bench, rows)
        entries = {key: x for key, x in best(rows).items() if key[0] == op}
        if entries:
            names = (op, RAGGED, str(next(iter(entries))[2]), "", "", _name(op, entries), "", "")
            yield dict(zip(KEYS, names, strict=True)), partial(check_ragged, op, entries, device, small)


def _timed(small: bool, ops: Sequence[str] | None) -> list[Case]:
    """Return the timed cases in the order of `FREE`."""
    wanted = [case for case in cases(small) if ops is None or case.op in ops]
    return sorted(wanted, key=lambda case: list(FREE).index(op_of(case)))


def compile_ahead(firsts: Sequence[tuple[Key, Place]], rows: Sequence[Row], device: torch.device, small: bool) -> int:
    """Run candidates that have no row yet in several processes, so that Triton's cache has their kernels.

    Compiling takes most of a candidate's time, and one process compiles one at a time.

    Returns:
        How many were run before `AHEAD` seconds were over.
    """
    known = {tuple(row[name] for name in KEYS) for row in rows}
    wanted = [
        (case.op, case.shape, dtype, key, candidate, str(device), small)
        for key, (case, dtype) in firsts
        for candidate in variants(key[0], configurations(key[0])[key[1]])
        if tuple(_key(key, (case, dtype), candidate).values()) not in known
    ]
    done, until = 0, time.monotonic() + AHEAD
    with get_context("spawn").Pool(max(1, (os.cpu_count() or 1) - 2)) as pool:  # its end kills what still runs
        compiled = pool.imap_unordered(compile_one, wanted)
        for _ in wanted:
            try:
                compiled.next(max(0.0, until - time.monotonic()))
            except TimeoutError:
                break
            done += 1
    print(f"tune: {done} of {len(wanted)} candidates are compiled", flush=True)
    return done


def compile_one(wanted: tuple[str, str, str, Key, Configuration, str, bool]) -> None:
    """Run a candidate once; whether it is right, or cannot be launched, is seen when it is measured."""
    op, shape, dtype, key, candidate, device, small = wanted
    case = next(case for case in cases(small) if (case.op, case.shape) == (op, shape))
    with suppress(Exception), table({key: candidate}):
        asked(case, dtype, torch.device(device))


def _candidates(key: Key, places: Sequence[Place], bench: Bench, rows: list[Row]) -> Iterator[Cell]:
    """Yield the cells of a key: all candidates at the first place that launches it, the best ones at the others."""

    def cell(candidate: Configuration, place: Place, checked: bool) -> Cell:
        def measured() -> Iterator[Row]:
            for row in measure(key, *place, candidate, bench, checked=checked):
                yield {"shapes": str(len(places))} | row

        return _key(key, place, candidate), measured

    for candidate in variants(key[0], configurations(key[0])[key[1]]):
        yield cell(candidate, places[0], True)
    if (combined := together(key, rows)) is not None:
        yield cell(combined, places[0], True)
    for candidate in finalists(key, rows):
        for place in places[1:]:
            if not is_slower(key, candidate, rows):
                yield cell(candidate, place, False)


def _key(key: Key, place: Place, candidate: Configuration) -> Row:
    op, name, capability = key
    case, dtype = place
    named = {"op": op, "configuration": name, "capability": str(capability), "dtype": dtype, "shape": case.shape}
    return named | _numbers(candidate)


def write_table(rows: Sequence[Row], path: Path) -> None:
    """Write ``hf_hybrid/kernels/tuned.py`` anew, with what was measured; entries of other capabilities stay."""
    found = {key: (x.tiles, x.num_warps, x.num_stages) for key, x in shipped(rows).items()}
    measured = {int(row["capability"]) for row in rows if row["capability"]}
    entries = {key: x for key, x in TUNED.items() if key[2] not in measured} | found
    source = (Path(__file__).parents[1] / "hf_hybrid" / "kernels" / "tuned.py").read_text(encoding="utf-8")
    head, opening, _ = source.partition("]] = {")
    lines = "".join(
        f'    ("{op}", "{name}", {capability}): ({json.dumps(tiles)}, {warps}, {stages}),\n'
        for (op, name, capability), (tiles, warps, stages) in sorted(entries.items())
    )
    path.write_text(f"{head}{opening}\n{lines}}}\n" if lines else f"{head}{opening}}}\n", encoding="utf-8")
