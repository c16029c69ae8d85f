"""The adaptive embedding and softmax: their definitions, torch's own as oracle, and who owns which tensor."""

import copy

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedConfig, PreTrainedModel

from hf_hybrid.layers.adaptive_softmax import IGNORED, AdaptiveEmbedding, AdaptiveSoftmax
from tests.tolerances import assert_close

VOCAB, WIDTH, CUTOFFS = 50, 16, (10, 23)
EMBEDDING_NAMES = [*(f"table_{i}" for i in range(3)), *(f"projection_{i}" for i in range(3))]


def make(tied=True, dtype=torch.float64, **options):
    torch.manual_seed(0)
    embedding = AdaptiveEmbedding(VOCAB, WIDTH, CUTOFFS).to(dtype)
    softmax = AdaptiveSoftmax(embedding, tied=tied, **options).to(dtype)
    return embedding, softmax


def draw(*shape, seed=1, dtype=torch.float64):
    return 2 * torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def draw_ids(*shape, low=0, high=VOCAB, seed=2):
    return torch.randint(low, high, shape, generator=torch.Generator().manual_seed(seed))


def one_by_one(embedding, ids):
    rows = []
    for token in ids.flatten().tolist():
        cluster = 0 if token < 10 else 1 if token < 23 else 2
        table, projection = embedding.of_cluster(cluster)
        rows.append(projection @ table[token - (0, 10, 23)[cluster]])
    return torch.stack(rows).unflatten(0, ids.shape)


def gathered(log_probabilities, labels):
    """Minus the sum of the labels' log-probabilities."""
    kept = labels != IGNORED
    return -log_probabilities[kept].gather(-1, labels[kept][:, None]).sum()


def torchs_own(embedding, softmax):
    """torch's adaptive softmax with the same weights."""
    source = embedding if softmax.tied else softmax
    other = nn.AdaptiveLogSoftmaxWithLoss(WIDTH, VOCAB, list(CUTOFFS), div_value=4.0, dtype=torch.float64)
    with torch.no_grad():
        other.head.weight.copy_(torch.cat([source.table_0, softmax.class_weight]))
        for tail, index in zip(other.tail, (1, 2), strict=True):
            table, projection = source.of_cluster(index)
            tail[0].weight.copy_(projection.T)
            tail[1].weight.copy_(table)
    return other


# embedding


def test_embedding_is_its_definition():
    embedding, _ = make()
    everything = torch.arange(VOCAB)
    assert embedding(everything).shape == (VOCAB, WIDTH)
    assert_close(embedding(everything), one_by_one(embedding, everything), "float64")
    ids = draw_ids(2, 3, 4)
    assert_close(embedding(ids), one_by_one(embedding, ids), "float64")


def test_embedding_gradients():
    embedding, _ = make()
    ids, weight = draw_ids(3, 5), draw(3, 5, WIDTH)
    leaves = list(embedding.parameters())
    actual = torch.autograd.grad((embedding(ids) * weight).sum(), leaves)
    expected = torch.autograd.grad((one_by_one(embedding, ids) * weight).sum(), leaves)
    for one, other in zip(actual, expected, strict=True):
        assert_close(one, other, "float64 gradient")


def test_widths_fall_by_the_factor():
    embedding = AdaptiveEmbedding(20, 18, [3, 7], factor=3)
    assert [cluster.width for cluster in embedding.clusters] == [18, 6, 2]
    assert [tuple(embedding.of_cluster(i)[0].shape) for i in range(3)] == [(3, 18), (4, 6), (13, 2)]
    assert embedding(torch.arange(20)).shape == (20, 18)


@pytest.mark.parametrize("token", [-1, VOCAB, 10**6])
def test_unknown_tokens_are_no_silent_zeros(token):
    embedding, softmax = make()
    with pytest.raises(IndexError):
        embedding(torch.tensor([3, token]))
    with pytest.raises(IndexError):
        softmax.loss(draw(2, WIDTH), torch.tensor([3, token]), embedding)


# softmax


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_probabilities_sum_to_one(dtype, tied):
    embedding, softmax = make(tied, dtype)
    probabilities = softmax(draw(3, 7, WIDTH, dtype=dtype), embedding).exp()
    assert probabilities.shape == (3, 7, VOCAB)
    assert_close(probabilities.sum(-1), torch.ones(3, 7), str(dtype).removeprefix("torch."))


