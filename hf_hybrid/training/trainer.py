"""What transformers' Trainer lacks: exact losses for every model, SSM groups, a gentle Ctrl-C."""

import contextlib
import logging
import signal
import threading
from collections.abc import Iterator
from functools import partial
from types import FrameType
from typing import Any

import torch
from transformers import (
    Seq2SeqTrainer,
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)
from transformers.trainer_pt_utils import LabelSmoother, LengthGroupedSampler, find_batch_size
from transformers.trainer_utils import SaveStrategy

from hf_hybrid.data.preprocessing import IGNORED_LABEL

__all__ = [
    "CausalTrainer",
    "ScriptTrainer",
    "SummarizationTrainer",
    "TrainerMixin",
    "separate_ssm_parameters",
    "stop_gently",
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


class TrainerMixin:
    """Put before a Trainer in the bases.

    Note:
        Trainer divides the loss by the number of accumulation steps only for models that it believes not to do so
        themselves, and it believes it of every model whose forward takes keyword arguments. T5, BART, LED and LongT5
        take them and ignore them: with N accumulation steps their gradients come out N times too large. Here the
        model is asked: if doubling ``num_items_in_batch`` does not halve its loss, the mean that it returns is
        weighted with its share of the label tokens, which makes N small batches equal one large one exactly.
    """

    _loss_counts_items: bool | None = None
    _autocasts = False

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

    def create_accelerator_and_postprocess(self) -> None:
        """Prepare for several processes; where FSDP shards the weights, let autocast choose precisions.

        Note:
            In 16 bits, FSDP casts all weights of a layer before the layer sees them, those of state space models too,
            which lose their time constants. Autocast casts what enters a product of matrices, as without FSDP.
        """
        super().create_accelerator_and_postprocess()  # type: ignore[misc]
        trainer: Any = self
        plugin: Any = getattr(trainer.accelerator.state, "fsdp_plugin", None)
        listed = getattr(trainer.model, "ssm_parameters", None)
        self._autocasts = plugin is not None and listed is not None and any(True for _ in listed())
        if self._autocasts:
            plugin.mixed_precision_policy = None

    def autocast_smart_context_manager(self, *args: Any, **kwargs: Any) -> Any:
        """What a loss is computed in; nothing where accelerate has put autocast around the model itself."""
        if self._autocasts:
            return self.accelerator.autocast()  # type: ignore[attr-defined]
        return super().autocast_smart_context_manager(*args, **kwargs)  # type: ignore[misc]

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        """Evaluate or predict, each example once.

        Note:
            Processes fill up an uneven last batch with examples that they have had. Seq2SeqTrainer leaves these in:
            they count twice in its scores and stand behind the last document's line in a predictions file.
        """
        trainer: Any = self
        gather = trainer.accelerator.gather_for_metrics
        trainer.gather_function = partial(gather, use_gather_object=trainer.args.eval_use_gather_object)
        return super().evaluation_loop(*args, **kwargs)  # type: ignore[misc]

    def prediction_step(
        self, model: torch.nn.Module, inputs: dict[str, Any], prediction_loss_only: bool, *args: Any, **kwargs: Any
    ) -> tuple[Any, Any, Any]:
        """Compute loss, predictions and labels of a batch; the loss without the rows that only fill it up."""
        step: Any = super().prediction_step  # type: ignore[misc]
        loss, predictions, labels = step(model, inputs, prediction_loss_only, *args, **kwargs)
        count = self._count_new_rows(find_batch_size(inputs))
        if loss is not None and count is not None:
            first = {
                name: value[:count] if isinstance(value, torch.Tensor) and value.dim() else value
                for name, value in inputs.items()
            }
            loss = step(model, first, True, *args, **kwargs)[0]
        return loss, predictions, labels

    def _count_new_rows(self, rows: int | None) -> int | None:
        """How many rows of this process's batch were in none before; None where that is all on all processes."""
        trainer: Any = self
        state = trainer.accelerator.gradient_state
        processes = trainer.args.world_size
        if processes <= 1 or rows is None or not state.end_of_dataloader or state.remainder < 1:
            return None
        count = state.remainder - trainer.args.process_index * rows
        # processes that have no new row compute what they have: where weights are sharded, all must compute
        return min(count, rows) if count > 0 else rows

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


class _StopRequest(TrainerCallback):
    """Ends training after the running step once it was asked to, with a checkpoint if there are to be any."""

    def __init__(self) -> None:
        self.made = False

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> TrainerControl:
        """Save and stop if Ctrl-C was pressed during the step."""
        if self.made:
            control.should_training_stop = True
            control.should_save = args.save_strategy != SaveStrategy.NO
        return control


@contextlib.contextmanager
def stop_gently(trainer: Trainer) -> Iterator[None]:
    """Let the first Ctrl-C finish the running step and save a checkpoint; the second one stops at once.

    Several processes would not stop at the same step, so they keep the plain behaviour, as does a call from a thread.

    Raises:
        KeyboardInterrupt: Training was stopped; the message says where, and how to continue.
    """
    if trainer.args.world_size > 1 or threading.current_thread() is not threading.main_thread():
        yield
        return
    request = _StopRequest()

    def handle(signum: int, frame: FrameType | None) -> None:
        if request.made:
            raise KeyboardInterrupt("training was stopped at once. " + _how_to_continue(trainer))
        request.made = True
        logger.warning("Ctrl-C: stopping after this step or evaluation; press it again to stop at once.")

    previous = signal.signal(signal.SIGINT, handle)
    trainer.add_callback(request)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)
        trainer.remove_callback(request)
    if request.made:
        raise KeyboardInterrupt(
            f"training stopped after step {trainer.state.global_step} of {trainer.state.max_steps}. "
            + _how_to_continue(trainer)
        )


def _how_to_continue(trainer: Trainer) -> str:
    if trainer.args.save_strategy == SaveStrategy.NO:
        return "There is no checkpoint to continue from: --save_strategy is no."
    if trainer.args.save_only_model:
        return "There is no checkpoint to continue from: --save_only_model leaves out the optimizer."
    return (
        f"To continue from the last checkpoint in {trainer.args.output_dir}, run the same command with "
        "--resume_from_checkpoint auto"
    )
