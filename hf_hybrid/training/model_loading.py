"""Configuration, tokenizer and model of a run: loaded, or made anew and fitted to each other."""

import copy
import dataclasses
import logging
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    set_seed,
)

from hf_hybrid.data.tokenizer import byte_tokenizer, train_tokenizer
from hf_hybrid.models.spade.conversion_spade import NEW_TENSORS, config_from_t5
from hf_hybrid.suggestions import did_you_mean
from hf_hybrid.training.adapters import (
    Base,
    adapter_base,
    adapter_folder,
    check_adapter,
    freeze_loaded,
    load_base_config,
    uses_adapter,
)
from hf_hybrid.training.arguments import ModelArguments
from hf_hybrid.training.checkpoints import was_cut_off
from hf_hybrid.training.command_line import CONFIG_ERRORS, explain_config_error, one_line
from hf_hybrid.training.config_overrides import parse_config_overrides
from hf_hybrid.training.data_arguments import DataArguments
from hf_hybrid.training.output_folder import ADAPTER_FILES, WEIGHTS_FILES, complete_checkpoints

__all__ = [
    "check_tokenizer_source",
    "fit_config_to_tokenizer",
    "fit_positions",
    "load_config",
    "load_model",
    "load_tokenizer",
    "train_new_tokenizer",
]

logger = logging.getLogger(__name__)

NO_TOKENIZER = "no tokenizer is named and there is no training split to train one on: give --tokenizer_name"
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "vocab.json", "vocab.txt", "spiece.model")


def load_config(
    model_args: ModelArguments,
    auto_class: Any,
    *,
    preset: str | None = None,
    role: Mapping[str, Any] | None = None,
) -> PreTrainedConfig:
    """Load the checkpoint's configuration, or build one from ``--model_type`` and ``--config_overrides``.

    Args:
        model_args: The model arguments.
        auto_class: The Auto class of the task, such as `AutoModelForSeq2SeqLM`.
        preset: The size of a new model for which no field is given, of an architecture that has named sizes.
        role: Fields that make an architecture of several roles take that of the task, where it has them.

    Raises:
        ValueError: The model type is unknown or has no class for the task, an override does not fit, or the folder is
            not a checkpoint.
    """
    if model_args.model_type is not None and model_args.init_from is None:
        config_class: Any = _config_class(model_args.model_type, auto_class)
        values = parse_config_overrides(model_args.config_overrides or "{}", config_class)
        if preset is not None and not values and hasattr(config_class, "from_preset"):
            logger.info("The new model has preset=%s; --config_overrides gives it another size.", preset)
        else:
            preset = values.pop("preset", None)
        try:
            values = _fitting(role, config_class) | values
            config = config_class(**values) if preset is None else config_class.from_preset(str(preset), **values)
            _check_buildable(auto_class, config)
            return config
        except Exception as error:
            raise ValueError(f"--config_overrides {model_args.config_overrides}: {one_line(error)}") from error
    base = adapter_base(model_args)
    if base is not None:
        _check_start_from_adapter(model_args)
    elif model_args.model_name_or_path is not None:
        _check_checkpoint_folder(
            "model_name_or_path", model_args.model_name_or_path, [("config.json",), WEIGHTS_FILES]
        )
    flag = "model_name_or_path" if model_args.config_name is None else "config_name"
    name = getattr(model_args, flag)
    if flag == "config_name":
        _check_checkpoint_folder(flag, name, [("config.json",)])
    try:
        config = None if base is None else load_base_config(model_args, **_hub_arguments(model_args))
        if config is None:
            config = AutoConfig.from_pretrained(
                name if base is None else base.name, **_hub_arguments(model_args, base)
            )
    except CONFIG_ERRORS as error:
        raise ValueError(
            f"--{flag} {name}: no configuration could be loaded. {explain_config_error(error)}"
        ) from error
    if model_args.init_from is not None:
        config = _config_from_source(model_args, auto_class, config)
        if model_args.peft is not None:
            check_adapter(_build_without_memory(auto_class, config), model_args)
        return config
    has_code = auto_class.__name__ in (getattr(config, "auto_map", None) or {})
    if type(config) not in auto_class._model_mapping and not has_code:
        raise ValueError(
            f"--{flag} {name}: its architecture {config.model_type!r} has no class for {auto_class.__name__}"
        )
    if not config.is_encoder_decoder:  # its decoder alone is for the class of the task to make, or to refuse
        for field, value in _fitting(role, type(config)).items():
            if getattr(config, field) != value:
                logger.warning("--%s %s: %s is set to %s.", flag, name, field, value)
                setattr(config, field, value)
    if not has_code:
        try:
            model = _check_buildable(auto_class, config)
        except Exception as error:
            raise ValueError(f"--{flag} {name}: {one_line(error)}") from error
        check_adapter(model, model_args)
    return config


