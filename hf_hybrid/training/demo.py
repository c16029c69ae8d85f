"""``make demo``: train a small SPADE summarizer from scratch, offline, and show what it has learnt.

``python -m hf_hybrid.training.demo [--long]`` trains on ``embedded:docstrings`` with `summarization.main`. Then it
compares the model on the test split with three things that need no training: the model before its first step, a random
training summary, and the first words of the document. Lengths are counted in steps, so that all machines do the same.
The exit code is 1 if the model has not learnt to summarize.
"""

import argparse
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
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
TRAINED, UNTRAINED, RANDOM = "trained model", "untrained model", "random training summary"
MARGIN = 1.3
"""A score beats another one if it is at least this many times as large."""
MIN_DISTINCT = 0.5
"""The smallest share of generated summaries that must be distinct."""
_TRAINED_FOLDER, _UNTRAINED_FOLDER = "trained", "untrained"
_TEXT, _RESULTS = "report.md", "demo_results.json"
_SEED = 0


@dataclass(frozen=True)
class Recipe:
    """Every number of a demo.

    Attributes:
        model_type: Architecture.
        model: Fields of its configuration.
        flags: Flags of ``run_summarization.py`` for the trained and the untrained model.
        training: Flags for training only.
    """

    model_type: str
    model: dict[str, Any]
    flags: dict[str, Any]
    training: dict[str, Any]


SHORT = Recipe(
    model_type="spade",
    model={
        "hidden_size": 128,
        "num_hidden_layers": 2,
        "num_decoder_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 512,
        "local_radius": 16,
        "norm_position": "pre",
        "dropout": 0.05,
        "attention_dropout": 0.0,
    },
    flags={
        "dataset_name": "embedded:docstrings",
        "tokenizer_type": "marked",  # a summary shares more tokens with names such as focal_length
        "tokenizer_vocab_size": 4096,
        "max_source_length": 96,
        "max_target_length": 24,
        "max_eval_samples": 128,
        "max_predict_samples": 512,
        "per_device_eval_batch_size": 64,
        "num_beams": 1,
        "seed": 42,
    },
    training={
        "max_steps": 1600,
        "per_device_train_batch_size": 32,
        "learning_rate": 2e-3,
        "lr_scheduler_type": "cosine",
        "warmup_steps": 160,
        "adam_beta2": 0.98,
        "weight_decay": 0.01,
        "eval_steps": 200,
        "logging_steps": 25,
        "train_sampling_strategy": "group_by_length",
    },
)
"""``make demo``: a few minutes on two cores."""

