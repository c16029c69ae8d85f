"""Long and short-long convolutions and Mega's moving average: functions, states, fusing, options."""

import copy
import math
import pickle

import pytest
import torch
from torch.nn import functional as F

from hf_hybrid.layers.long_conv import DampedEMA, LongConv, ShortLongConv
from hf_hybrid.layers.state_space import ssm_parameters
from tests.tolerances import assert_close

H, LENGTH = 6, 60
LAYERS = {
    "long": lambda **options: LongConv(H, 9, **options),
    "long, one tap": lambda **options: LongConv(H, 1, **options),
    "groups and regularisation": lambda **options: LongConv(
        H, 9, groups=2, squash=0.001, smoothing=3, init="random", **options
    ),
    "short-long": lambda **options: ShortLongConv(H, 9, short_kernel_sizes=(3, 5), **options),
    "three branches, no biases": lambda **options: ShortLongConv(
        H, 40, short_kernel_sizes=(1, 3, 5), short_bias=False, use_D=False, **options
    ),
    "branch norms": lambda **options: ShortLongConv(H, 17, short_kernel_sizes=(3, 5), branch_norm=True, **options),
    "moving average": lambda **options: DampedEMA(H, 4, **options),
}
every_layer = pytest.mark.parametrize("name", LAYERS)
SHORT_LONG = [name for name in LAYERS if "short" in name or "branch" in name]


def draw(*shape, seed=1):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def make(name, seed=0, **options):
    torch.manual_seed(seed)
    layer = LAYERS[name](**options).double()
    with torch.no_grad():  # biases, running statistics and taps large enough to matter
        for key, tensor in layer.state_dict(keep_vars=True).items():
            if key == "long_kernel":
                tensor.mul_(20)
            elif "bias" in key or "mean" in key:
                tensor.normal_()
            elif "var" in key:
                tensor.uniform_(0.5, 2)
    return layer.eval()