def _check_start_from_adapter(model_args: ModelArguments) -> None:
    name = model_args.model_name_or_path
    for flag in ("init_from", "peft", "config_name"):
        if (value := getattr(model_args, flag)) is not None:
            raise ValueError(
                f"--{flag} {value} cannot be combined with --model_name_or_path {name}, which is an adapter: go on "
                "training it without that flag, or start from a model with the adapter merged (--merge_adapter)"
            )
    _check_checkpoint_folder("model_name_or_path", str(name), [("adapter_config.json",), ADAPTER_FILES])


def _build_without_memory(auto_class: Any, config: PreTrainedConfig) -> PreTrainedModel:
    with torch.device("meta"):
        return auto_class.from_config(copy.deepcopy(config))


def _check_buildable(auto_class: Any, config: PreTrainedConfig) -> PreTrainedModel:
    """Build the model without memory, so that what its class refuses is refused before data are read."""
    model = _build_without_memory(auto_class, config)
    if model.main_input_name != "input_ids":
        raise ValueError(
            f"{type(model).__name__} must read tokens here; with this configuration it reads {model.main_input_name}"
        )
    return model


def _config_from_source(model_args: ModelArguments, auto_class: Any, config: PreTrainedConfig) -> PreTrainedConfig:
    config_class: Any = _config_class(str(model_args.init_type), auto_class)
    flags = f"--init_from {model_args.init_from} --model_name_or_path {model_args.model_name_or_path}"
    if auto_class is AutoModelForCausalLM:
        raise ValueError(f"{flags}: a causal language model has no encoder that T5's could become")
    overrides = parse_config_overrides(model_args.config_overrides or "{}", config_class)
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
    raise ValueError(
        f"--model_type {model_type} {problem}.{did_you_mean(model_type, supported)} Possible: {', '.join(supported)}"
    )


def _check_checkpoint_folder(flag: str, name: str, required: Sequence[tuple[str, ...]]) -> None:
    """Raise a ValueError if the name is a local folder (or looks like one) that lacks what a checkpoint has."""
    folder = Path(name)
    if not folder.exists():
        if name.startswith((".", "/", "~")) or name.count("/") > 1:
            raise ValueError(f"--{flag} {name}: there is no such folder")
        return  # a Hub id
    if not folder.is_dir():
        raise ValueError(f"--{flag} {name} is a file; it must be a checkpoint folder or a Hub id")
    if was_cut_off(folder):
        raise ValueError(
            f"--{flag} {name} does not hold a whole model: its saving was cut off. Run the command that trained it "
            "again, with --resume_from_checkpoint auto"
        )
    missing = [names[0] for names in required if not any((folder / entry).is_file() for entry in names)]
    if missing:
        inside = complete_checkpoints(folder)
        hint = f" Did you mean {inside[-1]}?" if inside else ""
        raise ValueError(f"--{flag} {name} is not a checkpoint: {' and '.join(missing)} missing.{hint}")


def _hub_arguments(model_args: ModelArguments, base: Base | None = None) -> dict[str, Any]:
    return {
        "cache_dir": model_args.cache_dir,
        "revision": model_args.model_revision if base is None else base.revision,
        "token": model_args.token,
        "trust_remote_code": model_args.trust_remote_code,
    }


