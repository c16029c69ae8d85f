"""The loss of a language modelling head without the logits of whole sequences.

It reads of a config `vocab_size`, and of a model `lm_head` and `loss_function`.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import nn
from torch.nn import functional as F
from transformers import PreTrainedModel
from transformers.loss.loss_utils import ForCausalLMLoss, ForMaskedLMLoss

from ..kernels.precision import compute_dtype
from ..layers.chunked_loss import chunked_loss, loss_chunk_size

OfCount = Callable[[torch.Tensor | int | None], torch.Tensor]
"""Takes the number of labels, and returns the sum of the losses divided by it; of None, the mean."""


def skips_logits(model: PreTrainedModel, skip_logits: bool | None, has_labels: bool, *, in_training: bool) -> bool:
    """Decide whether a call computes the loss alone.

    Args:
        model: A model with a language modelling head.
        skip_logits: What the caller asks for; None leaves it to `in_training`.
        has_labels: Whether the call has labels.
        in_training: What a model in training mode does by itself; in evaluation mode it returns logits.

    Raises:
        ValueError: The loss alone is wanted, but there are no labels, or somebody has replaced the loss function.
    """
    if skip_logits and not has_labels:
        raise ValueError("skip_logits must not be True without labels, from which the loss alone is computed")
    if skip_logits is None:
        skip_logits = model.training and in_training
    if not (skip_logits and has_labels):
        return False
    if model.loss_function not in (ForCausalLMLoss, ForMaskedLMLoss):
        raise ValueError(
            "skip_logits must be False for a model with another loss_function, which takes logits; got True"
        )
    return True


def loss_of_logits(model: PreTrainedModel, logits: torch.Tensor, labels: torch.Tensor | None, **options) -> OfCount:
    """Return the loss that `model.loss_function` computes of logits, as a function of the number of labels."""
    size = model.config.vocab_size
    return lambda count: model.loss_function(logits, labels, vocab_size=size, num_items_in_batch=count, **options)


def loss_alone(
    model: PreTrainedModel,
    hidden_states: torch.Tensor,
    labels: torch.Tensor,
    function: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] | None = None,
) -> OfCount:
    """Compute a language model's loss without holding the logits of all tokens; see `layers.chunked_loss`.

    Args:
        model: The model whose `lm_head` it is.
        hidden_states: What the head reads, `(B, T, D)`.
        labels: What each of these tokens predicts, `(B, T)`; -100 = skip.
        function: The summed loss of hidden states `(n, D)` and labels `(n,)`; when None, of `lm_head`'s logits.

    Returns:
        The loss in nats, float32 (float64), as a function of the number of labels.
    """
    head = model.lm_head
    size = loss_chunk_size(model.config.vocab_size, hidden_states.shape[-1])
    if _is_gathered(head):
        size = max(labels.numel(), 1)
    if function is None:
        function = partial(cross_entropy, head)
    addend, counted = chunked_loss(function, hidden_states, labels, size)

    def loss(count: torch.Tensor | int | None) -> torch.Tensor:
        if isinstance(count, torch.Tensor):
            count = count.to(addend.device)  # Trainer's, which lies on the device of the inputs
        return addend / (counted if count is None else count)

    return loss


def cross_entropy(head: Callable[[torch.Tensor], torch.Tensor], states: torch.Tensor, labels: torch.Tensor):
    """Sum the cross-entropy of a head's logits of `(n, D)`, in float32 (float64)."""
    logits = head(states)
    return F.cross_entropy(logits.to(compute_dtype(logits)), labels, reduction="sum")


def _is_gathered(head: nn.Module) -> bool:
    """Whether each call gathers the head's weights from other processes, which may have more or fewer chunks.

    So do units of their own in FSDP (2 and 1), and everything in DeepSpeed's third stage.
    """
    names = ("unshard", "_fsdp_wrapped_module")
    return any(hasattr(head, name) for name in names) or any(hasattr(p, "ds_id") for p in head.parameters())
