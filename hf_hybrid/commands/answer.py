"""``hf-hybrid summarize``, ``generate``, ``classify``, ``embed``: read documents, and write what a model answers."""

import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

from tqdm import tqdm

from hf_hybrid.commands.answers import (
    Answerer,
    Classify,
    Embed,
    Generate,
    Prompt,
    Summarize,
    batches,
    is_finite,
    is_out_of_memory,
    predicts_numbers,
)
from hf_hybrid.commands.checkpoint import check_checkpoint, check_generation, load_checkpoint, quiet, version_of
from hf_hybrid.commands.documents import Document, find_sources, read_sources
from hf_hybrid.commands.flags import (
    CheckpointArguments,
    ClassifyArguments,
    DocumentArguments,
    EmbedArguments,
    GenerationArguments,
    OutputArguments,
    SummarizeArguments,
    parse_command,
)
from hf_hybrid.commands.results import FILES_OF_THE_MODEL, Output, progress_file
from hf_hybrid.training.errors import one_line


class _Command(NamedTuple):
    answerer: type[Any]
    flags: tuple[Any, ...]
    fields: tuple[str, ...]


_COMMANDS = {
    "summarize": _Command(Summarize, (GenerationArguments, SummarizeArguments), ("summary",)),
    "generate": _Command(Generate, (GenerationArguments,), ("text",)),
    "classify": _Command(Classify, (ClassifyArguments,), ("label", "score")),
    "embed": _Command(Embed, (EmbedArguments,), ("embedding",)),
}
# documents that are sorted by length together, and written together: so many batches, but in all no more tokens than
# so many full batches of several documents have
_BATCHES, _FULL_BATCHES = 16, 4
_SAID_EVERY = 30.0  # seconds
_NAMED = 5  # documents that are cut; more are counted


def main(command: str, description: str, argv: Sequence[str]) -> int:
    """Run a command.

    Args:
        command: Its name.
        description: What it does, for ``--help``.
        argv: Its arguments.

    Returns:
        0 if every document has an answer, 1 if one could not be read.

    Raises:
        ValueError: An argument cannot be used, which is said before the model is loaded.
        KeyboardInterrupt: Ctrl-C; what is written stays, and the same command continues.
    """
    answerer_class, own_types, fields = _COMMANDS[command]
    types = (DocumentArguments, OutputArguments, CheckpointArguments, *own_types)
    name, arguments, documents, outputs, checkpoint_flags, *own = parse_command(command, description, types, argv)
    written = [] if outputs.output is None else [Path(outputs.output), progress_file(Path(outputs.output))]
    sources = find_sources(arguments, documents, leave_out=written)
    with quiet():
        config = check_checkpoint(name, command, checkpoint_flags)
        if isinstance(own[0], GenerationArguments):
            check_generation(own[0], name, config, checkpoint_flags)
        settings = _settings(command, name, documents, checkpoint_flags, own)
        settings[FILES_OF_THE_MODEL] = version_of(name, checkpoint_flags, config)
        if command == "classify":
            shown = len(config.id2label or {}) if predicts_numbers(config) else own[0].top_k
            fields = (*fields, "labels") if shown > 1 else fields
        if getattr(own[0], "prompt_lookup_num_tokens", None) is not None:
            outputs.batch_size = 1  # transformers guesses for one text at a time
        count = sum(source.documents for source in sources)
        with Output(outputs, fields, settings, single=len(sources) == 1 and count == 1) as output:
            answerer = answerer_class(load_checkpoint(name, command, checkpoint_flags), documents, *own)
            output.open()
            return _Run(answerer, output, outputs, count).answer(read_sources(sources, documents))


def _settings(
    command: str, model: str, documents: DocumentArguments, checkpoint: CheckpointArguments, own: Sequence[Any]
) -> dict[str, Any]:
    """Return what the rows depend on, by flag, besides the texts, by which documents are recognised."""
    values = {name: value for flags in own for name, value in asdict(flags).items()}
    revision = {name: getattr(checkpoint, name) for name in ("model_revision", "tokenizer_name", "dtype")}
    model = str(Path(model).resolve()) if Path(model).is_dir() else model
    return {"command": command, "model": model, **revision, "max_source_length": documents.max_source_length, **values}


def _lengths(prompt: Prompt) -> dict[str, int]:
    return {"tokens": prompt.tokens, "tokens_read": len(prompt.ids)}


