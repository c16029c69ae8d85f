"""Load a checkpoint that a command uses: its model, its tokenizer, and how much it can read."""

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import xxhash
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    AutoModelForSequenceClassification,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedTokenizerBase,
)
from transformers.utils import GENERATION_CONFIG_NAME
from transformers.utils import logging as transformers_logging
from transformers.utils.peft_utils import ADAPTER_CONFIG_NAME

from hf_hybrid.commands.flags import CheckpointArguments, GenerationArguments
from hf_hybrid.training.errors import one_line
from hf_hybrid.training.flags.model import ModelArguments
from hf_hybrid.training.model.adapters import adapter_base, adapter_folder, attach_loaded
from hf_hybrid.training.model.config import hub_arguments, load_config, positions_of_padding, read_config
from hf_hybrid.training.model.tokenizer import load_tokenizer
from hf_hybrid.training.model.weights import load_model

_KINDS: dict[str, tuple[str, str | None]] = {
    # what the name of a checkpoint's class ends in -> what it is, and the command for it
    "ForConditionalGeneration": ("an encoder-decoder", "summarize"),
    "ForCausalLM": ("a language model", "generate"),
    "LMHeadModel": ("a language model", "generate"),
    "ForSequenceClassification": ("a classifier", "classify"),
    "ForSequencePairClassification": ("a classifier of pairs, whose two texts no command reads", None),
    "EncoderModel": ("an encoder", "embed"),
    # what PEFT calls the task of an adapter
    "SEQ_2_SEQ_LM": ("an encoder-decoder", "summarize"),
    "CAUSAL_LM": ("a language model", "generate"),
    "SEQ_CLS": ("a classifier", "classify"),
}
_COMMANDS = {"summarize": ("summarize",), "generate": ("generate", "summarize"), "classify": ("classify",)}
_DEVICES = ("cpu", "cuda", "mps", "xpu")
_FILES = re.compile(  # of weights, configurations and tokenizers, as transformers names them
    r".*\.(safetensors|bin|index\.json|model|py|jinja)|(adapter_|generation_|tokenizer_)?config\.json|"
    r"(tokenizer|special_tokens_map|added_tokens|vocab)\.json|(vocab|merges)\.txt"
)
NEW_TOKENS = 128
"""Most tokens that are generated if neither the user nor the checkpoint says how many."""
_POSITIONS = ("max_position_embeddings", "max_encoder_position_embeddings")


@dataclass(frozen=True)
class Checkpoint:
    """A model in evaluation mode, its tokenizer, and the most tokens that it can read (None: any number)."""

    model: Any
    tokenizer: PreTrainedTokenizerBase
    positions: int | None

    @property
    def config(self) -> PreTrainedConfig:
        """The model's configuration."""
        config: PreTrainedConfig = self.model.config
        return config


@contextmanager
def quiet() -> Iterator[None]:
    """Keep transformers' warnings and bars, which are for those who write code, out of the terminal."""
    verbosity, shows_bars = transformers_logging.get_verbosity(), transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(verbosity)
        if shows_bars:
            transformers_logging.enable_progress_bar()


def check_checkpoint(name: str, command: str, flags: CheckpointArguments) -> PreTrainedConfig:
    """Return a checkpoint's configuration if the command can use it; nothing large is loaded.

    Raises:
        ValueError: There is no such checkpoint, it is for another command, or the device does not exist.
    """
    _device(flags)
    model_args = _model_arguments(name, flags)
    try:
        _, config = read_config(model_args)
        is_adapter = adapter_base(model_args) is not None
        for architecture in [_adapter_task(model_args)] if is_adapter else config.architectures or ():
            for end, (kind, fitting) in _KINDS.items():
                if architecture.endswith(end) and fitting not in _COMMANDS.get(command, (fitting,)):
                    of = f"an adapter of {kind}" if is_adapter else kind
                    use = f"{architecture}.from_pretrained" if fitting is None else f"hf-hybrid {fitting}"
                    raise ValueError(f"{name} is {of} ({architecture}): use {use}")
        if is_adapter and command == "embed":
            raise ValueError(f"{name} is an adapter: merge it into its model (--merge_adapter) to embed with it")
        load_config(model_args, _auto_class(command, config))
    except ValueError as error:
        raise _named(error, name) from error
    return config


def check_generation(
    generation: GenerationArguments, name: str, config: PreTrainedConfig, flags: CheckpointArguments
) -> None:
    """Check the flags of generation together with what the checkpoint generates with.

    Raises:
        ValueError: They contradict each other, or one has no effect.
    """
    model_args = _model_arguments(name, flags)
    base = adapter_base(model_args)
    where = {key: value for key, value in hub_arguments(model_args, base).items() if key != "trust_remote_code"}
    source = str(model_args.model_name_or_path) if base is None else base.name
    try:
        own = GenerationConfig.from_pretrained(source, **where)
    except Exception as error:
        if Path(source, GENERATION_CONFIG_NAME).is_file() or not isinstance(error, OSError):
            raise ValueError(f"{source}: its {GENERATION_CONFIG_NAME} cannot be read: {one_line(error)}") from error
        own = GenerationConfig.from_model_config(config)  # it has none
    given = generation.given()
    try:
        own.update(**given)  # it raises what generation would fail on
        idle = _without_effect(own)
        if any(f"- `{flag}`" in idle for flag in given):  # what the checkpoint itself says without effect may stay
            raise ValueError(idle)
    except ValueError as error:
        raise ValueError(f"the flags of generation: {one_line(error)}") from error
    fewest, most = generation.min_new_tokens or 0, new_tokens(own, config)
    if fewest > most:
        raise ValueError(f"--min_new_tokens must be at most the {most} of --max_new_tokens; got {fewest}")


