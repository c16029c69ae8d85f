"""What of the S4D layer is not S4's: its link to S4, its initial modes, its arguments; the rest is in test_s4.py."""

import math

import pytest
import torch

from hf_hybrid.kernels.ssm_kernel import dplr_legs, hippo_legs
from hf_hybrid.layers.s4 import S4
from hf_hybrid.layers.s4d import INITS, S4D
from tests.tolerances import assert_close


def make(hidden_size=6, state_size=8, **options):
    torch.manual_seed(0)
    return S4D(hidden_size, state_size, **options).double()


def draw(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def test_bilinear_layer_is_s4_without_low_rank():
    """S4 with P = 0 computes the same by other kernels, steps and states."""
    layer, s4, u = make(discretization="bilinear"), S4(6, 8).double(), draw(2, 100, 6)
    for name, tensor in layer.own_tensors():
        getattr(s4, name).copy_(tensor)
    s4.P.zero_()
    for one, other in zip(layer(u, return_state=True), s4(u, return_state=True), strict=True):
        assert_close(one, other, "float64")


def test_another_discretization_is_seen():
    layer, u = make(), draw(2, 20, 6)
    first = layer(u)
    layer.discretization = "bilinear"
    assert_close(layer(u), make(discretization="bilinear")(u), "exact")
    assert not torch.allclose(layer(u), first)


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
def test_initial_modes(freeze, init):
    layer = make(64, 8, freeze=freeze, init=init)
    frequencies = {
        "lin": [0.0, math.pi, 2 * math.pi, 3 * math.pi],
        "inv": [8 / math.pi * (8 / odd - 1) for odd in (1, 3, 5, 7)],
        "legs": [0.42749, 1.95779, 5.35421, 19.85741],
    }[init]
    real, imaginary = -layer.log_A_real.exp(), layer.A_imag
    assert_close(real, torch.full_like(real, -0.5), "float32")
    assert_close(imaginary, torch.tensor(frequencies, dtype=torch.float64).expand_as(imaginary), "float32")
    B = torch.view_as_complex(layer.B[0].detach())
    expected = dplr_legs(8)[2] / 2 if init == "legs" else torch.ones(4, dtype=torch.complex128)
    assert_close(B, expected.expand_as(B), "float32")


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
        ({"init": "hippo"}, "init must be one of lin, inv, legs; got 'hippo'"),
        ({"discretization": "euler"}, "discretization must be one of zoh, bilinear; got 'euler'"),
    ],
)
def test_bad_arguments(options, message):
    with pytest.raises(ValueError, match=message):
        S4D(6, **options)
