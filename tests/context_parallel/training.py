"""Training on divided sequences: many steps, and beside data parallelism on a mesh of two dimensions."""

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from hf_hybrid.context_parallel import context_parallel, own_part
from hf_hybrid.models.checkpointing import SAVED

from ..models.tiny import tiny_model
from ..tolerances import assert_close

CAUSAL = "AutoModelForCausalLM"
FIELDS: dict[str, dict[str, Any]] = {"spade": {"ssm_freeze": "none"}, "chela": {}, "bst": {}}


def _model(model_type: str, saved: str | None = None) -> torch.nn.Module:
    """A model without dropout; it trains with activation checkpointing that keeps something, if that is named."""
    model = tiny_model(model_type, CAUSAL, dropout=0.0, attention_dropout=0.0, **FIELDS[model_type]).double().eval()
    if saved is None:
        return model
    model.config.use_cache = False  # which checkpointed layers cannot fill
    model.activation_checkpointing_enable({"save": saved})
    return model.train()


def _ids(rows: int, seed: int) -> torch.Tensor:
    return torch.randint(3, 60, (rows, 21), generator=torch.Generator().manual_seed(seed))


def many_steps(group: dist.ProcessGroup, grid: DeviceMesh) -> None:
    """Fifty steps of an optimizer end at the weights of one process."""
    for model_type in FIELDS:
        whole, divided = _model(model_type), _model(model_type)
        optimizers = [torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9) for model in (whole, divided)]
        for step in range(50):
            ids = _ids(2, step)
            for optimizer in optimizers:
                optimizer.zero_grad()
            whole(input_ids=ids, labels=ids, skip_logits=True).loss.backward()  # in float64, unlike other losses
            own = own_part(ids, group)
            with context_parallel(group):
                loss = divided(input_ids=own, labels=own, skip_logits=True).loss
            loss.backward()
            for weight in divided.parameters():
                if weight.grad is not None:
                    dist.all_reduce(weight.grad, group=group)
            for optimizer in optimizers:
                optimizer.step()
        for (name, weight), expected in zip(divided.named_parameters(), whole.parameters(), strict=True):
            _close(f"{model_type} {name}", weight, expected, "float64 gradient")


def _in_ddp(model: torch.nn.Module, mesh: DeviceMesh) -> torch.nn.Module:
    return DistributedDataParallel(model, process_group=mesh.get_group())


def _in_shards(model: torch.nn.Module, mesh: DeviceMesh) -> torch.nn.Module:
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def beside_ddp(group: dist.ProcessGroup, grid: DeviceMesh) -> None:
    """DDP takes the mean over all processes of a loss times the processes per sequence."""
    _beside(group, grid, "chela", _in_ddp)


def beside_fsdp(group: dist.ProcessGroup, grid: DeviceMesh) -> None:
    """So does FSDP2, whose shards lie on all processes."""
    for model_type in ("spade", "bst"):
        _beside(group, grid, model_type, _in_shards)


def with_kept_activations(group: dist.ProcessGroup, grid: DeviceMesh) -> None:
    """Layers that are computed again for the backward, but for what they keep, exchange the same once more."""
    for saved in SAVED:
        _beside(group, grid, "chela", _in_ddp, saved)
        for model_type in ("spade", "bst"):
            _beside(group, grid, model_type, _in_shards, saved)


def _beside(group: dist.ProcessGroup, mesh: DeviceMesh, model_type: str, wrap: Any, saved: str | None = None) -> None:
    flat = DeviceMesh.from_group(group, "cpu", mesh_dim_names=("all",))
    ids = _ids(2, 0)
    whole = _model(model_type)
    whole(input_ids=ids, labels=ids).loss.backward()
    expected = {name: x.grad for name, x in whole.named_parameters() if x.grad is not None}
    wrapped = wrap(_model(model_type, saved), flat)
    row = mesh.get_local_rank("dp")
    own = own_part(ids[row : row + 1], mesh["cp"])
    with context_parallel(mesh["cp"]):
        loss = wrapped(input_ids=own, labels=own).loss
    (loss * mesh["cp"].size()).backward()
    found = {name.removeprefix("module."): x.grad for name, x in wrapped.named_parameters()}
    for name, gradient in expected.items():
        gradient_here = found[name]
        assert gradient_here is not None, name
        full = gradient_here.full_tensor() if isinstance(gradient_here, DTensor) else gradient_here
        _close(f"{model_type} {name}", full, gradient, "float64 gradient")


def _close(name: str, actual: torch.Tensor, expected: torch.Tensor, row: str) -> None:
    try:
        assert_close(actual, expected, row)
    except AssertionError as error:
        raise AssertionError(f"{name}: {error}") from None


TRAINING = {
    False: {function.__name__: function for function in (beside_ddp, beside_fsdp, with_kept_activations)},
    True: {many_steps.__name__: many_steps},
}
"""Whether it runs in the full run alone → name → a check in four processes that raises AssertionError.

It takes their group, and a mesh of them with two dimensions.
"""
