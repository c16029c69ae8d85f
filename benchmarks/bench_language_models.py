"""Compare causal language models with peers of the same size on the CPU: training step, decoding, cache.

Run it from the repository root::

    python -m benchmarks.bench_language_models
    python -m benchmarks.bench_language_models --out benchmarks/results/language_models_cpu.csv     # the kept record
    python -m benchmarks.bench_language_models --report benchmarks/results/language_models_cpu.csv  # its tables

Models have the width 256 and four layers (Mamba's kind, which has no feed-forward networks, seven), and feed-forward
networks of such a width that all have as many parameters as Llama, within 3 %; those whose name contains "base" have
twelve layers of width 1024 (BST's preset). CHELA's kernels have 4,096 taps in 16 groups. Nothing is dropped out. The
peers are models of transformers in torch alone: Llama with full attention (SDPA), ModernBERT's decoder with windows in
all layers, Mamba, whose code in torch goes from token to token, Mamba-2, and Qwen3-Next (three layers of the gated
delta rule and one of full attention, without experts). (flash-linear-attention has no peer to add on a CPU: its layers
call Triton kernels, except Mamba and Mamba-2, whose torch code is that of transformers.)
Each measurement of a cell (a model in one precision at one length) runs in its own process, and the models alternate
at each length; `benchmarks.bench_models` describes how peak memory is measured and limited, `benchmarks.floors` what
is counted for the floor. Each row is written when it is measured, and the same command goes on where it was stopped;
remove the file to measure everything again. A cell yields:

- training: forward and backward of one sequence, "bf16" under autocast. Ours compute the loss alone (`skip_logits`),
  as the scripts do; the peers have no such thing and hold the logits. Ours have further rows "with logits". The first
  step at a length is reported apart
  from the later ones, since a frozen state space model makes and caches its kernel there. Bytes kept for the backward
  are counted storage by storage, without parameters, and divided by the tokens.
- decoding: the time per token over 256 tokens after a prompt of that length, and the bytes of the cache; for "bf16"
  the model is cast.
"""

import argparse
import itertools
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from benchmarks import floors
from benchmarks.aims import aims
from benchmarks.bench_models import (
    FLOOR,
    HEADS,
    INNER,
    LAYERS,
    PRECISIONS,
    RATE,
    VOCABULARY,
    WIDTH,
    against_floor,
    against_peers,
    forget_peak,
    in_process,
    limit_memory,
    measure_matmul,
    memory,
    what_went_wrong,
)
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
from benchmarks.workloads import Stored, decoding, held_mib, seconds

DEFAULT_OUT = Path("runs/bench/language_models_cpu.csv")
LENGTHS = (1024, 2048, 4096, 8192, 16384)
WINDOW = 512
DECODED = 256  # tokens
MEASURES = ("first_step_s", "step_s", "peak_mib", "kept_bytes", "token_s", "cache_mib")
ALONE, LOGITS = "alone", "with logits"
"""The loss of a training step: computed alone, or with the logits of all tokens."""
MAIN = ("spade", "chela", "bst-sh-s4")
"""One form of each architecture, which the aims are for."""
COLUMNS = growing_columns(("model", "precision", "length", "loss", ROUND), ("parameters", *MEASURES, *FLOOR))


def _spade(inner: int, **fields: object) -> Any:
    from hf_hybrid import SpadeConfig

    shape = {"hidden_size": WIDTH, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS}
    sizes = {"intermediate_size": inner, "local_radius": WINDOW - 1, "chunk_size": WINDOW, "vocab_size": VOCABULARY}
    return SpadeConfig(is_decoder=True, is_encoder_decoder=False, **shape, **sizes, **fields)


def _bst(inner: int, **fields: object) -> Any:
    from hf_hybrid import BstConfig

    shape = {"hidden_size": WIDTH, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS}
    layers = {"bst_layers": [1], **fields}
    return BstConfig(**shape, intermediate_size=inner, window=WINDOW, vocab_size=VOCABULARY, **layers)


def _bst_base(**fields: object) -> Any:
    from hf_hybrid import BstConfig

    return BstConfig.from_preset("base", vocab_size=VOCABULARY, **fields)


