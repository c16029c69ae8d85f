"""The tasks of the Long Range Arena by name: lengths, labels, where the official files are, and how to load each."""

import logging
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path

import numpy as np

from hf_hybrid.data.drawing import SPLITS, Array, check, check_sizes, split_generator
from hf_hybrid.data.lra.listops import LISTOPS_TOKENS, draw_listops, listops_ids
from hf_hybrid.data.lra.pathfinder import PATHFINDER, Pathfinder, draw_pathfinder
from hf_hybrid.data.lra.readers import (
    byte_ids,
    read_arrays,
    read_cifar10,
    read_listops,
    read_pairs,
    read_pathfinder,
    read_reviews,
)
from hf_hybrid.suggestions import did_you_mean

__all__ = ["LRA", "LraRows", "LraTask", "draw_shard", "find_lra", "load_lra", "rows_of_shards", "shards_of"]

logger = logging.getLogger(__name__)

_RELEASE = "https://storage.googleapis.com/long-range-arena/lra_release.gz"
_BYTE_IDS = 256 + 3
_WHOLE = (0.0, 1.0)
_SLOWER = 8
_NEARLY_ALL = 0.99
"""Share of an official split's rows below which files must be missing; Pathfinder lacks an empty image."""
_GREY = (0.48, 0.24)
"""Mean and standard deviation of CIFAR-10's grey pixels, from 0 to 1: ``--pixel-normalization`` of Mega's command
(examples/mega/README.lra.md). S4 takes 122.6 and 61 of 255, less than a grey level from these."""
_SHARD = 500
"""Rows that are drawn from one seed."""
_TABLES = (".jsonl", ".jsonl.gz", ".jsonl.xz", ".tsv", ".csv", ".parquet")


@dataclass(frozen=True)
class LraRows:
    """The rows of a split.

    Attributes:
        inputs: A sequence for each row: ids (int16), or numbers from -1 to 1; brightness in `lra_image` is normalised.
        labels: `(N,)`.
        pairs: The second document of each row; None for tasks with one.
    """

    inputs: list[Array]
    labels: Array
    pairs: list[Array] | None = None


@dataclass(frozen=True)
class LraTask:
    """A task of the Long Range Arena, or a shorter or similar one.

    Attributes:
        labels: Number of labels.
        length: Longest sequence; longer ones are cut.
        vocab_size: Ids of its tokens; None for sequences of real numbers.
        counts: Rows of the published splits, or of those that are drawn.
        read: Reads a file or folder, or a share of it if there are `shares`: yields a row's input, its second document
            or None, and its label.
        files: The official file or folder of each split within a user's folder; none if all is drawn.
        home: Where these are from.
        shares: Beginning and end of each split, as shares of its file's rows.
        endings: How a user's own files end that are called train, validation and test.
        draw: Draws rows without files, in the numbers that are kept: ids as int8, pixels as uint8; None if there is no
            generator.
        is_pair: Whether a row has two documents.
        is_whole: Whether a part of a row has another label, so that none may be cut.
    """

    labels: int
    length: int
    vocab_size: int | None
    counts: tuple[int, int, int]
    read: Callable[..., "_Rows"]
    files: tuple[str, ...] = ()
    home: str = ""
    shares: tuple[tuple[float, float], ...] = (_WHOLE,) * 3
    endings: tuple[str, ...] = _TABLES
    draw: Callable[[np.random.Generator], "_Rows"] | None = None
    is_pair: bool = False
    is_whole: bool = False


_Rows = Iterator[tuple[Array, Array | None, int]]


def _listops(path: Path) -> _Rows:
    for tokens, value in read_listops(path):
        yield np.array(listops_ids(tokens), np.int16), None, value


def _drawn_listops(shortest: int, longest: int, max_depth: int = 10) -> Callable[[np.random.Generator], _Rows]:
    def drawn(generator: np.random.Generator) -> _Rows:
        sizes = {"shortest": shortest, "longest": longest, "max_depth": max_depth}
        for tokens, value in draw_listops(generator, **sizes):
            yield np.array(listops_ids(tokens), np.int8), None, value

    return drawn


