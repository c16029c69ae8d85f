"""The S4D layer: its function, its initialisations, and what it keeps; the rest is in test_state_space.py."""

import copy
import math

import pytest
import torch

from hf_hybrid.kernels.ssm_kernel import DISCRETIZATIONS, dplr_legs, hippo_legs, reference, s4d
from hf_hybrid.layers.s4 import S4
from hf_hybrid.layers.s4d import INITS, S4D
from tests.tolerances import assert_close

NAMES = ["A_imag", "B", "C", "D", "log_A_real", "log_dt"]


def make(hidden_size=6, state_size=8, seed=0, dtype=torch.float64, **options):
    torch.manual_seed(seed)
    return S4D(hidden_size, state_size, **options).to(dtype)


def draw(*shape, seed=1, dtype=torch.float64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def parts(layer):
    C, B = (torch.view_as_complex(x.detach().double()) for x in (layer.C, layer.B[0]))
    w = torch.complex(-layer.log_A_real.detach().double().exp(), layer.A_imag.detach().double())
    return C, B, w, layer.log_dt.detach().double().exp()


def scan(layer, u, state=None):
    """The layer by its recurrence, causal direction only."""
    state = None if state is None else torch.view_as_complex(state.double())
    y, state = reference.s4d_scan(u.double(), *parts(layer), layer.discretization, state)
    return y[:, 0] + layer.D.detach() * u, torch.view_as_real(state)


def double_sum(layer, u):
    """The layer by its taps, one pair of positions at a time."""
    kernel = reference.s4d_kernel(*parts(layer), u.shape[1], discretization=layer.discretization)
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
    original = s4d.s4d_kernel
    monkeypatch.setattr(s4d, "s4d_kernel", lambda *x, **options: made.append(x[4]) or original(*x, **options))
    return made


# function


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"init": "inv", "discretization": "bilinear"},
        {"init": "legs", "use_D": False},
        {"bidirectional": True},
        {"max_length": 5},
        {"freeze": "none", "discretization": "bilinear"},
        {"bidirectional": True, "max_length": 7, "freeze": "none"},
    ],
)
@pytest.mark.parametrize("length", [1, 2, 13, 32])
def test_forward_is_the_double_sum(options, length):
    layer, u = make(**options), draw(2, length, 6)
    assert_close(layer(u), double_sum(layer, u), "float64")
    assert_close(layer.float()(u.float()), double_sum(layer, u), "float32")


@pytest.mark.parametrize("discretization", DISCRETIZATIONS)
@pytest.mark.parametrize("freeze", ["all", "none"])
def test_forward_and_state_are_the_recurrence(freeze, discretization):
    layer, u = make(freeze=freeze, discretization=discretization), draw(2, 150, 6)
    assert_close(layer(u), scan(layer, u)[0], "float64")
    state = draw(2, 6, 4, 2, seed=3)
    for length in (1, 2, 64, 150):
        results = layer(u[:, :length], state=state, return_state=True)
        for one, other in zip(results, scan(layer, u[:, :length], state), strict=True):
            assert_close(one, other, "float64")


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


def test_bilinear_layer_is_s4_without_low_rank():
    """S4 with P = 0 computes the same by other kernels, steps and states."""
    layer, s4, u = make(discretization="bilinear"), S4(6, 8).double(), draw(2, 100, 6)
    for name in NAMES:
        getattr(s4, name).copy_(getattr(layer, name))
    s4.P.zero_()
    for one, other in zip(layer(u, return_state=True), s4(u, return_state=True), strict=True):
        assert_close(one, other, "float64")


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


# training


@pytest.mark.parametrize("discretization", DISCRETIZATIONS)
def test_trained_gradients_are_those_of_the_recurrence(discretization):
    layer, u = make(freeze="none", state_size=4, discretization=discretization), draw(2, 20, 6)
    weight, state = draw(2, 20, 6, seed=5), draw(2, 6, 2, 2, seed=6)
    (layer(u, state=state) * weight).sum().backward()
    leaves = {name: getattr(layer, name).detach().clone().requires_grad_() for name in NAMES}
    C, B = (torch.view_as_complex(x) for x in (leaves["C"], leaves["B"][0]))
    w = torch.complex(-leaves["log_A_real"].exp(), leaves["A_imag"])
    initial = torch.view_as_complex(state)
    y, _ = reference.s4d_scan(u, C, B, w, leaves["log_dt"].exp(), discretization, initial)
    ((y[:, 0] + leaves["D"] * u) * weight).sum().backward()
    for name in NAMES:
        assert_close(getattr(layer, name).grad, leaves[name].grad, "float64 gradient")


@pytest.mark.parametrize("bidirectional", [False, True])
def test_frozen_input_gradient_is_the_recurrences(bidirectional):
    layer, u = make(bidirectional=bidirectional), draw(2, 20, 6).requires_grad_()
    weight = draw(2, 20, 6, seed=5)
    (actual,) = torch.autograd.grad(layer(u), u, weight)
    (expected,) = torch.autograd.grad(double_sum(layer, u), u, weight)
    assert_close(actual, expected, "float64 gradient")


# what is kept


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


def test_edits_through_data_need_the_cache_cleared():
    layer, u = make(), draw(2, 12, 6)
    first = layer(u)
    layer.C.data.mul_(3)
    assert_close(layer(u), first, "exact")
    layer.clear_cache()
    assert_close(layer(u), double_sum(layer, u), "float64")


