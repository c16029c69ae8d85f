"""Train small models on the same data with otherwise equal flags, each at its best learning rate, with several seeds.

Run it from the repository root; ``--data`` names the folders in which the data sets lie, each a folder with a
``train`` and a ``validation`` file::

    python -m benchmarks.compare_on_data benchmarks/experiments/novels.json benchmarks/experiments/facts.json \
        --data path/to/data --jobs 2                                          # in this order
    python -m benchmarks.compare_on_data --report benchmarks/results/novels.csv   # its tables, as Markdown

An experiment is a JSON file: the ``script`` (``summarization``, ``clm`` or ``glue``), its ``data``, the ``flags`` that
all models share, ``models``, which have flags of their own, ``learning_rates`` to search, shared or a model's own (or
its ``learning_rate``, which is not searched), and ``scores``, the metrics to keep; ``select`` (``eval_loss``) chooses
the best rate. The models begin from scratch, or where there is a ``start``, one more model, from what that one has
learnt with the same seed. ``initial`` of a model edits its starting values (`train_one.edit_initial_values`). Where
there are ``evaluations``, flags by name, every trained model is evaluated once more with each of them, which gives
``scores`` of the form "metric, name". Validation documents are cut to an ``excerpt`` of so many characters from their
middle where there is one, so that of few long ones all are read.

First every model is trained at each of its learning rates with the first seed, and at further ones, twice, where the
best of them is the lowest or the highest; then at its best one with the others.
Every run is a process of its own with one thread (`train_one`), so that as many as there are cores can run side by
side and the processor time of a run means the same for all. Each finished run adds a row to ``RESULTS/EXPERIMENT.csv``
and its losses to ``RESULTS/curves/EXPERIMENT.csv``. All of it can be stopped at any moment, by whatever, and started
again with the same command: what has a row is not trained again, and a run that was cut off goes on from its last
checkpoint. A run that fails is named, stops no other, and is tried again by the next start. A row holds a short hash
of what its model was made by, the ``recipe``; rows of another recipe, or of another version of this package, are
refused where a model's others would be mixed with them.

Beside the models stand rows that need no training: for summaries, the first words of each document (as many as the
training summaries' median) and training summaries drawn at random; for labels, the most frequent one of the training
split.
"""

import argparse
import hashlib
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import pandas
from filelock import FileLock, Timeout

from benchmarks.comparison import (
    COLUMNS,
    CURVE_COLUMNS,
    append_rows,
    best_rate,
    is_better,
    read_rows,
    report,
    searched,
)
from benchmarks.record import Row, read_csv, stamp
from benchmarks.train_one import MODEL, RESULT, RUN, slug
from benchmarks.without_training import BASELINES
from hf_hybrid.training.run_folder.files import replacing
from hf_hybrid.version import __version__

RESULTS = Path("benchmarks/results")
SAVE_EVERY = 150.0
_KEYS = {"script", "data", "excerpt", "flags", "models", "start", "learning_rates", "scores", "select", "evaluations"}
_OWN_KEYS = {"learning_rates", "learning_rate", "initial"}
_EXTENSIONS = 2
"""How often a search goes on beyond its lowest or highest learning rate."""
_WITHOUT_EFFECT = {"eval_steps", "logging_steps", "per_device_eval_batch_size"}
"""Flags that change neither a model nor its scores, and so make no other recipe."""


# ---- what is to be done ----


@dataclass(frozen=True)
class Run:
    """One model with one seed at one learning rate; ``parent`` is the run whose model it starts from."""

    experiment: str
    model: str
    seed: int
    rate: str
    recipe: str
    parent: "Run | None" = None

    @property
    def key(self) -> tuple[str, str, str]:
        """What tells its row from the others of its file."""
        return self.model, str(self.seed), self.rate

    @property
    def folder(self) -> Path:
        """Where it works; what another recipe left is not gone on with."""
        return Path(self.experiment, f"{slug(self.model)}-{self.recipe}-{self.seed}-{self.rate}")

    def __str__(self) -> str:
        return f"{self.experiment}: {self.model}, seed {self.seed}, learning rate {self.rate}"


