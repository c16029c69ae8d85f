"""Make batches of sequences with labels that are sequences too."""

import hashlib
import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset
from transformers import DataCollatorForSeq2Seq, PreTrainedModel, PreTrainedTokenizerBase, TrainingArguments

from hf_hybrid.data.lra import LraRows
from hf_hybrid.data.preprocessing import IGNORED_LABEL


def sequence_collator(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    training_args: TrainingArguments,
    *,
    ignores_padding: bool = True,
) -> Callable[[list[dict[str, Any]]], Any]:
    """Return what pads inputs and labels to the longest of a batch, and adds what the model needs besides.

    Args:
        model: The model.
        tokenizer: Pads the inputs.
        training_args: Lengths are multiples of 8 in float16.
        ignores_padding: Whether the loss skips the padding of the labels.
    """
    collate = DataCollatorForSeq2Seq(
        tokenizer,
        model=model,
        label_pad_token_id=IGNORED_LABEL if ignores_padding else tokenizer.pad_token_id,
        pad_to_multiple_of=8 if training_args.fp16 else None,
    )
    has_global_attention = "global_attention_mask" in inspect.signature(model.forward).parameters
    return partial(_collate, collate, has_global_attention)


def _collate(collate: DataCollatorForSeq2Seq, has_global_attention: bool, examples: list[dict[str, Any]]) -> Any:
    """Make a batch; let LED's first token see everything, by its authors' convention: it does not learn otherwise."""
    batch = collate(examples)
    if batch["labels"] is None:  # documents without summaries
        del batch["labels"]
    if has_global_attention:
        batch["global_attention_mask"] = torch.zeros_like(batch["input_ids"])
        batch["global_attention_mask"][:, 0] = 1
    return batch


class LongRangeRows(Dataset[dict[str, Any]]):
    """Rows of a task as a model reads them: ids or real values, of pairs also the second's, and labels."""

    def __init__(self, rows: LraRows, reads: str, length: int) -> None:
        self.labels = rows.labels
        self.columns: dict[str, Any] = {reads: [row[:length] for row in rows.inputs], "labels": rows.labels}
        if rows.pairs is not None:
            self.columns[f"pair_{reads}"] = [row[:length] for row in rows.pairs]

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {name: column[index] for name, column in self.columns.items()}

    def digest(self) -> str:
        """Return a hash of everything that the rows hold, whichever files they are from."""
        found = hashlib.sha256()
        for name, column in self.columns.items():
            found.update(f"{name} {len(column)} ".encode())
            for value in column:
                array = np.asarray(value)
                found.update(f"{array.size} {array.dtype} ".encode() + array.tobytes())
        return found.hexdigest()


def long_range_collator(examples: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """Pad rows of the Long Range Arena, one or two sequences of ids or real values each, and add masks and labels.

    An empty sequence is one token of padding, which is read.
    """
    batch: dict[str, torch.Tensor] = {}
    for name in ("input_ids", "input_values", "pair_input_ids", "pair_input_values"):
        if name in examples[0]:
            rows = [torch.as_tensor(example[name]) for example in examples]
            rows = [row if row.is_floating_point() else row.long() for row in rows]
            rows = [row if len(row) else row.new_zeros(1) for row in rows]
            prefix = "pair_" if name.startswith("pair_") else ""
            batch[name] = pad_sequence(rows, batch_first=True)
            batch[f"{prefix}attention_mask"] = pad_sequence(
                [torch.ones_like(row, dtype=torch.long) for row in rows], True
            )
    batch["labels"] = torch.tensor([int(example["labels"]) for example in examples])
    return batch


def packing_collator(
    pad_token_id: int, size: int | None, *, is_pair: bool = False
) -> Callable[[list[dict[str, Any]]], dict[str, torch.Tensor]]:
    """Return what stacks rows of packed sequences, told apart by positions that restart; padding is one more.

    Args:
        pad_token_id: Fills up the inputs.
        size: Tokens of a row; as many as the longest of a batch has if None.
        is_pair: Whether labels are sequences of their own, of other lengths.
    """
    return partial(_pack, pad_token_id, size, is_pair)


def _pack(
    pad_token_id: int, size: int | None, is_pair: bool, examples: list[dict[str, Any]]
) -> dict[str, torch.Tensor]:
    input_ids, position_ids = _stack(examples, "input_ids", pad_token_id, size)
    labels, decoder_position_ids = _stack(examples, "labels", IGNORED_LABEL, size)
    batch = {"input_ids": input_ids, "position_ids": position_ids, "labels": labels}
    return {**batch, "decoder_position_ids": decoder_position_ids} if is_pair else batch


def _stack(
    examples: list[dict[str, Any]], name: str, padding: int, size: int | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the rows of a column, filled up, and the positions in their sequences."""
    rows = [example[name] for example in examples]
    rest = [(size or max(map(len, rows))) - len(row) for row in rows]
    lengths = [example.get("lengths", {name: [len(row)]})[name] for example, row in zip(examples, rows, strict=True)]
    filled = [[*row, *[padding] * free] for row, free in zip(rows, rest, strict=True)]
    positions = [
        [position for length in (*own, free) for position in range(length)]
        for own, free in zip(lengths, rest, strict=True)
    ]
    return torch.tensor(filled), torch.tensor(positions)
