"""T5's relative position bias: one learned number per head and per bucket of distances.

Shapes: H heads · offsets of any shape, in tokens.
"""

import math
from typing import Any, Self

import torch
from torch import nn
from torch.nn import functional

from .state_space import Kept, keep


def relative_position_bucket(
    offsets: torch.Tensor, *, bidirectional: bool, num_buckets: int, max_distance: int
) -> torch.Tensor:
    """Map distances to buckets, one per token nearby and logarithmically wider farther out.

    With n buckets per direction, the first n/2 distances have a bucket each; a larger distance d falls into bucket
    ``n/2 + floor(log(d / (n/2)) / log(max_distance / (n/2)) * n/2)``, at most n-1 (Raffel et al. 2020, section 2.1).

    Args:
        offsets: Key position minus query position in tokens, integers of any shape.
        bidirectional: Whether keys after the query have their own buckets (the upper half) or share bucket 0 with the
            query's position.
        num_buckets: Total number of buckets.
        max_distance: Distance in tokens at which the last bucket starts.

    Returns:
        Bucket numbers, int64, in the shape of ``offsets``.
    """
    if bidirectional:
        num_buckets //= 2
        base = (offsets > 0).long() * num_buckets
        distance = offsets.abs()
    else:
        base = torch.zeros_like(offsets, dtype=torch.long)
        distance = (-offsets).clamp_min(0)
    exact = num_buckets // 2
    # float32 as in T5, so that distances on a boundary fall into the bucket of T5's checkpoints
    ratio = torch.log(distance.clamp_min(1).float() / exact) / math.log(max_distance / exact)
    wide = (exact + (ratio * (num_buckets - exact)).long()).clamp_max(num_buckets - 1)
    return base + torch.where(distance < exact, distance, wide)


class RelativePositionBias(nn.Embedding):
    """Table of T5's relative position biases by distance.

    Args:
        num_heads: H.
        num_buckets: Rows of the table.
        max_distance: Distance in tokens at which the last bucket starts.
        bidirectional: Whether keys after the query have their own buckets.

    Attributes:
        init_scale: Factor on the initial biases, for models that multiply the scores afterwards.
    """

    init_scale = 1.0

    def __init__(self, num_heads: int, *, num_buckets: int = 32, max_distance: int = 128, bidirectional: bool = True):
        super().__init__(num_buckets, num_heads)
        self.max_distance = max_distance
        self.bidirectional = bidirectional
        self._past_buckets: torch.Tensor | None = None
        self._kept: tuple[int, Kept] | None = None

    def train(self, mode: bool = True) -> Self:
        """Set the mode, and forget what tokens read: compiled calls, which may train, cannot."""
        self._kept = None
        return super().train(mode)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_kept": None}

    def forward(
        self, offsets: torch.Tensor | None = None, *, reach: int | None = None, scale: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return the bias of every head for every offset, in the table's dtype.

        Args:
            offsets: Any shape.
            reach: Instead of offsets: use -reach to 0, as decoding does at every token. Their buckets are cached, and
                if no gradient is recorded also their biases, until a call with offsets starts another sequence.
            scale: With `reach`: a number per head, `(H,)`, by whose absolute value the biases are multiplied on its
                device.

        Returns:
            ``(H, *offsets.shape)``, or `(H, reach + 1)`.
        """
        compiling = torch.compiler.is_compiling()
        if not compiling and (offsets is not None or torch.is_grad_enabled()):
            self._kept = None
        if offsets is not None:
            return functional.embedding(self._buckets(offsets), self.weight).movedim(-1, 0)
        assert reach is not None
        if compiling or torch.is_grad_enabled():
            return self._past(reach, scale)
        longest = (1 << reach.bit_length()) - 1
        before, kept = self._kept or (longest, None)  # another thread may forget it meanwhile
        tensors = [self.weight] if scale is None else [self.weight, scale]
        kept = keep(kept if before == longest else None, tensors, lambda: self._past(longest, scale))
        self._kept = longest, kept
        biases: torch.Tensor = kept[2]
        return biases[:, longest - reach :]

    def _past(self, reach: int, scale: torch.Tensor | None) -> torch.Tensor:
        device, kept = self.weight.device, self._past_buckets
        if torch.compiler.is_compiling():
            biases = self.forward(torch.arange(-reach, 1, device=device))
        else:
            if kept is None or kept.device != device or kept.shape[0] <= reach:
                with torch.inference_mode(False):  # a training step may use them later
                    kept = self._buckets(torch.arange(1 - (1 << reach.bit_length()), 1, device=device))
                self._past_buckets = kept
            biases = self.weight.index_select(0, kept[kept.shape[0] - reach - 1 :]).t()
        return biases if scale is None else biases.to(scale.device) * scale.abs()[:, None].to(biases.dtype)

    def recency_biases(self) -> torch.Tensor:
        """Return a table that prefers near keys, with the slopes of ALiBi (Press et al. 2022, section 3).

        Head h = 1 ... H has -2^(-8 h / H) d for the smallest distance d of a bucket, and 0 for buckets without one.

        Returns:
            `(num_buckets, H)`, on the default device.
        """
        offsets = torch.arange(-self.max_distance, self.max_distance + 1)
        nearest = torch.full((self.num_embeddings,), self.max_distance + 1)
        nearest.scatter_reduce_(0, self._buckets(offsets), offsets.abs(), "amin")
        nearest.masked_fill_(nearest > self.max_distance, 0)
        slopes = 2.0 ** (-8 / self.embedding_dim * torch.arange(1, self.embedding_dim + 1))
        return -nearest[:, None] * slopes

    def _buckets(self, offsets: torch.Tensor) -> torch.Tensor:
        return relative_position_bucket(
            offsets,
            bidirectional=self.bidirectional,
            num_buckets=self.num_embeddings,
            max_distance=self.max_distance,
        )
