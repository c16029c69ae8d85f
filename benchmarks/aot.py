"""Compile the Triton kernels ahead of time, without a GPU, and check the machine code.

    python -m benchmarks.aot --output benchmarks/results/aot    # everything, in a quarter of an hour
    python -m benchmarks.aot --few                              # what the tests need, in minutes

The ops record their launches on tensors without memory, so what is compiled is what a GPU would run: the same types,
constants and divisibility by 16. Each launch is compiled for each architecture, and its machine code is searched for
spilled registers, tensor core instructions and atomics. `LIMITS` says what is allowed. If all configurations of an op
pass, `COMPILED` gets a fingerprint of the op's code, so that tests notice a kernel that has changed since; `make
test-full` compiles them again, and `make aot-matrix` does so with other versions of Triton.

Needs only torch (any build) and triton.
"""

import argparse
import ast
import hashlib
import importlib
import inspect
import json
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import torch

import benchmarks.kernels_alone  # noqa: F401
from hf_hybrid.kernels.launching import Launch, record_launches

ARCHITECTURES = (80, 90)
"""Compute capabilities times 10: A100, H100 and H200."""
COMPILED = Path("benchmarks/results/aot/compiled.json")
"""Op -> fingerprint of the code that passed; path from the repository root."""


class Card(NamedTuple):
    """Resources of one multiprocessor: bytes of shared memory, and registers."""

    shared: int
    registers: int


CARDS = {
    80: Card(163 << 10, 65536),
    86: Card(99 << 10, 65536),
    89: Card(99 << 10, 65536),
    90: Card(227 << 10, 65536),
    100: Card(227 << 10, 65536),
    120: Card(99 << 10, 65536),
}


class Limit(NamedTuple):
    """Requirements for a kernel's machine code, besides no spilled register and no atomics.

    Attributes:
        tensor_cores: Whether its products must run on tensor cores.
        warps: Least number of warps that a multiprocessor can hold, to hide memory latency.
        reason: Why this many.
    """

    tensor_cores: bool
    warps: int
    reason: str


# op -> the folder of its kernels
MODULES = {
    "diagonal_scan": "diagonal_scan",
    "linear_attention": "linear_attention",
    "local_attention": "local_attention",
    "local_attention_step": "local_attention.step",
    "long_conv": "long_conv",
    "segment_recurrence": "segment_recurrence",
    "segment_step": "segment_recurrence.step",
    "short_conv": "short_conv",
    "ssm_kernel": "ssm_kernel",
    "ssm_step": "ssm_kernel.step",
}


def shipped(op: str) -> list[str]:
    """Return the names of an op's configurations."""
    module = importlib.import_module(f"hf_hybrid.kernels.{MODULES[op]}.triton_kernels")
    return [configuration.name for configuration in module.CONFIGURATIONS.values()]


# kernel -> limit
LIMITS = {
    "diagonal_scan.ends": Limit(False, 24, "bound by memory, with 16 loads in flight per warp, and little work"),
    "diagonal_scan.carry": Limit(False, 24, "a chain of loads; no more than 32 programs of one warp fit"),
    "diagonal_scan.walk": Limit(False, 20, "bound by memory, with up to 16 loads in flight per warp"),
    "short_conv.forward": Limit(False, 12, "bound by memory, with a load per tap in flight in every thread"),
    "short_conv.backward": Limit(False, 8, "16 loads in flight per warp make up for few warps"),
    "linear_attention.sums": Limit(True, 8, "bound by memory, with loads in flight in shared memory"),
    "linear_attention.carry": Limit(False, 32, "a chain of loads"),
    "linear_attention.walk": Limit(
        True, 8, "S and a block of scores in registers: two programs of 4 warps, or one of 8"
    ),
    "linear_attention.norm": Limit(
        False, 16, "bound by memory: tiles of up to 16 rows and 128 columns, of up to four tensors"
    ),
    "long_conv.prologue": Limit(False, 16, "bound by memory"),
    "long_conv.epilogue": Limit(False, 16, "bound by memory"),
    "long_conv.upstream": Limit(False, 16, "bound by memory"),
    "long_conv.downstream": Limit(False, 16, "bound by memory"),
    "long_conv.multiply": Limit(False, 32, "bound by memory"),
    "long_conv.correlate": Limit(False, 32, "bound by memory"),
    "local_attention.forward": Limit(True, 8, "the output and a block of scores in registers"),
    "local_attention.d_query": Limit(True, 8, "a gradient and two blocks of scores in registers"),
    "local_attention.d_key_value": Limit(True, 8, "two gradients and two blocks of scores in registers"),
    "ssm_kernel.forward": Limit(False, 16, "bound by arithmetic, with four chains of it in every thread"),
    "ssm_kernel.backward": Limit(False, 8, "bound by arithmetic, with four chains of it in every thread"),
    "local_attention_step.token": Limit(
        False, 8, "a block of keys, values and sums in registers; few programs anyway"
    ),
    "ssm_step.token": Limit(False, 32, "bound by the launch, then by memory: few numbers per thread"),
    "segment_recurrence.sums": Limit(True, 8, "bound by memory, with loads in flight in shared memory"),
    "segment_recurrence.drive": Limit(True, 8, "two tiles of a state and three parts of W"),
    "segment_recurrence.neurons": Limit(False, 16, "8 loads in flight per warp make up for few warps"),
    "segment_recurrence.unwind": Limit(False, 16, "9 loads in flight per warp make up for few warps"),
    "segment_recurrence.collect": Limit(True, 8, "two tiles of a state and three parts of W"),
    "segment_recurrence.visits": Limit(False, 32, "bound by memory, with one load in flight in every thread"),
    "segment_step.token": Limit(False, 16, "bound by memory, with tiles of keys and values in flight"),
}


