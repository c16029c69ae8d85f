"""Local attention as a custom op whose backward stores inputs, output and log-sums."""

from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from ..dispatch import NAMESPACE, triton_if_chosen, wished_backend
from ..precision import compute_dtype
from . import torch_impl
from .settings import Settings


def _triton(backend: str, query: Tensor, value: Tensor, *others: Tensor | None) -> ModuleType | None:
    tensors = query, value, *others
    return triton_if_chosen("local_attention", __package__, backend, tensors, lambda k: k.why_not(query, value))


@torch.library.custom_op(f"{NAMESPACE}::local_attention", mutates_args=())
def local_attention(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, mask: Tensor | None, seed: Tensor | None,
    cu_seqlens: Tensor | None, radius: int | None, chunk_size: int | None, causal: bool, scale: float, dropout: float,
    backend: str,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return outputs and log2 of each query's sum of weights."""
    run = _triton(backend, query, value, key, bias, mask, cu_seqlens) or torch_impl
    settings = Settings(radius, chunk_size, causal, scale, dropout)
    return run.forward(query, key, value, bias, mask, seed, cu_seqlens, settings)


@local_attention.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, *_others: Any) -> tuple[Tensor, Tensor]:
    wide = compute_dtype(query)
    return query.new_empty(*query.shape[:3], value.shape[3]), query.new_empty(query.shape[:3], dtype=wide)


@torch.library.custom_op(f"{NAMESPACE}::local_attention_backward", mutates_args=())
def local_attention_backward(
    grad: Tensor, output: Tensor, log_sum: Tensor, query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None,
    mask: Tensor | None, seed: Tensor | None, cu_seqlens: Tensor | None, radius: int | None, chunk_size: int | None,
    causal: bool, scale: float, dropout: float, backend: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Return gradients of query, key, value and bias (empty without one)."""
    run = _triton(backend, query, value, key, bias, mask, cu_seqlens) or torch_impl
    settings = Settings(radius, chunk_size, causal, scale, dropout)
    tensors = grad, output, log_sum, query, key, value, bias, mask, seed, cu_seqlens
    d_query, d_key, d_value, d_bias = run.backward(*tensors, settings)
    return d_query, d_key, d_value, query.new_empty(0) if d_bias is None else d_bias


@local_attention_backward.register_fake
def _(
    grad: Tensor, output: Tensor, log_sum: Tensor, query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None,
    *_others: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    d_bias = query.new_empty(0) if bias is None else bias.new_empty(bias.shape)
    return query.new_empty(query.shape), key.new_empty(key.shape), value.new_empty(value.shape), d_bias


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.mark_non_differentiable(output[1])
    # Triton's backward reads the output, which a following projection stores anyway
    ctx.save_for_backward(*output, *inputs[:7])
    ctx.settings = (*inputs[7:-1], wished_backend(inputs[-1]))


def _differentiate(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    output, log_sum, *tensors = ctx.saved_tensors
    *gradients, d_bias = local_attention_backward(grad, output, log_sum, *tensors, *ctx.settings)
    return *gradients, d_bias if tensors[3] is not None else None, *[None] * 9


local_attention.register_autograd(_differentiate, setup_context=_save)
