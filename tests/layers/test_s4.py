"""The S4 layer: its function, its cache, its state, and its behaviour as a module."""

import copy
import io
import pickle

import pytest
import torch
from torch import nn

from hf_hybrid.kernels.ssm_kernel import S4Cache, dplr_legs, frozen_s4_advance, frozen_s4_conv, reference
from hf_hybrid.kernels.ssm_kernel import system as system_module
from hf_hybrid.layers.s4 import S4, ssm_parameters
from tests.tolerances import assert_close

NAMES = ["A_imag", "B", "C", "D", "P", "log_A_real", "log_dt"]
FREEZES = ("all", "ab_dt", "none")


def make(hidden_size=6, state_size=8, seed=0, dtype=torch.float64, **options):
    torch.manual_seed(seed)
    return S4(hidden_size, state_size, **options).to(dtype)


def draw(*shape, seed=1, dtype=torch.float64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def parts(layer):
    C, B, P = (torch.view_as_complex(x.detach().double()) for x in (layer.C, layer.B[0], layer.P[0]))
    w = torch.complex(-layer.log_A_real.detach().double().exp(), layer.A_imag.detach().double())
    return C, B, P, w, layer.log_dt.detach().double().exp()


def scan(layer, u, state=None):
    """The layer by its recurrence, causal direction only."""
    state = None if state is None else torch.view_as_complex(state.double())
    y, state = reference.s4_scan(u.double(), *parts(layer), state)
    return y[:, 0] + layer.D.detach() * u, torch.view_as_real(state)


def double_sum(layer, u):
    """The layer by its taps, one pair of positions at a time."""
    kernel = reference.s4_kernel(*parts(layer), u.shape[1])
    if layer.max_length is not None:
        kernel[..., layer.max_length :] = 0
    y = torch.zeros_like(u)
    for t in range(u.shape[1]):
        for s in range(u.shape[1]):
            if s <= t:
                y[:, t] += kernel[0, :, t - s] * u[:, s]
            elif layer.bidirectional:
                y[:, t] += kernel[1, :, s - t - 1] * u[:, s]
    return y if layer.D is None else y + layer.D.detach() * u


@pytest.fixture
def kernels_made(monkeypatch):
    """Count how often a kernel is generated."""
    made = []
    original = system_module.s4_kernel
    monkeypatch.setattr(system_module, "s4_kernel", lambda *x: made.append(x[5]) or original(*x))
    return made


# function


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"use_D": False},
        {"bidirectional": True},
        {"max_length": 5},
        {"freeze": "none"},
        {"bidirectional": True, "max_length": 7, "freeze": "none"},
    ],
)
@pytest.mark.parametrize("length", [1, 2, 13, 32])
def test_forward_is_the_double_sum(options, length):
    layer, u = make(**options), draw(2, length, 6)
    assert_close(layer(u), double_sum(layer, u), "float64")
    assert_close(layer.float()(u.float()), double_sum(layer, u), "float32")


def test_forward_is_the_recurrence():
    layer, u = make(), draw(2, 50, 6)
    assert_close(layer(u), scan(layer, u)[0], "float64")


def test_any_length_after_any_other():
    layer = make()
    for length in (40, 1, 2, 37, 3, 701, 100):
        u = draw(1, length, 6, seed=length)
        assert_close(layer(u), scan(layer, u)[0], "float64")


def test_mirror():
    """Reversing the input and swapping the kernels mirrors the output, one position off: kernel 1 starts at lag 1."""
    layer, u = make(bidirectional=True, use_D=False), draw(1, 21, 6)
    swapped = copy.deepcopy(layer)
    swapped.C.copy_(layer.C.flip(0))
    assert_close(swapped(u.flip(1))[:, :-1], layer(u)[:, :-1].flip(1), "float64")


