"""Several processes: what the first one finds out alone, all of them must know, errors included."""

import logging
import os
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import torch
from accelerate.utils import broadcast_object_list
from torch import distributed
from transformers import TrainingArguments
from transformers.trainer_pt_utils import find_batch_size

__all__ = [
    "Agreement",
    "ProcessesMixin",
    "is_first_process",
    "on_first_process",
    "replica_log_level",
    "shards_weights",
]

Result = TypeVar("Result")


def is_first_process() -> bool:
    """Whether this process is the one that speaks, known before the processes have found each other."""
    return os.environ.get("RANK", "0") == "0"


def on_first_process(training_args: TrainingArguments, work: Callable[[], Result]) -> Result:
    """Work on the first process, and give its result, or its error, to all of them.

    Without this, an error that only the first process can see leaves the others waiting for it.

    Args:
        training_args: The training arguments.
        work: What to do; its result must be one that can be pickled.

    Raises:
        ValueError: It was raised on the first process.
    """
    if training_args.world_size <= 1:
        return work()
    outcome: list[object] = [None, None]
    if training_args.process_index == 0:
        try:
            outcome[0] = work()
        except Exception as error:
            broadcast_object_list([None, str(error)])
            raise
    broadcast_object_list(outcome)
    result, message = outcome
    if message is not None:
        raise ValueError(message)
    return result  # type: ignore[return-value]


def replica_log_level(training_args: TrainingArguments) -> int:
    """The level of messages on all processes but the first: what those would warn of, the first one has warned of.

    ``--log_level_replica`` gives another; its default is ``warning``.
    """
    if training_args.log_level_replica in ("passive", "warning"):
        return logging.ERROR
    return training_args.get_process_log_level()


def shards_weights(training_args: TrainingArguments) -> bool:
    """Whether FSDP or DeepSpeed divides the weights among the processes, by a flag or by ``accelerate launch``."""
    launched = os.environ.get("ACCELERATE_USE_FSDP", "false").lower() == "true"
    return launched or training_args.fsdp_plugin_args is not None or training_args.deepspeed_plugin is not None


class Agreement:
    """Lets the processes of a run decide together, through the CPU: the GPUs are not waited for."""

    def __init__(self, world_size: int) -> None:
        self._group: Any = None
        if world_size > 1 and distributed.is_initialized():
            self._group = distributed.new_group(backend="gloo")

    def any(self, *questions: bool) -> tuple[bool, ...]:
        """Whether each question is true in any process. All processes must ask."""
        if self._group is None:
            return questions
        answers = torch.tensor(questions, dtype=torch.uint8)
        distributed.all_reduce(answers, op=distributed.ReduceOp.MAX, group=self._group)
        return tuple(bool(answer) for answer in answers)

    def gather(self, value: Any) -> list[Any]:
        """The value of each process. All processes must call it."""
        if self._group is None:
            return [value]
        values: list[Any] = [None] * distributed.get_world_size()
        distributed.all_gather_object(values, value, group=self._group)
        return values


class ProcessesMixin:
    """Put before a Trainer in the bases: several processes give the scores, and the precision, that one gives."""

    _autocasts = False

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