def test_spectra_are_bounded():
    layer = make()
    for length in (2, 3, 4, 6, 8, 12, 16, 24):
        layer(draw(1, length, 6))
        layer(draw(1, 2, 6))
    spectra = layer._system()._spectra
    assert len(spectra) == s4d._MAX_SPECTRA
    assert [n_fft for n_fft, *_ in spectra] == [24, 32, 48, 4]  # the one in use stays


def test_trained_kernel_is_made_every_step_but_kept_in_evaluation(kernels_made):
    layer, u = make(freeze="none"), draw(2, 12, 6)
    for _ in range(2):
        layer(u)
        with torch.no_grad():  # no version counter is trusted in training mode
            layer(u)
    assert len(kernels_made) == 4
    layer.eval()
    with torch.no_grad():
        layer(u), layer(u)
    assert len(kernels_made) == 5
    layer.train()
    assert layer._cache._entry is None


# module


def test_counts():
    def count(**options):
        return sum(x.numel() for x in S4D(**options).state_dict().values())

    with torch.device("meta"):
        # C, D and the step per channel, 4 numbers per mode of a copy of (A, B)
        assert count(hidden_size=1024) == 1024 * (64 + 2) + 32 * 4
        assert count(hidden_size=1024, freeze="ab_dt") == 1024 * (64 + 2) + 32 * 4
        assert count(hidden_size=1024, freeze="none") == 1024 * (64 + 2) + 1024 * 32 * 4
        assert count(hidden_size=768, bidirectional=True, num_copies=3) == 768 * (128 + 2) + 3 * 32 * 4


@pytest.mark.parametrize("init", INITS)
@pytest.mark.parametrize("freeze", ["all", "none"])
def test_initial_values(freeze, init):
    layer = make(64, 8, freeze=freeze, init=init, bidirectional=True, dt_min=1e-2, dt_max=5e-2)
    C, B, w, dt = parts(layer)
    frequencies = {
        "lin": [0.0, math.pi, 2 * math.pi, 3 * math.pi],
        "inv": [8 / math.pi * (8 / odd - 1) for odd in (1, 3, 5, 7)],
        "legs": [0.42749, 1.95779, 5.35421, 19.85741],
    }[init]
    assert_close(w.real, torch.full_like(w.real, -0.5), "float32")
    assert_close(w.imag, torch.tensor(frequencies, dtype=torch.float64).expand_as(w.imag), "float32")
    expected = dplr_legs(8)[2] / 2 if init == "legs" else torch.ones(4, dtype=torch.complex128)
    assert_close(B, expected.expand_as(B), "float32")
    assert 1e-2 * 0.999 < dt.min() < 1.2e-2
    assert 4.5e-2 < dt.max() < 5e-2 * 1.001
    assert abs(C.abs().square().mean().item() - 1) < 0.2
    assert abs(C.real.square().mean().item() - 0.5) < 0.1
    assert 0.7 < layer.D.std().item() < 1.3


def test_legs_start_is_hippo_without_low_rank():
    """Its impulse response is C exp(S t) B / 2 in HiPPO's own basis, S = A + P P^T = A + B B^T / 2."""
    layer = make(1, 8, init="legs", use_D=False, dt_min=1e-3, dt_max=1e-3)
    A, B, _, _ = hippo_legs(8)
    S = A + torch.outer(B, B) / 2
    w, V = torch.linalg.eig(S)
    kept = w.imag > 0
    order = w[kept].imag.argsort()
    V = V[:, kept][:, order]
    phase = V.mH @ B.to(V.dtype)
    V = V * (phase / phase.abs())
    C = 2 * (torch.view_as_complex(layer.C[0, 0]) @ V.mH).real  # V unitary: S is normal
    impulse = torch.zeros(1, 301, 1, dtype=torch.float64)
    impulse[:, 0] = 1
    # a held input acts over a whole step: the integral of the response over it
    step = torch.linalg.solve(S, torch.linalg.matrix_exp(S * 1e-3) - torch.eye(8, dtype=torch.float64))
    expected = [C @ torch.linalg.matrix_exp(S * 1e-3 * t) @ step @ B / 2 for t in (0, 1, 100, 300)]
    assert_close(layer(impulse)[0, [0, 1, 100, 300], 0], torch.stack(expected), "float32")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"state_size": 7}, "state_size must be a positive even number; got 7"),
        ({"state_size": 0}, "state_size must be a positive even number; got 0"),
        ({"init": "hippo"}, "init must be one of lin, inv, legs; got 'hippo'"),
        ({"discretization": "euler"}, "discretization must be one of zoh, bilinear; got 'euler'"),
        ({"dt_min": 0.0}, "dt_min must be positive and at most dt_max; got 0.0 and 0.1"),
        ({"dt_min": 0.2}, "dt_min must be positive and at most dt_max; got 0.2 and 0.1"),
        ({"num_copies": 4}, "num_copies must be a positive divisor of hidden_size 6; got 4"),
        ({"num_copies": 0}, "num_copies must be a positive divisor of hidden_size 6; got 0"),
        ({"max_length": 0}, "max_length must be a positive integer; got 0"),
    ],
)
def test_bad_arguments(options, message):
    with pytest.raises(ValueError, match=message):
        S4D(**{"hidden_size": 6, **options})
