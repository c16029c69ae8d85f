"""A needle at a depth of a real text, by bytes."""

import numpy as np

from hf_hybrid.data.drawing import check, check_sizes
from hf_hybrid.data.recall.examples import Examples, empty

__all__ = ["ANSWER", "NAMES", "QUESTION", "needle"]

QUESTION = " The secret number of {name} is "
"""What stands before the number, in the needle and at the end."""
ANSWER = "{number}."
NAMES = ("Alice", "Bruno", "Clara", "David", "Elena", "Felix", "Greta", "Henry")


def needle(
    count: int,
    generator: np.random.Generator,
    *,
    text: bytes,
    length: int = 256,
    depth: float | None = None,
    digits: int = 4,
) -> Examples:
    """Draw a needle in a real text: a sentence with a random number, and at the end the question for it, by bytes.

    An excerpt of the text, from a random place, is cut in two at a depth; the needle, "The secret number of Clara is
    4821.", stands between, and at the end its first words again, with the number's digits, each of which is asked for
    by the byte before it. Names and numbers are random, so nothing but the needle tells the digits.

    Own task, after the "needle in a haystack" test of Kamradt 2023. A token is a byte, its id the byte's value.

    Args:
        count: Sequences.
        generator: Draws them.
        text: What excerpts are cut from, longer than `length`.
        length: Bytes of a sequence.
        depth: Where the needle lies: 0 is the beginning of the text, 1 its end; random when None.
        digits: Digits of the number.

    Returns:
        The sequences; `chance` is that of guessing a digit.

    Raises:
        ValueError: A size breaks its rule.
    """
    check_sizes(1, count=count, digits=digits)
    check(depth is None or 0 <= depth <= 1, "depth", "from 0 to 1", depth)
    longest = max(map(len, NAMES))
    least = 2 * len(QUESTION.format(name="x" * longest)) + 2 * digits
    check(length >= least, "length", f"at least {least}, the bytes of needle and question", length)
    check(len(text) > length, "text", f"longer than length {length}", f"{len(text)} bytes")
    haystack = np.frombuffer(text, dtype=np.uint8)
    input_ids, labels, distances = empty(count, length)
    for row in range(count):
        number = "".join(map(str, generator.integers(10, size=digits)))
        question = QUESTION.format(name=NAMES[generator.integers(len(NAMES))]).encode()
        hidden, asking = question + ANSWER.format(number=number).encode(), question + number.encode()[:-1]
        size = length - len(hidden) - len(asking)
        start = generator.integers(len(text) - size + 1)
        place = round((generator.random() if depth is None else depth) * size)
        around = haystack[start : start + size]
        parts = (around[:place], np.frombuffer(hidden, np.uint8), around[place:], np.frombuffer(asking, np.uint8))
        input_ids[row] = np.concatenate(parts)
        labels[row, length - digits :] = list(number.encode())
        answer = place + len(question) + np.arange(digits)
        distances[row, length - digits :] = np.arange(length - digits, length) - answer
    return Examples(input_ids, labels, distances, 256, chance=0.1)
