"""What transformers' Trainer lacks: exact losses for every model, SSM groups, and what stands in the files beside."""

import logging
from typing import Any

import torch
from transformers import Seq2SeqTrainer, Trainer
from transformers.trainer_pt_utils import LabelSmoother, LengthGroupedSampler

from hf_hybrid.data.preprocessing import IGNORED_LABEL
from hf_hybrid.training.adapters import save_base_config
from hf_hybrid.training.hub import HubMixin
from hf_hybrid.training.measuring import MeasuringMixin
from hf_hybrid.training.non_finite import CheckedStepsMixin
from hf_hybrid.training.processes import ProcessesMixin
from hf_hybrid.training.saving import SavingMixin

__all__ = [
    "CausalTrainer",
    "ScriptTrainer",
    "SummarizationTrainer",
    "TrainerMixin",
    "separate_ssm_parameters",
]

logger = logging.getLogger(__name__)


def separate_ssm_parameters(
    optimizer: torch.optim.Optimizer, model: torch.nn.Module, learning_rate: float | None = None
) -> int:
    """Move a model's trained state space parameters into optimizer groups of their own, without weight decay.

    Decay pulls the eigenvalues and step sizes of a state space towards values that mean something (a time constant of
    one step), not towards "small"; S4 and its successors train them without it, often with a smaller learning rate
    (S4, appendix D; S5, appendix G).

    Args:
        optimizer: A new optimizer; its groups are changed in place. Calling twice changes nothing more.
        model: The model. It may have a method ``ssm_parameters(dynamics=None)``; without one there is nothing to move.
        learning_rate: That of the parameters that shape the memory (A, B, Δ; ``dynamics=True``); C and D keep that of
            the first group, as all do when None.

    Returns:
        How many parameter tensors were moved, or had been.
    """
    if any(group.get("ssm") for group in optimizer.param_groups):
        return sum(len(group["params"]) for group in optimizer.param_groups if group.get("ssm"))
    list_parameters = getattr(model, "ssm_parameters", None)
    if list_parameters is None:
        return 0
    rate = optimizer.param_groups[0]["lr"]
    count = 0
    for dynamics, wanted_rate in ((False, None), (True, learning_rate)):
        wanted = {id(parameter) for parameter in list_parameters(dynamics=dynamics)}
        separated: list[torch.nn.Parameter] = []
        for group in optimizer.param_groups:
            separated += [parameter for parameter in group["params"] if id(parameter) in wanted]
            group["params"] = [parameter for parameter in group["params"] if id(parameter) not in wanted]
        if separated:
            own = {"weight_decay": 0.0, "lr": rate if wanted_rate is None else wanted_rate, "ssm": True}
            optimizer.add_param_group({"params": separated, **own})
            count += len(separated)
    return count


