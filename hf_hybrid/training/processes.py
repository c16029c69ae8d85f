"""Several processes: what the first one finds out alone, all of them must know, errors included."""

import logging
import os
from collections.abc import Callable
from typing import TypeVar

from accelerate.utils import broadcast_object_list
from transformers import TrainingArguments

__all__ = ["is_first_process", "on_first_process", "replica_log_level"]

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
