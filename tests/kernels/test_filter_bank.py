"""Several filters of one sequence, and S4's states at the ends of windows, against their definitions."""

import pytest
import torch

from hf_hybrid.kernels.long_conv import blocks, filter_bank_conv, reference
from hf_hybrid.kernels.ssm_kernel import discrete as tiles
from hf_hybrid.kernels.ssm_kernel import dplr_legs, s4_window_states
from hf_hybrid.kernels.ssm_kernel import windows as windows_module
from hf_hybrid.kernels.ssm_kernel.reference import s4_scan

from ..tolerances import assert_close


def draw(*shape, seed=0, dtype=torch.float64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def gradients(function, *tensors):
    tensors = [x.clone().requires_grad_() for x in tensors]
    y = function(*tensors)
    (y * draw(*y.shape, seed=9, dtype=y.dtype)).sum().backward()
    return y, [x.grad for x in tensors]


# filter banks -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("dtype", "row"), [(torch.float64, "float64"), (torch.float32, "float32")])
@pytest.mark.parametrize(("length", "taps"), [(1, 1), (1, 5), (7, 3), (64, 64), (65, 200), (200, 63)])
def test_a_bank_is_one_filter_after_the_other(length, taps, dtype, row, monkeypatch):
    monkeypatch.setattr(blocks, "_CPU_BLOCK", 600)  # several blocks of rows and channels
    u, kernel, skip = draw(3, length, 5), draw(4, 5, taps, seed=1), draw(4, 5, seed=2)
    expected, expected_grads = gradients(lambda u, k, s: reference.filter_bank_conv(u, k, skip=s), u, kernel, skip)
    narrow = [x.to(dtype) for x in (u, kernel, skip)]
    actual, actual_grads = gradients(lambda u, k, s: filter_bank_conv(u, k, skip=s), *narrow)
    assert actual.dtype == dtype
    assert_close(actual, expected, row)
    for got, wanted in zip(actual_grads, expected_grads, strict=True):
        assert_close(got, wanted, f"{row} gradient")


def test_a_bank_of_16_bit_inputs():
    u, kernel = draw(2, 40, 3), draw(2, 3, 40, seed=1)
    low = u.bfloat16()
    actual = filter_bank_conv(low, kernel.float())
    assert actual.dtype == torch.bfloat16
    assert_close(actual, reference.filter_bank_conv(low.double(), kernel), "bfloat16")


def test_an_impulse_gives_the_filters():
    """A convolution that is scaled by its transform's length would not."""
    kernel = draw(3, 4, 50)
    impulse = torch.zeros(1, 50, 4, dtype=torch.float64)
    impulse[:, 0] = 1
    assert_close(filter_bank_conv(impulse, kernel)[:, 0].mT, kernel, "float64 fft")


@pytest.mark.parametrize(
    ("kernel", "skip", "message"),
    [
        (torch.zeros(5, 3), None, r"kernel must be \(C, 5, taps\)"),
        (torch.zeros(2, 4, 3), None, r"kernel must be \(C, 5, taps\); got \(2, 4, 3\)"),
        (torch.zeros(2, 5, 0), None, "kernel must be"),
        (torch.zeros(2, 5, 3), torch.zeros(5), r"skip must be \(2, 5\) like kernel; got \(5,\)"),
    ],
)
def test_a_bank_refuses(kernel, skip, message):
    with pytest.raises(ValueError, match=message):
        filter_bank_conv(torch.zeros(1, 6, 5), kernel, skip=skip)


# states at the ends of windows ------------------------------------------------------------------------------------


def system(channels=6, size=8):
    w, P, B = dplr_legs(size)
    B = torch.stack([B, 1.5 * B])
    dt = torch.linspace(0.01, 0.2, channels, dtype=torch.float64)
    return B, torch.stack([P, 0.5 * P]), torch.stack([w, 2 * w]), dt


@pytest.mark.parametrize("window", [1, 2, 5, 8, 13, 30])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_window_states_are_the_recurrences(window, dtype, monkeypatch):
    monkeypatch.setattr(tiles, "_CPU_TILE", 1 << 9)  # several tiles of channels
    monkeypatch.setattr(windows_module, "BLOCK", 4)  # and of a longer window several blocks
    u, (B, P, w, dt) = draw(2, 29, 6), system()
    C = torch.zeros(1, 6, 4, dtype=w.dtype)
    ends = range(window, 30, window)
    expected = [s4_scan(u[:, :end], C, B, P, w, dt)[1] for end in ends]
    actual = s4_window_states(u.to(dtype), B, P, w, dt, window, dtype)
    assert actual.dtype == (torch.complex128 if dtype == torch.float64 else torch.complex64)
    if not ends:
        assert actual.shape == (2, 0, 6, 4)
        return
    assert_close(actual, torch.stack(expected, dim=1), "float64" if dtype == torch.float64 else "float32")


def test_window_states_gradients(monkeypatch):
    """Windows of 2 and 1 tokens' blocks, of two blocks, and of one that is shorter than `BLOCK`."""
    monkeypatch.setattr(tiles, "_CPU_TILE", 1 << 9)
    monkeypatch.setattr(windows_module, "BLOCK", 2)
    u, (B, P, w, dt) = draw(1, 11, 2), system(channels=2, size=4)
    inputs = [x.clone().requires_grad_() for x in (u, B, P, w, dt)]
    for window in (3, 4, 1):

        def real(*x, window=window):
            return torch.view_as_real(s4_window_states(*x, window, torch.float64))

        assert torch.autograd.gradcheck(real, inputs)


def test_window_states_gradients_in_single_precision():
    """Windows of 96 tokens: a block of 32 and one of 64."""
    u, (B, P, w, dt) = draw(2, 500, 4), system(channels=4, size=16)
    results = []
    for dtype in (torch.float64, torch.float32):
        narrow = (
            x.to(dtype if x.is_floating_point() else torch.promote_types(dtype, torch.complex64)) for x in (B, P, w)
        )
        leaves = [x.requires_grad_() for x in (u.to(dtype), *narrow, dt.to(dtype))]
        states = torch.view_as_real(s4_window_states(*leaves, 96, dtype))
        results.append(torch.autograd.grad(states, leaves, draw(*states.shape, seed=3, dtype=dtype)))
    for actual, expected in zip(results[1], results[0], strict=True):
        assert_close(actual, expected, "float32 gradient")


def test_window_states_compile_without_graph_breaks():
    u, (B, P, w, dt) = draw(1, 40, 2), system(channels=2, size=4)
    function = torch.compile(s4_window_states, fullgraph=True, backend="aot_eager")
    leaves = [x.clone().requires_grad_() for x in (u, B, P, w, dt)]
    states = torch.view_as_real(function(*leaves, 12, torch.float64))
    expected = torch.view_as_real(s4_window_states(*leaves, 12, torch.float64))
    assert_close(states, expected, "float64")
    grads = (torch.autograd.grad(x.square().sum(), leaves) for x in (states, expected))
    for actual, wanted in zip(*grads, strict=True):
        assert_close(actual, wanted, "float64 gradient")
