"""The segments' states and their gradients in torch: all products at once, and a scan over segments in place.

After matrix products over all segments and heads, the recurrence is elementwise on one `(B, H, K, V)` slice per
segment, which fits a cache. The backward stores only the inputs and recomputes the membranes, which would take the
memory of all states several times per layer.

Shapes: `B` batch · `H` heads · `M` segments · `S` segment size · `K` key dim · `V` value dim · `N` visited segments.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from ..precision import compute_dtype
from .reference import SURROGATE_SLOPE


class _Products(NamedTuple):
    """The neurons' input, and what its backward needs."""

    inputs: Tensor
    """P or K[i]^T V[i] of the visited segments, `(B, H, N, K, V)`."""
    own_within: Tensor | None
    """Whether K[i]^T V[i] was within the clamp; None without one."""
    whole_within: Tensor | None
    """Whether K^T V was, `(B, H, 1, K, V)`."""


def _index(x: Tensor, visited: Tensor) -> Tensor:
    return visited[:, None, :, None, None].expand(*x.shape[:2], visited.shape[1], *x.shape[3:])


def _visited(x: Tensor, visited: Tensor | None, dtype: torch.dtype) -> Tensor:
    return x.to(dtype) if visited is None else x.gather(2, _index(x, visited)).to(dtype)


def _products(key: Tensor, value: Tensor, visited: Tensor | None, complement: bool, clamp: float | None) -> _Products:
    wide = compute_dtype(key)
    own = torch.matmul(_visited(key, visited, wide).mT, _visited(value, visited, wide))
    whole = None
    if complement and visited is None:
        whole = own.sum(2, keepdim=True)
    elif complement:
        whole = torch.matmul(key.flatten(2, 3).to(wide).mT, value.flatten(2, 3).to(wide))[:, :, None]
    own_within = whole_within = None
    if clamp is not None:
        own_within = own.abs() <= clamp
        own.clamp_(-clamp, clamp)
        if whole is not None:
            whole_within = whole.abs() <= clamp
            whole.clamp_(-clamp, clamp)
    if whole is not None:
        torch.sub(whole, own, out=own)
    return _Products(own, own_within, whole_within)


def _membranes(drive: Tensor, leak: Tensor, threshold: Tensor, fire: bool = False) -> None:
    """Turn P W^T into the membranes m before their reset, or into what they `fire`, max(0, m / threshold - 1)."""
    after = torch.zeros_like(drive[:, :, 0])
    for membrane in drive.unbind(2):
        membrane.add_(after.mul_(leak))
        y = (membrane / threshold).sub_(1).clamp_min_(0)
        torch.addcmul(membrane, y.sign(), threshold, value=-1, out=after)
        if fire:
            membrane.copy_(y)


def forward(
    key: Tensor,
    value: Tensor,
    weight: Tensor | None,
    leak: Tensor | None,
    threshold: Tensor | None,
    visited: Tensor | None,
    complement: bool,
    clamp: float | None,
) -> Tensor:
    """Return states, `(B, H, N, K, V)` in key's dtype; not differentiable."""
    states = _products(key, value, visited, complement, clamp).inputs
    if weight is not None and leak is not None and threshold is not None:
        wide = states.dtype
        states = torch.matmul(states, weight.to(wide).mT)
        _membranes(states, leak.to(wide), threshold.to(wide), fire=True)
    return states.to(key.dtype)


