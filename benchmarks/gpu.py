"""Check, tune and time everything on one GPU, in calls of at most nine minutes, without a network.

Run it from the repository root, again until all is done; each call goes on where the last one stopped::

    python -m benchmarks.gpu                                       # or make gpu; results in runs/gpu
    python -m benchmarks.gpu --packed path/to/folder               # and, after each part, in a few archives there
    python -m benchmarks.gpu --earlier path/to/folder              # goes on from such archives, or from results
    python -m benchmarks.gpu --report benchmarks/results/gpu       # the page of kept results
    python -m benchmarks.gpu --device cpu --small                  # rehearse it
    TRITON_INTERPRET=1 python -m benchmarks.gpu --device cpu --small --parts checks     # also Triton's kernels

The kernels need torch and Triton; models need transformers; peers and matplotlib are used if installed. Each part is a
process, so that a failure or a broken device does not affect the others. Rows are written as they are measured, and a
stop loses one; the page keeps what was measured and says what failed. On a GPU, a kernel of ours that does not run is
a failure; a peer that does not is none. Each part has a share of the time of all calls, thirty minutes together but
for some headroom; what is left of a call goes to parts that are not finished. What was being measured when a part was
ended comes last in the next call, and after a second such end it is a failure. ``plan.json`` beside the results keeps
account. ``--packed`` (``$OUT`` if that is set) is for machines that give back few files: ``gpu.tar.gz`` holds the
results, ``gpu-RUN.tar.gz`` the checkpoint of a run of ``lra``. The parts, in the order of their worth:

- ``checks``: every case in every dtype, outputs and gradients against float64, twice, bit by bit; one process per op,
  several in parallel, since compiling takes most of the time;
- ``kernels``: forward, and forward with backward, against peers in the same run: median of 20 turns (fewer of what is
  slow) with a cleared cache, without the host's time, peak memory, and the distance to the floor, the larger of the
  time for the bytes that must move and for the multiplications, at the ceilings measured by a copy and by large
  products;
- ``tune``: other tiles, warps and stages of each kernel; writes ``tuned.py``, which replaces
  ``hf_hybrid/kernels/tuned.py`` (`benchmarks.gpu_tuning`). ``models`` and ``sanitizer`` read it as soon as all is
  tuned. Rows name the kernels' code and configurations by a fingerprint: what was measured with others is measured
  again, in place of the rows before;
- ``models``: small ones against a CPU; then a training step, a prompt and decoding at 1k to 64k tokens, against peers
  (`benchmarks.gpu_models`); the column ``code`` says which kernels ran;
- ``losses``: the loss of a large vocabulary with all logits, in chunks, and with Liger's kernel if it is installed;
- ``sanitizer``: compute-sanitizer's tools over the small cases, if it is installed; one process per op, as for
  ``checks`` (`benchmarks.gpu_sanitizer`);
- ``lra``: training on the Long Range Arena's ListOps, which is drawn (`benchmarks.lra`).
"""

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch

from benchmarks import gpu_further, gpu_kernels, gpu_models, gpu_sanitizer, gpu_tables, gpu_tuning
from benchmarks.gpu_cases import Case, cases, checked_cases
from benchmarks.gpu_kernels import (
    DTYPES,
    Clock,
    check,
    dtypes_of,
    fingerprint,
    kernels_are_due,
    measure_ceilings,
    place,
)
from benchmarks.gpu_plan import LATER, Plan
from benchmarks.gpu_tuning import Cell
from benchmarks.record import (
    GrowingRecord,
    Row,
    markdown_table,
    read_csv,
    short_hash,
    stamp,
    version_of,
    whole_file,
    write_csv,
)

IN_PARALLEL = ("checks", "sanitizer")
"""Parts with a process for each op."""
WITH_TUNED = ("models", "sanitizer")
"""Parts that read the tuner's table when all is tuned; the tuner has checked and timed the kernels themselves."""
FAILURES = ("wrong", "not the same", "raised", "refused")
ABSENT = ("not done", "not installed")
"""How outcomes of what is missing begin; a later call looks for it again."""
_SAVING = 15
"""Seconds before a part's deadline in which it begins nothing more."""
BROKEN, NOT_DONE, FAILED = 5, 3, 4
"""Exit statuses: the device is broken for this process; the next call measures what is missing; rows failed."""

