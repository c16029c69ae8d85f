"""What the scripts can be told: one dataclass per concern, each checking its own values.

Flag names and defaults are those of transformers' example scripts, so that a command line carries over. A value
that cannot work is refused here, before anything is loaded, with a `ValueError` that names flag, value and rule.
"""

from dataclasses import dataclass, field
from typing import Any

from transformers import Seq2SeqTrainingArguments

from hf_hybrid.data.loading import embedded_name
from hf_hybrid.data.tokenizer import MIN_VOCAB_SIZE
from hf_hybrid.suggestions import did_you_mean

__all__ = [
    "ModelArguments",
    "RunArguments",
    "SummarizationArguments",
    "SummarizationTrainingArguments",
    "check_choice",
    "check_positive",
    "check_split_sources",
]

DEFAULT_DATASET = "embedded:docstrings"
_DTYPES = ("auto", "bfloat16", "float16", "float32")


def check_choice(flag: str, value: str | None, choices: tuple[str, ...]) -> None:
    """Raise a ValueError unless the value is one of the choices (or None)."""
    if value is not None and value not in choices:
        raise ValueError(f"--{flag} must be one of {', '.join(choices)}; got {value!r}.{did_you_mean(value, choices)}")


def check_positive(arguments: Any, *flags: str) -> None:
    """Raise a ValueError for the first of the flags whose value is below one; None passes."""
    for flag in flags:
        value = getattr(arguments, flag)
        if value is not None and value < 1:
            raise ValueError(f"--{flag} must be a positive integer; got {value}")


def _check_not_negative(arguments: Any, *flags: str) -> None:
    for flag in flags:
        value = getattr(arguments, flag)
        if value is not None and not value >= 0:
            raise ValueError(f"--{flag} must not be negative; got {value}")


@dataclass
class ModelArguments:
    """Which model and which tokenizer: a checkpoint, or an architecture to train from scratch."""

    model_name_or_path: str | None = field(
        default=None, metadata={"help": "Checkpoint folder or Hub id. Leave out to train --model_type from scratch."}
    )
    model_type: str | None = field(
        default=None, metadata={"help": "Architecture to train from scratch, such as spade, t5 or led."}
    )
    config_overrides: str | None = field(
        default=None,
        metadata={
            "help": "Fields of the from-scratch configuration, as 'hidden_size=64,layer_types=[a,b]' or a JSON "
            "object; 'preset=tiny' takes a named size, where there are such, and other fields go on top of it."
        },
    )
    config_name: str | None = field(
        default=None, metadata={"help": "Configuration folder or Hub id, if it is not the model's."}
    )
    tokenizer_name: str | None = field(
        default=None,
        metadata={
            "help": "Tokenizer folder or Hub id. Without it the checkpoint's is used; from scratch, one is trained on "
            "the training split and saved with the model."
        },
    )
    tokenizer_vocab_size: int = field(
        default=8192, metadata={"help": "Entries of the tokenizer that is trained when none is named."}
    )
    cache_dir: str | None = field(
        default=None, metadata={"help": "Where downloads, built corpora and trained tokenizers are kept."}
    )
    use_fast_tokenizer: bool = field(
        default=True, metadata={"help": "Accepted for compatibility; current tokenizers are all fast."}
    )
    model_revision: str = field(default="main", metadata={"help": "Branch, tag or commit on the Hub."})
    token: str | None = field(default=None, metadata={"help": "Token for the Hub; the stored login when left out."})
    trust_remote_code: bool = field(
        default=False, metadata={"help": "Run model code that lies in the checkpoint. Only for code you have read."}
    )
    dtype: str = field(
        default="float32",
        metadata={
            "help": "Precision of the weights; auto takes the checkpoint's. Optimizers need float32 weights: "
            "use --bf16 for speed.",
            "choices": _DTYPES,
        },
    )

    def __post_init__(self) -> None:
        if self.model_name_or_path is None and self.model_type is None and self.config_name is None:
            raise ValueError(
                "no model is named: give --model_name_or_path (a checkpoint) or --model_type (from scratch)"
            )
        if self.model_name_or_path is not None and self.model_type is not None:
            raise ValueError(
                f"--model_type {self.model_type} trains from scratch and cannot be combined with --model_name_or_path "
                f"{self.model_name_or_path}; give one of them"
            )
        if self.model_type is not None and self.config_name is not None:
            raise ValueError(
                f"--model_type {self.model_type} and --config_name {self.config_name} both name an architecture; "
                "give one of them"
            )
        if self.config_overrides is not None and self.model_type is None:
            raise ValueError("--config_overrides only applies to a model from scratch; it needs --model_type")
        if self.tokenizer_vocab_size < MIN_VOCAB_SIZE:
            raise ValueError(
                f"--tokenizer_vocab_size must be at least {MIN_VOCAB_SIZE}; got {self.tokenizer_vocab_size}"
            )
        check_choice("dtype", self.dtype, _DTYPES)


