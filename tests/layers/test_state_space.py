"""What every state space layer promises, whatever it computes: one table of layers, one set of tests."""

import copy
import io
import pickle
from itertools import pairwise
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from hf_hybrid.layers import s4_system as system
from hf_hybrid.layers.hyena import Hyena
from hf_hybrid.layers.s4 import S4
from hf_hybrid.layers.s4d import S4D
from hf_hybrid.layers.s5 import S5
from hf_hybrid.layers.state_space import StateSpaceLayer, ssm_parameters
from tests.matrix import some
from tests.tolerances import assert_close

SIZE = 6


class Case(NamedTuple):
    """A layer, small, and the arguments beside `hidden_size` that make it so."""

    layer: type[StateSpaceLayer]
    options: dict[str, Any]
    in_16_bits: str = (
        "exact"  # how far 16 bits reach into the layer: to the output alone, or to projections of its own
    )

    def make(self, seed: int = 0, dtype: torch.dtype = torch.float64, **options: Any) -> StateSpaceLayer:
        torch.manual_seed(seed)
        return self.layer(SIZE, **{**self.options, **options}).to(dtype)

    @property
    def freezes(self) -> tuple[str, ...]:
        return tuple(self.layer.TRAINED)


CASES = {
    "s4": Case(S4, {"state_size": 8}),
    "s4d": Case(S4D, {"state_size": 8}),
    "s5": Case(S5, {"state_size": 16, "blocks": 2}),
    "hyena": Case(Hyena, {"max_length": 64}, "bfloat16"),
}
EACH = pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
KEEPING = pytest.mark.parametrize("case", [CASES[name] for name in ("s4", "s4d", "hyena")], ids=["s4", "s4d", "hyena"])
EACH_FREEZE = pytest.mark.parametrize(
    ("case", "freeze"),
    [
        pytest.param(case, freeze, id=f"{name}-{freeze}")
        for name, case in CASES.items()
        for freeze in case.layer.TRAINED
    ],
)
BOTH_DIRECTIONS = pytest.mark.parametrize("bidirectional", [False, True], ids=["causal", "bidirectional"])


