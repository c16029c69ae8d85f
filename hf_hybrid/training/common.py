"""The steps that every training script shares, as plain functions in the order in which a script calls them."""

import json
import logging
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from datasets import Dataset, DatasetDict
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    Trainer,
    TrainerState,
    TrainingArguments,
    set_seed,
)

from hf_hybrid.data.tokenizer import train_tokenizer
from hf_hybrid.suggestions import did_you_mean
from hf_hybrid.training.arguments import ModelArguments
from hf_hybrid.training.command_line import one_line
from hf_hybrid.training.config_overrides import parse_config_overrides
from hf_hybrid.training.output_folder import (
    WEIGHTS_FILES,
    check_output_folder,
    complete_checkpoints,
    find_resume_checkpoint,
)
from hf_hybrid.training.trainer import stop_gently

__all__ = [
    "check_best_metric",
    "first_examples",
    "fit_config_to_tokenizer",
    "load_config",
    "load_model",
    "load_tokenizer",
    "prepare_run",
    "publish",
    "require_split",
    "save_and_log",
    "train",
    "train_new_tokenizer",
]

logger = logging.getLogger(__name__)

NO_TOKENIZER = "no tokenizer is named and there is no training split to train one on: give --tokenizer_name"
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "vocab.json", "vocab.txt", "spiece.model")


# ---- the run ----


def prepare_run(
    training_args: TrainingArguments, model_args: ModelArguments, *, outputs: Sequence[str] = ()
) -> str | None:
    """Set up logging and the seed, and check the output folder.

    Args:
        training_args: The training arguments.
        model_args: The model arguments.
        outputs: Names of the files that a run without training writes.

    Returns:
        The checkpoint to resume from, or None to start anew.

    Raises:
        ValueError: The output folder holds another run and there is no permission to write into it, or what this
            run is made from, or there is nothing to resume from.
    """
    _show_log(training_args)
    resume_from = None
    if training_args.process_index == 0 or training_args.resume_from_checkpoint is not None:
        resume_from = find_resume_checkpoint(training_args)
    if training_args.process_index == 0:
        sources = {name: getattr(model_args, name) for name in ("model_name_or_path", "config_name", "tokenizer_name")}
        check_output_folder(training_args, resume_from, outputs, sources | {"resume_from_checkpoint": resume_from})
    if resume_from is not None:
        logger.info("Resuming from %s.", resume_from)
    set_seed(training_args.seed)
    return resume_from


def _show_log(training_args: TrainingArguments) -> None:
    """Print this package's messages, unless the program around us has set up logging."""
    package = logging.getLogger("hf_hybrid")
    package.setLevel(training_args.get_process_log_level() if training_args.log_level != "passive" else logging.INFO)
    if not training_args.should_log:
        package.setLevel(logging.WARNING)
    if not package.hasHandlers():
        handler = logging.StreamHandler(sys.stdout)
        handler.setFormatter(logging.Formatter("%(levelname)s %(message)s"))
        package.addHandler(handler)
        package.propagate = False  # a library that sets up the root logger later would print everything twice


# ---- configuration, tokenizer, model ----


def check_best_metric(training_args: TrainingArguments, metrics: Sequence[str]) -> None:
    """Check the name by which the best checkpoint is chosen, which Trainer looks up after the first evaluation only.

    Args:
        training_args: The training arguments.
        metrics: What the script's evaluation reports, without the prefix ``eval_``.

    Raises:
        ValueError: ``--metric_for_best_model`` is none of them.
    """
    wanted = training_args.metric_for_best_model
    if wanted is not None and wanted.removeprefix("eval_") not in metrics:
        raise ValueError(
            f"--metric_for_best_model must be one of {', '.join(metrics)}; got {wanted}."
            f"{did_you_mean(wanted, metrics)}"
        )


