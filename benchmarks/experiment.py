"""Experiments of `compare_on_data`: their files, their runs, and the order of work."""

import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from benchmarks.comparison import (
    COLUMNS,
    best_rate,
    check_recipe,
    check_version,
    is_better,
    read_rows,
    searched,
)
from benchmarks.record import Row, short_hash, slug
from hf_hybrid.data.lra.kept import digest_of_drawn
from hf_hybrid.starters import folder_of_starter
from hf_hybrid.training.flags.recipes import find_recipe

_KEYS = {"script", "data", "excerpt", "flags", "models", "start", "learning_rates", "scores", "select", "evaluations"}
DRAWN = "drawn:"
"""What begins the ``data`` of the script ``long_range`` where a task's rows are drawn: ``drawn:lra_listops_200``."""
_OWN_KEYS = {"learning_rates", "learning_rate", "initial"}
_EXTENSIONS = 2
"""How often a search may extend beyond its lowest or highest learning rate."""
_WITHOUT_EFFECT = {"eval_steps", "logging_steps", "per_device_eval_batch_size"}
"""Flags that change neither a model nor its scores, and so are not part of its recipe."""
_READ_FROM = {
    "model_name_or_path": re.compile(r".*\.(safetensors|bin)|(config|tokenizer.*)\.json"),
    "config_name": re.compile(r"config\.json"),
    "tokenizer_name": re.compile(r"tokenizer.*\.json"),
}
"""Flags that name a folder, and the files that a run reads there."""


@dataclass(frozen=True)
class Run:
    """One model with one seed at one learning rate.

    Attributes:
        experiment: Its experiment's name.
        model: The model.
        seed: The seed.
        rate: The learning rate.
        recipe: The recipe's hash.
        parent: The run whose model it starts from.
    """

    experiment: str
    model: str
    seed: int
    rate: str
    recipe: str
    parent: "Run | None" = None

    @property
    def key(self) -> tuple[str, str, str]:
        """The key of its row."""
        return self.model, str(self.seed), self.rate

    @property
    def folder(self) -> Path:
        """Its working folder, which depends on the recipe."""
        return Path(self.experiment, f"{slug(self.model)}-{self.recipe}-{self.seed}-{self.rate}")

    def __str__(self) -> str:
        return f"{self.experiment}: {self.model}, seed {self.seed}, learning rate {self.rate}"


@dataclass(frozen=True)
class Experiment:
    """An experiment file and the folders of its data and results; drawn data have neither files nor folder."""

    name: str
    spec: Mapping[str, Any]
    files: Mapping[str, Path]
    table: Path

    @property
    def scores(self) -> list[str]:
        """Its scores, first the one that chooses the learning rate."""
        select = self.spec.get("select", "eval_loss")
        return [select, *(score for score in self.spec["scores"] if score != select)]

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns of its table."""
        return (*COLUMNS, *self.scores)

    @property
    def curves(self) -> Path:
        """The CSV file of its losses."""
        return self.table.parent / "curves" / self.table.name

    @property
    def start(self) -> str | None:
        """The model that the others start from."""
        return next(iter(self.spec.get("start", {})), None)

    @property
    def models(self) -> list[str]:
        """All models, `start` first."""
        return [*self.spec.get("start", {}), *self.spec["models"]]

    def _own(self, model: str) -> Mapping[str, Any]:
        return self.spec["start"][model] if model == self.start else self.spec["models"][model]

    def rates(self, model: str) -> list[str]:
        """A model's learning rates; a single one is not searched."""
        own = self._own(model)
        single = [own["learning_rate"]] if "learning_rate" in own else None
        return [f"{rate:g}" for rate in single or own.get("learning_rates") or self.spec["learning_rates"]]

    def flags(self, model: str) -> dict[str, Any]:
        """A model's flags, except learning rate, seed and files."""
        flags = dict(self.spec["flags"])
        for name, value in self._own(model).items():
            if name not in _OWN_KEYS:
                flags[name] = {**flags.get(name, {}), **value} if isinstance(value, dict) else value
        return flags

    @property
    def data_flags(self) -> dict[str, str]:
        """The flags that name its data."""
        if self.spec["script"] != "long_range":
            return {f"{split}_file": str(path) for split, path in self.files.items()}
        return {"data_dir": str(next(iter(self.files.values())).parent)} if self.files else {}

    @property
    def common_flags(self) -> dict[str, Any]:
        """The flags of all models, those of the data included."""
        return {**self.spec["flags"], **self.data_flags}

    def run_flags(self, run: Run) -> dict[str, Any]:
        """All flags of a run, except those of its parent."""
        return {**self.flags(run.model), **self.data_flags, "learning_rate": float(run.rate), "seed": run.seed}

    def initial(self, model: str) -> dict[str, dict[str, float]]:
        """Edits of a model's initial values."""
        return self._own(model).get("initial", {})

    def recipe(self, model: str, parent: Run | None) -> str:
        """A hash of what determines a model, also of what it begins with.

        Not of seed and learning rate, and not of what names stand for: the files of the data, the code of the models.
        """
        flags = {name: value for name, value in self.flags(model).items() if name not in _WITHOUT_EFFECT}
        made_by = [self.spec["script"], self.spec["data"], flags, self.initial(model)]
        made_by += [self.spec.get("evaluations", {}), parent and [parent.recipe, parent.rate]]
        made_by += [self.spec["excerpt"]] if "excerpt" in self.spec else []
        folders = {name: Path(folder_of_starter(flags[name])) for name in _READ_FROM if name in flags}
        made_by += [_content(name, folder) for name, folder in folders.items() if folder.is_dir()]
        if self.spec["script"] == "long_range":
            made_by += self._long_range(flags)
        return short_hash(made_by)

    def _long_range(self, flags: Mapping[str, Any]) -> list[Any]:
        """What two flags stand for: the settings of ``recipe``, and the rows that are drawn for ``task_name``."""
        task, seed = flags["task_name"], flags.get("drawing_seed", 0)
        splits = ("train", "validation", *(("test",) if flags.get("do_predict") else ()))
        drawn = [] if self.files else [digest_of_drawn(task, split, seed) for split in splits]
        recipe = replace(find_recipe(flags["recipe"], task), source="") if "recipe" in flags else None
        return [*drawn, recipe and asdict(recipe)]

    def rows(self) -> list[Row]:
        """The finished rows."""
        return read_rows(self.table, self.columns)


