"""The rules that fields of several configurations share; every error names the field, its value and the rule."""

import math
from collections.abc import Iterable, Mapping

from transformers import PreTrainedConfig
from transformers.activations import ACT2FN

from hf_hybrid.suggestions import did_you_mean

RELATIVE_ATTENTION_INITS = ("normal", "recency")


def check_positive_integers(config: PreTrainedConfig, fields: Iterable[str]):
    """Raise ValueError unless each of these fields is None or at least 1."""
    for field in fields:
        value = getattr(config, field)
        if value is not None and value < 1:
            raise ValueError(f"{field} must be a positive integer; got {value}")


def check_positive_numbers(config: PreTrainedConfig, fields: Iterable[str]):
    """Raise ValueError unless each of these fields is None, or positive and finite."""
    for field in fields:
        value = getattr(config, field)
        if value is not None and not 0 < value < math.inf:
            raise ValueError(f"{field} must be positive and finite; got {value}")


def check_probabilities(config: PreTrainedConfig, fields: Iterable[str]):
    """Raise ValueError unless each of these fields lies in [0, 1)."""
    for field in fields:
        if not 0 <= getattr(config, field) < 1:
            raise ValueError(f"{field} must lie in [0, 1); got {getattr(config, field)}")


def check_choices(config: PreTrainedConfig, choices: Mapping[str, Iterable[str | None]], where: str = ""):
    """Raise ValueError unless each of these fields is one of its choices.

    Args:
        config: The configuration.
        choices: For each field what it may be.
        where: In which case, for the error.
    """
    for field, allowed in choices.items():
        value, allowed = getattr(config, field), list(allowed)
        if value not in allowed:
            names = ", ".join("None" if name is None else name for name in allowed)
            hint = did_you_mean(str(value), [name for name in allowed if name is not None])
            raise ValueError(f"{field} must be one of {names}{where}; got {value!r}.{hint}")


def check_activation(config: PreTrainedConfig):
    """Raise ValueError unless `hidden_act` is an activation that transformers knows."""
    if config.hidden_act not in ACT2FN:
        raise ValueError(
            f"hidden_act must name an activation of transformers; got {config.hidden_act!r}."
            f"{did_you_mean(config.hidden_act, ACT2FN)}"
        )


def check_relative_attention(config: PreTrainedConfig):
    """Raise ValueError unless there can be such a table of T5's relative position biases."""
    check_choices(config, {"relative_attention_init": RELATIVE_ATTENTION_INITS})
    buckets, distance = config.relative_attention_num_buckets, config.relative_attention_max_distance
    if buckets < 4 or buckets % 2:
        raise ValueError(f"relative_attention_num_buckets must be even and at least 4; got {buckets}")
    if distance <= buckets // 2:
        raise ValueError(
            f"relative_attention_max_distance must exceed half of relative_attention_num_buckets; "
            f"got {distance} and {buckets}"
        )


def check_token_ids(config: PreTrainedConfig, fields: Iterable[str]):
    """Raise ValueError unless each of these fields is None, or a token of the vocabulary, or a list of such."""
    for field in fields:
        value = getattr(config, field)
        for token_id in value if isinstance(value, list) else [value]:
            if token_id is not None and not 0 <= token_id < config.vocab_size:
                raise ValueError(
                    f"{field} must lie in the vocabulary, from 0 to vocab_size - 1; got {value} and vocab_size "
                    f"{config.vocab_size}"
                )


def check_adaptive_vocabulary(config: PreTrainedConfig):
    """Raise ValueError unless `adaptive_cutoffs` can cut the vocabulary, and `adaptive_factor` the width."""
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
