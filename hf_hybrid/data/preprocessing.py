"""Turn text into model inputs, and compute the baselines that a model must beat."""

import random
import re
import statistics
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = [
    "IGNORED_LABEL",
    "group_into_blocks",
    "guess_labels",
    "lead_baseline",
    "majority_label",
    "plain_baselines",
    "random_summaries",
    "sliding_windows",
    "split_sentences",
    "tokenize_sentences",
    "tokenize_summarization",
    "tokenize_texts",
    "unigram_losses",
]

IGNORED_LABEL = -100
"""The label that PyTorch's and transformers' losses skip."""
Tokens = Sequence[int] | np.ndarray[Any, Any]
_CHARACTERS = 2**20
"""Characters per call of a tokenizer, which needs some 200 bytes for each token of a call."""

# A possible end of a sentence: closing punctuation, perhaps a quote or bracket, then space and the start of the next.
_BOUNDARY = re.compile(r"""(?:[.!?…]+["'”’)\]]*|[。！？]["”’）]*)(?:\s+(?=["'“‘(\[]*[^\Wa-z_])|(?<=[。！？])|$)""")
_ABBREVIATIONS = frozenset(
    re.findall(
        r"\S+",
        "al approx ca cf chap ch dept dr ed eds eq eqs e.g fig figs gen gov hon i.e inc jr lt ltd mr mrs ms mt p pp "
        "prof resp rev sen sgt sr st u.k u.s vol vols vs viz",
    )
)


def tokenize_summarization(
    batch: Mapping[str, Sequence[str]],
    tokenizer: "PreTrainedTokenizerBase",
    *,
    text_column: str,
    summary_column: str | None,
    max_source_length: int,
    max_target_length: int,
    source_prefix: str | None = "",
    pad_to_max_length: bool = False,
    ignore_pad_token_for_loss: bool = True,
) -> dict[str, Any]:
    """Tokenize a batch of documents and summaries for a sequence-to-sequence model.

    Made for ``Dataset.map(..., batched=True)``.

    Args:
        batch: Columns of strings.
        tokenizer: Any tokenizer; it truncates to the maximum lengths.
        text_column: Column of the documents.
        summary_column: Column of the summaries; there are no labels when None.
        max_source_length: Longest document, in tokens.
        max_target_length: Longest summary, in tokens.
        source_prefix: Text before every document, such as ``"summarize: "``.
        pad_to_max_length: Pad to the maximum lengths; otherwise a collator pads each batch.
        ignore_pad_token_for_loss: Label padding with -100, which the loss skips. The end token keeps its label even
            if the tokenizer also pads with it.

    Returns:
        The tokenizer's output for the documents (``input_ids``, ``attention_mask``, ...) and ``labels``, each a list
        with one entry per row.

    Raises:
        ValueError: A maximum length is not a positive integer.
    """
    for flag, value in (("max_source_length", max_source_length), ("max_target_length", max_target_length)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"{flag} must be a positive integer (tokens); got {value!r}")
    padding = "max_length" if pad_to_max_length else False
    documents = [(source_prefix or "") + document for document in batch[text_column]]
    inputs = dict(tokenizer(documents, max_length=max_source_length, padding=padding, truncation=True))
    if summary_column is None:
        return inputs
    targets = tokenizer(
        text_target=list(batch[summary_column]), max_length=max_target_length, padding=padding, truncation=True
    )
    labels = targets["input_ids"]
    if pad_to_max_length and ignore_pad_token_for_loss:
        labels = [
            [token if keep else IGNORED_LABEL for token, keep in zip(row, mask, strict=True)]
            for row, mask in zip(labels, targets["attention_mask"], strict=True)
        ]
    return {**inputs, "labels": labels}


def tokenize_sentences(
    batch: Mapping[str, Sequence[str]],
    tokenizer: "PreTrainedTokenizerBase",
    *,
    columns: Sequence[str],
    max_length: int,
    pad_to_max_length: bool = False,
) -> dict[str, Any]:
    """Tokenize a batch of sentences or pairs of sentences for a classifier.

    Made for ``Dataset.map(..., batched=True)``.

    Args:
        batch: Columns of strings.
        tokenizer: Any tokenizer; it truncates to the maximum length, the longer sentence first.
        columns: Column of the sentence, or of both.
        max_length: Longest input in tokens, both sentences together.
        pad_to_max_length: Pad to the maximum length; otherwise a collator pads each batch.

    Returns:
        The tokenizer's output (``input_ids``, ``attention_mask``, ...), a list for each row.
    """
    sentences = [list(batch[column]) for column in columns]
    padding = "max_length" if pad_to_max_length else False
    return dict(tokenizer(*sentences, padding=padding, max_length=max_length, truncation=True))


