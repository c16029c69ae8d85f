"""The files in configs/ say what accelerate and transformers understand, and fit the models."""

import json
from pathlib import Path

import pytest
import torch
import transformers
from accelerate import FullyShardedDataParallelPlugin
from accelerate.commands.config.config_args import load_config_from_file
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.utils import DistributedType
from accelerate.utils.deepspeed import HfDeepSpeedConfig
from accelerate.utils.fsdp_utils import fsdp2_prepare_auto_wrap_policy
from accelerate.utils.launch import prepare_multi_gpu_env
from transformers.integrations import deepspeed

import hf_hybrid
from hf_hybrid.training.flags.run import ScriptTrainingArguments

CONFIGS = Path(__file__).parents[2] / "configs"
ZERO = sorted(CONFIGS.glob("deepspeed_zero*.json"))


class _Config(deepspeed.HfTrainerDeepSpeedConfig, HfDeepSpeedConfig):
    """Transformers' class with the base that it has where DeepSpeed is installed."""


def _launched(name, monkeypatch):
    """What ``accelerate launch --config_file`` makes of a file: its arguments."""
    monkeypatch.chdir(CONFIGS.parent)  # as the commands of the docs are typed
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    arguments = launch_command_parser().parse_args(["--config_file", str(CONFIGS / name), "run_clm.py"])
    return _validate_launch_command(arguments)[0]


def test_every_file_is_looked_at():
    assert {path.name for path in CONFIGS.iterdir()} == {
        "accelerate_fsdp.yaml",
        "accelerate_deepspeed.yaml",
        *(path.name for path in ZERO),
    }
    assert len(ZERO) == 2


def test_accelerate_wraps_the_models_layers_by_the_fsdp_file(monkeypatch):
    config = load_config_from_file(str(CONFIGS / "accelerate_fsdp.yaml"))
    assert config.distributed_type == DistributedType.FSDP
    arguments = _launched("accelerate_fsdp.yaml", monkeypatch)
    assert arguments.use_fsdp
    for name, value in prepare_multi_gpu_env(arguments).items():
        if name.startswith("FSDP_"):
            monkeypatch.setenv(name, value)
    plugin = FullyShardedDataParallelPlugin()
    assert plugin.fsdp_version == 2
    for preset in (hf_hybrid.SpadeConfig, hf_hybrid.BstConfig, hf_hybrid.ChelaConfig):
        with torch.device("meta"):
            model = transformers.AutoModel.from_config(preset.from_preset("tiny"))
        wraps = fsdp2_prepare_auto_wrap_policy(plugin, model)
        assert sum(map(wraps, model.modules())) >= model.config.num_hidden_layers


def test_the_deepspeed_file_names_its_stage(monkeypatch):
    config = load_config_from_file(str(CONFIGS / "accelerate_deepspeed.yaml"))
    assert config.distributed_type == DistributedType.DEEPSPEED
    arguments = _launched("accelerate_deepspeed.yaml", monkeypatch)
    assert arguments.use_deepspeed
    assert Path(arguments.deepspeed_config_file).resolve() in ZERO


@pytest.mark.parametrize("path", ZERO, ids=lambda path: path.stem)
@pytest.mark.parametrize("model_type", sorted(hf_hybrid.ARCHITECTURES))
def test_transformers_completes_the_deepspeed_files(path, model_type, tmp_path, monkeypatch):
    """All that is "auto" gets a value, nothing contradicts the flags, and no section casts state space models."""
    monkeypatch.setattr(deepspeed, "dep_version_check", lambda name: None)  # whether it is installed
    monkeypatch.setattr(deepspeed, "_hf_deepspeed_config_weak_ref", None)
    arguments = ScriptTrainingArguments(
        output_dir=str(tmp_path), do_train=True, use_cpu=True, per_device_train_batch_size=3
    )
    with torch.device("meta"):
        model = transformers.AutoModel.from_config(transformers.AutoConfig.for_model(model_type))
    config = _Config(str(path))
    config.trainer_config_process(arguments)
    config.trainer_config_finalize(arguments, model, num_training_steps=10)
    assert "auto" not in json.dumps(config.config).replace("torch_autocast", "")
    assert config.config["train_micro_batch_size_per_gpu"] == 3
    assert config.is_zero3() == path.stem.endswith("3")
    assert not {"bf16", "fp16", "optimizer"} & config.config.keys()
    assert config.config["torch_autocast"] == {"enabled": True, "dtype": "bfloat16"}
