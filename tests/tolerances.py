"""The one table of numerical tolerances: every test that compares floating-point results reads it from here.

A test picks a row by what it compares, never by what happens to pass. Widening a row needs a reason in its text.
"""

from typing import NamedTuple

import torch


class Tolerance(NamedTuple):
    """Largest allowed error: ``|actual - expected| <= atol + rtol * scale`` with ``scale = max |expected|``."""

    rtol: float
    atol: float
    reason: str


TOLERANCES: dict[str, Tolerance] = {
    # one op, forward, against a reference in the same precision
    "float64": Tolerance(1e-12, 1e-14, "a few thousand roundings of float64"),
    "float32": Tolerance(1e-5, 1e-7, "a few hundred roundings of float32, sums in another order"),
    "bfloat16": Tolerance(2e-2, 1e-3, "8 bits of mantissa: one rounding is 4e-3"),
    "float16": Tolerance(2e-3, 1e-4, "11 bits of mantissa: one rounding is 5e-4"),
    # one op, backward
    "float64 gradient": Tolerance(1e-10, 1e-12, "products of the forward's errors"),
    "float32 gradient": Tolerance(1e-4, 1e-6, "products of the forward's errors"),
    "bfloat16 gradient": Tolerance(4e-2, 2e-3, "two roundings deep"),
    # whole models
    "float32 model": Tolerance(1e-5, 1e-6, "padding must not reach real tokens; only summation order differs"),
    "float32 decode": Tolerance(1e-4, 1e-5, "cached decoding uses other kernels than the full forward"),
    "float64 decode": Tolerance(1e-9, 1e-11, "the same, in double precision"),
    # whole models in 16 bits, root mean square: single tokens, whose norm divides by almost nothing, may be far off
    "bfloat16 model": Tolerance(5e-2, 0.0, "some ten roundings of 4e-3, each of what the one before made"),
    "float16 model": Tolerance(6e-3, 0.0, "the same, of 5e-4"),
    # spectral and state space identities
    "float32 fft": Tolerance(5e-6, 1e-7, "FFT rounding grows with log2 of the length"),
    "float64 fft": Tolerance(1e-13, 1e-14, "FFT rounding grows with log2 of the length"),
    "float32 ssm kernel": Tolerance(1e-5, 1e-7, "complex64 Cauchy sums on float64 nodes"),
    "exact": Tolerance(0.0, 0.0, "the same arithmetic must give the same bits"),
}


def assert_close(actual: torch.Tensor, expected: torch.Tensor, row: str) -> None:
    """Assert that two tensors agree within the named row of the table.

    The error is measured against the largest magnitude of ``expected``, so that near-zero entries of a result of
    ordinary scale do not ask for impossible relative accuracy.

    Raises:
        AssertionError: Shapes differ, a value is not finite, or the error exceeds the row.
    """
    tolerance = TOLERANCES[row]
    assert actual.shape == expected.shape, f"shape {tuple(actual.shape)} != {tuple(expected.shape)}"
    if expected.numel() == 0:
        return
    wide = torch.complex128 if expected.is_complex() or actual.is_complex() else torch.float64
    actual, expected = actual.detach().to(wide), expected.detach().to(wide)
    assert torch.isfinite(torch.view_as_real(actual) if actual.is_complex() else actual).all(), "not finite"
    error = (actual - expected).abs().max().item()
    allowed = tolerance.atol + tolerance.rtol * expected.abs().max().item()
    assert error <= allowed, f"largest error {error:.3e} exceeds {allowed:.3e} ({row}: {tolerance.reason})"


def assert_close_on_average(actual: torch.Tensor, expected: torch.Tensor, row: str) -> None:
    """Assert that two tensors agree within the named row, both error and scale being root mean squares.

    Raises:
        AssertionError: Shapes differ, a value is not finite, or the error exceeds the row.
    """
    tolerance = TOLERANCES[row]
    assert actual.shape == expected.shape, f"shape {tuple(actual.shape)} != {tuple(expected.shape)}"
    actual, expected = actual.detach().double(), expected.detach().double()
    assert torch.isfinite(actual).all(), "not finite"
    error, scale = ((x.square().mean().sqrt().item()) for x in (actual - expected, expected))
    allowed = tolerance.atol + tolerance.rtol * scale
    assert error <= allowed, f"error {error:.3e} exceeds {allowed:.3e} ({row}: {tolerance.reason})"
