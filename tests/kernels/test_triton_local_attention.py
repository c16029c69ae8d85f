"""Triton's local attention, interpreted, against the reference in float64."""

from contextlib import contextmanager
from unittest.mock import patch

import pytest
import torch

from hf_hybrid.kernels import local_attention, packed
from hf_hybrid.kernels.local_attention import op
from hf_hybrid.kernels.local_attention.reference import local_attention as reference
from tests.kernels.guarded import guarded, guarded_allocations
from tests.kernels.interpreter import interpreted
from tests.tolerances import assert_close

ROWS = {torch.float32: ("float32", "float32 gradient"), torch.float16: ("float16", "float16")} | {
    torch.bfloat16: ("bfloat16", "bfloat16 gradient")
}
# windows and chunks smaller and larger than a block, causal or not
SHAPES = [
    {"radius": 3, "causal": False},
    {"radius": 20, "causal": True},
    {"radius": 900, "causal": False},
    {"chunk_size": 5, "causal": True},
    {"chunk_size": 21, "causal": False},
]


def make(length, shape, dtype=torch.float32, batch=1, heads=2, width=5, value_width=3):
    """Query, key, value and bias."""
    generator = torch.Generator().manual_seed(length)
    reach = shape.get("radius", shape.get("chunk_size", 0) - 1)
    widths = (width, width, value_width)
    tensors = [torch.randn(batch, length, heads, w, generator=generator).to(dtype) for w in widths]
    return [*tensors, torch.randn(heads, reach + 1 if shape.get("causal") else 2 * reach + 1, generator=generator)]


def run(function, tensors, wide=False, **options):
    """Output, and gradients of every input."""
    leaves = [(x.detach().double() if wide else guarded(x)).requires_grad_() for x in tensors]
    output = function(*leaves[:3], bias=leaves[3] if len(leaves) == 4 else None, **options)
    grad = torch.randn(output.shape, generator=torch.Generator().manual_seed(5)).to(tensors[0].dtype)
    return [output, *torch.autograd.grad(output, leaves, grad.to(output.dtype))]


@contextmanager
def small_blocks(columns=16):
    """Small blocks, so that short sequences have several, and heads of more columns than a program has."""
    from hf_hybrid.kernels.local_attention import triton_kernels

    tiles = {"BT": 16, "BS": 8, "D": columns, "S": 8}
    small = {name: c._replace(tiles=tiles) for name, c in triton_kernels.CONFIGURATIONS.items()}
    with patch.multiple(triton_kernels, CONFIGURATIONS=small):
        yield


def compare(tensors, **options):
    dtype = tensors[0].dtype
    with guarded_allocations(), small_blocks():
        actual = run(local_attention, tensors, **options)
    expected = run(reference, tensors, wide=True, **options)
    for index, (one, other) in enumerate(zip(actual, expected, strict=True)):
        assert_close(one, other, ROWS[dtype][int(index > 0)])
    mask = options.get("attention_mask")
    if mask is not None:
        for x in actual[:4]:
            assert not x[mask == 0].any()


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@interpreted
def test_outputs_and_gradients(shape):
    mask = torch.ones(2, 26)
    mask[0, :18] = 0  # a grid of chunks that starts in a block, behind a whole block without any token
    mask[1, 13:16] = mask[1, 23:] = 0
    compare(make(26, shape, batch=2, heads=1), attention_mask=mask, **shape)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@interpreted
def test_16_bits(dtype):
    compare(make(17, {"radius": 9}, dtype, heads=1), radius=9, scale=1.0)
    compare(make(11, {"chunk_size": 9}, dtype, heads=1)[:3], chunk_size=9)


@interpreted
def test_a_bias_that_hides():
    """Its own key from every token, of which the first sees no other."""
    tensors = make(11, {"radius": 3, "causal": True}, heads=1)
    tensors[3][:, -1] = -1e30
    compare(tensors, radius=3, causal=True)
    for hiding in (-1e30, torch.finfo(torch.float32).min):  # torch's path has a number of its own for what is hidden
        tensors[3][:, -1] = hiding
        actual = run(local_attention, tensors, radius=3, causal=True, backend="torch")
        for one, other in zip(actual, run(reference, tensors, wide=True, radius=3, causal=True), strict=True):
            assert_close(one, other, "float32 gradient")


