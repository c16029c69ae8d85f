"""The S5 layer: its function, its initial values and its size; the rest is in test_state_space.py."""

import math

import pytest
import torch

from hf_hybrid.kernels.ssm_kernel import DISCRETIZATIONS, diagonalize_legs, hippo_legs, reference
from hf_hybrid.layers.s4d import S4D
from hf_hybrid.layers.s5 import S5
from tests.tolerances import assert_close

NAMES = ["A", "B", "C", "D", "log_dt"]


def make(hidden_size=6, state_size=16, seed=0, dtype=torch.float64, **options):
    torch.manual_seed(seed)
    return S5(hidden_size, state_size, **{"blocks": 2, **options}).to(dtype)


def draw(*shape, seed=1):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def discretized(layer, A, B, log_dt):
    """Abar `(P,)` and Bbar `(P, H)` from their equations."""
    w, B, dt = torch.view_as_complex(A), torch.view_as_complex(B), log_dt.exp()
    if layer.clip_eigenvalues:
        w = torch.complex(torch.minimum(w.real, torch.tensor(-1e-4, dtype=torch.float64)), w.imag)
    if layer.discretization == "zoh":
        Abar = (dt * w).exp()
        return Abar, ((Abar - 1) / w)[:, None] * B
    return (1 + dt * w / 2) / (1 - dt * w / 2), (dt / (1 - dt * w / 2))[:, None] * B


