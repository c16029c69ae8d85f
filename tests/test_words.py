"""One word per thing: every word in a public name is the libraries' own, or stands in the Words table of the docs."""

import dataclasses
import importlib
import inspect
import pkgutil
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import transformers
from torch import nn
from torch.nn import functional as F

import hf_hybrid.context_parallel
import hf_hybrid.kernels
import hf_hybrid.layers
from hf_hybrid.models.auto import ARCHITECTURES
from hf_hybrid.models.srformer.configuration_srformer import SegmentedCrossAttentionFields

PAGE = Path(__file__).parents[1] / "docs" / "architecture.md"
PLUMBING = tuple(f"context_parallel.{name}" for name in ("shards", "collectives", "faults"))  # below operations
# whose config fields' words need no explanation here
PEERS = ("t5", "bart", "llama", "mistral", "mamba2", "jamba", "bert", "longt5", "pegasus_x", "modernbert", "gpt2")


def table() -> list[tuple[str, str, str]]:
    """Rows of the Words table: words, meaning, and words that are not used for it."""
    text = PAGE.read_text(encoding="utf-8").partition("\n## Words\n")[2].partition("\n## ")[0]
    rows = [
        tuple(cell.strip() for cell in line.strip("|").split("|")) for line in text.splitlines() if line[:1] == "|"
    ]
    return rows[2:]


def words_of(names: str) -> set[str]:
    return {word for word in re.split(r"[^A-Za-zΔ0-9]+", names.lower()) if word}


def arguments(function: object) -> Iterator[str]:
    try:
        yield from inspect.signature(function).parameters
    except (TypeError, ValueError):  # builtins without a signature
        return


def public_names() -> dict[str, str]:
    """Arguments of operations and layers, and config fields: name -> one place where it stands."""
    names = {}
    for package in (hf_hybrid.kernels, hf_hybrid.context_parallel, hf_hybrid.layers):
        for found in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            if package is hf_hybrid.kernels and not found.ispkg:
                continue
            if found.name.endswith(PLUMBING):
                continue
            module = importlib.import_module(found.name)
            for name, value in vars(module).items():
                home = getattr(value, "__module__", "")
                if name.startswith("_") or not (inspect.isclass(value) or inspect.isfunction(value)):
                    continue
                if home == found.name:
                    parts = [value] if inspect.isfunction(value) else [value.__init__]
                    parts += [value.forward] if inspect.isclass(value) and issubclass(value, nn.Module) else []
                    names |= {argument: f"{found.name}.{name}" for part in parts for argument in arguments(part)}
    for model_type in ARCHITECTURES:
        config = type(transformers.AutoConfig.for_model(model_type))
        own = SegmentedCrossAttentionFields if issubclass(config, SegmentedCrossAttentionFields) else config
        names |= {field.name: config.__name__ for field in dataclasses.fields(own)}
    return names


def borrowed() -> set[str]:
    """Words of transformers' configs and of torch's modules and functions."""
    configs = [type(transformers.AutoConfig.for_model(name)) for name in PEERS]
    names = [field.name for config in configs for field in dataclasses.fields(config)]
    for value in (*vars(nn).values(), *vars(F).values()):
        names += arguments(value.__init__ if inspect.isclass(value) else value)
    return {word for name in names for word in words_of(name)}


@pytest.fixture(scope="module")
def names():
    found = public_names()
    assert len(found) > 150
    return found


def test_every_word_of_a_public_name_is_explained(names):
    known = borrowed() | {word for words, _, _ in table() for word in words_of(words)}
    missing = {name: where for name, where in names.items() if words_of(name) - known}
    assert not missing, f"give each of their words a row in the Words table of {PAGE}, or use one that is there"


def test_every_word_of_the_table_is_used(names):
    """A row whose word has gone goes too."""
    used = {word for name in names for word in words_of(name)}
    for path in Path(hf_hybrid.__file__).parent.rglob("*.py"):
        used |= words_of(path.read_text(encoding="utf-8"))
    unused = {word for words, _, _ in table() for word in words_of(words)} - used
    assert not unused


def test_no_public_name_uses_a_word_that_stands_for_another(names):
    refused = {word: words for words, _, instead in table() for word in words_of(instead)}
    assert refused
    wrong = {name: refused[word] for name in names for word in words_of(name) if word in refused}
    assert not wrong, f"name -> the word that the table of {PAGE} has for it"
