"""Settle the labels of a classifier and their ids, from the data and the checkpoint."""

import logging

from transformers import PreTrainedConfig, TrainingArguments

from hf_hybrid.data.classification import Labels
from hf_hybrid.training.flags.model import ModelArguments

logger = logging.getLogger(__name__)


def settle_labels(
    config: PreTrainedConfig, found: Labels | None, model_args: ModelArguments, training_args: TrainingArguments
) -> Labels:
    """Decide on the labels and their ids, and write them into the configuration.

    A checkpoint keeps its own ids if it knows the same names, or if the data have integers in place of names. If it
    is trained on the data, it may take their labels instead.

    Raises:
        ValueError: The checkpoint has other labels, there are fewer than two to learn, or numbers are smoothed.
    """
    new, training = model_args.is_new, training_args.do_train
    own: tuple[str, ...] = () if new else tuple(name for _, name in sorted((config.id2label or {}).items()))
    if found is None and not own:
        raise ValueError("a new model needs data with labels to know what it predicts; got none")
    settled = _as_in_checkpoint(found, own, training=training) if own else found
    if settled is None:
        if not training:
            asked = "a number" if found is None or found.are_numbers else ", ".join(found.names)
            raise ValueError(
                f"the labels of the data ({asked}) must be those of the checkpoint ({', '.join(own)}), unless it is "
                "trained on them (--do_train)"
            )
        settled = found
        if not _are_default(own):
            logger.warning("The checkpoint's labels (%s) are replaced by those of the data.", ", ".join(own))
    assert settled is not None
    if len(settled.names) == 1:
        raise ValueError(f"the training split must hold at least two different labels; got {settled.names[0]!r} alone")
    if settled.are_numbers and training_args.label_smoothing_factor:
        raise ValueError("--label_smoothing_factor needs labels that are names; those of these data are numbers")
    names = settled.names or ("LABEL_0",)
    config.id2label = dict(enumerate(names))
    config.label2id = {name: position for position, name in enumerate(names)}
    config.problem_type = "regression" if settled.are_numbers else "single_label_classification"
    return settled


def _as_in_checkpoint(found: Labels | None, own: tuple[str, ...], *, training: bool) -> Labels | None:
    """Give the data's labels the checkpoint's names and ids; None if they do not fit."""
    if found is None or found.are_numbers:
        fits = found is None or len(own) == 1
        return Labels(() if len(own) == 1 else own) if fits else None
    if len(own) < len(found.names) or (training and len(own) > len(found.names)):
        return None
    positions = {name.casefold(): position for position, name in enumerate(own)}
    if positions.keys() >= {name.casefold() for name in found.names}:
        return Labels(own, {key: positions[found.names[place].casefold()] for key, place in found.ids.items()})
    if all(isinstance(key, int) and key in range(len(own)) for key in found.ids):
        return Labels(own, {key: int(key) for key in found.ids})
    return found if _are_default(own) and len(own) == len(found.names) else None


def _are_default(names: tuple[str, ...]) -> bool:
    return names == tuple(f"LABEL_{position}" for position in range(len(names)))
