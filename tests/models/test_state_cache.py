"""The cache layer for states of any form, by itself."""

import copy
import logging
from typing import NamedTuple

import pytest
import torch
from torch.utils._pytree import tree_leaves
from transformers import CompileConfig, DynamicCache, GenerationConfig, StaticCache
from transformers.cache_utils import DynamicLayer

from hf_hybrid.models import generation
from hf_hybrid.models.state_cache import LAYER_TYPE, SlidingStateCacheLayer, StateCacheLayer, state_layer

from ..matrix import some
from .tiny import GENERATIVE, tiny_config, tiny_inputs, tiny_model


class Inner(NamedTuple):
    matrix: torch.Tensor
    position: int


def filled(rows=3) -> StateCacheLayer:
    layer = StateCacheLayer()
    rising = torch.arange(rows, dtype=torch.float64)
    layer.store((rising[:, None], Inner(rising[:, None, None] * 10, 7), None), tokens=5)
    return layer


def rows_of(layer):
    first, inner, nothing = layer.state
    assert nothing is None
    assert inner.position == 7
    assert torch.equal(inner.matrix[:, 0, 0], 10 * first[:, 0])
    return first[:, 0].tolist()


def test_it_counts_tokens_and_has_no_limit():
    layer = filled()
    layer.store(layer.state, tokens=2)
    assert layer.get_seq_length() == 7
    assert layer.get_mask_sizes(3) == (10, 0)
    assert layer.get_max_length() == -1


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda layer: layer.reorder_cache(torch.tensor([2, 0, 2])), [2, 0, 2]),
        (lambda layer: layer.batch_repeat_interleave(2), [0, 0, 1, 1, 2, 2]),
        (lambda layer: layer.batch_select_indices(torch.tensor([1])), [1]),
        (lambda layer: (layer.offload(), layer.prefetch()), [0, 1, 2]),
        (lambda layer: layer.crop(0), [0, 1, 2]),
    ],
    ids=["reorder", "repeat", "select", "offload", "crop nothing"],
)
def test_rows_of_every_tensor_move_together(change, expected):
    layer = filled()
    change(layer)
    assert rows_of(layer) == expected
    assert layer.get_seq_length() == 5


def test_reset_forgets():
    layer = filled()
    layer.reset()
    assert layer.state is None
    assert layer.get_seq_length() == 0
    layer.reorder_cache(torch.tensor([0]))  # nothing to reorder


def test_what_a_state_cannot_do_is_refused():
    with pytest.raises(ValueError, match="cannot be rolled back"):
        filled().crop(-1)
    with pytest.raises(ValueError, match="no keys and values"):
        filled().update(torch.zeros(1), torch.zeros(1))


def test_keys_and_values_slide_beside_a_state():
    layer = SlidingStateCacheLayer()
    layer.sliding_window = 4
    rising = torch.arange(9, dtype=torch.float64).expand(2, 1, 9)[..., None]
    seen = []
    for start, stop in ((0, 2), (2, 3), (3, 8), (8, 9)):
        kept, first = layer.get_mask_sizes(stop - start)
        keys, values = layer.update(rising[:, :, start:stop], -rising[:, :, start:stop])
        assert torch.equal(values, -keys)
        assert (keys.shape[2], keys[0, 0, 0, 0]) == (kept, first)
        seen.append(keys[0, 0, :, 0].tolist())
        assert layer.get_seq_length() == stop
    assert seen == [[0, 1], [0, 1, 2], [0, 1, 2, 3, 4, 5, 6, 7], [5, 6, 7, 8]]
    layer.store((torch.tensor([[1.0], [2.0]]),), tokens=0)
    layer.batch_repeat_interleave(2)
    layer.reorder_cache(torch.tensor([3, 0]))
    assert layer.keys.shape == (2, 1, 3, 1)
    assert layer.state[0].flatten().tolist() == [2.0, 1.0]
    assert layer.get_seq_length() == 9
    layer.reset()
    assert layer.get_mask_sizes(2) == (2, 0)
    assert layer.update(rising[:, :, :1], rising[:, :, :1])[0].shape[2] == 1


def test_caches_are_built_from_a_config():
    config = tiny_config("chela", is_decoder=True)
    assert config.layer_types == [LAYER_TYPE] * 2
    for cache in (DynamicCache(config=config), StaticCache(config=config, max_cache_len=9)):
        assert [type(layer) for layer in cache.layers] == [StateCacheLayer] * 2
        assert cache.get_seq_length() == 0
        state_layer(cache, 1).store((torch.zeros(1),), tokens=3)
        assert copy.deepcopy(cache).get_seq_length(1) == 3


def test_a_static_cache_has_room_for_its_tokens_and_no_more():
    model = tiny_model("chela", "AutoModelForCausalLM", long_kernel_size=512)
    rings = {}
    for tokens in (40, 600):
        cache = StaticCache(config=model.config, max_cache_len=tokens)
        with torch.no_grad():
            model(torch.full((1, 20), 7), past_key_values=cache, use_cache=True)
        rings[tokens] = [x.shape[1] for layer in cache.layers for x in tree_leaves(layer.state) if is_ring(x)]
    assert set(rings[40]) == {64}
    assert set(rings[600]) == {512}


def is_ring(x) -> bool:
    return isinstance(x, torch.Tensor) and x.dim() == 3 and x.shape[1] >= 64


def test_what_grows_is_known_by_its_method():
    """A checkpoint with its code has a class of its own."""

    class Other(NamedTuple):
        ring: torch.Tensor

        def grown(self, tokens):
            return Other(torch.zeros(1, tokens))

    layer = StateCacheLayer(max_cache_len=9)
    layer.store((Other(torch.zeros(1, 1)), None), tokens=3)
    assert layer.state[0].ring.shape == (1, 6)
    layer.store((Other(torch.zeros(1, 2)), None), tokens=1)
    assert layer.state[0].ring.shape == (1, 2)


