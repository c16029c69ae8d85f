"""Train on the Long Range Arena in slices of minutes, and print the row beside the papers'.

Run it from the repository root; ``docs/long_range.md`` says which files a task reads from ``--data_dir``, and which
tasks are drawn without any::

    python -m benchmarks.lra --task lra_listops --model CHELA --minutes 9        # again and again, until it is done
    python -m benchmarks.lra --task lra_image --model "SPADE (S4 + chunk)" --data_dir path/to/data --minutes 9
    python -m benchmarks.lra --task lra_listops --model CHELA --fraction 0.1     # a tenth of the recipe's updates
    python -m benchmarks.lra --task lra_pathfinder_16 --model CHELA --small      # a rehearsal on a CPU

A run is a folder, ``OUTPUT_DIR/TASK/MODEL-SEED``. It saves a checkpoint there every two minutes, after each validation
and when its minutes are over, and ends then, also within a validation or the test; the same command goes on from it,
also on another machine to which the folder was copied, with the batches that would have come next. Ctrl-C or SIGTERM
ends it after the present batch, with a checkpoint; a second one ends it at once, and what was saved before stays. The
checkpoint holds a hash of the recipe and of the rows to train on and to validate, and others are refused. Data are
drawn on all cores, in parts that are kept in ``OUTPUT_DIR/data``: a slice whose minutes they take ends between two
parts. After the last epoch, the weights of the epoch with the best validation are tested.

A run whose loss or weights are no longer finite ends, and leaves its last checkpoint as it is: the same command would
come to the same step. ``--learning_rate`` replaces the recipe's, ``--bf16`` computes under autocast, and the row says
so. A run with one of these, or with ``--fraction`` or ``--rows``, has a folder of its own.

Where the time is not enough for a recipe, ``--fraction`` trains with a schedule of so many of its updates, whose
learning rate falls to zero at its end, and ``--finish`` tests what there is when the minutes are over, however long
that takes; the run can go on all the same. The title of the row and ``result.json`` say which share of the recipe was
trained. Nothing needs the network.
"""

import argparse
import json
import math
import os
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, Trainer, get_scheduler

from benchmarks.lra_recipes import MODELS, PAPERS, classifier_of, recipe_of
from benchmarks.record import (
    OutputError,
    markdown_table,
    only_process,
    positive,
    positive_int,
    seed_number,
    short_hash,
    slug,
)
from hf_hybrid.data.drawing import split_generator
from hf_hybrid.data.lra import LRA, DrawingStopped, find_lra, load_lra_once
from hf_hybrid.training.collating import LongRangeRows, long_range_collator
from hf_hybrid.training.errors import one_line
from hf_hybrid.training.flags.recipes import LongRangeRecipe
from hf_hybrid.training.run_folder.files import replacing
from hf_hybrid.training.trainer.optimizer import separate_ssm_parameters

CHECKPOINT, RESULT = "checkpoint.pt", "result.json"
_RESUMED = ("model", "optimizer", "schedule")
_COUNTED = ("step", "minutes", "history", "best", "partial")
_SAVE_EVERY = 120.0
"""Seconds of training or validation after which a checkpoint is saved."""
_SMALL_ROWS = {"train": 32, "validation": 16, "test": 16}
Batch = dict[str, torch.Tensor]


# ---- data ----


def batches(rows: LongRangeRows, order: Sequence[int], size: int, device: torch.device) -> Iterator[Batch]:
    """Yield padded batches of rows in an order; the last one may be smaller."""
    for start in range(0, len(order), size):
        batch = long_range_collator([rows[place] for place in order[start : start + size]])
        yield {name: value.to(device) for name, value in batch.items()}


# ---- training ----


