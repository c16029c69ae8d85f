"""Export a checkpoint together with its code, for use without this package.

transformers loads such a folder with ``trust_remote_code=True``. It copies only files that are imported by
``from .sibling import name``, so the folder is flat: it holds every module that a model's file needs, directly or
indirectly. The files are copies of this package's, with changed imports. The Triton kernels are left out: functions
that would import them raise, but `dispatch` never calls these, since it sees that the kernels are missing.
"""

import ast
import copy
import importlib
import importlib.metadata
import importlib.util
import inspect
import json
import os
import platform
import re
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import torch
import transformers
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import CONFIG_NAME

from hf_hybrid.version import __version__

from .auto import ARCHITECTURES

PACKAGE = "hf_hybrid"
TRITON = "triton_kernels"
MARK = f"# From {PACKAGE} "
CARD_NAME = "README.md"
LICENSE_NAME = f"LICENSE.{PACKAGE}"  # of the code; LICENSE would be that of the weights
# classes without a registered Auto class -> the Auto class that loads them with their code
UNREGISTERED = {
    "ChelaForSequencePairClassification": "AutoModelForSequenceClassification",
    "SpadeForSequencePairClassification": "AutoModelForSequenceClassification",
    "SpadeStack": "AutoModel",  # of a language model
}

NO_TRITON = 'raise ValueError("this copy of the code has no Triton kernels")'
SHIFTED_LABELS = """
# Trainer's label smoothing shifts the labels of models in this table
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES  # noqa: E402

MODEL_FOR_CAUSAL_LM_MAPPING_NAMES["{model_type}"] = "{class_name}"
"""
CARD = """---
library_name: transformers
tags:
- custom_code
- {model_type}
---

# {class_name}

A checkpoint of [transformers](https://github.com/huggingface/transformers) with its code. It was saved with Python
{python}, torch {torch} and transformers {transformers}, and needs nothing else. Load it from this folder or
repository:

```python
from transformers import {auto_class}

model = {auto_class}.from_pretrained("{name}", trust_remote_code=True)
```

`trust_remote_code=True` runs the Python files of this folder with all your rights. Read them first. Load a repository
with `revision=` and the hash of the commit that you have read, so that you run what you have read.

The Python files are those of {package} {version} without its Triton kernels, under the Apache License 2.0
(`{license}`). If {package} is installed and imported, it loads the checkpoint with its own code, and a GPU runs its
kernels.

| loaded by | class |
| --- | --- |
{classes}
"""


class _Import(NamedTuple):
    """One import statement of a module of this package: its bytes in the source and the names it imports."""

    start: int
    stop: int
    indent: int
    module: str
    names: list[ast.alias]


def export_remote_code(
    model: PreTrainedModel,
    folder: str | os.PathLike,
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
    overwrite: bool = False,
    max_shard_size: int | str = "50GB",
):
    """Save a model together with its code, so that it loads without this package.

    The folder holds the files of `save_pretrained`, the Python files (torch only, no Triton kernels), their licence
    and a card that explains how to load it. Every Auto class of the model's type loads it with
    `trust_remote_code=True`; where this package is imported, its own classes load it.

    Classes that end in `ForSequencePairClassification`, which have no registered Auto class, are loaded by
    `AutoModelForSequenceClassification`.

    Args:
        model: A model of one of this package's classes, on any device.
        folder: Folder to write; created if missing.
        tokenizer: Saved with the model, if given.
        overwrite: Whether the folder may hold files. An export replaces the files it writes and keeps all others,
            including a README.md.
        max_shard_size: Largest file of weights, as for `save_pretrained`.

    Raises:
        ValueError: The model is of another class, has unmerged adapters, is quantized or has no weights; the folder is
            a file or holds files; this package is installed without its source or its licence.
    """
    folder = Path(folder)
    auto_class, models = _check_model(model)
    _check_folder(folder, overwrite)
    config_class = ARCHITECTURES[model.config.model_type][0]
    files = collect_sources({cls.__module__ for cls in (config_class, *models.values())})
    terms = _license()
    causal = models.get("AutoModelForCausalLM")
    if causal is not None:
        suffix = SHIFTED_LABELS.format(model_type=model.config.model_type, class_name=causal.__name__)
        files[f"{_flat_name(causal.__module__)}.py"] += suffix

    model.save_pretrained(folder, max_shard_size=max_shard_size)
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)
    for stale in folder.glob("*.py"):
        if stale.name not in files and stale.read_text(encoding="utf-8").startswith(MARK):
            stale.unlink()
    for name, source in files.items():
        (folder / name).write_text(source, encoding="utf-8")
    (folder / LICENSE_NAME).write_text(terms, encoding="utf-8")
    config = json.loads((folder / CONFIG_NAME).read_text(encoding="utf-8"))
    config["auto_map"] = {
        name: f"{_flat_name(cls.__module__)}.{cls.__name__}"
        for name, cls in {"AutoConfig": config_class, **models}.items()
    }
    (folder / CONFIG_NAME).write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    if not (folder / CARD_NAME).exists():
        (folder / CARD_NAME).write_text(_card(model, folder, auto_class, models), encoding="utf-8")


