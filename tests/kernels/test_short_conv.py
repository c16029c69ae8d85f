"""Short convolution against a sum over lags, torch's conv1d, and its own algebra."""

import pytest
import torch
from torch.nn import functional as F

from hf_hybrid.kernels import short_conv, use_backend
from hf_hybrid.kernels.short_conv import merge_kernels, op, torch_impl
from hf_hybrid.kernels.short_conv.reference import short_conv as reference
from tests.tolerances import assert_close

LENGTHS = (1, 2, 63, 64, 65, 200)


def make(length, taps=5, dtype=torch.float64, batch=2, width=3, seed=0):
    generator = torch.Generator().manual_seed(seed)
    wide = torch.promote_types(dtype, torch.float32)
    u = torch.randn(batch, length, width, generator=generator, dtype=torch.float64).to(dtype)
    kernel = torch.randn(width, taps, generator=generator, dtype=torch.float64).to(wide)
    bias = torch.randn(width, generator=generator, dtype=torch.float64).to(wide)
    state = torch.randn(batch, taps - 1, width, generator=generator, dtype=torch.float64).to(dtype)
    return u, kernel, bias, state


def run(function, u, kernel, bias, **options):
    leaves = [x.detach().clone().requires_grad_() for x in (u, kernel, bias)]
    y, _ = function(*leaves, **options)
    weight = torch.randn(y.shape, generator=torch.Generator().manual_seed(5), dtype=torch.float64).to(y.dtype)
    return [y, *torch.autograd.grad(y, leaves, weight)]


