"""SPADE's encoder with heads: pooling, losses, and starting from another class's checkpoint."""

import json

import pytest
import torch
import transformers
from torch import nn
from transformers import AutoConfig, AutoModel

import hf_hybrid
from hf_hybrid import SpadeForSequenceClassification
from hf_hybrid.models.description import loading_lines
from hf_hybrid.models.heads import pool

from ..tolerances import assert_close
from .tiny import tiny_inputs, tiny_model

HEADS = ("MaskedLM", "QuestionAnswering", "SequenceClassification", "TokenClassification")


def classifier(**overrides) -> SpadeForSequenceClassification:
    return tiny_model("spade", "AutoModelForSequenceClassification", **overrides)


def test_pooling():
    states = torch.arange(12.0).view(2, 3, 2)
    assert torch.equal(pool(states, None, "first"), states[:, 0])
    assert torch.equal(pool(states, None, "last"), states[:, 2])
    assert torch.equal(pool(states, None, "mean"), states.mean(1))
    mask = torch.tensor([[0, 1, 1], [1, 1, 0]])
    assert torch.equal(pool(states, mask, "first"), torch.stack([states[0, 1], states[1, 0]]))
    assert torch.equal(pool(states, mask, "last"), torch.stack([states[0, 2], states[1, 1]]))
    assert torch.equal(pool(states, mask, "mean"), torch.stack([states[0, 1:].mean(0), states[1, :2].mean(0)]))
    poisoned = states.masked_fill(mask[..., None] == 0, float("nan"))
    assert torch.isfinite(pool(poisoned, mask, "mean")).all()


@pytest.mark.parametrize("pooling", ["first", "mean", "last"])
@pytest.mark.parametrize("side", ["left", "right"])
def test_a_classified_sequence_may_be_padded(pooling, side):
    model = classifier(pooling=pooling)
    ids = tiny_inputs(model, batch=1)["input_ids"]
    pad, ones = torch.zeros(1, 5, dtype=torch.long), torch.ones_like(ids)
    order = [0, 1] if side == "left" else [1, 0]
    padded, mask = (torch.cat([pair[i] for i in order], 1) for pair in ((pad, ids), (pad, ones)))
    assert_close(model(padded, attention_mask=mask).logits, model(ids).logits, "float32 model")


def test_losses_of_classifiers_are_the_standard_ones():
    model = classifier()
    inputs = tiny_inputs(model, batch=3)
    labels = torch.tensor([0, 2, 1])
    outputs = model(**inputs, labels=labels)
    assert_close(outputs.loss, nn.functional.cross_entropy(outputs.logits, labels), "float32")
    several = torch.tensor([[1.0, 0, 1], [0, 0, 1], [1, 1, 1]])
    outputs = classifier()(**inputs, labels=several)
    assert_close(outputs.loss, nn.functional.binary_cross_entropy_with_logits(outputs.logits, several), "float32")
    values = torch.tensor([0.5, 2.0, -1.0])
    outputs = classifier(num_labels=1)(**inputs, labels=values)
    assert_close(outputs.loss, nn.functional.mse_loss(outputs.logits[:, 0], values), "float32")


def test_losses_of_token_heads_ignore_unlabelled_tokens():
    for head in ("TokenClassification", "MaskedLM"):
        model = tiny_model("spade", f"AutoModelFor{head}")
        inputs = tiny_inputs(model)
        labels = inputs["input_ids"] % 3
        labels[:, ::2] = -100
        outputs = model(**inputs, labels=labels)
        summed = nn.functional.cross_entropy(outputs.logits.flatten(0, 1), labels.flatten(), reduction="sum")
        assert_close(outputs.loss, summed / (labels != -100).sum(), "float32")
        assert_close(model(**inputs, labels=labels, num_items_in_batch=4).loss, summed / 4, "float32")


def test_the_loss_of_question_answering_is_the_mean_of_both_ends():
    model = tiny_model("spade", "AutoModelForQuestionAnswering")
    inputs = tiny_inputs(model)
    start, end = torch.tensor([0, 3]), torch.tensor([2, 10])
    outputs = model(**inputs, start_positions=start, end_positions=end)
    ends = nn.functional.cross_entropy(outputs.start_logits, start) + nn.functional.cross_entropy(
        outputs.end_logits, end
    )
    assert_close(outputs.loss, ends / 2, "float32")


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("source", ["AutoModelForSeq2SeqLM", "AutoModel", "AutoModelForTextEncoding"])
def test_heads_start_from_any_checkpoint_with_an_encoder(source, head, tmp_path):
    pretrained = tiny_model("spade", source)
    pretrained.save_pretrained(tmp_path)
    model_class = type(tiny_model("spade", f"AutoModelFor{head}"))
    model, info = model_class.from_pretrained(tmp_path, output_loading_info=True)
    assert not info["unexpected_keys"]
    assert not any("encoder" in name for name in info["missing_keys"])
    expected = pretrained.get_encoder().state_dict()
    actual = model.model.encoder.state_dict()
    assert all(torch.equal(actual[name], tensor) for name, tensor in expected.items())


