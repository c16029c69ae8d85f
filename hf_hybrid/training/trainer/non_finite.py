"""Stop training at a loss that is not finite, and name the examples of its batch."""

import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import datasets
import torch
from torch.utils.data import Dataset, IterableDataset, get_worker_info
from transformers import Trainer

from hf_hybrid.training.errors import RunFailed
from hf_hybrid.training.processes import Agreement

logger = logging.getLogger(__name__)

EXAMPLES = "example_positions"
"""The key of a batch that holds the positions of its examples."""
_SHOWN = 64


class NonFiniteLoss(RunFailed):
    """The loss or the gradient of a step is NaN or infinite; the weights are those of the step before."""


class _Numbered(NamedTuple):
    """An example with its position; not a dict, or Trainer would drop the position as an unused column."""

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
        """Fetch a batch at once if the data can, as datasets do."""
        fetch = getattr(self.examples, "__getitems__", None)
        rows = fetch(positions) if fetch else [self.examples[position] for position in positions]
        return [_Numbered(int(position), row) for position, row in zip(positions, rows, strict=True)]


class _NumberedStream(IterableDataset[_Numbered]):
    def __init__(self, stream: Any) -> None:
        self.stream = stream

    def __getattr__(self, name: str) -> Any:
        """Pass on what else a stream may have: a length, the number of its epoch, a generator."""
        if name == "stream":
            raise AttributeError(name)
        return getattr(self.stream, name)

    def __iter__(self) -> Iterator[_Numbered]:
        worker = get_worker_info()
        # each worker reads its own part: the remainder tells which
        first, stride = (0, 1) if worker is None else (worker.id, worker.num_workers)
        for count, example in enumerate(self.stream):
            yield _Numbered(first + stride * count, example)


def can_number(dataset: Any, trainer: Trainer) -> bool:
    """Whether adding positions is safe: not if Trainer asks a stream for its length or its shards."""
    if not isinstance(dataset, IterableDataset):
        return hasattr(dataset, "__len__")
    sharded = trainer.args.world_size > 1 and trainer.accelerator.dispatch_batches is False
    return not hasattr(dataset, "__len__") and not (sharded and isinstance(dataset, datasets.IterableDataset))


def number_examples(examples: Any) -> Dataset[Any]:
    """Give each example its position in the data or in an epoch of a stream; `NumberingCollator` removes it again."""
    return _NumberedStream(examples) if isinstance(examples, IterableDataset) else _NumberedExamples(examples)


class NumberingCollator:
    """Wraps a collator: makes batches of numbered examples and adds their positions."""

    def __init__(self, collate: Callable[[list[Any]], Any]) -> None:
        self.collate = collate

    def __call__(self, examples: list[Any]) -> Any:
        """Collate; examples without positions go straight to the wrapped collator."""
        if not examples or not isinstance(examples[0], _Numbered):
            return self.collate(examples)
        batch = self.collate([numbered.example for numbered in examples])
        if hasattr(batch, "keys"):
            batch[EXAMPLES] = torch.tensor([numbered.position for numbered in examples])
        return batch


def describe_examples(positions: Sequence[int], *, stream: bool, workers: int) -> str:
    """Name the examples of a batch."""
    if not positions:
        return "the batch's examples are not known"
    listed = ", ".join(map(str, positions[:_SHOWN])) + (", ..." if len(positions) > _SHOWN else "")
    if not stream:
        return f"the batch held the training examples {listed} (the first is 0)"
    if workers <= 1:
        return f"the batch held the examples {listed} of the stream (the first is 0)"
    pairs = ", ".join(f"{position // workers} of worker {position % workers}" for position in positions[:_SHOWN])
    return f"the batch held the examples {pairs} of the stream's parts (the first is 0)"


class StepCheck:
    """Tells whether the losses and the gradient of a step are finite, and which examples are in it."""

    def __init__(self, batches: Sequence[Any] = ()) -> None:
        """Remove the positions of the examples from the batches of a step, and keep them."""
        self._positions = [batch.pop(EXAMPLES, None) if hasattr(batch, "pop") else None for batch in batches]
        self.losses: list[torch.Tensor] = []

    def is_bad(self, norm: Any, *, skips: bool) -> bool:
        """Whether the step must not be taken; with `skips`, a scaler handles gradients that overflow."""
        values = [loss.float() for loss in self.losses]
        if not skips and type(norm) in (float, torch.Tensor):
            values.append(torch.as_tensor(norm, dtype=torch.float32, device=values[0].device))
        return not bool(torch.stack(values).isfinite().all())

    def explain(self, agreement: Agreement, *, stream: bool, workers: int) -> str:
        """Say what is not finite, and in which examples, in all processes."""
        held = [[] if positions is None else positions.tolist() for positions in self._positions]
        losses = [loss.item() for loss in self.losses]
        found = [(loss, own) for loss, own in zip(losses, held, strict=True) if not math.isfinite(loss)]
        bad = [entry for entries in agreement.gather(found) for entry in entries]
        what = f"the loss is {bad[0][0]}" if bad else "the gradient is not finite, though the loss is"
        if not bad:
            bad = [entry for entries in agreement.gather([(math.nan, own) for own in held]) for entry in entries]
        positions = [position for _, own in bad for position in own]
        return f"{what}; {describe_examples(positions, stream=stream, workers=workers)}"


def warn_of_scores(metrics: Mapping[str, Any]) -> None:
    """Warn about scores that are not finite."""
    bad = {name: value for name, value in metrics.items() if isinstance(value, float) and not math.isfinite(value)}
    if bad:
        listed = ", ".join(f"{name} is {value}" for name, value in bad.items())
        logger.warning("The evaluation gave scores that are not finite: %s.", listed)