def load_config(model_args: ModelArguments, auto_class: Any) -> PreTrainedConfig:
    """Load the checkpoint's configuration, or build one from ``--model_type`` and ``--config_overrides``.

    Args:
        model_args: The model arguments.
        auto_class: The Auto class of the task, such as `AutoModelForSeq2SeqLM`.

    Raises:
        ValueError: The model type is unknown or has no class for the task, an override does not fit, or the folder is
            not a checkpoint.
    """
    if model_args.model_type is not None:
        config_class: Any = _config_class(model_args.model_type, auto_class)
        values = parse_config_overrides(model_args.config_overrides or "{}", config_class)
        preset = values.pop("preset", None)
        try:
            return config_class(**values) if preset is None else config_class.from_preset(str(preset), **values)
        except Exception as error:
            raise ValueError(f"--config_overrides {model_args.config_overrides}: {one_line(error)}") from error
    if model_args.model_name_or_path is not None:
        _check_checkpoint_folder(
            "model_name_or_path", model_args.model_name_or_path, [("config.json",), WEIGHTS_FILES]
        )
    flag = "model_name_or_path" if model_args.config_name is None else "config_name"
    name = getattr(model_args, flag)
    if flag == "config_name":
        _check_checkpoint_folder(flag, name, [("config.json",)])
    try:
        config = AutoConfig.from_pretrained(name, **_hub_arguments(model_args))
    except (OSError, ValueError, TypeError, StrictDataclassError) as error:
        raise ValueError(f"--{flag} {name}: no configuration could be loaded. {one_line(error)}") from error
    has_code = auto_class.__name__ in (getattr(config, "auto_map", None) or {})
    if type(config) not in auto_class._model_mapping and not has_code:
        raise ValueError(
            f"--{flag} {name}: its architecture {config.model_type!r} has no class for {auto_class.__name__}"
        )
    return config


def _config_class(model_type: str, auto_class: Any) -> type[PreTrainedConfig]:
    known = model_type in CONFIG_MAPPING
    if known and CONFIG_MAPPING[model_type] in auto_class._model_mapping:
        return CONFIG_MAPPING[model_type]
    supported = sorted(config.model_type for config in auto_class._model_mapping)
    problem = f"has no class for {auto_class.__name__}" if known else "is not a known architecture"
    raise ValueError(
        f"--model_type {model_type} {problem}.{did_you_mean(model_type, supported)} Possible: {', '.join(supported)}"
    )


def _check_checkpoint_folder(flag: str, name: str, required: Sequence[tuple[str, ...]]) -> None:
    """Raise a ValueError if the name is a local folder (or looks like one) that lacks what a checkpoint has."""
    folder = Path(name)
    if not folder.exists():
        if name.startswith((".", "/", "~")) or name.count("/") > 1:
            raise ValueError(f"--{flag} {name}: there is no such folder")
        return  # a Hub id
    if not folder.is_dir():
        raise ValueError(f"--{flag} {name} is a file; it must be a checkpoint folder or a Hub id")
    missing = [names[0] for names in required if not any((folder / entry).is_file() for entry in names)]
    if missing:
        inside = complete_checkpoints(folder)
        hint = f" Did you mean {inside[-1]}?" if inside else ""
        raise ValueError(f"--{flag} {name} is not a checkpoint: {' and '.join(missing)} missing.{hint}")


def _hub_arguments(model_args: ModelArguments) -> dict[str, Any]:
    return {
        "cache_dir": model_args.cache_dir,
        "revision": model_args.model_revision,
        "token": model_args.token,
        "trust_remote_code": model_args.trust_remote_code,
    }


def load_tokenizer(
    model_args: ModelArguments, config: PreTrainedConfig, resume_from: str | None
) -> PreTrainedTokenizerBase | None:
    """Load the named tokenizer, or the checkpoint's, and fit a new model's configuration to it.

    Args:
        model_args: The model arguments.
        config: What `load_config` returned; changed in place.
        resume_from: The checkpoint of an interrupted run, whose tokenizer is used instead of training it again.

    Returns:
        The tokenizer, or None: then one must be trained once there are data.

    Raises:
        ValueError: The tokenizer cannot be loaded, has no end-of-sequence token, or is larger than the vocabulary.
    """
    names = {
        "tokenizer_name": model_args.tokenizer_name,
        "model_name_or_path": model_args.model_name_or_path,
        "resume_from_checkpoint": resume_from,
    }
    flag, name = next(((flag, name) for flag, name in names.items() if name is not None), ("", None))
    if name is None:
        return None
    _check_checkpoint_folder(flag, name, [_TOKENIZER_FILES])
    try:
        tokenizer = AutoTokenizer.from_pretrained(name, **_hub_arguments(model_args))
    except (OSError, ValueError) as error:
        raise ValueError(f"--{flag} {name}: no tokenizer could be loaded. {error}") from error
    _complete_special_tokens(tokenizer, f"--{flag} {name}")
    _fit_new_config(model_args, config, tokenizer)
    return tokenizer


