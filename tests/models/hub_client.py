"""What a user of the Hub does with every model type: `python -m tests.models.hub_client FOLDER`, a client of its own.

Everything it finds goes to FOLDER/found.json, by step; a step that fails is recorded with its error, and the others
go on.
"""

import hashlib
import json
import re
import sys
import time
import traceback
from functools import partial
from pathlib import Path

import torch
import transformers
from huggingface_hub import ModelCard
from transformers import AutoConfig, AutoTokenizer

import hf_hybrid  # noqa: F401
from hf_hybrid.data.tokenizer import byte_tokenizer
from hf_hybrid.models.auto import ARCHITECTURES

from .tiny import GENERATIVE, MODEL_CLASSES, main_output, tiny_inputs, tiny_model


def compute(model, source):
    with torch.no_grad():
        return main_output(model.eval()(**tiny_inputs(source))).float()


def generative_class(model_type):
    """The class with a language modelling head, whose weights may be tied to the embedding's."""
    return next(auto_class for name, auto_class in reversed(GENERATIVE) if name == model_type)


def push_and_load(model_type, auto_class):
    """Push and load one class; its outputs must not change in a bit."""
    model = tiny_model(model_type, auto_class)
    name = f"user/{model_type}-{auto_class}"
    model.push_to_hub(name)
    config = AutoConfig.from_pretrained(name)
    loaded, report = getattr(transformers, auto_class).from_pretrained(name, output_loading_info=True)
    missing = sorted(report["missing_keys"] | report["unexpected_keys"])
    own, there = model.config.to_dict(), config.to_dict()
    return {
        "class": type(loaded).__name__,
        "missing": missing,
        "fields": [field for field in own if own[field] != there[field] and field != "_name_or_path"],
        "equal": torch.equal(compute(model, model), compute(loaded, model)),
    }


def push_tokenizer_and_config(model_type):
    name = f"user/{model_type}-parts"
    tokenizer = byte_tokenizer()
    tokenizer.push_to_hub(name)
    ARCHITECTURES[model_type][0]().push_to_hub(name)
    loaded = AutoTokenizer.from_pretrained(name)
    text = "Ein Fluß, 河"
    config = AutoConfig.from_pretrained(name)
    return {
        "ids_equal": loaded(text)["input_ids"] == tokenizer(text)["input_ids"],
        "text": loaded.decode(loaded(text)["input_ids"], skip_special_tokens=True),
        "defaults": config.to_dict() == ARCHITECTURES[model_type][0]().to_dict() | {"_name_or_path": name},
    }


