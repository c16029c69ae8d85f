"""Local attention of one decoded token as a custom op without a gradient."""

from typing import Any

import torch
from torch import Tensor

from ...dispatch import NAMESPACE, triton_if_chosen
from ..settings import StepSettings
from . import torch_impl


@torch.library.custom_op(f"{NAMESPACE}::local_attention_step", mutates_args=())
def local_attention_step(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, mask: Tensor | None, query_base: Tensor | None,
    key_base: Tensor | None, query_start: int, key_start: int, radius: int | None, chunk_size: int | None,
    include_self: bool, scale: float, backend: str,
) -> Tensor:  # fmt: skip
    """Compute the step; a position is the sum of its number and its tensor, if any."""
    tensors = query, key, value, bias, mask, query_base, key_base
    settings = StepSettings(query_start, key_start, radius, chunk_size, include_self, scale)
    asked = ("local_attention_step", __package__, backend, tensors)
    run = triton_if_chosen(*asked, lambda kernels: kernels.why_not(query, value)) or torch_impl
    return run.forward(*tensors, settings)


@local_attention_step.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, *_others: Any) -> Tensor:
    return query.new_empty(*query.shape[:3], value.shape[3])