def by_definition(layer, u):
    """The layer from its equations, with torch's conv1d."""
    if isinstance(layer, DampedEMA):
        return moving_average(layer, u)
    x, skip = u.mT, layer.D
    if isinstance(layer, ShortLongConv):
        total = 0
        for i, size in enumerate(layer.short_kernel_sizes):
            kernel, bias = getattr(layer, f"short_kernel_{i}"), getattr(layer, f"short_bias_{i}")
            pads = (size // 2, size // 2) if layer.bidirectional else (size - 1, 0)
            y = F.conv1d(F.pad(x, pads), kernel.flip(1)[:, None], bias, groups=H)
            if layer.short_norms is not None:
                norm = layer.short_norms[i]
                y = F.batch_norm(y, norm.running_mean, norm.running_var, norm.weight, norm.bias)
            total = total + y
        x = F.silu(total)
    taps = layer.long_kernel
    taps = taps.sign() * (taps.abs() - layer.squash).clamp_min(0)
    half = layer.smoothing // 2
    taps = F.pad(taps, (half, half)).unfold(-1, layer.smoothing, 1).mean(-1)
    taps = taps.repeat(1, H // layer.groups, 1)
    size = taps.shape[-1]
    y = F.conv1d(F.pad(x, (size - 1, 0)), taps[0].flip(1)[:, None], groups=H)
    if layer.bidirectional:
        y = y + F.conv1d(F.pad(x, (0, size)), taps[1][:, None], groups=H)[..., 1:]
    return (y if skip is None else y + skip[:, None] * x).mT


def moving_average(layer, u):
    p, alpha = torch.sigmoid(layer.p_logit), torch.sigmoid(layer.alpha_logit)
    total = layer.omega * u
    for direction in range(p.shape[0]):
        h, rows = torch.zeros(u.shape[0], H, layer.state_size, dtype=u.dtype), []
        for x in (u.flip(1) if direction else u).unbind(1):
            before = h
            h = (1 - p * alpha)[direction] * h + (p * layer.beta)[direction] * x[..., None]
            # the future is read from the next token on
            rows.append((layer.eta[direction] * (before if direction else h)).sum(-1) / math.sqrt(layer.state_size))
        y = torch.stack(rows, dim=1)
        total = total + (y.flip(1) if direction else y)
    return total


@every_layer
@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize("length", [1, 5, 9, 30])
def test_the_function_is_the_equations(name, bidirectional, length):
    layer, u = make(name, bidirectional=bidirectional), draw(2, length, H)
    assert_close(layer(u), by_definition(layer, u), "float64")


@every_layer
@pytest.mark.parametrize("prompt", [1, 3, 20])
def test_a_sequence_in_parts_gives_what_it_gives_in_one(name, prompt):
    layer, u = make(name), draw(2, LENGTH, H)
    expected = layer(u)
    y, state = layer(u[:, :prompt], return_state=True)
    outputs, start = [y], prompt
    for size in [2, 1, 1, 5, 11] + [1] * LENGTH:
        if start >= LENGTH:
            break
        y, state = layer(u[:, start : start + size], state=state, return_state=True)
        outputs.append(y)
        start += size
    assert_close(torch.cat(outputs, dim=1), expected, "float64")


@every_layer
@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize("training", [False, True])
def test_padding_changes_nothing(name, bidirectional, training):
    layer, u = make(name, bidirectional=bidirectional).train(training), draw(1, 20, H)
    mask = torch.zeros(1, 31, dtype=torch.long)
    mask[:, 6:26] = 1
    padded = torch.full((1, 31, H), torch.nan, dtype=torch.float64)
    padded[:, 6:26] = u
    assert_close(layer(padded, mask)[:, 6:26], layer(u), "float64")


@every_layer
def test_pads_between_tokens_are_passed_over_by_the_state(name):
    """What a cache holds behind left padding is what it holds without."""
    layer, u = make(name), draw(1, 20, H)
    padded, mask = F.pad(u, (0, 0, 6, 0), value=3.0), F.pad(torch.ones(1, 20), (6, 0))
    _, with_pads = layer(padded[:, :20], mask[:, :20], return_state=True)
    _, without = layer(u[:, :14], return_state=True)
    outputs = [layer(u[:, 14:], state=state, return_state=True)[0] for state in (with_pads, without)]
    assert_close(*outputs, "float64")


@every_layer
def test_causality(name):
    layer, u = make(name), draw(1, 40, H)
    changed = u.clone()
    changed[:, 25:] += 1
    before, after = layer(u), layer(changed)
    assert_close(after[:, :25], before[:, :25], "float64 fft")
    assert (after[:, 25:] - before[:, 25:]).abs().max() > 1e-3


def test_equal_prefixes_have_equal_outputs_at_any_length():
    layer, u = make("short-long"), draw(1, 300, H)
    for length in (4, 9, 10, 100):
        assert_close(layer(u[:, :length]), layer(u)[:, :length], "float64 fft")


@every_layer
def test_taps_stay_in_float32_and_16_bits_stay_finite(name):
    layer = make(name).float().bfloat16()
    assert all(x.dtype == torch.float32 for _, x in layer.own_tensors())
    for dtype in (torch.bfloat16, torch.float16):
        y = layer(draw(1, 16384, H).to(dtype))
        assert y.dtype == dtype
        assert torch.isfinite(y).all()


@every_layer
def test_every_parameter_gets_its_gradient(name):
    layer, u = make(name, bidirectional=True), draw(2, 12, H)
    for function in (layer, lambda u: by_definition(layer, u)):
        layer.zero_grad()
        function(u).pow(3).sum().backward()
        gradients = [p.grad.clone() for p in layer.parameters()]
        if function is layer:
            ours = gradients
    for one, other in zip(ours, gradients, strict=True):
        assert_close(one, other, "float64 gradient")


@pytest.mark.parametrize("name", SHORT_LONG)
def test_gradients_of_two_calls_add_up(name):
    layer, u = make(name), draw(2, 12, H)
    layer(u).pow(3).sum().backward()
    once = [p.grad.clone() for p in layer.parameters()]
    layer(u).pow(3).sum().backward()
    for p, gradient in zip(layer.parameters(), once, strict=True):
        assert_close(p.grad, 2 * gradient, "float64 gradient")


# initial values


@torch.no_grad()
def test_initial_taps():
    torch.manual_seed(0)
    layer = LongConv(64, 4096)
    start, end = (layer.long_kernel[0, :, at].std(1) for at in (slice(0, 200), slice(-200, None)))
    assert 0.015 < start[0] < 0.022
    assert end[0] == pytest.approx(0.02 / math.e, rel=0.2)  # one e-fold in the first channel
    rate = 32 ** (31 / 64)
    assert end[31] == pytest.approx(0.02 * math.exp(-rate), rel=0.3)
    assert LongConv(64, 4096, init="random").long_kernel.std().item() == pytest.approx(0.002, rel=0.02)
    assert (layer.D == 1).all()
    assert LongConv(4, 9, use_D=False).D is None


@every_layer
def test_reset_keeps_what_was_loaded(name):
    layer = make(name)
    with torch.no_grad():
        for _, tensor in layer.own_tensors():
            tensor.add_(1)
    before = {key: tensor.clone() for key, tensor in layer.own_tensors()}
    first = next(iter(before))
    dict(layer.own_tensors())[first]._is_hf_initialized = True
    layer.reset_parameters()
    changed = {key for key, tensor in layer.own_tensors() if not torch.equal(tensor, before[key])}
    assert first not in changed
    assert changed


def test_long_taps_alone_shape_memory():
    layer = make("short-long")
    assert [id(p) for p in ssm_parameters(layer, dynamics=True)] == [id(layer.long_kernel)]
    assert len(list(ssm_parameters(layer))) == len(list(layer.parameters()))
    average = make("moving average")
    assert {id(p) for p in ssm_parameters(average, dynamics=False)} == {id(average.eta), id(average.omega)}


# regularisation


def test_squashed_taps():
    layer = LongConv(H, 50, squash=0.01).double()
    taps = layer._taps(50)
    small = layer.long_kernel.abs() <= 0.01
    assert small.any()
    assert (taps[small] == 0).all()
    assert_close(taps[~small].abs(), layer.long_kernel[~small].abs() - 0.01, "float64")
    plain = LongConv(H, 50)
    assert plain._taps(50).data_ptr() == plain.long_kernel.data_ptr()  # nothing is done to them


def test_kernel_dropout_is_off_in_evaluation():
    torch.manual_seed(0)
    layer = LongConv(H, 200, kernel_dropout=0.5).double()
    dropped = layer._taps(200)
    assert 0.4 < (dropped == 0).double().mean() < 0.6
    assert_close(layer.eval()._taps(200), layer.long_kernel, "exact")


# fusing


@pytest.mark.parametrize("name", SHORT_LONG)
@pytest.mark.parametrize("bidirectional", [False, True])
def test_fused_is_unfused_and_back(name, bidirectional):
    layer, u = make(name, bidirectional=bidirectional), draw(2, 20, H)
    expected = layer(u).detach()
    saved = copy.deepcopy(layer.state_dict())
    for _ in range(2):
        layer.fuse_short_convs()
    with torch.no_grad():
        for _ in range(2):
            assert_close(layer(u), expected, "float64")
        kept = layer._kept[2][0]
        assert kept.shape == (H, 5)
        layer(u)
        assert layer._kept[2][0] is kept, "made anew"
    assert layer.state_dict().keys() == saved.keys()
    for key, value in layer.state_dict().items():
        assert_close(value, saved[key], "exact")
    layer.unfuse_short_convs()
    assert layer._kept is None
    assert_close(layer(u), expected, "exact")


@pytest.mark.parametrize("options", [{"squash": 0.01}, {"smoothing": 3}])
def test_regularised_taps_are_made_once_and_follow_the_kernel(options, monkeypatch):
    layer, other = (LongConv(H, 9, **options).double().eval() for _ in range(2))
    u, made = draw(2, 20, H), []
    make_taps = LongConv._taps
    monkeypatch.setattr(LongConv, "_taps", lambda self, length: made.append(1) or make_taps(self, length))
    with torch.no_grad():
        y, state = layer(u[:, :12], return_state=True)
        tokens = [y]
        for t in range(12, 20):
            y, state = layer(u[:, t : t + 1], state=state, return_state=True)
            tokens.append(y)
        assert len(made) == 1
        assert_close(torch.cat(tokens, 1), layer(u), "float64")
        layer.load_state_dict(other.state_dict())
        assert_close(layer(u), other(u), "float64")
        assert_close(pickle.loads(pickle.dumps(layer))(u), other(u), "float64")
    assert_close(layer(u), other(u), "float64")  # recording a gradient


@pytest.mark.parametrize("build", [LongConv, ShortLongConv])
def test_a_fused_optimizer_is_seen_in_evaluation(build):
    layer, u = build(H, 9, squash=0.01).eval(), draw(2, 20, H).float()
    optimizer = torch.optim.AdamW(layer.parameters(), lr=0.1, fused=True)
    for _ in range(3):
        layer(u).square().sum().backward()
        with torch.no_grad():
            fresh = copy.deepcopy(layer)  # copies keep nothing
            assert_close(layer(u), fresh(u), "exact")
            y, state = layer(u, return_state=True)
            expected, expected_state = fresh(u, return_state=True)
            assert_close(y, expected, "exact")
            tokens = (x(u[:, :1], state=s) for x, s in ((layer, state), (fresh, expected_state)))
            assert_close(*tokens, "exact")
        optimizer.step()


def test_fused_taps_follow_the_branches():
    layer, other, u = make("branch norms"), make("branch norms", seed=3), draw(2, 20, H)
    layer.fuse_short_convs()
    with torch.no_grad():
        layer(u)
        layer.load_state_dict(other.state_dict())
        assert_close(layer(u), other(u), "float64")
        layer.short_kernel_0.mul_(2)
        other.short_kernel_0.mul_(2)
        assert_close(layer(u), other(u), "float64")
        assert_close(pickle.loads(pickle.dumps(layer))(u), other(u), "float64")
        assert_close(layer.float()(u.float()), other.float()(u.float()), "float32")


def test_training_unfuses_and_cannot_fuse():
    layer = make("short-long")
    layer.fuse_short_convs()
    layer.train()
    assert not layer.fused
    with pytest.raises(ValueError, match="evaluation mode only"):
        layer.fuse_short_convs()
    with pytest.raises(ValueError, match="evaluation mode only"):
        layer.merge_branches()


@pytest.mark.parametrize("name", SHORT_LONG)
def test_merged_branches_are_a_layer_of_one_branch(name):
    layer, u = make(name), draw(2, 20, H)
    expected = layer(u).detach()
    layer.merge_branches()
    assert_close(layer(u), expected, "float64")
    bias = "no biases" not in name
    single = ShortLongConv(
        H, layer.kernel_size, short_kernel_sizes=(5,), short_bias=bias, use_D=layer.D is not None
    ).double()
    single.load_state_dict(layer.state_dict())
    assert_close(single(u), expected, "float64")
    layer.train()(u).sum().backward()
    assert all(p.grad is not None for p in layer.parameters())


def test_short_and_long_do_not_fuse():
    """SiLU lies between: the layer is not linear, so that no single filter is the same."""
    layer, u = make("short-long"), draw(1, 20, H)
    assert (layer(2 * u) - 2 * layer(u)).abs().max() > 0.1


def test_branch_norms_use_their_own_statistics_in_training():
    layer, u = make("branch norms").train(), draw(2, 30, H)
    apart = []
    for i, size in enumerate(layer.short_kernel_sizes):
        kernel, bias = getattr(layer, f"short_kernel_{i}"), getattr(layer, f"short_bias_{i}")
        y = F.conv1d(F.pad(u.mT, (size - 1, 0)), kernel.flip(1)[:, None], bias, groups=H)
        norm = layer.short_norms[i]
        apart.append(F.batch_norm(y, None, None, norm.weight, norm.bias, training=True))
    a = F.silu(apart[0] + apart[1])
    kernel = layer.long_kernel[0].flip(1)[:, None]
    expected = F.conv1d(F.pad(a, (16, 0)), kernel, groups=H) + layer.D[:, None] * a
    assert_close(layer(u), expected.mT, "float64")


# bad arguments


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kernel_size": 0}, "kernel_size must be a positive integer; got 0"),
        ({"groups": 0}, "groups must be a positive integer; got 0"),
        ({"groups": 4}, "groups must divide hidden_size 6; got 4"),
        ({"init": "ones"}, "init must be one of double_exp, random; got 'ones'"),
        ({"squash": -1.0}, "squash must not be negative; got -1.0"),
        ({"kernel_dropout": 1.0}, r"kernel_dropout must lie in \[0, 1\); got 1.0"),
        ({"smoothing": 2}, "smoothing must be a positive odd integer; got 2"),
        ({"short_kernel_sizes": ()}, "short_kernel_sizes must be one or more positive integers"),
        ({"short_kernel_sizes": (3, 0)}, "short_kernel_sizes must be one or more positive integers"),
        ({"short_kernel_sizes": (3, 8), "bidirectional": True}, "short_kernel_sizes must be odd"),
    ],
)
def test_bad_arguments_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        ShortLongConv(H, options.pop("kernel_size", 9), **options)


def test_bad_states_are_refused():
    u = draw(2, 4, H)
    _, state = make("long")(u, return_state=True)
    for name, kind in (("long", "ConvState"), ("short-long", "ShortLongState")):
        with pytest.raises(ValueError, match=f"state must be a {kind}, as returned; got Tensor"):
            make(name)(u, state=torch.zeros(2, 3))
    with pytest.raises(ValueError, match="state must have 1 sequences"):
        make("long")(u[:1], state=state)
    with pytest.raises(ValueError, match=r"state must be \(2, 6, 4\); got \(2, 6, 3\)"):
        make("moving average")(u, state=torch.zeros(2, 6, 3))
    with pytest.raises(ValueError, match="bidirectional LongConv has no state"):
        make("long", bidirectional=True)(u, return_state=True)
    with pytest.raises(ValueError, match="state_size must be a positive integer; got 0"):
        DampedEMA(H, 0)
