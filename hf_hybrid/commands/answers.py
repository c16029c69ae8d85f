"""What a model answers to a batch of documents: a summary, a continuation, a label, a vector."""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from transformers import set_seed

from hf_hybrid.commands.checkpoint import Checkpoint, new_tokens
from hf_hybrid.commands.flags import (
    ClassifyArguments,
    DocumentArguments,
    EmbedArguments,
    GenerationArguments,
    SummarizeArguments,
)
from hf_hybrid.training.errors import one_line


class Prompt(NamedTuple):
    """A document as token ids, and how many it had before it was cut."""

    ids: list[int]
    tokens: int


class Answerer:
    """A command's model: it turns documents into ids and batches of ids into rows of the output."""

    cut_side = padding_side = "right"

    def __init__(self, checkpoint: Checkpoint, documents: DocumentArguments) -> None:
        self.checkpoint = checkpoint
        given = (documents.max_source_length, self.positions())
        self.limit = min((limit for limit in given if limit is not None), default=None)
        # many models count positions from the beginning of a row, where on the left padding would stand
        checkpoint.tokenizer.padding_side = self.padding_side

    def positions(self) -> int | None:
        """Return the most tokens that may be read, None if the model has no limit."""
        return self.checkpoint.positions

    def prompt(self, text: str) -> Prompt:
        """Encode a document, cut to the limit if there is one."""
        tokenizer = self.checkpoint.tokenizer
        ids = tokenizer(text, verbose=False)["input_ids"]
        if self.limit is None or len(ids) <= self.limit:
            return Prompt(ids, len(ids))
        tokenizer.truncation_side = self.cut_side
        return Prompt(tokenizer(text, truncation=True, max_length=self.limit)["input_ids"], len(ids))

    def answer(self, prompts: Sequence[Prompt]) -> list[dict[str, Any]]:
        """Return a row of the output for each document of a batch."""
        raise NotImplementedError

    def pad(self, prompts: Sequence[Prompt]) -> dict[str, torch.Tensor]:
        """Pad a batch to one length, on the model's device."""
        batch = self.checkpoint.tokenizer.pad({"input_ids": [prompt.ids for prompt in prompts]}, return_tensors="pt")
        return {name: batch[name].to(self.checkpoint.model.device) for name in ("input_ids", "attention_mask")}