class Report(NamedTuple):
    """One launch, compiled for one architecture."""

    kernel: str
    configuration: str
    details: str
    arch: int
    warps: int
    registers: int
    spills: int
    shared: int
    mma: int
    wgmma: int
    copies: int
    atomics: int
    seconds: float

    @property
    def resident_warps(self) -> int:
        """Return the warps of this kernel that a multiprocessor holds, by registers and shared memory."""
        card = CARDS[self.arch]
        by_registers = card.registers // (max(self.registers + 7, 8) // 8 * 8 * 32 * self.warps)
        by_shared = card.shared // (self.shared + 1024)  # each program costs the driver 1 KiB
        return min(64, self.warps * min(by_registers, by_shared))

    def problems(self) -> list[str]:
        """List what breaks `LIMITS`."""
        limit = LIMITS[self.kernel]
        found = []
        if self.arch >= 90 and "bf16" in self.details and limit.tensor_cores and not self.wgmma and self.arch < 100:
            found.append("no tensor core instruction of a whole warp group")
        if self.spills:
            found.append(f"{self.spills} instructions spill registers")
        if self.atomics:
            found.append(f"{self.atomics} atomic instructions: sums are not the same from run to run")
        if self.shared > CARDS[self.arch].shared:
            found.append(f"{self.shared} bytes of shared memory; a multiprocessor has {CARDS[self.arch].shared}")
        if limit.tensor_cores and not (self.mma or self.wgmma):
            found.append("no tensor core instruction")
        if self.resident_warps < limit.warps:
            found.append(f"{self.resident_warps} warps fit on a multiprocessor, below {limit.warps}: {limit.reason}")
        return found


