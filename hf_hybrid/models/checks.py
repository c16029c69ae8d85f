"""Defaults and rules that several configs share. Every error names the field, its value and the rule."""

import dataclasses
import functools
import math
from collections.abc import Iterable, Mapping
from operator import index
from typing import Any

import torch
import transformers
from packaging.version import InvalidVersion, Version
from transformers import GenerationConfig, PreTrainedConfig
from transformers.activations import ACT2FN
from transformers.utils import logging

from hf_hybrid.suggestions import did_you_mean

from ..context_parallel import active_group
from ..kernels.dispatch import exports_any, exports_to_onnx

logger = logging.get_logger(__name__)

NORM_TYPES = ("layer_norm", "rms_norm", "scale_norm", "batch_norm")
RELATIVE_ATTENTION_INITS = ("normal", "recency")
# fields that transformers sets, or used to set, when it loads or saves a config, and fields of BART's checkpoints
TRANSFORMERS_FIELDS = """
    model_type name_or_path attn_implementation experts_implementation auto_map tokenizer_class quantization_config
    transformers_weights custom_pipelines task_specific_params prefix add_cross_attention cross_attention_hidden_size
    tie_encoder_decoder tie_word_embeddings tie_last_hidden_states is_decoder finetuning_task pruned_heads
    gradient_checkpointing torchscript use_bfloat16 tf_legacy_loss pad_token_id bos_token_id eos_token_id sep_token_id
    mask_token_id decoder_start_token_id output_past n_positions
    add_bias_logits add_final_layer_norm classif_dropout extra_pos_embeddings normalize_before normalize_embedding
    static_position_embeddings force_bos_token_to_be_generated
"""


@functools.cache
def known_fields(config_class: type[PreTrainedConfig]) -> frozenset[str]:
    """Return the names that a config class accepts: its fields, their aliases, and those of every config."""
    of_every_config = {name for name in dir(PreTrainedConfig) if isinstance(getattr(PreTrainedConfig, name), property)}
    return frozenset(
        (
            *(field.name for field in dataclasses.fields(config_class)),
            *config_class.attribute_map,
            *vars(config_class()),  # T5 and BART have fields that are no dataclass fields
            *of_every_config,
            *GenerationConfig._get_default_generation_params(),
            *TRANSFORMERS_FIELDS.split(),
        )
    )


def check_unknown_fields(config: PreTrainedConfig, values: Mapping[str, Any]):
    """Warn once about each name that is no field of the config, so that a misspelt field is noticed.

    A file written by a newer transformers may have new fields. There, only a name that resembles a field gets a
    warning.

    Args:
        config: The config.
        values: Values passed to the config that are no dataclass fields.

    Raises:
        ValueError: A value is passed for a field that the config computes.
    """
    values = {name: value for name, value in values.items() if not name.startswith("_")}
    known = known_fields(type(config)) if values else frozenset()
    options = sorted(name for name in known if not name.startswith("_"))
    for name, value in values.items():
        own = getattr(type(config), name, None)
        if isinstance(own, property) and own.fset is None:
            raise ValueError(f"{name} must be left out: it follows from the other fields; got {value!r}")
        hint = did_you_mean(name, options)
        if name not in known and (hint or not _is_newer(config.transformers_version)):
            logger.warning_once(
                f"{type(config).__name__} (model type {config.model_type}) has no field {name!r}.{hint} The config "
                "keeps it, but no model reads it."
            )


def forget_code(config: PreTrainedConfig, values: dict[str, Any]):
    """Drop `auto_map` if this package's class reads the file: it saves no code that the field could point to."""
    if type(config).__module__.startswith("hf_hybrid."):
        values.pop("auto_map", None)


def _is_newer(version: str | None) -> bool:
    """Whether this version of transformers is newer than the installed one."""
    try:
        return version is not None and Version(version) > Version(transformers.__version__)
    except InvalidVersion:
        return False


# Larger than any real model, so that a typo raises an error instead of hanging or running out of memory.
MAX_LAYERS = 10_000
MAX_STATE_SIZE = 4096  # S4's constants come from the eigenvectors of a matrix of that many rows
MAX_SIZE = 2**24
MAX_NUMBER, MIN_NUMBER = torch.finfo(torch.float32).max, torch.finfo(torch.float32).tiny


