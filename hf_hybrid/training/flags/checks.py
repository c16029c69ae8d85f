"""Declare a flag, and check flags one by one; errors name flag, value and rule."""

from dataclasses import field
from typing import Any

from hf_hybrid.suggestions import did_you_mean


def flag(default: Any, help: str, choices: tuple[str, ...] | None = None, alias: str | None = None) -> Any:
    """Declare a flag as a field of a dataclass."""
    more = {"choices": choices, "aliases": None if alias is None else [alias]}
    return field(default=default, metadata={"help": help, **{name: value for name, value in more.items() if value}})


def check_choice_flag(flag: str, value: str | None, choices: tuple[str, ...]) -> None:
    """Raise a ValueError unless the value is one of the choices (or None)."""
    if value is not None and value not in choices:
        raise ValueError(f"--{flag} must be one of {', '.join(choices)}; got {value!r}.{did_you_mean(value, choices)}")


def check_positive_flags(arguments: Any, *flags: str) -> None:
    """Raise a ValueError for the first of the flags whose value is below one; None passes."""
    for flag in flags:
        value = getattr(arguments, flag)
        if value is not None and value < 1:
            raise ValueError(f"--{flag} must be a positive integer; got {value}")


def check_not_negative_flags(arguments: Any, *flags: str) -> None:
    """Raise a ValueError for the first of the flags whose value is negative or NaN; None passes."""
    for flag in flags:
        value = getattr(arguments, flag)
        if value is not None and not value >= 0:
            raise ValueError(f"--{flag} must not be negative; got {value}")
