"""Cases of linear_attention, local_attention and local_attention_step."""

import importlib
import math
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

import benchmarks.kernels_alone  # noqa: F401
from benchmarks.gpu_cases.case import Case, Function, Tensors, normal
from hf_hybrid.kernels.linear_attention import linear_attention
from hf_hybrid.kernels.local_attention import local_attention, local_attention_step


def linear(batch: int, length: int, heads: int, width: int) -> Case:
    """Linear attention beside fla's and softmax attention."""

    def make(device: torch.device) -> Tensors:
        return {name: normal(device, batch, length, heads, width, scale=width**-0.25) for name in ("q", "k", "v")}

    def fla() -> Function:
        chunk = importlib.import_module("fla.ops.linear_attn").chunk_linear_attn
        return lambda x: chunk(x["q"], x["k"], x["v"], scale=1.0, normalize=False)[0]

    def softmax(x: Tensors) -> Tensor:
        q, k, v = (x[name].transpose(1, 2) for name in ("q", "k", "v"))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)

    numbers = batch * length * heads * width
    return Case(
        "linear_attention",
        f"B{batch} T{length} H{heads} K{width}",
        make,
        lambda x, backend: linear_attention(x["q"], x["k"], x["v"], backend=backend)[0],
        {"fla chunk_linear_attn": fla, "softmax attention (SDPA)": lambda: softmax},
        (4 * numbers, 7 * numbers, numbers * (4 * width + 2 * 64)),
    )


def linear_normed(batch: int, length: int, heads: int, width: int) -> Case:
    """Linear attention with norm and gate, beside those of torch."""
    plain = linear(batch, length, heads, width)

    def make(device: torch.device) -> Tensors:
        return plain.make(device) | {"gate": normal(device, batch, length, heads, width)}

    def run(x: Tensors, backend: str) -> Tensor:
        return linear_attention(x["q"], x["k"], x["v"], norm_eps=1e-6, gate=x["gate"], backend=backend)[0]

    def apart(x: Tensors) -> Tensor:
        normed = F.rms_norm(plain.run(x, "auto"), (width,), eps=1e-6).to(x["gate"].dtype)
        return normed * F.silu(x["gate"])

    numbers, (_, _, flops) = batch * length * heads * width, plain.floor
    peers = {"norm and gate by torch": lambda: apart}
    return Case("linear_attention", f"{plain.shape}, norm, gate", make, run, peers, (5 * numbers, 10 * numbers, flops))


