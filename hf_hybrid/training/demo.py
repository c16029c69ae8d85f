"""``make demo``: fine-tune a starter to summarize, offline, and show what it has learnt.

``python -m hf_hybrid.training.demo [--long]`` trains on ``embedded:docstrings`` with `summarization.main`: the
starter, and in as many steps, hence as much time, a model of the same size from scratch. Then it compares them on the
test split with three things that need no training: a model before its first step, a random training summary, and the
first words of the document. Lengths are counted in steps, so that all machines do the same. The exit code is 1 if a
check does not hold.
"""

import argparse
import json
import random
import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from hf_hybrid.data.preprocessing import plain_baselines
from hf_hybrid.training import summarization
from hf_hybrid.training.errors import run_command_line
from hf_hybrid.training.flags.command_line import parse_arguments
from hf_hybrid.training.flags.data import SummarizationArguments
from hf_hybrid.training.flags.model import ModelArguments
from hf_hybrid.training.flags.run import SummarizationTrainingArguments, computes_bfloat16_fast
from hf_hybrid.training.report.curves import draw_picture, find_panels
from hf_hybrid.training.report.page import Cell, Page, Sample, Section, Table, write_page
from hf_hybrid.training.report.run_page import choose_rows, environment, guarded
from hf_hybrid.training.report.summarization import CURVES
from hf_hybrid.training.run_folder.checkpoints import complete_checkpoints
from hf_hybrid.training.run_folder.files import CURVES_FILE, PREDICTIONS_FILE, REPORT_FILE
from hf_hybrid.training.scores.summarization import rouge_scores
from hf_hybrid.training.splits import first_examples

SCORES = {"rouge1": "ROUGE-1", "rouge2": "ROUGE-2", "rougeL": "ROUGE-L"}
UNTRAINED, SCRATCH, TRAINED = "untrained model", "trained from scratch", "trained starter"
RANDOM, LEAD = "random training summary", "lead baseline"
MARGIN = 1.3
"""A score beats another one if it is at least this many times as large."""
MIN_DISTINCT = 0.5
"""The smallest share of generated summaries that must be distinct."""
FOLDERS = {UNTRAINED: "untrained", SCRATCH: "scratch", TRAINED: "trained"}
"""The folder of each model's run in that of the demo."""
_TEXT, _RESULTS, _RECIPE = "report.md", "demo_results.json", "recipe.json"
_SEED = 0


@dataclass(frozen=True)
class Recipe:
    """Every number of a demo.

    Attributes:
        start: The starter, or another checkpoint: what is trained, and the size and tokenizer of the other models.
        flags: Flags of ``run_summarization.py`` for all models.
        training: Flags for training.
        scratch: Flags that are others for training from scratch.
    """

    start: str
    flags: dict[str, Any]
    training: dict[str, Any]
    scratch: dict[str, Any]


SHORT = Recipe(
    start="spade-en-tiny",
    flags={
        "dataset_name": "embedded:docstrings",
        "max_source_length": 96,
        "max_target_length": 24,
        "max_eval_samples": 128,
        "max_predict_samples": 512,
        "per_device_eval_batch_size": 64,
        "num_beams": 4,
        "no_repeat_ngram_size": 3,
        "seed": 42,
    },
    training={
        "max_steps": 360,
        "per_device_train_batch_size": 32,
        "learning_rate": 1e-3,
        "lr_scheduler_type": "cosine",
        "warmup_steps": 36,
        "adam_beta2": 0.98,
        "weight_decay": 0.01,
        "eval_steps": 120,
        "logging_steps": 10,
        "train_sampling_strategy": "group_by_length",
        "bf16": True,  # where that is fast
    },
    scratch={"learning_rate": 2e-3},
)
"""``make demo``: some minutes on two cores for each of both models."""

LONG = Recipe(
    start=SHORT.start,
    flags=SHORT.flags | {"max_source_length": 192, "max_eval_samples": 256},
    training=SHORT.training | {"max_steps": 1000, "warmup_steps": 100, "eval_steps": 250, "logging_steps": 25},
    scratch=SHORT.scratch,
)
"""``make demo-long``: longer documents, more steps."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the demo.

    Args:
        argv: ``--long`` and ``--output_dir FOLDER`` (default ``runs/demo``, or ``runs/demo-long``).

    Returns:
        The exit code: 0 if the model has learnt to summarize, 1 if it has not.

    Raises:
        ValueError: The folder holds other files than a demo's.
    """
    parser = argparse.ArgumentParser(description="Fine-tune a starter to summarize, and show what it has learnt.")
    parser.add_argument("--long", action="store_true", help="longer documents and more steps")
    parser.add_argument(
        "--output_dir", help="an interrupted demo in it is continued, a finished one replaced (runs/demo[-long])"
    )
    arguments = parser.parse_args(argv)
    folder = Path(arguments.output_dir or ("runs/demo-long" if arguments.long else "runs/demo"))
    results = run_demo(LONG if arguments.long else SHORT, folder)
    return 0 if results["passed"] else 1


