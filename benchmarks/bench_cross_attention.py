"""Compare SRformer's cross-attention with full cross-attention on the CPU: operations, time, training memory.

Run it from the repository root::

    python -m benchmarks.bench_cross_attention
    python -m benchmarks.bench_cross_attention --out benchmarks/results/cross_attention_cpu.csv      # the kept record
    python -m benchmarks.bench_cross_attention --report benchmarks/results/cross_attention_cpu.csv   # its tables

T5-small's layer: width 512, 8 heads of 64, segments of 64, fp32. "full" is transformers' T5Attention with SDPA and
without dropout, for which SDPA would store the scores. Each measurement runs in its own process, and the modes
alternate at each length; `benchmarks.bench_models` describes how peak memory is measured. Each row is written when it
is measured, and the same command goes on where it was stopped. The measurements:

- decoding: one layer's cross-attention for one more token of eight documents, with the projections of query and
  output and with cached keys, values and states. The target advances token by token, so SRformer reads one segment
  after another. "preparation" is the work before the first token, including the projections of keys and values.
- training: forward and backward of one layer's cross-attention from given queries, keys and values, without
  projections, for one document; targets of 512 tokens. Bytes kept for the backward are counted storage by storage,
  without parameters and without these inputs, and divided by the document's tokens.
- a training step: peak memory of complete BART models, two layers of that width on each side, 128 target tokens.

The counts of multiply-adds and bytes follow the equations, for one layer and document in 4-byte numbers, forward only;
see `count`.
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

from benchmarks.bench_models import forget_peak, in_process, limit_memory, memory, what_went_wrong
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
from benchmarks.workloads import Stored

WIDTH, HEADS, HEAD_DIM, SEGMENT = 512, 8, 64, 64
DECODED, BATCH = 128, 8  # tokens of a decoded target, documents
TRAINED = 512  # tokens of a target in training
STEP_TARGET, STEP_LAYERS, VOCABULARY = 128, 2, 1024
LENGTHS = (1024, 2048, 4096, 8192, 16384)
STEP_LENGTHS = (4096, 16384)
MODES = ("full", "segmented", "sr")
DEFAULT_OUT = Path("runs/bench/cross_attention_cpu.csv")
# fmt: off
COUNTED = ("training_multiply_adds", "training_bytes", "decoding_multiply_adds", "decoding_bytes")
MEASURES = ("token_s", "preparation_s", "training_s", "training_peak_mib", "kept_bytes", "step_s", "step_peak_mib")
# fmt: on
COLUMNS = growing_columns(("mode", "length", ROUND), (*COUNTED, *MEASURES))


def count(mode: str, target: int, length: int) -> dict[str, float]:
    """Count multiply-adds and bytes of one layer's cross-attention, for one document and all heads.

    With q target and k source tokens, head width d, segments of s, m of them visited (all, or as many as the target
    has tokens), without projections, which all modes share:

    - full: q k d for scores and as much for the output; K and V (2 k d), read once per target in training and once
      per token in decoding; queries and outputs, 2 q d.
    - segmented: 2 q s d; in training K and V of the visited segments, in decoding 2 s d per token.
    - sr: segmented, and K^T V (k d²), the K_i^T V_i of the visited segments (part of it, and m s d² more only if some
      segments are not visited), the RAF neurons' linear map m d³, norm(K) k d, and q d² for Q R.
      Bytes: K and V once, P and R of each visited segment written and read (4 m d²), in decoding one R per token.

    A decoded token includes its share of the work per document (K^T V, the states, the norm).
    """
    q, k, d, s = target, length, HEAD_DIM, SEGMENT
    segments = -(-k // s)
    visited = min(segments, q)
    if mode == "full":
        multiply_adds, once = 2 * q * k * d, 0
        numbers, numbers_per_token, numbers_once = 2 * k * d + 2 * q * d, 2 * k * d + 2 * d, 0
    else:
        multiply_adds, once = 2 * q * s * d, 0
        numbers, numbers_per_token, numbers_once = 2 * visited * s * d + 2 * q * d, 2 * s * d + 2 * d, 0
    if mode == "sr":
        again = 0 if visited == segments else visited * s * d * d
        once = k * d * d + again + visited * d**3 + k * d
        multiply_adds += once + q * d * d
        numbers_once = 2 * k * d + 4 * visited * d * d
        numbers = numbers_once + 2 * q * d
        numbers_per_token += d * d
    per_token = (multiply_adds - once) / q + once / q
    values = (multiply_adds, 4 * numbers, per_token, 4 * (numbers_per_token + numbers_once / q))
    return {name: HEADS * value for name, value in zip(COUNTED, values, strict=True)}


def counted(mode: str, length: int) -> dict[str, float]:
    """Count for targets of `DECODED` tokens."""
    return count(mode, DECODED, length)


# ---- measurements ----


def build_decoder(mode: str, horizon: int) -> Any:
    """Build a one-layer decoder with random weights, without dropout."""
    from transformers import T5Config, T5ForConditionalGeneration

    from hf_hybrid import SRformerT5Config, SRformerT5ForConditionalGeneration

    torch.manual_seed(0)
    shape: dict[str, Any] = {"d_model": WIDTH, "d_kv": HEAD_DIM, "num_heads": HEADS, "d_ff": 4 * WIDTH}
    shape |= {"num_layers": 1, "dropout_rate": 0.0, "vocab_size": VOCABULARY, "attn_implementation": "sdpa"}
    if mode == "full":
        return T5ForConditionalGeneration(T5Config(**shape)).decoder
    shape |= {"segment_size": SEGMENT, "horizon_mode": "fixed", "decoder_horizon": horizon}
    return SRformerT5ForConditionalGeneration(SRformerT5Config(cross_attention_mode=mode, **shape)).decoder


@torch.no_grad()
def measure_decoding(pipe: Connection, mode: str, length: int, threads: int) -> None:
    """Send the seconds of a layer's cross-attention for single tokens, and of the preparation."""
    from hf_hybrid.models.srformer.segments import Reading

    with what_went_wrong(pipe):
        limit_memory(threads)
        decoder = build_decoder(mode, DECODED).eval()
        attention = decoder.block[0].layer[1].EncDecAttention
        source = torch.randn(BATCH, length, WIDTH)
        tokens = torch.full((BATCH, 1), 3)
        for _ in range(2):  # the first one allocates
            start = time.perf_counter()
            cache = decoder(input_ids=tokens, encoder_hidden_states=source, use_cache=True).past_key_values
            took = time.perf_counter() - start
        pipe.send(("preparation_s", took))
        hidden = torch.randn(BATCH, 1, WIDTH)
        for position in range(1, DECODED):
            start = time.perf_counter()
            more = {}
            if mode != "full":
                kept = cache.cross_attention_cache
                documents = kept.documents
                more["reading"] = Reading(
                    kept.segments,
                    1,
                    past=position,
                    batch=BATCH,
                    heads=HEADS,
                    documents=documents,
                    device=hidden.device,
                )
            attention(hidden, key_value_states=source, past_key_values=cache, **more)
            if position > 8:
                pipe.send(("token_s", time.perf_counter() - start))


