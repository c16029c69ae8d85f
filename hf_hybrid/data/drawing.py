"""Draw data instead of reading them: the generators of splits, and checks of sizes."""

from typing import Any

import numpy as np

__all__ = ["SPLITS", "Array", "check", "check_sizes", "split_generator"]

Array = np.ndarray[Any, Any]
SPLITS = ("train", "validation", "test")


def split_generator(seed: int, split: str, number: int = 0) -> np.random.Generator:
    """Return the generator of a batch, whoever draws it and whatever was drawn before.

    Args:
        seed: Seed of the data, at least 0.
        split: One of `SPLITS`; they share no random numbers.
        number: Which batch of the split.

    Raises:
        ValueError: A value breaks its rule.
    """
    check(split in SPLITS, "split", f"one of {', '.join(SPLITS)}", split)
    check_sizes(0, seed=seed, number=number)
    return np.random.default_rng([seed, SPLITS.index(split), number])


def check(holds: bool, field: str, rule: str, value: object) -> None:
    """Refuse a value that breaks a rule.

    Raises:
        ValueError: It does.
    """
    if not holds:
        raise ValueError(f"{field} must be {rule}; got {value!r}")


def check_sizes(least: int, **sizes: int) -> None:
    """Refuse sizes that are no integers or too small.

    Raises:
        ValueError: One is.
    """
    for field, value in sizes.items():
        is_integer = isinstance(value, int | np.integer) and not isinstance(value, bool)
        check(is_integer and value >= least, field, f"an integer of at least {least}", value)
