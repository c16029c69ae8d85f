"""One run of `bench_recall`: train a model on a task of recall, and measure what it remembers, at what distance."""

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
from transformers import get_scheduler

from benchmarks.comparison import SEARCH
from benchmarks.recall_models import MODELS, SEGMENT, Compressor, Shape, build, fitted
from benchmarks.record import short_hash
from hf_hybrid.data.drawing import split_generator
from hf_hybrid.data.preprocessing import IGNORED_LABEL
from hf_hybrid.data.recall import RECALL, Examples, draw
from hf_hybrid.training.trainer.optimizer import separate_ssm_parameters

FAR = 32
"""Tokens beyond which no ablation reaches, and from which the own tasks ask."""
FACTORS = (2, 4, 16)
"""Lengths of further tests, in lengths of training."""
BINS = tuple(2**power for power in range(12))
"""Least distances of the bins of accuracies; each ends where the next begins."""
VALIDATION = 128
ENOUGH = 0.99
"""Share of right answers in validation at which training ends."""
SEARCHED = 0.25
"""Steps of a run that searches a learning rate, as a share of all."""
_TOKENS = 2**16
"""Tokens of a batch of tests, and of all tests of a greater length."""
WEIGHT_DECAY = 0.1
_SCHEDULE = "cosine"
"""Transformers' name of how the learning rate falls after a linear warm-up."""
_WARMUP, _CLIP, _CHECKS = 0.1, 1.0, 12


@dataclass(frozen=True)
class Recipe:
    """How a task is trained.

    Attributes:
        steps: Most updates.
        batch: Sequences of an update.
        width: Width of the models.
        sizes: Sizes of the task, where they are not those of `RECALL`.
        is_encoder_decoder: Whether encoder-decoders do the task, or causal language models.
    """

    steps: int
    batch: int = 32
    width: int = 64
    sizes: Mapping[str, Any] = field(default_factory=dict)
    is_encoder_decoder: bool = False


RECIPES: dict[str, Recipe] = {
    "aggregate": Recipe(400),
    "latch": Recipe(400),
    "key_value": Recipe(800),
    "facts": Recipe(1500, sizes={"segment_size": SEGMENT}, is_encoder_decoder=True),
    "sparse_facts": Recipe(1500, sizes={"segment_size": SEGMENT}, is_encoder_decoder=True),
    "mqar": Recipe(1200, width=128),
    "in_context_recall": Recipe(600),
    "noisy_recall": Recipe(600),
    "selective_copying": Recipe(600, batch=16),
    "compression": Recipe(800),
    "memorization": Recipe(800),
    "needle": Recipe(800, batch=16),
}
"""The tasks of the benchmark, in order."""
STATE_TASKS = ("mqar", "key_value")
"""The tasks that show what a size of the state is worth."""


@dataclass(frozen=True)
class Run:
    """One model on one task with one seed at one learning rate.

    Attributes:
        task: The task.
        model: The model.
        seed: The seed.
        rate: The learning rate.
        is_search: Whether it is a shortened run that only helps to choose the rate: it is validated and not tested.
    """

    task: str
    model: str
    seed: int
    rate: str
    is_search: bool = False

    @property
    def key(self) -> tuple[str, str]:
        """Seed and learning rate of its row."""
        return SEARCH if self.is_search else str(self.seed), self.rate

    def steps(self, recipe: Recipe) -> int:
        """Return its most updates."""
        return math.ceil(SEARCHED * recipe.steps) if self.is_search else recipe.steps

    def __str__(self) -> str:
        return f"{self.task}: {self.model}, {'search' if self.is_search else f'seed {self.seed}'}, rate {self.rate}"


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


def recipe_hash(task: str, model: str, recipe: Recipe) -> str:
    """Return a hash of everything that determines a task's runs of a model, except seed and learning rate."""
    config = fitted(model, shape_of(task, recipe)).to_dict()
    config.pop("transformers_version", None)
    constants = [FAR, FACTORS, BINS, VALIDATION, ENOUGH, SEARCHED, WEIGHT_DECAY]
    constants += [_SCHEDULE, _WARMUP, _CLIP, _CHECKS, _TOKENS]
    known = RECALL[task]
    made_by = [task, dict(known.sizes), known.train, known.test, asdict(recipe), config, constants]
    return short_hash(made_by)


# ---- training ----


