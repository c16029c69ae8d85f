"""Where a step's time goes: operators belong to one group each, and a tiny step has those that it should."""

import importlib
import pkgutil
from types import SimpleNamespace

import pytest
import torch

from benchmarks import bench_profile, results_page
from benchmarks.bench_profile import GROUPS, group_of_operator, sum_groups
from benchmarks.record import read_csv
from hf_hybrid import kernels, layers
from hf_hybrid.kernels.dispatch import NAMESPACE
from tests.measuring import measure_here, shrink_models


def event(name, parent=None, number=-1, milliseconds=1.0):
    return SimpleNamespace(name=name, cpu_parent=parent, sequence_nr=number, self_cpu_time_total=1000 * milliseconds)


def test_an_operator_belongs_to_the_package_then_to_its_name_then_to_its_module():
    attention = event("hf_hybrid::local_attention", milliseconds=0.5)
    linear, norm = event("aten::linear"), event("group of a module: norms_ms", milliseconds=100)
    gradient = event("autograd::engine::evaluate_function: PowBackward0", number=7)
    other = event("autograd::engine::evaluate_function: MulBackward0", number=8)
    events = [
        attention,
        event("aten::bmm", attention),  # within local attention
        linear,
        event("aten::addmm", linear),
        event("aten::copy_", linear),
        norm,
        event("aten::unknown", norm, number=7),
        gradient,
        event("aten::unknown", gradient),  # its gradient
        event("aten::mul", gradient),
        other,
        event("aten::unknown", other),
        event("aten::bmm", event("aten::scaled_dot_product_attention")),
        event("hf_hybrid::something_new"),
    ]
    assert sum_groups(events, "hf_hybrid") == {
        "local_attention_ms": 1.5,
        "products_ms": 2,
        "copies_ms": 1,
        "norms_ms": 3,
        "elementwise_ms": 1,
        "rest_ms": 3,
        "full_attention_ms": 1,
    }


def test_every_operator_of_the_package_has_a_group():
    for package in (kernels, layers):
        for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            if not module.name.endswith("triton_kernels"):  # which register nothing, and need Triton
                importlib.import_module(module.name)
    registered = (name.split(".")[0].split("::") for name in torch._C._dispatch_get_all_op_names())
    names = {name for namespace, name in registered if namespace == NAMESPACE}
    assert {"local_attention", "full_attention_backward", "segment_step"} <= names
    assert [name for name in sorted(names) if group_of_operator(name) not in GROUPS] == []


@pytest.mark.parametrize(
    ("model", "groups"),
    [
        ("spade-seq2seq", {"local_attention_ms", "full_attention_ms", "convolutions_ms", "state_space_ms"}),
        ("srformer", {"full_attention_ms", "segments_ms"}),
        ("chela", {"linear_attention_ms", "convolutions_ms", "short_conv_ms", "state_space_ms"}),
    ],
)
def test_a_step_is_profiled_once(tmp_path, monkeypatch, capsys, model, groups):
    measure_here(monkeypatch, bench_profile)
    shrink_models(monkeypatch)
    out = tmp_path / "profile.csv"
    flags = ["--models", model, "--precisions", "bf16", "--lengths", "32", "--threads", "1", "--out", str(out)]
    assert bench_profile.main(flags) == 0
    (row,) = read_csv(out)
    found = {group for group in GROUPS if float(row[group]) > 0}
    everywhere = {"products_ms", "norms_ms", "dropout_ms", "elementwise_ms", "copies_ms", "loss_ms", "host_ms"}
    assert found - {"rest_ms"} == everywhere | groups
    monkeypatch.setattr(bench_profile, "in_process", None)  # nothing is measured again
    assert bench_profile.main(flags) == 0
    assert f"| {model} | bf16, 32 |" in capsys.readouterr().out
    assert results_page.tables(out) == bench_profile.report(read_csv(out))
