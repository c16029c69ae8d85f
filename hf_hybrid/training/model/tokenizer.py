"""Load, make or train the tokenizer of a run, and fit a new model's configuration to it."""

import logging
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from datasets import Dataset
from transformers import AutoTokenizer, PreTrainedConfig, PreTrainedTokenizerBase

from hf_hybrid.data.tokenizer import byte_tokenizer, leave_texts_open, train_tokenizer
from hf_hybrid.starters import name_of_starter
from hf_hybrid.training.flags.data import DataArguments
from hf_hybrid.training.flags.model import ModelArguments
from hf_hybrid.training.model.adapters import adapter_base, adapter_folder
from hf_hybrid.training.model.config import check_checkpoint_folder, hub_arguments

logger = logging.getLogger(__name__)

NO_TOKENIZER = "no tokenizer is named and there is no training split to train one on: give --tokenizer_name"
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "vocab.json", "vocab.txt", "spiece.model")


def load_tokenizer(
    model_args: ModelArguments,
    config: PreTrainedConfig,
    resume_from: str | None,
    *,
    ends_texts: bool = True,
    needs_end: bool = True,
    complete: Callable[[PreTrainedTokenizerBase], object] | None = None,
) -> PreTrainedTokenizerBase | None:
    """Load the named tokenizer, or the checkpoint's, or make one of bytes, and fit a new model's configuration to it.

    A resumed run uses its checkpoint's tokenizer instead of training it again.

    Args:
        model_args: The flags.
        config: The model's configuration.
        resume_from: The checkpoint to resume from.
        ends_texts: Whether a new tokenizer ends every text with the end token, or leaves it open to be continued.
        needs_end: Whether a tokenizer must have an end-of-sequence token, also if it has one of padding.
        complete: Adds tokens that the task needs and the tokenizer may lack.

    Returns:
        The tokenizer, or None if one must be trained on the data.

    Raises:
        ValueError: The tokenizer cannot be loaded, has no end-of-sequence token, or is larger than the vocabulary.
    """
    checkpoint = model_args.model_name_or_path
    if (base := adapter_base(model_args)) is not None:
        folder = Path(str(adapter_folder(model_args)))
        has_tokenizer = any((folder / name).is_file() for name in _TOKENIZER_FILES)
        checkpoint = str(folder) if has_tokenizer else base.name
    names = {
        "tokenizer_name": model_args.tokenizer_name,
        "model_name_or_path": checkpoint,
        "resume_from_checkpoint": resume_from,
    }
    flag, name = next(((flag, name) for flag, name in names.items() if name is not None), ("", None))
    tokenizer: PreTrainedTokenizerBase
    if name is None:
        if model_args.tokenizer_type != "bytes":
            return None
        tokenizer = byte_tokenizer() if ends_texts else leave_texts_open(byte_tokenizer())
    else:
        check_checkpoint_folder(flag, name, _TOKENIZER_FILES)
        source = f"--{flag} {name_of_starter(name)}"
        try:
            tokenizer = AutoTokenizer.from_pretrained(name, **hub_arguments(model_args))
        except (OSError, ValueError) as error:
            raise ValueError(f"{source}: no tokenizer could be loaded. {error}") from error
        _complete_special_tokens(tokenizer, source, needs_end=needs_end)
    if complete is not None:
        complete(tokenizer)
    _fit_new_config(model_args, config, tokenizer)
    return tokenizer


def check_tokenizer_source(tokenizer: PreTrainedTokenizerBase | None, data_args: DataArguments) -> None:
    """Raise a ValueError if a tokenizer must be trained and only files are named, none of them for training."""
    if tokenizer is None and data_args.dataset_name is None and data_args.train_file is None:
        raise ValueError(NO_TOKENIZER)


