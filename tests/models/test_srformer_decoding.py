"""SRformer decodes what it computes in one pass, over the length that is asked for, and shares its documents."""

import copy
import logging

import pytest
import torch
from accelerate import cpu_offload
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (
    GenerationConfig,
)
from transformers.modeling_outputs import BaseModelOutput

from hf_hybrid.kernels import segment_step
from hf_hybrid.models.srformer import cross_attention
from hf_hybrid.models.srformer import segments as segments_module
from hf_hybrid.models.srformer.segments import SegmentCache, Segments

from ..tolerances import assert_close
from .srformer import (
    MODES,
    attentions,
    every_type,
    memories,
    random,
    seq2seq,
)
from .tiny import tiny_inputs

every_start = pytest.mark.parametrize("recurrent_init", ["published", "gated"])

# decoding


@every_type
@pytest.mark.parametrize("strategy", [{}, {"do_sample": True, "top_k": 5}])
@pytest.mark.parametrize("horizon_mode", ["fixed", "target_length"])
@every_start
def test_generation_is_teacher_forcing_with_the_same_horizon(model_type, strategy, horizon_mode, recurrent_init):
    model = seq2seq(model_type, horizon_mode=horizon_mode, segment_size=4, recurrent_init=recurrent_init)
    ids = tiny_inputs(model, length=21)["input_ids"]
    torch.manual_seed(3)
    outputs = model.generate(
        ids, max_new_tokens=12, min_new_tokens=12, output_logits=True, return_dict_in_generate=True, **strategy
    )
    with torch.no_grad():
        logits = model(input_ids=ids, decoder_input_ids=outputs.sequences[:, :-1]).logits
    assert logits.shape[1] == 12
    assert_close(torch.stack(outputs.logits, 1), logits, "float32 decode")


@every_type
@every_start
def test_beam_search_scores_are_those_of_teacher_forcing(model_type, recurrent_init):
    model = seq2seq(model_type, recurrent_init=recurrent_init)
    ids = tiny_inputs(model, length=21)["input_ids"]
    options = {"num_beams": 4, "num_return_sequences": 4, "max_new_tokens": 10, "min_new_tokens": 10}
    outputs = model.generate(ids, length_penalty=0.0, return_dict_in_generate=True, output_scores=True, **options)
    with torch.no_grad():
        logits = model(input_ids=ids.repeat_interleave(4, 0), decoder_input_ids=outputs.sequences[:, :-1]).logits
    eos = model.config.eos_token_id
    chosen = outputs.sequences[:, 1:]
    forced = chosen == eos  # what min_new_tokens and BART's forced end took from the model's own choice
    log_probabilities = logits.log_softmax(-1).gather(2, chosen[..., None])[..., 0]
    expected = log_probabilities.masked_fill(forced, 0).sum(1)
    if model_type == "srformer_t5":
        assert not forced.any()
        assert_close(outputs.sequences_scores, expected, "float32 decode")
    steps = model.compute_transition_scores(outputs.sequences, outputs.scores, outputs.beam_indices)
    assert_close(steps.masked_fill(forced, 0), log_probabilities.masked_fill(forced, 0), "float32 decode")


@pytest.mark.parametrize(
    ("options", "horizon"),
    [
        ({"max_new_tokens": 9}, 9),
        ({"max_length": 9}, 8),
        ({"max_new_tokens": 9, "max_length": 40}, 9),
        ({"generation_config": GenerationConfig(max_new_tokens=7)}, 7),
        ({"max_new_tokens": 5, "decoder_input_ids": torch.full((2, 3), 4)}, 7),
        ({"max_new_tokens": 9, "decoder_horizon": 6}, 6),
        ({}, 12),
    ],
)
@every_type
def test_the_horizon_of_generation(model_type, options, horizon):
    model = seq2seq(model_type, horizon_mode="target_length")
    ids = tiny_inputs(model, length=21)["input_ids"]

    def used(model, **options):
        outputs = model.generate(ids, return_dict_in_generate=True, **options)
        return outputs.past_key_values.cross_attention_cache.segments.horizon

    assert used(model, **options) == horizon
    fixed = seq2seq(model_type)
    assert used(fixed, **options) == options.get("decoder_horizon", 12)
    model.generation_config.max_new_tokens = 11
    assert used(model) == 11