def optimizer_of(model: PreTrainedModel, recipe: LongRangeRecipe) -> torch.optim.Optimizer:
    """Return AdamW with the groups that `long_range` has: norms, biases and state spaces are not decayed."""
    decayed = {*Trainer.get_decay_parameter_names(None, model)}
    named = [*model.named_parameters()]
    groups = [
        {"params": [value for name, value in named if name in decayed], "weight_decay": recipe.weight_decay},
        {"params": [value for name, value in named if name not in decayed], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=recipe.learning_rate, betas=(0.9, recipe.beta2))
    separate_ssm_parameters(optimizer, model, recipe.ssm_learning_rate)
    return optimizer


class Interrupted(Exception):
    """The run was asked to end, and has saved what it had to save."""


class SliceOver(Exception):
    """The minutes are over, and the run is saved."""


class Diverged(Exception):
    """The loss or the weights are not finite; the last checkpoint is as it was."""


class LongRangeRun:
    """A model, its optimizer and how far it has come."""

    def __init__(self, arguments: argparse.Namespace, folder: Path) -> None:
        self.entered = time.monotonic()
        self.task, self.folder = arguments.task, folder
        self.device = torch.device(arguments.device)
        self.recipe = recipe_of(arguments.model, arguments.task, arguments.small)
        self.rate_of_recipe = self.recipe.learning_rate
        self.recipe = replace(self.recipe, learning_rate=arguments.learning_rate or self.rate_of_recipe)
        count = _SMALL_ROWS if arguments.small else dict.fromkeys(_SMALL_ROWS, arguments.rows)
        known, cache = LRA[arguments.task], str(Path(arguments.output_dir, "data"))
        where: dict[str, Any] = {"data_dir": arguments.data_dir, "seed": arguments.seed, "cache_dir": cache}
        self.until = self.entered + 60 * arguments.minutes
        where |= {"processes": os.cpu_count() or 1, "until": self.until}
        found = find_lra(self.task, "train", arguments.data_dir)
        self.source = "drawn" if found is None else f"of {found[0].name}"
        reads = "input_values" if known.vocab_size is None else "input_ids"
        self.rows = {
            split: LongRangeRows(load_lra_once(self.task, split, count=count[split], **where), reads, known.length)
            for split in dict.fromkeys(("train", "validation", arguments.tested))
        }
        self.tested, self.fraction, self.bf16 = arguments.tested, arguments.fraction, arguments.bf16
        torch.manual_seed(arguments.seed)
        self.model = classifier_of(self.recipe, self.task).to(self.device)
        self.optimizer = optimizer_of(self.model, self.recipe)
        warmup = math.ceil(self.recipe.warmup * self.steps)
        self.schedule = get_scheduler(self.recipe.schedule, self.optimizer, warmup, self.steps)
        self.seed, self.step, self.minutes, self.history = arguments.seed, 0, 0.0, []  # type: ignore[var-annotated]
        self.best: dict[str, Any] = {"validation": -1.0}
        self.trained: dict[str, torch.Tensor] = {}  # the weights after the last step, while the best ones are tested
        self.partial: dict[str, Any] = {}  # an evaluation that has not ended: its split, step, rows and right ones
        self.is_interrupted, self.saved_step = False, 0
        self.counted = self.saved_at = time.monotonic()
        config = {name: value for name, value in self.model.config.to_dict().items() if name != "transformers_version"}
        data = [self.rows[split].digest() for split in ("train", "validation")]
        recipe = asdict(replace(self.recipe, source=""))
        self.hash = short_hash([arguments.task, arguments.model, recipe, self.fraction, self.bf16, config, data])

    @property
    def steps_per_epoch(self) -> int:
        """Updates of an epoch."""
        return math.ceil(len(self.rows["train"]) / self.recipe.batch_size)

    @property
    def steps(self) -> int:
        """All updates."""
        return max(1, math.ceil(self.fraction * self.steps_of_recipe))

    @property
    def steps_of_recipe(self) -> int:
        """Updates of the whole recipe on these rows."""
        return self.recipe.epochs * self.steps_per_epoch

    def train(self) -> None:
        """Train.

        Reading or drawing the data is part of the slice, and no part of the minutes of training.

        Raises:
            Interrupted: A signal came; the run is saved.
            SliceOver: The minutes are over; the run is saved.
            Diverged: The loss or the weights are not finite.
        """
        self.counted = self.saved_at = time.monotonic()
        with self._noticing_signals():
            self._validate_if_due()  # an interruption may have come before it
            while self.step < self.steps:
                for batch in self._rest_of_epoch():
                    self._update(batch)
                    self._validate_if_due()
                    self._tend()
                    if self.step == self.steps:
                        break

    @contextmanager
    def _noticing_signals(self) -> Iterator[None]:
        """Note SIGINT and SIGTERM, to end after the present batch; the second one interrupts at once."""

        def note(number: int, frame: Any) -> None:
            if self.is_interrupted:
                raise KeyboardInterrupt
            self.is_interrupted = True

        before = {kind: signal.signal(kind, note) for kind in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for kind, handler in before.items():
                signal.signal(kind, handler)

    def _tend(self) -> None:
        """Save if it is time to, and end if a signal came or the minutes are over, between two batches."""
        now = time.monotonic()
        if self.is_interrupted or now > self.until or now - self.saved_at > _SAVE_EVERY:
            self.save()
        if self.is_interrupted:
            raise Interrupted
        if now > self.until:
            raise SliceOver

    def _validate_if_due(self) -> None:
        """Validate after each epoch and at the end, unless that has been done, and save."""
        is_due = self.step > 0 and (self.step % self.steps_per_epoch == 0 or self.step == self.steps)
        if is_due and (not self.history or self.history[-1]["step"] < self.step):
            self.validate()
            self.save()

    def _rest_of_epoch(self) -> Iterator[Batch]:
        """Yield the batches of this epoch that have not come yet; their order depends on seed and epoch alone."""
        epoch, done = divmod(self.step, self.steps_per_epoch)
        order = split_generator(self.seed, "train", epoch).permutation(len(self.rows["train"])).tolist()
        yield from batches(
            self.rows["train"], order[done * self.recipe.batch_size :], self.recipe.batch_size, self.device
        )

    def _update(self, batch: Batch) -> None:
        self.model.train()
        torch.manual_seed(self.seed * 1_000_003 + self.step)  # dropout goes on as if nothing had stopped it
        with self._precision():
            loss = self.model(**batch).loss
        if not torch.isfinite(loss):
            raise Diverged(self._end_of(f"the loss of step {self.step} is not finite"))
        loss.backward()
        if self.recipe.clip:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.recipe.clip)
        self.optimizer.step()
        self.schedule.step()
        self.optimizer.zero_grad()
        self.step += 1

    def _precision(self) -> Any:
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.bf16)

    def validate(self, tends: bool = True) -> None:
        """Validate the present weights, and keep them if they are the best ones so far.

        Args:
            tends: Whether to end where a signal comes or the minutes are over; the next slice goes on from there.

        Raises:
            Interrupted: A signal came; the run is saved.
            SliceOver: The minutes are over; the run is saved.
            Diverged: The weights are not finite.
        """
        self._check_weights()
        validation = self.accuracy("validation", tends)
        self.history.append({"step": self.step, "validation": validation})
        epoch = self.step / self.steps_per_epoch
        print(f"epoch {epoch:.4g} of {self.recipe.epochs}: {validation:.4f}", flush=True)
        if validation > self.best["validation"]:
            weights = {name: value.detach().cpu().clone() for name, value in self.model.state_dict().items()}
            self.best = {"validation": validation, "weights": weights}

    @torch.no_grad()
    def accuracy(self, split: str, tends: bool) -> float:
        """Return the share of right labels; see `validate`."""
        self.model.eval()
        rows, of = self.rows[split], {"split": split, "step": self.step}
        if not of.items() <= self.partial.items():
            self.partial = {**of, "rows": 0, "right": 0}
        for batch in batches(rows, range(self.partial["rows"], len(rows)), self.recipe.batch_size, self.device):
            with self._precision():
                found = self.model(**batch).logits.argmax(dim=-1)
            self.partial["right"] += int((found == batch["labels"]).sum())
            self.partial["rows"] += len(found)
            if tends:
                self._tend()
        right, self.partial = self.partial["right"], {}
        return float(right / len(rows))

    # ---- checkpoints ----

    def _check_weights(self) -> None:
        """Refuse weights that are not finite: a checkpoint of them could not go on.

        Raises:
            Diverged: Some are.
        """
        for name, value in self.model.state_dict().items():
            if value.is_floating_point() and not torch.isfinite(value).all():
                raise Diverged(self._end_of(f"{name} is not finite after step {self.step}"))

    def _end_of(self, what: str) -> str:
        kept = f"The checkpoint of step {self.saved_step} stays" if self.saved_step else "There is no checkpoint"
        rate = self.recipe.learning_rate
        return f"{what}, at a learning rate of {rate:g}. {kept}. Begin again with --learning_rate below {rate:g}"

    def save(self) -> None:
        """Write a checkpoint; an interruption leaves the one before.

        Raises:
            Diverged: The weights are not finite; nothing is written.
        """
        self._check_weights()
        now = time.monotonic()
        self.minutes, self.counted = self.minutes + (now - self.counted) / 60, now
        states = {name: getattr(self, name).state_dict() for name in _RESUMED}
        states |= {"model": self.trained} if self.trained else {}
        counts = {name: getattr(self, name) for name in _COUNTED} | {"hash": self.hash}
        self.folder.mkdir(parents=True, exist_ok=True)
        with replacing(self.folder / CHECKPOINT) as path:
            torch.save({**states, **counts}, path)
        self.saved_at, self.saved_step = time.monotonic(), self.step

    def resume(self) -> None:
        """Go on from a checkpoint, if there is one.

        Raises:
            ValueError: It is of another recipe, or cannot be read.
        """
        path = self.folder / CHECKPOINT
        for unfinished in self.folder.glob(f"_{CHECKPOINT}.*"):  # of a process that was killed
            unfinished.unlink(missing_ok=True)
        if not path.exists():
            return
        try:
            kept = torch.load(path, map_location=self.device, weights_only=True)
        except Exception as error:  # torch raises many kinds for a broken file
            raise ValueError(f"{path} must be a checkpoint; it cannot be read ({error}). Delete it") from error
        if missing := sorted({*_RESUMED, *_COUNTED, "hash"} - set(kept)):
            raise ValueError(f"{path} must be a checkpoint of this command; it lacks {', '.join(missing)}. Delete it")
        if kept["hash"] != self.hash:
            raise ValueError(
                f"{path} must have the present recipe and rows (hash {self.hash}; got {kept['hash']}): files or "
                "defaults have changed since. Name another --output_dir, or move it away"
            )
        for name in _RESUMED:
            getattr(self, name).load_state_dict(kept[name])
        for name in _COUNTED:
            setattr(self, name, kept[name])
        self.saved_step = self.step

    def test(self, tends: bool) -> dict[str, Any]:
        """Test the best weights, the present ones among them, and write and return the result.

        Args:
            tends: As in `validate`.
        """
        if not self.history or self.history[-1]["step"] < self.step:
            self.validate(tends)
        self.trained = {name: value.clone() for name, value in self.model.state_dict().items()}
        self.model.load_state_dict(self.best["weights"])
        # of the published number of examples, however many are at hand
        whole = self.recipe.epochs * math.ceil(LRA[self.task].counts[0] / self.recipe.batch_size)
        shares = {"of_recipe": self.step / whole, "of_schedule": self.step / self.steps}
        counts = {"steps": self.step, **shares, "minutes": round(self.minutes, 2), "examples": len(self.rows["train"])}
        with self._noticing_signals() if tends else nullcontext():
            accuracy = self.accuracy(self.tested, tends)
        scores = {"accuracy": accuracy, "validation": self.best["validation"], "tested": self.tested}
        scores |= {"rows": self.source, "learning_rate": self.recipe.learning_rate, "bf16": self.bf16}
        parameters = self.model.num_parameters()
        result = {**scores, **counts, "parameters": parameters, "recipe": self.recipe.source, "history": self.history}
        with replacing(self.folder / RESULT) as path:
            path.write_text(json.dumps(result, indent=1), encoding="utf-8")
        return result