def test_impulse_returns_the_filter():
    layer = make(bidirectional=True, use_D=False)
    u = torch.zeros(1, 41, 6, dtype=torch.float64)
    u[:, 20] = 1
    kernel = reference.s4_kernel(*parts(layer), 21)
    y = layer(u)[0].mT
    assert_close(y[:, 20:], kernel[0], "float64")
    assert_close(y[:, :20].flip(1), kernel[1, :, :20], "float64")


def test_causality():
    layer, u = make(), draw(2, 60, 6)
    changed = u.clone()
    changed[:, 30] += 1
    assert_close(layer(changed)[:, :30], layer(u)[:, :30], "float64 fft")
    assert (layer(changed)[:, 30] - layer(u)[:, 30]).abs().max() > 0.1


def test_one_copy_is_many_equal_copies():
    one, many = make(num_copies=1), make(num_copies=3)
    many.C.copy_(one.C), many.D.copy_(one.D), many.log_dt.copy_(one.log_dt)
    u = draw(2, 30, 6)
    assert_close(many(u), one(u), "exact")


def test_channel_reads_copy_in_tile_order():
    layer = make(num_copies=3)
    layer.A_imag[1] *= 1.5
    default = make(num_copies=3)
    change = (layer(draw(1, 30, 6)) - default(draw(1, 30, 6))).abs().amax((0, 1))
    assert (change[[1, 4]] > 1e-3).all()
    assert_close(change[[0, 2, 3, 5]], torch.zeros(4, dtype=torch.float64), "exact")


def test_gelu_glu():
    layer, u = make(postact="gelu_glu"), draw(2, 9, 6)
    plain = make()
    plain.load_state_dict(layer.state_dict(), strict=False)
    projected = layer.output_linear(nn.functional.gelu(plain(u)))
    assert_close(layer(u), projected[..., :6] * projected[..., 6:].sigmoid(), "float64")
    layer = layer.bfloat16()
    assert layer(u.bfloat16()).dtype == torch.bfloat16
    layer.output_linear.float()
    assert layer(u.bfloat16()).dtype == torch.bfloat16


@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("mask_dtype", [torch.bool, torch.long, torch.float32])
def test_padding_is_exact(side, bidirectional, mask_dtype):
    layer, u = make(bidirectional=bidirectional), draw(1, 20, 6)
    pad = torch.full((1, 11, 6), torch.nan, dtype=torch.float64)
    real, none = torch.ones(1, 20), torch.zeros(1, 11)
    order = (pad, u), (none, real) if side == "left" else (real, none)
    padded, mask = torch.cat(order[0] if side == "left" else order[0][::-1], dim=1), torch.cat(order[1], dim=1)
    start = 11 if side == "left" else 0
    assert_close(layer(padded, mask.to(mask_dtype))[:, start : start + 20], layer(u), "float64")


# state


@pytest.mark.parametrize("freeze", FREEZES)
@pytest.mark.parametrize("split", [1, 2, 63, 64, 65, 129])
def test_state_hand_over(split, freeze):
    layer, u = make(freeze=freeze), draw(2, 130, 6)
    expected, last = scan(layer, u)
    y, state = layer(u[:, :split], return_state=True)
    assert state.shape == (2, 6, 4, 2)
    assert state.dtype == torch.float64
    rest, state = layer(u[:, split:], state=state, return_state=True)
    assert_close(torch.cat([y, rest], dim=1), expected, "float64")
    assert_close(state, last, "float64")


def test_decoding_is_the_convolution():
    layer, u = make(dtype=torch.float32), draw(2, 80, 6, dtype=torch.float32)
    expected = layer(u)
    outputs, state = [], None
    for t in range(80):
        y, state = layer(u[:, t : t + 1], state=state, return_state=True)
        outputs.append(y)
    assert state.dtype == torch.float32
    assert_close(torch.cat(outputs, dim=1), expected, "float32")


def test_state_without_asking_for_the_next():
    layer, u = make(), draw(2, 30, 6)
    _, state = layer(u[:, :10], return_state=True)
    y = layer(u[:, 10:], state=state)
    assert_close(y, layer(u)[:, 10:], "float64")


