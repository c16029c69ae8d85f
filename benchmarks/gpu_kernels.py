"""What `benchmarks.gpu` checks and times of each kernel: inputs, the op, named peers, and what the work must cost.

B batch · T length · S cached keys · H heads · D width · K key dim · J taps · P states · N state size · C filters
"""

import importlib
import math
import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

import benchmarks.kernels_alone  # noqa: F401
from benchmarks.record import Row
from hf_hybrid.kernels.diagonal_scan import diagonal_scan
from hf_hybrid.kernels.linear_attention import linear_attention
from hf_hybrid.kernels.local_attention import local_attention, local_attention_step
from hf_hybrid.kernels.long_conv import long_conv
from hf_hybrid.kernels.segment_recurrence import segment_recurrence, segment_step
from hf_hybrid.kernels.short_conv import short_conv
from hf_hybrid.kernels.ssm_kernel import S4DStep, S4Step, dplr_legs, s4_kernel, ssm_step

Tensors = dict[str, Tensor]
Function = Callable[[Tensors], Tensor]
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class Case(NamedTuple):
    """One operation at one shape.

    Attributes:
        op: The operation.
        shape: The shape, in words.
        make: Draws its inputs on a device, in float32.
        run: The op on a named backend.
        peers: What else computes the same, by name; made when asked for, since a peer may be missing.
        floor: Numbers read and written once, in a forward and in a backward, and the multiplications of both.
        wide: Inputs that stay float32 whatever the dtype.
        decodes: Whether it is one decoded token, without a backward, and raced in CUDA graphs too.
    """

    op: str
    shape: str
    make: Callable[[torch.device], Tensors]
    run: Callable[[Tensors, str], Tensor]
    peers: dict[str, Callable[[], Function]]
    floor: tuple[float, float, float]
    wide: tuple[str, ...] = ()
    decodes: bool = False


def _normal(device: torch.device, *shape: int, scale: float = 1.0) -> Tensor:
    return scale * torch.randn(shape, device=device)


# the cases


def _short_conv(batch: int, length: int, width: int, taps: int) -> Case:
    def make(device: torch.device) -> Tensors:
        return {
            "u": _normal(device, batch, length, width),
            "kernel": _normal(device, width, taps, scale=taps**-0.5),
            "bias": _normal(device, width),
        }

    def conv1d(x: Tensors) -> Tensor:
        u = F.pad(x["u"].mT, (taps - 1, 0))
        return F.silu(F.conv1d(u, x["kernel"].flip(1)[:, None].to(u.dtype), x["bias"].to(u.dtype), groups=width)).mT

    numbers = batch * length * width
    return Case(
        "short_conv",
        f"B{batch} T{length} D{width} J{taps}",
        make,
        lambda x, backend: short_conv(x["u"], x["kernel"], x["bias"], activation="silu", backend=backend)[0],
        {"conv1d, silu": lambda: conv1d, "the same, compiled": lambda: torch.compile(conv1d)},
        (2 * numbers, 3 * numbers, 3 * 2 * taps * numbers),
        ("kernel", "bias"),
    )


def _linear_attention(batch: int, length: int, heads: int, width: int) -> Case:
    def make(device: torch.device) -> Tensors:
        return {name: _normal(device, batch, length, heads, width, scale=width**-0.25) for name in ("q", "k", "v")}

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
        (4 * numbers, 7 * numbers, 3 * numbers * (4 * width + 2 * 64)),
    )


def _normed_linear_attention(batch: int, length: int, heads: int, width: int) -> Case:
    plain = _linear_attention(batch, length, heads, width)

    def make(device: torch.device) -> Tensors:
        return plain.make(device) | {"gate": _normal(device, batch, length, heads, width)}

    def run(x: Tensors, backend: str) -> Tensor:
        return linear_attention(x["q"], x["k"], x["v"], norm_eps=1e-6, gate=x["gate"], backend=backend)[0]

    def apart(x: Tensors) -> Tensor:
        normed = F.rms_norm(plain.run(x, "auto"), (width,), eps=1e-6).to(x["gate"].dtype)
        return normed * F.silu(x["gate"])

    numbers, (_, _, flops) = batch * length * heads * width, plain.floor
    peers = {"norm and gate by torch": lambda: apart}
    return Case("linear_attention", f"{plain.shape}, norm, gate", make, run, peers, (5 * numbers, 10 * numbers, flops))


