"""A loss in chunks is the loss of all logits: its value, its gradients, and theirs; and it holds a chunk of them."""

import copy
import itertools

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from hf_hybrid.layers.adaptive_softmax import AdaptiveEmbedding, AdaptiveSoftmax
from hf_hybrid.layers.chunked_loss import chunked_loss, loss_chunk_size
from tests.tolerances import assert_close

WIDTH, VOCAB, ROWS, LENGTH = 8, 50, 2, 13
ALL = ROWS * LENGTH


def draw(dtype=torch.float64):
    generator = torch.Generator().manual_seed(1)
    states = torch.randn(ROWS, LENGTH, WIDTH, generator=generator, dtype=torch.float64).to(dtype)
    labels = torch.randint(VOCAB, (ROWS, LENGTH), generator=generator)
    labels[:, ::4] = -100
    return states, labels


def of_logits(head):
    def loss_of(states, labels):
        logits = head(states)
        return F.cross_entropy(logits.to(torch.promote_types(logits.dtype, torch.float32)), labels, reduction="sum")

    return loss_of


def plain(loss_of, states, labels, chunk_size=None):
    return loss_of(states.flatten(0, 1), labels.flatten()), (labels != -100).sum()


class Adapted(nn.Module):
    def __init__(self):
        super().__init__()
        self.lm_head = nn.Linear(WIDTH, VOCAB)

    def forward(self, states):
        return self.lm_head(states)


class Adaptive(nn.Module):
    def __init__(self, tied):
        super().__init__()
        self.embedding = AdaptiveEmbedding(VOCAB, WIDTH, (10, 23), 2)
        self.softmax = AdaptiveSoftmax(self.embedding, tied=tied)

    def loss_of(self, states, labels):
        return self.softmax.loss(states, labels, self.embedding if self.softmax.tied else None)[0]


def make(kind):
    torch.manual_seed(0)
    if kind == "adapter on the head":
        model = get_peft_model(Adapted(), LoraConfig(target_modules=["lm_head"], r=2, init_lora_weights=False))
        return model, of_logits(model)
    if kind.startswith("adaptive"):
        model = Adaptive(tied=kind == "adaptive, tied")
        return model, model.loss_of
    model = nn.Linear(WIDTH, VOCAB, bias=kind == "bias")
    return model, of_logits(model)


KINDS = ("linear", "bias", "adapter on the head", "adaptive, tied", "adaptive, untied")


def gradients(kind, compute, dtype=torch.float64, chunk_size=5, factor=1.0, autocast=False):
    model, _ = make(kind)
    model = model.to(dtype)
    loss_of = model.loss_of if kind.startswith("adaptive") else of_logits(model)
    states, labels = draw(dtype)
    states.requires_grad_()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        addend, count = compute(loss_of, states, labels, chunk_size)
    (factor * addend).backward()
    assert count == (labels != -100).sum()
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {"loss": addend.detach(), "states": states.grad, **found}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("chunk_size", [1, 5, 9, ALL])
def test_values_and_gradients_are_those_of_all_logits(kind, chunk_size):
    expected, actual = gradients(kind, plain), gradients(kind, chunked_loss, chunk_size=chunk_size)
    assert actual.keys() == expected.keys()
    assert len(expected) > 2
    for name, tensor in expected.items():
        assert_close(actual[name], tensor, "float64 gradient")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("options", "row"),
    [({"dtype": torch.float32}, "float32 gradient"), ({"dtype": torch.bfloat16}, "bfloat16 gradient"),
     ({"dtype": torch.float32, "autocast": True}, "bfloat16 gradient")],
)  # fmt: skip
def test_other_precisions(kind, options, row):
    expected, actual = gradients(kind, plain, **options), gradients(kind, chunked_loss, **options)
    for name, tensor in expected.items():
        assert actual[name].dtype == tensor.dtype
        assert_close(actual[name], tensor, row)
    assert actual["loss"].dtype == torch.float32


def test_autocast_adds_gradients_up_in_float32():
    """With many chunks, as many roundings to bfloat16 would be several times the error of one product."""
    torch.manual_seed(0)
    head = nn.Linear(32, 100, bias=False)
    states, labels = torch.randn(2048, 32), torch.randint(100, (2048,))

    def gradient(compute, dtype=torch.float32):
        mine = copy.deepcopy(head).to(dtype)
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.float32):
            compute(of_logits(mine), states.to(dtype), labels)[0].backward()
        return mine.weight.grad.double()

    exact = gradient(lambda loss_of, *tensors: (loss_of(*tensors),), torch.float64)
    one = gradient(lambda loss_of, *tensors: (loss_of(*tensors),))
    many = gradient(lambda loss_of, *tensors: chunked_loss(loss_of, *tensors, 16))
    assert (many - exact).norm() < 1.2 * (one - exact).norm()
    assert (one - exact).norm() > 0


class Largest(TorchDispatchMode):
    """Notes the largest tensor that any operation returns."""

    def __init__(self):
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        outputs = function(*args, **(kwargs or {}))
        for output in outputs if isinstance(outputs, tuple | list) else [outputs]:
            self.numel = max(self.numel, output.numel() if isinstance(output, torch.Tensor) else 0)
        return outputs


