"""Models on divided sequences: which ones, and how each is compared with one process."""

from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist

from hf_hybrid.context_parallel import context_parallel
from hf_hybrid.models import losses

from ..models.tiny import DECODERS, tiny_model
from ..tolerances import assert_close
from .layouts import KINDS, Layout, drawn, model_layouts

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
        "batch norm": {"norm_type": "batch_norm", "combine_mode": "concat", "is_encoder_decoder": False},
        "batch norm before": {"norm_type": "batch_norm", "norm_position": "pre", "is_encoder_decoder": False},
        "hyena": {"ssm_type": "hyena", "ssm_l_max": 30, "ssm_freeze": "none"},
    },
    "chela": {
        "short-long convolution": {},
        "s4d": {"mixer": "s4d", "mixer_state_size": 8},
        "moving average": {"mixer": "ema"},
        "laplace in chunks": {"attention_fn": "laplace", "chunk_size": 5},
        "batch norm": {"norm_type": "batch_norm"},
        "batch norm after, and behind the branches": {
            "norm_type": "batch_norm",
            "norm_position": "post",
            "short_branch_norm": True,
        },
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
    Variant("bst", SEQUENCES, "default", {}),
    *(Variant(kind, ANSWERS, "default", {}) for kind in ENCODERS),
    *(Variant("spade", PAIRS, *item) for item in PAIRED.items()),
]
DRAWN = tuple(f"drawn {number}" for number in range(3))


