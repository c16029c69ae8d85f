"""One run of `bench_recall`: train a model on a task of recall, and measure what it remembers, at what distance."""

import hashlib
import inspect
import math
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from itertools import pairwise
from pydoc_data.topics import topics
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import LinearLR
from transformers import get_scheduler

from benchmarks.recall_models import MODELS, SEGMENT, Compressor, Shape, build, fitted, sinusoids
from benchmarks.record import short_hash
from hf_hybrid.data.drawing import SPLITS, split_generator
from hf_hybrid.data.preprocessing import IGNORED_LABEL
from hf_hybrid.data.recall import RECALL, Examples, draw
from hf_hybrid.training.trainer.optimizer import separate_ssm_parameters

FAR = 32
"""Tokens beyond which no ablation reaches; answers that lie further back are far."""
FACTORS = (2, 4, 16)
"""Lengths of further tests, in lengths of training."""
BINS = (0, *(2**power for power in range(12)))
"""Least distances of the bins of accuracies; each ends where the next begins. 0 is the segment that is read."""
VALIDATION = 128
ENOUGH = 0.99
"""Share of right answers in validation from which a task counts as solved: of far ones if there are any, and of those
in the segment that is read."""
ENDING = 0.1
"""Steps that follow once a task is solved, as a share of all: the learning rate falls linearly to zero."""
LEARNT = 0.5
"""Share of right answers, of far ones if there are any, above which a model has learnt a task."""
STABLE = 1.5
"""Most times the fewest steps in which a lower rate may solve a task and be preferred to the fastest."""
LONGER_TOKENS = 2**18
"""Tokens of all tests of a greater length."""
WEIGHT_DECAY, BETA2 = 0.1, 0.98
_SCHEDULE = "cosine"
"""Transformers' name of how the learning rate falls after a linear warm-up."""
_WARMUP, _CLIP, _CHECKS, _BATCH_TOKENS = 0.1, 1.0, 16, 2**14


@dataclass(frozen=True)
class Recipe:
    """How a task is trained.

    Attributes:
        steps: Most updates.
        batch: Sequences of an update.
        width: Width of the models.
        sizes: Sizes of the task, where they are not those of `RECALL`.
        is_encoder_decoder: Whether encoder-decoders do the task, or causal language models.
        is_own: Whether its far answers lie where no ablation reaches, so that an ablation can only guess them.
        has_longer: Whether longer sequences than those of training ask for the same.
        has_seeds: Whether several seeds are worth their time.
    """

    steps: int
    batch: int = 32
    width: int = 64
    sizes: Mapping[str, Any] = field(default_factory=dict)
    is_encoder_decoder: bool = False
    is_own: bool = False
    has_longer: bool = True
    has_seeds: bool = True


# near answers, which every ablation reaches, are asked for too
_OWN: dict[str, Any] = {"batch": 16, "sizes": {"gap": 0}, "is_own": True}
_FACTS: dict[str, Any] = {"batch": 16, "sizes": {"segment_size": SEGMENT}, "is_encoder_decoder": True, "is_own": True}
RECIPES: dict[str, Recipe] = {
    "aggregate": Recipe(800, **_OWN),
    "majority": Recipe(800, **_OWN),
    "latch": Recipe(1600, **_OWN),
    "copying": Recipe(1600, is_own=True),
    "key_value": Recipe(2000, **_OWN),
    # longer documents of facts have blanks, which training never shows
    "few_facts": Recipe(1500, **_FACTS, has_longer=False),
    "facts": Recipe(2500, **_FACTS, has_longer=False),
    "sparse_facts": Recipe(2500, **_FACTS),
    "votes": Recipe(2500, **_FACTS, has_longer=False),
    # large batches: with few questions in each update, even full attention does not begin to associate
    "in_context_recall": Recipe(1000, batch=64),
    "noisy_recall": Recipe(1000, batch=64),
    "selective_copying": Recipe(1200, batch=8),
    "needle": Recipe(1600, batch=8),
    "compression": Recipe(800, has_longer=False),
    "memorization": Recipe(800, has_longer=False, has_seeds=False),
    "mqar": Recipe(1000, batch=128, width=128),
}
"""The tasks of the benchmark, in order: first those that tell an architecture from its ablation."""
STATE_TASKS = ("copying", "mqar")
"""The tasks that show what a size of the state is worth."""