@dataclass
class SummarizationArguments:
    """Which documents and summaries, how long, how many, and how summaries are generated."""

    lang: str | None = field(default=None, metadata={"help": "Language code, for multilingual tokenizers (mBART)."})
    dataset_name: str | None = field(
        default=None,
        metadata={
            "help": "embedded:docstrings, embedded:modules, a local dataset folder or a Hub dataset. "
            f"{DEFAULT_DATASET} when neither this nor a file is named."
        },
    )
    dataset_config_name: str | None = field(default=None, metadata={"help": "Configuration of a Hub dataset."})
    text_column: str | None = field(default=None, metadata={"help": "Column with the documents."})
    summary_column: str | None = field(default=None, metadata={"help": "Column with the summaries."})
    train_file: str | None = field(default=None, metadata={"help": "Training data: csv, json or jsonl."})
    validation_file: str | None = field(default=None, metadata={"help": "Validation data: csv, json or jsonl."})
    test_file: str | None = field(default=None, metadata={"help": "Test data: csv, json or jsonl."})
    drop_empty_rows: bool = field(
        default=False,
        metadata={
            "help": "Leave out rows without a document or a summary, which are refused otherwise. There are no "
            "predictions for them."
        },
    )
    overwrite_cache: bool = field(default=False, metadata={"help": "Tokenize again instead of using the cache."})
    preprocessing_num_workers: int | None = field(default=None, metadata={"help": "Processes that tokenize."})
    max_source_length: int = field(default=1024, metadata={"help": "Tokens of a document; the rest is cut off."})
    max_target_length: int = field(default=128, metadata={"help": "Tokens of a summary; the rest is cut off."})
    val_max_target_length: int | None = field(
        default=None,
        metadata={
            "help": "Tokens of a summary in validation and test, and of a generated one. --max_target_length when "
            "left out."
        },
    )
    pad_to_max_length: bool = field(
        default=False, metadata={"help": "Pad every example to the full length instead of to its batch's longest."}
    )
    max_train_samples: int | None = field(default=None, metadata={"help": "Use only the first N training examples."})
    max_eval_samples: int | None = field(default=None, metadata={"help": "Use only the first N validation examples."})
    max_predict_samples: int | None = field(default=None, metadata={"help": "Use only the first N test examples."})
    num_beams: int | None = field(default=1, metadata={"help": "Beams of the generation in evaluation and test."})
    ignore_pad_token_for_loss: bool = field(
        default=True, metadata={"help": "Leave padding out of the loss. Turn off only with --pad_to_max_length."}
    )
    source_prefix: str | None = field(
        default=None, metadata={"help": "Text put before every document, such as 'summarize: ' for T5 checkpoints."}
    )
    forced_bos_token: str | None = field(
        default=None, metadata={"help": "Token that every generated summary starts with (mBART's language code)."}
    )
    resize_position_embeddings: bool | None = field(
        default=None,
        metadata={
            "help": "Lengthen the model's position embeddings to --max_source_length where they are shorter. Left "
            "out: lengthen and say so. False: refuse."
        },
    )

    def __post_init__(self) -> None:
        if self.dataset_name is None and not self.files:
            self.dataset_name = DEFAULT_DATASET
        if self.dataset_name is not None:
            embedded_name(self.dataset_name)
        if self.val_max_target_length is None:
            self.val_max_target_length = self.max_target_length
        check_positive(
            self,
            "max_source_length",
            "max_target_length",
            "val_max_target_length",
            "preprocessing_num_workers",
            "max_train_samples",
            "max_eval_samples",
            "max_predict_samples",
            "num_beams",
        )

    @property
    def files(self) -> dict[str, str]:
        """The data files by split, as far as they were named."""
        named = {"train": self.train_file, "validation": self.validation_file, "test": self.test_file}
        return {split: path for split, path in named.items() if path is not None}


