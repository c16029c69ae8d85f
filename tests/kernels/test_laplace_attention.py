"""Laplace attention against its matrix of weights, and the function against what Mega says of it."""

import math

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hf_hybrid.kernels import laplace_attention, use_backend
from hf_hybrid.kernels.laplace_attention import laplace, torch_impl
from hf_hybrid.kernels.laplace_attention.reference import laplace_attention as reference
from tests.tolerances import assert_close


def make(length, past=0, dtype=torch.float64, batch=2, heads=2, width=4, value_width=3, seed=0):
    generator = torch.Generator().manual_seed(seed)
    shapes = (length, width), (past + length, width), (past + length, value_width)
    return [
        3 * torch.randn(batch, tokens, heads, size, generator=generator, dtype=torch.float64).to(dtype)
        for tokens, size in shapes
    ]


def run(function, tensors, **options):
    leaves = [x.detach().clone().requires_grad_() for x in tensors]
    y = function(*leaves, **options)
    weight = torch.randn(y.shape, generator=torch.Generator().manual_seed(5), dtype=torch.float64).to(y.dtype)
    return [y, *torch.autograd.grad(y, leaves, weight)]


def mask(length, first=3, last=2):
    kept = torch.ones(2, length, dtype=torch.long)
    kept[0, :first] = 0
    kept[1, length - last :] = 0
    return kept


def test_the_function_is_megas():
    mu = torch.tensor(math.sqrt(0.5), dtype=torch.float64, requires_grad=True)
    value = laplace(mu)
    (slope,) = torch.autograd.grad(value, mu)
    assert_close(value, torch.tensor(0.5), "float64")
    assert_close(slope, torch.tensor(math.sqrt(2), dtype=torch.float64), "float64")
    assert_close(value, mu.detach() ** 2, "float64")  # relu(x)^2 and its slope
    assert_close(slope, 2 * mu.detach(), "float64")
    x = torch.linspace(-1, 2, 200, dtype=torch.float64)
    assert ((laplace(x) > 0) & (laplace(x) < 1)).all()
    assert (laplace(x).diff() > 0).all()


@pytest.mark.parametrize("chunk_size", [None, 1, 5, 64])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize(("length", "scores"), [(7, 1 << 22), (33, 300), (33, 1)])
def test_outputs_and_gradients_match_the_reference(length, scores, padded, causal, chunk_size, monkeypatch):
    monkeypatch.setattr(torch_impl, "_SCORES", scores)
    options = {"causal": causal, "chunk_size": chunk_size, "attention_mask": mask(length) if padded else None}
    for index, (one, other) in enumerate(
        zip(run(laplace_attention, make(length), **options), run(reference, make(length), **options), strict=True)
    ):
        assert_close(one, other, "float64 gradient" if index else "float64")


@pytest.mark.parametrize("chunk_size", [None, 4, 7])
@pytest.mark.parametrize("past", [1, 3, 20])
def test_queries_behind_past_keys(past, chunk_size, monkeypatch):
    monkeypatch.setattr(torch_impl, "_SCORES", 60)
    tensors = make(9, past)
    for first in (None, torch.tensor([-2, 3])):
        options = {"causal": True, "chunk_size": chunk_size, "first": first}
        for one, other in zip(
            run(laplace_attention, tensors, **options), run(reference, tensors, **options), strict=True
        ):
            assert_close(one, other, "float64 gradient")


@pytest.mark.parametrize("chunk_size", [None, 4])
def test_padding_changes_nothing(chunk_size):
    query, key, value = make(11)
    kept = mask(11)[:1]
    for causal in (False, True):
        options = {"causal": causal, "chunk_size": chunk_size}
        padded = laplace_attention(query[:1], key[:1], value[:1], attention_mask=kept, **options)
        alone = laplace_attention(query[:1, 3:], key[:1, 3:], value[:1, 3:], **options)
        assert_close(padded[:, 3:], alone, "float64")


@pytest.mark.parametrize(("dtype", "row"), [(torch.float32, "float32"), (torch.bfloat16, "bfloat16")])
def test_lower_precision_is_computed_in_float32(dtype, row):
    tensors = make(20, dtype=dtype)
    expected = reference(*tensors, causal=True)
    assert_close(laplace_attention(*tensors, causal=True), expected, row)
    with torch.autocast("cpu", torch.bfloat16):
        assert_close(laplace_attention(*tensors, causal=True), expected, row)


@pytest.mark.parametrize("function", [laplace_attention, reference], ids=["op", "reference"])
def test_dropout_drops_weights_and_keeps_their_mean(function):
    torch.manual_seed(0)
    query, key, _ = make(64, batch=1, heads=1)
    value = torch.ones(1, 64, 1, 1, dtype=torch.float64)
    exact = laplace_attention(query, key, value)
    mean = torch.stack([function(query, key, value, dropout=0.25) for _ in range(400)]).mean(0)
    assert not torch.equal(function(query, key, value, dropout=0.25), exact)
    assert ((mean - exact).abs().mean() / exact.mean()) < 0.02


def test_no_scores_are_saved():
    leaves = [x.requires_grad_() for x in make(64)]
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
        laplace_attention(*leaves)
    assert all(x.numel() <= leaves[0].numel() for x in saved)


def test_gradients_of_chunks_are_not_as_long_as_the_sequence():
    class Written(TorchDispatchMode):
        numbers = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            result = func(*args, **(kwargs or {}))
            self.numbers += sum(x.numel() for x in tree_leaves(result) if isinstance(x, torch.Tensor))
            return result

    numbers = []
    for length in (256, 1024):
        leaves = [x.requires_grad_() for x in make(length)]
        total = laplace_attention(*leaves, chunk_size=8).sum()
        with Written() as written:
            total.backward()
        numbers.append(written.numbers)
    assert numbers[1] / numbers[0] == pytest.approx(4, rel=0.1)


def test_dispatch():
    with pytest.raises(ValueError, match="laplace_attention cannot run on triton"):
        laplace_attention(*make(8), backend="triton")
    with use_backend("triton"), pytest.raises(ValueError, match="cannot run on triton"):
        laplace_attention(*make(8))


def test_errors_name_the_argument():
    query, key, value = make(8)
    for arguments, options, message in (
        ((query[0], key, value), {}, r"query must be a floating-point \(B, T, H, K\)"),
        ((query, key[:, :4], value), {}, r"key must be \(B, S, H, 4\) with query's B and H, and S >= 8"),
        ((query, key[..., :2], value), {}, "key must be"),
        ((query, key, value[:1]), {}, r"value must be \(B, S, H, V\)"),
        ((query, key, value.float()), {}, "value must have query's dtype"),
        ((query[:, :5], key, value[:, :6]), {}, "value must have as many tokens as key, 8; got 6"),
        ((query, key, value), {"attention_mask": mask(7)}, r"attention_mask must be \(B, S\) = \(2, 8\)"),
        ((query, key, value), {"first": torch.zeros(3)}, r"first must be \(B,\) = \(2,\)"),
        ((query, key, value), {"chunk_size": 0}, "chunk_size must be a positive integer; got 0"),
        ((query, key, value), {"dropout": 1.0}, r"dropout must be at least 0 and below 1; got 1.0"),
    ):
        with pytest.raises(ValueError, match=message):
            laplace_attention(*arguments, **options)
