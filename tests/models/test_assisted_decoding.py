"""Assisted decoding and prompt lookup equal plain decoding, although a state cannot be rolled back by tokens."""

import copy

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from hf_hybrid.models import generation

from ..matrix import some
from ..tolerances import assert_close
from .tiny import DECODER_CASES, DECODERS, FIRST_CASES, tiny_inputs, tiny_model

every_decoder = pytest.mark.parametrize(("model_type", "auto_class", "case"), some(DECODER_CASES, *FIRST_CASES))

GREEDY = {"max_new_tokens": 16, "min_new_tokens": 16, "do_sample": False, "return_dict_in_generate": True}


def decoder(model_type, auto_class, case, seed=0):
    return tiny_model(model_type, auto_class, seed=seed, **DECODERS[model_type, auto_class][case]).double()


def prompt(model, **sizes):
    inputs = tiny_inputs(model, batch=1, **sizes)
    inputs.pop("decoder_input_ids", None)
    return inputs


def next_logits(model, generated, inputs):
    """The logits after the last token, computed from the returned cache."""
    cache, last = copy.deepcopy(generated.past_key_values), generated.sequences[:, -1:]
    if not model.config.is_encoder_decoder:
        return model(input_ids=last, past_key_values=cache).logits
    encoded = model.get_encoder()(**inputs)
    return model(encoder_outputs=encoded, decoder_input_ids=last, past_key_values=cache).logits


@every_decoder
def test_assisted_decoding_equals_plain_decoding(model_type, auto_class, case, monkeypatch):
    model = decoder(model_type, auto_class, case)
    inputs = prompt(model)
    plain = model.generate(**inputs, output_logits=True, **GREEDY)
    expected = next_logits(model, plain, inputs)
    lookup, assisted = {"prompt_lookup_num_tokens": 3}, {"assistant_model": decoder(model_type, auto_class, case, 9)}
    for reread, way in ((generation.REREAD, lookup), (4, assisted)):
        monkeypatch.setattr(generation, "REREAD", reread)
        generated = model.generate(**inputs, **way, output_logits=True, **GREEDY)
        assert torch.equal(generated.sequences, plain.sequences)
        assert_close(torch.stack(generated.logits), torch.stack(plain.logits), "float32 decode")
        assert type(generated.past_key_values) is type(plain.past_key_values)
        assert generated.past_key_values.get_seq_length() == plain.past_key_values.get_seq_length()
        assert_close(next_logits(model, generated, inputs), expected, "float64 decode")


@pytest.mark.parametrize("model_type", ["bst", "chela", "spade"])
@pytest.mark.parametrize("reread", [0, 1, 4])
def test_accepted_tokens_are_read_alone_or_with_the_next_candidates(model_type, reread, monkeypatch):
    monkeypatch.setattr(generation, "REREAD", reread)
    model = tiny_model(model_type, "AutoModelForCausalLM").double()
    inputs = prompt(model)
    expected = model.generate(**inputs, **GREEDY).sequences
    for way in ({"prompt_lookup_num_tokens": 3}, {"assistant_model": model}, {"assistant_early_exit": 1}):
        assert torch.equal(model.generate(**inputs, **way, **GREEDY).sequences, expected)
    assert torch.equal(model.generate(**inputs, **GREEDY).sequences, expected)  # the early exit ended


@pytest.mark.parametrize(("model_type", "auto_class", "case"), some(DECODER_CASES, *FIRST_CASES))
def test_assisted_decoding_returns_the_hidden_states_of_plain_decoding(model_type, auto_class, case):
    model = decoder(model_type, auto_class, case)
    inputs = prompt(model)
    plain = model.generate(**inputs, output_hidden_states=True, **GREEDY)
    generated = model.generate(**inputs, prompt_lookup_num_tokens=3, output_hidden_states=True, **GREEDY)
    name = "decoder_hidden_states" if model.config.is_encoder_decoder else "hidden_states"
    for states, expected in zip(generated[name], plain[name], strict=True):
        for state, other in zip(states, expected, strict=True):
            assert_close(state, other, "float64 decode")


@pytest.mark.parametrize("model_type", ["bst", "chela", "spade"])
def test_a_model_with_states_assists_another(model_type):
    assistant = tiny_model(model_type, "AutoModelForCausalLM")
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    main = LlamaForCausalLM(LlamaConfig(vocab_size=assistant.config.vocab_size, **sizes)).eval()
    inputs = prompt(main)
    expected = main.generate(**inputs, **GREEDY).sequences
    assert torch.equal(main.generate(**inputs, assistant_model=assistant, **GREEDY).sequences, expected)


@pytest.mark.parametrize("model_type", ["bst", "chela", "spade"])
def test_assisted_decoding_reads_a_long_prompt_once(model_type, monkeypatch):
    model, read = tiny_model(model_type, "AutoModelForCausalLM"), []
    forward = type(model).forward
    monkeypatch.setattr(
        type(model),
        "forward",
        lambda self, input_ids, **kwargs: read.append(input_ids.shape[1]) or forward(self, input_ids, **kwargs),
    )
    inputs = prompt(model, length=300)
    model.generate(**inputs, prompt_lookup_num_tokens=3, **GREEDY)
    assert read[0] == 299
    assert max(read[1:]) <= generation.REREAD + 4
    read.clear()
    model.generate(**inputs, assistant_model=tiny_model(model_type, "AutoModelForCausalLM", seed=9), **GREEDY)
    assert sum(length == 299 for length in read) == 2  # model and assistant


@pytest.mark.parametrize("model_type", ["bst", "chela", "spade"])
def test_a_cache_of_the_user_is_continued(model_type):
    model = tiny_model(model_type, "AutoModelForCausalLM").double()
    inputs = prompt(model)
    expected = model.generate(**inputs, **GREEDY).sequences
    started = model.generate(**inputs, max_new_tokens=5, do_sample=False, return_dict_in_generate=True)
    generated = model.generate(
        started.sequences,
        past_key_values=started.past_key_values,
        prompt_lookup_num_tokens=3,
        max_new_tokens=11,
        do_sample=False,
        return_dict_in_generate=True,
    )
    assert torch.equal(generated.sequences, expected)
    assert generated.past_key_values is started.past_key_values
    embeddings = model.get_input_embeddings()(inputs["input_ids"])
    with pytest.raises(ValueError, match="input_ids must be given: assisted"):
        model.generate(inputs_embeds=embeddings, prompt_lookup_num_tokens=3, **GREEDY)
    with pytest.raises(ValueError, match=r"input_ids must be the whole sequence.*26 tokens.*got 1 tokens"):
        model.generate(
            expected[:, -1:],
            attention_mask=torch.ones_like(expected),
            past_key_values=generated.past_key_values,
            prompt_lookup_num_tokens=3,
        )
