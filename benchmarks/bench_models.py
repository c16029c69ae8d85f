"""Compare a training step of the models with peers of the same size on the CPU: speed, memory, distance to the floor.

Run it from the repository root::

    python -m benchmarks.bench_models                                  # everything, about forty minutes on two cores
    python -m benchmarks.bench_models --models spade led --lengths 1024 --rounds 1
    python -m benchmarks.bench_models --out benchmarks/results/models_cpu.csv      # the kept record
    python -m benchmarks.bench_models --report benchmarks/results/models_cpu.csv   # its tables, as Markdown

A cell is one model at one source length and precision. Each measurement runs in its own process: it builds the model
with random weights, takes one training step to warm up (forward and backward, no optimizer) and times further ones.
The models alternate at each length, round after round, so that disturbances affect all of them. A cell that exceeds
its time or 8 GiB becomes a row that says so, and is not repeated. Each row is written when it is measured, and the
same command goes on where it was stopped; remove the file to measure everything again.

Peak memory is the process's peak resident set (VmHWM) minus the resident set after building the model and one step on
a few tokens: activations, gradients and temporaries, without weights and libraries.

The floor is the time of the step's floating-point operations, as `benchmarks.floors` counts them, at the fastest rate
of large matrix products in the same process and precision, before and after the steps; the fraction of it is the
median over the rounds.
"""

import argparse
import ctypes
import gc
import itertools
import math
import multiprocessing
import os
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from benchmarks import floors
from benchmarks.aims import aims
from benchmarks.record import (
    ROUND,
    Row,
    command_line,
    conditions,
    exponent,
    fill_rounds,
    growing_columns,
    markdown_table,
    of_rounds,
)

WIDTH, HEADS, HEAD_DIM, INNER, LAYERS, VOCABULARY, TARGET = 256, 4, 64, 1024, 4, 1024, 64
DROPOUT = 0.1
"""Of every model, and of attention weights too: a T5 has one rate for both."""
MEMORY_LIMIT = 8 * 2**30  # bytes of private memory a cell may map
CONTAINER_LIMITS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))
RATE = "rate"
"""The kind of a cell's messages that have a rate of matrix products."""
SLOW_STEP = 5.0  # seconds; above it a process times one step instead of two
MATMULS = ((4096, 256, 1024), (4096, 1024, 256))  # the feed-forward network's, at 4k tokens

_PEERS = ("longt5", "pegasus_x", "led", "bigbird_pegasus", "t5")
PRELOADED = [f"transformers.models.{name}.modeling_{name}" for name in _PEERS]

DEFAULT_OUT = Path("runs/bench/models_cpu.csv")
LENGTHS = (1024, 2048, 4096, 8192, 16384)
PRECISIONS = {"fp32": torch.float32, "bf16": torch.bfloat16}
FLOOR = ("flops", "matmul_gflop_per_s", "floor_tokens_per_s", "fraction_of_floor")
COLUMNS = growing_columns(
    ("model", "precision", "length", ROUND),
    ("dropout", "repeats", "median_s", "min_s", "max_s", "tokens_per_s", "peak_mib", *FLOOR),
)


# --- the models


def t5_fields() -> dict[str, Any]:
    """Return the fields of a T5 of the common width and depth."""
    shape: dict[str, Any] = {"d_model": WIDTH, "d_kv": HEAD_DIM, "d_ff": INNER, "num_layers": LAYERS}
    shape |= {"num_heads": HEADS, "dropout_rate": DROPOUT}
    return shape | {"vocab_size": VOCABULARY, "decoder_start_token_id": 0}


def bart_fields() -> dict[str, Any]:
    """Return the fields of a BART of the common width and depth."""
    shape: dict[str, Any] = {"d_model": WIDTH, "vocab_size": VOCABULARY, "dropout": DROPOUT}
    for side in ("encoder", "decoder"):
        shape |= {f"{side}_layers": LAYERS, f"{side}_ffn_dim": INNER, f"{side}_attention_heads": HEADS}
    return shape


def _t5_shape(model_type: str, **fields: object) -> Any:
    return _config(model_type, **t5_fields(), **fields)