def train_new_tokenizer(
    model_args: ModelArguments, config: PreTrainedConfig, texts: Iterable[str] | None, *, fingerprint: str | None
) -> PreTrainedTokenizerBase:
    """Train a tokenizer and fit a new model's configuration to it.

    Args:
        model_args: The model arguments.
        config: What `load_config` returned; changed in place.
        texts: Training texts; None where there is no training split.
        fingerprint: Names the texts, so that a tokenizer trained before is found again.

    Raises:
        ValueError: There is nothing to train it on, or it is larger than the vocabulary.
    """
    if texts is None:
        raise ValueError(NO_TOKENIZER)
    logger.info(
        "No tokenizer is named: one of up to %d entries is trained on the training split.",
        model_args.tokenizer_vocab_size,
    )
    tokenizer = train_tokenizer(
        texts, model_args.tokenizer_vocab_size, cache_dir=model_args.cache_dir, fingerprint=fingerprint
    )
    _fit_new_config(model_args, config, tokenizer)
    return tokenizer


def _complete_special_tokens(tokenizer: PreTrainedTokenizerBase, source: str) -> None:
    if tokenizer.eos_token is None:
        if tokenizer.sep_token is None:
            raise ValueError(f"{source}: the tokenizer has neither an end-of-sequence nor a separator token")
        tokenizer.eos_token = tokenizer.sep_token
        logger.warning("%s: the separator %s serves as end of sequence.", source, tokenizer.eos_token)
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
        logger.warning("%s: the end of sequence %s also serves as padding.", source, tokenizer.pad_token)


def number_of_ids(tokenizer: PreTrainedTokenizerBase) -> int:
    """One more than the largest id that a tokenizer can give; its length where ids have no gaps."""
    return max(len(tokenizer), max(tokenizer.get_vocab().values()) + 1)


def _fit_new_config(model_args: ModelArguments, config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase) -> None:
    if model_args.model_name_or_path is None:
        given = parse_config_overrides(model_args.config_overrides or "{}", type(config))
        fit_config_to_tokenizer(config, tokenizer, vocab_size_is_given="vocab_size" in given)


