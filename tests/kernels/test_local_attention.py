import itertools
import math
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from hf_hybrid.kernels.local_attention import local_attention, op, reference, torch_impl
from tests.matrix import some
from tests.tolerances import assert_close

HEADS, KEY_DIM, VALUE_DIM = 2, 8, 4
NAMES = ("output", "query", "key", "value", "bias")
GRADIENT_ROW = {
    torch.float64: "float64 gradient",
    torch.float32: "float32 gradient",
    torch.bfloat16: "bfloat16 gradient",
}
ROW = {torch.float64: "float64", torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}
SHAPES = [
    {"radius": 0},
    {"radius": 7},
    {"radius": 40},
    {"radius": 300},
    {"chunk_size": 1},
    {"chunk_size": 24},
    {"chunk_size": 150},
    {"chunk_size": 1000},
]


@pytest.fixture(autouse=True)
def _one_thread():
    """The tensors are so small that threads only wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def shape_id(shape: dict[str, int]) -> str:
    return "-".join(f"{name}{number}" for name, number in shape.items())


def reach_of(shape: dict[str, int]) -> int:
    return shape.get("radius", shape.get("chunk_size", 0) - 1)


def make_inputs(
    length: int,
    shape: dict[str, int],
    causal: bool,
    dtype: torch.dtype = torch.float32,
    batch: int = 2,
    heads: int = HEADS,
    seed: int = 0,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Query, key and value as strided views, the way a projection hands them over, and a bias."""
    generator = torch.Generator().manual_seed(seed)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    joint = torch.randn(batch, length, heads, 2 * KEY_DIM + VALUE_DIM, generator=generator, dtype=wide).to(dtype)
    reach = reach_of(shape)
    bias = torch.randn(heads, reach + 1 if causal else 2 * reach + 1, generator=generator, dtype=wide)
    query, key, value = joint.split([KEY_DIM, KEY_DIM, VALUE_DIM], dim=-1)
    return tuple(x.detach().requires_grad_() for x in (query, key, value, bias))


