"""Checkpoints that version 0.1.0 saved load, and compute what they computed there.

`saved_by_0_1_0/` was written by that version and is never written anew; a later one cannot. Each model there was made
by `from_config` after `torch.manual_seed`, from a config that sets its role and sizes (widths, layers, heads, reach,
taps, a state's size) and leaves every other field at the default of 0.1.0. Then normal noise of standard deviation
0.2 was added to all that is stored, so that no weight is at a special starting value (thresholds of neurons were kept
positive), and `save_pretrained` wrote the folder. Beside it, `expected.safetensors` holds inputs and float32 logits
as `<case>.<name>`: a short and a long batch, and one with a row that is padded on the right.
"""

import json
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file
from transformers import AutoConfig, PreTrainedModel

from hf_hybrid.models.auto import ARCHITECTURES
from hf_hybrid.models.checks import known_fields

from ..tolerances import TOLERANCES, assert_close

SAVED = Path(__file__).parent / "saved_by_0_1_0"
# folder -> class that was saved
CLASSES = {
    "bst_multi_filter": "BstForCausalLM",
    "bst_single_head": "BstForCausalLM",
    "chela_causal_lm": "ChelaForCausalLM",
    "chela_masked_lm": "ChelaForMaskedLM",
    "spade_causal_lm": "SpadeForCausalLM",
    "spade_seq2seq_lm": "SpadeForConditionalGeneration",
    "srformer_bart": "SRformerBartForConditionalGeneration",
    "srformer_t5": "SRformerT5ForConditionalGeneration",
}
# model type -> fields that say what is computed from the same weights, with another value than was saved
OTHER_VALUES = {
    "bst": {
        "context_input": "raw",
        "include_self": False,
        "qk_norm": False,
        "scale_decoder_outputs": False,
        "scale_embeddings": True,
        "sliding_context_layers": False,
    },
    "chela": {
        "attention_norm": "none",
        "gate_residual": "normed",
        "layer_norm_eps": 1e-3,
        "long_conv_skip": False,
        "scale_embeddings": True,
    },
    "spade": {
        "concat_order": "global_local",
        "layer_norm_eps": 1e-3,
        "local_radius": 2,
        "scale_attention": False,
        "scale_decoder_outputs": True,
    },
    "srformer_bart": {
        "cross_attention_mode": "own_segment",
        "horizon_mode": "fixed",
        "kv_clamp": 0.1,
        "norm_type": "none",
        "segment_size": 3,
    },
    "srformer_t5": {
        "cross_attention_mode": "own_segment",
        "horizon_mode": "fixed",
        "norm_type": "none",
        "scale_decoder_outputs": False,
        "segment_size": 3,
    },
}
# of BART: a softmax does not see what is added to all scores of a query
WITHOUT_EFFECT = "self_attn.k_proj.bias"

every_folder = pytest.mark.parametrize("name", sorted(CLASSES))


def read_json(folder: Path, file: str) -> dict:
    return json.loads((folder / file).read_text(encoding="utf-8"))


def auto_class_of(folder: Path) -> type:
    """The Auto class of what a folder says that it holds."""
    saved = read_json(folder, "config.json")
    _, models = ARCHITECTURES[saved["model_type"]]
    (architecture,) = saved["architectures"]
    (auto_class,) = (name for name, model_class in models.items() if model_class.__name__ == architecture)
    return getattr(transformers, auto_class)


def load(folder: Path, **options) -> PreTrainedModel:
    return auto_class_of(folder).from_pretrained(folder, **options).eval()


def cases_of(name: str) -> dict[str, dict[str, torch.Tensor]]:
    """For each case the inputs, and the logits that version 0.1.0 computed from them."""
    cases: dict[str, dict[str, torch.Tensor]] = {}
    for key, tensor in load_file(SAVED / name / "expected.safetensors").items():
        case, _, field = key.partition(".")
        cases.setdefault(case, {})[field] = tensor
    assert sorted(cases) == ["long", "padded", "short"]
    return cases


