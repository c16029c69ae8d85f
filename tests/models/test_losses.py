"""The loss alone: as large as with logits, with the same gradients, when it is asked for and only then."""

import json

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers.loss.loss_utils import ForCausalLMLoss

from hf_hybrid.models import losses

from ..matrix import some
from ..tolerances import assert_close
from ..torchrun import in_forks
from .losses_divided import WRAPPERS
from .tiny import DECODERS, is_causal_lm, tiny_inputs, tiny_labels, tiny_model

CAUSAL, PAIRS, MASKED = "AutoModelForCausalLM", "AutoModelForSeq2SeqLM", "AutoModelForMaskedLM"
HEADS = [
    *((model_type, CAUSAL) for model_type in ("bst", "chela", "spade")),
    *((model_type, PAIRS) for model_type in ("spade", "srformer_bart", "srformer_t5")),
    *((model_type, MASKED) for model_type in ("chela", "spade")),
]
NONE = {"dropout": 0.0, "attention_dropout": 0.0}
FIELDS = {
    "tied": {},
    "a table of its own": {"tie_word_embeddings": False},
    "scaled": {"scale_decoder_outputs": True},
    "adaptive": {"adaptive_cutoffs": [10, 30], "adaptive_factor": 2, "is_decoder": True},
}
UNSCALED = ("chela", "srformer_bart")
CASES = [
    (*head, case)
    for head in HEADS
    for case in FIELDS
    if not (case == "scaled" and head[0] in UNSCALED) and not (case == "adaptive" and head[1] != CAUSAL)
]
every_head = pytest.mark.parametrize(("model_type", "auto_class"), HEADS)


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    monkeypatch.setattr(losses, "loss_chunk_size", lambda vocab_size, hidden_size: 4)


def labelled(model):
    labels = tiny_labels(model, length=11)
    labels[0, 3:6] = -100
    inputs = tiny_inputs(model, length=11)
    inputs.pop("decoder_input_ids", None)
    return inputs, labels


def plain_loss(model, inputs, labels, count=None):
    """The mean cross-entropy of all logits, in the model's precision."""
    logits = model(**inputs, labels=labels, skip_logits=False).logits
    if is_causal_lm(model):
        logits, labels = logits[:, :-1], labels[:, 1:]
    addend = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
    return addend / ((labels != -100).sum() if count is None else count)


def step(model, loss):
    model.zero_grad()
    loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


# every third with checkpointing too
CHECKPOINTED = [(*case, False) for case in CASES] + [(*case, True) for case in CASES]
FEW_CHECKPOINTED = [*CHECKPOINTED[: len(CASES)], *CHECKPOINTED[len(CASES) :: 3]]


@pytest.mark.parametrize(("model_type", "auto_class", "case", "checkpointed"), some(CHECKPOINTED, *FEW_CHECKPOINTED))
def test_loss_and_gradients_are_those_of_all_logits(model_type, auto_class, case, checkpointed):
    model = tiny_model(model_type, auto_class, **NONE, **FIELDS[case]).double().train()
    if checkpointed:
        model.activation_checkpointing_enable()
    if hasattr(model, "final_logits_bias"):
        nn.init.normal_(model.final_logits_bias)
    inputs, labels = labelled(model)
    for count in (None, torch.tensor(40)):
        outputs = model(**inputs, labels=labels, num_items_in_batch=count, skip_logits=True)
        assert outputs.logits is None
        expected = plain_loss(model, inputs, labels, count)
        assert_close(outputs.loss, expected, "float64 gradient")
        actual, wanted = step(model, outputs.loss), step(model, expected)
        assert actual.keys() == wanted.keys()
        for name, gradient in wanted.items():
            assert_close(actual[name], gradient, "float64 gradient")


@every_head
def test_bfloat16_autocast(model_type, auto_class):
    model = tiny_model(model_type, auto_class, **NONE).train()
    inputs, labels = labelled(model)
    found = []
    for skip_logits in (False, True):
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(**inputs, labels=labels, skip_logits=skip_logits).loss
        found.append((loss, step(model, loss)))
    assert_close(found[1][0], found[0][0], "float32")
    for name, gradient in found[0][1].items():
        assert_close(found[1][1][name], gradient, "bfloat16 gradient")


