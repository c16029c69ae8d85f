"""The T5 of the experiments begins with SPADE's starting values under T5's names."""

import torch
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer, T5Config

from benchmarks.t5_start import STARTER, main, starting
from hf_hybrid import SpadeForConditionalGeneration, starter
from hf_hybrid.models.spade.conversion_spade import config_from_t5

SIZES = {"vocab_size": 90, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4, "dropout_rate": 0.0}


def test_it_computes_what_a_new_spade_of_full_attention_computes():
    t5 = starting(T5Config(**SIZES, feed_forward_proj="gated-gelu", decoder_start_token_id=0), seed=3).eval()
    fields = {"attention_type": "full", "global_layers": []}
    like = SpadeForConditionalGeneration.from_t5(t5, **fields).eval()
    torch.manual_seed(4)
    new = SpadeForConditionalGeneration(config_from_t5(t5.config, **fields)).eval()
    for name, tensor in new.state_dict().items():
        if tensor.numel() > 64 and "embed" not in name and "lm_head" not in name:
            assert 0.8 < like.state_dict()[name].std() / tensor.std() < 1.25, name
    inputs = {"input_ids": torch.randint(3, 90, (2, 40)), "labels": torch.randint(3, 90, (2, 9))}
    with torch.no_grad():
        assert torch.allclose(t5(**inputs).logits, like(**inputs).logits, atol=1e-4)
    biases = t5.encoder.block[0].layer[0].SelfAttention.relative_attention_bias.weight
    assert torch.equal(biases, new.model.encoder.relative_attention_bias.weight)
    assert 0.9 < t5.shared.weight.std() < 1.1  # T5's own


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