class Generate(Answerer):
    """Continue texts, or what an encoder-decoder makes of them."""

    field = "text"
    prefix = ""

    def __init__(self, checkpoint: Checkpoint, documents: DocumentArguments, generation: GenerationArguments) -> None:
        self.given = generation.given()
        self.options = dict(self.given)
        self.continues = not checkpoint.config.is_encoder_decoder
        room = decoder_positions(checkpoint)
        self.new_tokens = new_tokens(checkpoint.model.generation_config, checkpoint.config)
        if generation.max_new_tokens is not None:
            self.new_tokens = generation.max_new_tokens
            if room is not None and self.new_tokens >= room:
                raise ValueError(
                    f"--max_new_tokens must be less than the model's {room} positions; got {self.new_tokens}"
                )
        elif room is not None and self.new_tokens >= room:
            self.new_tokens = max(room // 2, 1)
        self.options["max_new_tokens"] = self.new_tokens
        if self.continues:
            self.cut_side = self.padding_side = "left"
        super().__init__(checkpoint, documents)
        set_seed(generation.seed)

    def positions(self) -> int | None:
        """Leave room for a continuation."""
        limit = self.checkpoint.positions
        return limit if limit is None or not self.continues else limit - self.new_tokens

    def answer(self, prompts: Sequence[Prompt]) -> list[dict[str, Any]]:
        """Generate for a batch."""
        return [{self.field: text} for text in self.texts(self.outputs(self.pad(prompts)))]

    def outputs(self, batch: dict[str, torch.Tensor], **options: Any) -> torch.Tensor:
        """Return what `generate` returns, without the prompts; `options` are further ones of it."""
        try:
            outputs: torch.Tensor = self.checkpoint.model.generate(**batch, **self.options, **options)
        except (ValueError, ImportError) as error:
            if not self.given:
                raise
            flags = " ".join(f"--{name} {value}" for name, value in self.given.items())
            raise ValueError(f"the model cannot generate with {flags}: {one_line(error)}") from error
        return outputs[:, batch["input_ids"].shape[1] :] if self.continues else outputs

    def texts(self, outputs: torch.Tensor) -> list[str]:
        """Return the texts of `outputs`."""
        texts: list[str] = self.checkpoint.tokenizer.batch_decode(outputs, skip_special_tokens=True)
        return [text.strip() for text in texts]


def decoder_positions(checkpoint: Checkpoint) -> int | None:
    """Return the most tokens that a model has positions for where it writes; None if it writes any number."""
    config: Any = checkpoint.config
    if hasattr(config, "decoder"):  # two models that were put together
        limit: int | None = getattr(config.decoder, "max_position_embeddings", None)
        return limit
    return getattr(config, "max_decoder_position_embeddings", checkpoint.positions)


class Summarize(Generate):
    """Summarize documents with an encoder-decoder."""

    field = "summary"

    def __init__(
        self,
        checkpoint: Checkpoint,
        documents: DocumentArguments,
        generation: GenerationArguments,
        flags: SummarizeArguments,
    ) -> None:
        super().__init__(checkpoint, documents, generation)
        self.prefix = source_prefix(checkpoint) if flags.source_prefix is None else flags.source_prefix

    def prompt(self, text: str) -> Prompt:
        """Encode a document behind the prefix."""
        return super().prompt(self.prefix + text)


def source_prefix(checkpoint: Checkpoint) -> str:
    """Return the text that a checkpoint wants before a document, as T5's configurations say it; "" without one."""
    tasks = getattr(checkpoint.config, "task_specific_params", None) or {}
    prefix = (tasks.get("summarization") or {}).get("prefix")
    return prefix if isinstance(prefix, str) else ""


class Classify(Answerer):
    """Give each document its likeliest label; if it can have several, each has its own probability; or its numbers."""

    def __init__(self, checkpoint: Checkpoint, documents: DocumentArguments, flags: ClassifyArguments) -> None:
        if getattr(checkpoint.config, "summary_type", None) == "last":  # XLNet reads the last position, not token
            self.padding_side = "left"
        super().__init__(checkpoint, documents)
        self.labels: dict[Any, str] = checkpoint.config.id2label or {}
        self.top_k = min(flags.top_k, len(self.labels))

    def answer(self, prompts: Sequence[Prompt]) -> list[dict[str, Any]]:
        """Classify a batch."""
        problem = self.checkpoint.config.problem_type
        with torch.inference_mode():
            logits = self.checkpoint.model(**self.pad(prompts)).logits.float()
        if predicts_numbers(self.checkpoint.config):
            return [self._row(list(self.labels.values()), _short(values)) for values in logits.tolist()]
        scores = logits.sigmoid() if problem == "multi_label_classification" else logits.softmax(-1)
        scores, labels = scores.topk(self.top_k)
        return [
            self._row([self.labels[label] for label in names], _short(values))
            for names, values in zip(labels.tolist(), scores.tolist(), strict=True)
        ]

    def _row(self, names: list[str], scores: list[float]) -> dict[str, Any]:
        pairs = [{"label": name, "score": score} for name, score in zip(names, scores, strict=True)]
        return pairs[0] if len(pairs) == 1 else {**pairs[0], "labels": pairs}


def predicts_numbers(config: Any) -> bool:
    """Whether a classifier's labels are numbers that it predicts, one or several."""
    return config.problem_type == "regression" or (config.num_labels == 1 and config.problem_type is None)


def is_finite(row: Mapping[str, Any]) -> bool:
    """Whether the numbers of an answer are numbers: in low precision a model can overflow."""
    scores = [pair["score"] for pair in row.get("labels") or [row] if "score" in pair]
    return all(map(math.isfinite, [*scores, *row.get("embedding", ())]))


class Embed(Answerer):
    """Give each document a vector: its last hidden states, pooled."""

    def __init__(self, checkpoint: Checkpoint, documents: DocumentArguments, flags: EmbedArguments) -> None:
        super().__init__(checkpoint, documents)
        self.flags = flags

    def answer(self, prompts: Sequence[Prompt]) -> list[dict[str, Any]]:
        """Embed a batch."""
        model, batch = self.checkpoint.model, self.pad(prompts)
        reader = model.get_encoder() if self.checkpoint.config.is_encoder_decoder else model
        with torch.inference_mode():
            states = reader(**batch).last_hidden_state.float()
        kept = batch["attention_mask"].to(states.dtype)
        if self.flags.pooling == "first":
            kept = kept * (kept.cumsum(1) == 1)
        elif self.flags.pooling == "last":
            kept = kept * (kept.cumsum(1) == kept.sum(1, keepdim=True))
        vectors = torch.einsum("btd,bt->bd", states, kept) / kept.sum(1, keepdim=True)
        if self.flags.normalize_embeddings:
            vectors = torch.nn.functional.normalize(vectors, dim=-1)
        return [{"embedding": _short(vector)} for vector in vectors.tolist()]


def _short(values: Sequence[float]) -> list[float]:
    """Round numbers of 32 bits to the nine digits that they have; written in full, files are twice as large."""
    return [float(f"{value:.9g}") for value in values]


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that there is not enough memory: torch's have no common class on CPUs and GPUs."""
    return isinstance(error, torch.OutOfMemoryError) or (
        isinstance(error, RuntimeError) and "can't allocate memory" in str(error)
    )


def batches(lengths: Sequence[int], most: int, most_tokens: int) -> Iterator[list[int]]:
    """Divide documents into batches of similar length.

    Args:
        lengths: The tokens of each document.
        most: Most documents of a batch.
        most_tokens: Most tokens of a batch of several documents, padding included.

    Yields:
        The indices of a batch's documents; the longest come first.
    """
    batch: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda index: -lengths[index]):
        if batch and (len(batch) == most or (len(batch) + 1) * lengths[batch[0]] > most_tokens):
            yield batch
            batch = []
        batch.append(index)
    if batch:
        yield batch