def test_a_masked_language_model_scales_what_its_head_reads():
    plain = tiny_model("spade", "AutoModelForMaskedLM")
    scaled = tiny_model("spade", "AutoModelForMaskedLM", scale_decoder_outputs=True)
    inputs = tiny_inputs(plain)
    assert_close(scaled(**inputs).logits, plain(**inputs).logits * 32**-0.5, "float32")


def test_a_masked_language_models_head_is_the_embedding():
    model = tiny_model("spade", "AutoModelForMaskedLM")
    assert model.lm_head.weight is model.get_input_embeddings().weight
    untied = tiny_model("spade", "AutoModelForMaskedLM", tie_word_embeddings=False)
    assert untied.lm_head.weight is not untied.get_input_embeddings().weight


@pytest.mark.parametrize(
    ("head", "body"),
    [
        ("CausalLM", "SpadeStack"),
        ("Seq2SeqLM", "SpadeModel"),
        ("TextEncoding", "SpadeEncoderModel"),
        *((head, "SpadeEncoderModel") for head in HEADS),
    ],
)
def test_auto_model_gives_the_hidden_states_below_every_head(head, body, tmp_path):
    model = tiny_model("spade", f"AutoModelFor{head}")
    model.save_pretrained(tmp_path / "model")
    loaded, report = AutoModel.from_pretrained(tmp_path / "model", output_loading_info=True)
    assert type(loaded).__name__ == type(AutoModel.from_config(model.config)).__name__ == body
    assert not report["missing_keys"]
    inputs = tiny_inputs(loaded)
    wanted = getattr(model, "model", model)(**inputs).last_hidden_state
    assert torch.equal(loaded(**inputs).last_hidden_state, wanted)
    loaded.save_pretrained(tmp_path / "body")
    again = AutoModel.from_pretrained(tmp_path / "body")
    assert torch.equal(again(**inputs).last_hidden_state, wanted)


def test_a_language_models_stack_is_a_model_of_its_own(tmp_path):
    tiny_model("spade", "AutoModelForCausalLM").save_pretrained(tmp_path / "model")
    stack = AutoModel.from_pretrained(tmp_path / "model")
    assert type(stack) is hf_hybrid.SpadeStack is transformers.SpadeStack
    names = {}
    stack.save_pretrained(tmp_path / "stack")
    exec(loading_lines(stack, str(tmp_path / "stack")), names)
    assert type(names["model"]) is type(stack)
    hf_hybrid.export_remote_code(stack, tmp_path / "code")
    assert json.loads((tmp_path / "code" / "config.json").read_text())["auto_map"]["AutoModel"].endswith(".SpadeStack")
    own = AutoModel.from_pretrained(tmp_path / "code", trust_remote_code=True)
    inputs = tiny_inputs(stack)
    assert torch.equal(own(**inputs).last_hidden_state, stack(**inputs).last_hidden_state)


def test_an_encoder_of_0_1_0_is_loaded_as_one(tmp_path):
    encoder = tiny_model("spade", "AutoModelForTextEncoding")
    encoder.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["architectures"] == ["SpadeEncoderModel"]
    (tmp_path / "config.json").write_text(json.dumps(config | {"is_encoder_decoder": True}))  # as 0.1.0 wrote it
    loaded, report = AutoModel.from_pretrained(tmp_path, output_loading_info=True)
    assert not report["missing_keys"]
    inputs = tiny_inputs(encoder)
    assert torch.equal(loaded(**inputs).last_hidden_state, encoder(**inputs).last_hidden_state)


@pytest.mark.parametrize("head", ["TextEncoding", *HEADS])
def test_an_encoder_is_saved_as_one(head, tmp_path):
    model = tiny_model("spade", f"AutoModelFor{head}")
    assert not model.config.is_encoder_decoder
    model.save_pretrained(tmp_path)
    assert not AutoConfig.from_pretrained(tmp_path).is_encoder_decoder


@pytest.mark.parametrize("head", ["QuestionAnswering", "SequenceClassification", "TokenClassification"])
def test_a_language_model_becomes_a_classifier(head, tmp_path):
    language_model = tiny_model("spade", "AutoModelForCausalLM")
    language_model.save_pretrained(tmp_path)
    model = getattr(transformers, f"AutoModelFor{head}").from_pretrained(tmp_path)
    inputs = tiny_inputs(model)
    wanted = language_model.model(**inputs).last_hidden_state
    assert torch.equal(model.model(**inputs).last_hidden_state, wanted)
    model(**inputs)
