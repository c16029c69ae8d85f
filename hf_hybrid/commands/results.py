"""The output of a command: text, JSON lines or CSV, written as it comes, and continued after an interruption."""

import csv
import io
import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import xxhash
from filelock import FileLock, Timeout

from hf_hybrid.commands.documents import Document
from hf_hybrid.commands.flags import OutputArguments

FILES_OF_THE_MODEL, _SINGLE = "files_of_the_model", "one_document"  # settings that are no flags
_CHANGES = {
    FILES_OF_THE_MODEL: "was written before the files of the model were changed",
    _SINGLE: "holds one document without its name, and now there are several; or the other way round",
}
_FORMATS = {".txt": "text", ".jsonl": "jsonl", ".csv": "csv"}


def progress_file(output: Path) -> Path:
    """Return the file beside an output that says which documents it has."""
    return output.with_name(f"{output.name}.progress")


class Output:
    """Where the rows of a command go: a file or the terminal.

    A file has a second one beside it, `progress_file`: its first line has the settings that made the output. Each
    further line is a document that is written, with the length of the output up to there; or the row of a document
    that waits for those before it; or the length up to which rows are about to be written. If a command is
    interrupted, what was written after a document's last length is cut off, and the command continues with documents
    that are neither written nor wait.

    Entering it locks the file, which one process at a time writes, and changes nothing; `open` does.

    Args:
        flags: The flags of the output.
        fields: The columns, behind the document's name.
        settings: What rows depend on; an output is continued with the same settings only.
        single: Whether there is one document, whose name a text output leaves out.

    Raises:
        ValueError: The format does not fit, or there is no such folder.
    """

    def __init__(
        self, flags: OutputArguments, fields: Sequence[str], settings: Mapping[str, Any], *, single: bool
    ) -> None:
        self.path = None if flags.output is None else Path(flags.output)
        self.fields = ("document", *fields, "tokens", "tokens_read")
        self.single = single
        self.format = _format(flags, self.path, "jsonl" if "embedding" in fields else "text")
        self.settings = dict(settings) | {"format": self.format}
        if self.format == "text":  # whose documents have headings if there are several
            self.settings[_SINGLE] = single
        if self.format == "text" and "embedding" in fields:
            raise ValueError("--output_format must be jsonl or csv for vectors; got text")
        self.done: set[str] = set()
        self.waiting: dict[str, dict[str, Any]] = {}
        self._length = self._progress_length = 0  # bytes
        self._overwrites = flags.overwrite_output
        if self.path is not None and not self.path.parent.is_dir():
            raise ValueError(f"--output {self.path}: there is no folder {self.path.parent}")
        self._lock: FileLock | None = None
        self._stream: IO[bytes] | None = None
        self._progress: IO[bytes] | None = None

    def is_done(self, document: Document) -> bool:
        """Whether the output has this document, with this text."""
        return _key(document) in self.done

    def row_of(self, document: Document) -> dict[str, Any] | None:
        """Return the row of a document that an interrupted command had answered and not written."""
        return self.waiting.get(_key(document))

    def __enter__(self) -> "Output":
        """Lock the file, and read how far it is.

        Raises:
            ValueError: The output exists and is not to be continued with these settings, it cannot be written, or
                another process is writing it.
        """
        if self.path is not None:
            self._lock = _locked(self.path)
            if self.path.exists() and not self._overwrites:
                try:
                    self._read_progress(self.path)
                except ValueError:
                    self.__exit__()
                    raise
        return self

    def open(self) -> None:
        """Open the file, without what an interruption left unfinished."""
        if self.path is not None:
            progress = progress_file(self.path)
            if self.done or self.waiting:
                os.truncate(self.path, self._length)
                os.truncate(progress, self._progress_length)
            else:
                self.path.write_bytes(b"")
                progress.write_text(json.dumps(self.settings) + "\n", encoding="utf-8")
            self._stream, self._progress = self.path.open("ab"), progress.open("ab")

    def __exit__(self, *error: object) -> None:
        if self._stream is not None and self._progress is not None:
            self._stream.close()
            self._progress.close()
        if self._lock is not None:
            Path(self._lock.lock_file).unlink(missing_ok=True)
            self._lock.release()

    def keep(self, documents: Sequence[Document], rows: Sequence[Mapping[str, Any]]) -> None:
        """Write down rows that wait for those of documents before them, so that an interruption does not lose them."""
        if self._progress is not None:
            pairs = zip(documents, rows, strict=True)
            lines = [json.dumps({"document": _key(document), "row": row}) + "\n" for document, row in pairs]
            _append(self._progress, "".join(lines).encode())

    def write(self, documents: Sequence[Document], rows: Sequence[Mapping[str, Any]]) -> None:
        """Write the rows of some documents."""
        texts, ends = [], []
        for document, row in zip(documents, rows, strict=True):
            texts.append(self._shown({"document": document.name, **row}, begins=self._length == 0))
            self._length += len(texts[-1].encode("utf-8", errors="replace"))
            ends.append(self._length)
        text = "".join(texts)
        if self._stream is None or self._progress is None:
            encoding = sys.stdout.encoding or "utf-8"  # a terminal may lack letters that a name or a text has
            sys.stdout.write(text.encode(encoding, errors="backslashreplace").decode(encoding))
            sys.stdout.flush()
        elif texts:
            records = [json.dumps([_key(document), end]) + "\n" for document, end in zip(documents, ends, strict=True)]
            _append(self._progress, f"{self._length}\n".encode())
            _append(self._stream, text.encode("utf-8", errors="replace"))
            _append(self._progress, "".join(records).encode())

    def _read_progress(self, path: Path) -> None:
        advice = "name another --output, or give --overwrite_output to replace it"
        file = progress_file(path)
        size, is_file = path.stat().st_size, file.is_file()
        lines = file.read_bytes().splitlines(keepends=True) if is_file else []
        lines = [line for line in lines if line.endswith(b"\n")]
        if not size and len(lines) < 2:  # nothing is answered yet
            return
        if not is_file:
            raise ValueError(f"--output {path} exists and is not the output of such a command: {advice}")
        try:
            settings, *records = map(json.loads, lines)
            done = [(str(key), int(length)) for key, length in (one for one in records if isinstance(one, list))]
            kept = {str(one["document"]): dict(one["row"]) for one in records if isinstance(one, dict)}
            self._length = done[-1][1] if done else 0
            begun = max((one for one in records if type(one) is int), default=0)
            names = (name for name in {**settings, **self.settings} if settings.get(name) != self.settings.get(name))
            changed = next(names, None)
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"--output {path}: {file} is damaged: {advice}") from error
        if changed is not None:
            why = _CHANGES.get(changed) or (
                f"was written with {changed} {settings.get(changed)!r}, and now it is {self.settings.get(changed)!r}"
            )
            raise ValueError(f"--output {path} {why}: {advice}")
        self.done = {key for key, _ in done}
        self.waiting = {key: row for key, row in kept.items() if key not in self.done}
        self._progress_length = sum(map(len, lines))
        if size < self._length:
            raise ValueError(f"--output {path} is shorter than it was when it was written: {advice}")
        if size > max(self._length, begun):  # nothing that this program left half written
            raise ValueError(f"--output {path} was changed after it was written: {advice}")

    def _shown(self, row: Mapping[str, Any], *, begins: bool) -> str:
        if self.format == "jsonl":
            return json.dumps(row, ensure_ascii=False) + "\n"
        if self.format == "csv":
            text = io.StringIO()
            writer = csv.DictWriter(text, self.fields, lineterminator="\n")
            if begins:
                writer.writeheader()
            writer.writerow({name: _cell(row.get(name)) for name in self.fields})
            return text.getvalue()
        if "label" in row:
            pairs = row.get("labels") or [row]
            shown = "\t".join(f"{pair['label']}\t{pair['score']:.4f}" for pair in pairs) + "\n"
            return shown if self.single else f"{row['document']}\t{shown}"
        text = row[self.fields[1]]
        return f"{text}\n" if self.single else f"{'' if begins else chr(10)}==> {row['document']} <==\n{text}\n"


