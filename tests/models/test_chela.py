"""What CHELA alone promises: the paper's equations and counts, fusing, decoding, its options and its errors."""

import math

import pytest
import torch
import transformers
from huggingface_hub.errors import StrictDataclassError
from torch import nn
from torch.nn import functional as F

from benchmarks.workloads import Stored
from hf_hybrid import (
    ChelaConfig,
    ChelaForCausalLM,
    ChelaForMaskedLM,
    ChelaForSequenceClassification,
    ChelaForSequencePairClassification,
    ChelaModel,
)
from hf_hybrid.models.chela.configuration_chela import PRESETS, short_kernel_size

from ..tolerances import assert_close
from .tiny import tiny_config, tiny_inputs, tiny_model

CAUSAL = {"is_decoder": True}


def base_model(seed=0, **options) -> ChelaModel:
    """A base model in float64 whose every number is drawn, biases and offsets too, in evaluation mode."""
    torch.manual_seed(seed)
    model = ChelaModel(tiny_config("chela", **options)).double().eval()
    with torch.no_grad():
        for name, tensor in model.state_dict(keep_vars=True).items():
            if name.endswith("running_var"):
                tensor.uniform_(0.5, 2)
            elif tensor.is_floating_point() and "alpha" not in name:
                tensor.normal_(std=0.3)
            elif "alpha" in name:
                tensor.normal_()
    return model


def embedded(*shape, seed=1):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


# the equations ----------------------------------------------------------------------------------------------------


def mixed(unit, x):
    """Z by its definition, one pair of positions at a time (eq. 8)."""
    mixer, width, length = unit.mixer, x.shape[-1], x.shape[1]
    causal = not mixer.bidirectional
    a = torch.zeros_like(x)
    for i, size in enumerate(mixer.short_kernel_sizes):
        kernel, bias = getattr(mixer, f"short_kernel_{i}"), getattr(mixer, f"short_bias_{i}")
        for t in range(length):
            for tap in range(size):
                source = t - tap if causal else t - tap + size // 2
                if 0 <= source < length:
                    a[:, t] += kernel[:, tap] * x[:, source]
            a[:, t] += bias
    a = a * torch.sigmoid(a)
    z = mixer.D * a
    taps = mixer.long_kernel.repeat(1, width // mixer.groups, 1)
    for t in range(length):
        for source in range(length):
            lag = t - source
            if 0 <= lag < mixer.kernel_size:
                z[:, t] += taps[0, :, lag] * a[:, source]
            if not causal and 1 <= -lag <= mixer.kernel_size:
                z[:, t] += taps[1, :, -lag - 1] * a[:, source]
    return z


def unit_by_equations(unit, x, residual):
    """Eqs. 9 to 15, with the masked matrix of weights."""
    config = unit.config
    z = mixed(unit, x)
    query, key = z * unit.query_alpha + unit.query_beta, z * unit.key_alpha + unit.key_beta
    value = F.silu(x @ unit.v_proj.weight.T + unit.v_proj.bias)
    heads = []
    for q, k, v in zip(*(y.chunk(config.num_attention_heads, -1) for y in (query, key, value)), strict=True):
        weights = q @ k.mT
        o = (weights.tril() if config.is_decoder else weights) @ v
        heads.append(o / (o.square().mean(-1, keepdim=True) + config.attention_norm_eps).sqrt())
    gate_weight, gate_bias = (
        (unit.v_proj.weight, unit.gate_bias)
        if config.share_gate_value_proj
        else (unit.gate_proj.weight, unit.gate_proj.bias)
    )
    attended = torch.cat(heads, -1) * F.silu(z @ gate_weight.T + gate_bias)
    gate = torch.sigmoid(z @ unit.output_gate_proj.weight.T + unit.output_gate_proj.bias)
    return attended * gate + residual * (1 - gate)


def layer_by_equations(layer, x):
    def ffn(u):
        f = layer.feed_forward
        return F.silu(u @ f.up_proj.weight.T + f.up_proj.bias) @ f.down_proj.weight.T + f.down_proj.bias

    if layer.pre_norm:
        normed = layer.unit_norm(x)
        u = unit_by_equations(layer.unit, normed, x if layer.raw_residual else normed)
        return u + ffn(layer.feed_forward_norm(u))
    u = layer.unit_norm(unit_by_equations(layer.unit, x, x))
    return layer.feed_forward_norm(u + ffn(u))


@pytest.mark.parametrize("is_decoder", [False, True])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"num_attention_heads": 4},
        {"norm_position": "post", "norm_type": "scale_norm"},
        {"norm_type": "rms_norm", "gate_residual": "normed"},
        {"share_gate_value_proj": True, "long_kernel_groups": 8},
        {"short_kernel_sizes": [3, 5, 1], "long_kernel_size": 40},
    ],
    ids=lambda options: ", ".join(options) or "default",
)
def test_a_layer_is_the_papers_equations(options, is_decoder):
    model = base_model(is_decoder=is_decoder, **options)
    x = embedded(2, 17, 32)
    with torch.no_grad():
        assert_close(model.layers[0](x), layer_by_equations(model.layers[0], x), "float64 gradient")


