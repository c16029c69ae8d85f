"""Memory and bytes sent of a training step on one sequence over several processes.

python -m benchmarks.bench_context_parallel --processes 1 2 4 --length 65536
python -m benchmarks.bench_context_parallel --extrapolate

The first measures small models. The second computes nothing: it runs models of ordinary size on tensors without memory
as one of eight processes, the middle one, and counts what that sends and the operations of its matrix products. From
these it estimates times by the assumptions that it prints.

Processes run on the CPU, with gloo. Their times say nothing about GPUs and are not printed. `stored` is what autograd
keeps for the backward, counted storage by storage without parameters; `peak` is how far resident memory rises above
what the process held before the step; `sent` is what the process sends in forward and backward. Each number is the
largest of all processes.
"""

import argparse
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM

import hf_hybrid
from benchmarks.workloads import Stored
from hf_hybrid.context_parallel import Sent, Shards, context_parallel, count_sent, own_part

SIZES = {"hidden_size": 64, "num_hidden_layers": 2, "intermediate_size": 128, "vocab_size": 64}
MODELS = {
    "spade": {**SIZES, "num_attention_heads": 4, "local_radius": 64, "is_decoder": True, "is_encoder_decoder": False},
    "chela": {**SIZES, "is_decoder": True},
    "bst": {**SIZES, "num_attention_heads": 4, "window": 64},
}

# of the estimates
PROCESSES, TARGETS = 8, 512
MATMULS = 400e12  # operations per second: 40% of what NVIDIA states for an H100 in bfloat16, dense
LINKS = {"NVLink": 450e9, "200 Gb/s": 25e9}  # bytes per second of a GPU in one direction: fourth generation; a network
LATENCY = 20e-6  # seconds


def resident(name: str) -> int:
    """Return a line of this process's status in bytes: VmRSS, or VmHWM, its peak."""
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name))
    return int(line.split()[1]) * 1024


def work(rank: int, size: int, length: int, model_type: str, folder: str) -> None:
    """Run one step as one of the processes and write its numbers."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=size)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **MODELS[model_type]))
    ids = own_part(torch.randint(3, 60, (1, length)), dist.group.WORLD)
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
    before = resident("VmRSS")
    with context_parallel(dist.group.WORLD), count_sent() as sent:
        with Stored(*model.parameters(), *model.buffers()) as stored:
            loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
    numbers = torch.tensor([stored.bytes, resident("VmHWM") - before, sent.bytes])
    dist.all_reduce(numbers, op=dist.ReduceOp.MAX)
    if rank == 0:
        stored_bytes, peak, most = (number / 2**20 for number in numbers.tolist())
        print(f"| {model_type} | {size} | {stored_bytes:.1f} | {peak:.0f} | {most:.2f} |", flush=True)
    dist.destroy_process_group()


def large_models() -> dict[str, torch.nn.Module]:
    """Return models without memory by name."""
    causal = {"is_decoder": True}
    configs = {
        "SPADE base": hf_hybrid.SpadeConfig.from_preset("base", **causal, is_encoder_decoder=False),
        "CHELA enwik8": hf_hybrid.ChelaConfig.from_preset("enwik8", **causal),
        "BST base": hf_hybrid.BstConfig.from_preset("base"),
        "SPADE base, encoder-decoder": hf_hybrid.SpadeConfig.from_preset("base"),
    }
    models = {}
    for name, config in configs.items():
        auto_class = AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM
        with torch.device("meta"):
            models[name] = auto_class.from_config(config, dtype=torch.bfloat16)
    return models


def count_step(model: torch.nn.Module, length: int) -> tuple[Sent, int]:
    """Return what the middle one of the processes sends in a step, and how many operations it does."""

    def shards(tokens: int) -> Shards:
        return Shards((tokens // PROCESSES,) * PROCESSES, PROCESSES // 2, dist.group.WORLD)

    def ids(tokens: int) -> torch.Tensor:
        return torch.zeros(1, tokens // PROCESSES, dtype=torch.int64, device="meta")

    inputs = {"input_ids": ids(length), "labels": ids(length), "shards": shards(length)}
    if model.config.is_encoder_decoder:
        inputs |= {"labels": ids(TARGETS), "target_shards": shards(TARGETS)}
    with count_sent() as sent, FlopCounterMode(display=False) as operations:
        model(**inputs).loss.backward()
    return sent, operations.get_total_flops()


def extrapolate(length: int) -> None:
    """Print a table of estimated times, and its assumptions."""
    dist.init_process_group("fake", rank=0, world_size=PROCESSES)
    links = ", ".join(f"{name} {rate / 1e9:g} GB/s" for name, rate in LINKS.items())
    print(
        f"A step on {length:,} tokens (and {TARGETS} of targets) over {PROCESSES} GPUs in bfloat16. Assumed: "
        f"{MATMULS / 1e12:g} TFLOP/s in matrix products, the only operations counted; in one direction {links}; "
        f"{LATENCY * 1e6:g} microseconds for each collective; nothing is sent while something is computed.\n"
    )
    print(f"| model | TFLOP | computing (s) | sent (MiB) | collectives | {' (s) | '.join(LINKS)} (s) |")
    print("|---|" + "---:|" * (4 + len(LINKS)))
    for name, model in large_models().items():
        sent, operations = count_step(model, length)
        times = [sent.collectives * LATENCY + sent.bytes / rate for rate in LINKS.values()]
        counted = f"{operations / 1e12:.1f} | {operations / MATMULS:.2f} | {sent.bytes / 2**20:,.1f}"
        shown = " | ".join(f"{time:.4f}" for time in times)
        print(f"| {name} | {counted} | {sent.collectives} | {shown} |", flush=True)


def main(argv: Sequence[str] | None = None) -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--length", type=int, default=65536)
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--extrapolate", action="store_true", help="estimate times of large models on GPUs")
    arguments = parser.parse_args(argv)
    if arguments.extrapolate:
        extrapolate(2**20)
        return
    print("| model | processes | stored (MiB) | peak (MiB) | sent (MiB) |\n|---|---:|---:|---:|---:|")
    for model_type in arguments.models:
        for size in arguments.processes:
            with tempfile.TemporaryDirectory() as folder:
                settings = (size, arguments.length, model_type, folder)
                mp.start_processes(work, settings, nprocs=size, start_method="fork")


if __name__ == "__main__":
    main()
