"""Triton's diagonal scan, interpreted, against the reference in double precision."""

from contextlib import contextmanager
from unittest.mock import patch

import pytest
import torch

from hf_hybrid.kernels import diagonal_scan
from hf_hybrid.kernels.diagonal_scan import op
from hf_hybrid.kernels.diagonal_scan.reference import diagonal_scan as reference
from tests.kernels.guarded import guarded, guarded_allocations
from tests.kernels.interpreter import interpreted
from tests.tolerances import assert_close

PACKED = {"one": [0, 7], "several": [0, 3, 3, 12, 13], "empty ends": [0, 0, 5, 5]}
ROWS = {torch.complex64: "float32", torch.float32: "float32", torch.float16: "float16", torch.bfloat16: "bfloat16"}


def make(length, dtype=torch.complex64, batch=2, states=5, sequences=None):
    """a inside the unit circle, b and an initial state."""
    generator = torch.Generator().manual_seed(length)
    wide = torch.complex64 if dtype.is_complex else torch.float32
    a = 0.5 + 0.5 * torch.rand(states, generator=generator)
    if dtype.is_complex:
        a = torch.polar(a, 6 * torch.rand(states, generator=generator))
    b = torch.randn(batch, length, states, generator=generator, dtype=wide).to(dtype)
    return [a, b, torch.randn(sequences or batch, states, generator=generator, dtype=wide)]


def doubled(x):
    return x.detach().to(torch.complex128 if x.is_complex() else torch.float64)


def run(function, tensors, wide=False, **options):
    """Outputs and gradients of every input."""
    leaves = [(doubled(x) if wide else guarded(x)).requires_grad_() for x in tensors]
    outputs = function(*leaves[:2], initial_state=leaves[2] if len(leaves) == 3 else None, **options)
    generator = torch.Generator().manual_seed(5)
    weights = [torch.randn(x.shape, generator=generator, dtype=tensors[0].dtype).to(x.dtype) for x in outputs]
    return [*outputs, *torch.autograd.grad(outputs, leaves, weights)]


@contextmanager
def short_spans():
    """Several spans in short sequences, and tiles that they do not fill."""
    from hf_hybrid.kernels.diagonal_scan import triton_kernels

    small = {
        name: configuration._replace(tiles={x: {"BP": 4, "STEP": 3}[x] for x in configuration.tiles})
        for name, configuration in triton_kernels.CONFIGURATIONS.items()
    }
    with patch.multiple(triton_kernels, _SPAN=4), patch.dict(triton_kernels.CONFIGURATIONS, small):
        yield


def compare(tensors, **options):
    with guarded_allocations(), short_spans():
        actual = run(diagonal_scan, tensors, **options)
    expected = run(reference, tensors, wide=True, **options)
    row = ROWS[tensors[1].dtype]
    for index, (one, other) in enumerate(zip(actual, expected, strict=True)):
        assert one.dtype == (tensors[1].dtype if index in (0, 3) else tensors[0].dtype)
        # the final state is handed on in float32; gradients are made of rounded states
        backward = row if row == "float16" else f"{row} gradient"
        assert_close(one, other, backward if index > 1 else "float32" if index else row)


@pytest.mark.parametrize(
    ("length", "dtype", "reverse"),
    [
        (1, torch.complex64, False),
        (11, torch.complex64, False),
        (11, torch.complex64, True),
        (8, torch.float32, True),
        (11, torch.bfloat16, False),
        (7, torch.float16, True),
    ],
)
@interpreted
def test_outputs_and_gradients(length, dtype, reverse):
    compare(make(length, dtype), reverse=reverse)


@interpreted
def test_without_an_initial_state():
    compare(make(7)[:2])


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("name", PACKED)
@interpreted
def test_packed_sequences_are_each_alone(name, reverse):
    bounds = PACKED[name]
    tensors = make(bounds[-1], batch=1, sequences=len(bounds) - 1)
    cu_seqlens = guarded(torch.tensor(bounds, dtype=torch.int32 if reverse else torch.int64))
    compare(tensors[: 2 if reverse and name == "one" else 3], reverse=reverse, cu_seqlens=cu_seqlens)