PEERS = ("mamba-ssm", "causal-conv1d", "flash-linear-attention", "flash-attn", "liger-kernel", "kernels")
# fmt: off
STAMP = ("date", "device", "capability", "python", "torch", "triton", "transformers", "peers", "hf_hybrid")
COLUMNS = {
    "checks": (*STAMP, "op", "shape", "dtype", "fingerprint", "backend", "worst", "error", "allowed", "outcome"),
    "kernels": (
        *STAMP, "op", "shape", "dtype", "fingerprint", "direction", "contender", "ms", "over_floor", "peak_mib",
        "outcome", "copy_gbs", *(f"{name}_tflops" for name in DTYPES),
    ),
    # its own capability is that of the table's entries
    "tune": (*(name for name in STAMP if name != "capability"), "code", *gpu_tuning.COLUMNS),
    "models": (*STAMP, *gpu_models.COLUMNS),
    "losses": (*STAMP, *gpu_further.LOSS_COLUMNS),
    "sanitizer": (*STAMP, *gpu_sanitizer.COLUMNS),
    "lra": (*STAMP, *gpu_further.LRA_COLUMNS),
}
# fmt: on
KEYS = {
    "checks": ("op", "shape", "dtype", "fingerprint"),
    "kernels": ("op", "shape", "dtype", "fingerprint"),
    "tune": gpu_tuning.KEYS,
    "models": gpu_models.KEYS,
    "losses": gpu_further.LOSS_COLUMNS[:4],
    "sanitizer": ("op", "tool", "fingerprint"),
    "lra": ("task", "model"),
}
"""Columns that name a cell: what is measured together, and not again by a later call."""


def _stamp(device: torch.device) -> Row:
    peers = {name: version for name in PEERS if (version := version_of(name)) != "-"}
    row = stamp() | {"triton": version_of("triton"), "device": "CPU", "capability": "-"}
    row["peers"] = ", ".join(f"{name} {version}" for name, version in peers.items()) or "-"
    if device.type == "cuda":
        row["device"] = torch.cuda.get_device_name(device)
        row["capability"] = "{}.{}".format(*torch.cuda.get_device_capability(device))
    return {name: row[name] for name in STAMP}


def _wanted(found: list[Case], ops: Sequence[str] | None) -> list[Case]:
    return [case for case in found if ops is None or case.op in ops]


def _checks(device: torch.device, arguments: argparse.Namespace, rows: list[Row]) -> Iterator[Cell]:
    backends = ("torch", "triton") if kernels_are_due(device) else ("torch",)
    for case in _wanted(checked_cases(arguments.small), arguments.ops):
        for dtype in dtypes_of(case):
            yield place(case, dtype), partial(check, case, dtype, device, backends)


def _kernels(device: torch.device, arguments: argparse.Namespace, rows: list[Row]) -> Iterator[Cell]:
    clock, small = Clock(device), arguments.small
    ceilings = measure_ceilings(clock, small)

    def race(case: Case, dtype: str) -> Iterator[Row]:
        try:
            for row in gpu_kernels.race(case, dtype, clock, ceilings, 2 if small else 20):
                yield row | ceilings
        except Exception as error:
            yield {"outcome": gpu_kernels.own_outcome(error, device)} | ceilings

    for dtype in ("bf16",) if device.type == "cuda" else ("fp32",):
        for case in in_turns(_wanted(cases(small), arguments.ops)):
            yield place(case, dtype), partial(race, case, dtype)


def in_turns(found: Sequence[Case]) -> list[Case]:
    """Return the first case of every op, then the second ones, so that each op has a row if time runs out."""
    numbers = [sum(other.op == case.op for other in found[:n]) for n, case in enumerate(found)]
    return [case for _, case in sorted(zip(numbers, found, strict=True), key=lambda pair: pair[0])]


def _tune(device: torch.device, arguments: argparse.Namespace, rows: list[Row]) -> Iterator[Cell]:
    yield from gpu_tuning.cells(device, arguments.small, arguments.ops, rows)


def _models(device: torch.device, arguments: argparse.Namespace, rows: list[Row]) -> Iterator[Cell]:
    yield from gpu_models.cells(Clock(device), arguments.small)


PARTS: dict[str, Callable[[torch.device, argparse.Namespace, list[Row]], Iterator[Cell]]] = {
    "checks": _checks,
    "kernels": _kernels,
    "tune": _tune,
    "models": _models,
    "losses": gpu_further.losses,
    "sanitizer": gpu_sanitizer.sanitizer,
    "lra": gpu_further.lra,
}