@pytest.mark.parametrize("tied", [True, False])
def test_agrees_with_torchs_own(tied):
    embedding, softmax = make(tied)
    other = torchs_own(embedding, softmax)
    hidden, labels = draw(40, WIDTH).requires_grad_(), draw_ids(40)
    assert {0, 1, 2} == {0 if label < 10 else 1 if label < 23 else 2 for label in labels.tolist()}
    assert_close(softmax(hidden, embedding), other.log_prob(hidden), "float64")
    total, count = softmax.loss(hidden, labels, embedding)
    assert count == 40
    assert_close(total / count, other(hidden, labels).loss, "float64")
    source = embedding if tied else softmax
    ours = [hidden, softmax.class_weight, source.table_0]
    theirs = [hidden, other.head.weight]
    for index, tail in zip((1, 2), other.tail, strict=True):
        ours += source.of_cluster(index)
        theirs += [tail[1].weight, tail[0].weight]
    gradients = list(torch.autograd.grad(total / count, ours))
    wanted = list(torch.autograd.grad(other(hidden, labels).loss, theirs))
    wanted[1:2] = wanted[1][10:], wanted[1][:10]  # one matrix there: the head's tokens, then the clusters
    wanted[4::2] = [gradient.T for gradient in wanted[4::2]]
    for one, expected in zip(gradients, wanted, strict=True):
        assert_close(one, expected, "float64 gradient")


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(
    "labels",
    [
        draw_ids(4, 9),
        draw_ids(4, 9, high=10),
        draw_ids(4, 9, low=10, high=23),
        draw_ids(4, 9, low=23),
        torch.tensor([[0, 9, 10, 22, 23, 49, IGNORED, 9, 10]]).expand(4, 9),
        torch.full((4, 9), IGNORED),
    ],
    ids=["all", "head", "middle", "last", "edges", "ignored"],
)
def test_loss_and_gradients_are_those_of_the_whole_matrix(labels, tied):
    embedding, softmax = make(tied)
    hidden = draw(4, 9, WIDTH).requires_grad_()
    # the embedding feeds the hidden states too, so that tied tensors have gradients of two kinds
    leaves = [hidden, *embedding.parameters(), *softmax.parameters()]
    inputs = hidden + embedding(draw_ids(4, 9, seed=5))
    total, count = softmax.loss(inputs, labels, embedding)
    assert count == (labels != IGNORED).sum()
    assert total.dtype == torch.float64
    expected = gathered(softmax(inputs, embedding), labels)
    assert_close(total, expected, "float64")
    actual = torch.autograd.grad(total, leaves, retain_graph=True)
    for one, other in zip(actual, torch.autograd.grad(expected, leaves), strict=True):
        assert_close(one, other, "float64 gradient")


def test_loss_ignores_what_ignored_positions_hold():
    embedding, softmax = make()
    hidden, labels = draw(6, WIDTH), draw_ids(6)
    expected = softmax.loss(hidden[2:], labels[2:], embedding)
    hidden[:2], labels[:2] = torch.nan, IGNORED
    total, count = softmax.loss(hidden, labels, embedding)
    assert_close(total, expected[0], "exact")
    assert count == 4


def test_loss_makes_no_matrix_of_the_whole_vocabulary():
    class Largest(TorchDispatchMode):
        size = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            result = func(*args, **(kwargs or {}))
            tensors = result if isinstance(result, tuple | list) else (result,)
            self.size = max(self.size, *(x.numel() for x in tensors if isinstance(x, torch.Tensor)), 0)
            return result

    embedding = AdaptiveEmbedding(2000, WIDTH, (20, 60))
    softmax = AdaptiveSoftmax(embedding)
    hidden = draw(100, WIDTH, dtype=torch.float32).requires_grad_()
    with Largest() as seen:
        softmax.loss(hidden, draw_ids(100, high=60), embedding)[0].backward()
    assert seen.size <= 2000 * WIDTH
    with Largest() as seen:
        softmax(hidden, embedding)
    assert seen.size == 100 * 2000


