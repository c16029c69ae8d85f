"""The benchmarks' LongT5 from a T5 computes what T5 computes."""

import pytest
import torch
from transformers import AutoModelForSeq2SeqLM, T5Config, T5ForConditionalGeneration

from benchmarks.long_t5 import convert, main
from hf_hybrid.data.tokenizer import byte_tokenizer


def small_t5(**fields):
    torch.manual_seed(0)
    return T5ForConditionalGeneration(
        T5Config(
            vocab_size=300, d_model=16, d_kv=4, d_ff=32, num_layers=2, num_heads=4, decoder_start_token_id=0, **fields
        )
    ).eval()


@pytest.mark.parametrize("fields", [{}, {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}])
def test_a_short_document_gives_the_same_logits_and_a_long_one_does_not(fields):
    t5 = small_t5(**fields)
    model = convert(t5, 8)
    labels = torch.arange(5)[None]
    for length, same in ((8, True), (40, False)):
        ids = torch.randint(3, 300, (2, length), generator=torch.Generator().manual_seed(length))
        with torch.no_grad():
            one, other = (each(input_ids=ids, labels=labels.repeat(2, 1)).logits for each in (t5, model))
        assert torch.allclose(one, other, atol=1e-5) == same


def test_the_command_writes_a_checkpoint(tmp_path):
    t5 = small_t5()
    t5.save_pretrained(tmp_path / "t5")
    byte_tokenizer().save_pretrained(tmp_path / "t5")
    assert main([str(tmp_path / "t5"), str(tmp_path / "long"), "--local_radius", "7"]) == 0
    model = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "long")
    assert model.config.model_type == "longt5"
    assert model.config.local_radius == 7
    assert torch.equal(model.get_input_embeddings().weight, t5.get_input_embeddings().weight)
