"""A convolution carried on token by token against one over the whole sequence."""

import pytest
import torch

from hf_hybrid.kernels.long_conv import ConvState, long_conv, online_conv, start_online_conv
from hf_hybrid.kernels.long_conv.reference import long_conv as reference
from hf_hybrid.kernels.long_conv.step import op, torch_impl
from tests.tolerances import assert_close

LENGTH = 150
SPLITS = {
    "tokens": [1] * LENGTH,
    "chunks": [3, 1, 8, 20, 33, 1, 1, 64, 2, 17],
    "at once": [LENGTH],
}


def make(taps, groups=4, batch=2, width=4, dtype=torch.float64, length=LENGTH, seed=0):
    generator = torch.Generator().manual_seed(seed)
    u = torch.randn(batch, length, width, generator=generator, dtype=torch.float64).to(dtype)
    kernel = torch.randn(groups, taps, generator=generator, dtype=torch.float64)
    skip = torch.randn(width, generator=generator, dtype=torch.float64)
    wide = torch.promote_types(dtype, torch.float32)
    return u, kernel.to(wide), skip.to(wide)


def decode(u, kernel, skip, prompt, splits):
    """Outputs behind a prompt, in parts, and the last state."""
    state = start_online_conv(u[:, :prompt], kernel)
    outputs, start = [], prompt
    for size in splits:
        if start >= u.shape[1]:
            break
        y, state = online_conv(u[:, start : start + size], kernel, state, skip=skip)
        outputs.append(y)
        start += size
    return torch.cat(outputs, dim=1), state


@pytest.mark.parametrize("splits", SPLITS.values(), ids=SPLITS)
@pytest.mark.parametrize("prompt", [0, 1, 16, 41])
@pytest.mark.parametrize("taps", [1, 2, 3, 5, 16, 17, 18, 33, 64, 400])
def test_parts_of_any_size_give_what_the_whole_gives(taps, prompt, splits):
    u, kernel, skip = make(taps)
    actual, _ = decode(u, kernel, skip, prompt, splits)
    assert_close(actual, reference(u, kernel, skip=skip)[:, prompt : prompt + actual.shape[1]], "float64")


def test_one_compiled_step_serves_every_position():
    u, kernel, skip = make(9)
    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()
    step = torch.compile(lambda u, s: online_conv(u, kernel, s, skip=skip), fullgraph=True, backend="aot_eager")
    state, outputs = start_online_conv(u[:, :7], kernel), []
    with torch.no_grad():
        for t in range(7, 40):
            y, state = step(u[:, t : t + 1], state)
            outputs.append(y)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 3  # positions 0 and 1 may have their own
    assert_close(torch.cat(outputs, dim=1), reference(u, kernel, skip=skip)[:, 7:40], "float64")
    _, expected = decode(u[:, :40], kernel, skip, 7, [1] * 33)
    assert state.position == expected.position
    assert_close(state.pending, expected.pending, "float64")


@pytest.mark.parametrize(
    ("prompt", "tokens", "ring"), [(5, 3, 32), (5, 15, 32), (5, 16, 64), (20, 31, 64), (20, 32, 128), (20, 300, 512)]
)
def test_rings_with_room_for_some_tokens_keep_their_size_for_these(prompt, tokens, ring):
    u, kernel, skip = make(400, length=prompt + tokens + 1)
    state = start_online_conv(u[:, :prompt], kernel).grown(tokens)
    assert state.pending.shape[1] == ring
    torch.compiler.reset()
    step = torch.compile(lambda u, s: online_conv(u, kernel, s, skip=skip), fullgraph=True, backend="eager")
    outputs = []
    with torch.no_grad():
        for t in range(prompt, prompt + tokens):
            y, state = step(u[:, t : t + 1], state)
            outputs.append(y)
            assert state.pending.shape[1] == state.inputs.shape[1] == ring
    assert_close(torch.cat(outputs, dim=1), reference(u, kernel, skip=skip)[:, prompt:-1], "float64")


