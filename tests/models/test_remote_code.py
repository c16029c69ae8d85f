"""A checkpoint that brings its code along is the same model where the package is missing, and beside the package."""

import ast
import json
import os
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import peft
import pytest
import torch
import transformers
from huggingface_hub import ModelCard
from transformers import cache_utils, dynamic_module_utils

import hf_hybrid
from hf_hybrid.data.tokenizer import byte_tokenizer
from hf_hybrid.models import remote_code
from hf_hybrid.models.auto import ARCHITECTURES

from ..matrix import some
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
PAIRS = {
    "chela": hf_hybrid.ChelaForSequencePairClassification,
    "spade": hf_hybrid.SpadeForSequencePairClassification,
}
GENERATIVE = ("AutoModelForCausalLM", "AutoModelForSeq2SeqLM")
TEXT = "Kurz und weit."
ROOT = Path(__file__).resolve().parents[2]


def pair_model(model_class):
    torch.manual_seed(0)
    return model_class(tiny_config(model_class.config_class.model_type)).eval()


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


# folders that the full run alone exports
LATER = ["chela_pair", "srformer_bart"]
# folders that any run saves again and copies, as the full run does with all
COPIED = ["bst", "srformer_t5"]


@pytest.mark.parametrize("everything", some([True, False], False))
def test_every_head_loads_without_the_package(everything, tmp_path):
    """Outputs, gradients and generated tokens are equal to the bit; the process is one that has no such package.

    It also saves folders again, and loads these and repositories of the Hub. If not everything, only some folders, and
    of each kind of head the first and those that must be told something.
    """
    tokenizer = byte_tokenizer()
    cases, seen = {}, set()
    later = [] if everything else LATER
    for model_type, saved in EXPORTED.items():
        if model_type in later:
            continue
        model = tiny_model(model_type, saved)
        hf_hybrid.export_remote_code(model, tmp_path / model_type, tokenizer=tokenizer)
        heads = {saved: head_case(model, {}, 12)}
        others = ARCHITECTURES[model_type][1].keys() - {saved}
        told = {auto_class for named, auto_class in FIELDS if named == model_type}
        for auto_class in sorted(others if everything else others - seen | told & others):
            fields = FIELDS.get((model_type, auto_class), {})
            torch.manual_seed(0)  # heads that the checkpoint lacks are drawn
            loaded = getattr(transformers, auto_class).from_pretrained(tmp_path / model_type, **fields)
            heads[auto_class] = head_case(loaded, fields, 12 if auto_class in GENERATIVE else 0)
        seen |= heads.keys()
        cases[model_type] = {"saved": saved, "heads": heads}
    for model_type, model_class in PAIRS.items():
        if f"{model_type}_pair" in later:
            continue
        pair = pair_model(model_class)
        hf_hybrid.export_remote_code(pair, tmp_path / f"{model_type}_pair", tokenizer=tokenizer)
        pair_inputs = {"pair_input_ids": tiny_inputs(pair, seed=5)["input_ids"]}
        head = "AutoModelForSequenceClassification"
        cases[f"{model_type}_pair"] = {"saved": head, "heads": {head: head_case(pair, {}, 0, **pair_inputs)}}
    for name, case in cases.items():
        if copied := everything or name in COPIED:
            as_repository(tmp_path / name, tmp_path / "hub")
        tolerance = TOLERANCES["float32 model"]
        case |= {"copied": copied, "text": TEXT, "tokens": tokenizer(TEXT)["input_ids"]}
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


@pytest.fixture
def own_modules(tmp_path, monkeypatch):
    """Let transformers copy code to a place of this test, and forget it afterwards."""
    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.syspath_prepend(tmp_path / "modules")
    before = {name: module for name, module in sys.modules.items() if name.split(".")[0] == "transformers_modules"}
    mappings = (cache_utils.DYNAMIC_LAYER_TYPE_MAPPING, cache_utils.STATIC_LAYER_TYPE_MAPPING)
    kinds = [dict(mapping) for mapping in mappings]
    for name in before:
        del sys.modules[name]
    yield
    for name in [name for name in sys.modules if name.split(".")[0] == "transformers_modules"]:
        del sys.modules[name]
    sys.modules.update(before)
    for mapping, kind in zip(mappings, kinds, strict=True):
        mapping.update(kind)


