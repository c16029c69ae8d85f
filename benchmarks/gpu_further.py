"""The parts ``losses`` and ``lra`` of `benchmarks.gpu`."""

import argparse
import importlib.util
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.gpu_kernels import DTYPES, Clock
from benchmarks.gpu_plan import LATER
from benchmarks.gpu_tuning import Cell
from benchmarks.record import Row

LOSS_COLUMNS = ("vocabulary", "tokens", "dtype", "loss", "ms", "peak_mib", "error", "outcome")
LRA_COLUMNS = ("task", "model", "accuracy", "validation", "steps", "of_recipe", "minutes", "parameters", "outcome")
LRA_TASK, LRA_MODELS = "lra_listops", ("CHELA", "SPADE (S4 + chunk)")
LRA_FRACTION = "0.01"
"""Share of the recipe's updates, in a schedule of so many: what the part's time has room for."""
WIDTH = 768
_ALLOWED = {"fp32": 1e-4, "bf16": 2e-2}
"""Relative errors of a mean loss and of its gradients against float32's plain loss."""


# --- losses


def losses(device: torch.device, arguments: argparse.Namespace, rows: list[Row]) -> Iterator[Cell]:
    """Yield cells of the loss of a head alone: forward and backward from hidden states and a head's weight."""
    clock = Clock(device)
    shapes = ((300, 40),) if arguments.small else ((32128, 16384), (131072, 16384), (267744, 16384))
    missing = [loss for loss, package in PACKAGES.items() if importlib.util.find_spec(package) is None]
    for loss in missing:
        key = dict(zip(LOSS_COLUMNS, ("", "", "", loss), strict=False))
        yield key, partial(list, [{"outcome": f"not installed: {PACKAGES[loss]}"}])
    for vocabulary, tokens in shapes:
        for dtype in ("bf16", "fp32"):
            for loss in (loss for loss in LOSSES if loss not in missing):
                key = dict(zip(LOSS_COLUMNS, (str(vocabulary), str(tokens), dtype, loss), strict=False))
                yield key, partial(_loss, vocabulary, tokens, dtype, loss, clock, 2 if arguments.small else 5)


def _plain(states: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(states, weight).float(), labels)


