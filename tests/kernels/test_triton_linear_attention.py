"""Triton's linear attention, interpreted, against the reference in float64."""

from contextlib import contextmanager
from unittest.mock import patch

import pytest
import torch

from hf_hybrid.kernels import linear_attention
from hf_hybrid.kernels.linear_attention import op
from hf_hybrid.kernels.linear_attention.reference import linear_attention as reference
from tests.kernels.guarded import guarded, guarded_allocations
from tests.kernels.interpreter import interpreted
from tests.matrix import some
from tests.tolerances import assert_close

PACKED = {"one": [0, 7], "several": [0, 3, 3, 140, 141, 205], "empty ends": [0, 0, 5, 5]}
ROWS = {torch.float32: "float32 gradient", torch.float16: "float16", torch.bfloat16: "bfloat16 gradient"}


def make(length, dtype=torch.float32, batch=1, heads=2, width=5, value_width=3, sequences=None):
    generator = torch.Generator().manual_seed(length)
    shapes = [(batch, length, heads, width)] * 2 + [(batch, length, heads, value_width)]
    tensors = [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]
    return [*tensors, torch.randn(sequences or batch, heads, width, value_width, generator=generator)]


def run(function, tensors, wide=False, **options):
    """Outputs and gradients of every input."""
    leaves = [(x.detach().double() if wide else guarded(x)).requires_grad_() for x in tensors]
    outputs = function(*leaves[:3], state=leaves[3] if len(leaves) == 4 else None, **options)
    generator = torch.Generator().manual_seed(5)
    weights = [torch.randn(x.shape, generator=generator).to(tensors[0].dtype).to(x.dtype) for x in outputs]
    return [*outputs, *torch.autograd.grad(outputs, leaves, weights)]


@contextmanager
def spans(shortest):
    """Spans of so many tokens, so that short sequences have several."""
    from hf_hybrid.kernels.linear_attention import triton_kernels

    with patch.multiple(triton_kernels, _SHORTEST_SPAN=shortest):
        yield


def compare(tensors, shortest=64, **options):
    with guarded_allocations(), spans(shortest):
        actual = run(linear_attention, tensors, **options)
    expected = run(reference, tensors, wide=True, **options)
    for index, (one, other) in enumerate(zip(actual, expected, strict=True)):
        # what is handed out is summed in float32
        assert_close(one, other, ROWS[tensors[0].dtype] if index > 1 else "float32")


@pytest.mark.parametrize("dtype", some([torch.float32, torch.float16, torch.bfloat16], torch.float32, torch.bfloat16))
@pytest.mark.parametrize("length", [1, 67, 200])
@interpreted
def test_outputs_and_gradients(length, dtype):
    compare(make(length, dtype))
    compare(make(length, dtype, batch=2)[:3], shortest=1024)


@pytest.mark.parametrize(("heads", "width", "value_width"), [(3, 1, 70), (1, 130, 64), (1, 64, 65)])
@interpreted
def test_any_number_of_heads_and_widths(heads, width, value_width):
    compare(make(131, heads=heads, width=width, value_width=value_width))


@pytest.mark.parametrize("name", PACKED)
@interpreted
def test_packed_sequences_are_each_alone(name):
    bounds = PACKED[name]
    cu_seqlens = guarded(torch.tensor(bounds))
    tensors = make(bounds[-1], sequences=len(bounds) - 1)
    compare(tensors, cu_seqlens=cu_seqlens)
    compare(tensors[:3], cu_seqlens=cu_seqlens.int(), shortest=1024)


def run_normed(function, tensors, gate, wide=False, **options):
    """Outputs and gradients of every input, normed and, if there is a gate, gated."""
    leaves = [
        (x.detach().double() if wide else guarded(x)).requires_grad_() for x in (*tensors, gate) if x is not None
    ]
    own = None if gate is None else leaves[-1]
    outputs = function(*leaves[:3], state=leaves[3], norm_eps=1e-3, gate=own, **options)
    generator = torch.Generator().manual_seed(5)
    weights = [torch.randn(x.shape, generator=generator).to(tensors[0].dtype).to(x.dtype) for x in outputs]
    return [*outputs, *torch.autograd.grad(outputs, leaves, weights)]


