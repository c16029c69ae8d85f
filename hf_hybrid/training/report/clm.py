"""The language modelling script's part of the report."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from datasets import IterableDataset

from hf_hybrid.data.preprocessing import IGNORED_LABEL, unigram_losses
from hf_hybrid.training.flags.data import PREFIXES
from hf_hybrid.training.report.page import Cell, Sample, Section, Table, excerpt
from hf_hybrid.training.report.run_page import Contents, sample_rows
from hf_hybrid.training.scores.clm import bits_per_byte, perplexity
from hf_hybrid.training.trainer.script_trainer import CausalTrainer

_SCORES = {
    "loss": "loss (nats per token)",
    "perplexity": "perplexity",
    "bits_per_byte": "bits per byte",
    "accuracy": "accuracy",
}
_CURVES = {
    "Loss (nats per token)": {"loss": "training", "eval_loss": "validation"},
    "Accuracy on the validation split": {"eval_accuracy": "share of tokens guessed"},
}
_READ, _WRITTEN = 128, 64
"""The most tokens that a sample reads and writes."""
_NOTE = f"Drawn at random; the likeliest token is taken each time, at most {_WRITTEN} of them."


def report(
    trainer: CausalTrainer, examples: Mapping[str, Any], texts: Mapping[str, Any], metrics: Mapping[str, float]
) -> Contents:
    """Make the sections: scores, compared with baselines that read no context, and samples."""
    last = "predict" if trainer.args.do_predict else "eval"
    return Contents(
        title="Language model",
        sizes={name: _size(rows) for name, rows in examples.items()},
        tiles={f"{last}_{key}": name for key, name in _SCORES.items()},
        curves=_CURVES,
        parts={
            "scores": lambda: _score_tables(trainer, examples, texts, metrics),
            "samples": lambda: sample_rows(trainer, examples, _sample, note=_NOTE),
        },
    )


def _size(rows: Any) -> str:
    if isinstance(rows, IterableDataset):
        return "streamed"
    longest = max(len(row["input_ids"]) for row in rows)
    return f"{len(rows):,} × {longest:,} tokens"


def _score_tables(
    trainer: CausalTrainer, examples: Mapping[str, Any], texts: Mapping[str, Any], metrics: Mapping[str, float]
) -> Section:
    """Compare the model's scores with those of baselines that read no context."""
    tables, notes = [], []
    model: Any = trainer.model
    vocab_size: int = model.config.vocab_size
    losses = {"uniform over the vocabulary": np.full(vocab_size, math.log(vocab_size))}
    trained = examples.get("train")
    if trained is None or isinstance(trained, IterableDataset):
        reason = "not read" if trained is None else "streamed"
        notes.append(f"The training split was {reason}: its frequencies are no baseline here.")
    else:
        tokens = np.concatenate([np.asarray(row["input_ids"]) for row in trained])
        losses["unigram frequencies"] = unigram_losses(tokens, vocab_size)
        notes.append("Unigram frequencies are counted in the training blocks, each token once more than it occurs.")
    for split, prefix in PREFIXES.items():
        if split not in examples:
            continue
        targets = _targets(examples[split])
        rows: list[tuple[str, list[Cell]]] = [("this model", [metrics.get(f"{prefix}_{key}") for key in _SCORES])]
        for name, of_token in losses.items():
            loss = float(of_token[targets].mean())
            # every guess of the uniform baseline is equally good
            is_uniform = bool(np.ptp(of_token) == 0)
            guessed = 1 / vocab_size if is_uniform else float(np.mean(targets == np.argmin(of_token)))
            rows.append((name, [loss, perplexity(loss), bits_per_byte(loss, texts[split]), guessed]))
        caption = f"Scores on the {split} split, {len(targets):,} tokens"
        tables.append(Table(caption, ("", *_SCORES.values()), rows, strong=0))
    return Section("Scores", tables, notes=notes if tables else ["No split was scored."])


def _targets(rows: Sequence[dict[str, Any]]) -> np.ndarray[Any, Any]:
    """Return the scored tokens."""
    labels = np.concatenate([np.asarray(row.get("labels", row["input_ids"]))[1:] for row in rows])
    return labels[labels != IGNORED_LABEL]


def _sample(model: Any, tokenizer: Any, row: Mapping[str, Any]) -> Sample:
    """Let the model continue the beginning of a block greedily."""
    ids = torch.as_tensor(np.asarray(row["input_ids"]), dtype=torch.long)
    read = max(1, min(_READ, len(ids) // 2))
    context, truth = ids[:read], ids[read : read + _WRITTEN]
    written = model.generate(
        context[None].to(model.device),
        attention_mask=torch.ones_like(context[None]).to(model.device),
        max_new_tokens=len(truth),
        do_sample=False,
        pad_token_id=tokenizer.pad_token_id,
    )[0, read:]
    parts = {"context": context, "true continuation": truth, "generated": written}
    return Sample([(name, excerpt(tokenizer.decode(part))) for name, part in parts.items()])