def test_state_is_not_touched_by_left_padding():
    layer, u = make(), draw(1, 20, 6)
    padded = torch.cat([torch.full_like(u[:, :13], torch.nan), u], dim=1)
    mask = (torch.arange(33) >= 13)[None].long()
    y, state = layer(padded, mask, return_state=True)
    expected, expected_state = layer(u, return_state=True)
    assert_close(y[:, 13:], expected, "float64")
    assert_close(state, expected_state, "float64")


def test_state_follows_its_beam():
    layer, u = make(), draw(3, 12, 6)
    _, state = layer(u, return_state=True)
    order = torch.tensor([2, 0, 0])
    token = draw(3, 1, 6, seed=4)
    expected = torch.cat(
        [layer(torch.cat([u[i : i + 1], token[j : j + 1]], dim=1))[:, -1:] for j, i in enumerate(order)]
    )
    assert_close(layer(token, state=state.index_select(0, order)), expected, "float64")


@pytest.mark.parametrize("freeze", FREEZES)
@pytest.mark.parametrize("length", [1, 9])
def test_gradients_flow_through_the_state(freeze, length):
    layer, u = make(freeze=freeze), draw(1, 7, 6).requires_grad_()
    first, second = u[:, : 7 - 1], draw(1, length, 6, seed=3).requires_grad_()
    both = layer(torch.cat([first, second], dim=1))[:, 6:].square().sum()
    wanted = torch.autograd.grad(both, [u, second])
    _, state = layer(first, return_state=True)
    actual = torch.autograd.grad(layer(second, state=state).square().sum(), [u, second])
    for one, other in zip(actual, wanted, strict=True):
        assert_close(one, other, "float64 gradient")


def test_bidirectional_has_no_state():
    layer, u = make(bidirectional=True), draw(1, 4, 6)
    with pytest.raises(ValueError, match="bidirectional S4 has no state"):
        layer(u, return_state=True)
    with pytest.raises(ValueError, match="bidirectional S4 has no state"):
        layer(u, state=torch.zeros(1, 6, 4, 2))


# training


@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize("freeze", FREEZES)
def test_only_what_is_trained_gets_gradients(freeze, bidirectional):
    layer, u = make(freeze=freeze, bidirectional=bidirectional), draw(2, 30, 6).requires_grad_()
    trained = {"all": [], "ab_dt": ["C", "D"], "none": NAMES}[freeze]
    assert sorted(name for name, _ in layer.named_parameters()) == trained
    assert sorted(layer.state_dict()) == NAMES
    layer(u).square().sum().backward()
    assert u.grad.abs().min() > 0
    for name in NAMES:
        tensor = getattr(layer, name)
        assert tensor.requires_grad == (name in trained)
        assert (tensor.grad is not None and tensor.grad.abs().max() > 0) == (name in trained)
    assert [id(x) for x in ssm_parameters(nn.ModuleList([layer]))] == [id(x) for x in layer.parameters()]


def test_trained_gradients_are_those_of_the_recurrence():
    layer, u = make(freeze="none", state_size=4), draw(2, 20, 6)
    weight = draw(2, 20, 6, seed=5)
    (layer(u) * weight).sum().backward()
    leaves = {name: getattr(layer, name).detach().clone().requires_grad_() for name in NAMES}
    C, B, P = (torch.view_as_complex(x) for x in (leaves["C"], leaves["B"][0], leaves["P"][0]))
    w = torch.complex(-leaves["log_A_real"].exp(), leaves["A_imag"])
    y, _ = reference.s4_scan(u, C, B, P, w, leaves["log_dt"].exp())
    ((y[:, 0] + leaves["D"] * u) * weight).sum().backward()
    for name in NAMES:
        assert_close(getattr(layer, name).grad, leaves[name].grad, "float64 gradient")


