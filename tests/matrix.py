"""Matrices of parameters of which a part is always run; `make test-full` runs the rest before a release."""

from collections.abc import Iterable
from typing import Any

import pytest
from _pytest.mark import ParameterSet


def some(values: Iterable[Any], *always: Any) -> list[Any]:
    """Return parameters of a test: those named always run, the others only in the full run."""
    values = list(values)
    assert all(value in values for value in always), f"{always} are not all among {values}"
    return [value if value in always else _only_in_full(value) for value in values]


def _only_in_full(value: Any) -> Any:
    if isinstance(value, ParameterSet):
        return pytest.param(*value.values, id=value.id, marks=(*value.marks, pytest.mark.full))
    return pytest.param(*value if isinstance(value, tuple) else (value,), marks=pytest.mark.full)