def tokenize_texts(
    batch: Mapping[str, Sequence[str]],
    tokenizer: "PreTrainedTokenizerBase",
    *,
    column: str,
    are_lines: bool = False,
    as_text: bool = False,
) -> dict[str, Any]:
    """Tokenize a batch of texts for a language model.

    Made for ``Dataset.map(..., batched=True)``.

    Args:
        batch: Columns of strings.
        tokenizer: Any tokenizer.
        column: Column of the texts.
        are_lines: Whether each text is one line with its line break. Otherwise the tokenizer adds its special tokens,
            or the end token if it is one of `leave_texts_open`.
        as_text: Whether names of special tokens in a text are text like any other.

    Returns:
        For each row ``input_ids``, of any length, and ``num_bytes``, the length of the text in UTF-8.

    Raises:
        ValueError: A value is not text.
    """
    texts = list(batch[column])
    for text in texts:
        if not isinstance(text, str):
            raise ValueError(
                f"column {column!r} must hold text in every row; got {type(text).__name__}: {text!r:.80}. "
                "drop_empty_rows drops rows without text"
            )
    parts = [_cut_long(text) if are_lines else [text] for text in texts]
    encoded: list[Any] = []
    ends = not are_lines and tokenizer.init_kwargs.get("separate_documents", False)
    options = {"split_special_tokens": True} if as_text else {}
    for some in _by_size(list(chain.from_iterable(parts))):
        ids = tokenizer(some, add_special_tokens=not are_lines, verbose=False, **options)["input_ids"]
        rows = ([*row, tokenizer.eos_token_id] for row in ids) if ends else ids
        encoded += (np.asarray(row, dtype=np.int32) for row in rows)
    remaining = iter(encoded)
    tokens = [np.concatenate([next(remaining) for _ in some]) for some in parts]
    return {"input_ids": tokens, "num_bytes": [len(text.encode()) for text in texts]}


def _cut_long(text: str) -> list[str]:
    """Cut a text into parts of at most `_CHARACTERS`, before a space if a part has one: a file may be one line."""
    parts, start = [], 0
    while len(text) - start > _CHARACTERS:
        space = text.rfind(" ", start + 1, start + _CHARACTERS)
        end = start + _CHARACTERS if space < 0 else space
        parts.append(text[start:end])
        start = end
    return [*parts, text[start:]]


def _by_size(texts: Sequence[str]) -> Iterator[list[str]]:
    """Divide texts into groups of one text or at most `_CHARACTERS`: a batch may hold a thousand books."""
    some: list[str] = []
    size = 0
    for text in texts:
        size += len(text)
        if some and size > _CHARACTERS:
            yield some
            some, size = [], len(text)
        some.append(text)
    yield some


def group_into_blocks(batch: Mapping[str, Sequence[Tokens]], *, block_size: int) -> dict[str, Any]:
    """Join the tokens of a batch of texts and cut them into blocks; drop the incomplete last one.

    Args:
        batch: ``input_ids`` of each text.
        block_size: Tokens of a block.

    Returns:
        ``input_ids`` of each block.
    """
    tokens = np.concatenate([np.asarray(ids, dtype=np.int32) for ids in batch["input_ids"]])
    count = len(tokens) // block_size
    return {"input_ids": list(tokens[: count * block_size].reshape(count, block_size))}


def sliding_windows(tokens: Tokens, length: int, context: int) -> list[dict[str, Any]]:
    """Cut a text into overlapping windows that score each token but the first exactly once.

    Windows start ``length - context`` tokens apart. The first ``context`` tokens of a window are not scored (SPADE,
    appendix C.3); in the first window it is only the first token. So each scored token sees at least ``context``
    tokens before it, or all there are.

    Args:
        tokens: The complete text.
        length: Tokens of a window; the last may be shorter.
        context: Unscored tokens at the start of a window; fewer than ``length``.

    Returns:
        ``input_ids`` and ``labels`` of each window: the same tokens, with -100 for labels that are not scored.
    """
    ids = np.asarray(tokens, dtype=np.int64)
    windows = []
    context = max(1, context)  # a token needs one before it to be predicted from
    for start in range(0, max(1, len(ids) - context), length - context):
        window = ids[start : start + length]
        labels = window.copy()
        labels[: context if start else 1] = IGNORED_LABEL
        windows.append({"input_ids": window, "labels": labels})
    return windows


