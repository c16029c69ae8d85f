"""Flags of the run: transformers' training arguments, and ours for the output folder, resuming and the report."""

import logging
import os
import sys
from dataclasses import dataclass
from typing import Any

import torch
from transformers import Seq2SeqTrainingArguments, TrainingArguments
from transformers.integrations import integration_utils
from transformers.utils.import_utils import is_in_notebook

from hf_hybrid.models.checkpointing import check_saved
from hf_hybrid.training.flags.checks import check_not_negative_flags, check_positive_flags, flag

logger = logging.getLogger(__name__)


def computes_bfloat16_fast(device: torch.device) -> bool:
    """Whether a GPU or the CPU multiplies in bfloat16, and does not only store it."""
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()


@dataclass
class ScriptTrainingArguments(TrainingArguments):
    """Transformers' training arguments and ours."""

    overwrite_output_dir: bool = flag(
        False,
        "Allow writing into an --output_dir that holds another run, and delete its checkpoint-* folders and results "
        "when training starts. Without this flag such a folder is refused.",
    )
    resume_from_checkpoint: str | None = flag(
        None,
        "Continue a run. 'auto': from the last complete checkpoint in --output_dir, or from the start if there is "
        "none; 'true': the same, but there must be one; or the path of a checkpoint folder. A run is never resumed or "
        "overwritten without a flag.",
    )
    ssm_learning_rate: float | None = flag(
        None,
        "Learning rate of a trained state space model's A, B and step sizes, or of Hyena's filters. Default: "
        "--learning_rate. None of these tensors has weight decay.",
    )
    context_parallel_size: int = flag(
        1,
        "Divide each sequence among so many processes, for documents that do not fit one GPU; the number of processes "
        "must be a multiple. SPADE, CHELA and BST can be divided.",
    )
    context_parallel_timeout: int = flag(
        40,
        "Seconds for which processes that share sequences wait for each other inside a step, before they end and name "
        "the one that is missing.",
    )
    report: bool = flag(True, "Write report.html at the end, a page with settings, scores and curves.")

    def __post_init__(self) -> None:
        if self.resume_from_checkpoint is not None:
            folded = self.resume_from_checkpoint.lower()
            if folded in ("false", "none", ""):
                self.resume_from_checkpoint = None
            elif folded in ("auto", "true"):
                self.resume_from_checkpoint = folded
        check_positive_flags(
            self,
            "per_device_train_batch_size",
            "per_device_eval_batch_size",
            "gradient_accumulation_steps",
            "save_total_limit",
            "context_parallel_size",
            "context_parallel_timeout",
        )
        check_not_negative_flags(
            self, *("learning_rate", "ssm_learning_rate", "weight_decay", "max_grad_norm", "seed", "data_seed")
        )
        if not 0 <= self.label_smoothing_factor < 1:
            raise ValueError(f"--label_smoothing_factor must lie in [0, 1); got {self.label_smoothing_factor}")
        if self.max_steps != -1 and self.max_steps < 1:
            raise ValueError(f"--max_steps must be a positive integer, or -1 to count epochs; got {self.max_steps}")
        if not self.num_train_epochs > 0:
            raise ValueError(f"--num_train_epochs must be positive; got {self.num_train_epochs}")
        if str(self.eval_strategy) == "no" and not (self.do_train or self.do_eval or self.do_predict):
            raise ValueError("nothing to do: give at least one of --do_train, --do_eval and --do_predict")
        self._check_sequences_are_whole()
        _check_launch()
        if self.context_parallel_size > 1:
            self._divide_sequences()
        if self.disable_tqdm is None and not sys.stderr.isatty() and not is_in_notebook():
            self.disable_tqdm = True  # a bar in a file is thousands of characters on one line
        super().__post_init__()
        if self.context_parallel_size > 1:
            self._check_sharding()
            # one process would cut the batches that it reads into parts for all
            accelerator_config: Any = self.accelerator_config
            accelerator_config.dispatch_batches = False
        self._check_reporting()
        self._check_checkpointing()
        if self.device.type == "cpu":
            self.dataloader_pin_memory = False  # there is no device to copy to
            if self.fp16:
                logger.warning(
                    "--fp16 on a CPU: products are computed in float16 with a scaled loss, which is slower than "
                    "float32 and less exact. --bf16 --use_cpu is the better choice on CPUs that know bfloat16."
                )

    def use_bfloat16_where_it_is_fast(self) -> None:
        """Compute in bfloat16 by autocast on devices that multiply in it, unless the launch or DeepSpeed chose."""
        is_chosen = self.mixed_precision != "no" or self.deepspeed_plugin is not None
        if not is_chosen and self.device.type in ("cpu", "cuda") and computes_bfloat16_fast(self.device):
            logger.info("Computing in bfloat16 by autocast, which is fast on this device; --bf16 false keeps float32.")
            self.bf16, self.mixed_precision = True, "bf16"

    def _check_reporting(self) -> None:
        for name in self.report_to or []:
            if name not in integration_utils.INTEGRATION_TO_CALLBACK:
                known = ", ".join(sorted(integration_utils.INTEGRATION_TO_CALLBACK))
                raise ValueError(f"--report_to must be none, all or one of {known}; got {name!r}")
            is_available = getattr(integration_utils, f"is_{name.removesuffix('_ml')}_available", None)
            if is_available is not None and not is_available():
                raise ValueError(f"--report_to {name}: {name} is not installed; install it, or give --report_to none")

    def _check_checkpointing(self) -> None:
        options = self.activation_checkpointing_kwargs or {}
        if not isinstance(options, dict):
            raise ValueError(
                '--activation_checkpointing_kwargs must be a JSON object, such as \'{"save": "products"}\'; '
                f"got {options!r}"
            )
        check_saved("--activation_checkpointing_kwargs", options)
        if "save" in options and not self.activation_checkpointing:
            raise ValueError("save in --activation_checkpointing_kwargs needs --activation_checkpointing")

    def _check_sequences_are_whole(self) -> None:
        launched = os.environ.get("ACCELERATE_USE_PARALLELISM_CONFIG", "false").lower() == "true"
        for name in ("cp_size", "sp_size"):
            in_launch = os.environ.get(f"PARALLELISM_CONFIG_{name.upper()}", "1") if launched else "1"
            size = getattr(self.parallelism_config, name, int(in_launch))
            if size > 1:
                raise ValueError(
                    f"{name} must be 1, in --parallelism_config as in accelerate's configuration: it divides full "
                    "attention alone, and would leave out what state spaces, convolutions and windows need of other "
                    f"processes; give --context_parallel_size {size} in its place; got {size}"
                )

    @property
    def replicas(self) -> int:
        """How many processes, or groups of processes that share sequences, work on different rows of a batch."""
        return self.world_size // self.context_parallel_size

    def _divide_sequences(self) -> None:
        """Refuse what cannot be had with ``--context_parallel_size``, and choose what it needs."""
        size, processes = self.context_parallel_size, int(os.environ.get("WORLD_SIZE", "1"))
        given = f"--context_parallel_size {size}"
        if processes % size:
            started = f"{processes} processes" if processes > 1 else "one process"
            raise ValueError(
                f"--context_parallel_size must divide the number of processes that torchrun or accelerate launch "
                f"starts; got {size} and {started}"
            )
        if self.train_sampling_strategy == "group_by_length":
            raise ValueError(
                f"--train_sampling_strategy must not be group_by_length with {given}: each process would draw its own "
                "order of rows, and those that share a sequence need the same"
            )
        if not self.average_tokens_across_devices:
            raise ValueError(f"--average_tokens_across_devices must be true with {given}, which shares labels")
        launched = os.environ.get("ACCELERATE_USE_DEEPSPEED", "false").lower() == "true"
        if self.deepspeed or launched:
            raise ValueError(f"--deepspeed cannot be used with {given}: use DDP or FSDP")
        if self.torch_compile:
            raise ValueError(f"--torch_compile must be false with {given}, whose exchanges are not compiled")
        if self.data_seed is None:
            self.data_seed = self.seed  # the order of rows must not depend on the random numbers of a process

    def _check_sharding(self) -> None:
        launched = os.environ.get("ACCELERATE_USE_FSDP", "false").lower() == "true"
        version = int(os.environ.get("FSDP_VERSION", "1")) if launched else 2
        if self.fsdp_plugin_args is not None:
            version = self.fsdp_plugin_args["fsdp_version"]
        if version != 2:
            raise ValueError(
                f"fsdp_version must be 2 with --context_parallel_size {self.context_parallel_size}, as in "
                f"configs/accelerate_fsdp.yaml; got {version}"
            )

    def __getstate__(self) -> dict[str, Any]:
        """Keep the token out of training_args.bin, which is pushed with the model."""
        return self.__dict__ | {"hub_token": None}


def _check_launch() -> None:
    """Refuse the single process that accelerate starts without a word where several on a CPU were asked for."""
    on_cpu = os.environ.get("ACCELERATE_USE_CPU", "false").lower() == "true"
    # accelerate names the meeting place of several processes, and then starts one, unless mpirun starts more
    sizes = ("WORLD_SIZE", "PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE")
    if on_cpu and "MASTER_ADDR" in os.environ and not any(name in os.environ for name in sizes):
        raise ValueError(
            "accelerate launch --cpu --num_processes starts one process unless it runs under mpirun: "
            "use torchrun --nproc_per_node, with --use_cpu"
        )


@dataclass
class SummarizationTrainingArguments(ScriptTrainingArguments, Seq2SeqTrainingArguments):
    """Transformers' sequence-to-sequence training arguments and ours."""

    def __post_init__(self) -> None:
        check_positive_flags(self, "generation_max_length", "generation_num_beams")
        super().__post_init__()
