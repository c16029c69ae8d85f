"""Make the default tokenizers: trained on texts, or of bytes."""

import hashlib
import json
import logging
import string
import sys
from collections import Counter
from collections.abc import Iterable
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_hybrid.data.cache import cache_root, cached_folder

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

__all__ = [
    "CAPITAL",
    "JOIN",
    "LITERAL",
    "MASK_TOKEN",
    "MIN_VOCAB_SIZE",
    "SPECIAL_TOKENS",
    "TOKENIZER_TYPES",
    "add_mask_token",
    "add_sentinels",
    "byte_tokenizer",
    "is_marked",
    "marked_bytes",
    "sentinel_names",
    "train_tokenizer",
]

logger = logging.getLogger(__name__)

SPECIAL_TOKENS = ("<pad>", "</s>", "<unk>")
"""Each id is the position here: padding 0 (also the decoder's first input), end 1, unknown 2."""
MASK_TOKEN = "<mask>"
"""The mask token that `add_mask_token` adds, BART's."""
MIN_VOCAB_SIZE = len(SPECIAL_TOKENS) + 256
TOKENIZER_TYPES = ("bpe", "marked", "words", "bytes")
JOIN, CAPITAL, LITERAL = "⁀", "⇧", "\u2060"
"""The marks of ``marked`` tokenizers: no space follows, the next letter is a capital, the mark before is text."""
_FORMAT = 1  # part of the cache key: raise it when the same texts give another tokenizer


def train_tokenizer(
    texts: Iterable[str],
    vocab_size: int,
    *,
    tokenizer_type: str = "bpe",
    cache_dir: str | None = None,
    fingerprint: str | None = None,
) -> "PreTrainedTokenizerFast":
    r"""Train a tokenizer with T5's special ids: padding 0, ``</s>`` 1, unknown 2.

    Every encoded text ends in ``</s>``. ``bpe``, byte-level byte pair encoding, encodes any text, and
    ``decode(encode(text), skip_special_tokens=True) == text`` exactly, including line breaks and runs of spaces; text
    that looks like a special token is encoded as characters. ``marked`` is the same, but words are spelt alike
    wherever they stand, so that a model need not learn that ``length`` in ``focal_length``, at the beginning of a line
    or as ``Length`` is the word ``length``: a space before each word is part of its first token, and marks say where
    the text has none, or a capital letter. ``words`` splits at whitespace; frequent words have small ids, and the
    rarest become unknown. The same texts give the same tokenizer.

    Args:
        texts: Training texts, read once.
        vocab_size: Largest number of entries, including the three special tokens and, for ``bpe``, the 256 bytes. Few
            texts may not fill it; ``len(tokenizer)`` is the actual size.
        tokenizer_type: ``"bpe"``, ``"marked"`` or ``"words"``.
        cache_dir: Where to keep the tokenizer if there is a ``fingerprint``; the cache of `datasets` when None.
        fingerprint: Names the texts. The same fingerprint, type and size return the cached tokenizer without reading
            ``texts``; None caches nothing.

    Returns:
        A tokenizer for ``save_pretrained`` and ``AutoTokenizer.from_pretrained``.

    Raises:
        ValueError: ``vocab_size`` is too small, the type is unknown, or there is no text.
    """
    if isinstance(vocab_size, bool) or not isinstance(vocab_size, int) or vocab_size < MIN_VOCAB_SIZE:
        raise ValueError(
            f"vocab_size must be an integer of at least {MIN_VOCAB_SIZE} "
            f"({len(SPECIAL_TOKENS)} special tokens and 256 bytes); got {vocab_size!r}"
        )
    if tokenizer_type not in ("bpe", "marked", "words"):
        raise ValueError(f"tokenizer_type must be bpe, marked or words for training; got {tokenizer_type!r}")
    if fingerprint is None:
        return _train(texts, vocab_size, tokenizer_type)
    from transformers import PreTrainedTokenizerFast

    facts = [_FORMAT, vocab_size, fingerprint, *([tokenizer_type] if tokenizer_type != "bpe" else [])]
    key = hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16]

    def build(folder: Path) -> None:
        _train(texts, vocab_size, tokenizer_type).save_pretrained(str(folder))

    folder = cached_folder(cache_root(cache_dir) / "tokenizers" / f"{vocab_size}-{key}", build)
    return PreTrainedTokenizerFast.from_pretrained(str(folder))


def byte_tokenizer() -> "PreTrainedTokenizerFast":
    """Return a tokenizer with one token per UTF-8 byte and the special tokens of `train_tokenizer`."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    entries = [*SPECIAL_TOKENS, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(models.BPE(vocab={entry: place for place, entry in enumerate(entries)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIAL_TOKENS))
    return _completed(tokenizer)


def is_marked(tokenizer: "PreTrainedTokenizerBase") -> bool:
    """Whether a tokenizer is of the type ``marked``."""
    decoder: Any = getattr(getattr(tokenizer, "backend_tokenizer", None), "decoder", None)
    return type(decoder).__name__ == "Sequence" and JOIN + LITERAL in decoder.__getstate__().decode()


def marked_bytes(token: str) -> int:
    """Return how many bytes a token of a ``marked`` tokenizer adds to a text.

    A mark adds none, and takes a space back; `LITERAL` gives both to the mark before it.
    """
    from tokenizers import pre_tokenizers

    shown = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    counts = [token.count(shown.pre_tokenize_str(mark)[0][0]) for mark in (JOIN, CAPITAL, LITERAL)]
    return len(token) - 4 * (counts[0] + counts[1]) + counts[2]


def leave_texts_open(tokenizer: "PreTrainedTokenizerFast") -> "PreTrainedTokenizerFast":
    """Let a tokenizer no longer end texts, so that a language model continues a prompt; changes it, and returns it.

    The saved tokenizer says ``separate_documents``, for `tokenize_texts` to put the end token between documents.
    """
    tokenizer.backend_tokenizer.post_processor = None
    tokenizer.init_kwargs["separate_documents"] = True
    return tokenizer


def sentinel_names(count: int) -> list[str]:
    """Return the names of the first sentinels, T5's special tokens for hidden spans."""
    return [f"<extra_id_{number}>" for number in range(count)]


