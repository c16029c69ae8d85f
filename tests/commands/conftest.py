import pytest
import torch
import transformers

from hf_hybrid.data.tokenizer import byte_tokenizer, leave_texts_open
from tests.clients.folders import save

_SIZES = {"vocab_size": 260, "initializer_range": 0.2}
PEERS = {
    "bert": {**_SIZES, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 48},
    "gpt2": {**_SIZES, "n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 64},
    "roberta": {
        **_SIZES,
        **{"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 48},
        "max_position_embeddings": 64,
    },
    "xlnet": {"vocab_size": 260, "d_model": 32, "n_layer": 2, "n_head": 2, "d_inner": 48, "initializer_range": 0.2},
    "t5": {"vocab_size": 260, "d_model": 32, "num_layers": 2, "num_heads": 2, "d_kv": 16, "d_ff": 48},
}
"""Tiny models of transformers itself."""


def save_peer(folder, model_type, auto_class, **fields):
    tokenizer = byte_tokenizer()
    if auto_class == "AutoModelForCausalLM":
        leave_texts_open(tokenizer)
    ids = {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id, "bos_token_id": None}
    config = transformers.AutoConfig.for_model(model_type, **PEERS[model_type], **ids, **fields)
    if model_type == "t5":
        config.decoder_start_token_id = tokenizer.pad_token_id
    torch.manual_seed(0)
    getattr(transformers, auto_class).from_config(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


@pytest.fixture(scope="session")
def folders(tmp_path_factory):
    """Folders of tiny models, made when they are first asked for: ``folders("spade", "AutoModelForSeq2SeqLM")``."""
    root, made = tmp_path_factory.mktemp("checkpoints"), {}

    def folder(model_type, auto_class, **fields):
        key = (model_type, auto_class, *sorted(fields.items()))
        if key not in made:
            made[key] = root / f"{len(made)}-{model_type}"
            (save_peer if model_type in PEERS else save)(made[key], model_type, auto_class, **fields)
        return str(made[key])

    return folder
