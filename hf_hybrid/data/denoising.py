"""Hide parts of a text for a model to restore: the noise of T5, BART and BERT, and the pieces that it is put on.

Each function is pure: what it draws comes from the generator that it is given. Shapes: L tokens of a piece · N spans.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from hf_hybrid.data.preprocessing import IGNORED_LABEL, Tokens
from hf_hybrid.data.tokenizer import sentinel_names

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = [
    "DENSITIES",
    "MEAN_SPAN_LENGTH",
    "OBJECTIVES",
    "Denoiser",
    "corrupt_spans",
    "cut_into_pieces",
    "infill_text",
    "mask_words",
    "most_spans",
    "noise_generator",
    "noise_mask",
    "replace_spans",
]

Array = np.ndarray[Any, Any]
DENSITIES = {"span_corruption": 0.15, "text_infilling": 0.3, "masked_words": 0.15}
"""Objective → the share of tokens that its paper hides."""
OBJECTIVES = tuple(DENSITIES)
MEAN_SPAN_LENGTH = 3.0
"""Tokens of a hidden span, on average: T5's, section 3.3.4, and BART's, section 2.2."""
FEWEST = 2
"""Tokens of the shortest piece that has both something to hide and something to read."""


def noise_generator(seed: int, epoch: int, number: int) -> np.random.Generator:
    """Return the generator of one piece's noise in one epoch, whoever draws it and whatever was drawn before."""
    return np.random.default_rng([seed, epoch, number])


def noise_mask(
    length: int,
    generator: np.random.Generator,
    *,
    density: float = DENSITIES["span_corruption"],
    mean_length: float = MEAN_SPAN_LENGTH,
) -> Array:
    """Draw the spans of a text that T5 hides (``random_spans_noise_mask`` of its published code; the paper's 3.1.4).

    round(L density) tokens are noise, at least one and never all. They form round(noise / mean_length) spans, at least
    one, and no more than there are tokens of either kind. All divisions into such spans are equally likely, and so are
    those of the rest; the two alternate, the rest first, so that the text ends in noise.

    Args:
        length: L, at least 2.
        generator: Draws the divisions.
        density: Share of noise, between 0 and 1.
        mean_length: Mean tokens of a span of noise.

    Returns:
        `(L,)`, true for noise.

    Raises:
        ValueError: The text is too short.
    """
    if length < FEWEST:
        raise ValueError(f"length must be at least {FEWEST} tokens, one to hide and one to read; got {length}")
    count, spans = _counts(length, density, mean_length)
    noise, rest = _divide(count, spans, generator), _divide(length - count, spans, generator)
    sizes = np.stack([rest, noise], axis=1).ravel()
    return np.repeat(np.arange(2 * spans) % 2 == 1, sizes)


def _share(length: int, density: float, most: int) -> int:
    """Return how many of so many tokens are hidden: round(L density), at least one if any may be."""
    return min(max(round(length * density), 1), most)


def _counts(length: int, density: float, mean_length: float) -> tuple[int, int]:
    """Return how many tokens are noise, and how many spans they form."""
    count = _share(length, density, length - 1)
    return count, min(max(round(count / mean_length), 1), count, length - count)


def _divide(total: int, parts: int, generator: np.random.Generator) -> Array:
    """Divide a number into positive parts; all ways are equally likely."""
    cuts = np.sort(generator.choice(total - 1, parts - 1, replace=False)) + 1
    return np.diff(np.concatenate([[0], cuts, [total]]))


def most_spans(length: int, *, density: float, mean_length: float) -> int:
    """Return how many spans `noise_mask` makes in a text of so many tokens; shorter ones have no more."""
    return _counts(length, density, mean_length)[1]


def replace_spans(tokens: Tokens, mask: Array, sentinels: Sequence[int]) -> Array:
    """Replace each run of masked tokens by one sentinel, the first run by the first sentinel.

    Args:
        tokens: `(L,)`.
        mask: `(L,)`, true for what is replaced.
        sentinels: Ids of the sentinels, in order.

    Returns:
        The other tokens and the sentinels, in the text's order.

    Raises:
        ValueError: There are more runs than sentinels.
    """
    starts = mask & ~np.concatenate([[False], mask[:-1]])
    spans = int(starts.sum())
    if spans > len(sentinels):
        raise ValueError(f"sentinels must be as many as there are spans, {spans}; got {len(sentinels)}")
    replaced = np.array(tokens)
    replaced[starts] = sentinels[:spans]
    return replaced[starts | ~mask]