def _record(part: str, path: Path, device: torch.device) -> GrowingRecord:
    """Open a part's record, without the cells of which all that was wanted was missing."""
    common = {name: value for name, value in _stamp(device).items() if name not in KEYS[part]}
    if part == "tune":  # what was tuned is of the kernels' code, whichever configurations were the defaults
        common["code"] = fingerprint(tuned=False)
        if any(row["code"] != common["code"] for row in _rows_of(path)):
            path.unlink()
    record = GrowingRecord(path, COLUMNS[part], KEYS[part], common)
    there = {_cell(part, row) for row in record.rows if not row["outcome"].startswith(ABSENT)}
    record.forget(lambda row: _cell(part, row) not in there)
    return record


def _cell(part: str, row: Row) -> tuple[str, ...]:
    return tuple(row[name] for name in KEYS[part])


def run_part(part: str, arguments: argparse.Namespace) -> int:
    """Run what is missing of one part in this process, until its time is over; return an exit status."""
    device = torch.device(arguments.device)
    path = arguments.csv or arguments.out / f"{part}.csv"
    if arguments.tuned is not None:
        gpu_tuning.use(arguments.tuned)
    record = _record(part, path, device)
    status, begun = 0, {_cell(part, row) for row in record.rows if row["outcome"].startswith(LATER)}
    ended, last = Ended(path.with_suffix(".begun.json")), []

    def cells() -> Iterator[Cell]:
        for key, measure in PARTS[part](device, arguments, record.rows):
            if ended.count(key):
                last.append((key, measure))
            else:
                yield key, measure
        yield from last

    for key, measure in cells():
        if _cell(part, key) in record and _cell(part, key) not in begun and not ended.count(key):
            continue
        if ended.count(key) > 1:
            record.add(key | {"outcome": "raised: it did not end in the time of two calls"})
            ended.forget(key)
            continue
        if time.time() > arguments.until:
            status = NOT_DONE
            break
        print(part, *key.values(), "...", flush=True)  # names the cell if the device hangs
        same = {name: value for name, value in key.items() if name != "fingerprint"}
        rows: list[Row] = []
        with ended.counting(key):
            for row in measure():
                if not rows:
                    record.forget(
                        lambda row, same=same: same.items() <= row.items()
                    )  # of other code, or of half a cell
                rows.append(key | row)
                record.add(rows[-1])
                print(part, *(rows[-1].get(name, "") for name in COLUMNS[part][len(STAMP) :]), flush=True)
        if part == "tune":
            gpu_tuning.write_table(record.rows, path.with_name("tuned.py"))
        # without rows it has begun, with such ones it has a result so far: a later call goes on
        if not rows or any(row["outcome"].startswith(LATER) for row in rows):
            status = NOT_DONE
        if any("CUDA error" in row["outcome"] for row in rows):
            status = BROKEN
            break
    return status or (FAILED if any(row["outcome"].startswith(FAILURES) for row in record.rows) else 0)


class Ended:
    """How often a process was ended while it measured a cell; kept in a file, which such an end leaves behind.

    Args:
        path: The file.
    """

    def __init__(self, path: Path):
        self.path = path
        self.counts: dict[str, int] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}

    def count(self, key: Row) -> int:
        """Return how often that was while it measured a cell."""
        return self.counts.get(json.dumps(key), 0)

    def forget(self, key: Row) -> None:
        """Set a cell's count to zero."""
        if self.counts.pop(json.dumps(key), None) is not None:
            self._write()

    @contextmanager
    def counting(self, key: Row) -> Iterator[None]:
        """Count an end inside the ``with`` block, unless the block ends by itself."""
        self.counts[json.dumps(key)] = self.count(key) + 1
        self._write()
        yield
        self.forget(key)

    def _write(self) -> None:
        with whole_file(self.path) as beside:
            beside.write_text(json.dumps(self.counts), encoding="utf-8")


class End(NamedTuple):
    """How a part ended in a call: in words, and whether everything that could be measured was."""

    said: str
    finished: bool


def _start(part: str, ops: Sequence[str], csv: Path, deadline: float, arguments: argparse.Namespace) -> End:
    """Run one part, for some ops, in its own process, and a new one if its device breaks; return its end."""
    code = BROKEN
    while code == BROKEN:
        seconds = deadline - time.monotonic()
        until = time.time() + seconds - _SAVING
        flags = ["--device", arguments.device, "--until", f"{until:.1f}", "--csv", str(csv), "--ops", *ops]
        flags += ["--small"] if arguments.small else []
        flags += [] if arguments.tuned is None else ["--tuned", str(arguments.tuned)]
        command = [sys.executable, "-m", "benchmarks.gpu", "--part", part, *flags]
        process = subprocess.Popen(command, start_new_session=True)
        try:
            code = process.wait(max(0, seconds))
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # with the processes that it has started
            process.wait()
            return End(f"{LATER}, and was ended; what it had measured is below", False)
    ends = {0: End("ok", True), FAILED: End("failed, see below", True)}
    ends[NOT_DONE] = End(f"{LATER}; what it had measured is below", False)
    return ends.get(code, End(f"failed, exit {code}", False))