def _pixels(image: Array) -> Array:
    values: Array = image.reshape(-1).astype(np.float32) / 127.5 - 1
    return values


def _pathfinder(path: Path, share: tuple[float, float] = _WHOLE, size: int = 32) -> _Rows:
    for image, label in read_pathfinder(path, size, share):
        yield _pixels(image), None, label


def _drawn_pathfinder(settings: Pathfinder, at_once: int = 1) -> Callable[[np.random.Generator], _Rows]:
    def drawn(generator: np.random.Generator) -> _Rows:
        while True:
            for image, label in zip(*draw_pathfinder(at_once, generator, settings), strict=True):
                yield image.reshape(-1), None, int(label)

    return drawn


def _reviews(path: Path, share: tuple[float, float] = _WHOLE) -> _Rows:
    for text, label in read_reviews(path, share):
        yield byte_ids(text, 4096), None, label


def _pairs(path: Path) -> _Rows:
    for first, second, label in read_pairs(path):
        yield byte_ids(first, 4000), byte_ids(second, 4000), label


def _arrays(path: Path) -> _Rows:
    for values, label in zip(*read_arrays(path, "audio"), strict=True):
        yield values, None, int(label)


def _slow_speech(path: Path) -> _Rows:
    """Yield recordings at an eighth of their rate, each the means of 8 samples, scaled to a greatest value of 1."""
    for values, _, label in _arrays(path):
        whole = np.pad(values, (0, -len(values) % _SLOWER)).reshape(-1, _SLOWER).mean(axis=1)
        yield whole / max(np.abs(whole).max(), 1e-6), None, label


def _cifar10(path: Path, share: tuple[float, float] = _WHOLE) -> _Rows:
    if path.suffix == ".npz":
        for values, label in zip(*read_arrays(path, "images", size=32), strict=True):
            yield _normalized(values), None, int(label)
        return
    for image, label in read_cifar10(path, share):
        yield _normalized(_pixels(image)), None, label


def _normalized(values: Array) -> Array:
    """Return numbers from -1 to 1 as brightness from 0 to 1 in deviations from its mean."""
    mean, deviation = _GREY
    normalized: Array = ((values + 1) / 2 - mean) / deviation
    return normalized


