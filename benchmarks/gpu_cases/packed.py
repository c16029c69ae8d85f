"""Cases of packed sequences, states, unequal widths and kernels that are not causal, which use other code."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import benchmarks.kernels_alone  # noqa: F401
from benchmarks.gpu_cases.case import Case, Tensors, normal
from hf_hybrid.kernels.diagonal_scan import diagonal_scan
from hf_hybrid.kernels.linear_attention import linear_attention
from hf_hybrid.kernels.local_attention import local_attention
from hf_hybrid.kernels.long_conv import long_conv
from hf_hybrid.kernels.short_conv import short_conv

_BOUNDS = (0, 5, 5, 700, 1013)
"""Bounds of four packed sequences, one of them empty."""


_LENGTH, _COUNT, _HEADS = _BOUNDS[-1], len(_BOUNDS) - 1, 3


def _bounds(x: Tensors) -> Tensor:
    return torch.tensor(_BOUNDS, dtype=torch.int32, device=next(iter(x.values())).device)


def _case(op: str, what: str, shapes: dict[str, tuple[int, ...]], run: Callable[..., Any], *wide: str) -> Case:
    def make(device: torch.device) -> Tensors:
        return {name: normal(device, *shape, scale=0.3) for name, shape in shapes.items()}

    return Case(op, what, make, run, {}, (1, 1, 1), wide)


def _scan(x: Tensors, backend: str) -> tuple[Tensor, ...]:
    a, b, state = (torch.view_as_complex(x[name].contiguous()) for name in ("a", "b", "state"))
    found = diagonal_scan(a, b, initial_state=state, reverse=True, cu_seqlens=_bounds(x), backend=backend)
    return tuple(torch.view_as_real(y) for y in found)


def _attend(x: Tensors, backend: str, **shape: Any) -> Tensor:
    mask = torch.arange(_LENGTH, device=x["q"].device)[None] % 7 > 0
    return local_attention(
        x["q"], x["k"], x["v"], bias=x.get("bias"), attention_mask=mask, cu_seqlens=_bounds(x), backend=backend,
        **shape,
    )  # fmt: skip


def packed_cases() -> list[Case]:
    """Return the cases of this file."""
    u, q, v = (1, _LENGTH, 200), (1, _LENGTH, _HEADS, 100), (1, _LENGTH, _HEADS, 60)
    return [
        _case(
            "short_conv", "packed, state", {"u": u, "kernel": (200, 4), "state": (_COUNT, 3, 200)},
            lambda x, backend: short_conv(
                x["u"], x["kernel"], state=x["state"], cu_seqlens=_bounds(x), activation="silu", backend=backend
            ),
            "kernel",
        ),
        _case(
            "short_conv", "not causal", {"u": u, "kernel": (200, 5), "bias": (200,)},
            lambda x, backend: short_conv(x["u"], x["kernel"], x["bias"], causal=False, backend=backend)[0],
            "kernel", "bias",
        ),
        _case(
            "linear_attention", "packed, state, K 100, V 60",
            {"q": q, "k": q, "v": v, "state": (_COUNT, _HEADS, 100, 60)},
            lambda x, backend: linear_attention(
                x["q"], x["k"], x["v"], state=x["state"], cu_seqlens=_bounds(x), backend=backend
            ),
            "state",
        ),
        _case(
            "local_attention", "packed, mask, causal chunks, K 100, V 60", {"q": q, "k": q, "v": v},
            lambda x, backend: _attend(x, backend, chunk_size=150, causal=True),
        ),
        _case(
            "local_attention", "packed, mask, bias, K 60, V 60", {"q": v, "k": v, "v": v, "bias": (_HEADS, 101)},
            lambda x, backend: _attend(x, backend, radius=50),
            "bias",
        ),
        _case(
            "long_conv", "packed, both directions", {"u": u, "kernel": (200, 800), "reverse": (200, 300)},
            lambda x, backend: long_conv(
                x["u"], x["kernel"], reverse_kernel=x["reverse"], cu_seqlens=_bounds(x), backend=backend
            ),
            "kernel", "reverse",
        ),
        _case(
            "diagonal_scan", "packed, state, backwards",
            {"a": (100, 2), "b": (1, _LENGTH, 100, 2), "state": (_COUNT, 100, 2)}, _scan, "a", "b", "state",
        ),
    ]  # fmt: skip
