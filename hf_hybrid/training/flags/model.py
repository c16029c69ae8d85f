"""Flags of the model, its tokenizer and its adapter.

Names and defaults are those of transformers' example scripts, so that command lines carry over. Values that cannot
work are refused here, before anything is loaded.
"""

from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedConfig

from hf_hybrid.data.tokenizer import MIN_VOCAB_SIZE, TOKENIZER_TYPES
from hf_hybrid.models.peft_targets import METHODS
from hf_hybrid.starters import STARTERS, folder_of_starter, name_of_starter
from hf_hybrid.training.flags.checks import check_choice_flag, flag
from hf_hybrid.training.flags.overrides import parse_config_overrides, parse_peft_config

INIT_TARGETS = {"t5": ("spade", "srformer_t5"), "bart": ("srformer_bart",)}
INIT_SOURCES = tuple(INIT_TARGETS)
_STARTERS = ", ".join(STARTERS)
DTYPES = ("auto", "bfloat16", "float16", "float32")


@dataclass
class ModelArguments:
    """Flags of model and tokenizer: a checkpoint, or an architecture to train from scratch."""

    model_name_or_path: str | None = flag(
        None,
        f"Checkpoint folder, Hub id, or a starter ({_STARTERS}). Leave out to train --model_type from scratch.",
    )
    model_type: str | None = flag(None, "Architecture to train from scratch, such as spade, t5 or led.")
    init_from: str | None = flag(
        None,
        "Start another architecture from --model_name_or_path. t5: SPADE from a checkpoint of T5, mT5, UMT5 or "
        "LongT5 (local), or with --model_type srformer_t5 SRformer from T5. bart: SRformer from BART. "
        "--config_overrides sets the fields that the checkpoint leaves open.",
        choices=INIT_SOURCES,
    )
    config_overrides: str | None = flag(
        None,
        "Fields of a new model's configuration, as 'hidden_size=64,layer_types=[a,b]' or a JSON object; "
        "'preset=tiny' takes a named size if the architecture has it, and other fields change it.",
    )
    config_name: str | None = flag(None, "Configuration folder, Hub id or starter, if not the model's.")
    tokenizer_name: str | None = flag(
        None,
        "Tokenizer folder, Hub id or starter. Default: the checkpoint's; for a new model, one is trained on the "
        "training split and saved with the model.",
    )
    tokenizer_type: str | None = flag(
        None,
        "The tokenizer to make if none is named: bpe (the default), marked (bpe of words spelt alike wherever they "
        "stand), words (between spaces, by frequency) or bytes (nothing to train).",
        choices=TOKENIZER_TYPES,
    )
    tokenizer_vocab_size: int = flag(8192, "Entries of the tokenizer to train if none is named.")
    cache_dir: str | None = flag(None, "Folder for downloads, built corpora and trained tokenizers.")
    use_fast_tokenizer: bool = flag(True, "Accepted for compatibility; current tokenizers are all fast.")
    model_revision: str = flag("main", "Branch, tag or commit on the Hub.")
    token: str | None = flag(None, "Token for the Hub. Default: the stored login.")
    trust_remote_code: bool = flag(False, "Run model code from the checkpoint. Only for code you have read.")
    dtype: str = flag(
        "float32",
        "Precision of the weights; auto: the checkpoint's. Optimizers need float32 weights: use --bf16 for speed.",
        choices=DTYPES,
    )
    peft: str | None = flag(
        None,
        "Train an adapter of --model_name_or_path, keep the model's weights, and save the adapter alone: lora, dora "
        "or ia3. To use it or to continue its training, give its folder as --model_name_or_path.",
        choices=METHODS,
    )
    peft_config: str | None = flag(
        None,
        "Fields of the adapter's configuration (LoraConfig or IA3Config of peft), written like --config_overrides: "
        "'r=16,lora_alpha=32,target_modules=[q_proj,v_proj]'. Default of target_modules: those of the architecture.",
    )
    merge_adapter: bool = flag(
        False, "At the end, also save the model with the trained adapter merged, in merged_model."
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
        check_choice_flag("dtype", self.dtype, DTYPES)
        check_choice_flag("tokenizer_type", self.tokenizer_type, TOKENIZER_TYPES)
        if self.tokenizer_type is not None and not self.makes_tokenizer:
            raise ValueError(
                f"--tokenizer_type {self.tokenizer_type} makes a tokenizer and cannot be combined with an existing "
                f"one: {self.tokenizer_name or self.model_name_or_path}"
            )
        for name in ("model_name_or_path", "config_name", "tokenizer_name"):
            if (source := getattr(self, name)) is not None:
                setattr(self, name, folder_of_starter(source))

    def _check_init_from(self) -> None:
        check_choice_flag("init_from", self.init_from, INIT_SOURCES)
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
        check_choice_flag("peft", self.peft, METHODS)
        if self.peft is None:
            if self.peft_config is not None:
                raise ValueError(f"--peft_config {self.peft_config} needs --peft, the kind of adapter")
            return
        if self.model_name_or_path is None:
            raise ValueError(
                f"--peft {self.peft} trains an adapter of a checkpoint and needs --model_name_or_path; a model from "
                "scratch has no weights to keep"
            )
        parse_peft_config(self.peft_config or "{}", self.peft)

    def shown(self, name: str) -> str:
        """Return a flag with its value as a user gave it, a starter's name and not its folder, for messages."""
        return f"--{name} {name_of_starter(str(getattr(self, name)))}"

    @property
    def init_type(self) -> str | None:
        """Model type to start from another architecture's checkpoint; None without ``--init_from``."""
        return None if self.init_from is None else self.model_type or INIT_TARGETS[self.init_from][0]

    @property
    def is_new(self) -> bool:
        """Whether the model is trained from scratch."""
        return self.model_name_or_path is None

    def overrides(self, config_class: type[PreTrainedConfig]) -> dict[str, Any]:
        """Parse ``--config_overrides`` by the types of a configuration's fields."""
        return parse_config_overrides(self.config_overrides or "{}", config_class)

    @property
    def makes_tokenizer(self) -> bool:
        """Whether the run makes its tokenizer: neither a tokenizer nor a checkpoint with one is named."""
        return self.is_new and self.tokenizer_name is None

    @property
    def trains_tokenizer(self) -> bool:
        """Whether the run trains its tokenizer on texts."""
        return self.makes_tokenizer and self.tokenizer_type != "bytes"