def collect_sources(modules: Iterable[str]) -> dict[str, str]:
    """Return flat copies of modules and of all modules of this package that they import.

    Args:
        modules: Full names of modules.

    Returns:
        File name → source, with imports of siblings.

    Raises:
        ValueError: The source of a module is missing.
    """
    waiting, done, sources = set(modules), set(), {}
    while waiting:
        module = waiting.pop()
        name = f"{_flat_name(module)}.py"
        assert name not in sources, f"{module} and another module would both be {name}"
        sources[name], needed = _flatten(module)
        done.add(module)
        waiting = (waiting | needed) - done
    return dict(sorted(sources.items()))


def _flat_name(module: str) -> str:
    """`hf_hybrid.layers.s4` → `layers_s4`; files named `configuration_` or `modeling_` keep their names."""
    _, *path = module.split(".")
    return path[-1] if path[-1].startswith(("configuration_", "modeling_")) else "_".join(path)


def _flatten(module: str) -> tuple[str, set[str]]:
    """Return a module's source with imports of siblings, and the modules it imports."""
    spec = importlib.util.find_spec(module)
    source = spec.loader.get_source(module)
    if source is None:
        raise ValueError(f"{PACKAGE} must be installed with its source to be exported; got no source of {module}")
    package = module if spec.submodule_search_locations is not None else spec.parent
    text, needed = source.encode(), set()
    for found in sorted(_imports(source, package), reverse=True):  # from the end, so that offsets stay valid
        statement, imported = _sibling_import(text[found.start : found.stop].decode(), found)
        text = text[: found.start] + statement.encode() + text[found.stop :]
        needed |= imported
    path = "/".join(module.split(".")) + ("/__init__.py" if package == module else ".py")
    return f"{MARK}{__version__} (Apache-2.0): {path}\n{text.decode()}", needed


def _imports(source: str, package: str) -> Iterable[_Import]:
    """Yield the imports of this package's modules in a source, also inside functions."""
    starts = [0]
    for line in source.encode().splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            # binds the name of the package, which a copy does not have
            assert not any(alias.name.split(".")[0] == PACKAGE for alias in node.names), ast.unparse(node)
        if not isinstance(node, ast.ImportFrom):
            continue
        module = importlib.util.resolve_name("." * node.level + (node.module or ""), package)
        if module.split(".")[0] == PACKAGE:
            start, stop = starts[node.lineno - 1] + node.col_offset, starts[node.end_lineno - 1] + node.end_col_offset
            yield _Import(start, stop, node.col_offset, module, node.names)