@pytest.mark.parametrize("tied", [True, False])
def test_bfloat16(tied):
    embedding, softmax = make(tied, torch.float32)
    hidden, labels = draw(5, 8, WIDTH, dtype=torch.float32) / 4, draw_ids(5, 8)
    expected = softmax(hidden, embedding), softmax.loss(hidden, labels, embedding)[0]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert embedding(labels).dtype == torch.bfloat16
        under_autocast = softmax(hidden, embedding), softmax.loss(hidden, labels, embedding)[0]
    embedding.bfloat16(), softmax.bfloat16()
    assert embedding(labels).dtype == torch.bfloat16
    cast = softmax(hidden.bfloat16(), embedding), softmax.loss(hidden.bfloat16(), labels, embedding)[0]
    for results in (under_autocast, cast):
        for actual, wanted in zip(results, expected, strict=True):
            assert actual.dtype == torch.float32
            assert_close(actual, wanted, "bfloat16")
    # scores are rounded to 16 bits, probabilities are not
    assert_close(cast[0].exp().sum(-1), torch.ones(5, 8), "float32")


def test_dropout():
    embedding, softmax = make(dropout=0.5)
    dropped = []
    softmax.dropout.register_forward_hook(lambda module, args, output: dropped.append(tuple(args[0].shape)))
    hidden, labels = draw(9, WIDTH), torch.tensor([0, 1, 2, 10, 11, 23, 24, 25, IGNORED])
    first, _ = softmax.loss(hidden, labels, embedding)
    assert dropped == [(8, 16), (2, 4), (3, 1)]
    assert softmax.loss(hidden, labels, embedding)[0] != first
    assert (softmax(hidden, embedding) - softmax(hidden, embedding)).abs().max() > 0.1
    softmax.eval()
    assert_close(softmax(hidden, embedding), softmax(hidden, embedding), "exact")


# tensors


@pytest.mark.parametrize(
    ("vocab_size", "tied", "untied"), [(267_744, 45_393_920, 89_737_216), (260_000, 44_898_304, 88_745_984)]
)
def test_counts(vocab_size, tied, untied):
    with torch.device("meta"):
        embedding = AdaptiveEmbedding(vocab_size, 1024, (20_000, 60_000))
        softmaxes = [AdaptiveSoftmax(embedding, tied=tied) for tied in (True, False)]
    counts = [sum(x.numel() for x in nn.ModuleList([embedding, softmax]).parameters()) for softmax in softmaxes]
    assert counts == [tied, untied]


def test_each_tensor_has_one_owner():
    embedding, tied = make(True)
    _, untied = make(False)
    assert sorted(embedding.state_dict()) == sorted(EMBEDDING_NAMES)
    assert sorted(tied.state_dict()) == ["class_weight"]
    assert sorted(untied.state_dict()) == sorted({"class_weight", *EMBEDDING_NAMES} - {"projection_0"})
    other_embedding, other = copy.deepcopy(nn.ModuleList([embedding, tied]))
    hidden = draw(3, WIDTH)
    before = tied(hidden, embedding)
    with torch.no_grad():
        other_embedding.table_1.zero_()
    assert_close(tied(hidden, embedding), before, "exact")
    assert (other(hidden, other_embedding) - before).abs().max() > 0.1