def draw(*shape, seed=1, dtype=torch.float64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def names_of(layer):
    return [name for name, _ in layer.own_tensors()]


def own_state(layer):
    return {name: tensor.detach().clone() for name, tensor in layer.own_tensors()}


@pytest.fixture
def made(monkeypatch):
    """The numbers of taps of all kernels computed; S5 has none."""
    lengths = []

    def count(function):
        def counted(*args, **options):
            lengths.append(next(x for x in args if isinstance(x, int)))
            return function(*args, **options)

        return counted

    for owner, name in (
        (system, "frozen_s4_kernel"),
        (system, "s4_kernel"),
        (system, "s4d_kernel"),
        (Hyena, "_generate"),
    ):
        monkeypatch.setattr(owner, name, count(getattr(owner, name)))
    return lengths


# function


@EACH
def test_causality(case):
    layer, u = case.make(), draw(2, 60, SIZE)
    changed = u.clone()
    changed[:, 30] += 1
    assert_close(layer(changed)[:, :30], layer(u)[:, :30], "float64 fft")
    difference = (layer(changed) - layer(u)).abs()
    assert difference[:, 30].max() > 1e-2
    assert difference[:, 31:].amax((0, 2)).min() > 1e-6


@EACH
def test_bidirectional_layers_read_both_ways(case):
    layer, u = case.make(bidirectional=True), draw(1, 60, SIZE)
    changed = u.clone()
    changed[:, 30] += 1
    assert (layer(changed) - layer(u)).abs().amax((0, 2)).min() > 1e-6


@EACH
@BOTH_DIRECTIONS
def test_examples_of_a_batch_are_independent(case, bidirectional):
    layer, u = case.make(bidirectional=bidirectional), draw(3, 20, SIZE)
    for index in range(3):
        assert_close(layer(u[index : index + 1]), layer(u)[index : index + 1], "float64")


@EACH
@BOTH_DIRECTIONS
@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_is_exact(case, bidirectional, side):
    layer, u = case.make(bidirectional=bidirectional), draw(1, 20, SIZE)
    pad = torch.full((1, 11, SIZE), torch.nan, dtype=torch.float64)
    real, none = torch.ones(1, 20), torch.zeros(1, 11)
    inputs, mask = (pad, u), (none, real)
    start = 11
    if side == "right":
        inputs, mask, start = inputs[::-1], mask[::-1], 0
    inputs, mask = torch.cat(inputs, dim=1), torch.cat(mask, dim=1)
    expected = layer(u)
    for dtype in (torch.bool, torch.long, torch.float32):
        assert_close(layer(inputs, mask.to(dtype))[:, start : start + 20], expected, "float64")


@EACH
@BOTH_DIRECTIONS
def test_padding_gets_no_gradient(case, bidirectional):
    layer, u = case.make(bidirectional=bidirectional), draw(2, 20, SIZE).requires_grad_()
    mask = torch.ones(2, 20)
    mask[0, :7] = mask[1, 15:] = 0
    layer(u, mask).square().sum().backward()
    assert (u.grad[mask == 0] == 0).all()
    assert (u.grad[mask == 1] != 0).all()


@EACH
def test_gelu_glu(case):
    layer, u = case.make(postact="gelu_glu"), draw(2, 9, SIZE)
    plain = case.make()
    plain.load_state_dict(layer.state_dict(), strict=False)
    projected = layer.output_linear(nn.functional.gelu(plain(u)))
    assert_close(layer(u), projected[..., :SIZE] * projected[..., SIZE:].sigmoid(), "float64")
    layer = layer.bfloat16()
    assert layer(u.bfloat16()).dtype == torch.bfloat16
    layer.output_linear.float()
    assert layer(u.bfloat16()).dtype == torch.bfloat16


# state


@EACH_FREEZE
def test_state_hand_over(case, freeze):
    layer, u = case.make(freeze=freeze), draw(2, 130, SIZE)
    expected, last = layer(u, return_state=True)
    assert_close(layer(u), expected, "float64")
    for split in (1, 2, 63, 64, 65, 129, 17, 98):
        y, state = layer(u[:, :split], return_state=True)
        assert state.shape == layer.state_shape(2)
        assert state.dtype == torch.float64
        rest, state = layer(u[:, split:], state=state, return_state=True)
        assert_close(torch.cat([y, rest], dim=1), expected, "float64")
        assert_close(state, last, "float64")


@EACH
def test_decoding_is_the_whole_sequence(case):
    layer, u = case.make(dtype=torch.float32), draw(2, 80, SIZE, dtype=torch.float32)
    expected = layer(u)
    outputs, state = [], None
    for t in range(80):
        y, state = layer(u[:, t : t + 1], state=state, return_state=True)
        outputs.append(y)
    assert state.dtype == torch.float32
    assert_close(torch.cat(outputs, dim=1), expected, "float32")


@EACH
def test_state_without_asking_for_the_next(case):
    layer, u = case.make(), draw(2, 30, SIZE)
    _, state = layer(u[:, :10], return_state=True)
    before = state.clone()
    y = layer(u[:, 10:], state=state)
    assert_close(y, layer(u)[:, 10:], "float64")
    assert_close(state, before, "exact")


@EACH
def test_state_is_not_touched_by_left_padding(case):
    layer, u = case.make(), draw(1, 20, SIZE)
    padded = torch.cat([torch.full_like(u[:, :13], torch.nan), u], dim=1)
    mask = (torch.arange(33) >= 13)[None].long()
    y, state = layer(padded, mask, return_state=True)
    expected, expected_state = layer(u, return_state=True)
    assert_close(y[:, 13:], expected, "float64")
    assert_close(state, expected_state, "float64")


@EACH
def test_state_follows_its_beam(case):
    layer, u = case.make(), draw(3, 12, SIZE)
    _, state = layer(u, return_state=True)
    order = torch.tensor([2, 0, 0])
    token = draw(3, 1, SIZE, seed=4)
    expected = torch.cat(
        [layer(torch.cat([u[i : i + 1], token[j : j + 1]], dim=1))[:, -1:] for j, i in enumerate(order)]
    )
    assert_close(layer(token, state=state.index_select(0, order)), expected, "float64")


@EACH_FREEZE
@pytest.mark.parametrize("length", [1, 9])
def test_gradients_flow_through_the_state(case, freeze, length):
    layer, u = case.make(freeze=freeze), draw(1, 6, SIZE).requires_grad_()
    second = draw(1, length, SIZE, seed=3).requires_grad_()
    both = layer(torch.cat([u, second], dim=1))[:, 6:].square().sum()
    wanted = torch.autograd.grad(both, [u, second])
    _, state = layer(u, return_state=True)
    actual = torch.autograd.grad(layer(second, state=state).square().sum(), [u, second])
    for one, other in zip(actual, wanted, strict=True):
        assert_close(one, other, "float64 gradient")


@EACH
def test_bidirectional_layers_have_no_state(case):
    layer, u = case.make(bidirectional=True), draw(1, 4, SIZE)
    message = f"bidirectional {case.layer.__name__} has no state"
    with pytest.raises(ValueError, match=message):
        layer(u, return_state=True)
    with pytest.raises(ValueError, match=message):
        layer(u, state=torch.zeros(layer.state_shape(1)))


# training


@EACH_FREEZE
@BOTH_DIRECTIONS
def test_only_what_is_trained_gets_gradients(case, freeze, bidirectional):
    layer = case.make(freeze=freeze, bidirectional=bidirectional)
    u = draw(2, 30, SIZE).requires_grad_()
    trained, buffers = set(case.layer.TRAINED[freeze]), dict(layer.named_buffers())
    assert sorted(layer.state_dict()) == sorted(case.make(freeze="none", bidirectional=bidirectional).state_dict())
    layer(u).square().sum().backward()
    assert u.grad.abs().min() > 0
    for name, tensor in layer.own_tensors():
        assert (name in buffers) == (name not in trained)
        assert tensor.requires_grad == (name in trained)
        assert (tensor.grad is not None and tensor.grad.abs().max() > 0) == (name in trained)
    wanted = [id(tensor) for name, tensor in layer.own_tensors() if name in trained]
    assert [id(x) for x in ssm_parameters(nn.ModuleList([layer]))] == wanted


@EACH
def test_what_is_trained_grows_from_freeze_to_freeze(case):
    sets = [set(case.layer.TRAINED[freeze]) for freeze in case.freezes]
    assert sets[0] == set()
    assert all(one < other for one, other in pairwise(sets))
    assert sets[-1] == set(names_of(case.make()))


@EACH_FREEZE
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_gradient_checkpointing(case, freeze, use_reentrant):
    layer, u = case.make(freeze=freeze), draw(2, 30, SIZE).requires_grad_()
    leaves = [u, *layer.parameters()]
    fresh = copy.deepcopy(layer)
    expected = torch.autograd.grad(fresh(u).square().sum(), [u, *fresh.parameters()])
    y = torch.utils.checkpoint.checkpoint(layer, u, use_reentrant=use_reentrant)
    y.square().sum().backward()
    for leaf, gradient in zip(leaves, expected, strict=True):
        assert_close(leaf.grad, gradient, "float64 gradient")


@EACH
def test_postact_projection_is_no_ssm_parameter(case):
    layer = case.make(freeze="none", postact="gelu_glu")
    own = [id(tensor) for _, tensor in layer.own_tensors()]
    assert [id(x) for x in ssm_parameters(layer)] == own
    assert not {id(x) for x in layer.output_linear.parameters()} & set(own)
    getattr(layer, names_of(layer)[0]).requires_grad_(False)
    assert [id(x) for x in ssm_parameters(layer)] == own[1:]


# precision


@EACH_FREEZE
def test_casting_to_16_bits_keeps_the_system_in_float32(case, freeze):
    for dtype in (torch.bfloat16, torch.float16):
        layer = case.make(dtype=torch.float32, freeze=freeze, postact="gelu_glu")
        before = own_state(layer)
        wrapped = nn.ModuleList([layer]).to(dtype)
        wrapped = wrapped.half() if dtype == torch.float16 else wrapped.bfloat16()
        assert layer.output_linear.weight.dtype == dtype
        for name, tensor in layer.own_tensors():
            assert_close(tensor, before[name], "exact")
            assert tensor.dtype == torch.float32

    def dtypes():
        return {tensor.dtype for _, tensor in layer.own_tensors()}

    assert layer.double() is layer
    assert dtypes() == {torch.float64}
    layer.bfloat16()
    assert dtypes() == {torch.float64}
    layer.float()
    assert dtypes() == {torch.float32}
    layer.to("meta", torch.bfloat16)
    assert dtypes() == {torch.float32}
    assert {tensor.device.type for _, tensor in layer.own_tensors()} == {"meta"}


@EACH
@BOTH_DIRECTIONS
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_16_bit_inputs(case, bidirectional, dtype):
    layer = case.make(dtype=torch.float32, bidirectional=bidirectional).to(dtype)
    u = draw(2, 30, SIZE, dtype=dtype)
    y = layer(u)
    assert y.dtype == dtype
    assert_close(y, layer(u.float()).to(dtype), case.in_16_bits)
    if bidirectional:
        return
    _, state = layer(u, return_state=True)
    assert state.dtype == torch.float32
    assert_close(state, layer(u.float(), return_state=True)[1], case.in_16_bits)
    for length in (1, 2):  # a step, and a stretch that is rounded once
        y = layer(u[:, :length], state=state)
        assert y.dtype == dtype
        assert_close(y, layer(u[:, :length].float(), state=state).to(dtype), case.in_16_bits)


@EACH
def test_float32_inputs_of_a_float64_layer(case):
    layer, u = case.make(), draw(2, 30, SIZE, dtype=torch.float32)
    y, state = layer(u, return_state=True)
    assert (y.dtype, state.dtype) == (torch.float32, torch.float64)
    assert_close(y, layer(u.double()), "float32")


@EACH
def test_default_dtype_of_16_bits_builds_float32(case):
    torch.set_default_dtype(torch.bfloat16)
    try:
        layer = case.layer(SIZE, **case.options)
    finally:
        torch.set_default_dtype(torch.float32)
    assert {tensor.dtype for _, tensor in layer.own_tensors()} == {torch.float32}


@EACH_FREEZE
def test_autocast_changes_nothing(case, freeze):
    layer, u = case.make(dtype=torch.float32, freeze=freeze), draw(2, 70, SIZE, dtype=torch.float32)
    y, state = layer(u, return_state=True)
    expected = layer(u, state=state)
    layer = copy.deepcopy(layer)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        again, state_again = layer(u, return_state=True)
        continued = layer(u, state=state)
    assert_close(again, y, case.in_16_bits)
    assert_close(state_again, state, case.in_16_bits)
    assert_close(continued, expected, case.in_16_bits)


# what is kept between calls


@EACH
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_changes_are_seen(case, mode):
    layer, u = case.make(), draw(2, 12, SIZE)

    def check(dtype=torch.float64):
        fresh = copy.deepcopy(layer)  # copies keep nothing
        with mode():
            y, state = layer(u.to(dtype), return_state=True)
            token = layer(u[:, :1].to(dtype), state=state)
            whole = layer(u.to(dtype))
        expected, expected_state = fresh(u.to(dtype), return_state=True)
        assert_close(y, expected, "exact")
        assert_close(state, expected_state, "exact")
        assert_close(token, fresh(u[:, :1].to(dtype), state=expected_state), "exact")
        assert_close(whole, fresh(u.to(dtype)), "exact")
        return y

    first = check()
    for name in names_of(layer):
        getattr(layer, name).mul_(1.25)
        second = check()
        assert not torch.allclose(second, first), name
        first = second
    layer.load_state_dict(case.make(seed=3).state_dict())
    assert not torch.allclose(check(), first)
    layer.load_state_dict(case.make(seed=4).state_dict(), assign=True)
    check()
    for name in names_of(layer):
        setattr(layer, name, getattr(layer, name) * 0.75)
        check()
    layer.reset_parameters()
    check()
    layer.float()
    check(torch.float32)
    layer.double()
    check()


@KEEPING
def test_frozen_kernel_is_made_once(case, made):
    layer = case.make()
    for length in (30, 32, 17, 9, 1, 25):
        layer(draw(2, length, SIZE).requires_grad_()).sum().backward()
    assert made == [32]
    layer(draw(2, 33, SIZE))
    assert made == [32, 48]
    layer.clear_cache()
    layer(draw(2, 20, SIZE))
    assert made == [32, 48, 24]
    storages = [StorageWeakRef(tensor.untyped_storage()) for _, tensor in layer.own_tensors()]
    layer.float()
    assert all(storage.expired() for storage in storages)  # the old tensors are let go at once


@KEEPING
def test_edits_through_data_need_the_cache_cleared(case):
    layer, u = case.make(), draw(2, 12, SIZE)
    first = layer(u)
    getattr(layer, names_of(layer)[0]).data.mul_(3)
    assert_close(layer(u), first, "exact")
    layer.clear_cache()
    assert_close(layer(u), copy.deepcopy(layer)(u), "exact")
    assert not torch.allclose(layer(u), first)


@KEEPING
@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
def test_trained_kernel_is_kept_only_while_nothing_requires_a_gradient(case, training, made):
    layer, u = case.make(freeze="none").train(training), draw(2, 12, SIZE)
    layer(u)
    with torch.no_grad():
        layer(u)
    assert len(made) == 2
    for name in names_of(layer):
        made.clear()
        layer.requires_grad_(False)
        layer(u), layer(u)
        assert len(made) == 1
        getattr(layer, name).requires_grad_(True)
        layer(u)
        with torch.no_grad():
            layer(u)
        assert len(made) == 3  # and the one kept before is dropped, or the next turn would make none


@EACH
@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
@pytest.mark.parametrize("options", [{}, {"foreach": True}, {"fused": True}], ids=["loop", "foreach", "fused"])
def test_every_optimizer_step_is_seen(case, training, options):
    layer, u = case.make(freeze="none", dtype=torch.float32).train(training), draw(2, 12, SIZE, dtype=torch.float32)
    optimizer = torch.optim.AdamW(layer.parameters(), lr=0.1, **options)

    @torch.no_grad()
    def check():
        fresh = copy.deepcopy(layer)  # copies keep nothing
        y, state = layer(u, return_state=True)
        expected, expected_state = fresh(u, return_state=True)
        assert_close(y, expected, "exact")
        assert_close(state, expected_state, "exact")
        assert_close(layer(u), fresh(u), "exact")
        assert_close(layer(u[:, :1], state=state), fresh(u[:, :1], state=state), "exact")
        return y

    for _ in range(2):
        layer(u).square().sum().backward()
        before = check()
        optimizer.step()
        assert not torch.allclose(check(), before)


@EACH
def test_what_tokens_read_is_made_at_the_first_and_forgotten_with_the_sequence(case):
    layer, u = case.make(freeze="none"), draw(2, 12, SIZE)

    def kept():
        return {name: entry[2] for name, entry in layer._kept_for_tokens.items()}

    def reads(state):
        return layer(u[:, :1], state=state, return_state=True)[1]

    with torch.no_grad():
        _, prompt = layer(u, return_state=True)
        state = reads(prompt)
        first = kept()
        assert first
        reads(state)
        assert all(kept()[name] is value for name, value in first.items())
        getattr(layer, names_of(layer)[0]).mul_(1.25)  # seen in the midst of a sequence, too
        fresh = copy.deepcopy(layer)
        assert kept()
        assert not fresh._kept_for_tokens
        assert_close(layer(u[:, :1], state=prompt), fresh(u[:, :1], state=prompt), "exact")
        layer(u)
        assert not kept()
        reads(prompt)
        assert kept()
    layer(u[:, :1], state=prompt)  # records a gradient
    assert not kept()


@EACH
@pytest.mark.parametrize("length", [2, 32, 40])
def test_tokens_after_a_state_without_gradients_are_those_with_them(case, length):
    """Of a trained layer, after a short prompt and long ones; a few tokens may go one by one."""
    layer, u, more = case.make(freeze="none"), draw(2, 5 * length, SIZE), draw(2, length, SIZE, seed=2)
    _, state = layer(u, return_state=True)
    expected, expected_state = layer(more, state=state, return_state=True)
    with torch.no_grad():
        assert_close(layer(u, return_state=True)[1], state, "float64")
        found, found_state = layer(more, state=state, return_state=True)
    assert_close(found, expected, "float64")
    assert_close(found_state, expected_state, "float64")


@EACH
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_inference_first_and_training_afterwards(case, dtype):
    layer, u = case.make(dtype=dtype), draw(2, 12, SIZE, dtype=dtype)
    with torch.inference_mode():
        first, state = layer(u, return_state=True)
        layer(u[:, :1], state=state), layer(u)
    leaf = u.clone().requires_grad_()
    y, state = layer(leaf, return_state=True)
    (y.square().sum() + layer(leaf[:, :1], state=state).sum() + layer(leaf).sum()).backward()
    assert_close(y, first, "exact")
    assert leaf.grad.abs().min() > 0


@EACH
def test_copies_and_pickles_hold_the_tensors_alone(case, made):
    layer, u = case.make(), draw(2, 12, SIZE)
    expected = layer(u)
    keeps = len(made)
    layer(u[:, :1], return_state=True)
    assert len(pickle.dumps(layer)) == len(pickle.dumps(case.make()))
    buffer = io.BytesIO()
    torch.save(layer, buffer)
    buffer.seek(0)
    for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer)), torch.load(buffer, weights_only=False)):
        made.clear()
        assert_close(other(u), expected, "exact")
        assert len(made) == keeps
        with torch.no_grad():
            for _, tensor in other.own_tensors():
                tensor.zero_()
        assert not torch.allclose(other(u), expected)
        assert_close(layer(u), expected, "exact")
        assert len(made) == 2 * keeps


