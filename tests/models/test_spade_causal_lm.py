"""SPADE as a causal language model: the paper's model and its baselines, its cache, its adaptive vocabulary."""

import pytest
import torch
import transformers
from torch import nn

from hf_hybrid import SpadeConfig, SpadeEncoderModel, SpadeForCausalLM, SpadeForConditionalGeneration, SpadeModel
from hf_hybrid.models.spade import modeling_spade

from ..tolerances import assert_close
from .tiny import check_unequal_prompts, tiny_config, tiny_inputs, tiny_model

SSM_TYPES = ("s4", "s4d", "s5", "hyena", "lstm")
SHORT_MEMORY = {"hyena": {"ssm_l_max": 64}}  # of the tiny models here


def language_model(**overrides) -> SpadeForCausalLM:
    return tiny_model("spade", "AutoModelForCausalLM", **overrides)


def stored(model: nn.Module) -> int:
    tied = {"lm_head.weight"}
    return sum(tensor.numel() for name, tensor in model.state_dict().items() if name not in tied)


# the paper's model ------------------------------------------------------------------------------------------------


def test_the_wikitext103_preset_has_the_papers_size():
    frozen = SpadeConfig.from_preset("wikitext103")
    trained = SpadeConfig.from_preset("wikitext103", ssm_freeze="none")
    with torch.device("meta"):
        assert stored(SpadeForCausalLM(frozen)) == 249_234_688
        assert SpadeForCausalLM(trained).num_parameters() == 249_234_688
        for ssm_type in SSM_TYPES:
            config = SpadeConfig.from_preset("wikitext103", ssm_type=ssm_type, num_hidden_layers=1)
            assert config.ssm_num_copies == (1024 if ssm_type in ("s4", "s4d") else None)
            SpadeForCausalLM(config)
        plain = SpadeConfig.from_preset("wikitext103", adaptive_cutoffs=None, num_hidden_layers=1)
        assert SpadeForCausalLM(plain).lm_head.weight.shape == (267_744, 1024)
        with pytest.raises(Exception, match=r"ssm_num_copies must be left at None for ssm_type s5, .*; got 512"):
            SpadeConfig.from_preset("wikitext103", ssm_type="s5", ssm_num_copies=512)
        untied = SpadeConfig.from_preset("wikitext103", tie_word_embeddings=False)
        assert stored(SpadeForCausalLM(untied)) == 249_234_688 - 45_393_920 + 89_737_216
        without = SpadeConfig.from_preset("wikitext103", global_layers="none")
        # aggregate and two norms, and S4 with a copy of (A, B) for each of 1024 channels
        assert stored(SpadeForCausalLM(without)) == 249_234_688 - 2_102_272 - 264_192


def test_a_language_models_defaults_are_the_papers():
    config = SpadeConfig(is_decoder=True, is_encoder_decoder=False)
    assert (config.norm_position, config.local_radius, config.chunk_size) == ("pre", 511, 512)
    assert config.share_relative_bias
    assert (config.layer_types[0], set(config.layer_types[1:])) == ("hybrid_sliding", {"sliding_attention"})
    assert config.sliding_window == 512
    assert SpadeConfig.from_preset("wikitext103").combine_mode == "concat"


@pytest.mark.parametrize("role", [{}, {"is_decoder": True}])
def test_a_language_model_refuses_an_encoder_decoders_config(role, tmp_path):
    with pytest.raises(ValueError, match="is_encoder_decoder must be False for SpadeForCausalLM; got True"):
        SpadeForCausalLM(tiny_config("spade", **role))
    tiny_model("spade", "AutoModelForSeq2SeqLM").save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="is_encoder_decoder must be False"):
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path)


