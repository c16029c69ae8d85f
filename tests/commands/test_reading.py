"""The page without its page: what a reader writes and measures, what the desk shows of it, and what is refused."""

import os
import re
import signal
import socket
import sys
import tempfile
import threading
import time
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from hf_hybrid.commands import app, page
from hf_hybrid.commands.answers import Prompt
from hf_hybrid.commands.app import Desk
from hf_hybrid.commands.attended import Attended, Weights
from hf_hybrid.commands.flags import CheckpointArguments, DocumentArguments, GenerationArguments, SummarizeArguments
from hf_hybrid.commands.program import main
from hf_hybrid.commands.readers import Unreadable
from hf_hybrid.commands.reading import Reader, Reading, _Writing, document_text
from hf_hybrid.training.errors import Terminated
from tests.commands.files import encrypt_pdf, write_pdf

TEXT = "A first document, which is not long."
FLAGS = DocumentArguments()


def reader_of(folder, *, limit=None, **generation):
    documents = DocumentArguments(max_source_length=limit)
    flags = GenerationArguments(**{"max_new_tokens": 12, **generation})
    return Reader(folder, CheckpointArguments(device="cpu"), documents, flags, SummarizeArguments())


def printed(*arguments, capsys):
    """Return what a command prints."""
    assert main([str(argument) for argument in arguments]) == 0
    return capsys.readouterr().out.removesuffix("\n")


# ---- reading ----


@pytest.mark.parametrize(
    ("command", "model_type", "auto_class"),
    [
        ("summarize", "spade", "AutoModelForSeq2SeqLM"),
        ("summarize", "srformer_t5", "AutoModelForSeq2SeqLM"),
        ("generate", "bst", "AutoModelForCausalLM"),
        ("generate", "chela", "AutoModelForCausalLM"),
    ],
)
def test_the_text_is_that_of_the_command(command, model_type, auto_class, folders, capsys):
    folder = folders(model_type, auto_class)
    reader = reader_of(folder, limit=20)
    readings = list(reader.read(TEXT, threading.Event()))
    last = readings[-1]
    assert last.text == printed(
        command, folder, TEXT, "--max_new_tokens", 12, "--max_source_length", 20, capsys=capsys
    )
    assert reader.summarizes == (command == "summarize")
    assert len(last.prompt.ids) == 20 < last.prompt.tokens
    assert 0 < last.written <= 12
    assert 0 < last.first <= last.seconds
    assert last.rate is None if last.written == 1 else last.rate > 0
    assert last.memory > 1e7
    assert [reading.done for reading in readings] == [False] * (len(readings) - 1) + [True]
    assert (last.attended is None) == (model_type == "chela")
    assert ("no attention weights" in last.not_shown) == (model_type == "chela")
    assert not last.stopped


class Slowly:
    """A model that waits before each token, so that somebody can look on."""

    def __init__(self, reader, seconds=0.06):
        model = reader.answerer.checkpoint.model
        model.register_forward_hook(lambda *_: time.sleep(seconds))


def test_tokens_are_shown_as_they_come(folders):
    reader = reader_of(folders("spade", "AutoModelForCausalLM"), repetition_penalty=5.0)
    Slowly(reader)
    readings = list(reader.read(TEXT, threading.Event()))
    written = [reading.written for reading in readings]
    assert written == sorted(written)
    assert len(set(written)) > 4
    assert (written[0], readings[0].first, written[-1]) == (0, None, 12)
    assert 5 < readings[-1].rate < 1 / 0.06
    assert readings[-1].first == pytest.approx(readings[-1].seconds - 11 / readings[-1].rate, abs=0.1)


def test_beams_show_their_text_at_the_end(folders, capsys):
    folder = folders("spade", "AutoModelForSeq2SeqLM")
    reader = reader_of(folder, num_beams=2)
    assert not reader.streams
    Slowly(reader)
    readings = list(reader.read(TEXT, threading.Event()))
    assert {reading.text for reading in readings[:-2]} == {""}
    assert readings[-1].text == printed(
        "summarize", folder, TEXT, "--max_new_tokens", 12, "--num_beams", 2, capsys=capsys
    )
    assert readings[-1].attended is not None
    assert "beams" in page.numbers(reader, readings[0]._replace(written=1))


def test_what_is_drawn_is_the_same_each_time(folders):
    reader = reader_of(folders("bst", "AutoModelForCausalLM"), do_sample=True, temperature=2.0)
    texts = [list(reader.read(TEXT, threading.Event()))[-1].text for _ in range(2)]
    assert texts[0] == texts[1]


