"""Texts with noise as a Trainer reads them: the noise of a piece depends on seed, epoch and its number alone.

So a run that is resumed in the middle of an epoch, several processes and workers all see what one process sees.
A row holds the pieces of an example with their numbers: one piece, or several if they are packed. Stored pieces are
places in arrays of tokens: an object for each would be copied by every worker, once it has counted a reference to it.
"""

import hashlib
from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property
from itertools import accumulate, chain, count, islice
from typing import Any, TypeVar

import numpy as np
import torch
from torch.utils.data import Dataset, IterableDataset
from transformers import TrainerCallback
from transformers.trainer_pt_utils import LengthGroupedSampler

from hf_hybrid.data.denoising import Denoiser, noise_generator

Array = np.ndarray[Any, Any]
Row = Sequence[tuple[int, Array]]
Piece = TypeVar("Piece", Array, range)
"""The tokens of a piece, or their places."""
DIGESTED = 64
"""The rows that tell a stream from another."""


def make_rows(pieces: Iterable[Piece], size: int | None, frame: int) -> Iterator[list[tuple[int, Piece]]]:
    """Number pieces, and put each into a row, or with a `size` as many as fit into one of so many tokens.

    `frame` are the special tokens that each piece has besides its own.
    """
    row: list[tuple[int, Piece]] = []
    used = 0
    for number, piece in enumerate(pieces):
        length = len(piece) + frame
        if row and (size is None or used + length > size):
            yield row
            row, used = [], 0
        row.append((number, piece))
        used += length
    if row:
        yield row


def digest_of(rows: Iterable[Row]) -> str:
    """Return a hash of rows without noise, in their order."""
    found = hashlib.sha256()
    for row in rows:
        for number, piece in row:
            found.update(number.to_bytes(8) + len(piece).to_bytes(8) + np.ascontiguousarray(piece).tobytes())
    return found.hexdigest()[:16]


class StoredRows(Sequence[Row]):
    """Rows of pieces that are places in arrays of tokens: a row takes 8 bytes, and a piece 16.

    Args:
        sources: Arrays of tokens, such as those of a file that is mapped into memory. They are not copied.
        rows: Rows as `make_rows` numbers them. Their pieces are places of tokens, counted through all sources.
    """

    def __init__(self, sources: Sequence[Array], rows: Iterable[Sequence[tuple[int, range]]]) -> None:
        self._sources = list(sources)
        self._ends = list(accumulate(map(len, self._sources)))
        self._places, self._starts = array("q"), array("q", [0])
        for row in rows:
            for _, piece in row:
                self._places.extend((piece.start, piece.stop))
            self._starts.append(len(self._places) // 2)

    def __len__(self) -> int:
        return len(self._starts) - 1

    def __getitem__(self, index: int) -> Row:  # type: ignore[override]  # one row, no slices
        row = range(len(self))[index]
        return [(number, self._piece(number)) for number in range(self._starts[row], self._starts[row + 1])]

    def _piece(self, number: int) -> Array:
        start, end = self._places[2 * number], self._places[2 * number + 1]
        source = bisect_right(self._ends, start)
        before = self._ends[source] - len(self._sources[source])
        return self._sources[source][start - before : end - before]


def add_noise(row: Row, denoise: Denoiser, seed: int, epoch: int) -> dict[str, Any]:
    """Return ``input_ids`` and ``labels`` of a row, and of packed pieces the ``lengths`` of both."""
    examples = [denoise(piece, noise_generator(seed, epoch, number)) for number, piece in row]
    joined = {name: list(chain.from_iterable(example[name] for example in examples)) for name in examples[0]}
    lengths = {name: [len(example[name]) for example in examples] for name in joined}
    packed = {"lengths": lengths} if len(row) > 1 else {}
    return joined | packed


class NoisyRows(Dataset[dict[str, Any]]):
    """Rows with the noise of an epoch: 0, until `set_epoch` says another."""

    def __init__(self, rows: Sequence[Row], denoise: Denoiser, seed: int) -> None:
        self.rows, self.denoise, self.seed = rows, denoise, seed
        self._epoch = torch.zeros((), dtype=torch.int64).share_memory_()  # persistent workers see it change

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return add_noise(self.rows[index], self.denoise, self.seed, self.epoch)

    def digest(self) -> str:
        """Return a hash of the rows without noise, in their order."""
        return digest_of(self.rows)

    @property
    def epoch(self) -> int:
        """The epoch whose noise is drawn."""
        return int(self._epoch)

    def set_epoch(self, epoch: int) -> None:
        """Draw the noise of another epoch from now on."""
        self._epoch.fill_(epoch)


class NoisyStream(IterableDataset[dict[str, Any]]):
    """An endless stream of rows with noise: it is read again and again, each time with the noise of another epoch."""

    def __init__(self, read: Callable[[], Iterator[Row]], denoise: Denoiser, seed: int) -> None:
        self.read, self.denoise, self.seed = read, denoise, seed

    @cached_property
    def first(self) -> list[Row]:
        """The first `DIGESTED` rows."""
        return list(islice(self.read(), DIGESTED))

    def digest(self) -> str:
        """Return a hash of the first rows without noise."""
        return digest_of(self.first)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for epoch in count():
            row = None
            for row in self.read():
                yield add_noise(row, self.denoise, self.seed, epoch)
            if row is None:
                return


class NoiseOfEpoch(TrainerCallback):
    """Tells `NoisyRows` the number of each epoch.

    Note:
        Accelerate calls a dataset's ``set_epoch`` only in one process and while no batches are skipped.
    """

    def __init__(self, rows: NoisyRows) -> None:
        self.rows = rows

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Draw the noise of the epoch that begins, or that goes on in a resumed run."""
        self.rows.set_epoch(int(state.epoch or 0))


class SimilarLengths(LengthGroupedSampler):
    """Batches of rows of similar length, in an order that depends on seed and epoch alone.

    Note:
        The parent draws from torch's global generator, whose state at the start of an epoch a resumed run has lost.
    """

    def __init__(self, rows: NoisyRows, batch_size: int, seed: int) -> None:
        frame = rows.denoise.frame
        lengths = [sum(len(piece) + frame for _, piece in row) for row in rows.rows]
        super().__init__(batch_size, lengths=lengths)
        self.rows, self.seed = rows, seed

    def __iter__(self) -> Iterator[int]:
        self.generator = torch.Generator().manual_seed(self.seed + self.rows.epoch)
        return super().__iter__()
