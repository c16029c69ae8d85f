"""S4D's kernel, step and state hand-over against the plain recurrence, a Vandermonde matrix and S4 with P = 0."""

import math

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from hf_hybrid.kernels.long_conv import long_conv
from hf_hybrid.kernels.ssm_kernel import (
    DISCRETIZATIONS,
    S4DStep,
    diagonalize_legs,
    discrete,
    discretize,
    reference,
    s4_kernel,
    s4d_block_powers,
    s4d_final_state,
    s4d_kernel,
    s4d_state_response,
    s4d_step,
    s4d_step_constants,
)
from tests.tolerances import assert_close

STEPS = torch.tensor([1e-3, 1e-2, 1e-1], dtype=torch.float64)


def make(state_size=64, filters=2, copies=1, dt=STEPS, seed=0, legs=False):
    """C, B, w, dt with linear frequencies, or HiPPO's, in every copy."""
    generator = torch.Generator().manual_seed(seed)
    C = torch.randn(filters, len(dt), state_size // 2, 2, generator=generator, dtype=torch.float64)
    w = diagonalize_legs(state_size)[0] if legs else -0.5 + 1j * math.pi * torch.arange(state_size // 2).double()
    return torch.view_as_complex(C), torch.ones(copies, state_size // 2).to(w), w.repeat(copies, 1), dt


def random_system(state_size=16, filters=2, copies=2, channels=4, seed=0):
    """A system in which every copy and every tensor is different, as training makes it."""
    C, B, w, dt = make(state_size, filters, copies, torch.logspace(-2, -0.5, channels, dtype=torch.float64), seed)
    noise = torch.randn(2, *B.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.complex128)
    return C, B + 0.3 * noise[0], w + 0.3j * noise[1].real - 0.2 * noise[1].imag.abs(), dt


def single(system):
    return tuple(x.to(torch.complex64 if x.is_complex() else torch.float32) for x in system)


def draw(*shape, seed=7):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def vandermonde(C, B, w, dt, length, discretization):
    """The kernel by its equation, with every power formed."""
    Abar, Bbar = reference.s4d_system(B, w, dt, discretization)
    powers = Abar[..., None] ** torch.arange(length)
    return 2 * torch.einsum("chm,hml->chl", C * Bbar, powers).real


class Largest(TorchDispatchMode):
    """Remembers the largest tensor that any operation makes, in real numbers."""

    def __init__(self):
        super().__init__()
        self.size = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for x in out if isinstance(out, tuple | list) else [out]:
            if isinstance(x, torch.Tensor):
                self.size = max(self.size, x.numel() * (2 if x.is_complex() else 1))
        return out


# discretisation


@pytest.mark.parametrize("dt", [1e-3, 0.1, 2.0])
def test_zoh_is_the_exact_solution_of_a_held_input(dt):
    """decay = exp(z) and gain = dt sum_k z^k / (k + 1)! with z = dt w, which needs no care about z = 0."""
    w = torch.tensor([-0.5, -0.3 + 2j, -1e-5 + 1e-6j, -1 - 1j, 0.0], dtype=torch.complex128)
    decay, gain = discretize(w, torch.tensor(dt, dtype=torch.float64), "zoh")
    terms = [(dt * w) ** k / math.gamma(k + 2) for k in range(40)]
    assert_close(decay, (dt * w).exp(), "float64")
    assert_close(gain / dt, sum(terms), "float64")
    fast = torch.tensor([-40 - 3j, -3 + 400j], dtype=torch.complex128)
    decay, gain = discretize(fast, torch.tensor(dt, dtype=torch.float64), "zoh")
    assert_close(gain, (decay - 1) / fast, "float64")


def test_bilinear_is_the_trapezoidal_rule():
    w, dt = torch.tensor([-0.5 + 3j, -2.0], dtype=torch.complex128), torch.tensor(0.3, dtype=torch.float64)
    decay, gain = discretize(w, dt, "bilinear")
    # x' - x = dt/2 w (x' + x) + dt v
    x, v = (torch.view_as_complex(draw(2, 2, seed=seed)) for seed in (1, 2))
    after = decay * x + gain * v
    assert_close(after - x, dt / 2 * w * (after + x) + dt * v, "float64")


@pytest.mark.parametrize("discretization", DISCRETIZATIONS)
@pytest.mark.parametrize("w", [-0.5 + 2j, -1e-3 + 0j, 0j])
def test_discretisation_gradcheck(w, discretization):
    leaves = [torch.tensor([w]).to(torch.complex128), torch.tensor([0.2], dtype=torch.float64)]
    leaves = [x.requires_grad_() for x in leaves]
    assert torch.autograd.gradcheck(lambda *x: discretize(*x, discretization), leaves)


def test_both_discretisations_approach_each_other_quadratically():
    errors = []
    for steps in (200, 400, 800):
        system = make(8, 1, dt=torch.tensor([1.0 / steps], dtype=torch.float64))
        zoh, bilinear = (s4d_kernel(*system, steps + 1, discretization=x)[0, 0, -1] for x in DISCRETIZATIONS)
        errors.append((zoh - bilinear).abs().item() * steps)
    assert 3.8 < errors[0] / errors[1] < 4.2
    assert 3.8 < errors[1] / errors[2] < 4.2


# kernel


@pytest.mark.parametrize("legs", [False, True])
@pytest.mark.parametrize("discretization", DISCRETIZATIONS)
@pytest.mark.parametrize("length", [1, 2, 7, 64, 1023, 1024])
def test_kernel_is_the_recurrence(length, discretization, legs):
    system = make(legs=legs)
    expected = reference.s4d_kernel(*system, length, discretization=discretization)
    assert_close(expected, vandermonde(*system, length, discretization), "float64")
    actual = s4d_kernel(*system, length, discretization=discretization)
    assert actual.dtype == torch.float64
    for channel in range(len(STEPS)):  # each step by its own scale
        assert_close(actual[:, channel], expected[:, channel], "float64")
    actual = s4d_kernel(*single(system), length, discretization=discretization)
    assert actual.dtype == torch.float32
    # frequencies that were rounded before they came here are off by that much
    rounded = [x.to(torch.complex128 if x.is_complex() else torch.float64) for x in single(system)]
    assert_close(actual, reference.s4d_kernel(*rounded, length, discretization=discretization), "float32")


def test_bilinear_kernel_is_s4s_without_low_rank():
    C, B, w, dt = random_system()
    expected = s4_kernel(C, B, torch.zeros_like(B), w, dt, 100)
    assert_close(s4d_kernel(C, B, w, dt, 100, discretization="bilinear"), expected, "float64")
    assert (s4d_kernel(C, B, w, dt, 100) - expected).abs().max() > 1e-3 * expected.abs().max()


def test_trained_copies_serve_their_channels():
    C, B, w, dt = random_system()
    expected = reference.s4d_kernel(C, B, w, dt, 33)
    assert_close(s4d_kernel(C, B, w, dt, 33), expected, "float64")
    spread = C, B[[0, 1, 0, 1]], w[[0, 1, 0, 1]], dt
    assert_close(s4d_kernel(*spread, 33), s4d_kernel(C, B, w, dt, 33), "exact")


def test_shorter_kernel_is_a_prefix():
    system = make()
    longest = s4d_kernel(*system, 1500)
    for length in (1, 2, 100, 1024, 1499):
        assert_close(s4d_kernel(*system, length), longest[..., :length], "float64")
        assert_close(s4d_kernel(*single(system), length), s4d_kernel(*single(system), 1500)[..., :length], "float32")


def test_powers_stay_accurate_where_nothing_is_forgotten():
    """Eigenvalues on the imaginary axis: the kernel is a sum of sines, exact in closed form."""
    frequencies = torch.tensor([[0.5, 2.0, 700.0]], dtype=torch.float64)
    C = torch.ones(1, 1, 3, dtype=torch.complex128)
    dt = torch.tensor([0.01], dtype=torch.float64)
    kernel = s4d_kernel(C, torch.ones_like(frequencies) + 0j, 1j * frequencies, dt, 10_000)[0, 0]
    edges = torch.arange(10_001, dtype=torch.float64) * 0.01 * frequencies.mT
    expected = 2 * ((edges.sin()[:, 1:] - edges.sin()[:, :-1]) / frequencies.mT).sum(0)
    # arguments near 70000 are themselves rounded to 7e-12
    assert_close(kernel, expected, "float64 gradient")


@pytest.mark.parametrize("discretization", DISCRETIZATIONS)
def test_gradcheck(discretization):
    system = [x.clone().requires_grad_() for x in random_system(4, copies=1, channels=2)]
    for length in (1, 6):
        assert torch.autograd.gradcheck(lambda *x, n=length: s4d_kernel(*x, n, discretization=discretization), system)


@pytest.mark.parametrize("discretization", DISCRETIZATIONS)
def test_gradients_are_those_of_the_recurrence(discretization, monkeypatch):
    """With tiles of one channel, whose intermediate results are recomputed."""
    monkeypatch.setattr(discrete, "_CPU_TILE", 1 << 8)
    leaves = [x.clone().requires_grad_() for x in random_system()]
    weight = draw(2, 4, 90)
    options = {"discretization": discretization}
    expected = torch.autograd.grad(reference.s4d_kernel(*leaves, 90, **options), leaves, weight)
    actual = torch.autograd.grad(s4d_kernel(*leaves, 90, **options), leaves, weight)
    for one, other in zip(actual, expected, strict=True):
        assert_close(one, other, "float64 gradient")


def test_training_keeps_no_intermediate_results():
    """What the graph holds on to grows with neither sqrt(L) nor L."""
    leaves = [x.requires_grad_() for x in make(32, copies=64, dt=torch.logspace(-3, -1, 64, dtype=torch.float64))]
    sizes = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: sizes.append(x.numel()) or x, lambda x: x):
        kernel = s4d_kernel(*leaves, 2048)
    assert sum(sizes) <= 2 * sum(x.numel() for x in leaves)
    kernel.square().sum().backward()
    assert all(x.grad.abs().max() > 0 for x in leaves)


def test_tiles_bound_the_memory(monkeypatch):
    system = make(32, filters=1, dt=torch.logspace(-3, -1, 64, dtype=torch.float64))
    whole = s4d_kernel(*system, 1024)
    monkeypatch.setattr(discrete, "_CPU_TILE", 1 << 14)
    with Largest() as largest:
        tiled = s4d_kernel(*system, 1024)
    assert largest.size == whole.numel()  # the result itself
    assert_close(tiled, whole, "float64")


def test_matrix_of_powers_is_never_formed():
    system = make(64, filters=1, dt=torch.logspace(-3, -1, 8, dtype=torch.float64))
    with Largest() as largest:
        s4d_kernel(*system, 10_000)
    assert largest.size <= 8 * 10_000 * 1.1


def test_convolution_is_the_recurrence():
    system = make(16, filters=2, dt=STEPS[:2])
    u = draw(1, 4096, 2)
    expected, _ = reference.s4d_scan(u, *system)
    kernel = s4d_kernel(*system, 4096)
    assert_close(long_conv(u, kernel[0]), expected[:, 0], "float64 fft")
    assert_close(long_conv(u.float(), kernel[1].float()), expected[:, 1], "float32 fft")


def test_kernel_errors():
    C, B, w, dt = make(8)
    with pytest.raises(ValueError, match="length must be a positive integer; got 0"):
        s4d_kernel(C, B, w, dt, 0)
    with pytest.raises(ValueError, match="discretization must be one of zoh, bilinear; got 'euler'"):
        s4d_kernel(C, B, w, dt, 4, discretization="euler")
    with pytest.raises(ValueError, match="multiple of the 2 copies; got 3"):
        s4d_kernel(C, B.repeat(2, 1), w.repeat(2, 1), dt, 4)
    with pytest.raises(ValueError, match="C must be complex"):
        s4d_kernel(C[..., :2], B, w, dt, 4)
    with pytest.raises(ValueError, match="B must be complex"):
        s4d_kernel(C, B.real, w, dt, 4)
    with pytest.raises(ValueError, match="dt must be real"):
        s4d_kernel(C, B, w, dt[None], 4)


# recurrence


@pytest.mark.parametrize("discretization", DISCRETIZATIONS)
def test_step_is_the_recurrence(discretization):
    system = random_system()
    C, B, w, dt = system
    state, u = torch.view_as_complex(draw(3, 4, 8, 2)), draw(3, 4)
    expected, after = reference.s4d_scan(u[:, None], *system, discretization, state)
    y, actual = s4d_step(state, u, C, s4d_step_constants(B, w, dt, discretization))
    assert_close(y, expected[:, :, 0], "float64")
    assert_close(actual, after, "float64")


@pytest.mark.parametrize("length", [1, 2, 63, 64, 65, 200])
@pytest.mark.parametrize("discretization", DISCRETIZATIONS)
def test_state_hand_over(length, discretization):
    """The state after a, and b's outputs from it, are those of a ++ b."""
    system = random_system()
    C, B, w, dt = system
    step = s4d_step_constants(B, w, dt, discretization)
    powers = s4d_block_powers(step, torch.float64)
    a, b = draw(2, 37, 4), draw(2, length, 4, seed=8)
    everything, last = reference.s4d_scan(torch.cat([a, b], dim=1), *system, discretization)
    state = s4d_final_state(a, step, powers)
    assert_close(state, reference.s4d_scan(a, *system, discretization)[1], "float64")
    kernel = s4d_kernel(*system, length, discretization=discretization)
    fresh = torch.stack([long_conv(b, kernel[i]) for i in range(2)], dim=1)
    response = s4d_state_response(state, length, C, powers)
    assert_close(fresh + response, everything[:, :, 37:], "float64")
    assert response.abs().max() > 0.1
    assert_close(s4d_final_state(b, step, powers, state), last, "float64")


def test_float32_state_stays_accurate():
    system = make(64, filters=1, legs=True)
    C, B, w, dt = system
    step = s4d_step_constants(B, w, dt, "zoh")
    narrow = S4DStep(*(x.to(torch.complex64) for x in step))
    u = draw(1, 700, 3)
    expected_y, expected = reference.s4d_scan(u, *system)
    state = s4d_final_state(u[:, :600].float(), narrow, s4d_block_powers(step))
    assert state.dtype == torch.complex64
    outputs = []
    for t in range(600, 700):
        y, state = s4d_step(state, u[:, t].float(), C.to(torch.complex64), narrow)
        outputs.append(y)
    assert_close(state, expected, "float32")
    assert_close(torch.stack(outputs, dim=2), expected_y[:, :, 600:], "float32")


def test_states_of_all_tokens_are_never_formed():
    C, B, w, dt = make(64, filters=1, dt=STEPS)
    step = s4d_step_constants(B, w, dt, "zoh")
    powers = s4d_block_powers(step, torch.float64)
    u = draw(2, 4096, 3)
    with Largest() as largest:
        state = s4d_final_state(u, step, powers)
        s4d_state_response(state, 4096, C, powers)
    assert largest.size <= 1.1 * u.numel()


def test_state_gradients():
    system = random_system(4, filters=1, channels=2)
    u, state = draw(1, 70, 2), torch.view_as_complex(draw(1, 2, 2, 2))
    leaves = [x.clone().requires_grad_() for x in (u, state, *system)]

    def fast(u, state, C, B, w, dt):
        step = s4d_step_constants(B, w, dt, "zoh")
        powers = s4d_block_powers(step, torch.float64)
        return s4d_state_response(state, 70, C, powers), s4d_final_state(u, step, powers, state)

    def slow(u, state, C, B, w, dt):
        y, last = reference.s4d_scan(u, C, B, w, dt, "zoh", state)
        return y - reference.s4d_scan(u, C, B, w, dt)[0], last

    weights = draw(1, 1, 70, 2), torch.view_as_complex(draw(1, 2, 2, 2, seed=3))
    results = [torch.autograd.grad(f(*leaves), leaves, weights) for f in (fast, slow)]
    for one, other in zip(*results, strict=True):
        assert_close(one, other, "float64 gradient")


def test_autocast_changes_nothing():
    C, B, w, dt = single(make(16, filters=1))
    u = draw(2, 130, 3).float()

    def run():
        step = s4d_step_constants(B, w, dt, "zoh")
        powers = s4d_block_powers(step)
        state = s4d_final_state(u, S4DStep(*(x.to(torch.complex64) for x in step)), powers)
        return s4d_kernel(C, B, w, dt, 130), state, s4d_state_response(state, 130, C, powers)

    expected = run()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        actual = run()
    for one, other in zip(actual, expected, strict=True):
        assert_close(one, other, "exact")