def test_writing_can_be_stopped(folders):
    reader, stop = reader_of(folders("spade", "AutoModelForCausalLM"), max_new_tokens=500), threading.Event()
    Slowly(reader)
    for reading in reader.read(TEXT, stop):
        if reading.written >= 2:
            stop.set()
    assert reading.done
    assert reading.stopped
    assert 2 <= reading.written < 20
    assert reading.attended is not None
    assert "Stopped." in page.numbers(reader, reading)


def test_writing_ends_when_nobody_looks_on(folders):
    reader, stop = reader_of(folders("spade", "AutoModelForCausalLM"), max_new_tokens=500), threading.Event()
    Slowly(reader)
    readings = reader.read(TEXT, stop)
    next(readings)
    (thread,) = (thread for thread in threading.enumerate() if isinstance(thread, _Writing))
    readings.close()
    assert stop.is_set()
    assert not thread.is_alive()


@pytest.mark.parametrize(
    ("error", "kind", "message"),
    [
        (RuntimeError("x: can't allocate memory"), Unreadable, "not enough memory for the document's 37 tokens"),
        (torch.OutOfMemoryError("CUDA"), Unreadable, "not enough memory"),
        (RuntimeError("something else"), RuntimeError, "something else"),
    ],
)
def test_errors_of_the_thread_are_raised(error, kind, message, folders, monkeypatch):
    reader = reader_of(folders("spade", "AutoModelForSeq2SeqLM"))

    def fails(*args, **kwargs):
        raise error

    monkeypatch.setattr(reader.answerer, "outputs", fails)
    with pytest.raises(kind, match=message):
        list(reader.read(TEXT, threading.Event()))


def test_a_model_that_cannot_show_its_attention_still_writes(folders, monkeypatch):
    reader = reader_of(folders("spade", "AutoModelForSeq2SeqLM"))

    def fails(*args):
        raise AttributeError("no\nencoder")

    monkeypatch.setattr("hf_hybrid.commands.reading.attended", fails)
    last = list(reader.read(TEXT, threading.Event()))[-1]
    assert last.written > 0
    assert (last.attended, last.not_shown) == (None, "AttributeError: no encoder")


# ---- documents ----


def test_a_document_is_a_text_or_a_file(tmp_path):
    (tmp_path / "a.md").write_text("# A title")
    write_pdf(tmp_path / "a.pdf", "A page")
    assert document_text("a text", None, FLAGS) == "a text"
    assert document_text("", tmp_path / "a.md", FLAGS) == "# A title"
    assert document_text("not this", tmp_path / "a.pdf", FLAGS) == "A page"


def test_what_cannot_be_read_is_one_line(tmp_path, monkeypatch):
    write_pdf(tmp_path / "secret.pdf", "A page")
    encrypt_pdf(tmp_path / "secret.pdf", "password")
    (tmp_path / "a.txt").write_bytes(b"\0\1")
    small = DocumentArguments(max_document_mb=0.0001)
    for arguments, line in (
        (("", tmp_path / "secret.pdf", FLAGS), "secret.pdf: it is protected by a password; save a copy without one"),
        (("", tmp_path / "a.txt", FLAGS), "a.txt: it is no text but binary data (it has zero bytes)"),
        ((" \n", None, FLAGS), "there is no document: drop a file or paste a text"),
        (("a" * 200, None, small), "the text: it has 0.0 MB of text, more than --max_document_mb 0.0001: divide it"),
    ):
        with pytest.raises(Unreadable, match=f"^{re.escape(line)}"):
            document_text(*arguments)
    monkeypatch.setattr("hf_hybrid.commands.readers.find_spec", lambda name: None)
    with pytest.raises(Unreadable, match=r"^secret.pdf: .pdf files need the package pypdf: pip install"):
        document_text("", tmp_path / "secret.pdf", FLAGS)


# ---- the desk ----


@pytest.fixture
def desk(folders):
    return Desk(
        [
            reader_of(folders("spade", "AutoModelForSeq2SeqLM")),
            reader_of(folders("chela", "AutoModelForCausalLM"), max_new_tokens=3),
        ],
        FLAGS,
    )