@pytest.mark.parametrize("hiding", [torch.finfo(torch.float32).min, -torch.inf])
@interpreted
def test_a_row_whose_weights_are_all_zero(hiding):
    """In units of log2 such a bias is minus infinity: the first token, which sees no other, has no weight at all."""
    tensors = make(11, {"radius": 3, "causal": True}, heads=1)
    tensors[3][:, -1] = hiding
    with small_blocks():
        output, *gradients = run(local_attention, tensors, radius=3, causal=True)
    tensors[3][:, -1] = -1e30
    expected = run(reference, tensors, wide=True, radius=3, causal=True)
    assert not output[:, 0].any()
    assert not gradients[0][:, 0].any()
    assert_close(output[:, 1:], expected[0][:, 1:], "float32")
    assert_close(gradients[0][:, 1:], expected[1][:, 1:], "float32 gradient")
    assert_close(gradients[1], expected[2], "float32 gradient")
    assert all(x.isfinite().all() for x in gradients)


@pytest.mark.parametrize("shape", [{"radius": 4}, {"chunk_size": 7}], ids=str)
@interpreted
def test_no_gradient_comes_from_what_is_not_kept(shape):
    tensors, mask = make(20, shape, heads=1), torch.arange(20)[None] != 9
    results = []
    for there in (0.0, torch.inf, torch.nan):
        leaves = [x.clone().requires_grad_() for x in tensors]
        with small_blocks():
            output = local_attention(*leaves[:3], bias=leaves[3], attention_mask=mask, **shape)
            grad = torch.ones_like(output)
            grad[:, 9] = there
            results.append(torch.autograd.grad(output, leaves, grad))
    for gradients in results[1:]:
        for one, other in zip(gradients, results[0], strict=True):
            assert_close(one, other, "exact")


@pytest.mark.parametrize(("width", "value_width"), [(1, 20), (35, 8)])
@interpreted
def test_any_width(width, value_width):
    compare(make(11, {"radius": 4}, heads=1, width=width, value_width=value_width), radius=4)


@interpreted
def test_shipped_blocks():
    tensors = make(40, {"radius": 20}, heads=1)
    with guarded_allocations():
        actual = run(local_attention, tensors, radius=20)
    for one, other in zip(actual, run(reference, tensors, wide=True, radius=20), strict=True):
        assert_close(one, other, "float32 gradient")


@pytest.mark.parametrize("shape", [SHAPES[1], SHAPES[4]], ids=str)
@pytest.mark.parametrize("bounds", [[0, 1], [0, 3, 3, 22, 23, 27], [0, 0, 5, 5]])
@interpreted
def test_packed_sequences_are_each_alone(bounds, shape):
    mask = torch.ones(1, bounds[-1])
    mask[:, 3:10] = 0
    tensors, cu_seqlens = make(bounds[-1], shape, heads=1), guarded(torch.tensor(bounds))
    compare(tensors, attention_mask=mask if bounds[-1] > 5 else None, cu_seqlens=cu_seqlens, **shape)


@interpreted
def test_packed_sequences_are_cut_once_per_pass():

    shape = {"chunk_size": 5}
    options = {"attention_mask": torch.arange(20)[None] != 9, "cu_seqlens": torch.tensor([0, 7, 20])}
    with small_blocks(), patch.object(packed, "spans", wraps=packed.spans) as spans:
        run(local_attention, make(20, shape, heads=1), **options, **shape)
    assert spans.call_count == 2


@interpreted
def test_strides_make_no_difference_and_the_bits_are_the_same_twice():
    tensors = make(10, {"radius": 4})
    with small_blocks():
        first = run(local_attention, tensors, radius=4)
        strided = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in tensors[:3]]
        with patch(f"{__name__}.guarded", lambda x: x.detach()):
            second = run(local_attention, [*strided, tensors[3].t().contiguous().t()], radius=4)
        for one, other in zip(first, second, strict=True):
            assert_close(one, other, "exact")
        leaves = [x.clone().requires_grad_() for x in tensors]
        output = local_attention(*leaves[:3], bias=leaves[3], radius=4)
        gradients = torch.autograd.grad(output.sum(), leaves)  # a gradient without strides
    plain = [x.double().requires_grad_() for x in tensors]
    expected = torch.autograd.grad(reference(*plain[:3], bias=plain[3], radius=4).sum(), plain)
    for one, other in zip(gradients, expected, strict=True):
        assert_close(one, other, "float32 gradient")


