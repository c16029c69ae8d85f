"""Train small models on the same data with equal flags, each at its best learning rate, with several seeds.

Run it from the repository root; ``--data`` names the folders of the datasets, each a folder with a ``train`` and a
``validation`` file (experiments whose data are drawn need none)::

    python -m benchmarks.compare_on_data benchmarks/experiments/novels.json benchmarks/experiments/facts.json \
        --data path/to/data --jobs 2                                          # in this order
    python -m benchmarks.compare_on_data --report benchmarks/results/novels.csv   # its tables, as Markdown

An experiment is a JSON file with the ``script`` (``summarization``, ``clm``, ``glue`` or ``long_range``), its ``data``
(a folder's name; of ``long_range`` also ``drawn:TASK``), the ``flags`` of all models, ``models`` with their own flags,
``learning_rates`` to search, common or per model (or a model's ``learning_rate``, which is not searched), and
``scores``, the metrics to keep; ``select`` (``eval_loss``) chooses the best rate. Models start from scratch, or from
``start``, another model trained with the same seed. A model's ``initial`` edits its initial values
(`train_one.edit_initial_values`). ``evaluations``, flags by name, evaluate every trained model again and give
``scores`` of the form "metric, name". ``excerpt`` cuts validation documents to as many characters from their middle,
so that all of a few long ones are read.

The first seed trains every model at each of its learning rates, and up to twice at a further one while the best is
the lowest or the highest; the other seeds use the best rate. ``--plan`` tries every model for a few steps, and says
what all runs cost.

Each run is a process with one thread (`train_one`), so that several can run in parallel with comparable processor
times. A finished run adds a row to ``RESULTS/EXPERIMENT.csv`` and its losses to ``RESULTS/curves/EXPERIMENT.csv``. You
can stop at any moment and start again with the same command: finished runs are kept, and interrupted ones continue
from their last checkpoint. A failed run is reported, stops no other, and is repeated by the next start. A row holds a
short hash of the model's ``recipe``, which includes the files of the folders and starters that it begins with; rows of
another recipe, or of another version of this package, are refused.

Some rows need no training: for summaries, the first words of each document (as many as the training summaries'
median) and random training summaries; for labels, the most frequent one of the training split.
"""

import argparse
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas

from benchmarks.comparison import (
    CURVE_COLUMNS,
    append_rows,
    report,
)
from benchmarks.experiment import Experiment, Run, plan, read_experiment
from benchmarks.record import (
    OutputError,
    markdown_table,
    only_process,
    positive_int,
    print_report,
    say,
    seed_number,
    stamp,
)
from benchmarks.train_one import MODEL, RESULT, RUN
from benchmarks.without_training import BASELINES
from hf_hybrid.training.run_folder.files import replacing

RESULTS = Path("benchmarks/results")
SAVE_EVERY = 150.0
_TRIED = 4
"""Steps of a trial."""

# ---- running ----