@pytest.mark.parametrize("compute", [plain, chunked_loss])
def test_it_holds_the_logits_of_a_chunk_alone(compute):
    model, loss_of = make("linear")
    states, labels = draw(torch.float32)
    states.requires_grad_()
    with Largest() as largest:
        compute(loss_of, states, labels, 3)[0].backward()
    assert largest.numel == (ALL * VOCAB if compute is plain else VOCAB * WIDTH)  # the head's weights
    assert model.weight.grad is not None


@pytest.mark.parametrize(("chunks", "calls"), [(1, 1), (2, 3), (5, 9)])
def test_every_chunk_but_the_last_is_computed_twice(chunks, calls):
    counted = []
    _, loss_of = make("linear")
    states, labels = draw(torch.float32)
    labels.fill_(1)

    def counting(*chunk):
        counted.append(len(chunk[0]))
        return loss_of(*chunk)

    chunked_loss(counting, states, labels, -(-ALL // chunks))[0].backward()
    assert len(counted) == calls


class Called(TorchDispatchMode):
    """Notes which operations run."""

    def __init__(self):
        super().__init__()
        self.functions = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.functions.add(function)
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("hidden", [0, 1])
def test_tokens_are_dropped_only_if_some_have_no_label(hidden):
    model, loss_of = make("bias")
    model.double()
    states, labels = draw()
    labels = labels.clamp_min(0)
    labels[:, :hidden] = -100
    states = states[:, :-1].requires_grad_()  # as a causal model passes them
    inputs = [states, *model.parameters()]
    found = []
    for compute in (plain, chunked_loss):
        with Called() as called:
            addend, count = compute(loss_of, states, labels[:, 1:] if not hidden else labels[:, :-1], 5)
            found.append([addend, *torch.autograd.grad(addend, inputs)])
        assert count == ROWS * (LENGTH - 1 - hidden)
    assert (torch.ops.aten.index.Tensor in called.functions) == bool(hidden)
    for actual, expected in zip(found[1], found[0], strict=True):
        assert_close(actual, expected, "float64 gradient")


@pytest.mark.parametrize("kind", ["linear", "adaptive, tied"])
def test_no_label_at_all(kind):
    """Every process must have gradients for the same tensors, also one whose rows have no labels."""
    model, loss_of = make(kind)
    states, labels = draw(torch.float32)
    states.requires_grad_()
    addend, count = chunked_loss(loss_of, states, torch.full_like(labels, -100), 4)
    addend.backward()
    assert (addend.item(), count.item()) == (0.0, 0)
    used = {name: p.grad for name, p in model.named_parameters() if not name.endswith("projection_0")}
    assert all(gradient is not None and not gradient.any() for gradient in used.values())


def test_second_derivatives():
    _, labels = draw()
    model, loss_of = make("bias")
    model.double()
    found = []
    for compute in (plain, chunked_loss):
        states = draw()[0].requires_grad_()
        inputs = [states, *model.parameters()]
        addend = compute(loss_of, states, labels, 5)[0]
        first = torch.autograd.grad(addend, inputs, create_graph=True)
        found.append(torch.autograd.grad(sum(gradient.square().sum() for gradient in first), inputs))
    for actual, expected in zip(found[1], found[0], strict=True):
        assert expected.any()
        assert_close(actual, expected, "float64 gradient")


def test_dropout_draws_the_same_when_a_chunk_is_computed_again():
    """In float64 the gradient is that of the value: a step along it changes the loss by its square."""
    model, _ = make("linear")
    model = model.double()
    dropout = nn.Dropout(0.5)
    states, labels = draw()
    states.requires_grad_()

    def loss(states):
        torch.manual_seed(5)
        return chunked_loss(lambda *chunk: of_logits(model)(dropout(chunk[0]), chunk[1]), states, labels, 4)[0]

    value = loss(states)
    value.backward()
    step = 1e-6
    changed = loss((states + step * states.grad).detach())
    assert_close((changed - value) / step, states.grad.square().sum(), "float32 gradient")


def test_a_scaled_loss_has_scaled_gradients_in_float16():
    """With GradScaler's factor, gradients that float16 cannot hold are not lost."""
    small = gradients("linear", chunked_loss, torch.float16, factor=2.0**-8)
    scaled = gradients("linear", chunked_loss, torch.float16, factor=1.0)
    for name in ("states", "weight"):
        assert_close(small[name].float() * 2**8, scaled[name].float(), "float16")


@pytest.mark.parametrize("chunk_size", [5, ALL])
@pytest.mark.parametrize("autocast", [False, True])
def test_it_compiles_as_one_graph(chunk_size, autocast):
    torch.compiler.reset()
    compiled = torch.compile(chunked_loss, fullgraph=True, backend="aot_eager")
    options = {"dtype": torch.float32, "chunk_size": chunk_size, "autocast": autocast}
    expected, actual = gradients("bias", plain, **options), gradients("bias", compiled, **options)
    for name, tensor in expected.items():
        assert_close(actual[name], tensor, "bfloat16 gradient" if autocast else "float32 gradient")


def test_the_size_of_a_chunk():
    assert loss_chunk_size(2**15, 256) == 1024
    assert loss_chunk_size(267_744, 256) == 256  # as many logits as weights
    assert loss_chunk_size(2**30, 8) == 8
    sizes = itertools.product((32, 50_000, 267_744), (64, 4096))
    assert all(loss_chunk_size(vocab, width) * vocab >= vocab * width for vocab, width in sizes)
