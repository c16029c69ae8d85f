"""Activation checkpointing that keeps what is dear to compute, and computes only the rest of a layer again.

transformers hands `activation_checkpointing_kwargs`, once `gradient_checkpointing_kwargs`, to
`torch.utils.checkpoint.checkpoint`, whose `context_fn` chooses operation by operation. JSON cannot name a function; so
here they may hold `save`, one of `SAVED`, which becomes that function. Only models of this package understand it: a
layer that writes into the result of a product, as some of transformers do, would find it written when it is computed
again.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from hf_hybrid.suggestions import did_you_mean

from ..kernels.dispatch import NAMESPACE

_aten = torch.ops.aten
_PRODUCTS = {
    _aten.mm.default,
    _aten.addmm.default,
    _aten.bmm.default,
    _aten.baddbmm.default,
    _aten._scaled_mm.default,
    _aten.convolution.default,
}
_CHEAP = {"dropout", "relu_dropout", "short_conv"}
"""The package's operations that cost as little as a norm."""


def _is_operation(op: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Whether a call is one of the package's operations on sequences, or torch's attention."""
    namespace, _, name = op.name().partition("::")
    if namespace != "aten":
        return namespace == NAMESPACE and name not in _CHEAP
    if not name.startswith("_scaled_dot_product_"):
        return False
    # one that draws a mask is computed again: left out, it would leave its random numbers to what draws next
    given = dict(zip((argument.name for argument in op._schema.arguments), args, strict=False)) | kwargs
    return not given.get("dropout_p", 0.0)


def _choose(is_dear: bool) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if is_dear else CheckpointPolicy.PREFER_RECOMPUTE


def _keep_operations(_context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return _choose(_is_operation(op, args, kwargs))


def _keep_products(_context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return _choose(op in _PRODUCTS or _is_operation(op, args, kwargs))


# functions of their own, since torch.compile follows no partial of a partial
def _operations_context() -> Any:
    return create_selective_checkpoint_contexts(_keep_operations)


def _products_context() -> Any:
    return create_selective_checkpoint_contexts(_keep_products)


SAVED: dict[str, Callable[[], Any]] = {"operations": _operations_context, "products": _products_context}
"""What a layer keeps for its backward, besides its inputs: the results of attention, long convolutions, scans and the
taps of state spaces; or these and the results of all matrix products."""


def check_saved(name: str, options: Mapping[str, Any]):
    """Check what activation checkpointing is to keep.

    Args:
        name: The argument or flag that holds the options, for messages.
        options: Its value.

    Raises:
        ValueError: `save` is none of `SAVED`, or stands beside an option that contradicts it.
    """
    if "save" not in options:
        return
    saved = options["save"]
    if not isinstance(saved, str) or saved not in SAVED:
        hint = did_you_mean(saved, SAVED) if isinstance(saved, str) else ""
        raise ValueError(f"save in {name} must be one of {', '.join(SAVED)}; got {saved!r}.{hint}")
    if options.get("use_reentrant"):
        raise ValueError(
            f"use_reentrant in {name} must be false or left out with save; got {options['use_reentrant']}"
        )
    if options.get("context_fn") is not None:
        raise ValueError(f"context_fn in {name} must be left out with save, which chooses it")


def selective(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that checkpoints a layer, with `save` among its options put into torch's words.

    Raises:
        ValueError: See `check_saved`.
    """
    if not isinstance(function, partial) or "save" not in function.keywords:
        return function
    options = dict(function.keywords)
    check_saved("activation_checkpointing_kwargs", options)
    context = SAVED[options.pop("save")]
    return partial(function.func, *function.args, **options | {"use_reentrant": False, "context_fn": context})


class CheckpointingMixin:
    """Mixin before `PreTrainedModel`: activation checkpointing understands `save`."""

    def _set_gradient_checkpointing(self, enable=True, gradient_checkpointing_func=checkpoint, **options):
        saved = getattr(gradient_checkpointing_func, "keywords", {}).get("save")
        if enable and saved == "products" and any(isinstance(module, nn.RNNBase) for module in self.modules()):
            raise ValueError(
                "save in activation_checkpointing_kwargs must be operations, or left out, for a model with recurrent "
                f"networks of torch, which write into the results of their products; got {saved!r}"
            )
        super()._set_gradient_checkpointing(enable, selective(gradient_checkpointing_func), **options)
