import contextlib
import logging
from types import SimpleNamespace

import pytest
import torch
from accelerate import FullyShardedDataParallelPlugin
from torch import nn
from transformers import AutoConfig, AutoModelForSeq2SeqLM, Trainer

import hf_hybrid
from hf_hybrid.training import summarization
from hf_hybrid.training.trainer.optimizer import separate_ssm_parameters
from hf_hybrid.training.trainer.script_trainer import ScriptTrainer, SummarizationTrainer


class _Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.log_dt = nn.Parameter(torch.zeros(3))
        self.C = nn.Parameter(torch.zeros(3))
        self.frozen = nn.Parameter(torch.zeros(3), requires_grad=False)

    def ssm_parameters(self, dynamics):
        return [self.log_dt, self.frozen] if dynamics else [self.C]


def _optimizer(model):
    decayed, plain = [model.linear.weight, model.log_dt, model.C], [model.linear.bias]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": plain, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=1e-2)


@pytest.mark.parametrize(("rate", "expected"), [(None, 1e-2), (1e-3, 1e-3), (0.0, 0.0)])
def test_state_space_parameters_get_their_own_group(rate, expected):
    model = _Model()
    optimizer = _optimizer(model)
    assert separate_ssm_parameters(optimizer, model, rate) == 2
    assert separate_ssm_parameters(optimizer, model, rate) == 2  # nothing more happens
    assert [len(group["params"]) for group in optimizer.param_groups] == [1, 1, 1, 1]
    others, dynamics = optimizer.param_groups[2:]
    assert others["params"][0] is model.C
    assert dynamics["params"][0] is model.log_dt
    assert (others["weight_decay"], others["lr"]) == (0.0, 1e-2)
    assert (dynamics["weight_decay"], dynamics["lr"]) == (0.0, expected)
    assert optimizer.param_groups[0]["weight_decay"] == 0.1


def test_a_model_without_state_spaces_keeps_its_groups():
    model = nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1.0)
    assert separate_ssm_parameters(optimizer, model) == 0
    assert len(optimizer.param_groups) == 1


def _groups(arguments, folder, monkeypatch, *more, overrides=""):
    """Train a SPADE for one step; the trainer's optimizer groups and scheduler, and its model."""
    seen = {}
    create = SummarizationTrainer.create_scheduler

    def spy(self, *args, **kwargs):
        seen["trainer"] = self
        return create(self, *args, **kwargs)

    monkeypatch.setattr(SummarizationTrainer, "create_scheduler", spy)
    argv = arguments(
        "spade", folder, "--do_train", "--max_steps", "2", "--save_strategy", "no", *more, overrides=overrides
    )
    summarization.main(argv)
    return seen["trainer"]


def test_spade_trains_its_state_spaces_without_decay_and_at_their_own_rate(arguments, tmp_path, monkeypatch):
    trainer = _groups(
        arguments, tmp_path / "out", monkeypatch, "--weight_decay", "0.1", "--learning_rate", "0.01",
        "--ssm_learning_rate", "0.001", "--lr_scheduler_type", "constant", overrides="ssm_freeze=none",
    )  # fmt: skip
    groups = trainer.optimizer.param_groups
    names = {id(parameter): name for name, parameter in trainer.model.named_parameters()}

    def inside(group):
        return {names[id(parameter)].rsplit(".", 1)[-1] for parameter in group["params"]}

    assert inside(groups[2]) == {"C", "D"}
    assert inside(groups[3]) == {"B", "P", "log_A_real", "A_imag", "log_dt"}
    rates = [(group["lr"], group["weight_decay"]) for group in groups]
    assert rates == [(0.01, 0.1), (0.01, 0.0), (0.01, 0.0), (0.001, 0.0)]
    for parameter in groups[0]["params"]:
        assert "bias" not in names[id(parameter)].rsplit(".", 1)[-1]
        assert "norm" not in names[id(parameter)]
    everything = [id(parameter) for group in groups for parameter in group["params"]]
    assert sorted(everything) == sorted(id(p) for p in trainer.model.parameters() if p.requires_grad)


def test_a_rate_without_trained_state_spaces_is_warned_about(arguments, tmp_path, monkeypatch, caplog):
    with caplog.at_level(logging.WARNING):
        _groups(arguments, tmp_path / "out", monkeypatch, "--ssm_learning_rate", "0.001", overrides="ssm_freeze=all")
    assert "--ssm_learning_rate 0.001 has no effect" in caplog.text


def test_importing_the_package_registers_spade():
    assert "spade" in hf_hybrid.ARCHITECTURES
    assert AutoModelForSeq2SeqLM._model_mapping[type(AutoConfig.for_model("spade"))].__name__.startswith("Spade")


def test_predictions_keep_the_order_of_their_documents(arguments, tmp_path, monkeypatch):
    """Grouping by length is for training; line N of the predictions must be about document N."""
    kept = {}

    class Spy(SummarizationTrainer):
        def predict(self, test_dataset, **kwargs):
            kept["expected"] = list(test_dataset["labels"])
            kept["output"] = super().predict(test_dataset, **kwargs)
            return kept["output"]

    monkeypatch.setattr(summarization, "SummarizationTrainer", Spy)
    summarization.main(
        arguments(
            "spade", tmp_path / "out", "--do_predict", "--predict_with_generate", "--do_train", "--max_steps", "1",
            "--per_device_eval_batch_size", "1", "--train_sampling_strategy", "group_by_length",
        )
    )  # fmt: skip
    assert len({len(labels) for labels in kept["expected"]}) > 1
    for row, labels in zip(kept["output"].label_ids.tolist(), kept["expected"], strict=True):
        assert row[: len(labels)] == labels
        assert set(row[len(labels) :]) <= {-100, 0}


@pytest.mark.parametrize(("freeze", "casts"), [("all", True), ("none", False)])
def test_fsdp_casts_no_trained_state_space(freeze, casts, monkeypatch):
    def prepare(self):
        state = SimpleNamespace(fsdp_plugin=plugin)
        self.accelerator = SimpleNamespace(state=state, autocast=lambda: torch.autocast("cpu", torch.bfloat16))

    plugin = FullyShardedDataParallelPlugin(fsdp_version=2)
    plugin.set_mixed_precision("bf16")
    monkeypatch.setattr(Trainer, "create_accelerator_and_postprocess", prepare)
    monkeypatch.setattr(Trainer, "autocast_smart_context_manager", lambda self: contextlib.nullcontext())
    trainer = ScriptTrainer.__new__(ScriptTrainer)  # whose FSDP would cast to bfloat16
    trainer.model = AutoModelForSeq2SeqLM.from_config(hf_hybrid.SpadeConfig.from_preset("tiny", ssm_freeze=freeze))
    trainer.create_accelerator_and_postprocess()
    assert (plugin.mixed_precision_policy is not None) == casts
    with trainer.autocast_smart_context_manager():
        product = torch.ones(2, 2) @ torch.ones(2, 2)
    assert product.dtype == (torch.float32 if casts else torch.bfloat16)
    plugin = None
    trainer.create_accelerator_and_postprocess()  # without FSDP there is nothing to change