def measure_training(pipe: Connection, mode: str, length: int, threads: int) -> None:
    """Send the seconds of a layer's cross-attention, forward and backward, its peak memory in MiB, and bytes kept."""
    from hf_hybrid.models.srformer.segments import Reading, cut

    with what_went_wrong(pipe):
        limit_memory(threads)
        decoder = build_decoder(mode, TRAINED).train()
        attention = decoder.block[0].layer[1].EncDecAttention
        for name in ("q", "k", "v", "o"):
            setattr(attention, name, torch.nn.Identity())
        hidden = torch.randn(1, TRAINED, WIDTH, requires_grad=True)
        source = torch.randn(1, length, WIDTH, requires_grad=True)
        grad = torch.randn(1, TRAINED, WIDTH)

        def attend(count: int) -> torch.Tensor:
            more, read = {}, source[:, :count]
            if mode != "full":
                segments, read = cut(attention.config, read, None, TRAINED)
                more["reading"] = Reading(
                    segments, TRAINED, past=0, batch=1, heads=HEADS, documents=None, device=read.device
                )
            return attention(hidden, key_value_states=read, **more)[0]

        def step(count: int) -> float:
            hidden.grad = source.grad = None
            start = time.perf_counter()
            attend(count).backward(grad)
            return time.perf_counter() - start

        step(64)
        idle = forget_peak()
        step(length)
        pipe.send(("training_peak_mib", memory("VmHWM") - idle))
        for _ in range(5):
            pipe.send(("training_s", step(length)))
        with Stored(hidden, source, *attention.parameters()) as stored:
            attend(length)
        pipe.send(("kept_bytes", stored.bytes / length))


def measure_step(pipe: Connection, mode: str, length: int, threads: int) -> None:
    """Send the seconds and the peak memory in MiB of a complete model's training step."""
    from transformers import BartConfig, BartForConditionalGeneration

    from hf_hybrid import SRformerBartConfig, SRformerBartForConditionalGeneration

    with what_went_wrong(pipe):
        limit_memory(threads)
        torch.manual_seed(0)
        shape: dict[str, Any] = {"d_model": WIDTH, "vocab_size": VOCABULARY, "max_position_embeddings": length}
        shape |= {"attn_implementation": "sdpa"}
        for side in ("encoder", "decoder"):
            shape |= {f"{side}_layers": STEP_LAYERS, f"{side}_attention_heads": HEADS, f"{side}_ffn_dim": 4 * WIDTH}
        if mode == "full":
            model = BartForConditionalGeneration(BartConfig(**shape)).train()
        else:
            config = SRformerBartConfig(cross_attention_mode=mode, segment_size=SEGMENT, **shape)
            model = SRformerBartForConditionalGeneration(config).train()
        source = torch.randint(3, VOCABULARY, (1, length))
        labels = torch.randint(3, VOCABULARY, (1, STEP_TARGET))

        def step(count: int) -> float:
            model.zero_grad(set_to_none=True)
            start = time.perf_counter()
            model(input_ids=source[:, :count], labels=labels).loss.backward()
            return time.perf_counter() - start

        step(64)
        model.zero_grad(set_to_none=True)
        idle = forget_peak()
        step(length)
        pipe.send(("step_peak_mib", memory("VmHWM") - idle))
        pipe.send(("step_s", step(length)))