@every_head
def test_a_model_returns_logits_unless_it_is_asked_not_to(model_type, auto_class):
    model = tiny_model(model_type, auto_class)
    inputs, labels = labelled(model)
    tokens = labels.shape[1]
    for training in (False, True):
        for field in (False, True):
            model.train(training).config.skip_logits = field
            for argument in (None, False, True):
                skips = argument or (argument is None and field and training)
                outputs = model(**inputs, labels=labels, skip_logits=argument)
                assert (outputs.logits is None) == bool(skips)
                assert outputs.loss is not None
                others = set(model(**inputs, labels=labels, skip_logits=False)) - {"logits"}
                assert set(outputs) - {"logits"} == others
            source = {"decoder_input_ids": labels.clamp_min(0)} if auto_class == PAIRS else {}
            assert model(**inputs, **source).logits.shape == (2, tokens, model.config.vocab_size)


@pytest.mark.parametrize("model_type", ["bst", "chela", "spade"])
def test_an_adaptive_head_returns_logits_in_training_if_it_is_asked_to(model_type):
    model = tiny_model(model_type, CAUSAL, **NONE, **FIELDS["adaptive"])
    inputs, labels = labelled(model)
    wanted = model(**inputs, labels=labels)
    assert model(**inputs, labels=labels, skip_logits=True).logits is None
    model.train()
    assert model(**inputs, labels=labels).logits is None
    asked = model(**inputs, labels=labels, skip_logits=False)
    assert_close(asked.logits, wanted.logits, "float32 model")
    assert_close(asked.loss, wanted.loss, "float32 model")


@every_head
def test_what_cannot_be_done_is_refused(model_type, auto_class):
    model = tiny_model(model_type, auto_class)
    inputs, labels = labelled(model)
    source = {"decoder_input_ids": labels.clamp_min(0)} if auto_class == PAIRS else {}
    with pytest.raises(ValueError, match="skip_logits must not be True without labels"):
        model(**inputs, **source, skip_logits=True)
    model.loss_function = lambda *args, **kwargs: 2 * ForCausalLMLoss(*args, **kwargs)
    with pytest.raises(ValueError, match="skip_logits must be False for a model with another loss_function"):
        model(**inputs, labels=labels, skip_logits=True)
    assert model(**inputs, labels=labels).loss is not None


@pytest.mark.parametrize("targets", [{"target_modules": ["lm_head"]}, {"modules_to_save": ["lm_head"]}])
@every_head
def test_a_head_with_an_adapter(model_type, auto_class, targets):
    model = tiny_model(model_type, auto_class, tie_word_embeddings=False, **NONE).double()
    targets = {"target_modules": r".*(layers|block)\.0.*(q_proj|output_gate_proj|\.q)", **targets}
    adapted = get_peft_model(model, LoraConfig(r=2, init_lora_weights=False, **targets)).double().train()
    inputs, labels = labelled(model)
    loss = adapted(**inputs, labels=labels, skip_logits=True).loss
    expected = plain_loss(model, inputs, labels)
    assert_close(loss, expected, "float64 gradient")
    actual, wanted = step(adapted, loss), step(adapted, expected)
    assert any("lm_head" in name for name in wanted)
    assert actual.keys() == wanted.keys()
    for name, gradient in wanted.items():
        assert_close(actual[name], gradient, "float64 gradient")


@pytest.mark.parametrize(
    "form",
    some(["short-long convolution", "laplace", "laplace in chunks"], "short-long convolution", "laplace in chunks"),
)
def test_a_compiled_step_is_one_graph(form):
    torch.compiler.reset()
    model = tiny_model("chela", CAUSAL, **NONE, **DECODERS["chela", CAUSAL][form]).train()
    inputs, labels = labelled(model)
    found = []
    for call in (model, torch.compile(model, fullgraph=True, backend="aot_eager")):
        loss = call(**inputs, labels=labels, skip_logits=True).loss
        found.append((loss, step(model, loss)))
    assert_close(found[1][0], found[0][0], "float32 model")
    for name, gradient in found[0][1].items():
        assert_close(found[1][1][name], gradient, "float32 gradient")


@pytest.mark.parametrize("auto_class", [CAUSAL, MASKED])
def test_a_step_without_memory(auto_class):
    model = tiny_model("chela", auto_class, **NONE).to("meta").train()
    tokens = torch.ones(2, 11, dtype=torch.int64, device="meta")
    model(input_ids=tokens, labels=tokens, skip_logits=True).loss.backward()
    assert model.get_output_embeddings().weight.grad.is_meta


def test_processes_with_unequal_numbers_of_chunks(tmp_path):
    done = in_forks("tests.models.losses_divided", str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "found.json").read_text())
    assert found == dict.fromkeys(WRAPPERS, "fine")