@pytest.mark.parametrize("model_type", ["bst", "srformer_t5"])
def test_copies_of_the_code_live_beside_the_package(model_type, tmp_path, own_modules):
    """Custom ops and kinds of cache are known to torch and transformers by name, and each copy has its own."""
    model = tiny_model(model_type, EXPORTED[model_type])
    inputs = tiny_inputs(model)
    expected = without_package.measure(model, inputs, 12)
    copies = []
    for name in ("first", "second"):
        hf_hybrid.export_remote_code(model, tmp_path / name)
        module = type(model).__module__.rpartition(".")[2]
        copy_class = dynamic_module_utils.get_class_from_dynamic_module(
            f"{module}.{type(model).__name__}", tmp_path / name
        )
        copies.append(copy_class.from_pretrained(tmp_path / name))
    assert len({type(model), *map(type, copies)}) == 3
    for one in (*copies, model):
        without_package.check(without_package.measure(one, inputs, 12), expected, type(one))


@pytest.mark.parametrize("trust", [None, True])
def test_the_package_loads_a_folder_with_its_own_classes(trust, tmp_path, own_modules):
    model = tiny_model("chela", "AutoModelForCausalLM")
    hf_hybrid.export_remote_code(model, tmp_path / "out")
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", trust_remote_code=trust)
    assert type(loaded) is hf_hybrid.ChelaForCausalLM
    assert type(loaded.config) is hf_hybrid.ChelaConfig
    assert not hasattr(model.config, "auto_map")  # the exported model stays as it was
    loaded.save_pretrained(tmp_path / "again")
    assert "auto_map" not in json.loads((tmp_path / "again" / "config.json").read_text())  # there is no code
    with torch.no_grad():
        inputs = tiny_inputs(model)
        assert_close(loaded.eval()(**inputs).logits, model(**inputs).logits, "exact")
    assert not (tmp_path / "modules").exists()  # no code was copied


@pytest.mark.parametrize("model_type", EXPORTED)
def test_a_folder_needs_nothing_but_torch_and_transformers(model_type, tmp_path):
    """What transformers finds of the imports is what there is, and no import is of anything else."""
    hf_hybrid.export_remote_code(tiny_model(model_type, EXPORTED[model_type]), tmp_path)
    files = {path.name: path for path in tmp_path.glob("*.py")}
    auto_map = json.loads((tmp_path / "config.json").read_text())["auto_map"]
    assert auto_map.keys() == ARCHITECTURES[model_type][1].keys() | {"AutoConfig"}
    entries = {files[f"{reference.split('.')[0]}.py"] for reference in auto_map.values()}
    found = {Path(name) for entry in entries for name in dynamic_module_utils.get_relative_import_files(entry)}
    assert found | entries == set(files.values())
    for path in files.values():
        source = path.read_text(encoding="utf-8")
        libraries = set(dynamic_module_utils.get_imports(path)) - sys.stdlib_module_names
        # the last three are what transformers itself cannot do without
        assert libraries <= {"torch", "transformers", "huggingface_hub", "numpy", "packaging"}, path
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.ImportFrom) and node.level:
                siblings = [node.module] if node.module else [alias.name for alias in node.names]
                assert node.level == 1
                assert {f"{name}.py" for name in siblings} <= files.keys(), path
        assert source.splitlines()[0].startswith(remote_code.MARK)


def test_a_folder_is_a_whole_checkpoint(tmp_path, monkeypatch):
    model = tiny_model("spade", "AutoModelForSeq2SeqLM")
    model.generation_config.max_new_tokens = 7
    hf_hybrid.export_remote_code(model, tmp_path / "shared", tokenizer=byte_tokenizer(), max_shard_size="20KB")
    assert (tmp_path / "shared" / "model.safetensors.index.json").exists()
    card = ModelCard.load(tmp_path / "shared" / "README.md")
    assert card.data.library_name == "transformers"
    assert card.data.tags == ["custom_code", "spade"]
    code = card.text.partition("```python\n")[2].partition("```")[0]
    names = {}
    monkeypatch.chdir(tmp_path)
    exec(compile(code, "README.md", "exec"), names)
    assert type(names["model"]) is hf_hybrid.SpadeForConditionalGeneration
    assert names["model"].generation_config.max_new_tokens == 7
    assert transformers.AutoTokenizer.from_pretrained("shared")(TEXT) == byte_tokenizer()(TEXT)
    terms = (ROOT / "LICENSE").read_text(encoding="utf-8")
    assert Path("shared", "LICENSE.hf_hybrid").read_text(encoding="utf-8") == terms
    assert "`LICENSE.hf_hybrid`" in card.text


