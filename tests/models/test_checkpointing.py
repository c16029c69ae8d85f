"""Activation checkpointing that keeps what is dear to compute."""

from collections import Counter

import pytest
import torch
import transformers
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, noop_context_fn
from transformers.modeling_layers import GradientCheckpointingLayer

import hf_hybrid
from hf_hybrid.models import checkpointing
from hf_hybrid.models.checkpointing import SAVED, selective

from ..matrix import some
from .tiny import GENERATIVE, MODEL_CLASSES, main_output, tiny_inputs, tiny_model

WITHOUT_DROPOUT = {"dropout": 0.0, "attention_dropout": 0.0}
# variants with what the others lack: other state spaces, whose frozen filters are kept, and other parts of a layer
LANGUAGE_MODEL, ENCODER = ("spade", "AutoModelForCausalLM"), ("chela", "AutoModelForMaskedLM")
VARIANTS = {
    "hyena": (*LANGUAGE_MODEL, {"ssm_type": "hyena"}),
    "frozen hyena": (*LANGUAGE_MODEL, {"ssm_type": "hyena", "ssm_freeze": "all"}),
    "frozen S4": (*LANGUAGE_MODEL, {"ssm_freeze": "all", "combine_mode": "concat"}),
    "S4D": (*LANGUAGE_MODEL, {"ssm_type": "s4d"}),
    "S5": (*LANGUAGE_MODEL, {"ssm_type": "s5"}),
    "LSTM": (*LANGUAGE_MODEL, {"ssm_type": "lstm"}),
    "states of filters": ("bst", LANGUAGE_MODEL[1], {"context_type": "multi_filter", "num_context_states": 6}),
    "batch norm": (*ENCODER, {"norm_type": "batch_norm"}),
    "batch norm of branches": (
        "spade",
        "AutoModelForTextEncoding",
        {"norm_type": "batch_norm", "combine_mode": "concat", "is_encoder_decoder": False},
    ),
    "moving average": (*ENCODER, {"mixer": "ema", "attention_fn": "laplace", "chunk_size": 5}),
    "recurrent": ("srformer_t5", "AutoModelForSeq2SeqLM", {"cross_attention_mode": "recurrent"}),
}

XL = ("srformer_t5", "AutoModelForSeq2SeqLM", {"cross_attention_mode": "transformer_xl"})


class Calls(TorchDispatchMode):
    """Counts what is computed, and not what a checkpoint has kept."""

    def __init__(self):
        super().__init__()
        self.counts = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.counts[func] += 1
        return func(*args, **kwargs or {})


def checkpointed_model(model, options):
    """The model in training, without a cache, which checkpointed layers cannot fill."""
    model.config.use_cache = False
    if options is not None:
        model.activation_checkpointing_enable(options)
    return model.train()


def train(model, options, *, precision="fp32"):
    """Loss, gradients, statistics and calls of a step; options None checkpoints nothing."""
    checkpointed_model(model, options)
    torch.manual_seed(4)
    with Calls() as calls:
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
            loss = main_output(model(**tiny_inputs(model))).square().mean()
        torch.rand(3)  # what follows must not change what is computed again
        loss.backward()
    gradients = {name: x.grad for name, x in model.named_parameters() if x.grad is not None}
    return loss.detach(), gradients, dict(model.named_buffers()), calls.counts


def assert_same_step(step, plain):
    assert torch.equal(step[0], plain[0])
    for tensors, expected in zip(step[1:3], plain[1:3], strict=True):
        assert tensors.keys() == expected.keys()
        for name, tensor in expected.items():
            assert torch.equal(tensors[name], tensor), name


@pytest.mark.parametrize("saved", SAVED)
@pytest.mark.parametrize(("model_type", "auto_class"), some(MODEL_CLASSES, *GENERATIVE))
def test_loss_and_gradients_are_those_without(model_type, auto_class, saved):
    """To the last bit, with dropout: what is computed again draws the same numbers."""
    for precision in ("fp32", "bf16"):
        plain = train(tiny_model(model_type, auto_class), None, precision=precision)
        step = train(tiny_model(model_type, auto_class), {"save": saved}, precision=precision)
        assert_same_step(step, plain)


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_kind_of_layer(variant):
    model_type, auto_class, fields = VARIANTS[variant]
    plain = train(tiny_model(model_type, auto_class, **fields), None)
    for saved in ["operations"] if variant == "LSTM" else SAVED:
        assert_same_step(train(tiny_model(model_type, auto_class, **fields), {"save": saved}), plain)


@pytest.mark.parametrize("variant", [("spade", LANGUAGE_MODEL[1], {"ssm_type": "lstm"}), XL])
def test_recurrent_networks_of_torch_keep_no_products(variant):
    """With padding they write into the results of their products, which would be read again."""
    model_type, auto_class, fields = variant
    model = tiny_model(model_type, auto_class, **fields)
    with pytest.raises(ValueError, match=r"(?s)save in .* must be operations, .* recurrent.*; got 'products'"):
        model.activation_checkpointing_enable({"save": "products"})
    ids, mask = torch.arange(3, 23).reshape(2, 10), torch.ones(2, 10, dtype=torch.long)
    mask[1, :4] = 0
    gradients = []
    for options in (None, {"save": "operations"}):
        model = checkpointed_model(tiny_model(model_type, auto_class, **fields), options)
        torch.manual_seed(4)
        model(ids, labels=ids, attention_mask=mask).loss.backward()
        gradients.append([x.grad for x in model.parameters() if x.grad is not None])
    assert all(torch.equal(x, y) for x, y in zip(*gradients, strict=True))


