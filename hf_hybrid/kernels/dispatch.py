"""Choose which implementation of an op runs.

``"auto"`` runs Triton if every tensor is on one CUDA device (or Triton's interpreter is on) and the op's
``why_not_triton`` finds no objection, and torch otherwise. ``"torch"`` always runs. ``"triton"`` runs or raises with
the objection.

An op chooses inside its custom op, which tracers skip, because the choice reads the environment and logs. It imports
its Triton kernels, and triton, only when the answer is ``"triton"``.
"""

import importlib
import importlib.util
import logging
import os
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import ModuleType

import torch

from .checks import check_choice
from .launching import records_launches

BACKENDS = ("auto", "torch", "triton")
BACKEND_VARIABLE = "HF_HYBRID_BACKEND"

NAMESPACE = re.sub(r"\W", lambda c: f"_{ord(c[0]):x}_", __package__.removesuffix(".kernels"), flags=re.ASCII)
"""Namespace of the custom ops: hf_hybrid, or another one in a copy of this code that a checkpoint brings."""

HAS_KERNELS = importlib.util.find_spec(f"{__package__}.triton_kernels") is not None
"""Whether the Triton kernels exist; a copy of this code that a checkpoint brings has none."""

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
"""Whether Triton interprets its kernels; it reads the variable when imported."""

logger = logging.getLogger(__name__)
_forced: str | None = None
_told: set[tuple[str, str]] = set()


def _check_name(name: str, source: str) -> str:
    check_choice(source, name, BACKENDS)
    return name


@contextmanager
def use_backend(backend: str) -> Iterator[None]:
    """Run every op inside the ``with`` block on one backend, whatever its ``backend`` argument.

    This holds in all threads of the process, since a backward may run in another one. A backward after the block
    keeps the choice of its forward, unless it was compiled: compiled code does not contain the choice.

    Args:
        backend: ``"auto"``, ``"torch"`` or ``"triton"``.

    Raises:
        ValueError: The name is unknown.
    """
    global _forced
    before, _forced = _forced, _check_name(backend, "backend")
    try:
        yield
    finally:
        _forced = before


def wished_backend(backend: str) -> str:
    """Return the backend of a surrounding `use_backend`, or else the call's own, for a backward that runs later.

    While compiling, return the call's own, so that compiled code does not freeze `use_backend`.
    """
    own = _check_name(backend, "backend")
    return own if torch.compiler.is_compiling() else _forced or own


def forces_triton(backend: str) -> bool:
    """Return whether a call requires Triton, so that it must not take a shortcut in plain torch.

    While compiling, only the call's own argument counts, not `use_backend` or the environment.
    """
    wish = wished_backend(backend)
    if wish == "auto" and not torch.compiler.is_compiling():
        wish = os.environ.get(BACKEND_VARIABLE, wish)
    return wish == "triton"


def may_run_triton(backend: str, x: torch.Tensor) -> bool:
    """Return whether a call should use its custom op, where plain torch would be as fast without it."""
    return x.is_cuda or INTERPRETED or forces_triton(backend)


def needs_gradient(op: str, backend: str, *tensors: torch.Tensor | None) -> bool:
    """Return whether plain torch must run because the call needs a gradient that the kernel lacks.

    Raises:
        ValueError: The call requires Triton.
    """
    if not torch.is_grad_enabled():
        return False
    given = [x for x in tensors if x is not None]
    if not any(x.requires_grad for x in given):
        return False
    reason = "a gradient is needed, and the kernel has none"
    if forces_triton(backend):
        raise ValueError(f"{op} cannot run on triton: {reason}")
    if not torch.compiler.is_compiling():
        choose_backend(op, backend, given, lambda: reason)  # logs the reason once
    return True


def exports_to_onnx() -> bool:
    """Return whether torch exports the call to ONNX, which has neither custom ops nor complex numbers."""
    return torch.compiler.is_exporting() and torch.onnx.is_in_onnx_export()  # the first is quick


# dynamo, with which torch.onnx tries again what fails, would take the answer for False. What
# `torch.compiler.assume_constant_result` does, without its import of dynamo
vars(exports_to_onnx)["_dynamo_marked_constant"] = True


def exports_any(length: int) -> bool:
    """Return whether torch.export traces a call for any length, so that no branch may depend on it."""
    return torch.compiler.is_exporting() and isinstance(length, torch.SymInt)


def _why_not_device(tensors: list[torch.Tensor]) -> str | None:
    if not HAS_KERNELS:
        return "this copy of the code has no Triton kernels"
    interpreted = INTERPRETED or records_launches()
    # first, since looking for triton takes longer than a small op on a CPU
    if not interpreted and not all(tensor.is_cuda for tensor in tensors):
        return "not every tensor is on a CUDA device"
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    if interpreted:
        return None
    if len({tensor.device for tensor in tensors}) > 1:
        return f"the tensors must be on one device; got {', '.join(sorted({str(x.device) for x in tensors}))}"
    if torch.version.hip is not None:
        return "the kernels are written for NVIDIA devices"
    capability = torch.cuda.get_device_capability(tensors[0].device)
    if capability < (8, 0):
        return f"the kernels need compute capability 8.0 or later; got {capability[0]}.{capability[1]}"
    return None


def why_not_on(device: torch.device) -> str | None:
    """Return why no Triton kernel can run on a device, whatever it computes; None if one can."""
    return _why_not_device([torch.empty(0, device=device)])


def choose_backend(
    op: str, backend: str, tensors: Iterable[torch.Tensor | None], why_not_triton: Callable[[], str | None]
) -> str:
    """Return ``"torch"`` or ``"triton"`` for one call of an op.

    Args:
        op: Name of the op, for messages.
        backend: The call's argument. A surrounding `use_backend` overrides it, and the environment variable
            ``HF_HYBRID_BACKEND`` replaces ``"auto"``.
        tensors: All of the call's tensors; None for omitted ones.
        why_not_triton: Returns the op's objection to Triton, or None.

    Raises:
        ValueError: The name is unknown, or Triton is required and cannot run; the message gives the reason.
    """
    wish = wished_backend(backend)
    if wish == "auto":
        wish = _check_name(os.environ.get(BACKEND_VARIABLE, "auto"), BACKEND_VARIABLE)
    if wish == "torch":
        return "torch"
    no_device = _why_not_device([x for x in tensors if x is not None])
    objection = no_device or why_not_triton()
    if wish == "triton" and objection is not None:
        raise ValueError(f"{op} cannot run on triton: {objection}")
    chosen = "triton" if objection is None else "torch"
    reason = objection or "every tensor is on a CUDA device"
    if (op, reason) not in _told:
        _told.add((op, reason))
        # on a CPU everybody expects torch
        level = logging.INFO if objection is not None and no_device is None else logging.DEBUG
        logger.log(level, "%s runs on %s (%s)", op, chosen, reason)
    return chosen


def triton_if_chosen(
    op: str,
    package: str,
    backend: str,
    tensors: Iterable[torch.Tensor | None],
    why_not: Callable[[ModuleType], str | None],
) -> ModuleType | None:
    """Return the module of an op's Triton kernels if they run, and None if torch does.

    Args:
        op: See `choose_backend`.
        package: ``__package__`` of the op's module.
        backend: See `choose_backend`.
        tensors: See `choose_backend`.
        why_not: Maps the kernels' module to the op's objection to Triton, or None.

    Raises:
        ValueError: See `choose_backend`.
    """

    def kernels() -> ModuleType:
        return importlib.import_module(f"{package}.triton_kernels")

    return kernels() if choose_backend(op, backend, tensors, lambda: why_not(kernels())) == "triton" else None
