"""Models on divided sequences: which ones, and how each is compared with one process."""

from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist

from hf_hybrid.context_parallel import context_parallel, own_part
from hf_hybrid.models import losses

from ..models.tiny import DECODERS, tiny_model
from ..tolerances import assert_close

TOKENS, TARGETS = 23, 9
SEQUENCES, ANSWERS = "AutoModelForSequenceClassification", "AutoModelForQuestionAnswering"
PAIRS = "AutoModelForSeq2SeqLM"
CAUSAL, MASKED, TAGGING = "AutoModelForCausalLM", "AutoModelForMaskedLM", "AutoModelForTokenClassification"
# variants that cannot be divided: what the error says
REFUSED = {
    ("spade", "lstm"): "context_parallel_size must be 1 with LSTM",
    ("spade", "full"): "context_parallel_size must be 1 with full attention",
    ("spade", "full attention alone"): "context_parallel_size must be 1 with full attention",
}
WINDOWS_BEFORE = {
    name
    for name, fields in DECODERS["bst", CAUSAL].items()
    if fields.get("context_type") == "multi_filter" or fields.get("context_shift") == "window"
}
ENCODERS: dict[str, dict[str, dict[str, Any]]] = {
    "spade": {
        "window": {},
        "chunk": {"attention_type": "chunk", "ssm_freeze": "none"},
        "s5": {"ssm_type": "s5", "ssm_blocks": 2, "ssm_freeze": "none"},
        "s4d": {"ssm_type": "s4d", "combine_mode": "add"},
        "hyena": {"ssm_type": "hyena", "ssm_l_max": 30, "ssm_freeze": "none"},
    },
    "chela": {
        "short-long convolution": {},
        "s4d": {"mixer": "s4d", "mixer_state_size": 8},
        "moving average": {"mixer": "ema"},
        "laplace in chunks": {"attention_fn": "laplace", "chunk_size": 5},
    },
}
PAIRED: dict[str, dict[str, Any]] = {
    "full decoder": {},
    "window decoder": {"decoder_attention_type": "window", "ssm_freeze": "none"},
    "absolute decoder": {"decoder_position": "learned_absolute", "attention_type": "chunk"},
    "global decoder": {"decoder_attention_type": "chunk", "decoder_global_layers": [0], "ssm_freeze": "none"},
}


class Variant(NamedTuple):
    """A model and its config."""

    model_type: str
    auto_class: str
    name: str
    fields: dict[str, Any]


VARIANTS = [
    *(Variant(kind, CAUSAL, *item) for kind in ("spade", "chela", "bst") for item in DECODERS[kind, CAUSAL].items()),
    *(Variant(kind, MASKED, *item) for kind in ENCODERS for item in ENCODERS[kind].items()),
    *(Variant(kind, TAGGING, "default", {}) for kind in ENCODERS),
    *(Variant(kind, SEQUENCES, name, {"pooling": name}) for kind in ENCODERS for name in ("mean", "first", "last")),
    *(Variant(kind, ANSWERS, "default", {}) for kind in ENCODERS),
    *(Variant("spade", PAIRS, *item) for item in PAIRED.items()),
]
# how a batch is made of 23 tokens
BATCHES = ("plain", "padded", "packed", "checkpointed")


def model_cases(full: bool) -> list[tuple[str, Variant, str, int]]:
    """Name, variant, batch and number of processes of each check."""
    found = []
    for index, variant in enumerate(VARIANTS):
        for number, batch in enumerate(BATCHES):
            for size in (2, 3, 8):
                ordinary = size == 3 and index % len(BATCHES) == number  # the kinds of batch in turn
                few = size < 8 or index % len(BATCHES) == number
                if ordinary != full and few:
                    name = f"{variant.model_type} {variant.auto_class} {variant.name}, {batch}, {size} processes"
                    found.append((name, variant, batch, size))
    return found


