"""Write the model card of a run: README.md in the output folder, which the Hub shows as the model's page."""

import logging
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import datasets
import torch
import transformers
from huggingface_hub import EvalResult, ModelCard, ModelCardData
from transformers import PreTrainedConfig, PreTrainedModel, Trainer
from transformers.modelcard import (
    TrainingSummary,
    extract_hyperparameters_from_trainer,
    make_markdown_table,
    parse_log_history,
)

import hf_hybrid
from hf_hybrid.models.auto import ARCHITECTURES
from hf_hybrid.models.description import auto_class_of, loading_lines
from hf_hybrid.starters import STARTERS, name_of_starter
from hf_hybrid.training.flags.data import RowArguments
from hf_hybrid.training.flags.model import ModelArguments
from hf_hybrid.training.run_folder.files import CARD_FILE, replacing

logger = logging.getLogger(__name__)

MARK = (
    "<!-- Written by the run that trained the model; its next run writes it anew. Without this comment the card is "
    "yours: no run touches it. -->"
)
SCRIPTS = {
    "summarization": "run_summarization.py",
    "text-classification": "run_glue.py",
    "text-generation": "run_clm.py",
    "text2text-generation": "pretrain",
    "fill-mask": "pretrain",
}
"""The Hub's name of a task, and its training script, or the task of ``python -m hf_hybrid.training``."""
_METRIC_TYPES = {"pearson": "pearsonr"}  # the Hub's name of a metric, if it is not ours
_NO_SCORES = ("runtime", "samples", "per_second", "epoch", "flos", "steps", "gen_len", "tokens")
_SPLITS = {"train": "training", "eval": "validation", "predict": "test"}
_SAID_ELSEWHERE = {
    *("model_type", "architectures", "transformers_version", "dtype", "id2label", "label2id", "auto_map", "use_cache")
}
_LIBRARIES: tuple[Any, ...] = (hf_hybrid, transformers, torch, datasets)
_SIZES = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads")


def write_model_card(
    trainer: Trainer,
    model_args: ModelArguments,
    data_args: RowArguments,
    *,
    task: str,
    metrics: Mapping[str, float],
    command: Sequence[str],
) -> None:
    """Write the card of a trained model: how to load it, architecture, data, metrics, and how it was made.

    A card that a person wrote or finished stays as it is.
    """
    if not trainer.is_world_process_zero():
        return
    path = Path(str(trainer.args.output_dir), CARD_FILE)
    if path.is_file() and is_written_by_hand(path.read_text(encoding="utf-8")):
        logger.warning("%s was not written by a run and is left as it is; the results are in all_results.json.", path)
        return
    model: Any = trainer.accelerator.unwrap_model(trainer.model)
    adapters, model = getattr(model, "peft_config", None), _without_adapters(model)
    base = model_args.model_name_or_path
    start = _start(base)
    base = base if base is not None and not Path(base).exists() else None
    name = trainer.args.hub_model_id or Path(str(trainer.args.output_dir)).name
    data = _metadata(model, data_args, name=name.split("/")[-1], base=base, task=task, metrics=metrics)
    lines = _loading(model, trainer.hub_model_id or str(trainer.args.output_dir), adapters)
    sections = [
        f"# {name.split('/')[-1]}",
        MARK,
        f"A `{type(model).__name__}` (`{model.config.model_type}`), {start}, on {_dataset(data_args)}.",
        f"## Load it\n\n```python\n{lines}\n```" + _tokenizer_note(trainer),
        architecture(model),
        _data(data_args, metrics),
        _results(metrics),
        _training(trainer),
        "## Command\n\n```sh\n" + " \\\n    ".join(command) + "\n```",
        "## Versions\n\n" + "\n".join(f"- {library.__name__} {library.__version__}" for library in _LIBRARIES),
    ]
    card = ModelCard(f"---\n{data.to_yaml()}\n---\n\n" + "\n\n".join(filter(None, sections)) + "\n")
    with replacing(path) as unfinished:  # a card that is cut off would pass for a person's
        card.save(unfinished)


def _without_adapters(model: Any) -> PreTrainedModel:
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def _loading(model: PreTrainedModel, place: str, adapters: Mapping[str, Any] | None) -> str:
    """Return Python lines that load a model; an adapter of a starter names it, and only this package finds it."""
    base = next((name_of_starter(str(config.base_model_name_or_path)) for config in (adapters or {}).values()), "")
    if base not in STARTERS:
        return loading_lines(model, place)
    loader = auto_class_of(model)
    return (
        f"import hf_hybrid\nfrom peft import PeftModel\nfrom transformers import {loader}\n\n"
        f'base = {loader}.from_pretrained(hf_hybrid.starter("{base}"))\n'
        f"model = PeftModel.from_pretrained(base, {place!r})"
    )


def _tokenizer_note(trainer: Trainer) -> str:
    if trainer.processing_class is None:  # it reads pixels or sound
        return ""
    return "\n\nLoad the tokenizer from the same place with `AutoTokenizer`."


def _start(source: str | None) -> str:
    if source is None:
        return "trained from scratch"
    if (name := name_of_starter(source)) != source:
        return f"trained from `{name}`, a starter of hf_hybrid"
    if Path(source).exists():
        return f"trained from a local checkpoint, `{Path(source).resolve().name}`"
    return f"trained from [{source}](https://huggingface.co/{source})"


def is_written_by_hand(text: str) -> bool:
    """Whether a person wrote or finished a card: it has no run's mark and is not an empty template."""
    if MARK in text or "This model card has been generated automatically" in text:
        return False
    return _without_versions(text) != _without_versions(str(ModelCard.from_template(ModelCardData())))


