"""What transformers' Trainer lacks: exact losses for every model, SSM groups, stopping without a loss."""

import logging
import math
import shutil
from pathlib import Path
from typing import Any

import datasets
import torch
from transformers import Seq2SeqTrainer, Trainer
from transformers.trainer_pt_utils import LabelSmoother, LengthGroupedSampler
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, rotate_checkpoints

from hf_hybrid.data.preprocessing import IGNORED_LABEL
from hf_hybrid.training.adapters import save_base_config
from hf_hybrid.training.checkpoints import (
    CannotSave,
    begin_saving,
    explain_full_disk,
    faults_on_disk,
    finish_saving,
    mark_complete,
    replacing,
    was_cut_off,
)
from hf_hybrid.training.hub import reason
from hf_hybrid.training.interruption import Agreement
from hf_hybrid.training.measuring import MeasuringMixin
from hf_hybrid.training.model_card import CARD_FILE
from hf_hybrid.training.non_finite import (
    EXAMPLES,
    NonFiniteLoss,
    NumberingCollator,
    describe_examples,
    number_examples,
)
from hf_hybrid.training.output_folder import complete_checkpoints

__all__ = [
    "CausalTrainer",
    "ScriptTrainer",
    "SummarizationTrainer",
    "TrainerMixin",
    "separate_ssm_parameters",
]

logger = logging.getLogger(__name__)


def separate_ssm_parameters(
    optimizer: torch.optim.Optimizer, model: torch.nn.Module, learning_rate: float | None = None
) -> int:
    """Move a model's trained state space parameters into optimizer groups of their own, without weight decay.

    Decay pulls the eigenvalues and step sizes of a state space towards values that mean something (a time constant of
    one step), not towards "small"; S4 and its successors train them without it, often with a smaller learning rate
    (S4, appendix D; S5, appendix G).

    Args:
        optimizer: A new optimizer; its groups are changed in place. Calling twice changes nothing more.
        model: The model. It may have a method ``ssm_parameters(dynamics=None)``; without one there is nothing to move.
        learning_rate: That of the parameters that shape the memory (A, B, Δ; ``dynamics=True``); C and D keep that of
            the first group, as all do when None.

    Returns:
        How many parameter tensors were moved, or had been.
    """
    if any(group.get("ssm") for group in optimizer.param_groups):
        return sum(len(group["params"]) for group in optimizer.param_groups if group.get("ssm"))
    list_parameters = getattr(model, "ssm_parameters", None)
    if list_parameters is None:
        return 0
    rate = optimizer.param_groups[0]["lr"]
    count = 0
    for dynamics, wanted_rate in ((False, None), (True, learning_rate)):
        wanted = {id(parameter) for parameter in list_parameters(dynamics=dynamics)}
        separated: list[torch.nn.Parameter] = []
        for group in optimizer.param_groups:
            separated += [parameter for parameter in group["params"] if id(parameter) in wanted]
            group["params"] = [parameter for parameter in group["params"] if id(parameter) not in wanted]
        if separated:
            own = {"weight_decay": 0.0, "lr": rate if wanted_rate is None else wanted_rate, "ssm": True}
            optimizer.add_param_group({"params": separated, **own})
            count += len(separated)
    return count


