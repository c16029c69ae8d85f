"""Tests that run Triton's kernels without a GPU, in Triton's interpreter.

Whether triton interprets is settled when it is imported, and an interpreting process cannot compile anything. So these
tests run in a second process, one per test run, in which the interpreter is on. It needs nothing but the standard
library here, because the switch must be set before torch is imported.
"""

import atexit
import functools
import importlib
import multiprocessing
import os
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from typing import Any

_pool: ProcessPoolExecutor | None = None


def interpreted(test: Callable[..., None]) -> Callable[..., None]:
    """Run a test function where Triton's kernels are interpreted; its parameters must be picklable; no fixtures."""

    @functools.wraps(test)
    def run(**parameters: Any) -> None:
        global _pool
        if _pool is None:
            context = multiprocessing.get_context("spawn")
            _pool = ProcessPoolExecutor(1, mp_context=context, initializer=_switch_on)
            atexit.register(_pool.shutdown)
        _pool.submit(_call, test.__module__, test.__name__, parameters).result()

    return run


def _switch_on() -> None:
    os.environ["TRITON_INTERPRET"] = "1"
    os.environ["HF_HYBRID_BACKEND"] = "triton"  # raises where a kernel cannot run, so that none is tested by mistake

    import torch

    torch.set_num_threads(1)
    # what torch.empty returns holds NaN, so that an unwritten result shows
    torch.use_deterministic_algorithms(True)
    # a division by zero or an overflow of numpy is the kernel's own, whose results are compared
    import numpy as np

    np.seterr(all="ignore")
    _prepare_once_per_launch()


def _prepare_once_per_launch() -> None:
    """Triton exchanges its language for numpy's at a launch, and in vain at each call in it: a quarter of its time."""
    from triton.runtime import interpreter

    exchange, launch = interpreter._patch_lang, interpreter.GridExecutor.__call__
    done: set[str] = set()

    def exchange_once(function: Any) -> Any:
        if function.__module__ in done:
            return interpreter._LangPatchScope()
        done.add(function.__module__)
        return exchange(function)

    def launch_anew(self: Any, *args: Any, **kwargs: Any) -> None:
        done.clear()
        launch(self, *args, **kwargs)

    interpreter._patch_lang, interpreter.GridExecutor.__call__ = exchange_once, launch_anew


def _call(module: str, name: str, parameters: dict[str, Any]) -> None:
    getattr(importlib.import_module(module), name).__wrapped__(**parameters)