def train_new_tokenizer(
    model_args: ModelArguments,
    config: PreTrainedConfig,
    split: Dataset | None,
    columns: Sequence[str],
    *,
    ends_texts: bool = True,
    complete: Callable[[PreTrainedTokenizerBase], object] | None = None,
) -> PreTrainedTokenizerBase:
    """Train a tokenizer and fit a new model's configuration to it; the last arguments are those of `load_tokenizer`.

    Raises:
        ValueError: There is no training split, or the tokenizer is larger than the vocabulary.
    """
    if split is None:
        raise ValueError(NO_TOKENIZER)
    tokenizer_type = model_args.tokenizer_type or "bpe"
    logger.info(
        "No tokenizer is named: one of up to %d entries (%s) is trained on the training split.",
        model_args.tokenizer_vocab_size,
        tokenizer_type,
    )
    tokenizer = train_tokenizer(
        _texts(split, columns),
        model_args.tokenizer_vocab_size,
        tokenizer_type=tokenizer_type,
        cache_dir=model_args.cache_dir,
        fingerprint=f"{split._fingerprint} {columns}",
    )
    if not ends_texts:
        leave_texts_open(tokenizer)
    if complete is not None:
        complete(tokenizer)
    _fit_new_config(model_args, config, tokenizer)
    return tokenizer


def _texts(split: Dataset, columns: Sequence[str]) -> Iterator[str]:
    for batch in split.select_columns(list(columns)).iter(batch_size=1000):
        for column in columns:
            yield from batch[column]


def _complete_special_tokens(tokenizer: PreTrainedTokenizerBase, source: str, *, needs_end: bool) -> None:
    if tokenizer.eos_token is None and (needs_end or tokenizer.pad_token is None):
        if tokenizer.sep_token is None:
            raise ValueError(f"{source}: the tokenizer has neither an end-of-sequence nor a separator token")
        tokenizer.eos_token = tokenizer.sep_token
        logger.warning("%s: the separator %s serves as end of sequence.", source, tokenizer.eos_token)
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
        logger.warning("%s: the end of sequence %s also serves as padding.", source, tokenizer.pad_token)


def number_of_ids(tokenizer: PreTrainedTokenizerBase) -> int:
    """Return the number of a tokenizer's ids, gaps included: one more than the largest."""
    return max(len(tokenizer), max(tokenizer.get_vocab().values()) + 1)


def _fit_new_config(model_args: ModelArguments, config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase) -> None:
    if model_args.is_new:
        given = model_args.overrides(type(config))
        fit_config_to_tokenizer(config, tokenizer, vocab_size_is_given="vocab_size" in given)


def fit_config_to_tokenizer(
    config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase, *, vocab_size_is_given: bool = False
) -> None:
    """Set the vocabulary size and the special ids of a new model's configuration, in place.

    A field such as ``decoder_start_token_id`` or ``forced_eos_token_id`` keeps its role: if the architecture's default
    is its own ``eos_token_id``, it becomes the tokenizer's. If an encoder-decoder has no default start, generation
    starts with bos, or with pad if the architecture or the tokenizer has no bos (the T5 family).

    Raises:
        ValueError: The given vocabulary is smaller than the tokenizer's.
    """
    ids = number_of_ids(tokenizer)
    if vocab_size_is_given and config.vocab_size < ids:
        raise ValueError(
            f"--config_overrides: vocab_size must be at least the tokenizer's {ids}; got {config.vocab_size}"
        )
    if not vocab_size_is_given:
        config.vocab_size = ids
        if hasattr(config, "decoder_vocab_size"):  # Marian
            config.decoder_vocab_size = ids
    roles = ("eos_token_id", "pad_token_id", "bos_token_id")
    defaults = {role: getattr(config, role, None) for role in roles}
    given = {role: getattr(tokenizer, role) for role in roles}
    derived = [name for name in vars(config) if name.endswith("_token_id") and name not in roles]
    for name in derived:
        role = next((role for role in roles if getattr(config, name) == defaults[role] is not None), None)
        if role is not None and given[role] is not None:
            setattr(config, name, given[role])
    for role in roles:
        if given[role] is not None or defaults[role] is not None:
            setattr(config, role, given[role])
    if config.is_encoder_decoder and getattr(config, "decoder_start_token_id", None) is None:
        starts_with_bos = defaults["bos_token_id"] is not None and given["bos_token_id"] is not None
        config.decoder_start_token_id = given["bos_token_id" if starts_with_bos else "pad_token_id"]
