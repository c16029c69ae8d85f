"""``run_clm.py`` as ``accelerate launch`` with configs/accelerate_fsdp.yaml runs it, on a CPU: a module of a job.

Accelerate does not shard on a CPU, though torch can; here it takes the CPUs for GPUs. What the processes train must be
shards.
"""

import os
from unittest.mock import patch

from accelerate import PartialState
from accelerate.utils import DistributedType
from torch.distributed.tensor import DTensor

from hf_hybrid.training import clm
from hf_hybrid.training.trainer.script_trainer import ScriptTrainer

ENVIRONMENT = {
    "ACCELERATE_USE_FSDP": "true",
    "FSDP_VERSION": "2",
    "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
    "FSDP_RESHARD_AFTER_FORWARD": "true",
    "FSDP_STATE_DICT_TYPE": "FULL_STATE_DICT",
}


def main(argv: list[str]) -> dict[str, float]:
    """Train, and return the metrics."""
    create, step = PartialState.__init__, ScriptTrainer.training_step

    def as_gpus(self, *args, **kwargs):
        create(self, *args, **kwargs)
        if self._shared_state["distributed_type"] == DistributedType.MULTI_CPU:
            self._shared_state["distributed_type"] = DistributedType.MULTI_GPU

    def of_shards(self, model, *args, **kwargs):
        assert all(isinstance(weight, DTensor) for weight in model.parameters())
        return step(self, model, *args, **kwargs)

    with (
        patch.dict(os.environ, ENVIRONMENT),
        patch.object(PartialState, "__init__", as_gpus),
        patch.object(ScriptTrainer, "training_step", of_shards),
    ):
        return clm.main(argv)
