"""``hf-hybrid doctor``: Versions, devices, and which operations run on Triton here and why others do not."""

import argparse
import os
import platform
from collections.abc import Callable, Sequence
from importlib import metadata

import torch

from hf_hybrid.kernels import (
    diagonal_scan,
    linear_attention,
    local_attention,
    long_conv,
    segment_recurrence,
    short_conv,
    use_backend,
)
from hf_hybrid.kernels.dispatch import BACKEND_VARIABLE, why_not_on
from hf_hybrid.kernels.ssm_kernel import s4_kernel
from hf_hybrid.version import __version__

_PACKAGES = {
    "needed": ("torch", "transformers", "triton", "accelerate", "datasets", "evaluate", "peft", "tokenizers"),
    "optional": ("pypdf", "python-docx", "beautifulsoup4", "gradio", "deepspeed", "tensorboard", "wandb"),
}
_VARIABLES = (BACKEND_VARIABLE, "CUDA_VISIBLE_DEVICES", "HF_HOME", "HF_HUB_OFFLINE", "OMP_NUM_THREADS")
_T, _H, _K, _D, _N = 40, 2, 16, 8, 8


def _random(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


def _s4(device: torch.device) -> torch.Tensor:
    B, P = (torch.complex(_random(_D, _N), _random(_D, _N)).to(device) for _ in range(2))
    C = torch.complex(_random(1, _D, _N), _random(1, _D, _N)).to(device)
    w = torch.complex(-_random(_D, _N).abs() - 0.1, _random(_D, _N)).to(device)
    return s4_kernel(C, B, P, w, torch.full((_D,), 0.1, device=device), _T)


_CALLS: dict[str, Callable[[torch.device], torch.Tensor]] = {
    "local attention": lambda device: local_attention(*[_random(1, _T, _H, _K).to(device)] * 3, radius=7),
    "linear attention": lambda device: linear_attention(*[_random(1, _T, _H, _K).to(device)] * 3)[0],
    "short convolution": lambda device: short_conv(_random(1, _T, _D).to(device), _random(_D, 3).to(device))[0],
    "long convolution": lambda device: long_conv(_random(1, _T, _D).to(device), _random(_D, _T).to(device)),
    "S4's taps": _s4,
    "S5's scan": lambda device: diagonal_scan(torch.full((_D,), 0.9).to(device), _random(1, _T, _D).to(device))[0],
    "segment recurrence": lambda device: segment_recurrence(*[_random(1, _H, 4, 8, _K).to(device)] * 2),
}
"""A small call of each operation that has Triton kernels."""


def main(argv: Sequence[str] | None = None) -> int:
    """Print the report.

    Args:
        argv: Nothing but ``--help``.

    Returns:
        0, or 1 if an operation gives other numbers on Triton than on torch, or fails.
    """
    argparse.ArgumentParser("hf-hybrid doctor", description=__doc__.partition(": ")[2]).parse_args(argv)
    print(f"hf_hybrid {__version__}, Python {platform.python_version()}, {platform.platform()}")
    for kind, names in _PACKAGES.items():
        print(f"packages, {kind}: {', '.join(f'{name} {_version(name)}' for name in names)}")
    print(f"CPU: {os.cpu_count()} cores, {torch.get_num_threads()} threads of torch")
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        capability = f"compute capability {properties.major}.{properties.minor}"
        print(f"cuda:{index}: {properties.name}, {capability}, {properties.total_memory / 2**30:.1f} GiB")
    if not torch.cuda.is_available():
        print("CUDA: torch sees no device")
    for name in _VARIABLES:
        if name in os.environ:
            print(f"{name}={os.environ[name]}")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    lines = [_operation(name, call, device) for name, call in _CALLS.items()]
    print("\n".join(f"{name}: {line}" for name, line in zip(_CALLS, lines, strict=True)))
    return int(any(line.startswith("FAILS") for line in lines))


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "-"


def _operation(name: str, call: Callable[[torch.device], torch.Tensor], device: torch.device) -> str:
    """Say on what an operation runs here; on Triton, compare its numbers with torch's."""
    try:
        with use_backend("torch"):
            wanted = call(device)
        if os.environ.get(BACKEND_VARIABLE) == "torch":
            return f"torch ({BACKEND_VARIABLE} says so)"
        if (reason := why_not_on(device)) is not None:
            return f"torch ({reason})"
        with use_backend("triton"):
            got = call(device)
    except Exception as error:  # of a compiler, a driver: anything
        return f"FAILS with {type(error).__name__}: {' '.join(str(error).split())[:300]}"
    difference = float((got - wanted).abs().max() / wanted.abs().max())
    if difference > 1e-3:
        return f"FAILS: Triton and torch differ by {difference:.1e} of the largest number"
    return f"Triton (differs from torch by {difference:.1e} of the largest number)"
