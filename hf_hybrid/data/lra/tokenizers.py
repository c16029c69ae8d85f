"""Tokenizers with the ids of the Long Range Arena's tasks, so that a trained checkpoint reads plain texts."""

from typing import TYPE_CHECKING

from hf_hybrid.data.lra.listops import LISTOPS_TOKENS, listops_ids
from hf_hybrid.data.lra.readers import byte_ids
from hf_hybrid.data.lra.tasks import LRA

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

__all__ = ["check_tokenizer", "lra_tokenizer"]

_SPECIAL = ("<pad>", "</s>", "<unk>")
_SAMPLES = {"lra_listops": "[MAX 2 9 [MIN 4 7 ] 0 ]", "lra_listops_200": "[MAX 2 9 [MIN 4 7 ] 0 ]"}
_TEXT = "Aé 0z!"


def lra_tokenizer(name: str) -> "PreTrainedTokenizerFast":
    """Make the tokenizer of a task of tokens: ListOps' words, or bytes with ByT5's ids; nothing is put around a text.

    Args:
        name: A key of `LRA`, of a task with a vocabulary.
    """
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    if name in _SAMPLES:
        tokenizer = Tokenizer(models.WordLevel({token: place for place, token in enumerate(LISTOPS_TOKENS)}))
        # parentheses group an operator with one argument after the other, and say nothing more
        tokenizer.normalizer = normalizers.Sequence([normalizers.Replace(sign, " ") for sign in "()"])
        tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>")
    # ByteLevel shows a printable byte as itself, and the others as the characters from 256 on
    shown = set(pre_tokenizers.ByteLevel.alphabet())
    others = iter(range(256, 512))
    signs = [chr(byte) if chr(byte) in shown else chr(next(others)) for byte in range(256)]
    entries = [*_SPECIAL, *signs]
    tokenizer = Tokenizer(models.BPE({entry: place for place, entry in enumerate(entries)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="</s>", unk_token="<unk>")


def check_tokenizer(tokenizer: "PreTrainedTokenizerBase", name: str, source: str) -> None:
    """Refuse a tokenizer that gives a task's tokens other ids.

    Args:
        tokenizer: The tokenizer.
        name: A key of `LRA`, of a task with a vocabulary.
        source: Where the tokenizer is from, for the message.

    Raises:
        ValueError: It does.
    """
    text = _SAMPLES.get(name, _TEXT)
    wanted = listops_ids(text.split()) if name in _SAMPLES else byte_ids(text).tolist()
    try:
        found = tokenizer(text, add_special_tokens=False)["input_ids"]
    except Exception:  # tokenizers raises no other kind for a word that a vocabulary lacks
        found = None
    if found != wanted:
        kind = "the words of ListOps" if name in _SAMPLES else "bytes, with ByT5's ids"
        raise ValueError(
            f"{source} has another vocabulary than {name}, whose {LRA[name].vocab_size} tokens are {kind}: it "
            + (f"cannot read {text!r}" if found is None else f"reads {text!r} as {found}, and not as {wanted}")
        )
