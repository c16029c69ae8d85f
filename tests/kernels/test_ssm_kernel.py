"""S4's kernel, step and state hand-over against dense matrices and the plain recurrence."""

import math

import pytest
import torch

from hf_hybrid.kernels.long_conv import long_conv
from hf_hybrid.kernels.ssm_kernel import (
    S4Step,
    diagonalize_legs,
    discrete,
    dplr_legs,
    hippo_legs,
    op,
    reference,
    s4_block_constants,
    s4_final_state,
    s4_kernel,
    s4_output,
    s4_state_response,
    s4_step,
    s4_step_constants,
    s4_step_states,
    two_level,
)
from tests.tolerances import assert_close

STEPS = torch.tensor([1e-3, 1e-2, 1e-1], dtype=torch.float64)
ALGORITHMS = ("two_level", "cauchy")


def make(state_size=64, filters=2, copies=1, dt=STEPS, seed=0):
    """C, B, P, w, dt with HiPPO-LegS in every copy."""
    generator = torch.Generator().manual_seed(seed)
    C = torch.randn(filters, len(dt), state_size // 2, 2, generator=generator, dtype=torch.float64)
    w, P, B = (x.repeat(copies, 1) for x in dplr_legs(state_size))
    return torch.view_as_complex(C), B, P, w, dt


def random_system(state_size=16, filters=2, copies=2, channels=4, seed=0):
    """A system in which every copy and every tensor is different, as training makes it."""
    generator = torch.Generator().manual_seed(seed)
    C, B, P, w, dt = make(state_size, filters, copies, torch.logspace(-2, -0.5, channels, dtype=torch.float64), seed)
    noise = [torch.randn(B.shape, generator=generator, dtype=torch.complex128) for _ in range(3)]
    w = w + 0.3j * noise[2].real - 0.2 * noise[2].imag.abs()
    return C, B + 0.3 * noise[0], P + 0.3 * noise[1], w, dt


def single(system):
    return tuple(x.to(torch.complex64 if x.is_complex() else torch.float32) for x in system)


def draw(*shape, seed=7):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


# HiPPO


@pytest.mark.parametrize("size", [2, 8, 64, 256])
def test_legs_is_the_closed_form(size):
    A, B, P, S = hippo_legs(size)
    for i in range(0, size, max(1, size // 8)):
        for j in range(0, size, max(1, size // 8)):
            expected = -math.sqrt((2 * i + 1) * (2 * j + 1)) if i > j else -(i + 1) if i == j else 0.0
            assert abs(A[i, j].item() - expected) <= 1e-14 * 2 * size
    assert_close(A[:, 0], -B, "float64 fft")
    assert_close(S + S.mT, -torch.eye(size, dtype=torch.float64), "exact")
    assert_close(P * math.sqrt(2), B, "float64 fft")


def test_legs_dtype():
    assert {x.dtype for x in hippo_legs(8, torch.float32)} == {torch.float32}


@pytest.mark.parametrize("size", [2, 8, 64, 256])
def test_legs_diagonalises(size):
    w, V = diagonalize_legs(size)
    A, B, _, S = hippo_legs(size)
    full, modes = torch.cat([V, V.conj()], dim=1), torch.cat([w, w.conj()])
    eye = torch.eye(size, dtype=torch.complex128)
    assert_close(full.mH @ full, eye, "float64")
    assert_close(full @ torch.diag(modes) @ full.mH, S + 0j, "float64")
    w2, P_hat, B_hat = dplr_legs(size)
    assert_close(w2, w, "exact")
    assert_close(w.real, torch.full_like(w.real, -0.5), "exact")
    low_rank = torch.cat([P_hat, P_hat.conj()])
    assert_close(full @ (torch.diag(modes) - torch.outer(low_rank, low_rank.conj())) @ full.mH, A + 0j, "float64")
    assert_close(2 * (V @ B_hat).real, B, "float64")
    assert_close(B_hat, B_hat.abs() + 0j, "float64")  # the phase is fixed


def test_legs_known_frequencies():
    expected = torch.tensor([0.42749, 1.95779, 5.35421, 19.85741], dtype=torch.float64)
    assert_close(dplr_legs(8)[0].imag, expected, "float32")
    assert abs(dplr_legs(64)[0].imag.max().item() - 1303.27) < 0.01


@pytest.mark.parametrize("size", [0, 3, -2])
def test_legs_needs_an_even_size(size):
    with pytest.raises(ValueError, match=f"state_size must be a positive even number; got {size}"):
        dplr_legs(size)


# kernel


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("length", [1, 2, 7, 64, 1023, 1024])
def test_kernel_is_the_recurrence(length, algorithm):
    system = make()
    expected = reference.s4_kernel(*system, length)
    actual = s4_kernel(*system, length, algorithm=algorithm)
    assert actual.dtype == torch.float64
    for channel in range(len(STEPS)):  # each step by its own scale
        assert_close(actual[:, channel], expected[:, channel], "float64")
    actual = s4_kernel(*single(system), length, algorithm=algorithm)
    assert actual.dtype == torch.float32
    assert_close(actual, expected, "float32 ssm kernel")


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("length", [1, 5, 33])
def test_trained_copies_serve_their_channels(length, algorithm):
    system = random_system()
    assert_close(s4_kernel(*system, length, algorithm=algorithm), reference.s4_kernel(*system, length), "float64")
    C, B, P, w, dt = system
    spread = (C, *(x[[0, 1, 0, 1]] for x in (B, P, w)), dt)
    assert_close(s4_kernel(*system, length), s4_kernel(*spread, length), "exact")


def test_equal_copies_change_nothing():
    one, many = make(copies=1), make(copies=3)
    assert_close(s4_kernel(*many, 100), s4_kernel(*one, 100), "exact")


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("length", [1, 2, 7, 64, 1000])
def test_sums_of_the_kernel_in_closed_form(length, algorithm):
    """At frequency 0 the sum is Ct[0] in HiPPO's own basis; at Nyquist (dt / 2) Ct B, with Ct = C (I - Abar^L)."""
    system = make()
    C, B, P, w, dt = system
    Abar, _ = reference.dense_system(B, P, w, dt)
    Ct = torch.cat([C, C.conj()], dim=-1)
    Ct = Ct - torch.einsum("chm,hmn->chn", Ct, torch.linalg.matrix_power(Abar, length))
    kernel = s4_kernel(*system, length, algorithm=algorithm)
    _, V = diagonalize_legs(64)
    original = (Ct @ torch.cat([V, V.conj()], dim=1).mH).real
    assert_close(kernel.sum(-1), original[..., 0], "float64")
    if length % 2 == 0:
        signs = torch.tensor([1.0, -1.0], dtype=torch.float64).repeat(length // 2)
        nyquist = dt / 2 * (Ct @ torch.cat([B[0], B[0].conj()])).real
        assert_close((kernel * signs).sum(-1), nyquist, "float64")


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_shorter_kernel_is_a_prefix(algorithm):
    system = make()
    longest = s4_kernel(*system, 1500)
    for length in (1, 2, 100, 1024, 1499):
        assert_close(s4_kernel(*system, length, algorithm=algorithm), longest[..., :length], "float64")
        assert_close(s4_kernel(*single(system), length), s4_kernel(*single(system), 1500)[..., :length], "float32")


def test_bilinear_kernel_approaches_the_continuous_one_quadratically():
    """K[l] / dt -> C exp(A l dt) B at fixed time; halving dt quarters the distance."""
    A, B, _, _ = hippo_legs(8)
    _, V = diagonalize_legs(8)
    errors = []
    for steps in (200, 400, 800):
        dt = torch.tensor([1.0 / steps], dtype=torch.float64)
        system = make(8, filters=1, dt=dt)
        C = 2 * (system[0][0, 0] @ V.mH).real
        # the bilinear input enters at the middle of its step
        expected = C @ torch.linalg.matrix_exp(A * (1 + 0.5 / steps)) @ B
        errors.append((s4_kernel(*system, steps + 1)[0, 0, -1] / dt[0] - expected).abs().item())
    assert 3.8 < errors[0] / errors[1] < 4.2
    assert 3.8 < errors[1] / errors[2] < 4.2


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_gradcheck(algorithm):
    system = [x.clone().requires_grad_() for x in random_system(4, copies=1, channels=2)]
    for length in (1, 6):
        assert torch.autograd.gradcheck(lambda *x, n=length: s4_kernel(*x, n, algorithm=algorithm), system)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_gradients_are_those_of_the_recurrence(algorithm, monkeypatch):
    """With tiles of one channel, whose intermediate results are recomputed."""
    monkeypatch.setattr(discrete, "_CPU_TILE", 1 << 10)
    leaves = [x.clone().requires_grad_() for x in random_system()]
    weight = draw(2, 4, 90)
    expected = torch.autograd.grad(reference.s4_kernel(*leaves, 90), leaves, weight)
    actual = torch.autograd.grad(s4_kernel(*leaves, 90, algorithm=algorithm), leaves, weight)
    for one, other in zip(actual, expected, strict=True):
        assert_close(one, other, "float64 gradient")


@pytest.mark.parametrize("size", [4, 64])
def test_gradients_in_single_precision(size):
    """The long way back over thousands of taps loses no digits, of slow channels and of fast ones."""
    system, weight = make(size, filters=2), draw(2, len(STEPS), 4096)
    leaves = [x.clone().requires_grad_() for x in system]
    expected = torch.autograd.grad(s4_kernel(*leaves, 4096, algorithm="cauchy"), leaves, weight)
    leaves = [x.clone().requires_grad_() for x in single(system)]
    actual = torch.autograd.grad(s4_kernel(*leaves, 4096), leaves, weight.float())
    for one, other in zip(actual, expected, strict=True):
        assert_close(one, other, "float32 gradient")


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_compiles_without_graph_breaks(algorithm):
    leaves = [x.clone().requires_grad_() for x in random_system(4, copies=1, channels=2)]
    compiled = torch.compile(s4_kernel, fullgraph=True, backend="aot_eager")
    for options in ({"algorithm": algorithm}, {}):
        actual, expected = compiled(*leaves, 20, **options), s4_kernel(*leaves, 20, **options)
        assert_close(actual, expected, "float64")
        weight = draw(*expected.shape)
        gradients = (torch.autograd.grad(taps, leaves, weight) for taps in (actual, expected))
        for one, other in zip(*gradients, strict=True):
            assert_close(one, other, "float64")


@pytest.mark.parametrize("length", [1, 2, 9])
def test_opcheck_of_the_generating_function(length):
    C, B, P, w, dt = random_system(4)
    tensors = [x.clone().requires_grad_() for x in (C, *(x.repeat(2, 1) for x in (B, P, w)), 2 / dt)]
    for dtype in (torch.float64, torch.float32):
        torch.library.opcheck(op.s4_cauchy, (*tensors, length, 1 << 8, dtype, "torch"))


@pytest.mark.parametrize("blocks", [(8, 3), pytest.param((1, 1), marks=pytest.mark.full)])
def test_opcheck(blocks):
    C, B, P, w, dt = random_system(4)
    step = [x.detach().requires_grad_() for x in s4_step_constants(B, P, w, dt)]
    torch.library.opcheck(two_level._two_level, (*step, C.requires_grad_(), *blocks))
    torch.library.opcheck(two_level._two_level, (*step, C.detach().to(torch.complex64).requires_grad_(), *blocks))
    for dtype in (torch.complex128, torch.complex64):
        torch.library.opcheck(two_level._block, (*step, blocks[0], dtype))
    added, power, first = (draw(*shape).requires_grad_() for shape in ((5, 4, 2, 4), (4, 4, 4), (4, 4, 4)))
    for group, offset in ((1, 0), (2, 0), (3, 1), (9, 0)):
        torch.library.opcheck(two_level.s4_block_scan, (added, power, first, group, offset))
        assert torch.autograd.gradcheck(two_level.s4_block_scan, (added, power, first, group, offset))


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_training_keeps_no_intermediate_results(algorithm):
    """What the graph holds on to grows with neither N^2 nor L; two_level keeps orbits of columns and rows."""
    leaves = [x.requires_grad_() for x in make(32, copies=64, dt=torch.logspace(-3, -1, 64, dtype=torch.float64))]
    sizes = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: sizes.append(x.numel()) or x, lambda x: x):
        kernel = s4_kernel(*leaves, 4096, algorithm=algorithm)
    orbits = 64 * 32 * (64 + 2 * 64) if algorithm == "two_level" else 0
    assert sum(sizes) <= orbits + 2 * sum(x.numel() for x in leaves)
    kernel.square().sum().backward()
    assert all(x.grad.abs().max() > 0 for x in leaves)


def test_convolution_is_the_recurrence():
    system = make(16, filters=2, dt=STEPS[:2])
    u = draw(1, 4096, 2)
    expected, _ = reference.s4_scan(u, *system)
    kernel = s4_kernel(*system, 4096)
    assert_close(long_conv(u, kernel[0]), expected[:, 0], "float64 fft")
    assert_close(long_conv(u.float(), kernel[1].float()), expected[:, 1], "float32 fft")


def test_kernel_errors():
    C, B, P, w, dt = make(8)
    with pytest.raises(ValueError, match="length must be a positive integer; got 0"):
        s4_kernel(C, B, P, w, dt, 0)
    with pytest.raises(ValueError, match="algorithm must be one of two_level, cauchy; got 'fft'"):
        s4_kernel(C, B, P, w, dt, 4, algorithm="fft")
    with pytest.raises(ValueError, match="multiple of the 2 copies; got 3"):
        s4_kernel(C, B.repeat(2, 1), P.repeat(2, 1), w.repeat(2, 1), dt, 4)
    with pytest.raises(ValueError, match="C must be complex"):
        s4_kernel(C[..., :2], B, P, w, dt, 4)
    with pytest.raises(ValueError, match="B must be complex"):
        s4_kernel(C, B.real, P, w, dt, 4)
    with pytest.raises(ValueError, match="dt must be real"):
        s4_kernel(C, B, P, w, dt[None], 4)


# recurrence


@pytest.mark.parametrize("system", [make(), random_system()], ids=["legs", "trained"])
def test_step_is_the_dense_step(system):
    C, B, P, w, dt = system
    Abar, Bbar = reference.dense_system(B, P, w, dt)
    modes = w.shape[-1]
    state = torch.view_as_complex(draw(3, len(dt), modes, 2))
    u = draw(3, len(dt))
    full = torch.einsum("hmn,bhn->bhm", Abar, torch.cat([state, state.conj()], dim=-1)) + Bbar * u[..., None]
    y, after = s4_step(state, u, C, s4_step_constants(B, P, w, dt))
    assert_close(after, full[..., :modes], "float64")
    assert_close(y, 2 * torch.einsum("chm,bhm->bch", C, full[..., :modes]).real, "float64")
    assert_close(s4_output(after, C), y, "float64")


@pytest.mark.parametrize("length", [1, 2, 63, 64, 65, 200])
def test_state_hand_over(length):
    """The state after a, and b's outputs from it, are those of a ++ b."""
    system = random_system()
    C, B, P, w, dt = system
    step = s4_step_constants(B, P, w, dt)
    blocks = s4_block_constants(C, step, torch.float64)
    a, b = draw(2, 37, 4), draw(2, length, 4, seed=8)
    everything, last = reference.s4_scan(torch.cat([a, b], dim=1), *system)
    state = s4_final_state(a, step, blocks)
    assert_close(state, reference.s4_scan(a, *system)[1], "float64")
    assert_close(s4_step_states(a, step), state, "float64")
    kernel = s4_kernel(*system, length)
    fresh = torch.stack([long_conv(b, kernel[i]) for i in range(2)], dim=1)
    response = s4_state_response(state, length, blocks)
    assert_close(fresh + response, everything[:, :, 37:], "float64")
    assert response.abs().max() > 0.1
    assert_close(s4_final_state(b, step, blocks, state), last, "float64")


def test_float32_state_stays_accurate():
    system = make(64, filters=1)
    C, B, P, w, dt = system
    step = s4_step_constants(B, P, w, dt)
    narrow = S4Step(*(x.to(torch.complex64) for x in step))
    u = draw(1, 700, 3)
    expected_y, expected = reference.s4_scan(u, *system)
    state = s4_final_state(u[:, :600].float(), narrow, s4_block_constants(C, step))
    assert state.dtype == torch.complex64
    outputs = []
    for t in range(600, 700):
        y, state = s4_step(state, u[:, t].float(), C.to(torch.complex64), narrow)
        outputs.append(y)
    assert_close(state, expected, "float32")
    assert_close(torch.stack(outputs, dim=2), expected_y[:, :, 600:], "float32")


def test_state_gradients():
    system = random_system(4, filters=1, channels=2)
    u, state = draw(1, 70, 2), torch.view_as_complex(draw(1, 2, 2, 2))
    leaves = [x.clone().requires_grad_() for x in (u, state, *system)]

    def fast(u, state, C, B, P, w, dt):
        step = s4_step_constants(B, P, w, dt)
        blocks = s4_block_constants(C, step, torch.float64)
        return s4_state_response(state, 70, blocks), s4_final_state(u, step, blocks, state)

    def slow(u, state, C, B, P, w, dt):
        y, last = reference.s4_scan(u, C, B, P, w, dt, state)
        return y - reference.s4_scan(u, C, B, P, w, dt)[0], last

    weights = draw(1, 1, 70, 2), torch.view_as_complex(draw(1, 2, 2, 2, seed=3))
    results = [torch.autograd.grad(f(*leaves), leaves, weights) for f in (fast, slow)]
    for one, other in zip(*results, strict=True):
        assert_close(one, other, "float64 gradient")


def test_autocast_changes_nothing():
    C, B, P, w, dt = single(make(16, filters=1))
    u = draw(2, 130, 3).float()

    def run():
        step = s4_step_constants(B, P, w, dt)
        blocks = s4_block_constants(C, step)
        state = s4_final_state(u, S4Step(*(x.to(torch.complex64) for x in step)), blocks)
        return s4_kernel(C, B, P, w, dt, 130), state, s4_state_response(state, 130, blocks)

    expected = run()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        actual = run()
    for one, other in zip(actual, expected, strict=True):
        assert_close(one, other, "exact")
