"""The cases of `benchmarks.gpu` for each kernel: inputs, the op, named peers, and the least cost of the work.

B batch · T length · S cached keys · H heads · D width · K key dim · J taps · P states · N state size · C filters
"""

import importlib
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

import benchmarks.kernels_alone  # noqa: F401
from hf_hybrid.kernels.diagonal_scan import diagonal_scan
from hf_hybrid.kernels.linear_attention import linear_attention
from hf_hybrid.kernels.local_attention import local_attention, local_attention_step
from hf_hybrid.kernels.long_conv import long_conv
from hf_hybrid.kernels.segment_recurrence import segment_recurrence, segment_step
from hf_hybrid.kernels.short_conv import short_conv
from hf_hybrid.kernels.ssm_kernel import S4DStep, S4Step, dplr_legs, s4_kernel, ssm_step

Tensors = dict[str, Tensor]
Function = Callable[[Tensors], Tensor]


class Case(NamedTuple):
    """One operation at one shape.

    Attributes:
        op: The operation.
        shape: The shape, in words.
        make: Draws its inputs on a device, in float32.
        run: The op on a named backend; returns one result if it is timed.
        peers: Other implementations by name, built on demand, since a peer may be missing.
        floor: Numbers read and written once, in a forward and in a backward, and operations of a forward.
        wide: Inputs that stay float32 in every dtype.
        decodes: Whether it is one decoded token, without a backward and also timed in CUDA graphs.
        backward: Operations of a backward per operation of a forward.
        arithmetic: The dtype of its operations, if tensor cores do not support that of its inputs.
    """

    op: str
    shape: str
    make: Callable[[torch.device], Tensors]
    run: Callable[[Tensors, str], Any]
    peers: dict[str, Callable[[], Function]]
    floor: tuple[float, float, float]
    wide: tuple[str, ...] = ()
    decodes: bool = False
    backward: float = 2.0
    arithmetic: str | None = None


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

    def causal_conv1d() -> Function:
        convolve = importlib.import_module("causal_conv1d").causal_conv1d_fn
        return lambda x: convolve(x["u"].mT, x["kernel"].flip(1), x["bias"], activation="silu").mT

    numbers = batch * length * width
    return Case(
        "short_conv",
        f"B{batch} T{length} D{width} J{taps}",
        make,
        lambda x, backend: short_conv(x["u"], x["kernel"], x["bias"], activation="silu", backend=backend)[0],
        {"conv1d, silu": lambda: conv1d, "the same, compiled": lambda: torch.compile(conv1d)}
        | ({"causal-conv1d": causal_conv1d} if taps <= 4 else {}),  # it takes no more
        (2 * numbers, 3 * numbers, 2 * taps * numbers),
        ("kernel", "bias"),
        arithmetic="fp32",
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
        (4 * numbers, 7 * numbers, numbers * (4 * width + 2 * 64)),
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
        {"FlexAttention, compiled": flex, "SDPA, dense mask": sdpa, "flash-attn, without the bias": flash},
        (4 * numbers, 8 * numbers, 4 * numbers * (2 * radius + 1)),
        ("bias",),
        backward=2.5,
    )


def _local_attention_dropout(batch: int, length: int, heads: int, width: int, radius: int, rate: float) -> Case:
    """Dropout, which each backend draws differently: "torch" is dense attention with the device's mask."""
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
        # a product, because the gradient of a lookup has no fixed order of summation
        column = F.one_hot((offset + radius).clamp(0, 2 * radius), 2 * radius + 1).to(wide)
        bias = (column @ x["bias"].to(wide).mT).permute(2, 0, 1)
        scores = torch.einsum("bthk,bshk->bhts", q, k) * width**-0.5 + bias
        weights = scores.masked_fill(offset.abs() > radius, -math.inf).softmax(-1) * kept / (1 - rate)
        return torch.einsum("bhts,bshv->bthv", weights, v).to(x["q"].dtype)

    return plain._replace(shape=f"{plain.shape}, dropout {rate}", run=run, peers={})


def _long_conv(batch: int, length: int, width: int, groups: int | None = None) -> Case:
    """A convolution with a skip connection, and with gates and activation if channels share taps."""
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
            3 * 2.5 * 2 * numbers * math.log2(2 * length),
        ),
        ("kernel", "skip"),
        arithmetic="fp32",
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
        (2 * numbers + states, 4 * numbers + states, 2 * (numbers * width + states * width)),
        ("weight", "leak", "threshold"),
    )


def _segment_step(rows: int, heads: int, slots: int, size: int, width: int) -> Case:
    """A step of as many rows as documents, each reading its own segment."""

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
        (numbers, 0, 2 * numbers),
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
        (2 * numbers, 3 * numbers, 4 * numbers),
        ("a", "b"),
        arithmetic="fp32",
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
        (2 * numbers, 3 * numbers, 2 * numbers),
        ("a",),
        arithmetic="fp32",
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
        (numbers, numbers, 2 * numbers * size),
        ("C", "B", "P", "w", "dt"),
        arithmetic="fp32",
    )


