"""Long convolution against the double sum, torch's conv1d, and its own algebra."""

import pytest
import torch
from torch.nn import functional as F

from hf_hybrid.kernels import dispatch
from hf_hybrid.kernels.long_conv import blocks, fft_length, kernel_spectrum, long_conv, op, spectral_conv
from hf_hybrid.kernels.long_conv.reference import long_conv as reference
from tests.tolerances import assert_close

LENGTHS = (1, 2, 63, 64, 65, 200)


def make(length, taps=None, width=3, batch=2, dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    taps = length if taps is None else taps

    def draw(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    u = draw(batch, length, width).to(dtype)
    taps_dtype = torch.promote_types(dtype, torch.float32)
    return u, *(draw(*shape).to(taps_dtype) for shape in ((width, taps), (width, taps), (width,)))


@pytest.fixture
def poisoned():
    """Fill memory from torch.empty with NaN, so that an unwritten output shows."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def test_reference_is_conv1d():
    u, kernel, reverse, skip = make(17)
    causal = F.conv1d(F.pad(u.mT, (16, 0)), kernel.flip(1)[:, None], groups=3).mT
    assert_close(reference(u, kernel), causal, "float64")
    future = F.conv1d(F.pad(u.mT, (0, 17)), reverse[:, None], groups=3)[..., 1:].mT
    both = reference(u, kernel, reverse_kernel=reverse, skip=skip)
    assert_close(both, causal + future + skip * u, "float64")


@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_outputs_and_gradients_match_the_reference(length, dtype, bidirectional, poisoned):
    name = str(dtype).removeprefix("torch.")
    row = {"float64": "float64 gradient", "float32": "float32 gradient"}.get(name, name)
    u, kernel, reverse, skip = make(length, dtype=dtype)
    weight = torch.randn(u.shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    results = []
    for function in (long_conv, reference):
        leaves = [x.clone().requires_grad_() for x in (u, kernel, reverse, skip)]
        y = function(leaves[0], leaves[1], reverse_kernel=leaves[2] if bidirectional else None, skip=leaves[3])
        assert y.dtype == dtype
        used = leaves if bidirectional else [leaves[0], leaves[1], leaves[3]]
        results.append((y, torch.autograd.grad(y, used, weight, materialize_grads=True)))
    (y, gradients), (expected, expected_gradients) = results
    assert_close(y, expected, name)
    for actual, wanted in zip(gradients, expected_gradients, strict=True):
        assert_close(actual, wanted, row)


def gated(length, batch=2, **options):
    """All six tensors that a convolution takes, for `call`."""
    u, *filters = make(length, batch=batch, **options)
    return [u, *filters, *(make(length, batch=batch, seed=seed, **options)[0] for seed in (3, 4))]


def call(function, u, kernel, reverse, skip, input_gate, gate, **options):
    return function(u, kernel, reverse_kernel=reverse, skip=skip, input_gate=input_gate, gate=gate, **options)


def compare(tensors, row="float64", function=long_conv, **options):
    """Outputs and the gradients of all tensors that are not None, with the reference's."""
    results = []
    for one in (function, reference):
        leaves = [None if x is None else x.detach().clone().requires_grad_() for x in tensors]
        y = call(one, *leaves, **options)
        weight = torch.randn(y.shape, generator=torch.Generator().manual_seed(1)).to(y.dtype)
        given = [x for x in leaves if x is not None]
        results.append([y, *torch.autograd.grad(y, given, weight, materialize_grads=True)])
    for index, (actual, expected) in enumerate(zip(*results, strict=True)):
        assert_close(actual, expected, f"{row} gradient" if index and row in ("float64", "float32") else row)


@pytest.mark.parametrize("activation", [None, "silu"])
@pytest.mark.parametrize(("length", "dtype"), [(1, torch.float64), (64, torch.float32), (65, torch.bfloat16)])
def test_gates_and_activation_match_the_reference(length, dtype, activation, poisoned):
    tensors = gated(length, dtype=dtype)
    for missing in ((), (2, 4), (3, 5), (2, 3, 5)):
        chosen = [None if i in missing else x for i, x in enumerate(tensors)]
        compare(chosen, str(dtype).removeprefix("torch."), activation=activation)


PACKED = ([0, 7], [0, 3, 3, 23, 24, 27], [0, 0, 5, 5], [0, 6, 11, 17])


@pytest.mark.parametrize("block", [30, 1 << 19])
@pytest.mark.parametrize("bounds", PACKED)
def test_packed_sequences_are_each_alone(bounds, block, monkeypatch, poisoned):
    """Also filters that are longer than some sequences, and sequences that share a transform's length."""
    monkeypatch.setattr(blocks, "_CPU_BLOCK", block)
    cu_seqlens = torch.tensor(bounds, dtype=torch.int32)
    tensors = gated(bounds[-1], batch=1, taps=9)
    compare(tensors, activation="silu", cu_seqlens=cu_seqlens)
    compare([tensors[0], tensors[1][:1], *(None,) * 4], cu_seqlens=cu_seqlens.long())

    def with_spectrum(u, kernel, *, reverse_kernel, skip, **options):
        return spectral_conv(u, kernel_spectrum(kernel, 54, reverse_kernel), 54, skip, **options)

    compare(tensors, function=with_spectrum, activation="silu", cu_seqlens=cu_seqlens)


def test_packed_sequences_never_see_their_neighbours():
    u, kernel, reverse, skip = make(12, batch=1)
    cu_seqlens = torch.tensor([0, 5, 12])
    changed = u.clone()
    changed[:, 5:] = torch.nan
    y, other = (long_conv(x, kernel, reverse_kernel=reverse, skip=skip, cu_seqlens=cu_seqlens) for x in (u, changed))
    assert_close(other[:, :5], y[:, :5], "exact")
    assert other[:, 5:].isnan().all()


@pytest.mark.parametrize(("length", "taps"), [(20, 1), (20, 5), (20, 33), (65, 64), (1, 9), (40, 13)])
def test_any_number_of_taps(length, taps):
    u, kernel, reverse, skip = make(length, taps)
    actual = long_conv(u, kernel, reverse_kernel=reverse, skip=skip)
    assert_close(actual, reference(u, kernel, reverse_kernel=reverse, skip=skip), "float64")
    # filters of different length in the two directions
    actual = long_conv(u, kernel[:, :2], reverse_kernel=reverse)
    assert_close(actual, reference(u, kernel[:, :2], reverse_kernel=reverse), "float64")
    assert_close(long_conv(u, kernel), reference(u, kernel), "float64")


@pytest.mark.parametrize("block", [64, 1000, 3000])
def test_blocks_of_channels_and_rows_make_no_difference(block, monkeypatch):
    """Also blocks that do not divide the channels, and ones that take several rows of the batch at once."""
    u, kernel, reverse, skip = make(100, width=5, batch=7)
    leaves = [x.requires_grad_() for x in (u, kernel, reverse, skip)]
    expected = long_conv(u, kernel, reverse_kernel=reverse, skip=skip)
    gradients = torch.autograd.grad(expected.square().sum(), leaves)
    monkeypatch.setattr(blocks, "_CPU_BLOCK", block)
    actual = long_conv(u, kernel, reverse_kernel=reverse, skip=skip)
    assert_close(actual, expected, "float64")
    for one, other in zip(torch.autograd.grad(actual.square().sum(), leaves), gradients, strict=True):
        assert_close(one, other, "float64 gradient")


def test_fft_length_grid():
    assert [fft_length(t) for t in (1, 2, 3, 4, 5, 6, 7, 8, 9, 1000, 6000, 16384)] == [
        2, 4, 6, 8, 12, 12, 16, 16, 24, 2048, 12288, 32768,
    ]  # fmt: skip
    sizes = {fft_length(t) for t in range(1, 5000)}
    assert all(size % 2 == 0 and fft_length(size // 2) == size for size in sizes)
    assert len(sizes) < 30
    with pytest.raises(ValueError, match="length must be a positive integer; got 0"):
        fft_length(0)


def test_transforms_of_one_call_have_more_sizes():
    sizes = sorted({blocks.fast_size(length) for length in range(1, 1 << 15)})
    few = [2, *(size for a in range(2, 15) for size in (1 << a, 3 << (a - 1))), 1 << 15]
    between = [part << a for a in range(9, 12) for part in (9, 10, 15)]
    assert sizes == sorted([*few, *between])
    assert sizes == sorted({blocks.fast_size(size) for size in sizes})
    assert {blocks.fast_size(size, few=True) for size in sizes} == set(few)


@pytest.mark.parametrize(("length", "taps"), [(4000, 600), (4500, 620), (7000, 600)])
def test_sizes_that_are_no_power_of_two(length, taps):
    u, kernel, reverse, skip = make(length, taps, width=1, batch=1)
    n_fft = blocks.fast_size(length + taps)
    assert n_fft % 9 == 0 or n_fft % 5 == 0
    actual = long_conv(u, kernel, reverse_kernel=reverse, skip=skip)
    spectrum = kernel_spectrum(kernel, 1 << 14, reverse)
    assert_close(actual, spectral_conv(u, spectrum, 1 << 14, skip), "float64")


@pytest.mark.parametrize("n_fft", [2, 12, 32, 96])
def test_one_spectrum_serves_every_length_up_to_half(n_fft):
    """With all n_fft/2 taps in each direction no lag wraps onto a tap it should not meet."""
    _, kernel, reverse, skip = make(n_fft // 2)
    spectrum = kernel_spectrum(kernel, n_fft, reverse)
    for length in range(1, n_fft // 2 + 1):
        u = make(length, seed=length)[0]
        expected = reference(u, kernel, reverse_kernel=reverse, skip=skip)
        assert_close(spectral_conv(u, spectrum, n_fft, skip), expected, "float64")
    longer = make(n_fft // 2 + 1, seed=3)[0]
    assert not torch.allclose(
        spectral_conv(longer, spectrum, n_fft), reference(longer, kernel, reverse_kernel=reverse)
    )


def test_impulse_returns_the_filter():
    _, kernel, reverse, _ = make(50)
    u = torch.zeros(1, 99, 3, dtype=torch.float64)
    u[:, 49] = 1
    y = long_conv(u, kernel, reverse_kernel=reverse)[0].mT
    assert_close(y[:, 49:], kernel, "float64 fft")
    assert_close(y[:, :49].flip(1), reverse[:, :49], "float64 fft")


def test_delta_kernel_shifts():
    u = make(30)[0]
    for lag in (0, 1, 29):
        kernel = torch.zeros(3, 30, dtype=torch.float64)
        kernel[:, lag] = 1
        assert_close(long_conv(u, kernel), F.pad(u, (0, 0, lag, 0))[:, :30], "float64 fft")


@pytest.mark.parametrize(("dtype", "row"), [(torch.float32, "float32 fft"), (torch.float64, "float64 fft")])
def test_causality(dtype, row):
    u, kernel, _, _ = make(300, dtype=dtype)
    changed = u.clone()
    changed[:, 170:] = make(300, dtype=dtype, seed=5)[0][:, 170:]
    y, other = long_conv(u, kernel), long_conv(changed, kernel)
    assert_close(other[:, :170], y[:, :170], row)
    assert (other[:, 170] - y[:, 170]).abs().max() > 0.1


def test_gradcheck():
    u, kernel, reverse, skip = (x.requires_grad_() for x in make(5, taps=4, width=2))
    assert torch.autograd.gradcheck(
        lambda *x: long_conv(x[0], x[1], reverse_kernel=x[2], skip=x[3]), (u, kernel, reverse, skip)
    )
    tensors = [x.requires_grad_() for x in gated(5, taps=4, width=2)]
    assert torch.autograd.gradcheck(lambda *x: call(long_conv, *x, activation="silu"), tensors)
    spectrum = kernel_spectrum(kernel, 10, reverse).detach().requires_grad_()
    assert torch.autograd.gradcheck(lambda u, s, d: spectral_conv(u, s, 10, d), (u, spectrum, skip))

    def adjoint(u, s):
        return spectral_conv(u, s, 10, gate=u.cos(), activation="silu", adjoint=True)

    assert torch.autograd.gradcheck(adjoint, (u, spectrum))


def test_adjoint_is_the_transpose():
    u, kernel, reverse, skip = make(21)
    v = make(21, seed=9)[0]
    n_fft = fft_length(21)
    spectrum = kernel_spectrum(kernel, n_fft, reverse)
    u.requires_grad_()
    forward = spectral_conv(u, spectrum, n_fft, skip)
    backward = spectral_conv(v, spectrum, n_fft, skip, adjoint=True)
    assert_close((forward * v).sum(), (u * backward).sum(), "float64")
    assert_close(torch.autograd.grad(forward, u, v)[0], backward, "float64")


def saved_for_backward(function):
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
        function()
    return saved


def test_backward_keeps_no_input_for_a_frozen_spectrum_and_no_input_spectrum_ever():
    u, kernel, _, _ = make(40)
    u.requires_grad_()
    spectrum = kernel_spectrum(kernel, 80)
    (kept,) = saved_for_backward(lambda: spectral_conv(u, spectrum, 80))
    assert kept.data_ptr() == spectrum.data_ptr()
    spectrum.requires_grad_()
    kept = saved_for_backward(lambda: spectral_conv(u, spectrum, 80))
    assert {x.data_ptr() for x in kept} == {u.data_ptr(), spectrum.data_ptr()}


@pytest.mark.parametrize("groups", [1, 3])
def test_backward_of_a_convolution_with_taps_keeps_its_arguments_alone(groups):
    arguments = make(40)
    u, skip = arguments[0].requires_grad_(), arguments[3].requires_grad_()
    kernel, reverse = (x[:groups].clone().requires_grad_() for x in arguments[1:3])
    kept = saved_for_backward(lambda: long_conv(u, kernel, reverse_kernel=reverse, skip=skip))
    limit = sum(x.numel() for x in (u, kernel, reverse, skip))
    assert sum(x.numel() for x in kept) <= limit
    assert not any(x.is_complex() for x in kept)
    u.requires_grad_(False)
    kept = saved_for_backward(lambda: long_conv(arguments[0].detach().requires_grad_(), kernel.detach()))
    assert sum(x.numel() for x in kept) == kernel.numel()  # frozen taps: not even the input
    gate = make(40, seed=4)[0]
    kept = saved_for_backward(
        lambda: long_conv(u.detach().requires_grad_(), kernel.detach(), input_gate=gate, gate=gate, activation="silu")
    )
    assert sum(x.numel() for x in kept) == kernel.numel() + 3 * u.numel()


@pytest.mark.parametrize("groups", [1, 3])
@pytest.mark.parametrize("block", [1, 64, 4096])
def test_groups_share_taps_and_their_gradient(groups, block, monkeypatch):
    monkeypatch.setattr(blocks, "_CPU_BLOCK", block)
    u, kernel, reverse, skip = make(21, batch=2, width=6)
    shared = [x[:groups].clone().requires_grad_() for x in (kernel, reverse)]
    spread = [x.detach().repeat(6 // groups, 1).requires_grad_() for x in shared]
    outputs = [long_conv(u, k, reverse_kernel=r, skip=skip) for k, r in (shared, spread)]
    assert_close(outputs[0], outputs[1], "float64")
    assert_close(outputs[0], reference(u, spread[0], reverse_kernel=spread[1], skip=skip), "float64")
    weight = torch.randn_like(u)
    for one, other in zip(
        torch.autograd.grad((outputs[0] * weight).sum(), shared),
        torch.autograd.grad((outputs[1] * weight).sum(), spread),
        strict=True,
    ):
        assert_close(one, other.unflatten(0, (-1, groups)).sum(0), "float64 gradient")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_inputs_are_convolved_in_float32(dtype):
    u, kernel, reverse, skip = make(200, dtype=dtype)
    wide = long_conv(u.float(), kernel, reverse_kernel=reverse, skip=skip)
    assert_close(long_conv(u, kernel, reverse_kernel=reverse, skip=skip), wide.to(dtype), "exact")


def test_float64_inputs_are_convolved_in_float64_whatever_the_taps():
    u = make(200)[0]
    kernel, reverse, skip = make(200, dtype=torch.float32)[1:]
    actual = long_conv(u, kernel, reverse_kernel=reverse, skip=skip)
    assert_close(actual, reference(u, kernel, reverse_kernel=reverse, skip=skip), "float64")


def test_autocast_changes_nothing():
    u, kernel, reverse, skip = make(64, dtype=torch.float32)
    expected = long_conv(u, kernel, reverse_kernel=reverse, skip=skip)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        actual = long_conv(u, kernel, reverse_kernel=reverse, skip=skip)
    assert_close(actual, expected, "exact")


def test_strided_inputs_and_gradients():
    u, kernel, _, skip = make(33, width=4)
    strided = u.mT.contiguous().mT.requires_grad_()
    taps = kernel.repeat_interleave(2, dim=1)[:, ::2]
    y = long_conv(strided, taps, skip=skip)
    assert_close(y, reference(u, kernel, skip=skip), "float64")
    y.sum().backward()  # a gradient of stride 0
    plain = u.clone().requires_grad_()
    reference(plain, kernel, skip=skip).sum().backward()
    assert_close(strided.grad, plain.grad, "float64 gradient")


def test_opcheck():
    u, kernel, reverse, skip = make(9)
    gate = make(9, seed=4)[0]
    cu_seqlens = torch.tensor([0, 2, 9])
    spectrum = kernel_spectrum(kernel, 18, reverse)
    nothing = (None,) * 3
    leaves = [x.clone().requires_grad_() for x in (u, spectrum, skip, gate, gate)]
    torch.library.opcheck(op.spectral_conv, (*leaves[:2], 18, *leaves[2:], None, True, False, "auto"))
    torch.library.opcheck(op.spectral_conv, (leaves[0], spectrum, 18, None, *nothing, False, True, "auto"))
    leaves = [x.clone().requires_grad_() for x in (u, kernel, reverse, skip, gate, gate)]
    torch.library.opcheck(op.long_conv, (*leaves, None, True, "auto"))
    torch.library.opcheck(op.long_conv, (u, leaves[1][:1], None, None, *nothing, False, "auto"))
    packed = [x[:1].detach().requires_grad_() if x.dim() == 3 else x for x in leaves]
    torch.library.opcheck(op.long_conv, (*packed, cu_seqlens, False, "auto"))


@pytest.mark.parametrize("packed", [False, True])
def test_compiles_without_graph_breaks(packed):
    torch._dynamo.reset()
    compiled = torch.compile(long_conv, fullgraph=True, backend="aot_eager")
    for length in (16, 23):
        leaves = [x.requires_grad_() for x in gated(length, batch=1 if packed else 2)]
        options = {"cu_seqlens": torch.tensor([0, 7, length])} if packed else {}
        if packed:
            expected = call(long_conv, *leaves, activation="silu", **options)
            actual = call(compiled, *leaves, activation="silu", **options)
        else:
            leaves = leaves[:4]
            expected, actual = (call(function, *leaves, None, None) for function in (long_conv, compiled))
        assert_close(actual, expected, "float64")
        pairs = zip(*(torch.autograd.grad(y.square().sum(), leaves) for y in (actual, expected)), strict=True)
        for one, other in pairs:
            assert_close(one, other, "float64 gradient")


def test_dispatch():
    u, kernel, _, _ = make(8)
    assert_close(long_conv(u, kernel, backend="torch"), long_conv(u, kernel), "exact")
    with pytest.raises(ValueError, match="long_conv cannot run on triton"):
        long_conv(u, kernel, backend="triton")
    with pytest.raises(ValueError, match="backend must be one of"):
        long_conv(u, kernel, backend="cuda")
    with dispatch.use_backend("triton"), pytest.raises(ValueError, match="cannot run on triton"):
        long_conv(u, kernel)


def test_errors_name_the_argument():
    u, kernel, _, skip = make(8)
    with pytest.raises(ValueError, match=r"u must be a floating-point \(B, T, D\)"):
        long_conv(u[0], kernel)
    with pytest.raises(ValueError, match="T > 0"):
        long_conv(u[:, :0], kernel)
    with pytest.raises(ValueError, match="floating-point"):
        long_conv(u.long(), kernel)
    with pytest.raises(
        ValueError, match=r"^kernel must be \(D, taps\) with D = 3, or a divisor of it, rows; got \(2, 8\)"
    ):
        long_conv(u, kernel[:2])
    with pytest.raises(ValueError, match="reverse_kernel must be"):
        long_conv(u, kernel, reverse_kernel=kernel[0])
    with pytest.raises(ValueError, match="skip must be"):
        long_conv(u, kernel, skip=skip[:2])
    with pytest.raises(ValueError, match=r"gate must be floating-point \(2, 8, 3\) like u; got \(2, 8\)"):
        long_conv(u, kernel, gate=u[..., 0])
    with pytest.raises(ValueError, match="input_gate must be floating-point"):
        long_conv(u, kernel, input_gate=u.long())
    with pytest.raises(ValueError, match="activation must be one of None, silu; got 'gelu'"):
        long_conv(u, kernel, activation="gelu")
    with pytest.raises(ValueError, match="u must have a batch of 1 with cu_seqlens; got 2"):
        long_conv(u, kernel, cu_seqlens=torch.tensor([0, 8]))
    with pytest.raises(ValueError, match="cu_seqlens must rise from 0 to T = 8"):
        long_conv(u[:1], kernel, cu_seqlens=torch.tensor([0, 9, 8]))
    with pytest.raises(ValueError, match="n_fft must be even and hold all 16 taps; got 14"):
        kernel_spectrum(kernel, 14, kernel)
    with pytest.raises(ValueError, match="n_fft must be even"):
        kernel_spectrum(kernel, 17)
    spectrum = kernel_spectrum(kernel, 16)
    with pytest.raises(ValueError, match="spectrum must be complex"):
        spectral_conv(u, spectrum, 18)
    with pytest.raises(ValueError, match="n_fft must be even; got 11"):
        spectral_conv(u[:, :5], torch.zeros(u.shape[2], 6, dtype=torch.complex64), 11)
    with pytest.raises(ValueError, match="n_fft must be at least the length 20; got 16"):
        spectral_conv(make(20)[0], spectrum, 16)
    with pytest.raises(ValueError, match="n_fft must be at least the length 17; got 16"):
        spectral_conv(make(20, batch=1)[0], spectrum, 16, cu_seqlens=torch.tensor([0, 3, 20]))
