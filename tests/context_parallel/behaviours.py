"""What holds for all divided operations: precision, repeatability, recomputation, and messages about bad arguments."""

import re
from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.checkpoint import checkpoint
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.bench_context_parallel import MODELS
from benchmarks.workloads import Stored
from hf_hybrid import ChelaForSequencePairClassification, SpadeForSequencePairClassification, kernels
from hf_hybrid import context_parallel as divided
from hf_hybrid.context_parallel import Shards, Span, count_sent, fetch, group_of, make_shards, meet

from ..models.tiny import tiny_inputs, tiny_model
from ..tolerances import assert_close

LENGTHS = (5, 0, 9)


def _draw(*shape: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)).to(dtype)


def _own(x: torch.Tensor, shards: Shards) -> torch.Tensor:
    return x[:, slice(*shards.own)].clone().requires_grad_()


def _run(shards: Shards, dtype: torch.dtype, repeat: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """Two branches of one input, as in SPADE's global layers; returns own output and gradient."""
    u = _own(_draw(2, sum(LENGTHS), 6, dtype=dtype), shards)
    kernel = _draw(6, 14, dtype=torch.float32 if dtype != torch.float64 else dtype, seed=1)

    def layer(u: torch.Tensor) -> torch.Tensor:
        far = divided.long_conv(u, kernel, shards)
        heads = u.unflatten(-1, (2, 3))
        near = divided.local_attention(heads, heads, heads, shards, radius=3)
        return far + near.flatten(-2) + divided.linear_attention(heads, heads, heads, shards).flatten(-2).to(u.dtype)

    output = checkpoint(layer, u, use_reentrant=False) if repeat else layer(u)
    output.float().square().sum().backward()
    return output.detach(), u.grad


def narrow_dtypes(group: dist.ProcessGroup) -> None:
    """Results in float32 and bfloat16 are those of one process within the table of tolerances."""
    shards = make_shards(LENGTHS[dist.get_rank(group)], group)
    for dtype, rows in ((torch.float32, ("float32", "float32 gradient")), (torch.bfloat16, ("bfloat16",) * 2)):
        u = _draw(2, 14, 2, 3, dtype=dtype).requires_grad_()
        expected = kernels.linear_attention(u, u, u)[0] + kernels.local_attention(u, u, u, radius=3)
        expected.sum().backward()
        own = _own(u.detach(), shards)
        output = divided.linear_attention(own, own, own, shards) + divided.local_attention(
            own, own, own, shards, radius=3
        )
        output.sum().backward()
        assert output.dtype == expected.dtype
        assert_close(output, expected.detach()[:, slice(*shards.own)], rows[0])
        assert_close(own.grad, u.grad[:, slice(*shards.own)], rows[1])


def repeatable(group: dist.ProcessGroup) -> None:
    """Two runs give the same bits, and so does one that recomputes its forward in the backward."""
    shards = make_shards(LENGTHS[dist.get_rank(group)], group)
    runs = [_run(shards, torch.float32, repeat) for repeat in (False, False, True)]
    for output, gradient in runs[1:]:
        assert torch.equal(output, runs[0][0])
        assert torch.equal(gradient, runs[0][1])


def of_a_mesh(group: dist.ProcessGroup) -> None:
    """A mesh of one dimension stands for its group; one of two has no single group."""
    mesh = DeviceMesh.from_group(group, "cpu", mesh_dim_names=("cp",))
    assert group_of(mesh) is not None
    assert make_shards(dist.get_rank(group) + 1, mesh).lengths == (1, 2, 3)
    grid = DeviceMesh("cpu", [[0, 1, 2]], mesh_dim_names=("dp", "cp"), _init_backend=False)
    _refused("mesh must have one dimension", lambda: group_of(grid))


def any_span(group: dist.ProcessGroup) -> None:
    """Processes may ask for tokens that are not their own, in any dimension and of any dtype."""
    rank = dist.get_rank(group)
    shards = make_shards(LENGTHS[rank], group)
    x, ids = _draw(2, 3, 14), torch.arange(28).view(2, 14)
    spans = [Span(5, 14), Span(3, 4), Span(0, 2)]
    own = x[..., slice(*shards.own)].clone().requires_grad_()
    with count_sent() as sent:
        (got,) = fetch(shards, spans, own, dim=2)
    assert torch.equal(got, x[..., slice(*spans[rank])])
    assert sent == divided.Sent(8 * 6 * (3, 0, 9)[rank], 1)
    got.sum().backward()
    wanted = torch.tensor([sum(span.start <= t < span.stop for span in spans) for t in range(14)], dtype=x.dtype)
    assert torch.equal(own.grad, wanted[slice(*shards.own)].expand_as(own))
    (got,) = fetch(shards, spans, ids[:, slice(*shards.own)])
    assert torch.equal(got, ids[:, slice(*spans[rank])])


def other_models(group: dist.ProcessGroup) -> None:
    """Models that cannot read divided sequences say so, on every process."""
    for model_type, auto_class in (
        ("srformer_t5", "AutoModelForSeq2SeqLM"),
        ("srformer_bart", "AutoModelForSeq2SeqLM"),
    ):
        model = tiny_model(model_type, auto_class)
        with divided.context_parallel(group):
            _refused("does not support context_parallel", lambda model=model: model(**tiny_inputs(model)))
            _refused("must not be inside another", lambda: divided.context_parallel(group).__enter__())
    model = tiny_model("spade", "AutoModelForCausalLM")
    cache = model(**tiny_inputs(model)).past_key_values
    with divided.context_parallel(group):
        _refused("past_key_values must be None", lambda: model(**tiny_inputs(model), past_key_values=cache))
        assert model(**tiny_inputs(model)).past_key_values is None
    assert model(**tiny_inputs(model)).past_key_values is not None


def pairs_of_texts(group: dist.ProcessGroup) -> None:
    """Two sequences of different lengths, each divided."""
    for model_type, pair_class in (
        ("chela", ChelaForSequencePairClassification),
        ("spade", SpadeForSequencePairClassification),
    ):
        torch.manual_seed(0)
        _pair(pair_class(tiny_model(model_type, "AutoModelForSequenceClassification").config).double().eval(), group)


def _pair(model: torch.nn.Module, group: dist.ProcessGroup) -> None:
    first, second, labels = torch.randint(3, 60, (2, 14)), torch.randint(3, 60, (2, 5)), torch.tensor([0, 2])
    mask = torch.ones(2, 5, dtype=torch.int64)
    mask[0, 3:] = 0
    inputs = {"input_ids": first, "pair_input_ids": second, "pair_attention_mask": mask}
    expected = model(**inputs, labels=labels)
    expected.loss.backward()
    gradients = {name: x.grad.clone() for name, x in model.named_parameters()}
    model.zero_grad()
    with divided.context_parallel(group):
        output = model(**{name: divided.own_part(x, group) for name, x in inputs.items()}, labels=labels)
    output.loss.backward()
    assert_close(output.logits, expected.logits.detach(), "float64 gradient")
    problems = []
    for name, x in model.named_parameters():
        dist.all_reduce(x.grad, group=group)
        problems += [] if torch.allclose(x.grad, gradients[name], rtol=0, atol=1e-12) else [name]
    assert not problems


def bad_arguments(group: dist.ProcessGroup) -> None:
    """Every process raises the same error, which names the field, the value and the rule."""
    rank = dist.get_rank(group)
    differing = torch.tensor([0, 2, 14] if rank == 1 else [0, 3, 14])
    _refused(
        "cu_seqlens must be the same on all ranks; that of rank 1",
        lambda: make_shards(LENGTHS[rank], group, cu_seqlens=differing),
    )
    _refused(
        "cu_seqlens must rise from 0 to T = 14",
        lambda: make_shards(LENGTHS[rank], group, cu_seqlens=torch.tensor([0, 3, 13])),
    )
    _refused(
        "length must be 0 or more on every rank, and positive on one; got [0, 0, 0]", lambda: make_shards(0, group)
    )
    _refused(
        "a batch must have the same rows on all ranks; rank 1 has 2 and rank 0 has 1",
        lambda: make_shards(LENGTHS[rank], group, rows=2 if rank == 1 else 1),
    )
    assert meet(group, rank + 5) == {0: 5, 1: 6, 2: 7}
    shards = make_shards(LENGTHS[rank], group)
    x = torch.zeros(1, LENGTHS[rank] + 1, 2, 3)
    message = f"query must hold the {LENGTHS[rank]} tokens of rank {rank} in dimension 1"
    for operation in (divided.local_attention, divided.linear_attention, divided.laplace_attention):
        options = {"radius": 2} if operation is divided.local_attention else {}
        _refused(message, lambda op=operation, options=options: op(x, x, x, shards, **options))
    u = torch.zeros(1, LENGTHS[rank], 6)
    _refused("kernel must be (D, taps)", lambda: divided.long_conv(u, torch.zeros(4, 3), shards))
    packed = make_shards(LENGTHS[rank], group, cu_seqlens=torch.tensor([0, 3, 14]))
    _refused("must have a batch of 1", lambda: divided.long_conv(u.expand(2, -1, -1), torch.zeros(6, 3), packed))
    _refused("cu_seqlens must be None", lambda: divided.filter_bank_conv(u, torch.zeros(2, 6, 3), packed))
    heads, mask = u.unflatten(-1, (2, 3)), torch.ones(1, LENGTHS[rank])
    _refused(
        "attention_mask must be None with chunks in packed sequences",
        lambda: divided.local_attention(heads, heads, heads, packed, chunk_size=4, attention_mask=mask),
    )
    _refused("gate must be", lambda: divided.linear_attention(heads, heads, heads, shards, gate=heads))


def stored_memory(group: dist.ProcessGroup) -> None:
    """What a process keeps for the backward is its part of what one process keeps."""
    for model_type, fields in MODELS.items():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **fields))
        ids = torch.randint(3, 60, (1, 6144))
        kept = []
        for own, context in ((ids, nullcontext()), (divided.own_part(ids, group), divided.context_parallel(group))):
            with context, Stored(*model.parameters(), *model.buffers()) as stored:
                loss = model(input_ids=own, labels=own).loss
            loss.backward()
            kept.append(stored.bytes)
        assert kept[1] < 1.15 * kept[0] / 3, f"{model_type} keeps {kept[1]} of {kept[0]} bytes"


def _refused(words: str, call: Callable[[], object]) -> None:
    with pytest.raises(ValueError, match=re.escape(words)):
        call()


BEHAVIOURS = {
    function.__name__: function
    for function in (
        *(narrow_dtypes, repeatable, of_a_mesh, any_span, other_models, pairs_of_texts, bad_arguments, stored_memory),
    )
}
"""Name → a check in a group of three processes that raises AssertionError."""
