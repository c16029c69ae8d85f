"""The diagonal scan against its loop, an explicit sum and torch's machinery."""

import itertools
import math
from functools import reduce

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from hf_hybrid.kernels import diagonal_scan, dispatch, use_backend
from hf_hybrid.kernels.diagonal_scan import op, reference, torch_impl
from tests.tolerances import assert_close

ROW = {
    torch.float32: "float32",
    torch.complex64: "float32",
    torch.float64: "float64",
    torch.complex128: "float64",
}
LENGTHS = [1, 2, 3, 5, 8, 63, 64, 65, 200]


def make(length, dtype=torch.complex128, batch=2, states=3, seed=0, radius=(0.5, 1.0)):
    """a inside the unit circle, b and an initial state."""
    generator = torch.Generator().manual_seed(seed)
    wide = torch.complex128 if dtype.is_complex else torch.float64
    a = radius[0] + (radius[1] - radius[0]) * torch.rand(states, generator=generator, dtype=torch.float64)
    if dtype.is_complex:
        a = torch.polar(a, 6 * torch.rand(states, generator=generator, dtype=torch.float64))
    b = torch.randn(batch, length, states, generator=generator, dtype=wide)
    initial_state = torch.randn(batch, states, generator=generator, dtype=wide)
    return tuple(x.to(dtype) for x in (a, b, initial_state))


def run(function, a, b, initial_state, reverse=False, **options):
    """Outputs, and gradients of every input under fixed random weights."""
    leaves = [x.detach().clone().requires_grad_() for x in (a, b, initial_state)]
    outputs = function(leaves[0], leaves[1], initial_state=leaves[2], reverse=reverse, **options)
    generator = torch.Generator().manual_seed(5)
    weights = [torch.randn(x.shape, generator=generator, dtype=a.dtype).to(x.dtype) for x in outputs]
    return [*outputs, *torch.autograd.grad(outputs, leaves, weights)]


class Counter(TorchDispatchMode):
    """Counts the multiplications and additions of the scan, in calls and in elements."""

    def __init__(self):
        super().__init__()
        self.calls = self.elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.addcmul_.default:
            self.calls += 1
            self.elements += args[0].numel()
        return func(*args, **(kwargs or {}))


# function


@pytest.mark.parametrize("function", [reference.diagonal_scan, diagonal_scan], ids=["reference", "op"])
@pytest.mark.parametrize("reverse", [False, True])
def test_is_the_explicit_sum(function, reverse):
    a, b, initial_state = make(13)
    if reverse:
        b = b.flip(1)
    position = torch.arange(13)
    lag = position[:, None] - position
    powers = a ** lag.clamp(min=0)[..., None] * (lag >= 0)[..., None]
    x = torch.einsum("tsp,bsp->btp", powers, b) + a ** (position + 1)[:, None] * initial_state[:, None]
    states, last = function(a, b.flip(1) if reverse else b, initial_state=initial_state, reverse=reverse)
    assert_close(states, x.flip(1) if reverse else x, "float64")
    assert_close(last, x[:, -1], "float64")


@pytest.mark.parametrize("dtype", ROW, ids=str)
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("length", LENGTHS)
def test_matches_the_reference(length, reverse, dtype):
    inputs = make(length, dtype)
    actual, expected = run(diagonal_scan, *inputs, reverse), run(reference.diagonal_scan, *inputs, reverse)
    for index, (one, other) in enumerate(zip(actual, expected, strict=True)):
        assert one.dtype == dtype
        assert_close(one, other, ROW[dtype] + (" gradient" if index > 1 else ""))
    fresh = diagonal_scan(*inputs[:2], reverse=reverse)
    for one, other in zip(fresh, reference.diagonal_scan(*inputs[:2], reverse=reverse), strict=True):
        assert_close(one, other, ROW[dtype])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_16_bits_are_summed_in_32(dtype):
    """What is handed on is not rounded, and what is stored is rounded once."""
    a, b, initial_state = make(200, torch.float32)
    b, row = b.to(dtype), str(dtype).removeprefix("torch.")
    actual = run(diagonal_scan, a, b, initial_state)
    expected = run(reference.diagonal_scan, a, b, initial_state)
    for index, (one, other) in enumerate(zip(actual, expected, strict=True)):
        assert one.dtype == (dtype if index in (0, 3) else torch.float32)
        # d_a pairs rounded states with rounded gradients
        assert_close(one, other, "float32" if index == 1 else row if dtype == torch.float16 else f"{row} gradient")