def test_a_compiled_step_without_room_is_refused_and_another_grows():
    u, kernel, skip = make(400, length=40)
    state = start_online_conv(u[:, :17], kernel).grown(3)
    torch.compiler.reset()
    step = torch.compile(lambda u, s: online_conv(u, kernel, s, skip=skip), fullgraph=True, backend="eager")
    full = state._replace(position=state.pending.shape[1] - 1)
    with torch.no_grad(), pytest.raises(ValueError, match="room for one more token; its rings of 64 places are full"):
        step(u[:, 17:18], full)
    y, after = online_conv(u[:, 17:], kernel, state, skip=skip)
    assert_close(y, reference(u, kernel, skip=skip)[:, 17:], "float64")
    _, after = online_conv(torch.zeros(u.shape[0], 40, u.shape[2], dtype=u.dtype), kernel, after, skip=skip)
    assert after.pending.shape[1] > 64


class Step(torch.nn.Module):
    def __init__(self, kernel, skip, position):
        super().__init__()
        self.kernel, self.skip, self.position = kernel, skip, position

    def forward(self, u, pending, inputs):
        y, state = online_conv(
            u, self.kernel, ConvState(pending, inputs, self.position, pending.shape[1]), skip=self.skip
        )
        return y, state.pending, state.inputs, torch.tensor(state.position)


@pytest.mark.parametrize(("prompt", "more"), [(0, 0), (20, 0), (20, 5), (40, 0), (70, 30)])
def test_an_exported_step_goes_on_from_any_position(prompt, more):
    u, kernel, skip = make(40, groups=2)
    state = start_online_conv(u[:, :prompt], kernel)
    if more:
        _, state = online_conv(u[:, prompt : prompt + more], kernel, state, skip=skip)
    state = state.grown()
    step = Step(kernel, skip, state.position)
    program = torch.export.export(step, (u[:, :1], state.pending, state.inputs)).module()
    tensors, outputs = (state.pending, state.inputs), []
    for t in range(prompt + more, LENGTH):
        y, *tensors, position = program(u[:, t : t + 1], *tensors)
        assert position == state.position
        outputs.append(y)
    assert_close(torch.cat(outputs, dim=1), reference(u, kernel, skip=skip)[:, prompt + more :], "float64")