def make_mask(kind: str, batch: int, length: int) -> Tensor | None:
    mask = torch.ones(batch, length, dtype=torch.int64)
    if kind == "right":
        mask[-1, length - length // 3 :] = 0
    elif kind == "left":
        mask[-1, : length // 3] = 0
    elif kind == "holes":
        mask[0, ::3] = 0
    elif kind == "row":
        mask[0] = 0
    return None if kind == "none" else mask


def run(function, inputs, grad=None, **options) -> list[Tensor]:
    output = function(*inputs[:3], bias=inputs[3], **options)
    generator = torch.Generator().manual_seed(5)
    grad = torch.randn(output.shape, generator=generator).to(output.dtype) if grad is None else grad
    return [output.detach(), *torch.autograd.grad(output, inputs, grad)]


def oracle(query, key, value, bias, mask, radius, chunk_size, causal):
    """torch's own attention with every pair of positions decided by the definition, one at a time."""
    batch, length, heads, _ = query.shape
    added = torch.full((batch, heads, length, length), -math.inf, dtype=query.dtype)
    dead = torch.zeros(batch, length, dtype=torch.bool)
    reach = radius if radius is not None else chunk_size - 1
    for b in range(batch):
        kept = [t for t in range(length) if mask is None or mask[b, t]]
        start = kept[0] if kept else 0
        for t in range(length):
            dead[b, t] = t not in kept
            for j in range(length):
                near = (
                    abs(t - j) <= radius
                    if radius is not None
                    else (t - start) // chunk_size == (j - start) // chunk_size
                )
                if t in kept and j in kept and near and not (causal and j > t):
                    added[b, :, t, j] = bias[:, j - t + reach]
    added[dead[:, None].expand(-1, heads, -1)] = 0.0
    swapped = [x.transpose(1, 2) for x in (query, key, value)]
    output = torch.nn.functional.scaled_dot_product_attention(*swapped, attn_mask=added).transpose(1, 2)
    return output.masked_fill(dead[:, :, None, None], 0.0)


@pytest.mark.parametrize("implementation", [reference.local_attention, local_attention], ids=["reference", "op"])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("kind", ["none", "right", "left", "holes", "row"])
@pytest.mark.parametrize("shape", [{"radius": 0}, {"radius": 3}, {"radius": 90}, {"chunk_size": 4}], ids=shape_id)
def test_matches_the_definition(implementation, shape, kind, causal):
    query, key, value, bias = make_inputs(17, shape, causal, torch.float64)
    mask = make_mask(kind, 2, 17)
    expected = oracle(query, key, value, bias, mask, shape.get("radius"), shape.get("chunk_size"), causal)
    actual = implementation(query, key, value, bias=bias, attention_mask=mask, causal=causal, **shape)
    assert_close(actual, expected, "float64")


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=shape_id)
@pytest.mark.parametrize("length", some([1, 63, 64, 65, 200, 700], 1, 64, 65, 200))
def test_matches_the_reference(length, shape, causal, dtype):
    inputs = make_inputs(length, shape, causal, dtype)
    for kind in ("none", "right", "left", "row"):
        options = {"attention_mask": make_mask(kind, 2, length), "causal": causal, **shape}
        actual, expected = run(local_attention, inputs, **options), run(reference.local_attention, inputs, **options)
        for name, a, e in zip(NAMES, actual, expected, strict=True):
            assert_close(a, e, ROW[dtype] if name == "output" else GRADIENT_ROW[dtype])


def test_matches_the_reference_in_float16():
    inputs = make_inputs(200, {"radius": 40}, False, torch.float16)
    actual, expected = (run(f, inputs, radius=40)[0] for f in (local_attention, reference.local_attention))
    assert_close(actual, expected, "float16")


@pytest.mark.parametrize("budget", [1, 2**12, 2**20], ids=lambda budget: f"budget{budget}")
@pytest.mark.parametrize("shape", [{"radius": 20}, {"chunk_size": 90}, {"chunk_size": 16}], ids=shape_id)
def test_every_way_to_batch_the_blocks(monkeypatch, shape, budget):
    monkeypatch.setitem(torch_impl._BLOCK_ELEMENTS, "cpu", budget)
    inputs = make_inputs(300, shape, False, torch.float64, batch=3, heads=3)
    options = {"attention_mask": make_mask("left", 3, 300), **shape}
    actual, expected = run(local_attention, inputs, **options), run(reference.local_attention, inputs, **options)
    for a, e in zip(actual, expected, strict=True):
        assert_close(a, e, "float64 gradient")


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("shape", [{"radius": 3}, {"radius": 50}, {"chunk_size": 5}], ids=shape_id)
def test_gradcheck(shape, causal):
    length = 40 if shape == {"radius": 3} else 9
    query, key, value, bias = make_inputs(length, shape, causal, torch.float64, heads=1)
    inputs = [x.detach().requires_grad_() for x in (query[..., :2], key[..., :2], value[..., :1], bias)]
    mask = make_mask("left", 2, length)

    def function(query, key, value, bias):
        options = {"attention_mask": mask, "causal": causal, "scale": 0.7, **shape}
        return local_attention(query, key, value, bias=bias, **options)

    assert torch.autograd.gradcheck(function, inputs)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("shape", [{"radius": 149}, {"radius": 10**6}, {"chunk_size": 150}, {"chunk_size": 10**6}])
def test_a_neighbourhood_of_everything_is_full_attention(shape, causal):
    query, key, value, _ = make_inputs(150, {"radius": 0}, causal, torch.float64)
    swapped = [x.transpose(1, 2) for x in (query, key, value)]
    expected = torch.nn.functional.scaled_dot_product_attention(*swapped, is_causal=causal).transpose(1, 2)
    assert_close(local_attention(query, key, value, causal=causal, **shape), expected, "float64")


@pytest.mark.parametrize("shape", [{"radius": 30}, {"radius": 500}, {"chunk_size": 70}], ids=shape_id)
def test_causal_outputs_ignore_the_future_exactly(shape):
    query, key, value, bias = make_inputs(300, shape, True)
    before = local_attention(query, key, value, bias=bias, causal=True, **shape)
    for t in (64, 127, 250):
        changed = [x.detach().clone() for x in (query, key, value)]
        for x in changed:
            x[:, t] += 1.0
        after = local_attention(*changed, bias=bias, causal=True, **shape)
        assert torch.equal(after[:, :t], before[:, :t])
        assert not torch.equal(after[:, t], before[:, t])


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("radius", [0, 9, 100])
def test_receptive_field_of_a_window(radius, causal):
    length, t = 300, 140
    query, key, value, bias = make_inputs(length, {"radius": radius}, causal)
    output = local_attention(query, key, value, bias=bias, radius=radius, causal=causal)
    (gradient,) = torch.autograd.grad(output[:, t].sum(), value)
    seen = gradient.abs().sum((0, 2, 3)).nonzero().flatten().tolist()
    assert seen == list(range(t - radius, t + 1 if causal else t + radius + 1))


@pytest.mark.parametrize("causal", [False, True])
def test_receptive_field_of_a_chunk(causal):
    query, key, value, bias = make_inputs(300, {"chunk_size": 80}, causal)
    output = local_attention(query, key, value, bias=bias, chunk_size=80, causal=causal)
    (gradient,) = torch.autograd.grad(output[:, 170].sum(), value)
    seen = gradient.abs().sum((0, 2, 3)).nonzero().flatten().tolist()
    assert seen == list(range(160, 171 if causal else 240))


@pytest.mark.parametrize("dropout", [0.0, 0.2])
@pytest.mark.parametrize("shape", [{"radius": 30}, {"chunk_size": 70}], ids=shape_id)
def test_two_runs_give_the_same_bits(shape, dropout):
    inputs = make_inputs(500, shape, False)
    results = []
    for _ in range(2):
        torch.manual_seed(3)
        results.append(run(local_attention, inputs, dropout=dropout, **shape))
    for first, second in zip(*results, strict=True):
        assert torch.equal(first, second)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize(
    "shape", [{"radius": 20}, {"radius": 400}, {"chunk_size": 48}, {"chunk_size": 100}], ids=shape_id
)
def test_padding_changes_nothing(shape, side, causal):
    length, pad = 150, 37
    short = make_inputs(length, shape, causal, batch=1)
    kept = slice(pad, None) if side == "left" else slice(0, length)
    padded = [torch.full((1, length + pad, *x.shape[2:]), 50.0) for x in short[:3]]
    for x, y in zip(padded, short[:3], strict=True):
        x[:, kept] = y.detach()
        x.requires_grad_()
    mask = torch.zeros(1, length + pad)
    mask[:, kept] = 1
    grad = torch.randn(1, length + pad, HEADS, VALUE_DIM, generator=torch.Generator().manual_seed(1))
    expected = run(local_attention, short, grad[:, kept], causal=causal, **shape)
    actual = run(local_attention, [*padded, short[3]], grad, causal=causal, attention_mask=mask, **shape)
    for name, a, e in zip(NAMES, actual, expected, strict=True):
        assert_close(a if name == "bias" else a[:, kept], e, "float32" if name == "output" else "float32 gradient")
        if name != "bias":
            a[:, kept] = 0
            assert not a.any(), f"{name} must be 0 at padding"


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.float32, torch.bfloat16], ids=str)
def test_masks_of_every_dtype(dtype):
    query, key, value, bias = make_inputs(100, {"radius": 5}, False)
    mask = make_mask("holes", 2, 100)
    expected = local_attention(query, key, value, bias=bias, radius=5, attention_mask=mask)
    assert torch.equal(
        local_attention(query, key, value, bias=bias, radius=5, attention_mask=mask.to(dtype)), expected
    )
    assert not torch.equal(local_attention(query, key, value, bias=bias, radius=5), expected)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_large_scores_and_biases_stay_finite(dtype):
    query, key, value, _ = make_inputs(100, {"radius": 5}, False, dtype)
    # Largest where the zero queries that fill the last block see real keys: their weights must not overflow either.
    bias = torch.linspace(500, -500, 11, dtype=dtype).expand(HEADS, -1).clone().requires_grad_()
    inputs = [(query * 30).detach().requires_grad_(), key, value, bias]
    options = {"radius": 5, "attention_mask": make_mask("row", 2, 100)}
    actual, expected = run(local_attention, inputs, **options), run(reference.local_attention, inputs, **options)
    assert all(x.isfinite().all() for x in actual)
    if dtype == torch.float64:  # float32 scores of 1000 are rounded by more than any row of the table allows
        for a, e in zip(actual, expected, strict=True):
            assert_close(a, e, "float64 gradient")


