"""Put the report of a run together from its Trainer, its measurements and its task."""

import logging
import os
import platform
import random
import re
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel

from hf_hybrid.starters import name_of_starter
from hf_hybrid.training.flags.data import PREFIXES, RowArguments
from hf_hybrid.training.flags.model import ModelArguments
from hf_hybrid.training.report.curves import draw_picture, find_panels
from hf_hybrid.training.report.page import Cell, Page, Sample, Section, write_page
from hf_hybrid.training.run_folder.files import CURVES_FILE, REPORT_FILE
from hf_hybrid.training.trainer.measuring import peak_memory
from hf_hybrid.training.trainer.script_trainer import ScriptTrainer
from hf_hybrid.version import __version__

logger = logging.getLogger(__name__)

_SEED = 0
_SAMPLES = 5
_OPTIMIZATION = {"Learning rate": {"learning_rate": "learning rate"}, "Gradient norm": {"grad_norm": "gradient norm"}}
_WORK = {"do_train": "trained", "do_eval": "evaluated", "do_predict": "predicted"}


def choose_rows(count: int, wanted: int = _SAMPLES) -> list[int]:
    """Draw rows at random, the same ones each time, and return them in order."""
    return sorted(random.Random(_SEED).sample(range(count), min(wanted, count)))


def sample_rows(
    trainer: ScriptTrainer,
    examples: Mapping[str, Any],
    sample: Callable[[Any, Any, Mapping[str, Any]], Sample],
    *,
    note: str,
) -> Section:
    """Show what the model makes of some rows of the last split that is scored.

    Args:
        trainer: Has the model and its tokenizer.
        examples: The rows of each split.
        sample: Makes a sample of the model, the tokenizer and a row; no gradients are kept.
        note: What it does.
    """
    split = next((name for name in reversed(PREFIXES) if name in examples), None)
    if split is None:
        return Section("Samples")
    title = f"Samples of the {split} split"
    if trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled:
        return Section(title, notes=["The model is sharded: one process cannot generate alone."])
    model: Any = trainer.accelerator.unwrap_model(trainer.model).eval()
    rows = examples[split]
    with torch.no_grad():
        samples = [sample(model, trainer.processing_class, rows[row]) for row in choose_rows(len(rows), 3)]
    return Section(title, samples=samples, notes=[note])


def guarded(what: str, work: Callable[[], Any]) -> Any:
    """Do optional work of a run; if it fails, warn with the reason and return None."""
    try:
        return work()
    except Exception as error:  # whatever it is, the results are saved and must not look lost
        logger.warning("%s is left out. %s: %s", what, type(error).__name__, error)
        return None


@dataclass(frozen=True)
class Contents:
    """A task's part of the report.

    Attributes:
        title: What the script does.
        sizes: The size of each used split, in words.
        tiles: The most important metrics, and their names on the page.
        curves: Title of each diagram, and its logged metrics with the names of their curves.
        parts: Functions that make the sections, by name; if one fails, the others remain.
    """

    title: str
    sizes: Mapping[str, str]
    tiles: Mapping[str, str]
    curves: Mapping[str, Mapping[str, str]]
    parts: Mapping[str, Callable[[], Section]]


def write_report(
    trainer: ScriptTrainer,
    model_args: ModelArguments,
    data_args: RowArguments,
    task: Callable[[], Contents],
    *,
    command: Sequence[str],
    metrics: Mapping[str, Any],
) -> None:
    """Write ``report.html``, and ``curves.png`` if something was trained; a failure is only a warning."""
    folder = Path(str(trainer.args.output_dir))
    path = _path(folder, trainer)

    def write() -> None:
        path.unlink(missing_ok=True)  # if this report fails, an older one must not pass for it
        contents, curves = task(), []
        if trainer.args.do_train:
            curves = find_panels(trainer.state.log_history, {**contents.curves, **_OPTIMIZATION})
        if curves:
            guarded(CURVES_FILE, lambda: draw_picture(curves, folder / CURVES_FILE))
        sections = {name: guarded(f"In {path}: the part {name!r}", part) for name, part in contents.parts.items()}
        failed = [name for name, part in sections.items() if part is None]
        notes = [f"{name}: making this part failed; the log says why." for name in failed]
        if not trainer.args.do_train:
            notes.append("Nothing was trained in this run: no curves.")
        facts = _facts(trainer, model_args, data_args, contents.sizes)
        page = Page(
            title=f"{contents.title}: {facts['model type']}",
            summary=_summary(trainer),
            tiles={name: metrics[key] for key, name in contents.tiles.items() if key in metrics},
            facts=facts,
            command=command,
            sections=[section for section in sections.values() if section is not None],
            curves=curves,
            measured=_measured(trainer, metrics),
            environment=environment(trainer.args.device, trainer.args.world_size),
            numbers=metrics,
            notes=notes,
        )
        write_page(page, path)
        logger.info("What was run and how it went: %s", path)

    guarded(str(path), write)


def _path(folder: Path, trainer: ScriptTrainer) -> Path:
    """Choose the report's file; a run without training keeps another run's report, unless it may overwrite it."""
    path, number = folder / REPORT_FILE, 2
    while not trainer.args.do_train and not trainer.args.overwrite_output_dir and path.exists():
        path = folder / REPORT_FILE.replace(".", f"-{number}.")
        number += 1
    return path


