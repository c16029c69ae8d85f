"""Facts that lie anywhere in a document, for encoder-decoders that read one segment at a time."""

import numpy as np

from hf_hybrid.data.drawing import Array, check, check_sizes
from hf_hybrid.data.recall.examples import Examples, distinct, share_of_likeliest

__all__ = ["facts"]


def facts(
    count: int,
    generator: np.random.Generator,
    *,
    keys: int = 32,
    values: int = 8,
    mentions: int = 1,
    length: int = 32,
    asked: int = 32,
    segment_size: int = 4,
) -> Examples:
    """Draw documents of facts, and random questions that the decoder answers one after the other.

    A document tells the value of each key, in random order, with one token for a key and its value; further tokens are
    blanks in random places. The decoder reads keys, and each asks for its value. With several mentions of a key, most
    of them tell its value, and the others, which are as many as can be, tell random other ones: no single place has
    the answer. A decoder that spreads the document's m segments over its q tokens, as SRformer does, reads segment
    ``t m // q`` at token t: the distance of an answer is the number of segments between that one and the nearest
    mention. At a distance of 1 or more, attention to one segment can only guess, unless an encoder with full attention
    has carried facts from other segments there.

    Own task, in the tokens of ``benchmarks/facts.py``: facts (``key * values + value``), keys, answers, the blank.

    Args:
        count: Documents.
        generator: Draws them.
        keys: Keys of a document.
        values: Different values.
        mentions: Facts of each key, odd.
        length: Tokens of a document, at least keys × mentions.
        asked: Questions, drawn independently.
        segment_size: Tokens of a segment, which divides `length`.

    Returns:
        The documents, questions and answers; `chance` is that of guessing among all values.

    Raises:
        ValueError: A size breaks its rule.
    """
    check_sizes(1, count=count, keys=keys, mentions=mentions, asked=asked, segment_size=segment_size)
    check_sizes(2, values=values)
    check(mentions % 2 == 1, "mentions", "odd", mentions)
    check(length >= keys * mentions, "length", f"at least the {keys * mentions} facts", length)
    check(length % segment_size == 0, "length", f"a multiple of segment_size {segment_size}", length)
    meant = generator.integers(values, size=(count, keys))
    told = np.arange(keys)[:, None] * values + _told(meant, values, mentions, generator)
    places = distinct(generator, count, length, keys * mentions)
    answers = keys * values + keys
    blank = answers + values
    documents = np.full((count, length), blank, dtype=np.int64)
    np.put_along_axis(documents, places, told.reshape(count, -1), axis=1)
    questions = generator.integers(keys, size=(count, asked))
    labels = answers + np.take_along_axis(meant, questions, axis=1)
    read = np.arange(asked) * (length // segment_size) // asked
    segments = (places // segment_size).reshape(count, keys, mentions)
    distances = np.abs(np.take_along_axis(segments, questions[:, :, None], axis=1) - read[:, None]).min(axis=2)
    without_keys = share_of_likeliest(keys, values)
    return Examples(keys * values + questions, labels, distances, blank + 1, 1 / values, documents, without_keys)


def _told(meant: Array, values: int, mentions: int, generator: np.random.Generator) -> Array:
    """Return the values that the mentions of each key tell, `(count, keys, mentions)`; fewer than half are false."""
    told = np.repeat(meant[:, :, None], mentions, axis=2)
    false = told[:, :, : mentions // 2]
    false += generator.integers(1, values, size=false.shape)
    false %= values
    return told