class TrainerMixin(MeasuringMixin):
    """Put before a Trainer in the bases.

    Note:
        Trainer divides the loss by the number of accumulation steps only for models that it believes not to do so
        themselves, and it believes it of every model whose forward takes keyword arguments. T5, BART, LED and LongT5
        take them and ignore them: with N accumulation steps their gradients come out N times too large. Here the
        model is asked: if doubling ``num_items_in_batch`` does not halve its loss, the mean that it returns is
        weighted with its share of the label tokens, which makes N small batches equal one large one exactly.
    """

    _loss_counts_items: bool | None = None

    def compute_loss(
        self,
        model: torch.nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: torch.Tensor | int | None = None,
    ) -> Any:
        """Return the loss, normalised by the label tokens of all accumulated batches."""
        compute: Any = super().compute_loss  # type: ignore[misc]
        smoothed = getattr(self, "label_smoother", None) is not None  # Trainer's own, which counts items
        if num_items_in_batch is None or smoothed or "labels" not in inputs:
            return compute(model, inputs, return_outputs=return_outputs, num_items_in_batch=num_items_in_batch)
        # as Trainer counts them: a language model does not predict the first token of a row
        labels = inputs["labels"][..., 1:] if getattr(self, "_loss_shifts_labels", False) else inputs["labels"]
        items = labels.ne(IGNORED_LABEL).sum()
        if self._loss_counts_items is None:
            self._loss_counts_items = _loss_counts_items(model, inputs, items)
            if not self._loss_counts_items and self.args.n_gpu > 1:  # type: ignore[attr-defined]
                # DataParallel returns one mean per GPU: fall back on the mean over batches
                self.model_accepts_loss_kwargs = False
        loss, outputs = compute(model, inputs, return_outputs=True, num_items_in_batch=num_items_in_batch)
        if not self._loss_counts_items and self.args.n_gpu <= 1:  # type: ignore[attr-defined]
            loss = loss * (items / num_items_in_batch)
        return (loss, outputs) if return_outputs else loss

    def _get_eval_sampler(self, eval_dataset: Any) -> torch.utils.data.Sampler[int] | None:
        """Visit evaluation examples in order: Trainer groups them by length too, and predictions lose their documents.

        Note:
            With ``--train_sampling_strategy group_by_length``, Trainer returns predictions in the grouped order, so
            that line N of a predictions file is not about document N.
        """
        grouped = super()._get_eval_sampler(eval_dataset)  # type: ignore[misc]
        if not isinstance(grouped, LengthGroupedSampler):
            return grouped
        single = self.args.world_size <= 1  # type: ignore[attr-defined]
        return torch.utils.data.SequentialSampler(eval_dataset) if single else None

    def init_hf_repo(self, token: str | None = None, private: bool | None = None) -> None:
        """Make the repository that ``--push_to_hub`` pushes to.

        Raises:
            ValueError: The Hub does not let the token's owner, or cannot be reached.
        """
        try:
            super().init_hf_repo(token=token, private=private)  # type: ignore[misc]
        except Exception as error:  # before the training, which would be for nothing
            args: Any = self.args  # type: ignore[attr-defined]
            name = args.hub_model_id or Path(args.output_dir).absolute().name
            raise ValueError(f"--push_to_hub: {name} cannot be made on the Hub: {reason(error)}") from error

    def create_model_card(self, *args: Any, **kwargs: Any) -> None:
        """Write Trainer's own card where a trained model has none: it knows less than ours, and replaces any."""
        run: Any = self.args  # type: ignore[attr-defined]
        if run.do_train and not Path(run.output_dir, CARD_FILE).is_file():
            super().create_model_card(*args, **kwargs)  # type: ignore[misc]

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        """Save the model, and beside an adapter the configuration of its base."""
        super()._save(output_dir, state_dict)  # type: ignore[misc]
        save_base_config(self.model, output_dir or self.args.output_dir)  # type: ignore[attr-defined]

    def create_optimizer(self, model: Any = None) -> torch.optim.Optimizer:
        """Create the optimizer, with the state space parameters in a group of their own."""
        optimizer: torch.optim.Optimizer = super().create_optimizer(model)  # type: ignore[misc]
        owner = self.model if model is None else model  # type: ignore[attr-defined]
        rate = getattr(self.args, "ssm_learning_rate", None)  # type: ignore[attr-defined]
        count = separate_ssm_parameters(optimizer, owner, rate)
        if rate is not None and not count:
            logger.warning("--ssm_learning_rate %s has no effect: the model trains no state space parameters.", rate)
        return optimizer

    # ---- saving: a checkpoint is whole, or says that it is not ----

    is_saving = False
    """Whether a checkpoint is being saved; it stays true when that fails."""

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save the model; until it is whole, a file in the folder says that it is not.

        It is not pushed yet: `publish` does that, with results and card.

        Raises:
            CannotSave: The disk is full.
        """
        args: Any = self.args  # type: ignore[attr-defined]
        folder = Path(output_dir or args.output_dir)
        with explain_full_disk(folder, "the model", self._advise):
            if args.should_save:
                begin_saving(folder)
            super().save_model(output_dir, _internal_call=True)  # type: ignore[misc]
            if _internal_call:
                args.save_total_limit = None  # Trainer deletes old checkpoints before this one could be marked
            elif args.should_save:
                finish_saving(folder)

    def _save_checkpoint(self, model: torch.nn.Module, trial: Any) -> None:
        """Save a checkpoint, mark it as complete, and only then delete older ones.

        Raises:
            CannotSave: The disk is full. What was written is deleted, older checkpoints are as they were.
        """
        args: Any = self.args  # type: ignore[attr-defined]
        run_folder = self._get_output_dir(trial)  # type: ignore[attr-defined]
        folder = Path(run_folder, f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}")  # type: ignore[attr-defined]
        self.is_saving, self._is_marked, self._save_total_limit = True, False, args.save_total_limit
        try:
            with explain_full_disk(folder, folder.name, self._advise):
                super()._save_checkpoint(model, trial)  # type: ignore[misc]
                self._mark_checkpoint(folder)
        except CannotSave:
            if args.should_save and was_cut_off(folder):
                shutil.rmtree(folder, ignore_errors=True)
            raise
        finally:
            args.save_total_limit = self._save_total_limit
        self.is_saving = False
        if args.should_save:
            best = self.state.best_model_checkpoint  # type: ignore[attr-defined]
            rotate_checkpoints(run_folder, args.save_total_limit, best, use_mtime=True)

    def _mark_checkpoint(self, folder: Path) -> None:
        if self._is_marked:
            return
        self.accelerator.wait_for_everyone()  # type: ignore[attr-defined]
        if self.args.should_save:  # type: ignore[attr-defined]
            mark_complete(folder)
        self._is_marked = True

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        """Upload a checkpoint, which is complete by now."""
        self._mark_checkpoint(Path(checkpoint_folder))
        self.args.save_total_limit = self._save_total_limit  # type: ignore[attr-defined]
        super()._push_from_checkpoint(checkpoint_folder)  # type: ignore[misc]

    def _advise(self) -> str:
        """Words for a run that found no room on the disk."""
        whole = complete_checkpoints(self.args.output_dir)  # type: ignore[attr-defined]
        if not whole:
            return "There is no complete checkpoint; make room and start anew."
        return (
            f"{whole[-1]} is complete: make room, then run the same command with --resume_from_checkpoint auto to go "
            "on from it"
        )

    def save_state(self) -> None:
        """Write ``trainer_state.json`` into the output folder."""
        if self.is_world_process_zero():  # type: ignore[attr-defined]
            with replacing(Path(self.args.output_dir, "trainer_state.json")) as path:  # type: ignore[attr-defined]
                self.state.save_to_json(str(path))  # type: ignore[attr-defined]

    def _load_best_model(self) -> None:
        """Load the weights of the best checkpoint, unless something happened to them."""
        best = Path(self.state.best_model_checkpoint)  # type: ignore[attr-defined]
        if wrong := faults_on_disk(best):
            logger.warning(
                "The best checkpoint %s is not loaded: %s. The weights are those of the last step.",
                best,
                " and ".join(wrong),
            )
            return
        super()._load_best_model()  # type: ignore[misc]

    # ---- losses that are no numbers ----

    agreement = Agreement(1)
    stop_wished = False
    """Whether this process was asked to stop after the running step."""
    _stop_agreed = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # it hides losses that are not finite; it also waits for the GPU as often as looking at them does
        self.args.logging_nan_inf_filter = False  # type: ignore[attr-defined]
        self._losses: list[torch.Tensor] = []
        self._positions: list[torch.Tensor | None] = []

    @property
    def must_stop(self) -> bool:
        """Whether training ends after this step; the same in all processes."""
        return self.stop_wished if self.args.world_size <= 1 else self._stop_agreed  # type: ignore[attr-defined]

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """Train, with all processes stopping together."""
        self.agreement = Agreement(self.args.world_size)  # type: ignore[attr-defined]
        self.is_saving = self.stop_wished = self._stop_agreed = False
        return super().train(*args, **kwargs)  # type: ignore[misc]

    def _get_dataloader(
        self, dataset: Any, description: str, batch_size: int, sampler_fn: Any = None, is_training: bool = False,
        dataloader_key: str | None = None,
    ) -> Any:  # fmt: skip
        """Load data; in training, batches carry the positions of their examples."""
        load: Any = super()._get_dataloader  # type: ignore[misc]
        if not is_training or not self.is_in_train or not self._can_number(dataset):  # type: ignore[attr-defined]
            return load(dataset, description, batch_size, sampler_fn, is_training, dataloader_key)
        if isinstance(dataset, datasets.Dataset):
            dataset = self._remove_unused_columns(dataset, description)  # type: ignore[attr-defined]
        sampler = None if sampler_fn is None else lambda _: sampler_fn(dataset)
        return load(number_examples(dataset), description, batch_size, sampler, is_training, dataloader_key)

    def _can_number(self, dataset: Any) -> bool:
        """Whether positions change nothing else: not where Trainer asks a stream for its length or for its shards."""
        if not isinstance(dataset, torch.utils.data.IterableDataset):
            return hasattr(dataset, "__len__")
        sharded = self.args.world_size > 1 and self.accelerator.dispatch_batches is False  # type: ignore[attr-defined]
        return not hasattr(dataset, "__len__") and not (sharded and isinstance(dataset, datasets.IterableDataset))

    def _get_collator_with_removed_columns(self, data_collator: Any, description: str | None = None) -> Any:
        collate = super()._get_collator_with_removed_columns(data_collator, description)  # type: ignore[misc]
        return NumberingCollator(collate)

    def get_batch_samples(self, *args: Any, **kwargs: Any) -> Any:
        """Take the batches of a step, without the positions of their examples, which are kept aside."""
        batches, count = super().get_batch_samples(*args, **kwargs)  # type: ignore[misc]
        self._positions = [batch.pop(EXAMPLES, None) if hasattr(batch, "pop") else None for batch in batches]
        self._losses = []
        return batches, count

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Compute a batch's loss and gradients."""
        loss: torch.Tensor = super().training_step(*args, **kwargs)  # type: ignore[misc]
        self._losses.append(loss)
        return loss

    def _get_grad_norm(self, model: torch.nn.Module, grad_norm: Any = None) -> Any:
        """Return the norm of a step's gradients, the last thing that is done before the weights change.

        Raises:
            NonFiniteLoss: A loss of the step or the norm is not finite.
        """
        norm = super()._get_grad_norm(model, grad_norm=grad_norm)  # type: ignore[misc]
        values = [loss.float() for loss in self._losses]
        # with fp16, gradients overflow now and then: such a step is skipped
        if self.accelerator.scaler is None and type(norm) in (float, torch.Tensor):  # type: ignore[attr-defined]
            values.append(torch.as_tensor(norm, dtype=torch.float32, device=values[0].device))
        is_bad = not bool(torch.stack(values).isfinite().all())
        is_bad, self._stop_agreed = self.agreement.any(is_bad, self.stop_wished)
        if is_bad:
            self._refuse_step(values)
        return norm

    def _refuse_step(self, values: list[torch.Tensor]) -> None:
        """Raise a NonFiniteLoss that names the batches, in all processes the same one."""
        losses = [value.item() for value in values[: len(self._losses)]]
        bad = [(loss, held) for loss, held in zip(losses, self._positions, strict=True) if not math.isfinite(loss)]
        found = [(loss, [] if held is None else held.tolist()) for loss, held in bad]
        everywhere = [entry for entries in self.agreement.gather(found) for entry in entries]
        what = f"the loss is {everywhere[0][0]}" if everywhere else "the gradient is not finite, though the loss is"
        if not everywhere:
            held = [position for held in self._positions if held is not None for position in held.tolist()]
            everywhere = [(math.nan, positions) for positions in self.agreement.gather(held)]
        examples = describe_examples(
            [position for _, positions in everywhere for position in positions],
            stream=isinstance(self.train_dataset, torch.utils.data.IterableDataset),  # type: ignore[attr-defined]
            workers=self.args.dataloader_num_workers,  # type: ignore[attr-defined]
        )
        raise NonFiniteLoss(
            f"training stopped at step {self.state.global_step + 1}: {what}; {examples}. The weights "  # type: ignore[attr-defined]
            "are still those of the step before. Look at these examples, or try a smaller --learning_rate"
            f"{', or --bf16 in place of --fp16' if self.args.fp16 else ''}."  # type: ignore[attr-defined]
        )

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        """Evaluate or predict; scores that are not finite are reported as they are, with a warning."""
        output = super().evaluation_loop(*args, **kwargs)  # type: ignore[misc]
        bad = {name: value for name, value in (output.metrics or {}).items() if _is_not_finite(value)}
        if bad:
            listed = ", ".join(f"{name} is {value}" for name, value in bad.items())
            logger.warning("The evaluation gave scores that are not finite: %s.", listed)
        return output