def test_the_licence_of_a_wheel_goes_along(tmp_path, monkeypatch):
    """Where the package is installed, its licence lies with the metadata."""
    (tmp_path / "LICENSE").write_text("Terms.", encoding="utf-8")
    installed = metadata.PackagePath("LICENSE")
    installed.dist = SimpleNamespace(locate_file=tmp_path.joinpath)
    monkeypatch.setattr(remote_code, "__file__", str(tmp_path / "lib" / "hf_hybrid" / "models" / "remote_code.py"))
    monkeypatch.setattr(metadata, "files", lambda name: [installed])
    model = tiny_model("bst", "AutoModel")
    hf_hybrid.export_remote_code(model, tmp_path / "out")
    assert (tmp_path / "out" / "LICENSE.hf_hybrid").read_text(encoding="utf-8") == "Terms."
    monkeypatch.setattr(metadata, "files", lambda name: None)
    with pytest.raises(ValueError, match="hf_hybrid must be installed with its LICENSE"):
        hf_hybrid.export_remote_code(model, tmp_path / "none")
    assert not (tmp_path / "none").exists()


def test_overwriting_replaces_what_an_export_wrote(tmp_path):
    hf_hybrid.export_remote_code(tiny_model("chela", "AutoModelForMaskedLM"), tmp_path)
    (tmp_path / "README.md").write_text("Mine.")
    (tmp_path / "mine.py").write_text("x = 1\n")
    (tmp_path / ".gitattributes").write_text("")
    model = tiny_model("bst", "AutoModelForCausalLM")
    with pytest.raises(ValueError, match=r"folder must be empty unless overwrite=True; got .*, which holds LICENSE"):
        hf_hybrid.export_remote_code(model, tmp_path)
    hf_hybrid.export_remote_code(model, tmp_path, overwrite=True)
    assert (tmp_path / "README.md").read_text() == "Mine."
    assert (tmp_path / "mine.py").exists()
    assert (tmp_path / "modeling_bst.py").exists()
    assert not (tmp_path / "modeling_chela.py").exists()
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    with torch.no_grad():
        inputs = tiny_inputs(model)
        assert_close(loaded.eval()(**inputs).logits, model(**inputs).logits, "exact")


def test_adapters_are_merged_first(tmp_path):
    base = tiny_model("chela", "AutoModelForCausalLM")
    config = peft.LoraConfig(init_lora_weights=False)
    torch.manual_seed(0)
    adapted = peft.get_peft_model(base, config)
    inputs = tiny_inputs(base)
    with torch.no_grad():
        expected = adapted(**inputs).logits
    with pytest.raises(ValueError, match="got PeftModel, an adapter around a model: export the result of its merge"):
        hf_hybrid.export_remote_code(adapted, tmp_path / "out")
    with pytest.raises(
        ValueError, match=r"a plain ChelaForCausalLM .* adapters merged .*base_layer.* instead of none"
    ):
        hf_hybrid.export_remote_code(base, tmp_path / "out")  # the adapter lies inside of it
    assert not (tmp_path / "out").exists()
    hf_hybrid.export_remote_code(adapted.merge_and_unload(), tmp_path / "out")
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    with torch.no_grad():
        assert_close(loaded(**inputs).logits, expected, "float32 model")


def test_other_models_are_refused(tmp_path):
    t5 = transformers.T5Model(transformers.T5Config(vocab_size=8, d_model=8, num_layers=1, num_heads=1, d_ff=8))
    with pytest.raises(ValueError, match="model must be of a class that hf_hybrid registers; got T5Model"):
        hf_hybrid.export_remote_code(t5, tmp_path)

    class Derived(hf_hybrid.BstModel):
        pass

    with pytest.raises(ValueError, match="registers; got Derived"):
        hf_hybrid.export_remote_code(Derived(tiny_config("bst")), tmp_path)
    with pytest.raises(ValueError, match="registers; got OptimizedModule, a wrapper: export the model inside"):
        hf_hybrid.export_remote_code(torch.compile(tiny_model("bst", "AutoModel")), tmp_path)
    with torch.device("meta"):
        empty = hf_hybrid.BstModel(tiny_config("bst"))
    with pytest.raises(ValueError, match=r"model must have its weights; got .* on the meta device"):
        hf_hybrid.export_remote_code(empty, tmp_path)
    resized = tiny_model("bst", "AutoModel")
    resized.config.intermediate_size *= 2
    with pytest.raises(ValueError, match=r"matches its config.* instead of "):
        hf_hybrid.export_remote_code(resized, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_other_folders_are_refused(tmp_path):
    model = tiny_model("bst", "AutoModel")
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"folder must be a folder; got .*file, a file"):
        hf_hybrid.export_remote_code(model, tmp_path / "file")
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(ValueError, match="folder must not hold an adapter"):
        hf_hybrid.export_remote_code(model, tmp_path, overwrite=True)


def test_an_installation_without_source_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("importlib.machinery.SourceFileLoader.get_source", lambda loader, name: None)
    with pytest.raises(ValueError, match="must be installed with its source to be exported; got no source of hf_hyb"):
        hf_hybrid.export_remote_code(tiny_model("bst", "AutoModel"), tmp_path / "out")
    assert not (tmp_path / "out").exists()