def _bart_shape(model_type: str, **fields: object) -> Any:
    return _config(model_type, **bart_fields(), **fields)


def _spade(**fields: object) -> Any:
    import hf_hybrid  # noqa: F401 - registers the architecture

    shape = {"hidden_size": WIDTH, "num_hidden_layers": LAYERS, "num_decoder_layers": LAYERS}
    heads = {"num_attention_heads": HEADS, "head_dim": HEAD_DIM, "intermediate_size": INNER}
    dropout = {"dropout": DROPOUT, "attention_dropout": DROPOUT}
    return _config("spade", **shape, **heads, **dropout, **fields)


def _config(model_type: str, **fields: object) -> Any:
    import transformers

    return transformers.AutoConfig.for_model(model_type, **{"vocab_size": VOCABULARY, **fields})


MODELS: dict[str, Callable[[], Any]] = {
    "longt5-local": lambda: _t5_shape("longt5", encoder_attention_type="local"),
    "longt5-tglobal": lambda: _t5_shape("longt5", encoder_attention_type="transient-global"),
    "pegasus-x": lambda: _bart_shape("pegasus_x"),
    "led": lambda: _bart_shape("led"),
    "bigbird": lambda: _bart_shape("bigbird_pegasus", max_position_embeddings=max(LENGTHS)),
    "t5-sdpa": lambda: _t5_shape("t5"),
    "t5-eager": lambda: _t5_shape("t5"),
    "spade": _spade,
    "spade-window": lambda: _spade(global_layers=[]),
    "spade-chunk": lambda: _spade(attention_type="chunk"),
}
DEFAULT_MODELS = tuple(name for name in MODELS if name not in ("t5-eager", "spade-chunk"))
OWN = ("spade", "spade-window", "spade-chunk")


def build_model(name: str) -> torch.nn.Module:
    """Build one of `MODELS` with random weights, in training mode."""
    import transformers

    torch.manual_seed(0)
    attention = {"t5-sdpa": "sdpa", "t5-eager": "eager"}.get(name)
    arguments = {"attn_implementation": attention} if attention else {}
    model = transformers.AutoModelForSeq2SeqLM.from_config(MODELS[name](), **arguments)
    if attention and model.config._attn_implementation != attention:
        raise ValueError(f"{name} runs with {model.config._attn_implementation} attention")
    return model.train()


# --- the floor


def count_flops(name: str, length: int) -> float:
    """Count the floating-point operations of a model's training step on `length` source tokens, batch size 1."""
    return floors.of_encoder_decoder(MODELS[name](), length, TARGET).total


def measure_matmul(precision: str) -> float:
    """Return the fastest rate, in operations per second, at which this process multiplies the `MATMULS`."""
    best = 0.0
    for m, k, n in MATMULS:
        a, b = torch.randn(m, k).to(PRECISIONS[precision]), torch.randn(k, n).to(PRECISIONS[precision])
        for _ in range(12):
            start = time.perf_counter()
            torch.mm(a, b)
            best = max(best, 2 * m * k * n / (time.perf_counter() - start))
    return best


# --- one measurement, in its own process


def memory(field: str) -> float:
    """Return a field of /proc/self/status (VmRSS, VmHWM), in MiB; NaN where there is no such file."""
    with suppress(OSError), open("/proc/self/status", encoding="ascii") as status:
        for line in status:
            if line.startswith(field + ":"):
                return int(line.split()[1]) / 1024
    return math.nan


def forget_peak() -> float:
    """Return free memory to the system, reset the process's peak, and return the resident set in MiB."""
    gc.collect()
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")
    return memory("VmRSS")


def keep_freed_memory(heap: int) -> bool:
    """Tell glibc to keep freed memory, the next `heap` bytes of it in huge pages, and return whether it can do so."""
    trim_threshold, mmap_max, huge_page = -1, -4, 14  # M_TRIM_THRESHOLD, M_MMAP_MAX and MADV_HUGEPAGE in C
    with suppress(OSError, AttributeError):
        libc = ctypes.CDLL(None)
        libc.malloc.restype = ctypes.c_void_p
        if not (libc.mallopt(trim_threshold, -1) and libc.mallopt(mmap_max, 0)):
            return False
        if block := libc.malloc(ctypes.c_size_t(heap)):  # the heap grows, but has no pages until they are written
            skipped = -block % os.sysconf("SC_PAGE_SIZE")
            advised = libc.madvise(ctypes.c_void_p(block + skipped), ctypes.c_size_t(heap - skipped), huge_page) == 0
            libc.free(ctypes.c_void_p(block))
            return advised
    return False