def test_inputs_are_not_written():
    inputs = make_inputs(100, {"radius": 5}, False)
    copies = [x.detach().clone() for x in inputs]
    run(local_attention, inputs, radius=5, dropout=0.1, attention_mask=make_mask("left", 2, 100))
    for x, y in zip(inputs, copies, strict=True):
        assert torch.equal(x, y)


# Dropout


def dropout_weights(dropout: float, length: int = 400, radius: int = 30, seed: int = 0) -> Tensor:
    """The weights after dropout, times the number of visible keys: 0 where dropped, read off through the values."""
    torch.manual_seed(seed)
    zeros = torch.zeros(1, length, 1, KEY_DIM)
    return local_attention(zeros, zeros, torch.eye(length)[None, :, None], radius=radius, dropout=dropout)[0, :, 0]


@pytest.mark.parametrize("dropout", [1e-3, 0.1, 0.5, 0.9])
def test_dropout_has_its_rate_and_keeps_the_mean(dropout):
    weights = torch.stack([dropout_weights(dropout, seed=seed) for seed in range(8)])
    visible = dropout_weights(0.0)
    ratio = (weights / visible)[:, visible > 0]
    count = ratio.numel()
    assert (ratio == 0).double().mean().item() == pytest.approx(dropout, abs=5 * math.sqrt(dropout / count))
    assert ratio.mean().item() == pytest.approx(1.0, abs=5 * math.sqrt(dropout / (1 - dropout) / count))
    assert_close(
        ratio[ratio > 0], torch.full_like(ratio[ratio > 0], 1 / (1 - round(dropout * 2**16) / 2**16)), "float32"
    )