# ---- the command line ----


def row(model: str, task: str, result: dict[str, Any], recipe: LongRangeRecipe, rate_of_recipe: float) -> str:
    """Return a table: this run, and the papers' models on the same task."""
    lines = [[f"**{model}**, here", f"{result['parameters']:,}", f"{100 * result['accuracy']:.2f}"]]
    split = "" if result["tested"] == "test" else f", on the {result['tested']} split, which also chose the epoch"
    lines += [[name, "", f"{of[task]:.2f}"] for name, of in PAPERS.items() if task in of]
    trained = f"{100 * result['of_recipe']:.3g} % of the recipe's updates"
    if result["of_schedule"] < 1:
        trained += f", stopped after {100 * result['of_schedule']:.3g} % of its schedule"
    elif result["of_recipe"] < 1:
        trained += ", in a schedule of so many"
    if result["learning_rate"] != rate_of_recipe:
        trained += f", at a learning rate of {result['learning_rate']:g} for the recipe's {rate_of_recipe:g}"
    trained += ", in bfloat16" if result["bf16"] else ""
    examples = f"{result['examples']:,} examples ({result['rows']})"
    title = f"{task}: {examples}, {trained}, {result['minutes']:.1f} minutes{split}"
    return f"{title} ({recipe.source})\n\n" + markdown_table(["model", "parameters", "accuracy (%)"], lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Train for some minutes; test and print the row once all epochs are done."""
    parser = command_parser()
    arguments = parser.parse_args(argv)
    if arguments.fraction > 1:
        parser.error(f"--fraction must be at most 1; got {arguments.fraction}")
    if arguments.rows is not None and arguments.small:
        parser.error(f"--rows is not for --small; got {arguments.rows}")
    try:
        torch.empty(1, device=arguments.device)
    except Exception as error:  # torch raises many kinds
        parser.error(f"--device {arguments.device} cannot be used: {one_line(error)}")
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        folder = run_folder(arguments)
        with only_process(folder / "lock", f"--output_dir {folder}"):
            return _run(parser, arguments, folder)
    except OutputError as error:
        parser.error(str(error))
    except Diverged as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted; the same command goes on from what is saved")
        return 130
    finally:
        signal.signal(signal.SIGTERM, before)


def command_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--task", required=True, choices=LRA)
    parser.add_argument("--model", default="CHELA", choices=MODELS)
    parser.add_argument("--minutes", type=positive, default=9.0, help="of this slice (%(default)s)")
    parser.add_argument("--data_dir", type=Path, help="folder of the task's files; without it rows are drawn")
    parser.add_argument("--rows", type=positive_int, help="most rows of each split (all)")
    parser.add_argument(
        "--tested", choices=("test", "validation"), default="test", help="split of the last score (%(default)s)"
    )
    parser.add_argument("--seed", type=seed_number, default=0)
    parser.add_argument("--learning_rate", type=positive, help="peak, for that of the recipe")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="(%(default)s)")
    parser.add_argument("--output_dir", type=Path, default=Path("runs/lra"), help="(%(default)s)")
    parser.add_argument("--bf16", action="store_true", help="compute in bfloat16 (autocast)")
    parser.add_argument("--fraction", type=positive, default=1.0, help="share of the recipe's updates to train (all)")
    parser.add_argument("--finish", action="store_true", help="test what there is when the minutes are over")
    parser.add_argument("--small", action="store_true", help="a tiny model, few rows, two epochs: a rehearsal")
    return parser


def run_folder(arguments: argparse.Namespace) -> Path:
    """Return the folder of the run that a command line names."""
    name = f"{slug(arguments.model)}-{arguments.seed}"
    name += "" if arguments.learning_rate is None else f"-lr{arguments.learning_rate:g}"
    name += "" if arguments.fraction == 1 else f"-fraction{arguments.fraction:g}"
    name += "" if arguments.rows is None else f"-rows{arguments.rows}"
    name += "-bf16" * arguments.bf16 + "-small" * arguments.small
    return Path(arguments.output_dir, arguments.task, name)


def _run(parser: argparse.ArgumentParser, arguments: argparse.Namespace, folder: Path) -> int:
    """Do a slice of the run of a folder.

    Raises:
        Diverged: The loss or the weights are not finite.
    """
    try:
        run = LongRangeRun(arguments, folder)
        run.resume()
    except ValueError as error:
        parser.error(str(error))
    except DrawingStopped as stopped:
        print(f"{stopped}; the same command goes on")
        return 0
    try:
        try:
            run.train()
        except SliceOver:
            if not arguments.finish:
                raise
        result = run.test(tends=not arguments.finish)
    except Interrupted:
        print(f"interrupted at step {run.step} of {run.steps}, which is saved; the same command goes on")
        return 130
    except SliceOver:
        print(f"step {run.step} of {run.steps} after {run.minutes:.1f} minutes; the same command goes on")
        return 0
    print("\n" + row(arguments.model, arguments.task, result, run.recipe, run.rate_of_recipe))
    return 0


if __name__ == "__main__":
    sys.exit(main())
