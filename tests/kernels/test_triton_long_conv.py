"""What Triton does around the transforms of long convolutions, interpreted, against the reference in float64."""

from contextlib import contextmanager
from unittest.mock import patch

import pytest
import torch

from hf_hybrid.kernels.long_conv import blocks, filter_bank_conv, kernel_spectrum, long_conv, op, spectral_conv
from hf_hybrid.kernels.long_conv import reference as references
from tests.kernels.guarded import guarded, guarded_allocations
from tests.kernels.interpreter import interpreted
from tests.tolerances import assert_close

reference = references.long_conv
ROWS = {torch.float32: ("float32", "float32 gradient"), torch.float16: ("float16", "float16")} | {
    torch.bfloat16: ("bfloat16", "bfloat16 gradient")
}
PACKED = {"one": [0, 7], "several": [0, 3, 3, 23, 24, 27], "empty ends": [0, 0, 5, 5], "alike": [0, 6, 11, 17]}


def make(length, dtype=torch.float32, taps=None, batch=2, width=3, groups=None):
    """Input, taps in both directions, skip and both gates."""
    generator = torch.Generator().manual_seed(length)
    taps, groups = length if taps is None else taps, width if groups is None else groups
    inner, filters = (batch, length, width), (groups, taps)
    drawn = [torch.randn(x, generator=generator) for x in (inner, filters, filters, (width,), inner, inner)]
    return [x.to(dtype) if x.dim() == 3 else x for x in drawn]


def run(function, tensors, wide=False, wanted=range(6), **options):
    """Output, and gradients of every input that is given and wanted."""
    leaves = [x if x is None else (x.detach().double() if wide else guarded(x)) for x in tensors]
    given = [leaves[i].requires_grad_() for i in wanted if leaves[i] is not None]
    u, kernel, reverse, skip, input_gate, gate = leaves
    y = function(u, kernel, reverse_kernel=reverse, skip=skip, input_gate=input_gate, gate=gate, **options)
    weight = torch.randn(y.shape, generator=torch.Generator().manual_seed(5)).to(tensors[0].dtype).to(y.dtype)
    return [y, *torch.autograd.grad(y, given, weight, materialize_grads=True)]


@contextmanager
def small(block=1 << 19):
    """Tiles and blocks of which short sequences have several."""
    from hf_hybrid.kernels.long_conv import triton_kernels

    cut = {
        name: c._replace(tiles={"BF": 16} if "BF" in c.tiles else {"BT": 16, "BD": 2})
        for name, c in triton_kernels.CONFIGURATIONS.items()
    }
    with patch.dict(triton_kernels.CONFIGURATIONS, cut), patch.object(blocks, "_CPU_BLOCK", block):
        yield


def compare(tensors, block=1 << 19, **options):
    with guarded_allocations(), small(block):
        actual = run(long_conv, tensors, **options)
    expected = run(reference, tensors, wide=True, **options)
    for index, (one, other) in enumerate(zip(actual, expected, strict=True)):
        assert_close(one, other, ROWS[tensors[0].dtype][int(index > 0)])


@pytest.mark.parametrize(
    ("length", "dtype"),
    [(1, torch.float32), (2, torch.bfloat16), (37, torch.float32), *((13, dtype) for dtype in ROWS)],
)
@interpreted
def test_outputs_and_gradients(length, dtype):
    u, kernel, reverse, skip, input_gate, gate = make(length, dtype, batch=1 if length == 37 else 2)
    compare([u, kernel, reverse, skip, input_gate, gate], activation="silu")
    compare([u, kernel, None, None, None, None])
    compare([u, kernel, None, skip, None, gate], block=150)


@pytest.mark.parametrize("missing", [(2, 3, 4, 5), (3, 4), (4, 5), (3, 5), ()])
@pytest.mark.parametrize("activation", [None, "silu"])
@interpreted
def test_any_of_what_stands_around(missing, activation):
    tensors = [None if i in missing else x for i, x in enumerate(make(11, taps=5, width=2))]
    compare(tensors, activation=activation)


@pytest.mark.parametrize("wanted", [(0,), (1,), (3,), (4,), (5,), (0, 4), (2, 3)])
@interpreted
def test_only_the_gradients_that_are_wanted(wanted):
    tensors = make(9, width=2)
    compare(tensors, wanted=wanted, activation="silu")
    compare([*tensors[:5], None], wanted=[i for i in wanted if i < 5] or [0])


@pytest.mark.parametrize(("width", "groups", "block"), [(6, 1, 64), (6, 3, 64), (6, 3, 100)])
@interpreted
def test_channels_that_share_taps(width, groups, block):
    """Also blocks of fewer channels than groups, and of a number that groups do not divide."""
    compare(make(12, taps=7, width=width, groups=groups), block=block)


