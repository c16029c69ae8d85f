"""Trains models for a step, sharded or split: ``python -m tests.models.sharding FOLDER CASES``, a key of `CASES`.

The first process leaves a table in the folder: model → what came out, or what went wrong.
"""

import json
import logging
import sys
import traceback
from pathlib import Path

import torch
import torch.distributed as dist
import transformers
from torch.distributed.tensor import DTensor
from transformers.distributed import DistributedConfig

from hf_hybrid.layers.state_space import StateSpaceLayer

from ..tolerances import assert_close
from ..torchrun import fork, leave
from .tiny import GENERATIVE, MODEL_CLASSES, main_output, tiny_inputs, tiny_model

FINE = "fine"
CASES = {
    "generative": [
        *((model_type, auto_class, "float32") for model_type, auto_class in GENERATIVE),
        *((*case, "split") for case in GENERATIVE if not case[0].startswith("srformer")),  # T5 and BART have no plan
    ],
    "others": [
        *((model_type, auto_class, "bfloat16") for model_type, auto_class in GENERATIVE),
        *((*case, "float32") for case in MODEL_CLASSES if case[1].endswith("SequenceClassification")),
    ],
}


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _step(model: torch.nn.Module, inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """One step of gradient descent; the weights after it."""
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    main_output(model(**inputs)).float().square().mean().backward()
    optimizer.step()
    return {name: _whole(tensor) for name, tensor in model.state_dict().items()}


def check(model_type: str, auto_class: str, dtype: str, folder: Path) -> None:
    """Load a model whole and in shards, train both for a step, save the shards and load them again."""
    rank, load = dist.get_rank(), getattr(transformers, auto_class).from_pretrained
    if rank == 0:
        tiny_model(model_type, auto_class).save_pretrained(folder / "whole")
    dist.barrier()
    whole = load(folder / "whole", dtype=getattr(torch, dtype)).eval()
    sharded = load(
        folder / "whole", dtype=getattr(torch, dtype), distributed_config=DistributedConfig(fsdp_size=2)
    ).eval()
    layers = {name for name, module in whole.named_modules() if type(module).__name__ in whole._no_split_modules}
    units = {name for name, module in sharded.named_modules() if hasattr(module, "unshard")}
    assert layers, "no layer is named"
    assert layers <= units, f"{layers - units} are no units of their own"
    assert all(isinstance(parameter, DTensor) for parameter in sharded.parameters())
    for module in sharded.modules():
        if isinstance(module, StateSpaceLayer):
            assert {tensor.dtype for _, tensor in module.own_tensors()} == {torch.float32}
    inputs = tiny_inputs(whole, batch=4)
    mine = {name: tensor[2 * rank : 2 * rank + 2] for name, tensor in inputs.items()}
    expected, actual = _step(whole, inputs), _step(sharded, mine)
    assert actual.keys() == expected.keys()
    before = load(folder / "whole").state_dict()
    assert any(not torch.equal(actual[name].float(), before[name].float()) for name in actual), "nothing was trained"
    for name, tensor in expected.items():
        assert_close(actual[name], tensor, "float32 model" if dtype == "float32" else "bfloat16 gradient")
    sharded.save_pretrained(folder / "sharded")
    dist.barrier()
    for name, tensor in load(folder / "sharded", dtype=getattr(torch, dtype)).state_dict().items():
        assert_close(tensor, actual[name], "exact")


def check_split(model_type: str, auto_class: str, folder: Path) -> None:
    """Load a model whole and by its tensor-parallel plan, generate, and train both for a step on the same rows."""
    load = getattr(transformers, auto_class).from_pretrained
    if dist.get_rank() == 0:
        tiny_model(model_type, auto_class).save_pretrained(folder)
    dist.barrier()
    whole = load(folder).eval()
    split = load(folder, distributed_config=DistributedConfig(tp_size=2, tp_plan="auto")).eval()
    named = split.named_parameters(remove_duplicate=False)
    placed = {name for name, tensor in named if isinstance(tensor, DTensor)}
    for part in ("feed_forward", "attention" if model_type != "chela" else "output_gate_proj", "lm_head"):
        assert any(part in name and name.endswith("weight") for name in placed), f"nothing of {part} is split"
    inputs = tiny_inputs(whole)
    assert_close(main_output(split(**inputs)), main_output(whole(**inputs)), "float32 model")
    settings = {"input_ids": inputs["input_ids"], "max_new_tokens": 6, "do_sample": False}
    assert torch.equal(split.generate(**settings), whole.generate(**settings))
    expected, actual = _step(whole, inputs), _step(split, inputs)
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        assert_close(actual[name], tensor, "float32 model")


def work(root: Path, cases: str) -> None:
    """Check the cases as one of the processes."""
    transformers.utils.logging.disable_progress_bar()
    dist.init_process_group("gloo")
    messages: list[str] = []

    class _Kept(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            messages.append(record.getMessage())

    logging.getLogger("transformers").addHandler(_Kept())
    found = {}
    for case in CASES[cases]:
        messages.clear()
        try:
            folder = root / "-".join(case)
            if case[-1] == "split":
                check_split(*case[:-1], folder)
            else:
                check(*case, folder)
            unmatched = [message for message in messages if "match nothing" in message]
            found["-".join(case)] = unmatched[0] if unmatched else FINE
        except Exception:
            found["-".join(case)] = traceback.format_exc()
    if dist.get_rank() == 0:
        (root / "found.json").write_text(json.dumps(found))
    leave()


if __name__ == "__main__":
    fork(2, work, Path(sys.argv[1]), sys.argv[2])
