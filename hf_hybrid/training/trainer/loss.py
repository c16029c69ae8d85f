"""Find out how a model computes its loss: its average, so that small batches add up exactly to a large one; logits."""

import inspect
from typing import Any

import torch
from peft import PeftModel
from transformers.trainer_pt_utils import LabelSmoother


def loss_counts_items(model: torch.nn.Module, inputs: dict[str, Any], items: torch.Tensor) -> bool:
    """Whether the model divides its summed loss by ``num_items_in_batch``; found out by two calls without dropout."""
    training = model.training
    model.eval()
    try:
        with torch.no_grad():
            once, twice = (model(**inputs, num_items_in_batch=factor * items)["loss"].mean() for factor in (1, 2))
    except TypeError:  # forward takes no such argument
        return False
    finally:
        model.train(training)
    return bool(torch.isclose(twice, once / 2, rtol=1e-2, atol=0.0))


def can_skip_logits(model: torch.nn.Module) -> bool:
    """Whether the model, or the one below an adapter, takes `skip_logits`, and then computes the loss alone."""
    base: Any = model.get_base_model() if isinstance(model, PeftModel) else model
    return "skip_logits" in inspect.signature(type(base).forward).parameters


class ShiftingLabelSmoother(LabelSmoother):
    """Label smoothing for models that predict each token from those before it, whatever their class is called."""

    def __call__(
        self, model_output: Any, labels: Any, shift_labels: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """Return the smoothed loss of each token, given those before it."""
        return super().__call__(model_output, labels, shift_labels=True, num_items_in_batch=num_items_in_batch)
