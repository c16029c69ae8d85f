"""SPADE's own identities: the paper's equations, counts, and the models it contains as special cases."""

import pytest
import torch
import transformers
from torch import nn
from transformers import DynamicCache, T5Config, T5ForConditionalGeneration

from hf_hybrid import SpadeConfig, SpadeEncoderModel, SpadeForConditionalGeneration, SpadeModel
from hf_hybrid.kernels.ssm_kernel.reference import s4_scan
from hf_hybrid.layers.relative_position import relative_position_bucket
from hf_hybrid.layers.s4 import S4

from ..tolerances import assert_close
from .tiny import tiny_config, tiny_inputs, tiny_model

T5_AS_SPADE = {
    "norm_type": "rms_norm",
    "norm_position": "pre",
    "feed_forward_bias": False,
    "scale_attention": False,
    "share_relative_bias": True,
    "global_layers": "none",
    "scale_embeddings": False,
}


def encoder(**overrides) -> SpadeEncoderModel:
    return tiny_model("spade", "AutoModelForTextEncoding", **overrides)


def papers_mixer(**overrides):
    """A global layer's mixer that joins its branches as in the paper."""
    return first_mixer(encoder(combine_mode="concat", **overrides))


def first_mixer(model):
    return model.get_encoder().layers[0].mixer if hasattr(model, "lm_head") else model.encoder.layers[0].mixer


# T5 is a special case ---------------------------------------------------------------------------------------------


def t5_weights_as_spade(t5: T5ForConditionalGeneration) -> dict[str, torch.Tensor]:
    """A T5 checkpoint under SPADE's names."""
    attention = {"q": "q_proj", "k": "k_proj", "v": "v_proj", "o": "o_proj"}
    weights = {"model.encoder.embed_tokens.weight": t5.shared.weight, "lm_head.weight": t5.lm_head.weight}
    for side, stack in (("encoder", t5.encoder), ("decoder", t5.decoder)):
        root = f"model.{side}"
        weights[f"{root}.final_norm.weight"] = stack.final_layer_norm.weight
        bias = stack.block[0].layer[0].SelfAttention.relative_attention_bias.weight
        weights[f"{root}.relative_attention_bias.weight"] = bias
        for index, block in enumerate(stack.block):
            layer = f"{root}.layers.{index}"
            sublayers = [("mixer.attention", "mixer_norm", block.layer[0].layer_norm, block.layer[0].SelfAttention)]
            if side == "decoder":
                cross = block.layer[1]
                sublayers.append(("cross_attention", "cross_attention_norm", cross.layer_norm, cross.EncDecAttention))
            for name, norm_name, norm, module in sublayers:
                weights[f"{layer}.{norm_name}.weight"] = norm.weight
                for theirs, ours in attention.items():
                    weights[f"{layer}.{name}.{ours}.weight"] = getattr(module, theirs).weight
            feed_forward = block.layer[-1].DenseReluDense
            weights[f"{layer}.feed_forward_norm.weight"] = block.layer[-1].layer_norm.weight
            weights[f"{layer}.feed_forward.down_proj.weight"] = feed_forward.wo.weight
            if hasattr(feed_forward, "wi"):
                weights[f"{layer}.feed_forward.up_proj.weight"] = feed_forward.wi.weight
            else:
                weights[f"{layer}.feed_forward.gate_proj.weight"] = feed_forward.wi_0.weight
                weights[f"{layer}.feed_forward.up_proj.weight"] = feed_forward.wi_1.weight
    return weights


@pytest.mark.parametrize("feed_forward", ["relu", "gated-gelu"])
@pytest.mark.parametrize("attention_type", ["full", "window", "chunk"])
def test_t5_is_a_special_case(feed_forward, attention_type):
    """With T5's layer chosen and nothing out of reach, logits equal transformers' T5.

    Gated as in T5 v1.1, which also has a head of its own and does not scale its input; otherwise as in the first T5.
    """
    torch.manual_seed(0)
    v1_1 = feed_forward == "gated-gelu"
    t5 = T5ForConditionalGeneration(
        T5Config(
            vocab_size=64,
            d_model=32,
            d_kv=16,
            d_ff=48,
            num_layers=3,
            num_heads=2,
            feed_forward_proj=feed_forward,
            tie_word_embeddings=not v1_1,
            decoder_start_token_id=0,
        )
    ).eval()
    if v1_1:  # transformers ties it until weights that differ are loaded
        t5.lm_head.weight = nn.Parameter(torch.randn(64, 32))
    config = tiny_config(
        "spade",
        **T5_AS_SPADE,
        num_hidden_layers=3,
        gated_feed_forward=v1_1,
        hidden_act="gelu_new" if v1_1 else "relu",
        tie_word_embeddings=not v1_1,
        attention_type=attention_type,
        local_radius=39,
        chunk_size=40,
        scale_decoder_outputs=not v1_1,
    )
    spade = SpadeForConditionalGeneration(config).eval()
    missing, unexpected = spade.load_state_dict(t5_weights_as_spade(t5), strict=False)
    assert not missing
    assert not unexpected
    inputs = tiny_inputs(spade, length=40, target_length=30)
    inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
    inputs["attention_mask"][0, -9:] = 0
    assert_close(spade(**inputs).logits, t5(**inputs).logits, "float32 model")