def run(arguments: argparse.Namespace) -> list[Row]:
    """Measure every cell in each round, as far as the file does not have it, and return all rows."""
    cells = [{"mode": mode, "length": str(length)} for length in arguments.lengths for mode in MODES]

    def measure(cell: Row, number: int) -> Row:
        mode, length = cell["mode"], int(cell["length"])
        targets: list[Callable[..., None]] = [measure_decoding, measure_training]
        if length in STEP_LENGTHS:
            targets.append(measure_step)
        sent: list[tuple[str, Any]] = []
        for target in targets:
            sent += in_process(target, (mode, length, arguments.threads), arguments.time_limit)
        return describe(mode, length, sent)

    return fill_rounds(arguments, COLUMNS, ("mode", "length", *MEASURES, "outcome"), cells, measure)


def describe(mode: str, length: int, found: Sequence[tuple[str, Any]]) -> Row:
    """Turn the messages of a cell's processes into its columns: medians, and the largest peak."""
    bad = [str(value) for kind, value in found if kind == "outcome" and value != "ok"]
    row = {name: f"{value:.0f}" for name, value in counted(mode, length).items()}
    for name in MEASURES:
        values = [float(value) for kind, value in found if kind == name]
        if values:
            whole = name.endswith("mib") or name == "kept_bytes"
            row[name] = f"{max(values):.0f}" if whole else f"{statistics.median(values):.5g}"
    return row | {"outcome": bad[0] if bad else "ok"}


# ---- the tables ----


def report(rows: list[Row]) -> str:
    """Return the tables of a CSV's rows as Markdown."""
    rows = of_rounds(rows)
    first = rows[0]
    parts = [f"{conditions(first)}. Width {WIDTH}, {HEADS} heads, segments of {SEGMENT}, fp32."]
    cells = {(row["mode"], int(row["length"])): row for row in rows}
    lengths = sorted({length for _, length in cells})

    def table(title: str, name: str, digits: int, unit: float = 1) -> None:
        shown = [length for length in lengths if any(cells[mode, length].get(name) for mode in MODES)]
        lines = []
        for mode in MODES:
            values = {length: float(value) for length in shown if (value := cells[mode, length].get(name))}
            line = [f"{values[s] / unit:.{digits}f}" if s in values else cells[mode, s]["outcome"] for s in shown]
            lines.append([mode, *line, exponent(list(values.items()))])
        pairs = [(cells["full", length].get(name), cells["sr", length].get(name)) for length in shown]
        ratios = (f"{float(a) / float(b):.2f}" if a and b and float(b) else "-" for a, b in pairs)
        lines.append(["full / sr", *ratios, ""])
        parts.extend([f"**{title}**", markdown_table(["mode", *map(str, shown), "exponent 2k-16k (points)"], lines)])

    table(f"counted, {DECODED} tokens at once: million multiply-adds", "training_multiply_adds", 2, 1e6)
    table(f"counted, {DECODED} tokens at once: KiB moved", "training_bytes", 0, 1024)
    table(f"counted, each of {DECODED} decoded tokens: million multiply-adds", "decoding_multiply_adds", 2, 1e6)
    table(f"counted, each of {DECODED} decoded tokens: KiB moved", "decoding_bytes", 0, 1024)
    table(f"decoding: milliseconds per token of {BATCH} documents", "token_s", 2, 1e-3)
    table("decoding: milliseconds of preparation", "preparation_s", 0, 1e-3)
    table(f"training: milliseconds forward and backward, {TRAINED} target tokens", "training_s", 1, 1e-3)
    table("training: peak memory of it, MiB", "training_peak_mib", 0)
    if any(row.get("kept_bytes") for row in rows):
        table("training: bytes per token of the document kept for the backward", "kept_bytes", 0)
    table("a whole model's training step: seconds", "step_s", 2)
    table("a whole model's training step: peak memory, MiB", "step_peak_mib", 0)
    return "\n\n".join(parts)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this benchmark's arguments."""
    parser.add_argument("--lengths", nargs="+", type=int, default=LENGTHS, metavar="TOKENS")
    parser.add_argument("--rounds", type=int, default=3, help="measurements of each cell")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--time-limit", type=float, default=120.0, metavar="SECONDS", help="for one process")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark, or print the tables of an earlier run."""
    return command_line(__doc__, DEFAULT_OUT, add_arguments, run, report, argv)


if __name__ == "__main__":
    sys.exit(main())
