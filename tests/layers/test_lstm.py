"""The LSTM in a state space model's place: its recurrence, masks, state, and what a cast does to it."""

import copy

import pytest
import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from hf_hybrid.layers.lstm import LSTM
from hf_hybrid.layers.state_space import ssm_parameters
from tests.tolerances import assert_close

H = 5
NAMES = [f"lstm.{kind}_{gates}_l0" for kind in ("weight", "bias") for gates in ("ih", "hh")]


def make(seed=0, dtype=torch.float64, **options):
    torch.manual_seed(seed)
    layer = LSTM(H, **options).to(dtype)
    with torch.no_grad():
        for _, tensor in layer.own_tensors():
            tensor.normal_()
    return layer


def draw(*shape, seed=1, dtype=torch.float64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def recurrence(layer, u, state=None, suffix=""):
    """One direction by its equations: outputs, and h and c at the end."""
    weights = [getattr(layer.lstm, f"{name}_l0{suffix}") for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")]
    h, c = (u.new_zeros(u.shape[0], H),) * 2 if state is None else state.unbind(1)
    outputs = []
    for x in u.unbind(1):
        gates = x @ weights[0].T + weights[2] + h @ weights[1].T + weights[3]
        i, f, g, o = gates.split(H, dim=-1)
        c = f.sigmoid() * c + i.sigmoid() * g.tanh()
        h = o.sigmoid() * c.tanh()
        outputs.append(h)
    return torch.stack(outputs, dim=1), torch.stack([h, c], dim=1)


def both_ways(layer, u):
    return recurrence(layer, u)[0] + recurrence(layer, u.flip(1), suffix="_reverse")[0].flip(1)


# function


@pytest.mark.parametrize("length", [1, 2, 17])
def test_forward_is_the_recurrence(length):
    layer, u = make(), draw(3, length, H)
    y, state = layer(u, return_state=True)
    expected, expected_state = recurrence(layer, u)
    assert_close(y, expected, "float64")
    assert_close(state, expected_state, "float64")
    assert_close(y[:, -1], state[:, 0], "exact")


@pytest.mark.parametrize("length", [1, 2, 17])
def test_bidirectional_is_the_sum(length):
    layer, u = make(bidirectional=True), draw(3, length, H)
    assert_close(layer(u), both_ways(layer, u), "float64")


def test_causality():
    layer, u = make(), draw(2, 30, H)
    changed = u.clone()
    changed[:, 15] += 1
    assert_close(layer(changed)[:, :15], layer(u)[:, :15], "exact")
    assert (layer(changed)[:, 15] - layer(u)[:, 15]).abs().max() > 1e-2


@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize("mask_dtype", [torch.bool, torch.long, torch.float32])
def test_masked_tokens_are_passed_over(mask_dtype, bidirectional):
    """On the left, on the right, in between, all of a row and none."""
    layer, u = make(bidirectional=bidirectional), draw(6, 20, H)
    kept = torch.ones(6, 20, dtype=torch.bool)
    kept[0, :7] = kept[1, 12:] = kept[2, 5:9] = kept[3] = kept[4, ::2] = False
    y = layer(u.masked_fill(~kept[..., None], torch.nan), kept.to(mask_dtype))
    for row in (0, 1, 2, 4, 5):
        alone = u[row : row + 1, kept[row]]
        expected = both_ways(layer, alone) if bidirectional else recurrence(layer, alone)[0]
        assert_close(y[row : row + 1, kept[row]], expected, "float64")
    assert (y[~kept] == 0).all()
    # unlike zero inputs
    assert (layer(u * kept[..., None]) - y)[0, 7:].abs().max() > 1e-2


# state


@pytest.mark.parametrize("split", [1, 2, 20, 39])
def test_state_hand_over(split):
    layer, u = make(), draw(2, 40, H)
    expected, last = recurrence(layer, u)
    y, state = layer(u[:, :split], return_state=True)
    assert state.shape == layer.state_shape(2) == (2, 2, H)
    assert state.dtype == torch.float64
    rest, state = layer(u[:, split:], state=state, return_state=True)
    assert_close(torch.cat([y, rest], dim=1), expected, "float64")
    assert_close(state, last, "float64")


def test_state_is_not_touched_by_masked_tokens():
    layer, u, before = make(), draw(5, 20, H), draw(5, 2, H, seed=3)
    kept = torch.ones(5, 20, dtype=torch.bool)
    kept[0, :7] = kept[1, 12:] = kept[2, 5:9] = kept[3] = False
    for state in (None, before):
        _, after = layer(u, kept, state, return_state=True)
        assert_close(after[3], torch.zeros(2, H) if state is None else state[3], "exact")
        for row in (0, 1, 2, 4):
            alone = u[row : row + 1, kept[row]]
            expected = recurrence(layer, alone, None if state is None else state[row : row + 1])[1]
            assert_close(after[row : row + 1], expected, "float64")


def test_state_follows_its_beam():
    layer, u = make(), draw(3, 12, H)
    _, state = layer(u, return_state=True)
    order, token = torch.tensor([2, 0, 0]), draw(3, 1, H, seed=4)
    expected = layer(torch.cat([u[order], token], dim=1))[:, -1:]
    assert_close(layer(token, state=state.index_select(0, order)), expected, "float64")


def test_bidirectional_has_no_state():
    with pytest.raises(ValueError, match="bidirectional LSTM has no state"):
        make(bidirectional=True)(draw(2, 4, H), return_state=True)


# training


@pytest.mark.parametrize("masked", [False, True])
def test_gradients_are_those_of_the_recurrence(masked):
    layer = make()
    leaves = [draw(2, 9, H).requires_grad_(), draw(2, 2, H, seed=3).requires_grad_(), *layer.parameters()]
    u, state = leaves[:2]
    kept = (torch.arange(9) >= 4).expand(2, 9) if masked else None
    y, after = layer(u, kept, state, return_state=True)
    used = u[:, 4:] if masked else u
    expected, expected_after = recurrence(layer, used, state)
    y = y[:, 4:] if masked else y
    actual = torch.autograd.grad(y.square().sum() + after.square().sum(), leaves)
    wanted = torch.autograd.grad(expected.square().sum() + expected_after.square().sum(), leaves)
    for one, other in zip(actual, wanted, strict=True):
        assert_close(one, other, "float64 gradient")
        assert one.abs().max() > 0


def test_ssm_parameters_are_the_lstms():
    layer = make(postact="gelu_glu")
    assert {id(x) for x in ssm_parameters(layer)} == {id(x) for x in layer.lstm.parameters()}
    assert sorted(name for name, _ in layer.own_tensors()) == sorted(NAMES)
    assert sorted(make().state_dict()) == sorted(NAMES)
    assert len(make(bidirectional=True).state_dict()) == 8


# precision


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_casting_to_16_bits_keeps_the_lstm_in_float32(dtype):
    layer = make(dtype=torch.float32, postact="gelu_glu")
    u = draw(2, 30, H, dtype=dtype)
    wide = make(dtype=torch.float32)
    wide.load_state_dict(layer.state_dict(), strict=False)
    expected, expected_state = wide(u.float(), return_state=True)
    nn.ModuleList([layer]).to(dtype)
    assert layer.output_linear.weight.dtype == dtype
    assert {x.dtype for _, x in layer.own_tensors()} == {torch.float32}
    layer.output_linear = None
    y, state = layer(u, return_state=True)
    assert y.dtype == dtype
    assert state.dtype == torch.float32
    assert_close(y, expected.to(dtype), "exact")
    assert_close(state, expected_state, "exact")
    token = layer(u[:, :1], torch.ones(2, 1), state=state)
    assert_close(token, wide(u[:, :1].float(), state=state).to(dtype), "exact")
    assert layer.double().lstm.weight_hh_l0.dtype == torch.float64
    assert layer.to("meta", dtype).lstm.weight_hh_l0.device.type == "meta"


def test_default_dtype_of_16_bits_builds_float32():
    torch.set_default_dtype(torch.bfloat16)
    try:
        layer = LSTM(H)
    finally:
        torch.set_default_dtype(torch.float32)
    assert {x.dtype for x in layer.state_dict().values()} == {torch.float32}


@pytest.mark.parametrize("mask", [None, torch.ones(2, 30)])
def test_autocast_changes_nothing(mask):
    layer, u = make(dtype=torch.float32), draw(2, 30, H, dtype=torch.float32)
    expected = layer(u, mask, return_state=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        actual = layer(u, mask, return_state=True)
    for one, other in zip(actual, expected, strict=True):
        assert_close(one, other, "exact")


# module


def test_counts():
    with torch.device("meta"):
        assert sum(x.numel() for x in LSTM(1024).parameters()) == 8 * 1024**2 + 8 * 1024
        assert sum(x.numel() for x in LSTM(768, bidirectional=True).parameters()) == 2 * (8 * 768**2 + 8 * 768)


def check_initial_values(layer):
    for name, tensor in layer.own_tensors():
        bound = (6 / (5 * H)) ** 0.5  # Xavier: H in, 4 H out
        assert (0.7 * bound < tensor.abs().max() <= bound) if "weight" in name else (tensor == 0).all()


def test_meta_device_and_reset():
    with torch.device("meta"):
        layer, u = LSTM(H), torch.empty(2, 7, H)
    y, state = layer(u, return_state=True)
    assert y.shape == u.shape
    assert state.shape == (2, 2, H)
    layer.to_empty(device="cpu")
    for tensor in layer.state_dict().values():
        tensor.fill_(torch.nan)
    torch.manual_seed(0)
    layer.reset_parameters()
    check_initial_values(layer)
    torch.manual_seed(0)
    check_initial_values(LSTM(H))


@pytest.mark.parametrize("name", NAMES)
def test_reset_leaves_loaded_tensors_alone(name):
    layer = make()
    for _, tensor in layer.own_tensors():
        tensor.data.fill_(7)
    layer.get_parameter(name)._is_hf_initialized = True
    layer.reset_parameters()
    for other, tensor in layer.own_tensors():
        assert (tensor == 7).all() == (other == name)


class ToyModel(PreTrainedModel):
    config: PreTrainedConfig
    base_model_prefix = "toy"

    def __init__(self, config):
        super().__init__(config)
        self.layer = LSTM(H)
        self.post_init()


def test_transformers_saves_loads_and_initialises(tmp_path):
    torch.manual_seed(0)
    model, u = ToyModel(PreTrainedConfig()), draw(2, 7, H, dtype=torch.float32)
    check_initial_values(model.layer)
    model.save_pretrained(tmp_path)
    assert_close(ToyModel.from_pretrained(tmp_path).layer(u), model.layer(u), "exact")
    assert_close(copy.deepcopy(model).layer(u), model.layer(u), "exact")


def test_bad_arguments():
    with pytest.raises(ValueError, match="freeze must be one of none; got 'all'"):
        LSTM(H, freeze="all")
    with pytest.raises(ValueError, match="hidden_size must be a positive integer; got 0"):
        LSTM(0)
    with pytest.raises(ValueError, match=r"state must be \(2, 2, 5\); got \(2, 5\)"):
        make()(draw(2, 4, H), state=torch.zeros(2, H))
