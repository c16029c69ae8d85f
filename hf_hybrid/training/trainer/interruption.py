"""Handle Ctrl-C, SIGTERM, SIGHUP and errors in training: finish the step, save, and say how to continue."""

import contextlib
import logging
import os
import random
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import torch
from transformers import TrainerCallback
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, SaveStrategy

from hf_hybrid.training.errors import HungUp, Terminated, no_room, one_line
from hf_hybrid.training.run_folder.checkpoints import was_cut_off
from hf_hybrid.training.run_folder.files import CannotSave
from hf_hybrid.training.trainer.non_finite import NonFiniteLoss
from hf_hybrid.training.trainer.script_trainer import ScriptTrainer

logger = logging.getLogger(__name__)

_NAMES = {signal.SIGINT: "Ctrl-C", signal.SIGTERM: "SIGTERM"}
_KINDS: dict[int, type[KeyboardInterrupt]] = {signal.SIGINT: KeyboardInterrupt, signal.SIGTERM: Terminated}
if hasattr(signal, "SIGHUP"):  # not on Windows
    _NAMES[signal.SIGHUP] = "the terminal was closed"
    _KINDS[signal.SIGHUP] = HungUp


class _Watch(TrainerCallback):
    """Knows which steps are done and saved, and ends training after the current step on request."""

    def __init__(self, trainer: ScriptTrainer) -> None:
        self.trainer = trainer
        self.signal: int | None = None
        self.saved_at: int | None = None
        self._optimizing: int | None = None
        self._snapshot: dict[str, Any] = {}

    @property
    def is_between_steps(self) -> bool:
        """Whether the weights are those of the last finished step."""
        return self._optimizing != self.trainer.state.global_step

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Note the first step; its weights need no saving."""
        self.saved_at = state.global_step

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Take a snapshot: the data loader of the epoch draws random numbers."""
        self._take_snapshot()

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Take a snapshot; a resumed run restores random numbers at the same two places."""
        if self._snapshot.get("step") != state.global_step:
            self._take_snapshot()

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Note that from here until the step is counted, the weights are neither the old nor the new ones."""
        self._optimizing = state.global_step

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        """Save and stop if requested."""
        if self.trainer.must_stop:
            control.should_training_stop = True
            control.should_save = args.save_strategy != SaveStrategy.NO
        return control

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Note that a checkpoint is complete."""
        self.saved_at = state.global_step

    def _take_snapshot(self) -> None:
        """Keep what a step changes before the weights, besides gradients: random numbers and counts."""
        state = self.trainer.state
        self._snapshot = {
            "step": state.global_step,
            "python": random.getstate(),
            "numpy": np.random.get_state(),
            "torch": torch.get_rng_state(),
            "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
            "counts": (state.num_input_tokens_seen, state.total_flos, self.trainer.current_flos),
        }

    def go_back_to_last_step(self) -> None:
        """Undo the first part of an unfinished step."""
        snapshot, state = self._snapshot, self.trainer.state
        if snapshot.get("step") != state.global_step:
            return  # the error came between two steps
        random.setstate(snapshot["python"])
        np.random.set_state(snapshot["numpy"])
        torch.set_rng_state(snapshot["torch"])
        if snapshot["cuda"]:
            torch.cuda.set_rng_state_all(snapshot["cuda"])
        state.num_input_tokens_seen, state.total_flos, self.trainer.current_flos = snapshot["counts"]


@contextlib.contextmanager
def stop_gently(trainer: ScriptTrainer) -> Iterator[None]:
    """Let Ctrl-C, SIGTERM, a closed terminal or an error end training without losing finished steps.

    The first Ctrl-C, SIGTERM or SIGHUP finishes the current step and saves a checkpoint, in all processes after the
    same step. A second Ctrl-C stops at once, but only a single process: torchrun forwards the first one twice. After
    an error, save a checkpoint of the last finished step, unless the weights are between two steps, saving failed, or
    only one of several processes failed. Signals that the process ignored from its start, as with nohup, stay ignored;
    in a thread, no signal is handled.

    Raises:
        KeyboardInterrupt: Training was stopped; the message says where, and how to continue. After SIGTERM it is a
            `Terminated`, after SIGHUP a `HungUp`.
    """
    watch = _Watch(trainer)
    trainer.add_callback(watch)
    with _signals_noted(watch):
        try:
            yield
        except Exception as error:
            note = _save_after_error(watch, error)
            if watch.signal is not None:  # the signal may also have ended processes that load data
                raise _interrupt(watch, f"{note} What failed meanwhile: {one_line(error)}") from error
            if note:
                error.add_note(note)
            raise
        finally:
            trainer.remove_callback(watch)
        received = [watch.signal == signum for signum in _NAMES]
        agreed = trainer.agreement.any(*received)
    if any(agreed):
        watch.signal = next(signum for signum, is_so in zip(_NAMES, agreed, strict=True) if is_so)
        raise _interrupt(watch, how_to_continue(trainer))


@contextlib.contextmanager
def _signals_noted(watch: _Watch) -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    owner, alone = os.getpid(), watch.trainer.args.world_size <= 1

    def handle(signum: int, frame: FrameType | None) -> None:
        if os.getpid() != owner:  # processes that load data inherit this handler; the main one ends them
            return
        if watch.signal is not None and signum == signal.SIGINT and alone:
            raise KeyboardInterrupt("training was stopped at once. " + how_to_continue(watch.trainer))
        if watch.signal is None:
            if _KINDS[signum] is HungUp:
                _silence_closed_terminal()
            watch.signal = signum
            watch.trainer.stop_wished = True
            again = "; press it again to stop at once" if signum == signal.SIGINT and alone else ""
            logger.warning("%s: stopping after this step or evaluation%s.", _NAMES[signal.Signals(signum)], again)

    noted = [signum for signum in _NAMES if signal.getsignal(signum) != signal.SIG_IGN]
    previous = {signum: signal.signal(signum, handle) for signum in noted}
    try:
        yield
    finally:
        for signum, handler in previous.items():
            signal.signal(signum, handler if handler is not None else signal.SIG_DFL)


def _silence_closed_terminal() -> None:
    """Discard output: an error for each printed line would prevent saving the checkpoint."""
    for descriptor in (1, 2):
        try:
            os.write(descriptor, b"\n")
        except OSError:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, descriptor)
            os.close(nowhere)


def _interrupt(watch: _Watch, advice: str) -> KeyboardInterrupt:
    state, kind = watch.trainer.state, _KINDS.get(watch.signal or 0, KeyboardInterrupt)
    return kind(f"training stopped after step {state.global_step} of {state.max_steps}. {advice}")


def _save_after_error(watch: _Watch, error: Exception) -> str:
    """Save a checkpoint of the last finished step if that makes sense; say whether, and how to continue."""
    trainer, step = watch.trainer, watch.trainer.state.global_step
    if watch.saved_at is None or isinstance(error, CannotSave):  # no training yet, or the error says it all
        return ""
    go_on = how_to_continue(trainer)
    never_saves = trainer.args.save_strategy == SaveStrategy.NO or trainer.args.save_only_model
    if trainer.is_saving or no_room(error) is not None or never_saves:
        return go_on
    if watch.saved_at == step:
        return "No step was finished, so there is nothing to save." if step == 0 else go_on
    if not watch.is_between_steps:
        return f"Step {step + 1} failed while the weights were changed, so nothing was saved. {go_on}"
    if trainer.args.world_size > 1 and not isinstance(error, NonFiniteLoss):
        return f"Other processes may still work, so step {step} was not saved. {go_on}"
    model: Any = trainer.model
    if not all(bool(torch.isfinite(parameter).all()) for parameter in model.parameters()):
        words = f"The weights of step {step} are not finite either, so they were not saved"
        return f"{words}: an earlier step spoiled them. {go_on}"
    watch.go_back_to_last_step()
    logger.warning("Saving a checkpoint of step %d, the last one that was finished.", step)
    try:
        trainer._save_checkpoint(trainer.model_wrapped, trial=None)
    except Exception as second:  # the first error is the one to report
        return f"Step {step} could not be saved: {one_line(second)} {how_to_continue(trainer)}".replace("..", ".")
    return f"Step {step} was saved after the error. {how_to_continue(trainer)}"


def how_to_continue(trainer: ScriptTrainer) -> str:
    """Say how to continue a stopped run."""
    if trainer.args.save_strategy == SaveStrategy.NO:
        return "There is no checkpoint to continue from: --save_strategy is no."
    if trainer.args.save_only_model:
        return "There is no checkpoint to continue from: --save_only_model leaves out the optimizer."
    saved = Path(str(trainer.args.output_dir)).glob(f"{PREFIX_CHECKPOINT_DIR}-*/trainer_state.json")
    if all(was_cut_off(path.parent) for path in saved):
        return f"There is no checkpoint in {trainer.args.output_dir} to continue from."
    return (
        f"To continue from the last checkpoint in {trainer.args.output_dir}, run the same command with "
        "--resume_from_checkpoint auto"
    )
