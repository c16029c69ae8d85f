"""SRformer's states against their loop, Algorithm 1, closed forms and torch's machinery."""

import math

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hf_hybrid.kernels import dispatch, segment_recurrence, segment_step, use_backend
from hf_hybrid.kernels.segment_recurrence import op, reference, step
from hf_hybrid.kernels.segment_recurrence.step.reference import segment_step as step_reference
from tests.tolerances import assert_close

ROW = {torch.float64: "float64", torch.float32: "float32", torch.bfloat16: "bfloat16"}
NEURON = ("weight", "leak", "threshold")
CASES = {
    "neurons": {},
    "clamp": {"clamp": 2.0},
    "surrogate": {"surrogate": True},
    "own segment": {"source": "segment"},
    "some visited": {"visited": torch.tensor([[0, 2, 4], [1, 3, 6]])},
    "the same visited by all, clamped": {"visited": torch.tensor([[0, 3, 6]]), "clamp": 2.0, "surrogate": True},
    "own of some visited": {"visited": torch.tensor([[0, 2], [1, 3]]), "source": "segment"},
    "no neurons": dict.fromkeys(NEURON),
    "no neurons, some visited": {"visited": torch.tensor([[0, 2, 4]]), **dict.fromkeys(NEURON)},
}
every_case = pytest.mark.parametrize("case", CASES)


