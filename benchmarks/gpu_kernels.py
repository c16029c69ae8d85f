"""Check and time the cases of `benchmarks.gpu_cases`."""

import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, cached_property, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.aot_launches import MODULES
from benchmarks.gpu_cases import Case, Function, Tensors
from benchmarks.record import Row, short_hash
from hf_hybrid.kernels.dispatch import INTERPRETED
from hf_hybrid.kernels.tuned import TUNED

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}

KERNELS = Path(__file__).parents[1] / "hf_hybrid" / "kernels"


@cache
def fingerprint(op: str = "", folder: Path = KERNELS, *, tuned: bool = True) -> str:
    """Return a hash of the Triton kernels' code and of their tables of configurations.

    Args:
        op: One op, whose steps share a folder with it; all if empty.
        folder: The folder of all kernels.
        tuned: Whether the configurations count that this process has from the tuner's table.
    """
    own = MODULES[op].split(".")[0] if op else ""
    files = [folder / "triton_kernels.py"] if op else []
    files += sorted((folder / own).rglob("triton_kernels.py"))
    found = [(key, x) for key, x in sorted(TUNED.items()) if tuned and own in ("", MODULES[key[0]].split(".")[0])]
    return short_hash([[file.read_text(encoding="utf-8") for file in files], found])


def place(case: Case, dtype: str) -> Row:
    """Return what names the cells of a case in a dtype."""
    return {"op": case.op, "shape": case.shape, "dtype": dtype, "fingerprint": fingerprint(op_of(case))}


_OP_OF_CASE = {"s4_kernel": "ssm_kernel"}


def op_of(case: Case) -> str:
    """Return the op of a case as the tables of configurations name it."""
    return _OP_OF_CASE.get(case.op, case.op)


# outcomes


def kernels_are_due(device: torch.device) -> bool:
    """Return whether Triton's kernels must run: on a GPU and in Triton's interpreter. Elsewhere they cannot."""
    return device.type == "cuda" or INTERPRETED


def own_outcome(error: Exception, device: torch.device) -> str:
    """Return the outcome of an op of ours that did not run; it is a failure, but for a refusal where none is due."""
    said = str(error)
    if isinstance(error, ValueError) and "cannot run on triton" in said:
        return f"{'refused: ' if kernels_are_due(device) else ''}{said.split(': ', 1)[1]}"
    return f"raised: {error_line(error)}"


def peer_outcome(error: Exception) -> str:
    """Return the outcome of a peer that did not run, which is a result and no failure."""
    return f"not installed: {error}"[:160] if isinstance(error, ImportError) else error_line(error)


def error_line(error: Exception) -> str:
    """Return an error's type and the first line of its message."""
    return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"[:160]


# correctness


# relative error allowed for a dtype's rounding, even if torch is more exact
_EXCUSED = {"fp32": 1e-5, "bf16": 1e-2, "fp16": 2e-3}


def make_inputs(case: Case, device: torch.device, dtype: torch.dtype, seed: int) -> Tensors:
    """Draw a case's inputs, in a dtype but for those that are always wide."""
    torch.manual_seed(seed)
    drawn = case.make(device)
    inputs = {name: (x if name in case.wide else x.to(dtype)).detach() for name, x in drawn.items()}
    return {name: x.requires_grad_(not case.decodes) for name, x in inputs.items()}


