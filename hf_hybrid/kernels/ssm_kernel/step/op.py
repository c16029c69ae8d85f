"""One token of a state space model as a custom op without a gradient."""

from typing import Any

import torch
from torch import Tensor

from ...dispatch import NAMESPACE, triton_if_chosen
from ...precision import compute_dtype
from . import torch_impl


@torch.library.custom_op(f"{NAMESPACE}::ssm_step", mutates_args=())
def ssm_step(
    state: Tensor | None, u: Tensor, C: Tensor, decay: Tensor, column: Tensor | None, row: Tensor | None, gain: Tensor,
    skip: Tensor | None, backend: str,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Advance by one token; only S4 has `column` and `row`, and `gain` is the step's input vector."""
    tensors = state, u, C, decay, column, row, gain, skip
    run = triton_if_chosen("ssm_step", __package__, backend, tensors, lambda kernels: kernels.why_not(u, C))
    return (run or torch_impl).forward(*tensors)


@ssm_step.register_fake
def _(_state: Tensor | None, u: Tensor, C: Tensor, *_others: Any) -> tuple[Tensor, Tensor]:
    batch, wide = u.shape[0], compute_dtype(C.real)
    return u.new_empty(batch, *C.shape[:2]), u.new_empty(batch, *C.shape[1:], 2, dtype=wide)