def fit_config_to_tokenizer(
    config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase, *, vocab_size_is_given: bool = False
) -> None:
    """Set the vocabulary size and the special ids of a new model's configuration, in place.

    A field such as ``decoder_start_token_id`` or ``forced_eos_token_id`` keeps its role: if the architecture's default
    is its own ``eos_token_id``, it becomes the tokenizer's. Where an encoder-decoder has no default start, generation
    starts with bos, or with pad where the architecture or the tokenizer has no bos (the T5 family).

    Args:
        config: A configuration that was built with default special ids.
        tokenizer: The tokenizer.
        vocab_size_is_given: Whether the user asked for ``config.vocab_size``, which is then kept.

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


def load_model(
    model_args: ModelArguments,
    auto_class: Any,
    config: PreTrainedConfig,
    tokenizer: PreTrainedTokenizerBase,
    *,
    seed: int,
    may_add_weights: bool,
) -> PreTrainedModel:
    """Build a new model, or load the checkpoint and lengthen its embedding if the tokenizer needs it.

    Args:
        model_args: The model arguments.
        auto_class: The Auto class of the task.
        config: What `load_config` returned, fitted to the tokenizer.
        tokenizer: The tokenizer.
        seed: Seed of a new model's weights, so that they do not depend on what ran before.
        may_add_weights: Whether weights that the checkpoint lacks, such as a head, may be drawn at random, because
            the model is going to be trained.

    Raises:
        ValueError: The model cannot be built, or the checkpoint cannot be read, or lacks weights or holds others.
    """
    set_seed(seed)
    if model_args.model_name_or_path is None:
        try:
            dtype = None if model_args.dtype == "auto" else model_args.dtype
            model = auto_class.from_config(config, dtype=dtype, trust_remote_code=model_args.trust_remote_code)
        except ValueError as error:
            raise ValueError(f"--model_type {config.model_type}: {error}") from error
        logger.info("New %s with %s parameters.", type(model).__name__, f"{model.num_parameters():,}")
        return model
    try:
        model, report = auto_class.from_pretrained(
            model_args.model_name_or_path,
            config=config,
            dtype=model_args.dtype,
            output_loading_info=True,
            **_hub_arguments(model_args),
        )
    except (OSError, ValueError, RuntimeError, SafetensorError, StrictDataclassError) as error:
        raise ValueError(f"--model_name_or_path {model_args.model_name_or_path}: {one_line(error)}") from error
    if (missing := sorted(report["missing_keys"])) and not may_add_weights:
        raise ValueError(
            f"--model_name_or_path {model_args.model_name_or_path} lacks {len(missing)} of the weights of "
            f"{type(model).__name__}, such as {missing[0]}; it must be trained (--do_train) before it is used"
        )
    ids, rows = number_of_ids(tokenizer), model.get_input_embeddings().weight.shape[0]
    if ids > rows:
        model.resize_token_embeddings(ids)
        logger.warning(
            "The tokenizer has %d ids and the model's embedding %d rows: it was resized to %d.", ids, rows, ids
        )
    if model.config.is_encoder_decoder and getattr(model.config, "decoder_start_token_id", None) is None:
        start = tokenizer.bos_token_id if tokenizer.bos_token_id is not None else tokenizer.pad_token_id
        model.config.decoder_start_token_id = start
        if model.generation_config.decoder_start_token_id is None:
            model.generation_config.decoder_start_token_id = start
        logger.warning("The checkpoint names no decoder_start_token_id: using %d.", start)
    return model


# ---- data ----


def require_split(datasets: DatasetDict, split: str, flag: str) -> Dataset:
    """Return a split.

    Raises:
        ValueError: There is no such split.
    """
    if split not in datasets:
        raise ValueError(f"--{flag} needs a {split} split; the dataset has {', '.join(datasets)}")
    return datasets[split]


def first_examples(split: Dataset, count: int | None) -> Dataset:
    """The first examples of a split; all when the count is None or larger."""
    return split if count is None else split.select(range(min(count, len(split))))


# ---- the work and its results ----


def train(trainer: Trainer, resume_from: str | None) -> dict[str, float]:
    """Train, save the model, the tokenizer and the trainer's state, and return the metrics.

    A run that is resumed when nothing is left to train keeps the metrics that it wrote when it trained.

    Raises:
        KeyboardInterrupt: Ctrl-C was pressed; a checkpoint of the last step is there to resume from.
    """
    if resume_from is not None and _is_finished(trainer, resume_from):
        trainer.save_model()
        trainer.save_state()
        path = Path(str(trainer.args.output_dir), "train_results.json")
        return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    with stop_gently(trainer):
        result = trainer.train(resume_from_checkpoint=resume_from)
    trainer.save_model()
    metrics: dict[str, float] = {**result.metrics, "train_samples": len(trainer.train_dataset)}  # type: ignore[arg-type]
    save_and_log(trainer, "train", metrics)
    trainer.save_state()
    return metrics


def _is_finished(trainer: Trainer, checkpoint: str) -> bool:
    """Whether a checkpoint has had all the steps asked for; then load it, for Trainer would take one more."""
    state = TrainerState.load_from_json(str(Path(checkpoint, "trainer_state.json")))
    planned = trainer.args.max_steps if trainer.args.max_steps > 0 else state.max_steps
    more_epochs = trainer.args.max_steps < 1 and trainer.args.num_train_epochs > state.num_train_epochs
    if more_epochs or state.global_step < planned:
        return False
    logger.warning("%s has had %d of %d steps: nothing is left to train.", checkpoint, state.global_step, planned)
    best = state.best_model_checkpoint
    wanted = best if trainer.args.load_best_model_at_end and best is not None and Path(best).is_dir() else checkpoint
    trainer._load_from_checkpoint(wanted)
    trainer.state = state
    return True


def save_and_log(trainer: Trainer, split: str, metrics: dict[str, float]) -> None:
    """Print metrics and write them to ``SPLIT_results.json`` and ``all_results.json``, in place of older ones."""
    trainer.log_metrics(split, metrics)
    path = Path(str(trainer.args.output_dir), "all_results.json")
    if trainer.is_world_process_zero() and path.is_file():  # Trainer would merge them
        older = json.loads(path.read_text(encoding="utf-8"))
        kept = {name: value for name, value in older.items() if not name.startswith(f"{split}_")}
        path.write_text(json.dumps(kept), encoding="utf-8")
    trainer.save_metrics(split, metrics)


def publish(
    trainer: Trainer, model_args: ModelArguments, *, task: str, dataset: str | None, dataset_args: str | None
) -> None:
    """Push to the Hub if asked to; otherwise write the model card beside a trained model."""
    kwargs: dict[str, Any] = {"tasks": task, "tags": [task]}
    if model_args.model_name_or_path is not None and not Path(model_args.model_name_or_path).exists():
        kwargs["finetuned_from"] = model_args.model_name_or_path
    if dataset is not None:
        kwargs["dataset"] = f"{dataset} {dataset_args}" if dataset_args else dataset
        if ":" not in dataset and not Path(dataset).exists():  # a Hub dataset: name it in the card's metadata
            kwargs["dataset_tags"] = dataset
            if dataset_args:
                kwargs["dataset_args"] = dataset_args
    if trainer.args.push_to_hub:
        trainer.push_to_hub(**kwargs)
    elif trainer.args.do_train:
        trainer.create_model_card(**kwargs)