def measure_cell(pipe: Connection, name: str, precision: str, length: int, threads: int, deadline_s: float) -> None:
    """Take training steps of one cell, and send what `describe` reads as it comes."""
    started = time.perf_counter()
    with what_went_wrong(pipe):
        limit_memory(threads)
        pipe.send((RATE, measure_matmul(precision)))
        model = build_model(name)
        source = torch.randint(3, VOCABULARY, (1, length))
        labels = torch.randint(3, VOCABULARY, (1, TARGET))

        def step(tokens: int) -> float:
            model.zero_grad(set_to_none=True)
            start = time.perf_counter()
            with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
                mask = torch.ones(1, tokens, dtype=torch.long)
                # with a cache, T5's decoders would copy keys and values of the whole source into it
                loss = model(input_ids=source[:, :tokens], attention_mask=mask, labels=labels, use_cache=False).loss
            loss.backward()
            return time.perf_counter() - start

        step(16)
        if name == "bigbird":  # so few tokens have made its attention full, for good
            model.get_encoder().set_attention_type("block_sparse")
        model.zero_grad(set_to_none=True)
        idle = forget_peak()
        warm_up = step(length)
        timed = 0
        while timed < (1 if warm_up > SLOW_STEP else 2):
            if time.perf_counter() - started + warm_up > deadline_s:
                break
            pipe.send(("step", step(length)))
            timed += 1
        if not timed:
            raise TimeoutError
        pipe.send(("peak", memory("VmHWM") - idle))
        pipe.send((RATE, measure_matmul(precision)))


def limit_memory(threads: int, limit: int = MEMORY_LIMIT) -> None:
    """Limit this process to a number of threads, and of bytes of private memory."""
    torch.set_num_threads(threads)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))


def most_memory() -> int:
    """Return the bytes of two thirds of the memory of the machine, or of the container that this runs in."""
    memories = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for path in CONTAINER_LIMITS:
        with suppress(OSError, ValueError):  # there is no such file, or it says "max"
            memories.append(int(path.read_text(encoding="ascii")))
    return min(memories) * 2 // 3


@contextmanager
def what_went_wrong(pipe: Connection) -> Iterator[None]:
    """Send a measurement's outcome last: "ok", "over time", "out of memory" or "failed: ..."."""
    outcome = "ok"
    try:
        yield
    except TimeoutError:
        outcome = "over time"
    except Exception as error:
        is_memory = isinstance(error, MemoryError) or (
            isinstance(error, RuntimeError) and "alloc" in str(error).lower()
        )
        line = f"{type(error).__name__}: {error}".strip().splitlines()[0][:120]
        outcome = "out of memory" if is_memory else f"failed: {line}"
    pipe.send(("outcome", outcome))


@contextmanager
def without_compiled_code() -> Iterator[None]:
    """Hide the code that earlier processes have compiled, inside the ``with`` block."""
    with (
        tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder,
        patch.dict(os.environ, TORCHINDUCTOR_CACHE_DIR=folder),
    ):
        yield