@pytest.mark.parametrize("bounds", [[0, 9], [0, 3, 3, 70, 71, 90], [0, 0, 1, 1]])
@pytest.mark.parametrize("reverse", [False, True])
def test_packed_sequences_are_each_alone(reverse, bounds):
    a, b, _ = make(bounds[-1], batch=1)
    initial_state, cu_seqlens = make(1, batch=len(bounds) - 1)[2], torch.tensor(bounds)
    options = {"reverse": reverse, "cu_seqlens": cu_seqlens}
    actual, expected = (run(f, a, b, initial_state, **options) for f in (diagonal_scan, reference.diagonal_scan))
    for index, (one, other) in enumerate(zip(actual, expected, strict=True)):
        assert_close(one, other, "float64 gradient" if index > 1 else "float64")
    assert_close(diagonal_scan(a, b, **options)[0], reference.diagonal_scan(a, b, **options)[0], "float64")
    for n, (start, stop) in enumerate(itertools.pairwise(bounds)):
        if start < stop:
            own = {"initial_state": initial_state[n : n + 1], "reverse": reverse}
            states, last = diagonal_scan(a, b[:, start:stop], **own)
            assert_close(actual[0][:, start:stop], states, "float64")
            assert_close(actual[1][n : n + 1], last, "float64")


@pytest.mark.parametrize("reverse", [False, True])
def test_state_hand_over(reverse):
    a, b, initial_state = make(97)
    states, last = diagonal_scan(a, b, initial_state=initial_state, reverse=reverse)
    for split in torch.randint(1, 97, (8,), generator=torch.Generator().manual_seed(2)).tolist():
        parts = [b[:, :split], b[:, split:]]
        results, carried = [], initial_state
        for part in parts[::-1] if reverse else parts:
            result, carried = diagonal_scan(a, part, initial_state=carried, reverse=reverse)
            results.append(result)
        assert_close(torch.cat(results[::-1] if reverse else results, dim=1), states, "float64")
        assert_close(carried, last, "float64")


def test_every_bracketing_of_the_operator_is_the_scan():
    """(a_i, b_i) o (a_j, b_j) = (a_j a_i, a_j b_i + b_j) is associative; a fold of it is the recurrence."""

    def combine(first, second):
        return second[0] * first[0], second[0] * first[1] + second[1]

    def bracket(elements, generator):
        if len(elements) == 1:
            return elements[0]
        split = torch.randint(1, len(elements), (), generator=generator).item()
        return combine(bracket(elements[:split], generator), bracket(elements[split:], generator))

    a, b, _ = make(40)
    elements = [(a, drive) for drive in b.unbind(1)]
    folded = reduce(combine, elements)
    assert_close(folded[1], diagonal_scan(a, b)[1], "float64")
    for seed in range(5):
        for one, other in zip(bracket(elements, torch.Generator().manual_seed(seed)), folded, strict=True):
            assert_close(one, other, "float64")


@pytest.mark.parametrize("reverse", [False, True])
def test_outputs_ignore_what_comes_later_exactly(reverse):
    a, b, _ = make(100, torch.complex64)
    before, _ = diagonal_scan(a, b, reverse=reverse)
    for t in (0, 31, 32, 63, 99):
        changed = b.clone()
        changed[:, t] += 1
        after, _ = diagonal_scan(a, changed, reverse=reverse)
        unseen = slice(t + 1, None) if reverse else slice(0, t)
        assert torch.equal(after[:, unseen], before[:, unseen])
        assert (after[:, t] - before[:, t]).abs().min() > 0.5


def test_float32_stays_accurate_over_long_memories():
    """Roundings must not pile up token by token, even where nothing is ever forgotten."""
    a, b, _ = make(20_000, torch.complex64, batch=1, radius=(1.0, 1.0))
    expected, last = reference.diagonal_scan(a.to(torch.complex128), b.to(torch.complex128))
    states, actual_last = diagonal_scan(a, b)
    # a itself is off by a rounding, whose power is off by as many
    exact = diagonal_scan(a.to(torch.complex128), b.to(torch.complex128))[0]
    assert_close(exact, expected, "float64")
    assert_close(states, expected, "float32")
    assert_close(actual_last, last, "float32")


@pytest.mark.parametrize("a", [0.0, 1.0, -1.0, 1j])
def test_special_decays(a):
    b = make(21)[1]
    decay = torch.full((3,), a, dtype=torch.complex128)
    expected = {0.0: b, 1.0: b.cumsum(1)}.get(a, reference.diagonal_scan(decay, b)[0])
    assert_close(diagonal_scan(decay, b)[0], expected, "float64")


