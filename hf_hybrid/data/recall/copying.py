"""MAD's tasks of copying, compressing and memorizing tokens (Poli et al. 2024, section 3.1 and its published code)."""

import numpy as np

from hf_hybrid.data.drawing import check, check_sizes
from hf_hybrid.data.recall.examples import Examples, empty

__all__ = ["compression", "memorization", "selective_copying"]

FACTS_SEED = 12345
"""Seed of the pairs that `memorization` asks for in every split: that of the published code."""


def selective_copying(
    count: int,
    generator: np.random.Generator,
    *,
    vocab_size: int = 16,
    length: int = 256,
    copied: int = 16,
    is_spread: bool = True,
) -> Examples:
    """Draw selective copying: tokens among blanks, to be said in their order once all are read.

    A sequence holds the tokens to copy, each after a random number of blanks, then the copy token and as many blanks
    as there are tokens, each of which asks for the next one. The last token to copy stands just before the copy token.

    If they are not spread, all tokens to copy come first, and the blanks after them: the copying problem of Hochreiter
    and Schmidhuber 1997 as Arjovsky et al. 2016 pose it (section 4.1: 10 tokens of 8). What is asked then lies
    ``length - copied`` tokens back, and has to be kept with its place, all of it at once.

    Published sizes: the defaults, 12,800 examples to train on and 1,280 to test; also 512 and 1,024 tokens, and 32, 64
    or 96 to copy. Tokens: what is copied, then the blank V - 2 and the copy token V - 1.

    Args:
        count: Sequences.
        generator: Draws them.
        vocab_size: V, at least 3.
        length: Tokens of a sequence, more than ``2 copied + 1``.
        copied: Tokens to copy.
        is_spread: Whether blanks lie between them.

    Returns:
        The sequences; `chance` is that of guessing among all tokens that are copied.

    Raises:
        ValueError: A size breaks its rule.
    """
    check_sizes(1, count=count, copied=copied)
    check_sizes(3, vocab_size=vocab_size)
    check(length > 2 * copied + 1, "length", f"above {2 * copied + 1}, twice copied and one", length)
    blank, copy = vocab_size - 2, vocab_size - 1
    places = np.tile(np.arange(copied), (count, 1))
    if is_spread:
        blanks = generator.multinomial(length - 2 * copied - 1, np.full(copied, 1 / copied), size=count)
        places += blanks.cumsum(axis=1)
    tokens = generator.integers(blank, size=(count, copied))
    questions = np.arange(length - copied, length)
    input_ids, labels, distances = empty(count, length, filler=blank)
    np.put_along_axis(input_ids, places, tokens, axis=1)
    input_ids[:, length - copied - 1] = copy
    labels[:, questions], distances[:, questions] = tokens, questions - places
    return Examples(input_ids, labels, distances, vocab_size, chance=1 / blank)


def compression(count: int, generator: np.random.Generator, *, vocab_size: int = 16, length: int = 32) -> Examples:
    """Draw compression: random tokens, all of which must be read from the state after the last one.

    A sequence is random tokens and the compression token V - 1. In the published test, a small network sees the
    model's output after that token and the number of a place, and says which token stands there. So the labels are the
    tokens themselves, in their places. The compression token is not asked for; the published code counts it too.

    Published sizes: the defaults, 12,800 examples to train on and 1,280 to test; also 64, 128 and 256 tokens, and
    vocabularies of 32, 64 and 128.

    Args:
        count: Sequences.
        generator: Draws them.
        vocab_size: V, at least 2.
        length: Tokens of a sequence, at least 2.

    Returns:
        The sequences; a distance is that of a token from the last; `chance` is that of guessing among all tokens.

    Raises:
        ValueError: A size breaks its rule.
    """
    check_sizes(1, count=count)
    check_sizes(2, vocab_size=vocab_size, length=length)
    input_ids, labels, distances = empty(count, length, filler=vocab_size - 1)
    input_ids[:, :-1] = generator.integers(vocab_size - 1, size=(count, length - 1))
    labels[:, :-1] = input_ids[:, :-1]
    distances[:, :-1] = length - 1 - np.arange(length - 1)
    return Examples(input_ids, labels, distances, vocab_size, chance=1 / (vocab_size - 1))


def memorization(
    count: int,
    generator: np.random.Generator,
    *,
    vocab_size: int = 256,
    length: int = 32,
    facts_seed: int = FACTS_SEED,
) -> Examples:
    """Draw memorization: keys whose values are the same in all sequences, and stand in none.

    A sequence is random keys, each followed by the insert token V - 1, which asks for the key's value. Only training
    can teach the values: the split to train on and the others have the same ones.

    Published sizes: the defaults, 256 examples to train on and 1,280 to test; also vocabularies of 512 to 8,192. Keys
    are the first half of tokens 0 to V - 2, values the others, and no two keys have the same value.

    Args:
        count: Sequences.
        generator: Draws them.
        vocab_size: V, at least 3.
        length: Tokens of a sequence, even.
        facts_seed: Seed of the values.

    Returns:
        The sequences, without distances; `chance` is that of guessing among all values.

    Raises:
        ValueError: A size breaks its rule.
    """
    check_sizes(1, count=count)
    check_sizes(0, facts_seed=facts_seed)
    check_sizes(3, vocab_size=vocab_size)
    check(length % 2 == 0 and length >= 2, "length", "even and at least 2", length)
    keys = (vocab_size - 1) // 2
    values = vocab_size - 1 - keys
    meant = keys + np.random.default_rng(facts_seed).permutation(values)[:keys]
    input_ids, labels, distances = empty(count, length, filler=vocab_size - 1)
    input_ids[:, ::2] = generator.integers(keys, size=(count, length // 2))
    labels[:, 1::2] = meant[input_ids[:, ::2]]
    return Examples(input_ids, labels, distances, vocab_size, chance=1 / values)
