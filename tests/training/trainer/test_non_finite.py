import json
import math
import re

import pytest
import torch
from datasets import Dataset

from hf_hybrid.training import clm, steps, summarization
from hf_hybrid.training.errors import RunFailed
from hf_hybrid.training.run_folder.checkpoints import complete_checkpoints
from hf_hybrid.training.trainer.non_finite import NonFiniteLoss, NumberingCollator, describe_examples, number_examples
from hf_hybrid.training.trainer.script_trainer import CausalTrainer, SummarizationTrainer
from tests.matrix import some
from tests.training.conftest import MODELS

STEPS = ("--do_train", "--max_steps", "12", "--save_steps", "3")
CULPRIT = 13
"""The example whose loss is no number."""


def _spoil(monkeypatch, train_class, value=torch.nan):
    """Give batches with the culprit among them a loss that is not finite; returns a list of these batches."""
    compute, batches = train_class.compute_loss, []

    def spoiled(self, model, inputs, return_outputs=False, **kwargs):
        assert "example_positions" not in inputs
        found = compute(self, model, inputs, return_outputs=return_outputs, **kwargs)
        if not model.training:
            return found
        rows = self.train_dataset
        wanted = [list(row["labels"] if "labels" in row else row["input_ids"]) for row in rows]
        held = [[token for token in row if token != -100] for row in inputs["labels"].tolist()]
        held = [[index for index, labels in enumerate(wanted) if labels == row] for row in held]
        if not any(CULPRIT in candidates for candidates in held):
            return found
        batches.append(held)
        return (found[0] * value, found[1]) if return_outputs else found * value

    monkeypatch.setattr(train_class, "compute_loss", spoiled)
    return batches


def _named(error):
    return [int(word) for word in re.search(r"examples ([\d, ]+)", str(error))[1].split(", ")]


WORKERS = pytest.param(("--dataloader_num_workers", "2", "--dataloader_prefetch_factor", "3"), id="workers")
ACCUMULATED = pytest.param(("--gradient_accumulation_steps", "3", "--seed", "5"), id="accumulated")


@pytest.mark.parametrize(
    "more",
    some(
        [
            pytest.param((), id="shuffled"),
            pytest.param(("--train_sampling_strategy", "group_by_length"), id="by length"),
            WORKERS,
            ACCUMULATED,
        ],
        *(WORKERS, ACCUMULATED),
    ),
)
def test_the_examples_of_the_batch_are_named(arguments, tmp_path, monkeypatch, more):
    batches = _spoil(monkeypatch, SummarizationTrainer)
    with pytest.raises(
        NonFiniteLoss, match=r"^training stopped at step \d+: the loss is nan; the batch held"
    ) as caught:
        summarization.main(arguments("t5", tmp_path / "out", *STEPS, "--seed", "3", *more))
    (batch,) = batches
    named = _named(caught.value)
    assert len(named) == len(batch) == 4
    assert CULPRIT in named
    for index, candidates in zip(named, batch, strict=True):  # some summaries are the same
        assert index in candidates
    step = int(re.search(r"at step (\d+)", str(caught.value))[1])
    assert step > 1
    assert complete_checkpoints(tmp_path / "out")[-1].endswith(f"checkpoint-{step - 1}")
    (note,) = caught.value.__notes__
    assert ("was saved after the error" in note) == ((step - 1) % 3 > 0)


def test_the_examples_are_named_after_resuming_too(arguments, tmp_path, monkeypatch):
    argv = arguments("t5", tmp_path / "out", *STEPS, "--seed", "3")
    with monkeypatch.context() as patch:
        _spoil(patch, SummarizationTrainer)
        with pytest.raises(NonFiniteLoss) as first:
            summarization.main(argv)
        with pytest.raises(NonFiniteLoss) as second:
            summarization.main([*argv, "--resume_from_checkpoint", "auto"])
    assert str(first.value) == str(second.value)
    assert "at step 1:" not in str(first.value)
    assert summarization.main([*argv, "--resume_from_checkpoint", "auto"])["train_loss"] > 0


def test_a_gradient_that_is_not_finite_stops_before_the_weights_change(arguments, tmp_path, monkeypatch):
    def spoiled(self, *args, **kwargs):
        loss = step(self, *args, **kwargs)
        if self.state.global_step == 4:
            next(self.model.parameters()).grad.view(-1)[0] = torch.inf
        return loss

    step = SummarizationTrainer.training_step
    monkeypatch.setattr(SummarizationTrainer, "training_step", spoiled)
    with pytest.raises(
        NonFiniteLoss, match="at step 5: the gradient is not finite, though the loss is; the batch held"
    ):
        summarization.main(arguments("t5", tmp_path / "out", *STEPS))
    assert complete_checkpoints(tmp_path / "out")[-1].endswith("checkpoint-4")