def _local_attention(batch: int, length: int, heads: int, width: int, radius: int) -> Case:
    def make(device: torch.device) -> Tensors:
        inputs = {name: _normal(device, batch, length, heads, width) for name in ("q", "k", "v")}
        return inputs | {"bias": _normal(device, heads, 2 * radius + 1)}

    def flex() -> Function:
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
            result: Tensor = compiled(q, k, v, score_mod=add, block_mask=masks[q.device])
            return result.transpose(1, 2)

        return run

    def flash() -> Function:
        attend = importlib.import_module("flash_attn").flash_attn_func
        return lambda x: attend(x["q"], x["k"], x["v"], window_size=(radius, radius))

    def sdpa() -> Function:
        if length > 4096:
            raise ValueError(f"a mask of {length} x {length} numbers per head is not tried")

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
        {"FlexAttention, compiled": flex, "SDPA, dense mask": sdpa, "flash-attn, without the bias": flash},
        (4 * numbers, 8 * numbers, 3.5 * 4 * numbers * (2 * radius + 1)),
        ("bias",),
    )


def _local_attention_dropout(batch: int, length: int, heads: int, width: int, radius: int, rate: float) -> Case:
    """Dropout, which every backend draws for itself: "torch" is dense attention under the mask of the device's own."""
    plain = _local_attention(batch, length, heads, width, radius)

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
        # a product, since the gradient of a lookup adds up in no fixed order
        column = F.one_hot((offset + radius).clamp(0, 2 * radius), 2 * radius + 1).to(wide)
        bias = (column @ x["bias"].to(wide).mT).permute(2, 0, 1)
        scores = torch.einsum("bthk,bshk->bhts", q, k) * width**-0.5 + bias
        weights = scores.masked_fill(offset.abs() > radius, -math.inf).softmax(-1) * kept / (1 - rate)
        return torch.einsum("bhts,bshv->bthv", weights, v).to(x["q"].dtype)

    return plain._replace(shape=f"{plain.shape}, dropout {rate}", run=run, peers={})