def test_frozen_input_gradient_is_the_recurrences():
    layer, u = make(), draw(2, 20, 6).requires_grad_()
    weight = draw(2, 20, 6, seed=5)
    (actual,) = torch.autograd.grad(layer(u), u, weight)
    (expected,) = torch.autograd.grad(reference.s4_scan(u, *parts(layer))[0][:, 0] + layer.D * u, u, weight)
    assert_close(actual, expected, "float64 gradient")


def test_postact_projection_is_no_ssm_parameter():
    layer = make(freeze="ab_dt", postact="gelu_glu")
    assert {id(x) for x in ssm_parameters(layer)} == {id(layer.C), id(layer.D)}
    layer.C.requires_grad_(False)
    assert [id(x) for x in ssm_parameters(layer)] == [id(layer.D)]


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("freeze", ["all", "none"])
def test_gradient_checkpointing(freeze, use_reentrant):
    layer, u = make(freeze=freeze), draw(2, 30, 6).requires_grad_()
    leaves = [u, *layer.parameters()]
    expected = torch.autograd.grad(layer(u).square().sum(), leaves)
    layer.clear_cache()
    y = torch.utils.checkpoint.checkpoint(layer, u, use_reentrant=use_reentrant)
    y.square().sum().backward()
    for leaf, gradient in zip(leaves, expected, strict=True):
        assert_close(leaf.grad, gradient, "float64 gradient")


# precision


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_casting_to_16_bits_keeps_the_system_in_float32(dtype):
    layer = make(dtype=torch.float32, freeze="ab_dt", postact="gelu_glu")
    before = {name: tensor.clone() for name, tensor in layer.state_dict().items() if name in NAMES}
    wrapped = nn.ModuleList([layer]).to(dtype)
    wrapped = wrapped.half() if dtype == torch.float16 else wrapped.bfloat16()
    assert layer.output_linear.weight.dtype == dtype
    for name in NAMES:
        assert_close(getattr(layer, name), before[name], "exact")
        assert getattr(layer, name).dtype == torch.float32
    assert layer.double().C.dtype == torch.float64
    assert layer.bfloat16().C.dtype == torch.float64
    assert layer.float().C.dtype == torch.float32
    assert layer.to("meta", dtype).C.device.type == "meta"
    assert layer.C.dtype == torch.float32


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_inputs(dtype):
    layer, u = make(dtype=torch.float32).to(dtype), draw(2, 30, 6, dtype=dtype)
    y, state = layer(u, return_state=True)
    assert y.dtype == dtype
    assert state.dtype == torch.float32
    wide, wide_state = layer(u.float(), return_state=True)
    assert_close(y, wide.to(dtype), "exact")
    assert_close(state, wide_state, "exact")
    token = layer(u[:, :1], state=state)
    assert token.dtype == dtype
    assert_close(token, layer(u[:, :1].float(), state=state).to(dtype), "exact")
    # two tokens by the convolution, rounded once
    assert_close(layer(u[:, :2], state=state), layer(u[:, :2].float(), state=state).to(dtype), "exact")


def test_default_dtype_of_16_bits_builds_float32():
    torch.set_default_dtype(torch.bfloat16)
    try:
        layer = S4(6, 8)
    finally:
        torch.set_default_dtype(torch.float32)
    assert {x.dtype for x in layer.state_dict().values()} == {torch.float32}


@pytest.mark.parametrize("freeze", ["all", "none"])
def test_autocast_changes_nothing(freeze):
    layer, u = make(dtype=torch.float32, freeze=freeze), draw(2, 70, 6, dtype=torch.float32)
    y, state = layer(u, return_state=True)
    expected = layer(u, state=state)
    layer.clear_cache()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        again, state_again = layer(u, return_state=True)
        continued = layer(u, state=state)
    assert_close(again, y, "exact")
    assert_close(state_again, state, "exact")
    assert_close(continued, expected, "exact")


# cache


def test_frozen_kernel_is_made_once(kernels_made):
    layer = make()
    for length in (30, 32, 17, 9, 1, 25):
        layer(draw(2, length, 6).requires_grad_()).sum().backward()
    assert kernels_made == [32]
    layer(draw(2, 33, 6))
    assert kernels_made == [32, 48]
    layer.clear_cache()
    layer(draw(2, 20, 6))
    assert kernels_made == [32, 48, 24]
    layer.float()
    assert layer._cache._entry is None  # the old tensors are let go at once


