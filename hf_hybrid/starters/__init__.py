"""Starters: small pre-trained checkpoints that come with the package, to fine-tune.

Each is a folder beside this file, as `save_pretrained` writes it: configuration, weights, tokenizer and model card.
"""

import functools
import logging
from pathlib import Path

from hf_hybrid.suggestions import did_you_mean

logger = logging.getLogger(__name__)
_FOLDER = Path(__file__).parent.resolve()
STARTERS = tuple(sorted(path.parent.name for path in _FOLDER.glob("*/config.json")))
"""The names of all starters."""


def starter(name: str) -> Path:
    """Return the folder of a starter, for `from_pretrained`.

    Args:
        name: Its name, one of `hf_hybrid.starters.STARTERS`: ``spade-en-tiny``.

    Raises:
        ValueError: There is no starter of this name.
    """
    if name not in STARTERS:
        raise ValueError(f"name must be a starter: {', '.join(STARTERS)}; got {name!r}.{did_you_mean(name, STARTERS)}")
    return _FOLDER / name


def folder_of_starter(name: str) -> str:
    """Return the folder of a starter; of anything else, also of a folder here that is called like one, its name."""
    if name not in STARTERS:
        return name
    if Path(name).exists():
        _warn_of_namesake(name, str(Path.cwd()))
        return name
    return str(starter(name))


@functools.cache
def _warn_of_namesake(name: str, place: str) -> None:
    logger.warning("%s is what is called so in %s, and not the starter of that name.", name, place)


def name_of_starter(source: str) -> str:
    """Return the name of the starter in a folder; of anything else, what was given."""
    path = Path(source).resolve()
    return path.name if path.parent == _FOLDER and path.name in STARTERS else source