def test_a_language_model_of_an_encoders_config_is_causal_and_says_what_it_keeps(monkeypatch):
    said = []
    monkeypatch.setattr(modeling_spade.logger, "warning_once", said.append)
    config = tiny_config("spade", is_encoder_decoder=False)
    model = SpadeForCausalLM(config).eval()
    assert not config.is_decoder
    assert model.config.is_decoder
    assert min(reach(model)) == 3
    assert "norm_position 'post'" in said[0]
    SpadeForCausalLM(model.config)
    assert len(said) == 1


@pytest.mark.parametrize("model_class", [SpadeModel, SpadeForConditionalGeneration, SpadeEncoderModel])
def test_other_classes_refuse_a_language_models_config(model_class):
    with pytest.raises(
        ValueError, match=r"(is_encoder_decoder must be True|is_decoder must be False).*SpadeForCausal"
    ):
        model_class(tiny_config("spade", is_decoder=True, is_encoder_decoder=False))


# what it sees -----------------------------------------------------------------------------------------------------


def reach(model, length: int = 40, changed: int = 3) -> list[int]:
    """Positions whose logits change when one token does, beyond the noise of an FFT."""
    ids = torch.randint(2, 64, (1, length), generator=torch.Generator().manual_seed(1))
    other = ids.clone()
    other[0, changed] = 1 + ids[0, changed] % 60
    with torch.no_grad():
        difference = (model.double()(ids).logits - model(other).logits).abs().amax(-1)[0]
    return (difference > 1e-9).nonzero().flatten().tolist()


@pytest.mark.parametrize("ssm_type", SSM_TYPES)
def test_only_the_state_space_model_sees_further_than_the_windows(ssm_type):
    options = {"ssm_type": ssm_type, **SHORT_MEMORY.get(ssm_type, {})}
    assert reach(language_model(**options)) == list(range(3, 40))
    assert reach(language_model(global_layers="none")) == list(range(3, 3 + 2 * 4 + 1))  # two layers of radius 4


def test_chunks_keep_to_themselves():
    assert reach(language_model(attention_type="chunk", global_layers="none")) == [3, 4, 5]


@pytest.mark.parametrize(
    "baseline",
    [
        {"attention_type": "full", "global_layers": "none"},
        {"global_layers": "none"},
        {"attention_type": "chunk", "global_layers": "none"},
        *({"attention_type": "none", "global_layers": "all", "ssm_type": name} for name in SSM_TYPES),
    ],
    ids=str,
)
def test_baselines_are_configurations(baseline, tmp_path):
    model = language_model(**baseline, **SHORT_MEMORY.get(baseline.get("ssm_type"), {}))
    modules = {type(module).__name__ for module in model.modules()}
    assert ("LocalSelfAttention" in modules) == (baseline.get("attention_type") != "none")
    assert bool(modules & {"S4", "S4D", "S5", "Hyena", "LSTM"}) == (baseline["global_layers"] == "all")
    inputs = tiny_inputs(model)
    model(**inputs, labels=inputs["input_ids"]).loss.backward()
    assert not [name for name, parameter in model.named_parameters() if parameter.grad is None]
    model.save_pretrained(tmp_path)
    loaded = SpadeForCausalLM.from_pretrained(tmp_path).eval()
    inputs = tiny_inputs(model, length=20)
    assert_close(loaded(**inputs).logits, model(**inputs).logits, "exact")


def test_a_wide_window_is_full_attention():
    wide, full = (
        language_model(local_radius=32, global_layers="none"),
        language_model(attention_type="full", global_layers="none"),
    )
    full.load_state_dict(wide.state_dict())
    inputs = tiny_inputs(wide, length=30)
    assert_close(wide(**inputs).logits, full(**inputs).logits, "float32 model")


