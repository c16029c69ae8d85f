"""The root mean square norm of training against torch's, which everything else takes."""

import pytest
import torch
from torch.nn import functional as F

from benchmarks.workloads import Stored
from hf_hybrid.layers import rms_norm as module
from hf_hybrid.layers.norms import make_norm
from hf_hybrid.layers.rms_norm import rms_norm
from tests.tolerances import assert_close

EPS = 1e-3


def make(shape, with_weight, dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)
    weight = torch.nn.Parameter(torch.randn(shape[-1], generator=generator, dtype=torch.float64).to(dtype))
    return x.requires_grad_(), weight if with_weight else None


def torchs(x, weight, eps):
    return F.rms_norm(x, x.shape[-1:], weight, eps)


def run(function, x, weight):
    leaves = [leaf for leaf in (x, weight) if leaf is not None]
    y = function(x, weight, EPS)
    factor = torch.randn(y.shape, generator=torch.Generator().manual_seed(5), dtype=torch.float64).to(y.dtype)
    return [y, *torch.autograd.grad(y, leaves, factor)]


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16"])
@pytest.mark.parametrize("with_weight", [True, False])
@pytest.mark.parametrize("block", [1, 40, 1 << 16])
@pytest.mark.parametrize("shape", [(6,), (2, 0, 6), (1, 7), (2, 13, 6), (3, 1, 2, 1)])
def test_values_and_gradients_are_torchs(shape, block, with_weight, dtype, monkeypatch):
    monkeypatch.setattr(module, "_BLOCK", block)
    tensors = make(shape, with_weight, getattr(torch, dtype))
    for index, (actual, expected) in enumerate(zip(run(rms_norm, *tensors), run(torchs, *tensors), strict=True)):
        assert actual.dtype == expected.dtype
        assert_close(actual, expected, f"{dtype} gradient" if index else dtype)


def test_strided_inputs_and_expanded_gradients():
    x, weight = make((3, 8, 5), True)
    for function in (lambda x: x.transpose(0, 1), lambda x: x[:, ::3]):
        found = [torch.autograd.grad(run_(function(x), weight, EPS).sum(), (x, weight)) for run_ in (rms_norm, torchs)]
        for actual, expected in zip(*found, strict=True):
            assert_close(actual, expected, "float64 gradient")


@pytest.mark.parametrize("with_weight", [True, False])
def test_gradcheck(with_weight, monkeypatch):
    monkeypatch.setattr(module, "_BLOCK", 10)
    x, weight = make((2, 3, 4), with_weight)
    leaves = (x, weight) if with_weight else (x,)
    for frozen in (None, *leaves) if with_weight else (None,):
        for leaf in leaves:
            leaf.requires_grad_(leaf is not frozen)
        wanted = [leaf for leaf in leaves if leaf.requires_grad]
        # the parameter itself, which a function of tensors would replace
        assert torch.autograd.gradcheck(lambda *_: rms_norm(x, weight, EPS), wanted)
        assert torch.autograd.gradgradcheck(lambda *_: rms_norm(x, weight, EPS), wanted)


def test_the_backward_keeps_the_input_and_a_number_per_token():
    x, weight = make((2, 5, 64), True)
    with Stored(weight) as stored:
        rms_norm(x, weight, EPS)
    assert stored.bytes == 8 * (x.numel() + 10)


def test_autocast_and_compilation_change_nothing():
    norm = make_norm("rms_norm", 6, EPS)
    x = torch.randn(2, 5, 6, generator=torch.Generator().manual_seed(0)).requires_grad_()
    expected = torch.autograd.grad(norm(x).square().sum(), (x, norm.weight))
    compiled = torch.compile(norm, fullgraph=True, backend="aot_eager")
    for function, enabled in ((norm, True), (compiled, False)):
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            actual = torch.autograd.grad(function(x).square().sum(), (x, norm.weight))
        for one, other in zip(actual, expected, strict=True):
            assert_close(one, other, "float32 gradient")


def test_transforms_of_torch_func_take_torchs():
    x, weight = make((3, 4), True)
    for function in (rms_norm, torchs):
        rows = torch.func.vmap(lambda row, f=function: f(row, weight, EPS))(x)
        assert_close(rows, torchs(x, weight, EPS), "float64")
    actual, expected = (
        torch.func.grad(lambda y, f=function: f(y, weight, EPS).square().sum())(x.detach())
        for function in (rms_norm, torchs)
    )
    assert_close(actual, expected, "float64 gradient")
