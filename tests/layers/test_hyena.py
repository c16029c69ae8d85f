"""The Hyena layer: its filters, its function, its state, and what of it is trained and kept."""

import copy
import math
import pickle

import pytest
import torch
from torch import nn

from hf_hybrid.layers import hyena as hyena_module
from hf_hybrid.layers.hyena import Hyena
from hf_hybrid.layers.state_space import ssm_parameters
from tests.tolerances import assert_close

H = 6
NAMES = [
    "mlp_in_weight",
    "mlp_in_bias",
    "mlp_hidden_weight",
    "mlp_hidden_bias",
    "mlp_out_weight",
    "sine_frequency",
    "D",
]
PROJECTIONS = [f"{module}.{kind}" for module in ("in_proj", "short_conv", "out_proj") for kind in ("weight", "bias")]
SHAPES = [
    {},
    {"order": 3},
    {"order": 5, "short_kernel_size": 1},
    {"short_kernel_size": 4, "max_length": 5},
    {"max_length": 1},
    {"order": 3, "max_length": 2, "embedding_size": 3},
]


def make(seed=0, dtype=torch.float64, **options):
    torch.manual_seed(seed)
    options = {"max_length": 16, "embedding_size": 7, "filter_size": 8, "sine_frequency": 3.0, **options}
    layer = Hyena(H, **options).to(dtype)
    with torch.no_grad():  # large enough that no bias is most of an output
        for module in (layer.in_proj, layer.short_conv, layer.out_proj):
            module.weight.mul_(2)
    return layer