class TrainerMixin(MeasuringMixin, CheckedStepsMixin, SavingMixin, HubMixin, ProcessesMixin):
    """Put before a Trainer in the bases.

    Note:
        Trainer divides the loss by the number of accumulation steps only for models that it believes not to do so
        themselves, and it believes it of every model whose forward takes keyword arguments. T5, BART, LED and LongT5
        take them and ignore them: with N accumulation steps their gradients come out N times too large. Here the
        model is asked: if doubling ``num_items_in_batch`` does not halve its loss, the mean that it returns is
        weighted with its share of the label tokens, which makes N small batches equal one large one exactly.
    """

    _loss_counts_items: bool | None = None

    def compute_loss(
        self,
        model: torch.nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: torch.Tensor | int | None = None,
    ) -> Any:
        """Return the loss, normalised by the label tokens of all accumulated batches."""
        compute: Any = super().compute_loss  # type: ignore[misc]
        if not model.training:
            num_items_in_batch = None  # the mean over this process's batch, not over those of all processes
        smoothed = getattr(self, "label_smoother", None) is not None  # Trainer's own, which counts items
        if num_items_in_batch is None or smoothed or "labels" not in inputs:
            return compute(model, inputs, return_outputs=return_outputs, num_items_in_batch=num_items_in_batch)
        # as Trainer counts them: a language model does not predict the first token of a row
        labels = inputs["labels"][..., 1:] if getattr(self, "_loss_shifts_labels", False) else inputs["labels"]
        items = labels.ne(IGNORED_LABEL).sum()
        if self._loss_counts_items is None:
            self._loss_counts_items = _loss_counts_items(model, inputs, items)
            if not self._loss_counts_items and self.args.n_gpu > 1:  # type: ignore[attr-defined]
                # DataParallel returns one mean per GPU: fall back on the mean over batches
                self.model_accepts_loss_kwargs = False
        loss, outputs = compute(model, inputs, return_outputs=True, num_items_in_batch=num_items_in_batch)
        if not self._loss_counts_items and self.args.n_gpu <= 1:  # type: ignore[attr-defined]
            loss = loss * (items / num_items_in_batch)
        return (loss, outputs) if return_outputs else loss

    def _get_eval_sampler(self, eval_dataset: Any) -> torch.utils.data.Sampler[int] | None:
        """Visit evaluation examples in order: Trainer groups them by length too, and predictions lose their documents.

        Note:
            With ``--train_sampling_strategy group_by_length``, Trainer returns predictions in the grouped order, so
            that line N of a predictions file is not about document N.
        """
        grouped = super()._get_eval_sampler(eval_dataset)  # type: ignore[misc]
        if not isinstance(grouped, LengthGroupedSampler):
            return grouped
        single = self.args.world_size <= 1  # type: ignore[attr-defined]
        return torch.utils.data.SequentialSampler(eval_dataset) if single else None

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        """Save the model, and beside an adapter the configuration of its base."""
        super()._save(output_dir, state_dict)  # type: ignore[misc]
        save_base_config(self.model, output_dir or self.args.output_dir)  # type: ignore[attr-defined]

    def create_optimizer(self, model: Any = None) -> torch.optim.Optimizer:
        """Create the optimizer, with the state space parameters in a group of their own."""
        optimizer: torch.optim.Optimizer = super().create_optimizer(model)  # type: ignore[misc]
        owner = self.model if model is None else model  # type: ignore[attr-defined]
        rate = getattr(self.args, "ssm_learning_rate", None)  # type: ignore[attr-defined]
        count = separate_ssm_parameters(optimizer, owner, rate)
        if rate is not None and not count:
            logger.warning("--ssm_learning_rate %s has no effect: the model trains no state space parameters.", rate)
        return optimizer


def _loss_counts_items(model: torch.nn.Module, inputs: dict[str, Any], items: torch.Tensor) -> bool:
    """Whether the model divides its summed loss by ``num_items_in_batch``; decided by asking, without dropout."""
    training = model.training
    model.eval()
    try:
        with torch.no_grad():
            once, twice = (model(**inputs, num_items_in_batch=factor * items)["loss"].mean() for factor in (1, 2))
    except TypeError:  # its forward takes no such argument
        return False
    finally:
        model.train(training)
    return bool(torch.isclose(twice, once / 2, rtol=1e-2, atol=0.0))


class ScriptTrainer(TrainerMixin, Trainer):
    """Trainer with exact gradient accumulation and state space parameter groups."""


class CausalTrainer(ScriptTrainer):
    """Trainer for models that predict each token from those before it.

    Note:
        Trainer knows by name which models shift their labels, and its label smoothing, and for some (GPT-2) its count
        of label tokens, do not shift for all others: these models would be trained to copy their input. Here labels
        are shifted whatever the class is called.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._loss_shifts_labels = True
        if self.label_smoother is not None:
            self.label_smoother = _ShiftingLabelSmoother(self.args.label_smoothing_factor)


class _ShiftingLabelSmoother(LabelSmoother):
    def __call__(
        self, model_output: Any, labels: Any, shift_labels: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        return super().__call__(model_output, labels, shift_labels=True, num_items_in_batch=num_items_in_batch)


class SummarizationTrainer(TrainerMixin, Seq2SeqTrainer):
    """Seq2SeqTrainer with exact gradient accumulation and state space parameter groups."""
