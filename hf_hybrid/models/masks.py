"""Attention masks of several architectures.

Shapes: B batch · T length · S keys.
"""

import torch
from transformers.cache_utils import Cache


def first_kept(attention_mask: torch.Tensor) -> torch.Tensor:
    """Return the index of each row's first kept token, `(B,)`; the mask's length if none is kept.

    Chunks and windows are counted from there, so that left padding does not shift them.
    """
    kept = attention_mask.to(torch.bool)
    return torch.where(kept.any(-1), kept.to(torch.int8).argmax(-1), kept.shape[-1])


def check_covers(
    attention_mask: torch.Tensor, inputs: torch.Tensor, past: int | torch.Tensor, *, or_new_alone: bool = False
):
    """Raise ValueError unless a mask is for all tokens so far.

    Args:
        attention_mask: The mask.
        inputs: The tokens of this call, `(B, T, ...)`.
        past: Number of cached tokens before them. Nothing is checked if it is a tensor for which the host would have
            to wait.
        or_new_alone: Whether a mask of the tokens of this call alone will do.
    """
    if isinstance(past, torch.Tensor):
        if past.device.type != "cpu" or torch.compiler.is_compiling():
            return
        past = int(past)
    batch, length = inputs.shape[:2]
    complete, new = (batch, past + length), (batch, length)
    if attention_mask.shape != complete and not (or_new_alone and attention_mask.shape == new):
        raise ValueError(
            f"attention_mask must be of shape (batch, length) = {complete}, for all tokens so far"
            f"{f', or {new}' if or_new_alone else ''}; got {tuple(attention_mask.shape)}"
        )


def mask_so_far(attention_mask: torch.Tensor | None, inputs: torch.Tensor, cache: Cache | None) -> torch.Tensor | None:
    """Return a mask for all tokens so far; None if it keeps all, for the decoding step `inputs`, `(B, 1, D)`.

    Raises:
        ValueError: A mask of two dimensions beside a cache is not for all tokens so far.
    """
    if attention_mask is None or cache is None or attention_mask.dim() != 2:
        return attention_mask
    check_covers(attention_mask, inputs, cache.get_seq_length())
    return without_padding(attention_mask) if inputs.shape[1] == 1 else attention_mask


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
