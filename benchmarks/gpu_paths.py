"""Which code a model or an op has run; libraries fall back to slower code without a word."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

import benchmarks.kernels_alone  # noqa: F401
from hf_hybrid.kernels import launching

Key = tuple[str, str, int]  # op, configuration, compute capability times 10

_ATTENTION = re.compile(r"ScaledDotProduct(\w+?)Backward\d*$")


class _Asked(dict):  # type: ignore[type-arg]
    """A table without entries that notes what is looked up."""

    def __init__(self) -> None:
        super().__init__()
        self.keys_asked: dict[Key, None] = {}

    def get(self, key: Any, default: Any = None) -> Any:
        self.keys_asked[key] = None
        return default


@contextmanager
def launched() -> Iterator[dict[Key, None]]:
    """Gather the configurations of Triton kernels that are launched inside the ``with`` block, as the default."""
    asked = _Asked()
    before, launching.TUNED = launching.TUNED, asked
    try:
        yield asked.keys_asked
    finally:
        launching.TUNED = before


def code_of(result: torch.Tensor) -> list[str]:
    """Return which code computed a result, beside torch's usual operations, from the graph of its gradients.

    These are the kernels of torch's attention, and other packages' functions with gradients of their own, with the
    package that they came from. Ours are left out: see `launched`.
    """
    found: dict[str, None] = {}
    seen: set[Any] = set()
    waiting = [result.grad_fn]
    while waiting:
        node: Any = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        waiting += [other for other, _ in node.next_functions]
        function = getattr(node, "_forward_cls", None)
        package = function.__module__.split(".")[0] if function is not None else ""
        if attention := _ATTENTION.search(node.name()):
            found[f"SDPA {attention[1]}"] = None
        elif "GeneratedBackwardFor_" in node.name():  # a custom op
            name = node.name().partition("GeneratedBackwardFor_")[2].removesuffix("Backward")
            found |= {} if name.startswith("hf_hybrid") else {name: None}
        elif package not in ("", "torch", "hf_hybrid"):
            found[f"{package} {function.__name__}"] = None
    return sorted(found)
