"""The page of `hf-hybrid app` in a real Chromium: documents dropped and pasted, refusals, looks, and privacy."""

import base64
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from playwright.sync_api import Browser, Page, expect, sync_playwright

from tests.commands.files import encrypt_pdf, write_pdf

from .folders import save

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
TEXT = "A document of some words. It has <b>two</b> sentences."
WIDTHS = {"phone": (390, 844), "desktop": (1280, 900)}
DROP = """([name, content]) => {
    const bytes = Uint8Array.from(atob(content), letter => letter.charCodeAt(0));
    const transfer = new DataTransfer();
    transfer.items.add(new File([bytes], name));
    return transfer;
}"""
# contrast of an element's letters with what is behind them, as WCAG defines it; the browser computes the colours
CONTRAST = """element => {
    const canvas = document.createElement("canvas");
    canvas.width = canvas.height = 1;
    const pen = canvas.getContext("2d", {willReadFrequently: true});
    const chain = [];
    for (let e = element; e; e = e.parentElement) chain.unshift(getComputedStyle(e));
    pen.fillStyle = "white";
    pen.fillRect(0, 0, 1, 1);
    const paint = colour => { pen.fillStyle = colour; pen.fillRect(0, 0, 1, 1); };
    for (const style of chain) paint(style.backgroundColor);
    const light = () => {
        const [r, g, b] = [...pen.getImageData(0, 0, 1, 1).data].slice(0, 3).map(value => {
            const x = value / 255;
            return x <= 0.04045 ? x / 12.92 : ((x + 0.055) / 1.055) ** 2.4;
        });
        return 0.2126 * r + 0.7152 * g + 0.0722 * b;
    };
    const behind = light();
    pen.globalAlpha = chain.reduce((product, style) => product * style.opacity, 1);
    paint(chain[chain.length - 1].color);
    const front = light();
    return (Math.max(behind, front) + 0.05) / (Math.min(behind, front) + 0.05);
}"""


class Proxy:
    """A proxy that a process is told to use; it refuses, and remembers who asked."""

    def __init__(self):
        self.asked = []
        self.socket = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self.socket.getsockname()[1]}"
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self):
        while True:
            connection, _ = self.socket.accept()
            with connection:
                self.asked.append(connection.recv(200))


class App:
    """A process of `hf-hybrid app` with folders of its own."""

    def __init__(self, root: Path, *arguments):
        self.folders = {name: root / name for name in ("home", "work", "temporary")}
        for folder in self.folders.values():
            folder.mkdir(parents=True)
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.url, self.proxy, self.log = f"http://127.0.0.1:{self.port}", Proxy(), root / "log"
        environment = {
            **{name: value for name, value in os.environ.items() if not name.lower().endswith("_proxy")},
            **dict.fromkeys(("http_proxy", "https_proxy", "all_proxy"), self.proxy.url),
            "HOME": str(self.folders["home"]),
            "TMPDIR": str(self.folders["temporary"]),
        }
        # a package that is imported from the folder where the tests run is not there where the process runs
        environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
        environment.pop("HF_HUB_OFFLINE", None)
        command = [sys.executable, "-m", "hf_hybrid", "app", *map(str, arguments), "--port", str(self.port)]
        with open(self.log, "wb") as log:
            self.process = subprocess.Popen(
                command,
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=self.folders["work"],
                env=environment,
                preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a shell's background ignores it
            )
        for _ in range(240):
            if f"The page is at {self.url}" in self.text():
                return
            assert self.process.poll() is None, self.text()
            time.sleep(0.5)
        pytest.fail(f"the page is not there: {self.text()}")

    def text(self) -> str:
        return self.log.read_text(encoding="utf-8")

    def files(self, name: str) -> list[Path]:
        """Return the files in a folder; gradio leaves empty ones beside uploads."""
        return [path for path in self.folders[name].rglob("*") if path.is_file() and path.stat().st_size]

    def end(self, number: int) -> int:
        if self.process.poll() is None:
            self.process.send_signal(number)
        return self.process.wait(60)


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    save(root / "summarizer", "spade", "AutoModelForSeq2SeqLM")
    save(root / "language-model", "bst", "AutoModelForCausalLM")
    return root


