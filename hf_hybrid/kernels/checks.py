"""Checks of arguments that several operations and layers share."""

import torch


def check_devices(x: torch.Tensor, **others: torch.Tensor | None) -> None:
    """Raise ValueError unless all tensors of a call are on the device of the first; keywords name the arguments."""
    for name, tensor in others.items():
        if tensor is not None and tensor.device != x.device:
            raise ValueError(f"{name} must be on {x.device}, like the first argument; got {tensor.device}")


def check_dtypes(query: torch.Tensor, **others: torch.Tensor | None) -> None:
    """Raise ValueError unless all tensors have query's dtype; keywords name the arguments."""
    for name, tensor in others.items():
        if tensor is not None and tensor.dtype != query.dtype:
            raise ValueError(f"{name} must have query's dtype {query.dtype}; got {tensor.dtype}")


def check_integer(name: str, value: int | None) -> None:
    """Raise ValueError unless a number of tokens is an integer or None."""
    if value is not None and not isinstance(value, (int, torch.SymInt)):
        raise ValueError(f"{name} must be an integer; got {value!r}")


def check_choice(name: str, value: object, allowed: tuple[object, ...]) -> None:
    """Raise ValueError unless a value is allowed."""
    if value not in allowed:
        names = ", ".join(str(choice) for choice in allowed)
        raise ValueError(f"{name} must be one of {names}; got {value!r}")


def check_positive(**values: int | None) -> None:
    """Raise ValueError for the first value that is neither None nor positive."""
    for name, value in values.items():
        if value is not None and value < 1:
            raise ValueError(f"{name} must be a positive integer; got {value}")