@dataclass(frozen=True)
class Experiment:
    """An experiment file and where its data and its results are."""

    name: str
    spec: Mapping[str, Any]
    files: Mapping[str, Path]
    table: Path

    @property
    def scores(self) -> list[str]:
        """Its scores, the one that chooses the learning rate first."""
        select = self.spec.get("select", "eval_loss")
        return [select, *(score for score in self.spec["scores"] if score != select)]

    @property
    def columns(self) -> tuple[str, ...]:
        """Those of its table."""
        return (*COLUMNS, *self.scores)

    @property
    def curves(self) -> Path:
        """The file of its losses."""
        return self.table.parent / "curves" / self.table.name

    @property
    def start(self) -> str | None:
        """The model that the others start from."""
        return next(iter(self.spec.get("start", {})), None)

    @property
    def models(self) -> list[str]:
        """All models, that one first."""
        return [*self.spec.get("start", {}), *self.spec["models"]]

    def _own(self, model: str) -> Mapping[str, Any]:
        return self.spec["start"][model] if model == self.start else self.spec["models"][model]

    def rates(self, model: str) -> list[str]:
        """A model's learning rates; a single one is not searched."""
        own = self._own(model)
        single = [own["learning_rate"]] if "learning_rate" in own else None
        return [f"{rate:g}" for rate in single or own.get("learning_rates") or self.spec["learning_rates"]]

    def flags(self, model: str) -> dict[str, Any]:
        """A model's flags, but for the learning rate, the seed and files."""
        flags = dict(self.spec["flags"])
        for name, value in self._own(model).items():
            if name not in _OWN_KEYS:
                flags[name] = {**flags.get(name, {}), **value} if isinstance(value, dict) else value
        return flags

    def initial(self, model: str) -> dict[str, dict[str, float]]:
        """Edits of a model's starting values."""
        return self._own(model).get("initial", {})

    def recipe(self, model: str, parent: Run | None) -> str:
        """A hash of all that makes a model, but for the seed and the learning rate."""
        flags = {name: value for name, value in self.flags(model).items() if name not in _WITHOUT_EFFECT}
        made_by = [self.spec["script"], self.spec["data"], flags, self.initial(model)]
        made_by += [self.spec.get("evaluations", {}), parent and [parent.recipe, parent.rate]]
        made_by += [self.spec["excerpt"]] if "excerpt" in self.spec else []
        return hashlib.sha256(json.dumps(made_by, sort_keys=True).encode()).hexdigest()[:8]

    def rows(self) -> list[Row]:
        """What is there already."""
        return read_rows(self.table, self.columns)


def read_experiment(path: Path, data: Sequence[Path], results: Path) -> Experiment:
    """Read an experiment file.

    Raises:
        ValueError: It has an unknown key, lacks one, or its data are not there.
    """
    spec = json.loads(path.read_text(encoding="utf-8"))
    needed = {"script", "data", "flags", "models", "scores"}
    if (unknown := spec.keys() - _KEYS) or (missing := needed - spec.keys()):
        wrong = f"has {', '.join(sorted(unknown))}" if unknown else f"lacks {', '.join(sorted(missing))}"
        raise ValueError(f"{path} must have the keys {', '.join(sorted(needed))}, and may have others; it {wrong}")
    if len(spec.get("start", {})) > 1:
        raise ValueError(f"{path}: start must be one model; got {', '.join(spec['start'])}")
    if (folder := next((root / spec["data"] for root in data if (root / spec["data"]).is_dir()), None)) is None:
        raise ValueError(
            f"{path}: --data must name a folder with {spec['data']} in it; got {', '.join(map(str, data))}"
        )
    files = {split: _data_file(folder, split) for split in ("train", "validation")}
    if "excerpt" in spec and not (isinstance(spec["excerpt"], int) and spec["excerpt"] > 0):
        raise ValueError(f"{path}: excerpt must be a positive number of characters; got {spec['excerpt']!r}")
    experiment = Experiment(path.stem, spec, files, results / f"{path.stem}.csv")
    is_better(experiment.scores[0])
    for model in experiment.models:
        if "max_steps" not in experiment.flags(model) or not experiment.rates(model):
            raise ValueError(f"{path}: model {model!r} must have max_steps and learning rates")
    return experiment


