"""Compare causal language models with peers of the same width and depth on the CPU: training step, decoding, cache.

Run it from the repository root::

    python -m benchmarks.bench_language_models
    python -m benchmarks.bench_language_models --out benchmarks/results/language_models_cpu.csv     # the kept record
    python -m benchmarks.bench_language_models --report benchmarks/results/language_models_cpu.csv  # its tables

Models have four layers of width 256, or twelve of width 1024 if their name contains "base" (BST's preset). The peers
are transformers' Llama with full attention (SDPA) and Mamba-2. CHELA's long kernels have 4,096 taps. Each measurement
of a cell (a model at one length) runs in its own process, and the models alternate at each length;
`benchmarks.bench_models` describes how peak memory is measured and limited. A cell yields:

- training: forward and backward of one sequence, fp32. The first step at a length is reported apart from the later
  ones, since a frozen state space model makes and caches its kernel there.
- decoding: the time per token over 256 tokens after a prompt of that length, and the bytes of the cache.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from benchmarks.bench_models import (
    HEADS,
    INNER,
    LAYERS,
    VOCABULARY,
    WIDTH,
    forget_peak,
    in_process,
    limit_memory,
    memory,
    what_went_wrong,
)
from benchmarks.record import Row, command_line, conditions, exponent, markdown_table, stamp, write_csv
from benchmarks.workloads import decoding, held_mib

DEFAULT_OUT = Path("runs/bench/language_models_cpu.csv")
LENGTHS = (1024, 2048, 4096, 8192, 16384)
WINDOW = 512
DECODED = 256  # tokens
MEASURES = ("first_step_s", "step_s", "peak_mib", "token_s", "cache_mib")
# fmt: off
COLUMNS = (
    "date", "cpu", "threads", "python", "torch", "transformers", "hf_hybrid", "model", "length", "parameters",
    *MEASURES, "outcome",
)
# fmt: on


def _spade(**fields: object) -> Any:
    from hf_hybrid import SpadeConfig

    shape = {"hidden_size": WIDTH, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS}
    sizes = {"intermediate_size": INNER, "local_radius": WINDOW - 1, "chunk_size": WINDOW, "vocab_size": VOCABULARY}
    return SpadeConfig(is_decoder=True, is_encoder_decoder=False, **shape, **sizes, **fields)


def _bst(**fields: object) -> Any:
    from hf_hybrid import BstConfig

    shape = {"hidden_size": WIDTH, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS}
    layers = {"bst_layers": [1], **fields}
    return BstConfig(**shape, intermediate_size=INNER, window=WINDOW, vocab_size=VOCABULARY, **layers)


def _bst_base(**fields: object) -> Any:
    from hf_hybrid import BstConfig

    return BstConfig.from_preset("base", vocab_size=VOCABULARY, **fields)


def _llama() -> Any:
    from transformers import LlamaConfig

    return LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=WIDTH, num_hidden_layers=LAYERS, num_attention_heads=HEADS,
        intermediate_size=INNER * 2 // 3, max_position_embeddings=max(LENGTHS) + DECODED, tie_word_embeddings=True,
    )  # fmt: skip


def _mamba2() -> Any:
    from transformers import Mamba2Config

    return Mamba2Config(
        vocab_size=VOCABULARY, hidden_size=WIDTH, num_hidden_layers=LAYERS, num_heads=8, head_dim=64, state_size=64,
        n_groups=1,
    )  # fmt: skip


def _chela(**fields: object) -> Any:
    from hf_hybrid import ChelaConfig

    shape = {"hidden_size": WIDTH, "num_hidden_layers": LAYERS, "intermediate_size": INNER, "vocab_size": VOCABULARY}
    return ChelaConfig(is_decoder=True, **shape, **fields)


MODELS: dict[str, Callable[[], Any]] = {
    "bst-slide": lambda: _bst(bst_layers=[]),
    "bst-sh-s4": _bst,
    "bst-mh-s4": lambda: _bst(context_type="multi_head"),
    "bst-mf-s4": lambda: _bst(context_type="multi_filter"),
    "bst-sh-s4-state-64": lambda: _bst(state_size=64),
    "bst-mf-s4-state-64": lambda: _bst(context_type="multi_filter", state_size=64),
    "bst-sh-unstructured": lambda: _bst(context_filter="unstructured"),
    "bst-mf-unstructured": lambda: _bst(context_type="multi_filter", context_filter="unstructured"),
    "bst-base-slide": lambda: _bst_base(bst_layers=[]),
    "bst-base-sh-s4": _bst_base,
    "bst-base-sh-s4-state-64": lambda: _bst_base(state_size=64),
    "bst-base-mf-s4": lambda: _bst_base(context_type="multi_filter"),
    "llama-sdpa": _llama,
    "mamba2": _mamba2,
    "chela": lambda: _chela(num_attention_heads=HEADS),
    "chela-one-head": _chela,
    "spade": _spade,
    "spade-frozen-s4": lambda: _spade(ssm_freeze="all"),
    "spade-s5": lambda: _spade(ssm_type="s5"),
    "spade-hyena": lambda: _spade(ssm_type="hyena"),
    "spade-chunk": lambda: _spade(attention_type="chunk"),
}


def build_model(name: str) -> Any:
    """Build one of `MODELS` with random weights."""
    import transformers

    torch.manual_seed(0)
    options = {"attn_implementation": "sdpa"} if name == "llama-sdpa" else {}
    return transformers.AutoModelForCausalLM.from_config(MODELS[name](), **options)


def measure_training(pipe: Connection, name: str, length: int, threads: int, deadline_s: float) -> None:
    """Send the seconds of the first and of later steps at a length, and the peak memory in MiB."""
    started = time.perf_counter()
    with what_went_wrong(pipe):
        limit_memory(threads)
        model = build_model(name).train()
        tokens = torch.randint(3, VOCABULARY, (1, length))
        pipe.send(("parameters", model.num_parameters()))

        def step(count: int) -> float:
            model.zero_grad(set_to_none=True)
            start = time.perf_counter()
            model(input_ids=tokens[:, :count], labels=tokens[:, :count], use_cache=False).loss.backward()
            return time.perf_counter() - start

        step(16)
        model.zero_grad(set_to_none=True)
        idle = forget_peak()
        first = step(length)
        pipe.send(("first_step_s", first))
        pipe.send(("peak_mib", memory("VmHWM") - idle))
        for _ in range(2):
            if time.perf_counter() - started + first > deadline_s:
                break
            pipe.send(("step_s", step(length)))


def measure_decoding(pipe: Connection, name: str, length: int, threads: int, deadline_s: float) -> None:
    """Send the seconds of single tokens after a prompt of a length, and the cache's size in MiB."""
    with what_went_wrong(pipe):
        limit_memory(threads)
        model = build_model(name).eval()
        token, cache = decoding(model, length)
        token()  # the first one allocates
        start = time.perf_counter()
        for _ in range(DECODED - 1):
            token()
        pipe.send(("token_s", (time.perf_counter() - start) / (DECODED - 1)))
        pipe.send(("cache_mib", held_mib(cache)))