@interpreted
def test_the_shipped_tiles():
    """One sum over channels of taps that all share goes to several places."""
    tensors = make(5, batch=1, width=66, groups=1)
    with guarded_allocations():
        actual = run(long_conv, tensors)
    for one, other in zip(actual, run(reference, tensors, wide=True), strict=True):
        assert_close(one, other, "float32 gradient")


@pytest.mark.parametrize("name", PACKED)
@interpreted
def test_packed_sequences_are_each_alone(name):
    bounds = PACKED[name]
    cu_seqlens = guarded(torch.tensor(bounds, dtype=torch.int32))
    tensors = make(bounds[-1], batch=1, taps=9)
    compare(tensors, activation="silu", cu_seqlens=cu_seqlens)
    compare([*tensors[:2], None, None, None, None], block=60, cu_seqlens=cu_seqlens.long())


@pytest.mark.parametrize("packed", [False, True])
@interpreted
def test_a_spectrum(packed):
    u, kernel, reverse, skip, input_gate, gate = make(10, batch=1 if packed else 2)
    options = {"cu_seqlens": torch.tensor([0, 4, 10])} if packed else {}

    def with_spectrum(u, kernel, *, reverse_kernel, skip, activation, **others):
        spectrum = kernel_spectrum(kernel, 20, reverse_kernel)
        return spectral_conv(u, spectrum, 20, skip, activation=activation, **others)

    whole, plain = [u, kernel, reverse, skip, input_gate, gate], [u, kernel, None, None, None, None]
    for tensors, activation in ((whole, "silu"), (plain, None)):
        with guarded_allocations(), small(block=50):
            actual = run(with_spectrum, tensors, activation=activation, **options)
        expected = run(reference, tensors, wide=True, activation=activation, **options)
        for one, other in zip(actual, expected, strict=True):
            assert_close(one, other, "float32 gradient")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@interpreted
def test_a_bank_of_filters(dtype):
    generator = torch.Generator().manual_seed(0)
    shapes = ((2, 13, 3), (4, 3, 9), (4, 3))
    u, kernel, skip = (torch.randn(shape, generator=generator) for shape in shapes)
    results = []
    for function in (filter_bank_conv, references.filter_bank_conv):
        wide = function is not filter_bank_conv
        leaves = [(x.double() if wide else guarded(x)).requires_grad_() for x in (u.to(dtype), kernel, skip)]
        with guarded_allocations() if not wide else small(), small(block=60):
            y = function(leaves[0], leaves[1], skip=leaves[2])
            weight = torch.randn(y.shape, generator=torch.Generator().manual_seed(5)).to(dtype).to(y.dtype)
            results.append([y, *torch.autograd.grad(y, leaves, weight)])
    for index, (one, other) in enumerate(zip(*results, strict=True)):
        assert_close(one, other, ROWS[dtype][int(index > 0)])


@interpreted
def test_strides_make_no_difference_and_the_bits_are_the_same_twice():
    tensors = make(40, width=4, groups=2)
    first = run(long_conv, tensors, activation="silu")
    turned = [x.mT.contiguous().mT for x in tensors[:3]] + [tensors[3], *(x.mT.contiguous().mT for x in tensors[4:])]
    leaves = [x.requires_grad_() for x in turned]
    names = ("reverse_kernel", "skip", "input_gate", "gate")
    y = long_conv(*leaves[:2], **dict(zip(names, leaves[2:], strict=True)), activation="silu")
    assert_close(y, first[0], "exact")
    weight = torch.randn(y.shape, generator=torch.Generator().manual_seed(5))
    for one, other in zip(torch.autograd.grad(y, leaves, weight, retain_graph=True), first[1:], strict=True):
        assert_close(one, other, "exact")
    actual = torch.autograd.grad(y.sum(), leaves)  # a gradient without strides
    plain = [x.detach().double().requires_grad_() for x in leaves]
    y = reference(*plain[:2], **dict(zip(names, plain[2:], strict=True)), activation="silu")
    for one, other in zip(actual, torch.autograd.grad(y.sum(), plain), strict=True):
        assert_close(one, other, "float32 gradient")


@interpreted
def test_opcheck():
    leaves = [x.requires_grad_() for x in make(9, batch=1)]
    torch.library.opcheck(op.long_conv, (*leaves, torch.tensor([0, 4, 9]), True, "triton"))
    spectrum = kernel_spectrum(leaves[1].detach(), 18)
    torch.library.opcheck(op.spectral_conv, (leaves[0], spectrum, 18, *(None,) * 4, False, True, "triton"))


@interpreted
def test_what_the_kernels_cannot_take_is_refused():
    u, kernel, *_ = make(4)
    with pytest.raises(ValueError, match=r"long_conv cannot run on triton: u must be float32, .* got torch\.float64"):
        long_conv(u.double(), kernel)
