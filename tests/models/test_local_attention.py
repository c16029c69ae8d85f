"""Local self-attention decodes token by token what it computes of a whole sequence, over caches of every kind."""

from unittest.mock import patch

import pytest
import torch
from accelerate import cpu_offload
from transformers import DynamicCache, StaticCache

from hf_hybrid.kernels import local_attention_step
from hf_hybrid.models.local_attention import LocalSelfAttention
from hf_hybrid.models.masks import without_padding
from tests.kernels.interpreter import interpreted
from tests.matrix import some
from tests.models.tiny import DECODER_CASES, DECODERS, tiny_config, tiny_inputs, tiny_model
from tests.tolerances import assert_close

STEP = "hf_hybrid.models.local_attention.local_attention_step"
CACHES = {
    "growing": lambda config: DynamicCache(),
    "sliding": lambda config: DynamicCache(config=config),
    "static": lambda config: StaticCache(config=config, max_cache_len=24),
}
KINDS = [
    {"attention_type": "window"},
    {"attention_type": "chunk"},
    {"attention_type": "window", "include_self": False, "qk_norm": True},
    {"attention_type": "chunk", "include_self": False},
]


def make(kind):
    """A layer, inputs, and a mask whose second row is padded on the left."""
    torch.manual_seed(0)
    config = tiny_config("spade", is_decoder=True, is_encoder_decoder=False, attention_type=kind["attention_type"])
    config.score_scale_init = 2.0  # a field of BST's, which alone normalises queries and keys
    layer = LocalSelfAttention(config, 0, has_bias_table=True, **kind).eval()
    torch.nn.init.normal_(layer.relative_attention_bias.weight)
    mask = torch.ones(2, 20, dtype=torch.long)
    mask[1, :4] = 0
    return layer, torch.randn(2, 20, config.hidden_size), mask


def decoded(layer, inputs, mask, cache, prompt):
    """Outputs of a prompt and of each token after it."""
    outputs = [layer(inputs[:, :prompt], attention_mask=mask[:, :prompt], past_key_values=cache)[0]]
    for t in range(prompt, inputs.shape[1]):
        outputs.append(layer(inputs[:, t : t + 1], attention_mask=mask[:, : t + 1], past_key_values=cache)[0])
    return torch.cat(outputs, dim=1)


def check(kind, cache):
    layer, inputs, mask = make(kind)
    with torch.no_grad(), patch(STEP, wraps=local_attention_step) as step:
        expected = layer(inputs, attention_mask=mask)[0]
        actual = decoded(layer, inputs, mask, CACHES[cache](layer.config), 7)
    assert step.call_count == 13, "a token did not take the kernel"
    kept = mask[..., None].bool()  # what stands at padding is nobody's
    assert_close(actual.where(kept, 0), expected.where(kept, 0), "float32 decode")


@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_steps_are_what_a_whole_sequence_gives(kind, cache):
    check(kind, cache)


ON_TRITON = [(cache, number) for cache in CACHES for number in (2, 1)]


@pytest.mark.parametrize(("cache", "number"), some(ON_TRITON, *ON_TRITON[::3], ON_TRITON[4]))
@interpreted
def test_steps_on_triton(cache, number):
    check(KINDS[number], cache)


def test_what_wants_more_than_a_step_takes_the_dense_way():
    """Gradients, dropout and probabilities; the numbers are the same."""
    layer, inputs, mask = make(KINDS[0])
    with torch.no_grad():
        expected = layer(inputs, attention_mask=mask)[0]
    with patch(STEP, side_effect=AssertionError("the kernel has no gradient")):
        actual = decoded(layer, inputs, mask, DynamicCache(), 7)
        assert actual.requires_grad
        with torch.no_grad():
            layer.config.attention_dropout = 0.5
            dropped = decoded(layer.train(), inputs, mask, DynamicCache(), 7)
            layer.eval().config._attn_implementation = "eager"
            assert layer(inputs[:, 7:8], attention_mask=mask[:, :8], past_key_values=DynamicCache())[1] is not None
    kept = mask[..., None].bool()
    assert_close(actual.where(kept, 0), expected.where(kept, 0), "float32 decode")
    assert (dropped - expected)[0].abs().max() > 1e-3