def _summary(trainer: ScriptTrainer) -> str:
    done = [word for flag, word in _WORK.items() if getattr(trainer.args, flag)]
    if not trainer.measurements.step_seconds:
        done = [word for word in done if word != _WORK["do_train"]]  # training was finished before
    words = f"{', '.join(done[:-1])} and {done[-1]}" if len(done) > 1 else "".join(done)
    finished = datetime.now(UTC).strftime("%d %B %Y, %H:%M UTC")
    return f"A run that {words or 'did nothing'}, finished on {finished}. All numbers were measured in it."


def _facts(
    trainer: ScriptTrainer, model_args: ModelArguments, data_args: RowArguments, sizes: Mapping[str, str]
) -> dict[str, Cell]:
    args = trainer.args
    model: Any = trainer.accelerator.unwrap_model(trainer.model)
    adapter = None
    if not isinstance(model, PreTrainedModel) and hasattr(model, "get_base_model"):
        adapter = ", ".join(str(getattr(config.peft_type, "value", "")) for config in model.peft_config.values())
        model = model.get_base_model()
    measured = trainer.measurements
    start = name_of_starter(model_args.model_name_or_path or "a new model, at random")
    if model_args.init_from is not None:
        start = f"{start}, a checkpoint of another architecture (--init_from {model_args.init_from})"
    facts: dict[str, Cell] = {
        "model class": type(model).__name__,
        "model type": model.config.model_type,
        "started from": start,
        "parameters": measured.parameters,
        "trained parameters": measured.trainable if args.do_train else None,
        "adapter": adapter,
        "vocabulary": getattr(model.config, "vocab_size", None),
    }
    named = " ".join(filter(None, [data_args.dataset_name, data_args.dataset_config_name]))
    facts["data"] = named or ", ".join(dict.fromkeys(data_args.files.values()))
    facts |= {f"{split} split": size for split, size in sizes.items()}
    if args.do_train:
        per_step = args.per_device_train_batch_size * max(1, args.n_gpu) * args.gradient_accumulation_steps
        facts |= {
            "steps": trainer.state.global_step,
            "examples per step": per_step * args.replicas,
            "optimizer": f"{getattr(args.optim, 'value', args.optim)}, learning rate {args.learning_rate:g}, "
            f"{getattr(args.lr_scheduler_type, 'value', args.lr_scheduler_type)}",
        }
    facts["precision"] = "bfloat16 autocast" if args.bf16 else "float16 autocast" if args.fp16 else str(model.dtype)
    facts["seed"] = args.seed
    return {name: value for name, value in facts.items() if value is not None}


def _measured(trainer: ScriptTrainer, metrics: Mapping[str, Any]) -> dict[str, Cell]:
    measured = trainer.measurements
    rows: dict[str, Cell] = {}
    if trainer.args.do_train and not measured.step_seconds:
        rows["training"] = "finished before this run, which took no step"
    elif measured.step_seconds:
        seconds = sum(measured.step_seconds)
        if measured.resumed_at:
            rows["resumed at step"] = measured.resumed_at
        rows |= {
            "steps taken": len(measured.step_seconds),
            "time of these steps": _duration(seconds),
            "time of a step (median)": _duration(statistics.median(measured.step_seconds)),
            "training examples per second": measured.examples / seconds,
            "training tokens per second": measured.tokens / seconds if measured.tokens else None,
        }
    if measured.evaluation_seconds:
        rows["time of evaluation and prediction"] = _duration(measured.evaluation_seconds)
    for prefix, word in (("eval", "evaluated"), ("predict", "predicted")):
        if (rate := metrics.get(f"{prefix}_samples_per_second")) is not None:
            rows[f"examples {word} per second"] = rate
    rows |= {f"highest {name}": f"{size / 2**20:,.0f} MiB" for name, size in peak_memory().items()}
    if trainer.args.world_size > 1:
        rows["measured on"] = f"process 0 of {trainer.args.world_size}, with its share of the training examples"
    return {name: value for name, value in rows.items() if value is not None}


def _duration(seconds: float) -> str:
    if seconds < 1:
        return f"{1000 * seconds:.3g} ms"
    minutes = round(seconds) // 60
    if minutes < 2:
        return f"{seconds:.3g} s"
    return f"{minutes} min {round(seconds) % 60} s" if minutes < 120 else f"{minutes // 60} h {minutes % 60} min"


def environment(device: torch.device, processes: int = 1) -> dict[str, Cell]:
    """List the versions and devices on which the numbers depend."""
    return {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU: {_cpu_name()}",
        "cores": os.cpu_count(),
        "torch threads": torch.get_num_threads(),
        "processes": processes,
        "Python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "hf_hybrid": __version__,
        "system": f"{platform.system()} {platform.machine()}",
    }


def _cpu_name() -> str:
    try:  # platform.processor() is empty on most of Linux
        found = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(encoding="utf-8"), re.MULTILINE)
    except OSError:
        found = None
    return found[1] if found else platform.processor() or platform.machine()