_HARD, _PATHX = (f"lra_release/lra_release/pathfinder{size}/curv_contour_length_14" for size in (32, 128))
LRA: dict[str, LraTask] = {
    "lra_listops": LraTask(
        labels=10,
        length=2000,
        vocab_size=len(LISTOPS_TOKENS),
        counts=(96_000, 2_000, 2_000),
        read=_listops,
        files=tuple(f"lra_release/lra_release/listops-1000/basic_{split}.tsv" for split in ("train", "val", "test")),
        home=_RELEASE,
        draw=_drawn_listops(500, 2000),
        is_whole=True,
    ),
    "lra_listops_200": LraTask(
        labels=10,
        length=200,
        vocab_size=len(LISTOPS_TOKENS),
        counts=(20_000, 4_000, 4_000),
        read=_listops,
        draw=_drawn_listops(100, 200),
        is_whole=True,
    ),
    # the published program validates on the test split, which would choose the weights that it then tests
    "lra_text": LraTask(
        labels=2,
        length=4096,
        vocab_size=_BYTE_IDS,
        counts=(23_750, 1_250, 25_000),
        read=_reviews,
        files=("aclImdb/train", "aclImdb/train", "aclImdb/test"),
        home="https://ai.stanford.edu/~amaas/data/sentiment/",
        shares=((0.0, 0.95), (0.95, 1.0), _WHOLE),
    ),
    "lra_retrieval": LraTask(
        labels=2,
        length=4000,
        vocab_size=_BYTE_IDS,
        counts=(147_086, 18_090, 17_437),
        read=_pairs,
        files=tuple(
            f"lra_release/lra_release/tsv_data/new_aan_pairs.{split}.tsv" for split in ("train", "eval", "test")
        ),
        home=_RELEASE,
        is_pair=True,
    ),
    "lra_image": LraTask(
        labels=10,
        length=1024,
        vocab_size=None,
        counts=(45_000, 5_000, 10_000),
        read=_cifar10,
        files=("cifar-10-batches-bin", "cifar-10-batches-bin", "cifar-10-batches-bin/test_batch.bin"),
        home="https://www.cs.toronto.edu/~kriz/cifar.html",
        shares=((0.0, 0.9), (0.9, 1.0), _WHOLE),
        endings=(".npz",),
    ),
    "lra_pathfinder": LraTask(
        labels=2,
        length=1024,
        vocab_size=None,
        counts=(160_000, 20_000, 20_000),
        read=_pathfinder,
        files=(_HARD, _HARD, _HARD),
        home=_RELEASE,
        shares=((0.0, 0.8), (0.8, 0.9), (0.9, 1.0)),
        endings=(),
        draw=_drawn_pathfinder(PATHFINDER["lra"]),
    ),
    "lra_pathfinder_16": LraTask(
        labels=2,
        length=256,
        vocab_size=None,
        counts=(20_000, 4_000, 4_000),
        read=_pathfinder,
        endings=(),
        draw=_drawn_pathfinder(PATHFINDER["small"], at_once=100),
    ),
    # not drawn: at the published settings a path of 14 long and straight dashes rarely stays in the image, and a row
    # takes 1.5 seconds
    "lra_pathx": LraTask(
        labels=2,
        length=128**2,
        vocab_size=None,
        counts=(160_000, 20_000, 20_000),
        read=partial(_pathfinder, size=128),
        files=(_PATHX, _PATHX, _PATHX),
        home=_RELEASE,
        shares=((0.0, 0.8), (0.8, 0.9), (0.9, 1.0)),
        endings=(),
    ),
    # spoken digits, such as those of https://github.com/Jakobovski/free-spoken-digit-dataset
    "lra_speech": LraTask(
        labels=10, length=16_000, vocab_size=None, counts=(2_500, 200, 300), read=_arrays, endings=(".npz",)
    ),
    "lra_speech_1000": LraTask(
        labels=10, length=1_000, vocab_size=None, counts=(2_500, 200, 300), read=_slow_speech, endings=(".npz",)
    ),
}
"""The tasks by name."""


def load_lra(
    name: str, split: str, *, data_dir: str | Path | None = None, count: int | None = None, seed: int = 0
) -> LraRows:
    """Load a split of a task from a user's files, or draw it if there are none and the task has a generator.

    Args:
        name: A key of `LRA`.
        split: ``train``, ``validation`` or ``test``.
        data_dir: The folder of the files; None draws the rows.
        count: Most rows; all, or those of the published split, when None.
        seed: Seed of drawn rows.

    Raises:
        ValueError: A name is unknown, a file is missing or broken, or the task cannot be drawn.
    """
    found = find_lra(name, split, data_dir)
    task = LRA[name]
    if count is not None:
        check_sizes(1, count=count)
    if found is None:
        sizes = shards_of(name, split, count)
        return rows_of_shards([draw_shard(name, split, seed, *shard) for shard in enumerate(sizes)])
    path, share = found
    place = SPLITS.index(split)
    is_official = bool(task.files) and path.match(task.files[place])
    try:
        rows = list(islice(task.read(path) if share == _WHOLE else task.read(path, share), count))
    except ValueError as error:
        if not is_official:
            raise
        raise ValueError(f"{error}. The official files are from {task.home}") from error
    if not rows:
        raise ValueError(f"{path}: split {split!r} of {name} must have at least one row; got none")
    if is_official and count is None and len(rows) < _NEARLY_ALL * task.counts[place]:
        logger.warning(
            "%s, %s: %s has %d rows, and the published split %d: files are missing.",
            *(name, split, path, len(rows), task.counts[place]),
        )
    longest = max(range(len(rows)), key=lambda row: len(rows[row][0]))
    if task.is_whole and len(rows[longest][0]) > task.length:
        raise ValueError(
            f"{path}, row {longest + 1} (the first row is 1): {name} must have at most {task.length} tokens, since a "
            f"part of a row has another label; got {len(rows[longest][0])}"
        )
    pairs = [second[: task.length] for _, second, _ in rows if second is not None]
    labels = np.array([label for _, _, label in rows])
    return LraRows([first[: task.length] for first, _, _ in rows], labels, pairs if task.is_pair else None)