def test_the_output_gate_chooses_between_attention_and_residual():
    model = base_model()
    unit, x, residual = model.layers[0].unit, embedded(2, 9, 32), embedded(2, 9, 32, seed=2)
    unit.output_gate_proj.weight.data.zero_()
    unit.output_gate_proj.bias.data.fill_(-torch.inf)
    assert_close(unit(x, residual, None, None, False)[0], residual, "exact")
    unit.output_gate_proj.bias.data.fill_(torch.inf)
    attended = unit(x, residual, None, None, False)[0]
    assert_close(attended, unit(x, 0 * residual, None, None, False)[0], "float64")
    # a constant attention gate of SiLU(1)
    unit.gate_proj.weight.data.zero_()
    unit.gate_proj.bias.data.fill_(1.0)
    constant = unit(x, residual, None, None, False)[0]
    assert_close(constant.square().mean(-1), torch.full((2, 9), torch.tensor(1.0).sigmoid().item() ** 2), "float32")


def test_a_zero_gate_makes_the_layer_its_feed_forward_network():
    model = base_model()
    layer, x = model.layers[0], embedded(2, 9, 32)
    layer.unit.output_gate_proj.weight.data.zero_()
    layer.unit.output_gate_proj.bias.data.fill_(-torch.inf)
    assert_close(layer(x), x + layer.feed_forward(layer.feed_forward_norm(x)), "float64")


@pytest.mark.parametrize("options", [{}, {"num_attention_heads": 4}, {"attention_norm": "layer_norm"}])
def test_the_norm_takes_the_scale_out_of_queries_and_keys(options):
    model = base_model(attention_norm_eps=1e-12, **options)
    unit, x = model.layers[0].unit, embedded(2, 9, 32)
    before = unit(x, x, None, None, False)[0]
    for tensor in (unit.query_alpha, unit.query_beta, unit.key_alpha, unit.key_beta):
        tensor.data.mul_(30)
    assert_close(unit(x, x, None, None, False)[0], before, "float64 decode")


def test_without_a_norm_the_scale_stays():
    unit, x = base_model(attention_norm="none").layers[0].unit, embedded(2, 9, 32)
    before = unit(x, x, None, None, False)[0]
    unit.query_alpha.data.mul_(2)
    assert (unit(x, x, None, None, False)[0] - before).abs().max() > 1e-3


@pytest.mark.parametrize("options", [{}, {"num_attention_heads": 2}])
def test_chunks_as_long_as_the_sequence_are_no_chunks(options):
    whole = base_model(attention_fn="laplace", **options)
    chunked = base_model(attention_fn="laplace", chunk_size=9, **options)
    x = embedded(2, 9, 32)
    assert_close(chunked(inputs_embeds=x)[0], whole(inputs_embeds=x)[0], "float64")
    longer = embedded(2, 10, 32)
    assert (chunked(inputs_embeds=longer)[0] - whole(inputs_embeds=longer)[0]).abs().max() > 1e-3


# what it sees -----------------------------------------------------------------------------------------------------

SEEING = {
    "default": {},
    "heads": {"num_attention_heads": 4},
    "post-norm": {"norm_position": "post", "norm_type": "scale_norm"},
    "laplace": {"attention_fn": "laplace"},
    "laplace in chunks": {"attention_fn": "laplace", "chunk_size": 4},
    "laplace of features": {"attention_fn": "laplace_feature"},
    "long": {"mixer": "long"},
    "s4d": {"mixer": "s4d", "mixer_state_size": 8},
    "moving average": {"mixer": "ema"},
}
every_sight = pytest.mark.parametrize("options", SEEING.values(), ids=SEEING)


@every_sight
def test_a_causal_model_sees_no_later_token_and_every_earlier_one(options):
    model, x = base_model(**CAUSAL, **options), embedded(1, 20, 32)
    changed = x.clone()
    changed[:, 13] += 1
    before, after = model(inputs_embeds=x)[0], model(inputs_embeds=changed)[0]
    assert_close(after[:, :13], before[:, :13], "float64")
    assert ((after - before)[:, 13:].abs().amax(-1) > 1e-6).all()


