"""The learning rates of new models: one table, and how the scripts use it.

Transformers' default is a rate for fine-tuning; at that rate, a new model hardly leaves its initial weights.
"""

import logging
import math
from collections.abc import Set
from typing import NamedTuple

from transformers import PreTrainedConfig, TrainingArguments

from hf_hybrid.training.flags.data import RowArguments
from hf_hybrid.training.flags.model import ModelArguments

logger = logging.getLogger(__name__)

FINE_TUNING_RATE = 5e-5
"""Transformers' default of ``--learning_rate``."""


class Rate(NamedTuple):
    """The peak learning rate of AdamW for one size of an architecture.

    Attributes:
        size: The preset of this size, or a description.
        hidden_size: Its width.
        value: The rate.
        source: Where the rate comes from. "By width" means the rate of another size, times its width over this one's.
            "Measured" means the lower of two best rates on novels (docs/results.md): that of 800 steps at width 128,
            by width, and that of fewer steps at this width.
    """

    size: str
    hidden_size: int
    value: float
    source: str


RATES: dict[str, tuple[Rate, ...]] = {
    "bst": (
        Rate("preset tiny", 256, 4e-3, "measured"),
        Rate("preset base", 1024, 5e-4, "not measured: 0.05 of Adafactor's 0.01, as for Adam in meliad"),
    ),
    "chela": (
        Rate("preset tiny", 256, 4e-3, "measured"),
        Rate("the default size", 512, 1e-3, "measured"),
        Rate("preset wikitext103", 1024, 5e-3, "the paper's table 8"),
        Rate("preset enwik8", 512, 5e-3, "the paper's table 8"),
        Rate("preset listops", 80, 1e-3, "the paper's table 7"),
        Rate("preset text", 128, 4e-3, "the paper's table 7"),
        Rate("preset retrieval", 128, 3e-3, "the paper's table 7"),
        Rate("preset image", 160, 1e-2, "the paper's table 7"),
        Rate("preset pathfinder", 128, 1e-2, "the paper's table 7"),
        Rate("preset pathx", 64, 1e-2, "the paper's table 7"),
        Rate("preset speech", 60, 1e-2, "the paper's table 7"),
    ),
    "spade": (
        Rate("make demo", 128, 2e-3, "the demo's recipe, not searched"),
        Rate("preset tiny", 256, 2e-3, "measured"),
        Rate("preset small", 512, 5e-4, "measured"),
        Rate("preset base", 768, 4e-4, "the paper's table 8"),
        Rate("preset wikitext103", 1024, 3e-4, "not measured: base's by width; Nesterov's SGD in the paper"),
    ),
    "srformer_bart": (Rate("the default size", 1024, 3e-4, "not measured: SPADE base's by width"),),
    "srformer_t5": (Rate("the default size", 512, 1e-3, "not measured"),),
}
"""Model type → its rates; of equally near sizes, the first counts."""


def recorded_rate(config: PreTrainedConfig, preset: str | None = None) -> Rate | None:
    """Return the rate of the size whose width is nearest to a model's; None for an unknown architecture.

    Among sizes of the same width, the model's preset decides.
    """

    def distance(rate: Rate) -> tuple[float, bool]:
        return abs(math.log(rate.hidden_size / config.hidden_size)), rate.size != f"preset {preset}"

    return min(RATES.get(config.model_type, ()), key=distance, default=None)


def fit_learning_rate(
    training_args: TrainingArguments,
    model_args: ModelArguments,
    data_args: RowArguments,
    config: PreTrainedConfig,
    given: Set[str],
) -> None:
    """Set the recorded rate in a small run of a new model; in other runs, warn about a rate for fine-tuning.

    The rate follows from the command line alone, so a resumed run finds the one that it started with.
    """
    if not training_args.do_train or not model_args.is_new:
        return
    preset = model_args.overrides(type(config)).get("preset", data_args.default_preset)
    if (rate := recorded_rate(config, preset)) is None:
        return
    if data_args.is_small_run and "learning_rate" not in given:
        training_args.learning_rate = rate.value
        logger.info(
            "--learning_rate is %g, recorded for a new %s model of about this size (%s: %s).",
            rate.value,
            config.model_type,
            rate.size,
            rate.source,
        )
    elif training_args.learning_rate == FINE_TUNING_RATE:
        logger.warning(
            "--learning_rate is %g, transformers' rate for fine-tuning: for a new %s model of about this size %g is "
            "recorded (%s: %s).",
            training_args.learning_rate,
            config.model_type,
            rate.value,
            rate.size,
            rate.source,
        )
