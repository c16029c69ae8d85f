"""Run in several processes: share results and errors of the first one, and decide together."""

import logging
import os
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list
from torch import distributed
from transformers import TrainingArguments

Result = TypeVar("Result")


def is_first_process() -> bool:
    """Whether this is the process that prints; known before the processes are connected."""
    return os.environ.get("RANK", "0") == "0"


def on_first_process(training_args: TrainingArguments, work: Callable[[], Result]) -> Result:
    """Work on the first process, and give its result or its error to all of them.

    Without this, an error that only the first process sees would leave the others waiting. Pickle must be able to
    store the result.

    Raises:
        ValueError: It was raised on the first process.
    """
    if training_args.world_size <= 1:
        return work()
    outcome: list[Any] = [None, None]
    if training_args.process_index == 0:
        try:
            outcome[0] = work()
        except Exception as error:
            broadcast_object_list([None, str(error)])
            raise
    broadcast_object_list(outcome)
    if outcome[1] is not None:
        raise ValueError(outcome[1])
    return outcome[0]


def replica_log_level(training_args: TrainingArguments) -> int:
    """The level of messages on all processes but the first: errors alone, since the first one prints the warnings.

    ``--log_level_replica`` sets another; its default is ``warning``.
    """
    if training_args.log_level_replica in ("passive", "warning"):
        return logging.ERROR
    return training_args.get_process_log_level()


def shards_weights(training_args: TrainingArguments) -> bool:
    """Whether FSDP or DeepSpeed shards the weights, by a flag or by ``accelerate launch``."""
    launched = os.environ.get("ACCELERATE_USE_FSDP", "false").lower() == "true"
    return launched or training_args.fsdp_plugin_args is not None or training_args.deepspeed_plugin is not None


class Agreement:
    """Lets the processes of a run decide together over the CPU, without waiting for the GPUs."""

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


def let_autocast_choose(accelerator: Accelerator, model: Any) -> bool:
    """Let autocast choose the precisions if FSDP shards a model with trained state spaces; return whether it does.

    In 16 bits, FSDP casts all weights of a layer, also those of state space models, which then lose their time
    constants. Autocast casts only what enters a matrix product, as without FSDP.
    """
    plugin: Any = getattr(accelerator.state, "fsdp_plugin", None)
    listed = getattr(model, "ssm_parameters", None)
    if plugin is None or listed is None or next(iter(listed()), None) is None:
        return False
    plugin.mixed_precision_policy = None
    return True


def count_new_rows(accelerator: Accelerator, rows: int | None, sharing: int = 1) -> int | None:
    """How many rows of this process's batch are not repeated; None if no process has repeated rows.

    So many consecutive processes are `sharing` the same rows.
    """
    state = accelerator.gradient_state
    if accelerator.num_processes <= sharing or rows is None or not state.end_of_dataloader or state.remainder < 1:
        return None
    count = state.remainder - accelerator.process_index // sharing * rows
    # a process without new rows computes all it has: with sharded weights, every process must compute
    return min(count, rows) if count > 0 else rows
