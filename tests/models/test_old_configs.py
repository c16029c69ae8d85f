"""Configurations of other versions, and misspelt ones: what is missing, what is unknown, what is said about it."""

import json
import logging
from functools import cache

import pytest
import transformers
from transformers import AutoConfig, BartConfig, T5Config

from hf_hybrid import SpadeConfig, SRformerBartConfig, SRformerT5Config
from hf_hybrid.models import checks
from hf_hybrid.models.auto import ARCHITECTURES

from .golden import GOLDEN_FOLDER
from .tiny import TINY_CONFIGS, tiny_config

every_type = pytest.mark.parametrize("model_type", sorted(ARCHITECTURES))
LEFTOVERS = {  # of every config.json that a release of transformers has written
    "_name_or_path": "user/name",
    "_commit_hash": None,
    "_attn_implementation_autoset": True,
    "add_cross_attention": False,
    "architectures": ["SomeModel"],
    "attn_implementation": "eager",
    "auto_map": {"AutoConfig": "configuration.Config"},
    "bos_token_id": 3,
    "cross_attention_hidden_size": None,
    "decoder_start_token_id": 0,
    "do_sample": False,
    "finetuning_task": "mrpc",
    "forced_eos_token_id": 1,
    "id2label": {"0": "no", "1": "yes"},
    "max_length": 20,
    "name_or_path": "user/name",
    "num_labels": 2,
    "output_attentions": False,
    "prefix": "",
    "pruned_heads": {},
    "return_dict_in_generate": False,
    "task_specific_params": {"summarization": {"prefix": "summarize: "}},
    "tf_legacy_loss": False,
    "tie_encoder_decoder": False,
    "tokenizer_class": "PreTrainedTokenizerFast",
    "torch_dtype": "float32",
    "torchscript": False,
    "transformers_version": "4.40.0",
    "use_bfloat16": False,
}


@pytest.fixture
def warnings(monkeypatch):
    """Everything that is said about unknown fields, with nothing kept back for having been said by another test."""
    said = []
    monkeypatch.setattr(checks.logger, "warning_once", cache(said.append), raising=False)
    return said


def load(folder, values):
    (folder / "config.json").write_text(json.dumps(values), encoding="utf-8")
    return AutoConfig.from_pretrained(folder)


@every_type
def test_a_field_that_an_old_file_lacks_has_its_default(model_type, tmp_path, warnings):
    recorded = json.loads((GOLDEN_FOLDER / f"{model_type}.json").read_text())["config"]
    assert len(recorded) > 10
    for field in sorted(recorded):
        old = {name: value for name, value in recorded.items() if name != field}
        loaded = load(tmp_path, {"model_type": model_type, **old}).to_dict()
        assert {name: loaded[name] for name in recorded} == recorded, field
    assert not warnings


@every_type
def test_a_default_that_follows_from_other_fields_follows_from_those_of_the_file(model_type, tmp_path):
    """A file says what its model is; only what it does not say is made up, and from what it says."""
    config = tiny_config(model_type)
    saved = json.loads(config.to_json_string())
    own = json.loads((GOLDEN_FOLDER / f"{model_type}.json").read_text())["config"]
    left_open = [field for field in own if field not in TINY_CONFIGS[model_type]]
    derived = [field for field in left_open if saved[field] is not None and getattr(type(config), field, None) is None]
    assert derived
    for field in derived:
        rest = {name: value for name, value in saved.items() if name != field}
        for values in (rest, {**rest, field: None}):
            assert load(tmp_path, values).to_dict()[field] == saved[field], field


@every_type
def test_what_transformers_keeps_in_a_config_is_not_unknown(model_type, tmp_path, warnings):
    load(tmp_path, {"model_type": model_type, **LEFTOVERS})
    load(tmp_path, json.loads(tiny_config(model_type, dtype="bfloat16").to_json_string()))
    assert not warnings


@every_type
def test_an_unknown_field_of_a_file_is_named_once(model_type, tmp_path, warnings):
    name = type(tiny_config(model_type)).__name__
    for _ in range(2):
        loaded = load(tmp_path, {"model_type": model_type, "voccab_size": 7, "zebra": [1]})
    assert warnings == [
        f"{name} (model type {model_type}) has no field 'voccab_size'. Did you mean 'vocab_size'? The config keeps "
        "it, but no model reads it.",
        f"{name} (model type {model_type}) has no field 'zebra'. The config keeps it, but no model reads it.",
    ]
    assert (loaded.voccab_size, loaded.zebra) == (7, [1])
    assert loaded.vocab_size == ARCHITECTURES[model_type][0]().vocab_size


def test_the_warning_is_seen_without_setting_up_a_log(caplog):
    with caplog.at_level(logging.WARNING):
        SpadeConfig(hiden_size=64)
    assert "SpadeConfig (model type spade) has no field 'hiden_size'. Did you mean 'hidden_size'?" in caplog.text


def test_a_misspelt_argument_is_named(warnings):
    SpadeConfig.from_preset("tiny", local_radus=3)
    assert len(warnings) == 1
    assert "'local_radus'. Did you mean 'local_radius'?" in warnings[0]


def test_a_newer_transformers_may_have_fields_of_its_own(tmp_path, warnings):
    newer = {"model_type": "spade", "zebra": 1, "hiden_size": 3}
    load(tmp_path, {**newer, "transformers_version": "99.0.0"})
    assert len(warnings) == 1
    assert "'hiden_size'" in warnings[0]
    load(tmp_path, {**newer, "transformers_version": transformers.__version__})
    load(tmp_path, {**newer, "transformers_version": "none of these"})
    assert len(warnings) == 2


@pytest.mark.parametrize(("parent", "config_class"), [(T5Config, SRformerT5Config), (BartConfig, SRformerBartConfig)])
def test_leftovers_of_a_parents_file_are_no_ones_mistake(parent, config_class, tmp_path, warnings):
    values = {**json.loads(parent(vocab_size=50).to_json_string()), "zebra": 1, "hiden_size": 2}
    (tmp_path / "config.json").write_text(json.dumps(values), encoding="utf-8")
    assert config_class.from_pretrained(tmp_path).vocab_size == 50
    assert config_class.from_parent(parent.from_pretrained(tmp_path)).vocab_size == 50
    assert not warnings


def test_what_is_computed_cannot_be_given(tmp_path):
    with pytest.raises(ValueError, match=r"layer_types must be left out: it follows from the other fields; got \["):
        load(tmp_path, {"model_type": "spade", "layer_types": ["full_attention"]})


@pytest.mark.parametrize(
    ("model_type", "old", "new", "value"),
    [("spade", "ssm_n_ssm", "ssm_num_copies", 4), ("chela", "kernel_lam", "kernel_squash", 0.25)],
)
def test_the_old_name_of_a_field_still_sets_it(model_type, old, new, value, tmp_path, warnings):
    config = tiny_config(model_type, **{old: value})
    assert getattr(config, new) == getattr(config, old) == value
    saved = config.to_dict()
    assert saved[new] == value
    assert old not in saved
    saved[old] = saved.pop(new)
    assert getattr(load(tmp_path, saved), new) == value
    setattr(config, old, 2 * value)
    assert getattr(config, new) == 2 * value
    assert not warnings
