"""Count the parameters of an experiment's models, without memory for them.

``python -m benchmarks.sizes benchmarks/experiments/novels.json`` prints them. They are exact if the tokenizer reaches
its maximum size.
"""

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers

from benchmarks.experiment import Experiment
from hf_hybrid.data.lra import LRA
from hf_hybrid.data.tokenizer import byte_tokenizer
from hf_hybrid.models.auto import ARCHITECTURES
from hf_hybrid.training.flags.model import ModelArguments
from hf_hybrid.training.flags.recipes import find_recipe, fit_fields
from hf_hybrid.training.model.config import load_config

AUTO_CLASSES = {
    "summarization": "AutoModelForSeq2SeqLM",
    "clm": "AutoModelForCausalLM",
    "glue": "AutoModelForSequenceClassification",
    "long_range": "AutoModelForSequenceClassification",
}
_ROLE = {"is_decoder": True, "is_encoder_decoder": False}


def sizes(spec: Mapping[str, Any]) -> dict[str, int]:
    """Return the number of parameters of each model of an experiment."""
    experiment = Experiment("", spec, {}, Path())
    auto_class = getattr(transformers, AUTO_CLASSES[spec["script"]])
    common = _ROLE if spec["script"] == "clm" else None
    counts, start = {}, None
    for name in experiment.models:
        flags = experiment.flags(name)
        overrides = flags.get("config_overrides", {})
        role = _task_fields(flags) if spec["script"] == "long_range" else common
        if start is None or ("model_type" in flags and "init_from" not in flags):
            own: dict[str, Any] = {}
            if spec["script"] != "long_range":
                is_bytes = flags.get("tokenizer_type") == "bytes"
                own["vocab_size"] = len(byte_tokenizer()) if is_bytes else flags["tokenizer_vocab_size"]
            arguments = ModelArguments(model_type=flags["model_type"], config_overrides=json.dumps(own | overrides))
            reads = "input_values" if role and role.get("input_size") else "input_ids"
            config = load_config(arguments, auto_class, role=role, reads=reads)
            if spec["script"] == "long_range":
                config.num_labels = LRA[flags["task_name"]].labels
        elif "init_from" in flags:
            config = ARCHITECTURES[flags["model_type"]][0].from_parent(start, **overrides)
        else:
            config = start
        if name == experiment.start:
            start = config
        with torch.device("meta"):
            counts[name] = auto_class.from_config(config).num_parameters()
    return counts


def _task_fields(flags: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields that ``long_range`` gives a new model: the recipe's, fitted to the task."""
    task = flags["task_name"]
    fields = {"is_encoder_decoder": False, **find_recipe(flags["recipe"], task).fields}
    return fit_fields(fields, task, flags.get("max_seq_length", LRA[task].length))


def main(argv: Sequence[str] | None = None) -> int:
    """Print the sizes of the models of experiments."""
    for path in map(Path, sys.argv[1:] if argv is None else argv):
        for name, count in sizes(json.loads(path.read_text(encoding="utf-8"))).items():
            print(f"{path.stem:12} {count:>12,} {name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