@every_type
def test_a_cache_keeps_its_horizon(model_type):
    model = seq2seq(model_type, horizon_mode="target_length")
    inputs = tiny_inputs(model, length=21)
    assert model(**inputs).past_key_values is None  # nothing could go on from it
    outputs = model(**inputs, use_cache=True)
    assert outputs.past_key_values.cross_attention_cache.segments.horizon == model.config.decoder_horizon
    explicit = model(**inputs, use_cache=True, decoder_horizon=9)
    step = {
        "encoder_outputs": BaseModelOutput(outputs.encoder_last_hidden_state),
        "decoder_input_ids": torch.ones(2, 1, dtype=torch.long),
    }
    model(**step, past_key_values=explicit.past_key_values)
    model(**step, past_key_values=explicit.past_key_values, decoder_horizon=9)
    with pytest.raises(ValueError, match="decoder_horizon must be 9, as in past_key_values; got 5"):
        model(**step, past_key_values=explicit.past_key_values, decoder_horizon=5)
    longer = model.generate(inputs["input_ids"], max_new_tokens=4, return_dict_in_generate=True)
    more = model.generate(
        inputs["input_ids"],
        decoder_input_ids=longer.sequences,
        past_key_values=longer.past_key_values,
        max_new_tokens=3,
        return_dict_in_generate=True,
    )
    assert more.past_key_values.cross_attention_cache.segments.horizon == 4


