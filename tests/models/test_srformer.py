"""What SRformer promises beyond the common tests: the paper's identities, its parents as special cases, its decoding."""

import copy
import logging
import math

import pytest
import torch
import transformers
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    BartModel,
    DataCollatorForSeq2Seq,
    DynamicCache,
    GenerationConfig,
    MBartConfig,
    T5Config,
    T5EncoderModel,
    T5ForConditionalGeneration,
    T5Model,
)
from transformers.cache_utils import EncoderDecoderCache
from transformers.modeling_outputs import BaseModelOutput

import hf_hybrid
from hf_hybrid.kernels.segment_recurrence import reference
from hf_hybrid.models.srformer import segments as segments_module
from hf_hybrid.models.srformer.segments import Reading, SegmentCache, Segments, cut

from ..tolerances import assert_close
from .tiny import TINY_CONFIGS, tiny_config, tiny_inputs, tiny_labels, tiny_model

MODEL_TYPES = ("srformer_t5", "srformer_bart")
PARENTS = {
    "srformer_t5": (T5Config, T5ForConditionalGeneration, hf_hybrid.SRformerT5ForConditionalGeneration),
    "srformer_bart": (BartConfig, BartForConditionalGeneration, hf_hybrid.SRformerBartForConditionalGeneration),
}
NEW_FIELDS = ("segment_size", "decoder_horizon", "horizon_mode")
MODES = ("sr", "segmented", "recurrent", "no_norm", "no_raf", "own_segment", "transformer_xl", "longt5")
every_type = pytest.mark.parametrize("model_type", MODEL_TYPES)


def seq2seq(model_type, *, seed=0, **overrides):
    """A tiny model whose neurons fire: linear maps of ordinary size."""
    model = tiny_model(model_type, "AutoModelForSeq2SeqLM", seed=seed, **overrides)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("raf.linear.weight"):
                parameter.copy_(torch.randn(parameter.shape, generator=generator) / 2)
    return model


def parent(model_type, *, seed=0, **overrides):
    config_class, model_class, _ = PARENTS[model_type]
    fields = {name: value for name, value in TINY_CONFIGS[model_type].items() if name not in NEW_FIELDS}
    torch.manual_seed(seed)
    return model_class(config_class(**{**fields, **overrides})).eval()


def attentions(model):
    """The cross-attention modules of a model."""
    return [module for module in model.modules() if hasattr(module, "segment_shape")]


def attend(module, hidden, source, *, mask=None, horizon=None, past=0):
    """Run one cross-attention module as a decoder does."""
    segments, states = cut(module.config, source, mask, horizon or hidden.shape[1])
    reading = Reading(
        segments,
        hidden.shape[1],
        past=past,
        batch=hidden.shape[0],
        heads=module.segment_shape[0],
        documents=None,
        device=hidden.device,
    )
    return module(hidden, key_value_states=states, reading=reading)[0]


def algorithm_1(module, hidden, source, horizon):
    """The same by the paper's loop over tokens, for a batch without padding."""
    heads = module.segment_shape
    is_t5 = hasattr(module, "o")
    names = ("q", "k", "v", "o") if is_t5 else ("q_proj", "k_proj", "v_proj", "out_proj")
    q, k, v, o = (getattr(module, name) for name in names)
    output = reference.cross_attention(
        q(hidden).unflatten(2, heads) * module.scaling,
        k(source).unflatten(2, heads),
        v(source).unflatten(2, heads),
        segment_size=module.config.segment_size,
        horizon=horizon,
        weight=module.raf.linear.weight,
        leak=module.raf.leak,
        threshold=module.raf.threshold,
        clamp=module.config.kv_clamp,
    )
    return o(output.flatten(2))


