"""A checkpoint that reads a document while somebody looks on: its text as it comes, and what that takes."""

import queue
import time
from collections.abc import Iterator
from pathlib import Path
from threading import Event, Thread
from typing import Any, NamedTuple

import psutil
import torch
from transformers import StoppingCriteria, StoppingCriteriaList, TextIteratorStreamer, set_seed

from hf_hybrid.commands.answers import Generate, Prompt, Summarize, is_out_of_memory
from hf_hybrid.commands.attended import Attended, NotShown, attended
from hf_hybrid.commands.checkpoint import check_checkpoint, check_generation, load_checkpoint
from hf_hybrid.commands.flags import (
    CheckpointArguments,
    DocumentArguments,
    GenerationArguments,
    SummarizeArguments,
)
from hf_hybrid.commands.readers import Unreadable, check_packages, checked_text, read_document
from hf_hybrid.training.errors import one_line

_COMMAND = "generate"  # takes language models and encoder-decoders
_INTERVAL = 0.05  # seconds between looks at what is generated
_SHOWN_ANYWAY = 0.5  # seconds after which something is shown, even without a new word


class Reading(NamedTuple):
    """How far a checkpoint is with a document."""

    text: str
    """What is written so far."""
    prompt: Prompt
    """What is read."""
    written: int
    """Tokens that are written."""
    first: float | None
    """Seconds from the document's text to the first token."""
    seconds: float
    """Seconds from the document's text to now."""
    rate: float | None
    """Tokens per second after the first."""
    memory: int
    """Highest memory so far, in bytes: allocated on the GPU, or resident of the process."""
    done: bool = False
    stopped: bool = False
    """Whether it was stopped before its end."""
    attended: Attended | None = None
    """What it looked at."""
    not_shown: str = ""
    """Why there is no `attended`, once that is known."""


def check_reader(name: str, flags: CheckpointArguments, generation: GenerationArguments) -> None:
    """Raise a ValueError if a checkpoint does not write texts, or not with these flags; nothing large is loaded."""
    check_generation(generation, name, check_checkpoint(name, _COMMAND, flags), flags)


def document_text(text: str, path: Path | None, flags: DocumentArguments) -> str:
    """Return the text of a file, or without one the text itself.

    Raises:
        Unreadable: There is none, it is too large, or a package is missing that reads the file.
    """
    if path is None and not text.strip():
        raise Unreadable("there is no document: drop a file or paste a text")
    if path is None:
        try:
            return checked_text(text, flags)
        except Unreadable as error:
            raise Unreadable(f"the text: {error}") from error
    try:
        check_packages({path.suffix.lower()})
        return read_document(path, flags, lambda note: None)
    except (Unreadable, ValueError) as error:
        raise Unreadable(f"{path.name}: {one_line(error)}") from error


class Reader:
    """A checkpoint that summarizes documents or continues them, whichever it is made for.

    Args:
        name: Folder, Hub id or starter.
        checkpoint: Flags of the model.
        documents: Flags of what is read.
        generation: Flags of generation.
        summarize: Flags of encoder-decoders.

    Raises:
        ValueError: The checkpoint cannot be loaded, or not be used with these flags.
    """

    def __init__(
        self,
        name: str,
        checkpoint: CheckpointArguments,
        documents: DocumentArguments,
        generation: GenerationArguments,
        summarize: SummarizeArguments,
    ) -> None:
        self.name = name
        loaded = load_checkpoint(name, _COMMAND, checkpoint)
        self.summarizes = bool(loaded.config.is_encoder_decoder)
        self.answerer: Generate = (
            Summarize(loaded, documents, generation, summarize)
            if self.summarizes
            else Generate(loaded, documents, generation)
        )
        beams = generation.num_beams or loaded.model.generation_config.num_beams or 1
        self.streams = beams == 1
        self.seed = generation.seed
        self.device: torch.device = loaded.model.device

    def read(self, text: str, stop: Event) -> Iterator[Reading]:
        """Read a document and write, in a thread of its own.

        Args:
            text: The document.
            stop: Ends the writing after the token that is being computed. If this iterator is closed, it is set.

        Yields:
            How far it is, at last with what the model looked at.

        Raises:
            Unreadable: There is not enough memory.
        """
        begun = time.perf_counter()
        prompt = self.answerer.prompt(text)
        writing = _Writing(self, prompt, begun, stop)
        writing.start()
        shown = reading = writing.reading("")
        try:
            yield shown
            while writing.is_alive():
                writing.join(_INTERVAL)
                reading = writing.reading(reading.text + writing.new_text())
                is_new = (reading.text, reading.written) != (shown.text, shown.written)
                if is_new or reading.seconds - shown.seconds > _SHOWN_ANYWAY:
                    shown = reading
                    yield shown
        except GeneratorExit:
            stop.set()
            raise
        finally:
            writing.join()
        outputs = self._checked(writing)
        # word by word a tokenizer may leave out spaces that the whole text has
        final = writing.reading(self.answerer.texts(outputs)[0])
        final = final._replace(written=outputs.shape[1] - (not self.answerer.continues), stopped=stop.is_set())
        yield final
        yield self._with_attended(final, text, outputs)

    def _checked(self, writing: "_Writing") -> torch.Tensor:
        """Return what was generated, or raise what kept it from that."""
        if writing.outputs is not None:
            return writing.outputs
        assert writing.error is not None
        if is_out_of_memory(writing.error):
            raise Unreadable(
                f"there is not enough memory for the document's {len(writing.prompt.ids):,} tokens; "
                "try --max_source_length"
            ) from writing.error
        raise writing.error

    def _with_attended(self, reading: Reading, text: str, outputs: torch.Tensor) -> Reading:
        """Add what the model looked at; a model that fails there has still written its text."""
        if not reading.written:
            return reading._replace(done=True, not_shown="nothing was written")
        try:
            return reading._replace(done=True, attended=attended(self.answerer, text, reading.prompt, outputs))
        except NotShown as error:
            return reading._replace(done=True, not_shown=str(error))
        except Exception as error:  # of models that are not ours: anything
            why = (
                "there is not enough memory"
                if is_out_of_memory(error)
                else f"{type(error).__name__}: {one_line(error)}"
            )
            return reading._replace(done=True, not_shown=why)


