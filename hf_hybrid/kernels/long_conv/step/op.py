"""A token of a continued convolution as a custom op, so that one compiled step serves every position.

B batch · T_k taps · D width · R ring
"""

from typing import Any

import torch
from torch import Tensor

from ...dispatch import NAMESPACE
from . import torch_impl


@torch.library.custom_op(f"{NAMESPACE}::online_conv_token", mutates_args=("pending", "inputs"))
def online_conv_token(u: Tensor, kernel: Tensor, pending: Tensor, inputs: Tensor, position: int) -> Tensor:
    """Return the output `(B, 1, D)` of a token in the precision of the state, which becomes the next one."""
    y, after, *_ = torch_impl.advance(u, kernel, pending, inputs, position)
    if after.shape != pending.shape:
        raise ValueError(f"state must have room for one more token; its rings of {pending.shape[1]} places are full")
    if after is not pending:
        pending.copy_(after)
    return y.contiguous()  # whatever the layout of the state is


@online_conv_token.register_fake
def _(u: Tensor, kernel: Tensor, pending: Tensor, *_others: Any) -> Tensor:
    return pending.new_empty(u.shape)