def run(arguments: argparse.Namespace) -> int:
    """Run every part in its own processes and write the page; return how many parts failed or are not finished.

    A part of which all is missing, such as compute-sanitizer, is not done, which is no failure.
    """
    arguments.out.mkdir(parents=True, exist_ok=True)
    if arguments.earlier is not None:
        unpack(arguments.earlier, arguments.out)
    made_by = _stamp(torch.device(arguments.device)) | {"date": "", "small": arguments.small}
    marks = {part: fingerprint() if "fingerprint" in KEYS[part] else "" for part in PARTS}
    marks["tune"] = fingerprint(tuned=False)
    plan = Plan(arguments.out / "plan.json", {part: short_hash([made_by, mark]) for part, mark in marks.items()})
    said = run_parts(arguments, plan)
    page = report(arguments.out, said)
    (arguments.out / "gpu.md").write_text(page, encoding="utf-8")
    gpu_tables.draw(arguments.out)
    if arguments.packed is not None:
        pack(arguments.out, arguments.packed)
    print(page.split("\n## ", 1)[0])
    return sum(not outcome.startswith(("ok", "not done")) for outcome in said.values())


def run_parts(arguments: argparse.Namespace, plan: Plan) -> dict[str, str]:
    """Run the parts within their shares, then those that are not finished within the call; return how each ended."""
    end, least = time.monotonic() + 60 * arguments.minutes, min(30, 6 * arguments.minutes)
    said = dict.fromkeys(arguments.parts, f"{LATER}; not begun in this call")
    for part in arguments.parts:
        if plan.end(part) and (arguments.out / f"{part}.csv").exists():
            said[part] = f"{plan.end(part)} (in an earlier call)"
    for in_share in (True, False):
        for part in arguments.parts:
            now = time.monotonic()
            deadline = min(end, now + plan.left(part)) if in_share else end
            if LATER not in said[part] or deadline - now < least:
                continue
            tuned = arguments.out / "tuned.py"
            arguments.tuned = tuned if part in WITH_TUNED and plan.end("tune") and tuned.exists() else None
            with plan.spending(part):
                ended = _run_in_processes(part, deadline, arguments)
            said[part] = ended.said
            if ended.finished and arguments.ops is None:
                plan.finish(part, ended.said)
            print(f"{part}: {said[part]}", flush=True)
            if arguments.packed is not None:
                pack(arguments.out, arguments.packed)
    return said


def pack(folder: Path, target: Path) -> None:
    """Write results as archives: one, and one for each checkpoint, without data that can be drawn again."""
    target.mkdir(parents=True, exist_ok=True)
    runs = [path.parent for path in sorted(folder.glob("lra/*/*/checkpoint.pt"))]
    others = [path for path in sorted(folder.rglob("*")) if path.is_file() and folder / "lra" not in path.parents]
    archives = {"gpu": others, **{f"gpu-{run.name}": sorted(run.iterdir()) for run in runs}}
    for name, files in archives.items():
        with whole_file(target / f"{name}.tar.gz") as beside, tarfile.open(beside, "w:gz") as archive:
            for path in files:
                archive.add(path, path.relative_to(folder))


def unpack(earlier: Path, folder: Path) -> None:
    """Copy results, and what their archives hold."""
    shutil.copytree(earlier, folder, dirs_exist_ok=True, ignore=shutil.ignore_patterns("gpu*.tar.gz"))
    for path in sorted(earlier.glob("gpu*.tar.gz")):
        with tarfile.open(path) as archive:
            archive.extractall(folder, filter="data")


def _run_in_processes(part: str, deadline: float, arguments: argparse.Namespace) -> End:
    known = list(dict.fromkeys(case.op for case in cases(arguments.small)))
    ops = [op for op in known if arguments.ops is None or op in arguments.ops]
    csv = arguments.out / f"{part}.csv"
    if part in IN_PARALLEL:
        ended = _in_parallel(part, ops, deadline, arguments)
    else:
        ended = _start(part, ops, csv, deadline, arguments)
    rows = _rows_of(csv)
    if ended.finished and rows and all(row["outcome"].startswith(ABSENT) for row in rows):
        return End(rows[0]["outcome"], False)
    return ended


