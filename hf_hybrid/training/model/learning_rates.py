"""The learning rates of new models and of starters: a table of each, and how the scripts use them.

Transformers' default is a rate for fine-tuning large models; at that rate, a new model hardly leaves its initial
weights, and a starter, which is small, its own.
"""

import logging
import math
from collections.abc import Set
from typing import NamedTuple

from transformers import PreTrainedConfig, TrainingArguments

from hf_hybrid.starters import name_of_starter
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
        Rate("an encoder-decoder of two layers", 128, 4e-3, "searched on dialogues: benchmarks/results/dialogsum.csv"),
        Rate("preset tiny", 256, 2e-3, "measured"),
        Rate("preset small", 512, 5e-4, "measured"),
        Rate("preset base", 768, 4e-4, "the paper's table 8"),
        Rate("preset wikitext103", 1024, 3e-4, "not measured: base's by width; Nesterov's SGD in the paper"),
    ),
    "srformer_bart": (Rate("the default size", 1024, 3e-4, "not measured: SPADE base's by width"),),
    "srformer_t5": (Rate("the default size", 512, 1e-3, "not measured"),),
}
"""Model type → its rates; of equally near sizes, the first counts."""

STARTER_RATES = {"spade-en-tiny": Rate("fine-tuning", 256, 1e-3, "make demo")}
"""Starter → its rate."""


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
    """Set the recorded rate in a small run of a new model or a starter; in other runs, warn about the default.

    The rate follows from the command line alone, so a resumed run finds the one that it started with.
    """
    if not training_args.do_train:
        return
    if model_args.is_new:
        preset = model_args.overrides(type(config)).get("preset", data_args.default_preset)
        rate, what = recorded_rate(config, preset), f"a new {config.model_type} model of about this size"
    else:
        what = name_of_starter(str(model_args.model_name_or_path))
        rate = STARTER_RATES.get(what)
    if rate is None:
        return
    if data_args.is_small_run and "learning_rate" not in given:
        training_args.learning_rate = rate.value
        logger.info("--learning_rate is %g, recorded for %s (%s: %s).", rate.value, what, rate.size, rate.source)
    elif training_args.learning_rate == FINE_TUNING_RATE:
        logger.warning(
            "--learning_rate is %g, transformers' rate for fine-tuning: for %s %g is recorded (%s: %s).",
            training_args.learning_rate,
            what,
            rate.value,
            rate.size,
            rate.source,
        )