def random(*shape, seed=0, dtype=torch.float64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def memories(outputs):
    return [layer.memory for layer in outputs.past_key_values.cross_attention_cache.layers]


# the parents as special cases


@every_type
@pytest.mark.parametrize("mode", ["sr", "segmented", "own_segment", "no_raf"])
def test_one_segment_is_the_parent(model_type, mode):
    """Nothing is left outside of the segment: P = 0, no neuron fires, O_R = 0, with recurrence on."""
    base = parent(model_type)
    model = seq2seq(model_type, segment_size=50, cross_attention_mode=mode)
    assert not model.load_state_dict(base.state_dict(), strict=False).unexpected_keys
    inputs = tiny_inputs(base, length=50)
    with torch.no_grad():
        expected = base(**inputs).logits
        outputs = model(**inputs, use_cache=True)
        if mode != "own_segment":  # ablation IV puts the segment itself into the neurons
            for memory in memories(outputs):
                assert memory.states is None or torch.equal(memory.states, torch.zeros_like(memory.states))
            assert_close(outputs.logits, expected, "float32 model")
            longer = {**inputs, "input_ids": inputs["input_ids"][:, :31]}
            assert_close(model(**longer).logits, base(**longer).logits, "float32 model")
        else:
            assert (outputs.logits - expected).abs().max() > 1e-3
    two = seq2seq(model_type, segment_size=25, cross_attention_mode=mode)
    two.load_state_dict(base.state_dict(), strict=False)
    assert (two(**inputs).logits - expected).abs().max() > 1e-3


@every_type
def test_mode_full_is_the_parent_bit_for_bit(model_type):
    base = parent(model_type)
    model = seq2seq(model_type, cross_attention_mode="full")
    model.load_state_dict(base.state_dict())
    inputs, labels = tiny_inputs(base, length=17), tiny_labels(base)
    mask = torch.ones_like(inputs["input_ids"])
    mask[0, -5:] = 0
    with torch.no_grad():
        assert_close(model(**inputs, attention_mask=mask).logits, base(**inputs, attention_mask=mask).logits, "exact")
    ids = inputs["input_ids"]
    assert_close(model(input_ids=ids, labels=labels).loss, base(input_ids=ids, labels=labels).loss, "float32")
    for strategy in ({}, {"num_beams": 3}):
        options = {"max_new_tokens": 8, "min_new_tokens": 8, **strategy}
        assert torch.equal(model.generate(ids, **options), base.generate(ids, **options))


@every_type
@pytest.mark.parametrize("kind", ["plain", "gated and untied"])
def test_a_plain_checkpoint_loads_whole(model_type, kind, tmp_path):
    if kind != "plain" and model_type == "srformer_bart":
        base = parent(model_type, scale_embedding=True, activation_function="relu")
    elif kind == "plain":
        base = parent(model_type)
    else:  # T5 v1.1 and Flan-T5
        base = parent(model_type, feed_forward_proj="gated-gelu", tie_word_embeddings=False)
        base.lm_head.weight = torch.nn.Parameter(base.lm_head.weight + 0.3)
    base.save_pretrained(tmp_path)
    torch.manual_seed(5)
    model, info = PARENTS[model_type][2].from_pretrained(tmp_path, segment_size=50, output_loading_info=True)
    new = {name for name in model.state_dict() if ".raf." in name}
    assert set(info["missing_keys"]) == new
    assert len(new) == 3 * 2
    assert not info["unexpected_keys"]
    assert not info["mismatched_keys"]
    for name, tensor in base.state_dict().items():
        assert torch.equal(model.state_dict()[name], tensor), name
    inputs = tiny_inputs(base, length=50)
    assert_close(model.eval()(**inputs).logits, base(**inputs).logits, "float32 model")
    assert model.config.model_type == model_type
    again = transformers.AutoModelForSeq2SeqLM.from_config(model.config)
    assert type(again) is type(model)


@pytest.mark.parametrize("loaded", [True, False])
@every_type
def test_what_is_new_starts_as_in_the_published_code(model_type, loaded, tmp_path):
    """A Linear's own draw for T5, a normal one for BART; and drawn parameters of the parent keep their scale."""
    wide = {"d_model": 128, "d_kv": 64} if model_type == "srformer_t5" else {"d_model": 128, "init_std": 0.02}
    model = PARENTS[model_type][2](tiny_config(model_type, **wide))
    if loaded:
        parent(model_type, **wide).save_pretrained(tmp_path)
        model = PARENTS[model_type][2].from_pretrained(tmp_path)
    leak = {"srformer_t5": 0.1, "srformer_bart": 0.5}[model_type]
    for module in attentions(model):
        weight = module.raf.linear.weight
        assert module.raf.leak.tolist() == pytest.approx([leak])
        assert module.raf.threshold.tolist() == pytest.approx([0.1])
        if model_type == "srformer_t5":
            assert 0.9 / 8 < weight.abs().max() <= 1 / 8
            assert weight.std().item() == pytest.approx(1 / 8 / 3**0.5, rel=0.1)
            assert module.k.weight.std().item() == pytest.approx(128**-0.5, rel=0.1)
        else:
            assert weight.std().item() == pytest.approx(0.02, rel=0.1)
            assert weight.abs().max() > 0.05
    assert not torch.equal(*(module.raf.linear.weight for module in attentions(model)))


def test_parameter_counts_of_the_paper():
    """T5-small and BART-base, and d^2 + 2 numbers per decoder layer on top."""
    t5 = {"vocab_size": 32128, "d_model": 512, "d_kv": 64, "d_ff": 2048, "num_layers": 6, "num_heads": 8}
    layers = {"encoder_layers": 6, "decoder_layers": 6, "encoder_ffn_dim": 3072, "decoder_ffn_dim": 3072}
    heads = {"encoder_attention_heads": 12, "decoder_attention_heads": 12}
    for model_class, config, count in (
        (T5ForConditionalGeneration, T5Config(**t5), 60_506_624),
        (PARENTS["srformer_t5"][2], hf_hybrid.SRformerT5Config(**t5), 60_531_212),
        (BartForConditionalGeneration, BartConfig(d_model=768, **layers, **heads), 139_420_416),
        (PARENTS["srformer_bart"][2], hf_hybrid.SRformerBartConfig(d_model=768, **layers, **heads), 139_445_004),
    ):
        with torch.device("meta"):
            model = model_class(config)
        assert sum(parameter.numel() for parameter in model.parameters()) == count


# Algorithm 1


@pytest.mark.parametrize(
    ("length", "target", "horizon"),
    [(24, 20, 20), (24, 8, 8), (24, 3, 3), (23, 13, 13), (22, 7, 7), (3, 5, 5), (1, 4, 4), (24, 6, 20), (22, 17, 9)],
)
@every_type
def test_all_tokens_at_once_are_algorithm_1(model_type, length, target, horizon):
    """Outputs and every gradient, for targets longer and shorter than the segments are many, and than the horizon."""
    results = []
    for function in (attend, algorithm_1):
        module = attentions(seq2seq(model_type).double())[0]
        hidden, source = random(2, target, 32), random(2, length, 32, seed=1)
        leaves = [hidden.requires_grad_(), source.requires_grad_(), *module.parameters()]
        output = function(module, hidden, source, horizon=horizon)
        weights = random(*output.shape, seed=2)
        results.append([output, *torch.autograd.grad(output, leaves, weights, allow_unused=True)])
    for index, (actual, expected) in enumerate(zip(*results, strict=True)):
        assert_close(actual, expected, "float64 gradient" if index else "float64")
    names = [name for name, _ in module.named_parameters()]
    if -(-length // 3) > 2:
        for name in ("raf.leak", "raf.threshold", "raf.linear.weight"):
            assert results[0][3 + names.index(name)].abs().max() > 1e-6, f"no gradient reaches {name}"


@every_type
@pytest.mark.parametrize("horizon", [1, 2, 7, 8, 9, 20])
def test_a_step_at_a_position_is_the_loop_at_that_token(model_type, horizon):
    module = attentions(seq2seq(model_type).double())[0]
    hidden, source = random(2, 23, 32), random(2, 22, 32, seed=1)
    expected = algorithm_1(module, hidden, source, horizon)
    for position in (*range(10), 19, 22):
        for past in (position, torch.tensor(position)):
            step = attend(module, hidden[:, position : position + 1], source, horizon=horizon, past=past)
            assert_close(step, expected[:, position : position + 1], "float64")
    chunk = attend(module, hidden[:, 5:16], source, horizon=horizon, past=5)
    assert_close(chunk, expected[:, 5:16], "float64")


@every_type
@pytest.mark.parametrize("lengths", [(22, 9, 1, 14), (24, 23, 12, 13), (5, 24, 24, 24)])
@pytest.mark.parametrize(("target", "horizon"), [(20, 20), (40, 40), (3, 3), (5, 12), (30, 12)])
def test_each_document_of_a_batch_is_read_as_if_alone(model_type, lengths, target, horizon):
    """Against Algorithm 1 on each document without its padding, which may lie anywhere."""
    module = attentions(seq2seq(model_type).double())[0]
    hidden, source = random(4, target, 32), random(4, 24, 32, seed=1)
    generator = torch.Generator().manual_seed(3)
    for side in ("right", "left", "holes"):
        mask = torch.zeros(4, 24, dtype=torch.long)
        for row, length in enumerate(lengths):
            columns = torch.randperm(24, generator=generator)[:length].sort().values
            mask[row, {"right": slice(length), "left": slice(24 - length, 24), "holes": columns}[side]] = 1
        dirty = source.masked_fill(mask[..., None] == 0, 1e3)
        output = attend(module, hidden, dirty, mask=mask, horizon=horizon)
        for row in range(4):
            alone = source[row : row + 1, mask[row].bool()]
            expected = algorithm_1(module, hidden[row : row + 1], alone, horizon)
            assert_close(output[row : row + 1], expected, "float64")


def test_queries_of_a_segment_share_its_keys():
    """No copy of keys, values or states per token: training touches little more than once what there is."""

    class Largest(TorchDispatchMode):
        def __init__(self):
            super().__init__()
            self.numel = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            outputs = func(*args, **(kwargs or {}))
            for output in outputs if isinstance(outputs, tuple | list) else (outputs,):
                if isinstance(output, torch.Tensor):
                    self.numel = max(self.numel, output.numel())
            return outputs

    module = attentions(seq2seq("srformer_t5", segment_size=16))[0]
    hidden, source = random(2, 256, 32, dtype=torch.float32), random(2, 128, 32, seed=1, dtype=torch.float32)
    mask = torch.ones(2, 128, dtype=torch.long)
    mask[1, 90:] = 0
    for given in (None, mask):
        with Largest() as largest:
            attend(module, hidden, source, mask=given)
        # scores (2, 2 heads, 256, 16), wasted rows included; keys per token would be 256 / 8 times the keys
        assert largest.numel <= 3 * 2 * 2 * 256 * 16
        assert largest.numel < 2 * 2 * 256 * 16 * 16


# identities


@every_type
def test_neurons_that_never_fire_leave_segmented_attention(model_type):
    model = seq2seq(model_type, threshold_init=1e9)
    other = seq2seq(model_type, cross_attention_mode="segmented")
    other.load_state_dict(model.state_dict(), strict=False)
    inputs = tiny_inputs(model, length=20)
    assert_close(model(**inputs).logits, other(**inputs).logits, "exact")


@every_type
def test_recurrent_and_segmented_parts_add_up(model_type):
    hidden, source = random(2, 9, 32), random(2, 20, 32, seed=1)
    whole = seq2seq(model_type).double()
    if model_type == "srformer_bart":  # or each part would add it
        torch.nn.init.zeros_(attentions(whole)[0].out_proj.bias)

    def module_with(**fields):
        model = seq2seq(model_type, **fields).double()
        model.load_state_dict(whole.state_dict(), strict=False)
        return attentions(model)[0]

    modes = ("sr", "segmented", "recurrent")
    parts = {mode: attend(module_with(cross_attention_mode=mode), hidden, source) for mode in modes}
    assert_close(parts["segmented"] + parts["recurrent"], parts["sr"], "float64")
    assert parts["recurrent"].abs().max() > 1e-3
    mixed = module_with(mix="sigma")
    assert_close(attend(mixed, hidden, source), parts["sr"] / 2, "float64")
    mixed.sigma.data.fill_(0.8)
    expected = 0.8 * parts["segmented"] + 0.2 * parts["recurrent"]
    assert_close(attend(mixed, hidden, source), expected, "float64")


def test_full_attention_is_the_weighted_sum_of_its_parts():
    """Eq. 9: O = (c_s / c) O_S + (1 - c_s / c) O_R, with O_S what this module computes for a segment."""
    module = attentions(seq2seq("srformer_t5", cross_attention_mode="segmented").double())[0]
    module.o = torch.nn.Identity()
    hidden, source = random(1, 7, 32), random(1, 21, 32, seed=1)
    segmented = attend(module, hidden, source).unflatten(2, (2, 16))
    q, k, v = (getattr(module, name)(x)[0].unflatten(1, (2, 16)) for name, x in zip("qkv", (hidden, source, source)))
    weights = torch.einsum("thk,lhk->thl", q, k).exp()
    own = torch.zeros(7, 1, 21, dtype=torch.float64)
    for t in range(7):
        own[t, :, 3 * t : 3 * t + 3] = 1
    share = ((weights * own).sum(-1) / weights.sum(-1))[..., None]
    rest = torch.einsum("thl,lhv->thv", weights * (1 - own), v) / (weights * (1 - own)).sum(-1)[..., None]
    full = torch.einsum("thl,lhv->thv", weights, v) / weights.sum(-1)[..., None]
    assert_close(share * segmented[0] + (1 - share) * rest, full, "float64")


@pytest.mark.parametrize("norm_type", ["feature_l2", "frobenius"])
def test_the_norm_undoes_the_keys_scale(norm_type):
    """Ablation III, which is linear in keys and values: Q P / norm(K) does not change with the size of K."""
    module = attentions(seq2seq("srformer_t5", cross_attention_mode="no_raf", norm_type=norm_type).double())[0]
    key, value = random(2, 2, 4, 3, 16), random(2, 2, 4, 3, 16, seed=1)
    states, norm = module._states(key, value, None), module._norm(key)
    assert norm.shape == (2, 2, 1, 16 if norm_type == "feature_l2" else 1)
    whole = torch.einsum("bhmsk,bhmsv->bhkv", key, value)[:, :, None]
    assert_close(states, whole - torch.einsum("bhmsk,bhmsv->bhmkv", key, value), "float64")
    assert_close(
        module._states(5 * key, value, None) / module._norm(5 * key)[:, :, None], states / norm[:, :, None], "float64"
    )
    assert_close(module._states(key, 3 * value, None), 3 * states, "float64")
    zero = torch.zeros(1, 1, 2, 3, 16, dtype=torch.float64, requires_grad=True)
    floor = module._norm(zero)
    assert floor.min() > 0
    floor.sum().backward()
    assert torch.isfinite(zero.grad).all()


def test_no_norm_and_norm_type_none_are_one():
    inputs = tiny_inputs(seq2seq("srformer_t5"), length=20)
    logits = [
        seq2seq("srformer_t5", **fields)(**inputs).logits
        for fields in ({"cross_attention_mode": "no_norm"}, {"norm_type": "none"}, {})
    ]
    assert_close(logits[0], logits[1], "exact")
    assert (logits[0] - logits[2]).abs().max() > 1e-4


def test_transformer_xl_reads_the_segment_before_through_an_rnn():
    module = attentions(seq2seq("srformer_t5", cross_attention_mode="transformer_xl").double())[0]
    hidden, source = random(2, 5, 32), random(2, 15, 32, seed=1)
    q, k, v = (getattr(module, name)(x) for name, x in zip("qkv", (hidden, source, source)))
    old_k, old_v = module.rnn_k(k)[0], module.rnn_v(v)[0]
    outputs = []
    for t in range(5):
        own, before = slice(3 * t, 3 * t + 3), slice(3 * max(t - 1, 0), 3 * max(t - 1, 0) + 3)
        keys, values = (
            torch.cat([old[:, before], x[:, own]], 1).unflatten(2, (2, 16)) for old, x in ((old_k, k), (old_v, v))
        )
        weights = torch.einsum("bhk,bshk->bhs", q[:, t].unflatten(1, (2, 16)), keys).softmax(-1)
        outputs.append(torch.einsum("bhs,bshv->bhv", weights, values).flatten(1))
    assert_close(attend(module, hidden, source), module.o(torch.stack(outputs, 1)), "float64")


def test_longt5_sees_the_mean_of_every_segment():
    module = attentions(seq2seq("srformer_t5", cross_attention_mode="longt5").double())[0]
    hidden, source = random(1, 5, 32), random(1, 14, 32, seed=1)
    q, k, v = (getattr(module, name)(x)[0].unflatten(1, (2, 16)) for name, x in zip("qkv", (hidden, source, source)))
    means = [torch.stack([part.mean(0) for part in x.split(3)]) for x in (k, v)]
    outputs = []
    for t in range(5):
        keys, values = (torch.cat([x[3 * t : 3 * t + 3], mean]) for x, mean in zip((k, v), means))
        weights = torch.einsum("hk,shk->hs", q[t], keys).softmax(-1)
        outputs.append(torch.einsum("hs,shv->hv", weights, values).flatten())
    assert_close(attend(module, hidden, source)[0], module.o(torch.stack(outputs)), "float64")


# padding and batches


@pytest.mark.parametrize("mode", MODES)
@every_type
def test_a_document_does_not_depend_on_its_batch(model_type, mode):
    model = seq2seq(model_type, cross_attention_mode=mode)
    documents = [tiny_inputs(model, batch=1, length=length, seed=length)["input_ids"] for length in (20, 7, 13)]
    target = tiny_inputs(model, batch=3, target_length=8)["decoder_input_ids"]
    ids, mask = torch.zeros(3, 20, dtype=torch.long), torch.zeros(3, 20, dtype=torch.long)
    for row, document in enumerate(documents):
        ids[row, : document.shape[1]], mask[row, : document.shape[1]] = document[0], 1
    with torch.no_grad():
        together = model(input_ids=ids, attention_mask=mask, decoder_input_ids=target).logits
        for row, document in enumerate(documents):
            alone = model(input_ids=document, decoder_input_ids=target[row : row + 1]).logits
            assert_close(together[row : row + 1], alone, "float32 model")
    beams = {"num_beams": 3, "max_new_tokens": 9, "min_new_tokens": 9}
    generated = model.generate(ids, attention_mask=mask, **beams)
    for row, document in enumerate(documents):
        assert torch.equal(generated[row : row + 1], model.generate(document, **beams))


@every_type
def test_a_document_without_tokens_is_silence(model_type):
    model = seq2seq(model_type)
    inputs = tiny_inputs(model)
    mask = torch.ones_like(inputs["input_ids"])
    mask[1] = 0
    logits = model(**inputs, attention_mask=mask).logits
    assert torch.isfinite(logits).all()
    module = attentions(model)[0]
    output = attend(module, random(2, 4, 32, dtype=torch.float32), random(2, 11, 32, dtype=torch.float32), mask=mask)
    bias = 0 if model_type == "srformer_t5" else module.out_proj.bias.expand(4, -1)
    assert_close(output[1], torch.zeros(4, 32) + bias, "exact")


@every_type
def test_masks_in_every_form(model_type):
    model = seq2seq(model_type)
    inputs = tiny_inputs(model)
    encoded = model.get_encoder()(inputs["input_ids"])
    kept = torch.ones(2, 11, dtype=torch.bool)
    kept[0, 6:] = False
    target = inputs["decoder_input_ids"]
    forms = (kept, kept.long(), kept.float(), kept[:, None, None], torch.where(kept, 0.0, -1e9)[:, None, None])
    logits = [model(encoder_outputs=encoded, attention_mask=mask, decoder_input_ids=target).logits for mask in forms]
    for other in logits[1:]:
        assert_close(other, logits[0], "exact")
    with pytest.raises(
        ValueError, match=r"attention_mask must be of shape \(batch, length\) = \(2, 11\).*\(2, 7, 11\)"
    ):
        model(encoder_outputs=encoded, attention_mask=torch.ones(2, 7, 11), decoder_input_ids=target)


@every_type
def test_official_masks_are_the_published_codes(model_type):
    """Padding is in K^T V and norm(K); T5's softmax hides it but sees the zeros that fill the last segment; BART's
    sees everything."""
    module = attentions(seq2seq(model_type, mask_mode="official", per_example_segments=False).double())[0]
    hidden, source = random(2, 4, 32), random(2, 11, 32, seed=1)
    mask = torch.ones(2, 11, dtype=torch.long)
    mask[1, 7:] = 0
    output = attend(module, hidden, source, mask=mask)
    if model_type == "srformer_bart":
        assert_close(output, attend(module, hidden, source), "exact")
        return
    q, k, v = (getattr(module, name)(x).unflatten(2, (2, 16)) for name, x in zip("qkv", (hidden, source, source)))
    k, v = (torch.nn.functional.pad(x, (0, 0, 0, 0, 0, 1)) for x in (k, v))
    seen = torch.nn.functional.pad(mask, (0, 1), value=1).bool()
    states, norm = (
        module._states(*(x.unflatten(1, (4, 3)).permute(0, 3, 1, 2, 4) for x in (k, v)), None),
        k.norm(dim=1),
    )
    for t in range(4):
        own = slice(3 * t, 3 * t + 3)
        scores = torch.einsum("bhk,bshk->bhs", q[:, t], k[:, own]).masked_fill(~seen[:, None, own], -1e9)
        attended = torch.einsum("bhs,bshv->bhv", scores.softmax(-1), v[:, own])
        recurrent = torch.einsum("bhk,bhkv->bhv", q[:, t], states[:, :, t]) / norm
        row = module.o((attended + recurrent).flatten(1))
        visible = seen[:, own].any(1)  # otherwise the published code averages what is hidden
        assert_close(output[visible, t], row[visible], "float64")


@every_type
def test_segments_of_the_batch_instead_of_the_document(model_type):
    model = seq2seq(model_type, per_example_segments=False)
    ids = tiny_inputs(model, batch=1, length=6)["input_ids"]
    target = tiny_inputs(model, batch=1, target_length=12)["decoder_input_ids"]
    mask = torch.cat([torch.ones_like(ids), torch.zeros(1, 9, dtype=torch.long)], 1)
    padded = {"input_ids": torch.cat([ids, torch.zeros(1, 9, dtype=torch.long)], 1), "attention_mask": mask}
    alone, beside_longer = (
        model(**inputs, decoder_input_ids=target).logits for inputs in ({"input_ids": ids}, padded)
    )
    assert (alone[:, -1] - beside_longer[:, -1]).abs().max() > 1e-3  # its last tokens read padding
    assert_close(beside_longer[:, :1], alone[:, :1], "float32 model")


# decoding


@every_type
@pytest.mark.parametrize("strategy", [{}, {"do_sample": True, "top_k": 5}])
@pytest.mark.parametrize("horizon_mode", ["fixed", "target_length"])
def test_generation_is_teacher_forcing_with_the_same_horizon(model_type, strategy, horizon_mode):
    model = seq2seq(model_type, horizon_mode=horizon_mode, segment_size=4)
    ids = tiny_inputs(model, length=21)["input_ids"]
    torch.manual_seed(3)
    outputs = model.generate(
        ids, max_new_tokens=12, min_new_tokens=12, output_logits=True, return_dict_in_generate=True, **strategy
    )
    with torch.no_grad():
        logits = model(input_ids=ids, decoder_input_ids=outputs.sequences[:, :-1]).logits
    assert logits.shape[1] == 12
    assert_close(torch.stack(outputs.logits, 1), logits, "float32 decode")


@every_type
def test_beam_search_scores_are_those_of_teacher_forcing(model_type):
    model = seq2seq(model_type)
    ids = tiny_inputs(model, length=21)["input_ids"]
    options = {"num_beams": 4, "num_return_sequences": 4, "max_new_tokens": 10, "min_new_tokens": 10}
    outputs = model.generate(ids, length_penalty=0.0, return_dict_in_generate=True, output_scores=True, **options)
    with torch.no_grad():
        logits = model(input_ids=ids.repeat_interleave(4, 0), decoder_input_ids=outputs.sequences[:, :-1]).logits
    eos = model.config.eos_token_id
    chosen = outputs.sequences[:, 1:]
    forced = chosen == eos  # what min_new_tokens and BART's forced end took from the model's own choice
    log_probabilities = logits.log_softmax(-1).gather(2, chosen[..., None])[..., 0]
    expected = log_probabilities.masked_fill(forced, 0).sum(1)
    if model_type == "srformer_t5":
        assert not forced.any()
        assert_close(outputs.sequences_scores, expected, "float32 decode")
    steps = model.compute_transition_scores(outputs.sequences, outputs.scores, outputs.beam_indices)
    assert_close(steps.masked_fill(forced, 0), log_probabilities.masked_fill(forced, 0), "float32 decode")


@pytest.mark.parametrize(
    ("options", "horizon"),
    [
        ({"max_new_tokens": 9}, 9),
        ({"max_length": 9}, 8),
        ({"max_new_tokens": 9, "max_length": 40}, 9),
        ({"generation_config": GenerationConfig(max_new_tokens=7)}, 7),
        ({"max_new_tokens": 5, "decoder_input_ids": torch.full((2, 3), 4)}, 7),
        ({"max_new_tokens": 9, "decoder_horizon": 6}, 6),
        ({}, 12),
    ],
)
@every_type
def test_the_horizon_of_generation(model_type, options, horizon):
    model = seq2seq(model_type, horizon_mode="target_length")
    ids = tiny_inputs(model, length=21)["input_ids"]

    def used(model, **options):
        outputs = model.generate(ids, return_dict_in_generate=True, **options)
        return outputs.past_key_values.cross_attention_cache.segments.horizon

    assert used(model, **options) == horizon
    fixed = seq2seq(model_type)
    assert used(fixed, **options) == options.get("decoder_horizon", 12)
    model.generation_config.max_new_tokens = 11
    assert used(model) == 11


@every_type
def test_a_cache_keeps_its_horizon(model_type):
    model = seq2seq(model_type, horizon_mode="target_length")
    inputs = tiny_inputs(model, length=21)
    assert model(**inputs).past_key_values is None  # nothing could go on from it
    outputs = model(**inputs, use_cache=True)
    assert outputs.past_key_values.cross_attention_cache.segments.horizon == model.config.decoder_horizon
    explicit = model(**inputs, use_cache=True, decoder_horizon=9)
    step = {
        "encoder_outputs": BaseModelOutput(outputs.encoder_last_hidden_state),
        "decoder_input_ids": torch.ones(2, 1, dtype=torch.long),
    }
    model(**step, past_key_values=explicit.past_key_values)
    model(**step, past_key_values=explicit.past_key_values, decoder_horizon=9)
    with pytest.raises(ValueError, match="decoder_horizon must be 9, for which past_key_values was made; got 5"):
        model(**step, past_key_values=explicit.past_key_values, decoder_horizon=5)
    longer = model.generate(inputs["input_ids"], max_new_tokens=4, return_dict_in_generate=True)
    more = model.generate(
        inputs["input_ids"],
        decoder_input_ids=longer.sequences,
        past_key_values=longer.past_key_values,
        max_new_tokens=3,
        return_dict_in_generate=True,
    )
    assert more.past_key_values.cross_attention_cache.segments.horizon == 4


@pytest.mark.parametrize("counts", [None, torch.tensor([1, 5, 12, 13, 30, 64])])
@pytest.mark.parametrize("horizon", [1, 4, 12, 13, 63, 64, 100])
def test_slots_are_the_papers_segments(counts, horizon):
    """min(floor(t m / q), m - 1) for every token, before the horizon and beyond it."""
    segments = Segments(size=8, number=64, horizon=horizon, counts=counts)
    positions = torch.arange(130)
    slots = segments.slots_at(positions)
    visited = segments.visited()
    assert int(slots.max()) < segments.slots <= 64
    assert (slots.diff() >= 0).all()
    found = slots if visited is None else visited.expand(slots.shape[0], -1).gather(1, slots)
    for row, count in enumerate([64] if counts is None else counts.tolist()):
        expected = [min(t * count // horizon, count - 1) for t in range(130)]
        assert found[row].tolist() == expected
        assert len(set(expected)) == len(set(slots[row].tolist()))


def test_skipped_segments_are_told_once(caplog, monkeypatch):
    monkeypatch.setattr(segments_module, "_told", set())
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    monkeypatch.setattr(logging.getLogger("hf_hybrid"), "propagate", True)
    model = seq2seq("srformer_t5", segment_size=2, decoder_horizon=8)
    with caplog.at_level(logging.WARNING):
        model(**tiny_inputs(model, length=16))
        assert "segments" not in caplog.text
        model(**tiny_inputs(model, length=23))
        assert "12 segments and its target only 8 tokens" in caplog.text
        assert "4 segments are skipped" in caplog.text
        caplog.clear()
        model(**tiny_inputs(model, length=40))
        assert "segments" not in caplog.text


@every_type
@pytest.mark.parametrize("mode", ["sr", "recurrent", "longt5"])
def test_beams_share_their_document(model_type, mode):
    """Neither memory nor time for keys and states grows with beams: what is reordered is one integer per row."""
    model = seq2seq(model_type, cross_attention_mode=mode)
    ids = tiny_inputs(model, length=21)["input_ids"]
    outputs = model.generate(ids, num_beams=4, max_new_tokens=6, return_dict_in_generate=True)
    cache = outputs.past_key_values.cross_attention_cache
    assert isinstance(cache, SegmentCache)
    assert cache.documents.tolist() == [0] * 4 + [1] * 4
    for memory in memories(outputs):
        assert {x.shape[0] for x in memory if x is not None} == {2}
    one = model.generate(ids, num_beams=1, max_new_tokens=6, return_dict_in_generate=True)
    for memory, alone in zip(memories(outputs), memories(one), strict=True):
        for x, y in zip(memory, alone, strict=True):
            assert x is y is None or torch.equal(x, y)
    rows = model(
        encoder_outputs=BaseModelOutput(random(2, 9, 32, dtype=torch.float32)),
        decoder_input_ids=ids.repeat_interleave(2, 0),
    )
    repeated = BaseModelOutput(random(2, 9, 32, dtype=torch.float32).repeat_interleave(2, 0))
    assert_close(
        rows.logits,
        model(encoder_outputs=repeated, decoder_input_ids=ids.repeat_interleave(2, 0)).logits,
        "float32 model",
    )
    with pytest.raises(ValueError, match=r"as many rows as encoder_hidden_states, 2, or a multiple \(beams\); got 3"):
        model(encoder_outputs=BaseModelOutput(torch.ones(2, 9, 32)), decoder_input_ids=ids[:1].repeat(3, 1))


@every_type
def test_cache_operations_move_rows(model_type):
    model = seq2seq(model_type).double()
    inputs = tiny_inputs(model, batch=3, length=14)
    encoded = model.get_encoder()(inputs["input_ids"]).last_hidden_state
    target = inputs["decoder_input_ids"]

    def step(cache, rows):
        """One more token for each row, against the whole target in one pass."""
        token = torch.full((len(rows), 1), 7)
        with torch.no_grad():
            outputs = model(
                encoder_outputs=BaseModelOutput(encoded[rows]), decoder_input_ids=token, past_key_values=cache
            )
            whole = model(
                encoder_outputs=BaseModelOutput(encoded[rows]), decoder_input_ids=torch.cat([target[rows], token], 1)
            )
        assert_close(outputs.logits, whole.logits[:, -1:], "float64 decode")
        cache.crop(-1)

    with torch.no_grad():
        cache = model(
            encoder_outputs=BaseModelOutput(encoded), decoder_input_ids=target, use_cache=True
        ).past_key_values
    keys = cache.cross_attention_cache.layers[0].memory.keys
    step(cache, [0, 1, 2])
    cache.reorder_cache(torch.tensor([2, 0, 0]))
    step(cache, [2, 0, 0])
    cache.batch_repeat_interleave(2)
    step(cache, [2, 2, 0, 0, 0, 0])
    cache.reorder_cache(torch.tensor([4, 1, 0, 3, 2, 5]))
    cache.batch_select_indices(torch.tensor([1, 2, 4]))
    step(cache, [2, 2, 0])
    assert cache.cross_attention_cache.layers[0].memory.keys is keys
    step(copy.deepcopy(cache), [2, 2, 0])
    cache.reset()
    assert cache.get_seq_length() == 0
    with torch.no_grad():
        again = model(encoder_outputs=BaseModelOutput(encoded), decoder_input_ids=target, past_key_values=cache).logits
        whole = model(encoder_outputs=BaseModelOutput(encoded), decoder_input_ids=target).logits
    assert_close(again, whole, "float64 decode")


@every_type
def test_a_step_costs_the_same_for_any_length_of_document(model_type):
    """Everything that a decoding step computes, counted in numbers: one segment and one state per layer and head."""

    class Written(TorchDispatchMode):
        def __init__(self):
            super().__init__()
            self.numel = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            outputs = func(*args, **(kwargs or {}))
            held = {x.untyped_storage().data_ptr() for x in args if isinstance(x, torch.Tensor)}
            for output in outputs if isinstance(outputs, tuple | list) else (outputs,):
                if isinstance(output, torch.Tensor) and output.untyped_storage().data_ptr() not in held:
                    self.numel += output.numel()
            return outputs

    counts = []
    model = seq2seq(model_type)
    for length in (39, 900):
        inputs = tiny_inputs(model, length=length)
        mask = torch.ones_like(inputs["input_ids"])
        mask[1, length // 2 :] = 0
        with torch.no_grad():
            outputs = model(**inputs, attention_mask=mask, use_cache=True)
            encoded = BaseModelOutput(outputs.encoder_last_hidden_state)
            token = inputs["decoder_input_ids"][:, :1]
            with Written() as written:
                model(
                    encoder_outputs=encoded,
                    attention_mask=mask,
                    decoder_input_ids=token,
                    past_key_values=outputs.past_key_values,
                )
        counts.append(written.numel)
    assert counts[0] == counts[1]


@every_type
def test_eager_attention_gives_probabilities_of_the_segment(model_type):
    model = seq2seq(model_type, attn_implementation="eager")
    inputs = tiny_inputs(model, length=20, target_length=12)
    outputs = model(**inputs, output_attentions=True)
    for probabilities in outputs.cross_attentions:
        assert probabilities.shape == (2, 2, 12, 3)
        assert_close(probabilities.sum(-1), torch.ones(2, 2, 12), "float32")
    assert_close(model(**inputs).logits, outputs.logits, "exact")


# training


@every_type
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("surrogate", [False, True])
def test_every_new_parameter_learns(model_type, mode, surrogate):
    if surrogate and mode != "sr":
        return
    mix = "sigma" if mode in ("sr", "no_norm", "no_raf", "own_segment") else "add"
    model = seq2seq(model_type, cross_attention_mode=mode, mix=mix, raf_surrogate=surrogate, leak_init=0.7)
    inputs = tiny_inputs(model, length=20)
    model(input_ids=inputs["input_ids"], labels=tiny_labels(model)).loss.backward()
    new = {
        name: p.grad
        for name, p in model.named_parameters()
        if any(part in name for part in (".raf.", "sigma", "rnn_"))
    }
    counts = {"sr": 8, "no_norm": 8, "own_segment": 8, "recurrent": 6, "no_raf": 2, "transformer_xl": 16}
    assert len(new) == counts.get(mode, 0)
    for name, gradient in new.items():
        assert torch.isfinite(gradient).all()
        assert gradient.abs().max() > 0, name


def test_the_surrogate_changes_gradients_and_nothing_else():
    results = []
    for surrogate in (False, True):
        model = seq2seq("srformer_t5", raf_surrogate=surrogate, leak_init=1.0)
        outputs = model(input_ids=tiny_inputs(model, length=20)["input_ids"], labels=tiny_labels(model))
        outputs.loss.backward()
        results.append((outputs.logits, attentions(model)[0].raf.threshold.grad))
    assert_close(results[0][0], results[1][0], "exact")
    assert (results[0][1] - results[1][1]).abs() > 1e-7


@every_type
def test_a_threshold_may_reach_zero(model_type):
    """It is a divisor, so a floor keeps it from its pole."""
    model = seq2seq(model_type)
    for module in attentions(model):
        module.raf.threshold.data.fill_(0.0)
    outputs = model(input_ids=tiny_inputs(model, length=20)["input_ids"], labels=tiny_labels(model))
    outputs.loss.backward()
    assert torch.isfinite(outputs.loss)
    assert all(torch.isfinite(p.grad).all() for p in model.parameters() if p.grad is not None)


@every_type
def test_label_smoothing_of_the_trainer(model_type, tmp_path):
    model = seq2seq(model_type, dropout=0.0, attention_dropout=0.0)
    arguments = transformers.Seq2SeqTrainingArguments(
        output_dir=str(tmp_path), label_smoothing_factor=0.2, report_to=[], use_cpu=True
    )
    rows = [
        {
            "input_ids": tiny_inputs(model, batch=1, length=9 + row)["input_ids"][0].tolist(),
            "labels": tiny_labels(model, batch=1, length=4 + row)[0].tolist(),
        }
        for row in range(3)
    ]

    class Tokenizer(transformers.PreTrainedTokenizerFast):
        pass

    import tokenizers

    tokenizer = Tokenizer(
        tokenizer_object=tokenizers.Tokenizer(tokenizers.models.WordLevel({"<pad>": 0}, "<pad>")), pad_token="<pad>"
    )
    batch = DataCollatorForSeq2Seq(tokenizer, model=model)(rows)
    trainer = transformers.Seq2SeqTrainer(model=model.eval(), args=arguments)
    labels = batch["labels"].clone()
    logits = model(**{name: batch[name] for name in ("input_ids", "attention_mask", "decoder_input_ids")}).logits
    loss = trainer.compute_loss(model, dict(batch))
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), label_smoothing=0.2)
    assert_close(loss, expected, "float32")


# patching


@pytest.mark.parametrize("model_class", [T5Model, T5ForConditionalGeneration, BartModel, BartForConditionalGeneration])
def test_patching_keeps_every_parameter_object(model_class):
    model_type = "srformer_t5" if model_class.__name__.startswith("T5") else "srformer_bart"
    base = parent(model_type)
    if model_class.__name__.endswith("Model"):
        base = base.get_decoder() and model_class(base.config).eval()
    twin = copy.deepcopy(base)
    old_class, old_config, forwards = (
        type(base),
        base.config,
        [c.forward for c in (model_class, type(base.get_decoder()))],
    )
    parameters = dict(base.named_parameters(remove_duplicate=False))
    next(iter(parameters.values())).requires_grad_(False)
    optimizer = torch.optim.SGD([p for p in base.parameters() if p.requires_grad], lr=0.1)
    patched = hf_hybrid.patch_cross_attention(base, segment_size=50)
    assert patched is base
    assert type(base).__name__ == f"SRformer{model_class.__name__}"
    new = {name for name, _ in base.named_parameters() if name not in parameters}
    assert len(new) == 6
    assert all(".raf." in name for name in new)
    for name, parameter in parameters.items():
        assert base.get_parameter(name) is parameter
        assert not hasattr(parameter, "_is_hf_initialized")
    inputs = tiny_inputs(twin, length=50)
    expected = twin(**inputs)
    output = base(**inputs)
    assert_close(output[0], expected[0], "float32 model")
    output[0].square().mean().backward()
    optimizer.step()
    assert (base(**inputs)[0] - output[0]).abs().max() > 0
    # nothing else is touched
    assert type(old_config) is PARENTS[model_type][0]
    assert type(twin) is old_class is model_class
    assert forwards == [c.forward for c in (model_class, type(twin.get_decoder()))]
    assert not attentions(twin)
    assert_close(twin(**inputs)[0], expected[0], "exact")


def test_a_patched_model_is_an_ordinary_one(tmp_path):
    base = parent("srformer_t5", feed_forward_proj="gated-gelu", tie_word_embeddings=False)
    base.lm_head.weight = torch.nn.Parameter(base.lm_head.weight + 0.3)
    base.save_pretrained(tmp_path / "base")
    base = T5ForConditionalGeneration.from_pretrained(tmp_path / "base", attn_implementation="eager").train()
    base.generation_config.max_new_tokens = 6
    base.activation_checkpointing_enable()
    model = hf_hybrid.patch_cross_attention(base, 4, cross_attention_mode="no_norm", leak_init=1.0)
    assert model.training
    assert model.is_gradient_checkpointing
    assert model.config._attn_implementation == "eager"
    assert (model.config.segment_size, model.config.leak_init, model.config.scale_decoder_outputs) == (4, 1.0, False)
    inputs = tiny_inputs(model, length=21)
    model(input_ids=inputs["input_ids"], labels=tiny_labels(model)).loss.backward()
    assert attentions(model)[0].raf.leak.grad.abs() > 0
    model.eval().save_pretrained(tmp_path / "patched")
    loaded, info = transformers.AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "patched", output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert not torch.equal(loaded.lm_head.weight, loaded.shared.weight)
    assert_close(loaded.eval()(**inputs).logits, model(**inputs).logits, "float32 model")
    generated = model.generate(inputs["input_ids"], num_beams=2)
    assert generated.shape[1] <= 7
    assert torch.equal(loaded.generate(inputs["input_ids"], num_beams=2), generated)


def test_what_cannot_be_patched():
    base = parent("srformer_t5")
    patched = hf_hybrid.patch_cross_attention(copy.deepcopy(base))
    with pytest.raises(ValueError, match="model must not be patched twice; got SRformerT5ForConditionalGeneration"):
        hf_hybrid.patch_cross_attention(patched)
    with pytest.raises(ValueError, match="model must be one of T5Model, .*; got T5EncoderModel"):
        hf_hybrid.patch_cross_attention(T5EncoderModel(base.config))
    mbart = {name: value for name, value in TINY_CONFIGS["srformer_bart"].items() if name not in NEW_FIELDS}
    with pytest.raises(ValueError, match="model must be one of .*; got MBartForConditionalGeneration"):
        hf_hybrid.patch_cross_attention(transformers.MBartForConditionalGeneration(MBartConfig(**mbart)))
    with pytest.raises(ValueError, match="model must be one of .*; got Linear"):
        hf_hybrid.patch_cross_attention(torch.nn.Linear(2, 2))
    with pytest.raises(ValueError, match="adds no field 'segment_length'. Did you mean 'segment_size'"):
        hf_hybrid.patch_cross_attention(base, segment_length=4)
    with pytest.raises(Exception, match="segment_size must be a positive integer; got 0"):
        hf_hybrid.patch_cross_attention(base, segment_size=0)
    base.extra = torch.nn.Linear(2, 2)
    with pytest.raises(ValueError, match=r"must be a plain T5ForConditionalGeneration, .* such as extra.bias"):
        hf_hybrid.patch_cross_attention(base)
    assert type(base) is T5ForConditionalGeneration
    assert not attentions(base)
    base.hf_device_map = {"encoder": 0, "decoder": 1}
    with pytest.raises(ValueError, match="model must lie on one device; got hf_device_map"):
        hf_hybrid.patch_cross_attention(base)


# what is refused


@every_type
@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"segment_size": 0}, "segment_size must be a positive integer; got 0"),
        ({"segment_size": -3}, "segment_size must be a positive integer; got -3"),
        ({"segment_size": 2.5}, "segment_size"),
        ({"decoder_horizon": 0}, "decoder_horizon must be a positive integer; got 0"),
        (
            {"cross_attention_mode": "segment"},
            "cross_attention_mode must be one of sr, .*got 'segment'. Did you mean 'seg",
        ),
        ({"horizon_mode": "target"}, "horizon_mode must be one of target_length, fixed; got 'target'"),
        ({"mask_mode": "none"}, "mask_mode must be one of exact, official; got 'none'"),
        ({"norm_type": "l2"}, "norm_type must be one of feature_l2, frobenius, none; got 'l2'"),
        ({"mix": "gate"}, "mix must be one of add, sigma; got 'gate'"),
        ({"mask_mode": "official"}, "per_example_segments must be False with mask_mode 'official'"),
        ({"mix": "sigma", "cross_attention_mode": "recurrent"}, "mix must be 'add' unless .* got 'sigma'"),
        ({"mix": "sigma", "cross_attention_mode": "longt5"}, "mix must be 'add' unless .* got 'sigma'"),
        ({"kv_clamp": 0}, "kv_clamp must be positive and finite; got 0"),
        ({"threshold_init": -0.1}, "threshold_init must be positive and finite; got -0.1"),
        ({"leak_init": math.inf}, "leak_init must be finite; got inf"),
    ],
)
def test_config_rules(model_type, fields, message):
    with pytest.raises(Exception, match=message):
        tiny_config(model_type, **fields)


