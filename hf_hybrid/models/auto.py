"""The table of architectures, and their registration with transformers' Auto classes."""

import transformers
from transformers import PreTrainedConfig, PreTrainedModel

from .spade import SpadeConfig, SpadeEncoderModel, SpadeForConditionalGeneration, SpadeModel

ARCHITECTURES: dict[str, tuple[type[PreTrainedConfig], dict[str, type[PreTrainedModel]]]] = {
    "spade": (
        SpadeConfig,
        {
            "AutoModel": SpadeModel,
            "AutoModelForSeq2SeqLM": SpadeForConditionalGeneration,
            "AutoModelForTextEncoding": SpadeEncoderModel,
        },
    ),
}
"""Model type → its config class, and its model class for each Auto class."""


def register() -> None:
    """Register every architecture with transformers' Auto classes; calling it again changes nothing."""
    for model_type, (config_class, models) in ARCHITECTURES.items():
        transformers.AutoConfig.register(model_type, config_class, exist_ok=True)
        for auto_class, model_class in models.items():
            getattr(transformers, auto_class).register(config_class, model_class, exist_ok=True)
