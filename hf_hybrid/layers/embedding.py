"""Token embedding with a fixed scale."""

import torch
from torch import nn


class ScaledEmbedding(nn.Embedding):
    """Embedding whose rows are multiplied by a constant when they are looked up, as Mega's and BART's.

    Args:
        num_embeddings: Tokens V.
        embedding_dim: Width D.
        scale: The constant; 1 leaves an ordinary embedding.
    """

    def __init__(self, num_embeddings: int, embedding_dim: int, scale: float = 1.0):
        super().__init__(num_embeddings, embedding_dim)
        self.scale = scale

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Map ids of any shape to `(..., D)`."""
        embedded = super().forward(input_ids)
        return embedded if self.scale == 1 else embedded * self.scale

    def extra_repr(self) -> str:
        """The arguments that shape the layer."""
        return f"{super().extra_repr()}, scale={self.scale:.6g}"