def test_two_checkpoints_answer_one_after_the_other(desk, tmp_path):
    (tmp_path / "a.txt").write_text(TEXT)
    assert "Waiting" in desk.begin("tab")[5]
    shown = list(desk.answer("not this", str(tmp_path / "a.txt"), "tab"))
    assert all(len(row) == 7 for row in shown)
    assert "Waiting" in shown[0][5]
    problem, text, numbers, looked, second, more, nothing = shown[-1]
    assert problem == ""
    first = list(desk.readers[0].read(TEXT, threading.Event()))[-1]
    assert text == first.text
    assert "Done." in numbers
    assert "What it looked at</h3>" in looked
    assert second == list(desk.readers[1].read(TEXT, threading.Event()))[-1].text
    assert "<dd>3</dd>" in more
    assert "is not shown: the model has no attention weights" in nothing
    begun = next(index for index, row in enumerate(shown) if "Waiting" not in row[5])
    assert all("Done." in row[2] for row in shown[begun:])


def test_what_cannot_be_read_is_shown(desk):
    (row,) = desk.answer(" ", None, "tab")
    assert row[0] == page.problem("there is no document: drop a file or paste a text")
    assert row[1:] == [""] * 6


def test_a_model_that_fails_does_not_stop_the_other(desk, monkeypatch, capsys):
    def fails(*args, **kwargs):
        raise RuntimeError("broken <b>")

    monkeypatch.setattr(desk.readers[0].answerer, "outputs", fails)
    last = list(desk.answer(TEXT, None, "tab"))[-1]
    assert "failed with RuntimeError: broken &lt;b&gt;" in last[2]
    assert last[4] == list(desk.readers[1].read(TEXT, threading.Event()))[-1].text
    assert "RuntimeError: broken <b>" in capsys.readouterr().err


def test_a_tab_stops_what_it_asked_for(desk):
    desk.begin("tab")
    desk.begin("other")
    desk.stop("tab")
    desk.stop("unknown")
    assert ["Stopped." in cell for cell in list(desk.answer(TEXT, None, "tab"))[-1]] == [0, 0, 1, 0, 0, 1, 0]
    assert "Done." in list(desk.answer(TEXT, None, "other"))[-1][2]
    desk.begin("tab")
    assert "Done." in list(desk.answer(TEXT, None, "tab"))[-1][2]
    desk.begin("tab")
    desk.stop_all()
    assert "Stopped." in list(desk.answer(TEXT, None, "tab"))[-1][2]
    desk.leave("tab")
    desk.leave("other")
    assert desk._stops == {}


# ---- HTML ----


def reading_with(pieces, shares, **fields):
    found = Attended(pieces, shares, document=0.8, words=1, weights=Weights(torch.zeros(1), 2, 4, 7))
    return Reading("", Prompt([1, 2], 2), 7, 0.5, 1.0, 2.0, 3 << 20, done=True, attended=found)._replace(**fields)


def test_the_document_is_coloured_and_escaped():
    html = page.attended(reading_with(["<script>", " b", " c"], [0.2, 0.8, 0.0]))
    assert "<script>" not in html
    spans = re.findall(r'style="--heat:([\d.]+)" title="([\d.%]+)">([^<]+)<', html)
    assert spans == [("0.250", "20.00%", "&lt;script&gt;"), ("1.000", "80.00%", " b"), ("0.000", "0.00%", " c")]
    assert "80.0% of the attention on the document, per word" in html
    assert (
        "Attention of 7 written tokens, mean of 2 layers and 4 heads. 80% of it was on these words; the rest" in html
    )
    cells = [float(heat) for heat in re.findall(r'--heat:([\d.]+)"></span>', html)]
    assert cells == [0.062] * 8 + [1.0] * 2 + [0.0] * 2
    assert page.attended(reading_with([], [], attended=None)) == ""


def test_numbers_say_what_is_read(folders):
    reader = reader_of(folders("spade", "AutoModelForSeq2SeqLM"))
    html = page.numbers(reader, reading_with(["a"], [1.0], prompt=Prompt([1] * 1500, 2500)))
    cells = dict(re.findall(r"<dt>(.*?)</dt><dd>(.*?)</dd>", html))
    assert cells == {
        "Tokens read": "1,500 of 2,500",
        "First token after": "0.50 s",
        "Time in all": "1.0 s",
        "Tokens written": "7",
        "Tokens per second": "2.0",
        "Peak memory (process)": "3 MiB",
    }
    assert "Only the first part of the document is read. Done." in html
    assert "Reading …" in page.numbers(reader, reading_with(["a"], [1.0], done=False, written=0))
    assert f">{Path(reader.name).name} <small>(spade)" in page.name(reader)
    assert "Summarize a document" in page.heading([reader])


