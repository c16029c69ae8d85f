"""Load or build the configuration of a run's model, check it for the task, and fit it to the requested lengths."""

import copy
import dataclasses
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForSeq2SeqLM,
    PreTrainedConfig,
    PreTrainedModel,
)

from hf_hybrid.models.spade.conversion_spade import config_from_t5
from hf_hybrid.starters import STARTERS
from hf_hybrid.suggestions import did_you_mean
from hf_hybrid.training.errors import CONFIG_ERRORS, explain_config_error, one_line
from hf_hybrid.training.flags.model import ModelArguments
from hf_hybrid.training.model.adapters import Base, adapter_base, check_adapter, load_base_config, uses_adapter
from hf_hybrid.training.run_folder.checkpoints import complete_checkpoints, was_cut_off
from hf_hybrid.training.run_folder.files import ADAPTER_FILES, WEIGHTS_FILES

logger = logging.getLogger(__name__)

_MOST_OF_PADDING = 8  # `positions_of_padding` with the tokenizer of a new model, which has padding among its first ids


def load_config(
    model_args: ModelArguments,
    auto_class: Any,
    *,
    preset: str | None = None,
    role: Mapping[str, Any] | None = None,
    reads: str = "input_ids",
) -> PreTrainedConfig:
    """Load the checkpoint's configuration, or build one from ``--model_type`` and ``--config_overrides``.

    `preset` is the size of a new model without overrides, if its architecture has presets. `role` holds the fields
    that fit an architecture with several roles to the task; fields that it lacks are ignored. `reads` is the input
    that the task has for the model: ``input_ids`` or ``input_values``.

    Raises:
        ValueError: The model type is unknown or has no class for the task, an override does not fit, or the folder is
            not a checkpoint.
    """
    if model_args.model_type is not None and model_args.init_from is None:
        return _new_config(model_args, auto_class, preset, role, reads)
    source, config = read_config(model_args)
    if model_args.init_from is not None:
        config = _config_from_source(model_args, auto_class, config)
        if model_args.peft is not None:
            check_adapter(_build_without_memory(auto_class, config), model_args)
        return config
    hint = _who_takes(type(config), auto_class, is_pair=config.is_encoder_decoder)
    has_code = auto_class.__name__ in (getattr(config, "auto_map", None) or {})
    if type(config) not in auto_class._model_mapping and not has_code:
        raise ValueError(
            f"{source}: its architecture {config.model_type!r} has no class for {auto_class.__name__}{hint}"
        )
    if not config.is_encoder_decoder:  # the task's class takes the decoder alone, or refuses
        for field, value in _fitting(role, type(config)).items():
            if getattr(config, field) != value:
                logger.warning("%s: %s is set to %s.", source, field, value)
                setattr(config, field, value)
    if not has_code:
        try:
            model = _check_buildable(auto_class, config, reads)
        except Exception as error:
            raise ValueError(f"{source}: {one_line(error)}{hint}") from error
        check_adapter(model, model_args)
    return config


def _who_takes(config_class: type[PreTrainedConfig], auto_class: Any, *, is_pair: bool = True) -> str:
    """Return what to add to a message that refuses a configuration: what would take it, if that is known."""
    pairs, encoders = (auto._model_mapping for auto in (AutoModelForSeq2SeqLM, AutoModelForMaskedLM))
    if auto_class is AutoModelForCausalLM and config_class in pairs and is_pair:
        return ". It is an encoder-decoder: train it with summarization"
    if auto_class is AutoModelForSeq2SeqLM and config_class in encoders:
        return ". It is no encoder-decoder: pretrain takes it with --objective masked_words"
    return ""


def _new_config(
    model_args: ModelArguments, auto_class: Any, preset: str | None, role: Mapping[str, Any] | None, reads: str
) -> PreTrainedConfig:
    config_class: Any = _config_class(str(model_args.model_type), auto_class)
    values = model_args.overrides(config_class)
    if preset is not None and not values and hasattr(config_class, "from_preset"):
        logger.info("The new model has preset=%s; --config_overrides gives it another size.", preset)
    else:
        preset = values.pop("preset", None)
    try:
        values = _fitting(role, config_class) | values
        config = config_class(**values) if preset is None else config_class.from_preset(str(preset), **values)
        _check_buildable(auto_class, config, reads)
        return config
    except Exception as error:
        flag = "model_type" if model_args.config_overrides is None else "config_overrides"
        raise ValueError(f"{model_args.shown(flag)}: {one_line(error)}") from error


