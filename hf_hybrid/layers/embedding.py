"""Token embedding with a fixed scale."""

import torch
from torch import nn


class ScaledEmbedding(nn.Embedding):
    """Embedding that multiplies the rows it looks up by a constant, as in Mega and BART.

    Args:
        num_embeddings: Vocabulary size V.
        embedding_dim: Width D.
        scale: The constant; 1 gives an ordinary embedding.
    """

    def __init__(self, num_embeddings: int, embedding_dim: int, scale: float = 1.0):
        super().__init__(num_embeddings, embedding_dim)
        self.scale = scale

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Map ids of any shape to `(..., D)`."""
        embedded = super().forward(input_ids)
        return embedded if self.scale == 1 else embedded * self.scale

    def extra_repr(self) -> str:
        """Return the arguments to show in the module's repr."""
        return f"{super().extra_repr()}, scale={self.scale:.6g}"