def test_spectra_are_bounded():
    layer = make()
    for length in (2, 3, 4, 6, 8, 12, 16, 24):
        layer(draw(1, length, 6))
        layer(draw(1, 2, 6))
    spectra = layer._cache.system(layer._tensors())._spectra
    assert len(spectra) == system_module._MAX_SPECTRA
    assert [n_fft for n_fft, *_ in spectra] == [24, 32, 48, 4]  # the one in use stays


def test_trained_kernel_is_kept_only_while_nothing_requires_a_gradient(kernels_made):
    layer, u = make(freeze="none"), draw(2, 12, 6)
    for mode in (layer.train, layer.eval):
        mode()
        layer(u)
        with torch.no_grad():
            layer(u)
    assert len(kernels_made) == 4
    layer.requires_grad_(False)
    layer(u), layer(u)
    assert len(kernels_made) == 5
    layer.requires_grad_(True)
    layer(u)
    assert layer._cache._entry is None


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_changes_are_seen(mode):
    layer, u = make(), draw(2, 12, 6)

    def check(expected_dtype=torch.float64):
        with mode():
            y, state = layer(u.to(expected_dtype), return_state=True)
            token = layer(u[:, :1].to(expected_dtype), state=state)
        fresh = copy.deepcopy(layer)
        row = "float32" if expected_dtype == torch.float32 else "float64"
        assert_close(y, double_sum(fresh, u), row)
        assert_close(token, scan(fresh, u[:, :1], state)[0], row)
        return y

    first = check()
    layer.C.mul_(2)
    assert not torch.allclose(check(), first)
    layer.load_state_dict(make(seed=3).state_dict())
    assert not torch.allclose(check(), first)
    layer.load_state_dict(make(seed=4).state_dict(), assign=True)
    check()
    layer.log_dt = layer.log_dt + 0.5
    check()
    layer.reset_parameters()
    check()
    layer.float()
    check(torch.float32)
    layer.double()
    check()
    layer.C.data.mul_(3)  # not seen, as documented
    layer.clear_cache()
    check()


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("options", [{}, {"foreach": True}, {"fused": True}], ids=str)
def test_every_optimizer_step_is_seen(training, options):
    layer, u = make(freeze="none", dtype=torch.float32).train(training), draw(2, 12, 6, dtype=torch.float32)
    optimizer = torch.optim.AdamW(layer.parameters(), lr=0.1, **options)

    @torch.no_grad()
    def check():
        y, state = layer(u, return_state=True)
        assert_close(y, double_sum(layer, u), "float32")
        assert_close(layer(u), y, "float32")
        assert_close(layer(u[:, :1], state=state), scan(layer, u[:, :1], state)[0], "float32")

    for _ in range(2):
        layer(u).square().sum().backward()
        check()
        optimizer.step()
        check()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_inference_first_and_training_afterwards(dtype):
    layer, u = make(dtype=dtype), draw(2, 12, 6)
    with torch.inference_mode():
        first, state = layer(u, return_state=True)
        layer(u[:, :1], state=state)
    leaf = u.clone().requires_grad_()
    y, state = layer(leaf, return_state=True)
    (y.square().sum() + layer(leaf[:, :1], state=state).sum()).backward()
    assert_close(y, first, "float64")
    assert leaf.grad.abs().min() > 0


def test_cache_is_no_part_of_copies_pickles_and_state(kernels_made):
    layer, u = make(), draw(2, 12, 6)
    expected = layer(u)
    keys = sorted(layer.state_dict())
    assert keys == NAMES
    size = len(pickle.dumps(make()))
    assert len(pickle.dumps(layer)) == size
    buffer = io.BytesIO()
    torch.save(layer, buffer)
    buffer.seek(0)
    for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer)), torch.load(buffer, weights_only=False)):
        assert other._cache is not layer._cache
        assert other._cache.handle != layer._cache.handle
        made = len(kernels_made)
        assert_close(other(u), expected, "exact")
        assert len(kernels_made) == made + 1
        other.C.zero_()
        assert_close(layer(u), expected, "exact")