class Queue:
    """Works through experiments with several runs in parallel.

    Args:
        experiments: The experiments, in order; the next one starts when one has nothing left to start.
        seeds: The seeds.
        folder: The folder of the runs.
        save_every: Seconds between their checkpoints.
        start: Starts a run in its folder and returns the process.
    """

    def __init__(
        self,
        experiments: Sequence[Experiment],
        seeds: Sequence[int],
        folder: Path,
        save_every: float = SAVE_EVERY,
        start: Callable[[Path], Any] | None = None,
    ) -> None:
        self.experiments = {experiment.name: experiment for experiment in experiments}
        self.seeds, self.folder, self.save_every, self.start = seeds, folder, save_every, start or _start
        self.running: dict[Run, Any] = {}
        self.failures: dict[str, str] = {}  # run or experiment -> what failed

    def work(self, jobs: int, pause: float = 0.5) -> None:
        """Do all remaining runs and collect ``failures``. On an interrupt, the runs save checkpoints and end."""
        for experiment in self.experiments.values():
            self._try(f"{experiment.name}: baselines", _add_baselines, experiment)
        try:
            while True:
                for run, process in list(self.running.items()):
                    if process.poll() is not None:
                        del self.running[run]
                        self._try(str(run), self._finish, run, process)
                waiting = self._waiting() if len(self.running) < jobs else []
                if not waiting and not self.running:
                    return
                for run in waiting[: jobs - len(self.running)]:
                    self._try(str(run), self._begin, run)
                time.sleep(pause)
        finally:
            for process in self.running.values():
                process.stdin.close()
            for process in self.running.values():
                process.wait()

    def _try(self, name: str, step: Callable[..., Any], *arguments: Any) -> Any:
        """Do a step; report a failure and continue, since nobody may look for a day."""
        try:
            return step(*arguments)
        except Exception as error:
            self.failures[name] = str(error)
            say(f"FAILED {name}: {error}")

    def _waiting(self) -> list[Run]:
        """List the runs that can start now, in order."""
        runs: list[Run] = []
        for experiment in self.experiments.values():
            if experiment.name not in self.failures:
                runs += self._try(experiment.name, self._plan, experiment) or []
        return [run for run in runs if run not in self.running and str(run) not in self.failures]

    def _plan(self, experiment: Experiment) -> list[Run]:
        return plan(experiment, experiment.rows(), self.seeds, self._is_kept)

    def _is_kept(self, run: Run) -> bool:
        return (self.folder / run.folder / RESULT).is_file()

    def _begin(self, run: Run) -> None:
        experiment, folder = self.experiments[run.experiment], self.folder / run.folder
        if self._is_kept(run):  # it ended while no queue was running
            self._record(run)
            return
        flags = experiment.run_flags(run)
        if "excerpt" in experiment.spec:
            excerpts = _excerpts(experiment.files["validation"], self.folder, experiment.spec["excerpt"])
            flags["validation_file"] = str(excerpts)
        if run.parent is not None:
            flags["model_name_or_path"] = str(self.folder / run.parent.folder / MODEL)
        _write_run(folder, experiment, run, flags, self.save_every)
        self.running[run] = self.start(folder)
        say(f"begins {run}")

    def _finish(self, run: Run, process: Any) -> None:
        _result(self.folder / run.folder, process)
        self._record(run)

    def _record(self, run: Run) -> None:
        """Add a run's row and its curve, and delete files that are no longer needed."""
        experiment, folder = self.experiments[run.experiment], self.folder / run.folder
        result = json.loads((folder / RESULT).read_text(encoding="utf-8"))
        own = {"model": run.model, "seed": run.key[1], "learning_rate": run.rate, "recipe": run.recipe}
        if run.key not in {(row["model"], row["seed"], row["learning_rate"]) for row in experiment.rows()}:
            values = _shown(result["values"], experiment.scores)
            row = {**stamp(), "dataset": experiment.spec["data"], **own, "outcome": result["outcome"], **values}
            # the curve first, since a curve without a row does no harm
            curve = [{name: f"{value:.5g}" for name, value in point.items()} for point in result["curve"]]
            append_rows(experiment.curves, CURVE_COLUMNS, [own | point for point in curve])
            append_rows(experiment.table, experiment.columns, [row])
            score = experiment.scores[0]
            say(f"ended {run}: {result['outcome']}, {score} {values.get(score, '')}")
        if run.model != experiment.start:
            _delete(folder)
        elsewhere = [other for other in self.running if other.experiment == experiment.name]
        if not elsewhere and not self._plan(experiment):
            _delete(self.folder / experiment.name)


def _write_run(folder: Path, experiment: Experiment, run: Run, flags: Mapping[str, Any], save_every: float) -> None:
    spec = {
        "script": experiment.spec["script"],
        "flags": flags,
        "evaluations": experiment.spec.get("evaluations", {}),
        "initial": experiment.initial(run.model),
        "save_every": save_every,
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / RUN).write_text(json.dumps(spec, indent=1), encoding="utf-8")