def _is_not_finite(value: Any) -> bool:
    return isinstance(value, float) and not math.isfinite(value)


def _loss_counts_items(model: torch.nn.Module, inputs: dict[str, Any], items: torch.Tensor) -> bool:
    """Whether the model divides its summed loss by ``num_items_in_batch``; decided by asking, without dropout."""
    training = model.training
    model.eval()
    try:
        with torch.no_grad():
            once, twice = (model(**inputs, num_items_in_batch=factor * items)["loss"].mean() for factor in (1, 2))
    except TypeError:  # its forward takes no such argument
        return False
    finally:
        model.train(training)
    return bool(torch.isclose(twice, once / 2, rtol=1e-2, atol=0.0))


class ScriptTrainer(TrainerMixin, Trainer):
    """Trainer with exact gradient accumulation and state space parameter groups."""


class CausalTrainer(ScriptTrainer):
    """Trainer for models that predict each token from those before it.

    Note:
        Trainer knows by name which models shift their labels, and its label smoothing, and for some (GPT-2) its count
        of label tokens, do not shift for all others: these models would be trained to copy their input. Here labels
        are shifted whatever the class is called.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._loss_shifts_labels = True
        if self.label_smoother is not None:
            self.label_smoother = _ShiftingLabelSmoother(self.args.label_smoothing_factor)


class _ShiftingLabelSmoother(LabelSmoother):
    def __call__(
        self, model_output: Any, labels: Any, shift_labels: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        return super().__call__(model_output, labels, shift_labels=True, num_items_in_batch=num_items_in_batch)


class SummarizationTrainer(TrainerMixin, Seq2SeqTrainer):
    """Seq2SeqTrainer with exact gradient accumulation and state space parameter groups."""