def _in_parallel(part: str, ops: Sequence[str], deadline: float, arguments: argparse.Namespace) -> End:
    """Run one part with a process and a file for each op, and gather the rows of these and of other ops."""
    folder, csv = arguments.out / part, arguments.out / f"{part}.csv"
    folder.mkdir(exist_ok=True)
    with ThreadPoolExecutor(max(1, (os.cpu_count() or 1) // 2)) as pool:
        starts = [pool.submit(_start, part, [op], folder / f"{op}.csv", deadline, arguments) for op in ops]
    ends = {op: start.result() for op, start in zip(ops, starts, strict=True)}
    files = sorted(folder.glob("*.csv"))
    others = [row for row in _rows_of(csv) if row["op"] not in {file.stem for file in files}]
    with whole_file(csv) as beside:
        write_csv(beside, COLUMNS[part], [*others, *(row for file in files for row in read_csv(file))])
    said = "; ".join(f"{op} {end.said}" for op, end in ends.items() if end.said != "ok") or "ok"
    return End(said, all(end.finished for end in ends.values()))


def _rows_of(path: Path) -> list[Row]:
    return read_csv(path) if path.exists() else []


def report(folder: Path, said: dict[str, str] | None = None) -> str:
    """Return the page of a folder of results as Markdown, failures first."""
    rows = {part: found for part in PARTS if (found := _rows_of(folder / f"{part}.csv"))}
    lines = ["# Kernels and models on a GPU", ""]
    first = next((found[0] for found in rows.values() if found), None)
    if first is not None:
        lines += ["; ".join(f"{name} {first[name]}" for name in STAMP) + ".", ""]
    lines += [f"- {part}: {outcome}" for part, outcome in (said or {}).items()]
    for part, found in rows.items():
        wrong = [row for row in found if row["outcome"].startswith(FAILURES)]
        lines.append(f"- {part}: {len(found)} rows, {len(wrong)} of them failed")
        names = ("op", "configuration", "shape", "model", "length", "dtype", "backend", "contender", "tool")
        here = [name for name in names if name in COLUMNS[part]]
        lines += [f"- {' '.join(row[name] for name in here if row[name])}: {row['outcome']}" for row in wrong]
    for part, found in rows.items():
        columns = [name for name in COLUMNS[part] if name not in STAMP and not name.endswith(("_gbs", "_tflops"))]
        lines += ["", f"## {part}", ""]
        if part == "kernels":
            ceilings = {name: found[0][name] for name in found[0] if name.endswith(("_gbs", "_tflops"))}
            lines += ["Ceilings: " + ", ".join(f"{name} {value}" for name, value in ceilings.items()) + ".", ""]
        lines.append(markdown_table(columns, [[row[name] for name in columns] for row in found]))
    return "\n".join(lines) + "\n"


def main(argv: Sequence[str] | None = None) -> int:
    """Run everything, or one part of it in this process, or print the page of earlier results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/gpu"), help="folder of results")
    packed = Path(os.environ["OUT"]) if os.environ.get("OUT") else None
    parser.add_argument("--packed", type=Path, default=packed, metavar="FOLDER", help="folder of their archives")
    parser.add_argument("--minutes", type=float, default=9.0, help="of this call")
    parser.add_argument("--earlier", type=Path, metavar="FOLDER", help="earlier results, or their archives")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--small", action="store_true", help="tiny shapes")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=tuple(PARTS))
    parser.add_argument("--ops", nargs="+", metavar="OP", help="check, time and tune only these kernels")
    parser.add_argument("--report", type=Path, metavar="FOLDER", help="only print the page")
    parser.add_argument("--part", choices=PARTS, help=argparse.SUPPRESS)
    parser.add_argument("--csv", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--tuned", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--until", type=float, default=float("inf"), help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    if arguments.report is not None:
        print(report(arguments.report))
        return 0
    if arguments.earlier is not None and not arguments.earlier.is_dir():
        parser.error(f"--earlier must be a folder of results; got {str(arguments.earlier)!r}")
    known = dict.fromkeys(case.op for case in cases(small=True))
    if unknown := sorted({*(arguments.ops or ())} - known.keys()):
        parser.error(f"--ops must be of {', '.join(known)}; got {', '.join(unknown)}")
    if arguments.device.startswith("cuda") and not torch.cuda.is_available():
        parser.error(
            "--device must be one that torch sees; got 'cuda', and torch sees none (try --device cpu --small)"
        )
    if arguments.part is not None:
        return run_part(arguments.part, arguments)
    return run(arguments)


if __name__ == "__main__":
    sys.exit(main())