def _without_effect(generation: GenerationConfig) -> str:
    """Return what transformers says of fields that have no effect; "" if there are none."""
    try:
        generation.validate(strict=True)
    except ValueError as error:
        return str(error)
    return ""


def new_tokens(generation: GenerationConfig, config: PreTrainedConfig) -> int:
    """Return the most tokens that are generated."""
    length = generation.max_length if config.is_encoder_decoder else None  # of a continuation it counts the prompt
    return generation.max_new_tokens or length or NEW_TOKENS


def version_of(name: str, flags: CheckpointArguments, config: PreTrainedConfig) -> str:
    """Return what tells a checkpoint from an older one of the same name: commits, or the sizes and times of its files.

    The base of an adapter and the folder of a tokenizer belong to it.
    """
    model_args = _model_arguments(name, flags)
    base = adapter_base(model_args)
    names = filter(None, [model_args.model_name_or_path, base and base.name, model_args.tokenizer_name])
    states: list[Any] = [getattr(config, "_commit_hash", None)]
    for folder in (Path(each) for each in names if Path(each).is_dir()):
        files = sorted(path for path in folder.iterdir() if _FILES.fullmatch(path.name) and path.is_file())
        states += [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in files]
    return xxhash.xxh3_64_hexdigest(repr(states).encode())


def load_checkpoint(name: str, command: str, flags: CheckpointArguments) -> Checkpoint:
    """Load a checkpoint, from a folder or the Hub; an adapter with its base.

    Raises:
        ValueError: It cannot be loaded, or lacks weights of the model.
    """
    model_args, device = _model_arguments(name, flags), _device(flags)
    try:
        _, config = read_config(model_args)
        auto_class = _auto_class(command, config)
        config = load_config(model_args, auto_class)
        tokenizer = load_tokenizer(model_args, config, None, needs_end=command in ("summarize", "generate"))
        assert tokenizer is not None  # only new models train one
        model: Any = load_model(model_args, None, auto_class, config, tokenizer)
        if (base := adapter_base(model_args)) is not None:
            model = attach_loaded(model, model_args, base, trains=False)
    except ValueError as error:
        raise _named(error, name) from error
    try:
        model = model.eval().to(device)
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"--device {flags.device}: {' '.join(str(error).split())}") from error
    if model.config.pad_token_id is None:  # by which classifiers of language models find the last token
        model.config.pad_token_id = tokenizer.pad_token_id
    return Checkpoint(model, tokenizer, positions_of(model, tokenizer))


def positions_of(model: Any, tokenizer: PreTrainedTokenizerBase) -> int | None:
    """Return the most tokens that a model has positions for; None if it reads any number."""
    config = getattr(model.config, "encoder", model.config)  # of two models that were put together
    values = [getattr(config, name, None) for name in _POSITIONS]
    limits = [value for value in values if isinstance(value, int) and value > 0]
    return min(min(limits) - positions_of_padding(model), tokenizer.model_max_length) if limits else None


def _adapter_task(model_args: ModelArguments) -> str:
    config = Path(str(adapter_folder(model_args)), ADAPTER_CONFIG_NAME)
    return json.loads(config.read_text(encoding="utf-8")).get("task_type") or ""


def _named(error: ValueError, name: str) -> ValueError:
    """Call the model what a command calls it: an argument, which has no flag; say so if there is no such folder."""
    message = str(error).replace("--model_name_or_path ", "")
    unknown = f"{name}: no configuration could be loaded."
    if message.startswith(unknown) and not Path(name).exists():
        message = f"there is no folder {name} here, and none can be had from the Hub.{message.removeprefix(unknown)}"
    return ValueError(message)


def _model_arguments(name: str, flags: CheckpointArguments) -> ModelArguments:
    return ModelArguments(
        model_name_or_path=name,
        **{
            field: getattr(flags, field)
            for field in ("tokenizer_name", "model_revision", "cache_dir", "token", "trust_remote_code", "dtype")
        },
    )


def _auto_class(command: str, config: PreTrainedConfig) -> Any:
    if command == "embed":
        return AutoModel
    if command == "classify":
        return AutoModelForSequenceClassification
    return AutoModelForSeq2SeqLM if command == "summarize" or config.is_encoder_decoder else AutoModelForCausalLM


def _device(flags: CheckpointArguments) -> torch.device:
    if flags.device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(flags.device)
    except RuntimeError as error:
        raise ValueError(f"--device must be a device such as cpu or cuda:0; got {flags.device!r}") from error
    if device.type not in _DEVICES:
        raise ValueError(f"--device must be one of {', '.join(_DEVICES)}; got {flags.device!r}")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ValueError(f"--device {flags.device}: torch sees {torch.cuda.device_count()} CUDA devices here")
    return device