# module


def test_counts():
    def count(**options):
        return sum(x.numel() for x in S4(**options).state_dict().values())

    with torch.device("meta"):
        assert count(hidden_size=768, bidirectional=True, num_copies=768) == 247_296
        assert count(hidden_size=1024, num_copies=1024) == 264_192
        assert count(hidden_size=1024) == 67_776
        assert count(hidden_size=1024, freeze="none") == 264_192
        assert count(hidden_size=1024, freeze="ab_dt") == 67_776


@pytest.mark.parametrize("freeze", FREEZES)
def test_initial_values(freeze):
    layer = make(64, 64, freeze=freeze, dtype=torch.float32, bidirectional=True, dt_min=1e-2, dt_max=5e-2)
    w, P, B = dplr_legs(64)
    C, B_own, P_own, w_own, dt = parts(layer)
    for actual, expected in ((B_own, B), (P_own, P), (w_own, w)):
        assert_close(actual, expected.expand_as(actual), "float32")
    assert 1e-2 * 0.999 < dt.min() < 1.2e-2
    assert 4.5e-2 < dt.max() < 5e-2 * 1.001
    assert abs(C.abs().square().mean().item() - 1) < 0.1
    assert abs(C.real.square().mean().item() - 0.5) < 0.05
    assert 0.7 < layer.D.std().item() < 1.3


@pytest.mark.parametrize("freeze", FREEZES)
def test_meta_device_and_reset(freeze):
    with torch.device("meta"):
        layer = S4(6, 8, freeze=freeze)
    assert {x.device.type for x in layer.state_dict().values()} == {"meta"}
    layer.to_empty(device="cpu")
    for tensor in layer.state_dict().values():
        tensor.fill_(torch.nan)
    torch.manual_seed(0)
    layer.reset_parameters()
    torch.manual_seed(0)
    for name, tensor in S4(6, 8, freeze=freeze).state_dict().items():
        assert_close(layer.state_dict()[name], tensor, "exact")
    assert [x.requires_grad for x in layer.parameters()] == [True] * len(list(layer.parameters()))


@pytest.mark.parametrize("freeze", FREEZES)
def test_shapes_on_the_meta_device(freeze):
    with torch.device("meta"):
        layer, u = S4(6, 8, freeze=freeze), torch.empty(2, 130, 6)
    y, state = layer(u, torch.ones(2, 130, device="meta"), return_state=True)
    assert y.shape == u.shape
    assert layer(u, state=state).shape == u.shape
    assert state.shape == (2, 6, 4, 2)


@pytest.mark.parametrize("name", NAMES)
def test_reset_leaves_loaded_tensors_alone(name):
    layer = make(freeze="none")
    for tensor in layer.state_dict(keep_vars=True).values():
        tensor.data.fill_(7)
    getattr(layer, name)._is_hf_initialized = True
    layer.reset_parameters()
    for other in NAMES:
        assert (getattr(layer, other) == 7).all() == (other == name)


def test_state_dict_moves_between_freezes():
    u = draw(2, 20, 6)
    source = make(freeze="none", num_copies=2)
    for freeze in FREEZES:
        layer = make(seed=9, freeze=freeze, num_copies=2)
        layer.load_state_dict(source.state_dict())
        assert_close(layer(u), source(u), "float64")
    without = make(use_D=False)
    assert sorted(without.state_dict()) == [name for name in NAMES if name != "D"]