def _data_file(folder: Path, split: str) -> Path:
    pattern = "valid*.*" if split == "validation" else f"{split}.*"
    found = sorted(path for path in folder.glob(pattern) if "heldout" not in path.name)
    if len(found) != 1:
        raise ValueError(f"{folder} must hold one file named {pattern}; got {[path.name for path in found]}")
    return found[0]


def plan(
    experiment: Experiment, rows: Sequence[Row], seeds: Sequence[int], is_kept: Callable[[Run], bool]
) -> list[Run]:
    """Which runs an experiment still needs and could begin now, in the order of work.

    First the model that all start from, then the searches of the others, then their further seeds. A model's further
    seeds are known once its search is done; a run can begin once the one that it starts from is done.

    Args:
        experiment: The experiment.
        rows: What is done.
        seeds: The seeds; the searches take the first.
        is_kept: Whether a run's model lies on the disk.

    Raises:
        ValueError: A row of one of its models was made by another recipe, or by another version of this package.
    """
    done = {(row["model"], row["seed"], row["learning_rate"]): row for row in rows}
    parents: dict[int, Run] = {}
    before, searches, repeats = [], [], []
    for model in experiment.models:
        is_start = model == experiment.start
        if not is_start and experiment.start is not None and not parents:
            break  # its own search comes first
        recipe = experiment.recipe(model, parents.get(seeds[0]))
        _check_recipe(experiment, rows, model, recipe)
        search = [
            Run(experiment.name, model, seeds[0], rate, recipe, parents.get(seeds[0]))
            for rate in _searched_rates(experiment, rows, model)
        ]
        more: list[Run] = []
        if all(run.key in done for run in search):
            rate = best_rate(rows, model, experiment.scores[0])
            if rate is not None:
                more = [Run(experiment.name, model, seed, rate, recipe, parents.get(seed)) for seed in seeds]
        search, repeat = ([run for run in runs if run.key not in done] for runs in (search, more))
        if search or repeat:
            _check_version(experiment, rows, model)
        if is_start:
            parents = {run.seed: run for run in more}
            before = [*search, *repeat]
        else:
            searches += search
            repeats += repeat
    todo = [*searches, *repeats]
    lost = [run.parent for run in todo if run.parent and run.parent.key in done and not is_kept(run.parent)]
    ready = [run for run in todo if run.parent is None or (run.parent.key in done and is_kept(run.parent))]
    return list(dict.fromkeys([*before, *lost, *ready]))


def _searched_rates(experiment: Experiment, rows: Sequence[Row], model: str) -> list[str]:
    """A model's learning rates, and as long as the best is the lowest or the highest, one more, as far again."""
    rates, known = experiment.rates(model), {row["learning_rate"] for row in searched(rows, model)}
    if len(rates) < 2:
        return rates
    for _ in range(_EXTENSIONS):
        if not known.issuperset(rates):
            break
        best = best_rate([row for row in rows if row["learning_rate"] in rates], model, experiment.scores[0])
        if best == rates[0]:
            rates.insert(0, f"{float(rates[0]) ** 2 / float(rates[1]):g}")
        elif best == rates[-1]:
            rates.append(f"{float(rates[-1]) ** 2 / float(rates[-2]):g}")
    return rates


def _check_recipe(experiment: Experiment, rows: Sequence[Row], model: str, recipe: str) -> None:
    others = [row for row in rows if row["model"] == model and row["recipe"] != recipe]
    if others:
        listed = "; ".join(f"seed {row['seed']} at {row['learning_rate']} (recipe {row['recipe']})" for row in others)
        raise ValueError(
            f"{experiment.table}: rows of {model!r} were made by another recipe than {recipe}, which is that of "
            f"{experiment.name} now: {listed}. Delete these rows, or give the model another name"
        )


