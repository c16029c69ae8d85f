"""Runs of the benchmark of recall: equal sizes, how far ablations reach, how a run ends, and what it counts."""

import math
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn

from benchmarks import bench_recall, recall_run
from benchmarks.recall_models import (
    MODELS,
    SEGMENT,
    Compressor,
    Shape,
    ablation_reach,
    build,
    fitted,
    reach,
)
from benchmarks.recall_order import SLOWER
from benchmarks.recall_run import (
    FAR,
    LONGER_TOKENS,
    RECIPES,
    WEIGHT_DECAY,
    Recipe,
    Run,
    accuracies,
    estimated_minutes,
    examples,
    is_done_by,
    optimizer_of,
    shape_of,
    texts,
    train,
)
from hf_hybrid.data.preprocessing import IGNORED_LABEL
from hf_hybrid.data.recall import RECALL, Examples

OWN = [task for task, recipe in RECIPES.items() if recipe.is_own and not recipe.is_encoder_decoder]
ABLATIONS = [name for name, kind in MODELS.items() if kind.ablation_of is not None]
SMALL = Shape(vocab_size=20, length=64, width=32)


# ---- models ----


@pytest.mark.parametrize("task", RECIPES)
def test_models_have_as_many_parameters_as_one_whole_size_allows(task):
    shape = shape_of(task, RECIPES[task])
    for name in MODELS:
        if is_done_by(task, name):
            with torch.device("meta"):
                count = nn.Module.parameters(build(name, shape, seed=0))
                total = sum(parameter.numel() for parameter in count)
            assert abs(total - shape.budget) < 0.015 * shape.budget, name


def test_a_width_too_small_for_the_budget_is_refused():
    with pytest.raises(ValueError, match="CHELA: width 8 leaves no parameters for its last size; budget"):
        fitted("CHELA", Shape(vocab_size=20, length=4096, width=8))


def test_every_ablation_belongs_to_a_model_of_its_kind():
    assert {MODELS[name].ablation_of for name in ABLATIONS} == {"SPADE", "BST", "CHELA", "SRformer"}
    for name in ABLATIONS:
        assert MODELS[MODELS[name].ablation_of].is_encoder_decoder == MODELS[name].is_encoder_decoder


@pytest.mark.parametrize("name", [name for name, kind in MODELS.items() if not kind.is_encoder_decoder])
def test_no_ablation_reaches_what_the_own_tasks_ask_for_and_every_other_model_does(name):
    found = reach(build(name, SMALL, seed=0), length=64)
    if name in ABLATIONS:
        assert 0 < found == ablation_reach(name) <= FAR
    else:
        assert found == 63