@dataclass(frozen=True)
class Run:
    """One model on one task with one seed at one learning rate.

    Attributes:
        task: The task.
        model: The model.
        seed: The seed.
        rate: The learning rate.
        overtaken: Updates after which a run that has not solved the task ends untested, since another rate has.
    """

    task: str
    model: str
    seed: int
    rate: str
    overtaken: int | None = field(default=None, compare=False)

    @property
    def key(self) -> tuple[str, ...]:
        """What its row is found by."""
        return self.task, self.model, str(self.seed), self.rate

    def __str__(self) -> str:
        return f"{self.task}: {self.model}, seed {self.seed}, rate {self.rate}"


@cache
def texts() -> dict[str, bytes]:
    """Return real text by split: Python's language reference, each paragraph once, the last to validate and test."""
    paragraphs = dict.fromkeys("\n\n".join(topics[name] for name in sorted(topics)).split("\n\n"))
    cuts = [len(paragraphs) * fifth // 5 for fifth in (0, 3, 4, 5)]
    parts = zip(("train", "validation", "test"), pairwise(cuts), strict=True)
    return {split: "\n\n".join([*paragraphs][start:end]).encode() for split, (start, end) in parts}


def examples(task: str, split: str, count: int, recipe: Recipe, **more: Any) -> Examples:
    """Draw examples of a task with the sizes of a recipe."""
    given = {"text": texts()[split]} if "text" in RECALL[task].needs else {}
    return draw(task, split, count, **{**recipe.sizes, **given, **more})


def shape_of(task: str, recipe: Recipe) -> Shape:
    """Return what the task asks of a model."""
    return Shape(examples(task, "train", 1, recipe).vocab_size, RECALL[task].length, recipe.width)


@cache
def drawn_hash(task: str, sizes: tuple[tuple[str, Any], ...]) -> str:
    """Return a hash of a task's first examples of each split, and of the text that they come from.

    It changes with the code that draws them, with the random numbers of NumPy, and with Python's documentation.
    """
    found = hashlib.sha256()
    for split in SPLITS:
        given = {"text": texts()[split]} if "text" in RECALL[task].needs else {}
        found.update(given.get("text", b""))
        part = draw(task, split, 16, **{**dict(sizes), **given})
        for array in (part.input_ids, part.labels, part.distances, part.document_ids):
            found.update(b"" if array is None else array.tobytes())
    return found.hexdigest()


def recipe_hash(task: str, model: str, recipe: Recipe) -> str:
    """Return a hash of a task's runs of a model: data, configuration, settings, and the code that trains and tests.

    Seed and learning rate are not part of it, and neither is the code of the models: rows of another version of this
    package are refused for that, and whoever changes a model within a version has to measure again.
    """
    config = fitted(model, shape_of(task, recipe)).to_dict()
    config.pop("transformers_version", None)
    constants = [FAR, FACTORS, BINS, VALIDATION, ENOUGH, ENDING, LEARNT, LONGER_TOKENS, WEIGHT_DECAY, BETA2]
    constants += [STABLE, _SCHEDULE, _WARMUP, _CLIP, _CHECKS]
    known = RECALL[task]
    defaults = {name: field.default for name, field in inspect.signature(known.function).parameters.items()}
    data = [defaults, dict(known.sizes), known.train, known.test, drawn_hash(task, tuple(recipe.sizes.items()))]
    code: list[Any] = [optimizer_of, separate_ssm_parameters, train, _update, _validated, _batches, rows_of, _logits]
    code += [accuracies, _tests, *((Compressor, sinusoids) if task == "compression" else ())]
    sources = [inspect.getsource(part) for part in code]
    return short_hash([task, data, asdict(recipe), config, MODELS[model].encodes, constants, sources])


# ---- training ----


def optimizer_of(model: nn.Module, rate: float) -> torch.optim.Optimizer:
    """Return AdamW; norms, biases and other vectors are not decayed, and state spaces are not either."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [parameter for parameter in parameters if parameter.ndim > 1], "weight_decay": WEIGHT_DECAY},
        {"params": [parameter for parameter in parameters if parameter.ndim < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=rate, betas=(0.9, BETA2))
    separate_ssm_parameters(optimizer, model.model if isinstance(model, Compressor) else model)
    return optimizer


def train(run: Run, recipe: Recipe) -> dict[str, float]:
    """Train and test a model.

    The learning rate follows its schedule, to its end or until a validation finds the task solved; then it falls to
    zero, so that all models are tested in a like state.

    Returns:
        ``parameters``, ``steps`` (the updates that were done), ``cpu_minutes`` of these, ``chance``, ``without_keys``
        if the task has it, ``validation`` (the share of right far answers, or of all if none is far; of
        documents that of the segment that is read if it is less) and ``validation_loss``; ``solved_step`` if the task
        was solved; and what `accuracies` returns for the tests, of longer sequences as ``x2``, ... . No tests if
        another rate was faster; only ``parameters`` if the loss was not finite.
    """
    shape = shape_of(run.task, recipe)
    model: nn.Module = build(run.model, shape, run.seed)
    values: dict[str, float] = {"parameters": model.num_parameters()}  # type: ignore[operator]
    if run.task == "compression":
        model = Compressor(model, shape.vocab_size)  # type: ignore[arg-type]
    optimizer = optimizer_of(model, float(run.rate))
    validation = examples(run.task, "validation", VALIDATION, recipe, seed=run.seed)
    values["chance"] = validation.chance
    if validation.without_keys is not None:
        values["without_keys"] = validation.without_keys
    ending, check_every = math.ceil(ENDING * recipe.steps), recipe.steps // _CHECKS or 1
    schedule: Any = get_scheduler(_SCHEDULE, optimizer, math.ceil(_WARMUP * recipe.steps), recipe.steps)
    began, end, is_ending = time.process_time(), recipe.steps, False
    for step, batch in enumerate(_batches(run, recipe), 1):
        if not _update(model, batch, optimizer):
            return {"parameters": values["parameters"]}
        schedule.step()
        if step == end or (not is_ending and step % check_every == 0):
            values |= _validated(model, validation, step, (time.process_time() - began) / 60)
            if values["validation"] >= ENOUGH:
                values.setdefault("solved_step", step)
            elif run.overtaken is not None and step >= run.overtaken and not is_ending:
                return values
        if step == end:
            break
        if not is_ending and "solved_step" in values:
            is_ending, end = True, min(recipe.steps, step + ending)
            schedule = LinearLR(optimizer, 1.0, 0.0, total_iters=end - step)
    return values | _tests(model, run, recipe)


def _update(model: nn.Module, batch: Examples, optimizer: torch.optim.Optimizer) -> bool:
    """Update the weights; return whether the loss was finite."""
    model.train()
    loss = F.cross_entropy(_logits(model, batch).flatten(0, 1), torch.from_numpy(batch.labels).flatten())
    if not math.isfinite(loss.item()):
        return False
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), _CLIP)
    optimizer.step()
    optimizer.zero_grad()
    return True


def _validated(model: nn.Module, validation: Examples, step: int, minutes: float) -> dict[str, float]:
    found = accuracies(model, validation)
    right = min(found.get("far", found["accuracy"]), found.get("at_0", 1.0))
    scores = {"validation": right, "validation_loss": found["loss"]}
    return {**scores, "steps": step, "cpu_minutes": minutes}


def _batches(run: Run, recipe: Recipe) -> Iterator[Examples]:
    """Yield batches without end: new examples, or those of a fixed training set in a new order in each epoch."""
    count = RECALL[run.task].train
    if count is None:
        number = 0
        while True:
            yield examples(run.task, "train", recipe.batch, recipe, seed=run.seed, number=number)
            number += 1
    kept = examples(run.task, "train", count, recipe, seed=run.seed)
    order = split_generator(run.seed, "train", 1)
    size = min(recipe.batch, count)
    while True:
        places = order.permutation(count)
        for start in range(0, count - size + 1, size):
            yield rows_of(kept, places[start : start + size])


def rows_of(kept: Examples, places: Any) -> Examples:
    """Return some of the examples."""
    documents = None if kept.document_ids is None else kept.document_ids[places]
    input_ids, labels, distances = (part[places] for part in (kept.input_ids, kept.labels, kept.distances))
    return replace(kept, input_ids=input_ids, labels=labels, distances=distances, document_ids=documents)


def _logits(model: nn.Module, batch: Examples) -> torch.Tensor:
    input_ids = torch.from_numpy(batch.input_ids)
    if isinstance(model, Compressor):
        return model(input_ids)
    if batch.document_ids is None:
        return model(input_ids=input_ids, use_cache=False).logits
    documents = torch.from_numpy(batch.document_ids)
    return model(input_ids=documents, decoder_input_ids=input_ids, use_cache=False).logits


# ---- testing ----


@torch.no_grad()
def accuracies(model: nn.Module, tested: Examples) -> dict[str, float]:
    """Return shares of right answers: ``accuracy`` of all, ``far`` of those beyond `FAR` tokens, ``at_D`` by distance.

    And ``loss``, the mean cross-entropy of all answers. For documents, whose distances are segments, ``far`` is every
    answer outside the segment that is read, and ``at_D`` counts segments. Shares of nothing are left out.
    """
    model.eval()
    read = tested.input_ids if tested.document_ids is None else tested.document_ids
    size = max(1, _BATCH_TOKENS // max(read.shape[1], tested.input_ids.shape[1]))
    found, loss = [], 0.0
    for start in range(0, len(tested.input_ids), size):
        batch = rows_of(tested, slice(start, start + size))
        logits = _logits(model, batch)
        found.append(logits.argmax(dim=-1))
        loss += F.cross_entropy(logits.flatten(0, 1), torch.from_numpy(batch.labels).flatten(), reduction="sum").item()
    is_right = torch.cat(found).numpy() == tested.labels
    asked, far = tested.labels != IGNORED_LABEL, FAR if tested.document_ids is None else 0
    shares = {"accuracy": asked, "far": asked & (tested.distances > far)}
    for least in BINS:
        shares[f"at_{least}"] = asked & (tested.distances >= least) & (tested.distances < max(1, 2 * least))
    found_shares = {name: float(is_right[where].mean()) for name, where in shares.items() if where.any()}
    return {"loss": loss / int(asked.sum()), **found_shares}


def _tests(model: nn.Module, run: Run, recipe: Recipe) -> dict[str, float]:
    """Test at the length of training and at longer ones, which fill the bins of distances that it does not have.

    At these, too, far answers count, or all if none is far. A model that has not learnt the task is not tested there.
    """
    length, count = RECALL[run.task].length, RECALL[run.task].test
    values = accuracies(model, examples(run.task, "test", count, recipe, seed=run.seed))
    is_learnt = values.get("far", values["accuracy"]) > LEARNT
    for factor in FACTORS if recipe.has_longer and is_learnt else ():
        many = max(1, LONGER_TOKENS // (factor * length))
        found = accuracies(model, examples(run.task, "test", many, recipe, seed=run.seed, length=factor * length))
        values[f"x{factor}"] = found.get("far", found["accuracy"])
        values |= {name: share for name, share in found.items() if name.startswith("at_") and name not in values}
    return values


def is_done_by(task: str, model: str) -> bool:
    """Return whether a model does a task: encoder-decoders read documents, the others do everything else.

    Models with another size of the state do `STATE_TASKS` alone, and a model may name its tasks.
    """
    kind = MODELS[model]
    if kind.state_of is not None and task not in STATE_TASKS:
        return False
    if kind.tasks is not None and task not in kind.tasks:
        return False
    return kind.is_encoder_decoder == RECIPES[task].is_encoder_decoder


def estimated_minutes(task: str, model: str, recipe: Recipe, updates: int = 3) -> float:
    """Return the CPU minutes of a run that takes all its steps, from the time of a few of them.

    Tests and validation compute outputs alone, a third of an update's work.
    """
    known, shape = RECALL[task], shape_of(task, recipe)
    network: nn.Module = build(model, shape, seed=0)
    network = Compressor(network, shape.vocab_size) if task == "compression" else network  # type: ignore[arg-type]
    optimizer, seconds = optimizer_of(network, 0.001), []
    for batch, _ in zip(_batches(Run(task, model, 0, "0.001"), recipe), range(updates), strict=False):
        began = time.process_time()
        _update(network, batch, optimizer)
        seconds.append(time.process_time() - began)
    longer = len(FACTORS) * LONGER_TOKENS / known.length if recipe.has_longer else 0
    tested = (_CHECKS * VALIDATION + known.test + longer) / 3
    return min(seconds) / recipe.batch / 60 * (recipe.steps * recipe.batch + tested)