@pytest.fixture(scope="module")
def browser():
    found = next(filter(None, map(shutil.which, BROWSERS)), None)
    if found is None:
        pytest.fail(f"the page is tested in a real browser: install one of {', '.join(BROWSERS)}")
    expect.set_options(timeout=60_000)
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=found, args=["--no-sandbox"])
        yield chromium
        chromium.close()


@pytest.fixture(scope="module")
def single(models, tmp_path_factory):
    flags = ("--max_new_tokens", 8, "--max_upload_mb", 0.2, "--device", "cpu")
    app = App(tmp_path_factory.mktemp("single"), models / "summarizer", *flags)
    yield app
    app.end(signal.SIGTERM)


@pytest.fixture(scope="module")
def double(models, tmp_path_factory):
    flags = ("--compare", models / "language-model", "--device", "cpu")
    flags += ("--max_new_tokens", 600, "--min_new_tokens", 600)
    app = App(tmp_path_factory.mktemp("double"), models / "summarizer", *flags)
    yield app
    app.end(signal.SIGTERM)


@pytest.fixture
def visit(browser: Browser):
    """Open a page; at the end, check that it asked nobody but this computer, and found no error."""
    contexts, asked, errors = [], [], []

    def opened(app: App, width="desktop", theme="light") -> Page:
        context = browser.new_context(viewport=dict(zip(("width", "height"), WIDTHS[width], strict=True)))
        contexts.append(context)
        context.on("request", lambda request: asked.append(request.url))
        page = context.new_page()
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.set_default_timeout(60_000)
        page.goto(f"{app.url}/?__theme={theme}")
        expect(page.locator("#start")).to_be_enabled()
        return page

    yield opened
    for context in contexts:
        context.close()
    assert asked
    assert {urlsplit(url).hostname for url in asked if urlsplit(url).scheme not in ("data", "blob")} == {"127.0.0.1"}
    assert errors == []


def drop(page: Page, file: Path) -> None:
    content = base64.b64encode(file.read_bytes()).decode()
    transfer = page.evaluate_handle(DROP, [file.name, content])
    page.dispatch_event("#file button", "drop", {"dataTransfer": transfer})


def ask(page: Page) -> None:
    page.click("#start")
    expect(page.locator("#stop")).to_be_enabled()
    expect(page.locator("#start")).to_be_enabled(timeout=120_000)


def numbers(page: Page, column=0) -> dict[str, str]:
    found = page.locator(f"#numbers-{column} dl div")
    return dict(tuple(cell.split("\n")) for cell in found.all_inner_texts())


def answer(page: Page, column=0) -> str:
    return page.locator(f"#answer-{column} textarea").input_value()


def summary_of(models: Path, text: str) -> str:
    command = ["summarize", models / "summarizer", text, "--max_new_tokens", 8, "--device", "cpu"]
    done = subprocess.run(
        [sys.executable, "-m", "hf_hybrid", *map(str, command)], capture_output=True, text=True, check=True
    )
    return done.stdout.removesuffix("\n")


def shown(text: str) -> str:
    """Return a text as a browser has it in a form: with one kind of line breaks."""
    return text.replace("\r\n", "\n").replace("\r", "\n")