def _ssm_step(batch: int, width: int, size: int, filters: int, *, low_rank: bool = True) -> Case:
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

    def run(x: Tensors, backend: str) -> tuple[Tensor, Tensor]:
        C, *constants = (torch.view_as_complex(x[name]) for name in ("C", *names))
        step = (S4Step if low_rank else S4DStep)(*constants)
        return ssm_step(x["state"], x["u"], C, step, x["skip"], backend=backend)

    numbers = 2 * batch * width * modes
    constant = 2 * width * modes * (len(names) + filters)
    return Case(
        "ssm_step",
        f"B{batch} D{width} N{size} C{filters}{'' if low_rank else ', diagonal'}",
        make,
        run,
        {},
        (2 * numbers + constant, 0, numbers * (4 * len(names) + 2 * filters)),
        ("state", "C", "skip", *names),
        decodes=True,
        arithmetic="fp32",
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
        (2 * numbers, 0, 4 * numbers),
        ("bias", "mask"),
        decodes=True,
    )


_BOUNDS = (0, 5, 5, 700, 1013)
"""Bounds of four packed sequences, one of them empty."""


def _packed_cases() -> list[Case]:
    """Packed sequences, states, unequal widths and kernels that are not causal, which use other code."""
    length, count, heads = _BOUNDS[-1], len(_BOUNDS) - 1, 3

    def bounds(x: Tensors) -> Tensor:
        return torch.tensor(_BOUNDS, dtype=torch.int32, device=next(iter(x.values())).device)

    def case(op: str, what: str, shapes: dict[str, tuple[int, ...]], run: Callable[..., Any], *wide: str) -> Case:
        def make(device: torch.device) -> Tensors:
            return {name: _normal(device, *shape, scale=0.3) for name, shape in shapes.items()}

        return Case(op, what, make, run, {}, (1, 1, 1), wide)

    u, q, v = (1, length, 200), (1, length, heads, 100), (1, length, heads, 60)

    def scan(x: Tensors, backend: str) -> tuple[Tensor, ...]:
        a, b, state = (torch.view_as_complex(x[name].contiguous()) for name in ("a", "b", "state"))
        found = diagonal_scan(a, b, initial_state=state, reverse=True, cu_seqlens=bounds(x), backend=backend)
        return tuple(torch.view_as_real(y) for y in found)

    def attend(x: Tensors, backend: str, **shape: Any) -> Tensor:
        mask = torch.arange(length, device=x["q"].device)[None] % 7 > 0
        return local_attention(
            x["q"], x["k"], x["v"], bias=x.get("bias"), attention_mask=mask, cu_seqlens=bounds(x), backend=backend,
            **shape,
        )  # fmt: skip

    return [
        case(
            "short_conv", "packed, state", {"u": u, "kernel": (200, 4), "state": (count, 3, 200)},
            lambda x, backend: short_conv(
                x["u"], x["kernel"], state=x["state"], cu_seqlens=bounds(x), activation="silu", backend=backend
            ),
            "kernel",
        ),
        case(
            "short_conv", "not causal", {"u": u, "kernel": (200, 5), "bias": (200,)},
            lambda x, backend: short_conv(x["u"], x["kernel"], x["bias"], causal=False, backend=backend)[0],
            "kernel", "bias",
        ),
        case(
            "linear_attention", "packed, state, K 100, V 60",
            {"q": q, "k": q, "v": v, "state": (count, heads, 100, 60)},
            lambda x, backend: linear_attention(
                x["q"], x["k"], x["v"], state=x["state"], cu_seqlens=bounds(x), backend=backend
            ),
            "state",
        ),
        case(
            "local_attention", "packed, mask, causal chunks, K 100, V 60", {"q": q, "k": q, "v": v},
            lambda x, backend: attend(x, backend, chunk_size=150, causal=True),
        ),
        case(
            "local_attention", "packed, mask, bias, K 60, V 60", {"q": v, "k": v, "v": v, "bias": (heads, 101)},
            lambda x, backend: attend(x, backend, radius=50),
            "bias",
        ),
        case(
            "long_conv", "packed, both directions", {"u": u, "kernel": (200, 800), "reverse": (200, 300)},
            lambda x, backend: long_conv(
                x["u"], x["kernel"], reverse_kernel=x["reverse"], cu_seqlens=bounds(x), backend=backend
            ),
            "kernel", "reverse",
        ),
        case(
            "diagonal_scan", "packed, state, backwards",
            {"a": (100, 2), "b": (1, length, 100, 2), "state": (count, 100, 2)}, scan, "a", "b", "state",
        ),
    ]  # fmt: skip


def cases(small: bool) -> list[Case]:
    """Return every case; small ones run on a CPU within seconds."""
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


def checked_cases(small: bool) -> list[Case]:
    """Return shapes that together use every configuration and are no multiples of a tile."""
    if small:
        return cases(True)
    found = _packed_cases()
    found += [_short_conv(3, 1013, 200, taps) for taps in (1, 3, 9)]
    found += [_linear_attention(2, length, heads, width) for length, heads, width in _ODD_HEADS]
    found += [_normed_linear_attention(2, 1013, 3, width) for width in (16, 60, 200)]
    found += [_local_attention(2, 997, 3, width, 100) for width in (32, 64, 96, 128, 256)]
    found += [_s4_kernel(60, size, 3001, filters) for size, filters in ((16, 1), (64, 1), (64, 2), (10, 5))]
    found += [_ssm_step(3, 101, size, 3, low_rank=size != 30) for size in (2, 10, 30, 64, 200)]
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