def check_model(variant: Variant, batch: str, group: dist.ProcessGroup) -> str:
    """Compare logits, loss and the sum of gradients with one process's; return what is wrong."""
    torch.manual_seed(0)
    model = tiny_model(variant.model_type, variant.auto_class, **variant.fields).double().eval()
    rows = 1 if batch == "packed" else 2
    ids = torch.randint(3, 60, (rows, TOKENS))
    labels = torch.randint(0, 3, (rows, TOKENS)) if variant.auto_class == TAGGING else ids.clone()
    if variant.auto_class == PAIRS:
        labels = torch.randint(3, 60, (rows, TARGETS))
    labels[:, ::7] = -100
    inputs = {"input_ids": ids, "labels": labels}
    whole = {}  # what every process gets
    if variant.auto_class == SEQUENCES:
        whole["labels"] = torch.randint(0, 3, (rows,))
    elif variant.auto_class == ANSWERS:
        whole |= {"start_positions": torch.tensor([3, 9][:rows]), "end_positions": torch.tensor([20, 9][:rows])}
    if whole:
        del inputs["labels"]
    if batch == "padded":
        mask = torch.ones(rows, TOKENS, dtype=torch.int64)
        mask[1, 15:] = 0
        if variant.name not in WINDOWS_BEFORE:
            mask[0, :4] = 0
        inputs["attention_mask"] = mask
        if variant.auto_class != PAIRS:
            labels[mask == 0] = -100
    if batch == "packed":
        inputs["position_ids"] = torch.cat([torch.arange(n) for n in (3, 11, 1, 8)])[None]
    refusal = REFUSED.get((variant.model_type, variant.name))
    if variant.model_type == "bst" and variant.name in WINDOWS_BEFORE and batch == "packed":
        refusal = "context states of the window before"
    if (whole or variant.auto_class == PAIRS) and batch == "packed":
        refusal = "sequences must not be packed"
    own = {name: _part(x, batch, group) for name, x in inputs.items()}
    if refusal is not None:
        with pytest.raises(ValueError, match=refusal):
            _step(model, own | whole, group)
        return ""
    if batch == "checkpointed" and variant.auto_class in (CAUSAL, MASKED):
        losses.loss_chunk_size = lambda *_: 4
        whole["skip_logits"] = True
    expected, gradients = _step(model, inputs | whole, None)
    if batch == "checkpointed":
        model.train()
        model.gradient_checkpointing_enable({"use_reentrant": False})
        for module in model.modules():
            if isinstance(module, torch.nn.Dropout):
                module.p = 0.0
            if hasattr(module, "config"):
                module.config.attention_dropout = 0.0
    output, parts = _step(model, own | whole, group)
    # wrappers that reduce gradients wait for all of them
    missing = sorted(gradients.keys() - parts.keys())
    problem = f"no gradient of {missing}" if missing else ""
    for name in sorted(gradients):
        part = parts.get(name)
        total = torch.zeros_like(gradients[name]) if part is None else part.clone()
        dist.all_reduce(total, group=group)
        try:
            assert_close(total, gradients[name], "float64 gradient")
        except AssertionError as error:
            problem = problem or f"gradient of {name}: {error}"
    try:
        assert_close(output.loss, expected.loss, "float32")  # transformers computes losses in float32
        for name in ("logits", "start_logits", "end_logits"):
            if expected.get(name) is not None and output.get(name) is not None:
                wanted = expected[name] if variant.auto_class == SEQUENCES else _part(expected[name], batch, group)
                assert_close(output[name], wanted, "float64 gradient")
    except AssertionError as error:
        problem = problem or str(error)
    return problem


def _part(x: torch.Tensor, batch: str, group: dist.ProcessGroup) -> torch.Tensor:
    """Own tokens: an even part, but for plain batches, of which the last process has none."""
    if batch != "plain":
        return own_part(x, group)
    length = -(-TOKENS // (dist.get_world_size(group) - 1))
    start = min(TOKENS, dist.get_rank(group) * length)
    return x[:, start : start + length].contiguous()


def _step(
    model: torch.nn.Module, inputs: dict[str, torch.Tensor], group: dist.ProcessGroup | None
) -> tuple[Any, dict[str, torch.Tensor]]:
    model.zero_grad()
    if group is None:
        output = model(**inputs)
    else:
        with context_parallel(group):
            output = model(**inputs)
    output.loss.backward()
    return output, {name: x.grad.clone() for name, x in model.named_parameters() if x.grad is not None}