def load_tokenizer(
    model_args: ModelArguments, config: PreTrainedConfig, resume_from: str | None
) -> PreTrainedTokenizerBase | None:
    """Load the named tokenizer, or the checkpoint's, or make one of bytes, and fit a new model's configuration to it.

    Args:
        model_args: The model arguments.
        config: What `load_config` returned; changed in place.
        resume_from: The checkpoint of an interrupted run, whose tokenizer is used instead of training it again.

    Returns:
        The tokenizer, or None: then one must be trained once there are data.

    Raises:
        ValueError: The tokenizer cannot be loaded, has no end-of-sequence token, or is larger than the vocabulary.
    """
    checkpoint = model_args.model_name_or_path
    if (base := adapter_base(model_args)) is not None:
        folder = str(adapter_folder(model_args))
        checkpoint = folder if _has_tokenizer(folder) else base.name
    names = {
        "tokenizer_name": model_args.tokenizer_name,
        "model_name_or_path": checkpoint,
        "resume_from_checkpoint": resume_from,
    }
    flag, name = next(((flag, name) for flag, name in names.items() if name is not None), ("", None))
    if name is None and model_args.tokenizer_type != "bytes":
        return None
    tokenizer: PreTrainedTokenizerBase
    if name is None:
        tokenizer = byte_tokenizer()
        _fit_new_config(model_args, config, tokenizer)
        return tokenizer
    _check_checkpoint_folder(flag, name, [_TOKENIZER_FILES])
    try:
        tokenizer = AutoTokenizer.from_pretrained(name, **_hub_arguments(model_args))
    except (OSError, ValueError) as error:
        raise ValueError(f"--{flag} {name}: no tokenizer could be loaded. {error}") from error
    _complete_special_tokens(tokenizer, f"--{flag} {name}")
    _fit_new_config(model_args, config, tokenizer)
    return tokenizer


def _has_tokenizer(folder: str) -> bool:
    return any(Path(folder, name).is_file() for name in _TOKENIZER_FILES)


def check_tokenizer_source(data_args: DataArguments) -> None:
    """Check that there will be something to train a tokenizer on, as far as that can be seen before data are loaded.

    Raises:
        ValueError: Only files are named, and none of them for training.
    """
    if data_args.dataset_name is None and data_args.train_file is None:
        raise ValueError(NO_TOKENIZER)


def train_new_tokenizer(
    model_args: ModelArguments, config: PreTrainedConfig, split: Dataset | None, columns: Sequence[str]
) -> PreTrainedTokenizerBase:
    """Train a tokenizer and fit a new model's configuration to it.

    Args:
        model_args: The model arguments.
        config: What `load_config` returned; changed in place.
        split: The training split; None where there is none.
        columns: Its columns of text.

    Raises:
        ValueError: There is nothing to train it on, or it is larger than the vocabulary.
    """
    if split is None:
        raise ValueError(NO_TOKENIZER)
    tokenizer_type = model_args.tokenizer_type or "bpe"
    logger.info(
        "No tokenizer is named: one of up to %d entries (%s) is trained on the training split.",
        model_args.tokenizer_vocab_size,
        tokenizer_type,
    )
    tokenizer = train_tokenizer(
        _texts(split, columns),
        model_args.tokenizer_vocab_size,
        tokenizer_type=tokenizer_type,
        cache_dir=model_args.cache_dir,
        fingerprint=f"{split._fingerprint} {columns}",
    )
    _fit_new_config(model_args, config, tokenizer)
    return tokenizer


def _texts(split: Dataset, columns: Sequence[str]) -> Iterator[str]:
    for batch in split.select_columns(list(columns)).iter(batch_size=1000):
        for column in columns:
            yield from batch[column]


def _complete_special_tokens(tokenizer: PreTrainedTokenizerBase, source: str) -> None:
    if tokenizer.eos_token is None:
        if tokenizer.sep_token is None:
            raise ValueError(f"{source}: the tokenizer has neither an end-of-sequence nor a separator token")
        tokenizer.eos_token = tokenizer.sep_token
        logger.warning("%s: the separator %s serves as end of sequence.", source, tokenizer.eos_token)
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
        logger.warning("%s: the end of sequence %s also serves as padding.", source, tokenizer.pad_token)


def number_of_ids(tokenizer: PreTrainedTokenizerBase) -> int:
    """One more than the largest id that a tokenizer can give; its length where ids have no gaps."""
    return max(len(tokenizer), max(tokenizer.get_vocab().values()) + 1)


def _fit_new_config(model_args: ModelArguments, config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase) -> None:
    if model_args.model_name_or_path is None:
        given = parse_config_overrides(model_args.config_overrides or "{}", type(config))
        fit_config_to_tokenizer(config, tokenizer, vocab_size_is_given="vocab_size" in given)