def results_of(function: Callable[[Tensors], Any], inputs: Tensors, weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return all outputs and the gradients of their weighted sum; draws missing weights."""
    outputs = function(inputs)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    found = {f"output {n}" if n else "output": output for n, output in enumerate(outputs)}
    for name, output in found.items():
        if name not in weights:
            weights[name] = torch.randn_like(output)
    own = [weights[name].to(output.dtype) for name, output in found.items()]
    grads: tuple[Tensor, ...] = ()
    if any(output.requires_grad for output in outputs):
        grads = torch.autograd.grad(outputs, list(inputs.values()), own)
    found = {name: output.detach() for name, output in found.items()}
    return found | dict(zip((f"d{name}" for name in inputs), grads, strict=False))


def relative_error(actual: Tensor, expected: Tensor, least: float = 1e-30) -> float:
    """Return the norm of a difference over that of what is expected, or over the least one that counts."""
    if not actual.isfinite().all():
        return math.inf
    return ((actual.double() - expected).norm() / expected.norm().clamp_min(least)).item()


@dataclass
class Expected:
    """What an op must compute in one dtype.

    Attributes:
        case: The op at a shape.
        dtype: Name of its inputs' dtype.
        inputs: The inputs.
        weights: What the outputs are multiplied with before their sum, whose gradients are taken.
        results: All outputs and gradients of the torch path in float64, by name.
        allowed: The relative error that each may have.
    """

    case: Case
    dtype: str
    inputs: Tensors
    weights: dict[str, Tensor]
    results: dict[str, Tensor]
    allowed: dict[str, float]


def expect(case: Case, dtype: str, device: torch.device) -> Expected:
    """Compute a case in float64, of inputs that are rounded to the dtype."""
    weights: dict[str, Tensor] = {}
    inputs = make_inputs(case, device, DTYPES[dtype], seed=1)
    exact = {name: x.detach().double().requires_grad_(x.requires_grad) for name, x in inputs.items()}
    results = results_of(lambda x: case.run(x, "torch"), exact, weights)
    return Expected(case, dtype, inputs, weights, results, dict.fromkeys(results, _EXCUSED[dtype]))


def compare(expected: Expected, backend: str) -> Row:
    """Run a backend twice and return its largest error and the outcome: "ok", or what is wrong.

    An error may be three times that of the torch path in the same dtype, if that was compared before.
    """
    wanted, allowed = expected.results, expected.allowed
    found, again = (
        results_of(lambda x: expected.case.run(x, backend), expected.inputs, expected.weights) for _ in range(2)
    )
    errors = {name: relative_error(found[name], wanted[name]) for name in wanted}
    moved = [name for name in found if not torch.equal(found[name], again[name])]
    if backend == "torch":
        allowed |= {name: max(3 * error, allowed[name]) for name, error in errors.items()}
    worst = max(errors, key=lambda name: errors[name] / allowed[name])
    wrong = [name for name, error in errors.items() if not error <= allowed[name]]
    problems = [f"wrong: {', '.join(wrong)}"] if wrong else []
    problems += [f"not the same twice: {', '.join(moved)}"] if moved else []
    return {
        "worst": worst,
        "error": f"{errors[worst]:.2e}",
        "allowed": f"{allowed[worst]:.2e}",
        "outcome": "; ".join(problems) or "ok",
    }


def check(case: Case, dtype: str, device: torch.device, backends: tuple[str, ...]) -> Iterator[Row]:
    """Compare an op's output and gradients with its torch path in float64, and two runs with each other.

    Devices may raise late, so each backend's work is synchronised before the next begins.

    Yields:
        A row for each backend that takes the case, or one that says why it does not.
    """
    row = {"op": case.op, "shape": case.shape, "dtype": dtype}
    try:
        expected = expect(case, dtype, device)
    except Exception as error:
        yield row | {"backend": "float64", "outcome": f"raised: {error_line(error)}"}
        return
    for backend in backends:
        try:
            found = compare(expected, backend)
        except Exception as error:
            found = {"outcome": own_outcome(error, device)}
        yield row | {"backend": backend} | found


def dtypes_of(case: Case) -> Sequence[str]:
    """Return the dtypes in which a case is checked: one if all of its inputs stay float32."""
    everything_wide = set(case.make(torch.device("cpu"))) <= set(case.wide)
    return ("fp32",) if everything_wide else tuple(DTYPES)


# time


OURS = "hf_hybrid"
"""How the names of our contenders begin."""

_LEAD = 2_000_000
"""Clock cycles, about a millisecond, that a GPU waits at least while the host launches the timed work."""
_LONGEST_LEAD = 200_000_000
_ENOUGH = 2e3
"""Milliseconds for timing one contender: slow peers would take the time of a call."""


class Clock:
    """Times contenders in turn, with a cleared cache, in milliseconds; wall time on a CPU."""

    def __init__(self, device: torch.device):
        self.device = device
        self.cache = torch.empty(1 << 28 if device.type == "cuda" else 1, dtype=torch.uint8, device=device)

    def once(self, function: Callable[[], object], lead: int = _LEAD) -> float:
        """Time one call, after so many cycles in which the host launches it."""
        self.cache.zero_()
        if self.device.type != "cuda":
            start = time.perf_counter()
            function()
            return 1e3 * (time.perf_counter() - start)
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(lead)  # otherwise short kernels would be timed by the host's work
        begin.record()
        function()
        end.record()
        torch.cuda.synchronize()
        return float(begin.elapsed_time(end))

    def interleaved(
        self, functions: dict[str, Callable[[], object]], rounds: int, *, warm_ups: int = 3, alone: bool = False
    ) -> dict[str, float]:
        """Return medians over rounds in which every contender has its turn, after warm-up rounds.

        What has taken `_ENOUGH` in three rounds or more is left out of the others.

        Args:
            functions: The contenders.
            rounds: How many rounds count.
            warm_ups: How many rounds do not.
            alone: Whether only the device's time counts, however long the host takes to launch a call.
        """
        leads = {name: self.lead_of(function) if alone else _LEAD for name, function in functions.items()}
        times: dict[str, list[float]] = {name: [] for name in functions}
        for number in range(rounds + warm_ups):
            for name, function in functions.items():
                if len(times[name]) >= 3 and sum(times[name]) > _ENOUGH:
                    continue
                spent = self.once(function, leads[name])
                if number >= warm_ups:
                    times[name].append(spent)
        return {name: statistics.median(spent) for name, spent in times.items()}

    def lead_of(self, function: Callable[[], object]) -> int:
        """Return the cycles in which the host launches a call, with some to spare."""
        if self.device.type != "cuda":
            return _LEAD
        seconds = []
        for _ in range(3):
            torch.cuda.synchronize()
            start = time.perf_counter()
            function()
            seconds.append(time.perf_counter() - start)
        torch.cuda.synchronize()
        return min(_LONGEST_LEAD, max(_LEAD, round(3 * statistics.median(seconds) * self.hertz)))

    @cached_property
    def hertz(self) -> float:
        """Cycles per second."""
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(_LEAD)
        begin.record()
        torch.cuda._sleep(10 * _LEAD)
        end.record()
        torch.cuda.synchronize()
        return 1e3 * 10 * _LEAD / float(begin.elapsed_time(end))

    def peak(self, function: Callable[[], object]) -> float | None:
        """Return the MiB that a call allocates at its peak."""
        if self.device.type != "cuda":
            return None
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats(self.device)
        before = torch.cuda.memory_allocated(self.device)
        function()
        torch.cuda.synchronize()
        return (torch.cuda.max_memory_allocated(self.device) - before) / 2**20


def measure_ceilings(clock: Clock, small: bool) -> Row:
    """Return bytes per second of a copy (read and write) and operations per second of products in each dtype."""
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
    """Return the larger of the times for bytes and for operations, in a forward or with its backward."""
    forward, backward, operations = case.floor
    # results have the dtype of most inputs
    width = 4 if dtype == "fp32" or case.op in ("s4_kernel", "ssm_step") or "b" in case.wide else 2
    moved = width * (forward + (backward if both else 0)) / float(ceilings["copy_gbs"]) / 1e6
    operations *= 1 + (case.backward if both else 0)
    return max(moved, operations / float(ceilings[f"{case.arithmetic or dtype}_tflops"]) / 1e9)


class NeedsGpu(ValueError):
    """What was asked for is there on a GPU only."""


def in_graph(function: Callable[[], object], device: torch.device) -> Callable[[], object]:
    """Capture a call in a CUDA graph and return a function that replays it.

    Raises:
        NeedsGpu: The device is none.
    """
    if device.type != "cuda":
        raise NeedsGpu("CUDA graphs need a GPU")
    side = torch.cuda.Stream(device)
    side.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(side):
        for _ in range(3):  # compile and allocate before the capture
            function()
    torch.cuda.current_stream(device).wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        function()
    return graph.replay


def _contenders(case: Case, device: torch.device, outcome: Row) -> dict[str, Function]:
    """Return our backends and the peers that are there, by name; the others get an outcome."""
    found: dict[str, Function] = {
        f"{OURS}, triton": lambda x: first_output(case.run(x, "triton")),
        f"{OURS}, torch": lambda x: first_output(case.run(x, "torch")),
    }
    for name, peer in case.peers.items():
        try:
            found[name] = peer()
        except Exception as error:
            outcome[name] = _outcome_of(name, error, device)
    return found


def _outcome_of(contender: str, error: Exception, device: torch.device) -> str:
    ours = contender.startswith(OURS) and not isinstance(error, NeedsGpu)
    return own_outcome(error, device) if ours else peer_outcome(error)


def race(case: Case, dtype: str, clock: Clock, ceilings: Row, rounds: int) -> Iterator[Row]:
    """Time an op's backends and peers in turns, forward and with the backward; steps also in CUDA graphs.

    Yields:
        A row for each contender and direction, even if it cannot run. One of ours that cannot is a failure, but for
        Triton where there is no GPU; a peer is not.
    """
    inputs = make_inputs(case, clock.device, DTYPES[dtype], seed=2)
    outcome: Row = {}
    contenders = _contenders(case, clock.device, outcome)

    def there_and_back(function: Function, weight: Tensor) -> object:
        return torch.autograd.grad(function(inputs), list(inputs.values()), weight, allow_unused=True)

    forward: dict[str, Callable[[], object]] = {}
    both: dict[str, Callable[[], object]] = {}
    for name, function in contenders.items():
        try:
            weight = torch.randn_like(function(inputs).detach())  # in its dtype, so that no contender casts it
            calls = partial(function, inputs), partial(there_and_back, function, weight)
            for call in calls[: 1 if case.decodes else 2]:
                clock.once(call)
        except Exception as error:
            outcome[name] = _outcome_of(name, error, clock.device)
            continue
        forward[name], both[name] = calls
    for name, call in list(forward.items()) if case.decodes else ():
        name = f"{name}, CUDA graph"
        try:
            forward[name] = in_graph(call, clock.device)
        except Exception as error:
            outcome[name] = _outcome_of(name, error, clock.device)
    directions = (("forward", forward), ("forward and backward", both))
    for direction, functions in directions[: 1 if case.decodes else 2]:
        peaks = {name: clock.peak(function) for name, function in functions.items()}
        times = clock.interleaved(functions, rounds, alone=True)
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


def first_output(outputs: Any) -> Tensor:
    """Return the first of an op's outputs, or its only one."""
    return outputs[0] if isinstance(outputs, tuple) else outputs