@pytest.fixture
def poisoned():
    """Fill memory from torch.empty with NaN, so that an unwritten output shows."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def test_reference_is_conv1d():
    u, kernel, bias, state = make(17)
    taps = kernel.flip(1)[:, None]
    causal = F.conv1d(F.pad(u.mT, (4, 0)), taps, bias, groups=3).mT
    assert_close(reference(u, kernel, bias)[0], causal, "float64")
    centred = F.conv1d(u.mT, taps, bias, groups=3, padding="same").mT
    assert_close(reference(u, kernel, bias, causal=False, activation="silu")[0], F.silu(centred), "float64")
    continued = F.conv1d(torch.cat([state, u], 1).mT, taps, bias, groups=3).mT
    assert_close(reference(u, kernel, bias, state=state)[0], continued, "float64")


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("activation", [None, "silu"])
@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_outputs_and_gradients_match_the_reference(length, dtype, activation, causal, poisoned):
    name = str(dtype).removeprefix("torch.")
    row = {"float64": "float64 gradient", "float32": "float32 gradient"}.get(name, name)
    u, kernel, bias, _ = make(length, dtype=dtype)
    actual = run(short_conv, u, kernel, bias, causal=causal, activation=activation)
    expected = run(reference, u, kernel, bias, causal=causal, activation=activation)
    assert actual[0].dtype == dtype
    for index, (one, other) in enumerate(zip(actual, expected, strict=True)):
        assert_close(one, other, row if index else name)


@pytest.mark.parametrize("taps", [1, 2, 8, 9])
@pytest.mark.parametrize("block", [1, 40, 1 << 18])
def test_any_number_of_taps_and_blocks(taps, block, monkeypatch):
    monkeypatch.setattr(torch_impl, "_BLOCK", block)
    u, kernel, bias, _ = make(30, taps)
    for causal in (True, False) if taps % 2 else (True,):
        for one, other in zip(
            run(short_conv, u, kernel, bias, causal=causal, activation="silu"),
            run(reference, u, kernel, bias, causal=causal, activation="silu"),
            strict=True,
        ):
            assert_close(one, other, "float64 gradient")


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("splits", [[1] * 12, [12], [2, 1, 9], [1, 20, 1]])
def test_a_sequence_in_parts_gives_what_it_gives_in_one(splits, dtype):
    u, kernel, bias, state = make(sum(splits), dtype=dtype)
    for before in (None, state):
        expected, last = short_conv(u, kernel, bias, activation="silu", state=before)
        outputs = []
        for part in u.split(splits, dim=1):
            y, before = short_conv(part, kernel, bias, activation="silu", state=before)
            outputs.append(y)
        assert_close(torch.cat(outputs, dim=1), expected, str(dtype).removeprefix("torch."))
        assert_close(before, last, "exact")


def test_a_state_passes_gradients_on():
    u, kernel, bias, state = make(6)
    leaves = [u.requires_grad_(), state.requires_grad_()]
    for length in (1, 6):
        results = []
        for function in (short_conv, reference):
            y, last = function(leaves[0][:, :length], kernel, bias, state=leaves[1])
            results.append(torch.autograd.grad(y.square().sum() + last.sum(), leaves))
        for one, other in zip(*results, strict=True):
            assert_close(one, other, "float64 gradient")


@pytest.mark.parametrize("causal", [True, False])
def test_merged_kernels_are_all_of_them_side_by_side(causal):
    kernels = [make(1, taps, seed=taps)[1] for taps in (3, 9, 1)]
    u = make(40)[0]
    apart = sum(short_conv(u, kernel, causal=causal)[0] for kernel in kernels)
    merged = merge_kernels(kernels, causal=causal)
    assert merged.shape == (3, 9)
    assert_close(short_conv(u, merged, causal=causal)[0], apart, "float64")
    with pytest.raises(ValueError, match="at least one kernel"):
        merge_kernels([], causal=causal)
    if not causal:
        with pytest.raises(ValueError, match="odd number of taps unless causal; got 4"):
            merge_kernels([make(1, 4)[1]], causal=False)


@pytest.mark.parametrize("bounds", [[0, 9], [0, 3, 3, 23, 24, 30], [0, 0, 1, 1]])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_packed_sequences_are_each_alone(bounds, dtype):
    name = str(dtype).removeprefix("torch.")
    u, kernel, bias, _ = make(bounds[-1], dtype=dtype, batch=1)
    state = make(1, dtype=dtype, batch=len(bounds) - 1, seed=1)[3]
    cu_seqlens = torch.tensor(bounds, dtype=torch.int32)
    for options in ({"state": state}, {}, {"causal": False}):
        results = []
        for function in (short_conv, reference):
            leaves = [
                x.detach().clone().requires_grad_() for x in (u, kernel, bias, *options.values()) if x is not False
            ]
            given = options | ({"state": leaves[3]} if "state" in options else {})
            outputs = function(*leaves[:3], cu_seqlens=cu_seqlens, activation="silu", **given)
            total = sum(x.square().sum() for x in outputs if x is not None)
            results.append([x for x in outputs if x is not None] + list(torch.autograd.grad(total, leaves)))
        for one, other in zip(*results, strict=True):
            assert_close(one, other, f"{name} gradient")
    alone = short_conv(u[:, bounds[-2] :], kernel, bias, state=state[-1:]) if bounds[-2] < bounds[-1] else None
    if alone is not None:
        packed = short_conv(u, kernel, bias, state=state, cu_seqlens=cu_seqlens)
        assert_close(packed[0][:, bounds[-2] :], alone[0], "exact")
        assert_close(packed[1][-1:], alone[1], "exact")


def test_causality_is_exact():
    u, kernel, bias, _ = make(50)
    changed = u.clone()
    changed[:, 30:] += 1
    before, after = short_conv(u, kernel, bias)[0], short_conv(changed, kernel, bias)[0]
    assert_close(after[:, :30], before[:, :30], "exact")
    assert (after[:, 30:] != before[:, 30:]).any()


def test_only_the_inputs_are_saved():
    u, kernel, bias, _ = make(40)
    leaves = [x.requires_grad_() for x in (u, kernel, bias)]
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
        short_conv(*leaves, activation="silu")
    assert {x.data_ptr() for x in saved} == {x.data_ptr() for x in leaves}


def test_gradcheck():
    leaves = [x.requires_grad_() for x in make(6, 3, width=2)[:3]]
    for causal in (True, False):
        assert torch.autograd.gradcheck(
            lambda u, k, b, causal=causal: short_conv(u, k, b, causal=causal, activation="silu")[0], leaves
        )


def test_autocast_changes_nothing():
    u, kernel, bias, _ = make(64, dtype=torch.float32)
    expected = run(short_conv, u, kernel, bias, activation="silu")
    with torch.autocast("cpu", torch.bfloat16):
        for one, other in zip(run(short_conv, u, kernel, bias, activation="silu"), expected, strict=True):
            assert_close(one, other, "exact")


def test_strided_inputs_and_expanded_gradients():
    u, kernel, bias, _ = make(33, dtype=torch.float32)
    strided = u.mT.contiguous().mT.requires_grad_()
    short_conv(strided, kernel, bias)[0].sum().backward()
    plain = u.clone().requires_grad_()
    reference(plain, kernel, bias)[0].sum().backward()
    assert_close(strided.grad, plain.grad, "float32 gradient")


def test_opcheck():
    u, kernel, bias, state = (x.requires_grad_() for x in make(9))
    packed = (u.detach()[:1], kernel, bias, state, torch.tensor([0, 2, 9]), 0, True, "auto")
    torch.library.opcheck(op.short_conv, packed)
    torch.library.opcheck(op.short_conv, (u, kernel, bias, None, None, 0, True, "auto"))
    torch.library.opcheck(op.short_conv, (u, kernel.detach(), None, None, None, 2, False, "auto"))


def test_compiles_without_graph_breaks():
    torch._dynamo.reset()

    def function(u, kernel, bias):
        return short_conv(u, kernel, bias, activation="silu")

    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    for length in (16, 23):
        arguments = make(length)[:3]
        for one, other in zip(run(compiled, *arguments), run(function, *arguments), strict=True):
            assert_close(one, other, "float64 gradient")


def test_dispatch():
    u, kernel, _, _ = make(8)
    with pytest.raises(ValueError, match="short_conv cannot run on triton"):
        short_conv(u, kernel, backend="triton")
    with use_backend("triton"), pytest.raises(ValueError, match="cannot run on triton"):
        short_conv(u, kernel)


def test_errors_name_the_argument():
    u, kernel, bias, state = make(8)
    for arguments, options, message in (
        ((u[0], kernel), {}, r"u must be a floating-point \(B, T, D\)"),
        ((u[:, :0], kernel), {}, "T > 0"),
        ((u, kernel[:2]), {}, r"kernel must be \(D, taps\) with D = 3 and at least one tap; got \(2, 5\)"),
        ((u, kernel[:, :0]), {}, "at least one tap"),
        ((u, kernel[:, :4]), {"causal": False}, "kernel must have an odd number of taps unless causal; got 4"),
        ((u, kernel, bias[:2]), {}, r"bias must be \(D,\) with D = 3"),
        ((u, kernel), {"activation": "relu"}, "activation must be one of None, silu; got 'relu'"),
        ((u, kernel), {"state": state[:, :1]}, r"state must be \(B, J - 1, D\) = \(2, 4, 3\); got \(2, 1, 3\)"),
        ((u, kernel), {"state": state, "causal": False}, "state must be None"),
        (
            (u, kernel),
            {"cu_seqlens": torch.tensor([0, 8])},
            "u must have a batch of 1 with cu_seqlens; got 2",
        ),
        ((u[:1], kernel), {"cu_seqlens": torch.tensor([8])}, r"cu_seqlens must be \(N \+ 1,\) of int32 or int64"),
        ((u[:1], kernel), {"cu_seqlens": torch.tensor([0, 5, 7])}, r"must rise from 0 to T = 8; got \[0, 5, 7\]"),
        ((u[:1], kernel), {"cu_seqlens": torch.tensor([0, 5, 4, 8])}, "must rise from 0 to T = 8"),
        (
            (u[:1], kernel),
            {"cu_seqlens": torch.tensor([0, 5, 8]), "state": state[:1]},
            r"\(N, J - 1, D\) = \(2, 4, 3\)",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            short_conv(*arguments, **options)
