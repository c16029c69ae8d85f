"""Measure what the loss of a large vocabulary takes on the CPU: with the logits of all tokens, and in chunks.

Run it from the repository root::

    python -m benchmarks.bench_loss --out benchmarks/results/loss_cpu.csv     # the kept record
    python -m benchmarks.bench_loss --report benchmarks/results/loss_cpu.csv  # its tables
    python -m benchmarks.bench_loss --vocabularies 267744 --lengths 16384 --losses chunked --rounds 1 --memory-only

A cell is a causal language model of two layers with tied embeddings, a vocabulary, a number of tokens and a loss:
"plain", whose output has logits, or "chunked" (`skip_logits=True`). It takes training steps with AdamW, each cell in a
process of its own; `benchmarks.bench_models` describes how memory is measured and limited. A cell yields:

- the peak memory of two steps over what the process holds before it builds the model: with weights, gradients and the
  optimizer's states;
- the seconds of the second step, unless `--memory-only`.

The exit status is 1 if the loss in chunks takes more than 4 GiB at a vocabulary of 267,744 and 16,384 tokens, or does
not end.

Each row is written when it is measured, and the same command goes on where it was stopped.
"""

import argparse
import itertools
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
    fill_rounds,
    growing_columns,
    markdown_table,
    of_rounds,
)

DEFAULT_OUT = Path("runs/bench/loss_cpu.csv")
LAYERS, HEADS = 2, 4
LOSSES, PRECISIONS = ("plain", "chunked"), ("fp32", "bf16")
VOCABULARIES, LENGTHS = (32768, 267744), (4096, 16384)
KEYS = ("model", "width", "precision", "vocabulary", "length", "loss")
ARGUMENTS = ("models", "widths", "precisions", "vocabularies", "lengths", "losses")
MEASURES = ("peak_mib", "step_s")
COLUMNS = growing_columns((*KEYS, ROUND), MEASURES)
AIM = {"vocabulary": "267744", "length": "16384", "loss": "chunked"}
MOST_MIB = 4096


def _spade(**fields: object) -> Any:
    from hf_hybrid import SpadeConfig

    return SpadeConfig(
        is_decoder=True, is_encoder_decoder=False, num_attention_heads=HEADS, local_radius=127, **fields
    )


def _chela(**fields: object) -> Any:
    from hf_hybrid import ChelaConfig

    return ChelaConfig(is_decoder=True, num_attention_heads=HEADS, **fields)


def _bst(**fields: object) -> Any:
    from hf_hybrid import BstConfig

    return BstConfig(num_attention_heads=HEADS, window=128, bst_layers=[1], **fields)


MODELS: dict[str, Callable[..., Any]] = {"spade": _spade, "chela": _chela, "bst": _bst}


def measure(
    pipe: Connection, name: str, width: int, precision: str, vocabulary: int, length: int, loss: str, threads: int,
    memory_only: bool,
) -> None:  # fmt: skip
    """Send the peak memory in MiB of two training steps, and the seconds of the second one."""
    with what_went_wrong(pipe):
        limit_memory(threads)
        import transformers

        idle = forget_peak()
        torch.manual_seed(0)
        shape = {"hidden_size": width, "num_hidden_layers": LAYERS, "intermediate_size": 2 * width}
        model = transformers.AutoModelForCausalLM.from_config(MODELS[name](vocab_size=vocabulary, **shape)).train()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        tokens = torch.randint(3, vocabulary, (1, length))

        def step() -> float:
            start = time.perf_counter()
            with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
                outputs = model(input_ids=tokens, labels=tokens, use_cache=False, skip_logits=loss == "chunked")
            outputs.loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return time.perf_counter() - start

        step()
        seconds = step()  # its backward has the optimizer's states beside it
        pipe.send(("peak_mib", memory("VmHWM") - idle))
        if not memory_only:
            pipe.send(("step_s", seconds))