def draw(*shape, seed=1, dtype=torch.float64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def tap(layer, lag):
    """One tap of every filter, `(Z, O-1, H)`, from the equations."""
    bands = (layer.embedding_size - 1) // 2
    time = lag / (layer.max_length - 1) if layer.max_length > 1 else 0.0
    frequencies = [1e-4 + (bands - 1 - 1e-4) * i / max(1, bands - 1) for i in range(bands)]
    turns = [complex(math.e) ** (-2j * math.pi * f * lag / layer.max_length) for f in frequencies]
    x = torch.tensor([time, *(z.real for z in turns), *(z.imag for z in turns)], dtype=torch.float64)
    x = torch.sin(layer.sine_frequency * (layer.mlp_in_weight @ x + layer.mlp_in_bias))
    x = torch.sin(layer.sine_frequency * (layer.mlp_hidden_weight[0] @ x + layer.mlp_hidden_bias[0]))
    x = torch.sin(layer.sine_frequency * (layer.mlp_hidden_weight[1] @ x + layer.mlp_hidden_bias[1]))
    slowest, fastest = math.log(0.01) / 1.5, math.log(0.01) / 0.3
    delta = torch.tensor([slowest + (fastest - slowest) * c / (H - 1) for c in range(H)], dtype=torch.float64)
    return layer.mlp_out_weight @ x * torch.exp(-time * delta.abs())


def by_definition(layer, u):
    """The layer by its equations, one pair of positions at a time."""
    length, size = u.shape[1], layer.short_kernel_size
    projected = u @ layer.in_proj.weight.T + layer.in_proj.bias
    short = []
    for t in range(length):
        value = layer.short_conv.bias
        for back in range(min(size, t + 1)):
            value = value + layer.short_conv.weight[:, 0, size - 1 - back] * projected[:, t - back]
        short.append(value)
    *gates, v = torch.stack(short, dim=1).split(H, dim=-1)
    taps = [tap(layer, lag) for lag in range(layer.max_length)]
    for n in range(layer.order - 1, 0, -1):
        index = layer.order - 1 - n
        x, rows = gates[n] * v, []
        for t in range(length):
            row = layer.D[index] * x[:, t]
            for s in range(length):
                if 0 <= t - s < layer.max_length:
                    row = row + taps[t - s][0, index] * x[:, s]
                elif layer.bidirectional and 0 < s - t <= layer.max_length:
                    row = row + taps[s - t - 1][1, index] * x[:, s]
            rows.append(row)
        v = torch.stack(rows, dim=1)
    return (gates[0] * v) @ layer.out_proj.weight.T + layer.out_proj.bias


@pytest.fixture
def filters_made(monkeypatch):
    """The numbers of taps of all filters computed."""
    made = []
    original = Hyena._generate
    monkeypatch.setattr(Hyena, "_generate", lambda self, length: made.append(length) or original(self, length))
    return made


# function


@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize("options", SHAPES)
@pytest.mark.parametrize("length", [1, 2, 19])
def test_forward_is_the_definition(length, options, bidirectional):
    layer, u = make(bidirectional=bidirectional, **options), draw(2, length, H)
    expected = by_definition(layer, u)
    assert_close(layer(u), expected, "float64")
    assert_close(layer.float()(u.float()), expected, "float32")


def test_constant_gates_leave_a_linear_convolution():
    layer, u = make(), draw(2, 13, H)
    with torch.no_grad():
        for module in (layer.in_proj, layer.short_conv, layer.out_proj):
            module.weight.zero_(), module.bias.zero_()
        layer.in_proj.weight[2 * H :] = torch.eye(H)
        layer.short_conv.weight[2 * H :, 0, -1] = 1
        layer.short_conv.bias[: 2 * H] = 1  # x_0 = x_1 = 1
        layer.out_proj.weight.copy_(torch.eye(H))
    taps = torch.stack([tap(layer, lag)[0, 0] for lag in range(13)])
    expected = layer.D[0] * u + torch.stack(
        [sum(taps[t - s] * u[:, s] for s in range(t + 1)) for t in range(13)], dim=1
    )
    assert_close(layer(u), expected, "float64")
    assert_close(layer(2 * u), 2 * expected, "float64")


def test_filters_decay():
    """A sine is at most 1, so a tap is at most its weights' sum times the decay: 1 at first, 0.01^(1/0.3) at last."""
    layer = make(max_length=64)
    largest = layer.mlp_out_weight.abs().sum(-1)[:, :, None]
    time = torch.linspace(0, 1, 64)[:, None].double()
    rate = torch.linspace(math.log(100) / 1.5, math.log(100) / 0.3, H).double()
    taps = layer._taps(64)
    assert (taps.abs() <= largest * torch.exp(-time * rate) * (1 + 1e-6)).all()
    assert taps[0, 0, 32:].abs().max() > 1e-3


def test_filters_depend_on_the_largest_length_alone():
    long, short = make(max_length=32), make(max_length=16)
    assert_close(long._taps(16), long._taps(32)[:, :, :16], "float64")
    assert (long._taps(16) - short._taps(16)).abs().max() > 1e-2


@pytest.mark.parametrize("options", SHAPES)
def test_causality(options):
    layer, u = make(**options), draw(2, 30, H)
    changed = u.clone()
    changed[:, 15] += 1
    assert_close(layer(changed)[:, :15], layer(u)[:, :15], "float64")
    assert (layer(changed)[:, 15] - layer(u)[:, 15]).abs().max() > 1e-2


def test_bidirectional_reads_the_future_through_the_long_convolution_alone():
    layer, u = make(bidirectional=True), draw(1, 30, H)
    changed = u.clone()
    changed[:, 15] += 1
    assert (layer(changed)[:, 14] - layer(u)[:, 14]).abs().max() > 1e-2
    with torch.no_grad():
        layer.mlp_out_weight[1] = 0
    causal = make()
    causal.load_state_dict({**layer.state_dict(), "mlp_out_weight": layer.mlp_out_weight[:1]})
    assert_close(layer(u), causal(u), "float64")


@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize("options", SHAPES)
@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_is_exact(side, options, bidirectional):
    layer, u = make(bidirectional=bidirectional, **options), draw(1, 20, H)
    pad = torch.full((1, 11, H), torch.nan, dtype=torch.float64)
    kept = torch.arange(31) >= 11 if side == "left" else torch.arange(31) < 20
    padded = torch.cat([pad, u] if side == "left" else [u, pad], dim=1)
    assert_close(layer(padded, kept[None].long())[:, kept], layer(u), "float64")


def test_dropout():
    layer, u = make(dropout=0.5, order=3), draw(2, 9, H)
    calls = []
    layer.dropout.register_forward_hook(lambda *call: calls.append(call[2]))
    assert (layer(u) - layer(u)).abs().max() > 1e-2
    assert len(calls) == 4
    assert_close(layer.eval()(u), by_definition(layer, u), "float64")


# state


@pytest.mark.parametrize("options", SHAPES)
@pytest.mark.parametrize("split", [1, 2, 3, 16, 30, 39])
def test_state_hand_over(split, options):
    layer, u = make(**options), draw(2, 40, H)
    expected, last = layer(u, return_state=True)
    y, state = layer(u[:, :split], return_state=True)
    assert state.shape == layer.state_shape(2)
    assert state.dtype == torch.float64
    rest, state = layer(u[:, split:], state=state, return_state=True)
    assert_close(torch.cat([y, rest], dim=1), expected, "float64")
    assert_close(state, last, "float64")


@pytest.mark.parametrize("options", SHAPES)
def test_decoding_is_the_convolution(options, monkeypatch):
    layer, u = make(dtype=torch.float32, **options), draw(2, 40, H, dtype=torch.float32)
    expected = layer(u)
    monkeypatch.setattr(hyena_module, "long_conv", None)  # no transform for a single token
    outputs, state = [], None
    for t in range(40):
        y, state = layer(u[:, t : t + 1], state=state, return_state=True)
        assert state.shape == layer.state_shape(2)
        outputs.append(y)
    assert state.dtype == torch.float32
    assert_close(torch.cat(outputs, dim=1), expected, "float32")


def test_state_holds_the_last_inputs():
    layer = make(order=3, max_length=5)
    assert layer.state_shape(7) == (7, 2 * 4 + 2 * 4, H)
    assert Hyena(H, max_length=9, short_kernel_size=1).state_shape(1) == (1, 8, H)
    u = draw(1, 30, H)
    _, long = layer(u, return_state=True)
    # (short taps - 1) inputs of that convolution and (taps - 1) of each of the two long ones: no older token is felt
    _, recent = layer(u[:, -(2 + 4 + 4 + 2) :], return_state=True)
    assert_close(recent, long, "float64")
    _, too_short = layer(u[:, -3:], return_state=True)
    assert (too_short - long).abs().max() > 1e-2


@pytest.mark.parametrize("options", SHAPES)
def test_state_is_not_touched_by_left_padding(options):
    layer, u = make(**options), draw(1, 20, H)
    padded = torch.cat([torch.full_like(u[:, :13], torch.nan), u], dim=1)
    y, state = layer(padded, (torch.arange(33) >= 13)[None], return_state=True)
    expected, expected_state = layer(u, return_state=True)
    assert_close(y[:, 13:], expected, "float64")
    assert_close(state, expected_state, "float64")


def test_state_follows_its_beam():
    layer, u = make(), draw(3, 12, H)
    _, state = layer(u, return_state=True)
    order, token = torch.tensor([2, 0, 0]), draw(3, 1, H, seed=4)
    expected = layer(torch.cat([u[order], token], dim=1))[:, -1:]
    assert_close(layer(token, state=state.index_select(0, order)), expected, "float64")


@pytest.mark.parametrize("freeze", ["all", "none"])
@pytest.mark.parametrize("length", [1, 9])
def test_gradients_flow_through_the_state(freeze, length):
    layer = make(freeze=freeze)
    leaves = [draw(1, 6, H).requires_grad_(), draw(1, length, H, seed=3).requires_grad_(), *layer.parameters()]
    first, second = leaves[:2]
    wanted = torch.autograd.grad(layer(torch.cat([first, second], dim=1))[:, 6:].square().sum(), leaves)
    _, state = layer(first, return_state=True)
    actual = torch.autograd.grad(layer(second, state=state).square().sum(), leaves)
    for one, other in zip(actual, wanted, strict=True):
        assert_close(one, other, "float64 gradient")


# training


@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize("freeze", ["all", "none"])
def test_gradients_are_those_of_the_definition(freeze, bidirectional):
    layer, u = make(freeze=freeze, order=3, bidirectional=bidirectional), draw(2, 9, H).requires_grad_()
    weight = draw(2, 9, H, seed=5)
    trained = PROJECTIONS if freeze == "all" else [*PROJECTIONS, *NAMES]
    assert sorted(name for name, _ in layer.named_parameters()) == sorted(trained)
    assert sorted(layer.state_dict()) == sorted([*PROJECTIONS, *NAMES])
    leaves = [u, *layer.parameters()]
    actual = torch.autograd.grad((layer(u) * weight).sum(), leaves)
    expected = torch.autograd.grad((by_definition(layer, u) * weight).sum(), leaves)
    for one, other in zip(actual, expected, strict=True):
        assert_close(one, other, "float64 gradient")
        assert one.abs().max() > 0


def test_projections_are_no_ssm_parameters():
    assert list(ssm_parameters(make())) == []
    layer = make(freeze="none", postact="gelu_glu")
    assert {id(x) for x in ssm_parameters(layer)} == {id(getattr(layer, name)) for name in NAMES}


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("freeze", ["all", "none"])
def test_gradient_checkpointing(freeze, use_reentrant):
    layer, u = make(freeze=freeze), draw(2, 30, H).requires_grad_()
    leaves = [u, *layer.parameters()]
    expected = torch.autograd.grad(layer(u).square().sum(), leaves)
    torch.utils.checkpoint.checkpoint(layer, u, use_reentrant=use_reentrant).square().sum().backward()
    for leaf, gradient in zip(leaves, expected, strict=True):
        assert_close(leaf.grad, gradient, "float64 gradient")


# precision


@pytest.mark.parametrize("freeze", ["all", "none"])
def test_casting_to_16_bits_keeps_the_filters_in_float32(freeze):
    layer = make(dtype=torch.float32, freeze=freeze)
    before = copy.deepcopy(layer.state_dict())
    nn.ModuleList([layer]).bfloat16()
    for name, tensor in layer.state_dict().items():
        assert tensor.dtype == (torch.float32 if name in NAMES else torch.bfloat16)
        if name in NAMES:
            assert_close(tensor, before[name], "exact")


def test_16_bit_model():
    layer, u = make(dtype=torch.float32), draw(2, 30, H, dtype=torch.bfloat16)
    wide = layer(u.float())
    assert layer(u).dtype == torch.bfloat16  # float32 weights, as transformers may keep them
    assert_close(layer(u), wide.bfloat16(), "exact")
    layer.bfloat16()
    y, state = layer(u, return_state=True)
    assert y.dtype == torch.bfloat16
    assert state.dtype == torch.float32
    assert_close(y, wide, "bfloat16")
    first, state = layer(u[:, :20], return_state=True)
    # the state holds what the convolutions read, so that decoding rounds nowhere else than the whole sequence does
    assert_close(state, state.bfloat16().float(), "exact")
    outputs = [first]
    for t in range(20, 30):
        token, state = layer(u[:, t : t + 1], state=state, return_state=True)
        assert token.dtype == torch.bfloat16
        outputs.append(token)
    assert_close(torch.cat(outputs, dim=1), y, "bfloat16")


@pytest.mark.parametrize("freeze", ["all", "none"])
def test_autocast_leaves_the_filters_alone(freeze):
    layer, u = make(dtype=torch.float32, freeze=freeze), draw(2, 30, H, dtype=torch.float32)
    taps, expected = layer._taps(16), layer(u)
    layer.clear_cache()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert_close(layer._taps(16), taps, "exact")
        y, state = layer(u, return_state=True)
        _, part = layer(u[:, :20], return_state=True)
        rest, after = layer(u[:, 20:], state=part, return_state=True)
    assert y.dtype == state.dtype == torch.float32
    assert_close(y, expected, "bfloat16")
    assert_close(rest, y[:, 20:], "bfloat16")
    assert_close(after, state, "bfloat16")


# taps that are kept


def test_frozen_taps_are_made_once(filters_made):
    layer = make(max_length=40)
    for length in (30, 32, 17, 1, 25):
        layer(draw(2, length, H).requires_grad_()).sum().backward()
    assert filters_made == [32]
    layer(draw(2, 33, H))
    layer(draw(2, 100, H))
    assert filters_made == [32, 40]
    _, state = layer(draw(2, 5, H), return_state=True)
    for _ in range(3):
        _, state = layer(draw(2, 1, H), state=state, return_state=True)
    assert filters_made == [32, 40]
    layer.float()
    assert layer._kept is None


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_changes_are_seen(mode):
    layer, u = make(), draw(2, 12, H)

    def check(row="float64"):
        with mode():
            y = layer(u.to(layer.D.dtype))
            _, state = layer(u[:, :11].to(layer.D.dtype), return_state=True)
            token = layer(u[:, 11:].to(layer.D.dtype), state=state)
        expected = by_definition(copy.deepcopy(layer).double(), u)
        assert_close(y, expected, row)
        assert_close(token, expected[:, 11:], row)
        return y

    first = check()
    layer.mlp_in_bias.mul_(2)
    assert not torch.allclose(check(), first)
    layer.load_state_dict(make(seed=3).state_dict())
    assert not torch.allclose(check(), first)
    layer.load_state_dict(make(seed=4).state_dict(), assign=True)
    check()
    layer.sine_frequency = layer.sine_frequency + 0.5
    check()
    layer.reset_parameters()
    check()
    layer.float()
    check("float32")
    layer.double()
    check()
    layer.mlp_out_weight.data = layer.mlp_out_weight * 3
    check()
    layer.mlp_out_weight.data.mul_(3)  # not seen, as documented
    layer.clear_cache()
    check()


def test_optimizers_are_seen_without_switching_modes():
    for options in ({}, {"foreach": True}, {"fused": True}):
        layer, u = make(freeze="none"), draw(2, 6, H)
        optimizer = torch.optim.AdamW(layer.parameters(), lr=0.1, **options)
        for _ in range(2):
            layer(u).square().sum().backward()
            optimizer.step()
            with torch.no_grad():
                assert_close(layer(u), by_definition(layer, u), "float64")


def test_inference_first_and_training_afterwards():
    layer, u = make(), draw(2, 12, H)
    with torch.inference_mode():
        first, state = layer(u, return_state=True)
        layer(u[:, :1], state=state)
    leaf = u.clone().requires_grad_()
    y, state = layer(leaf, return_state=True)
    (y.square().sum() + layer(leaf[:, :1], state=state).sum()).backward()
    assert_close(y, first, "exact")
    assert leaf.grad.abs().min() > 0


def test_kept_taps_are_no_part_of_copies_pickles_and_state(filters_made):
    layer, u = make(), draw(2, 12, H)
    size = len(pickle.dumps(layer))
    expected = layer(u)
    assert len(pickle.dumps(layer)) == size
    for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        made = len(filters_made)
        assert_close(other(u), expected, "exact")
        assert len(filters_made) == made + 1
        other.mlp_out_weight.zero_()
        assert_close(layer(u), expected, "exact")


# module


def test_counts():
    def count(**options):
        return sum(x.numel() for x in Hyena(1024, max_length=100, **options).state_dict().values())

    with torch.device("meta"):
        projections = 1024 * 3072 + 3072 + 1024 * 1024 + 1024 + 3072 * 3 + 3072
        network = 33 * 64 + 64 + 2 * (64 * 64 + 64) + 64
        assert count() == projections + network + 64 * 1024 + 1024 == 4_287_808
        assert count(freeze="none") == count()
        assert count(bidirectional=True) == count() + 64 * 1024
        assert count(order=3) == count() + 64 * 1024 + 1024 + 1024 * 1024 + 1024 + 1024 * 4


def test_initial_values():
    torch.manual_seed(0)
    layer = Hyena(64, max_length=10, sine_frequency=5.0, freeze="none")
    assert (layer.sine_frequency == 5).all()
    assert 0.7 < layer.D.std().item() < 1.3
    for name, fan_in in (("mlp_in_weight", 33), ("mlp_in_bias", 33), ("mlp_hidden_bias", 64), ("mlp_out_weight", 64)):
        assert 0.9 * fan_in**-0.5 < getattr(layer, name).abs().max() <= fan_in**-0.5
    with torch.no_grad():
        for tensor in (*layer.in_proj.parameters(), *layer.short_conv.parameters()):
            tensor.normal_(std=0.02)  # as transformers initialises projections and convolutions
    layer.reset_parameters()
    for module, fan_in in ((layer.in_proj, 64), (layer.short_conv, 3)):
        for tensor in module.parameters():
            assert 0.9 * fan_in**-0.5 < tensor.abs().max() <= fan_in**-0.5


@pytest.mark.parametrize("freeze", ["all", "none"])
def test_meta_device_and_reset(freeze):
    with torch.device("meta"):
        layer = Hyena(H, max_length=9, freeze=freeze)
        u = torch.empty(2, 30, H)
    y, state = layer(u, torch.ones(2, 30, device="meta"), return_state=True)
    assert y.shape == u.shape
    assert state.shape == layer.state_shape(2)
    assert layer(u[:, :1], state=state).shape == (2, 1, H)
    layer.to_empty(device="cpu")
    for tensor in layer.state_dict().values():
        tensor.fill_(torch.nan)
    layer.out_proj.reset_parameters()
    layer.reset_parameters()
    for tensor in layer.state_dict().values():
        assert torch.isfinite(tensor).all()


@pytest.mark.parametrize("name", [*NAMES, *PROJECTIONS])
def test_reset_leaves_loaded_tensors_alone(name):
    layer = make(freeze="none")
    tensors = layer.state_dict(keep_vars=True)
    for tensor in tensors.values():
        tensor.data.fill_(7)
    tensors[name]._is_hf_initialized = True
    layer.reset_parameters()
    for other, tensor in tensors.items():
        assert (tensor == 7).all() == (other == name or other.startswith("out_proj"))


def test_state_dict_moves_between_freezes():
    source, u = make(freeze="none"), draw(2, 20, H)
    layer = make(seed=9)
    layer.load_state_dict(source.state_dict())
    assert_close(layer(u), source(u), "float64")


@pytest.mark.parametrize("options", [{}, {"bidirectional": True}, {"freeze": "none"}])
def test_compiles_without_graph_breaks(options):
    torch._dynamo.reset()
    layer = make(**options)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    u = draw(2, 5, H).requires_grad_()
    leaves = [u, *layer.parameters()]
    actual, expected = compiled(u), layer(u)
    assert_close(actual, expected, "float64")
    gradients = [torch.autograd.grad(y.square().sum(), leaves) for y in (actual, expected)]
    for one, other in zip(*gradients, strict=True):
        assert_close(one, other, "float64 gradient")
    if not options:
        with torch.no_grad():
            _, state = layer(u, return_state=True)
            results = [function(u[:, :1], state=state, return_state=True) for function in (compiled, layer)]
        for one, other in zip(*results, strict=True):
            assert_close(one, other, "float64")
        layer.D.mul_(2)
        assert_close(compiled(u), layer(u), "float64")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"order": 1}, "order must be at least 2; got 1"),
        ({"max_length": 0}, "max_length must be a positive integer; got 0"),
        ({"filter_size": 0}, "filter_size must be a positive integer; got 0"),
        ({"short_kernel_size": 0}, "short_kernel_size must be a positive integer; got 0"),
        ({"embedding_size": 8}, "embedding_size must be odd and at least 3; got 8"),
        ({"embedding_size": 1}, "embedding_size must be odd and at least 3; got 1"),
        ({"sine_frequency": 0.0}, "sine_frequency must be positive; got 0.0"),
        ({"freeze": "ab_dt"}, "freeze must be one of all, none; got 'ab_dt'"),
    ],
)
def test_bad_arguments(options, message):
    with pytest.raises(ValueError, match=message):
        Hyena(H, **{"max_length": 8, **options})


def test_bad_inputs():
    with pytest.raises(ValueError, match=r"state must be \(2, 21, 6\); got \(1, 21, 6\)"):
        make()(draw(2, 4, H), state=torch.zeros(1, 21, H))
    with pytest.raises(ValueError, match="bidirectional Hyena has no state"):
        make(bidirectional=True)(draw(2, 4, H), return_state=True)
