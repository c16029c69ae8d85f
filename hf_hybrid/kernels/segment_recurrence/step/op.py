"""A decoding step of segmented and recurrent attention as a custom op without a gradient."""

from typing import Any

import torch
from torch import Tensor

from ...dispatch import NAMESPACE, triton_if_chosen
from ...precision import full_precision
from . import torch_impl


@torch.library.custom_op(f"{NAMESPACE}::segment_step", mutates_args=())
def segment_step(
    query: Tensor,
    key: Tensor | None,
    value: Tensor | None,
    state: Tensor | None,
    index: Tensor,
    visible: Tensor | None,
    norm: Tensor | None,
    documents: Tensor | None,
    sigma: Tensor | None,
    scale: float,
    backend: str,
) -> Tensor:
    """Return the attention of one token per row."""
    tensors = query, key, value, state, index, visible, norm, documents, sigma
    width = _value_width(value, state)
    asked = ("segment_step", __package__, backend, tensors)
    run = triton_if_chosen(*asked, lambda kernels: kernels.why_not(query, width)) or torch_impl
    with full_precision(query.device):
        return run.forward(*tensors, scale)


def _value_width(value: Tensor | None, state: Tensor | None) -> int:
    return next(x.shape[4] for x in (value, state) if x is not None)


@segment_step.register_fake
def _(query: Tensor, key: Tensor | None, value: Tensor | None, state: Tensor | None, *_others: Any) -> Tensor:
    return query.new_empty(*query.shape[:2], _value_width(value, state))
