"""The feed-forward network against its formula, and what it keeps for the backward."""

import copy

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from transformers.activations import ACT2FN

from hf_hybrid.layers import feed_forward
from hf_hybrid.layers.feed_forward import FeedForward

DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16, "autocast": torch.float32}
WIDTH, WIDE, TOKENS = 6, 40, 3 * 5


def make(activation="silu", dtype="float32", *, gated=False, bias=True, dropout=0.0):
    torch.manual_seed(0)
    module = FeedForward(WIDTH, WIDE, ACT2FN[activation], gated=gated, bias=bias, dropout=dropout)
    return module.to(DTYPES[dtype])


def linear(proj, x):
    return F.linear(x, proj.weight, proj.bias)


def formula(module, x):
    """What it computes, by torch's autograd."""
    hidden = linear(module.up_proj, x)
    if module.gate_proj is None:
        return linear(module.down_proj, module.activation(hidden))
    return linear(module.down_proj, module.activation(linear(module.gate_proj, x)) * hidden)


def step(function, module, dtype="float32"):
    """Output, gradients of the input and of all weights, and the bytes kept of each token's wide tensors."""
    module.zero_grad()
    x = torch.randn(3, 5, WIDTH, generator=torch.Generator().manual_seed(1)).to(DTYPES[dtype]).requires_grad_()
    wide = {}

    def pack(tensor):
        if tensor.shape[-1:] == (WIDE,) and tensor.numel() == TOKENS * WIDE:
            wide[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes() / TOKENS / WIDE
        return tensor

    hooks = torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)
    with torch.autocast("cpu", torch.bfloat16, enabled=dtype == "autocast"), hooks:
        output = function(x)
    output.float().square().sum().backward()
    return [output, x.grad, *(p.grad for p in module.parameters())], sum(wide.values())


def assert_same(tensors, expected):
    for tensor, other in zip(tensors, expected, strict=True):
        assert tensor.dtype == other.dtype
        assert torch.equal(tensor, other)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_new", "relu", "relu2", "prelu", "linear"])
def test_values_and_gradients_are_those_of_autograd(activation, gated, bias, dtype):
    """To the last bit, and only the inputs of the activation and of the product are kept, each once."""
    module = make(activation, dtype, gated=gated, bias=bias)
    found, kept = step(module, module, dtype)
    expected, before = step(lambda x: formula(module, x), module, dtype)
    assert_same(found, expected)
    if activation == "prelu":
        assert kept == before
    else:
        assert kept == (1 + gated) * found[0].element_size()
        assert before > kept or (activation in ("relu", "linear") and not gated)


@pytest.mark.parametrize("gated", [False, True])
def test_gradcheck(gated):
    module = make(dtype="float64", gated=gated)
    weights = dict(module.named_parameters())

    def call(x, *tensors):
        return torch.func.functional_call(module, dict(zip(weights, tensors, strict=True)), x)

    inputs = torch.randn(1, 2, WIDTH, dtype=torch.float64, requires_grad=True), *weights.values()
    assert torch.autograd.gradcheck(call, inputs, fast_mode=True)
    assert torch.autograd.gradgradcheck(call, inputs, fast_mode=True)


@pytest.mark.parametrize("trained", [["up_proj"], ["down_proj"], ["gate_proj"], ["down_proj.bias"]])
def test_some_weights_are_frozen(trained):
    module = make(gated=True)
    for name, weight in module.named_parameters():
        weight.requires_grad_(name.startswith(tuple(trained)))
    x, leaves = torch.randn(2, 4, WIDTH), [weight for weight in module.parameters() if weight.requires_grad]
    found, expected = (torch.autograd.grad(y.sum(), leaves) for y in (module(x), formula(module, x)))
    assert_same(found, expected)


def test_called_twice_and_copied():
    module = make(gated=True)
    found, _ = step(lambda x: module(module(x)), module)
    expected, _ = step(lambda x: formula(module, formula(module, x)), module)
    assert_same(found, expected)
    assert_same(step(twin := copy.deepcopy(module), twin)[0], step(module, module)[0])


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed(reentrant):
    module = make(gated=True)
    found, kept = step(lambda x: checkpoint(module, x, use_reentrant=reentrant), module)
    assert_same(found, step(module, module)[0])
    assert kept == 0


def test_what_is_computed_again_can_be_moved_by_hooks():
    """Such as those that keep activations in another memory."""
    module = make()
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x.double(), lambda x: x.float()):
        moved = step(module, module)[0]
    assert_same(moved, step(module, module)[0])


