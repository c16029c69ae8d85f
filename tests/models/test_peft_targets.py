"""Adapters of PEFT on every registered model class, with the defaults of its architecture."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers
from peft import AdaLoraConfig, IA3Config, LoraConfig, PeftModel, get_peft_model
from peft.utils import constants

import hf_hybrid
from hf_hybrid.models.auto import ARCHITECTURES
from hf_hybrid.models.peft_targets import METHODS, PARENTS

from ..matrix import some
from ..tolerances import assert_close
from .tiny import GENERATIVE, MODEL_CLASSES, main_output, tiny_inputs, tiny_model

CASES = [(*names, method) for names in MODEL_CLASSES for method in METHODS if method == "lora" or names in GENERATIVE]
CASES += [("chela", "AutoModelForSequenceClassification", "ia3")]  # whose head consists of others


def train(model, steps):
    """Fit random outputs for a few steps; returns the losses."""
    model.train()
    inputs = tiny_inputs(model.get_base_model())
    target = torch.randn(main_output(model(**inputs)).shape, generator=torch.Generator().manual_seed(4))
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = (main_output(model(**inputs)) - target).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    model.eval()
    return losses


@pytest.mark.parametrize(
    ("model_type", "auto_class", "method"), some(CASES, *(case for case in CASES if case[:2] in GENERATIVE), CASES[-1])
)
def test_an_adapter_from_its_training_to_the_merged_model(model_type, auto_class, method, tmp_path):
    model = tiny_model(model_type, auto_class, dropout=0.0, attention_dropout=0.0)
    inputs = tiny_inputs(model)
    model.save_pretrained(tmp_path / "base")
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    untrained = main_output(model(**inputs))
    adapted = get_peft_model(model, hf_hybrid.peft_config(model, method))
    assert_close(main_output(adapted.eval()(**inputs)), untrained, "float32 model")

    losses = train(adapted, 5)
    assert losses[-1] < losses[0]
    after = {
        name.removeprefix("base_model.model.").replace(".base_layer.", ".").replace(".original_module.", "."): tensor
        for name, tensor in adapted.state_dict().items()
    }
    for name, tensor in before.items():
        assert torch.equal(after[name], tensor), name
    for name, parameter in adapted.named_parameters():
        kinds = ("lora_", "ia3_", ".modules_to_save.")
        assert parameter.requires_grad == any(kind in name for kind in kinds), name

    trained = main_output(adapted(**inputs))
    adapted.save_pretrained(tmp_path / "adapter")
    base = getattr(transformers, auto_class).from_pretrained(tmp_path / "base")
    assert_close(main_output(PeftModel.from_pretrained(base, tmp_path / "adapter").eval()(**inputs)), trained, "exact")
    adapted.merge_and_unload().save_pretrained(tmp_path / "merged")
    merged = getattr(transformers, auto_class).from_pretrained(tmp_path / "merged").eval()
    assert not any("lora_" in name or "ia3_" in name for name in merged.state_dict())
    assert_close(main_output(merged(**inputs)), trained, "float32 decode")  # as many other roundings as decoding


@pytest.mark.parametrize(("model_type", "auto_class"), GENERATIVE)
def test_a_merged_model_generates_as_the_adapted_one(model_type, auto_class):
    model = tiny_model(model_type, auto_class)
    config = hf_hybrid.peft_config(model, "lora", init_lora_weights=False, lora_alpha=64)
    adapted = get_peft_model(model, config).eval()
    ids = tiny_inputs(model)["input_ids"]
    options = {"max_new_tokens": 8, "min_new_tokens": 8, "do_sample": False}
    expected = adapted.generate(input_ids=ids, num_beams=2, **options)
    with adapted.disable_adapter():
        untouched = adapted.generate(input_ids=ids, num_beams=2, **options)
    assert not torch.equal(untouched, expected)
    assert torch.equal(adapted.merge_and_unload().generate(ids, num_beams=2, **options), expected)


@pytest.mark.parametrize("method", METHODS)
def test_a_gate_that_shares_its_map_is_adapted_with_it(method):
    """CHELA: an adapter on the value's map also changes the gate, before merging as after it."""
    model = tiny_model("chela", "AutoModelForCausalLM", share_gate_value_proj=True)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.unit.v_proj.bias.normal_()
            layer.unit.gate_bias.normal_()
    inputs = tiny_inputs(model)
    adapted = get_peft_model(model, hf_hybrid.peft_config(model, method))
    train(adapted, 3)
    expected = main_output(adapted(**inputs))
    assert_close(main_output(adapted.merge_and_unload()(**inputs)), expected, "float32 decode")


