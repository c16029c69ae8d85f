"""Normalisation layers by the name a config gives them."""

from torch import nn

NORMS: dict[str, type[nn.LayerNorm] | type[nn.RMSNorm]] = {"layer_norm": nn.LayerNorm, "rms_norm": nn.RMSNorm}


def make_norm(norm_type: str, hidden_size: int, eps: float) -> nn.Module:
    """Build a normalisation over the last dimension.

    Args:
        norm_type: ``"layer_norm"`` (mean and variance, scale and bias) or ``"rms_norm"`` (root mean square, scale
            only, as in T5).
        hidden_size: Width of the last dimension.
        eps: Added to the variance or the mean square.

    Raises:
        ValueError: ``norm_type`` is neither.
    """
    if norm_type not in NORMS:
        raise ValueError(f"norm_type must be one of {', '.join(NORMS)}; got {norm_type!r}")
    return NORMS[norm_type](hidden_size, eps=eps)
