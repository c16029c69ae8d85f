"""One run of `compare_on_data`, a process with one thread: ``python -m benchmarks.train_one FOLDER``.

``run.json`` in the folder describes the run: the ``script``, its ``flags``, ``evaluations`` of the trained model with
other flags, ``initial``, edits of the initial values, and ``save_every``, seconds between checkpoints. Checkpoints are
saved in ``model``, and ``result.json`` at the end. When its standard input ends, the run saves a checkpoint and stops.
An interrupted run continues from its last checkpoint.
"""

import importlib
import json
import math
import os
import re
import resource
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from filelock import FileLock
from torch.utils.data import Subset
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from benchmarks.record import slug
from hf_hybrid.training.errors import run_command_line
from hf_hybrid.training.run_folder.files import replacing
from hf_hybrid.training.trainer.non_finite import NonFiniteLoss

TRAINERS = {
    "clm": "CausalTrainer",
    "glue": "ScriptTrainer",
    "long_range": "ScriptTrainer",
    "summarization": "SummarizationTrainer",
}
RUN, RESULT, MODEL = "run.json", "result.json", "model"
_POINTS, _LOGS = 10, 20
"""Default number of points of the validation and of the training loss in a curve."""
_EVALUATION = 0.3
"""Validation examples per point for each training example since the last point. A forward takes a third of a step, so
this costs a tenth of the training."""
_SECONDS, _PEAK = "cpu_seconds", "peak_mib"
_ALWAYS = {"do_eval": True, "use_cpu": True, "disable_tqdm": True, "report": False}