def loop(layer, u, tensors=None, state=None):
    """The layer's causal half token by token, over both modes of every pair, with dense matrices."""
    tensors = {name: x.detach() for name, x in layer.own_tensors()} if tensors is None else tensors
    Abar, Bbar = discretized(layer, tensors["A"], tensors["B"], tensors["log_dt"])
    C = torch.view_as_complex(tensors["C"])[0]
    Abar, Bbar, C = (torch.cat([x, x.conj()], dim=axis) for x, axis in ((Abar, 0), (Bbar, 0), (C, 1)))
    x = torch.zeros(u.shape[0], len(Abar), dtype=torch.complex128)
    if state is not None:
        half = torch.view_as_complex(state)
        x = torch.cat([half, half.conj()], dim=1)
    outputs = []
    for token in u.unbind(1):
        x = x @ torch.diag(Abar) + token.to(x.dtype) @ Bbar.mT
        y = x @ C.mT
        assert y.imag.abs().max() <= 1e-10
        outputs.append(y.real + tensors["D"] * token if "D" in tensors else y.real)
    return torch.stack(outputs, dim=1), torch.view_as_real(x[:, : len(Abar) // 2])


def kernel(layer, length):
    """K[l] = 2 Re C Abar^l Bbar of each direction, `(Z, length, H, H)`."""
    tensors = {name: x.detach() for name, x in layer.own_tensors()}
    Abar, Bbar = discretized(layer, tensors["A"], tensors["B"], tensors["log_dt"])
    powers = Abar ** torch.arange(length)[:, None]
    return 2 * torch.einsum("zop,lp,pi->zloi", torch.view_as_complex(tensors["C"]), powers, Bbar).real


# function


@pytest.mark.parametrize("discretization", DISCRETIZATIONS)
@pytest.mark.parametrize("use_D", [True, False])
@pytest.mark.parametrize("length", [1, 2, 13, 70])
def test_forward_is_the_loop(length, use_D, discretization):
    layer, u = make(discretization=discretization, use_D=use_D), draw(2, length, 6)
    expected, last = loop(layer, u)
    y, state = layer(u, return_state=True)
    assert_close(y, expected, "float64")
    assert_close(state, last, "float64")
    assert_close(layer.float()(u.float()), expected, "float32")


def test_state_is_the_loops():
    layer, u, state = make(), draw(2, 20, 6), draw(2, 8, 2, seed=3)
    for length in (1, 2, 20):
        results = layer(u[:, :length], state=state, return_state=True)
        for one, other in zip(results, loop(layer, u[:, :length], state=state), strict=True):
            assert_close(one, other, "float64")


def test_forward_is_a_convolution():
    layer, u = make(use_D=False), draw(2, 30, 6)
    K = kernel(layer, 30)[0]
    expected = torch.zeros_like(u)
    for t in range(30):
        for s in range(t + 1):
            expected[:, t] += u[:, s] @ K[t - s].mT
    assert_close(layer(u), expected, "float64")


@pytest.mark.parametrize("discretization", DISCRETIZATIONS)
def test_bidirectional_is_the_double_sum(discretization):
    """Both directions read the token itself."""
    layer, u = make(bidirectional=True, discretization=discretization), draw(2, 21, 6)
    past, future = kernel(layer, 21)
    expected = layer.D * u
    for t in range(21):
        for s in range(21):
            if s <= t:
                expected[:, t] += u[:, s] @ past[t - s].mT
            if s >= t:
                expected[:, t] += u[:, s] @ future[s - t].mT
    assert_close(layer(u), expected, "float64")


def test_mirror():
    layer, u = make(bidirectional=True), draw(1, 21, 6)
    swapped = make(bidirectional=True)
    swapped.C.copy_(layer.C.flip(0))
    assert_close(swapped(u.flip(1)), layer(u).flip(1), "float64")


@pytest.mark.parametrize("discretization", DISCRETIZATIONS)
def test_uncoupled_channels_are_s4d(discretization):
    """With one mode per channel and diagonal B and C, S5 is S4D with N = 2."""
    s4d = S4D(6, 2, freeze="none", discretization=discretization).double().requires_grad_(False)
    s4d.log_A_real.add_(draw(6, 1, seed=8)), s4d.A_imag.copy_(draw(6, 1, seed=9))
    layer = make(6, 12, blocks=1, discretization=discretization)
    layer.A.copy_(torch.cat([-s4d.log_A_real.exp(), s4d.A_imag], dim=1))
    layer.log_dt.copy_(s4d.log_dt), layer.D.copy_(s4d.D), layer.B.zero_(), layer.C.zero_()
    for channel in range(6):
        layer.B[channel, channel] = s4d.B[0, channel, 0]
        layer.C[0, channel, channel] = s4d.C[0, channel, 0]
    u = draw(2, 90, 6)
    y, state = layer(u, return_state=True)
    expected, expected_state = s4d(u, return_state=True)
    assert_close(y, expected, "float64")
    assert_close(state, expected_state[:, :, 0], "float64")


def test_clipping_keeps_an_unstable_system_bounded():
    layer, free, u = make(), make(clip_eigenvalues=False), draw(1, 400, 6)
    assert_close(layer(u), free(u), "exact")
    for each in (layer, free):
        each.A[..., 0] = 2.0
    assert_close(layer(u), loop(layer, u)[0], "float64")
    assert layer(u).abs().max() < 1e3 < free(u).abs().max()


def test_zero_eigenvalue_is_a_sum():
    layer, u = make(clip_eigenvalues=False, use_D=False, freeze="none"), draw(1, 30, 6)
    with torch.no_grad():
        layer.A.zero_()
    B, C = (torch.view_as_complex(x.detach()) for x in (layer.B, layer.C[0]))
    states = (u.cumsum(1) + 0j) @ (layer.log_dt.detach().exp()[:, None] * B).mT
    y = layer(u)
    assert_close(y, 2 * (states @ C.mT).real, "float64")
    y.sum().backward()
    assert all(x.grad.isfinite().all() for x in layer.parameters() if x.grad is not None)


# training


@pytest.mark.parametrize("discretization", DISCRETIZATIONS)
@pytest.mark.parametrize("length", [1, 20])
def test_gradients_are_those_of_the_loop(length, discretization):
    layer = make(freeze="none", discretization=discretization)
    inputs = [draw(2, length, 6).requires_grad_(), draw(2, 8, 2, seed=3).requires_grad_()]
    weights = draw(2, length, 6, seed=5), draw(2, 8, 2, seed=6)
    leaves = [*(getattr(layer, name) for name in NAMES), *inputs]
    actual = torch.autograd.grad(layer(inputs[0], state=inputs[1], return_state=True), leaves, weights)
    tensors = dict(zip(NAMES, leaves, strict=False))
    expected = torch.autograd.grad(loop(layer, inputs[0], tensors, inputs[1]), leaves, weights)
    for one, other in zip(actual, expected, strict=True):
        assert_close(one, other, "float64 gradient")


def test_bidirectional_gradients():
    layer, u = make(3, 4, blocks=1, bidirectional=True, freeze="none"), draw(1, 5, 3).requires_grad_()
    names = [name for name, _ in layer.own_tensors()]

    def function(u, *tensors):
        return torch.func.functional_call(layer, dict(zip(names, tensors, strict=True)), (u,))

    leaves = [getattr(layer, name).detach().clone().requires_grad_() for name in names]
    assert torch.autograd.gradcheck(function, [u, *leaves])


def test_frozen_layer_saves_no_states():
    """The backward of a frozen S5 needs its constants alone."""
    layer, u = make(hidden_size=4, state_size=64), draw(1, 2000, 4).requires_grad_()
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x.numel()) or x, lambda x: x):
        layer(u)
    assert sum(saved) < u.numel()


