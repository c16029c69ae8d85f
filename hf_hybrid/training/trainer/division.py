"""Divide each batch of a run among processes: ``--context_parallel_size``.

W processes are D = W / N groups of N consecutive ones. A group gets the rows that one process of D would get, and each
of its processes the tokens of its own part. Losses are those of the complete rows, on every process of a group.
"""

import contextlib
import datetime
from collections.abc import Callable, Iterator
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import recursively_apply
from torch import distributed
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional as F
from transformers.trainer_pt_utils import LabelSmoother

from hf_hybrid.context_parallel import Shards, Watch, meet, own_part, own_span, total
from hf_hybrid.data.preprocessing import IGNORED_LABEL
from hf_hybrid.training.errors import end_without
from hf_hybrid.training.flags.run import ScriptTrainingArguments


class Division:
    """The groups of a run.

    Attributes:
        size: N, the processes that share rows.
        replicas: D, the groups.
        group: The processes that share this one's rows.
        seed: Of this process's random numbers, another one in each process.
    """

    def __init__(self, args: ScriptTrainingArguments) -> None:
        self.size, self.replicas = args.context_parallel_size, args.replicas
        timeout = datetime.timedelta(seconds=args.context_parallel_timeout)
        self.group, _ = distributed.new_subgroups(group_size=self.size, timeout=timeout)
        # on the CPU, so that waiting for a process does not wait for its GPU
        self._host = self.group
        if distributed.get_backend(self.group) != "gloo":
            self._host, _ = distributed.new_subgroups(group_size=self.size, timeout=timeout, backend="gloo")
        self._parts = Shards((1,) * self.size, distributed.get_rank(self.group), self.group)
        across = [list(range(first, args.world_size, self.size)) for first in range(self.size)]
        rows, _ = distributed.new_subgroups_by_enumeration(across)
        ranks = torch.arange(args.world_size).view(self.replicas, self.size)
        # the names by which accelerate gives the same rows to some processes
        names = ("dp_shard", "cp")
        device: Any = args.device.type
        self._mesh = DeviceMesh.from_group([rows, self.group], device, mesh=ranks, mesh_dim_names=names)
        self.seed = args.seed + args.process_index
        Watch(args.context_parallel_timeout, end_without)

    def check_together(self, inputs: dict[str, Any] | None = None) -> None:
        """Wait for the processes of the group, which must come with the same batch.

        Raises:
            ProcessLost: One has ended, or does not come within ``--context_parallel_timeout``.
            ValueError: A batch differs.
        """
        tensors = {name: x for name, x in (inputs or {}).items() if isinstance(x, torch.Tensor)}
        shapes = {name: list(x.shape) for name, x in tensors.items()}
        sums = [str(x.sum().item()) for x in tensors.values()]  # so that NaN equals itself
        entries = meet(self._host, (shapes, sums))
        first, expected = next(iter(entries.items()))
        for rank, entry in entries.items():
            if entry != expected:
                what = f"{entry[0]} and {expected[0]}" if entry[0] != expected[0] else "other numbers"
                raise ValueError(
                    f"--context_parallel_size {self.size}: ranks {rank} and {first} share a sequence but got "
                    f"different batches: {what}. The data must be the same for all processes."
                )

    def draws_alike(self) -> bool:
        """Whether two processes of the group are about to draw the same random numbers for their parts."""
        states = meet(self._host, bytes(torch.get_rng_state().tolist())).values()
        return len(set(states)) < self.size

    def divide(self, inputs: dict[str, Any], *, shifts: bool, smooths: bool) -> dict[str, Any]:
        """Return this process's part of all tensors `(B, T, ...)`.

        Args:
            inputs: A batch; labels and others of one dimension stay as they are.
            shifts: Whether the model predicts each token from those before it. Its labels are shifted here.
            smooths: Whether Trainer computes the loss, which looks for `labels`.
        """
        labels = inputs.get("labels")
        if shifts and labels is not None:
            inputs = {name: x for name, x in inputs.items() if name != "labels"}
            inputs["labels" if smooths else "shift_labels"] = F.pad(labels[:, 1:], (0, 1), value=IGNORED_LABEL)
        return {
            name: own_part(x, self.group) if isinstance(x, torch.Tensor) and x.dim() > 1 else x
            for name, x in inputs.items()
        }

    def for_mean(self, loss: torch.Tensor) -> torch.Tensor:
        """Multiply a loss's gradients, not its value, by N.

        Those of a group add up to the gradient of its rows; DDP and FSDP take the mean over all processes, where the
        mean over the groups is needed.
        """
        if loss.requires_grad:
            loss.register_hook(lambda gradient: gradient * self.size)
        return loss

    def total(self, x: torch.Tensor) -> torch.Tensor:
        """Add up over the group; the gradient is that of the own addend."""
        return total(x, self._parts)

    def scores(
        self, score: Callable[[Any, torch.Tensor], torch.Tensor], logits: Any, labels: torch.Tensor, *, shifts: bool
    ) -> torch.Tensor:
        """Return the scores of complete rows, which are sums over tokens, from own logits and complete labels."""
        start, stop = own_span(labels.shape[1], self.group)
        # a score that shifts labels sees the one after the last own token
        return self.total(score(logits, labels[:, start : stop + shifts if stop > start else stop]))

    def gather(self, accelerator: Accelerator, x: Any) -> Any:
        """Return what each group has for its rows, without the repeated rows of the last batch."""
        state, size = accelerator.gradient_state, self.size
        last = state.remainder if state.end_of_dataloader and state.remainder > 0 else None

        def once(gathered: torch.Tensor) -> torch.Tensor:
            of_processes = gathered.unflatten(0, (self.replicas, size, -1))
            return of_processes[:, 0].flatten(0, 1)[:last]

        return recursively_apply(once, accelerator.gather(x))

    @contextlib.contextmanager
    def loading(self, accelerator: Accelerator) -> Iterator[None]:
        """Prepare data loaders so that the processes of a group get the same rows."""
        accelerator.state.device_mesh = self._mesh
        try:
            yield
        finally:
            accelerator.state.device_mesh = None


class DividedLabelSmoother(LabelSmoother):
    """Label smoothing of own tokens, whose labels are shifted already; the mean is over those of all processes."""

    def __init__(self, epsilon: float, division: Division) -> None:
        super().__init__(epsilon)
        self._division = division

    def __call__(
        self, model_output: Any, labels: Any, shift_labels: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """Return the smoothed loss of the complete rows."""
        count = num_items_in_batch
        if count is None:
            count = self._division.total(labels.ne(IGNORED_LABEL).sum())
        return self._division.total(super().__call__(model_output, labels, num_items_in_batch=count))
