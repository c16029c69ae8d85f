"""``hf-hybrid app``: a page in the browser that reads a document with one checkpoint, or with two side by side."""

import os
import signal
import socket
import tempfile
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from threading import Event
from typing import Any

from hf_hybrid.commands import page
from hf_hybrid.commands.checkpoint import quiet
from hf_hybrid.commands.flags import (
    AppArguments,
    CheckpointArguments,
    DocumentArguments,
    GenerationArguments,
    SummarizeArguments,
    parse_command,
)
from hf_hybrid.commands.readers import EXTENSIONS, Unreadable
from hf_hybrid.commands.reading import Reader, check_reader, document_text
from hf_hybrid.training.errors import HungUp, Terminated, one_line

_DESCRIPTION = "Open a page in the browser: drop a document, and read what a model makes of it."
_TYPES = (AppArguments, CheckpointArguments, DocumentArguments, GenerationArguments, SummarizeArguments)
_KEPT = 3600  # seconds that an upload is kept
_SIGNALS = {"SIGTERM": Terminated, "SIGHUP": HungUp}


def main(argv: Sequence[str]) -> int:
    """Show the page until Ctrl-C.

    Args:
        argv: The model and flags.

    Returns:
        0.

    Raises:
        ValueError: An argument cannot be used, gradio is not installed, or the port is taken.
    """
    name, _, flags, checkpoint, documents, generation, summarize = parse_command(
        "app", _DESCRIPTION, _TYPES, argv, takes_documents=False
    )
    if documents.text_column is not None:
        raise ValueError("--text_column is for tables, which the page does not read")
    if find_spec("gradio") is None:
        raise ValueError("hf-hybrid app needs the package gradio: pip install 'hf-hybrid[app]'")
    names = [name, *([flags.compare] if flags.compare is not None else [])]
    _check_port(flags)
    with quiet():
        for checked in names:
            check_reader(checked, checkpoint, generation)
        readers = [Reader(each, checkpoint, documents, generation, summarize) for each in names]
        with _temporary_folder(), _ended_by_signals():
            _serve(Desk(readers, documents), flags)
    return 0


class Desk:
    """What the page does: it takes a document to each checkpoint, and can stop that.

    Args:
        readers: The checkpoints.
        documents: Flags of what is read.
    """

    def __init__(self, readers: list[Reader], documents: DocumentArguments) -> None:
        self.readers, self.documents = readers, documents
        self._stops: dict[str, Event] = {}

    def begin(self, session: str) -> list[str]:
        """Note that a tab of a browser asks for an answer; return what it shows until that begins."""
        self._stops[session] = Event()
        return ["", *["", page.note("Waiting …"), ""] * len(self.readers)]

    def stop(self, session: str) -> None:
        """Stop what a tab has asked for."""
        if session in self._stops:
            self._stops[session].set()

    def stop_all(self) -> None:
        """Stop everything."""
        for stop in list(self._stops.values()):
            stop.set()

    def leave(self, session: str) -> None:
        """Stop what a tab has asked for, and forget it."""
        self.stop(session)
        self._stops.pop(session, None)

    def answer(self, text: str, path: str | None, session: str) -> Iterator[list[str]]:
        """Take a document to each checkpoint in turn.

        Args:
            text: The document.
            path: A file that is read instead.
            session: The tab that asks.

        Yields:
            What is shown: the problem, and for each checkpoint its text, its numbers and what it looked at.
        """
        stop = self._stops.setdefault(session, Event())
        shown = ["", *["", page.note("Waiting …"), ""] * len(self.readers)]
        try:
            document = document_text(text, None if path is None else Path(path), self.documents)
        except Unreadable as error:
            yield [page.problem(one_line(error)), *["", "", ""] * len(self.readers)]
            return
        for index, reader in enumerate(self.readers):
            column = slice(3 * index + 1, 3 * index + 4)
            try:
                if stop.is_set():
                    shown[column] = ["", page.note("Stopped."), ""]
                for reading in () if stop.is_set() else reader.read(document, stop):
                    shown[column] = [reading.text, page.numbers(reader, reading), page.attended(reading)]
                    yield list(shown)
            except Unreadable as error:
                shown[column] = ["", page.problem(one_line(error)), ""]
            except Exception as error:  # of a model: anything; the page stays
                traceback.print_exception(error)
                failed = f"The model failed with {type(error).__name__}: {one_line(error)}"
                shown[column] = ["", page.problem(failed), ""]
        yield shown


