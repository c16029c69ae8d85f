"""TRL fine-tunes from folders: the losses are the models' own, packed or not, and preferences begin at ln 2."""

import math

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import DPOConfig, DPOTrainer, RewardConfig, RewardTrainer, SFTConfig, SFTTrainer

from .folders import save

CAUSAL = ["bst", "chela", "spade"]
TEXTS = ["the cat sat on the mat", "a dog ran", "birds", "what a long sentence about nothing this is"]
ARGUMENTS = {
    "report_to": "none",
    "use_cpu": True,
    "bf16": False,
    "logging_steps": 1,
    "max_steps": 1,
    "per_device_train_batch_size": len(TEXTS),
    "gradient_checkpointing": False,
}


@pytest.fixture(params=CAUSAL)
def folder(request, tmp_path):
    # without dropout, so that a loss can be computed again
    none = {"dropout": 0.0, "attention_dropout": 0.0} if request.param != "chela" else {"dropout": 0.0}
    save(tmp_path / "model", request.param, "AutoModelForCausalLM", **none)
    return tmp_path / "model"


def own_loss(folder) -> float:
    """The mean loss over all tokens of the texts, as SFT trains them: with an end token."""
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    total, count = 0.0, 0
    for text in TEXTS:
        ids = torch.tensor([tokenizer(text + tokenizer.eos_token)["input_ids"]])
        tokens = ids.shape[1] - 1
        with torch.no_grad():
            total += tokens * model(ids, labels=ids).loss.item()
        count += tokens
    return total / count


@pytest.mark.parametrize("packing", [False, True])
def test_supervised_fine_tuning(folder, packing, tmp_path):
    options = {"packing": True, "max_length": 128, "per_device_train_batch_size": 1} if packing else {}
    arguments = SFTConfig(str(tmp_path / "run"), **{**ARGUMENTS, **options})
    trainer = SFTTrainer(str(folder), args=arguments, train_dataset=Dataset.from_dict({"text": TEXTS}))
    trainer.train()
    assert trainer.state.log_history[0]["loss"] == pytest.approx(own_loss(folder), rel=1e-4)


def test_an_adapter_with_default_targets(folder, tmp_path):
    arguments = SFTConfig(str(tmp_path / "run"), **ARGUMENTS)
    data = Dataset.from_dict({"text": TEXTS})
    trainer = SFTTrainer(str(folder), args=arguments, train_dataset=data, peft_config=LoraConfig())
    trainer.train()
    assert trainer.state.log_history[0]["loss"] == pytest.approx(own_loss(folder), rel=1e-4)
    trained = [name for name, parameter in trainer.model.named_parameters() if parameter.requires_grad]
    assert trained
    assert all("lora_" in name for name in trained)


def test_preferences(folder, tmp_path):
    data = Dataset.from_dict({"prompt": ["q", "w"], "chosen": [" yes", " no"], "rejected": [" nope", " maybe so"]})
    arguments = DPOConfig(str(tmp_path / "run"), **{**ARGUMENTS, "per_device_train_batch_size": 2})
    tokenizer = AutoTokenizer.from_pretrained(folder)
    trainer = DPOTrainer(str(folder), args=arguments, train_dataset=data, processing_class=tokenizer)
    trainer.train()
    assert trainer.state.log_history[0]["loss"] == pytest.approx(math.log(2), abs=1e-4)


def test_rewards(folder, tmp_path):
    data = Dataset.from_dict({"chosen": ["q yes", "w no"], "rejected": ["q nope", "w maybe so"]})
    arguments = RewardConfig(str(tmp_path / "run"), **{**ARGUMENTS, "per_device_train_batch_size": 2})
    tokenizer = AutoTokenizer.from_pretrained(folder)
    trainer = RewardTrainer(str(folder), args=arguments, train_dataset=data, processing_class=tokenizer)
    trainer.train()
    assert math.isfinite(trainer.state.log_history[0]["loss"])