def test_inputs_are_not_written_and_may_be_strided():
    a, b, initial_state = make(30)
    copies = [x.clone() for x in (a, b, initial_state)]
    expected = run(diagonal_scan, a, b, initial_state)
    for x, y in zip((a, b, initial_state), copies, strict=True):
        assert torch.equal(x, y)
    strided = b.permute(2, 0, 1).contiguous().permute(1, 2, 0)
    assert strided.stride() != b.stride()
    assert_close(diagonal_scan(a, strided, initial_state=initial_state)[0], expected[0], "exact")
    leaf = b.clone().requires_grad_()
    diagonal_scan(a, leaf)[0].real.sum().backward()  # a gradient that is one number, expanded
    assert_close(leaf.grad, run_sum_gradient(a, b), "float64 gradient")


def run_sum_gradient(a, b):
    leaf = b.clone().requires_grad_()
    reference.diagonal_scan(a, leaf)[0].real.sum().backward()
    return leaf.grad


# gradients


@pytest.mark.parametrize("dtype", [torch.complex128, torch.float64], ids=str)
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("length", [1, 6])
def test_gradcheck(length, reverse, dtype):
    leaves = [x.requires_grad_() for x in make(length, dtype, states=2)]

    def function(a, b, initial_state):
        return diagonal_scan(a, b, initial_state=initial_state, reverse=reverse)

    assert torch.autograd.gradcheck(function, leaves)
    assert torch.autograd.gradgradcheck(function, leaves)


@pytest.mark.parametrize("reverse", [False, True])
def test_gradcheck_of_packed_sequences(reverse):
    a, b, _ = make(5, batch=1, states=1)
    leaves = [x.requires_grad_() for x in (a, b, make(1, batch=3, states=1)[2])]

    def function(a, b, initial_state):
        cu_seqlens = torch.tensor([0, 2, 2, 5])
        return diagonal_scan(a, b, initial_state=initial_state, reverse=reverse, cu_seqlens=cu_seqlens)

    assert torch.autograd.gradcheck(function, leaves)
    assert torch.autograd.gradgradcheck(function, leaves)


@pytest.mark.parametrize("wanted", [0, 1, 2])
def test_gradient_of_one_input_alone(wanted):
    inputs = make(17)
    expected = run(diagonal_scan, *inputs)[2 + wanted]
    leaf = inputs[wanted].clone().requires_grad_()
    arguments = [leaf if index == wanted else x for index, x in enumerate(inputs)]
    outputs = diagonal_scan(arguments[0], arguments[1], initial_state=arguments[2])
    generator = torch.Generator().manual_seed(5)
    weights = [torch.randn(x.shape, generator=generator, dtype=x.dtype) for x in outputs]
    assert_close(torch.autograd.grad(outputs, leaf, weights)[0], expected, "exact")


def test_one_token_has_gradients_and_memory_like_many():
    a, b, initial_state = make(1)
    for state in (None, initial_state):
        states, last = diagonal_scan(a, b, initial_state=state)
        assert len({x.untyped_storage().data_ptr() for x in (b, states, last)}) == 3
        leaf = a.clone().requires_grad_()
        states, _ = diagonal_scan(leaf, b, initial_state=state)
        (gradient,) = torch.autograd.grad(states, leaf, torch.ones_like(states))
        expected = torch.zeros_like(a) if state is None else state.conj().sum(0)
        assert_close(gradient, expected, "float64 gradient")


# cost


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("length", [1, 7, 64, 1000, 4096])
def test_work_is_linear_and_depth_logarithmic(length, reverse):
    a, b, _ = make(length, batch=1)
    with Counter() as counter:  # within the op, which no mode looks into
        torch_impl._scan_in_place(a, b, reverse)
    assert b.numel() - a.numel() <= counter.elements <= 2 * b.numel()
    assert counter.calls <= 2 * math.log2(length)


def saved_elements(*leaves):
    saved = {}

    def pack(tensor):
        saved[tensor.untyped_storage().data_ptr()] = tensor.numel()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        diagonal_scan(*leaves)
    return sum(saved.values())


def test_saved_are_the_states_and_only_where_a_is_trained():
    a, b, _ = make(500)
    assert saved_elements(a, b.clone().requires_grad_()) <= a.numel()
    assert saved_elements(a.clone().requires_grad_(), b) <= a.numel() + b.numel()