def _excerpts(path: Path, folder: Path, size: int) -> Path:
    """Return a file with `size` characters from the middle of each document, made once for all runs.

    Raises:
        ValueError: A document is shorter.
    """
    excerpts = folder / f"{path.parent.name}-validation-{size}.jsonl"
    if excerpts.exists():  # every run would tokenize a newer file again
        return excerpts
    texts = pandas.read_json(path, lines=True)["text"]
    if (shortest := texts.str.len().min()) < size:
        raise ValueError(f"{path}: excerpt must be at most the {shortest} characters of the shortest text; got {size}")
    starts = (texts.str.len() - size) // 2
    folder.mkdir(parents=True, exist_ok=True)
    cut = [text[start : start + size] for text, start in zip(texts, starts, strict=True)]
    with replacing(excerpts) as new:
        pandas.DataFrame({"text": cut}).to_json(new, orient="records", lines=True)
    return excerpts


def _start(folder: Path) -> subprocess.Popen[bytes]:
    with open(folder / "log", "ab") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "benchmarks.train_one", str(folder)],
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=subprocess.STDOUT,
            env={**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"},
            start_new_session=True,  # Ctrl-C goes to the queue, which ends the runs by closing their standard input
        )


def _result(folder: Path, process: Any) -> dict[str, Any]:
    """Return the result of a process that has ended.

    Raises:
        RuntimeError: It failed; the message has the end of its log.
    """
    if process.returncode or not (folder / RESULT).is_file():
        log = folder / "log"
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines() if log.exists() else []
        raise RuntimeError("\n    ".join([f"exit status {process.returncode}; the end of {log}:", *lines[-8:]]))
    result: dict[str, Any] = json.loads((folder / RESULT).read_text(encoding="utf-8"))
    return result


def _delete(folder: Path) -> None:
    (folder / RESULT).unlink(missing_ok=True)  # the result marks a complete folder
    shutil.rmtree(folder, ignore_errors=True)


def _shown(values: Mapping[str, float], scores: Sequence[str]) -> dict[str, str]:
    formats = {"parameters": "d", "steps": "d", "cpu_minutes": ".2f"} | dict.fromkeys(scores, ".6g")
    found = {name: values[name] for name in formats if name in values}
    return {name: "" if math.isnan(value) else format(value, formats[name]) for name, value in found.items()}


def _add_baselines(experiment: Experiment) -> None:
    rows, (score, baselines) = experiment.rows(), BASELINES.get(experiment.spec["script"], ("", None))
    if baselines is None or score not in experiment.scores or any(not row["seed"] for row in rows):
        return
    common = {**stamp(), "dataset": experiment.spec["data"], "outcome": "ok"}
    results = baselines(experiment.common_flags)
    rows = [{**common, "model": name, **_shown(values, experiment.scores)} for name, values in results.items()]
    append_rows(experiment.table, experiment.columns, rows)


# ---- the plan ----


def plan_of(
    experiment: Experiment, seeds: Sequence[int], folder: Path, start: Callable[[Path], Any] = _start
) -> tuple[str, float]:
    """Try every model for a few steps, and return a table of all runs and their CPU minutes, and the sum.

    A run's minutes are those of its steps, of the points of its curve and of its last evaluation, whose forward takes
    a third of a step; a search that goes on beyond an edge takes more.

    Raises:
        ValueError: The models start from another one.
        RuntimeError: A trial fails.
    """
    if experiment.start is not None:
        raise ValueError(f"{experiment.name}: --plan tries models that start from scratch, and not from another one")
    lines, minutes = [], 0.0
    for model in experiment.models:
        rates, flags = experiment.rates(model), experiment.flags(model)
        run = Run(experiment.name, model, seeds[0], rates[0], "plan")
        step = _tried(experiment, run, folder / run.folder, start)
        evaluated = sum(flags.get(f"max_{split}_samples", 0) for split in ("eval", "predict"))
        evaluation = evaluated / flags["per_device_train_batch_size"] / 3
        runs = len(rates) + len(seeds) - 1  # the first seed's search includes its run at the best rate
        taken = runs * step * (1.1 * flags["max_steps"] + evaluation)
        lines.append([model, str(runs), f"{60 * step:.2f}", f"{taken:.0f}"])
        minutes += taken
    header = ["model", "runs", "CPU seconds of a step", "CPU minutes"]
    return markdown_table(header, lines), minutes