@pytest.mark.parametrize("bidirectional", [True, False])
def test_buckets_are_t5s(bidirectional):
    from transformers.models.t5.modeling_t5 import T5Attention

    offsets = torch.arange(-3000, 3001)
    for num_buckets, max_distance in ((32, 128), (16, 20), (64, 1000)):
        expected = T5Attention._relative_position_bucket(offsets, bidirectional, num_buckets, max_distance)
        actual = relative_position_bucket(
            offsets, bidirectional=bidirectional, num_buckets=num_buckets, max_distance=max_distance
        )
        assert torch.equal(actual, expected)


# counts --------------------------------------------------------------------------------------------------------------


def body_parameters(config: SpadeConfig) -> int:
    """Numbers stored outside token and position tables and the language modelling head, frozen ones included."""
    with torch.device("meta"):
        model = SpadeModel(config)
    tables = ("embed_tokens", "embed_positions")
    return sum(t.numel() for name, t in model.state_dict().items() if not any(table in name for table in tables))


def test_the_published_layout_has_the_published_size():
    layout = {"combine_mode": "concat", "decoder_position": "learned_absolute", "ssm_num_copies": 768}
    assert body_parameters(SpadeConfig.from_preset("base", **layout)) == 199_803_648
    # one copy of (A, B) that all channels share, and one causal bias table instead of positions
    saved = 767 * 3 * 2 * 32
    assert body_parameters(SpadeConfig(combine_mode="concat")) == 199_803_648 - saved + 384


@pytest.mark.parametrize(("name", "layers", "width"), [("base", 12, 768), ("small", 6, 512), ("tiny", 4, 256)])
def test_presets_share_one_shape(name, layers, width):
    config = SpadeConfig.from_preset(name)
    assert (config.num_hidden_layers, config.num_decoder_layers, config.hidden_size) == (layers, layers, width)
    assert (config.head_dim, config.intermediate_size) == (64, 4 * width)
    assert config.global_layers == [0]
    d, f = width, 4 * width
    norm, attention, feed_forward = 2 * d, 4 * d * d, 2 * d * f + f + d
    s4 = 2 * 2 * d * 32 + 3 * 2 * 32 + 2 * d
    table = 32 * config.num_attention_heads
    encoder = layers * (attention + feed_forward + 2 * norm + table) + norm
    decoder = layers * (2 * attention + feed_forward + 3 * norm) + norm + table
    assert body_parameters(config) == encoder + decoder + d * d + norm + s4


def test_preset_overrides_and_unknown_names():
    assert SpadeConfig.from_preset("tiny", num_hidden_layers=2).num_decoder_layers == 2
    with pytest.raises(
        ValueError, match=r"preset must be one of base, small, tiny, wikitext103; got 'bsae'\. Did you mean 'base'\?"
    ):
        SpadeConfig.from_preset("bsae")


# the global layer ----------------------------------------------------------------------------------------------------


def test_global_layer_is_the_papers_equation():
    """Y = FFN(LN(Xa)) + Xa with Xa = W [LN(Local(LN(X))), LN(SSM(LN(X)))] + X, written out (section 3.2)."""
    model = encoder(norm_position="pre", combine_mode="concat")
    layer, x = model.encoder.layers[0], torch.randn(2, 13, 32)
    mixer = layer.mixer
    normed = layer.mixer_norm(x)
    local = mixer.attention(normed, model.encoder.relative_attention_bias)[0]
    pair = torch.cat([mixer.local_norm(local), mixer.global_norm(mixer.ssm(normed))], -1)
    mixed = pair @ mixer.aggregate.weight.T + mixer.aggregate.bias + x
    feed_forward = layer.feed_forward
    hidden = torch.relu(feed_forward.up_proj(layer.feed_forward_norm(mixed)))
    expected = feed_forward.down_proj(hidden) + mixed
    assert_close(layer(x), expected, "float32 model")


