"""Norms by name: their formulas, their precision, and what padding has to do with them."""

import pytest
import torch
from torch import nn

from hf_hybrid.layers.norms import NORMS, BatchNorm, ScaleNorm, apply_norm, make_norm
from tests.tolerances import assert_close


def draw(*shape, seed=0, dtype=torch.float64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


@pytest.mark.parametrize("norm_type", NORMS)
@pytest.mark.parametrize("affine", [True, False])
def test_every_name_makes_its_norm(norm_type, affine):
    norm = make_norm(norm_type, 6, 1e-3, affine=affine).double()
    assert norm.eps == 1e-3
    assert bool(list(norm.parameters())) == affine
    x = 2 + draw(3, 5, 6)
    squares = x.square().mean(-1, keepdim=True)
    centred = x - x.mean(-1, keepdim=True)
    expected = {
        "layer_norm": lambda: centred / (centred.square().mean(-1, keepdim=True) + 1e-3).sqrt(),
        "rms_norm": lambda: x / (squares + 1e-3).sqrt(),
        "scale_norm": lambda: x / (squares + 1e-3).sqrt(),
        "batch_norm": lambda: (x - x.mean((0, 1))) / (x.var((0, 1), correction=0) + 1e-3).sqrt(),
    }[norm_type]()
    assert_close(apply_norm(norm, x, None), expected, "float64")


def test_an_unknown_name_is_refused():
    with pytest.raises(ValueError, match=r"norm_type must be one of layer_norm, rms_norm, .*; got 'power_norm'"):
        make_norm("power_norm", 6, 1e-5)


def test_scale_norm_has_one_scale_and_ignores_the_input_s():
    norm = ScaleNorm(6, eps=1e-300).double()
    assert norm.weight.shape == (1,)
    x = draw(2, 6)
    with torch.no_grad():
        norm.weight.fill_(3)
    assert_close(norm(x).square().mean(-1), torch.full((2,), 9.0), "float64")
    assert_close(norm(100 * x), norm(x), "float64")
    assert norm.bfloat16()(x.bfloat16()).dtype == torch.bfloat16


def test_a_simple_rms_norm_knows_no_scale():
    norm = make_norm("rms_norm", 6, 1e-6, affine=False)
    x = draw(4, 6, dtype=torch.float32)
    for factor in (1e3, 30.0):
        error = (norm(factor * x) - norm(x)).abs().max() / norm(x).abs().max()
        assert error < 1e-4  # what an epsilon of 1e-6 beside a mean square of about 1 leaves
    exact = make_norm("rms_norm", 6, 1e-300, affine=False)
    assert_close(exact(1e3 * x.double()), exact(x.double()), "float64")


@pytest.mark.parametrize("affine", [True, False])
def test_batch_norm_without_padding_is_torchs(affine):
    ours, theirs = BatchNorm(6, elementwise_affine=affine).double(), nn.BatchNorm1d(6, affine=affine).double()
    for module in (ours, theirs):
        if affine:
            nn.init.normal_(module.weight, generator=torch.Generator().manual_seed(1))
            nn.init.normal_(module.bias, generator=torch.Generator().manual_seed(2))
    for step in range(3):
        x = (step + draw(3, 5, 6, seed=step)).requires_grad_()
        y = ours(x)
        expected = theirs(x.mT).mT
        assert_close(y, expected, "float64")
        gradients = [torch.autograd.grad(z.pow(3).sum(), x, retain_graph=True)[0] for z in (y, expected)]
        assert_close(*gradients, "float64 gradient")
    for name, value in theirs.state_dict().items():
        assert_close(ours.state_dict()[name], value, "float64")
    x = draw(3, 5, 6)
    assert_close(ours.eval()(x), theirs.eval()(x.mT).mT, "float64")
    scale, shift = ours.scale_and_shift()
    assert_close(x * scale + shift, ours(x), "float64")


def test_padding_has_no_part_in_batch_statistics():
    alone, padded = BatchNorm(4).double(), BatchNorm(4).double()
    x = draw(2, 7, 4)
    mask = torch.zeros(2, 10, dtype=torch.long)
    mask[0, 3:], mask[1, :7] = 1, 1
    inputs = torch.full((2, 10, 4), 1e4, dtype=torch.float64)
    inputs[mask.bool()] = x.flatten(0, 1)
    inputs[0, 0] = torch.nan
    expected = alone(x)
    actual = padded(inputs, mask)
    assert_close(actual[mask.bool()], expected.flatten(0, 1), "float64")
    for name, value in alone.state_dict().items():
        assert_close(padded.state_dict()[name], value, "float64")


def test_batch_norm_computes_in_float32():
    norm = BatchNorm(4)
    x = 100 + draw(2, 50, 4, dtype=torch.float32)
    expected = norm(x.bfloat16().float())
    assert_close(norm(x.bfloat16()), expected.bfloat16(), "exact")


def test_one_token_or_none_leaves_batch_norm_finite():
    norm = BatchNorm(4)
    for mask in (torch.zeros(2, 3), torch.tensor([[0, 1, 0], [0, 0, 0]])):
        assert torch.isfinite(norm(draw(2, 3, 4, dtype=torch.float32), mask)).all()
    assert all(torch.isfinite(x).all() for x in norm.state_dict().values())