def _check_port(flags: AppArguments) -> None:
    """Raise a ValueError if the page cannot listen where it shall."""
    try:
        family, *_, address = socket.getaddrinfo(flags.host, flags.port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            if os.name != "nt":
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as the server will
            probe.bind(address)
    except OSError as error:
        raise ValueError(
            f"the page cannot listen on {flags.host}:{flags.port} ({error.strerror or error}): name another --port or "
            "--host"
        ) from error


@contextmanager
def _temporary_folder() -> Iterator[None]:
    """Give this process a folder for uploads and all its temporary files, which is deleted at the end."""
    variables = {name: os.environ.get(name) for name in ("GRADIO_TEMP_DIR", "GRADIO_ANALYTICS_ENABLED", "no_proxy")}
    before = tempfile.tempdir
    with tempfile.TemporaryDirectory(prefix="hf-hybrid-app-") as folder:
        try:
            tempfile.tempdir = os.environ["GRADIO_TEMP_DIR"] = folder
            os.environ["GRADIO_ANALYTICS_ENABLED"] = "False"
            reached = (os.environ.get("no_proxy") or os.environ.get("NO_PROXY"), "localhost", "127.0.0.1", "::1")
            os.environ["no_proxy"] = ",".join(filter(None, reached))  # gradio asks its own server whether it is there
            yield
        finally:
            tempfile.tempdir = before
            for name, value in variables.items():
                os.environ.pop(name, None)
                if value is not None:
                    os.environ[name] = value


@contextmanager
def _ended_by_signals() -> Iterator[None]:
    """Let the signals that end a program raise an exception, so that the temporary folder is deleted."""

    def end(number: int, frame: Any) -> None:
        raise _SIGNALS[signal.Signals(number).name]

    before = {name: signal.signal(getattr(signal, name), end) for name in _SIGNALS if hasattr(signal, name)}
    try:
        yield
    finally:
        for name, handler in before.items():
            signal.signal(getattr(signal, name), handler)


def _serve(desk: Desk, flags: AppArguments) -> None:
    """Show the page until Ctrl-C."""
    blocks, look = _blocks(desk)
    try:
        blocks.launch(
            server_name=flags.host,
            server_port=flags.port,
            max_file_size=int(flags.max_upload_mb * 1e6),
            prevent_thread_lock=True,
            quiet=True,
            inbrowser=False,
            share=False,
            enable_monitoring=False,
            run_history=False,
            ssr_mode=False,
            pwa=False,
            mcp_server=False,
            footer_links=[],
            **look,
        )
        print(f"The page is at http://{flags.host}:{flags.port} until Ctrl-C", flush=True)
        Event().wait()
    except KeyboardInterrupt as interrupt:
        if isinstance(interrupt, tuple(_SIGNALS.values())):
            raise
    finally:
        desk.stop_all()
        blocks.close(verbose=False)


def _blocks(desk: Desk) -> tuple[Any, dict[str, Any]]:
    """Return the page, and what `launch` is told about its looks."""
    import gradio as gr

    with gr.Blocks(title="hf-hybrid", analytics_enabled=False, delete_cache=(_KEPT // 6, _KEPT)) as blocks:
        gr.HTML(page.heading(desk.readers), elem_id="head")
        with gr.Row(equal_height=True):
            with gr.Column(scale=2, min_width=300):
                text = gr.Textbox(label="Text", lines=9, max_lines=9, placeholder=_PASTE, elem_id="text")
            with gr.Column(scale=1, min_width=240):
                file = gr.File(label="File", file_types=list(EXTENSIONS), height=200, elem_id="file")
        with gr.Row():
            verb = "Summarize" if desk.readers[0].summarizes else "Continue"
            start = gr.Button(verb, variant="primary", min_width=120, elem_id="start")
            end = gr.Button("Stop", interactive=False, min_width=120, elem_id="stop")
        shown = [gr.HTML(elem_id="problem")]
        with gr.Row(equal_height=False):
            for index, reader in enumerate(desk.readers):
                with gr.Column(min_width=300):
                    gr.HTML(page.name(reader))
                    label = "Summary" if reader.summarizes else "Continuation"
                    shown += [
                        gr.Textbox(label=label, lines=4, max_lines=16, buttons=["copy"], elem_id=f"answer-{index}"),
                        gr.HTML(elem_id=f"numbers-{index}"),
                        gr.HTML(elem_id=f"attended-{index}"),
                    ]
        _connect(blocks, desk, (text, file, start, end), shown)
    font = ["system-ui", "sans-serif"]
    theme = gr.themes.Default(primary_hue="teal", font=font, font_mono=["ui-monospace", "monospace"])
    colours = {
        "button_primary_background_fill": "*primary_700",
        "button_primary_background_fill_hover": "*primary_800",
    }
    theme.set(**colours, **{f"{name}_dark": colour for name, colour in colours.items()})
    theme.set(input_placeholder_color="*neutral_500", input_placeholder_color_dark="*neutral_400")
    return blocks, {"theme": theme, "css": page.STYLE}


def _connect(blocks: Any, desk: Desk, inputs: tuple[Any, ...], shown: list[Any]) -> None:
    """Connect the page's buttons to what they do."""
    import gradio as gr

    text, file, start, end = inputs
    hidden: dict[str, Any] = {"show_progress": "hidden", "api_visibility": "private"}

    def begin(request: gr.Request) -> list[Any]:
        return [gr.update(interactive=False), gr.update(interactive=True), *desk.begin(str(request.session_hash))]

    def answer(text: str, path: str | None, request: gr.Request) -> Iterator[list[str]]:
        yield from desk.answer(text or "", path, str(request.session_hash))

    def stop(request: gr.Request) -> None:
        desk.stop(str(request.session_hash))

    def leave(request: gr.Request) -> None:
        desk.leave(str(request.session_hash))

    def finish() -> list[Any]:
        return [gr.update(interactive=True), gr.update(interactive=False)]

    def take(path: str | None) -> Any:
        return gr.update(interactive=path is None, placeholder=_PASTE if path is None else _DROPPED)

    file.change(take, file, text, queue=False, **hidden)
    begun = start.click(begin, None, [start, end, *shown], queue=False, **hidden)
    answered = begun.then(answer, [text, file], shown, concurrency_limit=1, **hidden)
    answered.then(finish, None, [start, end], queue=False, **hidden)
    end.click(stop, None, None, queue=False, **hidden)
    blocks.unload(leave)


_PASTE = "Paste a text here, or drop a file beside it."
_DROPPED = "The file is read. Remove it to paste a text."