def corrupt_spans(
    tokens: Tokens,
    generator: np.random.Generator,
    sentinels: Sequence[int],
    *,
    density: float = DENSITIES["span_corruption"],
    mean_length: float = MEAN_SPAN_LENGTH,
) -> tuple[Array, Array]:
    """Corrupt spans as T5 does (Raffel et al. 2020, section 3.1.4 and figure 2).

    In the inputs, each span of noise becomes one sentinel; in the targets, each span of the rest. So a span in the
    targets follows the sentinel that replaces it in the inputs. Neither has an end token yet.

    Note:
        The paper's figure ends its targets in one more sentinel, since its text ends in words that are kept. The masks
        of the published code always end in noise, so that their targets have no such sentinel.

    Args:
        tokens: `(L,)`.
        generator: Draws the noise, see `noise_mask`.
        sentinels: Ids of the sentinels, ``<extra_id_0>`` first.
        density: Share of noise.
        mean_length: Mean tokens of a span.

    Returns:
        Inputs and targets; together never longer than L and twice the number of spans.

    Raises:
        ValueError: The text is too short, or has more spans than there are sentinels.
    """
    mask = noise_mask(len(tokens), generator, density=density, mean_length=mean_length)
    return replace_spans(tokens, mask, sentinels), replace_spans(tokens, ~mask, sentinels)


def infill_text(
    tokens: Tokens,
    generator: np.random.Generator,
    mask_id: int,
    *,
    density: float = DENSITIES["text_infilling"],
    mean_length: float = MEAN_SPAN_LENGTH,
) -> tuple[Array, Array]:
    """Hide spans as BART's text infilling does (Lewis et al. 2020, section 2.2).

    The lengths of spans are drawn from a Poisson distribution until they hold round(L density) tokens, at least one;
    the last one is cut. Each span becomes one mask token, one of length zero too, which is put between two tokens.
    All arrangements of the spans among the other tokens are equally likely.

    Note:
        Spans of length zero are left out where they would make the inputs longer than the text, which they hardly ever
        do in more than ten tokens: so positions that suffice for a text suffice for its inputs.

    Args:
        tokens: `(L,)`.
        generator: Draws lengths and places.
        mask_id: Id of the mask token.
        density: Share of the tokens that is hidden.
        mean_length: Mean tokens of a span.

    Returns:
        Inputs, and targets: the whole text.

    Raises:
        ValueError: The text is empty.
    """
    text = np.asarray(tokens)
    if not len(text):
        raise ValueError("tokens must hold at least one; got none")
    lengths = _span_lengths(_share(len(text), density, len(text)), mean_length, generator)
    kept, spans = len(text) - lengths.sum(), len(lengths)
    places = np.sort(generator.choice(kept + spans, spans, replace=False))
    # before a hidden token stand the kept ones before its span, and the hidden ones before it
    hidden = np.repeat(places - np.arange(spans), lengths) + np.arange(lengths.sum())
    inputs = np.full(kept + spans, mask_id, dtype=text.dtype)
    is_text = np.ones(len(inputs), dtype=bool)
    is_text[places] = False
    inputs[is_text] = np.delete(text, hidden)
    return inputs, text


def _span_lengths(total: int, mean_length: float, generator: np.random.Generator) -> Array:
    """Draw spans that hold so many tokens, in random order."""
    lengths = generator.poisson(mean_length, size=0)
    while lengths.sum() < total:
        lengths = np.concatenate(
            [lengths, generator.poisson(mean_length, size=max(8, round(2 * total / mean_length)))]
        )
    ends = np.cumsum(lengths)
    lengths = lengths[: int(np.searchsorted(ends, total)) + 1]
    lengths[-1] -= lengths.sum() - total
    empty = np.flatnonzero(lengths == 0)
    room = total - (len(lengths) - len(empty))
    return generator.permutation(np.delete(lengths, empty[room:]))


def mask_words(
    tokens: Tokens,
    generator: np.random.Generator,
    mask_id: int,
    vocabulary: Array,
    fixed: Sequence[int] = (),
    *,
    density: float = DENSITIES["masked_words"],
) -> tuple[Array, Array]:
    """Mask words as BERT does (Devlin et al. 2019, section 3.1).

    round(L density) tokens are to be guessed, at least one if there is any. Of these, 80 % become the mask token,
    10 % a random word, and 10 % stay.

    Args:
        tokens: `(L,)`.
        generator: Draws tokens, what becomes of each, and random words.
        mask_id: Id of the mask token.
        vocabulary: Ids of the random words.
        fixed: Ids that are never masked: special tokens.
        density: Share of the tokens that is to be guessed.

    Returns:
        Inputs, and labels: the token where it is to be guessed, elsewhere -100. Both `(L,)`.
    """
    text = np.asarray(tokens)
    free = np.flatnonzero(~np.isin(text, fixed))
    chosen = generator.choice(free, _share(len(text), density, len(free)), replace=False)
    fate = generator.random(len(chosen))
    inputs, labels = text.copy(), np.full(len(text), IGNORED_LABEL, dtype=text.dtype)
    labels[chosen] = text[chosen]
    words = generator.choice(vocabulary, len(chosen))
    inputs[chosen] = np.where(fate < 0.8, mask_id, np.where(fate < 0.9, words, text[chosen]))
    return inputs, labels