@every_sight
def test_a_bidirectional_model_sees_every_token(options):
    model, x = base_model(**options), embedded(1, 14, 32)
    changed = x.clone()
    changed[:, 7] += 1
    assert ((model(inputs_embeds=changed)[0] - model(inputs_embeds=x)[0]).abs().amax(-1) > 1e-6).all()


@every_sight
@pytest.mark.parametrize("is_decoder", [False, True])
def test_padding_leaks_nowhere_though_every_bias_is_nonzero(options, is_decoder):
    model, x = base_model(is_decoder=is_decoder, **options), embedded(1, 15, 32)
    expected = model(inputs_embeds=x)[0]
    for left, right in ((5, 0), (0, 5), (3, 4)):
        padded = F.pad(x, (0, 0, left, right), value=2.0)
        mask = F.pad(torch.ones(1, 15), (left, right))
        actual = model(inputs_embeds=padded, attention_mask=mask)[0][:, left : left + 15]
        assert_close(actual, expected, "float64 gradient")
    unmasked = model(inputs_embeds=padded)[0][:, 3:18]
    assert (unmasked - expected).abs().max() > 1e-2


@pytest.mark.parametrize("training", [False, True])
def test_padding_does_not_reach_batch_norms(training):
    options = {"norm_type": "batch_norm", "short_branch_norm": True, "dropout": 0.0}
    x = embedded(2, 9, 32)
    mask = torch.ones(2, 13)
    mask[:, 9:] = 0
    results = []
    for inputs, kept in ((x, None), (F.pad(x, (0, 0, 0, 4), value=5.0), mask)):
        model = base_model(**options).train(training)
        results.append((model(inputs_embeds=inputs, attention_mask=kept)[0][:, :9], model.state_dict()))
    assert_close(results[1][0], results[0][0], "float64 gradient")
    for name, value in results[0][1].items():
        assert_close(results[1][1][name], value, "float64")


def test_inputs_longer_than_the_kernel_work():
    model = base_model(**CAUSAL)
    x = embedded(1, 200, 32)
    assert_close(model(inputs_embeds=x[:, :100])[0], model(inputs_embeds=x)[0][:, :100], "float64")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("is_decoder", [False, True])
def test_16_bits_stay_finite_over_16k_tokens(dtype, is_decoder):
    config = tiny_config("chela", num_hidden_layers=1, long_kernel_size=4096, is_decoder=is_decoder, alpha_init=1.0)
    torch.manual_seed(0)
    model = ChelaModel(config).to(dtype).eval()
    with torch.no_grad():
        outputs = model(torch.randint(64, (1, 16384)), use_cache=False)[0]
    assert outputs.dtype == dtype
    assert torch.isfinite(outputs).all()


# decoding ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("taps", [1, 2, 12, 33, 64])
def test_decoding_past_every_block_of_the_convolution(taps):
    model = tiny_model("chela", "AutoModelForCausalLM", long_kernel_size=taps).double()
    tokens = tiny_inputs(model, length=150)["input_ids"]
    with torch.no_grad():
        expected = model(tokens, use_cache=False).logits
        cache, pieces, start = None, [], 0
        for size in [7, 1, 1, 9, 30, 1, 1, 17] + [1] * 100:
            if start >= 150:
                break
            step = model(tokens[:, start : start + size], past_key_values=cache, use_cache=True)
            pieces.append(step.logits)
            cache, start = step.past_key_values, start + size
    assert cache.get_seq_length() == 150
    assert_close(torch.cat(pieces, 1), expected, "float64 decode")


def test_generation_in_chunks_and_from_where_it_stopped():
    model = tiny_model("chela", "AutoModelForCausalLM")
    ids = tiny_inputs(model)["input_ids"]
    settings = {"do_sample": False, "eos_token_id": None}
    expected = model.generate(ids, max_new_tokens=30, **settings)
    chunked = model.generate(ids, max_new_tokens=30, prefill_chunk_size=4, **settings)
    assert torch.equal(chunked, expected)
    first = model.generate(ids, max_new_tokens=11, return_dict_in_generate=True, **settings)
    rest = model.generate(first.sequences, past_key_values=first.past_key_values, max_new_tokens=19, **settings)
    assert torch.equal(rest, expected)