def _locked(path: Path) -> FileLock:
    """Return a lock that no other process has, which a command keeps to its end."""
    lock = FileLock(path.with_name(f"{path.name}.lock"), timeout=0)
    try:
        lock.acquire()
    except Timeout as error:
        raise ValueError(f"--output {path} is being written by another process") from error
    except OSError as error:
        raise ValueError(f"--output {path} cannot be written: {error.strerror or error}") from error
    return lock


def _append(stream: IO[bytes], content: bytes) -> None:
    stream.write(content)
    stream.flush()
    os.fsync(stream.fileno())


def _cell(value: Any) -> Any:
    return json.dumps(value, ensure_ascii=False) if isinstance(value, list) else value


def _key(document: Document) -> str:
    """Return what a document is recognised by: its file or name, and a hash of its text."""
    text = xxhash.xxh3_64_hexdigest(document.text.encode("utf-8", errors="surrogatepass"))
    return f"{document.identity or document.name} {text}"


def _format(flags: OutputArguments, path: Path | None, on_terminal: str) -> str:
    if flags.output_format is not None:
        return flags.output_format
    if path is None:
        return on_terminal
    if path.suffix.lower() not in _FORMATS:
        raise ValueError(f"--output must end in {', '.join(_FORMATS)}, or give --output_format; got {str(path)!r}")
    return _FORMATS[path.suffix.lower()]
