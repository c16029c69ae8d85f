"""Choose how often a run logs its loss, so that even a short run shows whether it learns."""

import math
from collections.abc import Set
from typing import Any

from transformers import Trainer, TrainerCallback

from hf_hybrid.training.run_folder.resume import saved_state

_LOGS, _MOST_STEPS = 50, 500


def steps_between_logs(max_steps: int) -> int:
    """Return the steps between fifty logs in a run, and at most 500, transformers' default."""
    return min(_MOST_STEPS, math.ceil(max_steps / _LOGS))


class _FitLoggingSteps(TrainerCallback):
    """Chooses the steps between logs when training begins, since Trainer then knows the number of steps."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Set the steps between logs."""
        args.logging_steps = state.logging_steps = steps_between_logs(state.max_steps)


def fit_logging_steps(trainer: Trainer, resume_from: str | None, given: Set[str]) -> None:
    """Fit the steps between logs to the length of the run, and log the first step, unless the user has set them.

    ``--eval_steps`` does not change: transformers copied ``--logging_steps`` into it when it read the arguments. A
    resumed run keeps its steps between logs: Trainer uses them, and warns if the arguments differ.
    """
    if given & {"logging_steps", "logging_strategy"}:
        return
    if "logging_first_step" not in given:
        trainer.args.logging_first_step = True
    if resume_from is None:
        trainer.add_callback(_FitLoggingSteps())
    else:
        trainer.args.logging_steps = saved_state(resume_from).logging_steps