# ---- the command ----


def test_what_the_command_refuses(folders, monkeypatch):
    summarizer = folders("spade", "AutoModelForSeq2SeqLM")
    classifier = folders("chela", "AutoModelForSequenceClassification")
    monkeypatch.setattr(app, "find_spec", lambda name: object())
    monkeypatch.setattr(app, "_serve", lambda *args: pytest.fail("the page is shown"))
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        for arguments, line in (
            (
                [summarizer, "--port", port],
                rf"cannot listen on 127.0.0.1:{port} \(Address already in use\): name anoth",
            ),
            ([summarizer, "--host", "nowhere.invalid"], "cannot listen on nowhere.invalid:7860"),
            ([summarizer, "--port", "0"], "--port must be between 1 and 65535; got 0"),
            ([summarizer, "--max_upload_mb", "0"], "--max_upload_mb must be a positive number"),
            ([summarizer, "--text_column", "a"], "--text_column is for tables"),
            ([summarizer, "--max_new_token", "3"], "unknown flag --max_new_token. Did you mean"),
            ([summarizer, "a document"], "unexpected argument 'a document'"),
            ([], r"needs a model: hf-hybrid app MODEL \[flags\]"),
        ):
            with pytest.raises(ValueError, match=line):
                main(["app", *map(str, arguments)])
    monkeypatch.setattr(app, "_check_port", lambda flags: None)
    for names in ([classifier], [summarizer, "--compare", classifier]):
        with pytest.raises(ValueError, match=r"is a classifier .* use hf-hybrid classify"):
            main(["app", *names])
    monkeypatch.setattr(app, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"^hf-hybrid app needs the package gradio: pip install 'hf-hybrid\[app\]'$"):
        main(["app", summarizer])


def test_the_command_serves_its_checkpoints(folders, monkeypatch):
    served = []
    monkeypatch.setattr(app, "find_spec", lambda name: object())
    monkeypatch.setattr(app, "_check_port", lambda flags: None)
    monkeypatch.setattr(app, "_serve", lambda desk, flags: served.append((desk, flags, tempfile.gettempdir())))
    names = [folders("spade", "AutoModelForSeq2SeqLM"), folders("bst", "AutoModelForCausalLM")]
    new = ["--max_new_tokens", "4"]
    assert main(["app", names[0], "--compare", names[1], "--device", "cpu", *new, "--source_prefix", "do: "]) == 0
    ((desk, flags, folder),) = served
    assert [reader.name for reader in desk.readers] == names
    assert [reader.summarizes for reader in desk.readers] == [True, False]
    assert [reader.answerer.new_tokens for reader in desk.readers] == [4, 4]
    assert desk.readers[0].answerer.prefix == "do: "
    assert (flags.host, flags.port) == ("127.0.0.1", 7860)
    assert Path(folder).name.startswith("hf-hybrid-app-")
    assert not Path(folder).exists()
    assert tempfile.gettempdir() != folder


def test_the_temporary_folder_is_deleted(monkeypatch):
    monkeypatch.setenv("GRADIO_TEMP_DIR", "before")
    monkeypatch.delenv("GRADIO_ANALYTICS_ENABLED", raising=False)
    monkeypatch.setenv("no_proxy", "example.org")
    before = tempfile.gettempdir()
    with pytest.raises(Terminated), app._temporary_folder(), app._ended_by_signals():  # noqa: PT012
        folder = Path(tempfile.gettempdir())
        assert os.environ["GRADIO_TEMP_DIR"] == str(folder)
        assert os.environ["GRADIO_ANALYTICS_ENABLED"] == "False"
        assert os.environ["no_proxy"] == "example.org,localhost,127.0.0.1,::1"
        with tempfile.NamedTemporaryFile(delete=False) as file:
            file.write(b"an upload")
        assert Path(file.name).parent == folder
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(5)
    assert not folder.exists()
    assert tempfile.gettempdir() == before
    assert (os.environ["GRADIO_TEMP_DIR"], os.environ["no_proxy"]) == ("before", "example.org")
    assert "GRADIO_ANALYTICS_ENABLED" not in os.environ
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_the_page_is_imported_only_when_it_is_shown():
    assert find_spec("gradio") is None or "gradio" not in sys.modules