def test_a_document_is_dropped_and_its_summary_read(single, visit, models, tmp_path):
    page = visit(single)
    (tmp_path / "a document.txt").write_text(TEXT, encoding="utf-8")
    drop(page, tmp_path / "a document.txt")
    expect(page.locator("#file")).to_contain_text("a document")
    expect(page.locator("#text textarea")).to_be_disabled()
    ask(page)
    assert answer(page) == shown(summary_of(models, TEXT))
    assert numbers(page)["Tokens read"] == str(len(TEXT) + 1)
    assert 0 < int(numbers(page)["Tokens written"]) <= 8
    assert re.fullmatch(r"\d+\.\d\d s", numbers(page)["First token after"])
    assert re.fullmatch(r"[\d,]+ MiB", numbers(page)["Peak memory (process)"])
    looked = page.locator("#attended-0 .hybrid-text")
    assert looked.inner_text() == TEXT  # not as HTML
    assert looked.locator("b").count() == 0
    shares = [float(span.get_attribute("title").rstrip("%")) for span in looked.locator("span").all()]
    assert sum(shares) == pytest.approx(100, abs=0.1)
    (upload,) = (path for path in single.files("temporary") if path.name.endswith(".txt"))
    assert upload.read_text(encoding="utf-8") == TEXT
    assert upload.relative_to(single.folders["temporary"]).parts[0].startswith("hf-hybrid-app-")


def test_a_text_is_pasted(single, visit, models):
    page = visit(single)
    page.locator("#text textarea").fill(TEXT)
    ask(page)
    assert answer(page) == shown(summary_of(models, TEXT))


def test_what_cannot_be_read_is_one_line(single, visit, tmp_path):
    page = visit(single)
    alarm = page.get_by_role("alert")
    ask(page)
    expect(alarm).to_have_text("there is no document: drop a file or paste a text")
    write_pdf(tmp_path / "secret.pdf", "A page")
    encrypt_pdf(tmp_path / "secret.pdf", "password")
    drop(page, tmp_path / "secret.pdf")
    expect(page.locator("#text textarea")).to_be_disabled()
    ask(page)
    expect(alarm).to_have_text("secret.pdf: it is protected by a password; save a copy without one")
    assert page.evaluate(CONTRAST, alarm.element_handle()) > 4.5
    assert answer(page) == ""


def test_large_uploads_are_refused(single, visit, tmp_path):
    page = visit(single)
    (tmp_path / "large.txt").write_text("word " * 50_000, encoding="utf-8")
    drop(page, tmp_path / "large.txt")
    expect(page.get_by_text(re.compile("exceed", re.IGNORECASE)).first).to_be_visible()
    expect(page.locator("#text textarea")).to_be_enabled()
    body = b'--x\r\nContent-Disposition: form-data; name="files"; filename="large.txt"\r\n\r\n'
    body += b"word " * 50_000 + b"\r\n--x--\r\n"
    request = urllib.request.Request(
        f"{single.url}/gradio_api/upload", body, {"Content-Type": "multipart/form-data; boundary=x"}
    )
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=60)
    assert refused.value.code == 413
    assert all(path.stat().st_size < 200_000 for path in single.files("temporary"))


def test_only_uploads_are_read(single, visit):
    page = visit(single)
    secret = single.folders["work"].parent / "secret.txt"
    secret.write_text("a secret", encoding="utf-8")
    number = page.evaluate("gradio_config.dependencies.find(one => one.inputs.length == 2).id")

    def asked(path, session):
        file = {"path": path, "meta": {"_type": "gradio.FileData"}}
        return page.evaluate(
            """async ([body, session]) => {
                const headers = {"Content-Type": "application/json"};
                await fetch("gradio_api/queue/join", {method: "POST", body, headers});
                return await (await fetch("gradio_api/queue/data?session_hash=" + session)).text();
            }""",
            [json.dumps({"data": ["", file], "fn_index": number, "session_hash": session}), session],
        )

    (uploaded,) = page.evaluate(
        """async () => {
            const body = new FormData();
            body.append("files", new File(["an upload"], "upload.txt"));
            return await (await fetch("gradio_api/upload", {method: "POST", body})).json();
        }"""
    )
    events = asked(uploaded, "uploads")  # so that the refusal below is one of the path, not of the request
    assert '"success":true' in events
    assert "Tokens read" in events
    events = asked(str(secret), "other")
    assert '"success":false' in events
    assert "Tokens read" not in events