def _without_versions(card: str) -> str:
    """Return the text of a card, without metadata and without the versions that PEFT adds when it saves an adapter."""
    text = re.sub(r"\A---\n.*?\n---\n", "", card, flags=re.DOTALL)
    return text.split("### Framework versions")[0].strip()


# ---- metadata ----


def _metadata(
    model: PreTrainedModel,
    data_args: RowArguments,
    *,
    name: str,
    base: str | None,
    task: str,
    metrics: Mapping[str, float],
) -> ModelCardData:
    """Make the metadata for the Hub's search; an unset licence is "unknown", the Hub's word for it."""
    own = [model.config.model_type, "hf_hybrid"] if model.config.model_type in ARCHITECTURES else []
    scores, data = _scores(metrics), data_args.dataset_name
    is_on_hub = data is not None and ":" not in data and not Path(data).exists()
    return ModelCardData(
        model_name=name,
        license=TrainingSummary(name, finetuned_from=base).license or "unknown",
        library_name="transformers",
        pipeline_tag=task,
        base_model=base,
        datasets=data if is_on_hub else None,
        metrics=list(dict.fromkeys(_metric_type(metric) for _, metric in scores)) or None,
        tags=[*own, "generated_from_trainer"],
        eval_results=[
            EvalResult(
                task_type=task,
                dataset_type=data or "local",
                dataset_name=_dataset(data_args),
                dataset_config=data_args.dataset_config_name,
                dataset_split=_SPLITS[prefix],
                metric_type=_metric_type(metric),
                metric_name=metric,
                metric_value=round(value, 6),
            )
            for (prefix, metric), value in scores.items()
        ],
    )


def _scores(metrics: Mapping[str, float]) -> dict[tuple[str, str], float]:
    """Select the scores on held-out data, by the split's prefix and the metric."""
    scores = {}
    for name, value in metrics.items():
        prefix, _, metric = name.partition("_")
        is_score = prefix in ("eval", "predict") and not any(word in metric for word in _NO_SCORES)
        if is_score and math.isfinite(value):
            scores[prefix, metric] = float(value)
    return scores


def _metric_type(metric: str) -> str:
    return "rouge" if metric.startswith("rouge") else _METRIC_TYPES.get(metric, metric)


def _dataset(data_args: RowArguments) -> str:
    if data_args.dataset_name is not None:
        return " ".join(filter(None, (data_args.dataset_name, data_args.dataset_config_name)))
    return ", ".join(dict.fromkeys(Path(path).name for path in data_args.files.values()))


# ---- sections ----


def architecture(model: PreTrainedModel) -> str:
    """Return a card's section on a model: its class, size and the fields that a user sets."""
    parameters = list(model.parameters())
    trained = sum(parameter.numel() for parameter in parameters if parameter.requires_grad)
    rows: list[dict[str, Any]] = [
        {"": "model type", " ": f"`{model.config.model_type}`"},
        {"": "class", " ": f"`{type(model).__name__}`"},
        {"": "parameters", " ": f"{model.num_parameters():,}"},
        {"": "of which trained", " ": f"{trained:,}"},
        *({"": f"`{name}`", " ": f"`{value}`"} for name, value in _settings(model.config).items()),
    ]
    return "## Architecture\n\n" + make_markdown_table(rows).strip()


def _settings(config: PreTrainedConfig) -> dict[str, Any]:
    """Select the sizes, and every other field that differs from the architecture's default."""
    try:
        default = type(config)().to_dict()
    except Exception:  # architectures composed of others have no default
        default = {}
    values = config.to_dict()
    sizes = {name: getattr(config, name) for name in _SIZES if getattr(config, name, None) is not None}
    aliases = {config.attribute_map.get(name, name) for name in sizes}
    changed = {
        name: value
        for name, value in sorted(values.items())
        if not (name in _SAID_ELSEWHERE | aliases or name.startswith("_") or default.get(name) == value)
    }
    return sizes | changed


def _data(data_args: RowArguments, metrics: Mapping[str, float]) -> str:
    rows = []
    for prefix, split in _SPLITS.items():
        for end in ("", "_mm"):
            count = metrics.get(f"{prefix}_samples{end}")
            if count is not None:
                path = data_args.files.get(("train" if prefix == "train" else split) + ("_mismatched" if end else ""))
                source = Path(path).name if path else _dataset(data_args)
                rows.append({"split": split + (" (second)" if end else ""), "examples": f"{count:,}", "from": source})
    return "## Data\n\n" + make_markdown_table(rows).strip() if rows else ""


def _results(metrics: Mapping[str, float]) -> str:
    rows = []
    for prefix, split in _SPLITS.items():
        own = {name.removeprefix(f"{prefix}_"): value for name, value in metrics.items() if name.startswith(prefix)}
        rows += [{"split": split, "metric": name, "value": value} for name, value in own.items()]
    return "## Results\n\n" + make_markdown_table(rows).strip() if rows else ""


def _training(trainer: Trainer) -> str:
    if not trainer.args.do_train:
        return ""
    found = extract_hyperparameters_from_trainer(trainer)
    if "distributed_type" in found and trainer.args.use_cpu:
        found["distributed_type"] = "multi-CPU"  # transformers takes every process for a GPU's
    settings = [f"- {name}: {value}" for name, value in found.items()]
    _, evaluations, _ = parse_log_history(trainer.state.log_history)
    table = make_markdown_table(evaluations).strip()
    return "\n".join(["## Training", "", *settings]) + (f"\n\n{table}" if table else "")