@pytest.mark.parametrize("options", [{}, {"bidirectional": True}, {"freeze": "none"}, {"postact": "gelu_glu"}])
def test_compiles_without_graph_breaks(options):
    torch._dynamo.reset()
    layer = make(state_size=4, **options)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    u = draw(2, 5, 6).requires_grad_()
    leaves = [u, *layer.parameters()]
    actual, expected = compiled(u), layer(u)
    assert_close(actual, expected, "float64")
    gradients = [torch.autograd.grad(y.square().sum(), leaves) for y in (actual, expected)]
    for one, other in zip(*gradients, strict=True):
        assert_close(one, other, "float64 gradient")
    if not options:
        with torch.no_grad():
            _, state = layer(u, return_state=True)
            y, after = compiled(u[:, :1], state=state, return_state=True)
            expected, expected_after = layer(u[:, :1], state=state, return_state=True)
        assert_close(y, expected, "float64")
        assert_close(after, expected_after, "float64")
        layer.C.mul_(2)
        assert_close(compiled(u), layer(u), "float64")
        for _ in range(2):
            results = [function(u, state=state, return_state=True) for function in (compiled, layer)]
            for one, other in zip(*results, strict=True):
                assert_close(one, other, "float64")
            gradients = [torch.autograd.grad(y.square().sum() + after.square().sum(), u) for y, after in results]
            assert_close(gradients[0][0], gradients[1][0], "float64 gradient")
            layer.C.mul_(2)


def test_opcheck():
    layer, u = make(state_size=4), draw(2, 5, 6).requires_grad_()
    handle = layer._cache.handle
    for arguments in ((layer.D, None, False, handle), (None, 3, True, handle)):
        torch.library.opcheck(frozen_s4_conv, (u, *layer._tensors(), *arguments))
    state = draw(2, 6, 2, 2)
    utils = ("test_schema", "test_faketensor")
    for x in (u, u[:, :1]):
        arguments = (x.detach(), state, *layer._tensors(), layer.D, None, handle)
        torch.library.opcheck(frozen_s4_advance, arguments, test_utils=utils)


def test_ops_work_without_their_cache():
    """As in a program exported from another process."""
    layer, u = make(), draw(2, 5, 6)
    gone = S4Cache().handle
    y = frozen_s4_conv(u, *layer._tensors(), layer.D, None, False, gone)
    assert_close(y, layer(u), "float64")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"hidden_size": 0}, "hidden_size must be a positive integer; got 0"),
        ({"state_size": 7}, "state_size must be a positive even number; got 7"),
        ({"state_size": 0}, "state_size must be a positive even number; got 0"),
        ({"dt_min": 0.0}, "dt_min must be positive and at most dt_max; got 0.0 and 0.1"),
        ({"dt_min": 0.2}, "dt_min must be positive and at most dt_max; got 0.2 and 0.1"),
        ({"num_copies": 4}, "num_copies must be a positive divisor of hidden_size 6; got 4"),
        ({"num_copies": 0}, "num_copies must be a positive divisor of hidden_size 6; got 0"),
        ({"max_length": 0}, "max_length must be None or a positive integer; got 0"),
        ({"freeze": "some"}, "freeze must be one of all, ab_dt, none; got 'some'"),
        ({"postact": "relu"}, "postact must be None or 'gelu_glu'; got 'relu'"),
    ],
)
def test_bad_arguments(options, message):
    with pytest.raises(ValueError, match=message):
        S4(**{"hidden_size": 6, **options})


def test_bad_inputs():
    layer = make()
    with pytest.raises(ValueError, match=r"hidden_states must be \(B, T, 6\) with T > 0; got \(2, 4, 5\)"):
        layer(draw(2, 4, 5))
    with pytest.raises(ValueError, match="T > 0"):
        layer(draw(2, 0, 6))
    with pytest.raises(ValueError, match=r"attention_mask must be \(2, 4\) like hidden_states; got \(2, 5\)"):
        layer(draw(2, 4, 6), torch.ones(2, 5))
    with pytest.raises(ValueError, match=r"state must be \(2, 6, 4, 2\); got \(1, 6, 4, 2\)"):
        layer(draw(2, 4, 6), state=torch.zeros(1, 6, 4, 2))
