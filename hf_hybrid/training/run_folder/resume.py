"""``--resume_from_checkpoint``, from the flag to the remaining steps.

`find_resume_checkpoint` finds the checkpoint; `check_resumed_model`, `check_resumed_kind` and `check_resumed_adapter`
refuse one of another model, `check_resumed_examples` one of other examples; `output_folder` keeps it and deletes the
ones after it; `finish_resumed` ends a run that has no steps left, and Trainer resumes any other. Data, seed and flags
come from the command line.
"""

import json
import logging
from collections.abc import Mapping, Set
from pathlib import Path
from typing import Any

from transformers import PreTrainedConfig, Trainer, TrainerCallback, TrainerState, TrainingArguments
from transformers.trainer_callback import ExportableState
from transformers.utils.peft_utils import ADAPTER_CONFIG_NAME

from hf_hybrid.training.errors import CONFIG_ERRORS, explain_config_error
from hf_hybrid.training.run_folder.checkpoints import complete_checkpoints, faults, list_checkpoints
from hf_hybrid.training.run_folder.files import MARKER

logger = logging.getLogger(__name__)

# set by saving, by Trainer, and by --source_prefix
_NOT_COMPARED = {"architectures", "dtype", "task_specific_params", "transformers_version", "use_cache"}
# only read to initialize weights
_STARTING_VALUES = {
    *("alpha_init", "embedding_initializer_range", "init_std", "initializer_factor", "initializer_range"),
    *("leak_init", "relative_attention_init", "score_scale_init", "threshold_init"),
}
_RESIZED = {"max_position_embeddings", "vocab_size"}
# what decides an adapter's tensors and what they do
_ADAPTER_FIELDS = (
    "peft_type", "r", "lora_alpha", "use_dora", "use_rslora", "target_modules", "feedforward_modules",
    "modules_to_save", "rank_pattern", "alpha_pattern", "bias",
)  # fmt: skip


def find_resume_checkpoint(training_args: TrainingArguments) -> str | None:
    """Resolve ``--resume_from_checkpoint`` to a folder that can be resumed from.

    Raises:
        ValueError: The folder is not a complete checkpoint, ``true`` found none, or there is nothing to train.
    """
    wanted = training_args.resume_from_checkpoint
    if wanted is None:
        return None
    if not training_args.do_train:
        raise ValueError(f"--resume_from_checkpoint {wanted} needs --do_train")
    if wanted in ("auto", "true"):
        for checkpoint in reversed(list_checkpoints(Path(str(training_args.output_dir)))):
            if not (wrong := faults(checkpoint)):
                return str(checkpoint)
            if training_args.process_index == 0:
                logger.warning("%s is skipped: %s.", checkpoint, " and ".join(wrong))
        if wanted == "true":
            raise ValueError(
                f"--resume_from_checkpoint true: there is no complete checkpoint in --output_dir "
                f"{training_args.output_dir}"
            )
        return None
    folder = Path(wanted)
    if not folder.is_dir():
        raise ValueError(f"--resume_from_checkpoint {wanted}: there is no such folder")
    if wrong := faults(folder, named=True):
        inside = complete_checkpoints(folder) or complete_checkpoints(folder.parent)
        hint = f" Did you mean {inside[-1]}?" if inside else ""
        own = f" If you changed it yourself, delete its {MARKER}." if (folder / MARKER).exists() else ""
        raise ValueError(
            f"--resume_from_checkpoint {wanted} is not a complete checkpoint: {' and '.join(wrong)}.{hint}{own}"
        )
    return wanted


def check_resumed_model(
    config: PreTrainedConfig, resume_from: str | None, *, new: bool, encoder_alone: bool = False
) -> None:
    """Refuse to resume a model whose configuration differs from the checkpoint's.

    Trainer loads the tensors whose names fit: without this check, a run ends in a traceback or trains a wrong model.

    The configuration of a `new` model already fits tokenizer and lengths; a loaded one may still be resized. With
    `encoder_alone`, some classes train the encoder of an encoder-decoder, and their checkpoints are encoders'.

    Raises:
        ValueError: A field differs, or the checkpoint's configuration cannot be read.
    """
    if resume_from is None or not (path := Path(resume_from, "config.json")).is_file():
        return  # sharded checkpoints may hold states only
    try:
        saved = json.loads(path.read_text(encoding="utf-8"))
        if saved["model_type"] == config.model_type:
            saved = type(config).from_dict(saved).to_dict()
    except CONFIG_ERRORS as error:
        raise ValueError(
            f"--resume_from_checkpoint {resume_from}: its config.json cannot be read. {explain_config_error(error)}"
        ) from error
    if encoder_alone and config.is_encoder_decoder and not saved.get("is_encoder_decoder", True):
        config = config.get_text_config(encoder=True)
        config.is_encoder_decoder = False
    skipped = _NOT_COMPARED | _STARTING_VALUES | (set() if new else _RESIZED)
    before, now = (_settings(values, skipped) for values in (saved, config.to_dict()))
    for name in ["model_type", *(name for name in now if name in before)]:
        asked = now[name]
        if isinstance(before[name], list) and not isinstance(asked, list):
            asked = [asked] * len(before[name])  # LED saves one value per layer
        if asked != before[name]:
            override = f" (--config_overrides {name}={before[name]})" if name != "model_type" else ""
            raise ValueError(
                f"--resume_from_checkpoint {resume_from}: {name} is {before[name]!r} there and {now[name]!r} in this "
                f"run; continue with that model{override}, or start anew in another --output_dir"
            )