def test_packed_sequences_of_a_frozen_state_space():
    """Whose taps are made in the first step alone."""
    results = []
    for options in (None, *({"save": saved} for saved in SAVED)):
        model = checkpointed_model(tiny_model(*LANGUAGE_MODEL, ssm_type="s4d", ssm_freeze="all"), options)
        inputs = {"input_ids": torch.arange(2, 14)[None], "position_ids": torch.tensor([[*range(5), *range(7)]])}
        torch.manual_seed(4)
        loss = main_output(model(**inputs)).square().mean()
        loss.backward()
        results.append([loss.detach(), *(x.grad for x in model.parameters() if x.grad is not None)])
    for step in results[1:]:
        assert all(torch.equal(x, y) for x, y in zip(step, results[0], strict=True))


def test_what_is_kept_is_not_computed_again():
    aten, own = torch.ops.aten, getattr(torch.ops, checkpointing.NAMESPACE)
    plain, layers, operations, products = (
        train(tiny_model(*LANGUAGE_MODEL), options)[3]
        for options in (None, {"use_reentrant": False}, *({"save": saved} for saved in ("operations", "products")))
    )
    attention, product, norm = own.local_attention.default, aten.addmm.default, aten.native_layer_norm.default
    assert layers[attention] == 2 * plain[attention]
    assert operations[attention] == products[attention] == plain[attention]
    assert plain[product] == products[product] < operations[product] == layers[product]
    assert plain[norm] < products[norm] == operations[norm] == layers[norm]


def test_attention_that_draws_a_mask_is_computed_again():
    op = torch.ops.aten._scaled_dot_product_flash_attention.default
    for function in (checkpointing._keep_operations, checkpointing._keep_products):
        assert function(None, op, 1, 2, 3) is CheckpointPolicy.MUST_SAVE
        assert function(None, op, 1, 2, 3, 0.0) is CheckpointPolicy.MUST_SAVE
        assert function(None, op, 1, 2, 3, 0.1) is CheckpointPolicy.PREFER_RECOMPUTE
        assert function(None, op, 1, 2, 3, dropout_p=0.1) is CheckpointPolicy.PREFER_RECOMPUTE


@pytest.mark.parametrize("saved", some(SAVED, "products"))
@pytest.mark.parametrize(("model_type", "auto_class"), some(GENERATIVE, GENERATIVE[0]))
def test_compiled(model_type, auto_class, saved):
    gradients = []
    for options in (None, {"save": saved}):
        torch.compiler.reset()
        model = checkpointed_model(tiny_model(model_type, auto_class, **WITHOUT_DROPOUT), options)
        step = torch.compile(model, fullgraph=True, backend="aot_eager")
        main_output(step(**tiny_inputs(model), use_cache=False)).square().mean().backward()
        gradients.append({name: x.grad for name, x in model.named_parameters() if x.grad is not None})
    assert gradients[0].keys() == gradients[1].keys()
    for name, gradient in gradients[0].items():
        assert torch.equal(gradients[1][name], gradient), name


def checkpointed(model):
    """The functions by which a model's layers are checkpointed."""
    layers = [x for x in model.modules() if isinstance(x, GradientCheckpointingLayer) and x.gradient_checkpointing]
    return [layer._gradient_checkpointing_func.keywords for layer in layers]


def test_a_patched_model_keeps_what_it_was_told():
    config = transformers.T5Config(
        vocab_size=64, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2, decoder_start_token_id=0
    )
    model = transformers.T5ForConditionalGeneration(config).train()
    model.activation_checkpointing_enable({"save": "products"})
    hf_hybrid.patch_cross_attention(model, segment_size=3)
    assert checkpointed(model) == [{"use_reentrant": False, "context_fn": SAVED["products"]}] * 2
    main_output(model(input_ids=torch.ones(1, 9, dtype=int), labels=torch.ones(1, 3, dtype=int))).sum().backward()


def test_other_options_go_on_to_torch():
    model = tiny_model("bst", "AutoModelForCausalLM")
    for options in (None, {"use_reentrant": True}, {"use_reentrant": False, "context_fn": noop_context_fn}):
        model.activation_checkpointing_enable(options)
        assert checkpointed(model) == [options or {"use_reentrant": False}] * 2
    model.activation_checkpointing_enable({"save": "operations", "preserve_rng_state": False}, every_n_layers=2)
    expected = {"preserve_rng_state": False, "use_reentrant": False, "context_fn": SAVED["operations"]}
    assert checkpointed(model) == [expected]
    model.activation_checkpointing_disable()
    assert not checkpointed(model)
    assert selective(checkpoint) is checkpoint


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"save": "product"}, "save in activation_checkpointing_kwargs must be one of operations, products; "
                              "got 'product'. Did you mean 'products'?"),
        ({"save": None}, "must be one of operations, products; got None"),
        ({"save": ["products"]}, r"must be one of operations, products; got \['products'\]"),
        ({"save": "products", "use_reentrant": True}, "use_reentrant in .* must be false or left out with save; "
                                                      "got True"),
        ({"save": "products", "context_fn": noop_context_fn}, "context_fn in .* must be left out with save"),
    ],
)  # fmt: skip
def test_bad_options_are_refused(options, message):
    model = tiny_model("bst", "AutoModel")
    with pytest.raises(ValueError, match=message.replace("?", r"\?")):
        model.activation_checkpointing_enable(options)
    assert not checkpointed(model)
