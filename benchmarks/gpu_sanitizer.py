"""The part ``sanitizer`` of `benchmarks.gpu`: compute-sanitizer's tools over the small cases.

Starting takes most of the time, so one process of each tool launches all kernels. Where a tool finds something, or
does not come to an end, one process for each op says where. By itself, this module launches what the tools watch::

    compute-sanitizer --tool racecheck python -m benchmarks.gpu_sanitizer --ops short_conv
"""

import argparse
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import torch

from benchmarks.gpu_cases import cases
from benchmarks.gpu_kernels import DTYPES, _inputs, _results, dtypes_of, fingerprint, kernels_are_due
from benchmarks.gpu_tuning import Cell
from benchmarks.record import Row

COLUMNS = ("op", "tool", "fingerprint", "errors", "seconds", "outcome")
SANITIZER = "compute-sanitizer"
TOOLS = ("memcheck", "racecheck", "initcheck", "synccheck")
"""The most worthwhile first: what an interpreter cannot see, and wrong addresses above all."""
LONGEST = 110.0
"""Seconds that a process may take: with its start, within the part's share."""
_WRONG, _LONG = "wrong", "not finished"


def sanitizer(device: torch.device, arguments: argparse.Namespace, rows: list[Row]) -> Iterator[Cell]:
    """Yield a cell of all ops for each tool, then one for each op where a tool has found something."""
    until = arguments.until
    known = list(dict.fromkeys(case.op for case in cases(small=True)))
    ops = [op for op in known if arguments.ops is None or op in arguments.ops]
    together, mark = "all" if ops == known else " ".join(ops), fingerprint()

    def cell(op: str, tool: str, launched: Sequence[str]) -> Cell:
        key = {"op": op, "tool": tool, "fingerprint": mark}
        return key, partial(_sanitize, launched, tool, arguments.device, until)

    if shutil.which(SANITIZER) is None:
        yield {"op": together, "tool": "", "fingerprint": mark}, _missing
        return
    done = {(row["op"], row["tool"]) for row in rows if row["fingerprint"] == mark}
    if kernels_are_due(device) and not done.issuperset((together, tool) for tool in TOOLS):
        compile_first(ops, arguments.device, min(until, time.time() + LONGEST))
    for tool in TOOLS:
        yield cell(together, tool, ops)
    for tool in TOOLS:
        found = [r["outcome"] for r in rows if (r["op"], r["tool"], r["fingerprint"]) == (together, tool, mark)]
        if len(ops) > 1 and any(outcome.startswith((_WRONG, _LONG)) for outcome in found):
            for op in ops:
                yield cell(op, tool, [op])


def compile_first(ops: Sequence[str], device: str, until: float) -> int:
    """Launch each op without a tool, which fills Triton's cache; return how many processes ended well."""

    def ends(op: str) -> bool:
        command = [sys.executable, "-m", "benchmarks.gpu_sanitizer", "--device", device, "--ops", op]
        try:
            ran = subprocess.run(
                command,
                stdout=subprocess.DEVNULL,
                timeout=None if until == math.inf else max(0.0, until - time.time()),
            )
        except subprocess.TimeoutExpired:
            return False
        return ran.returncode == 0  # what fails does so again under a tool, which says so

    with ThreadPoolExecutor(len(ops)) as pool:
        return sum(pool.map(ends, ops))


def _missing() -> list[Row]:
    return [{"outcome": f"not done: {SANITIZER} is not installed"}]


def _sanitize(ops: Sequence[str], tool: str, device: str, until: float) -> Iterator[Row]:
    """Run one tool over ops; yields no row if the time of this call, and not the longest, ended it."""
    start = time.monotonic()
    limit = min(LONGEST, until - time.time())
    launches = [sys.executable, "-m", "benchmarks.gpu_sanitizer", "--device", device, "--ops", *ops]
    # with torch's cache of memory, what lies behind a tensor is allocated too
    environment = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    process = subprocess.Popen(
        [SANITIZER, "--tool", tool, *launches],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment, process_group=0,
    )  # fmt: skip
    try:
        said, _ = process.communicate(timeout=max(0.0, limit))
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)  # with the process that it watches
        process.communicate()
        if limit == LONGEST:
            yield {"seconds": f"{limit:.0f}", "outcome": f"{_LONG} in {limit:.0f} s"}
        return
    row = {"seconds": f"{time.monotonic() - start:.0f}"}
    summary = re.search(r"(?:ERROR|RACECHECK) SUMMARY: (\d+)", said)
    if summary is None:
        last = " ".join(said.strip().splitlines()[-1:])
        yield row | {"outcome": f"raised: no summary, exit {process.returncode}: {last}"[:160]}
    elif int(summary[1]) or process.returncode:
        outcome = f"{_WRONG}: {summary[1]} errors, exit {process.returncode}"
        yield row | {"errors": summary[1], "outcome": outcome}
    else:
        yield row | {"errors": "0", "outcome": "ok"}


def main(argv: Sequence[str] | None = None) -> int:
    """Launch the kernels of the small cases in every dtype, with their backward; on torch where there is no GPU."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--ops", nargs="+", metavar="OP", help="only these kernels")
    arguments = parser.parse_args(argv)
    device = torch.device(arguments.device)
    backend = "triton" if kernels_are_due(device) else "torch"
    for case in cases(small=True):
        for dtype in dtypes_of(case) if arguments.ops is None or case.op in arguments.ops else ():
            print(case.op, case.shape, dtype, flush=True)
            inputs = _inputs(case, device, DTYPES[dtype], seed=1)
            _results(lambda x, case=case: case.run(x, backend), inputs, {})  # type: ignore[misc]
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return 0


if __name__ == "__main__":
    sys.exit(main())
