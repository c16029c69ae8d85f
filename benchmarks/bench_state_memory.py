"""Measure what a linear map can recall from a frozen state space model with its initial values.

Run it from the repository root::

    python -m benchmarks.bench_state_memory --out benchmarks/results/state_memory.csv     # the kept record
    python -m benchmarks.bench_state_memory --report benchmarks/results/state_memory.csv  # its tables

A sequence of random tokens of 16 kinds, each a fixed random vector, passes through the layer and a layer norm, as in a
global layer of SPADE. Ridge regression, fitted on three quarters of the sequences, predicts on the others

- `sums`: how often each kind occurs among the tokens at some distances (share of the variance explained, R²; 0 for a
  constant, negative for a fit to noise);
- `token`: which kind is at one distance (share of correct answers; chance is 1/16).
"""

import argparse
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

from benchmarks.record import Row, command_line, markdown_table, stamp, write_csv
from hf_hybrid.layers.s4 import S4
from hf_hybrid.layers.s4d import S4D

DEFAULT_OUT = Path("runs/bench/state_memory.csv")
COLUMNS = ("date", "cpu", "python", "torch", "hf_hybrid", "start", "seed", "asked", "distance", "score")
WIDTH, KINDS = 128, 16
SEQUENCES, TRAINED, LENGTH, FIRST = 96, 72, 768, 512
SPANS = ((0, 16), (16, 64), (64, 128), (128, 256), (256, 512))
DISTANCES = (0, 8, 32, 64, 128)
RIDGE = 1e-3


def unit_energy(layer: S4 | S4D) -> S4 | S4D:
    """Scale every channel's taps to a sum of squares of one."""
    impulse = torch.zeros(1, 4 * LENGTH, WIDTH)
    impulse[0, 0] = 1
    skip, layer.D = layer.D, None
    layer.C /= layer(impulse)[0].norm(dim=0)[None, :, None, None]
    layer.D = skip
    layer.clear_cache()
    return layer


STARTS: dict[str, Callable[[], nn.Module]] = {
    "S4, N 64 (SPADE's)": lambda: S4(WIDTH, 64),
    "S4, N 64, no D": lambda: S4(WIDTH, 64, use_D=False),
    "S4, N 64, Δ 0.002 to 0.02": lambda: S4(WIDTH, 64, dt_min=0.002, dt_max=0.02),
    "S4, N 64, taps of unit energy": lambda: unit_energy(S4(WIDTH, 64)),
    "S4, N 16": lambda: S4(WIDTH, 16),
    "S4, N 16, Δ 0.002 to 0.02": lambda: S4(WIDTH, 16, dt_min=0.002, dt_max=0.02),
    "S4, N 8": lambda: S4(WIDTH, 8),
    "S4, N 8, Δ 0.002 to 0.02": lambda: S4(WIDTH, 8, dt_min=0.002, dt_max=0.02),
    "S4, N 4": lambda: S4(WIDTH, 4),
    "S4D-Lin, N 64": lambda: S4D(WIDTH, 64, init="lin"),
    "S4D-Lin, N 8": lambda: S4D(WIDTH, 8, init="lin"),
    "S4D-Inv, N 64": lambda: S4D(WIDTH, 64, init="inv"),
    "S4D-Inv, N 8": lambda: S4D(WIDTH, 8, init="inv"),
}


def ridge(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Fit `(B, T, K)` linearly to `(B, T, D)` on the first sequences, and predict the others."""
    inputs = F.pad(outputs.double(), (0, 1), value=1.0)
    fitted, asked = inputs[:TRAINED].flatten(0, 1), targets[:TRAINED].flatten(0, 1)
    square = fitted.T @ fitted + RIDGE * len(fitted) * torch.eye(fitted.shape[1], dtype=torch.float64)
    return inputs[TRAINED:] @ torch.linalg.solve(square, fitted.T @ asked)


@torch.no_grad()
def recall(layer: nn.Module, kinds: torch.Tensor, vectors: torch.Tensor) -> list[tuple[str, str, float]]:
    """Return the scores of one layer: the question, the distance, and the score."""
    outputs = F.layer_norm(layer(F.layer_norm(vectors[kinds], (WIDTH,))), (WIDTH,))
    one_hot = F.one_hot(kinds, KINDS).double()
    before = F.pad(one_hot.cumsum(1), (0, 0, 1, 0))  # counts of each kind before a position
    places = torch.arange(FIRST, LENGTH, 4)
    scores = []
    for near, far in SPANS:
        counts = before[:, places + 1 - near] - before[:, places + 1 - far]
        left = (ridge(outputs[:, places], counts) - counts[TRAINED:]).square().mean()
        scores.append(("sums", f"{near} to {far - 1}", 1 - (left / counts[TRAINED:].var()).item()))
    for distance in DISTANCES:
        guessed = ridge(outputs[:, places], one_hot[:, places - distance] - 1 / KINDS).argmax(-1)
        right = guessed == kinds[TRAINED:, places - distance]
        scores.append(("token", str(distance), right.double().mean().item()))
    return scores


def run(arguments: argparse.Namespace) -> list[Row]:
    """Measure every initialisation with every seed."""
    common = {name: value for name, value in stamp().items() if name in COLUMNS}
    rows = []
    for seed in arguments.seeds:
        torch.manual_seed(seed)
        kinds, vectors = torch.randint(KINDS, (SEQUENCES, LENGTH)), torch.randn(KINDS, WIDTH)
        for start, make in STARTS.items():
            torch.manual_seed(seed)
            for asked, distance, score in recall(make(), kinds, vectors):
                cell = {"asked": asked, "distance": distance, "score": f"{score:.4f}"}
                rows.append(common | {"start": start, "seed": str(seed)} | cell)
        write_csv(arguments.out, COLUMNS, rows)
    return rows


def report(rows: list[Row]) -> str:
    """Return a table for each question, with means over the seeds."""
    first = rows[0]
    seeds = ", ".join(dict.fromkeys(row["seed"] for row in rows))
    parts = [
        f"{first['date']}; torch {first['torch']}, hf_hybrid {first['hf_hybrid']}. {WIDTH} channels, seeds {seeds}: "
        f"the mean."
    ]
    titles = {"sums": "share of variance explained (R²), by distance", "token": "share right, by distance"}
    for asked, title in titles.items():
        found = [row for row in rows if row["asked"] == asked]
        distances = list(dict.fromkeys(row["distance"] for row in found))
        lines = []
        for start in STARTS:
            means = (
                statistics.fmean(
                    float(row["score"]) for row in found if (row["start"], row["distance"]) == (start, distance)
                )
                for distance in distances
            )
            lines.append([start, *(f"{mean:.2f}" for mean in means)])
        parts += [f"**{asked}**: {title}", markdown_table(["start", *distances], lines)]
    return "\n\n".join(parts)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this benchmark's arguments."""
    parser.add_argument("--seeds", nargs="+", type=int, default=(0, 1, 2))


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark, or print the tables of an earlier run."""
    return command_line(__doc__, DEFAULT_OUT, add_arguments, run, report, argv)


if __name__ == "__main__":
    sys.exit(main())