def run_demo(recipe: Recipe, folder: Path) -> dict[str, Any]:
    """Train, compare, print, and write ``report.html``, ``report.md``, ``demo_results.json`` and ``curves.png``.

    Args:
        recipe: The numbers.
        folder: Output folder. A finished demo in it is replaced, an interrupted one continued.

    Returns:
        The content of ``demo_results.json``: ``table``, ``checks``, ``passed``, ``samples``, ``checkpoint``,
        ``test_documents``, and ``training_seconds`` of each trained model, None if its training was interrupted.

    Raises:
        ValueError: The folder holds other files than a demo's, or an interrupted demo of another recipe.
        KeyboardInterrupt: Training was stopped with Ctrl-C, after saving a checkpoint.
    """
    _check_folder(folder, recipe)
    _clear_folder(folder, recipe)
    checkpoint = folder / FOLDERS[TRAINED]
    resumed = {name: bool(complete_checkpoints(folder / FOLDERS[name])) for name in (TRAINED, SCRATCH)}
    try:
        metrics = {name: summarization.main(_argv(recipe, folder, name)) for name in (TRAINED, SCRATCH, UNTRAINED)}
    except KeyboardInterrupt as interrupt:
        raise type(interrupt)("start the demo again to continue from its last checkpoint") from interrupt

    documents, references, pool = tested_with(recipe, folder)
    written = {name: read_predictions(folder / FOLDERS[name]) for name in metrics}
    texts = {UNTRAINED: written.pop(UNTRAINED), **plain_baselines(documents, pool, seed=_SEED)}
    texts |= {name: written[name] for name in (SCRATCH, TRAINED)}
    losses = {name: values["eval_loss"] for name, values in metrics.items()}
    table = {
        name: {**rouge_scores(predictions, references), "validation_loss": losses.get(name)}
        for name, predictions in texts.items()
    }
    checks = check_learning(table, texts[TRAINED], references)
    results = {
        "table": table,
        "checks": checks,
        "passed": all(checks.values()),
        "samples": _samples(documents, references, texts[TRAINED]),
        "checkpoint": str(checkpoint),
        "test_documents": len(documents),
        "training_seconds": {
            name: None if was_interrupted else metrics[name]["train_runtime"]
            for name, was_interrupted in resumed.items()
        },
    }
    load_lines = (
        "import hf_hybrid; from transformers import AutoModelForSeq2SeqLM",
        f'model = AutoModelForSeq2SeqLM.from_pretrained("{checkpoint.as_posix()}")',
    )
    exec("\n".join(load_lines), {})  # check the lines that are printed
    _draw(recipe, folder, results, load_lines)
    report = _report(results, load_lines, curves=CURVES_FILE if (folder / CURVES_FILE).exists() else None)
    print("\n" + report)
    (folder / _TEXT).write_text(report, encoding="utf-8")
    (folder / _RESULTS).write_text(json.dumps(results, indent=2), encoding="utf-8")
    print(f"Written to {folder}: {', '.join(sorted(path.name for path in folder.iterdir() if path.is_file()))}")
    return results


def _check_folder(folder: Path, recipe: Recipe) -> None:
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"--output_dir {folder} is a file; it must be a folder")
    names = sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []
    own = {*FOLDERS.values(), _TEXT, _RESULTS, _RECIPE, REPORT_FILE, CURVES_FILE}
    if foreign := [name for name in names if name not in own and name[0] != "."]:
        raise ValueError(f"--output_dir {folder} holds {', '.join(foreign[:3])}, which no demo wrote; give another")
    if {*names} & {*FOLDERS.values()} and not (folder / _RESULTS).exists():
        path = folder / _RECIPE
        if not path.is_file() or path.read_text(encoding="utf-8") != _as_json(recipe):
            raise ValueError(
                f"--output_dir {folder} holds an interrupted demo of another recipe; delete the folder or give another"
            )


