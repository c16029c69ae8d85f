"""torch exports the forward of every family to ONNX, and onnxruntime computes what the model does."""

import numpy as np
import onnxruntime
import pytest
import torch

from tests.matrix import some
from tests.models.test_export import DYNAMIC, kept, padded_inputs, without_cache
from tests.models.tiny import DECODERS, MODEL_CLASSES, main_output, tiny_inputs
from tests.pages import TEXTS, blocks
from tests.tolerances import assert_close

from .folders import save

# one class of each family with every kind of layer; the others differ in their heads
ALWAYS = [
    ("bst", "AutoModelForCausalLM"),
    ("chela", "AutoModelForCausalLM"),
    ("chela", "AutoModelForQuestionAnswering"),
    ("spade", "AutoModelForSeq2SeqLM"),
    ("spade", "AutoModelForSequenceClassification"),
    ("srformer_bart", "AutoModelForSeq2SeqLM"),
    ("srformer_t5", "AutoModel"),
]
# what differs from the first case in the operations of its file
VARIANTS = {
    ("bst", "AutoModelForCausalLM"): (
        "multi head",
        "multi filter",
        "multi filter, unstructured",
        "adaptive vocabulary",
    ),
    ("chela", "AutoModelForCausalLM"): ("s4d", "moving average", "laplace in chunks", "shared kernels"),
    ("spade", "AutoModelForCausalLM"): ("chunk", "s4d", "s5", "hyena alone", "absolute positions"),
    ("srformer_t5", "AutoModelForSeq2SeqLM"): ("recurrent", "Transformer-XL", "LongT5", "fewer tokens than segments"),
}
CASES = [(*key, case) for key, cases in VARIANTS.items() for case in cases]


def session(model, inputs, path, **options):
    """What onnxruntime loads of an exported model."""
    with torch.no_grad():
        torch.onnx.export(model, (), kwargs=inputs, dynamo=True, verbose=False, **options).save(path)
    return onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])


def check(loaded, model, inputs):
    """Compare with the model in double precision: its transforms round more in float32 than what ONNX computes."""
    found = [torch.from_numpy(x) for x in loaded.run(None, {name: np.asarray(x) for name, x in inputs.items()})]
    with torch.no_grad():
        wanted = main_output(model.double()(**inputs)).float()
    model.float()
    answers = wanted.shape[-1] == 2 and len(found) == 2  # first and last token
    actual = torch.stack(found, dim=-1) if answers else found[0]
    assert_close(kept(actual, inputs), kept(wanted, inputs), "float32 model")


def test_the_page_runs(tmp_path, monkeypatch):
    save(tmp_path / "my-language-model", "spade", "AutoModelForCausalLM")
    monkeypatch.chdir(tmp_path)
    names: dict = {}
    (source,) = (code for code in blocks(TEXTS["docs/inference.md"], "python") if "onnxruntime" in code)
    exec(compile(source, "docs/inference.md", "exec"), names)
    with torch.no_grad():
        wanted = names["model"].double()(**names["inputs"]).logits.float()
    assert_close(torch.from_numpy(names["logits"]), wanted, "float32 model")


@pytest.mark.parametrize(("model_type", "auto_class"), some(MODEL_CLASSES, *ALWAYS))
@pytest.mark.parametrize("padded", some([False, True], True))
def test_every_class(model_type, auto_class, padded, tmp_path):
    """Of 11 tokens, a multiple of no window and no chunk."""
    model = without_cache(model_type, auto_class)
    inputs = padded_inputs(model, model_type) if padded else tiny_inputs(model)
    check(session(model, inputs, tmp_path / "model.onnx"), model, inputs)


@pytest.mark.parametrize(("model_type", "auto_class", "case"), CASES)
def test_variants(model_type, auto_class, case, tmp_path):
    model = without_cache(model_type, auto_class, **DECODERS[model_type, auto_class][case])
    inputs = padded_inputs(model, model_type)
    check(session(model, inputs, tmp_path / "model.onnx"), model, inputs)


def test_an_lstm_without_padding(tmp_path):
    model = without_cache("spade", "AutoModelForCausalLM", ssm_type="lstm")
    inputs = tiny_inputs(model)
    check(session(model, inputs, tmp_path / "model.onnx"), model, inputs)


@pytest.mark.parametrize("model_type", ["bst", "chela", "spade"])
def test_the_batch_may_be_dynamic(model_type, tmp_path):
    model = without_cache(model_type, "AutoModelForCausalLM")
    inputs = padded_inputs(model, model_type)
    sizes = {name: {0: DYNAMIC} for name in inputs}
    loaded = session(model, inputs, tmp_path / "model.onnx", dynamic_shapes=sizes)
    for batch in (1, 2, 5):
        check(loaded, model, padded_inputs(model, model_type, batch=batch))


@pytest.mark.parametrize("fields", [{}, {"attention_fn": "laplace", "mixer": "ema"}])
@pytest.mark.parametrize("length", [7, 17])
def test_the_length_may_be_dynamic_in_chela(fields, length, tmp_path):
    """Whether the file is made of fewer or of more tokens than the kernel has taps."""
    model = without_cache("chela", "AutoModelForCausalLM", **fields)
    inputs = padded_inputs(model, "chela", length=length)
    sizes = {name: {1: DYNAMIC} for name in inputs}
    loaded = session(model, inputs, tmp_path / "model.onnx", dynamic_shapes=sizes)
    for other in (5, 12, 40):
        check(loaded, model, padded_inputs(model, "chela", length=other))


@pytest.mark.parametrize(
    ("model_type", "fields"), [("bst", {}), ("spade", {}), ("srformer_t5", {}), ("chela", {"mixer": "s4d"})]
)
def test_a_dynamic_length_is_refused_in_the_others(model_type, fields, tmp_path):
    model = without_cache(model_type, "AutoModel", **fields)
    inputs = tiny_inputs(model)
    with pytest.raises(torch.onnx.OnnxExporterError) as raised:
        session(model, inputs, tmp_path / "model.onnx", dynamic_shapes={name: {1: DYNAMIC} for name in inputs})
    assert "input_ids must have a fixed length in an export to ONNX" in str(raised.value.__cause__)