@dataclass
class RunArguments:
    """Flags that every script adds to transformers' training arguments; put it before them in the bases."""

    overwrite_output_dir: bool = field(
        default=False,
        metadata={
            "help": "Permission to write into an --output_dir that holds another run. When training starts, its old "
            "checkpoint-* folders and results are deleted. Without it, such a folder is refused."
        },
    )
    resume_from_checkpoint: str | None = field(
        default=None,
        metadata={
            "help": "Continue a run. 'auto': from the last complete checkpoint in --output_dir, or from the start "
            "where there is none; 'true': the same, but there must be one; or the path of a checkpoint folder. A run "
            "is never resumed, and never overwritten, without being asked."
        },
    )
    ssm_learning_rate: float | None = field(
        default=None,
        metadata={
            "help": "Learning rate of trained state space parameters, which never decay. --learning_rate when left "
            "out."
        },
    )

    def __post_init__(self) -> None:
        if self.resume_from_checkpoint is not None:
            folded = self.resume_from_checkpoint.lower()
            if folded in ("false", "none", ""):
                self.resume_from_checkpoint = None
            elif folded in ("auto", "true"):
                self.resume_from_checkpoint = folded
        check_positive(
            self,
            "per_device_train_batch_size",
            "per_device_eval_batch_size",
            "gradient_accumulation_steps",
            "save_total_limit",
        )
        _check_not_negative(self, "learning_rate", "ssm_learning_rate", "weight_decay", "max_grad_norm")
        max_steps, epochs = getattr(self, "max_steps", -1), getattr(self, "num_train_epochs", 1.0)
        if max_steps != -1 and max_steps < 1:
            raise ValueError(f"--max_steps must be a positive integer, or -1 to count epochs; got {max_steps}")
        if not epochs > 0:
            raise ValueError(f"--num_train_epochs must be positive; got {epochs}")
        tasks = ("do_train", "do_eval", "do_predict")
        evaluates = str(getattr(self, "eval_strategy", "no")) != "no"
        if not evaluates and not any(getattr(self, task, False) for task in tasks):
            raise ValueError("nothing to do: give at least one of --do_train, --do_eval and --do_predict")
        super().__post_init__()  # type: ignore[misc]


@dataclass
class SummarizationTrainingArguments(RunArguments, Seq2SeqTrainingArguments):
    """Transformers' sequence-to-sequence training arguments and ours."""

    def __post_init__(self) -> None:
        check_positive(self, "generation_max_length", "generation_num_beams")
        if not 0 <= self.label_smoothing_factor < 1:
            raise ValueError(f"--label_smoothing_factor must lie in [0, 1); got {self.label_smoothing_factor}")
        super().__post_init__()


def check_split_sources(data_args: SummarizationArguments, training_args: SummarizationTrainingArguments) -> None:
    """Refuse a task whose split can already be seen to be missing from the named files.

    Raises:
        ValueError: Only files are named, and none of them for a split that ``--do_train``, ``--do_eval`` or
            ``--do_predict`` needs.
    """
    if data_args.dataset_name is not None:
        return
    tasks = {"do_train": "train", "do_eval": "validation", "do_predict": "test"}
    for flag, split in tasks.items():
        if getattr(training_args, flag) and split not in data_args.files:
            raise ValueError(f"--{flag} needs a {split} split: give --{split}_file or a --dataset_name that has one")
