"""Adapters in the scripts: ``--peft``, and a folder with an adapter as ``--model_name_or_path``.

The folder of an adapter names its base, the checkpoint that it belongs to. If a run starts from another architecture's
checkpoint (``--init_from``), it writes the base next to the adapter, in ``base_model``.
"""

import copy
import functools
import json
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from huggingface_hub import ModelCard, snapshot_download
from huggingface_hub.errors import HFValidationError
from peft import PeftModel, get_peft_model
from peft.utils import ModulesToSaveWrapper
from safetensors import SafetensorError
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel, Trainer, TrainingArguments
from transformers.utils.peft_utils import ADAPTER_CONFIG_NAME, find_adapter_config_file

from hf_hybrid import peft_config
from hf_hybrid.starters import STARTERS, name_of_starter, starter
from hf_hybrid.suggestions import did_you_mean
from hf_hybrid.training.errors import one_line
from hf_hybrid.training.flags.model import ModelArguments
from hf_hybrid.training.flags.overrides import parse_peft_config
from hf_hybrid.training.processes import shards_weights
from hf_hybrid.training.run_folder.checkpoints import saving_into
from hf_hybrid.training.run_folder.files import BASE_CONFIG, BASE_MODEL, CARD_FILE, MERGED_MODEL, replacing
from hf_hybrid.training.run_folder.resume import check_resumed_adapter, check_resumed_kind

logger = logging.getLogger(__name__)

_NOT_NEEDED = ["checkpoint-*", f"{MERGED_MODEL}/*", "training_args.bin"]
_HEADS = ("classifier", "score")  # peft itself saves these with every adapter of a classifier


# ---- checks before any work ----


class Base(NamedTuple):
    """The checkpoint that an adapter belongs to: a folder, or a name on the Hub and its revision."""

    name: str
    revision: str


def adapter_base(model_args: ModelArguments) -> Base | None:
    """Return the base of the adapter in ``--model_name_or_path``; None without an adapter.

    Raises:
        ValueError: The adapter names no base, or its base does not exist.
    """
    name = model_args.model_name_or_path
    if (folder := adapter_folder(model_args)) is None:
        return None
    path = folder / ADAPTER_CONFIG_NAME
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
        base = config["base_model_name_or_path"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"--model_name_or_path {name}: its {ADAPTER_CONFIG_NAME} cannot be read. {error}") from error
    if not base:
        raise ValueError(f"--model_name_or_path {name}: its {ADAPTER_CONFIG_NAME} names no base_model_name_or_path")
    if os.path.isabs(base) and not Path(base).is_dir():
        beside = [old for old in (folder / BASE_MODEL, folder.parent / BASE_MODEL) if old.is_dir()]
        if Path(base).name != BASE_MODEL or not beside:
            raise ValueError(
                f"--model_name_or_path {name} is an adapter of {base}, which does not exist; if it was moved, "
                f"write its new path into base_model_name_or_path in {path}"
            )
        base = os.path.abspath(beside[0])  # the whole folder was moved or pushed
    if base in STARTERS:  # runs record their own folders by absolute paths
        base = str(starter(base))
    return Base(str(base), config.get("revision") or "main")


def adapter_folder(model_args: ModelArguments) -> Path | None:
    """Return the folder of the adapter in ``--model_name_or_path``, downloaded if needed; None without an adapter."""
    name = model_args.model_name_or_path
    if name is None or Path(name, "config.json").is_file():
        return None
    if not Path(name).is_dir():
        return _download(name, model_args.cache_dir, model_args.token, model_args.model_revision)
    return Path(name) if find_adapter_config_file(name) is not None else None


@functools.cache
def _download(name: str, cache_dir: str | None, token: str | None, revision: str) -> Path | None:
    where: dict[str, Any] = {"cache_dir": cache_dir, "token": token, "revision": revision}
    try:
        if find_adapter_config_file(name, **where) is None:
            return None
        # next to the adapter: its base's labels, the tokenizer, perhaps the base itself
        return Path(snapshot_download(name, ignore_patterns=_NOT_NEEDED, **where))
    except (OSError, HFValidationError):  # not on the Hub: loading the model will say so
        return None


def uses_adapter(model_args: ModelArguments) -> bool:
    """Whether the run's model has an adapter; such a model cannot be resized."""
    return model_args.peft is not None or adapter_base(model_args) is not None


def load_base_config(model_args: ModelArguments, **hub_arguments: Any) -> PreTrainedConfig | None:
    """Load the configuration of an adapter's base, including labels, if it is in the adapter's folder."""
    path = Path(str(adapter_folder(model_args)), BASE_CONFIG)
    return AutoConfig.from_pretrained(path, **hub_arguments) if path.is_file() else None


def check_adapter(model: PreTrainedModel, model_args: ModelArguments) -> None:
    """Put the ``--peft`` adapter on a model without memory, so that peft refuses it before data are read.

    Raises:
        ValueError: The adapter does not fit this model.
    """
    if model_args.peft is not None:
        freeze_loaded(model, [])
        _attach_new(model, model_args, task_type=None)