def _clear_folder(folder: Path, recipe: Recipe) -> None:
    """Delete a finished demo, so that what is there when one starts belongs to the interrupted one."""
    folder.mkdir(parents=True, exist_ok=True)
    if (folder / _RESULTS).exists():
        for name in FOLDERS.values():
            shutil.rmtree(folder / name, ignore_errors=True)
    for name in (_TEXT, _RESULTS, REPORT_FILE, CURVES_FILE):
        (folder / name).unlink(missing_ok=True)
    (folder / _RECIPE).write_text(_as_json(recipe), encoding="utf-8")


def _as_json(recipe: Recipe) -> str:
    return json.dumps(asdict(recipe), indent=2) + "\n"


def _argv(recipe: Recipe, folder: Path, name: str) -> list[str]:
    """Return the command line of a model of the table; it continues if it has a checkpoint."""
    checkpoint = folder / FOLDERS[name]
    flags: dict[str, Any] = {
        **recipe.flags,
        "do_eval": True,
        "do_predict": True,
        "predict_with_generate": True,
        "overwrite_output_dir": True,
        "report": name != UNTRAINED,
        "output_dir": checkpoint,
    }
    sources = ("model_name_or_path",) if name == TRAINED else ("config_name", "tokenizer_name")
    flags |= dict.fromkeys(sources, recipe.start)
    if name != UNTRAINED:
        steps = recipe.training["eval_steps"]
        flags |= {"do_train": True, "eval_strategy": "steps", "save_strategy": "steps", "save_steps": steps}
        flags |= {"save_total_limit": 1, **recipe.training, **(recipe.scratch if name == SCRATCH else {})}
        if complete_checkpoints(checkpoint):
            flags["resume_from_checkpoint"] = "auto"
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cpu":  # also where there are other accelerators, which lack float64
        flags["use_cpu"] = True
    if not computes_bfloat16_fast(device):
        flags.pop("bf16", None)
    return [f"--{name}={value}" for name, value in flags.items()]


def tested_with(recipe: Recipe, folder: Path) -> tuple[list[str], list[str], list[str]]:
    """Return the test documents and summaries of a demo, and the training summaries."""
    argv = _argv(recipe, folder, TRAINED)
    model_args, data_args, training_args = parse_arguments(
        (ModelArguments, SummarizationArguments, SummarizationTrainingArguments), argv
    )
    splits, text_column, summary_column = summarization.load_splits(data_args, training_args, model_args)
    test = first_examples(splits["test"], data_args.max_predict_samples)
    return list(test[text_column]), list(test[summary_column]), list(splits["train"][summary_column])


def read_predictions(folder: Path) -> list[str]:
    """Return the summaries that a run has written, each in one line."""
    text = (folder / PREDICTIONS_FILE).read_text(encoding="utf-8")
    return [line.replace("\\n", " ") for line in text.split("\n")[:-1]]


def check_learning(
    table: dict[str, dict[str, Any]], predictions: Sequence[str], references: Sequence[str]
) -> dict[str, bool]:
    """Check that the trained model beats the other rows, and that its output depends on its input.

    Args:
        table: Scores by row.
        predictions: The trained model's summaries.
        references: The references in the same order.

    Returns:
        A sentence for each check, and whether it holds.
    """
    shuffled = list(references)
    random.Random(_SEED).shuffle(shuffled)
    of_others = rouge_scores(predictions, shuffled)
    distinct = len(set(predictions)) / len(predictions)
    drops = ", ".join(f"{table[TRAINED][key]:.1f} to {of_others[key]:.1f}" for key in SCORES)

    def beats(other: dict[str, Any], margin: float = MARGIN) -> bool:
        pairs = [(table[TRAINED][key], other[key]) for key in SCORES]
        return all(score > compared and score >= margin * compared for score, compared in pairs)

    return {
        f"at least {MARGIN} times the untrained model on every score": beats(table[UNTRAINED]),
        f"at least {MARGIN} times the random training summaries on every score": beats(table[RANDOM]),
        "ahead of the lead baseline on every score": beats(table[LEAD], 1),
        "ahead of the same model from scratch on every score": beats(table[SCRATCH], 1),
        f"{distinct:.0%} of its summaries are distinct (at least {MIN_DISTINCT:.0%})": distinct >= MIN_DISTINCT,
        f"at least {MARGIN} times what shuffled references give ({drops})": beats(of_others),
    }


def _samples(documents: Sequence[str], references: Sequence[str], predictions: Sequence[str]) -> list[dict[str, str]]:
    return [
        {
            "document": " ".join(documents[index].split())[:160],
            "reference": references[index],
            "summary": predictions[index],
        }
        for index in choose_rows(len(documents))
    ]


