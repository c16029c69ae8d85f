"""One decoded token's local attention in torch, against its reference and against attention over whole sequences."""

import pytest
import torch

from hf_hybrid.kernels import local_attention_step
from hf_hybrid.kernels.local_attention.reference import local_attention as whole
from hf_hybrid.kernels.local_attention.step.reference import local_attention_step as reference
from tests.tolerances import assert_close

ROWS = {torch.float64: "float64", torch.float32: "float32", torch.float16: "float16", torch.bfloat16: "bfloat16"}
# options, S, query_start, key_start: whole caches, sliding ones, ones that are not full yet
CALLS = [
    ({"radius": 0}, 1, 0, 0),
    ({"radius": 3}, 9, 8, 0),
    ({"radius": 3}, 4, 30, 27),
    ({"radius": 50}, 7, 6, 0),
    ({"radius": 3, "include_self": False}, 20, 11, 0),
    ({"radius": 0, "include_self": False}, 3, 2, 0),
    ({"chunk_size": 1}, 5, 4, 0),
    ({"chunk_size": 5}, 13, 12, 0),
    ({"chunk_size": 5, "include_self": False}, 5, 20, 16),
    ({"chunk_size": 8}, 40, 19, 0),
    ({"chunk_size": 100}, 11, 10, 0),
]


def make(options, length, start, dtype=torch.float64, batch=3, heads=2, width=5, value_width=3):
    """Query, key and value as a cache holds them, bias, and a mask with left padding, holes, and a row of nothing."""
    generator = torch.Generator().manual_seed(length)
    reach = options.get("radius", options.get("chunk_size", 0) - 1)
    shapes = [(batch, heads, 1, width), (batch, heads, length, width), (batch, heads, length, value_width)]
    tensors = [torch.randn(shape, generator=generator).to(dtype).transpose(1, 2) for shape in shapes]
    mask = torch.ones(batch, start + 1, dtype=torch.long)
    mask[1, : start // 2] = mask[1, 3 * start // 4] = 0
    mask[2:] = 0
    return [*tensors, torch.randn(heads, reach + 1, generator=generator)], mask


def check(options, length, start, key_start, dtype, row, **other):
    tensors, mask = make(options, length, start, dtype, **other)
    wide = [x.double() for x in tensors]
    for bias, kept, scale in ((3, mask, None), (None, None, 1.0)):
        options = options | {"attention_mask": kept, "scale": scale}
        expected = reference(*wide[:3], bias=bias and wide[bias], query_start=start, key_start=key_start, **options)
        for as_given in (int, torch.tensor):
            actual = local_attention_step(
                *tensors[:3], bias=bias and tensors[bias], query_start=as_given(start), key_start=as_given(key_start),
                **options,
            )  # fmt: skip
            assert actual.dtype == dtype
            assert_close(actual, expected, row)


@pytest.mark.parametrize("dtype", ROWS)
@pytest.mark.parametrize(("options", "length", "start", "key_start"), CALLS)
def test_it_is_the_reference(options, length, start, key_start, dtype):
    check(options, length, start, key_start, dtype, ROWS[dtype])


@pytest.mark.parametrize("options", [{"radius": 4}, {"chunk_size": 4}], ids=str)
def test_steps_are_rows_of_attention_over_the_whole_sequence(options):
    generator = torch.Generator().manual_seed(0)
    tensors = [torch.randn(2, 17, 2, 6, generator=generator) for _ in range(3)]
    bias = torch.randn(2, 5 if "radius" in options else 4, generator=generator)
    mask = torch.ones(2, 17)
    mask[1, :6] = 0
    expected = whole(*tensors, bias=bias, causal=True, attention_mask=mask, **options)
    for t in range(6, 17):
        for held in (t + 1, 6, 17):  # all so far, a window, and a static cache
            first = 0 if held == 17 else t + 1 - held
            query, key, value = tensors[0][:, t : t + 1], *(x[:, first : first + held] for x in tensors[1:])
            actual = local_attention_step(
                query,
                key,
                value,
                bias=bias,
                attention_mask=mask[:, : t + 1],
                query_start=t,
                key_start=first,
                **options,
            )
            assert_close(actual, expected[:, t : t + 1], "float32")


def test_gradients_are_those_of_the_reference():
    (query, key, value, bias), mask = make({"radius": 4}, 9, 8)
    leaves = [x.detach().requires_grad_() for x in (query, key, value, bias.double())]
    gradients = []
    for function in (local_attention_step, reference):
        output = function(*leaves[:3], bias=leaves[3], radius=4, query_start=8, attention_mask=mask)
        gradients.append(torch.autograd.grad(output.square().sum(), leaves))
    for one, other in zip(*gradients, strict=True):
        assert_close(one, other, "float64 gradient")


@pytest.mark.parametrize("on_device", [False, True])
def test_compiled_as_one_graph(on_device):
    @torch.compile(fullgraph=True, backend="aot_eager")
    def step(query, key, value, bias, mask, start):
        return local_attention_step(query, key, value, bias=bias, attention_mask=mask, chunk_size=4, query_start=start)

    for start in (3, 7, 11):
        tensors, mask = make({"chunk_size": 4}, 12, 11, torch.float32)
        expected = reference(*tensors[:3], bias=tensors[3], attention_mask=mask, chunk_size=4, query_start=start)
        with torch.no_grad():
            actual = step(*tensors, mask, torch.tensor(start) if on_device else start)
        assert_close(actual, expected, "float32")


def test_what_does_not_fit_is_said():
    (query, key, value, bias), mask = make({"radius": 4}, 9, 8)
    good = {"radius": 4, "query_start": 8, "bias": bias, "attention_mask": mask}
    for arguments, change, message in (
        ((key, key, value), {}, r"query must be a floating-point \(B, 1, H, K\); got \(3, 9, 2, 5\)"),
        ((query, key[:, :, :1], value), {}, r"key must be \(B, S, H, K\) with S > 0 .* got \(3, 9, 1, 5\)"),
        ((query, key, value[:, 1:]), {}, r"value must be \(B, S, H, V\) .*\(3, 9, 2\); got \(3, 8, 2, 3\)"),
        ((query, key, value.half()), {}, r"value must have query's dtype torch\.float64; got torch\.float16"),
        ((query, key, value), {"chunk_size": 2}, "exactly one of radius and chunk_size must be given"),
        ((query, key, value), {"radius": -1}, "radius must be at least 0; got -1"),
        ((query, key, value), {"radius": 3}, r"bias must be \(H, reach \+ 1\) = \(2, 4\); got \(2, 5\)"),
        ((query, key, value), {"attention_mask": mask[:2]}, r"attention_mask must be \(B, P\) with B = 3"),
        ((query, key, value), {"query_start": torch.ones(2).long()}, "query_start must be an int or one of int32"),
    ):
        with pytest.raises(ValueError, match=message):
            local_attention_step(*arguments, **good | change)