@pytest.mark.parametrize("options", [{}, {"attention_fn": "laplace", "chunk_size": 4}, {"mixer": "ema"}])
def test_reordered_rows_go_on_where_they_come_from(options):
    model = tiny_model("chela", "AutoModelForCausalLM", **options).double()
    tokens = tiny_inputs(model, batch=3, length=20)["input_ids"]
    order = torch.tensor([2, 0, 2])
    with torch.no_grad():
        step = model(tokens[:, :9], use_cache=True)
        step.past_key_values.reorder_cache(order)
        actual = model(tokens[order, 9:], past_key_values=step.past_key_values, use_cache=True).logits
        expected = model(tokens[order], use_cache=False).logits[:, 9:]
    assert_close(actual, expected, "float64 decode")


def test_a_cache_that_cannot_keep_a_state_is_refused():
    model = tiny_model("chela", "AutoModelForCausalLM")
    with pytest.raises(ValueError, match="past_key_values must be able to keep a state"):
        model(tiny_inputs(model)["input_ids"], past_key_values=transformers.DynamicCache())


def test_a_bidirectional_model_returns_no_cache():
    assert (
        tiny_model("chela", "AutoModel")(torch.zeros(1, 3, dtype=torch.long), use_cache=True).past_key_values is None
    )


# fusing -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("branch_norm", [False, True])
def test_fused_short_convolutions_are_exact_and_saved_apart(branch_norm, tmp_path):
    model = tiny_model("chela", "AutoModelForMaskedLM", short_branch_norm=branch_norm)
    inputs = tiny_inputs(model)
    keys = set(model.state_dict())
    with torch.no_grad():
        expected = model(**inputs).logits
        model.fuse_short_convs()
        model.fuse_short_convs()
        assert_close(model(**inputs).logits, expected, "float32")
        model.save_pretrained(tmp_path)
        loaded = ChelaForMaskedLM.from_pretrained(tmp_path)
        assert set(loaded.state_dict()) == keys
        assert_close(loaded(**inputs).logits, expected, "exact")
        model.unfuse_short_convs()
        assert_close(model(**inputs).logits, expected, "exact")


def test_a_model_that_gives_up_its_branches_is_saved_as_one(tmp_path):
    model = tiny_model("chela", "AutoModelForMaskedLM", short_branch_norm=True)
    inputs = tiny_inputs(model)
    with torch.no_grad():
        expected = model(**inputs).logits
        model.fuse_short_convs(keep_branches=False)
        assert_close(model(**inputs).logits, expected, "float32")
        model.save_pretrained(tmp_path)
        loaded, info = ChelaForMaskedLM.from_pretrained(tmp_path, output_loading_info=True)
        assert not info["missing_keys"]
        assert not info["unexpected_keys"]
        assert loaded.config.short_kernel_sizes == [5]
        assert_close(loaded(**inputs).logits, expected, "float32")


def test_fused_models_decode_alike():
    model = tiny_model("chela", "AutoModelForCausalLM")
    ids = tiny_inputs(model)["input_ids"]
    expected = model.generate(ids, max_new_tokens=20, do_sample=False)
    model.fuse_short_convs()
    assert torch.equal(model.generate(ids, max_new_tokens=20, do_sample=False), expected)


@pytest.mark.parametrize("keep_branches", [True, False])
def test_a_model_in_training_cannot_be_fused_not_even_in_part(keep_branches):
    model = tiny_model("chela", "AutoModel")
    model.layers[-1].train()
    with pytest.raises(ValueError, match="evaluation mode only"):
        model.fuse_short_convs(keep_branches=keep_branches)
    assert model.config.short_kernel_sizes == [3, 5]
    assert all(layer.unit.mixer.short_kernel_sizes == (3, 5) for layer in model.layers)


def test_giving_up_branches_leaves_another_models_config_and_frozen_tensors_alone():
    config = tiny_config("chela")
    one, other = (ChelaForMaskedLM(config).eval() for _ in range(2))
    one.requires_grad_(False)
    one.fuse_short_convs(keep_branches=False)
    assert one.config.short_kernel_sizes == one.model.config.short_kernel_sizes == [5]
    assert one.model.layers[0].unit.config is one.config
    assert other.config.short_kernel_sizes == config.short_kernel_sizes == [3, 5]
    assert not any(parameter.requires_grad for parameter in one.parameters())


# sizes and presets ------------------------------------------------------------------------------------------------


def expected_count(layers, width, inner, taps, short, embedding, *, bidirectional=False):
    """Parameters by the formula: projections, scales and offsets, feed-forward network, convolutions, norms."""
    layer = 3 * width**2 + 3 * width + 4 * width + 2 * width * inner + inner + width
    layer += width * taps * (2 if bidirectional else 1) + width * (3 + short) + 3 * width + 4 * width
    return layers * layer + 2 * width + embedding


