"""What is asked of the far past: one token held for long, what many said, or what most of them said."""

import numpy as np

from hf_hybrid.data.drawing import Array, check, check_sizes
from hf_hybrid.data.recall.examples import Examples, empty

__all__ = ["aggregate", "latch", "majority"]


def latch(
    count: int,
    generator: np.random.Generator,
    *,
    classes: int = 16,
    length: int = 128,
    gap: int = 32,
    every: int = 6,
    noise_vocab_size: int = 16,
) -> Examples:
    """Draw one token to hold: the first names a class, and questions beyond a window ask for it.

    After the class and `gap` more tokens, a question token stands at every `every`-th place. Answers are never shown.
    Between them stands noise, or one blank token. Among blanks there are only as many sequences as classes, the same
    in every split.

    Own task, after the latching problem of Bengio et al. 1994, where noise follows the class too. Tokens: classes,
    noise, the question.

    Args:
        count: Sequences.
        generator: Draws them.
        classes: Different classes.
        length: Tokens of a sequence.
        gap: Tokens between the class and the first question.
        every: Distance of questions.
        noise_vocab_size: Different tokens of noise; 1 for blanks.

    Returns:
        The sequences; `chance` is that of guessing among all classes.

    Raises:
        ValueError: A size breaks its rule.
    """
    return _held(count, generator, classes, length, 1, 1.0, gap, every, noise_vocab_size)


def aggregate(
    count: int,
    generator: np.random.Generator,
    *,
    classes: int = 16,
    length: int = 128,
    told: int = 48,
    share: float = 0.5,
    gap: int = 32,
    every: int = 6,
    noise_vocab_size: int = 16,
) -> Examples:
    """Draw a latch with repetition: a class is told again and again among noise, and asked for beyond a window.

    One telling is enough to know the class; `majority` is the task that has to count.

    Each of the first `told` tokens names the class with a probability of `share`, and is noise otherwise. After `gap`
    tokens of noise, a question token stands at every `every`-th place. Answers are never shown.

    Own task. Tokens: classes, noise, the question.

    Args:
        count: Sequences.
        generator: Draws them.
        classes: Different classes.
        length: Tokens of a sequence.
        told: Tokens that may name the class; the first always does.
        share: Share of them that do, above 0 and at most 1.
        gap: Tokens of noise before the first question.
        every: Distance of questions.
        noise_vocab_size: Different tokens of noise; 1 for blanks.

    Returns:
        The sequences; a distance is that of the last token that names the class; `chance` is that of guessing among
        all classes.

    Raises:
        ValueError: A size breaks its rule.
    """
    check_sizes(1, told=told)
    check(0 < share <= 1, "share", "above 0 and at most 1", share)
    return _held(count, generator, classes, length, told, share, gap, every, noise_vocab_size)


def majority(
    count: int,
    generator: np.random.Generator,
    *,
    classes: int = 4,
    length: int = 128,
    told: int = 48,
    share: float = 0.25,
    gap: int = 32,
    every: int = 6,
    noise_vocab_size: int = 16,
) -> Examples:
    """Draw a vote in the far past: the first tokens name classes, and questions ask which one most of them named.

    Each of the first `told` tokens names the same class with a probability of `share`, and otherwise one of all
    classes at random. The answer is the class that came most often; where several did, the tokens are drawn anew.
    After `gap` tokens of noise, a question token stands at every `every`-th place. Answers are never shown.

    Own task. Tokens: classes, noise, the question.

    Args:
        count: Sequences.
        generator: Draws them.
        classes: Different classes.
        length: Tokens of a sequence.
        told: Tokens that name classes.
        share: Share of them that name the same class whatever is drawn, from 0 to 1.
        gap: Tokens of noise before the first question.
        every: Distance of questions.
        noise_vocab_size: Different tokens of noise; 1 for blanks.

    Returns:
        The sequences; a distance is that of the last token that names a class; `chance` is that of guessing among all
        classes.

    Raises:
        ValueError: A size breaks its rule.
    """
    check_sizes(1, count=count, told=told)
    check_sizes(2, classes=classes)
    check(0 <= share <= 1, "share", "from 0 to 1", share)
    meant = generator.integers(classes, size=count)
    named = np.empty((count, told), dtype=np.int64)
    most, is_tied = meant, np.ones(count, dtype=bool)
    while is_tied.any():
        shape = (int(is_tied.sum()), told)
        is_meant = generator.random(shape) < share
        named[is_tied] = np.where(is_meant, meant[is_tied, None], generator.integers(classes, size=shape))
        votes = (named[:, :, None] == np.arange(classes)).sum(axis=1)
        most = votes.argmax(axis=1)
        is_tied = (votes == votes.max(axis=1, keepdims=True)).sum(axis=1) > 1
    return _asked_later(
        named, most, np.full(count, told - 1), generator, classes, length, gap, every, noise_vocab_size
    )


def _held(
    count: int,
    generator: np.random.Generator,
    classes: int,
    length: int,
    told: int,
    share: float,
    gap: int,
    every: int,
    noise_vocab_size: int,
) -> Examples:
    """Draw the first `told` tokens, of which a share names one class, and ask for it."""
    check_sizes(1, count=count, noise_vocab_size=noise_vocab_size)
    check_sizes(2, classes=classes)
    meant = generator.integers(classes, size=count)
    names = generator.random((count, told)) < share
    names[:, 0] = True
    noise = classes + generator.integers(noise_vocab_size, size=(count, told))
    first = np.where(names, meant[:, None], noise)
    last = told - 1 - names[:, ::-1].argmax(axis=1)
    return _asked_later(first, meant, last, generator, classes, length, gap, every, noise_vocab_size)


def _asked_later(
    first: Array,
    meant: Array,
    last: Array,
    generator: np.random.Generator,
    classes: int,
    length: int,
    gap: int,
    every: int,
    noise_vocab_size: int,
) -> Examples:
    """Ask for what the first tokens meant; `last` are the places of the last of them that tell it."""
    count, told = first.shape
    check_sizes(1, every=every, noise_vocab_size=noise_vocab_size)
    check_sizes(0, gap=gap)
    check(length > told + gap, "length", f"above {told + gap}, the place of the first question", length)
    input_ids, labels, distances = empty(count, length)
    input_ids[:] = classes + generator.integers(noise_vocab_size, size=(count, length))
    input_ids[:, :told] = first
    questions = np.arange(told + gap, length, every)
    input_ids[:, questions] = classes + noise_vocab_size
    labels[:, questions] = meant[:, None]
    distances[:, questions] = questions - last[:, None]
    return Examples(input_ids, labels, distances, classes + noise_vocab_size + 1, chance=1 / classes)
