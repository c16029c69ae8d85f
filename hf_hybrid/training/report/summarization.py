"""The summarization script's part of the report."""

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

from datasets import Dataset, DatasetDict

from hf_hybrid.data.preprocessing import plain_baselines, split_sentences
from hf_hybrid.training.flags.data import PREFIXES, SummarizationArguments
from hf_hybrid.training.report.page import Sample, Section, Table, excerpt
from hf_hybrid.training.report.run_page import Contents, choose_rows
from hf_hybrid.training.scores.summarization import decode, rouge_scores
from hf_hybrid.training.splits import first_examples
from hf_hybrid.training.trainer.script_trainer import SummarizationTrainer

_ROUGE = {"rouge1": "ROUGE-1", "rouge2": "ROUGE-2", "rougeL": "ROUGE-L", "rougeLsum": "ROUGE-Lsum"}
CURVES = {
    "Loss (nats per token)": {"loss": "training", "eval_loss": "validation"},
    "ROUGE on the validation split (%)": {f"eval_{key}": name for key, name in _ROUGE.items() if key != "rougeLsum"},
}
"""The title of each diagram over the steps, its logged metrics, and their names."""


def report(
    trainer: SummarizationTrainer,
    data_args: SummarizationArguments,
    splits: DatasetDict,
    columns: Sequence[str | None],
    datasets: Mapping[str, Dataset],
    evaluated: Mapping[str, Any],
    metrics: Mapping[str, float],
) -> Contents:
    """Make the sections: scores, compared with summaries that need no model, and samples.

    A split without summaries has no scores.
    """
    tokenizer: Any = trainer.processing_class

    @cache
    def texts() -> dict[str, dict[str, list[str]]]:
        """Return documents, references and summaries of each split with generated summaries."""
        return {
            name: {
                "document": list(first_examples(splits[name], data_args.limits[name])[columns[0]]),
                **({} if outputs.label_ids is None else {"reference": decode(tokenizer, outputs.label_ids)}),
                "generated": decode(tokenizer, outputs.predictions),
            }
            for name, outputs in evaluated.items()
            if outputs is not None
        }

    last = "predict" if trainer.args.do_predict else "eval"
    return Contents(
        title="Summarization",
        sizes={name: f"{len(rows):,} documents" for name, rows in datasets.items()},
        tiles={f"{last}_{key}": f"{name} (%)" for key, name in _ROUGE.items()},
        curves=CURVES,
        parts={
            "scores": lambda: _score_tables(texts(), splits.get("train"), columns[1], metrics),
            "samples": lambda: _samples(texts()),
        },
    )


def _score_tables(
    texts: dict[str, dict[str, list[str]]],
    train: Dataset | None,
    summary_column: str | None,
    metrics: Mapping[str, float],
) -> Section:
    """Compare the model's scores with those of summaries that need no model, on the same references."""
    tables = []
    scored = {split: of for split, of in texts.items() if "reference" in of}
    pool = [] if train is None else list(train[summary_column])
    for split, of in scored.items():
        first = [(split_sentences(document) or [""])[0] for document in of["document"]]
        plain = {"first sentence of the document": first}
        plain |= plain_baselines(of["document"], pool) if pool else {}
        rows = [("this model", [metrics.get(f"{PREFIXES[split]}_{key}") for key in _ROUGE])]
        for name, summaries in plain.items():
            scores = rouge_scores(summaries, of["reference"])
            rows.append((name, [scores[key] for key in _ROUGE]))
        caption = f"ROUGE on the {split} split, {len(first):,} documents, in percent"
        tables.append(Table(caption, ("", *_ROUGE.values()), rows, strong=0))
    if not texts:
        note = "No summaries were generated (--predict_with_generate), so there are no scores of them."
    elif not scored:
        note = "The test split has no summaries, so the generated ones have no scores."
    else:
        note = "References are cut off where those of the model are. "
        note += (
            "The lead baseline is as long as the median training summary."
            if pool
            else "The training split was not read: no baselines come from it."
        )
    losses = {split: metrics[f"{prefix}_loss"] for split, prefix in PREFIXES.items() if f"{prefix}_loss" in metrics}
    if losses:
        rows = [(f"{split} split", [loss]) for split, loss in losses.items()]
        tables.append(Table("Loss, in nats per token of the references", ("", "this model"), rows))
    return Section("Scores", tables, notes=[note])


def _samples(texts: dict[str, dict[str, list[str]]]) -> Section:
    if not texts:
        return Section("Samples")
    split, of = list(texts.items())[-1]
    samples = [
        Sample([(name, excerpt(values[row])) for name, values in of.items()])
        for row in choose_rows(len(of["document"]))
    ]
    return Section(f"Samples of the {split} split", samples=samples, notes=["Drawn at random."])
