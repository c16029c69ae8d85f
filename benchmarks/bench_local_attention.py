"""Time local attention, forward and backward, against named peers in the same run.

Run it from the repository root::

    python -m benchmarks.bench_local_attention                                     # window of 128 on each side
    python -m benchmarks.bench_local_attention --chunk-size 512 --lengths 4096 --dtypes float32
    python -m benchmarks.bench_local_attention --threads 1 --dropout 0 --out runs/local_attention.csv

Peers of a window:

* ``sdpa-dense``: torch's scaled_dot_product_attention with the bias expanded to ``(1, H, T, T)``; up to --dense-limit.
* ``longt5``: transformers' LongT5LocalAttention without projections, and without the mask that restricts its three
  blocks to the window, which would only slow it.

Peer of chunks:

* ``sdpa-chunks``: scaled_dot_product_attention over chunks as a batch, with the bias expanded to ``(1, H, C, C)``.

The timing includes everything that depends on the bias, as in a training step. The columns: median and least
milliseconds; ``ratio``, the median over the op's; GFLOP/s, counting only pairs inside the neighbourhood (two products
forward, four backward, no recomputation); and its share of the rate of large float32 matrix products in the same
round, the median over the rounds.
"""

import argparse
import csv
import platform
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from hf_hybrid.kernels import local_attention

COLUMNS = [
    *("op", "T", "dtype", "dropout", "neighbourhood"),
    *("median_ms", "least_ms", "ratio", "gflops", "of_matmul"),
    *("threads", "torch", "cpu"),
]
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
Step = Callable[[], None]


class _Part(nn.Module):
    """Replaces a projection: returns one of the three parts of the last dimension."""

    def __init__(self, index: int) -> None:
        super().__init__()
        self.index = index

    def forward(self, joint: Tensor) -> Tensor:
        return joint.chunk(3, dim=-1)[self.index].contiguous()


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=form)
    parser.add_argument("--lengths", type=int, nargs="+", default=[4096, 16384], help="sequence lengths T, in tokens")
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=list(DTYPES), help="dtypes of the inputs")
    parser.add_argument("--radius", type=int, default=128, help="keys on each side of a query")
    parser.add_argument("--chunk-size", type=int, help="attend to chunks of this many tokens instead of a window")
    parser.add_argument("--dropout", type=float, default=0.1, help="probability of dropping an attention weight")
    parser.add_argument("--batch", type=int, default=1, help="rows B")
    parser.add_argument("--heads", type=int, default=4, help="heads H")
    parser.add_argument("--head-dim", type=int, default=64, help="key and value dim K")
    parser.add_argument("--rounds", type=int, default=7, help="timings per cell, at least 5; the peers alternate")
    parser.add_argument("--dense-limit", type=int, default=4096, help="longest T for sdpa-dense")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="torch's threads")
    parser.add_argument("--out", type=Path, help="also write the CSV to this file")
    arguments = parser.parse_args(argv)
    if arguments.rounds < 5:
        parser.error(f"--rounds must be at least 5; got {arguments.rounds}")
    return arguments


def matmul_rate() -> float:
    """Return GFLOP/s of a large float32 matrix product, the best of ten."""
    a, b = torch.randn(1024, 1024), torch.randn(1024, 1024)
    return 2 * 1024**3 / min(_seconds(lambda: torch.mm(a, b)) for _ in range(10)) / 1e9


def _seconds(step: Callable[[], object]) -> float:
    start = time.perf_counter()
    step()
    return time.perf_counter() - start


def _backward(output: Tensor, inputs: Sequence[Tensor], grad: Tensor) -> None:
    torch.autograd.grad(output, inputs, grad.view_as(output))