@torch.no_grad()
def compute(model: PreTrainedModel, case: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits of a model and those of version 0.1.0, of the tokens that are no padding."""
    inputs = {field: tensor for field, tensor in case.items() if field != "logits"}
    logits, expected = model(**inputs).logits, case["logits"]
    if "attention_mask" in inputs and "decoder_input_ids" not in inputs:
        kept = inputs["attention_mask"].bool()
        logits, expected = logits[kept], expected[kept]
    return logits, expected


def agrees(model: PreTrainedModel, cases: dict[str, dict[str, torch.Tensor]]) -> bool:
    """Whether a model computes what version 0.1.0 did, in all cases."""
    try:
        for case in cases.values():
            assert_close(*compute(model, case), "float32 model")
    except AssertionError:
        return False
    return True


def test_every_architecture_of_0_1_0_is_here():
    assert {folder.name for folder in SAVED.iterdir()} == set(CLASSES)
    assert {read_json(SAVED / name, "config.json")["model_type"] for name in CLASSES} == set(OTHER_VALUES)


@every_folder
def test_logits_are_those_of_0_1_0(name):
    model, loading = auto_class_of(SAVED / name).from_pretrained(SAVED / name, output_loading_info=True)
    assert {"missing_keys", "unexpected_keys", "mismatched_keys"} <= set(loading)
    assert not any(loading.values()), loading
    assert type(model).__name__ == CLASSES[name]
    for case in cases_of(name).values():
        logits, expected = compute(model.eval(), case)
        assert logits.dtype == expected.dtype == torch.float32
        assert_close(logits, expected, "float32 model")


@every_folder
def test_every_field_is_what_the_file_says(name, tmp_path):
    model = load(SAVED / name)
    saved = read_json(SAVED / name, "config.json")
    version = saved.pop("transformers_version")
    assert version.startswith("5.")
    assert len(saved) > 30
    assert set(saved) <= known_fields(type(model.config))  # no warning of a field that the user has not written
    model.save_pretrained(tmp_path)
    for config in (model.config, AutoConfig.from_pretrained(SAVED / name), AutoConfig.from_pretrained(tmp_path)):
        loaded = json.loads(config.to_json_string(use_diff=False))
        assert {field: loaded[config.attribute_map.get(field, field)] for field in saved} == saved


@every_folder
def test_generation_begins_and_ends_as_the_file_says(name):
    if not (SAVED / name / "generation_config.json").exists():
        assert CLASSES[name].endswith("ForMaskedLM")
        return
    saved = read_json(SAVED / name, "generation_config.json")
    loaded = load(SAVED / name).generation_config.to_dict()
    fields = set(saved) - {"transformers_version", "_from_model_config"}
    assert fields >= {"pad_token_id", "eos_token_id"}
    assert {field: loaded[field] for field in fields} == {field: saved[field] for field in fields}


@every_folder
def test_saved_again_it_computes_the_same(name, tmp_path):
    model = load(SAVED / name)
    model.save_pretrained(tmp_path)
    before, after = (load_file(folder / "model.safetensors") for folder in (SAVED / name, tmp_path))
    assert set(before) == set(after)
    again = load(tmp_path)
    for case in cases_of(name).values():
        assert_close(compute(again, case)[0], compute(model, case)[0], "exact")


@every_folder
def test_a_new_model_of_the_config_is_of_the_same_build(name):
    torch.manual_seed(0)
    config = AutoConfig.from_pretrained(SAVED / name)
    model = auto_class_of(SAVED / name).from_config(config).eval()
    loaded = load(SAVED / name)
    assert type(model) is type(loaded)
    shapes, saved_shapes = ({key: x.shape for key, x in m.state_dict().items()} for m in (model, loaded))
    assert shapes == saved_shapes
    cases = cases_of(name)
    for case in cases.values():
        logits, expected = compute(model, case)
        assert logits.shape == expected.shape
        assert torch.isfinite(logits).all()
    assert not agrees(model, cases)


@every_folder
def test_a_changed_weight_is_noticed(name):
    model, cases = load(SAVED / name), cases_of(name)
    stored = sorted(load_file(SAVED / name / "model.safetensors"))
    with torch.no_grad():
        model.state_dict()[stored[len(stored) // 2]].flatten()[0] += 0.05
    assert not agrees(model, cases)


@every_folder
def test_logits_depend_on_every_weight(name):
    """Otherwise one that is lost or read differently would not be noticed."""
    model = load(SAVED / name)
    weights = model.state_dict(keep_vars=True)
    stored = {key: weights[key].requires_grad_() for key in load_file(SAVED / name / "model.safetensors")}
    assert len(stored) > 20
    inputs = {field: tensor for field, tensor in cases_of(name)["long"].items() if field != "logits"}
    logits = model(**inputs).logits
    (logits * torch.randn(logits.shape, generator=torch.Generator().manual_seed(0))).sum().backward()
    weak = [key for key, weight in stored.items() if weight.grad is None or weight.grad.abs().max() < 1e-2]
    assert all(WITHOUT_EFFECT in key for key in weak), weak


@every_folder
def test_logits_depend_on_the_fields(name):
    cases = cases_of(name)
    saved = read_json(SAVED / name, "config.json")
    for field, value in OTHER_VALUES[saved["model_type"]].items():
        assert saved[field] != value, field
        assert not agrees(load(SAVED / name, **{field: value}), cases), field


def test_the_tolerance_is_far_below_what_is_compared():
    for name in CLASSES:
        for case in cases_of(name).values():
            assert case["logits"].abs().max() > 0.5
            assert case["logits"].std() > 1e4 * TOLERANCES["float32 model"].rtol