@interpreted
def test_opcheck():
    query, key, value, bias = make(9, {"chunk_size": 4}, heads=1)
    mask = torch.arange(9)[None] > 1
    tensors = (query, key, value, bias, mask, None, torch.tensor([0, 4, 9]))
    options = (None, 4, False, 0.3, 0.0, "triton")
    leaves = [x.clone().requires_grad_() for x in tensors[:4]]
    with small_blocks():
        torch.library.opcheck(op.local_attention, (*leaves, *tensors[4:], *options))


def survivors(length, seed, heads=2, **options):
    """Which weights dropout leaves, `(H, T, T)`, told by values of which each token has one of its own."""
    torch.manual_seed(seed)
    zeros, values = torch.zeros(1, length, heads, 1), torch.eye(length)[None, :, None].repeat(1, 1, heads, 1)
    return local_attention(zeros, zeros, values, radius=length, **options)[0].transpose(0, 1) > 0


@interpreted
def test_dropout_draws_for_each_query_key_head_and_seed():
    with small_blocks(columns=64):
        kept, other = (survivors(40, seed, dropout=0.25) for seed in (3, 4))
    assert torch.equal(kept, survivors(40, 3, dropout=0.25))  # whatever the blocks
    # of mean 0 and variance 1: sums over independent draws, and their correlations, are normal
    draws = (torch.cat([kept, other]).double() - 0.75) / 0.1875**0.5
    assert abs(draws.sum() / draws.numel() ** 0.5) < 4
    for x in (*draws, *draws.mT, draws.flatten(1)):  # queries, keys; heads and seeds
        assert ((x @ x.T) / x.shape[1] ** 0.5).fill_diagonal_(0).abs().max() < 6


@pytest.mark.parametrize("bounds", [None, [0, 7, 7, 20]])
@interpreted
def test_dropout_is_that_of_one_mask_forward_and_backward(bounds):
    dropout, shape = 0.3, {"chunk_size": 9} if bounds is None else {"radius": 5, "causal": True}
    cu_seqlens = None if bounds is None else torch.tensor(bounds)
    mask = torch.arange(20)[None] != 2
    tensors = make(20, shape, width=3)
    pieces = [slice(0, 20)] if bounds is None else [slice(0, 7), slice(7, 20)]
    with small_blocks(columns=64):
        kept = survivors(20, 3, dropout=dropout, cu_seqlens=cu_seqlens)
    with small_blocks():
        torch.manual_seed(3)
        actual = run(local_attention, tensors, dropout=dropout, attention_mask=mask, cu_seqlens=cu_seqlens, **shape)
    masks = iter([kept[None, :, at, at] for at in pieces])
    rate = 1 - round(dropout * 2**16) / 2**16
    with patch("torch.nn.functional.dropout", lambda weights, _: weights * next(masks) / rate):
        expected = run(reference, tensors, wide=True, attention_mask=mask, cu_seqlens=cu_seqlens, **shape)
    for one, other in zip(actual, expected, strict=True):
        assert_close(one, other, "float32 gradient")
    if bounds is not None:
        assert not torch.equal(kept[:, :7, :7], kept[:, 7:14, 7:14])


@interpreted
def test_what_the_kernel_cannot_take_is_refused():
    query, key, value, _ = make(4, {"radius": 1})
    wide = torch.zeros(1, 4, 2, 257)
    for arguments, message in (
        ((wide, wide, value), "K and V must be at most 256; got 257 and 3"),
        (
            (wide[..., :65], wide[..., :65], value),
            "K and V must both be above 16 or at most 64 in float32; got 65 and 3",
        ),
        ([x.double() for x in (query, key, value)], r"query must be float32, .* got torch\.float64"),
    ):
        with pytest.raises(ValueError, match=f"local_attention cannot run on triton: {message}"):
            local_attention(*arguments, radius=1)