def test_dropout_differs_between_seeds_heads_rows_and_batches_of_blocks(monkeypatch):
    monkeypatch.setitem(torch_impl._BLOCK_ELEMENTS, "cpu", 64 * 128)
    assert not torch.equal(dropout_weights(0.5, seed=0), dropout_weights(0.5, seed=1))
    torch.manual_seed(0)
    zeros = torch.zeros(2, 128, 2, KEY_DIM)
    value = torch.eye(128)[None, :, None].expand(2, -1, 2, -1)
    kept = local_attention(zeros, zeros, value, chunk_size=64, dropout=0.5) > 0
    blocks = [kept[b, c : c + 64, h, c : c + 64].flatten() for b in range(2) for h in range(2) for c in (0, 64)]
    agreement = [(x == y).double().mean().item() for i, x in enumerate(blocks) for y in blocks[:i]]
    assert max(abs(a - 0.5) for a in agreement) < 5 * 0.5 / 64


def test_dropout_draws_from_the_global_generator_only_when_on():
    inputs = make_inputs(50, {"radius": 5}, False)
    state = torch.get_rng_state()
    plain = run(local_attention, inputs, radius=5)
    assert torch.equal(torch.get_rng_state(), state)
    run(local_attention, inputs, radius=5, dropout=0.1)
    assert not torch.equal(torch.get_rng_state(), state)
    for a, b in zip(run(local_attention, inputs, radius=5), plain, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("shape", [{"radius": 30}, {"chunk_size": 40}], ids=shape_id)
def test_gradients_under_dropout_are_those_of_the_same_mask(shape):
    inputs = make_inputs(150, shape, False, torch.float64)
    generator = torch.Generator().manual_seed(1)
    grad = torch.randn(2, 150, HEADS, VALUE_DIM, generator=generator, dtype=torch.float64)

    def loss(*inputs: Tensor) -> Tensor:
        torch.manual_seed(11)
        return (local_attention(*inputs[:3], bias=inputs[3], dropout=0.4, **shape) * grad).sum()

    gradients = torch.autograd.grad(loss(*inputs), inputs)
    for i, gradient in enumerate(gradients):
        direction = torch.randn(gradient.shape, generator=generator, dtype=torch.float64)
        up, down = ([x + e * direction if j == i else x for j, x in enumerate(inputs)] for e in (1e-5, -1e-5))
        slope = (loss(*up) - loss(*down)).item() / 2e-5
        assert (gradient * direction).sum().item() == pytest.approx(slope, rel=1e-6), NAMES[1 + i]


def test_checkpointing_repeats_the_dropout_mask():
    inputs = make_inputs(200, {"radius": 30}, False)

    def function(query, key, value, bias):
        return local_attention(query, key, value, bias=bias, radius=30, dropout=0.4)

    results = []
    for wrapped in (False, True):
        torch.manual_seed(2)
        output = checkpoint(function, *inputs, use_reentrant=False) if wrapped else function(*inputs)
        torch.rand(3)
        results.append([output, *torch.autograd.grad(output.square().sum(), inputs)])
    for plain, recomputed in zip(*results, strict=True):
        assert torch.equal(plain, recomputed)


# Memory


def saved_bytes(length: int) -> int:
    storages = {}

    def pack(tensor: Tensor) -> Tensor:
        storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    inputs = make_inputs(length, {"radius": 20}, False, batch=1)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        local_attention(*inputs[:3], bias=inputs[3], radius=20, dropout=0.1)
    return sum(storages.values())


def test_saved_memory_is_the_inputs_the_output_and_a_number_per_query():
    per_token = 4 * HEADS * (2 * KEY_DIM + 2 * VALUE_DIM + 1)
    for length in (512, 2048):
        assert saved_bytes(length) <= per_token * length + 1024


@pytest.mark.parametrize(("shape", "causal"), [({"radius": 32}, False), ({"chunk_size": 64}, True)])
def test_scratch_memory_does_not_grow_with_the_number_of_pairs(monkeypatch, shape, causal):
    walks = []
    prepare = torch_impl._Walk.__init__

    def record(walk, *arguments):
        prepare(walk, *arguments)
        walks.append(walk)

    monkeypatch.setattr(torch_impl._Walk, "__init__", record)
    largest = []
    for length in (2048, 8192):
        run(local_attention, make_inputs(length, shape, causal, batch=1), dropout=0.1, causal=causal, **shape)
        largest.append(sum(x.numel() for walk in walks for x in walk.pool.values()))
        walks.clear()
    assert largest[1] <= 4 * largest[0]


def pairs_computed(length: int, radius: int, causal: bool) -> int:
    _, _, _, blocks = torch_impl._layout(length, radius, None, causal)
    return sum(kind.number * kind.rows * kind.span for kind in blocks)


@pytest.mark.parametrize("radius", [80, 99, 10**9])
def test_cost_does_not_exceed_full_attention(radius):
    assert pairs_computed(100, radius, False) <= 100 * 100


def test_the_blocks_hold_few_pairs_outside_the_window():
    assert pairs_computed(4096, 128, False) <= 1.25 * 4096 * 257
    assert pairs_computed(4096, 128, True) <= 1.5 * 4096 * 129


# torch's machinery


def op_arguments(**changes):
    query, key, value, bias = make_inputs(70, {"radius": 5}, False)
    mask, seed = make_mask("left", 2, 70).bool(), torch.tensor(7)
    options = {"radius": 5, "chunk_size": None, "causal": False, "scale": 0.3, "dropout": 0.1, **changes}
    options["backend"] = "torch"
    return (query, key, value, bias, mask, seed, None, *options.values())


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("changes", [{}, {"radius": None, "chunk_size": 6}], ids=["window", "chunk"])
def test_opcheck(changes, packed):
    arguments = op_arguments(**changes)
    if packed:
        query, key, value, bias, mask, seed, _, *options = arguments
        row = [x[:1].detach().requires_grad_() for x in (query, key, value)]
        arguments = (*row, bias, mask[:1], seed, torch.tensor([0, 30, 70]), *options)
    torch.library.opcheck(op.local_attention, arguments)
    output, log_sum = op.local_attention(*arguments)
    arguments = [x.detach() if isinstance(x, Tensor) else x for x in arguments]
    saved = (output.detach(), log_sum.detach())
    torch.library.opcheck(op.local_attention_backward, (torch.ones_like(output), *saved, *arguments))


@pytest.mark.parametrize("shape", [{"radius": 5}, {"chunk_size": 16}], ids=shape_id)
def test_compiles_without_graph_breaks(shape):
    compiled = torch.compile(local_attention, fullgraph=True, backend="aot_eager")
    for length, mask in ((70, None), (91, make_mask("left", 2, 91))):
        inputs = make_inputs(length, shape, False)
        options = {"attention_mask": mask, **shape}
        for a, e in zip(run(compiled, inputs, **options), run(local_attention, inputs, **options), strict=True):
            assert torch.equal(a, e)
    dropped = run(compiled, inputs, dropout=0.3, **options)
    assert all(x.isfinite().all() for x in dropped)
    assert not torch.equal(dropped[0], run(compiled, inputs, dropout=0.3, **options)[0])


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("shape", [{"radius": 7}, {"radius": 300}, {"chunk_size": 24}], ids=shape_id)
@pytest.mark.parametrize("bounds", [[0, 9], [0, 3, 3, 150, 151, 190], [0, 0, 1, 1]], ids=str)
def test_packed_sequences_are_each_alone(bounds, shape, causal):
    query, key, value, bias = inputs = make_inputs(bounds[-1], shape, causal, torch.float64, batch=1)
    for kind in ("none", "holes"):
        mask = make_mask(kind, 1, bounds[-1])
        options = {"attention_mask": mask, "causal": causal, **shape}
        actual = run(local_attention, inputs, cu_seqlens=torch.tensor(bounds), **options)
        expected = run(reference.local_attention, inputs, cu_seqlens=torch.tensor(bounds).int(), **options)
        for a, e in zip(actual, expected, strict=True):
            assert_close(a, e, "float64 gradient")
        for start, stop in itertools.pairwise(bounds):
            if start < stop:
                own = {**options, "attention_mask": None if mask is None else mask[:, start:stop]}
                alone = local_attention(*(x[:, start:stop] for x in (query, key, value)), bias=bias, **own)
                assert_close(actual[0][:, start:stop], alone, "float64")


def test_packed_sequences_have_dropout_masks_of_their_own():
    inputs = make_inputs(30, {"radius": 4}, False, batch=1)
    query, key, value, bias = (x.repeat(1, 2, 1, 1) if x.dim() == 4 else x for x in inputs)
    options = {"bias": bias, "radius": 4, "cu_seqlens": torch.tensor([0, 30, 60])}
    assert_close(*local_attention(query, key, value, **options).split(30, dim=1), "exact")
    results = []
    for _ in range(2):
        torch.manual_seed(3)
        results.append(local_attention(query, key, value, dropout=0.5, **options))
    assert_close(*results, "exact")
    assert not torch.equal(*results[0].split(30, dim=1))


def test_autocast_does_not_reach_inside():
    inputs = make_inputs(100, {"radius": 5}, False)
    results = []
    for context in (nullcontext(), torch.autocast("cpu", torch.bfloat16)):
        with context:
            results.append(run(local_attention, inputs, radius=5))
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)