def _long_conv(batch: int, length: int, width: int, groups: int | None = None) -> Case:
    """A convolution with a skip connection, and with gates and activation around it where channels share taps."""
    rows = width if groups is None else groups

    def make(device: torch.device) -> Tensors:
        decay = torch.exp(-torch.linspace(0, 8, length, device=device))
        inputs = {
            "u": _normal(device, batch, length, width),
            "kernel": _normal(device, rows, length) * decay,
            "skip": _normal(device, width),
        }
        if groups is None:
            return inputs
        return inputs | {name: _normal(device, batch, length, width) for name in ("input_gate", "gate")}

    def run(x: Tensors, backend: str) -> Tensor:
        around = {name: x.get(name) for name in ("input_gate", "gate")}
        silu = None if groups is None else "silu"
        return long_conv(x["u"], x["kernel"], skip=x["skip"], activation=silu, backend=backend, **around)

    def plain(x: Tensors) -> Tensor:
        u = (x["u"] if groups is None else x["u"] * x["input_gate"]).mT
        u = u.to(torch.promote_types(u.dtype, torch.float32))
        kernel = x["kernel"].repeat(width // rows, 1)
        y = torch.fft.irfft(torch.fft.rfft(u, 2 * length) * torch.fft.rfft(kernel, 2 * length), 2 * length)
        y = (y[..., :length] + x["skip"][:, None] * u).mT
        return (y if groups is None else F.silu(y) * x["gate"]).to(x["u"].dtype)

    numbers = batch * length * width
    return Case(
        "long_conv",
        f"B{batch} T{length} D{width}{'' if groups is None else f' G{groups}, gated'}",
        make,
        run,
        {"torch.fft": lambda: plain} | ({"FlashFFTConv": _flash_fft_conv(length)} if groups is None else {}),
        (
            (2 if groups is None else 4) * numbers,
            (3 if groups is None else 7) * numbers,
            3 * 3 * 2.5 * 2 * numbers * math.log2(2 * length),
        ),
        ("kernel", "skip"),
    )


def _flash_fft_conv(length: int) -> Callable[[], Function]:
    def make() -> Function:
        conv = importlib.import_module("flashfftconv").FlashFFTConv(2 * length, dtype=torch.bfloat16).cuda()
        return lambda x: (conv(x["u"].mT.contiguous(), x["kernel"]) + x["skip"][:, None] * x["u"].mT).mT

    return make


def _segment_recurrence(batch: int, heads: int, segments: int, size: int, width: int, neurons: bool = True) -> Case:
    def make(device: torch.device) -> Tensors:
        inputs = {
            name: _normal(device, batch, heads, segments, size, width, scale=size**-0.5) for name in ("key", "value")
        }
        if not neurons:
            return inputs
        return inputs | {
            "weight": _normal(device, width, width, scale=width**-0.5),
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
        (2 * numbers + states, 4 * numbers + states, 3 * 2 * (numbers * width + states * width)),
        ("weight", "leak", "threshold"),
    )


def _segment_step(rows: int, heads: int, slots: int, size: int, width: int) -> Case:
    """Of as many rows as documents, each of which reads a segment of its own."""

    def make(device: torch.device) -> Tensors:
        return {
            "query": _normal(device, rows, heads, width, scale=width**-0.5),
            "key": _normal(device, rows, heads, slots, size, width),
            "value": _normal(device, rows, heads, slots, size, width),
            "state": _normal(device, rows, heads, slots, width, width),
            "norm": 1 + _normal(device, rows, heads, 1, width).abs(),
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
        (numbers, 0, 3 * 2 * numbers),
        decodes=True,
    )


def _diagonal_scan(batch: int, length: int, states: int) -> Case:
    def make(device: torch.device) -> Tensors:
        radius, angle = 1 - torch.rand(states, device=device) / 10, 3 * torch.rand(states, device=device)
        return {
            "a": torch.view_as_real(torch.polar(radius, angle)),
            "b": _normal(device, batch, length, states, 2),
        }

    def complex_numbers(x: Tensors) -> list[Tensor]:
        return [torch.view_as_complex(x[name].contiguous()) for name in ("a", "b")]

    def run(x: Tensors, backend: str) -> Tensor:
        return torch.view_as_real(diagonal_scan(*complex_numbers(x), backend=backend)[0])

    def one_by_one(x: Tensors) -> Tensor:
        a, b = complex_numbers(x)
        state, found = torch.zeros_like(b[:, 0]), []
        for token in b.unbind(1):
            state = a * state + token
            found.append(state)
        return torch.view_as_real(torch.stack(found, dim=1))

    def accelerated_scan() -> Function:
        scan = importlib.import_module("accelerated_scan.complex").scan

        def run(x: Tensors) -> Tensor:
            a, b = complex_numbers(x)
            tokens = b.mT.contiguous()
            return torch.view_as_real(scan(a[:, None].expand_as(tokens).contiguous(), tokens).mT)

        return run

    numbers = 2 * batch * length * states
    return Case(
        "diagonal_scan",
        f"B{batch} T{length} P{states}, complex",
        make,
        run,
        {"a loop": lambda: one_by_one, "accelerated-scan": accelerated_scan},
        (2 * numbers, 3 * numbers, 3 * 4 * numbers),
        ("a", "b"),
    )


def _real_diagonal_scan(batch: int, length: int, states: int) -> Case:
    def make(device: torch.device) -> Tensors:
        return {"a": 1 - torch.rand(states, device=device) / 10, "b": _normal(device, batch, length, states)}

    numbers = batch * length * states
    return Case(
        "diagonal_scan",
        f"B{batch} T{length} P{states}, real",
        make,
        lambda x, backend: diagonal_scan(x["a"], x["b"], backend=backend)[0],
        {},
        (2 * numbers, 3 * numbers, 3 * 2 * numbers),
        ("a",),
    )


def _s4_kernel(width: int, size: int, length: int, filters: int = 1) -> Case:
    def make(device: torch.device) -> Tensors:
        w, P, B = (torch.view_as_real(x.to(torch.complex64)).to(device) for x in dplr_legs(size))
        return {
            "C": _normal(device, filters, width, size // 2, 2),
            **{name: x.expand(width, -1, -1).clone() for name, x in (("B", B), ("P", P), ("w", w))},
            "dt": torch.exp(torch.empty(width, device=device).uniform_(math.log(1e-3), math.log(1e-1))),
        }

    def kernel(x: Tensors, algorithm: str | None, backend: str) -> Tensor:
        C, B, P, w = (torch.view_as_complex(x[name].contiguous()) for name in ("C", "B", "P", "w"))
        return s4_kernel(C, B, P, w, x["dt"], length, algorithm=algorithm, backend=backend)

    numbers = filters * width * length
    return Case(
        "s4_kernel",
        f"H{width} N{size} L{length} C{filters}",
        make,
        lambda x, backend: kernel(x, None, backend),
        {"Cauchy sums, torch": lambda: lambda x: kernel(x, "cauchy", "torch")},
        (numbers, numbers, 3 * 2 * numbers * size),
        ("C", "B", "P", "w", "dt"),
    )


def _ssm_step(batch: int, width: int, size: int, filters: int, *, low_rank: bool = True, whole: bool = False) -> Case:
    """`whole`: the next state is among what is compared, beside the outputs."""
    names = ("decay", "column", "row", "input") if low_rank else ("decay", "input")
    modes = size // 2

    def make(device: torch.device) -> Tensors:
        angles = 3 * torch.rand(width, modes, device=device)
        constants = {name: _normal(device, width, modes, 2, scale=modes**-0.5) for name in names}
        constants["decay"] = torch.view_as_real(torch.polar(torch.full_like(angles, 0.9), angles))
        return {
            "state": _normal(device, batch, width, modes, 2),
            "u": _normal(device, batch, width),
            "C": _normal(device, filters, width, modes, 2),
            "skip": _normal(device, filters, width),
            **constants,
        }

    def run(x: Tensors, backend: str) -> Tensor:
        C, *constants = (torch.view_as_complex(x[name]) for name in ("C", *names))
        step = (S4Step if low_rank else S4DStep)(*constants)
        y, after = ssm_step(x["state"], x["u"], C, step, x["skip"], backend=backend)
        return torch.cat([y.flatten().to(after.dtype), after.flatten()]) if whole else y

    numbers = 2 * batch * width * modes
    constant = 2 * width * modes * (len(names) + filters)
    return Case(
        "ssm_step",
        f"B{batch} D{width} N{size} C{filters}{'' if low_rank else ', diagonal'}",
        make,
        run,
        {},
        (2 * numbers + constant, 0, 3 * numbers * (4 * len(names) + 2 * filters)),
        ("state", "C", "skip", *names),
        decodes=True,
    )


def _local_attention_step(
    batch: int, cached: int, heads: int, width: int, radius: int, *, chunks: bool = False, padding: int = 0
) -> Case:
    """One token at three quarters of a static cache; `chunks` of radius + 1 tokens, rows padded on the left."""
    at = 3 * cached // 4
    low = max(0, at - radius)

    def make(device: torch.device) -> Tensors:
        inputs = {name: _normal(device, batch, heads, cached, width).transpose(1, 2) for name in ("k", "v")}
        inputs |= {"q": _normal(device, batch, 1, heads, width), "bias": _normal(device, heads, radius + 1)}
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
        (2 * numbers, 0, 3 * 4 * numbers),
        ("bias", "mask"),
        decodes=True,
    )


def cases(small: bool) -> list[Case]:
    """Every case; small ones run on a CPU within seconds."""
    if small:
        return [
            _short_conv(2, 40, 16, 3),
            _linear_attention(2, 40, 2, 16),
            _normed_linear_attention(2, 40, 2, 16),
            _local_attention(2, 40, 2, 16, 7),
            _long_conv(2, 40, 8),
            _long_conv(2, 40, 8, groups=2),
            _segment_recurrence(2, 2, 4, 8, 8),
            _segment_step(2, 2, 4, 8, 8),
            _diagonal_scan(2, 40, 8),
            _real_diagonal_scan(2, 40, 8),
            _s4_kernel(4, 8, 40),
            _ssm_step(2, 6, 8, 2),
            _local_attention_step(2, 40, 2, 16, 7),
        ]
    found = [_short_conv(8, 4096, 768, taps) for taps in (3, 9)]
    found += [_linear_attention(8, length, 8, 128) for length in (4096, 16384)]
    found += [_linear_attention(8, 4096, 4, 64), _linear_attention(8, 4096, 1, 1024)]
    found += [_normed_linear_attention(8, 4096, heads, width) for heads, width in ((4, 64), (8, 128))]
    found += [_local_attention(8, length, 12, 64, 128) for length in (4096, 16384)]
    found += [_long_conv(8, length, 768) for length in (4096, 16384)] + [_long_conv(8, 4096, 768, groups=4)]
    found += [_segment_recurrence(8, 12, 64, 64, 64), _segment_step(32, 12, 256, 64, 64)]
    found += [_diagonal_scan(8, 4096, 384), _real_diagonal_scan(8, 4096, 768)]
    found += [_s4_kernel(768, size, 16384) for size in (16, 64)]
    found += [_ssm_step(batch, 768, 64, filters) for batch, filters in ((1, 1), (8, 1), (8, 12))]
    found += [_local_attention_step(batch, 4096, 12, 64, 256) for batch in (1, 8, 64)]
    return found


# correctness


def checked_cases(small: bool) -> list[Case]:
    """Shapes that together take every configuration and meet no tile's border."""
    if small:
        return cases(True)
    found = [_short_conv(3, 1013, 200, taps) for taps in (1, 3, 9)]
    found += [_linear_attention(2, length, heads, width) for length, heads, width in _ODD_HEADS]
    found += [_normed_linear_attention(2, 1013, 3, width) for width in (16, 60, 200)]
    found += [_local_attention(2, 997, 3, width, 100) for width in (32, 64, 96, 128, 256)]
    found += [_s4_kernel(60, size, 3001, filters) for size, filters in ((16, 1), (64, 1), (64, 2), (10, 5))]
    found += [_ssm_step(3, 101, size, 3, low_rank=size != 30, whole=True) for size in (2, 10, 30, 64, 200)]
    found += [_local_attention_step(3, 997, 3, width, 100, padding=7) for width in (32, 64, 96, 256)]
    found += [_local_attention_step(3, 997, 3, 64, 100, chunks=True, padding=350)]
    found += [_long_conv(2, 3001, 200), _long_conv(2, 3001, 200, groups=4)]
    found += [
        _segment_recurrence(2, 3, 5, 60, width, neurons) for width in (64, 100, 200) for neurons in (True, False)
    ]
    found += [_segment_step(3, 5, 7, 60, width) for width in (50, 100, 200)]
    found += [_local_attention_dropout(2, 150, 3, width, 50, 0.25) for width in (64, 128, 256)]
    found += [scan(2, length, 100) for scan in (_diagonal_scan, _real_diagonal_scan) for length in (100, 1013)]
    return found


_ODD_HEADS = ((1013, 3, 64), (1013, 3, 128), (5003, 2, 100), (700, 1, 1024), (129, 40, 64))

# relative error that a dtype's rounding excuses, however exact torch's own path is
_EXCUSED = {"fp32": 1e-5, "bf16": 1e-2, "fp16": 2e-3}


def _inputs(case: Case, device: torch.device, dtype: torch.dtype, seed: int) -> Tensors:
    torch.manual_seed(seed)
    drawn = case.make(device)
    inputs = {name: (x if name in case.wide else x.to(dtype)).detach() for name, x in drawn.items()}
    return {name: x.requires_grad_(not case.decodes) for name, x in inputs.items()}


def _results(function: Function, inputs: Tensors, weight: Tensor) -> dict[str, Tensor]:
    """The output, and the gradients where there are any."""
    output = function(inputs)
    if not output.requires_grad:
        return {"output": output}
    grads = torch.autograd.grad(output, list(inputs.values()), weight.to(output.dtype))
    return {"output": output.detach(), **dict(zip((f"d{name}" for name in inputs), grads, strict=True))}


def _error(actual: Tensor, expected: Tensor) -> float:
    if not actual.isfinite().all():
        return math.inf
    return ((actual.double() - expected).norm() / expected.norm().clamp_min(1e-30)).item()


def check(case: Case, dtype: str, device: torch.device, backends: tuple[str, ...]) -> Iterator[Row]:
    """Compare an op's output and gradients with its torch path in float64, and two runs with each other.

    An error may be three times that of the torch path in the same dtype, or what the dtype excuses.

    Yields:
        A row for each backend that takes the case, or one that says why it does not.
    """
    inputs = _inputs(case, device, DTYPES[dtype], seed=1)
    exact = {name: x.detach().double().requires_grad_(not case.decodes) for name, x in inputs.items()}
    weight = torch.randn_like(case.run(exact, "torch"))
    expected = _results(lambda x: case.run(x, "torch"), exact, weight)
    allowed: dict[str, float] = {}
    for backend in backends:
        row = {"op": case.op, "shape": case.shape, "dtype": dtype, "backend": backend}
        try:
            found = _results(lambda x, backend=backend: case.run(x, backend), inputs, weight)
        except Exception as error:
            refused = isinstance(error, ValueError) and "cannot run on triton" in str(error)
            yield row | {"outcome": str(error).split(": ", 1)[1] if refused else f"raised: {_said(error)}"}
            continue
        errors = {name: _error(found[name], expected[name]) for name in expected}
        if backend == "torch":
            allowed = {name: max(3 * error, _EXCUSED[dtype]) for name, error in errors.items()}
        again = _results(lambda x, backend=backend: case.run(x, backend), inputs, weight)
        worst = max(errors, key=lambda name: errors[name] / allowed[name])
        wrong = [name for name, error in errors.items() if not error <= allowed[name]]
        moved = [name for name in found if not torch.equal(found[name], again[name])]
        problems = [f"wrong: {', '.join(wrong)}"] if wrong else []
        problems += [f"not the same twice: {', '.join(moved)}"] if moved else []
        yield row | {
            "worst": worst,
            "error": f"{errors[worst]:.2e}",
            "allowed": f"{allowed[worst]:.2e}",
            "outcome": "; ".join(problems) or "ok",
        }


# time


class Clock:
    """Times contenders in turn, behind a cleared cache, in milliseconds; on a CPU by the wall."""

    def __init__(self, device: torch.device):
        self.device = device
        self.cache = torch.empty(1 << 28 if device.type == "cuda" else 1, dtype=torch.uint8, device=device)

    def once(self, function: Callable[[], object]) -> float:
        """Time one call."""
        self.cache.zero_()
        if self.device.type != "cuda":
            start = time.perf_counter()
            function()
            return 1e3 * (time.perf_counter() - start)
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        function()
        end.record()
        torch.cuda.synchronize()
        return float(begin.elapsed_time(end))

    def interleaved(self, functions: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
        """Median over rounds in which every contender has its turn, after three that do not count."""
        times: dict[str, list[float]] = {name: [] for name in functions}
        for number in range(rounds + 3):
            for name, function in functions.items():
                spent = self.once(function)
                if number >= 3:
                    times[name].append(spent)
        return {name: statistics.median(spent) for name, spent in times.items()}

    def peak(self, function: Callable[[], object]) -> float | None:
        """MiB that a call takes beyond what was held before."""
        if self.device.type != "cuda":
            return None
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats(self.device)
        before = torch.cuda.memory_allocated(self.device)
        function()
        torch.cuda.synchronize()
        return (torch.cuda.max_memory_allocated(self.device) - before) / 2**20


def measure_ceilings(clock: Clock, small: bool) -> Row:
    """Bytes per second of a copy, read and write counted, and operations per second of products in each dtype."""
    size = 64 if small else 8192
    source = torch.randn(1 << (10 if small else 28), device=clock.device)
    target = torch.empty_like(source)
    functions: dict[str, Callable[[], object]] = {"copy": lambda: target.copy_(source)}
    for name, dtype in DTYPES.items():
        a = torch.randn(size, size, device=clock.device).to(dtype)
        functions[name] = lambda a=a: a @ a
    spent = clock.interleaved(functions, 5 if small else 20)
    row = {"copy_gbs": f"{2 * source.nbytes / spent['copy'] / 1e6:.4g}"}
    return row | {f"{name}_tflops": f"{2 * size**3 / spent[name] / 1e9:.4g}" for name in DTYPES}


def floor_ms(case: Case, dtype: str, both: bool, ceilings: Row) -> float:
    """What bytes or multiplications cost at the ceilings, the larger, in a forward or with its backward."""
    forward, backward, flops = case.floor
    width = 4 if dtype == "fp32" or case.op in ("s4_kernel", "ssm_step") or "b" in case.wide else 2
    moved = width * (forward + (backward if both else 0)) / float(ceilings["copy_gbs"]) / 1e6
    return max(moved, flops / (1 if both else 3) / float(ceilings[f"{dtype}_tflops"]) / 1e9)


def in_graph(function: Callable[[], object], device: torch.device) -> Callable[[], object]:
    """Capture a call in a CUDA graph and return what replays it."""
    if device.type != "cuda":
        raise ValueError("CUDA graphs want a GPU")
    side = torch.cuda.Stream(device)
    side.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(side):
        for _ in range(3):  # what is compiled or allocated once is so before the capture
            function()
    torch.cuda.current_stream(device).wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        function()
    return graph.replay


def race(case: Case, dtype: str, clock: Clock, ceilings: Row, rounds: int) -> Iterator[Row]:
    """Time an op's backends and its peers, forward alone and with the backward, in turns; steps also in CUDA graphs.

    Yields:
        A row for each contender and direction, also for those that cannot run.
    """
    inputs = _inputs(case, clock.device, DTYPES[dtype], seed=2)
    contenders: dict[str, Function] = {
        "hf_hybrid, triton": lambda x: case.run(x, "triton"),
        "hf_hybrid, torch": lambda x: case.run(x, "torch"),
    }
    outcome: Row = {}
    for name, peer in case.peers.items():
        try:
            contenders[name] = peer()
        except Exception as error:  # a peer that is missing or broken is a result
            outcome[name] = _said(error)
    with torch.no_grad():
        weight = torch.randn_like(case.run(inputs, "torch"))

    def there_and_back(function: Function) -> object:
        return torch.autograd.grad(function(inputs), list(inputs.values()), weight, allow_unused=True)

    forward: dict[str, Callable[[], object]] = {}
    both: dict[str, Callable[[], object]] = {}
    for name, function in contenders.items():
        try:
            function(inputs) if case.decodes else there_and_back(function)
        except Exception as error:
            outcome[name] = _said(error)
            continue
        forward[name] = partial(function, inputs)
        both[name] = partial(there_and_back, function)
    for name, call in list(forward.items()) if case.decodes else ():
        name = f"{name}, CUDA graph"
        try:
            forward[name] = in_graph(call, clock.device)
        except Exception as error:
            outcome[name] = _said(error)
    directions = (("forward", forward), ("forward and backward", both))
    for direction, functions in directions[: 1 if case.decodes else 2]:
        peaks = {name: clock.peak(function) for name, function in functions.items()}
        times = clock.interleaved(functions, rounds)
        least = floor_ms(case, dtype, direction != "forward", ceilings)
        for name in dict.fromkeys((*contenders, *functions, *outcome)):
            row = {"op": case.op, "shape": case.shape, "dtype": dtype, "direction": direction, "contender": name}
            if name not in times:
                yield row | {"outcome": outcome[name]}
                continue
            peak = peaks[name]
            yield row | {
                "ms": f"{times[name]:.4g}",
                "over_floor": f"{times[name] / least:.3g}",
                "peak_mib": "" if peak is None else f"{peak:.0f}",
                "outcome": "ok",
            }


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"[:160]