# every state space ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("ssm_type", "freeze"), [
    ("s4", "all"), ("s4", "ab_dt"), ("s4", "none"), ("s4d", "all"), ("s4d", "ab_dt"), ("s4d", "none"),
    ("s5", "all"), ("s5", "ab_dt"), ("s5", "none"), ("hyena", "all"), ("hyena", "none"), ("lstm", "none"),
])  # fmt: skip
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "bidirectional"])
def test_one_word_chooses_the_state_space(ssm_type, freeze, causal, tmp_path):
    options = {"ssm_type": ssm_type, "ssm_freeze": freeze, **SHORT_MEMORY.get(ssm_type, {})}
    auto_class = "AutoModelForCausalLM" if causal else "AutoModelForMaskedLM"
    model = tiny_model("spade", auto_class, **options).train()
    own = {
        id(tensor) for layer in model.modules() if hasattr(layer, "own_tensors") for _, tensor in layer.own_tensors()
    }
    assert {id(parameter) for parameter in model.ssm_parameters()} <= own
    assert bool(list(model.ssm_parameters())) == (freeze != "all")
    assert bool(list(model.ssm_parameters(dynamics=True))) == (freeze == "none" and ssm_type != "lstm")
    inputs = tiny_inputs(model)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(**inputs, labels=inputs["input_ids"]).loss.backward()
    optimizer.step()
    changed = {name for name, tensor in model.state_dict().items() if not torch.equal(tensor, before[name])}
    trained = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    assert changed <= trained
    assert trained - changed == set()
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path)
    assert_close(loaded.eval()(**inputs).logits, model.eval()(**inputs).logits, "exact")


@pytest.mark.parametrize("ssm_type", SSM_TYPES)
@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_changes_nothing_for_any_state_space(ssm_type, side):
    for auto_class in ("AutoModelForCausalLM", "AutoModelForMaskedLM"):
        model = tiny_model("spade", auto_class, ssm_type=ssm_type, **SHORT_MEMORY.get(ssm_type, {}))
        ids = tiny_inputs(model, batch=1)["input_ids"]
        pad, mask = torch.zeros(1, 6, dtype=torch.long), torch.ones_like(ids)
        order = (lambda a, b: [a, b]) if side == "left" else (lambda a, b: [b, a])
        with torch.no_grad():
            padded = model(torch.cat(order(pad, ids), 1), attention_mask=torch.cat(order(pad, mask), 1)).logits
            kept = padded[:, 6:] if side == "left" else padded[:, :-6]
            assert_close(kept, model(ids).logits, "float32 model")


# decoding ---------------------------------------------------------------------------------------------------------


def cache_bytes(cache) -> int:
    tensors = [
        tensor for layer in cache.layers for tensor in (getattr(layer, "keys", None), getattr(layer, "values", None))
    ]
    tensors += [state for layer in cache.layers for state in getattr(layer, "recurrent_states", {}).values()]
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors if tensor is not None)


@pytest.mark.parametrize(
    "options",
    [{}, {"attention_type": "chunk"}, *({"ssm_type": name, **SHORT_MEMORY.get(name, {})} for name in SSM_TYPES[1:]),
     {"attention_type": "none", "global_layers": "all"}],
    ids=str,
)  # fmt: skip
def test_the_cache_does_not_grow_past_the_window(options):
    model = language_model(**options)
    sizes = []
    for length in (20, 90):
        with torch.no_grad():
            cache = model(**tiny_inputs(model, length=length), use_cache=True).past_key_values
        assert cache.get_seq_length() == length
        sizes.append(cache_bytes(cache))
    assert sizes[0] == sizes[1] > 0


def test_a_batch_of_prompts_of_unequal_length_generates_as_each_alone():
    for options in ({}, {"attention_type": "chunk"}, {"ssm_type": "hyena", "ssm_l_max": 8}, {"ssm_type": "lstm"}):
        check_unequal_prompts(language_model(**options))


def test_a_cache_that_keeps_no_state_is_refused():
    model = language_model()
    inputs = tiny_inputs(model)
    with pytest.raises(ValueError, match=r"past_key_values must be .* DynamicCache\(config=model.config\).* layer 0"):
        model(**inputs, past_key_values=transformers.DynamicCache())
    cache = transformers.DynamicCache(config=model.config)
    assert_close(model(**inputs, past_key_values=cache).logits, model(**inputs).logits, "float32 decode")


