"""What the ops compute in an export to ONNX, against their references."""

import pytest
import torch

from hf_hybrid.kernels import (
    diagonal_scan,
    laplace_attention,
    linear_attention,
    local_attention,
    long_conv,
    segment_recurrence,
    short_conv,
)
from hf_hybrid.kernels.diagonal_scan import reference as scan_reference
from hf_hybrid.kernels.diagonal_scan import scan_pairs
from hf_hybrid.kernels.laplace_attention import reference as laplace_reference
from hf_hybrid.kernels.linear_attention import reference as linear_reference
from hf_hybrid.kernels.local_attention import reference as local_reference
from hf_hybrid.kernels.long_conv import filter_bank_conv, window_ends_conv
from hf_hybrid.kernels.long_conv import reference as conv_reference
from hf_hybrid.kernels.segment_recurrence import reference as segment_reference
from hf_hybrid.kernels.short_conv import reference as short_reference
from hf_hybrid.kernels.ssm_kernel import discretize, discretize_pairs, dplr_legs, ssm_taps
from hf_hybrid.kernels.ssm_kernel import reference as ssm_reference
from tests.exporting import as_for_onnx
from tests.tolerances import assert_close

LENGTHS = (1, 2, 7, 64, 65)


def draw(*shape, seed=0, dtype=torch.float64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape)), dtype=dtype)


def pairs(x):
    return torch.view_as_real(x)


def mask_of(length):
    kept = torch.ones(2, length, dtype=torch.bool)
    kept[0, : length // 3] = False
    return kept


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize(
    "options",
    [
        {"radius": 3},
        {"radius": 3, "causal": True},
        {"chunk_size": 4},
        {"chunk_size": 4, "causal": True, "scale": 1.0},
    ],
)
def test_local_attention(length, options):
    query, key, value = (draw(2, length, 2, 3, seed=seed) for seed in range(3))
    with as_for_onnx():
        actual = local_attention(query, key, value, attention_mask=mask_of(length), **options)
    expected = local_reference.local_attention(query, key, value, attention_mask=mask_of(length), **options)
    assert_close(actual, expected, "float64")
    assert_close(actual, local_attention(query, key, value, attention_mask=mask_of(length), **options), "float64")


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("options", [{}, {"causal": False}, {"norm_eps": 1e-6, "gated": True}])
def test_linear_attention(length, options):
    query, key, value = (draw(2, length, 2, 3, seed=seed) for seed in range(3))
    gate = draw(2, length, 2, 3, seed=3) if options.get("gated") else None
    options = {name: option for name, option in options.items() if name != "gated"}
    with as_for_onnx():
        actual, _ = linear_attention(query, key, value, gate=gate, **options)
    assert_close(actual, linear_reference.linear_attention(query, key, value, gate=gate, **options)[0], "float64")
    assert_close(actual, linear_attention(query, key, value, gate=gate, **options)[0], "float64")


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"causal": True, "chunk_size": 4}])
def test_laplace_attention(length, options):
    query, key, value = (draw(2, length, 2, 3, seed=seed) for seed in range(3))
    with as_for_onnx():
        actual = laplace_attention(query, key, value, attention_mask=mask_of(length), **options)
    expected = laplace_reference.laplace_attention(query, key, value, attention_mask=mask_of(length), **options)
    assert_close(actual, expected, "float64")
    assert_close(actual, laplace_attention(query, key, value, attention_mask=mask_of(length), **options), "float64")


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("causal", [False, True])
def test_short_conv(length, causal):
    u, kernel, bias = draw(2, length, 3), draw(3, 5), draw(3)
    with as_for_onnx():
        actual, _ = short_conv(u, kernel, bias, causal=causal, activation="silu")
    assert_close(actual, short_reference.short_conv(u, kernel, bias, causal=causal, activation="silu")[0], "float64")
    assert_close(actual, short_conv(u, kernel, bias, causal=causal, activation="silu")[0], "float64")


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("taps", [1, 5, 100])
@pytest.mark.parametrize("rows", [6, 2])
@pytest.mark.parametrize("bidirectional", [False, True])
def test_long_conv(length, taps, rows, bidirectional):
    u, kernel = draw(2, length, 6), draw(rows, taps)
    options = {"reverse_kernel": draw(rows, taps, seed=1) if bidirectional else None, "activation": "silu"}
    options |= {"skip": draw(6), "input_gate": draw(2, length, 6, seed=2), "gate": draw(2, length, 6, seed=3)}
    with as_for_onnx():
        actual = long_conv(u, kernel, **options)
        plain = long_conv(u, kernel)
    assert_close(actual, conv_reference.long_conv(u, kernel, **options), "float64")
    assert_close(plain, conv_reference.long_conv(u, kernel), "float64")


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("taps", [1, 5, 100])
def test_filter_bank(length, taps):
    window = min(length, 3)
    u, kernel, skip = draw(2, length, 3), draw(4, 3, taps), draw(4, 3)
    expected = conv_reference.filter_bank_conv(u, kernel, skip=skip)
    with as_for_onnx():
        assert_close(filter_bank_conv(u, kernel, skip=skip), expected, "float64")
        ends = window_ends_conv(u, kernel, skip, window)
    assert_close(ends, expected[:, :, window - 1 :: window], "float64")


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("reverse", [False, True])
def test_diagonal_scan(length, reverse):
    a, b = torch.view_as_complex(draw(3, 2)), torch.view_as_complex(draw(2, length, 3, 2))
    a = 0.9 * a / a.abs()
    split = pairs(a), pairs(b)
    with as_for_onnx():
        actual = scan_pairs(*split, reverse=reverse)
    assert_close(actual, pairs(scan_reference.diagonal_scan(a, b, reverse=reverse)[0]), "float64")
    assert_close(actual, pairs(diagonal_scan(a, b, reverse=reverse)[0]), "float64")