@interpreted
def test_shipped_spans_and_long_memories():
    """Two spans as shipped, of states that forget nothing, everything, or change sign."""
    a, b, initial_state = make(140, batch=1)
    a = torch.tensor([1, 0, -1, 1j, 0.6 + 0.8j], dtype=torch.complex64)
    actual = run(diagonal_scan, [a, b, initial_state])
    expected = run(reference, [a, b, initial_state], wide=True)
    for index, (one, other) in enumerate(zip(actual, expected, strict=True)):
        assert_close(one, other, "float32 gradient" if index > 1 else "float32")


@interpreted
def test_strides_make_no_difference_and_the_bits_are_the_same_twice():
    tensors = make(6, batch=1)
    with short_spans():
        first, second = run(diagonal_scan, tensors), run(diagonal_scan, tensors)
        strided = [x.mT.contiguous().mT if x.dim() > 1 else x for x in tensors]
        turned = diagonal_scan(strided[0], strided[1], initial_state=strided[2])
        conjugated = diagonal_scan(tensors[0].conj(), tensors[1].conj(), initial_state=tensors[2].conj())
        leaf = tensors[1].clone().requires_grad_()
        (grad,) = torch.autograd.grad(diagonal_scan(tensors[0], leaf)[0].real.sum(), leaf)  # expanded
    for one, other in zip(first, second, strict=True):
        assert_close(one, other, "exact")
    for one, other, conjugate in zip(turned, first, conjugated, strict=False):
        assert_close(one, other, "exact")
        assert_close(conjugate.conj(), other, "exact")
    plain = tensors[1].clone().requires_grad_()
    (expected,) = torch.autograd.grad(reference(tensors[0], plain)[0].real.sum(), plain)
    assert_close(grad, expected, "float32 gradient")


@interpreted
def test_a_gradient_of_a_gradient():
    """Runs through the transpose of the recurrence and that of the transpose, with and without a trained a."""

    def second(function, tensors, wide, **options):
        leaves = [(doubled(x) if wide else x.clone()).requires_grad_() for x in tensors]
        outputs = function(*leaves[:2], initial_state=leaves[2], **options)
        weights = [(1 + 0.1 * torch.arange(x.numel())).reshape(x.shape).to(x.dtype) for x in outputs]
        grads = torch.autograd.grad([x * x for x in outputs], leaves, weights, create_graph=True)
        return torch.autograd.grad([(g * g.conj()).real.sum() for g in grads], leaves)

    for reverse, bounds in ((False, None), (True, [0, 1, 1, 6])):
        cu_seqlens = None if bounds is None else torch.tensor(bounds)
        tensors = make(6, batch=1, states=2, sequences=3 if bounds else 1)
        options = {"reverse": reverse, "cu_seqlens": cu_seqlens}
        with short_spans():
            actual = second(diagonal_scan, tensors, False, **options)
        for one, other in zip(actual, second(reference, tensors, True, **options), strict=True):
            assert_close(one, other, "float32 gradient")


@interpreted
def test_opcheck():
    a, b, initial_state = (x.requires_grad_() for x in make(3, states=2))
    row, cu_seqlens = b[:1].detach(), torch.tensor([0, 1, 3])
    for arguments in (
        (a, b, initial_state, None, True, False, "triton"),
        (a, row, None, cu_seqlens, False, False, "triton"),
        (a.detach(), row, initial_state.detach(), cu_seqlens, False, True, "triton"),
    ):
        torch.library.opcheck(op.diagonal_scan, arguments)
    x, final = (x.detach() for x in op.diagonal_scan(a, b, initial_state, None, True, False, "triton"))
    arguments = (x, final, a.detach(), x, initial_state.detach(), None, True, "triton")
    torch.library.opcheck(op.diagonal_scan_backward, arguments)


@interpreted
def test_what_the_kernel_cannot_take_is_refused():
    a, b, _ = make(4)
    with pytest.raises(ValueError, match=r"cannot run on triton: b must be complex64, .* got torch\.complex128"):
        diagonal_scan(doubled(a), doubled(b))