def make(dtype=torch.float64, batch=2, heads=3, segments=7, size=5, key_width=4, value_width=6, seed=0):
    """Arguments under which neurons fire now and then."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    return {
        "key": draw(batch, heads, segments, size, key_width).to(dtype),
        "value": draw(batch, heads, segments, size, value_width).to(dtype),
        "weight": (draw(value_width, value_width) / 4).to(dtype),
        "leak": torch.tensor([0.6], dtype=torch.float64).to(dtype),
        "threshold": torch.tensor([0.7], dtype=torch.float64).to(dtype),
    }


def run(function, arguments):
    """States, and gradients of every floating-point input under fixed random weights."""
    leaves = {
        name: x.detach().clone().requires_grad_()
        for name, x in arguments.items()
        if isinstance(x, torch.Tensor) and x.is_floating_point()
    }
    states = function(**{**arguments, **leaves})
    weights = torch.randn(states.shape, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    return [states, *torch.autograd.grad(states, list(leaves.values()), weights.to(states.dtype))]


# function


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@every_case
def test_matches_the_reference(case, dtype):
    arguments = {**make(dtype), **CASES[case]}
    actual, expected = run(segment_recurrence, arguments), run(reference.segment_recurrence, arguments)
    if arguments["weight"] is not None:
        assert 0.1 < (expected[0] > 0).double().mean() < 0.9, "some neurons must fire and some must not"
    for index, (one, other) in enumerate(zip(actual, expected, strict=True)):
        assert one.dtype == other.dtype == dtype
        assert_close(one, other, ROW[dtype] + (" gradient" if index else ""))


@pytest.mark.parametrize(
    "shape", [{"segments": 1}, {"size": 1}, {"batch": 1, "heads": 1}, {"segments": 40, "size": 64}]
)
def test_any_shape(shape):
    arguments = make(**shape)
    actual, expected = run(segment_recurrence, arguments), run(reference.segment_recurrence, arguments)
    for index, (one, other) in enumerate(zip(actual, expected, strict=True)):
        assert_close(one, other, "float64 gradient" if index else "float64")


@pytest.mark.parametrize("function", [reference.segment_recurrence, segment_recurrence], ids=["reference", "op"])
@pytest.mark.parametrize(("leak", "threshold"), [(1.0, 0.5), (0.8, 0.6), (0.0, 2.0)])
def test_a_neuron_is_the_scalar_recurrence(function, leak, threshold):
    """A constant input x: the membrane minus all resets, which fires where it exceeds the threshold, strictly."""
    x, steps = 0.35, 30
    numbers = {"weight": torch.ones(1, 1), "leak": torch.tensor([leak]), "threshold": torch.tensor([threshold])}
    one = torch.ones(1, 1, steps, 1, 1, dtype=torch.float64)
    states = function(one, x * one, source="segment", **{name: n.double() for name, n in numbers.items()}).flatten()
    membrane, fired = 0.0, 0
    for n, state in enumerate(states.tolist(), start=1):
        membrane = leak * membrane + x
        if leak == 1:
            assert membrane == pytest.approx(n * x - threshold * fired, abs=1e-12)
        assert state == pytest.approx(max(membrane / threshold - 1, 0), abs=1e-6)
        if state > 0:
            fired += 1
            membrane -= threshold
    assert 0 < fired < steps or leak == 0


def test_a_membrane_at_its_threshold_does_not_fire():
    one = torch.ones(1, 1, 2, 1, 1)
    neuron = {name: torch.ones(1, 1) for name in NEURON}
    states = segment_recurrence(one, one / 2, source="segment", **neuron).flatten()
    assert states.tolist() == [0.0, 0.0]  # 0.5, then exactly 1.0
    more = segment_recurrence(one, one * 0.75, source="segment", **neuron).flatten()
    assert more.tolist() == [0.0, 0.5]


@pytest.mark.parametrize("clamp", [None, 0.5])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_one_segment_leaves_nothing_to_accumulate(dtype, clamp):
    """Its complement is empty, P = 0 exactly, and a neuron at rest does not fire: also beside longer documents."""
    arguments = make(dtype, segments=1, size=33)
    states = segment_recurrence(**arguments, clamp=clamp)
    assert torch.equal(states, torch.zeros_like(states))
    padded = {name: torch.nn.functional.pad(arguments[name], (0, 0, 0, 0, 0, 3)) for name in ("key", "value")}
    first = segment_recurrence(**{**arguments, **padded}, clamp=clamp)[:, :, 0]
    assert torch.equal(first, torch.zeros_like(first))


def test_without_leak_a_state_knows_its_segment_alone():
    arguments = {**make(), "leak": torch.zeros(1, dtype=torch.float64)}
    key, value = arguments["key"], arguments["value"]
    own = torch.einsum("bhmsk,bhmsv->bhmkv", key, value)
    drive = (own.sum(2, keepdim=True) - own) @ arguments["weight"].T
    assert_close(segment_recurrence(**arguments), (drive / arguments["threshold"] - 1).relu(), "float64")


def test_the_complements_are_linear_in_the_values():
    arguments = {**make(), **dict.fromkeys(NEURON)}
    other = {**arguments, "value": make(seed=3)["value"]}
    both = {**arguments, "value": 2 * arguments["value"] - other["value"]}
    expected = 2 * segment_recurrence(**arguments) - segment_recurrence(**other)
    assert_close(segment_recurrence(**both), expected, "float64")
    own = segment_recurrence(**{**arguments, "source": "segment"})
    assert_close(segment_recurrence(**arguments) + own, own.sum(2, keepdim=True).expand_as(own), "float64")


def test_a_threshold_out_of_reach_silences_all_neurons():
    states = segment_recurrence(**{**make(), "threshold": torch.tensor([1e9], dtype=torch.float64)})
    assert torch.equal(states, torch.zeros_like(states))


def test_rows_are_independent_and_equal_rows_equal():
    """What a beam of an example gets is what the example gets."""
    arguments = make(torch.float32)
    alone = segment_recurrence(**{**arguments, "key": arguments["key"][:1], "value": arguments["value"][:1]})
    beams = {name: arguments[name].repeat_interleave(3, 0) for name in ("key", "value")}
    for row in segment_recurrence(**{**arguments, **beams})[:3]:
        assert_close(row, alone[0], "exact")


@pytest.mark.parametrize("clamp", [None, 1.5])
@pytest.mark.parametrize(("length", "size", "horizon"), [(35, 5, 12), (35, 5, 7), (35, 5, 3), (33, 5, 9), (4, 5, 6)])
def test_states_are_those_of_algorithm_1(length, size, horizon, clamp):
    """Through the algorithm's outputs, from which the segmented softmax is taken away: target longer than, as long as
    and shorter than the segments are many, and a last segment that is not full."""
    arguments, generator = make(), torch.Generator().manual_seed(1)
    neuron = {name: arguments[name][:4, :4] if name == "weight" else arguments[name] for name in NEURON}
    key, value = (torch.randn(2, length, 3, 4, generator=generator, dtype=torch.float64) for _ in range(2))
    query = torch.randn(2, horizon, 3, 4, generator=generator, dtype=torch.float64)
    numbers = {"segment_size": size, "horizon": horizon, "clamp": clamp}
    full = reference.cross_attention(query, key, value, **numbers, **neuron)
    silent = {**neuron, "threshold": torch.tensor([1e9], dtype=torch.float64)}
    recurrent = full - reference.cross_attention(query, key, value, **numbers, **silent)

    number = math.ceil(length / size)
    pad = torch.nn.functional.pad
    cut = [
        pad(x, (0, 0, 0, 0, 0, number * size - length)).unflatten(1, (number, size)).permute(0, 3, 1, 2, 4)
        for x in (key, value)
    ]
    segment = torch.arange(horizon) * number // horizon
    visited = segment.unique()
    slot = torch.searchsorted(visited, segment)
    states = segment_recurrence(*cut, visited=visited[None], clamp=clamp, **neuron)[:, :, slot]
    norm = key.square().sum(1).sqrt()[:, None]
    assert_close(torch.einsum("bthk,bhtkv->bthv", query, states) / norm, recurrent, "float64")
    assert number == 1 or recurrent.abs().max() > 0.1


def test_inputs_are_not_written_and_may_be_strided():
    arguments = make()
    copies = {name: x.clone() for name, x in arguments.items()}
    expected = run(segment_recurrence, arguments)
    for name, x in arguments.items():
        assert torch.equal(x, copies[name])
    for name in ("key", "value"):
        arguments[name] = arguments[name].permute(2, 4, 0, 3, 1).contiguous().permute(2, 4, 0, 3, 1)
    assert arguments["key"].stride() != copies["key"].stride()
    for one, other in zip(run(segment_recurrence, arguments), expected, strict=True):
        assert_close(one, other, "float64 gradient")


def test_bfloat16_subtracts_in_float32():
    """P is a small difference of large products: rounded before it is taken, it would be noise."""
    arguments = {**make(torch.bfloat16, segments=2, size=64), **dict.fromkeys(NEURON)}
    arguments["key"][:, :, 1] *= 1e-3
    states = segment_recurrence(**arguments)[:, :, 0]  # the complement of the large segment is the small one
    exact = torch.matmul(arguments["key"][:, :, 1].double().mT, arguments["value"][:, :, 1].double())
    assert_close(states / 1e-3, exact / 1e-3, "bfloat16")


# gradients


# a surrogate is by design not the derivative; it is compared with the reference's
@pytest.mark.parametrize("case", [name for name, options in CASES.items() if not options.get("surrogate")])
def test_gradcheck(case):
    arguments = {**make(segments=7, size=2, heads=1, key_width=2, value_width=2), **CASES[case]}
    names = [name for name in ("key", "value", *NEURON) if arguments[name] is not None]
    leaves = [arguments[name].clone().requires_grad_() for name in names]

    def function(*leaves):
        return segment_recurrence(**{**arguments, **dict(zip(names, leaves, strict=True))})

    assert torch.autograd.gradcheck(function, leaves)


@pytest.mark.parametrize("wanted", ["key", "value", *NEURON])
def test_gradient_of_one_input_alone(wanted):
    arguments = make()
    expected = dict(zip(arguments, run(segment_recurrence, arguments)[1:], strict=True))[wanted]
    leaf = arguments[wanted].clone().requires_grad_()
    states = segment_recurrence(**{**arguments, wanted: leaf})
    weights = torch.randn(states.shape, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    assert_close(torch.autograd.grad(states, leaf, weights)[0], expected, "exact")
    assert expected.abs().max() > 0


def test_saved_are_the_inputs_alone():
    arguments = {name: x.requires_grad_() for name, x in make(segments=20, size=8).items()}
    saved = {}

    def pack(tensor):
        saved[tensor.untyped_storage().data_ptr()] = tensor.numel()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        segment_recurrence(**arguments)
    assert sum(saved.values()) == sum(x.numel() for x in arguments.values())


class Held(TorchDispatchMode):
    """The most elements that what is computed of some inputs holds at once."""

    def __init__(self, *inputs):
        super().__init__()
        self.storages, self.most = {}, 0
        self.inputs = {x.untyped_storage()._cdata for x in inputs}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **kwargs or {})
        for x in tree_leaves(result):
            storage = x.untyped_storage()
            if storage._cdata not in self.inputs:
                self.storages[storage._cdata] = StorageWeakRef(storage), storage.nbytes() // x.element_size()
        self.storages = {name: held for name, held in self.storages.items() if not held[0].expired()}
        self.most = max(self.most, sum(count for _, count in self.storages.values()))
        return result


@pytest.mark.parametrize("case", ["neurons", "surrogate", "own segment", "no neurons"])
def test_the_backward_holds_three_tensors(case):
    """Two states and later one, beside the gradients of keys and values; and slices of single segments."""
    arguments = {**make(batch=1, segments=40, size=8, key_width=8, value_width=8), **CASES[case]}
    tensors = [arguments[name] for name in ("key", "value", *NEURON)]
    options = None, arguments.get("source") != "segment", None, bool(arguments.get("surrogate"))
    grad = torch.ones_like(arguments["key"])
    with Held(grad, *(x for x in tensors if x is not None)) as held:
        op.torch_impl.backward(grad, *tensors, *options)
    size = grad.numel()
    assert 3 * size <= held.most < 3.25 * size


# torch's machinery


@pytest.mark.parametrize("case", ["clamp", "some visited", "no neurons"])
def test_opcheck(case):
    arguments = {**make(torch.float32), **CASES[case]}
    tensors = [arguments.get(name) for name in ("key", "value", *NEURON)]
    leaves = [None if x is None else x.requires_grad_() for x in tensors]
    options = (arguments.get("visited"), True, arguments.get("clamp"), False, "auto")
    torch.library.opcheck(op.segment_recurrence, (*leaves, *options))


def test_compiles_without_graph_breaks():
    torch._dynamo.reset()
    compiled = torch.compile(segment_recurrence, fullgraph=True, backend="aot_eager")
    for segments in (7, 9):
        arguments = {**make(segments=segments), "visited": torch.tensor([[0, 2, 4]])}
        for one, other in zip(run(compiled, arguments), run(segment_recurrence, arguments), strict=True):
            assert_close(one, other, "exact")


def test_autocast_does_not_reach_inside():
    arguments = make(torch.float32)
    expected = run(segment_recurrence, arguments)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        actual = run(segment_recurrence, arguments)
    for one, other in zip(actual, expected, strict=True):
        assert_close(one, other, "exact")


def test_triton_is_refused_with_a_reason(monkeypatch):
    arguments = make()
    refusal = "segment_recurrence cannot run on triton: not every tensor is on a CUDA device"
    with pytest.raises(ValueError, match=refusal):
        segment_recurrence(**arguments, backend="triton")
    monkeypatch.setattr(dispatch, "INTERPRETED", True)
    with pytest.raises(ValueError, match=r"key must be float32, .*; got torch\.float64"), use_backend("triton"):
        segment_recurrence(**arguments)
    expected = segment_recurrence(**arguments, backend="torch")
    assert_close(segment_recurrence(**arguments), expected, "exact")
    with pytest.raises(ValueError, match="backend must be one of auto, torch, triton; got 'cuda'"):
        segment_recurrence(**arguments, backend="cuda")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"key": torch.zeros(2, 3, 7, 5)}, r"key must be a floating-point \(B, H, M, S, K\) .*got \(2, 3, 7, 5\)"),
        ({"key": torch.zeros(2, 3, 0, 5, 4)}, r"with M > 0 and S > 0; got \(2, 3, 0, 5, 4\)"),
        ({"key": torch.zeros(2, 3, 7, 5, 4, dtype=torch.long)}, "key must be a floating-point .* of torch.int64"),
        ({"value": torch.zeros(2, 3, 6, 5, 6)}, r"value must be \(B, H, M, S, V\) = \(2, 3, 7, 5, 'V'\); got"),
        ({"value": torch.zeros(2, 3, 7, 5, 6)}, "value must have key's dtype torch.float64; got torch.float32"),
        ({"leak": None}, "weight, leak and threshold must be given together or not at all; got weight, threshold"),
        ({"weight": torch.zeros(4, 4)}, r"weight must be \(V, V\) = \(6, 6\); got \(4, 4\)"),
        ({"threshold": torch.ones(2)}, r"threshold must hold one number; got \(2,\)"),
        ({"visited": torch.zeros(3, 2, dtype=torch.long)}, r"visited must be integers \(B or 1, N\) with B = 2"),
        ({"visited": torch.zeros(1, 2)}, "visited must be integers .* of torch.float32"),
        ({"source": "both"}, "source must be one of complement, segment; got 'both'"),
        ({"clamp": 0.0}, "clamp must be positive or None; got 0.0"),
    ],
)
def test_bad_arguments(changes, message):
    with pytest.raises(ValueError, match=message):
        segment_recurrence(**{**make(), **changes})


# decoding


def make_step(dtype=torch.float64, rows=4, documents=2, heads=3, slots=5, size=6, width=4, value_width=6):
    """Rows that read slots of their own, of documents that they share."""
    generator = torch.Generator().manual_seed(rows)

    def draw(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    document, slot = torch.arange(rows) % documents, torch.arange(rows) * 2 % slots
    return {
        "query": draw(rows, heads, width),
        "key": draw(documents, heads, slots, size, width),
        "value": draw(documents, heads, slots, size, value_width),
        "state": draw(documents, heads, slots, width, value_width),
        "index": (document[:, None] * heads + torch.arange(heads)) * slots + slot[:, None],
        "visible": torch.rand(rows, size, generator=generator) > 0.5,
        "norm": draw(documents, heads, 1, value_width).exp(),
        "documents": document,
        "sigma": torch.tensor([0.3], dtype=torch.float64),
        "scale": 0.7,
    }


STEPS = {
    "all": {},
    "added up": {"sigma": None, "visible": None, "norm": None},
    "one norm for all features": {"norm": torch.ones(2, 3, 1, 1, dtype=torch.float64) / 3},
    "one mask for all rows": {"visible": torch.tensor([[True, False, True, True, False, True]])},
    "segmented": {"state": None, "norm": None, "sigma": None},
    "recurrent": {"key": None, "value": None, "visible": None, "sigma": None},
}


@pytest.mark.parametrize("case", STEPS)
def test_a_step_matches_the_reference(case):
    arguments = {**make_step(), **STEPS[case]}
    expected = step_reference(**arguments)
    assert_close(segment_step(**arguments), expected, "float64")
    opaque = step.op.segment_step(*arguments.values(), "torch")
    assert_close(opaque, segment_step(**arguments), "exact")


def test_a_step_reads_one_slot_and_its_visible_keys():
    arguments = make_step()
    expected = segment_step(**arguments)
    read = torch.zeros(2 * 3 * 5, dtype=torch.bool)
    read[arguments["index"].flatten()] = True
    for name in ("key", "value", "state"):
        x = arguments[name].clone()
        x.flatten(0, 2)[~read] = math.nan
        assert_close(segment_step(**{**arguments, name: x}), expected, "exact")
    alone = segment_step(**{**arguments, **STEPS["recurrent"]})
    arguments["visible"][2] = False
    changed = segment_step(**arguments)
    assert_close(changed[2], (1 - arguments["sigma"]) * alone[2], "float64")
    assert_close(changed[3], expected[3], "exact")


def test_a_step_of_a_document_per_row():
    arguments = make_step(documents=4)
    assert_close(segment_step(**{**arguments, "documents": None}), step_reference(**arguments), "float64")


def test_a_step_is_differentiable_in_torch():
    arguments = make_step(rows=2, documents=1, heads=1, slots=2, size=3, width=2, value_width=2)
    names = ("query", "key", "value", "state", "norm", "sigma")
    leaves = [arguments[name].requires_grad_() for name in names]
    assert torch.autograd.gradcheck(
        lambda *x: segment_step(**{**arguments, **dict(zip(names, x, strict=True))}), leaves
    )


@pytest.mark.parametrize("backend", ["auto", "triton"])
def test_a_step_compiles_without_graph_breaks(backend, monkeypatch):
    """Forced, the op itself is in the graph; what it does is not traced, so that it may do it on torch."""
    monkeypatch.setattr(step.op, "triton_if_chosen", lambda *_: None)
    torch._dynamo.reset()
    compiled = torch.compile(segment_step, fullgraph=True, backend="aot_eager")
    for slots in (5, 7):
        arguments = make_step(torch.float32, slots=slots)
        assert_close(compiled(**arguments, backend=backend), segment_step(**arguments), "float32")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"query": torch.zeros(4, 3)}, r"query must be a floating-point \(B, H, K\); got \(4, 3\)"),
        ({"index": torch.zeros(4, 2, dtype=torch.long)}, r"index must be \(B, H\) = \(4, 3\) of int64; got \(4, 2\)"),
        ({"index": torch.zeros(4, 3)}, "index must be .* of torch.float32"),
        ({"value": None}, "key and value must be given together, or state without them"),
        ({"key": torch.zeros(2, 3, 5, 6, 3)}, r"key must be \(D, H, N, S, K\) with H = 3 and K = 4; got"),
        ({"value": torch.zeros(2, 3, 5, 5, 6)}, r"value must be \(D, H, N, S, V\) = \(2, 3, 5, 6, 'V'\); got"),
        ({"state": torch.zeros(2, 3, 4, 4, 6)}, r"state must be .* and key's D and N; got \(2, 3, 4, 4, 6\)"),
        ({"state": torch.zeros(2, 3, 5, 4, 5)}, "state must have value's V = 6; got 5"),
        ({"norm": torch.ones(2, 3, 1, 2)}, r"norm must be \(D, H, 1, V or 1\) .*; got \(2, 3, 1, 2\)"),
        ({"state": None, "sigma": None}, "norm must be None without state"),
        ({"documents": torch.zeros(3, dtype=torch.long)}, r"documents must be \(B,\) = \(4,\) of int64; got \(3,\)"),
        ({"documents": None}, "documents must be given if norm does not have query's B = 4; got None"),
        ({"key": torch.zeros(2, 3, 5, 6, 4)}, "key must have query's dtype torch.float64; got torch.float32"),
        ({"visible": torch.ones(3, 6, dtype=torch.bool)}, r"visible must be \(B or 1, S\) of bool .*got \(3, 6\)"),
        ({"visible": torch.ones(4, 6)}, "visible must be .* of torch.float32"),
        ({"sigma": torch.ones(2)}, r"sigma must hold one number, and needs key and state; got \(2,\)"),
        ({"index": torch.full((4, 3), 30)}, "index must be at least 0 and below 30; got 30 to 30"),
        ({"index": torch.full((4, 3), -1)}, "index must be at least 0 and below 30; got -1 to -1"),
        ({"documents": torch.full((4,), 2)}, "documents must be at least 0 and below 2; got 2 to 2"),
    ],
)
def test_bad_arguments_of_a_step(changes, message):
    with pytest.raises(ValueError, match=message):
        segment_step(**{**make_step(), **changes})
