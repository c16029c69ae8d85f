"""Dense attention of several architectures: by transformers' functions, or by ours where that is faster.

Shapes: B batch · T length · S keys · H heads · K head width.
"""

from collections.abc import Callable

import torch
from torch import nn
from transformers import PreTrainedConfig
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.processing_utils import Unpack
from transformers.utils import TransformersKwargs

from ..layers.dropout import dropout as drop
from ..layers.full_attention import full_attention


def eager_attention_forward(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float,
    dropout: float = 0.0,
    **kwargs: Unpack[TransformersKwargs],
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute dense softmax attention, in the signature of transformers' attention functions.

    Args:
        module: The attention layer; only its `training` is read.
        query: `(B, H, T, K)`.
        key: `(B, H, S, K)`.
        value: `(B, H, S, K)`.
        attention_mask: Added to the scores, broadcastable to `(B, H, T, S)`.
        scaling: Factor on the scores.
        dropout: Dropout on the probabilities.
        **kwargs: Ignored.

    Returns:
        Output `(B, T, H, K)` and probabilities `(B, H, T, S)`.
    """
    scores = torch.matmul(query, key.transpose(2, 3)) * scaling
    if attention_mask is not None:
        scores = scores + attention_mask
    probabilities = nn.functional.softmax(scores, dim=-1, dtype=torch.float32).to(query.dtype)
    probabilities = drop(probabilities, dropout, module.training)
    return torch.matmul(probabilities, value).transpose(1, 2), probabilities


def _dropping_attention_forward(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float,
    dropout: float = 0.0,
    **kwargs: Unpack[TransformersKwargs],
) -> tuple[torch.Tensor, None]:
    """Compute `full_attention`; arguments and output are those of `eager_attention_forward`."""
    query, key = query.to(value.dtype), key.to(value.dtype)  # under autocast, a norm may have widened them
    return full_attention(query, key, value, attention_mask=attention_mask, scale=scaling, dropout=dropout), None


def choose_attention(
    config: PreTrainedConfig, query: torch.Tensor, attention_mask: torch.Tensor | None, dropout: float
) -> Callable[..., tuple[torch.Tensor, torch.Tensor | None]]:
    """Return the function of dense attention that a config asks for; on a CPU with dropout ours in place of torch's.

    Args:
        config: The stack's config.
        query: What attends.
        attention_mask: Added to the scores, or None.
        dropout: Dropout on the probabilities, 0 outside of training.

    Returns:
        A function with the arguments and outputs of `eager_attention_forward`, its probabilities perhaps None.
    """
    fits = query.device.type == "cpu" and not torch.compiler.is_compiling()
    fits = fits and (attention_mask is None or not attention_mask.requires_grad)
    if config._attn_implementation == "sdpa" and dropout > 0 and fits:
        return _dropping_attention_forward
    return ALL_ATTENTION_FUNCTIONS.get_interface(config._attn_implementation, eager_attention_forward)
