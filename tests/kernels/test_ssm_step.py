"""One token of a state space model in torch, against the recurrences it is a step of."""

import pytest
import torch

from hf_hybrid.kernels.ssm_kernel import S4DStep, s4_step_constants, s4d_step_constants, ssm_step
from hf_hybrid.kernels.ssm_kernel.reference import s4_scan, s4d_scan
from tests.tolerances import assert_close


def make(low_rank, dtype=torch.float64):
    """C, constants and skip of a system with two copies and three filters; tokens; and its recurrence."""
    generator = torch.Generator().manual_seed(3)

    def draw(*shape):
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    B, P, w, C = (torch.complex(draw(*shape), draw(*shape)) for shape in [(2, 5)] * 3 + [(3, 4, 5)])
    w = torch.complex(-0.5 - w.real.abs(), w.imag)
    dt = draw(4).exp() / 10
    skip, u = draw(3, 4), draw(2, 6, 4)
    if low_rank:
        step, (y, state) = s4_step_constants(B, P, w, dt), s4_scan(u, C, B, P, w, dt)
    else:
        step, (y, state) = s4d_step_constants(B, w, dt, "zoh"), s4d_scan(u, C, B, w, dt)
    narrow = torch.complex128 if dtype == torch.float64 else torch.complex64
    step = type(step)(*(x.to(narrow) for x in step))
    y = y + skip[:, None] * u[:, None]
    return C.to(narrow), step, skip, u, y, torch.view_as_real(state)


@pytest.mark.parametrize(("dtype", "row"), [(torch.float64, "float64"), (torch.float32, "float32")])
@pytest.mark.parametrize("low_rank", [True, False])
def test_steps_are_the_recurrence(low_rank, dtype, row):
    C, step, skip, u, expected, last = make(low_rank, dtype)
    state = None
    for t in range(u.shape[1]):
        y, state = ssm_step(state, u[:, t].to(dtype), C, step, skip)
        assert_close(y, expected[:, :, t], row)
    assert_close(state, last, row)
    assert state.dtype == dtype


def test_the_state_is_wider_than_a_token():
    C, step, skip, u, expected, _ = make(True, torch.bfloat16)
    y, state = ssm_step(None, u[:, 0].bfloat16(), C, step, skip)
    assert (y.dtype, state.dtype) == (torch.bfloat16, torch.float32)
    assert_close(y, expected[:, :, 0], "bfloat16")


@pytest.mark.parametrize("low_rank", [True, False])
def test_gradients_of_every_input(low_rank):
    C, step, skip, u, _, last = make(low_rank)
    leaves = [x.detach().requires_grad_() for x in (last, u[:, 0], C, skip, *step)]
    assert torch.autograd.gradcheck(
        lambda state, token, C, skip, *constants: ssm_step(state, token, C, type(step)(*constants), skip), leaves
    )


def test_compiled_as_one_graph():
    C, step, skip, u, expected, _ = make(False, torch.float32)
    compiled = torch.compile(ssm_step, fullgraph=True, backend="aot_eager")
    assert_close(compiled(None, u[:, 0].float(), C, step, skip)[0], expected[:, :, 0], "float32")


def test_what_does_not_fit_is_said():
    C, step, skip, u, _, state = make(False)
    for arguments, message in (
        ((state, u[:, 0, :3], C, step), r"C must be complex \(C, H, M\) for u of \(B, H\); got \(3, 4, 5\)"),
        ((state, u[:, 0], C.real, S4DStep(*step)), r"C must be complex .* of torch\.float64"),
        ((state[:1], u[:, 0], C, step), r"state must be \(B, H, M, 2\) = \(2, 4, 5, 2\); got \(1, 4, 5, 2\)"),
        ((state, u[:, 0], C, step, skip[0]), r"skip must be \(C, H\) = \(3, 4\); got \(4,\)"),
    ):
        with pytest.raises(ValueError, match=message):
            ssm_step(*arguments)