def test_initial_values():
    torch.manual_seed(0)
    embedding = AdaptiveEmbedding(3000, 64, (200, 1000))
    softmax = AdaptiveSoftmax(embedding, tied=False)
    for module, projected in ((embedding, (0, 1, 2)), (softmax, (1, 2))):
        for index, width in enumerate((64, 16, 4)):
            assert abs(getattr(module, f"table_{index}").std().item() * width**0.5 - 1) < 0.05
        for index, width in ((i, 64 // 4**i) for i in projected):
            bound = (6 / (64 + width)) ** 0.5
            assert 0.9 * bound < getattr(module, f"projection_{index}").abs().max() <= bound
    bound = (6 / (64 + 2)) ** 0.5
    assert 0.9 * bound < softmax.class_weight.abs().max() <= bound


@pytest.mark.parametrize("name", [*EMBEDDING_NAMES, "class_weight"])
def test_reset_leaves_loaded_tensors_alone(name):
    module = AdaptiveSoftmax(make()[0], tied=False) if name == "class_weight" else make()[0]
    for tensor in module.parameters():
        tensor.data.fill_(7)
    getattr(module, name)._is_hf_initialized = True
    module.reset_parameters()
    for other, tensor in module.named_parameters():
        assert (tensor == 7).all() == (other == name)


class ToyConfig(PreTrainedConfig):
    model_type = "adaptive_toy"
    tied: bool = True


class ToyModel(PreTrainedModel):
    config: ToyConfig
    base_model_prefix = "toy"

    def __init__(self, config):
        super().__init__(config)
        self.embed_tokens = AdaptiveEmbedding(VOCAB, WIDTH, CUTOFFS)
        self.lm_head = AdaptiveSoftmax(self.embed_tokens, tied=config.tied)
        self.post_init()

    def _init_weights(self, module):
        super()._init_weights(module)
        if isinstance(module, AdaptiveEmbedding | AdaptiveSoftmax):
            module.reset_parameters()

    def forward(self, input_ids):
        return self.lm_head(self.embed_tokens(input_ids), self.embed_tokens)


@pytest.mark.parametrize("tied", [True, False])
def test_transformers_saves_loads_and_fills_in(tmp_path, tied):
    model, ids = ToyModel(ToyConfig(tied=tied)).eval(), draw_ids(2, 5)
    model.save_pretrained(tmp_path)
    loaded, info = ToyModel.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert_close(loaded.eval()(ids), model(ids), "exact")
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    for name in ("embed_tokens.table_1", "embed_tokens.projection_2", "lm_head.class_weight"):
        del tensors[name]
    save_file(tensors, file, metadata={"format": "pt"})
    torch.manual_seed(0)
    loaded, info = ToyModel.from_pretrained(tmp_path, output_loading_info=True)
    assert len(info["missing_keys"]) == 3
    for name, tensor in loaded.named_parameters():
        assert torch.equal(tensor, model.get_parameter(name)) == (name in tensors)
    assert 0.3 < loaded.embed_tokens.table_1.std() < 0.7
    assert 0 < loaded.lm_head.class_weight.abs().max() <= (6 / (16 + 2)) ** 0.5


def test_compiles_without_graph_breaks():
    torch._dynamo.reset()
    model, ids = ToyModel(ToyConfig()).double(), draw_ids(2, 5)
    assert_close(torch.compile(model.forward, fullgraph=True, backend="aot_eager")(ids), model(ids), "float64")


# errors


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"cutoffs": ()}, r"cutoffs must be one or more ascending positive numbers below vocab_size 50; got \(\)"),
        ({"cutoffs": (0, 10)}, r"cutoffs must be one or more ascending .* got \(0, 10\)"),
        ({"cutoffs": (20, 10)}, r"cutoffs must be one or more ascending .* got \(20, 10\)"),
        ({"cutoffs": (10, 10)}, r"cutoffs must be one or more ascending .* got \(10, 10\)"),
        ({"cutoffs": [10, 50]}, r"cutoffs must be one or more ascending .* got \(10, 50\)"),
        ({"factor": 0}, "factor must be a positive integer; got 0"),
        ({"hidden_size": 24}, "hidden_size must be a positive multiple of 16, factor .* got 24"),
        ({"hidden_size": 0}, "hidden_size must be a positive multiple of 16, factor .* got 0"),
    ],
)
def test_bad_arguments(options, message):
    with pytest.raises(ValueError, match=message):
        AdaptiveEmbedding(**{"vocab_size": VOCAB, "hidden_size": WIDTH, "cutoffs": CUTOFFS, **options})


def test_bad_inputs():
    embedding, softmax = make()
    with pytest.raises(ValueError, match=r"labels must be \(2, 3\); got \(3,\)"):
        softmax.loss(draw(2, 3, WIDTH), draw_ids(3), embedding)
    with pytest.raises(ValueError, match=r"embedding must be the tied one, .* got None"):
        softmax(draw(3, WIDTH))
    with pytest.raises(ValueError, match=r"embedding must be the tied one, .* got .*end=11"):
        softmax.loss(draw(3, WIDTH), draw_ids(3), AdaptiveEmbedding(VOCAB, WIDTH, (11, 23)))