def in_process(target: Callable[..., None], arguments: tuple[Any, ...], limit_s: float) -> list[tuple[str, Any]]:
    """Run `target(pipe, *arguments)` in a fresh process with torch and transformers loaded.

    Returns:
        The process's messages, ending in its outcome: "over time" if it was killed, its exit status if it crashed.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=target, args=(theirs, *arguments))
    process.start()
    theirs.close()
    sent: list[tuple[str, Any]] = []
    end = time.monotonic() + limit_s
    while True:
        if not ours.poll(max(0.0, end - time.monotonic())):
            sent.append(("outcome", "over time"))
            break
        try:
            sent.append(ours.recv())
        except EOFError:
            break
    if process.is_alive() and sent and sent[-1] == ("outcome", "over time"):
        process.kill()
    process.join()
    if not any(kind == "outcome" for kind, _ in sent):
        sent.append(("outcome", f"failed: the process ended with {process.exitcode}"))
    return sent


# --- a run


def run(arguments: argparse.Namespace) -> list[Row]:
    """Measure every cell in each round, as far as the file does not have it, and return all rows."""
    lengths = list(map(str, arguments.lengths))
    cells = [
        {"model": name, "precision": precision, "length": length}
        for precision, length, name in itertools.product(arguments.precisions, lengths, arguments.models)
    ]

    def measure(cell: Row, number: int) -> Row:
        name, precision, length = cell["model"], cell["precision"], int(cell["length"])
        limit = arguments.time_limit
        sent = in_process(measure_cell, (name, precision, length, arguments.threads, limit), limit)
        return describe(sent, length, _count_if_built(name, length))

    shown = ("model", "precision", "length", "median_s", "peak_mib", "outcome")
    return fill_rounds(arguments, COLUMNS, shown, cells, measure)


def _count_if_built(name: str, length: int) -> float | None:
    with suppress(Exception):  # an architecture that cannot be built has no floor; its outcome says why
        return count_flops(name, length)
    return None


def describe(sent: Sequence[tuple[str, Any]], length: int, flops: float | None) -> Row:
    """Turn the messages of a cell's process into its columns; missing ones stay empty.

    Args:
        sent: The messages: ("step", seconds), ("peak", MiB), (`RATE`, operations per second) and ("outcome", text).
        length: Tokens.
        flops: Operations of a step; None where they are not counted.
    """
    seconds = [float(value) for kind, value in sent if kind == "step"]
    row = {"repeats": str(len(seconds)), "dropout": str(DROPOUT)}
    if seconds:
        median = statistics.median(seconds)
        row |= {"median_s": f"{median:.4f}", "min_s": f"{min(seconds):.4f}", "max_s": f"{max(seconds):.4f}"}
        row["tokens_per_s"] = f"{length / median:.1f}"
    if peaks := [value for kind, value in sent if kind == "peak"]:
        row["peak_mib"] = f"{max(peaks):.0f}"
    row |= against_floor(flops, seconds, length, [value for kind, value in sent if kind == RATE])
    return row | {"outcome": next(value for kind, value in reversed(sent) if kind == "outcome")}


def against_floor(flops: float | None, seconds: Sequence[float], length: int, rates: Sequence[float]) -> Row:
    """Return the columns of `FLOOR`: what steps need, and the share of it in their median time.

    Args:
        flops: Operations of a step; None where they are not counted.
        seconds: Times of the steps of one process.
        length: Tokens.
        rates: Operations per second of large matrix products in that process, of which the best counts.
    """
    if not rates:
        return {}
    rate = max(rates)
    row = {"matmul_gflop_per_s": f"{rate / 1e9:.1f}"}
    if flops is not None:
        row |= {"flops": f"{flops:.4g}", "floor_tokens_per_s": f"{length * rate / flops:.0f}"}
        if seconds:
            row["fraction_of_floor"] = f"{flops / rate / statistics.median(seconds):.3f}"
    return row


# --- the tables


def report(rows: list[Row]) -> str:
    """Return the tables of a CSV's rows as Markdown."""
    every, rows = [row for row in rows if row.get(ROUND)], of_rounds(rows)
    first = rows[0]
    parts = [
        f"{conditions(first)}. {LAYERS}+{LAYERS} layers, width "
        f"{WIDTH}, {HEADS} heads, feed-forward {INNER}, vocabulary {VOCABULARY}, {TARGET} target tokens, batch 1, "
        "random weights; forward and backward in training mode."
    ]
    if rate := first.get("dropout"):  # records without this column have the dropout of each config's defaults
        parts[0] += (
            f" Dropout of the defaults: {rate}, in SPADE and models of T5's kind also of attention weights, not in "
            "those of BART's kind (Pegasus-X, LED, BigBird)."
        )
    for precision in dict.fromkeys(row["precision"] for row in rows):
        parts += _tables_of_precision(precision, [row for row in rows if row["precision"] == precision])
    return "\n\n".join([*parts, *aims(every, ("spade",), OWN)])