def test_configs_of_other_models_are_refused(tmp_path):
    MBartConfig().save_pretrained(tmp_path)
    for config_class, kinds in (
        (hf_hybrid.SRformerBartConfig, "srformer_bart or bart"),
        (hf_hybrid.SRformerT5Config, "srformer_t5 or t5"),
    ):
        with pytest.raises(ValueError, match=f"must hold a model of type {kinds} .*; got mbart in"):
            config_class.from_pretrained(tmp_path)


@every_type
def test_bad_inputs(model_type):
    model = seq2seq(model_type)
    target = torch.ones(2, 4, dtype=torch.long)
    nothing = BaseModelOutput(torch.zeros(2, 0, 32))
    for mode in ("sr", "full"):
        with pytest.raises(
            ValueError, match=r"encoder_hidden_states must hold at least one position; got \(2, 0, 32\)"
        ):
            seq2seq(model_type, cross_attention_mode=mode)(encoder_outputs=nothing, decoder_input_ids=target)
    something = BaseModelOutput(torch.zeros(2, 5, 32))
    with pytest.raises(ValueError, match="past_key_values must be an EncoderDecoderCache; got DynamicCache"):
        model(encoder_outputs=something, decoder_input_ids=target, past_key_values=DynamicCache())
    full = seq2seq(model_type, cross_attention_mode="full")
    foreign = full(encoder_outputs=something, decoder_input_ids=target, use_cache=True).past_key_values
    assert isinstance(foreign, EncoderDecoderCache)
    with pytest.raises(ValueError, match="past_key_values must come from an SRformer .* is a DynamicCache"):
        model(encoder_outputs=something, decoder_input_ids=target[:, :1], past_key_values=foreign)
    with pytest.raises(ValueError, match="decoder_horizon must be a positive integer; got 0"):
        model.generate(torch.ones(1, 5, dtype=torch.long), decoder_horizon=0)
