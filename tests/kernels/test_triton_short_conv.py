"""The Triton short convolution, interpreted, against the reference in float64."""

from contextlib import contextmanager
from unittest.mock import patch

import pytest
import torch

from hf_hybrid.kernels import short_conv
from hf_hybrid.kernels.short_conv import op
from hf_hybrid.kernels.short_conv.reference import short_conv as reference
from tests.kernels.guarded import guarded, guarded_allocations
from tests.kernels.interpreter import interpreted
from tests.tolerances import assert_close

PACKED = {"one": [0, 7], "several": [0, 3, 3, 23, 24, 27], "empty ends": [0, 0, 5, 5], "long": [0, 37, 38]}
ROWS = {torch.float32: ("float32", "float32 gradient"), torch.float16: ("float16", "float16")} | {
    torch.bfloat16: ("bfloat16", "bfloat16 gradient")
}


def make(length, taps, dtype, batch=2, width=3, sequences=None):
    generator = torch.Generator().manual_seed(length)
    shapes = [(batch, length, width), (width, taps), (width,), (sequences or batch, taps - 1, width)]
    tensors = [torch.randn(shape, generator=generator) for shape in shapes]
    return [x.to(dtype) if i in (0, 3) else x for i, x in enumerate(tensors)]


def run(function, tensors, wide=False, **options):
    """Output, next state, and gradients of every input that is not None."""
    leaves = [x if x is None else (x.detach().double() if wide else guarded(x)).requires_grad_() for x in tensors]
    u, kernel, bias, state = leaves
    if options.get("causal", True):
        options["state"] = state
    given = [x for x in leaves[: 4 if options.get("causal", True) else 3] if x is not None]
    outputs = [x for x in function(u, kernel, bias, **options) if x is not None and x.numel()]
    generator = torch.Generator().manual_seed(5)
    weights = [torch.randn(x.shape, generator=generator).to(tensors[0].dtype).to(x.dtype) for x in outputs]
    return [*outputs, *torch.autograd.grad(outputs, given, weights)]


@contextmanager
def short_spans():
    """Several spans in short sequences, so that an interpreter gets to their edges."""
    from hf_hybrid.kernels.short_conv import triton_kernels

    with patch.multiple(triton_kernels, _BACKWARD_SPAN=16):
        yield


def compare(tensors, dtype, **options):
    with guarded_allocations(), short_spans():
        actual = run(short_conv, tensors, **options)
    expected = run(reference, tensors, wide=True, **options)
    for index, (one, other) in enumerate(zip(actual, expected, strict=True)):
        assert_close(one, other, ROWS[dtype][int(index > 1)])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("length", [1, 2, 13, 37])
@interpreted
def test_outputs_and_gradients(length, dtype):
    u, kernel, bias, state = make(length, 5, dtype)
    compare([u, kernel, bias, state], dtype, activation="silu")
    compare([u, kernel, None, None], dtype)
    compare([u, kernel, bias, None], dtype, causal=False, activation="silu")


@pytest.mark.parametrize(("taps", "width"), [(1, 1), (2, 130), (9, 67)])
@interpreted
def test_any_number_of_taps_and_channels(taps, width):
    tensors = make(11, taps, torch.float32, width=width)
    if taps == 1:  # nothing is remembered
        tensors[3] = None
    compare(tensors, torch.float32, activation="silu")
    if taps % 2:
        compare([*tensors[:3], None], torch.float32, causal=False)


@pytest.mark.parametrize("name", PACKED)
@interpreted
def test_packed_sequences_are_each_alone(name):
    bounds = PACKED[name]
    cu_seqlens = guarded(torch.tensor(bounds, dtype=torch.int32))
    tensors = make(bounds[-1], 4, torch.float32, batch=1, sequences=len(bounds) - 1)
    compare(tensors, torch.float32, activation="silu", cu_seqlens=cu_seqlens)
    compare([*tensors[:2], None, None], torch.float32, cu_seqlens=cu_seqlens)
    centred = make(bounds[-1], 5, torch.float32, batch=1)[:3]
    compare([*centred, None], torch.float32, causal=False, cu_seqlens=cu_seqlens.long())


@interpreted
def test_the_same_bits_twice_and_no_reading_of_strides():
    u, kernel, bias, state = make(40, 5, torch.float32)
    first = run(short_conv, [u, kernel, bias, state], activation="silu")
    turned = [u.mT.contiguous().mT, kernel.mT.contiguous().mT, bias, state.mT.contiguous().mT]
    leaves = [x.requires_grad_() for x in turned]
    outputs = short_conv(*leaves[:3], state=leaves[3], activation="silu")
    for one, other in zip(outputs, first, strict=False):
        assert_close(one, other, "exact")
    expanded = torch.autograd.grad(outputs[0].sum(), leaves)  # a gradient without strides
    plain = [x.detach().clone().requires_grad_() for x in leaves]
    expected = torch.autograd.grad(reference(*plain[:3], state=plain[3], activation="silu")[0].sum(), plain)
    for one, other in zip(expanded, expected, strict=True):
        assert_close(one, other, "float32 gradient")


@interpreted
def test_opcheck():
    u, kernel, bias, state = (x.requires_grad_() for x in make(9, 3, torch.float32))
    cu_seqlens = torch.tensor([0, 4, 9])
    for arguments in (
        (u, kernel, bias, state, None, 0, True, "triton"),
        (u[:1].detach(), kernel, None, None, cu_seqlens, 1, False, "triton"),
    ):
        torch.library.opcheck(op.short_conv, arguments)


@interpreted
def test_what_the_kernel_cannot_take_is_refused():
    u, kernel, _, _ = make(12, 10, torch.float32)
    with pytest.raises(ValueError, match="cannot run on triton: the kernel holds at most 9 taps in registers; got 10"):
        short_conv(u, kernel)
    with pytest.raises(ValueError, match=r"u must be float32, bfloat16 or float16; got torch\.float64"):
        short_conv(u.double(), kernel[:, :3])
