"""Folders with a tiny model and a tokenizer, as clients load them."""

from pathlib import Path

from hf_hybrid.data.tokenizer import byte_tokenizer, leave_texts_open
from tests.models.tiny import tiny_model


def save(folder: Path, model_type: str, auto_class: str, **fields):
    """Save a tiny model with a byte tokenizer that clients can pad with, and return the model."""
    tokenizer = byte_tokenizer()
    if auto_class == "AutoModelForCausalLM":
        leave_texts_open(tokenizer)
    ids = {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id}
    model = tiny_model(model_type, auto_class, vocab_size=len(tokenizer), **ids, **fields)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return model
