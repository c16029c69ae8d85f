"""Two processes compute the loss of unequal shares of a batch: ``python -m tests.models.losses_divided FOLDER``.

The first process leaves a table in the folder: wrapper → "fine", or what went wrong.
"""

import json
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from hf_hybrid.models import losses

from ..tolerances import assert_close
from ..torchrun import fork, leave
from .tiny import tiny_model


def _ddp(model: nn.Module) -> nn.Module:
    return DistributedDataParallel(model)


def _sharded(model: nn.Module) -> nn.Module:
    for layer in model.model.layers:
        fully_shard(layer)
    return fully_shard(model)


def _sharded_head(model: nn.Module) -> nn.Module:
    """Sharded, with the head as a unit of its own: each of its calls gathers weights from both processes."""
    fully_shard(model.lm_head)
    return _sharded(model)


WRAPPERS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "DDP": _ddp,
    "FSDP": _sharded,
    "FSDP, the head a unit": _sharded_head,
}


def check(wrapper: Callable[[nn.Module], nn.Module]) -> None:
    """Compare the gradients of both processes' shares, one of four tokens and one of twenty, with the whole's."""
    losses.loss_chunk_size = lambda vocab_size, hidden_size: 4

    def build() -> nn.Module:
        fields = {"dropout": 0.0, "attention_dropout": 0.0, "tie_word_embeddings": False}
        return tiny_model("spade", "AutoModelForCausalLM", **fields).train()

    rank, whole = dist.get_rank(), build()
    shares = [torch.randint(2, 64, (1, count), generator=torch.Generator().manual_seed(3)) for count in (4, 20)]
    count = sum(share.shape[1] - 1 for share in shares)
    for share in shares:
        whole(input_ids=share, labels=share, num_items_in_batch=count).loss.backward()
    expected = {name: parameter.grad for name, parameter in whole.named_parameters() if parameter.grad is not None}
    wrapped = wrapper(build())
    mine = shares[rank]
    wrapped(input_ids=mine, labels=mine, num_items_in_batch=count, skip_logits=True).loss.backward()
    parameters = {name.removeprefix("module."): parameter for name, parameter in wrapped.named_parameters()}
    for name, gradient in expected.items():
        found = parameters[name].grad
        found = found.full_tensor() if isinstance(found, DTensor) else found
        assert_close(2 * found, gradient, "float32 gradient")  # they average over processes


def work(folder: Path) -> None:
    """Check every wrapper as one of the processes."""
    dist.init_process_group("gloo")
    found = {}
    for name, wrapper in WRAPPERS.items():
        try:
            check(wrapper)
            found[name] = "fine"
        except Exception:
            found[name] = traceback.format_exc()
    if dist.get_rank() == 0:
        (folder / "found.json").write_text(json.dumps(found))
    leave()


if __name__ == "__main__":
    fork(2, work, Path(sys.argv[1]))
