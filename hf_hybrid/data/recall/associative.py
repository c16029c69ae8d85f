"""Associative recall: a key, seen again, asks for the value that came with it."""

import numpy as np

from hf_hybrid.data.drawing import Array, check, check_sizes
from hf_hybrid.data.recall.examples import Examples, distinct, empty, share_of_likeliest

__all__ = ["in_context_recall", "key_value", "mqar"]


def mqar(
    count: int,
    generator: np.random.Generator,
    *,
    vocab_size: int = 256,
    length: int = 64,
    pairs: int = 4,
    power: float = 0.01,
    random_filler: bool = True,
) -> Examples:
    """Draw multi-query associative recall (Arora et al. 2023, "Zoology", section 4 and its published code).

    A sequence begins with pairs of a key and a value; then each key comes once more, in random places at even
    distances from the pairs, and asks for its value. Of S such places, the g-th is drawn with a probability
    proportional to ``g ** (power - 1)``, so that most questions come soon. Answers are never shown. Everything between
    questions is token 0, or random tokens of the whole vocabulary. Keys are tokens 1 to V/2 - 1, values V/2 to V - 1;
    those of a sequence are distinct.

    The published basic example has the defaults, 10,000 examples to train on and 1,000 to test, and trains two layers
    of width 128; figure 2 has 8,192 tokens, ``random_filler=False``, 100,000 and 3,000 examples, and 4 pairs in 64
    tokens, 8 in 128, 16 in 256 or 64 in 512.

    Args:
        count: Sequences.
        generator: Draws them.
        vocab_size: V, even and more than twice `pairs`; the published code wants more than `length`.
        length: Tokens of a sequence, even.
        pairs: Pairs, at most a quarter of `length`.
        power: Exponent of the questions' places, positive; 1 makes all places equally likely.
        random_filler: Whether random tokens stand between questions.

    Returns:
        The sequences; `chance` is that of guessing among all values.

    Raises:
        ValueError: A size breaks its rule.
    """
    check_sizes(1, count=count, pairs=pairs, length=length)
    check(length % 2 == 0, "length", "even", length)
    check(4 * pairs <= length, "pairs", f"at most a quarter of length {length}", pairs)
    check(vocab_size % 2 == 0 and vocab_size > 2 * pairs, "vocab_size", f"even and above {2 * pairs}", vocab_size)
    check(power > 0, "power", "positive", power)
    half, context = vocab_size // 2, 2 * pairs
    keys = 1 + distinct(generator, count, half - 1, pairs)
    values = half + distinct(generator, count, half, pairs)
    input_ids, labels, distances = empty(count, length)
    if random_filler:
        input_ids = generator.integers(vocab_size, size=(count, length))
    input_ids[:, :context:2], input_ids[:, 1:context:2] = keys, values
    # draws without replacement, in their order: the least of exponential variables divided by the weights come first
    weights = np.arange(1, (length - context) // 2 + 1) ** (power - 1.0)
    order = np.argsort(generator.exponential(size=(count, len(weights))) / weights, axis=1)
    questions = context + 2 * order[:, :pairs]
    np.put_along_axis(input_ids, questions, keys, axis=1)
    np.put_along_axis(labels, questions, values, axis=1)
    np.put_along_axis(distances, questions, questions - (2 * np.arange(pairs) + 1), axis=1)
    return Examples(input_ids, labels, distances, vocab_size, chance=1 / half, without_keys=1 / pairs)


def in_context_recall(
    count: int,
    generator: np.random.Generator,
    *,
    vocab_size: int = 16,
    length: int = 128,
    noise: float = 0.0,
    noise_vocab_size: int = 0,
) -> Examples:
    """Draw in-context recall, plain or noisy (Poli et al. 2024, "MAD", section 3.1 and its published code).

    A sequence is pairs of a key and a value; a key has the same value throughout it. Every key that has come before
    asks for its value; the last pair always does. With noise, that share of the pairs is replaced by two tokens of a
    vocabulary of their own, but never all. Keys are the first half of the tokens that are no noise, values the others.

    Published sizes: plain 16 tokens; noisy 32 tokens, 16 of them noise, in a share of 0.2; both 128 tokens long,
    12,800 examples to train on and 1,280 to test. Published training scores every next token; these labels are those
    of the published tests. The last value, which follows the last question, is part of the sequence here.

    Args:
        count: Sequences.
        generator: Draws them.
        vocab_size: Keys, values and noise.
        length: Tokens of a sequence, even and at least 4.
        noise: Share of noise, from 0 to less than 1.
        noise_vocab_size: Tokens that are noise.

    Returns:
        The sequences; `chance` is that of guessing among all values.

    Raises:
        ValueError: A size breaks its rule.
    """
    check_sizes(1, count=count)
    check_sizes(0, noise_vocab_size=noise_vocab_size)
    check(length % 2 == 0 and length >= 4, "length", "even and at least 4", length)
    check(0 <= noise < 1, "noise", "from 0 to less than 1", noise)
    check(noise == 0 or noise_vocab_size > 0, "noise_vocab_size", f"positive with noise {noise}", noise_vocab_size)
    first_noise = vocab_size - noise_vocab_size
    check(first_noise >= 2, "vocab_size", f"at least noise_vocab_size {noise_vocab_size} + 2", vocab_size)
    keys, pairs = first_noise // 2, length // 2
    values = first_noise - keys
    meant = keys + generator.integers(values, size=(count, keys))
    drawn = generator.integers(keys, size=(count, pairs))
    is_noise = generator.random((count, pairs)) < noise
    is_noise[np.arange(count), generator.integers(pairs - 1, size=count)] = False
    is_noise[:, -1] = False
    drawn[:, -1] = _one_of_those_seen(generator, drawn[:, :-1], is_noise[:, :-1], keys)
    input_ids, labels, distances = empty(count, length)
    input_ids[:, ::2], input_ids[:, 1::2] = drawn, np.take_along_axis(meant, drawn, axis=1)
    before = _places_before(drawn, is_noise, keys)
    rows, asked = np.nonzero(before >= 0)
    labels[rows, 2 * asked] = input_ids[rows, 2 * asked + 1]
    distances[rows, 2 * asked] = 2 * (asked - before[rows, asked]) - 1
    tokens = first_noise + generator.integers(max(noise_vocab_size, 1), size=(count, length))
    input_ids = np.where(np.repeat(is_noise, 2, axis=1), tokens, input_ids)
    without_keys = share_of_likeliest(keys, values)
    return Examples(input_ids, labels, distances, vocab_size, chance=1 / values, without_keys=without_keys)


def _places_before(drawn: Array, is_noise: Array, keys: int) -> Array:
    """Return the last pair before each one that has the same key; -1 for noise and for the first of a key."""
    rows, seen = np.arange(len(drawn)), np.full((len(drawn), keys), -1)
    before = np.empty_like(drawn)
    for pair, key in enumerate(drawn.T):
        kept = ~is_noise[:, pair]
        before[:, pair] = np.where(kept, seen[rows, key], -1)
        seen[rows[kept], key[kept]] = pair
    return before


def _one_of_those_seen(generator: np.random.Generator, drawn: Array, is_noise: Array, keys: int) -> Array:
    """Draw one of the different keys of each row."""
    seen = np.zeros((len(drawn), keys), dtype=bool)
    for pair in range(drawn.shape[1]):
        seen[np.arange(len(drawn)), drawn[:, pair]] |= ~is_noise[:, pair]
    return np.where(seen, generator.random(seen.shape), -1.0).argmax(axis=1)


def key_value(
    count: int,
    generator: np.random.Generator,
    *,
    keys: int = 8,
    values: int = 8,
    pairs: int = 3,
    length: int = 128,
    gap: int = 32,
    every: int = 4,
    noise_vocab_size: int = 1,
) -> Examples:
    """Draw pairs at the start of a sequence, and questions only beyond a window.

    A sequence begins with pairs of a key and a value, the keys distinct. After `gap` more tokens, a random one of
    these keys asks for its value at every `every`-th place. Answers are never shown, and everything between is one
    blank token, or noise. A model whose layers together reach no further than `gap` can only guess.

    Own task, after MQAR. Tokens: keys, values, then noise.

    Args:
        count: Sequences.
        generator: Draws them.
        keys: Different keys.
        values: Different values.
        pairs: Pairs, at most `keys`.
        length: Tokens of a sequence.
        gap: Tokens between the last pair and the first question.
        every: Distance of questions.
        noise_vocab_size: Different tokens of noise; 1 for blanks.

    Returns:
        The sequences; `chance` is that of guessing among all values.

    Raises:
        ValueError: A size breaks its rule.
    """
    check_sizes(1, count=count, keys=keys, values=values, pairs=pairs, every=every, noise_vocab_size=noise_vocab_size)
    check_sizes(0, gap=gap)
    check(pairs <= keys, "pairs", f"at most the {keys} keys", pairs)
    first = 2 * pairs + gap
    check(length > first, "length", f"above {first}, the place of the first question", length)
    shown = distinct(generator, count, keys, pairs)
    meant = keys + generator.integers(values, size=(count, pairs))
    input_ids, labels, distances = empty(count, length)
    input_ids[:] = keys + values + generator.integers(noise_vocab_size, size=(count, length))
    input_ids[:, : 2 * pairs : 2], input_ids[:, 1 : 2 * pairs : 2] = shown, meant
    questions = np.arange(first, length, every)
    asked = generator.integers(pairs, size=(count, len(questions)))
    input_ids[:, questions] = np.take_along_axis(shown, asked, axis=1)
    labels[:, questions] = np.take_along_axis(meant, asked, axis=1)
    distances[:, questions] = questions - (2 * asked + 1)
    vocab_size, without_keys = keys + values + noise_vocab_size, share_of_likeliest(pairs, values)
    return Examples(input_ids, labels, distances, vocab_size, chance=1 / values, without_keys=without_keys)
