"""What every model asks of its inputs before it computes."""

import torch


def check_not_empty(name: str, *inputs: torch.Tensor | None):
    """Raise ValueError if there is no token in inputs `(B, T, ...)`; those that are None are not given.

    The layers would end in an error of their own, which names no argument, or none at all.
    """
    for x in inputs:
        if x is not None and x.shape[1] == 0:
            raise ValueError(f"{name} must hold at least one token; got {tuple(x.shape[:2])}")
