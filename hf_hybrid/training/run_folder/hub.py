"""The Hub: check before a run that it can push, and say how to push later if pushing failed."""

import shlex

from huggingface_hub import constants, get_token, whoami
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils._validators import validate_repo_id
from transformers import Trainer, TrainingArguments

from hf_hybrid.training.errors import one_line


def check_hub_access(training_args: TrainingArguments, token: str | None) -> None:
    """Check that a run can push, before data are read.

    Training arguments without ``--hub_token`` get `token`, the one for downloads.

    Raises:
        ValueError: There is no token, it may not write, or the Hub refuses it or cannot be reached.
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
    except Exception as error:  # httpx has its own exceptions, and a proxy may answer anything
        status = getattr(getattr(error, "response", None), "status_code", None)
        problem = "refuses the token" if status in (401, 403) else "cannot be asked who the token belongs to"
        raise ValueError(f"--push_to_hub: {constants.ENDPOINT} {problem}: {one_line(error)}") from error
    if user.get("auth", {}).get("accessToken", {}).get("role") == "read":
        raise ValueError("--push_to_hub needs a token that may write to the Hub; got one that may only read")


def push(trainer: Trainer) -> None:
    """Push what is saved in the output folder.

    Raises:
        ValueError: Pushing failed; the message says where everything is and how to push it later.
    """
    try:
        trainer.push_to_hub()
    except Exception as error:
        folder, repository = str(trainer.args.output_dir), trainer.hub_model_id or trainer.args.hub_model_id or "NAME"
        revision = trainer.args.hub_revision
        again = ["hf", "upload", repository, folder, ".", "--exclude", "checkpoint-*/*"]
        again += ["--revision", revision] if revision else []
        raise ValueError(
            f"--push_to_hub: the model could not be pushed to {repository}: {explain_hub_error(error)} Nothing is "
            f"lost: model, tokenizer, results and model card are in {folder}. To push them later: {shlex.join(again)}"
        ) from error


def explain_hub_error(error: BaseException) -> str:
    """Join the messages of an error and its causes, which contain the server's answer."""
    said: list[str] = []
    cause: BaseException | None = error
    while cause is not None and len(said) < 3:
        if not said or (str(cause) and one_line(cause) not in said):
            said.append(one_line(cause))
        cause = cause.__cause__ or cause.__context__
    return ". ".join(text.rstrip(".") for text in said) + "."
