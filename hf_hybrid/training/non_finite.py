"""Which training examples a batch is made of, so that a loss that is no number can be traced to them."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch.utils.data import Dataset, IterableDataset, get_worker_info

from hf_hybrid.training.command_line import RunFailed

__all__ = ["EXAMPLES", "NonFiniteLoss", "NumberingCollator", "describe_examples", "number_examples"]

EXAMPLES = "example_positions"
"""What a batch carries the positions of its examples under, until it is taken for a step."""
_SHOWN = 64


class NonFiniteLoss(RunFailed):
    """The loss or the gradient of a step is NaN or infinite; the weights are still those of the step before it."""


class _Numbered(NamedTuple):
    """An example with its position; no dict, so that Trainer does not take the position for an unused column."""

    position: int
    example: Any


class _NumberedExamples(Dataset[_Numbered]):
    def __init__(self, examples: Any) -> None:
        self.examples = examples

    def __len__(self) -> int:
        return len(self.examples)

    def __getitem__(self, position: int) -> _Numbered:
        return _Numbered(int(position), self.examples[position])

    def __getitems__(self, positions: Sequence[int]) -> list[_Numbered]:
        """Fetch a batch at once where the data can, as datasets do."""
        fetch = getattr(self.examples, "__getitems__", None)
        rows = fetch(positions) if fetch else [self.examples[position] for position in positions]
        return [_Numbered(int(position), row) for position, row in zip(positions, rows, strict=True)]


class _NumberedStream(IterableDataset[_Numbered]):
    def __init__(self, stream: Any) -> None:
        self.stream = stream

    def __getattr__(self, name: str) -> Any:
        """Pass on what a stream may have beside its examples: a length, the number of its epoch, a generator."""
        if name == "stream":
            raise AttributeError(name)
        return getattr(self.stream, name)

    def __iter__(self) -> Iterator[_Numbered]:
        worker = get_worker_info()
        # each worker reads a part of its own: told apart by the remainder
        first, stride = (0, 1) if worker is None else (worker.id, worker.num_workers)
        for count, example in enumerate(self.stream):
            yield _Numbered(first + stride * count, example)


def number_examples(examples: Any) -> Dataset[Any]:
    """Give each example its position in the data, or in an epoch of a stream.

    The data are read in whatever order they were; a `NumberingCollator` takes the positions off again.
    """
    return _NumberedStream(examples) if isinstance(examples, IterableDataset) else _NumberedExamples(examples)


class NumberingCollator:
    """Makes batches of examples with positions, as another collator makes them of examples; adds the positions."""

    def __init__(self, collate: Callable[[list[Any]], Any]) -> None:
        self.collate = collate

    def __call__(self, examples: list[Any]) -> Any:
        """Collate; examples without positions give what the other collator makes of them."""
        if not examples or not isinstance(examples[0], _Numbered):
            return self.collate(examples)
        batch = self.collate([numbered.example for numbered in examples])
        if hasattr(batch, "keys"):
            batch[EXAMPLES] = torch.tensor([numbered.position for numbered in examples])
        return batch


def describe_examples(positions: Sequence[int], *, stream: bool, workers: int) -> str:
    """Words for the examples of a batch."""
    if not positions:
        return "the batch's examples are not known"
    listed = ", ".join(map(str, positions[:_SHOWN])) + (", ..." if len(positions) > _SHOWN else "")
    if not stream:
        return f"the batch held the training examples {listed} (the first is 0)"
    if workers <= 1:
        return f"the batch held the examples {listed} of the stream (the first is 0)"
    pairs = ", ".join(f"{position // workers} of worker {position % workers}" for position in positions[:_SHOWN])
    return f"the batch held the examples {pairs} of the stream's parts (the first is 0)"
