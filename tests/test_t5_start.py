"""The T5 of the experiments begins with SPADE's starting values under T5's names."""

import pytest
import torch
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer, T5Config

from benchmarks.t5_start import STARTER, main, starting
from hf_hybrid import SpadeForConditionalGeneration, starter
from hf_hybrid.models.spade.conversion_spade import config_from_t5

SIZES = {"vocab_size": 90, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4, "dropout_rate": 0.0}


def attentions(model):
    return [part for part in model.modules() if hasattr(part, "q_proj")]


def test_it_computes_what_a_new_spade_of_full_attention_computes():
    t5 = starting(T5Config(**SIZES, feed_forward_proj="gated-gelu", decoder_start_token_id=0), seed=3).eval()
    fields = {"attention_type": "full", "global_layers": []}
    like = SpadeForConditionalGeneration.from_t5(t5, **fields).eval()
    torch.manual_seed(4)
    new = SpadeForConditionalGeneration(config_from_t5(t5.config, **fields)).eval()
    for name, tensor in new.state_dict().items():
        if tensor.numel() > 64 and not any(part in name for part in ("embed", "lm_head", "q_proj", "k_proj")):
            assert 0.8 < like.state_dict()[name].std() / tensor.std() < 1.25, name
    for one, other in zip(attentions(like), attentions(new), strict=True):
        assert one.q_proj.weight.std().item() == pytest.approx(one.k_proj.weight.std().item(), rel=1e-3)
        scores = [(part.q_proj.weight.T @ part.k_proj.weight).std() for part in (one, other)]
        assert 0.6 < scores[0] / scores[1] < 1.6
    inputs = {"input_ids": torch.randint(3, 90, (2, 40)), "labels": torch.randint(3, 90, (2, 9))}
    with torch.no_grad():
        assert torch.allclose(t5(**inputs).logits, like(**inputs).logits, atol=1e-4)
    biases = t5.encoder.block[0].layer[0].SelfAttention.relative_attention_bias.weight
    assert torch.equal(biases, new.model.encoder.relative_attention_bias.weight)
    assert 0.09 < t5.shared.weight.std() < 0.11


def test_the_command_writes_a_checkpoint_of_the_starters_sizes(tmp_path):
    assert main([str(tmp_path)]) == 0
    model = AutoModelForSeq2SeqLM.from_pretrained(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    assert tokenizer.get_vocab() == AutoTokenizer.from_pretrained(starter(STARTER)).get_vocab()
    assert model.config.vocab_size == len(tokenizer)
    known = AutoModelForSeq2SeqLM.from_pretrained(starter(STARTER)).config
    assert (model.config.d_model, model.config.num_layers, model.config.d_ff) == (
        known.hidden_size,
        known.num_hidden_layers,
        known.intermediate_size,
    )
