"""Facts that lie anywhere in a document, for encoder-decoders that read one segment at a time."""

import numpy as np

from hf_hybrid.data.drawing import check, check_sizes
from hf_hybrid.data.recall.examples import Examples, distinct, empty, share_of_likeliest

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
    mention. At a distance of 1 or more, attention to one segment can only guess if the encoder moves nothing between
    segments. Full attention in the encoder does: it sees no questions, but carries as much of all facts to each
    segment as its outputs hold.

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
    facts = keys * mentions
    check(length >= facts, "length", f"at least the {facts} facts", length)
    check(length % segment_size == 0, "length", f"a multiple of segment_size {segment_size}", length)
    meant = generator.integers(values, size=(count, keys))
    told = np.repeat(meant[:, :, None], mentions, axis=2)
    false = told[:, :, : mentions // 2]
    false += generator.integers(1, values, size=false.shape)
    false %= values
    places = distinct(generator, count, length, facts)
    answers = keys * values + keys
    blank = answers + values
    documents = np.full((count, length), blank, dtype=np.int64)
    np.put_along_axis(documents, places, (np.arange(keys)[:, None] * values + told).reshape(count, -1), axis=1)
    questions = generator.integers(keys, size=(count, asked))
    input_ids, labels, distances = empty(count, asked)
    input_ids[:] = keys * values + questions
    labels[:] = answers + np.take_along_axis(meant, questions, axis=1)
    read = np.arange(asked) * (length // segment_size) // asked
    segments = (places // segment_size).reshape(count, keys, mentions)
    asked_segments = np.take_along_axis(segments, questions[:, :, None], axis=1)
    distances[:] = np.abs(asked_segments - read[:, None]).min(axis=2)
    vocab_size, without_keys = blank + 1, share_of_likeliest(keys, values)
    return Examples(input_ids, labels, distances, vocab_size, 1 / values, documents, without_keys)