def _chunked(states: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    from hf_hybrid.layers.chunked_loss import chunked_loss, loss_chunk_size

    def summed(chunk: Tensor, wanted: Tensor) -> Tensor:
        return F.cross_entropy(F.linear(chunk, weight).float(), wanted, reduction="sum")

    total, count = chunked_loss(summed, states, labels, loss_chunk_size(*weight.shape))
    return total / count


def _liger(states: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy

    loss: Tensor = liger_fused_linear_cross_entropy(states, weight, labels)
    return loss


def _torch(states: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    loss: Tensor = F.linear_cross_entropy(states, weight, labels)  # type: ignore[attr-defined]  # new in torch 2.13
    return loss


LOSSES: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "plain": _plain,
    "chunked": _chunked,
    "liger": _liger,
    "torch": _torch,
}
PACKAGES = {"liger": "liger_kernel"}
PEERS = ("liger", "torch")
"""Losses that are not ours: how they fail, or how far they are off, is a result."""


def _loss(vocabulary: int, tokens: int, dtype: str, loss: str, clock: Clock, rounds: int) -> Iterator[Row]:
    torch.manual_seed(0)
    states = torch.randn(tokens, WIDTH, device=clock.device)
    weight = torch.randn(vocabulary, WIDTH, device=clock.device) * WIDTH**-0.5
    labels = torch.randint(vocabulary, (tokens,), device=clock.device)

    def results(name: str, kind: str) -> list[Tensor]:
        inputs = [x.to(DTYPES[kind]).requires_grad_() for x in (states, weight)]
        value = LOSSES[name](*inputs, labels)
        return [value.detach(), *torch.autograd.grad(value, inputs)]

    try:
        found = results(loss, dtype)
        few = _reference(states, weight, labels)
        error = max(
            ((one.float() - other).norm() / other.norm()).item() for one, other in zip(found, few, strict=True)
        )
        del found, few
        call = partial(results, loss, dtype)
        peak = clock.peak(call)
        spent = clock.interleaved({"loss": call}, rounds)["loss"]
    except Exception as problem:  # memory that is too small is a result, and so is a library that fails
        said = f"{type(problem).__name__}: {problem}".splitlines()[0][:160]
        is_result = loss in PEERS or isinstance(problem, torch.OutOfMemoryError)
        yield {"outcome": said if is_result else f"raised: {said}"}
        return
    yield {
        "ms": f"{spent:.4g}",
        "peak_mib": "" if peak is None else f"{peak:.0f}",
        "error": f"{error:.2e}",
        "outcome": "ok"
        if error <= _ALLOWED[dtype]
        else "inexact"
        if loss in PEERS
        else "wrong: the loss or a gradient",
    }


def _reference(states: Tensor, weight: Tensor, labels: Tensor) -> list[Tensor]:
    """Return the mean loss and its gradients in float32, with the logits of 1,024 tokens at a time."""
    inputs = [x.detach().requires_grad_() for x in (states, weight)]
    total = torch.zeros((), device=states.device)
    for rows in torch.arange(len(labels), device=labels.device).split(1024):
        part = F.cross_entropy(F.linear(inputs[0][rows], inputs[1]), labels[rows], reduction="sum") / len(labels)
        part.backward()
        total += part.detach()
    return [total, *(x.grad for x in inputs if x.grad is not None)]


# --- the Long Range Arena


def lra(device: torch.device, arguments: argparse.Namespace, rows: list[Row]) -> Iterator[Cell]:
    """Yield a cell for each model; its row is of what is trained so far, and later calls go on with it."""
    out = (arguments.csv or arguments.out / "lra.csv").parent / "lra"
    until = min(arguments.until, time.time() + 3600.0)
    models = LRA_MODELS[: 1 if arguments.small else None]
    done = {row["model"] for row in rows if not row["outcome"].startswith(LATER)}
    wanted = [model for model in models if model not in done]
    for model in models:
        sharing = len(wanted) - wanted.index(model) if model in wanted else 1
        yield {"task": LRA_TASK, "model": model}, partial(_train, model, arguments, until, sharing, out)


def _train(model: str, arguments: argparse.Namespace, until: float, sharing: int, out: Path) -> Iterator[Row]:
    """Train one of the models that share what is left of the time, less what it takes to save and to test."""
    from benchmarks.lra import RESULT, command_parser, run_folder  # with Trainer, which no other part needs

    minutes = max(0.1, (until - time.time()) / 60 / sharing - (0 if arguments.small else 1))
    flags = ["--task", LRA_TASK, "--model", model, "--minutes", f"{minutes:.2f}", "--device", arguments.device]
    flags += ["--finish", "--output_dir", str(out)]
    flags += ["--small"] if arguments.small else ["--fraction", LRA_FRACTION]
    ran = subprocess.run([sys.executable, "-m", "benchmarks.lra", *flags], stderr=subprocess.PIPE, text=True)
    if ran.returncode:
        yield {"outcome": f"raised: {' '.join(ran.stderr.strip().splitlines()[-1:])}"[:160]}
        return
    done = run_folder(command_parser().parse_args(flags)) / RESULT
    if done.exists():
        result = json.loads(done.read_text(encoding="utf-8"))
        names = ("accuracy", "validation", "steps", "minutes", "parameters")
        share = f"{100 * result['of_recipe']:.3g} %"
        outcome = "ok" if result["of_schedule"] == 1 else f"{LATER}: {share} of the recipe"
        yield {name: str(result[name]) for name in names} | {"of_recipe": share, "outcome": outcome}
