"""Check and time everything on one GPU, in one call of at most nine minutes, without a network.

Run it from the repository root::

    python -m benchmarks.gpu                                       # or make gpu; results in $OUT, else runs/gpu
    python -m benchmarks.gpu --report benchmarks/results/gpu       # the page of kept results
    python -m benchmarks.gpu --device cpu --small                  # rehearse it within a minute
    TRITON_INTERPRET=1 python -m benchmarks.gpu --device cpu --small --parts checks     # also Triton's kernels

The kernels need torch and Triton; models need transformers; peers and matplotlib are used if installed. Each part is a
process with a share of the time, so that a failure or a broken device does not affect the others; the page keeps what
was measured and says what failed:

- ``checks``: every case in every dtype, outputs and gradients against float64, twice, bit by bit; one process per op,
  several in parallel, since compiling takes most of the time;
- ``kernels``: forward, and forward with backward, against peers in the same run: median of at least 20 turns with a
  cleared cache, peak memory, and the distance to the floor, the larger of the time for the bytes that must move and
  for the multiplications, at the ceilings measured by a copy and by large products;
- ``models``: a training step, a prompt and decoding at 1k to 64k tokens, against transformers' models.
"""

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from benchmarks import gpu_kernels, gpu_models
from benchmarks.gpu_cases import Case, cases, checked_cases
from benchmarks.gpu_kernels import DTYPES, Clock, check, measure_ceilings
from benchmarks.record import Row, markdown_table, read_csv, stamp, version_of, write_csv

SECONDS = {"checks": 150, "kernels": 180, "models": 190}
"""Each part's share of the nine minutes, including its start."""

FAILURES = ("wrong", "not the same", "raised")

# fmt: off
STAMP = ("date", "device", "capability", "python", "torch", "triton", "transformers", "hf_hybrid")
COLUMNS = {
    "checks": (*STAMP, "op", "shape", "dtype", "backend", "worst", "error", "allowed", "outcome"),
    "kernels": (
        *STAMP, "op", "shape", "dtype", "direction", "contender", "ms", "over_floor", "peak_mib", "outcome",
        "copy_gbs", *(f"{name}_tflops" for name in DTYPES),
    ),
    "models": (
        *STAMP, "model", "length", "parameters", "batch", "step_ms", "tokens_s", "peak_mib", "prompt_ms", "token_ms",
        "outcome",
    ),
}
# fmt: on


def _stamp(device: torch.device) -> Row:
    row = stamp() | {"triton": version_of("triton"), "device": "CPU", "capability": "-"}
    if device.type == "cuda":
        row["device"] = torch.cuda.get_device_name(device)
        row["capability"] = "{}.{}".format(*torch.cuda.get_device_capability(device))
    return {name: row[name] for name in STAMP}


def _wanted(found: list[Case], ops: Sequence[str] | None) -> list[Case]:
    return [case for case in found if ops is None or case.op in ops]


def _checks(device: torch.device, small: bool, ops: Sequence[str] | None) -> Iterator[Row]:
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    backends = ("torch", "triton") if device.type == "cuda" or interpreted else ("torch",)
    for case in _wanted(checked_cases(small), ops):
        everything_wide = set(case.make(torch.device("cpu"))) <= set(case.wide)
        for dtype in ("fp32",) if everything_wide else DTYPES:
            print("checks", case.op, case.shape, dtype, "...", flush=True)  # names the case if the device hangs
            yield from check(case, dtype, device, backends)


def _kernels(device: torch.device, small: bool, ops: Sequence[str] | None) -> Iterator[Row]:
    clock = Clock(device)
    ceilings = measure_ceilings(clock, small)
    for dtype in ("bf16",) if device.type == "cuda" else ("fp32",):
        for case in _wanted(cases(small), ops):
            try:
                for row in gpu_kernels.race(case, dtype, clock, ceilings, 2 if small else 20):
                    yield row | ceilings
            except Exception as error:
                said = f"raised: {type(error).__name__}: {error}".splitlines()[0][:160]
                yield {"op": case.op, "shape": case.shape, "dtype": dtype, "outcome": said} | ceilings


def _models(device: torch.device, small: bool, ops: Sequence[str] | None) -> Iterator[Row]:
    clock = Clock(device)
    for length in (64,) if small else gpu_models.LENGTHS:
        for names in (gpu_models.LANGUAGE_MODELS, gpu_models.ENCODER_DECODERS):
            yield from gpu_models.race(length, names, clock, small, 1 if small else 8)


PARTS: dict[str, Callable[[torch.device, bool, Sequence[str] | None], Iterator[Row]]] = {
    "checks": _checks,
    "kernels": _kernels,
    "models": _models,
}


def run_part(part: str, arguments: argparse.Namespace) -> int:
    """Run one part in this process, rewriting its CSV after every row, within its time."""
    started, rows = time.monotonic(), []
    device = torch.device(arguments.device)
    common = _stamp(device)
    for row in PARTS[part](device, arguments.small, arguments.ops):
        rows.append(common | row)
        write_csv(arguments.csv or arguments.out / f"{part}.csv", COLUMNS[part], rows)
        print(part, *(row.get(name, "") for name in COLUMNS[part][len(STAMP) :]), flush=True)
        if time.monotonic() - started > arguments.seconds:
            print(f"{part}: out of time", flush=True)
            return 3
    return 4 if any(row["outcome"].startswith(FAILURES) for row in rows) else 0