def _tried(experiment: Experiment, run: Run, folder: Path, start: Callable[[Path], Any]) -> float:
    """Return the CPU minutes of a step."""
    _delete(folder)
    few = {"max_steps": _TRIED, "eval_steps": _TRIED, "logging_steps": 1, "max_eval_samples": 4}
    few |= {"do_predict": False} if "do_predict" in experiment.flags(run.model) else {}
    _write_run(folder, experiment, run, {**experiment.run_flags(run), **few}, SAVE_EVERY)
    process = start(folder)
    try:
        process.wait()
    finally:
        process.stdin.close()
    result = _result(folder, process)
    _delete(folder)
    return result["values"]["cpu_minutes"] / _TRIED


# ---- the command line ----


def main(argv: Sequence[str] | None = None) -> int:
    """Work through experiments, or print the tables of a file."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("experiments", type=Path, nargs="*", help="JSON files with flags and models, in order")
    parser.add_argument("--data", type=Path, nargs="+", default=(), metavar="FOLDER", help="folders of the datasets")
    parser.add_argument("--seeds", nargs="+", type=seed_number, default=(0, 1, 2), help="the first searches (0 1 2)")
    parser.add_argument("--jobs", type=positive_int, default=os.cpu_count(), help="parallel runs (one per core)")
    parser.add_argument(
        "--output_dir", type=Path, default=Path("runs/comparisons"), help="folder of unfinished runs: %(default)s"
    )
    parser.add_argument(
        "--results", type=Path, default=RESULTS, metavar="FOLDER", help="folder of results: %(default)s"
    )
    parser.add_argument(
        "--save_every", type=float, default=SAVE_EVERY, metavar="SECONDS", help="between checkpoints (%(default)s)"
    )
    parser.add_argument("--report", type=Path, metavar="CSV", help="only print the tables of this file")
    parser.add_argument("--plan", action="store_true", help="try all models for a few steps, and print what all costs")
    arguments = parser.parse_args(argv)
    if arguments.report is not None:
        print_report(parser, arguments.report, report)
        return 0
    if not arguments.experiments:
        parser.error("give experiments, or --report")
    try:
        experiments = [read_experiment(path, arguments.data, arguments.results) for path in arguments.experiments]
    except ValueError as error:
        parser.error(str(error))
    if arguments.plan:
        return _print_plan(experiments, arguments.seeds, arguments.output_dir / "plan")
    queue = Queue(experiments, arguments.seeds, arguments.output_dir, arguments.save_every)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        with only_process(arguments.output_dir / "lock", f"--output_dir {arguments.output_dir}"):
            queue.work(arguments.jobs)
    except OutputError as error:
        parser.error(str(error))
    except KeyboardInterrupt:
        say("interrupted; the same command goes on")
        return 130
    for experiment in experiments:
        if rows := experiment.rows():
            print(f"\n{experiment.name}\n\n{report(rows)}")
    for name in queue.failures:
        print(f"FAILED {name}", file=sys.stderr)
    return 1 if queue.failures else 0


def _print_plan(experiments: Sequence[Experiment], seeds: Sequence[int], folder: Path) -> int:
    total = 0.0
    for experiment in experiments:
        table, minutes = plan_of(experiment, seeds, folder)
        print(f"{experiment.name}: {minutes:.0f} CPU minutes\n\n{table}\n", flush=True)
        total += minutes
    print(f"all: {total:.0f} CPU minutes")
    return 0


if __name__ == "__main__":
    sys.exit(main())
