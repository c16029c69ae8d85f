"""The S4 and S4D layers: their function, what is trained, and their ops; the rest is in test_state_space.py."""

import copy

import pytest
import torch

from hf_hybrid.kernels.ssm_kernel import dplr_legs, reference
from hf_hybrid.layers import s4_system as system_module
from hf_hybrid.layers.s4 import S4
from hf_hybrid.layers.s4_system import S4Cache, S4Tensors, frozen_s4_advance, frozen_s4_conv
from hf_hybrid.layers.s4d import S4D
from tests.tolerances import assert_close

NAMES = {
    S4: ["A_imag", "B", "C", "D", "P", "log_A_real", "log_dt"],
    S4D: ["A_imag", "B", "C", "D", "log_A_real", "log_dt"],
}
EACH = pytest.mark.parametrize("kind", [S4, S4D])
EACH_DISCRETIZATION = pytest.mark.parametrize(
    ("kind", "options"),
    [(S4, {}), (S4D, {"discretization": "zoh"}), (S4D, {"discretization": "bilinear"})],
    ids=["s4", "s4d-zoh", "s4d-bilinear"],
)


def make(kind=S4, hidden_size=6, state_size=8, seed=0, dtype=torch.float64, **options):
    torch.manual_seed(seed)
    return kind(hidden_size, state_size, **options).to(dtype)


def draw(*shape, seed=1, dtype=torch.float64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def copied(layer):
    return {name: tensor.detach().double().clone() for name, tensor in layer.own_tensors()}


def parts(tensors):
    """C, B, S4's P, w and dt of a layer's tensors."""
    C, *vectors = (torch.view_as_complex(tensors[name]) for name in ("C", "B", "P") if name in tensors)
    w = torch.complex(-tensors["log_A_real"].exp(), tensors["A_imag"])
    return C, *(x[0] for x in vectors), w, tensors["log_dt"].exp()


def scan(layer, u, state=None, tensors=None):
    """The layer by its recurrence, causal direction only; of other tensors, if they are given."""
    tensors = copied(layer) if tensors is None else tensors
    state = None if state is None else torch.view_as_complex(state.double())
    if isinstance(layer, S4D):
        y, state = reference.s4d_scan(u.double(), *parts(tensors), layer.discretization, state)
    else:
        y, state = reference.s4_scan(u.double(), *parts(tensors), state)
    return y[:, 0] + tensors["D"] * u, torch.view_as_real(state)


def taps(layer, length):
    """The layer's filters, by their recurrence."""
    if isinstance(layer, S4D):
        return reference.s4d_kernel(*parts(copied(layer)), length, discretization=layer.discretization)
    return reference.s4_kernel(*parts(copied(layer)), length)


def double_sum(layer, u):
    """The layer by its taps, one pair of positions at a time."""
    kernel = taps(layer, u.shape[1])
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


def stored(layer):
    """What the frozen ops take of a layer in front of their numbers."""
    return *S4Tensors(*(getattr(layer, name) for name in S4Tensors._fields)), layer.D, layer.discretization


# function


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        *(
            (kind, options)
            for kind in (S4, S4D)
            for options in (
                {},
                {"use_D": False},
                {"bidirectional": True},
                {"max_length": 5},
                {"freeze": "none"},
                {"bidirectional": True, "max_length": 7, "freeze": "none"},
            )
        ),
        (S4D, {"init": "inv", "discretization": "bilinear"}),
        (S4D, {"init": "legs", "use_D": False}),
        (S4D, {"freeze": "none", "discretization": "bilinear"}),
    ],
)
@pytest.mark.parametrize("length", [1, 2, 13, 32])
def test_forward_is_the_double_sum(kind, options, length):
    layer, u = make(kind, **options), draw(2, length, 6)
    assert_close(layer(u), double_sum(layer, u), "float64")
    assert_close(layer.float()(u.float()), double_sum(layer, u), "float32")


@EACH_DISCRETIZATION
@pytest.mark.parametrize("freeze", ["all", "ab_dt", "none"])
def test_forward_and_state_are_the_recurrence(kind, options, freeze):
    layer, u = make(kind, freeze=freeze, **options), draw(2, 150, 6)
    assert_close(layer(u), scan(layer, u)[0], "float64")
    for state in (None, draw(2, 6, 4, 2, seed=3)):
        for length in (1, 2, 63, 64, 65, 129, 150):
            results = layer(u[:, :length], state=state, return_state=True)
            for one, other in zip(results, scan(layer, u[:, :length], state), strict=True):
                assert one.dtype == torch.float64
                assert_close(one, other, "float64")