def _check_version(experiment: Experiment, rows: Sequence[Row], model: str) -> None:
    """What a recipe leaves open are defaults, which versions change."""
    others = {row["hf_hybrid"] for row in rows if row["model"] == model} - {__version__}
    if others:
        raise ValueError(
            f"{experiment.table}: rows of {model!r} were made by version {', '.join(sorted(others))}, and this is "
            f"{__version__}. Delete these rows, or go on with that version"
        )


# ---- doing it ----


class Queue:
    """Works through experiments with several runs side by side.

    Args:
        experiments: The experiments, in order. Where one has nothing more to begin, the next one does.
        seeds: The seeds.
        folder: Where the runs work.
        save_every: Seconds between their checkpoints.
        start: Begins a run in its folder and returns the process.
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
        """Do all that is left; what fails is in ``failures``. When interrupted, the runs save checkpoints and end."""
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
        """Do a step; if it fails, say so and let all others go on: nobody may look for a day."""
        try:
            return step(*arguments)
        except Exception as error:
            self.failures[name] = str(error)
            _say(f"FAILED {name}: {error}")

    def _waiting(self) -> list[Run]:
        """The runs that could begin now, in the order of work."""
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
        if self._is_kept(run):  # it ended when nobody was there to note it
            self._record(run)
            return
        files = dict(experiment.files)
        if "excerpt" in experiment.spec:
            files["validation"] = _excerpts(files["validation"], self.folder, experiment.spec["excerpt"])
        flags = {
            **experiment.flags(run.model),
            **{f"{split}_file": str(path) for split, path in files.items()},
            "learning_rate": float(run.rate),
            "seed": run.seed,
        }
        if run.parent is not None:
            flags["model_name_or_path"] = str(self.folder / run.parent.folder / MODEL)
        spec = {
            "script": experiment.spec["script"],
            "flags": flags,
            "evaluations": experiment.spec.get("evaluations", {}),
            "initial": experiment.initial(run.model),
            "save_every": self.save_every,
        }
        folder.mkdir(parents=True, exist_ok=True)
        (folder / RUN).write_text(json.dumps(spec, indent=1), encoding="utf-8")
        self.running[run] = self.start(folder)
        _say(f"begins {run}")

    def _finish(self, run: Run, process: Any) -> None:
        if process.returncode or not self._is_kept(run):
            log = self.folder / run.folder / "log"
            lines = log.read_text(encoding="utf-8", errors="replace").splitlines() if log.exists() else []
            raise RuntimeError("\n    ".join([f"exit status {process.returncode}; the end of {log}:", *lines[-8:]]))
        self._record(run)

    def _record(self, run: Run) -> None:
        """Add a run's row and its curve, and delete what nobody needs any more."""
        experiment, folder = self.experiments[run.experiment], self.folder / run.folder
        result = json.loads((folder / RESULT).read_text(encoding="utf-8"))
        own = {"model": run.model, "seed": str(run.seed), "learning_rate": run.rate, "recipe": run.recipe}
        if run.key not in {(row["model"], row["seed"], row["learning_rate"]) for row in experiment.rows()}:
            values = _shown(result["values"], experiment.scores)
            row = {**stamp(), "dataset": experiment.spec["data"], **own, "outcome": result["outcome"], **values}
            # the curve first: nobody looks at one without a row
            curve = [{name: f"{value:.5g}" for name, value in point.items()} for point in result["curve"]]
            append_rows(experiment.curves, CURVE_COLUMNS, [own | point for point in curve])
            append_rows(experiment.table, experiment.columns, [row])
            score = experiment.scores[0]
            _say(f"ended {run}: {result['outcome']}, {score} {values.get(score, '')}")
        if run.model != experiment.start:
            _delete(folder)
        elsewhere = [other for other in self.running if other.experiment == experiment.name]
        if not elsewhere and not self._plan(experiment):
            _delete(self.folder / experiment.name)