def run(arguments: argparse.Namespace) -> list[Row]:
    """Measure every cell, rewriting the CSV after each round, and return its rows."""
    common = stamp() | {"threads": str(arguments.threads)}
    cells = [(model, length) for length in arguments.lengths for model in arguments.models]
    found: dict[tuple[str, int], list[tuple[str, Any]]] = {cell: [] for cell in cells}
    rows: list[Row] = []
    for number in range(arguments.rounds):
        for cell in cells:
            if any(kind == "outcome" and value != "ok" for kind, value in found[cell]):
                continue
            for target in (measure_training, measure_decoding):
                limit = arguments.time_limit
                found[cell] += in_process(target, (*cell, arguments.threads, limit), limit)
            row = describe(cell, found[cell])
            print(number + 1, *(row.get(name, "-") for name in ("model", "length", *MEASURES, "outcome")), flush=True)
        rows = [common | describe(cell, found[cell]) for cell in cells]
        write_csv(arguments.out, COLUMNS, rows)
    return rows


def describe(cell: tuple[str, int], found: Sequence[tuple[str, Any]]) -> Row:
    """Turn the messages of a cell's processes into its columns: medians, and the largest peak."""
    row = {"model": cell[0], "length": str(cell[1])}
    bad = [str(value) for kind, value in found if kind == "outcome" and value != "ok"]
    for name in ("parameters", *MEASURES):
        values = [float(value) for kind, value in found if kind == name]
        if values:
            value = max(values) if name == "peak_mib" else statistics.median(values)
            row[name] = f"{value:.0f}" if name in ("parameters", "peak_mib") else f"{value:.5g}"
    return row | {"outcome": bad[0] if bad else "ok"}