def preset_fields(presets: Mapping[str, dict], name: str) -> dict[str, Any]:
    """Return the fields of a preset; raise ValueError if no preset has this name."""
    if name not in presets:
        raise ValueError(f"preset must be one of {', '.join(presets)}; got {name!r}.{did_you_mean(name, presets)}")
    return dict(presets[name])


def fill_defaults(config: PreTrainedConfig, **defaults: Any):
    """Set each of these fields that is None."""
    for field, default in defaults.items():
        if getattr(config, field) is None:
            setattr(config, field, default)


def fill_head_dim(config: PreTrainedConfig):
    """Set `head_dim` to `hidden_size / num_attention_heads` if it is None; raise ValueError if heads do not divide."""
    if config.head_dim is None and config.num_attention_heads > 0:
        if config.hidden_size % config.num_attention_heads:
            raise ValueError(
                f"hidden_size must be a multiple of num_attention_heads unless head_dim is given; "
                f"got {config.hidden_size} and {config.num_attention_heads}"
            )
        config.head_dim = config.hidden_size // config.num_attention_heads


def check_unread(config: PreTrainedConfig, unread: Mapping[str, str]):
    """Raise ValueError if a field is changed that another field (`unread[field]`) makes useless."""
    for field, by in unread.items():
        if getattr(config, field) != (default := getattr(type(config), field)):
            raise ValueError(
                f"{field} must be left at {default} for {by} {getattr(config, by)}, which does not read it; "
                f"got {getattr(config, field)!r}"
            )


def check_positive_integers(config: PreTrainedConfig, fields: Iterable[str], at_most: int = MAX_SIZE):
    """Raise ValueError unless each of these fields is None or between 1 and `at_most`."""
    for field in fields:
        value = getattr(config, field)
        if value is not None and value < 1:
            raise ValueError(f"{field} must be a positive integer; got {value}")
        check_not_absurd(field, value, at_most)


def check_not_absurd(field: str, value: int | None, at_most: int = MAX_SIZE):
    """Raise ValueError if a size is too large to be meant."""
    if value is not None and value > at_most:
        raise ValueError(f"{field} must be at most {at_most}; got {value}")


def check_number_of_layers(config: PreTrainedConfig, fields: Iterable[str]):
    """Raise ValueError if there are too many layers; call it before building anything per layer."""
    for field in fields:
        check_not_absurd(field, getattr(config, field), MAX_LAYERS)


def check_positive_numbers(config: PreTrainedConfig, fields: Iterable[str]):
    """Raise ValueError unless each of these fields is None or a positive, finite float32."""
    for field in fields:
        value = getattr(config, field)
        if value is not None and not MIN_NUMBER <= value <= MAX_NUMBER:
            raise ValueError(
                f"{field} must be positive and finite; got {value}{in_float32(value) if value > 0 else ''}"
            )


def in_float32(value: float) -> str:
    """Explain in an error why a finite number is refused: float32 cannot hold it."""
    return ", which is beyond float32's normal numbers" if 0 < abs(value) < math.inf else ""


def check_given(config: PreTrainedConfig, fields: Iterable[str]):
    """Raise ValueError if one of these fields is None."""
    for field in fields:
        if getattr(config, field) is None:
            raise ValueError(f"{field} must be given; got None")


def check_probabilities(config: PreTrainedConfig, fields: Iterable[str]):
    """Raise ValueError unless each of these fields lies in [0, 1)."""
    for field in fields:
        if not 0 <= getattr(config, field) < 1:
            raise ValueError(f"{field} must lie in [0, 1); got {getattr(config, field)}")


def check_choices(config: PreTrainedConfig, choices: Mapping[str, Iterable[str | None]], where: str = ""):
    """Raise ValueError unless each of these fields has one of its allowed values.

    Args:
        config: The config.
        choices: Field → allowed values.
        where: Condition under which the rule holds, for the error.
    """
    for field, allowed in choices.items():
        value, allowed = getattr(config, field), list(allowed)
        if value not in allowed:
            names = ", ".join("None" if name is None else name for name in allowed)
            hint = did_you_mean(str(value), [name for name in allowed if name is not None])
            raise ValueError(f"{field} must be one of {names}{where}; got {value!r}.{hint}")


