"""Linear attention against its matrix of weights, its recurrence, and torch's machinery."""

import itertools

import pytest
import torch
from torch.nn import functional as F

from hf_hybrid.kernels import linear_attention, use_backend
from hf_hybrid.kernels.linear_attention import op, reference, torch_impl
from tests.tolerances import assert_close

LENGTHS = (1, 2, 63, 64, 65, 200)


def make(length, dtype=torch.float64, batch=2, heads=2, width=5, value_width=3, seed=0):
    generator = torch.Generator().manual_seed(seed)
    shapes = [(batch, length, heads, width)] * 2 + [(batch, length, heads, value_width)]
    wide = torch.promote_types(dtype, torch.float32)
    tensors = [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]
    state = torch.randn(batch, heads, width, value_width, generator=generator, dtype=torch.float64).to(wide)
    return *tensors, state


def run(function, tensors, **options):
    """Outputs, and gradients of every input under fixed random weights."""
    leaves = [x.detach().clone().requires_grad_() for x in tensors]
    state = {"state": leaves[3]} if len(leaves) == 4 else {}
    outputs = [x for x in function(*leaves[:3], **state, **options) if x is not None]
    generator = torch.Generator().manual_seed(5)
    weights = [torch.randn(x.shape, generator=generator, dtype=torch.float64).to(x.dtype) for x in outputs]
    return [*outputs, *torch.autograd.grad(outputs, leaves, weights)]