def fit_config_to_tokenizer(
    config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase, *, vocab_size_is_given: bool = False
) -> None:
    """Set the vocabulary size and the special ids of a new model's configuration, in place.

    A field such as ``decoder_start_token_id`` or ``forced_eos_token_id`` keeps its role: if the architecture's default
    is its own ``eos_token_id``, it becomes the tokenizer's. Where an encoder-decoder has no default start, generation
    starts with bos, or with pad where the architecture or the tokenizer has no bos (the T5 family).

    Args:
        config: A configuration that was built with default special ids.
        tokenizer: The tokenizer.
        vocab_size_is_given: Whether the user asked for ``config.vocab_size``, which is then kept.

    Raises:
        ValueError: The given vocabulary is smaller than the tokenizer's.
    """
    ids = number_of_ids(tokenizer)
    if vocab_size_is_given and config.vocab_size < ids:
        raise ValueError(
            f"--config_overrides: vocab_size must be at least the tokenizer's {ids}; got {config.vocab_size}"
        )
    if not vocab_size_is_given:
        config.vocab_size = ids
        if hasattr(config, "decoder_vocab_size"):  # Marian
            config.decoder_vocab_size = ids
    roles = ("eos_token_id", "pad_token_id", "bos_token_id")
    defaults = {role: getattr(config, role, None) for role in roles}
    given = {role: getattr(tokenizer, role) for role in roles}
    derived = [name for name in vars(config) if name.endswith("_token_id") and name not in roles]
    for name in derived:
        role = next((role for role in roles if getattr(config, name) == defaults[role] is not None), None)
        if role is not None and given[role] is not None:
            setattr(config, name, given[role])
    for role in roles:
        if given[role] is not None or defaults[role] is not None:
            setattr(config, role, given[role])
    if config.is_encoder_decoder and getattr(config, "decoder_start_token_id", None) is None:
        starts_with_bos = defaults["bos_token_id"] is not None and given["bos_token_id"] is not None
        config.decoder_start_token_id = given["bos_token_id" if starts_with_bos else "pad_token_id"]


def _start_from_t5(
    model_args: ModelArguments, auto_class: Any, config: PreTrainedConfig, *, may_add_weights: bool
) -> tuple[Any, dict[str, Any]]:
    """Start SPADE from the checkpoint; the report names what T5 has not."""
    if not may_add_weights:
        raise ValueError("--init_from t5 adds weights that must be trained (--do_train) before the model is used")
    options = parse_config_overrides(model_args.config_overrides or "{}", type(config))
    options |= {name: getattr(config, name) for name in ("id2label", "label2id", "problem_type")}  # set by the task
    options |= {name: value for name, value in _hub_arguments(model_args).items() if name != "trust_remote_code"}
    model_class = auto_class._model_mapping[type(config)]
    model = model_class.from_t5(model_args.model_name_or_path, dtype=model_args.dtype, **options)
    from_source = {"encoder", "decoder", "lm_head"}
    new = (
        name
        for name, _ in model.named_parameters()
        if NEW_TENSORS.search(name) or name.removeprefix("model.").split(".")[0] not in from_source
    )
    return model, {"missing_keys": list(new), "mismatched_keys": []}