def _chela(inner: int, **fields: object) -> Any:
    from hf_hybrid import ChelaConfig

    shape = {"hidden_size": WIDTH, "num_hidden_layers": LAYERS, "intermediate_size": inner, "vocab_size": VOCABULARY}
    return ChelaConfig(is_decoder=True, long_kernel_groups=16, **shape, **fields)


def _llama() -> Any:
    from transformers import LlamaConfig

    return LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=WIDTH, num_hidden_layers=LAYERS, num_attention_heads=HEADS,
        intermediate_size=INNER * 2 // 3, max_position_embeddings=max(LENGTHS) + DECODED, tie_word_embeddings=True,
    )  # fmt: skip


def _modernbert(inner: int) -> Any:
    from transformers import ModernBertDecoderConfig

    return ModernBertDecoderConfig(
        vocab_size=VOCABULARY, hidden_size=WIDTH, num_hidden_layers=LAYERS, num_attention_heads=HEADS,
        intermediate_size=inner, max_position_embeddings=max(LENGTHS) + DECODED, local_attention=2 * WINDOW,
        layer_types=["sliding_attention"] * LAYERS, pad_token_id=0, bos_token_id=1, cls_token_id=1, eos_token_id=2,
        sep_token_id=2,
    )  # fmt: skip


def _mamba() -> Any:
    from transformers import MambaConfig

    return MambaConfig(
        vocab_size=VOCABULARY, hidden_size=WIDTH, num_hidden_layers=LAYERS + 3, tie_word_embeddings=True
    )


def _mamba2() -> Any:
    from transformers import Mamba2Config

    return Mamba2Config(
        vocab_size=VOCABULARY, hidden_size=WIDTH, num_hidden_layers=LAYERS + 3, num_heads=2 * HEADS,
        head_dim=WIDTH // HEADS, state_size=96, n_groups=1, tie_word_embeddings=True,
    )  # fmt: skip


def _qwen3_next(inner: int) -> Any:
    from transformers import Qwen3NextConfig

    return Qwen3NextConfig(
        vocab_size=VOCABULARY, hidden_size=WIDTH, num_hidden_layers=LAYERS, num_attention_heads=HEADS,
        num_key_value_heads=HEADS, head_dim=WIDTH // HEADS, intermediate_size=inner, tie_word_embeddings=True,
        mlp_only_layers=list(range(LAYERS)), num_experts=0,
        linear_num_key_heads=HEADS, linear_key_head_dim=WIDTH // HEADS, linear_num_value_heads=2 * HEADS,
        linear_value_head_dim=WIDTH // HEADS, max_position_embeddings=max(LENGTHS) + DECODED,
    )  # fmt: skip