def test_two_checkpoints_and_the_button_that_stops_them(double, visit):
    page = visit(double)
    page.locator("#text textarea").fill(TEXT)
    ask(page)
    assert [numbers(page, column)["Tokens written"] for column in (0, 1)] == ["600", "600"]
    assert [numbers(page, column)["Tokens read"] for column in (0, 1)] == [str(len(TEXT) + 1), str(len(TEXT))]
    assert all(answer(page, column) for column in (0, 1))
    assert all(page.locator(f"#attended-{column} .hybrid-text").inner_text() == TEXT for column in (0, 1))
    page.click("#start")
    expect(page.locator("#numbers-0")).to_contain_text("Writing")
    page.click("#stop")
    expect(page.locator("#numbers-1")).to_have_text("Stopped.")
    expect(page.locator("#numbers-0")).to_contain_text("Stopped.")
    expect(page.locator("#start")).to_be_enabled()
    assert 0 < int(numbers(page)["Tokens written"]) < 600


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("width", WIDTHS)
def test_looks(width, theme, double, visit):
    page = visit(double, width, theme)
    page.locator("#text textarea").fill(" ".join([TEXT] * 20) + " " + "x" * 300)
    page.click("#start")
    expect(page.locator("#numbers-0")).to_contain_text("Writing")
    page.click("#stop")
    expect(page.locator("#attended-0 .hybrid-text")).to_be_visible()
    expect(page.locator("#start")).to_be_enabled()
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    left = [page.locator(f"#answer-{column}").bounding_box()["x"] for column in (0, 1)]
    assert (left[0] == left[1]) == (width == "phone")  # one below the other
    text = {"#head h1", "#head p", "#text textarea", "#start", ".hybrid-name", "#answer-0 textarea", "#numbers-0 p"}
    text |= {"#numbers-0 dt", "#numbers-0 dd", "#attended-0 h3", ".hybrid-legend", ".hybrid-text", ".hybrid-note"}
    for selector in text | {'.hybrid-text span[style="--heat:1.000"]'}:
        contrast = page.evaluate(CONTRAST, page.locator(selector).first.element_handle())
        assert contrast >= 4.5, selector
    background = page.evaluate("getComputedStyle(document.body).backgroundColor")  # it reaches the window's end
    assert (sum(map(int, re.findall(r"\d+", background)[:3])) < 3 * 128) == (theme == "dark")
    marked, plain = (
        page.evaluate(
            "element => getComputedStyle(element).backgroundColor", page.locator(selector).first.element_handle()
        )
        for selector in ('.hybrid-text span[style="--heat:1.000"]', ".hybrid-text")
    )
    assert marked != plain


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 0), (signal.SIGTERM, 143)])
def test_nothing_is_left(number, code, models, visit, tmp_path):
    app = App(tmp_path, models / "summarizer", "--max_new_tokens", 8)
    page = visit(app)
    (tmp_path / "a.md").write_text(TEXT, encoding="utf-8")
    drop(page, tmp_path / "a.md")
    expect(page.locator("#text textarea")).to_be_disabled()
    ask(page)
    assert answer(page)
    assert [path.name for path in app.files("temporary")] == ["a.md"]
    assert list(app.folders["temporary"].glob("hf-hybrid-app-*"))
    page.goto("about:blank")
    assert app.end(number) == code, app.text()
    left = [path for name in app.folders for path in app.files(name)]
    assert {path.parent.name for path in left} <= {"matplotlib"}  # its list of fonts, which gradio asks for
    assert list(app.folders["temporary"].glob("hf-hybrid-app-*")) == []
    assert app.proxy.asked == []
    assert "Traceback" not in app.text()
