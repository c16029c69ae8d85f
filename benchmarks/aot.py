"""Compile the Triton kernels ahead of time, without a GPU, and check the machine code.

    python -m benchmarks.aot --output benchmarks/results/aot    # everything, in a quarter of an hour
    python -m benchmarks.aot --few                              # what the tests need, in minutes

The ops record their launches on tensors without memory, so what is compiled is what a GPU would run: the same types,
constants and divisibility by 16. Each launch is compiled for each architecture, and its machine code is searched for
spilled registers, tensor core instructions and atomics, and its intermediate code for what compilers have got wrong
(`broken_reads`). `LIMITS` says what is allowed. If all configurations of an op pass, `COMPILED` gets a fingerprint of
the op's code under the version of Triton, so that tests notice a kernel or a Triton that has changed since; `make
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
from collections.abc import Collection
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import benchmarks.kernels_alone  # noqa: F401
from benchmarks.aot_launches import MODULES, argument_type, distinct_launches, dtype_of, representative_launches
from hf_hybrid.kernels.launching import Launch

ARCHITECTURES = (80, 90)
"""Compute capabilities times 10: A100, H100 and H200."""
COMPILED = Path(__file__).parent / "results" / "aot" / "compiled.json"
"""Version of Triton -> op -> fingerprint of the code that passed."""


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
    broken_reads: int
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
        if self.broken_reads:
            found.append(f"{self.broken_reads} products are read in a way that compilers have got wrong")
        if self.shared > CARDS[self.arch].shared:
            found.append(f"{self.shared} bytes of shared memory; a multiprocessor has {CARDS[self.arch].shared}")
        if limit.tensor_cores and not (self.mma or self.wgmma):
            found.append("no tensor core instruction")
        if self.resident_warps < limit.warps:
            found.append(f"{self.resident_warps} warps fit on a multiprocessor, below {limit.warps}: {limit.reason}")
        return found


def passed() -> dict[str, dict[str, str]]:
    """Return version of Triton -> op -> fingerprint of the code that passed."""
    return json.loads(COMPILED.read_text(encoding="utf-8")) if COMPILED.exists() else {}


def fingerprints(ops: Collection[str] = MODULES) -> dict[str, str]:
    """Return op -> hash of its kernels' code, without comments and docstrings, and of its launches."""
    found = {}
    for op in ops:
        launches = [
            (arch, x.configuration, [argument_type(x.kernel, *argument) for argument in x.arguments.items()])
            for arch in ARCHITECTURES
            for _, x in representative_launches(arch, [op])
        ]
        kernels = importlib.import_module(f"hf_hybrid.kernels.{MODULES[op]}.triton_kernels")
        code = [_code(each) for each in _kernel_modules(kernels)]
        found[op] = hashlib.sha256(repr((code, launches)).encode()).hexdigest()[:16]
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


_LAYOUT = re.compile(r"^(#mma\d*) = #ttg\.nvidia_mma<\{versionMajor = 3,.*?warpsPerCTA = \[(\d+),", re.MULTILINE)
_READ = re.compile(r"convert_layout \S+ : tensor<(\d+)x\d+xf32, (#mma\d*)> -> tensor<\S+ #ttg\.dot_op<\{opIdx = 0")


def broken_reads(code: str) -> int:
    """Count the float32 products that become the left side of another one in Triton's code for a GPU, and break.

    That is so on sm_90 if a product of 64 rows is spread over eight warps, sixteen rows each, and its registers are
    then read as another product's: on an H200, Triton 3.6 computed wrong numbers or read memory that was not its own.
    In bfloat16 and float16 the same layouts were right there.
    """
    warps = {name: int(count) for name, count in _LAYOUT.findall(code)}
    return sum(16 * warps.get(layout, 0) > int(rows) for rows, layout in _READ.findall(code))


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
        kind, constant, divisible = argument_type(kernel, name, launch.arguments[name])
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
        " ".join([dtype_of(launch), *sizes, *flags]),
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
        broken_reads(compiled.asm["ttgir"]),
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
    "broken reads",
)


def table(reports: list[Report]) -> str:
    """Return the reports as Markdown."""
    lines = ["| " + " | ".join((*COLUMNS, "resident warps")) + " |", "|" + " --- |" * (len(COLUMNS) + 1)]
    for r in reports:
        cells = (r.arch, f"{r.kernel.split('.')[0]} {r.configuration}", r.details, r.warps, r.registers, r.spills)
        cells += (f"{r.shared / 1024:.0f}", r.mma, r.wgmma, r.copies, r.atomics, r.broken_reads, r.resident_warps)
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
        versions = passed()
        versions[triton.__version__] = versions.get(triton.__version__, {}) | fingerprints(kept)
        COMPILED.write_text(json.dumps(versions, indent=2, sort_keys=True) + "\n", encoding="utf-8")
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
