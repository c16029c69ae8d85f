"""A loss over a sequence whose logits are never all held: it is summed over chunks of the tokens.

N tokens with labels · D hidden size · V vocabulary

`torch.nn.functional.linear_cross_entropy` (torch 2.13) and Liger's fused loss save one of four matrix products, since
they compute gradients in the forward. They take a weight in place of a head, so they know no adapters and no adaptive
softmax, and have no second derivatives. torch's adds up a bfloat16 loss in bfloat16, a percent off for 2,048 tokens,
and computes in float32 under autocast; Liger's needs Triton.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch
from torch.utils.checkpoint import checkpoint

from .adaptive_softmax import IGNORED

FEWEST_LOGITS = 2**25
"""Logits that a chunk may have in any case: 128 MiB in float32."""


def loss_chunk_size(vocab_size: int, hidden_size: int) -> int:
    """Return the tokens of a chunk: its logits take 128 MiB in float32, or as much as the head if that is more.

    Their softmax and their gradient take as much again each. With fewer tokens, a chunk's time would go into reading
    weights and adding up their gradient.
    """
    return max(FEWEST_LOGITS // vocab_size, hidden_size)


def chunked_loss(
    function: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    hidden_states: torch.Tensor,
    labels: torch.Tensor,
    chunk_size: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sum the losses of all tokens with a label, one chunk after the other.

    The backward computes each chunk's logits again, except the last one's, with which it begins: a sequence that is
    one chunk costs nothing more. So there are four matrix products of N D V where logits of all tokens need three.
    Heads are called as they are, with adapters and hooks, and gradients are those of ordinary autograd.

    Args:
        function: Takes hidden states `(n, D)` and labels `(n,)` of a chunk, and returns the sum of its losses; a label
            of -100 adds nothing. Its random numbers are the same when it is called again.
        hidden_states: `(..., D)`.
        labels: Token ids, `(...)`; -100 = skip.
        chunk_size: Most tokens of a chunk.

    Returns:
        The sum, a scalar, and the number of labels other than -100, int64.

    Note:
        Tokens without a label are dropped first, except under `torch.compile` and on the meta device, where no shape
        may depend on data. (An adaptive head's `function` has such shapes, and breaks the graph.)
        Under autocast each chunk casts the weights itself, so that gradients add up in float32 and not in 16 bits.
    """
    labels = labels.to(hidden_states.device)
    hidden_states, labels = hidden_states.flatten(0, -2), labels.flatten()
    counted = labels != IGNORED
    if not (torch.compiler.is_compiling() or counted.is_meta):
        index = counted.nonzero().squeeze(1)
        if len(index) < len(labels):
            hidden_states, labels = hidden_states[index], labels[index]

    def loss_alone(states: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        with _uncached(states.device.type):
            return function(states, wanted)

    chunks = list(
        zip(hidden_states.split(chunk_size), labels.split(chunk_size), strict=True)
    )  # one if there is no token
    losses = [checkpoint(loss_alone, *chunk, use_reentrant=False) for chunk in chunks[:-1]]
    return torch.stack([*losses, loss_alone(*chunks[-1])]).sum(), counted.sum()


def _uncached(device_type: str) -> AbstractContextManager[object]:
    """Let autocast keep no cast weights, if it is on."""
    if device_type == "meta" or not torch.is_autocast_enabled(device_type):
        return nullcontext()
    return torch.autocast(device_type, dtype=torch.get_autocast_dtype(device_type), cache_enabled=False)
