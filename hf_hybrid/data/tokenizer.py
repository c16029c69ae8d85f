"""Tokenizers for when none is named: trained on texts, or of bytes."""

import hashlib
import json
import logging
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from hf_hybrid.data.cache import cache_root, cached_folder

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

__all__ = ["MIN_VOCAB_SIZE", "SPECIAL_TOKENS", "TOKENIZER_TYPES", "byte_tokenizer", "train_tokenizer"]

logger = logging.getLogger(__name__)

SPECIAL_TOKENS = ("<pad>", "</s>", "<unk>")
"""Their positions are their ids: padding 0 (also the decoder's first input), end 1, unknown 2."""
MIN_VOCAB_SIZE = len(SPECIAL_TOKENS) + 256
TOKENIZER_TYPES = ("bpe", "words", "bytes")
_FORMAT = 1  # part of the cache key: raise it whenever the same texts would give another tokenizer


def train_tokenizer(
    texts: Iterable[str],
    vocab_size: int,
    *,
    tokenizer_type: str = "bpe",
    cache_dir: str | None = None,
    fingerprint: str | None = None,
) -> "PreTrainedTokenizerFast":
    r"""Train a tokenizer with T5's special ids: padding 0, ``</s>`` 1, unknown 2.

    ``</s>`` is appended to every encoded text. With ``bpe``, byte-level byte pair encoding, every text can be encoded,
    and ``decode(encode(text), skip_special_tokens=True) == text`` exactly, line breaks and runs of spaces included;
    text that looks like a special token is encoded as the characters that it is. With ``words``, what stands between
    spaces is a token, the more frequent ones have the smaller ids, and the rarest are unknown. The same texts give the
    same tokenizer.

    Args:
        texts: Training texts, read once.
        vocab_size: Largest number of entries, the three special tokens and, for ``bpe``, the 256 bytes included. Few
            texts may not fill it; ``len(tokenizer)`` is the size reached.
        tokenizer_type: ``"bpe"`` or ``"words"``.
        cache_dir: Where a trained tokenizer is kept if there is a ``fingerprint``; the cache of `datasets` when None.
        fingerprint: Names the texts. With the same fingerprint, type and size the kept tokenizer is returned, and
            ``texts`` is not read; without one, nothing is kept.

    Returns:
        A tokenizer that ``save_pretrained`` and ``AutoTokenizer.from_pretrained`` write to and read from a folder.

    Raises:
        ValueError: ``vocab_size`` is too small, the type is not one that is trained, or there is no text.
    """
    if isinstance(vocab_size, bool) or not isinstance(vocab_size, int) or vocab_size < MIN_VOCAB_SIZE:
        raise ValueError(
            f"vocab_size must be an integer of at least {MIN_VOCAB_SIZE} "
            f"({len(SPECIAL_TOKENS)} special tokens and 256 bytes); got {vocab_size!r}"
        )
    if tokenizer_type not in ("bpe", "words"):
        raise ValueError(f"tokenizer_type must be bpe or words to be trained; got {tokenizer_type!r}")
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
    """Return a tokenizer for which every byte of UTF-8 is a token; special tokens as in `train_tokenizer`."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    entries = [*SPECIAL_TOKENS, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(models.BPE(vocab={entry: place for place, entry in enumerate(entries)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIAL_TOKENS))
    return _completed(tokenizer)


def _train(texts: Iterable[str], vocab_size: int, tokenizer_type: str) -> "PreTrainedTokenizerFast":
    read = _Counted(texts)
    tokenizer = _train_words(read, vocab_size) if tokenizer_type == "words" else _train_bpe(read, vocab_size)
    if not read.characters:
        raise ValueError("texts must hold at least one text that is not empty; got none")
    if tokenizer.get_vocab_size() < vocab_size:
        logger.warning(
            "vocab_size=%d was not reached: the texts give %d entries", vocab_size, tokenizer.get_vocab_size()
        )
    return _completed(tokenizer)


def _train_bpe(texts: Iterable[str], vocab_size: int) -> "Tokenizer":
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            # Digits one by one: numbers that were never seen are spelt, not split at random places.
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=True,
    )
    tokenizer.train_from_iterator(iter(texts), trainer=trainer)
    return tokenizer


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
    """Append the end to every text, and name the special tokens."""
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


class _Counted:
    """Iterates over texts and counts their characters."""

    def __init__(self, texts: Iterable[str]) -> None:
        self._texts = texts
        self.characters = 0

    def __iter__(self) -> Iterator[str]:
        for text in self._texts:
            self.characters += len(text)
            yield text