def test_steps_that_the_scaler_of_fp16_skips_are_no_reason_to_stop(arguments, tmp_path, monkeypatch):
    scaler, step = torch.amp.GradScaler("cpu", init_scale=64.0), SummarizationTrainer.training_step

    def train(trainer, resume_from, argv):
        trainer.accelerator.scaler = scaler
        return steps.train(trainer, resume_from, argv)

    def overflowing(self, *args, **kwargs):
        loss = step(self, *args, **kwargs)
        if self.state.global_step == 1:
            next(self.model.parameters()).grad.view(-1)[0] = torch.inf
        return loss

    monkeypatch.setattr(SummarizationTrainer, "training_step", overflowing)

    monkeypatch.setattr(summarization, "train", train)
    metrics = summarization.main(arguments("t5", tmp_path / "out", "--do_train", "--max_steps", "3"))
    assert math.isfinite(metrics["train_loss"])
    assert scaler.get_scale() == 32


def test_a_stream_has_positions(tmp_path, data, monkeypatch):
    texts = tmp_path / "texts.txt"
    texts.write_text("".join(f"{index} of the lines, and none of them like another.\n" for index in range(40)))
    argv = [
        "--model_type", "spade", "--config_overrides", MODELS["spade"], "--tokenizer_type", "bytes", "--train_file",
        str(texts), "--cache_dir", str(data["cache"]), "--block_size", "32", "--per_device_train_batch_size", "4",
        "--use_cpu", "--disable_tqdm", "true", "--output_dir", str(tmp_path / "out"), *STEPS, "--streaming",
    ]  # fmt: skip
    calls, compute = [], CausalTrainer.compute_loss

    def spoiled(self, model, inputs, *args, **kwargs):
        calls.append(inputs["input_ids"].tolist())
        loss = compute(self, model, inputs, *args, **kwargs)
        return loss * torch.nan if len(calls) == 3 else loss

    monkeypatch.setattr(CausalTrainer, "compute_loss", spoiled)
    with pytest.raises(
        RunFailed, match="at step 3: the loss is nan; the batch held the examples 8, 9, 10, 11 of the str"
    ):
        clm.main(argv)


def test_positions_survive_workers_of_a_stream():
    words = describe_examples([0, 3, 4], stream=True, workers=2)
    assert words.startswith("the batch held the examples 0 of worker 0, 1 of worker 1, 2 of worker 0 of the stream's")
    rows = number_examples(Dataset.from_dict({"a": [5, 6, 7]}))
    batch = NumberingCollator(lambda examples: {"a": [row["a"] for row in examples]})(rows.__getitems__([2, 0]))
    assert batch["a"] == [7, 5]
    assert batch["example_positions"].tolist() == [2, 0]
    assert describe_examples([], stream=False, workers=0) == "the batch's examples are not known"


def test_an_evaluation_that_is_not_finite_is_reported_as_it_is(arguments, tmp_path, monkeypatch, caplog):
    """Trainer leaves such batches out of the mean."""
    compute, calls = SummarizationTrainer.compute_loss, []

    def spoiled(self, model, inputs, return_outputs=False, **kwargs):
        loss, outputs = compute(self, model, inputs, return_outputs=True, **kwargs)
        calls.append(1)
        loss = loss * torch.nan if len(calls) == 1 else loss
        return (loss, outputs) if return_outputs else loss

    monkeypatch.setattr(SummarizationTrainer, "compute_loss", spoiled)
    argv = arguments("t5", tmp_path / "out", "--do_eval", "--per_device_eval_batch_size", "2")
    metrics = summarization.main(argv)
    assert math.isnan(metrics["eval_loss"])
    assert "not finite: eval_loss is nan" in caplog.text


def test_batches_outside_of_training_carry_nothing(arguments, tmp_path, monkeypatch):
    seen = []

    def train(trainer, resume_from, argv):
        seen.append(set(next(iter(trainer.get_train_dataloader()))))
        return steps.train(trainer, resume_from, argv)

    monkeypatch.setattr(summarization, "train", train)
    summarization.main(arguments("t5", tmp_path / "out", "--do_train", "--max_steps", "1"))
    assert "example_positions" not in seen[0]
    assert json.loads((tmp_path / "out" / "train_results.json").read_text())["train_samples"] == 32