def load_model(
    model_args: ModelArguments,
    auto_class: Any,
    config: PreTrainedConfig,
    tokenizer: PreTrainedTokenizerBase,
    *,
    seed: int,
    may_add_weights: bool,
    ignore_mismatched_sizes: bool | None = None,
) -> PreTrainedModel:
    """Build a new model, or load the checkpoint and lengthen its embedding if the tokenizer needs it.

    Args:
        model_args: The model arguments.
        auto_class: The Auto class of the task.
        config: What `load_config` returned, fitted to the tokenizer.
        tokenizer: The tokenizer.
        seed: Seed of a new model's weights, so that they do not depend on what ran before.
        may_add_weights: Whether weights that the checkpoint lacks, such as a head, may be drawn at random, because
            the model is going to be trained.
        ignore_mismatched_sizes: Whether weights of another shape than the model's, such as a head for other labels,
            are treated like missing ones; None where the script has no such flag.

    Raises:
        ValueError: The model cannot be built, or the checkpoint cannot be read, or lacks weights or holds others.
    """
    set_seed(seed)
    if model_args.model_name_or_path is None:
        try:
            dtype = None if model_args.dtype == "auto" else model_args.dtype
            model = auto_class.from_config(config, dtype=dtype, trust_remote_code=model_args.trust_remote_code)
        except ValueError as error:
            raise ValueError(f"--model_type {config.model_type}: {error}") from error
        logger.info("New %s with %s parameters.", type(model).__name__, f"{model.num_parameters():,}")
        return model
    base = adapter_base(model_args)  # which may lack what the adapter brings
    try:
        if model_args.init_type == "spade":
            model, report = _start_from_t5(model_args, auto_class, config, may_add_weights=may_add_weights)
        else:
            model, report = auto_class.from_pretrained(
                model_args.model_name_or_path if base is None else base.name,
                config=config,
                dtype=model_args.dtype,
                output_loading_info=True,
                ignore_mismatched_sizes=bool(ignore_mismatched_sizes) or base is not None,
                **_hub_arguments(model_args, base),
            )
    except (OSError, ValueError, RuntimeError, SafetensorError, StrictDataclassError) as error:
        message = f"--model_name_or_path {model_args.model_name_or_path}: {one_line(error)}"
        if ignore_mismatched_sizes is False and "ignore_mismatched_sizes" in message:
            message = (
                f"--model_name_or_path {model_args.model_name_or_path} has weights of other shapes than the model, "
                "such as a head for another number of labels; --ignore_mismatched_sizes draws them anew"
            )
        raise ValueError(message) from error
    missing = sorted({*report["missing_keys"], *(key for key, *_ in report["mismatched_keys"])})
    if missing and not may_add_weights and base is None:
        raise ValueError(
            f"--model_name_or_path {model_args.model_name_or_path} lacks {len(missing)} of the weights of "
            f"{type(model).__name__}, such as {missing[0]}; it must be trained (--do_train) before it is used"
        )
    if has_adapter := uses_adapter(model_args):
        freeze_loaded(model, missing)
    table = getattr(model.get_input_embeddings(), "weight", None)  # an adaptive embedding has several
    ids, rows = number_of_ids(tokenizer), model.config.vocab_size if table is None else table.shape[0]
    if ids > rows and has_adapter:
        raise ValueError(
            f"--model_name_or_path {model_args.model_name_or_path}: its embedding has {rows} rows and the tokenizer "
            f"{ids} ids, and an adapter cannot lengthen it; resize the model and save it, then start from there"
        )
    if ids > rows:
        model.resize_token_embeddings(ids)
        logger.warning(
            "The tokenizer has %d ids and the model's embedding %d rows: it was resized to %d.", ids, rows, ids
        )
    if model.config.is_encoder_decoder and getattr(model.config, "decoder_start_token_id", None) is None:
        start = tokenizer.bos_token_id if tokenizer.bos_token_id is not None else tokenizer.pad_token_id
        model.config.decoder_start_token_id = start
        if model.generation_config.decoder_start_token_id is None:
            model.generation_config.decoder_start_token_id = start
        logger.warning("The checkpoint names no decoder_start_token_id: using %d.", start)
    return model


def fit_positions(
    config: PreTrainedConfig,
    auto_class: Any,
    asked: Mapping[str, Mapping[str, int]],
    *,
    new: bool,
    permitted: bool = True,
) -> int | None:
    """Lengthen a new model's position embeddings to the asked lengths; check those of a checkpoint.

    Args:
        config: What `load_config` returned; changed in place.
        auto_class: The Auto class of the task.
        asked: By configuration field that limits a length, the flags that ask for one and what they ask for.
        new: Whether the model begins from scratch.
        permitted: Whether position embeddings may be lengthened.

    Returns:
        The length to which a checkpoint's position embeddings must be resized once it is loaded, if any.

    Raises:
        ValueError: A checkpoint's embeddings are shorter than the asked length and may or can not be lengthened.
    """
    resized = None
    for name, lengths in asked.items():
        flag, needed = max(lengths.items(), key=lambda item: item[1])
        limit = getattr(config, name, None)
        if not isinstance(limit, int) or limit >= needed:
            continue
        if permitted and new:
            setattr(config, name, needed)
        elif permitted and name == "max_position_embeddings" and _can_lengthen_positions(config, auto_class):
            resized = needed
        else:
            raise ValueError(
                f"--{flag} must be at most the model's {limit} position embeddings ({name}); got {needed}"
            )
        logger.warning("The model's %s is raised from %d to %d.", name, limit, needed)
    return resized


def _can_lengthen_positions(config: PreTrainedConfig, auto_class: Any) -> bool:
    model_class: Any = auto_class._model_mapping.get(type(config), PreTrainedModel)
    return model_class.resize_position_embeddings is not PreTrainedModel.resize_position_embeddings