def load_in_ways(model_type, folder):
    """In shards and private, on another branch, in bfloat16, and over devices as far as one CPU and a disk go."""
    auto_class = generative_class(model_type)
    auto = getattr(transformers, auto_class)
    model, other = (tiny_model(model_type, auto_class, seed=seed) for seed in (1, 2))
    name = f"user/{model_type}-sharded"
    model.push_to_hub(name, max_shard_size="20KB", private=True)
    other.push_to_hub(name, revision="other")
    expected = compute(model, model)
    half = auto.from_pretrained(name, dtype=torch.bfloat16)
    dtypes = {name: str(value.dtype) for name, value in half.state_dict().items() if value.is_floating_point()}
    parts = model._keep_in_fp32_modules_strict or ()
    precise = [name for name in dtypes if any(re.search(rf"\b{part}\b", name) for part in parts)]
    found = {
        "branch": torch.equal(compute(auto.from_pretrained(name, revision="other"), model), compute(other, model)),
        "kept": sorted({dtypes.pop(name) for name in precise}),
        "halved": sorted(set(dtypes.values())),
        "error of half": ((compute(half, model) - expected).norm() / expected.norm()).item(),
    }
    size = sum(value.numel() * 4 for value in model.parameters())
    maps = {
        "cpu": {"device_map": "cpu"},
        "auto": {"device_map": "auto"},
        "auto, little memory": {"device_map": "auto", "max_memory": {"cpu": size // 2}},
        "disk": {"device_map": {"": "disk"}},
    }
    for way, options in maps.items():
        loaded = auto.from_pretrained(name, offload_folder=folder / f"{model_type}-{way}", **options)
        devices = sorted({str(value.device) for value in loaded.parameters()})
        found[way] = {"equal": torch.equal(compute(loaded, model), expected), "devices": devices}
    return found


def split_over_devices(model_type, folder):
    """A classifier whose body is on the disk and whose head is not."""
    auto_class = "AutoModelForSequenceClassification"
    model = tiny_model(model_type, auto_class)
    body, *head = [name for name, _ in model.named_children()]
    loaded = transformers.AutoModelForSequenceClassification.from_pretrained(
        f"user/{model_type}-{auto_class}",
        device_map={body: "disk", **dict.fromkeys(head, "cpu")},
        offload_folder=folder / f"{model_type}-split",
    )
    devices = sorted({str(value.device) for value in loaded.parameters()})
    return {"equal": torch.equal(compute(loaded, model), compute(model, model)), "devices": devices}


def card(model_type):
    """What a model says of itself that is pushed without a Trainer."""
    written = ModelCard.load(f"user/{model_type}-{generative_class(model_type)}")
    return {"metadata": written.data.to_dict(), "text": written.text}


def error_of(action):
    """What an action ends with."""
    try:
        action()
    except Exception as error:
        return {"type": type(error).__name__, "text": str(error)}
    return None


def failures(folder):
    """What is missing, refused or broken; the folder that is pushed must stay as it is."""
    model = tiny_model("spade", "AutoModelForCausalLM")
    local = folder / "local"
    model.save_pretrained(local, max_shard_size="20KB")
    before = digest(local)
    auto = transformers.AutoModelForCausalLM
    model.push_to_hub("user/secret", private=True)
    found = {
        "missing": error_of(lambda: auto.from_pretrained("user/none")),
        "no access": error_of(lambda: auto.from_pretrained("user/secret", token=False)),
        "branch": error_of(lambda: auto.from_pretrained("user/spade-AutoModel", revision="none")),
        "reader": error_of(lambda: model.push_to_hub("user/refused", token="hf_reader")),
        "stranger": error_of(lambda: model.push_to_hub("somebody/model")),
    }
    time.sleep = lambda seconds: None  # the client gives a failing server up after half a minute
    for repository in ("user/error", "user/drop"):
        options = {"repo_id": repository, "max_shard_size": "20KB"}
        found[repository] = error_of(partial(model.save_pretrained, local, push_to_hub=True, **options))
        found[f"{repository} again"] = error_of(partial(model.push_to_hub, **options))
    found["untouched"] = digest(local).items() >= before.items()  # beside them, there is a model card now
    found["still loads"] = torch.equal(compute(auto.from_pretrained(local), model), compute(model, model))
    return found


def digest(folder):
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir() if path.is_file()}


def main(folder: Path) -> None:
    found, errors = {}, {}

    def step(name, function, *arguments):
        try:
            found[name] = function(*arguments)
        except Exception:
            errors[name] = traceback.format_exc()

    for model_type, auto_class in MODEL_CLASSES:
        step(f"{model_type} {auto_class}", push_and_load, model_type, auto_class)
    for model_type in ARCHITECTURES:
        step(f"{model_type} parts", push_tokenizer_and_config, model_type)
        step(f"{model_type} ways", load_in_ways, model_type, folder)
        step(f"{model_type} card", card, model_type)
        if "AutoModelForSequenceClassification" in ARCHITECTURES[model_type][1]:
            step(f"{model_type} split", split_over_devices, model_type, folder)
    step("failures", failures, folder)
    (folder / "found.json").write_text(json.dumps({"found": found, "errors": errors}), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
