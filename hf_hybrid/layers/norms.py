"""Normalisation layers, by name."""

import torch
from torch import nn

from ..context_parallel import Shards, add_up
from ..kernels.checks import check_choice
from ..kernels.precision import compute_dtype
from .rms_norm import rms_norm


class RMSNorm(nn.RMSNorm):
    """torch's root mean square norm, by `rms_norm`."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map `(..., D)` to `(..., D)`."""
        assert self.eps is not None
        return rms_norm(x, self.weight, self.eps)


class ScaleNorm(nn.Module):
    """Scale every token to a learned length: y = g x / sqrt(mean(x^2) + eps), with one number g.

    Nguyen and Salazar 2019, with Mega's mean over the features instead of their sum.

    Args:
        hidden_size: Width of the last dimension, only shown.
        eps: Added to the mean square.
        elementwise_affine: Whether to use g.
    """

    weight: torch.Tensor | None

    def __init__(self, hidden_size: int, eps: float = 1e-5, elementwise_affine: bool = True):
        super().__init__()
        self.hidden_size, self.eps = hidden_size, eps
        self.register_parameter("weight", nn.Parameter(torch.ones(1)) if elementwise_affine else None)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Map `(..., D)` to `(..., D)`."""
        normed = rms_norm(hidden_states, None, self.eps)
        return normed if self.weight is None else (normed * self.weight).to(hidden_states.dtype)

    def extra_repr(self) -> str:
        """Return the arguments to show in the module's repr."""
        return f"{self.hidden_size}, eps={self.eps}, elementwise_affine={self.weight is not None}"


class BatchNorm(nn.BatchNorm1d):
    """Batch normalisation of each channel over all kept tokens; padding does not enter the statistics.

    Computed in float32 (or float64). In evaluation it is a fixed scale and shift.

    Args:
        hidden_size: Channels D.
        eps: Added to the variance.
        elementwise_affine: Whether each channel has a learned scale and bias.
    """

    def __init__(self, hidden_size: int, eps: float = 1e-5, elementwise_affine: bool = True):
        super().__init__(hidden_size, eps=eps, affine=elementwise_affine)

    def scale_and_shift(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the scale and shift of evaluation, each `(D,)`."""
        assert self.running_mean is not None
        assert self.running_var is not None
        return self._scale_and_shift(self.running_mean, self.running_var)

    def _scale_and_shift(self, mean: torch.Tensor, var: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        wide = compute_dtype(mean)
        scale = (var.to(wide) + self.eps).rsqrt()
        if not self.affine:
            return scale, -mean.to(wide) * scale
        scale = scale * self.weight.to(wide)
        return scale, self.bias.to(wide) - mean.to(wide) * scale

    def forward(
        self, hidden_states: torch.Tensor, attention_mask: torch.Tensor | None = None, shards: Shards | None = None
    ) -> torch.Tensor:
        """Map `(B, T, D)` to `(B, T, D)`.

        Args:
            hidden_states: `(B, T, D)`; of a divided sequence own tokens, while the statistics are those of all.
            attention_mask: `(B, T)`, nonzero = keep; None keeps all.
            shards: The layout of a divided sequence, or None. In training each process sends 2 D + 1 numbers to each
                other one.

        Raises:
            ValueError: In training, the mask has another shape.
        """
        wide = compute_dtype(hidden_states)
        x = hidden_states.to(wide)
        scale, shift = self._batch_statistics(x, attention_mask, shards) if self.training else self.scale_and_shift()
        return torch.addcmul(shift.to(wide), x, scale.to(wide)).to(hidden_states.dtype)

    def _batch_statistics(
        self, x: torch.Tensor, attention_mask: torch.Tensor | None, shards: Shards | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return this batch's scale and shift, and update the running statistics."""

        def total(own: torch.Tensor) -> torch.Tensor:
            return own if shards is None else add_up(own, shards)

        if attention_mask is not None and attention_mask.shape != x.shape[:2]:
            raise ValueError(
                f"attention_mask must be of shape (batch, length), {tuple(x.shape[:2])}, for batch normalisation; "
                f"got {tuple(attention_mask.shape)}"
            )
        kept = x.new_ones(x.shape[:2]) if attention_mask is None else attention_mask.to(torch.bool).to(x.dtype)
        count = total(kept.sum()).clamp_min(1)
        x = x.masked_fill(kept[..., None] == 0, 0)
        mean = total(x.sum((0, 1))) / count
        var = total(((x - mean).square() * kept[..., None]).sum((0, 1))) / count
        if _is_recomputed():  # gradient checkpointing: the first forward has updated them
            return self._scale_and_shift(mean, var)
        assert self.momentum is not None
        with torch.no_grad():
            unbiased = var * (count / (count - 1).clamp_min(1))
            for running, new in ((self.running_mean, mean), (self.running_var, unbiased)):
                assert running is not None
                running.lerp_(new.to(running.dtype), self.momentum)
            assert self.num_batches_tracked is not None
            self.num_batches_tracked.add_(1)
        return self._scale_and_shift(mean, var)


def _is_recomputed() -> bool:
    """Return whether this forward runs inside a backward."""
    return not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1


NORMS: dict[str, type[nn.LayerNorm] | type[RMSNorm] | type[ScaleNorm] | type[BatchNorm]] = {
    "layer_norm": nn.LayerNorm,
    "rms_norm": RMSNorm,
    "scale_norm": ScaleNorm,
    "batch_norm": BatchNorm,
}


def make_norm(norm_type: str, hidden_size: int, eps: float, *, affine: bool = True) -> nn.Module:
    """Build a normalisation over the last dimension.

    Args:
        norm_type: ``"layer_norm"`` (mean and variance, scale and bias), ``"rms_norm"`` (root mean square, scale
            only, as in T5; without the scale TransNormerLLM's SimpleRMSNorm), ``"scale_norm"`` (root mean square, one
            scale for all) or ``"batch_norm"`` (mean and variance over batch and time, scale and bias).
        hidden_size: Width of the last dimension.
        eps: Added to the variance or the mean square.
        affine: Whether to use scale and bias.

    Raises:
        ValueError: ``norm_type`` is unknown.
    """
    check_choice("norm_type", norm_type, tuple(NORMS))
    return NORMS[norm_type](hidden_size, eps=eps, elementwise_affine=affine)


def apply_norm(
    norm: nn.Module, hidden_states: torch.Tensor, attention_mask: torch.Tensor | None, shards: Shards | None = None
) -> torch.Tensor:
    """Normalise `(B, T, D)`; only a batch norm uses the mask, and the layout of a divided sequence."""
    return norm(hidden_states, attention_mask, shards) if isinstance(norm, BatchNorm) else norm(hidden_states)
