"""Flags of the data: those that all scripts share, and one dataclass for each script."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

from transformers import TrainingArguments

from hf_hybrid.data.classification import GLUE_TASKS
from hf_hybrid.data.corpora import EMBEDDED
from hf_hybrid.data.denoising import DENSITIES, MEAN_SPAN_LENGTH, OBJECTIVES
from hf_hybrid.data.files import EXTENSIONS, TEXT_EXTENSIONS, check_file
from hf_hybrid.data.loading import embedded_name
from hf_hybrid.data.lra import LRA, LraTask, find_lra
from hf_hybrid.training.flags.checks import (
    check_choice_flag,
    check_not_negative_flags,
    check_positive_flags,
    flag,
)
from hf_hybrid.training.flags.recipes import RECIPES

SPLITS = {"do_train": "train", "do_eval": "validation", "do_predict": "test"}
"""The split that each task of a script works on."""
PREFIXES = {"validation": "eval", "test": "predict"}
"""Prefix of the metrics of each scored split."""
_LONGEST_SPAN = 1_000_000  # tokens; lengths are drawn from a Poisson distribution, which has a largest mean


@dataclass
class RowArguments:
    """The data flags of every script, and what it says of its data."""

    max_train_samples: int | None = flag(None, "Use only the first N training examples.")
    max_eval_samples: int | None = flag(None, "Use only the first N validation examples.")
    max_predict_samples: int | None = flag(None, "Use only the first N test examples.")
    is_small_run: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        check_positive_flags(self, "max_train_samples", "max_eval_samples", "max_predict_samples")

    @property
    def default_preset(self) -> str | None:
        """The preset of a new model whose size is not given."""
        return "tiny" if self.is_small_run else None

    @property
    def limits(self) -> dict[str, int | None]:
        """The largest number of examples by split; None for all."""
        limits = (self.max_train_samples, self.max_eval_samples, self.max_predict_samples)
        return dict(zip(SPLITS.values(), limits, strict=True))

    @property
    def dataset_name(self) -> str | None:
        """The name of the data; None if they come from files."""
        raise NotImplementedError

    @property
    def dataset_config_name(self) -> str | None:
        """The part of a dataset that is used, if it has several."""
        return None

    @property
    def files(self) -> dict[str, str]:
        """The data files by split."""
        raise NotImplementedError

    def check_sources(self, training_args: TrainingArguments) -> None:
        """Refuse data that are not there, before anything is loaded.

        Raises:
            ValueError: A file cannot be used, or a split that the run needs has no data.
        """
        raise NotImplementedError


@dataclass
class DataArguments(RowArguments):
    """The data flags of the scripts that read texts."""

    corpora: ClassVar[tuple[str, ...]]
    """The offline corpora that fit the script; the first is its default."""
    small_run: ClassVar[dict[str, int]]
    """Default sizes of a run that names no data."""
    extensions: ClassVar[tuple[str, ...]] = EXTENSIONS
    """The extensions of files that the script reads."""
    cut_from_train: ClassVar[tuple[str, ...]] = ()
    """Missing splits that the script cuts from the training split."""

    dataset_name: str | None = flag(
        None,
        f"embedded:NAME ({', '.join(EMBEDDED)}), a local dataset folder or a Hub dataset. Without this and without "
        "files, the script makes a small run on its own embedded corpus.",
    )
    dataset_config_name: str | None = flag(None, "Configuration of a Hub dataset.")
    train_file: str | None = flag(None, "Training data: csv, tsv, json, jsonl or parquet.")
    validation_file: str | None = flag(None, "Validation data: the same formats.")
    test_file: str | None = flag(None, "Test data: the same formats.")
    drop_empty_rows: bool = flag(
        False, "Drop rows without text, and their predictions. Without this flag such rows are an error."
    )
    overwrite_cache: bool = flag(False, "Tokenize again instead of using the cache.")
    preprocessing_num_workers: int | None = flag(None, "Processes that tokenize.")

    def __post_init__(self) -> None:
        if self.dataset_name is None and not self.files:
            self.is_small_run = True
            self.dataset_name = f"embedded:{self.corpora[0]}"
            for flag, size in self.small_run.items():
                if getattr(self, flag) is None:
                    setattr(self, flag, size)
        if self.dataset_name is not None:
            embedded_name(self.dataset_name, self.corpora)
        check_positive_flags(self, "preprocessing_num_workers")
        super().__post_init__()

    @property
    def files(self) -> dict[str, str]:
        """The given data files by split."""
        named = {split: getattr(self, f"{split}_file") for split in SPLITS.values()}
        return {split: path for split, path in named.items() if path is not None}

    def check_sources(self, training_args: TrainingArguments) -> None:
        """Refuse files that do not exist or have an unknown format, and tasks whose split no file gives.

        Raises:
            ValueError: A file cannot be used, or only files are named and none of them for a split that
                ``--do_train``, ``--do_eval`` or ``--do_predict`` needs.
        """
        for split, path in self.files.items():
            check_file(f"{split}_file", path, self.extensions)
        if self.dataset_name is not None:
            return
        for task, split in SPLITS.items():
            found = split in self.files or (split in self.cut_from_train and "train" in self.files)
            if getattr(training_args, task) and not found:
                raise ValueError(
                    f"--{task} needs a {split} split: give --{split}_file or a --dataset_name that has one"
                )


@dataclass
class SummarizationArguments(DataArguments):
    """Flags of documents and summaries, their lengths, and how summaries are generated."""

    corpora = ("docstrings", "modules")
    small_run: ClassVar = {"max_train_samples": 160, "max_eval_samples": 32, "max_predict_samples": 32}

    lang: str | None = flag(None, "Language code, for multilingual tokenizers (mBART).")
    text_column: str | None = flag(None, "Column with the documents.")
    summary_column: str | None = flag(None, "Column with the summaries.")
    max_source_length: int = flag(1024, "Tokens of a document; the rest is cut off.")
    max_target_length: int = flag(128, "Tokens of a summary; the rest is cut off.")
    val_max_target_length: int | None = flag(
        None, "Tokens of a summary in validation and test, and of a generated one. Default: --max_target_length."
    )
    pad_to_max_length: bool = flag(False, "Pad every example to the full length instead of to its batch's longest.")
    num_beams: int | None = flag(1, "Beams of generation in evaluation and test.")
    no_repeat_ngram_size: int | None = flag(
        None, "Words of this many tokens do not occur twice in a generated summary. The checkpoint keeps it."
    )
    ignore_pad_token_for_loss: bool = flag(
        True, "Leave padding out of the loss. Turn off only with --pad_to_max_length."
    )
    source_prefix: str | None = flag(None, "Text put before every document, such as 'summarize: ' for T5 checkpoints.")
    forced_bos_token: str | None = flag(
        None, "Token that every generated summary starts with (mBART's language code)."
    )
    resize_position_embeddings: bool | None = flag(
        None,
        "Lengthen the model's position embeddings to --max_source_length if they are shorter. Default: lengthen and "
        "warn. False: stop with an error.",
    )

    def __post_init__(self) -> None:
        if self.val_max_target_length is None:
            self.val_max_target_length = self.max_target_length
        check_positive_flags(self, "max_source_length", "max_target_length", "val_max_target_length", "num_beams")
        check_not_negative_flags(self, "no_repeat_ngram_size")
        super().__post_init__()


@dataclass
class GlueArguments(DataArguments):
    """Flags of sentences and labels."""

    corpora = ("docpairs",)
    small_run: ClassVar = {"max_train_samples": 800, "max_eval_samples": 300, "max_predict_samples": 300}

    task_name: str | None = flag(
        None,
        f"Task of GLUE: {', '.join(GLUE_TASKS)}. It sets scores, columns and labels, and also the data (from the "
        "Hub) if neither a dataset nor a file is named.",
    )
    max_seq_length: int = flag(128, "Tokens of a sentence, or of both together; the rest is cut off.")
    pad_to_max_length: bool = flag(False, "Pad every example to the full length instead of to its batch's longest.")
    validation_mismatched_file: str | None = flag(
        None, "Second validation split, such as MNLI's mismatched one; its scores end in _mm."
    )
    test_mismatched_file: str | None = flag(None, "Second test split.")
    text_column_names: str | None = flag(None, "Column of the sentence, or both columns separated by a comma.")
    label_column_name: str | None = flag(None, "Column of the labels.")
    ignore_mismatched_sizes: bool = flag(
        False, "Start with a new head if the checkpoint's has another number of labels."
    )

    def __post_init__(self) -> None:
        check_choice_flag("task_name", self.task_name, tuple(GLUE_TASKS))
        check_positive_flags(self, "max_seq_length")
        for split in ("validation", "test"):
            if getattr(self, f"{split}_mismatched_file") and not getattr(self, f"{split}_file"):
                raise ValueError(f"--{split}_mismatched_file is a second {split} split; it needs --{split}_file")
        if self.task_name is not None and self.dataset_name is None and not self.files:
            self.dataset_name, self.dataset_config_name = "nyu-mll/glue", self.task_name
        super().__post_init__()

    @property
    def files(self) -> dict[str, str]:
        """The given data files by split."""
        more = {f"{split}_mismatched": getattr(self, f"{split}_mismatched_file") for split in ("validation", "test")}
        return super().files | {split: path for split, path in more.items() if path is not None}


@dataclass
class TextArguments(DataArguments):
    """Flags of the scripts that read texts alone."""

    corpora = ("text",)
    extensions = TEXT_EXTENSIONS
    cut_from_train = ("validation",)
    keep_linebreaks: ClassVar[bool] = True
    """Whether the lines of txt files keep their breaks."""
    whole_text_files: ClassVar[bool] = False
    """Whether a txt file of a folder or data set is one text; otherwise each of its lines is."""

    text_column: str | None = flag(None, "Column with the texts.")
    streaming: bool = flag(False, "Read data while training, without storing them; needs --max_steps.")
    validation_split_percentage: int = flag(
        5, "Share of the training split to validate on if there is no validation split."
    )

    def __post_init__(self) -> None:
        if not 0 < self.validation_split_percentage < 100:
            raise ValueError(
                "--validation_split_percentage must lie between 0 and 100, both excluded; got "
                f"{self.validation_split_percentage}"
            )
        super().__post_init__()


@dataclass
class ClmArguments(TextArguments):
    """Flags of texts, their blocks, and how they are scored."""

    small_run: ClassVar = {
        "block_size": 256, "max_train_samples": 300, "max_eval_samples": 50, "max_predict_samples": 50,
    }  # fmt: skip

    block_size: int | None = flag(
        None,
        "Tokens of a training example; texts are joined and cut into such blocks. Default: 1024, or as many as the "
        "model takes.",
    )
    keep_linebreaks: bool = flag(  # type: ignore[misc]  # a constant of the other scripts
        True,
        "Keep the line breaks of txt files. False: each line is a text of its own, which the tokenizer may end with "
        "a token.",
    )
    eval_sequence_length: int | None = flag(
        None,
        "Score every token of the validation and test texts once, in overlapping windows of this many tokens, "
        "instead of block by block.",
    )
    eval_context_window: int | None = flag(
        None,
        "Tokens at the start of each window but the first that are read and not scored: each scored token has at "
        "least so many before it. Default: 1.",
    )

    def __post_init__(self) -> None:
        check_positive_flags(self, "block_size", "eval_sequence_length", "eval_context_window")
        for name in ("block_size", "eval_sequence_length"):
            if getattr(self, name) == 1:
                raise ValueError(f"--{name} must be at least 2: a token is predicted from the one before it; got 1")
        if self.eval_context_window is not None:
            if self.eval_sequence_length is None:
                raise ValueError("--eval_context_window needs --eval_sequence_length, the length of a window")
            if self.eval_context_window >= self.eval_sequence_length:
                raise ValueError(
                    f"--eval_context_window must be smaller than --eval_sequence_length {self.eval_sequence_length}; "
                    f"got {self.eval_context_window}"
                )
        super().__post_init__()


@dataclass
class PretrainArguments(TextArguments):
    """Flags of texts, their pieces, and what is hidden in them."""

    whole_text_files = True
    small_run: ClassVar = {
        "max_seq_length": 128, "max_train_samples": 300, "max_eval_samples": 50, "max_predict_samples": 50,
    }  # fmt: skip

    objective: str = flag(
        "span_corruption",
        "What a model learns: span_corruption (T5's: write the hidden spans) or text_infilling (BART's: write the "
        "whole text) for an encoder-decoder, masked_words (BERT's: name the hidden words) for an encoder.",
        choices=OBJECTIVES,
    )
    noise_density: float | None = flag(
        None,
        "Share of the tokens that is hidden. Default: that of the objective's paper, 0.15, of text_infilling 0.3.",
        alias="--mlm_probability",
    )
    mean_noise_span_length: float | None = flag(
        None, f"Tokens of a hidden span, on average. Default: that of the papers, {MEAN_SPAN_LENGTH:g}."
    )
    max_seq_length: int | None = flag(
        None,
        "Tokens of the pieces that documents are cut into, special tokens included, before anything is hidden. "
        "Default: 512, or as many as the model takes.",
    )
    packing: bool = flag(
        False,
        "Put several short pieces into a row of --max_seq_length, where they do not see each other; for SPADE, and "
        "for masked_words with CHELA.",
    )

    def __post_init__(self) -> None:
        check_choice_flag("objective", self.objective, OBJECTIVES)
        check_positive_flags(self, "max_seq_length")
        if not 0 < self.density < 1:
            raise ValueError(f"--noise_density must lie between 0 and 1, both excluded; got {self.density}")
        self._check_spans()
        super().__post_init__()

    @property
    def is_pair(self) -> bool:
        """Whether labels are a sequence of their own, which an encoder-decoder writes."""
        return self.objective != "masked_words"

    @property
    def density(self) -> float:
        """Share of the tokens that is hidden."""
        return DENSITIES[self.objective] if self.noise_density is None else self.noise_density

    @property
    def mean_length(self) -> float:
        """Mean tokens of a hidden span."""
        return MEAN_SPAN_LENGTH if self.mean_noise_span_length is None else self.mean_noise_span_length

    def _check_spans(self) -> None:
        if self.mean_noise_span_length is not None and self.objective == "masked_words":
            raise ValueError(
                "--mean_noise_span_length has no meaning for --objective masked_words, which hides single tokens; got "
                f"{self.mean_noise_span_length}"
            )
        least = 1 if self.objective == "span_corruption" else 0.1
        if not least <= self.mean_length <= _LONGEST_SPAN:
            raise ValueError(
                f"--mean_noise_span_length must lie between {least:g} and {_LONGEST_SPAN} for --objective "
                f"{self.objective}; got {self.mean_length}"
            )


@dataclass
class LongRangeArguments(RowArguments):
    """Flags of a task of the Long Range Arena, its files and its recipe."""

    task_name: str | None = flag(None, f"Task: {', '.join(LRA)}.")
    data_dir: str | None = flag(
        None,
        "Folder of the task's files, official ones or your own (train, validation, test). Without it the rows of "
        "ListOps and Pathfinder are drawn.",
    )
    recipe: str | None = flag(
        None,
        f"Published settings for a new model and its training: {', '.join(RECIPES)}. Other flags change single ones.",
        choices=tuple(RECIPES),
    )
    max_seq_length: int | None = flag(
        None, "Tokens, pixels or samples of a sequence; the rest is cut off. Default: the task's."
    )
    drawing_seed: int = flag(0, "Seed of drawn rows, so that --seed changes the model alone.")
    preprocessing_num_workers: int | None = flag(None, "Processes that draw rows.")
    ignore_mismatched_sizes: bool = flag(
        False, "Start with a new head if the checkpoint's has another number of labels."
    )

    def __post_init__(self) -> None:
        if self.task_name is None:
            raise ValueError(f"--task_name must be one of {', '.join(LRA)}; got none")
        check_choice_flag("task_name", self.task_name, tuple(LRA))
        check_positive_flags(self, "max_seq_length", "preprocessing_num_workers")
        check_not_negative_flags(self, "drawing_seed")
        if self.max_seq_length is not None and self.max_seq_length > self.task.length:
            raise ValueError(
                f"--max_seq_length must be at most {self.task.length}, the longest sequence of {self.task_name}; got "
                f"{self.max_seq_length}"
            )
        super().__post_init__()

    @property
    def task(self) -> LraTask:
        """The task."""
        return LRA[str(self.task_name)]

    @property
    def hub_task(self) -> str:
        """The Hub's name of the kind of task."""
        if self.task.vocab_size is not None:
            return "text-classification"
        return "audio-classification" if str(self.task_name).startswith("lra_speech") else "image-classification"

    @property
    def length(self) -> int:
        """The longest sequence."""
        return self.max_seq_length or self.task.length

    @property
    def dataset_name(self) -> str | None:
        """The task, if its rows are drawn; None if they come from files."""
        return f"drawn:{self.task_name}" if self.data_dir is None else None

    @property
    def files(self) -> dict[str, str]:
        """The files that are there, by split."""
        files: dict[str, str] = {}
        for split in SPLITS.values():
            try:
                found = find_lra(str(self.task_name), split, None if self.data_dir is None else Path(self.data_dir))
            except ValueError:  # a split that the run may not need
                continue
            files |= {split: str(found[0])} if found is not None else {}
        return files

    def check_sources(self, training_args: TrainingArguments) -> None:
        """Refuse a folder without the files that the run needs, naming them and where they are from.

        Raises:
            ValueError: A file is missing, the task cannot be drawn, or it reads no files.
        """
        folder = None if self.data_dir is None else Path(self.data_dir)
        if folder is not None and not folder.is_dir():
            raise ValueError(f"--data_dir must be a folder; {folder} is none")
        for work, split in SPLITS.items():
            if getattr(training_args, work):
                find_lra(str(self.task_name), split, folder)
