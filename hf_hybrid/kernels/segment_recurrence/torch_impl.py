"""The segments' states with all products at once and a scan over segments in place, as an opaque op with its backward.

The products are matrix products over all segments and heads; what is left of the recurrence is elementwise, on one
`(B, H, K, V)` slice per segment, small enough for a cache. Nothing but the inputs is saved for the backward, which
computes membranes anew: as many numbers as all states together would otherwise be kept per layer, several times.

Shapes: `B` batch · `H` heads · `M` segments · `S` segment size · `K` key dim · `V` value dim · `N` visited segments.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..dispatch import NAMESPACE, choose_backend, wished_backend
from ..precision import full_precision
from .reference import SURROGATE_SLOPE


def _runs_on_triton(backend: str, key: Tensor, value: Tensor, *others: Tensor | None) -> bool:
    """Choose the backend, in the op, where no tracer looks, because the choice reads the environment and logs."""

    def why_not() -> str | None:
        from .triton_kernels import why_not

        return why_not(key.dtype, key.shape[4], value.shape[4])

    tensors = [key, value, *(x for x in others if x is not None)]
    return choose_backend("segment_recurrence", backend, tensors, why_not) == "triton"


class _Products(NamedTuple):
    """What the neurons accumulate, and what its backward needs."""

    inputs: Tensor
    """P or K[i]^T V[i] of the visited segments, `(B, H, N, K, V)`."""
    own_within: Tensor | None
    """Where K[i]^T V[i] was within the clamp; None without one."""
    whole_within: Tensor | None
    """Where K^T V was, `(B, H, 1, K, V)`."""


def _check_values(number: int, visited: Tensor | None, threshold: Tensor | None) -> None:
    """Check what a CPU reads free of charge; a GPU asserts, or gives NaN.

    Raises:
        ValueError: A visited segment is none of the `number` that there are, or the threshold is not positive.
    """
    if visited is not None and visited.device.type == "cpu" and visited.numel():
        first, last = (x.item() for x in visited.aminmax())
        if first < 0 or last >= number:
            raise ValueError(f"visited must lie between 0 and M - 1 = {number - 1}; got {first} to {last}")
    if threshold is not None and threshold.device.type == "cpu" and (threshold <= 0).any():
        raise ValueError(f"threshold must be positive; got {threshold.item()}")


def _index(x: Tensor, visited: Tensor) -> Tensor:
    return visited[:, None, :, None, None].expand(*x.shape[:2], visited.shape[1], *x.shape[3:])


def _visited(x: Tensor, visited: Tensor | None, dtype: torch.dtype) -> Tensor:
    return x.to(dtype) if visited is None else x.gather(2, _index(x, visited)).to(dtype)


def _products(key: Tensor, value: Tensor, visited: Tensor | None, complement: bool, clamp: float | None) -> _Products:
    wide = torch.promote_types(key.dtype, torch.float32)
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


def _membranes(drive: Tensor, leak: Tensor, threshold: Tensor) -> None:
    """Turn P W^T into the membranes m before their reset, in place."""
    after = torch.zeros_like(drive[:, :, 0])
    for membrane in drive.unbind(2):
        membrane.add_(after.mul_(leak))
        fired = (membrane / threshold).sub_(1).gt_(0)
        torch.addcmul(membrane, fired, threshold, value=-1, out=after)


@torch.library.custom_op(f"{NAMESPACE}::segment_recurrence", mutates_args=())
def _forward(
    key: Tensor, value: Tensor, weight: Tensor | None, leak: Tensor | None, threshold: Tensor | None,
    visited: Tensor | None, complement: bool, clamp: float | None, surrogate: bool, backend: str,
) -> Tensor:  # fmt: skip
    on_triton = _runs_on_triton(backend, key, value, weight, leak, threshold, visited)
    _check_values(key.shape[2], visited, threshold)
    with full_precision(key.device):
        if on_triton:
            from . import triton_kernels

            return triton_kernels.forward(key, value, weight, leak, threshold, visited, complement, clamp)
        states = _products(key, value, visited, complement, clamp).inputs
        if weight is not None and leak is not None and threshold is not None:
            wide = states.dtype
            states = torch.matmul(states, weight.to(wide).mT)
            _membranes(states, leak.to(wide), threshold.to(wide))
            states.div_(threshold.to(wide)).sub_(1).clamp_min_(0)
        return states.to(key.dtype)


@_forward.register_fake
def _(
    key: Tensor, value: Tensor, weight: Tensor | None, leak: Tensor | None, threshold: Tensor | None,
    visited: Tensor | None, complement: bool, clamp: float | None, surrogate: bool, backend: str,
) -> Tensor:  # fmt: skip
    number = key.shape[2] if visited is None else visited.shape[1]
    return key.new_empty(*key.shape[:2], number, key.shape[4], value.shape[4])


@torch.library.custom_op(f"{NAMESPACE}::segment_recurrence_backward", mutates_args=())
def _backward(
    grad: Tensor, key: Tensor, value: Tensor, weight: Tensor | None, leak: Tensor | None, threshold: Tensor | None,
    visited: Tensor | None, complement: bool, clamp: float | None, surrogate: bool, backend: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    on_triton = _runs_on_triton(backend, key, value, weight, leak, threshold, visited)
    with full_precision(key.device):
        if on_triton:
            from . import triton_kernels

            neuron = (weight, leak, threshold)
            d_key, d_value, *d_neuron = triton_kernels.backward(
                grad, key, value, *neuron, visited, complement, clamp, surrogate
            )
            found = [
                key.new_zeros(0) if d is None or x is None else d.to(x.dtype, copy=True).view(x.shape)
                for d, x in zip(d_neuron, neuron, strict=True)
            ]
            return d_key, d_value, found[0], found[1], found[2]
        products = _products(key, value, visited, complement, clamp)
        wide = products.inputs.dtype
        d_inputs = grad.to(wide)
        d_weight, d_leak, d_threshold = (key.new_zeros(0) for _ in range(3))
        if weight is not None and leak is not None and threshold is not None:
            w = weight.to(wide)
            drive = torch.matmul(products.inputs, w.mT)
            d_leak, d_threshold = _unwind(drive, d_inputs, leak.to(wide), threshold.to(wide), surrogate)
            d_weight = torch.matmul(drive.flatten(0, 3).mT, products.inputs.flatten(0, 3)).to(weight.dtype)
            d_leak, d_threshold = d_leak.to(leak.dtype), d_threshold.to(threshold.dtype)
            d_inputs = torch.matmul(drive, w)
        d_own = -d_inputs if complement else d_inputs
        d_whole = d_inputs.sum(2, keepdim=True) if complement else None
        if products.own_within is not None:
            d_own = d_own * products.own_within
        if d_whole is not None and products.whole_within is not None:
            d_whole = d_whole * products.whole_within
        if visited is None and d_whole is not None:
            d_own, d_whole = d_own + d_whole, None
        k, v = _visited(key, visited, wide), _visited(value, visited, wide)
        d_key, d_value = torch.matmul(v, d_own.mT), torch.matmul(k, d_own)
        if visited is not None:
            d_key = torch.zeros_like(key, dtype=wide).scatter_add_(2, _index(key, visited), d_key)
            d_value = torch.zeros_like(value, dtype=wide).scatter_add_(2, _index(value, visited), d_value)
            if d_whole is not None:
                d_key += torch.matmul(value.to(wide), d_whole.mT)
                d_value += torch.matmul(key.to(wide), d_whole)
        return d_key.to(key.dtype), d_value.to(value.dtype), d_weight, d_leak, d_threshold


@_backward.register_fake
def _(
    grad: Tensor, key: Tensor, value: Tensor, weight: Tensor | None, leak: Tensor | None, threshold: Tensor | None,
    visited: Tensor | None, complement: bool, clamp: float | None, surrogate: bool, backend: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    neuron = [key.new_empty(0) if x is None else x.new_empty(x.shape) for x in (weight, leak, threshold)]
    return key.new_empty(key.shape), value.new_empty(value.shape), neuron[0], neuron[1], neuron[2]


def _unwind(
    drive: Tensor, grad: Tensor, leak: Tensor, threshold: Tensor, surrogate: bool
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Go back through the recurrence: turn P W^T into its gradient in place, return those of leak and threshold.

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


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:6])
    *ctx.options, backend = inputs[6:]
    ctx.backend = wished_backend(backend)


def _differentiate(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    tensors = ctx.saved_tensors
    gradients = _backward(grad, *tensors, *ctx.options, ctx.backend)
    given = [gradient if x is not None else None for gradient, x in zip(gradients, tensors[:5], strict=True)]
    return *given, *[None] * 5


_forward.register_autograd(_differentiate, setup_context=_save)


def segment_recurrence(
    key: Tensor, value: Tensor, *, weight: Tensor | None = None, leak: Tensor | None = None,
    threshold: Tensor | None = None, visited: Tensor | None = None, source: str = "complement",
    clamp: float | None = None, surrogate: bool = False, backend: str = "auto",
) -> Tensor:  # fmt: skip
    """Compute `hf_hybrid.kernels.segment_recurrence`; arguments as there, not checked again."""
    if visited is not None:
        visited = visited.to(torch.int64).expand(key.shape[0], -1)
    limit = None if clamp is None else float(clamp)
    return _forward(key, value, weight, leak, threshold, visited, source == "complement", limit, surrogate, backend)
