"""What the compiler makes of every shipped configuration, for GPUs that are not there."""

import inspect
import sys
from pathlib import Path

import pytest
import torch

if sys.platform != "linux":
    pytest.skip("triton is there on Linux only", allow_module_level=True)

import triton
import triton.language as tl

from benchmarks import aot
from benchmarks.aot_launches import MODULES, argument_type, representative_launches, shipped
from benchmarks.gpu_tuning import table
from hf_hybrid.kernels.launching import Configuration, Launch, blocks, launch, record_launches
from hf_hybrid.kernels.linear_attention import triton_kernels as linear_attention
from hf_hybrid.kernels.local_attention import triton_kernels as local_attention
from hf_hybrid.kernels.local_attention.settings import Settings
from hf_hybrid.kernels.ssm_kernel.step import triton_kernels as ssm_step

# op -> one of its cheapest configurations; on tensor cores where the op has products
CHEAP = {
    "diagonal_scan": "walk",
    "linear_attention": "sums k64",
    "local_attention": "forward k128",
    "local_attention_step": "token k128",
    "long_conv": "epilogue",
    "segment_recurrence": "sums",
    "segment_step": "token k64",
    "short_conv": "forward",
    "ssm_kernel": "forward one filter",
    "ssm_step": "token m32",
}


@pytest.mark.parametrize("op", MODULES)
def test_shipped_configurations_were_compiled_as_they_are(op):
    """Compiling takes minutes; what this Triton compiled, and kept within the limits, is written down."""
    assert aot.passed().get(triton.__version__, {}).get(op) == aot.fingerprints([op])[op], (
        f"Triton {triton.__version__} has not compiled {op} as it is now: run `python -m benchmarks.aot --few --only "
        f"{op}.`, or without --only for every op"
    )


@pytest.mark.parametrize("op", MODULES)
def test_one_configuration_keeps_within_the_limits(op):
    launches = representative_launches(90, [op])
    found = next(launch for _, launch in launches if launch.configuration.name == CHEAP[op])
    assert aot.compile_for(op, found, 90).problems() == []


def test_every_op_with_triton_kernels_is_compiled():
    folder = Path(inspect.getfile(aot)).parents[1] / "hf_hybrid" / "kernels"
    found = {".".join(path.parent.relative_to(folder).parts) for path in folder.glob("*/**/triton_kernels.py")}
    assert found == set(MODULES.values())


def test_a_fingerprint_sees_code_and_configurations_but_no_comment_or_docstring(monkeypatch):
    def fingerprint():
        return aot.fingerprints(["ssm_step"])["ssm_step"]

    before, source = fingerprint(), inspect.getsource
    monkeypatch.setattr(inspect, "getsource", lambda module: source(module).replace("\n", "  # a comment\n\n"))
    assert fingerprint() == before
    monkeypatch.setattr(inspect, "getsource", lambda module: source(module).replace('"""', '"""More. ', 1))
    assert fingerprint() == before
    monkeypatch.setattr(inspect, "getsource", lambda module: source(module) + "\nunused = 1\n")
    assert fingerprint() != before
    monkeypatch.undo()
    table = ssm_step.CONFIGURATIONS
    monkeypatch.setitem(table, next(iter(table)), next(iter(table.values()))._replace(num_stages=7))
    assert fingerprint() != before


@pytest.mark.full
@pytest.mark.parametrize("arch", aot.ARCHITECTURES)
@pytest.mark.parametrize("op", MODULES)
def test_shipped_configurations_keep_within_the_limits(arch, op):
    reports = [aot.compile_for(op, launch, arch) for _, launch in representative_launches(arch, [op])]
    problems = [f"{r.configuration} ({r.details}): {p}" for r in reports for p in r.problems()]
    assert problems == []


def test_every_shipped_configuration_is_compiled():
    found = {(op, x.configuration.name) for arch in aot.ARCHITECTURES for op, x in representative_launches(arch)}
    assert found == {(op, name) for op in MODULES for name in shipped(op)}