@pytest.mark.parametrize(
    ("preset", "overrides", "count"),
    [
        ("wikitext103", {}, 257_961_984),
        ("wikitext103", {"short_kernel_sizes": [3, 9]}, 257_978_368),
        ("enwik8", {}, 47_463_936),
        ("enwik8", {"short_kernel_sizes": [3, 9]}, 47_470_080),
        ("enwik8", {"tie_word_embeddings": False}, 47_568_896),
    ],
)
def test_the_papers_language_models_have_its_sizes(preset, overrides, count):
    config = ChelaConfig.from_preset(preset, **overrides)
    embeddings = {"wikitext103": 89_737_216, "enwik8": 205 * 512 * (1 if config.tie_word_embeddings else 2)}
    formula = expected_count(
        config.num_hidden_layers,
        config.hidden_size,
        config.intermediate_size,
        4096,
        config.short_kernel_sizes[1],
        embeddings[preset],
    )
    with torch.device("meta"):
        model = ChelaForCausalLM(config)
    assert model.num_parameters() == formula == count


TABLE_7 = {  # depth, width, inner width, norm, pre-norm, dropout
    "listops": (6, 80, 160, "batch_norm", False, 0.1),
    "text": (4, 128, 256, "scale_norm", False, 0.1),
    "retrieval": (6, 128, 256, "scale_norm", False, 0.1),
    "image": (8, 160, 320, "batch_norm", True, 0.0),
    "pathfinder": (6, 128, 256, "batch_norm", True, 0.0),
    "pathx": (4, 64, 128, "batch_norm", True, 0.0),
    "speech": (6, 60, 120, "batch_norm", True, 0.0),
}


@pytest.mark.parametrize("preset", TABLE_7)
def test_the_papers_classifiers_are_presets_that_train(preset):
    depth, width, inner, norm, pre_norm, dropout = TABLE_7[preset]
    config = ChelaConfig.from_preset(preset)
    assert (config.num_hidden_layers, config.hidden_size, config.intermediate_size) == (depth, width, inner)
    assert (config.norm_type, config.norm_position == "pre", config.dropout) == (norm, pre_norm, dropout)
    assert not config.is_decoder
    assert config.classifier_size == 2 * width
    pair = preset == "retrieval"
    config = ChelaConfig.from_preset(preset, num_hidden_layers=1)
    torch.manual_seed(0)
    model = (ChelaForSequencePairClassification if pair else ChelaForSequenceClassification)(config)
    if config.input_size is None:
        inputs = {"input_ids": torch.randint(3, config.vocab_size, (2, 40))}
        if pair:
            inputs["pair_input_ids"] = torch.randint(3, config.vocab_size, (2, 30))
    else:
        inputs = {"input_values": torch.randn(2, 40)}
    outputs = model(**inputs, labels=torch.tensor([0, 1]))
    assert outputs.logits.shape == (2, config.num_labels)
    assert_close(outputs.loss, F.cross_entropy(outputs.logits, torch.tensor([0, 1])), "float32")
    outputs.loss.backward()
    assert all(torch.isfinite(p.grad).all() for p in model.parameters())


def test_the_speech_preset_has_about_the_papers_size():
    with torch.device("meta"):
        count = ChelaForSequenceClassification(ChelaConfig.from_preset("speech")).num_parameters()
    assert count == pytest.approx(493_000, rel=0.02)


def test_presets_are_complete_and_take_overrides():
    assert set(PRESETS) == {"tiny", "wikitext103", "enwik8", *TABLE_7}
    assert ChelaConfig.from_preset("tiny", num_hidden_layers=2).num_hidden_layers == 2
    with pytest.raises(ValueError, match=r"preset must be one of .*; got 'listop'. Did you mean 'listops'\?"):
        ChelaConfig.from_preset("listop")


@pytest.mark.parametrize(
    ("length", "odd", "down"), [(317, 7, 6), (1024, 7, 7), (2048, 7, 7), (4096, 9, 8), (16384, 9, 9), (1, 1, 1)]
)
def test_the_second_short_convolution_follows_from_the_length(length, odd, down):
    assert (short_kernel_size(length, "odd"), short_kernel_size(length, "down")) == (odd, down)
    assert ChelaConfig(training_length=length).short_kernel_sizes == [3, odd]
    config = ChelaConfig(training_length=length, short_kernel_rounding="down", is_decoder=True)
    assert config.short_kernel_sizes == [3, down]
    assert ChelaConfig(training_length=length, short_kernel_sizes=[5]).short_kernel_sizes == [5]


