"""The flags of the commands that answer, and how a command line becomes the model, the documents and the flags."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from hf_hybrid.training.flags.checks import check_choice_flag, check_not_negative_flags, check_positive_flags, flag
from hf_hybrid.training.flags.command_line import FlagParser
from hf_hybrid.training.flags.model import DTYPES

FORMATS = ("text", "jsonl", "csv")
POOLINGS = ("mean", "first", "last")


@dataclass
class CheckpointArguments:
    """Flags of the model: where it comes from, and where it runs."""

    tokenizer_name: str | None = flag(None, "Tokenizer folder, Hub id or starter, if not the model's.")
    model_revision: str = flag("main", "Branch, tag or commit on the Hub.")
    cache_dir: str | None = flag(None, "Folder for downloads.")
    token: str | None = flag(None, "Token for the Hub. Default: the stored login.")
    trust_remote_code: bool = flag(False, "Run model code from the checkpoint. Only for code you have read.")
    dtype: str = flag("auto", "Precision of the weights; auto: the checkpoint's.", choices=DTYPES)
    device: str = flag("auto", "Where the model runs, such as cpu or cuda:1; auto: the first GPU, else the CPU.")

    def __post_init__(self) -> None:
        """Check the flags."""
        check_choice_flag("dtype", self.dtype, DTYPES)


@dataclass
class DocumentArguments:
    """Flags of what is read."""

    text_column: str | None = flag(
        None, "Column of the documents in tables. Default: text, or the only column of text."
    )
    encoding: str | None = flag(
        None, "Encoding of text and HTML files; tables are UTF-8. Default: what a file itself says, else UTF-8."
    )
    max_document_mb: float = flag(10.0, "Size of the longest text that is read, in megabytes.")
    max_source_length: int | None = flag(
        None, "Tokens that are read of each document. Default: all, or as many as the model has positions for."
    )

    def __post_init__(self) -> None:
        """Check the flags."""
        check_positive_flags(self, "max_source_length")
        if not self.max_document_mb > 0:
            raise ValueError(f"--max_document_mb must be a positive number; got {self.max_document_mb}")
        try:
            "".encode(self.encoding or "utf-8")
        except LookupError as error:
            raise ValueError(f"--encoding must be one that Python knows; got {self.encoding!r}") from error


@dataclass
class OutputArguments:
    """Flags of the output and of batches."""

    output: str | None = flag(
        None,
        "File for the answers, written as they come. Run the same command again to go on. Default: the terminal.",
        alias="-o",
    )
    output_format: str | None = flag(
        None,
        "text, jsonl or csv. Default: by the output's extension (.txt, .jsonl, .csv), else text; jsonl for vectors.",
        choices=FORMATS,
    )
    overwrite_output: bool = flag(False, "Replace an output that exists.")
    batch_size: int = flag(8, "Most documents in a batch; they are sorted by length.")
    batch_tokens: int = flag(65_536, "Most tokens in a batch of several documents, padding included.")

    def __post_init__(self) -> None:
        """Check the flags."""
        check_choice_flag("output_format", self.output_format, FORMATS)
        check_positive_flags(self, "batch_size", "batch_tokens")
        if self.output is not None and (not self.output or Path(self.output).is_dir()):
            raise ValueError(f"--output {self.output} must be a file; it is {'a folder' if self.output else 'empty'}")


@dataclass
class SummarizeArguments:
    """Flags of ``summarize``."""

    source_prefix: str | None = flag(
        None, "Text put before every document. Default: the one that the checkpoint was trained with, if it says so."
    )


@dataclass
class GenerationArguments:
    """Flags of generation: fields of transformers' GenerationConfig. Those that are not given are the checkpoint's."""

    max_new_tokens: int | None = flag(None, "Most tokens to generate. Default: the checkpoint's limit, else 128.")
    min_new_tokens: int | None = flag(None, "Fewest tokens to generate.")
    num_beams: int | None = flag(None, "Beams of beam search; 1: none.")
    length_penalty: float | None = flag(None, "Above 0 beam search prefers longer outputs, below 0 shorter ones.")
    early_stopping: bool | None = flag(None, "Stop beam search when there are as many outputs as beams.")
    no_repeat_ngram_size: int | None = flag(None, "Words of this many tokens do not occur twice.")
    repetition_penalty: float | None = flag(None, "Above 1 tokens are less likely if they occurred.")
    do_sample: bool | None = flag(None, "Draw tokens instead of taking the likeliest; --seed makes it repeatable.")
    temperature: float | None = flag(None, "Of drawing: below 1 nearer to the likeliest token.")
    top_k: int | None = flag(None, "Draw among this many likeliest tokens.")
    top_p: float | None = flag(None, "Draw among the likeliest tokens that have this much probability together.")
    min_p: float | None = flag(None, "Draw among tokens with at least this share of the likeliest one's probability.")
    typical_p: float | None = flag(None, "Draw among the most typical tokens with this much probability together.")
    prompt_lookup_num_tokens: int | None = flag(None, "Guess this many tokens at once from the text; same output.")
    cache_implementation: str | None = flag(None, "Kind of cache, such as static or offloaded.")
    max_time: float | None = flag(None, "Most seconds for a batch.")
    seed: int = flag(42, "Seed of drawing.")

    def __post_init__(self) -> None:
        """Check the flags one by one; together and with the checkpoint's own, transformers checks them."""
        check_positive_flags(self, "max_new_tokens", "num_beams", "prompt_lookup_num_tokens")
        check_not_negative_flags(self, "min_new_tokens", "no_repeat_ngram_size")
        for name in ("top_p", "min_p", "typical_p"):
            if (value := getattr(self, name)) is not None and not 0 <= value <= 1:
                raise ValueError(f"--{name} must be a probability between 0 and 1; got {value}")
        for name in ("temperature", "repetition_penalty", "max_time"):
            if (value := getattr(self, name)) is not None and not 0 < value < math.inf:
                raise ValueError(f"--{name} must be a positive number; got {value}")
        if self.length_penalty is not None and not math.isfinite(self.length_penalty):
            raise ValueError(f"--length_penalty must be a number; got {self.length_penalty}")
        if not 0 <= self.seed < 2**32:
            raise ValueError(f"--seed must be between 0 and {2**32 - 1}; got {self.seed}")

    def given(self) -> dict[str, Any]:
        """Return the fields of `GenerationConfig` that are given."""
        values = {field.name: getattr(self, field.name) for field in fields(self) if field.name != "seed"}
        return {name: value for name, value in values.items() if value is not None}


