"""Rows of the Long Range Arena that are drawn once, and kept in a cache."""

from pathlib import Path

import numpy as np

from hf_hybrid.data.cache import cache_root, cached_folder
from hf_hybrid.data.lra.tasks import LraRows, load_lra
from hf_hybrid.version import __version__

__all__ = ["load_lra_once"]

_FILE = "rows.npz"


def load_lra_once(
    name: str,
    split: str,
    *,
    data_dir: Path | None = None,
    count: int | None = None,
    seed: int = 0,
    cache_dir: str | None = None,
) -> LraRows:
    """Do as `load_lra`, and keep what is drawn: the published sets take minutes.

    Args:
        name: A key of `LRA`.
        split: ``train``, ``validation`` or ``test``.
        data_dir: The folder of the files; None draws the rows.
        count: Most rows; all, or those of the published split, when None.
        seed: Seed of drawn rows.
        cache_dir: Where they are kept; the cache of `datasets` when None.

    Raises:
        ValueError: As `load_lra`, or the cache cannot be written to.
    """
    if data_dir is not None:
        return load_lra(name, split, data_dir=data_dir, count=count)

    def build(folder: Path) -> None:
        rows = load_lra(name, split, count=count, seed=seed)
        ends = np.cumsum([len(row) for row in rows.inputs])
        np.savez(folder / _FILE, inputs=np.concatenate(rows.inputs), ends=ends, labels=rows.labels)

    key = f"{name}-{split}-{count or 'all'}-{seed}-{__version__}"
    with np.load(cached_folder(cache_root(cache_dir) / "lra" / key, build) / _FILE, allow_pickle=False) as kept:
        return LraRows(np.split(kept["inputs"], kept["ends"][:-1]), kept["labels"])
