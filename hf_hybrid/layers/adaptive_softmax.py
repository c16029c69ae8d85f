"""Adaptive input embedding and adaptive softmax: rarer clusters of tokens have narrower vectors.

Token ids must be sorted by frequency, most frequent first.

V vocabulary · D hidden size · C tail clusters · V_i, D_i size and width of cluster i, 0 = head
"""

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import nn
from torch.nn import functional as F

from ..kernels.checks import check_positive
from ..kernels.precision import compute_dtype
from .dropout import Dropout

IGNORED = -100
"""Label of positions that the loss skips."""


class Cluster(NamedTuple):
    """Token ids `start` to `end - 1`, with vectors of `width` numbers."""

    start: int
    end: int
    width: int


def make_clusters(vocab_size: int, hidden_size: int, cutoffs: Sequence[int], factor: int) -> tuple[Cluster, ...]:
    """Cut a vocabulary into clusters, each narrower than the one before.

    Args:
        vocab_size: V.
        hidden_size: D, width of the first cluster.
        cutoffs: First token ids of the second and later clusters.
        factor: Ratio of the widths of successive clusters.

    Raises:
        ValueError: An argument is invalid; the message names it, its value and the rule.
    """
    bounds = [0, *cutoffs, vocab_size]
    if len(bounds) == 2 or any(start >= end for start, end in itertools.pairwise(bounds)):
        raise ValueError(
            f"cutoffs must be one or more ascending positive numbers below vocab_size {vocab_size}; "
            f"got {tuple(cutoffs)}"
        )
    check_positive(factor=factor)
    if hidden_size < 1 or hidden_size % factor ** len(cutoffs):
        raise ValueError(
            f"hidden_size must be a positive multiple of {factor ** len(cutoffs)}, factor to the power of the number "
            f"of cutoffs; got {hidden_size}"
        )
    return tuple(
        Cluster(start, end, hidden_size // factor**index)
        for index, (start, end) in enumerate(itertools.pairwise(bounds))
    )


def _members(clusters: Sequence[Cluster], index: int, ids: torch.Tensor) -> torch.Tensor:
    """Return which ids belong to a cluster; ids outside the vocabulary go to an end cluster, whose lookup fails."""
    start, end, _ = clusters[index]
    if index == 0:
        return ids < end
    return ids >= start if index == len(clusters) - 1 else (ids >= start) & (ids < end)


class _Tables(nn.Module):
    """Tables and projections by cluster, each a direct parameter: transformers does not initialise those in lists."""

    table_0: nn.Parameter

    def __init__(self, clusters: tuple[Cluster, ...]):
        super().__init__()
        self.clusters = clusters

    def _declare(self, *, projected_from: int) -> None:
        """Make a table for every cluster, and projections from cluster `projected_from` on."""
        for index, (start, end, width) in enumerate(self.clusters):
            self.register_parameter(f"table_{index}", nn.Parameter(torch.empty(end - start, width)))
            if index >= projected_from:
                projection = torch.empty(self.clusters[0].width, width)
                self.register_parameter(f"projection_{index}", nn.Parameter(projection))

    def of_cluster(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return a cluster's table `(V_i, D_i)` and projection `(D, D_i)`."""
        return getattr(self, f"table_{index}"), getattr(self, f"projection_{index}")

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Initialise every tensor in place: tables normal with variance 1 / width, the others Xavier uniform.

        Tensors marked ``_is_hf_initialized`` (loaded from a checkpoint) keep their values.
        """
        for name, tensor in self.named_parameters(recurse=False):
            if getattr(tensor, "_is_hf_initialized", False) or tensor.is_meta:
                continue
            if name.startswith("table"):
                nn.init.normal_(tensor, std=tensor.shape[1] ** -0.5)
            else:
                nn.init.xavier_uniform_(tensor)


class AdaptiveEmbedding(_Tables):
    """Token embedding with narrow vectors for rare tokens (Baevski and Auli 2019, section 3).

    x = P_i e  for a token of cluster i, where e `(D_i,)` is its row of the cluster's table and P_i `(D, D_i)` a
    projection without bias. The head has one too.

    Args:
        vocab_size: V.
        hidden_size: D, a multiple of ``factor ** len(cutoffs)``.
        cutoffs: First token ids of the second and later clusters.
        factor: Ratio of the widths of successive clusters.
        scale: Factor on every vector.

    Raises:
        ValueError: An argument is invalid; the message names it, its value and the rule.
    """

    def __init__(
        self, vocab_size: int, hidden_size: int, cutoffs: Sequence[int], factor: int = 4, *, scale: float = 1.0
    ):
        super().__init__(make_clusters(vocab_size, hidden_size, cutoffs, factor))
        self.scale = scale
        self._declare(projected_from=0)
        self.reset_parameters()

    def extra_repr(self) -> str:
        """Return the clusters to show in the module's repr."""
        return ", ".join(f"{start} to {end - 1}: {width}" for start, end, width in self.clusters)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Look up ids of any shape; returns `(..., D)`.

        It looks up every token in every cluster, as the first token where it is no member. This wastes some products,
        but no shape depends on data.

        Raises:
            IndexError: An id is outside the vocabulary (on a CPU; a GPU raises its own error).
        """
        parts = []
        for index in range(len(self.clusters)):
            table, projection = self.of_cluster(index)
            inside = _members(self.clusters, index, input_ids)
            rows = F.embedding(torch.where(inside, input_ids - self.clusters[index].start, 0), table)
            parts.append(F.linear(rows, projection))
            if index > 0:
                parts[0] = torch.where(inside[..., None], parts.pop(), parts[0])
        return parts[0] if self.scale == 1 else parts[0] * self.scale


class AdaptiveSoftmax(_Tables):
    """Softmax over a vocabulary in clusters (Grave et al. 2017), as Baevski and Auli 2019 tie it to the embedding.

    With the clusters' own W `(C, D)`, and the embedding's tables E and projections P, a head q = softmax([E_0 h; W h])
    gives p(token of the head) = q[token],  p(token of cluster i) = q[V_0 + i - 1] softmax(E_i P_i^T h)[token].

    Every call receives the embedding, so that each tensor has one owner and one name in the state dict. An untied
    softmax has its own tables and projections of the same shapes.

    Args:
        embedding: The embedding that defines the clusters.
        tied: Whether to use the embedding's tables and projections.
        dropout: Probability of dropping an element of h, and of its projection P_i^T h.

    Note:
        The head's scores are E_0 h without P_0, tied or not, as in the public code.
    """

    def __init__(self, embedding: AdaptiveEmbedding, *, tied: bool = True, dropout: float = 0.0):
        super().__init__(embedding.clusters)
        self.tied = tied
        self.dropout = Dropout(dropout)
        self.class_weight = nn.Parameter(torch.empty(len(self.clusters) - 1, self.clusters[0].width))
        if not tied:
            self._declare(projected_from=1)
        self.reset_parameters()

    def extra_repr(self) -> str:
        """Return the arguments to show in the module's repr."""
        return f"tied={self.tied}"

    def forward(self, hidden_states: torch.Tensor, embedding: AdaptiveEmbedding | None = None) -> torch.Tensor:
        """Compute the log-probabilities of the complete vocabulary; they can serve as logits.

        Args:
            hidden_states: h, `(..., D)`.
            embedding: The embedding, if tied.

        Returns:
            `(..., V)`, float32 (float64).

        Raises:
            ValueError: The embedding is missing or has other clusters.
        """
        weights = self._weights(embedding)
        hidden_states = self.dropout(hidden_states)
        words = self.clusters[0].end
        head = self._head(hidden_states, weights).log_softmax(-1)
        parts = [head[..., :words]]
        for index in range(1, len(self.clusters)):
            tail = self._tail(hidden_states, *weights.of_cluster(index)).log_softmax(-1)
            parts.append(head[..., words + index - 1, None] + tail)
        return torch.cat(parts, dim=-1)

    def loss(
        self, hidden_states: torch.Tensor, labels: torch.Tensor, embedding: AdaptiveEmbedding | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Sum the labels' negative log-probabilities, each computed within its cluster only.

        Args:
            hidden_states: h, `(..., D)`.
            labels: Token ids, `(...)`; -100 = skip.
            embedding: The embedding, if tied.

        Returns:
            The sum in nats, float32 (float64), and the number of labels other than -100, int64.

        Raises:
            ValueError: A shape does not fit, or the embedding is missing or has other clusters.
            IndexError: A label is outside the vocabulary (on a CPU; a GPU raises its own error).
        """
        if labels.shape != hidden_states.shape[:-1]:
            raise ValueError(f"labels must be {tuple(hidden_states.shape[:-1])}; got {tuple(labels.shape)}")
        weights = self._weights(embedding)
        counted = labels != IGNORED
        hidden_states, labels = self.dropout(hidden_states[counted]), labels[counted]
        words, head_labels, losses = self.clusters[0].end, labels, []
        for index in range(1, len(self.clusters)):
            inside = _members(self.clusters, index, labels)
            # empty clusters too: every process must produce gradients for the same tensors
            tail = self._tail(hidden_states[inside], *weights.of_cluster(index))
            losses.append(F.cross_entropy(tail, labels[inside] - self.clusters[index].start, reduction="sum"))
            head_labels = torch.where(inside, words + index - 1, head_labels)
        losses.append(F.cross_entropy(self._head(hidden_states, weights), head_labels, reduction="sum"))
        return torch.stack(losses).sum(), counted.sum()

    def _weights(self, embedding: AdaptiveEmbedding | None) -> _Tables:
        if not self.tied:
            return self
        if embedding is None or embedding.clusters != self.clusters:
            got = None if embedding is None else embedding.clusters
            raise ValueError(f"embedding must be the tied one, with clusters {self.clusters}; got {got}")
        return embedding

    def _head(self, hidden_states: torch.Tensor, weights: _Tables) -> torch.Tensor:
        """Return scores of the head's tokens and of the clusters, `(..., V_0 + C)`, float32 (float64)."""
        scores = F.linear(hidden_states, weights.table_0), F.linear(hidden_states, self.class_weight)
        return _wide(torch.cat(scores, dim=-1))

    def _tail(self, hidden_states: torch.Tensor, table: torch.Tensor, projection: torch.Tensor) -> torch.Tensor:
        """Return scores of a cluster's tokens, `(..., V_i)`, float32 (float64)."""
        return _wide(F.linear(self.dropout(hidden_states @ projection), table))


def _wide(scores: torch.Tensor) -> torch.Tensor:
    return scores.to(compute_dtype(scores))