def _excerpts(path: Path, folder: Path, size: int) -> Path:
    """The file with so many characters from the middle of each of its documents, made once for all runs.

    Raises:
        ValueError: A document is shorter.
    """
    excerpts = folder / f"{path.parent.name}-validation-{size}.jsonl"
    if excerpts.exists():  # a newer file would make every run tokenize it anew
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
            start_new_session=True,  # Ctrl-C is for the queue, which ends the runs by closing their standard input
        )


def _delete(folder: Path) -> None:
    (folder / RESULT).unlink(missing_ok=True)  # which says that the rest is whole
    shutil.rmtree(folder, ignore_errors=True)


def _say(text: str) -> None:
    print(f"{datetime.now():%Y-%m-%d %H:%M:%S} {text}", flush=True)


def _shown(values: Mapping[str, float], scores: Sequence[str]) -> dict[str, str]:
    formats = {"parameters": "d", "steps": "d", "cpu_minutes": ".2f"} | dict.fromkeys(scores, ".6g")
    found = {name: values[name] for name in formats if name in values}
    return {name: "" if math.isnan(value) else format(value, formats[name]) for name, value in found.items()}


def _add_baselines(experiment: Experiment) -> None:
    rows, (score, baselines) = experiment.rows(), BASELINES.get(experiment.spec["script"], ("", None))
    if baselines is None or score not in experiment.scores or any(not row["seed"] for row in rows):
        return
    common = {**stamp(), "dataset": experiment.spec["data"], "outcome": "ok"}
    results = baselines(experiment.files, experiment.spec["flags"].get("max_eval_samples"))
    rows = [{**common, "model": name, **_shown(values, experiment.scores)} for name, values in results.items()]
    append_rows(experiment.table, experiment.columns, rows)


# ---- the command line ----


def main(argv: Sequence[str] | None = None) -> int:
    """Work through experiments, or print the tables of what is there."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("experiments", type=Path, nargs="*", help="JSON files with flags and models, in order")
    parser.add_argument("--data", type=Path, nargs="+", default=(), metavar="FOLDER", help="where data sets lie")
    parser.add_argument("--seeds", nargs="+", type=int, default=(0, 1, 2), help="the first one searches (0 1 2)")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="runs side by side (one for each core)")
    parser.add_argument(
        "--output_dir", type=Path, default=Path("runs/comparisons"), help="what is in work: %(default)s"
    )
    parser.add_argument("--results", type=Path, default=RESULTS, metavar="FOLDER", help="what is kept: %(default)s")
    parser.add_argument(
        "--save_every", type=float, default=SAVE_EVERY, metavar="SECONDS", help="between checkpoints (%(default)s)"
    )
    parser.add_argument("--report", type=Path, metavar="CSV", help="train nothing, print the tables of this file")
    arguments = parser.parse_args(argv)
    if arguments.report is not None:
        print(report(read_csv(arguments.report)))
        return 0
    if not arguments.experiments or not arguments.data:
        parser.error("give experiments and --data, or --report")
    experiments = [read_experiment(path, arguments.data, arguments.results) for path in arguments.experiments]
    queue = Queue(experiments, arguments.seeds, arguments.output_dir, arguments.save_every)
    arguments.output_dir.mkdir(parents=True, exist_ok=True)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        with FileLock(arguments.output_dir / "lock", timeout=0):
            queue.work(arguments.jobs)
    except Timeout:
        parser.error(f"another queue works in {arguments.output_dir}")
    except KeyboardInterrupt:
        _say("interrupted; the same command goes on")
        return 130
    for experiment in experiments:
        if rows := experiment.rows():
            print(f"\n{experiment.name}\n\n{report(rows)}")
    for name in queue.failures:
        print(f"FAILED {name}", file=sys.stderr)
    return 1 if queue.failures else 0


if __name__ == "__main__":
    sys.exit(main())
