"""The scripts train on the loss alone where a model can compute it and nothing reads the logits."""

import pytest
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import AutoConfig, AutoModelForSeq2SeqLM, T5ForConditionalGeneration

from hf_hybrid import SpadeForConditionalGeneration
from hf_hybrid.training import summarization
from hf_hybrid.training.trainer.loss import can_skip_logits

from ...models.tiny import tiny_model


def _calls(arguments, monkeypatch, model_class, *argv):
    """Run the summarization script; of each call: whether it was in training, and whether it had logits."""
    found = []
    forward = model_class.forward

    def spy(self, *args, **kwargs):
        outputs = forward(self, *args, **kwargs)
        found.append((self.training, outputs.logits is not None))
        return outputs

    spy.__wrapped__ = forward
    monkeypatch.setattr(model_class, "forward", spy)
    summarization.main(arguments(*argv))
    return found


@pytest.mark.parametrize(("more", "logits"), [((), False), (("--label_smoothing_factor", "0.1"), True)])
def test_a_training_step_has_no_logits(more, logits, arguments, tmp_path, monkeypatch):
    found = _calls(
        arguments, monkeypatch, SpadeForConditionalGeneration, "spade", tmp_path / "out", "--do_train", "--do_eval",
        "--max_steps", "1", "--save_strategy", "no", *more,
    )  # fmt: skip
    assert {kept for training, kept in found if training} == {logits}
    assert {kept for training, kept in found if not training} == {logits}  # its metrics are the loss alone


def test_which_models_are_asked():
    spade = tiny_model("spade", "AutoModelForSeq2SeqLM")
    assert can_skip_logits(spade)
    assert can_skip_logits(get_peft_model(spade, LoraConfig(target_modules=["q_proj"])))
    t5 = AutoModelForSeq2SeqLM.from_config(
        AutoConfig.for_model("t5", d_model=8, d_ff=8, d_kv=4, num_heads=2, num_layers=1, vocab_size=16)
    )
    assert isinstance(t5, T5ForConditionalGeneration)
    assert not can_skip_logits(t5)
    assert not can_skip_logits(nn.Linear(2, 2))
