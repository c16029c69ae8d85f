"""Measure a run: parameters, tokens, time and memory."""

import sys
import time
from array import array
from typing import Any

import torch
from transformers import TrainerCallback


class Measurements(TrainerCallback):
    """Counters and clocks of one Trainer: of this process alone, without steps before a run was resumed.

    Attributes:
        parameters: Number of parameters of the whole model, even if it is sharded later.
        trainable: Number of trained parameters.
        examples: Training examples seen.
        step_seconds: From the end of each step to the end of the next, without evaluating and saving in between.
        evaluation_seconds: Time of evaluation and prediction, including generation and scores.
        resumed_at: The step at which training was resumed; 0 if it started anew, None if nothing was trained.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        parameters = list(model.parameters())
        self.parameters = sum(map(_size, parameters))
        self.trainable = sum(_size(parameter) for parameter in parameters if parameter.requires_grad)
        self.examples = 0
        self.step_seconds = array("d")
        self.evaluation_seconds = 0.0
        self.resumed_at: int | None = None
        self._tokens: torch.Tensor | int = 0
        self._since = 0.0

    @property
    def tokens(self) -> int:
        """Input tokens, pixels or samples of the training examples seen, without padding."""
        return int(self._tokens)

    def count(self, inputs: dict[str, Any]) -> None:
        """Count a training batch, without waiting for its device."""
        for prefix in ("", "pair_"):
            ids = next(
                (inputs[name] for name in (f"{prefix}input_ids", f"{prefix}input_values") if name in inputs), None
            )
            if ids is not None:
                mask = inputs.get(f"{prefix}attention_mask")
                self.examples += 0 if prefix else len(ids)
                self._tokens = self._tokens + (ids.numel() if mask is None else mask.sum())

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Start the clock."""
        self.resumed_at, self._since = state.global_step, time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Take the time of a step, its data included."""
        now = time.perf_counter()
        self.step_seconds.append(now - self._since)
        self._since = now

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Leave saving out of the next step."""
        self._since = time.perf_counter()

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: Any = None, **kwargs: Any) -> None:
        """Add up the time of evaluating, and leave it out of the next step."""
        self.evaluation_seconds += sum(value for name, value in (metrics or {}).items() if name.endswith("_runtime"))
        self._since = time.perf_counter()

    on_predict = on_evaluate


def _size(parameter: torch.nn.Parameter) -> int:
    return getattr(parameter, "ds_numel", parameter.numel())  # DeepSpeed empties the tensor of a partitioned parameter


def peak_memory() -> dict[str, int]:
    """Return the highest memory use of this process so far, in bytes, by kind."""
    peaks = {}
    if torch.cuda.is_available():
        peaks["GPU memory allocated by torch"] = torch.cuda.max_memory_allocated()
    try:
        import resource
    except ImportError:  # Windows
        return peaks
    resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peaks | {"resident memory of the process": resident * (1 if sys.platform == "darwin" else 1024)}