def train(run: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Train and evaluate a model, or continue one.

    Args:
        run: The content of ``run.json``.
        folder: The folder of the model.

    Returns:
        ``outcome`` ("ok", or "diverged" if the loss became infinite), ``values`` (metrics, parameters, steps, CPU
        minutes of the training steps, and the peak memory of the process in MiB until the last one) and ``curve``
        (step, train_loss and eval_loss of each point).
    """
    script, flags = run["script"], run["flags"]
    module = importlib.import_module(f"hf_hybrid.training.{script}")
    trainers: list[Any] = []
    others = {TRAINERS[script]: _observed(getattr(module, TRAINERS[script]), trainers, run["save_every"])}
    if run.get("initial"):
        others["load_model"] = _edited(module.load_model, run["initial"], flags["seed"])
    try:
        with patch.multiple(module, **others):
            metrics = module.main(_arguments(_training(flags) | {"output_dir": folder}))
    except NonFiniteLoss as error:
        print(error)
        return {"outcome": "diverged", "values": {}, "curve": _curve(trainers[0].state.log_history)}
    for name, more in run.get("evaluations", {}).items():
        scores = module.main(_arguments(_evaluation(flags, folder, name) | more))
        metrics |= {f"{metric}, {name}": value for metric, value in scores.items()}
    model, state = trainers[0].model, trainers[0].state
    own = {
        "parameters": model.num_parameters(),
        "steps": state.global_step,
        "cpu_minutes": _last(_SECONDS, state.log_history) / 60,
        "peak_mib": _last(_PEAK, state.log_history),
    }
    return {"outcome": "ok", "values": metrics | own, "curve": _curve(state.log_history)}


def _arguments(flags: dict[str, Any]) -> list[str]:
    values = {name: json.dumps(value) if isinstance(value, dict) else value for name, value in flags.items()}
    return [f"--{name}={value}" for name, value in values.items()]


def _training(flags: dict[str, Any]) -> dict[str, Any]:
    steps = flags["max_steps"]
    return {
        "eval_steps": -(-steps // _POINTS),
        "logging_steps": -(-steps // _LOGS),
        **flags,
        **_ALWAYS,
        "do_train": True,
        "eval_strategy": "steps",
        "save_strategy": "steps",
        "save_steps": 10**9,  # by the clock, and at the end
        "save_total_limit": 1,
        "resume_from_checkpoint": "auto",
    }


def _evaluation(flags: dict[str, Any], folder: Path, name: str) -> dict[str, Any]:
    """Return the flags of another evaluation of the trained model."""
    new = {"model_type", "init_from", "config_overrides", "tokenizer_type", "tokenizer_vocab_size", "train_file"}
    return {
        **{flag: value for flag, value in flags.items() if flag not in new},
        **_ALWAYS,
        "model_name_or_path": folder,
        "output_dir": folder / f"evaluation-{slug(name)}",
        "overwrite_output_dir": True,  # an interrupted evaluation of this run
    }


def _curve(history: Sequence[dict[str, Any]]) -> list[dict[str, float]]:
    points: dict[int, dict[str, float]] = {}
    for entry in history:
        for key, name in (("loss", "train_loss"), ("eval_loss", "eval_loss")):
            if key in entry:  # at the last step the evaluation of all examples follows that of some
                points.setdefault(entry["step"], {}).setdefault(name, entry[key])
    return [{"step": step, **points[step]} for step in sorted(points)]


def _last(count: str, history: Sequence[dict[str, Any]]) -> float:
    """Return a count at the last checkpoint; NaN if there is none."""
    return next((entry[count] for entry in reversed(history) if count in entry), math.nan)


# ---- observing the trainer ----


def _observed(trainer_class: type, trainers: list[Any], save_every: float) -> type:
    """Return a trainer class that evaluates on few examples, saves by the clock and counts its processor time."""

    class Observed(trainer_class):  # type: ignore[misc, valid-type]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self._clock = _Clock(save_every)
            self.add_callback(self._clock)
            trainers.append(self)

        def evaluate(self, eval_dataset: Any = None, *args: Any, **kwargs: Any) -> dict[str, float]:
            if not self.is_in_train:
                return super().evaluate(eval_dataset, *args, **kwargs)
            settings, examples, compute_metrics = self.args, self.eval_dataset, self.compute_metrics
            trained_on = settings.eval_steps * settings.train_batch_size * settings.gradient_accumulation_steps
            count = min(len(examples), max(settings.eval_batch_size, int(_EVALUATION * trained_on)))
            few = Subset(examples, [place * len(examples) // count for place in range(count)])
            if getattr(settings, "predict_with_generate", False):
                self.compute_metrics = None  # so that nothing is generated
            try:
                return super().evaluate(few, *args, **kwargs)
            finally:
                self.compute_metrics = compute_metrics

        def _save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
            # in the log, which a resumed run continues
            entry = {_SECONDS: self._clock.seconds, _PEAK: self._clock.peak, "step": self.state.global_step}
            self.state.log_history.append(entry)
            super()._save_checkpoint(*args, **kwargs)

    return Observed


class _Clock(TrainerCallback):
    """Counts the processor time of the steps and the memory of the process, and saves by the clock.

    Attributes:
        seconds: Processor time of all steps so far, including those before a resumed checkpoint.
        peak: The largest resident memory of the process until the last step, in MiB, likewise.
    """

    def __init__(self, save_every: float) -> None:
        self.seconds = self.peak = 0.0
        self._save_every = save_every
        self._began = 0.0
        self._saved_at = time.perf_counter()

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Resume the counts."""
        self.seconds, self.peak = (
            _last(count, state.log_history) if state.log_history else 0.0 for count in (_SECONDS, _PEAK)
        )
        self._saved_at = time.perf_counter()

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Start the clock."""
        self._began = time.process_time()

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> TrainerControl:
        """Stop the clock; save if it is time."""
        self.seconds += time.process_time() - self._began
        self.peak = max(self.peak, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10)
        control.should_save |= time.perf_counter() - self._saved_at > self._save_every
        return control

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Remember the time."""
        self._saved_at = time.perf_counter()


# ---- initial values ----


def edit_initial_values(model: torch.nn.Module, edits: dict[str, dict[str, float]], seed: int) -> None:
    """Change the parameters of a new model.

    Random edits use their own generator, so that they change nothing else.

    Args:
        model: The model; changed in place.
        edits: By a regular expression found in a parameter's name: ``{"std": x}`` draws it again, ``{"value": x}``
            fills it and ``{"scale": x}`` multiplies it, in order.
        seed: Seed of the edits.

    Raises:
        ValueError: No parameter has such a name, or the edit is unknown.
    """
    generator = torch.Generator().manual_seed(seed)
    for pattern, edit in edits.items():
        found = [tensor for name, tensor in model.named_parameters() if re.search(pattern, name)]
        if not found or len(edit) != 1 or not edit.keys() <= {"std", "value", "scale"}:
            raise ValueError(f"initial {pattern!r}: {edit} must be one of std, value and scale, of a parameter")
        ((kind, number),) = edit.items()
        with torch.no_grad():
            for tensor in found:
                if kind == "std":
                    tensor.normal_(0.0, number, generator=generator)
                elif kind == "value":
                    tensor.fill_(number)
                else:
                    tensor.mul_(number)


def _edited(load_model: Callable[..., Any], edits: dict[str, dict[str, float]], seed: int) -> Callable[..., Any]:
    def load(*args: Any, **kwargs: Any) -> Any:
        model = load_model(*args, **kwargs)
        edit_initial_values(model, edits, seed)
        return model

    return load


# ---- the process ----


def main(argv: Sequence[str] | None = None) -> int:
    """Do the run in a folder."""
    (folder,) = map(Path, sys.argv[1:] if argv is None else argv)
    threading.Thread(target=_end_with_starter, daemon=True).start()
    torch.set_num_threads(1)
    with FileLock(folder / "lock"):  # a run that lost its parent may still be saving
        result = train(json.loads((folder / RUN).read_text(encoding="utf-8")), folder / MODEL)
        with replacing(folder / RESULT) as path:
            path.write_text(json.dumps(result), encoding="utf-8")
    return 0


def _end_with_starter() -> None:
    while os.read(sys.stdin.fileno(), 1):  # not through Python's buffer, which blocks at exit
        pass
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    run_command_line(main)