def _tables_of_precision(precision: str, rows: list[Row]) -> list[str]:
    lengths = sorted({int(row["length"]) for row in rows})
    models = list(dict.fromkeys(row["model"] for row in rows))
    cells = {(row["model"], int(row["length"])): row for row in rows}
    tokens = {key: float(row["tokens_per_s"]) for key, row in cells.items() if row.get("tokens_per_s")}
    peaks = {key: float(row["peak_mib"]) for key, row in cells.items() if row.get("peak_mib")}

    def lines(column: str, shown: Callable[[float], str]) -> list[list[str]]:
        def cell(model: str, length: int) -> str:
            row = cells.get((model, length), {})
            text = shown(float(row[column])) if row.get(column) else ""
            note = "" if row.get("outcome") == "ok" else row.get("outcome", "").split(":")[0]
            return " ".join(part for part in (text, f"({note})" if text and note else note) if part) or "-"

        return [[model, *(cell(model, length) for length in lengths)] for model in models]

    columns = [str(length) for length in lengths]
    speed = lines("tokens_per_s", lambda value: f"{value / 1000:.2f}")
    for line in speed:
        line.append(exponent([(s, s / tokens[line[0], s]) for s in lengths if (line[0], s) in tokens]))
    peak_lines = lines("peak_mib", lambda value: f"{value:.0f}")
    for line in peak_lines:
        line.append(exponent([(s, peaks[line[0], s]) for s in lengths if (line[0], s) in peaks]))
    rate = statistics.median(float(row["matmul_gflop_per_s"]) for row in rows)
    parts = [
        f"**{precision}: thousand source tokens per second, median**",
        markdown_table(["model", *columns, "time exponent 2k-16k (points)"], speed),
        f"**{precision}: peak memory over the idle process, MiB**",
        markdown_table(["model", *columns, "memory exponent 2k-16k (points)"], peak_lines),
        f"**{precision}: fraction of the floor (counted operations at {rate:.0f} GFLOP/s)**",
        markdown_table(["model", *columns], lines("fraction_of_floor", lambda value: f"{value:.3f}")),
    ]
    ratios = []
    for own in (model for model in models if model in OWN):
        peers = [model for model in models if model not in OWN]
        faster = [against_peers(own, length, peers, tokens, max) for length in lengths]
        smaller = [against_peers(own, length, peers, peaks, min) for length in lengths]
        ratios += [[f"{own}, tokens/s", *faster], [f"{own}, memory", *smaller]]
    if ratios:
        parts.append(f"**{precision}: ratio to the best peer at that length**")
        parts.append(markdown_table(["", *columns], ratios))
    return parts


def against_peers(
    own: str, length: int, peers: Iterable[str], values: Mapping[tuple[str, int], float], best: Callable[..., str]
) -> str:
    """Return a model's value over that of the best peer at a length, with the peer's name.

    Args:
        own: The model.
        length: Tokens.
        peers: Models, of which those are compared that were measured.
        values: Of models and lengths.
        best: `min` or `max`.
    """
    found = {model: values[model, length] for model in peers if (model, length) in values}
    if not found or (own, length) not in values:
        return "-"
    peer = best(found, key=found.__getitem__)
    return f"{values[own, length] / found[peer]:.2f} ({peer})" if found[peer] else "-"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this benchmark's arguments."""
    parser.add_argument(
        "--models", nargs="+", choices=MODELS, default=DEFAULT_MODELS, metavar="NAME", help=", ".join(MODELS)
    )
    parser.add_argument("--lengths", nargs="+", type=int, default=LENGTHS, metavar="TOKENS", help="source lengths")
    parser.add_argument("--precisions", nargs="+", choices=PRECISIONS, default=tuple(PRECISIONS))
    parser.add_argument("--rounds", type=int, default=5, help="measurements of each cell, each in its own process")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--time-limit", type=float, default=120.0, metavar="SECONDS", help="for one process of a cell")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark, or print the tables of an earlier run."""
    return command_line(__doc__, DEFAULT_OUT, add_arguments, run, report, argv)


if __name__ == "__main__":
    sys.exit(main())
