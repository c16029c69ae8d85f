"""The tasks of recall by name, with their sizes, and how to draw them."""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from hf_hybrid.data.drawing import split_generator
from hf_hybrid.data.recall.associative import in_context_recall, key_value, mqar
from hf_hybrid.data.recall.copying import compression, memorization, selective_copying
from hf_hybrid.data.recall.examples import Examples
from hf_hybrid.data.recall.facts import facts
from hf_hybrid.data.recall.far import aggregate, latch, majority
from hf_hybrid.data.recall.needle import needle
from hf_hybrid.suggestions import did_you_mean

__all__ = ["RECALL", "RecallTask", "draw"]


@dataclass(frozen=True)
class RecallTask:
    """A task of recall.

    Attributes:
        function: Draws its examples.
        sizes: The function's arguments, where they are not its defaults.
        train: Examples to train on; None: as many as are wanted, each new.
        test: Examples to test.
        needs: Arguments that it cannot do without, such as a text.
    """

    function: Callable[..., Examples]
    sizes: Mapping[str, Any] = field(default_factory=dict)
    train: int | None = None
    test: int = 1280
    needs: tuple[str, ...] = ()

    @property
    def length(self) -> int:
        """Tokens of a sequence, or of a document."""
        return self.sizes.get("length", inspect.signature(self.function).parameters["length"].default)


def _figure_2(length: int, pairs: int) -> RecallTask:
    sizes = {"vocab_size": 8192, "length": length, "pairs": pairs, "random_filler": False}
    return RecallTask(mqar, sizes, train=100_000, test=3_000)


RECALL: dict[str, RecallTask] = {
    # Zoology's basic example, and its figure 2
    "mqar": RecallTask(mqar, train=10_000, test=1_000),
    "mqar_64": _figure_2(64, 4),
    "mqar_128": _figure_2(128, 8),
    "mqar_256": _figure_2(256, 16),
    "mqar_512": _figure_2(512, 64),
    # MAD's baseline of each task
    "in_context_recall": RecallTask(in_context_recall, train=12_800),
    "noisy_recall": RecallTask(
        in_context_recall, {"vocab_size": 32, "noise": 0.2, "noise_vocab_size": 16}, train=12_800
    ),
    "selective_copying": RecallTask(selective_copying, train=12_800),
    "compression": RecallTask(compression, train=12_800),
    "memorization": RecallTask(memorization, train=256),
    # own tasks
    "aggregate": RecallTask(aggregate),
    "majority": RecallTask(majority),
    "latch": RecallTask(latch),
    "copying": RecallTask(selective_copying, {"length": 56, "is_spread": False}),
    "key_value": RecallTask(key_value),
    "needle": RecallTask(needle, needs=("text",)),
    "facts": RecallTask(facts),
    "few_facts": RecallTask(facts, {"keys": 16, "length": 16}),
    "sparse_facts": RecallTask(facts, {"keys": 16}),
    "votes": RecallTask(facts, {"keys": 8, "mentions": 3, "length": 24, "asked": 24}),
}
"""The tasks by name."""


def draw(name: str, split: str, count: int, *, seed: int = 0, number: int = 0, **sizes: Any) -> Examples:
    """Draw examples of a task; the same arguments give the same examples in every process.

    Args:
        name: A key of `RECALL`.
        split: ``train``, ``validation`` or ``test``.
        count: How many.
        seed: Seed of the data.
        number: Which batch of the split; batches share no random numbers.
        **sizes: Arguments of the task's function to set differently, and those that it needs.

    Raises:
        ValueError: No task has this name, an argument is missing or unknown, or a value breaks its rule.
    """
    if name not in RECALL:
        raise ValueError(
            f"name must be a task of recall ({', '.join(RECALL)}); got {name!r}.{did_you_mean(name, RECALL)}"
        )
    task = RECALL[name]
    known = [field for field in inspect.signature(task.function).parameters if field not in ("count", "generator")]
    for field_name in sizes:
        if field_name not in known:
            hint = did_you_mean(field_name, known)
            raise ValueError(f"{name} has no size {field_name!r}, only {', '.join(known)}.{hint}")
    for field_name in task.needs:
        if field_name not in sizes:
            raise ValueError(f"{name} needs {field_name}; got only {', '.join(sizes) or 'none'}")
    return task.function(count, split_generator(seed, split, number), **{**task.sizes, **sizes})