def check_adapter_flags(model_args: ModelArguments, training_args: TrainingArguments, resume_from: str | None) -> None:
    """Refuse adapter flags that the run cannot use, and a checkpoint of the other kind.

    Raises:
        ValueError: There is nothing to merge or to train, or only one of checkpoint and run has an adapter.
    """
    trains_adapter = uses_adapter(model_args)
    for flag, given in (("peft", model_args.peft), ("merge_adapter", model_args.merge_adapter)):
        if given and not training_args.do_train:
            raise ValueError(f"--{flag} needs --do_train")
    if model_args.merge_adapter and not trains_adapter:
        raise ValueError("--merge_adapter needs an adapter: give --peft, or the folder of one as --model_name_or_path")
    if model_args.merge_adapter and shards_weights(training_args):
        raise ValueError(
            "--merge_adapter needs whole weights, and FSDP and DeepSpeed shard them: merge the saved adapter later, "
            "with peft's merge_and_unload in one process"
        )
    check_resumed_kind(resume_from, trains_adapter=trains_adapter)


# ---- the model ----


def freeze_loaded(model: PreTrainedModel, missing: list[str]) -> None:
    """Freeze all weights but those that the checkpoint lacked: the adapter must include these."""
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(parameter.requires_grad and name in missing)


def attach_adapter(
    model: PreTrainedModel,
    model_args: ModelArguments,
    training_args: TrainingArguments,
    resume_from: str | None,
    *,
    task_type: str | None,
) -> PreTrainedModel | PeftModel:
    """Put the ``--peft`` adapter, or the one in ``--model_name_or_path``, on a model.

    Call it after all resizing; the model changes in place. `task_type` is PEFT's name of the task, if it has one.

    Returns:
        The model with the adapter, or the model itself if there is none.

    Raises:
        ValueError: The adapter does not fit the model, lacks weights that its base lacks too, or has another
            configuration than the one in the checkpoint.
    """
    if (owner := adapter_base(model_args)) is not None:
        return attach_loaded(model, model_args, owner, trains=training_args.do_train)
    if model_args.peft is None:
        return model
    base = str(model_args.model_name_or_path)
    if model_args.init_from is not None:
        base = os.path.abspath(Path(str(training_args.output_dir), BASE_MODEL))
        if resume_from is not None and Path(base).is_dir():  # its random weights were drawn then, and stay frozen
            model.load_state_dict(type(model).from_pretrained(base, dtype=model.dtype).state_dict())
    elif Path(base).is_dir():
        base = os.path.abspath(base)
    adapted = _attach_new(model, model_args, task_type=task_type)
    config = adapted.peft_config["default"]
    config.base_model_name_or_path = base
    if not os.path.isabs(base) and model_args.model_revision != "main":
        config.revision = model_args.model_revision
    check_resumed_adapter(config.to_dict(), resume_from)
    trained, total = adapted.get_nb_trainable_parameters()
    share = 100 * trained / total
    logger.info("An adapter is trained: %s of %s parameters (%.2f %%).", f"{trained:,}", f"{total:,}", share)
    return adapted


def _attach_new(model: PreTrainedModel, model_args: ModelArguments, *, task_type: str | None) -> PeftModel:
    method = str(model_args.peft)
    fields = parse_peft_config(model_args.peft_config or "{}", method)
    _check_saved_modules(model, fields)
    if task_type is not None:
        fields["task_type"] = task_type
    if isinstance(fields.get("init_lora_weights"), str) and model.device.type == "meta":
        del fields["init_lora_weights"]  # computed from weights, which a model without memory lacks
    try:
        config: Any = peft_config(model, method, **fields)
        config.modules_to_save = _trained_beside(model, config)
        return get_peft_model(model, config)
    except (ValueError, TypeError, NotImplementedError, ImportError) as error:
        given = "" if model_args.peft_config is None else f" --peft_config {model_args.peft_config}"
        raise ValueError(f"--peft {method}{given}: {one_line(error)}") from error


def _check_saved_modules(model: PreTrainedModel, fields: Mapping[str, Any]) -> None:
    """Refuse names that no module has: peft ignores them silently."""
    named = [name for name, _ in model.named_modules() if name]
    for asked in fields.get("modules_to_save") or []:
        if not any(name.endswith(asked) for name in named):  # as peft finds them
            known = {name.rpartition(".")[2] for name in named}
            raise ValueError(
                f"--peft_config: modules_to_save names no module of {type(model).__name__}: {asked!r}."
                f"{did_you_mean(asked, sorted(known))}"
            )


