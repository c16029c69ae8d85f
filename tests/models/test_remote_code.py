"""A checkpoint that brings its code along is the same model where the package is missing, and beside the package."""

import ast
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import peft
import pytest
import torch
import transformers
from huggingface_hub import ModelCard
from transformers import dynamic_module_utils

import hf_hybrid
from hf_hybrid.data.tokenizer import byte_tokenizer
from hf_hybrid.models import remote_code
from hf_hybrid.models.auto import ARCHITECTURES

from ..tolerances import TOLERANCES, assert_close
from . import without_package
from .tiny import ROLES, tiny_config, tiny_inputs, tiny_model

# model type -> the head that is exported, from which all others are loaded too
EXPORTED = {
    "bst": "AutoModelForCausalLM",
    "chela": "AutoModelForCausalLM",
    "spade": "AutoModelForSeq2SeqLM",
    "srformer_bart": "AutoModelForSeq2SeqLM",
    "srformer_t5": "AutoModelForSeq2SeqLM",
}
# what a head other than the exported one must be told
FIELDS = {**ROLES, ("chela", "AutoModelForMaskedLM"): {"is_decoder": False, "ignore_mismatched_sizes": True}}
GENERATIVE = ("AutoModelForCausalLM", "AutoModelForSeq2SeqLM")
TEXT = "Kurz und weit."


def pair_model():
    torch.manual_seed(0)
    return hf_hybrid.ChelaForSequencePairClassification(tiny_config("chela")).eval()


def head_case(model, fields, new_tokens, **inputs):
    inputs = {**tiny_inputs(model), **inputs}
    results = without_package.measure(model, inputs, new_tokens)
    names = {"fields": fields, "class": type(model).__name__, "new_tokens": new_tokens}
    return {"inputs": inputs, "results": results, **names}


def as_repository(folder: Path, cache: Path):
    """Lay a folder out as huggingface_hub's cache has a repository that was downloaded."""
    repository, commit = cache / f"models--someone--{folder.name}", "0123456789" * 4
    shutil.copytree(folder, repository / "snapshots" / commit)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(commit)


def test_every_head_loads_without_the_package(tmp_path):
    """Outputs, gradients and generated tokens are equal to the bit; the process is one that has no such package."""
    tokenizer = byte_tokenizer()
    cases = {}
    for model_type, saved in EXPORTED.items():
        model = tiny_model(model_type, saved)
        hf_hybrid.export_remote_code(model, tmp_path / model_type, tokenizer=tokenizer)
        heads = {saved: head_case(model, {}, 12)}
        for auto_class in ARCHITECTURES[model_type][1].keys() - {saved}:
            fields = FIELDS.get((model_type, auto_class), {})
            torch.manual_seed(0)  # heads that the checkpoint lacks are drawn
            loaded = getattr(transformers, auto_class).from_pretrained(tmp_path / model_type, **fields)
            heads[auto_class] = head_case(loaded, fields, 12 if auto_class in GENERATIVE else 0)
        cases[model_type] = {"saved": saved, "heads": heads}
    pair = pair_model()
    hf_hybrid.export_remote_code(pair, tmp_path / "pair", tokenizer=tokenizer)
    pair_inputs = {"pair_input_ids": tiny_inputs(pair, seed=5)["input_ids"]}
    head = "AutoModelForSequenceClassification"
    cases["pair"] = {"saved": head, "heads": {head: head_case(pair, {}, 0, **pair_inputs)}}
    for name, case in cases.items():
        as_repository(tmp_path / name, tmp_path / "hub")
        tolerance = TOLERANCES["float32 model"]
        case |= {"text": TEXT, "tokens": tokenizer(TEXT)["input_ids"]}
        case |= {"rtol": tolerance.rtol, "atol": tolerance.atol}
    torch.save({**cases, "threads": torch.get_num_threads()}, tmp_path / "cases.pt")

    script = Path(without_package.__file__).resolve()
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment |= {"HF_MODULES_CACHE": str(tmp_path / "modules"), "HF_HUB_CACHE": str(tmp_path / "hub")}
    run = subprocess.run(
        [sys.executable, script, tmp_path],
        cwd=tmp_path,
        env=environment | {"HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )
    assert run.returncode == 0, run.stderr[-4000:]
    assert run.stdout.splitlines()[-1] == "all equal"