# module


@EACH_FREEZE
def test_meta_device_and_reset(case, freeze):
    with torch.device("meta"):
        layer = case.layer(SIZE, **case.options, freeze=freeze)
    assert {x.device.type for x in layer.state_dict().values()} == {"meta"}
    layer.to_empty(device="cpu")
    for _, tensor in layer.own_tensors():
        tensor.data.fill_(torch.nan)
    torch.manual_seed(0)
    layer.reset_parameters()
    fresh = case.make(dtype=torch.float32, freeze=freeze)
    torch.manual_seed(0)
    fresh.reset_parameters()
    for name, tensor in fresh.own_tensors():
        assert_close(getattr(layer, name), tensor, "exact")
        assert getattr(layer, name).requires_grad == (name in case.layer.TRAINED[freeze])


@EACH_FREEZE
@pytest.mark.parametrize("length", [1, 130])
def test_shapes_on_the_meta_device(case, freeze, length):
    with torch.device("meta"):
        layer, u = case.layer(SIZE, **case.options, freeze=freeze), torch.empty(2, length, SIZE)
    y, state = layer(u, torch.ones(2, length, device="meta"), return_state=True)
    assert y.shape == u.shape
    assert layer(u).shape == u.shape
    assert layer(u, state=state).shape == u.shape
    assert state.shape == layer.state_shape(2)


