"""Loads exported folders in a process that has neither the package nor triton; run as a script by test_remote_code.py.

What it computes must be what the package computed, to the bit. A difference ends it with the case that differs.
"""

import os
import sys
from pathlib import Path
from types import SimpleNamespace

if __name__ == "__main__":
    sys.modules["hf_hybrid"] = sys.modules["triton"] = None  # importing them fails

import pytest
import torch
import transformers
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES


def load(auto_class, name, **fields):
    torch.manual_seed(0)  # heads that the checkpoint lacks are drawn
    model = getattr(transformers, auto_class).from_pretrained(name, trust_remote_code=True, **fields)
    assert type(model).__module__.startswith("transformers_modules."), type(model).__module__
    return model


def measure(model, inputs, new_tokens=0):
    """What two copies of a model must agree on: outputs, gradients in training with dropout, generated tokens."""
    results = {}
    with torch.no_grad():
        results["output"] = outputs_of(model.eval()(**inputs))
        if new_tokens:
            tokens = {"max_new_tokens": new_tokens, "min_new_tokens": new_tokens}
            results["generated"] = model.generate(inputs["input_ids"], use_cache=True, **tokens)
    torch.manual_seed(1)
    outputs_of(model.train()(**inputs)).square().mean().backward()
    results |= {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return results


def outputs_of(outputs):
    if "start_logits" in outputs:
        return torch.stack([outputs.start_logits, outputs.end_logits])
    return outputs.logits if "logits" in outputs else outputs.last_hidden_state


def check(actual, expected, what):
    assert actual.keys() == expected.keys(), (what, actual.keys() ^ expected.keys())
    for name, tensor in expected.items():
        assert torch.equal(actual[name], tensor), (what, name)


def check_folder(name, case, hub_name):
    loaded = {}
    for auto_class, head in case["heads"].items():
        model = loaded[auto_class] = load(auto_class, name, **head["fields"])
        check(measure(model, head["inputs"], head["new_tokens"]), head["results"], (name, auto_class))
        assert type(model).__name__ == head["class"]
        if auto_class == "AutoModelForCausalLM":
            assert type(model).__name__ in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()
    saved, model = case["heads"][case["saved"]], loaded[case["saved"]]

    card = model._describe("you/model")  # of what it pushes
    assert f"{case['saved']}.from_pretrained('you/model', trust_remote_code=True)" in card, card
    assert "import hf_hybrid" not in card, card

    if case["copied"]:
        # saved where the package is not, and loaded once more; then as a repository of the Hub, in its cache
        model.save_pretrained(f"{name}-again")
        for copy in (f"{name}-again", hub_name):
            again = load(case["saved"], copy)
            assert type(again) is not type(model)
            check(measure(again, saved["inputs"], saved["new_tokens"]), saved["results"], copy)
        check(measure(model, saved["inputs"], saved["new_tokens"]), saved["results"], "beside other copies")

    tokenizer = transformers.AutoTokenizer.from_pretrained(name, trust_remote_code=True)
    assert tokenizer(case["text"])["input_ids"] == case["tokens"]
    return model


def check_compiled(model, case):
    saved = case["heads"][case["saved"]]
    with torch.no_grad():
        expected = outputs_of(model.eval()(**saved["inputs"]))
        actual = outputs_of(torch.compile(model, backend="aot_eager")(**saved["inputs"]))
    assert torch.allclose(actual, expected, rtol=case["rtol"], atol=case["atol"])


def check_backend(model):
    """Triton by name is refused, with the reason; a GPU's tensors are left to torch."""
    dispatch = sys.modules[f"{type(model).__module__.rpartition('.')[0]}.kernels_dispatch"]
    with (
        dispatch.use_backend("triton"),
        pytest.raises(ValueError, match="this copy of the code has no Triton kernels"),
    ):
        model(torch.tensor([[1, 2, 3]]))
    on_gpu = SimpleNamespace(is_cuda=True)
    assert dispatch.choose_backend("op", "auto", [on_gpu], lambda: None) == "torch"


def main(folder):
    cases = torch.load(folder / "cases.pt")
    torch.set_num_threads(cases.pop("threads"))
    for name, case in cases.items():
        model = check_folder(str(folder / name), case, f"someone/{name}")
        if name == "chela":
            check_compiled(model, case)
            check_backend(model)
    assert os.environ["HF_MODULES_CACHE"] in sys.modules[type(model).__module__].__file__
    print("all equal")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