def read_config(model_args: ModelArguments) -> tuple[str, PreTrainedConfig]:
    """Read the named configuration, or that of a named adapter's base; return where it comes from, and it.

    Raises:
        ValueError: The folder is not a checkpoint, or has no configuration.
    """
    flag = "model_name_or_path" if model_args.config_name is None else "config_name"
    source = model_args.shown(flag)
    base = adapter_base(model_args)
    if base is not None:
        _check_start_from_adapter(model_args)
    elif model_args.model_name_or_path is not None:
        check_checkpoint_folder("model_name_or_path", model_args.model_name_or_path, ("config.json",), WEIGHTS_FILES)
    if model_args.config_name is not None:
        check_checkpoint_folder("config_name", model_args.config_name, ("config.json",))
    name = str(getattr(model_args, flag)) if base is None else base.name
    try:
        config = None if base is None else load_base_config(model_args, **hub_arguments(model_args))
        if config is None:
            config = AutoConfig.from_pretrained(name, **hub_arguments(model_args, base))
        return source, config
    except CONFIG_ERRORS as error:
        hint = did_you_mean(name, STARTERS) if "/" not in name and not Path(name).exists() else ""
        raise ValueError(f"{source}: no configuration could be loaded. {explain_config_error(error)}{hint}") from error


def _check_start_from_adapter(model_args: ModelArguments) -> None:
    name = model_args.model_name_or_path
    for flag in ("init_from", "peft", "config_name"):
        if (value := getattr(model_args, flag)) is not None:
            raise ValueError(
                f"--{flag} {value} cannot be combined with --model_name_or_path {name}, which is an adapter: continue "
                "its training without that flag, or start from a model with the adapter merged (--merge_adapter)"
            )
    check_checkpoint_folder("model_name_or_path", str(name), ("adapter_config.json",), ADAPTER_FILES)


def _build_without_memory(auto_class: Any, config: PreTrainedConfig) -> PreTrainedModel:
    with torch.device("meta"):
        return auto_class.from_config(copy.deepcopy(config))


def _check_buildable(auto_class: Any, config: PreTrainedConfig, reads: str) -> PreTrainedModel:
    """Build the model without memory, so that its class refuses a configuration before data are read."""
    model = _build_without_memory(auto_class, config)
    if model.main_input_name != reads:
        wanted = "tokens here" if reads == "input_ids" else "real values (input_values) here, as CHELA and SPADE can"
        raise ValueError(
            f"{type(model).__name__} must read {wanted}; with this configuration it reads {model.main_input_name}"
        )
    return model


def _config_from_source(model_args: ModelArguments, auto_class: Any, config: PreTrainedConfig) -> PreTrainedConfig:
    config_class: Any = _config_class(str(model_args.init_type), auto_class)
    flags = f"--init_from {model_args.init_from} {model_args.shown('model_name_or_path')}"
    if auto_class is AutoModelForCausalLM:
        raise ValueError(f"{flags}: a causal language model has no encoder that T5's could become")
    overrides = model_args.overrides(config_class)
    make = config_from_t5 if model_args.init_type == "spade" else config_class.from_parent
    try:
        return make(config, **overrides)
    except (ValueError, StrictDataclassError) as error:
        raise ValueError(f"{flags}: {one_line(error)}") from error


def _fitting(role: Mapping[str, Any] | None, config_class: type[PreTrainedConfig]) -> dict[str, Any]:
    fields = {field.name for field in dataclasses.fields(config_class)}
    return {name: value for name, value in (role or {}).items() if name in fields}


def _config_class(model_type: str, auto_class: Any) -> type[PreTrainedConfig]:
    known = model_type in CONFIG_MAPPING
    if known and CONFIG_MAPPING[model_type] in auto_class._model_mapping:
        return CONFIG_MAPPING[model_type]
    supported = sorted(config.model_type for config in auto_class._model_mapping)
    problem = f"has no class for {auto_class.__name__}" if known else "is not a known architecture"
    hint = _who_takes(CONFIG_MAPPING[model_type], auto_class) if known else ""
    raise ValueError(
        f"--model_type {model_type} {problem}{hint}.{did_you_mean(model_type, supported)} "
        f"Possible: {', '.join(supported)}"
    )