def test_an_empty_layer_has_nothing_to_roll_back():
    layer = StateCacheLayer()
    layer.crop(-2)
    assert layer.get_seq_length() == 0


def test_another_cache_is_refused():
    with pytest.raises(ValueError, match="got a tuple whose layer 0 is NoneType"):
        state_layer((), 0)
    cache = DynamicCache()
    with pytest.raises(ValueError, match="layer 0 is NoneType"):
        state_layer(cache, 0)
    cache.layers.append(DynamicLayer())
    with pytest.raises(
        ValueError, match=r"DynamicCache\(config=model.config\) is; got a DynamicCache whose layer 0 is DynamicL"
    ):
        state_layer(cache, 0)
    cache.layers[0] = filled()
    with pytest.raises(ValueError, match="layer 0 is StateCacheLayer"):
        state_layer(cache, 0, SlidingStateCacheLayer)


def test_offloading_moves_keys_and_values_but_no_state(monkeypatch):
    layer, moved = SlidingStateCacheLayer(), []
    layer.sliding_window = 4
    state = torch.ones(1)
    layer.update(*torch.ones(2, 1, 1, 3, 2))
    layer.store(state, tokens=0)
    monkeypatch.setattr(torch.Tensor, "to", lambda x, *where, **how: moved.append(x) or x)
    layer.offload()
    assert moved == [layer.keys, layer.values]
    assert layer.state is state


class NoStream:
    """Takes the place of a CUDA stream."""

    def wait_stream(self, stream):
        pass

    def __enter__(self):
        pass

    def __exit__(self, *error):
        pass


@pytest.mark.parametrize(
    ("model_type", "auto_class"),
    [(model_type, "AutoModelForCausalLM") for model_type in ("bst", "chela", "spade")]
    + [(model_type, "AutoModelForSeq2SeqLM") for model_type in ("spade", "srformer_bart", "srformer_t5")],
)
def test_generation_with_offloaded_caches(model_type, auto_class, monkeypatch):
    """The order of the moves; where a CPU is the device, they move nothing."""
    monkeypatch.setattr(torch, "Stream", NoStream)
    monkeypatch.setattr(torch.cuda, "default_stream", lambda device: NoStream())
    model = tiny_model(model_type, auto_class)
    inputs = tiny_inputs(model)
    inputs.pop("decoder_input_ids", None)
    settings = {"max_new_tokens": 8, "min_new_tokens": 8, "disable_compile": True}
    expected = model.generate(**inputs, **settings)
    assert torch.equal(model.generate(**inputs, cache_implementation="offloaded", **settings), expected)


@pytest.mark.parametrize("model_type", ["bst", "chela", "spade"])
def test_a_copied_cache_serves_a_prefix_many_times(model_type):
    model = tiny_model(model_type, "AutoModelForCausalLM").double()
    prefix, questions = tiny_inputs(model, batch=1)["input_ids"], tiny_inputs(model, batch=3, length=5)["input_ids"]
    with torch.no_grad():
        cache = model(prefix, use_cache=True).past_key_values
    for question in questions:
        ids = torch.cat([prefix, question[None]], dim=1)
        settings = {"max_new_tokens": 8, "min_new_tokens": 8, "do_sample": False}
        answer = model.generate(ids, past_key_values=copy.deepcopy(cache), **settings)
        assert torch.equal(answer, model.generate(ids, **settings))


@pytest.mark.parametrize(("model_type", "auto_class"), some(GENERATIVE, ("spade", "AutoModelForCausalLM")))
def test_decoding_compiles_into_one_graph_if_the_class_says_so(model_type, auto_class):
    model = tiny_model(model_type, auto_class)
    inputs = tiny_inputs(model)
    inputs.pop("decoder_input_ids", None)
    settings = {"max_new_tokens": 6, "min_new_tokens": 6, "cache_implementation": "static"}
    expected = model.generate(**inputs, disable_compile=True, **settings)
    compiled = CompileConfig(fullgraph=True, backend="eager", mode=None)
    compiled._compile_all_devices = True
    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()
    assert torch.equal(model.generate(**inputs, compile_config=compiled, **settings), expected)
    # one graph, and one more where the length becomes a variable; none where transformers knows that it cannot
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    assert graphs in (1, 2) if model._can_compile_fullgraph else graphs == 0


@pytest.mark.parametrize(
    ("model_type", "fields", "by_itself", "on_request"),
    [
        ("spade", {}, True, True),
        ("chela", {}, False, True),
        ("chela", {"attention_fn": "laplace", "num_attention_heads": 2}, False, False),
        ("bst", {"context_shift": "none", "bst_layers": [0, 1]}, False, True),
        ("bst", {"context_shift": "window", "bst_layers": [0, 1]}, False, False),
    ],
)
def test_on_a_gpu_our_states_are_compiled_only_on_request(
    model_type, fields, by_itself, on_request, monkeypatch, caplog
):
    monkeypatch.setattr(logging.getLogger("hf_hybrid"), "propagate", True)
    model = tiny_model(model_type, "AutoModelForCausalLM", **fields)
    monkeypatch.setattr(type(model), "device", torch.device("cuda"))
    given = {"past_key_values": StaticCache(config=model.config, max_cache_len=8)}
    assert model._valid_auto_compile_criteria(given, GenerationConfig()) == by_itself
    settings = GenerationConfig(compile_config=CompileConfig(mode=None))
    generation.logger.warning_once.cache_clear()
    assert model._valid_auto_compile_criteria(given, settings) == on_request
    assert ("compile_config is ignored" in caplog.text) == (not on_request)