@dataclass
class ClassifyArguments:
    """Flags of ``classify``."""

    top_k: int = flag(1, "How many of the likeliest labels to give.")

    def __post_init__(self) -> None:
        """Check the flags."""
        check_positive_flags(self, "top_k")


@dataclass
class EmbedArguments:
    """Flags of ``embed``."""

    pooling: str = flag("mean", "The vector of a document: mean, first or last of its tokens' vectors.", POOLINGS)
    normalize_embeddings: bool = flag(False, "Scale each vector to length one.")

    def __post_init__(self) -> None:
        """Check the flags."""
        check_choice_flag("pooling", self.pooling, POOLINGS)


@dataclass
class AppArguments:
    """Flags of ``app``."""

    compare: str | None = flag(None, "Second checkpoint, which answers to the same documents beside the first.")
    host: str = flag("127.0.0.1", "Address to listen on. Other ones than of this computer show the page to a network.")
    port: int = flag(7860, "Port to listen on.")
    max_upload_mb: float = flag(50.0, "Size of the largest file that can be uploaded, in megabytes.")

    def __post_init__(self) -> None:
        """Check the flags."""
        if not 0 < self.port < 65536:
            raise ValueError(f"--port must be between 1 and 65535; got {self.port}")
        if not self.max_upload_mb > 0:
            raise ValueError(f"--max_upload_mb must be a positive number; got {self.max_upload_mb}")


def parse_command(
    command: str, description: str, types: Sequence[Any], argv: Sequence[str], *, takes_documents: bool = True
) -> tuple[str, list[str], *tuple[Any, ...]]:
    """Parse the command line of a command that answers.

    Args:
        command: Its name.
        description: What it does, for ``--help``.
        types: A dataclass for each group of flags.
        argv: The command line behind the command's name. Flags may stand anywhere.
        takes_documents: Whether documents follow the model.

    Returns:
        The model, the documents, and an instance of each dataclass.

    Raises:
        ValueError: No model is given, a flag is unknown, or its value cannot be used.
    """
    usage = f"hf-hybrid {command} MODEL {'DOCUMENT ... ' if takes_documents else ''}[flags]"
    parser = FlagParser(types, usage=usage, description=description, allow_abbrev=False)
    parser.add_argument(
        "model", nargs="?", help="Checkpoint folder, Hub id, or a starter of this package, such as spade-en-tiny."
    )
    if takes_documents:
        parser.add_argument("documents", nargs="*", help="Texts, files, folders, or - for standard input.")
    switches = {f"--{field.name}" for group in types for field in fields(group) if "bool" in str(field.type)}
    values, unknown = parser.parse_known_intermixed_args(_with_values(argv, switches))
    if unknown:
        parser.refuse(unknown[0])
    if values.model is None:
        raise ValueError(f"hf-hybrid {command} needs a model: {usage}")
    groups = [group(**{field.name: getattr(values, field.name) for field in fields(group)}) for group in types]
    return values.model, values.documents if takes_documents else [], *groups


def _with_values(argv: Sequence[str], switches: set[str]) -> list[str]:
    """Write ``--switch=true`` where no value follows, so that the argument behind it is not taken for one."""
    following = [*argv, ""][1:]
    truths = ("true", "false", "yes", "no", "1", "0")
    return [
        f"{word}=true" if word in switches and after.lower() not in truths else word
        for word, after in zip(argv, following, strict=True)
    ]
