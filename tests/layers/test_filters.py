"""Several filters of one sequence: S4's, which share a state, and a network's."""

import pickle

import pytest
import torch

from hf_hybrid.layers.hyena import Hyena
from hf_hybrid.layers.implicit_filter import ImplicitConv
from hf_hybrid.layers.s4 import S4
from hf_hybrid.layers.s4d import S4D
from hf_hybrid.layers.state_space import ssm_parameters
from tests.tolerances import assert_close

H = 6


def make(kind, filters=3, seed=0, dtype=torch.float64):
    torch.manual_seed(seed)
    if kind is S4:
        return S4(H, 8, num_filters=filters, freeze="none").to(dtype).eval()
    options = {"max_length": 16, "embedding_size": 7, "filter_size": 8, "sine_frequency": 3.0}
    return ImplicitConv(H, num_filters=filters, **options).to(dtype).eval()


def draw(*shape, seed=1):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def one_of(layer, index):
    """A layer with one of another's filters."""
    single = make(type(layer), filters=1)
    for (name, target), (_, source) in zip(single.own_tensors(), layer.own_tensors(), strict=True):
        if name == "mlp_out_weight":
            source = source[:, index : index + 1]
        elif name in ("C", "D"):
            source = source[index : index + 1]
        target.data.copy_(source.reshape(target.shape))
    return single


EACH = pytest.mark.parametrize("kind", [S4, ImplicitConv])