PEERS: dict[str, Callable[[], Any]] = {
    "llama-sdpa": _llama,
    "modernbert-local": partial(_modernbert, 656),
    "mamba": _mamba,
    "mamba2": _mamba2,
    "qwen3-next": partial(_qwen3_next, 392),
}
# the first argument is the width of the feed-forward network that makes a model as large as Llama
MODELS: dict[str, Callable[[], Any]] = {
    "bst-slide": partial(_bst, 1024, bst_layers=[]),
    "bst-sh-s4": partial(_bst, 888),
    "bst-mh-s4": partial(_bst, 880, context_type="multi_head"),
    "bst-mf-s4": partial(_bst, 816, context_type="multi_filter"),
    "bst-sh-s4-state-64": partial(_bst, 864, state_size=64),
    "bst-mf-s4-state-64": partial(_bst, 600, context_type="multi_filter", state_size=64),
    "bst-sh-unstructured": partial(_bst, 880, context_filter="unstructured"),
    "bst-mf-unstructured": partial(_bst, 624, context_type="multi_filter", context_filter="unstructured"),
    "bst-base-slide": partial(_bst_base, bst_layers=[]),
    "bst-base-sh-s4": _bst_base,
    "bst-base-sh-s4-state-64": partial(_bst_base, state_size=64),
    "bst-base-mf-s4": partial(_bst_base, context_type="multi_filter"),
    **PEERS,
    "chela": partial(_chela, 1008, num_attention_heads=HEADS),
    "chela-one-head": partial(_chela, 1008, num_attention_heads=1),
    "spade": partial(_spade, 976),
    "spade-frozen-s4": partial(_spade, 976, ssm_freeze="all"),
    "spade-s5": partial(_spade, 920, ssm_type="s5"),
    "spade-hyena": partial(_spade, 848, ssm_type="hyena"),
    "spade-chunk": partial(_spade, 976, attention_type="chunk"),
}
FORMS: dict[str, Callable[[], Any]] = {
    "spade-s4d": partial(_spade, 976, ssm_type="s4d"),
    "spade-s5": MODELS["spade-s5"],
    "spade-hyena-64k": partial(_spade, 848, ssm_type="hyena", ssm_l_max=2**17),
    "spade-lstm": partial(_spade, 976, ssm_type="lstm"),
    "spade-frozen-s4": MODELS["spade-frozen-s4"],
    "chela-one-head": MODELS["chela-one-head"],
    "chela-s4d": partial(_chela, 1008, num_attention_heads=HEADS, mixer="s4d"),
    "chela-ema": partial(_chela, 1008, num_attention_heads=HEADS, mixer="ema"),
    "chela-laplace-chunks": partial(_chela, 1008, num_attention_heads=1, attention_fn="laplace", chunk_size=WINDOW),
    "bst-sh-unstructured": MODELS["bst-sh-unstructured"],
    "bst-mf-unstructured": MODELS["bst-mf-unstructured"],
    "bst-sh-s4-window-before": partial(_bst, 888, context_shift="window"),
}
"""Further forms of our language models, whose growth is measured."""


def build_model(name: str, *, dropout: bool = False) -> Any:
    """Build one of `MODELS` or `FORMS` with random weights, without dropout or with that of its defaults."""
    import transformers

    torch.manual_seed(0)
    config = {**MODELS, **FORMS}[name]()
    if not dropout:
        for field in [field for field, value in vars(config).items() if field.endswith("dropout") and value]:
            setattr(config, field, 0.0)
    options = {"attn_implementation": "sdpa"} if name == "llama-sdpa" else {}
    return transformers.AutoModelForCausalLM.from_config(config, **options)


def count_flops(name: str, length: int) -> float | None:
    """Count the floating-point operations of a model's training step, batch size 1; None where they are unknown."""
    with suppress(ValueError):
        return floors.of_language_model(MODELS[name](), length).total
    return None


def measure_training(
    pipe: Connection, name: str, precision: str, length: int, loss: str, threads: int, deadline_s: float
) -> None:
    """Send the seconds of the first and of later steps at a length, the peak memory in MiB, and the bytes kept.

    Beside these, the rate of matrix products before and after the steps.
    """
    started = time.perf_counter()
    with what_went_wrong(pipe):
        limit_memory(threads)
        pipe.send((RATE, measure_matmul(precision)))
        model = build_model(name).train()
        tokens = torch.randint(3, VOCABULARY, (1, length))
        pipe.send(("parameters", model.num_parameters()))
        options = {"use_cache": False} | ({"skip_logits": True} if loss == ALONE else {})

        def compute(count: int) -> torch.Tensor:
            with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
                return model(input_ids=tokens[:, :count], labels=tokens[:, :count], **options).loss

        def step(count: int) -> float:
            model.zero_grad(set_to_none=True)
            start = time.perf_counter()
            compute(count).backward()
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
        pipe.send((RATE, measure_matmul(precision)))
        if time.perf_counter() - started + first > deadline_s:
            return
        with Stored(*model.parameters(), *model.buffers()) as stored:
            compute(length)
        pipe.send(("kept_bytes", stored.bytes / length))


def measure_decoding(
    pipe: Connection, name: str, precision: str, length: int, threads: int, deadline_s: float
) -> None:
    """Send the seconds of single tokens after a prompt of a length, and the cache's size in MiB."""
    with what_went_wrong(pipe):
        limit_memory(threads)
        model = build_model(name).eval().to(PRECISIONS[precision])
        token, cache = decoding(model, length)
        token()  # the first one allocates
        pipe.send(("token_s", seconds(token, DECODED - 1)))
        pipe.send(("cache_mib", held_mib(cache)))