@pytest.fixture
def poisoned():
    """Fill memory from torch.empty with NaN, so that an unwritten output shows."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("length", [1, 7, 30])
def test_the_two_references_agree(length):
    tensors = make(length)
    for one, other in zip(run(reference.linear_attention, tensors), run(reference.recurrent, tensors), strict=True):
        assert_close(one, other, "float64")


@pytest.fixture(params=["as it is here", "bfloat16", "float32"])
def products(request, monkeypatch):
    """In which precision tensors of bfloat16 are multiplied, whatever the machine prefers."""
    if request.param != "as it is here":
        monkeypatch.setattr(torch_impl, "operand_dtype", lambda x: getattr(torch, request.param))
    return request.param


@pytest.mark.parametrize("length", LENGTHS)
def test_products_of_bfloat16(length, products, poisoned):
    tensors = make(length, torch.bfloat16)
    for causal in (True, False):
        actual = run(linear_attention, tensors[: 4 if causal else 3], causal=causal)
        expected = run(reference.linear_attention, tensors[: 4 if causal else 3], causal=causal)
        for index, (one, other) in enumerate(zip(actual, expected, strict=True)):
            assert one.dtype == other.dtype
            is_sum = one.dtype == torch.float32 and index < 2
            assert_close(one, other, "float32" if is_sum and products == "float32" else "bfloat16")


@pytest.mark.parametrize("with_state", [False, True])
@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16])
def test_outputs_and_gradients_match_the_reference(length, dtype, with_state, poisoned):
    name = str(dtype).removeprefix("torch.")
    row = {"float64": "float64 gradient", "float32": "float32 gradient"}.get(name, name)
    tensors = make(length, dtype)[: 4 if with_state else 3]
    actual, expected = run(linear_attention, tensors), run(reference.linear_attention, tensors)
    assert actual[0].dtype == torch.promote_types(dtype, torch.float32)
    for index, (one, other) in enumerate(zip(actual, expected, strict=True)):
        # sums of float16, and products too, are in float32
        assert_close(one, other, ("float32" if dtype == torch.float16 else name) if index < 2 else row)


@pytest.mark.parametrize(("heads", "width", "value_width"), [(1, 8, 8), (1, 4, 9), (4, 1, 1)])
def test_any_number_of_heads_and_widths(heads, width, value_width):
    tensors = make(130, heads=heads, width=width, value_width=value_width)
    for one, other in zip(run(linear_attention, tensors), run(reference.linear_attention, tensors), strict=True):
        assert_close(one, other, "float64 gradient")


@pytest.mark.parametrize("block", [1, 7, 64, 300])
def test_blocks_make_no_difference(block, monkeypatch):
    tensors = make(100)
    expected = run(linear_attention, tensors)
    monkeypatch.setattr(torch_impl, "_BLOCK", block)
    for one, other in zip(run(linear_attention, tensors), expected, strict=True):
        assert_close(one, other, "float64 gradient")


@pytest.mark.parametrize("length", [1, 70])
def test_both_orders_of_the_bidirectional_product_agree(length):
    tensors = make(length)[:3]
    actual = run(linear_attention, tensors, causal=False)
    for one, other in zip(actual, run(reference.linear_attention, tensors, causal=False), strict=True):
        assert_close(one, other, "float64 gradient")


@pytest.mark.parametrize("splits", [[1] * 20, [20], [3, 1, 16], [70, 1, 1, 64, 65]])
def test_a_sequence_in_parts_gives_what_it_gives_in_one(splits):
    query, key, value, state = make(sum(splits))
    expected, last = linear_attention(query, key, value, state=state)
    outputs = []
    for q, k, v in zip(*(x.split(splits, dim=1) for x in (query, key, value)), strict=True):
        output, state = linear_attention(q, k, v, state=state)
        outputs.append(output)
    assert_close(torch.cat(outputs, dim=1), expected, "float64")
    assert_close(state, last, "float64")


@pytest.mark.parametrize("bounds", [[0, 9], [0, 3, 3, 70, 71, 90], [0, 0, 1, 1]])
def test_packed_sequences_are_each_alone(bounds):
    row, state = make(bounds[-1], batch=1)[:3], make(1, batch=len(bounds) - 1, seed=1)[3]
    cu_seqlens = torch.tensor(bounds)
    for tensors, causal in (((*row, state), True), (row, True), (row, False)):
        options = {"cu_seqlens": cu_seqlens, "causal": causal}
        actual, expected = (run(f, tensors, **options) for f in (linear_attention, reference.linear_attention))
        for one, other in zip(actual, expected, strict=True):
            assert_close(one, other, "float64 gradient")
    packed = linear_attention(*row, state=state, cu_seqlens=cu_seqlens)
    for n, (start, stop) in enumerate(itertools.pairwise(bounds)):
        if start < stop:
            alone = linear_attention(*(x[:, start:stop] for x in row), state=state[n : n + 1])
            assert_close(packed[0][:, start:stop], alone[0], "float64")
            assert_close(packed[1][n : n + 1], alone[1], "float64")


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("length", "block"), [(1, 1 << 16), (70, 1), (70, 1000), (70, 1 << 16)])
def test_norm_and_gate_are_those_of_torch(length, block, causal, dtype, monkeypatch, poisoned):
    """In one part to the last bit forwards; backwards, what is computed in one go is rounded less often."""
    monkeypatch.setattr(torch_impl, "_NORMED", block)
    *tensors, _ = make(length, dtype)
    name, gate, weight = str(dtype).removeprefix("torch."), *(make(length, dtype, seed=n)[2] for n in (3, 4))

    def by_torch(query, key, value, gate):
        output, last = linear_attention(query, key, value, causal=causal)
        n = F.rms_norm(output, output.shape[-1:], eps=1e-3).to(query.dtype)
        return n if gate is None else n * F.silu(gate), last

    def at_once(query, key, value, gate):
        return linear_attention(query, key, value, causal=causal, norm_eps=1e-3, gate=gate)

    for own in (gate, None):
        results = []
        for function in (at_once, by_torch):
            leaves = [x.detach().clone().requires_grad_() for x in (*tensors, own) if x is not None]
            output, last = function(*leaves[:3], leaves[3] if own is not None else None)
            results.append([output, last, *torch.autograd.grad(output, leaves, weight)])
        for index, (one, other) in enumerate(zip(*results, strict=True)):
            if one is None:
                assert other is None
                continue
            assert one.dtype == other.dtype
            row = {"float16": "float16", "bfloat16": "bfloat16 gradient"}.get(name, f"{name} gradient")
            exact = "exact" if block > output.numel() else name
            assert_close(one, other, row if index > 1 else exact)


def test_norm_and_gate_of_packed_sequences_and_states():
    *tensors, _ = make(30, batch=1)
    state, gate = make(1, batch=3, seed=1)[3], make(30, batch=1, seed=3)[2]
    cu_seqlens = torch.tensor([0, 4, 4, 30])
    results = []
    for function in (linear_attention, reference.linear_attention):
        leaves = [x.detach().clone().requires_grad_() for x in (*tensors, state, gate)]
        options = {"state": leaves[3], "gate": leaves[4], "norm_eps": 0.1, "cu_seqlens": cu_seqlens}
        outputs = function(*leaves[:3], **options)
        grads = torch.autograd.grad(outputs[0].exp().sum() + outputs[1].sin().sum(), leaves)
        results.append([*outputs, *grads])
    for one, other in zip(*results, strict=True):
        assert_close(one, other, "float64 gradient")


def test_saved_by_the_norm_is_what_it_gives():
    """And nothing but the inputs where nothing is trained, or no gate follows."""
    query, key, value, _ = make(64)
    gate = make(64, seed=3)[2]

    def saved(*leaves, gate=None):
        found = {}

        def pack(tensor):
            found[tensor.untyped_storage().data_ptr()] = tensor.numel()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            linear_attention(*leaves, norm_eps=1e-6, gate=gate)
        return sum(found.values())

    inputs, rows = query.numel() + key.numel() + value.numel(), value.numel() // value.shape[3]
    trained = query.clone().requires_grad_()
    assert saved(trained, key, value) == inputs + value.numel() + rows
    assert saved(trained, key, value, gate=gate) == inputs + 2 * value.numel() + rows
    _, _, n, scale = op.linear_attention_normed(query, key, value, gate, None, None, 1e-6, False, "auto")
    assert n.numel() == scale.numel() == 0


def test_an_empty_batch():
    query = torch.zeros(0, 9, 2, 4, requires_grad=True)
    output, state = linear_attention(query, query, torch.zeros(0, 9, 2, 3))
    output.sum().backward()
    assert (output.shape, state.shape, query.grad.shape) == ((0, 9, 2, 3), (0, 2, 4, 3), query.shape)


def test_causality_is_exact():
    query, key, value, _ = make(150)
    before = linear_attention(query, key, value)[0]
    for x in (query, key, value):
        x[:, 90:] += 1
    after = linear_attention(query, key, value)[0]
    assert_close(after[:, :90], before[:, :90], "exact")
    assert not torch.equal(after[:, 90:], before[:, 90:])


def test_a_key_of_zeros_counts_for_nothing():
    query, key, value, _ = make(20)
    key[:, 5:9] = 0
    kept = [*range(5), *range(9, 20)]
    shorter = linear_attention(*(x[:, kept] for x in (query, key, value)))
    longer = linear_attention(query, key, value)
    assert_close(longer[0][:, kept], shorter[0], "float64")
    assert_close(longer[1], shorter[1], "float64")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bits_stay_finite_over_long_sequences(dtype):
    query, key, value = (torch.full((1, 16384, 1, 4), 4.0, dtype=dtype) for _ in range(3))
    output, state = linear_attention(query, key, value)
    assert_close(output[0, :, 0, 0], 256.0 * torch.arange(1, 16385), "float32")
    assert_close(state, torch.full_like(state, 16384 * 16.0), "float32")


def test_the_state_of_bfloat16_is_summed_in_float32(products):
    """A block adds 64 * 9, which has few bits; their sum does not."""
    query, key, value = (torch.full((1, 16384, 1, 4), 3.0, dtype=torch.bfloat16) for _ in range(3))
    output, state = linear_attention(query, key, value)
    assert_close(output[0, :, 0, 0], 108.0 * torch.arange(1, 16385), "bfloat16")
    assert_close(state, torch.full_like(state, 16384 * 9.0), "float32")


def test_inputs_and_state_are_not_written_to():
    tensors = make(70)
    copies = [x.clone() for x in tensors]
    run(linear_attention, tensors)
    linear_attention(*(x[:, :1] for x in tensors[:3]), state=tensors[3])
    for one, other in zip(tensors, copies, strict=True):
        assert_close(one, other, "exact")


def test_gradcheck(monkeypatch):
    monkeypatch.setattr(torch_impl, "_BLOCK", 2)
    tensors = [x.requires_grad_() for x in make(5, batch=1, width=2, value_width=2)]
    assert torch.autograd.gradcheck(lambda q, k, v, s: linear_attention(q, k, v, state=s), tensors)
    assert torch.autograd.gradcheck(lambda q, k, v: linear_attention(q, k, v, causal=False)[0], tensors[:3])


def test_autocast_changes_nothing():
    tensors = make(80, torch.float32)
    expected = run(linear_attention, tensors)
    with torch.autocast("cpu", torch.bfloat16):
        for one, other in zip(run(linear_attention, tensors), expected, strict=True):
            assert_close(one, other, "exact")


def test_strided_inputs_and_expanded_gradients():
    query, key, value, _ = make(66)
    strided = [x.transpose(1, 2).contiguous().transpose(1, 2).requires_grad_() for x in (query, key, value)]
    linear_attention(*strided)[0].sum().backward()
    plain = [x.clone().requires_grad_() for x in (query, key, value)]
    reference.linear_attention(*plain)[0].sum().backward()
    for one, other in zip(strided, plain, strict=True):
        assert_close(one.grad, other.grad, "float64 gradient")


def test_opcheck():
    query, key, value, state = (x.requires_grad_() for x in make(9))
    torch.library.opcheck(op.linear_attention, (query, key, value, state, None, "auto"))
    row = [x.detach()[:1].requires_grad_() for x in (query, key, value)]
    torch.library.opcheck(op.linear_attention, (*row, state, torch.tensor([0, 4, 9]), "auto"))
    torch.library.opcheck(op.linear_attention, (query.detach(), key.detach(), value.detach(), None, None, "auto"))
    gate = value.detach().clone().requires_grad_()
    for own, before, bounds in ((gate, state, None), (None, None, None), (gate[:1].detach(), None, [0, 4, 9])):
        inputs = row if bounds else (query, key, value)
        cu_seqlens = torch.tensor(bounds) if bounds else None
        arguments = (*inputs, own, before, cu_seqlens, 1e-6, True, "auto")
        torch.library.opcheck(op.linear_attention_normed, arguments)


def test_compiles_without_graph_breaks():
    torch._dynamo.reset()
    compiled = torch.compile(linear_attention, fullgraph=True, backend="aot_eager")
    for length in (16, 70):
        tensors = make(length)
        for options in ({}, {"norm_eps": 1e-6, "gate": tensors[2]}):
            expected = run(linear_attention, tensors, **options)
            for one, other in zip(run(compiled, tensors, **options), expected, strict=True):
                assert_close(one, other, "float64 gradient")


def test_dispatch():
    query, key, value, _ = make(8)
    for causal in (True, False):
        with pytest.raises(ValueError, match="linear_attention cannot run on triton"):
            linear_attention(query, key, value, causal=causal, backend="triton")
    with use_backend("triton"), pytest.raises(ValueError, match="cannot run on triton"):
        linear_attention(query[:, :1], key[:, :1], value[:, :1])


def test_errors_name_the_argument():
    query, key, value, state = make(8)
    for arguments, message in (
        ((query[0], key, value), r"query must be a floating-point \(B, T, H, K\)"),
        ((query[:, :0], key, value), "T > 0"),
        ((query, key[:, :4], value), "key must have query's shape"),
        ((query, key, value[:, :4]), r"value must be \(B, T, H, V\)"),
        ((query, key, value.float()), "value must have query's dtype torch.float64; got torch.float32"),
    ):
        with pytest.raises(ValueError, match=message):
            linear_attention(*arguments)
    with pytest.raises(ValueError, match=r"state must be \(B, H, K, V\) = \(2, 2, 5, 3\); got \(1, 2, 5, 3\)"):
        linear_attention(query, key, value, state=state[:1])
    with pytest.raises(ValueError, match="query must have a batch of 1 with cu_seqlens; got 2"):
        linear_attention(query, key, value, cu_seqlens=torch.tensor([0, 8]))
    with pytest.raises(ValueError, match=r"state must be \(N, H, K, V\) = \(1, 2, 5, 3\); got \(2, 2, 5, 3\)"):
        linear_attention(*(x[:1] for x in (query, key, value)), state=state, cu_seqlens=torch.tensor([0, 8]))
    with pytest.raises(ValueError, match="gate must be None when norm_eps is None"):
        linear_attention(query, key, value, gate=value)
    with pytest.raises(
        ValueError, match=r"gate must be \(B, T, H, V\) = .* of torch.float64; got .* of torch.float32"
    ):
        linear_attention(query, key, value, norm_eps=1e-6, gate=value.float())
    with pytest.raises(ValueError, match="norm_eps must be positive; got 0"):
        linear_attention(query, key, value, norm_eps=0)
    with pytest.raises(ValueError, match="state must be None unless causal"):
        linear_attention(query, key, value, state=state, causal=False)
