"""A config either refuses what it is given, in words that name the field and the value, or makes a model that runs."""

import dataclasses
import json
import math
import typing

import pytest
import torch
import transformers
from huggingface_hub.errors import StrictDataclassError
from hypothesis import given
from hypothesis import strategies as st

from hf_hybrid.models.auto import ARCHITECTURES
from hf_hybrid.models.bst import configuration_bst
from hf_hybrid.models.chela import configuration_chela
from hf_hybrid.models.spade import configuration_spade
from hf_hybrid.models.srformer import configuration_srformer

from ..models.tiny import ROLES, TINY_CONFIGS, main_output, tiny_inputs
from .fuzzing import examples, no_hang

# fields that are transformers' alone, and say nothing of an architecture
NOT_OURS = {field.name for field in dataclasses.fields(transformers.PreTrainedConfig)} - {"is_encoder_decoder"}
LARGEST_RUN = 2_000_000  # parameters of a model that is also run
SMALL = st.sampled_from([0, 1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 32, 64, -1])
HUGE = st.sampled_from([10**6, 2**24 + 1, 2**31, 2**40, 2**63, 10**30, -(10**9)])
NUMBERS = st.sampled_from(
    [0.0, 0.1, 0.5, 0.99, 1.0, 1.5, -0.1, 1e-300, 1e300, 10**30, math.inf, -math.inf, math.nan, 1e-6]
)
LISTS = st.one_of(
    st.lists(SMALL, max_size=4),
    st.sampled_from([[10, 30], [30, 10], [3, 5], [99], [1] * 50, [True], ["a"], [1.5], [None], [[0]]]),
)
JUNK = st.sampled_from(["", "x", "none", "0", "\0", "\ud800", "y" * 300, {}, {"a": 1}, (1, 2), b"x", 1j, object, None])
WORDS = sorted(
    {
        str(word)
        for module in (configuration_bst, configuration_chela, configuration_spade, configuration_srformer)
        for name, table in vars(module).items()
        if name.isupper() and isinstance(table, (tuple, dict))
        for word in table
    }
    | {"gelu", "gated-gelu", "gated-x", "a-b-c", "all", "bottom-1", "top-0", "bottom-99", "bottom--1", "bottom-²"}
)


def values(annotation) -> st.SearchStrategy:
    """Values for a field, mostly of its type, so that rules are met and not types alone."""
    kinds = set(typing.get_args(annotation)) or {annotation}
    kinds = {typing.get_origin(kind) or kind for kind in kinds | {annotation}}
    fitting = []
    if bool in kinds:
        fitting += [st.booleans()]
    if int in kinds:
        fitting += [SMALL, SMALL, HUGE]
    if float in kinds:
        fitting += [NUMBERS, NUMBERS]
    if str in kinds:
        fitting += [st.sampled_from(WORDS)]
    if list in kinds:
        fitting += [LISTS]
    if type(None) in kinds:
        fitting += [st.none()]
    anything = st.one_of(SMALL, HUGE, NUMBERS, LISTS, JUNK, st.sampled_from(WORDS), st.booleans())
    return st.one_of(*fitting, *fitting, *fitting, anything)


@st.composite
def changes(draw, config_class):
    """One to four fields of a config, and what they are set to."""
    fields = {field.name: field.type for field in dataclasses.fields(config_class) if field.name not in NOT_OURS}
    names = draw(st.lists(st.sampled_from(sorted(fields)), min_size=1, max_size=4, unique=True))
    return {name: draw(values(fields[name])) for name in names}


def check_refusal(error: Exception, changed: dict):
    """Assert that a message names a field that was changed, and its value."""
    message = str(error)
    named = [name for name in changed if name in message]
    assert named, message
    assert any(str(changed[name]) in message or repr(changed[name])[:80] in message for name in named), message


@pytest.mark.parametrize("model_type", sorted(ARCHITECTURES))
@examples(150)
@given(data=st.data())
def test_a_config_is_refused_in_words_or_makes_a_model(model_type, data):
    config_class, models = ARCHITECTURES[model_type]
    auto_class = data.draw(st.sampled_from(sorted(models)))
    changed = data.draw(changes(config_class))
    fields = {**TINY_CONFIGS[model_type], **ROLES.get((model_type, auto_class), {}), **changed}
    with no_hang():
        try:
            config = config_class(**fields)
        except (ValueError, StrictDataclassError) as error:
            check_refusal(error, changed)
            return
        assert json.loads(json.dumps(config_class.from_dict(config.to_dict()).to_dict())) == json.loads(
            json.dumps(config.to_dict())
        )
        try:
            with torch.device("meta"):
                model = getattr(transformers, auto_class).from_config(config)
        except (ValueError, StrictDataclassError) as error:  # a rule of this one class of model
            check_refusal(error, changed)
            return
        if model.num_parameters() > LARGEST_RUN or getattr(config, "input_size", None) or config.vocab_size < 3:
            return
        torch.manual_seed(0)
        model = getattr(transformers, auto_class).from_config(config).eval()
        try:
            with torch.no_grad():
                output = main_output(model(**tiny_inputs(model)))
        except ValueError as error:  # more tokens than positions
            check_refusal(error, {name: changed[name] for name in changed if "position" in name})
            return
    tame = all(abs(value) < 1e3 for value in changed.values() if isinstance(value, (int, float)))
    assert torch.isfinite(output).all() or not tame, config


@pytest.mark.parametrize("model_type", sorted(ARCHITECTURES))
def test_a_slip_of_the_keyboard_does_not_hang(model_type):
    names = ("num_layers", "encoder_layers", "num_hidden_layers")
    name = next(name for name in names if name in TINY_CONFIGS[model_type])
    with (
        no_hang(10),
        pytest.raises((ValueError, StrictDataclassError), match=f"{name} must be at most 10000; got 100000000000"),
    ):
        ARCHITECTURES[model_type][0](**{**TINY_CONFIGS[model_type], name: 100_000_000_000})