@EACH
def test_any_length_after_any_other(kind):
    layer = make(kind)
    for length in (40, 1, 2, 37, 3, 701, 100):
        u = draw(1, length, 6, seed=length)
        assert_close(layer(u), scan(layer, u)[0], "float64")


@EACH
def test_mirror(kind):
    """Reversing the input and swapping the kernels mirrors the output, one position off: kernel 1 starts at lag 1."""
    layer, u = make(kind, bidirectional=True, use_D=False), draw(1, 21, 6)
    swapped = copy.deepcopy(layer)
    swapped.C.copy_(layer.C.flip(0))
    assert_close(swapped(u.flip(1))[:, :-1], layer(u)[:, :-1].flip(1), "float64")


@EACH
def test_impulse_returns_the_filter(kind):
    layer = make(kind, bidirectional=True, use_D=False)
    u = torch.zeros(1, 41, 6, dtype=torch.float64)
    u[:, 20] = 1
    kernel = taps(layer, 21)
    y = layer(u)[0].mT
    assert_close(y[:, 20:], kernel[0], "float64")
    assert_close(y[:, :20].flip(1), kernel[1, :, :20], "float64")


@EACH
def test_one_copy_is_many_equal_copies(kind):
    one, many = make(kind, num_copies=1), make(kind, num_copies=3)
    many.C.copy_(one.C), many.D.copy_(one.D), many.log_dt.copy_(one.log_dt)
    u = draw(2, 30, 6)
    assert_close(many(u), one(u), "exact")


@EACH
def test_channel_reads_copy_in_tile_order(kind):
    layer = make(kind, num_copies=3)
    layer.A_imag[1] *= 1.5
    default = make(kind, num_copies=3)
    change = (layer(draw(1, 30, 6)) - default(draw(1, 30, 6))).abs().amax((0, 1))
    assert (change[[1, 4]] > 1e-3).all()
    assert_close(change[[0, 2, 3, 5]], torch.zeros(4, dtype=torch.float64), "exact")


# training


@EACH
def test_names_and_what_is_trained(kind):
    names = NAMES[kind]
    for freeze, trained in {"all": [], "ab_dt": ["C", "D"], "none": names}.items():
        layer = make(kind, freeze=freeze)
        assert sorted(name for name, _ in layer.named_parameters()) == trained
        assert sorted(layer.state_dict()) == names
        without = make(kind, freeze=freeze, use_D=False)
        assert sorted(without.state_dict()) == [name for name in names if name != "D"]


@EACH_DISCRETIZATION
def test_trained_gradients_are_those_of_the_recurrence(kind, options):
    layer, u = make(kind, freeze="none", state_size=4, **options), draw(2, 20, 6)
    weight = draw(2, 20, 6, seed=5)
    for state in (None, draw(2, 6, 2, 2, seed=6)):
        layer.zero_grad()
        (layer(u, state=state) * weight).sum().backward()
        leaves = {name: tensor.requires_grad_() for name, tensor in copied(layer).items()}
        (scan(layer, u, state, leaves)[0] * weight).sum().backward()
        for name in NAMES[kind]:
            assert_close(getattr(layer, name).grad, leaves[name].grad, "float64 gradient")


@EACH
@pytest.mark.parametrize("bidirectional", [False, True])
def test_frozen_input_gradient_is_that_of_the_double_sum(kind, bidirectional):
    layer, u = make(kind, bidirectional=bidirectional), draw(2, 20, 6).requires_grad_()
    weight = draw(2, 20, 6, seed=5)
    (actual,) = torch.autograd.grad(layer(u), u, weight)
    (expected,) = torch.autograd.grad(double_sum(layer, u), u, weight)
    assert_close(actual, expected, "float64 gradient")


@EACH
def test_copies_of_a_trained_layer_move_between_freezes(kind):
    u = draw(2, 20, 6)
    source = make(kind, freeze="none", num_copies=2)
    for freeze in kind.TRAINED:
        layer = make(kind, seed=9, freeze=freeze, num_copies=2)
        layer.load_state_dict(source.state_dict())
        assert_close(layer(u), source(u), "float64")


# ops and what they keep


@EACH
def test_spectra_are_bounded(kind):
    layer = make(kind)
    for length in (2, 3, 4, 6, 8, 12, 16, 24):
        layer(draw(1, length, 6))
        layer(draw(1, 2, 6))
    spectra = layer._cache._entry[1]._spectra
    assert len(spectra) == system_module._MAX_SPECTRA
    assert [n_fft for n_fft, *_ in spectra] == [24, 32, 48, 4]  # the one in use stays