def test_only_the_last_logits_are_computed_on_request():
    model = language_model()
    inputs = tiny_inputs(model)
    with pytest.raises(ValueError, match="logits_to_keep must be 0 together with labels"):
        model(**inputs, labels=inputs["input_ids"], logits_to_keep=2)
    assert_close(model(**inputs, logits_to_keep=2).logits, model(**inputs).logits[:, -2:], "exact")


# losses -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("adaptive", [None, [10, 30]])
def test_label_smoothing_and_plain_loss_agree_through_trainer(adaptive, tmp_path):
    """Trainer's own label smoothing shifts labels only for models that it knows to be causal."""
    vocabulary = {"adaptive_cutoffs": adaptive, "adaptive_factor": 2} if adaptive else {}
    model = language_model(**vocabulary, dropout=0.0, attention_dropout=0.0)
    ids = tiny_inputs(model, batch=4)["input_ids"]
    losses = []
    for smoothing in (0.0, 1e-7):
        arguments = transformers.TrainingArguments(
            str(tmp_path), label_smoothing_factor=smoothing, report_to=[], use_cpu=True
        )
        trainer = transformers.Trainer(model, arguments)
        losses.append(trainer.compute_loss(model, {"input_ids": ids, "labels": ids.clone()}).detach())
    assert_close(losses[1], losses[0], "float32 model")


