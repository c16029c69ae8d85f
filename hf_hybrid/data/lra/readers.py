"""Read the data of the Long Range Arena: the official files, film reviews, pixels and sound."""

import io
from collections.abc import Iterator
from itertools import pairwise, zip_longest
from pathlib import Path
from typing import Any

import numpy as np

from hf_hybrid.data.drawing import Array
from hf_hybrid.data.files import iterate_rows
from hf_hybrid.data.lra.listops import evaluate_listops, parse_listops

__all__ = [
    "PAIR_COLUMNS",
    "byte_ids",
    "read_arrays",
    "read_cifar10",
    "read_listops",
    "read_pairs",
    "read_pathfinder",
    "read_reviews",
]

PAIR_COLUMNS = ("label", "id1", "id2", "text1", "text2")
"""Columns of the files of the ACL Anthology Network, which have no header line."""
_CIFAR_RECORD = 1 + 3 * 32 * 32
_GREY = np.array([0.2989, 0.587, 0.114]) * 255.5 / 255
_BYTES = 3
"""Id of byte 0: the smaller ones pad, begin and end, as ByT5's do."""


def byte_ids(text: str, length: int | None = None) -> Array:
    """Return a text as ids of its UTF-8 bytes, cut to a length; the ids are ByT5's (byte + 3), and 0 pads."""
    return np.frombuffer(text.encode()[:length], np.uint8).astype(np.int16) + _BYTES


def read_listops(path: Path) -> Iterator[tuple[list[str], int]]:
    """Yield the expressions and values of a file of ListOps: columns ``Source`` and ``Target``, or in small letters.

    Raises:
        ValueError: A row is no expression, or its value is another.
    """
    for number, row in enumerate(iterate_rows("data_dir", str(path)), start=1):
        fields = {name.lower(): value for name, value in row.items()}
        if not {"source", "target"} <= fields.keys():
            raise ValueError(f"{path} must have the columns Source and Target; it has {', '.join(row)}")
        where = f"{path}, row {number} (the first row is 1)"
        try:
            tokens = parse_listops(str(fields["source"]))
            value = evaluate_listops(tokens)
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from error
        if str(fields["target"]).strip() != str(value):
            raise ValueError(f"{where}: Target must be {value}, the value of Source; got {fields['target']!r}")
        yield tokens, value


def read_pairs(path: Path) -> Iterator[tuple[str, str, int]]:
    """Yield two documents and their label: the ACL Anthology Network's format, or any file with its last columns.

    A TSV file without a header line has `PAIR_COLUMNS`; other files name ``label``, ``text1`` and ``text2``.

    Raises:
        ValueError: A column is missing, or a label is not 0 or 1.
    """
    for number, row in enumerate(iterate_rows("data_dir", str(path), tsv_header=PAIR_COLUMNS), start=1):
        if missing := {"label", "text1", "text2"} - row.keys():
            raise ValueError(
                f"{path} must have the columns label, text1 and text2; it lacks {', '.join(sorted(missing))}"
            )
        where = f"{path}, row {number}"
        first, second = (_text(row[name], name, where) for name in ("text1", "text2"))
        yield first, second, _label(row["label"], 2, where)


def _text(value: Any, column: str, where: str) -> str:
    """Return a field that holds a text; files of JSON can have none, or halves of characters, which have no bytes."""
    if value is None:
        raise ValueError(f"{where}: {column} must be a text; got none")
    text = str(value)
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"{where}: {column} must be text that UTF-8 can hold; character {error.start} is not"
        ) from error
    return text


def _label(value: Any, labels: int, where: str) -> int:
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        number = -1.0
    if number not in range(labels):
        raise ValueError(f"{where}: the label must be an integer from 0 to {labels - 1}; got {value!r}")
    return int(number)


