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
from hf_hybrid.data.tokenizer import byte_tokenizer
from hf_hybrid.models.auto import ARCHITECTURES
from hf_hybrid.training.flags.model import ModelArguments
from hf_hybrid.training.model.config import load_config

AUTO_CLASSES = {
    "summarization": "AutoModelForSeq2SeqLM",
    "clm": "AutoModelForCausalLM",
    "glue": "AutoModelForSequenceClassification",
}
_ROLE = {"is_decoder": True, "is_encoder_decoder": False}


def sizes(spec: Mapping[str, Any]) -> dict[str, int]:
    """Return the number of parameters of each model of an experiment."""
    experiment = Experiment("", spec, {}, Path())
    auto_class = getattr(transformers, AUTO_CLASSES[spec["script"]])
    role = _ROLE if spec["script"] == "clm" else None
    counts, start = {}, None
    for name in experiment.models:
        flags = experiment.flags(name)
        overrides = flags.get("config_overrides", {})
        if start is None or ("model_type" in flags and "init_from" not in flags):
            vocabulary = {"vocab_size": len(byte_tokenizer())}
            if flags.get("tokenizer_type") != "bytes":
                vocabulary["vocab_size"] = flags["tokenizer_vocab_size"]
            arguments = ModelArguments(
                model_type=flags["model_type"], config_overrides=json.dumps(vocabulary | overrides)
            )
            config = load_config(arguments, auto_class, role=role)
        elif "init_from" in flags:
            config = ARCHITECTURES[flags["model_type"]][0].from_parent(start, **overrides)
        else:
            config = start
        if name == experiment.start:
            start = config
        with torch.device("meta"):
            counts[name] = auto_class.from_config(config).num_parameters()
    return counts


def main(argv: Sequence[str] | None = None) -> int:
    """Print the sizes of the models of experiments."""
    for path in map(Path, sys.argv[1:] if argv is None else argv):
        for name, count in sizes(json.loads(path.read_text(encoding="utf-8"))).items():
            print(f"{path.stem:12} {count:>12,} {name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