@pytest.mark.parametrize("name", [name for name, kind in MODELS.items() if kind.is_encoder_decoder])
def test_the_ablation_of_documents_reads_one_segment_and_every_other_model_all(name):
    """Read from gradients with regard to the documents' embeddings, encoder included."""
    torch.manual_seed(0)
    model = build(name, Shape(vocab_size=20, length=32, width=32), seed=0).double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.02 * torch.randn_like(parameter))
    segments, asked = 32 // SEGMENT, 16
    document = torch.randn(1, 32, 32, dtype=torch.float64, requires_grad=True)
    logits = model(inputs_embeds=document, decoder_input_ids=torch.arange(asked)[None], use_cache=False).logits[0]
    for place in range(asked):
        (gradient,) = torch.autograd.grad(logits[place, 3], document, retain_graph=True)
        sizes = gradient[0].reshape(segments, -1).abs().amax(dim=1)
        read = (sizes > 1e-12 * sizes.max()).nonzero().flatten().tolist()
        assert read == ([place * segments // asked] if name in ABLATIONS else [*range(segments)])


@pytest.mark.parametrize("task", OWN)
def test_own_tasks_ask_within_the_reach_of_ablations_and_mostly_beyond_it(task):
    asked = examples(task, "test", 200, RECIPES[task])
    distances = asked.distances[asked.labels != IGNORED_LABEL]
    reaches = [ablation_reach(name) for name in ABLATIONS if not MODELS[name].is_encoder_decoder]
    assert distances.min() < min(reaches) or task == "copying"  # which has one distance
    assert (distances > FAR).mean() > 0.5


def test_the_compressor_reads_the_last_output_alone():
    model = Compressor(build("Llama", SMALL, seed=0), SMALL.vocab_size)
    seen = []
    model.model.base_model.register_forward_hook(lambda module, inputs, output: seen.append(output.last_hidden_state))
    logits = model(torch.randint(20, (2, 8)))
    (gradient,) = torch.autograd.grad(logits.sum(), seen)
    assert logits.shape == (2, 8, 20)
    assert (gradient[:, :-1] == 0).all() and (gradient[:, -1] != 0).any()  # noqa: PT018
    assert (logits[:, 0] - logits[:, 1]).abs().max() > 1e-3


# ---- what is counted ----


class Even(nn.Module):
    """Answers 1 at every even place, and 0 elsewhere."""

    def forward(self, input_ids, use_cache):
        logits = torch.zeros(*input_ids.shape, 3)
        logits[:, ::2, 1] = 1
        return type("Output", (), {"logits": logits})


def test_accuracies_by_distance():
    labels = np.full((1, 8), IGNORED_LABEL)
    distances = np.full((1, 8), -1)
    labels[0, 2:7] = 1
    distances[0, 2:7] = [1, 2, 40, 3, 0]
    tested = Examples(np.zeros((1, 8), dtype=np.int64), labels, distances, vocab_size=3, chance=0.5)
    wanted = {"accuracy": 3 / 5, "far": 1.0, "at_0": 1.0, "at_1": 1.0, "at_2": 0.0, "at_32": 1.0}
    found = accuracies(Even(), tested)
    # three right answers with a logit of 1 beside two of 0, two wrong ones with equal logits
    assert found.pop("loss") == pytest.approx((3 * math.log(1 + 2 / math.e) + 2 * math.log(3)) / 5)
    assert found == wanted
    documents = replace(tested, document_ids=np.zeros((1, 4), dtype=np.int64))
    with pytest.raises(TypeError):
        accuracies(Even(), documents)  # which reads documents


@pytest.mark.parametrize(("task", "model"), [("latch", "BST"), ("compression", "Llama"), ("sparse_facts", "SRformer")])
def test_a_short_run_trains_and_tests(task, model, monkeypatch):
    monkeypatch.setattr(recall_run, "VALIDATION", 16)
    monkeypatch.setattr(recall_run, "LONGER_TOKENS", 2**12)
    monkeypatch.setattr(recall_run, "LEARNT", -1.0)
    monkeypatch.setattr(recall_run, "_BATCH_TOKENS", 2**10)
    monkeypatch.setitem(RECALL, task, replace(RECALL[task], train=RECALL[task].train and 20, test=16))
    recipe = replace(RECIPES[task], steps=3, batch=8, width=32)
    values = train(Run(task, model, 0, "0.003"), recipe)
    assert values["steps"] == 3
    assert {"accuracy", "validation", "chance", "parameters", "cpu_minutes"} <= values.keys()
    is_short = task == "compression"  # whose tokens are all near, and all that its model has learnt to keep
    assert ("far" in values, {"x2", "x4", "x16"} <= values.keys()) == (not is_short, not is_short)
    assert values["chance"] == examples(task, "test", 1, recipe).chance
    again = train(Run(task, model, 0, "0.003"), recipe)
    assert {**again, "cpu_minutes": 0} == {**values, "cpu_minutes": 0}


def test_tests_read_no_more_tokens_at_once_than_a_batch_has(monkeypatch):
    """Of documents, which may be longer than their questions, too."""
    read = []

    def noted(model, batch):
        read.append(batch.input_ids.size if batch.document_ids is None else batch.document_ids.size)
        return torch.zeros(*batch.input_ids.shape, batch.vocab_size)

    monkeypatch.setattr(recall_run, "_BATCH_TOKENS", 2**12)
    monkeypatch.setattr(recall_run, "_logits", noted)
    for task in ("latch", "sparse_facts"):
        accuracies(nn.Identity(), examples(task, "test", 50, RECIPES[task], length=512))
        assert max(read) == 2**12


def test_longer_tests_have_enough_tokens_and_fill_the_distances_that_training_has_not(monkeypatch):
    tested = []

    def noted(right, model, found):
        tested.append(found.input_ids.size)
        return {"accuracy": 0.9, "far": right, "at_1": float(len(tested))}

    def tests(right):
        monkeypatch.setattr(recall_run, "accuracies", partial(noted, right))
        return recall_run._tests(nn.Identity(), Run("latch", "BST", 0, "0.003"), RECIPES["latch"])

    assert tests(0.51) == {"accuracy": 0.9, "far": 0.51, "at_1": 1.0, "x2": 0.51, "x4": 0.51, "x16": 0.51}
    assert tested == [1280 * 128, *[LONGER_TOKENS] * 3]
    assert tests(0.5) == {"accuracy": 0.9, "far": 0.5, "at_1": 5.0}  # not learnt


def faked_training(monkeypatch, validations):
    """Let validation find these shares of right answers, and return the learning rates of all updates."""
    rates, left = [], iter(validations)

    def update(model, batch, optimizer):
        rates.append(rate(optimizer))
        optimizer.step()  # without gradients, it changes nothing
        return True

    monkeypatch.setattr(recall_run, "_update", update)
    monkeypatch.setattr(recall_run, "accuracies", lambda *_: {"accuracy": next(left), "loss": 0.5})
    monkeypatch.setattr(recall_run, "_tests", lambda *_: {"accuracy": 0.75})
    return rates


def rate(optimizer):
    (found,) = {group["lr"] for group in optimizer.param_groups}
    return found


def test_once_a_task_is_solved_the_rate_falls_to_zero(monkeypatch):
    rates = faked_training(monkeypatch, [0.5, 0.99, 0.97])
    values = train(Run("latch", "Llama", 0, "0.004"), Recipe(steps=160, batch=2, width=32))
    found = {name: values[name] for name in ("solved_step", "steps", "validation", "accuracy")}
    assert found == {"solved_step": 20, "steps": 36, "validation": 0.97, "accuracy": 0.75}
    last = rates[-16:]
    assert rates[15:17] == pytest.approx([0.004 * 15 / 16, 0.004])  # the end of the warm-up
    assert np.diff(last) == pytest.approx(np.full(15, -last[0] / 16))
    assert last[-1] == pytest.approx(last[0] / 16)


def test_far_answers_decide_whether_a_task_is_solved(monkeypatch):
    faked_training(monkeypatch, [])
    monkeypatch.setattr(recall_run, "accuracies", lambda *_: {"accuracy": 0.9, "far": 0.995, "loss": 0.5})
    values = train(Run("latch", "Llama", 0, "0.004"), Recipe(steps=160, batch=2, width=32))
    assert (values["solved_step"], values["validation"]) == (10, 0.995)


@pytest.mark.parametrize(("here", "is_solved"), [(0.98, False), (0.99, True)])
def test_documents_are_solved_with_the_segment_that_is_read(here, is_solved, monkeypatch):
    faked_training(monkeypatch, [])
    found = {"accuracy": 0.99, "far": 0.995, "at_0": here, "loss": 0.5}
    monkeypatch.setattr(recall_run, "accuracies", lambda *_: found)
    values = train(Run("facts", "T5", 0, "0.004"), Recipe(steps=160, batch=2, width=32, is_encoder_decoder=True))
    assert (values["validation"], "solved_step" in values) == (here, is_solved)


def test_a_run_that_solves_nothing_takes_all_steps(monkeypatch):
    rates = faked_training(monkeypatch, [0.5] * 16)
    values = train(Run("latch", "Llama", 0, "0.004"), Recipe(steps=160, batch=2, width=32))
    assert (values["steps"], values["accuracy"], len(rates)) == (160, 0.75, 160)
    assert "solved_step" not in values
    assert rates[-1] == pytest.approx(0, abs=1e-5)


@pytest.mark.parametrize(
    ("validations", "steps", "is_tested"), [([0.5, 0.5], 20, False), ([0.5, 0.99, 0.98], 36, True)]
)
def test_a_rate_that_another_one_overtakes_ends_untested(validations, steps, is_tested, monkeypatch):
    faked_training(monkeypatch, validations)
    run = Run("latch", "Llama", 0, "0.004", overtaken=15)
    values = train(run, Recipe(steps=160, batch=2, width=32))
    assert (values["steps"], "accuracy" in values) == (steps, is_tested)
    assert bench_recall.row_of(run, RECIPES["latch"], values)["outcome"] == ("ok" if is_tested else SLOWER)


@pytest.mark.parametrize("name", ["SPADE", "BST", "CHELA", "SRformer"])
def test_vectors_and_state_spaces_are_not_decayed(name):
    task = "facts" if name == "SRformer" else "latch"
    model = build(name, shape_of(task, RECIPES[task]), seed=0)
    names = {id(parameter): label for label, parameter in model.named_parameters()}
    decayed, kept = set(), set()
    for group in optimizer_of(model, 0.001).param_groups:
        found = {names[id(parameter)] for parameter in group["params"]}
        assert group["weight_decay"] in (0.0, WEIGHT_DECAY)
        if group["weight_decay"]:
            decayed |= found
        else:
            kept |= found
    trained = {label for label, parameter in model.named_parameters() if parameter.requires_grad}
    assert decayed | kept == trained
    assert not decayed & kept
    assert {label for label in trained if model.get_parameter(label).ndim < 2} <= kept
    ssm = model.ssm_parameters() if hasattr(model, "ssm_parameters") else ()
    assert {names[id(parameter)] for parameter in ssm if parameter.requires_grad} <= kept
    assert any(label.endswith(("wq.weight", "q_proj.weight", "q.weight")) for label in decayed) or name == "CHELA"
    compressor = Compressor(model, 20) if name == "CHELA" else None
    if compressor is not None:
        groups = optimizer_of(compressor, 0.001).param_groups
        assert sum(len(group["params"]) for group in groups) == len(trained) + len([*compressor.decoder.parameters()])


def test_a_run_that_diverges_has_no_accuracy():
    values = train(Run("latch", "Llama", 0, "1e30"), Recipe(steps=9, batch=2, width=32))
    assert values.keys() == {"parameters"}


def test_texts_of_the_splits_do_not_overlap():
    parts = texts()
    assert all(len(part) > 16 * RECALL["needle"].length + 1 for part in parts.values())
    paragraphs = {split: set(part.split(b"\n\n")) for split, part in parts.items()}
    assert len(paragraphs["test"]) > 100
    for first, second in (("train", "validation"), ("train", "test"), ("validation", "test")):
        assert not paragraphs[first] & paragraphs[second]


def test_the_estimate_is_of_all_steps():
    recipe = Recipe(steps=10**6, batch=4, width=32)
    whole = estimated_minutes("latch", "Llama", recipe)
    few = estimated_minutes("latch", "Llama", replace(recipe, steps=10**4))
    assert 0 < few < whole / 5