def read_reviews(path: Path, share: tuple[float, float] = (0.0, 1.0)) -> Iterator[tuple[str, int]]:
    """Yield film reviews and labels: a folder with ``pos`` and ``neg``, as in aclImdb, or a file with text and label.

    Args:
        path: The folder, whose reviews come in a random order that is always the same, or the file.
        share: Beginning and end of the reviews of each label that are read of a folder, as shares of all.

    Yields:
        A text and its label.

    Raises:
        ValueError: A folder or column is missing, a file is not UTF-8, or a label is not 0 or 1.
    """
    if path.is_dir():
        folders = [path / name for name in ("neg", "pos")]
        if missing := [folder for folder in folders if not folder.is_dir()]:
            raise ValueError(f"data_dir must hold the folders neg and pos of aclImdb; {missing[0]} is missing")
        if empty := [folder for folder in folders if not any(folder.glob("*.txt"))]:
            raise ValueError(f"data_dir must hold reviews of both labels (.txt); {empty[0]} has none")
        # in turn, so that the first rows have both labels
        for both in zip_longest(*(_some_files(folder, share) for folder in folders)):
            for label, file in enumerate(both):
                if file is not None:
                    yield _content(file), label
        return
    for number, row in enumerate(iterate_rows("data_dir", str(path)), start=1):
        if missing_columns := {"text", "label"} - row.keys():
            raise ValueError(
                f"{path} must have the columns text and label; it lacks {', '.join(sorted(missing_columns))}"
            )
        label = {"neg": 0, "pos": 1, "negative": 0, "positive": 1}.get(row["label"], row["label"])
        where = f"{path}, row {number}"
        yield _text(row["text"], "text", where), _label(label, 2, where)


def _content(path: Path) -> str:
    """Return the text of a file."""
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        line = path.read_bytes().count(b"\n", 0, error.start) + 1
        raise ValueError(f"{path}, line {line}: must be UTF-8; byte {error.start} is not ({error.reason})") from error


def _some_files(folder: Path, share: tuple[float, float]) -> list[Path]:
    files = sorted(folder.glob("*.txt"))
    return [files[place] for place in np.random.default_rng(0).permutation(len(files))[_places(len(files), share)]]


def _places(count: int, share: tuple[float, float]) -> slice:
    """Return where a share of some rows begins and ends."""
    start, end = (round(count * part) for part in share)
    return slice(start, end)


def read_pathfinder(
    folder: Path, size: int = 32, share: tuple[float, float] = (0.0, 1.0)
) -> Iterator[tuple[Array, int]]:
    """Yield the official images of one difficulty, such as ``pathfinder32/curv_contour_length_14``, and their labels.

    Its folder ``metadata`` has text files, whose lines name an image by folder and file, then its number and its
    label. Empty images are left out, as the published program does (there is one).

    Args:
        folder: The folder of ``metadata`` and ``imgs``.
        size: Pixels of a side.
        share: Beginning and end of the images that are read, as shares of all, in the order of the files' names.

    Yields:
        An image `(size, size)`, uint8, and its label.

    Raises:
        ValueError: A file is missing, is not UTF-8, or is no image of this size.
    """
    files = sorted((folder / "metadata").glob("*.npy"), key=lambda file: (len(file.name), file.name))
    if not files:
        raise ValueError(f"data_dir must hold metadata/*.npy of Pathfinder; {folder / 'metadata'} has none")
    listed = []
    for file in files:
        for number, line in enumerate(_content(file).splitlines(), start=1):
            words = line.split()
            if len(words) < 4:
                raise ValueError(f"{file}, line {number}: must name folder, file, number and label; got {line[:80]!r}")
            place = folder / words[0] / words[1]
            if not place.is_file():
                raise ValueError(f"{file}, line {number}: the image must exist; {place} does not")
            if place.stat().st_size:
                listed.append((place, _label(words[3], 2, f"{file}, line {number}")))
    for place, label in listed[_places(len(listed), share)]:
        yield _image(place, size), label


def _image(path: Path, size: int) -> Array:
    from PIL import Image

    try:
        with Image.open(path) as image:
            pixels = np.asarray(image.convert("L"))
    except Exception as error:  # PIL raises many kinds for a broken file
        raise ValueError(f"{path} must be an image; it cannot be read ({error})") from error
    if pixels.shape != (size, size):
        raise ValueError(f"{path} must have {size} x {size} pixels; got {' x '.join(map(str, pixels.shape))}")
    return pixels


