"""A record of measurements: a CSV file with versions, Markdown tables, and the command line for both."""

import argparse
import csv
import hashlib
import importlib.metadata
import json
import math
import os
import platform
import re
import statistics
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock, Timeout

Row = dict[str, str]


def stamp() -> Row:
    """Return date, machine and versions for every row of a record."""
    from hf_hybrid.version import __version__

    return {
        "date": datetime.now(UTC).date().isoformat(),
        "cpu": _cpu(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": version_of("transformers"),
        "hf_hybrid": __version__,
    }


def measured_stamp(threads: int) -> Row:
    """Return `stamp` with the threads, and a hash of the package's code behind its version: a record has one code."""
    found = hashlib.sha256()
    for path in sorted((Path(__file__).parents[1] / "hf_hybrid").rglob("*.py")):
        found.update(path.read_bytes())
    common = stamp()
    return common | {"hf_hybrid": f"{common['hf_hybrid']}+{found.hexdigest()[:8]}", "threads": str(threads)}


def conditions(row: Row) -> str:
    """Return date, machine, threads and versions of a row, for a caption."""
    names = [name for name in ("python", "torch", "transformers", "hf_hybrid") if name in row]
    versions = ", ".join(f"{name} {row[name]}" for name in names)
    return f"{row['date']}, {row['cpu']}, {row['threads']} threads; {versions}"


def measured_on(rows: Sequence[Row]) -> str:
    """Return dates, machines and versions of rows, for a caption; each ran with one thread."""
    dates = sorted({row["date"] for row in rows})
    names = ("cpu", "torch", "transformers", "hf_hybrid")
    versions = {name: " and ".join(sorted({row[name] for row in rows})) for name in names}
    return f"{' to '.join(dict.fromkeys((dates[0], dates[-1])))}, {versions.pop('cpu')}, one thread; " + ", ".join(
        f"{name} {version}" for name, version in versions.items()
    )


def slug(name: str) -> str:
    """Turn a name into part of a file name."""
    return re.sub(r"[^\w.]+", "-", name)


def short_hash(made_by: Any) -> str:
    """Return a short hash of everything that determines a result."""
    return hashlib.sha256(json.dumps(made_by, sort_keys=True, default=str).encode()).hexdigest()[:8]


def say(text: str) -> None:
    """Print a line with the time, at once."""
    print(f"{datetime.now():%Y-%m-%d %H:%M:%S} {text}", flush=True)


def version_of(package: str) -> str:
    """Return an installed package's version, or "-"."""
    with suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version(package)
    return "-"


def write_csv(path: Path, columns: Sequence[str], rows: Iterable[Row]) -> None:
    """Write a record; missing values stay empty."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, columns, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def _cpu() -> str:
    """Return the processor's name, its family and model, which tell its generation, and the number of cores."""
    found: dict[str, str] = {}
    with suppress(OSError), open("/proc/cpuinfo", encoding="utf-8") as info:
        for line in info:
            name, _, value = line.partition(":")
            found.setdefault(name.strip(), value.strip())
    processor = found.get("model name") or platform.processor() or platform.machine()
    kind = " ".join(
        f"{name} {found[full]}" for name, full in (("family", "cpu family"), ("model", "model")) if full in found
    )
    return f"{processor} ({kind + ', ' if kind else ''}{os.cpu_count()} cores)"


def read_csv(path: Path) -> list[Row]:
    """Read a record.

    Raises:
        ValueError: A row has more or fewer values than there are columns.
    """
    with open(path, newline="", encoding="utf-8") as file:
        reader = csv.reader(file)
        columns = next(reader, [])
        rows = [values for values in reader if values]
    for number, values in enumerate(rows, start=1):
        if len(values) != len(columns):
            raise ValueError(f"{path} must have {len(columns)} values in row {number}; it has {len(values)}")
    return [dict(zip(columns, values, strict=True)) for values in rows]


class GrowingRecord:
    """A CSV file that is written row by row, and goes on where an earlier run of the same measurement stopped.

    Args:
        path: The file.
        columns: Its columns.
        keys: The columns that together name what was measured; it may have several rows.
        common: Columns that are the same in every row; only ``date`` may differ from those in the file.

    Raises:
        OutputError: The file has other columns, or other values of `common`.
        ValueError: It is no record at all.
    """

    def __init__(self, path: Path, columns: Sequence[str], keys: Sequence[str], common: Row):
        self.path, self.columns, self.keys, self.common = path, columns, keys, common
        self.rows: list[Row] = read_csv(path) if path.exists() else []
        for row in self.rows[:1]:
            if list(row) != list(columns):
                raise OutputError(f"{path} must have the columns {', '.join(columns)}; got {', '.join(row)}")
        for row in self.rows:
            for name, value in common.items():
                if name != "date" and row[name] != value:
                    raise OutputError(
                        f"{path} must have {name} {value!r} to go on; got {row[name]!r}: name another file"
                    )
        self._known = self._keys_of_rows()

    def _keys_of_rows(self) -> set[tuple[str, ...]]:
        return {tuple(row[name] for name in self.keys) for row in self.rows}

    def outcome(self, cell: Row) -> str:
        """Return how what has some values ended: the first outcome that is not "ok", if there is one."""
        outcomes = [row["outcome"] for row in self.rows if cell.items() <= row.items()]
        return next((outcome for outcome in outcomes if outcome != "ok"), "ok")

    def __contains__(self, key: tuple[str, ...]) -> bool:
        return key in self._known

    def forget(self, gone: Callable[[Row], bool]) -> None:
        """Drop rows, so that they may be measured again; they leave the file when the next rows are added."""
        self.rows[:] = [row for row in self.rows if not gone(row)]
        self._known = self._keys_of_rows()

    def add(self, *rows: Row) -> None:
        """Add rows and write the file; what could not be measured ("nan") stays empty."""
        for row in rows:
            row = {name: value for name, value in row.items() if value != "nan"}
            self.rows.append(dict.fromkeys(self.columns, "") | self.common | row)
            self._known.add(tuple(self.rows[-1][name] for name in self.keys))
        with whole_file(self.path) as beside:
            write_csv(beside, self.columns, self.rows)


@contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """Yield a path to write to, which takes the place of `path` at the end: a stop never leaves half a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(path.name + ".new")
    yield beside
    beside.replace(path)


class OutputError(ValueError):
    """What a command writes is written by another process, was begun under other conditions, or cannot be written."""


@contextmanager
def only_process(lock: Path, where: str) -> Iterator[None]:
    """Hold a lock, so that no other process does the same work.

    Args:
        lock: Its file, which may stay.
        where: What the work writes, for messages.

    Raises:
        OutputError: Another process holds it, or the file cannot be written.
    """
    try:
        lock.parent.mkdir(parents=True, exist_ok=True)
        held = FileLock(lock, timeout=0).acquire()
    except Timeout as error:
        raise OutputError(f"another process writes {where}") from error
    except OSError as error:
        raise OutputError(f"{where} must be where files can be written; {lock} cannot ({error.strerror})") from error
    with held:
        yield


def growing_columns(keys: Iterable[str], measures: Iterable[str]) -> tuple[str, ...]:
    """Return the columns of a record that `fill` makes."""
    versions = ("python", "torch", "transformers", "hf_hybrid")
    return ("date", "cpu", "threads", *versions, *keys, *measures, "outcome")


def fill(
    arguments: argparse.Namespace,
    keys: Sequence[str],
    measures: Sequence[str],
    cells: Iterable[tuple[Any, ...]],
    measure: Callable[..., list[tuple[str, Any]]],
) -> list[Row]:
    """Measure the cells that a growing record does not have yet, or that failed.

    Args:
        arguments: The record's file as ``out``, and the ``threads`` of each measurement.
        keys: The columns that name a cell.
        measures: The measured columns; a row has the median of what was sent for each.
        cells: Values of `keys`.
        measure: Takes a cell's values and returns pairs of a column and a value, at last of "outcome".

    Returns:
        All rows of the record.
    """
    columns = growing_columns(keys, measures)
    record = GrowingRecord(arguments.out, columns, keys, measured_stamp(arguments.threads))
    record.forget(has_failed)
    for cell in cells:
        row = dict(zip(keys, map(str, cell), strict=True))
        if tuple(row.values()) in record:
            continue
        row |= medians(measure(*cell), measures)
        record.add(row)
        print(*(row.get(name, "-") for name in (*keys, *measures, "outcome")), flush=True)
    return record.rows


def has_failed(row: Row) -> bool:
    """Return whether a row has a failure, and not a limit that was reached."""
    return row.get("outcome", "").startswith("failed")


def medians(sent: Sequence[tuple[str, Any]], measures: Sequence[str]) -> Row:
    """Turn what a cell's process sent into columns: the median of each measure, and the last "outcome"."""
    found: dict[str, list[Any]] = {}
    for name, value in sent:
        found.setdefault(name, []).append(value)
    row = {name: f"{statistics.median(found[name]):.5g}" for name in measures if name in found}
    return row | {"outcome": found["outcome"][-1]}


ROUND = "round"
CELL = ("mode", "model", "width", "precision", "vocabulary", "length", "loss", "size", "batch", "decoding")
"""Columns of which those that a record with rounds has name a cell."""


def fill_rounds(
    arguments: argparse.Namespace,
    columns: Sequence[str],
    shown: Sequence[str],
    cells: Iterable[Row],
    measure: Callable[[Row, int], Row],
) -> list[Row]:
    """Measure what a growing record does not have yet: all cells once, then all of them again, so that they alternate.

    A cell that ended otherwise than well in a round is not measured again; one that failed in an earlier run is.

    Args:
        arguments: The record's file as ``out``, the number of ``rounds``, and the ``threads`` of each measurement.
        columns: The columns of the record, `ROUND` among them.
        shown: Those that are printed.
        cells: Cells, each as its columns of `CELL`.
        measure: Takes a cell and the number of a round, and returns further columns, "outcome" among them.

    Returns:
        All rows of the record, one for each cell and round.
    """
    cells, common = list(cells), measured_stamp(arguments.threads)
    keys = (*(name for name in CELL if name in columns), ROUND)
    record = GrowingRecord(arguments.out, columns, keys, common)
    record.forget(has_failed)
    for number in range(1, arguments.rounds + 1):
        for cell in cells:
            row = cell | {ROUND: str(number)}
            if tuple(row[name] for name in keys) in record or record.outcome(cell) != "ok":
                continue
            record.add(row | measure(cell, number))
            print(number, *(record.rows[-1][name] or "-" for name in shown), flush=True)
    return record.rows


def of_rounds(rows: Sequence[Row]) -> list[Row]:
    """Return one row for each cell of a record that `fill_rounds` made; the rows of others, which have no rounds.

    Numbers are medians over the rounds, but memory, ``max_s`` and ``max_ms`` the largest, ``min_s`` and ``min_ms`` the
    least, and ``repeats`` all.
    """
    if not rows or ROUND not in rows[0]:
        return list(rows)
    cells: dict[tuple[str, ...], list[Row]] = {}
    for row in rows:
        cells.setdefault(tuple(row[name] for name in CELL if name in row), []).append(row)
    return [_of_cell(found) for found in cells.values()]


def in_fp32(path: Path) -> list[Row]:
    """Return a record's rows in fp32, one for each cell; of a model with several losses that with all logits.

    Peers have all logits too, so that what is compared does the same. What has no loss, such as decoding, is measured
    once, beside the loss alone.
    """
    rows = [row for row in of_rounds(read_csv(path)) if row.get("precision", "fp32") == "fp32"]
    alone = {(row["model"], row["length"]): row for row in rows if row.get("loss") == "alone"}
    found: list[Row] = []
    for row in (row for row in rows if row.get("loss") != "alone"):
        filled = {name: value for name, value in row.items() if value}
        found.append({**row, **alone.get((row.get("model", ""), row["length"]), {}), **filled})
    return found


def _of_cell(rounds: list[Row]) -> Row:
    whole = {"min_s": min, "max_s": max, "min_ms": min, "max_ms": max, "repeats": sum}
    fixed = {*growing_columns(CELL, [ROUND])}
    row = {name: value for name, value in rounds[0].items() if name != ROUND}
    for name in row.keys() - fixed:
        reduce = whole.get(name, max if name.endswith("_mib") else statistics.median)
        if values := [float(one[name]) for one in rounds if one[name]]:
            row[name] = f"{reduce(values):.12g}"
    outcomes = [one["outcome"] for one in rounds]
    bad = [outcome for outcome in outcomes if outcome != "ok"]
    if bad:
        row["outcome"] = bad[0] if len(bad) == len(outcomes) else f"{bad[0]} in {len(bad)} of {len(outcomes)} rounds"
    return row


def exponent(points: Sequence[tuple[int, float]]) -> str:
    """Return the `slope` over 2k to 16k tokens, and its number of points."""
    seen = [(length, value) for length, value in points if 2048 <= length <= 16384 and value > 0]
    return f"{slope(seen):.2f} ({len(seen)})" if len(seen) > 1 else "-"


def slope(points: Sequence[tuple[int, float]]) -> float:
    """Return the least-squares slope of log value over log length; of at least two points."""
    logs = [(math.log(length), math.log(value)) for length, value in points]
    return statistics.linear_regression(*zip(*logs, strict=True)).slope


def markdown_table(header: Iterable[str], lines: Iterable[Iterable[str]]) -> str:
    """Lay out a Markdown table."""
    header = list(header)
    body = [header, ["---"] * len(header), *lines]
    return "\n".join("| " + " | ".join(line) + " |" for line in body)


def positive(text: str) -> float:
    """Read a positive number of a command line."""
    value = float(text)
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"must be positive and finite; got {text}")
    return value