def _first_over_later(row: Row) -> Row:
    if not row.get("first_step_s") or not row.get("step_s"):
        return {}
    return {"first_over_later": str(float(row["first_step_s"]) / float(row["step_s"]))}


def report(rows: list[Row]) -> str:
    """Return the tables of a CSV's rows as Markdown."""
    first = rows[0]
    parts = [
        f"{conditions(first)}. {LAYERS} layers, width {WIDTH}, "
        f'{HEADS} heads, feed-forward {INNER} ("base": 12, 1024, 8, 4096), windows of {WINDOW}, '
        f"vocabulary {VOCABULARY}, batch 1, fp32, random weights."
    ]
    lengths = sorted({int(row["length"]) for row in rows})
    cells = {(row["model"], int(row["length"])): row | _first_over_later(row) for row in rows}
    models = list(dict.fromkeys(row["model"] for row in rows))
    columns = ["model", *map(str, lengths)]
    sizes = ", ".join(f"{model} {int(cells[model, lengths[0]]['parameters']):,}" for model in models)
    parts.append(f"Parameters: {sizes}.")

    def lines(name: str, shape: Callable[[int, float], str]) -> list[list[str]]:
        def cell(model: str, length: int) -> str:
            row = cells.get((model, length), {})
            return shape(length, float(row[name])) if row.get(name) else row.get("outcome", "-").split(":")[0]

        return [[model, *(cell(model, length) for length in lengths)] for model in models]

    def growing(title: str, name: str, shape: Callable[[int, float], str]) -> list[str]:
        table = lines(name, shape)
        for line in table:
            points = [(s, float(cells[line[0], s][name])) for s in lengths if cells.get((line[0], s), {}).get(name)]
            line.append(exponent(points))
        return [f"**{title}**", markdown_table([*columns, "exponent 2k-16k (points)"], table)]

    parts += growing("training: thousand tokens per second", "step_s", lambda s, value: f"{s / value / 1000:.2f}")
    parts += growing("training: peak memory over the idle process, MiB", "peak_mib", lambda _, value: f"{value:.0f}")
    parts += [
        "**training: first step at a length over later ones**",
        markdown_table(columns, lines("first_over_later", lambda _, value: f"{value:.2f}")),
    ]
    title = "decoding: milliseconds per token after a prompt of that length"
    parts += growing(title, "token_s", lambda _, value: f"{1e3 * value:.1f}")
    parts += growing("decoding: MiB held by the cache", "cache_mib", lambda _, value: f"{value:.2f}")
    return "\n\n".join(parts)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this benchmark's arguments."""
    small = tuple(name for name in MODELS if "base" not in name)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=small, metavar="NAME")
    parser.add_argument("--lengths", nargs="+", type=int, default=LENGTHS, metavar="TOKENS")
    parser.add_argument("--rounds", type=int, default=3, help="measurements of each cell, two processes each")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--time-limit", type=float, default=120.0, metavar="SECONDS", help="for one process")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark, or print the tables of an earlier run."""
    return command_line(__doc__, DEFAULT_OUT, add_arguments, run, report, argv)


if __name__ == "__main__":
    sys.exit(main())
