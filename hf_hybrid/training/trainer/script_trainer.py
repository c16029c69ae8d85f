"""The Trainers of the scripts, with every overridden method of transformers' Trainer."""

import logging
import shutil
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any, cast

import datasets
import torch
from torch.utils.data import IterableDataset, Sampler, SequentialSampler
from transformers import Seq2SeqTrainer, Trainer
from transformers.trainer_pt_utils import LengthGroupedSampler, find_batch_size
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, HubStrategy, rotate_checkpoints

from hf_hybrid.context_parallel import context_parallel
from hf_hybrid.data.preprocessing import IGNORED_LABEL
from hf_hybrid.training.flags.run import ScriptTrainingArguments, SummarizationTrainingArguments
from hf_hybrid.training.model.adapters import complete_saved_adapter
from hf_hybrid.training.processes import Agreement, count_new_rows, let_autocast_choose
from hf_hybrid.training.run_folder.checkpoints import (
    begin_saving,
    complete_checkpoints,
    faults_on_disk,
    finish_saving,
    mark_complete,
    was_cut_off,
)
from hf_hybrid.training.run_folder.files import CARD_FILE, CannotSave, explain_full_disk, replacing
from hf_hybrid.training.run_folder.hub import explain_hub_error
from hf_hybrid.training.trainer.division import DividedLabelSmoother, Division
from hf_hybrid.training.trainer.loss import ShiftingLabelSmoother, can_skip_logits, loss_counts_items
from hf_hybrid.training.trainer.measuring import Measurements
from hf_hybrid.training.trainer.noisy_data import NoisyRows, NoisyStream, SimilarLengths
from hf_hybrid.training.trainer.non_finite import (
    NonFiniteLoss,
    NumberingCollator,
    StepCheck,
    can_number,
    number_examples,
    warn_of_scores,
)
from hf_hybrid.training.trainer.optimizer import separate_ssm_parameters

logger = logging.getLogger(__name__)


