"""Every model type goes to the Hub and comes back, over HTTP and through huggingface_hub's own client."""

import json
import subprocess
import sys
from pathlib import Path

from hf_hybrid.models.auto import ARCHITECTURES
from tests.hub import WRITER, LoopbackHub

from .tiny import MODEL_CLASSES

ROOT = Path(__file__).resolve().parents[2]
KEPT_IN_FLOAT32 = {"bst", "chela", "spade"}  # model types with parameters that 16 bits would spoil


def test_models_and_the_hub(tmp_path):
    """One client does everything, for it takes longer to start than to do it."""
    with LoopbackHub() as hub:
        hub.failing = {"user/error": "error", "user/drop": "drop"}
        command = [sys.executable, "-m", "tests.models.hub_client", str(tmp_path)]
        subprocess.run(command, cwd=ROOT, env=hub.environment(tmp_path / "home"), check=True, capture_output=True)
    result = json.loads((tmp_path / "found.json").read_text(encoding="utf-8"))
    assert not result["errors"], "\n".join(f"{step}: {error}" for step, error in result["errors"].items())
    found = result["found"]

    for model_type, auto_class in MODEL_CLASSES:
        step, expected = f"{model_type} {auto_class}", ARCHITECTURES[model_type][1][auto_class].__name__
        assert found[step] == {"class": expected, "missing": [], "fields": [], "equal": True}, step
        assert {"config.json", "model.safetensors", "README.md"} <= hub.files(f"user/{model_type}-{auto_class}").keys()
    for model_type in ARCHITECTURES:
        assert found[f"{model_type} parts"] == {"ids_equal": True, "text": "Ein Fluß, 河", "defaults": True}
        check_ways(found[f"{model_type} ways"], model_type)
        check_card(found[f"{model_type} card"], model_type)
        shards = [path for path in hub.files(f"user/{model_type}-sharded") if path.endswith(".safetensors")]
        assert len(shards) > 2, f"{model_type} is not sharded"
        if split := found.get(f"{model_type} split"):
            assert split == {"equal": True, "devices": ["cpu", "meta"]}, model_type
    assert sum(step.endswith(" split") for step in found) == 3
    read = [token for method, path, token in hub.requests if path.startswith("/user/bst-sharded/resolve/")]
    assert set(read) == {WRITER}, "the token was not sent"

    check_failures(found["failures"])
    for repository in ("user/error", "user/drop"):
        assert not hub.files(repository), "a part of the model was pushed"
        assert len({path for path, _ in hub.objects if path == repository}) == 1, "nothing was half-way"
    assert not {"user/refused", "somebody/model"} & hub.repositories.keys()


def check_ways(ways, model_type):
    assert ways["branch"], model_type
    assert ways["halved"] == ["torch.bfloat16"], model_type
    assert ways["kept"] == (["torch.float32"] if model_type in KEPT_IN_FLOAT32 else []), model_type
    assert 0 < ways["error of half"] < 0.1, model_type
    for way, devices in {"cpu": ["cpu"], "auto": ["cpu"], "disk": ["meta"]}.items():
        assert ways[way] == {"equal": True, "devices": devices}, f"{model_type} {way}"
    assert ways["auto, little memory"]["equal"], model_type
    assert "meta" in ways["auto, little memory"]["devices"], f"nothing of {model_type} was offloaded"


def check_card(card, model_type):
    metadata, text = card["metadata"], card["text"]
    assert metadata["library_name"] == "transformers"
    assert metadata["tags"] == [model_type, "hf_hybrid"]
    assert metadata.get("pipeline_tag") == (None if "Seq2Seq" in text else "text-generation")
    assert f"(`{model_type}`)" in text
    assert "hidden_size 32" in text
    assert "More Information Needed" not in text
    code = text.split("```python\n")[1].split("```")[0]
    assert code.startswith("import hf_hybrid")
    assert f".from_pretrained('user/{model_type}-AutoModelFor" in code


def check_failures(failures):
    for name, message in {
        "missing": "user/none is not a local folder and is not a valid model identifier",
        "no access": "user/secret is not a local folder and is not a valid model identifier",
        "branch": "none is not a valid git identifier",
        "reader": "403 Forbidden",
        "stranger": "403 Forbidden",
        "user/error": "Error while uploading 'model-",
        "user/error again": "Error while uploading 'model-",
        "user/drop": "Error while uploading 'model-",
        "user/drop again": "Error while uploading 'model-",
    }.items():
        assert message in failures[name]["text"], name
    assert failures["untouched"], "a push that failed changed what is on the disk"
    assert failures["still loads"]
