"""Cases of segment_recurrence and segment_step."""

import torch
from torch import Tensor
from torch.nn import functional as F

import benchmarks.kernels_alone  # noqa: F401
from benchmarks.gpu_cases.case import Case, Tensors, normal
from hf_hybrid.kernels.segment_recurrence import segment_recurrence, segment_step


def recurrence(batch: int, heads: int, segments: int, size: int, width: int, neurons: bool = True) -> Case:
    """States over segments, with neurons or without."""

    def make(device: torch.device) -> Tensors:
        inputs = {
            name: normal(device, batch, heads, segments, size, width, scale=size**-0.5) for name in ("key", "value")
        }
        if not neurons:
            return inputs
        return inputs | {
            "weight": normal(device, width, width, scale=width**-0.5),
            "leak": torch.full((1,), 0.9, device=device),
            "threshold": torch.full((1,), 0.1, device=device),
        }

    numbers = batch * heads * segments * size * width
    states = batch * heads * segments * width * width
    return Case(
        "segment_recurrence",
        f"B{batch} H{heads} M{segments} S{size} K{width}{'' if neurons else ', no neurons'}",
        make,
        lambda x, backend: segment_recurrence(**x, backend=backend),  # type: ignore[arg-type]
        {},
        (2 * numbers + states, 4 * numbers + states, 2 * (numbers * width + states * width)),
        ("weight", "leak", "threshold"),
    )


def step(rows: int, heads: int, slots: int, size: int, width: int) -> Case:
    """A step of as many rows as documents, each reading its own segment."""

    def make(device: torch.device) -> Tensors:
        return {
            "query": normal(device, rows, heads, width, scale=width**-0.5),
            "key": normal(device, rows, heads, slots, size, width),
            "value": normal(device, rows, heads, slots, size, width),
            "state": normal(device, rows, heads, slots, width, width),
            "norm": 1 + normal(device, rows, heads, 1, width).abs(),
        }

    def index(device: torch.device) -> Tensor:
        strips = torch.arange(rows * heads, device=device).view(rows, heads)
        return strips * slots + torch.arange(rows, device=device)[:, None] % slots

    indices: dict[torch.device, Tensor] = {}

    def run(x: Tensors, backend: str) -> Tensor:
        device = x["query"].device
        if device not in indices:
            indices[device] = index(device)
        return segment_step(
            x["query"], x["key"], x["value"], x["state"], indices[device], norm=x["norm"], backend=backend
        )

    def full(x: Tensors) -> Tensor:
        key, value = (x[name].flatten(2, 3) for name in ("key", "value"))
        return F.scaled_dot_product_attention(x["query"][:, :, None], key, value, scale=1.0)[:, :, 0]

    numbers = rows * heads * (2 * size * width + width * width)
    return Case(
        "segment_step",
        f"B{rows} H{heads} M{slots} S{size} K{width}",
        make,
        run,
        {"softmax attention (SDPA) to all segments": lambda: full},
        (numbers, 0, 2 * numbers),
        decodes=True,
    )
