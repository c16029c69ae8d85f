"""Time CHELA's components against plain implementations, on the CPU, in the same run.

Run it from the repository root::

    python -m benchmarks.bench_chela
    python -m benchmarks.bench_chela --out benchmarks/results/chela_cpu.csv     # the kept record
    python -m benchmarks.bench_chela --report benchmarks/results/chela_cpu.csv  # its tables

- causal linear attention, forward and backward: ours by blocks; `quadratic`, the masked product with all scores; and
  `floor`, the time of our multiplications at the rate of a product of two 1024 x 1024 matrices;
- a long convolution, token by token: ours, the mean over as many tokens as the filter has taps; and two sums over the
  last inputs (`naive`): `sum` of products with time outside the channels, `vecdot` with time inside;
- parallel short convolutions with SiLU: `apart`, one call each; `added`, as in training, one call after adding the
  taps; `fused`, one call with precomputed taps;
- a language model of four layers of width 256 with 4,096 long taps, token by token: the mean over 256 tokens after
  prompts of several lengths.

The implementations alternate, round after round; a cell is the median.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
from torch.nn import functional as F

from benchmarks.record import Row, command_line, conditions, exponent, markdown_table, measured_stamp, write_csv
from benchmarks.workloads import seconds
from hf_hybrid.kernels import linear_attention, short_conv
from hf_hybrid.kernels.linear_attention.torch_impl import _BLOCK
from hf_hybrid.kernels.long_conv import online_conv, start_online_conv
from hf_hybrid.kernels.short_conv import merge_kernels

DEFAULT_OUT = Path("runs/bench/chela_cpu.csv")
COLUMNS = (
    *("date", "cpu", "threads", "python", "torch", "transformers", "hf_hybrid"),
    *("operation", "shape", "length", "way", "seconds"),
)
LENGTHS = (1024, 2048, 4096, 8192, 16384)
QUADRATIC_LIMIT = 8192  # tokens; beyond it the scores alone ask for gigabytes
HEADS = ((4, 64), (1, 256))
TAPS = 4096
RINGS = ((1, 256), (1, 1024), (8, 256))  # batch and channels
SHORT_SIZES = (3, 9)
PROMPTS = (1024, 4096, 16384)
DECODED = 256  # tokens
Cell = tuple[str, str, int]
Ways = dict[str, Callable[[], float]]


def attention_cells(lengths: Sequence[int]) -> Iterator[tuple[Cell, Ways]]:
    """Causal linear attention, forward and backward."""
    for heads, width in HEADS:
        for length in lengths:
            inputs = [torch.randn(1, length, heads, width, requires_grad=True) for _ in range(3)]
            grad = torch.randn(1, length, heads, width)

            def blocks(inputs=inputs, grad=grad) -> None:
                torch.autograd.grad(linear_attention(*inputs)[0], inputs, grad)

            def quadratic(inputs=inputs, grad=grad) -> None:
                q, k, v = (x.transpose(1, 2) for x in inputs)
                torch.autograd.grad(((q @ k.mT).tril() @ v).transpose(1, 2), inputs, grad)

            # products with all of a block's scores: 2 forward, 5 backward; with the state: 2 and 5
            work = 2 * length * heads * width * 7 * (_BLOCK + width)

            def floor(work=work) -> float:
                a, b = torch.randn(1024, 1024), torch.randn(1024, 1024)
                return min(seconds(lambda: torch.mm(a, b)) for _ in range(5)) * work / (2 * 1024**3)

            ways: Ways = {"blocks": lambda step=blocks: seconds(step), "floor": floor}
            if length <= QUADRATIC_LIMIT:
                ways["quadratic"] = lambda step=quadratic: seconds(step)
            yield ("linear attention", f"{heads} x {width}", length), ways


def decoding_cells() -> Iterator[tuple[Cell, Ways]]:
    """A long convolution, per token."""
    for batch, width in RINGS:
        kernel = torch.randn(width, TAPS) * 0.02
        u = torch.randn(batch, TAPS, width)
        inside, outside = u.mT.contiguous(), u.clone()
        flipped = kernel.flip(1)
        rows = flipped.mT.contiguous()

        def online(u=u, kernel=kernel) -> float:
            state = start_online_conv(u, kernel)
            start = time.perf_counter()
            for t in range(TAPS):
                _, state = online_conv(u[:, t : t + 1], kernel, state)
            return (time.perf_counter() - start) / TAPS

        def total(u=u, ring=outside, rows=rows) -> None:
            ring[:, 0] = u[:, 0]
            (ring * rows).sum(1)

        def vecdot(u=u, ring=inside, rows=flipped) -> None:
            ring[:, :, 0] = u[:, 0]
            torch.linalg.vecdot(ring, rows)

        yield (
            ("long convolution, a token", f"batch {batch}, {width} channels", TAPS),
            {
                "online": online,
                "naive sum": lambda step=total: seconds(step),
                "naive vecdot": lambda step=vecdot: seconds(step),
            },
        )


def short_cells(lengths: Sequence[int]) -> Iterator[tuple[Cell, Ways]]:
    """Parallel short convolutions, inference."""
    width = 256
    kernels = [torch.randn(width, size) for size in SHORT_SIZES]
    biases = [torch.randn(width) for _ in SHORT_SIZES]
    fused_kernel, fused_bias = merge_kernels(kernels, causal=True), sum(biases)
    for length in (1, *lengths):
        u = torch.randn(1, length, width)
        states = [torch.randn(1, size - 1, width) for size in SHORT_SIZES]

        def apart(u=u, states=states) -> None:
            parts = zip(kernels, biases, states, strict=True)
            F.silu(sum(short_conv(u, kernel, bias, causal=True, state=state)[0] for kernel, bias, state in parts))

        def added(u=u, states=states) -> None:
            kernel = merge_kernels(kernels, causal=True)
            short_conv(u, kernel, biases[0] + biases[1], causal=True, activation="silu", state=states[-1])

        def fused(u=u, states=states) -> None:
            short_conv(u, fused_kernel, fused_bias, causal=True, activation="silu", state=states[-1])

        ways = {"apart": apart, "added": added, "fused": fused}
        yield (
            ("short convolutions", f"taps {SHORT_SIZES[0]} and {SHORT_SIZES[1]}, {width} channels", length),
            {name: lambda step=step: min(seconds(step) for _ in range(5)) for name, step in ways.items()},
        )


def model_cells() -> Iterator[tuple[Cell, Ways]]:
    """A complete model, per token; each implementation continues from its own cache."""
    from hf_hybrid import ChelaConfig, ChelaForCausalLM

    config = ChelaConfig.from_preset("tiny", vocab_size=1024, intermediate_size=1024, long_kernel_size=TAPS)
    model = ChelaForCausalLM(config).eval()
    ways: Ways = {}
    for length in PROMPTS:
        prompt = torch.randint(3, config.vocab_size, (1, length))
        cache = model(prompt, use_cache=True, logits_to_keep=1).past_key_values

        def decode(cache=cache, token=prompt[:, :1]) -> float:
            return seconds(lambda: model(token, past_key_values=cache, use_cache=True), DECODED)

        ways[f"after {length}"] = decode
    yield ("model, a token", f"4 layers, {config.hidden_size} channels", DECODED), ways


def run(arguments: argparse.Namespace) -> list[Row]:
    """Measure every cell, rewriting the CSV after each, and return its rows."""
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(0)
    common = measured_stamp(arguments.threads)
    rows: list[Row] = []

    def measure(cells: Iterator[tuple[Cell, Ways]]) -> None:
        for (operation, shape, length), ways in cells:
            for way in ways.values():
                way()
            found: dict[str, list[float]] = {name: [] for name in ways}
            for _ in range(arguments.rounds):
                for name, way in ways.items():
                    found[name].append(way())
            for name, values in found.items():
                cell = {"operation": operation, "shape": shape, "length": str(length), "way": name}
                rows.append(common | cell | {"seconds": f"{statistics.median(values):.4g}"})
                print(*rows[-1].values(), flush=True)
            write_csv(arguments.out, COLUMNS, rows)

    measure(attention_cells(arguments.lengths))
    with torch.inference_mode():
        measure(decoding_cells())
        measure(short_cells(arguments.lengths))
        measure(model_cells())
    return rows


def report(rows: list[Row]) -> str:
    """Return the tables of a CSV's rows as Markdown: milliseconds, and every way over ours."""
    first = rows[0]
    parts = [f"{conditions(first)}. Batch 1 where none is named, fp32."]
    for operation in dict.fromkeys(row["operation"] for row in rows):
        cells: dict[tuple[str, int], dict[str, float]] = {}
        for row in rows:
            if row["operation"] == operation:
                cells.setdefault((row["shape"], int(row["length"])), {})[row["way"]] = float(row["seconds"])
        ways = list(next(iter(cells.values())))
        others = ways[1:] if operation != "short convolutions" else ways[:-1]
        (ours,) = set(ways) - set(others)
        header = ["shape", "length", *(f"{way}, ms" for way in ways), *(f"{way} over {ours}" for way in others)]
        lines = []
        for (shape, length), found in cells.items():
            times = [f"{found[way] * 1e3:.3g}" if way in found else "-" for way in ways]
            ratios = [f"{found[way] / found[ours]:.2f}" if way in found else "-" for way in others]
            lines.append([shape, str(length), *times, *ratios])
        parts += [f"**{operation}**", markdown_table(header, lines)]
        for shape in dict.fromkeys(shape for shape, _ in cells):
            points = [(length, found[ours]) for (at, length), found in cells.items() if at == shape]
            if (slope := exponent(points)) != "-":
                parts.append(f"Time of {ours} over length, {shape}: exponent 2k-16k (points) {slope}.")
    return "\n\n".join(parts)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this benchmark's arguments."""
    parser.add_argument("--lengths", nargs="+", type=int, default=LENGTHS, metavar="TOKENS")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=1)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark, or print the tables of an earlier run."""
    return command_line(__doc__, DEFAULT_OUT, add_arguments, run, report, argv)


if __name__ == "__main__":
    sys.exit(main())