def positive_int(text: str) -> int:
    """Read a positive integer of a command line."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be positive; got {text}")
    return value


def seed_number(text: str) -> int:
    """Read a seed of a command line."""
    value = int(text)
    if not 0 <= value < 2**32:
        raise argparse.ArgumentTypeError(f"must be from 0 to 2 ** 32 - 1; got {text}")
    return value


def command_line(
    description: str | None,
    default_out: Path,
    add_arguments: Callable[[argparse.ArgumentParser], None],
    run: Callable[[argparse.Namespace], list[Row]],
    report: Callable[[list[Row]], str],
    argv: Sequence[str] | None,
    wrong: Callable[[list[Row]], Sequence[str]] = lambda rows: (),
) -> int:
    """Measure and write a record, or read an earlier one; print its tables.

    Args:
        description: Description of the benchmark.
        default_out: Default of ``--out``.
        add_arguments: Adds the benchmark's own arguments.
        run: Measures, writes ``out`` and returns its rows.
        report: Makes the tables.
        argv: The command line; the process's own when None.
        wrong: Says what the rows should not show; each line goes to stderr.

    Returns:
        The exit status: 1 if a row's ``outcome`` is a failure, or something is wrong.
    """
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser)
    parser.add_argument("--out", type=Path, default=default_out, metavar="CSV")
    parser.add_argument("--report", type=Path, metavar="CSV", help="only print the tables of this file")
    arguments = parser.parse_args(argv)
    if arguments.report:
        rows = print_report(parser, arguments.report, report)
    else:
        try:
            rows = run(arguments)
        except OutputError as error:
            parser.error(f"--out: {error}")
        print(report(rows))
    lines = [*(" ".join(row.values()) for row in rows if has_failed(row)), *wrong(rows)]
    for line in lines:
        print(line, file=sys.stderr)
    return 1 if lines else 0


def print_report(parser: argparse.ArgumentParser, path: Path, report: Callable[[list[Row]], str]) -> list[Row]:
    """Print the tables of a file, and return its rows; what is no record of the benchmark is an error of the flag."""
    if not path.is_file():
        parser.error(f"--report must be a file; there is no {path}")
    try:
        rows = read_csv(path)
        print(report(rows) if rows else "no rows yet")
    except ValueError as error:
        parser.error(f"--report must be a record of this benchmark: {error}")
    except KeyError as error:
        parser.error(f"--report must be a record of this benchmark; {path} does not have {error}")
    return rows


def source_and_folder(description: str | None, argv: Sequence[str] | None) -> tuple[Path, Path]:
    """Read the command line of what makes one folder of data from another; the new one is there afterwards."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path)
    parser.add_argument("folder", type=Path)
    arguments = parser.parse_args(argv)
    if not arguments.source.is_dir():
        parser.error(f"source must be a folder; got {arguments.source}")
    if arguments.folder.resolve() == arguments.source.resolve():
        parser.error(f"folder must not be the source, whose files it would replace; got {arguments.folder}")
    arguments.folder.mkdir(parents=True, exist_ok=True)
    return arguments.source, arguments.folder


def write_split(folder: Path, split: str, rows: Sequence[Mapping[str, Any]]) -> None:
    """Write a split of a folder of data as lines of JSON, and print how many rows it has."""
    (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    print(f"{split}: {len(rows):,} rows")