def test_the_adaptive_vocabulary_gives_log_probabilities_and_their_loss():
    model = language_model(adaptive_cutoffs=[10, 30], adaptive_factor=2)
    inputs = tiny_inputs(model)
    labels = inputs["input_ids"].clone()
    labels[0, :4] = -100
    outputs = model(**inputs, labels=labels)
    assert_close(outputs.logits.exp().sum(-1), torch.ones(labels.shape), "float32")
    expected = nn.functional.nll_loss(outputs.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
    assert_close(outputs.loss, expected, "float32")
    summed = model(**inputs, labels=labels, num_items_in_batch=5).loss
    assert_close(summed, expected * (labels[:, 1:] != -100).sum() / 5, "float32")
    in_training = model.train()(**inputs, labels=labels)
    assert in_training.logits is None


def test_an_adaptive_vocabulary_cannot_be_resized():
    with pytest.raises(ValueError, match=r"adaptive_cutoffs must be None to resize .* got \[10, 30\]"):
        language_model(adaptive_cutoffs=[10, 30], adaptive_factor=2).resize_token_embeddings(70)


# bad input --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "rule"),
    [
        ({"adaptive_cutoffs": [30, 10]}, r"adaptive_cutoffs must be a list of ascending .* got \[30, 10\]"),
        ({"adaptive_cutoffs": [10, 64]}, r"adaptive_cutoffs must be .* vocab_size 64"),
        ({"adaptive_cutoffs": []}, r"adaptive_cutoffs must be a list of ascending .* got \[\]"),
        ({"adaptive_cutoffs": [10, 20, 30]}, "hidden_size must be a multiple of adaptive_factor"),
        ({"adaptive_cutoffs": [10], "is_decoder": False}, "adaptive_cutoffs must be None except for a language model"),
        ({"adaptive_factor": 0}, "adaptive_factor must be a positive integer; got 0"),
        ({"adaptive_dropout": 1.0}, r"adaptive_dropout must lie in \[0, 1\); got 1.0"),
        ({"attention_type": "none"}, "attention_type must not be 'none' unless all layers are in global_layers"),
        ({"ssm_type": "s6"}, "ssm_type must be one of s4, s4d, s5, hyena, lstm; got 's6'"),
        ({"ssm_type": "lstm", "ssm_freeze": "all"}, "ssm_freeze must be one of none for ssm_type lstm; got 'all'"),
        ({"ssm_type": "hyena", "ssm_freeze": "ab_dt"}, "ssm_freeze must be one of all, none for ssm_type hyena"),
        ({"ssm_init": "lin"}, "ssm_init must be one of legs for ssm_type s4; got 'lin'"),
        ({"ssm_type": "s4d", "ssm_init": "hippo"}, "ssm_init must be one of lin, inv, legs for ssm_type s4d"),
        ({"ssm_discretization": "zoh"}, "ssm_discretization must be one of bilinear for ssm_type s4; got 'zoh'"),
        ({"ssm_l_max": 9}, "ssm_l_max must be None where a decoder has global_layers"),
        ({"ssm_type": "s5", "ssm_l_max": 9}, "ssm_l_max must be None for ssm_type s5; got 9"),
        ({"ssm_type": "s5", "ssm_blocks": 3}, "ssm_state_size must be a multiple of twice ssm_blocks .* got 8"),
        ({"hyena_order": 1}, "hyena_order must be at least 2; got 1"),
        ({"hyena_embedding_size": 4}, "hyena_embedding_size must be odd and at least 3; got 4"),
        ({"hyena_sine_frequency": 0.0}, "hyena_sine_frequency must be positive and finite; got 0.0"),
        ({"ssm_type": "lstm", "ssm_use_D": False}, "ssm_use_D must be left at True for ssm_type lstm, which .* False"),
        ({"ssm_type": "s5", "ssm_num_copies": 2}, "ssm_num_copies must be left at None for ssm_type s5"),
        ({"ssm_type": "hyena", "ssm_dt_min": 0.01}, "ssm_dt_min must be left at 0.001 for ssm_type hyena"),
        ({"hyena_order": 3}, "hyena_order must be left at 2 for ssm_type s4"),
        ({"ssm_type": "s4d", "ssm_blocks": 1}, "ssm_blocks must be left at 4 for ssm_type s4d"),
        ({"combine_alpha": 0.3}, "combine_alpha must be left at 0.5 for combine_mode residual"),
        ({"combine_mode": "add", "concat_order": "global_local"}, "concat_order must be left at local_global for"),
        ({"adaptive_dropout": 0.1}, "adaptive_dropout must be left at 0.0 for adaptive_cutoffs None"),
        ({"combine_mode": "Add", "combine_alpha": 0.3}, "combine_mode must be one of .* got 'Add'"),
        ({"decoder_attention_type": "chunk"}, "decoder_attention_type must be left out for a language model"),
        ({"decoder_global_layers": [0]}, r"decoder_global_layers must be left out .* got \[0\]"),
        ({"pooling": "max"}, "pooling must be one of first, mean, last; got 'max'"),
        ({"classifier_dropout": -0.1}, r"classifier_dropout must lie in \[0, 1\); got -0.1"),
    ],
)
def test_bad_values_are_named(options, rule):
    with pytest.raises(Exception, match=rule):
        tiny_config("spade", **{"is_decoder": True, "is_encoder_decoder": False, **options})


def test_what_would_be_silently_ignored_is_refused_or_said(monkeypatch):
    model, said = language_model(), []
    inputs = tiny_inputs(model)
    monkeypatch.setattr("hf_hybrid.models.local_attention.logger.warning_once", said.append)
    model(**inputs)
    assert not said
    model(**inputs, output_attentions=True)
    assert said == ["output_attentions needs attn_implementation='eager': local attention has none."] * 2


def test_an_early_exit_drafts_for_the_whole_model():
    model = language_model(global_layers="none", num_hidden_layers=3)
    inputs = tiny_inputs(model, batch=1)
    settings = {"max_new_tokens": 8, "do_sample": False}
    expected = model.generate(**inputs, **settings)
    assert torch.equal(model.generate(**inputs, assistant_early_exit=1, **settings), expected)
