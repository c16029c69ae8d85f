"""``--peft``: adapters in the three scripts, and folders of adapters as models."""

import json
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM, AutoModelForSequenceClassification

from hf_hybrid.training import clm, glue, summarization
from hf_hybrid.training.arguments import ModelArguments

from ..tolerances import assert_close
from .conftest import MODELS

BST = "hidden_size=32,num_hidden_layers=2,num_attention_heads=4,intermediate_size=32,window=8,bst_layers=[1]"
IDS = torch.tensor([[5, 6, 7, 8, 9]])


def from_checkpoint(command, folder):
    """The command with a checkpoint in place of a new model."""
    start = command.index("--model_type")
    return [*command[:start], "--model_name_or_path", str(folder), *command[start + 6 :]]


def read(*path):
    return json.loads(Path(*path).read_text(encoding="utf-8"))


def adapter_weights(folder):
    return load_file(Path(folder, "adapter_model.safetensors"))


@pytest.fixture(scope="module")
def summarizer(arguments, tmp_path_factory):
    """A SPADE and a tokenizer, as the script leaves them."""
    folder = tmp_path_factory.mktemp("spade")
    summarization.main(arguments("spade", folder, "--do_train", "--max_steps", "1"))
    return folder


@pytest.fixture
def adapt(arguments, summarizer):
    """A function: output folder and flags to a run that trains an adapter of the summarizer."""

    def run(output, *more, base=summarizer, method="lora"):
        command = from_checkpoint(arguments("spade", output), base)
        flags = ["--do_train", "--learning_rate", "1e-2", "--seed", "3", *(["--peft", method] if method else [])]
        return summarization.main([*command, *flags, *more])

    return run


def test_an_adapter_of_a_summarizer(adapt, summarizer, arguments, tmp_path):
    """It is trained, resumed and merged; its folder alone is evaluated, and goes on being trained."""
    before = {path.name: path.read_bytes() for path in summarizer.iterdir() if path.is_file()}
    whole, output = tmp_path / "whole", tmp_path / "out"
    more = ["--do_eval", "--predict_with_generate", "--peft_config", "r=4,lora_alpha=8", "--max_steps", "3"]
    more += ["--eval_strategy", "steps", "--eval_steps", "1", "--save_steps", "1", "--load_best_model_at_end"]
    expected = adapt(whole, *more)
    checkpoint = str(whole / "checkpoint-2")
    metrics = adapt(
        output, *more, "--gradient_checkpointing", "--merge_adapter", "--resume_from_checkpoint", checkpoint
    )
    assert {path.name: path.read_bytes() for path in summarizer.iterdir() if path.is_file()} == before
    assert metrics["eval_loss"] == pytest.approx(expected["eval_loss"], rel=1e-6)
    losses = [row["eval_loss"] for row in read(whole, "trainer_state.json")["log_history"] if "eval_loss" in row]
    assert losses[0] > losses[1] > losses[2]
    assert not (output / "model.safetensors").exists()
    config = read(output, "adapter_config.json")
    assert (config["r"], config["lora_alpha"], config["task_type"]) == (4, 8, "SEQ_2_SEQ_LM")
    assert config["base_model_name_or_path"] == str(summarizer)
    assert "peft" in (output / "README.md").read_text()

    alone = summarization.main(
        [*from_checkpoint(arguments("spade", tmp_path / "alone"), output), "--do_eval", "--predict_with_generate"]
    )
    kept = ("eval_loss", "eval_rouge1", "eval_gen_len")
    assert {name: alone[name] for name in kept} == {name: metrics[name] for name in kept}

    adapted, merged, base = (
        AutoModelForSeq2SeqLM.from_pretrained(path).eval() for path in (output, output / "merged_model", summarizer)
    )
    outputs = [model(IDS, decoder_input_ids=IDS).logits for model in (adapted, merged, base)]
    assert_close(outputs[1], outputs[0], "float32 model")
    assert (outputs[2] - outputs[0]).abs().max() > 1e-4
    texts = [model.generate(IDS, max_new_tokens=8, min_new_tokens=8) for model in (adapted, merged)]
    assert torch.equal(*texts)

    further = tmp_path / "further"
    adapt(further, "--max_steps", "1", base=output, method=None)
    old, new = adapter_weights(output), adapter_weights(further)
    assert old.keys() == new.keys()
    assert any(not torch.equal(old[name], new[name]) for name in old)
    assert read(further, "adapter_config.json")["base_model_name_or_path"] == str(summarizer)
