"""Recognise texts that repeat an earlier text."""

import hashlib
from collections import Counter, defaultdict

__all__ = ["NearCopyFilter", "hashed_runs"]

_SHINGLE_WORDS = 4
_SKETCH_SIZE = 24
_COPY_SHARE = 0.5


class NearCopyFilter:
    """Remembers texts and recognises copies and near copies.

    It compares sketches: the 24 smallest hashes of a text's runs of four words. Two texts are copies if their sketches
    share at least half of the hashes, if they are equal, or if they share a key. The cost is linear in the words.
    """

    def __init__(self) -> None:
        self._keys: set[str] = set()
        self._sketches: defaultdict[int, list[int]] = defaultdict(list)
        self._texts = 0

    def is_copy(self, text: str, *keys: str) -> bool:
        """Return whether a text copies an earlier one, and remember it if it does not.

        Args:
            text: Normalised text: words separated by single spaces.
            *keys: More names of the text; one that an earlier text has too makes it a copy.
        """
        exact = {text, *keys}
        if not exact.isdisjoint(self._keys):
            return True
        sketch = _sketch(text)
        shared = Counter(earlier for value in sketch for earlier in self._sketches.get(value, ()))
        if shared and shared.most_common(1)[0][1] >= _COPY_SHARE * len(sketch):
            return True
        self._keys |= exact
        for value in sketch:
            self._sketches[value].append(self._texts)
        self._texts += 1
        return False


def hashed_runs(text: str) -> set[int]:
    """Return the hashes of a normalised text's runs of four words; equal on every machine.

    A text of fewer words is one run.
    """
    words = text.split()
    runs = {" ".join(words[i : i + _SHINGLE_WORDS]) for i in range(max(1, len(words) - _SHINGLE_WORDS + 1))}
    return {int.from_bytes(hashlib.blake2b(run.encode(), digest_size=8).digest()) for run in runs}


def _sketch(text: str) -> list[int]:
    """Return the smallest hashes of the text's runs."""
    return sorted(hashed_runs(text))[:_SKETCH_SIZE]