def _flex(length: int, radius: int) -> Function:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    def near(_b: Tensor, _h: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (query - key).abs() <= radius

    compiled: Any = torch.compile(flex_attention)
    masks: dict[torch.device, Any] = {}

    def run(x: Tensors) -> Tensor:
        q, k, v = (x[name].transpose(1, 2) for name in ("q", "k", "v"))
        bias = x["bias"]

        def add(score: Tensor, _b: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            return score + bias[head, (key - query + radius).clamp(0, 2 * radius)]

        if q.device not in masks:
            masks[q.device] = create_block_mask(near, None, None, length, length, device=str(q.device))
        # with a bias, the tiles that it chooses itself do not fit into an H200's shared memory
        tiles = {"BLOCK_M": 64, "BLOCK_N": 64} if q.is_cuda else None
        result: Tensor = compiled(q, k, v, score_mod=add, block_mask=masks[q.device], kernel_options=tiles)
        return result.transpose(1, 2)

    return run


def _flash(radius: int) -> Function:
    attend = importlib.import_module("flash_attn").flash_attn_func
    return lambda x: attend(x["q"], x["k"], x["v"], window_size=(radius, radius))


def local(batch: int, length: int, heads: int, width: int, radius: int) -> Case:
    """Attention within a radius, with a bias for each distance."""

    def make(device: torch.device) -> Tensors:
        inputs = {name: normal(device, batch, length, heads, width) for name in ("q", "k", "v")}
        return inputs | {"bias": normal(device, heads, 2 * radius + 1)}

    def sdpa() -> Function:
        if length > 4096:
            raise ValueError(f"a mask of {length} x {length} numbers per head is too large")

        def run(x: Tensors) -> Tensor:
            q, k, v = (x[name].transpose(1, 2) for name in ("q", "k", "v"))
            offset = torch.arange(length, device=q.device) - torch.arange(length, device=q.device)[:, None]
            bias = x["bias"][:, (offset + radius).clamp(0, 2 * radius)]
            mask = bias.masked_fill(offset.abs() > radius, -math.inf).to(q.dtype)
            return F.scaled_dot_product_attention(q, k, v, mask).transpose(1, 2)

        return run

    numbers = batch * length * heads * width
    return Case(
        "local_attention",
        f"B{batch} T{length} H{heads} K{width} radius {radius}, bias",
        make,
        lambda x, backend: local_attention(
            x["q"], x["k"], x["v"], bias=x["bias"], radius=radius, causal=False, backend=backend
        ),
        {
            "FlexAttention, compiled": partial(_flex, length, radius),
            "SDPA, dense mask": sdpa,
            "flash-attn, without the bias": partial(_flash, radius),
        },
        (4 * numbers, 8 * numbers, 4 * numbers * (2 * radius + 1)),
        ("bias",),
        backward=2.5,
    )


def local_dropout(batch: int, length: int, heads: int, width: int, radius: int, rate: float) -> Case:
    """Dropout, which each backend draws differently: "torch" is dense attention with the device's mask."""
    plain = local(batch, length, heads, width, radius)

    def attend(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, backend: str) -> Tensor:
        torch.manual_seed(3)
        return local_attention(q, k, v, bias=bias, radius=radius, dropout=rate, backend=backend)

    def run(x: Tensors, backend: str) -> Tensor:
        if backend == "triton":
            return attend(x["q"], x["k"], x["v"], x["bias"], backend)
        wide = torch.promote_types(x["q"].dtype, torch.float32)
        q, k, v = (x[name].to(wide) for name in ("q", "k", "v"))
        zeros = torch.zeros(batch, length, heads, 1, device=q.device)
        own = torch.eye(length, device=q.device)[None, :, None].repeat(batch, 1, heads, 1)
        kept = attend(zeros, zeros, own, None, "auto").transpose(1, 2) > 0
        offset = torch.arange(length, device=q.device) - torch.arange(length, device=q.device)[:, None]
        # a product, because the gradient of a lookup has no fixed order of summation
        column = F.one_hot((offset + radius).clamp(0, 2 * radius), 2 * radius + 1).to(wide)
        bias = (column @ x["bias"].to(wide).mT).permute(2, 0, 1)
        scores = torch.einsum("bthk,bshk->bhts", q, k) * width**-0.5 + bias
        weights = scores.masked_fill(offset.abs() > radius, -math.inf).softmax(-1) * kept / (1 - rate)
        return torch.einsum("bhts,bshv->bthv", weights, v).to(x["q"].dtype)

    return plain._replace(shape=f"{plain.shape}, dropout {rate}", run=run, peers={})


def local_step(
    batch: int, cached: int, heads: int, width: int, radius: int, *, chunks: bool = False, padding: int = 0
) -> Case:
    """One token at three quarters of a static cache; `chunks` of radius + 1 tokens, rows padded on the left."""
    at = 3 * cached // 4
    low = max(0, at - radius)

    def make(device: torch.device) -> Tensors:
        inputs = {name: normal(device, batch, heads, cached, width).transpose(1, 2) for name in ("k", "v")}
        inputs |= {"q": normal(device, batch, 1, heads, width), "bias": normal(device, heads, radius + 1)}
        if padding:
            first = torch.arange(batch, device=device)[:, None] * padding
            inputs["mask"] = (torch.arange(cached, device=device) >= first).float()
        return inputs

    def run(x: Tensors, backend: str) -> Tensor:
        return local_attention_step(
            x["q"], x["k"], x["v"], query_start=at, bias=x["bias"], radius=None if chunks else radius,
            chunk_size=radius + 1 if chunks else None, attention_mask=x.get("mask"), backend=backend,
        )  # fmt: skip

    def sdpa(x: Tensors) -> Tensor:
        q, k, v = x["q"], x["k"][:, low : at + 1], x["v"][:, low : at + 1]
        bias = x["bias"][:, None, radius - at + low :].to(q.dtype)
        found = F.scaled_dot_product_attention(*(y.transpose(1, 2) for y in (q, k, v)), bias)
        return found.transpose(1, 2)

    numbers = batch * heads * (at - low + 1) * width
    return Case(
        "local_attention_step",
        f"B{batch} S{cached} H{heads} K{width} {'chunk' if chunks else 'radius'} {radius + chunks}, bias",
        make,
        run,
        {} if chunks or padding else {"SDPA, cut to the window": lambda: sdpa},
        (2 * numbers, 0, 4 * numbers),
        ("bias", "mask"),
        decodes=True,
    )
