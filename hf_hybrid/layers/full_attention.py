"""Attention to all keys with dropout on a CPU: by blocks of queries, without keeping their weights.

B batch · H heads · T queries · S keys · K key dim · V value dim
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from ..kernels.dispatch import NAMESPACE
from ..kernels.precision import compute_dtype, full_precision, operand_dtype
from ..kernels.random_bits import LEVELS, Masks, dropped_levels

_SCORES = 2**19
"""Scores of a block, small enough for a CPU's cache."""
_LOG2E = 1.4426950408889634
_HIDDEN = -1e30  # stands for minus infinity, so that rows without keys stay finite


def full_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    attention_mask: Tensor | None = None,
    scale: float,
    dropout: float,
) -> Tensor:
    """Attend to all keys, and drop weights.

        o[t] = sum_j drop(softmax_j(scale * q[t].k[j] + m[t, j])) v[j]

    Torch's own attention on a CPU computes 16 bits in float32 as soon as there is dropout, and keeps weights and mask
    for the backward. Here scores, softmax and sums alone are in float32; products with weights are in bfloat16 where
    the CPU is fast at it. The backward computes the weights again, and one draw of torch's global CPU generator gives
    the dropped ones.

    Args:
        query: `(B, H, T, K)`, any floating dtype.
        key: `(B, H, S, K)` in query's dtype.
        value: `(B, H, S, V)` in query's dtype.
        attention_mask: Added to the scores, broadcastable to `(B, H, T, S)`, without a gradient. A query whose keys
            all have the lowest number averages all values.
        scale: Factor on the scores.
        dropout: Probability of dropping a weight, at least 0 and below 1, in steps of 2**-16; the others are scaled.

    Returns:
        `(B, T, H, V)`. Differentiable once.
    """
    assert attention_mask is None or not attention_mask.requires_grad
    seed = torch.randint(2**63 - 1, ())
    output: Tensor = _attention(query, key, value, attention_mask, seed, scale, dropped_levels(dropout))[0]
    return output


class _Rows:
    """The blocks of a call, the same forward and backward: some queries of one head, and its keys.

    Attributes:
        low: The dtype of products with weights.
        wide: That of the others.
    """

    def __init__(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, seed: Tensor, scale: float, dropped: int
    ):
        self.query, self.key, self.value, self.scale = query, key, value, scale
        self.low, self.wide = operand_dtype(query), compute_dtype(query)
        self.keep_rate = 1 - dropped / LEVELS
        self.rows = max(1, _SCORES // key.shape[2])
        self.masks = Masks(seed, dropped, min(self.rows, query.shape[2]) * key.shape[2])
        self.hidden = None
        if mask is not None and mask.any():
            added = (mask.to(self.wide) * _LOG2E).clamp_min_(_HIDDEN)
            self.hidden = added.expand(*query.shape[:3], key.shape[2])

    def heads(self) -> Iterator[tuple[tuple[int, int], Tensor, Tensor, Iterator[tuple[slice, Tensor, Tensor]]]]:
        """Yield each head's index, keys and values for products with weights, and blocks of queries.

        A block has the place of its queries, their scores in units of log2 and what they keep of their weights.
        """
        for batch in range(self.query.shape[0]):
            for head in range(self.query.shape[1]):
                at = batch, head
                yield at, self.key[at].to(self.low), self.value[at].to(self.low), self._blocks(at)

    def _blocks(self, at: tuple[int, int]) -> Iterator[tuple[slice, Tensor, Tensor]]:
        keys = self.key[at].to(self.wide)
        for start in range(0, self.query.shape[2], self.rows):
            rows = slice(start, start + self.rows)
            scores = (self.query[at][rows].to(self.wide) * (self.scale * _LOG2E)) @ keys.mT
            if self.hidden is not None:
                scores += self.hidden[at][rows]
            yield rows, scores, self.masks.draw(scores.numel()).view_as(scores).to(self.low)


@torch.library.custom_op(f"{NAMESPACE}::full_attention", mutates_args=())
def _attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, seed: Tensor, scale: float, dropped: int
) -> tuple[Tensor, Tensor]:
    """Return outputs `(B, T, H, V)`, and each query's largest score and log2 of its sum of weights, `(2, B, H, T)`.

    Their sum would lose the second where a mask makes all scores of a query low.
    """
    work = _Rows(query, key, value, mask, seed, scale, dropped)
    batch, heads, length, _ = query.shape
    output = query.new_empty(batch, length, heads, value.shape[3])
    norm = query.new_empty(2, batch, heads, length, dtype=work.wide)
    with full_precision(query.device):
        for at, _, values, blocks in work.heads():
            for rows, scores, kept in blocks:
                largest = scores.amax(-1, keepdim=True)
                weights = scores.sub_(largest).exp2_()
                total = weights.sum(-1, keepdim=True)
                weights.mul_((total * work.keep_rate).reciprocal_())  # before they are rounded, so that sums are not
                output[at[0], rows, at[1]] = weights.to(work.low).mul_(kept) @ values
                norm[0][at][rows], norm[1][at][rows] = largest[:, 0], total.log2_()[:, 0]
    return output, norm


@_attention.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, *_others: Any) -> tuple[Tensor, Tensor]:
    batch, heads, length, _ = query.shape
    norm = query.new_empty(2, batch, heads, length, dtype=compute_dtype(query))
    return query.new_empty(batch, length, heads, value.shape[3]), norm


@torch.library.custom_op(f"{NAMESPACE}::full_attention_backward", mutates_args=())
def _differentiate(
    grad: Tensor, norm: Tensor, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, seed: Tensor,
    scale: float, dropped: int,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return gradients of query, key and value."""
    work = _Rows(query, key, value, mask, seed, scale, dropped)
    d_query, d_key, d_value = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (query, key, value))
    with full_precision(query.device):
        for at, keys, values, blocks in work.heads():
            d_keys: Tensor | float = 0.0
            d_values: Tensor | float = 0.0
            for rows, scores, kept in blocks:
                queries, grads = query[at][rows].to(work.low), grad[at[0], rows, at[1]].to(work.low)
                weights = scores.sub_(norm[0][at][rows, None]).sub_(norm[1][at][rows, None]).exp2_()
                d_scores = (grads @ values.mT).mul_(kept).to(work.wide)
                torch._softmax_backward_data(d_scores, weights, -1, work.wide, grad_input=d_scores)
                factor = d_scores.mul_(scale / work.keep_rate).to(work.low)
                d_query[at][rows] = factor @ keys
                d_keys = _plus(d_keys, factor.mT @ queries)
                d_values = _plus(d_values, weights.div_(work.keep_rate).to(work.low).mul_(kept).mT @ grads)
            d_key[at], d_value[at] = d_keys, d_values
    return d_query, d_key, d_value


def _plus(total: Tensor | float, part: Tensor) -> Tensor:
    """Add to a sum of blocks, at least in float32; a part alone is the sum as it is."""
    return total.to(compute_dtype(part)).add_(part) if isinstance(total, Tensor) else part


@_differentiate.register_fake
def _(_grad: Tensor, _norm: Tensor, query: Tensor, key: Tensor, value: Tensor, *_others: Any) -> tuple[Tensor, ...]:
    return tuple(torch.empty_like(x, memory_format=torch.contiguous_format) for x in (query, key, value))


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.scale, ctx.dropped = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(output[1], *tensors)


def _backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    gradients = _differentiate(grad, *ctx.saved_tensors, ctx.scale, ctx.dropped)
    return *gradients, None, None, None, None


_attention.register_autograd(_backward, setup_context=_save)