def _even(tokens: int, size: int) -> tuple[int, ...]:
    part = -(-tokens // size)
    return tuple(max(0, min(part, tokens - rank * part)) for rank in range(size))


def _layout(variant: Variant, batch: str, size: int) -> Layout:
    mask = torch.ones(2, TOKENS, dtype=torch.int64)
    mask[1, 15:] = 0
    if variant.name not in WINDOWS_BEFORE:
        mask[0, :4] = 0
    if batch in ("plain", "padded"):  # 23 tokens, of which the last process has none
        return Layout(batch, (*_even(TOKENS, size - 1), 0), (*_even(TARGETS, size - 1), 0), (), mask)
    if not batch.startswith("drawn"):
        return Layout(batch, _even(TOKENS, size), _even(TARGETS, size), (3, 11, 1, 8), mask)
    name = f"{variant.model_type} {variant.auto_class} {variant.name} {size}"
    strategy = model_layouts(size, pads_left=variant.name not in WINDOWS_BEFORE)
    return drawn(strategy, name, 1 + int(batch.split()[1]))


def model_cases(full: bool) -> list[tuple[str, Variant, str, int]]:
    """Name, variant, batch and number of processes of each check."""
    found = []
    for index, variant in enumerate(VARIANTS):
        for number, batch in enumerate(KINDS):
            for size in (2, 3, 4, 8):
                ordinary = size == 3 and index % len(KINDS) == number  # the kinds of batch in turn
                few = size < 4 or index % len(KINDS) == number
                if ordinary != full and few:
                    name = f"{variant.model_type} {variant.auto_class} {variant.name}, {batch}, {size} processes"
                    found.append((name, variant, batch, size))
        for number, batch in enumerate(DRAWN):
            for size in (2, 3, 4, 8):
                ordinary = size == 4 and index % (6 * len(DRAWN)) == 5 * number  # one of every sixth variant
                if ordinary != full:
                    name = f"{variant.model_type} {variant.auto_class} {variant.name}, {batch}, {size} processes"
                    found.append((name, variant, batch, size))
    return found


def check_model(variant: Variant, batch: str, group: dist.ProcessGroup) -> str:
    """Compare logits, loss and the sum of gradients with one process's; return what is wrong."""
    torch.manual_seed(0)
    model = tiny_model(variant.model_type, variant.auto_class, **variant.fields).double().eval()
    layout = _layout(variant, batch, dist.get_world_size(group))
    batch, tokens = layout.kind, sum(layout.lengths)
    rows = 1 if batch == "packed" else 2
    ids = torch.randint(3, 60, (rows, tokens))
    labels = torch.randint(0, 3, (rows, tokens)) if variant.auto_class == TAGGING else ids.clone()
    if variant.auto_class == PAIRS:
        labels = torch.randint(3, 60, (rows, sum(layout.targets)))
    labels[:, ::7] = -100
    inputs = {"input_ids": ids, "labels": labels}
    whole = {}  # what every process gets
    if variant.auto_class == SEQUENCES:
        whole["labels"] = torch.randint(0, 3, (rows,))
    elif variant.auto_class == ANSWERS:
        start, end = torch.tensor([3, 9][:rows]) % tokens, torch.tensor([20, 9][:rows]) % tokens
        whole |= {"start_positions": start, "end_positions": end}
    if whole:
        del inputs["labels"]
    if batch == "padded":
        inputs["attention_mask"] = layout.mask
        if variant.auto_class != PAIRS:
            labels[layout.mask == 0] = -100
    labels[-1, -1] = 2  # so that there is one
    if batch == "packed":
        inputs["position_ids"] = torch.cat([torch.arange(n) for n in layout.pieces])[None]
    refusal = REFUSED.get((variant.model_type, variant.name))
    if variant.model_type == "bst" and variant.name in WINDOWS_BEFORE and batch == "packed":
        refusal = "context states of the window before"
    if (whole or variant.auto_class == PAIRS) and batch == "packed":
        refusal = "sequences must not be packed"
    if len(layout.pieces) == 1:  # one sequence is not packed
        refusal = REFUSED.get((variant.model_type, variant.name))
    pair = variant.auto_class == PAIRS
    divided = {name: layout.targets if pair and name == "labels" else layout.lengths for name in inputs}
    own = {name: _part(x, divided[name], group) for name, x in inputs.items()}
    if refusal is not None:
        with pytest.raises(ValueError, match=refusal):
            _step(model, own | whole, group)
        return ""
    if batch == "checkpointed" and variant.auto_class in (CAUSAL, MASKED):
        losses.loss_chunk_size = lambda *_: 4
        whole["skip_logits"] = True
    if batch == "checkpointed" or "batch norm" in variant.name:
        model.train()
        for module in model.modules():
            if isinstance(module, torch.nn.Dropout):
                module.p = 0.0
            if hasattr(module, "config"):
                module.config.attention_dropout = 0.0
    buffers = {name: x.clone() for name, x in model.named_buffers()}
    expected, gradients = _step(model, inputs | whole, None)
    changed = {name: x.clone() for name, x in model.named_buffers()}
    for name, x in model.named_buffers():
        x.copy_(buffers[name])
    if batch == "checkpointed":
        model.gradient_checkpointing_enable({"use_reentrant": False})
    output, parts = _step(model, own | whole, group)
    # wrappers that reduce gradients wait for all of them
    missing = sorted(gradients.keys() - parts.keys())
    problem = f"no gradient of {missing}" if missing else ""
    totals = torch.cat([parts.get(name, torch.zeros_like(x)).flatten() for name, x in gradients.items()])
    dist.all_reduce(totals, group=group)
    for (name, x), total in zip(gradients.items(), totals.split([x.numel() for x in gradients.values()]), strict=True):
        try:
            assert_close(total.view_as(x), x, "float64 gradient")
        except AssertionError as error:
            problem = problem or f"gradient of {name}: {error}"
    try:
        for name, x in model.named_buffers():  # statistics of batch norms
            assert_close(x, changed[name], "float64 gradient")
        # transformers computes losses in float32, but not those in chunks
        assert_close(output.loss, expected.loss, "float64 gradient" if "skip_logits" in whole else "float32")
        for name in ("logits", "start_logits", "end_logits"):
            if expected.get(name) is not None and output.get(name) is not None:
                of_rank = layout.targets if pair else layout.lengths
                wanted = expected[name] if variant.auto_class == SEQUENCES else _part(expected[name], of_rank, group)
                assert_close(output[name], wanted, "float64 gradient")
    except AssertionError as error:
        problem = problem or str(error)
    return problem


def _part(x: torch.Tensor, lengths: tuple[int, ...], group: dist.ProcessGroup) -> torch.Tensor:
    return x.split(lengths, dim=1)[dist.get_rank(group)].contiguous()


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
