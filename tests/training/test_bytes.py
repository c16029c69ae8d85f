"""Bytes of tokens, for bits per byte: exact where tokens tell of spaces, and what is counted where they do not."""

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from hf_hybrid.data.tokenizer import byte_tokenizer, train_tokenizer
from hf_hybrid.training.scores.pretrain import hidden_bytes

PLAIN = "the old rivers"
TEXTS = [PLAIN, "1,000 of it isn't (x) - [a]: b.c/d", "the \u6771 river, \U0001f600!", "a  b\n\nc"]
WORD_PIECES = ["the", "old", "river", "##s", "isn", "it", "of", "1", "000", *"abcdtx", *".,:'!/()[]-"]


def _counted(tokenizer, text):
    return hidden_bytes(tokenizer, np.array([-100, *tokenizer(text, add_special_tokens=False)["input_ids"]]))


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("kind", ["bytes", "bpe", "marked"])
def test_tokens_of_bytes_have_those_of_any_text(kind, text):
    """Also of what their training text lacks."""
    tokenizer = byte_tokenizer() if kind == "bytes" else train_tokenizer([PLAIN] * 20, 300, tokenizer_type=kind)
    assert _counted(tokenizer, text) == len(text.encode())


@pytest.mark.parametrize("byte_fallback", [True, False])
@pytest.mark.parametrize("text", TEXTS[:3])
def test_unigrams_have_the_bytes_of_their_text(text, byte_fallback):
    """With the space that joins it to a text before it, and but for the characters that are unknown."""
    known = ["\u2581", "\u2581the", "river", *sorted(set("".join(TEXTS[:2])) - {" "}), "!"]
    pieces = [(piece, -2.0) for piece in known] + [(f"<0x{byte:02X}>", -9.0) for byte in range(256)]
    tokenizer = Tokenizer(models.Unigram([("<unk>", 0.0), *pieces], unk_id=0, byte_fallback=byte_fallback))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])
    counted = _counted(PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>"), text)
    held = text if byte_fallback else text.replace("\u6771", "").replace("\U0001f600", "")
    assert counted == len(f" {held}".encode())


@pytest.mark.parametrize(
    ("text", "counted"),
    [
        (PLAIN, " the old rivers"),
        ("The Old rivers", " the old rivers"),
        ("1,000 of it isn't (x)", " 1, 000 of it isn ' t ( x )"),
        ("the \u6771 river, \U0001f600!", " the river,!"),
        ("the unknown river", " the river"),
    ],
)
def test_word_pieces_count_a_space_before_each_word(text, counted):
    """Also where the text has none, for the pieces do not say so; and nothing for a word that is unknown.

    Commas and the marks that end sentences have none, as the tokenizer joins them when it decodes.
    """
    vocabulary = {piece: number for number, piece in enumerate(["[UNK]", "[PAD]", *WORD_PIECES])}
    tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    tokenizer.normalizer, tokenizer.pre_tokenizer = normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="[UNK]", pad_token="[PAD]")
    assert _counted(fast, text) == len(counted.encode())
