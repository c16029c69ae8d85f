"""The Triton generating function of S4, interpreted, against the recurrence in float64."""

from contextlib import contextmanager
from unittest.mock import patch

import pytest
import torch

from hf_hybrid.kernels import launching, use_backend
from hf_hybrid.kernels.ssm_kernel import dplr_legs, frozen_s4_kernel, op, s4_kernel
from hf_hybrid.kernels.ssm_kernel.reference import s4_kernel as reference
from tests.kernels.guarded import guarded, guarded_allocations
from tests.kernels.interpreter import interpreted
from tests.tolerances import assert_close


def make(size, filters, channels, copies, legs=False):
    """C, B, P, w, dt in single precision; copies that differ, as training makes them, or all of them LegS."""
    generator = torch.Generator().manual_seed(size + filters)
    C = torch.randn(filters, channels, size // 2, dtype=torch.complex128, generator=generator)
    w, P, B = (x.repeat(copies, 1) for x in dplr_legs(size))
    if not legs:
        noise = [torch.randn(w.shape, dtype=torch.complex128, generator=generator) for _ in range(3)]
        w, P, B = w + 0.3j * noise[0].real - 0.2 * noise[0].imag.abs(), P + 0.3 * noise[1], B + 0.3 * noise[2]
    dt = torch.logspace(-2, -0.5, channels, dtype=torch.float64)
    return [x.to(torch.complex64 if x.is_complex() else torch.float32) for x in (C, B, P, w, dt)]


def run(function, tensors, length, wide=False, **options):
    """The taps, and gradients of every input."""
    leaves = []
    for x in tensors:
        real = torch.view_as_real(x) if x.is_complex() else x
        real = real.double() if wide else guarded(real)
        leaves.append((torch.view_as_complex(real) if x.is_complex() else real).detach().requires_grad_())
    taps = function(*leaves, length, **options)
    weight = torch.randn(taps.shape, generator=torch.Generator().manual_seed(length)).to(taps.dtype)
    return [taps, *torch.autograd.grad(taps, leaves, weight)]


@contextmanager
def small_tiles():
    """Several tiles in short spectra, so that an interpreter gets to their edges, and guards around what is read."""
    from hf_hybrid.kernels.ssm_kernel import triton_kernels

    def launch(*launched, **arguments):
        read = {name: x for name, x in arguments.items() if isinstance(x, torch.Tensor)}
        for name in ("spectrum", "sums", "d_rates"):
            read.pop(name, None)
        launching.launch(*launched, **arguments | {name: guarded(x) for name, x in read.items()})

    small = {key: c._replace(tiles=c.tiles | {"BK": 16}) for key, c in triton_kernels.CONFIGURATIONS.items()}
    with patch.multiple(triton_kernels, CONFIGURATIONS=small, launch=launch):
        yield


@pytest.mark.parametrize("length", [1, 2, 37, 64])
@pytest.mark.parametrize(("size", "filters", "channels", "copies"), [(8, 1, 2, 2), (2, 2, 1, 1), (6, 3, 2, 1)])
@interpreted
def test_taps_and_gradients(length, size, filters, channels, copies):
    tensors = make(size, filters, channels, copies)
    with guarded_allocations(), small_tiles():
        actual = run(s4_kernel, tensors, length)
    expected = run(reference, tensors, length, wide=True)
    for channel in range(channels):
        assert_close(actual[0][:, channel], expected[0][:, channel], "float32 ssm kernel")
    for one, other in zip(actual[1:], expected[1:], strict=True):
        assert_close(one, other, "float32 gradient")


@interpreted
def test_legs_of_full_size():
    """At resonances each sum is some N times as large as what remains of them."""
    tensors = make(64, 1, 2, 1, legs=True)
    actual = run(s4_kernel, tensors, 400)
    expected = run(reference, tensors, 400, wide=True)
    for channel in range(2):
        assert_close(actual[0][:, channel], expected[0][:, channel], "float32 ssm kernel")
    for one, other in zip(actual[1:], expected[1:], strict=True):
        assert_close(one, other, "float32 gradient")


@interpreted
def test_the_same_bits_twice_and_no_reading_of_strides():
    tensors = make(6, 3, 2, 1)
    first = run(s4_kernel, tensors, 37)
    turned = [x.mT.contiguous().mT if x.dim() > 1 else torch.stack([x, x], dim=1)[:, 0] for x in tensors]
    leaves = [x.requires_grad_() for x in turned]
    taps = s4_kernel(*leaves, 37)
    assert_close(taps, first[0], "exact")
    weight = torch.randn(taps.shape, generator=torch.Generator().manual_seed(37))
    for one, other in zip(torch.autograd.grad(taps, leaves, weight.mT.contiguous().mT), first[1:], strict=True):
        assert_close(one, other, "exact")
    expanded = torch.autograd.grad(s4_kernel(*leaves, 37).sum(), leaves)  # a gradient without strides
    plain = [x.detach().to(torch.promote_types(x.dtype, torch.float64)).requires_grad_() for x in leaves]
    for one, other in zip(expanded, torch.autograd.grad(reference(*plain, 37).sum(), plain), strict=True):
        assert_close(one, other, "float32 gradient")


@interpreted
def test_opcheck():
    C, B, P, w, dt = make(6, 3, 2, 2)
    tensors = [x.to(torch.complex128).requires_grad_() for x in (C, B, P, w)]
    rate = (2 / dt.double()).requires_grad_()
    torch.library.opcheck(op.s4_cauchy, (*tensors, rate, 9, 1 << 10, torch.float32, "triton"))


@interpreted
def test_the_algorithm_follows_the_backend():
    tensors = make(6, 1, 2, 1)
    taps = s4_kernel(*tensors, 20)
    assert_close(taps, s4_kernel(*tensors, 20, algorithm="cauchy", backend="triton"), "exact")
    on_torch = s4_kernel(*tensors, 20, backend="torch")
    assert_close(on_torch, s4_kernel(*tensors, 20, algorithm="two_level", backend="torch"), "exact")
    assert_close(on_torch, frozen_s4_kernel(*tensors, 20), "exact")  # on any backend
    assert not torch.equal(on_torch, taps)
    with use_backend("torch"):
        assert_close(s4_kernel(*tensors, 20), on_torch, "exact")


@interpreted
def test_what_the_kernel_cannot_take_is_refused():
    tensors = make(6, 1, 2, 1)
    wide = [x.to(torch.complex128 if x.is_complex() else torch.float64) for x in tensors]
    with pytest.raises(ValueError, match=r"s4_kernel cannot run on triton: C must be complex64, .* torch\.float64"):
        s4_kernel(*wide, 20)
    with pytest.raises(ValueError, match="cannot run on triton: two_level is an algorithm of torch alone"):
        s4_kernel(*tensors, 20, algorithm="two_level")


@interpreted
def test_a_frozen_system_has_its_taps_from_float64():
    from hf_hybrid.layers.s4 import S4

    u = torch.randn(1, 9, 4, generator=torch.Generator().manual_seed(1))
    for options in ({}, {"num_filters": 2}):
        for freeze, calls in (("all", 0), ("none", 1)):
            layer = S4(4, state_size=4, freeze=freeze, **options)
            with patch.object(triton_kernels(), "forward", wraps=triton_kernels().forward) as on_triton:
                layer(u)
            assert on_triton.call_count == calls


def triton_kernels():
    from hf_hybrid.kernels.ssm_kernel import triton_kernels

    return triton_kernels