def _start(part: str, ops: Sequence[str], csv: Path, deadline: float, arguments: argparse.Namespace) -> str:
    """Run one part, for some ops, in its own process; return its outcome in words."""
    csv.unlink(missing_ok=True)
    seconds = deadline - time.monotonic()
    flags = ["--device", arguments.device, "--seconds", f"{seconds - 15:.0f}", "--csv", str(csv), "--ops", *ops]
    flags += ["--small"] if arguments.small else []
    command = [sys.executable, "-m", "benchmarks.gpu", "--part", part, *flags]
    try:
        code = subprocess.run(command, timeout=max(0, seconds)).returncode
    except subprocess.TimeoutExpired:
        return "hung and was ended; what it had measured is below"
    ends = {0: "ok", 3: "out of time; what it had measured is below", 4: "failed, see below"}
    return ends.get(code, f"failed, exit {code}")


def run(arguments: argparse.Namespace) -> int:
    """Run every part in its own processes and write the page; return the number of failed parts."""
    arguments.out.mkdir(parents=True, exist_ok=True)
    known = list(dict.fromkeys(case.op for case in cases(arguments.small)))
    ops = [op for op in known if arguments.ops is None or op in arguments.ops]
    said = {}
    for part in arguments.parts:
        deadline = time.monotonic() + SECONDS[part] * arguments.minutes / 9
        files = {op: arguments.out / f"{part}-{op}.csv" for op in ops} if part == "checks" else {}
        if not files:
            said[part] = _start(part, ops, arguments.out / f"{part}.csv", deadline, arguments)
        else:
            with ThreadPoolExecutor(max(1, (os.cpu_count() or 1) // 2)) as pool:
                starts = [pool.submit(_start, part, [op], file, deadline, arguments) for op, file in files.items()]
            ends = [start.result() for start in starts]
            said[part] = "; ".join(f"{op} {end}" for op, end in zip(files, ends, strict=True) if end != "ok") or "ok"
            there = [file for file in files.values() if file.exists()]
            write_csv(arguments.out / f"{part}.csv", COLUMNS[part], [row for file in there for row in read_csv(file)])
            for file in there:
                file.unlink()
        print(f"{part}: {said[part]}", flush=True)
    page = report(arguments.out, said)
    (arguments.out / "gpu.md").write_text(page, encoding="utf-8")
    draw(arguments.out)
    print(page.split("\n## ", 1)[0])
    return sum(outcome != "ok" for outcome in said.values())


def report(folder: Path, said: dict[str, str] | None = None) -> str:
    """Return the page of a folder of results as Markdown, failures first."""
    rows = {part: read_csv(folder / f"{part}.csv") for part in PARTS if (folder / f"{part}.csv").exists()}
    lines = ["# Kernels and models on a GPU", ""]
    if rows:
        first = next(iter(rows.values()))[0]
        lines += ["; ".join(f"{name} {first[name]}" for name in STAMP) + ".", ""]
    lines += [f"- {part}: {outcome}" for part, outcome in (said or {}).items()]
    for part, found in rows.items():
        wrong = [row for row in found if row["outcome"].startswith(FAILURES)]
        lines.append(f"- {part}: {len(found)} rows, {len(wrong)} of them failed")
        names = [name for name in ("op", "shape", "model", "length", "dtype", "backend") if name in COLUMNS[part]]
        lines += [f"- {' '.join(row[name] for name in names if row[name])}: {row['outcome']}" for row in wrong]
    for part, found in rows.items():
        columns = [name for name in COLUMNS[part] if name not in STAMP and not name.endswith(("_gbs", "_tflops"))]
        lines += ["", f"## {part}", ""]
        if part == "kernels":
            ceilings = {name: found[0][name] for name in found[0] if name.endswith(("_gbs", "_tflops"))}
            lines += ["Ceilings: " + ", ".join(f"{name} {value}" for name, value in ceilings.items()) + ".", ""]
        lines.append(markdown_table(columns, [[row[name] for name in columns] for row in found]))
    return "\n".join(lines) + "\n"


def draw(folder: Path) -> None:
    """Draw each model's tokens per second and peak memory over the length, if matplotlib is installed."""
    try:
        import matplotlib
    except ImportError:
        print("matplotlib is not installed: nothing is drawn")
        return
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    rows = read_csv(folder / "models.csv") if (folder / "models.csv").exists() else []
    for column, label in (("tokens_s", "training, tokens per second"), ("peak_mib", "training, peak memory in MiB")):
        figure, axes = plt.subplots(figsize=(7, 4.5), layout="constrained")
        for model in dict.fromkeys(row["model"] for row in rows):
            points = [(int(r["length"]), float(r[column])) for r in rows if r["model"] == model and r[column]]
            if points:
                axes.plot(*zip(*points, strict=True), marker="o", label=model)
        axes.set(xscale="log", yscale="log", xlabel="tokens", ylabel=label)
        if axes.lines:
            axes.legend(fontsize="small")
        figure.savefig(folder / f"models_{column}.png", dpi=150)
        plt.close(figure)


def main(argv: Sequence[str] | None = None) -> int:
    """Run everything, or one part of it in this process, or print the page of earlier results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", "runs/gpu")), help="folder of results")
    parser.add_argument("--minutes", type=float, default=9.0, help="for everything")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--small", action="store_true", help="tiny shapes")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=tuple(PARTS))
    parser.add_argument("--ops", nargs="+", metavar="OP", help="check and time only these kernels")
    parser.add_argument("--report", type=Path, metavar="FOLDER", help="only print the page")
    parser.add_argument("--part", choices=PARTS, help=argparse.SUPPRESS)
    parser.add_argument("--csv", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--seconds", type=float, default=float("inf"), help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    if arguments.report is not None:
        print(report(arguments.report))
        return 0
    if arguments.device.startswith("cuda") and not torch.cuda.is_available():
        parser.error(
            "--device must be one that torch sees; got 'cuda', and torch sees none (try --device cpu --small)"
        )
    if arguments.part is not None:
        return run_part(arguments.part, arguments)
    return run(arguments)


if __name__ == "__main__":
    sys.exit(main())
