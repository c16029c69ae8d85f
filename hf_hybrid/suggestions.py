"""Suggest a close name in error messages."""

import difflib
from collections.abc import Iterable

__all__ = ["did_you_mean"]


def did_you_mean(name: str, options: Iterable[str]) -> str:
    """Return a sentence that suggests the option closest to a misspelt name.

    Args:
        name: What the user wrote.
        options: The accepted names.

    Returns:
        A sentence with a leading space, such as ``" Did you mean 'spade'?"``, to append to a message; the empty
        string when nothing is close. Case does not matter, and ``-`` equals ``_``.
    """

    def fold(text: str) -> str:
        return text.casefold().replace("-", "_")

    folded: dict[str, str] = {}
    for option in options:
        folded.setdefault(fold(option), option)
    matches = difflib.get_close_matches(fold(name), folded, n=1, cutoff=0.6)
    return f" Did you mean {folded[matches[0]]!r}?" if matches else ""