# module


def test_counts():
    def count(**options):
        return sum(x.numel() for x in S5(**options).state_dict().values())

    with torch.device("meta"):
        for freeze in ("all", "ab_dt", "none"):
            # A and the step, B and C, D: 3P + 4PH + H
            assert count(hidden_size=1024, freeze=freeze) == 3 * 128 + 4 * 128 * 1024 + 1024
        assert count(hidden_size=768, state_size=64, bidirectional=True) == 3 * 32 + 6 * 32 * 768 + 768
        assert count(hidden_size=768, state_size=64, use_D=False) == 3 * 32 + 4 * 32 * 768


@pytest.mark.parametrize("blocks", [1, 2, 4])
def test_initial_values(blocks):
    layer = make(256, 128, blocks=blocks, dt_min=1e-2, dt_max=5e-2)
    A, B, C = (torch.view_as_complex(x) for x in (layer.A, layer.B, layer.C))
    w, _ = diagonalize_legs(128 // blocks)
    for start in range(0, 64, 64 // blocks):
        assert_close(A[start : start + 64 // blocks], w, "float32")
    # the eigenvalues of as many HiPPO matrices, both of each pair
    S = torch.block_diag(*[hippo_legs(128 // blocks)[3]] * blocks)
    expected = torch.linalg.eigvals(S).imag.sort().values
    assert_close(torch.cat([A, A.conj()]).imag.sort().values, expected, "float32")
    dt = layer.log_dt.exp()
    assert 1e-2 * 0.999 < dt.min() < 1.2e-2
    assert 4e-2 < dt.max() < 5e-2 * 1.001
    for values, fan_in in ((B, 256), (C, 128)):
        assert abs(values.abs().square().mean().item() * fan_in - 1) < 0.05
        assert abs(values.square().mean().abs().item() * fan_in) < 0.05  # circular
    assert 0.8 < layer.D.std().item() < 1.2


def test_drawing_in_the_eigenbasis_is_drawing_before_it():
    """V^H times a real normal matrix has independent, circular complex entries: V is unitary and V^T V = 0."""
    _, V = diagonalize_legs(32)
    assert_close(V.mH @ V, torch.eye(16, dtype=torch.complex128), "float64")
    assert_close(V.mT @ V + 1, torch.ones(16, 16, dtype=torch.complex128), "float64")


def test_float32_stays_accurate_over_long_sequences():
    layer, u = make(), draw(1, 8000, 6)
    expected = layer(u)
    assert_close(layer.float()(u.float()), expected, "float32")


def test_steps_and_inputs_follow_the_s4d_equations():
    """One mode, one channel: the same recurrence as the reference of S4D."""
    layer, u = make(1, 2, blocks=1), draw(1, 40, 1)
    B, C = torch.view_as_complex(layer.B).mT, torch.view_as_complex(layer.C)
    y, _ = reference.s4d_scan(u, C, B, torch.view_as_complex(layer.A)[None], layer.log_dt.exp())
    assert_close(layer(u), y[:, 0] + layer.D * u, "float64")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"state_size": 12}, r"state_size must be a positive multiple of 2 \* blocks = 8; got 12"),
        ({"state_size": 0}, r"state_size must be a positive multiple of 2 \* blocks = 8; got 0"),
        ({"blocks": 0}, "blocks must be a positive integer; got 0"),
        ({"discretization": "euler"}, "discretization must be one of zoh, bilinear; got 'euler'"),
        ({"dt_min": 0.0}, "dt_min must be positive and at most dt_max; got 0.0 and 0.1"),
        ({"dt_min": math.inf}, "dt_min must be positive and at most dt_max; got inf and 0.1"),
    ],
)
def test_bad_arguments(options, message):
    with pytest.raises(ValueError, match=message):
        S5(**{"hidden_size": 6, **options})
