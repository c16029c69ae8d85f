"""The pre-training script's part of the report."""

import math
from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np

from hf_hybrid.data.preprocessing import IGNORED_LABEL
from hf_hybrid.training.flags.data import PREFIXES
from hf_hybrid.training.report.page import Cell, Sample, Section, Table, excerpt
from hf_hybrid.training.report.run_page import Contents, sample_rows
from hf_hybrid.training.scores.clm import perplexity
from hf_hybrid.training.trainer.noisy_data import NoisyRows
from hf_hybrid.training.trainer.script_trainer import ScriptTrainer

_SCORES = {
    "loss": "loss (nats per label)",
    "perplexity": "perplexity",
    "bits_per_byte": "bits per byte",
    "accuracy": "accuracy",
}
_CURVES = {
    "Loss (nats per label)": {"loss": "training", "eval_loss": "validation"},
    "Bits per byte of the hidden text": {"eval_bits_per_byte": "validation"},
    "Accuracy on the validation split": {"eval_accuracy": "share of labels guessed"},
}
_WRITTEN = 256
"""The most tokens that a sample writes."""
_NOTE = f"Drawn at random; the likeliest token is taken each time, at most {_WRITTEN} of them."


def report(trainer: ScriptTrainer, examples: Mapping[str, Any], metrics: Mapping[str, float]) -> Contents:
    """Make the sections: scores beside those of a guess, and samples."""
    last = "predict" if trainer.args.do_predict else "eval"
    return Contents(
        title="Pre-training",
        sizes={name: _size(rows) for name, rows in examples.items()},
        tiles={f"{last}_{key}": name for key, name in _SCORES.items()},
        curves=_CURVES,
        parts={
            "scores": lambda: _score_tables(trainer, examples, metrics),
            "samples": lambda: sample_rows(trainer, examples, partial(_sample, trainer.data_collator), note=_NOTE),
        },
    )


def _size(rows: Any) -> str:
    return f"{len(rows):,} rows" if isinstance(rows, NoisyRows) else "streamed"


def _score_tables(trainer: ScriptTrainer, examples: Mapping[str, Any], metrics: Mapping[str, float]) -> Section:
    """Compare the model's scores with those of a guess that knows the vocabulary alone."""
    tables, model = [], trainer.model
    vocab_size: int = model.config.vocab_size  # type: ignore[union-attr, assignment]
    for split, prefix in PREFIXES.items():
        if split in examples:
            own: list[Cell] = [metrics.get(f"{prefix}_{key}") for key in _SCORES]
            loss, bits = metrics[f"{prefix}_loss"], metrics[f"{prefix}_bits_per_byte"]
            guess = math.log(vocab_size)
            uniform: list[Cell] = [guess, perplexity(guess), bits / loss * guess, 1 / vocab_size]
            caption = f"Scores on the {split} split, {int(metrics[f'{prefix}_tokens']):,} labels"
            rows = [("this model", own), ("uniform over the vocabulary", uniform)]
            tables.append(Table(caption, ("", *_SCORES.values()), rows, strong=0))
    notes = ["The noise of these splits is the same in every run.", "Bits per byte are of the text that labels hold."]
    return Section("Scores", tables, notes=notes if tables else ["No split was scored."])


def _sample(collate: Any, model: Any, tokenizer: Any, row: Mapping[str, Any]) -> Sample:
    """Let the model restore what is hidden."""
    hidden = [token for token in row["labels"] if token != IGNORED_LABEL]
    batch = {name: value.to(model.device) for name, value in collate([row]).items()}
    if model.config.is_encoder_decoder:
        written = model.generate(
            input_ids=batch["input_ids"],
            attention_mask=batch["attention_mask"],
            max_new_tokens=min(len(hidden), _WRITTEN),
            do_sample=False,
            num_beams=1,
            pad_token_id=tokenizer.pad_token_id,
        )[0]
        shown = [tokenizer.decode(hidden), tokenizer.decode(written)]
    else:
        guesses = model(**batch).logits[0].argmax(-1).cpu().numpy()[: len(row["labels"])]
        filled = guesses[np.array(row["labels"]) != IGNORED_LABEL]
        shown = [" · ".join(map(tokenizer.decode, ids)) for ids in (hidden, filled.tolist())]
    parts = {"corrupted text": tokenizer.decode(row["input_ids"]), "what labels hold": shown[0], "filled in": shown[1]}
    return Sample([(name, excerpt(part)) for name, part in parts.items()])