def _meta(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _short_conv(dtype: torch.dtype, taps: int, packed: bool) -> None:
    from hf_hybrid.kernels.short_conv import triton_kernels

    batch, width = 1 if packed else 8, 768
    u = _meta(batch, 4096, width, dtype=dtype)
    cu_seqlens = _meta(9, dtype=torch.int32) if packed else None
    state = _meta(8, taps - 1, width, dtype=dtype)
    arguments = (u, _meta(width, taps), _meta(width), state, cu_seqlens, 0, True)
    triton_kernels.forward(*arguments)
    triton_kernels.backward(u, *arguments, True)


def _linear_attention(dtype: torch.dtype, heads: int, width: int, packed: bool) -> None:
    from hf_hybrid.kernels.linear_attention import triton_kernels

    q = _meta(1 if packed else 2, 16384, heads, width, dtype=dtype)
    state = _meta(2, heads, width, width)
    cu_seqlens = _meta(3, dtype=torch.int32) if packed else None
    triton_kernels.forward(q, q, q, state, cu_seqlens)
    triton_kernels.backward(q.float(), state, q, q, q, state, cu_seqlens)
    _, _, normed, scale = triton_kernels.forward_normed(q, q, q, q, state, cu_seqlens, 1e-6, True)
    triton_kernels.backward_norm(q, normed, scale, q)


def _diagonal_scan(dtype: torch.dtype, packed: bool) -> None:
    from hf_hybrid.kernels.diagonal_scan import triton_kernels

    b = _meta(1 if packed else 8, 4096, 384, dtype=dtype)
    wide = torch.complex64 if dtype.is_complex else torch.float32
    a, state, cu_seqlens = _meta(384, dtype=wide), _meta(8, 384, dtype=wide), None
    if packed:
        cu_seqlens = _meta(9, dtype=torch.int32)
    triton_kernels.forward(a, b, state, cu_seqlens, False, False)
    triton_kernels.backward(b, state, a, b, state, cu_seqlens, False)


def _long_conv(dtype: torch.dtype, around: bool, packed: bool) -> None:
    from hf_hybrid.kernels.long_conv import triton_kernels
    from hf_hybrid.kernels.long_conv.blocks import Around, Block, Sequences, Spectrum

    batch, length, width, n_fft = 1 if packed else 8, 4096, 768, 8192
    u = _meta(batch, length, width, dtype=dtype)
    table = _meta(8, 2, dtype=torch.int32) if packed else None
    block = Block(Sequences(None, table, 0, 8, length, n_fft), slice(0, 8), slice(0, width))
    gate = u if around else None
    things = Around(_meta(width) if around else None, gate, gate, around)
    x = triton_kernels.prologue(u, gate, block, torch.float32)
    spectrum = _meta(8, width, n_fft // 2 + 1, dtype=torch.complex64)
    for adjoint in (False, True):
        factor = triton_kernels.factor(Spectrum(spectrum[0], 0), width, adjoint)
        triton_kernels.multiply(spectrum, factor, spectrum, add=adjoint and not around)
    triton_kernels.correlate(spectrum, spectrum, None, 0)
    triton_kernels.epilogue(x, x, things, block, u)
    if around:
        triton_kernels.upstream(x, x, things, u, block, gate)
    triton_kernels.downstream(x, x, x, gate, things, block, u, gate, trains_skip=around)


def _local_attention(
    dtype: torch.dtype, width: int, chunk_size: int | None, packed: bool, masked: bool, biased: bool, dropout: float
) -> None:
    from hf_hybrid.kernels.local_attention import triton_kernels
    from hf_hybrid.kernels.local_attention.settings import Settings

    q = _meta(1 if packed else 8, 4096, 12, width, dtype=dtype)
    bias = _meta(12, 2 * chunk_size - 1 if chunk_size else 257) if biased else None
    mask = _meta(*q.shape[:2], dtype=torch.bool) if masked else None
    seed = _meta(dtype=torch.int64) if dropout else None
    cu_seqlens = _meta(9, dtype=torch.int32) if packed else None
    settings = Settings(None if chunk_size else 128, chunk_size, False, 0.125, dropout)
    options = (bias, mask, seed, cu_seqlens, settings)
    output, log_sum = triton_kernels.forward(q, q, q, *options)
    triton_kernels.backward(q, output, log_sum, q, q, q, *options)


# chunk_size, packed, masked, biased, dropout; the last has everything that takes registers
_LOCAL_FORMS = (
    (None, False, False, True, 0.0),
    (None, False, True, False, 0.1),
    (512, False, True, False, 0.0),
    (None, True, False, True, 0.1),
    (512, True, True, True, 0.1),
)


def _ssm_kernel(filters: int) -> None:
    from hf_hybrid.kernels.ssm_kernel import triton_kernels

    C, B = _meta(filters, 768, 32, dtype=torch.complex128), _meta(768, 32, dtype=torch.complex128)
    rate = _meta(768, dtype=torch.float64)
    taps = triton_kernels.forward(C, B, B, B, rate, 16384, 0, torch.float32)
    triton_kernels.backward(taps, C, B, B, B, rate, 0)


def _local_attention_step(dtype: torch.dtype, width: int, chunk_size: int | None) -> None:
    from hf_hybrid.kernels.local_attention.settings import StepSettings
    from hf_hybrid.kernels.local_attention.step import triton_kernels

    cache = _meta(8, 12, 4096, width, dtype=dtype).transpose(1, 2)
    position, mask = _meta(1, dtype=torch.int64), _meta(8, 4096, dtype=torch.int64)
    bias = _meta(257 if chunk_size is None else chunk_size, 12).t()
    settings = StepSettings(0, 0, 256 if chunk_size is None else None, chunk_size, chunk_size is not None, 0.125)
    query = _meta(8, 1, 12, width, dtype=dtype)
    triton_kernels.forward(query, cache, cache, bias, mask, position, None, settings)


def _ssm_step(dtype: torch.dtype, modes: int, low_rank: bool) -> None:
    from hf_hybrid.kernels.ssm_kernel.step import triton_kernels

    C, constant = (_meta(*shape, 768, modes, dtype=torch.complex64) for shape in ((4,), ()))
    column, u = constant if low_rank else None, _meta(8, 768, dtype=dtype)
    triton_kernels.forward(_meta(8, 768, modes, 2), u, C, constant, column, column, constant, _meta(4, 768))


def _segment_recurrence(dtype: torch.dtype, width: int, full: bool) -> None:
    from hf_hybrid.kernels.segment_recurrence import triton_kernels

    key = _meta(8, 12, 64, 64, width, dtype=dtype)
    neuron = (_meta(width, width), _meta(1), _meta(1)) if full else (None,) * 3
    visited = _meta(8, 32, dtype=torch.int64) if full else None
    options = (visited, full, 2.0 if full else None)
    states = triton_kernels.forward(key, key, *neuron, *options)
    triton_kernels.backward(states, key, key, *neuron, *options, full)


def _segment_step(dtype: torch.dtype, width: int, full: bool) -> None:
    from hf_hybrid.kernels.segment_recurrence.step import triton_kernels

    key, states = _meta(8, 12, 64, 64, width, dtype=dtype), _meta(8, 12, 32 if full else 64, width, width, dtype=dtype)
    query, norm, sigma = key[:, :, 0, 0], key[:, :, :1, 0], _meta(1) if full else None
    index, visible = _meta(8, 12, dtype=torch.int64), _meta(8, 64, dtype=torch.bool)
    documents = _meta(8, dtype=torch.int64) if full else None
    triton_kernels.forward(query, key, key, states, index, visible, norm, documents, sigma, 0.125)


def recorded(arch: int) -> Iterator[tuple[str, Launch]]:
    """Yield every op with its launches on one architecture, for shapes that together use all configurations."""
    calls: list[tuple[str, Any]] = []
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        for taps, packed in ((9, True), (9, False), (3, False)):
            calls.append(("short_conv", lambda a=(dtype, taps, packed): _short_conv(*a)))
        for around, packed in ((False, False), (False, True), (True, False), (True, True)):
            calls.append(("long_conv", lambda a=(dtype, around, packed): _long_conv(*a)))
        for heads, width, packed in ((4, 128, True), (4, 64, True), (4, 128, False), (4, 64, False), (1, 1024, False)):
            calls.append(("linear_attention", lambda a=(dtype, heads, width, packed): _linear_attention(*a)))
        for width in (64, 128, 256):
            for chunk_size in (None, 512):
                calls.append(("local_attention_step", lambda a=(dtype, width, chunk_size): _local_attention_step(*a)))
        for modes in (8, 32, 256):
            for low_rank in (False, True):
                calls.append(("ssm_step", lambda a=(dtype, modes, low_rank): _ssm_step(*a)))
        # the launch recorded last takes the most registers and represents the others
        for width, full in ((64, False), (256, False), (64, True), (256, True)):
            calls.append(("segment_recurrence", lambda a=(dtype, width, full): _segment_recurrence(*a)))
            calls.append(("segment_step", lambda a=(dtype, width, full): _segment_step(*a)))
        for width in (64, 128, 256):
            for form in _LOCAL_FORMS:
                calls.append(("local_attention", lambda a=(dtype, width, *form): _local_attention(*a)))
    for filters in (1, 2):
        calls.append(("ssm_kernel", lambda a=filters: _ssm_kernel(a)))
    for dtype, packed in ((torch.complex64, True), (torch.bfloat16, True), (torch.complex64, False)):
        calls.append(("diagonal_scan", lambda a=(dtype, packed): _diagonal_scan(*a)))
    for op, call in calls:
        with record_launches(arch) as launches:
            call()
        yield from ((op, launch) for launch in launches)


def distinct_launches(arch: int) -> list[tuple[str, Launch]]:
    """Return the launches of `recorded` that compile to different code."""
    distinct = {}
    for op, launch in recorded(arch):
        kinds = tuple((name, _type(launch.kernel, name, x)) for name, x in launch.arguments.items())
        distinct.setdefault((op, launch.configuration.name, kinds), (op, launch))
    return list(distinct.values())


def representative_launches(arch: int) -> list[tuple[str, Launch]]:
    """Return one launch for each configuration and set of flags, in bfloat16 and float32, packed if possible."""
    last = {}
    for op, launch in distinct_launches(arch):
        if launch.arguments.get("PACKED", True) and _dtype(launch) != "fp16":
            flags = tuple(name for name, x in launch.arguments.items() if x is True or (name == "EPS" and x))
            last[op, launch.configuration.name, _dtype(launch), flags] = op, launch
    return list(last.values())


def fingerprints() -> dict[str, str]:
    """Return op -> hash of its kernels' code, without comments and docstrings, and of its launches."""
    launches: dict[str, list[Any]] = {op: [] for op in MODULES}
    for arch in ARCHITECTURES:
        for op, launch in representative_launches(arch):
            kinds = [_type(launch.kernel, name, x) for name, x in launch.arguments.items()]
            launches[op].append((arch, launch.configuration, kinds))
    found = {}
    for op, module in MODULES.items():
        kernels = importlib.import_module(f"hf_hybrid.kernels.{module}.triton_kernels")
        code = [_code(each) for each in _kernel_modules(kernels)]
        found[op] = hashlib.sha256(repr((code, launches[op])).encode()).hexdigest()[:16]
    return found


def _code(module: ModuleType) -> str:
    """Return a module's source without comments and docstrings."""
    source = inspect.getsource(module)
    lines = source.split("\n")
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            lines[node.lineno - 1 : node.end_lineno] = [""] * ((node.end_lineno or node.lineno) - node.lineno + 1)
    return re.sub(r"(?m)\s*(#.*)?$", "", "\n".join(lines))


def _kernel_modules(module: ModuleType) -> list[ModuleType]:
    """Return a module of kernels and the modules that it takes functions from, by name."""
    found: dict[str, ModuleType] = {}
    left = [module.__name__]
    while left:
        name = left.pop()
        if name not in found and re.fullmatch(r"hf_hybrid\.kernels\.(.+\.)?triton_kernels", name):
            found[name] = importlib.import_module(name)
            values = vars(found[name]).values()
            left += [x.__name__ if inspect.ismodule(x) else str(getattr(x, "__module__", "")) for x in values]
    return [found[name] for name in sorted(found)]


_TOKENS = ("u", "k", "b", "y", "rates", "states", "grad", "ends", "sums", "out", "d_u")


def _dtype(launch: Launch) -> str:
    """Return the dtype of a launch's tokens as Triton writes it."""
    tokens = next(x for name, x in launch.arguments.items() if name in _TOKENS and x is not None)
    return _POINTERS[tokens.dtype].removeprefix("*")


_POINTERS = {
    torch.float32: "*fp32",
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.int32: "*i32",
    torch.int64: "*i64",
    torch.uint8: "*u8",
}


def _type(kernel: Any, name: str, value: Any) -> tuple[str, Any, bool]:
    """Return an argument's type, its value if it is a constant, and whether it is known to be divisible by 16.

    The rules are Triton's: pointers of torch's allocations are divisible, integers are specialised unless the kernel
    forbids it, and the integer 1 and None are constants.
    """
    parameter = next(p for p in kernel.params if p.name == name)
    if isinstance(value, torch.Tensor):
        return _POINTERS[value.dtype], None, True
    looked_at = not parameter.do_not_specialize
    if parameter.is_constexpr or value is None or (looked_at and value == 1):
        return "constexpr", value, False
    if isinstance(value, float):
        return "fp32", None, False
    return "i32", None, looked_at and value % 16 == 0


def compile_for(op: str, launch: Launch, arch: int) -> Report:
    """Compile a launch for one architecture and read its machine code."""
    import triton
    from triton.backends import nvidia
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    started = time.process_time()
    kernel, configuration = launch.kernel, launch.configuration
    signature, constants, attributes = {}, {}, {}
    for index, name in enumerate(kernel.arg_names):
        kind, constant, divisible = _type(kernel, name, launch.arguments[name])
        signature[name] = kind
        if kind == "constexpr":
            constants[index,] = constant
        if divisible:
            attributes[index,] = [["tt.divisibility", 16]]
    source = ASTSource(kernel, signature=signature, constexprs=constants, attrs=attributes)
    options = {"num_warps": configuration.num_warps, "num_stages": configuration.num_stages}
    compiled = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
    tool = str(Path(nvidia.__file__).parent / "bin" / "cuobjdump")
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        resources, code = (
            subprocess.run([tool, option, file.name], capture_output=True, text=True, check=True).stdout
            for option in ("--dump-resource-usage", "--dump-sass")
        )

    def count(pattern: str) -> int:
        return len(re.findall(rf"\b(?:{pattern})\b", code))

    assert count("EXIT"), "the machine code could not be read"
    flags = [name for name, x in launch.arguments.items() if x is True]
    given = ("state", "bias", "kept", "seed", "CHUNK", "column", "EPS")
    flags += [name for name in given if launch.arguments.get(name) is not None]
    sizes = [f"{name}={launch.arguments[name]}" for name in ("K", "J", "M") if name in launch.arguments]
    return Report(
        f"{op}.{configuration.name.split()[0]}",
        configuration.name,
        " ".join([_dtype(launch), *sizes, *flags]),
        arch,
        configuration.num_warps,
        int(re.findall(r"REG:(\d+)", resources)[-1]),
        count("LDL|STL"),
        compiled.metadata.shared,
        count("HMMA|UTCHMMA|UTCQMMA"),
        count("HGMMA"),
        count("LDGSTS|UTMALDG"),
        # on sm_100, atomics on shared memory allocate tensor memory
        count("ATOM|ATOMG|RED|REDG") + len(re.findall(r"^\s*(?:@\S+\s+)?(?:atom|red)\.", compiled.asm["ptx"], re.M)),
        time.process_time() - started,
    )


COLUMNS = (
    "sm",
    "kernel",
    "for",
    "warps",
    "registers",
    "spills",
    "shared KiB",
    "mma",
    "wgmma",
    "async copies",
    "atomics",
)


def table(reports: list[Report]) -> str:
    """Return the reports as Markdown."""
    lines = ["| " + " | ".join((*COLUMNS, "resident warps")) + " |", "|" + " --- |" * (len(COLUMNS) + 1)]
    for r in reports:
        cells = (r.arch, f"{r.kernel.split('.')[0]} {r.configuration}", r.details, r.warps, r.registers, r.spills)
        cells += (f"{r.shared / 1024:.0f}", r.mma, r.wgmma, r.copies, r.atomics, r.resident_warps)
        lines.append("| " + " | ".join(str(cell) for cell in cells) + " |")
    return "\n".join(lines) + "\n"


def main(argv: list[str] | None = None) -> int:
    """Compile every launch and write the tables; return the number of problems."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="folder for triton-VERSION.md; default: print only")
    parser.add_argument("--archs", type=int, nargs="+", default=[*ARCHITECTURES, 100], choices=sorted(CARDS))
    parser.add_argument("--few", action="store_true", help="what make test-full compiles")
    parser.add_argument("--only", default="", help="configurations whose op and name contain this")
    arguments = parser.parse_args(argv)
    import triton

    reports, problems = [], []
    kept = {*MODULES} if {*arguments.archs} >= {*ARCHITECTURES} else set()
    for arch in arguments.archs:
        few = arguments.few or arch not in ARCHITECTURES
        for op, launch in (representative_launches if few else distinct_launches)(arch):
            if arguments.only not in f"{op}.{launch.configuration.name}":
                kept.discard(op)
                continue
            try:
                report = compile_for(op, launch, arch)
            except Exception as error:  # a compiler that fails is a result
                problems.append(f"sm_{arch} {op} {launch.configuration.name}: {type(error).__name__}: {error}")
                kept.discard(op)
                continue
            reports.append(report)
            name = f"sm_{arch} {op} {report.configuration} ({report.details})"
            problems += [f"{name}: {problem}" for problem in report.problems()]
            if arch in ARCHITECTURES and report.problems():
                kept.discard(op)
            print(f"{report.seconds:5.1f} s  {name}: {report.registers} registers, {report.spills} spills", flush=True)
    if kept:
        compiled = json.loads(COMPILED.read_text(encoding="utf-8")) if COMPILED.exists() else {}
        compiled |= {op: hashed for op, hashed in fingerprints().items() if op in kept}
        COMPILED.write_text(json.dumps(dict(sorted(compiled.items())), indent=2) + "\n", encoding="utf-8")
    reports.sort(key=lambda r: (r.arch, r.kernel, r.configuration))
    text = f"# Kernels compiled ahead of time by Triton {triton.__version__}\n\n"
    rest = "all distinct ones for sm_80 and sm_90, those of make test-full for others"
    which = "those of make test-full" if arguments.few else rest
    text += f"{len(reports)} launches: {which}.\n\n{table(reports)}\n"
    text += "\n".join(f"- {problem}" for problem in problems) if problems else "All keep within the limits."
    print(text)
    if arguments.output:
        arguments.output.mkdir(parents=True, exist_ok=True)
        (arguments.output / f"triton-{triton.__version__}.md").write_text(text.rstrip() + "\n")
    return len(problems)


if __name__ == "__main__":
    sys.exit(min(1, main()))