def check_activation(config: PreTrainedConfig, field: str = "hidden_act"):
    """Raise ValueError unless this field names an activation of transformers."""
    name = getattr(config, field)
    if name not in ACT2FN:
        raise ValueError(
            f"{field} must name an activation of transformers; got {name!r}.{did_you_mean(str(name), ACT2FN)}"
        )


def check_batch_norm(config: PreTrainedConfig, field: str = "norm_type"):
    """Refuse batch normalisation, by a field that names it or is True, where its statistics include the future."""
    if (value := getattr(config, field)) in ("batch_norm", True) and (config.is_decoder or config.is_encoder_decoder):
        raise ValueError(
            f"{field} must not use batch normalisation in a causal model or beside a decoder, since its statistics "
            f"include the future; got {value!r}, is_decoder {config.is_decoder} and is_encoder_decoder "
            f"{config.is_encoder_decoder}"
        )


def check_relative_attention(config: PreTrainedConfig):
    """Raise ValueError unless T5's relative position biases can have these sizes and this initialization."""
    check_choices(config, {"relative_attention_init": RELATIVE_ATTENTION_INITS})
    check_relative_buckets(config)


def check_relative_buckets(config: PreTrainedConfig):
    """Raise ValueError unless T5's relative position biases can have these sizes."""
    check_positive_integers(config, ("relative_attention_num_buckets", "relative_attention_max_distance"))
    buckets, distance = config.relative_attention_num_buckets, config.relative_attention_max_distance
    if buckets < 4 or buckets % 2:
        raise ValueError(f"relative_attention_num_buckets must be even and at least 4; got {buckets}")
    if distance <= buckets // 2:
        raise ValueError(
            f"relative_attention_max_distance must exceed half of relative_attention_num_buckets; "
            f"got {distance} and {buckets}"
        )


def check_token_ids(config: PreTrainedConfig, fields: Iterable[str]):
    """Raise ValueError unless each of these fields is None, a token of the vocabulary, or a list of tokens."""
    for field in fields:
        value = getattr(config, field)
        for token_id in value if isinstance(value, list) else [value]:
            if token_id is not None and not 0 <= token_id < config.vocab_size:
                raise ValueError(
                    f"{field} must lie in the vocabulary, from 0 to vocab_size - 1; got {value} and vocab_size "
                    f"{config.vocab_size}"
                )


def check_adaptive_vocabulary(config: PreTrainedConfig):
    """Raise ValueError unless `adaptive_cutoffs` can divide the vocabulary and `adaptive_factor` the width."""
    cutoffs = config.adaptive_cutoffs
    if not cutoffs or sorted(set(cutoffs)) != cutoffs or cutoffs[0] < 1 or cutoffs[-1] >= config.vocab_size:
        raise ValueError(
            f"adaptive_cutoffs must be a list of ascending token ids between 1 and vocab_size - 1; got {cutoffs} "
            f"and vocab_size {config.vocab_size}"
        )
    if config.hidden_size % config.adaptive_factor ** len(cutoffs):
        raise ValueError(
            f"hidden_size must be a multiple of adaptive_factor to the power of the number of adaptive_cutoffs; "
            f"got {config.hidden_size}, {config.adaptive_factor} and {cutoffs}"
        )


def check_not_empty(name: str, *inputs: torch.Tensor | None):
    """Raise ValueError if an input `(B, T, ...)` has no token; None means not passed. A shard may have none."""
    for x in inputs:
        if x is not None and x.shape[1] == 0 and active_group() is None:
            raise ValueError(f"{name} must hold at least one token; got {tuple(x.shape[:2])}")


def check_fixed_length(name: str, *inputs: torch.Tensor | None):
    """Raise ValueError if an input `(B, T, ...)` has a dynamic length in an export to ONNX; None means not passed.

    Where code branches on a length, torch.export guards the program; a file for ONNX has no guards.
    """
    for x in inputs:
        if x is None or not exports_to_onnx():
            continue
        if exports_any(x.shape[1]):
            raise ValueError(f"{name} must have a fixed length in an export to ONNX; got the dynamic {x.shape[1]}")
        index(x.shape[1])  # torch.onnx tries again with dynamo, which hides the SymInt; this makes it a constant
