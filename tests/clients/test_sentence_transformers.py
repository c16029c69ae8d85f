"""Sentence Transformers loads, trains, saves and encodes with encoders, and cross encoders score pairs."""

import pytest
import torch
from datasets import Dataset
from sentence_transformers import (
    CrossEncoder,
    SentenceTransformer,
    SentenceTransformerTrainer,
    SentenceTransformerTrainingArguments,
)
from sentence_transformers.cross_encoder import CrossEncoderTrainer, CrossEncoderTrainingArguments
from sentence_transformers.cross_encoder.losses import BinaryCrossEntropyLoss
from sentence_transformers.losses import MultipleNegativesRankingLoss
from transformers import AutoTokenizer

from .folders import save

ARGUMENTS = {"max_steps": 3, "per_device_train_batch_size": 4, "report_to": "none", "use_cpu": True}


@pytest.mark.parametrize(
    ("model_type", "auto_class"), [("bst", "AutoModel"), ("chela", "AutoModel"), ("spade", "AutoModelForTextEncoding")]
)
def test_sentence_transformer(model_type, auto_class, tmp_path):
    model = save(tmp_path / "model", model_type, auto_class)
    encoder = SentenceTransformer(str(tmp_path / "model"))
    assert type(encoder[0].auto_model) is type(model)
    texts = ["one longer sentence", "another"]
    found = encoder.encode(texts, convert_to_tensor=True)
    ids = AutoTokenizer.from_pretrained(tmp_path / "model")(texts[1], return_tensors="pt")
    with torch.no_grad():
        wanted = model(**ids).last_hidden_state.mean(1)
    torch.testing.assert_close(found[1:], wanted)
    pairs = Dataset.from_dict({"anchor": ["a b", "c d", "e f", "g h"], "positive": ["a", "c", "e", "g"]})
    arguments = SentenceTransformerTrainingArguments(str(tmp_path / "run"), **ARGUMENTS)
    loss = MultipleNegativesRankingLoss(encoder)
    SentenceTransformerTrainer(encoder, arguments, pairs, loss=loss).train()
    trained = encoder.encode(texts, convert_to_tensor=True)
    assert not torch.allclose(trained, found)
    encoder.save_pretrained(str(tmp_path / "saved"))
    loaded = SentenceTransformer(str(tmp_path / "saved"))
    assert torch.equal(loaded.encode(texts, convert_to_tensor=True), trained)


@pytest.mark.parametrize("model_type", ["bst", "chela", "spade"])
def test_cross_encoder(model_type, tmp_path):
    save(tmp_path / "model", model_type, "AutoModelForSequenceClassification", num_labels=1)
    encoder = CrossEncoder(str(tmp_path / "model"))
    pairs = [("a", "b"), ("a longer text", "c")]
    found = encoder.predict(pairs)
    data = Dataset.from_dict({"first": ["a b", "c d", "e f", "g"], "second": list("aceg"), "label": [1.0, 0.0] * 2})
    arguments = CrossEncoderTrainingArguments(str(tmp_path / "run"), **ARGUMENTS)
    CrossEncoderTrainer(encoder, arguments, data, loss=BinaryCrossEntropyLoss(encoder)).train()
    trained = encoder.predict(pairs)
    assert (trained != found).all()
    encoder.save_pretrained(str(tmp_path / "saved"))
    assert (CrossEncoder(str(tmp_path / "saved")).predict(pairs) == trained).all()