def _trained_beside(model: PreTrainedModel, config: Any) -> list[str] | None:
    """List the modules to save with an adapter: the requested ones, and those whose weights the checkpoint lacked."""
    asked = list(config.modules_to_save or [])
    known = (*asked, *(_HEADS if config.task_type == "SEQ_CLS" else ()))
    owners = {name.rpartition(".")[0] for name, weight in model.named_parameters() if weight.requires_grad}
    new = [
        owner
        for owner in sorted(owners)
        if not any(owner.startswith(f"{other}.") for other in owners if other)
        and not any(f".{name}." in f".{owner}." for name in known)  # named, or a part of what is
    ]
    return [*asked, *new] or None


def attach_loaded(model: PreTrainedModel, model_args: ModelArguments, base: Base, *, trains: bool) -> PeftModel:
    """Put the adapter in ``--model_name_or_path`` on its base, to train it further or to use it.

    Raises:
        ValueError: It does not fit, or lacks weights that its base lacks too.
    """
    name = str(model_args.model_name_or_path)
    new = [key for key, weight in model.named_parameters() if weight.requires_grad]
    try:
        adapted = PeftModel.from_pretrained(model, str(adapter_folder(model_args)), is_trainable=trains)
    except (OSError, ValueError, TypeError, RuntimeError, SafetensorError) as error:
        raise ValueError(f"--model_name_or_path {name}: the adapter cannot be loaded. {one_line(error)}") from error
    kept = {key for key, _ in model.named_parameters()}  # weights that the adapter replaces have other names now
    if lacking := [key for key in new if key in kept]:
        raise ValueError(
            f"--model_name_or_path {name}: neither the adapter nor its base has {len(lacking)} of the weights of "
            f"{type(model).__name__}, such as {lacking[0]}"
        )
    adapted.peft_config["default"].base_model_name_or_path = base.name
    return adapted


# ---- saving ----


def complete_saved_adapter(model: Any, folder: str | os.PathLike[str]) -> None:
    """Complete what peft has saved of an adapter, so that it says what its base was, also on other machines.

    - ``base_config.json`` gets the base's configuration: peft saves none, and a classifier's labels would be lost. (It
      is not called ``config.json``: transformers would look for the whole model next to that.)
    - ``adapter_config.json`` gets a starter's name in place of its folder. The adapter itself keeps the folder, since
      peft looks for the base whenever it saves, and would ask the Hub for a name.
    - ``README.md`` loses a base that is a local folder.
    """
    if not isinstance(model, PeftModel):
        return
    base: Any = model.get_base_model()
    base.config.to_json_file(Path(folder, BASE_CONFIG))
    path = Path(folder, ADAPTER_CONFIG_NAME)
    config = json.loads(path.read_text(encoding="utf-8"))
    source = str(config["base_model_name_or_path"])
    if (name := name_of_starter(source)) != source:
        config["base_model_name_or_path"] = name
        with replacing(path) as unfinished:
            unfinished.write_text(json.dumps(config, indent=2, sort_keys=True), encoding="utf-8")
    card = ModelCard.load(Path(folder, CARD_FILE))
    if Path(str(card.data.base_model)).is_dir():
        own = f"base_model:adapter:{card.data.base_model}"
        card.data.base_model, card.data.tags = None, [tag for tag in card.data.tags or () if tag != own]
        with replacing(Path(folder, CARD_FILE)) as unfinished:
            card.save(unfinished)


def save_base_model(trainer: Trainer, *, new: bool) -> None:
    """Write an adapter's base into its folder if that is the only place to load it from.

    A `new` run replaces a base in the folder: it may be cut off, or another run's.
    """
    model: Any = trainer.model
    folder = Path(str(trainer.args.output_dir), BASE_MODEL)
    base = model.peft_config["default"].base_model_name_or_path if isinstance(model, PeftModel) else None
    if base == os.path.abspath(folder) and trainer.is_world_process_zero() and (new or not folder.is_dir()):
        with saving_into(folder):
            _copy_without_saved_modules(model).unload().save_pretrained(folder)


def save_merged_model(trainer: Trainer) -> None:
    """Write a checkpoint of the model with its adapter merged into its weights, and the tokenizer."""
    if not trainer.is_world_process_zero():
        return
    folder = Path(str(trainer.args.output_dir), MERGED_MODEL)
    model: Any = trainer.model
    merged = _copy_without_saved_modules(model).merge_and_unload()
    with saving_into(folder):
        merged.save_pretrained(folder)
        if trainer.processing_class is not None:
            trainer.processing_class.save_pretrained(folder)
    logger.info("The model with its adapter merged is in %s.", folder)


def _copy_without_saved_modules(model: PeftModel) -> Any:
    """Copy a model with its saved modules in place: IA3 cannot merge those with inner modules."""
    copied: Any = copy.deepcopy(model)
    for name, module in list(copied.named_modules()):
        if isinstance(module, ModulesToSaveWrapper):
            parent, _, leaf = name.rpartition(".")
            saved = module.unload_and_optionally_merge_module(merge=True, safe_merge=False, adapter_names=None)
            setattr(copied.get_submodule(parent), leaf, saved)
    return copied