def add_sentinels(tokenizer: "PreTrainedTokenizerBase", count: int) -> list[str]:
    """Add those of the first ``count`` sentinels that a tokenizer lacks; return their names."""
    vocab = tokenizer.get_vocab()
    missing = [name for name in sentinel_names(count) if name not in vocab]
    if missing:
        tokenizer.add_special_tokens({"extra_special_tokens": missing}, replace_extra_special_tokens=False)
    return missing


def add_mask_token(tokenizer: "PreTrainedTokenizerBase") -> list[str]:
    """Add `MASK_TOKEN` to a tokenizer without a mask token; return the names of what was added."""
    if tokenizer.mask_token is not None:
        return []
    tokenizer.add_special_tokens({"mask_token": MASK_TOKEN})
    return [MASK_TOKEN]


def _train(texts: Iterable[str], vocab_size: int, tokenizer_type: str) -> "PreTrainedTokenizerFast":
    remaining = iter(texts)
    if (first := next(filter(None, remaining), None)) is None:
        raise ValueError("texts must hold at least one text that is not empty; got none")
    texts = chain([first], remaining)
    if tokenizer_type == "words":
        tokenizer = _train_words(texts, vocab_size)
    else:
        tokenizer = _train_bpe(texts, vocab_size, marked=tokenizer_type == "marked")
    if tokenizer.get_vocab_size() < vocab_size:
        logger.warning("the texts give only %d of vocab_size=%d entries", tokenizer.get_vocab_size(), vocab_size)
    return _completed(tokenizer)


def _train_bpe(texts: Iterable[str], vocab_size: int, *, marked: bool) -> "Tokenizer":
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            # One token per digit: otherwise unseen numbers are split at random positions.
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    if marked:
        _add_marks(tokenizer)
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=sys.stderr.isatty(),  # elsewhere it prints empty lines
    )
    tokenizer.train_from_iterator(iter(texts), trainer=trainer)
    return tokenizer


def _add_marks(tokenizer: "Tokenizer") -> None:
    """Let a tokenizer mark missing spaces and capitals; `LITERAL` follows what is such a mark in the text itself."""
    from tokenizers import Regex, decoders, normalizers

    marks, joins = (
        (JOIN, CAPITAL),
        (
            r"(?<=[\p{Ll}\p{Nd}])(?=\p{Lu})",  # camelCase
            r"(?<=[^ \p{L}])(?<!\p{L}['’])(?=\p{L})",  # but not don't
        ),
    )
    capitals = {letter: f"{CAPITAL} {letter.lower()}" for letter in string.ascii_uppercase}
    tokenizer.normalizer = normalizers.Sequence(
        [
            *(normalizers.Replace(mark, mark + LITERAL) for mark in marks),
            normalizers.Prepend(f"{JOIN} "),
            *(normalizers.Replace(Regex(place), f"{JOIN} ") for place in joins),
            *(normalizers.Replace(Regex(rf"(?<!\p{{L}}){one}(?=\p{{Ll}})"), new) for one, new in capitals.items()),
        ]
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.ByteLevel(),
            *(decoders.Replace(new, one) for one, new in capitals.items()),
            decoders.Replace(f"{JOIN} ", ""),
            *(decoders.Replace(mark + LITERAL, mark) for mark in marks),
        ]
    )


def _train_words(texts: Iterable[str], vocab_size: int) -> "Tokenizer":
    from tokenizers import Tokenizer, models, pre_tokenizers

    counts = Counter(word for text in texts for word in text.split())
    for special in SPECIAL_TOKENS:  # WikiText writes <unk> for rare words
        counts.pop(special, None)
    words = sorted(counts, key=lambda word: (-counts[word], word))
    entries = [*SPECIAL_TOKENS, *words][:vocab_size]
    vocab = {entry: place for place, entry in enumerate(entries)}
    tokenizer = Tokenizer(models.WordLevel(vocab=vocab, unk_token=SPECIAL_TOKENS[2]))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return tokenizer


def _completed(tokenizer: "Tokenizer") -> "PreTrainedTokenizerFast":
    """Make the tokenizer end every text with the end token, and register the special tokens."""
    from tokenizers import processors
    from transformers import PreTrainedTokenizerFast

    pad, eos, unk = SPECIAL_TOKENS
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"$A {eos}", pair=f"$A {eos} $B {eos}", special_tokens=[(eos, SPECIAL_TOKENS.index(eos))]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=pad,
        eos_token=eos,
        unk_token=unk,
        clean_up_tokenization_spaces=False,
        split_special_tokens=True,
    )
