"""Small tests of what a model remembers: seeded, without downloads, each with its source and its published sizes.

`draw` makes the examples of a task of `RECALL`; the functions behind it take every size as an argument.
"""

from hf_hybrid.data.recall.associative import in_context_recall, key_value, mqar
from hf_hybrid.data.recall.copying import compression, memorization, selective_copying
from hf_hybrid.data.recall.examples import NO_DISTANCE, Examples
from hf_hybrid.data.recall.facts import facts
from hf_hybrid.data.recall.far import aggregate, latch, majority
from hf_hybrid.data.recall.needle import needle
from hf_hybrid.data.recall.tasks import RECALL, RecallTask, draw

__all__ = [
    "NO_DISTANCE",
    "RECALL",
    "Examples",
    "RecallTask",
    "aggregate",
    "compression",
    "draw",
    "facts",
    "in_context_recall",
    "key_value",
    "latch",
    "majority",
    "memorization",
    "mqar",
    "needle",
    "selective_copying",
]