def train(run: Run, recipe: Recipe) -> dict[str, float]:
    """Train and test a model.

    Returns:
        ``parameters``, ``steps`` (the updates that were done), ``cpu_minutes`` of these, ``chance``, ``validation``
        and ``validation_loss``, and, unless it is a search, what `accuracies` returns for the tests, of longer
        sequences as ``x2``, ... . Only ``parameters`` if the loss was not finite.
    """
    shape = shape_of(run.task, recipe)
    model: nn.Module = build(run.model, shape, run.seed)
    values: dict[str, float] = {"parameters": model.num_parameters()}  # type: ignore[operator]
    optimizer = torch.optim.AdamW(model.parameters(), lr=float(run.rate), weight_decay=WEIGHT_DECAY)
    separate_ssm_parameters(optimizer, model)
    if run.task == "compression":
        model = Compressor(model, shape.vocab_size)  # type: ignore[arg-type]
        own = [parameter for name, parameter in model.named_parameters() if name.startswith("decoder.")]
        optimizer.add_param_group({"params": own})
    validation = examples(run.task, "validation", VALIDATION, recipe, seed=run.seed)
    steps = run.steps(recipe)
    schedule = get_scheduler(_SCHEDULE, optimizer, math.ceil(_WARMUP * steps), steps)
    began, step = time.process_time(), 0
    for batch in _batches(run, recipe):
        model.train()
        loss = F.cross_entropy(_logits(model, batch).flatten(0, 1), torch.from_numpy(batch.labels).flatten())
        if not math.isfinite(loss.item()):
            return {"parameters": values["parameters"]}
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), _CLIP)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        step += 1
        if step == steps or step % (steps // _CHECKS or 1) == 0:
            found = accuracies(model, validation)
            values |= {"validation": found["accuracy"], "validation_loss": found["loss"]}
            if step == steps or values["validation"] >= ENOUGH:
                break
    values |= {"steps": step, "cpu_minutes": (time.process_time() - began) / 60, "chance": validation.chance}
    return values if run.is_search else values | _tests(model, run, recipe)


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
    rows = (part[places] for part in (kept.input_ids, kept.labels, kept.distances))
    return Examples(*rows, vocab_size=kept.vocab_size, chance=kept.chance, document_ids=documents)


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
    size = max(1, _TOKENS // tested.input_ids.shape[1])
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
        shares[f"at_{least}"] = asked & (tested.distances >= least) & (tested.distances < 2 * least)
    found_shares = {name: float(is_right[where].mean()) for name, where in shares.items() if where.any()}
    return {"loss": loss / int(asked.sum()), **found_shares}


def _tests(model: nn.Module, run: Run, recipe: Recipe) -> dict[str, float]:
    """Test at the length of training and at longer ones, which fill the bins of distances that it does not have."""
    length, count = RECALL[run.task].length, RECALL[run.task].test
    values = accuracies(model, examples(run.task, "test", count, recipe, seed=run.seed))
    for factor in FACTORS:
        fewer = max(16, min(count, _TOKENS // (factor * length)))
        longer = examples(run.task, "test", fewer, recipe, seed=run.seed, length=factor * length)
        found = accuracies(model, longer)
        values[f"x{factor}"] = found["accuracy"]
        values |= {name: share for name, share in found.items() if name.startswith("at_") and name not in values}
    return values


def is_done_by(task: str, model: str) -> bool:
    """Return whether a model does a task: encoder-decoders read documents, the others do everything else.

    Models with another size of the state do `STATE_TASKS` alone.
    """
    kind = MODELS[model]
    if kind.state_of is not None and task not in STATE_TASKS:
        return False
    return kind.is_encoder_decoder == RECIPES[task].is_encoder_decoder


def estimated_minutes(task: str, model: str, recipe: Recipe, updates: int = 3) -> tuple[float, float]:
    """Return the CPU minutes of a search and of a whole run that take all their steps, from the time of a few of them.

    Tests and validation compute outputs alone, a third of an update's work.
    """
    run, known = Run(task, model, 0, "0.001"), RECALL[task]
    network: nn.Module = build(model, shape_of(task, recipe), seed=0)
    network = Compressor(network, shape_of(task, recipe).vocab_size) if task == "compression" else network  # type: ignore[arg-type]
    seconds = []
    for batch, _ in zip(_batches(run, recipe), range(updates), strict=False):
        began = time.process_time()
        F.cross_entropy(_logits(network, batch).flatten(0, 1), torch.from_numpy(batch.labels).flatten()).backward()
        seconds.append(time.process_time() - began)
    row = min(seconds) / recipe.batch / 60
    validated, tested = _CHECKS * VALIDATION / 3, (known.test + len(FACTORS) * _TOKENS / known.length) / 3
    searched, trained = (run.steps(recipe) * recipe.batch for run in (replace(run, is_search=True), run))
    return row * (searched + validated), row * (trained + validated + tested)
