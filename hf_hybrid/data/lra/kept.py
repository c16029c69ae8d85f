"""Rows of the Long Range Arena that are drawn once, part by part, and kept in a cache."""

import hashlib
import io
import logging
import time
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, wait
from pathlib import Path
from typing import Any

import numpy as np
from tqdm.auto import tqdm

from hf_hybrid.data.cache import cache_root, locked
from hf_hybrid.data.drawing import Array
from hf_hybrid.data.lra.tasks import LraRows, draw_shard, find_lra, load_lra, rows_of_shards, shards_of
from hf_hybrid.data.workers import worker_pool

__all__ = ["DrawingStopped", "digest_of_drawn", "load_lra_once"]

logger = logging.getLogger(__name__)

_ARRAYS = ("inputs", "ends", "labels")
_Shard = tuple[str, str, int, int, int]
_Part = tuple[Array, Array, Array]
_FEW = 4
"""Rows that are drawn to tell one generator from another."""


class DrawingStopped(Exception):
    """The time for drawing was over; what was drawn is kept, and the next call goes on."""


def digest_of_drawn(name: str, split: str, seed: int = 0) -> str:
    """Return a hash of the first rows that a task's generator draws: another one where it draws in another way."""
    found = hashlib.sha256()
    for array in draw_shard(name, split, seed, 0, _FEW):
        found.update(array.tobytes())
    return found.hexdigest()[:16]


def load_lra_once(
    name: str,
    split: str,
    *,
    data_dir: str | Path | None = None,
    count: int | None = None,
    seed: int = 0,
    cache_dir: str | None = None,
    processes: int = 1,
    until: float | None = None,
) -> LraRows:
    """Do as `load_lra`, and keep what is drawn: the published sets take minutes to hours.

    A kept part that cannot be read, or is none of these rows, is drawn again.

    Args:
        name: A key of `LRA`.
        split: ``train``, ``validation`` or ``test``.
        data_dir: The folder of the files; None draws the rows.
        count: Most rows; all, or those of the published split, when None.
        seed: Seed of drawn rows.
        cache_dir: Where they are kept; the cache of `datasets` when None.
        processes: How many draw; the rows are the same for any number. More than one is for programs that start with
            ``if __name__ == "__main__"``.
        until: Time of `time.monotonic` after which no part but a first one is begun; None for any.

    Raises:
        ValueError: As `load_lra`, or the cache cannot be written to, or a part of it does not fit into memory.
        DrawingStopped: The time is over.
    """
    if find_lra(name, split, data_dir) is not None:
        return load_lra(name, split, data_dir=data_dir, count=count)
    drawn = f"{name}-{split}-{count or 'all'}-{seed}-{digest_of_drawn(name, split, seed)}"
    folder = cache_root(cache_dir) / "lra" / drawn
    shards = [(name, split, seed, *shard) for shard in enumerate(shards_of(name, split, count))]
    parts = {shard: _read(folder, shard) for shard in shards}
    if any(part is None for part in parts.values()):
        with locked(folder):
            folder.mkdir(exist_ok=True)
            parts |= {shard: _read(folder, shard) for shard, part in parts.items() if part is None}
            missing = [shard for shard, part in parts.items() if part is None]
            for path in (path for path in (_file(folder, shard) for shard in missing) if path.exists()):
                logger.warning("%s cannot be read, or has other rows: it is drawn again.", path)
                path.unlink()
            parts_drawn = _draw(folder, missing, min(processes, len(missing)), until)
            shown = {"desc": f"Drawing {name}, {split}", "unit": "part", "initial": len(shards) - len(missing)}
            for _ in tqdm(parts_drawn, total=len(shards), **shown):
                pass
            left = sum(not _file(folder, shard).exists() for shard in missing)
            if left:
                raise DrawingStopped(f"{name}, {split}: {len(shards) - left} of {len(shards)} parts are drawn")
            parts |= {shard: _read(folder, shard) for shard in missing}
    if any(part is None for part in parts.values()):
        raise ValueError(f"cache_dir must keep what is written to it; parts of {folder} cannot be read")
    return rows_of_shards(part for part in parts.values() if part is not None)


def _file(folder: Path, shard: _Shard) -> Path:
    return folder / f"{shard[3]:05}.npz"


def _read(folder: Path, shard: _Shard) -> _Part | None:
    """Return a part that is kept; None if there is none, or a broken one."""
    path = _file(folder, shard)
    if not path.exists():
        return None
    content = io.BytesIO(path.read_bytes())
    try:
        with np.load(content, allow_pickle=False) as kept:
            inputs, ends, labels = (kept[name] for name in _ARRAYS)
    except MemoryError as error:
        raise ValueError(f"{path} must fit into memory; it does not, or is broken: delete it then") from error
    except Exception:  # zipfile, its decompressors and NumPy raise many kinds for a broken file
        return None
    is_whole = len(ends) == len(labels) == shard[-1] and ends[-1] == len(inputs)
    return (inputs, ends, labels) if is_whole else None


def _draw(folder: Path, shards: list[_Shard], processes: int, until: float | None) -> Iterator[None]:
    """Draw and keep parts until the time is over, at least one, so that every call comes nearer to the end.

    Yields:
        After each part.
    """
    if processes < 2:
        for number, shard in enumerate(shards):
            if number and _is_over(until):
                return
            _draw_one(folder, shard)
            yield
        return
    waiting = iter(shards)
    with worker_pool(processes) as pool:
        running: set[Future[None]] = {pool.submit(_draw_one, folder, next(waiting))}
        while True:
            while len(running) < processes and not _is_over(until) and (following := next(waiting, None)) is not None:
                running.add(pool.submit(_draw_one, folder, following))
            if not running:
                return
            done, running = wait(running, return_when=FIRST_COMPLETED)
            for future in done:
                yield future.result()


def _is_over(until: float | None) -> bool:
    return until is not None and time.monotonic() > until


def _draw_one(folder: Path, shard: _Shard) -> None:
    """Draw a part, and write its file as a whole."""
    path = _file(folder, shard)
    unfinished = path.with_suffix(".unfinished")
    with unfinished.open("wb") as stream:
        arrays: dict[str, Any] = dict(zip(_ARRAYS, draw_shard(*shard), strict=True))
        np.savez_compressed(stream, **arrays)
    unfinished.replace(path)