@pytest.mark.parametrize(
    "config",
    [LoraConfig(task_type="SEQ_2_SEQ_LM"), LoraConfig(use_dora=True), IA3Config(), AdaLoraConfig(total_step=10)],
    ids=lambda config: config.peft_type.value,
)
@pytest.mark.parametrize("model_type", sorted(ARCHITECTURES))
def test_the_configs_of_peft_need_no_targets(model_type, config):
    auto_class = next(
        name for name in ("AutoModelForSeq2SeqLM", "AutoModelForCausalLM") if name in _classes(model_type)
    )
    model = tiny_model(model_type, auto_class)
    config = type(config)(**{**config.to_dict(), "task_type": None})
    adapted = get_peft_model(model, config)
    layers = [name for name, _ in adapted.named_modules() if name.endswith((".lora_A", ".ia3_l"))]
    assert any(f".{place}." in name for name in layers for place in ("1", "decoder")), "in every layer"
    assert torch.isfinite(main_output(adapted(**tiny_inputs(model)))).all()


def _classes(model_type):
    return ARCHITECTURES[model_type][1]


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("model_type", PARENTS)
def test_gates_are_trained_with_the_adapter_of_what_was_made_of_a_parent(model_type, method):
    model = tiny_model(model_type, "AutoModelForSeq2SeqLM", recurrent_init="gated", dropout=0.0, attention_dropout=0.0)
    inputs = tiny_inputs(model)
    adapted = get_peft_model(model, hf_hybrid.peft_config(model, method))
    train(adapted, 3)
    trained = [p for name, p in adapted.named_parameters() if "recurrent_gate.modules_to_save" in name]
    assert len(trained) == 2
    assert all((gate != 0).all() for gate in trained)
    expected = main_output(adapted(**inputs))
    assert_close(main_output(adapted.merge_and_unload()(**inputs)), expected, "float32 decode")


def test_what_reads_the_state_space_model_is_adapted():
    for mode, name in (("concat", "aggregate"), ("residual", "global_proj")):
        model = tiny_model("spade", "AutoModelForSeq2SeqLM", combine_mode=mode)
        adapted = get_peft_model(model, LoraConfig())
        assert any(f".{name}.lora_A" in module for module, _ in adapted.named_modules())


def test_srformer_takes_over_what_peft_says_of_its_parent():
    tables = [table for name, table in vars(constants).items() if name.endswith("_MODULES_MAPPING")]
    for model_type, parent in PARENTS.items():
        assert sum(parent in table for table in tables) > 10
        assert all(table.get(model_type) == table.get(parent) for table in tables)


def test_peft_is_not_needed_before_a_model_is_there():
    """The defaults are there when peft is loaded last, as when it was there first."""
    statements = [
        "import sys, hf_hybrid",
        "hf_hybrid.register()",
        "model = hf_hybrid.BstForCausalLM(hf_hybrid.BstConfig.from_preset('tiny', vocab_size=9))",
        "assert 'peft' not in sys.modules",
        "import peft",
        "print(sorted(peft.get_peft_model(model, peft.IA3Config()).peft_config['default'].target_modules))",
        "print(sum(type(finder).__name__ == '_TablesFinder' for finder in sys.meta_path))",
    ]
    command = [sys.executable, "-c", "\n".join(statements)]
    run = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True, check=False)
    assert run.stdout.splitlines() == ["['down_proj', 'k_proj', 'v_proj']", "1"], run.stderr

    finders = list(sys.meta_path)
    for model_type in ARCHITECTURES:
        constants.TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING.pop(model_type)
    hf_hybrid.register()
    assert set(constants.TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING) >= set(ARCHITECTURES)
    assert sys.meta_path == finders


def test_what_peft_config_chooses():
    model = tiny_model("spade", "AutoModelForSequenceClassification")
    config = hf_hybrid.peft_config(model, "dora", r=4)
    assert (config.task_type, config.modules_to_save, config.use_dora, config.r) == ("SEQ_CLS", ["dense"], True, 4)
    assert hf_hybrid.peft_config(model, modules_to_save=["classifier"]).modules_to_save == ["classifier"]
    srformer = hf_hybrid.peft_config(tiny_model("srformer_t5", "AutoModelForSeq2SeqLM"), "ia3")
    assert (srformer.task_type, srformer.modules_to_save) == ("SEQ_2_SEQ_LM", ["raf"])
    gated = tiny_model("srformer_t5", "AutoModelForSeq2SeqLM", recurrent_init="gated")
    assert hf_hybrid.peft_config(gated).modules_to_save == ["raf", "recurrent_gate"]
    other = transformers.BertForSequenceClassification(
        transformers.BertConfig(vocab_size=9, hidden_size=8, num_hidden_layers=1, num_attention_heads=1)
    )
    assert hf_hybrid.peft_config(other).modules_to_save is None  # its "dense" layers are its body's
    with pytest.raises(ValueError, match=r"method must be one of lora, dora, ia3; got 'lorra'. Did you mean 'lora'\?"):
        hf_hybrid.peft_config(model, "lorra")