def check_checkpoint_folder(flag: str, name: str, *required: tuple[str, ...]) -> None:
    """Raise a ValueError if the name is, or looks like, a local folder that lacks a checkpoint's files."""
    folder = Path(name)
    if not folder.exists():
        if name.startswith((".", "/", "~")) or name.count("/") > 1:
            raise ValueError(f"--{flag} {name}: there is no such folder")
        return  # a Hub id
    if not folder.is_dir():
        raise ValueError(f"--{flag} {name} is a file; it must be a checkpoint folder or a Hub id")
    if was_cut_off(folder):
        raise ValueError(
            f"--{flag} {name} does not hold a complete model: its saving was cut off. Run the command that trained it "
            "again, with --resume_from_checkpoint auto"
        )

    def lacks(place: Path) -> list[str]:
        return [names[0] for names in required if not any((place / entry).is_file() for entry in names)]

    if missing := lacks(folder):
        models = sorted(str(inner) for inner in folder.iterdir() if inner.is_dir() and not lacks(inner))
        inside = complete_checkpoints(folder) or models
        hint = f" Did you mean {inside[-1]}?" if inside else ""
        raise ValueError(f"--{flag} {name} is not a checkpoint: {' and '.join(missing)} missing.{hint}")


def hub_arguments(model_args: ModelArguments, base: Base | None = None) -> dict[str, Any]:
    """Return the Hub's arguments of `from_pretrained`; with `base`, those to load an adapter's base."""
    return {
        "cache_dir": model_args.cache_dir,
        "revision": model_args.model_revision if base is None else base.revision,
        "token": model_args.token,
        "trust_remote_code": model_args.trust_remote_code,
    }


def fit_positions(
    model_args: ModelArguments,
    config: PreTrainedConfig,
    auto_class: Any,
    asked: Mapping[str, Mapping[str, int]],
    *,
    permitted: bool = True,
) -> int | None:
    """Lengthen a new model's position embeddings to the requested lengths; check those of a checkpoint.

    `asked` maps each configuration field that limits a length to the flags that request one, with their values. The
    configuration changes in place. A model with an adapter cannot be lengthened.

    Returns:
        The length to which a checkpoint's position embeddings must be resized after loading, if any.

    Raises:
        ValueError: A checkpoint's embeddings are too short, and may not or cannot be lengthened.
    """
    permitted = permitted and not uses_adapter(model_args)
    resized = None
    limits = {name: limit for name in asked if isinstance(limit := getattr(config, name, None), int)}
    before = 0  # positions that no token has
    if limits and type(config) in auto_class._model_mapping:
        before = positions_of_padding(_build_without_memory(auto_class, config))
    for name in limits:
        flag, needed = max(asked[name].items(), key=lambda item: item[1])
        if (limit := limits[name] - before) >= needed:
            continue
        if permitted and model_args.is_new:
            setattr(config, name, needed + (before and _MOST_OF_PADDING))
        elif permitted and name == "max_position_embeddings" and _can_lengthen_positions(config, auto_class):
            resized = needed
        else:
            raise ValueError(
                f"--{flag} must be at most the model's {limit} position embeddings ({name}); got {needed}"
            )
        logger.warning("The model's %s is raised from %d to %d.", name, limit, needed)
    return resized


def positions_of_padding(model: PreTrainedModel) -> int:
    """Return how many position embeddings stand before that of the first token: RoBERTa counts behind padding."""
    tables = [module for name, module in model.named_modules() if name.endswith("position_embeddings")]
    return max(
        (table.padding_idx + 1 for table in tables if getattr(table, "padding_idx", None) is not None), default=0
    )


def _can_lengthen_positions(config: PreTrainedConfig, auto_class: Any) -> bool:
    model_class: Any = auto_class._model_mapping.get(type(config), PreTrainedModel)
    return model_class.resize_position_embeddings is not PreTrainedModel.resize_position_embeddings