@EACH
def test_reset_leaves_loaded_tensors_alone(case):
    for name in names_of(case.make()):
        layer = case.make(freeze="none")
        for _, tensor in layer.own_tensors():
            tensor.data.fill_(7)
        getattr(layer, name)._is_hf_initialized = True
        layer.reset_parameters()
        for other, tensor in layer.own_tensors():
            assert (tensor == 7).all() == (other == name)


@EACH
def test_state_dict_moves_between_freezes(case):
    u, source = draw(2, 20, SIZE), case.make()
    expected = source(u)
    for freeze in case.freezes:
        layer = case.make(seed=9, freeze=freeze)
        shapes = {name: tensor.shape for name, tensor in layer.own_tensors()}
        state = {name: x.expand(shapes.get(name, x.shape)) for name, x in repeated(source, shapes).items()}
        layer.load_state_dict(state)
        assert_close(layer(u), expected, "float64")


def repeated(source, shapes):
    """The source's state dict; a layer whose trained form has a copy per channel gets its single copy repeated."""
    state = source.state_dict()
    for name, shape in shapes.items():
        factors = [wanted // had for wanted, had in zip(shape, state[name].shape, strict=True)]
        state[name] = state[name].repeat(*factors)
    return state


@EACH
@pytest.mark.parametrize(
    "options",
    [{}, {"bidirectional": True}, {"bidirectional": True, "freeze": "none", "postact": "gelu_glu"}],
    ids=["causal", "bidirectional", "trained"],
)
def test_compiles_without_graph_breaks(case, options):
    torch._dynamo.reset()
    layer, u = case.make(**options), draw(2, 5, SIZE).requires_grad_()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    leaves = [u, *layer.parameters()]
    actual, expected = compiled(u), layer(u)
    assert_close(actual, expected, "float64")
    gradients = [torch.autograd.grad(y.square().sum(), leaves) for y in (actual, expected)]
    for one, other in zip(*gradients, strict=True):
        assert_close(one, other, "float64 gradient")
    with torch.no_grad():
        for _, tensor in layer.own_tensors():
            tensor.mul_(0.75)
    assert_close(compiled(u), layer(u), "float64")


@EACH
@pytest.mark.parametrize("freeze", some(["all", "none"], "none"))
def test_decoding_compiles_without_graph_breaks(case, freeze):
    torch._dynamo.reset()
    layer, u = case.make(freeze=freeze), draw(2, 5, SIZE).requires_grad_()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        _, state = layer(u, return_state=True)
        for _ in range(2):
            results = [function(u[:, :1], state=state, return_state=True) for function in (compiled, layer)]
            for one, other in zip(*results, strict=True):
                assert_close(one, other, "float64")
            for _, tensor in layer.own_tensors():
                tensor.mul_(0.75)  # seen by the compiled layer too
    results = [function(u, state=state, return_state=True) for function in (compiled, layer)]
    for one, other in zip(*results, strict=True):
        assert_close(one, other, "float64")
    gradients = [torch.autograd.grad(y.square().sum() + after.square().sum(), u) for y, after in results]
    assert_close(gradients[0][0], gradients[1][0], "float64 gradient")


@pytest.mark.parametrize("name", some(CASES, "s4", "hyena"))  # S4D keeps what S4 does, S5 nothing
def test_steps_of_compiled_layers_see_a_fused_optimizer(name):
    torch._dynamo.reset()
    layer, u = CASES[name].make(freeze="none", dtype=torch.float32), draw(2, 5, SIZE, dtype=torch.float32)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    optimizer = torch.optim.AdamW(layer.parameters(), lr=0.1, fused=True)
    for trained in (layer, compiled):
        for prompt in (layer, compiled):
            layer.train()
            trained(u).square().sum().backward()
            optimizer.step()
            layer.eval()
            with torch.no_grad():
                _, state = prompt(u, return_state=True)
                expected = copy.deepcopy(layer)(u[:, :1], state=state)
                for step in (compiled, layer):
                    assert_close(step(u[:, :1], state=state), expected, "float32")


@EACH
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"hidden_size": 0}, "hidden_size must be a positive integer; got 0"),
        ({"freeze": "some"}, "freeze must be one of all, .*none; got 'some'"),
        ({"postact": "relu"}, "postact must be one of None, gelu_glu; got 'relu'"),
    ],
    ids=["hidden_size", "freeze", "postact"],
)
def test_bad_arguments(case, options, message):
    with pytest.raises(ValueError, match=message):
        case.layer(**{"hidden_size": SIZE, **case.options, **options})


@EACH
def test_bad_inputs(case):
    layer = case.make()
    with pytest.raises(ValueError, match=r"hidden_states must be \(B, T, 6\) with T > 0; got \(2, 4, 5\)"):
        layer(draw(2, 4, 5))
    with pytest.raises(ValueError, match="T > 0"):
        layer(draw(2, 0, SIZE))
    with pytest.raises(ValueError, match=r"attention_mask must be \(2, 4\) like hidden_states; got \(2, 5\)"):
        layer(draw(2, 4, SIZE), torch.ones(2, 5))
    with pytest.raises(ValueError, match=r"state must be \(2, .*\); got \(1, "):
        layer(draw(2, 4, SIZE), state=torch.zeros(layer.state_shape(1)))