def test_final_state_does_not_keep_the_others_in_memory():
    a, b, _ = make(500, batch=1)
    _, last = diagonal_scan(a, b)
    assert last.untyped_storage().nbytes() == last.numel() * last.element_size()


# torch's machinery


@pytest.mark.parametrize("reverse", [False, True])
def test_opcheck(reverse):
    a, b, initial_state = (x.requires_grad_() for x in make(11))
    for state in (None, initial_state):
        for transposed in (False, True):
            torch.library.opcheck(op.diagonal_scan, (a, b, state, None, reverse, transposed, "auto"))
    row, cu_seqlens = b.detach()[:1].requires_grad_(), torch.tensor([0, 4, 11])
    torch.library.opcheck(op.diagonal_scan, (a, row, initial_state, cu_seqlens, reverse, False, "auto"))
    x, final = (x.detach() for x in op.diagonal_scan(a, row, initial_state, cu_seqlens, reverse, False, "auto"))
    arguments = (x, final, a.detach(), x, initial_state.detach(), cu_seqlens, reverse, "auto")
    torch.library.opcheck(op.diagonal_scan_backward, arguments)


def test_compiles_without_graph_breaks():
    torch._dynamo.reset()
    compiled = torch.compile(diagonal_scan, fullgraph=True, backend="aot_eager")
    for length in (20, 33):
        inputs = make(length)
        for one, other in zip(run(compiled, *inputs), run(diagonal_scan, *inputs), strict=True):
            assert_close(one, other, "exact")


@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64], ids=str)
def test_autocast_does_not_reach_inside(dtype):
    inputs = make(50, dtype)
    expected = run(diagonal_scan, *inputs)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        actual = run(diagonal_scan, *inputs)
    for one, other in zip(actual, expected, strict=True):
        assert_close(one, other, "exact")


def test_triton_is_refused_with_a_reason(monkeypatch):
    a, b, _ = make(5)
    with pytest.raises(ValueError, match="diagonal_scan cannot run on triton: not every tensor is on a CUDA device"):
        diagonal_scan(a, b, backend="triton")
    monkeypatch.setattr(dispatch, "INTERPRETED", True)
    with pytest.raises(ValueError, match=r"got torch\.complex128"), use_backend("triton"):
        diagonal_scan(a, b)
    expected = diagonal_scan(a, b, backend="torch")
    assert_close(diagonal_scan(a, b)[0], expected[0], "exact")
    with pytest.raises(ValueError, match="backend must be one of auto, torch, triton; got 'cuda'"):
        diagonal_scan(a, b, backend="cuda")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"a": torch.zeros(1, 3, dtype=torch.complex128)}, r"a must be \(P,\), real or complex.*got \(1, 3\)"),
        ({"a": torch.zeros(3, dtype=torch.bfloat16)}, "a must be .* got .* of torch.bfloat16"),
        ({"a": torch.zeros(4, dtype=torch.complex128)}, r"b must be \(B, T, 4\) with T > 0; got \(2, 5, 3\)"),
        ({"b": torch.zeros(2, 0, 3, dtype=torch.complex128)}, r"b must be \(B, T, 3\) with T > 0; got \(2, 0, 3\)"),
        ({"b": torch.zeros(5, 3, dtype=torch.complex128)}, r"b must be \(B, T, 3\) with T > 0; got \(5, 3\)"),
        (
            {"b": torch.zeros(2, 5, 3, dtype=torch.bfloat16)},
            "b must have a's dtype torch.complex128; got torch.bfloat16",
        ),
        ({"cu_seqlens": torch.tensor([0, 5])}, "b must have a batch of 1 with cu_seqlens; got 2"),
        (
            {"b": torch.zeros(1, 5, 3, dtype=torch.complex128), "cu_seqlens": torch.tensor([0, 5])},
            r"initial_state must be \(N, P\) = \(1, 3\); got \(2, 3\)",
        ),
        ({"b": torch.zeros(2, 5, 3)}, "b must have a's dtype torch.complex128; got torch.float32"),
        (
            {"initial_state": torch.zeros(1, 3, dtype=torch.complex128)},
            r"initial_state must be \(B, P\) = \(2, 3\); got \(1, 3\)",
        ),
        (
            {"initial_state": torch.zeros(2, 3, dtype=torch.complex64)},
            "initial_state must have a's dtype torch.complex128; got torch.complex64",
        ),
    ],
)
def test_bad_arguments(changes, message):
    a, b, initial_state = make(5)
    arguments = {"a": a, "b": b, "initial_state": initial_state, **changes}
    with pytest.raises(ValueError, match=message):
        diagonal_scan(**arguments)
