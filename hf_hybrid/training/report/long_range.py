"""The Long Range Arena's part of the report."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from hf_hybrid.data.classification import Labels
from hf_hybrid.training.flags.data import LongRangeArguments
from hf_hybrid.training.report.glue import confusions, score_tables
from hf_hybrid.training.report.run_page import Contents

_CURVES = {
    "Loss (nats per example)": {"loss": "training", "eval_loss": "validation"},
    "Accuracy on the validation split": {"eval_accuracy": "accuracy"},
}


def report(
    data_args: LongRangeArguments,
    rows: Mapping[str, Any],
    labels: Labels,
    evaluated: Mapping[str, Any],
    metrics: Mapping[str, float],
) -> Contents:
    """Make the sections: accuracy beside those of baselines that read no sequence, and confused labels."""
    known = np.asarray(rows["train"].labels) if "train" in rows else None
    last = "predict" if "test" in evaluated else "eval"
    return Contents(
        title=f"Long Range Arena, {data_args.task_name}",
        sizes={split: f"{len(found):,} examples" for split, found in rows.items()},
        tiles={f"{last}_accuracy": "accuracy"},
        curves=_CURVES,
        parts={
            "scores": lambda: score_tables(None, labels, known, evaluated, ["accuracy"], metrics),
            "confusions": lambda: confusions(labels, evaluated),
        },
    )
