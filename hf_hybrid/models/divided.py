"""Which models can read sequences that are divided among processes, known before they are built."""

from transformers import PreTrainedConfig, PreTrainedModel

from ..context_parallel import check_divisible


def check_divisible_model(config: PreTrainedConfig, model_class: type[PreTrainedModel] | None, processes: int):
    """Raise ValueError if a model cannot run over several processes in `context_parallel`.

    Args:
        config: The model's config.
        model_class: Its class; None if it is not of this package.
        processes: How many hold a sequence.

    Raises:
        ValueError: It cannot; the message says why.
    """
    if processes == 1:
        return
    if not getattr(model_class, "divides_sequences", False):
        name = config.model_type if model_class is None else model_class.__name__
        why = getattr(model_class, "why_not_divided", "it cannot divide a sequence among processes")
        raise ValueError(f"context_parallel_size must be 1 with {name}: {why}; got {processes}")
    if getattr(config, "ssm_type", None) == "lstm":
        check_divisible("LSTM", processes)
    if getattr(config, "attention_type", None) == "full":
        check_divisible("full attention", processes)
