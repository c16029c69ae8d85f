"""The Hub: whether a run can push to it, asked before it starts, and what becomes of its model if it could not."""

import logging
import shlex
from pathlib import Path
from typing import Any

from huggingface_hub import constants, get_token, whoami
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils._validators import validate_repo_id
from transformers import Trainer, TrainingArguments
from transformers.trainer_utils import HubStrategy

from hf_hybrid.training.command_line import one_line
from hf_hybrid.training.model_card import CARD_FILE

__all__ = ["HubMixin", "check_hub_access", "push"]

logger = logging.getLogger(__name__)


def check_hub_access(training_args: TrainingArguments, token: str | None) -> None:
    """Check that a run can push what it is asked to push; Trainer would find out once data are read.

    Args:
        training_args: The training arguments; without ``--hub_token`` they get `token`.
        token: The token that downloads are made with, if one is given.

    Raises:
        ValueError: There is no token, or one that may not write, or the Hub refuses it or cannot be reached.
    """
    if not training_args.push_to_hub:
        return
    if training_args.hub_token is None:
        training_args.hub_token = token
    if training_args.hub_token is None and get_token() is None:
        raise ValueError("--push_to_hub needs a token for the Hub: give --hub_token, or log in with `hf auth login`")
    if training_args.hub_model_id is not None:
        try:
            validate_repo_id(training_args.hub_model_id)
        except HFValidationError as error:
            raise ValueError(f"--hub_model_id {training_args.hub_model_id}: {one_line(error)}") from error
    try:
        user = whoami(token=training_args.hub_token)
    except Exception as error:  # httpx has a tree of its own, and a proxy may answer anything
        status = getattr(getattr(error, "response", None), "status_code", None)
        problem = "refuses the token" if status in (401, 403) else "cannot be asked who the token belongs to"
        raise ValueError(f"--push_to_hub: {constants.ENDPOINT} {problem}: {one_line(error)}") from error
    role = user.get("auth", {}).get("accessToken", {}).get("role")
    if role == "read":
        raise ValueError("--push_to_hub needs a token that may write to the Hub; got one that may only read")


def push(trainer: Trainer) -> None:
    """Push what is saved in the output folder.

    Raises:
        ValueError: It could not be pushed; the message says where everything is, and how to push it later.
    """
    try:
        trainer.push_to_hub()
    except Exception as error:
        folder, repository = str(trainer.args.output_dir), trainer.hub_model_id or trainer.args.hub_model_id or "NAME"
        revision: Any = trainer.args.hub_revision
        again = ["hf", "upload", repository, folder, ".", "--exclude", "checkpoint-*/*"]
        again += ["--revision", revision] if revision else []
        raise ValueError(
            f"--push_to_hub: the model could not be pushed to {repository}: {_reason(error)} Nothing is lost: model, "
            f"tokenizer, results and model card are in {folder}. To push them later: {shlex.join(again)}"
        ) from error


def _reason(error: BaseException) -> str:
    """An error of the client and what it came from, which alone says what the server answered."""
    said = [one_line(error)]
    while (error := error.__cause__ or error.__context__) and len(said) < 3:  # type: ignore[assignment]
        if str(error) and one_line(error) not in said:
            said.append(one_line(error))
    return ". ".join(text.rstrip(".") for text in said) + "."


class HubMixin:
    """Put before a Trainer in the bases: its repository is made early, and its model card is ours."""

    def init_hf_repo(self, token: str | None = None, private: bool | None = None) -> None:
        """Make the repository that ``--push_to_hub`` pushes to.

        Raises:
            ValueError: The Hub does not let the token's owner, or cannot be reached.
        """
        try:
            super().init_hf_repo(token=token, private=private)  # type: ignore[misc]
        except Exception as error:  # before the training, which would be for nothing
            args: Any = self.args  # type: ignore[attr-defined]
            name = args.hub_model_id or Path(args.output_dir).absolute().name
            raise ValueError(f"--push_to_hub: {name} cannot be made on the Hub: {_reason(error)}") from error

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        args: Any = self.args  # type: ignore[attr-defined]
        whole = (HubStrategy.CHECKPOINT, HubStrategy.ALL_CHECKPOINTS)
        if args.save_total_limit is not None and args.hub_strategy in whole:
            self._finish_current_push()  # or the checkpoint before is deleted while it is read
        self._name_failed_pushes()
        super()._push_from_checkpoint(checkpoint_folder)  # type: ignore[misc]

    def _finish_current_push(self) -> None:
        super()._finish_current_push()  # type: ignore[misc]
        self._name_failed_pushes()

    def _name_failed_pushes(self) -> None:
        """Say which pushes of checkpoints could not be made; they run beside the training, and Trainer never looks."""
        push = getattr(self, "push_in_progress", None)
        if push is None or not push.is_done():
            return
        for error in filter(None, (job.exception() for job in push.jobs)):
            name: Any = self.hub_model_id  # type: ignore[attr-defined]
            logger.warning("--push_to_hub: a checkpoint could not be pushed to %s: %s", name, _reason(error))
        self.push_in_progress = None

    def create_model_card(self, *args: Any, **kwargs: Any) -> None:
        """Write Trainer's own card where a trained model has none: it knows less than ours, and replaces any."""
        run: Any = self.args  # type: ignore[attr-defined]
        if run.do_train and not Path(run.output_dir, CARD_FILE).is_file():
            super().create_model_card(*args, **kwargs)  # type: ignore[misc]
