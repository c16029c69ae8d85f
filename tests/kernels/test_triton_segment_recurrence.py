"""The Triton segment recurrence and its step of decoding, interpreted, against the references in float64."""

from contextlib import contextmanager
from unittest.mock import patch

import pytest
import torch

from hf_hybrid.kernels import segment_recurrence, segment_step
from hf_hybrid.kernels.segment_recurrence import op, reference, step
from hf_hybrid.kernels.segment_recurrence.step.reference import segment_step as step_reference
from tests.kernels.guarded import guarded, guarded_allocations
from tests.kernels.interpreter import interpreted
from tests.tolerances import assert_close

NEURON = ("weight", "leak", "threshold")
CASES = {
    "neurons": {},
    "clamp, surrogate": {"clamp": 2.0, "surrogate": True},
    "own segment": {"source": "segment", "clamp": 1.5},
    "some visited, some twice": {"visited": torch.tensor([[3, 0, 3, 3]]), "clamp": 2.0},
    "one visited": {"visited": torch.tensor([[2]]), "source": "segment"},
    "no neurons": {**dict.fromkeys(NEURON), "clamp": 1.5},
    "no neurons, some visited": {**dict.fromkeys(NEURON), "visited": torch.tensor([[0, 2, 2]])},
}
ROWS = {torch.float32: ("float32", "float32 gradient"), torch.float16: ("float16", "float16")} | {
    torch.bfloat16: ("bfloat16", "bfloat16 gradient")
}


def make(dtype=torch.float32, batch=1, heads=1, segments=4, size=5, width=3, value_width=5):
    """Arguments under which neurons fire now and then."""
    generator = torch.Generator().manual_seed(size)

    def draw(*shape):
        return torch.randn(shape, generator=generator)

    return {
        "key": draw(batch, heads, segments, size, width).to(dtype),
        "value": draw(batch, heads, segments, size, value_width).to(dtype),
        "weight": draw(value_width, value_width) / 4,
        "leak": torch.tensor([0.6]),
        "threshold": torch.tensor([0.7]),
    }


def run(function, arguments, wide=False):
    """States, and gradients of every floating-point input."""
    leaves = {
        name: (x.double() if wide else guarded(x)).requires_grad_()
        for name, x in arguments.items()
        if isinstance(x, torch.Tensor) and x.is_floating_point()
    }
    states = function(**{**arguments, **leaves})
    weights = torch.randn(states.shape, generator=torch.Generator().manual_seed(5)).to(arguments["key"].dtype)
    return [states, *torch.autograd.grad(states, list(leaves.values()), weights.to(states.dtype))]


@contextmanager
def small_tiles():
    """Several tiles and spans in what is small, so that an interpreter gets to their edges."""
    from hf_hybrid.kernels.segment_recurrence import triton_kernels
    from hf_hybrid.kernels.segment_recurrence.step import triton_kernels as step_kernels

    sizes = {"BT": 4, "BK": 4, "BV": 4, "BLOCK": 8, "STEP": 2, "BS": 4, "D": 16}
    small, small_steps = (
        {
            name: configuration._replace(tiles={tile: sizes[tile] for tile in configuration.tiles})
            for name, configuration in kernels.CONFIGURATIONS.items()
        }
        for kernels in (triton_kernels, step_kernels)
    )
    with (
        patch.multiple(triton_kernels, CONFIGURATIONS=small, _SHORTEST_SPAN=8),
        patch.object(step_kernels, "CONFIGURATIONS", small_steps),
    ):
        yield


def compare(arguments):
    with guarded_allocations():
        actual = run(segment_recurrence, arguments)
    expected = run(reference.segment_recurrence, arguments, wide=True)
    for index, (one, other) in enumerate(zip(actual, expected, strict=True)):
        assert_close(one, other, ROWS[arguments["key"].dtype][int(index > 0)])
    return expected[0]


@pytest.mark.parametrize("case", CASES)
@interpreted
def test_states_and_gradients(case):
    with small_tiles():
        states = compare({**make(), **CASES[case]})
    if "weight" not in CASES[case]:
        assert 0.1 < (states > 0).double().mean() < 0.9, "some neurons must fire and some must not"


@interpreted
def test_every_row_visits_segments_of_its_own():
    visited = torch.tensor([[0, 3, 3], [2, 1, 0], [1, 1, 1]])
    with small_tiles():
        compare({**make(batch=3, heads=2, size=2, value_width=2), "visited": visited})


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@interpreted
def test_shipped_tiles(dtype):
    compare({**make(dtype, size=67, segments=3), "clamp": 30.0, "threshold": torch.tensor([4.0])})


@pytest.mark.parametrize(("size", "segments", "width", "value_width"), [(1, 11, 1, 1), (3, 1, 4, 9), (3, 2, 9, 4)])
@interpreted
def test_any_shape(size, segments, width, value_width):
    with small_tiles():
        compare(make(size=size, segments=segments, width=width, value_width=value_width))


@interpreted
def test_one_segment_leaves_nothing_to_accumulate():
    """P is 0 exactly, on its own and beside longer documents, however many spans their sums have."""
    arguments = make(segments=1, size=9)
    with small_tiles():
        for missing in (0, 3):
            padded = {
                name: torch.nn.functional.pad(arguments[name], (0, 0, 0, 0, 0, missing)) for name in ("key", "value")
            }
            first = segment_recurrence(**{**arguments, **padded})[:, :, 0]
            assert torch.equal(first, torch.zeros_like(first))