def test_post_norm_layer_normalises_the_sum():
    layer, x = encoder().encoder.layers[1], torch.randn(2, 9, 32)
    mixed = layer.mixer_norm(x + layer.mixer.attention(x)[0])
    expected = layer.feed_forward_norm(mixed + layer.feed_forward(mixed))
    assert_close(layer(x), expected, "float32 model")


@pytest.mark.parametrize("half", ["local", "global"])
def test_zeroing_half_of_the_aggregate_leaves_the_other_branch(half):
    mixer, x = papers_mixer(), torch.randn(2, 13, 32)
    with torch.no_grad():
        mixer.aggregate.weight[:, slice(32, None) if half == "local" else slice(0, 32)] = 0
    local = mixer.local_norm(mixer.attention(x)[0])
    alone = local if half == "local" else mixer.global_norm(mixer.ssm(x))
    part = mixer.aggregate.weight[:, slice(0, 32) if half == "local" else slice(32, None)]
    assert_close(mixer(x, None, None, bias_table=None), alone @ part.T + mixer.aggregate.bias, "float32 model")


def test_concat_order_permutes_columns():
    ours, theirs = papers_mixer(), papers_mixer(concat_order="global_local")
    state = ours.state_dict()
    state["aggregate.weight"] = state["aggregate.weight"].roll(32, dims=1)
    theirs.load_state_dict(state)
    x = torch.randn(2, 13, 32)
    assert_close(theirs(x, None, None, bias_table=None), ours(x, None, None, bias_table=None), "float32 model")


@pytest.mark.parametrize("alpha", [0, 0.25, 1])
def test_add_weighs_the_branches(alpha):
    mixer, x = first_mixer(encoder(combine_mode="add", combine_alpha=alpha)), torch.randn(2, 13, 32)
    local, glob = mixer.local_norm(mixer.attention(x)[0]), mixer.global_norm(mixer.ssm(x))
    assert_close(mixer(x, None, None, bias_table=None), (1 - alpha) * local + alpha * glob, "float32")


def test_stack_attends_to_the_state_space_model():
    mixer, x = first_mixer(encoder(combine_mode="stack")), torch.randn(2, 13, 32)
    assert_close(mixer(x, None, None, bias_table=None), mixer.attention(mixer.ssm(x))[0], "exact")
    assert not hasattr(mixer, "aggregate")


def test_residual_starts_as_local_attention_and_adds_the_mapped_branch():
    model = SpadeEncoderModel(tiny_config("spade", combine_mode="residual")).eval()
    mixer, x = first_mixer(model), torch.randn(2, 13, 32)
    local = mixer.attention(x)[0]
    assert_close(mixer(x, None, None, bias_table=None), local, "exact")
    nn.init.normal_(mixer.global_proj.weight)
    mapped = mixer.global_norm(mixer.ssm(x)) @ mixer.global_proj.weight.T
    assert_close(mixer(x, None, None, bias_table=None), local + mapped, "float32")
    assert mixer.global_proj.bias is None
    assert not hasattr(mixer, "local_norm")


@pytest.mark.parametrize(
    ("choice", "layers"),
    [("none", []), ("all", [0, 1, 2, 3]), ("bottom", [0]), ("bottom-2", [0, 1]), ("top", [3]), ("top-3", [1, 2, 3])],
)
def test_choice_of_global_layers(choice, layers):
    model = encoder(num_hidden_layers=4, global_layers=choice)
    assert model.config.global_layers == layers
    assert [i for i, layer in enumerate(model.encoder.layers) if layer.mixer.ssm is not None] == layers


def test_only_the_global_layer_sees_far():
    """Without it, position t depends on nothing that is more than layers * radius tokens away."""
    for choice, reaches in (("none", False), ("bottom", True)):
        model = encoder(global_layers=choice)
        ids = tiny_inputs(model, batch=1, length=40)["input_ids"]
        changed = ids.clone()
        changed[0, 0] = (ids[0, 0] + 1) % 60 + 2
        difference = (model(ids).last_hidden_state - model(changed).last_hidden_state).abs().amax(-1)[0]
        assert difference[: 2 * 4 + 1].max() > 1e-3
        beyond = difference[2 * 4 + 1 :].max()
        assert beyond > 1e-6 if reaches else beyond == 0


@pytest.mark.parametrize("freeze", ["all", "ab_dt", "none"])
def test_freezing(freeze):
    model = encoder(ssm_freeze=freeze)
    before = {name: tensor.clone() for name, tensor in first_mixer(model).ssm.state_dict().items()}
    trained = {name for name, p in first_mixer(model).ssm.named_parameters() if p.requires_grad}
    expected = {
        "all": set(),
        "ab_dt": {"C", "D"},
        "none": {"C", "D", "B", "P", "log_A_real", "A_imag", "log_dt"},
    }
    assert trained == expected[freeze]
    assert {id(p) for p in model.ssm_parameters()} <= {id(p) for p in first_mixer(model).ssm.parameters()}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    model(**tiny_inputs(model)).last_hidden_state.square().mean().backward()
    optimizer.step()
    for name, tensor in first_mixer(model).ssm.state_dict().items():
        assert torch.equal(tensor, before[name]) == (name not in expected[freeze]), name


