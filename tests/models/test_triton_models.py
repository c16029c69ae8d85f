"""Every model with Triton's kernels, interpreted, against itself on torch."""

import logging
import os
from collections import defaultdict
from unittest.mock import patch

import pytest
import torch

from hf_hybrid.kernels import dispatch

from ..kernels.interpreter import interpreted
from ..matrix import some
from ..tolerances import assert_close
from .tiny import DECODERS, MODEL_CLASSES, main_output, tiny_inputs, tiny_model

LENGTH = 13
PROMPT = 11  # of the tokens after it, the last begins a chunk and a window

ATTENTION = {"local_attention", "local_attention_step"}
# model type -> what it runs on Triton, over all of its cases
OPS = {
    "bst": ATTENTION | {"filter_bank_conv", "long_conv", "s4_kernel", "ssm_step"},
    "chela": {"linear_attention", "long_conv", "short_conv", "ssm_step"},
    "spade": ATTENTION | {"diagonal_scan", "long_conv", "s4_kernel", "ssm_step"},
    "srformer_bart": {"segment_recurrence", "segment_step"},
    "srformer_t5": {"segment_recurrence", "segment_step"},
}
# model type -> what some of its cases leave to torch
LEFT_TO_TORCH = {"chela": {"laplace_attention", "linear_attention"}}
CLASSIFIER = ("AutoModelForSequenceClassification", "")
# cases that together run every operation on Triton
FEWEST = {
    "bst": [("AutoModelForCausalLM", "multi head"), CLASSIFIER],
    "chela": [("AutoModelForCausalLM", "s4d"), ("AutoModelForCausalLM", "laplace"), CLASSIFIER],
    "spade": [("AutoModelForCausalLM", "s5"), ("AutoModelForSeq2SeqLM", "state space and window")],
    "srformer_bart": [("AutoModelForSeq2SeqLM", "complements")],
    "srformer_t5": [("AutoModelForSeq2SeqLM", "complements")],
}
# what makes their models smaller; of BST's two layers only the second has context states
SMALLER = {
    "bst": {"hidden_size": 16},
    "chela": {"num_hidden_layers": 1},
    "spade": {"num_hidden_layers": 1},
    "srformer_bart": {"encoder_layers": 1, "decoder_layers": 1},
    "srformer_t5": {"num_layers": 1},
}
# of all, beside the first case of every class: those that run other kernels, or ask them for something else
MORE = {
    "bst": ["multi head", "multi filter", "without the query's own key"],
    "chela": ["heads", "s4d", "laplace"],
    "spade": ["window", "chunk", "s4d", "s5", "hyena", "state space and window"],
    "srformer_bart": ["complements"],
    "srformer_t5": ["complements"],
}


def all_cases(model_type):
    """Of the classes that only add a head, one stands for all."""
    for name, auto_class in MODEL_CLASSES:
        if name == model_type and auto_class.endswith(("CausalLM", "Seq2SeqLM", "SequenceClassification")):
            first, *others = DECODERS.get((model_type, auto_class), [""])
            yield from ((auto_class, case) for case in (first, *others) if case == first or case in MORE[model_type])


def run(model_type, auto_class, case, **fields):
    """Outputs and all gradients of a training step; then, where it decodes, of a prompt and token after token."""
    fields |= DECODERS.get((model_type, auto_class), {}).get(case, {})
    model = tiny_model(model_type, auto_class, **fields)
    inputs = tiny_inputs(model, batch=2, length=LENGTH, target_length=LENGTH)
    whole = main_output(model(**inputs))
    grad = torch.randn(whole.shape, generator=torch.Generator().manual_seed(3))
    trained = [x for x in model.parameters() if x.requires_grad]
    gradients = torch.autograd.grad(whole, trained, grad, allow_unused=True)
    # all in one, since many a gradient is nothing but rounding: that of a key's bias, or of a window of one
    gradients = torch.cat([x.flatten() for x in gradients if x is not None])
    results = {"outputs": whole.detach(), "gradients": gradients}
    if case:
        key = "decoder_input_ids" if "decoder_input_ids" in inputs else "input_ids"
        ids, cache, pieces = inputs.pop(key), None, []
        with torch.no_grad():
            if "input_ids" in inputs:  # a document, which is read once
                inputs["encoder_outputs"] = model.get_encoder()(inputs.pop("input_ids"))
            for piece in ids.split([PROMPT] + [1] * (LENGTH - PROMPT), dim=1):
                outputs = model(**inputs, **{key: piece}, past_key_values=cache, use_cache=True)
                cache = outputs.past_key_values
                pieces.append(main_output(outputs))
        results["decoded"] = torch.cat(pieces, dim=1)
    return results


@pytest.mark.parametrize("cases", some(["fewest", "all"], "fewest"))
@pytest.mark.parametrize("model_type", OPS)
@interpreted
def test_triton_equals_torch(model_type, cases):
    ran = defaultdict(set)
    dispatch._told.clear()
    handler = logging.Handler()
    handler.emit = lambda record: ran[record.args[1]].add(record.args[0])
    dispatch.logger.addHandler(handler)
    dispatch.logger.setLevel(logging.DEBUG)
    fewest = cases == "fewest"
    fields = SMALLER[model_type] if fewest else {}
    for auto_class, case in FEWEST[model_type] if fewest else all_cases(model_type):
        with patch.dict(os.environ, {"HF_HYBRID_BACKEND": "torch"}):
            expected = run(model_type, auto_class, case, **fields)
        with patch.dict(os.environ, {"HF_HYBRID_BACKEND": "auto"}):
            actual = run(model_type, auto_class, case, **fields)
        for name, x in expected.items():
            assert_close(actual[name], x, "float32 gradient" if name == "gradients" else "float32 decode")
    assert ran["triton"] == OPS[model_type], ran["triton"] ^ OPS[model_type]
    assert ran["torch"] == LEFT_TO_TORCH.get(model_type, set())
