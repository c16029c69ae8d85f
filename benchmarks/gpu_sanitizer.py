"""The part ``sanitizer`` of `benchmarks.gpu`: compute-sanitizer's tools over the small cases.

Each op has processes of its own, several ops at a time, since starting takes most of the time; one tool follows the
other, so that a stop leaves the rows of the first ones. By itself, this module launches what the tools watch::

    compute-sanitizer --tool racecheck python -m benchmarks.gpu_sanitizer --op short_conv
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
from functools import partial
from pathlib import Path

import torch

from benchmarks.gpu_cases import cases
from benchmarks.gpu_kernels import DTYPES, dtypes_of, fingerprint, kernels_are_due, make_inputs, op_of, results_of
from benchmarks.gpu_tuning import Cell, use
from benchmarks.record import Row

COLUMNS = ("op", "tool", "fingerprint", "errors", "seconds", "outcome")
SANITIZER = "compute-sanitizer"
TOOLS = ("memcheck", "racecheck", "initcheck", "synccheck")
"""The most worthwhile first: what an interpreter cannot see, and wrong addresses above all."""
LONGEST = 110.0
"""Seconds that a process may take: with its start, within the part's share."""


def sanitizer(device: torch.device, arguments: argparse.Namespace, rows: list[Row]) -> Iterator[Cell]:
    """Yield a cell for each op and tool."""
    ops = {case.op: op_of(case) for case in cases(small=True)}
    for op in ops if arguments.ops is None else arguments.ops:
        key = {"op": op, "tool": "", "fingerprint": fingerprint(ops[op])}
        if shutil.which(SANITIZER) is None:
            yield key, _missing
            continue
        keys = [key | {"tool": tool} for tool in TOOLS]
        if kernels_are_due(device) and any(all(key.items() - row.items() for row in rows) for key in keys):
            compile_first(launches(op, arguments), min(arguments.until, time.time() + LONGEST))
        for key in keys:
            yield key, partial(_sanitize, launches(op, arguments), key["tool"], arguments.until)


def launches(op: str, arguments: argparse.Namespace) -> list[str]:
    """Return the command that launches an op's kernels, with the configurations that this process has."""
    command = [sys.executable, "-m", "benchmarks.gpu_sanitizer", "--device", arguments.device, "--op", op]
    return command if arguments.tuned is None else [*command, "--tuned", str(arguments.tuned)]


def compile_first(command: Sequence[str], until: float) -> bool:
    """Launch an op without a tool, which fills Triton's cache; return whether that ended well."""
    left = None if until == math.inf else max(0.0, until - time.time())
    try:
        ran = subprocess.run(command, stdout=subprocess.DEVNULL, timeout=left)
    except subprocess.TimeoutExpired:
        return False
    return ran.returncode == 0  # what fails does so again under a tool, which says so


def _missing() -> list[Row]:
    return [{"outcome": f"not done: {SANITIZER} is not installed"}]


def _sanitize(command: Sequence[str], tool: str, until: float) -> Iterator[Row]:
    """Run one tool over a command; yields no row if the time of this call, and not the longest, ended it."""
    start = time.monotonic()
    limit = min(LONGEST, until - time.time())
    # with torch's cache of memory, what lies behind a tensor is allocated too
    environment = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    process = subprocess.Popen(
        [SANITIZER, "--tool", tool, *command],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment, process_group=0,
    )  # fmt: skip
    try:
        said, _ = process.communicate(timeout=max(0.0, limit))
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)  # with the process that it watches
        process.communicate()
        if limit == LONGEST:
            yield {"seconds": f"{limit:.0f}", "outcome": f"not finished in {limit:.0f} s"}
        return
    row = {"seconds": f"{time.monotonic() - start:.0f}"}
    summary = re.search(r"(?:ERROR|RACECHECK) SUMMARY: (\d+)", said)
    if summary is None:
        last = " ".join(said.strip().splitlines()[-1:])
        yield row | {"outcome": f"raised: no summary, exit {process.returncode}: {last}"[:160]}
    elif int(summary[1]) or process.returncode:
        outcome = f"wrong: {summary[1]} errors, exit {process.returncode}"
        yield row | {"errors": summary[1], "outcome": outcome}
    else:
        yield row | {"errors": "0", "outcome": "ok"}


def main(argv: Sequence[str] | None = None) -> int:
    """Launch an op's kernels at its small cases in every dtype, with backward; on torch where there is no GPU."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--op", required=True, help="whose kernels")
    parser.add_argument("--tuned", type=Path, help="a table of the tuner")
    arguments = parser.parse_args(argv)
    if arguments.tuned is not None:
        use(arguments.tuned)
    device = torch.device(arguments.device)
    backend = "triton" if kernels_are_due(device) else "torch"
    for case in cases(small=True):
        for dtype in dtypes_of(case) if case.op == arguments.op else ():
            print(case.op, case.shape, dtype, flush=True)
            inputs = make_inputs(case, device, DTYPES[dtype], seed=1)
            results_of(lambda x, case=case: case.run(x, backend), inputs, {})  # type: ignore[misc]
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return 0


if __name__ == "__main__":
    sys.exit(main())