# heads and inputs -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "inputs", "message"),
    [
        (
            {},
            {"input_ids": torch.zeros(1, 3).long(), "attention_mask": torch.zeros(1, 1, 3, 3)},
            r"attention_mask must be of shape \(batch, length\).*got \(1, 1, 3, 3\)",
        ),
        *(
            (
                {},
                {"input_ids": torch.zeros(2, 9).long(), "attention_mask": torch.ones(shape)},
                rf"attention_mask must be of shape \(batch, length\) = \(2, 9\).*got \({shape[0]}, {shape[1]}\)",
            )
            for shape in ((2, 14), (2, 5), (3, 9))
        ),
    ],
)
def test_inputs_that_do_not_fit_are_refused(options, inputs, message):
    with pytest.raises(ValueError, match=message):
        ChelaModel(tiny_config("chela", **options))(**inputs)


@pytest.mark.parametrize("pooling", ["mean", "first", "last"])
def test_a_classifier_reads_what_pooling_says(pooling):
    model = tiny_model("chela", "AutoModelForSequenceClassification", pooling=pooling)
    ids = tiny_inputs(model, length=9)["input_ids"]
    mask = torch.ones(2, 9)
    mask[0, :3], mask[1, 6:] = 0, 0
    with torch.no_grad():
        hidden = model.model(ids, attention_mask=mask)[0]
        kept = hidden[0, 3:], hidden[1, :6]
        pick = {"mean": lambda h: h.mean(0), "first": lambda h: h[0], "last": lambda h: h[-1]}[pooling]
        head = model.classifier
        expected = head.out_proj(F.silu(head.dense(torch.stack([pick(h) for h in kept]))))
        assert_close(model(ids, attention_mask=mask).logits, expected, "float32")


def test_a_causal_model_classifies_too():
    model = tiny_model("chela", "AutoModelForSequenceClassification", is_decoder=True, pooling="last")
    outputs = model(**tiny_inputs(model), labels=torch.tensor([0, 2]))
    assert outputs.loss.isfinite()
    assert "past_key_values" not in outputs


def test_one_checkpoint_serves_every_head(tmp_path):
    """A causal language model's weights start a causal classifier, a masked one's a bidirectional one."""
    for auto_class, options in (("AutoModelForCausalLM", CAUSAL), ("AutoModelForMaskedLM", {})):
        model = tiny_model("chela", auto_class, **options)
        model.save_pretrained(tmp_path)
        classifier, info = ChelaForSequenceClassification.from_pretrained(tmp_path, output_loading_info=True)
        assert not info["unexpected_keys"]
        assert {name.split(".")[0] for name in info["missing_keys"]} == {"classifier"}
        ids = tiny_inputs(model)["input_ids"]
        assert_close(classifier.model(ids)[0], model.model(ids)[0], "exact")