def test_a_frozen_checkpoint_can_be_thawed(tmp_path):
    model = tiny_model("spade", "AutoModelForSeq2SeqLM", ssm_freeze="all")
    model.save_pretrained(tmp_path)
    thawed = transformers.AutoModelForSeq2SeqLM.from_pretrained(tmp_path, ssm_freeze="none").eval()
    assert list(thawed.ssm_parameters())
    inputs = tiny_inputs(model)
    assert_close(thawed(**inputs).logits, model(**inputs).logits, "float32 model")


@pytest.mark.parametrize("stop", [True, False])
def test_gradient_through_the_global_branch(stop):
    mixer = papers_mixer(ssm_stop_gradient=stop)
    with torch.no_grad():
        mixer.aggregate.weight[:, :32] = 0
    x = torch.randn(1, 9, 32, requires_grad=True)
    mixer(x, None, None, bias_table=None).square().sum().backward()
    assert (x.grad.abs().max() == 0) == stop


def test_state_space_model_keeps_its_precision():
    model = encoder().to(torch.bfloat16)
    assert {t.dtype for t in first_mixer(model).ssm.state_dict().values()} == {torch.float32}
    assert first_mixer(model).global_proj.weight.dtype == torch.bfloat16


def test_relative_biases_begin_with_what_is_near():
    """ALiBi's slopes, 2^-4 and 2^-8 for two heads, the same in both directions; see `test_bst` for one direction."""
    model = encoder(num_attention_heads=2, share_relative_bias=True)
    table = model.encoder.relative_attention_bias
    offsets = torch.arange(-8, 9)
    expected = -offsets.abs() * torch.tensor([[2.0**-4], [2.0**-8]])
    assert_close(table(offsets), expected, "exact")
    assert (table(torch.tensor([-500, 500])) < table(torch.tensor([-60, 60]))).all()


# other options -------------------------------------------------------------------------------------------------------

