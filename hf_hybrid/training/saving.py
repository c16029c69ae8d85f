"""Saving by Trainer: a checkpoint is whole, or says that it is not."""

import logging
import shutil
from pathlib import Path
from typing import Any

import torch
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, HubStrategy, rotate_checkpoints

from hf_hybrid.training.checkpoints import (
    CannotSave,
    begin_saving,
    explain_full_disk,
    faults_on_disk,
    finish_saving,
    mark_complete,
    replacing,
    was_cut_off,
)
from hf_hybrid.training.output_folder import complete_checkpoints

__all__ = ["SavingMixin"]

logger = logging.getLogger(__name__)


class SavingMixin:
    """Put before a Trainer in the bases: what it saves is marked once it is whole, and only then replaces another."""

    is_saving = False
    """Whether a checkpoint is being saved; it stays true when that fails."""

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save the model; until it is whole, a file in the folder says that it is not.

        It is not pushed yet: `publish` does that, with results and card.

        Raises:
            CannotSave: The disk is full.
        """
        args: Any = self.args  # type: ignore[attr-defined]
        folder = Path(output_dir or args.output_dir)
        with explain_full_disk(folder, "the model", self._advise):
            if args.should_save:
                begin_saving(folder)
            super().save_model(output_dir, _internal_call=True)  # type: ignore[misc]
            if self.is_saving:
                args.save_total_limit = None  # Trainer deletes old checkpoints before this one could be marked
            elif args.should_save:
                finish_saving(folder)

    def _save_checkpoint(self, model: torch.nn.Module, trial: Any) -> None:
        """Save a checkpoint, mark it as complete, and only then delete older ones.

        Raises:
            CannotSave: The disk is full. What was written is deleted, older checkpoints are as they were.
        """
        args: Any = self.args  # type: ignore[attr-defined]
        run_folder = self._get_output_dir(trial)  # type: ignore[attr-defined]
        folder = Path(run_folder, f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}")  # type: ignore[attr-defined]
        self.is_saving, self._is_marked, self._save_total_limit = True, False, args.save_total_limit
        try:
            with explain_full_disk(folder, folder.name, self._advise):
                super()._save_checkpoint(model, trial)  # type: ignore[misc]
                self._mark_checkpoint(folder)
        except CannotSave:
            if args.should_save and was_cut_off(folder):
                shutil.rmtree(folder, ignore_errors=True)
            raise
        finally:
            args.save_total_limit = self._save_total_limit
        self.is_saving = False
        if args.should_save:
            best = self.state.best_model_checkpoint  # type: ignore[attr-defined]
            rotate_checkpoints(run_folder, args.save_total_limit, best)  # by step: clocks go back, copies are new

    def _mark_checkpoint(self, folder: Path) -> None:
        if self._is_marked:
            return
        self.accelerator.wait_for_everyone()  # type: ignore[attr-defined]
        if self.args.should_save:  # type: ignore[attr-defined]
            mark_complete(folder)
        self._is_marked = True

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        """Copy a checkpoint, which is complete by now, into the output folder, and upload it."""
        self._mark_checkpoint(Path(checkpoint_folder))
        args: Any = self.args  # type: ignore[attr-defined]
        args.save_total_limit = self._save_total_limit
        copies = self.is_world_process_zero() and args.hub_strategy != HubStrategy.END  # type: ignore[attr-defined]
        if copies:
            begin_saving(Path(args.output_dir))
        super()._push_from_checkpoint(checkpoint_folder)  # type: ignore[misc]
        if copies:
            finish_saving(Path(args.output_dir))

    def _advise(self) -> str:
        """Words for a run that found no room on the disk."""
        whole = complete_checkpoints(self.args.output_dir)  # type: ignore[attr-defined]
        if not whole:
            return "There is no complete checkpoint; make room and start anew."
        return (
            f"{whole[-1]} is complete: make room, then run the same command with --resume_from_checkpoint auto to go "
            "on from it"
        )

    def save_state(self) -> None:
        """Write ``trainer_state.json`` into the output folder.

        Raises:
            CannotSave: The disk is full.
        """
        if self.is_world_process_zero():  # type: ignore[attr-defined]
            target = Path(self.args.output_dir, "trainer_state.json")  # type: ignore[attr-defined]
            with explain_full_disk(target.parent, "the state", self._advise), replacing(target) as path:
                target.parent.mkdir(parents=True, exist_ok=True)
                self.state.save_to_json(str(path))  # type: ignore[attr-defined]

    def _load_best_model(self) -> None:
        """Load the weights of the best checkpoint, unless something happened to them."""
        best = Path(self.state.best_model_checkpoint)  # type: ignore[attr-defined]
        if wrong := faults_on_disk(best):
            logger.warning(
                "The best checkpoint %s is not loaded: %s. The weights are those of the last step.",
                best,
                " and ".join(wrong),
            )
            return
        super()._load_best_model()  # type: ignore[misc]
