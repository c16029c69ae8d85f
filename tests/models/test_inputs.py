"""Sequences of real values, and pairs of sequences: what CHELA and SPADE read besides the tokens of one text."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from hf_hybrid import (
    ChelaForCausalLM,
    ChelaForMaskedLM,
    ChelaForSequenceClassification,
    ChelaForSequencePairClassification,
    ChelaModel,
    SpadeEncoderModel,
    SpadeForCausalLM,
    SpadeForMaskedLM,
    SpadeForSequenceClassification,
    SpadeForSequencePairClassification,
    SpadeModel,
)

from ..tolerances import assert_close
from .tiny import tiny_config

BODIES = {"chela": ChelaModel, "spade": SpadeEncoderModel}
CLASSIFIERS = {"chela": ChelaForSequenceClassification, "spade": SpadeForSequenceClassification}
PAIRS = {"chela": ChelaForSequencePairClassification, "spade": SpadeForSequencePairClassification}
IDS = torch.zeros(1, 3).long()
BOTH = pytest.mark.parametrize("model_type", BODIES)


def build(model_class, **options):
    torch.manual_seed(0)
    return model_class(tiny_config(model_class.config_class.model_type, **options)).eval()


def embedding(model):
    return getattr(model, "encoder", model)


# ---- real values ----


@BOTH
def test_real_values_come_with_one_number_per_position_or_several(model_type):
    one = build(BODIES[model_type], input_size=1)
    assert one.main_input_name == "input_values"
    values = torch.randn(2, 9)
    with torch.no_grad():
        read = one(input_values=values)[0]
        assert_close(one(input_values=values[..., None])[0], read, "exact")
        project = embedding(one).input_proj
        embeddings = values[..., None] @ project.weight.T + project.bias
        assert_close(one(inputs_embeds=embeddings)[0], read, "float32 model")
        three = build(BODIES[model_type], input_size=3)
        assert three(input_values=torch.randn(2, 9, 3))[0].shape == (2, 9, 32)
    with pytest.raises(ValueError, match=r"input_values must be \(B, T, 3\); got \(2, 9, 1\)"):
        three(input_values=values)


@BOTH
@pytest.mark.parametrize(
    ("input_size", "inputs", "message"),
    [
        (None, {}, "input_ids or inputs_embeds must be given"),
        (None, {"input_values": torch.zeros(1, 3)}, "and no input_values, for a model with input_size None"),
        (1, {"input_ids": IDS}, "input_values or inputs_embeds must be given"),
        (1, {"input_values": torch.zeros(1, 0)}, "input_values must hold at least one token"),
        (
            None,
            {"input_ids": IDS, "inputs_embeds": torch.zeros(1, 3, 32)},
            "exactly one of input_ids, input_values and inputs_embeds must be given",
        ),
    ],
)
def test_inputs_of_the_wrong_kind_are_refused(model_type, input_size, inputs, message):
    with pytest.raises(ValueError, match=message):
        build(BODIES[model_type], input_size=input_size)(**inputs)


@BOTH
def test_a_classifier_of_real_values_is_saved_and_loaded_and_ignores_padding(model_type, tmp_path):
    model = build(CLASSIFIERS[model_type], input_size=1)
    values, mask = torch.randn(2, 12), torch.ones(2, 12)
    mask[:, 8:] = 0
    model.save_pretrained(tmp_path)
    loaded, info = CLASSIFIERS[model_type].from_pretrained(tmp_path, output_loading_info=True)
    assert not info["missing_keys"]
    with torch.no_grad():
        logits = model(input_values=values[:, :8]).logits
        assert_close(loaded(input_values=values, attention_mask=mask).logits, logits, "float32 model")


@BOTH
def test_a_classifier_of_real_values_learns_eight_samples(model_type):
    model = build(CLASSIFIERS[model_type], input_size=1, dropout=0.0, num_labels=2).train()
    labels = torch.tensor([0, 1] * 4)
    values = torch.randn(8, 12)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(60):
        loss = model(input_values=values, labels=labels).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert loss < 0.1


@pytest.mark.parametrize(
    "model_class", [ChelaForCausalLM, ChelaForMaskedLM, SpadeForCausalLM, SpadeForMaskedLM, SpadeModel]
)
def test_what_writes_tokens_reads_tokens(model_class):
    role = {"is_decoder": True, "is_encoder_decoder": False} if model_class is SpadeForCausalLM else {}
    with pytest.raises(ValueError, match=f"input_size must be None for {model_class.__name__}; got 1"):
        build(model_class, input_size=1, **role)


@BOTH
def test_a_vocabulary_that_is_not_there_is_not_resized(model_type):
    with pytest.raises(ValueError, match="input_size must be None to resize the vocabulary; got 1"):
        build(BODIES[model_type], input_size=1).resize_token_embeddings(70)


# ---- pairs ----


@BOTH
def test_a_pair_is_read_apart_and_the_second_comes_first(model_type):
    model = build(PAIRS[model_type])
    ids, other = torch.randint(2, 64, (2, 2, 9))
    mask = torch.ones(2, 9)
    mask[:, 6:] = 0
    with torch.no_grad():
        expected = model(ids[:, :6], pair_input_ids=other).logits
        padded = model(ids, attention_mask=mask, pair_input_ids=other).logits
        assert_close(padded, expected, "float32 model")
        means = [model.model(x)[0].mean(1) for x in (other, ids[:, :6])]
        assert_close(head(model, torch.cat(means, -1)), expected, "float32")
        assert (model(other, pair_input_ids=ids[:, :6]).logits - expected).abs().max() > 1e-3


def head(model, pooled):
    """Return the logits of a pair of pooled vectors, by the modules of each architecture."""
    if model.config.model_type == "spade":
        return model.classifier(torch.tanh(model.dense(pooled)))
    return model.classifier.out_proj(F.silu(model.classifier.dense(pooled)))


@BOTH
def test_a_pair_of_embeddings_or_values_is_a_pair_too(model_type):
    model = build(PAIRS[model_type])
    ids, other = torch.randint(2, 64, (2, 2, 9))
    with torch.no_grad():
        embed = embedding(model.model).embed_tokens
        embedded = {"inputs_embeds": embed(ids), "pair_inputs_embeds": embed(other)}
        assert_close(model(**embedded).logits, model(ids, pair_input_ids=other).logits, "exact")
        model = build(PAIRS[model_type], input_size=1)
        x, y = torch.randn(2, 2, 9)
        means = [model.model(input_values=values)[0].mean(1) for values in (y, x)]
        assert_close(model(input_values=x, pair_input_values=y).logits, head(model, torch.cat(means, -1)), "float32")


@BOTH
@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ({"input_ids": torch.ones(2, 9).long()}, "both sequences of a pair must be given.*got sizes 2 and None"),
        ({"pair_inputs_embeds": torch.ones(2, 9, 32)}, "got sizes None and 2"),
        (
            {"input_ids": torch.ones(2, 9).long(), "pair_input_ids": torch.ones(3, 9).long()},
            "in batches of equal size; got sizes 2 and 3",
        ),
    ],
)
def test_half_a_pair_is_refused(model_type, inputs, message):
    with pytest.raises(ValueError, match=message):
        build(PAIRS[model_type])(**inputs)


@BOTH
def test_pairs_are_saved_and_loaded_with_their_loss(model_type, tmp_path):
    model = build(PAIRS[model_type])
    model.save_pretrained(tmp_path)
    loaded, info = PAIRS[model_type].from_pretrained(tmp_path, output_loading_info=True)
    assert not info["missing_keys"]
    ids, labels = torch.randint(2, 64, (2, 5)), torch.tensor([0, 2])
    outputs = loaded(ids, pair_input_ids=ids, labels=labels)
    assert_close(outputs.logits, model(ids, pair_input_ids=ids).logits, "exact")
    assert_close(outputs.loss, nn.functional.cross_entropy(outputs.logits, labels), "float32")


def test_a_pair_starts_from_an_encoder_decoder(tmp_path):
    source = build(SpadeModel)
    source.save_pretrained(tmp_path)
    model, info = SpadeForSequencePairClassification.from_pretrained(tmp_path, output_loading_info=True)
    assert not info["unexpected_keys"]
    assert {name.split(".")[0] for name in info["missing_keys"]} == {"dense", "classifier"}
    for name, tensor in source.encoder.state_dict().items():
        assert_close(model.model.encoder.state_dict()[name], tensor, "exact")


def test_a_causal_stack_classifies_values_and_pairs():
    options = {"is_decoder": True, "is_encoder_decoder": False, "pooling": "last", "input_size": 1}
    values = torch.randn(2, 9)
    outputs = build(SpadeForSequencePairClassification, **options)(input_values=values, pair_input_values=values)
    assert outputs.logits.shape == (2, 3)