@pytest.mark.parametrize(
    ("dtype", "width", "value_width", "gated"),
    [
        (torch.float32, 5, 3, True),  # inside of the walk
        (torch.bfloat16, 5, 3, False),
        (torch.float32, 3, 140, True),  # behind it
        (torch.float16, 70, 130, False),
    ],
)
@interpreted
def test_norm_and_gate(dtype, width, value_width, gated):
    heads = 1 if value_width > 128 else 2
    tensors = make(67, dtype, heads=heads, width=width, value_width=value_width, sequences=3)
    gate = make(68, dtype, heads=heads, value_width=value_width)[2][:, :67] if gated else None
    cu_seqlens = guarded(torch.tensor([0, 3, 3, 67]))
    with guarded_allocations(), spans(64):
        actual = run_normed(linear_attention, tensors, gate, cu_seqlens=cu_seqlens)
    expected = run_normed(reference, tensors, gate, wide=True, cu_seqlens=cu_seqlens)
    for index, (one, other) in enumerate(zip(actual, expected, strict=True)):
        row = ROWS[dtype]
        if index < 2:  # the norm's result is rounded once, the state not at all
            row = "float32" if index == 1 else str(dtype).removeprefix("torch.")
        assert_close(one, other, row)


@interpreted
def test_strides_make_no_difference_and_the_bits_are_the_same_twice():
    tensors = make(70)
    first = run(linear_attention, tensors)
    leaves = [x.transpose(1, 2).contiguous().transpose(1, 2).requires_grad_() for x in tensors]
    outputs = linear_attention(*leaves[:3], state=leaves[3])
    for one, other in zip(outputs, first, strict=False):
        assert_close(one, other, "exact")
    actual = torch.autograd.grad(outputs[0].sum(), leaves)  # a gradient without strides
    plain = [x.detach().clone().requires_grad_() for x in leaves]
    expected = torch.autograd.grad(reference(*plain[:3], state=plain[3])[0].sum(), plain)
    for one, other in zip(actual, expected, strict=True):
        assert_close(one, other, "float32 gradient")


@interpreted
def test_float16_stays_finite_over_long_sequences():
    query, key, value = (torch.full((1, 2048, 1, 64), 16.0, dtype=torch.float16) for _ in range(3))
    output, state = linear_attention(query, key, value)
    assert_close(output[0, :, 0, 0], 64 * 16.0**3 * torch.arange(1, 2049), "float32")
    assert_close(state, torch.full_like(state, 2048 * 256.0), "float32")


@interpreted
def test_opcheck():
    query, key, value, state = (x.requires_grad_() for x in make(9))
    cu_seqlens = torch.tensor([0, 4, 9])
    for arguments in (
        (query, key, value, state, None, "triton"),
        (query.detach(), key, value, None, cu_seqlens, "triton"),
    ):
        torch.library.opcheck(op.linear_attention, arguments)
    for gate, trained in ((value.detach().clone().requires_grad_(), True), (None, False)):
        inputs = (query, key, value) if trained else (query.detach(), key.detach(), value.detach())
        arguments = (*inputs, gate, state if gate is not None else None, None, 1e-6, trained, "triton")
        torch.library.opcheck(op.linear_attention_normed, arguments)


@interpreted
def test_what_the_kernel_cannot_take_is_refused():
    tensors = make(4)
    with pytest.raises(ValueError, match="cannot run on triton: the form that is not causal is two matrix products"):
        linear_attention(*tensors[:3], causal=False)
    with pytest.raises(ValueError, match=r"query must be float32, bfloat16 or float16; got torch\.float64"):
        linear_attention(*(x.double() for x in tensors[:3]))