@interpreted
def test_strides_make_no_difference_and_the_bits_are_the_same_twice():
    arguments = {**make(size=2, value_width=2), **CASES["some visited, some twice"]}
    names = ("key", "value")
    with small_tiles():
        first, second = (run(segment_recurrence, arguments) for _ in range(2))
        for one, other in zip(first, second, strict=True):
            assert_close(one, other, "exact")
        turned = [arguments[name].mT.contiguous().mT.requires_grad_() for name in names]
        states = segment_recurrence(**{**arguments, **dict(zip(names, turned, strict=True))})
        assert_close(states, first[0], "exact")
        actual = torch.autograd.grad(states.sum(), turned)  # a gradient without strides
    plain = [x.detach().clone().requires_grad_() for x in turned]
    expected = reference.segment_recurrence(**{**arguments, **dict(zip(names, plain, strict=True))})
    for one, other in zip(actual, torch.autograd.grad(expected.sum(), plain), strict=True):
        assert_close(one, other, "float32 gradient")


@interpreted
def test_opcheck():
    arguments = make(size=2, segments=3, value_width=2)
    tensors = [x.requires_grad_() for x in arguments.values()]
    visited = torch.tensor([[0, 2]])
    for given in (
        (*tensors, visited, True, 1.0, True, "triton"),
        (*(x.detach() for x in tensors[:2]), None, None, None, None, False, None, False, "triton"),
    ):
        torch.library.opcheck(op.segment_recurrence, given)


@interpreted
def test_what_the_kernels_cannot_take_is_refused():
    arguments = make(size=1, segments=1)
    wide = {name: x.double() for name, x in arguments.items()}
    with pytest.raises(ValueError, match=r"cannot run on triton: key must be float32, .*; got torch\.float64"):
        segment_recurrence(**wide)
    with pytest.raises(
        ValueError, match="segment_recurrence cannot run on triton: K and V must be at most 256; got 2"
    ):
        segment_recurrence(**make(width=2, value_width=257))


# decoding


def make_step(dtype=torch.float32, rows=3, documents=2, heads=2, slots=3, size=7, width=3, value_width=5):
    generator = torch.Generator().manual_seed(size)

    def draw(*shape):
        return torch.randn(shape, generator=generator)

    document = torch.arange(rows) % documents
    slot = torch.arange(rows).mul(2) % slots
    return {
        "query": draw(rows, heads, width).to(dtype),
        "key": draw(documents, heads, slots, size, width).to(dtype),
        "value": draw(documents, heads, slots, size, value_width).to(dtype),
        "state": draw(documents, heads, slots, width, value_width).to(dtype),
        "index": (document[:, None] * heads + torch.arange(heads)) * slots + slot[:, None],
        "visible": draw(rows, size) > 0,
        "norm": draw(documents, heads, 1, value_width).exp().to(dtype),
        "documents": document,
        "sigma": torch.tensor([0.3]),
        "scale": 0.7,
    }


STEPS = {
    "all": {},
    "added up": {"sigma": None, "visible": None, "norm": None},
    "one norm, one mask": {
        "norm": torch.tensor([0.5, 2.0, 3.0, 4.0]).view(2, 2, 1, 1),
        "visible": torch.eye(7)[:1] > 0,
    },
    "segmented": {"state": None, "norm": None, "sigma": None},
    "recurrent": {"key": None, "value": None, "visible": None, "sigma": None},
}


def compare_step(arguments, row):
    wide = {name: x.double() if torch.is_tensor(x) and x.is_floating_point() else x for name, x in arguments.items()}
    given = {name: guarded(x) if torch.is_tensor(x) and x.dtype != torch.bool else x for name, x in arguments.items()}
    with guarded_allocations():
        actual = segment_step(**given)
    assert actual.dtype == arguments["query"].dtype
    assert_close(actual, step_reference(**wide), row)
    assert_close(segment_step(**given), actual, "exact")


@pytest.mark.parametrize("case", STEPS)
@interpreted
def test_step(case):
    with small_tiles():
        compare_step({**make_step(), **STEPS[case]}, "float32")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@interpreted
def test_shipped_step(dtype):
    compare_step({**make_step(dtype, documents=3, size=67, heads=1), "documents": None}, ROWS[dtype][0])


@interpreted
def test_shipped_step_of_wide_heads():
    compare_step(make_step(size=19, heads=1, width=65, value_width=130), "float32")


@interpreted
def test_a_row_that_sees_no_key_reads_the_state_alone():
    arguments = {**make_step(), "sigma": None}
    arguments["visible"][1] = False
    alone = {**arguments, **STEPS["recurrent"]}
    assert_close(segment_step(**arguments)[1], segment_step(**alone)[1], "exact")


@interpreted
def test_a_document_that_is_not_there_is_the_nearest():
    arguments = make_step()
    near, far = torch.tensor([0, 1, 1]), torch.tensor([-(2**40), 2**40, 2])
    near, far = (
        segment_step(**{**arguments, "norm": guarded(arguments["norm"]), "documents": x}) for x in (near, far)
    )
    assert_close(far, near, "exact")


@interpreted
def test_opcheck_of_the_step():
    arguments = list(make_step(size=2).values())
    torch.library.opcheck(step.op.segment_step, (*arguments, "triton"))


@interpreted
def test_a_step_that_the_kernel_cannot_take_is_refused():
    arguments = make_step(size=2)
    with pytest.raises(
        ValueError, match="segment_step cannot run on triton: a gradient is needed, and the kernel has none"
    ):
        segment_step(**{**arguments, "query": arguments["query"].requires_grad_()})
    with pytest.raises(ValueError, match="K and V must be at most 256; got 3 and 300"):
        segment_step(**make_step(value_width=300))
    wide = {name: x.double() if name in ("query", "state") else None for name, x in arguments.items()}
    with pytest.raises(ValueError, match=r"query must be float32, bfloat16 or float16; got torch\.float64"):
        segment_step(**{**wide, "index": arguments["index"], "query": wide["query"].detach(), "scale": 1.0})
