"""Triton's step of a state space model, interpreted, against torch's in double precision."""

from unittest.mock import patch

import pytest
import torch

from hf_hybrid.kernels import use_backend
from hf_hybrid.kernels.launching import record_launches
from hf_hybrid.kernels.ssm_kernel import S4DStep, S4Step, ssm_step
from hf_hybrid.kernels.ssm_kernel.step import op
from hf_hybrid.layers.s4 import S4
from hf_hybrid.layers.s4d import S4D
from tests.kernels.guarded import guarded, guarded_allocations
from tests.kernels.interpreter import interpreted
from tests.tolerances import assert_close

ROWS = {torch.float32: "float32", torch.float16: "float16", torch.bfloat16: "bfloat16"}


def make(kind, batch, channels, modes, filters=1, dtype=torch.float32):
    """State, token, C, constants and skip."""
    generator = torch.Generator().manual_seed(modes)

    def draw(*shape):
        return torch.randn(shape, generator=generator)

    constants = [torch.view_as_complex(draw(channels, modes, 2)) for _ in kind._fields]
    return [
        draw(batch, channels, modes, 2),
        draw(batch, channels).to(dtype),
        torch.view_as_complex(draw(filters, channels, modes, 2)),
        kind(*constants),
        draw(filters, channels),
    ]


def mapped(arguments, function):
    return [x if x is None else type(x)(*map(function, x)) if isinstance(x, tuple) else function(x) for x in arguments]


def surrounded(x):
    return torch.view_as_complex(guarded(torch.view_as_real(x))) if x.is_complex() else guarded(x)


def compare(arguments):
    with guarded_allocations():
        y, after = ssm_step(*mapped(arguments, surrounded))
    with use_backend("torch"):
        expected = ssm_step(*mapped(arguments, lambda x: x.to(torch.complex128 if x.is_complex() else torch.float64)))
    assert y.dtype == arguments[1].dtype
    assert after.dtype == torch.float32
    assert_close(y, expected[0], ROWS[y.dtype])
    assert_close(after, expected[1], "float32")  # which is summed in it, whatever the token's dtype


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("kind", [S4Step, S4DStep])
@interpreted
def test_outputs_and_state(kind, dtype):
    state, token, *rest, skip = make(kind, 2, 5, 8, 3, dtype)
    compare([state, token, *rest, skip])
    compare([None, token, *rest, None])


@pytest.mark.parametrize(("batch", "channels", "modes"), [(1, 1, 1), (3, 9, 16), (2, 7, 29), (1, 2, 33), (2, 1, 256)])
@interpreted
def test_any_shape(batch, channels, modes):
    compare(make(S4Step, batch, channels, modes))


@interpreted
def test_strides_make_no_difference_and_the_bits_are_the_same_twice():
    state, token, C, constants, skip = make(S4Step, 2, 5, 8, 2)
    first = ssm_step(state, token, C, constants, skip)
    turned = [x.mT.contiguous().mT for x in (state, token, C, skip)]
    wide = torch.stack([turned[1], turned[1]], dim=2)[..., 1]  # neither dimension has stride 1
    lazy = constants._replace(row=constants.row.conj_physical().conj())
    second = ssm_step(turned[0], wide, turned[2], lazy, turned[3])
    for one, other in zip(first, second, strict=True):
        assert_close(one, other, "exact")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@interpreted
def test_layers_take_it_where_no_gradient_is_needed(dtype):
    layers = [S4(4, 6), S4(4, 6, num_filters=3), S4D(4, 6, freeze="none")]
    for layer in layers:
        state, token = torch.randn(layer.state_shape(2)), torch.randn(2, 1, 4).to(dtype)
        with torch.no_grad(), patch.object(op, "ssm_step", wraps=op.ssm_step) as called:
            y, after = layer(token, state=state, return_state=True)
            assert called.call_count == 1
            with use_backend("torch"):
                expected = layer(token, state=state, return_state=True)
        assert_close(y, expected[0], ROWS[dtype])
        assert_close(after, expected[1], "float32")
    with use_backend("torch"):  # the trained one, differentiated
        layers[2](token, state=state, return_state=True)[0].sum().backward()
    assert layers[2].C.grad.abs().max() > 0


@interpreted
def test_opcheck():
    state, token, C, (decay, column, row, gain), skip = make(S4Step, 2, 3, 4, 2)
    for backend in ("triton", "torch"):
        torch.library.opcheck(op.ssm_step, (state, token, C, decay, column, row, gain, skip, backend))
        torch.library.opcheck(op.ssm_step, (None, token, C, decay, None, None, gain, None, backend))


@interpreted
def test_compiled_as_one_graph():
    arguments = make(S4Step, 2, 3, 4, 2)
    compiled = torch.compile(ssm_step, fullgraph=True, backend="aot_eager")
    for one, other in zip(compiled(*arguments, backend="triton"), ssm_step(*arguments), strict=True):
        assert_close(one, other, "exact")


@interpreted
def test_what_the_kernel_cannot_take_is_refused():
    state, token, C, constants, skip = make(S4DStep, 1, 2, 4)
    wide = make(S4DStep, 1, 2, 257)
    for arguments, message in (
        (wide, "the kernel holds at most 256 modes in registers; got 257"),
        ((state, token.double(), C, constants), r"u must be float32, .* got torch\.float64"),
        ((state, token, C.to(torch.complex128), constants), r"C must be complex64; got torch\.complex128"),
        ((state, token, C, constants, skip.requires_grad_()), "a gradient is needed, and the kernel has none"),
    ):
        with pytest.raises(ValueError, match=f"ssm_step cannot run on triton: {message}"):
            ssm_step(*arguments)


@interpreted
def test_a_cuda_graph_could_hold_it():
    """One launch, and nothing reads a value: the tensors have none."""
    from hf_hybrid.kernels.ssm_kernel.step import triton_kernels

    for dtype in (torch.float32, torch.bfloat16):
        state, token, C, constants, skip = mapped(make(S4Step, 4, 8, 32, 2, dtype), lambda x: x.to("meta"))
        with record_launches(90) as launches:
            y, after = triton_kernels.forward(state, token, C, *constants, skip)
        assert len(launches) == 1
        assert y.shape == (4, 2, 8)
        assert y.dtype == dtype
        assert after.shape == (4, 8, 32, 2)
