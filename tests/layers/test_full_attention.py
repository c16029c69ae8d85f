"""Attention to all keys with dropout, against torch's."""

import pytest
import torch
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from hf_hybrid.layers import full_attention as module
from hf_hybrid.layers.full_attention import full_attention
from hf_hybrid.models.dense_attention import choose_attention
from tests.models.tiny import main_output, tiny_inputs, tiny_model

from ..tolerances import assert_close

SCALE = 0.3
LENGTHS = ((1, 1), (7, 40), (90, 33))


def make(queries, keys, dtype=torch.float64, *, batch=2, heads=3, seed=0):
    """Query, key and value as strided views, the way projections hand them over."""
    generator = torch.Generator().manual_seed(seed)
    shapes = ((queries, 8), (keys, 8), (keys, 6))
    tensors = (torch.randn(batch, n, heads, w, generator=generator, dtype=torch.float64) for n, w in shapes)
    return [x.to(dtype).transpose(1, 2).requires_grad_() for x in tensors]


def make_mask(kind, queries, keys, dtype):
    if kind == "none":
        return None
    mask = torch.zeros(2, 1, queries if kind == "pairs" else 1, keys, dtype=dtype)
    if kind == "pairs":
        mask.masked_fill_(torch.rand(mask.shape, generator=torch.Generator().manual_seed(3)) < 0.3, -2.0)
    elif kind == "padding":
        mask[1, ..., keys // 2 + 1 :] = torch.finfo(dtype).min
    return mask


def run(function, tensors, **options):
    """Output and gradients under fixed weights."""
    output = function(*tensors, **options)
    weights = torch.randn(output.shape, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    return [output.detach(), *torch.autograd.grad(output, tensors, weights.to(output.dtype))]


def by_torch(query, key, value, *, attention_mask, scale, dropout=0.0):
    mask = None if attention_mask is None else attention_mask.to(query.dtype)
    return F.scaled_dot_product_attention(query, key, value, mask, dropout, scale=scale).transpose(1, 2)


@pytest.mark.parametrize("kind", ["none", "nothing hidden", "padding", "pairs"])
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_without_dropout_it_is_torchs_attention(dtype, lengths, kind, monkeypatch):
    name = str(dtype).removeprefix("torch.")
    row = name if name == "float16" else f"{name} gradient"
    mask, tensors = make_mask(kind, *lengths, dtype), make(*lengths, dtype)
    wide = [x.detach().double().requires_grad_() for x in tensors]
    expected = run(by_torch, wide, attention_mask=mask, scale=SCALE)
    for scores in (module._SCORES, 100):  # all queries of a head at a time, or a few
        monkeypatch.setattr(module, "_SCORES", scores)
        actual = run(full_attention, tensors, attention_mask=mask, scale=SCALE, dropout=0.0)
        assert actual[0].dtype == dtype
        for one, other in zip(actual, expected, strict=True):
            assert_close(one, other, row)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_a_query_without_keys_averages_all_values(dtype):
    """As a document of padding alone has it; its gradients are those of the average, which torch's attention loses."""
    mask, tensors = torch.zeros(2, 1, 1, 40, dtype=dtype), make(7, 40, dtype)
    mask[1] = torch.finfo(dtype).min

    def by_softmax(query, key, value, *, attention_mask, scale):
        hidden = torch.zeros_like(attention_mask, dtype=query.dtype)
        hidden.masked_fill_(attention_mask < 0, torch.finfo(query.dtype).min)
        return ((query @ key.mT * scale + hidden).softmax(-1) @ value).transpose(1, 2)

    wide = [x.detach().double().requires_grad_() for x in tensors]
    expected = run(by_softmax, wide, attention_mask=mask, scale=SCALE)
    actual = run(full_attention, tensors, attention_mask=mask, scale=SCALE, dropout=0.0)
    assert_close(actual[0][1], tensors[2][1].mean(1)[None].expand(7, -1, -1), f"{str(dtype)[6:]} gradient")
    for one, other in zip(actual, expected, strict=True):
        assert_close(one, other, f"{str(dtype)[6:]} gradient")


def test_bfloat16_is_no_less_exact_than_torchs():
    for spread in (1, 10):
        query, key, _ = make(64, 300, torch.bfloat16)
        value = make(64, 300, torch.bfloat16, seed=1)[1]  # as wide as the keys, for torch's fast attention
        tensors = [(x * spread).detach().requires_grad_() for x in (query, key, value)]
        wide = [x.detach().double().requires_grad_() for x in tensors]
        expected = run(by_torch, wide, attention_mask=None, scale=SCALE)
        options = {"attention_mask": None, "scale": SCALE, "dropout": 0.0}
        errors = [
            [
                (x.double() - y).square().mean().sqrt()
                for x, y in zip(run(f, tensors, **options), expected, strict=True)
            ]
            for f in (full_attention, by_torch)
        ]
        for own, others in zip(*errors, strict=True):
            assert own < 1.3 * others


def weights_of(dropout, *, queries=70, keys=90, seed=0):
    """The weights after dropout, times the number of keys: 0 where dropped, read off through the values."""
    torch.manual_seed(seed)
    zeros = torch.zeros(2, 2, queries, 4)
    values = torch.eye(keys).expand(2, 2, -1, -1)
    return full_attention(zeros, torch.zeros(2, 2, keys, 4), values, scale=1.0, dropout=dropout) * keys


@pytest.mark.parametrize("p", [0.01, 0.1, 0.5, 0.9])
def test_as_many_weights_are_dropped_as_asked_for_and_each_by_itself(p):
    weights = weights_of(p).transpose(1, 2).flatten()
    dropped = (weights == 0).double()
    deviation = (p * (1 - p) / weights.numel()) ** 0.5
    assert abs(dropped.mean() - p) < 5 * deviation + 2**-16
    for lag in (1, 2, 3, 4, 90, 70 * 90):  # neighbours come from one word
        both = (dropped[lag:] * dropped[:-lag]).mean()
        assert abs(both - p * p) < 5 * (p * p * (1 - p * p) / weights.numel()) ** 0.5 + 2**-15 * p
    kept = weights[weights > 0]
    assert_close(kept, torch.full_like(kept, 1 / (1 - round(p * 2**16) / 2**16)), "float32")


def test_the_seed_of_torch_decides_and_each_call_draws_anew():
    assert torch.equal(weights_of(0.5, seed=1), weights_of(0.5, seed=1))
    assert not torch.equal(weights_of(0.5, seed=1), weights_of(0.5, seed=2))
    first = weights_of(0.5, seed=1)
    query = torch.zeros(1, 1, 5, 4)
    assert not torch.equal(
        *(full_attention(query, query, torch.eye(5)[None, None], scale=1.0, dropout=0.5) for _ in "ab")
    )
    assert not torch.equal(first[0], first[1])


@pytest.mark.parametrize("scores", [2**19, 10])
def test_gradients_are_those_of_the_same_mask(scores, monkeypatch):
    monkeypatch.setattr(module, "_SCORES", scores)
    mask = make_mask("padding", 3, 5, torch.float64)

    def call(*tensors):
        torch.manual_seed(3)
        return full_attention(*tensors, attention_mask=mask, scale=SCALE, dropout=0.4)

    assert torch.autograd.gradcheck(call, make(3, 5, heads=2))


def test_without_queries():
    tensors = make(0, 5)
    output, *gradients = run(full_attention, tensors, scale=SCALE, dropout=0.4)
    assert output.shape == (2, 0, 3, 6)
    for gradient, tensor in zip(gradients, tensors, strict=True):
        assert torch.equal(gradient, torch.zeros_like(tensor))


def test_a_checkpoint_repeats_the_mask():
    tensors, results = make(20, 30, torch.float32), []

    def call(*tensors):
        return full_attention(*tensors, scale=SCALE, dropout=0.4)

    for wrapped in (False, True):
        torch.manual_seed(2)
        output = checkpoint(call, *tensors, use_reentrant=False) if wrapped else call(*tensors)
        torch.rand(3)
        results.append([output, *torch.autograd.grad(output.square().sum(), tensors)])
    for plain, again in zip(*results, strict=True):
        assert torch.equal(plain, again)


def test_opcheck():
    seed, mask = torch.tensor(5), make_mask("padding", 4, 6, torch.float32)
    torch.library.opcheck(module._attention, (*make(4, 6, torch.float32), mask, seed, SCALE, 2**14))
    torch.library.opcheck(module._attention, (*make(4, 6, torch.bfloat16), None, seed, SCALE, 0))


def test_it_keeps_no_weights():
    found = {}

    def pack(tensor):
        found[tensor.untyped_storage().data_ptr()] = tensor.numel()
        return tensor

    tensors = make(50, 60)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        full_attention(*tensors, scale=SCALE, dropout=0.1)
    assert sum(found.values()) == sum(x.numel() for x in tensors) + 2 * (2 * 3 * 50) + 1


def test_which_attention_a_model_takes():
    """Ours on a CPU with dropout, and only where torch's would be meant."""
    query, mask = torch.zeros(1, 1, 2, 4), torch.zeros(1, 1, 1, 2)
    for attention, dropout, own in (("sdpa", 0.1, True), ("sdpa", 0.0, False), ("eager", 0.1, False)):
        config = tiny_model("spade", "AutoModel", attn_implementation=attention).config
        chosen = choose_attention(config, query, mask, dropout)
        assert (chosen.__name__ == "_dropping_attention_forward") == own
        output, _ = chosen(torch.nn.Module(), query, query, query, mask, scaling=1.0, dropout=dropout)
        assert output.shape == (1, 2, 1, 4)
        for other in ((query, mask.clone().requires_grad_()), (query.to("meta"), None)):
            assert choose_attention(config, *other, dropout).__name__ != "_dropping_attention_forward"


def test_a_model_trains_by_it(monkeypatch):
    """With so little dropout that it is as good as none."""
    calls, results = [], []
    monkeypatch.setattr(
        "hf_hybrid.models.dense_attention.full_attention", lambda *a, **k: calls.append(k) or full_attention(*a, **k)
    )
    for rate in (0.0, 2**-18):
        model = tiny_model("spade", "AutoModelForSeq2SeqLM", dropout=0.0, attention_dropout=rate).train()
        output = main_output(model(**tiny_inputs(model), attention_mask=torch.tensor([[1] * 11, [1] * 8 + [0] * 3])))
        output.square().mean().backward()
        results.append([output.detach(), *(x.grad for x in model.parameters() if x.grad is not None)])
    assert len(calls) == 2  # cross-attention alone: self-attention has a bias with a gradient
    for one, other in zip(*results, strict=True):
        assert_close(other, one, "float32 gradient")