@triton.jit
def broken_kernel(u, total, T, BLOCK: tl.constexpr, SPILL: tl.constexpr):
    cols = tl.arange(0, BLOCK)
    if SPILL:
        held = ()
        for i in tl.static_range(24):
            held = held + (tl.load(u + i * BLOCK + cols, mask=cols < T),)  # noqa: RUF005
        tl.debug_barrier()
        for i in tl.static_range(24):
            tl.store(u + (23 - i) * BLOCK + cols, held[i] * held[(i + 5) % 24], mask=cols < T)
    else:
        tl.atomic_add(total, tl.sum(tl.load(u + cols, mask=cols < T)))


@pytest.mark.parametrize(("spill", "complaint"), [(False, "atomic instructions"), (True, "spill registers")])
def test_a_broken_kernel_is_seen(spill, complaint):
    configuration = Configuration("forward", "", {"BLOCK": 512 if spill else 128}, 1, 1)
    with record_launches(90) as launches:
        x = torch.empty(24 * 1024, device="meta")
        launch(broken_kernel, 1, configuration, u=x, total=x[:1], T=100, SPILL=spill)
    report = aot.compile_for("short_conv", launches[0], 90)
    assert any(complaint in problem for problem in report.problems()), report


@pytest.mark.parametrize("warps", [4, 8])
@pytest.mark.parametrize(
    ("name", "columns", "width"),
    [
        ("forward float32", 64, 64),
        *((f"{kernel} float32", 16, w) for kernel in ("forward", "d_query") for w in (16, 32)),
    ],
)
def test_products_that_are_read_wrongly_are_seen(name, columns, width, warps):
    """What an H200 got wrong: float32 heads that fit into a tile of 64 rows, with eight warps."""
    shipped = local_attention.CONFIGURATIONS[name]
    configuration = shipped._replace(num_warps=warps, tiles=shipped.tiles | {"S": columns})
    q, settings = torch.empty(1, 128, 1, width, device="meta"), Settings(16, None, False, 1.0, 0.0)
    with table({("local_attention", name, 90): configuration}), record_launches(90) as launches:
        output, log_sum = local_attention.forward(q, q, q, None, None, None, None, settings)
        local_attention.backward(q, output, log_sum, q, q, q, None, None, None, None, settings)
    found = next(launch for launch in launches if launch.configuration.name == name)
    assert (aot.compile_for("local_attention", found, 90).broken_reads > 0) == (width <= columns and warps == 8)


def test_limits_complain():
    good = aot.Report("linear_attention.walk", "", "bf16", 90, 4, 160, 0, 50_000, 0, 8, 4, 0, 0, 0.0)
    assert good.problems() == []
    assert good.resident_warps == 12
    for change, complaint in (
        ({"registers": 255, "warps": 8, "shared": 240 << 10}, "bytes of shared memory"),
        ({"wgmma": 0, "mma": 8}, "of a whole warp group"),
        ({"wgmma": 0}, "no tensor core instruction"),
        ({"shared": 200 << 10}, "4 warps fit on a multiprocessor, below 8"),
        ({"broken_reads": 1}, "1 products are read in a way that compilers have got wrong"),
    ):
        assert any(complaint in problem for problem in good._replace(**change).problems()), change


def test_arguments_have_the_types_that_a_launch_gives_them():
    with record_launches(90) as launches:
        linear_attention.forward(*(torch.empty(1, 48, 1, 64, device="meta") for _ in range(3)), None, None)
    (walk,) = launches
    assert isinstance(walk, Launch)
    kinds = {name: argument_type(walk.kernel, name, value) for name, value in walk.arguments.items()}
    assert kinds["q"] == ("*fp32", None, True)
    assert kinds["H"] == ("constexpr", 1, False)  # one is a constant
    assert kinds["T"] == ("i32", None, False)  # lengths are not looked at, though this one is divisible
    assert kinds["SIZE"] == ("i32", None, True)
    assert kinds["state"] == ("constexpr", None, False)
    assert blocks(65, 64) == 2