def run(arguments: argparse.Namespace) -> list[Row]:
    """Measure every cell in each round, as far as the file does not have it, and return all rows."""
    lengths = list(map(str, arguments.lengths))
    cells = [
        {"model": name, "precision": precision, "length": length, "loss": loss}
        for precision, length, name in itertools.product(arguments.precisions, lengths, arguments.models)
        for loss in ((LOGITS,) if name in PEERS else arguments.losses)
    ]

    def measure(cell: Row, number: int) -> Row:
        name, precision, length, limit = cell["model"], cell["precision"], int(cell["length"]), arguments.time_limit
        shared = (arguments.threads, limit)
        sent = in_process(measure_training, (name, precision, length, cell["loss"], *shared), limit)
        if name in PEERS or cell["loss"] == ALONE:  # the loss makes no difference to decoding
            sent += in_process(measure_decoding, (name, precision, length, *shared), limit)
        return describe(sent, length, count_flops(name, length))

    shown = ("model", "precision", "length", "loss", *MEASURES, "outcome")
    return fill_rounds(arguments, COLUMNS, shown, cells, measure)


def describe(found: Sequence[tuple[str, Any]], length: int, flops: float | None) -> Row:
    """Turn the messages of a cell's processes into its columns: medians, and the largest peak."""
    row: Row = {}
    for name in ("parameters", *MEASURES):
        values = [float(value) for kind, value in found if kind == name]
        if values:
            value = max(values) if name == "peak_mib" else statistics.median(values)
            row[name] = f"{value:.0f}" if name in ("parameters", "peak_mib", "kept_bytes") else f"{value:.5g}"
    steps, rates = ([float(value) for kind, value in found if kind == wanted] for wanted in ("step_s", RATE))
    row |= against_floor(flops, steps, length, rates)
    bad = [str(value) for kind, value in found if kind == "outcome" and value != "ok"]
    return row | {"outcome": bad[0] if bad else "ok"}


def _labelled(row: Row) -> Row:
    """Tell a model of ours that holds the logits from the same one that computes the loss alone."""
    ours_with = row["model"] not in PEERS and row["loss"] == LOGITS
    return row | ({"model": f"{row['model']}, {LOGITS}"} if ours_with else {})


def _first_over_later(row: Row) -> Row:
    if not row.get("first_step_s") or not row.get("step_s"):
        return {}
    return {"first_over_later": str(float(row["first_step_s"]) / float(row["step_s"]))}


def report(rows: list[Row]) -> str:
    """Return the tables of a CSV's rows as Markdown."""
    every, rows = [row for row in rows if row.get(ROUND)], of_rounds(rows)
    counts = {row["model"]: int(row["parameters"]) for row in reversed(rows) if row.get("parameters")}
    rows = [_labelled(row) for row in rows]
    caption = (
        f'{conditions(rows[0])}. Width {WIDTH}, {LAYERS} layers (Mamba {LAYERS + 3}; "base": 1024, 12), '
        f"{HEADS} heads, windows of {WINDOW}, vocabulary {VOCABULARY}, batch 1, random weights, no dropout; peers "
        f"with the logits of all tokens, ours with the loss alone but for rows {LOGITS!r}."
    )
    parts = [caption]
    models = list(dict.fromkeys(row["model"] for row in rows))
    parts.append(f"Parameters: {', '.join(f'{model} {counts[model]:,}' for model in models if model in counts)}.")
    for precision in dict.fromkeys(row["precision"] for row in rows):
        parts += _tables_of_precision(precision, [row for row in rows if row["precision"] == precision])
    compared = [_with_rate(row) for row in every if row["model"] in PEERS or row["loss"] == ALONE]
    return "\n\n".join([*parts, *aims(compared, MAIN, MODELS.keys() - PEERS.keys())])


def _with_rate(row: Row) -> Row:
    return row | ({"tokens_per_s": str(int(row["length"]) / float(row["step_s"]))} if row.get("step_s") else {})