@pytest.mark.parametrize("counts", [None, torch.tensor([1, 5, 12, 13, 30, 64])])
@pytest.mark.parametrize("horizon", [1, 4, 12, 13, 63, 64, 100])
def test_slots_are_the_papers_segments(counts, horizon):
    """min(floor(t m / q), m - 1) for every token, before the horizon and beyond it."""
    segments = Segments(size=8, number=64, horizon=horizon, counts=counts)
    positions = torch.arange(130)
    slots = segments.slots_at(positions)
    visited = segments.visited()
    assert int(slots.max()) < segments.slots <= 64
    assert (slots.diff() >= 0).all()
    found = slots if visited is None else visited.expand(slots.shape[0], -1).gather(1, slots)
    for row, count in enumerate([64] if counts is None else counts.tolist()):
        expected = [min(t * count // horizon, count - 1) for t in range(130)]
        assert found[row].tolist() == expected
        assert len(set(expected)) == len(set(slots[row].tolist()))
    assert [segments.numbers_at(t) for t in range(130)] == [tuple(of_token) for of_token in slots.T.tolist()]


def test_steps_that_read_the_same_slots_share_a_reading():
    cache = SegmentCache(Segments(size=8, number=4, horizon=12))

    def after(past, batch=2):
        return cache.reading(1, past=past, batch=batch, heads=3, device=torch.device("cpu"))

    first = after(3)
    assert first.picked.tolist() == [1, 5, 9, 13, 17, 21]
    assert after(5) is first
    assert after(6).picked.tolist() == [2, 6, 10, 14, 18, 22]
    second = after(8)
    assert after(8, batch=1) is not second
    assert copy.deepcopy(cache)._last is None
    with torch.inference_mode():
        assert not after(9).picked.is_inference()
    cache.documents = torch.tensor([1, 0])  # as beams that change places
    assert after(8).picked.tolist() == [14, 18, 22, 2, 6, 10]


def test_skipped_segments_are_told_once(caplog, monkeypatch):
    monkeypatch.setattr(segments_module, "_told", set())
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    monkeypatch.setattr(logging.getLogger("hf_hybrid"), "propagate", True)
    model = seq2seq("srformer_t5", segment_size=2, decoder_horizon=8)
    with caplog.at_level(logging.WARNING):
        model(**tiny_inputs(model, length=16))
        padded = tiny_inputs(model, length=40)
        model(**padded, attention_mask=(torch.arange(40) < 16).long().expand(2, -1))
        assert "segments" not in caplog.text
        model(**tiny_inputs(model, length=23))
        assert "12 segments, but its target only 8 tokens" in caplog.text
        assert "4 segments are skipped" in caplog.text
        caplog.clear()
        model(**tiny_inputs(model, length=40))
        assert "segments" not in caplog.text


@every_type
@pytest.mark.parametrize("mode", ["sr", "recurrent", "longt5"])
def test_beams_share_their_document(model_type, mode):
    """Neither memory nor time for keys and states grows with beams: what is reordered is one integer per row."""
    model = seq2seq(model_type, cross_attention_mode=mode)
    ids = tiny_inputs(model, length=21)["input_ids"]
    outputs = model.generate(ids, num_beams=4, max_new_tokens=6, return_dict_in_generate=True)
    cache = outputs.past_key_values.cross_attention_cache
    assert isinstance(cache, SegmentCache)
    assert cache.documents.tolist() == [0] * 4 + [1] * 4
    for memory in memories(outputs):
        assert {x.shape[0] for x in memory if x is not None} == {2}
    one = model.generate(ids, num_beams=1, max_new_tokens=6, return_dict_in_generate=True)
    for memory, alone in zip(memories(outputs), memories(one), strict=True):
        for x, y in zip(memory, alone, strict=True):
            assert x is y is None or torch.equal(x, y)
    rows = model(
        encoder_outputs=BaseModelOutput(random(2, 9, 32, dtype=torch.float32)),
        decoder_input_ids=ids.repeat_interleave(2, 0),
    )
    repeated = BaseModelOutput(random(2, 9, 32, dtype=torch.float32).repeat_interleave(2, 0))
    assert_close(
        rows.logits,
        model(encoder_outputs=repeated, decoder_input_ids=ids.repeat_interleave(2, 0)).logits,
        "float32 model",
    )
    with pytest.raises(ValueError, match=r"as many rows as encoder_hidden_states, 2, or a multiple \(beams\); got 3"):
        model(encoder_outputs=BaseModelOutput(torch.ones(2, 9, 32)), decoder_input_ids=ids[:1].repeat(3, 1))


@every_type
def test_cache_operations_move_rows(model_type):
    model = seq2seq(model_type).double()
    inputs = tiny_inputs(model, batch=3, length=14)
    encoded = model.get_encoder()(inputs["input_ids"]).last_hidden_state
    target = inputs["decoder_input_ids"]

    def step(cache, rows):
        """One more token for each row, against the whole target in one pass."""
        token = torch.full((len(rows), 1), 7)
        with torch.no_grad():
            outputs = model(
                encoder_outputs=BaseModelOutput(encoded[rows]), decoder_input_ids=token, past_key_values=cache
            )
            whole = model(
                encoder_outputs=BaseModelOutput(encoded[rows]), decoder_input_ids=torch.cat([target[rows], token], 1)
            )
        assert_close(outputs.logits, whole.logits[:, -1:], "float64 decode")
        cache.crop(-1)

    with torch.no_grad():
        cache = model(
            encoder_outputs=BaseModelOutput(encoded), decoder_input_ids=target, use_cache=True
        ).past_key_values
    keys = cache.cross_attention_cache.layers[0].memory.keys
    step(cache, [0, 1, 2])
    cache.reorder_cache(torch.tensor([2, 0, 0]))
    step(cache, [2, 0, 0])
    cache.batch_repeat_interleave(2)
    step(cache, [2, 2, 0, 0, 0, 0])
    cache.reorder_cache(torch.tensor([4, 1, 0, 3, 2, 5]))
    cache.batch_select_indices(torch.tensor([1, 2, 4]))
    step(cache, [2, 2, 0])
    assert cache.cross_attention_cache.layers[0].memory.keys is keys
    step(copy.deepcopy(cache), [2, 2, 0])
    cache.reset()
    assert cache.get_seq_length() == 0
    with torch.no_grad():
        again = model(encoder_outputs=BaseModelOutput(encoded), decoder_input_ids=target, past_key_values=cache).logits
        whole = model(encoder_outputs=BaseModelOutput(encoded), decoder_input_ids=target).logits
    assert_close(again, whole, "float64 decode")


@every_type
def test_a_step_costs_the_same_for_any_length_of_document(model_type):
    """Everything that a decoding step computes, counted in numbers: one segment and one state per layer and head."""

    class Written(TorchDispatchMode):
        def __init__(self):
            super().__init__()
            self.numel = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            outputs = func(*args, **(kwargs or {}))
            held = {x.untyped_storage().data_ptr() for x in args if isinstance(x, torch.Tensor)}
            for output in outputs if isinstance(outputs, tuple | list) else (outputs,):
                if isinstance(output, torch.Tensor) and output.untyped_storage().data_ptr() not in held:
                    self.numel += output.numel()
            return outputs

    counts = []
    model = seq2seq(model_type)
    for length in (39, 900):
        inputs = tiny_inputs(model, length=length)
        mask = torch.ones_like(inputs["input_ids"])
        mask[1, length // 2 :] = 0
        with torch.no_grad():
            outputs = model(**inputs, attention_mask=mask, use_cache=True)
            encoded = BaseModelOutput(outputs.encoder_last_hidden_state)
            token = inputs["decoder_input_ids"][:, :1]
            with Written() as written:
                model(
                    encoder_outputs=encoded,
                    attention_mask=mask,
                    decoder_input_ids=token,
                    past_key_values=outputs.past_key_values,
                )
        counts.append(written.numel)
    assert counts[0] == counts[1]


@every_type
@pytest.mark.parametrize(
    "fields",
    [
        {"mix": "sigma"},
        {"recurrent_init": "gated"},
        {"segment_size": 40},
        *({"cross_attention_mode": mode} for mode in MODES),
    ],
    ids=str,
)
def test_a_step_that_reads_in_place_is_that_of_whole_targets(model_type, fields, monkeypatch):
    """Where gradients are to be had, a decoded token takes the way of training."""
    model = seq2seq(model_type, **fields).double()
    inputs = tiny_inputs(model, batch=3, length=23)
    mask = torch.ones_like(inputs["input_ids"])
    mask[1, 9:] = 0
    calls = []

    def counted(*args, **options):
        calls.append(options)
        return segment_step(*args, **options)

    monkeypatch.setattr(cross_attention, "segment_step", counted)
    with torch.no_grad():
        outputs = model(**inputs, attention_mask=mask, use_cache=True, decoder_horizon=10)
    outputs.past_key_values.reorder_cache(torch.tensor([2, 1, 1]))
    assert not calls
    step = {
        "encoder_outputs": BaseModelOutput(outputs.encoder_last_hidden_state),
        "attention_mask": mask,
        "decoder_input_ids": inputs["decoder_input_ids"][:, :1],
    }
    expected = model(**step, past_key_values=copy.deepcopy(outputs.past_key_values)).logits
    assert not calls
    with torch.no_grad():
        actual = model(**step, past_key_values=outputs.past_key_values).logits
    assert len(calls) == (0 if model.config.cross_attention_mode == "longt5" else len(attentions(model)))
    assert_close(actual, expected, "float64 decode")


@every_type
def test_an_offloaded_model_decodes(model_type):
    """Weights come to the device of the computation in a module's own forward, and in nothing else of it."""
    model = seq2seq(model_type, recurrent_init="gated")
    ids = tiny_inputs(model, length=20)["input_ids"]
    settings = {"max_new_tokens": 5, "min_new_tokens": 5, "do_sample": False}
    expected = model.generate(ids, **settings)
    offloaded = cpu_offload(model, execution_device=torch.device("cpu"))
    assert torch.equal(offloaded.generate(ids, **settings), expected)


@every_type
def test_eager_attention_gives_probabilities_of_the_segment(model_type):
    model = seq2seq(model_type, attn_implementation="eager")
    inputs = tiny_inputs(model, length=20, target_length=12)
    outputs = model(**inputs, output_attentions=True)
    for probabilities in outputs.cross_attentions:
        assert probabilities.shape == (2, 2, 12, 3)
        assert_close(probabilities.sum(-1), torch.ones(2, 2, 12), "float32")
    assert_close(model(**inputs).logits, outputs.logits, "exact")
