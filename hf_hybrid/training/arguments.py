"""What every script can be told about models and runs: one dataclass per concern, each checking its own values.

Flag names and defaults are those of transformers' example scripts, so that a command line carries over. A value
that cannot work is refused here, before anything is loaded, with a `ValueError` that names flag, value and rule.
"""

from dataclasses import dataclass, field
from typing import Any

from transformers import Seq2SeqTrainingArguments, TrainingArguments

from hf_hybrid.data.tokenizer import MIN_VOCAB_SIZE, TOKENIZER_TYPES
from hf_hybrid.models.peft_targets import METHODS
from hf_hybrid.suggestions import did_you_mean
from hf_hybrid.training.config_overrides import parse_peft_config

__all__ = [
    "ModelArguments",
    "RunArguments",
    "ScriptTrainingArguments",
    "SummarizationTrainingArguments",
    "check_choice",
    "check_positive",
]

INIT_TARGETS = {"t5": ("spade", "srformer_t5"), "bart": ("srformer_bart",)}
INIT_SOURCES = tuple(INIT_TARGETS)
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
    init_from: str | None = field(
        default=None,
        metadata={
            "help": "Start another architecture from --model_name_or_path. t5: SPADE from a checkpoint of T5, mT5, "
            "UMT5 or LongT5 (local), or with --model_type srformer_t5 SRformer from one of T5; bart: SRformer from "
            "one of BART. --config_overrides then sets fields that the checkpoint leaves open.",
            "choices": INIT_SOURCES,
        },
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
    tokenizer_type: str | None = field(
        default=None,
        metadata={
            "help": "What is made when no tokenizer is named: bpe (the default), words (between spaces, by frequency) "
            "or bytes (nothing to train).",
            "choices": TOKENIZER_TYPES,
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
    peft: str | None = field(
        default=None,
        metadata={
            "help": "Train an adapter of --model_name_or_path, whose weights stay as they are, and save it alone: "
            "lora, dora or ia3. To use it, or to go on training it, give its folder as --model_name_or_path.",
            "choices": METHODS,
        },
    )
    peft_config: str | None = field(
        default=None,
        metadata={
            "help": "Fields of the adapter's configuration (LoraConfig or IA3Config of peft), written as "
            "--config_overrides: 'r=16,lora_alpha=32,target_modules=[q_proj,v_proj]'. Without target_modules those "
            "of the architecture are taken."
        },
    )
    merge_adapter: bool = field(
        default=False,
        metadata={"help": "When all is done, also save the model with the trained adapter merged, in merged_model."},
    )

    def __post_init__(self) -> None:
        self._check_init_from()
        self._check_peft()
        if self.model_name_or_path is None and self.model_type is None and self.config_name is None:
            raise ValueError(
                "no model is named: give --model_name_or_path (a checkpoint) or --model_type (from scratch)"
            )
        if self.model_name_or_path is not None and self.model_type is not None and self.init_from is None:
            raise ValueError(
                f"--model_type {self.model_type} trains from scratch and cannot be combined with --model_name_or_path "
                f"{self.model_name_or_path}; give one of them"
            )
        if self.model_type is not None and self.config_name is not None:
            raise ValueError(
                f"--model_type {self.model_type} and --config_name {self.config_name} both name an architecture; "
                "give one of them"
            )
        if self.config_overrides is not None and self.model_type is None and self.init_from is None:
            raise ValueError("--config_overrides only applies to a new model; it needs --model_type or --init_from")
        if self.tokenizer_vocab_size < MIN_VOCAB_SIZE:
            raise ValueError(
                f"--tokenizer_vocab_size must be at least {MIN_VOCAB_SIZE}; got {self.tokenizer_vocab_size}"
            )
        check_choice("dtype", self.dtype, _DTYPES)
        check_choice("tokenizer_type", self.tokenizer_type, TOKENIZER_TYPES)
        if self.tokenizer_type is not None and not self.makes_tokenizer:
            raise ValueError(
                f"--tokenizer_type {self.tokenizer_type} makes a tokenizer and cannot be combined with one that is "
                f"there: {self.tokenizer_name or self.model_name_or_path}"
            )

    def _check_init_from(self) -> None:
        check_choice("init_from", self.init_from, INIT_SOURCES)
        if self.init_from is None:
            return
        if self.model_name_or_path is None:
            raise ValueError(f"--init_from {self.init_from} needs --model_name_or_path, the checkpoint to start from")
        targets = INIT_TARGETS[self.init_from]
        if self.model_type not in (None, *targets):
            raise ValueError(
                f"--init_from {self.init_from} makes a {' or '.join(targets)} model; "
                f"got --model_type {self.model_type}"
            )
        if self.config_name is not None:
            raise ValueError(f"--init_from {self.init_from} cannot be combined with --config_name {self.config_name}")

    def _check_peft(self) -> None:
        check_choice("peft", self.peft, METHODS)
        if self.peft is None:
            if self.peft_config is not None:
                raise ValueError(f"--peft_config {self.peft_config} needs --peft, the kind of adapter")
            return
        if self.model_name_or_path is None:
            raise ValueError(
                f"--peft {self.peft} trains an adapter of a checkpoint and needs --model_name_or_path; a model from "
                "scratch has nothing to keep as it is"
            )
        parse_peft_config(self.peft_config or "{}", self.peft)

    @property
    def init_type(self) -> str | None:
        """Model type that is started from another's checkpoint; None where none is."""
        return None if self.init_from is None else self.model_type or INIT_TARGETS[self.init_from][0]

    @property
    def makes_tokenizer(self) -> bool:
        """Whether neither a tokenizer nor a checkpoint that has one is named."""
        return self.model_name_or_path is None and self.tokenizer_name is None

    @property
    def trains_tokenizer(self) -> bool:
        """Whether the tokenizer that is made needs texts to be trained on."""
        return self.makes_tokenizer and self.tokenizer_type != "bytes"


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
            "help": "Learning rate of a trained state space model's A, B and step sizes, or of Hyena's filters; "
            "--learning_rate when left out. None of its tensors decays."
        },
    )
    report: bool = field(
        default=True, metadata={"help": "End with report.html, a page that shows what was run and how it went."}
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
        smoothing = getattr(self, "label_smoothing_factor", 0.0)
        if not 0 <= smoothing < 1:
            raise ValueError(f"--label_smoothing_factor must lie in [0, 1); got {smoothing}")
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

    def __getstate__(self) -> dict[str, Any]:
        """Leave the token out of training_args.bin, which lies beside the model and is pushed with it."""
        return self.__dict__ | {"hub_token": None}


@dataclass
class ScriptTrainingArguments(RunArguments, TrainingArguments):
    """Transformers' training arguments and ours."""


@dataclass
class SummarizationTrainingArguments(RunArguments, Seq2SeqTrainingArguments):
    """Transformers' sequence-to-sequence training arguments and ours."""

    def __post_init__(self) -> None:
        check_positive(self, "generation_max_length", "generation_num_beams")
        super().__post_init__()