def steps(arguments: argparse.Namespace, length: int, dtype: torch.dtype) -> dict[str, Step]:
    """Build one forward and backward step per contestant."""
    batch, heads, width, dropout = arguments.batch, arguments.heads, arguments.head_dim, arguments.dropout
    query, key, value, grad = (torch.randn(batch, length, heads, width).to(dtype) for _ in range(4))
    chunk, radius = arguments.chunk_size, arguments.radius
    reach = radius if chunk is None else chunk - 1
    bias = torch.randn(heads, 2 * reach + 1)
    inputs = [x.requires_grad_() for x in (query, key, value, bias)]
    where = {"radius": radius} if chunk is None else {"chunk_size": chunk}

    def op() -> None:
        _backward(local_attention(query, key, value, bias=bias, dropout=dropout, **where), inputs, grad)

    def sdpa(span: int) -> None:
        position = torch.arange(span)
        offset = position[None, :] - position[:, None]
        dense = bias.to(dtype)[:, (offset + reach).clamp(0, 2 * reach)]
        dense = dense.masked_fill(offset.abs() > reach, float("-inf"))
        parts = [x.reshape(-1, span, heads, width).transpose(1, 2) for x in (query, key, value)]
        output = nn.functional.scaled_dot_product_attention(*parts, attn_mask=dense[None], dropout_p=dropout)
        _backward(output.transpose(1, 2).reshape(grad.shape), inputs, grad)

    if chunk is not None:
        return {"local_attention": op} | ({"sdpa-chunks": lambda: sdpa(chunk)} if length % chunk == 0 else {})

    from transformers.models.longt5.modeling_longt5 import LongT5Config, LongT5LocalAttention

    config = LongT5Config(
        d_model=heads * width, d_kv=width, num_heads=heads, local_radius=radius, dropout_rate=dropout
    )
    layer = LongT5LocalAttention(config, has_relative_attention_bias=True).to(dtype).train()
    layer.q, layer.k, layer.v, layer.o = _Part(0), _Part(1), _Part(2), nn.Identity()
    joint = torch.cat([x.detach().flatten(2) for x in (query, key, value)], dim=-1).requires_grad_()

    def longt5() -> None:
        _backward(layer(joint)[0], [joint, layer.relative_attention_bias.weight], grad)

    contestants: dict[str, Step] = {"local_attention": op, "longt5": longt5}
    if length <= arguments.dense_limit:
        contestants["sdpa-dense"] = lambda: sdpa(length)
    return contestants


def visible_pairs(length: int, radius: int, chunk_size: int | None) -> int:
    """Count the pairs of a query and a visible key."""
    if chunk_size is not None:
        full, rest = divmod(length, chunk_size)
        return full * chunk_size**2 + rest**2
    return sum(min(t, radius) + 1 + min(length - 1 - t, radius) for t in range(length))


def main(argv: Sequence[str] | None = None) -> list[dict[str, object]]:
    """Run the benchmark; print the table as CSV and return its rows."""
    arguments = parse_arguments(argv)
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(0)
    chunk = arguments.chunk_size
    rows: list[dict[str, object]] = []
    printer = csv.DictWriter(sys.stdout, COLUMNS)
    printer.writeheader()
    for length in arguments.lengths:
        pairs = visible_pairs(length, arguments.radius, chunk) * arguments.batch * arguments.heads
        for dtype in arguments.dtypes:
            contestants = steps(arguments, length, DTYPES[dtype])
            times: dict[str, list[float]] = {name: [] for name in contestants}
            for step in contestants.values():
                step()
            rates = []
            for _ in range(arguments.rounds):
                rates.append(matmul_rate())
                for name, step in contestants.items():
                    times[name].append(_seconds(step))
            own = statistics.median(times["local_attention"])
            for name, seconds in times.items():
                median = statistics.median(seconds)
                work = 6 * 2 * pairs * arguments.head_dim / 1e9
                shares = [work / spent / rate for spent, rate in zip(seconds, rates, strict=True)]
                row = {
                    "op": name,
                    "T": length,
                    "dtype": dtype,
                    "dropout": arguments.dropout,
                    "neighbourhood": f"radius {arguments.radius}" if chunk is None else f"chunk {chunk}",
                    "median_ms": f"{median * 1e3:.1f}",
                    "least_ms": f"{min(seconds) * 1e3:.1f}",
                    "ratio": f"{median / own:.2f}",
                    "gflops": f"{work / median:.1f}",
                    "of_matmul": f"{statistics.median(shares):.2f}",
                    "threads": arguments.threads,
                    "torch": torch.__version__,
                    "cpu": f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}",
                }
                rows.append(row)
                printer.writerow(row)
                sys.stdout.flush()
    if arguments.out is not None:
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        with arguments.out.open("w", newline="") as file:
            writer = csv.DictWriter(file, COLUMNS)
            writer.writeheader()
            writer.writerows(rows)
    return rows


if __name__ == "__main__":
    main()
