"""Cases of short_conv and long_conv."""

import importlib
import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

import benchmarks.kernels_alone  # noqa: F401
from benchmarks.gpu_cases.case import Case, Function, Tensors, normal
from hf_hybrid.kernels.long_conv import long_conv
from hf_hybrid.kernels.short_conv import short_conv


def short(batch: int, length: int, width: int, taps: int) -> Case:
    """A causal convolution with a few taps and SiLU."""

    def make(device: torch.device) -> Tensors:
        return {
            "u": normal(device, batch, length, width),
            "kernel": normal(device, width, taps, scale=taps**-0.5),
            "bias": normal(device, width),
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


def long(batch: int, length: int, width: int, groups: int | None = None) -> Case:
    """A convolution with a skip connection, and with gates and activation if channels share taps."""
    rows = width if groups is None else groups

    def make(device: torch.device) -> Tensors:
        decay = torch.exp(-torch.linspace(0, 8, length, device=device))
        inputs = {
            "u": normal(device, batch, length, width),
            "kernel": normal(device, rows, length) * decay,
            "skip": normal(device, width),
        }
        if groups is None:
            return inputs
        return inputs | {name: normal(device, batch, length, width) for name in ("input_gate", "gate")}

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
