"""The position-wise feed-forward network, plain or gated, which keeps its wide tensors once for the backward."""

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.module import _has_any_global_hook

from ..kernels.precision import autocast_once
from .dropout import Dropout


class FeedForward(nn.Module):
    """Two-layer network for every position: ``down(act(up(x)))``, or gated ``down(act(gate(x)) * up(x))``.

    Args:
        hidden_size: D, width of input and output.
        intermediate_size: Width of the hidden layer.
        activation: The non-linearity.
        gated: Whether to add the gate (T5 v1.1).
        bias: Whether the projections have biases.
        dropout: Probability of dropping an intermediate activation.
    """

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        activation: nn.Module,
        *,
        gated: bool = False,
        bias: bool = True,
        dropout: float = 0.0,
    ):
        super().__init__()
        self.gate_proj = nn.Linear(hidden_size, intermediate_size, bias=bias) if gated else None
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias=bias)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=bias)
        self.activation = activation
        self.dropout = Dropout(dropout)

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Map `(B, T, D)` to `(B, T, D)`."""
        wide = [proj(hidden_states) for proj in (self.gate_proj, self.up_proj) if proj is not None]
        # a compiler decides for itself what its graph computes again
        is_recorded = torch.is_grad_enabled() and not torch.compiler.is_compiling()
        if is_recorded and type(self.dropout) is Dropout and _are_plain(self.activation, self.dropout):
            if self.gate_proj is None and type(self.activation) is nn.ReLU:  # whose result tells its gradient
                return self.down_proj(self.dropout.after_relu(*wide))
            if self._keeps_twice() and _is_linear(self.down_proj):
                return _project(self._activate, self.down_proj, *wide)
        return self.down_proj(self.dropout(self._activate(*wide)))

    def _activate(self, first: Tensor, *others: Tensor) -> Tensor:
        """Return act(up), or act(gate) * up."""
        activated: Tensor = self.activation(first)
        return activated * others[0] if others else activated

    def _keeps_twice(self) -> bool:
        """Whether autograd would keep both what is activated and the result, and nothing hinders computing it again.

        Dropout, a trained activation (PReLU), one in place and the transforms of `torch.func` are left to autograd.
        """
        drops = self.training and self.dropout.p > 0
        altered = getattr(self.activation, "inplace", False) or any(True for _ in self.activation.parameters())
        return not (drops or altered or torch._C._are_functorch_transforms_active())


def _is_linear(module: nn.Module) -> bool:
    """Whether a module is an ordinary linear map."""
    return type(module) is nn.Linear and type(module.weight) in (nn.Parameter, Tensor) and _are_plain(module)


def _are_plain(*modules: nn.Module) -> bool:
    """Whether to call these modules is to call their classes' forward."""
    return not _has_any_global_hook() and not any(_is_altered(module) for module in modules)


def _is_altered(module: nn.Module) -> bool:
    hooks = module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks
    return any(hooks) or "forward" in vars(module)


def _project(activate: Callable[..., Tensor], linear: nn.Linear, *inputs: Tensor) -> Tensor:
    """Compute ``linear(activate(*inputs))`` and keep only the inputs, `(..., F)`, for the backward.

    Autocast casts the weights here, where autograd sees it.
    """
    weights: list[Tensor | None] = [linear.weight, linear.bias]
    autocast: Callable[[], Any] = nullcontext
    device = inputs[0].device.type
    if device != "meta" and torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        autocast = partial(torch.autocast, device, dtype=dtype)
        weights = [x if x is None else autocast_once(x) for x in weights]
    projected: Tensor = _Projection.apply(activate, autocast, *weights, *inputs)
    return projected


class _Projection(torch.autograd.Function):
    """y = h W^T + b with h = activate(*inputs), which the backward computes again: dh = dy W, dW = dy^T h."""

    @staticmethod
    def forward(
        ctx: Any,
        activate: Callable[..., Tensor],
        autocast: Callable[[], Any],
        weight: Tensor,
        bias: Tensor | None,
        *inputs: Tensor,
    ) -> Tensor:
        ctx.activate, ctx.autocast = activate, autocast
        ctx.save_for_backward(weight, *inputs)
        return F.linear(activate(*inputs), weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        weight, *inputs = ctx.saved_tensors
        _, _, wants_weight, wants_bias, *wanted = ctx.needs_input_grad
        with torch.enable_grad(), ctx.autocast():
            hidden = ctx.activate(*inputs)
        rows = grad.flatten(0, -2)
        d_weight = rows.T @ hidden.flatten(0, -2).to(weight.dtype) if wants_weight else None
        d_bias = rows.sum(0) if wants_bias else None
        leaves = [x for x, is_wanted in zip(inputs, wanted, strict=True) if is_wanted]
        found: list[Tensor] = []
        if leaves:
            d_hidden = (grad @ weight).to(hidden.dtype)
            found += torch.autograd.grad(hidden, leaves, d_hidden, create_graph=torch.is_grad_enabled())
        d_inputs = [found.pop(0) if is_wanted else None for is_wanted in wanted]
        return None, None, d_weight, d_bias, *d_inputs