def test_an_adaptive_vocabularys_loss_is_that_of_its_log_probabilities():
    model = tiny_model(
        "chela",
        "AutoModelForCausalLM",
        **CAUSAL,
        adaptive_cutoffs=[10, 30],
        adaptive_factor=2,
        tie_word_embeddings=False,
    )
    ids = tiny_inputs(model)["input_ids"]
    outputs = model(ids, labels=ids)
    assert_close(outputs.logits.exp().sum(-1), torch.ones(2, 11), "float32")
    expected = F.nll_loss(outputs.logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    assert_close(outputs.loss, expected, "float32")
    with pytest.raises(ValueError, match="adaptive_cutoffs must be None to resize the vocabulary"):
        model.resize_token_embeddings(70)


def test_embeddings_are_of_ordinary_size_where_no_norm_reads_them():
    torch.manual_seed(0)
    plain = ChelaModel(tiny_config("chela", vocab_size=4000, hidden_size=64, scale_embeddings=False))
    assert plain.embed_tokens.weight.std().item() == pytest.approx(0.2, rel=0.05)
    scaled = ChelaModel(tiny_config("chela", vocab_size=4000, hidden_size=64)).eval()
    assert scaled.embed_tokens.weight.std().item() == pytest.approx(1 / 8, rel=0.05)
    ids = torch.tensor([[3, 5]])
    assert_close(scaled.embed_tokens(ids), 8 * scaled.embed_tokens.weight[ids], "exact")
    assert ChelaConfig.from_preset("enwik8").scale_embeddings


def test_initial_scales_of_queries_and_keys():
    noise, ones = ChelaModel(tiny_config("chela")), ChelaModel(tiny_config("chela", alpha_init=1.0))
    assert 0.01 < noise.layers[0].unit.query_alpha.std() < 0.03
    for name in ("query_alpha", "key_alpha"):
        assert (getattr(ones.layers[0].unit, name) == 1).all()
    for name in ("query_beta", "key_beta"):
        assert (getattr(ones.layers[0].unit, name) == 0).all()


@pytest.mark.parametrize("options", [{"norm_type": "batch_norm"}, {"short_branch_norm": True}])
def test_gradient_checkpointing_counts_a_batch_once(options):
    buffers = []
    for checkpointing in (False, True):
        model = tiny_model("chela", "AutoModel", **options).train()
        if checkpointing:
            model.activation_checkpointing_enable()
        torch.manual_seed(4)
        model(**tiny_inputs(model))[0].square().mean().backward()
        buffers.append({name: x for name, x in model.named_buffers() if "running" in name or "tracked" in name})
    assert buffers[0]
    for name, value in buffers[0].items():
        assert_close(buffers[1][name].double(), value.double(), "float32")


@pytest.mark.parametrize("pooling", ["mean", "last"])
def test_a_classifier_in_float16_stays_finite_over_16k_tokens(pooling):
    config = tiny_config("chela", num_hidden_layers=1, long_kernel_size=4096, alpha_init=1.0, pooling=pooling)
    model = ChelaForSequenceClassification(config).eval()
    model.model.final_norm.bias.data.fill_(8.0)  # a sum of 16k such numbers leaves float16's range
    ids = torch.randint(2, 64, (1, 16384))
    with torch.no_grad():
        expected = model(ids).logits
        actual = model.half()(ids).logits
    assert torch.isfinite(actual).all()
    assert F.cosine_similarity(actual.float().flatten(), expected.flatten(), dim=0) > 0.995


def test_mixers_tensors_want_no_weight_decay():
    model = tiny_model("chela", "AutoModel")
    wanted = {name for name, _ in model.named_parameters() if ".mixer." in name}
    found = {id(p) for p in model.ssm_parameters()}
    assert {name for name, p in model.named_parameters() if id(p) in found} == wanted
    assert all(p.shape[-1] == 12 for p in model.ssm_parameters(dynamics=True))  # the long taps


def test_the_backward_keeps_what_the_layers_docstring_says():
    """Per token; and what the head reads, the final norm's input and the logits. 2 % are left for statistics."""
    width, inner, layers, vocabulary = 64, 160, 3, 32
    sizes = {"hidden_size": width, "intermediate_size": inner, "num_hidden_layers": layers, "vocab_size": vocabulary}
    model = ChelaForCausalLM(ChelaConfig(is_decoder=True, dropout=0.0, num_attention_heads=2, **sizes)).train()

    def kept(length):
        tokens = torch.ones(1, length, dtype=torch.int64)
        with Stored(*model.parameters(), *model.buffers()) as stored:
            model(input_ids=tokens, labels=tokens, use_cache=False, skip_logits=True)
        return stored.bytes / 4

    per_token = (kept(384) - kept(128)) / 256
    expected = layers * (14 * width + inner) + 2 * width + vocabulary
    assert expected <= per_token < 1.02 * expected


# errors -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"hidden_size": 0}, "hidden_size must be a positive integer; got 0"),
        ({"num_attention_heads": 3}, "num_attention_heads must divide hidden_size into equal heads; got 3 and hidden"),
        ({"num_attention_heads": 0}, "num_attention_heads must be a positive integer; got 0"),
        ({"training_length": 0}, "training_length must be a positive integer; got 0"),
        ({"long_kernel_size": 0}, "long_kernel_size must be a positive integer; got 0"),
        ({"long_kernel_size": -4}, "long_kernel_size must be a positive integer; got -4"),
        ({"long_kernel_groups": 5}, "long_kernel_groups must divide hidden_size into equal groups; got 5"),
        ({"long_kernel_init": "zeros"}, "long_kernel_init must be one of double_exp, random; got 'zeros'"),
        ({"short_kernel_sizes": []}, "short_kernel_sizes must be one or more positive integers"),
        ({"short_kernel_sizes": [3, 0]}, r"short_kernel_sizes must be one or more positive integers; got \[3, 0\]"),
        ({"short_kernel_sizes": [3, 8]}, r"short_kernel_sizes must be odd unless is_decoder is True.*\[3, 8\]"),
        ({"is_encoder_decoder": True}, "is_encoder_decoder must be False, because CHELA is one stack; got True"),
        ({"kernel_squash": math.nan}, "kernel_squash must be finite and not negative; got nan"),
        ({"alpha_init": math.inf}, "alpha_init must be finite; got inf"),
        ({"kernel_squash": -0.1}, "kernel_squash must be finite and not negative; got -0.1"),
        ({"kernel_dropout": 1.0}, r"kernel_dropout must lie in \[0, 1\); got 1.0"),
        ({"kernel_smoothing": 4}, "kernel_smoothing must be a positive odd integer; got 4"),
        ({"dropout": 1}, r"dropout must lie in \[0, 1\); got 1"),
        ({"attention_norm_eps": 0}, "attention_norm_eps must be positive and finite; got 0"),
        ({"norm_type": "layernorm"}, "norm_type must be one of .*; got 'layernorm'. Did you mean 'layer_norm'"),
        ({"attention_norm": "srms"}, "attention_norm must be one of simple_rms_norm, .*; got 'srms'"),
        ({"attention_fn": "laplac"}, "attention_fn must be one of .*; got 'laplac'. Did you mean 'laplace'"),
        ({"attention_fn": "softmax"}, "attention_fn must be one of norm, laplace, laplace_feature; got 'softmax'"),
        ({"mixer": "s4"}, "mixer must be one of short_long, long, s4d, ema; got 's4'"),
        ({"mixer": "s4d", "mixer_state_size": 5}, "mixer_state_size must be even for mixer s4d; got 5"),
        ({"gate_residual": "none"}, "gate_residual must be one of raw, normed; got 'none'"),
        ({"norm_position": "mid"}, "norm_position must be one of pre, post; got 'mid'"),
        ({"pooling": "max"}, "pooling must be one of mean, first, last; got 'max'"),
        ({"hidden_act": "swishy"}, "hidden_act must name an activation of transformers; got 'swishy'"),
        ({"chunk_size": 8}, "chunk_size must be None unless attention_fn is laplace; got 8"),
        ({"chunk_size": 0, "attention_fn": "laplace"}, "chunk_size must be a positive integer; got 0"),
        ({"norm_type": "batch_norm", **CAUSAL}, "norm_type must not use batch normalisation in a causal model"),
        ({"short_branch_norm": True, **CAUSAL}, "short_branch_norm must not use batch normalisation"),
        ({"input_size": 0}, "input_size must be a positive integer; got 0"),
        ({"adaptive_cutoffs": [10]}, "adaptive_cutoffs must be None except for a language model"),
        ({"adaptive_cutoffs": [30, 10], **CAUSAL}, "adaptive_cutoffs must be a list of ascending token ids"),
        (
            {"adaptive_cutoffs": [10, 30], "adaptive_factor": 7, **CAUSAL},
            "hidden_size must be a multiple of adaptive_f",
        ),
        ({"pad_token_id": 64}, "pad_token_id must lie in the vocabulary, from 0 to vocab_size - 1; got 64"),
    ],
)
def test_bad_fields_are_refused(options, message):
    with pytest.raises(StrictDataclassError) as error:
        tiny_config("chela", **options)
    with pytest.raises(ValueError, match=message):
        raise error.value.__cause__