class ScriptTrainer(Trainer):
    """Trainer with exact losses for every model, state space groups, and files that are complete or marked.

    Attributes:
        measurements: Counters and clocks of the run.
        agreement: Lets the processes decide together while they train.
        stop_wished: Whether this process was asked to stop after the current step.
        is_saving: Whether a checkpoint is being saved; it stays true if that fails.
        division: How sequences are divided among processes; None if they are not.
    """

    args: ScriptTrainingArguments
    agreement = Agreement(1)
    stop_wished = is_saving = False
    _stop_agreed = _has_begun = False
    _autocasts = False
    _loss_shifts_labels = False
    _loss_counts_items: bool | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.args.logging_nan_inf_filter = False  # it would hide losses that are not finite
        self.measurements = Measurements(cast("torch.nn.Module", self.model))
        self.add_callback(self.measurements)
        self._outputs: Any = None
        self._step = StepCheck()
        self._can_skip_logits = can_skip_logits(cast("torch.nn.Module", self.model))
        self.division = Division(self.args) if self.args.context_parallel_size > 1 else None
        self._score = None
        if self.division is not None:
            if self.label_smoother is not None:
                self.label_smoother = DividedLabelSmoother(self.args.label_smoothing_factor, self.division)
            # scores of own tokens are added up where they are made
            self._score, self.preprocess_logits_for_metrics = self.preprocess_logits_for_metrics, None

    # ---- several processes ----

    def create_accelerator_and_postprocess(self) -> None:
        """Prepare for several processes; if FSDP shards state spaces, autocast chooses precisions."""
        super().create_accelerator_and_postprocess()
        self._autocasts = let_autocast_choose(self.accelerator, self.model)

    def autocast_smart_context_manager(self, *args: Any, **kwargs: Any) -> Any:
        """Return the context of a loss; accelerate's autocast if FSDP shards state spaces."""
        if self._autocasts:
            return self.accelerator.autocast()
        return super().autocast_smart_context_manager(*args, **kwargs)

    def get_cp_size(self) -> int:
        """Return how many processes share a sequence: Trainer counts its rows and labels once."""
        return self.args.context_parallel_size

    def _prepare_context_parallel_inputs(self, model: Any, inputs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """Return a context in which models read divided sequences, and this process's part of a batch."""
        if self.division is None:
            return super()._prepare_context_parallel_inputs(model, inputs)
        self.division.check_together(inputs)
        smooths = self.label_smoother is not None
        own = self.division.divide(inputs, shifts=self._loss_shifts_labels, smooths=smooths)
        return partial(context_parallel, self.division.group), own

    def _track_num_input_tokens(self, inputs: dict[str, Any]) -> None:
        """Count the tokens of rows that processes share once."""
        before = self.state.num_input_tokens_seen
        super()._track_num_input_tokens(inputs)
        self.state.num_input_tokens_seen = before + (self.state.num_input_tokens_seen - before) // self.get_cp_size()

    def floating_point_ops(self, inputs: dict[str, Any]) -> Any:
        """Return the operations of a batch, of shared rows this process's part."""
        count = super().floating_point_ops(inputs)
        return count if self.division is None else count / self.division.size

    # ---- training ----

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """Train, with all processes stopping together."""
        self.agreement = Agreement(self.args.world_size)
        self.is_saving = self.stop_wished = self._stop_agreed = self._has_begun = False
        if self.division is not None:
            torch.manual_seed(self.division.seed)  # dropout of other tokens draws other numbers
        return super().train(*args, **kwargs)

    def _load_rng_state(self, checkpoint: str | None) -> None:
        """Restore random numbers; those of a run whose processes shared no sequences, or others, may be alike."""
        super()._load_rng_state(checkpoint)
        if self.division is not None and self.division.draws_alike():
            torch.manual_seed(self.division.seed + self.state.global_step * self.args.world_size)

    @property
    def must_stop(self) -> bool:
        """Whether training ends after this step; the same in all processes."""
        return self.stop_wished if self.args.world_size <= 1 else self._stop_agreed

    def create_optimizer(self, model: Any = None) -> torch.optim.Optimizer:
        """Create the optimizer, with the state space parameters in their own groups."""
        optimizer = super().create_optimizer(model)
        rate = self.args.ssm_learning_rate
        count = separate_ssm_parameters(optimizer, cast("torch.nn.Module", model or self.model), rate)
        if rate is not None and not count:
            logger.warning("--ssm_learning_rate %s has no effect: the model trains no state space parameters.", rate)
        return optimizer

    def _get_dataloader(
        self, dataset: Any, description: str, batch_size: int, sampler_fn: Any = None, is_training: bool = False,
        dataloader_key: str | None = None,
    ) -> Any:  # fmt: skip
        """Load data; training batches hold the positions of their examples."""
        if is_training and self.is_in_train and can_number(dataset, self):
            if isinstance(dataset, datasets.Dataset):
                dataset = self._remove_unused_columns(dataset, description)
            rows, sample = dataset, sampler_fn
            sampler_fn = None if sample is None else lambda _: sample(rows)
            dataset = number_examples(rows)
        with nullcontext() if self.division is None else self.division.loading(self.accelerator):
            return super()._get_dataloader(dataset, description, batch_size, sampler_fn, is_training, dataloader_key)

    def _get_train_sampler(self, train_dataset: Any = None) -> Sampler[int] | None:
        """Draw examples as Trainer does; texts with noise by lengths that are known without drawing the noise."""
        rows = self.train_dataset if train_dataset is None else train_dataset
        if isinstance(rows, NoisyStream):  # has an order of its own
            return None
        if isinstance(rows, NoisyRows) and self.args.train_sampling_strategy == "group_by_length":
            step = self.args.train_batch_size * self.args.gradient_accumulation_steps * self.args.replicas
            return SimilarLengths(rows, step, self.args.seed if self.args.data_seed is None else self.args.data_seed)
        return super()._get_train_sampler(train_dataset)

    def _get_collator_with_removed_columns(self, data_collator: Any, description: str | None = None) -> Any:
        return NumberingCollator(super()._get_collator_with_removed_columns(data_collator, description))

    def get_batch_samples(self, *args: Any, **kwargs: Any) -> Any:
        """Take the batches of a step, and remove the positions of their examples."""
        if self.division is not None and not self._has_begun:
            self.accelerator.wait_for_everyone()  # callbacks of the first process may take long at the beginning
            self._has_begun = True
        batches, count = super().get_batch_samples(*args, **kwargs)
        self._step = StepCheck(batches)
        return batches, count

    def _get_num_items_in_batch(self, *args: Any, **kwargs: Any) -> Any:
        """Count the labels of a step, which waits for all processes, when all of a group have read its rows."""
        if self.division is not None:
            self.division.check_together()
        return super()._get_num_items_in_batch(*args, **kwargs)

    def training_step(self, model: torch.nn.Module, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> torch.Tensor:
        """Compute a batch's loss and gradients, and count the batch."""
        self.measurements.count(inputs)
        loss = super().training_step(model, inputs, *args, **kwargs)
        self._step.losses.append(loss)
        return loss

    def compute_loss(
        self, model: Any, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """Return the loss, normalised by the label tokens of all accumulated batches.

        Note:
            Trainer leaves the division by the number of accumulation steps to every model whose forward takes keyword
            arguments. T5, BART, LED and LongT5 take them and ignore them: with N accumulation steps, their gradients
            come out N times too large. Here we test the model: if doubling ``num_items_in_batch`` does not halve its
            loss, we weight the mean that it returns by its share of the label tokens. Then N small batches equal one
            large one.
        """
        if model.training:
            inputs = self._without_logits(inputs)
        else:
            num_items_in_batch = None  # average over this process's batch, not over those of all processes
        if self.division is not None:
            loss, outputs = super().compute_loss(model, inputs, True, num_items_in_batch)
            if num_items_in_batch is not None and self.model_accepts_loss_kwargs:
                loss = loss / self.division.size  # Trainer multiplies by the number of all processes
            loss = self.division.for_mean(loss)
            return (loss, outputs) if return_outputs else loss
        smoothed = self.label_smoother is not None  # Trainer's label smoothing counts items
        if num_items_in_batch is None or smoothed or "labels" not in inputs:
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        # count like Trainer: a language model does not predict the first token of a row
        labels = inputs["labels"][..., 1:] if self._loss_shifts_labels else inputs["labels"]
        items = labels.ne(IGNORED_LABEL).sum()
        if self._loss_counts_items is None and items:  # a batch without a label tells nothing
            self._loss_counts_items = loss_counts_items(model, inputs, items)
            if not self._loss_counts_items and self.args.n_gpu > 1:
                # DataParallel returns one mean per GPU: fall back to the mean over batches
                self.model_accepts_loss_kwargs = False
        loss, outputs = super().compute_loss(model, inputs, True, num_items_in_batch)
        if not self._loss_counts_items and self.args.n_gpu <= 1:
            loss = loss * (items / num_items_in_batch)
        return (loss, outputs) if return_outputs else loss

    def _without_logits(self, inputs: dict[str, Any]) -> dict[str, Any]:
        """Ask for the loss alone, which takes less memory, of a model that can do so; label smoothing needs logits."""
        has_labels = bool({"labels", "shift_labels"} & inputs.keys())
        if self.label_smoother is None and has_labels and self._can_skip_logits:
            return {**inputs, "skip_logits": True}
        return inputs

    def _get_grad_norm(self, model: Any, grad_norm: Any = None) -> Any:
        """Return the norm of a step's gradients, right before the weights change.

        Raises:
            NonFiniteLoss: In any process, a loss of the step or the norm is not finite.
        """
        norm = super()._get_grad_norm(model, grad_norm=grad_norm)
        is_bad = self._step.is_bad(norm, skips=self.accelerator.scaler is not None)
        is_bad, self._stop_agreed = self.agreement.any(is_bad, self.stop_wished)
        if is_bad:
            stream, workers = isinstance(self.train_dataset, IterableDataset), self.args.dataloader_num_workers
            raise NonFiniteLoss(
                f"training stopped at step {self.state.global_step + 1}: "
                f"{self._step.explain(self.agreement, stream=stream, workers=workers)}. The weights are still those "
                "of the step before. Look at these examples, or try a smaller --learning_rate"
                f"{', or --bf16 in place of --fp16' if self.args.fp16 else ''}."
            )
        return norm

    # ---- evaluation ----

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Log as Trainer does; its printing callback removes `total_flos` from the metrics, this puts it back."""
        total_flos = logs.get("total_flos")
        super().log(logs, start_time)
        if total_flos is not None:
            logs["total_flos"] = total_flos

    def _get_eval_sampler(self, eval_dataset: Any) -> Sampler[int] | None:
        """Visit evaluation examples in order, so that line N of a predictions file belongs to document N.

        Note:
            With ``--train_sampling_strategy group_by_length``, Trainer would group these by length too.
        """
        sampler = super()._get_eval_sampler(eval_dataset)
        if not isinstance(sampler, LengthGroupedSampler):
            return sampler
        return SequentialSampler(eval_dataset) if self.args.world_size <= 1 else None

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        """Evaluate or predict each example once, and keep the outputs: ``evaluate`` returns only the metrics.

        Note:
            Processes fill up an uneven last batch with repeated examples. Seq2SeqTrainer keeps these: they count
            twice in its scores, and follow the last document's line in a predictions file.
        """
        self._outputs = None  # never hold two splits at once
        gather = self.accelerator.gather_for_metrics
        self.gather_function = partial(gather, use_gather_object=self.args.eval_use_gather_object)
        if self.division is not None:
            self.accelerator.wait_for_everyone()  # one process may have saved a model
            self.gather_function = partial(self.division.gather, self.accelerator)
        output = super().evaluation_loop(*args, **kwargs)
        warn_of_scores(output.metrics or {})
        if self.compute_metrics is not None:  # without metrics, outputs may be logits over the vocabulary
            self._outputs = output
        return output

    def _issue_warnings_after_load(self, load_result: Any) -> None:
        """Do not warn of tied weights, of which a checkpoint has one copy."""
        tied = getattr(self.model, "all_tied_weights_keys", None) or {}
        load_result.missing_keys[:] = [key for key in load_result.missing_keys if key not in tied]
        super()._issue_warnings_after_load(load_result)

    def take_outputs(self) -> Any:
        """Return and forget the outputs of the last evaluation, in the order of the data; None if there are none."""
        outputs, self._outputs = self._outputs, None
        return outputs

    def prediction_step(
        self, model: Any, inputs: dict[str, Any], prediction_loss_only: bool, *args: Any, **kwargs: Any
    ) -> Any:
        """Compute loss, predictions and labels of a batch; the loss without repeated rows.

        If processes share rows, predictions are the scores of these.
        """
        step = super().prediction_step
        if prediction_loss_only:
            inputs = self._without_logits(inputs)
        context, own = nullcontext, inputs
        generates = getattr(self.args, "predict_with_generate", False)  # each process alone, from the complete rows
        if self.division is not None and generates:
            self.division.check_together(inputs)
        if self.division is not None and not generates and any(inputs.get(name) is None for name in self.label_names):
            context, own = self._prepare_context_parallel_inputs(model, inputs)  # as Trainer does with labels
        with context():
            loss, predictions, labels = step(model, own, prediction_loss_only, *args, **kwargs)
        if self.division is not None and self._score is not None and labels is not None:
            shifts = self._loss_shifts_labels
            predictions = self.division.scores(self._score, predictions, labels, shifts=shifts)
        count = count_new_rows(self.accelerator, find_batch_size(inputs), self.args.context_parallel_size)
        if loss is not None and count is not None:
            first = {
                name: value[:count] if isinstance(value, torch.Tensor) and value.dim() else value
                for name, value in inputs.items()
            }
            loss = step(model, first, True, *args, **kwargs)[0]
        return loss, predictions, labels

    # ---- saving: mark what is complete, and only then delete older checkpoints ----

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save the model, and mark its folder as incomplete until it is saved.

        It does not push: `push` does that later, with results and card.

        Raises:
            CannotSave: The disk is full.
        """
        folder = Path(output_dir or str(self.args.output_dir))
        with explain_full_disk(folder, "the model", self._advise):
            if self.args.should_save:
                begin_saving(folder)
            super().save_model(output_dir, _internal_call=True)
            if self.is_saving:
                self.args.save_total_limit = None  # Trainer deletes old checkpoints before this one could be marked
            elif self.args.should_save:
                finish_saving(folder)

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        """Save the model, and what peft does not save of an adapter."""
        super()._save(output_dir, state_dict)
        complete_saved_adapter(self.model, output_dir or str(self.args.output_dir))

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        """Save a checkpoint, mark it as complete, and only then delete older ones.

        Raises:
            CannotSave: The disk is full. Deletes what was written, and leaves older checkpoints as they were.
        """
        run_folder = self._get_output_dir(trial)
        folder = Path(run_folder, f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}")
        self.is_saving, self._is_marked, self._save_total_limit = True, False, self.args.save_total_limit
        try:
            with explain_full_disk(folder, folder.name, self._advise):
                super()._save_checkpoint(model, trial)
                self._mark_checkpoint(folder)
        except CannotSave:
            if self.args.should_save and was_cut_off(folder):
                shutil.rmtree(folder, ignore_errors=True)
            raise
        finally:
            self.args.save_total_limit = self._save_total_limit
        self.is_saving = False
        if self.args.should_save:  # order by step: file times may mislead
            rotate_checkpoints(run_folder, self.args.save_total_limit, self.state.best_model_checkpoint)
        if self.division is not None:
            self.accelerator.wait_for_everyone()  # which may take longer than processes wait in a step

    def _mark_checkpoint(self, folder: Path) -> None:
        if not self._is_marked:
            self.accelerator.wait_for_everyone()
            if self.args.should_save:
                mark_complete(folder)
            self._is_marked = True

    def _advise(self) -> str:
        """Say how to continue after a full disk."""
        complete = complete_checkpoints(str(self.args.output_dir))
        if not complete:
            return "There is no complete checkpoint; make room and start anew."
        return (
            f"{complete[-1]} is complete: make room, then run the same command with --resume_from_checkpoint auto to "
            "continue from it"
        )

    def save_state(self) -> None:
        """Write ``trainer_state.json`` into the output folder.

        Raises:
            CannotSave: The disk is full.
        """
        if self.is_world_process_zero():
            target = Path(str(self.args.output_dir), "trainer_state.json")
            with explain_full_disk(target.parent, "the state", self._advise), replacing(target) as path:
                target.parent.mkdir(parents=True, exist_ok=True)
                self.state.save_to_json(str(path))

    def _load_best_model(self) -> None:
        """Load the weights of the best checkpoint, unless they are damaged."""
        best = Path(str(self.state.best_model_checkpoint))
        if wrong := faults_on_disk(best):
            message = "The best checkpoint %s is not loaded: %s. The weights are those of the last step."
            logger.warning(message, best, " and ".join(wrong))
        else:
            super()._load_best_model()

    # ---- the Hub ----

    def init_hf_repo(self, token: str | None = None, private: bool | None = None) -> None:
        """Create the repository for ``--push_to_hub``.

        Raises:
            ValueError: The Hub refuses it or cannot be reached.
        """
        try:
            super().init_hf_repo(token=token, private=private)
        except Exception as error:  # raised before training, whose result could not be pushed
            name = self.args.hub_model_id or Path(str(self.args.output_dir)).absolute().name
            raise ValueError(f"--push_to_hub: {name} cannot be made on the Hub: {explain_hub_error(error)}") from error

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        """Mark a checkpoint as complete, copy it into the output folder, and upload it."""
        self._mark_checkpoint(Path(checkpoint_folder))
        self.args.save_total_limit = self._save_total_limit
        folder, strategy = Path(str(self.args.output_dir)), self.args.hub_strategy
        copies = self.is_world_process_zero() and strategy != HubStrategy.END
        if copies:
            begin_saving(folder)
        if self._save_total_limit is not None and strategy in (HubStrategy.CHECKPOINT, HubStrategy.ALL_CHECKPOINTS):
            self._finish_current_push()  # or the previous checkpoint is deleted while it is uploaded
        self._name_failed_pushes()
        super()._push_from_checkpoint(checkpoint_folder)
        if copies:
            finish_saving(folder)

    def _finish_current_push(self) -> None:
        super()._finish_current_push()
        self._name_failed_pushes()

    def _name_failed_pushes(self) -> None:
        """Warn about failed pushes of checkpoints: they run in the background, and Trainer never checks them."""
        push: Any = getattr(self, "push_in_progress", None)
        if push is None or not push.is_done():
            return
        for error in filter(None, (job.exception() for job in push.jobs)):
            name, reason = self.hub_model_id, explain_hub_error(error)
            logger.warning("--push_to_hub: a checkpoint could not be pushed to %s: %s", name, reason)
        self.push_in_progress = None

    def create_model_card(self, *args: Any, **kwargs: Any) -> None:
        """Write Trainer's own card only if a trained model has none: it knows less than ours, and replaces any."""
        if self.args.do_train and not Path(str(self.args.output_dir), CARD_FILE).is_file():
            super().create_model_card(*args, **kwargs)


class CausalTrainer(ScriptTrainer):
    """Trainer for models that predict each token from those before it.

    Note:
        Trainer knows by name which models shift their labels. For all others, its label smoothing does not shift, nor
        for some (GPT-2) its count of label tokens: they would learn to copy their input. Here labels always shift.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._loss_shifts_labels = True
        if self.label_smoother is not None and self.division is None:
            self.label_smoother = ShiftingLabelSmoother(self.args.label_smoothing_factor)


class SummarizationTrainer(ScriptTrainer, Seq2SeqTrainer):
    """Seq2SeqTrainer with the methods of `ScriptTrainer`, whose ``super()`` is Seq2SeqTrainer here."""

    args: SummarizationTrainingArguments