def backward(
    grad: Tensor,
    key: Tensor,
    value: Tensor,
    weight: Tensor | None,
    leak: Tensor | None,
    threshold: Tensor | None,
    visited: Tensor | None,
    complement: bool,
    clamp: float | None,
    surrogate: bool,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """Return gradients of key and value in their dtype, and of weight, leak and threshold (None without neurons).

    What is no longer read is written over: besides what it returns, it holds two tensors of the size of all states
    (then one), with a clamp a mask of it, and copies in the dtype of the sums and of visited keys or values.
    """
    inputs, own_within, whole_within = _products(key, value, visited, complement, clamp)
    d_inputs = grad.to(inputs.dtype)
    d_weight = d_leak = d_threshold = None
    if weight is not None and leak is not None and threshold is not None:
        w = weight.to(inputs.dtype)
        drive = torch.matmul(inputs, w.mT)
        d_leak, d_threshold = _unwind(drive, d_inputs, leak.to(w.dtype), threshold.to(w.dtype), surrogate)
        rows, d_drive = inputs.view(-1, len(w)), drive.view(-1, len(w))
        d_weight = torch.matmul(d_drive.mT, rows)
        torch.mm(d_drive, w, out=rows)
        d_inputs = inputs
        del drive, d_drive
    d_whole = d_inputs.sum(2, keepdim=True) if complement else None
    d_own = torch.neg(d_inputs, out=inputs) if complement else d_inputs
    if own_within is not None:
        d_own = torch.mul(d_own, own_within, out=inputs)
    if d_whole is not None and whole_within is not None:
        d_whole.mul_(whole_within)
    if d_whole is not None and visited is None:
        d_own.add_(d_whole)
        d_whole = None
    d_key = _factor_gradient(value, d_own.mT, None if d_whole is None else d_whole.mT, visited)
    d_value = _factor_gradient(key, d_own, d_whole, visited)
    return d_key, d_value, d_weight, d_leak, d_threshold


def _factor_gradient(other: Tensor, d_own: Tensor, d_whole: Tensor | None, visited: Tensor | None) -> Tensor:
    """Return the gradient of key or value from the other one, and those of K[i]^T V[i] and, with visits, of K^T V."""
    gradient = torch.matmul(_visited(other, visited, d_own.dtype), d_own)
    if visited is not None:
        found, shape = gradient, (*other.shape[:4], gradient.shape[4])
        if d_whole is None:
            gradient = found.new_zeros(shape)
        else:
            gradient = torch.matmul(other.flatten(2, 3).to(d_own.dtype), d_whole[:, :, 0]).view(shape)
        gradient.scatter_add_(2, _index(gradient, visited), found)
    return gradient.to(other.dtype)


def _unwind(
    drive: Tensor, grad: Tensor, leak: Tensor, threshold: Tensor, surrogate: bool
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Turn P W^T into its gradient in place, and return those of leak and threshold.

    With g = dR and f = 1[y > 0]:  dm = f g / threshold + da (1 - s),  s = 0.3 max(0, 1 - |y|) or 0,
    da[n-1] = leak dm[n],  dleak = sum a[n-1] dm[n],  dthreshold = sum -f g m / threshold^2 - da (f - s m / threshold).
    """
    _membranes(drive, leak, threshold)
    membranes = drive.unbind(2)
    d_leak, d_threshold = torch.zeros_like(leak), torch.zeros_like(threshold)
    d_after = torch.zeros_like(membranes[0])
    for n in range(len(membranes) - 1, -1, -1):
        membrane = membranes[n]
        y = (membrane / threshold).sub_(1)
        fired = (y > 0).to(y.dtype)
        passed = grad[:, :, n] * fired / threshold
        reset = fired
        d_membrane = passed + d_after
        if surrogate:
            slope = y.abs_().neg_().add_(1).clamp_min_(0).mul_(SURROGATE_SLOPE)
            reset = fired - slope * membrane / threshold
            d_membrane.sub_(slope * d_after)
        d_threshold -= ((passed * membrane / threshold).sum() + (reset * d_after).sum()).view_as(d_threshold)
        if n > 0:
            before = membranes[n - 1]
            after = before - threshold * ((before / threshold).sub_(1) > 0)
            d_leak += (after * d_membrane).sum().view_as(d_leak)
        membrane.copy_(d_membrane)
        d_after = d_membrane.mul_(leak)
    return d_leak, d_threshold
