"""Cases of diagonal_scan, s4_kernel and ssm_step."""

import importlib
import math

import torch
from torch import Tensor

import benchmarks.kernels_alone  # noqa: F401
from benchmarks.gpu_cases.case import Case, Function, Tensors, normal
from hf_hybrid.kernels.diagonal_scan import diagonal_scan
from hf_hybrid.kernels.ssm_kernel import S4DStep, S4Step, dplr_legs, s4_kernel, ssm_step


def scan(batch: int, length: int, states: int) -> Case:
    """A scan of complex states."""

    def make(device: torch.device) -> Tensors:
        radius, angle = 1 - torch.rand(states, device=device) / 10, 3 * torch.rand(states, device=device)
        return {
            "a": torch.view_as_real(torch.polar(radius, angle)),
            "b": normal(device, batch, length, states, 2),
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


def real_scan(batch: int, length: int, states: int) -> Case:
    """A scan of real states."""

    def make(device: torch.device) -> Tensors:
        return {"a": 1 - torch.rand(states, device=device) / 10, "b": normal(device, batch, length, states)}

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


def kernel(width: int, size: int, length: int, filters: int = 1) -> Case:
    """Taps of S4's kernel."""

    def make(device: torch.device) -> Tensors:
        w, P, B = (torch.view_as_real(x.to(torch.complex64)).to(device) for x in dplr_legs(size))
        return {
            "C": normal(device, filters, width, size // 2, 2),
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


def step(batch: int, width: int, size: int, filters: int, *, low_rank: bool = True) -> Case:
    """One token of S4, or of S4D without the low-rank part."""
    names = ("decay", "column", "row", "input") if low_rank else ("decay", "input")
    modes = size // 2

    def make(device: torch.device) -> Tensors:
        angles = 3 * torch.rand(width, modes, device=device)
        constants = {name: normal(device, width, modes, 2, scale=modes**-0.5) for name in names}
        constants["decay"] = torch.view_as_real(torch.polar(torch.full_like(angles, 0.9), angles))
        return {
            "state": normal(device, batch, width, modes, 2),
            "u": normal(device, batch, width),
            "C": normal(device, filters, width, modes, 2),
            "skip": normal(device, filters, width),
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
