"""Models in transformers' pipelines and streamers, from a saved folder with its tokenizer."""

import asyncio
import threading

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    AsyncTextIteratorStreamer,
    AutoModelForSeq2SeqLM,
    AutoTokenizer,
    PreTrainedTokenizerFast,
    TextIteratorStreamer,
    TextStreamer,
    pipeline,
)

from ..tolerances import assert_close
from .tiny import MODEL_CLASSES, GENERATIVE, is_causal_lm, tiny_model

WORDS = [f"w{number}" for number in range(60)]
SHORT, LONG = "w3 w5 w8", "w13 w21 w34 w55 w4 w7 w11 w18 w29 w47 w2"
TASKS = {
    "AutoModelForCausalLM": "text-generation",
    "AutoModelForMaskedLM": "fill-mask",
    "AutoModelForQuestionAnswering": "question-answering",
    "AutoModelForSequenceClassification": "text-classification",
    "AutoModelForTokenClassification": "token-classification",
    "AutoModel": "feature-extraction",
}
CAUSAL = [names for names in MODEL_CLASSES if names[1] == "AutoModelForCausalLM"]


def word_tokenizer() -> PreTrainedTokenizerFast:
    """One token for each word."""
    special = ["<pad>", "</s>", "<unk>", "<mask>"]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(special + WORDS)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    names = dict(zip(("pad_token", "eos_token", "unk_token", "mask_token"), special, strict=True))
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_input_names=["input_ids", "attention_mask"], **names)


@pytest.fixture
def saved(tmp_path):
    """A function: a tiny model and its tokenizer, saved into a folder."""

    def save(model_type, auto_class):
        tiny_model(model_type, auto_class, vocab_size=64).save_pretrained(tmp_path)
        word_tokenizer().save_pretrained(tmp_path)
        return tmp_path

    return save