def cut_into_pieces(rows: Iterable[Any], size: int, *, joined: bool = False) -> Iterator[Any]:
    """Cut documents into pieces, each of one document; drop what has a single token.

    Args:
        rows: The tokens of each document, or if they are not joined the `range` of their places.
        size: Tokens of a piece; a document's last may have fewer.
        joined: Whether the rows are parts of one document, such as the lines of a file.

    Yields:
        The pieces, in order.
    """
    held: Any = np.empty(0, dtype=np.int32)
    for row in rows:
        tokens = np.concatenate([held, row]) if joined else row
        end = len(tokens) // size * size if joined else len(tokens)
        held = tokens[end:]
        for start in range(0, end, size):
            piece = tokens[start : min(start + size, end)]
            if len(piece) >= FEWEST:
                yield piece
    if len(held) >= FEWEST:
        yield held


@dataclass(frozen=True)
class Denoiser:
    """An objective with its tokens: makes inputs and labels of a piece.

    Attributes:
        objective: One of `OBJECTIVES`.
        density: Share of the tokens that is hidden.
        mean_length: Mean tokens of a hidden span; masked words have none.
        sentinels: Ids of the sentinels.
        mask_id: Id of the mask token.
        vocabulary: Ids of random words.
        special: Ids of special tokens.
        prefix: Ids before each text, such as BERT's ``[CLS]``.
        suffix: Ids behind it, such as the end token.
    """

    objective: str
    density: float
    mean_length: float
    sentinels: tuple[int, ...]
    mask_id: int
    vocabulary: Array
    special: tuple[int, ...]
    prefix: tuple[int, ...]
    suffix: tuple[int, ...]

    @classmethod
    def of(
        cls, tokenizer: "PreTrainedTokenizerBase", objective: str, density: float, mean_length: float
    ) -> "Denoiser":
        """Read the tokens of a tokenizer, to which `add_sentinels` or `add_mask_token` has added what it lacked.

        Inputs and targets of an encoder-decoder end in the end token even if the tokenizer adds none by itself.
        """
        prefix, suffix = text_frame(tokenizer)
        if not suffix and objective != "masked_words":
            suffix = (tokenizer.eos_token_id,)
        names = sentinel_names(len(tokenizer))
        vocab = tokenizer.get_vocab()
        special = tuple(sorted({vocab[name] for name in names if name in vocab} | set(tokenizer.all_special_ids)))
        sentinels = tuple(vocab[name] for name in names if name in vocab)
        words = np.setdiff1d(np.array(sorted(vocab.values())), special)
        mask_id = -1 if tokenizer.mask_token_id is None else tokenizer.mask_token_id
        return cls(objective, density, mean_length, sentinels, mask_id, words, special, prefix, suffix)

    @property
    def frame(self) -> int:
        """Tokens that each text has besides its own."""
        return len(self.prefix) + len(self.suffix)

    def takes(self, piece: Tokens) -> bool:
        """Whether a piece has anything to hide: at least one token that is not special."""
        return not np.isin(piece, self.special).all()

    def __call__(self, piece: Tokens, generator: np.random.Generator) -> dict[str, list[int]]:
        """Return ``input_ids`` and ``labels``, with the special tokens around them; labels are -100 where none is."""
        spans = {"density": self.density, "mean_length": self.mean_length}
        if self.objective == "span_corruption":
            inputs, labels = corrupt_spans(piece, generator, self.sentinels, **spans)
        elif self.objective == "text_infilling":
            inputs, labels = infill_text(piece, generator, self.mask_id, **spans)
        else:
            chosen = (self.mask_id, self.vocabulary, self.special)
            inputs, labels = mask_words(piece, generator, *chosen, density=self.density)
        is_guessed = self.objective != "masked_words"
        around = [list(ids) if is_guessed else [IGNORED_LABEL] * len(ids) for ids in (self.prefix, self.suffix)]
        return {
            "input_ids": [*self.prefix, *inputs.tolist(), *self.suffix],
            "labels": [*around[0], *labels.tolist(), *around[1]],
        }


def text_frame(tokenizer: "PreTrainedTokenizerBase") -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the special tokens that a tokenizer puts before and behind a text.

    Raises:
        ValueError: The tokenizer cannot encode a word that it does not know.
    """
    try:
        bare = tokenizer("a", add_special_tokens=False)["input_ids"]
    except Exception as error:  # tokenizers has no other class
        raise ValueError(f"the tokenizer must have tokens for any text; it has none for 'a': {error}") from error
    full = tokenizer("a")["input_ids"]
    start = next(place for place in range(len(full)) if full[place : place + len(bare)] == bare)
    return tuple(full[:start]), tuple(full[start + len(bare) :])