def run(arguments: argparse.Namespace) -> list[Row]:
    """Measure every cell in each round, as far as the file does not have it, and return all rows."""
    given = vars(arguments)
    values = itertools.product(*(given[name] for name in ARGUMENTS))
    cells = [dict(zip(KEYS, map(str, cell), strict=True)) for cell in values]

    def measured(cell: Row, number: int) -> Row:
        asked = (cell["model"], int(cell["width"]), cell["precision"], int(cell["vocabulary"]), int(cell["length"]))
        sizes = (*asked, cell["loss"], arguments.threads, arguments.memory_only)
        return describe(in_process(measure, sizes, arguments.time_limit))

    return fill_rounds(arguments, COLUMNS, (*KEYS, *MEASURES, "outcome"), cells, measured)


def describe(sent: Sequence[tuple[str, Any]]) -> Row:
    """Turn the messages of a cell's process into its columns."""
    found = dict(sent)
    row = {name: f"{float(found[name]):{'.5g' if name == 'step_s' else '.0f'}}" for name in MEASURES if name in found}
    return row | {"outcome": str(found["outcome"])}


def report(rows: list[Row]) -> str:
    """Return a table of each measure: vocabularies down, lengths and losses across."""
    rows = of_rounds(rows)
    first = rows[0]
    parts = [f"{conditions(first)}. {LAYERS} layers."]
    cells = {tuple(row[name] for name in KEYS): row for row in rows}
    *others, vocabularies, lengths, losses = (list(dict.fromkeys(row[name] for row in rows)) for name in KEYS)
    measured = [name for name in MEASURES if any(row.get(name) for row in rows)]
    for model, width, precision in itertools.product(*others):
        for name in measured:
            title = {"peak_mib": "peak memory, MiB", "step_s": "seconds of a step"}[name]
            across = list(itertools.product(lengths, losses))
            table = [["vocabulary", *(f"{length}, {loss}" for length, loss in across)]]
            for vocabulary in vocabularies:
                line = (cells.get((model, width, precision, vocabulary, *key), {}) for key in across)
                table.append([vocabulary, *(row.get(name) or row.get("outcome", "-").split(":")[0] for row in line)])
            parts += [f"**{model}, width {width}, {precision}: {title}**", markdown_table(table[0], table[1:])]
    return "\n\n".join(parts)


def above_aim(rows: list[Row]) -> list[str]:
    """Say which cells of `AIM` take more than `MOST_MIB`, or did not end."""
    aimed = [row for row in of_rounds(rows) if all(row[name] == value for name, value in AIM.items())]
    said = []
    for row in aimed:
        cell = f"{row['model']}, width {row['width']}, {row['precision']}"
        if row["outcome"] != "ok":
            said.append(f"{cell}: {row['outcome']}")
        elif row["peak_mib"] and float(row["peak_mib"]) > MOST_MIB:
            said.append(f"{cell}: {row['peak_mib']} MiB, more than {MOST_MIB}")
    return said


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this benchmark's arguments."""
    parser.add_argument("--models", nargs="+", choices=MODELS, default=["spade"])
    parser.add_argument("--widths", nargs="+", type=int, default=[256])
    parser.add_argument("--precisions", nargs="+", choices=PRECISIONS, default=PRECISIONS)
    parser.add_argument("--vocabularies", nargs="+", type=int, default=VOCABULARIES)
    parser.add_argument("--lengths", nargs="+", type=int, default=LENGTHS, metavar="TOKENS")
    parser.add_argument("--losses", nargs="+", choices=LOSSES, default=LOSSES)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--memory-only", action="store_true", help="do not report the time of a step")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--time-limit", type=float, default=600.0, metavar="SECONDS", help="for one process")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark, or print the tables of an earlier run."""
    return command_line(__doc__, DEFAULT_OUT, add_arguments, run, report, argv, above_aim)


if __name__ == "__main__":
    sys.exit(main())