@cache
def _content(flag: str, folder: Path) -> str:
    """Return a hash of the files of a folder that a flag makes a run read; they must stay while a queue works."""
    found = hashlib.sha256()
    for path in sorted(path for path in folder.iterdir() if _READ_FROM[flag].fullmatch(path.name)):
        found.update(path.name.encode() + b"\0" + hashlib.sha256(path.read_bytes()).digest())
    return found.hexdigest()


def read_experiment(path: Path, data: Sequence[Path], results: Path) -> Experiment:
    """Read an experiment file.

    Raises:
        ValueError: A key is unknown or missing, or the data are missing.
    """
    spec = json.loads(path.read_text(encoding="utf-8"))
    needed = {"script", "data", "flags", "models", "scores"}
    if (unknown := spec.keys() - _KEYS) or (missing := needed - spec.keys()):
        wrong = f"has {', '.join(sorted(unknown))}" if unknown else f"lacks {', '.join(sorted(missing))}"
        raise ValueError(f"{path} must have the keys {', '.join(sorted(needed))}, and may have others; it {wrong}")
    if len(spec.get("start", {})) > 1:
        raise ValueError(f"{path}: start must be one model; got {', '.join(spec['start'])}")
    is_drawn = spec["script"] == "long_range" and spec["data"].startswith(DRAWN)
    files = {} if is_drawn else _data_files(path, spec["data"], data)
    if "excerpt" in spec and not (isinstance(spec["excerpt"], int) and spec["excerpt"] > 0):
        raise ValueError(f"{path}: excerpt must be a positive number of characters; got {spec['excerpt']!r}")
    experiment = Experiment(path.stem, spec, files, results / f"{path.stem}.csv")
    is_better(experiment.scores[0])
    for model in experiment.models:
        if "max_steps" not in experiment.flags(model) or not experiment.rates(model):
            raise ValueError(f"{path}: model {model!r} must have max_steps and learning rates")
    return experiment


def _data_files(path: Path, name: str, data: Sequence[Path]) -> dict[str, Path]:
    folder = next((root / name for root in data if (root / name).is_dir()), None)
    if folder is None:
        raise ValueError(
            f"{path}: --data must name a folder with {name} in it; got {', '.join(map(str, data)) or 'none'}"
        )
    return {split: data_file(folder, split) for split in ("train", "validation")}


def data_file(folder: Path, split: str) -> Path:
    """Return the file of a split in a dataset's folder."""
    pattern = "valid*.*" if split == "validation" else f"{split}.*"
    found = sorted(path for path in folder.glob(pattern) if "heldout" not in path.name)
    if len(found) != 1:
        raise ValueError(f"{folder} must hold one file named {pattern}; got {[path.name for path in found]}")
    return found[0]


def plan(
    experiment: Experiment, rows: Sequence[Row], seeds: Sequence[int], is_kept: Callable[[Run], bool]
) -> list[Run]:
    """List the runs that an experiment still needs and can start now, in order.

    The start model comes first, then the searches of the others, then their further seeds. Further seeds follow a
    finished search; a run can start once its parent is finished.

    Args:
        experiment: The experiment.
        rows: The finished rows.
        seeds: The seeds; searches use the first.
        is_kept: Returns whether a run's model is saved.

    Raises:
        ValueError: A row of a model has another recipe or another version of this package.
    """
    done = {(row["model"], row["seed"], row["learning_rate"]): row for row in rows}
    parents: dict[int, Run] = {}
    before, searches, repeats = [], [], []
    for model in experiment.models:
        is_start = model == experiment.start
        if not is_start and experiment.start is not None and not parents:
            break  # its own search comes first
        recipe = experiment.recipe(model, parents.get(seeds[0]))
        check_recipe(experiment.table, rows, model, recipe, where=experiment.name)
        rates = _searched_rates(experiment, rows, model)
        search = [Run(experiment.name, model, seeds[0], rate, recipe, parents.get(seeds[0])) for rate in rates]
        more: list[Run] = []
        if all(run.key in done for run in search):
            rate = best_rate(rows, model, experiment.scores[0])
            if rate is not None:
                more = [Run(experiment.name, model, seed, rate, recipe, parents.get(seed)) for seed in seeds]
        search, repeat = ([run for run in runs if run.key not in done] for runs in (search, more))
        if search or repeat:
            check_version(experiment.table, rows, model)
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
    """Return a model's learning rates, and one more at the same distance while the best is the lowest or highest."""
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
