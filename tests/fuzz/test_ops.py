"""An op refuses its arguments with a message that names one of them, or gives what its reference gives."""

import importlib
import inspect
import re
from random import Random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hf_hybrid import kernels

from ..tolerances import assert_close
from .fuzzing import examples, no_hang

DTYPES = [*[torch.float32] * 6, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.bool, torch.complex64]
FLOATS = DTYPES[:9]
NUMBERS = [0, 1, 2, 3, 5, 10, 100, -1, 10**9, 1.5]


class Draw:
    """Random arguments: mostly right, in sizes that are small, strides that are odd, and now and then wrong.

    Args:
        seed: Of them all. Drawn one by one by hypothesis they would be simple ones, and mistakes be made together.
    """

    def __init__(self, seed: int):
        self.random = random = Random(seed)
        self.one_of = random.choice
        self.batch, self.length = random.choice([1, 2, 3]), random.choice([1, 2, 5, 9, 17, 33])
        self.heads, self.width, self.value_width = (random.choice([1, 2, 3, 4, 8]) for _ in range(3))
        self.taps = random.choice([1, 2, 3, 9, 40])
        self.generator = torch.Generator().manual_seed(random.randrange(2**31))

    def chance(self, probability: float) -> bool:
        return self.random.random() < probability

    def maybe(self, make, probability: float = 0.4):
        return make() if self.chance(probability) else None

    def tensor(self, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        sizes = list(shape)
        if self.chance(0.04):
            sizes[self.random.randrange(len(sizes))] = self.one_of([0, 1, 4])
        if self.chance(0.02):
            sizes = self.one_of([sizes[:-1], [*sizes, 2]])
        dtype = self.one_of(DTYPES) if self.chance(0.04) else dtype
        if dtype == torch.int64 or dtype == torch.bool:
            x = torch.randint(0, 3, sizes, generator=self.generator).to(dtype)
        else:
            wide = torch.complex64 if dtype.is_complex else torch.float32
            x = torch.randn(sizes, dtype=wide, generator=self.generator).to(dtype)
        layout = self.random.randrange(6)
        if layout == 0 and x.dim() > 1:
            x = x.transpose(0, -1).contiguous().transpose(0, -1)
        elif layout == 1 and x.dim() and x.shape[0] > 1:
            x = x[:1].expand(x.shape)
        elif layout == 2:
            x = torch.stack([x, x], -1)[..., 0]
        x = x.to("meta") if self.chance(0.02) else x
        return x.requires_grad_() if (x.is_floating_point() or x.is_complex()) and self.chance(0.25) else x

    def mask(self, *shape: int) -> torch.Tensor:
        return self.tensor(*shape, dtype=self.one_of([torch.bool, torch.int64, torch.float32]))

    def bounds(self) -> torch.Tensor:
        inner = sorted(self.random.randrange(self.length + 1) for _ in range(self.random.randrange(3)))
        right = torch.tensor([0, *inner, self.length])
        wrong = [[0], [0, self.length + 3], [1, self.length], [0, self.length, 0, self.length], [-1, self.length], []]
        if self.chance(0.3):
            right = torch.tensor(self.one_of(wrong), dtype=torch.int64)
        return right.to(self.one_of([torch.int64, torch.int32, torch.int64, torch.float32]))

    def packed(self) -> tuple[torch.Tensor | None, int]:
        """Bounds, or none, and how many rows states have."""
        bounds = self.maybe(self.bounds, 0.25)
        if bounds is None:
            return None, self.batch
        self.batch = 1 if self.chance(0.8) else self.batch
        return bounds, max(1, bounds.numel() - 1)

    def heads_of(self, width: int, dtype: torch.dtype, length: int | None = None) -> torch.Tensor:
        length = self.length if length is None else length
        return self.tensor(self.batch, length, self.heads, width, dtype=dtype)


def local_attention(draw):
    dtype, causal = draw.one_of(FLOATS), draw.chance(0.5)
    radius = draw.maybe(lambda: draw.one_of(NUMBERS), 0.6)
    chunk_size = draw.maybe(lambda: draw.one_of(NUMBERS), 0.9 if radius is None else 0.1)
    bounds, _ = draw.packed()
    reach = radius if radius is not None else (chunk_size or 1) - 1
    options = {
        "radius": radius,
        "chunk_size": chunk_size,
        "causal": causal,
        "attention_mask": draw.maybe(lambda: draw.mask(draw.batch, draw.length)),
        "scale": draw.maybe(lambda: draw.one_of([1.0, 0.0, -1.0, float("nan")])),
        "dropout": draw.one_of([*[0.0] * 9, 1.0, -0.1, float("nan")]),
        "cu_seqlens": bounds,
    }
    if isinstance(reach, int) and 0 <= reach < 200:
        options["bias"] = draw.maybe(lambda: draw.tensor(draw.heads, (1 if causal else 2) * reach + 1))
    return [draw.heads_of(width, dtype) for width in (draw.width, draw.width, draw.value_width)], options


def local_attention_step(draw):
    dtype, keys = draw.one_of(FLOATS), draw.length
    radius = draw.maybe(lambda: draw.one_of(NUMBERS), 0.6)
    chunk_size = draw.maybe(lambda: draw.one_of(NUMBERS), 0.9 if radius is None else 0.1)
    reach = radius if radius is not None else (chunk_size or 1) - 1
    start = draw.one_of([keys - 1, keys - 1, 0, keys + 3, -1, torch.tensor(keys - 1), torch.tensor(1.0)])
    options = {
        "query_start": start,
        "key_start": draw.one_of([0, 0, 0, 2, -1, torch.tensor(0)]),
        "radius": radius,
        "chunk_size": chunk_size,
        "include_self": draw.chance(0.7),
        "attention_mask": draw.maybe(lambda: draw.mask(draw.batch, draw.one_of([1, keys, keys + 3]))),
    }
    if isinstance(reach, int) and 0 <= reach < 200:
        options["bias"] = draw.maybe(lambda: draw.tensor(draw.heads, reach + 1))
    tensors = [(draw.width, 1), (draw.width, keys), (draw.value_width, keys)]
    return [draw.heads_of(width, dtype, length) for width, length in tensors], options


def linear_attention(draw):
    dtype = draw.one_of(FLOATS)
    bounds, rows = draw.packed()
    norm_eps = draw.maybe(lambda: draw.one_of([1e-6, 1.0, 0.0, -1.0, float("nan")]))
    options = {
        "causal": draw.chance(0.7),
        "norm_eps": norm_eps,
        "gate": draw.maybe(lambda: draw.heads_of(draw.value_width, dtype), 0.1 if norm_eps is None else 0.5),
        "state": draw.maybe(lambda: draw.tensor(rows, draw.heads, draw.width, draw.value_width)),
        "cu_seqlens": bounds,
    }
    return [draw.heads_of(width, dtype) for width in (draw.width, draw.width, draw.value_width)], options


def laplace_attention(draw):
    dtype, keys = draw.one_of(FLOATS), max(0, draw.length + draw.one_of([0, 0, 0, 1, 4, -1]))
    options = {
        "causal": draw.chance(0.5),
        "attention_mask": draw.maybe(lambda: draw.mask(draw.batch, keys)),
        "chunk_size": draw.maybe(lambda: draw.one_of(NUMBERS)),
        "first": draw.maybe(lambda: draw.tensor(draw.batch, dtype=torch.int64), 0.2),
    }
    tensors = [(draw.width, draw.length), (draw.width, keys), (draw.value_width, keys)]
    return [draw.heads_of(width, dtype, length) for width, length in tensors], options


def short_conv(draw):
    bounds, rows = draw.packed()
    options = {
        "bias": draw.maybe(lambda: draw.tensor(draw.width)),
        "causal": draw.chance(0.6),
        "activation": draw.one_of([None, None, "silu", "relu"]),
        "state": draw.maybe(lambda: draw.tensor(rows, draw.taps - 1, draw.width), 0.3),
        "cu_seqlens": bounds,
    }
    u = draw.tensor(draw.batch, draw.length, draw.width, dtype=draw.one_of(FLOATS))
    return [u, draw.tensor(draw.width, draw.taps)], options


def long_conv(draw):
    dtype, rows = draw.one_of(FLOATS), draw.one_of([draw.width, draw.width, 1])
    bounds, _ = draw.packed()
    shape = draw.batch, draw.length, draw.width
    options = {
        "reverse_kernel": draw.maybe(lambda: draw.tensor(rows, draw.taps)),
        "skip": draw.maybe(lambda: draw.tensor(draw.width)),
        "input_gate": draw.maybe(lambda: draw.tensor(*shape, dtype=dtype)),
        "gate": draw.maybe(lambda: draw.tensor(*shape, dtype=dtype)),
        "activation": draw.one_of([None, None, "silu", "x"]),
        "cu_seqlens": bounds,
    }
    return [draw.tensor(*shape, dtype=dtype), draw.tensor(rows, draw.taps)], options


def diagonal_scan(draw):
    dtype = draw.one_of([torch.float32, torch.float64, torch.complex64])
    bounds, rows = draw.packed()
    a = draw.tensor(draw.width, dtype=dtype)
    a = a / a.abs().clamp_min(1) if a.is_floating_point() or a.is_complex() else a  # bounded, as it is meant
    options = {
        "initial_state": draw.maybe(lambda: draw.tensor(rows, draw.width, dtype=dtype)),
        "reverse": draw.chance(0.3),
        "cu_seqlens": bounds,
    }
    return [a, draw.tensor(draw.batch, draw.length, draw.width, dtype=dtype)], options


def segment_recurrence(draw):
    dtype, segments, size = draw.one_of(FLOATS), draw.one_of([1, 2, 4]), draw.one_of([1, 5])
    visits = [0, 0, segments - 1, *([segments, -1] if draw.chance(0.3) else [])]
    options = {
        "visited": draw.maybe(lambda: torch.tensor([[draw.one_of(visits) for _ in range(3)]])),
        "source": draw.one_of(["complement", "complement", "segment", "x"]),
        "clamp": draw.maybe(lambda: draw.one_of([1.0, 2, 0, float("nan")])),
        "surrogate": draw.chance(0.3),
    }
    if options["visited"] is not None and draw.chance(0.1):
        options["visited"] = options["visited"].to(draw.one_of([torch.int32, torch.bool, torch.float32]))
    if draw.chance(0.7):
        thresholds = [torch.tensor(0.5), torch.tensor([0.5]), torch.tensor(0.0), torch.tensor([1.0, 2.0])]
        neuron = {"weight": draw.tensor(draw.value_width, draw.value_width), "leak": torch.tensor(0.5)}
        options |= neuron | ({"threshold": draw.one_of(thresholds)} if draw.chance(0.9) else {})
    shape = draw.batch, draw.heads, segments, size
    return [draw.tensor(*shape, width, dtype=dtype) for width in (draw.width, draw.value_width)], options


def segment_step(draw):
    dtype, documents, slots, size = draw.one_of(FLOATS), draw.one_of([draw.batch, 1]), draw.one_of([1, 3]), 4
    index = torch.randint(0, documents * draw.heads * slots, (draw.batch, draw.heads), generator=draw.generator)
    if draw.chance(0.1):
        index[0, 0] = draw.one_of([-1, documents * draw.heads * slots, 10**12])
    shape, has_keys = (documents, draw.heads, slots), draw.chance(0.8)
    kept = [draw.tensor(*shape, size, w, dtype=dtype) if has_keys else None for w in (draw.width, draw.value_width)]
    state = draw.maybe(lambda: draw.tensor(*shape, draw.width, draw.value_width, dtype=dtype), 0.8)
    norm = (documents, draw.heads, 1, draw.one_of([1, draw.value_width]))
    options = {
        "visible": draw.maybe(lambda: draw.tensor(draw.one_of([1, draw.batch]), size, dtype=torch.bool)),
        "norm": draw.maybe(lambda: draw.tensor(*norm, dtype=dtype)),
        "documents": draw.maybe(lambda: torch.tensor([draw.one_of([0] * 12 + [documents]) for _ in index])),
        "scale": draw.one_of([1.0, 0.5]),
    }
    return [draw.tensor(draw.batch, draw.heads, draw.width, dtype=dtype), *kept, state, index], options


OPS = {
    "diagonal_scan": (diagonal_scan, "diagonal_scan"),
    "laplace_attention": (laplace_attention, "laplace_attention"),
    "linear_attention": (linear_attention, "linear_attention"),
    "local_attention": (local_attention, "local_attention"),
    "local_attention_step": (local_attention_step, "local_attention.step"),
    "long_conv": (long_conv, "long_conv"),
    "segment_recurrence": (segment_recurrence, "segment_recurrence"),
    "segment_step": (segment_step, "segment_recurrence.step"),
    "short_conv": (short_conv, "short_conv"),
}


def reference_of(name: str):
    return getattr(importlib.import_module(f"hf_hybrid.kernels.{OPS[name][1]}.reference"), name)


def outputs_of(result) -> list[torch.Tensor]:
    return [x for x in (result if isinstance(result, tuple) else (result,)) if x is not None]


def row_of(tensors) -> str:
    """The tolerance of the least precise input."""
    dtypes = {x.dtype for x in tensors}
    return next((str(x)[6:] for x in (torch.bfloat16, torch.float16) if x in dtypes), "float32 gradient")


def test_every_public_op_is_fuzzed():
    assert set(OPS) == set(kernels.__all__) - {"use_backend"}


@pytest.mark.parametrize("name", OPS)
@examples(150)
@given(seed=st.integers(0, 2**32 - 1))
def test_an_op_refuses_in_words_or_gives_what_its_reference_gives(name, seed):
    op, (tensors, options) = getattr(kernels, name), OPS[name][0](Draw(seed))
    with no_hang():
        try:
            outputs = outputs_of(op(*tensors, **options))
        except ValueError as error:
            message, arguments = str(error), "|".join(inspect.signature(op).parameters)
            assert re.search(rf"\b({arguments})\b.* must ", message), message
            assert "; got " in message or "must be None" in message, message
            return
        if wanting := [x for x in outputs if x.requires_grad]:
            sum(x.abs().sum() for x in wanting).backward()
    given_tensors = [x for x in (*tensors, *options.values()) if isinstance(x, torch.Tensor)]
    if any(x.is_meta for x in given_tensors) or options.get("dropout"):
        return
    tensors = [x.detach() if isinstance(x, torch.Tensor) else x for x in tensors]
    options = {key: x.detach() if isinstance(x, torch.Tensor) else x for key, x in options.items()}
    for output, expected in zip(outputs, outputs_of(reference_of(name)(*tensors, **options)), strict=True):
        assert output.dtype == expected.dtype
        assert_close(output, expected, row_of(given_tensors))


ROWS, LENGTH, SPOILT = 4, 37, 20
HEADS, CHANNELS = (ROWS, LENGTH, 2, 4), (ROWS, LENGTH, 5)
SEGMENTS = (ROWS, 2, 3, 2, 4)
NEURON = {"weight": torch.eye(4), "leak": torch.tensor(0.5), "threshold": torch.tensor(0.1)}
SPOILED = {
    "window": ("local_attention", [HEADS] * 3, {"radius": 3}),
    "causal window": ("local_attention", [HEADS] * 3, {"radius": 3, "causal": True}),
    "chunk": ("local_attention", [HEADS] * 3, {"chunk_size": 5}),
    "linear": ("linear_attention", [HEADS] * 3, {}),
    "linear, normed": ("linear_attention", [HEADS] * 3, {"norm_eps": 1e-6}),
    "linear, both ways": ("linear_attention", [HEADS] * 3, {"causal": False}),
    "laplace": ("laplace_attention", [HEADS] * 3, {}),
    "laplace in chunks": ("laplace_attention", [HEADS] * 3, {"chunk_size": 5, "causal": True}),
    "short": ("short_conv", [CHANNELS, (5, 3)], {}),
    "short, centred": ("short_conv", [CHANNELS, (5, 3)], {"causal": False, "activation": "silu"}),
    "long": ("long_conv", [CHANNELS, (5, 30)], {}),
    "long, both ways": ("long_conv", [CHANNELS, (5, 30)], {"reverse_kernel": torch.ones(5, 30)}),
    "scan": ("diagonal_scan", [(5,), CHANNELS], {}),
    "segments": ("segment_recurrence", [SEGMENTS] * 2, {}),
    "neurons": ("segment_recurrence", [SEGMENTS] * 2, {**NEURON, "clamp": 1.0}),
}


@pytest.mark.parametrize("case", SPOILED)
def test_nan_shows_where_it_is_read_and_in_no_other_row(case):
    name, shapes, options = SPOILED[case]
    op, generator = getattr(kernels, name), torch.Generator().manual_seed(0)
    tensors = [torch.rand(shape, generator=generator) for shape in shapes]
    clean = outputs_of(op(*tensors, **options))[0]
    for at, tensor in enumerate(tensors):
        if tensor.dim() < 3:
            continue  # weights: every row reads them
        place = SPOILT if tensor.dim() < 5 else slice(None)
        spoilt = tensor.clone()
        spoilt[(1, place) if tensor.dim() < 5 else (1, slice(None), 1)] = torch.nan
        output = outputs_of(op(*tensors[:at], spoilt, *tensors[at + 1 :], **options))[0]
        assert torch.isnan(output[1][place]).any(), at
        others = [0, 2, 3]
        assert_close(output[others], clean[others], "float32")