def test_fields_are_checked_again_when_a_model_is_built():
    config = tiny_config("chela")
    object.__setattr__(config, "norm_type", "batchnorm")
    with pytest.raises((StrictDataclassError, ValueError)):
        ChelaModel(config)


@pytest.mark.parametrize(
    ("model_class", "options", "message"),
    [
        (ChelaForMaskedLM, CAUSAL, "is_decoder must be False for ChelaForMaskedLM; got True: use ChelaForCausalLM"),
    ],
)
def test_classes_refuse_configs_of_other_kinds(model_class, options, message):
    with pytest.raises(ValueError, match=message):
        model_class(tiny_config("chela", **options))


def test_a_bidirectional_config_makes_a_language_model_without_being_changed():
    config = tiny_config("chela")
    before = config.to_dict()
    model = ChelaForCausalLM(config)
    assert config.to_dict() == before
    assert model.config.is_decoder
    assert not any(module.bidirectional for module in model.modules() if hasattr(module, "bidirectional"))
    with pytest.raises(StrictDataclassError):
        ChelaForCausalLM(tiny_config("chela", norm_type="batch_norm"))


def test_every_initial_number_is_of_ordinary_size():
    """At the start nothing explodes with depth, and the gates are half open."""
    torch.manual_seed(0)
    model = ChelaForCausalLM(ChelaConfig.from_preset("tiny", vocab_size=300, dropout=0.0)).eval()
    ids = torch.randint(300, (1, 200))
    with torch.no_grad():
        loss = model(ids, labels=ids).loss
    assert loss.item() == pytest.approx(math.log(300), abs=0.7)
    gates = [m for name, m in model.named_modules() if name.endswith("output_gate_proj") and isinstance(m, nn.Linear)]
    assert all((gate.bias == 0).all() for gate in gates)