@EACH
@pytest.mark.parametrize("length", [1, 2, 7, 40])
def test_filters_are_as_many_layers_with_one(kind, length):
    layer, u = make(kind), draw(2, length, H)
    mask = torch.ones(2, length)
    mask[1, : length // 2] = 0
    outputs, state = layer(u, mask, return_state=True)
    assert outputs.shape == (3, 2, length, H)
    assert_close(layer(u, mask), outputs, "float64")
    for index in range(3):
        expected, expected_state = one_of(layer, index)(u, mask, return_state=True)
        assert_close(outputs[index], expected, "float64")
        assert_close(state, expected_state, "float64")
    assert_close(layer.float()(u.float(), mask), outputs, "float32")


@EACH
@pytest.mark.parametrize("filters", [1, 3])
@pytest.mark.parametrize("split", [1, 9, 20])
def test_a_sequence_in_parts_gives_what_it_gives_in_one(kind, filters, split):
    layer, u = make(kind, filters), draw(2, 25, H)
    whole = layer(u)
    pieces, state, start = [], None, 0
    for stop in (split, split + 1, 25):
        piece, state = layer(u[:, start:stop], state=state, return_state=True)
        pieces.append(piece)
        start = stop
    assert_close(torch.cat(pieces, dim=-2), whole, "float64")


@EACH
@pytest.mark.parametrize("filters", [1, 3])
@pytest.mark.parametrize("window", [1, 4, 10, 30])
def test_samples_are_the_outputs_at_the_ends_of_windows(kind, filters, window):
    """Of windows longer and shorter than an implicit filter, with every gradient."""
    layer, results = make(kind, filters), []
    for sampled in (True, False):
        u = draw(2, 29, H).requires_grad_()
        if sampled:
            y = layer.sample(u, window)
        else:
            outputs = layer(u) if filters > 1 else layer(u)[None]
            y = outputs[:, :, window - 1 :: window].permute(1, 2, 0, 3)
        assert y.shape == (2, 29 // window, filters, H)
        (y * draw(*y.shape, seed=5)).sum().backward() if y.numel() else None
        results.append([y, *(x.grad for x in (u, *layer.parameters()) if x.grad is not None)])
        layer.zero_grad()
    if window == 30:
        return
    assert len(results[0]) == len(results[1])
    for actual, expected in zip(*results, strict=True):
        assert_close(actual, expected, "float64 gradient")


@EACH
@pytest.mark.parametrize("filters", [1, 3])
def test_following_and_reading_are_the_last_outputs(kind, filters):
    layer, u, state = make(kind, filters), draw(2, 40, H), None
    outputs, expected_state = layer(u, return_state=True)
    outputs = outputs if filters > 1 else outputs[None]
    for start, stops in ((0, [1, 20]), (20, [1]), (21, [2, 3, 19])):
        states = layer.follow(u[:, start : start + stops[-1]], state, stops)
        for stop, state in zip(stops, states, strict=True):
            last = start + stop - 1
            assert_close(layer.read(state, u[:, last]), outputs[:, :, last].transpose(0, 1), "float64")
    assert_close(state, expected_state, "float64")


@EACH
def test_nothing_comes_before_its_time(kind):
    layer, u = make(kind), draw(1, 20, H)
    for token in (0, 7, 19):
        other = u.clone()
        other[:, token] += 1
        difference = (layer(other) - layer(u)).abs().amax((0, 1, 3))
        assert difference[:token].max() < 1e-12 if token else True
        assert difference[token] > 1e-3


@EACH
def test_all_of_it_is_trained(kind):
    layer = make(kind)
    layer(draw(2, 9, H)).square().sum().backward()
    names = {name for name, _ in layer.named_parameters()}
    assert names == {name for name, _ in layer.own_tensors()}
    assert all(parameter.grad.abs().max() > 0 for parameter in layer.parameters())
    assert len(list(ssm_parameters(layer))) == len(names)


def test_one_filter_has_the_tensors_it_always_had():
    one, several = S4(H, 8), S4(H, 8, num_filters=3)
    assert (one.C.shape, one.D.shape) == ((1, H, 4, 2), (H,))
    assert (several.C.shape, several.D.shape) == ((3, H, 4, 2), (3, H))
    assert S4(H, 8, num_filters=3, use_D=False)(draw(1, 5, H)).shape == (3, 1, 5, H)


def test_taps_are_those_of_hyena():
    torch.manual_seed(0)
    options = {"max_length": 16, "embedding_size": 7, "filter_size": 8, "sine_frequency": 3.0}
    hyena, layer = Hyena(H, order=3, **options), ImplicitConv(H, num_filters=2, **options)
    for (name, target), (other, source) in zip(layer.own_tensors(), hyena.own_tensors(), strict=True):
        assert name == other
        target.data.copy_(source)
    assert_close(layer._taps(16), hyena._taps(16), "float32")


def test_taps_are_kept_in_evaluation_until_a_tensor_changes():
    layer, u, made = make(ImplicitConv), draw(1, 12, H), []
    generate = layer._generate
    layer._generate = lambda length: made.append(length) or generate(length)
    layer(u)  # records a gradient
    with torch.no_grad():
        first = layer(u)
        assert_close(layer(u), first, "exact")
        assert len(made) == 2
        layer.mlp_out_weight.mul_(2)
        assert (layer(u) - first).abs().max() > 1e-3
        assert len(made) == 3
        layer.train(), layer.eval()
        layer(u)
        assert len(made) == 4
        layer.train()
        layer(u), layer(u)
        assert len(made) == 6
    del layer._generate
    assert pickle.loads(pickle.dumps(layer.eval()))._kept is None


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: S4(H, 8, num_filters=0), "num_filters must be a positive integer; got 0"),
        (lambda: S4(H, 8, num_filters=2, bidirectional=True), "num_filters must be 1 with bidirectional"),
        (lambda: S4(H, 8, num_filters=2, max_length=5), "num_filters must be 1 with bidirectional, max_length or"),
        (lambda: S4D(H, 8, num_filters=2), "num_filters must be 1 for S4D; got 2"),
        (lambda: ImplicitConv(H, max_length=0), "max_length must be a positive integer; got 0"),
        (lambda: ImplicitConv(H, max_length=4, embedding_size=4), "embedding_size must be odd and at least 3; got 4"),
        (lambda: make(ImplicitConv)(draw(1, 3, H), state=draw(1, 3, H)), r"state must be \(1, 16, 6\)"),
    ],
)
def test_bad_arguments_are_named(build, message):
    with pytest.raises(ValueError, match=message):
        build()
