"""Attention masks of several architectures.

Shapes: B batch · T length · S keys.
"""

import torch


def first_kept(attention_mask: torch.Tensor) -> torch.Tensor:
    """Return the index of each row's first kept token, `(B,)`; the mask's length if none is kept.

    Chunks and windows are counted from there, so that left padding does not shift them.
    """
    kept = attention_mask.to(torch.bool)
    return torch.where(kept.any(-1), kept.to(torch.int8).argmax(-1), kept.shape[-1])


def without_padding(attention_mask: torch.Tensor | None) -> torch.Tensor | None:
    """Return None for a mask `(B, S)` that keeps all tokens, so that no layer of a decoding step applies it.

    Only a mask on a CPU is read: other devices would have to wait.
    """
    if attention_mask is None or attention_mask.dim() != 2 or attention_mask.device.type != "cpu":
        return attention_mask
    return attention_mask if torch.compiler.is_compiling() or not attention_mask.all() else None


def kept_pairs(attention_mask: torch.Tensor) -> torch.Tensor:
    """Return the boolean form of an attention mask `(B, S)`, or `(B, 1, 1 or T, S)` boolean or added to scores."""
    if attention_mask.dim() == 4:
        return attention_mask if attention_mask.dtype == torch.bool else attention_mask == 0
    return attention_mask.to(torch.bool)[:, None, None, :]


def additive_mask(
    visible: torch.Tensor | None, bias: torch.Tensor | None, dtype: torch.dtype, device: torch.device
) -> torch.Tensor | None:
    """Join visibility and position bias into a mask that is added to attention scores; None without both."""
    if visible is None:
        return None if bias is None else bias.to(dtype)
    lowest = torch.finfo(dtype).min
    base = torch.zeros((), dtype=dtype, device=device) if bias is None else bias.to(dtype)
    return torch.where(visible, base, lowest)