class _Writing(Thread):
    """Generation in a thread, and what is measured of it."""

    def __init__(self, reader: Reader, prompt: Prompt, begun: float, stop: Event) -> None:
        super().__init__(daemon=True)
        self.reader, self.prompt, self.begun = reader, prompt, begun
        self.outputs: torch.Tensor | None = None
        self.error: Exception | None = None
        self.streamer: Any = None
        if reader.streams:
            tokenizer = reader.answerer.checkpoint.tokenizer
            self.streamer = TextIteratorStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
        # an encoder-decoder's outputs begin with one token that is not generated
        self.watch = _Watch(begun, len(prompt.ids) if reader.answerer.continues else 1, stop)
        self.memory = 0
        if reader.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(reader.device)

    def run(self) -> None:
        """Generate."""
        answerer = self.reader.answerer
        options = {"streamer": self.streamer} if self.streamer is not None else {}
        try:
            set_seed(self.reader.seed)  # a document gives the same text each time
            batch = answerer.pad([self.prompt])
            self.outputs = answerer.outputs(batch, stopping_criteria=StoppingCriteriaList([self.watch]), **options)
        except Exception as error:  # raised where somebody looks on
            self.error = error

    def new_text(self) -> str:
        """Return what was written since the last call."""
        pieces: list[str] = []
        while self.streamer is not None:
            try:
                piece = self.streamer.text_queue.get_nowait()
            except queue.Empty:
                break
            if piece is not self.streamer.stop_signal:
                pieces.append(piece)
        return "".join(pieces)

    def reading(self, text: str) -> Reading:
        """Return how far it is."""
        if self.reader.device.type == "cuda":
            self.memory = torch.cuda.max_memory_allocated(self.reader.device)
        else:
            self.memory = max(self.memory, psutil.Process().memory_info().rss)
        watch = self.watch
        now = time.perf_counter() - self.begun
        return Reading(text, self.prompt, watch.written, watch.first, now, watch.rate, self.memory)


class _Watch(StoppingCriteria):
    """Count and time the tokens of one text, and end it when that is asked for."""

    def __init__(self, begun: float, before: int, stop: Event) -> None:
        self.begun, self.before, self.stop = begun, before, stop
        self.first: float | None = None
        self.first_written = self.written = 0
        self.last = 0.0

    @property
    def rate(self) -> float | None:
        """Tokens per second after the first."""
        if self.first is None or self.written == self.first_written:
            return None
        return (self.written - self.first_written) / (self.last - self.first)

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        """Say for each row whether to stop."""
        self.last, self.written = time.perf_counter() - self.begun, input_ids.shape[1] - self.before
        if self.first is None:
            self.first, self.first_written = self.last, self.written
        return torch.full((input_ids.shape[0],), self.stop.is_set(), dtype=torch.bool, device=input_ids.device)
