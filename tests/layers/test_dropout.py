"""Dropout from a seed: what torch's promises, without its mask."""

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

from hf_hybrid.layers import dropout
from hf_hybrid.layers.dropout import Dropout
from hf_hybrid.layers.feed_forward import FeedForward

from ..tolerances import assert_close


@pytest.mark.parametrize("p", [0.001, 0.1, 0.5, 0.97])
def test_as_many_elements_are_dropped_as_asked_for_and_each_by_itself(p):
    torch.manual_seed(0)
    count = 3 * dropout._ELEMENTS + 5  # the last part is smaller than the others
    kept = Dropout(p)(torch.ones(count))
    found = kept != 0
    deviation = (p * (1 - p) / count) ** 0.5
    assert abs((~found).double().mean() - p) < 5 * deviation + 2**-16
    for lag in (1, 2, 3, 4, dropout._ELEMENTS):  # neighbours share a word, and parts share words
        both = (~found[lag:] & ~found[:-lag]).double().mean()
        assert abs(both - p * p) < 5 * (p * p * (1 - p * p) / count) ** 0.5 + 2**-15 * p
    assert abs(kept.double().mean() - 1) < 5 * deviation / (1 - p)
    assert kept.unique().tolist() == [0, pytest.approx(1 / (1 - p), rel=2**-15 / (1 - p))]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("relu", [False, True])
def test_gradients_are_dropped_as_the_input_was(dtype, relu):
    torch.manual_seed(0)
    layer = Dropout(0.3)
    x = torch.randn(7, 5, 11, dtype=dtype).transpose(0, 1).requires_grad_()
    weight = torch.randn(5, 7, 11, dtype=dtype)
    output = (layer.after_relu if relu else layer)(x)
    (grad,) = torch.autograd.grad(output, x, weight)
    factor = (output != 0).to(dtype) / (1 - round(0.3 * 2**16) / 2**16)
    kept = x.detach().clamp_min(0) if relu else x.detach()
    assert_close(output, factor * kept, str(dtype).removeprefix("torch."))
    assert_close(grad, factor * weight, str(dtype).removeprefix("torch."))
    assert (output == 0).any() and (output != 0).any()  # noqa: PT018 - of one thing


@pytest.mark.parametrize("relu", [False, True])
def test_it_can_be_differentiated_twice(relu):
    layer = Dropout(0.4)

    def call(x):
        torch.manual_seed(3)
        return (layer.after_relu if relu else layer)(x) ** 2

    x = torch.randn(4, 6, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(call, x)
    assert torch.autograd.gradgradcheck(call, x)


def test_the_seed_of_torch_decides_and_each_call_draws_anew():
    layer, x = Dropout(0.5), torch.ones(100)
    torch.manual_seed(1)
    first, second = layer(x), layer(x)
    torch.manual_seed(1)
    assert torch.equal(layer(x), first)
    assert not torch.equal(first, second)


def test_a_checkpointed_forward_drops_the_same():
    torch.manual_seed(0)
    layer, x = nn.Sequential(nn.Linear(8, 8), Dropout(0.5), nn.Linear(8, 8)), torch.randn(3, 8)
    grads = []
    for run in (layer, lambda x: checkpoint(layer, x, use_reentrant=False)):
        torch.manual_seed(5)
        layer.zero_grad()
        run(x).square().sum().backward()
        grads.append([weight.grad.clone() for weight in layer.parameters()])
    for one, other in zip(*grads, strict=True):
        assert torch.equal(one, other)


def test_nothing_is_dropped_where_torch_drops_nothing_and_all_where_it_drops_all():
    x = torch.randn(5, 3)
    assert Dropout(0.5).eval()(x) is x
    assert Dropout(0.0)(x) is x
    assert not Dropout(1.0)(x).any()
    assert torch.equal(Dropout(0.0).after_relu(x), x.relu())
    assert Dropout(0.5)(x[:0]).shape == (0, 3)
    with pytest.raises(ValueError, match="dropout probability"):
        Dropout(1.5)


def test_no_mask_is_kept():
    layer, x = Dropout(0.5), torch.randn(64, 64, requires_grad=True)
    kept: list[int] = []

    def note(tensor):
        kept.append(tensor.numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        layer(x)
    assert kept == [1]


@pytest.mark.parametrize("relu", [False, True])
def test_shapes_are_known_without_numbers_and_compiled_graphs_use_torch(relu):
    layer = Dropout(0.5)
    call = layer.after_relu if relu else layer
    with FakeTensorMode():
        assert call(torch.empty(4, 3)).shape == (4, 3)
    output = torch.compile(call, backend="eager", fullgraph=True)(torch.ones(64))
    assert set(output.unique().tolist()) == {0, 2}


@pytest.mark.parametrize("activation", [nn.ReLU(), nn.GELU()])
def test_a_feed_forward_network_without_dropout_is_as_before(activation):
    torch.manual_seed(0)
    network, x = FeedForward(6, 12, activation, dropout=0.5), torch.randn(2, 5, 6)
    expected = network.down_proj(activation(network.up_proj(x)))
    assert torch.equal(network.eval()(x), expected)
    network.train()
    mean = torch.stack([network(x) for _ in range(4000)]).mean(0)
    assert (mean - expected).abs().max() < 0.1