@EACH
def test_compiled_layers_keep_their_constants(kind, monkeypatch):
    torch._dynamo.reset()
    layer, u = make(kind, state_size=4), draw(2, 5, 6)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        expected, state = compiled(u, return_state=True)
        token = compiled(u[:, :1], state=state)
        for name in ("s4_kernel", "s4d_kernel", "s4_step_constants", "s4d_step_constants"):
            monkeypatch.setattr(system_module, name, None)
        assert_close(compiled(u), expected, "exact")
        assert_close(compiled(u[:, :1], state=state), token, "exact")


@EACH
def test_opcheck(kind):
    layer, u = make(kind, state_size=4), draw(2, 70, 6).requires_grad_()
    *tensors, skip, discretization = stored(layer)
    handle = layer._cache.handle
    for numbers in ((skip, discretization, None, False, handle), (None, discretization, 3, True, handle)):
        torch.library.opcheck(frozen_s4_conv, (u[:, :5], *tensors, *numbers))
    utils = ("test_schema", "test_faketensor")
    for x in (u, u[:, :5], u[:, :1]):
        for state in (None, draw(2, 6, 2, 2)):
            arguments = (x.detach(), state, *tensors, skip, discretization, None, handle)
            torch.library.opcheck(frozen_s4_advance, arguments, test_utils=utils)


@EACH_DISCRETIZATION
def test_ops_work_without_their_cache(kind, options):
    """As in a program exported from another process."""
    layer, u = make(kind, **options), draw(2, 5, 6)
    gone = S4Cache().handle
    assert_close(frozen_s4_conv(u, *stored(layer), None, False, gone), layer(u), "float64")
    results = frozen_s4_advance(u, None, *stored(layer), None, gone), layer(u, return_state=True)
    for one, other in zip(*results, strict=True):
        assert_close(one, other, "float64")


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


@EACH
@pytest.mark.parametrize("freeze", ["all", "ab_dt", "none"])
def test_initial_values(kind, freeze):
    layer = make(kind, 64, 64, freeze=freeze, dtype=torch.float32, bidirectional=True, dt_min=1e-2, dt_max=5e-2)
    C, *modes, dt = parts(copied(layer))
    if kind is S4:  # the modes of S4D depend on its options
        w, P, B = dplr_legs(64)
        for actual, expected in zip(modes, (B, P, w), strict=True):
            assert_close(actual, expected.expand_as(actual), "float32")
    assert 1e-2 * 0.999 < dt.min() < 1.2e-2
    assert 4.5e-2 < dt.max() < 5e-2 * 1.001
    assert abs(C.abs().square().mean().item() - 1) < 0.1
    assert abs(C.real.square().mean().item() - 0.5) < 0.05
    assert 0.7 < layer.D.std().item() < 1.3


@EACH
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"state_size": 7}, "state_size must be a positive even number; got 7"),
        ({"state_size": 0}, "state_size must be a positive even number; got 0"),
        ({"dt_min": 0.0}, "dt_min must be positive and at most dt_max; got 0.0 and 0.1"),
        ({"dt_min": 0.2}, "dt_min must be positive and at most dt_max; got 0.2 and 0.1"),
        ({"num_copies": 4}, "num_copies must be a positive divisor of hidden_size 6; got 4"),
        ({"num_copies": 0}, "num_copies must be a positive divisor of hidden_size 6; got 0"),
        ({"max_length": 0}, "max_length must be a positive integer; got 0"),
    ],
)
def test_bad_arguments(kind, options, message):
    with pytest.raises(ValueError, match=message):
        kind(**{"hidden_size": 6, **options})


def test_states_to_follow_are_made_with_blocks_of_one_filter(monkeypatch):
    layer, u, filters = make(num_filters=3, freeze="none"), draw(2, 12, 6), []
    make_blocks = system_module.S4System._make_blocks
    monkeypatch.setattr(
        system_module.S4System,
        "_make_blocks",
        lambda self, *args: filters.append(len(args[1])) or make_blocks(self, *args),
    )
    recorded = layer.follow(u, None, [4, 8, 12])
    assert filters == [1]
    with torch.no_grad():
        for state, expected in zip(layer.follow(u, None, [4, 8, 12]), recorded, strict=True):
            assert_close(state, expected, "float64")