def _settings(config: dict[str, Any], skipped: Set[str]) -> dict[str, Any]:
    """Return a configuration as read from JSON, without the fields that no user sets, at any depth."""

    def choose(fields: dict[str, Any]) -> dict[str, Any]:
        names = (name for name in fields if not (name in skipped or name[:1] == "_" or name.endswith("_token_id")))
        return {name: fields[name] for name in names}

    return json.loads(json.dumps(config, default=str), object_hook=choose)


def check_resumed_kind(resume_from: str | None, *, trains_adapter: bool) -> None:
    """Refuse to resume an adapter's run with one that trains a whole model, or the other way round."""
    if resume_from is not None and Path(resume_from, ADAPTER_CONFIG_NAME).is_file() != trains_adapter:
        there, here = ("a whole model", "an adapter") if trains_adapter else ("an adapter", "a whole model")
        raise ValueError(
            f"--resume_from_checkpoint {resume_from} is of a run that trained {there}; this one trains {here} (--peft)"
        )


def check_resumed_adapter(config: Mapping[str, Any], resume_from: str | None) -> None:
    """Refuse to resume an adapter whose configuration differs from the checkpoint's."""
    if resume_from is None:
        return
    saved = json.loads(Path(resume_from, ADAPTER_CONFIG_NAME).read_text(encoding="utf-8"))
    now = json.loads(json.dumps(config, default=list))
    for name in _ADAPTER_FIELDS:
        before, asked = (sorted(set(v[name])) if isinstance(v.get(name), list) else v.get(name) for v in (saved, now))
        if before != asked:
            raise ValueError(
                f"--resume_from_checkpoint {resume_from}: {name} of its adapter is {before!r} and {asked!r} in this "
                "run; continue with that adapter, or start anew in another --output_dir"
            )


def saved_state(checkpoint: str) -> TrainerState:
    """Return the state of the training that a checkpoint was saved in."""
    return TrainerState.load_from_json(str(Path(checkpoint, "trainer_state.json")))


class ExamplesRecord(TrainerCallback, ExportableState):
    """Makes Trainer write into each checkpoint's state what decides the examples of the run: names and values."""

    def __init__(self, facts: Mapping[str, Any]) -> None:
        self.facts = facts

    def state(self) -> dict[str, Any]:
        """Return the facts as Trainer saves them."""
        return {"args": {"facts": dict(self.facts)}, "attributes": {}}


def check_resumed_examples(facts: Mapping[str, Any], resume_from: str | None) -> None:
    """Refuse to resume with other examples than the checkpoint's run had, as far as its `ExamplesRecord` tells.

    Raises:
        ValueError: A fact has another value there.
    """
    if resume_from is None:
        return
    callbacks: Any = saved_state(resume_from).stateful_callbacks or {}  # by name in a file, a list in a run
    saved = callbacks.get(ExamplesRecord.__name__, {}).get("args", {}).get("facts", {})
    for name, now in facts.items():
        if name in saved and saved[name] != now:
            raise ValueError(
                f"--resume_from_checkpoint {resume_from}: {name} is {saved[name]!r} there and {now!r} in this run, "
                "whose examples would be others; continue with that, or start a new run in another --output_dir with "
                f"--model_name_or_path {resume_from}"
            )


def finish_resumed(trainer: Trainer, resume_from: str | None) -> bool:
    """Load a checkpoint that has all its steps, since Trainer would take one more; return whether it has."""
    if resume_from is None:
        return False
    state = saved_state(resume_from)
    planned = trainer.args.max_steps if trainer.args.max_steps > 0 else state.max_steps
    more_epochs = trainer.args.max_steps < 1 and trainer.args.num_train_epochs > state.num_train_epochs
    if more_epochs or state.global_step < planned:
        return False
    logger.warning("%s has had %d of %d steps: nothing is left to train.", resume_from, state.global_step, planned)
    best = state.best_model_checkpoint
    wanted = best if trainer.args.load_best_model_at_end and best is not None and Path(best).is_dir() else resume_from
    trainer._load_from_checkpoint(wanted)
    trainer.state = state
    return True