LONG = Recipe(
    model_type="spade",
    model=SHORT.model
    | {
        "hidden_size": 256,
        "num_hidden_layers": 3,
        "num_decoder_layers": 3,
        "num_attention_heads": 4,
        "intermediate_size": 1024,
        "local_radius": 32,
        "dropout": 0.1,
    },
    flags=SHORT.flags | {"max_source_length": 192, "max_eval_samples": 256, "num_beams": 4},
    training=SHORT.training
    | {"max_steps": 3000, "learning_rate": 1e-3, "warmup_steps": 300, "eval_steps": 500, "bf16": True},
)
"""``make demo-long``: half an hour to forty minutes on two cores."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the demo.

    Args:
        argv: ``--long`` and ``--output_dir FOLDER`` (default ``runs/demo``, or ``runs/demo-long``).

    Returns:
        The exit code: 0 if the model has learnt to summarize, 1 if it has not.

    Raises:
        ValueError: The folder holds other files than a demo's.
    """
    parser = argparse.ArgumentParser(
        description="Train a small SPADE summarizer from scratch and show what it learnt."
    )
    parser.add_argument("--long", action="store_true", help="a larger model, longer documents, many more steps")
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
        ``test_documents``, and ``training_seconds``, None if training was interrupted.

    Raises:
        ValueError: The folder holds other files than a demo's, or an interrupted demo of another recipe.
        KeyboardInterrupt: Training was stopped with Ctrl-C, after saving a checkpoint.
    """
    _check_folder(folder)
    trained, untrained = folder / _TRAINED_FOLDER, folder / _UNTRAINED_FOLDER
    resume = bool(complete_checkpoints(trained)) and not (folder / _RESULTS).exists()
    for name in (_TEXT, _RESULTS, REPORT_FILE, CURVES_FILE):
        (folder / name).unlink(missing_ok=True)
    trained_argv = _argv(recipe, trained, resume=resume)
    try:
        trained_metrics = summarization.main(trained_argv)
    except KeyboardInterrupt as interrupt:
        raise type(interrupt)("start the demo again to continue from its last checkpoint") from interrupt
    untrained_metrics = summarization.main(_argv(recipe, untrained, tokenizer=trained))

    documents, references, pool = _held_out(trained_argv)
    texts = {
        UNTRAINED: _read_predictions(untrained),
        **plain_baselines(documents, pool, seed=_SEED),
        TRAINED: _read_predictions(trained),
    }
    losses = {UNTRAINED: untrained_metrics["eval_loss"], TRAINED: trained_metrics["eval_loss"]}
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
        "checkpoint": str(trained),
        "test_documents": len(documents),
        "training_seconds": None if resume else trained_metrics["train_runtime"],
    }
    load_lines = (
        "import hf_hybrid; from transformers import AutoModelForSeq2SeqLM",
        f'model = AutoModelForSeq2SeqLM.from_pretrained("{trained.as_posix()}")',
    )
    exec("\n".join(load_lines), {})  # check the lines that are printed
    _draw(recipe, folder, results, load_lines)
    report = _report(results, load_lines, curves=CURVES_FILE if (folder / CURVES_FILE).exists() else None)
    print("\n" + report)
    (folder / _TEXT).write_text(report, encoding="utf-8")
    (folder / _RESULTS).write_text(json.dumps(results, indent=2), encoding="utf-8")
    print(f"Written to {folder}: {', '.join(sorted(path.name for path in folder.iterdir() if path.is_file()))}")
    return results


def _check_folder(folder: Path) -> None:
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"--output_dir {folder} is a file; it must be a folder")
    names = sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []
    own = {_TRAINED_FOLDER, _UNTRAINED_FOLDER, _TEXT, _RESULTS, REPORT_FILE, CURVES_FILE}
    if foreign := [name for name in names if name not in own and name[0] != "."]:
        raise ValueError(f"--output_dir {folder} holds {', '.join(foreign[:3])}, which no demo wrote; give another")


def _argv(recipe: Recipe, folder: Path, *, tokenizer: Path | None = None, resume: bool = False) -> list[str]:
    """Return the command line that trains and scores a model, or scores an untrained one with a trained tokenizer."""
    train = tokenizer is None
    flags: dict[str, Any] = {
        "model_type": recipe.model_type,
        "config_overrides": json.dumps(recipe.model),
        **recipe.flags,
        "do_eval": True,
        "do_predict": True,
        "predict_with_generate": True,
        "overwrite_output_dir": True,
        "report": train,
        "output_dir": folder,
    }
    if tokenizer is not None:
        flags = {name: value for name, value in flags.items() if not name.startswith("tokenizer_")}
        flags["tokenizer_name"] = tokenizer
    else:
        steps = recipe.training["eval_steps"]
        flags |= {"do_train": True, "eval_strategy": "steps", "save_strategy": "steps", "save_steps": steps}
        flags |= {"save_total_limit": 1, **recipe.training}
        if resume:
            flags["resume_from_checkpoint"] = "auto"
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cpu":  # also where there are other accelerators, which lack float64
        flags["use_cpu"] = True
    if not computes_bfloat16_fast(device):
        flags.pop("bf16", None)
    return [f"--{name}={value}" for name, value in flags.items()]


def _held_out(argv: Sequence[str]) -> tuple[list[str], list[str], list[str]]:
    """Return the test documents and summaries of a command line, and the training summaries."""
    model_args, data_args, training_args = parse_arguments(
        (ModelArguments, SummarizationArguments, SummarizationTrainingArguments), argv
    )
    splits, text_column, summary_column = summarization.load_splits(data_args, training_args, model_args)
    test = first_examples(splits["test"], data_args.max_predict_samples)
    return list(test[text_column]), list(test[summary_column]), list(splits["train"][summary_column])


def _read_predictions(folder: Path) -> list[str]:
    text = (folder / PREDICTIONS_FILE).read_text(encoding="utf-8")
    return [line.replace("\\n", " ") for line in text.split("\n")[:-1]]


def check_learning(
    table: dict[str, dict[str, Any]], predictions: Sequence[str], references: Sequence[str]
) -> dict[str, bool]:
    """Check that the trained model clearly beats what knows nothing, and that its output depends on its input.

    Args:
        table: Scores by row, with the rows of the trained model, the untrained one and the random summaries.
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

    def beats(other: dict[str, Any]) -> bool:
        pairs = [(table[TRAINED][key], other[key]) for key in SCORES]
        return all(score > compared and score >= MARGIN * compared for score, compared in pairs)

    return {
        f"at least {MARGIN} times the untrained model on every score": beats(table[UNTRAINED]),
        f"at least {MARGIN} times the random training summaries on every score": beats(table[RANDOM]),
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
    state = json.loads((folder / _TRAINED_FOLDER / "trainer_state.json").read_text(encoding="utf-8"))
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
    seconds = results["training_seconds"]
    facts = {"model_type": recipe.model_type} | recipe.model | recipe.flags | recipe.training
    page = Page(
        title=f"Demo: {recipe.model_type}",
        summary=f"A model trained from scratch, compared with what knows nothing. {learnt}",
        tiles={f"{name} (%)": results["table"][TRAINED][key] for key, name in SCORES.items()},
        facts={name: str(value) for name, value in facts.items()},
        sections=[
            Section("Scores", [scores]),
            Section("Has it learnt to summarize?", [Table("What must hold", ("the trained model", "holds"), checks)]),
            Section("Samples", samples=[Sample(list(sample.items())) for sample in results["samples"]]),
        ],
        curves=panels,
        code=load_lines,
        measured={} if seconds is None else {"training, in seconds": seconds},
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


def _report(results: dict[str, Any], load_lines: Sequence[str], *, curves: str | None) -> str:
    verdict = "The model has learnt to summarize." if results["passed"] else "THE MODEL HAS NOT LEARNT ENOUGH."
    lines = ["# Demo", "", scores_and_checks(results), "", verdict, "", "## Samples", ""]
    for sample in results["samples"]:
        lines += [f"- document:  {sample['document']} ...", f"  - reference: {sample['reference']}"]
        lines += [f"  - summary:   {sample['summary']}"]
    seconds = results["training_seconds"]
    lines += ["", "## The model", ""] + ([] if seconds is None else [f"Trained in {seconds:.0f} s.", ""])
    lines += ["Load it with", "", "```python", *load_lines, "```", ""]
    if curves is not None:
        lines += [f"![loss and ROUGE over the steps]({curves})", ""]
    return "\n".join(lines)


if __name__ == "__main__":
    run_command_line(main)