def split_sentences(text: str) -> list[str]:
    r"""Split text into sentences by punctuation, without a data file.

    ROUGE-Lsum needs one sentence per line: ``"\n".join(split_sentences(text))``. Line breaks end a sentence;
    abbreviations, initials and numbers do not.

    Args:
        text: Any text.

    Returns:
        The non-empty sentences, stripped; whitespace inside a line stays.
    """
    sentences = []
    for line in text.splitlines():
        start = 0
        for boundary in _BOUNDARY.finditer(line):
            words = line[start : boundary.start()].rsplit(maxsplit=1)
            last_word = words[-1].lstrip("([\"'“‘") if words else ""
            is_initial = len(last_word) == 1 and last_word.isupper() and last_word != "I"
            may_be_short = boundary.group().strip() == "." and boundary.end() < len(line)
            if may_be_short and (is_initial or last_word.casefold() in _ABBREVIATIONS):
                continue
            sentences.append(line[start : boundary.end()].strip())
            start = boundary.end()
        sentences.append(line[start:].strip())
    return [sentence for sentence in sentences if sentence]


def plain_baselines(documents: Sequence[str], pool: Sequence[str], *, seed: int = 0) -> dict[str, list[str]]:
    """Summarize documents in two ways that need no model.

    Args:
        documents: The documents.
        pool: The training summaries; their median length in words is the length of a lead.
        seed: Seed of the random draw.

    Returns:
        The name of each baseline, and its summary of each document.
    """
    length = round(statistics.median(len(summary.split()) for summary in pool))
    return {
        "random training summary": random_summaries(pool, len(documents), seed),
        "lead baseline": [lead_baseline(document, length) for document in documents],
    }


def lead_baseline(document: str, num_words: int) -> str:
    """Return the first words of a document, a summary that needs no model.

    Args:
        document: Any text.
        num_words: Words to keep, separated by whitespace.

    Raises:
        ValueError: ``num_words`` is not positive.
    """
    if num_words < 1:
        raise ValueError(f"num_words must be a positive integer; got {num_words!r}")
    return " ".join(document.split(maxsplit=num_words)[:num_words])


def random_summaries(pool: Sequence[str], count: int, seed: int) -> list[str]:
    """Draw summaries at random, like a model that knows the style and ignores the document.

    Args:
        pool: Summaries to draw from, usually those of the training split.
        count: Number to draw; without repetition if the pool is large enough.
        seed: The same seed draws the same summaries.

    Raises:
        ValueError: The pool is empty, or ``count`` is negative.
    """
    if count < 0:
        raise ValueError(f"count must be zero or more; got {count!r}")
    if count and not pool:
        raise ValueError("pool must hold at least one summary; got none")
    generator = random.Random(seed)
    if count <= len(pool):
        return generator.sample(list(pool), count)
    return generator.choices(list(pool), k=count)


def majority_label(labels: Tokens) -> int:
    """Return the most frequent label, the lowest in a tie: the answer of a classifier that reads nothing.

    Args:
        labels: Ids of the training labels.
    """
    return int(np.argmax(np.bincount(labels)))


def guess_labels(labels: Tokens, count: int, seed: int) -> np.ndarray[Any, Any]:
    """Draw labels as often as they occur in the training split: a stratified guess.

    Args:
        labels: Ids of the training labels.
        count: Number to draw.
        seed: The same seed draws the same labels.
    """
    return np.random.default_rng(seed).choice(np.asarray(labels), size=count)


def unigram_losses(tokens: Tokens, vocab_size: int) -> np.ndarray[Any, Any]:
    """Return the loss of each token for a model that only knows token frequencies.

    -log((count(token) + 1) / (number of tokens + size of the vocabulary)): no token is impossible (Laplace).

    Args:
        tokens: The training text.
        vocab_size: Size of the vocabulary.

    Returns:
        Nats for each token of the vocabulary.
    """
    counts = np.bincount(np.asarray(tokens), minlength=vocab_size) + 1.0
    return -np.log(counts / counts.sum())