def _draw(recipe: Recipe, folder: Path, results: dict[str, Any], load_lines: Sequence[str]) -> None:
    """Write ``curves.png`` and ``report.html``; warn if one of them fails."""
    state = json.loads((folder / FOLDERS[TRAINED] / "trainer_state.json").read_text(encoding="utf-8"))
    panels = find_panels(state["log_history"], CURVES)
    guarded(CURVES_FILE, lambda: draw_picture(panels, folder / CURVES_FILE))
    rows: list[tuple[str, list[Cell]]] = [
        (name, [*(row[key] for key in SCORES), row["validation_loss"]]) for name, row in results["table"].items()
    ]
    scores = Table(
        f"ROUGE on {results['test_documents']} held-out test documents, in percent",
        ("", *SCORES.values(), "validation loss"),
        rows,
        strong=list(results["table"]).index(TRAINED),
    )
    checks = [(check, ["yes" if holds else "no"]) for check, holds in results["checks"].items()]
    learnt = "It has learnt to summarize." if results["passed"] else "It has not learnt enough."
    facts = {"start": recipe.start} | recipe.flags | recipe.training
    facts |= {f"{name}, from scratch": value for name, value in recipe.scratch.items()}
    seconds = {name: value for name, value in results["training_seconds"].items() if value is not None}
    page = Page(
        title=f"Demo: {recipe.start}",
        summary=f"A starter, fine-tuned to summarize, compared with what knows less. {learnt}",
        tiles={f"{name} (%)": results["table"][TRAINED][key] for key, name in SCORES.items()},
        facts={name: str(value) for name, value in facts.items()},
        sections=[
            Section("Scores", [scores]),
            Section(
                "Has it learnt to summarize?", [Table("What must hold", ("the trained starter", "holds"), checks)]
            ),
            Section("Samples", samples=[Sample(list(sample.items())) for sample in results["samples"]]),
        ],
        curves=panels,
        code=load_lines,
        measured={f"{name}, in seconds": value for name, value in seconds.items()},
        environment=environment(torch.device("cuda" if torch.cuda.is_available() else "cpu")),
    )
    guarded(REPORT_FILE, lambda: write_page(page, folder / REPORT_FILE))


def scores_and_checks(results: dict[str, Any]) -> str:
    """Return the scores of ``demo_results.json`` as a Markdown table, and its checks as a list."""
    width = max(map(len, results["table"]))
    lines = [f"Scores on {results['test_documents']} held-out test documents, in percent.", ""]
    lines.append(f"| {'':{width}} | {' | '.join(SCORES.values())} | validation loss |")
    lines.append(f"| {'-' * width} | {' | '.join('------:' for _ in SCORES)} | --------------: |")
    for name, row in results["table"].items():
        scores = " | ".join(f"{row[key]:7.2f}" for key in SCORES)
        loss = "n/a" if row["validation_loss"] is None else f"{row['validation_loss']:.3f}"
        lines.append(f"| {name:{width}} | {scores} | {loss:>15} |")
    lines.append("")
    lines += [f"- {'yes' if holds else 'NO '}: {check}" for check, holds in results["checks"].items()]
    return "\n".join(lines)


def training_time(results: dict[str, Any]) -> str:
    """Return how long the training of ``demo_results.json`` took; "" if it was interrupted."""
    seconds = results["training_seconds"]
    if None in seconds.values():
        return ""
    times = " and ".join(f"{value / 60:.1f} minutes ({name})" for name, value in seconds.items())
    return f"Training took {times}, validation included."


def _report(results: dict[str, Any], load_lines: Sequence[str], *, curves: str | None) -> str:
    verdict = "The model has learnt to summarize." if results["passed"] else "THE MODEL HAS NOT LEARNT ENOUGH."
    lines = ["# Demo", "", scores_and_checks(results), "", verdict, "", "## Samples", ""]
    for sample in results["samples"]:
        lines += [f"- document:  {sample['document']} ...", f"  - reference: {sample['reference']}"]
        lines += [f"  - summary:   {sample['summary']}"]
    lines += ["", "## The model", "", *([time, ""] if (time := training_time(results)) else [])]
    lines += ["Load it with", "", "```python", *load_lines, "```", ""]
    if curves is not None:
        lines += [f"![loss and ROUGE over the steps]({curves})", ""]
    return "\n".join(lines)


if __name__ == "__main__":
    run_command_line(main)
