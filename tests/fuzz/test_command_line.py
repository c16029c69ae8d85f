"""Text from a command line ends in values, or in one error that names the flag."""

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from transformers import CONFIG_MAPPING

import hf_hybrid  # noqa: F401  registers the architectures
from hf_hybrid.suggestions import did_you_mean
from hf_hybrid.training.flags.overrides import parse_config_overrides

from .fuzzing import examples, no_hang

NAMES = [
    "hidden_size",
    "num_layers",
    "bst_layers",
    "global_layers",
    "dropout",
    "preset",
    "hidden_sise",
    "",
    " ",
    "a=b",
]
VALUES = ["1", "-1", "1e999", "nan", "none", "true", "[1,2]", "[a,b]", "[[", "]", "{", '{"a": 1}', "'x'", '"', "tiny"]
VALUES += [
    "[" * 2000,
    "(" * 2000 + ")" * 2000,
    "[" * 2000 + "]" * 2000,
    "9" * 5000,
    "\0",
    "\ud800",
    "{1:",
    "lambda: 0",
]
VALUES += ["[" + "9" * 5000 + "]", "[1,[2,[3]]]", "-" * 3000 + "1", "[" + "-" * 3000 + "1]"]
PAIRS = st.tuples(st.sampled_from(NAMES), st.sampled_from(["=", "", "=="]), st.sampled_from(VALUES) | st.text())
TEXTS = st.one_of(
    st.lists(PAIRS.map("".join), max_size=4).map(",".join),
    st.text(),
    st.text().map("{{{}".format),
    st.sampled_from(VALUES).map('{{"hidden_size": {}}}'.format),
)


def check_refusal(error: ValueError):
    assert "--config_overrides" in str(error), error


@pytest.mark.parametrize("model_type", ["bst", "chela", "spade", "srformer_t5", "srformer_bart", "gpt2"])
@examples(60)
@example(text=f"global_layers=[{'-' * 20_000}1]")
@example(text=f"global_layers={'[' * 2000}{']' * 2000}")
@example(text='{"global_layers": ' + "[" * 100_000)
@given(text=TEXTS)
def test_overrides_are_parsed_or_refused(model_type, text):
    with no_hang():
        try:
            values = parse_config_overrides(text, CONFIG_MAPPING[model_type])
        except ValueError as error:
            check_refusal(error)
            return
    assert isinstance(values, dict)


@examples(100)
@given(name=st.text(), options=st.lists(st.text(), max_size=6))
def test_a_suggestion_is_one_of_the_options(name, options):
    sentence = did_you_mean(name, options)
    assert sentence == "" or any(sentence == f" Did you mean {option!r}?" for option in options)
    if name in options:
        assert sentence


def test_a_suggestion_for_what_is_no_name_at_all_takes_no_time():
    with no_hang(5):
        assert did_you_mean("x" * 200_000, ["y" * 200_000, "spade"]) == ""