@pytest.fixture
def transforms(monkeypatch):
    """Number and size of the transforms of each call."""
    seen = []
    original = torch.fft.rfft

    def recorded(x, n):
        seen.append((x.numel() // x.shape[-1], n))
        return original(x, n=n)

    monkeypatch.setattr(torch.fft, "rfft", recorded)
    return seen


def test_a_short_prompt_takes_a_short_transform(transforms):
    u, kernel, _ = make(4096, length=60)
    start_online_conv(u, kernel)
    assert 0 < max(size for _, size in transforms) < 150


def test_opcheck():
    u, kernel, _ = make(9)
    pending, inputs, *_ = start_online_conv(u[:, :20], kernel)
    for position in (3, 7):  # within the ring, and at its end
        torch.library.opcheck(op.online_conv_token, (u[:, :1], kernel, pending, inputs, position))


@pytest.mark.parametrize("direct", [1, 4, 64])
def test_where_sums_end_and_transforms_begin_makes_no_difference(direct, monkeypatch):
    monkeypatch.setattr(torch_impl, "_DIRECT", direct)
    monkeypatch.setattr(torch_impl, "_CPU_BLOCK", 100)  # a few channels at once
    u, kernel, skip = make(40)
    for splits in SPLITS.values():
        actual, _ = decode(u, kernel, skip, 7, splits)
        assert_close(actual, reference(u, kernel, skip=skip)[:, 7 : 7 + actual.shape[1]], "float64")


@pytest.mark.parametrize("block", [1, 1 << 17])
@pytest.mark.parametrize("groups", [1, 2, 3])
def test_channels_of_a_group_share_taps(groups, block, monkeypatch):
    monkeypatch.setattr(torch_impl, "_CPU_BLOCK", block)  # a few channels at once
    u, kernel, skip = make(21, groups, width=6)
    kernel.requires_grad_()
    expected = reference(u, kernel.repeat(6 // groups, 1), skip=skip)
    assert_close(long_conv(u, kernel, skip=skip), expected, "float64")
    actual, _ = decode(u, kernel, skip, 5, SPLITS["chunks"])
    expected = expected[:, 5 : 5 + actual.shape[1]]
    assert_close(actual, expected, "float64")
    found, wanted = (torch.autograd.grad(y.square().sum(), kernel)[0] for y in (actual, expected))
    assert_close(found, wanted, "float64 gradient")


def test_shared_taps_are_transformed_once(monkeypatch, transforms):
    u, kernel, _ = make(64, groups=2, batch=1, width=6, length=64)
    monkeypatch.setattr(torch_impl, "_CPU_BLOCK", 1)
    start_online_conv(u, kernel)
    assert sum(number for number, _ in transforms) == 2 + 6


@pytest.mark.parametrize(("dtype", "row"), [(torch.float32, "float32"), (torch.bfloat16, "bfloat16")])
def test_lower_precision(dtype, row):
    u, kernel, skip = make(64, dtype=dtype)
    actual, state = decode(u, kernel, skip, 20, SPLITS["tokens"])
    assert actual.dtype == dtype
    assert state.pending.dtype == torch.float32
    assert_close(actual, reference(u, kernel, skip=skip)[:, 20:], row)


def test_the_state_does_not_grow():
    u, kernel, skip = make(33)
    sizes = {decode(u[:, :stop], kernel, skip, 10, SPLITS["tokens"])[1].pending.shape for stop in (11, 60, 150)}
    assert sizes == {(2, 32, 4)}


def test_the_state_grows_to_its_full_size():
    u, kernel, skip = make(64)
    states = [decode(u[:, :stop], kernel, skip, 3, [1] * LENGTH)[1] for stop in (4, 18, 19, 150)]
    assert [state.pending.shape[1] for state in states] == [32, 32, 64, 64]
    assert all(state.inputs.shape == state.pending.shape for state in states)


def test_rows_can_be_reordered_at_any_token():
    u, kernel, skip = make(20)
    state = start_online_conv(u[:, :9], kernel)
    _, state = online_conv(u[:, 9:16], kernel, state, skip=skip)
    swapped = ConvState(state.pending.flip(0), state.inputs.flip(0), *state[2:])
    actual, _ = online_conv(u[:, 16:].flip(0), kernel, swapped, skip=skip)
    assert_close(actual, reference(u, kernel, skip=skip)[:, 16:].flip(0), "float64")


def test_gradients_pass_through_the_state():
    u, kernel, skip = make(12, length=40)
    results = []
    for whole in (False, True):
        leaves = [x.clone().requires_grad_() for x in (u, kernel, skip)]
        if whole:
            y = reference(leaves[0], leaves[1], skip=leaves[2])[:, 4:]
        else:
            y, _ = decode(*leaves, 4, [1, 1, 3, 8, 1, 20, 2])
        results.append(torch.autograd.grad(y[:, :36].square().sum(), leaves))
    for one, other in zip(*results, strict=True):
        assert_close(one, other, "float64 gradient")


def test_a_recorded_state_is_left_alone_and_another_used_up():
    u, kernel, skip = make(12)
    state = start_online_conv(u[:, :4], kernel)
    before = state.inputs.clone()
    online_conv(u[:, 4:6].requires_grad_(), kernel, state, skip=skip)
    assert_close(state.inputs, before, "exact")
    with torch.no_grad():
        _, after = online_conv(u[:, 4:6], kernel, state, skip=skip)
    assert after.inputs.data_ptr() == state.inputs.data_ptr()


def test_a_state_from_inference_mode_serves_outside():
    u, kernel, skip = make(12)
    with torch.inference_mode():
        state = start_online_conv(u[:, :4], kernel)
    actual, _ = online_conv(u[:, 4:], kernel, state, skip=skip)
    assert_close(actual, reference(u, kernel, skip=skip)[:, 4:], "float64")


def test_work_per_token_grows_with_the_logarithm_of_the_taps(monkeypatch):
    """Numbers transformed for n tokens: 2 n in each of log2(n) sizes of square, against n^2 / 2 products."""
    transformed = []
    original = torch_impl._transformed

    def counted(x, kernel, n_fft, wanted):
        transformed.append(n_fft)
        return original(x, kernel, n_fft, wanted)

    monkeypatch.setattr(torch_impl, "_transformed", counted)
    u, kernel, skip = make(1024, length=1024)
    with torch.no_grad():
        decode(u, kernel, skip, 0, [1] * 1024)
    assert sum(transformed) <= 1024 * 7 + 2048  # squares of 32, 64, ..., 512, the whole, and the empty prompt
    assert len(transformed) <= 64


def test_a_state_of_another_shape_is_refused():
    u, kernel, skip = make(12)
    state = start_online_conv(u[:, :4], kernel)
    for tokens, taps in ((u[:1], kernel), (u, kernel[:, :3]), (u[..., :2], kernel[:2])):
        with pytest.raises(ValueError, match="state must have"):
            online_conv(tokens, taps, state, skip=skip)