@pytest.mark.parametrize("model_type", ["bst", "spade"])
def test_offloaded_models_decode(model_type):
    """Weights come to the device of the computation in a module's own forward, and in nothing else of it."""
    model = tiny_model(model_type, "AutoModelForCausalLM")
    ids = tiny_inputs(model)["input_ids"]
    settings = {"max_new_tokens": 5, "min_new_tokens": 5, "do_sample": False}
    expected = model.generate(ids, **settings)
    offloaded = cpu_offload(model, execution_device=torch.device("cpu"))
    assert torch.equal(offloaded.generate(ids, **settings), expected)


@pytest.mark.parametrize(
    ("model_type", "case"), [key[::2] for key in DECODER_CASES if key[1] == "AutoModelForCausalLM"]
)
def test_masked_tokens_get_the_same_outputs_whatever_computes_them(model_type, case):
    options = DECODERS[model_type, "AutoModelForCausalLM"][case]
    model = tiny_model(model_type, "AutoModelForCausalLM", **options)
    ids = tiny_inputs(model)["input_ids"]
    mask = torch.ones_like(ids)
    mask[0, -3:] = 0
    mask[1, 4] = 0
    with torch.no_grad():
        wanted = model(ids, attention_mask=mask, use_cache=False).logits
        for cache in (DynamicCache(config=model.config), StaticCache(config=model.config, max_cache_len=20)):
            assert_close(model(ids, attention_mask=mask, past_key_values=cache).logits, wanted, "float32 decode")
            cache.reset()
            steps = [
                model(ids[:, t : t + 1], attention_mask=mask[:, : t + 1], past_key_values=cache).logits
                for t in range(ids.shape[1])
            ]
            assert_close(torch.cat(steps, dim=1), wanted, "float32 decode")
        eager = tiny_model(model_type, "AutoModelForCausalLM", attn_implementation="eager", **options)
        assert_close(eager(ids, attention_mask=mask, use_cache=False).logits, wanted, "float32 decode")


@pytest.mark.parametrize("static", [False, True], ids=["dynamic", "static"])
@pytest.mark.parametrize(
    ("model_type", "fields"),
    [("spade", {}), ("spade", {"global_layers": "none"}), ("bst", {}), ("bst", {"bst_layers": []}), ("chela", {})],
    ids=str,
)
def test_a_mask_that_is_not_for_all_tokens_is_refused_whatever_it_keeps(model_type, fields, static):
    model = tiny_model(model_type, "AutoModelForCausalLM", **fields)
    ids = tiny_inputs(model, length=5)["input_ids"]
    options = {"config": model.config, **({"max_cache_len": 12} if static else {})}
    cache = (StaticCache if static else DynamicCache)(**options)
    with torch.no_grad():
        model(ids, past_key_values=cache)
        for shape in ((2, 4), (2, 9), (1, 6), (3, 6)):
            for first in (1, 0):  # without padding and with it
                mask = torch.ones(shape, dtype=torch.long)
                mask[:, 0] = first
                message = (
                    rf"attention_mask must be .* = \(2, 6\), for all tokens so far.*got \({shape[0]}, {shape[1]}\)"
                )
                with pytest.raises(ValueError, match=message):
                    model(ids[:, :1], attention_mask=mask, past_key_values=cache)


def test_a_step_does_without_a_mask_that_keeps_all():
    kept = torch.ones(2, 3, dtype=torch.long)
    padded = torch.tensor([[1, 1, 1], [0, 1, 1]])
    assert without_padding(kept) is None
    assert without_padding(None) is None
    for mask in (padded, kept[:, None, None], kept.to("meta")):
        assert without_padding(mask) is mask