def read_cifar10(path: Path, share: tuple[float, float] = (0.0, 1.0)) -> Iterator[tuple[Array, int]]:
    """Yield the images of CIFAR-10's binary files, turned to grey, and their labels.

    Grey is 0.2989 red + 0.587 green + 0.114 blue, times 255.5 / 255 and rounded down, as TensorFlow makes it for the
    Long Range Arena.

    Args:
        path: A folder with ``data_batch_*.bin``, or one file.
        share: Beginning and end of the images that are read, as shares of all.

    Yields:
        An image `(32, 32)`, uint8, and its label.

    Raises:
        ValueError: There is no such file, or one has another size.
    """
    files = sorted(path.glob("data_batch_*.bin")) if path.is_dir() else [path]
    if not files:
        raise ValueError(f"data_dir must hold data_batch_*.bin of CIFAR-10; {path} has none")
    records = []
    for file in files:
        content = np.frombuffer(file.read_bytes(), np.uint8)
        if not content.size or content.size % _CIFAR_RECORD:
            raise ValueError(f"{file} must be records of {_CIFAR_RECORD} bytes; it has {content.size} bytes")
        records.append(content.reshape(-1, _CIFAR_RECORD))
    rows = np.concatenate(records)
    if rows[:, 0].max() > 9:
        raise ValueError(f"{path}: labels must be from 0 to 9; got {rows[:, 0].max()}")
    for row in rows[_places(len(rows), share)]:
        grey = _GREY @ row[1:].reshape(3, -1).astype(np.float64)
        yield grey.astype(np.uint8).reshape(32, 32), int(row[0])


def read_arrays(path: Path, holds: str, labels: int = 10, size: int | None = None) -> tuple[list[Array], Array]:
    """Read images or recordings from a NumPy archive, as sequences of numbers.

    Images are an array ``images`` `(N, H, W)` of uint8, read row by row. Recordings are an array ``audio`` of int16,
    cut at ``offsets`` `(N + 1,)`. Both have ``labels`` `(N,)`.

    Args:
        path: The file, ``.npz``.
        holds: ``images`` or ``audio``.
        labels: Number of labels.
        size: Pixels of a side of images; any when None.

    Returns:
        A sequence of float32 for each example, from -1 to 1, and the labels.

    Raises:
        ValueError: The file is no such archive, or an array is missing or does not fit the others.
    """
    if not path.is_file():
        raise ValueError(f"data_dir must hold the file {path.name}; {path} is missing")
    try:
        with np.load(io.BytesIO(path.read_bytes()), allow_pickle=False) as archive:
            arrays = {
                name: _array(archive[name])
                for name in archive.files
                if name in ("images", "audio", "offsets", "labels")
            }
    except Exception as error:  # zipfile, its decompressors and NumPy raise many kinds for a broken file
        raise ValueError(f"{path} must be a NumPy archive of arrays; it cannot be read ({error})") from error
    found = arrays.get("labels")
    if found is None or holds not in arrays:
        raise ValueError(f"{path} must hold labels and {holds}; it holds {', '.join(arrays) or 'neither'}")
    is_whole = found.ndim == 1 and found.dtype.kind in "iu" and found.size > 0
    if not is_whole or not 0 <= found.min() <= found.max() < labels:
        raise ValueError(f"{path}: labels must be integers from 0 to {labels - 1}, one for each example")
    read = _images(path, arrays[holds], len(found), size) if holds == "images" else _recordings(path, arrays)
    return read, found.astype(np.int64)


def _array(found: Any) -> Array:
    """Return what an entry of an archive holds; NumPy gives the bytes of one that has no header of an array."""
    if not isinstance(found, np.ndarray):
        raise TypeError("an entry has no header of an array")
    return found


def _images(path: Path, images: Array, count: int, size: int | None) -> list[Array]:
    if images.ndim != 3 or images.dtype != np.uint8 or len(images) != count or not images.size:
        raise ValueError(f"{path}: images must be uint8, ({count}, height, width); got {images.dtype}, {images.shape}")
    if size is not None and images.shape[1:] != (size, size):
        got = " x ".join(map(str, images.shape[1:]))
        raise ValueError(f"{path}: images must have {size} x {size} pixels, those of the task; got {got}")
    return list(images.reshape(count, -1).astype(np.float32) / 127.5 - 1)


def _recordings(path: Path, arrays: dict[str, Array]) -> list[Array]:
    audio, offsets, count = arrays["audio"], arrays.get("offsets"), len(arrays["labels"])
    if audio.ndim != 1 or audio.dtype != np.int16:
        raise ValueError(f"{path}: audio must be int16 in one row; got {audio.dtype}, {audio.shape}")
    places = [] if offsets is None or offsets.dtype.kind not in "iu" else offsets.reshape(-1).tolist()
    ascend = len(places) == count + 1 and all(start < end for start, end in pairwise(places))
    if not ascend or places[0] < 0 or places[-1] > len(audio):
        raise ValueError(f"{path}: offsets must ascend to at most {len(audio)}, one more than the {count} labels")
    scaled = audio.astype(np.float32) / 2**15
    return [scaled[start:end] for start, end in pairwise(places)]