def test_second_derivatives_are_refused():
    query, key, value, bias = make_inputs(20, {"radius": 5}, False)
    output = local_attention(query, key, value, bias=bias, radius=5)
    (gradient,) = torch.autograd.grad(output.square().sum(), query, create_graph=True)
    with pytest.raises(RuntimeError, match="no autograd formula"):
        gradient.sum().backward()


def test_triton_is_refused_with_a_reason():
    query, key, value, bias = make_inputs(20, {"radius": 5}, False)
    with pytest.raises(ValueError, match="cannot run on triton"):
        local_attention(query, key, value, bias=bias, radius=5, backend="triton")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"radius": None}, "exactly one of radius and chunk_size must be given; got radius=None, chunk_size=None"),
        ({"chunk_size": 4}, "exactly one of radius and chunk_size must be given; got radius=5, chunk_size=4"),
        ({"radius": -1}, "radius must be at least 0; got -1"),
        ({"radius": None, "chunk_size": 0}, "chunk_size must be a positive integer; got 0"),
        ({"dropout": 1.0}, "dropout must be at least 0 and below 1; got 1.0"),
        ({"dropout": -0.1}, "dropout must be at least 0 and below 1; got -0.1"),
        ({"bias": torch.zeros(2, 6)}, r"bias must have shape \(H, 2 \* reach \+ 1\) = \(2, 11\).*got \(2, 6\)"),
        ({"causal": True}, r"bias must have shape \(H, reach \+ 1\) = \(2, 6\).*got \(2, 11\)"),
        ({"bias": torch.zeros(2, 11).long()}, "bias must be of a floating dtype; got torch.int64"),
        ({"attention_mask": torch.ones(2, 19)}, r"attention_mask must have shape .* = \(2, 20\); got \(2, 19\)"),
        ({"cu_seqlens": torch.tensor([0, 20])}, "query must have a batch of 1 with cu_seqlens; got 2"),
        ({"cu_seqlens": torch.tensor([0.0, 20.0])}, r"cu_seqlens must be \(N \+ 1,\) of int32 or int64"),
        ({"query": torch.zeros(2, 20, 8)}, r"query must have shape \(B, T, H, K\); got \(2, 20, 8\)"),
        ({"query": torch.zeros(2, 0, 2, 8)}, "query must hold at least one token"),
        ({"query": torch.zeros(2, 20, 2, 8).long()}, "query must be of a floating dtype; got torch.int64"),
        ({"key": torch.zeros(2, 21, 2, 8)}, r"key must have query's shape .*; got \(2, 21, 2, 8\)"),
        ({"value": torch.zeros(2, 20, 3, 4)}, r"value must have shape .*; got \(2, 20, 3, 4\)"),
        (
            {"value": torch.zeros(2, 20, 2, 4).bfloat16()},
            "value must have query's dtype torch.float32; got torch.bfloat16",
        ),
    ],
)
def test_errors_name_the_argument_its_value_and_the_rule(changes, message):
    query, key, value, bias = make_inputs(20, {"radius": 5}, False)
    arguments = {"query": query, "key": key, "value": value, "bias": bias, "radius": 5, **changes}
    with pytest.raises(ValueError, match=message):
        local_attention(**arguments)
