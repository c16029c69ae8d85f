"""How `benchmarks.gpu` divides the time of several calls among its parts."""

import json
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.record import whole_file

SECONDS = {"checks": 150, "kernels": 180, "tune": 520, "models": 400, "losses": 90, "sanitizer": 150, "lra": 160}
"""Each part's share of the time of all calls, including its start; the most worthwhile part first."""

HEADROOM = 150
"""Seconds of thirty minutes that no part has, for the starts of calls."""

LATER = "out of time"
"""How outcomes of what a later call goes on with begin."""

EVERY = 5.0
"""Seconds between two notes of what a part has spent."""


class Plan:
    """What each part has spent of its share in all calls so far, and how it ended; kept beside the results.

    Args:
        path: The file. It is written every few seconds while a part runs, so that a call that is stopped counts too.
        made_by: What the results of each part depend on: with another value, the part begins anew.
    """

    def __init__(self, path: Path, made_by: Mapping[str, str]):
        self.path = path
        known = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        self.parts: dict[str, dict[str, Any]] = {}
        for part, mark in made_by.items():
            same = known.get(part, {}).get("made_by") == mark
            self.parts[part] = known[part] if same else {"made_by": mark, "seconds": 0.0, "end": ""}

    def left(self, part: str) -> float:
        """Return the seconds that are left of a part's share."""
        return max(0.0, SECONDS[part] - self.parts[part]["seconds"])

    def end(self, part: str) -> str:
        """Return how a part ended that has measured everything, in words, or nothing."""
        return str(self.parts[part]["end"])

    def finish(self, part: str, end: str) -> None:
        """Note that a part has measured everything, and how it ended."""
        self.parts[part]["end"] = end
        self._write()

    @contextmanager
    def spending(self, part: str) -> Iterator[None]:
        """Count the time inside the ``with`` block as spent by a part."""
        before, start, ended = self.parts[part]["seconds"], time.monotonic(), threading.Event()

        def note() -> None:
            self.parts[part]["seconds"] = round(before + time.monotonic() - start, 1)
            self._write()

        def watch() -> None:
            while not ended.wait(EVERY):
                note()

        watcher = threading.Thread(target=watch, daemon=True)
        watcher.start()
        try:
            yield
        finally:
            ended.set()
            watcher.join()
            note()

    def _write(self) -> None:
        with whole_file(self.path) as beside:
            beside.write_text(json.dumps(self.parts, indent=1) + "\n", encoding="utf-8")