def _sibling_import(statement: str, found: _Import) -> tuple[str, set[str]]:
    """Rewrite one import as an import of siblings; return it and the modules it imports."""
    if found.module.endswith(f".{TRITON}") or any(alias.name == TRITON for alias in found.names):
        return NO_TRITON, set()
    lines, needed, plain = [], set(), []
    for alias in found.names:
        module = f"{found.module}.{alias.name}"
        if inspect.ismodule(getattr(importlib.import_module(found.module), alias.name)):
            # transformers finds the file by the first line only
            lines.append(f"from .{_flat_name(module)} import __name__ as _")
            lines.append(f"from . import {_flat_name(module)} as {alias.asname or alias.name}")
            needed.add(module)
        else:
            plain.append(alias)
    if plain:
        needed.add(found.module)
        head = f"from .{_flat_name(found.module)} import"
        names = ", ".join(ast.unparse(alias) for alias in plain)
        is_plain = len(plain) == len(found.names)
        lines.insert(0, re.sub(r"^from\s+\S+\s+import", head, statement) if is_plain else f"{head} {names}")
    return ("\n" + " " * found.indent).join(lines), needed


def _check_model(model: PreTrainedModel) -> tuple[str, dict[str, type[PreTrainedModel]]]:
    """Return the Auto class that loads a model, and the model class of each Auto class; raise ValueError if none."""
    name = type(model).__name__
    model_type = getattr(getattr(model, "config", None), "model_type", None)
    models = dict(ARCHITECTURES[model_type][1]) if model_type in ARCHITECTURES else {}
    if type(model).__module__.split(".")[0] == PACKAGE and name in UNREGISTERED:
        models[UNREGISTERED[name]] = type(model)
    auto_class = next((auto_class for auto_class, cls in models.items() if cls is type(model)), None)
    if auto_class is None:
        home = type(model).__module__.split(".")[0]
        hint = {
            "peft": ", an adapter around a model: export the result of its merge_and_unload()",
            "torch": ", a wrapper: export the model inside",
            "transformers_modules": ", from a checkpoint with its code: its save_pretrained writes that code too",
        }.get(home, "")
        raise ValueError(f"model must be of a class that {PACKAGE} registers; got {name}{hint}")
    with torch.device("meta"):
        plain = _shapes(type(model)(copy.deepcopy(model.config)))
    own = _shapes(model)
    for tensor in sorted(plain.keys() | own.keys()):
        if own.get(tensor) != plain.get(tensor):
            raise ValueError(
                f"model must be a plain {name} that matches its config, with adapters merged and not quantized; "
                f"got {tensor} of shape {own.get(tensor, 'none')} instead of {plain.get(tensor, 'none')}"
            )
    if not hasattr(model, "hf_device_map"):  # which may have weights on disk; they are saved from there
        for tensor, value in model.state_dict().items():
            if value.is_meta:
                raise ValueError(f"model must have its weights; got {tensor} on the meta device")
    return auto_class, models


def _shapes(model: PreTrainedModel) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}


def _check_folder(folder: Path, overwrite: bool):
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"folder must be a folder; got {folder}, a file")
    # hidden files are git's and the Hub's
    present = sorted(path.name for path in folder.glob("*") if not path.name.startswith("."))
    if present and not overwrite:
        raise ValueError(f"folder must be empty unless overwrite=True; got {folder}, which holds {present[0]}")
    if "adapter_config.json" in present:
        raise ValueError(f"folder must not hold an adapter, which would be loaded into the model; got {folder}")


def _license() -> str:
    """Return the licence of this package's code, which every copy includes."""
    clone = Path(__file__).resolve().parents[2] / "LICENSE"
    if clone.is_file() and clone.with_name("pyproject.toml").is_file():
        return clone.read_text(encoding="utf-8")
    for path in importlib.metadata.files(PACKAGE) or ():
        if path.name == "LICENSE":
            return path.read_text(encoding="utf-8")
    raise ValueError(f"{PACKAGE} must be installed with its LICENSE to be exported; got none")


def _card(model: PreTrainedModel, folder: Path, auto_class: str, models: dict[str, type[PreTrainedModel]]) -> str:
    return CARD.format(
        auto_class=auto_class,
        class_name=type(model).__name__,
        classes="\n".join(f"| `{name}` | `{cls.__name__}` |" for name, cls in sorted(models.items())),
        model_type=model.config.model_type,
        name=folder.resolve().name,
        package=PACKAGE,
        python=platform.python_version(),
        torch=torch.__version__,
        transformers=transformers.__version__,
        license=LICENSE_NAME,
        version=__version__,
    )
