"""Dense softmax attention as torch's operations, for `attn_implementation="eager"`.

Shapes: B batch · T length · S keys · H heads · K head dim.
"""

import torch
from torch import nn
from transformers.processing_utils import Unpack
from transformers.utils import TransformersKwargs

from ..layers.dropout import dropout as drop


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