@pytest.mark.parametrize("neurons", [False, True])
@pytest.mark.parametrize("source", ["complement", "segment"])
def test_segment_recurrence(neurons, source):
    key, value = draw(2, 2, 5, 3, 4), draw(2, 2, 5, 3, 4, seed=1)
    options = {"visited": torch.tensor([[0, 2, 3], [1, 2, 4]]), "source": source}
    if neurons:
        options |= {"weight": draw(4, 4), "leak": torch.tensor([0.9]).double()}
        options["threshold"] = torch.tensor([0.5]).double()
    with as_for_onnx():
        actual = segment_recurrence(key, value, clamp=3.0, **options)
    assert_close(actual, segment_reference.segment_recurrence(key, value, clamp=3.0, **options), "float64")
    assert_close(actual, segment_recurrence(key, value, clamp=3.0, **options), "float64")


@pytest.mark.parametrize("discretization", ["zoh", "bilinear"])
def test_discretization(discretization):
    w = torch.view_as_complex(draw(6, 2))
    w = torch.cat([torch.complex(-w.real.abs(), w.imag), w.new_tensor([0, -1e-9, 1e-9j])])
    dt = torch.logspace(-3, 0, 9, dtype=torch.float64)
    split = pairs(w)
    with as_for_onnx():
        actual = discretize_pairs(split, dt[:, None], discretization)
    for one, other in zip(actual, discretize(w, dt, discretization), strict=True):
        assert_close(one, pairs(other), "float64")


@pytest.mark.parametrize("length", [*LENGTHS, 300])
@pytest.mark.parametrize("copies", [1, 2])
@pytest.mark.parametrize("kind", ["s4", "s4d zoh", "s4d bilinear"])
def test_taps(length, copies, kind):
    w, P, B = (
        x.repeat(copies, 1) + 0.1 * torch.view_as_complex(draw(copies, 4, 2, seed=copies)) for x in dplr_legs(8)
    )
    C, dt = torch.view_as_complex(draw(2, 4, 4, 2)), torch.logspace(-3, -0.5, 4, dtype=torch.float64)
    rule = kind.removeprefix("s4d ") if kind != "s4" else "bilinear"
    split = [pairs(x) for x in (C, B, P, w)]
    with as_for_onnx():
        actual = ssm_taps(*split[:2], split[2] if kind == "s4" else None, split[3], dt, length, rule)
    if kind == "s4":
        expected = ssm_reference.s4_kernel(C, B, P, w, dt, length)
    else:
        expected = ssm_reference.s4d_kernel(C, B, w, dt, length, discretization=rule)
    assert_close(actual, expected, "float64")


def test_packed_sequences_are_refused():
    u, cu_seqlens = draw(1, 6, 3), torch.tensor([0, 2, 6])
    with as_for_onnx(), pytest.raises(ValueError, match="cu_seqlens must be None in an export to ONNX; got 2"):
        long_conv(u, draw(3, 6), cu_seqlens=cu_seqlens)
