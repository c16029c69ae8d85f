"""Models in shards: what wraps them finds their layers, and training in shards is training."""

import json

import pytest
import torch
import transformers
from accelerate import FullyShardedDataParallelPlugin
from accelerate.utils.fsdp_utils import fsdp2_prepare_auto_wrap_policy
from transformers.modeling_layers import GradientCheckpointingLayer

from ..matrix import some
from ..torchrun import in_forks
from .sharding import CASES, FINE
from .tiny import MODEL_CLASSES, new_model, tiny_model

every_class = pytest.mark.parametrize(("model_type", "auto_class"), MODEL_CLASSES)


@pytest.mark.parametrize("cases", some(CASES, "generative"))
def test_a_step_in_shards_is_a_step_of_the_whole(cases, tmp_path):
    done = in_forks("tests.models.sharding", str(tmp_path), cases)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "found.json").read_text())
    assert found == {"-".join(case): FINE for case in CASES[cases]}


@every_class
@pytest.mark.parametrize("version", [1, 2])
def test_accelerate_wraps_every_layer(model_type, auto_class, version):
    model = tiny_model(model_type, auto_class)
    plugin = FullyShardedDataParallelPlugin(fsdp_version=version, auto_wrap_policy="transformer_based_wrap")
    if version == 1:
        plugin.set_auto_wrap_policy(model)
        classes = plugin.auto_wrap_policy.keywords["transformer_layer_cls"]
        wrapped = [name for name, module in model.named_modules() if type(module) in classes]
    else:
        wraps = fsdp2_prepare_auto_wrap_policy(plugin, model)
        wrapped = [name for name, module in model.named_modules() if wraps(module)]
    layers = [name for name, module in model.named_modules() if isinstance(module, GradientCheckpointingLayer)]
    assert wrapped == layers
    assert len(layers) >= model.config.num_hidden_layers


@every_class
def test_a_module_initialises_itself_alone(model_type, auto_class):
    """As DeepSpeed's third stage has it: each module in turn, its own and its children's tensors there, no others."""
    torch.manual_seed(0)
    built = new_model(model_type, auto_class)
    model = new_model(model_type, auto_class)
    values = {name: parameter.data for name, parameter in model.named_parameters()}
    for parameter in model.parameters():
        parameter.data = parameter.data.new_empty(0)
    by_id = {id(parameter): name for name, parameter in model.named_parameters()}

    def visit(module, initialize):
        for child in module.children():
            inner = child._init_weights if isinstance(child, transformers.PreTrainedModel) else initialize
            visit(child, inner)
        near = [module, *(c for c in module.children() if not isinstance(c, transformers.PreTrainedModel))]
        there = [parameter for one in near for parameter in one.parameters(recurse=False)]
        for parameter in there:
            parameter.data = values[by_id[id(parameter)]]
        with torch.no_grad():
            initialize(module)
        for parameter in there:
            assert torch.isfinite(parameter).all(), by_id[id(parameter)]
            parameter.data = parameter.data.new_empty(0)

    for value in values.values():
        value.fill_(float("nan"))
    visit(model, model._init_weights)
    for name, parameter in built.named_parameters():
        if parameter.unique().numel() == 1:
            assert torch.equal(values[name], parameter), name
        elif parameter.numel() >= 64:
            assert 0.5 < (values[name].std() / parameter.std()).item() < 2, f"{name} starts at another scale"
