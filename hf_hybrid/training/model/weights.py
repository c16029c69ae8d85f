"""Build or load the model of a run, or start it from another architecture's checkpoint; fit it to its tokenizer."""

import logging
from typing import Any

from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from transformers import (
    AutoModel,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    TrainingArguments,
    set_seed,
)

from hf_hybrid.models.spade.conversion_spade import NEW_TENSORS
from hf_hybrid.training.errors import one_line
from hf_hybrid.training.flags.model import ModelArguments
from hf_hybrid.training.model.adapters import adapter_base, freeze_loaded, uses_adapter
from hf_hybrid.training.model.config import hub_arguments
from hf_hybrid.training.model.tokenizer import number_of_ids
from hf_hybrid.training.run_folder.resume import check_resumed_model

logger = logging.getLogger(__name__)


def load_model(
    model_args: ModelArguments,
    training_args: TrainingArguments | None,
    auto_class: Any,
    config: PreTrainedConfig,
    tokenizer: PreTrainedTokenizerBase | None,
    resume_from: str | None = None,
    positions: int | None = None,
    *,
    ignore_mismatched_sizes: bool | None = None,
) -> PreTrainedModel:
    """Build a new model, or load the checkpoint and lengthen its embeddings if needed.

    The seed of the training arguments draws new weights, whatever ran before; without training arguments, the model is
    only used. A model that is trained may lack weights in its checkpoint, such as a head: they are new.
    `ignore_mismatched_sizes` treats weights of another shape like missing ones; it is None if the script has no such
    flag. `positions` is what `fit_positions` returned.

    Raises:
        ValueError: The model cannot be built, or the checkpoint cannot be read or does not fit the model.
    """
    if training_args is not None:
        set_seed(training_args.seed)
    if model_args.is_new:
        try:
            dtype = None if model_args.dtype == "auto" else model_args.dtype
            model = auto_class.from_config(config, dtype=dtype, trust_remote_code=model_args.trust_remote_code)
        except ValueError as error:
            raise ValueError(f"--model_type {config.model_type}: {error}") from error
        logger.info("New %s with %s parameters.", type(model).__name__, f"{model.num_parameters():,}")
    else:
        trains = training_args is not None and training_args.do_train
        model, missing = _load(model_args, auto_class, config, ignore_mismatched_sizes, trains=trains)
        if uses_adapter(model_args):
            freeze_loaded(model, missing)
        if tokenizer is not None:  # a model of pixels or sound has none
            _fit_to_tokenizer(model, tokenizer, model_args)
    if model_args.init_from is not None:  # only its weights tell whether its head is tied
        check_resumed_model(model.config, resume_from, new=False)
    if positions is not None:
        model.resize_position_embeddings(positions)
    return model


def _load(
    model_args: ModelArguments,
    auto_class: Any,
    config: PreTrainedConfig,
    ignore_mismatched_sizes: bool | None,
    *,
    trains: bool,
) -> tuple[Any, list[str]]:
    """Load the checkpoint; return the model and the names of new weights."""
    source, base = model_args.shown("model_name_or_path"), adapter_base(model_args)
    try:
        if model_args.init_type == "spade":
            if not trains:
                raise ValueError(
                    "--init_from t5 adds weights that must be trained (--do_train) before the model is used"
                )
            return _start_from_t5(model_args, auto_class, config)
        model, report = auto_class.from_pretrained(
            model_args.model_name_or_path if base is None else base.name,
            config=config,
            dtype=model_args.dtype,
            output_loading_info=True,
            ignore_mismatched_sizes=bool(ignore_mismatched_sizes) or base is not None,
            **hub_arguments(model_args, base),
        )
    except (OSError, ValueError, RuntimeError, SafetensorError, StrictDataclassError) as error:
        message = f"{source}: {one_line(error)}"
        if ignore_mismatched_sizes is False and "ignore_mismatched_sizes" in message:
            message = (
                f"{source} has weights of other shapes than the model, such as a head for another number of labels; "
                "--ignore_mismatched_sizes draws them anew"
            )
        raise ValueError(message) from error
    missing = sorted({*report["missing_keys"], *(key for key, *_ in report["mismatched_keys"])})
    if auto_class is AutoModel:  # of which only hidden states are read
        missing = [name for name in missing if "pooler" not in name]
    if missing and not trains and base is None:  # an adapter may have what its base lacks
        raise ValueError(
            f"{source} lacks {len(missing)} of the weights of {type(model).__name__}, such as {missing[0]}; it must "
            "be trained (--do_train) before it is used"
        )
    return model, missing


def _start_from_t5(model_args: ModelArguments, auto_class: Any, config: PreTrainedConfig) -> tuple[Any, list[str]]:
    """Start SPADE from the checkpoint; return the model and the names of the weights that T5 lacks."""
    options = model_args.overrides(type(config))
    options |= {name: getattr(config, name) for name in ("id2label", "label2id", "problem_type")}  # set by the task
    options |= {name: value for name, value in hub_arguments(model_args).items() if name != "trust_remote_code"}
    model_class = auto_class._model_mapping[type(config)]
    model = model_class.from_t5(model_args.model_name_or_path, dtype=model_args.dtype, **options)
    from_source = {"encoder", "decoder", "lm_head"}
    return model, [
        name
        for name, _ in model.named_parameters()
        if NEW_TENSORS.search(name) or name.removeprefix("model.").split(".")[0] not in from_source
    ]


def _fit_to_tokenizer(model: Any, tokenizer: PreTrainedTokenizerBase, model_args: ModelArguments) -> None:
    """Lengthen a loaded model's embedding if the tokenizer needs it, and set the first token of generation."""
    table = getattr(model.get_input_embeddings(), "weight", None)  # an adaptive embedding has several
    ids, rows = number_of_ids(tokenizer), model.config.vocab_size if table is None else table.shape[0]
    if ids > rows and uses_adapter(model_args):
        raise ValueError(
            f"{model_args.shown('model_name_or_path')}: its embedding has {rows} rows and the tokenizer {ids} ids, "
            "and an adapter cannot lengthen it; resize the model and save it, then start from there"
        )
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