def shards_of(name: str, split: str, count: int | None = None) -> list[int]:
    """Return how many rows each part of a drawn split has, each from a seed of its own."""
    if count is not None:
        check_sizes(1, count=count)
    whole, rest = divmod(count or LRA[name].counts[SPLITS.index(split)], _SHARD)
    return [_SHARD] * whole + [rest] * (rest > 0)


def draw_shard(name: str, split: str, seed: int, number: int, count: int) -> tuple[Array, Array, Array]:
    """Draw a part of a split, whoever draws it and whatever else is drawn.

    Returns:
        All inputs in one row, where each ends, and the labels, in the fewest bytes.
    """
    draw = LRA[name].draw
    assert draw is not None
    rows = list(islice(draw(split_generator(seed, split, number)), count))
    inputs = [first[: LRA[name].length] for first, _, _ in rows]
    labels = np.array([label for _, _, label in rows], np.int8)
    return np.concatenate(inputs), np.cumsum([len(row) for row in inputs]), labels


def rows_of_shards(shards: Iterable[tuple[Array, Array, Array]]) -> LraRows:
    """Return the rows of parts that were drawn: ids as int16, pixels as numbers from -1 to 1."""
    rows, labels = [], []
    for inputs, ends, own in shards:
        rows += np.split(_pixels(inputs) if inputs.dtype == np.uint8 else inputs.astype(np.int16), ends[:-1])
        labels.append(own.astype(np.int64))
    return LraRows(rows, np.concatenate(labels))


def find_lra(name: str, split: str, data_dir: str | Path | None) -> tuple[Path, tuple[float, float]] | None:
    """Return a split's file and its share of it, the official one or a user's own; None if its rows are drawn.

    Args:
        name: A key of `LRA`.
        split: ``train``, ``validation`` or ``test``.
        data_dir: The folder of the files; None draws the rows.

    Raises:
        ValueError: A name is unknown, the file is missing, the task cannot be drawn, or it reads no files.
    """
    if name not in LRA:
        raise ValueError(f"task_name must be one of {', '.join(LRA)}; got {name!r}.{did_you_mean(name, LRA)}")
    check(split in SPLITS, "split", f"one of {', '.join(SPLITS)}", split)
    task, place = LRA[name], SPLITS.index(split)
    if data_dir is None:
        if task.draw is None:
            raise ValueError(f"{name} must have data_dir, the folder of {_wanted(task, place)}; got none")
        return None
    data_dir = Path(data_dir)
    if task.files and (data_dir / task.files[place]).exists():
        return data_dir / task.files[place], task.shares[place]
    for ending in task.endings:
        if (path := data_dir / f"{SPLITS[place]}{ending}").exists():
            return path, _WHOLE
    if not task.files and not task.endings:
        raise ValueError(f"data_dir must be left out for {name}, whose rows are drawn; got {data_dir}")
    raise ValueError(f"data_dir must hold {_wanted(task, place)}; {data_dir} has no such file")


def _wanted(task: LraTask, place: int) -> str:
    """Name the files of a split, and where the official one is from."""
    official = f"{task.files[place]} (official, from {task.home})" if task.files else ""
    own = f"{SPLITS[place]} with the ending {', '.join(task.endings)}" if task.endings else ""
    return " or ".join(filter(None, (official, own)))