OPTIONS = [
    {"norm_position": "pre"},
    {"norm_position": "pre", "final_norm": False},
    {"embedding_norm": False},
    {"norm_type": "rms_norm"},
    {"relative_attention_init": "normal"},
    {"feed_forward_bias": False, "gated_feed_forward": True, "hidden_act": "gelu_new"},
    {"scale_attention": False, "attention_bias": True},
    {"attention_type": "chunk"},
    {"attention_type": "full", "share_relative_bias": True},
    {"decoder_attention_type": "window", "decoder_global_layers": "all", "decoder_position": "learned_absolute"},
    {"ssm_postact": "gelu_glu", "ssm_use_D": False, "ssm_l_max": 5, "ssm_freeze": "none"},
    {"head_dim": 10},
    {"num_decoder_layers": 1},
    {"combine_mode": "add", "decoder_global_layers": "all"},
    {"combine_mode": "stack", "decoder_global_layers": "all"},
    {"combine_mode": "residual", "decoder_global_layers": "all"},
    {"decoder_share_relative_bias": False},
    {"norm_type": "scale_norm"},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_every_option_trains_saves_and_loads(options, tmp_path):
    model = tiny_model("spade", "AutoModelForSeq2SeqLM", **options).train()
    labels = torch.randint(2, 64, (2, 7))
    model(input_ids=tiny_inputs(model)["input_ids"], labels=labels).loss.backward()
    assert all(torch.isfinite(p.grad).all() for p in model.parameters() if p.grad is not None)
    with torch.autocast("cpu", torch.bfloat16):
        model(input_ids=tiny_inputs(model)["input_ids"], labels=labels).loss.backward()
    assert all(torch.isfinite(p.grad).all() for p in model.parameters() if p.grad is not None)
    model.eval().save_pretrained(tmp_path)
    loaded = transformers.AutoModelForSeq2SeqLM.from_pretrained(tmp_path).eval()
    inputs = tiny_inputs(model)
    assert_close(loaded(**inputs).logits, model(**inputs).logits, "exact")


def test_encoder_loads_from_an_encoder_decoder_checkpoint(tmp_path):
    model = tiny_model("spade", "AutoModelForSeq2SeqLM")
    model.save_pretrained(tmp_path)
    loaded, info = SpadeEncoderModel.from_pretrained(tmp_path, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    ids = tiny_inputs(model)["input_ids"]
    expected = model.get_encoder()(ids).last_hidden_state
    assert_close(loaded.eval()(ids).last_hidden_state, expected, "exact")


def test_there_is_one_embedding_and_the_head_may_be_tied_to_it():
    model = tiny_model("spade", "AutoModelForSeq2SeqLM")
    assert model.lm_head.weight is model.model.encoder.embed_tokens.weight
    untied = tiny_model("spade", "AutoModelForSeq2SeqLM", tie_word_embeddings=False)
    assert untied.lm_head.weight is not untied.model.encoder.embed_tokens.weight
    tables = [m for m in untied.modules() if isinstance(m, nn.Embedding) and m.num_embeddings == 64]
    assert tables == [untied.get_input_embeddings()]


@pytest.mark.parametrize("scale", [True, False])
def test_scores_begin_small_whether_scaled_or_not(scale):
    """Those of self-attention as K^-1/2, so that biases decide at first, those of cross-attention as 1."""
    model = tiny_model("spade", "AutoModel", scale_attention=scale, head_dim=64, initializer_range=0.02)
    queries = {name: weight for name, weight in model.named_parameters() if "q_proj" in name}
    assert len(queries) == 2 + 2 * 2
    for name, weight in queries.items():
        expected = 0.02 * (1 if scale else 1 / 8) * (1 if "cross" in name else 1 / 8)
        assert weight.std().item() == pytest.approx(expected, rel=0.1), name


def test_starting_values_follow_from_the_width():
    """Embeddings and what is added to them begin with one size; W, behind two norms, as torch draws it."""
    for given, std in ((None, 1 / 8), (0.01, 0.01)):
        model = encoder(hidden_size=64, initializer_range=given, norm_position="pre")
        assert (model.config.initializer_range, model.config.scale_embeddings) == (std, True)
        embedded = model.get_input_embeddings()(torch.arange(64))
        assert embedded.std().item() == pytest.approx(8 * std, rel=0.05)
        assert model.encoder.layers[0].feed_forward.up_proj.weight.std().item() == pytest.approx(std, rel=0.05)
        plain = nn.Linear(128, 64).weight.std().item()
        concatenating = papers_mixer(hidden_size=64, initializer_range=given, norm_position="pre")
        assert concatenating.aggregate.weight.std().item() == pytest.approx(plain, rel=0.05)
    assert not tiny_config("spade").scale_embeddings  # a norm follows them


@pytest.mark.parametrize(
    "roles", [{}, {"is_encoder_decoder": False}, {"is_encoder_decoder": False, "is_decoder": True}]
)
def test_post_norm_encoders_and_their_decoders_start_with_smaller_weights(roles):
    for width, norm in ((64, "post"), (64, "pre"), (192, "post")):
        config = SpadeConfig(hidden_size=width, num_attention_heads=2, norm_position=norm, **roles)
        smaller = norm == "post" and not config.is_decoder
        assert config.initializer_range == (0.4**0.5 if smaller else 1.0) * width**-0.5


def test_decoder_layers_share_a_bias_table_unless_told_otherwise():
    for shared in (True, False):
        model = tiny_model("spade", "AutoModel", decoder_share_relative_bias=shared)
        tables = [name for name, _ in model.decoder.named_parameters() if "relative_attention_bias" in name]
        assert len(tables) == (1 if shared else 2)


def test_padding_and_start_have_a_trained_embedding():
    """The decoder starts with the padding token: behind a norm, a row of zeros would have gradients of size 1/eps."""
    model = tiny_model("spade", "AutoModelForSeq2SeqLM").train()
    table = model.get_input_embeddings().weight
    assert table[model.config.pad_token_id].norm() > 0.5 * table.norm(dim=-1).mean()
    model(**tiny_inputs(model), labels=torch.randint(2, 64, (2, 7))).loss.backward()
    assert 0 < table.grad[model.config.pad_token_id].norm() < 10 * table.grad.norm(dim=-1).max()


def test_a_decoders_cache_alone_is_enough():
    model = tiny_model("spade", "AutoModelForSeq2SeqLM")
    inputs = tiny_inputs(model)
    outputs = model(**inputs, past_key_values=DynamicCache())
    assert_close(outputs.logits, model(**inputs).logits, "exact")
    assert outputs.past_key_values.get_seq_length() == inputs["decoder_input_ids"].shape[1]


@pytest.mark.parametrize("given", [{}, {"decoder_input_ids": True, "decoder_inputs_embeds": True}])
def test_the_decoder_needs_ids_or_embeddings(given):
    model = tiny_model("spade", "AutoModel")
    inputs = tiny_inputs(model)
    values = {"decoder_input_ids": inputs["decoder_input_ids"], "decoder_inputs_embeds": torch.zeros(2, 7, 32)}
    with pytest.raises(ValueError, match="exactly one of decoder_input_ids and decoder_inputs_embeds"):
        model(input_ids=inputs["input_ids"], **{name: values[name] for name in given})


def test_labels_are_shifted_behind_the_start_token():
    model = tiny_model("spade", "AutoModelForSeq2SeqLM", decoder_start_token_id=3)
    shifted = model.prepare_decoder_input_ids_from_labels(torch.tensor([[5, 6, -100, -100]]))
    assert shifted.tolist() == [[3, 5, 6, 0]]


def test_four_dimensional_masks_are_accepted():
    model = encoder(global_layers="none")
    ids = tiny_inputs(model, length=9)["input_ids"]
    mask = torch.ones(2, 9, dtype=torch.long)
    mask[0, 6:] = 0
    pairs = mask.bool()[:, None, None, :].expand(2, 1, 9, 9)
    expected, actual = model(ids, attention_mask=mask), model(ids, attention_mask=pairs)
    assert_close(actual.last_hidden_state[0, :6], expected.last_hidden_state[0, :6], "float32 model")
    with pytest.raises(ValueError, match="attention_mask must be of shape"):
        encoder()(ids, attention_mask=pairs)


def test_four_dimensional_masks_of_an_encoder_decoder():
    model = tiny_model("spade", "AutoModelForSeq2SeqLM", global_layers="none")
    inputs = tiny_inputs(model, length=9, target_length=5)
    mask = torch.ones(2, 9, dtype=torch.long)
    mask[0, 6:] = 0
    expected = model(**inputs, attention_mask=mask).logits
    kept = mask.bool()[:, None, None, :]
    added = torch.zeros(kept.shape).masked_fill(~kept, torch.finfo(torch.float32).min)
    for given in (kept, added):
        assert_close(model(**inputs, attention_mask=given).logits, expected, "float32 model")
    with pytest.raises(ValueError, match=r"attention_mask must be of shape .* with a decoder.*got \(2, 1, 9, 9\)"):
        model(**inputs, attention_mask=kept.expand(2, 1, 9, 9))


def test_a_documents_mask_of_another_shape_is_refused_whatever_it_keeps():
    model = tiny_model("spade", "AutoModelForSeq2SeqLM")
    inputs = tiny_inputs(model, length=9, target_length=5)
    source = inputs.pop("input_ids")
    encoded = {"encoder_outputs": model.get_encoder()(source)}
    for tokens in (inputs["decoder_input_ids"], inputs["decoder_input_ids"][:, :1]):
        for shape in ((2, 8), (1, 9)):
            for first in (1, 0):
                mask = torch.ones(shape, dtype=torch.long)
                mask[:, 0] = first
                message = (
                    rf"attention_mask must be .* = \(2, 9\), like the encoder's output; got \({shape[0]}, {shape[1]}\)"
                )
                with pytest.raises(ValueError, match=message):
                    model(**encoded, decoder_input_ids=tokens, attention_mask=mask)


@pytest.mark.parametrize(
    ("field", "value", "rule"),
    [
        ("attention_type", "windwo", "attention_type must be one of window, chunk, full, none; got 'windwo'"),
        ("norm_position", "per", "norm_position must be one of post, pre; got 'per'"),
        ("num_hidden_layers", 1, "global_layers must list distinct layers between 0 and 0"),
    ],
)
def test_fields_set_on_loading_are_checked(field, value, rule, tmp_path):
    tiny_model("spade", "AutoModelForSeq2SeqLM", global_layers=[1]).save_pretrained(tmp_path)
    with pytest.raises(Exception, match=rule):
        SpadeForConditionalGeneration.from_pretrained(tmp_path, **{field: value})


def test_layers_may_be_named_on_loading(tmp_path):
    tiny_model("spade", "AutoModelForSeq2SeqLM", global_layers="none").save_pretrained(tmp_path)
    model = SpadeForConditionalGeneration.from_pretrained(tmp_path, global_layers="all")
    assert model.config.global_layers == [0, 1]
    assert all(layer.mixer.ssm is not None for layer in model.get_encoder().layers)


@pytest.mark.parametrize("scaled", [True, False])
def test_absolute_positions_begin_as_large_as_embeddings(scaled):
    sizes = {"hidden_size": 64, "num_attention_heads": 2, "scale_embeddings": scaled}
    model = tiny_model("spade", "AutoModel", decoder_position="learned_absolute", **sizes)
    tokens, positions = model.encoder.embed_tokens.weight.std(), model.decoder.embed_positions.weight.std()
    assert 0.9 < positions / tokens / (8.0 if scaled else 1.0) < 1.1


def test_absolute_positions_end():
    model = tiny_model("spade", "AutoModel", decoder_position="learned_absolute", max_decoder_position_embeddings=6)
    model(**tiny_inputs(model, target_length=6))
    with pytest.raises(ValueError, match="max_decoder_position_embeddings 6"):
        model(**tiny_inputs(model, target_length=7))


def test_local_layers_read_the_beginning_of_a_long_document_like_that_of_a_short_one():
    model = encoder(global_layers="none", num_hidden_layers=1)
    ids = tiny_inputs(model, batch=1, length=2000)["input_ids"]
    assert_close(
        model(ids).last_hidden_state[:, :100], model(ids[:, :200]).last_hidden_state[:, :100], "float32 model"
    )


def test_state_space_model_at_five_thousand_tokens_is_the_recurrence_from_both_ends():
    ssm = first_mixer(encoder().double()).ssm
    u = torch.randn(1, 5000, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    C, B, P = (torch.view_as_complex(x) for x in (ssm.C, ssm.B[0], ssm.P[0]))
    w, dt = torch.complex(-ssm.log_A_real.exp(), ssm.A_imag), ssm.log_dt.exp()
    forward = s4_scan(u, C[:1], B, P, w, dt)[0][:, 0]
    backward = s4_scan(u.flip(1), C[1:], B, P, w, dt)[0][:, 0].flip(1)
    expected = forward + nn.functional.pad(backward[:, 1:], (0, 0, 0, 1)) + ssm.D * u  # the future starts at t + 1
    assert_close(ssm(u), expected, "float64")


def test_a_short_document_beside_a_very_long_one_is_read_as_if_alone():
    model = encoder()
    ids = tiny_inputs(model, length=2500)["input_ids"]
    mask = torch.ones_like(ids)
    mask[0, 700:] = 0
    together = model(ids, attention_mask=mask).last_hidden_state
    assert_close(together[:1, :700], model(ids[:1, :700]).last_hidden_state, "float32 model")
    assert_close(together[1:], model(ids[1:]).last_hidden_state, "float32 model")


# bad configs ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("field", "value", "rule"),
    [
        ("hidden_size", 0, "hidden_size must be a positive integer; got 0"),
        ("hidden_size", 33, "hidden_size must be a multiple of num_attention_heads"),
        ("num_attention_heads", 0, "num_attention_heads must be a positive integer; got 0"),
        ("num_hidden_layers", 0, "num_hidden_layers must be a positive integer; got 0"),
        ("local_radius", -1, "local_radius must not be negative; got -1"),
        ("chunk_size", 0, "chunk_size must be a positive integer; got 0"),
        ("ssm_state_size", 7, "ssm_state_size must be even; got 7"),
        ("ssm_num_copies", 5, "ssm_num_copies must divide hidden_size; got 5"),
        ("ssm_dt_min", 1.0, "ssm_dt_max must be at least ssm_dt_min"),
        ("ssm_dt_min", 0.0, "ssm_dt_min must be positive"),
        ("dropout", 1.0, r"dropout must lie in \[0, 1\); got 1.0"),
        ("combine_alpha", 1.5, r"combine_alpha must lie in \[0, 1\]; got 1.5"),
        ("attention_type", "windows", "attention_type must be one of window, chunk, full, none; got 'windows'"),
        ("norm_position", "mid", "norm_position must be one of post, pre; got 'mid'"),
        ("ssm_type", "s7", "ssm_type must be one of s4, s4d, s5, hyena, lstm; got 's7'"),
        ("ssm_postact", "glu", "ssm_postact must be one of None, gelu_glu; got 'glu'"),
        (
            "hidden_act",
            "rely",
            r"hidden_act must name an activation of transformers; got 'rely'\. Did you mean 'relu'",
        ),
        ("global_layers", [0, 2], "global_layers must list distinct layers between 0 and 1"),
        ("global_layers", [0, 0], "global_layers must list distinct layers"),
        ("global_layers", "middle", "global_layers must be a list of layer indices or one of none"),
        ("global_layers", "bottom-3", "global_layers must select at most 2 layers"),
        ("decoder_global_layers", [-1], "decoder_global_layers must list distinct layers"),
        ("relative_attention_num_buckets", 3, "relative_attention_num_buckets must be even and at least 4"),
        ("relative_attention_max_distance", 16, "relative_attention_max_distance must exceed half"),
        ("local_radius", "wide", "local_radius"),
        ("dropout", "much", "dropout"),
        ("initializer_range", float("inf"), "initializer_range must be positive and finite; got inf"),
        ("ssm_dt_max", float("nan"), "ssm_dt_max must be positive and finite; got nan"),
        ("pad_token_id", -1, "pad_token_id must lie in the vocabulary.*got -1 and vocab_size 64"),
        ("eos_token_id", [1, 64], r"eos_token_id must lie in the vocabulary.*got \[1, 64\] and vocab_size 64"),
        ("decoder_start_token_id", 64, "decoder_start_token_id must lie in the vocabulary"),
    ],
)
def test_bad_config_values_are_named(field, value, rule):
    with pytest.raises(Exception, match=rule):
        tiny_config("spade", **{field: value})


@pytest.mark.parametrize("roles", [{}, {"is_encoder_decoder": False, "is_decoder": True}])
def test_batch_norm_is_for_encoders_alone(roles):
    with pytest.raises(
        Exception, match="norm_type must not use batch normalisation in a causal model or beside a decoder"
    ):
        tiny_config("spade", norm_type="batch_norm", **roles)


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("norm_position", ["pre", "post"])
@pytest.mark.parametrize("combine_mode", ["concat", "residual", "stack"])
def test_padding_does_not_reach_batch_norms(combine_mode, norm_position, training):
    fields = {"combine_mode": combine_mode, "norm_position": norm_position, "dropout": 0.0, "attention_dropout": 0.0}
    x = torch.randn(2, 9, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    mask = torch.ones(2, 13, dtype=torch.long)
    mask[:, 9:] = 0
    found = []
    for inputs, kept in ((x, None), (nn.functional.pad(x, (0, 0, 0, 4), value=5.0), mask)):
        model = encoder(norm_type="batch_norm", is_encoder_decoder=False, **fields).double().train(training)
        outputs = model(inputs_embeds=inputs, attention_mask=kept)[0][:, :9]
        found.append((outputs, {name: value for name, value in model.named_buffers() if "running" in name}))
    assert_close(found[1][0], found[0][0], "float64 gradient")
    assert found[0][1]
    for name, value in found[0][1].items():
        assert_close(found[1][1][name], value, "float64")


def test_batch_norm_refuses_a_mask_of_pairs():
    model = encoder(norm_type="batch_norm", is_encoder_decoder=False, global_layers="none").train()
    with pytest.raises(ValueError, match=r"attention_mask must be of shape \(batch, length\), \(1, 5\), for batch"):
        model(inputs_embeds=torch.randn(1, 5, 32), attention_mask=torch.ones(1, 1, 5, 5, dtype=torch.bool))


def test_a_decoders_memory_cannot_be_cut():
    with pytest.raises(
        Exception, match=r"ssm_l_max must be None where a decoder has decoder_global_layers.*got 8 and"
    ):
        tiny_config("spade", ssm_l_max=8, decoder_global_layers=[0])
    assert tiny_config("spade", ssm_l_max=8).ssm_l_max == 8


def test_whole_numbers_serve_for_real_ones():
    config = tiny_config("spade", initializer_range=1, ssm_dt_max=1, layer_norm_eps=1, dropout=0)
    assert (config.initializer_range, config.ssm_dt_max) == (1, 1)


def test_models_refuse_what_they_cannot_be():
    with pytest.raises(ValueError, match="is_encoder_decoder must be True for SpadeModel"):
        SpadeModel(tiny_config("spade", is_encoder_decoder=False))
    with pytest.raises(ValueError, match="input_ids or inputs_embeds must be given"):
        encoder()()
    model = tiny_model("spade", "AutoModelForSeq2SeqLM", decoder_start_token_id=None)
    with pytest.raises(ValueError, match="decoder_start_token_id must be set"):
        model(input_ids=torch.tensor([[2, 3]]), labels=torch.tensor([[2, 3]]))


@pytest.mark.parametrize(
    ("in_encoder", "in_decoder"),
    [([0], []), ([], []), ([1, 2], []), ([], [0]), ([0, 2], [1]), ([2], [1]), ([0, 1, 2], [0, 1])],
)
def test_s4_is_exactly_where_the_config_says(in_encoder, in_decoder):
    layers = {"num_hidden_layers": 3, "global_layers": in_encoder}
    decoder_layers = {"num_decoder_layers": 2, "decoder_global_layers": in_decoder}
    both_ways = {f"encoder.layers.{index}.mixer.ssm": True for index in in_encoder}
    causal = {f"decoder.layers.{index}.mixer.ssm": False for index in in_decoder}
    for auto_class, expected in (("AutoModel", both_ways | causal), ("AutoModelForTextEncoding", both_ways)):
        model = tiny_model("spade", auto_class, **layers, **decoder_layers)
        assert {name: m.bidirectional for name, m in model.named_modules() if isinstance(m, S4)} == expected