def test_what_is_written_into_is_noticed():
    module = make("linear")
    kept = []
    module.up_proj.register_forward_hook(lambda *arguments: kept.append(arguments[-1]))
    output = module(torch.ones(1, 1, WIDTH))
    output.sum().backward(retain_graph=True)
    with torch.no_grad():
        kept[0].add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        output.sum().backward()


def alter_by_hook(module):
    calls = []
    module.down_proj.register_forward_hook(lambda *arguments: calls.append(arguments))
    return calls


def alter_by_forward(module):
    calls, forward = [], module.down_proj.forward
    module.down_proj.forward = lambda x: (calls.append(x), forward(x))[1]
    return calls


def alter_class(module):
    calls = []

    class Counted(type(module.activation)):
        def forward(self, x):
            calls.append(x)
            return super().forward(x)

    module.activation = Counted()
    return calls


def alter_dropout(module):
    calls = []
    module.dropout.register_forward_hook(lambda *arguments: calls.append(arguments))
    return calls


def alter_activation(module):
    calls = []
    module.activation.register_forward_pre_hook(lambda *arguments: calls.append(arguments))
    return calls


def alter_all(module):
    calls = []
    module.handle = nn.modules.module.register_module_forward_hook(lambda *arguments: calls.append(arguments))
    return calls


@pytest.mark.parametrize("alter", [alter_activation, alter_class, alter_dropout])
def test_an_altered_relu_or_dropout_is_called(alter):
    module = make("relu")
    expected, _ = step(module, module)
    calls = alter(module)
    found, _ = step(module, module)
    assert len(calls) >= 1  # and in the backward, if what is kept does not tell the gradient
    assert_same(found, expected)
    module.dropout = nn.Identity()
    assert_same(step(module, module)[0], expected)


@pytest.mark.parametrize("alter", [alter_by_hook, alter_by_forward, alter_activation, alter_all])
def test_altered_modules_are_called(alter):
    module = make()
    expected, kept = step(module, module)
    calls = alter(module)
    try:
        found, more = step(module, module)
    finally:
        if alter is alter_all:
            module.handle.remove()
    assert len(calls) >= 1
    assert more == 2 * kept
    assert_same(found, expected)


def test_an_adapter_is_called():
    module = make(gated=True)
    adapted = get_peft_model(module, LoraConfig(target_modules=["down_proj"], init_lora_weights=False))
    x = torch.randn(2, 4, WIDTH)
    output = adapted(x)
    lora = module.down_proj
    assert type(lora) is not nn.Linear
    hidden = module.activation(module.gate_proj(x)) * module.up_proj(x)
    assert torch.equal(output, lora(hidden))
    assert (output - formula(module, x)).abs().max() > 1e-3
    output.sum().backward()
    assert all(p.grad is not None for name, p in module.named_parameters() if "lora" in name)


def test_dropout_is_left_to_autograd():
    module = make(gated=True, dropout=0.5)
    assert step(module, module)[1] > step(module.eval(), module)[1]
    assert (module.train()(torch.ones(1, 1, WIDTH)) != module.eval()(torch.ones(1, 1, WIDTH))).any()


def test_compiles_without_graph_breaks():
    torch.compiler.reset()
    module = make(gated=True)
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    assert_same(step(compiled, module)[0], step(module, module)[0])


def test_transforms_of_torch_func():
    module, x = make("gelu", gated=True), torch.randn(3, 5, WIDTH)
    assert torch.allclose(torch.func.vmap(module)(x), module(x), atol=1e-6)
    (expected,) = torch.autograd.grad(module(leaf := x.clone().requires_grad_()).sum(), leaf)
    assert torch.equal(torch.func.grad(lambda x: module(x).sum())(x), expected)


def test_no_memory_is_needed():
    with torch.device("meta"):
        module = FeedForward(WIDTH, WIDE, nn.SiLU(), gated=True)
        module(torch.empty(1, 3, WIDTH)).sum().backward()
    assert module.up_proj.weight.grad.shape == (WIDE, WIDTH)


def test_without_it_a_gated_network_keeps_four_tensors(monkeypatch):
    """So what counts them would see it if the network took ordinary autograd everywhere."""
    monkeypatch.setattr(feed_forward.FeedForward, "_keeps_twice", lambda self: False)
    module = make(gated=True)
    assert step(module, module)[1] == 4 * 4
