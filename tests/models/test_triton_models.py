"""Every model with Triton's kernels, interpreted, against itself on torch."""

import logging
import os
from collections import defaultdict
from unittest.mock import patch

import pytest
import torch

from hf_hybrid.kernels import dispatch

from ..kernels.interpreter import interpreted
from ..tolerances import assert_close
from .tiny import DECODERS, MODEL_CLASSES, main_output, tiny_inputs, tiny_model

LENGTH = 13
PROMPT = 9

# model type -> what it runs on Triton, over all of its cases
OPS = {
    "bst": {"local_attention"},
    "chela": {"linear_attention", "short_conv"},
    "spade": {"local_attention"},
    "srformer_bart": set(),
    "srformer_t5": set(),
}
# model type -> what has no kernels for some of its cases, and why
LEFT_TO_TORCH = {}
CASES = {
    model_type: [
        (auto_class, case)
        for name, auto_class in MODEL_CLASSES
        if name == model_type
        for case in DECODERS.get((model_type, auto_class), [""])
    ]
    for model_type in OPS
}


def run(model_type, auto_class, case):
    """Outputs and all gradients of a training step; then, where it decodes, of a prompt and token after token."""
    model = tiny_model(model_type, auto_class, **DECODERS.get((model_type, auto_class), {}).get(case, {}))
    inputs = tiny_inputs(model, batch=2, length=LENGTH, target_length=LENGTH)
    whole = main_output(model(**inputs))
    grad = torch.randn(whole.shape, generator=torch.Generator().manual_seed(3))
    trained = {name: x for name, x in model.named_parameters() if x.requires_grad}
    gradients = torch.autograd.grad(whole, trained.values(), grad, allow_unused=True)
    results = {"outputs": whole.detach()}
    results |= {name: x for name, x in zip(trained, gradients, strict=True) if x is not None}
    if case:
        key = "decoder_input_ids" if "decoder_input_ids" in inputs else "input_ids"
        ids, cache, pieces = inputs.pop(key), None, []
        with torch.no_grad():
            for piece in ids.split([PROMPT] + [1] * (LENGTH - PROMPT), dim=1):
                outputs = model(**inputs, **{key: piece}, past_key_values=cache, use_cache=True)
                cache = outputs.past_key_values
                pieces.append(main_output(outputs))
        results["decoded"] = torch.cat(pieces, dim=1)
    return results


@pytest.mark.parametrize("model_type", OPS)
@interpreted
def test_triton_equals_torch(model_type):
    ran = defaultdict(set)
    dispatch._told.clear()
    handler = logging.Handler()
    handler.emit = lambda record: ran[record.args[1]].add(record.args[0])
    dispatch.logger.addHandler(handler)
    dispatch.logger.setLevel(logging.DEBUG)
    for auto_class, case in CASES[model_type]:
        with patch.dict(os.environ, {"HF_HYBRID_BACKEND": "torch"}):
            expected = run(model_type, auto_class, case)
        with patch.dict(os.environ, {"HF_HYBRID_BACKEND": "auto"}):
            actual = run(model_type, auto_class, case)
        assert actual.keys() == expected.keys()
        for name, x in expected.items():
            assert_close(actual[name], x, "float32 decode" if name in ("outputs", "decoded") else "float32 gradient")
    assert ran["triton"] == OPS[model_type]
    assert ran["torch"] == LEFT_TO_TORCH.get(model_type, set())