class _Run:
    """One pass over the documents."""

    def __init__(self, answerer: Answerer, output: Output, flags: OutputArguments, count: int) -> None:
        self.answerer, self.output, self.flags = answerer, output, flags
        self.bar = tqdm(total=count, unit="document", desc="Reading", disable=None, file=sys.stderr, smoothing=0.05)
        self.seen = 0  # the bar counts only if it is shown
        self.works = False  # whether the model has answered to any document
        self.failed: list[tuple[Document, Exception]] = []
        self.begun = self.said = time.perf_counter()
        self.answered = self.skipped = self.done = self.cut = 0

    def answer(self, documents: Iterator[Document]) -> int:
        """Answer all documents; return the exit code."""
        try:
            for window in self._windows(documents):
                self._answer_window(window)
        except KeyboardInterrupt:
            if self.output.path is not None:
                command = f"the same command{' without --overwrite_output' if self.flags.overwrite_output else ''}"
                self._say(f"what is written stays in {self.output.path}; {command} goes on from there")
            raise
        finally:
            self.bar.close()
            seconds = time.perf_counter() - self.begun
            answered = f"{self.answered} document{'' if self.answered == 1 else 's'}"
            self._say(
                f"{answered} in {seconds:.1f} s ({self.answered / seconds:.2f} per second)"
                + (f"; {self.done} were there already" if self.done else "")
                + (f"; {self.cut} cut" if self.cut else "")
                + (f"; {self.skipped} skipped" if self.skipped else "")
            )
        return 1 if self.skipped else 0

    def _windows(self, documents: Iterator[Document]) -> Iterator[list[tuple[Document, Prompt]]]:
        """Yield the documents that need an answer, as many at a time as are written together."""
        window: list[tuple[Document, Prompt]] = []
        tokens = 0
        for document in documents:
            if document.problem is not None:
                self._skip(document, document.problem)
                self._update(1)
            elif self.output.is_done(document):
                self.done += 1
                self._update(1)
            else:
                if document.note is not None:
                    self._say(f"{document.name}: {document.note}")
                try:
                    prompt = self._prompt(document)
                except Exception as error:  # tokenizers raises no other kind for a word that a vocabulary lacks
                    self._skip(document, f"the tokenizer cannot read it: {one_line(error)}")
                    self._update(1)
                    continue
                window.append((document, prompt))
                tokens += len(prompt.ids)
            full = self.flags.batch_size * (1 if self.output.path is None else _BATCHES)
            if len(window) == full or tokens > _FULL_BATCHES * self.flags.batch_tokens:
                yield window
                window, tokens = [], 0
        if window:
            yield window

    def _answer_window(self, window: list[tuple[Document, Prompt]]) -> None:
        """Answer some documents, sorted by length, and write them in their order; what is answered is not lost."""
        kept = ((index, self.output.row_of(document)) for index, (document, _) in enumerate(window))
        rows = {index: row for index, row in kept if row is not None}
        left = {index for index in range(len(window)) if index not in rows}
        asked = sorted(left)
        lengths = [len(window[index][1].ids) for index in asked]
        self._update(len(rows))
        try:
            for batch in batches(lengths, self.flags.batch_size, self.flags.batch_tokens):
                indices = [asked[number] for number in batch]
                answers = zip(indices, self._rows([window[index] for index in indices]), strict=True)
                new = {index: row | _lengths(window[index][1]) for index, row in answers if row is not None}
                self.output.keep([window[index][0] for index in new], list(new.values()))
                rows |= new
                left.difference_update(indices)
                self._update(len(batch))
                self._skip_failed(is_last=False)
            self._skip_failed(is_last=True)
        finally:  # what stands behind a document without an answer waits for it
            order = [index for index in sorted(rows) if index < min(left, default=len(window))]
            self.output.write([window[index][0] for index in order], [rows[index] for index in order])
            self.answered += len(order)

    def _prompt(self, document: Document) -> Prompt:
        prompt = self.answerer.prompt(document.text)
        if len(prompt.ids) < prompt.tokens:
            self.cut += 1
            if self.cut <= _NAMED:
                self._say(f"{document.name}: {len(prompt.ids):,} of its {prompt.tokens:,} tokens are read")
            elif self.cut == _NAMED + 1:
                self._say("further documents that are cut are counted")
        return prompt

    def _rows(self, batch: list[tuple[Document, Prompt]]) -> list[dict[str, Any] | None]:
        """Return the rows of a batch; where it fails, as by too much memory, try its halves, and at last skip one."""
        try:
            rows = self.answerer.answer([prompt for _, prompt in batch])
            self.works = True
            return [self._checked(row, document) for (document, _), row in zip(batch, rows, strict=True)]
        except Exception as error:
            failed = error
        if len(batch) > 1:
            half = len(batch) // 2
            return self._rows(batch[:half]) + self._rows(batch[half:])
        ((document, prompt),) = batch
        if is_out_of_memory(failed):
            why = f"there is not enough memory for its {len(prompt.ids):,} tokens; try --max_source_length"
            self._skip(document, why)
        else:
            self.failed.append((document, failed))
        return [None]

    def _skip_failed(self, *, is_last: bool) -> None:
        """Skip the documents on which the model failed, once it has answered to another.

        Raises:
            Exception: It has answered to none: then it is not the documents.
        """
        if self.works:
            for document, error in self.failed:
                self._skip(document, f"the model fails on it: {type(error).__name__}: {one_line(error)}")
            self.failed.clear()
        elif self.failed and is_last:
            raise self.failed[0][1]

    def _checked(self, row: dict[str, Any], document: Document) -> dict[str, Any] | None:
        if is_finite(row):
            return row
        self._skip(document, "the model's answer is no number (it is not finite); try --dtype float32")
        return None

    def _skip(self, document: Document, why: str) -> None:
        self.skipped += 1
        self._say(f"{document.name} is skipped: {why}")

    def _update(self, documents: int) -> None:
        """Count documents; where no bar is shown, because nobody may be looking on, say now and then how far it is."""
        self.bar.update(documents)
        self.seen += documents
        now = time.perf_counter()
        if documents and self.bar.disable and now - self.said > _SAID_EVERY:
            self.said = now
            meter = tqdm.format_meter(self.seen, self.bar.total, now - self.begun, unit="document", ncols=0)
            self._say(f"Reading: {meter.strip()}")

    def _say(self, line: str) -> None:
        self.bar.write(line, file=sys.stderr)