def _tables_of_precision(precision: str, rows: list[Row]) -> list[str]:
    lengths = sorted({int(row["length"]) for row in rows})
    cells = {(row["model"], int(row["length"])): row | _first_over_later(row) for row in rows}
    models = list(dict.fromkeys(row["model"] for row in rows))
    columns = ["model", *map(str, lengths)]

    def lines(name: str, shape: Callable[[int, float], str]) -> list[list[str]]:
        def cell(model: str, length: int) -> str:
            row = cells.get((model, length), {})
            failed = row.get("outcome", "-").split(":")[0]
            return shape(length, float(row[name])) if row.get(name) else "-" if failed == "ok" else failed

        table = [[model, *(cell(model, length) for length in lengths)] for model in models]
        return [line for line in table if {*line[1:]} != {"-"}]

    def growing(title: str, name: str, shape: Callable[[int, float], str]) -> list[str]:
        table = lines(name, shape)
        for line in table:
            points = [(s, float(cells[line[0], s][name])) for s in lengths if cells.get((line[0], s), {}).get(name)]
            line.append(exponent(points))
        return [f"**{precision}, {title}**", markdown_table([*columns, "exponent 2k-16k (points)"], table)]

    parts = growing("training: thousand tokens per second", "step_s", lambda s, value: f"{s / value / 1000:.2f}")
    parts += growing("training: peak memory over the idle process, MiB", "peak_mib", lambda _, value: f"{value:.0f}")
    if any(row.get("kept_bytes") for row in rows):
        title = "training: thousand bytes per token kept for the backward"
        parts += growing(title, "kept_bytes", lambda _, value: f"{value / 1000:.1f}")
    if rates := [float(row["matmul_gflop_per_s"]) for row in rows if row.get("matmul_gflop_per_s")]:
        rate = f"counted operations at {statistics.median(rates):.0f} GFLOP/s"
        parts += [
            f"**{precision}, training: fraction of the floor ({rate})**",
            markdown_table(columns, lines("fraction_of_floor", lambda _, value: f"{value:.3f}")),
        ]
    if ratios := _ratios_to_peers(models, lengths, cells):
        parts += [
            f"**{precision}, training: ratio to the best peer at that length**",
            markdown_table(["", *map(str, lengths)], ratios),
        ]
    parts += [
        f"**{precision}, training: first step at a length over later ones**",
        markdown_table(columns, lines("first_over_later", lambda _, value: f"{value:.2f}")),
    ]
    title = "decoding: milliseconds per token after a prompt of that length"
    parts += growing(title, "token_s", lambda _, value: f"{1e3 * value:.1f}")
    return parts + growing("decoding: MiB held by the cache", "cache_mib", lambda _, value: f"{value:.2f}")


def _ratios_to_peers(models: list[str], lengths: list[int], cells: dict[tuple[str, int], Row]) -> list[list[str]]:
    """Return lines of speed and memory of our models over the best peer's, of those that can be compared."""
    tokens = {(name, s): s / float(row["step_s"]) for (name, s), row in cells.items() if row.get("step_s")}
    peaks = {key: float(row["peak_mib"]) for key, row in cells.items() if row.get("peak_mib")}
    lines = []
    for own in (model for model in models if model not in PEERS):
        lines.append([f"{own}, tokens/s", *(against_peers(own, s, PEERS, tokens, max) for s in lengths)])
        lines.append([f"{own}, memory", *(against_peers(own, s, PEERS, peaks, min) for s in lengths)])
    return [line for line in lines if {*line[1:]} != {"-"}]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this benchmark's arguments."""
    small = tuple(name for name in MODELS if "base" not in name)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=small, metavar="NAME")
    parser.add_argument("--lengths", nargs="+", type=int, default=LENGTHS, metavar="TOKENS")
    parser.add_argument("--precisions", nargs="+", choices=PRECISIONS, default=tuple(PRECISIONS))
    parser.add_argument("--losses", nargs="+", choices=(ALONE, LOGITS), default=(ALONE, LOGITS), help="of ours")
    parser.add_argument("--rounds", type=int, default=3, help="measurements of each cell, two processes each")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--time-limit", type=float, default=120.0, metavar="SECONDS", help="for one process")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark, or print the tables of an earlier run."""
    return command_line(__doc__, DEFAULT_OUT, add_arguments, run, report, argv)


if __name__ == "__main__":
    sys.exit(main())
