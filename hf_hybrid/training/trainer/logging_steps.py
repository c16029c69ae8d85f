"""How often a run logs its loss: often enough for a short one to be seen learning."""

import math
from collections.abc import Set
from pathlib import Path
from typing import Any

from transformers import Trainer, TrainerCallback, TrainerState

_LOGS, _MOST_STEPS = 50, 500


def steps_between_logs(max_steps: int) -> int:
    """Log fifty times in a run, and at least every 500 steps, transformers' default."""
    return min(_MOST_STEPS, math.ceil(max_steps / _LOGS))


class _FitLoggingSteps(TrainerCallback):
    """Chooses the steps between logs where training begins, which is where Trainer knows how many steps there are."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Training begins."""
        args.logging_steps = state.logging_steps = steps_between_logs(state.max_steps)


def fit_logging_steps(trainer: Trainer, resume_from: str | None, given: Set[str]) -> None:
    """Fit the steps between logs to the length of the run, and log the first step, unless the user has said when.

    ``--eval_steps``, which is transformers' ``--logging_steps`` where it is left out, stays as it is: it was copied
    when the arguments were read.

    A run that is resumed keeps its steps between logs: Trainer goes on with them, and warns if the arguments say
    otherwise.
    """
    if given & {"logging_steps", "logging_strategy"}:
        return
    if "logging_first_step" not in given:
        trainer.args.logging_first_step = True
    if resume_from is None:
        trainer.add_callback(_FitLoggingSteps())
    else:
        state = TrainerState.load_from_json(str(Path(resume_from, "trainer_state.json")))
        trainer.args.logging_steps = state.logging_steps
