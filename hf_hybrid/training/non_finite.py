"""Losses that are no numbers: they stop training, and are traced to the examples that a batch is made of."""

import logging
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import datasets
import torch
from torch.utils.data import Dataset, IterableDataset, get_worker_info

from hf_hybrid.training.command_line import RunFailed
from hf_hybrid.training.processes import Agreement

__all__ = ["CheckedStepsMixin", "NonFiniteLoss", "NumberingCollator", "describe_examples", "number_examples"]

logger = logging.getLogger(__name__)

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


class CheckedStepsMixin:
    """Put before a Trainer in the bases: no step is taken on a loss that is no number; all processes stop together."""

    agreement = Agreement(1)
    stop_wished = False
    """Whether this process was asked to stop after the running step."""
    _stop_agreed = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # it hides losses that are not finite; it also waits for the GPU as often as looking at them does
        self.args.logging_nan_inf_filter = False  # type: ignore[attr-defined]
        self._losses: list[torch.Tensor] = []
        self._positions: list[torch.Tensor | None] = []

    @property
    def must_stop(self) -> bool:
        """Whether training ends after this step; the same in all processes."""
        return self.stop_wished if self.args.world_size <= 1 else self._stop_agreed  # type: ignore[attr-defined]

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """Train, with all processes stopping together."""
        self.agreement = Agreement(self.args.world_size)  # type: ignore[attr-defined]
        self.is_saving = self.stop_wished = self._stop_agreed = False
        return super().train(*args, **kwargs)  # type: ignore[misc]

    def _get_dataloader(
        self, dataset: Any, description: str, batch_size: int, sampler_fn: Any = None, is_training: bool = False,
        dataloader_key: str | None = None,
    ) -> Any:  # fmt: skip
        """Load data; in training, batches carry the positions of their examples."""
        load: Any = super()._get_dataloader  # type: ignore[misc]
        if not is_training or not self.is_in_train or not self._can_number(dataset):  # type: ignore[attr-defined]
            return load(dataset, description, batch_size, sampler_fn, is_training, dataloader_key)
        if isinstance(dataset, datasets.Dataset):
            dataset = self._remove_unused_columns(dataset, description)  # type: ignore[attr-defined]
        sampler = None if sampler_fn is None else lambda _: sampler_fn(dataset)
        return load(number_examples(dataset), description, batch_size, sampler, is_training, dataloader_key)

    def _can_number(self, dataset: Any) -> bool:
        """Whether positions change nothing else: not where Trainer asks a stream for its length or for its shards."""
        if not isinstance(dataset, IterableDataset):
            return hasattr(dataset, "__len__")
        sharded = self.args.world_size > 1 and self.accelerator.dispatch_batches is False  # type: ignore[attr-defined]
        return not hasattr(dataset, "__len__") and not (sharded and isinstance(dataset, datasets.IterableDataset))

    def _get_collator_with_removed_columns(self, data_collator: Any, description: str | None = None) -> Any:
        collate = super()._get_collator_with_removed_columns(data_collator, description)  # type: ignore[misc]
        return NumberingCollator(collate)

    def get_batch_samples(self, *args: Any, **kwargs: Any) -> Any:
        """Take the batches of a step, without the positions of their examples, which are kept aside."""
        batches, count = super().get_batch_samples(*args, **kwargs)  # type: ignore[misc]
        self._positions = [batch.pop(EXAMPLES, None) if hasattr(batch, "pop") else None for batch in batches]
        self._losses = []
        return batches, count

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Compute a batch's loss and gradients."""
        loss: torch.Tensor = super().training_step(*args, **kwargs)  # type: ignore[misc]
        self._losses.append(loss)
        return loss

    def _get_grad_norm(self, model: torch.nn.Module, grad_norm: Any = None) -> Any:
        """Return the norm of a step's gradients, the last thing that is done before the weights change.

        Raises:
            NonFiniteLoss: A loss of the step or the norm is not finite.
        """
        norm = super()._get_grad_norm(model, grad_norm=grad_norm)  # type: ignore[misc]
        values = [loss.float() for loss in self._losses]
        # with fp16, gradients overflow now and then: such a step is skipped
        if self.accelerator.scaler is None and type(norm) in (float, torch.Tensor):  # type: ignore[attr-defined]
            values.append(torch.as_tensor(norm, dtype=torch.float32, device=values[0].device))
        is_bad = not bool(torch.stack(values).isfinite().all())
        is_bad, self._stop_agreed = self.agreement.any(is_bad, self.stop_wished)
        if is_bad:
            self._refuse_step(values)
        return norm

    def _refuse_step(self, values: list[torch.Tensor]) -> None:
        """Raise a NonFiniteLoss that names the batches, in all processes the same one."""
        losses = [value.item() for value in values[: len(self._losses)]]
        bad = [(loss, held) for loss, held in zip(losses, self._positions, strict=True) if not math.isfinite(loss)]
        found = [(loss, [] if held is None else held.tolist()) for loss, held in bad]
        everywhere = [entry for entries in self.agreement.gather(found) for entry in entries]
        what = f"the loss is {everywhere[0][0]}" if everywhere else "the gradient is not finite, though the loss is"
        if not everywhere:
            held = [position for held in self._positions if held is not None for position in held.tolist()]
            everywhere = [(math.nan, positions) for positions in self.agreement.gather(held)]
        examples = describe_examples(
            [position for _, positions in everywhere for position in positions],
            stream=isinstance(self.train_dataset, IterableDataset),  # type: ignore[attr-defined]
            workers=self.args.dataloader_num_workers,  # type: ignore[attr-defined]
        )
        raise NonFiniteLoss(
            f"training stopped at step {self.state.global_step + 1}: {what}; {examples}. The weights "  # type: ignore[attr-defined]
            "are still those of the step before. Look at these examples, or try a smaller --learning_rate"
            f"{', or --bf16 in place of --fp16' if self.args.fp16 else ''}."  # type: ignore[attr-defined]
        )

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        """Evaluate or predict; scores that are not finite are reported as they are, with a warning."""
        output = super().evaluation_loop(*args, **kwargs)  # type: ignore[misc]
        bad = {name: value for name, value in (output.metrics or {}).items() if _is_not_finite(value)}
        if bad:
            listed = ", ".join(f"{name} is {value}" for name, value in bad.items())
            logger.warning("The evaluation gave scores that are not finite: %s.", listed)
        return output


def _is_not_finite(value: Any) -> bool:
    return isinstance(value, float) and not math.isfinite(value)
